#!/usr/bin/env python3
"""Writes report.html of a run, running or done: one page that needs no other file and no network.

usage: report.py RUN_DIR_OR_LOG [--out FILE.html]
Needs Python only. Document lengths come from the .idx files of the run's --train, if they are here,
or of the tokens that it made of texts.
"""
import argparse
import array
import glob
import html
import math
import os
import struct
import sys

from plot_run import fail, log_path, names_of, read_log, smooth, title_of, vals_by
from report_charts import chart, finite, histogram, no_chart

# Okabe-Ito colours, which colour-blind readers can tell apart; lines 3:1 and text 4.5:1 or more
# against the background, in both schemes.
STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --muted: #57606a;
        --grid: #d8dee4; --one: #0072b2; --two: #c24e00; --faint: #87909a; }
@media (prefers-color-scheme: dark) {
  :root { --back: #0d1117; --text: #e6edf3; --muted: #9ea7b1; --grid: #30363d; --one: #56b4e9;
          --two: #e69f00; --faint: #6a737d; } }
body { background: var(--back); color: var(--text); font: 15px/1.45 system-ui, sans-serif;
       max-width: 1180px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.4em; margin: 0.2em 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1em; margin: 1.6em 0 0.5em; }
h3 { font-size: 1em; margin: 0 0 2px; }
p { margin: 0.3em 0; } .muted, figcaption { color: var(--muted); font-size: 0.87em; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr));
        gap: 24px; }
figure { margin: 0; min-width: 0; } svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--muted); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.one { stroke: var(--one); } .two { stroke: var(--two); }
.faint { stroke: var(--faint); stroke-width: 1; } .axis { stroke: var(--grid); }
.key { margin-right: 12px; white-space: nowrap; }
.key i { display: inline-block; width: 14px; height: 4px; margin: 0 5px 3px 0; }
table { border-collapse: collapse; font-size: 0.93em; }
td, th { padding: 2px 14px 2px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
td:first-child { color: var(--muted); white-space: nowrap; }
.columns { columns: 320px; column-gap: 32px; } .columns tr { break-inside: avoid; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--grid);
      padding: 4px 12px; margin: 4px 0 12px; font-size: 0.9em; }
"""

escape = html.escape


def duration(seconds):
    s = round(seconds)
    return f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}" if s >= 3600 else f"{s // 60}:{s % 60:02}"


def loss_charts(run):
    loss = [s["loss"] for s in run.steps]
    calm = [None if s.get("spike") else s["loss"] for s in run.steps]
    high = max(finite(calm + [v for _, v in run.vals]), default=1)
    longest = run.steps[-1]["total_s"]
    unit, divisor = next(u for u in (("h", 3600), ("min", 60), ("s", 1))
                         if longest >= 3 * u[1] or u[1] == 1)
    out = []
    for title, key, label, scale in (
            ("Loss by tokens", "total_tokens", "real tokens", 1),
            ("Loss by time", "total_s", f"training time, {unit}", divisor)):
        x = [s[key] / scale for s in run.steps]
        val_x, val_loss = vals_by(run, key)
        lines = [("faint", "each step", x, loss), ("one", "smoothed", x, smooth(calm)),
                 ("two dots", "validation", [v / scale for v in val_x], val_loss)]
        marks = [(at, "\u00d7" if s.get("skipped") else "\u25be") for at, s in zip(x, run.steps)
                 if s.get("skipped") or s.get("spike")]
        note = "\u00d7 skipped, \u25be spike; higher losses are cut" if marks else ""
        out.append(chart(title, note, label, lines if val_x else lines[:2], high=high, marks=marks))
    return out


def step_charts(run):
    x = [s["step"] for s in run.steps]
    speed = [s["tokens_per_s"] for s in run.steps]
    fill = [100 * s["fill"] for s in run.steps]
    pairs = [100 * s["attention_pairs"] / s["padded_pairs"] for s in run.steps]
    out = [chart("Throughput", "real tokens/s", "step",
                 [("faint", "each step", x, speed), ("one", "smoothed", x, smooth(speed))], low=0),
           chart("Fill", "", "step",
                 [("one", "% of the buffer filled", x, smooth(fill)),
                  ("two", "attention pairs, % of padded rows", x, smooth(pairs))], 0, 100)]
    if any("imbalance_measured" in s for s in run.steps):
        lines = [(kind, name, x, [s.get(f"imbalance_{name}") for s in run.steps])
                 for kind, name in (("one", "measured"), ("two", "planned"))]
        out.append(chart("Busiest rank / mean of the ranks",
                         "1 is even; the others wait for the busiest.", "step",
                         [(*line, smooth(y)) for *line, y in lines if finite(y)], low=1))
    return out


MAX_DOCS = 2_000_000


def index_files(train):
    """The .idx of --train: directories, files and patterns, separated by commas."""
    out = []
    for part in (train or "").split(","):
        patterns = [part]
        if os.path.isdir(part):
            patterns = [os.path.join(glob.escape(part), p)
                        for p in ("train_*.bin", "*_train_*.bin")]
        found = next((f for p in patterns if (f := sorted(glob.glob(p)))), [])
        out += [f[:-4] + ".idx" for f in found if os.path.isfile(f[:-4] + ".idx")]
    return out


def document_lengths(paths):
    """Of the first MAX_DOCS documents. Bins of [documents, tokens], by the length's bit_length."""
    bins, left = {}, MAX_DOCS
    for path in paths:
        with open(path, "rb") as file:
            magic, version, _, count = struct.unpack("<8sIIQ", file.read(24))
            if magic != b"UNPADIDX" or version not in (1, 2):
                raise ValueError(f"{path} is not an index of version 1 or 2")
            file.seek(40 if version == 2 else 32)
            ends, start = array.array("Q"), 0
            ends.fromfile(file, min(count, left))
        if sys.byteorder == "big":
            ends.byteswap()
        left -= len(ends)
        for end in ends:
            bin_ = bins.setdefault((end - start).bit_length(), [0, 0])
            bin_[0] += 1
            bin_[1] += end - start
            start = end
    return bins


