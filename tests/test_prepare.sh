#!/usr/bin/env bash
# data/prepare.py: the trainer's own reader reads its output back, byte for byte; its errors.
. "$(dirname "$0")/lib.sh"
scratch prepare
cd "$root" || exit 1
prepare=$root/data/prepare.py
command -v python3 > /dev/null || skip_all prepare 'python3 is not installed'

# read_back DIR SPLIT: prints every document through dataset.h and tokenizer.h, each followed by a NUL
cat > "$work/read_back.c" <<'C'
#include <stdio.h>
#include <stdlib.h>

#include "data/base/error.h"
#include "data/base/memory.h"
#include "data/models/tokenizer.h"
#include "data/shards/dataset.h"

int main(int argc, char **argv) {
    Error err = {0};
    Dataset ds;
    Tokenizer t;
    DatasetOptions options = dataset_options();
    options.split = argc > 2 ? argv[2] : "train";
    if (!dataset_open(&ds, argv[1], &options, &err)) error_exit(&err);
    if (!tokenizer_open(&t, argv[1], &err)) error_exit(&err);
    if (dataset_num_unchecked(&ds) > 0) return 1;
    for (int64_t doc = 0; doc < ds.num_docs; doc++) {
        const int64_t n = dataset_doc_length(&ds, doc);
        int32_t *ids = host_calloc((size_t)n, sizeof(int32_t), "tokens");
        if (!dataset_read(&ds, doc, 0, n, ids, &err)) error_exit(&err);  // checksums too
        for (int64_t i = 0; i < n; i++) {
            size_t size;
            const unsigned char *bytes = tokenizer_bytes(&t, ids[i], &size);
            if ((i == 0) != (ids[i] == ds.bos)) return 1;
            if ((i == n - 1) != (ids[i] == ds.eos)) return 1;
            if (!t.special[ids[i]]) fwrite(bytes, 1, size, stdout);
        }
        putchar(0);
        free(ids);
    }
    dataset_close(&ds);
    tokenizer_free(&t);
    return 0;
}
C
${CC:-cc} -std=gnu11 -O1 -I "$PWD" "$work/read_back.c" build/cpu/libhost.a -o "$work/read_back" \
    -ljansson -lpcre2-8 -lunistring -lpthread -lm || exit 1

run() { python3 "$prepare" --quiet "$@"; }

# refused CODE PATTERN ARGUMENTS...: exit code, one error line that matches, nothing written
refused() {
    local code=$1 pattern=$2 status
    shift 2
    run "$@" --out "$work/refused" > "$work/stdout" 2> "$work/stderr"
    status=$?
    cat "$work/stderr"
    [ $status -eq "$code" ] && grep -qE "^error: .*$pattern" "$work/stderr" &&
        [ ! -s "$work/stdout" ] && [ "$(grep -c '^error: ' "$work/stderr")" -eq 1 ] &&
        ! grep -qvE '^(error|hint): ' "$work/stderr" &&
        [ ! -e "$work/refused/train_00000.bin" ] && [ -z "$(ls -A "$work/refused" 2> /dev/null)" ]
}

# A directory with every byte value, an empty file, a binary one, hidden ones, and unusual names
mkdir -p "$work/tree/b" "$work/tree/.hidden" "$work/tree/__pycache__"
python3 - "$work" << 'PY'
import gzip, json, os, random, sys
tmp = sys.argv[1]
random.seed(1)
put = lambda name, data: open(os.path.join(tmp, name), "wb").write(data)
put("tree/a.txt", b"alpha\n")
put("tree/b/bytes.txt", bytes(range(1, 256)) * 3)
put("tree/b/new\nline.txt", b"strange name\n")
put("tree/c.py", "h\u00e9llo \u20ac\n".encode())
put("tree/empty.txt", b"")
put("tree/binary.txt", b"a\0b")
put("tree/.hidden/x.txt", b"hidden")
put("tree/__pycache__/x.txt", b"cache")
letters = "ab c\n\u00e9\u20ac\U0001f600"
texts = ["document %d " % i + "".join(random.choices(letters, k=random.randrange(300)))
         for i in range(500)] + ["", "\u0000\u0001"]
lines = "".join(json.dumps({"text": t, "other": 1}) + "\n" for t in texts).encode()
put("lines.jsonl", lines)
put("shuffled.jsonl", b"".join(sorted(lines.splitlines(True), key=lambda l: l[20:])))
gzip.open(os.path.join(tmp, "lines.jsonl.gz"), "wb").write(lines)
put("lines.expected", b"".join(t.encode() + b"\0" for t in texts if t))
put("tree.expected", b"".join(open(os.path.join(tmp, "tree", n), "rb").read() + b"\0"
                              for n in ("a.txt", "b/bytes.txt", "b/new\nline.txt", "c.py")))
