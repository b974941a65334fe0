#!/usr/bin/env bash
# --ledger: the documents of every step add up to its loss, in every layout, on any number of ranks, after a
# resume, with weights, masks and adapters; scripts/ledger.py finds the odd ones out and drops them.
. "$(dirname "$0")/lib.sh"
tiny_model tiny 24 40 8
export PYTHONPATH=$root/scripts
# Records of a common prefix of more than 128 bytes, a text longer than a sequence, weights, and several
# completions; every tenth record is noise.
python << 'PY'
import random
random.seed(3)
prefix = "Answer in one short and friendly sentence, and never more than that. " * 3
with open("records.jsonl", "w") as f, open("more.jsonl", "w") as g:
    for i in range(40):
        answer = "it is blue. " * random.randint(1, 9)
        if i % 10 == 9: answer = "".join(random.choice("qxzjkvw0789#%&") for _ in range(60))
        print(json.dumps({"prompt": prefix + "What is %d?" % i, "completion": answer}), file=f)
        print(json.dumps({"text": "some words " * random.randint(1, 60), "weight": random.choice([1, 0.5, -0.25])}), file=g)
    print(json.dumps({"prompt": prefix + "Twice?", "completions": ["yes", {"completion": "no", "weight": 2}]}), file=g)
PY
"$release" --train records.jsonl --out boot --steps 0 --val-every 0 --num-samples 0 > /dev/null 2>&1
cp boot/tokens/tokenizer*.json tiny
run=("$train" --model tiny --from-scratch --train records.jsonl --max-seqlen 400 --micro-batch-tokens 1200
    --batch-tokens 4800 --val-every 4 --val-tokens 2000 --num-samples 0 --save-every 2 --ledger)
python > checks.py << 'PY'
print('''
import ledger, math
def entries(run):
    """{(kind, step): [entry]}, of a validation of all sources"""
    found = {}
    for kind, step, list_ in ledger.blocks(run if run.endswith(".bin") else run + "/ledger.bin"):
        found.setdefault((kind, step), []).extend(list_)
    return found
def check_sums(run):
    """The documents of each step and validation of the log are in the ledger, and add up to its loss"""
    found = entries(run)
    wanted = {**{(0, s["step"]): s for s in steps(run)}, **{(1, v["step"]): v for v in events(run, "val")}}
    assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
    for key, list_ in found.items():
        loss = sum(e[2] for e in list_) / sum(e[3] for e in list_)
        assert math.isclose(loss, wanted[key]["loss"], rel_tol=1e-6), (run, key, loss, wanted[key])
        assert sum(e[5] for e in list_) == wanted[key]["targets"]
    return found
def by_document(list_):
    sums = {}
    for doc, _, loss, weight, _, targets, epoch, source in list_:
        old = sums.get((doc, epoch, source), (0, 0, 0))
        sums[doc, epoch, source] = old[0] + loss, old[1] + weight, old[2] + targets
    return sums
def check_same(a, b, bound):
    """Two ledgers have the same documents, in any order, and losses within a bound"""
    assert a.keys() == b.keys()
    for key in a:
        x, y = by_document(a[key]), by_document(b[key])
        assert x.keys() == y.keys(), key
        for d in x:
            assert x[d][1:] == y[d][1:] and math.isclose(x[d][0], y[d][0], rel_tol=bound), (key, d, x[d], y[d])
''')
PY
ledgers() { { cat checks.py; cat; } > .checks && check_python "$@" < .checks; }
# ---- layouts --------------------------------------------------------------------------------------------
for layout in packed shared padded repad rows; do
    beside $layout "${run[@]}" --layout $layout --out $layout --steps 4
done
wait
for layout in packed shared padded repad rows; do outcome "trains_$layout" 0 '^done' ended $layout; done
ledgers layouts_have_the_same_documents_and_losses << 'PY'
packed = check_sums("packed")
for layout in "shared", "padded", "repad":
    check_same(packed, check_sums(layout), 1e-4)   # weights of later steps differ by rounding
    check_same({(1, 0): packed[1, 0]}, {(1, 0): entries(layout)[1, 0]}, 0)
texts = open("shared.txt").read()
computed, tokens = (sum(s[key] for s in steps("shared")) for key in ("computed_tokens", "real_tokens"))
assert 0 < computed < tokens and "%d tokens, %d of them computed, " % (tokens, computed) in texts, texts
rows = check_sums("rows")                       # documents that end in another micro-batch are in two parts
assert {e[0] for e in rows[0, 1]} == {e[0] for e in packed[0, 1]}
assert {e[6] for key in packed for e in packed[key]} >= {0, 1}, "more than one epoch"
PY
# ---- weights, several documents in a record, split documents, a mixture, adapters ------------------------
mix=("${run[@]}" --train records.jsonl:0.5,more.jsonl:0.5)
expect mixture 0 '^step +4/4 .* \| tokens-1-records.jsonl [0-9.]+ \| tokens-2-more.jsonl [0-9.]+ \| lr' \
    "${mix[@]}" --out mix --steps 4 --max-seqlen 200 --layout shared
outcome adapters 0 '^done' "${run[@]}" --model mix/final --no-from-scratch --lora 4 --out adapters --steps 2
ledgers weights_split_documents_and_adapters << 'PY'
found = check_sums("mix")
check_sums("adapters")
assert {e[7] for e in found[0, 1]} == {0, 1}
assert any(e[1] > 0 for e in found[0, 1]), "a split document"
assert any(e[3] != e[5] for e in found[0, 1] if e[7]) and all(e[3] == e[5] for e in found[0, 1] if not e[7])
for s in steps("mix"):
    for i, source in enumerate(s["sources"]):
        mine = [e for e in found[0, s["step"]] if e[7] == i]
        assert math.isclose(source["loss"], sum(e[2] for e in mine) / sum(e[3] for e in mine), rel_tol=1e-6)
