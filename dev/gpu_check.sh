#!/usr/bin/env bash
# `make gpu-check`: everything that only a GPU can show, in under 8 minutes on one H200. The last
# line counts checks; what could not run is counted as not run and named, and never as passed; test
# cases that a suite skips are named and counted beside. Exit status 0 only when something passed,
# nothing failed and nothing was left out.
set -u
cd "$(dirname "$0")/.." || exit 1
export root=$PWD OMP_WAIT_POLICY=passive    # waiting threads sleep: others need the cores
log=$(mktemp) || exit 1
work=$(mktemp -d "${TMPDIR:-/tmp}/unpad-gpu-XXXXXX") || exit 1
export work
trap 'rm -rf "$log" "$work"' EXIT
running=
trap '[ -z "$running" ] || kill "$running" 2> /dev/null; exit 130' INT TERM
passed=0 failed=0 not_run=0 skipped=0

# launch LIMIT_S COMMAND...: its output in $log, and in $why what went wrong, or nothing
launch() {
    local limit=$1 status
    shift
    start=$SECONDS
    # in the background, because bash heeds Ctrl-C only in `wait`
    timeout -k 10 "$limit" "$@" > "$log" 2>&1 < /dev/null &
    running=$!
    wait "$running"
    status=$?
    running='' why=''
    if [ "$status" -eq 124 ] || { [ "$status" -eq 137 ] && [ $((SECONDS - start)) -ge "$limit" ]; }
    then why="not done after $limit s"
    elif [ "$status" -ne 0 ]; then why="exit code $status"
    fi
}
# verdict NAME TEXT: passed unless there is a $why
verdict() {
    if [ -z "$why" ]; then
        passed=$((passed + 1))
        echo "ok      $1: ${2:+$2, }$((SECONDS - start)) s"
    else
        failed=$((failed + 1))
        echo "FAILED  $1: $why, $((SECONDS - start)) s"
        grep -avE '^ok ' "$log" | tail -n 40
    fi
}
check() {       # check NAME LIMIT_S COMMAND...
    launch "${@:2}"
    verdict "$1" ''
}
# The same for a program that counts its cases in a last line of its own, without which, and with no
# case passed, nothing has been shown
suite() {       # suite NAME LIMIT_S COMMAND...
    launch "${@:2}"
    finish_suite "$1"
}
finish_suite() {
    local counts=''
    counts=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -n 1)
    if [[ $counts =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        skipped=$((skipped + BASH_REMATCH[3]))
        if [ -z "$why" ] && [ "${BASH_REMATCH[2]}" -ne 0 ]; then why='cases failed'; fi
        if [ -z "$why" ] && [ "${BASH_REMATCH[1]}" -eq 0 ]; then why='no case passed'; fi
    elif [ -z "$why" ]; then
        why='no last line with counts'
    fi
    verdict "$1" "$counts"
    # what was skipped and why, and what cases say of themselves
    [ -n "$why" ] || grep -aE '^    |^skipped ' "$log"
}
left_out() {    # left_out NAME REASON
    not_run=$((not_run + 1))
    echo "NOT RUN $1: $2"
}
finish() {
    echo "$SECONDS s in all"
    echo "$passed passed, $failed failed, $skipped cases skipped, $not_run not run"
    [ "$passed" -gt 0 ] && [ "$failed" -eq 0 ] && [ "$not_run" -eq 0 ]
    exit
}

launch 60 nvidia-smi -L
if [ -n "$why" ] || ! grep -q '^GPU ' "$log"; then
    left_out everything 'no GPU (nvidia-smi -L)'
    finish
fi
head -n 1 "$log"
check build 400 make -s -j"$(nproc)" BACKEND=cuda train_llama build/cuda/test_conform \
    build/cuda/test_cuda_kernels build/cuda/test_cuda_attention build/cuda/test_cuda_graph \
    build/cuda/test_cuda_nccl build/cpu/train_llama
if [ -n "$why" ]; then
    left_out 'everything else' 'the build failed'
    finish
fi

# 1. the wrappers of ptx.cuh: the GPU computes what the emulator said; a GPU without Hopper's
#    instructions skips their cases
suite conformance 60 build/cuda/test_conform

# 2. kernels beside their CPU references, properties, 1000 repeats, large sizes
suite kernels 120 build/cuda/test_cuda_kernels
suite graph 60 build/cuda/test_cuda_graph
suite attention 480 env UNPAD_FULL=1 build/cuda/test_cuda_attention

# 3. whole runs beside the CPU backend
suite training 200 env TRAIN="$root/build/cuda/train_llama" tests/test_cuda_train.sh

# 4. NCCL's calls by one rank; with more GPUs, several ranks
gpus=$(nvidia-smi -L | grep -c '^GPU ')
if [ ! -e build/cuda/nccl-found ]; then
    left_out nccl 'built without NCCL (apt-get install libnccl2 libnccl-dev)'
else
    suite nccl 60 build/cuda/test_cuda_nccl
fi
if [ "$gpus" -ge 2 ] && [ -e build/cuda/nccl-found ]; then
    suite ranks 200 env TRAIN="$root/build/cuda/train_llama" \
        RANKS="2$([ "$gpus" -ge 4 ] && echo ' 4')" tests/test_cuda_ranks.sh
else
    echo "        several ranks are for a machine with more GPUs and NCCL"
fi

# 5. SmolLM2-135M's dimensions, 200 steps: packed, padded, and the CPU backend, meanwhile, for the
#    first 20, which are all warm-up
long_run() {
    local common=(--model smollm2-135m --train "$work/shards" --max-seqlen 512
        --micro-batch-tokens 2048 --lr 3e-4 --val-every 0 --num-samples 0 --boundary-token 0)
    local cpu layout
    python3 dev/shard.py --dist r65 --tokens 400000 --vocab 49152 --cap 512 --out "$work/shards" ||
        return 1
    build/cpu/train_llama "${common[@]}" --out "$work/cpu" --steps 20 --schedule constant \
        > "$work/cpu.txt" 2>&1 &
    cpu=$!
    for layout in packed padded; do
        build/cuda/train_llama "${common[@]}" --out "$work/$layout" --steps 200 --layout "$layout" \
            > "$work/$layout.txt" 2>&1 ||
            { tail -n 12 "$work/$layout.txt"; kill "$cpu"; return 1; }
    done
    wait "$cpu" || { tail -n 12 "$work/cpu.txt"; return 1; }
    python3 - "$work" << 'PY'
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
export -f long_run
launch 180 bash -c long_run
verdict smollm2_135m "$(tail -n 1 "$log")"
rm -rf "${work:?}"/*                        # checkpoints of some GB

# 6. compute-sanitizer on small shapes. Races inside cuBLASLt's kernels are not ours to find.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
sanitized() {   # sanitized TOOL PROGRAM FILTER
    launch 100 "$sanitizer" --tool "$1" --error-exitcode 9 "build/cuda/test_cuda_$2" --filter "$3"
    if [ -z "$why" ] && ! grep -qaE '^=+ (ERROR|RACECHECK) SUMMARY: 0 ' "$log"; then
        why='no summary without errors'
    fi
    finish_suite "$1_$2"
}
if [ -x "$sanitizer" ]; then
    for tool in memcheck initcheck racecheck synccheck; do
        filter=sanitizer
        case $tool in racecheck | synccheck) filter=sanitizer_ops ;; esac
        sanitized "$tool" attention sanitizer
        sanitized "$tool" kernels "$filter"
    done
else
    left_out sanitizers 'compute-sanitizer is not installed (package cuda-sanitizer)'
fi
finish
