#!/usr/bin/env bash
# Whole training runs of a tiny model on the CUDA backend, emulated (build/emu/train_llama) or real
# (TRAIN=...), against the CPU backend: the same losses, the same documents, checkpoints that resume
# bit for bit and on the other backend.
. "$(dirname "$0")/lib.sh"
scratch cuda
cuda=${TRAIN:-$root/build/emu/train_llama} cpu=$root/build/cpu/train_llama
export OMP_NUM_THREADS=2
[ -x "$cuda" ] || { bad program "$cuda is not built" && finish; }

tiny_model tiny 64 128 64
uneven_texts text 5
prepare text --out corpus --val-frac 0.1
common=(--model tiny --from-scratch --train corpus --max-seqlen 96 --micro-batch-tokens 256
        --batch-tokens 512 --val-tokens 256 --val-every 2 --num-samples 0 --lr 1e-3
        --warmup-steps 2)

# losses.py OUT...: every loss and gradient norm within bf16 rounding (2^-8) of those of the first
cat > losses.py <<'PY'
import json, sys
runs = [[json.loads(l) for l in open(p + "/log.jsonl")] for p in sys.argv[1:]]
runs = [[l for l in r if "loss" in l] for r in runs]
assert len(runs[0]) >= 7 and all(len(r) == len(runs[0]) for r in runs), [len(r) for r in runs]
for run in runs[1:]:
    for a, b in zip(runs[0], run):
        assert a["step"] == b["step"] and a.get("docs") == b.get("docs"), (a, b)
        assert abs(a["loss"] - b["loss"]) <= 2**-8 * a["loss"], (a, b)
        if "grad_norm" in a:
            assert abs(a["grad_norm"] - b["grad_norm"]) <= 2**-5 * a["grad_norm"], (a, b)
PY
check cpu_4_steps "$cpu" "${common[@]}" --out cpu --steps 4
check packed_4_steps "$cuda" "${common[@]}" --out packed --steps 4 --save-every 2 --keep 0
check packed_losses_match_the_cpu_backend python3 losses.py cpu packed
as_on_cpu() {   # as_on_cpu NAME OPTIONS...: the same for a run with these options
    local name=$1
    shift
    check "${name}_4_steps" "$cuda" "${common[@]}" --out "$name" --steps 4 "$@"
    check "${name}_losses_match_the_cpu_backend" python3 losses.py cpu "$name"
}
as_on_cpu padded --layout padded
as_on_cpu repad --layout repad
as_on_cpu deterministic --deterministic
as_on_cpu sm80 --attention sm80         # the kernels for GPUs before Hopper

if [[ $cuda = *emu* ]]; then
    expect no_sm90_kernels_on_sm_80 2 'error: .*attention' \
        env EMU_ARCH=80 "$cuda" "${common[@]}" --attention sm90 --out refused
fi
check refused_runs_write_nothing test ! -e refused

# --recompute auto: as little as fits, with a 16th of the memory to spare
if [[ $cuda = *emu* ]]; then
    large=("${common[@]}" --micro-batch-tokens 65536 --batch-tokens 65536 --dry-run)
    check plan "$cuda" "${large[@]}"
    totals=$(awk '/^recompute off/ { print "off on", $3, "\non full", $7, "\nfull -", $10 }' out.txt)
    kernels=$(awk '$1 == "kernels" { print $2 }' out.txt)
    while read -r name next total; do
        memory=$(awk "BEGIN { printf \"%d\", 2^20 * ($kernels + ($total - $kernels) * 16 / 15 + 1) }")
        outcome "recompute_auto_$name" 0 "$name [0-9.]+ MiB \(chosen\)" \
            env EMU_MEMORY="$memory" "$cuda" "${large[@]}"
        # 1 MiB less than that leaves too little to spare
        [ "$next" = - ] || outcome "recompute_auto_not_$name" 0 "$next [0-9.]+ MiB \(chosen\)" \
            env EMU_MEMORY=$((memory - (2 << 20))) "$cuda" "${large[@]}"
    done <<< "$totals"
fi

cp -r packed resumed
rm -r resumed/step-00000004 resumed/final
check resume_from_step_2 "$cuda" "${common[@]}" --out resumed --steps 4 --resume
same_state resumed_run_has_the_same_bits {packed,resumed}/step-00000004
cp -r packed crossed
rm -r crossed/step-00000004 crossed/final
check a_cuda_checkpoint_resumes_on_the_cpu "$cpu" "${common[@]}" --out crossed --steps 4 --resume
check crossed_losses_match_the_cpu_backend python3 losses.py cpu crossed
check check_packing "$cuda" "${common[@]}" --check-packing
check compare "$cuda" "${common[@]}" --compare 1
check sample "$cuda" --model packed/final --train corpus --max-seqlen 96 --micro-batch-tokens 256 \
    --out sampled --steps 0 --num-samples 2 --sample-tokens 4 --prompt line --val-every 0
finish
