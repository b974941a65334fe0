#!/usr/bin/env bash
# Hopper's attention kernels as compiled by ptxas, without a GPU: no register spills, no serialised
# wgmma, no ignored setmaxnreg, on which make BACKEND=cuda fails too; no stack; and in the machine code
# of the hot loops the overlap that the source describes.
. "$(dirname "$0")/lib.sh"
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null) ||
    skip_all hopper_kernels 'nvcc is not installed'
"$nvcc" --list-gpu-arch | grep -qx compute_90 ||
    skip_all hopper_kernels 'this nvcc does not know sm_90a'

# compiled DIRECTORY NAME: ptxas's remarks on NAME.cu (C75xx) count as errors
compiled() {
    "$nvcc" -std=c++17 -O3 -DBACKEND_CUDA -gencode arch=compute_90a,code=sm_90a \
        -Werror all-warnings -Xptxas -v,-warn-spills,-Werror -c "$1/kernels/cuda/$2.cu" -o x.o \
        > log.txt 2>&1
    local status=$?
    cat log.txt
    [ $status -eq 0 ] && ! grep -q 'C75[0-9][0-9]' log.txt && ! grep -q '[1-9][0-9]* bytes stack' log.txt
}
# loops OBJECT: exponentials that run while a product is in flight, and at most 8 moves to uniform
# registers, in each hot loop (hopper_loops.py)
loops() {
    cuobjdump -sass "$1" | python3 "$root/tests/hopper_loops.py" |
        awk '{ print } $5 < 32 || $6 > 8 { wrong = 1 } END { exit wrong || NR < 2 }'
}
for name in attention_sm90 attention_backward_sm90; do
    check "$name" compiled "$root" $name
    has "${name}_is_not_empty" 'Used 1[26]8 registers' log.txt
    if command -v cuobjdump > /dev/null; then check "${name}_overlaps" loops x.o
    else skip "${name}_overlaps" 'cuobjdump is not installed'; fi
done

# planted NAME WHAT FILE SED: the check of that name fails with this change of the source
planted() {
    rm -rf planted && mkdir planted && cp -r "$root/kernels" planted
    sed -i "$4" "planted/kernels/cuda/$3"
    cmp -s "$root/kernels/cuda/$3" "planted/kernels/cuda/$3" && bad "$1" "$4: no change" && return
    if [ "$2" = loops ]; then compiled planted attention_sm90 && ! loops x.o
    else ! compiled planted attention_sm90; fi > out.txt
    if [ $? -eq 0 ]; then ok "$1"; else bad "$1" 'not found'; fi
}
planted eight_registers_fewer compiled attention_sm90.cuh 's/? 160 : 232/? 152 : 232/'
planted more_registers_than_there_are compiled attention_sm90.cuh 's/? 160 : 232/? 160 : 240/'
planted a_map_on_the_stack compiled attention_sm90.cu 's/__grid_constant__ CUtensorMap out_map/CUtensorMap out_map/'
if command -v cuobjdump > /dev/null; then
    planted exponentials_after_the_wait loops attention_sm90.cuh 's/^    if (__any_sync.*//'
    planted addresses_in_vector_registers loops attention_sm90.cuh 's/__shfl_sync(~0u, \(.*\), 0)/\1/'
fi
finish