PY
has only_a_mixture_tells_sources '"sources"' mix/log.jsonl
lacks one_source_has_no_line_of_its_own 'tokens-1' packed.txt
ledgers units_in_the_log << 'PY'
for val in events("packed", "val"):
    assert val["bits_per_byte"] > 0.1
mix = steps("mix")[-1]
tokens = sum(s["tokens"] for s in mix["sources"])
parameters = events("mix", "start")[0]["parameters"]
assert math.isclose(mix["chinchilla"], tokens / 20 / parameters, rel_tol=1e-6)
# every target of these chats is a byte or EOS, whose text has no byte
v = events("packed", "val")[0]
docs = len({e[0] for e in entries("packed")[1, 0]})
assert math.isclose(v["bits_per_byte"], v["loss"] * v["targets"] / math.log(2) / (v["targets"] - docs), rel_tol=1e-5), v
PY
# ---- resuming ------------------------------------------------------------------------------------------------
cp -r packed resumed && rm -r resumed/step-00000004 resumed/final
printf 'UNPADLGR' >> resumed/ledger.bin          # the beginning of a block that a kill has left
expect resume 0 'kept the whole blocks up to step 2' "$train" --resume --out resumed
same resumed_ledger_has_the_same_bytes {packed,resumed}/ledger.bin
cp -r packed damaged && rm -r damaged/step-00000004 damaged/final && shards flip damaged/ledger.bin 200
expect a_flipped_bit_is_refused 3 'expected whole blocks, found another after step 1' "$root/scripts/ledger.py" damaged
outcome resume_of_a_damaged_ledger 0 'up to step 2, 84 of' "$train" --resume --out damaged
outcome again_from_the_start 0 '^done' "${run[@]}" --out resumed --overwrite --steps 4
same overwritten_ledger_has_the_same_bytes {packed,resumed}/ledger.bin
cp -r packed early && rm -r early/step-* early/final && head -n 2 packed/log.jsonl > early/log.jsonl
expect a_start_without_a_checkpoint_begins_anew 0 '^step +4/4 ' "${run[@]}" --resume --out early --steps 4
same and_so_does_its_ledger {packed,early}/ledger.bin
outcome another_run_without_one 0 '^done' "${run[@]/#--ledger/--no-deterministic}" --out damaged --overwrite --steps 1
check leaves_no_ledger_of_the_old_run test ! -e damaged/ledger.bin
# ---- ranks -----------------------------------------------------------------------------------------------------
if with_ranks ranks "$release"; then
    exact=("$release" "${mix[@]:1}" --deterministic --max-seqlen 200 --layout shared --batch-tokens 3600)
    for n in 1 2 3; do ranks $n "${exact[@]}" --out on$n --steps 4; done
    for n in 2 3; do same "the_same_bytes_on_${n}_ranks" {on1,on$n}/ledger.bin; done
fi
# ---- --eval ------------------------------------------------------------------------------------------------------
eval=("$train" --model packed/final --eval --val records.jsonl --max-seqlen 400)
expect eval 0 '^all +40 ' "${eval[@]}" --ledger=eval.bin
ledgers eval_has_every_document << 'PY'
(list_,) = entries("eval.bin").values()
total = re.search(r"^all +40 +(\d+) +([0-9.]+)", open("out.txt").read(), re.M)
assert len({e[0] for e in list_}) == 40 and sum(e[5] for e in list_) == int(total[1])
assert abs(sum(e[2] for e in list_) / int(total[1]) - float(total[2])) < 1e-4
PY
expect eval_needs_a_file 2 'ledger: expected a file' "${eval[@]}" --ledger
expect a_run_takes_no_file 2 'a run writes ledger.bin into --out' "${run[@]}" --ledger=x.bin --out no
# ---- scripts/ledger.py ----------------------------------------------------------------------------------------------
outcome learns 0 '^done' "${run[@]}" --out learnt --epochs 12 --lr 1e-2
expect the_odd_ones_are_found 0 '^  \+.*records.jsonl:(10|20|30|40)  [qxzjkvw0789#%&]' "$root/scripts/ledger.py" learnt --top 3
has by_length '^ +256  [0-9]+ documents' out.txt
has a_page '<h2>lowest</h2>' learnt/ledger.html
expect drop 0 'wrote weights.jsonl: 40 records, 4 with weight 0' "$root/scripts/ledger.py" learnt --drop 0.1 --out weights.jsonl
ledgers the_odd_ones_are_dropped << 'PY'
before, after = ([json.loads(l) for l in open(name)] for name in ("records.jsonl", "weights.jsonl"))
assert [{k: v for k, v in r.items() if k != "weight"} for r in after] == before
dropped = [i for i, r in enumerate(after) if "weight" in r]
assert sum(i % 10 == 9 for i in dropped) >= 3, dropped
PY
outcome trains_without_them 0 '[34] documents without a target' "${run[@]}" --train weights.jsonl --out rest --steps 1
expect no_ledger 3 'cannot read' "$root/scripts/ledger.py" tiny
expect a_share_above_1 2 'a share from 0 to 1, found 7' "$root/scripts/ledger.py" learnt --drop 7
printf 'UNPADLGR\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\377\377\377\377\0\0\0\0' > beyond.bin && rm packed/log.jsonl
expect a_block_that_ends_beyond_its_file 3 'expected whole blocks' "$root/scripts/ledger.py" beyond.bin
outcome without_a_log 0 '^wrote .*: 39 documents of 4 steps' "$root/scripts/ledger.py" packed
expect eval_ledger_too 0 '^wrote .*: 40 documents' "$root/scripts/ledger.py" eval.bin --out eval.html
finish
