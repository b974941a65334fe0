#!/usr/bin/env python3
"""Real training: the same text packed, in rows and padded, at equal time and at equal tokens.

    dev/training.py [--record]      records dev/results/training-BACKEND-DATE.csv, and .txt

Every step holds the same documents in every layout, so that the layouts differ in time and, in rows,
in what attention sees. A run ends when its steps have taken --minutes; validation does not count. It
is by document, each alone, whatever the layout of training. The learning rate is constant after
warm-up, so that every point of a run is the end of a shorter one. On the CPU each run has one core to
itself, as many at a time as there are cores: six runs of 20 minutes on two cores take an hour.
"""
import argparse
import concurrent.futures
import csv
import io
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

import measure

LAYOUTS = ("packed", "rows", "padded")
FIELDS = "layout seed step tokens train_s val_loss".split()
STOPPED = 75        # exit code of a run that a signal ended after saving
STDLIB = """import sysconfig; print(sysconfig.get_paths()["stdlib"])"""


def prepare(o):
    """The functions of Python's standard library as --data, as scripts/quickstart.sh makes them"""
    if not (o.data / "dataset.json").exists():
        stdlib = measure.run("/usr/bin/python3", "-c", STDLIB).strip()   # no site-packages in it
        measure.run("python3", "data/prepare.py", stdlib, "--python-functions", "--out", o.data,
                    "--val-frac", 0.03)
    return json.loads((o.data / "dataset.json").read_text())


def command_of(o, layout, seed, out):
    return [measure.TRAINER, "--model", o.model, "--train", o.data, "--layout", layout,
            "--seed", seed, "--max-seqlen", o.max_seqlen, "--micro-batch-tokens",
            o.micro_batch_tokens, "--batch-tokens", o.batch_tokens, "--schedule", "constant",
            "--lr", o.lr, "--steps", o.most_steps, "--val-every", o.val_every, "--num-samples", 0,
            "--out", out]


def log_of(out):
    """The whole lines of a run's log so far"""
    path = pathlib.Path(out) / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def wait_minutes(run, out, minutes):
    """Until the run's steps have taken so long, or it has ended"""
    try:
        while run.poll() is None:
            if sum(r.get("ms", 0) for r in log_of(out)) >= 6e4 * minutes:
                run.send_signal(signal.SIGINT)
                run.wait()
            time.sleep(2)
    finally:
        run.kill()


def points_of(layout, seed, log, minutes):
    """A point for each validation in the time: (train_s, tokens) are of the steps before it"""
    points, ms, tokens = [], 0, 0
    for r in log:
        ms, tokens = ms + r.get("ms", 0), tokens + (r["real_tokens"] if "ms" in r else 0)
        if r.get("event") == "val" and ms <= 6e4 * minutes + 5e3:
            points.append(dict(zip(FIELDS, (layout, seed, r["step"], tokens, round(ms / 1e3, 1),
                                            r["loss"]))))
    return points


def train(o, layout, seed, cores):
    """One run: its points and the table of its last checkpoint by document length"""
    out = f"{o.out}/{layout}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    pathlib.Path(o.out).mkdir(parents=True, exist_ok=True)
    core = cores.get()
    pin = [] if core is None else ["taskset", "-c", core]       # the trainer takes one thread a core
    try:
        with open(out + ".log", "w") as output:
            run = subprocess.Popen([*pin, *map(str, command_of(o, layout, seed, out))],
                                   stdout=output, stderr=subprocess.STDOUT)
            wait_minutes(run, out, o.minutes)
        if run.returncode not in (0, STOPPED):
            raise RuntimeError(f"{layout}, seed {seed}: exit code {run.returncode}, see {out}.log")
        newest = max(pathlib.Path(out).glob("step-*"))
        table = measure.run(*pin, measure.TRAINER, "--eval", "--model", newest, "--val", o.data,
                            "--max-seqlen", o.max_seqlen)
    finally:
        cores.put(core)
    return points_of(layout, seed, log_of(out), o.minutes), by_length(table)


def by_length(text):
    """{document tokens: (documents, loss)} of what --eval prints"""
    return {m[1].strip(): (int(m[2]), float(m[3])) for m in
            re.finditer(r"^(all|\d+ to \d+) +(\d+) +\d+ +([\d.]+) ", text, re.M)}


def at_tokens(points, tokens):
    """Validation loss of a run at so many tokens: between its points"""
    for a, b in zip(points, points[1:]):
        if a["tokens"] <= tokens <= b["tokens"]:
            part = (tokens - a["tokens"]) / max(1, b["tokens"] - a["tokens"])
            return a["val_loss"] + part * (b["val_loss"] - a["val_loss"])
    return points[-1]["val_loss"]


