#!/usr/bin/env python3
"""Real training: the same text packed, in rows and padded, at equal time and at equal tokens.

    dev/training.py [--record]      records dev/results/training-BACKEND-DATE.csv, and .txt
    dev/training.py --continue      keeps the runs in --out that are complete, of the same options

Every step holds the same documents in every layout, so the layouts differ in time and, in rows, in
what attention sees. Rows are then not quite full, which the figures say; padded rows have
--max-seqlen tokens. A run ends when its steps have taken --minutes; validation does not count.
Validation scores each document on its own, whatever the training layout. The learning rate is
constant after warm-up, so every point of a run is the end of a shorter one. On the CPU each run has
one core to itself, as many at a time as there are cores: six runs of 20 minutes on two cores take
70 minutes.
"""
import argparse
import concurrent.futures
import contextlib
import csv
import hashlib
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
    """The functions of the library of the system's Python, which holds no packages, as --data"""
    if not (o.data / "dataset.json").exists():
        stdlib = measure.run("/usr/bin/python3", "-c", STDLIB).strip()
        measure.run("python3", "data/prepare.py", stdlib, "--python-functions", "--out", o.data,
                    "--val-frac", 0.03)
    content = json.loads((o.data / "dataset.json").read_text())
    digest = hashlib.sha256()
    for shard in sorted(o.data.glob("*.bin")):
        digest.update(shard.read_bytes())
    return content, digest.hexdigest()[:16]


def command_of(o, layout, seed, out):
    return [measure.TRAINER, "--model", o.model, "--train", o.data, "--layout", layout,
            "--seed", seed, "--max-seqlen", o.max_seqlen, "--micro-batch-tokens",
            o.micro_batch_tokens, "--batch-tokens", o.batch_tokens, "--schedule", "constant",
            "--lr", o.lr, "--steps", 10 ** 6, "--val-every", o.val_every, "--num-samples", 0,
            "--out", out]


def log_of(out):
    """The whole lines of a run's log so far"""
    path = out / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def complete(o, command, out):
    """Has a run of exactly these options taken its time?"""
    log = log_of(out)
    options = log[0]["options"] if log else {}
    return minutes_of(log) >= o.minutes and all(
        str(options[name[2:]]) == str(value) for name, value in zip(command[1::2], command[2::2]))


def minutes_of(log):
    return sum(r.get("ms", 0) for r in log) / 6e4


class Runs:
    """The trainers that run now, to be ended with this program"""

    def __init__(self):
        self.processes = set()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def for_minutes(self, command, out, minutes):
        """Runs it until its steps have taken `minutes`. (exit code, CPU seconds / wall seconds)"""
        began = time.monotonic()
        with open(out.with_suffix(".log"), "w") as output:
            process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
        self.processes.add(process)
        pid = 0
        while not pid:
            time.sleep(1)
            if minutes_of(log_of(out)) >= minutes:
                os.kill(process.pid, signal.SIGINT)
                minutes = float("inf")      # once
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
        self.processes.remove(process)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, (used.ru_utime + used.ru_stime) / (time.monotonic() - began)

    def end(self):
        for process in list(self.processes):
            with contextlib.suppress(ProcessLookupError):       # ended, and its thread is about to say so
                os.kill(process.pid, signal.SIGKILL)


def train(o, layout, seed, cores, runs):
    """One run: its log, and what --eval prints of its last checkpoint"""
    out = pathlib.Path(o.out) / f"{layout}-{seed}"
    core = cores.get()
    if core is not None:
        os.sched_setaffinity(0, {core})     # of this thread and what it starts: one thread each
    try:
        command = command_of(o, layout, seed, out)
        if not (o.keep and complete(o, command, out)):
            shutil.rmtree(out, ignore_errors=True)
            code, share = runs.for_minutes(command, out, o.minutes)
            if code not in (0, STOPPED) or minutes_of(log_of(out)) < o.minutes:
                raise RuntimeError(f"{layout}, seed {seed}: ended too early with exit code {code}, "
                                   f"see {out.with_suffix('.log')}")
            print(f"{layout}, seed {seed}: CPU time / wall time {share:.3f}", flush=True)
        newest = max(out.glob("step-*"))
        return log_of(out), measure.run(measure.TRAINER, "--eval", "--model", newest, "--val",
                                        o.data, "--max-seqlen", o.max_seqlen)
    finally:
        cores.put(core)


class Run:
    """What a run did: points (at each validation, of the steps before it), table, rates"""

    def __init__(self, layout, seed, log, table):
        steps = [r for r in log if "ms" in r]
        self.points, ms, tokens = [], 0, 0
        for r in log:
            if "ms" in r:
                ms, tokens = ms + r["ms"], tokens + r["real_tokens"]
            if r.get("event") == "val":
                self.points.append(dict(zip(FIELDS, (layout, seed, r["step"], tokens,
                                                     round(ms / 1e3, 1), r["loss"]))))
        self.tokens, self.seconds = tokens, ms / 1e3
        self.rate = tokens / self.seconds
        self.fill = statistics.mean(r["fill"] for r in steps)
        # {document tokens: (documents, loss)}
        self.by_length = {m[1]: (int(m[2]), float(m[3])) for m in re.finditer(
            r"^(all|\d+ to \d+) +(\d+) +\d+ +([\d.]+) ", table, re.M)}
        self.loss = self.by_length["all"][1]

    def at(self, step):
        return next(p for p in self.points if p["step"] == step)


def common_step(done, seed):
    """The last step after which every layout was validated"""
    return max(set.intersection(*({p["step"] for p in done[layout, seed].points}
                                  for layout in LAYOUTS)))


