#!/usr/bin/env bash
# `make bench-mpi`: the cost of a second rank on the CPU backend, and of unequal work.
#   1 rank x 2 threads against 2 ranks x 1 thread: the same documents and the same two cores, so the
#   difference is communication and waiting. 2 ranks in four ways: planned by the costs that
#   dev/calibrate measured here, by the default costs, with --deterministic, and in arrival order
#   (--work-cost 0:0), each with one micro-batch of four of the longest documents.
# Runs alternate; figures are medians over the steps of all RUNS (3) without their first steps.
# Writes dev/results/mpi-DATE.txt. About 20 minutes on 2 cores; QUICK=1: 2 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=passive
runs=${RUNS:-3}
die() { echo "error: $1" >&2; exit 2; }
command -v mpirun > /dev/null || die 'mpirun is not installed: apt-get install openmpi-bin'
[ "$(nproc)" -ge 2 ] || die 'expected two cores or more'
mpi=(mpirun --oversubscribe --bind-to core -n 2)
[ "$(id -u)" -eq 0 ] && mpi+=(--allow-run-as-root)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p dev/results
out=dev/results/mpi-$(date +%Y-%m-%d).txt

# one_run NAME THREADS COMMAND...: writes its log to NAME.jsonl
one_run() {
    local name=$1 threads=$2
    shift 2
    OMP_NUM_THREADS=$threads "$@" --threads "$threads" "${common[@]}" --out "$work/out" \
        > "$work/screen.txt" 2>&1 || { tail -n 5 "$work/screen.txt" >&2; exit 1; }
    cp "$work/out/log.jsonl" "$work/$name.jsonl"
    rm -rf "$work/out"
}

compare() {         # compare MODEL MAX_SEQLEN STEPS
    local model=$1 seqlen=$2 steps=$3 costs run
    python3 dev/shard.py --dist r65 --tokens 400000 --vocab 258 --cap "$seqlen" \
        --out "$work/data" > /dev/null
    common=(--model "$model" --from-scratch --train "$work/data" --boundary-token 0
            --max-seqlen "$seqlen" --micro-batch-tokens $((4 * seqlen))
            --batch-tokens $((8 * seqlen)) --fill 0.9 --steps "$steps" --val-every 0
            --num-samples 0 --overwrite)
    OMP_NUM_THREADS=1 build/cpu/calibrate --model "$model" --threads 1 --max-seqlen "$seqlen" \
        --micro-batch-tokens $((2 * seqlen)) --runs "$runs" > "$work/calibrate.txt"
    costs=$(sed -n 's/^--work-cost //p' "$work/calibrate.txt")
    for run in $(seq "$runs"); do
        one_run one."$run" 2 ./train_llama --work-cost "$costs"
        one_run calibrated."$run" 1 "${mpi[@]}" ./train_llama --work-cost "$costs"
        one_run default."$run" 1 "${mpi[@]}" ./train_llama
        one_run deterministic."$run" 1 "${mpi[@]}" ./train_llama --deterministic
        one_run arrival."$run" 1 "${mpi[@]}" ./train_llama --work-cost 0:0
    done
    printf '\n%s, r65 lengths up to %d, 2 micro-batches of %d tokens a step, %d runs of %d steps\n' \
        "$model" "$seqlen" $((4 * seqlen)) "$runs" "$steps"
    sed -n '/^error of the time/,$p' "$work/calibrate.txt"
    python3 dev/bench_mpi.py "$work" "$runs"
}

{
    echo "date     $(date +%Y-%m-%d)"
    echo "cpu      $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
    echo "commit   $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
    echo "command  ${QUICK:+QUICK=$QUICK }RUNS=$runs make bench-mpi"
    if [ "${QUICK:-0}" = 1 ]; then compare demo 512 4
    else
        compare demo 2048 6
        compare smollm2-135m 256 6
    fi
} | tee "$out.tmp"
mv "$out.tmp" "$out"
echo "wrote $out"
