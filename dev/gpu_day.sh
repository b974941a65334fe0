#!/usr/bin/env bash
# `make gpu-day`: all that needs a GPU, in parts of less than ten minutes each.
#   dev/gpu_day.sh [PART...]      make gpu-day PARTS="check runs"; default: all, in this order
#     check      make check: every operation of tests/ops.h; the wrappers of ptx.cuh, tensor cores
#     runs       whole runs against the CPU backend, NCCL, SmolLM2-135M's dimensions for 200 steps
#     sanitizer  compute-sanitizer on small shapes
#     bench      steps of every layout, with the clock sampled
#     peers      PyTorch on the same documents (PYTHON=... names an interpreter that has it)
#   OUT=DIR      where each part writes PART.txt; default dev/results/gpu-DATE
# A check that could not run is named and fails the day. Exit status: 0 if all ran and passed;
# 2: no such part, or nvcc or a package is missing; 11: no GPU, nothing was run; otherwise 1.
set -u
cd "$(dirname "$0")/.." || exit 1
export root=$PWD bin=build/cuda OMP_WAIT_POLICY=passive    # waiting threads sleep
parts=(check runs sanitizer bench peers) passed=0 failed=0
out=${OUT:-dev/results/gpu-$(date +%Y-%m-%d)} python=${PYTHON:-python3}
work=$(mktemp -d "${TMPDIR:-/tmp}/unpad-gpu-XXXXXX") || exit 1
export work log=$work/log
trap 'rm -rf "$work"' EXIT

# check NAME LIMIT_S COMMAND...: passes if it exits with 0 within this time and what is left of the
# part's; a suite prints its totals, other commands what matches $shown
check() {
    local name=$1 limit=$2 began=$SECONDS status left=$((deadline - SECONDS))
    shift 2
    [ "$limit" -le $left ] || limit=$((left > 0 ? left : 1))
    timeout -k 10 "$limit" "$@" > "$log" 2>&1 < /dev/null
    status=$?
    grep -aq '^0 passed, ' "$log" && status=1    # all was skipped
    if [ $status -eq 0 ]; then
        passed=$((passed + 1)) && echo "ok      $name: $((SECONDS - began)) s"
        grep -aE "${shown:-^skipped |^[0-9]+ passed, }" "$log"
    else
        failed=$((failed + 1))
        echo "FAILED  $name: exit code $status after $((SECONDS - began)) s (124: out of time)"
        grep -avE '^ok ' "$log" | tail -n 40
    fi
    return $status
}
missing() { failed=$((failed + 1)) && echo "NOT RUN $1: $2"; }
# built TARGET...: false when the build failed
built() { check build 500 make -s -j"$(nproc)" BACKEND=cuda "$@"; }
# figures NAME LIMIT_S COMMAND...: with the GPU's clock while it ran
figures() {
    local sampler shown=.
    "${smi[@]}" --query-gpu=clocks.sm,power.draw -lms 200 > "$work/clock" &
    sampler=$!
    printf '\n$ %s\n' "${*:3}"
    check "$@"
    kill $sampler && wait $sampler 2> /dev/null
    sort -n "$work/clock" | awk -F, '{ mhz[NR] = $1; w = $2 + 0 > w ? $2 + 0 : w }
        END { printf "clock   %d MHz (median), at most %.0f W\n", mhz[int((NR + 1) / 2)], w }'
}

part_check() {
    built $bin/test_conform $bin/test_tensor_cores || return
    check operations 400 make check BACKEND=cuda
    for suite in conform tensor_cores; do check $suite 200 $bin/test_$suite; done
}

part_runs() {
    built $bin/train_llama build/cpu/train_llama $bin/test_cuda_nccl || return
    export TRAIN=$root/$bin/train_llama
    check training 300 tests/test_cuda_train.sh
    check nccl 60 $bin/test_cuda_nccl
    [ "$(nvidia-smi -L | grep -c '^GPU ')" -lt 2 ] ||
        check ranks 200 env -u CUDA_VISIBLE_DEVICES RANKS=2 tests/test_cuda_ranks.sh
    unset TRAIN && export -f long_run
    shown='^losses agree' check long_run 180 bash -c long_run
}

