#!/usr/bin/env python3
"""Times training steps by running the trainer itself. The same documents in every step.

    dev/bench.py                            every layout (--compare of the trainer)
    dev/bench.py --against OTHER_BINARY     two builds, step by step in turns: ratio of their times
    dev/bench.py --alone                    one layout, by the trainer's own times
    dev/bench.py --write DIR                only writes the documents as a shard

Documents (--dist, or --lengths as 220,217 or 64x512):
    seed   220, 217, 295, 183, 130, 350
    r65    log-normal, mean 700, sigma 1.04, at most 8192: web pages; 65,536 tokens are the
           reference batch R65 of 95 documents, the same on every machine
    short  log-normal, mean 60, sigma 0.6, at most 256
    chat   mean 300, sigma 0.8, at most 2048
    long   mean 3000, sigma 0.5, at most 8192
    giant  one document of --tokens

With --against, one program works while the other is stopped, so a busy or throttled moment of the
machine hits both. A step's time is the time that the program was allowed to work between two lines
of its log, known to a millisecond: steps should take 50 ms or more. CPU time is that of all its
threads: where other programs run, read that ratio. A GPU works on for a program that is stopped:
there one runs after the other, and a step's time is that of its log.
"""
import argparse
import datetime
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRAINER = os.environ.get("TRAIN", str(ROOT / "train_llama"))
SEED = [220, 217, 295, 183, 130, 350]           # cu_seqlens 0 220 437 732 915 1045 1395
# mean and standard deviation of log-normal lengths, longest document
LAWS = {"r65": (700, 1.04, 8192), "short": (60, 0.6, 256), "chat": (300, 0.8, 2048),
        "long": (3000, 0.5, 8192)}


# -------------------------------------------------------------------------------------------------
# Documents

def log_normal(law, tokens, cap):
    """Quantiles of the distribution, so that lengths are not random; the last makes up the sum."""
    mean, sigma, longest = LAWS[law]
    cap = min(cap, longest)
    count = max(1, round(tokens * 95 / 65536 if law == "r65" else tokens / mean))
    normal = statistics.NormalDist(math.log(mean) - sigma ** 2 / 2, sigma)
    lengths = [min(cap, round(math.exp(normal.inv_cdf((i + 0.5) / count)))) for i in range(count)]
    while sum(lengths) > tokens + cap - lengths[-1]:
        lengths.pop(0)
    rest = tokens - sum(lengths)
    while rest > 0 and lengths[-1] + rest > cap:         # a small cap cuts the tail: more documents
        lengths.append(min(cap, rest))
        rest -= lengths[-1]
    lengths[-1] += rest
    random.Random(1).shuffle(lengths)
    return lengths


def make_lengths(dist="seed", tokens=65536, cap=8192, given=None):
    if given:
        parts = (part.rpartition("x") for part in given.split(","))
        return [int(n) for repeats, _, n in parts for _ in range(int(repeats or 1))]
    if dist in LAWS:
        return log_normal(dist, tokens, cap)
    return [tokens] if dist == "giant" else SEED


def make_documents(lengths, vocab, prefix=0):
    """Token 0 begins a document and occurs nowhere else; then a short cycle with noise, so that
    there is something to learn. The first `prefix` tokens are the same in all."""
    rng, documents = random.Random(1), []
    for length in lengths:
        start = rng.randrange(1, vocab)
        documents.append([0] + [1 + (start + i % 7 * 37 + (rng.random() < 0.1) * i) % (vocab - 1)
                                for i in range(length - 1)])
        documents[-1][:prefix] = documents[0][:prefix]
    return documents


