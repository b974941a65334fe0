#!/usr/bin/env bash
# Installs missing packages, builds, and runs every test. The last line is
# `N passed, N failed, N skipped`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh make=make gcc=gcc g++=g++ clang++=clang perl=perl python3=python3 git=git \
    /usr/include/stdlib.h=libc6-dev /usr/include/jansson.h=libjansson-dev /usr/include/pcre2.h=libpcre2-dev \
    /usr/include/uninorm.h=libunistring-dev \
    '/usr/lib/llvm-*/lib/clang/*/include/omp.h=libomp-dev' \
    /usr/lib/python3/dist-packages/matplotlib=python3-matplotlib \
    mpirun=openmpi-bin mpicc=libopenmpi-dev
log=$(mktemp)
trap 'rm -f "$log"' EXIT
make -j"$(nproc)" test-programs > "$log" 2>&1 || {
    grep -vE '^(gcc|g\+\+|clang|perl|mkdir) ' "$log" | head -60
    echo "error: the build failed" >&2
    exit 1
}
make test