def print_results(say, done, seeds, epoch):
    """Equal time, equal tokens, and by document length: a column a layout, all seeds"""
    def line(name, form, value):
        cells = (" / ".join(form.format(value(done[layout, s], s)) for s in seeds)
                 for layout in LAYOUTS)
        say(f"{name:34}" + "".join(f"{cell:>22}" for cell in cells))

    step = {s: common_step(done, s) for s in seeds}
    say("", f"{'seeds ' + ' / '.join(map(str, seeds)):34}" + "".join(f"{x:>22}" for x in LAYOUTS))
    line("tokens/s", "{:.0f}", lambda r, s: r.rate)
    line("fill of the buffer", "{:.3f}", lambda r, s: r.fill)
    say("", "at equal time, all validation documents")
    line("tokens trained on, millions", "{:.2f}", lambda r, s: r.tokens / 1e6)
    line("epochs", "{:.2f}", lambda r, s: r.tokens / epoch)
    line("validation loss", "{:.4f}", lambda r, s: r.loss)
    for length, (documents, _) in done["packed", seeds[0]].by_length.items():
        if length != "all":
            line(f"  {length} tokens ({documents})", "{:.4f}",
                 lambda r, s, key=length: r.by_length[key][1])
    say("", "at equal tokens, the validation documents of the curves: after step "
        + " / ".join(str(step[s]) for s in seeds))
    line("validation loss", "{:.4f}", lambda r, s: r.at(step[s])["val_loss"])
    line("seconds of training", "{:.0f}", lambda r, s: r.at(step[s])["train_s"])


def print_verdict(say, done, seeds):
    """What a reader should take from it, with the figures"""
    def mean(layout, value):
        return statistics.mean(value(done[layout, s]) for s in seeds)

    loss = {layout: mean(layout, lambda r: r.loss) for layout in LAYOUTS}
    rate = {layout: mean(layout, lambda r: r.rate) for layout in LAYOUTS}
    fill = mean("rows", lambda r: r.fill)
    apart = max(abs(p["val_loss"] - done["packed", s].at(p["step"])["val_loss"]) for s in seeds
                for p in done["padded", s].points if p["step"] <= common_step(done, s))
    step = [(s, common_step(done, s)) for s in seeds]
    equal = {layout: statistics.mean(done[layout, s].at(n)["val_loss"] for s, n in step)
             for layout in LAYOUTS}
    ahead = {layout: rate["packed"] / rate[layout] for layout in LAYOUTS}
    say("", f"ours       at equal time packed reaches a validation loss of {loss['packed']:.4f}, "
        f"rows {loss['rows']:.4f}, padded {loss['padded']:.4f} (mean of {len(seeds)} seeds, every "
        f"validation document on its own). Packed trains on {ahead['rows']:.2f}x the tokens of "
        f"rows, which are {100 * fill:.0f} % full ({ahead['rows'] * fill:.2f}x if they were full), "
        f"and {ahead['padded']:.2f}x those of padded. At equal tokens: packed "
        f"{equal['packed']:.4f}, rows {equal['rows']:.4f}, padded {equal['padded']:.4f}; after the "
        f"same steps packed and padded differ by at most {apart:.4f}")


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--minutes", type=float, default=20, help="of training steps, each run")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    p.add_argument("--data", type=pathlib.Path, default=pathlib.Path("build/training/data"))
    p.add_argument("--model", default="demo")
    p.add_argument("--max-seqlen", type=int, default=1024)
    p.add_argument("--micro-batch-tokens", type=int, default=4096)
    p.add_argument("--batch-tokens", type=int, default=4096)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--val-every", type=int, default=100)
    p.add_argument("--out", default="build/training")
    p.add_argument("--continue", dest="keep", action="store_true",
                   help="keep the runs in --out that are complete")
    p.add_argument("--record", action="store_true", default=os.environ.get("RECORD") == "1")
    return p.parse_args()


def all_runs(o, jobs):
    """{(layout, seed): (log, table)}; on the CPU a core each. A failure ends the others."""
    cores, runs = queue.Queue(), Runs()
    for core in [None] if measure.backend() == "cuda" else sorted(os.sched_getaffinity(0)):
        cores.put(core)
    pathlib.Path(o.out).mkdir(parents=True, exist_ok=True)
    pool = concurrent.futures.ThreadPoolExecutor(cores.qsize())
    try:
        futures = [pool.submit(train, o, *job, cores, runs) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            future.result()
        return {job: future.result() for job, future in zip(jobs, futures)}
    except RuntimeError as failed:
        sys.exit(f"error: {failed}\nhint: --continue keeps the runs that are complete")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        runs.end()


def main():
    os.chdir(measure.ROOT)
    o, say = arguments(), measure.Record("training")
    data, digest = prepare(o)
    of, val = data["train"], data["val"]
    say(f"each     {measure.shown(command_of(o, 'LAYOUT', 'SEED', 'OUT'))}",
        f"data     {of['documents']:,} documents, {of['tokens']:,} tokens, to train on, "
        f"{val['documents']:,} and {val['tokens']:,} to validate with; sha256 {digest}")
    jobs = [(layout, seed) for seed in o.seeds for layout in LAYOUTS]
    done = {job: Run(*job, *result) for job, result in all_runs(o, jobs).items()}
    print_results(say, done, o.seeds, of["tokens"])
    print_verdict(say, done, o.seeds)
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(point for job in jobs for point in done[job].points)
    if o.record:
        say.write()
        measure.write_whole(say.path(".csv"), text.getvalue())


main()
