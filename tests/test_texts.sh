#!/usr/bin/env bash
# Text in, no Python: --train takes text files, directories, JSON Lines and arrays. What is in the shards that
# the trainer makes of them, and when it makes them again. Loss masks of chats: tests/test_chat.sh.
. "$(dirname "$0")/lib.sh"
small=(--max-seqlen 64 --micro-batch-tokens 256 --num-samples 0 --val-tokens 512 --threads 2)
run=("$train" "${small[@]}")
# same_shards NAME DIR DIR: all but the key
same_shards() { judge "$1" "$(diff -r -x texts.key "$2" "$3" 2>&1)"; }
# only NAME ARGUMENTS...: the tokens are made, and nothing is trained
only() { check "$1" "${run[@]}" --steps 0 --val-every 0 "${@:2}"; }
# makes NAME PATTERN ARGUMENTS...: the same, and a line matches
makes() { expect "$1" 0 "$2" "${run[@]}" --steps 0 --val-every 0 "${@:3}"; }
# holds NAME DIR EXPECTED [SHARE]: byte shards of the documents of a JSON file, [[text as latin-1, mask or
# null], ...], that share of them for validation, but at least one of ten
holds() {
    check_python "$@" << 'PY'
import hashlib, math
directory, expected, share = (sys.argv[1:] + ["0.01"])[:3]
documents = [(t.encode("latin-1"), mask) for t, mask in json.load(open(expected))]
first = lambda text: int(hashlib.sha256(text).hexdigest()[:16], 16) / 2.0**64
share = float(share)
if share < 1 and len(documents) >= 10 and all(first(t) >= share for t, _ in documents):
    share = math.nextafter(min(first(t) for t, _ in documents), 1)
for split in "train", "val":
    wanted = [([256, *t, 257], mask) for t, mask in documents if (first(t) < share) == (split == "val")]
    assert shards.read(directory, split) == wanted, (split, str(wanted)[:99])
PY
}
# ---- every kind of input -------------------------------------------------------------------------
mkdir -p tree/b tree/.hidden tree/__pycache__ tree/val_b
python << 'PY'
import hashlib, random
random.seed(1)
def put(name, data): open(name, "wb").write(data)
def expect(name, documents):
    json.dump([(d.decode("latin-1"), mask) for d, mask in documents], open(name + ".expected", "w"))
put("tree/a.txt", b"\xef\xbb\xbfalpha\n")
put("tree/mark.jsonl", b"\xef\xbb\xbf")
put("tree/b/bytes.md", bytes(range(1, 256)) * 3)
put("tree/b/new\nline.txt", b"strange name\n")
put("tree/c.py", "h\u00e9llo \u20ac <|endoftext|> 12\n".encode())
put("tree/empty.txt", b"")
put("tree/binary.dat", b"a\0b")
put("tree/.hidden/x.txt", b"hidden")
put("tree/val_b/train.jsonl", b'{"text": "in a folder"}')
put("tree/__pycache__/x.txt", b"cache")
put("tree/table.csv", b"1,2\n")
put("tree/other.json", b'{\n"a": 1}\n')
put("tree/lines.json", b'{"text": "one line"}\n{"text": "another"}\n')
put("tree/many.json", b'[{"text": "in an array", "n": [1, "]"]}, {"text": "of\\" two"}]\n')
expect("tree", [(open("tree/" + n, "rb").read().removeprefix(b"\xef\xbb\xbf"), None) for n in ("a.txt", "b/bytes.md", "b/new\nline.txt", "c.py")]
       + [(t, None) for t in (b"one line", b"another", b"in an array", b'of" two', b"in a folder")])
letters = "ab c\n\u00e9\u20ac\U0001f600"
texts = ["document %d " % i + "".join(random.choices(letters, k=random.randrange(300)))
         for i in range(2000)]
