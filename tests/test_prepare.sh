#!/usr/bin/env bash
# data/prepare.py: its output is read back by the trainer's own reader, byte for byte; its errors.
set -u
cd "$(dirname "$0")/.."
prepare=$PWD/data/prepare.py
passed=0 failed=0 skipped=0
tmp=$(mktemp -d -p /dev/shm 2> /dev/null || mktemp -d)  # in memory where possible: fsync is slow
trap 'rm -rf "$tmp"' EXIT
if ! command -v python3 > /dev/null; then
    echo 'skipped prepare: python3 is not installed'
    echo '0 passed, 0 failed, 1 skipped'
    exit 0
fi

# read_back DIR SPLIT: every document through documents.h and tokenizer.h, each ended by a NUL
cat > "$tmp/read_back.c" <<'C'
#include "data/documents.h"
#include "data/tokenizer.h"

int main(int argc, char **argv) {
    Error err = {0, "", ""};
    Dataset ds;
    Tokenizer t;
    DatasetOptions options = dataset_options();
    options.split = argc > 2 ? argv[2] : "train";
    if (!dataset_open(&ds, argv[1], &options, &err)) error_exit(&err);
    if (!tokenizer_open(&t, argv[1], &err)) error_exit(&err);
    for (int64_t doc = 0; doc < dataset_num_docs(&ds); doc++) {
        const int64_t n = dataset_doc_length(&ds, doc);
        int32_t *ids = (int32_t *)host_calloc((size_t)n, sizeof(int32_t), "tokens");
        if (!dataset_read(&ds, doc, 0, n, ids, &err)) error_exit(&err);
        for (int64_t i = 0; i < n; i++) {
            size_t size;
            const unsigned char *bytes = tokenizer_bytes(&t, ids[i], &size);
            if ((i == 0) != (ids[i] == dataset_bos(&ds))) return 1;
            if ((i == n - 1) != (ids[i] == dataset_eos(&ds))) return 1;
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
${CC:-cc} -std=gnu11 -O1 -I "$PWD" "$tmp/read_back.c" -o "$tmp/read_back" \
    -lcjson -lpthread -lm || exit 1

check() {       # check NAME COMMAND...
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then passed=$((passed + 1)) && echo "ok      $name"
    else failed=$((failed + 1)) && echo "FAILED  $name" && printf '%s\n' "$output" | head -20; fi
}
skip() { skipped=$((skipped + 1)) && echo "skipped $1: $2"; }
run() { python3 "$prepare" --quiet "$@"; }

# refused CODE PATTERN ARGUMENTS...: exit code, one error line that matches, and nothing written
refused() {
    local code=$1 pattern=$2 status
    shift 2
    run "$@" --out "$tmp/refused" > "$tmp/stdout" 2> "$tmp/stderr"
    status=$?
    cat "$tmp/stderr"
    [ $status -eq "$code" ] && grep -qE "^error: .*$pattern" "$tmp/stderr" &&
        [ ! -s "$tmp/stdout" ] && [ "$(grep -c '^error: ' "$tmp/stderr")" -eq 1 ] &&
        ! grep -qvE '^(error|hint): ' "$tmp/stderr" &&
        [ ! -e "$tmp/refused/train_00000.bin" ] && [ -z "$(ls -A "$tmp/refused" 2> /dev/null)" ]
}

# A tree with every byte value, an empty file, a binary one, hidden ones, and names that need care
mkdir -p "$tmp/tree/b" "$tmp/tree/.hidden" "$tmp/tree/__pycache__"
python3 - "$tmp" << 'PY'
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
    rm -rf "$tmp/out"
    run "$@" --val-frac 0 --out "$tmp/out" && "$tmp/read_back" "$tmp/out" > "$tmp/found" &&
        cmp "$expected" "$tmp/found" && ! ls -A "$tmp/out" | grep -q '^\.prepare'
}
one_file() {
    printf 'alpha\n\0' > "$tmp/one.expected"
    round_trip "$tmp/one.expected" "$tmp/tree/a.txt"
}
only_glob() {
    printf 'h\xc3\xa9llo \xe2\x82\xac\n\0' > "$tmp/glob.expected"
    round_trip "$tmp/glob.expected" "$tmp/tree" --glob '*.py'
}
functions() {  # a decorated one, a method, an async one; not the rest, not a file that does not parse
    mkdir -p "$tmp/code"
    printf 'import os\nX = "\\d"\n@cache\ndef f(x):\n    return x  # \xc3\xa9\nclass A:\n    y = 1\n' \
        > "$tmp/code/a.py"
    printf '    def g(self):\n        def inner(): pass\n\nasync def h(): pass' >> "$tmp/code/a.py"
    printf 'def broken(:\n' > "$tmp/code/b.py"
    printf '@cache\ndef f(x):\n    return x  # \xc3\xa9\n\0    def g(self):\n' > "$tmp/code.expected"
    printf '        def inner(): pass\n\0async def h(): pass\0' >> "$tmp/code.expected"
    round_trip "$tmp/code.expected" "$tmp/code" --glob '*.py' --python-functions
}
many_shards() {
    round_trip "$tmp/lines.expected" "$tmp/lines.jsonl" --shard-tokens 5000 &&
        [ "$(ls "$tmp"/out/train_*.bin | wc -l)" -gt 10 ]
}
sizes_are_exact() {
    python3 - "$tmp/out" << 'PY'
import glob, json, os, struct, sys
summary = json.load(open(sys.argv[1] + "/dataset.json"))
tokens = documents = 0
for path in sorted(glob.glob(sys.argv[1] + "/train_*.bin")):
    head = struct.unpack("<256i", open(path, "rb").read(1024))
    assert head[:3] == (20240520, 1, (os.path.getsize(path) - 1024) // 2), head[:3]
    assert head[8:14] == (0x44415055, 1, 258, 3, 256, 257), head[8:14]
    assert os.path.getsize(path[:-4] + ".idx") == 36 + 8 * head[14]
    tokens, documents = tokens + head[2], documents + head[14]
assert (tokens, documents) == (summary["train"]["tokens"], summary["train"]["documents"])
assert sum(summary["train"]["documents_up_to"].values()) == documents == 501
assert summary["left_out"] == {"empty_documents": 1, "binary_files": 0}
PY
}
jobs_agree() {
    run "$tmp/tree" "$tmp/lines.jsonl" --val-frac 0.2 --jobs 1 --out "$tmp/jobs1" &&
        run "$tmp/tree" "$tmp/lines.jsonl" --val-frac 0.2 --jobs 2 --out "$tmp/jobs2" &&
        run "$tmp/tree" "$tmp/lines.jsonl.gz" --val-frac 0.2 --jobs 3 --out "$tmp/jobs3" &&
        diff -r "$tmp/jobs1" "$tmp/jobs2" && diff -r "$tmp/jobs1" "$tmp/jobs3"
}
sorted_documents() { "$tmp/read_back" "$1" "$2" | sort -z; }
validation_by_content() {
    run "$tmp/lines.jsonl" --val-frac 0.2 --out "$tmp/order1" &&
        run "$tmp/shuffled.jsonl" --val-frac 0.2 --out "$tmp/order2" &&
        sorted_documents "$tmp/order1" val > "$tmp/val1" &&
        sorted_documents "$tmp/order2" val > "$tmp/val2" &&
        cmp "$tmp/val1" "$tmp/val2" || return 1
    local n
    n=$(tr -dc '\0' < "$tmp/val1" | wc -c)
    echo "$n validation documents"
    [ "$n" -gt 70 ] && [ "$n" -lt 130 ] || return 1
    { "$tmp/read_back" "$tmp/order1" train; "$tmp/read_back" "$tmp/order1" val; } |
        sort -z > "$tmp/both"
    sort -z "$tmp/lines.expected" | cmp - "$tmp/both"
}
overwriting() {
    rm -rf "$tmp/over"
    run "$tmp/lines.jsonl" --shard-tokens 5000 --out "$tmp/over" &&
        ! run "$tmp/tree" --out "$tmp/over" 2> "$tmp/stderr" &&
        grep -q 'holds a data set' "$tmp/stderr" && [ -e "$tmp/over/train_00003.bin" ] &&
        run "$tmp/tree" --val-frac 0 --out "$tmp/over" --overwrite &&
        [ ! -e "$tmp/over/train_00001.bin" ] &&
        "$tmp/read_back" "$tmp/over" | cmp - "$tmp/tree.expected"
}
no_tokenizers_package() {
    mkdir -p "$tmp/stub" && echo 'raise ImportError' > "$tmp/stub/tokenizers.py"
    PYTHONPATH=$tmp/stub refused 2 'needs the Python package tokenizers' "$tmp/tree" \
        --tokenizer "$tmp/out/tokenizer.json"
}
summary_is_printed() {
    python3 "$prepare" "$tmp/tree" --val-frac 0 --out "$tmp/summary" \
        > "$tmp/stdout" 2> "$tmp/stderr" && cat "$tmp/stdout" &&
        grep -qE '^train +4 +' "$tmp/stdout" && [ ! -s "$tmp/stderr" ] &&
        grep -q 'left out: 1 empty documents, 1 binary files' "$tmp/stdout"
}
file_as_directory() {
    run "$tmp/tree" --out "$tmp/one.expected"
    [ $? -eq 4 ]
}
as_hugging_face() {  # the byte tokenizer.json in the tokenizers package gives the same shards
    run "$tmp/lines.jsonl" --out "$tmp/by_hf" --tokenizer "$tmp/out/tokenizer.json" &&
        run "$tmp/lines.jsonl" --out "$tmp/by_byte" &&
        for f in train_00000.{bin,idx} val_00000.bin tokenizer.json tokenizer_config.json; do
            cmp "$tmp/by_hf/$f" "$tmp/by_byte/$f" || return 1
        done
}

check one_file one_file
check tree round_trip "$tmp/tree.expected" "$tmp/tree"
check tree_with_glob only_glob
check python_functions functions
check jsonl round_trip "$tmp/lines.expected" "$tmp/lines.jsonl"
check gzipped_jsonl round_trip "$tmp/lines.expected" "$tmp/lines.jsonl.gz"
check many_shards many_shards
check headers_and_summary_agree sizes_are_exact
check jobs_do_not_change_a_byte jobs_agree
check validation_is_chosen_by_content validation_by_content
check overwriting_leaves_no_old_shard overwriting
check summary_is_printed summary_is_printed
check refuses_no_arguments refused 2 'required: INPUT'
check refuses_unknown_option refused 2 'unrecognized' "$tmp/tree" --frobnicate
check refuses_bad_number refused 2 'val-frac' "$tmp/tree" --val-frac 2
check refuses_missing_input refused 3 'absent.*found none' "$tmp/absent"
check refuses_binary_file refused 3 'binary' "$tmp/tree/binary.txt"
check refuses_wrong_field refused 3 'bad.jsonl:3: expected a string' "$tmp/bad.jsonl"
check refuses_broken_json refused 3 'broken.jsonl:2: expected JSON' "$tmp/broken.jsonl" --jobs 2
check refuses_other_key refused 3 'expected a string "body"' "$tmp/lines.jsonl" --text-key body
check refuses_empty_glob refused 3 'found none' "$tmp/tree" --glob '*.rs'
check refuses_only_validation refused 3 'no document for training' "$tmp/tree" --val-frac 1
check refuses_only_empty refused 3 'no document for training' "$tmp/tree/empty.txt"
check refuses_without_tokenizers no_tokenizers_package
check refuses_a_file_as_directory file_as_directory
if python3 -c 'import tokenizers' 2> /dev/null; then
    check tokenizer_json_in_tokenizers as_hugging_face
else
    skip tokenizer_json_in_tokenizers 'the Python package tokenizers is not installed'
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
