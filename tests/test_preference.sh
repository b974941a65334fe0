#!/usr/bin/env bash
# --preference: records in every form are the same pairs, and what is no pair is left out by name; the same
# losses in every layout, on any number of ranks and after a resume; packed is each pair alone.
. "$(dirname "$0")/lib.sh"
tiny_model tiny 24 40 8
python << 'PY'
import random
random.seed(5)
forms = {name: open(name + ".jsonl", "w") for name in ("texts", "messages", "implicit")}
say = lambda role, text: {"role": role, "content": text}
for i in range(60):
    system = "Be brief. " * random.choice([0, 14])
    prompt = "%d: " % i + "what is it? " * random.randint(1, 12)
    a, b = ("so " * random.randint(0, 50) + str(i) for _ in range(2))
    texts = {"prompt": prompt, "chosen": a + " yes", "rejected": b + " no"}
    if system: texts["system"] = system
    before = ([say("system", system)] if system else []) + [say("user", prompt)]
    turns = {key: [say("assistant", texts[key])] for key in ("chosen", "rejected")}
    print(json.dumps(texts), file=forms["texts"])
    print(json.dumps({"prompt": before, **turns}), file=forms["messages"])
    print(json.dumps({"prompt": prompt, "chosen": before + turns["chosen"], "rejected": before + turns["rejected"],
                      "messages": before, "score": 0.5}), file=forms["implicit"])
bad = [{"prompt": "p", "chosen": "same", "rejected": "same"},
       {"chosen": [say("user", "a"), say("assistant", "x")], "rejected": [say("user", "b"), say("assistant", "y")]},
       {"prompt": "p", "chosen": "only"}, {"prompt": "p", "chosen": 5, "rejected": "x"}, {"text": "no pair"},
       {"prompt": "p", "chosen": "x", "rejected": [say("user", "p"), say("assistant", "y")]}, {"prompt": "p", "chosen": "x", "rejected": "y", "weight": 0}]
with open("bad.jsonl", "w") as f:
    for record in bad + [{"prompt": "p", "chosen": "short", "rejected": "long " * 200}]: print(json.dumps(record), file=f)
    for i in range(9): print(json.dumps({"prompt": "p%d" % i, "chosen": "x", "rejected": "y"}), file=f)
PY
run=("$train" --model tiny --from-scratch --preference dpo --lr 1e-2 --max-seqlen 500 --micro-batch-tokens 1500
    --batch-tokens 4500 --val-every 2 --num-samples 0)
"$release" --train "$root/README.md" --out boot --steps 0 --val-every 0 --num-samples 0 > /dev/null 2>&1
cp boot/tokens/tokenizer*.json tiny
# ---- records -----------------------------------------------------------------------------------------------
for form in texts messages implicit; do
    beside $form "${run[@]}" --train $form.jsonl --out $form --steps 4 --save-every 2
done
wait
for form in texts messages implicit; do
    outcome "trains_$form" 0 '^step +4/4 .* \| accuracy [0-9.]+ % \| margin' ended $form
done
for form in messages implicit; do same "${form}_are_the_same_pairs" {texts,$form}/tokens/train_00000.bin; done
has other_keys_are_named '^unknown keys: messages \(60\), score \(60\)' implicit.txt
outcome leaves_out_by_name 0 '^done' "${run[@]}" --train bad.jsonl --out bad --steps 1 --val-every 0
for why in '1: chosen and rejected: expected two answers, found the same' '2: expected a prompt and answers, or' \
    '3: expected chosen and rejected' '4: chosen: expected a string or a list' '5: expected chosen and rejected'; do
    has "leaves_out_${why:0:1}" "left out: bad.jsonl:$why" out.txt
done
has counts_records 'left out: 6 records' out.txt
has counts_what_is_too_long '^ +2 documents longer than 500 tokens dropped' out.txt
# ---- the same in every layout, on ranks, resumed, alone ---------------------------------------------------------
for layout in shared padded repad; do
    beside $layout "${run[@]}" --train texts.jsonl --out $layout --steps 4 --layout $layout
