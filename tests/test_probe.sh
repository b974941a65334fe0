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
        --val-every 0 --num-samples 0 --steps 2 "$@"
}
check sm80 train --attention sm80 --out sm80
outcome right 0 'attention sm90' train --out right
lacks right_without_a_warning '^warning: the attention' out.txt
differ sm90_has_other_bits {sm80,right}/step-00000002/model.safetensors
# not probed: another process has the GPU for itself; a signal ended the probe
EMU_EXCLUSIVE=$work/lock outcome exclusive 0 'attention sm90' train --dry-run
WRONG_ATTENTION=signal outcome signal 0 'attention sm90' train --dry-run
export WRONG_ATTENTION
while read -r WRONG_ATTENTION words; do
    outcome "$WRONG_ATTENTION" 0 "^warning: the attention kernels of sm90 $words on this GPU; sm80's" \
        train --out "$WRONG_ATTENTION"
    same_state "${WRONG_ATTENTION}_has_the_bits_of_sm80" {sm80,"$WRONG_ATTENTION"}/step-00000002
done << 'WRONG'
result give other results than those of sm80
gradient give other results than those of sm80
crash fail
hang do not return
WRONG
WRONG_ATTENTION=crash
outcome no_probe_of_sm80 0 'attention sm80' train --attention sm80 --out other
lacks sm80_without_a_warning '^warning: the attention' out.txt
finish
