#!/usr/bin/env bash
# Scores a model on a benchmark from the Hugging Face hub as lm-evaluation-harness does, zero-shot.
#   scripts/score.sh MODEL BENCHMARK [train_llama options]
# BENCHMARK is hellaswag, arc, piqa, winogrande, mmlu, or mmlu5 for five-shot; its questions are
# fetched once, into data/bench (pip install datasets). In a run, --bench data/bench/BENCHMARK.jsonl
# scores after each validation.
set -euo pipefail
declare -A sources=(
    [hellaswag]=Rowan/hellaswag::validation [arc]=allenai/ai2_arc:ARC-Easy:test
    [piqa]=baber/piqa::validation
    [winogrande]=allenai/winogrande:winogrande_xl:validation [mmlu]=cais/mmlu:all:test
    [mmlu5]='cais/mmlu:all:test --shots hf:cais/mmlu:all:dev'
)
source=${sources[${2:-none}]:-}
usage='expected a model and a benchmark\nhint: scripts/score.sh out/demo/final hellaswag'
[ "$source" ] || { printf "error: $usage\n" >&2; exit 2; }
model=$(realpath "$1") name=$2
shift 2
cd "$(dirname "$0")/.."
questions=data/bench/$name.jsonl
[ -e "$questions" ] || python3 data/prepare.py hf:$source --bench "${name%5}" --out "$questions"
exec ./train_llama --model "$model" --eval --bench "$questions" \
    --max-seqlen 2048 --micro-batch-tokens 8192 "$@"
