#!/usr/bin/env bash
# Hopper's attention kernels as compiled by ptxas, without a GPU: no register spills, no serialised
# wgmma, no ignored setmaxnreg. make BACKEND=cuda fails on the same.
. "$(dirname "$0")/lib.sh"
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null) ||
    skip_all hopper_kernels 'nvcc is not installed'
"$nvcc" --list-gpu-arch | grep -qx compute_90 ||
    skip_all hopper_kernels 'this nvcc does not know sm_90a'
scratch build

# compiled DIRECTORY NAME: ptxas's remarks on NAME.cu (C75xx) count as errors
compiled() {
    "$nvcc" -std=c++17 -O3 -DBACKEND_CUDA -gencode arch=compute_90a,code=sm_90a \
        -Werror all-warnings -Xptxas -v,-warn-spills,-Werror -c "$1/kernels/cuda/$2.cu" -o x.o \
        > log.txt 2>&1
    local status=$?
    cat log.txt
    [ $status -eq 0 ] && ! grep -q 'C75[0-9][0-9]' log.txt
}
for name in attention_sm90 attention_backward_sm90; do
    check "$name" compiled "$root" $name
    has "${name}_is_not_empty" 'Used 1[26]8 registers' log.txt
done

# Eight registers fewer must fail
mkdir less
cp -r "$root/kernels" less
sed -i 's/? 160 : 232/? 152 : 232/' less/kernels/cuda/attention_sm90.cuh
too_few() { ! compiled less attention_sm90; }
check too_few_registers_show too_few
finish
