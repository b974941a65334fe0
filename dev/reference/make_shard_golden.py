#!/usr/bin/env python3
"""Makes tests/golden/shards: small shards, each written by the trainer whose format it is.

    pip install datatrove==0.10.1 numpy                     # datatrove, numpy
    pip install megatron-core==0.16.1 torch packaging       # megatron
    pip download dolma==1.2.1, unpacked; smart_open         # olmo
    git clone https://github.com/karpathy/llm.c             # llm.c
    git clone https://github.com/KellerJordan/modded-nanogpt
    git clone https://github.com/IST-DASLab/llmq
    python3 dev/reference/make_shard_golden.py NAME [CHECKOUT]

NAME is one of the functions below, CHECKOUT the directory of its clone. tests/test_documents.c
knows the documents: token j of document i is 100 * i + j + 1, but for the first one (BEGIN) or the
last one (END).
"""
import ast
import contextlib
import os
import pathlib
import sys
import types

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "shards"
LENGTHS = [4, 1, 9, 2, 6]


def documents(begin=None, end=None):
    docs = [[100 * i + j + 1 for j in range(n)] for i, n in enumerate(LENGTHS)]
    for doc in docs:
        if begin is not None:
            doc[0] = begin
        if end is not None:
            doc[-1] = end
    return docs


def flat(docs):
    return [token for doc in docs for token in doc]


def stand_in(*names):
    """Modules that a script imports for what is not used here."""
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].tqdm = sys.modules[name].AutoTokenizer = None


def part(path, name):
    """One function or class of a script that does its work when it is imported."""
    import numpy
    tree = ast.parse(pathlib.Path(path).read_text())
    keep = [node for node in tree.body if getattr(node, "name", "") == name]
    found = {"np": numpy, "Optional": __import__("typing").Optional}
    exec(compile(ast.Module(keep, []), path, "exec"), found)
    return found[name]


def llmc(checkout):
    stand_in("requests", "tqdm")
    sys.path.insert(0, os.path.join(checkout, "dev", "data"))
    from data_common import write_datafile, write_evalfile
    write_datafile(OUT / "llmc_v1.bin", flat(documents(begin=50256)), "gpt-2")
    write_datafile(OUT / "llmc_v7.bin", flat(documents(begin=128000)), "llama-3")
    write_evalfile(OUT / "llmc_eval.bin",
                   [{"label": 1, "ctx_tokens": [1, 2], "ending_tokens": [[3], [4], [5], [6]]}])


def modded(checkout):
    write = part(os.path.join(checkout, "data", "fineweb.py"), "write_datafile")
    write(OUT / "fineweb_train_000001.bin", flat(documents(begin=50256)))


def llmq(checkout):
    writer = part(os.path.join(checkout, "scripts", "tokenize_data.py"), "TokenizedDataFileWriter")
    import numpy
    with writer(OUT / "llmq.bin", 50257) as f:
        for doc in documents(end=50256):
            f.add_document(numpy.array(doc))
    with writer(OUT / "llmq_mask.bin", 50257, masking=True) as f:  # the answer: the second half
        for doc in documents(end=50256):
            answer = [j >= len(doc) // 2 for j in range(len(doc))]
            pad = (0, 7 - len(doc) if len(doc) < 7 else 0)
            f.add_document(numpy.pad(doc, pad), numpy.pad(numpy.array(answer), pad))


def datatrove(_):
    import numpy
    from datatrove.io import get_datafolder
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    for name, size, loss in (("datatrove", 2, False), ("datatrove_wide", 4, True)):
        f = TokenizedFile(get_datafolder(str(OUT)), name + ".ds", save_index=True,
                          save_loss_metadata=loss, save_final_metadata=False, token_size=size)
        for doc in documents(end=70000 if size == 4 else 50256):
            mask = numpy.array([j >= len(doc) // 2 for j in range(len(doc))])
            f.write(doc, mask if loss else None)
        f.close()


def megatron(_):
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    for name, vocab in (("megatron", 50257), ("megatron_wide", 128256)):
        builder = IndexedDatasetBuilder(str(OUT / (name + ".bin")), DType.optimal_dtype(vocab))
        for doc in documents(end=vocab - 1):
            half = len(doc) // 2  # two sequences a document, where there are two tokens
            for sequence in (doc[:half], doc[half:]):
                if sequence:
                    builder.add_item(torch.tensor(sequence))
            builder.end_document()
        builder.finalize(str(OUT / (name + ".idx")))


def olmo(checkout):
    import logging
    import numpy
    stand_in("dolma", "dolma.tokenizer", "dolma.core", "dolma.core.loggers")
    sys.modules["dolma.core.loggers"].get_logger = logging.getLogger
    for name in ("tokenizer", "core"):
        sys.modules["dolma." + name].__path__ = [os.path.join(checkout, "dolma", name)]
    from dolma.tokenizer.data_types import TokenizerOutput
    from dolma.tokenizer.memmap_writer import MemmapWriter
    for name, dtype, end in (("olmo", numpy.uint16, 50279), ("olmo_wide", numpy.uint32, 100257)):
        with MemmapWriter(str(OUT / name), dtype, max_tokens=1000) as f:
            for i, doc in enumerate(documents(end=end)):
                f.write(TokenizerOutput(id='a "quoted",\n id %d' % i, src="texts/a,b.jsonl", loc=i,
                                        tokens=doc, start=0, end=len(doc)))


def numpy(_):
    import numpy as np
    np.save(OUT / "numpy.npy", np.array(flat(documents(end=50256)), dtype=np.uint16))
    np.save(OUT / "numpy_2d.npy", np.zeros((2, 3), dtype=np.uint16))


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(OUT):
        globals()[sys.argv[1]](*(sys.argv[2:] or [None]))
