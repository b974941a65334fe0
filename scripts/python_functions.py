#!/usr/bin/env python3
"""Extracts functions and methods from the Python files in a directory, one document each, as JSON Lines:
python_functions.py SOURCES... DIR writes DIR/train.jsonl.

Functions in bytes are about as short as web pages in subword tokens; whole source files are mostly longer
than a row, so that packing them would save little padding."""
import ast
import glob
import json
import os
import sys
import warnings


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


def main(directories, out):
    warnings.simplefilter("ignore")  # about the sources, such as "\\d" in a plain string
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "train.jsonl"), "w") as train:
        for directory in directories:  # without hidden files
            found = glob.glob(glob.escape(directory) + "/**/*.py", recursive=True)
            for path in sorted(found, key=os.fsencode):
                with open(path, "rb") as f:
                    train.writelines(json.dumps({"text": t}) + "\n" for t in functions(f.read()))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("error: expected SOURCES... DIR\nhint: python_functions.py /usr/lib/python3 data/demo")
    main(sys.argv[1:-1], sys.argv[-1])
