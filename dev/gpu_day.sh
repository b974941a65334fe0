#!/usr/bin/env bash
# `make gpu-day`: all checks and measurements that need a GPU, in parts of less than ten minutes.
#
#   dev/gpu_day.sh [PART...]      make gpu-day PARTS="build kernels"; default: all, in this order
#     build      the build for this GPU; the wrappers of ptx.cuh: the same bits as the emulator's
#     kernels    kernels against their CPU references, properties, 1000 repeats, large sizes
#     runs       whole runs against the CPU backend, of other types of model too; NCCL;
#                SmolLM2-135M's dimensions, 200 steps
#     sanitizer  compute-sanitizer on small shapes
#     guesses    measurements that replace the largest guesses of dev/gpu_model
#     bench      attention, and steps of every layout, with the clock sampled
#     peers      PyTorch (if installed) on the same documents
#     training   real text packed, in rows and padded, at equal time and tokens (dev/training.py)
#     pretrain   SmolLM2-135M from scratch on 100 million tokens of real text: bytes
#   OUT=DIR      where each part writes PART.txt; default dev/results/gpu-DATE
#   DRY=1        without a GPU: what the emulated build can run, in dry-PART.txt; measures nothing
#
# A part's last line counts checks. A check that could not run is named and counted as not run,
# never as passed. Exit status: 0 if something passed, nothing failed and every check ran; 11 without
# a GPU, when nothing runs and nothing is written; otherwise 1.
set -u
cd "$(dirname "$0")/.." || exit 1
export root=$PWD OMP_WAIT_POLICY=passive    # waiting threads sleep: others need the cores
PARTS=(build kernels runs sanitizer guesses bench peers training pretrain)
part_limit_s=${PART_LIMIT_S:-520}
dry=${DRY:-} python=${PYTHON:-python3}
out=${OUT:-dev/results/gpu-$(date +%Y-%m-%d)}
if [ -n "$dry" ]; then backend=emu; else backend=cuda; fi
export bin=build/$backend

passed=0 failed=0 not_run=0 skipped=0 running=''
work=$(mktemp -d "${TMPDIR:-/tmp}/unpad-gpu-XXXXXX") || exit 1
log=$work/log
export work
trap 'rm -rf "$work"' EXIT
trap '[ -z "$running" ] || kill "$running" 2> /dev/null; exit 130' INT TERM

# ------------------------------------------------------------------------------------------------
# Checks

# launch LIMIT_S COMMAND...: output in $log; $why is the reason of a failure, or empty. The limit is
# at most what the part has left.
launch() {
    local limit=$1 status left=$((deadline - SECONDS))
    shift
    start=$SECONDS why=''
    if [ $left -le 0 ]; then
        why="the part's $part_limit_s s are over" && : > "$log"
        return
    fi
    [ "$limit" -le $left ] || limit=$left
    # in the background, because bash handles Ctrl-C only in `wait`
    timeout -k 10 "$limit" "$@" > "$log" 2>&1 < /dev/null &
    running=$!
    wait "$running"
    status=$? running=''
    if [ "$status" -eq 124 ] || { [ "$status" -eq 137 ] && [ $((SECONDS - start)) -ge "$limit" ]; }
    then why="not done after $limit s"
    elif [ "$status" -ne 0 ]; then why="exit code $status"
    fi
}
# verdict NAME TEXT: passed unless $why is set
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
# The same for a program whose last line counts its cases; without that line, or without a passed
# case, it fails
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
    # skipped cases with their reasons, and figures printed by cases
    [ -n "$why" ] || grep -aE '^    |^skipped ' "$log"
}
# figures NAME LIMIT_S COMMAND...: prints the command's output, or its lines that match $shown, with
# the clock sampled
figures() {
    printf '\n$ %s\n' "${*:3}"
    launch "$2" python3 dev/gpu_clock.py "${@:3}"
    [ -n "$why" ] || grep -aE "${shown:-}" "$log"
    verdict "$1" ''
}
left_out() {    # left_out NAME REASON
    not_run=$((not_run + 1))
    echo "NOT RUN $1: $2"
}
# built TARGET...: false when the build failed
built() {
    check build 500 make -s -j"$(nproc)" BACKEND="$([ -n "$dry" ] && echo cpu || echo cuda)" "$@"
    [ -z "$why" ]
}

