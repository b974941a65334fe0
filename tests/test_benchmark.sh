#!/usr/bin/env bash
# --bench: log-likelihoods and scores are those of lm-evaluation-harness (dev/reference/make_bench_golden.py) in any packing
# and on any number of ranks, after training steps too; damaged questions are named.
. "$(dirname "$0")/lib.sh"
check made python3 "$root/tests/bench_golden.py" .
run=("$train")
files=plain.jsonl,joined.jsonl,contexts.jsonl
# score OUT MODEL MAX_SEQLEN ARGUMENTS...: what --eval prints
score() {
    # apart: mpirun may put a warning into the middle of a line
    timeout "$limit_s" "${run[@]}" --model "$2" --eval --bench $files --max-seqlen "$3" --log-every 1 "${@:4}" \
        > out.txt 2> "warning.$1" < /dev/null || bad "$1" "$(exit_code $?)"
    grep -a ' | ' out.txt > "$1"
}
# ---- the golden ----------------------------------------------------------------------------------------
for model in model model_bos; do
    for most in 512 24; do score $model.$most.txt $model $most; done
done
check_python equal_to_lm_evaluation_harness "$root" <<'PY'
import math
golden, compared = json.load(open(sys.argv[1] + "/tests/golden/bench.json")), 0
def same(a, b, digits): assert abs(float(a) - b) <= 0.51 * 10**-digits, (a, b)
for key in list(golden)[1:]:
    model, most, name = key.split()
    want, lines = golden[key], open("%s.%s.txt" % (model, most)).read().split("\n")
    found = [l for l in lines if l.startswith(name + ".jsonl:")]
    assert len(found) == len(want["log_likelihoods"]), key
    for line, sums in zip(found, want["log_likelihoods"]):
        numbers = re.findall(r"\| (-[0-9.]+), a byte", line)
        assert len(numbers) == len(sums), line
        for number, expected in zip(numbers, sums):
            assert abs(float(number) - expected) <= 1e-6 + 1e-6 * abs(expected), (key, line, expected)
            compared += 1
    total = next(l for l in lines if l.startswith("bench | " + name))
    acc, error, acc_norm, error_norm = re.search(r"acc (\S+) \+- (\S+) \| acc_norm (\S+) \+- (\S+) \|", total).groups()
    same(acc, want["acc"], 4), same(error, want["acc_stderr"], 4)
    if name != "contexts":  # there it divides by the length of the contexts
        same(acc_norm, want["acc_norm"], 4), same(error_norm, want["acc_norm_stderr"], 4)
        assert (want["acc"] != want["acc_norm"]) == (name == "plain")
    questions = [json.loads(line) for line in open(name + ".jsonl")]
    nats = -sum(sums[q["answer"]] for sums, q in zip(want["log_likelihoods"], questions))
    size = sum(len(q["choices"][q["answer"]].encode()) for q in questions)
    same(re.search(r"(\S+) bits/byte", total)[1], nats / size / math.log(2), 4)
print("%d log-likelihoods" % compared)
assert compared == 4 * 115
PY
has contexts_are_cut 'context of 22 of 115 choices is cut from the left: --max-seqlen is 24' warning.model.24.txt
# ---- packing and ranks -----------------------------------------------------------------------------------
score small.txt model 24 --micro-batch-tokens 24
same in_any_packing model.24.txt small.txt
if with_ranks on_three_ranks "$release"; then
    for n in 3 1; do
        run=("${mpi[@]}" -n $n "$release")
        score on$n.txt model 24 --micro-batch-tokens 64
    done
    same on_three_ranks on1.txt on3.txt
fi
# ---- in a run ----------------------------------------------------------------------------------------------
uneven_texts text 5
train_on=("$train" --model model --bench 'pl*.jsonl' --max-seqlen 128 --lr 1e-2 --warmup-steps 0 --num-samples 0
          --val-every 2 --train)
