#!/usr/bin/env bash
# Continues the pre-training of a published model on your own text.
#   scripts/continue_pretraining.sh MODEL TEXTS [train_llama options]
# MODEL is a Hugging Face directory; TEXTS are files, JSON Lines or a directory of them, or shards
# made with its tokenizer.
set -euo pipefail
usage='expected a model and texts\nhint: scripts/continue_pretraining.sh models/SmolLM2-135M notes/'
[ $# -ge 2 ] || { printf "error: $usage\n" >&2; exit 2; }
model=$1 texts=$2
shift 2
options=(
    --train "$texts" --out out/continued
    --max-seqlen 2048 --micro-batch-tokens 16384 --batch-tokens 262144
    --steps 2000
    # A tenth of the peak of SmolLM2-135M's pre-training, warmed up again because AdamW's moments
    # start at zero. The rate decays over the whole run.
    --schedule linear --lr 3e-4 --warmup-steps 100 --min-lr-frac 0.1 --weight-decay 0.01
    --val-every 200 --save-every 200
)
exec "$(cd "$(dirname "$0")/.." && pwd)/train_llama" --model "$model" "${options[@]}" "$@"
