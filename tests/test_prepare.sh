#!/usr/bin/env bash
# data/prepare.py: CSV, packed files, Parquet and data sets of a hub become the same JSON Lines; what is missing
# or damaged is named. Chats: tests/test_chat.sh.
. "$(dirname "$0")/lib.sh"
python=$(python3 -c 'import sys; print(sys.executable)')
run() { "$python" "$root/data/prepare.py" "$@"; }
# like NAME ARGUMENTS...: the documents of lines.jsonl, or of $expected
like() {
    check "$1" run "${@:2}" --out out.jsonl
    same "$1_as_lines" out.jsonl "${expected:-expected.jsonl}"
    rm -f out.jsonl
}
# refused NAME CODE PATTERN ARGUMENTS...: and nothing is written
refused() {
    expect "$1" "$2" "$3" run "${@:4}" --out none.jsonl
    [ -z "$(ls | grep none)" ] || bad "$1_writes_nothing" "$(ls)"
}
python << 'PY'
import csv, gzip
rows = [{"id": i, "text": "text %d, \"quoted\",\nof € \u2028 %s\n" % (i, "lines\n" * (i % 7))} for i in range(3000)]
rows[1]["text"] = "unquoted\u2028in\x85one\fline\x1c\x1d\x1e."
lines = "".join(json.dumps(r) + "\n" for r in rows).encode()
open("lines.jsonl", "wb").write(lines)
open("lines.ndjson.gz", "wb").write(gzip.compress(b"\xef\xbb\xbf" + lines))
open("cut.jsonl.gz", "wb").write(gzip.compress(lines)[:4000])
open("expected.jsonl", "w").writelines(json.dumps({"text": r["text"]}) + "\n" for r in rows)
open("other.jsonl", "wb").write(lines.replace(b'"text"', b'"body"'))
alpaca = [{"instruction": "Add \u20ac", "input": "1, 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": "Hello"}]
open("alpaca.expected", "w").writelines(json.dumps(row) + "\n" for row in alpaca)
for name, delimiter, table in ("lines.csv", ",", rows), ("lines.tsv", "\t", rows), ("alpaca.csv", ",", alpaca):
    with open(name, "w", newline="") as f:
        w = csv.DictWriter(f, {"id": 1, **table[0]}, delimiter=delimiter)
        w.writeheader(), w.writerows({"id": 1, **row} for row in table)
open("bad.jsonl", "w").write('{"text": "good"}\n\n{"text": "cut\n{"text": 3}\n[1]\n{"text": ""}\n')
PY
like lines lines.jsonl
like packed_lines lines.ndjson.gz
like csv lines.csv
like tsv lines.tsv
expected=alpaca.expected like chats_of_a_table alpaca.csv
like other_key other.jsonl --text-key body
refused other_column 3 'lines.csv:1: expected a string "body", found id, text' lines.csv --text-key body
printf 'id\n1,more\n' > longer.csv
refused a_row_longer_than_the_header 3 'longer.csv:1: expected a string "text", found \(no name\), id' longer.csv
refused a_cut_file 3 'cut.jsonl.gz: cannot read' cut.jsonl.gz
refused no_such_file 3 'absent.jsonl: cannot read: No such file' absent.jsonl
touch notes.txt
refused text 3 'notes.txt: expected JSONL, CSV or Parquet' notes.txt
refused strict 3 'bad.jsonl:3: expected JSON' bad.jsonl --strict
expected=<(echo '{"text": "good"}') like bad_lines_are_left_out bad.jsonl
has bad_line 'left out: bad.jsonl:4: expected a string "text", found a number' out.txt
expect no_out 2 'expected --out' run lines.jsonl
refused a_negative_number 2 'expected --out' lines.jsonl --show -1
expect what_is_no_file_stays 4 'pipe: cannot write: expected a regular file' eval 'mkfifo pipe && run lines.jsonl --out pipe'
check a_link_stays eval 'ln -s linked.jsonl link && run lines.jsonl --out link && cmp linked.jsonl expected.jsonl && [ -L link ] && [ -p pipe ]'
expect a_full_standard_output 4 '^error: standard output' eval 'run lines.jsonl --show 1 > /dev/full'
outcome a_reader_that_ends 141 'text 0' eval 'run lines.jsonl --show 3000 | head -n 1; (exit ${PIPESTATUS[0]})'
expect no_such_option 2 unrecognized run lines.jsonl --frobnicate
expect full_disk 4 'none.jsonl' bash -c 'ulimit -f 1; trap "" XFSZ; exec "$@"' - "$python" "$root/data/prepare.py" \
    lines.jsonl --out none.jsonl
