#!/usr/bin/env bash
# Models for other programs: final/ in bf16, and GGUF files of every family by
# scripts/export_gguf.py: read back by the package gguf, and run by llama.cpp (xllamacpp).
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=2
export_as() { python3 "$root/scripts/export_gguf.py" "$1" "$3" --type "$2"; }
# ---- final/ in bf16 ----------------------------------------------------------------------------
tiny_model tiny 64 96 32
corpus 9
run=(--train corpus --max-seqlen 128 --micro-batch-tokens 512
     --val-every 0 --num-samples 0 --steps 60 --lr 1e-2)
expect train_llama 0 done "$release" "${run[@]}" --from-scratch --model tiny --out llama
expect train_to_bf16 0 'done: llama/final is' "$train" --resume --out llama --steps 62 --final-dtype bf16
same final_carries_the_tokenizer {corpus,llama/final}/tokenizer.json
check final_says_bfloat16 grep -q '"torch_dtype": "bfloat16"' llama/final/config.json
if ! with_package gguf_files gguf; then
    expect names_the_package 2 'pip install gguf' export_as llama/final f16 x.gguf
    finish
fi
expect refuses_an_unknown_type 2 'invalid choice' export_as llama/final q4_0 x.gguf
# ---- models of every family, and a tokenizer with merges ------------------------------------------
family() {      # family NAME CHANGES: the tiny model with other members in config.json, trained
    cp -r tiny "$1-config" && edit "$1-config/config.json" "j.update(json.loads('''$2'''))"
    expect "train_$1" 0 done "$release" "${run[@]}" --from-scratch --model "$1-config" --out "$1"
}
family mistral '{"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": null,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0}}'
family qwen2 '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": false,
    "hidden_size": 96, "num_key_value_heads": null}'
sed -i 's/"num_key_value_heads": 3/"num_key_value_heads": null/' qwen2/final/config.json
family qwen3 '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 40}'
family smollm3 '{"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "pad_token_id": null,
    "num_hidden_layers": 4}'
family granite '{"model_type": "granite", "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12,
    "residual_multiplier": 0.22, "attention_multiplier": 0.5, "logits_scaling": 0.5}'
family granite4 '{"model_type": "granitemoehybrid", "embedding_multiplier": 12, "shared_intermediate_size": 96, "logits_scaling": 0.5,
    "layer_types": ["attention", "attention"], "num_local_experts": 0, "position_embedding_type": "rope"}'
# RoPE scaled so that it matters in a short text
family llama3 '{"rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32, "rope_type": "llama3"}}'
cp -r llama/final merges
printf '%s' '{"bos_token": "<|im_start|>", "eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>", "chat_template": "of tokenizer_config.json"}' > merges/tokenizer_config.json
edit merges/config.json 'j.update(vocab_size=600, eos_token_id=[0, 5])'     # ids that the tokenizer does not have
echo '{"eos_token_id": [7, 5]}' > merges/generation_config.json
python << 'PY'
weights = tensors("merges/model.safetensors")
data = weights.pop("model.embed_tokens.weight")[2] * 3     # again, as the last one
weights["model.embed_tokens.weight"] = ["BF16", [600, 64], data[:600 * 64 * 2]]
put_tensors("merges/model.safetensors", weights)
PY
for name in smollm2 llama3 qwen llama2 mistral; do
    cp -r merges "merges_$name" && cp "$root/tests/golden/tokenizers/$name/tokenizer.json" "merges_$name"
