#!/usr/bin/env python3
"""Extracts functions and methods from the Python files in a directory, one document each, as JSON Lines:
python_functions.py SOURCES... DIR writes DIR/train.jsonl and DIR/val.jsonl (3 %, chosen by content).

Functions in bytes are about as short as web pages in subword tokens; whole source files are mostly longer
than a row, so that packing them would save little padding."""
import ast
import hashlib
import json
import os
import sys
import warnings

VAL_SHARE = 0.03


def python_files(directory):
    """Files in order of path, without hidden ones."""
    found = []
    for here, dirs, names in os.walk(directory):
        dirs[:] = [d for d in dirs if not d.startswith(".") and d != "__pycache__"]
        found += [os.path.join(here, n) for n in names if n.endswith(".py") and n[0] != "."]
    return sorted(found, key=lambda path: os.fsencode(os.path.relpath(path, directory)))


def functions(source):
    """Functions with their decorators; none if the file does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the source, such as "\\d" in a plain string
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.splitlines(keepends=True)
    for node in body:
        for f in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([f.lineno] + [d.lineno for d in f.decorator_list])
                yield b"".join(lines[first - 1:f.end_lineno]).decode("utf-8", "replace")


def is_validation(text):
    """Decides by content, so that copies of a function are on the same side."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2.0**64 < VAL_SHARE


def main(directories, out):
    os.makedirs(out, exist_ok=True)
    train, val = (open(os.path.join(out, name), "w") for name in ("train.jsonl", "val.jsonl"))
    for path in (path for directory in directories for path in python_files(directory)):
        with open(path, "rb") as f:
            source = f.read()
        for text in functions(source):
            (val if is_validation(text) else train).write(json.dumps({"text": text}) + "\n")
    train.close()
    val.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("error: expected SOURCES... DIR\nhint: python_functions.py /usr/lib/python3 data/demo")
    main(sys.argv[1:-1], sys.argv[-1])
