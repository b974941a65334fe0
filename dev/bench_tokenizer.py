#!/usr/bin/env python3
"""The trainer's tokenizer beside Hugging Face's `tokenizers`, on one thread each, alternately: that
both give the same ids for every document, and how fast each is.

    pip install tokenizers
    python3 dev/bench_tokenizer.py TOKENIZER_DIR [--megabytes 10] [--rounds 5] [--equality]

Texts: source code and documents installed on this machine, every character of Unicode, words of
many scripts, emoji, control characters, long words, long runs of white space, bad UTF-8.
Exits 1 when ids differ, or when the trainer is slower.
"""
import argparse
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = [(0x20, 0x7e), (0xa1, 0x24f), (0x370, 0x3ff), (0x400, 0x4ff), (0x5d0, 0x5ea),
           (0x620, 0x6ff), (0x900, 0x97f), (0xe00, 0xe5b), (0x1100, 0x11ff), (0x3040, 0x30ff),
           (0x4e00, 0x9fff), (0xac00, 0xd7a3), (0x1f300, 0x1faff), (0x2000, 0x206f), (0x0, 0x1f)]


def installed(limit):
    """Files of this Python and its packages, and of /usr/share/doc."""
    size = 0
    for top in (os.path.dirname(os.__file__), "/usr/share/doc", "/usr/share/perl"):
        for here, dirs, names in os.walk(top):
            dirs.sort()
            for name in sorted(names):
                path = os.path.join(here, name)
                if name.endswith((".gz", ".pyc", ".so", ".a")) or not os.path.isfile(path):
                    continue
                with open(path, "rb") as f:
                    data = f.read(1 << 18)
                if b"\0" not in data:
                    yield data
                    size += len(data)
                if size > limit:
                    return


def all_of_unicode():
    points = [c for c in range(0x110000) if not 0xd800 <= c < 0xe000]
    for at in range(0, len(points), 4096):
        part = points[at:at + 4096]
        yield "".join("a%cb %c1%c\n%c %c" % (c, c, c, c, c) for c in part).encode()


def made(rng, limit):
    """Random words, then the same with bytes changed, cut out or doubled: bad UTF-8."""
    size = 0
    while size < limit:
        low, high = rng.choice(SCRIPTS)
        words = []
        for _ in range(rng.randrange(1, 200)):
            length = rng.choice([1, 2, 3, 5, 8, 13, 40])
            words.append("".join(chr(rng.randint(low, high)) for _ in range(length)))
            words.append(rng.choice([" ", " ", " ", "  ", "\n", "\r\n\t ", "'s ", "'LL", "12345", "\u00a0",
                                     "<|endoftext|>", "<|im_start|>", "_", "..."]))
        data = bytearray("".join(words).encode())
        for _ in range(rng.choice([0, 0, 1, 20])):
            at = rng.randrange(len(data) + 1)
            data[at:at + rng.randrange(3)] = bytes(rng.randrange(256) for _ in range(rng.randrange(3)))
        yield bytes(data)
        size += len(data)
    for n in (1, 100, 10000, 200000):
        yield b"a" * n
        yield b" " * n + b"x"
        yield "é".encode() * n + b"\n" * n
        yield bytes(rng.choice(b"abc \n\xc3\xa9\xff") for _ in range(n))


def ids_of(file):
    data, at = pathlib.Path(file).read_bytes(), 0
    while at < len(data):
        n = struct.unpack_from("<I", data, at)[0]
        yield list(struct.unpack_from("<%dI" % n, data, at + 4))
        at += 4 + 4 * n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("tokenizer")
    p.add_argument("--megabytes", type=float, default=10)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--equality", action="store_true", help="do not measure")
    args = p.parse_args()
    from tokenizers import Tokenizer, __version__
    theirs = Tokenizer.from_file(os.path.join(args.tokenizer, "tokenizer.json"))
    program = str(ROOT / "build" / "cpu" / "bench_tokenizer")
    limit = args.megabytes * 1e6
    real = list(installed(limit))
    mixed = real + list(all_of_unicode()) + list(made(random.Random(1), limit / 4))
    with tempfile.TemporaryDirectory() as tmp:
        def save(documents):
            with open(tmp + "/documents", "wb") as f:
                for d in documents:
                    f.write(struct.pack("<I", len(d)) + d)

        def ours(*out):
            return float(subprocess.check_output([program, args.tokenizer, tmp + "/documents", *out]))

        save(mixed)
        ours(tmp + "/ids")
        wrong = 0
        for d, found in zip(mixed, ids_of(tmp + "/ids"), strict=True):
            text = d.decode("utf-8", "replace")
            expected = theirs.encode(text, add_special_tokens=False)
            if found == expected.ids:
                continue
            wrong += 1
            at = next((i for i, (a, b) in enumerate(zip(expected.ids, found)) if a != b),
                      min(len(found), len(expected.ids) - 1))
            place = expected.offsets[at][0]
            print("differ at id %d: %r" % (at, text[max(0, place - 8):place + 8]))
        print("equality: %d documents, %.1f MB, %d differ (tokenizers %s)" % (
            len(mixed), sum(map(len, mixed)) / 1e6, wrong, __version__))
        if args.equality:
            return wrong > 0
        save(real)
        texts = [d.decode("utf-8", "replace") for d in real]
        size = sum(map(len, real)) / 1e6
        times = []
        for _ in range(args.rounds):
            start = time.perf_counter()
            for text in texts:
                theirs.encode(text, add_special_tokens=False)
            times.append((time.perf_counter() - start, ours()))
        other, own = (sorted(t)[len(times) // 2] for t in zip(*times))
        print("speed, one thread, median of %d rounds on %.1f MB of code and documents: "
              "ours %.1f MB/s, tokenizers %.1f MB/s" % (args.rounds, size, size / own, size / other))
        return wrong > 0 or own > other


sys.exit(main())
