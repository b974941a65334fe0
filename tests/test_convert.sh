#!/usr/bin/env bash
# data/convert.py: files that other trainers wrote (tests/golden/shards) become shards with the same documents and
# masks; damaged ones are refused. Token j of document i is 100 i + j + 1, but for the last one.
. "$(dirname "$0")/lib.sh"
python3 -c 'import numpy' 2> /dev/null || PATH=/usr/bin:$PATH  # the system's Python may have it
with_package convert numpy || finish
golden=$root/tests/golden/shards
convert() { python3 "$root/data/convert.py" "$@"; }
# samples NAME 'FILE:END ...' ARGUMENTS...: files whose documents end with token END
samples() {
    local list=($2)
    check "converts_$1" convert "${list[@]%:*}" --out "$1" --vocab-size 130000 "${@:3}"
    plain=-S check_python "documents_of_$1" "$1" "${list[@]}" << 'PY'
lengths, wanted = [4, 1, 9, 2, 6], []
for file, end in (name.split(":") for name in sys.argv[2:]):
    masked = file.endswith(("datatrove_wide.ds", "llmq_mask.bin"))
    for i, n in enumerate(lengths):
        mask = [int(j >= n // 2 and j > 0) for j in range(n)]  # the second half is trained
        wanted.append(([100 * i + j + 1 for j in range(n - 1)] + [int(end)], mask if masked else None))
        if "llmq_mask" in file and n < 7:  # samples are padded by zeros, which are documents without a target
            wanted += [([0] * (7 - n), [0] * (7 - n))]
assert shards.read(sys.argv[1]) == wanted, (shards.read(sys.argv[1]), wanted)
PY
}
cp -r "$golden" made && mkdir bare && cp "$golden"/olmo*.npy bare
samples formats 'made/datatrove.ds:50256 made/datatrove_wide.ds:70000 made/megatron.bin:50256
    made/megatron_wide.bin:128255 made/olmo.npy:50279 made/olmo_wide.npy:100257'
samples tokens_alone 'made/llmq.bin:50256 made/llmq_mask.bin:50256 made/numpy.npy:50256' --boundary-token 50256
samples olmo_alone bare/olmo.npy:50279 --boundary-token 50279
samples olmo_wide_alone bare/olmo_wide.npy:100257 --boundary-token 100257
# OLMo's masks in files of their own, raw and numpy's; token 0 begins the first document
python3 - << 'PY'
import gzip, numpy as np
ids, mask = [0, 6, 0, 7, 8, 9, 99, 15, 16, 0, 17, 99], [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1]
np.array(ids, "<u4").tofile("token_ids_0.npy"), np.array(mask, "?").tofile("labels_mask_0.npy")
gzip.open("token_ids_0.csv.gz", "wt").write("0,7\n7,12\n")
np.save("token_ids_1.npy", np.array(ids, "<u4")), np.save("labels_mask_1.npy", np.array(mask, "?"))
open("labels_mask_2.npy", "w"), open("metadata.json", "w"), open("token_ids_1.meta", "w")
PY
said olmo_masks 0 '^token_ids_1.npy: 2 documents, 12 tokens, 6 targets' convert *_[01].npy --out masked --vocab-size 100 \
    --boundary-token 99
check_python are_kept <<< 'assert shards.read("masked") == 2 * [([0, 6, 0, 7, 8, 9, 99], [0, 0, 0, 1, 1, 1, 1]), ([15, 16, 0, 17, 99], [0, 0, 0, 1, 1])]'
has and_what_is_not_read_is_named '^warning: not read: labels_mask_2.npy, metadata.json, token_ids_1.meta$' said.txt
head -c 11 labels_mask_0.npy > m && mv m labels_mask_0.npy
expect a_cut_mask 3 'and a mask, of 12 tokens' convert token_ids_0.npy --out masked --vocab-size 100
# ---- large files, again, and for the trainer ---------------------------------------------------------------
python3 - << 'PY'
import numpy as np
rng = np.random.default_rng(1)
ids = rng.integers(1, 250, 100_000).astype("<u2")
ids[rng.integers(0, len(ids), 300)] = 0
ids[0] = 0
np.save("large.npy", ids)
np.save("second.npy", ids[:5000])
np.save("third.npy", ids[:30000])
PY
# holds NAME DIR FILE...: the documents of these files, each of which begins with token 0, and no others
holds() {
    check_python "$@" << 'PY'
import numpy as np
documents = [ids for ids, _ in shards.read(sys.argv[1])]
assert sum(documents, []) == sum((np.load(f).tolist() for f in sys.argv[2:]), [])
assert all(ids[0] == 0 and 0 not in ids[1:] for ids in documents)
PY
}
large=(large.npy second.npy --out large --vocab-size 258 --boundary-token 0 --starts)
expect large 0 '^large.npy: [0-9]{3} documents, 100000 tokens, 0 targets, 1 shards$' convert "${large[@]}"
holds large_is_the_same large large.npy second.npy
touch -d 2000-01-01 large/train_00000_00000.bin
rm large/train_00001_00000.bin && touch second.npy
check resumes_by_file eval 'convert "${large[@]}" && [ -e large/train_00001_00000.bin ]'
check first_is_kept test "$(date -r large/train_00000_00000.bin +%Y)" -eq 2000
expect trains_on_them 0 '^train +2 unpad.c shards, [0-9]+ documents, 105000 tokens$' \
    "${TRAIN:-$root/build/asan/train_llama}" --train large --steps 1 --max-seqlen 64 --micro-batch-tokens 256 \
    --num-samples 0 --out run
# an index or a mask changes: its file, and no other, is converted again
for name in none datatrove_wide.ds.loss datatrove_wide.ds.index megatron.idx olmo.csv.gz; do
    rm -f beside/*.bin && touch made/$name
    check "converts_after_$name" convert made/*.ds made/megatron.bin made/olmo.npy --out beside --vocab-size 130000
    [ $name = none ] || check "only_what_${name}_belongs_to" test "$(ls beside/*.bin | wc -l)" -eq 1
done
sed 's/10\*\*8/2000/' "$root/data/convert.py" > small.py
small() { PYTHONPATH=$root/scripts python3 small.py "$@" --out small --vocab-size 258 --boundary-token 0; }
in_small() { check "$1" small "${@:2}" --starts && holds "$1_are_the_same" small "${@:2}"; }   # in_small NAME FILE...
in_small many_shards third.npy second.npy
check shards_are_many test -e small/train_00000_00010.bin
in_small fewer_files second.npy
expect a_full_disk 4 'error: small' eval '(ulimit -f 4 && trap "" XFSZ && small large.npy)'  # no shard is whole
in_small after_a_full_disk second.npy
# ---- what is refused ---------------------------------------------------------------------------------------
# refused NAME CODE PATTERN FILE ARGUMENTS...
refused() { expect "$1" "$2" "$3" convert "${@:4}" --out none --vocab-size 130000; }
refused no_boundary 2 'numpy.npy: does not say where documents end' "$golden/numpy.npy"
refused another_boundary 3 'token 7 is nowhere in it' "$golden/numpy.npy" --boundary-token 7
refused two_dimensions 3 'expected one dimension.*\(2, 3\)' "$golden/numpy_2d.npy" --boundary-token 0
refused another_format 3 'unknown format' "$root/README.md"
expect ids_beyond_the_vocabulary 3 'expected ids from 0 to 99, found 1 to 50256' convert "$golden/datatrove.ds" --out none --vocab-size 100
# every other length of a file or of its side files
check_python cut_files_are_refused "$golden" "$root/data" << 'PY'
golden, accepted = sys.argv[1], []
sys.path.insert(0, sys.argv[2])
import convert as c
class Args: out, vocab_size, boundary_token, starts = "none", 130000, 50256, False
for file, parts in (("datatrove_wide.ds", ["", ".index", ".loss"]), ("llmq_mask.bin", [""]), ("numpy.npy", [""]),
                    ("megatron.bin", ["", "idx"]), ("olmo.npy", ["", "csv.gz"])):
    names = [file if not p else file + p if p[0] == "." else file.rsplit(".", 1)[0] + "." + p for p in parts]
    whole = {n: open(golden + "/" + n, "rb").read() for n in names}
    for victim in names:
        size = len(whole[victim])
        for n in [*range(0, size - 20, 397), *range(max(size - 20, 0), size + (0 if victim.endswith("gz") else 9))]:
            for name in names:
                open(name, "wb").write(whole[name] if name != victim else (whole[name] + bytes(9))[:n])
            try:
                if n != len(whole[victim]):
                    c.read(file, Args)
                    accepted.append((victim, n, len(whole[victim])))
            except SystemExit as e:
                assert e.code == 3, e.code
assert not accepted, accepted
PY
finish
