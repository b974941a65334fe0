#!/usr/bin/env bash
# Data, end to end: damaged and changed shards, shards of another tokenizer, documents and tokens that
# are never trained on, mixtures.
. "$(dirname "$0")/lib.sh"
tiny_model tiny 24 40 8
corpus 31 0.2
options=(--model tiny --from-scratch --max-seqlen 128 --micro-batch-tokens 512 --num-samples 0
         --val-every 0 --threads 1)
# trains NAME CODE PATTERN DATA ARGUMENTS...: the tiny model on these shards
trains() { said "$1" "$2" "$3" "$train" "${options[@]}" --train "${@:4}"; }
# evaluates NAME CODE PATTERN DATA ARGUMENTS...: the tiny model
evaluates() {
    expect "$1" "$2" "$3" "$train" --model tiny --from-scratch --eval --max-seqlen 128 --micro-batch-tokens 512 \
        --threads 1 --val "${@:4}"
}
# ---- damaged and changed tokens --------------------------------------------------------------------
for split in train val; do
    cp -r corpus flipped.$split && shards flip flipped.$split/${split}_00000.bin 1500
    trains flipped_bit_in_${split}_tokens 3 "error: flipped.*/${split}_00000.bin: bytes 1024 to [0-9]+: expected checksum" \
        flipped.$split --steps 40 --out $split.run
done
cp -r corpus cut && truncate -s -2 cut/val_00000.bin   # never "no validation"
trains cut_validation 3 'error: cut/val_00000.bin' cut --steps 1 --out cut.run
evaluates cut_validation_of_eval 3 'error: cut/val_00000.bin' cut
# llm.c's format: no index at all
mkdir llmc
python <<< 'data = open("corpus/train_00000.bin", "rb").read()
open("llmc/train_00000.bin", "wb").write(data[:12] + bytes(1012) + data[1024:])'
llmc=(llmc --boundary-token 256)
trains unchecked_tokens_are_reported 0 'scanning for token 256, tokens unchecked' "${llmc[@]}" --steps 2 --out llmc.run
# ---- documents and tokens that are never trained on --------------------------------------------------
# three documents of 12, 52 and 102 tokens including BOS and EOS
mkdir lengths
for n in 10 50 100; do printf "%${n}s" ' ' | tr ' ' x > lengths/$n.txt; done
prepare lengths --out few --val-frac 0
few() { trains "$1" "$2" "$3" few --steps 2 --overwrite --out few.run "${@:4}"; }
few truncated_documents 0 '^ +1 document longer than 100 tokens truncated: 2 of 166 tokens \(1.2 %\) never trained$' \
    --max-seqlen 100 --long-docs truncate
few dropped_documents 0 '^ +2 documents longer than 40 tokens dropped: 154 of 166 tokens \(92.8 %\) never trained$' \
    --max-seqlen 40 --long-docs drop
check_python left_out_tokens_are_in_the_log << 'PY'
assert log("few.run")[0]["data"] == {"train": {
    "shards": 1, "unchecked_shards": 0, "documents": 3, "tokens": 166, "empty_documents": 0,
    "long_documents": 2, "tokens_left_out": 154}, "val": None}
PY
few long_documents_as_an_error 3 'error: data: document [0-9] has (52|102) tokens, expected at most 40' \
    --max-seqlen 40 --long-docs error --out long.run
check refused_run_creates_no_directory test ! -e long.run
few all_documents_dropped 3 'expected documents of at most 11 tokens, found none among 3' --max-seqlen 11 --long-docs drop
# segments that fit at any length are taken: two full ones fill two micro-batches
few two_full_segments 0 'fill 100.0 % \| 2 docs' --max-seqlen 12 --micro-batch-tokens 12 --batch-tokens 24
has says_that_it_is_full '^plan .* filled to 9[0-9].[0-9] %' said.txt
lacks no_wrong_remedy '^fill' said.txt
# the only document for validation is too long
prepare lengths/100.txt --out held --val-frac 0
for end in bin idx; do mv held/train_00000.$end held/val_00000.$end; done
cp corpus/train* held
held() { trains "$1" "$2" "$3" held --steps 1 --max-seqlen 101 --long-docs drop --out held.run "${@:4}"; }
held no_validation 0 '^warning: no validation: held: data: expected documents of at most 101 tokens, found none among 1$'
has none_is_said '^val     none' said.txt
held a_validation_that_was_asked_for 3 'error: held: data: .* found none among 1' --overwrite --val held
# ---- loss masks -------------------------------------------------------------------------------------
for name in masked empty; do cp -r corpus $name; done
shards mask masked 'd % 4 > 0 and (i // 5 + d) % 3 == 0' && shards mask empty False
masked() { trains "$1" "$2" "$3" masked --batch-tokens 1024 --keep 0 --val-tokens 100000 "${@:4}"; }
masked targets_are_counted 0 '^train +1 unpad.c shard, [0-9]+ documents, [0-9]+ tokens, [0-9]+ of them targets$' \
    --steps 4 --save-every 2 --val-every 4 --out masked.run
