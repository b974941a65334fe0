#!/usr/bin/env python3
"""The tables of dev/SCALE.md: memory of a rank, the step on many ranks, failures.

    python3 dev/scale_sim.py            all tables, in Markdown

A model on paper: nothing here was measured, every assumption is a line below.
"""
import math
import random

# name: layers, hidden, ffn, width of all query heads, of queries, keys and values, vocab, parameters
MODELS = {
    "smollm2-135m": (30, 576, 1536, 576, 960, 49152, 134_515_008),
    "smollm2-1.7b": (24, 2048, 8192, 2048, 6144, 49152, 1_711_376_384),
    "llama-3.1-8b": (32, 4096, 14336, 4096, 6144, 128256, 8_030_261_248),
}
# assumed
FLOPS = 400e12              # of one GPU in a whole step, bf16
NODE = 8                    # GPUs of a machine
BUS = 400e9                 # bytes/s of a collective inside a machine (NCCL's bus bandwidth)
NIC = 45e9                  # bytes/s of one GPU's network card
HOP_NEAR, HOP_FAR = 3e-6, 10e-6     # seconds of one more hop of a ring, inside and outside a machine
CALL = 30e-6                # launch of one collective
HBM = 3.5e12                # bytes/s of the update
STAR = 15e-6                # control plane: rank 0's time for one rank's message, there and back
CONTEXT = 1761.8            # sum of l^2 / sum of l, batch R65
JITTER = 0.005              # standard deviation of a rank's time per step
SLOW = (1 / 2000, 0.05)     # share of GPUs that are slow for good, and by how much
PLANNED = 1.001             # imbalance of the plan: packsim --docs 4000000 --ranks 8 ... 4096
GPU_HOURS = 54 * 24 * 16384 / 419   # between failures of one GPU: Llama 3, 54 days, 16,384 GPUs
DISK = 2e9                  # bytes/s of a checkpoint
RESTART = 300               # seconds from a failure to the next step, the heartbeat's 60 included


def row(cells):
    print("| " + " | ".join(str(c) for c in cells) + " |")


def table(head):
    row(head)
    print("|" + "---|" * len(head))


def largest_layer(model):
    layers, hidden, ffn, _, qkv, _, _ = MODELS[model]
    return hidden * (qkv + hidden + 3 * ffn)


def memory_table():
    """GB of weights, gradients and optimizer state on a rank (CUDA: bf16 + 16 low bits)"""
    table(["model, ranks", "ZeRO-0", "ZeRO-1, as built", "ZeRO-1, low bits sharded", "ZeRO-2",
           "ZeRO-3"])
    for model in MODELS:
        p, one = MODELS[model][-1], 4 * largest_layer(model)
        for w in (8, 64, 1024):
            zero2 = p * (2 + (2 + 4 + 8) / w) + 2 * one     # two layers' gradients on their way
            zero3 = p * 16 / w + 2 * one + 2 * one // 2     # and two layers' weights
            row([f"{model}, {w}"] + [f"{x / 1e9:.2f}" for x in
                                     (16 * p, p * (8 + 8 / w), p * (6 + 10 / w), zero2, zero3)])


def forward_seconds(model, tokens):
    layers, hidden, ffn, heads, qkv, vocab, _ = MODELS[model]
    flops = 6 * layers * hidden * (3 * ffn + hidden + qkv) + 6 * vocab * hidden
    flops += 6 * layers * heads * CONTEXT
    return flops * tokens / FLOPS / 3


def collective(size, w, tree):
    """Seconds of a reduce-scatter or an all-gather of `size` bytes on w ranks"""
    if w <= NODE:
        return CALL + size * (w - 1) / w / BUS + (w - 1) * HOP_NEAR
    nodes = math.ceil(w / NODE)
    bandwidth = min(BUS, NIC * NODE)        # a ring through each GPU's own card
    # a ring passes all ranks; inside each machine first, a tree over the machines then
    hops = ((NODE - 1) * HOP_NEAR + math.ceil(math.log2(nodes)) * HOP_FAR if tree
            else (w - nodes) * HOP_NEAR + nodes * HOP_FAR)
    return CALL + size * (w - 1) / w / bandwidth + hops


