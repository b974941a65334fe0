#!/usr/bin/env bash
# The kernels as nvcc compiles them, their PTX run by the emulator (dev/emu/ptx.py): wrappers, operations and
# a training run for Hopper. PTX=all, as make test-ptx: also for compute_80 and 120, every shape and schedule, all
# suites of whole runs, and faults in the text of ptx.cuh, which the host compiler does not see.
. "$(dirname "$0")/lib.sh"
unset $(compgen -v EMU_)       # each run sets its own
cd "$root" || exit 1
PATH=$PATH:/usr/local/cuda/bin command -v nvcc > /dev/null || skip_all compiled_kernels 'nvcc is not installed'
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
TRAIN=$compiled outcome families 0 ' 0 failed' tests/test_family.sh
CUDA=$compiled outcome adapters 0 ' 0 failed' tests/test_lora.sh
TRAIN=$compiled RANKS=2 outcome ranks 0 ' 0 failed' tests/test_cuda_ranks.sh

# fault NAME SED: with the text of ptx.cuh changed like that a case of test_conform fails, in place of whose PTX
# the changed one is linked, by make's own commands
file=tests/test_conform planted=build/ptx/planted
make_ptx -n V=1 PTX_ARCHS=90a -W $file.cu build/ptx/test_conform | grep -E "ptx/90a/$file\.|^g.. .*/test_conform " |
    sed "s,ptx/90a/$file\.,ptx/planted/$file.,g; s,-ptx $file.cu,-ptx $planted/src/$file.cu,
         s,-o build/ptx/test,-o $planted/test," > "$work/commands"
host_sees() { g++ -E -P -w -xc++ -Idev/emu/include "$1/ptx.cuh"; }
fault() {
    local changed=$planted/src/kernels/cuda why=
    rm -rf $planted && mkdir -p $planted/{src,tests} && cp -r kernels tests data $planted/src
    sed -i "$2" $changed/ptx.cuh
    if cmp -s {kernels/cuda,$changed}/ptx.cuh; then why='nothing has changed'
    elif ! cmp <(host_sees kernels/cuda) <(host_sees $changed); then why='the host compiler sees it'
    elif ! within bash -e "$work/commands"; then why='it does not compile'
    elif within env EMU_PROXY=1 $planted/test_conform; then why='not seen'
    elif ! grep -aqE '^EMU|^FAILED' "$work/out.txt"; then why='no case fails'; fi
    judge "$1" "$why"
    [ -n "$why" ] || sed -nE 's/^(EMU|FAILED)/    seen: &/p' "$work/out.txt"
}
fault operands_of_mma 's/{%8,%9}/{%9,%8}/'
fault register_of_mma '/mma_16816/,/^}/s/"r"(a\[1\]), "r"(a\[2\])/"r"(a[2]), "r"(a[1])/'
fault no_trans 's/x4\.trans/x4/'
fault copy_without_zeros 's/valid ? 16 : 0/valid ? 16 : 16/'
fault coordinates_of_tma 's/{%3, %4, %5}/{%4, %3, %5}/'
fault parity 's/: "r"(b), "r"(parity)/: "r"(b), "r"(parity ^ 1)/'
fault no_proxy_fence 's/fence\.proxy\.async\.shared::cta;//'
fault immediate_of_wgmma 's/p, 1, 1, %35, %36/p, 1, 1, %36, %35/; s/p, 1, 1, %67, %68/p, 1, 1, %68, %67/'
finish
