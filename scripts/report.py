#!/usr/bin/env python3
"""Writes report.html for a run, running or finished: one page that needs no network."""
import json
import math
import os
import shlex
import time
from html import escape
from types import SimpleNamespace

from command import BAD_INPUT, Parser, fail, run_main, warn, write

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 230, 46, 8, 10, 34  # of a chart
# Okabe and Ito's colours, which colour-blind readers can tell apart; on light and on dark pages
STYLE = """:root { color-scheme: light dark;
  --c0: #0072b2; --c1: #c24e00; --muted: #57606a; --grid: #d8dee4; }
@media (prefers-color-scheme: dark) {
  :root { --c0: #56b4e9; --c1: #e69f00; --muted: #9ea7b1; --grid: #30363d; } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1240px; margin: 0 auto; padding: 16px;
       overflow-wrap: anywhere; }
figure { margin: 0; min-width: 0; } h3 { font-size: 1em; margin: 0; }
.muted, figcaption { color: var(--muted); font-size: 0.87em; margin: 0.3em 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr));
        gap: 22px 28px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11.5px system-ui, sans-serif; fill: var(--muted); }
.axis { stroke: var(--grid); } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); }
.faint { stroke-width: 1; opacity: 0.3; }
.dots { stroke-width: 6; stroke-linecap: round; } circle { fill: transparent; }
table { border-collapse: collapse; font-size: 0.93em; }
td { padding: 3px 18px 3px 0; vertical-align: top; white-space: pre-wrap; }
td:first-child { color: var(--muted); white-space: nowrap; }
"""


# -------------------------------------------------------------------------------------------------
# The log

def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18


def is_loss(value):  # null: it was not finite
    return value is None or is_number(value)


# The fields that the report reads from each event; step records have none. There may be others.
NUMBERS = "ms lr tokens_per_s real_tokens fill attention_pairs".split()
FIELDS = {**dict.fromkeys(("start", "resume"), {"options": lambda v: isinstance(v, dict)}),
          "val": {"loss": is_loss}, "sample": {"text": lambda v: isinstance(v, str)},
          "None": {"loss": is_loss, "grad_norm": is_loss, **dict.fromkeys(NUMBERS, is_number),
                   "padded_pairs": lambda v: is_number(v) and v}}


def parse_record(line):
    """The record of a line of log.jsonl; None: it is not one."""
    try:
        entry = json.loads(line)
        good = type(entry["step"]) is int and 0 <= entry["step"] < 1e18 and all(
            test(entry.get(name, ()))
            for name, test in FIELDS.get(str(entry.get("event")), {}).items())
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return entry if good else None


def read_log(path):
    """The records of log.jsonl at `path`: steps, vals, samples, start (or the last resume) and
    resumes. Those of a resumed run replace those after the step from which it resumes."""
    records, starts, bad = {}, [], []
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                entry = parse_record(line)
                if entry is None:
                    bad += [number] * line.endswith("\n")  # or it is still being written
                elif entry.get("event") in ("start", "resume"):
                    starts.append(entry)
                    records = {key: r for key, r in records.items() if key[0] <= entry["step"]}
                else:
                    key = entry["step"], str(entry.get("event")), str(entry.get("number"))
                    records[key] = entry
    except OSError as e:
        fail(BAD_INPUT, f"{path}: cannot read: {e.strerror}",
             "give the --out directory of a run, or its log.jsonl")
    steps, vals, samples = ([records[key] for key in sorted(records) if key[1] == event]
                            for event in ("None", "val", "sample"))
    if not steps:
        fail(BAD_INPUT, f"{path}: expected at least one step, found none",
             "let the run finish a step first")
    if bad:
        warn(f"{path}: skipped what is not a record: line "
             + ", ".join(map(str, bad[:5])) + (" and more" if bad[5:] else ""))
    return SimpleNamespace(path=path, steps=steps, vals=vals, samples=samples,
                           start=starts[-1] if starts else {"options": {}},
                           resumes=[s for s in starts if s["event"] == "resume"])


# -------------------------------------------------------------------------------------------------
# Charts

