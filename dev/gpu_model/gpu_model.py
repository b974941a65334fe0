#!/usr/bin/env python3
"""What the CUDA backend would reach on one H200, from the machine code of the build: a model.

    gpu_model.py CUBIN...                    the report
    gpu_model.py --check REPORT CUBIN...     spills, and predictions over 3 % slower than REPORT's

The cubins are kernels/cuda/*.cu for sm_90a; cuobjdump reads them. `make gpu-model` does all of it.
"""
import argparse
import collections
import re
import sys

import attention
import calibration
import sass
import simulate
import step
from step import FUSED, HBM_PEAK, M8, M17, M135, M360, PEAK, SEED, SMALL, r65

SLOWER = 1.03
WORKLOADS = [  # name, model, lengths, ranks
    ("135M R65", M135, r65(), 1),
    ("360M R65", M360, r65(), 1),
    ("1.7B R65", M17, r65(), 1),
    ("8B, 16,384 tokens, 8 ranks", M8, r65(24, 16384), 8),
    ("135M seed batch", M135, SEED, 1),
    ("135M 32 x 2048", M135, [2048] * 32, 1),
    ("135M 2048 x 32", M135, [32] * 2048, 1),
]


def read_build(cubins):
    """({(name, head_dim): Kernel}, [(function, registers, stack, spills)], compiler's version)"""
    codes, usage, producer = {}, {}, set()
    for cubin in cubins:
        codes.update(sass.read_code(sass.cuobjdump("-sass", cubin)))
        usage.update(sass.read_usage(sass.cuobjdump("-res-usage", cubin)))
        with open(cubin, "rb") as f:
            producer.update(re.findall(rb"Cuda compilation tools, release [0-9.]+, V([0-9.]+)",
                                       f.read()))
    functions = [(name, *usage[name], sass.spills(code)) for name, code in codes.items()
                 if name in usage]
    kernels = {}
    for kernel in attention.kernels():
        sizes = {name: kernel.sizes_in(name) for name in codes if kernel.sizes_in(name) is not None}
        if not sizes:
            raise SystemExit(f"error: {kernel.key()}: expected such a kernel in the build\n"
                             "hint: compile all of kernels/cuda for sm_90a")
        name = max(sizes, key=sizes.get)        # smaller ones are for less shared memory
        kernel.read(sizes[name], codes[name], usage[name])
        kernels[kernel.name, kernel.head_dim] = kernel
    return kernels, functions, b", ".join(sorted(producer)).decode() or "unknown"


def groups(s):
    """{group: seconds} of a step."""
    total = collections.Counter()
    for op in s.ops:
        total[op.group] += op.count * (op.seconds + op.launches * step.GAP)
    return total


