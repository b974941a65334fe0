#!/usr/bin/env bash
# Ranks that are killed, stopped, hang, fail, leave or drift in a job of three: the job's exit code,
# one error that says where, no process left, an intact checkpoint, and a resume to the same bits. The
# program is the release build linked with tests/run_fault.c.
[ -w /dev/shm ] && TMPDIR=/dev/shm      # a busy disk takes seconds for an fsync
. "$(dirname "$0")/lib.sh"
train=$release faulty=$root/build/cpu/train_llama_faulty
with_ranks ranks "$faulty" || finish
# ---- a tiny model, an uneven corpus, and the reference: the job without a fault ---------------------
tiny_model tiny 24 40 8
corpus 31
flags=(--model "$work/tiny" --from-scratch --train "$work/corpus" --max-seqlen 128
       --micro-batch-tokens 256 --batch-tokens 1536 --val-tokens 1024 --val-every 2
       --num-samples 0 --schedule constant --warmup-steps 0 --lr 1e-3 --keep 0 --threads 1
       --deterministic --steps 6 --save-every 2 --heartbeat-seconds 5)
three=("${mpi[@]}" -n 3 "$faulty" "${flags[@]}")
timeout -k 5 "$limit_s" "$train" "${flags[@]}" --out "$work/reference" > reference.txt 2>&1 || bad reference "exit code $?"
# ---- several jobs at a time, most of which wait; then each is checked -------------------------------
start() { FAULT=$2 beside "$1" "${three[@]}" --out "$work/$1" "${@:3}"; }     # start NAME FAULT FLAGS...
# ends NAME CODE PATTERN: with one error or none, no process is left, and the newest checkpoint is intact
ends() {
    expect "$1" "$2" "$3" ended "$1"
    [[ $2 != @(0|75|137) ]] || lacks "${1}_is_no_error" 'error: ' out.txt
    check "${1}_leaves_no_process" await_gone "$work/$1"
    check "${1}_leaves_a_checkpoint" "$train" "${flags[@]}" --out "$work/$1" --resume --dry-run
    lacks "${1}_leaves_it_intact" 'warning: skipping' out.txt
}
# NAME | FAULT | exit code | a line that matches. Open MPI's mpirun names a killed rank
# itself, with 128 + the signal.
killed='mpirun noticed that process rank' stopped='on .* was stopped for [567] s in' stuck='error: ranks: rank' fails='error: a file: expected words, found none \(rank 2 on'
table="
kill_in_set_up     | kill:0:set-up:0    | 137 | $killed 0 .* signal 9
kill_in_reduce     | kill:1:reduce:4    | 137 | $killed 1 .* signal 9
kill_in_save       | kill:0:save:4      | 137 | $killed 0 .* signal 9
stop_in_set_up     | stop:0:set-up:0    | 8   | $stuck 0 $stopped set-up$
stop_in_forward    | stop:0:forward:4   | 8   | $stuck 0 $stopped forward of step 4$
stop_in_validate   | stop:1:validate:4  | 8   | $stuck 1 $stopped validate of step 4$
stop_in_save       | stop:2:save:4      | 8   | $stuck 2 $stopped save of step 4$
spin_in_backward   | spin:1:backward:4  | 8   | $stuck 1 on .* stuck for .* in backward of step 4
spin_in_update     | spin:2:update:4    | 8   | $stuck 2 on .* stuck for .* in update of step 4
spin_in_save       | spin:0:save:4      | 8   | $stuck 0 on .* stuck for .* in save of step 4
hang_beside_steps  | hold:0:save:4 hold:0:forward:5 | 8   | $stuck 0 on .* stuck for .* in await save of step 6
fail_in_set_up     | fail:2:set-up:0    | 3   | $fails
fail_in_forward    | fail:2:forward:4   | 3   | $fails
fail_everywhere    | fail:0:update:4 fail:1:update:4 fail:2:update:4 | 3 | error: a file: expected words
exit_in_update     | exit:1:update:4    | 7   | $stuck 1 ended with exit code 7 in update of step 4
drift              | drift:1:update:3   | 9   | error: .* identical replicas .* weights \\(rank 1\\)
signal_to_one_rank | signal:1:forward:3 | 75  | continues from step 4
"
cases() { tr -s ' ' <<< "$table" | sed 's/ | /\t/g' | grep .; }
while IFS=$'\t' read -r name fault _; do start "$name" "$fault"; done < <(cases)
# each fsync of rank 0 takes less than the limit, all of a save longer than the others wait in silence
SLOW_MS=1300 start slow_save slow:0:save:4 --heartbeat-seconds 3
SLOW_MS=12000 start quiet_set_up quiet:1:set-up:0 --steps 1
# all of a job is suspended for longer than the limit
SLOW_MS=3000 start suspended quiet:1:forward:3
await_line $! '^step +2/' suspended.txt
kill -STOP $(pids_of "$work/suspended")
sleep 7
kill -CONT $(pids_of "$work/suspended")
# scripts/train_until_done.sh meanwhile
PAUSE=0 beside loop "$root/scripts/train_until_done.sh" bash -c \
    'mkdir once 2> /dev/null && export FAULT=kill:1:reduce:5; exec "$@"' sh "${three[@]}" --out "$work/loop"
FAULT=kill:1:reduce:1 RESTARTS=1 PAUSE=0 beside hopeless "$root/scripts/train_until_done.sh" "${three[@]}" \
    --out "$work/hopeless"
PAUSE=0 beside usage "$root/scripts/train_until_done.sh" "$train" --no-such-flag
wait
while IFS=$'\t' read -r name _ code pattern; do ends "$name" "$code" "$pattern"; done < <(cases)
for name in slow_save quiet_set_up suspended; do ends $name 0 '^done'; done
resumed=(kill_in_reduce kill_in_save stop_in_validate drift signal_to_one_rank)
for name in "${resumed[@]}"; do     # with another number of ranks
    beside "${name}_resumed" "${mpi[@]}" -n 2 "$train" "${flags[@]}" --out "$work/$name" --resume
done
wait
for name in "${resumed[@]}"; do
    same_state "${name}_resumes_to_the_same_bits" {"$name",reference}/step-00000006
done
for loop in 'loop 0 1' 'hopeless 137 1' 'usage 2 0'; do     # its exit code, and restarts
    name=${loop%% *}
    check "$name" test "$name $(cat $name.code) $(grep -c 'restarting in' $name.txt)" = "$loop"
done
same until_done_same_bits {loop,reference}/final/model.safetensors
# ---- a rank that never starts; a killed launcher ---------------------------------------------------
RANKS_JOIN_SECONDS=2 expect a_rank_that_never_joins 8 'rank 0 on .* has waited for others for .* in start' \
    "${mpi[@]}" -n 3 bash -c '[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exec sleep 600; exec "$@"' sh \
    "$train" "${flags[@]}" --out "$work/absent"
"${mpi[@]}" -n 3 "$train" "${flags[@]}" --steps 1000000 --out "$work/orphans" > out.txt 2>&1 &
launcher=$!
disown $launcher        # else bash reports that it was killed
await_line $launcher '^step' out.txt || bad orphans 'ended before its first step'
kill -9 $launcher
if await_gone "$work/orphans"; then ok ranks_end_with_their_launcher
else bad orphans 'ranks are left'; fi
finish
