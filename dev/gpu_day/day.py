#!/usr/bin/env python3
"""All that needs a GPU, in the order of its value, within minutes: make gpu-day SECONDS=420 STEPS="machine checks"

    day.py [SECONDS] [STEP...]      default: 420 seconds and all steps; in a folder that make gpu-kit has built

It installs nothing and changes no setting of the GPU. Each command has a limit, at which its process group is killed;
a step for which too little time is left is skipped. Results come as they are measured, to at most eight files of $OUT
(default: dev/results/gpu-DATE); summary.txt has the table. Exit status: 0: all steps ran and passed; 2: wrong use, or
a part is missing; 11: no GPU, nothing was run; otherwise 1.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
KIT = HERE if (HERE / "kit.json").exists() else HERE.parents[1] / "build/gpu-kit"
BIN, DATA = KIT / "bin", KIT / "data"
GROUP = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
BEGAN = time.time()
os.environ["PATH"] += ":/usr/local/cuda/bin:/usr/local/nvidia/bin"

# Runs of tiny models on the CPU backend, whose logs travel, and those of the GPU that must have the same losses
COMMON = ("--from-scratch --train corpus --max-seqlen 96 --micro-batch-tokens 128 --batch-tokens 256 --val-every 0 "
          "--num-samples 0 --lr 1e-3 --warmup-steps 1 --steps 2")
ALIKE = "--model tiny --train alike --max-seqlen 256 --micro-batch-tokens 512 --batch-tokens 512"
LORA = "--model base --no-from-scratch --lora 8 --lr 1e-2"
GOLDENS = {"three": "--model tiny --steps 3 --val-every 3 --val-tokens 128", "tiny": "--model tiny", "alike": ALIKE,
           "odd": "--model odd", "muon": "--model tiny --optimizer muon", "moments": "--model tiny --moments bf16",
           "wide": "--model wide", "qwen2": "--model qwen2", "qwen3": "--model qwen3", "lora": LORA,
           "nf4": LORA + " --base nf4"}
RUNS = {"packed": "three --save-every 2 --keep 0", "again": "three --save-every 2 --keep 0", "odd": "odd --deterministic",
        "auto": "tiny --attention auto", "padded": "tiny --layout padded", "repad": "tiny --layout repad",
        "sm80": "tiny --attention sm80", "recompute": "tiny --recompute full", "shared": "alike --layout shared",
        "shared sm80": "alike --layout shared --attention sm80", "wide sm80": "wide --attention sm80",
        **{name: name for name in ("muon", "moments", "wide", "qwen2", "qwen3", "lora", "nf4")}}
LONG = ("--train long --lr 3e-4 --schedule constant --warmup-steps 20 --val-every 0 --num-samples 0 "
        "--boundary-token 0 --save-every 0")
SANITIZER = ["compute-sanitizer", "--error-exitcode", 9, "--target-processes", "all", "--tool"]
HEADS = (3, 1, 64), (4, 1, 128)


def tiny_run(options, out, program="train_llama"):
    return [BIN / program, *COMMON.split(), *options.split(), "--out", out]


def long_run(out, tokens, steps, *options, program="train_llama"):
    return [BIN / program, "--model", FACTS["model"], *LONG.split(), "--max-seqlen", FACTS["longest"],
            "--micro-batch-tokens", tokens, "--steps", steps, *options, "--out", out]


def bench(*arguments):
    return [BIN / "bench", *arguments]


def python(script, *arguments):
    return [sys.executable, "-u", KIT / script, *arguments]


def end(child, number):
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        pass


class Commands:
    """Runs commands, and keeps what becomes of them"""
    def __init__(self, seconds, out):
        self.end, self.out, self.rows, self.children = BEGAN + seconds - 8, out, [], set()
        out.mkdir(parents=True, exist_ok=True)
        memory = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 24 << 30
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="unpad-gpu-", dir="/dev/shm" if memory else None))
        self.env = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "TMPDIR": str(self.work), "TRAIN": str(BIN / "train_llama"),
                    "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "UNPAD_PEERS": "/nonexistent", "OMP_WAIT_POLICY": "passive"}

    def left(self):
        return self.end - time.time()

    def write(self, file, *lines):
        with open(self.out / file, "a") as f:
            f.write("".join(line + "\n" for line in lines))

    def note(self, *lines):
        print(*lines, sep="\n", end="\n" * bool(lines), flush=True)
        self.write("summary.txt", *lines)

    def row(self, name, state, why="", seconds=0.0):
        self.rows.append((state, self.step, f"{state:7} {seconds:5.0f} s  {name}" + f": {why}" * bool(why)))
        self.note(self.rows[-1][2])

    def run(self, name, file, command, limit, want=".*", show=None, env=(), cwd=KIT, row=True):
        """(whether it ends well and has a line that matches `want`, its output, which goes to the file). Lines that
        match `show` go to the summary, with the clock of the GPU."""
        began, limit = time.time(), limit * FACTS["patience"]
        short, limit = limit > self.left(), min(limit, self.left())
        if limit < 1:
            self.row(name, "SKIPPED", "no time was left")
            return False, "no time was left"
        words = [str(word) for word in command]
        with tempfile.TemporaryFile() as log:
            why = self.end_of(words, limit, cwd=cwd, env={**self.env, **dict(env)}, stdout=log, stderr=log)
            log.seek(0)
            text = log.read().decode(errors="replace").replace(str(self.work), "WORK")
        if not why and not re.search(want, text, re.M):
            why = f"no line matches {want}"
        shown = " ".join(words).replace(str(KIT), ".").replace(str(self.work), "WORK").replace(sys.executable, "python3")
        self.write(file, f"\n$ {shown}\n{text}\n# {name}: {why or 'ok'}, {time.time() - began:.1f} s")
        lines = [line for line in text.splitlines() if show and re.match(show, line)]
        self.note(*lines, *["clock   " + self.clock(began)] * bool(lines))
        state = "ok" if not why else "SKIPPED" if short and why.startswith("no end") else "FAILED"
        if row or state == "SKIPPED":
            last = (text.splitlines() or [""])[-1].strip()[:160]
            self.row(name, state, why + f" ({last})" * bool(why and last), time.time() - began)
        return not why, text

    def end_of(self, words, limit, **more):
        """Why the command did not end well, or "". All that it has started ends too, unless the driver holds it."""
        try:
            child = subprocess.Popen(words, stdin=subprocess.DEVNULL, **GROUP, **more)
        except OSError as error:
            return f"{words[0]}: {error.strerror}"
        self.children.add(child)
        for number, patience in (0, limit), (signal.SIGTERM, 3), (signal.SIGKILL, 5):
            end(child, number)
            try:
                child.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            self.note(f"process {child.pid} does not end: the driver holds it")
        end(child, signal.SIGKILL)
        self.children.discard(child)
        return f"no end within {limit:.0f} s" if number else f"exit code {child.returncode}" * bool(child.returncode)

    def clock(self, since):
        """While the GPU was busy, from nvidia-smi's file"""
        lines = re.findall(r"^(.{19})[.\d]*, ([.\d]+), ([.\d]+), ([.\d]+)$", (self.out / "clocks.csv").read_text(), re.M)
        busy = [(float(mhz), float(watt)) for stamp, mhz, watt, percent in lines if float(percent) >= 50 and
                time.mktime(time.strptime(stamp, "%Y/%m/%d %H:%M:%S")) >= since - 1]
        return (f"{statistics.median(mhz for mhz, _ in busy):.0f} MHz (median), at most {max(w for _, w in busy):.0f} W"
                if busy else "unknown")

    def beside(self, work, items, workers):
        """work(*item) for all of them, several at a time"""
        with concurrent.futures.ThreadPoolExecutor(1 if FACTS["emulated"] else workers) as pool:
            list(pool.map(lambda item: work(*item), items))

    def verdict(self, name, began, cases):
        """One row for many cases: (name, why it failed, or "")"""
        bad = [f"FAILED {case}: {why}" for case, why in cases if why]
        self.note(f"{name}: {len(cases) - len(bad)} of {len(cases)} as expected", *bad)
        self.row(name, "FAILED" if bad or not cases else "ok", f"{len(bad)} problems" * bool(bad), time.time() - began)