rows = [json.dumps({"id": i, "text": t}) for i, t in enumerate(texts)]
odd = r'{"text": "nul \u0000, \\ud83d, pairs \ud83d\ude00 \uD83D\uDE00, \ud7ff \ue000"}'
texts.insert(7, "nul \0, \\ud83d, pairs \U0001f600 \U0001f600, \ud7ff \ue000")
rows[7:7] = ["", " \t", '{"text": ""}', odd]
put("lines.jsonl", "\n".join(rows).encode())
expect("lines.jsonl", [(t.encode(), None) for t in texts])
put("array.json", ("\ufeff\n [" + ",\n".join(row for row in rows if row.strip()) + "\n]\n").encode())
put("broken.jsonl", b'\xef\xbb\xbf\n{"text": "good"}\n{"text": "cut\n\n{"text": 3}\n{"text": "good too"}\n[1]\n{"text": "half \\ud83d"}\n')
expect("broken.jsonl", [(b"good", None), (b"good too", None)])
put("broken.json", b'[{"text": "good"}, {"text": 3}, {"text": cut}, [1], {"text": "good too"}]\n, {"text": "after"}]')
put("cut.json", b'[{"text": "good"}, {"text": "cut"}')
put("wrong.jsonl", b'{"body": "x"}\n')
put("chat.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}\n')
put("parts.jsonl", json.dumps({"parts": [["Q: \u20ac", False], ["", True], [" A\n", True], ["end ", False]]}).encode() +
    b'\n{"text": "plain"}\n{"parts": [["never", false]]}\n{"parts": [["Q", false], ["A \\n", true]]}\n')
expect("parts.jsonl", [(b"Q: \xe2\x82\xac A\nend ", [0] * 7 + [1] * 3 + [0] * 5),
                       (b"plain", [0] + [1] * 6), (b"QA \n", [0, 0, 1, 1, 1, 1])])
put("pairs.jsonl", b'{"parts": [["x"]]}\n')
put("never.jsonl", b'{"parts": [["never", false]]}\n')
put("first.jsonl", b'{"parts": [["a", true], [" b c d", false]]}\n')
put("accent.jsonl", b'{"parts": [["e\\u0301", true], [" x", true]]}\n')
put("bytes.jsonl", b'{"text": "\\u0004"}\n{"text": "some words"}\n')
first = lambda text: int(hashlib.sha256(text).hexdigest()[:16], 16) / 2.0**64
lone = next(b"%d" % i for i in range(9999) if first(b"%d" % i) < 0.01)     # which would be validation
put("lone,1.jsonl", b'{"text": "%s"}\n' % lone)
expect("lone.jsonl", [(lone, None)])
put("many.jsonl", b"1\n" + b'{"text": "%s"}\n' % (b"word " * 26000) * 40 + b"2\n")   # more than a round
PY
ln -s b tree/linked
seq 1 800 > notes.txt
expect_notes() { python <<< 'json.dump([[open("notes.txt").read(), None]], open("notes.txt.expected", "w"))'; }
expect_notes
cp lines.jsonl.expected array.json.expected && cp broken.jsonl.expected broken.json.expected
for c in tree lines.jsonl array.json notes.txt broken.jsonl broken.json parts.jsonl; do
    only "$c" --train $c --out "out-$c" --allow-other-tokenizer
    cp out.txt "said-$c"
    holds "${c}_as_expected" "out-$c/tokens" $c.expected
done
has counts_what_it_leaves_out '^texts   tree -> .*left out: 1 empty document, 1 binary or non-UTF-8 file, 4 other files' said-tree
has names_hidden_files '^warning: left out: hidden files: [.]hidden$' said-tree
has names_a_table '^warning: left out: tree/table.csv: CSV .python3 data/prepare.py --out FILE.jsonl tree/table.csv' said-tree
has names_other_json '^warning: left out: tree/other.json: JSON without records' said-tree
has names_a_link '^warning: left out: tree/linked: a directory .links are not followed' said-tree
has names_a_binary_file '^warning: left out: tree/binary.dat: expected text, found a binary' said-tree
has broken_lines_are_named '^warning: left out: broken.jsonl:3: expected JSON' said-broken.jsonl
has half_a_character_is_named '^warning: left out: broken.jsonl:8: expected JSON: invalid Unicode' said-broken.jsonl
has broken_lines_are_counted '2 documents, .*left out: 4 records, 2 empty documents' said-broken.jsonl
has broken_records_are_named '^warning: left out: broken.json: record 2: "?text' said-broken.json
has what_follows_an_array_is_named '^warning: left out: broken.json: record 6: expected JSON' said-broken.json
has and_is_counted 'left out: 4 records$' said-broken.json
has parts_are_targets '^train +1 unpad.c shard, 2 documents, [0-9]+ tokens, [0-9]+ of them targets$' said-parts.jsonl
has untrained_parts '^warning: left out: parts.jsonl:3: expected a part that is trained' said-parts.jsonl
only a_lone_document --train lone,1.jsonl --out lone
holds a_lone_document_is_trained lone/tokens lone.jsonl.expected 0
expect records_are_numbered 0 '^warning: left out: many.jsonl:42: expected an object' "$release" "${small[@]}" \
    --steps 0 --val-every 0 --train many.jsonl --out many --threads 1
has each_is_counted_once '40 documents, .*left out: 2 records$' out.txt
only one_thread --train lines.jsonl --out one --threads 1
same_shards one_thread_as_two one/tokens out-lines.jsonl/tokens
mkdir tree/out && echo left > tree/out/left.txt
only several --train "n*.txt,tree" --out tree/out && mv tree/out several
python3 -S -c 'import json; print(json.dumps(json.load(open("notes.txt.expected")) + json.load(open("tree.expected"))))' > several.expected
holds globs_and_lists several/tokens several.expected
makes validation_texts '^val +1 unpad.c shard, 1 document' --train lines.jsonl --val tree/c.py --out val
has then_nothing_else_is_validated '^texts   lines.jsonl -> .* 2001 documents, 0 for validation' out.txt
# ---- splits of a directory: three to train on, four to validate on, three left out -------------------------------
rows() { python3 -S -c "for i in range($1): print('{\"text\": \"%d of $2\"}' % i)"; }
mkdir -p ds/a/{dev,test}
for name in train-00000-of-00002.jsonl gsm8k-train-1-of-2.jsonl contest.jsonl \
    Validation.jsonl valid_1.ndjson a/dev/part-0.jsonl a/eval.json \
    test.jsonl my_TEST-00000-of-00001.jsonl a/test/part-0.jsonl; do rows 3 "$name" > "ds/$name"; done
echo a card | tee ds/README.md ds/LICENSE > ds/.gitattributes
makes a_split_is_known_by_its_name '^texts   ds -> .*: 21 documents, 12 for validation, .* left out: 6 other files' --train ds --out ds.run
has test_sets_are_named '^warning: left out: ds/a/test/part-0.jsonl: a test set .name it in --train' out.txt
has cards_are_named '^warning: left out: ds/README.md: a text among records' out.txt
has files_to_train_on '^files   to train on: ds/contest.jsonl .3., ds/gsm8k-train-1-of-2.jsonl .3., ds/train-' out.txt
has files_to_validate_on '^files   to validate on: ds/Validation.jsonl .3., ds/a/dev/part-0.jsonl .3., ' out.txt
mkdir words && for name in train valid test README; do echo "a $name" > words/$name.txt; done
makes texts_have_splits_beside_train '^texts   words .*: 3 documents, 1 for validation' --train words --out words.run
rm words/train.txt
makes else_they_are_texts '^texts   words .*: 3 documents, 0 for validation' --train words --out words.run
# ---- a tokenizer of Hugging Face ----------------------------------------------------------------------
tiny_model bpe 24 40 8 512
cp "$root"/tests/golden/tokenizers/smollm2/tokenizer.json bpe
as_bpe=(--model bpe --from-scratch)
echo '{"eos_token": "absent"}' > bpe/tokenizer_config.json
expect needs_eos 3 'no eos_token' "${run[@]}" "${as_bpe[@]}" --train tree --out eos
echo '{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}' > bpe/tokenizer_config.json
# one long text, which its hash would choose for validation; a validation file has records
lines() { python3 -S -c "print('every word of this line is a token or two\n' * $1)"; }
mkdir few && lines 1751 > few/long.txt && echo a short one > few/val.txt
makes of_long_texts_ends_are_validated '3 documents, 1 for validation .the last 1 % of a file' --train few --out few.out
mkdir longs && for i in $(seq 21); do cp few/long.txt longs/$i.txt; done
makes of_many_long_ones_too '42 documents, 21 for validation .the last 1 % of a file' --train longs --out longs.out
only bpe_tree "${as_bpe[@]}" --train tree --out bpe-tree
check_python one_boundary_token << 'PY'
for ids, _ in shards.read("bpe-tree/tokens"):
    assert ids[-1] == 0 and ids[0] != 0 and len(ids) > 1, ids
PY
tiny_model bare 24 40 8 && cp out-tree/tokens/tokenizer.json bare
echo '{"bos_token": "<|eos|>", "eos_token": "<|eos|>"}' > bare/tokenizer_config.json
echo '{"parts": [["abc", false], ["de", true]]}' > bare.jsonl
only bytes_without_bos --model bare --from-scratch --train bare.jsonl --out bare.run
check_python their_targets <<< 'assert shards.read("bare.run/tokens") == [([*b"abcde", 257], [0, 0, 0, 1, 1, 1])]'
# ---- once, and again when something has changed ----------------------------------------------------------
makes no_part_is_left_out ': 4 documents' --out keyed --train parts.jsonl --train-on all
makes other_targets_are_other_tokens ': 3 documents' --out keyed --train parts.jsonl
only parts_for_all --out keyed --train never.jsonl --train-on all
tiny_model tiny 24 40 8 && cp out-tree/tokens/*token*.json tiny
fresh=("${run[@]}" --model tiny --from-scratch --train notes.txt --out r)
expect tokenizes_and_trains 0 '^texts   notes.txt -> r/tokens: 1 document, 0 for validation' \
    "${fresh[@]}" --steps 2 --save-every 1
cp -r r/tokens before
check again "${fresh[@]}" --overwrite --steps 2 --save-every 1
lacks only_once ^texts out.txt
check resumes_with_the_same_texts "${run[@]}" --resume --train notes.txt --out r --steps 3
check the_same_texts_are_no_change test "$(grep ^resume: out.txt)" = 'resume: --steps 2 -> 3'
seq 2 900 > notes.txt
expect keeps_the_tokens 2 'trained on other texts than notes.txt has now' "${fresh[@]}" --resume --steps 4
expect keeps_them_before_no_steps 0 '^texts   notes.txt -> /.*/unpad-' "${fresh[@]}" --steps 0 --overwrite
same_shards they_are_kept r/tokens before
expect train_on_needs_the_texts 2 '^error: --train-on: expected as in' "${run[@]}" --resume --out r --steps 4 --train-on all
expect resumes_without_the_texts 0 '^done: r/final' "${run[@]}" --resume --out r --steps 4
again=("${fresh[@]}" --overwrite --steps 1)
sed -i '1s/2/3/' notes.txt
expect tokenized_for_its_time 0 '^texts   notes.txt -> r/tokens' "${again[@]}"
expect_notes
holds as_the_new_text r/tokens notes.txt.expected
check as_validation "${again[@]}" --val lines.jsonl
expect tokenized_for_its_use 0 '^texts   notes.txt -> r/val_tokens' "${again[@]}" --val notes.txt
# what else is in the key
cp -r tiny changing && key=(--model changing --from-scratch --out changed --train words)
only first_key "${key[@]}"
while IFS='|' read -r name change; do
    makes "again_without_changes_$name" '^train ' "${key[@]}"
    lacks "no_new_tokens_$name" ^texts out.txt
    eval "$change"
    makes "new_tokens_$name" ^texts "${key[@]}"
done << 'CHANGES'
template|echo '{{ x }}' > changing/chat_template.jinja
no_template|rm changing/chat_template.jinja
template_of_the_config|edit changing/tokenizer_config.json 'j["chat_template"] = "{{ y }}"'
added_token|edit changing/tokenizer_config.json 'j["added_tokens_decoder"] = {"258": {"content": "<tool>"}}'
tokenizer|edit changing/tokenizer.json 'j["post_processor"] = None'
new_file|echo more > words/more.txt
another_size|touch -r words/more.txt stamp && echo longer > words/more.txt && touch -r stamp words/more.txt
CHANGES
cp "$root/tests/golden/chat/templates/llama3.2.jinja" changing/chat_template.jinja
day() { SOURCE_DATE_EPOCH=$1 expect "$2" 0 "$3" env TZ=UTC "${run[@]}" --steps 0 --val-every 0 "${key[@]}"; }
day 1 a_day '^texts ' && day 3600 the_same_day '^train ' && lacks no_new_tokens_of_a_day ^texts out.txt
day 86400 new_tokens_of_another_day '^texts '
# ---- --eval ------------------------------------------------------------------------------------------------
mkdir tmp
evaluate() { TMPDIR=$work/tmp "$train" --model tiny --from-scratch --eval --max-seqlen 64 "$@"; }
check eval_of_texts evaluate --val tree
sed -n '/^document/,$p' out.txt > eval-texts.txt
check eval_of_their_shards evaluate --val out-tree/tokens/train_00000.bin
sed -n '/^document/,$p' out.txt > eval-shards.txt
has eval_has_all_documents '^all +9 ' eval-texts.txt
same eval_of_texts_is_that_of_their_shards eval-texts.txt eval-shards.txt
lines 60000 > long.txt
TMPDIR=$work/tmp "$train" --model demo --from-scratch --eval --max-seqlen 64 --val long.txt > out.txt 2>&1 &
await_line $! '^texts' out.txt
kill $!
wait $!
check eval_ends_at_a_signal test $? -eq 143
check eval_leaves_nothing rmdir tmp
# ---- one big text: the end of it, in whole lines, is the validation set ------------------------------------
python3 -S -c 'print("\n".join("line %d" % i for i in range(9000)), end="")' > big.txt
python3 -S -c 'print("\u20ac" * 40000, end="")' > line.txt     # or else in whole characters
cut='2 documents, 1 for validation .the last 1 % of a file.'
for text in big line; do makes "${text}_is_cut" "^texts   $text.txt -> .* $cut" --train $text.txt --out $text; done
check_python what_is_cut_is_whole << 'PY'
for name, last in ("big", 10), ("line", 0xac):
    [(train, _)], [(val, _)] = shards.read(name + "/tokens", "train"), shards.read(name + "/tokens", "val")
    text = open(name + ".txt", "rb").read()
    assert bytes(train[1:-1] + val[1:-1]) == text and train[-2] == last, name
    assert 0.98 < 100 * len(val[1:-1]) / len(text) <= 1, (name, len(val))
PY
makes with_val_it_is_not '^texts   big.txt -> big/tokens: 1 document, 0 for' --train big.txt --val notes.txt --out big
# ---- bad input --------------------------------------------------------------------------------------------
# refused NAME PATTERN SPEC ARGUMENTS...: exit code 3, and no tokens are left
refused() {
    expect "refuses_$1" "${code:-3}" "$2" "${run[@]}" --out refused --steps 0 --val-every 0 --train "${@:3}"
    [ -z "$(ls -A refused 2> /dev/null | grep tokens)" ] || bad "refuses_$1_and_writes_nothing" ''
}
mkdir nothing tables blobs only.val && cp lines.jsonl only.val/val.jsonl
touch empty.txt tables/x.parquet table.csv && printf 'a\0b' > blobs/x
gzip -c notes.txt > notes.txt.gz
cp notes.txt.gz packed.txt
python << 'PY'
rows = [{"text": "gr\u00fcn %d" % i} for i in range(3)]
lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
for name, data in {"utf16.jsonl": lines.encode("utf-16"), "windows.jsonl": lines.encode("cp1252"), "utf16.json": json.dumps(rows).encode("utf-16"),
        "indented.jsonl": "\n".join(json.dumps(r, indent=1) for r in rows).encode(), "joined.jsonl": lines.replace("\n", "").encode(),
        "quotes.jsonl": "\n".join(map(str, rows)).encode(), "indented.json": "\n".join(json.dumps(r, indent=1) for r in rows).encode(),
        "latin.txt": "gr\u00fcn ".encode("latin-1") * 9, "mostly.txt": b"words " * 999 + b"\xfc\xe4"}.items():
    open(name, "wb").write(data)
PY
for case in utf16.jsonl:'iconv -f UTF-16 -t UTF-8 utf16' windows.jsonl:'iconv -f WINDOWS-1252 .* windows' utf16.json:'iconv -f UTF-16' \
    indented.jsonl:'.*jq -c . indented' joined.jsonl:'.*jq -c . joined' quotes.jsonl:'.*literal_eval.* < quotes' indented.json:'.*jq -c . indented.json'; do
    refused "${case%%:*}" "^hint: ${case#*:}" "${case%%:*}"
done
refused latin.txt 'latin.txt: expected UTF-8, found 9 other bytes' latin.txt "${as_bpe[@]}"
has how_to_convert_it '^hint: iconv -f WINDOWS-1252 -t UTF-8 latin.txt > NEW; or --invalid-utf8 replace' out.txt
makes latin_if_it_must_be '^warning: latin.txt: bytes not .* U.FFFD: 9 .iconv' "${as_bpe[@]}" --train latin.txt --invalid-utf8 replace --out latin
makes a_byte_of_thousands '^warning: mostly.txt: .*: 2 ' "${as_bpe[@]}" --train mostly.txt --out mostly
makes other_bytes_are_in_the_key '^texts   mostly.txt -> ' "${as_bpe[@]}" --train mostly.txt --out mostly --invalid-utf8 replace
printf '%s\n' '{"text": "words"}' '{"text": "<|endoftext|>words"}' '{"text": "words<|endoftext|>\n"}' > ends.jsonl
cp -r bpe both && echo '{"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}' > both/tokenizer_config.json
edit both/tokenizer.json 'j["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>"}}]}'
sed 2s/endoftext/im_start/ ends.jsonl > ends.both.jsonl
makes own_ends '^texts with a BOS or EOS of their own, which is not doubled: 2$' --model both --from-scratch --train ends.both.jsonl --out ends
check_python one_of_each << 'PY'
(one, _), (two, _), (three, _) = shards.read("ends/tokens")
assert one == two == three[:len(one)] and len(three) == len(one) + 1, (one, two, three)
PY
refused other_keys 'wrong.jsonl:1: expected text, messages, .* or parts; found body' wrong.jsonl
refused an_empty_chat 'chat.jsonl:1: expected an answer that is trained, found none' chat.jsonl
has how_to_train_it '^hint: --train-on all' out.txt
echo '{"prompt": "x", "chosen": "y", "rejected": "z"}' > preferences.jsonl && echo '{"question": "x", "answer": "y"}' > asked.jsonl
refused preferences '^hint: --preference dpo trains on both' preferences.jsonl
refused questions '^hint: name them prompt and completion' asked.jsonl
refused an_empty_file 'empty.txt: expected documents, found none' empty.txt
refused gzip 'notes.txt.gz: expected text or JSONL, found gzip' notes.txt.gz
refused parquet_in_a_directory 'x.parquet: expected text or JSONL, found Parquet' tables
refused a_binary_file 'packed.txt: expected text, found a binary file' packed.txt
refused parts_without_a_mask 'pairs.jsonl:1: part 1: expected \["text", true or false\]' pairs.jsonl
refused a_cut_array 'cut.json: record 2 is cut off' cut.json
refused validation_files_alone 'only.val: expected documents, found none' only.val
mkdir only.test && cp lines.jsonl only.test/test.jsonl
refused test_files_alone 'only.test: expected documents, found none' only.test
code=2 refused a_comma_in_out 'ref,used: expected a path without a comma' notes.txt:1,big.txt:2 --out ref,used
refused a_table 'table.csv: expected' table.csv
for dir in nothing blobs; do refused "$dir" "$dir: expected token shards" $dir; done
refused no_such_file 'absent.txt: expected a file or a directory, found nothing' absent.txt
refused a_model_without_tokenizer 'is text, expected a tokenizer for it' notes.txt --model smollm2-135m
has what_is_enough '^hint: .*with --from-scratch, a config.json' out.txt
sed 's/"vocab_size": 512/"vocab_size": 300/' bpe/config.json > c && mkdir low && cp bpe/* low && mv c low/config.json
code=9 refused a_larger_vocabulary 'made for a vocabulary of 4[0-9]*, the model has 300' notes.txt --model low --from-scratch
refused a_target_without_a_past 'first.jsonl:1: expected a part that is trained, found none' first.jsonl \
    --model bpe --from-scratch
echo '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "weight": 3e38}], "weight": 3e38}' > inf.jsonl
refused a_product_of_weights 'inf.jsonl:1: expected weights whose product is a float' inf.jsonl
cp -r bpe nfc
edit nfc/tokenizer.json 'j["normalizer"] = {"type": "NFC"}
for token in j["added_tokens"]: token["normalized"] = False'
refused parts_that_change 'accent.jsonl:1: expected text that the tokenizer does not change' accent.jsonl \
    --model nfc --from-scratch
cp -r bpe less
edit less/tokenizer.json 'j["model"]["vocab"]["unused"] = j["model"]["vocab"].pop("\u0104")'    # of byte 4
makes a_text_without_tokens_is_no_document '^texts .*: 1 document, ' "${as_bpe[@]/#bpe/less}" --train bytes.jsonl --out bytes.run
# 64 MB without a space, by a tokenizer of characters: for it, one word
mkdir llama2 && cp bpe/config.json "$root/tests/golden/tokenizers/llama2/tokenizer.json" llama2
edit llama2/config.json 'j["vocab_size"] = 600'
python <<< 'open("word.txt", "wb").write(os.urandom(1 << 26).translate(b"etaoinshrdlucmfw" * 16))'
train=$release LIMIT_S=60 check a_word_of_64_mb "$release" --model llama2 --from-scratch --train word.txt --out word.run --steps 0 \
    --val-every 0 --num-samples 0
has its_tokens_merge '^train .* 1 document, [1-6][0-9]{7} tokens' out.txt
rm -r word.txt word.run
# ---- validation: at least one document of ten ----------------------------------------------------------
for n in 9 10; do for i in $(seq $n); do echo "{\"text\": \"text $i of $n\"}"; done > $n.jsonl; done
yes '{"text": "again"}' | head -n 12 > same.jsonl
makes nine_are_all_trained '^texts .*: 9 documents, 0 for validation' --train 9.jsonl --out v9
has how_to_have_some '^val     none; --val FILE or DIR gives some$' out.txt
makes one_of_ten '^texts .*: 10 documents, 1 for validation, ' --train 10.jsonl --out v10
edit v10/tokens/tokenizer.json 'j["version"] = "1.1"'
expect another_tokenizer_in_tokens 9 '^error: v10/tokens/tokenizer.json: expected the tokenizer of v10/tokens' "${run[@]}" \
    --steps 0 --val-every 0 --train 10.jsonl --out v10
mkdir 12 && for i in $(seq 12); do echo $i > 12/$i.txt; done
makes one_of_twelve_files '^texts .*: 12 documents, 1 for validation, ' --train 12 --out v12
makes copies_stay_together '^texts .*: 12 documents, 0 for validation' --train same.jsonl --out vsame
# ---- a sample of a chat begins with all that stands before its first answer ----------------------------
echo '{"messages": [{"role": "user", "content": "How many legs has a spider, please?"},
 {"role": "assistant", "content": "Eight."}]}' | tr -d '\n' > spider.jsonl
makes the_question '^How many legs has a spider, please[?]<.im_end.>$' --train spider.jsonl --max-seqlen 256 --num-samples 1 --out spider
has chats_without_a_model '^warning: these chats train random weights: --model DIR names' out.txt
check before_the_answer eval '! grep -a "^Eight" out.txt'
# ---- what trains nothing needs no --out of its own; a run is no text ----------------------------------------
expect a_run 0 done "${run[@]}" --model tiny --from-scratch --train 10.jsonl --out mine/1 --epochs 2.5 --val-every 0 --micro-batch-tokens 64
has its_epochs '^epochs  [23].[0-9]+ in [5-9] steps$' out.txt
cp -r mine/1 mine.before
for what in '--compare 1' --check-packing '--steps 0 --val-every 0'; do
    expect "$what" 0 '^texts   9.jsonl -> /.*/unpad-' "${run[@]}" "${as_bpe[@]}" --train 9.jsonl --out mine/1 $what
done
check nothing_is_left_there diff -r mine.before mine/1
refused a_run_as_texts 'mine/1: expected texts or shards, found a run' mine/1
has where_its_tokens_are '^hint: its tokens are in mine/1/tokens$' out.txt
echo text > mine/text.txt
makes runs_inside_are_skipped '^texts .*: 1 document, 0 for validation, [^;]*$' --train mine --out another
expect many_epochs 0 '^epochs  [0-9.]+ in 300 steps$' "${run[@]}" --train 9.jsonl --dry-run
has many_epochs_warn '^warning: 300 steps: [0-9]{2,} epochs of 9 documents' out.txt
said validation_on_what_is_trained 0 '^warning: --val is --train: ' "${run[@]}" --train 9.jsonl --val 9.jsonl --dry-run
expect a_run_is_there 2 'mine/1: expected an empty directory, found a run' "${run[@]}" --train lines.jsonl --out mine/1
lacks texts_read_before_it_is_found '^texts' out.txt
expect epochs_of_a_mixture 0 '^epochs  2.[0-9]+ of .*tokens-1-9.jsonl in [0-9]+ steps$' \
    "${run[@]}" --train 9.jsonl:1,10.jsonl:2 --epochs 2 --val-every 0 --out mixed
has the_other_is_repeated '^source .*tokens-2-10.jsonl.* [34].[0-9]+ epochs$' out.txt
expect steps_and_epochs 2 'at most one' "${run[@]}" --train 9.jsonl --epochs 2 --steps 2
# ---- a signal, several ranks -----------------------------------------------------------------
python3 -S -c '
for i in range(300000): print("{\"text\": \"a document of %d words, and some more of them, as it were: %d\"}" % (i, i * i))' > large.jsonl
# one record, too, that alone takes long
python3 -S -c 'print("{\"text\": \"%s\"}" % ("ab" * 12000000))' > long.jsonl
for f in large long; do
    "${run[@]}" "${as_bpe[@]}" --train $f.jsonl --out $f --threads 1 --steps 0 --val-every 0 > out.txt 2>&1 &
    until [ -e $f/tokens.unpad.tmp-$! ] || ! kill -0 $! 2> /dev/null; do sleep 0.02; done
    sleep 0.2
    kill $!
    start=$SECONDS
    wait $!
    check stopped_by_a_signal_$f test "$? $(ls $f | grep tokens) $((SECONDS - start < 3))" = '75  1'
done
with_ranks two_ranks "$release" || finish
check two_ranks "${mpi[@]}" -n 2 "$release" "${small[@]}" --batch-tokens 512 --train lines.jsonl --out ranks \
    --model tiny --from-scratch --steps 1 --val-every 0
same_shards two_ranks_as_one ranks/tokens out-lines.jsonl/tokens
finish
