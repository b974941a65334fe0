#!/usr/bin/env bash
# End to end: training, resume bit for bit, every kind of bad input and its exit code, signals, locks, wrong numbers.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=2
tiny_model tiny 24 40 8
corpus 31
data=(--train corpus --max-seqlen 128 --micro-batch-tokens 512)
common=(--model tiny --from-scratch "${data[@]}" --batch-tokens 1024 --val-tokens 1024 --val-every 4
        --num-samples 2 --sample-tokens 4 --lr 1e-3)
run=("$train" "${common[@]}")
# ---- training and resuming -------------------------------------------------------------------------
expect train_8_steps 0 'done: a/final is a Hugging Face model' "${run[@]}" --out a --steps 8 --save-every 3 --keep 0
check_python memory_and_log_are_as_planned "$root" <<'PY'
peak, planned = re.search(r"device ([0-9.]+) MiB \(planned ([0-9.]+) MiB\)", open("out.txt", errors="replace").read()).groups()
assert 0.9 * float(planned) < float(peak) <= float(planned), (peak, planned)       # the plan rounds up
start, done = log("a")[0], steps("a")
assert start["event"] == "start" and start["options"]["max-seqlen"] == 128
assert [s["step"] for s in done] == list(range(1, 9)) and done[-1]["loss"] < done[0]["loss"]
assert [l["step"] for l in events("a", "val")] == [0, 4, 8]
assert start["command"][-6:] == "--steps 8 --save-every 3 --keep 0".split(), start["command"]
assert start["host"] and start["device_mib"] > 1, start
assert start["time"] <= done[0]["time"] <= done[-1]["time"] < start["time"] + 3600, start["time"]
names = re.findall(r"`(\w+)`", open(sys.argv[1] + "/data/README.md").read())
for line in log("a"):
    assert set(line) - {"event"} <= set(names), set(line) - set(names)
PY
cp -r a b && rm -r b/step-00000008 b/step-00000006 b/final
resume=("${run[@]}" --resume)
expect resume_from_step_3 0 'start +b/step-00000003' "${resume[@]}" --out b --steps 8 --save-every 3 --keep 0
same_files resumed_run_has_the_same_bits {a,b}/step-00000008
same final_is_the_last_checkpoint a/final/model.safetensors b/step-00000008/model.safetensors
cp -r b reached
expect a_step_already_reached 0 '^step 8 of --steps 3 .*: nothing to train' eval '"${resume[@]}" --out reached --steps 3 && cmp {b,reached}/log.jsonl'
expect warmup_longer_than_the_run 0 '^warning: --warmup-steps 2, --steps 2: the run never reaches --lr' \
    "${run[@]}" --out warm --steps 2 --warmup-steps 2
# on a terminal about 100 lines, none wider, and one rewritten in place
for case in "80 60 $train" "50 250 $release"; do
    read -r columns steps program <<< $case
    with_terminals lines_of_a_terminal || break
    TERM=xterm in_terminal $columns '[]' "$program" "${common[@]}" --out "terminal $columns" --steps $steps --val-every 50 \
        --micro-batch-tokens 128 --batch-tokens 128 2> out.txt || bad "a_terminal_of_$columns" "exit code $?"
    check_python "lines_of_a_terminal_of_$columns" $case << 'PY'