class Day(Commands):
    """The steps: a method each, run in the order of STEPS"""
    step, attention_path, sanitized, free_gib = "", "sm90", None, 0

    def machine(self):
        """the machine, and whether a kernel runs at all"""
        query = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,memory.total,compute_cap"
        self.run("gpu", "checks.txt", ["nvidia-smi", "--format=csv,noheader", "--query-gpu=" + query], 20, show=".")
        software = "nvidia-smi -q -d CLOCK,POWER,ECC,PERFORMANCE; uname -a; nproc; free -g; ldd bin/train_llama"
        self.run("software", "checks.txt", ["sh", "-c", software], 30, row=False)
        ok, text = self.run("a kernel runs", "checks.txt", bench("facts"), 90, "^kernel +answers", "device|kernel|copy|la")
        self.free_gib = float((re.findall(r"([\d.]+) GiB free", text) or [0])[0])
        return ok

    def wrappers(self):
        """inline PTX on real hardware, the sums of tensor cores, Hopper's attention on a small list"""
        for suite in "conform", "tensor_cores":
            self.run(suite, "checks.txt", [BIN / f"test_{suite}"], 60, "^[1-9][0-9]* passed, 0 failed", "FAILED |.* passed,")
        for heads in HEADS:
            works, text = self.run(f"attention of 3 documents, hd{heads[2]}", "checks.txt",
                                   bench("attention", "65,130,300", *heads), 60, show="attention  sm")
            if not works or "sm90: not" in text:        # or all that follows would wait for it
                self.attention_path = "sm80"
                self.note("WITHOUT HOPPER'S ATTENTION: what follows runs sm80's kernels")

    def operations(self):
        """The table of operations, in several processes: the time goes into plain code on the CPU"""
        began, cases, options = time.time(), [], ["--quick"] if FACTS["emulated"] else ["--limit", 40]
        until = began + 0.35 * self.left()

        def one(name):
            ok, text = self.run(name, "checks.txt", [BIN / "test_ops", *options, "--filter", name], max(2, min(
                110, until - time.time())), row=False, env={"OMP_NUM_THREADS": "1"})
            bad = re.findall(r"((?:^ .*\n)*)^FAILED +(\w+)", text, re.M)
            cases.extend([(case, " ".join(said.split())[:300] or "no reason") for said, case in bad] or
                         [(name, "" if ok else "no result")])

        self.beside(one, [(name,) for name in FACTS["operations"]], 8)
        self.verdict("operations", began, cases)

    def losses(self, loss_bound, norm_bound, lines, *runs):
        """Why the logs of two runs differ, or "" """
        ok, text = self.run("losses", "runs.txt", python("tests/runs.py", loss_bound, norm_bound, lines, *runs), 20, row=False)
        return "" if ok else (text.splitlines() or ["no end"])[-1][:300]

    def training(self):
        """whole runs of tiny models: the losses of the CPU backend, resuming, packing changes nothing"""
        began, runs, cases, attention = time.time(), self.work / "runs", [], " --attention " + self.attention_path

        def judge(name, command, want=".*"):
            ok, text = self.run(name, "runs.txt", command, 60, want, row=False, cwd=DATA)
            cases.append((name, "" if ok else " ".join(text.splitlines()[-2:])[:300] or "no output"))
            return ok

        def train(name, golden, *more):
            more = " ".join(more) + attention * ("--attention" not in more)
            want = attention[3:] if name == "auto" else "prefixes: [1-9]" if golden == "alike" else ".*"
            if judge(name, tiny_run(f"{GOLDENS[golden]} {more}", runs / name), want):
                cases.append((f"losses of {name}", self.losses(2 ** -8, 2 ** -5, 4 if golden == "three" else 2,
                                                               DATA / "golden" / golden, runs / name)))

        def same(name, a, b):
            files = [[(path.name, path.read_bytes()) for path in sorted((runs / run).glob("*.safetensors"))] for run in (a, b)]
            cases.append((name, "" if files[0] and files[0] == files[1] else "other bits, or no files"))

        self.beside(train, [(name, *run.split()) for name, run in RUNS.items()], 6)
        if not (runs / "packed/final").exists():
            return self.verdict("training", began, cases)
        for copy in "resumed", "crossed":
            shutil.copytree(runs / "packed", runs / copy, ignore=shutil.ignore_patterns("step-00000003", "final", ".lock"))
        tiny, three, unchanged = GOLDENS["tiny"] + attention, GOLDENS["three"], "does not change the result"
        self.beside(judge, [
            ("resumes", tiny_run(three + attention + " --resume", runs / "resumed")),
            ("resumes on the CPU", tiny_run(three + " --attention auto --resume", runs / "crossed", "train_llama_cpu")),
            ("packing", tiny_run(tiny + " --check-packing", runs / "none"), unchanged),
            ("packing, sm80", tiny_run(tiny + " --attention sm80 --check-packing", runs / "none"), unchanged),
            ("sharing", tiny_run(ALIKE + attention + " --layout shared --check-packing", runs / "none"), unchanged),
            ("layouts", tiny_run(tiny + " --compare 1", runs / "none"), "^repad "),
            ("samples", tiny_run("--no-from-scratch --steps 0 --num-samples 2 --sample-tokens 4 --prompt line" + attention,
                                 runs / "sampled") + ["--model", runs / "packed/final"])], 6)
        same("bits after resuming", "packed/step-00000003", "resumed/step-00000003")
        same("bits of the same run again", "packed/step-00000003", "again/step-00000003")
        cases.append(("losses after resuming on the CPU", self.losses(2 ** -8, 2 ** -5, 4, DATA / "golden/three", runs / "crossed")))
        self.verdict("training", began, cases)

    def sanitize_attention(self):
        """compute-sanitizer on the kernels of attention; before 2026.3 racecheck has false alarms on wgmma"""
        def one(tool, heads):
            if self.sanitized is not False:     # one that hangs takes its share of the GPU from others
                ok, text = self.run(f"{tool} hd{heads[2]}", "sanitizer.txt", [*SANITIZER, tool, *bench(
                    "attention", "65,1,129,300", *heads, self.attention_path, "once")], 35)
                self.sanitized = ok or "SUMMARY" in text

        self.beside(one, [(tool, h) for tool in ("memcheck", "synccheck", "initcheck", "racecheck") for h in HEADS], 2)

    def checks(self):
        """operations, runs and the sanitizer at the same time, since nothing is timed; PyTorch compiles beside them"""
        warm = ("PyTorch alone", 90, "--modes", "varlen", "--compile", "--steps", 1, "--no-ours")
        jobs = [(self.operations,), (self.training,), (self.sanitize_attention,), (self.others, *warm)]
        self.beside(lambda job, *more: job(*more), jobs[:2] if FACTS["emulated"] else jobs, 4)

    def long(self):
        """SmolLM2-135M's dimensions from random weights: first steps as on the CPU, then packed and padded"""
        for name, (tokens, steps) in FACTS["long"].items():
            layout = ["--layout", "packed" if name == "first" else name, "--attention", self.attention_path]
            self.run(f"{name}, {steps} steps", "runs.txt", long_run(self.work / name, tokens, steps, *layout), 60, cwd=DATA)
        self.verdict("losses of long runs", time.time(), [
            ("as on the CPU", self.losses(2 ** -7, 1, 1, DATA / "golden/long", self.work / "first")),
            ("packed and padded", self.losses(2 ** -6, 1, 1, self.work / "packed", self.work / "padded"))])

    def time(self, name, documents, *options, show, want, of=(), model=None):
        """dev/bench.py on these documents"""
        documents = "--lengths 9,17,5" if FACTS["emulated"] else documents
        options = [*options, *["--attention", self.attention_path] * ("--attention" not in options)]
        self.run(f"{name} {documents}", "bench.txt", python(
            "dev/bench.py", *of, "--model", model or FACTS["model"], "--vocab", FACTS["vocab"], "--steps", FACTS["steps"],
            *documents.split(), "--", *options), 60, want, show)

    def layouts(self, lists=("--dist r65 --tokens 16384", "--lengths 32x2048", "--dist r65 --tokens 32768 --cap 2048")):
        """the same on other documents"""
        for documents in lists:
            self.time("layouts", documents, show="(packed|shared|padded|grouped|repad|rows) ", want="^packed ")

    def claim(self):
        """the claim of the project: packed once, against padded, repad (unpadded around each attention) and rows"""
        self.layouts(["--dist seed --row-len 2048", "--dist seed"])

    def alone(self, name, documents, *options, model=None):
        self.time(name, documents, *options, show="step ", want="^step ", of=["--alone"], model=model)

    def reference(self):
        """whole steps of the reference batch R65 in one buffer, and of the seed batch"""
        self.alone("packed", "--dist r65")
        self.alone("packed", "--dist seed")

    def attention(self):
        """kernels alone, Hopper's beside those that they replace"""
        for docs, heads in FACTS["lists"]:
            self.run(f"attention {docs[:20]} {heads}", "bench.txt", bench("attention", docs, *heads, "sm80,sm90" if
                     self.attention_path == "sm90" else "sm80"), 60, show="attention")

    def kernels(self):
        """a whole step, kernel by kernel, as it ran: where the time goes, and how much of it nothing runs"""
        for name, steps in ("r65", 5), ("seed", 20):
            trace, shard = self.work / ("trace-" + name), self.work / ("shard-" + name)
            text = self.run("documents", "kernels.txt", python("dev/bench.py", "--write", shard, "--dist", name, "--vocab",
                                                               FACTS["vocab"]), 20, row=False)[1]
            longest, tokens = re.findall(r"\d+", text + " 0" * 4)[2:4]
            self.run(f"traced {name}", "kernels.txt", long_run(
                self.work / ("traced-" + name), tokens, steps, "--train", shard, "--max-seqlen", longest, "--attention",
                self.attention_path), 60, env={"CUDA_INJECTION64_PATH": str(BIN / "libtrace.so"), "TRACE": str(trace)})
            self.run(f"kernels of {name}", "kernels.txt", python("trace.py", trace), 20, show="trace   [^ ]|.* ms +[1-9]")

    def torch(self):
        """attention of others on the same lists: only ratios on one card in one run mean something"""
        lists = [f"{docs}:{'/'.join(map(str, heads))}" for docs, heads in FACTS["lists"]]
        self.run("attention of others", "peers.txt", python("attention.py", "varlen,cudnn,fa3,fa4", *lists), 100, show="peer ")
        if self.left() > 150:
            self.run("FlexAttention", "peers.txt", python("attention.py", "flex", *lists[:3]), 60, show="peer ")

    def others(self, name, limit, *options):
        self.run(name, "peers.txt", python("dev/peers.py", "--device", "cuda", "--model", FACTS["model"], "--dtype", "bf16",
                                           *options), limit, "^varlen", r".* [\d,]+$|ours is|.*cannot run")

    def peers(self):
        """whole steps of PyTorch on R65 in turns with ours, plain and compiled; on the seed batch transformers' too"""
        one_pass = ["--pass-tokens", 65536 if self.free_gib > 100 else 32768]
        self.others("peers on R65", 130, "--dist", "r65", "--modes", "varlen", "--compile", *one_pass)
        self.others("peers on seed", 100, "--compile", "--modes", "padded", "varlen", *["flex"] * (self.left() > 150),
                    "hf-padded", "hf-flat")

    def guesses(self):
        """each operation alone, products too: the rates that dev/SPEED.md assumes"""
        self.run("each operation", "bench.txt", [BIN / "test_ops", "--bench", *FACTS["bench"]], 60, show=".*(GB/s|GFLOP/s)")

    def variants(self):
        """whole steps of what the design left open, on R65; short documents; chats that begin alike"""
        trained, chats = self.work / "packed/final", "--lengths 27x2348 --prefix 2048"
        for name, documents, *options in [
                ("muon", "--dist r65", "--optimizer", "muon"), ("bf16 moments", "--dist r65", "--moments", "bf16"),
                ("recompute", "--dist r65", "--recompute", "full"), ("sm80", "--dist r65", "--attention", "sm80"),
                ("rows", "--dist r65 --row-len 2048", "--layout", "rows"), ("short", "--dist short"), ("chats", chats),
                ("shared", chats, "--layout", "shared"), ("lora", "--dist r65", "--lora", 16),
                ("nf4", "--dist r65", "--lora", 16, "--base", "nf4")]:
            if "--lora" in options and not trained.exists():
                self.long()     # adapters need a model with weights
            self.alone(name, documents, *options, model=trained if "--lora" in options else None)

    def counters(self):
        """attention under ncu: why it is as fast as it is"""
        for docs, heads in FACTS["lists"][:3:2]:
            self.run(f"counters {heads}", "kernels.txt", [
                "ncu", "--clock-control", "none", "--set", "full", "-k", "regex:attention", "-c", 3,
                *bench("attention", docs, *heads, self.attention_path, "once")], 60)

    def sanitizer(self):
        """the first shape of every operation under memcheck"""
        if self.sanitized is None:
            self.sanitize_attention()
        but = [word for name in ("gemm", "cutlass", "nvjet") for word in ("--kernel-name-exclude", "kns=" + name)]
        self.run("memcheck of operations", "sanitizer.txt", [*SANITIZER, "memcheck", *but, BIN / "test_ops", "--quick"], 150)


