#!/usr/bin/env bash
# The CUDA kernels under schedules in which any thread may run first: a missing barrier shows in
# some of them. One seed of each kind here; `make test-schedules` runs 20.
set -u
cd "$(dirname "$0")/.."
root=$PWD seeds=${SEEDS:-1}
. "$root/tests/lib.sh"
scratch schedules
cd "$root" || exit 1
evidence() { grep -vE '^ok ' "$work/$suite" | tail -n 15; }

# Both suites side by side: one log and one exit status each
run_pair() {    # run_pair KIND SEED
    local suite status
    for suite in test_cuda_attention test_cuda_kernels; do
        { EMU_SCHED=$1 EMU_SEED=$2 timeout "$limit_s" build/emu/$suite > "$work/$suite" 2>&1
          echo $? > "$work/$suite.status"; } &
    done
    wait
    for suite in test_cuda_attention test_cuda_kernels; do
        status=$(cat "$work/$suite.status")
        if [ "$status" -eq 0 ]; then ok "${suite}_$1_seed_$2"
        else bad "${suite}_$1_seed_$2" "$(exit_code "$status")"; fi
    done
}
for seed in $(seq 1 "$seeds"); do
    for kind in random prio; do run_pair $kind "$seed"; done
done
finish
