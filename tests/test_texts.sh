#!/usr/bin/env bash
# Text in, no Python: --train takes text files, directories and JSON Lines. The shards that the trainer
# makes of them are those of data/prepare.py, byte for byte.
. "$(dirname "$0")/lib.sh"
scratch texts
train=${TRAIN:-$root/build/asan/train_llama}
small=(--max-seqlen 64 --micro-batch-tokens 256 --num-samples 0 --val-tokens 512 --threads 2)
run=("$train" "${small[@]}")
same_shards() {         # same_shards NAME DIR DIR: all but prepare.py's summary and our key
    if diff -r -x dataset.json -x texts.key "$2" "$3" > "$work/out.txt" 2>&1; then ok "$1"
    else bad "$1" "$2 and $3 differ"; fi
}

# ---- every kind of input -------------------------------------------------------------------------
mkdir -p tree/b tree/.hidden tree/__pycache__
python3 - << 'PY'
import json, random
random.seed(1)
def put(name, data): open(name, "wb").write(data)
put("tree/a.txt", b"alpha\n")
put("tree/b/bytes.md", bytes(range(1, 256)) * 3)
put("tree/b/new\nline.txt", b"strange name\n")
put("tree/c.py", "h\u00e9llo \u20ac <|endoftext|> 12\n".encode())
put("tree/empty.txt", b"")
put("tree/binary.dat", b"a\0b")
put("tree/.hidden/x.txt", b"hidden")
put("tree/__pycache__/x.txt", b"cache")
put("tree/table.csv", b"1,2\n")
put("tree/other.json", b'{\n"a": 1}\n')
put("tree/lines.json", b'{"text": "one line"}\n{"text": "another"}\n')
letters = "ab c\n\u00e9\u20ac\U0001f600"
lines = ["document %d " % i + "".join(random.choices(letters, k=random.randrange(300)))
         for i in range(2000)]