# In this order, each if so many seconds are left
STEPS = {"machine": 10, "wrappers": 10, "checks": 30, "long": 20, "claim": 20, "reference": 12, "attention": 15, "kernels": 20,
         "torch": 25, "peers": 60, "guesses": 15, "layouts": 25, "variants": 15, "counters": 30, "sanitizer": 30}
NOT_EMULATED = ("kernels", "torch", "peers", "layouts", "counters", "sanitizer")


def write_goldens(data):
    """When a kit is built: the runs of the CPU backend"""
    runs = [tiny_run(options, "golden/" + name, "train_llama_cpu") for name, options in GOLDENS.items()]
    for command in runs + [long_run("golden/long", *FACTS["long"]["first"], program="train_llama_cpu")]:
        subprocess.run(list(map(str, command)), cwd=data, check=True, stdout=subprocess.DEVNULL)


def missing_parts():
    """cuBLASLt is too large to travel: a link to the toolkit's, or to that of a Python package"""
    folders = [folder for pattern in ("usr/local/cuda*/lib64", "usr/local/cuda*/targets/*/lib", "opt/*/lib", *(
        p[1:] + "/nvidia/*/lib" for p in sys.path if p.startswith("/"))) for folder in pathlib.Path("/").glob(pattern)]
    subprocess.run(["chmod", "-R", "u+rwx", BIN], stderr=subprocess.DEVNULL)     # what a transfer may have lost
    for again in False, True:
        said = subprocess.run(["ldd", BIN / "train_llama"], capture_output=True, text=True).stdout
        missing = re.findall(r"(\S+) => not found", said)
        for name, folder in [(name, folder) for name in missing for folder in folders if not again]:
            if (folder / name).exists():
                subprocess.run(["ln", "-sf", folder / name, KIT / "lib"])
    return missing + [str(BIN / p) for p in FACTS.get("programs", ["train_llama"]) if not os.access(BIN / p, os.X_OK)]


