"""Does a checkpoint directory load in transformers as it stands?

    python dev/reference/check_hf_dir.py DIR [--prompt TEXT] [--new-tokens N] [--params N]

Loads DIR with AutoModelForCausalLM, prints the number of parameters, refuses missing, unexpected
or mismatched tensors, weights that differ from the file and outputs that are not finite. With a
tokenizer.json it also encodes and decodes the prompt and prints a greedy continuation.
Exit status 0: all of this held. 1: something did not, and the last line says what.
"""
import argparse
import json
import pathlib
import sys

import torch
import transformers
from safetensors import safe_open


def check(condition, message):
    if not condition:
        raise SystemExit(f"FAILED: {message}")


def tensors(path):
    """Every tensor of the weight files; an index must say exactly what is in its files."""
    files, index = ["model.safetensors"], None
    if not (path / files[0]).is_file():
        index = json.loads((path / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
    found, size = {}, 0
    for file in files:
        with safe_open(path / file, framework="pt") as f:
            for name in f.keys():
                check(name not in found, f"{name} is in two files")
                found[name] = file
                tensor = f.get_tensor(name)
                size += tensor.numel() * tensor.element_size()
                yield name, tensor
    if index:
        check(found == index["weight_map"], "the index names other tensors than its files hold")
        check(size == index["metadata"]["total_size"], f"total_size is not {size}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--new-tokens", type=int, default=32,
                        help="length of the greedy continuation")
    parser.add_argument("--params", type=int, help="the number of parameters that must be there")
    options = parser.parse_args()
    path = options.dir
    check((path / "config.json").is_file(), f"{path}: no config.json")
    transformers.logging.set_verbosity_error()

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, torch_dtype="auto", output_loading_info=True, local_files_only=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        check(not info[kind], f"{kind}: {sorted(map(str, info[kind]))}")
    state, seen = model.state_dict(), set()
    for name, stored in tensors(path):
        check(name in state, f"{name} is not a tensor of the model")
        check(bool(torch.isfinite(stored).all()), f"{name}: not finite")
        check(torch.equal(stored.to(state[name].dtype), state[name]), f"{name}: other values")
        seen.add(name)
    tied = model.config.tie_word_embeddings
    absent = set(state) - seen - ({"lm_head.weight"} if tied else set())
    check(not absent, f"not in the files: {sorted(absent)}")

    count = model.num_parameters()
    check(options.params in (None, count), f"{count} parameters, expected {options.params}")
    print(f"{path}: {type(model).__name__}, {count:,} parameters, {len(seen)} tensors, "
          f"{str(model.dtype).replace('torch.', '')}, {'tied' if tied else 'untied'}")

    ids = torch.arange(8)[None] % model.config.vocab_size
    if (path / "tokenizer.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        check(len(tokenizer) <= model.config.vocab_size,
              f"tokenizer has {len(tokenizer)} entries, vocab_size is {model.config.vocab_size}")
        ids = tokenizer(options.prompt, return_tensors="pt").input_ids
        check(ids.numel() > 0, "the prompt has no tokens")
        back = tokenizer.decode(ids[0], skip_special_tokens=True)
        check(back == options.prompt, f"prompt comes back as {back!r}")
    else:
        tokenizer = None
        print("no tokenizer.json: tokenizer and text not checked")
    model.eval()
    with torch.no_grad():
        for _ in range(options.new_tokens):
            logits = model(ids).logits[0, -1]
            check(bool(torch.isfinite(logits).all()), "logits are not finite")
            ids = torch.cat((ids, logits.argmax().reshape(1, 1)), dim=1)
    print(tokenizer.decode(ids[0]) if tokenizer else f"token ids {ids[0].tolist()}")
    print("ok: loads in transformers", transformers.__version__)


if __name__ == "__main__":
    try:
        main()
    except SystemExit:
        raise
    except Exception as error:      # what from_pretrained raised is the finding
        sys.exit(f"FAILED: {type(error).__name__}: {' '.join(str(error).split())}")