def print_results(say, runs, tables):
    """Equal time, equal tokens, and by document length: a column a layout, both seeds"""
    def both(values, form):
        return " / ".join(form.format(v) for v in values)

    seeds = sorted({seed for _, seed in runs})
    common = {seed: min(runs[layout, seed][-1]["tokens"] for layout in LAYOUTS) for seed in seeds}
    say("", f"{'seeds ' + both(seeds, '{}'):30}" + "".join(f"{name:>22}" for name in LAYOUTS))
    rows = [
        ("tokens trained on (millions)", "{:.2f}", lambda r, s: r[-1]["tokens"] / 1e6),
        ("tokens/s", "{:.0f}", lambda r, s: r[-1]["tokens"] / (r[-1]["train_s"] or 1)),
        ("validation loss, equal time", "{:.4f}", lambda r, s: r[-1]["val_loss"]),
        ("validation loss, equal tokens", "{:.4f}", lambda r, s: at_tokens(r, common[s])),
        ("seconds to the same tokens", "{:.0f}",
         lambda r, s: common[s] * r[-1]["train_s"] / (r[-1]["tokens"] or 1)),
    ]
    for name, form, value in rows:
        say(f"{name:30}" + "".join(
            f"{both([value(runs[layout, s], s) for s in seeds], form):>22}" for layout in LAYOUTS))
    say("", "validation loss by the tokens of a document, at equal time: every validation document")
    for length, (documents, _) in tables["packed", seeds[0]].items():
        name = f"{length} ({documents})"
        say(f"{name:30}" + "".join(
            f"{both([tables[layout, s][length][1] for s in seeds], '{:.4f}'):>22}"
            for layout in LAYOUTS))


def print_verdict(say, runs):
    """What a reader should take from it, with the figures"""
    seeds = sorted({seed for _, seed in runs})
    mean = {layout: statistics.mean(runs[layout, s][-1]["val_loss"] for s in seeds)
            for layout in LAYOUTS}
    rate = {layout: sum(runs[layout, s][-1]["tokens"] for s in seeds)
            / sum(runs[layout, s][-1]["train_s"] or 1 for s in seeds) for layout in LAYOUTS}
    apart = max(abs(a["val_loss"] - b["val_loss"]) for s in seeds
                for a, b in zip(runs["packed", s], runs["padded", s]))
    say("", f"ours       at equal time packed reaches {mean['packed']:.4f}, rows {mean['rows']:.4f}, "
        f"padded {mean['padded']:.4f} (mean of {len(seeds)} seeds); packed trains on "
        f"{rate['packed'] / rate['rows']:.2f}x the tokens of rows and "
        f"{rate['packed'] / rate['padded']:.2f}x those of padded; after the same step packed and "
        f"padded differ by at most {apart:.4f} in validation loss")


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--minutes", type=float, default=20, help="of training steps, each run")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    p.add_argument("--data", type=pathlib.Path, default=pathlib.Path("data/demo"))
    p.add_argument("--model", default="demo")
    p.add_argument("--max-seqlen", type=int, default=1024)
    p.add_argument("--micro-batch-tokens", type=int, default=4096)
    p.add_argument("--batch-tokens", type=int, default=4096)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--val-every", type=int, default=100)
    p.add_argument("--most-steps", type=int, default=10 ** 6)
    p.add_argument("--out", default="build/training")
    p.add_argument("--record", action="store_true", default=os.environ.get("RECORD") == "1")
    return p.parse_args()


def main():
    os.chdir(measure.ROOT)
    o, say = arguments(), measure.Record("training")
    data = prepare(o)
    say(f"each     {measure.shown(command_of(o, 'LAYOUT', 'SEED', 'OUT'))}")
    say(f"data     {data['train']['documents']:,} documents, {data['train']['tokens']:,} tokens, to "
        f"train on, {data['val']['documents']:,} and {data['val']['tokens']:,} to validate with")
    cores = queue.Queue()
    for core in [None] if measure.backend() == "cuda" else sorted(os.sched_getaffinity(0)):
        cores.put(core if core is None else str(core))
    jobs = [(layout, seed) for seed in o.seeds for layout in LAYOUTS]
    with concurrent.futures.ThreadPoolExecutor(cores.qsize()) as pool:
        try:
            done = dict(zip(jobs, pool.map(lambda job: train(o, *job, cores), jobs)))
        except RuntimeError as failed:
            pool.shutdown(wait=False, cancel_futures=True)      # what runs already ends by itself
            sys.exit(f"error: {failed}")
    runs, tables = ({job: result[i] for job, result in done.items()} for i in (0, 1))
    print_results(say, runs, tables)
    print_verdict(say, runs)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(point for job in jobs for point in runs[job])
    if o.record:
        say.write()
        measure.write_whole(say.path(".csv"), text.getvalue())


main()
