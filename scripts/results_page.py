#!/usr/bin/env python3
"""Writes the results section of README.md, and its two charts, from the files in dev/results alone.

usage: results_page.py [--check]        --check: write nothing, fail if README.md would change

The newest file of a kind counts:
  cpu-peers-DATE.txt                    make bench-peers: steps of ours, PyTorch, transformers
  training-BACKEND-DATE.csv             dev/training.py --record
  {repad,independence,scores,scores-demo}-BACKEND-DATE.txt      scripts/reproduce_*.sh --record
  scaling-BACKEND-DATE.csv              dev/scaling.py --record
  peers.md                              what others cannot do, written by hand
What has no file is listed as not measured.
"""
import argparse
import csv
import os
import pathlib
import re
import sys

from report_charts import short, text, ticks

ROOT = pathlib.Path(os.environ.get("PAGE_ROOT", pathlib.Path(__file__).resolve().parent.parent))
RESULTS = ROOT / "dev/results"
BEGIN = "<!-- scripts/results_page.py writes from here, out of dev/results -->\n"
END = "<!-- to here -->\n"
BACKENDS = ("cpu", "cuda")


def newest(pattern):
    """The newest of dev/results/pattern, or in a folder there, whose name ends with a date, or None"""
    found = sorted(RESULTS.rglob(pattern), key=lambda p: p.stem[-10:])
    return found[-1] if found else None


def link(path):
    return f"[{path.name}]({path.relative_to(ROOT)})"


# -------------------------------------------------------------------------------------------------
# What the files say

MODES = {"ours": "unpad.c packed", "padded": "PyTorch padded", "alone": "PyTorch alone",
         "packed": "PyTorch packed", "hf": "transformers padded", "hf-flat": "transformers flattened"}


class Peers:
    """A file of dev/peers/cpu_table.sh. rates: {(shape, threads): {(dtype, label): tokens/s}};
    best: {(shape, threads): (label of the best peer, ours / its speed)}, fp32; documents of the first
    shape; what cannot run; peaks: {(threads, set): fraction of the peak that a step reaches}"""

    def __init__(self, path):
        content = path.read_text()
        self.rates, self.best, self.peaks = {}, {}, {}
        self.cannot = list(dict.fromkeys(re.findall(r"^(.*) cannot .* here: ", content, re.M)))
        self.in_c = re.findall(r"^ours ([\d.]+ times the .*)$", content, re.M)
        self.head = dict(re.findall(r"^(date|cpu) +(.*)", content, re.M))
        layouts = {}
        for block in content.split("\n== ")[1:]:
            of_ours = re.match(r"layouts of unpad.c, (\w+)", block)
            if of_ours:
                layouts[of_ours[1]] = dict(re.findall(
                    r"^(packed|padded|repad) +[\d.]+ +(\d+)", block, re.M))
            else:
                self.read_shape(block)
        self.first = next(iter(self.rates))
        self.documents = re.search(r", documents \[(.*)\]", content)[1]
        of = self.rates[self.first]
        for dtype, rates in layouts.items():      # measured apart: their ratio to packed counts
            for layout in sorted(rates.keys() - {"packed"}):
                of[dtype, f"unpad.c {layout}"] = of[dtype, MODES["ours"]] * \
                    float(rates[layout]) / float(rates["packed"])
        for model, threads, kind, share in re.findall(
                r"^(\S+), .* (\d+) threads, matmul (\S+) .*\n(?:.*\n)*?step(?: +\S+){4} +(\S+)",
                content, re.M):
            self.peaks[int(threads), kind] = float(share)

    def read_shape(self, block):
        title = re.match(r"(.*), (\d+) thread", block)
        key = title[1], int(title[2])
        if key in self.rates:
            sys.exit(f"error: {key} is measured twice in one file")
        of = self.rates[key] = {}
        for dtype, mode, compiled, rate in re.findall(
                r"^(fp32|bf16) +([\w-]+)(?: \d+ x \d+)?( compiled)? +([\d,]+) +\[", block, re.M):
            of[dtype, MODES[mode] + compiled] = float(rate.replace(",", ""))
        said = re.search(r"^fp32: ours ([\d.]+) times the best, (.*?);", block, re.M)
        name = MODES[said[2].split()[0]] + " compiled" * said[2].endswith("compiled")
        self.best[key] = name, float(said[1])


