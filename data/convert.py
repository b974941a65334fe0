#!/usr/bin/env python3
"""Converts other trainers' token files to shards for --train:

    convert.py FILE... --out DIR --vocab-size N [--boundary-token ID [--starts]]

FILE is Megatron's NAME.bin with NAME.idx, datatrove's NAME.ds with .index and perhaps .loss, llmq's
BIN.TOK with or without a mask, OLMo's NAME.npy (raw ids) with NAME.csv.gz, or a numpy array of ids;
labels_mask_X.npy is the mask of token_ids_X.npy. Files without an index need --boundary-token,
which ends documents (--starts: begins them). File k becomes DIR/train_0000k_00000.bin and .idx,
if it has a loss mask .mask, and further shards of 1e8 tokens. Files listed in DIR/convert.json are
not converted again; shards of files that you no longer pass are deleted from DIR. Needs numpy.
"""
import csv
import gzip
import json
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../scripts"))
from command import (  # noqa: E402
    BAD_INPUT, CRC32C, DISK, USAGE, Parser, crc32c, fail, load, run_main, warn)

(np,) = load("numpy")
SHARD_TOKENS, BLOCK = 10**8, 4096
TABLE = np.array(CRC32C, "<u4")


def check(ok, what, hint="the file is damaged or cut short: copy it again", code=BAD_INPUT):
    if not ok:
        fail(code, what, hint)


def crc32c_rows(data):
    """CRC32C of every row of a byte matrix: all rows advance together, one byte at a time."""
    crc = np.full(len(data), 0xffffffff, dtype="<u4")
    for column in np.ascontiguousarray(data.T):
        crc = crc >> 8 ^ TABLE[(crc ^ column) & 255]
    return ~crc


# --------------------------------------------------------------------------------------------------
# Readers: (tokens, document ends or None, mask with one byte per token or None)


def megatron(path):
    index, name = np.fromfile(path[:-4] + ".idx", "u1"), path[:-4] + ".idx"
    check(len(index) >= 34 and index[17] in (4, 8),
          "%s: expected an index of int32 or uint16" % name)
    width = 2 if index[17] == 8 else 4
    sequences, entries = index[18:34].view("<u8").tolist()
    size = 34 + 12 * sequences + 8 * entries
    check(entries > 0 and len(index) in (size, size + sequences),
          "%s: %d sequences and %d documents do not make %d bytes" % (
              name, sequences, entries, len(index)))
    lengths = index[34:34 + 4 * sequences].view("<i4").astype("<u8")
    at = np.concatenate([[0], np.cumsum(lengths)]).astype("<u8")
    offsets = index[34 + 4 * sequences:34 + 12 * sequences].view("<u8")
    documents = index[34 + 12 * sequences:size].view("<u8")
    check((offsets == at[:-1] * np.uint64(width)).all() and documents[0] == 0 and
          documents[-1] == sequences and (documents[1:] >= documents[:-1]).all(),
          "%s: expected sequences and documents one after another" % name)
    return np.memmap(path, "<u2" if width == 2 else "<i4", "r"), at[documents[1:]], None


