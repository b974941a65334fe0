#!/usr/bin/env bash
# Whole training runs of a tiny model on the CUDA backend, emulated (build/emu/train_llama) or real
# (TRAIN=...), beside the CPU backend: the same losses, the same documents, checkpoints that go on
# bit for bit and cross from one backend to the other.
set -u
cd "$(dirname "$0")/.."
root=$PWD
cuda=${TRAIN:-$root/build/emu/train_llama} cpu=$root/build/cpu/train_llama
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
. "$root/tests/lib.sh"
scratch cuda
[ -x "$cuda" ] || { bad "no_program: $cuda" && finish; }

tiny_model tiny 64 128 64
uneven_texts text 5
python3 "$root/data/prepare.py" text --out corpus --val-frac 0.1 > out.txt 2>&1 || bad prepare
common=(--model tiny --from-scratch --train corpus --max-seqlen 96 --micro-batch-tokens 256
        --batch-tokens 512 --val-tokens 256 --val-every 5 --num-samples 0 --lr 1e-3
        --warmup-steps 2)

# losses OUT...: every loss and gradient norm of the logs within bf16 rounding (2^-8) of the first's
cat > losses.py <<'PY'
import json, sys
runs = [[json.loads(l) for l in open(p + "/log.jsonl")] for p in sys.argv[1:]]
runs = [[l for l in r if "loss" in l] for r in runs]
assert len(runs[0]) >= 10 and all(len(r) == len(runs[0]) for r in runs), [len(r) for r in runs]
for run in runs[1:]:
    for a, b in zip(runs[0], run):
        assert a["step"] == b["step"] and a.get("docs") == b.get("docs"), (a, b)
        assert abs(a["loss"] - b["loss"]) <= 2**-8 * a["loss"], (a, b)
        if "grad_norm" in a:
            assert abs(a["grad_norm"] - b["grad_norm"]) <= 2**-5 * a["grad_norm"], (a, b)
PY
check cpu_10_steps "$cpu" "${common[@]}" --out cpu --steps 10
check packed_10_steps "$cuda" "${common[@]}" --out packed --steps 10 --save-every 5 --keep 0
check packed_losses_are_the_cpu_backends python3 losses.py cpu packed
check padded_10_steps "$cuda" "${common[@]}" --out padded --steps 10 --layout padded
check padded_losses_are_the_cpu_backends python3 losses.py cpu padded
check repad_10_steps "$cuda" "${common[@]}" --out repad --steps 10 --layout repad
check repad_losses_are_the_cpu_backends python3 losses.py cpu repad
check in_order_10_steps "$cuda" "${common[@]}" --out order --steps 10 --deterministic
check in_order_losses_are_the_cpu_backends python3 losses.py cpu order

# The kernels for GPUs before Hopper, on any GPU
check sm80_10_steps "$cuda" "${common[@]}" --out sm80 --steps 10 --attention sm80
check sm80_losses_are_the_cpu_backends python3 losses.py cpu sm80

# Micro-batches as one graph: one recording for all documents, losses as without it
graph=("${common[@]}" --cuda-graph)
check graph_10_steps "$cuda" "${graph[@]}" --out graph --steps 10 --save-every 5 --keep 0
cp out.txt graph.txt
check one_graph_for_all_documents grep 'graph: 1 recorded, 19 of 20 micro-batches' graph.txt
check graph_losses_are_the_cpu_backends python3 losses.py cpu packed graph
cp -r graph regraph
rm -r regraph/step-00000010 regraph/final
check graph_resume_from_step_5 "$cuda" "${graph[@]}" --out regraph --steps 10 --resume
check resumed_graph_has_the_same_bits cmp {graph,regraph}/step-00000010/model.safetensors
refused() {     # refused NAME WORDS COMMAND...: a usage error that says WORDS
    local name=$1 words=$2
    shift 2
    "$@" --out refused > out.txt 2>&1
    if [ $? -eq 2 ] && grep -q "error: .*$words" out.txt && [ ! -e refused ]; then ok "$name"
    else bad "$name"; fi
}
refused no_graph_on_the_cpu 'this is the CPU backend' "$cpu" "${graph[@]}"
refused no_graph_of_padded_rows 'with --layout packed' "$cuda" "${graph[@]}" --layout padded

if [[ $cuda = *emu* ]]; then
    export EMU_ARCH=80
    refused no_sm90_kernels_on_sm_80 'attention' "$cuda" "${common[@]}" --attention sm90
    unset EMU_ARCH
fi

cp -r packed resumed
rm -r resumed/step-00000010 resumed/final
check resume_from_step_5 "$cuda" "${common[@]}" --out resumed --steps 10 --resume
for f in model.safetensors optimizer.safetensors; do
    check "resumed_run_has_the_same_bits_$f" cmp {packed,resumed}/step-00000010/$f
done
# A cuBLASLt that has changed its mind: the algorithms are those of the checkpoint, by when every
# range of lengths has come. It has other bits
# indeed, or this would show nothing; and a checkpoint of another GPU says that they may differ.
if [[ $cuda = *emu* ]]; then
    check other_algorithm_10_steps env EMU_LT_ALGO=1 \
        "$cuda" "${common[@]}" --out algo --steps 10 --save-every 5 --keep 0
    check algorithms_are_saved test -f algo/step-00000005/matmul.txt
    differ other_algorithm_has_other_bits {packed,algo}/step-00000010/model.safetensors
    cp -r algo repeated
    rm -r repeated/step-00000010 repeated/final
    check resume_repeats_algorithms "$cuda" "${common[@]}" --out repeated --steps 10 --resume
    cp out.txt repeated.txt
    check repeated_algorithms_have_the_same_bits \
        cmp {algo,repeated}/step-00000010/model.safetensors
    EMU_ARCH=80 timeout "$limit_s" "$cuda" "${common[@]}" --out repeated --steps 10 --resume > other.txt 2>&1
    check another_gpu_is_said grep 'warning: .*matmul.txt: .*may not be bit-identical' other.txt
    lacks the_same_gpu_is_not 'warning: .*matmul' repeated.txt
fi
cp -r packed crossed
rm -r crossed/step-00000010 crossed/final
check a_cuda_checkpoint_goes_on_on_the_cpu "$cpu" "${common[@]}" --out crossed --steps 10 --resume
check crossed_losses_are_the_cpu_backends python3 losses.py cpu crossed
check check_packing "$cuda" "${common[@]}" --check-packing
check compare "$cuda" "${common[@]}" --compare --compare-steps 1
check sample "$cuda" --model packed/final --train corpus --max-seqlen 96 --micro-batch-tokens 256 \
    --out sampled --steps 0 --num-samples 2 --sample-tokens 4 --prompt line --val-every 0
finish
