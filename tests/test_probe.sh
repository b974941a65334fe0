#!/usr/bin/env bash
# The probe of Hopper's attention at the start of a run, emulated: kernels that are wrong, crash or
# hang (tests/run_fault.c) are replaced by sm_80's, with a warning, and the run continues.
. "$(dirname "$0")/lib.sh"
unset $(compgen -v EMU_)
faulty=$root/build/emu/train_llama_faulty
tiny_model tiny 64 96 64
corpus 20
train() {       # train OPTION...
    "$faulty" --model tiny --from-scratch --train corpus --max-seqlen 200 --micro-batch-tokens 256 \
        --batch-tokens 256 --val-every 0 --num-samples 0 --steps 1 "$@" < /dev/null
}
WRONG_ATTENTION=hang train --out hang > hang.txt 2>&1 &     # half a minute, beside all others
check sm80 train --attention sm80 --out sm80
outcome right 0 'attention sm90' train --out right
lacks right_without_a_warning '^warning: the attention' out.txt
differ sm90_has_other_bits {sm80,right}/step-00000001/model.safetensors
EMU_EXCLUSIVE=$work/lock outcome no_gpu_left_to_probe 0 'attention sm90' train --out left
WRONG_ATTENTION=signal outcome probe_ended_by_a_signal 0 'attention sm90' train --out ended
WRONG_ATTENTION=crash outcome no_probe_where_nothing_is_trained 0 'attention sm90' train --dry-run
lacks nothing_is_said_of_it '^warning: the attention' out.txt
CUDA_INJECTION64_PATH=x outcome no_other_path_under_a_profiler 0 \
    '^warning: the attention kernels of sm90 run without having been probed: a profiler' train --out watched
same_state watched_has_the_bits_of_sm90 {right,watched}/step-00000001
# wrong NAME WORDS: what the run with this fault says, and whose kernels it takes
wrong() {
    has "$1" "^warning: the attention kernels of sm90 $2 on this GPU; sm80's" "$1.txt"
    same_state "$1_has_the_bits_of_sm80" {sm80,"$1"}/step-00000001
}
while read -r name words; do
    WRONG_ATTENTION=$name train --out "$name" > "$name.txt" 2>&1
    wrong "$name" "$words"
done << 'WRONG'
result give other results than those of sm80
gradient give other results than those of sm80
crash fail
WRONG
WRONG_ATTENTION=crash outcome no_probe_of_sm80 0 'attention sm80' train --attention sm80 --out other
lacks sm80_without_a_warning '^warning: the attention' out.txt
wait
wrong hang 'do not return'
finish
