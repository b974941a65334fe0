#!/usr/bin/env python3
"""Shows which documents a run (--ledger) still learns, and which contradict the rest or are junk.

    ledger.py RUN                                   prints them, and writes RUN/ledger.html
    ledger.py RUN --drop 0.05 --out weights.jsonl   the records that RUN was trained on, of which those
                                                    of the largest `above` have "weight": 0

`above` is how far the loss of a document, per target, lies above that of its step, so that documents of
early and of late steps can be compared. Of several epochs it is the mean.
"""
import json
import os
import re
import struct
from array import array
from collections import defaultdict
from functools import lru_cache
from html import escape
from operator import add

from command import BAD_INPUT, Parser, crc32c, fail, run_main, write
from report import chart_svg, parse_record, short, table, whole_page


def blocks(path):
    """(kind, step, [(document, first token, loss, weight, tokens, targets, epoch, source)])"""
    try:
        file = open(path, "rb")
    except OSError as e:
        fail(BAD_INPUT, f"{path}: cannot read: {e.strerror}", "train with --ledger")
    with file:
        while head := file.read(32):
            magic, version, kind, step, n = struct.unpack("<8sIIqQ", head.ljust(32))
            known = magic == b"UNPADLGR" and version == 1 and 48 * n < os.path.getsize(path)
            data = head + file.read(48 * n + 4) if known else head
            if not known or crc32c(data[:-4]) != data[-4:]:
                fail(BAD_INPUT, f"{path}: expected whole blocks, found another after step {step}",
                     "--resume keeps what is before it")
            yield kind, step, struct.iter_unpack("<qqddIIII", data[32:-4])


