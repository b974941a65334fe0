#!/usr/bin/env bash
# Several ranks on one machine, one thread each: with --deterministic the same bits on 1 to 4 of them,
# otherwise the same losses; checkpoints that any number of ranks can resume; failures that end the
# job. Runs the release build, because the sanitizer would report MPI's own leaks.
. "$(dirname "$0")/lib.sh"
scratch ranks
train=${TRAIN:-$root/build/cpu/train_llama}
ranks() {       # ranks N COMMAND...
    within "${mpi[@]}" -n "$@" || bad "${*: -4}" "$(exit_code $?)"
}
ranks_can_run "$train" || skip_all ranks "$no_ranks"

# ---- a tiny model, an uneven corpus, and a single giant document -----------------------------------
tiny_model tiny 24 40 8
uneven_texts text 31
mkdir giant
seq 1 3000 > giant/all.txt
for c in text giant; do prepare $c --out "$c.bin" --val-frac 0.1; done
common=(--model tiny --from-scratch --train text.bin --max-seqlen 128 --micro-batch-tokens 256
        --batch-tokens 1536 --val-tokens 1024 --val-every 4 --num-samples 1 --sample-tokens 2
        --schedule constant --warmup-steps 0 --lr 1e-3 --keep 0 --threads 1)
run=("$train" "${common[@]}")
exact=("${run[@]}" --deterministic)

# ---- the same bits: 6 micro-batches, divided evenly among 2 ranks but not among 4 --------------------
ranks 1 "${exact[@]}" --out d1 --steps 8 --save-every 4
for n in 2 3 4; do
    ranks $n "${exact[@]}" --out d$n --steps 8 --save-every 4
    same_state "deterministic_on_${n}_ranks" d1/step-00000008 d$n/step-00000008
done
cat > losses.py <<'PY'
import json, sys
def figures(path):
    lines = [json.loads(l) for l in open(path + "/log.jsonl")]
    return [(l["step"], l["loss"], l.get("grad_norm", 0), l.get("docs")) for l in lines if "loss" in l]
bound, runs = float(sys.argv[1]), [figures(p) for p in sys.argv[2:]]
assert len(runs[0]) >= 8
for run in runs[1:]:
    assert len(run) == len(runs[0])
    for a, b in zip(runs[0], run):
        assert a[0] == b[0] and a[3] == b[3], (a, b)
        assert abs(a[1] - b[1]) <= bound * abs(a[1]), (a, b)
        if bound == 0:
            assert a == b, (a, b)
PY
check deterministic_logs_are_equal python3 losses.py 0 d1 d2 d3 d4
same final_is_the_last_checkpoint d1/final/model.safetensors d4/step-00000008/model.safetensors
ranks 2 "${exact[@]}" --out z0 --steps 8 --zero 0
same_state deterministic_zero_0_is_zero_1 d2/step-00000008 z0/step-00000008
for layout in padded rows; do
    for n in 1 4; do ranks $n "${exact[@]}" --out $layout$n --steps 2 --layout $layout; done
    same_state "deterministic_$layout" ${layout}1/step-00000002 ${layout}4/step-00000002
done
for n in 1 4; do ranks $n "${exact[@]}" --train giant.bin --val text.bin --out g$n --steps 3; done
same_state one_giant_document g1/step-00000003 g4/step-00000003

# ---- under a loss mask: documents, segments and micro-batches without a target ----------------------
cp -r text.bin masked.bin && mask_shards masked.bin 'd % 3 > 0 and i // 40 % 2'
for n in 1 2 3; do
    ranks $n "${exact[@]}" --train masked.bin --out md$n --steps 8
    ranks $n "${run[@]}" --train masked.bin --out mw$n --steps 8
done
for n in 2 3; do same_state "masked_on_${n}_ranks" md1/step-00000008 md$n/step-00000008; done
check masked_losses_agree_to_1e-5 python3 losses.py 1e-5 md1 mw1 mw2 mw3
differ a_mask_changes_the_weights {md1,d1}/step-00000008/model.safetensors

# ---- the same losses: distributed by work -------------------------------------------------------------
for n in 1 2 4 8; do
    ranks $n "${run[@]}" --batch-tokens 2048 --out w$n --steps 100 --val-every 0
done
check by_work_100_steps_agree_to_1e-5 python3 losses.py 1e-5 w1 w2 w4 w8
ranks 4 "${run[@]}" --out w40 --steps 8 --zero 0
ranks 4 "${run[@]}" --out w41 --steps 8
same_state by_work_zero_0_is_zero_1 w40/step-00000008 w41/step-00000008

# if the order of a sum did not change its bits, the tests above would show nothing
differ order_of_a_sum_changes_bits {w41,d1}/step-00000008/model.safetensors

# ---- validation and samples only -----------------------------------------------------------------------
for n in 1 2 3; do
    ranks $n "${exact[@]}" --out nothing --steps 0
    grep -A 2 '^val after step 0' out.txt > "e$n.txt" || bad "steps_0_on_$n" 'no validation'
    [ "$n" -eq 1 ] || same "steps_0_on_${n}_ranks" e1.txt "e$n.txt"
done
check steps_0_writes_nothing test ! -e nothing

# ---- resuming with another number of ranks ------------------------------------------------------------
steps=2
for n in 1 2 4 1; do
    ranks $n "${exact[@]}" --out e --steps $steps --resume
    steps=$((steps + 2))
done
same_state resume_on_1_2_4_1_ranks d1/step-00000008 e/step-00000008

# ---- failures end all ranks ---------------------------------------------------------------------------
expect different_options 9 'differences in lr \(rank 1\)' \
    "${mpi[@]}" -n 1 "${run[@]}" --out m --steps 1 : -n 1 "${run[@]}" --out m --steps 1 --lr 2e-3
