#!/usr/bin/env python3
"""What the tensor cores of sm_80 and sm_90 compute, by two models that are not the emulator's.

usage: dev/witnesses/arithmetic.py [--chunks N] [--gpu-samples DIR] > dev/witnesses/arithmetic.txt

For a million tiles of bf16 inputs, random and adversarial, prints a hash of the inputs and one of
the fp32 outputs for each chunk of tiles. tests/test_tensor_cores.cu makes the same tiles from the
same numbers and must come to the same hashes, under the emulator and on a GPU.

Models: mmasim (PyPI), and `fused_sums` below, written in integers from the parameters that Khattak
and Mikaitis publish (arXiv 2512.07004). The program ends with an error when they differ in a bit.
--gpu-samples DIR: also holds both against the outputs of real GPUs that those authors publish
(github.com/north-numerical-computing/MATLAB-tensor-core, directory model_validation).
"""

import argparse
import importlib.metadata
import multiprocessing
import os
import sys

import numpy as np
import torch
from mmasim.nv_ptx import MMA, WGMMA

U64 = np.uint64
CANONICAL_NAN = 0x7FFFFFFF  # the NaN that tensor cores write


def mix(z):
    """SplitMix64's finalizer of uint64 values; tests/test_tensor_cores.cu has the same."""
    z = (z + U64(1)) * U64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


# ------------------------------------------------------------------------------------------------
# Tiles. Every four tiles are of the next kind: biased exponents from `lo` on, `span` of them, and
# what else is done to them. The table is that of tests/test_tensor_cores.cu.

HALVES, PAIRS, COARSE, SPECIAL, ZEROS, RAMP, CANCEL, NO_MANTISSA = (1 << i for i in range(8))
#         a             b             c             flags
KINDS = [(124, 7, 124, 7, 124, 10, 0),  # ordinary
         (0, 255, 0, 255, 0, 255, 0),  # any exponents
         (117, 21, 117, 21, 107, 44, 0),  # far enough apart to be cut
         (50, 21, 50, 26, 0, 21, 0),  # subnormal results
         (0, 2, 230, 25, 100, 31, 0),  # subnormal inputs
         (120, 16, 120, 16, 90, 41, HALVES),  # a[k + 8] b[k + 8] = -a[k] b[k]
         (120, 16, 120, 16, 90, 41, PAIRS),  # the same for k and k + 1
         (124, 7, 124, 7, 120, 36, COARSE),  # ties
         (185, 7, 185, 7, 245, 10, 0),  # overflow
         (124, 7, 124, 7, 124, 10, SPECIAL),  # infinities and NaN
         (46, 10, 52, 10, 0, 11, ZEROS),  # zeros among what is below fp32's smallest
         (118, 10, 118, 10, 140, 13, 0),  # a large accumulator
         (97, 31, 120, 10, 120, 16, COARSE),  # probabilities and values
         (0, 1, 124, 7, 0, 1, ZEROS | NO_MANTISSA),  # nothing but zeros and subnormal accumulators
         (140, 5, 120, 15, 0, 1, RAMP | CANCEL),  # the accumulator cancels the largest product
         (140, 5, 120, 15, 100, 40, RAMP)]
TILES_PER_KIND = 4
K = 16


def numbers(kind_of_element, columns, stream, count):
    """Sign, biased exponent, and the random bits that they come from."""
    table = np.array(KINDS, dtype=np.uint64)
    r = mix((U64(stream) << U64(40)) + np.arange(count, dtype=np.uint64))
    lo, span = table[kind_of_element, columns], table[kind_of_element, columns + 1]
    exponent = lo + (((r & U64(0xFFFF)) * span) >> U64(16))
    flags = table[kind_of_element, 6]
    zero = (flags & U64(ZEROS) != 0) & ((r >> U64(24)) & U64(1) == 1)
    special = (flags & U64(SPECIAL) != 0) & ((r >> U64(25)) & U64(31) == 0)
    infinite = special & ((r >> U64(30)) & U64(1) == 0)
    exponent = np.where(special, U64(255), exponent)
    return r, (r >> U64(23)) & U64(1), exponent, flags, zero, infinite