rows = [json.dumps({"id": i, "text": t}) for i, t in enumerate(lines)]
rows[7:7] = ["", " \t", '{"text": ""}', '{"text": "nul \\u0000 and half \\ud83d, \\\\ud83d, a pair \\ud83d\\ude00"}']
put("lines.jsonl", "\n".join(rows).encode())
put("broken.jsonl", b'{"text": "good"}\n{"text": "cut\n\n{"text": 3}\n{"text": "good too"}\n[1]\n')
put("wrong.jsonl", b'{"body": "x"}\n')
put("chat.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}\n')
PY
notes=$work/notes.txt
seq 1 800 > "$notes"
for c in tree lines.jsonl notes.txt; do
    check "$c" "${run[@]}" --train $c --out "out-$c" --steps 0 --val-every 0
    prepare $c --out "py-$c"
    same_shards "${c}_as_prepare.py" "out-$c/tokens" "py-$c"
done
has counts_what_it_leaves_out '^texts   tree -> .*left out: 1 empty document, 1 binary file, 2 CSV or JSON files' \
    <("${run[@]}" --train tree --out counts --dry-run)
check one_thread "${run[@]}" --train lines.jsonl --out one --steps 0 --val-every 0 --threads 1
same_shards one_thread_as_two one/tokens out-lines.jsonl/tokens
check several "${run[@]}" --train "n*.txt,tree" --out several --dry-run
prepare notes.txt tree --out py-several
same_shards globs_and_lists several/tokens py-several
check val "${run[@]}" --train notes.txt --val tree/c.py --out val --dry-run
has validation_texts '^val +1 unpad.c shard, 1 document' out.txt

# ---- a tokenizer of Hugging Face ----------------------------------------------------------------------
tiny_model bpe 24 40 8
sed -i 's/"vocab_size": 264/"vocab_size": 512/' bpe/config.json
cp "$root"/tests/golden/tokenizers/smollm2/tokenizer.json bpe
run_bpe=("$train" --model bpe --from-scratch "${small[@]}")
echo '{"eos_token": "absent"}' > bpe/tokenizer_config.json
expect needs_eos 3 'no eos_token' "${run_bpe[@]}" --train tree --out eos --dry-run
echo '{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}' > bpe/tokenizer_config.json
if python3 -c 'import tokenizers' 2> /dev/null; then
    for c in tree lines.jsonl; do
        check "bpe_$c" "${run_bpe[@]}" --train $c --out "bpe-$c" --dry-run
        prepare $c --tokenizer bpe --out "py-bpe-$c"
        same_shards "bpe_${c}_as_prepare.py" "bpe-$c/tokens" "py-bpe-$c"
    done
    cp -r bpe none
    cp "$root"/tests/golden/tokenizers/llama3/tokenizer.json none
    echo '{"bos_token": null, "eos_token": "<|im_start|>"}' > none/tokenizer_config.json
    check bpe_without_bos "${run_bpe[@]}" --model none --train lines.jsonl --out bpe-none --dry-run
    prepare lines.jsonl --tokenizer none --out py-bpe-none
    same_shards bpe_without_bos_as_prepare.py bpe-none/tokens py-bpe-none
else skip bpe_shards 'the Python package tokenizers is not installed'; fi

# ---- once, and again when something has changed ----------------------------------------------------------
check trains "${run[@]}" --train notes.txt --out r --steps 2 --save-every 1
has tokenized '^texts   notes.txt -> r/tokens: 1 document, 0 for validation' out.txt
cp -r r/tokens before
check again "${run[@]}" --train notes.txt --out r --overwrite --steps 2 --save-every 1
check only_once eval '! grep -q ^texts out.txt'
check resumes_with_the_same_texts "${run[@]}" --resume --train notes.txt --out r --steps 3
no_change() { [ "$(grep ^resume: out.txt)" = "resume: --steps 2 -> 3" ]; }
no_change && ok the_same_texts_are_no_change || bad the_same_texts_are_no_change "$(grep ^resume: out.txt)"
seq 2 900 > notes.txt
expect keeps_the_tokens_of_a_run 2 'trained on other texts than notes.txt has now' \
    "${run[@]}" --train notes.txt --out r --steps 2
same_shards they_are_kept r/tokens before
check resumes_without_the_texts "${run[@]}" --resume --out r --steps 4
has resumed '^done: r/final' out.txt
check changed "${run[@]}" --train notes.txt --out r --overwrite --steps 1
has tokenized_again '^texts   notes.txt -> r/tokens' out.txt
prepare notes.txt --out py-changed
same_shards as_the_new_text r/tokens py-changed

check bpe_trains "${run_bpe[@]}" --train tree --out bpe-run --steps 1

# ---- --eval ------------------------------------------------------------------------------------------------
mkdir tmp
evaluate() { TMPDIR=$work/tmp "$train" --model demo --from-scratch --eval --max-seqlen 64 "$@"; }
prepare tree --out py-all --val-frac 0
check eval_of_texts evaluate --val tree
sed -n '/^document/,$p' out.txt > eval-texts.txt
check eval_of_their_shards evaluate --val py-all
sed -n '/^document/,$p' out.txt > eval-shards.txt
has eval_has_all_documents '^all +6 ' eval-texts.txt
same eval_of_texts_is_that_of_their_shards eval-texts.txt eval-shards.txt
expect eval_stops_at_a_broken_line 3 'broken.jsonl:2: expected JSON' evaluate --val broken.jsonl --strict
check eval_leaves_nothing rmdir tmp

# ---- bad input --------------------------------------------------------------------------------------------
check broken_lines "${run[@]}" --train broken.jsonl --out broken --dry-run
has broken_lines_are_named '^warning: left out: broken.jsonl:2: expected JSON' out.txt
has broken_lines_are_counted '2 documents, .*left out: 3 lines, 1 empty document' out.txt
# refused NAME PATTERN SPEC ARGUMENTS...: exit code 3, and no tokens are left
refused() {
    local name=$1 pattern=$2
    shift 2
    expect "refuses_$name" 3 "$pattern" "${run[@]}" --out refused --dry-run --train "$@"
    [ -z "$(ls -A refused 2> /dev/null | grep tokens)" ] || bad "refuses_${name}_and_writes_nothing" ''
}
touch empty.txt x.parquet table.csv
mkdir nothing
gzip -c notes.txt > notes.txt.gz
cp notes.txt.gz packed.txt
refused broken_lines_if_strict 'broken.jsonl:2: expected JSON' broken.jsonl --strict
refused other_keys 'wrong.jsonl:1: expected a string "text", found body' wrong.jsonl
has says_which_key '^hint: data/prepare.py --text-key' out.txt
refused chats 'chat.jsonl:1: expected a string "text", found messages' chat.jsonl
has says_how_to_read_chats '^hint: data/prepare.py --chat' out.txt
refused an_empty_file 'empty.txt: expected documents, found none' empty.txt
refused gzip 'notes.txt.gz: expected text or JSONL, found gzip' notes.txt.gz
refused parquet 'x.parquet: expected text or JSONL, found Parquet' x.parquet
refused a_binary_file 'packed.txt: expected text, found a binary file' packed.txt
refused a_table 'table.csv: expected' table.csv
refused an_empty_directory 'nothing: expected token shards' nothing
refused no_such_file 'absent.txt: expected token shards' absent.txt
refused a_model_without_tokenizer 'is text, expected a tokenizer for it' notes.txt --model smollm2-135m
sed 's/"vocab_size": 512/"vocab_size": 300/' bpe/config.json > c && mkdir low && cp bpe/* low && mv c low/config.json
refused a_larger_vocabulary 'made for a vocabulary of 4[0-9]*, the model has 300' notes.txt --model low --from-scratch

# ---- a full disk, a signal, several ranks -----------------------------------------------------------------
(ulimit -f 1; trap '' XFSZ; exec "${run[@]}" --train lines.jsonl --out disk --dry-run) > out.txt 2>&1
[ $? -eq 4 ] && [ -z "$(ls disk | grep tokens)" ] && ok full_disk || bad full_disk "$(ls disk)"
python3 -c '
for i in range(300000): print("{\"text\": \"a document of %d words, and some more of them, as it were: %d\"}" % (i, i * i))' > large.jsonl
"${run_bpe[@]}" --train large.jsonl --out signal --threads 1 --dry-run > out.txt 2>&1 &
until [ -e signal/tokens.tmp ] || ! kill -0 $! 2> /dev/null; do sleep 0.02; done
kill $!
wait $!
[ $? -eq 75 ] && [ -z "$(ls signal | grep tokens)" ] && ok stopped_by_a_signal ||
    bad stopped_by_a_signal "$(ls signal)"
release=$root/build/cpu/train_llama
if ranks_can_run "$release"; then
    check two_ranks "${mpi[@]}" -n 2 "$release" "${small[@]}" --batch-tokens 512 --train lines.jsonl --out ranks \
        --steps 1 --val-every 0
    same_shards two_ranks_as_one ranks/tokens out-lines.jsonl/tokens
else skip two_ranks "$no_ranks"; fi
finish