text = open("out.txt", errors="replace", newline="").read()
lines = [[part for part in re.split("\r\x1b\\[K", line) if part.startswith("step ")] for line in text.split("\r\n")]
parts = [part for line in lines for part in line]
assert all(len(part) < int(sys.argv[1]) and ("| eta" in part or "SPIKE" in part) for part in parts), parts
number = lambda part: int(part.split("/")[0][5:])
stay = [number(line[-1]) for line in lines if line]
assert [*map(number, parts)] == [*range(1, stay[-1] + 1)] and stay[-1] == int(sys.argv[2]), stay
assert min(100, stay[-1]) <= len(stay) <= 200, stay
PY
done
mkdir lfs && cp a/final/*.json lfs
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n' > lfs/model.safetensors
expect a_pointer_of_git_lfs 3 'found a pointer of Git LFS' "$train" --model lfs "${data[@]}" --out none --steps 1
same_losses and_logs_each_step_once 0 0 11 a b
expect resume_from_a_run 0 'start +b/step-00000008' "${run[@]}" --resume=b --out branch --steps 9
expect resume_from_its_own_newest_checkpoint 0 'start +branch/step-00000009' "${run[@]}" --out branch --steps 10 \
    --resume=branch/step-00000009
expect compare 0 '^repad ' "${run[@]}" --compare 2
check_python compare_table_is_consistent <<'PY'
text = open("out.txt", errors="replace").read()
rows = [l.split() for l in re.findall("^(?:packed|shared|padded|grouped|rows|repad) +[0-9].*$", text, re.M)]
assert [r[0] for r in rows] == ["packed", "shared", "padded", "grouped", "repad", "rows"], rows
times = [float(r[1]) for r in rows]
assert all(float(r[2]) <= float(r[1]) <= float(r[3]) for r in rows), rows     # median, least, most
tokens = [float(r[4]) * t for r, t in zip(rows, times)]     # the same documents in every layout
assert max(tokens) < (1.01 + 0.1 / min(times)) * min(tokens), tokens     # ms have one decimal
loss = {r[0]: float(r[10]) for r in rows}
assert all(abs(loss["packed"] - loss[k]) < 2e-6 for k in ("shared", "padded", "grouped", "repad")), loss
pairs = {r[0]: int(r[8]) for r in rows}
assert pairs["packed"] == pairs["repad"] < pairs["grouped"] <= pairs["padded"], pairs
PY
expect check_packing 0 'packing does not change the result' "${run[@]}" --check-packing
has check_packing_is_bit_for_bit 'max .delta. of a logit .*bit for bit' out.txt
# a kit: a batch and its losses, which weights of records scale; one document is cut into pieces
cat > weighted.jsonl << 'JSONL'
{"text": "twice, as if it were there again", "weight": 2}
{"text": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "weight": -1}
{"text": "half, the third", "weight": 0.5}
{"messages": [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": "maybe", "weight": -0.5}], "weight": 3}
JSONL
sed 's/, "weight": [-0-9.]*//g' weighted.jsonl > plain.jsonl
weigh=("$train" --model a/final --micro-batch-tokens 512 --max-seqlen 80 --val weighted.jsonl)
expect a_kit_without_weights 0 'packing does not' "${weigh[@]}" --train plain.jsonl --out wp --check-packing=plain.json
expect check_packing_with_weights 0 'packing does not' "${weigh[@]}" --train weighted.jsonl --out ww --check-packing
has the_summary_shows_weights '^train .* targets with weights$' out.txt
expect compare_with_weights 0 '^repad' "${weigh[@]}" --train weighted.jsonl --out wc --compare 1
check_python weights_scale_losses_and_their_sum <<'PY'
kit = json.load(open("plain.json"))
first, loss, count, ids, labels = 0, 0, 0, kit["input_ids"], kit["labels"]
assert len(ids) == kit["document_ends"][-1] and len(kit["loss_sums"]) == len(kit["document_ends"]) > 3
assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
assert 0 < kit["grad_norm"] < 1e3 and kit["neighbour_changes_loss_by"] == 0
for end, total in zip(kit["document_ends"], kit["loss_sums"]):
    targets = sum(label >= 0 for label in labels[first:end])
    assert labels[first] == -100 and targets > 5
    weight = {"t": 2, "m": -1, "h": 0.5}.get(chr(ids[first + 1]), -1.5)
    loss, count, first = loss + weight * total, count + abs(weight) * targets, end
rows = re.findall(r"^(?:packed|shared|padded|repad) .* (-?[0-9.]+)$", open("out.txt", errors="replace").read(), re.M)
assert len(rows) == 4 and all(abs(float(r) - loss / count) < 2e-6 for r in rows), (rows, loss / count)
PY
# the size of weights does not matter, only what they are to one another: their sum may leave a float
for exponent in 126 0 -140; do
    python $exponent > w$exponent.jsonl <<< 'for line in open("weighted.jsonl"):
    print(re.sub(r"[-0-9.]+}$", lambda w: "%r}" % (float(w[0][:-1]) * 2.0 ** int(sys.argv[1])), line), end="")'
    check "trains_weights_2^$exponent" "${weigh[@]}" --train w$exponent.jsonl --out w$exponent --steps 3 --val-every 0 --num-samples 0 \
        --max-seqlen 120 --pad-to max
