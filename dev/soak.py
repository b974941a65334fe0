#!/usr/bin/env python3
"""Runs of 400 steps on 1, 2 or 4 ranks while everything goes wrong: ranks are killed, stopped and told to
end, files may not grow, bits of the newest checkpoint flip. Each time --resume must go on from the newest good
checkpoint, and each run must end with the bits of an undisturbed one. Last, 5,000 steps undisturbed: memory
and open files must not grow. Exit status: 0 when all of this held, else 1.
"""
import argparse, collections, contextlib, hashlib, json, os, pathlib, random, re, resource, shutil, signal
import statistics, subprocess, sys, tempfile, time

from bench import TRAINER, Record, write_shard

STEPS, EVERY, LIMIT_S, NO_LIMIT = 400, 20, 600, resource.RLIM_INFINITY
CONFIG = dict(model_type="llama", hidden_act="silu", vocab_size=264, hidden_size=64, intermediate_size=160,
              num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-5,
              rope_theta=1e4, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
# kind: the exit codes that may follow. Of a killed rank: -9, mpirun's 137, or 8 where another rank saw it first
KINDS = {"kill": (-9, 137, 8), "flip": (-9, 137, 8), "term": (75,), "stop": (), "full": (4,)}


class Job:
    """The trainer on some ranks; what it says goes to a file"""
    def __init__(self, folder, out, ranks, *more):
        self.trainer, self.messages = folder / "train_llama", folder / "messages"
        mpi = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", ranks] if ranks > 1 else []
        command = [*mpi, self.trainer, "--model", folder, "--from-scratch", "--train", folder / "shards", "--lr", 1e-3,
                   "--boundary-token", 0, "--max-seqlen", 64, "--micro-batch-tokens", 64, "--batch-tokens", 256,
                   "--deterministic", "--num-samples", 0, "--val-every", 0, "--threads", 1, "--steps", STEPS,
                   "--save-every", EVERY, "--keep", 3, "--heartbeat-seconds", 300, "--out", folder / out, *more]
        self.process = subprocess.Popen([str(w) for w in command], stdout=open(self.messages, "w"),
                                        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def ranks(self):
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if pathlib.Path("/proc", entry, "cmdline").read_bytes().startswith(bytes(self.trainer)):
                    yield int(entry)

    def said(self):
        return self.messages.read_text(errors="replace")

    def steps(self):
        return self.said().count("\nstep ")

    def end(self, at_step=10**9):
        """Its exit code, when no rank is left; None: it has trained so many steps, and runs"""
        for _ in range(100 * LIMIT_S):
            if self.process.poll() is None and self.steps() >= at_step:
                return None
            if self.process.poll() is not None and not list(self.ranks()):
                return self.process.returncode
            time.sleep(0.01)
        [os.kill(pid, signal.SIGKILL) for pid in [*self.ranks(), *([self.process.pid] if self.process.poll() is None else [])]]
        return "hung"


def result(out):
    """Weights, moments and losses of a run that has ended"""
    files = [out / "final/model.safetensors", *sorted((out / f"step-{STEPS:08}").glob("*.safetensors"))]
    log = map(json.loads, open(out / "log.jsonl"))
    return ([hashlib.sha256(f.read_bytes()).hexdigest() for f in files],
            [(line["step"], line["loss"], line["grad_norm"]) for line in log if "event" not in line])


def disturb(job, kind, rng):
    """Does it to one of the ranks, or to all. Whether the run is expected to go on"""
    pids, lasts = list(job.ranks()), rng.random() < 0.5
    with contextlib.suppress(ProcessLookupError, IndexError):
        if kind == "full":      # no file may grow beyond 600 kB: the log does not, the weights would
            for size in (600000,) if lasts else (600000, NO_LIMIT):
                [resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, NO_LIMIT)) for pid in pids]
                time.sleep(rng.uniform(0, 1))
            return not lasts
        os.kill(one := rng.choice(pids), {"term": signal.SIGTERM, "stop": signal.SIGSTOP}.get(kind, signal.SIGKILL))
        if kind == "stop":
            time.sleep(rng.uniform(0.01, 1))
            os.kill(one, signal.SIGCONT)
    return kind == "stop"


