#!/usr/bin/env bash
# Installs missing packages, builds, and runs every test. The last line is
# `N passed, N failed, N skipped`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh g++=g++ clang++=clang perl=perl git=git mpirun=openmpi-bin mpicc=libopenmpi-dev \
    /usr/include/histedit.h=libedit-dev '/usr/lib/llvm-*/lib/clang/*/include/omp.h=libomp-dev' \
    curl=curl zstd=zstd clang-format=clang-format '/usr/lib/python3*/ensurepip=python3-venv'

# Python packages that a few tests need; they skip without them
packages=(numpy jinja2 gguf xllamacpp pyarrow)
python3 -c "import $(IFS=, && echo "${packages[*]}")" 2> /dev/null || [ -d build/python ] || {
    echo "fetching ${packages[*]} from PyPI"
    mkdir -p build && python3 -m venv --system-site-packages build/python.tmp &&
        build/python.tmp/bin/pip install --quiet --retries 1 "${packages[@]}" &&
        mv build/python.tmp build/python
} || echo 'not fetched: the tests that need them are skipped'
PATH=$PWD/build/python/bin:$PATH

# nvcc is silent for longer than some watchers wait
(while sleep 10; do echo "        building, $SECONDS s"; done) &
make -j"$(nproc)" test-programs || { kill $! && exit 1; }
kill $!
make test