done
check_python rows_are_padded_to_max_seqlen <<'PY'
steps = [json.loads(line) for line in open("w0/log.jsonl") if '"event"' not in line]
assert len(steps) == 3 and all(s["padded_tokens"] == 120 * s["docs"] for s in steps), steps
PY
same_losses sums_of_weights_beyond_a_float 0 0 3 w0 w126 w-140
expect a_kit_is_not_overwritten 4 'plain.json' "${weigh[@]}" --train plain.jsonl --out wp --check-packing=plain.json
# every logit is NaN: no two are equal
faulty=${FAULTY:-$root/build/cpu/train_llama_faulty}
FAULT=nan:0:set-up:0 expect check_packing_fails_on_nan 11 'PACKING CHANGES THE RESULT' "$faulty" "${common[@]}" --check-packing
lacks check_packing_on_nan_claims_no_equal_bits 'bit for bit' out.txt
# bf16 products: the asan build has a model of AMX in C where the processor has none
expect the_instruction_set_is_named 0 ' on cpu, .* matmul [a-z0-9_]+ [0-9]+x[0-9]+' "${run[@]}" --dry-run --out nothing
if [[ $train = *asan* ]]; then
    expect bf16_products 0 ' matmul [a-z0-9_]+_bf16 [0-9]+x[0-9]+' "${run[@]}" --bf16-matmul --out bf16 --steps 2 --warmup-steps 2
    same_losses losses_of_bf16_products_are_near 0.00390625 0.03125 4 warm bf16
fi
expect recompute_is_planned 0 '^recompute off .* MiB, on .* MiB \(chosen\), full ' "${run[@]}" --dry-run \
    --recompute on --out nothing
# the largest micro-batch that fits, with 15/16 of the memory of another machine
huge=("${run[@]/#tiny/smollm2-135m}" --recompute full --out nothing --num-samples 0)
plan=("${huge[@]}" --dry-run)
check plan_of_half "${plan[@]}" --micro-batch-tokens 128
half=$(awk '$1 == "total" { print $2 / 1024 * 16 / 15 }' out.txt)
for more in 1.01 0.99; do
    card=(--max-seqlen 128 --micro-batch-tokens 256 --memory-gib "$(awk "BEGIN { print $half * $more }")")
    hint='--micro-batch-tokens 128 fits'
    [ $more = 1.01 ] || hint='even --micro-batch-tokens 128 does not fit'
    expect "plan_for_${more}_times_half" 0 "^warning: .* MiB do not fit into .* MiB: $hint" "${plan[@]}" "${card[@]}"
    expect "start_with_${more}_times_half" 5 "^hint: $hint" "${huge[@]}" "${card[@]}"
