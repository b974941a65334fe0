#!/usr/bin/env bash
# Ours against PyTorch and transformers on the CPU, step by step in turns, on every shape of the
# table, and the layouts of ours: about 25 minutes on 2 idle cores, 16 GB of memory. Writes
# dev/results/cpu-peers-DATE.txt, from which scripts/results_page.py makes the README's chart.
#   make bench-peers PYTHON=python3      an interpreter with PyTorch, for --compile also a C++ compiler
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=dev/results/cpu-peers-$(date +%Y-%m-%d).txt
mkdir -p dev/results
all=$(nproc)
"$python" -c 'import torch' 2> /dev/null || {
    echo "PyTorch: not installed, nothing to compare with (PYTHON=... names an interpreter that has it)"
    exit 0
}

# r65: 12 lengths drawn from dev/lengths.h's law, cut at 1,400; short: 256 documents of 8 to 38 tokens
seed="220 217 295 183 130 350"
r65="1398 311 94 641 223 517 1127 152 388 806 64 275"
r65_half="1398 311 94 223 152 388 64"       # all of them take PyTorch more than 24 GB
short=$(awk 'BEGIN { for (i = 0; i < 256; i++) printf "%d ", 8 + i * 7 % 31 }')
dtypes=(fp32)
if build/cpu/bench_step --bf16-matmul --model demo --steps 1 > /dev/null 2>&1; then dtypes+=(bf16); fi

compare() {             # compare TITLE THREADS STEPS LENGTHS OPTION...
    local title=$1 threads=$2 steps=$3 lengths=$4
    shift 4
    printf '\n== %s, %s thread(s), load %s\n' "$title" "$threads" "$(cut -d' ' -f1 /proc/loadavg)"
    # shellcheck disable=SC2086  # a list
    "$python" dev/peers/pytorch_cpu.py --ours build/cpu/bench_step --threads "$threads" \
        --steps "$steps" --lengths $lengths "$@" 2>&1 | sed '/ No CUDA runtime /d'
}

layouts() {             # layouts DTYPE OPTION...: of ours, on the six documents
    printf '\n== layouts of unpad.c, %s\n' "$1"
    shift
    ./train_llama --model smollm2-135m --train build/bench --boundary-token 0 --max-seqlen 350 \
        --micro-batch-tokens 2100 --fill 0.6643 --compare --compare-steps 3 "$@" |
        grep -E '^(layout|packed|padded|rows|repad)'
}

{
    echo "date     $(date +%Y-%m-%d)"
    echo "cpu      $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $all cores"
    echo "commit   $(git describe --always --dirty 2> /dev/null || echo unknown)"
    echo "command  make bench-peers, $("${CXX:-g++}" --version | head -1) for torch.compile"
    compare "SmolLM2-135M, six documents" "$all" 2 "$seed" --model smollm2-135m --compile \
        --modes padded alone packed hf hf-flat --row-len 350 --dtype "${dtypes[@]}"
    python3 dev/shard.py --dist seed --vocab 258 --out build/bench > /dev/null
    layouts fp32
    [ ${#dtypes[@]} = 1 ] || layouts bf16 --bf16-matmul
    [ "$all" = 1 ] || compare "SmolLM2-135M, six documents" 1 3 "$seed" --model smollm2-135m \
        --modes packed --compile
    for threads in $(printf '%s\n' "$all" 1 | uniq); do
        compare "demo, six documents" "$threads" 9 "$seed" --modes packed padded --row-len 350 \
            --compile
        compare "demo, R65-like" "$threads" 5 "$r65" --modes packed --compile
        compare "demo, one of 4096 tokens" "$threads" 5 "4096" --modes packed --compile
        compare "demo, 256 short ones" "$threads" 5 "$short" --modes packed padded --row-len 38 \
            --compile
    done
    compare "SmolLM2-135M, R65-like" "$all" 2 "$r65_half" --model smollm2-135m --modes packed --compile
    printf '\nTrainers in C, in turns with ours\n'
    for peer in llmc llama_cpp; do "$python" dev/peers/${peer}_cpu.py; done
    printf '\nParts of a step, as fractions of the FMA peak measured in between\n'
    for threads in $(printf '%s\n' "$all" 1 | uniq); do
        build/cpu/bench_step --threads "$threads" --steps 3
    done
    build/cpu/bench_step --threads 1 --steps 1 --set avx2 || true
    build/cpu/bench_step --threads 1 --steps 1 --bf16-matmul || true
} | tee "$out.partial"      # a failure ends it here
mv "$out.partial" "$out"
echo "wrote $out"
