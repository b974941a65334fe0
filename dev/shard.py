#!/usr/bin/env python3
"""Writes a shard of random tokens in documents of known lengths, for benchmarks and checks.

    python3 dev/shard.py --dist r65 --tokens 65536 --out DIR

r65    log-normal lengths, mean 700, sigma 1.04, cap 8192: web pages; 65,536 tokens are the
       reference batch R65 of 95 documents, the same on every machine
short  log-normal lengths, mean 60, sigma 0.6, cap 256: lines, titles, questions
chat   mean 300, sigma 0.8, cap 2048: conversations
long   mean 3000, sigma 0.5, cap 8192: papers, source files
giant  one document of --tokens
equal  documents of --length tokens
seed   220, 217, 295, 183, 130, 350
given  --lengths N...

Token 0 begins a document and occurs nowhere else: train with --boundary-token 0.
"""
import argparse
import math
import pathlib
import random
import statistics
import struct


# mean and standard deviation of log-normal lengths, longest document
LAWS = {"r65": (700, 1.04, 8192), "short": (60, 0.6, 256), "chat": (300, 0.8, 2048),
        "long": (3000, 0.5, 8192)}


def log_normal(law, tokens, cap):
    """Quantiles of the distribution, so that lengths are not random; the last makes up the sum."""
    mean, sigma, longest = LAWS[law]
    cap = min(cap, longest)
    count = max(1, round(tokens * 95 / 65536 if law == "r65" else tokens / mean))
    mu = math.log(mean) - sigma ** 2 / 2
    normal = statistics.NormalDist()
    lengths = [min(cap, round(math.exp(mu + sigma * normal.inv_cdf((i + 0.5) / count))))
               for i in range(count)]
    while sum(lengths) > tokens + cap - lengths[-1]:
        lengths.pop(0)
    rest = tokens - sum(lengths)
    while rest > 0 and lengths[-1] + rest > cap:         # a small cap cuts the tail: more documents
        lengths.append(min(cap, rest))
        rest -= lengths[-1]
    lengths[-1] += rest
    return lengths


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--dist", choices=[*LAWS, "giant", "equal", "seed", "given"], default="r65")
parser.add_argument("--tokens", type=int, default=65536)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--lengths", type=int, nargs="+")
parser.add_argument("--cap", type=int, default=8192)
parser.add_argument("--vocab", type=int, default=49152)
parser.add_argument("--print-lengths", action="store_true", help="and write nothing")
parser.add_argument("--out", type=pathlib.Path, required=True)
options = parser.parse_args()

lengths = {**{law: lambda law=law: log_normal(law, options.tokens, options.cap) for law in LAWS},
           "giant": lambda: [options.tokens],
           "equal": lambda: [options.length] * (options.tokens // options.length),
           "given": lambda: list(options.lengths),
           "seed": lambda: [220, 217, 295, 183, 130, 350]}[options.dist]()
assert all(0 < n <= options.cap for n in lengths), lengths
rng = random.Random(1)
rng.shuffle(lengths)
if options.print_lengths:
    raise SystemExit(print(*lengths))
tokens = []
for length in lengths:
    # a short cycle with noise, so that there is something to learn
    start = rng.randrange(1, options.vocab)
    tokens.append(0)
    for i in range(length - 1):
        tokens.append(1 + (start + i % 7 * 37 + (rng.random() < 0.1) * i) % (options.vocab - 1))
options.out.mkdir(parents=True, exist_ok=True)
with open(options.out / "train_00000.bin", "wb") as f:
    f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
    f.write(struct.pack(f"<{len(tokens)}H", *tokens))
print(f"{len(lengths)} documents, {len(tokens)} tokens, longest {max(lengths)}, "
      f"pairs {sum(n * (n + 1) // 2 for n in lengths)}")
