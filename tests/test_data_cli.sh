#!/usr/bin/env bash
# Data as the user meets it: damaged and changed shards, shards of another tokenizer, documents and
# tokens that are never trained, and inputs that data/prepare.py refuses.
# Runs the sanitizer build; set TRAIN to test another one.
set -u
cd "$(dirname "$0")/.."
root=$PWD
train=${TRAIN:-$root/build/asan/train_llama}
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
. "$root/tests/lib.sh"
scratch data
command -v python3 > /dev/null || skip_all data 'python3 is not installed'

# prepare ARGUMENTS...: quiet; for texts whose preparation is not what is tested
prepare() { python3 "$root/data/prepare.py" --quiet "$@" > out.txt 2>&1 || bad "prepare $*" "exit code $?"; }
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
# on DATA ARGUMENTS...: the tiny model on these shards
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

# the index of the first version of the format: no checksums of tokens
cp -r corpus old
index_without_checksums old/*.idx
expect unchecked_tokens_are_said 0 '^train .* tokens, tokens unchecked: no checksums$' \
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

# changed before --resume: made again from texts of the same lengths, or changed in place
cp -r text edited
sed -i 's/^line 1 of/LINE 1 of/' "edited/doc 1.txt" && cp -r corpus remade
prepare edited --out remade --val-frac 0.2 --overwrite
expect train_before_the_edit 0 '^done' $(on corpus --steps 2 --out corpus.run)
mv corpus corpus.aside && mv remade corpus
expect resume_on_remade_shards 9 'error: .*data_fingerprint \(was' \
    $(on corpus --steps 4 --out corpus.run --resume)
rm -r corpus && mv corpus.aside corpus
expect resume_on_the_same_shards 0 '^done' $(on corpus --steps 4 --out corpus.run --resume)
flip old/train_00000.bin 1500
expect resume_on_edited_tokens_without_checksums 9 'error: .*token_fingerprint \(was' \
    $(on old --steps 4 --out old.run --resume)
flip old/train_00000.bin 1500
expect resume_on_unchecked_tokens_as_they_were 0 '^done' $(on old --steps 4 --out old.run --resume)
flip llmc/train_00000.bin 20000
expect resume_on_edited_llmc_shards 9 'error: .*token_fingerprint \(was' \
    $(on llmc --boundary-token 256 --steps 4 --out llmc.run --resume)

# ranks that find different shards under the same path
ranks_train=${RANKS_TRAIN:-$root/build/cpu/train_llama}
if command -v mpirun > /dev/null && ldd "$ranks_train" 2> /dev/null | grep -q libmpi; then
    export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
    one=(mpirun --allow-run-as-root --oversubscribe)
    for kind in corpus old; do
        mkdir -p p1 p2 && cp -r tiny $kind p1 && cp -r tiny $kind p2
        prepare edited --out p2/corpus --val-frac 0.2 --overwrite
        [ $kind = corpus ] || flip p2/old/train_00000.bin 1500
        job=("$ranks_train" "${options[@]}" --train $kind --batch-tokens 1024 --steps 2 --out run)
        expect "ranks_with_different_data_$kind" 9 'differences in training data \(rank 1\)' \
            "${one[@]}" -n 1 --wdir "$work/p1" "${job[@]}" : -n 1 --wdir "$work/p2" "${job[@]}"
        rm -r p1 p2
    done
else
    skip ranks_with_different_data 'no mpirun, or a trainer without MPI'
fi

# ---- documents and tokens that are never trained ----------------------------------------------------
# three documents of 12, 52 and 102 tokens (BOS and EOS among them), and an empty one in the shard
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
not_said() { ! grep -E "$1" said.txt; }
said_at_the_end() { tail -n 3 said.txt | grep -E "$1"; }
# said NAME ...: expect, whose output is kept for the checks behind it
said() { expect "$@" && cp out.txt said.txt; }
few() { echo "$train" "${options[@]}" --train few --steps 2 --overwrite --out few.run "$@"; }
train_line='^train +1 unpad.c shard, 3 documents, 166 tokens, 1 empty one left out$'
said empty_documents_are_counted 0 "$train_line" $(few --max-seqlen 102)
check nothing_is_said_of_long_documents_without_any not_said 'longer than'
said split_documents_are_counted 0 '^ +2 documents longer than 40 tokens are split$' \
    $(few --max-seqlen 40)
check no_token_is_left_out_by_splitting not_said 'never trained|left out: [0-9]+ document'
said truncated_documents_are_counted 0 \
    '^ +1 document longer than 100 tokens is truncated: 2 of 166 tokens \(1.2 %\) never trained$' \
    $(few --max-seqlen 100 --long-docs truncate)
check truncated_documents_at_the_end said_at_the_end \
    '^left out: 1 document longer than 100 tokens was truncated: 2 of 166 tokens \(1.2 %\) never trained'
said dropped_documents_are_counted 0 \
    '^ +2 documents longer than 40 tokens are dropped: 154 of 166 tokens \(92.8 %\) never trained$' \
    $(few --max-seqlen 40 --long-docs drop)
check dropped_documents_at_the_end said_at_the_end \
    '^left out: 2 documents longer than 40 tokens were dropped: 154 of 166 tokens \(92.8 %\) never trained'
check_python left_out_tokens_are_in_the_log << 'PY'
import json
start = json.loads(open("few.run/log.jsonl").readline())
assert start["event"] == "start", start
assert start["data"] == {"train": {
    "shards": 1, "unchecked_shards": 0, "documents": 3, "tokens": 166, "empty_documents": 1,
    "long_documents": 2, "tokens_left_out": 154}, "val": None}, start["data"]
PY
expect long_documents_as_an_error_before_anything_is_written 3 \
    'error: data: document [0-9] has (52|102) tokens, expected at most 40' \
    $(few --max-seqlen 40 --long-docs error --out long.run)
[ ! -e long.run ] && ok no_directory_of_a_refused_run || bad no_directory_of_a_refused_run "$(ls long.run)"
expect all_documents_dropped 3 'all 3 documents are longer than max_seqlen 11' \
    $(few --max-seqlen 11 --long-docs drop --out long.run)

# ---- a model and shards of different tokenizers -----------------------------------------------------
# with MODEL ARGUMENTS...: another model on the same shards
with() { echo "$train" "${options[@]}" --train corpus --dry-run --model "$@"; }
one_warning() { [ "$(grep -c '^warning: ' said.txt)" -eq 1 ]; }
no_warning() { ! grep '^warning: ' said.txt; }
cp -r tiny same && cp corpus/tokenizer.json same
said model_with_the_tokenizer_of_the_shards 0 '^model +same' $(with same)
check no_warning_for_the_same_tokenizer no_warning
cp -r same other && echo >> other/tokenizer.json
said model_with_another_tokenizer 9 \
    'error: corpus: expected the tokenizer of other/tokenizer.json \(SHA-256 [0-9a-f]{16}\.\.\.\), found [0-9a-f]{16}' \
    $(with other)
grep -q "^hint: .*prepare.py --tokenizer other.*--allow-other-tokenizer" out.txt &&
    ok hint_names_both_ways_out || bad hint_names_both_ways_out ''
check the_hash_is_that_of_sha256sum grep -q "SHA-256 $(sha256sum other/tokenizer.json | head -c 16)" said.txt
said another_tokenizer_allowed 0 '^warning: corpus: .*other/tokenizer.json' \
    $(with other --allow-other-tokenizer)
check one_warning_for_the_other_tokenizer one_warning
# the validation shards of another tokenizer than the training shards, which the model does not have
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
# ids that begin and end documents
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
check no_warning_for_an_eos_of_several no_warning
model_says ends '[5, 257]' '{}'
said an_eos_of_several_in_the_config 0 '^model +ends' $(with ends)
check no_warning_for_an_eos_of_several_in_the_config no_warning
model_says ends 257 '{"bos_token_id": 3}'
sed -i 's/"bos_token_id": 256/"bos_token_id": 1/' ends/config.json
said another_bos 0 '^warning: corpus: documents begin with token 256, but bos_token_id of ends is 1, 3$' \
    $(with ends)
check one_warning_for_another_bos one_warning
model_says ends null '{}'
said a_model_without_eos 0 '^model +ends' $(with ends)
check no_warning_without_an_eos no_warning
model_says ends 257 '{'
expect a_damaged_generation_config 3 'error: ends/generation_config.json' $(with ends)
said byte_shards_for_demo 0 '^model +demo' $(with demo)
check no_warning_for_demo no_warning
said byte_shards_for_smollm2 0 \
    '^warning: corpus: made for a vocabulary of 258, smollm2-135m has 49152: ' $(with smollm2-135m)
grep -q '^warning: corpus: documents end with token 257, but eos_token_id of smollm2-135m is 0$' out.txt &&
    ok another_eos_of_a_built_in_model || bad another_eos_of_a_built_in_model ''

finish
