#!/usr/bin/env python3
"""Draws dev/results/*.svg from the newest files of measurements beside them (pip install matplotlib).

    dev/charts.py
"""
import csv
import pathlib
import re
import zlib

import matplotlib
matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

import figures  # noqa: E402
from bench import parse_compare  # noqa: E402

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
# Colours with enough contrast on white and on black: the background is transparent
TEXT, OURS, OWN, OTHER = "#757e89", "#2b7fd0", "#8fb8e0", "#9aa1a9"
LINES = [OURS, "#d9700f", "#1a9b74"]
pyplot.rcParams.update({
    "svg.hashsalt": "charts", "savefig.transparent": True, "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlesize": 9, "axes.titlelocation": "left", "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color",
                     "ytick.color"), TEXT)})
NAMES = {"ours": "unpad.c packed", "hf-flat": "transformers, flattened", "hf-padded": "transformers, padded",
         "packed": "PyTorch, packed", "padded": "PyTorch, padded"}


def newest(pattern):
    path = sorted(RESULTS.glob(pattern))[-1]
    return path, path.read_text()


def save(name, figure, path, title, subtitle):
    """The subtitle ends with the date in the path of the measurements."""
    date = re.search(r"\d{4}-\d\d-\d\d", str(path))[0]
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, weight="bold")
    figure.text(0.013, 1 - 0.42 / figure.get_figheight(), f"{subtitle}, {date}", va="top")
    figure.savefig(RESULTS / name, metadata={
        "Date": None, "Title": title, "Source": f"{path.name} crc32 {zlib.crc32(path.read_bytes()):08x}"})
    pyplot.close(figure)
    print(f"wrote dev/results/{name}")


def bars(name, path, title, subtitle, rows, columns):
    """rows: (label, colour, value of each column); columns: (heading, format)"""
    height = 0.85 + 0.27 * len(rows)
    figure, [axes] = pyplot.subplots(1, len(columns), sharey=True, squeeze=False, figsize=(8.3, height))
    figure.subplots_adjust(left=0.255, right=0.95, bottom=0.02, top=1 - 0.83 / height, wspace=0.22)
    labels, colours, values = zip(*rows)
    for axis, (heading, form), column in zip(axes, columns, zip(*values)):
        axis.bar_label(axis.barh(range(len(rows)), column, 0.72, color=colours), fmt=form, padding=3)
        axis.set(title=heading, xticks=[], yticks=range(len(rows)), yticklabels=labels)
        axis.tick_params(length=0)
        axis.spines["bottom"].set_visible(False)
    axes[0].invert_yaxis()
    save(name, figure, path, title, subtitle)


def curves(name, path, title, subtitle, x_label, y_range, lines):
    """lines: (label, [(x, validation loss)] of each seed); the labels stand where the lines end, one above
    the other."""
    figure, axis = pyplot.subplots(figsize=(8.3, 4))
    figure.subplots_adjust(left=0.07, right=0.83, bottom=0.12, top=0.84)
    ends = []
    for colour, (label, seeds) in zip(LINES, lines):
        for style, points in zip(("-", "--"), seeds):
            axis.plot(*zip(*points), style, color=colour, linewidth=1.6)
        ends.append((points[-1][1], label, colour))
    least = -1
    for y, label, colour in sorted(ends):
        least = max(y, least + 0.05 * (y_range[1] - y_range[0]))
        axis.text(1.01, least, label, color=colour, va="center", transform=axis.get_yaxis_transform())
    axis.set(xlabel=x_label, ylabel="validation loss, nats a token", ylim=y_range)
    axis.margins(x=0)
    axis.grid(axis="y", alpha=0.3)
    save(name, figure, path, title, subtitle + "; solid and dashed: two seeds")


