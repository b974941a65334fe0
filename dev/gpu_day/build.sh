#!/usr/bin/env bash
# `make gpu-kit`: a folder with all that day.py needs where there are a GPU and python3 but neither a compiler, packages
# nor a network: programs for CUDA_ARCHS, libraries but cuBLASLt, models, documents, what the CPU backend makes of them.
#   dev/gpu_day/build.sh [DIR]      default: build/gpu-kit; VARIANT=emu: of the emulated backend, to rehearse
set -euo pipefail
cd "$(dirname "$0")/../.."
to=${1:-build/gpu-kit} variant=${VARIANT:-cuda} here=$PWD/dev/gpu_day
programs='train_llama test_ops test_conform test_tensor_cores bench'
[ ! -e "$to" ] || [ -e "$to/kit.json" ] || { echo "error: $to: exists, and is no kit" >&2 && exit 2; }
rm -rf "$to" && mkdir -p "$to" && to=$(cd "$to" && pwd)
mkdir -p "$to"/{bin,lib,data,dev/results,tests/golden} && echo '{}' > "$to/kit.json"    # a kit, if not a whole one
cp "$here"/*.py "$to" && cp dev/{bench,peers}.py "$to/dev" && cp -r dev/results/witnesses "$to/dev/results"
cp tests/runs.py "$to/tests" && cp tests/golden/nf4.safetensors "$to/tests/golden"

# One rank and no line editing: less to carry. Linked with a run path of their own, so moved: the next make links again.
move=cp
if [ "$variant" = cuda ]; then
    export LD_RUN_PATH="\$ORIGIN/../lib" move=mv
    rm -f build/cpu/train_llama $(printf ' build/cuda/%s' $programs)
    make -s -j"$(nproc)" BACKEND=cuda MPI= NCCL= EDIT= RPATHS= build/cpu/train_llama $(printf ' build/cuda/%s' $programs)
fi
$move $(printf " build/$variant/%s" $programs) "$to/bin"
$move build/cpu/train_llama "$to/bin/train_llama_cpu"
cupti=$(find -L /usr/local/cuda*/ -maxdepth 6 -name cupti.h 2> /dev/null | head -n 1) cupti=${cupti%/include/*}
[ "$variant" = emu ] || [ -z "$cupti" ] || gcc -O2 -shared -fPIC "$here/trace.c" -I"$cupti/include" -L"$cupti/lib64" \
    -lcupti -o "$to/bin/libtrace.so"
ldd "$to"/bin/* | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -vE '/lib(c|m|dl|pthread|rt|util|stdc\+\+|gcc_s|cuda|cublasLt)[.-]' | xargs -r cp -Lt "$to/lib"
[ "$variant" = emu ] || strip --strip-debug "$to"/bin/*

python3 - "$to/kit.json" $variant << 'PY'
import json, re, sys
sys.path.insert(0, "dev")
import bench
to, variant = sys.argv[1:]
small, r65, seed = variant == "emu", ",".join(map(str, bench.make_lengths("r65"))), ",".join(map(str, bench.SEED))
# Parts of names of cases such that each case has one
names = re.findall(r"^    OPERATION\((\w+)", open("tests/ops.h").read(), re.M)
names = [n + path for n in names for path in (["_sm90", "_sm80"] if re.fullmatch("attention_(for|back)ward", n) else [""])]
names += re.findall(r"test_case_([a-z]\w*)$", bench.run("nm", to.replace("kit.json", "bin/test_ops")), re.M) * (not small)
names = [name for name in names if not any(other != name and other in name for other in names)]
facts = {"emulated": small, "patience": 4 if small else 1, "operations": names,
         "commit": bench.run("git", "describe", "--always", "--dirty", quiet=True).strip(),
         "programs": ["train_llama", "train_llama_cpu", "test_ops", "test_conform", "test_tensor_cores", "bench"]}
if small:       # a rehearsal, whose figures mean nothing
    facts.update(model="demo", vocab=258, steps=1, lists=[["9,17,70", [3, 1, 64]]], longest=96, bench=["--filter", "swiglu"],
                 long={"first": [96, 2], "packed": [128, 2], "padded": [128, 2]})
else:
    facts.update(model="smollm2-135m", vocab=49152, steps=10, longest=512, bench=[], lists=[
        [r65, [9, 3, 64]], [r65, [32, 8, 128]], ["8x8192", [32, 8, 128]], ["8x8192", [9, 3, 64]], ["32x2048", [9, 3, 64]],
        ["128x512", [9, 3, 64]], [seed, [9, 3, 64]], ["1024x64", [9, 3, 64]]],
        long={"first": [512, 10], "packed": [2048, 200], "padded": [2048, 200]})
json.dump(facts, open(to, "w"), indent=1)
PY

# Models and documents; the logs of the CPU backend again only after a change of what computes them
make_data() (
    rm -rf build/gpu-data/$variant-* && mkdir -p "$1"
    . tests/lib.sh && set +e    # enters $work, counts failures
    release=$to/bin/train_llama_cpu
    tiny_model tiny 64 128 64 && tiny_model odd 64 128 64 266 && tiny_model wide 64 128 128
    for type in qwen2 qwen3; do
        tiny_model $type 64 96 64
        edit $type/config.json "j.update(model_type='$type', architectures=['${type^}ForCausalLM'], tie_word_embeddings='$type' == 'qwen2')"
    done
    corpus 5
    mkdir texts             # documents that begin alike
    for i in 1 2 3 4 5 6; do (printf 'the same words, %.0s' {1..10}; seq $i $((i * 9))) > texts/$i; done
    prepare texts --out alike
    check base "$release" --model tiny --from-scratch --train corpus --max-seqlen 96 --micro-batch-tokens 128 \
        --batch-tokens 256 --val-every 0 --num-samples 0 --lr 1e-2 --steps 40 --out trained
    mkdir "$1/golden" && mv tiny odd wide qwen2 qwen3 corpus alike "$1" && mv trained/final "$1/base"
    tokens=409600 vocab=49152 cap=512
    [ "$variant" = cuda ] || tokens=8192 vocab=258 cap=96
    check documents "$root/dev/bench.py" --write "$1/long" --dist r65 --tokens $tokens --cap $cap --vocab $vocab
    check goldens python3 "$to/day.py" --goldens "$1"
    find "$1/golden" -type f ! -name log.jsonl -delete
    [ "$failed" -eq 0 ] && touch "$1/done"
)
key=$(cat llama.h train_llama.cu kernels/*.h kernels/cpu/* data/*/*.[ch] "$here"/*.{py,sh} | sha256sum | cut -c 1-16)
data=$PWD/build/gpu-data/$variant-$key
[ -e "$data/done" ] || make_data "$data"
cp -r "$data"/. "$to/data"
echo "$to: $(du -sm "$to" | cut -f 1) MiB, needs $(objdump -T "$to"/bin/* "$to"/lib/* 2> /dev/null | grep -o 'GLIBC_2[.][0-9]*' |
    sort -uV | tail -n 1); there: python3 $(basename "$to")/day.py"