done
expect help 0 '^  --micro-batch-tokens' "$train" --help
check help_for_a_reader_that_has_ended eval 'mkfifo p && (exec 9<> p 8> p 9>&-; "$train" --help >&8); [ $? -eq 141 ]'
expect version 0 '^unpad.c [0-9.]+ \((commit [0-9a-f]+(-dirty)?, )?[a-z]+ backend\)$' "$train" --version
# ---- damaged and foreign checkpoints ----------------------------------------------------------------------
expect resume_with_another_micro_batch 9 'hint: leave both out' "$train" --resume --out a --micro-batch-tokens 768
sed 's/"intermediate_size": 40/"intermediate_size": 48/' tiny/config.json > out.txt && mkdir tiny2 && cp out.txt tiny2/config.json
# checkpoints of older versions have one end token and no padding
mkdir more_ends && sed 's/"eos_token_id": 257/"eos_token_id": [257, 10], "pad_token_id": 0/' tiny/config.json > more_ends/config.json
expect resume_with_more_end_tokens 0 'start +b/step-' "${resume[@]/tiny/more_ends}" --out b --dry-run
expect resume_with_another_model 9 'config.json' "${resume[@]/tiny/tiny2}" --out a
expect resume_from_another_directory 3 '^error: corpus: expected a checkpoint or a run, found neither$' "${resume[@]/--resume/--resume=corpus}" --out a
expect resume_from_a_removed_step 3 '^hint: --resume=DIR names a run or a step-NNNNNNNN' "${run[@]}" --resume=b/step-00000002 --out a
expect resume_from_nothing 3 '^error: nope: expected a checkpoint or a run, found nothing$' "${run[@]}" --resume=nope --out new
expect resume_from_the_log 3 '^error: b/log.jsonl: expected a checkpoint or a run, found neither$' "${run[@]}" --resume=b/log.jsonl --out a
expect a_run_as_model 3 '^hint: --model a/final$' "$train" --model a --generate
expect a_run_without_a_model 3 '^hint: --model killed/step-' eval 'mkdir killed && touch killed/log.jsonl && "$train" --model killed "${data[@]}"'
# ---- usage ------------------------------------------------------------------------------------------------
expect another_attention 2 '--attention flash: expected kernels' "${run[@]}" --attention flash --dry-run
expect longest_document_does_not_fit 2 'micro-batch-tokens 512: expected at least --max-seqlen 1024' "${run[@]}" --max-seqlen 1024
expect a_longer_one_alone_raises_the_buffer 0 '^plan .* of 8192 tokens a step' "$train" --train corpus --max-seqlen 8192 --dry-run
expect batch_is_not_a_multiple 2 'multiple' "${run[@]}" --batch-tokens 1000
expect out_is_a_file 2 'hint: give another directory' "${resume[@]}" --out tiny/config.json
# more memory than any machine has, of few tokens: a batch of 500 million takes a minute to plan
expect too_big_for_the_machine 5 'tokens [0-9]+ fits|does not fit' "${run[@]/#tiny/smollm2-135m}" --out nothing \
    --micro-batch-tokens 20000000 --batch-tokens 0 --val-every 0 --num-samples 0
check what_does_not_start_writes_nothing test ! -e nothing
# the sanitizer needs more address space than that; bash: the limit is its own
limited() { bash -c 'ulimit -v 1500000 && exec "$@"' limited "$release" "$@"; }
expect optimizer_does_not_fit 5 '^error: memory: [0-9]+ MiB for (gradients|optimizer) refused' limited \
    --model smollm2-135m --train corpus --allow-other-tokenizer --max-seqlen 64 --micro-batch-tokens 64 --out big
OMP_STACKSIZE=2G outcome openmp_gets_no_thread 5 '^error: host memory: refused to OpenMP' limited "${data[@]}" --threads 2 --out big
outcome a_failed_test_is_none_of_openmp 1 'expected a part of a case' "$root/build/asan/test_ops" --filter no_such_case
expect a_full_standard_output 4 '^error: standard output' eval '"${run[@]}" --dry-run > /dev/full'
# ---- bad input files --------------------------------------------------------------------------------------
expect no_such_model 3 'hint: there is no such directory' "$train" --model tiny/final
expect a_gguf_as_model 3 'hint: scripts/gguf_to_hf.py' "$train" --model x/y.gguf
expect weights_as_model 3 'hint: give the directory that contains it' "$train" --model a/final/model.safetensors
expect no_weights 3 'hint: .*save_pretrained converts' "$train" --model tiny "${data[@]}" --out n2
expect no_training_data 3 'hint: scripts/quickstart.sh' "$train" --dry-run
expect no_temporary_directory 4 'none: cannot create a directory' env TMPDIR=none "$train" --train "$root/README.md" --dry-run
# ---- the output directory: errors of a disk are in tests/test_faults.c -------------------------------------
start_long nohup "${run[@]}" --out lock --steps 100000
expect second_writer 10 'lock' "${run[@]}" --out lock --steps 1 --overwrite
end_long HUP TERM
check sigterm_saves_and_exits_75 eval "[ $status -eq 75 ] && ls -d lock/step-*"
start_long "${run[@]}" --out quit --steps 100000
end_long USR1 TERM
check second_signal_quits eval "[ $status -gt 128 ] && ! ls -d quit/step-*"
start_long "${run[@]}" --compare=1000
end_long TERM
check compare_stops_at_the_first_signal test $status -eq 143
expect prompt_too_long 2 'prompt: [0-9]+ tokens' "${run[@]}" --out p --steps 1 --prompt "$(seq -s ' ' 200)"
mv corpus/tokenizer.json tokenizer.aside
expect prompt_without_tokenizer 2 'needs a tokenizer' "${run[@]}" --out p --steps 1 --prompt x
mv tokenizer.aside corpus/tokenizer.json
# while a save is written, training continues; without memory for that it waits: the same files
saves=("$faulty" "${common[@]}" --steps 8 --save-every 3 --keep 0)
expect saves 0 '^done' "${saves[@]}" --out whole
first() { grep -oE '^(step +4/|saved .*-00000003)' out.txt | head -n 1; }
FAULT=hold:0:save:3 expect save_beside_training 0 '^  host snapshot' "${saves[@]}" --out beside
check steps_go_on test "$(first)" = 'step     4/'
NO_ROOM=1 expect save_without_room 0 '^done' "${saves[@]}" --out waits
check steps_wait test "$(first)" = 'saved waits/step-00000003'
for save in beside waits; do same_files "same_files_$save" whole $save; done
same_losses steps_and_losses 0 0 8 whole beside waits
with_terminals saved_between_pauses && FAULT='hold:0:save:3 quiet:0:backward:5' SLOW_MS=1500 TERM=xterm \
    outcome saved_between_pauses 0 '\[Ksaved .*-00000003 in [0-2]\.' in_terminal 120 '[]' "${saves[@]}" --log-every 9 --out line
