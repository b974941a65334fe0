// Speed of kernels/cpu/attention.c: useful GFLOP/s, forward and backward, on batches of documents.
//   make build/cpu/bench_attention && build/cpu/bench_attention [threads [runs]]
// Useful FLOPs count each unmasked (query, key) pair once: 4 * D * H * pairs forward, 10 * D * H *
// pairs backward, pairs = sum of len * (len + 1) / 2. Times are of whole calls; figures are
// medians.
#include <math.h>
#include <omp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "../kernels/kernels.h"

enum { MAX_RUNS = 101 };

typedef struct {
    int32_t *cu_seqlens, *work;
    int num_docs, longest;
    int64_t pairs;
    HeadShape heads;
} Batch;
typedef struct {
    double forward_s, backward_s;
} Times;

static double now_s(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *allocate(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!p) exit((fprintf(stderr, "error: host memory: %zu bytes\n", bytes), 5));
    return p;
}

static floatX *random_values(int64_t n) {
    static uint64_t state = 1;
    floatX *x = allocate((size_t)n * sizeof(floatX));
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        x[i] = (floatX)((double)(state >> 33) * 0x1p-30 - 1);
    }
    return x;
}

// Documents of the given lengths, repeated; planned for `plan_threads` threads
static Batch make_batch(const int *lengths, int n, int repeats, HeadShape heads, int plan_threads) {
    Batch b = {.num_docs = n * repeats, .heads = heads};
    b.cu_seqlens = allocate((size_t)(b.num_docs + 1) * sizeof(int32_t));
    b.cu_seqlens[0] = 0;
    for (int i = 0; i < b.num_docs; i++) {
        int64_t len = lengths[i % n];
        b.cu_seqlens[i + 1] = b.cu_seqlens[i] + (int32_t)len;
        b.longest = len > b.longest ? (int)len : b.longest;
        b.pairs += len * (len + 1) / 2;
    }
    b.work = allocate(attention_plan_size(b.cu_seqlens[b.num_docs], b.num_docs) * sizeof(int32_t));
    int threads = omp_get_max_threads();
    omp_set_num_threads(plan_threads);
    attention_plan(b.work, b.cu_seqlens, b.num_docs, heads);
    omp_set_num_threads(threads);
    return b;
}

static void free_batch(Batch b) {
    free(b.cu_seqlens);
    free(b.work);
}

static int by_value(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof(double), by_value);
    return x[n / 2];
}

// Naive attention, one row of scores at a time, with loops over head_dim that the compiler may
// vectorise
static void naive_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                          HeadShape s) {
    const int D = s.head_dim, H = s.num_heads, group = H / s.num_kv_heads,
              row = (H + 2 * s.num_kv_heads) * D;
    static real p[4096];
    for (int doc = 0; doc < docs->num_docs; doc++)
        for (int h = 0; h < H; h++)
            for (int start = docs->cu_seqlens[doc], i = start; i < docs->cu_seqlens[doc + 1]; i++) {
                const floatX *q = qkv + i * row + h * D,
                             *k = qkv + start * row + (H + h / group) * D;
                const floatX *v = k + s.num_kv_heads * D;
                floatX *RESTRICT o = out + (i * H + h) * D;
                real top = -INFINITY, sum = 0;
                for (int j = 0; j <= i - start; j++) {
                    p[j] = 0;
                    for (int x = 0; x < D; x++) p[j] += q[x] * k[j * row + x];
                    p[j] *= (real)(1 / sqrt(D));
                    top = p[j] > top ? p[j] : top;
                }
                for (int x = 0; x < D; x++) o[x] = 0;
                for (int j = 0; j <= i - start; j++) {
                    p[j] = expf(p[j] - top);
                    sum += p[j];
                    for (int x = 0; x < D; x++) o[x] += p[j] * v[j * row + x];
                }
                for (int x = 0; x < D; x++) o[x] /= sum;
                lse[(int64_t)h * docs->total_tokens + i] = top + logf(sum);
            }
}

static Times measure(const Batch *b, int runs) {
    const HeadShape h = b->heads;
    const int64_t T = b->cu_seqlens[b->num_docs],
                  row = (int64_t)(h.num_heads + 2 * h.num_kv_heads) * h.head_dim;
    const int64_t out_row = (int64_t)h.num_heads * h.head_dim;
    const VarlenInfo docs = {b->cu_seqlens, b->work, (int32_t)T, b->num_docs, b->longest};
    floatX *qkv = random_values(T * row), *dout = random_values(T * out_row),
           *dqkv = random_values(T * row);
    floatX *out = random_values(T * out_row);
    real *lse = allocate((size_t)(T * h.num_heads) * sizeof(real)),
         *delta = allocate((size_t)(T * h.num_heads) * sizeof(real)),
         *rope_table = allocate((size_t)h.head_dim * sizeof(real));  // every token at position 0
    int32_t *position_ids = allocate((size_t)T * sizeof(int32_t));
    memset(position_ids, 0, (size_t)T * sizeof(int32_t));
    for (int i = 0; i < h.head_dim; i++) rope_table[i] = (real)(i % 2 ? 0.6 : 0.8);
    double forward_s[MAX_RUNS], backward_s[MAX_RUNS];
    for (int r = -1; r < runs; r++) {
        double start = now_s();
        attention_forward(out, lse, qkv, &docs, h);
        double middle = now_s();
        attention_backward(dqkv, delta, dout, qkv, out, lse, position_ids, rope_table, &docs, h);
        if (r < 0) continue;
        forward_s[r] = middle - start;
        backward_s[r] = now_s() - middle;
    }
    free(qkv), free(dout), free(dqkv), free(out), free(lse), free(delta);
    free(rope_table), free(position_ids);
    return (Times){median(forward_s, runs), median(backward_s, runs)};
}

