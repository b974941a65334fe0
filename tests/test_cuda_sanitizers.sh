#!/usr/bin/env bash
# Every CUDA kernel once, emulated, under AddressSanitizer and UndefinedBehaviorSanitizer: registers
# and shared memory have bounds there that -O2 hides. `make test-sanitizers` runs whole suites.
set -u
cd "$(dirname "$0")/.."
root=$PWD
. "$root/tests/lib.sh"
scratch sanitizers
cd "$root" || exit 1
# fibers that a failed case leaves behind are no leaks
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
for suite in test_cuda_attention test_cuda_kernels; do
    outcome "${suite}_sanitized" 0 '^[1-9][0-9]* passed, 0 failed, 0 skipped$' \
        "$root/build/emusan/$suite" --filter sanitizer_
done
finish
