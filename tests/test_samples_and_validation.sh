#!/usr/bin/env bash
# Samples, validation and the command line, end to end: prompts of any lengths in buffers of any size,
# a validation loss equal to transformers' on exactly the documents reported, hints that name existing
# options.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=2
golden=$root/tests/golden/mha_untied
cp -r "$golden" model
# ---- shards: random documents of given lengths, or those of a golden model ------------------------------
check_python shards "$golden" <<'PY'
import random
rng = random.Random(1)
for name, lengths in (("train", range(3, 61, 2)), ("uneven", (2, 40, 40, 30, 1))):
    shards.write(name, [[1 + rng.randrange(63) for _ in range(n)] for n in lengths])
shards.write("golden", shards.golden(sys.argv[1])[0])
PY
run=("$train" --model model --train train.bin --max-seqlen 64 --micro-batch-tokens 64)
quiet=("${run[@]}" --num-samples 0)
# ---- samples: prompts of any lengths in buffers of any size are in test_samples.c --------------------------
# a round begins again from the prompts: the same weights write the same texts
check two_rounds "${run[@]}" --val uneven.bin --out rounds --steps 2 --lr 0 --sample-every 1 --val-every 0 \
    --num-samples 7 --sample-tokens 5 --temperature 0
grep -a -A 1 '^--- sample .* after step 1' out.txt | sed 's/step 1/step 2/' > first.txt
grep -a -A 1 '^--- sample .* after step 2' out.txt > second.txt
check_python samples_begin_with_the_documents <<'PY'
tokens, ends = struct.unpack("<113H", shards.load("uneven.bin")[1024:]), (0,) + shards.ends_of("uneven")
texts = [[int(x) for x in re.findall(r"<(\d+)>", line)] for line in open("second.txt") if line[0] == "<"]
for i, ids in enumerate(texts):
    doc = tokens[ends[i % 5]:ends[i % 5 + 1]][:16]
    assert tuple(ids[:len(doc)]) == doc and len(doc) < len(ids) <= len(doc) + 5, (i, ids)
assert len(texts) == 7
PY
same every_round_begins_with_the_prompts first.txt second.txt
# ---- validation: exactly the documents that the start line reports -------------------------------------
# val OUT ARGUMENTS...: one training step; the validations are in its log
val() { within "${quiet[@]}" --out "$1" --steps 1 "${@:2}" || bad "$1" "$(exit_code $?)"; }
all=(--val golden.bin --val-tokens 100000)
val v64 "${all[@]}"
has start_line_reports_all '^val .* 7 documents, 131 tokens' out.txt
has start_line_says_all '^ *validation takes ([0-9]+) of \1 documents, ([0-9]+) of \2 tokens$' out.txt
val v131 --train golden.bin --val golden.bin --val-tokens 131 --micro-batch-tokens 131
val v4096 --val golden.bin --micro-batch-tokens 4096 --layout rows --batch-tokens 8192
for seed in 2 1; do val few$seed --val golden.bin --val-tokens 100 --seed $seed; done
has start_line_reports_how_many '^ *validation takes [3-6] of [0-9]+ documents, [0-9]+ of [0-9]+ tokens$' out.txt
# when: before, during and after training; a resumed run does not repeat them
check val_every_2 "${quiet[@]}" --val golden.bin --out every --steps 5 --val-every 2 --save-every 2 --keep 0
cp -r every resumed && rm -r resumed/final resumed/step-0000000[45]
check val_resumed "${quiet[@]}" --val golden.bin --out resumed --steps 5 --val-every 2 --resume
check_python validation_is_as_reported "$golden" <<'PY'
def set_of(run):
    v = events(run, "val")[0]
    assert v["step"] == 0, v
    return v["docs"], v["real_tokens"], v["targets"]
expected = shards.golden(sys.argv[1])[1]           # transformers' loss
for run in "v64", "v131", "v4096":
    assert set_of(run) == (7, 131, 124), run
    assert abs(events(run, "val")[0]["loss"] - expected) <= 1e-6 * expected, (run, expected)
assert steps("v131")[0]["real_tokens"] == 131      # one micro-batch may be full
docs, tokens, targets = set_of("few1")
assert set_of("few2") == (docs, tokens, targets)   # for any seed
assert 3 <= docs < 7 and tokens <= 100 and targets == tokens - docs, (docs, tokens, targets)
for run in "every", "resumed":
    assert [v["step"] for v in events(run, "val")] == [0, 2, 4, 5], run
PY
outcome val_never 0 '^ *no validation$' "${quiet[@]}" --val golden.bin --out never --steps 2 --val-every 0
lacks val_every_0_never_validates '"event": "val"|^val after' never/log.jsonl out.txt
cp -r v64 aside
outcome steps_0_only_validates 0 'val after step 0 . loss 6\.9080 . 7 docs . 124 targets' \
    "${run[@]}" --val golden.bin --out v64 --steps 0 --num-samples 1
