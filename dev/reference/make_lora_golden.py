"""Makes tests/golden/*/lora/: adapters that PEFT has written for the tiny models of tests/golden, and
what PEFT says about them: loss, logits, gradients, ten steps of AdamW. pip install peft

    python dev/reference/make_lora_golden.py                  writes tests/golden/*/lora
    python dev/reference/make_lora_golden.py --load DIR       a PEFT model of our adapter: its logits
                                                              against those of DIR/logits.f32

As in make_golden.py each document runs alone, in fp64. --load is the other direction: DIR is an
adapter of ours whose base_model_name_or_path is a model, and holds tokens.i32 and logits.f32, one
document and its logits, as tests/test_lora.c writes them.
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
    return model.double(), path


def make(name, seed):
    batch = load_file(GOLDEN / name / "expected.safetensors")
    docs = documents(batch)
    model, path = adapter(name, seed)
    with fp64_inside(model):
        loss, logits = each_alone(model, docs)
        loss.backward()
        out = {"grad." + n.replace(".default", ""): p.grad.clone().float()
               for n, p in model.named_parameters() if p.requires_grad}
        losses, norms, _ = train(model, docs)
    assert all("lora_" in n for n in out)
    out["loss"], out["logits"] = loss.detach().reshape(1).float(), logits.detach().float()
    out["train_losses"] = torch.tensor(losses, dtype=torch.float64).float()
    out["grad_norms"] = torch.tensor(norms, dtype=torch.float64).float()
    save_file({n: t.contiguous() for n, t in out.items()}, path / "expected.safetensors")
    print(f"{name}: loss {loss.item():.9f}, after {len(losses)} steps {losses[-1]:.6f}")


def load(path):
    """Ours, read by PEFT."""
    path = pathlib.Path(path)
    base = json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager",
                                                 dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, path)
    tokens = torch.from_numpy(np.fromfile(path / "tokens.i32", dtype=np.int32)).long()
    ours = torch.from_numpy(np.fromfile(path / "logits.f32", dtype=np.float32))
    with torch.no_grad():
        theirs = model(input_ids=tokens[None], use_cache=False).logits[0].flatten()
        plain = model.get_base_model()
        with model.disable_adapter():
            without = plain(input_ids=tokens[None], use_cache=False).logits[0].flatten()
    error, effect = (ours - theirs).norm() / theirs.norm(), (without - theirs).norm() / theirs.norm()
    print(f"logits: relative L2 {error:.2e}; without the adapter {effect:.2e}")
    return error <= 2e-6 < 1e-2 <= effect


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", metavar="DIR", help="check an adapter of ours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, "
          f"peft {peft.__version__}")
    if options.load:
        return 0 if load(options.load) else 1
    for seed, name in enumerate(ADAPTERS):
        make(name, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
