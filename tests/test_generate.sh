#!/usr/bin/env bash
# --generate: prompts from an argument, a file, a pipe and a terminal; a chat; what contradicts it.
# --eval: transformers' loss on the documents of a golden model. Samples and validation of runs; hints of options.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=2
golden=$root/tests/golden/mha_untied
# A tiny model with random weights, so large that its texts depend on every token before. Ids are
# bytes, but for ChatML's tokens and one merge.
tiny_model tiny 24 40 8
sed -i 's/"initializer_range": 0.05/"initializer_range": 0.5/' tiny/config.json
corpus 9
python << 'PY' || bad tokenizer ''
t = json.load(open("corpus/tokenizer.json"))
for i, name in enumerate(("<|im_start|>", "<|im_end|>")):
    t["added_tokens"].append(dict(t["added_tokens"][0], id=258 + i, content=name))
t["model"]["vocab"].update({a["content"]: a["id"] for a in t["added_tokens"]}, li=260)
t["model"]["merges"] = ["l i"]
json.dump(t, open("tiny/tokenizer.json", "w"))
FOR, REST = "{% for message in messages %}", (
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SYSTEM = ("{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n'"
          " }}{% endif %}")
config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
json.dump(config, open("tiny/tokenizer_config.json", "w"))
json.dump(dict(config, chat_template=FOR + SYSTEM + REST), open("chat.json", "w"))
json.dump(dict(config, chat_template=FOR + REST + " "), open("other.json", "w"))
open("chatml.jinja", "w").write(FOR + REST)
PY
cp -r tiny kind && cp chat.json kind/tokenizer_config.json
cp -r kind plain && cp chatml.jinja plain/chat_template.jinja
cp -r tiny other && cp other.json other/tokenizer_config.json
run() { timeout -k 10 "$limit_s" "$@"; }
of() { run "$train" --model "$1" --from-scratch --generate --sample-tokens 12 "${@:2}"; }
greedy() { of tiny --temperature 0 "$@"; }
# text NAME COMMAND...: it succeeds; its standard output is NAME.txt
text() { "${@:2}" > "$1.txt" 2> err.txt < /dev/null || { cp err.txt out.txt; bad "$1" "exit code $?"; }; }
# writes NAME FILE COMMAND...: and it is that of the file
writes() { text "$1" "${@:3}" && same "$1" "$1.txt" "$2"; }
# ---- where prompts come from ---------------------------------------------------------------------------
text line greedy --prompt 'line 7'
lacks the_prompt_is_not_repeated 'line 7' line.txt
has line_of_speed '^6 prompt tokens in .* then 1?[0-9] tokens in .*tokens/s$' err.txt
greedy < <(printf '\xef\xbb\xbfline 7\r\n') > pipe.txt 2> err.txt
same pipe_is_one_prompt line.txt pipe.txt
# samples of a run begin with --prompt, each with all of it
run "$train" --model tiny --from-scratch --train corpus --allow-other-tokenizer --steps 0 --val-every 0 --num-samples 2 \
    --sample-tokens 12 --temperature 0 --prompt 'line 7' > samples.txt 2> err.txt
sed -n 's/ (ended)$//; /^--- sample/,/^done/p' samples.txt | grep -av '^done' > found.txt
for i in 1 2; do echo "--- sample $i after step 0" && printf 'line 7' && cat line.txt; done > expected.txt
same samples_begin_with_the_prompt found.txt expected.txt
printf '\xef\xbb\xbfline 7\r\nä\n\nof the\n' > prompts.txt
text two greedy --prompt 'ä'
text three greedy --prompt 'of the'
for f in 1:line 2:two 3:three; do echo "--- ${f%:*}" && cat "${f#*:}.txt"; done > expected.txt
writes prompts_of_a_file_are_those_alone expected.txt greedy --prompt @prompts.txt
printf 'line 7\n\0ä\n' > zeros.txt
expect zeros_in_prompts 3 'zeros.txt: expected text, found a NUL byte at 7' greedy --prompt @zeros.txt
expect zeros_in_a_pipe 3 'standard input: .* a NUL byte' eval 'greedy --prompt - < zeros.txt'
# ---- the text ------------------------------------------------------------------------------------------
text half greedy --prompt 'line 7' --sample-tokens 5
has max_new_tokens 'then 4 tokens' err.txt
hot() { of tiny --prompt 'line 7' --temperature 3 --sample-tokens 200 "$@"; }
text hot hot
writes a_seed_repeats_the_text hot.txt hot
text seed2 hot --seed 2
differ another_seed_is_another_text hot.txt seed2.txt
# ---- chat ----------------------------------------------------------------------------------------------
turn=$'<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
# without BOS, as the template is
sed -i 's/"bos_token": "<|bos|>"/"bos_token": "<|im_start|>"/' {kind,plain}/tokenizer_config.json
text plain of plain --temperature 0 --chat --prompt hi
writes chat_is_the_template plain.txt of plain --temperature 0 --prompt "$turn"
expect another_template 3 'error: other/tokenizer_config.json: expected the chat template' of other --chat --prompt a
expect no_template 3 'error: tiny/tokenizer_config.json: .* found none' of tiny --chat --prompt a
# models that have learned to answer "ok" and to end the turn; among bytes its end is several tokens
mkdir bytes && cp tiny/config.json corpus/tokenizer*.json bytes
for _ in $(seq 50); do echo '{"prompt": "hi", "completion": "ok"}'; done > answers.jsonl
for model in plain bytes; do
    run "$train" --model $model --from-scratch --train answers.jsonl --max-seqlen 64 --micro-batch-tokens 128 --out $model-run \
        --steps 60 --lr 1e-2 --warmup-steps 0 --num-samples 0 --val-every 0 > out.txt 2>&1 || bad $model "exit code $?"
    writes an_answer_ends_its_turn_$model <(echo ok) run "$train" --model $model-run/final --generate --temperature 0 \
        --sample-tokens 40 --chat --prompt hi
done
# generation ends at every end token of generation_config.json, too
cp -r plain-run/final ends && echo '{"eos_token_id": [257, 111]}' > ends/generation_config.json
writes an_end_of_generation_config <(echo o) run "$train" --model ends --generate --temperature 0 --sample-tokens 9 \
    --prompt "$turn"
talk() { in_terminal 80 "$1" "$train" --generate --temperature 0 --sample-tokens 12 "${@:2}"; }
two_lines='"> ", b"line 7\n", "line 7\r\n", "!\r\n> ", b"of the\n", "of the\r\n", "!\r\n> ", b"\4"'
ask() { talk "$two_lines" "$@"; }
if with_terminals terminals; then
    writes a_terminal_is_asked_line_by_line <(cat line.txt three.txt) ask --from-scratch --model tiny
    text conversation ask --from-scratch --model plain --chat
    text first of plain --temperature 0 --chat --prompt 'line 7'
    text second of plain --temperature 0 --chat --prompt 'of the'
    check a_conversation_begins_as_a_chat cmp -n "$(stat -c %s first.txt)" first.txt conversation.txt
    differ a_conversation_remembers conversation.txt <(cat first.txt second.txt)
    # an answer that has ended its turn: the end of its line only
    text learned_conversation ask --model plain-run/final --chat
    has a_turn_ends_once '^50 prompt tokens' err.txt
    # Ctrl-C ends an answer, not the conversation, and at the prompt it says how to leave
    # (without an end of text, the answer is as long as it may be)
    cp -r tiny endless && sed -i 's/"eos_token_id": 257/"eos_token_id": null/' endless/config.json
    text interrupted talk '"leave\r\n", "> ", b"go\n", "go\r\n", 40, b"\3", "\r\n> ", b"x\3", "leave\r\n", "> ", b"/exit\n"' \
        --model endless --from-scratch --sample-tokens 30000 --max-seqlen 30000
    has statistics_after_all '^[0-9]+ prompt tokens in .*tokens/s' err.txt
    # lines that are pasted are one message; /reset begins again, with /system too
    pasted='"> ", b"of\nthe\n", "the\r\n", "!\r\n[cut off: --sample-tokens", "> ", '
    for model in plain kind; do text "${model}_lines" of $model --temperature 0 --chat --prompt $'of\nthe'; done
    writes pasted_lines_are_one_message <(cat plain_lines.txt plain_lines.txt kind_lines.txt) talk \
        "$pasted b'/reset\n', $pasted b'/system Be kind\n', $pasted b'\4'" --model plain --from-scratch --chat
    # Ctrl-D during an answer leaves after it
    text ctrl_d talk '"> ", b"go\n", "go\r\n", 9, b"\4"' --model endless --from-scratch --sample-tokens 400
    has after_its_answer '^[0-9]+ prompt tokens' err.txt
    # what no model is told
    script='"> ", b"/help\n", "/system TEXT: start over", "> ", b"/clear now\n", "/clear: no such command. Ctrl-C", "> ", '
    script+='b"/system Be kind\n", "[a new conversation; system: Be kind]\r\n> ", b"/reset\n", "system: Be kind]\r\n> ", '
    script+='b"/etc/x\n", "/etc/x\r\n", "!\r\n[cut off", "> ", b"/quit\n"'
    text path of kind --temperature 0 --chat --prompt /etc/x
    writes a_path_is_a_message path.txt talk "$script" --model plain --from-scratch --chat
    text no_chat talk '"the text; Ctrl-D, /exit: leave", "> ", b"/reset\n", "/reset: no such command", "> ", b"\4"' --model tiny --from-scratch
    lacks nothing_was_measured 'prompt tokens' err.txt
    text full talk '"> ", b"line 7\n", "is full; /reset starts over]\r\n> ", b"two\n", "hint: /reset starts over; ", "> ", b"/reset\n", "> ", b"\4"' \
        --model plain --from-scratch --chat --max-seqlen 36
    text as_long_as_the_model talk '"> ", b"'"$(seq -s ' ' 400)"'\n", "[cut off: --sample-tokens", "> ", b"\4"' --model plain --from-scratch --chat
    text too_long talk '"> ", b"'"$(seq -s ' ' 40)"'\n", "raise --max-seqlen", "> ", b"\4"' --model tiny --from-scratch --max-seqlen 32
fi
# ---- what is refused -----------------------------------------------------------------------------------
expect chat_alone 2 '--chat belongs to --generate' "$train" --chat
expect steps_of_compare 2 'compare: expected a number from 1 to 1000' "$train" --compare 0 --dry-run
expect generate_and_out 2 '--generate and --out: expected at most one' of tiny --out x
expect eval_of_nothing 2 'hint: give --val' "$train" --model "$golden" --eval
expect generate_and_eval 2 'expected at most one' of tiny --eval
expect a_name_has_no_weights 2 'expected a model with weights' "$train" --generate --prompt a
expect no_tokenizer 2 'needs a tokenizer' "$train" --model "$golden" --generate --prompt a
expect no_prompt_file 3 'missing.txt' of tiny --prompt @missing.txt
expect a_directory_of_prompts 3 '^hint: save it as a file' of tiny --prompt @tiny
touch empty && expect empty_file 3 'empty: expected a prompt a line' of tiny --prompt @empty
expect input_is_a_directory 4 '^error: standard input: cannot read' bash -c '"$@" < /' - "$train" --model tiny --from-scratch --generate
text fits greedy --prompt 'line 7' --max-seqlen 7
has the_longest_prompt '^6 prompt tokens .* then 0 tokens' err.txt
expect too_long 2 'raise --max-seqlen' of tiny --prompt 'line 7' --max-seqlen 6
outcome dry_run 0 '^ *workspace ' of tiny --prompt a --dry-run
# ---- --eval --------------------------------------------------------------------------------------------
check_python shards "$golden" << 'PY'
import random
rng = random.Random(1)
for name, lengths in (("train", range(3, 61, 2)), ("uneven", (2, 40, 40, 30, 1))):
    shards.write(name, [[1 + rng.randrange(63) for _ in range(n)] for n in lengths])
documents, loss = shards.golden(sys.argv[1])
shards.write("golden", documents)
open("loss.txt", "w").write(repr(loss))
open("lengths.txt", "w").write(" ".join(str(len(d)) for d in documents))
PY
eval_golden() { run "$train" --model "$golden" --eval --val golden.bin --max-seqlen 96 "$@"; }
table() {       # table NAME DOCUMENTS TARGETS [LOSS]: what --eval printed into NAME.txt
    check_python "$1_is_right" "$1.txt" "${@:2}" << 'PY'
import math
docs, targets = int(sys.argv[2]), int(sys.argv[3])
rows = [l.split() for l in open(sys.argv[1]) if " to " in l]
total = next(l.split() for l in open(sys.argv[1]) if l.startswith("all "))
assert int(total[1]) == docs == sum(int(r[3]) for r in rows), (total, rows)
assert int(total[2]) == targets == sum(int(r[4]) for r in rows), (total, rows)
mean = sum(int(r[4]) * float(r[5]) for r in rows if len(r) > 5) / targets
assert abs(mean - float(total[3])) < 2e-4 and abs(math.exp(mean) / float(total[4]) - 1) < 1e-3, (mean, total)
lengths = [int(n) for n in open("lengths.txt").read().split()]
for first, to, last, count, *_ in rows:     # a document's row is that of its whole length
    first, last = int(first), int(last)
    assert last == 2 * first - 1
    if docs == len(lengths): assert int(count) == sum(first <= n <= last for n in lengths), rows
if len(sys.argv) > 4:
    assert abs(float(total[3]) - float(open(sys.argv[4]).read())) < 1e-4, total
PY
}
text eval eval_golden
table eval 7 124 loss.txt
writes eval_in_any_micro_batches eval.txt eval_golden --micro-batch-tokens 10     # which takes 96
text eval_drops eval_golden --max-seqlen 32 --long-docs drop
table eval_drops 5 29
expect eval_refuses_long_documents 3 'expected at most 32' eval_golden --max-seqlen 32 --long-docs error
expect eval_and_steps 2 '--eval and --steps' eval_golden --steps 3
check eval_writes_nothing test ! -e out
if with_ranks eval_of_three_ranks "$release"; then
    text eval_ranks run "${mpi[@]}" -n 3 "$release" --model "$golden" --eval --val golden.bin --max-seqlen 96 \
        --micro-batch-tokens 96
    table eval_ranks 7 124 loss.txt
fi
# ---- samples and validation of runs: a loss equal to transformers' on exactly the documents reported --------
cp -r "$golden" model
on_golden=("$train" --model model --train train.bin --max-seqlen 64 --micro-batch-tokens 64)
quiet=("${on_golden[@]}" --num-samples 0)
# a round begins again from the prompts: the same weights write the same texts
check two_rounds "${on_golden[@]}" --val uneven.bin --out rounds --steps 2 --lr 0 --sample-every 1 --val-every 0 \
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
expect start_line_says_all 0 '^ *validation takes 7 of 7 documents, 131 of 131 tokens$' \
    "${quiet[@]}" --val golden.bin --val-tokens 100000 --out v64 --steps 1
expect start_line_says_how_many 0 '^ *validation takes [3-6] of 7 documents, [0-9]+ of 131 tokens$' \
    "${quiet[@]}" --val golden.bin --val-tokens 100 --out few --steps 1
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
    "${on_golden[@]}" --val golden.bin --out v64 --steps 0 --num-samples 1
has steps_0_prints_samples '^--- sample 1' out.txt
has steps_0_says_so 'nothing was trained, no checkpoint' out.txt
check steps_0_does_not_change_the_run diff -r v64 aside
# ---- weights with other names or shapes ------------------------------------------------------------------
# other NAME CODE PATTERN ARGUMENTS...: the model `changed`
other() { expect "$1" "$2" "$3" "${quiet[@]/#model/changed}" --out n --steps 1 "${@:4}"; }
cp -r model changed
for prefix in '' 'base_model.model.model.'; do
    python "$prefix" << 'PY'
put_tensors("changed/model.safetensors", {re.sub(r"^model\.", sys.argv[1], name): t
                                        for name, t in tensors("model/model.safetensors").items()})
PY
    other "prefix_$prefix" 3 "changed: weights do not fit .* missing: model.embed_tokens.weight, .* unknown: ${prefix}embed"
done
cp model/model.safetensors changed
printf '\0\0\300\177' | dd of=changed/model.safetensors bs=1 seek=$(($(stat -c %s changed/model.safetensors) - 4)) \
    conv=notrunc status=none
other nan_weights 7 'changed: expected finite weights'
cp model/model.safetensors changed && edit changed/config.json 'j["intermediate_size"] = 48'
other dry_run_checks_shapes 3 'wrong shape: model.layers.0.mlp.gate_proj' --dry-run
# a window, which is full attention for what is no longer
edit changed/config.json 'j.update(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=63)'
other documents_beyond_the_window 3 'sliding_window: expected at least --max-seqlen 64, found 63'
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
    [ $option = -i ] || option=--$option
    "$release" $option 1 > out.txt 2>&1
    [ $? -eq 2 ] && grep '^hint: ' out.txt | grep -v 'lists all options' > hint.txt || echo "$option"
    for word in $(grep -oE -e '--[a-z][a-z0-9-]*' hint.txt); do
        grep -qE -e "^  $word( |$)" help.txt || echo "$option: $word"
    done
done > unknown.txt
check options_of_other_trainers_have_a_hint test ! -s unknown.txt
outcome low_fill_is_reported 0 '^fill +[4-7][0-9] % in the next 8 steps.*--micro-batch-tokens' "${quiet[@]}" --dry-run
has epochs_are_reported '^epochs  [0-9.]+ in [0-9]+ steps$' out.txt
# ---- the report of a real log ------------------------------------------------------------------------------
outcome report 0 '^wrote every/report.html: every/log.jsonl: 5 steps, loss [0-9]\.[0-9]{3} to [0-9]\.[0-9]{3}, validation 6\.908 to [0-9.]{5}, lowest [0-9.]{6}$' \
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
