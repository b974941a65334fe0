"""The kernels of a training step, each with its bytes, FLOP and time on one H200.

Kernels that move bytes: bytes over what such a kernel reaches of the memory's speed; working sets
that L2 holds move at its speed. Products: gemm_seconds. Attention: attention.py.
"""
import functools
import math
from statistics import NormalDist

import attention
from attention import SMS, pairs

# The chip: vendor's datasheet, and what a large copy and a large product reached on one H200
PEAK = 989.4e12             # dense bf16, FLOP/s
HBM_PEAK, HBM = 4.8e12, 4.2e12
L2_BYTES, L2_SPEED = 40e6, 6.0e12
# Launches
GAP, GAP_GRAPH, GAP_PDL = 1.2e-6, 1.0e-6, .4e-6     # between kernels that are ready
HOST_KERNEL, HOST_GEMM, HOST_GRAPH = 2.2e-6, 4.5e-6, 8e-6
HOST_STEP, HOST_TOKEN = 40e-6, 8e-9                 # between steps; guess
FLOOR = 2.0e-6              # of any kernel
# Products: fitted to 33 shapes of XLA's table of cuBLAS on an H100 (mean error 5 %)
GEMM_EFFICIENCY, GEMM_FIXED, EPILOGUE_EXPOSED = .845, 3.5e-6, .5
HEURISTIC = .92             # cuBLASLt's first answer, as PyTorch takes it, not the best of several; guess
SPLIT_K_FIXED = 3.0e-6
TILES = {(256, 128): 1, (128, 256): 1, (128, 192): .98, (192, 128): .98, (128, 128): .93,
         (64, 256): .85, (256, 64): .85, (128, 64): .80, (64, 128): .80, (64, 64): .62}
# What each kind of kernel reaches of HBM; guesses from their loads in flight and occupancy
REACHES = dict(norm=.88, norm_backward=.80, rope=.72, swiglu=.90, embedding=.80,
               embedding_backward=.45, memset=.95, squares=.90, adamw=.88, inductor=.88)
EXP_EXPOSED, EXP_CLOCK = .4, 1.755e9                # cross-entropy's exponentials; guess
NVLINK, RANKS_EXPOSED = 200e9, .1                   # guess: a tenth of what is sent is not hidden


