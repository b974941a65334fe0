#!/usr/bin/env bash
# Every CUDA kernel once, emulated, under AddressSanitizer and UndefinedBehaviorSanitizer: they check
# the bounds of registers and shared memory. `make test-sanitizers` runs all shapes.
. "$(dirname "$0")/lib.sh"
scratch sanitizers
cd "$root" || exit 1
# fibers of a failed case are not leaks
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
outcome operations_sanitized 0 '^[1-9][0-9]* passed, 0 failed, 0 skipped$' \
    "$root/build/emusan/test_ops" --quick
finish
