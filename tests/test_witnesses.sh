#!/usr/bin/env bash
# Predicted for GPUs (dev/witnesses): products of whole numbers are the same with the rounding of tensor
# cores. tests/test_tensor_cores.cu and tests/test_conform.cu hold the tables.
. "$(dirname "$0")/lib.sh"
scratch witnesses
cd "$root" || exit 1
for arch in 80 90; do
    outcome "layout_txt_with_exact_sm_$arch" 0 ' 0 failed' \
        env EMU_EXACT=1 EMU_ARCH=$arch build/emu/test_conform
done
finish
