#!/usr/bin/env bash
# Samples, validation and the command line, end to end: prompts of any lengths in buffers of any size,
# a validation loss equal to transformers' on exactly the documents reported, hints that name existing
# options. Runs the sanitizer build; set TRAIN to test another one.
. "$(dirname "$0")/lib.sh"
scratch user
train=${TRAIN:-$root/build/asan/train_llama}
export OMP_NUM_THREADS=2
golden=$root/tests/golden/mha_untied
cp -r "$golden" model

# ---- shards: random documents of given lengths, or those of a golden model ------------------------------
export PYTHONPATH=$root/tests
cat > make.py <<'PY'
import json, random, shards, struct, sys
def tensors(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    return {k: (v["dtype"], data[8 + n:][slice(*v["data_offsets"])]) for k, v in header.items()}
def golden(path):
    t = tensors(path + "/expected.safetensors")
    ints = lambda name: struct.unpack(f"<{len(t[name][1]) // 4}i", t[name][1])
    return ints("tokens"), ints("cu_seqlens")[1:], struct.unpack("<d", t["loss_fp64"][1])[0]
if __name__ == "__main__":
    out, what = sys.argv[1], sys.argv[2:]
    if what[0] == "golden":
        tokens, ends, _ = golden(what[1])
    else:
        lengths, rng = [int(x) for x in what], random.Random(1)
        ends = [sum(lengths[:i + 1]) for i in range(len(lengths))]
        tokens = [1 + rng.randrange(63) for _ in range(ends[-1])]
    shards.write(out, [tokens[a:b] for a, b in zip([0] + list(ends), ends)])
PY
python3 make.py train $(seq 3 2 60) && python3 make.py uneven 2 40 40 30 1 &&
    python3 make.py golden golden "$golden" && python3 make.py forties 40 40 40 40 40 ||
    bad shards ''
run=("$train" --model model --train train.bin --max-seqlen 64 --micro-batch-tokens 64)
quiet=("${run[@]}" --num-samples 0)

# ---- samples: prompts of any lengths in buffers of any size ----------------------------------------------
cat > texts.py <<'PY'
import re, struct, sys
max_seqlen, count, written = (int(x) for x in sys.argv[1:])
tokens = struct.unpack("<113H", open("uneven.bin", "rb").read()[1024:])
ends = (0,) + struct.unpack("<5Q", open("uneven.idx", "rb").read()[40:80])
found = re.findall(r"--- sample (\d+) after step 0( \(ended\))?\n(.*)\n", open("texts.txt").read())
assert [int(f[0]) for f in found] == list(range(1, count + 1)), found
for i, (_, ended, line) in enumerate(found):
    ids = [int(x) for x in re.findall(r"<(\d+)>", line)]
    doc = tokens[ends[i % 5]:ends[i % 5 + 1]]
    prompt = min(16, len(doc), max(1, max_seqlen // 2))
    assert tuple(ids[:prompt]) == doc[:prompt], (i, ids)
    full = min(max_seqlen, prompt + written)
    assert prompt < len(ids) <= full and ids[-1] == 0 if ended else len(ids) == full, (i, ids)
PY
samples() {     # samples MAX_SEQLEN MICRO_BATCH_TOKENS COUNT TOKENS
    check "samples_$1_$2_$3_$4" "${run[@]}" --val uneven.bin --steps 0 --max-seqlen "$1" \
        --micro-batch-tokens "$2" --num-samples "$3" --sample-tokens "$4"
    cp out.txt texts.txt
    check "samples_$1_$2_$3_$4_are_complete" python3 texts.py "$1" "$3" "$4"
}
samples 20 64 3 16
samples 12 64 3 128
samples 64 64 7 5
samples 8 8 5 2
samples 2 2 3 128
samples 1 1 2 4
samples 64 200 12 128

# ---- validation: exactly the documents that the start line reports -------------------------------------
# val OUT ARGUMENTS...: one training step; the validations are in its log
val() {
    local out=$1
    shift
    within "${quiet[@]}" --out "$out" --steps 1 "$@" || bad "$out" "$(exit_code $?)"
}
cat > measured.py <<'PY'
import json, sys
from make import golden
def validations(run):
    return [l for l in map(json.loads, open(run + "/log.jsonl")) if l.get("event") == "val"]
def set_of(run):
    v = validations(run)[0]
    assert v["step"] == 0, v
    return v["docs"], v["real_tokens"], v["targets"]
PY
val v64 --val golden.bin --val-tokens 100000
grep -q '^val .* 7 documents, 131 tokens' out.txt && grep -q '^ *validation takes all of them$' out.txt &&
    ok start_line_reports_all || bad start_line_reports_all ''
val v131 --val golden.bin --val-tokens 131 --micro-batch-tokens 131
val v4096 --val golden.bin --micro-batch-tokens 4096 --layout padded --batch-tokens 8192
check_python validation_loss_equals_transformers "$golden" <<'PY'
import sys
sys.path.insert(0, ".")
from measured import *
for run in "v64", "v131", "v4096":
    v, expected = validations(run)[0], golden(sys.argv[1])[2]
    assert (v["docs"], v["real_tokens"], v["targets"]) == (7, 131, 124), (run, v)
    assert abs(v["loss"] - expected) <= 1e-6 * expected, (run, v, expected)
PY
val few --val golden.bin --val-tokens 100
has start_line_reports_how_many '^ *validation takes [3-6] documents, [0-9]* tokens of them$' out.txt
val one --val golden.bin --val-tokens 1
val split --val golden.bin --val-tokens 100000 --max-seqlen 32
val drop --val golden.bin --val-tokens 100000 --max-seqlen 32 --long-docs drop
val cut --val golden.bin --val-tokens 100000 --max-seqlen 32 --long-docs truncate
val forties --val forties.bin --val-tokens 100000
check_python validation_set_is_as_reported <<'PY'
import sys
sys.path.insert(0, ".")
from measured import *
docs, tokens, targets = set_of("few")
assert 3 <= docs < 7 and tokens <= 100 and targets == tokens - docs, (docs, tokens, targets)
assert set_of("one")[0] == 1
assert set_of("split") == (7, 131, 124)            # segments keep their next token as a target
assert set_of("drop") == (5, 34, 29)               # each once, none from a second epoch
assert set_of("cut") == (7, 98, 91)
assert set_of("forties") == (5, 200, 195)          # five micro-batches of 64, not four
PY

# ---- when: before, during and after training; never; and without training -----------------------------
check val_every_2 "${quiet[@]}" --val golden.bin --out every --steps 5 --val-every 2 --save-every 2 --keep 0
check_python validates_at_0_2_4_and_the_end <<'PY'
import sys
sys.path.insert(0, ".")
from measured import *
assert [v["step"] for v in validations("every")] == [0, 2, 4, 5]
PY
rm -r every/final every/step-00000004 every/step-00000005
check val_resumed "${quiet[@]}" --val golden.bin --out every --steps 5 --val-every 2 --resume
check_python resumed_run_does_not_repeat_validation <<'PY'
import sys
sys.path.insert(0, ".")
from measured import *
assert [v["step"] for v in validations("every")] == [0, 2, 4, 5]
PY
outcome val_never 0 '^ *no validation$' "${quiet[@]}" --val golden.bin --out never --steps 2 --val-every 0
lacks val_every_0_never_validates '"event": "val"|^val after' never/log.jsonl out.txt
outcome steps_0_validates 0 'val after step 0 . loss 6\.9080 . 7 docs . 124 targets' \
    "${run[@]}" --val golden.bin --out evaluated --steps 0 --num-samples 1
has steps_0_prints_samples '^--- sample 1' out.txt
check steps_0_writes_nothing test ! -e evaluated
cp -r v64 aside
outcome steps_0_in_the_directory_of_a_run 0 'nothing was trained, no checkpoint' \
    "${quiet[@]}" --val golden.bin --out v64 --steps 0
check steps_0_does_not_change_the_run diff -r v64 aside

# ---- divergence and loss spikes ------------------------------------------------------------------------
# beyond fp32 in one step
wild=("${quiet[@]}" --from-scratch --lr 1e30 --grad-clip 0 --warmup-steps 0 --val golden.bin)
expect five_skips_end_the_run 7 'diverged: 5 steps in a row' "${wild[@]}" --out skips --steps 30 --val-every 4
check_python five_skips_are_logged <<'PY'
import json
lines = [json.loads(l) for l in open("skips/log.jsonl")]
skipped = [l["skipped"] for l in lines if "event" not in l]
assert skipped[-5:] == [True] * 5 and not any(skipped[:-5]), skipped
assert all(l["spike"] for l in lines if "event" not in l and l["loss"] is None)
PY
if grep -q -e '-nan' out.txt; then bad nan_has_no_sign ''; else ok nan_has_no_sign; fi
check jump "${quiet[@]}" --from-scratch --out jump --steps 30 --val-every 0 --schedule constant \
    --warmup-steps 29 --lr 3 --micro-batch-tokens 256
cp out.txt jump.txt
check_python spikes_are_marked <<'PY'
import json
steps = [l for l in map(json.loads, open("jump/log.jsonl")) if "event" not in l]
lines = [l for l in open("jump.txt") if l.startswith("step ")]
marked = [s["step"] for s in steps if s["spike"]]
mean, distance, n, expected = steps[0]["loss"], 0, 0, []    # the rule of loss_is_spike
for s in steps:
    most = mean + max(1, 3 * distance)
    if n >= 5 and s["loss"] > most:
        expected.append(s["step"])
    n = min(n + 1, 20)
    loss = min(s["loss"], most) if s["step"] in expected else s["loss"]
    distance += (abs(loss - mean) - distance) / n
    mean += (loss - mean) / n
assert marked == expected and 1 <= len(marked) < 15, (marked, expected)
assert [s["step"] for s, l in zip(steps, lines) if l.endswith("| SPIKE\n")] == marked, marked
PY

# ---- weights with other names or shapes ------------------------------------------------------------------
cat > rename.py <<'PY'
import json, struct, sys
source, out, before, after = sys.argv[1:]
data = open(source, "rb").read()
n = struct.unpack("<Q", data[:8])[0]
header = {after + k[len(before):] if k.startswith(before) else k: v
          for k, v in json.loads(data[8:8 + n]).items()}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
open(out, "wb").write(struct.pack("<Q", len(text)) + text + data[8 + n:])
PY
for prefix in '' 'base_model.model.model.'; do
    rm -rf other && mkdir other && cp model/config.json other
    python3 rename.py model/model.safetensors other/model.safetensors model. "$prefix" || bad rename ''
    for extra in '' --dry-run; do
        expect "prefix_$prefix$extra" 3 \
            "other: tensors have another prefix: expected model.embed_tokens.weight, found ${prefix}embed" \
            "${quiet[@]/#model/other}" --out n --steps 1 $extra
    done
done
cp model/model.safetensors other && sed 's/"intermediate_size": 40/"intermediate_size": 48/' \
    model/config.json > other/config.json
expect dry_run_checks_shapes 3 'wrong shape: model.layers.0.mlp.gate_proj' "${quiet[@]/#model/other}" --dry-run
expect dry_run_checks_weights 3 'error: empty' "${quiet[@]/#model/empty}" --dry-run
expect dry_run_of_good_weights 0 'total' "${quiet[@]}" --dry-run
check nothing_is_written_for_bad_weights test ! -e n

# ---- the command line ------------------------------------------------------------------------------------
hint() {        # hint NAME PATTERN: the hint for another trainer's option names one of ours
    local word
    expect "$1" 2 "^hint: .*$2" "$train" "--$1" 1
    for word in $(grep '^hint: ' out.txt | grep -oE -e '--[a-z][a-z-]*'); do
        grep -qE -e "^  $word( |$)" help.txt || bad "hint_for_$1" "$word does not exist"
    done
}
"$train" --help-all > help.txt
hint epochs '--steps counts'
hint lora 'no LoRA'
hint batch-size '--batch-tokens .*--micro-batch-tokens'
hint learning-rate '--lr'
hint learning_rate '--lr'
hint wandb 'scripts/follow_run.py'
hint tensorboard 'scripts/follow_run.py'
hint gradient-checkpointing '--recompute full'
hint export 'scripts/export_gguf.py'
"$train" --learning-rate 1 2>&1 | cat - help.txt | grep -c -- '--learning-rate' | grep -qx 1 &&
    ok hints_are_not_in_the_help || bad hints_are_not_in_the_help ''
expect steps_with_an_exponent 0 'step +1/20 ' "${quiet[@]}" --out exponent --steps 2e1 --val-every 0
grep -q '| 1 doc |' out.txt && ! grep -q '| 1 docs' out.txt && ok one_doc || bad one_doc ''
outcome low_fill_is_reported 0 '^fill +[4-7][0-9] % in the next 8 steps.*--micro-batch-tokens' \
    "${quiet[@]}" --dry-run
outcome steps_per_epoch_are_reported 0 '^plan .*, about [12][0-9] steps an epoch$' "${quiet[@]}" --dry-run
outcome good_fill 0 'total' "${quiet[@]}" --dry-run --micro-batch-tokens 512
lacks good_fill_is_not_reported '^fill' out.txt
check log_has_sensible_digits python3 -c '
import re
for number in re.findall(r": -?([0-9.]+)(?:e-?[0-9]+)?[,}]", open("every/log.jsonl").read()):
    digits = number.replace(".", "").lstrip("0")
    assert "." not in number or len(digits) <= 9, number'

# ---- the plot --------------------------------------------------------------------------------------------
plot() {
    if ! /usr/bin/python3 -c 'import matplotlib' 2> /dev/null; then
        skip plot 'matplotlib is not installed' && return
    fi
    outcome plot 0 '^wrote every/plot.png: every/log.jsonl: 5 steps, loss [0-9]\.[0-9]{3} to [0-9]\.[0-9]{3}, validation 6\.908 to [0-9.]{5}$' \
        /usr/bin/python3 "$root/scripts/plot_run.py" every
    check plot_is_written test -s every/plot.png
}
plot
check_python smoothing_has_no_bias "$root" <<'PY'
import sys
sys.path.insert(0, sys.argv[1] + "/scripts")
from plot_run import smooth
for n in 1, 2, 7, 100, 1000:
    ramp = [10.0 - i / n for i in range(n)]
    assert all(abs(a - b) < 1e-9 for a, b in zip(ramp, smooth(ramp))), n
noisy = [(-1) ** i for i in range(400)]
assert max(abs(x) for x in smooth(noisy)[100:300]) < 0.2
assert smooth([1.0, None, 1.0]) == [1.0, 1.0, 1.0]
PY
finish