class Report:
    def __init__(self, kernels, functions, producer):
        self.kernels, self.functions, self.producer = kernels, functions, producer
        self.fa3 = calibration.fa3_kernels()
        self.steps = {}

    # -- figures ---------------------------------------------------------------------------------
    def attention(self, model, lengths, path="_sm90"):
        """(forward, backward) seconds of a layer."""
        t = [attention.seconds(self.kernels["attention_" + name + path, model.D], lengths, model.H,
                               model.Hkv) for name in ("forward", "backward_q", "backward_kv")]
        return t[0], t[1] + t[2]

    def rates(self, model, lengths, path="_sm90"):
        """TFLOP/s: two products forward, five backward."""
        product = 2. * model.D * model.H * attention.pairs(lengths)
        forward, backward = self.attention(model, lengths, path)
        return 2 * product / forward / 1e12, 5 * product / backward / 1e12

    def seconds(self, model, lengths, ranks=1, path="_sm90", graph=False, gap=None, **options):
        key = model.name, tuple(lengths), ranks, path, graph, gap, tuple(sorted(options.items()))
        if key not in self.steps:
            self.steps[key] = step.ours(model, lengths, self.kernels, path, ranks,
                                        **options).seconds(sum(lengths), graph, gap)
        return self.steps[key]

    def pytorch(self, model, lengths, ranks=1):
        return step.pytorch(model, lengths, self.fa3, ranks).seconds(sum(lengths))

    def of_light(self, model, lengths, *args, **options):
        return step.speed_of_light(model, lengths) / self.seconds(model, lengths, *args, **options)

    def binds(self, model, lengths, ranks=1, path="_sm90"):
        """Where the step loses most: milliseconds over the floors of its kernels, by group."""
        over = collections.Counter()
        for op in step.ours(model, lengths, self.kernels, path, ranks).ops:
            over[op.group] += op.count * (op.seconds + op.launches * step.GAP - op.floor()) * 1e3
        return "ms over the floor: " + ", ".join(f"{g} {ms:.1f}" for g, ms in over.most_common(5))

    def pipe(self, name, head_dim):
        """The pipe that a loop needs longest, and for how much of its simulated clocks."""
        kernel = self.kernels[name, head_dim]
        need = simulate.bounds(kernel.trace, kernel.warps * len(kernel.passes))
        pipe = max(need, key=need.get)
        return f"{name}: {pipe} {need[pipe] / kernel.passes[-1]:.0%} of its clocks"

    def compared(self):
        """{name: seconds}: what --check compares."""
        figures = {}
        for name, model, lengths, ranks in WORKLOADS:
            figures[f"{name}, step"] = self.seconds(model, lengths, ranks)
            figures[f"{name}, step, sm_80 kernels"] = self.seconds(model, lengths, ranks, "")
            for path, label in (("_sm90", ""), ("", ", sm_80 kernels")):
                forward, backward = self.attention(model, lengths, path)
                figures[f"{name}, attention forward{label}"] = forward
                figures[f"{name}, attention backward{label}"] = backward
        return figures

    # -- text ------------------------------------------------------------------------------------
    def head(self):
        print("A MODEL, NOT A MEASUREMENT: what one H200 would take, from the machine code of the "
              "build.\nNothing here ran on a GPU. Method, sources and errors: "
              "dev/gpu_model/README.md")
        print("Checked against what it was not fitted to: whole steps of another trainer 3 to 5 % "
              "too fast,\nattention -16 to +13 %; the clock of an H200 may add up to 17 % to Hopper's"
              " attention kernels.")
        print(f"compiler {self.producer}, sm_90a; written by: make gpu-model")

    def code(self):
        spilled = sum(spills for *_, spills in self.functions)
        print(f"\n== The build: {len(self.functions)} kernels, {spilled} instructions that spill")
        print("   attention's loops; clocks of an SM for a pass of all resident warps: what each "
              "pipe needs,\n   and simulated (1, 2, 3 CTAs on an SM)")
        print(f"   {'kernel':32} {'regs':>4} {'instr':>5} {'mma':>4} | {'tensor':>6} {'exp':>5} "
              f"{'issue':>5} {'shared':>6} | simulated          | / fit")
        for k in self.kernels.values():
            need = simulate.bounds(k.trace, k.warps * len(k.passes))
            mix = collections.Counter(map(sass.base, k.trace))
            print(f"   {k.key():32} {k.registers:4} {len(k.trace):5} "
                  f"{mix['HMMA'] + mix['HGMMA']:4} | {need['tensor']:6.0f} {need['exp']:5.0f} "
                  f"{need['issue']:5.0f} {need['memory']:6.0f} | "
                  f"{' '.join(f'{c:.0f}' for c in k.passes):18} | {k.passes[-1] / k.fit:.0f}")

    def attention_table(self):
        print("\n== Attention, useful TFLOP/s, forward / backward (FlashAttention-3: the same "
              "lists and chip, simulated)")
        print(f"   {'heads':14} {'documents':12} {'sm_80':>11} {'sm_90':>11} {'FA-3':>11}")
        for name, lengths in (("R65", r65()), ("32 x 2048", [2048] * 32),
                              ("128 x 512", [512] * 128), ("8 x 8192", [8192] * 8),
                              ("seed batch", SEED)):
            for m in M135, M17, M8:
                product = 2. * m.D * m.H * attention.pairs(lengths) / 1e12
                theirs = [n * product / step.fa3_seconds(self.fa3[direction, m.D], m, lengths)
                          for n, direction in ((2, "forward"), (5, "backward"))]
                print(f"   {f'{m.H}/{m.Hkv} x {m.D}':14} {name:12} " + " ".join(
                    f"{f'{f:.0f} / {b:.0f}':>11}" for f, b in
                    (self.rates(m, lengths, ""), self.rates(m, lengths), theirs)))

    def workload(self, name, model, lengths, ranks):
        T = sum(lengths)
        ours = step.ours(model, lengths, self.kernels, "_sm90", ranks)
        total, theirs = ours.seconds(T), step.pytorch(model, lengths, self.fa3, ranks)
        light = step.speed_of_light(model, lengths)
        print(f"\n== {name}: {T:,} tokens, {len(lengths)} documents; speed of light "
              f"{light * 1e3:.2f} ms")
        print(f"   {'kernel':46} {'times':>5} {'GB':>7} {'TFLOP':>7} {'floor':>7} {'ms':>8} "
              f"{'%':>5} {'of floor':>8}")
        for op in ours.ops:
            t = op.count * (op.seconds + op.launches * step.GAP)
            print(f"   {op.group + ': ' + op.name:46.46} {op.count:5} "
                  f"{op.count * op.nbytes / 1e9:7.2f} {op.count * op.flop / 1e12:7.2f} "
                  f"{op.count * op.floor() * 1e3:7.2f} {t * 1e3:8.3f} {t / total * 100:5.1f} "
                  f"{op.count * op.floor() / t * 100:7.0f}%")
        a, b = groups(ours), groups(theirs)
        print("   ms by group, ours / PyTorch: " + ", ".join(
            f"{g} {a[g] * 1e3:.2f} / {b[g] * 1e3:.2f}"
            for g in sorted(a, key=a.get, reverse=True)))
        peer = theirs.seconds(T)
        of = (model, lengths, ranks)
        for label, t in (("as the code is, Hopper's kernels", total),
                         ("as the code is, sm_80 kernels", self.seconds(*of, "")),
                         ("Hopper's, small changes", self.seconds(*of, **SMALL)),
                         ("Hopper's, fused epilogues", self.seconds(*of, **FUSED)),
                         ("PyTorch, FlashAttention-3", peer)):
            print(f"   {label:34} {t * 1e3:9.2f} ms {light / t * 100:5.1f} % of the speed of light"
                  f"  {peer / t:5.2f} x PyTorch")

    def targets(self):
        print("\n== Targets and the model")
        print("   now: the code as it is; small, fused: with the changes that "
              "dev/gpu_model/README.md lists")
        print(f"   {'R65 unless said otherwise':52} {'target':>9} {'now':>9} {'small':>9} "
              f"{'fused':>9}  verdict of now")
        for line in self.target_lines():
            self.target(*line)

    def target(self, name, target, now, small=None, fused=None, less=False, note=""):
        form = lambda x: "-" if x is None else f"{x:.4g}"
        verdict = "NOT MODELLED" if now is None else "met" if (
            now <= target if less else now >= target) else "MISSED"
        print(f"   {name:52} {form(target):>9} {form(now):>9} {form(small):>9} {form(fused):>9}  "
              f"{verdict}{'; ' + note if note else ''}")

    def target_lines(self):
        """name, target, figures now, with small changes, with fused epilogues"""
        percent = lambda model, lengths, ranks, path="_sm90": [
            *(round(100 * self.of_light(model, lengths, ranks, path, **o), 1)
              for o in ({}, SMALL, FUSED)), False, self.binds(model, lengths, ranks, path)]
        for m, wanted in ((M135, (340, 305)), (M8, (475, 315))):
            for n, direction in enumerate(("forward", "backward")):
                rate = round(self.rates(m, r65())[n])
                names = [k for k, d in self.kernels if d == m.D and direction in k and "sm90" in k]
                yield (f"attention hd{m.D} {direction}, TFLOP/s", wanted[n], rate, None, None,
                       False, "; ".join(self.pipe(k, m.D) for k in names))
        for m in M135, M8:
            yield (f"deterministic backward hd{m.D} costs, %", 10, round(100 * (
                self.attention(m, r65())[1] /
                step.fa3_seconds(self.fa3["backward", m.D], m, r65()) - 1), 1),
                   None, None, True, "against FlashAttention-3's, whose order is not fixed")
        yield ("135M step, % of SOL, sm_80 kernels", 40, *percent(M135, r65(), 1, ""))
        yield ("135M step, % of SOL, Hopper's kernels", 44, *percent(M135, r65(), 1))
        yield ("135M step, % of SOL, fused (stretch)", 48, *percent(M135, r65(), 1))
        yield ("360M step, % of SOL", 50, *percent(M360, r65(), 1))
        yield ("1.7B step, % of SOL", 62, *percent(M17, r65(), 1))
        yield ("8B step on 8 ranks, 16,384 tokens each, % of SOL", 68,
               *percent(M8, r65(24, 16384), 8))
        for graph in False, True:
            yield (f"seed batch, packed step{', --cuda-graph' if graph else ''}, ms", 6, *[
                round(1e3 * self.seconds(M135, SEED, graph=graph, **o), 2)
                for o in ({}, SMALL, FUSED)], True, self.binds(M135, SEED))
        for m, lengths in ((M135, r65()), (M360, r65()), (M17, r65()), (M8, r65(24, 16384))):
            ranks = 8 if m is M8 else 1
            peer = self.pytorch(m, lengths, ranks)
            yield (f"{m.name}: against PyTorch with FlashAttention-3", 1.1, *[
                round(peer / self.seconds(m, lengths, ranks, **o), 2) for o in ({}, SMALL, FUSED)],
                   False, "stretch 1.2")
        yield ("equal-length tax, %", 5, None, None, None, True,
               "packed and padded rows of one length are the same list")
        empty = r65() + [0] * 128
        for path, label in (("", "sm_80"), ("_sm90", "Hopper's")):
            cost = sum(self.attention(M135, empty, path)) / sum(self.attention(M135, r65(), path))
            yield (f"128 empty documents, {label} kernels, % of attention", 0,
                   round(100 * (cost - 1), 2), None, None, True)
        short, padded = [32] * 2048, [64] * 2048
        yield ("documents of 32 tokens against rows padded to 64", 1.5, round(
            sum(self.attention(M135, short)) / sum(step.fa3_seconds(
                self.fa3[d, 64], M135, padded) for d in ("forward", "backward")), 2),
               None, None, True, "attention; padded rows by FlashAttention-3")

    def figures(self):
        print("\n== Figures that --check compares, in microseconds")
        for name, seconds in self.compared().items():
            print(f"   {seconds * 1e6:12.2f}  {name}")

    def write(self):
        self.head()
        self.targets()
        self.code()
        self.attention_table()
        for workload in WORKLOADS:
            self.workload(*workload)
        self.figures()


