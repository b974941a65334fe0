#!/usr/bin/env python3
"""Published results beside ours: three about packing, by --compare and --check-packing, one of Muon.

    dev/reproduce.py repad          LLM-Foundry's 20 % slow-down from unpadding in every layer
    dev/reproduce.py independence   packed sequences against each alone
    dev/reproduce.py scores         64 documents of 512 tokens: fewer attention scores, step time
    dev/reproduce.py muon           AdamW and Muon on the same tokens: three learning rates, seeds

`--model demo` takes minutes; SmolLM2-135M (the default) on two CPU cores up to half an hour and 15
GB of memory. --record writes dev/results/NAME-BACKEND-DATE.txt.
"""
import argparse
import concurrent.futures
import csv
import datetime
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile

from bench import (ROOT, SEED, TRAINER, Record, layout_options, make_lengths, parse_compare, run,
                   shown, spread, write_shard)

FOUNDRY = ("V. Bakshi, blog post of 2025-06-30: LLM-Foundry with Hugging Face's Llama, "
           "SmolLM2-135M, six rows of 2048, cu_seqlens [0,220,437,732,915,1045,1395]")
SYNCS = ("unsloth pull requests 4173 and 4243: building the metadata once a batch instead of once "
         "a layer saves 11.5 % (Llama-3.2-1B) to 14.8 % (Qwen3-0.6B) of a step")
NOTEBOOK = 'notebook "How does FA2 flash_attn_varlen_func handle masks?"'
POST = ("C. McCormick on packing with varlen attention in nanochat: 64 documents of 512 tokens "
        "need 8x fewer attention scores")
RATES = {"adamw": (2.5e-4, 5e-4, 1e-3), "muon": (2e-3, 4e-3, 8e-3)}
MOONLIGHT = "Moonlight, arXiv 2502.16982: Muon needs half of AdamW's FLOPs for the same loss"
SPEEDRUN = ("nanochat pull request 663: d24, T 2048, 8 x H100, fp8, 97.38 minutes instead of 99: "
            "1.8 %")


def compare(say, o, lengths, row_len):
    """--compare, o.repeats times. {layout: its row, with "ms" a list}"""
    with tempfile.TemporaryDirectory() as folder:
        command = [TRAINER, "--model", o.model, "--train", write_shard(folder + "/shard", lengths),
                   "--boundary-token", 0, *layout_options(lengths, row_len), "--compare", o.steps]
        tables = [parse_compare(run(*command)) for _ in range(o.repeats)]
    table = {layout: dict(row, ms=[t[layout]["ms"] for t in tables])
             for layout, row in tables[0].items()}
    say("", f"{len(lengths)} documents, {sum(lengths)} tokens, in rows of {row_len}",
        f"$ {shown(command)}   ({o.repeats} times)",
        f"{'layout':7} {'step ms: median [min-max]':>30} {'/ packed':>9} {'attention pairs':>16} "
        f"{'/ packed':>9} {'loss':>12}")
    for layout, row in table.items():
        say(f"{layout:7} {spread(row['ms']):>30} {ratio(table, layout, 'packed'):8.3f}x "
            f"{row['pairs']:16.0f} {row['pairs'] / table['packed']['pairs']:8.3f}x "
            f"{row['loss']:12.6f}")
    losses = [table[layout]["loss"] for layout in ("packed", "padded", "repad")]
    if max(losses) - min(losses) > 1e-3 * losses[0]:
        sys.exit(f"error: losses of packed, padded and repad: expected the same, found {losses}\n"
                 "hint: a kernel is wrong: --check-packing, make check")
    return table


def ratio(table, a, b):
    return statistics.median(table[a]["ms"]) / statistics.median(table[b]["ms"])


def numbers(say):
    return "fp32 on the CPU" if say.backend == "cpu" else "bf16"


# -------------------------------------------------------------------------------------------------

def repad(say, o):
    table = compare(say, o, [min(n, o.row) for n in SEED], o.row)
    full = compare(say, o, [o.row] * o.full_rows, o.row)
    slower = 100 * (ratio(table, "repad", "padded") - 1)
    say("", "published  unpadding around attention in every layer makes a step 20 % slower than "
            f"padded ({FOUNDRY})",
        f"ours       {o.name}, rows of {o.row}: repad {abs(slower):.1f} % "
        f"{'slower' if slower > 0 else 'faster'} than padded; packed "
        f"{ratio(table, 'padded', 'packed'):.2f}x as fast as padded, "
        f"{ratio(table, 'repad', 'packed'):.2f}x as fast as repad. Where every row is full, repad "
        f"takes {ratio(full, 'repad', 'packed'):.3f} of packed's time",
        "differs    theirs: a GPU, bf16, PyTorch; every layer finds the indices again and waits "
        f"for max_seqlen on the host. ours: {numbers(say)}, indices once a batch and no waits, so that "
        "repad pays for the copies alone, and saves attention over padding")
    say(f"published  {SYNCS}",
        "ours       none: nothing is read back inside a step, and cu_seqlens come with the batch",
        "differs    waits in every layer exist on a GPU only, and unpad.c has no such waits: there "
        "is nothing to measure here")


