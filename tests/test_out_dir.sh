#!/usr/bin/env bash
# The output directory: files copied into checkpoints, --overwrite and --resume, the log on a full
# disk and after damage, directories that vanish or have no locks.
# Runs the sanitizer build; set TRAIN to test another one.
. "$(dirname "$0")/lib.sh"
scratch out_dir
train=${TRAIN:-$root/build/asan/train_llama}
mounted=()
job=
clean_up() {
    local dir
    [ -z "$job" ] || kill -9 "$job" 2> /dev/null
    for dir in "${mounted[@]}"; do umount "$dir"; done
    rm -rf "$work"
}
trap clean_up EXIT

tiny_model tiny 24 40 8
uneven_texts text 31
prepare text --out corpus --val-frac 0.1
common=(--model tiny --from-scratch --train corpus --max-seqlen 64 --micro-batch-tokens 256
        --batch-tokens 512 --val-every 0 --val-tokens 512 --num-samples 0 --lr 1e-3)
run=("$train" "${common[@]}" --threads 1)
resume=("$train" --threads 1 --resume)

# traced STRACE_ARGUMENTS... COMMAND...: its system calls go to trace.txt. The sanitizer's leak check
# does not work under ptrace.
can_trace=no
if strace -o trace.txt -e trace=none true 2> /dev/null; then can_trace=yes; fi
traced() { ASAN_OPTIONS=detect_leaks=0 strace -f -o trace.txt "$@"; }
# small_disk DIR SIZE: an empty file system
small_disk() {
    mkdir "$1" && mount -t tmpfs -o size="$2" tmpfs "$work/$1" 2> /dev/null && mounted+=("$work/$1")
}
names() { (cd "$1" && echo *); }
warnings() {    # warnings NAME COUNT: the last command printed that many
    local n
    n=$(grep -ac '^warning: ' out.txt)
    if [ "$n" -eq "$2" ]; then ok "$1"; else bad "$1" "$n warnings, expected $2"; fi
}
# await COMMAND...: repeats it until it succeeds or $job has ended
await() {
    local end=$((SECONDS + limit_s))
    until "$@" || ! kill -0 $job 2> /dev/null || [ $SECONDS -ge $end ]; do sleep 0.05; done
}
more_steps_than() { [ "$(grep -c '^step' long.txt)" -gt "$1" ]; }
# start_long OUT FLAGS...: starts a long run as $job and waits for its first step
start_long() {
    local out=$1
    shift
    : > long.txt
    "${run[@]}" --out "$out" --steps 1000000 "$@" > long.txt 2>&1 &
    job=$!
    await more_steps_than 0
}
end_long() {    # end_long SIGNAL: sets $status; output in out.txt
    kill "-$1" $job
    wait $job 2> /dev/null
    status=$?
    job=
    cp long.txt out.txt
}

# ---- tokenizer and config files in checkpoints ------------------------------------------------------
cp -r tiny chat
companions=(tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt
            tokenizer.model chat_template.jinja)
cp corpus/tokenizer.json chat
for f in "${companions[@]}"; do echo "{\"made for\": \"$f\"}" > "chat/$f"; done
cp corpus/tokenizer_config.json corpus/special_tokens_map.json chat
echo '{"eos_token_id": [257, 7], "pad_token_id": 3, "temperature": 0.6, "transformers_version": "4"}' \
    > chat/generation_config.json
expect companions_run 0 done "${run[@]}" --model chat --out c --steps 2
mv chat chat.aside
expect companions_resumed_without_the_model 0 done "${resume[@]}" --out c --steps 4 --save-every 1 --keep 1
for f in tokenizer.json generation_config.json "${companions[@]}"; do
    same "resumed_final_has_the_model's_$f" "chat.aside/$f" c/final/"$f"
done
mv chat.aside chat
rm chat/generation_config.json
sed -i 's/"eos_token_id": 257/"eos_token_id": [257, 7]/' chat/config.json
expect no_generation_config_run 0 done "${run[@]}" --model chat --out c2 --steps 1
for f in config generation_config; do
    expect "every_end_token_in_$f" 0 '^\[257, 7\]$' \
        python3 -c "import json; print(json.load(open('c2/final/$f.json'))['eos_token_id'])"
done
mkfifo chat/vocab.fifo && mv chat/vocab.fifo chat/vocab.json
expect unreadable_tokenizer_file 3 'chat/vocab.json' "${run[@]}" --model chat --out c3 --steps 1

