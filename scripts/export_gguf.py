#!/usr/bin/env python3
"""Converts a Hugging Face directory to llama.cpp's file format:
export_gguf.py DIR MODEL.gguf [--type bf16|f16|f32|q8_0]

For the models that the trainer writes (Llama, Mistral, Qwen2, Qwen3, SmolLM3, Granite), with BPE,
byte-level or SentencePiece's. --type (default bf16) applies to matrices; vectors are f32. q8_0 uses
8 bits per element and an f16 scale per 32; matrices whose rows are not multiples of 32 become f16.
Needs the Python package gguf. MODEL.gguf must not exist; it appears when it is complete.
"""
import glob
import json
import math
import os
from itertools import groupby

from command import BAD_INPUT, DISK, DIVERGED, USAGE, Parser, fail, load, run_main, warn

gguf, numpy = load("gguf", "numpy")
# model_type: llama.cpp's architecture, and the tensors of a layer
FAMILIES = {"llama": ("LLAMA", 9), "mistral": ("LLAMA", 9), "qwen2": ("QWEN2", 12),
            "qwen3": ("QWEN3", 11), "smollm3": ("SMOLLM3", 9), "granite": ("GRANITE", 9)}
# Granite's keys
MULTIPLIERS = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
               "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
# Keys that change the maths but add no tensors, by llama.cpp's value (see data/models/config.c)
NEUTRAL = {False: """alibi attention_bias mlp_bias use_mrope parallel_residual use_sliding_window
    rope_interleaved use_parallel_residual""", None: """attention_multiplier auto_map sliding_window
    attn_logit_softcapping final_logit_softcapping full_attention hidden_activation clip_qkv
    mup_scale""", 1: """embedding_multiplier logit_scale logits_scaling partial_rotary_factor
    scale_emb residual_multiplier rotary_pct scale_depth""", "silu": "hidden_act", "full_attention":
    "layer_types"}
