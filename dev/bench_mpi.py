#!/usr/bin/env python3
"""Prints the tables of dev/bench_mpi.sh from the logs of its runs: bench_mpi.py DIRECTORY RUNS"""
import json
import statistics
import sys

directory, runs = sys.argv[1], int(sys.argv[2])


def steps(name):
    """The steps of all runs without their first step"""
    found = []
    for run in range(1, runs + 1):
        with open(f"{directory}/{name}.{run}.jsonl") as log:
            found += [s for s in map(json.loads, log) if "loss" in s and "event" not in s][1:]
    return found


def median(found, key):
    return statistics.median(s[key] for s in found)


one = steps("one")
print(f"{'':26s} {'step ms':>9s} {'tok/s':>8s} {'of 1 x 2':>9s}   imbalance: predicted  measured")
for name, title in (("one", "1 rank x 2 threads"), ("calibrated", "2 ranks, calibrated costs"),
                    ("default", "2 ranks, default costs"), ("deterministic", "2 ranks, deterministic"),
                    ("arrival", "2 ranks, arrival order")):
    found = steps(name)
    line = (f"{title:26s} {median(found, 'ms'):9.1f} {median(found, 'tokens_per_s'):8.0f} "
            f"{median(found, 'tokens_per_s') / median(one, 'tokens_per_s'):9.3f}")
    if name != "one":
        predicted = "-"
        if "imbalance_planned" in found[0]:
            predicted = f"{median(found, 'imbalance_planned'):.3f}"
        line += f" {predicted:>22s} {median(found, 'imbalance_measured'):9.3f}"
    print(line)
    same = [(a["step"], a["docs"], a["real_tokens"]) == (b["step"], b["docs"], b["real_tokens"])
            for a, b in zip(one, found)]
    if not all(same) or len(one) != len(found):
        print(f"  (not the same documents in {len(same) - sum(same)} of {len(same)} steps)")
print("imbalance: slower rank's time / mean, medians; ranks wait for 1 - 1 / imbalance of the step")
