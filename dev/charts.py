#!/usr/bin/env python3
"""Draws dev/results/{speed,scaling,training,muon}.svg from the newest files of measurements beside them.

    dev/charts.py
"""
import csv
import pathlib
import re
import sys
from html import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "dev" / "results"
sys.path.insert(0, str(ROOT / "scripts"))
from report import HEIGHT, SVG_STYLE, WIDTH, chart_svg, svg_text  # noqa: E402

STYLE = SVG_STYLE + """.title { font-size: 15px; font-weight: 600; fill: var(--text); }
.label, .value { fill: var(--text); font-size: 12.5px; } .ours { fill: var(--c0); }
.own { fill: var(--c0); opacity: 0.45; } .other { fill: var(--muted); opacity: 0.55; }
"""
NAMES = {"ours": "unpad.c packed", "hf-flat": "transformers, flattened", "hf": "transformers, padded",
         "alone": "PyTorch, one by one", "packed": "PyTorch, packed",
         "packed compiled": "PyTorch, packed, compiled", "padded": "PyTorch, padded",
         "padded compiled": "PyTorch, padded, compiled"}
LENGTHS = {"short": "short texts", "chat": "chats", "r65": "web pages", "seed": "a small mix",
           "long": "long texts", "equal": "equal lengths", "giant": "one document"}


def write(name, width, height, title, subtitle, parts):
    text = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
            f"<title>{escape(title)}</title><style>{STYLE}</style>"
            f'<rect width="{width}" height="{height}" rx="8" style="fill: var(--back)"/>'
            f'<text class="title" x="16" y="26">{escape(title)}</text>'
            f"{svg_text(16, 44, subtitle, 'start')}{''.join(parts)}</svg>\n")
    (RESULTS / name).write_text(text)
    print(f"wrote dev/results/{name}")


def newest(pattern):
    path = sorted(RESULTS.glob(pattern))[-1]
    return path.read_text(), re.search(r"\d{4}-\d\d-\d\d", path.name)[0]


def bars(rows, columns, width, top):
    """rows: (label, class, value of each column); columns: (heading, format)"""
    left, out = 205, []
    each = (width - left - 16) / len(columns)
    for k, (heading, form) in enumerate(columns):
        most = max(values[k] for _, _, values in rows)
        out.append(svg_text(left + k * each, top - 6, heading, "start"))
        for i, (_, kind, values) in enumerate(rows):
            size, y = values[k] / most * (each - 62), top + 24 * i
            out.append(f'<rect class="{kind}" x="{left + k * each:.1f}" y="{y}" width="{size:.1f}" '
                       'height="17"/>')
            out.append(f'<text class="value" x="{left + k * each + size + 6:.1f}" y="{y + 13}">'
                       f"{form.format(values[k])}</text>")
    return out + [f'<text class="label" x="{left - 8}" y="{top + 24 * i + 13}" text-anchor="end">'
                  f"{escape(label)}</text>" for i, (label, _, _) in enumerate(rows)]


def speed():
    text, date = newest("cpu-peers-*.txt")
    part = text.split("== SmolLM2-135M, six documents, 2 thread(s)")[1].split("\n== SmolLM2-135M, ")[0]
    rates = {}
    for dtype, mode, rate in re.findall(r"^(fp32|bf16)  (.+?) {2,}(\d+)  \[", part, re.M):
        rates.setdefault(NAMES[re.sub(r" \d+ x \d+", "", mode)], {})[dtype] = float(rate)
    for dtype in ("fp32", "bf16"):      # other layouts: by their ratio to packed in one run
        table = part.split(f"== layouts of unpad.c, {dtype}")[1].split("==")[0]
        own = {name: float(rate) for name, rate in re.findall(r"^(\w+) +[\d.]+ +(\d+) ", table, re.M)}
        for layout, label in (("rows", "unpad.c rows *"), ("repad", "unpad.c repad **"),
                              ("padded", "unpad.c padded")):
            rates.setdefault(label, {})[dtype] = \
                own[layout] / own["packed"] * rates[NAMES["ours"]][dtype]
    rows = [(name, "ours" if name == NAMES["ours"] else "own" if name.startswith("unpad") else "other",
             [by["fp32"], by["bf16"]]) for name, by in rates.items()]
    rows.sort(key=lambda row: ("rows" in row[0], -row[2][0]))     # rows, with its other loss, last
    height = 124 + 24 * len(rows)
    foot = ("* documents cut and joined to full rows: attention crosses them, another objective",
            "** padded between layers, gathered around attention in each; as with an attention mask")
    write("speed.svg", 800, height, "Training SmolLM2-135M on a CPU: real tokens per second",
          f"six documents of 130 to 350 tokens, whole steps, AMD EPYC, 2 cores, {date}",
          bars(rows, [("fp32", "{:.0f}"), ("bf16", "{:.0f}")], 800, 84)
          + [svg_text(16, height - 28 + 16 * i, line, "start") for i, line in enumerate(foot)])


