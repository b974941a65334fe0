#!/usr/bin/env bash
# Whole training runs of a tiny model on the CUDA backend, emulated (build/emu/train_llama) or real
# (TRAIN=...), of every type, against the CPU backend: the same losses, the same documents, checkpoints that
# resume bit for bit and on the other backend. ONE_RUN=yes: only the first of them. The probe of kernels.
. "$(dirname "$0")/lib.sh"
cuda=${TRAIN:-$root/build/emu/train_llama} cpu=$root/build/cpu/train_llama
export OMP_NUM_THREADS=2
tiny_model tiny 64 128 64
corpus 5
common=(--model tiny --from-scratch --train corpus --max-seqlen 96 --micro-batch-tokens 128
        --batch-tokens 256 --val-tokens 128 --val-every 3 --num-samples 0 --lr 1e-3
        --warmup-steps 1 --ledger)
# near NAME RUN [CPU_RUN]: within bf16 rounding of the CPU's
near() { same_losses "$1" 0.00390625 0.03125 4 "${3:-cpu}" "$2"; }
check cpu_3_steps "$cpu" "${common[@]}" --out cpu --steps 3
check packed_3_steps "$cuda" "${common[@]}" --out packed --steps 3 --save-every 2 --keep 0
near packed_losses_match_the_cpu_backend packed
PYTHONPATH=$root/scripts check_python documents_have_the_losses_of_the_cpu_backend << 'PY'
import ledger
cuda, cpu = ([(kind, step, *e) for kind, step, entries in ledger.blocks(run + "/ledger.bin") for e in entries]
             for run in ("packed", "cpu"))
assert len(cuda) == len(cpu) > 9, (len(cuda), len(cpu))
for a, b in zip(cuda, cpu):
    assert a[:4] == b[:4] and a[5:] == b[5:] and abs(a[4] - b[4]) <= 0.02 * b[4], (a, b)
PY
[ -z "${ONE_RUN:-}" ] || finish
# two steps are enough to see an update, and in the emulator one start to see the probe
named=("$cuda" "${common[@]}" --attention "$([ "${TRAIN:-}" ] && echo auto || echo sm90)")
check cpu_2_steps "$cpu" "${common[@]}" --out cpu2 --steps 2
as_on_cpu() {   # as_on_cpu NAME OPTIONS...: near cpu2, or $cpu_run, with these options
    EMU_TRACE=1 check "$1_2_steps" "${named[@]}" --out "$1" --steps 2 "${@:2}"
    launches=$(grep -c '^EMU TRACE' out.txt)
    near "$1_losses_match_the_cpu_backend" "$1" "${cpu_run:-cpu2}"
}
both() {        # both NAME 'OPTIONS' MORE...: near a run of the CPU with the first options
    check "cpu_$1_2_steps" "$cpu" "${common[@]}" $2 --out "cpu_$1" --steps 2
    cpu_run=cpu_$1 as_on_cpu "$1" $2 "${@:3}"
}
as_on_cpu padded --layout padded
as_on_cpu repad --layout repad
tiny_model odd 64 128 64 266            # no multiple of 8: the head has 272 rows
both odd '--model odd' --deterministic
as_on_cpu sm80 --attention sm80         # the kernels for GPUs before Hopper
adamw_launches=$launches
# the other types: that they compute what transformers does is shown by the goldens
while IFS='|' read -r type keys; do
    cp -r tiny $type && edit $type/config.json "j.update(model_type='$type', $keys)"
    both $type "--model $type" --recompute on