# ---- --overwrite ------------------------------------------------------------------------------------------
expect old_run 0 done "${run[@]}" --out o --steps 8 --save-every 2 --keep 3
cp -r o old
expect resume_and_overwrite 2 'overwrite' "${run[@]}" --out o --resume --overwrite
expect overwrite 0 done "${run[@]}" --out o --steps 1 --lr 1e-4 --overwrite
check overwrite_leaves_nothing_of_the_old_run test "$(names o)" = 'final log.jsonl step-00000001'
rm -r o && cp -r old o
start_long o --lr 1e-4 --overwrite
end_long KILL
check old_run_is_gone_before_the_first_step test "$(names o)" = log.jsonl
expect killed_before_its_first_checkpoint 0 'start +random weights' "${run[@]}" --out o --lr 1e-4 --steps 2 --resume
warnings starting_from_scratch_gives_a_warning 1
mkdir m && cp -r old/final m
expect overwrite_does_not_delete_its_own_model 2 'm/final' "$train" --model m/final --train corpus --max-seqlen 64 \
    --micro-batch-tokens 256 --out m --steps 1 --overwrite
# ---- --resume: which checkpoint ------------------------------------------------------------------------
cp -r old r
mv r/step-00000008 r/step-00000008.old-4711
cp -r r/step-00000008.old-4711 r/step-00000008.tmp-4711
before=$(stat -c %i r/step-00000008.old-4711/model.safetensors)
expect killed_while_saving_again 0 'start +r/step-00000008' "${run[@]}" --out r --steps 8 --resume
check resumed_checkpoint_is_not_saved_again test "$(stat -c %i r/step-00000008/model.safetensors)" = "$before"
mv r/step-00000008 r/step-00000008.old-4711
expect named_checkpoint_killed_while_saving_again 0 done "${run[@]}" --out r --steps 8 --resume=r/step-00000008
expect older_than_the_newest 2 'r/step-00000008' "${run[@]}" --out r --steps 9 --resume=r/step-00000006
expect older_into_another_directory 0 'start +r/step-00000006' "${run[@]}" --out r2 --steps 8 --resume=r/step-00000006
same_state a_branch_has_the_same_bits r/step-00000008 r2/step-00000008
expect branch_into_a_directory_with_a_run 2 'found a run' "${run[@]}" --out old --steps 8 --resume=r2/step-00000008
expect resume_in_a_new_directory 0 'start +random weights' "${run[@]}" --out new --steps 2 --resume
warnings resume_in_a_new_directory_gives_a_warning 1
mkdir empty
expect resume_in_an_empty_directory 0 '^warning: empty: no checkpoint' "${run[@]}" --out empty --steps 2 --resume
rm -rf l && cp -r old l && rm -r l/step-*
expect checkpoints_deleted_final_kept 3 'final' "${run[@]}" --out l --steps 8 --resume
rm -r l/final
expect checkpoints_deleted_log_kept 3 'log.jsonl' "${run[@]}" --out l --steps 8 --resume
same log_of_lost_checkpoints_is_kept l/log.jsonl old/log.jsonl
sed -i '/"step": [3-9],/d' l/log.jsonl
expect log_ends_where_the_first_checkpoint_was_due 0 'start +random weights' "${run[@]}" --out l --steps 8 --resume

# ---- --resume restores the options of the run ------------------------------------------------------------
options=(--schedule cosine --weight-decay 0.2 --seed 7 --long-docs truncate --deterministic --grad-clip 0.5
         --min-lr-frac 0.1 --keep 0)
expect with_options 0 done "${run[@]}" "${options[@]}" --out p --steps 6 --save-every 3
cp -r p q && rm -r q/step-00000006 q/final
expect bare_resume 0 'start +q/step-00000003' "${resume[@]}" --out q
lacks bare_resume_lists_no_changes '^resume: ' out.txt
same_state bare_resume_has_the_same_bits {p,q}/step-00000006
rm -r q/step-00000006 q/final
expect bare_resume_with_changes 0 '^resume: --steps 6 -> 5$' "${resume[@]}" --out q --steps 5 --seed 7 --no-deterministic \
    --schedule wsd-sqrt --heartbeat-seconds 5
