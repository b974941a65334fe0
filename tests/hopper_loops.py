#!/usr/bin/env python3
"""Describes the hot loops of Hopper's attention kernels as ptxas wrote them: from `cuobjdump -sass FILE` on
standard input, a line a kernel: name, head dimension, wgmma of a pass, exponentials of a pass, those
that run while a product is in flight (at least 32), and moves from vector to uniform registers (R2UR, at
most 8). Fails for others, and for fewer than two kernels.

The hot loop is the shortest loop with a wgmma. A commit (gsb0) is in flight until a wait that leaves
fewer than it.
"""
import re
import sys


def kernels(lines):
    name, code = None, []
    for line in lines:
        if found := re.search(r"Function : (\S+)", line):
            yield name, code
            name, code = found[1], []
        elif found := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*?);", line):
            code.append((int(found[1], 16), found[2]))
    yield name, code


def hot_loop(code):
    loops = []
    for at, text in code:
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            body = [t for a, t in code if int(target[1], 16) <= a <= at]
            if any("HGMMA" in t for t in body):
                loops.append(body)
    return min(loops, key=len, default=[])


def overlapped(body):
    in_flight = count = 0
    for n, text in enumerate(body * 2):  # a loop: what is in flight at its end is so at its start
        if "HGMMA" in text and "gsb0" in text:
            in_flight += 1
        elif found := re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x([0-9a-f]+)", text):
            in_flight = min(in_flight, int(found[1], 16))
        elif "MUFU.EX2" in text and in_flight and n >= len(body):
            count += 1
    return count


good = []
for name, code in kernels(sys.stdin):
    if body := hot_loop(code):
        kernel = re.search(r"\d+attention_([a-z_]+)_sm90_kernelILi(\d+)E", name)
        hgmma, exponentials, moves = (sum(word in t for t in body) for word in ("HGMMA", "MUFU.EX2", "R2UR"))
        print(kernel[1], kernel[2], hgmma, exponentials, overlapped(body), moves)
        good.append(overlapped(body) >= 32 and moves <= 8)
sys.exit(len(good) < 2 or not all(good))
