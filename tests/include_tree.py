#!/usr/bin/env python3
"""Fails when an include points up, sideways or in a cycle.

usage: include_tree.py [ROOT]
A room is a folder of the product, or one of the two files that stand alone. A room may include
headers of the rooms listed below it, and nothing else.
"""
import graphlib
import os
import re
import sys

# From the top down: each room with the rooms that it may include
ROOMS = {
    "train_llama.cu": "llama.h kernels kernels/comm data/texts data/runs data/batches data/models data/shards data/base",
    "llama.h": "kernels kernels/comm data/batches data/models data/base",
    "data/texts": "data/runs data/models data/shards data/base",
    "data/runs": "data/batches data/models data/shards data/base",
    "data/batches": "data/shards data/base",
    "data/models": "data/base",
    "data/shards": "data/base",
    "kernels/cuda": "kernels kernels/comm data/base",
    "kernels/cpu": "kernels kernels/comm data/base",
    "kernels/comm": "kernels data/base",
    "kernels": "",
    "data/base": "",
}
ROOMS = {room: below.split() for room, below in ROOMS.items()}


def sources(root):
    for room in ROOMS:
        path = os.path.join(root, room)
        if os.path.isfile(path):
            yield room, room
        elif os.path.isdir(path):
            for name in sorted(os.listdir(path)):
                if name.endswith((".c", ".h", ".cu", ".cuh")):
                    yield room, f"{room}/{name}"


def room_of(path):
    return path if path in ROOMS else os.path.dirname(path)


def includes(root, path):
    """(line number, file included) of every quoted include, from the root of the repository"""
    with open(os.path.join(root, path), encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            found = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if found:
                yield number, os.path.normpath(os.path.join(os.path.dirname(path), found.group(1)))


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else "."
    graph, wrong = {}, []
    for room, path in sources(root):
        graph[path] = []
        for number, target in includes(root, path):
            below = room_of(target)
            graph[path].append(target)
            if below != room and below not in ROOMS[room]:
                wrong.append(f"{path}:{number}: {room} may not include {target}")
            elif not os.path.isfile(os.path.join(root, target)):
                wrong.append(f"{path}:{number}: {target} does not exist")
            elif below != room and not target.endswith((".h", ".cuh")):
                wrong.append(f"{path}:{number}: {target} is not a header")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as e:
        wrong.append("cycle: " + " -> ".join(e.args[1]))
    print("\n".join(wrong))
    return 1 if wrong else 0


sys.exit(main())
