"""Makes muon.safetensors of some models of make_golden.py: ten steps of Muon.

    python dev/reference/make_muon_golden.py            writes
    python dev/reference/make_muon_golden.py --check    computes again, compares, writes nothing

Losses and gradients are transformers' in fp64, each document alone. Two witnesses update the
matrices of layers: numpy in fp64, where Newton-Schulz is a polynomial of the singular values of an
SVD, and torch.optim.Muon (PyTorch 2.9 or later) with its bf16 replaced by fp64. They must agree.
torch.optim.Muon as it is, in bf16, is run as well: the difference is printed.
"""
import contextlib
import copy
import sys

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from make_golden import (BETAS, CLIP, DECAY, EPS, GOLDEN, LR, STEPS, documents, each_alone,
                         fp64_inside)

NAMES = ["mha_untied", "qwen2"]     # a head of its own; tied, biases
MOMENTUM, A, B, C, NEWTON_SCHULZ = 0.95, 3.4445, -4.7750, 2.0315, 5


class NumpyMuon:
    """Of Moonlight, arXiv 2502.16982: Nesterov, 0.2 sqrt(max(rows, columns)), decoupled decay."""
    def __init__(self, params):
        self.params, self.moment = params, [np.zeros(p.shape) for p in params]

    def step(self):
        for p, m in zip(self.params, self.moment):
            g = p.grad.numpy()
            m[:] = MOMENTUM * m + (1 - MOMENTUM) * g
            update = (1 - MOMENTUM) * g + MOMENTUM * m
            left, s, right = np.linalg.svd(update, full_matrices=False)
            s = s / max(np.sqrt(np.sum(s * s)), 1e-7)
            for _ in range(NEWTON_SCHULZ):
                s = A * s + B * s ** 3 + C * s ** 5
            w = p.data.numpy()
            w *= 1 - LR * DECAY
            w -= LR * 0.2 * np.sqrt(max(p.shape)) * (left * s) @ right


@contextlib.contextmanager
def bf16_is(dtype):
    saved, torch.bfloat16 = torch.bfloat16, dtype
    try:
        yield
    finally:
        torch.bfloat16 = saved


def torch_muon(params):
    return torch.optim.Muon(params, lr=LR, weight_decay=DECAY, momentum=MOMENTUM,
                            adjust_lr_fn="match_rms_adamw")


def train(model, docs, muon):
    """Losses before each update, gradient norms before clipping"""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if ".layers." in n and p.ndim == 2]
    others = [p for n, p in named if not (".layers." in n and p.ndim == 2)]
    groups = [{"params": [p for p in others if p.ndim == 2], "weight_decay": DECAY},
              {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0}]
    optimizers = [muon(matrices), torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)]
    losses, norms = [], []
    for _ in range(STEPS):
        loss, _ = each_alone(model, docs)
        model.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
    return np.array(losses), np.array(norms)


def main():
    torch.set_num_threads(1)
    good = True
    for name in NAMES:
        path = GOLDEN / name
        docs = documents(load_file(path / "expected.safetensors"))
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
        with fp64_inside(model):
            losses, norms = train(copy.deepcopy(model), docs, NumpyMuon)
            with bf16_is(torch.float64):
                torch_losses, torch_norms = train(copy.deepcopy(model), docs, torch_muon)
            half_losses, _ = train(copy.deepcopy(model), docs, torch_muon)
        witnesses = max(np.abs(torch_losses / losses - 1).max(),
                        np.abs(torch_norms / norms - 1).max())
        print(f"{name}: losses {losses[0]:.6f} to {losses[-1]:.6f}; numpy and torch differ by "
              f"{witnesses:.1e}, torch in bf16 by {np.abs(half_losses / losses - 1).max():.1e}")
        assert witnesses < 1e-9
        new = {"losses": torch.from_numpy(losses).float(), "norms": torch.from_numpy(norms).float()}
        if "--check" not in sys.argv[1:]:
            save_file(new, path / "muon.safetensors")
        stored = load_file(path / "muon.safetensors")
        good = good and all(torch.allclose(stored[n], new[n], rtol=1e-6, atol=0) for n in new)
    print("ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
