#!/usr/bin/env python3
"""How far the model is right about what others published.

    calibration.py [LIBRARY]   LIBRARY: FlashAttention-3 in PyPI's dew-flash-attn-cu12 0.3.6 (unpack
                               the wheel: libdew_flash_attn3.so)

Products against XLA's table; steps of llmq, to which nothing is fitted; and FlashAttention-3, where
two figures are fitted to each kernel: `fit`, simulated clocks of a pass over real ones, and the
clocks of an item beside its passes. Only fit times clock is known where the clock is not published.
What comes out is FA3_FIT of attention.py and FA3_PASSES below.
"""
import collections
import math
import sys

import attention
import sass
import step
from attention import SM90_CLOCK, Kernel, items_of, schedule

# Clocks of a pass of all consumers, simulated: what the last run of this file printed
FA3_PASSES = {("forward", 64): 1741, ("forward", 128): 2048,
              ("backward", 64): 2816, ("backward", 128): 2560}

# Published TFLOP/s by length, causal products counted as half. Forward: FlashGPU-Sim's
# docs/sass-frontend.md (2026-09-15), H100 locked at 1,500 MHz, fp16, 32,768 tokens, causal.
# Backward: the FlashAttention-3 paper (arXiv 2407.08608, figure 6), H100, fp16, 16,384 tokens, no
# mask, clock not given: taken as 1,500 MHz too.
PUBLISHED = {
    ("forward", 64): {512: 204, 1024: 267, 2048: 374, 4096: 423, 8192: 472},
    ("forward", 128): {512: 282, 1024: 450, 2048: 585, 4096: 654, 8192: 692},
    ("backward", 64): {512: 272, 1024: 363, 2048: 422},
    ("backward", 128): {512: 316, 1024: 424, 2048: 501, 4096: 542, 8192: 559, 16384: 561},
}
# Not fitted to: causal, hd128. H100: facebookexperimental/triton, pull request 3506 (bf16), and
# flash-attention's 1893; H200: flash-attention's 2754.
HELD_OUT = [("backward", 4096, 444), ("backward", 8192, 539), ("backward", 8192, 575),
            ("forward", 1024, 511), ("forward", 4096, 690), ("forward", 16384, 695)]
# Class, sizes in the mangled name, causal, products of its main loop, and what Kernel takes; the
# second backward of each head_dim is the causal one, which ours is compared with.
CODE = {
    ("forward", 64): ("Fwd", "ILi192EEENS7_ILi128EEENS7_ILi64EEEEEELi64", 1, 12, 192, 128, 3),
    ("forward", 128): ("Fwd", "ILi128EEESA_SA_EEELi128", 1, 16, 128, 128, 2),
    ("backward", 64): ("Bwd", "ILi128EEESA_NS7_ILi64EEEEE", 0, 32, 128, 128, 2),
    ("backward", 128): ("Bwd", "ILi80EEENS7_ILi128EEESB_EE", 0, 34, 128, 80, 2),
    ("causal", 64): ("Bwd", "ILi128EEESA_NS7_ILi64EEEEE", 1, 32, 128, 128, 2),
    ("causal", 128): ("Bwd", "ILi64EEENS7_ILi128EEESB_EE", 1, 32, 128, 64, 2),
}


def fa3_kernels():
    """FlashAttention-3's causal kernels, as they are compared with: {(pass, head_dim): Kernel}."""
    kernels = {}
    for (direction, head_dim), (fit, item) in attention.FA3_FIT.items():
        rows, step, warps = CODE["forward" if direction == "forward" else "causal", head_dim][4:]
        kernel = Kernel(f"FlashAttention-3 {direction}", head_dim,
                        "queries" if direction == "forward" else "keys", rows, step, warps, None,
                        fit, item, SM90_CLOCK)
        kernel.passes = [FA3_PASSES[direction, head_dim]]
        kernels[direction, head_dim] = kernel
    return kernels


def find(codes, which):
    direction, sizes, causal, products = CODE[which][:4]
    # causal, local, softcap, varlen, deterministic (of a forward: something that is off too)
    flags = f"4Sm90ELb{causal}ELb0ELb0ELb0ELb0E"
    for name, code in codes.items():
        if (f"FlashAttn{direction}Sm90" in name and sizes in name and flags in name and
                "bfloat16" in name and "GQA" not in name):
            return sass.main_loop(code, products)
    raise SystemExit(f"error: no FlashAttention-3 kernel {which} in this library\n"
                     "hint: take version 0.3.6 of dew-flash-attn-cu12")


def rate(kernel, causal, length):
    """TFLOP/s of equal lengths, as the sources count."""
    tokens = 32768 if kernel.kind == "queries" else 16384
    documents, heads = tokens // length, 2048 // kernel.head_dim
    items = items_of(kernel, [length] * documents, heads, heads)
    if not causal:
        items = [math.ceil(length / kernel.step)] * len(items)
    t = schedule(items, attention.SMS, kernel.passes[0] / kernel.fit, kernel.item) / kernel.clock
    products = 4. * kernel.head_dim * heads * documents * length ** 2 / (2 if causal else 1)
    if kernel.kind == "keys":
        t += 14. * tokens * 2048 / 3.0e12       # delta, and dQ from fp32
        products *= 2.5
    return products / t / 1e12


def fit(kernel, causal, published):
    best = None
    for tenths in range(50, 121, 2):
        for item in range(0, 12001, 500):
            kernel.fit, kernel.item = tenths / 100, item
            error = sum(math.log(rate(kernel, causal, n) / p) ** 2 for n, p in published.items())
            if best is None or error < best[0]:
                best = error, kernel.fit, item
    kernel.fit, kernel.item = best[1:]
    return math.sqrt(best[0] / len(published))


