#!/usr/bin/env python3
"""Draws loss, tokens/s and fill of a run, or of several in one figure, to one PNG.

usage: plot_run.py RUN_DIR_OR_LOG [RUN_DIR_OR_LOG ...] [--out FILE.png]
"""
import argparse
import json
import os
import sys
from types import SimpleNamespace

STEP_FIELDS = {"loss", "grad_norm", "lr", "ms", "tokens_per_s", "real_tokens", "fill",
               "attention_pairs", "padded_pairs"}
EVENT_FIELDS = {"start": {"options"}, "resume": {"options"}, "val": {"loss"},
                "sample": {"text", "number"}}


def fail(code, what, hint):
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    sys.exit(code)


def log_path(run):
    return os.path.join(run, "log.jsonl") if os.path.isdir(run) else run


def parse_record(line):
    """The record of a line of log.jsonl; None: it is not one. Later versions may add events."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return None
    fields = EVENT_FIELDS.get(entry["event"], set()) if "event" in entry else STEP_FIELDS
    return entry if fields <= entry.keys() else None


def read_log(path):
    """What log.jsonl at `path` holds: steps (with total_tokens and total_s up to each), vals (step,
    loss), samples, start (the last start or resume), resumes (steps), bad (numbers of the lines
    left out). Records of a resumed run replace those after the step that it resumes from."""
    steps, vals, samples, start, resumes, bad = {}, {}, {}, {}, [], []
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                entry = parse_record(line)
                if entry is None:
                    if line.endswith("\n"):     # or it is being written
                        bad.append(number)
                    continue
                step, event = entry["step"], entry.get("event")
                if event in ("start", "resume"):
                    start = entry
                    for kept in steps, vals, samples:
                        for later in [k for k in kept if k > step]:
                            del kept[later]
                    if event == "resume":
                        resumes.append(step)
                elif event == "val":
                    vals[step] = entry["loss"]
                elif event == "sample":
                    samples.setdefault(step, {})[entry["number"]] = entry
                elif event is None:
                    steps[step] = entry
    except OSError as e:
        fail(3, f"{path}: cannot read: {e.strerror}",
             "give the --out directory of a run, or its log.jsonl")
    if not steps:
        fail(3, f"{path}: expected at least one step, found none", "let the run finish a step first")
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        print(f"warning: {path}: skipped what is not a record: line "
              + ", ".join(map(str, bad[:5])) + more, file=sys.stderr)
    tokens = seconds = 0
    for step in sorted(steps):
        tokens += steps[step]["real_tokens"]
        seconds += steps[step]["ms"] / 1e3
        steps[step].update(total_tokens=tokens, total_s=seconds)
    return SimpleNamespace(path=path, steps=[steps[k] for k in sorted(steps)], start=start,
                           vals=sorted(vals.items()), resumes=resumes, bad=bad,
                           samples=[samples[k] for k in sorted(samples)])


def vals_by(run, key):
    """x and loss of each validation; x: what `key` of the steps is there."""
    at = {0: 0, **{s["step"]: s[key] for s in run.steps}}
    vals = [(at[step], loss) for step, loss in run.vals if step in at]
    return [x for x, _ in vals], plain([loss for _, loss in vals])


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


def draw(pyplot, run):
    steps = run.steps
    x = [s["step"] for s in steps]
    loss = [s["loss"] for s in steps]
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(9, 9), height_ratios=[2, 1, 1])
    axes[0].plot(x, plain(loss), color="0.75", linewidth=1, label="train, each step")
    axes[0].plot(x, smooth(loss), color="C0", linewidth=2, label="train, smoothed")
    if run.vals:
        axes[0].plot([step for step, _ in run.vals], plain([v for _, v in run.vals]), "o-",
                     color="C3", markersize=4, label="validation")
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
    for axis in axes[0], axes[2]:       # above the curves
        axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3,
                    borderaxespad=0)
    figure.suptitle(title_of(run.start), x=0.01, ha="left")
    return figure


def names_of(runs):
    """The directories' names; the paths where two have the same name."""
    paths = [os.path.dirname(os.path.abspath(run.path)) for run in runs]
    names = [os.path.basename(path) for path in paths]
    return names if len(set(names)) == len(names) else [run.path for run in runs]


def draw_several(pyplot, runs):
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8))
    panels = (("total_tokens", "real tokens", "loss", "loss (nats per token)"),
              ("total_s", "training time (s)", "loss", "loss (nats per token)"),
              ("step", "step", "tokens_per_s", "real tokens/s"),
              ("step", "step", "fill", "fill of the buffer"))
    for axis, (x, x_label, y, y_label) in zip(axes.flat, panels):
        for i, (run, name) in enumerate(zip(runs, names_of(runs))):
            axis.plot([s[x] for s in run.steps], smooth([s[y] for s in run.steps]), color=f"C{i}",
                      label=name)
            if y == "loss":
                axis.plot(*vals_by(run, x), "o:", color=f"C{i}", markersize=4)
        axis.set(xlabel=x_label, ylabel=y_label)
    axes[1][0].set_ylim(bottom=0)
    axes[1][1].set_ylim(0, 1.05)
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, loc="upper right",
                  ncols=4)
    figure.suptitle("smoothed; dots: validation", x=0.01, ha="left")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="run",
                        help="the --out directory of a run, or its log.jsonl")
    parser.add_argument("--out", help="the picture (default: plot.png next to the first log)")
    args = parser.parse_args()
    runs = [read_log(log_path(run)) for run in args.runs]
    out = args.out or os.path.join(os.path.dirname(runs[0].path) or ".", "plot.png")
    try:
        import matplotlib
    except ImportError:
        fail(2, "matplotlib is not installed", "run: sudo apt-get install python3-matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure = draw(pyplot, runs[0]) if len(runs) == 1 else draw_several(pyplot, runs)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.tight_layout()
    partial = out + ".tmp.png"
    figure.savefig(partial, dpi=110)
    os.replace(partial, out)
    for run in runs:
        name = out if len(runs) == 1 else f"{out}: {run.path}"
        print(f"wrote {name}: {len(run.steps)} steps, loss "
              + figures(s["loss"] for s in run.steps)
              + (f", validation {figures(v for _, v in run.vals)}" if run.vals else ""))


if __name__ == "__main__":
    main()