def check(report, path):
    """Faults of the build, one line each; prints how the predictions moved."""
    faults = [f"{name}: {spills} instructions and {stack} bytes of stack for spilled registers"
              for name, _, stack, spills in report.functions if spills or stack]
    with open(path) as f:
        text = f.read()
    before = {name: float(us) * 1e-6 for us, name in re.findall(r"^ +([0-9.]+)  (\S.*)$", text,
                                                                re.M)}
    version = re.search(r"^compiler ([^,]+),", text, re.M)
    if not version or version.group(1) != report.producer:
        print(f"times are not compared: {path} is of compiler {version and version.group(1)}, this "
              f"build of {report.producer}")
        return faults
    now = report.compared()
    for name in sorted(before.keys() ^ now.keys()):
        faults.append(f"{name}: only in {path if name in before else 'this build'}; "
                      "run make gpu-model")
    ratios = {name: now[name] / before[name] for name in before.keys() & now.keys()}
    for name, ratio in ratios.items():
        if ratio > SLOWER:
            faults.append(f"{name}: predicted {now[name] * 1e6:.1f} us, {ratio - 1:.1%} slower "
                          f"than {path} says")
    print(f"{len(ratios)} predictions, from {min(ratios.values(), default=1) - 1:+.1%} to "
          f"{max(ratios.values(), default=1) - 1:+.1%} against {path}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", metavar="REPORT")
    parser.add_argument("cubin", nargs="+")
    args = parser.parse_args()
    report = Report(*read_build(args.cubin))
    if not args.check:
        return report.write()
    faults = check(report, args.check)
    for fault in faults:
        print("error: " + fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
