"""Makes tests/golden/*/lora/: adapters that PEFT has written for the tiny models of tests/golden, and
what PEFT says about them: loss, logits, gradients, ten steps of AdamW. pip install peft

    python dev/reference/make_lora_golden.py                  writes tests/golden/*/lora
    python dev/reference/make_lora_golden.py --load RUN SHARD     exit 0: PEFT loads RUN/final, or
                  transformers its merged model, with the loss on SHARD that RUN/log.jsonl ends with

As in make_golden.py each document runs alone, in fp64. SHARD has the run's validation documents, in
bytes (the built-in tokenizer), each of which begins with token 256.
"""
import argparse
import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from make_golden import GOLDEN, documents, each_alone, fp64_inside, train

# Every linear layer once, alone or with those that share its input; scales 2, 2.5, 0.5, 1
ADAPTERS = {
    "gqa3_tied": (16, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "qwen2": (20, ["q_proj", "v_proj"]),
    "qwen3": (4, ["k_proj", "o_proj", "down_proj"]),
    "smollm3_yarn_rope": (8, ["v_proj", "gate_proj"]),
    "granite4": (8, ["k_proj", "input_linear", "output_linear"]),
}
RANK = 8


def adapter(name, seed):
    """A PEFT model in fp64 with adapters that matter, exact in bf16; writes its directory."""
    alpha, targets = ADAPTERS[name]
    base = AutoModelForCausalLM.from_pretrained(GOLDEN / name, attn_implementation="eager")
    config = peft.LoraConfig(r=RANK, lora_alpha=alpha, target_modules=targets,
                             task_type="CAUSAL_LM", base_model_name_or_path="..")
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    rng = np.random.Generator(np.random.PCG64(seed))
    for n, p in model.named_parameters():
        if "lora_" in n:
            w = rng.standard_normal(tuple(p.shape)) / np.sqrt(p.shape[1])
            w *= 0.25 if "lora_B" in n else 1    # larger: ten steps differ in fp32 and fp64 by 1e-3
            p.data = torch.from_numpy(w).to(torch.bfloat16).float()
    model.peft_config["default"].base_model_name_or_path = ".."
    path = GOLDEN / name / "lora"
    model.save_pretrained(path)
    (path / "README.md").unlink(missing_ok=True)
    config = json.loads((path / "adapter_config.json").read_text())
    config["target_modules"].sort()     # of a set
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return model.double(), path


def measured(model, docs):
    loss, logits = each_alone(model, docs)
    loss.backward()
    out = {"grad." + n.replace(".default", ""): p.grad.clone().float()
           for n, p in model.named_parameters() if p.requires_grad}
    losses, norms, _ = train(model, docs)
    assert all("lora_" in n for n in out)
    out["loss"], out["logits"] = loss.detach().reshape(1).float(), logits.detach().float()
    out["train_losses"] = torch.tensor(losses, dtype=torch.float64).float()
    out["grad_norms"] = torch.tensor(norms, dtype=torch.float64).float()
    print(f"loss {loss.item():.9f}, after {len(losses)} steps {losses[-1]:.6f}")
    return {n: t.contiguous() for n, t in out.items()}


def make(name, seed):
    docs = documents(load_file(GOLDEN / name / "expected.safetensors"))
    model, path = adapter(name, seed)
    print(name, end=": ")
    with fp64_inside(model):
        save_file(measured(model, docs), path / "expected.safetensors")


def load(run, shard):
    """Ours, read by PEFT or, merged, by transformers."""
    path = pathlib.Path(run) / "final"
    tokens = np.fromfile(shard, dtype=np.uint16)[512:].astype(np.int64)
    docs = [torch.from_numpy(d) for d in np.split(tokens, np.flatnonzero(tokens == 256)) if len(d)]
    model, without = path, float("nan")
    if (path / "adapter_config.json").exists():
        model = json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager",
                                                 dtype=torch.float32)
    with torch.no_grad():
        if (path / "adapter_config.json").exists():
            without = each_alone(model, docs)[0].item()
            model = peft.PeftModel.from_pretrained(model, path)
        theirs = each_alone(model, docs)[0].item()
    lines = [json.loads(line) for line in (pathlib.Path(run) / "log.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if line.get("event") == "val"][-1]
    print(f"{path}: loss {ours:.8f}, theirs {theirs:.8f}, without the adapter {without:.8f}")
    return abs(ours - theirs) <= 2e-6 * theirs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", nargs=2, metavar=("RUN", "SHARD"), help="check a run of ours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, "
          f"peft {peft.__version__}")
    if options.load:
        return 0 if load(*options.load) else 1
    for seed, name in enumerate(ADAPTERS):
        make(name, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
