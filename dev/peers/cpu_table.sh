#!/usr/bin/env bash
# Ours against PyTorch on the CPU, step by step in turns, on every shape of the table: about 12
# minutes on 2 idle cores. Writes dev/results/cpu-peers-DATE.txt.
#   make bench-peers PYTHON=python3      an interpreter with PyTorch, for --compile also a C++ compiler
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=dev/results/cpu-peers-$(date +%Y-%m-%d).txt
mkdir -p dev/results
all=$(nproc)

# r65: 12 lengths drawn from dev/lengths.h's law, cut at 1,400; short: 256 documents of 8 to 38 tokens
seed="220 217 295 183 130 350"
r65="1398 311 94 641 223 517 1127 152 388 806 64 275"
short=$(awk 'BEGIN { for (i = 0; i < 256; i++) printf "%d ", 8 + i * 7 % 31 }')

compare() {             # compare TITLE THREADS STEPS LENGTHS OPTION...
    local title=$1 threads=$2 steps=$3 lengths=$4
    shift 4
    printf '\n== %s, %s thread(s), load %s\n' "$title" "$threads" "$(cut -d' ' -f1 /proc/loadavg)"
    # shellcheck disable=SC2086  # a list
    "$python" dev/peers/pytorch_cpu.py --ours build/cpu/bench_step --threads "$threads" \
        --steps "$steps" --lengths $lengths "$@" | sed 's/, documents \[.*//' || echo "(failed)"
}

{
    echo "date     $(date +%Y-%m-%d)"
    echo "cpu      $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $all cores"
    echo "commit   $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
    for threads in "$all" 1; do
        compare "SmolLM2-135M, seed batch" "$threads" 3 "$seed" --model smollm2-135m \
            --modes packed --compile
    done
    compare "SmolLM2-135M, R65-like" "$all" 2 "$r65" --model smollm2-135m --modes packed
    for threads in "$all" 1; do
        compare "demo, seed batch" "$threads" 9 "$seed" --modes packed padded --row-len 350 --compile
        compare "demo, R65-like" "$threads" 5 "$r65" --modes packed --compile
        compare "demo, one document" "$threads" 5 "4096" --modes packed --compile
        compare "demo, 256 short documents" "$threads" 5 "$short" --modes packed padded \
            --row-len 38 --compile
    done
    for peer in llmc llama_cpp; do echo; "$python" dev/peers/${peer}_cpu.py || echo "(failed)"; done
    printf '\nParts of a step, as fractions of the FMA peak measured in between\n'
    for threads in "$all" 1; do build/cpu/bench_step --threads "$threads" --steps 2; done
    build/cpu/bench_step --threads 1 --steps 1 --set avx2 || true
    build/cpu/bench_step --threads 1 --steps 1 --bf16-matmul || true
} | tee "$out.tmp"
mv "$out.tmp" "$out"
echo "wrote $out"
