"""What the measuring scripts share: shards of known lengths, runs of ./train_llama and what they
print, and records in dev/results with the date, the machine, the versions and the commands."""
import datetime
import json
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRAINER = os.environ.get("TRAIN", "./train_llama")
RESULTS = pathlib.Path(os.environ.get("RESULTS", ROOT / "dev/results"))
SEED_BATCH = [220, 217, 295, 183, 130, 350]     # cu_seqlens 0 220 437 732 915 1045 1395


class Record:
    """Prints lines and keeps them for dev/results/NAME-BACKEND-DATE.txt."""

    def __init__(self, name):
        self.name, self.lines, self.backend = name, [], backend()
        self(f"date     {datetime.date.today()}")
        self(f"machine  {machine()}")
        self(f"unpad.c  {run(TRAINER, '--version').split()[-1]}, backend {self.backend}, "
             f"{compiler()}, commit {commit()}")
        self(f"command  {shown([sys.argv[0], *sys.argv[1:]])}")

    def __call__(self, *lines):
        for line in lines or [""]:
            print(line, flush=True)
            self.lines.append(line)

    def path(self, suffix=".txt"):
        return RESULTS / f"{self.name}-{self.backend}-{datetime.date.today()}{suffix}"

    def write(self):
        write_whole(self.path(), "\n".join(self.lines) + "\n")


def write_whole(path, text):
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)
    print(f"wrote {path.name}")


def machine():
    gpu = run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", quiet=True)
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", cpuinfo)
    load = os.getloadavg()[0]
    return ", ".join(gpu.splitlines()[:1] + [
        name[1].strip() if name else os.uname().machine,
        f"{len(os.sched_getaffinity(0))} cores", f"load {load:.1f} at the start"])


def compiler():
    return (run(os.environ.get("CC", "gcc"), "--version", quiet=True) or "unknown compiler"
            ).splitlines()[0]


def commit():
    return run("git", "describe", "--always", "--dirty", quiet=True).strip() or "unknown"


def backend():
    """cpu, cuda, or emulated, whose times mean nothing: what the trainer was built for"""
    text = run(TRAINER, "--dry-run", "--model", "demo", "--boundary-token", 0, "--train", shard([4]))
    return next((name for name in ("cpu", "emulated") if f" on {name}" in text), "cuda")


def shown(command):
    """A command as a record may show it: directories outside the repository by their last part"""
    words = [pathlib.Path(w).name if w.startswith("/") else w for w in map(str, command)]
    return shlex.join(words)


def run(*command, quiet=False):
    """Standard output. A failure ends the program with its messages, or gives "" if quiet."""
    try:
        done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True,
                              text=True)
    except FileNotFoundError as missing:
        if quiet:
            return ""
        sys.exit(f"error: {missing.filename}: not found\nhint: make")
    if done.returncode and not quiet:
        sys.stderr.write(done.stdout[-2000:] + done.stderr)
        print(f"(while running {shown(command)})", file=sys.stderr)
        sys.exit(done.returncode)
    return "" if done.returncode else done.stdout


def shard(lengths):
    """The directory of a shard of documents of these lengths, in an order of its own"""
    name = "-".join(str(n) for n in lengths[:8]) + f"-{len(lengths)}-{sum(lengths)}"
    folder = pathlib.Path("build/shards") / name
    run("python3", "dev/shard.py", "--dist", "given", "--lengths", *lengths, "--vocab", 258,
        "--cap", max(lengths), "--out", folder)
    return folder


def rows_of(layout, lengths, row_len):
    """Rows of row_len tokens that a layout takes; 0: it has none"""
    if layout == "rows":
        return -(-sum(lengths) // row_len)
    return len(lengths) if layout in ("padded", "repad") else 0


def capacity(layout, lengths, row_len, micro_batch_tokens):
    """Options for a step of exactly these documents, in micro-batches of about this size"""
    rows = rows_of(layout, lengths, row_len)
    needed, whole = rows * row_len or sum(lengths), row_len if rows else max(lengths)
    count = -(-needed // max(micro_batch_tokens // whole * whole, whole))
    micro = -(-rows // count) * row_len if rows else -(-needed // count // whole) * whole
    if count == 1:
        micro = needed
    batch = count * micro
    return ["--max-seqlen", row_len, "--micro-batch-tokens", micro, "--batch-tokens", batch,
            "--fill", min(1, round((sum(lengths) + 0.01) / batch, 9))]


def train(model, layout, lengths, row_len, micro_batch_tokens, steps):
    """Trains on these documents, all of them in every step. A dict: ms (of each step but the
    first), loss (before the first update), pairs, fill, planned_mib, peak_mib, rss_mib."""
    with tempfile.TemporaryDirectory() as out:
        text = run(TRAINER, "--model", model, "--train", shard(lengths), "--boundary-token", 0,
                   "--layout", layout,
                   *capacity(layout, lengths, row_len, micro_batch_tokens), "--steps", 1 + steps,
                   "--lr", 1e-5, "--val-every", 0, "--num-samples", 0, "--out", out + "/run")
        log = [json.loads(line) for line in open(out + "/run/log.jsonl")]
    records = [r for r in log if "ms" in r]
    first = records[0]
    assert all(r["docs"] == len(lengths) for r in records), records
    peak = re.search(r"peak memory: device ([\d.]+) MiB \(planned ([\d.]+) MiB\), process ([\d.]+)",
                     text)
    return {"ms": [r["ms"] for r in records[1:]], "loss": first["loss"],
            "fill": sum(lengths) / (rows_of(layout, lengths, row_len) * row_len or sum(lengths)),
            "pairs": first["attention_pairs"], "peak_mib": float(peak[1]),
            "planned_mib": float(peak[2]), "rss_mib": float(peak[3]), "model": shape(text)}


def compare(model, lengths, row_len, steps):
    """One --compare run: {layout: its row of the table as a dict}, the model's shape, the command"""
    command = [TRAINER, "--model", model, "--train", shard(lengths), "--boundary-token", 0,
               *capacity("padded", lengths, row_len, 1 << 30), "--compare", "--compare-steps", steps]
    text = run(*command)
    names = ("ms", "rate", "tflops", "padding", "pairs", "mib", "loss")
    table = {line.split()[0]: dict(zip(names, map(float, line.split()[1:])))
             for line in text.splitlines()
             if re.match(r"(packed|padded|rows|repad) +[\d.]+ ", line)}
    return table, shape(text), shown(command)


def shape(text):
    """The model of a run, from the line it prints"""
    match = re.search(r"(\d+) layers, hidden (\d+), ffn (\d+), heads (\d+)/(\d+) x (\d+), "
                      r"vocab (\d+)", text)
    return dict(zip(("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"),
                    map(int, match.groups())))


def linear_weights(m):
    """Weights that every token is multiplied with"""
    q, kv = m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]
    layer = m["hidden"] * (2 * q + 2 * kv + 3 * m["ffn"])
    return m["layers"] * layer + m["vocab"] * m["hidden"]


def step_flops(m, tokens, pairs):
    """FLOPs of a training step: 6 a weight and token, 12 a (query, key) pair and channel"""
    return 6.0 * linear_weights(m) * tokens + \
        12.0 * m["layers"] * m["heads"] * m["head_dim"] * pairs


def spread(values):
    """median [least-most]"""
    return f"{statistics.median(values):.1f} [{min(values):.1f}-{max(values):.1f}]"
