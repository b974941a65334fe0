#!/usr/bin/env bash
# The house rules that a compiler does not check: who includes whom, C that is also C++ and CUDA, line lengths.
set -u
cd "$(dirname "$0")/.."
root=$PWD
. "$root/tests/lib.sh"
scratch house
cd "$root" || exit 1

# Prints every quoted include of the files in $2.. that does not match the pattern $1.
includes_only() {
    local allowed=$1
    shift
    ! grep -HoE '#include "[^"]+"' "$@" | grep -vE "\"($allowed)\""
}
no_backend_names() { ! grep -nE 'USE_CUDA|__CUDACC__|cuda[A-Z]|omp_|MPI_|nccl' train_llama.cu llama.h train/*.h; }
no_batch_and_time() { ! grep -nE '\bint(64_t)? B,' kernels/kernels.h; }
short_lines() { ! awk 'length($0) > 100 { print FILENAME ":" FNR ": " length($0) " columns"; n++ } END { exit n == 0 }' "$@"; }
fresh_names() { ! git ls-files | cut -d/ -f1 | sort -u | grep -vxE \
    'Makefile|train_llama\.cu|llama\.h|kernels|train|data|scripts|tests|dev|README\.md|LICENSE|\.ci|\.clang-format|\.gitignore'; }
syntax() { "$@" -fsyntax-only -x c++ -std=c++17 -Wall -Wextra -Werror train_llama.cu; }

check train_llama_includes includes_only '(data|train)/[a-z_]+\.h|llama\.h|kernels/kernels\.h' train_llama.cu
check train_includes includes_only '\.\./data/[a-z_]+\.h|\.\./llama\.h|\.\./kernels/kernels\.h|[a-z_]+\.h' train/*.h
check llama_includes includes_only 'data/[a-z_]+\.h|kernels/kernels\.h' llama.h
check the_contract_and_the_ranks_include_libc_only includes_only 'ranks_[a-z]+\.h' kernels/*.h
check kernels_include_kernels_h_only includes_only '\.\./(kernels|ranks)\.h|common\.h|[a-z_]+_tiles?\.h' kernels/cpu/*
check cuda_kernels_include_kernels_h_only includes_only '\.\./(kernels|ranks)\.h|common\.cuh|attention(_sm90)?\.cuh|ptx\.cuh' kernels/cuda/*
check data_includes_data_only includes_only '[a-z_]+\.h' data/*.h
check nothing_includes_tests_or_dev includes_only '(\.\./)?[a-z_/]+\.h' train_llama.cu llama.h train/*.h data/*.h kernels/*.h
check the_model_names_no_backend no_backend_names
check kernels_h_knows_no_batch_and_time no_batch_and_time
check lines_up_to_100_columns short_lines train_llama.cu llama.h train/*.h data/*.h kernels/*.h kernels/cpu/* kernels/cuda/* tests/*.[ch] tests/*.cu dev/*.[ch] dev/emu/*.cpp dev/emu/*.h dev/emu/include/* dev/emu/bugs/*
if git rev-parse --git-dir > /dev/null 2>&1; then check top_level_is_the_agreed_house fresh_names
else skip top_level_is_the_agreed_house 'not a git checkout'; fi
check trainer_is_cpp_for_g++ syntax g++
if command -v clang++ > /dev/null; then check trainer_is_cpp_for_clang++ syntax clang++
else skip trainer_is_cpp_for_clang++ 'clang++ is not installed'; fi
# every C file of the program and its tests, warnings as errors (gcc sees them in the build)
clang_accepts() {
    local f
    for f in kernels/cpu/*.c tests/*.c dev/*.c; do
        clang -fsyntax-only -fopenmp -std=gnu11 -Wall -Wextra -Werror "$f" || return 1
    done
    clang -fsyntax-only -x c -std=gnu11 -Wall -Wextra -Werror train_llama.cu
}
if echo '#include <omp.h>' | clang -fopenmp -fsyntax-only -x c - 2> /dev/null; then
    check everything_compiles_with_clang clang_accepts
else skip everything_compiles_with_clang 'clang or its omp.h is not installed'; fi
if command -v nvcc > /dev/null; then
    check trainer_compiles_under_nvcc nvcc -x cu -std=c++17 -Werror all-warnings -c train_llama.cu -o /dev/null
else skip trainer_compiles_under_nvcc 'nvcc is not installed'; fi
finish
