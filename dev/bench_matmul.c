// GFLOP/s of the three products of a linear layer: our instruction sets, and OpenBLAS and oneDNN if
// installed (loaded at run time: the build needs neither). All candidates run alternately on the
// same matrices; the table shows medians over rounds. On a busy machine set OMP_WAIT_POLICY=passive
// (threads that spin at a barrier slow down those they wait for), or measure CPU time with one
// thread: OMP_NUM_THREADS=1 bench_matmul -p.
//
// usage: bench_matmul [-t T]... [-s KxN]... [-r rounds] [-c candidate]... [-p]
//        default: T 1395 and 4096, the layers of SmolLM2-135M and of the demo model, 7 rounds, all
//        candidates, wall-clock time
#include "../kernels/cpu/common.h"

#include <dlfcn.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// ------------------------------------------------------------------------------------------------
// Libraries. All three products are C (m, n) = or += A B, row-major, with A or B transposed.

// cblas.h's enums are passed as int
typedef void CblasSgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                        const float *a, int lda, const float *b, int ldb, float beta, float *c,
                        int ldc);
typedef int DnnlSgemm(char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                      const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                      float *c, int64_t ldc);
static CblasSgemm *cblas_sgemm_loaded;
static DnnlSgemm *dnnl_sgemm_loaded;

// a: (m, depth), or (depth, m) if trans_a; b: (depth, n), or (n, depth) if trans_b
typedef struct {
    real *c;
    const real *a, *b;
    int trans_a, trans_b;
    int64_t m, n, depth;
    float beta;
} Sgemm;

static void sgemm_openblas(Sgemm g) {
    enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
    cblas_sgemm_loaded(ROW_MAJOR, g.trans_a ? TRANS : NO_TRANS, g.trans_b ? TRANS : NO_TRANS,
                       (int)g.m, (int)g.n, (int)g.depth, 1, g.a, (int)(g.trans_a ? g.m : g.depth),
                       g.b, (int)(g.trans_b ? g.depth : g.n), g.beta, g.c, (int)g.n);
}

static void sgemm_onednn(Sgemm g) {
    if (dnnl_sgemm_loaded(g.trans_a ? 'T' : 'N', g.trans_b ? 'T' : 'N', g.m, g.n, g.depth, 1, g.a,
                          g.trans_a ? g.m : g.depth, g.b, g.trans_b ? g.depth : g.n, g.beta, g.c,
                          g.n) != 0)
        abort();
}

// The address of `symbol` in the first of the libraries that loads, or NULL. The library stays
// loaded.
static void *load_symbol(const char *symbol, const char *const libraries[2], void **library) {
    for (int i = 0; i < 2; i++) {
        *library = dlopen(libraries[i], RTLD_NOW | RTLD_LOCAL);
        if (*library) return dlsym(*library, symbol);
    }
    return NULL;
}

// OpenBLAS reads OPENBLAS_CORETYPE while loading. Without it, versions up to 0.3.21 use AVX2
// kernels on newer AVX-512 CPUs, often at half the speed.
static int load_openblas(void) {
    void *library = NULL, *symbol;
    const char *const names[2] = {"libopenblas.so.0", "libopenblas.so"};
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        setenv("OPENBLAS_CORETYPE", "SKYLAKEX", 0);
#endif
    if (!(symbol = load_symbol("cblas_sgemm", names, &library))) return 0;
    memcpy(&cblas_sgemm_loaded, &symbol, sizeof symbol);
    void (*set_threads)(int) = NULL;
    symbol = dlsym(library, "openblas_set_num_threads");
    memcpy(&set_threads, &symbol, sizeof symbol);
    if (set_threads) set_threads(omp_get_max_threads());
    return 1;
}

static int load_onednn(void) {
    void *library = NULL, *symbol;
    const char *const names[2] = {"libdnnl.so.3", "libdnnl.so.2"};
    if (!(symbol = load_symbol("dnnl_sgemm", names, &library))) return 0;
    memcpy(&dnnl_sgemm_loaded, &symbol, sizeof symbol);
    return 1;
}

// ------------------------------------------------------------------------------------------------
// Candidates

