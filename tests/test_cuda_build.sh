#!/usr/bin/env bash
# nvcc with the Makefile's settings, without a GPU: code for every architecture without register spills, PTX
# for every other GPU, libraries that are found at run time. Hopper's attention: no serialised wgmma, no ignored
# setmaxnreg, on which make BACKEND=cuda fails too; no stack; in the hot loops the overlap of the source.
. "$(dirname "$0")/lib.sh"
unset CUDA_ARCHS
evidence() { grep -E 'spill|error|warning|Error' "$work/out.txt" | tail -n 8; }
make_n() { make V=1 -s -n -C "$root" BACKEND=cuda "$@" 2> "$work/make.txt"; }
link=$(make_n -W train_llama.cu build/cuda/train_llama | tail -n 1)
[ -n "$link" ] || { skip code_for_every_gpu "$(grep -o 'BACKEND=cuda needs.*' make.txt)" && finish; }
nvcc=${link%% *}
# make test has built the program for 80 and 90a (tests.mk); with ARCHS=default it is built for all
built() { make -s -C "$root" BACKEND=cuda "$@" build/cuda/train_llama && "$root/build/cuda/train_llama" --version; }
[ -z "${ARCHS:-}" ] || outcome builds_for_every_architecture 0 'cuda backend' built
outcome builds_for_80_and_90a 0 'cuda backend' built CUDA_ARCHS='80 90a'
objects=$root/build/cuda/80-90a/kernels/cuda
loops() { cuobjdump -sass "$1" | python3 "$root/tests/hopper_loops.py"; }
for name in attention_sm90 attention_backward_sm90; do
    lacks "${name}_has_no_stack" '[1-9][0-9]* bytes stack' "$objects/$name.o.log"
    has "${name}_is_not_empty" 'Used 1[26]8 registers' "$objects/$name.o.log"
    with_program "${name}_overlaps" cuobjdump && check "${name}_overlaps" loops "$objects/$name.o"
done
# PTX for sm_80 with any CUDA_ARCHS and any version of nvcc
targets() {     # targets NAME EXPECTED ARGUMENTS...
    check "$1" test "$(make_n "${@:3}" -W kernels/cuda/rmsnorm.cu build/cuda/kernels/cuda/rmsnorm.o |
        grep -m 1 -- '-c kernels' | grep -o 'code=[a-z0-9_]*' | tr '\n' ' ')" = "$2 "
}
targets ptx_with_one_architecture 'code=sm_100 code=compute_80' CUDA_ARCHS=100
targets nvcc_without_blackwell 'code=sm_80 code=sm_86 code=sm_89 code=sm_90a code=compute_80' KNOWN='70 75 80 86 87 89 90'
targets nvcc_with_blackwell \
    'code=sm_80 code=sm_86 code=sm_89 code=sm_90a code=sm_100 code=sm_120 code=compute_80' \
    KNOWN='80 86 87 88 89 90 100 103 110 120 121'
# Other architectures are other objects; what a broken driver says is no GPU
outcome other_objects_for_others 0 '-o build/cuda/120-80/kernels/cuda/rope.o' make_n CUDA_ARCHS='120 80' build/cuda/kernels/cuda/rope.o
printf '#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n' > nvidia-smi && chmod +x nvidia-smi
outcome broken_driver 0 'backend cpu' env PATH="$work:$PATH" make -n -C "$root" all
# The program finds its libraries without LD_LIBRARY_PATH and ldconfig's cache
cat > library.c <<'CU'
#include <cublasLt.h>
#include <stdio.h>
int main() { return printf("cuBLASLt %zu\n", cublasLtGetVersion()) < 0; }
CU
libraries=$(grep -oE -- ' -(l|L|Xlinker )[^ ]+' <<< "$link" | tr '\n' ' ')
check link "$nvcc" library.c -o library $libraries
loader=$(readelf -l library | sed -n 's/.*interpreter: \(.*\)]/\1/p')
outcome libraries_are_found_at_run_time 0 'cuBLASLt [0-9]' env -u LD_LIBRARY_PATH "$loader" --inhibit-cache ./library
finish
