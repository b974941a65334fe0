#!/usr/bin/env bash
# Samples, validation and the command line as a user meets them: any prompts in any room, a
# validation loss that is transformers' own on exactly the documents it names, hints that say what
# there is. Runs the sanitizer build; set TRAIN to test another one.
set -u
cd "$(dirname "$0")/.."
root=$PWD
train=${TRAIN:-$root/build/asan/train_llama}
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
. "$root/tests/lib.sh"
scratch user
golden=$root/tests/golden/mha_untied
cp -r "$golden" model

# ---- shards: documents of these lengths, or those that transformers has seen -------------------------
cat > shards.py <<'PY'
import json, random, struct, sys
def tensors(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    return {k: (v["dtype"], data[8 + n:][slice(*v["data_offsets"])]) for k, v in header.items()}
def golden(path):
    t = tensors(path + "/expected.safetensors")
    ints = lambda name: struct.unpack(f"<{len(t[name][1]) // 4}i", t[name][1])
    return ints("tokens"), ints("cu_seqlens")[1:], struct.unpack("<d", t["loss_fp64"][1])[0]
if __name__ == "__main__":
    out, what = sys.argv[1], sys.argv[2:]
    if what[0] == "golden":
        tokens, ends, _ = golden(what[1])
    else:
        lengths, rng = [int(x) for x in what], random.Random(1)
        ends = [sum(lengths[:i + 1]) for i in range(len(lengths))]
        tokens = [1 + rng.randrange(63) for _ in range(ends[-1])]
    open(out, "wb").write(struct.pack(f"<{len(tokens)}H", *tokens))
    open(out + ".index", "wb").write(struct.pack(f"<{len(ends)}Q", *ends))
PY
python3 shards.py train.ds $(seq 3 2 60) && python3 shards.py uneven.ds 2 40 40 30 1 &&
    python3 shards.py golden.ds golden "$golden" && python3 shards.py forties.ds 40 40 40 40 40 ||
    bad shards ''
run=("$train" --model model --train train.ds --max-seqlen 64 --micro-batch-tokens 64)
quiet=("${run[@]}" --num-samples 0)

# ---- samples: any prompts in any room -----------------------------------------------------------------
cat > texts.py <<'PY'
import re, struct, sys
max_seqlen, count, written = (int(x) for x in sys.argv[1:])
tokens = struct.unpack("<113H", open("uneven.ds", "rb").read())
ends = (0,) + struct.unpack("<5Q", open("uneven.ds.index", "rb").read())
found = re.findall(r"--- sample (\d+) after step 0( \(ended\))?\n(.*)\n", open("texts.txt").read())
assert [int(f[0]) for f in found] == list(range(1, count + 1)), found
for i, (_, ended, line) in enumerate(found):
    ids = [int(x) for x in re.findall(r"<(\d+)>", line)]
    doc = tokens[ends[i % 5]:ends[i % 5 + 1]]
    prompt = min(16, len(doc), max(1, max_seqlen // 2))
    assert tuple(ids[:prompt]) == doc[:prompt], (i, ids)
    full = min(max_seqlen, prompt + written)
    assert prompt < len(ids) <= full and ids[-1] == 0 if ended else len(ids) == full, (i, ids)
PY
room() {        # room MAX_SEQLEN CAPACITY TEXTS TOKENS
    check "texts_$1_$2_$3_$4" "${run[@]}" --val uneven.ds --steps 0 --max-seqlen "$1" \
        --micro-batch-tokens "$2" --num-samples "$3" --sample-tokens "$4"
    cp out.txt texts.txt
    check_python "texts_$1_$2_$3_$4_are_whole" texts.py "$1" "$3" "$4"
}
check_python() {
    local name=$1
    shift
    check "$name" python3 "$@"
}
room 20 64 3 16
room 12 64 3 128
room 64 64 7 5
room 8 8 5 2
room 2 2 3 128
room 1 1 2 4
room 64 200 12 128
expect prompt_of_no_room 2 'prompt: [0-9]+ tokens' "${run[@]/model/$root/tests/golden/tokenizers/none}" \
    --model tiny --from-scratch --steps 0 2> /dev/null || true
