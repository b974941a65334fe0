#!/usr/bin/env bash
# `make witnesses`: asks the models of others again and rewrites arithmetic.txt, layout.txt and
# order.txt, which git then compares; the tests hold the emulator to them. README.md says what
# each shows. An hour on two cores; `make witnesses WITNESSES="layout order"` leaves some out.
#   PYTHON=python3       one that has mmasim and nvidia-cutlass
#   GPU_SAMPLES=DIR      model_validation of a clone of MATLAB-tensor-core: see arithmetic.py
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
work=$(mktemp -d "${TMPDIR:-/tmp}/unpad-witnesses-XXXXXX") && trap 'rm -rf "$work"' EXIT

need() {        # need WHAT HOW COMMAND...
    "${@:3}" > "$work/need.txt" 2>&1 && return
    echo "error: witnesses: $1 is missing" >&2
    echo "hint: $2" >&2
    exit 2
}
has_module() { "$python" -c "import importlib.util as u; exit(u.find_spec('$1') is None)"; }
pip_hint="python3 -m venv DIR; DIR/bin/pip install mmasim nvidia-cutlass numpy; \
make witnesses PYTHON=DIR/bin/python"

arithmetic() {
    need mmasim "$pip_hint" has_module mmasim
    "$python" dev/witnesses/arithmetic.py ${GPU_SAMPLES:+--gpu-samples "$GPU_SAMPLES"} \
        > "$work/arithmetic.txt" || exit 1
    # without the samples, what they said last time
    [ -n "${GPU_SAMPLES:-}" ] || grep -E '^# Outputs of real|^#   .* sums: ' \
        dev/witnesses/arithmetic.txt | sed -i '2r /dev/stdin' "$work/arithmetic.txt"
    mv "$work/arithmetic.txt" dev/witnesses/
    UNPAD_FULL=1 build/emu/test_tensor_cores || exit 1
}
# The CUDA headers that CuTe includes come with mmasim's torch, or with the CUDA Toolkit.
layout() {
    local site cuda
    need 'the package nvidia-cutlass' "$pip_hint" has_module cutlass_library
    site=$("$python" -c 'import cutlass_library as c; print(*c.__path__)')
    cuda=$(ls -d "$site"/../nvidia/cu*/include /usr/local/cuda/include 2> /dev/null | head -n 1)
    need 'CUDA headers' "$pip_hint nvidia-cuda-runtime nvidia-cuda-cccl" test -n "$cuda"
    g++ -std=c++17 -w -I"$site/source/include" -I"$cuda" -I"$cuda/cccl" dev/witnesses/layout.cpp \
        -o "$work/layout" && "$work/layout" "$work/layout.txt" > "$work/out.txt" || exit 1
    mv "$work/layout.txt" dev/witnesses/
    build/emu/test_layout || exit 1
}
order() {
    need spin 'sudo apt-get install spin' command -v spin
    dev/witnesses/order.sh > "$work/order.txt"
    local status=$?
    cat "$work/order.txt"
    [ $status -eq 0 ] || exit 1
    mv "$work/order.txt" dev/witnesses/
}
for witness in ${WITNESSES:-layout order arithmetic}; do
    echo "== $witness"
    "$witness"
done
git diff --stat -- dev/witnesses
