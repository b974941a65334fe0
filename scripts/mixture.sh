#!/usr/bin/env bash
# Trains on a mixture of sources, and on other shares while the learning rate falls (annealing on the best
# data). If run again, it continues.
#   scripts/mixture.sh MODEL FIRST LAST [train_llama options]
# FIRST and LAST name the same sources in the same order: web:0.8,code:0.2 and then web:0.3,code:0.7. A
# source with weight 0 is not drawn from and keeps its position.
set -euo pipefail
[ $# -ge 3 ] || {
    printf "error: %s\nhint: %s\n" "expected a model and two mixtures" \
        "scripts/mixture.sh models/SmolLM2-135M web:0.8,code:0.2 web:0.3,code:0.7" >&2
    exit 2
}
model=$1 first=$2 last=$3
shift 3
cd "$(dirname "$0")/.."
train() {
    ./train_llama --resume --out out/mixture --model "$model" --max-seqlen 2048 --micro-batch-tokens 16384 \
        --batch-tokens 262144 --schedule wsd --lr 3e-4 --warmup-steps 100 --val-every 200 --save-every 200 "$@"
}
train --train "$first" --steps 1600 --decay-frac 0 "$@"
train --train "$last" --steps 2000 --decay-frac 0.2 "$@"
