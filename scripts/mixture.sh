#!/usr/bin/env bash
# Trains on a mixture of sources, and on other shares while the learning rate falls (annealing on
# the best data). If run again, it continues.
#   scripts/mixture.sh MODEL FIRST LAST [train_llama options]
# FIRST and LAST name the same sources in the same order: web:0.8,code:0.2, then web:0.3,code:0.7. A
# source with weight 0 is not drawn from and keeps its position. --steps N (default 2,000): of both
# together.
set -euo pipefail
hint='scripts/mixture.sh models/SmolLM2-135M web:0.8,code:0.2 web:0.3,code:0.7'
fail() { printf 'error: %s\nhint: %s\n' "$1" "$hint" >&2; exit 2; }
[ $# -ge 3 ] || fail "expected a model and two mixtures"
model=$1 first=$2 last=$3 steps=2000
shift 3
[[ " $* " =~ .*' --steps'[=\ ]([^ ]*) ]] && steps=${BASH_REMATCH[1]}
[[ $steps =~ ^[1-9][0-9]*$ ]] && [ "$steps" -ge 2 ] ||
    fail "--steps: expected a whole number, 2 or more, found $steps"
cd "$(dirname "$0")/.."
train() {  # train MIXTURE STEPS OPTIONS...
    ./train_llama --resume --out out/mixture --model "$model" \
        --max-seqlen 2048 --micro-batch-tokens 16384 --batch-tokens 262144 \
        --schedule wsd --lr 3e-4 --warmup-steps 100 --val-every 200 --save-every 200 \
        "${@:3}" --train "$1" --steps "$2"
}
train "$first" $((steps * 4 / 5)) "$@" --decay-frac 0
train "$last" "$steps" --decay-frac 0.2 "$@"
