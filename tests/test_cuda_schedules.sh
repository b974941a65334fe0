#!/usr/bin/env bash
# The CUDA kernels under random schedules, in which any thread may run first and copies may complete at
# any time: some of them expose a missing barrier. One seed of each kind here, each with the attention
# kernels of one path; the next seed swaps the paths. `make test-schedules` runs 20.
. "$(dirname "$0")/lib.sh"
scratch schedules
cd "$root" || exit 1
seeds=${SEEDS:-1}
evidence() { grep -vE '^ok ' "$work/$suite" | tail -n 15; }

# Both suites concurrently, each with its own log and exit status
run_pair() {    # run_pair KIND SEED
    local suite status filter path=sm80
    if [ $(($2 % 2)) -eq $([ "$1" = random ] && echo 1 || echo 0) ]; then path=sm90; fi
    for suite in test_cuda_attention test_cuda_kernels; do
        filter=$([ $suite = test_cuda_attention ] && echo _$path)
        { EMU_SCHED=$1 EMU_SEED=$2 EMU_ASYNC=random EMU_PROXY=1 timeout "$limit_s" \
              build/emu/$suite --filter "$filter" > "$work/$suite" 2>&1
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
