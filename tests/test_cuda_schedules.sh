#!/usr/bin/env bash
# The CUDA kernels under schedules in which any thread may run first: a missing barrier shows in
# some of them. One seed of each kind here; `make test-schedules` runs 20.
set -u
cd "$(dirname "$0")/.."
seeds=${SEEDS:-1} passed=0 failed=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Both suites side by side: one log and one exit status each
run_pair() {    # run_pair KIND SEED
    local suite
    for suite in test_cuda_attention test_cuda_kernels; do
        { EMU_SCHED=$1 EMU_SEED=$2 timeout 250 build/emu/$suite > "$logs/$suite" 2>&1
          echo $? > "$logs/$suite.status"; } &
    done
    wait
    for suite in test_cuda_attention test_cuda_kernels; do
        if [ "$(cat "$logs/$suite.status")" = 0 ]; then
            passed=$((passed + 1)) && echo "ok      ${suite}_$1_seed_$2"
        else
            failed=$((failed + 1)) && echo "FAILED  ${suite}_$1_seed_$2"
            grep -vE '^ok ' "$logs/$suite" | tail -n 15
        fi
    done
}
for seed in $(seq 1 "$seeds"); do
    for kind in random prio; do run_pair $kind "$seed"; done
done
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