def length_chart(run):
    train, longest = (run.start.get("options", {}).get(k) for k in ("train", "max-seqlen"))
    own = os.path.join(os.path.dirname(run.path), os.path.basename(train or ""))  # tokens of texts
    try:
        bins = document_lengths(index_files(train) or index_files(own))
    except (OSError, ValueError, EOFError, struct.error) as e:
        return no_chart("Document lengths", f"{e}.")
    bins.pop(0, None)           # empty ones are skipped in training too
    if not bins:
        return no_chart("Document lengths", f"No .idx file of --train {train} is here: run "
                        "report.py where the run was started.")
    count, total = (sum(b[i] for b in bins.values()) for i in (0, 1))
    lengths = [2 ** (k - 1) for k in range(min(bins), max(bins) + 1)]
    shares = [[100 * bins.get(n.bit_length(), (0, 0))[i] / all_ for n in lengths]
              for i, all_ in ((0, count), (1, total))]
    first = "The first " if count >= MAX_DOCS else ""
    return histogram("Document lengths", f"{first}{count:,} documents, mean "
                     f"{total / count:.0f} tokens; --max-seqlen {longest}",
                     "tokens in a document, from",
                     [f"{n >> 10}k" if n >= 1024 else str(n) for n in lengths],
                     [("% of documents", shares[0]), ("% of tokens", shares[1])])


# ------------------------------------------------------------------------------------------------
# Tables and text

def table(rows):
    cells = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in rows)
    return f"<table>{cells}</table>\n"


def number(value):
    return "not finite" if value is None else f"{value:.4f}"


def summary(run):
    last, start = run.steps[-1], run.start
    most = start.get("options", {}).get("steps", "?")
    speeds = sorted(s["tokens_per_s"] for s in run.steps)
    rows = [("steps", f"{last['step']} of {most}" + ("" if last["step"] == most else " so far")),
            ("loss of the last step", number(last["loss"]))]
    if run.vals:
        best = min(run.vals, key=lambda v: math.inf if v[1] is None else v[1])
        rows.append(("validation loss", f"{number(run.vals[-1][1])} after step {run.vals[-1][0]}, "
                     f"lowest {number(best[1])} after step {best[0]}"))
    rows += [("real tokens", f"{last['total_tokens']:,}"),
             ("training time", f"{duration(last['total_s'])}, without validation, samples, saving"),
             ("real tokens/s", f"{speeds[len(speeds) // 2]:.0f} (median)"),
             ("fill", f"{100 * sum(s['fill'] for s in run.steps) / len(run.steps):.1f} % (mean)"),
             ("parameters", f"{start.get('parameters', 0):,}"),
             ("trained by", f"unpad.c {start.get('version', '?')} on {start.get('device', '?')}")]
    if run.resumes:
        rows.append(("resumed after step", ", ".join(map(str, run.resumes))))
    if run.bad:
        rows.append(("lines that are no records", ", ".join(map(str, run.bad[:20]))))
    for name, data in (start.get("data") or {}).items():
        if data:
            rows.append((f"{name} data", ", ".join(f"{k.replace('_', ' ')} {v:,}"
                                                   for k, v in data.items() if v)))
    return table(rows)