has documents_without_a_target_are_counted \
    '^ +[0-9]+ documents longer than 128 tokens split, [0-9]+ documents without a target: [0-9]+ of [0-9]+ tokens \(' said.txt
has trained_tokens_in_the_step_line '^step +4/4 .* tok/s \([0-9]+ targets/s\) \| lr ' said.txt
has trained_tokens_at_the_end '^trained 4 steps, [0-9]+ tokens, [0-9]+ of them targets, in ' said.txt
check_python trained_tokens_in_the_log << 'PY'
steps, data = steps("masked.run"), log("masked.run")[0]["data"]["train"]
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
val = open("masked/val_00000.mask", "rb").read()
assert [l["targets"] for l in events("masked.run", "val")] == [struct.unpack_from("<Q", val, 24)[0]] * 2
trained = data["tokens"] - data["tokens_left_out"]
epochs, count = map(float, re.search(r"^epochs +([0-9.]+) in ([0-9]+) step", open("said.txt").read(), re.M).groups())
epoch = count / epochs
assert 0.99 * trained / 1024 < epoch < 0.93 * data["tokens"] / 1024, (epoch, data)
PY
# --eval reads masks without the loader that training and validation use
evaluates eval_under_a_mask 0 '^all ' masked
check_python eval_under_a_mask_is_validation << 'PY'
val = events("masked.run", "val")[0]
docs, targets, loss = next(l.split()[1:4] for l in open("out.txt") if l.startswith("all "))
assert int(targets) == val["targets"] and abs(float(loss) - val["loss"]) < 1e-4, (targets, loss, val)
PY
trains masks_without_a_target 3 'error: data: expected targets, found none in the masks of' empty --out unmade
check refused_masks_create_no_directory test ! -e unmade
# ---- a model and shards of different tokenizers -----------------------------------------------------
# with NAME CODE PATTERN MODEL ARGUMENTS...: another model on the same shards
with() { trains "$1" "$2" "$3" corpus --dry-run --model "${@:4}"; }
# warned NAME COUNT PATTERN MODEL ARGUMENTS...: with so many warnings
warned() {
    with "$1" 0 "$3" "${@:4}"
    check "$1_gives_$2" test "$(grep -c '^warning: ' said.txt)" -eq "$2"
}
cp -r tiny same && cp corpus/tokenizer.json same
warned the_same_tokenizer 0 '^model' same
cp -r same other && echo >> other/tokenizer.json
with model_with_another_tokenizer 9 \
    'error: corpus: expected the tokenizer of other/tokenizer.json \(SHA-256 [0-9a-f]{16}\.\.\.\), found [0-9a-f]{16}' other
evaluates eval_with_another_tokenizer 9 'expected the tokenizer of other' corpus --model other
evaluates eval_of_training_shards 0 '^all ' "${llmc[@]}"
with shards_of_an_unknown_tokenizer 0 '^model' same --train "${llmc[@]}"
with no_validation_data 3 'nowhere' same --val nowhere
warned another_tokenizer_allowed 1 '^warning: corpus: .*other/tokenizer.json' other --allow-other-tokenizer
# validation shards of another tokenizer than the training shards; the model has no tokenizer.json
cp -r corpus retagged
shards flip retagged/val_00000.bin 64 && shards seal retagged/val_00000
with validation_of_another_tokenizer 9 'error: retagged: expected the tokenizer of corpus' tiny --val retagged
with val_of_another_tokenizer_than_the_model 9 'error: retagged: expected the tokenizer of same/tok' same --val retagged
# BOS and EOS of the model: NAME | sed of config.json | generation_config.json | warnings | a line
while IFS='|' read -r name config generation count line; do
    rm -rf ends && cp -r tiny ends && sed -i "$config" ends/config.json && echo "$generation" > ends/generation_config.json
    warned "$name" "$count" "$line" ends
done << 'MODELS'
another_eos|s/257/5/|{"eos_token_id": [6, 7]}|1|^warning: corpus: documents end with token 257, but eos_token_id of ends is 5, 6, 7$
an_eos_of_several|s/257/5/|{"eos_token_id": [6, 257], "bos_token_id": 256}|0|^model
an_eos_of_several_in_the_config|s/257/[5, 257]/|{}|0|^model
another_bos|s/256/1/|{"bos_token_id": 3}|1|^warning: corpus: documents begin with token 256, but bos_token_id of ends is 1, 3$
a_bos_that_is_an_eos|s/256/1/; s/257/[257, 256]/|{"bos_token_id": 3}|0|^model
a_model_without_eos|s/257/null/|{}|0|^model
MODELS
echo '{' > ends/generation_config.json
with a_damaged_generation_config 3 'error: ends/generation_config.json' ends
warned byte_shards_for_demo 0 '^model' demo
with byte_shards_for_smollm2 0 '^warning: corpus: made for a vocabulary of 258, smollm2-135m has 49152: ' smollm2-135m
has another_eos_of_a_built_in_model \
    '^warning: corpus: documents end with token 257, but eos_token_id of smollm2-135m is 0$' said.txt