if with_program zstandard zstd; then
    zstd -q lines.jsonl
    like zstandard lines.jsonl.zst
    head -c 3000 lines.jsonl.zst > cut.jsonl.zst
    refused a_cut_zstandard 3 'cut.jsonl.zst: cannot read: .*premature end' cut.jsonl.zst
fi
expect without_zstd 2 'lines.jsonl.zst: needs the program zstd' env PATH=/nowhere \
    "$python" "$root/data/prepare.py" lines.jsonl.zst --out none.jsonl
printf 'prompt,completion,weight,id\nQ,A,-0.5,1\nQ,B,,2\n' > weights.csv
printf '%s\n' '{"prompt": "Q", "completion": "A", "weight": -0.5}' '{"prompt": "Q", "completion": "B"}' > weights
expected=weights like weights_of_a_table weights.csv
has unknown_keys_are_named '^unknown keys: id .2 records.$' out.txt
printf 'text\ngr\374n\n' > latin.csv
refused a_latin_table 3 "latin.csv: cannot read: 'utf-8' codec" latin.csv
has how_to_convert_it '^hint: iconv -f WINDOWS-1252 -t UTF-8 latin.csv > NEW' out.txt
printf '{"text": NaN, "prompt": "Q", "completion": "A", "weight": NaN}\n' > nan.jsonl
expected=<(echo '{"prompt": "Q", "completion": "A"}') like nan_is_absent nan.jsonl
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
like hub hf:lines.jsonl
like hub_config_and_split hf:lines.jsonl:part:test
refused no_such_data_set 3 "hf:no/such: cannot read: Dataset 'no/such' doesn't exist on the Hub" hf:no/such
refused hub_other_column 3 'hf:lines.jsonl:1: expected a string "body", found id, text' hf:lines.jsonl --text-key body
PYTHONPATH=$work/missing refused without_datasets 2 'the Python package datasets is not installed' hf:lines.jsonl
# ---- preference pairs: --preference says later whether they are trained, or keys of another kind -----------
python << 'PY'
turn = lambda role, text: {"role": role, "content": text}
question, good, bad = turn("user", "Q"), turn("assistant", "A"), turn("assistant", "B")
rows = [{"prompt": "Q", "chosen": "A", "rejected": "B"}, {"chosen": [question, good], "rejected": [question, bad]},
        {"prompt": "Q", "messages": [question, good], "chosen": [good], "rejected": [bad]}]
open("pairs.expected.jsonl", "w").writelines(json.dumps(row) + "\n" for row in rows)
more = [{"id": 1, "score": None}, {"id": 2, "prompt": None, "rejected": [question, dict(bad, name=None)]}, {"weight": float("nan")}]
open("pairs.jsonl", "w").writelines(json.dumps({**row, **m}) + "\n" for row, m in zip(rows, more))
PY
printf 'score,prompt,chosen,rejected\n7.5,Q,A,B\n' > pairs.csv
for from in pairs.csv hf:pairs.jsonl pairs.jsonl; do
    check "pairs_of_$from" run $from --out pairs.out.jsonl
    same "pairs_of_${from}_stay_pairs" pairs.out.jsonl <(head -n "$(wc -l < pairs.out.jsonl)" pairs.expected.jsonl)
done
has other_keys_of_pairs_are_named '^unknown keys: id .2 records.$' out.txt
outcome prepared_pairs_are_trained 0 '^records 3 of preference' "$release" --train pairs.out.jsonl --preference dpo --dry-run
outcome or_messages 0 '^records 1 of messages' "$release" --train pairs.out.jsonl --dry-run
refused a_text_key_reads_no_pairs 3 'expected a string "body", found chosen, prompt, rejected' pairs.csv --text-key body
# ---- benchmarks: rows with the columns of the hub ----------------------------------------------------------
python << 'PY'
rows = {
    "hellaswag": {"ind": 4, "activity_label": "Removing ice", "ctx_a": "Then, he writes.", "ctx_b": "the MAN wipes",
                  "ctx": "-", "endings": [", at it. [title] Ice [step]  is  off", "it"], "label": "1"},
    "arc": {"id": "M1", "question": "Which? ", "choices": {"text": ["dry", "wet"], "label": ["1", "2"]}, "answerKey": "2"},
    "piqa": {"goal": "Open it", "sol1": "pull", "sol2": "push €", "label": 0},
    "winogrande": {"sentence": "Ann saw Eve as _ was the_re. ", "option1": "Ann", "option2": "Eve", "answer": "2"},
    "mmlu": {"question": " 2 + 2? ", "subject": "abstract_algebra", "choices": ["1", "2", "3", "4"], "answer": 3}}