def bf16_operand(shape, rows_per_tile, columns, stream):
    tiles = shape[0]
    kinds = np.arange(tiles) // TILES_PER_KIND % len(KINDS)
    r, sign, exponent, flags, zero, infinite = numbers(
        np.repeat(kinds, rows_per_tile * K), columns, stream, tiles * rows_per_tile * K)
    k = np.tile(np.arange(K, dtype=np.uint64), tiles * rows_per_tile)
    if columns == 0:
        exponent = np.where(flags & U64(RAMP) != 0, exponent - U64(5) * k, exponent)
    mantissa = (r >> U64(16)) & U64(0x7F)
    mantissa = np.where(flags & U64(COARSE) != 0, mantissa & U64(0x60), mantissa)
    if columns == 0:
        mantissa = np.where(flags & U64(NO_MANTISSA) != 0, U64(0), mantissa)
    mantissa = np.where(infinite, U64(0), mantissa)
    value = np.where(zero, U64(0), exponent << U64(7) | mantissa) | sign << U64(15)
    value = value.astype(np.uint16).reshape(tiles, rows_per_tile, K)
    flip = np.uint16(0x8000 if columns == 0 else 0)
    for flag, source, target in ((HALVES, slice(0, 8), slice(8, 16)),
                                 (PAIRS, slice(0, 16, 2), slice(1, 16, 2))):
        chosen = (np.array(KINDS)[kinds, 6] & flag) != 0
        value[chosen, :, target] = value[chosen, :, source] ^ flip
    return value


def as_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def make_tiles(m, n, tiles, first_stream):
    """bf16 bits of A (tiles, m, K) and of B's transpose (tiles, n, K), fp32 C (tiles, m, n)."""
    a = bf16_operand((tiles,), m, 0, first_stream)
    b = bf16_operand((tiles,), n, 2, first_stream + 1)
    kinds = np.arange(tiles) // TILES_PER_KIND % len(KINDS)
    r, sign, exponent, flags, zero, infinite = numbers(
        np.repeat(kinds, m * n), 4, first_stream + 2, tiles * m * n)
    mantissa = (r >> U64(32)) & U64(0x7FFFFF)
    mantissa = np.where(flags & U64(COARSE) != 0, mantissa & U64(0x600000), mantissa)
    mantissa = np.where(infinite, U64(0), mantissa)
    value = np.where(zero, U64(0), exponent << U64(23) | mantissa) | sign << U64(31)
    c = value.astype(np.uint32).view(np.float32).reshape(tiles, m, n)
    chosen = (np.array(KINDS)[kinds, 6] & CANCEL) != 0
    with np.errstate(all="ignore"):
        c[chosen] = -as_float(a[chosen, :, :1]) * as_float(b[chosen, :, 0])[:, None, :]
    return a, b, c


def hash_of(*arrays):
    """The sum of mix(position and bits), so that any part can be hashed on its own."""
    total = 0
    for which, array in enumerate(arrays):
        bits = array.view(np.uint32) if array.dtype == np.float32 else array
        bits = bits.reshape(-1).astype(np.uint64)
        at = np.arange(bits.size, dtype=np.uint64) | U64(which << 28)
        total += int(mix(at << U64(32) | bits).sum(dtype=np.uint64))
    return f"{total % 2**64:016x}"


# ------------------------------------------------------------------------------------------------
# The second model, in integers

BLOCK = {"sm_80": 8, "sm_90": 16}  # products of one sum
EXTRA_BITS = {"sm_80": 1, "sm_90": 2}  # below fp32's 23, kept in the alignment
MIN_EXPONENT = {"sm_80": -132, "sm_90": -133}  # of the grid


def split(bits, mantissa_bits):
    """Sign, exponent and integer significand, and whether it is infinite or NaN."""
    bits = bits.astype(np.int64)
    field = (bits >> mantissa_bits) & 255
    significand = bits & ((1 << mantissa_bits) - 1)
    finite = field != 255
    infinite = ~finite & (significand == 0)
    nan = ~finite & (significand != 0)
    significand = np.where(field > 0, significand | (1 << mantissa_bits), significand)
    sign = np.where(bits >> (mantissa_bits + 8) & 1, -1, 1)
    return sign, np.maximum(field, 1) - 127, significand, infinite, nan