def read(path):
    """{document: [(loss, above, targets, tokens, source) of an epoch]}, [(step, loss, 95 %)]"""
    sums, curve, documents = {}, [], defaultdict(list)
    for kind, step, entries in blocks(path):
        entries = [e for e in entries if e[3] > 0]
        if kind == 1 or not entries:  # validation
            continue
        mean = sum(e[2] for e in entries) / sum(e[3] for e in entries)
        curve.append((step, mean, sorted(e[2] / e[3] for e in entries)[len(entries) * 95 // 100]))
        for doc, _, loss, weight, tokens, targets, epoch, source in entries:
            new = loss, loss - mean * weight, weight, targets, tokens
            sums[doc, epoch] = (*map(add, sums.get((doc, epoch), [0] * 5), new), source)
    for (doc, _), (loss, above, weight, *rest) in sorted(sums.items()):
        documents[doc].append((loss / weight, above / weight, *rest))
    if not documents:
        fail(BAD_INPUT, f"{path}: expected documents with targets, found none", "train a step")
    return documents, curve


def score(epochs):
    return sum(e[1] for e in epochs) / len(epochs)


# -------------------------------------------------------------------------------------------------
# The texts of documents

def origins(run, sources):
    """{document: (file, record)}, where it is known: shards of other programs end it."""
    found, file = [], None
    for path in sources:
        path = path if os.path.isdir(path) else os.path.join(run, os.path.basename(path))
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        indexes = [open(os.path.join(path, n), "rb").read() for n in names
                   if re.match(r"train_.*\.idx$", n)]
        if "origins" in names:
            for line in open(os.path.join(path, "origins"), encoding="utf-8"):
                split, _, record = line.partition(" ")
                if line.startswith("{"):
                    file = json.loads(line)["file"]
                elif split == "train":
                    found.append((file, int(record)))
        elif not indexes:
            break
        else:
            for index in indexes:
                ends = array("Q", index[40:40 + 8 * struct.unpack_from("<Q", index, 16)[0]])
                found += [None] * sum(a < b for a, b in zip([0, *ends], ends))
    return {doc: origin for doc, origin in enumerate(found) if origin}


@lru_cache(None)
def records_of(path):
    """Its records, as lines; a text is one"""
    try:
        text = open(path, encoding="utf-8-sig", errors="replace").read()
        if path.endswith(".json") and text.lstrip().startswith("["):
            return [json.dumps(record, ensure_ascii=False) for record in json.loads(text)]
    except (OSError, ValueError) as e:
        fail(BAD_INPUT, f"{path}: cannot read: {e}", "ledger.py needs the texts of the run")
    return text.split("\n") if path.endswith(("l", "json")) else [json.dumps({"text": text})]


def describe(path, number):
    record = records_of(path)[number - (number > 0)] if os.path.exists(path) else ""
    texts = re.findall(r'": "((?:[^"\\]|\\.)*)"', record) or [record]
    return f"{path}:{number}" if number else path, texts[-1][:120]


def drop(documents, found, share, out):
    """Writes all records; those of the share with the largest `above` get weight 0."""
    known = [doc for doc in documents if doc in found]
    if len(known) < len(documents):
        fail(BAD_INPUT, f"expected the records of {len(documents)} documents, found {len(known)}",
             "--drop works on texts: train on JSON Lines with --ledger")
    worst = sorted(known, key=lambda doc: -score(documents[doc]))[:round(share * len(known))]
    dropped = {found[doc] for doc in worst}
    lines = []
    for path in dict.fromkeys(path for path, _ in found.values()):
        records = records_of(path)
        for number, line in enumerate(records, 1):
            if {(path, number), (path, 0) if len(records) == 1 else None} & dropped:
                line = json.dumps({**json.loads(line), "weight": 0}, ensure_ascii=False)
            lines.append(line + "\n" if line.strip() else "")
    write(out, lines)
    print(f"wrote {out}: {sum(map(bool, lines))} records, {len(dropped)} with weight 0" + (
        f", whose loss was {score(documents[worst[-1]]):.3f} or more above that of their steps"
        if worst else ""))


# -------------------------------------------------------------------------------------------------
# The page

def sections(documents, sources, found, top):
    """[(title, [(number, text)])]"""
    order = sorted(documents, key=lambda doc: (-score(documents[doc]), doc))
    rise = {doc: e[-1][0] - e[0][0] for doc, e in documents.items() if e[-1][0] > e[0][0]}
    rising = sorted(rise, key=lambda doc: (-rise[doc], doc))
    for title, docs in (("highest loss above that of their steps", order), ("lowest", order[::-1]),
                        ("rising from epoch to epoch", rising)):
        rows = []
        for doc in docs[:top]:
            name, text = describe(*found[doc]) if doc in found else (f"document {doc}", "")
            losses = " ".join(f"{e[0]:.3f}" for e in documents[doc][-5:])
            rows.append((f"{score(documents[doc]):+.3f}", f"{losses}  {name}  {text}"))
        yield title, rows
    for title, key in (("by length in tokens", lambda e: 1 << e[3].bit_length() - 1),
                       ("by source", lambda e: sources[e[4]]))[:1 + (len(sources) > 1)]:
        sums = defaultdict(lambda: [0, 0, 0])
        for e in (epochs[-1] for epochs in documents.values()):
            sums[key(e)] = list(map(add, sums[key(e)], (1, e[2], e[0] * e[2])))
        yield title, [(str(name), f"{docs} documents, {short(targets)} targets, loss "
                       f"{loss / targets:.4f}") for name, (docs, targets, loss) in sorted(sums.items())]


def page(title, curve, shown):
    svg = chart_svg([("c0", "mean", [p[:2] for p in curve]),
                     ("c1", "95 %", [(p[0], p[2]) for p in curve])], 0, max(p[2] for p in curve))
    body = "".join(f"<h2>{escape(name)}</h2>{table(rows)}" for name, rows in shown if rows)
    return whole_page(escape(title), f"""<figure><h3>Loss</h3>{svg}
<figcaption>Of each step: the mean, and what 95 % of its documents are below</figcaption></figure>
{body}""")


def main():
    parser = Parser()
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or a ledger")
    parser.add_argument("--top", type=int, default=20, help="documents in each list (default: 20)")
    parser.add_argument("--drop", type=float, metavar="SHARE", help="of the documents, such as 0.05")
    parser.add_argument("--out", help="the page, or with --drop the records")
    args = parser.parse_args()
    if not 0 <= (args.drop or 0) <= 1:
        parser.error(f"--drop: expected a share from 0 to 1, found {args.drop}")
    run = args.run if os.path.isdir(args.run) else os.path.dirname(args.run) or "."
    documents, curve = read(os.path.join(run, "ledger.bin") if run == args.run else args.run)
    spec = "tokens"
    log = os.path.join(run, "log.jsonl" if run == args.run else "")
    for line in open(log, errors="replace") if os.path.isfile(log) else ():
        spec = (parse_record(line) or {}).get("options", {}).get("train", spec)
    sources = re.sub(r":[0-9.e+-]+(,|$)", r"\1", spec).split(",")
    found = origins(run, sources)
    if args.drop is not None:
        return drop(documents, found, args.drop, args.out or os.path.join(run, "weights.jsonl"))
    shown = list(sections(documents, sources, found, args.top))
    for title, rows in shown:
        print(f"== {title}", *(f"{name:>8}  {text}" for name, text in rows), sep="\n")
    out = args.out or os.path.join(run, "ledger.html")
    write(out, [page(os.path.basename(os.path.abspath(run)), curve, shown)])
    print(f"wrote {out}: {len(documents)} documents of {len(curve)} steps")


if __name__ == "__main__":
    run_main(main)
