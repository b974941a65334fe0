#!/usr/bin/env bash
# `make bench`: whole steps of every layout on the seed batch, PyTorch (if installed) on the same
# document lengths, then kernels against libraries. About 15 minutes on 2 cores. Writes
# dev/results/cpu-DATE.txt with the commands and the machine.
#   QUICK=1 make bench        the demo model only, about a minute
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/bench dev/results
out=dev/results/cpu-$(date +%Y-%m-%d).txt
python=${PYTHON:-python3}
run() {
    printf '\n$ %s\n' "$*"
    "$@" 2>&1 || echo "(exit code $?)"
}

python3 dev/shard.py --dist seed --vocab 258 --out build/bench

# fill = 1395 / capacity, so that a step is the six documents and none of the next epoch
layouts() {         # layouts MODEL ROW_LEN OPTION...
    local model=$1 row=$2
    shift 2
    run ./train_llama --model "$model" --train build/bench --boundary-token 0 --max-seqlen "$row" \
        --micro-batch-tokens $((6 * row)) --fill "$(awk "BEGIN { print 1395.01 / (6 * $row) }")" \
        --compare --compare-steps 3 "$@" | grep -vE '^  |^(memory|start|train|val|plan)'
}

# Short documents, so many to plan and to read. Training must not wait for its data: under 1 %.
loader_share() {
    python3 dev/shard.py --dist chat --tokens 1000000 --vocab 258 --out build/bench/chat
    run ./train_llama --model demo --train build/bench/chat --boundary-token 0 --out build/bench/run \
        --overwrite --steps 60 --num-samples 0 --val-every 0 | grep -E '^(\$|plan|trained)'
    "$python" - << 'PY'
import json
steps = [s for s in map(json.loads, open("build/bench/run/log.jsonl")) if "read_ms" in s]
share = sum(s["read_ms"] for s in steps) / sum(s["ms"] for s in steps)
verdict = "" if share < 0.01 else ": TOO MUCH"
print("waiting for data: %.2f %% of the steps' time%s" % (100 * share, verdict))
PY
}

pytorch() {         # pytorch OPTION...
    if "$python" -c 'import torch' 2> /dev/null; then
        run "$python" dev/peers/pytorch_cpu.py --modes padded alone packed "$@"
    else
        echo "PyTorch: not installed, skipped (set PYTHON=... to an interpreter that has it)"
    fi
}

{
    echo "date     $(date +%Y-%m-%d)"
    echo "cpu      $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
    echo "commit   $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
    echo "Shared machines are noisy: compare ratios within one run, not single times."
    layouts demo 350
    layouts demo 512
    loader_share
    pytorch --model demo --row-len 350 512
    if [ "${QUICK:-0}" != 1 ]; then
        layouts smollm2-135m 350
        pytorch --model smollm2-135m --row-len 350 512 --dtype fp32 bf16 --steps 2
        layouts smollm2-135m 512
        if ./train_llama --bf16-matmul --dry-run --model smollm2-135m --train build/bench \
            --boundary-token 0 > /dev/null 2>&1; then layouts smollm2-135m 350 --bf16-matmul; fi
        run build/cpu/bench_matmul -t 1395 -r 5
        run build/cpu/bench_attention
    fi
} | tee "$out.tmp"
mv "$out.tmp" "$out"
echo "wrote $out"
