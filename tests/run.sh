#!/usr/bin/env bash
# Runs every test program and script and adds up their last lines. Called by `make test` with the
# programs.
# A suite that dies without its last line counts as one failure.
set -u
cd "$(dirname "$0")/.."
passed=0 failed=0 skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# waiting threads sleep: on a busy machine spinning ones starve the others
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:abort_on_error=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

for suite in "$@" tests/test_*.sh; do
    start=$SECONDS
    printf -- '== %s\n' "$suite"
    timeout 300 "$suite" > "$log" 2>&1
    status=$?
    last=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -n 1)
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        p=${BASH_REMATCH[1]} f=${BASH_REMATCH[2]} s=${BASH_REMATCH[3]}
    else
        p=0 f=1 s=0
    fi
    # a leak report or a crash after the last case
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
    if [ "$f" -gt 0 ]; then cat "$log"; else grep -E '^ +skipped:|^skipped ' "$log"; fi
    printf '   %d passed, %d failed, %d skipped in %d s\n' "$p" "$f" "$s" $((SECONDS - start))
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
