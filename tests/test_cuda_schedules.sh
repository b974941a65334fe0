#!/usr/bin/env bash
# The CUDA kernels under random schedules, in which any thread may run first and copies may complete at
# any time: some of them expose a missing barrier. One seed of each kind here; `make test-schedules`
# runs 20.
. "$(dirname "$0")/lib.sh"
scratch schedules
cd "$root" || exit 1
evidence() { grep -avE '^ok |largest error' "$work/$kind" | tail -n 15; }
for seed in $(seq 1 "${SEEDS:-1}"); do
    for kind in random prio; do
        { export EMU_SCHED=$kind EMU_SEED=$seed EMU_ASYNC=random
          timeout "$limit_s" build/emu/test_ops --seed "$seed" > "$work/$kind" 2>&1 &&
              EMU_PROXY=1 build/emu/test_ops --seed "$seed" --filter sm90 --quick >> "$work/$kind"
          echo $? > "$work/$kind.status"; } &
    done
    wait
    for kind in random prio; do
        status=$(cat "$work/$kind.status")
        if [ "$status" -eq 0 ]; then ok "${kind}_seed_$seed"
        else bad "${kind}_seed_$seed" "$(exit_code "$status")"; fi
    done
done
finish
