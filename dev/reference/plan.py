#!/usr/bin/env python3
"""An independent, slow implementation of the step plans that data/batches/plan.h describes.

  plan.py golden              the values that tests/test_plan.c expects
  plan.py cases N             N random cases (settings and lengths), one a line, for `plans`
  plan.py plans < CASES       their plans; tests/test_plan_reference.sh compares them with plan.h's

Every choice is made by looking at all of what could be chosen: the micro-batch for a chunk, the
exchange between two micro-batches. Nothing is sorted into heaps, nothing is cut short."""
import functools
import random
import sys

MASK = (1 << 64) - 1
PACKED, PADDED, ROWS, REPAD = range(4)
SPLIT, TRUNCATE, DROP = range(3)


class Settings:
    seed, longest, capacity, micros, fill_ppm, long_docs = 1, 64, 256, 4, 970000, SPLIT
    token, tile, side, mask = 100, 745, 128, 0

    def __init__(self, **other):
        self.__dict__.update(other)

    def work(self, length):
        n = -(-length // self.side)
        return length * self.token + n * (n + 1) // 2 * self.tile

    def targets(self, document, start, length, goes_on):
        """Under a mask, tokens come in groups of 8, and 1 in `mask` groups is a target."""
        return sum(self.mask == 0 or mix(document << 20 | i // 8) % self.mask == 0
                   for i in range(start + 1, start + length + goes_on))


def mix(x):
    """splitmix64"""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@functools.lru_cache
def order_of_epoch(seed, epoch, n):
    """All documents of an epoch. A Feistel network of six rounds permutes the numbers below the
    next power of four; a number of n and above is permuted again until it is below n."""
    key = mix(mix(seed) ^ epoch)
    bits = 1
    while 4**bits < n:
        bits += 1
    low = 2**bits - 1
    documents = []
    for x in range(n):
        while True:
            left, right = x >> bits, x & low
            for r in range(6):
                left, right = right, left ^ (mix((key + (r << 32) + right) & MASK) & low)
            x = left << bits | right
            if x < n:
                break
        documents.append(x)
    return documents


def stream(s, lengths, state):
    """From the state on, without end: (document, first token, length, continues, state after it)"""
    epoch, position, offset = state
    while True:
        order = order_of_epoch(s.seed, epoch, len(lengths))
        while position < len(order):
            document = order[position]
            rest = lengths[document] - offset
            if lengths[document] > s.longest and s.long_docs == DROP:
                position += 1
                continue
            length = min(rest, s.longest)
            goes_on = s.long_docs == SPLIT and length < rest
            start = offset
            position, offset = (position, offset + length) if goes_on else (position + 1, 0)
            if s.mask == 0 or s.targets(document, start, length, goes_on):
                yield document, start, length, goes_on, (epoch, position, offset)
        epoch, position = epoch + 1, 0


def take(s, lengths, state, most):
    goal = s.micros * s.capacity * s.fill_ppm // 1000000
    chunks, tokens = [], 0
    for chunk in stream(s, lengths, state):
        if len(chunks) == most or (chunks and tokens + chunk[2] > goal):
            return chunks
        chunks.append(chunk)
        tokens += chunk[2]


def place(s, lengths, rank):
    """Each chunk in turn to the micro-batch that has room and the least rank(room, work)."""
    room, work, where = [s.capacity] * s.micros, [0] * s.micros, []
    for length in lengths:
        fits = [b for b in range(s.micros) if room[b] >= length]
        if not fits:
            return None
        best = min(fits, key=lambda b: (rank(room[b], work[b]), b))
        where.append(best)
        room[best] -= length
        work[best] += s.work(length)
    return where


def exchange(s, lengths, where, heavy, light):
    """The first of the best exchanges of one chunk for one or two; None when none helps."""
    def total(b, of):
        return sum(of(lengths[i]) for i in range(len(where)) if where[i] == b)
    room = {b: s.capacity - total(b, int) for b in (heavy, light)}
    work = {b: total(b, s.work) for b in (heavy, light)}
    ours, theirs = ([i for i in range(len(where)) if where[i] == b] for b in (heavy, light))
    cost = [s.work(n) for n in lengths]
    best, least = None, work[heavy]
    for x in ours:
        for k, y in enumerate(theirs):
            for back in [(y,)] + [(y, z) for z in theirs[k + 1:]]:
                moved = cost[x] - sum([cost[i] for i in back])
                heavier = max(work[heavy] - moved, work[light] + moved)
                tokens = lengths[x] - sum([lengths[i] for i in back])
                if heavier < least and tokens <= room[light] and -tokens <= room[heavy]:
                    best, least = (x, back), heavier
    return best


def even_out(s, lengths, where):
    while True:
        work = [sum(s.work(n) for n, b in zip(lengths, where) if b == m) for m in range(s.micros)]
        mean = sum(work) // s.micros
        heavy = work.index(max(work))
        if work[heavy] - mean <= mean // 512:
            return
        for light in range(s.micros):
            found = work[light] < mean and exchange(s, lengths, where, heavy, light)
            if found:
                where[found[0]] = light
                for i in found[1]:
                    where[i] = heavy
                break
        else:
            return


def pack(s, lengths, state, most):
    """The step's stream of at most so many chunks; and grouped by micro-batch, None: no room."""
    chunks = take(s, lengths, state, most)
    ordered = sorted(chunks, key=lambda c: -c[2]) if s.token else chunks
    sizes = [c[2] for c in ordered]
    where = place(s, sizes, lambda room, work: work if s.token else -room)
    if where is None:
        where = place(s, sizes, lambda room, work: room)        # best fit
    if where is None:
        return chunks, None
    if s.token:
        even_out(s, sizes, where)
    return chunks, [[c for c, b in zip(ordered, where) if b == m] for m in range(s.micros)]


def packed(s, lengths, state):
    chunks, micros = pack(s, lengths, state, 1 << 31)
    fewer, too_many = 1, len(chunks)
    if micros:
        return chunks, micros
    while not micros:
        count = max(len(chunks) - fewer, 1)
        chunks, micros = pack(s, lengths, state, count)
        fewer *= 2
        if not micros:
            too_many = count
    good = count
    while too_many - good > 1:
        middle = (good + too_many) // 2
        if pack(s, lengths, state, middle)[1]:
            good = middle
        else:
            too_many = middle
    return pack(s, lengths, state, good)


def in_rows(s, chunks):
    """The stream of tokens, cut where a micro-batch of whole rows is full"""
    room = s.capacity // s.longest * s.longest
    micros, left = [], 0
    for document, start, length, goes_on, _ in chunks:
        while length:
            if left == 0:
                micros.append([])
                left = room
            n = min(length, left)
            micros[-1].append((document, start, n, goes_on or n < length))
            start, length, left = start + n, length - n, left - n
    return micros


def lay_out(s, layout, chunks, micros):
    """(micro-batches, the work of each)"""
    row = s.work(s.longest)
    if layout == PACKED:
        return micros, [sum(s.work(c[2]) for c in m) for m in micros]
    if layout == ROWS:
        micros = in_rows(s, chunks)
        return micros, [-(-sum(c[2] for c in m) // s.longest) * row for m in micros]
    rows = s.capacity // s.longest
    micros = [chunks[i:i + rows] for i in range(0, len(chunks), rows)]
    if layout == PADDED:
        return micros, [len(m) * row for m in micros]
    return micros, [sum(s.work(c[2]) + (s.longest - c[2]) * s.token for c in m) for m in micros]


def golden():
    lengths = [30, 7, 100, 21, 64, 3, 45, 12, 80, 19]
    s = Settings(capacity=100, micros=3)
    _, micros = packed(s, lengths, (0, 0, 0))
    for m, chunks in enumerate(micros):
        for c in chunks:
            print("{%d, %d, %d, %d}" % (m, c[0], c[1], c[2]))
    lengths = [1 + mix(i) % 300 for i in range(2000)]
    s, state, digests = Settings(seed=42, capacity=512), (0, 0, 0), [0] * 4
    for _ in range(50):
        chunks, micros = packed(s, lengths, state)
        for layout in range(4):
            for m, of_micro in enumerate(lay_out(s, layout, chunks, micros)[0]):
                for c in of_micro:
                    for field in (m, c[0], c[1], c[2] * 2 + c[3]):
                        digests[layout] = mix(digests[layout] ^ field)
        state = chunks[-1][4]
    for digest in digests:
        print("0x%016xull" % digest)


def cases(count):
    r = random.Random(1)
    for _ in range(count):
        longest = r.randrange(1, 120)
        token = r.choice((0, 1, 100, 100, 100))
        fields = (r.randrange(1 << 40), longest, longest + r.randrange(3 * longest + 200),
                  r.randrange(1, 7), r.choice((700000, 970000, 1000000)), r.randrange(3),
                  token, r.randrange(2000) if token else 0, r.randrange(1, 130),
                  r.choice((0, 0, 2, 4)))
        limit = r.choice((longest, 3 * longest + 2, 2 * longest // 3 + 2))
        lengths = [r.randrange(2, limit + 2) for _ in range(r.randrange(1, 60))] + [2]
        if longest == 1:
            fields = fields[:5] + (SPLIT,) + fields[6:]    # else no token has a successor
        s = Settings(longest=longest, mask=fields[9])
        kept = [n if fields[5] == SPLIT else min(n, longest) * (fields[5] == TRUNCATE or n <= longest)
                for n in lengths]
        if not any(s.targets(document, 0, n, False) for document, n in enumerate(kept)):
            continue
        print(*fields, *lengths)


def plans():
    names = ("seed", "longest", "capacity", "micros", "fill_ppm", "long_docs", "token", "tile",
             "side", "mask")
    for line in sys.stdin:
        numbers = [int(word) for word in line.split()]
        s, lengths = Settings(**dict(zip(names, numbers))), numbers[len(names):]
        state = (0, 0, 0)
        for _ in range(4):
            chunks, micros = packed(s, lengths, state)
            state = chunks[-1][4]
            targets = sum(s.targets(*c[:4]) for c in chunks)
            print("targets", targets, "then", *state)
            if targets == 0:
                break
            for layout in range(4):
                for of_micro, work in zip(*lay_out(s, layout, chunks, micros)):
                    print(layout, work, *("%d:%d:%d:%d" % c[:4] for c in of_micro))


if __name__ == "__main__":
    if sys.argv[1:] == ["golden"]:
        golden()
    elif len(sys.argv) == 3 and sys.argv[1] == "cases":
        cases(int(sys.argv[2]))
    elif sys.argv[1:] == ["plans"]:
        plans()
    else:
        sys.exit(__doc__)
