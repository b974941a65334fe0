#!/usr/bin/env bash
# Models for other programs: final/ in bf16, and GGUF files, which a reader in Python's standard
# library parses wholly and compares with the Hugging Face directory. With the packages: gguf and
# llama.cpp (xllamacpp) read them too. Runs the sanitizer build; set TRAIN to test another one.
. "$(dirname "$0")/lib.sh"
scratch export
train=${TRAIN:-$root/build/asan/train_llama}
export OMP_NUM_THREADS=2
needs() {  # needs PACKAGE NAME COMMAND...
    local package=$1 name=$2
    shift 2
    if python3 -c "import $package" 2> /dev/null; then check "$name" "$@"
    else skip "$name" "the Python package $package is not installed"; fi
}
export_as() { "$train" --model "$1" --export gguf --export-type "$2" --out "$3"; }

# ---- final/ in bf16 ------------------------------------------------------------------------------------
tiny_model tiny 64 96 32
uneven_texts text 9
prepare text --out corpus --val-frac 0.1
run=("$train" --model tiny --from-scratch --train corpus --max-seqlen 128 --micro-batch-tokens 512
     --val-every 0 --num-samples 0 --steps 60 --lr 1e-2)
expect train_to_bf16 0 'done: trained/final is' "${run[@]}" --out trained --final-dtype bf16
same final_carries_the_tokenizer {corpus,trained/final}/tokenizer.json
check final_says_bfloat16 grep -q '"torch_dtype": "bfloat16"' trained/final/config.json
check checkpoints_say_float32 grep -q '"torch_dtype": "float32"' trained/step-00000060/config.json

# ---- models: what makes a difference for GGUF --------------------------------------------------------------
cat > hf.py << 'PY'
"""Hugging Face directories, read and written with the standard library."""
import json, struct
def f32(x): return struct.unpack("<f", struct.pack("<f", x))[0]
def bf16_bits(x):           # the nearer of the two around it, the even one of equals
    low = struct.unpack("<I", struct.pack("<f", x))[0] >> 16
    gap = [abs(bf16(b) - x) for b in (low, low + 1)]
    return low + (gap[1] < gap[0] or (gap[1] == gap[0] and low % 2))