def exposed_reduce(buckets, backward, w, tree):
    """What is left when backward is over: layers end one after another, the embedding last"""
    end = 0
    for i, size in enumerate(buckets):
        end = max(end, backward * (i + 1) / len(buckets)) + collective(4 * size, w, tree)
    return end - backward


def exposed_gather(buckets, forward, w, tree):
    """Layers wait for their weights, first the embedding; the gather runs ahead of them"""
    arrived = done = 0
    for size in reversed(buckets):
        arrived += collective(2 * size, w, tree)
        done = max(done, arrived) + forward / len(buckets)
    return done - forward


def slowest(w, rng, draws=60):
    """The slowest rank's time over the mean, as all wait for it: mean over draws of GPUs"""
    total = 0
    for _ in range(draws):
        times = [rng.gauss(1, JITTER) * (1 + SLOW[1] * (rng.random() < SLOW[0])) for _ in range(w)]
        total += max(times) * w / sum(times)
    return total / draws


def step_table():
    rng = random.Random(1)
    table(["model, tokens of a rank's micro-batch", "ranks", "tokens a step", "compute ms",
           "reduce ms: ring, tree", "exposed ms: ring, tree", "update ms", "control ms",
           "slowest rank", "of ideal: ring, tree"])
    for model, tokens in (("smollm2-135m", 32768), ("smollm2-1.7b", 16384), ("llama-3.1-8b", 8192)):
        layers, p = MODELS[model][0], MODELS[model][-1]
        layer = largest_layer(model)
        buckets = [layer] * layers + [p - layers * layer]
        forward = forward_seconds(model, tokens)
        for w in (8, 64, 512, 1024, 4096):
            wait = PLANNED * slowest(w, rng)
            compute = 3 * forward
            update = p / w * 28 / HBM + 2 * collective(8, w, True)     # two sums, for the norm
            control = 2 * w * STAR
            reduce = [sum(collective(4 * b, w, tree) for b in buckets) for tree in (False, True)]
            exposed = [exposed_reduce(buckets, 2 * forward, w, tree) +
                       exposed_gather(buckets, forward, w, tree) for tree in (False, True)]
            ideal = [compute / (compute * wait + e + update + control) for e in exposed]
            row([f"{model}, {tokens}", w, f"{w * tokens / 1e6:.2f} M", f"{compute * 1e3:.0f}",
                 ", ".join(f"{x * 1e3:.1f}" for x in reduce),
                 ", ".join(f"{x * 1e3:.1f}" for x in exposed), f"{update * 1e3:.2f}",
                 f"{control * 1e3:.2f}", f"{wait / PLANNED:.3f}",
                 ", ".join(f"{x:.3f}" for x in ideal)])


def failure_table():
    table(["model, ranks", "failure every", "checkpoint", "best interval", "time that counts"])
    cases = [(m, w, 12 * MODELS[m][-1] / DISK, RESTART) for m, w in
             (("smollm2-135m", 64), ("smollm2-1.7b", 512), ("llama-3.1-8b", 1024),
              ("llama-3.1-8b", 4096))]
    for name, w, seconds, restart in cases + [("Llama 3 405B, published > 90 %", 16384, 10, 600)]:
        between = GPU_HOURS * 3600 / w
        interval = math.sqrt(2 * seconds * between)         # Young 1974
        counts = 1 - seconds / interval - interval / (2 * between) - restart / between
        row([f"{name}, {w}", f"{between / 3600:.1f} h", f"{seconds:.1f} s",
             f"{interval / 60:.0f} min", f"{100 * counts:.1f} %"])


if __name__ == "__main__":
    for title, print_table in (("Memory, GB of a rank", memory_table), ("The step", step_table),
                               ("Failures", failure_table)):
        print(f"\n### {title}\n")
        print_table()