def scaling(path):
    """The runs of a file of dev/scaling.py: numbers where a field is one"""
    def number(x):
        return float(x) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", x) else x
    with open(path, newline="") as f:
        return [{key: number(x) for key, x in row.items()} for row in csv.DictReader(f)]


def speed_ups(runs):
    """[(distribution, fill of padded rows, padded / packed, full rows / packed)] in step time"""
    times = {(r["lengths"], r["layout"]): r for r in runs if r["sweep"] == "lengths"}
    out = []
    for law in dict.fromkeys(law for law, _ in times):
        packed, rows, padded = (times[law, layout] for layout in ("packed", "rows", "padded"))
        out.append((law, padded["fill"], padded["step_ms"] / packed["step_ms"],
                    rows["step_ms"] * rows["fill"] / packed["step_ms"]))
    return sorted(out, key=lambda x: x[1])


def model_sizes(runs):
    """The sweep over models in words"""
    of = {(r["model"], r["layout"]): r for r in runs if r["sweep"] == "model"}
    return "; ".join(
        f"{model}: packed {of[model, 'packed']['tokens_per_s']:,.0f} tokens/s, "
        f"{of[model, 'padded']['step_ms'] / of[model, 'packed']['step_ms']:.2f}x padded"
        for model in dict.fromkeys(model for model, _ in of))


# -------------------------------------------------------------------------------------------------
# Charts: SVG on white, as GitHub shows images on any background

def svg(width, height, title, parts):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="sans-serif" font-size="12"><title>{title}</title>'
            f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n")


def bars(rates):
    """real tokens/s by mode, one panel a precision, one scale"""
    parts, most, bottom = [], max(rates.values()), 0
    for panel, dtype in enumerate(d for d in ("fp32", "bf16") if any(k[0] == d for k in rates)):
        x = 165 + 400 * panel
        rows = sorted(((v, k[1]) for k, v in rates.items() if k[0] == dtype), reverse=True)
        parts.append(text(x, 20, f"{dtype}, real tokens/s", "start"))
        for i, (rate, label) in enumerate(rows):
            y, colour = 32 + 24 * i, "#1f6feb" if label == "unpad.c packed" else \
                "#8db9f5" if label.startswith("unpad.c") else "#b8b8b8"
            parts += [text(x - 6, y + 13, label, "end"), text(
                x + 185 * rate / most + 5, y + 13, f"{rate:.0f}", "start"),
                f'<rect x="{x}" y="{y}" width="{185 * rate / most:.1f}" height="18" '
                f'fill="{colour}"/>']
            bottom = max(bottom, y + 26)
    return svg(800, bottom, "Training speed in real tokens per second", parts)


def panel(x, title, x_label, box, points=(), lines=()):
    """Axes 300 x 190 at x over box (low_x, high_x, low_y, high_y), with points (px, py, label) and
    lines (SVG attributes, [(px, py)]); what lies above the box is cut"""
    low_x, high_x, low_y, high_y = box

    def px(v):
        return x + 300 * (v - low_x) / (high_x - low_x)

    def py(v):
        return 230 - 190 * (min(v, high_y) - low_y) / (high_y - low_y)
    parts = [text(x, 20, title, "start"), text(x + 300, 264, x_label, "end")]
    for v in ticks(low_y, high_y):
        parts += [f'<path stroke="#ddd" d="M{x} {py(v):.1f}h300"/>',
                  text(x - 6, py(v) + 4, short(v), "end")]
    parts += [text(px(v), 247, short(v)) for v in ticks(low_x, high_x)]
    for style, line in lines:
        path = "L".join(f"{px(a):.1f} {py(b):.1f}" for a, b in line if b <= high_y)
        parts.append(f'<path fill="none" {style} d="M{path}"/>')
    for a, b, label in points:
        parts += [f'<circle cx="{px(a):.1f}" cy="{py(b):.1f}" r="4" fill="#1f6feb"/>',
                  text(px(a) + 6, py(b) - 6, label, "start" if a < high_x * 0.9 else "end")]
    return parts