// Ours, if `set` is given, else a library's
typedef struct {
    const char *title, *set;
    int bf16;
    int (*load)(void);
    void (*sgemm)(Sgemm g);
} Candidate;
static const Candidate all_candidates[] = {
    {"avx512", "avx512", 0, NULL, NULL},
    {"avx2", "avx2", 0, NULL, NULL},
    {"portable", "portable", 0, NULL, NULL},
    {"openblas", NULL, 0, load_openblas, sgemm_openblas},
    {"onednn", NULL, 0, load_onednn, sgemm_onednn},
    {"bf16", "avx512_bf16", 1, NULL, NULL},
};
typedef struct {
    int64_t K, N;
} Layer;
enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, NUM_PRODUCTS, MAX_LIST = 32, MAX_ROUNDS = 101 };
static const char *const product_names[NUM_PRODUCTS] = {"forward", "dinp", "dweight"};

static Candidate candidates[MAX_LIST];
static int num_candidates, rounds = 7;
static clockid_t bench_clock = CLOCK_MONOTONIC;

static double now_s(void) {
    struct timespec t;
    clock_gettime(bench_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static real *uniform_new(int64_t n) {
    real *x = malloc((size_t)n * sizeof(real));
    if (!x) exit(5);
    uint32_t state = 1;
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (real)(state >> 8) * 0x1p-23f - 1;
    }
    return x;
}

typedef struct {
    real *inp, *weight, *dout, *out, *dinp, *dweight;
} Matrices;

static void multiply_by(const Candidate *c, int product, Matrices x, int64_t T, Layer s) {
    if (product == FORWARD)
        c->sgemm((Sgemm){x.out, x.inp, x.weight, 0, 1, T, s.N, s.K, 0});
    else if (product == BACKWARD_INPUT)
        c->sgemm((Sgemm){x.dinp, x.dout, x.weight, 0, 0, T, s.K, s.N, 0});
    else
        c->sgemm((Sgemm){x.dweight, x.dout, x.inp, 1, 0, s.N, s.K, T, 1});
}

static double time_once(const Candidate *c, int product, Matrices x, int64_t T, Layer s) {
    if (c->set) matmul_select(c->set, c->bf16);
    double start = now_s();
    if (c->sgemm) {
        multiply_by(c, product, x, T, s);
        return now_s() - start;
    }
    if (product == FORWARD) matmul_forward(x.out, x.inp, x.weight, T, s.K, s.N);
    if (product == BACKWARD_INPUT) matmul_backward_input(x.dinp, x.dout, x.weight, T, s.K, s.N);
    if (product == BACKWARD_WEIGHT)
        matmul_backward_weight(x.dweight, x.dout, x.inp, true, T, s.K, s.N);
    return now_s() - start;
}

static void bench_layer(int64_t T, Layer s) {
    Matrices x = {uniform_new(T * s.K), uniform_new(s.N * s.K), uniform_new(T * s.N),
                  uniform_new(T * s.N), uniform_new(T * s.K),   uniform_new(s.N * s.K)};
    static double times[MAX_LIST][MAX_ROUNDS];
    for (int product = 0; product < NUM_PRODUCTS; product++) {
        for (int round = -1; round < rounds; round++) {  // round -1 warms up
            for (int c = 0; c < num_candidates; c++) {
                double t = time_once(&candidates[c], product, x, T, s);
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

static void add_candidates(const char *only) {
    for (size_t i = 0; i < sizeof(all_candidates) / sizeof(all_candidates[0]); i++) {
        const Candidate *c = &all_candidates[i];
        if (only && strcmp(only, c->title) != 0) continue;
        if (c->set ? !matmul_select(c->set, c->bf16) : !c->load()) continue;
        candidates[num_candidates++] = *c;
        printf("%-9s %s\n", c->title, c->set ? matmul_describe() : "library");
    }
}

int main(int argc, char **argv) {
    int64_t tokens[MAX_LIST] = {1395, 4096};
    Layer layers[MAX_LIST] = {{576, 960},   {576, 576}, {576, 3072}, {1536, 576},
                              {576, 49152}, {192, 320}, {192, 1024}, {512, 192}};
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
            fprintf(stderr,
                    "usage: bench_matmul [-t T]... [-s KxN]... [-r rounds] "
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