[ "$(grep -c '^resume: ' out.txt)" -eq 3 ] && grep -q '^resume: --deterministic true -> false$' out.txt &&
    grep -q '^resume: --schedule cosine -> wsd-sqrt$' out.txt && ok changes_are_listed || bad changes_are_listed ''
expect another_run_holds_it 10 'directory in use' flock q/.lock "${resume[@]}" --out q
expect dry_run_while_another_run_has_the_lock 0 'start +q/step-00000005' flock q/.lock "${resume[@]}" --out q --dry-run
expect evaluation_while_another_run_has_the_lock 0 'start +q/step-00000005' flock q/.lock "${resume[@]}" --out q --steps 0
expect changed_plan 9 'seed \(was 7, is 8\)' "${resume[@]}" --out q --seed 8
expect bare_dry_run 0 'start +q/step-00000005' "${resume[@]}" --out q --dry-run

if ranks_can_run "$root/build/cpu/train_llama"; then
    cp -r p p2 && rm -r p2/step-00000006 p2/final && cp -r p2 p1
    expect bare_resume_of_the_release_build 0 done "$root/build/cpu/train_llama" --threads 1 --resume --out p1
    expect bare_resume_on_two_ranks 0 'start +p2/step-00000003' "${mpi[@]}" -n 2 "$root/build/cpu/train_llama" \
        --threads 1 --resume --out p2
    same_state two_ranks_have_the_same_bits p1/step-00000006 p2/step-00000006
    one=("$root/build/cpu/train_llama" "${common[@]}" --threads 1 --out p2)
    expect resume_of_one_rank_only 9 'differences in .*resume \(rank 1\)' "${mpi[@]}" -n 1 "${one[@]}" --resume : -n 1 "${one[@]}"
