#!/usr/bin/env python3
"""Converts a Llama model from GGUF to a Hugging Face directory: gguf_to_hf.py MODEL.gguf DIR

Quantized weights become bf16; llama.cpp's row order of Q and K becomes Hugging Face's. The
tokenizer must be byte-level BPE like SmolLM2's. Needs the Python package gguf (and its numpy).
DIR must not exist; it appears when it is complete.

Exit codes: 0 done, 2 usage, 3 bad input, 4 disk.
"""
import json
import os
import shutil
import struct
import sys

from command import fail, load

gguf, numpy = load("gguf", "numpy")
USAGE, BAD_INPUT, DISK = 2, 3, 4
ONLY = "only SmolLM2 is known to convert"
CONTROL = 3  # token_type of a special token
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KEYS = """block_count context_length embedding_length feed_forward_length vocab_size rope.freq_base
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon rope.dimension_count""".split()  # others change the maths
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(name):
    parts = name.split(".")
    if len(parts) == 4 and parts[::3] == ["blk", "weight"] and parts[2] in LAYER_NAMES:
        return "model.layers.%s.%s.weight" % (parts[1], LAYER_NAMES[parts[2]])
    if len(parts) == 2 and parts[0] in TOP_NAMES and parts[1] == "weight":
        return TOP_NAMES[parts[0]] + ".weight"
    fail(BAD_INPUT, "expected the tensors of a Llama model, found %s" % name, ONLY)


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
    head_dim = model.get("llama.attention.key_length", hidden // heads)
    for key in model.fields:
        odd = key.endswith(("value_length", "dimension_count")) and model.get(key) != head_dim
        if odd or key.startswith("llama.") and key[6:] not in KEYS:
            fail(BAD_INPUT, "%s: expected what Llama has, found %s" % (key, model.get(key)), ONLY)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": hidden, "intermediate_size": model.get("llama.feed_forward_length"),
        "num_hidden_layers": model.get("llama.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": model.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim, "vocab_size": len(model.get("tokenizer.ggml.tokens")),
        "max_position_embeddings": model.get("llama.context_length"),
        "rope_theta": model.get("llama.rope.freq_base", 10000.0), "rope_scaling": None,
        # stored as a float32
        "rms_norm_eps": float("%.6g" % model.get("llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu", "initializer_range": hidden ** -0.5,
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16", **token_ids(model),
    }


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
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True} for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": {**byte_level, "add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "vocab": {t: i for i, t in enumerate(tokens)},
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
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(
        tensor.name.split(".")[-2])
    if heads:  # llama.cpp rotates adjacent pairs, Hugging Face the two halves of a head
        values = values.reshape(config[heads], shape[0] // config[heads] // 2, 2, shape[1])
        values = values.swapaxes(1, 2).reshape(shape)
    if not numpy.isfinite(values).all():
        fail(BAD_INPUT, "%s: expected finite weights, found NaN or Inf" % tensor.name, ONLY)
    bits = numpy.ascontiguousarray(values, dtype="<f4").view("<u4")
    bits = bits + 0x7fff + (bits >> 16 & 1) >> 16
    return bits.astype("<u2").tobytes()


def write_safetensors(model, config, path):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    tensors = sorted(model.tensors, key=lambda t: hf_name(t.name))
    for tensor in tensors:
        size = 2 * int(tensor.n_elements)
        header[hf_name(tensor.name)] = {"dtype": "BF16", "data_offsets": [at, at + size],
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
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(print(__doc__.strip()))
    if len(sys.argv) != 3:
        fail(USAGE, "expected MODEL.gguf and DIR", "gguf_to_hf.py MODEL.gguf DIR")
    try:
        convert(*sys.argv[1:])
    except OSError as e:
        fail(BAD_INPUT if e.filename == sys.argv[1] else DISK, "%s: %s" % (
            e.filename or sys.argv[2], e.strerror), "check the name, the space and the permissions")
    except Exception as e:  # of gguf and numpy, on a damaged file and on values that make no model
        fail(BAD_INPUT, "%s: expected a GGUF file of a Llama, found %s: %s" % (
            sys.argv[1], type(e).__name__, " ".join(str(e).split())), "download it again; " + ONLY)
