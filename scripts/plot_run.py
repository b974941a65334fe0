#!/usr/bin/env python3
"""Draws loss, tokens/s and fill of a run to one PNG.

usage: plot_run.py RUN_DIR_OR_LOG [--out FILE.png]
"""
import argparse
import json
import os
import sys


def fail(code, what, hint):
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    sys.exit(code)


def read_log(path):
    """Steps, validations and start event of log.jsonl; lines that are not JSON are skipped."""
    steps, vals, start, bad = {}, {}, {}, 0
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                except ValueError:
                    bad += 1
                    continue
                if entry.get("event") == "val":
                    vals[entry["step"]] = entry["loss"]
                elif entry.get("event") in ("start", "resume"):
                    start = entry
                elif "event" not in entry:
                    steps[entry["step"]] = entry
    except OSError as e:
        fail(3, f"{path}: cannot read: {e.strerror}",
             "give the --out directory of a run, or its log.jsonl")
    if not steps:
        fail(3, f"{path}: expected at least one step, found none", "let the run finish a step first")
    if bad:
        print(f"warning: {path}: {bad} lines are not JSON and were skipped", file=sys.stderr)
    return [steps[k] for k in sorted(steps)], sorted(vals.items()), start


def title_of(start):
    """Model, size and data, from the log's start event."""
    options = start.get("options", {})
    name = {k: os.path.basename(os.path.normpath(options.get(k) or "?")) for k in ("model", "train")}
    size = f" ({start['parameters'] / 1e6:.3g} M parameters)" if start.get("parameters") else ""
    return f"{name['model']}{size} on {name['train']}"


def smooth(values):
    """Centred moving mean, without lag; None (not finite) is skipped."""
    out, widest = [], max(2, min(25, len(values) // 30))
    for i in range(len(values)):
        half = min(i, len(values) - 1 - i, widest)
        near = [v for v in values[i - half:i + half + 1] if v is not None]
        out.append(sum(near) / len(near) if near else float("nan"))
    return out


def figures(values):
    """The first and the last value."""
    values = plain(values)
    return f"{values[0]:.3f} to {values[-1]:.3f}"


def plain(values):
    return [float("nan") if v is None else v for v in values]


def draw(steps, vals, out, title):
    try:
        import matplotlib
    except ImportError:
        fail(2, "matplotlib is not installed", "run: sudo apt-get install python3-matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    x = [s["step"] for s in steps]
    loss = [s["loss"] for s in steps]
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(9, 9), height_ratios=[2, 1, 1])
    axes[0].plot(x, plain(loss), color="0.75", linewidth=1, label="train, each step")
    axes[0].plot(x, smooth(loss), color="C0", linewidth=2, label="train, smoothed")
    if vals:
        axes[0].plot([step for step, _ in vals], plain([v for _, v in vals]), "o-", color="C3",
                     markersize=4, label="validation")
    axes[0].set_ylabel("loss (nats per token)")
    axes[1].plot(x, [s["tokens_per_s"] for s in steps], color="C2", linewidth=1)
    axes[1].set_ylabel("real tokens/s")
    axes[1].set_ylim(bottom=0)
    axes[2].plot(x, [100 * s["fill"] for s in steps], color="C0", linewidth=1,
                 label="fill of the buffer")
    pairs = [100 * s["attention_pairs"] / s["padded_pairs"] for s in steps]
    axes[2].plot(x, pairs, color="C1", linewidth=1,
                 label="attention pairs against padded rows")
    axes[2].set_ylabel("%")
    axes[2].set_ylim(0, 105)
    axes[2].set_xlabel("step")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for axis in axes[0], axes[2]:       # above the curves
        axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3,
                    borderaxespad=0)
    figure.suptitle(title, x=0.01, ha="left")
    figure.tight_layout()
    partial = out + ".tmp.png"
    figure.savefig(partial, dpi=110)
    os.replace(partial, out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the --out directory of a run, or its log.jsonl")
    parser.add_argument("--out", help="the picture (default: plot.png next to the log)")
    args = parser.parse_args()
    log = os.path.join(args.run, "log.jsonl") if os.path.isdir(args.run) else args.run
    steps, vals, start = read_log(log)
    out = args.out or os.path.join(os.path.dirname(log) or ".", "plot.png")
    draw(steps, vals, out, title_of(start))
    print(f"wrote {out}: {len(steps)} steps, loss {figures(s['loss'] for s in steps)}"
          + (f", validation {figures(v for _, v in vals)}" if vals else ""))


if __name__ == "__main__":
    main()
