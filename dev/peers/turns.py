"""For the scripts of the CPU: programs that do training steps in turns."""
import os
import pathlib
import statistics
import subprocess
import sys

BUILD = pathlib.Path(__file__).resolve().parents[2] / "build"


class Program:
    """Does a step for each line on its standard input, and answers with seconds and loss."""
    def __init__(self, name, threads, *command):
        self.name = name
        env = {k: v for k, v in os.environ.items()
               if "NUM_THREADS" not in k and k != "LD_PRELOAD"}
        self.process = subprocess.Popen([str(x) for x in command], text=True,
                                        env=dict(env, OMP_NUM_THREADS=str(threads)),
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"FAILED: {self.name} ended")
        return map(float, line.split())


def ours(threads, *arguments):
    program = BUILD / "cpu/bench_step"
    if not program.exists():
        sys.exit("FAILED: not built: make build/cpu/bench_step")
    return Program("ours", threads, program, "--turns", "--threads", threads, *arguments)


def take_turns(peers, steps):
    """Into each peer's .losses and .seconds. The first step allocates and is not timed."""
    for p in peers:
        p.losses, p.seconds = [], []
    for _ in range(1 + steps):
        for p in peers:
            seconds, loss = p.step()
            p.seconds.append(seconds)
            p.losses.append(loss)
    for p in peers:
        del p.seconds[0]


def times(peer, tokens):
    ms = [1e3 * s for s in peer.seconds]
    median = statistics.median(ms)
    return (f"{peer.name:16s} {median:8.0f} ms [{min(ms):.0f}-{max(ms):.0f}] "
            f"{1e3 * tokens / median:8.0f} tokens/s")


def ratio(ours, peer):
    """The median over the steps, each with the one that followed it: of like loads."""
    return statistics.median(b / a for a, b in zip(ours.seconds, peer.seconds))