done << 'TYPES'
qwen2|architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=False
qwen3|architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False
mistral|architectures=["MistralForCausalLM"], sliding_window=96, rope_scaling=dict(rope_type="linear", factor=2)
smollm3|architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1, 0], rope_scaling=dict(rope_type="yarn", factor=4)
TYPES
cpu_run=cpu_smollm3 as_on_cpu smollm3_on_sm80 --model smollm3 --attention sm80
has the_window_is_written_back '"sliding_window": 96' cpu_mistral/final/config.json
# documents that begin alike: what they share once is what packed computes for each
mkdir alike
for i in 1 2 3 4 5 6; do (printf 'the same words, %.0s' {1..10}; seq $i $((i * 9))) > alike/$i; done
prepare alike --out alike.bin
alike=(--train alike.bin --max-seqlen 256 --micro-batch-tokens 512 --batch-tokens 512 --val-every 0)
check cpu_packed_2_steps "$cpu" "${common[@]}" "${alike[@]}" --out cpu_alike --steps 2
for kernels in "${named[-1]}" sm80; do
    check shared_2_steps_$kernels "$cuda" "${common[@]}" "${alike[@]}" --out shared_$kernels --steps 2 --layout shared \
        --attention $kernels
    has shared_prefixes_are_in_the_data_$kernels '^shared prefixes: [1-9][0-9] %' out.txt
    same_losses shared_losses_match_packed_on_the_cpu_$kernels 0.00390625 0.03125 2 cpu_alike shared_$kernels
done
for i in {1..20}; do echo "{\"prompt\": \"p$i\", \"chosen\": \"yes\", \"rejected\": \"no $i\"}"; done > pairs.jsonl
check pairs "$cpu" --train pairs.jsonl --preference dpo --out boot --steps 0 --num-samples 0
both preference '--preference dpo --train boot/tokens --micro-batch-tokens 192 --batch-tokens 384'
both muon '--optimizer muon' --attention sm80
[[ $cuda != *emu* ]] || check muon_updates_all_layers_at_once \
    test $((launches - adamw_launches)) -le $((2 * 7 * 20)) -a "$launches" -gt "$adamw_launches" # 7 kinds of matrices
cp -r packed resumed && rm -r resumed/{step-00000003,final}
check resume_from_step_2 "${named[@]}" --out resumed --steps 3 --resume
same_state resumed_run_has_the_same_bits {packed,resumed}/step-00000003
cp -r packed crossed && rm -r crossed/{step-00000003,final}
check a_cuda_checkpoint_resumes_on_the_cpu "$cpu" "${common[@]}" --out crossed --steps 3 --resume
near crossed_losses_match_the_cpu_backend crossed
check check_packing "${named[@]}" --check-packing
check compare "${named[@]}" --compare 1
check sample "$cuda" --model packed/final --train corpus --max-seqlen 96 --micro-batch-tokens 256 \
    --out sampled --steps 0 --num-samples 2 --sample-tokens 4 --prompt line --val-every 0
[[ $cuda = *emu* ]] || finish
EMU_ARCH=120 EMU_RUNTIME=12060 expect an_old_toolkit_on_a_new_gpu 11 'sm_120 needs CUDA 12.8; .* 12.6' \
    "$cuda" "${common[@]}" --out refused
EMU_ARCH=100 outcome sm_100_runs_kernels_of_sm_80 0 'attention sm80 .made for older GPUs' "$cuda" "${common[@]}" --dry-run
expect no_sm90_kernels_on_sm_80 2 'error: .*attention' env EMU_ARCH=80 "$cuda" "${common[@]}" --attention sm90 --out refused
# --recompute auto: as little as fits, with a 16th of the memory to spare
large=("${common[@]}" --micro-batch-tokens 65536 --batch-tokens 65536 --dry-run)
check plan "$cuda" "${large[@]}"
totals=$(awk '/^recompute off/ { print "off on", $3, "\non full", $7, "\nfull -", $10 }' out.txt)
kernels=$(awk '$1 == "kernels" { print $2 }' out.txt)
while read -r name next total; do
    memory=$(awk "BEGIN { printf \"%d\", 2^20 * ($kernels + ($total - $kernels) * 16 / 15 + 1) }")
    outcome "recompute_auto_$name" 0 "$name [0-9.]+ MiB \(chosen\)" env EMU_MEMORY="$memory" "$cuda" "${large[@]}"
    # 1 MiB less than that leaves too little to spare
    [ "$next" = - ] || outcome "recompute_auto_not_$name" 0 "$next [0-9.]+ MiB \(chosen\)" \
        env EMU_MEMORY=$((memory - (2 << 20))) "$cuda" "${large[@]}"