# TFLOP/s of cuBLAS on an H100, M N K: sm_90 in matmul_interpolator_data.h of XLA
# (xla/service/gpu/model), its autotuner's choices, bf16; M = 16384 are batches of 4
XLA = [(16384, 4096, 256, 504), (16384, 4096, 512, 620), (16384, 4096, 1024, 725.5),
       (16384, 4096, 2048, 764.6), (16384, 4096, 4096, 793), (16384, 2048, 512, 607.5),
       (16384, 1024, 256, 393), (16384, 1024, 512, 542), (16384, 1024, 1024, 674),
       (16384, 1024, 2048, 720.5), (16384, 512, 256, 298.6), (16384, 512, 512, 441.5),
       (16384, 512, 1024, 589), (16384, 512, 2048, 703.6), (16384, 512, 4096, 728.6),
       (4096, 4096, 512, 543), (4096, 4096, 1024, 677), (4096, 4096, 4096, 783),
       (4096, 2048, 512, 447), (4096, 512, 512, 239), (4096, 512, 2048, 521.7),
       (2048, 2048, 512, 345.5), (2048, 1024, 512, 238), (1024, 4096, 512, 339),
       (1024, 2048, 512, 237.6), (1024, 512, 512, 82.2), (1024, 512, 2048, 220),
       (512, 512, 4096, 174.5), (1024, 512, 4096, 299), (512, 2048, 1024, 232.6),
       (1024, 2048, 1024, 373), (1024, 1024, 1024, 236)]
# Another trainer in C++ and CUDA: IST-DASLab/llmq, benchmarks/H100x1.md. Documents of 1,024 tokens,
# how many at a time, 524,288 tokens a step; % of the speed of light; cuDNN's TFLOP/s in attention,
# forward and backward.
LLMQ = [("Qwen2.5-0.5B", (24, 896, 4864, 14, 2, 64, 151936, True), 32, 46.8, (290, 270)),
        ("Qwen2.5-1.5B", (28, 1536, 8960, 12, 2, 128, 151936, True), 32, 56.6, (410, 380)),
        ("Qwen2.5-3B", (36, 2048, 11008, 16, 2, 128, 151936, True), 16, 59.3, (410, 380)),
        ("Qwen2.5-7B", (28, 3584, 18944, 28, 4, 128, 152064, False), 4, 60.2, (410, 380))]
H100_HBM = 3.0e12


def check_products():
    ratios = [(step.gemm_seconds(M, N, K, tuned=True, hbm=H100_HBM)[0] + step.GAP) *
              tflops * 1e12 / (2. * M * N * K) for M, N, K, tflops in XLA]
    print(f"products: {len(XLA)} shapes of XLA's table, model / published "
          f"{sum(ratios) / len(ratios):.2f}, mean error "
          f"{sum(abs(r - 1) for r in ratios) / len(ratios):.0%}")


def check_steps():
    step.HBM = H100_HBM
    for name, shape, documents, published, rates in LLMQ:
        model, lengths = step.Model(name, *shape), [1024] * documents
        any_kernel = collections.defaultdict(lambda: fa3_kernels()["forward", model.D])
        s = step.ours(model, lengths, any_kernel, keep=True, head_chunk=8192)
        product = 2. * model.D * model.H * attention.pairs(lengths) / 1e12
        for op in s.ops:
            if op.group == "attention forward":
                op.seconds = 2 * product / rates[0]
            elif op.group == "attention backward":
                op.seconds = 2.5 * product / rates[1]       # one of two kernels
            elif op.group == "optimizer":
                op.count = 1024 * documents / 524288
        percent = step.speed_of_light(model, lengths) / s.seconds(0) * 100
        print(f"{name}: published {published} % of the speed of light, model {percent:.1f}")


def check_flash_attention(library):
    codes = sass.read_code(sass.cuobjdump("-sass", library))
    for (direction, head_dim), published in PUBLISHED.items():
        rows, step, warps = CODE[direction, head_dim][4:]
        kernel = Kernel(direction, head_dim, "queries" if direction == "forward" else "keys",
                        rows, step, warps, None, 1., 0, SM90_CLOCK)
        kernel.trace = find(codes, (direction, head_dim))
        kernel.measure(1)
        causal = CODE[direction, head_dim][2]
        error = fit(kernel, causal, published)
        print(f"{direction} hd{head_dim}: {len(kernel.trace)} instructions, "
              f"{kernel.passes[0]:.0f} clocks; fit {kernel.fit:.2f}, item {kernel.item} clocks, "
              f"error {error:.1%}")
        for n, p in published.items():
            print(f"    {n:6d} published {p}, model {rate(kernel, causal, n):.0f}")
    for head_dim in 64, 128:
        kernel = Kernel("causal", head_dim, "keys", *CODE["causal", head_dim][4:], None, 1., 0,
                        SM90_CLOCK)
        kernel.trace = find(codes, ("causal", head_dim))
        kernel.measure(1)
        print(f"causal backward hd{head_dim}: {kernel.passes[0]:.0f} clocks")
    print("held out:")
    for direction, n, published in HELD_OUT:
        model = rate(fa3_kernels()[direction, 128], 1, n)
        print(f"    {direction} hd128 {n:6d} published {published}, model {model:.0f}, "
              f"{model / published - 1:+.0%}")


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:] and sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    check_products()
    check_steps()
    for path in sys.argv[1:]:
        check_flash_attention(path)
