#!/usr/bin/env python3
"""Extracts functions and methods from the Python files in a directory, one document each, as JSON
Lines: python_functions.py SOURCES... DIR writes DIR/train.jsonl and DIR/val.jsonl (3 %, chosen by
content).

Functions in bytes are about as short as web pages in subword tokens; whole source files are mostly
longer than a row, so that packing them would save little padding."""
import ast
import glob
import hashlib
import json
import os
import sys
import warnings

VAL_SHARE = 0.03


def functions(source):
    """Functions with their decorators; none if the file does not parse."""
    try:
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
    warnings.simplefilter("ignore")  # about the sources, such as "\\d" in a plain string
    os.makedirs(out, exist_ok=True)
    train, val = (open(os.path.join(out, name), "w") for name in ("train.jsonl", "val.jsonl"))
    for directory in directories:  # without hidden files
        found = glob.glob(glob.escape(directory) + "/**/*.py", recursive=True)
        for path in sorted(found, key=os.fsencode):
            with open(path, "rb") as f:
                for text in functions(f.read()):
                    (val if is_validation(text) else train).write(json.dumps({"text": text}) + "\n")
    train.close()
    val.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("error: expected SOURCES... DIR\n"
                 "hint: python_functions.py /usr/lib/python3 data/demo")
    main(sys.argv[1:-1], sys.argv[-1])
