#!/usr/bin/env bash
# `make gpu-check`: everything that only a GPU can show, in under 8 minutes on one GPU. The last
# line counts; what could not run is counted as not run and named, and never as passed. Exit status
# 0 only when nothing failed and nothing but optional tools was left out.
set -u
cd "$(dirname "$0")/.."
root=$PWD
log=$(mktemp) work=$(mktemp -d "${TMPDIR:-/tmp}/unpad-gpu-XXXXXX")
trap 'rm -rf "$log" "$work"' EXIT
passed=0 failed=0 not_run=0 skipped=0
ok() { passed=$((passed + 1)) && echo "ok      $1 ($((SECONDS - start)) s)"; }
bad() { failed=$((failed + 1)) && echo "FAILED  $1" && tail -n 25 "$log"; }
left_out() { not_run=$((not_run + 1)) && echo "NOT RUN $1: $2"; }
check() {       # check NAME LIMIT_S COMMAND...
    local name=$1 limit=$2
    shift 2
    start=$SECONDS
    if timeout "$limit" "$@" > "$log" 2>&1; then ok "$name"; else bad "$name"; fi
    # a suite that skips cases says so in its own last line
    local inner
    inner=$(grep -aoE '[0-9]+ skipped$' "$log" | tail -n 1)
    inner=${inner%% *}
    skipped=$((skipped + ${inner:-0}))
}
finish() {
    echo "$passed passed, $failed failed, $skipped cases skipped, $not_run not run"
    [ "$failed" -eq 0 ] && [ "$not_run" -eq 0 ]
    exit
}

nvidia-smi -L > "$log" 2>&1 || { left_out everything 'no GPU (nvidia-smi -L)'; finish; }
head -n 1 "$log"
make -s -j"$(nproc)" BACKEND=cuda train_llama build/cuda/test_conform build/cuda/test_cuda_kernels \
    build/cuda/test_cuda_attention build/cpu/train_llama > "$log" 2>&1 || { bad build; finish; }

# 1. the wrappers of ptx.cuh: the GPU computes what the emulator said
conform() {
    CONFORM_HASHES=1 build/cuda/test_conform > "$work/conform" && grep '^conform ' "$work/conform" |
        sort > "$work/gpu" && grep '^conform ' dev/emu/conform.txt | sort > "$work/emulated"
    # a GPU without Hopper's instructions skips their lines
    comm -23 "$work/gpu" "$work/emulated" | tee "$work/differ"
    [ -s "$work/gpu" ] && [ ! -s "$work/differ" ]
}
start=$SECONDS
if conform > "$log" 2>&1; then ok conformance; else bad conformance; fi

# 2. kernels beside their CPU twins, properties, 1000 repeats, large sizes
check kernels 120 build/cuda/test_cuda_kernels
check attention 200 env UNPAD_FULL=1 build/cuda/test_cuda_attention

# 3. whole runs beside the CPU backend
check training 200 env TRAIN="$root/build/cuda/train_llama" tests/test_cuda_train.sh

# 4. SmolLM2-135M's dimensions, 200 steps: packed, padded, and the CPU backend for the first 20
long_run() {
    python3 dev/shard.py --dist r65 --tokens 400000 --vocab 49152 --cap 512 --out "$work/shards" &&
        for layout in packed padded; do
            ./train_llama --model smollm2-135m --train "$work/shards" --out "$work/$layout" \
                --max-seqlen 512 --micro-batch-tokens 2048 --steps 200 --layout $layout --lr 3e-4 \
                --val-every 0 --num-samples 0 --boundary-token 0 > "$work/$layout.txt" || return 1
        done
    build/cpu/train_llama --model smollm2-135m --train "$work/shards" --out "$work/cpu" \
        --max-seqlen 512 --micro-batch-tokens 2048 --steps 20 --schedule constant --lr 3e-4 \
        --val-every 0 --num-samples 0 --boundary-token 0 > "$work/cpu.txt" || return 1
    python3 - "$work" <<'PY'
import json, sys
def losses(name):
    return [l["loss"] for l in map(json.loads, open(f"{sys.argv[1]}/{name}/log.jsonl"))
            if "event" not in l]
packed, padded, cpu = losses("packed"), losses("padded"), losses("cpu")
assert len(packed) == len(padded) == 200 and len(cpu) == 20
worst = max(abs(a - b) / a for a, b in zip(packed, padded))
worst_cpu = max(abs(a - b) / b for a, b in zip(packed, cpu))
print(f"packed against padded {worst:.2e}, against the CPU {worst_cpu:.2e}")
assert packed[-1] < packed[0] - 1, (packed[0], packed[-1])
assert worst <= 2**-6 and worst_cpu <= 2**-7     # bf16 rounding, growing over steps
PY
}
start=$SECONDS
if long_run > "$log" 2>&1; then ok "smollm2_135m: $(tail -n 1 "$log")"; else bad smollm2_135m; fi

# 5. compute-sanitizer on small shapes
if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck initcheck synccheck; do
        check "sanitizer_$tool" 100 compute-sanitizer --tool $tool --error-exitcode 9 \
            build/cuda/test_cuda_attention --filter sanitizer
    done
else
    left_out sanitizers 'compute-sanitizer is not installed (package cuda-sanitizer)'
fi
finish
