#!/usr/bin/env bash
# The house rules that a compiler does not check: who includes whom, host code in C for both backends, line lengths.
set -u
cd "$(dirname "$0")/.."
root=$PWD
. "$root/tests/lib.sh"
scratch house
cd "$root" || exit 1

# A pattern for files that have moved checks nothing.
there() {
    local f
    for f in "$@"; do [ -s "$f" ] || { echo "$f is not there" && return 1; }; done
}
# Prints every quoted include of the files in $2.. that does not match the pattern $1.
includes_only() {
    local allowed=$1
    shift
    there "$@" && ! grep -HoE '#include "[^"]+"' "$@" | grep -vE "\"($allowed)\""
}
no_backend_names() { there train/*.h && ! grep -nE 'USE_CUDA|__CUDACC__|cuda[A-Z]|omp_|MPI_|nccl' train_llama.cu llama.h train/*.h; }
no_batch_and_time() { there kernels/kernels.h && ! grep -nE '\bint(64_t)? B,' kernels/kernels.h; }
short_lines() { there "$@" && ! awk 'length($0) > 100 { print FILENAME ":" FNR ": " length($0) " columns"; n++ } END { exit n == 0 }' "$@"; }
fresh_names() { ! git ls-files | cut -d/ -f1 | sort -u | grep -vxE \
    'Makefile|train_llama\.cu|llama\.h|kernels|train|data|scripts|tests|dev|README\.md|LICENSE|\.ci|\.clang-format|\.gitignore'; }
syntax() { "$@" -fsyntax-only -x c -std=gnu11 -Wall -Wextra -Werror train_llama.cu; }

check train_llama_includes includes_only '(data|train)/[a-z_]+\.h|llama\.h|kernels/kernels\.h' train_llama.cu
check train_includes includes_only '\.\./data/[a-z_]+\.h|\.\./llama\.h|\.\./kernels/kernels\.h|[a-z_]+\.h' train/*.h
check llama_includes includes_only 'data/[a-z_]+\.h|kernels/kernels\.h' llama.h
check the_contract_and_the_ranks_include_libc_only includes_only 'ranks_[a-z]+\.h' kernels/*.h
check kernels_include_kernels_h_only includes_only '\.\./(kernels|ranks)\.h|common\.h|[a-z_]+_tiles?\.h' kernels/cpu/*
check cuda_kernels_include_kernels_h_only includes_only '\.\./(kernels|ranks)\.h|common\.cuh|attention\.cuh|ptx\.cuh' kernels/cuda/*
check data_includes_data_only includes_only '[a-z_]+\.h' data/*.h
check nothing_includes_tests_or_dev includes_only '(\.\./)?[a-z_/]+\.h' train_llama.cu llama.h train/*.h data/*.h kernels/*.h
check the_model_names_no_backend no_backend_names
check kernels_h_knows_no_batch_and_time no_batch_and_time
check lines_up_to_100_columns short_lines train_llama.cu llama.h train/*.h data/*.h kernels/*.h kernels/cpu/* kernels/cuda/* tests/*.[ch] tests/*.cu dev/*.[ch] dev/simple/*.c dev/emu/*.cpp dev/emu/*.h dev/emu/include/* dev/emu/bugs/*
if git rev-parse --git-dir > /dev/null 2>&1; then check top_level_is_the_agreed_house fresh_names
else skip top_level_is_the_agreed_house 'not a git checkout'; fi
check host_is_c_for_both_backends eval 'syntax gcc && syntax gcc -DBACKEND_CUDA'
# dev/simple stays what one sitting can read: one file, libc and libm, no more than 400 lines
at_most_lines() { awk -v most="$1" 'END { if (NR > most) print FILENAME ": " NR " lines"; exit NR > most }' "$2"; }
simple=dev/simple/train_llama.c
plain_c() { "$@" -fsyntax-only -std=c11 -pedantic -Wall -Wextra -Werror $simple; }
includes_nothing_of_ours() { ! grep -n '#include "' $simple; }
check simple_is_at_most_400_lines at_most_lines 400 $simple
check simple_includes_nothing_of_the_project includes_nothing_of_ours
check simple_is_plain_c_for_gcc plain_c gcc
if command -v clang > /dev/null; then check simple_is_plain_c_for_clang plain_c clang
else skip simple_is_plain_c_for_clang 'clang is not installed'; fi
# every C file of the program and its tests, warnings as errors (gcc sees them in the build)
clang_accepts() {
    local f
    for f in kernels/cpu/*.c tests/*.c dev/*.c; do
        clang -fsyntax-only -fopenmp -std=gnu11 -Wall -Wextra -Werror "$f" || return 1
    done
    syntax clang && syntax clang -DBACKEND_CUDA
}
if echo '#include <omp.h>' | clang -fopenmp -fsyntax-only -x c - 2> /dev/null; then
    check everything_compiles_with_clang clang_accepts
else skip everything_compiles_with_clang 'clang or its omp.h is not installed'; fi
finish