done <<< "$totals"
# the page cache of an integrated device is not used memory
EMU_PAGE_CACHE=$(((8191 - ${kernels%.*}) << 20)) expect an_integrated_device 0 '^done' \
    "$cuda" "${common[@]}" --out integrated --steps 0 --val-every 0
# shapes that the kernels do not have: refused before anything is read, made or written
while IFS='|' read -r key value expected what; do
    mkdir -p refused-model && sed "s/\"$key\": [0-9]*/\"$key\": $value/" tiny/config.json > refused-model/config.json
    expect "no_${key}_$value" 11 "^error: config.json: $key: expected $expected .*, found $value" \
        "$cuda" $what --model refused-model
done << SIZES
hidden_size|60|a multiple of 8|${common[*]} --out refused
hidden_size|16392|at most 16384|${common[*]} --dry-run
intermediate_size|100|a multiple of 8|--generate --prompt x
head_dim|48|64 or 128|--eval --val corpus
SIZES
check what_is_refused_writes_nothing test ! -e refused
# ---- the probe of Hopper's attention at the start of a run: kernels that are wrong, crash or hang
# (tests/run_fault.c) are replaced by sm_80's, with a warning, and the run continues
uneven_texts texts 20 && prepare texts --out corpus20 --val-frac 0.1
probed() {      # probed OPTION...
    "${cuda}_faulty" --model tiny --from-scratch --train corpus20 --max-seqlen 200 --micro-batch-tokens 256 \
        --batch-tokens 256 --val-every 0 --num-samples 0 --steps 1 "$@" < /dev/null
}
WRONG_ATTENTION=hang probed --out hang > hang.txt 2>&1 &     # half a minute, beside all others
check older_kernels probed --attention sm80 --out older
outcome right 0 'attention sm90' probed --out right
lacks right_without_a_warning '^warning: the attention' out.txt
differ sm90_has_other_bits {older,right}/step-00000001/model.safetensors
EMU_EXCLUSIVE=$work/lock outcome no_gpu_left_to_probe 0 'attention sm90' probed --out left
WRONG_ATTENTION=signal outcome probe_ended_by_a_signal 0 'attention sm90' probed --out ended
WRONG_ATTENTION=crash outcome no_probe_where_nothing_is_trained 0 'attention sm90' probed --dry-run
lacks nothing_is_said_of_it '^warning: the attention' out.txt
CUDA_INJECTION64_PATH=x outcome no_other_path_under_a_profiler 0 \
    '^warning: the attention kernels of sm90 run without having been probed: a profiler' probed --out watched
same_state watched_has_the_bits_of_sm90 {right,watched}/step-00000001
# wrong NAME WORDS: what the run with this fault says, and whose kernels it takes
wrong() {
    has "$1" "^warning: the attention kernels of sm90 $2 on this GPU; sm80's" "$1.txt"
    same_state "$1_has_the_bits_of_sm80" {older,"$1"}/step-00000001
}
while read -r name words; do
    WRONG_ATTENTION=$name probed --out "$name" > "$name.txt" 2>&1
    wrong "$name" "$words"
done << 'WRONG'
result give other results than those of sm80
gradient give other results than those of sm80
crash fail
WRONG
WRONG_ATTENTION=crash outcome no_probe_of_sm80 0 'attention sm80' probed --attention sm80 --out other
lacks sm80_without_a_warning '^warning: the attention' out.txt
wait
wrong hang 'do not return'
finish
