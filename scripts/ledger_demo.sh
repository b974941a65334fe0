#!/usr/bin/env bash
# Train, ledger, train: 40 of 800 chats of chat_demo.sh, which makes them and fetches the model, get the
# answer of another one. It says how many of these are among the worst 5 %, and trains without them.
#   scripts/ledger_demo.sh [train_llama options]          twelve minutes on two busy CPU cores
set -euo pipefail
cd "$(dirname "$0")/.."
model=models/smollm2-135m-instruct data=data/chat_demo.jsonl out=out/ledger_demo
[ -e $model ] && [ -e $data ] ||
    { printf 'error: %s or %s: not found\nhint: scripts/chat_demo.sh makes both\n' $model $data >&2; exit 2; }
mkdir -p $out
python3 - $data $out <<'PY'
import json, random, sys
chats, out = [json.loads(line) for line in open(sys.argv[1])][:900], sys.argv[2]
odd = random.Random(1).sample(range(800), 40)
answers = [chats[i]["messages"][1] for i in odd]
for i, answer in zip(odd, answers[1:] + answers[:1]):
    chats[i]["messages"][1], chats[i]["swapped"] = answer, True
for name, part in ("chats", chats[:800]), ("val", chats[800:]):
    open(f"{out}/{name}.jsonl", "w").writelines(json.dumps(chat) + "\n" for chat in part)
PY
run() { ./train_llama --val $out/val.jsonl --max-seqlen 512 --micro-batch-tokens 2048 "$@"; }
train() {  # train RECORDS OUT OPTIONS...
    run --model $model --train "$1" --out "$2" --overwrite --epochs 1 --lr 5e-5 --warmup-steps 5 --val-every 0 \
        --num-samples 0 --log-every 10 "${@:3}"
}
train $out/chats.jsonl $out/all --ledger "$@"
scripts/ledger.py $out/all --drop 0.05 --out $out/kept.jsonl
scripts/ledger.py $out/all --top 10
python3 - $out/kept.jsonl <<'PY'
import json, sys
chats = [json.loads(line) for line in open(sys.argv[1])]
found = sum(chat.get("swapped", False) and chat.get("weight") == 0 for chat in chats)
print(f"swapped answers: {found} of 40 are among the worst 40: precision and recall {found / 40:.3f}")
PY
train $out/kept.jsonl $out/kept "$@"
echo 'loss of 100 other chats: before, trained on all, trained without the worst 5 %'
for model in $model $out/all/final $out/kept/final; do run --model $model --eval | tail -n 1; done
