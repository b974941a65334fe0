#!/usr/bin/env python3
"""A tiny model and questions for tests/test_benchmark.sh and dev/reference/make_bench_golden.py.

    bench_golden.py DIR      writes DIR/model, DIR/model_bos, DIR/NAME.jsonl; needs nothing

The weights are random numbers of Python, exact in bf16, so that no file holds them.
"""
import json
import math
import os
import random
import shutil
import struct
import sys

from runs import put_tensors

HERE = os.path.dirname(os.path.abspath(__file__))
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 32, 48, 4, 2, 8, 2, 344
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB,
          "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
          "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
          "max_position_embeddings": 512, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
          "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 2}


def shapes():
    layer = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
             "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
             "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
             "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    return {"embed_tokens": (VOCAB, HIDDEN), "norm": (HIDDEN,),
            **{"layers.%d.%s" % (i, name): shape for i in range(LAYERS) for name, shape in layer.items()}}


def write_model(directory, bos):
    """bos: the tokenizer begins every text with BOS."""
    rng, weights = random.Random(1), {}
    for name, shape in shapes().items():
        numbers = (rng.gauss(0, 0.3) + (len(shape) == 1) for _ in range(math.prod(shape)))
        data = b"".join(struct.pack("<f", x)[2:] for x in numbers)  # cut to bf16
        weights["model.%s.weight" % name] = "BF16", shape, data
    os.makedirs(directory)
    put_tensors(directory + "/model.safetensors", weights)
    shutil.copy(HERE + "/golden/chat/tokenizer_config.json", directory)
    tokenizer = json.load(open(HERE + "/golden/chat/tokenizer.json"))
    if bos:
        name, a = "<|endoftext|>", {"Sequence": {"id": "A", "type_id": 0}}
        first = {"SpecialToken": {"id": name, "type_id": 0}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing", "single": [first, a],
            "pair": [first, a, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {name: {"id": name, "ids": [0], "tokens": [name]}}}
    for name, content in ("config", CONFIG), ("tokenizer", tokenizer):
        json.dump(content, open("%s/%s.json" % (directory, name), "w"))


def questions():
    """{file: records}"""
    rng = random.Random(2)
    words = "packing documents into one buffer is never padded again that theory of the ocean naïve 日本 4x".split(" ")

    def text(n):
        return " ".join(rng.choice(words) for _ in range(n))

    plain = [{"context": text(rng.randrange(1, 12)), "choices": [text(rng.randrange(1, 6)) for _ in range(n)],
              "answer": rng.randrange(n)} for n in (2, 3, 4, 5) * 5]
    # of the most likely choice for a byte, not for a character
    plain += [{"context": text(n), "choices": ["日本 日本", "C"], "answer": 1} for n in (2, 3, 4, 5)]
    plain += [  # white space at the end of a context is scored
        {"context": "one buffer ", "choices": ["of the theory", "again"], "answer": 0},
        {"context": "Question: is it?\nAnswer:\n \n", "choices": ["never", "once"], "answer": 1},
        {"context": "no break\u00a0\u3000\x1f", "choices": ["never", "日本日本", "a"], "answer": 1},
        {"context": "A. one\nB. two\nAnswer:", "choices": ["A", "B", "C", "D"], "answer": 3},
        {"context": "<|endoftext|>one buffer", "choices": ["one", "two"], "answer": 1},
        {"context": "", "choices": ["the theory", "documents"], "answer": 0},
        {"context": "the same", "choices": ["of", "of"], "answer": 0},
        {"context": "the same", "choices": ["of", "of"], "answer": 1},
        {"context": text(60), "choices": [text(4), text(1)], "answer": 1}]
    joined = [  # tokens that straddle the border
        {"context": "one pa", "choices": ["cking documents", "dder", "dding of"], "answer": 0},
        {"context": "into", "choices": ["the buffer", " the buffer"], "answer": 1},
        {"context": "of one ", "choices": ["the", " the"], "answer": 1}]
    contexts = [{"context": [text(3) + name for name in (" never", " once", " again 日本")],
                 "choices": [rest] * 3, "answer": i} for i, rest in enumerate((text(4), text(2), "of"))]
    return {"plain": plain, "joined": [dict(record, delimiter="") for record in joined], "contexts": contexts}


if __name__ == "__main__":
    write_model(sys.argv[1] + "/model", False)
    write_model(sys.argv[1] + "/model_bos", True)
    for name, records in questions().items():
        open("%s/%s.jsonl" % (sys.argv[1], name), "w").writelines(json.dumps(r) + "\n" for r in records)
