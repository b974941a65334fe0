#!/usr/bin/env bash
# Ranks that are killed, stopped, hang, fail or drift, in each phase of a job of three: one error that
# names the rank, no process left, checkpoints intact, and a resume to the same bits. The program is
# the release build linked with tests/phase_fault.c. UNPAD_FULL=1: every phase times every rank.
. "$(dirname "$0")/lib.sh"
scratch failure
train=$root/build/cpu/train_llama faulty=$root/build/cpu/train_llama_faulty
evidence() { tail -n 12 "$work/$1.txt"; }
clean_up() {
    local left
    left=$(pids_of "$work/")
    [ -z "$left" ] || kill -9 $left 2> /dev/null
    rm -rf "$work"
}
trap clean_up EXIT

ranks_can_run "$faulty" || skip_all ranks "$no_ranks"

# ---- a tiny model, an uneven corpus, and the reference: the job without a fault ---------------------
tiny_model tiny 24 40 8
uneven_texts text 31
prepare text --out text.bin --val-frac 0.1
flags=(--model "$work/tiny" --from-scratch --train "$work/text.bin" --max-seqlen 128
       --micro-batch-tokens 256 --batch-tokens 1536 --val-tokens 1024 --val-every 2
       --num-samples 0 --schedule constant --warmup-steps 0 --lr 1e-3 --keep 0 --threads 1
       --deterministic --steps 6 --save-every 2 --heartbeat-seconds 3)
mpi+=(-n 3)
timeout -k 5 "$limit_s" "$train" "${flags[@]}" --out "$work/reference" > reference.txt 2>&1 ||
    bad reference "exit code $?"

# ---- concurrent jobs: start NAME FAULT [FLAGS...] each, wait, check each ----------------------------
start() {
    local name=$1 fault=$2
    shift 2
    {
        HUNG=$work/$name.hung timeout -k 5 "$limit_s" "${mpi[@]}" -x FAULT="$fault" "$faulty" \
            "${flags[@]}" --out "$work/$name" "$@" > "$name.txt" 2>&1
        echo $? > "$name.code"
    } &
    while [ "$(jobs -pr | wc -l)" -ge 9 ]; do wait -n; done
}
# check NAME 'EXIT CODES' PATTERN: one error, which matches; no process is left; the newest checkpoint
# is intact
check() {
    local name=$1 code
    code=$(cat "$name.code")
    if ! [[ " $2 " = *" $code "* ]]; then bad "$name" "exit code $code, expected one of $2"
    elif ! grep -aqE "error: $3" "$name.txt"; then bad "$name" "no error matches $3"
    elif ! [ "$(grep -ac 'error: ' "$name.txt") $(grep -ac 'hint: ' "$name.txt")" = '1 1' ]; then
        bad "$name" 'expected one error: line and one hint: line'
    elif [ -n "$(pids_of "--out $work/$name ")" ]; then bad "$name" 'a process is left'
    elif ! "$train" "${flags[@]}" --out "$work/$name" --resume --dry-run > resume.txt 2>&1 ||
        grep -q 'warning: skipping' resume.txt; then
        cat resume.txt >> "$name.txt"
        bad "$name" 'the newest checkpoint is damaged'
    else ok "$name"; fi
}
# resumed with another number of ranks, to the same bits: start_resume NAME, wait, check_resume NAME
start_resume() {
    {
        timeout -k 5 "$limit_s" mpirun --allow-run-as-root --oversubscribe -n 2 "$train" "${flags[@]}" \
            --out "$work/$1" --resume > "$1_resumed.txt" 2>&1
        echo $? > "$1_resumed.code"
    } &
}
check_resume() {
    local name=$1_resumed f=step-00000006/optimizer.safetensors
    if [ "$(cat "$name.code")" -ne 0 ]; then bad "$name" "exit code $(cat "$name.code")"
    elif ! cmp "$1/$f" "reference/$f" || ! cmp {"$1",reference}/final/model.safetensors; then
        bad "$name" 'other bits'
    else ok "$name"; fi
}

# ---- killed: mpirun ends with 137 when it sees the killed rank first -------------------------------
phases=(set-up read forward backward reduce update validate compare save)
step_of() { if [ "$1" = set-up ]; then echo 0; else echo 4; fi; }
where() { if [ "$1" = set-up ]; then echo "$1"; else echo "$1 of step 4"; fi; }
ranks_for() {       # ranks_for INDEX: all, or one of them
    if [ -n "${UNPAD_FULL:-}" ]; then echo 0 1 2; else echo $(($1 % 3)); fi
}
each_phase() {      # each_phase DO...: DO phase rank for each
    local i r
    for i in "${!phases[@]}"; do
        for r in $(ranks_for $((i + ${offset:-0}))); do "$@" "${phases[i]}" "$r"; done
    done
}
start_kill() { start "kill_rank_$2_in_$1" "kill:$2:$1:$(step_of "$1")"; }
check_kill() { check "kill_rank_$2_in_$1" '137 8' "ranks: rank $2 on .* lost in $(where "$1")\$"; }
start_stop() { start "stop_rank_$2_in_$1" "stop:$2:$1:$(step_of "$1")"; }
check_stop() {
    check "stop_rank_$2_in_$1" '8 137' "ranks: rank $2 on .* silent for [2-9] s in $(where "$1")\$"
}
# at the same time: scripts/train_until_done.sh
until_done() {      # until_done NAME COMMAND...
    local name=$1
    shift
    { PAUSE=0 timeout -k 5 "$limit_s" "$root/scripts/train_until_done.sh" "$@" > "$name.txt" 2>&1
      echo $? > "$name.code"; } &
}
job=("${mpi[@]}" "$faulty" "${flags[@]}")
until_done loop bash -c 'mkdir once && export FAULT=kill:1:reduce:5; exec "$@"' sh "${job[@]}" \
    --out "$work/loop"