has steps_0_prints_samples '^--- sample 1' out.txt
has steps_0_says_so 'nothing was trained, no checkpoint' out.txt
check steps_0_does_not_change_the_run diff -r v64 aside
# ---- divergence and loss spikes ------------------------------------------------------------------------
# beyond fp32 in one step
wild=("${quiet[@]}" --from-scratch --lr 1e30 --grad-clip 0 --warmup-steps 0 --val golden.bin)
expect five_skips_end_the_run 7 'diverged: 5 steps in a row' "${wild[@]}" --out skips --steps 30 --val-every 4
check_python five_skips_are_logged <<'PY'
skipped = [l["skipped"] for l in steps("skips")]
assert skipped[-5:] == [True] * 5 and not any(skipped[:-5]), skipped
assert all(l["spike"] for l in steps("skips") if l["loss"] is None)
PY
# ---- weights with other names or shapes ------------------------------------------------------------------
# other NAME CODE PATTERN ARGUMENTS...: the model `other`
other() { expect "$1" "$2" "$3" "${quiet[@]/#model/other}" --out n --steps 1 "${@:4}"; }
cp -r model other
for prefix in '' 'base_model.model.model.'; do
    python "$prefix" << 'PY'
put_tensors("other/model.safetensors", {re.sub(r"^model\.", sys.argv[1], name): t
                                        for name, t in tensors("model/model.safetensors").items()})
PY
    other "prefix_$prefix" 3 "other: weights do not fit .* missing: model.embed_tokens.weight, .* unknown: ${prefix}embed"
done
cp model/model.safetensors other
printf '\0\0\300\177' | dd of=other/model.safetensors bs=1 seek=$(($(stat -c %s other/model.safetensors) - 4)) \
    conv=notrunc status=none
other nan_weights 7 'other: expected finite weights'
cp model/model.safetensors other && edit other/config.json 'j["intermediate_size"] = 48'
other dry_run_checks_shapes 3 'wrong shape: model.layers.0.mlp.gate_proj' --dry-run
other dry_run_checks_weights 3 'error: empty' --model empty --dry-run
check nothing_is_written_for_bad_weights test ! -e n
# ---- the command line ------------------------------------------------------------------------------------
# other trainers' options have a hint, which names options that exist
"$train" --help-all > help.txt
for option in num_train_epochs max_steps num-iterations learning_rate lr_scheduler_type warmup_ratio output_dir base_model \
    model_name_or_path tokenizer config max_seq_length sequence_len max_grad_norm eval_steps val_set_size batch-size micro_batch_size \
    per_device_train_batch_size gradient_accumulation_steps device-batch-size dataset_name logging_steps use_peft lora_r \
    lora_target_modules load_in_4bit wandb_project sample_packing flash_attention gradient_checkpointing assistant_only_loss \
    train_on_inputs dtype bf16 max_new_tokens temp optim save_steps save_total_limit resume_from_checkpoint top_k -i; do
    case $option in -*) ;; *) option=--$option ;; esac
    "$release" $option 1 > out.txt 2>&1
    [ $? -eq 2 ] && grep '^hint: ' out.txt | grep -v 'lists all options' > hint.txt || echo "$option"
    for word in $(grep -oE -e '--[a-z][a-z0-9-]*' hint.txt); do
        grep -qE -e "^  $word( |$)" help.txt || echo "$option: $word"
    done
done > unknown.txt
check options_of_other_trainers_have_a_hint test ! -s unknown.txt
outcome low_fill_is_reported 0 '^fill +[4-7][0-9] % in the next 8 steps.*--micro-batch-tokens' \
    "${quiet[@]}" --dry-run
has epochs_are_reported '^epochs  [0-9.]+ in [0-9]+ steps$' out.txt
# ---- the report of a real log ------------------------------------------------------------------------------
outcome report 0 '^wrote every/report.html: every/log.jsonl: 5 steps, loss [0-9]\.[0-9]{3} to [0-9]\.[0-9]{3}, validation 6\.908 to [0-9.]{5}$' \
    python3 "$root/scripts/report.py" every
has the_report_has_the_command '<td>command</td><td>.*train_llama.* --out every' every/report.html
check_python smoothing_has_no_bias "$root" <<'PY'
sys.path.insert(0, sys.argv[1] + "/scripts")
from report import smooth
for n in 1, 2, 7, 100, 1000:
    ramp = [10.0 - i / n for i in range(n)]
    assert all(abs(a - b) < 1e-9 for a, b in zip(ramp, smooth(ramp))), n
assert max(abs(x) for x in smooth([(-1) ** i for i in range(400)])[100:300]) < 0.2
assert smooth([1.0, None, 1.0]) == [1.0, 1.0, 1.0] and smooth([None]) == [None]
PY
finish
