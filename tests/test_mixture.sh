#!/usr/bin/env bash
# Mixtures, end to end: shares and losses in the log, resuming bit for bit and with other weights, ranks,
# what is refused.
. "$(dirname "$0")/lib.sh"
ln -s "${TRAIN:-$root/build/asan/train_llama}" train_llama && train=./train_llama

tiny_model tiny 24 40 8
uneven_texts web 31
uneven_texts code 9
seq 1 100 > one.txt
printf short > short.txt
for c in web code; do prepare $c --out $c.bin --val-frac 0.2; done
prepare short.txt --out short.bin --val-frac 0
cp -r code.bin code:1 && cp web.bin/*.json tiny
common=(--model tiny --from-scratch --max-seqlen 128 --micro-batch-tokens 256 --batch-tokens 1024 --keep 0
        --num-samples 0 --schedule constant --warmup-steps 0 --val-every 4 --threads 1 --deterministic)
run=("$train" "${common[@]}") shards=code.bin:3,web.bin:6
# ---- shares, epochs and losses of each source -------------------------------------------------------
said texts_are_a_source 0 '^source  a/tokens-3-one.txt: 10 %, [0-9]+ tokens, .* [1-9][0-9]* drawn, [0-9]+\.(0[1-9]|[1-9][0-9]) epochs$' \
    "${run[@]}" --train web.bin:6,code:1:3,one.txt:1 --val $shards --out a --steps 8 --save-every 4
has a_name_may_end_in_a_number '^source  code:1: 30 %' said.txt
check_python shares_and_losses_in_the_log << 'PY'
steps, total = steps("a"), 0
for s in steps:
    total += s["real_tokens"]
    tokens = [source["tokens"] for source in s["sources"]]
    assert sum(tokens) == total and all(abs(t - w * total) <= 128 for t, w in zip(tokens, (0.6, 0.3, 0.1))), s
assert [s["path"] for s in steps[0]["sources"]] == ["web.bin", "code:1", "a/tokens-3-one.txt"]
assert steps[-1]["sources"][2]["epochs"] > 1 > steps[-1]["sources"][0]["epochs"] > 0, steps[-1]
parts, alls = events("a", "val_source"), events("a", "val")
assert len(parts) == 2 * len(alls) == 6
for a, two in zip(alls, zip(parts[::2], parts[1::2])):
    for key in ("docs", "real_tokens", "targets"): assert sum(p[key] for p in two) == a[key]
    assert abs(sum(p["loss"] * p["targets"] for p in two) / a["targets"] - a["loss"]) < 1e-5, (two, a)
PY
for c in web code; do
    "${run[@]}" --train $c.bin --out none --steps 0 > alone.txt
    check "loss_of_$c" grep -F "$(sed -n 's/^val after step 0 |/|/p' alone.txt)" said.txt
done
# ---- resuming ---------------------------------------------------------------------------------------
cp -r a b && rm -r b/step-00000008 b/final
check resumes "${run[@]}" --resume --out b
check nothing_is_left_to_train "${run[@]}" --resume --out b
lacks no_rate_of_no_steps 'nan' out.txt
same_files the_same_bits_and_cursors {a,b}/step-00000008
rm -r b/step-00000008
expect other_weights 0 '^resume: --train .*/tokens-3-one.txt:0.1 -> .*/tokens-3-one.txt:0$' \
    "${run[@]}" --resume --train web.bin:1,code:1:3,one.txt:0 --out b --steps 10
for other in code:1:3,web.bin:6,b/tokens-3-one.txt:1 web.bin,code:1,b/tokens-3-one.txt; do
    expect "refuses_$other" 9 'found other values of data_fingerprint' "${run[@]}" --resume --out b --train $other
done
# ---- modes, and what is refused ---------------------------------------------------------------------
for mode in '--compare 1' '--check-packing' '--dry-run --val-tokens 3000'; do
    check "mixture $mode" "${run[@]}" --train $shards --out none $mode
done
has each_source_validates_on_its_part '^ +validation takes [0-9]+ documents' out.txt      # 3000 of 3291 tokens
expect a_space_after_the_comma 0 '^source  code.bin: 60 %' "${run[@]}" --train 'web.bin:4, code.bin:6' --dry-run
expect a_weight_is_missing 2 'a weight for each source, .* found code.bin$' "${run[@]}" --train web.bin:6,code.bin --out none
expect nothing_of_a_source_is_left 3 '^error: code.bin: data: .* found none among [0-9]+' "${run[@]}" --out none \
    --train short.bin:1,code.bin:1 --val short.bin/train_00000.bin --long-docs drop --max-seqlen 12
expect eval_has_no_weights 2 'expected no weights' "$train" --model a/final --eval --val one.txt:1,web.bin:6
check nothing_was_written test ! -e none
finish
