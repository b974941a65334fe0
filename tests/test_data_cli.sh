#!/usr/bin/env bash
# Data, end to end: damaged and changed shards, shards of another tokenizer, documents and tokens that
# are never trained on.
# Runs the sanitizer build; set TRAIN to test another one.
. "$(dirname "$0")/lib.sh"
scratch data
command -v python3 > /dev/null || skip_all data 'python3 is not installed'
# by a path without spaces: functions below print command lines
ln -s "${TRAIN:-$root/build/asan/train_llama}" train_llama && train=./train_llama

# flip FILE OFFSET: the lowest bit of that byte
flip() { python3 "$root/tests/shards.py" flip "$@"; }

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

# llm.c's format: no index at all
mkdir llmc
python3 - << 'PY'
import struct
data = open("corpus/train_00000.bin", "rb").read()
tokens = struct.unpack_from("<i", data, 8)[0]
open("llmc/train_00000.bin", "wb").write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + data[1024:])
PY
expect unchecked_tokens_are_reported 0 'index built by scanning for token 256, tokens unchecked' \
    $(on llmc --boundary-token 256 --steps 2 --out llmc.run)

# shards changed before --resume: rebuilt from other texts of the same lengths, or edited in place
cp -r text edited
sed -i 's/^line 1 of/LINE 1 of/' "edited/doc 1.txt" && cp -r corpus remade
prepare edited --out remade --val-frac 0.2
expect train_before_the_edit 0 '^done' $(on corpus --steps 2 --out corpus.run)
mv corpus corpus.aside && mv remade corpus
expect resume_on_rebuilt_shards 9 'error: .*data_fingerprint \(was' \
    $(on corpus --steps 4 --out corpus.run --resume)
rm -r corpus && mv corpus.aside corpus
expect resume_on_the_same_shards 0 '^done' $(on corpus --steps 4 --out corpus.run --resume)
flip llmc/train_00000.bin 20000
expect resume_on_edited_llmc_shards 9 'error: .*token_fingerprint \(was' \
    $(on llmc --boundary-token 256 --steps 4 --out llmc.run --resume)

# ---- documents and tokens that are never trained on --------------------------------------------------
# three documents of 12, 52 and 102 tokens including BOS and EOS
mkdir lengths
for n in 10 50 100; do printf "%${n}s" ' ' | tr ' ' x > lengths/$n.txt; done
prepare lengths --out few --val-frac 0
said_at_the_end() { tail -n 3 said.txt | grep -E "$1"; }
# said NAME ...: expect, with its output kept in said.txt for the checks that follow
said() { expect "$@" && cp out.txt said.txt; }
few() { echo "$train" "${options[@]}" --train few --steps 2 --overwrite --out few.run "$@"; }
train_line='^train +1 unpad.c shard, 3 documents, 166 tokens$'
said documents_are_counted 0 "$train_line" $(few --max-seqlen 102)
lacks no_message_without_long_documents 'longer than' said.txt
said split_documents_are_counted 0 '^ +2 documents longer than 40 tokens split$' \
    $(few --max-seqlen 40)
lacks splitting_leaves_no_token_out 'never trained|left out: [0-9]+ document' said.txt
said truncated_documents_are_counted 0 \
    '^ +1 document longer than 100 tokens truncated: 2 of 166 tokens \(1.2 %\) never trained$' \
    $(few --max-seqlen 100 --long-docs truncate)
check truncated_documents_are_repeated_at_the_end said_at_the_end \
    '^left out: 1 document longer than 100 tokens truncated: 2 of 166 tokens \(1.2 %\) never trained'
said dropped_documents_are_counted 0 \
    '^ +2 documents longer than 40 tokens dropped: 154 of 166 tokens \(92.8 %\) never trained$' \
    $(few --max-seqlen 40 --long-docs drop)
check dropped_documents_are_repeated_at_the_end said_at_the_end \
    '^left out: 2 documents longer than 40 tokens dropped: 154 of 166 tokens \(92.8 %\) never trained'
