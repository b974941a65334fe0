#!/usr/bin/env python3
"""The three published results, beside ours: scripts/reproduce_{repad,independence,scores}.sh.

    dev/reproduce.py repad         LLM-Foundry's 20 % slow-down from unpadding in every layer
    dev/reproduce.py independence  packed sequences against each alone
    dev/reproduce.py scores        64 documents of 512 tokens: fewer attention scores, and step time

The same options on every backend. --record writes dev/results/NAME-BACKEND-DATE.txt.
"""
import argparse
import os
import pathlib
import re
import statistics
import sys

import measure
from measure import ROOT, SEED_BATCH, TRAINER, Record, run, spread


def ratio(a, b):
    return statistics.median(a) / statistics.median(b)


# -------------------------------------------------------------------------------------------------
# repad

FOUNDRY = ("V. Bakshi, blog post of 2025-06-30: LLM-Foundry with Hugging Face's Llama, "
           "SmolLM2-135M, six rows of 2048, cu_seqlens [0,220,437,732,915,1045,1395]")
SYNCS = ("unsloth pull requests 4173 and 4243: building the metadata once a batch instead of once "
         "a layer saves 11.5 % (Llama-3.2-1B) to 14.8 % (Qwen3-0.6B) of a step")


def layouts_table(say, title, lengths, o):
    """Runs --compare o.repeats times. {layout: [ms]} and the model's shape"""
    ms, real, rows = {}, sum(lengths), len(lengths) * o.row
    for _ in range(o.repeats):
        table, shape, command = measure.compare(o.model, lengths, o.row, o.steps)
        for layout, row in table.items():
            ms.setdefault(layout, []).append(row["ms"])
    say("", f"{title}: {real} real tokens in {rows} ({100 * real / rows:.1f} % full)",
        f"$ {command}   ({o.repeats} times)",
        "layout    step ms: median [min-max]   / padded   attention pairs        loss")
    for layout in ("padded", "repad", "packed"):
        say(f"{layout:7} {spread(ms[layout]):>29}   {ratio(ms[layout], ms['padded']):7.3f}x"
            f" {table[layout]['pairs']:17.0f}  {table[layout]['loss']:10.6f}")
    losses = [table[layout]["loss"] for layout in ("padded", "repad", "packed")]
    if max(losses) - min(losses) > 1e-3 * abs(losses[0]):
        print(f"error: losses of padded, repad and packed: expected the same, found {losses}\n"
              "hint: a kernel is wrong: --check-packing, make check", file=sys.stderr)
        sys.exit(11)
    return ms, shape


def copies(say, lengths, shape, o):
    """Times of gather and scatter alone. Milliseconds of a whole step"""
    q = shape["heads"] * shape["head_dim"]
    qkv = q + 2 * shape["kv_heads"] * shape["head_dim"]
    layers = shape["layers"]
    beside = pathlib.Path(TRAINER).with_name("bench_repad")     # a build's own directory
    program = beside if beside.exists() else pathlib.Path(f"build/{o.backend}/bench_repad")
    text = run(program, o.row, qkv, q, layers, max(3, o.repeats), *lengths)
    total, parts = 0, []
    for name, median, low, high in re.findall(
            r"(\w+) +\d+ layers: median ([\d.]+) ms \[([\d.]+)-([\d.]+)\]", text):
        total += float(median)
        parts.append(f"{name} {float(median) / layers:.3f} ms a layer, {median} "
                     f"[{low}-{high}] ms in all {layers}")
    say(f"gather and scatter alone ({measure.shown([program])}):", *("  " + part for part in parts))
    return total


