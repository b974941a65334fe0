"""llm.c's CPU trainer as a scale for ours: each on its own model, step by step in turns.

    make build/cpu/bench_step && LLMC=path/to/llm.c python3 dev/peers/llmc_cpu.py

llm.c trains GPT-2 124M, ours SmolLM2-135M; both fp32, random weights, one row of --tokens. With two
models this is a scale and no race: GFLOP/s say how much of the machine each plain C trainer uses.
Counted are the FLOPs that each model needs: 6 for each token and weight of a matrix, 14 for each
layer, channel and pair of a query and a key that it sees. The steps are llm.c's own functions in
its order, built with the flags of its Makefile.
"""
import argparse
import math
import os
import pathlib
import subprocess
import sys
from statistics import median

from turns import BUILD, Program, ours, ratio, take_turns, times

FLAGS = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", "-w"]
DRIVER = r"""
#include <stdio.h>
#define printf(...) ((void)0)
#define TESTING  // without its main()
#include "train_gpt2.c"
#undef printf

static unsigned seed = 1;
static int draw(int n) { return (int)((seed = seed * 1664525 + 1013904223) >> 8) % n; }

int main(int argc, char **argv) {
    enum { LN1W = 2, LN2W = 8, LNFW = 14 };
    const int T = atoi(argv[1]);
    GPT2 m = {.config = {1024, 50257, 50304, 12, 12, 768}};
    fill_in_parameter_sizes(m.param_sizes, m.config);
    float *w = m.params_memory = malloc_and_point_parameters(&m.params, m.param_sizes);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; m.num_parameters += m.param_sizes[i++])
        for (size_t k = 0; k < m.param_sizes[i]; k++)
            *w++ = i == LN1W || i == LN2W || i == LNFW ? 1 : (draw(2001) - 1000) * 3.5e-5f;
    int *tokens = malloc((T + 1) * sizeof(int));
    for (int i = 0; i <= T; i++) tokens[i] = draw(m.config.vocab_size);
    for (int step = 1; getchar() == '\n'; step++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        gpt2_forward(&m, tokens, tokens + 1, 1, T);
        gpt2_zero_grad(&m);
        gpt2_backward(&m);
        gpt2_update(&m, 1e-4f, 0.9f, 0.999f, 1e-8f, 0, step);
        clock_gettime(CLOCK_MONOTONIC, &end);
        const double s = end.tv_sec - start.tv_sec + 1e-9 * (end.tv_nsec - start.tv_nsec);
        printf("%.6f %.7f\n", s, m.mean_loss);
        fflush(stdout);
    }
}
"""


def gflop(layers, channels, layer_weights, vocab, tokens):
    weights, pairs = layers * layer_weights + vocab * channels, tokens * (tokens + 1) / 2
    return 1e-9 * (6 * weights * tokens + 14 * layers * channels * pairs)


def build(source, compiler):
    folder = BUILD / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    driver, program = folder / "llmc.c", folder / f"llmc_{pathlib.Path(compiler).name}"
    driver.write_text(DRIVER)
    subprocess.run([compiler, *FLAGS, "-I", source, driver, "-o", program, "-lm"], check=True)
    return program


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, default=256, help="of the row; a multiple of 8, at most 1024")
    add("--steps", type=int, default=3, help="timed steps of each")
    add("--threads", type=int, default=os.cpu_count())
    add("--cc", nargs="+", default=["gcc", "clang"], help="compilers of llm.c")
    o = parser.parse_args()
    if not os.environ.get("LLMC"):
        print("llm.c: not there: git clone https://github.com/karpathy/llm.c, then LLMC=its path")
        return
    source = pathlib.Path(os.environ["LLMC"])
    if not (source / "train_gpt2.c").exists():
        sys.exit(f"FAILED: {source}: expected a clone of llm.c with train_gpt2.c")
    peers = [ours(o.threads, "--lengths", o.tokens)]
    peers[0].gflop = gflop(30, 576, 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536, 49152, o.tokens)
    for compiler in o.cc:
        try:
            program = build(source, compiler)
        except (OSError, subprocess.CalledProcessError) as why:
            print(f"llm.c {compiler}: not built: {why}")
            continue
        peers.append(Program(f"llm.c {compiler}", o.threads, program, o.tokens))
        peers[-1].gflop = gflop(12, 768, 12 * 768 * 768, 50257, o.tokens)
    take_turns(peers, o.steps)
    for p in peers:     # of random weights: log(vocabulary), and then less
        if not (abs(p.losses[0] - math.log(5e4)) < 1 and p.losses[-1] < p.losses[0]):
            sys.exit(f"FAILED: the losses of {p.name} are {p.losses}")
    print(f"a row of {o.tokens} tokens, fp32, {o.threads} threads; SmolLM2-135M of ours against "
          "GPT-2 124M of llm.c: other models, a scale and no race")
    for p in peers:
        print(f"{times(p, o.tokens)} {p.gflop / median(p.seconds):7.1f} GFLOP/s")
    for p in peers[1:]:
        print(f"ours {ratio(peers[0], p) * peers[0].gflop / p.gflop:.1f} times the GFLOP/s of "
              f"{p.name}")


if __name__ == "__main__":
    main()
