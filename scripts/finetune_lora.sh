#!/usr/bin/env bash
# Fine-tunes adapters of a model on chats (LoRA): the model stays frozen and needs neither gradients
# nor optimizer state, so that Llama 3.1 8B fits a 24 GB GPU. The loss is only on the answers.
#   scripts/finetune_lora.sh MODEL CHATS.jsonl [train_llama options]
# MODEL is a Hugging Face directory with weights and a chat template; data/README.md describes
# CHATS.jsonl. out/lora/final holds PEFT's files; with --lora-merge, a whole model.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "error: expected a model and a file of chats" >&2
    echo "hint: scripts/finetune_lora.sh models/smollm2-135m-instruct chats.jsonl" >&2
    exit 2
fi
model=$1 chats=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
options=(
    --lora 16                                       # a scale of 2; --lora-alpha gives another
    --train "$chats" --out out/lora
    --max-seqlen 2048 --micro-batch-tokens 8192     # 8192 tokens are some 50 short chats
    --batch-tokens 32768                            # --dry-run says how many steps an epoch has
    --steps 300
    --schedule cosine --lr 2e-4 --warmup-steps 10 --weight-decay 0    # ten times the rate for all weights
    --val-every 100 --num-samples 0
)
exec "$here/train_llama" --model "$model" "${options[@]}" "$@"
