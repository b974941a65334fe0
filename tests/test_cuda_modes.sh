#!/usr/bin/env bash
# The table of operations under AddressSanitizer and UBSan, and under other settings of the emulator (more
# seeds: make test-dev). --filter TEXT: the runs whose name contains it; hopper: every shape under both of
# its schedules.
. "$(dirname "$0")/lib.sh"
unset $(compgen -v EMU_)       # each run sets its own
chosen=${2:-}
cd "$root" || exit 1
export ASAN_OPTIONS=detect_leaks=0      # fibers of a failed case are no leaks
evidence() { grep -avE '^ok ' "$work/out.txt" | tail -n 15; }
# start NAME SETTINGS OPTION...: in the background
names=() build=emu most=4
start() {
    [[ $1 = *"$chosen"* ]] || return
    names+=("$1")
    beside "$1" env $2 build/$build/test_ops "${@:3}"
}
# bounds of registers and shared memory; all shapes: make test-sanitizers
build=emusan start sanitized '' --quick
start sm_80 EMU_ARCH=80 --quick
start sm_86 EMU_ARCH=86 --quick --filter attention      # sm_120 has as much shared memory
start swiglu_of_a_gpu EMU_FAST_MATH=1 --filter swiglu
start cross_entropy_of_a_gpu EMU_FAST_MATH=1 --filter cross_entropy
start on_streams 'EMU_STREAMS=1 EMU_SCHED=prio EMU_ASYNC=random' --quick
start rmsnorm_prio_schedule EMU_SCHED=prio --filter rmsnorm_backward
# cuBLASLt as it may be elsewhere; copies and conversions while the stream lags behind the host
start another_algorithm EMU_LT_ALGO=1 --quick --filter matmul
start algorithms_that_refuse EMU_LT_ALGO=refuse --filter matmul_forward
for filter in copies weights_are_exact; do
    start "${filter}_on_a_slow_stream" 'EMU_STREAMS=1 EMU_SLOW_STREAM=1 EMU_LAG_MS=50' --filter $filter
done
# the fence is in a function that both passes call; of the backward pass it takes three times as long
start hopper_proxy_fences "EMU_SCHED=random EMU_ASYNC=random EMU_PROXY=1" --quick \
    --filter $([ "$chosen" ] || echo forward_)sm90
[ -z "$chosen" ] || for kind in random prio; do
    start "hopper_${kind}_schedule" "EMU_SCHED=$kind EMU_ASYNC=random" --filter sm90
done
wait
# each must have passed at least one case
for name in "${names[@]}"; do outcome "$name" 0 '^[1-9][0-9]* passed, 0 failed' ended "$name"; done
finish
