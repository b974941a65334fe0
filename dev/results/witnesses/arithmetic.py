#!/usr/bin/env python3
"""What the tensor cores of sm_80 and sm_90 compute, by a model that is not the emulator's: mmasim
(PyPI).

usage: dev/results/witnesses/arithmetic.py > dev/results/witnesses/arithmetic.txt

For tiles of bf16 inputs, random and adversarial, prints a hash of the inputs and one of the fp32
outputs. tests/test_tensor_cores.cu makes the same tiles from the same numbers and must come to the
same hashes, under the emulator and on a GPU.
"""

import importlib.metadata
import multiprocessing

import numpy as np
import torch
from mmasim.nv_ptx import MMA, WGMMA

U64 = np.uint64


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

def bf16_tensor(bits):
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def outputs(model, a, b, c, depth):
    """Every `depth` tiles are one chain of instructions on the accumulator of the first."""
    chains, step = c.shape[0] // depth, max(1, 8192 // c[0].size)
    d = np.empty((chains, *c.shape[1:]), np.float32)
    for begin in range(0, chains, step):
        end = min(begin + step, chains)
        tile = np.arange(begin, end) * depth
        acc = c[tile].copy()
        for i in range(depth):
            rows, columns = a[tile + i][:, :, None], b[tile + i][:, None]   # every pair
            acc = model.dpa(bf16_tensor(rows), bf16_tensor(columns), torch.from_numpy(acc)).numpy()
        d[begin:end] = acc
    return d


#        name, architecture, model of mmasim, m, n, tiles, first random stream
CASES = (("mma", "sm_80", (MMA, "Ampere", "m16n8k16.f32.bf16.bf16.f32"), 16, 8, 40960, 0),
         ("mma", "sm_90", (MMA, "Hopper", "m16n8k16.f32.bf16.bf16.f32"), 16, 8, 40960, 0),
         ("wgmma", "sm_90", (WGMMA, "Hopper", "m64n64k16.f32.bf16.bf16"), 64, 64, 1280, 1 << 16))


def lines(case):
    name, arch, (kind, model_name, shape), m, n, tiles, first_stream = case
    torch.set_num_threads(1)  # the tensors are small
    a, b, c = make_tiles(m, n, tiles, first_stream)
    inputs, model = hash_of(a, b, c), kind(model_name, shape)
    for depth in (1, 4):
        d = outputs(model, a, b, c, depth)
        yield f"{name} {arch} {depth} {tiles} {d.size} {inputs} {hash_of(d)}"


def listed(case):
    return list(lines(case))


def main():
    version = importlib.metadata.version
    print("# Written by dev/results/witnesses/arithmetic.py; checked by tests/test_tensor_cores.cu.")
    print(f"# mmasim {version('mmasim')}, torch {version('torch').split('+')[0]}, numpy "
          f"{version('numpy')}")
    print("# instruction, architecture, depth of chains, tiles, outputs, hash of inputs, of outputs")
    with multiprocessing.Pool() as pool:
        for case in pool.imap(listed, CASES):
            print("\n".join(case), flush=True)


if __name__ == "__main__":
    main()