def by_ends(path, ends):
    """The tokens: their width follows from the sizes."""
    count, size = int(ends[-1]) if len(ends) else 0, os.path.getsize(path)
    check(count > 0 and size in (2 * count, 4 * count),
          "%s: expected %d tokens (its index) of 2 or 4 bytes, found %d bytes" % (
              path, count, size))
    return np.memmap(path, "<u%d" % (size // count), "r")


def datatrove(path):
    check(os.path.getsize(path + ".index") % 8 == 0, "%s.index: expected whole entries" % path)
    ends = np.fromfile(path + ".index", "<u8")
    loss = np.fromfile(path + ".loss", "u1") if os.path.exists(path + ".loss") else None
    return by_ends(path, ends), ends, loss


def olmo(path):
    index = path[:-4] + ".csv.gz"
    if not os.path.exists(index):
        halves = np.fromfile(path, "<u2", 1 << 14)  # small upper halves: 32-bit ids
        wide = os.path.getsize(path) % 4 == 0 and (halves[1::2] < 16).all()
        return np.memmap(path, "<u4" if wide else "<u2", "r"), None, None
    with gzip.open(index, "rt", newline="") as f:
        rows = np.array([row[:2] for row in csv.reader(f)], "<u8").reshape(-1, 2)
    check((rows[:1, 0] == 0).all() and (rows[1:, 0] == rows[:-1, 1]).all(),
          "%s: expected documents one after another" % index)
    return by_ends(path, rows[:, 1]), rows[:, 1].copy(), None


def llmq(path):
    version, width, count, _, masked = np.fromfile(path, "<i4", 5, offset=8).tolist()
    masked = masked and version == 2
    size = 1024 + 4 * count + ((count + 7) // 8 if masked else 0)
    check(version in (1, 2) and width == 4 and os.path.getsize(path) == size,
          "%s: expected %d bytes, found %d" % (path, size, os.path.getsize(path)))
    bits = np.fromfile(path, "u1", offset=1024 + 4 * count)
    mask = np.unpackbits(bits, count=count, bitorder="little") if masked else None
    return np.memmap(path, "<i4", "r", 1024, (count,)), None, mask


def numpy_array(path):
    ids = np.load(path, mmap_mode="r")
    check(ids.ndim == 1 and ids.dtype.str in ("<u2", "<u4", "<i4"),
          "%s: expected one dimension of uint16, uint32 or int32, found %s of %s" % (
              path, ids.shape, ids.dtype), "numpy.save(NAME, ids.ravel())")
    check(os.path.getsize(path) == ids.offset + ids.nbytes, "%s: expected %d bytes" % (
        path, ids.offset + ids.nbytes))
    return ids, None, None


def beside(path):
    """The files that belong to it by their names: index, mask. The last is OLMo's mask."""
    folder, name = os.path.split(path)
    return path + ".index", path + ".loss", path[:-4] + ".idx", path[:-4] + ".csv.gz", \
        os.path.join(folder, name.replace("token_ids", "labels_mask"))


def label_mask(path):
    """OLMo's: true or false for each token, raw or as numpy's array."""
    name = beside(path)[-1]
    if name == path or not os.path.exists(name):
        return None
    with open(name, "rb") as f:
        mask = np.load(name) if f.read(6) == b"\x93NUMPY" else np.fromfile(name, "u1")
    check(mask.ndim == 1 and ((mask == 0) | (mask == 1)).all(),
          "%s: expected a bool for each token" % name)
    return mask


def name_unread(files):
    known = {name for path in files for name in (path, *beside(path))}
    near = [os.path.join(folder, name) for folder in set(map(os.path.dirname, files))
            for name in os.listdir(folder or ".") if re.search("mask|label|meta|[.]loss$", name)]
    unread = sorted(name for name in near if name not in known and os.path.isfile(name))
    if unread:
        warn("not read: %s%s" % (", ".join(unread[:5]), ", ..." * (len(unread) > 5)))


def scan(path, tokens, mask, args):
    """Document ends by the boundary token."""
    check(args.boundary_token is not None, "%s: does not say where documents end" % path,
          "give the end-of-text id: --boundary-token ID", USAGE)
    at = np.concatenate([[]] + [
        first + np.flatnonzero(tokens[first:first + SHARD_TOKENS] == args.boundary_token)
        for first in range(0, len(tokens), SHARD_TOKENS)]).astype("i8")
    check(len(at) > 0, "%s: token %d is nowhere in it" % (path, args.boundary_token),
          "check --boundary-token")
    ends = np.unique(np.concatenate([at if args.starts else at + 1, [len(tokens)]]))
    if mask is None:
        return ends
    # llmq pads samples with zeros before the next one: documents without a target
    pads = np.concatenate([[0], ends[:-1]])
    real = np.flatnonzero((tokens != 0) | (mask != 0))
    return np.unique(np.concatenate([ends, real[np.searchsorted(real, pads[pads <= real[-1]])]]))


def read(path, args):
    """(tokens, document ends, mask); the name and the first bytes determine the format."""
    with open(path, "rb") as f:
        head = f.read(8)
    reader = llmq if head == b"BIN.TOK\n" else numpy_array if head[:6] == b"\x93NUMPY" else \
        {".ds": datatrove, ".npy": olmo, ".bin": megatron}.get(os.path.splitext(path)[1])
    check(reader, "%s: unknown format" % path, "convert.py --help lists the known formats")
    try:
        (tokens, ends, mask), labels = reader(path), label_mask(path)
    except Exception as e:  # from numpy, gzip or csv
        fail(BAD_INPUT, "%s: cannot read it or its index: %s" % (path, e), "copy both again")
    ends = scan(path, tokens, mask, args) if ends is None else ends
    mask = labels if mask is None else mask
    check(len(ends) and ends[-1] == len(tokens) and (ends[1:] >= ends[:-1]).all() and
          (mask is None or len(mask) == len(tokens)),
          "%s: expected documents, and a mask, of %d tokens" % (path, len(tokens)))
    return tokens, np.unique(ends[ends > 0]).astype("i8"), mask


# --------------------------------------------------------------------------------------------------
# Our shards; byte layout: README.md


def write(path, pieces):
    with open(path, "wb") as f:
        f.writelines(pieces)
        f.flush()
        os.fsync(f.fileno())


def token_bytes(head, tokens, width, sums):
    """The pieces of a token file; the checksums of all blocks are appended to sums."""
    yield head
    for at in range(0, len(tokens), 1024 * BLOCK):
        data = tokens[at:at + 1024 * BLOCK].astype("<u%d" % width).view("u1")
        whole = len(data) // (BLOCK * width)
        sums += crc32c_rows(data[:whole * BLOCK * width].reshape(whole, BLOCK * width)).tolist()
        if len(data) > whole * BLOCK * width:
            sums += crc32c_rows(data[whole * BLOCK * width:].reshape(1, -1)).tolist()
        yield data


def write_shard(stem, tokens, ends, mask, vocab):
    """Returns the number of targets."""
    wide = vocab > 65536
    low, high = tokens.min(), tokens.max()
    check(low >= 0 and high < vocab, "%s: expected ids from 0 to %d, found %d to %d" % (
        stem, vocab - 1, low, high), "check --vocab-size")
    words = np.zeros(255, "<i4")
    words[:3] = (20240801, 7, len(tokens)) if wide else (20240520, 1, len(tokens))
    words[8:15] = 0x44415055, 1, vocab, 0 if mask is None else 4, -1, -1, len(ends)
    head = words.tobytes() + crc32c(words.tobytes())

    def body(magic, version, *counts):
        return magic + np.array([version], "<u4").tobytes() + head[1020:] + \
            np.array(counts, "<u8").tobytes()

    sums = []
    write(stem + ".bin", token_bytes(head, tokens, 4 if wide else 2, sums))
    index = body(b"UNPADIDX", 2, len(ends), len(tokens), BLOCK) + ends.astype("<u8").tobytes() + \
        np.array(sums, "<u4").tobytes()
    write(stem + ".idx", [index, crc32c(index)])
    if mask is None:
        return 0
    bits = mask != 0
    bits[np.concatenate([[0], ends[:-1]])] = False  # nothing comes before a first token
    packed = np.packbits(bits, bitorder="little").tobytes()
    text = body(b"UNPADMSK", 1, len(bits), bits.sum()) + packed
    write(stem + ".mask", [text, crc32c(text)])
    return int(bits.sum())


def convert(path, stem, args, tokens, ends, mask):
    """Returns the counts of a file."""
    counts = {"documents": len(ends), "tokens": len(tokens), "targets": 0, "shards": 0}
    done = first = 0
    while done < len(ends):
        last = max(done + 1, int(np.searchsorted(ends, first + SHARD_TOKENS, "right")))
        end = int(ends[last - 1])
        check(end - first < 2**31, "%s: a document of %d tokens" % (path, end - first), "cut it")
        counts["targets"] += write_shard(
            os.path.join(args.out, "%s_%05d" % (stem, counts["shards"])),
            tokens[first:end], ends[done:last] - first, None if mask is None else mask[first:end],
            args.vocab_size)
        counts["shards"], done, first = counts["shards"] + 1, last, end
    return counts


def run(args):
    os.makedirs(args.out, exist_ok=True)
    record, done = os.path.join(args.out, "convert.json"), {}
    if os.path.exists(record):
        with open(record) as f:
            done = json.load(f)

    def note(stem, key, counts):
        done[stem] = [key, counts]
        write(record + ".tmp", [json.dumps(done, indent=1).encode()])
        os.replace(record + ".tmp", record)

    def remove(stem):
        note(stem, "", {})  # first: a run that ends here leaves incomplete shards
        for name in os.listdir(args.out):
            if name.startswith(stem + "_"):
                os.remove(os.path.join(args.out, name))

    masks = {beside(path)[-1] for path in args.files if beside(path)[-1] != path}
    # FILE... may match masks as well
    args.files = [path for path in args.files if path not in masks]
    name_unread(args.files)
    stems = ["train_%05d" % k for k in range(len(args.files))]
    for stem, path in zip(stems, args.files):
        read_too = [f for f in (path, *beside(path)) if os.path.exists(f)]
        stats = [(f, os.path.getsize(f), os.stat(f).st_mtime_ns) for f in read_too]
        key = repr((stats, args.vocab_size, args.boundary_token, args.starts))
        if stem not in done or done[stem][0] != key:
            found = read(path, args)
            remove(stem)
            note(stem, key, convert(path, stem, args, *found))
        counts = ", ".join("%d %s" % (n, what) for what, n in done[stem][1].items())
        print("%s: %s" % (path, counts))
    for stem in [stem for stem in done if stem.startswith("train_") and stem not in stems]:
        remove(stem)  # an earlier run had more files


def main():
    p = Parser()
    p.add_argument("files", nargs="+", metavar="FILE")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--vocab-size", required=True, type=int, metavar="N",
                   help="vocabulary size of the tokenizer")
    p.add_argument("--boundary-token", type=int, metavar="ID", help="token that ends documents")
    p.add_argument("--starts", action="store_true", help="the boundary token begins documents")
    args = p.parse_args()
    try:
        run(args)
    except (OSError, ValueError) as e:
        written = isinstance(e, OSError) and e.filename not in args.files
        fail(DISK if written else BAD_INPUT,
             "%s: %s" % (getattr(e, "filename", None) or args.out, getattr(e, "strerror", e)),
             "check the file, its index, and the space")


if __name__ == "__main__":
    run_main(main)
