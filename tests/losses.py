"""losses.py LOSS_BOUND NORM_BOUND LINES RUN...: the logs of all runs have the steps, documents, losses and
gradient norms of the first run's, these within relative bounds, on at least so many lines."""
import json
import sys

loss_bound, norm_bound, lines = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
runs = [[line for line in map(json.loads, open(run + "/log.jsonl")) if "loss" in line] for run in sys.argv[4:]]
assert len(runs) > 1 and len(runs[0]) >= lines, runs[0]
for run in runs[1:]:
    for a, b in zip(runs[0], run, strict=True):
        assert a["step"] == b["step"] and a.get("docs") == b.get("docs"), (a, b)
        assert abs(a["loss"] - b["loss"]) <= loss_bound * abs(a["loss"]), (a, b)
        if "grad_norm" in a and norm_bound < 1:
            assert abs(a["grad_norm"] - b["grad_norm"]) <= norm_bound * a["grad_norm"], (a, b)
