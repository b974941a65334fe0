#!/usr/bin/env bash
# data/sources.py: Zstandard, Parquet and data sets of a hub become the shards of the same texts in JSON
# Lines; what is missing or damaged is named.
. "$(dirname "$0")/lib.sh"
scratch sources
command -v python3 > /dev/null || skip_all sources 'python3 is not installed'
python=$(python3 -c 'import sys; print(sys.executable)')
run() { "$python" "$root/data/prepare.py" "$@" --val-frac 0 --quiet --overwrite; }
# refused NAME CODE PATTERN ARGUMENTS...: and nothing is written
refused() {
    local name=$1 code=$2 pattern=$3
    shift 3
    rm -rf none
    expect "$name" "$code" "$pattern" "$python" "$root/data/prepare.py" "$@" --out none
    [ ! -e none/dataset.json ] || bad "${name}_writes_nothing" "$(ls none)"
}
python3 - << 'PY'
import json
rows = [{"id": i, "text": "text %d\n" % i * (i % 7 + 1)} for i in range(3000)]
chats = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
for name, records in ("lines", rows), ("chats", chats):
    open(name + ".jsonl", "w").write("".join(json.dumps(r) + "\n" for r in records))
PY
run lines.jsonl --out expected || bad expected ''
run chats.jsonl --chat --out expected-chats || bad expected_chats ''
# like NAME EXPECTED ARGUMENTS...: the same shards as those in EXPECTED
like() {
    local name=$1 expected=$2
    shift 2
    rm -rf "out-$name"
    check "$name" run "$@" --out "out-$name"
    for f in train_00000.bin train_00000.idx; do
        cmp "out-$name/$f" "$expected/$f" || bad "${name}_as_json_lines" "$f differs"
    done
}

# ---- Zstandard -------------------------------------------------------------------------------------------
if command -v zstd > /dev/null; then
    zstd -q lines.jsonl chats.jsonl
    like zstandard expected lines.jsonl.zst
    like zstandard_chats expected-chats chats.jsonl.zst --chat
    cp lines.jsonl plain.txt && zstd -q plain.txt && rm plain.txt
    check zstandard_text run plain.txt.zst --out text
    mkdir tree && cp lines.jsonl.zst tree
    like zstandard_in_a_tree expected tree --jobs 2
    head -c 3000 lines.jsonl.zst > cut.jsonl.zst
    refused a_cut_file 3 'cut.jsonl.zst: cannot read: .*premature end' cut.jsonl.zst
    echo text > text.zst
    refused no_zstandard 3 'text.zst: cannot read: .*(unsupported|unknown)' text.zst
else skip zstandard 'zstd is not installed'; fi
touch any.jsonl.zst
expect without_zstd 2 'any.jsonl.zst: needs the program zstd' env PATH=/nowhere \
    "$python" "$root/data/prepare.py" any.jsonl.zst --out none

# ---- data sets of a hub: a stand-in for the package -------------------------------------------------------
mkdir hub missing
cat > hub/datasets.py << 'PY'
import json
def load_dataset(name, config, split, streaming):
    if name == "no/such":
        raise ValueError("Dataset 'no/such' doesn't exist on the Hub\nor cannot be accessed")
    assert streaming and (config, split) in ((None, "train"), ("part", "test")), (config, split)
    return (json.loads(line) for line in open(name))
PY
for package in datasets pyarrow; do echo 'raise ImportError' > missing/$package.py; done
export PYTHONPATH=$work/hub${PYTHONPATH:+:$PYTHONPATH}
like hub expected hf:lines.jsonl
like hub_config_and_split expected hf:lines.jsonl:part:test --jobs 2
like hub_chats expected-chats hf:chats.jsonl --chat
refused no_such_data_set 3 "hf:no/such: cannot read: Dataset 'no/such' doesn't exist on the Hub" hf:no/such
refused hub_other_column 3 'hf:lines.jsonl: expected a column body, found id, text' hf:lines.jsonl --text-key body
refused hub_chats_as_text 3 'hf:chats.jsonl: expected a column text, found messages' hf:chats.jsonl
has chats_need_an_option '^hint: .*--chat' out.txt
PYTHONPATH=$work/missing refused without_datasets 2 'hf:lines.jsonl: needs the Python package datasets' hf:lines.jsonl

# ---- Parquet ---------------------------------------------------------------------------------------------
printf 'PAR1 not really' > cut.parquet
PYTHONPATH=$work/missing refused without_pyarrow 2 'cut.parquet: needs the Python package pyarrow' cut.parquet
mkdir part && cp cut.parquet part
PYTHONPATH=$work/missing refused parquet_in_a_tree 2 'part/cut.parquet: needs the Python package pyarrow' part
if python3 -c 'import pyarrow.parquet' 2> /dev/null; then
    python3 - << 'PY'
import json, pyarrow, pyarrow.parquet
records = [json.loads(line) for line in open("lines.jsonl")]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), "lines.parquet", row_group_size=700)
pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), "null.parquet")
PY
    like parquet expected lines.parquet --jobs 2
    refused cut_parquet 3 'cut.parquet: cannot read' cut.parquet
    refused null_if_strict 3 'null.parquet:2: expected a string "text", found null' null.parquet --strict
    refused parquet_other_column 3 'expected a column body, found id, text' lines.parquet --text-key body
else skip parquet 'the Python package pyarrow is not installed'; fi
finish
