#!/usr/bin/env python3
"""Draws real tokens/s from a file of dev/results: each layout and PyTorch on the same documents.

usage: plot_results.py dev/results/cpu-DATE.txt --model smollm2-135m --row-len 350 --out FILE.png
"""
import argparse
import pathlib
import re

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("results", type=pathlib.Path)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--row-len", type=int, default=350)
parser.add_argument("--out", type=pathlib.Path, required=True)
options = parser.parse_args()

bars = {}       # label: real tokens/s; of runs repeated in the file, the median
for block in options.results.read_text().split("\n$ "):
    command = block.splitlines()[0]
    if f"--model {options.model}" not in command:
        continue
    if "train_llama" in command and f"--max-seqlen {options.row_len} " in command:
        dtype = "bf16" if "--bf16-matmul" in command else "fp32"
        for layout, rate in re.findall(r"^(packed|padded|repad) +[\d.]+ +(\d+)", block, re.M):
            bars.setdefault((dtype, f"unpad.c {layout}"), []).append(float(rate))
    if "pytorch_cpu" in command:
        for dtype, mode, row, rate in re.findall(
                r"^(fp32|bf16) +(padded|alone|packed)(?: \d+ x (\d+))? +([\d,]+) ", block, re.M):
            if not row or int(row) == options.row_len:
                rates = bars.setdefault((dtype, f"PyTorch {mode}"), [])
                rates.append(float(rate.replace(",", "")))
if not bars:
    raise SystemExit(f"error: {options.results}: no runs of {options.model} at {options.row_len}")

import matplotlib  # noqa: E402  (after the arguments: --help needs no matplotlib)
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), sharex=True)
for ax, dtype in zip(axes, ("fp32", "bf16")):
    rows = sorted(((sorted(v)[len(v) // 2], k[1]) for k, v in bars.items() if k[0] == dtype))
    ax.barh([label for _, label in rows], [rate for rate, _ in rows],
            color=["C0" if label.startswith("unpad.c") else "0.7" for _, label in rows])
    for y, (rate, _) in enumerate(rows):
        ax.text(rate, y, f" {rate:.0f}", va="center", fontsize=9)
    ax.set_title(dtype, loc="left")
    ax.set_xlabel("real tokens/s")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
figure.tight_layout()
figure.savefig(options.out, dpi=110)
print(f"wrote {options.out}")
