"""Makes dpo.safetensors and simpo.safetensors of a model of make_golden.py: losses of preference pairs.

    python dev/reference/make_pair_golden.py            writes
    python dev/reference/make_pair_golden.py --check    computes again, compares, writes nothing

The last six documents are three pairs, chosen and rejected; the loss is the mean over pairs, written
out in PyTorch; transformers in fp64, both answers of a pair as one padded batch with a mask. The
reference of DPO is the same model with larger embeddings.
"""
import sys

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from make_golden import GOLDEN, backward, documents, fp64_inside

BETA, SMOOTHING = 0.125, 0.0625         # of DPO
SIMPO_BETA, GAMMA, SFT = 2.0, 0.5, 0.25


def log_likelihoods(model, pair):
    """The sums of two documents, and their numbers of targets"""
    length = max(map(len, pair))
    ids = torch.stack([F.pad(doc, (0, length - len(doc))) for doc in pair])
    mask = torch.stack([(torch.arange(length) < len(doc)).long() for doc in pair])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    each = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    return each.sum(1), mask[:, 1:].sum(1)


def dpo(sums, targets, reference):
    margin = BETA * ((sums[0] - reference[0]) - (sums[1] - reference[1]))
    return -(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin)


def simpo(sums, targets, reference):
    each = SIMPO_BETA * sums / targets
    return -F.logsigmoid(each[0] - each[1] - GAMMA) - SFT * sums[0] / targets[0]


def main():
    torch.set_num_threads(1)
    path, good = GOLDEN / "gqa3_tied", True
    docs = documents(load_file(path / "expected.safetensors"))[-6:]
    pairs = [docs[i:i + 2] for i in range(0, 6, 2)]
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    with fp64_inside(model):
        weight = model.model.embed_tokens.weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(1.0625)
            # exact in fp32
            reference = torch.stack([(log_likelihoods(model, p)[0] * 64).round() / 64 for p in pairs])
            weight.copy_(before)
        for loss_of in dpo, simpo:
            model.zero_grad()
            loss = sum(loss_of(*log_likelihoods(model, p), r) for p, r in zip(pairs, reference)) / len(pairs)
            grads = backward(model, loss)
            new = {"reference": -reference.reshape(-1).float(), "loss": loss.detach().reshape(1).float(),
                   **{"grad." + n: g.float() for n, g in grads.items()}}
            print(f"{loss_of.__name__} {loss.item():.9f}")
            file = path / f"{loss_of.__name__}.safetensors"
            if "--check" not in sys.argv[1:]:
                save_file(new, file)
            stored = load_file(file)
            good &= all(torch.allclose(stored[n], new[n], rtol=1e-6, atol=1e-9) for n in new)
    print("ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