def run_steps(day, chosen):
    for name in chosen:
        day.step = name
        if day.left() < STEPS[name]:
            day.row(name, "SKIPPED", f"{max(0, day.left()):.0f} s are left, it should have {STEPS[name]}")
            continue
        day.note(f"---- {time.time() - BEGAN:.0f} s, {name}: {getattr(day, name).__doc__}")
        try:
            if getattr(day, name)() is False:
                return day.note("no kernel runs: nothing else makes sense")
        except Exception as error:      # a fault of this program must not end the day
            day.row(name, "FAILED", f"{type(error).__name__}: {error}")


def main(arguments):
    seconds = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 420
    wrong = [name for name in arguments if name not in STEPS]
    if wrong:
        return 2, f"{wrong[0]}: no such step, expected {' '.join(STEPS)}", "SECONDS come first: day.py 420 machine checks"
    if "GPU 0" not in subprocess.run(["timeout", "30", "nvidia-smi", "-L"], capture_output=True, text=True).stdout:
        return 11, "no GPU (nvidia-smi -L), nothing was run", "nvidia-smi says what is wrong"
    if missing_parts():
        return 2, f"{' '.join(missing_parts())}: missing", "make gpu-kit; LD_LIBRARY_PATH for a library"
    chosen = arguments or [name for name in STEPS if not (FACTS["emulated"] and name in NOT_EMULATED)]
    out = (KIT if HERE == KIT else HERE.parents[1]) / time.strftime("dev/results/gpu-%Y-%m-%d")
    day = Day(seconds, pathlib.Path(os.environ.get("OUT") or out).resolve())
    day.note(f"{time.strftime('%Y-%m-%d')}, commit {FACTS['commit']}, {seconds} s: {' '.join(chosen)}" + ", EMULATED" * FACTS["emulated"])
    with open(day.out / "clocks.csv", "a") as clocks:
        helpers = [subprocess.Popen(["stdbuf", "-oL", "nvidia-smi", "--query-gpu=timestamp,clocks.sm,power.draw,utilization.gpu",
                                     "--format=csv,noheader,nounits", "-lms", "200"], stdout=clocks, **GROUP),
                   subprocess.Popen(bench("hold"), **GROUP)]        # a loaded driver starts programs in less time

    def clean_up():
        for child in [*helpers, *day.children]:
            end(child, signal.SIGKILL)
        shutil.rmtree(day.work, ignore_errors=True)

    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda *_: (clean_up(), os._exit(1)))
    run_steps(day, chosen)
    clean_up()
    day.note("", f"---- {time.time() - BEGAN:.0f} s, clock {day.clock(0)}", *[line for _, _, line in day.rows])
    skipped = " ".join(dict.fromkeys(step for state, step, _ in day.rows if state == "SKIPPED"))
    day.note(*["next: " + skipped] * bool(skipped))
    return 0 if all(state == "ok" for state, _, _ in day.rows) else 1, "", ""


if __name__ == "__main__":
    FACTS = json.loads((KIT / "kit.json").read_text()) if (KIT / "kit.json").exists() else {}
    if sys.argv[1:2] == ["--goldens"]:
        sys.exit(write_goldens(pathlib.Path(sys.argv[2])))
    code, error, hint = main(sys.argv[1:])
    if error:
        print(f"error: {error}\nhint: {hint}", file=sys.stderr)
    sys.exit(code)