done
printf '%s' "{{ 'ä' }} of its own file" > merges_llama3/chat_template.jinja
# ---- read back by gguf ----------------------------------------------------------------------------
# exported DIR TYPE: tokens and roles, against the directory; names, sizes, RoPE and values: llama.cpp below
exported() {
    rm -f asked.gguf && export_as "$1" "$2" asked.gguf && python "$1" "$2" asked.gguf << 'PY'
import gguf
directory, kind, path = sys.argv[1:]
reader = gguf.GGUFReader(path)
found = {key: field.contents() for key, field in reader.fields.items()}
config = json.load(open(directory + "/config.json"))
tokenizer = json.load(open(directory + "/tokenizer.json"))
arch = config["model_type"]
tokens = ["[PAD%d]" % i for i in range(config["vocab_size"])]
types = [5] * len(tokens)
for name, i in tokenizer["model"]["vocab"].items():
    tokens[i], types[i] = name, 1
for item in tokenizer["added_tokens"]:
    tokens[item["id"]], types[item["id"]] = item["content"], 3 if item["special"] else 4
expected = {
    "general.architecture": arch, "general.file_type": {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[kind],
    arch + ".context_length": config["max_position_embeddings"], arch + ".vocab_size": config["vocab_size"],
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
    "tokenizer.ggml.pre": {"merges_smollm2": "smollm", "merges_llama3": "llama-bpe",
                           "merges_qwen": "qwen2"}.get(directory, "gpt-2"),
    "tokenizer.ggml.bos_token_id": 400 if "merges" in directory else 256,
    "tokenizer.ggml.eos_token_id": 0 if "merges" in directory else 257,
    "tokenizer.ggml.eot_token_id": 5 if "merges" in directory else None,
    "tokenizer.ggml.eom_token_id": 7 if "merges" in directory else None,
    "tokenizer.ggml.add_bos_token": "merges" not in directory,
}
if "merges" in directory:
    expected["tokenizer.ggml.merges"] = [m if isinstance(m, str) else " ".join(m)
                                         for m in tokenizer["model"]["merges"]]
    expected["tokenizer.chat_template"] = ("{{ 'ä' }} of its own file" if "llama3" in directory
                                           else "of tokenizer_config.json")
for key, value in expected.items():
    assert found.get(key) == value, (key, value, found.get(key))
assert abs(found[arch + ".attention.layer_norm_rms_epsilon"] - config["rms_norm_eps"]) < 1e-12
PY
}
for kind in f32 bf16 f16 q8_0; do check "llama_in_$kind" exported llama/final $kind; done
for model in smollm2 llama3 qwen; do check "exports_merges_$model" exported merges_$model bf16; done
# ---- and back: scripts/gguf_to_hf.py ------------------------------------------------------------------
there_and_back() {  # there_and_back TYPE
    rm -rf there.gguf hf && export_as merges_smollm2 "$1" there.gguf &&
        python3 "$root/scripts/gguf_to_hf.py" there.gguf hf && python "$1" << 'PY'
import numpy
def load(directory):
    return [tensors(directory + "/model.safetensors")] + [
        json.load(open(directory + "/" + name)) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
weights, config, tokenizer, roles = load("merges_smollm2")
weights_back, config_back, tokenizer_back, roles_back = load("hf")
assert weights_back.keys() == weights.keys()
for name, (_, shape, raw) in weights.items():
    v, back = ((numpy.frombuffer(bf16, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
               for bf16 in (raw, weights_back[name][2]))
    bounds = {"f16": 2.0**-25, "q8_0": abs(v).max(-1, keepdims=True) / 127 * 0.57}
    assert (abs(back - v) <= bounds.get(sys.argv[1], 0) + 2.0**-8 * abs(v)).all(), name
changed = {key for key, value in config_back.items() if value != config.get(key)}
assert changed <= {"initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"}, changed
assert tokenizer_back["model"]["merges"] == [m if isinstance(m, str) else " ".join(m)
                                             for m in tokenizer["model"]["merges"]]
assert tokenizer["model"]["vocab"].items() <= tokenizer_back["model"]["vocab"].items()
assert [t["id"] for t in tokenizer_back["added_tokens"]] == [t["id"] for t in tokenizer["added_tokens"] if t["special"]]
assert roles_back["eos_token"] == "<|endoftext|>" and roles_back["chat_template"] == roles["chat_template"]
PY
}
for kind in q8_0 f32 f16 bf16; do check "${kind}_to_hugging_face" there_and_back $kind; done
head -c 700 there.gguf > cut.gguf
expect refuses_a_cut_gguf 3 'cut.gguf: expected a GGUF file' python3 "$root/scripts/gguf_to_hf.py" cut.gguf cut
check no_model_of_a_cut_gguf test ! -e cut
# a value of another kind, a tensor of another type, an array longer than the file: one error line, exit 3
hostile() {  # hostile KEY_OR_TENSOR VALUE
    rm -rf hostile.gguf && python "$@" << 'PY' && python3 "$root/scripts/gguf_to_hf.py" hostile.gguf cut
import gguf, numpy
name, new = sys.argv[1], eval(sys.argv[2])
old, w = gguf.GGUFReader("there.gguf"), gguf.GGUFWriter("hostile.gguf", "llama")
for key, field in list(old.fields.items())[4:]:
    value, kinds = (new, [gguf.GGUFValueType.get_type(new)]) if name == key else (field.contents(), field.types)
    w.add_key_value(key, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
for t in old.tensors:
    w.add_tensor(t.name, *(new,) if name == t.name else (t.data, None, t.tensor_type))
w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
if name == "longer":
    data = open("hostile.gguf", "rb").read().partition(b"tokenizer.ggml.token_type")
    open("hostile.gguf", "wb").write(data[0] + data[1] + data[2][:8] + struct.pack("<Q", 1 << 60) + data[2][16:])
PY
}
for case in llama.attention.head_count={0,'"x"'} llama.attention.head_count_kv=2 \
    tokenizer.ggml.bos_token_id={999,-1} tokenizer.ggml.token_type=7 longer=0 \
    'blk.0.attn_q.weight=numpy.ones((96,64),"i1")' 'blk.0.ffn_up.weight=numpy.ones((96,64),"f")*1e39'; do
    expect "hostile_${case##*.}" 3 hint: hostile "${case%%=*}" "${case#*=}"
done
check no_model_of_a_hostile_gguf test -z "$(ls -d cut cut.p* 2> /dev/null)"
# ---- what is refused, and leaves nothing -----------------------------------------------------------
# refuses NAME CODE PATTERN TYPE [PYTHON]: of a copy of llama/final that the Python code changed
refuses() {
    rm -rf changed && cp -r merges_smollm2 changed && python3 -S - << PY
import json
c, t = json.load(open("changed/config.json")), json.load(open("changed/tokenizer.json"))
w = bytearray(open("changed/model.safetensors", "rb").read())
$5
json.dump(c, open("changed/config.json", "w")), json.dump(t, open("changed/tokenizer.json", "w"))
open("changed/model.safetensors", "wb").write(w)
PY
    expect "refuses_$1" "$2" "$3" export_as changed "$4" x.gguf
}
refuses another_type_of_model 3 'changed/config.json: expected a model_type of llama' f16 'c["model_type"] = "gemma"'
refuses yarn 3 'found yarn' f16 'c["rope_scaling"] = {"type": "yarn", "factor": 2}'
refuses two_ropes 3 'expected one RoPE' f16 'c["rope_parameters"] = {"rope_type": "default", "rope_theta": 7}'
refuses ropes_by_layer 3 'json: full_attention: expected None' f16 'c["rope_parameters"] = {"full_attention": {"rope_theta": 7}}; del c["rope_theta"]'
# each key that the trainer refuses, but dropout, the order of a sum, YaRN's, and what brings other tensors
check_python exporter_refuses_what_the_trainer_does "$root" << 'PY'
sys.path.append(sys.argv[1] + "/scripts")
import export_gguf
table = re.search(r"\} neutral\[\] = \{(.*?)\n\};", open(sys.argv[1] + "/data/models/config.c").read(), re.S).group(1)
keys = set(re.findall(r'"([a-z_]{4,})"', table)) - set("""false true null silu full_attention pretraining_tp
    attention_dropout embd_pdrop hidden_dropout resid_pdrop truncate mscale mscale_all_dim attention_out_bias bias
    is_encoder_decoder qk_layernorm qk_norm qkv_bias use_bias use_qk_norm num_experts num_local_experts
    quantization_config""".split())
config = json.load(open("llama/final/config.json"))
os.mkdir("other")
for key in sorted(keys):
    json.dump({**config, key: "other"}, open("other/config.json", "w"))
    try: export_gguf.read_config("other")
    except SystemExit as e: assert e.code == 3
    else: raise AssertionError(key)
assert len(keys) > 20, keys
PY
LC_ALL=C sed 's/llama.attention.value_length/llama.attention.output_scale/' there.gguf > scaled.gguf
expect refuses_a_gguf_of_more_than_llama 3 'llama.attention.output_scale: expected' python3 "$root/scripts/gguf_to_hf.py" scaled.gguf cut
refuses a_missing_layer 3 'expected 29 tensors of a llama, found 20' f16 'c["num_hidden_layers"] = 3'
refuses too_few_merges 3 "SentencePiece's merges" f16 't = json.load(open("merges_mistral/tokenizer.json")); t["model"]["merges"].pop()'
expect says_that_llama_cpp_adds_spaces 0 '^warning: merges_mistral/tokenizer.json: llama.cpp adds a space' export_as merges_mistral f16 m.gguf
refuses another_pre_tokenizer 3 'tokenizer.json: .*pre_tokenizer' f16 \
    't["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False'
refuses a_normalizer 3 'tokenizer.json: .*normalizer' f16 't["normalizer"] = {"type": "NFKC"}'
refuses more_tokens_than_the_model 3 'the 600 tokens .* id 700' f16 't["added_tokens"][-1]["id"] = 700'
refuses a_cut_file 3 'changed/model.safetensors' f16 'w = w[:-64]'
refuses nan 7 'found NaN or Inf' f16 'w[-2:] = b"\xc0\x7f"'
refuses a_weight_beyond_f16 3 'in the range of f16' f16 'w[-2:] = b"\x80\x49"'
expect refuses_a_file_that_is_there 2 'there.gguf: expected a new file' export_as llama/final f16 there.gguf
expect refuses_no_model 3 'nowhere/config.json' export_as nowhere f16 x.gguf
mkdir adapter && touch adapter/adapter_config.json adapter/adapter_model.safetensors
expect refuses_an_adapter 3 'adapter: expected a model, found an adapter' export_as adapter f16 x.gguf
has and_says_what_makes_a_model '^hint: ./train_llama --adapter adapter --lora-merge --out OUT' out.txt
: > y.gguf.tmp-9999999 && : > "y.gguf.tmp-$$"
expect says_that_llama_cpp_does_not_normalise 0 '^warning: merges_qwen/tokenizer.json: .*NFC' export_as merges_qwen f16 y.gguf
check an_export_that_was_killed_leaves_nothing test "$(echo y.gguf.*)" = "y.gguf.tmp-$$"
cp -r merges_smollm2 many_ends && echo '{"eos_token_id": [7, 5, 9]}' > many_ends/generation_config.json
expect names_the_ends_that_do_not_fit 0 '^warning: many_ends/generation_config.json: llama.cpp has no place for ' export_as many_ends f16 z.gguf
expect refuses_a_full_disk 4 'error: x.gguf' eval '(ulimit -f 100 && trap "" XFSZ && export_as llama/final f32 x.gguf)'
rm y.gguf.tmp-$$
check nothing_is_left eval '! ls -A | grep -E "^x|tmp"'
# ---- llama.cpp ---------------------------------------------------------------------------------------
# A document's loss and the greedy text, by llama.cpp and by ours
llama_cpp_agrees() {  # llama_cpp_agrees MODEL_DIR TYPE
    rm -f asked.gguf && export_as "$1" "$2" asked.gguf || return
    "$release" --model "$1" --eval --train one > eval.txt || return
    "$release" --model "$1" --generate --temperature 0 --prompt 'line 7' --sample-tokens 12 > text.txt 2> /dev/null || return
    python "$2" << 'PY'
import xllamacpp
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
# a token that ends a turn is in generation_config.json: here the fourth byte of the answer
cp -r llama ends && rm -f ends/final/manifest.json
"$release" --model llama/final --generate --temperature 0 --prompt 'line 7' --sample-tokens 12 > whole.txt 2> /dev/null
python << 'PY'
json.dump({"eos_token_id": [257, open("whole.txt", "rb").read()[3]]}, open("ends/final/generation_config.json", "w"))
PY
with_package llama_cpp xllamacpp || finish
# texts that are hard to cut; llama.cpp cannot say that of Mistral's texts only the first one gets a space
for name in llama2 mistral; do
    export_as merges_$name f32 $name.gguf && cp "$root/tests/golden/tokenizers/$name/cases.json" .
    check_python llama_cpp_has_the_tokens_of_$name $name << 'PY'
import urllib.request, xllamacpp
p, (name,) = xllamacpp.CommonParams(), sys.argv[1:]
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.fit_params = name + ".gguf", 256, 1, False, False
server, web = xllamacpp.Server(p), urllib.request.build_opener(urllib.request.ProxyHandler({}))
for case in json.load(open("cases.json")):
    asked = json.dumps({"content": case["text"], "add_special": False, "parse_special": True}).encode()
    found = json.load(web.open(server.listening_address + "/tokenize", asked))["tokens"]
    back = json.load(web.open(server.listening_address + "/detokenize", json.dumps({"tokens": found}).encode()))["content"]
    assert ("\t" in back) == ("\t" in case["text"]), (case, back)
    assert found == case["ids"] or name == "mistral" and re.search(r"^[ \u2581]|</?s>|<unk>|\[INST", case["text"]), (case, found)
PY
done
for model in ends llama mistral qwen2 qwen3 smollm3 granite granite4 llama3; do
    check llama_cpp_agrees_on_$model llama_cpp_agrees $model/final f16
    [ $model != ends ] || check and_stops_after_a_turn test "$(wc -c < text.txt)" -lt "$(wc -c < whole.txt)"
    [ $model != llama ] || check llama_cpp_agrees_in_q8_0 llama_cpp_agrees llama/final q8_0
done
finish
