#!/usr/bin/env python3
"""Fails when an include points up or sideways, or when units need each other in a circle.

A room is a folder of the product, or one of the two files that stand alone. A room may include
headers of the rooms listed below it, and nothing else. A unit is x.c (or x.cu) with its x.h: it
needs the units that it includes, and those that define a function that it names.
"""
import collections
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
# A unit of one backend calls no function of the other.
BACKENDS = {"kernels/cpu": "cpu", "kernels/comm/cpu": "cpu", "kernels/cuda": "cuda", "kernels/comm/nccl": "cuda"}
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|__attribute__\(\((?:[^()]|\([^()]*\))*\)\)\s*', re.S)
# In column 0: a declaration, which ends with ";", or a definition, whose body begins with "{"
FUNCTION = re.compile(r"^(?!static\b|typedef\b|#)\w[^;{}#]*?\b(\w+)\([^;{}]*?([;{])", re.M)
# The functions of the contract belong to no unit of a backend. The units of cuda count as one.
CONTRACT, ONE_UNIT = "kernels/kernels.h", "kernels/cuda/"
code, needs = {}, collections.defaultdict(lambda: collections.defaultdict(set))  # unit: unit: names
declared, owners, wrong = set(), collections.defaultdict(set), []


def unit(path):
    return os.path.dirname(path) if path.startswith(ONE_UNIT) else os.path.splitext(path)[0]


def backend(u):
    return next((name for place, name in BACKENDS.items() if u.startswith(place)), None)


for room, below in ROOMS.items():
    files = [room] if os.path.isfile(room) else glob.glob(room + "/*.[ch]*")
    if not files:
        wrong.append(room + " has no files")
    for path in files:
        text = open(path, encoding="utf-8").read()
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M):
            target = os.path.normpath(os.path.join(os.path.dirname(path), name))
            needs[unit(path)][unit(target)].add("#include")
            other = target if target in ROOMS else os.path.dirname(target)
            if other not in (room, *below.split()) or other != room and not target.endswith((".h", ".cuh")):
                wrong.append(f"{path}: {room} may not include {target}")
        text = NOT_CODE.sub("", text)
        for name, end in FUNCTION.findall(text):
            declared.update([name] if end == ";" and path != CONTRACT else [])
            owners[name].update([unit(path)] if end == "{" else [])
        code[path] = FUNCTION.sub(lambda m: "" if m[2] == ";" else m[0], text)
for path, text in code.items():
    for name in set(re.findall(r"\b\w+\b", text)) & declared & owners.keys():
        for owner in owners[name] if unit(path) not in owners[name] else ():
            if not backend(unit(path)) or backend(owner) in (None, backend(unit(path))):
                needs[unit(path)][owner].add(name)
print("\n".join(wrong))
try:
    for u in needs:
        needs[u].pop(u, None)
    graphlib.TopologicalSorter(needs).prepare()
except graphlib.CycleError as e:
    circle = e.args[1][::-1]  # each needs the next
    print("units need each other in a circle:")
    for u, v in zip(circle, circle[1:]):
        print(f"    {u} -> {v}: {', '.join(sorted(needs[u][v]))}")
    wrong.append("circle")
sys.exit(len(wrong) > 0)
