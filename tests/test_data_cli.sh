#!/usr/bin/env bash
# Data, end to end: damaged and changed shards, shards of another tokenizer, documents and tokens that
# are never trained on, and inputs that data/prepare.py refuses.
# Runs the sanitizer build; set TRAIN to test another one.
. "$(dirname "$0")/lib.sh"
scratch data
command -v python3 > /dev/null || skip_all data 'python3 is not installed'
# by a path without spaces: functions below print command lines
ln -s "${TRAIN:-$root/build/asan/train_llama}" train_llama && train=./train_llama

# flip FILE OFFSET: the lowest bit of that byte
flip() { python3 - "$@" << 'PY'
import sys
with open(sys.argv[1], "r+b") as f:
    f.seek(int(sys.argv[2]))
    byte = f.read(1)[0]
    f.seek(int(sys.argv[2]))
    f.write(bytes([byte ^ 1]))
PY
}

tiny_model tiny 24 40 8
uneven_texts text 31
prepare text --out corpus --val-frac 0.2
options=(--model tiny --from-scratch --max-seqlen 128 --micro-batch-tokens 512 --num-samples 0
         --val-every 0 --threads 1)
# on DATA ARGUMENTS...: command that trains the tiny model on these shards
on() { echo "$train" "${options[@]}" --train "$@"; }

# ---- damaged and changed tokens --------------------------------------------------------------------
expect summary_of_checked_shards 0 '^train +1 unpad.c shard, [0-9]+ documents, [0-9]+ tokens$' \
    $(on corpus --dry-run)
for split in train val; do
    cp -r corpus flipped
    flip flipped/${split}_00000.bin 1500
    expect flipped_bit_in_${split}_tokens 3 \
        "error: flipped/${split}_00000.bin: bytes 1024 to [0-9]+: expected checksum" \
        $(on flipped --steps 40 --out f)
    rm -r flipped
done