FAULT=kill:1:reduce:1 RESTARTS=1 until_done hopeless "${job[@]}" --out "$work/hopeless"
until_done usage "$train" --no-such-flag

each_phase start_kill
offset=1 each_phase start_stop
for r in 0 2; do start "spin_rank_$r" "spin:$r:backward:4"; done
for r in 0 2; do        # ranks 0 and 2 wait for rank 1 in a collective when one of them hangs
    start "hang_rank_$r" "hang:$r:reduce:4 late:1:reduce:4"
done
start hang_in_save spin:0:save:4
export QUIET_MS=6000 SLOW_MS=1000
start slow_save slow:0:save:4
start quiet_set_up quiet:1:set-up:0 --steps 1
start drifting_weights drift:1:update:3
start error_of_one_rank fail:2:forward:4
wait
each_phase check_kill
offset=1 each_phase check_stop
for r in 0 2; do
    check "spin_rank_$r" 8 "ranks: rank $r on .* stuck for [2-9] s in backward of step 4, while others"
done
for r in 0 2; do
    check "hang_rank_$r" 8 "ranks: rank $r on .* stuck for [2-9] s in reduce of step 4, while others"
done
check hang_in_save 8 'ranks: rank 0 on .* stuck for [2-9] s in save of step 4, while others'
if [ "$(cat slow_save.code)" -eq 0 ] && ! grep -q 'error: ' slow_save.txt
then ok a_save_of_many_slow_parts_is_not_hung
else bad slow_save "exit code $(cat slow_save.code)"; fi
if [ "$(cat quiet_set_up.code)" -eq 0 ] && ! grep -q 'error: ' quiet_set_up.txt
then ok a_long_set_up_is_not_hung; else bad quiet_set_up "exit code $(cat quiet_set_up.code)"; fi
check drifting_weights 9 'ranks: expected identical replicas .* differences in weights \(rank 1\)$'
check error_of_one_rank 3 'a file: expected words, found none \(rank 2 on .*\)$'
resumed=(kill_rank_*_in_reduce/ kill_rank_*_in_save/ stop_rank_*_in_validate/ drifting_weights/)
for name in "${resumed[@]}"; do start_resume "${name%/}"; done
wait
for name in "${resumed[@]}"; do check_resume "${name%/}"; done

# check_loop NAME 'EXIT CODES' RESTARTS
check_loop() {
    local code
    code=$(cat "$1.code")
    if [[ " $2 " = *" $code "* ]] && [ "$(grep -c 'restarting in' "$1.txt")" -eq "$3" ]
    then ok "until_done_$1"; else bad "$1" "exit code $code"; fi
}
check_loop loop 0 1
cmp {loop,reference}/final/model.safetensors && ok until_done_same_bits || bad loop 'other bits'
check_loop hopeless '137 8' 1
check_loop usage 2 0

# ---- a rank that never connects: before MPI_Init, where MPI would wait forever -----------------------
# absent NAME PATTERN COMMAND...: the command is a wrapper around the program
absent() {
    local name=$1 pattern=$2
    shift 2
    RANKS_JOIN_SECONDS=3 expect "$name" 8 "$pattern" "${mpi[@]}" bash -c \
        '[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exec sleep 300; exec "$@"' sh "$@" \
        "$train" "${flags[@]}" --out "$work/absent"
}
absent missing_rank_is_named 'within 3 s, found none of rank 1$' env
absent wait_in_mpi_init_ends_too 'expected 3 ranks in MPI_Init within 3 s' \
    env -u OMPI_COMM_WORLD_LOCAL_SIZE

# ---- a killed launcher; different programs ----------------------------------------------------------
"${mpi[@]}" "$train" "${flags[@]}" --steps 1000000 --out "$work/orphans" > orphans.txt 2>&1 &
launcher=$!
disown $launcher        # else bash reports that it was killed
await_line $launcher '^step' orphans.txt || bad orphans 'ended before its first step'
kill -9 $launcher
if await_gone "--out $work/orphans"; then ok ranks_end_with_their_launcher
else bad orphans 'ranks are left'; fi
timeout -k 5 "$limit_s" mpirun --allow-run-as-root --oversubscribe -n 1 "$train" "${flags[@]}" --out "$work/p" \
    : -n 1 "$faulty" "${flags[@]}" --out "$work/p" > program.txt 2>&1
code=$?
if [ $code -eq 9 ] && grep -q 'differences in the program file (rank 1)$' program.txt; then
    ok different_programs
else bad program "exit code $code"; fi

finish
