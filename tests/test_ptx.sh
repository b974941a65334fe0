#!/usr/bin/env bash
# The kernels as nvcc compiles them, their PTX run by the emulator (dev/emu/ptx.py): wrappers, operations and
# a training run for Hopper. PTX=all, as make test-ptx: also for compute_80 and 120, every shape and schedule, and all
# suites of whole runs.
. "$(dirname "$0")/lib.sh"
unset $(compgen -v EMU_)       # each run sets its own
cd "$root" || exit 1
PATH=$PATH:/usr/local/cuda/bin with_program compiled_kernels nvcc || finish
compiled=$root/build/ptx/train_llama all=$([ "${PTX:-}" = all ] && echo yes)
make_ptx() { make BACKEND=cpu $([ "$all" ] || echo PTX_ARCHS=90a) "$@"; }
evidence() { grep -aE '^EMU|FAILED|rror' "$work/out.txt" | tail -n 8; }
if ! within make_ptx -s -j2 build/ptx/{test_conform,test_ops,train_llama} \
    ${all:+build/ptx/test_cuda_nccl} build/{emu,cpu}/train_llama; then
    bad build 'make build/ptx/test_ops'
    finish
fi
passes='^[1-9][0-9]* passed, 0 failed'
outcome wrappers 0 "$passes" env EMU_PROXY=1 build/ptx/test_conform
sed 's/cp\.async\.wait_group/cp.async.wait_groups/' build/ptx/90a/tests/test_conform.ptx > "$work/new.ptx"
outcome unknown_instructions 1 'new\.ptx:[0-9]+: no rule for cp\.async\.wait_groups ' dev/emu/ptx.py "$work/new.ptx"
[ "$all" ] || export ONE_RUN=yes
for arch in 90 ${all:+80 120}; do
    outcome "operations_sm_$arch" 0 "$passes" env EMU_ARCH=$arch build/ptx/test_ops $([ "$all" ] || echo --quick)
    for kind in ${all:+random prio}; do
        outcome "operations_sm_${arch}_$kind" 0 "$passes" env EMU_ARCH=$arch EMU_SCHED=$kind EMU_ASYNC=random \
            EMU_PROXY=1 build/ptx/test_ops --quick
    done
    EMU_ARCH=$arch TRAIN=$compiled outcome "training_sm_$arch" 0 ' 0 failed' tests/test_cuda_train.sh
done
[ "$all" ] || finish
CUDA=$compiled outcome adapters 0 ' 0 failed' tests/test_lora.sh
TRAIN=$compiled RANKS=2 outcome ranks 0 ' 0 failed' tests/test_cuda_ranks.sh
finish
