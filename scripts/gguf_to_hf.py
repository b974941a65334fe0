#!/usr/bin/env python3
"""Converts a Llama model from GGUF to a Hugging Face directory: gguf_to_hf.py MODEL.gguf DIR

Quantized weights become bf16; llama.cpp's row order of Q and K becomes Hugging Face's. The
tokenizer must be byte-level BPE like SmolLM2's. Needs the Python package gguf (and its numpy).
DIR must not exist; it appears when it is complete.
"""
import json
import os
import shutil
import struct

from command import BAD_INPUT, DISK, USAGE, Parser, fail, load
from export_gguf import CONTROL, KEYS, swap

gguf, numpy = load("gguf", "numpy")
ONLY = "only SmolLM2 is known to convert"
LAYER = """input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj
    post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj""".split()


class Model(gguf.GGUFReader):
    left = 1 << 19  # parts of its header; SmolLM2's has half as many

    def _get(self, offset, dtype, count=1, **order):  # the package's reads on beyond the end
        part, self.left = super()._get(offset, dtype, count, **order), self.left - 1
        if len(part) == count and self.left:
            return part
        raise ValueError("it ends too early")

    def get(self, key, default=None):
        if key in self.fields:
            return self.fields[key].contents()
        if default is None:
            fail(BAD_INPUT, "no %s in the GGUF file" % key, ONLY)
        return default


def model_config(model, tied):
    if model.get("general.architecture") != "llama":
        fail(BAD_INPUT, "expected a Llama", ONLY)
    heads, hidden = model.get("llama.attention.head_count"), model.get("llama.embedding_length")
    c = {"num_key_value_heads": heads, "head_dim": hidden // heads, "rope_theta": 10000.0,
         "vocab_size": len(model.get("tokenizer.ggml.tokens"))}
    for key, name in KEYS.items():
        c[name] = model.get("llama." + key, c.get(name))
    for key in model.fields:  # others change the maths
        if key.startswith("llama.") and model.get(key) != c.get(KEYS.get(key[6:])):
            fail(BAD_INPUT, "%s: expected what Llama has, found %s" % (key, model.get(key)), ONLY)
    return {**c, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "rms_norm_eps": float("%.6g" % c["rms_norm_eps"]),  # stored as a float32
            "rope_scaling": None, "initializer_range": hidden ** -0.5,
            "tie_word_embeddings": tied, "torch_dtype": "bfloat16", **token_ids(model)}


def hf_names(model, c):
    """Hugging Face's name of each tensor of a Llama, by llama.cpp's."""
    found = {t.name for t in model.tensors}
    layers = range(min(c["num_hidden_layers"], len(found)))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, len(layers))
    names = {table.get_name(name) + ".weight": name + ".weight" for name in [
        "model.embed_tokens", "model.norm"] + ["lm_head"] * (not c["tie_word_embeddings"]) + [
        "model.layers.%d.%s" % (i, name) for i in layers for name in LAYER]}
    for name in found ^ set(names):
        fail(BAD_INPUT, "%s: expected the tensors of a Llama, found others" % name, ONLY)
    return names


def num_weights(c):
    heads = (c["num_attention_heads"] + c["num_key_value_heads"]) * c["head_dim"]
    layers = c["num_hidden_layers"] * (2 + 2 * heads + 3 * c["intermediate_size"])
    return c["hidden_size"] * (layers + 1 + c["vocab_size"] * (2 - c["tie_word_embeddings"]))


def token_ids(model):
    return {name + "_token_id": model.get("tokenizer.ggml.%s_token_id" % key)
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}


def tokenizer_files(model):
    kind = model.get("tokenizer.ggml.model"), model.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        fail(BAD_INPUT, "expected the tokenizer gpt2 smollm, found %s %s" % kind, ONLY)
    tokens, types = model.get("tokenizer.ggml.tokens"), model.get("tokenizer.ggml.token_type")
    if not len(set(tokens)) == len(tokens) == len(types) or min(token_ids(model).values()) < 0:
        fail(BAD_INPUT, "expected different tokens, each with a type, and ids of them", ONLY)
    special = [i for i, t in enumerate(types) if t == CONTROL]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True} for i in special],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": model.get("tokenizer.ggml.merges")},
    }
    named = {name.replace("_id", ""): tokens[i] for name, i in token_ids(model).items()}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **named,
              "unk_token": tokens[model.get("tokenizer.ggml.unknown_token_id")],
              "additional_special_tokens": [named["bos_token"], named["eos_token"]],
              "clean_up_tokenization_spaces": False,
              "model_max_length": model.get("llama.context_length"),
              "chat_template": model.get("tokenizer.chat_template", "")}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config,
            "special_tokens_map.json": named}


def weights(model, tensor, config):
    """The tensor as bf16 bytes, rounded to nearest even."""
    shape = [int(n) for n in reversed(tensor.shape)]
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        values = swap(values, config["head_dim"] // 2, 2)
    if not numpy.isfinite(values).all():
        fail(BAD_INPUT, "%s: expected finite weights, found NaN or Inf" % tensor.name, ONLY)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).tobytes()


def write_safetensors(model, config, path):
    header, at, names = {"__metadata__": {"format": "pt"}}, 0, hf_names(model, config)
    tensors = sorted(model.tensors, key=lambda t: names[t.name])
    for tensor in tensors:
        size = 2 * int(tensor.n_elements)
        header[names[tensor.name]] = {"dtype": "BF16", "data_offsets": [at, at + size],
                                        "shape": [int(n) for n in reversed(tensor.shape)]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            f.write(weights(model, tensor, config))


def convert(source, out):
    if os.path.lexists(out):
        fail(USAGE, "%s: exists already" % out, "choose another directory")
    model = Model(source)
    config = model_config(model, "output.weight" not in [t.name for t in model.tensors])
    if num_weights(config) != sum(int(t.n_elements) for t in model.tensors):
        fail(BAD_INPUT, "expected %s weights, found others" % num_weights(config), ONLY)
    files = {"config.json": config, **tokenizer_files(model),
             "generation_config.json": {"_from_model_config": True, **token_ids(model)}}
    partial = "%s.partial-%d" % (out, os.getpid())
    try:
        os.mkdir(partial)
        for name, value in files.items():
            with open(os.path.join(partial, name), "w", encoding="utf-8") as f:
                f.write(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n")
        write_safetensors(model, config, os.path.join(partial, "model.safetensors"))
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    parser = Parser()
    parser.add_argument("source", metavar="MODEL.gguf")
    parser.add_argument("out", metavar="DIR")
    args = parser.parse_args()
    try:
        convert(args.source, args.out)
    except OSError as e:
        fail(BAD_INPUT if e.filename == args.source else DISK, "%s: %s" % (
            e.filename or args.out, e.strerror), "check the name, the space and the permissions")
    except Exception as e:  # of gguf and numpy, on a damaged file and on values that make no model
        fail(BAD_INPUT, "%s: expected a GGUF file of a Llama, found %s: %s" % (
            args.source, type(e).__name__, " ".join(str(e).split())), "download it again; " + ONLY)