def speed():
    peers, own = map(figures.outputs("speed").__getitem__, (0, 1))
    rows = [(NAMES[mode.removesuffix(" compiled")] + ", compiled" * mode.endswith("compiled"),
             OURS if mode == "ours" else OTHER, (rate,)) for mode, rate in figures.rates(peers).items()]
    own = parse_compare(own)        # in other turns: by their ratio to packed there
    rows += [(f"unpad.c {layout}", OWN, (figures.rates(peers)["ours"] * own["packed"]["ms"] / own[layout]["ms"],))
             for layout in ("padded", "repad")]
    bars("speed.svg", figures.newest("speed"), "Training SmolLM2-135M on a CPU: real tokens per second",
         "six documents of 130 to 350 tokens, whole steps, fp32, two cores", sorted(rows, key=lambda row: -row[2][0]),
         [("", "%.0f")])


def scaling():
    rows = [(kind, OURS, (t["padded"]["ms"] / t["packed"]["ms"], t["grouped"]["ms"] / t["packed"]["ms"],
                          t["padded"]["padding"]))
            for kind, t in figures.scaling().items()]
    bars("scaling.svg", figures.newest("scaling"), "How many times faster than padded, by kind of documents",
         "built-in demo model, fp32, steps of 16,384 tokens in buffers of 4,096, two cores",
         sorted(rows, key=lambda row: -row[2][0]),
         [("step time, padded / packed", "%.2f"), ("sorted by length / packed", "%.2f"), ("padding in padded rows", "%.0f %%")])


def shared():
    tables = zip(figures.PREFIXES, map(parse_compare, figures.outputs("shared")))
    bars("shared.svg", figures.newest("shared"), "A common beginning computed once: packed / shared",
         "built-in demo model, fp32, 16 documents with 100 tokens of their own after the common ones, two cores",
         [(f"{n:,} common tokens", OURS, tuple(t["packed"][column] / t["shared"][column] for column in ("ms", "computed"))) for n, t in tables],
         [("step time", "%.2f"), ("tokens computed", "%.2f")])


def runs(pattern, key, x, kinds):
    """The file, and of each kind (label, value of `key`) the curves of both seeds. Where runs differ in their
    learning rate, those whose last losses have the lowest sum."""
    path, text = newest(pattern)
    lines = []
    for label, kind in kinds:
        by_rate = {}
        for r in csv.DictReader(text.splitlines()):
            if r[key] == kind:
                by_rate.setdefault(r.get("lr"), {}).setdefault(r["seed"], []).append((x(r), float(r["val_loss"])))
        lr = min(by_rate, key=lambda rate: sum(points[-1][1] for points in by_rate[rate].values()))
        lines.append((f"{label}, lr {lr}" if lr else label, by_rate[lr].values()))
    return path, lines


def training():
    path, lines = runs("training-cpu-*.csv", "layout", lambda r: float(r["train_s"]) / 60,
                       [(kind, kind) for kind in ("packed", "rows", "padded")])
    curves("training.svg", path, "Validation loss on the same text at equal time",
           "built-in demo model, functions of Python's library, lr 2e-3, AMD EPYC, 2 cores",
           "minutes of training", (0.9, 2.2), lines)


def muon():
    path, lines = runs("muon-long-cpu-*.csv", "optimizer", lambda r: int(r["tokens"]) / 1e6,
                       [("AdamW", "adamw"), ("Muon", "muon")])
    curves("muon.svg", path, "Validation loss on the same tokens", "built-in demo model, Python's library, CPU; "
           "the best lr of 2.5e-4, 5e-4, 1e-3 (AdamW) and of 2e-3, 4e-3, 8e-3 (Muon)", "million tokens", (0.8, 2.1), lines)


def moments():
    path, text = newest("moments-cpu-*.txt")
    rows = re.findall(r"^(?:seed \d|      ) +(fp32|bf16) +(.*)$", text.split("--optimizer muon")[0], re.M)
    curves("moments.svg", path, "Validation loss with the optimizer's moments in fp32 and in bf16",
           "built-in demo model, Python's library, lr 1e-3, 3,000 short steps, CPU", "steps", (1.6, 2.6),
           [(kind, [[(300 * i, float(x)) for i, x in enumerate(losses.split())]
                    for other, losses in rows if other == kind]) for kind in ("fp32", "bf16")])


for draw in (speed, scaling, shared, training, muon, moments):
    draw()
