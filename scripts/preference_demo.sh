#!/usr/bin/env bash
# Teaches SmolLM2-135M-Instruct to stop, by DPO with LoRA on two CPU cores: of the meanings of a word in
# WordNet, the first alone is preferred to all of them. It prints how many of 100 held-out pairs have the
# larger reward on the short answer, before and after, and three answers to questions about other words.
#   scripts/preference_demo.sh [train_llama options]          five minutes on two idle CPU cores
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n== %s\n' "$*"; }
model=models/smollm2-135m-instruct data=data/chat_demo.jsonl out=out/preference_demo
scripts/setup.sh /usr/share/wordnet/data.noun=wordnet-base /usr/lib/python3/dist-packages/pip=python3-pip
make -j"$(nproc)" all
[ -e $model ] || scripts/get_model.sh smollm2-135m-instruct $model
[ -e $data ] ||
    python3 scripts/wordnet_chats.py /usr/share/wordnet $data --leave-out lantern,whisper,brave
mkdir -p $out
python3 - $data $out <<'PY'
import json, sys
pairs = []
for line in open(sys.argv[1]):
    question, *turns = json.loads(line)["messages"]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"][:4]
    if len(answers) > 1:
        pairs.append({"prompt": [question], "chosen": answers[0], "rejected": " ".join(answers)})
for name, part in ("train", pairs[:240]), ("val", pairs[240:340]):
    open(f"{sys.argv[2]}/{name}.jsonl", "w").writelines(json.dumps(pair) + "\n" for pair in part)
print(json.dumps(pairs[0], indent=1))
PY
ask() {
    printf 'What does %s mean?\n' lantern whisper brave > $out/questions.txt
    ./train_llama --model "$1" --generate --chat --prompt @$out/questions.txt --temperature 0 --sample-tokens 80
}
say 'before'
ask $model
say 'train'
./train_llama --model $model --train $out/train.jsonl --val $out/val.jsonl --out $out/run --overwrite \
    --preference dpo --lora 16 --lora-merge --lr 1e-4 --warmup-steps 2 --max-seqlen 256 \
    --micro-batch-tokens 1024 --batch-tokens 2048 --num-samples 0 "$@"
say 'after'
ask $out/run/final