expect different_data 9 'training data \(rank 1\)' "${mpi[@]}" -n 1 "${run[@]}" --out m --steps 1 \
    : -n 1 "${run[@]/text.bin/giant.bin}" --val text.bin --out m --steps 1
# the same directory name, other weights: the last byte of the last one differs
for d in here there; do mkdir $d && cp -r d1/final $d/m; done
size=$(stat -c %s there/m/model.safetensors)
printf '\x3c' | dd of=there/m/model.safetensors bs=1 seek=$((size - 1)) conv=notrunc 2> out.txt
loaded=("$train" --model m "${common[@]:3}" --train "$work/text.bin" --out "$work/m" --steps 1)
for zero in 0 1; do
    expect "different_weights_zero_$zero" 9 'found differences in weights \(rank 1\)$' \
        "${mpi[@]}" -n 1 --wdir here "${loaded[@]}" --zero $zero \
        : -n 1 --wdir there "${loaded[@]}" --zero $zero
done
check nothing_is_written_before_ranks_agree test ! -e m
expect error_on_one_rank 3 'error: nowhere' "${mpi[@]}" -n 3 "${run[@]}" --out m \
    : -n 1 "${run[@]/text.bin/nowhere}" --out m
expect error_on_all_ranks 3 'error: nowhere' "${mpi[@]}" -n 4 "${run[@]/text.bin/nowhere}" --out m
expect unknown_flag 2 'layot: unknown option' "${mpi[@]}" -n 2 "$train" --layot packed
# a library has already written to standard error: hwloc without a topology
mkdir no_topology
HWLOC_FSROOT=$work/no_topology expect one_error_after_output_of_a_library 2 'layot: unknown option' \
    "${mpi[@]}" -n 4 "$train" --layot packed
expect more_ranks_than_micro_batches 2 'multiple of 1024' \
    "${mpi[@]}" -n 4 "${run[@]}" --batch-tokens 512 --out m
expect compare_on_several_ranks 2 'one rank only' "${mpi[@]}" -n 2 "${run[@]}" --compare
expect out_holds_another_run 2 'found a run' "${mpi[@]}" -n 2 "${run[@]}" --out d1
expect plan_reports_memory_saved 0 '^ranks +2, .* saves [0-9.]+ MiB per rank' \
    "${mpi[@]}" -n 2 "${run[@]}" --dry-run
check only_rank_0_prints test "$(grep -c '^ranks' out.txt)" -eq 1
# two ranks of a machine have half of its memory each; a quarter of slack for what else runs here
found_mib() { sed -n 's/^error: device memory: .* found \([0-9]*\).* MiB$/\1/p' out.txt; }
large=("${run[@]}" --micro-batch-tokens 200000000)
outcome too_large_for_the_machine 6 'device memory' "${large[@]}" --batch-tokens 200000000 --out m
all_mib=$(found_mib)
outcome too_large_for_two_ranks 6 'device memory' "${mpi[@]}" -n 2 "${large[@]}" --batch-tokens 400000000 --out m
half_mib=$(found_mib)
check ranks_share_the_machines_memory test "$((4 * half_mib))" -lt "$((3 * all_mib))"
core=$(sed -n 's/^Cpus_allowed_list:[^0-9]*\([0-9]*\).*/\1/p' /proc/self/status)
expect plan_reports_cores 0 ", cores $core: " \
    "${mpi[@]}" -n 2 taskset -c "$core" "${run[@]}" --dry-run
expect other_ranks_are_missing 2 'started as one of several ranks' \
    env OMPI_COMM_WORLD_SIZE=2 "${run[@]}" --out m
for variant in asan emu; do
    [ -x "$root/build/$variant/train_llama" ] || continue
    expect "${variant}_build_has_one_rank" 2 'started as one of several ranks' \
        env OMPI_COMM_WORLD_SIZE=2 "$root/build/$variant/train_llama" "${common[@]}" --out m
done
# btl: MPI's shared memory is a file as well
expect disk_full 4 'error: full/' "${mpi[@]}" --mca btl self,tcp -n 2 bash -c \
    'ulimit -f 100 && trap "" XFSZ && exec "$@"' sh "${run[@]}" --out full --steps 1
check disk_full_leaves_no_half_checkpoint test -z "$(ls -d full/step-* 2> /dev/null)"

# a signal to one rank stops all of them after the step; a rank that dies ends the job
# start_long OUT: waits for the first step; $job is mpirun, $child rank 1
start_long() {
    rm -f long.txt          # of the last job
    timeout -k 5 "$limit_s" "${mpi[@]}" -n 2 "${run[@]}" --out "$work/$1" --steps 1000000 \
        --val-every 0 \
        > long.txt 2>&1 &
    job=$!
    await_line $job '^step' long.txt || bad "$1" 'ended before its first step'
    child=$(pids_of "--out $work/$1 --steps 1000000" | while read -r p; do
        grep -qz '^OMPI_COMM_WORLD_RANK=1$' "/proc/$p/environ" 2> /dev/null && echo "$p"; done)
}
start_long s
kill -USR1 $child
wait $job
status=$?
cp long.txt out.txt
if [ $status -eq 75 ] && ls -d s/step-* > /dev/null 2>&1; then ok signal_to_one_rank_stops_all
else bad signal_to_one_rank_stops_all "exit code $status"; fi
start_long k
kill -KILL $child
wait $job
status=$?
cp long.txt out.txt
if [ $status -ne 0 ] && [ $status -ne 124 ] && await_gone "--out $work/k --steps 1000000"
then ok death_of_one_rank_ends_all
else bad death_of_one_rank_ends_all "exit code $status"; fi
finish
