"""Shards as tests need them, byte by byte, and independent of the programs that write them.

    shards.py seal STEM          computes all checksums of STEM.bin, .idx and .mask again
    shards.py mask DIR RULE      gives the shards of DIR loss masks: token i > 0 of document d is a target
                                 where RULE, in Python, is true
    shards.py flip FILE OFFSET   flips the lowest bit of that byte
"""
import glob
import os
import pathlib
import struct
import sys

from runs import tensors

BLOCK = 4096  # tokens that share a checksum
TABLE = list(range(256))
for _ in range(8):
    TABLE = [i >> 1 ^ 0x82f63b78 * (i & 1) for i in TABLE]


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xffffffff


def sealed(body):
    return bytes(body) + struct.pack("<I", crc32c(body))


def load(path):
    return pathlib.Path(path).read_bytes()


def store(path, data):
    pathlib.Path(path).write_bytes(data)


def flip(path, offset):
    data = bytearray(load(path))
    data[int(offset)] ^= 1
    store(path, data)


def ends_of(stem):
    index = load(stem + ".idx")
    return struct.unpack_from("<%dQ" % struct.unpack_from("<Q", index, 16)[0], index, 40)


def seal(stem):
    head, tokens, ends = load(stem + ".bin")[:1020], load(stem + ".bin")[1024:], ends_of(stem)
    head = sealed(head)
    size = BLOCK * (2 if struct.unpack_from("<i", head, 0)[0] == 20240520 else 4)
    sums = [crc32c(tokens[at:at + size]) for at in range(0, len(tokens), size)]
    index = load(stem + ".idx")
    store(stem + ".bin", head + tokens)
    store(stem + ".idx", sealed(index[:12] + head[1020:] + index[16:40 + 8 * len(ends)]
                                + struct.pack("<%dI" % len(sums), *sums)))
    if os.path.exists(stem + ".mask"):
        mask = load(stem + ".mask")
        store(stem + ".mask", sealed(mask[:12] + head[1020:] + mask[16:-4]))


def write(stem, documents, vocab=None):
    """STEM.bin and .idx of lists of ids."""
    ids, ends = [i for d in documents for i in d], []
    for d in documents:
        ends.append(len(d) + (ends[-1] if ends else 0))
    words = [20240520, 1, len(ids)] + [0] * 252
    words[8:15] = 0x44415055, 1, vocab or max(ids) + 1, 0, -1, -1, len(ends)
    store(stem + ".bin", struct.pack("<255iI%dH" % len(ids), *words, 0, *ids))
    store(stem + ".idx", struct.pack("<8sIIQQQ%dQI" % len(ends), b"UNPADIDX", 2, 0, len(ends), len(ids), BLOCK,
                                     *ends, 0))
    seal(stem)


def mask(directory, rule):
    rule = compile(rule, "rule", "eval")
    for path in glob.glob(directory + "/*.bin"):
        data, stem = bytearray(load(path)), path[:-4]
        data[44] |= 4
        store(path, data)
        tokens, first = struct.unpack_from("<i", data, 8)[0], 0
        bits = bytearray((tokens + 7) // 8)
        for d, end in enumerate(ends_of(stem)):
            for i in range(1, end - first):
                if eval(rule):
                    bits[(first + i) // 8] |= 1 << (first + i) % 8
            first = end
        ones = sum(bin(byte).count("1") for byte in bits)
        store(stem + ".mask", struct.pack("<8sIIQQ", b"UNPADMSK", 1, 0, tokens, ones) + bits + bytes(4))
        seal(stem)


def read(directory, split="train"):
    """[(ids, bits of the mask or weights, or None)] of all documents, every field and checksum proven."""
    found = []
    for path in sorted(glob.glob("%s/%s_*.bin" % (directory, split))):
        data, index, stem = load(path), load(path[:-4] + ".idx"), path[:-4]
        words, bits = struct.unpack("<256i", data[:1024]), None
        wide = words[0] == 20240801
        assert (words[0], words[1]) == ((20240801, 7) if wide else (20240520, 1))
        assert data[:1024] == sealed(data[:1020]) and words[8:10] == (0x44415055, 1)
        tokens = struct.unpack("<%d%s" % (words[2], "I" if wide else "H"), data[1024:])
        ends = ends_of(stem)
        assert index == sealed(index[:-4]) and index[12:16] == data[1020:1024]
        size = BLOCK * (4 if wide else 2)
        sums = [crc32c(data[at:at + size]) for at in range(1024, len(data), size)]
        assert index[40 + 8 * len(ends):-4] == struct.pack("<%dI" % len(sums), *sums)
        assert len(ends) == words[14] and (not ends or ends[-1] == len(tokens))
        if words[11] & 4:
            mask = load(stem + ".mask")
            magic, version, of, count, ones = struct.unpack("<8sI4sQQ", mask[:32])
            assert (magic, of) == (b"UNPADMSK", data[1020:1024]) and version in (1, 2)
            assert mask == sealed(mask[:-4]) and count == len(tokens)
            size = (count + 7) // 8
            bits = [mask[32 + i // 8] >> i % 8 & 1 for i in range(8 * size)]
            assert sum(bits) == ones and not any(bits[len(tokens):]) and len(mask) == 36 + size + 4 * (version - 1) * count
            if version == 2: bits = list(struct.unpack("<%df" % count, mask[32 + size:-4]))
        for first, end in zip((0,) + ends, ends):
            found.append((list(tokens[first:end]), bits and bits[first:end]))
    return found


def golden(directory):
    """The documents of a golden model, and transformers' loss on them."""
    of = {name: data for name, (_, _, data) in tensors(directory + "/expected.safetensors").items()}
    tokens, ends = (memoryview(of[name]).cast("i").tolist() for name in ("tokens", "cu_seqlens"))
    return [tokens[a:b] for a, b in zip(ends, ends[1:])], struct.unpack("<d", of["loss_fp64"])[0]


if __name__ == "__main__":
    {"seal": seal, "mask": mask, "flip": flip}[sys.argv[1]](*sys.argv[2:])