# one that fails while a signal comes is tried again; one that is killed has not succeeded either
full() { (ulimit -f 100 && exec "${saves[@]}" --out full "$@"); }
NO_ROOM=1 FAULT=signal:0:save:3 outcome no_resume_from_a_failed_save 4 '^error: full/step-00000003.*File too large' full
FAULT='hold:0:save:6 kill:0:read:8' outcome killed_while_saving 137 '^step +7/' full --save-every 2 --overwrite
expect resume_where_no_save_succeeded 0 'start +random weights' "${saves[@]}" --out full --resume
# without --save-every, a checkpoint every ten minutes of a clock that runs fast
timed=("${saves[0]}" "${common[@]}" --steps 8 --keep 0 --heartbeat-seconds 0)
FAST_CLOCK=1e7 expect saves_by_time 0 '^saves +every 10 minutes of training' "${timed[@]}" --out timed
check a_checkpoint_each_time test -e timed/step-00000001 -a -e timed/step-00000007
same_state no_bit_depends_on_the_time {whole,timed}/step-00000008
expect no_save_in_ten_minutes 0 '^done' "${timed[@]}" --out short
expect no_save_at_all 0 '^saves +after the last step, none before it' "${timed[@]}" --save-every 0 --out never
check save_every_0_is_never test "$(echo {short,never}/step-*)" = 'short/step-00000008 never/step-00000008'
if with_ranks saves_by_rank_0s_clock "${saves[0]}"; then
    FAST_CLOCK=1e7 expect saves_by_rank_0s_clock 0 '^done' "${mpi[@]}" -n 2 "${timed[@]}" --out both
    check all_ranks_save test -e both/step-00000001 -a -e both/step-00000007
fi
# the learning rate is that of what is trained; one that is given wins
rate() { expect "$1" 0 "^lr +$2" "${run[@]:0:1}" "${data[@]}" --steps 4 --dry-run "${@:3}"; }
rate of_random_weights '0.002, weight decay 0.1; the defaults for random weights are 0.002 and 0.1' --model tiny --from-scratch
rate of_given_weights '2e-05, weight decay 0; the defaults for given weights are' --model whole/final
rate given '0.0004, weight decay 0.5; the defaults for given weights are 2e-05 and 0' --model whole/final \
    --lr 4e-4 --weight-decay 0.5