def scaling_chart(runs):
    """How much faster packed is than padded, by fill; tokens/s by tokens of a micro-batch"""
    ups = speed_ups(runs)
    top = 1.15 * max(up for _, _, up, _ in ups)
    full = ", ".join(law for law, fill, _, _ in ups if fill > 0.999)
    points = [(fill, up, law) for law, fill, up, _ in ups if fill <= 0.999]
    for i, (fill, up, law) in reversed(list(enumerate(points))[1:]):      # one label for neighbours
        if fill - points[i - 1][0] < 0.06 and abs(up - points[i - 1][1]) < 0.06 * top:
            points[i - 1] = points[i - 1][:2] + (f"{points[i - 1][2]}, {law}",)
            points[i] = (fill, up, "")
    points += [(1, up, full if i == 0 else "") for i, up in enumerate(
        sorted((up for _, fill, up, _ in ups if fill > 0.999), reverse=True))]
    dashed = 'stroke="#999" stroke-dasharray="4 3"'
    parts = panel(50, "packed against padded, times as fast (dashed: 1 / fill)",
                  "fill of the padded batch", (0, 1, 0, top), points,
                  [(dashed, [(f / 100, 100 / f) for f in range(max(4, int(100 / top)), 101)])])
    tokens = [(r["tokens"], r["tokens_per_s"]) for r in runs if r["sweep"] == "tokens"]
    parts += panel(450, "tokens/s, packed", "tokens of a micro-batch",
                   (0, max(a for a, _ in tokens), 0, 1.1 * max(b for _, b in tokens)),
                   [(a, b, "") for a, b in tokens], [(dashed, tokens)])
    return svg(800, 275, "Scaling of a packed training step", parts)


COLOURS = {"packed": "#1f6feb", "rows": "#e08a00", "padded": "#808080"}


def training_chart(runs):
    """Validation loss by time and by tokens: {(layout, seed): points}"""
    low = min(p["val_loss"] for points in runs.values() for p in points)
    longest = {x: max(p[x] for points in runs.values() for p in points)
               for x in ("train_s", "tokens")}
    early = [p["val_loss"] for points in runs.values() for p in points
             if p["train_s"] >= 0.04 * longest["train_s"]]
    parts = []
    for x, title, label, of, unit in (
            (50, "validation loss by time", "minutes of training", "train_s", 60),
            (450, "validation loss by tokens", "tokens trained on", "tokens", 1)):
        lines = [(f'stroke="{COLOURS[layout]}" stroke-width="1.5"' + (
                  ' stroke-dasharray="5 2"' if layout == "padded" else ""),
                  [(p[of] / unit, p["val_loss"]) for p in points])
                 for (layout, _), points in sorted(runs.items(), key=lambda r: r[0][0] == "padded")]
        parts += panel(x, title, label, (0, longest[of] / unit, 0.98 * low, max(early)), (), lines)
        for i, (layout, colour) in enumerate(COLOURS.items()):
            parts.append(f'<path stroke="{colour}" stroke-width="2" d="M{x + 220} {46 + 16 * i}h18"/>')
            parts.append(text(x + 244, 50 + 16 * i, layout, "start"))
    return svg(800, 275, "Validation loss of real training, packed, in rows and padded", parts)


# -------------------------------------------------------------------------------------------------
# The section