for name, row in rows.items():
    open(name + ".jsonl", "w").write(json.dumps(row) + "\n")
open("no_answer.jsonl", "w").write(json.dumps(dict(rows["hellaswag"], label="")) + "\n")
open("minus_one.jsonl", "w").write(json.dumps(dict(rows["piqa"], label=-1)) + "\n")
PY
cat > questions.expected << 'JSONL'
{"context": "Removing ice: Then, he writes. The man wipes", "choices": [", at it.. Ice  is off", "it"], "answer": 1}
{"context": "Question: Which? \nAnswer:", "choices": ["dry", "wet"], "answer": 1}
{"context": "Question: Open it\nAnswer:", "choices": ["pull", "push \u20ac"], "answer": 0}
{"context": ["Ann saw Eve as Ann", "Ann saw Eve as Eve"], "choices": ["was the_re.", "was the_re."], "answer": 1}
{"context": "The following are multiple choice questions (with answers) about abstract algebra.\n\n2 + 2?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:", "choices": ["A", "B", "C", "D"], "answer": 3}
JSONL
for name in hellaswag arc piqa winogrande mmlu; do
    check "bench_$name" run $name.jsonl --bench $name --out question.jsonl
    cat question.jsonl >> questions.jsonl
done
same questions_of_benchmarks questions.jsonl questions.expected
cat mmlu.jsonl mmlu.jsonl > shots.jsonl
expected=<(tail -n 1 questions.expected | sed -E 's/(2 [+] 2.*Answer:)",/\1 D\\n\\n\1 D\\n\\n\1",/') \
    like shots_come_before_the_question mmlu.jsonl --bench mmlu --shots shots.jsonl
sed s/algebra/art/ mmlu.jsonl > other.jsonl
sed s/answer/x/ mmlu.jsonl > unanswered.jsonl
refused shots_of_another_subject 3 '--shots has no question with this beginning: The following' \
    mmlu.jsonl --bench mmlu --shots other.jsonl
refused shots_without_answer 3 'unanswered.jsonl:1: expected a question of mmlu with its answer: KeyError' \
    mmlu.jsonl --bench mmlu --shots unanswered.jsonl
refused shots_of_arc 2 'expected --bench mmlu with --shots' arc.jsonl --bench arc --shots arc.jsonl
refused no_answer 3 'no_answer.jsonl:1: expected a question of hellaswag with its answer: ValueError' no_answer.jsonl --bench hellaswag
refused minus_one 3 'minus_one.jsonl:1: expected an answer of 2 choices, found -1' minus_one.jsonl --bench piqa
refused other_columns 3 "piqa.jsonl:1: expected a question of arc with its answer: KeyError: 'choices'" piqa.jsonl --bench arc
refused other_benchmark 2 'invalid choice' piqa.jsonl --bench boolq
refused bench_of_chats 2 'argument --chat: not allowed with argument --bench' piqa.jsonl --bench piqa --chat
# ---- the demo's documents ----------------------------------------------------------------------------------
mkdir code
printf 'import os\nX = "\\d"\n@cache\ndef f(x):\n    return x  # \xc3\xa9\nclass A:\n    y = 1\n' > code/a.py
printf '    def g(self):\n        def inner(): pass\n\nasync def h(): pass' >> code/a.py
printf 'def broken(:\n' > code/b.py
check functions python3 "$root/scripts/python_functions.py" code functions
expect no_functions 3 'empty: expected Python files' python3 "$root/scripts/python_functions.py" empty none
sort functions/*.jsonl > functions.sorted
same functions_are_documents functions.sorted <(sort << 'JSONL'
{"text": "@cache\ndef f(x):\n    return x  # \u00e9\n"}
{"text": "    def g(self):\n        def inner(): pass\n"}
{"text": "async def h(): pass"}
JSONL
)
# ---- Parquet ---------------------------------------------------------------------------------------------
printf 'PAR1 not really' > cut.parquet
PYTHONPATH=$work/missing refused without_pyarrow 2 'the Python package pyarrow is not installed' cut.parquet
with_package parquet pyarrow || finish
python << 'PY'
import pyarrow, pyarrow.parquet
records = [json.loads(line) for line in open("lines.jsonl")]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), "lines.parquet", row_group_size=700)
pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), "null.parquet")
PY
like parquet lines.parquet
refused cut_parquet 3 'cut.parquet: cannot read' cut.parquet
refused null_if_strict 3 'null.parquet:2: expected a string "text", found null' null.parquet --strict
finish