# ---- mixtures: shares, epochs and losses of each source ------------------------------------------------
uneven_texts code 9
prepare code --out code.bin --val-frac 0.2 && cp -r code.bin code:1
seq 1 100 > one.txt
printf short > short.txt
prepare short.txt --out short.bin --val-frac 0
mixed=("$train" "${options[@]}" --model same --micro-batch-tokens 256 --batch-tokens 1024 --keep 0 --schedule constant
       --warmup-steps 0 --val-every 4 --deterministic)
both=code.bin:3,corpus:6
said texts_are_a_source 0 '^source  a/tokens-3-one.txt: 10 %, [0-9]+ tokens, .* [1-9][0-9]* drawn, [0-9]+\.(0[1-9]|[1-9][0-9]) epochs$' \
    "${mixed[@]}" --train corpus:6,code:1:3,one.txt:1 --val $both --out a --steps 8 --save-every 4
has a_name_may_end_in_a_number '^source  code:1: 30 %' said.txt
check_python shares_and_losses_in_the_log << 'PY'
steps, total = steps("a"), 0
for s in steps:
    total += s["real_tokens"]
    tokens = [source["tokens"] for source in s["sources"]]
    assert sum(tokens) == total and all(abs(t - w * total) <= 128 for t, w in zip(tokens, (0.6, 0.3, 0.1))), s
assert [s["path"] for s in steps[0]["sources"]] == ["corpus", "code:1", "a/tokens-3-one.txt"]
assert steps[-1]["sources"][2]["epochs"] > 1 > steps[-1]["sources"][0]["epochs"] > 0, steps[-1]
parts, alls = events("a", "val_source"), events("a", "val")
assert len(parts) == 2 * len(alls) == 6
for a, two in zip(alls, zip(parts[::2], parts[1::2])):
    for key in ("docs", "real_tokens", "targets"): assert sum(p[key] for p in two) == a[key]
    assert abs(sum(p["loss"] * p["targets"] for p in two) / a["targets"] - a["loss"]) < 1e-5, (two, a)
PY
for c in corpus code.bin; do
    check "${c}_alone" "${mixed[@]}" --train $c --out none --steps 0
    check "loss_of_$c" grep -F "$(sed -n 's/^val after step 0 |/|/p' out.txt)" said.txt
done
cp -r a b && rm -r b/step-00000008 b/final
check resumes "${mixed[@]}" --resume --out b
check nothing_is_left_to_train "${mixed[@]}" --resume --out b
lacks no_rate_of_no_steps 'nan' out.txt
same_files the_same_bits_and_cursors {a,b}/step-00000008
rm -r b/step-00000008
expect other_weights 0 '^resume: --train .*/tokens-3-one.txt:0.1 -> .*/tokens-3-one.txt:0$' \
    "${mixed[@]}" --resume --train corpus:1,code:1:3,one.txt:0 --out b --steps 10
for other in code:1:3,corpus:6,b/tokens-3-one.txt:1 corpus,code:1,b/tokens-3-one.txt; do
    expect "refuses_$other" 9 'found other values of data_fingerprint' "${mixed[@]}" --resume --out b --train $other
done
# modes, and what is refused
for mode in '--compare 1' '--check-packing' '--dry-run --val-tokens 3000'; do
    check "mixture $mode" "${mixed[@]}" --train $both --out none $mode
done
has each_source_validates_on_its_part '^ +validation takes [0-9]+ of [0-9]+ documents' out.txt      # 3000 of 3291 tokens
expect a_space_after_the_comma 0 '^source  code.bin: 60 %' "${mixed[@]}" --train 'corpus:4, code.bin:6' --dry-run
expect a_weight_is_missing 2 'a weight for each source, .* found code.bin$' "${mixed[@]}" --train corpus:6,code.bin --out none
expect nothing_of_a_source_is_left 3 '^error: code.bin: data: .* found none among [0-9]+' "${mixed[@]}" --out none \
    --train short.bin:1,code.bin:1 --val short.bin/train_00000.bin --long-docs drop --max-seqlen 12
expect eval_has_no_weights 2 'expected no weights' "$train" --model a/final --eval --val one.txt:1,corpus:6
check nothing_was_written test ! -e none
finish
