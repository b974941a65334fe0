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
has start_line_says_all '^ *validation takes all of them$' out.txt
val few --val golden.bin --val-tokens 100
has start_line_reports_how_many '^ *validation takes [3-6] documents, [0-9]* tokens of them$' out.txt
# when: before, during and after training
check val_every_2 "${quiet[@]}" --val golden.bin --out every --steps 5 --val-every 2 --save-every 2 --keep 0
check_python validation_is_as_reported "$golden" <<'PY'
v = events("v64", "val")[0]
assert (v["step"], v["docs"], v["real_tokens"], v["targets"]) == (0, 7, 131, 124), v
expected = shards.golden(sys.argv[1])[1]           # transformers' loss
assert abs(v["loss"] - expected) <= 1e-6 * expected, (v, expected)
assert [v["step"] for v in events("every", "val")] == [0, 2, 4, 5]
PY
outcome val_never 0 '^ *no validation$' "${quiet[@]}" --val golden.bin --out never --steps 2 --val-every 0
lacks val_every_0_never_validates '"event": "val"|^val after' never/log.jsonl out.txt
cp -r v64 aside
outcome steps_0_only_validates 0 'val after step 0 . loss 6\.9080 . 7 docs . 124 targets' \
    "${run[@]}" --val golden.bin --out v64 --steps 0 --num-samples 1
has steps_0_prints_samples '^--- sample 1' out.txt
has steps_0_says_so 'nothing was trained, no checkpoint' out.txt
check steps_0_does_not_change_the_run diff -r v64 aside
# ---- weights with other names or shapes ------------------------------------------------------------------
# other NAME CODE PATTERN ARGUMENTS...: the model `other`
other() { expect "$1" "$2" "$3" "${quiet[@]/#model/other}" --out n --steps 1 "${@:4}"; }
cp -r model other
for prefix in '' 'base_model.model.model.'; do
    python "$prefix" << 'PY'
put_tensors("other/model.safetensors", {re.sub(r"^model\.", sys.argv[1], name): t
                                        for name, t in tensors("model/model.safetensors").items()})
PY
    other "prefix_$prefix" 3 "other: tensors have another prefix: expected model.embed_tokens.weight, found ${prefix}embed"
done
cp model/model.safetensors other
printf '\0\0\300\177' | dd of=other/model.safetensors bs=1 seek=$(($(stat -c %s other/model.safetensors) - 4)) \
    conv=notrunc status=none
other nan_weights 7 'other: expected finite weights'
cp model/model.safetensors other && edit other/config.json 'j["intermediate_size"] = 48'
other dry_run_checks_shapes 3 'wrong shape: model.layers.0.mlp.gate_proj' --dry-run
# a window, which is full attention for what is no longer
edit other/config.json 'j.update(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=63)'
other documents_beyond_the_window 3 'sliding_window: expected at least --max-seqlen 64, found 63'
other dry_run_checks_weights 3 'error: empty' --model empty --dry-run
check nothing_is_written_for_bad_weights test ! -e n
# ---- the command line ------------------------------------------------------------------------------------
# other trainers' options have a hint, which names options that exist
"$train" --help-all > help.txt
for option in compile batch save-total-limit sample_packing val_set_size wandb_project muon dpo-beta -v rslora num-epochs num_train_epochs use-peft batch-size learning-rate learning_rate wandb tensorboard gradient-checkpointing export \
    model_name_or_path dataset device config tokenizer max_seq_length ctx-size context-length warmup_ratio \
    lr_scheduler_type optim dropout save_steps eval-steps logging_steps resume_from_checkpoint use_peft load_in_4bit \
    packing dtype bf16 job.config_file training.steps layers quiet log_interval gpus; do
    case $option in -*) ;; *) option=--$option ;; esac
    "$release" $option 1 > out.txt 2>&1
    [ $? -eq 2 ] && grep '^hint: ' out.txt | grep -v 'lists all options' > hint.txt || echo "$option"
    for word in $(grep -oE -e '--[a-z][a-z-]*' hint.txt); do
        grep -qE -e "^  $word( |$)" help.txt || echo "$option: $word"
    done
done > unknown.txt
check options_of_other_trainers_have_a_hint test ! -s unknown.txt
outcome low_fill_is_reported 0 '^fill +[4-7][0-9] % in the next 8 steps.*--micro-batch-tokens' \
    "${quiet[@]}" --dry-run
has steps_per_epoch_are_reported '^epochs  [0-9.]+ in [0-9]+ steps: about [12][0-9] steps an epoch$' out.txt
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