def check_packing(say, model, lengths):
    """--check-packing on documents of these lengths: the largest differences of losses, logits and
    gradients"""
    with tempfile.TemporaryDirectory() as folder:
        command = [TRAINER, "--model", model, "--train", write_shard(folder + "/shard", lengths),
                   "--boundary-token", 0, "--max-seqlen", max(lengths), "--micro-batch-tokens",
                   sum(lengths), "--check-packing"]
        lines = run(*command).split("\n\n")[-1].splitlines()
    say("", f"$ {shown(command)}", *lines)
    return [float(x) for x in re.findall(r"max \|delta\| of a \S+(?: \S+)? +([\d.e+-]+)",
                                         "\n".join(lines))]


def independence(say, o):
    test = ["build/asan/test_ops", "--filter", "notebook"]
    run("make", "-s", "BACKEND=cpu", test[0])
    say("", "the notebook's own figures, through our attention: within a bf16 rounding step of "
        "what it printed", f"$ {shown(test)}", *run(*test).splitlines())
    check_packing(say, "demo", [5, 3])
    loss, logit, gradient = check_packing(say, o.model, SEED)[:3]
    say("", f"published  the outputs of sequence 2 of two packed ones, 24 values of 4 decimals "
            f"({NOTEBOOK})",
        f"ours       {o.name}: logits differ by {logit:.3g}, losses by {loss:.3g}, gradients by "
        f"{gradient:.3g}, packed against alone",
        "differs    theirs: FlashAttention-2 on a GPU in bf16, attention alone. ours: its figures "
        f"on the CPU in fp32, and whole models, {numbers(say)}, forward and backward")


# -------------------------------------------------------------------------------------------------

def windowed_pairs(n, window):
    """Causal pairs of n tokens of which each sees at most `window`"""
    w = min(n, window)
    return w * (w + 1) // 2 + (n - w) * w


def d24_gain(lengths, short):
    """Per cent of a d24 step's FLOPs that attention inside documents saves over rows of 2048. 24
    layers of width 1536, MLP of 4x, vocabulary of 32768; windows SSSL, the last layer L."""
    width, layers = 1536, 24
    windows = [2048 if i % 4 == 3 else short for i in range(layers)]
    rows, packed = (sum(windowed_pairs(n, w) for w in windows for n in documents)
                    for documents in ([2048] * round(sum(lengths) / 2048), lengths))
    linear = 6 * sum(lengths) * (layers * 12 * width ** 2 + 32768 * width)
    return 100 * 12 * width * (rows - packed) / (linear + 12 * width * rows)


def scores(say, o):
    lengths = [512] * o.docs
    tables = {row: compare(say, o, lengths, row) for row in (2048, 4096)}
    pages = [min(n, 2048) for n in make_lengths("r65")]
    gains = sorted(d24_gain(pages, window) for window in (512, 1024))
    table = tables[4096]
    say("", f"published  {POST}",
        f"ours       rows of 4096 compute {table['rows']['pairs'] / table['packed']['pairs']:.3f}x "
        f"the causal pairs, counted by the program; a step takes "
        f"{ratio(table, 'rows', 'packed'):.2f}x in rows of 4096, "
        f"{ratio(tables[2048], 'padded', 'packed'):.2f}x padded to 2048",
        "differs    8x is the ratio to rows of 8 documents (4096 tokens); to rows of 2048 it is "
        f"4x, to rows of 512 none. Here {o.docs} documents, {o.name}, {numbers(say)}",
        f"published  {SPEEDRUN}",
        f"ours       attention inside documents saves {gains[0]:.1f} to {gains[1]:.1f} % of a d24 "
        "step's FLOPs on web pages (R65): its linear layers are large, three of four layers have "
        "short windows, and its rows were full before, so there is no padding to remove",
        "differs    a count, not a run; the range is that of nanochat's short windows, a quarter "
        "or half of a row. Its time is not its FLOPs: fp8 linear layers raise attention's share")


# -------------------------------------------------------------------------------------------------

