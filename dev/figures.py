#!/usr/bin/env python3
"""Measures again what README.md quotes, on an idle machine, and prints the texts to quote.

    dev/figures.py                  every part, about an hour on two cores; or make figures
    dev/figures.py speed scaling    these parts; quickstart replaces out/demo
    dev/figures.py --quote          only prints, from the newest records

dev/results/figures-DATE/PART.txt gets each command and what it printed. tests/test_house.sh holds
README.md to the newest of them. The peers need torch and transformers, the charts matplotlib.
"""
import datetime
import re
import statistics
import subprocess
import sys

from bench import ROOT, Record, parse_compare

RESULTS = ROOT / "dev/results"
SMOLLM2 = "--model smollm2-135m --vocab 49152"
LENGTHS = {"chats": "--dist chat", "short texts": "--dist short", "web pages": "--dist r65 --cap 2048",
           "long texts": "--dist long --cap 4096", "equal lengths": "--lengths 32x512",
           "one document": "--lengths 4x4096"}
PREFIXES = [64, 128, 192, 256, 512, 1024, 1920]
STEP = "-- --micro-batch-tokens 4096 --batch-tokens 16384"
PARTS = {
    "quickstart": ["scripts/quickstart.sh"],
    "speed": ["dev/peers.py --model smollm2-135m --compile --warmup 1 --steps 3",
              f"dev/bench.py {SMOLLM2} --row-len 350 --steps 3",
              "dev/peers.py --compile --modes packed padded",
              "dev/peers.py --compile --modes packed padded --lengths 4096",
              "dev/peers.py --modes packed padded --dist short --tokens 8192"],
    "scaling": [f"dev/bench.py {given} --tokens 16384 --steps 3 {STEP}" for given in LENGTHS.values()],
    "shared": [f"dev/bench.py --lengths 16x{n + 100} --prefix {n} --steps 3" for n in PREFIXES],
    "published": [f"dev/bench.py {SMOLLM2} --row-len 2048 --steps 1",
                  "dev/bench.py --lengths 64x512 --row-len 2048 --steps 3",
                  "dev/bench.py --lengths 64x512 --steps 3 -- --max-seqlen 4096 --micro-batch-tokens 4096",
                  f"dev/bench.py {SMOLLM2} --write build/figures",
                  "./train_llama --model smollm2-135m --train build/figures --boundary-token 0 --max-seqlen 350 "
                  "--micro-batch-tokens 1395 --check-packing"],
}


def measure(part):
    folder = RESULTS / f"figures-{datetime.date.today()}"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{part}.partial", "w") as record:
        record.write("\n".join(Record(part).lines) + "\n")
        for command in PARTS[part]:
            print(f"=== {command}", flush=True)
            record.write(f"=== {command}\n")
            record.flush()
            subprocess.run(command.split(), cwd=ROOT, stdout=record, check=True)
    (folder / f"{part}.partial").rename(folder / f"{part}.txt")


def newest(part):
    return sorted(RESULTS.glob(f"figures-*/{part}.txt"))[-1]


def outputs(part):
    """The output of each command in the newest record of a part"""
    return re.split(r"^=== .*\n", newest(part).read_text(), flags=re.M)[1:]


def rates(text):
    """The table of dev/peers.py: {mode: tokens/s}"""
    return {mode: float(rate.replace(",", ""))
            for mode, rate in re.findall(r"^(\S+(?: compiled)?) +[\d.]+ \[\S+\] +([\d,]+)$", text, re.M)}


def scaling():
    """{kind of documents: table of the layouts}"""
    return dict(zip(LENGTHS, map(parse_compare, outputs("scaling"))))


def quotes():
    """Texts that README.md must have"""
    log = outputs("quickstart")[0]
    yield re.search(r"^model   .*", log, re.M)[0]
    yield from re.findall(r"^val after step (?:0|300) .*", log, re.M)
    yield from re.findall(r"^step +(?:1|300)/300 .*?norm [\d.]+", log, re.M)
    yield from re.search(r"^layout .*\n(?:\w+ +[\d.]+ .*\n)+", log, re.M)[0].splitlines()
    times = {kind: table["padded"]["ms"] / table["packed"]["ms"] for kind, table in scaling().items()}
    yield "Step time, padded divided by packed: " + ", ".join(
        f"{kind} {ratio:.2f}" for kind, ratio in sorted(times.items(), key=lambda item: -item[1]))
    grouped = [t["grouped"]["ms"] / t["packed"]["ms"] for t in scaling().values() if t["padded"]["padding"] > 10]
    yield f"{statistics.median(grouped):.1f}x as long as packed"
    rate = rates(outputs("speed")[0])
    yield f"{rate['ours'] / rate['packed compiled']:.1f}x as fast as PyTorch with packing"
    yield f"{rate['ours'] / rate['padded compiled']:.1f}x as fast as compiled PyTorch with padding"


if __name__ == "__main__":
    if sys.argv[1:] != ["--quote"]:
        for part in sys.argv[1:] or PARTS:
            measure(part)
        subprocess.run([sys.executable, ROOT / "dev/charts.py"], check=True)
    print(*quotes(), sep="\n")