check in_a_run "${train_on[@]}" text --out run --steps 3 --save-every 2
grep -a '^bench' out.txt > run.txt
cp -r run resumed && rm -r resumed/final resumed/step-00000003 2> /dev/null
check resumed "${train_on[@]}" text --out resumed --steps 3 --resume
outcome eval_of_the_run 0 '^bench . plain' "$train" --model run/final --eval --bench plain.jsonl --max-seqlen 128
grep -a '^bench |' out.txt > eval.txt
check adapters "${train_on[@]}" text --out lora --steps 2 --lora 8 --lr 1e-1
grep -a '^bench after step 2' out.txt | sed 's/ after step 2//' > lora.txt
outcome eval_of_adapters 0 '^bench . plain' "$train" --adapter lora/final --eval --bench 'pl*.jsonl' --max-seqlen 128
grep -a '^bench |' out.txt > adapters.txt
same adapters_score_as_in_their_run lora.txt adapters.txt
check no_validation "${train_on[@]}" text --out never --steps 1 --val-every 0
check_python the_log_has_the_scores <<'PY'
def scores(run): return events(run, "bench")
found = scores("run")
assert [r["step"] for r in found] == [0, 2, 3] == [r["step"] for r in scores("resumed")]
assert [r["step"] for r in scores("never")] == [0, 1]
assert found == scores("resumed") and found[0]["bits_per_byte"] != found[2]["bits_per_byte"]
last = open("run.txt").read().strip().split("\n")[-1]
assert last.replace(" after step 3", "") == open("eval.txt").read().strip(), last
r = found[-1]
assert last == "bench after step 3 | plain.jsonl | acc %.4f +- %.4f | acc_norm %.4f +- %.4f | %d questions | %.4f bits/byte" % (
    r["acc"], r["acc_stderr"], r["acc_norm"], r["acc_norm_stderr"], r["questions"], r["bits_per_byte"]), last
assert r["questions"] == 33 and r["file"] == "plain.jsonl", r
PY
# ---- what is refused -----------------------------------------------------------------------------------------
# NAME | PATTERN | the second line of a file
while IFS='|' read -r name pattern line; do
    printf '\xef\xbb\xbf{"context": "a", "choices": ["b", "c"], "answer": 1}\n%s\n' "$line" > bad.jsonl
    expect "$name" 3 "error: bad.jsonl:2: $pattern" "$train" --model model --eval --bench bad.jsonl --max-seqlen 64
done << JSONL
damaged|expected JSON|{"context": "a", "choices": ["b",
no_object|choices: expected an array of two or more, found 0|[1]
one_choice|choices: expected an array of two or more, found 1|{"context": "a", "choices": ["b"], "answer": 0}
an_empty_choice|expected .*a choice of 1 to 64 tokens; found 1 and 0|{"context": "a", "choices": ["b", ""], "answer": 0}
a_long_choice|expected .*a choice of 1 to 64 tokens; found 1 and [0-9]{2}|{"context": "a", "choices": ["$(printf 'z%.0s' {1..64})", "b"], "answer": 0}
a_number|choice 1: expected strings|{"context": "a", "choices": ["b", 2], "answer": 0}
no_context|choice 0: expected strings|{"choices": ["b", "c"], "answer": 0}
an_answer_beyond|answer: expected an integer from 0 to 1, found 2|{"context": "a", "choices": ["b", "c"], "answer": 2}
no_answer|answer: required|{"context": "a", "choices": ["b", "c"]}
JSONL
(cat plain.jsonl && head -c 99 /dev/zero) > zeros.jsonl
expect zeros 3 'zeros.jsonl: expected text, found a NUL byte' "$train" --model model --eval --bench zeros.jsonl --max-seqlen 128
: > empty.jsonl
expect no_questions 3 'empty.jsonl: expected questions, found none' "$train" --model model --eval --bench empty.jsonl
expect no_file 3 'none.jsonl: expected' "$train" --model model --eval --bench none.jsonl
has what_makes_one '^hint: data/prepare.py --bench NAME .*"answer": 0}$' out.txt
expect no_tokenizer 3 'tokenizer.json' "$train" --model "$root/tests/golden/gqa3_tied" --eval --bench plain.jsonl
cp -r model small && sed -i 's/"vocab_size": 344/"vocab_size": 300/' small/config.json
expect other_vocabulary 9 'expected at most 300 ids' "$train" --model small --from-scratch --eval --bench plain.jsonl
for f in one two; do head -n 1 plain.jsonl > $f.jsonl; done
outcome files_of_one_question 0 'two.jsonl .* 1 questions' "$train" --model model --eval --bench one.jsonl,two.jsonl --max-seqlen 64
# without BOS, EOS begins what has no context
sed -i 's/"bos_token":"<|endoftext|>"/"bos_token":null/' model/tokenizer_config.json
printf '{"context": "", "choices": ["b", "b"], "answer": 0}\n' > tie.jsonl
outcome of_equal_choices_the_first 0 'tie.jsonl . acc 1.0000' "$train" --model model --eval --bench tie.jsonl --max-seqlen 64
expect generate_and_bench 2 '--generate and --bench' "$train" --model model --generate --bench plain.jsonl
finish
