#!/usr/bin/env bash
# Hopper's attention kernels as ptxas makes them, without a GPU: no register spilled, no wgmma
# serialised, no setmaxnreg ignored. make BACKEND=cuda fails on the same.
set -u
cd "$(dirname "$0")/.."
root=$PWD
. "$root/tests/lib.sh"
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null) ||
    skip_all hopper_kernels 'nvcc is not installed'
"$nvcc" --list-gpu-arch | grep -qx compute_90 ||
    skip_all hopper_kernels 'this nvcc does not know sm_90a'
scratch build

# compiled DIRECTORY NAME: what ptxas says of NAME.cu, as errors where it only informs
compiled() {
    "$nvcc" -std=c++17 -O3 -DBACKEND_CUDA -gencode arch=compute_90a,code=sm_90a \
        -Werror all-warnings -Xptxas -v,-warn-spills,-Werror -c "$1/kernels/cuda/$2.cu" -o x.o &&
        ! grep -q 'C75[0-9][0-9]' "$work/out.txt"
}
# check writes what a command says to out.txt: keep the compiler's
ptxas_saw_kernels() { grep -q 'Used 1[26]8 registers' log.txt; }
for name in attention_sm90 attention_backward_sm90; do
    check "$name" compiled "$root" $name
    cp out.txt log.txt
    check "${name}_is_not_empty" ptxas_saw_kernels
done

# Eight registers fewer, and it must show
mkdir less
cp -r "$root/kernels" less
sed -i 's/? 160 : 232/? 152 : 232/' less/kernels/cuda/attention_sm90.cuh
too_few() { ! compiled less attention_sm90; }
check too_few_registers_show too_few
finish