done
beside grouped "${run[@]}" --train texts.jsonl --compare 1
for layout in packed shared; do
    for kind in dpo simpo; do
        beside alone_${layout}_$kind "${run[@]}" --train texts.jsonl --layout $layout --check-packing --preference $kind \
            --sft-weight 0.1 --label-smoothing 0.1
    done
done
wait
for layout in shared padded repad; do outcome "trains_$layout" 0 '^done' ended $layout; done
same_losses layouts 1e-4 1e-3 4 texts shared padded repad
for alone in alone_{packed,shared}_{dpo,simpo}; do outcome $alone 0 '^packing does not change' ended $alone; done
check_python the_log << 'PY'
s, v = steps("texts"), events("texts", "val")
assert abs(s[0]["loss"] - 0.693147) < 1e-5 and s[0]["accuracy"] == 0.5 and s[0]["margin"] == 0, s[0]
assert v[0]["accuracy"] == 0.5 and v[0]["margin"] == 0 and len(v) == 3, v
assert all(abs(x["reward_chosen"] - x["reward_rejected"] - x["margin"]) < 1e-5 for x in s + v)
assert sum(x["computed_tokens"] < x["real_tokens"] for x in steps("shared")) == 4
layouts = [l.split() for l in open("grouped.txt") if re.match(r"(packed|shared|padded|grouped|repad|rows) +[0-9]", l)]
assert len(layouts) == 5 and len({l[-1] for l in layouts}) == 1, layouts
PY
cp -r texts resumed && rm -r resumed/step-00000004 resumed/final
outcome resume 0 '^step +4/4 ' "$train" --resume --out resumed
same_files a_resumed_run_is_the_same {texts,resumed}/step-00000004
expect another_reference 9 'expected the reference of this training and validation data' \
    "$train" --resume=resumed/step-00000002 --val messages.jsonl --out no
rm -r resumed/step-00000004 resumed/final resumed/step-00000002/reference.bin
expect resume_without_a_reference 3 'reference.bin' "$train" --resume=resumed/step-00000002 --out no
if with_ranks ranks "$release"; then
    exact=("$release" "${run[@]:1}" --train texts.jsonl --deterministic --layout shared)
    for n in 1 2 3; do ranks $n "${exact[@]}" --out on$n --steps 3; done
    for n in 2 3; do same_state "the_same_bits_on_${n}_ranks" {on1,on$n}/step-00000003; done
fi
outcome simpo_by_adapters 0 '^done' "${run[@]}" --model texts/final --no-from-scratch --train texts.jsonl \
    --preference simpo --lora 4 --out adapters --steps 2 --ledger
check_python simpo_needs_no_reference << 'PY'
assert not os.path.exists("adapters/step-00000002/reference.bin") and os.path.exists("texts/step-00000004/reference.bin")
PY
outcome learns 0 '^done' "$release" "${run[@]:1}" --train texts.jsonl --lr 1e-3 --epochs 8 --out learns
check_python learns_to_tell_yes_from_no << 'PY'
last = steps("learns")[-5:]
assert sum(s["accuracy"] for s in last) > 4 and sum(s["loss"] for s in last) < 5 * 0.5, last
PY
outcome a_mixture 0 '^done' "${run[@]}" --train texts.jsonl:0.7,implicit.jsonl:0.3 --out mixture --steps 3
check_python a_mixture_starts_even <<< 'assert abs(steps("mixture")[0]["loss"] - 0.693147) < 1e-5'
# ---- refused ------------------------------------------------------------------------------------------------------
expect pairs_one_by_one 3 'found preference pairs' "$train" --train texts/tokens --out no
expect no_pairs 3 'expected preference pairs' "${run[@]}" --train boot/tokens --out no
expect only_with_preference 2 '--sft-weight belong to --preference' "$train" --train texts.jsonl --sft-weight 1 --out no
expect no_rows 2 'expected no --layout rows' "${run[@]}" --train texts.jsonl --layout rows --out no
expect both_must_fit 2 'at least twice --max-seqlen' "${run[@]}" --train texts.jsonl --micro-batch-tokens 900 --out no
expect other_data 9 'same documents in the same steps' "$train" --resume=texts/step-00000002 --train bad.jsonl --out no
finish