def bf16(bits): return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
def read(directory):        # name -> (shape, values)
    data = open(directory + "/model.safetensors", "rb").read()
    size = struct.unpack_from("<Q", data)[0]
    tensors = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        a, b = (8 + size + x for x in entry["data_offsets"])
        raw = data[a:b]
        values = (struct.unpack("<%df" % (len(raw) // 4), raw) if entry["dtype"] == "F32"
                  else [bf16(x) for x in struct.unpack("<%dH" % (len(raw) // 2), raw)])
        tensors[name] = entry["shape"], values
    return tensors
def write(directory, tensors, dtype):
    header, at, body = {}, 0, []
    for name, (shape, values) in tensors.items():
        n = len(values) * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
        body.append(struct.pack("<%df" % len(values), *values) if dtype == "F32"
                    else struct.pack("<%dH" % len(values), *map(bf16_bits, values)))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(directory + "/model.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + b"".join(body))
def shapes(c):
    hidden, ffn, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    result = {"model.embed_tokens.weight": [c["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for i in range(c["num_hidden_layers"]):
        for name, shape in (
                ("input_layernorm", [hidden]), ("self_attn.q_proj", [q, hidden]), ("self_attn.k_proj", [kv, hidden]),
                ("self_attn.v_proj", [kv, hidden]), ("self_attn.o_proj", [hidden, q]),
                ("post_attention_layernorm", [hidden]), ("mlp.gate_proj", [ffn, hidden]),
                ("mlp.up_proj", [ffn, hidden]), ("mlp.down_proj", [hidden, ffn])):
            result["model.layers.%d.%s.weight" % (i, name)] = shape
    if not c["tie_word_embeddings"]:
        result["lm_head.weight"] = [c["vocab_size"], hidden]
    return result
PY
python3 - "$root" << 'PY' || bad models 'not made'
import json, math, os, random, shutil, sys
import hf
random.seed(3)
base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 2,
        "rms_norm_eps": 1e-05, "bos_token_id": 0, "eos_token_id": 0}
# tied, one kv head, ids that the tokenizer does not have
smollm2 = dict(base, vocab_size=408, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
               head_dim=32, rope_theta=1e5, tie_word_embeddings=True, max_position_embeddings=8192)
# a head of its own, heads wider than the model, rows that q8_0 cannot divide, scaled RoPE, BOS before every text
llama3 = dict(base, vocab_size=401, hidden_size=40, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
              head_dim=16, rope_theta=5e5, tie_word_embeddings=False, max_position_embeddings=131072, rope_scaling={
                  "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                  "original_max_position_embeddings": 64, "rope_type": "llama3"})
for name, config, dtype in ("smollm2", smollm2, "BF16"), ("llama3", llama3, "F32"):
    os.mkdir(name)
    json.dump(config, open(name + "/config.json", "w"))
    tokenizer = json.load(open(sys.argv[1] + "/tests/golden/tokenizers/%s/tokenizer.json" % name))
    special = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|endoftext|>",
               "unk_token": "<|endoftext|>" if name == "smollm2" else None, "chat_template": "of tokenizer_config.json"}
    if name == "llama3":
        tokenizer["added_tokens"][0]["special"] = False
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
        tokenizer["post_processor"] = {"type": "Sequence", "processors": [
            {"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}]}
        open(name + "/chat_template.jinja", "w").write("{{ 'ä' }}\nof its own file")
    json.dump(tokenizer, open(name + "/tokenizer.json", "w"))
    json.dump(special, open(name + "/tokenizer_config.json", "w"))
    # blocks of zeros, subnormals of f16, ties, and ordinary numbers
    odd = [0.0] * 40 + [1e-7, -3e-8, 6.1e-5, 2.0 ** -25, -2.0 ** -24,
                         65280.0 if dtype == "BF16" else 65519.0, -1 - 2.0 ** -11, 1 + 3 * 2.0 ** -11, -0.0]
    hf.write(name, {n: (shape, (odd + [random.gauss(0, 0.5) for _ in range(math.prod(shape))])[:math.prod(shape)])
                    for n, shape in hf.shapes(config).items()}, dtype)
PY

# ---- GGUF -------------------------------------------------------------------------------------------------
cat > check_gguf.py << 'PY'
"""check_gguf.py DIR TYPE FILE: every byte of the file, against the directory"""
import json, math, os, struct, sys
import hf
directory, kind, path = sys.argv[1:]
data, at = open(path, "rb").read(), 0
def take(form):
    global at
    value = struct.unpack_from("<" + form, data, at)
    at += struct.calcsize("<" + form)
    return value[0] if len(value) == 1 else value
def text():
    return take("%ds" % take("Q")).decode("utf-8")
def value(form):
    if form == 9:
        form, n = take("IQ")
        return [value(form) for _ in range(n)]
    return text() if form == 8 else take({4: "I", 5: "i", 6: "f", 7: "?"}[form])
magic, version, num_tensors, num_values = take("4sIQQ")
assert (magic, version) == (b"GGUF", 3)
values, infos = {}, {}
for _ in range(num_values):
    key = text()
    assert key not in values, key
    values[key] = value(take("I"))
for _ in range(num_tensors):
    name = text()
    shape = [take("Q") for _ in range(take("I"))][::-1]
    infos[name] = (shape,) + take("IQ")
at += -at % 32

# the values
config = json.load(open(directory + "/config.json"))
tokenizer = json.load(open(directory + "/tokenizer.json"))
special = json.load(open(directory + "/tokenizer_config.json"))
tokens = ["[PAD%d]" % i for i in range(config["vocab_size"])]
types = [5] * len(tokens)
for name, i in tokenizer["model"]["vocab"].items():
    tokens[i], types[i] = name, 1
for item in tokenizer["added_tokens"]:
    tokens[item["id"]], types[item["id"]] = item["content"], 3 if item["special"] else 4
merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
expected = {
    "general.architecture": "llama", "general.file_type": {"bf16": 32, "f16": 1, "q8_0": 7}[kind],
    "general.quantization_version": 2, "llama.rope.freq_base": config["rope_theta"],
    "llama.attention.layer_norm_rms_epsilon": hf.f32(config["rms_norm_eps"]),
    "llama.attention.key_length": config["head_dim"], "llama.attention.value_length": config["head_dim"],
    "llama.rope.dimension_count": config["head_dim"], "llama.vocab_size": config["vocab_size"],
    "llama.context_length": config["max_position_embeddings"], "llama.embedding_length": config["hidden_size"],
    "llama.block_count": config["num_hidden_layers"], "llama.feed_forward_length": config["intermediate_size"],
    "llama.attention.head_count": config["num_attention_heads"],
    "llama.attention.head_count_kv": config["num_key_value_heads"], "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
    **{"smollm2": {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.bos_token_id": 400,
                   "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.padding_token_id": 0,
                   "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "of tokenizer_config.json"},
       "llama3": {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 400,
                  "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.padding_token_id": 0,
                  "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ 'ä' }}\nof its own file"},
       "final": {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.bos_token_id": 256,
                 "tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.add_bos_token": True},
       }[os.path.basename(directory)]}
for key in sorted(set(values) | set(expected)):
    assert values.get(key) == expected.get(key), (key, values.get(key), expected.get(key))

# the tensors
NAMES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
def gguf_name(name):
    parts = name[:-len(".weight")].split(".")
    if "layers" in parts:
        return "blk.%s.%s.weight" % (parts[2], NAMES[".".join(parts[3:])])
    return NAMES[".".join(parts)] + ".weight"
def interleaved(shape, v):      # rows 0, d/2, 1, d/2 + 1, ... of each head
    d, cols = config["head_dim"], shape[1]
    rows = [h + i + half * d // 2 for h in range(0, shape[0], d) for i in range(d // 2) for half in (0, 1)]
    return [x for r in rows for x in v[r * cols:(r + 1) * cols]]
def rope_factor(i):             # as llama.cpp's convert_hf_to_gguf.py
    r, wave = config["rope_scaling"], 2 * math.pi * config["rope_theta"] ** (2 * i / config["head_dim"])
    low, high = (r["original_max_position_embeddings"] / r[k] for k in ("low_freq_factor", "high_freq_factor"))
    if wave < high: return 1.0
    if wave > low: return r["factor"]
    smooth = (r["original_max_position_embeddings"] / wave - r["low_freq_factor"]) / (
        r["high_freq_factor"] - r["low_freq_factor"])
    return 1 / ((1 - smooth) / r["factor"] + smooth)
def q8_0(v):
    out = b""
    for i in range(0, len(v), 32):
        scale = hf.f32(max(map(abs, v[i:i + 32])) / 127)
        inverse = hf.f32(1 / scale) if scale else 0
        scaled = [hf.f32(x * inverse) for x in v[i:i + 32]]
        quants = [int(math.copysign(math.floor(abs(x) + 0.5), x)) for x in scaled]
        half = struct.unpack("<e", struct.pack("<e", scale))[0]
        # half a step, and what rounding the scale to f16 adds
        assert all(abs(half * q - x) <= 0.501 * scale + 127 * abs(half - scale) for q, x in zip(quants, v[i:i + 32]))
        out += struct.pack("<e32b", scale, *quants)
    return out
def stored(shape, v):
    if len(shape) == 1: return 0, struct.pack("<%df" % len(v), *v)
    if kind == "bf16": return 30, struct.pack("<%dH" % len(v), *map(hf.bf16_bits, v))
    if kind == "f16" or shape[1] % 32: return 1, struct.pack("<%de" % len(v), *v)
    return 8, q8_0(v)
wanted = {}
for name, (shape, v) in hf.read(directory).items():
    wanted[gguf_name(name)] = shape, interleaved(shape, v) if ".q_proj" in name or ".k_proj" in name else v
if config.get("rope_scaling"):
    wanted["rope_freqs.weight"] = [config["head_dim"] // 2], None
assert set(infos) == set(wanted), set(infos) ^ set(wanted)
end = 0
for name, (shape, number, offset) in sorted(infos.items(), key=lambda item: item[1][2]):
    assert shape == wanted[name][0] and offset == end + -end % 32, name
    if name == "rope_freqs.weight":
        found = struct.unpack_from("<%df" % shape[0], data, at + offset)
        factors = [rope_factor(i) for i in range(shape[0])]
        assert len(set(factors)) == 3 and all(abs(a / b - 1) < 1e-5 for a, b in zip(found, factors)), found
        end = offset + 4 * shape[0]
        continue
    number_wanted, raw = stored(*wanted[name])
    assert number == number_wanted and data[at + offset:at + offset + len(raw)] == raw, name
    end = offset + len(raw)
assert len(data) == at + end + -end % 32, (len(data), at + end)
PY
for type in bf16 f16 q8_0; do
    for model in smollm2 llama3 trained/final; do
        name=$(basename $model)-$type
        expect "export_$name" 0 "^wrote $name.gguf: .* parameters, $type$" export_as $model $type "$name.gguf"
        check "every_byte_of_$name" python3 check_gguf.py $model $type "$name.gguf"
    done
done
expect bf16_is_the_default 0 'parameters, bf16$' "$train" --model smollm2 --export gguf --out default.gguf
same the_same_bytes_again default.gguf smollm2-bf16.gguf

# ---- what is refused, and leaves nothing -------------------------------------------------------------------
refused() { expect "refuses_$1" "$2" "$3" "${@:4}"; }
refused a_file_that_is_there 2 'error: default.gguf: expected a new file' export_as smollm2 f16 default.gguf
refused an_unknown_format 2 'error: --export: expected .*gguf' "$train" --model smollm2 --export onnx --out x.gguf
refused an_unknown_type 2 'error: --export-type: expected .*q8_0' export_as smollm2 q4_0 x.gguf
refused another_type_of_model 3 'error: .*/qwen3: expected a model_type of llama' \
    export_as "$root/tests/golden/qwen3" f16 x.gguf
cp -r "$root/tests/golden/mistral_linear_rope" yarn
sed -i 's/"type": "linear"/"type": "yarn"/' yarn/config.json
refused yarn_rope 3 'error: yarn: .* without yarn RoPE, found yarn' export_as yarn f16 x.gguf
refused no_out 2 'error: --export: expected --out FILE' "$train" --model smollm2 --export gguf
refused training_options 2 'error: --export and --steps: expected at most one' "$train" --model smollm2 --export gguf --out x --steps 3
refused eval_too 2 'error: --export and --eval: ' "$train" --model smollm2 --export gguf --out x --eval
refused a_built_in_name 2 'error: --export: expected a model with weights' export_as demo f16 x.gguf
refused no_model 3 'error: nowhere: ' export_as nowhere f16 x.gguf
refused no_folder_for_it 4 'error: nowhere/x.gguf' export_as smollm2 f16 nowhere/x.gguf
with() { rm -rf changed && cp -r smollm2 changed && python3 -c "
import json, hf
t, c, w = json.load(open('changed/tokenizer.json')), json.load(open('changed/config.json')), hf.read('changed')
$1
json.dump(t, open('changed/tokenizer.json', 'w')), json.dump(c, open('changed/config.json', 'w'))
hf.write('changed', w, 'F32')"; }
with '' && rm changed/tokenizer.json
refused no_tokenizer 3 'error: changed/tokenizer.json' export_as changed f16 x.gguf
with 't["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False'
refused another_pre_tokenizer 3 'error: changed/tokenizer.json: .*pre_tokenizer' export_as changed f16 x.gguf
with 't["normalizer"] = {"type": "NFC"}'
refused a_normalizer 3 'error: changed/tokenizer.json: .*normalizer' export_as changed f16 x.gguf
with 't["model"]["merges"][5] = ["a"]'
refused a_broken_merge 3 'error: changed/tokenizer.json: model.merges: .* at 5' export_as changed f16 x.gguf
with 't["added_tokens"][-1]["id"] = 500'
refused more_tokens_than_the_model 3 'tokenizer.json: .* the 408 tokens .* 501' export_as changed f16 x.gguf
with 'c["attention_bias"] = True'
refused another_model 3 'attention_bias' export_as changed f16 x.gguf
with 'del w["model.norm.weight"]'
refused a_missing_tensor 3 'missing: model.norm.weight' export_as changed f16 x.gguf
with 'w["model.layers.1.mlp.up_proj.weight"][1][70] = 65520.0'
refused a_weight_beyond_f16 3 'up_proj.weight: expected weights in the range of f16' export_as changed f16 x.gguf
expect bf16_has_its_range 0 wrote export_as changed bf16 wide.gguf
rm -f wide.gguf
with 'w["model.layers.1.mlp.up_proj.weight"][1][70] = 3.4e38'
refused a_weight_beyond_bf16 3 'in the range of bf16' export_as changed bf16 x.gguf
refused a_weight_beyond_q8_0 3 'in the range of q8_0' export_as changed q8_0 x.gguf
with 'w["model.layers.1.mlp.up_proj.weight"][1][70] = float("nan")'
refused nan 7 'NaN or Inf in model.layers.1.mlp.up_proj.weight' export_as changed bf16 x.gguf
full_disk() { (ulimit -f 100 && trap '' XFSZ && export_as smollm2 bf16 x.gguf); }
refused a_full_disk 4 'error: x.gguf.*File too large' full_disk
check nothing_is_left eval '! ls -A | grep -E "^x|tmp"'
same the_file_that_was_there_is_unchanged default.gguf smollm2-bf16.gguf

# ---- other readers -------------------------------------------------------------------------------------------
# back to Hugging Face with the weights of before, which were bf16
there_and_back() {
    rm -rf back && python3 "$root/scripts/gguf_to_hf.py" smollm2-bf16.gguf back && python3 - << 'PY'
import json, hf
assert hf.read("back") == hf.read("smollm2")
a, b = (json.load(open(d + "/tokenizer.json"))["model"] for d in ("smollm2", "back"))
assert b["merges"] == [" ".join(m) for m in a["merges"]] and all(b["vocab"][t] == i for t, i in a["vocab"].items())
PY
}
quantized_by_gguf() {
    python3 - << 'PY'
import gguf, hf, numpy
for kind in "bf16", "f16", "q8_0":
    for t in gguf.GGUFReader("smollm2-%s.gguf" % kind).tensors:
        if t.name == "blk.1.ffn_down.weight":
            shape, values = hf.read("smollm2")["model.layers.1.mlp.down_proj.weight"]
            wanted = gguf.quants.quantize(numpy.array(values, numpy.float32).reshape(shape), t.tensor_type)
            assert wanted.tobytes() == t.data.tobytes(), kind
PY
}
# A document's loss and the greedy text, by llama.cpp and by ours
llama_cpp_agrees() {  # llama_cpp_agrees MODEL_DIR TYPE
    rm -f asked.gguf && export_as "$1" "$2" asked.gguf || return
    "$train" --model "$1" --eval --train one > eval.txt || return
    "$train" --model "$1" --generate --temperature 0 --prompt 'line 7' --max-new-tokens 12 > text.txt 2> /dev/null || return
    python3 - "$2" << 'PY'
import glob, re, sys, xllamacpp
ids = list(memoryview(open(glob.glob("one/*.bin")[0], "rb").read()[1024:]).cast("H"))
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.fit_params = "asked.gguf", 256, 1, False, False
server = xllamacpp.Server(p)
def complete(prompt, **more):
    r = server.handle_completions(dict(prompt=prompt, temperature=0, **more))
    return r["choices"][0] if isinstance(r, dict) else r
loss = 0
for i in range(1, len(ids)):
    token = complete(ids[:i], max_tokens=1, n_probs=264)["logprobs"]["content"][0]
    loss -= next(t["logprob"] for t in token["top_logprobs"] if t["id"] == ids[i])
loss /= len(ids) - 1
ours = float(re.search(r"^all +1 +%d +([0-9.]+)" % (len(ids) - 1), open("eval.txt").read(), re.M).group(1))
print("loss by llama.cpp %.5f, ours %.5f" % (loss, ours))
assert abs(loss - ours) < (0.02 if sys.argv[1] == "q8_0" else 0.005) * ours
answer = complete("line 7", max_tokens=12)["text"]
print(repr(answer), repr(open("text.txt").read()))
assert sys.argv[1] == "q8_0" or answer.strip() == open("text.txt").read().strip()
PY
}
mkdir one_text && head -c 60 "text/doc 9.txt" > one_text/doc.txt
prepare one_text --out one --val-frac 0
# RoPE scaled so that it matters in a short text
cp -r trained/final scaled
sed -i 's/"rope_scaling": null/"rope_scaling": {"factor": 8, "high_freq_factor": 4, "low_freq_factor": 1, "original_max_position_embeddings": 32, "rope_type": "llama3"}/' \
    scaled/config.json
for type in bf16 f16 q8_0; do needs xllamacpp llama_cpp_agrees_in_$type llama_cpp_agrees trained/final $type; done
needs xllamacpp llama_cpp_agrees_with_scaled_rope llama_cpp_agrees scaled f16
needs gguf gguf_there_and_back there_and_back
needs gguf gguf_quantizes_the_same quantized_by_gguf
finish