# Metadata, after the name of the architecture, and the members of config.json
KEYS = {"vocab_size": "vocab_size", "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
        "attention.value_length": "head_dim", "rope.dimension_count": "head_dim",
        "rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LLAMA3_WORDS = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| "
                "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
# How text is cut into words before ByteLevel, and the normalizer: llama.cpp's name
PRE_TOKENIZERS = {(None, None): "gpt-2", ("Digits", None): "smollm",
                  (LLAMA3_WORDS % "{1,3}", None): "llama-bpe", (LLAMA3_WORDS % "", "NFC"): "qwen2"}
# SentencePiece's spaces: the normalizers of Llama 2, or the pre_tokenizer of Mistral 0.3
SPACES = [{"type": "Prepend", "prepend": "\u2581"},
          {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "split": False}
BYTES = {"<0x%02X>" % i for i in range(256)}
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # types of tokens


def bad(path, what, hint="llama.cpp's convert_hf_to_gguf.py knows more of them"):
    fail(BAD_INPUT, "%s: %s" % (path, what), hint)


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError) as e:
        bad(path, "expected JSON: %s" % e, "give a Hugging Face directory with its tokenizer")


def read_config(source):
    """config.json with rope (an object), rope_theta and head_dim; refuses other maths."""
    path = os.path.join(source, "config.json")
    c = read_json(path)
    if c.get("model_type") == "granitemoehybrid":  # its Mamba and experts are unknown tensors
        if c.get("position_embedding_type") != "rope":
            bad(path, "expected a Granite 4 with RoPE, found one without")
        c.update(model_type="granite", layer_types=None, intermediate_size=c["shared_intermediate_size"])
    family, rope = c.get("model_type"), c.get("rope_scaling") or c.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    llama, layers = family in ("llama", "mistral"), range(1, c["num_hidden_layers"] + 1)
    no_rope = [int(family != "smollm3" or i % 4 != 0) for i in layers]
    if family not in FAMILIES:
        bad(path, "expected a model_type of %s, found %s" % (", ".join(FAMILIES), family))
    if kind not in ("default", "linear") and not (llama and kind == "llama3"):
        bad(path, "expected RoPE that llama.cpp has for %s, found %s" % (family, kind))
    if family == "granite":
        c = {**dict.fromkeys(MULTIPLIERS.values(), 1), **c}
    own = MULTIPLIERS.values() if family == "granite" else ()
    maths = {**c, **rope, "sliding_window": c.get("sliding_window", 4096 if family == "mistral" else
                                                  None) if llama else None}
    wrong = [(key, value, maths[key]) for value, keys in NEUTRAL.items() for key in keys.split()
             if key not in own and maths.get(key, value) not in (value, None, ["full_attention"] * len(layers))]
    if wrong:
        bad(path, "%s: expected %s, found %s" % wrong[0])
    if no_rope != (c.get("no_rope_layers") or no_rope) or c.get("no_rope_layer_interval", 4) != 4:
        bad(path, "expected every fourth layer without RoPE in SmolLM3, found others")
    theta = rope.get("rope_theta") or c["rope_theta"]
    if c.get("rope_theta", theta) != theta or c.get("rope_scaling") and c.get("rope_parameters"):
        bad(path, "expected one RoPE, found rope_theta, rope_scaling or rope_parameters twice")
    c["rope"], c["rope_theta"] = {**rope, "rope_type": kind}, theta
    c["head_dim"] = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    c["num_key_value_heads"] = c.get("num_key_value_heads") or c["num_attention_heads"]
    return c


def put_config(w, c):
    for key, name in KEYS.items():
        put = w.add_float32 if name in ("rope_theta", "rms_norm_eps") else w.add_uint32
        put("%s.%s" % (w.arch, key), c[name])
    for key, name in MULTIPLIERS.items() if c["model_type"] == "granite" else ():
        w.add_float32("%s.%s" % (w.arch, key), c[name])
    if c["rope"]["rope_type"] == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(c["rope"]["factor"])


def rope_factors(c):
    """Returns the divisors of the frequencies of plain RoPE, for llama3; else nothing."""
    rope, factors = c["rope"], []
    for i in range(c["head_dim"] // 2 if rope["rope_type"] == "llama3" else 0):
        length = 2 * math.pi * c["rope_theta"] ** (2 * i / c["head_dim"])
        turns, low = rope["original_max_position_embeddings"] / length, rope["low_freq_factor"]
        smooth = min(1, max(0, (turns - low) / (rope["high_freq_factor"] - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return numpy.array(factors, "<f4")


# ------------------------------------------------------------------------------------------------
# tokenizer.json

def pre_tokenizer_name(tokenizer, path):
    pre, normalizer = tokenizer.get("pre_tokenizer") or {}, tokenizer.get("normalizer") or {}
    *before, last = pre.get("pretokenizers", [pre])
    part = before[0] if before else {}
    cut = part.get("type")
    if cut == "Split" and part["behavior"] == "Isolated" and not part.get("invert"):
        cut = part["pattern"].get("Regex")
    if cut == "Digits" and not part["individual_digits"]:
        cut = "groups of digits"
    byte_level = last.get("type") == "ByteLevel" and not last.get("add_prefix_space") and (
        last.get("use_regex", True) == (cut in (None, "Digits")))
    if not tokenizer["model"]["merges"] and not normalizer:
        return "gpt-2"  # without merges all types give the same tokens
    if not byte_level or len(before) > 1 or (cut, normalizer.get("type")) not in PRE_TOKENIZERS:
        bad(path, "expected byte-level BPE that splits text as GPT-2, SmolLM2, Llama 3 or "
            "Qwen do, found another %s" % ("normalizer" if normalizer else "pre_tokenizer"))
    return PRE_TOKENIZERS[cut, normalizer.get("type")]


def put_sentencepiece(w, tokenizer, texts, path):
    """llama.cpp joins any two tokens that make one, those of the highest score first."""
    model, pre, normal = (tokenizer.get(k) or {} for k in ("model", "pre_tokenizer", "normalizer"))
    vocab, never = model["vocab"], pre.get("prepend_scheme") == "never"
    pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    made = ["".join(pair) for pair in pairs]
    words = [text for text, _ in groupby(made) if text.strip("\u2581")]  # spaces alternate
    scores = {text: -float(rank) for rank, text in reversed([*enumerate(made)])}  # the first rank
    every = {p for t in vocab for i in range(len(t)) if {*(p := (t[:i], t[i:]))} <= vocab.keys()}
    spaced = pre == {**pre, **METASPACE} if pre else normal.get("normalizers") == SPACES
    if not spaced or pre and normal or model.get("ignore_merges"):
        bad(path, "expected BPE that splits text as Llama 2 or Mistral do, found another")
    if {*pairs} != every or len(words) > len({*words}) or not BYTES <= vocab.keys():
        bad(path, "expected SentencePiece's merges and bytes, found others")
    if pre and not never:
        warn("%s: llama.cpp adds a space to text that begins with one or follows a special token" % path)
    w.add_token_scores([scores.get(text, 0.0) for text in texts])
    w.add_add_space_prefix(not never)


def put_tokenizer(w, source, c):
    path, vocab_size = os.path.join(source, "tokenizer.json"), c["vocab_size"]
    tokenizer = read_json(path)
    model, own = tokenizer["model"], BYTES if tokenizer["model"].get("byte_fallback") else ()
    texts, types = ["[PAD%d]" % i for i in range(vocab_size)], [UNUSED] * vocab_size
    for i, text, kind in [(i, t, BYTE if t in own else NORMAL) for t, i in model["vocab"].items()] + [
            (t["id"], t["content"], CONTROL if t["special"] else USER_DEFINED)
            for t in tokenizer["added_tokens"]]:
        if i >= vocab_size:
            bad(path, "expected at most the %d tokens of config.json, found id %d" % (vocab_size, i))
        texts[i], types[i] = text, kind
    w.add_tokenizer_model("llama" if own else "gpt2")
    w.add_tokenizer_pre("default" if own else pre_tokenizer_name(tokenizer, path))
    w.add_token_list(texts)
    w.add_token_types(types)
    if own:
        put_sentencepiece(w, tokenizer, texts, path)
    else:  # llama.cpp needs merges, and the package writes no empty list: one that never applies
        w.add_token_merges([m if isinstance(m, str) else " ".join(m)
                            for m in model["merges"]] or ["<none> <none>"])
    if tokenizer.get("normalizer") and not own:
        warn("%s: llama.cpp does not normalise texts (NFC): decomposed characters give other "
             "tokens there" % path)
    special = gguf.SpecialVocab(source, n_vocab=vocab_size)
    special.add_special_token.setdefault("bos", False)  # llama.cpp's default depends on the name
    # llama.cpp ends a text at any of three, and at some more that it knows by name
    path, roles = os.path.join(source, "generation_config.json"), special.special_token_ids
    more = read_json(path) if os.path.exists(path) else {}
    ends = [i for ids in (c.get("eos_token_id"), more.get("eos_token_id"))
            for i in (ids if isinstance(ids, list) else [ids]) if i in range(vocab_size)]
    ends = sorted({i: 0 for i in ends if i != roles.get("eos")}, key=lambda i: "eom" in texts[i])
    free = [k for k in ("eos", "eot", "eom") if k not in roles]
    roles.update(zip(free, ends))
    if ends[len(free):]:
        warn("%s: llama.cpp has no place for %s, and may not stop there" % (
            path, ", ".join(texts[i] for i in ends[len(free):])))
    template = os.path.join(source, "chat_template.jinja")
    if os.path.exists(template):  # before that of tokenizer_config.json, as in transformers
        with open(template, encoding="utf-8") as f:
            special.chat_template = f.read()
    special.add_to_gguf(w, quiet=True)


# ------------------------------------------------------------------------------------------------
# Weights

def list_weights(source):
    """Name -> file, dtype, shape, offset of every tensor in the directory."""
    index, found = os.path.join(source, "model.safetensors.index.json"), {}
    names = (set(read_json(index)["weight_map"].values()) if os.path.exists(index)
             else ["model.safetensors"])
    for path in sorted(os.path.join(source, name) for name in names):
        try:
            with open(path, "rb") as f:
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
        except (OSError, ValueError, OverflowError, MemoryError) as e:
            bad(path, "expected a safetensors file: %s" % e, "copy it again")
        for name, t in header.items():
            if name != "__metadata__":
                first, last = t["data_offsets"]
                put_tensor(found, name, path, t["dtype"], t["shape"], 8 + size + first, last - first)
    return found


def put_tensor(found, name, path, dtype, shape, at, size):
    """Adds a tensor: of Granite 4 under Granite's names, which has two for gate and up."""
    if name.endswith("shared_mlp.input_linear.weight"):
        half = [shape[0] // 2, shape[1]]
        for i, part in enumerate(("mlp.gate_proj", "mlp.up_proj")):
            found[name.replace("shared_mlp.input_linear", part)] = path, dtype, half, at + i * size // 2
    else:
        found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = path, dtype, shape, at


def read_weights(name, path, dtype, shape, offset):
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    if dtype not in kinds:
        bad(path, "%s: expected F32, BF16 or F16, found %s" % (name, dtype))
    try:
        values = numpy.memmap(path, kinds[dtype], "r", offset, tuple(shape))
    except (OSError, ValueError) as e:
        bad(path, "%s: %s" % (name, e), "copy it again")
    values = (values.astype("<u4") << 16).view("<f4") if dtype == "BF16" else values.astype("<f4")
    if not numpy.isfinite(values).all():
        fail(DIVERGED, "%s: expected finite weights, found NaN or Inf in %s" % (path, name),
             "take an earlier checkpoint")
    return values


def gguf_names(c, weights, source):
    """llama.cpp's name of each tensor of a complete model."""
    arch, per_layer = FAMILIES[c["model_type"]]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], c["num_hidden_layers"])
    tied = c.get("tie_word_embeddings", c["model_type"] == "smollm3")
    names = {name: table.get_name(name, try_suffixes=(".weight", ".bias"))
             for name in weights if not (tied and name == "lm_head.weight")}
    expected = c["num_hidden_layers"] * per_layer + (2 if tied else 3)
    unknown = [name for name, known in names.items() if not known]
    if unknown or len(names) != expected:
        bad(source, "expected %d tensors of a %s, found %s" % (
            expected, c["model_type"], unknown[0] if unknown else len(names)))
    return names


def type_of(shape, kind):
    types = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return types.F32
    return types.F16 if kind == "q8_0" and shape[-1] % 32 else types[kind.upper()]


def stored(values, kind, name):
    with numpy.errstate(over="ignore"):
        data = gguf.quants.quantize(values, kind)
        if not numpy.isfinite(gguf.quants.dequantize(data, kind)).all():
            bad(name, "expected weights in the range of %s, found a larger one"
                % kind.name.lower(), "--type f32 has the range of all")
    return data


def swap(values, *halves_and_pairs):
    """The rows of Q or K in the other order: Hugging Face rotates the two halves of a head
    (2, head_dim // 2), llama.cpp neighbours (head_dim // 2, 2), but for Qwen."""
    rows = values.reshape(-1, *halves_and_pairs, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


# ------------------------------------------------------------------------------------------------
# The file

def write(w, c, weights, names, kind, path):
    factors = rope_factors(c)
    for name, known in names.items():
        shape = weights[name][2]
        as_type = type_of(shape, kind)
        n_bytes = math.prod(gguf.quant_shape_to_byte_shape(shape, as_type))
        w.add_tensor_info(known, shape, numpy.dtype("<f4"), n_bytes, as_type)
    if len(factors):
        w.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    w.write_header_to_file(path)
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for name in names:
        values = read_weights(name, *weights[name])
        if "qwen" not in c["model_type"] and (".q_proj." in name or ".k_proj." in name):
            values = swap(values, 2, c["head_dim"] // 2)
        w.write_tensor_data(stored(values, type_of(values.shape, kind), name))
    if len(factors):
        w.write_tensor_data(factors)
    w.flush()
    os.fsync(w.fout[0].fileno())
    w.close()


def export(source, path, kind):
    if os.path.lexists(path):
        fail(USAGE, "%s: expected a new file, found one" % path, "remove it, or give another")
    if os.path.exists(os.path.join(source, "adapter_config.json")):
        bad(source, "expected a model, found an adapter",
            "./train_llama --adapter %s --lora-merge --out OUT makes OUT/final, a model" % source)
    c, weights = read_config(source), list_weights(source)
    names = gguf_names(c, weights, source)
    w = gguf.GGUFWriter(None, FAMILIES[c["model_type"]][0].lower())
    w.add_file_type(gguf.LlamaFileType[("ALL_" if kind == "f32" else "MOSTLY_") + kind.upper()])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    put_config(w, c)
    put_tokenizer(w, source, c)
    for left in glob.glob(glob.escape(path) + ".tmp-[0-9]*"):  # of exports that were killed
        os.path.exists("/proc/" + left.rpartition("-")[2]) or os.remove(left)
    partial = "%s.tmp-%d" % (path, os.getpid())
    try:
        write(w, c, weights, names, kind, partial)
        os.rename(partial, path)
    except OSError as e:
        fail(DISK, "%s: %s" % (path, e), "check the space and the permissions")
    finally:
        if os.path.exists(partial):
            os.remove(partial)
    print("wrote %s: %.2f M parameters, %s" % (
        path, sum(math.prod(weights[name][2]) for name in names) * 1e-6, kind))


def main():
    parser = Parser()
    parser.add_argument("source", metavar="DIR")
    parser.add_argument("path", metavar="MODEL.gguf")
    parser.add_argument("--type", choices=("bf16", "f16", "f32", "q8_0"), default="bf16")
    args = parser.parse_args()
    try:
        export(args.source, args.path, args.type)
    except Exception as e:  # on what is missing, or is of another kind
        bad(args.source, "expected a whole model, found %s: %s" % (type(e).__name__, e),
            "is it what the trainer or transformers wrote?")


if __name__ == "__main__":
    run_main(main)