def fused_sum(a, b, c_bits, arch):
    """One block: a, b (..., block) bf16 bits, c_bits (...) fp32 bits. Returns fp32 bits."""
    a_sign, a_exp, a_sig, a_inf, a_nan = split(a, 7)
    b_sign, b_exp, b_sig, b_inf, b_nan = split(b, 7)
    c_sign, c_exp, c_sig, c_inf, c_nan = split(c_bits, 23)
    fraction = 23 + EXTRA_BITS[arch]
    sign = np.concatenate([a_sign * b_sign, c_sign[..., None]], axis=-1)
    exponent = np.concatenate([a_exp + b_exp, c_exp[..., None]], axis=-1)
    # all significands as integers of `fraction` fraction bits: products come with 14, c with 23
    significand = np.concatenate([a_sig * b_sig << (fraction - 14),
                                  (c_sig << (fraction - 23))[..., None]], axis=-1)
    top = np.where(significand != 0, exponent, MIN_EXPONENT[arch]).max(axis=-1)
    top = np.maximum(top, MIN_EXPONENT[arch])
    shift = np.minimum(top[..., None] - exponent, 62)
    total = (sign * (significand >> np.maximum(shift, 0))).sum(axis=-1)
    # normalise and chop: value = magnitude * 2 ** low
    negative, magnitude, low = total < 0, np.abs(total), top - fraction
    length = np.zeros_like(magnitude)
    for step in (16, 8, 4, 2, 1):
        longer = magnitude >> (length + step) != 0
        length = np.where(longer, length + step, length)
    lowest = np.maximum(low + length - 23, -149)  # the result's last bit
    kept = np.where(lowest >= low, magnitude >> np.clip(lowest - low, 0, 62),
                    magnitude << np.clip(low - lowest, 0, 62))
    field = np.where(kept >> 23 != 0, lowest + 150, 0)
    result = np.where(field > 254, 0x7F800000, (field << 23) | (kept & 0x7FFFFF))
    result = np.where(kept == 0, 0, result | (negative.astype(np.int64) << 31))
    return special_values(result, a, b, (a_sign * b_sign, a_inf, b_inf, a_nan, b_nan),
                          (c_sign, c_inf, c_nan)).astype(np.uint32)


def special_values(result, a, b, products, accumulator):
    sign, a_inf, b_inf, a_nan, b_nan = products
    c_sign, c_inf, c_nan = accumulator
    a_zero, b_zero = (a & 0x7FFF) == 0, (b & 0x7FFF) == 0
    invalid = (a_inf & b_zero) | (b_inf & a_zero)
    infinite = (a_inf | b_inf) & ~invalid
    up = (infinite & (sign > 0)).any(axis=-1) | (c_inf & (c_sign > 0))
    down = (infinite & (sign < 0)).any(axis=-1) | (c_inf & (c_sign < 0))
    nan = (a_nan | b_nan | invalid).any(axis=-1) | c_nan | (up & down)
    result = np.where(up, 0x7F800000, np.where(down, 0xFF800000, result))
    return np.where(nan, CANONICAL_NAN, result)


def fused_sums(a, b, c, arch):
    bits = c.view(np.uint32)
    for k in range(0, a.shape[-1], BLOCK[arch]):
        block = slice(k, k + BLOCK[arch])
        bits = fused_sum(a[..., block], b[..., block], bits, arch)
    return bits


# ------------------------------------------------------------------------------------------------
# Comparison

class Disagreement(Exception):
    pass


def bf16_tensor(bits):
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def both_models(model, arch, a, b, c):
    """fp32 outputs of one instruction for a (t, m, K), b (t, n, K), c (t, m, n)."""
    a, b = a[:, :, None], b[:, None]  # every row with every column
    d = model.dpa(bf16_tensor(a), bf16_tensor(b), torch.from_numpy(c.copy())).numpy()
    second = fused_sums(a, b, c, arch)
    different = np.argwhere(d.view(np.uint32) != second)
    if different.size:
        t, i, j = different[0]
        raise Disagreement(f"{arch}: {len(different)} outputs differ; first: a {a[t, i, 0]}, "
                           f"b {b[t, 0, j]}, c {c[t, i, j]!r}: mmasim {d[t, i, j]!r}, integers "
                           f"{second[t, i, j].view(np.float32)!r}")
    return d


