"""Attention alone on a GPU: forward and backward, bf16, causal, documents in one packed row.

    python dev/peers/attention_gpu.py
    python dev/peers/attention_gpu.py --shapes 9/3x64 --batches r65 seed --json attention.json

    torch-varlen    torch.nn.attention.varlen.varlen_attn
    flash2          flash_attn.flash_attn_varlen_func
    flash3          flash_attn_interface.flash_attn_varlen_func
    flash4          flash_attn.cute.flash_attn_varlen_func
    flex            FlexAttention, compiled, document mask (its making is not in the times)
    padded-flash    SDPA on rows padded to the longest document, flash backend
    padded-cudnn    the same, cuDNN backend

Batches: r65 (95 documents, 65,536 tokens, log-normal), 8x8192, 32x2048, and seed (six documents,
1,395 tokens). TFLOP/s count the work that the documents need, pairs = sum L(L+1)/2: forward
4*D*H*pairs, backward 10*D*H*pairs; padding and recomputation count as time only. The inputs lie in
each candidate's own layout before the clock starts, and several sets of them take turns so that the
caches do not keep them. Where a candidate takes no fewer K/V heads than Q heads, K and V are
repeated inside the timed region, and the line says so. Output and gradients of sampled documents
are compared with fp32 before a time is shown. The GPU is given a short sleep before each timing, so
that the launches are queued by then: these are times of the GPU, not of Python.
"""
import argparse
import gc
import inspect
import json
import math
import pathlib
import statistics
import sys
import time

from pytorch_gpu import CannotRun, first_line, make_flex, make_lengths, make_varlen, version, wait
import torch
from torch.nn import functional as F

CANDIDATES = ["torch-varlen", "flash2", "flash3", "flash4", "flex", "padded-flash", "padded-cudnn"]
BATCHES = {"r65": make_lengths("r65"), "8x8192": [8192] * 8, "32x2048": [2048] * 32,
           "seed": make_lengths("seed")}
LIMIT = 0.03        # |a - b| / |b| of output and gradients against fp32; bf16 gives about 0.005


def make_flash(name):
    try:
        if name == "flash2":
            from flash_attn import flash_attn_varlen_func as f
        elif name == "flash3":
            from flash_attn_interface import flash_attn_varlen_func as f
        else:
            from flash_attn.cute import flash_attn_varlen_func as f
    except ImportError as error:
        raise CannotRun(f"not installed ({error})") from None
    known = inspect.signature(f).parameters

    def attend(q, k, v, cu, longest):
        args = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
                    causal=True)
        o = f(q, k, v, **{n: x for n, x in args.items() if n in known})
        return o[0] if isinstance(o, tuple) else o      # some versions give the logsumexp too

    return attend


def make_padded(name):
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        backend = {"padded-flash": SDPBackend.FLASH_ATTENTION,
                   "padded-cudnn": SDPBackend.CUDNN_ATTENTION}[name]
    except (ImportError, AttributeError):
        raise CannotRun(f"torch {torch.__version__} does not have it") from None

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                  **{"enable_gqa": True} if len(k[0]) < len(q[0])
                                                  else {})

    return attend


