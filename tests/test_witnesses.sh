#!/usr/bin/env bash
# What the witnesses of dev/witnesses have said still holds, as far as that can be checked without
# them: tests/test_tensor_cores.cu and tests/test_layout.cu do it for arithmetic and layouts.
set -u
cd "$(dirname "$0")/.."
root=$PWD
. "$root/tests/lib.sh"
scratch witnesses
cd "$root" || exit 1

check build make -s BACKEND=cpu build/emu/test_conform
# Predicted for GPUs: conform.txt, of whole numbers, is the same with the rounding of tensor cores
for arch in 80 90; do
    outcome "conform_txt_with_exact_sm_$arch" 0 ' 0 failed' \
        env EMU_EXACT=1 EMU_ARCH=$arch build/emu/test_conform
done

lines() { grep -c "$1" "$2"; }
order=dev/witnesses/order.txt
check order_is_of_these_models \
    grep -qxF "# models $(cat dev/witnesses/order/* | cksum)" "$order"
check no_interleaving_is_wrong test "$(lines ' states, 0 errors$' "$order")" -eq 10
check no_other_states test "$(lines ' states, ' "$order")" -eq 10
# every fault that order.sh plants was found
check planted_faults_were_found \
    test "$(lines ': \(deadlock\|assertion .*\)$' "$order")" -eq 40
check no_fault_was_missed test "$(lines 'NOT FOUND' "$order")" -eq 0
finish