check_python left_out_tokens_are_in_the_log << 'PY'
import json
start = json.loads(open("few.run/log.jsonl").readline())
assert start["event"] == "start", start
assert start["data"] == {"train": {
    "shards": 1, "unchecked_shards": 0, "documents": 3, "tokens": 166, "empty_documents": 0,
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
    '^ +[0-9]+ documents longer than 128 tokens split, [0-9]+ documents without a target: [0-9]+ of [0-9]+ tokens \(' said.txt
has trained_tokens_in_the_step_line '^step +4/4 .* tok/s \([0-9]+ targets/s\) \| fill ' said.txt
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
said compare_under_a_mask 0 '^repad ' $(masked --compare 1)
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
# warns NAME PATTERN MODEL ARGUMENTS...: one warning, and it matches
warns() {
    said "$1" 0 "^warning: corpus: $2" $(with "${@:3}")
    check "one_warning_for_$1" one_warning
}
silent() {      # silent NAME MODEL
    said "$1" 0 '^model +' $(with "$2")
    lacks "no_warning_for_$1" '^warning: ' said.txt
}
cp -r tiny same && cp corpus/tokenizer.json same
silent the_same_tokenizer same
cp -r same other && echo >> other/tokenizer.json
said model_with_another_tokenizer 9 \
    'error: corpus: expected the tokenizer of other/tokenizer.json \(SHA-256 [0-9a-f]{16}\.\.\.\), found [0-9a-f]{16}' \
    $(with other)
has hint_names_both_solutions '^hint: .*--model other.*--allow-other-tokenizer' said.txt
has hash_equals_sha256sum "SHA-256 $(sha256sum other/tokenizer.json | head -c 16)" said.txt
expect eval_with_another_tokenizer 9 'expected the tokenizer of other' $train --model other --from-scratch --eval --val corpus
expect eval_of_training_shards 0 '^all ' $train --model tiny --from-scratch --eval --val llmc --boundary-token 256 \
    --max-seqlen 128
check shards_of_an_unknown_tokenizer $(with same --train llmc --boundary-token 256)
expect no_validation_data 3 'nowhere' $(with same --val nowhere)
warns another_tokenizer_allowed '.*other/tokenizer.json' other --allow-other-tokenizer
# validation shards of another tokenizer than the training shards; the model has no tokenizer.json
cp -r corpus retagged
flip retagged/val_00000.bin 64 && seal_shard retagged/val_00000
expect validation_of_another_tokenizer 9 'error: retagged: expected the tokenizer of corpus' \
    $(with tiny --val retagged)
expect validation_of_another_tokenizer_than_the_model 9 'error: retagged: expected the tokenizer of same/tok' \
    $(with same --val retagged)
# BOS and EOS
model_says() {  # model_says CONFIG_EOS GENERATION_CONFIG: in the directory `ends`
    rm -rf ends && cp -r tiny ends
    sed -i "s/\"eos_token_id\": 257/\"eos_token_id\": $1/" ends/config.json
    echo "$2" > ends/generation_config.json
}
model_says 5 '{"eos_token_id": [6, 7]}'
warns another_eos 'documents end with token 257, but eos_token_id of ends is 5, 6, 7$' ends
model_says 5 '{"eos_token_id": [6, 257], "bos_token_id": 256}'
silent an_eos_of_several ends
model_says '[5, 257]' '{}'
silent an_eos_of_several_in_the_config ends
model_says 257 '{"bos_token_id": 3}'
sed -i 's/"bos_token_id": 256/"bos_token_id": 1/' ends/config.json
warns another_bos 'documents begin with token 256, but bos_token_id of ends is 1, 3$' ends
model_says '[257, 256]' '{"bos_token_id": 3}'
sed -i 's/"bos_token_id": 256/"bos_token_id": 1/' ends/config.json
silent a_bos_that_is_an_eos ends
model_says null '{}'
silent a_model_without_eos ends
model_says 257 '{'
expect a_damaged_generation_config 3 'error: ends/generation_config.json' $(with ends)
silent byte_shards_for_demo demo
said byte_shards_for_smollm2 0 \
    '^warning: corpus: made for a vocabulary of 258, smollm2-135m has 49152: ' $(with smollm2-135m)
has another_eos_of_a_built_in_model \
    '^warning: corpus: documents end with token 257, but eos_token_id of smollm2-135m is 0$' said.txt

# ---- ranks with different shards under the same path --------------------------------------------------
ranks_train=${RANKS_TRAIN:-$root/build/cpu/train_llama}
if ranks_can_run "$ranks_train"; then
    for kind in corpus llmc masked; do
        mkdir -p p1 p2 && cp -r tiny $kind p1 && cp -r tiny $kind p2
        prepare edited --out p2/corpus --val-frac 0.2
        [ $kind != llmc ] || flip p2/llmc/train_00000.bin 20001
        [ $kind != masked ] || mask_shards p2/masked "$rest"
        job=("$ranks_train" "${options[@]}" --train $kind --boundary-token 256 --batch-tokens 1024 --steps 2 --out run)
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

finish