def validations(o, optimizer, lr, seed):
    """[(step, tokens, seconds of training, validation loss)] of a run of the demo on data/demo"""
    out = f"out/muon/{optimizer}-{lr}-{seed}"
    if not (o.reuse and (ROOT / out / "final").is_dir()):
        run(TRAINER, "--train", "data/demo", "--out", out, "--overwrite", "--optimizer", optimizer,
            "--lr", lr, "--seed", seed, "--steps", o.train_steps, "--val-every", o.train_steps // 10,
            "--threads", 1, "--micro-batch-tokens", 2048, "--val-tokens", 16384, "--num-samples", 0)
    tokens, ms, points = 0, 0, []
    for event in map(json.loads, open(ROOT / out / "log.jsonl")):
        tokens, ms = tokens + event.get("real_tokens", 0) * ("ms" in event), ms + event.get("ms", 0)
        if event.get("event") == "val":
            points.append((event["step"], tokens, round(ms / 1e3, 1), event["loss"]))
    return points


def muon(say, o):
    rates = {k: v[1:2] if o.best_rates else v for k, v in RATES.items()}
    runs = [(optimizer, lr, seed) for seed in range(1, o.seeds + 1)
            for pair in zip(*rates.values()) for optimizer, lr in zip(rates, pair)]
    with concurrent.futures.ThreadPoolExecutor(o.jobs) as pool:
        curves = dict(zip(runs, pool.map(lambda key: validations(o, *key), runs)))
    say("", f"demo on data/demo, {o.train_steps} steps of at most 2048 tokens, one thread each, {o.jobs} "
        "at a time", "optimizer     lr  seed    tokens  seconds  validation loss, after each tenth")
    for (optimizer, lr, seed), points in curves.items():
        say(f"{optimizer:9} {lr:6g} {seed:5} {points[-1][1]:9} {points[-1][2]:8.0f}  "
            + " ".join(f"{point[3]:.4f}" for point in points))

    def last(optimizer, lr):
        return statistics.mean(curves[optimizer, lr, s][-1][3] for s in range(1, o.seeds + 1))
    best = {k: min(rates[k], key=lambda lr: last(k, lr)) for k in rates}
    adamw, muon_ = (last(k, best[k]) for k in ("adamw", "muon"))
    reached = [next((p[1] / curves["adamw", best["adamw"], s][-1][1] for p in
                     curves["muon", best["muon"], s] if p[3] <= adamw), None)
               for s in range(1, o.seeds + 1)]
    say("", f"published  {MOONLIGHT}",
        f"ours       AdamW ends at {adamw:.4f} with its best --lr {best['adamw']:g}, Muon at {muon_:.4f} "
        f"with {best['muon']:g} (mean of {o.seeds} seeds); share of the tokens after which Muon was "
        "first seen at AdamW's last loss or below: "
        + ", ".join("never" if r is None else f"{r:.2f}" for r in reached))
    path = ROOT / f"dev/results/{say.name}-{say.backend}-{datetime.date.today()}.csv"
    if o.record:
        with open(path, "w", newline="") as f:
            rows = csv.writer(f, lineterminator="\n")
            rows.writerow("optimizer lr seed step tokens train_s val_loss".split())
            rows.writerows([*key, *point] for key, points in curves.items() for point in points)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=["repad", "independence", "scores", "muon"])
    add("--model", help="a directory or a built-in name (default: smollm2-135m; independence: "
                        "models/smollm2-135m-instruct, which scripts/get_model.sh fetches)")
    add("--repeats", type=int, default=3, help="timings of which the median is shown")
    add("--steps", type=int, default=1, help="timed steps of each --compare")
    add("--row", type=int, default=2048, help="repad: row length")
    add("--full-rows", type=int, default=2, help="repad: rows of the filled batch")
    add("--docs", type=int, help="scores: documents (default: 64; 8 for a real model)")
    add("--train-steps", type=int, default=1000, help="muon: of each run")
    add("--seeds", type=int, default=2, help="muon: how many")
    add("--best-rates", action="store_true", help="muon: of three only the best after 500 steps")
    add("--reuse", action="store_true", help="muon: the runs in out/muon that are complete")
    add("--jobs", type=int, default=2, help="muon: runs at a time")
    add("--record", action="store_true", help="write dev/results/NAME-BACKEND-DATE.txt")
    o = parser.parse_args()
    o.model = o.model or ("models/smollm2-135m-instruct" if o.what == "independence" else
                          "smollm2-135m")
    if "/" in o.model and not os.path.isdir(ROOT / o.model):
        sys.exit(f"error: {o.model}: expected a model, found no directory\n"
                 "hint: scripts/get_model.sh smollm2-135m-instruct, or --model demo")
    o.name, o.docs = pathlib.Path(o.model).name, o.docs or (64 if o.model == "demo" else 8)
    say = Record(o.what + "-demo" * (o.model == "demo") + "-long" * o.best_rates)
    {"repad": repad, "independence": independence, "scores": scores, "muon": muon}[o.what](say, o)
    if o.record:
        say.write()


if __name__ == "__main__":
    main()