class Candidate:
    """One way of computing one batch: inputs in its layout, out = f(q, k, v)."""
    def __init__(self, name, lengths, data, repeat, device):
        self.lengths, self.longest = lengths, max(lengths)
        self.padded, self.heads_first = "padded" in name, "padded" in name or name == "flex"
        self.group = data[0][0].shape[1] // data[0][1].shape[1] if repeat else 1
        self.mask_us = None
        cu = torch.tensor([0] + lengths, device=device).cumsum(0).int()
        if name == "torch-varlen":
            f = make_varlen()
            self.f = lambda q, k, v: f(q, k, v, cu, self.longest)
        elif name.startswith("flash"):
            f = make_flash(name)
            self.f = lambda q, k, v: f(q, k, v, cu, self.longest)
        elif name == "flex":
            self.make_flex(device)
        else:
            self.f = make_padded(name)
        self.sets = [[self.lay_out(x).requires_grad_(i < 3) for i, x in enumerate(one)]
                     for one in data]

    def make_flex(self, device):
        torch._dynamo.reset()       # each batch is its own program: no guards, no dynamic shapes
        f, make_mask = make_flex(device, tokens_first=False)
        number = torch.repeat_interleave(torch.tensor(self.lengths)).int().to(device)
        for _ in range(3):      # the first ones compile
            wait(device)
            start = time.perf_counter()
            mask = make_mask(number)
            wait(device)
            self.mask_us = 1e6 * (time.perf_counter() - start)
        self.f = lambda q, k, v: f(q, k, v, mask)

    def lay_out(self, x):
        """From (tokens, heads, head_dim)."""
        if self.padded:
            x = torch.stack([F.pad(part, (0, 0, 0, 0, 0, self.longest - len(part)))
                             for part in x.split(self.lengths)])
        elif self.heads_first:
            x = x[None]
        return x.transpose(1, 2).contiguous() if self.heads_first else x.clone()

    def document(self, x, i):
        """Document i of a tensor in this layout: (tokens, heads, head_dim)."""
        x = x.transpose(1, 2) if self.heads_first else x
        if self.padded:
            return x[i, :self.lengths[i]]
        start = sum(self.lengths[:i])
        return (x[0] if self.heads_first else x)[start:start + self.lengths[i]]

    def forward(self, one):
        q, k, v, _ = one
        if self.group > 1:
            k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))
        return self.f(q, k, v)

    def check(self):
        """The largest relative error of output, dQ, dK, dV, over sampled documents and heads."""
        one = self.sets[0]
        o = self.forward(one)
        results = [o, *torch.autograd.grad(o, one[:3], one[3])]
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        sample = {0, len(order) - 1, order[0], order[len(order) // 2], order[-1]}
        worst = 0.0
        for i in sample:
            inputs = [self.document(x, i).detach() for x in one]
            outputs = [self.document(x, i).detach() for x in results]
            kv = inputs[1].shape[1]
            group = inputs[0].shape[1] // kv
            for head in {0, kv - 1}:
                def heads(x, n):
                    return x[:, head * n:(head + 1) * n].transpose(0, 1).float()

                q, k, v, do = (heads(x, n).clone().requires_grad_()
                               for x, n in zip(inputs, (group, 1, 1, group)))
                future = torch.ones(len(inputs[0]), len(inputs[0]), dtype=torch.bool,
                                    device=q.device).triu(1)
                scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(future,
                                                                                   -math.inf)
                o = scores.softmax(-1) @ v
                want = [o, *torch.autograd.grad(o, (q, k, v), do)]
                for a, b, n in zip(outputs, want, (group, group, 1, 1)):
                    worst = max(worst, ((heads(a, n) - b).norm() / b.norm().clamp(1e-6)).item())
                    worst = worst if torch.isfinite(a).all() else math.inf
        return worst

    def time(self, repeats, warmup, device):
        """Microseconds of each forward and each backward."""
        times = []
        for i in range(warmup + repeats):
            one = self.sets[i % len(self.sets)]
            if device == "cpu":
                start = time.perf_counter()
                o = self.forward(one)
                middle = time.perf_counter()
                torch.autograd.grad(o, one[:3], one[3])
                times.append((1e6 * (middle - start), 1e6 * (time.perf_counter() - middle)))
                continue
            event = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)        # about 1 ms
            event[0].record()
            o = self.forward(one)
            event[1].record()
            torch.cuda._sleep(2_000_000)
            event[2].record()
            torch.autograd.grad(o, one[:3], one[3])
            event[3].record()
            torch.cuda.synchronize()
            times.append((1e3 * event[0].elapsed_time(event[1]),
                          1e3 * event[2].elapsed_time(event[3])))
        return list(zip(*times[warmup:]))


def measure(name, lengths, data, options):
    """A row of results, or CannotRun. Fewer K/V heads as they are; if not taken, repeated."""
    reasons = []
    for repeat in [False, True][:1 + (data[0][0].shape[1] > data[0][1].shape[1])]:
        reason = None
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        try:
            c = Candidate(name, lengths, data, repeat, options.device)
            error = c.check()
            if error > LIMIT:
                reason = f"WRONG: off by {error:.1e} from fp32, limit {LIMIT}"
            else:
                forward, backward = c.time(options.repeats, options.warmup, options.device)
        except CannotRun:
            raise
        except Exception as e:      # a peer's failure is a result, not the end
            reason = first_line(e)
        if not reason:
            return dict(candidate=name, kv_repeated=repeat, error=error, forward_us=forward,
                        backward_us=backward, mask_us=c.mask_us, reasons=reasons)
        reasons.append(reason)
        c = None
    raise CannotRun(" / with K, V repeated: ".join(dict.fromkeys(reasons)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", default=["9/3x64", "32/8x128"], metavar="H/KVxD",
        help="query heads / key-value heads x head dimension (default: 9/3x64 32/8x128)")
    add("--batches", nargs="+", choices=BATCHES, default=list(BATCHES))
    add("--lengths", type=int, nargs="+", help="documents of these lengths instead")
    add("--candidates", nargs="+", choices=CANDIDATES, default=CANDIDATES)
    add("--repeats", type=int, default=50, help="timed calls of each")
    add("--warmup", type=int, default=10)
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to check the script")
    add("--json", type=pathlib.Path, help="write the results here too")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device (--device cpu --lengths 60 100 checks the script without one)")
    torch.backends.cuda.matmul.allow_tf32 = False       # fp32 here is the reference
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    head = (f"{machine}; torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
            f"{torch.backends.cudnn.version()}; {version('flash_attn')}; bf16, causal, "
            f"median of {options.repeats} after {options.warmup}")
    print(head, flush=True)
    batches = {n: BATCHES[n] for n in options.batches}
    if options.lengths:
        batches = {"given": options.lengths}

    rows = []
    for shape in options.shapes:
        try:
            h, kv, hd = (int(x) for x in shape.replace("x", "/").split("/"))
        except ValueError:
            sys.exit(f"--shapes {shape}: not of the form 9/3x64")
        for batch, lengths in batches.items():
            tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
            gflop = [n * hd * h * pairs / 1e9 for n in (4, 10)]
            torch.manual_seed(0)
            size = 2 * hd * tokens * (2 * h + 2 * kv)
            sets = min(8, max(2, math.ceil(2**28 / size)))      # 256 MiB: more than the L2 cache
            data = [[torch.randn(tokens, n, hd, device=options.device).bfloat16()
                     for n in (h, kv, kv, h)] for _ in range(sets)]
            print(f"\n{shape}, {batch}: {len(lengths)} documents, {tokens:,} tokens, {pairs:,} "
                  f"pairs; {gflop[0]:.1f} + {gflop[1]:.1f} GFLOP; {sets} sets of inputs\n"
                  f"{'':14s} {'forward us':>11s} {'TFLOP/s':>8s} {'backward us':>12s} "
                  f"{'TFLOP/s':>8s} {'both':>8s}  error", flush=True)
            for name in options.candidates:
                row = dict(shape=shape, batch=batch, lengths=lengths, candidate=name)
                try:
                    row.update(measure(name, lengths, data, options))
                except CannotRun as error:
                    rows.append(dict(row, absent=str(error)))
                    print(f"{name:14s} cannot run: {error}", flush=True)
                    continue
                us = [statistics.median(row[n]) for n in ("forward_us", "backward_us")]
                rate = [1e3 * g / u for g, u in zip(gflop, us)]
                both = 1e3 * sum(gflop) / sum(us)
                row.update(forward_tflops=rate[0], backward_tflops=rate[1], both_tflops=both)
                rows.append(row)
                notes = [f"K, V repeated inside ({reason})" for reason in row["reasons"]]
                if row["mask_us"]:
                    notes.append(f"mask: {row['mask_us']:.0f} us more, once a step, not counted")
                if "padded" in name:
                    notes.append(f"{1 - tokens / (len(lengths) * max(lengths)):.0%} padding")
                print(f"{name:14s} {us[0]:11.1f} {rate[0]:8.2f} {us[1]:12.1f} {rate[1]:8.2f} "
                      f"{both:8.2f}  {row['error']:.4f}  {'; '.join(notes)}", flush=True)
            data = None
    if options.json:
        options.json.write_text(json.dumps(dict(what=head, rows=rows)) + "\n")


if __name__ == "__main__":
    main()
