"""Readers of the files of runs, for tests.

    runs.py LOSS_BOUND NORM_BOUND LINES RUN...   the logs of all runs have the steps, documents, losses and
                                                 gradient norms of the first run's, these within relative
                                                 bounds, on at least so many lines
"""
import json
import struct
import sys


def log(run):
    return [json.loads(line) for line in open(run + "/log.jsonl")]


def steps(run):
    return [record for record in log(run) if "event" not in record]


def events(run, name):
    return [record for record in log(run) if record.get("event") == name]


def tensors(path):
    """{name: [dtype, shape, bytes]} of a safetensors file"""
    data = open(path, "rb").read()
    begin = 8 + struct.unpack_from("<Q", data)[0]
    return {name: [t["dtype"], t["shape"], data[begin + t["data_offsets"][0]:begin + t["data_offsets"][1]]]
            for name, t in json.loads(data[8:begin]).items() if name != "__metadata__"}


def put_tensors(path, tensors):
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + body)


def compare(loss_bound, norm_bound, lines, *names):
    loss_bound, norm_bound = float(loss_bound), float(norm_bound)
    runs = [[line for line in log(run) if "loss" in line] for run in names]
    assert len(runs) > 1 and len(runs[0]) >= int(lines), runs[0]
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            assert a["step"] == b["step"] and a.get("docs") == b.get("docs"), (a, b)
            assert abs(a["loss"] - b["loss"]) <= loss_bound * abs(a["loss"]), (a, b)
            if "grad_norm" in a and norm_bound < 1:
                assert abs(a["grad_norm"] - b["grad_norm"]) <= norm_bound * a["grad_norm"], (a, b)


if __name__ == "__main__":
    compare(*sys.argv[1:])
