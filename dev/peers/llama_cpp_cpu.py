"""llama.cpp's trainer against ours on the CPU: the same weights and tokens, step by step in turns.

    pip install xllamacpp==2026.10.11549        a wheel with llama.cpp and its llama_opt_* functions
    make build/cpu/bench_step && python3 dev/peers/llama_cpp_cpu.py --model smollm2-135m

fp32, AdamW, one document, for llama.cpp trains on rows of one length. It leaves the embedding as it
is, so the head here has its own weights, and it does not clip gradients. The losses of the first
step must agree to 1e-5 of their size, and how far the steps lower them to a fifth.
"""
import argparse
import array
import ctypes
import importlib.util
import json
import math
import os
import pathlib
import random
import struct
import sys
import tempfile
import time

from turns import BUILD, ours, ratio, take_turns, times

WHEEL = "xllamacpp==2026.10.11549"      # structs that are passed by value: as in this version
HEAD_DIM, F32, I32, NONE, OFF, ADAMW = 64, 0, 26, 0, 0, 0
HYPER = 1e-6, 0.9, 0.95, 1e-8, 0.1, 0, 0        # of AdamW as in bench_step.c; the last two of SGD
KEYS = "num_hidden_layers hidden_size intermediate_size vocab_size num_attention_heads " \
       "num_key_value_heads"
MODELS = {"demo": (6, 192, 512, 264, 3, 1), "smollm2-135m": (30, 576, 1536, 49152, 9, 3)}


# --- The model, in a Hugging Face directory and as GGUF

def tensors(d):
    """(name here, name in GGUF, shape) in the order of both files."""
    hidden, ffn, vocab = d["hidden_size"], d["intermediate_size"], d["vocab_size"]
    wide, narrow = (d[f"num_{x}_heads"] * HEAD_DIM for x in ("attention", "key_value"))
    yield "model.embed_tokens", "token_embd", (vocab, hidden)
    for layer in range(d["num_hidden_layers"]):
        for name, gguf, *shape in (
                ("input_layernorm", "attn_norm", hidden),
                ("self_attn.q_proj", "attn_q", wide, hidden),
                ("self_attn.k_proj", "attn_k", narrow, hidden),
                ("self_attn.v_proj", "attn_v", narrow, hidden),
                ("self_attn.o_proj", "attn_output", hidden, wide),
                ("post_attention_layernorm", "ffn_norm", hidden),
                ("mlp.gate_proj", "ffn_gate", ffn, hidden), ("mlp.up_proj", "ffn_up", ffn, hidden),
                ("mlp.down_proj", "ffn_down", hidden, ffn)):
            yield f"model.layers.{layer}.{name}", f"blk.{layer}.{gguf}", shape
    yield "model.norm", "output_norm", (hidden,)
    yield "lm_head", "output", (vocab, hidden)


def random_weights():
    """A function of a shape: fp32 as bytes. A prime number of them is drawn and repeated."""
    normal, at = random.Random(1), 0
    drawn = array.array("f", (normal.gauss(0, 1 / 24) for _ in range(65537)))

    def weights(shape):
        nonlocal at
        if len(shape) == 1:
            return array.array("f", [1]) * shape[0]
        begin, at = at, at + math.prod(shape)
        tile = drawn * (at // len(drawn) + 1)
        at %= len(drawn)
        return tile[begin:begin + math.prod(shape)]
    return weights


def interleaved(w, columns):
    """The rows of Q and K in llama.cpp's order: RoPE rotates neighbours, not half a head apart."""
    rows, half = [w[i:i + columns] for i in range(0, len(w), columns)], HEAD_DIM // 2
    order = (h + i + k for h in range(0, len(rows), HEAD_DIM)
             for i in range(half) for k in (0, half))
    return b"".join(rows[i] for i in order)


def gguf_head(d, tensors):
    def text(s):
        return struct.pack("<Q", len(s)) + s.encode()

    def value(v):
        kind, data = {str: (8, text), float: (6, lambda x: struct.pack("<f", x)),
                      int: (4, lambda x: struct.pack("<I", x))}[type(v)]
        return struct.pack("<I", kind) + data(v)

    layers, hidden, ffn, vocab, heads, kv_heads = (d[k] for k in KEYS.split())
    values = {"general.architecture": "llama", "tokenizer.ggml.model": "none"}
    for name, v in (("block_count", layers), ("embedding_length", hidden), ("vocab_size", vocab),
                    ("feed_forward_length", ffn), ("context_length", 8192),
                    ("attention.head_count", heads), ("attention.head_count_kv", kv_heads),
                    ("attention.layer_norm_rms_epsilon", d["rms_norm_eps"]),
                    ("rope.freq_base", d["rope_theta"])):
        values[f"llama.{name}"] = v
    head, at = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)), 0
    for name, v in values.items():
        head += text(name) + value(v)
    for _, name, shape in tensors:
        head += text(name + ".weight") + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}QIQ", *reversed(shape), F32, at)
        at += 4 * math.prod(shape)      # multiples of 32 bytes, as GGUF wants them
    return head + bytes(-len(head) % 32)


