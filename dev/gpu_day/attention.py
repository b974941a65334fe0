"""Attention of others on lists of documents: attention.py NAME,NAME... DOCS:H/HKV/D...   DOCS: 220,217 or 16x4096

    varlen, flex, cudnn     PyTorch's varlen_attn, FlexAttention with a document mask, cuDNN on equal lengths
    fa3, fa4                FlashAttention-3 and -4, where their modules can be imported

TFLOP/s as those of `bench attention`: 4 forward and 10 backward for each pair, head and column.
"""
import importlib
import inspect
import pathlib
import statistics
import sys

import torch
from torch.nn import attention as A, functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "dev"))
import bench  # noqa: E402  (dev/bench.py: lists of lengths)


def known(function, **arguments):
    """Those of the arguments that this version of it has"""
    return {k: v for k, v in arguments.items() if k in inspect.signature(function).parameters}


def maker(name, q, k, v, cu, longest):
    """A function that computes it"""
    if name == "varlen":
        f = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        more = known(f, enable_gqa=True) | (known(f, is_causal=True) or {"window_size": (-1, 0)})
        return lambda: f(q, k, v, cu, cu, longest, longest, **more)
    if name == "flex":
        flex, number = importlib.import_module("torch.nn.attention.flex_attention"), torch.repeat_interleave(cu.diff())
        mask = torch.compile(flex.create_block_mask)(lambda b, h, i, j: (number[i] == number[j]) & (i >= j), None, None,
                                                     len(q), len(q), device=q.device)
        compiled, heads_first = torch.compile(flex.flex_attention), [x.transpose(0, 1)[None] for x in (q, k, v)]
        return lambda: compiled(*heads_first, block_mask=mask, enable_gqa=True)
    if name == "cudnn":
        rows = [x.view(len(cu) - 1, longest, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        return lambda: F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    f = importlib.import_module({"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}[name]).flash_attn_varlen_func
    more = known(f, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True)
    return lambda: (lambda out: out[0] if isinstance(out, tuple) else out)(f(q, k, v, **more))


def milliseconds(work):
    times = []
    while len(times) < 5 or (len(times) < 17 and sum(times) < 400):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def measure(name, batch, tflop):
    try:
        work = maker(name, *batch)
        with A.sdpa_kernel(A.SDPBackend.CUDNN_ATTENTION):      # concerns cudnn alone
            out = work()
            dout, f = torch.randn_like(out), milliseconds(work)
        b = milliseconds(lambda: torch.autograd.grad(out, batch[:3], dout, retain_graph=True))
        return (f"forward {f:8.3f} ms {1e3 * tflop / f:6.1f} TFLOP/s  backward {b:8.3f} ms "
                f"{2.5e3 * tflop / b:6.1f} TFLOP/s")
    except Exception as error:      # what cannot run says why
        return f"cannot run: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


print("peer    torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), torch.cuda.get_device_name())
for word in sys.argv[2:]:
    docs, shape = word.split(":")
    lengths, (H, Hkv, D) = bench.make_lengths(given=docs), map(int, shape.split("/"))
    q, k, v = (torch.randn(sum(lengths), h, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for h in (H, Hkv, Hkv))
    cu = torch.tensor([0] + lengths).cumsum(0).int().cuda()
    print(f"peer    {len(lengths)} documents, {sum(lengths)} tokens, heads {H}/{Hkv} x {D}", flush=True)
    for name in sys.argv[1].split(","):
        said = measure(name, (q, k, v, cu, max(lengths)), 2e-12 * H * D * sum(n * (n + 1) for n in lengths))
        print(f"peer    {name:7} {said}", flush=True)