def outputs(model, arch, a, b, c, depth):
    """Every `depth` tiles are one chain of instructions on the accumulator of the first."""
    chains, step = c.shape[0] // depth, max(1, 8192 // c[0].size)
    d = np.empty((chains, *c.shape[1:]), np.float32)
    for begin in range(0, chains, step):
        end = min(begin + step, chains)
        tile = np.arange(begin, end) * depth
        acc = c[tile]
        for i in range(depth):
            acc = both_models(model, arch, a[tile + i], b[tile + i], acc)
        d[begin:end] = acc
    return d


def gpu_samples(directory):
    for gpu, arch in (("A100", "sm_80"), ("A2", "sm_80"), ("L40S", "sm_80"), ("H100", "sm_90"),
                      ("H200", "sm_90"), ("B200", "sm_90")):
        name = lambda which, what: os.path.join(directory, gpu, "bf16", f"{which}_{gpu}_{what}.txt")
        read = lambda path, base: np.array([int(x, base) for x in open(path).read().split()],
                                           dtype=np.uint32)
        if not os.path.exists(name("d", "fp32")):
            continue
        c, d = (read(name(which, "fp32"), 2) for which in "cd")
        a, b = ((read(name(which, "bf16"), 16) >> 16).astype(np.uint16).reshape(c.size, -1)
                for which in "ab")
        found = fused_sums(a, b, c.view(np.float32), arch)
        model = MMA("Ampere" if arch == "sm_80" else "Hopper", "m16n8k16.f32.bf16.bf16.f32")
        mmasim = model.dpa(bf16_tensor(a), bf16_tensor(b), torch.from_numpy(c.view(np.float32)))
        yield gpu, arch, a.shape[1], c.size, int((found == d).sum()), int(
            (mmasim.numpy().view(np.uint32) == d).sum())


#        name, architecture, model of mmasim, m, n, tiles of a chunk, first random stream
CASES = (("mma", "sm_80", (MMA, "Ampere", "m16n8k16.f32.bf16.bf16.f32"), 16, 8, 40960, 0),
         ("mma", "sm_90", (MMA, "Hopper", "m16n8k16.f32.bf16.bf16.f32"), 16, 8, 40960, 0),
         ("wgmma", "sm_90", (WGMMA, "Hopper", "m64n64k16.f32.bf16.bf16"), 64, 64, 1280, 1 << 16))


def chunk_lines(job):
    (name, arch, (kind, model_name, shape), m, n, tiles, first_stream), chunk = job
    model = kind(model_name, shape)
    a, b, c = make_tiles(m, n, tiles, first_stream + 3 * chunk)
    inputs = hash_of(a, b, c)
    for depth in (1, 4) if chunk == 0 else (1,):
        d = outputs(model, arch, a, b, c, depth)
        yield f"{name} {arch} {depth} {chunk} {tiles} {d.size} {inputs} {hash_of(d)}"


def run_chunk(job):
    torch.set_num_threads(1)  # the tensors are small
    return list(chunk_lines(job))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chunks", type=int, default=25)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--gpu-samples", metavar="DIR")
    args = parser.parse_args()
    version = importlib.metadata.version
    print("# Written by dev/witnesses/arithmetic.py; checked by tests/test_tensor_cores.cu.")
    print(f"# mmasim {version('mmasim')}, torch {version('torch').split('+')[0]}, numpy "
          f"{version('numpy')}: mmasim and the integer model agree in every bit.")
    if args.gpu_samples:
        print("# Outputs of real GPUs, bf16, published by Khattak and Mikaitis, that each model "
              "has:")
        for gpu, arch, k, count, second, mmasim in gpu_samples(args.gpu_samples):
            print(f"#   {gpu} ({arch}, k {k}), {count} sums: mmasim {mmasim}, integers {second}")
    print("# instruction, architecture, depth of chains, chunk, tiles, outputs, hash of inputs, of "
          "outputs")
    jobs = [(case, chunk) for case in CASES for chunk in range(args.chunks)]
    with multiprocessing.Pool(args.jobs) as pool:
        for lines in pool.imap(run_chunk, jobs):
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Disagreement as e:
        sys.exit(f"error: mmasim and the integers disagree: {e}")
