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
import warnings

from command import BAD_INPUT, Parser, fail, run_main, write

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


def main():
    parser, lines = Parser(), ([], [])
    parser.add_argument("sources", nargs="+", metavar="SOURCES")
    parser.add_argument("out", metavar="DIR")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # about the sources, such as "\\d" in a plain string
    for directory in args.sources:  # without hidden files
        found = glob.glob(glob.escape(directory) + "/**/*.py", recursive=True)
        for path in sorted(found, key=os.fsencode):
            with open(path, "rb") as f:
                for text in functions(f.read()):
                    lines[is_validation(text)].append(json.dumps({"text": text}) + "\n")
    if not any(lines):
        fail(BAD_INPUT, "%s: expected Python files with functions, found none" % args.sources[0],
             "python_functions.py /usr/lib/python3 data/demo")
    os.makedirs(args.out, exist_ok=True)
    for name, found in zip(("train", "val"), lines):
        write(os.path.join(args.out, name + ".jsonl"), found)


if __name__ == "__main__":
    run_main(main)
