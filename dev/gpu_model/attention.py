"""Time of attention's kernels: the clocks of their loops, and a batch's work list on 132 SMs."""
import heapq
import math
import re

import sass
import simulate

SMS = 132
SHARED_BYTES_OF_SM = 227 * 1024
REGISTERS_OF_SM = 65536
EMPTY_CTA = 400         # clocks of a CTA that finds no item [guess]


class Kernel:
    """A kernel of the build, or of FlashAttention-3.

    rows: of an item; step: rows that a pass takes of what passes by; warps: of a CTA on a partition
    that multiply; kind: see items_of; shared: rows of shared memory for a row of an item and for one
    of a pass; None: a CTA takes a whole SM.
    (fit, clock, item): calibration.py; item counts clocks of an item beside its passes.
    """

    def __init__(self, name, head_dim, kind, rows, step, warps, shared, fit, item, clock):
        self.name, self.head_dim, self.kind = name, head_dim, kind
        self.rows, self.step, self.warps, self.shared = rows, step, warps, shared
        self.fit, self.item, self.clock = fit, item, clock
        self.registers = self.stack = self.spills = None
        self.trace, self.passes = [], []        # passes[k - 1]: clocks with k CTAs on an SM

    def key(self):
        return f"{self.name} hd{self.head_dim}"

    def sizes_in(self, mangled):
        """Template arguments behind head_dim of this kernel's function; None: not its function."""
        found = re.search(r"\d(attention_\w+?)_kernelI((?:Li\d+E)+)E", mangled)
        arguments = [int(n) for n in re.findall(r"\d+", found.group(2))] if found else []
        if not found or (found.group(1), arguments[0]) != (self.name, self.head_dim):
            return None
        return arguments[1:]

    def read(self, sizes, code, usage):
        """sizes: as sizes_in gives them, rows and step, or step alone, where they are not fixed"""
        *rows, self.step = sizes or [self.step]
        self.rows = rows[0] if rows else self.rows
        self.registers, self.stack = usage
        self.spills = sass.spills(code)
        self.trace = sass.main_loop(code, 8)
        if not self.trace:
            raise SystemExit(f"error: {self.key()}: no loop with matrix products in its code\n"
                             "hint: look at the code with cuobjdump -sass; see main_loop")
        self.measure(self.ctas_of_an_sm())

    def measure(self, most):
        """Simulates a pass with 1 to `most` CTAs on an SM."""
        self.passes = [max(simulate.clocks(self.trace, self.warps * k),
                           *simulate.bounds(self.trace, self.warps * k).values())
                       for k in range(1, most + 1)]

    def ctas_of_an_sm(self):
        if not self.shared:
            return 1
        by_registers = REGISTERS_OF_SM // (128 * -(-self.registers // 8) * 8)
        rows = self.shared[0] * self.rows + self.shared[1] * self.step
        statistics = 16 * self.step if "kv" in self.name else 0
        return min(by_registers,
                   SHARED_BYTES_OF_SM // (rows * self.head_dim * 2 + statistics + 1024))


# How far the simulation was right about kernels whose speed on an H100 is published: see
# calibration.py and README.md. mma.sync: FlashAttention-2; wgmma: FlashAttention-3.
SM80_CLOCK, SM90_CLOCK = 1.755e9, 1.5e9
FA3_FIT = {("forward", 64): (.72, 3500), ("forward", 128): (1.00, 6000),   # fit, clocks of an item
           ("backward", 64): (.74, 7000), ("backward", 128): (.76, 6000)}


def kernels():
    """All kernels of kernels/cuda/attention*.cu; sizes as *Sizes and attention.cuh have them."""
    sm80 = [  # name, head_dim, kind, rows, step, shared, fit, clocks of an item
        ("attention_forward", 64, "queries", 128, 64, (1, 4), 1.00, 7000),
        ("attention_forward", 128, "queries", 128, 32, (1, 4), .87, 7000),
        ("attention_backward_q", 64, "queries", 128, 64, (2, 4), 1.02, 7100),
        ("attention_backward_q", 128, "queries", 128, 32, (2, 4), 1.02, 7100),
        ("attention_backward_kv", 64, "keys of a group", 64, 32, (2, 4), 1.02, 7000),
        ("attention_backward_kv", 128, "keys of a group", 64, 32, (2, 4), 1.02, 7000),
    ]
    sm90 = [  # the same with consumers instead of shared memory
        ("attention_forward_sm90", 64, "units", 64, 128, 3, *FA3_FIT["forward", 64]),
        ("attention_forward_sm90", 128, "units", 64, 128, 2, *FA3_FIT["forward", 128]),
        ("attention_backward_q_sm90", 64, "units", 64, 64, 3, *FA3_FIT["backward", 64]),
        ("attention_backward_q_sm90", 128, "units", 64, 64, 2, *FA3_FIT["backward", 128]),
        ("attention_backward_kv_sm90", 64, "keys of a group", 128, 64, 2,
         *FA3_FIT["backward", 64]),
        ("attention_backward_kv_sm90", 128, "keys of a group", 128, 64, 2,
         *FA3_FIT["backward", 128]),
    ]
    return ([Kernel(*k[:5], 1, *k[5:], SM80_CLOCK) for k in sm80] +
            [Kernel(*k[:6], None, *k[6:], SM90_CLOCK) for k in sm90])


def pairs(lengths):
    """(query, key) pairs that the causal masks of the documents leave."""
    return sum(n * (n + 1) // 2 for n in lengths)


def ceil_div(a, b):
    return -(-a // b)


# -------------------------------------------------------------------------------------------------
# Work lists, as attention_plan makes them: passes of every item, longest first

def shared_heads(group, consumers):
    shared = min(group, consumers)
    while group % shared:
        shared -= 1
    return shared


def unit_items(kernel, lengths, heads, kv_heads):
    """sm_90's forward and dQ: `warps` units of 64 rows, of the heads that share keys."""
    shared = shared_heads(heads // kv_heads, kernel.warps)
    items = []
    for n in lengths:
        units = ceil_div(n, kernel.rows) * shared
        for first in range(0, units, kernel.warps):
            last_block = (min(first + kernel.warps, units) - 1) // shared
            items += [(last_block + 1) * 64 / kernel.step] * (heads // shared)
    return items


def items_of(kernel, lengths, heads, kv_heads):
    """kind: `units` as above; `queries`: rows of a head, all keys up to them; `keys`: rows of a
    head, all queries from them on, `of a group`: of all query heads of a kv head."""
    if kernel.kind == "units":
        return unit_items(kernel, lengths, heads, kv_heads)
    if kernel.kind == "queries":
        return [ceil_div(min(n, first + kernel.rows), kernel.step)
                for n in lengths for first in range(0, n, kernel.rows) for _ in range(heads)]
    of, group = (heads, 1) if kernel.kind == "keys" else (kv_heads, heads // kv_heads)
    return [ceil_div(n - first, kernel.step) * group
            for n in lengths for first in range(0, n, kernel.rows) for _ in range(of)]


def schedule(items, slots, clocks_of_pass, clocks_of_item):
    """Clocks until the last of the items is done, each taken by the first free slot."""
    free = [0.0] * slots
    for passes in sorted(items, reverse=True):
        heapq.heapreplace(free, free[0] + clocks_of_item + passes * clocks_of_pass)
    return max(free)


def seconds(kernel, lengths, heads, kv_heads, fit=None, clock=None):
    fit, clock = fit or kernel.fit, clock or kernel.clock
    items = items_of(kernel, lengths, heads, kv_heads)
    if not items:
        return 0.0
    ctas = min(len(kernel.passes), ceil_div(len(items), SMS))
    clocks = schedule(items, SMS * ctas, clocks_of_pass(kernel, items, ctas, fit), kernel.item)
    return (clocks + empty_ctas(kernel, lengths, heads, kv_heads, len(items))) / clock


def clocks_of_pass(kernel, items, ctas, fit):
    """Of `ctas` CTAs on an SM: shorter while a neighbour is between its items."""
    alone, together = kernel.passes[max(ctas - 2, 0)] / fit, kernel.passes[ctas - 1] / fit
    mean, busy = sum(items) / len(items), 1.0
    for _ in range(6):
        clocks = together - (together - alone) * (1 - busy)
        busy = mean * clocks / (mean * clocks + kernel.item)
    return clocks


def empty_ctas(kernel, lengths, heads, kv_heads, num_items):
    """Clocks of the CTAs past the list: sm_80's grids are made from max_work_items."""
    if not kernel.shared:
        return 0.0
    rows, of = kernel.rows, heads if kernel.kind == "queries" else kv_heads
    bound = (sum(lengths) + (rows - 1) * min(len(lengths), sum(lengths))) // rows * of
    return (bound - num_items) * EMPTY_CTA / (SMS * len(kernel.passes))