def write_shard(folder, lengths, vocab=258, prefix=0):
    """A shard of llm.c's format, for --boundary-token 0. Returns the directory."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [t for document in make_documents(lengths, vocab, prefix) for t in document]
    with open(folder / "train_00000.bin", "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))
    return folder


# -------------------------------------------------------------------------------------------------
# Runs, and records of them

def shown(command):
    """As a record may show it: directories outside the repository by their last part"""
    words = [str(w).replace(str(ROOT) + "/", "./") for w in command]
    return shlex.join(pathlib.Path(w).name if w.startswith("/") else w for w in words)


def run(*command, quiet=False):
    """Standard output. A failure ends the program with its messages, or gives "" if quiet."""
    try:
        done = subprocess.run([str(w) for w in command], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError as missing:
        if quiet:
            return ""
        sys.exit(f"error: {missing.filename}: not found\nhint: make")
    if done.returncode and not quiet:
        sys.stderr.write(done.stdout[-2000:] + done.stderr)
        print(f"(while running {shown(command)})", file=sys.stderr)
        sys.exit(done.returncode)
    return "" if done.returncode else done.stdout


class Record:
    """Prints lines and keeps them for dev/results/NAME-BACKEND-DATE.txt."""

    def __init__(self, name, trainer=TRAINER):
        with tempfile.TemporaryDirectory() as folder:
            text = run(trainer, "--dry-run", "--model", "demo", "--boundary-token", 0, "--train",
                       write_shard(folder, [4]))
        # emulated: its times mean nothing
        self.backend = next((b for b in ("cpu", "emulated") if f" on {b}" in text), "cuda")
        self.name, self.lines = name, []
        gpu = run("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,"
                  "noheader", quiet=True).splitlines()[:1]
        cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
        self(f"date     {datetime.date.today()}",
             "machine  " + ", ".join(gpu + [cpu[1] if cpu else os.uname().machine,
                                            f"{len(os.sched_getaffinity(0))} cores",
                                            f"load {os.getloadavg()[0]:.1f} at the start"]),
             f"unpad.c  {text.splitlines()[0].removeprefix('unpad.c ')}, commit "
             + (run("git", "describe", "--always", "--dirty", quiet=True).strip() or "unknown"),
             f"command  {shown(sys.argv)}")

    def __call__(self, *lines):
        for line in lines:
            print(line, flush=True)
            self.lines.append(line)

    def write(self):
        path = ROOT / f"dev/results/{self.name}-{self.backend}-{datetime.date.today()}.txt"
        path.write_text("\n".join(self.lines) + "\n")
        print(f"wrote {path.name}")


def spread(values):
    return f"{statistics.median(values):.1f} [{min(values):.1f}-{max(values):.1f}]"


def layout_options(lengths, row_len):
    """Capacity for each document in a row of its own, filled so that a step is these documents and
    none of the next epoch"""
    capacity = len(lengths) * row_len
    fill = math.ceil(1e9 * (sum(lengths) + 0.01) / capacity) / 1e9
    return ["--max-seqlen", row_len, "--micro-batch-tokens", capacity, "--fill", min(1, fill)]


def packed_options(lengths):
    """Capacity for exactly these documents in one buffer"""
    return ["--max-seqlen", max(lengths), "--micro-batch-tokens", sum(lengths)]


class Program:
    """A training run that works only inside step()."""

    def __init__(self, name, trainer, *options, threads=0):
        self.name, self.folder = name, tempfile.mkdtemp(prefix="unpad-bench-")
        self.log, self.lines = pathlib.Path(self.folder) / "run/log.jsonl", []
        self.command = [trainer, *options, "--lr", 1e-6, "--schedule", "constant", "--val-every", 0,
                        "--num-samples", 0, "--threads", threads]
        self.messages = open(self.folder + "/messages", "w+")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # by way of close()
        self.process = subprocess.Popen(    # nobody else would end a stopped program
            ["setpriv", "--pdeathsig", "KILL"] +
            [str(w) for w in self.command + ["--steps", 1000000, "--out", self.folder + "/run"]],
            cwd=ROOT, stdout=self.messages, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.early_s, self.used_s, self.file, self.part = 0.0, 0.0, None, b""

    def new_line(self):
        """Whether the log has a record of another step"""
        if not self.file:
            if not self.log.exists():
                return False
            self.file = open(self.log, "rb")
        self.part += self.file.read()
        *lines, self.part = self.part.split(b"\n")
        records = [r for r in map(json.loads, lines) if "ms" in r]
        self.lines += records
        return bool(records)

    def cpu_s(self):
        """CPU time of all threads so far"""
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(1e-9 * int(task.read_text().split()[0]) for task in tasks)

    def await_line(self):
        while not self.new_line():
            if self.process.poll() is not None:
                said = pathlib.Path(self.messages.name).read_text()
                sys.exit(f"error: {self.name} ended: {said}")
            time.sleep(0.0005)

    def run_alone(self, steps):
        """Before others begin: these steps, which step() then only tells"""
        while len(self.lines) < steps:
            self.await_line()
        cpu_s = self.cpu_s() / len(self.lines)
        self.process.kill()
        self.process.wait()
        self.step = iter([(1e-3 * r["ms"], cpu_s, r["loss"]) for r in self.lines]).__next__

    def step(self):
        """Lets the program work until its next step is logged. Seconds, seconds of CPU, loss"""
        start = time.perf_counter()
        self.process.send_signal(signal.SIGCONT)
        self.await_line()
        end, used_s = time.perf_counter(), self.cpu_s()
        self.process.send_signal(signal.SIGSTOP)
        result = self.early_s + end - start, used_s - self.used_s, self.lines[-1]["loss"]
        self.early_s, self.used_s = time.perf_counter() - end, used_s   # the next step had begun
        return result

    def close(self):
        self.process.kill()
        self.process.wait()
        self.messages.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def take_turns(programs, steps):
    """{name: [(seconds, CPU seconds, loss)]}. The first step allocates: its times do not count."""
    results = {p.name: [] for p in programs}
    for _ in range(1 + steps):
        for p in programs:
            results[p.name].append(p.step())
    return results


# -------------------------------------------------------------------------------------------------
# Comparisons

def parse_compare(text):
    """The table of --compare: {layout: {column: number}}"""
    names = ("ms", "least", "most", "rate", "tflops", "padding", "computed", "pairs", "mib", "loss")
    return {line.split()[0]: dict(zip(names, map(float, line.split()[1:])))
            for line in text.splitlines()
            if re.match(r"(packed|shared|padded|grouped|repad|rows) +[\d.]+ ", line)}


def compare(o, say, shard, lengths):
    rows = [*layout_options(lengths, o.row_len), "--pad-to", "max"] if o.row_len else []
    command = [o.trainer, "--model", o.model, "--train", shard, "--boundary-token", 0,
               *(rows or packed_options(lengths)), "--compare", o.steps, "--threads", o.threads,
               *o.options]
    text = run(*command)
    table = parse_compare(text)
    say(f"$ {shown(command)}",
        *[line for line in text.splitlines()
          if line.startswith(("model ", "recompute ", "layout "))],
        *[line for line in text.splitlines() if line.split(" ")[0] in table])
    for layout in "shared", "padded", "grouped", "repad", "rows":
        if layout in table:
            say(f"packed is {table[layout]['ms'] / table['packed']['ms']:.2f} times as fast as "
                f"{layout}")


def against(o, say, shard, lengths):
    options = ["--model", o.model, *["--from-scratch"] * os.path.isdir(o.model), "--train", shard,
               "--boundary-token", 0, *packed_options(lengths), *o.options]
    programs = []
    try:
        for name, trainer in ("this", o.trainer), ("other", o.against):
            programs.append(Program(name, trainer, *options, threads=o.threads))
            if say.backend == "cuda":
                programs[-1].run_alone(1 + o.steps)
        say(f"$ {shown(programs[0].command)}", f"other: {shown([o.against])}")
        results = take_turns(programs, o.steps)
    finally:
        for p in programs:
            p.close()
    losses = [[loss for _, _, loss in r] for r in results.values()]
    for name, timed in results.items():
        wall, cpu, _ = zip(*timed[1:])
        say(f"{name:6} {spread([1e3 * s for s in wall]):>26} ms a step, "
            f"{1e3 * statistics.median(cpu):.1f} ms of CPU, "
            f"{sum(lengths) / statistics.median(wall):,.0f} tokens/s")
    for i, what in enumerate(("by the clock", "of CPU time")):
        ratios = [b[i] / a[i] for a, b in list(zip(*results.values()))[1:]]
        say(f"this / other in speed, {what}: {statistics.median(ratios):.3f}, pairs of steps "
            f"{min(ratios):.3f} to {max(ratios):.3f}")
    say("the losses of all steps are " + ("equal" if losses[0] == losses[1] else
                                          f"not equal: {losses[0][-1]}, {losses[1][-1]}"))


def alone(o, say, shard, lengths):
    """Full rows with --layout rows need --row-len: the same tokens in rows of this length"""
    sizes = packed_options(lengths)
    if o.row_len:
        sizes = ["--max-seqlen", o.row_len, "--micro-batch-tokens", sum(lengths)]
    program = Program("this", o.trainer, "--model", o.model, "--train", shard, "--boundary-token", 0, *sizes,
                      *o.options, threads=o.threads)
    try:
        program.run_alone(1 + o.steps)
        messages = pathlib.Path(program.messages.name).read_text().splitlines()
    finally:
        program.close()
    records = program.lines[1:1 + o.steps]
    ms, passes = ([r[key] for r in records] for key in ("ms", "passes_ms"))
    tflops = statistics.median([r.get("useful_tflops", 0) for r in records])
    say(f"$ {shown(program.command)}", *[m for m in messages if m.startswith(("layout ", "recompute ", "warning: the attention"))])
    say(f"step    {spread(ms)} ms, {statistics.median(passes):.1f} ms of passes, "
        f"{statistics.median([r['real_tokens'] for r in records]) / statistics.median(ms) * 1e3:,.0f} tokens/s, "
        f"{tflops:.1f} useful TFLOP/s, {tflops / 9.894:.1f} % of 989.4, loss {records[-1]['loss']:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=__doc__.split(
        "\n", 2)[2], formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--against", metavar="OTHER", help="another build of the trainer")
    add("--alone", action="store_true", help="one layout (after --), by the trainer's own times")
    add("--write", metavar="DIR", help="write the documents there and stop")
    add("--trainer", default=TRAINER, help="this build (default: ./train_llama)")
    add("--model", default="demo")
    add("--dist", choices=["seed", *LAWS, "giant"], default="seed")
    add("--lengths", help="e.g. 220,217 or 64x512")
    add("--tokens", type=int, default=65536)
    add("--cap", type=int, default=8192, help="longest document")
    add("--row-len", type=int, help="a row of this length for each document, in one micro-batch "
        "(default: a buffer for these tokens, which every layout fills)")
    add("--prefix", type=int, default=0, help="tokens that all documents begin with")
    add("--vocab", type=int, default=258)
    add("--steps", type=int, default=5, help="timed steps")
    add("--threads", type=int, default=0)
    add("--record", metavar="NAME", help="write dev/results/NAME-BACKEND-DATE.txt")
    add("options", nargs="*", help="after --: more options of the trainer")
    o = parser.parse_args()
    lengths = make_lengths(o.dist, o.tokens, o.cap, o.lengths)
    said = (f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} "
            f"tokens, {sum(n * (n + 1) // 2 for n in lengths)} pairs")
    if o.write:
        write_shard(o.write, lengths, o.vocab, o.prefix)
        print(said)
        return
    say = Record(o.record or "bench", o.trainer)
    say(f"{o.lengths or o.dist}: {said}")
    with tempfile.TemporaryDirectory() as folder:
        shard = write_shard(folder + "/shard", lengths, o.vocab, o.prefix)
        (against if o.against else alone if o.alone else compare)(o, say, shard, lengths)
    if o.record:
        say.write()


if __name__ == "__main__":
    main()