lacks twenty_times_the_default_is_quiet '^warning' out.txt
rate given_much '0.002, ' --model whole/final --lr 2e-3
has more_warns '^warning: --lr 0.002 is 100 times the default for given weights, 2e-05' out.txt
expect tuned 0 done "$train" "${data[@]}" --model whole/final --steps 2 --save-every 1 --out tuned
rm -r tuned/final tuned/step-00000002
expect resume_keeps_them 0 '^lr +2e-05, weight decay 0;' "$train" --resume --out tuned
expect resume_keeps_the_given 0 '^lr +0.001, weight decay 0.1; ' "${saves[0]}" --resume --out never --steps 9
# ---- numbers that are wrong: --replay-every finds a machine that miscalculates, and a run that stops on steps
# that are not finite leaves a checkpoint from which they can be computed again
wrong=("${saves[0]}" --model tiny --from-scratch "${data[@]}" --micro-batch-tokens 256 --batch-tokens 1024 --val-every 0
       --num-samples 0 --steps 12)
check undisturbed "${wrong[@]}" --out wrong.a
# ---- one bit, once: in a step that is computed twice, and in one that is not
replays() { "${wrong[@]}" --replay-every 2 "$@"; }
check replays_change_no_bit replays --out wrong.b
same_state the_bits_of_a_run_without wrong.{a,b}/step-00000012
export FAULT=flip:0:forward:4
expect a_wrong_bit 11 'rank 0, step 4: expected gradients of model.* with the same bits' replays --out wrong.c
check nothing_of_that_step_is_saved test ! -e wrong.c/step-00000004
FAULT=flip:0:forward:5 check between_replays replays --out wrong.d
differ it_goes_unseen wrong.{a,d}/step-00000012/model.safetensors
if with_ranks ranks "${wrong[0]}"; then
    both=("${mpi[@]}" -n 2 "${wrong[@]}" --replay-every 4)
    FAULT=flip:1:forward:4 expect it_is_rank_1 11 'rank 1, step 4: expected' "${both[@]}" --out wrong.e
    unset FAULT
    check two_ranks "${mpi[@]}" -n 2 "${wrong[@]}" --out wrong.f
    check two_ranks_replayed "${both[@]}" --out wrong.g
    same_state the_bits_of_two_ranks wrong.{f,g}/step-00000012
    check in_order "${both[@]}" --deterministic --out wrong.h
    check in_order_alone "${wrong[@]}" --deterministic --out wrong.i
    same_state leaves_are_replayed_too wrong.{i,h}/step-00000012
    same_losses with_the_losses_of_all_leaves 0 0 12 wrong.{i,h}
fi
# ---- steps that are not finite
export FAULT=nan:0:forward:8
expect not_finite 7 '^saved wrong.n/step-00000007: --resume=DIR' "${wrong[@]}" --save-every 3 --keep 2 --out wrong.n
check older_checkpoints_stay test -e wrong.n/step-00000006
FAULT=nan:0:forward:10 expect resumed_between_them 7 '^saved wrong.o/step-00000009: --resume' "${wrong[@]}" --resume=wrong.n/step-00000009 --out wrong.o
again=("${wrong[@]}" --resume=wrong.n/step-00000007)
expect the_same_again 7 'training diverged: 5 steps in a row' "${again[@]}" --out again
check_python with_the_same_numbers <<'PY'
first, again = ([(s["step"], s["loss"], s["lr"]) for s in steps(run)] for run in ("wrong.n", "again"))
assert first[7:] == again and [s[0] for s in first] == [*range(1, 13)], again
PY
unset FAULT
check repaired "${again[@]}" --out wrong.m
same_state as_if_nothing_had_happened wrong.{a,m}/step-00000012
# ---- hints name tools where they are: here, beside the program, or in share/unpad after make install
mkdir -p prefix/bin prefix/share/unpad/scripts && touch prefix/share/unpad/scripts/get_model.sh && cp "$release" prefix/bin/train_llama
expect tools_after_make_install 3 '^hint: .*/prefix/bin/../share/unpad/scripts/get_model.sh ORG/NAME gets' prefix/bin/train_llama --model no/such/model
mkdir scripts && touch scripts/get_model.sh
expect tools_from_here 3 '^hint: .*; scripts/get_model.sh ORG/NAME gets' prefix/bin/train_llama --model no/such/model
finish