def write_model(d, folder):
    parts, head, at, weights = list(tensors(d)), {}, 0, random_weights()
    for name, _, shape in parts:
        end = at + 4 * math.prod(shape)
        head[name + ".weight"] = dict(dtype="F32", shape=list(shape), data_offsets=[at, end])
        at = end
    text = json.dumps(head).encode()
    (folder / "config.json").write_text(json.dumps(d))
    with open(folder / "model.safetensors", "wb") as f, open(folder / "model.gguf", "wb") as gguf:
        f.write(struct.pack("<Q", len(text)) + text)
        gguf.write(gguf_head(d, parts))
        for _, name, shape in parts:
            w = weights(shape)
            f.write(w)
            gguf.write(interleaved(w, shape[1]) if name.endswith(("attn_q", "attn_k")) else w)


# --- llama.cpp

class Params(ctypes.Structure):
    """llama_model_params or llama_context_params, and room for what a version adds at its end."""
    _fields_ = [("i", ctypes.c_int32 * 64)]


class OptParams(ctypes.Structure):
    _fields_ = [("n_ctx_train", ctypes.c_uint32), ("param_filter", ctypes.c_void_p),
                ("param_filter_ud", ctypes.c_void_p), ("get_opt_pars", ctypes.c_void_p),
                ("get_opt_pars_ud", ctypes.c_void_p), ("optimizer_type", ctypes.c_int)]


