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

finish
