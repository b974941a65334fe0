"""Makes weighted.safetensors of a model of make_golden.py: a loss in which each target has a weight.

    python dev/reference/make_weighted_golden.py            writes
    python dev/reference/make_weighted_golden.py --check    computes again, compares, writes nothing

The loss is the sum of weight * token loss, divided by the sum of the weights' magnitudes; transformers
in fp64, each document alone. Weights are -1 to 2 in quarters: some are 0 or negative.
"""
import sys

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from make_golden import GOLDEN, backward, documents, fp64_inside


def main():
    torch.set_num_threads(1)
    path = GOLDEN / "gqa3_tied"
    docs = documents(load_file(path / "expected.safetensors"))
    rng = np.random.Generator(np.random.PCG64(41))
    weights = [torch.from_numpy(rng.integers(-4, 9, len(doc)) / 4) for doc in docs]
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    with fp64_inside(model):
        loss = sum((F.cross_entropy(model(input_ids=doc[None], use_cache=False).logits[0, :-1], doc[1:],
                                    reduction="none") * w[:-1]).sum()
                   for doc, w in zip(docs, weights) if len(doc) > 1) / sum(w[:-1].abs().sum() for w in weights)
        grads = backward(model, loss)
    new = {"weights": torch.cat(weights).float(), "loss": loss.detach().reshape(1).float(),
           **{"grad." + n: g.float() for n, g in grads.items()}}
    print(f"loss {loss.item():.9f}")
    if "--check" not in sys.argv[1:]:
        save_file(new, path / "weighted.safetensors")
    stored = load_file(path / "weighted.safetensors")
    good = all(torch.allclose(stored[n], new[n], rtol=1e-6, atol=1e-9) for n in new)
    print("ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