def step_times(run):
    def median(values):
        return sorted(values)[len(values) // 2]

    ms = [s["ms"] for s in run.steps]
    rows = [("step", f"{median(ms):.1f} ms, longest {max(ms):.1f} ms")]
    timed = [s for s in run.steps if "passes_ms" in s]
    for name, part in (("waiting for data", lambda s: s["read_ms"]),
                       ("forward and backward", lambda s: s["passes_ms"]),
                       ("gradient exchange, update, the rest",
                        lambda s: s["ms"] - s["read_ms"] - s["passes_ms"])):
        if timed:
            share = 100 * sum(map(part, timed)) / sum(s["ms"] for s in timed)
            rows.append((name, f"{median([part(s) for s in timed]):.1f} ms, {share:.2f} % of all"))
    return table(rows)


def options_table(options):
    words = {True: "on", False: "off", None: "none"}
    return table((k, words[v] if v is None or isinstance(v, bool) else v)
                 for k, v in options.items())


def unusual_steps(run):
    rows = [(f"step {s['step']}", ("SKIPPED" if s.get("skipped") else "SPIKE")
             + f": loss {number(s['loss'])}, gradient norm {number(s['grad_norm'])}")
            for s in run.steps if s.get("skipped") or s.get("spike")]
    if not rows:
        return ""
    more = f"<p class=muted>The last 20 of {len(rows)}.</p>" if len(rows) > 20 else ""
    return f"<h2>Skipped steps and spikes</h2>{more}{table(rows[-20:])}"


def samples(run):
    if not run.samples:
        return "<p class=muted>None in the log: see --num-samples and --sample-every.</p>"
    rounds = ["".join(f"<pre>{escape(s['text'])}</pre>" for _, s in sorted(r.items()))
              for r in run.samples]
    steps = [next(iter(r.values()))["step"] for r in run.samples]
    older = "".join(f"<details><summary>after step {step}</summary>{r}</details>"
                    for step, r in list(zip(steps, rounds))[-2::-1])
    return f"<p class=muted>After step {steps[-1]}</p>{rounds[-1]}{older}"


def page(run):
    options = run.start.get("options", {})
    charts = "".join(loss_charts(run) + step_charts(run) + [length_chart(run)])
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(names_of([run])[0])}</title><style>{STYLE}</style></head><body>
<h1>{escape(names_of([run])[0])}: {escape(title_of(run.start))}</h1>
{summary(run)}
<h2>Training</h2><div class="grid">{charts}</div>
<h2>Where a step's time goes</h2>
{step_times(run)}
<p class="muted">A profiler shows more: perf record -g ./train_llama ... on a CPU, nsys profile
./train_llama ... on a GPU.</p>
{unusual_steps(run)}
<h2>Samples</h2>{samples(run)}
<h2>Options</h2><div class="columns">{options_table(options)}</div>
</body></html>
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the --out directory of a run, or its log.jsonl")
    parser.add_argument("--out", help="the page (default: report.html next to the log)")
    args = parser.parse_args()
    run = read_log(log_path(args.run))
    out = args.out or os.path.join(os.path.dirname(run.path) or ".", "report.html")
    try:
        with open(out + ".tmp", "w", encoding="utf-8") as file:
            file.write(page(run))
        os.replace(out + ".tmp", out)
    except OSError as e:
        fail(4, f"{out}: cannot write: {e.strerror}", "give --out FILE.html in another directory")
    print(f"wrote {out}: {len(run.steps)} steps")


if __name__ == "__main__":
    main()
