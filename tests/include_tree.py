#!/usr/bin/env python3
"""Fails when an include points up, sideways or in a cycle.

A room is a folder of the product, or one of the two files that stand alone. A room may include
headers of the rooms listed below it, and nothing else.
"""
import glob
import graphlib
import os
import re
import sys

# From the top down: each room with the rooms that it may include
ROOMS = {
    "train_llama.cu": "llama.h kernels kernels/comm data/texts data/use data/runs data/batches data/models data/shards data/base",
    "llama.h": "kernels kernels/comm data/use data/batches data/models data/base",
    "data/texts": "data/runs data/models data/shards data/base",
    "data/use": "data/runs data/batches data/models data/shards data/base",
    "data/runs": "data/batches data/models data/shards data/base",
    "data/batches": "data/shards data/base",
    "data/models": "data/base",
    "data/shards": "data/base",
    "kernels/cuda": "kernels kernels/comm data/base",
    "kernels/cpu": "kernels kernels/comm data/base",
    "kernels/comm": "kernels data/base",
    "kernels": "data/base",
    "data/base": "",
}
graph, wrong = {}, []
for room, below in ROOMS.items():
    files = [room] if os.path.isfile(room) else glob.glob(room + "/*.[ch]*")
    if not files:
        wrong.append(room + " has no files")
    for path in files:
        with open(path, encoding="utf-8") as f:
            names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', f.read(), re.M)
        graph[path] = [os.path.normpath(os.path.join(os.path.dirname(path), name)) for name in names]
        for target in graph[path]:
            other = target if target in ROOMS else os.path.dirname(target)
            if other not in (room, *below.split()) or other != room and not target.endswith((".h", ".cuh")):
                wrong.append(f"{path}: {room} may not include {target}")
print("\n".join(wrong))
graphlib.TopologicalSorter(graph).prepare()  # else a CycleError, with the files
units = {}  # of what a run writes, x.c and x.h as one
for path, targets in graph.items():
    if path.startswith("data/runs/"):
        unit = os.path.splitext(path)[0]
        units.setdefault(unit, set()).update({os.path.splitext(t)[0] for t in targets} - {unit})
graphlib.TopologicalSorter(units).prepare()
sys.exit(len(wrong) > 0)