# version 1 of the index: no checksums of tokens
cp -r corpus old
index_without_checksums old/*.idx
expect unchecked_tokens_are_reported 0 '^train .* tokens, tokens unchecked: no checksums$' \
    $(on old --steps 2 --out old.run)
# llm.c's format: no index at all
mkdir llmc
python3 - << 'PY'
import struct
data = open("corpus/train_00000.bin", "rb").read()
tokens = struct.unpack_from("<i", data, 8)[0]
open("llmc/train_00000.bin", "wb").write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + data[1024:])
PY
expect train_on_llmc_shards 0 'index built by scanning for token 256, tokens unchecked' \
    $(on llmc --boundary-token 256 --steps 2 --out llmc.run)

# shards changed before --resume: rebuilt from other texts of the same lengths, or edited in place
cp -r text edited
sed -i 's/^line 1 of/LINE 1 of/' "edited/doc 1.txt" && cp -r corpus remade
prepare edited --out remade --val-frac 0.2 --overwrite
expect train_before_the_edit 0 '^done' $(on corpus --steps 2 --out corpus.run)
mv corpus corpus.aside && mv remade corpus
expect resume_on_rebuilt_shards 9 'error: .*data_fingerprint \(was' \
    $(on corpus --steps 4 --out corpus.run --resume)
rm -r corpus && mv corpus.aside corpus
expect resume_on_the_same_shards 0 '^done' $(on corpus --steps 4 --out corpus.run --resume)
flip old/train_00000.bin 1500
expect resume_on_edited_tokens_without_checksums 9 'error: .*token_fingerprint \(was' \
    $(on old --steps 4 --out old.run --resume)
flip old/train_00000.bin 1500
expect resume_on_restored_tokens_without_checksums 0 '^done' $(on old --steps 4 --out old.run --resume)
flip llmc/train_00000.bin 20000
# a checkpoint of a version without a fingerprint of the tokens
forget_tokens() { python3 - "$root" old.run/step-00000004 << 'PY'
import re, sys
sys.path.insert(0, sys.argv[1] + "/data")
from prepare import crc32c
state, manifest = (sys.argv[2] + name for name in ("/trainer_state.json", "/manifest.json"))
text = re.sub(rb' *"token_fingerprint": \d+,\n', b"", open(state, "rb").read())
assert b"token_fingerprint" not in text and b"data_fingerprint" in text
open(state, "wb").write(text)
entry = b'"trainer_state.json",\n      "size_bytes": %d,\n      "crc32c": "%08x"' % (len(text), crc32c(text))
body = re.sub(rb'(?s)"trainer_state.json".*?"crc32c": "[0-9a-f]*"', entry,
              open(manifest, "rb").read())[:-36]
open(manifest, "wb").write(body + b',\n  "manifest_crc32c": "%08x"\n}\n' % crc32c(body))
PY
}
check remove_the_fingerprint_of_tokens forget_tokens
expect resume_from_a_checkpoint_without_that_fingerprint 0 '^done' \
    $(on old --steps 6 --out old.run --resume=old.run/step-00000004)
expect resume_on_edited_llmc_shards 9 'error: .*token_fingerprint \(was' \
    $(on llmc --boundary-token 256 --steps 4 --out llmc.run --resume)

# ---- documents and tokens that are never trained on --------------------------------------------------
# three documents of 12, 52 and 102 tokens including BOS and EOS, and an empty one
mkdir lengths
for n in 10 50 100; do printf "%${n}s" ' ' | tr ' ' x > lengths/$n.txt; done
prepare lengths --out few --val-frac 0
python3 - "$root" << 'PY'
import struct, sys
sys.path.insert(0, sys.argv[1] + "/data")
from prepare import crc32c
head = bytearray(open("few/train_00000.bin", "rb").read())
index = open("few/train_00000.idx", "rb").read()
head[56:64] = struct.pack("<Q", 4)
head[1020:1024] = struct.pack("<I", crc32c(head[:1020]))
open("few/train_00000.bin", "wb").write(head)
body = index[:12] + head[1020:1024] + struct.pack("<Q", 4) + index[24:48] + index[40:-4]
open("few/train_00000.idx", "wb").write(body + struct.pack("<I", crc32c(body)))
PY
said_at_the_end() { tail -n 3 said.txt | grep -E "$1"; }
# said NAME ...: expect, with its output kept in said.txt for the checks that follow
said() { expect "$@" && cp out.txt said.txt; }
few() { echo "$train" "${options[@]}" --train few --steps 2 --overwrite --out few.run "$@"; }
train_line='^train +1 unpad.c shard, 3 documents, 166 tokens, 1 empty one left out$'
said empty_documents_are_counted 0 "$train_line" $(few --max-seqlen 102)
lacks no_message_without_long_documents 'longer than' said.txt
said split_documents_are_counted 0 '^ +2 documents longer than 40 tokens are split$' \
    $(few --max-seqlen 40)
lacks splitting_leaves_no_token_out 'never trained|left out: [0-9]+ document' said.txt
said truncated_documents_are_counted 0 \
    '^ +1 document longer than 100 tokens is truncated: 2 of 166 tokens \(1.2 %\) never trained$' \
    $(few --max-seqlen 100 --long-docs truncate)
check truncated_documents_are_repeated_at_the_end said_at_the_end \
    '^left out: 1 document longer than 100 tokens was truncated: 2 of 166 tokens \(1.2 %\) never trained'
said dropped_documents_are_counted 0 \
    '^ +2 documents longer than 40 tokens are dropped: 154 of 166 tokens \(92.8 %\) never trained$' \
    $(few --max-seqlen 40 --long-docs drop)
check dropped_documents_are_repeated_at_the_end said_at_the_end \
    '^left out: 2 documents longer than 40 tokens were dropped: 154 of 166 tokens \(92.8 %\) never trained'
check_python left_out_tokens_are_in_the_log << 'PY'
import json
start = json.loads(open("few.run/log.jsonl").readline())
assert start["event"] == "start", start
assert start["data"] == {"train": {
    "shards": 1, "unchecked_shards": 0, "documents": 3, "tokens": 166, "empty_documents": 1,
    "long_documents": 2, "tokens_left_out": 154}, "val": None}, start["data"]
PY
expect long_documents_as_an_error 3 \
    'error: data: document [0-9] has (52|102) tokens, expected at most 40' \
    $(few --max-seqlen 40 --long-docs error --out long.run)
check refused_run_creates_no_directory test ! -e long.run
expect all_documents_dropped 3 'all 3 documents are longer than max_seqlen 11' \
    $(few --max-seqlen 11 --long-docs drop --out long.run)

# ---- loss masks -------------------------------------------------------------------------------------
rule='d % 4 > 0 and (i // 5 + d) % 3 == 0' rest='not (d % 4 > 0 and (i // 5 + d) % 3 == 0)'
for name in masked unmasked empty; do cp -r corpus $name; done
mask_shards masked "$rule" && mask_shards unmasked "$rest" && mask_shards empty False
masked() { echo "$train" "${options[@]}" --train masked --batch-tokens 1024 --keep 0 "$@"; }
said targets_are_counted 0 \
    '^train +1 unpad.c shard, [0-9]+ documents, [0-9]+ tokens, [0-9]+ of them targets$' \
    $(masked --steps 4 --save-every 2 --val-every 4 --val-tokens 100000 --out masked.run)
has documents_without_a_target_are_counted \
    '^ +[0-9]+ documents longer than 128 tokens are split, [0-9]+ documents without a target: [0-9]+ of [0-9]+ tokens \(' said.txt
has trained_tokens_in_the_step_line '^step +4/4 .* tok/s \([0-9]+ trained\) \| fill ' said.txt
has trained_tokens_at_the_end '^trained 4 steps, [0-9]+ tokens, [0-9]+ of them targets, in ' said.txt
has left_out_at_the_end '^left out: .* documents without a target: .* never trained' said.txt
check_python trained_tokens_in_the_log << 'PY'
import json, re, struct
lines = [json.loads(line) for line in open("masked.run/log.jsonl")]
steps, data = [l for l in lines if "lr" in l], lines[0]["data"]["train"]
said = re.search(r"trained 4 steps, (\d+) tokens, (\d+) of", open("said.txt").read())
assert int(said.group(1)) == sum(s["real_tokens"] for s in steps)
assert int(said.group(2)) == sum(s["targets"] for s in steps)
for s in steps:
    assert 0 < s["targets"] < s["real_tokens"] / 2
    rate = s["tokens_per_s"] * s["targets"] / s["real_tokens"]
    assert abs(s["trained_tokens_per_s"] / rate - 1) < 1e-5, s
mask = open("masked/train_00000.mask", "rb").read()
assert data["targets"] == struct.unpack_from("<Q", mask, 24)[0]
assert data["documents_without_target"] == (data["documents"] + 3) // 4
index, left_out, first = open("masked/train_00000.idx", "rb").read(), 0, 0
for end in struct.unpack_from("<%dQ" % data["documents"], index, 40):
    for at in range(first, end, 128):           # a segment's targets follow its tokens
        after = range(at + 1, min(at + 129, end))
        if not any(mask[32 + i // 8] >> i % 8 & 1 for i in after): left_out += min(128, end - at)
    first = end
assert data["tokens_left_out"] == left_out > 0, (data, left_out)
val = open("masked/val_00000.mask", "rb").read()
assert [l["targets"] for l in lines if l.get("event") == "val"] == [struct.unpack_from("<Q", val, 24)[0]] * 2
PY
check_python steps_of_an_epoch_are_of_trained_tokens << 'PY'
import json, re
data = json.loads(open("masked.run/log.jsonl").readline())["data"]["train"]
trained = data["tokens"] - data["tokens_left_out"]
epoch = float(re.search(r"^plan .* about ([0-9.]+) steps an epoch$", open("said.txt").read(), re.M).group(1))
assert 0.99 * trained / 1024 < epoch < 0.93 * data["tokens"] / 1024, (epoch, data)
PY
# every target is in one of the two masks: the sums of the losses add up
for name in corpus unmasked; do
    said "validation_of_$name" 0 '^val after step 0' \
        $(masked --train $name --steps 1 --val-every 1 --val-tokens 100000 --out $name.val)
done
check_python masked_losses_add_up << 'PY'
import json
def loss_sum(run):
    val = next(l for l in map(json.loads, open(run + "/log.jsonl")) if l.get("event") == "val")
    return val["targets"], val["targets"] * val["loss"]
(na, a), (nb, b), (n, all) = map(loss_sum, ("masked.run", "unmasked.val", "corpus.val"))
assert na > 100 and nb > 100 and na + nb == n, (na, nb, n)
assert abs(a + b - all) < 1e-6 * all and abs(a / na - all / n) > 1e-4 * all / n, (a, b, all)
PY
# Gradients add up too: that of all tokens is no longer than those of the parts together. Divided by
# tokens, not by targets, those of the parts would be too short.
part='i % 3 == 0'
cp -r few part && cp -r few others && mask_shards part "$part" && mask_shards others "not ($part)"
for name in few part others; do
    expect "gradient_of_$name" 0 done $train "${options[@]}" --train $name --max-seqlen 102 --steps 1 --out $name.step
done
check_python masked_gradients_add_up << 'PY'
import json
def of(run):
    step = next(l for l in map(json.loads, open(run + ".step/log.jsonl")) if "lr" in l)
    return step["targets"], step["targets"] * step["grad_norm"]
(na, a), (nb, b), (n, all) = map(of, ("part", "others", "few"))
assert na + nb == n and abs(a - b) <= all <= a + b, (na, nb, n, a, b, all)
PY
# --eval reads masks without the loader that training and validation use
expect eval_under_a_mask 0 '^all ' $train --model tiny --from-scratch --eval --val masked --max-seqlen 128 \
    --micro-batch-tokens 512 --threads 1
check_python eval_under_a_mask_is_validation << 'PY'
import json
val = next(l for l in map(json.loads, open("masked.run/log.jsonl")) if l.get("event") == "val")
docs, targets, loss = next(l.split()[1:4] for l in open("out.txt") if l.startswith("all "))
assert int(targets) == val["targets"] and abs(float(loss) - val["loss"]) < 1e-4, (targets, loss, val)
PY
check resume_a_masked_run $(masked --steps 4 --resume=masked.run/step-00000002 --out resumed.run)
same_state resume_under_a_mask_bit_for_bit masked.run/step-00000004 resumed.run/step-00000004
expect check_packing_under_a_mask 0 '^packing does not change the result' $(masked --check-packing)
said compare_under_a_mask 0 '^repad ' $(masked --compare --compare-steps 1)
check layouts_under_a_mask_have_one_loss \
    test "$(awk '/^(packed|padded|repad) / { print $NF }' said.txt | sort -u | wc -l)" -eq 1
cp masked/train_00000.mask aside && mask_shards masked "$rest"
expect resume_under_another_mask 9 'error: .*token_fingerprint \(was' \
    $(masked --steps 6 --resume --out resumed.run)
mask_shards masked "$rule" && same masks_are_made_again aside masked/train_00000.mask
flip masked/train_00000.mask 40
expect flipped_bit_in_a_mask 3 'error: masked/train_00000.mask: expected checksum' $(masked --out unmade)
rm masked/train_00000.mask
expect missing_mask 3 'error: masked/train_00000.mask: ' $(masked --out unmade)
cp aside masked/train_00000.mask
cp -r corpus stray && cp aside stray/train_00000.mask
expect mask_without_the_flag 3 'error: stray/train_00000.mask: expected no mask' $(on stray --out unmade)
expect masks_without_a_target 3 'error: data: expected targets, found none in the masks of' \
    $(on empty --out unmade)
check refused_masks_create_no_directory test ! -e unmade

# ---- a model and shards of different tokenizers -----------------------------------------------------
# with MODEL ARGUMENTS...: command for another model on the same shards
with() { echo "$train" "${options[@]}" --train corpus --dry-run --model "$@"; }
one_warning() { [ "$(grep -c '^warning: ' said.txt)" -eq 1 ]; }
no_warning() { lacks "no_warning_$1" '^warning: ' said.txt; }
cp -r tiny same && cp corpus/tokenizer.json same
said model_with_the_tokenizer_of_the_shards 0 '^model +same' $(with same)
no_warning for_the_same_tokenizer
cp -r same other && echo >> other/tokenizer.json
said model_with_another_tokenizer 9 \
    'error: corpus: expected the tokenizer of other/tokenizer.json \(SHA-256 [0-9a-f]{16}\.\.\.\), found [0-9a-f]{16}' \
    $(with other)
has hint_names_both_solutions '^hint: .*prepare.py --tokenizer other.*--allow-other-tokenizer' said.txt
has hash_equals_sha256sum "SHA-256 $(sha256sum other/tokenizer.json | head -c 16)" said.txt
said another_tokenizer_allowed 0 '^warning: corpus: .*other/tokenizer.json' \
    $(with other --allow-other-tokenizer)
check one_warning_for_the_other_tokenizer one_warning
# validation shards of another tokenizer than the training shards; the model has no tokenizer.json
cp -r corpus retagged
python3 - "$root" << 'PY'
import struct, sys
sys.path.insert(0, sys.argv[1] + "/data")
from prepare import crc32c
head = bytearray(open("retagged/val_00000.bin", "rb").read())
index = open("retagged/val_00000.idx", "rb").read()
head[64] ^= 1
head[1020:1024] = struct.pack("<I", crc32c(head[:1020]))
open("retagged/val_00000.bin", "wb").write(head)
body = index[:12] + head[1020:1024] + index[16:-4]
open("retagged/val_00000.idx", "wb").write(body + struct.pack("<I", crc32c(body)))
PY
expect validation_of_another_tokenizer 9 'error: retagged: expected the tokenizer of corpus' \
    $(with tiny --val retagged)
# BOS and EOS
model_says() {  # model_says DIR CONFIG_EOS GENERATION_CONFIG
    rm -rf "$1" && cp -r tiny "$1"
    sed -i "s/\"eos_token_id\": 257/\"eos_token_id\": $2/" "$1/config.json"
    echo "$3" > "$1/generation_config.json"
}
model_says ends 5 '{"eos_token_id": [6, 7]}'
said another_eos 0 '^warning: corpus: documents end with token 257, but eos_token_id of ends is 5, 6, 7$' \
    $(with ends)
check one_warning_for_another_eos one_warning
model_says ends 5 '{"eos_token_id": [6, 257], "bos_token_id": 256}'
said an_eos_of_several 0 '^model +ends' $(with ends)
no_warning for_an_eos_of_several
model_says ends '[5, 257]' '{}'
said an_eos_of_several_in_the_config 0 '^model +ends' $(with ends)
no_warning for_an_eos_of_several_in_the_config
model_says ends 257 '{"bos_token_id": 3}'
sed -i 's/"bos_token_id": 256/"bos_token_id": 1/' ends/config.json
said another_bos 0 '^warning: corpus: documents begin with token 256, but bos_token_id of ends is 1, 3$' \
    $(with ends)
check one_warning_for_another_bos one_warning
model_says ends null '{}'
said a_model_without_eos 0 '^model +ends' $(with ends)
no_warning without_an_eos
model_says ends 257 '{'
expect a_damaged_generation_config 3 'error: ends/generation_config.json' $(with ends)
said byte_shards_for_demo 0 '^model +demo' $(with demo)
no_warning for_demo
said byte_shards_for_smollm2 0 \
    '^warning: corpus: made for a vocabulary of 258, smollm2-135m has 49152: ' $(with smollm2-135m)
has another_eos_of_a_built_in_model \
    '^warning: corpus: documents end with token 257, but eos_token_id of smollm2-135m is 0$' said.txt

# ---- ranks with different shards under the same path --------------------------------------------------
ranks_train=${RANKS_TRAIN:-$root/build/cpu/train_llama}
if ranks_can_run "$ranks_train"; then
    for kind in corpus old masked; do
        mkdir -p p1 p2 && cp -r tiny $kind p1 && cp -r tiny $kind p2
        prepare edited --out p2/corpus --val-frac 0.2 --overwrite
        [ $kind != old ] || flip p2/old/train_00000.bin 1500
        [ $kind != masked ] || mask_shards p2/masked "$rest"
        job=("$ranks_train" "${options[@]}" --train $kind --batch-tokens 1024 --steps 2 --out run)
        expect "ranks_with_different_data_$kind" 9 'differences in training data \(rank 1\)' \
            "${mpi[@]}" -n 1 --wdir "$work/p1" "${job[@]}" : -n 1 --wdir "$work/p2" "${job[@]}"
        rm -r p1 p2
    done
    # one error or warning for all ranks
    two=("${mpi[@]}" -n 2 "$ranks_train" "${options[@]}" --train corpus --batch-tokens 1024 --dry-run)
    expect another_tokenizer_on_two_ranks 9 'expected the tokenizer of other' "${two[@]}" --model other
    said another_tokenizer_allowed_on_two_ranks 0 '^warning: corpus: .*other/tokenizer.json' \
        "${two[@]}" --model other --allow-other-tokenizer
    check one_warning_of_two_ranks one_warning
else skip ranks "$no_ranks"; fi

# ---- inputs that are neither text files nor JSONL ------------------------------------------------------
# refused NAME PATTERN HINT ARGUMENTS...: prepare.py exits with code 3 and that hint and writes nothing
refused() {
    local name=$1 pattern=$2 hint=$3
    shift 3
    expect "$name" 3 "^error: $pattern" python3 "$root/data/prepare.py" "$@" --out none --quiet
    grep -qE -e "^hint: .*$hint" out.txt || bad "hint_of_$name" "expected $hint"
    [ ! -e none/train_00000.bin ] || bad "nothing_written_$name" "$(ls none)"
    rm -rf none
}
# documents NAME COUNT ARGUMENTS...: prepare.py makes this many documents
documents() {
    local name=$1 count=$2
    shift 2
    rm -rf some
    expect "$name" 0 "^train +$count " python3 "$root/data/prepare.py" "$@" --out some --val-frac 0
}
mkdir inputs
python3 - << 'PY'
import bz2, gzip, json, lzma
rows = [{"text": "text %d" % i, "id": i} for i in range(3)]
lines = "".join(json.dumps(r) + "\n" for r in rows).encode()
chat = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
put = lambda name, data: open("inputs/" + name, "wb").write(data)
put("table.csv", b"id,text\n1,one\n2,two\n")
put("table.tsv", b"id\ttext\n1\tone\n")
put("array.json", json.dumps(rows, indent=1).encode())
put("array1.json", json.dumps(rows).encode())
put("object.json", json.dumps(rows[0], indent=1).encode())
put("lines.json", lines)
put("lines.ndjson", lines)
put("lines.jsonl.gz", gzip.compress(lines))
put("lines.json.gz", gzip.compress(lines))
put("table.csv.gz", gzip.compress(b"id,text\n1,one\n"))
put("text.txt.gz", gzip.compress(b"some text\n" * 10))
put("cut.txt.gz", gzip.compress(bytes(range(32, 127)) * 100)[:40])
put("binary.gz", gzip.compress(b"\0\1\2"))
put("text.xz", lzma.compress(b"text"))
put("part.arrow", b"ARROW1")
put("chat.jsonl", "".join(json.dumps(c) + "\n" for c in chat).encode())
put("sharegpt.jsonl", b'{"conversations": [{"from": "human", "value": "hi"}]}\n')
put("array.jsonl", json.dumps(rows, indent=1).encode())
PY
refused csv 'inputs/table.csv: expected text or JSONL, found CSV' '\.jsonl.*--as-text' inputs/table.csv
refused tsv 'inputs/table.tsv: expected text or JSONL, found CSV' '\.jsonl.*--as-text' inputs/table.tsv
refused gzipped_csv 'inputs/table.csv.gz: expected text or JSONL, found CSV' '\.jsonl' inputs/table.csv.gz
refused json_array 'inputs/array.json: expected JSON Lines, found a JSON array' "jq -c '\.\[\]'" inputs/array.json
refused json_array_in_a_line 'inputs/array1.json: expected JSON Lines, found a JSON array' "jq -c '\.\[\]'" \
    inputs/array1.json
refused json_object 'inputs/object.json: expected JSON Lines, found a JSON object over several lines' "jq -c '\.'" \
    inputs/object.json
refused json_array_as_jsonl 'inputs/array.jsonl:1: expected one JSON object a line, found an array' \
    "jq -c '\.\[\]'" inputs/array.jsonl
refused arrow 'inputs/part.arrow: expected text or JSONL, found Arrow' 'from_file.*to_json' inputs/part.arrow
refused xz 'inputs/text.xz: expected text or JSONL, found xz' 'xz -d' inputs/text.xz
refused binary_in_gzip 'inputs/binary.gz: expected text, found a binary file' '\.jsonl' inputs/binary.gz
refused cut_gzip 'inputs/cut.txt.gz: cannot read' 'copy' inputs/cut.txt.gz
refused chat 'inputs/chat.jsonl:1: expected a string "text", found messages' \
    'chat messages are not plain text.*--chat' inputs/chat.jsonl
refused chat_by_key 'inputs/chat.jsonl:1: expected a string "messages", found an array' \
    'chat messages are not plain text.*--chat' inputs/chat.jsonl --text-key messages
refused sharegpt 'inputs/sharegpt.jsonl:1: expected a string "text", found conversations' \
    'chat messages are not plain text' inputs/sharegpt.jsonl
documents json_lines_named_json 3 inputs/lines.json
documents ndjson 3 inputs/lines.ndjson
documents gzipped_jsonl 3 inputs/lines.jsonl.gz
documents gzipped_json_lines 3 inputs/lines.json.gz
documents gzipped_text 1 inputs/text.txt.gz
check gzipped_text_is_unpacked grep -q '"tokens": 102' some/dataset.json
documents csv_as_text 1 inputs/table.csv --as-text
documents json_as_text 1 inputs/array.json --as-text
# in a directory: tables are skipped and counted, other data files are refused
mkdir tree && cp inputs/table.csv inputs/array.json inputs/object.json inputs/text.txt.gz tree
echo words > tree/a.txt
documents tables_in_a_tree 2 tree
check tables_in_a_tree_are_counted \
    sh -c 'python3 "$1/data/prepare.py" tree --out some --overwrite | grep "^left out: 3 CSV or JSON files (--as-text takes them)$"' sh "$root"
documents tables_in_a_tree_as_text 5 tree --as-text
cp inputs/part.arrow tree
refused arrow_in_a_tree 'tree/part.arrow: expected text or JSONL, found Arrow' 'from_file.*--glob' tree
documents arrow_excluded_by_glob 1 tree --glob '*.txt'
mkdir tables && cp inputs/table.csv tables
refused a_tree_of_tables 'tables: no document for training' 'CSV or JSON' tables

# ---- the choice of EOS ---------------------------------------------------------------------------------
# a stand-in for the package tokenizers: one token per word, and the special tokens
mkdir stub gguf
cat > stub/tokenizers.py << 'PY'
import json
class Encoding:
    def __init__(self, ids): self.ids = ids
class Tokenizer:
    @staticmethod
    def from_str(text):
        self = Tokenizer()
        self.vocab = json.loads(text)["model"]["vocab"]
        return self
    def no_truncation(self): pass
    def no_padding(self): pass
    def get_vocab(self, with_added_tokens): return self.vocab
    def encode(self, text, add_special_tokens): return Encoding([3] * len(text.split()))
PY
echo '{"model": {"vocab": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "word": 3}}}' > gguf/tokenizer.json
with_stub() { PYTHONPATH=$work/stub python3 "$root/data/prepare.py" tree/a.txt --val-frac 0 \
    --tokenizer gguf --out some --overwrite; }
ends() {  # ends NAME EOS WARNING TOKENIZER_CONFIG CONFIG GENERATION_CONFIG; WARNING '': none
    local name=$1 eos=$2 warning=$3
    echo "$4" > gguf/tokenizer_config.json && echo "$5" > gguf/config.json
    echo "$6" > gguf/generation_config.json
    said "$name" 0 "$warning" with_stub
    [ -n "$warning" ] || no_warning "$name"
    check "eos_of_$name" grep -q "\"eos\": $eos," some/dataset.json
}
ends eos_agrees_everywhere 2 '' '{"eos_token": "<|im_end|>"}' '{"eos_token_id": 2}' '{"eos_token_id": [0, 2]}'
ends eos_against_the_config 1 \
    '^warning: gguf: tokenizer_config.json says EOS <\|im_start\|> \(1\), config.json says <\|im_end\|> \(2\): documents end with <\|im_start\|> \(1\)$' \
    '{"eos_token": "<|im_start|>"}' '{"eos_token_id": 2}' '{}'
ends eos_against_the_generation_config 1 \
    '^warning: .* generation_config.json says <\|endoftext\|> \(0\), <\|im_end\|> \(2\): documents end with <\|im_start\|> \(1\)$' \
    '{"eos_token": {"content": "<|im_start|>"}}' '{}' '{"eos_token_id": [0, 2]}'
ends eos_of_a_list 2 '' '{"eos_token": "<|im_end|>"}' '{"eos_token_id": null}' '{"eos_token_id": [0, 2]}'
ends eos_by_its_usual_name 0 '^warning: .*the usual name says EOS <\|endoftext\|> \(0\), config.json says' \
    '{}' '{"eos_token_id": 2}' '{}'
echo '{"eos_token": "<|im_end|>"}' > gguf/special_tokens_map.json
ends eos_against_the_special_tokens_map 1 '^warning: .*special_tokens_map.json says <\|im_end\|> \(2\)' \
    '{"eos_token": "<|im_start|>"}' '{"eos_token_id": 1}' '{}'

finish