def load_library(path):
    lib, p, i64 = ctypes.CDLL(path), ctypes.c_void_p, ctypes.c_int64
    for name, result, *arguments in (
            ("llama_log_set", None, p, p),
            ("llama_model_default_params", Params), ("llama_context_default_params", Params),
            ("llama_model_load_from_file", p, ctypes.c_char_p, Params),
            ("llama_init_from_model", p, p, Params), ("llama_opt_init", None, p, p, OptParams),
            ("llama_opt_epoch", None, p, p, p, p, i64, p, p), ("ggml_get_data", p, p),
            ("ggml_opt_dataset_init", p, ctypes.c_int, ctypes.c_int, i64, i64, i64, i64),
            ("ggml_opt_dataset_data", p, p), ("ggml_opt_dataset_labels", p, p),
            ("ggml_opt_result_init", p), ("ggml_opt_result_reset", None, p),
            ("ggml_opt_result_loss", None, p, p, p)):
        f = getattr(lib, name)
        f.restype, f.argtypes = result, arguments
    return lib


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, path, model, tokens, threads):
        self.lib = lib = load_library(path)
        quiet = self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda *_: None)
        lib.llama_log_set(ctypes.cast(quiet, ctypes.c_void_p), None)
        m, c = lib.llama_model_default_params(), lib.llama_context_default_params()
        n = len(tokens) - 1
        found = m.i[4:7] + c.i[:4] + c.i[7:9] + c.i[13:14] + c.i[26:28]
        if found != [-1, 1, -1, 512, 2048, 512, 1, 4, 4, -1, 1, 1]:
            sys.exit(f"FAILED: this version passes other structs: pip install {WHEEL}")
        m.i[6] = NONE                           # load_mode: not mapped, so that weights can change
        c.i[0:3], c.i[7:9] = [n] * 3, [threads] * 2     # n_ctx, n_batch, n_ubatch
        c.i[13], c.i[26:28] = OFF, [F32] * 2    # flash_attn_type, type_k, type_v
        model = lib.llama_model_load_from_file(str(model).encode(), m)
        self.context = lib.llama_init_from_model(model, c)
        self.hyper = (ctypes.c_float * len(HYPER))(*HYPER)
        lib.llama_opt_init(self.context, model, OptParams(
            0, ctypes.cast(lib.llama_opt_param_filter_all, ctypes.c_void_p), None,
            ctypes.cast(lib.ggml_opt_get_constant_optimizer_params, ctypes.c_void_p),
            ctypes.addressof(self.hyper), ADAMW))
        self.result = lib.ggml_opt_result_init()
        self.data = lib.ggml_opt_dataset_init(I32, I32, n, n, 1, 1)
        for of, part in ((lib.ggml_opt_dataset_data, tokens[:-1]),
                         (lib.ggml_opt_dataset_labels, tokens[1:])):
            ctypes.memmove(lib.ggml_get_data(of(self.data)), (ctypes.c_int32 * n)(*part), 4 * n)

    def step(self):
        start, loss = time.perf_counter(), ctypes.c_double()
        self.lib.ggml_opt_result_reset(self.result)
        self.lib.llama_opt_epoch(self.context, self.data, self.result, None, 1, None, None)
        self.lib.ggml_opt_result_loss(self.result, ctypes.byref(loss), None)
        return time.perf_counter() - start, loss.value


def splitmix64(x):      # bench_step.c's tokens
    mask = (1 << 64) - 1
    x = (x + 0x9e3779b97f4a7c15) & mask
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & mask
    x = (x ^ x >> 27) * 0x94d049bb133111eb & mask
    return x ^ x >> 31


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="demo", help="dimensions, random weights")
    add("--tokens", type=int, default=512, help="of the document; a multiple of 256")
    add("--steps", type=int, default=3, help="timed steps of each")
    add("--threads", type=int, default=os.cpu_count())
    o = parser.parse_args()
    spec = importlib.util.find_spec("xllamacpp")
    if not spec:
        print(f"llama.cpp: not installed: pip install {WHEEL}")
        return
    library = next(pathlib.Path(spec.origin).parent.glob("xllamacpp*.so"))
    d = dict(zip(KEYS.split(), MODELS[o.model]), head_dim=HEAD_DIM, rms_norm_eps=1e-5,
             rope_theta=1e5, tie_word_embeddings=False, model_type="llama", hidden_act="silu",
             max_position_embeddings=8192)
    tokens = [splitmix64(i) % d["vocab_size"] for i in range(o.tokens + 1)]
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        write_model(d, pathlib.Path(folder))
        theirs = LlamaCpp(library, folder + "/model.gguf", tokens, o.threads)
        us = ours(o.threads, "--model", folder, "--weights", folder, "--lengths", len(tokens))
        take_turns([us, theirs], o.steps)
    (first, last), (their_first, their_last) = ((p.losses[0], p.losses[-1]) for p in (us, theirs))
    if abs(first - their_first) > 1e-5 * first:
        sys.exit(f"FAILED: the first losses differ: ours {first}, llama.cpp {their_first}")
    if not 0.8 < (their_first - their_last) / (first - last) < 1.25:
        sys.exit(f"FAILED: the losses fall differently: {us.losses}, llama.cpp {theirs.losses}")
    print(f"{o.model}, a document of {o.tokens} tokens, fp32, {o.threads} threads")
    for p in us, theirs:
        print(f"{times(p, o.tokens)} loss {p.losses[0]:.6f} to {p.losses[-1]:.6f}")
    print(f"ours {ratio(us, theirs):.2f} times the speed of llama.cpp")


if __name__ == "__main__":
    main()