def speed_section(page, charts, missing):
    path = newest("cpu-peers-????-??-??.txt")
    if not path:
        return missing["cpu"].append("whole steps against PyTorch (`make bench-peers`)")
    file = Peers(path)
    (shape, threads), first = file.first, file.rates[file.first]
    charts["speed.svg"] = bars(first)
    dtypes = [d for d in ("fp32", "bf16") if any(k[0] == d for k in first)]
    names = sorted({label for _, label in first}, key=lambda n: (-first.get((dtypes[0], n), 0), n))
    said = "; ".join(f"{dtype}: " + ", ".join(
        f"{name} {first[dtype, name]:.0f}" for name in names if (dtype, name) in first)
        for dtype in dtypes)
    page += [f"{shape} of {file.documents} tokens, padded to the longest: a whole training step in "
             f"real tokens/s, on {file.head['cpu']}, {threads} threads, {file.head['date']} "
             f"({link(path)}). PyTorch alone runs document by document; compiled means torch.compile "
             "of each layer; unpad.c padded and repad follow from their ratio to packed in `--compare`.",
             "", f"![Real tokens per second. {said}](dev/results/speed.svg)", "",
             "| | " + " | ".join(dtypes) + " |", "|---" * (1 + len(dtypes)) + "|"]
    for name in names:
        cells = [f"{first[d, name]:.0f}" if (d, name) in first else "" for d in dtypes]
        page.append("| " + " | ".join([name, *cells]) + " |")
    page += ["", "fp32, every shape of that file: unpad.c and the fastest peer, alternating step by "
             "step; the last column is the median of the ratios of single steps:", "",
             "| model, documents | threads | unpad.c, tokens/s | best peer, tokens/s | ours / best |",
             "|---|---|---|---|---|"]
    for (shape, threads), (name, ratio) in file.best.items():
        of = file.rates[shape, threads]
        page.append(f"| {shape} | {threads} | {of['fp32', MODES['ours']]:,.0f} | {name} "
                    f"{of['fp32', name]:,.0f} | {ratio:.2f} |")
    said = ", ".join(f"{share:.2f} ({kind}, {threads} thread{'s' * (threads > 1)})"
                     for (threads, kind), share in file.peaks.items())
    if file.in_c:
        page += ["", f"Trainers in C, fp32, in turns too: ours {', '.join(file.in_c)}. llm.c trains its "
                 "own GPT-2 124M, a scale and not a race; llama.cpp trains the demo model."]
    page += ["", f"Of the multiply-add peak that this machine reaches, a whole step takes {said}; the "
             "aim is 0.90.", ""]
    missing["cpu"] += ["speed on arm64, whose kernels are tested under qemu (`make test-arm64`)",
                       "AMX, for which there is no kernel",
                       *(f"{name}, which cannot run there" for name in file.cannot)]


def published_section(page, missing):
    rows = []
    for kind, command in (("repad", "scripts/reproduce_repad.sh --record"),
                          ("independence", "scripts/reproduce_independence.sh --record"),
                          ("scores", "scripts/reproduce_scores.sh --record"),
                          ("scores-demo", "MODEL=demo scripts/reproduce_scores.sh --record")):
        for backend in BACKENDS:
            path = newest(f"{kind}-{backend}-????-??-??.txt")
            if not path:
                if kind != "scores-demo" or backend == "cpu":
                    missing[backend].append(f"{kind} (`{command}`)")
                continue
            content = path.read_text()
            said = [re.findall(rf"^{word} +(.*)", content, re.M)
                    for word in ("published", "ours", "differs")]
            rows += [f"| {' | '.join(cells)} | {link(path)} |" for cells in zip(*said)]
    if rows:
        page += ["Published figures, and the same measured here:", "",
                 "| published | ours | what differs | file |", "|---|---|---|---|", *rows, ""]