def disturbed_run(folder, out, rng, tell):
    """Returns the error in words; "" where the run ended as it should."""
    flipped = set()             # inodes
    good = lambda: [c for c in sorted(out.glob("step-????????")) if c.stat().st_ino not in flipped]
    while True:
        newest, kinds, goes_on = int((["step-0"] + [c.name for c in good()])[-1][5:]), [], True
        job = Job(folder, out, rng.choice((1, 1, 2, 4)), "--resume")
        while goes_on and job.end(job.steps() + rng.randint(1, 120)) is None:
            time.sleep(rng.uniform(0, 0.05))            # any moment of a step or of a save
            kinds.append(rng.choice(sorted(KINDS)))
            steps, moment = job.steps(), time.monotonic()
            goes_on = disturb(job, kinds[-1], rng)
            tell(kinds[-1], newest, steps, "continues" if goes_on else job.end(), time.monotonic() - moment)
        code, said = job.end(), job.said()
        start = re.search(r"^start .*?(?:step-(\d+))?$", said, re.M)
        if start and int(start[1] or 0) != newest:
            return f"{out.name} resumed at step {start[1]}, not at {newest}"
        if code not in [0, *(c for kind in kinds for c in KINDS[kind])]:
            return f"{out.name}: {kinds}, then exit code {code}: {said[-500:]}"
        if code == 0:
            return "" if result(out) == result(folder / "1") else out.name + " has other bits than undisturbed"
        if kinds[-1] == "flip" and len(good()) > 1:
            path = rng.choice(sorted(good()[-1].iterdir()))
            flipped.add(path.parent.stat().st_ino)
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)


def flat(folder, say):
    """Whether 5,000 undisturbed steps need as much memory and as many open files in the end as early on"""
    job, seen = Job(folder, "long", 1, "--steps", 5000, "--save-every", 250), []
    while job.end(job.steps() + 5) is None:
        with contextlib.suppress(OSError, TypeError):
            proc = pathlib.Path("/proc", str(job.process.pid))
            kib = re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())
            seen += [(int(kib[1]), len(os.listdir(proc / "fd")))] if job.steps() >= 1000 else []
    (kib, files), (kib2, files2) = [(max(s[0] for s in half), statistics.median(s[1] for s in half))
                                    for half in (seen[:len(seen) // 2], seen[len(seen) // 2:])]
    say(f"\n5,000 steps undisturbed, {len(seen)} samples after step 1,000: at most {kib} KiB in the first half, {kib2} in "
        f"the second; {files:g} and {files2:g} open files (medians); exit code {job.end()}")
    return job.end() == 0 and kib2 <= kib + 1024 and files == files2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="writes dev/results/soak-BACKEND-DATE.txt")
    o = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", OMPI_MCA_hwloc_base_binding_policy="none")
    say, rng, table, began = Record("soak"), random.Random(o.seed), collections.defaultdict(list), time.monotonic()

    def tell(kind, resumed, steps, code, seconds):
        table[kind].append((str(code), seconds))
        say(f"{(time.monotonic() - began) / 60:6.1f}  {kind:9}  {resumed:10}  {steps:11}  {code:>9}  {seconds:.1f} s")
    say(f"seed {o.seed}, {o.minutes:g} minutes, {STEPS} steps a run, a checkpoint every {EVERY}, the last 3 are kept\n",
        "minute  disturbed  resumed at  steps since  exit code  after")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as work:
        folder, runs, bad = pathlib.Path(work), 0, ""
        shutil.copy(TRAINER, folder / "train_llama")        # a build meanwhile does not replace it
        (folder / "config.json").write_text(json.dumps(CONFIG))
        write_shard(folder / "shards", [1 + 37 * i % 90 for i in range(200)])
        for ranks in 1, 2, 4:
            if Job(folder, str(ranks), ranks).end() or result(folder / str(ranks)) != result(folder / "1"):
                bad = f"{ranks} ranks undisturbed fail or have other bits than one"
        while not bad and time.monotonic() - began < 60 * o.minutes:
            bad = disturbed_run(folder, folder / f"run-{runs}", rng, tell)
            shutil.rmtree(folder / f"run-{runs}", ignore_errors=True)
            runs += not bad
        bad = bad or ("" if flat(folder, say) else "memory or open files have grown")
    say("\ndisturbed  times  longest  exit codes")
    for kind, ends in sorted(table.items()):
        codes = ", ".join(f"{code}: {n}" for code, n in collections.Counter(c for c, _ in ends).items())
        say(f"{kind:9}  {len(ends):5}  {max(s for _, s in ends):5.1f} s  {codes}")
    say(f"{sum(map(len, table.values()))} disturbances; {runs} runs ended with the weights, moments and losses of an "
        f"undisturbed one{'; WRONG: ' * bool(bad)}{bad}")
    if o.record:
        say.write()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