def smooth(values):
    """The mean of a point and of as many before it as after it. None (not finite) is skipped."""
    out, most = [], max(2, min(25, len(values) // 30))
    for i in range(len(values)):
        reach = min(most, i, len(values) - 1 - i)
        near = [y for y in values[i - reach:i + reach + 1] if y is not None]
        out.append(sum(near) / len(near) if near else None)
    return out


def thin(points, most=500):
    """The lowest and the highest (x, y) of each interval, so that peaks stay."""
    size = -(-len(points) // most)
    parts = [[p for p in points[i:i + size] if p[1] is not None]
             for i in range(0, len(points), size)]
    return sorted({f(part, key=lambda p: p[1]) for part in parts if part for f in (min, max)})


def short(value):
    """1500 is 1.5k."""
    sizes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, suffix = next((pair for pair in sizes if abs(value) >= pair[0]), (1, ""))
    return f"{value / size:.4g}{suffix}"


def ticks(low, high):
    """About five round numbers from low to high."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * t for t in (1, 2, 5, 10, 20) if power * t >= (high - low) / 5)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def svg_text(x, y, what, anchor="middle"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'


def chart_svg(lines, low, high, marks=()):
    """Lines (classes, name, [(step, y)]): a colour c0 or c1, perhaps faint or dots. Values outside
    low and high are cut off; marks (step, sign) are drawn at the top. A browser shows the values of
    a named line under the pointer."""
    xs = [x for _, _, points in lines for x, _ in points] or [0]
    x0, x1 = (0 if min(xs) < max(xs) / 2 else min(xs)), max(max(xs), min(xs) + 1)
    pad = 0.04 * (high - low) or 0.04 * abs(high) or 0.5
    low, high = low - pad if low else 0, high + pad
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def px(x):
        return round(LEFT + (x - x0) / (x1 - x0) * (right - LEFT), 1)

    def py(y):  # at most one height away
        return round(bottom - min(max((y - low) / (high - low), -1), 2) * (bottom - TOP), 1)

    svg = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for y in ticks(low, high):
        svg += [f'<path class="axis" d="M{LEFT} {py(y)}H{right}"/>',
                svg_text(LEFT - 6, py(y) + 4, short(y), "end")]
    svg += [svg_text(min(px(x), right - 12), bottom + 16, short(x)) for x in ticks(x0, x1)]
    svg += [svg_text(right, HEIGHT - 3, "step", "end"),
            f'<svg width="{WIDTH}" height="{bottom}" viewBox="0 0 {WIDTH} {bottom}">']
    for kind, name, points in lines:
        points = [(x, y) for x, y in points if y is not None]
        pen = "h0M" if "dots" in kind else "L"
        path = pen.join(f"{px(x)} {py(y)}" for x, y in points) + pen[:-1]
        svg.append(f'<path class="line {kind}" d="M{path}"/>' if points else "")
        svg += [f'<circle cx="{px(x)}" cy="{py(y)}" r="5"><title>step {x}: {escape(name)} '
                f'{short(y)}</title></circle>' for x, y in points if name]
    svg += ["</svg>", *(svg_text(px(x), TOP + 6, sign) for x, sign in marks), "</svg>"]
    return "".join(svg)


def figure(run, title, key, low=None, high=None, note=""):
    """A chart of a key of the steps, smoothed but for the learning rate; the scale leaves out the
    highest twentieth, of the start and of spikes. Validation comes as dots, the loss also with
    unusual steps."""
    points = [(s["step"], s[key] if is_number(s.get(key)) else None) for s in run.steps]
    shown, drawn = sorted(y for _, y in points if y is not None), thin(points)
    lines, marks = [("c0", key, drawn)], ()
    if key != "lr":
        smoothed = zip([x for x, _ in drawn], smooth([y for _, y in drawn]))
        lines = [("c0 faint", "", drawn), ("c0", key, list(smoothed))]
        shown = shown[:len(shown) - len(shown) // 20]
    lines.append(("c1 dots", "validation",
                  [(v["step"], v[key]) for v in run.vals if is_number(v.get(key))]))
    if key == "loss":
        marks = [(s["step"], "\u00d7" if s.get("skipped") else "\u25be") for s in run.steps
                 if s.get("skipped") or s.get("spike")]
    low = min(shown, default=0) if low is None else low
    svg = chart_svg([line for line in lines if line[2]], low,
                    max([*shown, low]) if high is None else high, marks)
    return f"<figure><h3>{title}</h3>{svg}<figcaption>{note}</figcaption></figure>"


def charts(run):
    for s in run.steps:
        s["percent"], s["pairs"] = 100 * s["fill"], 100 * s["attention_pairs"] / s["padded_pairs"]
    wanted = (("Loss", "loss", None, None, "Dots: validation; \u00d7 skipped, \u25be spike"),
              ("Pairs with the larger reward on the chosen answer", "accuracy", 0, 1),
              ("Reward of the chosen answer above the other's", "margin"),
              ("Reward of the chosen answer", "reward_chosen"),
              ("Reward of the rejected answer", "reward_rejected"),
              ("Real tokens/s", "tokens_per_s", 0), ("Gradient norm", "grad_norm", 0),
              ("Learning rate", "lr", 0),
              ("Real tokens, % of the buffer", "percent", 0, 100),
              ("Attention pairs, % of padded rows", "pairs", 0),
              ("Busiest rank / mean", "imbalance_measured", 1, None, "1 is even"))
    return "".join(figure(run, *what) for what in wanted if what[1] in run.steps[-1])


# -------------------------------------------------------------------------------------------------
# The page

def first_to_last(values):
    return " to ".join("not finite" if v is None else f"{v:.3f}" for v in (values[0], values[-1]))


def facts(run):
    losses = [val["loss"] for val in run.vals]
    speeds = sorted(s["tokens_per_s"] for s in run.steps)
    lowest = min([v for v in losses if v is not None], default=math.inf)
    rows, padded, pairs, tokens = (max(1, sum(s.get(key, 0) for s in run.steps)) for key in (
        "padded_tokens", "padded_pairs", "attention_pairs", "real_tokens"))
    rows = f"{rows / tokens:.2f}" if rows > 1 else "unknown"  # in older logs
    return {
        "steps": f"{run.steps[-1]['step']} of {run.start['options'].get('steps', '?')}" + "".join(
            f", resumed after {resume['step']}" for resume in run.resumes[-5:]),
        "loss": first_to_last([s["loss"] for s in run.steps]),
        "validation loss": first_to_last(losses) + f", lowest {lowest:.4f}" if losses else "none",
        "trained": f"{tokens:,} real tokens in {sum(s['ms'] for s in run.steps) / 6e4:.1f} minutes,"
                   f" median {speeds[len(speeds) // 2]:.0f} a second",
        "packing": f"padded rows would have {rows} times the tokens and "
                   f"{padded / pairs:.2f} times the attention pairs",
    }


def table(rows):
    return "<table>" + "".join(f"<tr><td>{escape(key)}</td><td>{escape(text_of(key, value))}</td>"
                               "</tr>" for key, value in rows) + "</table>"


def text_of(key, value):
    if key == "time" and is_number(value):
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(abs(value), 1e11)))
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def page(run):
    title = escape(os.path.basename(os.path.dirname(os.path.abspath(run.path))))
    start = [(k, v) for k, v in run.start.items() if k not in ("event", "step", "options")]
    samples = [(f"after step {s['step']}", s["text"]) for s in run.samples[-3:]]
    return whole_page(title, f"""{table([*facts(run).items(), *start])}
<h2>Training</h2><p class="muted">Faint: each step. Point at a line for its values. A scale may cut
off the start and spikes.</p>
<div class="grid">{charts(run)}</div><h2>Samples</h2>{table(samples)}
<h2>Options</h2>{table(run.start["options"].items())}""")


def whole_page(title, body):
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title}</h1>{body}</body></html>
"""


def main():
    parser = Parser()
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or its log.jsonl")
    parser.add_argument("--out", help="the page (default: report.html next to the log)")
    args = parser.parse_args()
    path = os.path.join(args.run, "log.jsonl") if os.path.isdir(args.run) else args.run
    run = read_log(path)
    out = args.out or os.path.join(os.path.dirname(path), "report.html")
    write(out, [page(run)])
    found = facts(run)
    print(f"wrote {out}: {path}: {len(run.steps)} steps, loss {found['loss']}, validation "
          + found["validation loss"])


if __name__ == "__main__":
    run_main(main)
