#!/usr/bin/env bash
# Fine-tunes a model on chats, packed; the loss is only on the answers.
#   scripts/finetune_chat.sh MODEL CHATS.jsonl [train_llama options]
#   scripts/finetune_chat.sh MODEL CHATS.jsonl --lora 16 --out out/lora    8B fits a 24 GB GPU
# MODEL is a Hugging Face directory with its chat template; data/README.md describes CHATS.jsonl.
# For an unknown template, use data/prepare.py as the error says.
set -euo pipefail
usage='expected a model and a file of chats\nhint: scripts/finetune_chat.sh MODEL CHATS.jsonl'
[ $# -ge 2 ] || { printf "error: $usage\n" >&2; exit 2; }
model=$1 chats=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
options=(
    --train "$chats" --out out/chat
    --max-seqlen 2048 --micro-batch-tokens 8192 --batch-tokens 32768    # 8192: some 50 short chats
    --schedule linear --warmup-steps 10     # --lr, --weight-decay: the defaults of what is trained
    --val-every 100 --num-samples 0
)
case " $*" in *' --steps'* | *' --epochs'*) ;; *) options+=(--epochs 3) ;; esac
exec "$here/train_llama" --model "$model" "${options[@]}" "$@"