def scaling_section(page, charts, missing):
    paths = [newest(f"scaling-{backend}-????-??-??.csv") for backend in BACKENDS]
    for backend, path in zip(BACKENDS, paths):
        if not path:
            missing[backend].append("scaling (`dev/scaling.py --record`)")
    path = paths[1] or paths[0]
    if not path:
        return
    runs = scaling(path)
    charts["scaling.svg"] = scaling_chart(runs)
    ups = speed_ups(runs)
    said = ", ".join(f"{law} documents fill {100 * fill:.0f} %: {up:.2f}x" for law, fill, up, _ in ups)
    full = [(law, up) for law, fill, up, _ in ups if fill > 0.999]
    over = max(abs(r["peak_mib"] / r["planned_mib"] - 1) for r in runs)
    page += [f"Packed against padded by document lengths, and speed by micro-batch ({link(path)}):", "",
             f"![Packed against padded. {said}](dev/results/scaling.svg)", "",
             "**Where packing stops paying**: it removes padding, so it gains about 1 / fill, and more "
             "where attention over padding is a large part. Where every row is full there is nothing "
             "to gain: "
             + ", ".join(f"{law} documents {up:.2f}x" for law, up in full)
             + " (the layouts ran one after another: under 10 % is noise). Against full rows of "
             "concatenated documents, of 2048 tokens or more, it saves the "
             "attention across documents: "
             + ", ".join(f"{law} {rows:.2f}x" for law, _, _, rows in ups)
             + f". By model, chats: {model_sizes(runs)}. Peak memory was within {100 * over:.1f} % of "
             "the plan in every run.", ""]


def training_section(page, charts, missing):
    path = newest("training-cuda-????-??-??.csv") or newest("training-cpu-????-??-??.csv")
    for backend in BACKENDS:
        if not newest(f"training-{backend}-????-??-??.csv"):
            missing[backend].append("real training (`dev/training.py --record`)")
    if not path:
        return
    runs = {}
    for point in scaling(path):
        runs.setdefault((point["layout"], int(point["seed"])), []).append(point)
    charts["training.svg"] = training_chart(runs)
    last = {layout: [points[-1] for (name, _), points in runs.items() if name == layout]
            for layout in COLOURS}
    minutes = max(p["train_s"] for points in runs.values() for p in points) / 60
    said = "; ".join(f"{layout}: " + " and ".join(f"{p['val_loss']:.3f}" for p in last[layout])
                     for layout in last)
    record = path.with_suffix(".txt")
    ours = re.search(r"^ours +(.*)", record.read_text(), re.M) if record.exists() else None
    page += [f"The same text, {minutes:.0f} minutes each, validated document by document; every step "
             f"holds the same documents in every layout ({link(record)}, {link(path)}; a line a seed):",
             "", f"![Validation loss after {minutes:.0f} minutes. {said}](dev/results/training.svg)", ""]
    if ours:
        page += [ours[1][0].upper() + ours[1][1:] + ".", ""]


def section():
    """The text between the marks, and {name: SVG}"""
    page, charts, missing = [], {}, {backend: [] for backend in BACKENDS}
    parts = [part for part in ("build", "selfcheck", "kernels", "runs", "sanitizer", "bench", "peers",
                               "pretrain") if not list(RESULTS.glob(f"gpu-????-??-??/{part}.txt"))]
    if parts:
        missing["cuda"].append(f"{', '.join(parts)} (`make gpu-day`)")
    speed_section(page, charts, missing)
    published_section(page, missing)
    scaling_section(page, charts, missing)
    training_section(page, charts, missing)
    limits = RESULTS / "peers.md"
    if limits.exists():
        page += [f"What others cannot do, as read in their sources in 2026 ({link(limits)}):", "",
                 *limits.read_text().splitlines(), ""]
    page += [f"- Not measured yet on {where}: {', '.join(missing[backend])}."
             for backend, where in (("cpu", "the CPU"), ("cuda", "a GPU")) if missing[backend]]
    page += ["- Not measured on any machine: what metadata waits in every layer cost others; "
             "training for days in each layout.", "",
             "`make results` measures all of it again and rewrites this section; "
             "[dev/SPEED.md](dev/SPEED.md) lists what was tried.", ""]
    return "\n".join(page), charts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"error: {readme.name}: expected the lines {BEGIN.strip()} and {END.strip()}")
    content, charts = section()
    files = {readme: before + BEGIN + content + END + after,
             **{RESULTS / name: chart for name, chart in charts.items()}}
    changed = [path for path, new in files.items() if not path.exists() or path.read_text() != new]
    for path in changed:
        if not check:
            path.write_text(files[path])
            print(f"wrote {path.name}")
    if check and changed:
        sys.exit("error: not what dev/results says: " + ", ".join(p.name for p in changed)
                 + "\nhint: scripts/results_page.py")


main()
