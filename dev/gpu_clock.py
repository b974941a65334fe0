#!/usr/bin/env python3
"""Runs a command with the GPU's clock sampled: behind every rate in TFLOP/s it says how much of the
nominal peak and of the peak at that clock it is.

    gpu_clock.py COMMAND [ARGUMENT...]

Rates: numbers in front of TFLOP/s, and those of a table's column of that name. Clock: the median of
the samples, ten a second, since the line with a rate before; a last line gives the whole command's.
Nothing is set on the GPU. Exit status: the command's.
"""
import re
import statistics
import subprocess
import sys
import threading

NOMINAL = 989.4                 # dense bf16 TFLOP/s of an H100 or H200 SXM
FLOP_A_CLOCK = 132 * 4096       # of all its SMs
SAMPLE = ["nvidia-smi", "--query-gpu=name,clocks.sm,power.draw,temperature.gpu",
          "--format=csv,noheader,nounits", "-lms", "100", "-i", "0"]


class Sampler:
    """Samples of [name, MHz, W, degrees]; none where nvidia-smi cannot be run."""

    def __init__(self):
        self.samples, self.used = [], 0
        try:
            self.process = subprocess.Popen(SAMPLE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
            return
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            fields = [field.strip() for field in line.split(",")]
            try:
                self.samples.append([fields[0], *map(float, fields[1:4])])
            except ValueError:
                pass            # a value that this GPU does not tell

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.wait()

    def clock(self):
        """MHz since the last call, or of the last sample there is."""
        new = self.samples[self.used:] or self.samples[-1:]
        self.used = len(self.samples)
        return statistics.median(s[1] for s in new) if new else None

    def is_hopper(self):
        return bool(self.samples) and bool(re.search(r"H[12]00", self.samples[0][0]))

    def summary(self):
        if not self.samples:
            return "clock   not sampled: nvidia-smi gave nothing"
        clocks, watts, degrees = ([s[i] for s in self.samples] for i in (1, 2, 3))
        return (f"clock   {statistics.median(clocks):,.0f} MHz ({min(clocks):,.0f} to "
                f"{max(clocks):,.0f}), {statistics.median(watts):.0f} W, {max(degrees):.0f} C, "
                f"{len(self.samples)} samples")


class Rates:
    """The rates of one line after another."""

    def __init__(self):
        self.columns = []

    def of(self, line):
        fields = re.split(r"\s{2,}", line.strip())
        if "TFLOP/s" in fields:
            self.columns = fields
        elif self.columns and len(fields) == len(self.columns):
            return [float(fields[self.columns.index("TFLOP/s")])]
        return [float(rate) for rate in re.findall(r"([0-9.]+) TFLOP/s", line)]


def with_percentages(line, rates, sampler):
    if not rates:
        return line
    clock = sampler.clock()
    if not clock or not sampler.is_hopper():
        return line
    peak = FLOP_A_CLOCK * clock * 1e-6
    shares = ", ".join(f"{r / NOMINAL:.1%} of {NOMINAL:.0f} and {r / peak:.1%}" for r in rates)
    return f"{line}   [{shares} of the peak at {clock:,.0f} MHz]"


def main(command):
    sampler, rates = Sampler(), Rates()
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                line = line.rstrip("\n")
                print(with_percentages(line, rates.of(line), sampler), flush=True)
    except OSError as error:
        sys.exit(f"error: {command[0]}: {error.strerror}\nhint: is it built?")
    finally:
        sampler.stop()
    print(sampler.summary())
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
