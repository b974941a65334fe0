#!/usr/bin/env bash
# Fine-tunes a real chat model on two CPU cores in a few minutes: fetches SmolLM2-135M-Instruct,
# makes chats about the meanings of words from WordNet, shows which part of one is trained on, times
# packed against padded batches, trains on the answers, and asks about held-out words, before and
# after.
#   scripts/chat_demo.sh [train_llama options]      e.g. --steps 400 for a better dictionary, or
#   --lora 16 --lora-merge --lr 5e-4                for adapters instead of all weights
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n== %s\n' "$*"; }
model=models/smollm2-135m-instruct data=data/chat_demo.jsonl
out=out/chat_demo shards=$out/tokens

say 'packages'
scripts/setup.sh /usr/share/wordnet/data.noun=wordnet-base \
    /usr/lib/python3/dist-packages/jinja2=python3-jinja2 \
    /usr/lib/python3/dist-packages/pip=python3-pip

say 'build'
make -j"$(nproc)" all

say 'model'
if [ -e $model ]; then echo "$model exists"; else scripts/get_model.sh smollm2-135m-instruct $model; fi

say 'data: what words mean, one chat a word; [[ ]] is trained'
if [ ! -e $data ]; then
    /usr/bin/python3 scripts/wordnet_chats.py /usr/share/wordnet $data --leave-out lantern,whisper,brave
    /usr/bin/python3 data/prepare.py --chat $data --model $model --show 1
fi
echo 'WordNet 3.0 by Princeton University, WordNet licence:' /usr/share/doc/wordnet-base/copyright

start=$(./train_llama --model $model --train $data --out $out --overwrite --steps 0 \
    --val-every 0 --num-samples 0)
grep '^t' <<< "$start"

common=(--max-seqlen 512 --micro-batch-tokens 1024)
if grep 'bf16-matmul is faster' <<< "$start"; then common+=(--bf16-matmul); fi
ask() {
    printf 'What does %s mean?\n' lantern whisper brave > build/questions.txt
    ./train_llama --model "$1" --generate --chat --prompt @build/questions.txt \
        --temperature 0 --sample-tokens 60
    ./train_llama --model "$1" --eval --val $shards "${common[@]}" | tail -n 1
}

say 'before'
ask $model

say 'packed against padded: the same chats, the same losses'
./train_llama --model $model --train $shards --compare 1 "${common[@]}" | sed -un '/^layout/,$p'

say 'train'
./train_llama --model $model --train $shards --out $out --overwrite "${common[@]}" --steps 120 \
    --lr 5e-5 --warmup-steps 5 --weight-decay 0 --val-every 0 --num-samples 0 "$@"

say 'after'
ask $out/final

say 'done'
echo "./train_llama --model $out/final --generate --chat     talks to it"