# ------------------------------------------------------------------------------------------------
# Parts

part_build() {
    local programs=(test_conform test_layout test_tensor_cores train_llama)
    [ -n "$dry" ] || programs+=(test_cuda_kernels test_cuda_attention test_cuda_graph
        test_cuda_nccl bench_guesses bench_attention_cuda)
    built "${programs[@]/#/$bin/}" build/cpu/train_llama || return
    # a GPU without Hopper's instructions skips their cases
    suite conformance 60 $bin/test_conform
    suite layouts 60 $bin/test_layout
    suite tensor_cores 240 $bin/test_tensor_cores
    check hashes 60 env CONFORM_HASHES=1 $bin/test_conform
    [ -n "$why" ] || grep -a '^conform ' "$log"
}

part_kernels() {
    local some_kernels='' some_graphs='' some_attention='' full=1
    [ -z "$dry" ] || some_kernels=sanitizer_ops some_graphs=padding \
        some_attention=documents_of_one_token full=small
    built $bin/test_cuda_kernels $bin/test_cuda_attention $bin/test_cuda_graph || return
    suite kernels 120 $bin/test_cuda_kernels --filter "$some_kernels"
    suite graph 60 $bin/test_cuda_graph --filter "$some_graphs"
    suite attention 400 env UNPAD_FULL=$full $bin/test_cuda_attention --filter "$some_attention"
}