def repad_answers(say, o, lengths, shape, ms, shares):
    """The published figures, ours, and what differs. shares: per cent of a step that gather and
    scatter take, in the published batch and in a filled one"""
    tokens = len(lengths) * o.row
    padded = measure.step_flops(shape, tokens, tokens * (o.row + 1) // 2)
    attention = 100 * (1 - measure.step_flops(shape, tokens, 0) / padded)
    slower = 100 * (ratio(ms["repad"], ms["padded"]) - 1)
    say("", "published  unpadding around attention in every layer makes a step 20 % slower than "
            f"padded ({FOUNDRY})",
        f"ours       {o.name}, rows of {o.row}: repad {abs(slower):.1f} % "
        f"{'slower' if slower > 0 else 'faster'} than padded; packed "
        f"{ratio(ms['padded'], ms['packed']):.2f}x as fast as padded, "
        f"{ratio(ms['repad'], ms['packed']):.2f}x as fast as repad; gather and scatter are "
        f"{shares[0]:.2f} % of repad's step, and {shares[1]:.2f} % of a step of a full batch",
        "differs    theirs: a GPU, bf16, PyTorch; every layer finds the indices again and waits for "
        f"max_seqlen on the host. ours: {'fp32 on the CPU' if o.backend == 'cpu' else 'bf16'}, "
        "indices once a batch and no waits, so that repad pays for the copies alone, and saves "
        f"attention over padding, {attention:.0f} % of padded's FLOPs")
    say(f"published  {SYNCS}",
        "ours       none: nothing is read back inside a step, and cu_seqlens come with the batch",
        "differs    waits in every layer exist on a GPU only, and unpad.c has no such waits: there is "
        "nothing to measure here")


def named(kind, o):
    """The demo model's record is not that of a real one"""
    return kind + "-demo" * (o.model == "demo")


def repad(o):
    say = Record(named("repad", o))
    o.backend = say.backend
    lengths, full = [min(n, o.row) for n in SEED_BATCH], [o.row] * o.full_rows
    ms, shape = layouts_table(say, f"the published documents in rows of {o.row}", lengths, o)
    ms_copies = copies(say, lengths, shape, o)
    share = 100 * ms_copies / statistics.median(ms["repad"])
    say(f"  {ms_copies:.1f} ms a step: {share:.2f} % of repad's")
    full_ms, _ = layouts_table(say, f"a filled batch of {o.full_rows} rows of {o.row}", full, o)
    ms_copies = copies(say, full, shape, o)
    full_share = 100 * ms_copies / statistics.median(full_ms["packed"])
    say(f"  {ms_copies:.1f} ms a step: {full_share:.2f} % of packed's; repad - packed measures "
        f"{statistics.median(full_ms['repad']) - statistics.median(full_ms['packed']):.1f} ms")
    repad_answers(say, o, lengths, shape, ms, (share, full_share))
    return say


# -------------------------------------------------------------------------------------------------
# independence

NOTEBOOK = "How does FA2 flash_attn_varlen_func handle masks?"


def check(say, title, model, lengths):
    """--check-packing on documents of these lengths. Its lines"""
    command = [TRAINER, "--model", model, "--train", measure.shard(lengths), "--boundary-token", 0,
               *measure.capacity("packed", lengths, max(lengths), 1 << 30), "--check-packing"]
    lines = run(*command).split("\n\n")[-1].splitlines()
    say("", title, f"$ {measure.shown(command)}", *lines)
    return [float(x) for x in re.findall(r"max \|delta\| of a \S+(?: \S+)? +([\d.e+-]+)",
                                         "\n".join(lines))]


def independence(o):
    say = Record(named("independence", o))
    say("", "the notebook's figures: causal attention of sequences of 5 and 3 tokens, head_dim 8",
        "$ build/cpu/notebook", *run("build/cpu/notebook").splitlines())
    worst = re.search(r"\|ours - printed\| +([\d.]+); (.*)", "\n".join(say.lines))
    alone = re.search(r"\|packed - alone\| +(.*)", "\n".join(say.lines))
    check(say, "the notebook's lengths through a whole model, random weights", "demo", [5, 3])
    delta = check(say, f"{o.name}, {'random weights' if o.model == 'demo' else 'real weights'}, six "
                  "documents", o.model, SEED_BATCH)
    say("", f"published  the outputs of sequence 2 of two packed ones, 24 values of 4 decimals "
            f'(notebook "{NOTEBOOK}")',
        f"ours       {worst[2]}, the others differ by at most {worst[1]}: a bf16 rounding step; "
        f"packed against alone {alone[1]}. {o.name}: logits differ by {delta[1]:.3g}, losses by "
        f"{delta[0]:.3g}, gradients by {delta[2]:.3g}, packed against alone",
        "differs    theirs: FlashAttention-2 on a GPU in bf16, attention alone. ours: those "
        "figures on the CPU in fp32, rounded to bf16 (the CUDA kernels take head_dim 64 and 128), "
        "and whole models, forward and backward. v of sequence 1 is not published")
    return say


# -------------------------------------------------------------------------------------------------
# scores

POST = ("C. McCormick on packing with varlen attention in nanochat: 64 documents of 512 tokens "
        "need 8x fewer attention scores")
SPEEDRUN = ("nanochat pull request 663: d24, T 2048, 8 x H100, fp8, 97.38 minutes instead of 99: "
            "1.8 %")


def squares(lengths, layout, row_len):
    """Scores of full squares, as the post counts them"""
    rows = measure.rows_of(layout, lengths, row_len)
    return rows * row_len ** 2 if rows else sum(n * n for n in lengths)


def scores_table(say, lengths, o):
    """Step time and counts of every layout. The measurements by (layout, row length)"""
    runs = {}
    say("", f"{len(lengths)} documents of {o.length} tokens, {o.name}, micro-batches of "
            f"{o.micro_batch_tokens} tokens, {o.repeats} steps after one that is not timed",
        "layout      row   rows     scores (squares)      causal pairs        step ms: median "
        "[min-max]   time   FLOPs        loss")
    for layout, row in [("packed", o.length), *(("rows", n * o.length) for n in (1, 4, 8)),
                        ("padded", 4 * o.length)]:
        r = runs[layout, row] = measure.train(o.model, layout, lengths, row, o.micro_batch_tokens,
                                              o.repeats)
        base = runs["packed", o.length]
        tokens = measure.rows_of(layout, lengths, row) * row or sum(lengths)
        r["flops"] = measure.step_flops(r["model"], tokens, r["pairs"])
        n, n0 = squares(lengths, layout, row), squares(lengths, "packed", row)
        say(f"{layout:7} {row:7} {measure.rows_of(layout, lengths, row) or '-':>6} "
            f"{n:12} {n / n0:5.1f}x {r['pairs']:12} {r['pairs'] / base['pairs']:6.3f}x"
            f" {spread(r['ms']):>30} {ratio(r['ms'], base['ms']):6.3f} "
            f"{r['flops'] / base['flops']:7.3f}  {r['loss']:10.6f}")
    say("time and FLOPs are relative to packed. Rows attend across documents, hence another loss.")
    return runs


def windowed_pairs(n, window):
    """Causal pairs of n tokens of which each sees at most `window`"""
    w = min(n, window)
    return w * (w + 1) // 2 + (n - w) * w


def d24_gain(lengths, row_len, short):
    """Per cent of a d24 step's FLOPs that attention inside documents saves. 24 layers of width
    1536, MLP of 4x, vocabulary of 32768; windows SSSL, the last layer L."""
    width, layers = 1536, 24
    windows = [row_len if i % 4 == 3 else short for i in range(layers)]
    tokens = sum(lengths)
    pairs = [sum(windowed_pairs(n, w) for w in windows for n in documents)
             for documents in ([row_len] * round(tokens / row_len), lengths)]
    linear = 6 * tokens * (layers * 12 * width ** 2 + 32768 * width)
    rows, packed = (linear + 12 * width * p for p in pairs)
    return 100 * (1 - packed / rows), 100 * (1 - linear / rows)


def d24_table(say):
    say("", "a d24 model by the same count (no run): attention's share of a step's FLOPs in rows "
            "of 2048, and what is saved inside documents")
    for title, lengths in (("64 documents of 512", [512] * 64), ("web pages (R65)", web_pages())):
        for window in (1024, 512):
            gain, share = d24_gain(lengths, 2048, window)
            say(f"  {title:20} short windows of {window:4}: attention {share:4.1f} %, saved "
                f"{gain:4.1f} % of a step")
    gains = [d24_gain(web_pages(), 2048, window)[0] for window in (1024, 512)]
    return min(gains), max(gains)


def web_pages():
    """The lengths of the reference batch, cut at 2048 as the speedrun's loader does"""
    text = run("python3", "dev/shard.py", "--dist", "r65", "--print-lengths", "--out", "-")
    return [min(int(n), 2048) for n in text.split()]


def scores(o):
    say = Record(named("scores", o))
    lengths = [o.length] * o.docs
    runs = scores_table(say, lengths, o)
    low, high = d24_table(say)
    packed, rows, padded = (runs[key] for key in (("packed", o.length), ("rows", 8 * o.length),
                                                  ("padded", 4 * o.length)))
    n, n0 = squares(lengths, "rows", 8 * o.length), squares(lengths, "packed", 0)
    say("", f"published  {POST}",
        f"ours       rows of {8 * o.length} compute {n} scores, packed {n0}: {n / n0:.3f}x, counted "
        f"in squares; {rows['pairs'] / packed['pairs']:.3f}x causal pairs, counted by the program; "
        f"a step takes {ratio(rows['ms'], packed['ms']):.2f}x in rows of {8 * o.length}, "
        f"{ratio(padded['ms'], packed['ms']):.2f}x padded to {4 * o.length}",
        f"differs    8x is the ratio to rows of 8 documents (4096 tokens); to rows of 2048 it is "
        f"4x, to rows of 512 none. Here {o.docs} documents, {o.name}, "
        f"{'fp32 on the CPU' if say.backend == 'cpu' else 'bf16'}")
    say(f"published  {SPEEDRUN}",
        f"ours       by the same count, attention inside documents saves {low:.1f} to {high:.1f} % "
        "of a d24 step's FLOPs on web pages: its linear layers are large, three of four layers "
        "have short windows, and its rows were full before, so there is no padding to remove",
        "differs    a count, not a run; the range is that of nanochat's short windows, a quarter "
        "or half of a row. Its time is not its FLOPs: fp8 linear layers raise attention's share, "
        "short documents run at a lower rate")
    return say


# -------------------------------------------------------------------------------------------------

def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("what", choices=["repad", "independence", "scores"])
    p.add_argument("--model", default=os.environ.get("MODEL") or "smollm2-135m",
                   help="a directory or a built-in name; MODEL=demo: seconds")
    p.add_argument("--repeats", type=int, default=3, help="timings of which the median is shown")
    p.add_argument("--steps", type=int, default=1, help="repad: timed steps of each --compare")
    p.add_argument("--row", type=int, default=2048, help="repad: row length")
    p.add_argument("--full-rows", type=int, help="repad: rows of the filled batch (CPU 2, GPU 6)")
    p.add_argument("--docs", type=int, help="scores: documents (64; on the CPU 8 but for demo)")
    p.add_argument("--length", type=int, default=512, help="scores: tokens of a document")
    p.add_argument("--micro-batch-tokens", type=int, help="scores (CPU 4096, GPU 32768)")
    p.add_argument("--record", action="store_true", default=os.environ.get("RECORD") == "1",
                   help="write dev/results/NAME-BACKEND-DATE.txt; also RECORD=1")
    o = p.parse_args()
    on_cpu = measure.backend() == "cpu"
    o.name = pathlib.Path(o.model).name
    o.full_rows = o.full_rows or (2 if on_cpu else 6)
    o.docs = o.docs or (8 if on_cpu and o.model != "demo" else 64)
    o.micro_batch_tokens = o.micro_batch_tokens or (4096 if on_cpu else 32768)
    return o


def main():
    os.chdir(ROOT)
    o = arguments()
    say = {"repad": repad, "independence": independence, "scores": scores}[o.what](o)
    if o.record:
        say.write()


main()
