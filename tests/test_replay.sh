#!/usr/bin/env bash
# Numbers that are wrong: --replay-every finds a machine that miscalculates, and a run that stops on
# steps that are not finite leaves a checkpoint from which they can be computed again.
. "$(dirname "$0")/lib.sh"
tiny_model tiny 24 40 8
corpus 31
run=("$root/build/cpu/train_llama_faulty" --model tiny --from-scratch --train corpus --max-seqlen 128
     --micro-batch-tokens 256 --batch-tokens 1024 --val-every 0 --num-samples 0 --steps 12)
check undisturbed "${run[@]}" --out a
# ---- one bit, once: in a step that is computed twice, and in one that is not
replays() { "${run[@]}" --replay-every 2 "$@"; }
check replays_change_no_bit replays --out b
same_state the_bits_of_a_run_without {a,b}/step-00000012
export FAULT=flip:0:forward:4
expect a_wrong_bit 11 'rank 0, step 4: expected gradients of model.* with the same bits' replays --out c
check nothing_of_that_step_is_saved test ! -e c/step-00000004
FAULT=flip:0:forward:5 check between_replays replays --out d
differ it_goes_unseen {a,d}/step-00000012/model.safetensors
if with_ranks ranks "${run[0]}"; then
    both=("${mpi[@]}" -n 2 "${run[@]}" --replay-every 4)
    FAULT=flip:1:forward:4 expect it_is_rank_1 11 'rank 1, step 4: expected' "${both[@]}" --out e
    unset FAULT
    check two_ranks "${mpi[@]}" -n 2 "${run[@]}" --out f
    check two_ranks_replayed "${both[@]}" --out g
    same_state the_bits_of_two_ranks {f,g}/step-00000012
    check in_order "${both[@]}" --deterministic --out h
    check in_order_alone "${run[@]}" --deterministic --out i
    same_state leaves_are_replayed_too {i,h}/step-00000012
    same_losses with_the_losses_of_all_leaves 0 0 12 i h
fi
# ---- steps that are not finite
export FAULT=nan:0:forward:8
expect not_finite 7 '^saved n/step-00000007: --resume=DIR' "${run[@]}" --save-every 3 --keep 2 --out n
check older_checkpoints_stay test -e n/step-00000006
FAULT=nan:0:forward:10 expect resumed_between_them 7 '^saved o/step-00000009: --resume' "${run[@]}" --resume=n/step-00000009 --out o
again=("${run[@]}" --resume=n/step-00000007)
expect the_same_again 7 'training diverged: 5 steps in a row' "${again[@]}" --out again
check_python with_the_same_numbers <<'PY'
first, again = ([(s["step"], s["loss"], s["lr"]) for s in steps(run)] for run in ("n", "again"))
assert first[7:] == again and [s[0] for s in first] == [*range(1, 13)], again
PY
unset FAULT
check repaired "${again[@]}" --out m
same_state as_if_nothing_had_happened {a,m}/step-00000012
finish