part_runs() {
    built $bin/train_llama build/cpu/train_llama || return
    [ -n "$dry" ] || {
        suite training 200 env TRAIN="$root/$bin/train_llama" tests/test_cuda_train.sh
        suite other_models 100 env TRAIN="$root/$bin/train_llama" tests/test_family.sh
        nccl
    }
    export -f long_run
    if [ -n "$dry" ]; then
        (. tests/lib.sh && tiny_model "$work/tiny" 64 128 64)
        launch 200 bash -c 'long_run "$work/tiny" 264 96 256 6 6'
    else
        launch 180 bash -c 'long_run smollm2-135m 49152 512 2048 200 20'
    fi
    verdict long_run "$(tail -n 1 "$log")"
    rm -rf "${work:?}"/*                        # checkpoints of several GB
}

# NCCL calls with one rank; with more GPUs, several ranks
nccl() {
    local gpus
    gpus=$(nvidia-smi -L | grep -c '^GPU ')
    built $bin/test_cuda_nccl || return
    if [ ! -e build/cuda/with-nccl-found ]; then
        left_out nccl 'built without NCCL (apt-get install libnccl2 libnccl-dev)'
        return
    fi
    suite nccl 60 $bin/test_cuda_nccl
    if [ "$gpus" -ge 2 ]; then
        suite ranks 200 env TRAIN="$root/$bin/train_llama" \
            RANKS="2$([ "$gpus" -ge 4 ] && echo ' 4')" tests/test_cuda_ranks.sh
    else
        echo "        several ranks: need more GPUs"
    fi
}

# long_run MODEL VOCAB MAX_SEQLEN MICRO_BATCH_TOKENS STEPS CPU_STEPS: packed and padded, and at the
# same time the CPU backend for the first CPU_STEPS
long_run() {
    local common=(--model "$1" --from-scratch --train "$work/shards" --max-seqlen "$3"
        --micro-batch-tokens "$4" --lr 3e-4 --val-every 0 --num-samples 0 --boundary-token 0)
    local cpu layout steps=$5 cpu_steps=$6
    python3 dev/shard.py --dist r65 --tokens $(($4 * steps)) --vocab "$2" --cap "$3" \
        --out "$work/shards" || return 1
    build/cpu/train_llama "${common[@]}" --out "$work/cpu" --steps "$cpu_steps" \
        --schedule constant > "$work/cpu.txt" 2>&1 &
    cpu=$!
    for layout in packed padded; do
        $bin/train_llama "${common[@]}" --out "$work/$layout" --steps "$steps" \
            --schedule constant --layout "$layout" > "$work/$layout.txt" 2>&1 ||
            { tail -n 12 "$work/$layout.txt"; kill "$cpu"; return 1; }
    done
    wait "$cpu" || { tail -n 12 "$work/cpu.txt"; return 1; }
    python3 - "$work" "$steps" "$cpu_steps" << 'PY'
import json, sys
steps, cpu_steps = map(int, sys.argv[2:])
def losses(name):
    return [l["loss"] for l in map(json.loads, open(f"{sys.argv[1]}/{name}/log.jsonl"))
            if "event" not in l]
packed, padded, cpu = losses("packed"), losses("padded"), losses("cpu")
assert len(packed) == len(padded) == steps and len(cpu) == cpu_steps
worst = max(abs(a - b) / a for a, b in zip(packed, padded))
worst_cpu = max(abs(a - b) / b for a, b in zip(packed, cpu))
print(f"packed against padded {worst:.2e}, against the CPU {worst_cpu:.2e}")
assert steps < 100 or packed[-1] < packed[0] - 1, (packed[0], packed[-1])
assert worst <= 2**-6 and worst_cpu <= 2**-7     # bf16 rounding, growing over steps
PY
}

# racecheck without cuBLASLt's kernels
part_sanitizer() {
    local tool filter
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    [ -z "$dry" ] || { left_out sanitizers 'compute-sanitizer needs a GPU' && return; }
    [ -x "$sanitizer" ] || { left_out sanitizers 'compute-sanitizer is not installed' && return; }
    built $bin/test_cuda_kernels $bin/test_cuda_attention || return
    for tool in memcheck initcheck racecheck synccheck; do
        filter=sanitizer
        case $tool in racecheck | synccheck) filter=sanitizer_ops ;; esac
        sanitized "$tool" attention sanitizer
        sanitized "$tool" kernels "$filter"
    done
}
sanitized() {   # sanitized TOOL PROGRAM FILTER
    launch 100 "$sanitizer" --tool "$1" --error-exitcode 9 "$bin/test_cuda_$2" --filter "$3"
    if [ -z "$why" ] && ! grep -qaE '^=+ (ERROR|RACECHECK) SUMMARY: 0 ' "$log"; then
        why='no summary without errors'
    fi
    finish_suite "$1_$2"
}

part_guesses() {
    built $bin/bench_guesses || return
    figures guesses 200 $bin/bench_guesses ${dry:+small}
    [ -z "$dry" ] || return 0
    built $bin/bench_attention_cuda || return
    figures attention 200 $bin/bench_attention_cuda 15
}

# compare SHARDS ROW_LEN CAPACITY OPTION...: one table of all layouts on the same documents
compare() {
    local shards=$1 row=$2 capacity=$3 shown='^([a-z]+ +[0-9.]+ |layout|The same|unpad|model|clock)'
    figures "$1_$2" 100 $bin/train_llama --model smollm2-135m \
        --train "$work/$shards" --boundary-token 0 --max-seqlen "$row" \
        --micro-batch-tokens "$capacity" --compare --compare-steps 9 "${@:4}"
}

part_bench() {
    local tokens graph shown
    [ -z "$dry" ] || { left_out bench 'an emulated GPU has no speed' && return; }
    built $bin/train_llama $bin/bench_attention_cuda || return
    figures attention 120 $bin/bench_attention_cuda
    figures attention_sm80 120 $bin/bench_attention_cuda 31 sm80
    python3 dev/shard.py --dist r65 --out "$work/r65"
    python3 dev/shard.py --dist equal --length 2048 --out "$work/equal"
    python3 dev/shard.py --dist seed --out "$work/seed"
    compare r65 8192 65536
    compare r65 2048 65536
    compare equal 2048 65536
    # fill = 1395 tokens of six rows: a step is the six documents and none of the next epoch
    compare seed 2048 12288 --fill 0.113526
    # the steady state over 30 steps, separate launches and CUDA graph, micro-batches of two sizes
    shown='^(step +(1|2|10|20|30)/|cuda graph|peak|unpad|clock)'
    for tokens in 65536 8192; do
        for graph in '' --cuda-graph; do
            figures "steps_$tokens$graph" 60 $bin/train_llama \
                --model smollm2-135m --from-scratch --train "$work/r65" --boundary-token 0 \
                --max-seqlen 8192 --micro-batch-tokens $tokens --steps 30 --val-every 0 \
                --num-samples 0 --out "$work/run" --overwrite $graph
        done
    done
}

part_peers() {
    if ! "$python" -c 'import torch' 2> /dev/null; then
        left_out peers 'PyTorch is not installed (PYTHON=... names an interpreter that has it)'
        return
    fi
    if [ -n "$dry" ]; then
        check attention_on_the_cpu 200 "$python" dev/peers/attention_gpu.py --device cpu \
            --lengths 60 100 33
        return
    fi
    figures attention 250 "$python" dev/peers/attention_gpu.py
    figures r65 200 "$python" dev/peers/pytorch_gpu.py --dist r65
    figures seed 100 "$python" dev/peers/pytorch_gpu.py --dist seed --row-len 2048
}

# Python functions from $python's library and packages, one document each, as bytes: 100 million
# where PyTorch is installed, without a network
real_text() {
    [ -z "$dry" ] || { left_out "$1" 'an emulated GPU trains for days' && return 1; }
    built $bin/train_llama || return
    local folders
    mapfile -t folders < <("$python" -c '
import os, sys
folders = {os.path.realpath(p) for p in sys.path if os.path.isdir(p)}
print(*(f for f in folders if not any(f.startswith(g + os.sep) for g in folders)), sep="\n")')
    [ -e "$work/text/dataset.json" ] || check text 200 python3 data/prepare.py \
        --python-functions --val-frac 0.01 --out "$work/text" "${folders[@]}"
    [ -z "$why" ]
}
readonly pretraining=(--model smollm2-135m --max-seqlen 2048 --micro-batch-tokens 32768
    --batch-tokens 65536 --lr 2e-3)

part_training() {
    real_text training || return
    figures training 500 env TRAIN=$bin/train_llama RESULTS="$out" dev/training.py --record \
        --data "$work/text" --out "$work/training" --minutes 1.5 --seeds 1 "${pretraining[@]}"
}

part_pretrain() {
    local shown='^(model|val|step +[0-9]+00/|trained|peak|done|clock)'
    real_text pretrain || return
    figures pretrain 450 $bin/train_llama --from-scratch --train "$work/text" --steps 1700 \
        --val-every 100 --out "$work/pretrain" "${pretraining[@]}"
}

# ------------------------------------------------------------------------------------------------
# The day

header() {
    [ -z "$dry" ] || echo 'DRY RUN on an emulated GPU: no figure below is a measurement'
    echo "part     $1"
    echo "date     $(date +%Y-%m-%d)"
    [ -n "$dry" ] || echo "gpu      $(nvidia-smi \
        --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader |
        head -n 1)"
    echo "commit   $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
}

# run_part NAME: $out/NAME.txt, complete when it has that name
run_part() {
    local file=$out/${dry:+dry-}$1.txt tee_pid deadline=$((SECONDS + part_limit_s)) began=$SECONDS
    local before=$((passed + failed + not_run)) p=$passed f=$failed s=$skipped n=$not_run
    mkdir -p "$out" || exit 1
    exec 5> >(exec tee "$file.partial")
    tee_pid=$!
    {
        header "$1"
        "part_$1"
        [ $((passed + failed + not_run)) -gt $before ] || left_out "$1" 'nothing of it ran'
        echo "$((SECONDS - began)) s in all"
        echo "$1: $((passed - p)) passed, $((failed - f)) failed, $((skipped - s)) cases" \
            "skipped, $((not_run - n)) not run"
    } >&5 2>&1
    exec 5>&-
    wait "$tee_pid"
    mv "$file.partial" "$file" && echo "wrote $file"
}

known() { case " ${PARTS[*]} " in *" $1 "*) ;; *) return 1 ;; esac; }

[ $# -gt 0 ] || set -- "${PARTS[@]}"
for part in "$@"; do
    known "$part" && continue
    echo "error: $part: no such part, expected ${PARTS[*]}" >&2
    echo "hint: see the head of dev/gpu_day.sh" >&2
    exit 2
done
if [ -z "$dry" ] && ! nvidia-smi -L 2> /dev/null | grep -q '^GPU '; then
    for part in "$@"; do echo "$part: no GPU (nvidia-smi -L); nothing was run or written"; done
    exit 11
fi
if [ -z "$dry" ] && [ -z "${CUDA_ARCHS:-}" ]; then      # this GPU's alone: minutes less
    CUDA_ARCHS=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    export CUDA_ARCHS=${CUDA_ARCHS/#90/90a}
fi
for part in "$@"; do run_part "$part"; done
[ "$passed" -gt 0 ] && [ "$failed" -eq 0 ] && [ "$not_run" -eq 0 ]