class Model:
    def __init__(self, name, L, C, F, H, Hkv, D, V, tied):
        self.name, self.L, self.C, self.F = name, L, C, F
        self.H, self.Hkv, self.D, self.V = H, Hkv, D, V
        self.qkv, self.q = (H + 2 * Hkv) * D, H * D
        self.matrices = L * C * (3 * F + self.q + self.qkv)
        self.params = self.matrices + C * V * (1 if tied else 2) + C * (2 * L + 1)
        # llama_head_chunk, bf16
        self.head_chunk = max(1024, (192 << 20) // (2 * V) // 128 * 128)

    def products(self):
        """(name, N, K) of a layer's matrices (N, K), in the order of the backward pass."""
        return [("down", self.C, self.F), ("gate_up", 2 * self.F, self.C),
                ("o_proj", self.C, self.q), ("qkv", self.qkv, self.C)]


M135 = Model("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152, True)
M360 = Model("SmolLM2-360M", 32, 960, 2560, 15, 5, 64, 49152, True)
M17 = Model("SmolLM2-1.7B", 24, 2048, 8192, 32, 32, 64, 49152, True)
M8 = Model("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, False)


def r65(docs=95, tokens=65536):
    """Log-normal lengths (mean 700, sigma 1.04, at most 8,192) that add up to `tokens`."""
    mu = math.log(700) - 1.04 ** 2 / 2
    lengths = [min(8192, round(math.exp(mu + 1.04 * NormalDist().inv_cdf((i + .5) / docs))))
               for i in range(docs)]
    lengths[-1] += tokens - sum(lengths)
    return lengths


SEED = [220, 217, 295, 183, 130, 350]


def speed_of_light(model, lengths):
    """Seconds of the FLOP that no layout can avoid, at the peak: matrices, and attention over
    half of the documents' squares."""
    matrices = 6 * (model.matrices + model.V * model.C) * sum(lengths)
    return (matrices + 6 * model.L * model.q * sum(n * n for n in lengths)) / PEAK


class Op:
    def __init__(self, group, name, count, seconds, nbytes=0., flop=0., launches=1, gemm=False):
        self.group, self.name, self.count, self.seconds = group, name, count, seconds
        self.nbytes, self.flop, self.launches, self.gemm = nbytes, flop, launches, gemm

    def floor(self):
        return max(self.flop / PEAK, self.nbytes / HBM_PEAK)


def memory_seconds(nbytes, kind):
    speed = L2_SPEED if nbytes < L2_BYTES else HBM * REACHES[kind]
    return max(FLOOR, nbytes / speed)


@functools.lru_cache(None)
def gemm_seconds(M, N, K, out=2, read=0, epilogue=0., tuned=False, exposed=EPILOGUE_EXPOSED,
                 hbm=None):
    """(seconds, tile, bytes) of D (M, N) = A (M, K) B (K, N); out, read: bytes written and read of
    an element of D; epilogue: further bytes that it moves."""
    hbm = hbm or HBM
    rate, bandwidth = PEAK * GEMM_EFFICIENCY / SMS, hbm / SMS
    best = None
    for (rows, columns), reach in TILES.items():
        tiles = math.ceil(M / rows) * math.ceil(N / columns)
        for splits in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32):
            if splits > 1 and (tiles * splits > 2 * SMS or K / splits < 256):
                continue
            loop = math.ceil(K / splits / 64) * 64 * rows * columns * 2 / (rate * reach)
            element = 4 if splits > 1 else out + read
            store = rows * columns * element / bandwidth * exposed
            if splits == 1:
                store += epilogue / tiles / bandwidth * exposed
            t = math.ceil(tiles * splits / SMS) * (loop + store) + GEMM_FIXED
            if splits > 1:
                partial, whole = 4. * M * N * splits, M * N * (4 * splits + out + read) + epilogue
                speed = L2_SPEED if partial < L2_BYTES else HBM * .7
                t += SPLIT_K_FIXED + max(FLOOR, whole / speed) - FLOOR + GAP
            if best is None or t < best[0]:
                best = t, rows, columns, splits
    nbytes = 2 * (M * K + N * K) + M * N * (out + read) + epilogue
    t = max(best[0], nbytes / hbm + GEMM_FIXED)
    if not tuned:
        t = GEMM_FIXED + (t - GEMM_FIXED) / HEURISTIC
    return t, best[1:], float(nbytes)


class Step:
    """A list of Op, and its time."""

    def __init__(self):
        self.ops = []

    def add(self, *args, **kwargs):
        self.ops.append(Op(*args, **kwargs))

    def memory(self, group, name, count, nbytes, kind, launches=1, extra=0.):
        self.add(group, name, count, memory_seconds(nbytes, kind) + extra, nbytes,
                 launches=launches)

    def gemm(self, group, name, count, M, N, K, **options):
        t, (rows, columns, splits), nbytes = gemm_seconds(M, N, K, **options)
        tile = f"{rows}x{columns}" + (f"/{splits}" if splits > 1 else "")
        self.add(group, f"{name} {M}x{N}x{K} by {tile}", count, t, nbytes, 2. * M * N * K,
                 2 if splits > 1 else 1, True)

    def seconds(self, tokens, graph=False, gap=None):
        gap = gap or (GAP_GRAPH if graph else GAP)
        gpu = sum(op.count * (op.seconds + op.launches * gap) for op in self.ops)
        host = HOST_GRAPH + 30 * HOST_KERNEL if graph else sum(
            op.count * (HOST_GEMM if op.gemm else op.launches * HOST_KERNEL) for op in self.ops)
        return max(gpu, host) + HOST_STEP + HOST_TOKEN * tokens


def attention_ops(step, model, lengths, kernels, path):
    """path: `_sm90` or nothing; kernels: {(name, head_dim): Kernel}."""
    T, flop = sum(lengths), 2. * model.D * model.H * pairs(lengths)     # of one product
    row, out, kv = 2. * T * model.qkv, 2. * T * model.q, 2. * T * model.Hkv * model.D
    for name, group, products, nbytes in (
            ("attention_forward", "attention forward", 2, row + out + 4 * T * model.H),
            ("attention_backward_q", "attention backward", 3, row + 4 * out),
            ("attention_backward_kv", "attention backward", 2, row + out + 2 * kv)):
        kernel = kernels[name + path, model.D]
        t = attention.seconds(kernel, lengths, model.H, model.Hkv)
        step.add(group, kernel.name, model.L, t, nbytes, products * flop)


# What the code does now of what follows, and what a step may do otherwise; see README.md
NOW = dict(tuned=True, keep=True)
SMALL = dict(NOW, head_chunk=11264, no_memset=True, dweight_once=True)
FUSED = dict(SMALL, rope_fused=True, swiglu_fused=True, norm_fused=True, norm_of_gradient=True)


def ours(model, lengths, kernels, path="_sm90", ranks=1, **o):
    """llama.h's step of one micro-batch. o: SMALL, FUSED or parts of them."""
    m, T, s, o = model, sum(lengths), Step(), {**NOW, **o}
    C, F, L, rows = m.C, m.F, m.L, 2. * T * m.C
    has = lambda name: o.get(name, False)
    tuned = has("tuned")
    gradient = dict(out=4, read=0 if has("no_memset") else 4, tuned=tuned)
    residual = dict(tuned=tuned, epilogue=rows)
    if not has("no_memset"):
        s.memory("optimizer", "memset of gradients", 1, 4. * m.params, "memset")
    s.add("other", "upload, memsets of sums", 1, T * 20 / 25e9 + 4e-6, 20. * T, launches=4)

    s.memory("norms", "embedding_forward", 1, 2 * rows, "embedding")
    if not has("norm_fused"):
        s.memory("norms", "rmsnorm_forward", 2 * L + 1, 2 * rows, "norm")
    s.gemm("forward", "qkv", L, T, m.qkv, C, tuned=tuned)
    if not has("rope_fused"):
        s.memory("rope", "rope_forward", L, 4. * T * (m.H + m.Hkv) * m.D, "rope")
    attention_ops(s, m, lengths, kernels, path)
    s.gemm("forward", "o_proj", L, T, C, m.q, **residual)
    s.gemm("forward", "gate_up", L, T, 2 * F, C, tuned=tuned,
           epilogue=2. * T * F if has("swiglu_fused") else 0.)
    if not has("swiglu_fused"):
        s.memory("swiglu", "swiglu_forward", L, 6. * T * F, "swiglu")
    s.gemm("forward", "down", L, T, C, F, **residual)
    head_ops(s, m, T, o)

    if not has("no_memset"):
        s.memory("norms", "memset of dresid", 1, rows, "memset")
    norm_backward = dict(launches=1, extra=0.) if has("dweight_once") else dict(
        launches=2, extra=2e-6)
    s.memory("norms", "rmsnorm_backward", 2 * L + 1, 4 * rows, "norm_backward", **norm_backward)
    if has("swiglu_fused"):
        s.gemm("backward", "down, swiglu", L, T, F, C, tuned=tuned, epilogue=8. * T * F)
    else:
        if not has("keep"):
            s.memory("swiglu", "swiglu_forward (again)", L, 6. * T * F, "swiglu")
        s.gemm("backward", "down", L, T, F, C, tuned=tuned)
        s.memory("swiglu", "swiglu_backward", L, 10. * T * F, "swiglu")
    if not has("norm_fused") and not has("keep"):
        s.memory("norms", "rmsnorm_forward (again)", 2 * L, 2 * rows, "norm")
    for name, N, K in m.products():
        s.gemm("weight gradients", name, L, N, K, T, **gradient)
    for name, N, K in m.products()[1:]:
        s.gemm("backward", name, L, T, K, N, tuned=tuned)
    touched = rows + min(T, 15000) * C * 8.
    s.memory("norms", "embedding_backward", 1, touched, "embedding_backward", launches=2,
             extra=2e-6)
    s.add("other", "losses_sum", 1, max(3e-6, T / 256 / 8 * .6e-6), 4. * T)

    if not has("norm_of_gradient"):
        s.memory("optimizer", "global_norm_squared", 1, 4. * m.params, "squares", launches=2)
    s.add("other", "clip_scale", 1, 2e-6)
    s.memory("optimizer", "adamw_update", 1, 28. * m.params / ranks, "adamw", launches=2)
    if ranks > 1:
        sent = 6. * m.params * (ranks - 1) / ranks
        s.add("ranks", "sums and weights, a tenth of them", 1, sent / NVLINK * RANKS_EXPOSED)
    return s


def head_ops(s, m, T, o):
    """Logits, loss and their backward, chunk by chunk."""
    chunk, tuned = min(o.get("head_chunk", m.head_chunk), T), o.get("tuned", False)
    count = math.ceil(T / chunk)
    t = round(T / count)
    nbytes = 4. * t * m.V
    exponentials = t * (2. * m.V + 2000) / (16 * SMS * EXP_CLOCK)    # 2000: the merge of a row
    s.gemm("head", "logits", count, t, m.V, m.C, tuned=tuned)
    s.memory("head", "cross_entropy", count, nbytes, "norm", extra=EXP_EXPOSED * exponentials)
    s.gemm("head", "weight gradient", count, m.V, m.C, t, out=4, read=4, tuned=tuned)
    s.gemm("head", "backward", count, t, m.C, m.V, tuned=tuned)


def pytorch(model, lengths, fa3, ranks=1):
    """Unpad once, FlashAttention-3's varlen kernels, torch.compile, bf16 copies of fp32 weights,
    a loss in chunks of 8,192 tokens, fused AdamW. An ideal trace: nothing of it was run."""
    m, T, s = model, sum(lengths), Step()
    C, F, L, rows = m.C, m.F, m.L, 2. * T * m.C
    flop = 2. * m.D * m.H * pairs(lengths)
    s.memory("norms", "embedding", 1, 2 * rows, "inductor")
    s.memory("norms", "add, rmsnorm", 2 * L + 1, 4 * rows, "inductor")
    s.gemm("forward", "qkv", L, T, m.qkv, C)
    s.memory("rope", "rope", L, 4. * T * m.qkv, "inductor")
    s.add("attention forward", "FlashAttention-3", L,
          fa3_seconds(fa3["forward", m.D], m, lengths) + 10e-6, 0., 2 * flop, 2)
    s.gemm("forward", "o_proj", L, T, C, m.q)
    s.gemm("forward", "gate_up", L, T, 2 * F, C)
    s.memory("swiglu", "silu * up", L, 6. * T * F, "inductor")
    s.gemm("forward", "down", L, T, C, F)
    chunk = min(8192, T)
    count = math.ceil(T / chunk)
    t = round(T / count)
    s.gemm("head", "logits", count, t, m.V, C)
    s.memory("head", "cross entropy", count, 6. * t * m.V, "inductor", launches=2)
    s.gemm("head", "weight gradient", count, m.V, C, t, read=2 if count > 1 else 0)
    s.gemm("head", "backward", count, t, C, m.V)
    s.memory("norms", "rmsnorm backward", 2 * L + 1, 5 * rows, "inductor", launches=2)
    s.memory("swiglu", "silu * up backward, again", L, 12. * T * F, "inductor")
    for name, N, K in m.products():
        s.gemm("weight gradients", name, L, N, K, T)
        s.gemm("backward", name, L, T, K, N)
    s.add("attention backward", "FlashAttention-3", L,
          fa3_seconds(fa3["backward", m.D], m, lengths) + 10e-6, 0., 5 * flop, 4)
    s.memory("rope", "rope backward", L, 4. * T * m.qkv, "inductor")
    s.memory("norms", "embedding backward", 1, 6 * rows, "inductor", launches=6)
    s.memory("optimizer", "norm of gradients", 1, 4. * m.params, "inductor", launches=4)
    s.memory("optimizer", "AdamW, bf16 copies", 1, 34. * m.params / ranks, "inductor", launches=8)
    if ranks > 1:
        s.add("ranks", "sums and weights, a tenth of them", 1,
              6. * m.params * (ranks - 1) / ranks / NVLINK * RANKS_EXPOSED)
    return s


def fa3_seconds(kernel, model, lengths):
    """On the same list and chip. Its backward adds dQ in fp32: delta and the conversion move 14
    bytes an element more; with grouped heads dK and dV go the same way (20 bytes)."""
    t = attention.seconds(kernel, lengths, model.H, model.Hkv)
    if "backward" in kernel.name:
        T = sum(lengths)
        t += 14. * T * model.q / (HBM * .7)
        if model.H != model.Hkv:
            t += 20. * T * model.Hkv * model.D / (HBM * .7)
    return t