put("bad.jsonl", b'{"text": "good"}\n\n{"text": 3}\n')
put("broken.jsonl", b'{"text": "good"}\n{"text": "cut')
PY

round_trip() {  # round_trip EXPECTED ARGUMENTS...: documents come back in order
    local expected=$1
    shift
    rm -rf "$work/out"
    run "$@" --val-frac 0 --out "$work/out" && "$work/read_back" "$work/out" > "$work/found" &&
        cmp "$expected" "$work/found" && ! ls -A "$work/out" | grep -q '^\.prepare'
}
one_file() {
    printf 'alpha\n\0' > "$work/one.expected"
    round_trip "$work/one.expected" "$work/tree/a.txt"
}
only_glob() {
    printf 'h\xc3\xa9llo \xe2\x82\xac\n\0' > "$work/glob.expected"
    round_trip "$work/glob.expected" "$work/tree" --glob '*.py'
}
functions() {  # decorated, a method, async; not other code, not a file that does not parse
    mkdir -p "$work/code"
    printf 'import os\nX = "\\d"\n@cache\ndef f(x):\n    return x  # \xc3\xa9\nclass A:\n    y = 1\n' \
        > "$work/code/a.py"
    printf '    def g(self):\n        def inner(): pass\n\nasync def h(): pass' >> "$work/code/a.py"
    printf 'def broken(:\n' > "$work/code/b.py"
    printf '@cache\ndef f(x):\n    return x  # \xc3\xa9\n\0    def g(self):\n' > "$work/code.expected"
    printf '        def inner(): pass\n\0async def h(): pass\0' >> "$work/code.expected"
    round_trip "$work/code.expected" "$work/code" --glob '*.py' --python-functions
}
many_shards() {
    round_trip "$work/lines.expected" "$work/lines.jsonl" --shard-tokens 5000 &&
        [ "$(ls "$work"/out/train_*.bin | wc -l)" -gt 10 ]
}
sizes_are_exact() {
    python3 - "$work/out" << 'PY'
import glob, json, os, struct, sys
summary = json.load(open(sys.argv[1] + "/dataset.json"))
tokens = documents = 0
for path in sorted(glob.glob(sys.argv[1] + "/train_*.bin")):
    head = struct.unpack("<256i", open(path, "rb").read(1024))
    assert head[:3] == (20240520, 1, (os.path.getsize(path) - 1024) // 2), head[:3]
    assert head[8:14] == (0x44415055, 1, 258, 3, 256, 257), head[8:14]
    index = open(path[:-4] + ".idx", "rb").read()
    assert struct.unpack_from("<Q", index, 32) == (4096,)
    assert len(index) == 44 + 8 * head[14] + 4 * -(-head[2] // 4096)
    tokens, documents = tokens + head[2], documents + head[14]
assert (tokens, documents) == (summary["train"]["tokens"], summary["train"]["documents"])
assert sum(summary["train"]["documents_up_to"].values()) == documents == 501
assert summary["left_out"] == {"empty_documents": 1, "binary_files": 0,
                               "csv_or_json_files": 0, "broken_lines": 0}
PY
}
broken_lines_left_out() {
    run "$work/broken.jsonl" "$work/bad.jsonl" --val-frac 0 --out "$work/broken" \
        2> "$work/stderr" &&
        [ "$("$work/read_back" "$work/broken" | tr '\0' ' ')" = 'good good ' ] &&
        grep -q 'broken.jsonl:2: expected JSON' "$work/stderr" &&
        grep -q 'bad.jsonl:3: expected a string' "$work/stderr" &&
        grep -q '"broken_lines": 2' "$work/broken/dataset.json"
}
jobs_agree() {
    run "$work/tree" "$work/lines.jsonl" --val-frac 0.2 --jobs 1 --out "$work/jobs1" &&
        run "$work/tree" "$work/lines.jsonl" --val-frac 0.2 --jobs 2 --out "$work/jobs2" &&
        run "$work/tree" "$work/lines.jsonl.gz" --val-frac 0.2 --jobs 3 --out "$work/jobs3" &&
        diff -r "$work/jobs1" "$work/jobs2" && diff -r "$work/jobs1" "$work/jobs3"
}
sorted_documents() { "$work/read_back" "$1" "$2" | sort -z; }
validation_by_content() {
    run "$work/lines.jsonl" --val-frac 0.2 --out "$work/order1" &&
        run "$work/shuffled.jsonl" --val-frac 0.2 --out "$work/order2" &&
        sorted_documents "$work/order1" val > "$work/val1" &&
        sorted_documents "$work/order2" val > "$work/val2" &&
        cmp "$work/val1" "$work/val2" || return 1
    local n
    n=$(tr -dc '\0' < "$work/val1" | wc -c)
    echo "$n validation documents"
    [ "$n" -gt 70 ] && [ "$n" -lt 130 ] || return 1
    { "$work/read_back" "$work/order1" train; "$work/read_back" "$work/order1" val; } |
        sort -z > "$work/both"
    sort -z "$work/lines.expected" | cmp - "$work/both"
}
overwriting() {
    rm -rf "$work/over"
    run "$work/lines.jsonl" --shard-tokens 5000 --out "$work/over" &&
        ! run "$work/tree" --out "$work/over" 2> "$work/stderr" &&
        grep -q 'holds a data set' "$work/stderr" && [ -e "$work/over/train_00003.bin" ] &&
        run "$work/tree" --val-frac 0 --out "$work/over" --overwrite &&
        [ ! -e "$work/over/train_00001.bin" ] &&
        "$work/read_back" "$work/over" | cmp - "$work/tree.expected"
}
no_tokenizers_package() {
    mkdir -p "$work/stub" && echo 'raise ImportError' > "$work/stub/tokenizers.py"
    PYTHONPATH=$work/stub refused 2 'needs the Python package tokenizers' "$work/tree" \
        --tokenizer "$work/out/tokenizer.json"
}
summary_is_printed() {
    python3 "$prepare" "$work/tree" --val-frac 0 --out "$work/summary" \
        > "$work/stdout" 2> "$work/stderr" && cat "$work/stdout" &&
        grep -qE '^train +4 +' "$work/stdout" && [ ! -s "$work/stderr" ] &&
        grep -q 'left out: 1 empty document, 1 binary file$' "$work/stdout"
}
file_as_directory() {
    run "$work/tree" --out "$work/one.expected"
    [ $? -eq 4 ]
}
as_hugging_face() {  # the tokenizers package with the byte tokenizer.json gives the same shards
    run "$work/lines.jsonl" --out "$work/by_hf" --tokenizer "$work/out/tokenizer.json" &&
        run "$work/lines.jsonl" --out "$work/by_byte" &&
        for f in train_00000.{bin,idx} val_00000.bin tokenizer.json tokenizer_config.json; do
            cmp "$work/by_hf/$f" "$work/by_byte/$f" || return 1
        done
}

check one_file one_file
check tree round_trip "$work/tree.expected" "$work/tree"
check tree_with_glob only_glob
check python_functions functions
check jsonl round_trip "$work/lines.expected" "$work/lines.jsonl"
check gzipped_jsonl round_trip "$work/lines.expected" "$work/lines.jsonl.gz"
check many_shards many_shards
check headers_and_summary_agree sizes_are_exact
check jobs_do_not_change_a_byte jobs_agree
check validation_is_chosen_by_content validation_by_content
check overwriting_leaves_no_old_shard overwriting
check summary_is_printed summary_is_printed
check refuses_no_arguments refused 2 'required: INPUT'
check refuses_unknown_option refused 2 'unrecognized' "$work/tree" --frobnicate
check refuses_bad_number refused 2 'val-frac' "$work/tree" --val-frac 2
check refuses_missing_input refused 3 'absent.*found none' "$work/absent"
check refuses_binary_file refused 3 'binary' "$work/tree/binary.txt"
check broken_lines_are_left_out broken_lines_left_out
check refuses_wrong_field refused 3 'bad.jsonl:3: expected a string' "$work/bad.jsonl" --strict
check refuses_broken_json refused 3 'broken.jsonl:2: expected JSON' "$work/broken.jsonl" --strict \
    --jobs 2
check refuses_other_key refused 3 'expected a string "body"' "$work/lines.jsonl" --text-key body
check refuses_empty_glob refused 3 'found none' "$work/tree" --glob '*.rs'
check refuses_only_validation refused 3 'no document for training' "$work/tree" --val-frac 1
check refuses_only_empty refused 3 'no document for training' "$work/tree/empty.txt"
check refuses_without_tokenizers no_tokenizers_package
check refuses_a_file_as_directory file_as_directory
if python3 -c 'import tokenizers' 2> /dev/null; then
    check tokenizer_json_in_tokenizers as_hugging_face
else
    skip tokenizer_json_in_tokenizers 'the Python package tokenizers is not installed'
fi
finish