static double measure_naive_s(const Batch *b, int runs) {
    const HeadShape h = b->heads;
    const int64_t T = b->cu_seqlens[b->num_docs],
                  row = (int64_t)(h.num_heads + 2 * h.num_kv_heads) * h.head_dim;
    const VarlenInfo docs = {b->cu_seqlens, b->work, (int32_t)T, b->num_docs, b->longest};
    floatX *qkv = random_values(T * row), *out = random_values(T * h.num_heads * h.head_dim);
    real *lse = allocate((size_t)(T * h.num_heads) * sizeof(real));
    double time_s[MAX_RUNS];
    for (int r = 0; r < runs; r++) {
        double start = now_s();
        naive_forward(out, lse, qkv, &docs, h);
        time_s[r] = now_s() - start;
    }
    free(qkv), free(out), free(lse);
    return median(time_s, runs);
}

static void report_short(HeadShape heads, int threads, int runs) {
    for (int len = 1; len <= 32; len *= 2) {
        Batch b = make_batch(&len, 1, 2048 / len < 256 ? 2048 / len : 256, heads, threads);
        Times t = measure(&b, runs);
        double naive_s = measure_naive_s(&b, runs);
        printf(
            "  %4d x %-2d tokens: forward %7.3f ms, naive on one thread %7.3f ms (%.1fx)   "
            "backward %7.3f ms\n",
            b.num_docs, len, t.forward_s * 1e3, naive_s * 1e3, naive_s / t.forward_s,
            t.backward_s * 1e3);
        free_batch(b);
    }
}

static Times report(const char *name, const int *lengths, int n, int repeats, HeadShape heads,
                    int plan_threads, int runs) {
    Batch b = make_batch(lengths, n, repeats, heads, plan_threads);
    Times t = measure(&b, runs);
    double gflop = 4e-9 * heads.head_dim * heads.num_heads * (double)b.pairs;
    printf("  %-34s %8d tokens  forward %8.3f ms %6.1f GFLOP/s   backward %8.3f ms %6.1f GFLOP/s\n",
           name, b.cu_seqlens[b.num_docs], t.forward_s * 1e3, gflop / t.forward_s,
           t.backward_s * 1e3, 2.5 * gflop / t.backward_s);
    free_batch(b);
    return t;
}

static void one_isa(const char *isa, int threads, int runs) {
    static const int seed[] = {220, 217, 295, 183, 130, 350};
    static const int rows[] = {2048, 2048, 2048, 2048, 2048, 2048};
    const HeadShape smol = {9, 3, 64}, wide = {32, 8, 128};
    if (attention_select(isa) != 0) {
        printf("%s: not on this machine\n", isa);
        return;
    }
    printf("%s, %d threads\n", isa, threads);
    Times packed = report("seed batch, 9/3 heads, D 64", seed, 6, 1, smol, threads, runs);
    Times padded = report("the same padded to rows of 2048", rows, 6, 1, smol, threads, 3);
    printf("  %-34s forward %.1fx, backward %.1fx\n", "padded / packed time",
           padded.forward_s / packed.forward_s, padded.backward_s / packed.backward_s);
    report("4 x 512", (int[]){512}, 1, 4, smol, threads, runs);
    report("2 x 1000", (int[]){1000}, 1, 2, smol, threads, runs);
    report("1 x 2048", (int[]){2048}, 1, 1, smol, threads, runs);
    report("1 x 2048, two-pass backward", (int[]){2048}, 1, 1, smol, 64, runs);
    report("1 x 1000, 32/8 heads, D 128", (int[]){1000}, 1, 1, wide, threads, runs);
    report("32 x 64", (int[]){64}, 1, 32, smol, threads, runs);
    report("16 x 128", (int[]){128}, 1, 16, smol, threads, runs);
    report_short(smol, threads, runs);
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : omp_get_max_threads(),
        runs = argc > 2 ? atoi(argv[2]) : 11;
    if (threads < 1 || runs < 1 || runs > MAX_RUNS)
        return fprintf(stderr, "usage: %s [threads [runs]]; runs up to %d\n", argv[0], MAX_RUNS), 2;
    omp_set_num_threads(threads);
    one_isa("avx512", threads, runs);
    one_isa("avx2", threads, runs);
    one_isa("portable", threads, runs < 3 ? runs : 3);
    return 0;
}
