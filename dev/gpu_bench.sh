#!/usr/bin/env bash
# `make gpu-bench`: attention, whole steps of every layout, and PyTorch (if installed) on the same
# documents. Writes dev/results/gpu-DATE.txt with the commands and the machine. About 10 minutes;
# PARTS="attention steps peers" selects parts.
set -u
cd "$(dirname "$0")/.."
nvidia-smi -L > /dev/null 2>&1 || { echo "not run: no GPU (nvidia-smi -L)" && exit 11; }
parts=${PARTS:-attention steps peers} python=${PYTHON:-python3}
mkdir -p build/bench dev/results
out=dev/results/gpu-$(date +%Y-%m-%d).txt
not_run=0
run() {
    printf '\n$ %s\n' "$*"
    "$@" 2>&1 || { echo "(exit code $?)" && not_run=$((not_run + 1)); }
}
left_out() { echo "NOT RUN $*" && not_run=$((not_run + 1)); }

# compare SHARDS ROW_LEN CAPACITY OPTION...: one table of all layouts on the same documents
compare() {
    local shards=$1 row=$2 capacity=$3
    shift 3
    run ./train_llama --model smollm2-135m --train "build/bench/$shards" --boundary-token 0 \
        --max-seqlen "$row" --micro-batch-tokens "$capacity" --compare --compare-steps 9 "$@" |
        grep -vE '^  |^(memory|start|train|val|plan)'
}

steps() {
    python3 dev/shard.py --dist r65 --out build/bench/r65
    python3 dev/shard.py --dist equal --length 2048 --out build/bench/equal
    python3 dev/shard.py --dist seed --out build/bench/seed
    compare r65 8192 65536
    compare r65 2048 65536
    compare equal 2048 65536
    # fill = 1395 tokens of six rows: a step is the six documents and none of the next epoch
    compare seed 2048 12288 --fill 0.113526
    # the steady state over 30 steps, separate launches and CUDA graph, large and small micro-batches
    local tokens graph
    for tokens in 65536 8192; do
        for graph in '' --cuda-graph; do
            run ./train_llama --model smollm2-135m --train build/bench/r65 --boundary-token 0 \
                --max-seqlen 8192 --micro-batch-tokens $tokens --steps 30 --val-every 0 \
                --num-samples 0 --out build/bench/run --overwrite $graph |
                grep -E '^(step +(1|2|10|20|30)/|cuda graph|peak|unpad|.* ./train_llama)'
        done
    done
}

peers() {
    if ! "$python" -c 'import torch' 2> /dev/null; then
        left_out 'peers: PyTorch is not installed (PYTHON=... names an interpreter that has it)'
        return
    fi
    run "$python" dev/peers/attention_gpu.py
    run "$python" dev/peers/pytorch_gpu.py --dist r65
    run "$python" dev/peers/pytorch_gpu.py --dist seed --row-len 2048
}

{
    echo "date     $(date +%Y-%m-%d)"
    echo "gpu      $(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit \
        --format=csv,noheader | head -n 1)"
    echo "commit   $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
    make -s -j"$(nproc)" BACKEND=cuda train_llama build/cuda/bench_attention_cuda || exit 1
    for part in $parts; do
        case $part in
            attention)
                run build/cuda/bench_attention_cuda
                run build/cuda/bench_attention_cuda 31 sm80 ;;
            steps) steps ;;
            peers) peers ;;
        esac
    done
    echo
    echo "$not_run not run"
} | tee "$out.tmp"
mv "$out.tmp" "$out"
echo "wrote $out"