else skip bare_resume_on_two_ranks "$no_ranks"; fi
mkdir -p tree/scripts tree/data/demo && cp "$root/scripts/quickstart.sh" tree/scripts && touch tree/data/demo/dataset.json
printf 'all:\n' > tree/Makefile
printf '#!/bin/sh\n' > tree/scripts/setup.sh && touch tree/scripts/report.py
printf '#!/bin/sh\necho "asked: $*"\n' > tree/train_llama
chmod +x tree/train_llama tree/scripts/*
expect quickstart_starts_over 0 '^asked: .* --overwrite .*--steps 9$' tree/scripts/quickstart.sh --steps 9
expect quickstart_resumes 0 '^asked: .*--resume --steps 9$' tree/scripts/quickstart.sh --resume --steps 9
lacks quickstart_resume_does_not_overwrite '--overwrite' out.txt

# ---- the log ------------------------------------------------------------------------------------------------
cp -r old g
printf '{"step": 9, "loss": 1}\n{"step": 10, "lo' >> g/log.jsonl
expect longer_log 0 "^warning: g/log.jsonl: removed 2 records \([0-9]+ bytes\) after step 8" "${resume[@]}" --out g
cp -r old h
truncate -s $(($(grep -abo '{"step": 8,' h/log.jsonl | cut -d: -f1) + 5)) h/log.jsonl
expect shorter_log 0 '^warning: h/log.jsonl: expected [0-9]+ bytes at step 8, found [0-9]+' "${resume[@]}" --out h
check_python torn_line_is_removed <<'PY'
import json
lines = [json.loads(l) for l in open("h/log.jsonl")]
assert [l["step"] for l in lines if "event" not in l] == list(range(1, 8)) and lines[-1]["event"] == "resume"
PY
expect clean_resume_warns_of_nothing 0 done "${resume[@]}" --out p --steps 7
warnings no_warning_on_a_clean_resume 0
if small_disk disk 2m; then
    start_long disk/d
    dd if=/dev/zero of=disk/ballast bs=1k > out.txt 2>&1
    await grep -q log.jsonl long.txt
    await more_steps_than $(($(grep -c '^step' long.txt) + 20))
    rm disk/ballast
    await more_steps_than $(($(grep -c '^step' long.txt) + 20))
    end_long TERM
    check full_disk_while_logging test $status -eq 75
    cp long.txt out.txt
    # two for each gap; there are several when a short record fits into the rest of a page
    warnings lost_records_give_two_warnings $((2 * $(grep -c 'records were lost' out.txt)))
    check_python log_lines_are_whole <<'PY'
import json, re
lines = [json.loads(l) for l in open("disk/d/log.jsonl")]
steps = [l["step"] for l in lines if "event" not in l]
lost = sum(int(n) for n in re.findall(r"([0-9]+) records were lost", open("long.txt").read()))
assert steps == sorted(set(steps)) and lost >= 20, lost
assert steps[-1] == len(steps) + lost, (steps[-1], len(steps), lost)
PY
else skip full_disk_while_logging 'mounting a tmpfs needs root'; fi

# ---- only finite values are saved ----------------------------------------------------------------------------
wild=("${run[@]}" --batch-tokens 256 --warmup-steps 0 --schedule constant --grad-clip 0 --save-every 1
      --steps 60 --keep 0)
cat > finite.py <<'PY'
import glob, json, math, struct, sys
for path in glob.glob(sys.argv[1] + "/*/*.safetensors"):
    data = open(path, "rb").read()
    header = struct.unpack("<Q", data[:8])[0]
    body = data[8 + header:]
    assert all(map(math.isfinite, struct.unpack("<%df" % (len(body) // 4), body))), path
PY
outcome diverges 7 'error: .*(diverged|finite)' "${wild[@]}" --out w --lr 1e15 --weight-decay 1
check only_finite_values_saved python3 finite.py w
cp -r old n
python3 - <<'PY'
import struct
path = "n/step-00000008/optimizer.safetensors"
data = bytearray(open(path, "rb").read())
data[-4:] = struct.pack("<f", float("inf"))
open(path, "wb").write(data)
PY
# fix its manifest, as if the program had saved this state
cat > fit.py <<'PY'
import re, shards, sys
d = sys.argv[1]
text = open(d + "/manifest.json").read()
new = "%08x" % shards.crc32c(open(d + "/optimizer.safetensors", "rb").read())
text = re.sub(r'("optimizer.safetensors".*?"crc32c": ")[0-9a-f]{8}', lambda m: m.group(1) + new, text, flags=re.S)
body = text[:text.index(',\n  "manifest_crc32c"')]
open(d + "/manifest.json", "w").write(body + ',\n  "manifest_crc32c": "%08x"\n}\n' % shards.crc32c(body.encode()))
PY
PYTHONPATH=$root/tests python3 fit.py n/step-00000008
expect infinite_optimizer_state_is_not_loaded 7 'optimizer' "${resume[@]}" --out n --steps 9

# ---- limits and descriptors inherited at the start ---------------------------------------------------------
(ulimit -f 100; exec "${run[@]}" --out x --steps 2 --save-every 1) > out.txt 2>&1
status=$?
[ $status -eq 4 ] && grep -q 'File too large' out.txt && ok file_size_limit_is_a_full_disk ||
    bad file_size_limit_is_a_full_disk "exit code $status"
expect resume_where_no_save_succeeded 0 'start +random weights' "${run[@]}" --out x --steps 2 --save-every 1 --resume
"${run[@]}" --out closed --steps 2 --lr 1e30 --grad-clip 0 --warmup-steps 0 --steps 12 <&- >&- 2>&-
status=$?
check closed_descriptors_run test $status -eq 7
check output_does_not_go_into_files_of_the_run python3 -c '
import json
[json.loads(line) for line in open("closed/log.jsonl")]
assert open("closed/.lock").read().count("\n") == 1'

# ---- the directory and its disk -------------------------------------------------------------------------------
if small_disk little 128k; then
    outcome too_little_space 4 '^error: little: expected 0\.2 MiB free .*, found 0\.1 MiB' "${run[@]}" --out little --steps 2
    lacks too_little_space_stops_at_the_start '^step' out.txt
else skip too_little_space 'mounting a tmpfs needs root'; fi
start_long s
mv s s.aside
mkdir s
end_long TERM
[ $status -eq 4 ] && grep -q '^error: s: ' out.txt && ok replaced_directory || bad replaced_directory "exit code $status"
check nothing_is_written_to_the_replacement test -z "$(ls -A s)"
start_long gone
rm -r gone
end_long TERM
check removed_directory test $status -eq 4 -a ! -e gone
if [ $can_trace = yes ]; then
    expect no_locks 0 '^warning: nolock: ' traced -e trace=flock -e inject=flock:error=ENOLCK "${run[@]}" --out nolock --steps 1
    warnings no_locks_gives_one_warning 1
else skip no_locks 'strace does not work here'; fi
finish