def scaling():
    text, date = newest("scaling-cpu-*.csv")
    runs = {(r["lengths"], r["layout"]): r for r in csv.DictReader(text.splitlines())
            if r["sweep"] == "lengths"}
    rows = []
    for key, name in LENGTHS.items():
        packed, padded, rows_ = (runs[key, layout] for layout in ("packed", "padded", "rows"))
        count, tokens = int(packed["documents"]), int(packed["tokens"])
        rows.append((f"{name}: {count}, mean {tokens / count:,.0f}", "ours", [
            float(padded["step_ms"]) / float(packed["step_ms"]), 100 * float(padded["fill"]),
            float(rows_["step_ms"]) * float(rows_["fill"]) / float(packed["step_ms"])]))
    rows.sort(key=lambda row: -row[2][0])
    write("scaling.svg", 800, 92 + 24 * len(rows), "How many times faster than padded, by document length",
          "built-in demo model, fp32, about 8,192 tokens a step (documents, their mean length), "
          f"AMD EPYC, 2 cores, {date}",
          bars(rows, [("padded / packed, time", "{:.2f}"), ("padded rows' fill", "{:.0f} %"),
                      ("full rows / packed, time", "{:.2f}")], 800, 84))


def curves(name, pattern, x, x_label, choose, title, subtitle, low, high):
    """Validation losses, solid and dashed for two seeds; choose: (label, which rows) of each colour"""
    text, date = newest(pattern)
    rows = list(csv.DictReader(text.splitlines()))
    lines, parts = [], []
    for i, (label, chosen) in enumerate(choose(rows)):
        for seed, kind in (("1", ""), ("2", "dashed")):
            points = [(x(r), float(r["val_loss"])) for r in chosen if r["seed"] == seed]
            lines.append((f"c{i} {kind}", "", points))
        parts += [f'<path class="line c{i}" d="M{16 + 170 * i} 62h20"/>',
                  svg_text(42 + 170 * i, 66, label, "start")]
    svg, _ = chart_svg(x_label, [line for line in lines if line[2]], low, high)
    inner = svg.replace("<svg ", f'<svg x="6" y="74" width="{1.3 * WIDTH}" height="{1.3 * HEIGHT}" ', 1)
    write(name, 800, 384, title, subtitle.format(date), parts + [inner])


def training():
    curves("training.svg", "training-cpu-*.csv", lambda r: float(r["train_s"]) / 60, "minutes of training",
           lambda rows: [(k, [r for r in rows if r["layout"] == k]) for k in ("packed", "rows", "padded")],
           "Validation loss on the same text at equal time", "built-in demo model, functions of Python's "
           "library, lr 2e-3, AMD EPYC, 2 cores, {}; solid and dashed: two seeds", 0.9, 2.2)


def best_rates(rows):
    """Of each optimizer the runs with the learning rate that ends lowest"""
    last = max(int(r["step"]) for r in rows)
    for kind, label in (("adamw", "AdamW"), ("muon", "Muon")):
        ends = {}
        for r in rows:
            if r["optimizer"] == kind and int(r["step"]) == last:
                ends[r["lr"]] = ends.get(r["lr"], 0) + float(r["val_loss"])
        lr = min(ends, key=ends.get)
        yield f"{label}, lr {lr}", [r for r in rows if (r["optimizer"], r["lr"]) == (kind, lr)]


def muon():
    curves("muon.svg", "muon-long-cpu-*.csv", lambda r: int(r["tokens"]) / 1e6, "million tokens", best_rates,
           "Validation loss on the same tokens", "demo model, Python's library, best "
           "of three learning rates, CPU, {}; solid, dashed: two seeds", 0.8, 2.1)


speed(), scaling(), training(), muon()