# 200 steps packed and padded, and at the same time the CPU backend for the first 20
long_run() {
    local common=(--model smollm2-135m --train "$work/shards" --max-seqlen 512
        --micro-batch-tokens 2048 --lr 3e-4 --schedule constant --warmup-steps 20 --val-every 0 --num-samples 0
        --boundary-token 0) layout
    dev/bench.py --write "$work/shards" --dist r65 --tokens 409600 --cap 512 --vocab 49152 || return
    mkdir "$work/first"
    build/cpu/train_llama "${common[@]}" --out "$work/cpu" --steps 20 > "$work/cpu.txt" 2>&1 &
    for layout in packed padded; do
        $bin/train_llama "${common[@]}" --out "$work/$layout" --steps 200 --layout $layout || return
    done
    wait $! || { tail -n 12 "$work/cpu.txt"; return 1; }
    head -n 21 "$work/packed/log.jsonl" > "$work/first/log.jsonl"
    python3 tests/runs.py 0.0156 1 200 "$work/packed" "$work/padded" && # bf16 rounding grows
        python3 tests/runs.py 0.0078 1 20 "$work/cpu" "$work/first" && echo 'losses agree'
}

part_sanitizer() {
    local tool
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    [ -x "$sanitizer" ] || { missing sanitizers 'compute-sanitizer is not installed' && return; }
    "$sanitizer" --version | tail -n 1      # before 2026.3 racecheck has false alarms on Hopper
    built $bin/test_ops || return
    for tool in memcheck initcheck racecheck synccheck; do    # not in cuBLASLt's kernels
        check $tool 120 "$sanitizer" --tool $tool --error-exitcode 9 --target-processes all \
            --kernel-name-exclude kns=gemm --kernel-name-exclude kns=cutlass \
            --kernel-name-exclude kns=nvjet $bin/test_ops --quick
    done
}

part_bench() {
    built train_llama $bin/test_ops || return
    figures operations 200 make -s bench-ops BACKEND=cuda
    for documents in '--dist r65 --tokens 16384' '--dist r65 --tokens 32768 --cap 2048' \
        '--lengths 32x2048' '--dist seed'; do       # 80 GB hold the padded ones without recompute
        # shellcheck disable=SC2086
        figures "layouts ${documents#--}" 120 dev/bench.py --model smollm2-135m --steps 9 $documents
    done
}

part_peers() {
    built train_llama || return
    "$python" -c 'import torch' 2> /dev/null || { missing peers 'no PyTorch' && return; }
    local peers=(dev/peers.py --device cuda --model smollm2-135m --dtype bf16)
    figures r65 300 "$python" "${peers[@]}" --dist r65
    figures seed 200 "$python" "${peers[@]}"
}

[ $# -gt 0 ] || set -- "${parts[@]}"
for part in "$@"; do
    [[ " ${parts[*]} " == *" $part "* ]] && continue
    printf 'error: %s: no such part, expected %s\nhint: see the head of %s\n' "$part" "${parts[*]}" \
        "$0" >&2
    exit 2
done
nvidia-smi -L 2> /dev/null | grep -q '^GPU ' ||
    { echo 'no GPU (nvidia-smi -L): nothing was run' && exit 11; }
PATH=$PATH:/usr/local/cuda/bin && scripts/setup.sh g++=g++ || exit 2
command -v nvcc > /dev/null || { echo 'nvcc is missing' && exit 2; }
# One GPU, but for ranks; nvidia-smi counts in PCI order. Loaded drivers start in less time.
export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
nvidia-smi -pm 1 > /dev/null 2>&1
smi=(nvidia-smi -i "${CUDA_VISIBLE_DEVICES%%,*}" '--format=csv,noheader')
arch=$("${smi[@]}" --query-gpu=compute_cap | tr -d .)
if [ -z "${CUDA_ARCHS:-}" ] && nvcc --list-gpu-arch | grep -qx "compute_$arch"; then
    export CUDA_ARCHS=${arch/#90/90a}       # this GPU's alone: minutes less
fi
mkdir -p "$out" || exit 1
for part in "$@"; do
    deadline=$((SECONDS + 540))
    {
        echo "part     $part, $(date +%Y-%m-%d), commit $(git rev-parse --short HEAD 2> /dev/null)"
        echo "gpu      $("${smi[@]}" --query-gpu=name,driver_version,clocks.max.sm,power.limit)"
        "part_$part"
        echo "$passed passed, $failed failed so far"
    } > >(tee "$out/$part.txt") 2>&1
done
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
