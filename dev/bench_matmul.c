// GFLOP/s of the three products of a linear layer: our instruction sets beside OpenBLAS and oneDNN
// where they are installed. All candidates run in turn on the same matrices, round after round; the
// table holds medians. On a busy machine set OMP_WAIT_POLICY=passive (threads that spin at a
// barrier take the time of those they wait for), or count processor time with one thread:
// OMP_NUM_THREADS=1 bench_matmul -p.
//
// usage: bench_matmul [-t T]... [-s KxN]... [-r rounds] [-c candidate]... [-p]
//        default: T 1395 and 4096, the layers of SmolLM2-135M and of the demo model, 7 rounds, all
//        candidates, wall-clock time
#ifndef _GNU_SOURCE
#define _GNU_SOURCE   // clock_gettime, getopt
#endif
#include "../kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct { const char *title, *name; int bf16; } Candidate;
static const Candidate all_candidates[] = {
    {"avx512", "own-avx512", 0}, {"avx2", "own-avx2", 0}, {"portable", "own-portable", 0},
    {"openblas", "openblas", 0}, {"onednn", "onednn", 0}, {"bf16", "own", 1},
};
typedef struct { int64_t K, N; } Layer;
enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, NUM_PRODUCTS, MAX_LIST = 32, MAX_ROUNDS = 101 };
static const char *const product_names[NUM_PRODUCTS] = {"forward", "dinp", "dweight"};

static Candidate candidates[MAX_LIST];
static int num_candidates, rounds = 7;
static clockid_t bench_clock = CLOCK_MONOTONIC;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(bench_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static real *uniform_new(int64_t n)
{
    real *x = malloc((size_t)n * sizeof(real));
    if (!x) exit(5);
    uint32_t state = 1;
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (real)(state >> 8) * 0x1p-23f - 1;
    }
    return x;
}

typedef struct { real *inp, *weight, *dout, *out, *dinp, *dweight; } Matrices;

static double time_once(int product, Matrices x, int64_t T, Layer s)
{
    double start = now_s();
    if (product == FORWARD) matmul_forward(x.out, x.inp, x.weight, T, s.K, s.N);
    if (product == BACKWARD_INPUT) matmul_backward_input(x.dinp, x.dout, x.weight, T, s.K, s.N);
    if (product == BACKWARD_WEIGHT) matmul_backward_weight(x.dweight, x.dout, x.inp, T, s.K, s.N);
    return now_s() - start;
}

static void bench_layer(int64_t T, Layer s)
{
    Matrices x = {uniform_new(T * s.K), uniform_new(s.N * s.K), uniform_new(T * s.N),
                  uniform_new(T * s.N), uniform_new(T * s.K), uniform_new(s.N * s.K)};
    static double times[MAX_LIST][MAX_ROUNDS];
    for (int product = 0; product < NUM_PRODUCTS; product++) {
        for (int round = -1; round < rounds; round++) {          // round -1 warms up
            for (int c = 0; c < num_candidates; c++) {
                matmul_select(candidates[c].name, candidates[c].bf16);
                double t = time_once(product, x, T, s);
                if (round >= 0) times[c][round] = t;
            }
        }
        printf("%5d %5dx%-5d %-8s", (int)T, (int)s.K, (int)s.N, product_names[product]);
        for (int c = 0; c < num_candidates; c++) {
            qsort(times[c], (size_t)rounds, sizeof(double), by_value);
            printf(" %9.1f", 2e-9 * (double)T * (double)s.K * (double)s.N / times[c][rounds / 2]);
        }
        printf("\n");
        fflush(stdout);
    }
    free(x.inp), free(x.weight), free(x.dout), free(x.out), free(x.dinp), free(x.dweight);
}

static void add_candidates(const char *only)
{
    for (size_t i = 0; i < sizeof(all_candidates) / sizeof(all_candidates[0]); i++) {
        const Candidate *c = &all_candidates[i];
        if (only && strcmp(only, c->title) != 0) continue;
        if (matmul_select(c->name, c->bf16) != 0) continue;
        candidates[num_candidates++] = *c;
        printf("%-9s %s\n", c->title, matmul_describe());
    }
}

int main(int argc, char **argv)
{
    int64_t tokens[MAX_LIST] = {1395, 4096};
    Layer layers[MAX_LIST] = {{576, 960}, {576, 576}, {576, 3072}, {1536, 576}, {576, 49152},
                              {192, 320}, {192, 1024}, {512, 192}};
    int num_tokens = 2, num_layers = 8, given_tokens = 0, given_layers = 0;
    for (int option; (option = getopt(argc, argv, "t:s:r:c:p")) != -1;) {
        long long a = 0, b = 0;
        if (option == 't' && given_tokens < MAX_LIST && sscanf(optarg, "%lld", &a) == 1) {
            tokens[given_tokens++] = a, num_tokens = given_tokens;
        } else if (option == 's' && given_layers < MAX_LIST &&
                   sscanf(optarg, "%lldx%lld", &a, &b) == 2) {
            layers[given_layers++] = (Layer){a, b}, num_layers = given_layers;
        } else if (option == 'r' && atoi(optarg) >= 1 && atoi(optarg) <= MAX_ROUNDS) {
            rounds = atoi(optarg);
        } else if (option == 'c' && num_candidates < MAX_LIST) {
            add_candidates(optarg);
        } else if (option == 'p') {
            bench_clock = CLOCK_PROCESS_CPUTIME_ID;
        } else {
            fprintf(stderr, "usage: bench_matmul [-t T]... [-s KxN]... [-r rounds] "
                            "[-c candidate]... [-p]\n");
            return 2;
        }
    }
    if (num_candidates == 0) add_candidates(NULL);
    printf("\n%5s %-11s %-8s", "T", "K x N", "GFLOP/s");
    for (int c = 0; c < num_candidates; c++) printf(" %9s", candidates[c].title);
    printf("\n");
    for (int t = 0; t < num_tokens; t++)
        for (int l = 0; l < num_layers; l++) bench_layer(tokens[t], layers[l]);
    return 0;
}
