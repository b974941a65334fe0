#!/usr/bin/env python3
"""Draws loss, tokens/s and fill of a run, or of several in one figure, to one PNG.

usage: plot_run.py RUN_DIR_OR_LOG [RUN_DIR_OR_LOG ...] [--out FILE.png]
"""
import argparse
import json
import os
import sys
from types import SimpleNamespace

FIELDS = {None: {"loss", "ms", "tokens_per_s", "real_tokens", "fill", "attention_pairs",
                 "padded_pairs"}, "start": {"options"}, "resume": {"options"}, "val": {"loss"}}
NAN = float("nan")


def fail(code, what, hint):
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    sys.exit(code)


def is_good(key, value):
    """Is it what the trainer writes there? null: a number that is not finite."""
    if key in ("options", "event"):
        return isinstance(value, dict if key == "options" else str)
    number = isinstance(value, (int, float)) and abs(value) < 1e300
    return number or value is None and key in ("loss", "grad_norm")


def parse_record(line):
    """The record of a line of log.jsonl; None: it is not one. Later versions may add events."""
    try:
        entry = json.loads(line)
        wanted = FIELDS.get(entry.get("event"), set()) | {"step"} | {"event"} & entry.keys()
        good = all(is_good(key, entry[key]) for key in wanted) and int(entry["step"]) >= 0
        return entry if good and entry.get("padded_pairs", 1) > 0 else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_log(path):
    """What log.jsonl at `path` holds: steps (with total_tokens and total_s up to each), vals
    [(step, loss)], start (the last start or resume). Records of a resumed run replace those after
    the step that it resumes from."""
    steps, vals, start, bad = {}, {}, {}, []
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                entry = parse_record(line)
                if entry is None:
                    bad += [number] * line.endswith("\n")       # or it is being written
                    continue
                step, event = entry["step"], entry.get("event")
                if event in ("start", "resume"):
                    start = entry
                    steps = {k: v for k, v in steps.items() if k <= step}
                    vals = {k: v for k, v in vals.items() if k <= step}
                elif event == "val":
                    vals[step] = entry["loss"]
                elif event is None:
                    steps[step] = entry
    except OSError as e:
        fail(3, f"{path}: cannot read: {e.strerror}",
             "give the --out directory of a run, or its log.jsonl")
    if not steps:
        fail(3, f"{path}: expected at least one step, found none",
             "let the run finish a step first")
    if bad:
        print(f"warning: {path}: skipped what is not a record: line "
              + ", ".join(map(str, bad[:5])) + (" and more" if bad[5:] else ""), file=sys.stderr)
    tokens = seconds = 0
    for step in sorted(steps):
        tokens += steps[step]["real_tokens"]
        seconds += steps[step]["ms"] / 1e3
        steps[step].update(total_tokens=tokens, total_s=seconds)
    return SimpleNamespace(path=path, steps=[steps[k] for k in sorted(steps)], start=start,
                           vals=sorted(vals.items()))


def smooth(values):
    """Centred moving mean, without lag; None (not finite) is skipped."""
    out, widest = [], max(2, min(25, len(values) // 30))
    for i in range(len(values)):
        half = min(i, len(values) - 1 - i, widest)
        near = [v for v in values[i - half:i + half + 1] if v is not None]
        out.append(sum(near) / len(near) if near else NAN)
    return out


def plain(values):
    return [NAN if v is None else v for v in values]


def names_of(runs):
    """The directories' names; the paths where two have the same name."""
    names = [os.path.basename(os.path.dirname(os.path.abspath(run.path))) for run in runs]
    return names if len(set(names)) == len(names) else [run.path for run in runs]


def draw(pyplot, runs):
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8))
    panels = (("total_tokens", "real tokens", "loss", "loss (nats per token)"),
              ("total_s", "training time (s)", "loss", "loss (nats per token)"),
              ("step", "step", "tokens_per_s", "real tokens/s"),
              ("step", "step", "fill", "fill of the buffer"))
    for axis, (x, x_label, y, y_label) in zip(axes.flat, panels):
        for i, (run, name) in enumerate(zip(runs, names_of(runs))):
            xs, ys = [s[x] for s in run.steps], [s[y] for s in run.steps]
            axis.plot(xs, plain(ys), color=f"C{i}", linewidth=1, alpha=0.25)
            axis.plot(xs, smooth(ys), color=f"C{i}", label=name)
            if y == "loss":
                at = {0: 0, **{s["step"]: s[x] for s in run.steps}}
                vals = [(at[step], loss) for step, loss in run.vals if step in at]
                axis.plot([v for v, _ in vals], plain([v for _, v in vals]), "o:", color=f"C{i}",
                          markersize=4)
        axis.set(xlabel=x_label, ylabel=y_label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for i, run in enumerate(runs):
        pairs = [s["attention_pairs"] / s["padded_pairs"] for s in run.steps]
        axes[1][1].plot([s["step"] for s in run.steps], smooth(pairs), "--", color=f"C{i}",
                        label="attention pairs against padded rows" if i == 0 else None)
    axes[1][0].set_ylim(bottom=0)
    axes[1][1].set_ylim(0, 1.05)
    axes[1][1].legend(frameon=False)
    options = runs[0].start.get("options", {})
    title = " on ".join(os.path.basename(os.path.normpath(str(options.get(k) or "?")))
                        for k in ("model", "train"))
    if len(runs) > 1:
        title = ""
        axes[0][0].legend(frameon=False)
    figure.suptitle(f"{title}   faint: each step; dots: validation", x=0.01, ha="left")
    figure.tight_layout()
    return figure


def figures(values):
    """The first and the last value"""
    values = plain(values)
    return f"{values[0]:.3f} to {values[-1]:.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="run",
                        help="the --out directory of a run, or its log.jsonl")
    parser.add_argument("--out", help="the picture (default: plot.png next to the first log)")
    args = parser.parse_args()
    runs = [read_log(os.path.join(run, "log.jsonl") if os.path.isdir(run) else run)
            for run in args.runs]
    out = args.out or os.path.join(os.path.dirname(runs[0].path) or ".", "plot.png")
    try:
        import matplotlib
    except ImportError:
        fail(2, "matplotlib is not installed", "run: sudo apt-get install python3-matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    try:
        draw(pyplot, runs).savefig(out + ".tmp.png", dpi=110)
        os.replace(out + ".tmp.png", out)
    except OSError as e:
        fail(4, f"{out}: cannot write: {e.strerror}", "give --out FILE.png in another directory")
    for run in runs:
        print(f"wrote {out}: {run.path}: {len(run.steps)} steps, loss "
              + figures([s["loss"] for s in run.steps])
              + (f", validation {figures([v for _, v in run.vals])}" if run.vals else ""))


if __name__ == "__main__":
    main()
