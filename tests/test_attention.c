// kernels/cpu/attention.c and rope.c against a naive fp64 reference, against themselves (packed =
// alone = permuted, bit for bit), against published figures and, with -DGRADCHECK, against central
// differences.
// Every run has NaN in the rows past total_tokens and canaries after every buffer.
#define _POSIX_C_SOURCE 200809L
#include <float.h>
#include <math.h>
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../kernels/kernels.h"
#include "notebook.h"
#include "test.h"

#ifdef GRADCHECK
#define ROUNDING (DBL_EPSILON / 2)
#define SMALLEST DBL_MIN
enum { LAYOUTS = 150 };
#else
#define ROUNDING (FLT_EPSILON / 2)
#define SMALLEST FLT_MIN
#if defined(__SANITIZE_ADDRESS__)
enum { LAYOUTS = 300 };
#else
enum { LAYOUTS = 1000 };
#endif
#endif
enum { SLACK_ROWS = 3, MAX_DOCS = 600, TILE = 64 };

static int at_most(int a, int b) { return a < b ? a : b; }

// -------------------------------------------------------------------------------------------------
// A batch: documents, inputs, results

typedef struct {
    HeadShape heads;
    int num_docs, T;
    int32_t *cu_seqlens, *work;
    floatX *qkv, *dout, *out, *dqkv;
    real *lse, *delta, *rope_table;
    int32_t *position_ids;
} Batch;

static int64_t qkv_row(HeadShape h) {
    return (int64_t)(h.num_heads + 2 * h.num_kv_heads) * h.head_dim;
}
static int64_t out_row(HeadShape h) { return (int64_t)h.num_heads * h.head_dim; }

// n values and the slack after them, all bits set: a NaN, and a canary that memcmp can check
static void *new_values(int64_t n, int64_t slack) {
    size_t bytes = (size_t)(n + slack) * sizeof(real);
    void *p = malloc(bytes);
    CHECK(p != NULL);
    return memset(p, 0xff, bytes);
}

static void check_canary(const char *what, const real *p, int64_t n, int64_t slack) {
    const unsigned char *bytes = (const unsigned char *)(p + n);
    for (size_t i = 0; i < (size_t)slack * sizeof(real); i++)
        CHECK_MSG(bytes[i] == 0xff, "%s was written past its end, at byte %zu", what, i);
}

static Batch new_batch(HeadShape heads, const int *lengths, int num_docs) {
    Batch b = {.heads = heads, .num_docs = num_docs};
    b.cu_seqlens = malloc((size_t)(num_docs + 1) * sizeof(int32_t));
    b.cu_seqlens[0] = 0;
    for (int i = 0; i < num_docs; i++) b.cu_seqlens[i + 1] = b.cu_seqlens[i] + lengths[i];
    b.T = b.cu_seqlens[num_docs];
    b.work = malloc(attention_plan_size(b.T, num_docs) * sizeof(int32_t));
    b.qkv = new_values(b.T * qkv_row(heads), SLACK_ROWS * qkv_row(heads));
    b.dqkv = new_values(b.T * qkv_row(heads), SLACK_ROWS * qkv_row(heads));
    b.dout = new_values(b.T * out_row(heads), SLACK_ROWS * out_row(heads));
    b.out = new_values(b.T * out_row(heads), SLACK_ROWS * out_row(heads));
    // angles of 0 unless a test sets others: queries and keys are not rotated
    b.position_ids = calloc((size_t)b.T + 1, sizeof(int32_t));
    b.rope_table = calloc((size_t)heads.head_dim, sizeof(real));
    for (int i = 0; i < heads.head_dim; i += 2) b.rope_table[i] = 1;
    b.lse = new_values((int64_t)b.T * heads.num_heads, SLACK_ROWS);
    b.delta = new_values((int64_t)b.T * heads.num_heads, SLACK_ROWS);
    return b;
}

static void free_batch(Batch b) {
    free(b.cu_seqlens), free(b.work), free(b.qkv), free(b.dqkv), free(b.dout), free(b.out);
    free(b.lse), free(b.delta), free(b.position_ids), free(b.rope_table);
}

static void random_values(floatX *x, int64_t n, double scale) {
    for (int64_t i = 0; i < n; i++) x[i] = (floatX)(scale * (4 * test_rng_uniform() - 2));
}

static Batch random_batch(HeadShape heads, const int *lengths, int num_docs, double scale) {
    Batch b = new_batch(heads, lengths, num_docs);
    random_values(b.qkv, b.T * qkv_row(heads), scale);
    random_values(b.dout, b.T * out_row(heads), 1);
    return b;
}

static void run(Batch *b) {
    const HeadShape h = b->heads;
    int longest = 0;
    for (int i = 0; i < b->num_docs; i++) {
        int len = b->cu_seqlens[i + 1] - b->cu_seqlens[i];
        longest = len > longest ? len : longest;
    }
    size_t used = attention_plan(b->work, b->cu_seqlens, b->num_docs, h);
    CHECK(used <= attention_plan_size(b->T, b->num_docs));
    VarlenInfo docs = {b->cu_seqlens, b->work, b->T, b->num_docs, longest};
    attention_forward(b->out, b->lse, b->qkv, &docs, h);
    attention_backward(b->dqkv, b->delta, b->dout, b->qkv, b->out, b->lse, b->position_ids,
                       b->rope_table, &docs, h);
    check_canary("out", b->out, b->T * out_row(h), SLACK_ROWS * out_row(h));
    check_canary("dqkv", b->dqkv, b->T * qkv_row(h), SLACK_ROWS * qkv_row(h));
    check_canary("lse", b->lse, (int64_t)b->T * h.num_heads, SLACK_ROWS);
    check_canary("delta", b->delta, (int64_t)b->T * h.num_heads, SLACK_ROWS);
}

// Copies the inputs of document j of b into document i of a
static void copy_doc(Batch *a, int i, const Batch *b, int j) {
    int64_t to = a->cu_seqlens[i], from = b->cu_seqlens[j], n = b->cu_seqlens[j + 1] - from;
    int64_t row = qkv_row(b->heads), orow = out_row(b->heads);
    memcpy(a->qkv + to * row, b->qkv + from * row, (size_t)(n * row) * sizeof(floatX));
    memcpy(a->dout + to * orow, b->dout + from * orow, (size_t)(n * orow) * sizeof(floatX));
}

static int same_bits(const real *a, const real *b, int64_t n) {
    return memcmp(a, b, (size_t)n * sizeof(real)) == 0;
}

// Rows [0, n) of document i of a and j of b: out and lse; and dqkv if asked
static void check_same_rows(const char *what, const Batch *a, int i, const Batch *b, int j, int n,
                            int gradients) {
    int64_t at = a->cu_seqlens[i], bt = b->cu_seqlens[j], row = qkv_row(a->heads),
            orow = out_row(a->heads);
    CHECK_MSG(same_bits(a->out + at * orow, b->out + bt * orow, n * orow),
              "%s: out of document %d differs", what, i);
    for (int h = 0; h < a->heads.num_heads; h++)
        CHECK_MSG(same_bits(a->lse + (int64_t)h * a->T + at, b->lse + (int64_t)h * b->T + bt, n),
                  "%s: lse of document %d, head %d differs", what, i, h);
    if (gradients)
        CHECK_MSG(same_bits(a->dqkv + at * row, b->dqkv + bt * row, n * row),
                  "%s: dqkv of document %d differs", what, i);
}

static void check_same_doc(const char *what, const Batch *a, int i, const Batch *b, int j) {
    check_same_rows(what, a, i, b, j, a->cu_seqlens[i + 1] - a->cu_seqlens[i], 1);
}

// -------------------------------------------------------------------------------------------------
// Choices of the random tests

static const HeadShape all_heads[] = {
    {1, 1, 8},  {2, 2, 16}, {4, 1, 8},   {9, 3, 8},  {5, 5, 6},   {15, 5, 8}, {32, 8, 8},
    {3, 1, 24}, {3, 1, 64}, {1, 1, 128}, {4, 2, 64}, {2, 1, 128}, {9, 3, 64},
};

// Mostly the first, small ones
static HeadShape random_heads(void) {
    return all_heads[test_rng_below(test_rng_below(8) ? 5
                                                      : sizeof(all_heads) / sizeof(all_heads[0]))];
}

static int random_length(void) {
    static const int edges[] = {0,  1,  2,  3,  5,  6,  7,  8,   15,  16,  17,
                                31, 33, 62, 63, 64, 65, 66, 127, 128, 129, 193};
    if (test_rng_below(4) == 0) return (int)test_rng_below(90);
    return edges[test_rng_below(sizeof(edges) / sizeof(edges[0]))];
}

static int random_lengths(int *lengths) {
    int n = 1 + (int)test_rng_below(5);
    for (int i = 0; i < n; i++) lengths[i] = random_length();
    if (test_rng_below(8) == 0) lengths[0] = 0;
    if (test_rng_below(8) == 0) lengths[n - 1] = 0;
    return n;
}

// Another instruction set and number of threads for each layout: only the former may change results
static const char *const isas[] = {"portable", "avx2", "avx512"};
static void random_isa(void) {
    while (attention_select(isas[test_rng_below(3)]) != 0) {
    }
}
static void random_threads(void) { omp_set_num_threads(1 + (int)test_rng_below(3)); }

// -------------------------------------------------------------------------------------------------
// The reference: fp64, one document and one head at a time, with the whole matrix of probabilities

typedef struct {
    double *out, *lse, *dqkv;
    double *tol_out, *tol_lse, *tol_dqkv;
} Reference;

// Rounding error of a sum of n terms, relative to the sum of their magnitudes: lambda sqrt(n) u
// with lambda = 8 (probabilistic bound, Higham and Mary 2019); the worst case is n u.
static double sum_error(double n) { return 8 * sqrt(n) * ROUNDING; }

typedef struct {
    const floatX *q, *k, *v, *dout;  // of the document's first token
    int64_t row, orow;
    int len, D;
} Head;

static double dot(const floatX *a, const floatX *b, int n, int magnitude) {
    double s = 0;
    for (int i = 0; i < n; i++) s += magnitude ? fabs((double)a[i] * b[i]) : (double)a[i] * b[i];
    return s;
}

// One row of queries. p (len) is scratch. Tolerances come from the same formulas, applied to
// magnitudes.
static void reference_row(const Head *h, int i, double *p, double *out, double *lse,
                          double *tol_out, double *tol_lse, double *dq, double *dk, double *dv,
                          double *tol_dq, double *tol_dk, double *tol_dv) {
    const int D = h->D;
    const double scale = 1 / sqrt(D);
    const floatX *q = h->q + i * h->row, *dout = h->dout + i * h->orow;
    double top = -INFINITY, sum = 0, score_error = 0, largest = 0, delta = 0, delta_size = 0;
    for (int j = 0; j <= i; j++) {
        p[j] = scale * dot(q, h->k + j * h->row, D, 0);
        top = fmax(top, p[j]);
        score_error = fmax(score_error, sum_error(D + 4) * scale * dot(q, h->k + j * h->row, D, 1));
    }
    for (int j = 0; j <= i; j++) sum += p[j] = exp(p[j] - top);
    for (int j = 0; j <= i; j++) p[j] /= sum;
    *lse = top + log(sum);
    *tol_lse = score_error + sum_error(i + 4) + 4 * ROUNDING * fabs(*lse);
    const double p_error = score_error + *tol_lse + 8 * ROUNDING;  // relative, of a probability
    for (int x = 0; x < D; x++) {
        out[x] = 0;
        for (int j = 0; j <= i; j++) {
            out[x] += p[j] * h->v[j * h->row + x];
            largest = fmax(largest, fabs((double)h->v[j * h->row + x]));
        }
        delta += dout[x] * out[x];
    }
    for (int x = 0; x < D; x++) {
        tol_out[x] = largest * (p_error + sum_error(i + 4));
        delta_size += fabs((double)dout[x]) * largest;
    }
    for (int j = 0; j <= i; j++) {
        const floatX *k = h->k + j * h->row, *v = h->v + j * h->row;
        double ds = p[j] * (dot(dout, v, D, 0) - delta),
               size = p[j] * (dot(dout, v, D, 1) + delta_size);
        double lost = SMALLEST * (dot(dout, v, D, 1) + delta_size + 1);  // a p that underflows
        double error = p_error + sum_error(D) + sum_error(h->len) + 8 * ROUNDING;
        for (int x = 0; x < D; x++) {
            dv[j * D + x] += p[j] * dout[x];
            dk[j * D + x] += scale * ds * q[x];
            dq[x] += scale * ds * k[x];
            tol_dv[j * D + x] += error * fabs(p[j] * dout[x]) + SMALLEST * fabs((double)dout[x]);
            tol_dk[j * D + x] += error * fabs(scale * size * q[x]) + lost * fabs(scale * q[x]);
            tol_dq[x] += error * fabs(scale * size * k[x]) + lost * fabs(scale * k[x]);
        }
    }
}

static void check_close(const char *what, const real *got, const double *want,
                        const double *tolerance, int64_t n, double *worst) {
    for (int64_t x = 0; x < n; x++) {
        double error = fabs(got[x] - want[x]);
        CHECK_MSG(error <= tolerance[x], "%s[%lld]: got %.9g, expected %.9g within %.3g", what,
                  (long long)x, (double)got[x], want[x], tolerance[x]);
        if (tolerance[x] > 0) *worst = fmax(*worst, error / tolerance[x]);
    }
}

static double *zeros(int64_t n) { return calloc((size_t)(n + 1), sizeof(double)); }

// All results of query heads [first, first + group) and their kv head, for one document
static void check_group(const Batch *b, int doc, int kv, double *worst) {
    const HeadShape hs = b->heads;
    const int group = hs.num_heads / hs.num_kv_heads, D = hs.head_dim;
    const int64_t row = qkv_row(hs), orow = out_row(hs), start = b->cu_seqlens[doc];
    const int64_t k_at = (int64_t)(hs.num_heads + kv) * D,
                  v_at = k_at + (int64_t)hs.num_kv_heads * D;
    const int len = b->cu_seqlens[doc + 1] - b->cu_seqlens[doc];
    double *p = zeros(len), *dk = zeros(2 * len * D), *dv = dk + len * D,
           *tol_dk = zeros(2 * len * D);
    double *tol_dv = tol_dk + len * D, *values = zeros(4 * D);
    double *out = values, *tol_out = values + D, *dq = values + 2 * D, *tol_dq = values + 3 * D;
    for (int g = 0; g < group; g++) {
        const int64_t at = (int64_t)(kv * group + g) * D;
        const floatX *qkv = b->qkv + start * row;
        Head h = {qkv + at, qkv + k_at, qkv + v_at,  b->dout + start * orow + at,
                  row,      orow,       group * len, D};
        for (int i = 0; i < len; i++) {
            double lse, tol_lse;
            memset(dq, 0, sizeof(double) * 2 * D);
            reference_row(&h, i, p, out, &lse, tol_out, &tol_lse, dq, dk, dv, tol_dq, tol_dk,
                          tol_dv);
            check_close("out", b->out + (start + i) * orow + at, out, tol_out, D, worst);
            check_close("lse", b->lse + (int64_t)(kv * group + g) * b->T + start + i, &lse,
                        &tol_lse, 1, worst);
            check_close("dq", b->dqkv + (start + i) * row + at, dq, tol_dq, D, worst);
        }
    }
    for (int i = 0; i < len; i++) {
        check_close("dk", b->dqkv + (start + i) * row + k_at, dk + i * D, tol_dk + i * D, D, worst);
        check_close("dv", b->dqkv + (start + i) * row + v_at, dv + i * D, tol_dv + i * D, D, worst);
    }
    free(p), free(dk), free(tol_dk), free(values);
}

static double check_reference(Batch *b) {
    double worst = 0;
    run(b);
    for (int doc = 0; doc < b->num_docs; doc++)
        for (int kv = 0; kv < b->heads.num_kv_heads; kv++) check_group(b, doc, kv, &worst);
    return worst;
}

// Selects it. False if this CPU or this build lacks it; fails if it should not.
static bool select_isa(const char *isa) {
    bool there = strcmp(isa, "portable") == 0 || strcmp(isa, "auto") == 0;
#if defined(__x86_64__) && !defined(GRADCHECK)
    if (strcmp(isa, "avx2") == 0)
        there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(isa, "avx512") == 0)
        there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
#endif
    CHECK_MSG((attention_select(isa) == 0) == there, "%s", isa);
    return there;
}

static void against_reference(const char *isa, HeadShape heads, const int *lengths, int num_docs,
                              double scale) {
    if (!select_isa(isa)) return;  // others are compared; reference_<isa> counts it as skipped
    random_threads();
    Batch b = random_batch(heads, lengths, num_docs, scale);
    check_reference(&b);
    free_batch(b);
}

static void grid_against_reference(const char *isa) {
    static const int lengths[] = {1, 0, 2, 7, 64, 65, 33, 0, 0, 129, 16};
    if (!select_isa(isa)) SKIP("no %s on this machine", isa);
    for (size_t i = 0; i < sizeof(all_heads) / sizeof(all_heads[0]); i++) {
        int many =
            (int)(all_heads[i].num_heads * all_heads[i].head_dim > 128);  // the reference is slow
        against_reference(isa, all_heads[i], lengths, many ? 6 : 11, 1);
        against_reference(isa, all_heads[i], (int[]){0, 66, 3}, 3, 0.1);
    }
}

TEST(reference_portable) { grid_against_reference("portable"); }
#ifndef GRADCHECK
TEST(reference_avx2) { grid_against_reference("avx2"); }
TEST(reference_avx512) { grid_against_reference("avx512"); }
#endif

TEST(reference_huge_document) {
    for (int i = 0; i < 3; i++)
        against_reference(isas[i], (HeadShape){1, 1, 8}, (int[]){3, 1100, 2}, 3, 1);
    against_reference("auto", (HeadShape){1, 1, 8}, (int[]){2100}, 1, 1);
}

// Large scores: most rows are one spike, exp underflows for the rest
TEST(reference_spikes) {
    for (int i = 0; i < 3; i++) {
        against_reference(isas[i], (HeadShape){3, 1, 64}, (int[]){130, 64, 1, 5}, 4, 5);
        against_reference(isas[i], (HeadShape){2, 2, 16}, (int[]){200, 17}, 2, 25);
    }
}

TEST(reference_random_layouts) {
    for (int n = 0; n < LAYOUTS / 10; n++) {
        int lengths[MAX_DOCS], num_docs = random_lengths(lengths);
        HeadShape heads = random_heads();
        if (out_row(heads) > 200) heads.head_dim = 8;
        against_reference(isas[n % 3], heads, lengths, num_docs, 1);
    }
}

// Two keys with scores 0 and x, values 0 and 1: the output is p = e^x / (1 + e^x), so this is the
// accuracy of the exponential: x has four roundings, p a few more.
TEST(probability_of_two_keys) {
    enum { PAIRS = 300 };
    int lengths[PAIRS];
    for (int i = 0; i < PAIRS; i++) lengths[i] = 2;
    for (int n = 0; n < 3; n++) {
        if (!select_isa(isas[n])) continue;
        Batch b = new_batch((HeadShape){1, 1, 2}, lengths, PAIRS);
        for (int i = 0; i < PAIRS; i++) {
            const floatX x = (floatX)(i < 200 ? i * -0.01 : (i - 200) * -0.8);
            const floatX tokens[] = {0, 0, 0, 0, 0, 0, x, 0, 1, 0, 1, 0};  // q, k, v, twice
            memcpy(b.qkv + i * 12, tokens, sizeof(tokens));
        }
        random_values(b.dout, b.T * 2, 1);
        run(&b);
        for (int i = 0; i < PAIRS; i++) {
            const double x = b.qkv[i * 12 + 6] / sqrt(2), p = exp(x) / (1 + exp(x));
            const double error = fabs(b.out[i * 4 + 2] - p) / p;
            CHECK_MSG(error <= (4 * fabs(x) + 6) * ROUNDING, "%s: e^%g is wrong by %.1f roundings",
                      isas[n], x, error / ROUNDING);
        }
        free_batch(b);
    }
}

// All keys equal: probabilities are uniform, the output is the running mean of v, lse = score +
// log(count)
TEST(uniform_softmax) {
    for (int n = 0; n < 3; n++) {
        if (!select_isa(isas[n])) continue;
        const HeadShape h = {3, 1, 16};
        Batch b = random_batch(h, (int[]){5, 150, 1}, 3, 1);
        for (int t = 0; t < b.T; t++)
            memcpy(b.qkv + t * qkv_row(h) + 3 * 16, b.qkv + 3 * 16, 16 * sizeof(floatX));
        run(&b);
        for (int doc = 0; doc < 3; doc++) {
            double sum = 0, size = 0;
            for (int t = b.cu_seqlens[doc]; t < b.cu_seqlens[doc + 1]; t++) {
                int count = t - b.cu_seqlens[doc] + 1;
                const double v = b.qkv[t * qkv_row(h) + 4 * 16];
                sum += v, size += fabs(v);
                const floatX *q = b.qkv + t * qkv_row(h), *k = b.qkv + 3 * 16;
                const double score = dot(q, k, 16, 0) / 4, score_size = dot(q, k, 16, 1) / 4;
                // the probabilities are equal and their sum is exact: the sum of v is rounded, and
                // for lse the score, a logarithm and one addition
                CHECK(fabs(b.out[t * out_row(h)] - sum / count) <=
                      sum_error(count + 4) * size / count);
                CHECK(fabs(b.lse[t] - score - log(count)) <=
                      sum_error(16) * score_size +
                          4 * ROUNDING * (fabs((double)b.lse[t]) + fabs(score) + log(count)));
            }
        }
        free_batch(b);
    }
}

// -------------------------------------------------------------------------------------------------
// Properties, bit for bit

static void check_alone(const Batch *packed) {
    for (int i = 0; i < packed->num_docs; i++) {
        int len = packed->cu_seqlens[i + 1] - packed->cu_seqlens[i];
        if (len == 0) continue;
        Batch alone = new_batch(packed->heads, &len, 1);
        copy_doc(&alone, 0, packed, i);
        random_threads();
        run(&alone);
        check_same_doc("alone", packed, i, &alone, 0);
        free_batch(alone);
    }
}

static void check_permuted(const Batch *packed, const int *lengths) {
    int order[MAX_DOCS], permuted[MAX_DOCS] = {0}, n = packed->num_docs;
    for (int i = 0; i < n; i++) {
        int j = (int)test_rng_below((uint32_t)i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < n; i++) permuted[i] = lengths[order[i]];
    Batch b = new_batch(packed->heads, permuted, n);
    for (int i = 0; i < n; i++) copy_doc(&b, i, packed, order[i]);
    random_threads();
    run(&b);
    for (int i = 0; i < n; i++) check_same_doc("permuted", &b, i, packed, order[i]);
    free_batch(b);
}

static void packed_alone_permuted(HeadShape heads, const int *lengths, int num_docs) {
    random_isa();
    random_threads();
    Batch b = random_batch(heads, lengths, num_docs, 1);
    run(&b);
    check_alone(&b);
    check_permuted(&b, lengths);
    free_batch(b);
}

TEST(packed_is_alone_is_permuted) {
    for (int n = 0; n < LAYOUTS; n++) {
        int lengths[MAX_DOCS], num_docs = random_lengths(lengths);
        packed_alone_permuted(random_heads(), lengths, num_docs);
    }
}

TEST(packed_is_alone_special_layouts) {
    int ones[300];
    for (int i = 0; i < 300; i++) ones[i] = 1;
    packed_alone_permuted((HeadShape){4, 1, 8}, ones, 300);
    packed_alone_permuted((HeadShape){3, 1, 8}, (int[]){2100, 1, 65, 300}, 4);
    packed_alone_permuted((HeadShape){1, 1, 64}, (int[]){17, 700, 64}, 3);
    packed_alone_permuted((HeadShape){9, 3, 8}, (int[]){0, 0, 63, 0, 64, 0, 0, 65, 0, 0}, 10);
    packed_alone_permuted((HeadShape){2, 2, 8}, (int[]){220, 217, 295, 183, 130, 350}, 6);
    packed_alone_permuted((HeadShape){1, 1, 8}, (int[]){0}, 1);
    packed_alone_permuted((HeadShape){9, 3, 64}, (int[]){0, 0, 0}, 3);
}

// Replacing one document, by noise or by NaN, must not change the others
TEST(isolation) {
    for (int n = 0; n < LAYOUTS / 2; n++) {
        int lengths[MAX_DOCS], num_docs = random_lengths(lengths),
                               victim = (int)test_rng_below((uint32_t)num_docs);
        random_isa();
        Batch a = random_batch(random_heads(), lengths, num_docs, 1),
              b = new_batch(a.heads, lengths, num_docs);
        for (int i = 0; i < num_docs; i++) copy_doc(&b, i, &a, i);
        int64_t row = qkv_row(a.heads), orow = out_row(a.heads), start = a.cu_seqlens[victim];
        random_values(b.qkv + start * row, lengths[victim] * row,
                      n % 3 == 0   ? NAN
                      : n % 3 == 1 ? INFINITY
                                   : 3);
        random_values(b.dout + start * orow, lengths[victim] * orow, n % 3 == 0 ? NAN : 3);
        run(&a);
        run(&b);
        for (int i = 0; i < num_docs; i++)
            if (i != victim) check_same_doc("isolation", &a, i, &b, i);
        if (lengths[victim] > 0)
            CHECK(!same_bits(a.out + start * orow, b.out + start * orow, orow));
        free_batch(a), free_batch(b);
    }
}

// Replacing token t must not change the rows before it
TEST(causality_forward) {
    for (int n = 0; n < LAYOUTS / 2; n++) {
        int lengths[] = {(int)test_rng_below(40), 1 + random_length(), (int)test_rng_below(40)};
        int t = (int)test_rng_below((uint32_t)lengths[1]);
        random_isa();
        Batch a = random_batch(random_heads(), lengths, 3, 1), b = new_batch(a.heads, lengths, 3);
        for (int i = 0; i < 3; i++) copy_doc(&b, i, &a, i);
        random_values(b.qkv + (lengths[0] + t) * qkv_row(a.heads), qkv_row(a.heads), 4);
        run(&a);
        run(&b);
        check_same_rows("causality", &a, 1, &b, 1, t, 0);
        check_same_doc("causality", &a, 0, &b, 0);
        check_same_doc("causality", &a, 2, &b, 2);
        free_batch(a), free_batch(b);
    }
}

// Only row t has a gradient: dq of other rows, and dk and dv of later rows, are exactly zero
TEST(causality_backward) {
    for (int n = 0; n < LAYOUTS / 2; n++) {
        int len = 1 + random_length(), t = (int)test_rng_below((uint32_t)len);
        random_isa();
        random_threads();
        Batch b = random_batch(random_heads(), &len, 1, 1);
        int64_t row = qkv_row(b.heads), orow = out_row(b.heads);
        for (int64_t x = 0; x < len * orow; x++)
            if (x / orow != t) b.dout[x] = 0;
        run(&b);
        for (int64_t x = 0; x < len * row; x++) {
            int is_query = x % row < orow, may_differ = is_query ? x / row == t : x / row <= t;
            CHECK_MSG(may_differ || b.dqkv[x] == 0, "row %d has a gradient from row %d",
                      (int)(x / row), t);
        }
        free_batch(b);
    }
}

TEST(slack_and_old_results_are_ignored) {
    for (int n = 0; n < LAYOUTS / 6; n++) {
        int lengths[MAX_DOCS], num_docs = random_lengths(lengths);
        random_isa();
        Batch a = random_batch(random_heads(), lengths, num_docs, 1),
              b = new_batch(a.heads, lengths, num_docs);
        for (int i = 0; i < num_docs; i++) copy_doc(&b, i, &a, i);
        random_values(b.qkv + b.T * qkv_row(b.heads), SLACK_ROWS * qkv_row(b.heads), 1);
        random_values(b.dqkv, b.T * qkv_row(b.heads), 1);
        random_values(b.out, b.T * out_row(b.heads), 1);
        run(&a);
        run(&b);
        for (int i = 0; i < num_docs; i++) check_same_doc("slack", &a, i, &b, i);
        free_batch(a), free_batch(b);
    }
}

TEST(bits_do_not_depend_on_the_number_of_threads) {
    for (int n = 0; n < LAYOUTS / 6; n++) {
        int lengths[MAX_DOCS], num_docs = random_lengths(lengths);
        if (n % 10 == 0) lengths[0] = 400;
        random_isa();
        Batch a = random_batch(random_heads(), lengths, num_docs, 1);
        omp_set_num_threads(1);
        run(&a);
        for (int threads = 2; threads <= 3; threads++) {
            Batch b = new_batch(a.heads, lengths, num_docs);
            for (int i = 0; i < num_docs; i++) copy_doc(&b, i, &a, i);
            omp_set_num_threads(threads);
            run(&b);
            for (int i = 0; i < num_docs; i++) check_same_doc("threads", &a, i, &b, i);
            free_batch(b);
        }
        free_batch(a);
    }
}

TEST(no_tokens) {
    const VarlenInfo docs = {NULL, NULL, 0, 0, 0};
    attention_forward(NULL, NULL, NULL, &docs, (HeadShape){9, 3, 64});
    attention_backward(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, &docs,
                       (HeadShape){9, 3, 64});
    rope_forward(NULL, NULL, NULL, 0, (HeadShape){9, 3, 64});
}

TEST(unsupported_heads_end_the_program) {
    static const HeadShape wrong[] = {{4, 3, 64}, {4, 0, 64}, {4, 2, 7}, {4, 2, 0}};
    for (int i = 0; i < 4; i++) {
        pid_t child = fork();
        if (child == 0) {
            int32_t cu_seqlens[] = {0}, work[64] = {0};
            VarlenInfo docs = {cu_seqlens, work, 0, 0, 0};
            if (!freopen("/dev/null", "w", stderr)) _exit(1);
            attention_forward(NULL, NULL, NULL, &docs, wrong[i]);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        CHECK_MSG(WEXITSTATUS(status) == 11, "exit code %d", WEXITSTATUS(status));
    }
}

// -------------------------------------------------------------------------------------------------
// The work list. Its layout (head of attention.c): {num_forward, num_backward, max_key_span,
// reserved}, then items {doc, first, end, pass, cost}; pass 0 forward, 1 dQ, 2 dK and dV, 3 both.

typedef struct {
    int32_t doc, first, end, pass, cost;
} Item;

static double item_pairs(const int32_t *cu_seqlens, const Item *it) {
    int len = cu_seqlens[it->doc + 1] - cu_seqlens[it->doc], begin = it->first * TILE,
        end = at_most(it->end * TILE, len);
    double pairs = 0;
    for (int i = begin; i < end; i++)
        pairs += it->pass == 2 ? len - i : it->pass == 3 ? i - begin + 1 : i + 1;
    return pairs * (double[]){2, 3, 4, 5}[it->pass];
}

static void check_items(const Item *items, int n, int forward, const int32_t *cu_seqlens,
                        int num_docs) {
    int first_tile[MAX_DOCS + 1] = {0};
    for (int i = 0; i < num_docs; i++)
        first_tile[i + 1] = first_tile[i] + (cu_seqlens[i + 1] - cu_seqlens[i] + TILE - 1) / TILE;
    unsigned char *seen = calloc((size_t)first_tile[num_docs] + 1, 1);
    for (int i = 0; i < n; i++) {
        const Item *it = &items[i];
        CHECK(it->doc >= 0 && it->doc < num_docs &&
              (forward ? it->pass == 0 : it->pass > 0 && it->pass < 4));
        int tiles = first_tile[it->doc + 1] - first_tile[it->doc];
        CHECK(0 <= it->first && it->first < it->end && it->end <= tiles);
        CHECK(fabs(it->cost - item_pairs(cu_seqlens, it) / 64) < 1);
        CHECK_MSG(i == 0 || items[i - 1].cost >= it->cost, "item %d costs more than the one before",
                  i);
        for (int t = it->first; t < it->end; t++) {
            unsigned char *s = &seen[first_tile[it->doc] + t],
                          passes = forward ? 3 : (unsigned char)it->pass;
            CHECK_MSG((*s & passes) == 0, "document %d, tile %d occurs twice", it->doc, t);
            *s |= passes;
        }
    }
    for (int t = 0; t < first_tile[num_docs]; t++) CHECK_MSG(seen[t] == 3, "a tile is missing");
    free(seen);
}

static void check_plan(const int *lengths, int num_docs, HeadShape heads) {
    Batch b = new_batch((HeadShape){1, 1, 2}, lengths, num_docs);
    size_t size = attention_plan_size(b.T, num_docs),
           used = attention_plan(b.work, b.cu_seqlens, num_docs, heads);
    CHECK_MSG(used <= size, "%zu of %zu", used, size);
    CHECK(used == 4 + 5 * (size_t)(b.work[0] + b.work[1]));
    const Item *items = (const Item *)(b.work + 4);
    check_items(items, b.work[0], 1, b.cu_seqlens, num_docs);
    check_items(items + b.work[0], b.work[1], 0, b.cu_seqlens, num_docs);
    for (const Item *it = items + b.work[0]; it < items + b.work[0] + b.work[1]; it++)
        if (it->pass & 2) CHECK(it->end - it->first <= b.work[2]);
    free_batch(b);
}

TEST(work_list) {
    for (int n = 0; n < 3 * LAYOUTS; n++) {
        int lengths[MAX_DOCS], num_docs = 1 + (int)test_rng_below(n % 20 == 0 ? MAX_DOCS : 12);
        int limit = n % 3 == 0 ? 3 : n % 3 == 1 ? 200 : 1500;
        for (int i = 0; i < num_docs; i++)
            lengths[i] = (int)test_rng_below((uint32_t)(num_docs > 12 ? 20 : limit));
        omp_set_num_threads(1 + (int)test_rng_below(64));
        check_plan(lengths, num_docs, random_heads());
    }
    check_plan(NULL, 0, (HeadShape){9, 3, 64});
    omp_set_num_threads(1);
}

// -------------------------------------------------------------------------------------------------
// The notebook

static Batch notebook_batch(int first, int n, const int *lengths, int num_docs) {
    Batch b = new_batch((HeadShape){1, 1, NOTEBOOK_DIM}, lengths, num_docs);
    random_values(b.dout, n * NOTEBOOK_DIM, 1);
    for (int t = 0; t < n; t++)
        for (int x = 0; x < NOTEBOOK_DIM; x++) {
            int at = first + t;  // v of sequence 1 is not published: use its outputs
            b.qkv[t * 24 + x] = notebook_q[at][x];
            b.qkv[t * 24 + 8 + x] = notebook_k[at][x];
            b.qkv[t * 24 + 16 + x] = at < NOTEBOOK_FIRST
                                         ? notebook_out_first[at][x]
                                         : notebook_v_second[at - NOTEBOOK_FIRST][x];
        }
    run(&b);
    return b;
}

static double to_bf16(double x) {
    int exponent;
    double fraction = frexp(x, &exponent);  // 8 significant bits, to nearest even
    return ldexp(nearbyint(ldexp(fraction, 8)), exponent - 8);
}

TEST(notebook) {
    for (int n = 0; n < 3; n++) {
        if (!select_isa(isas[n])) continue;
        test_rng_state = 1;
        Batch packed = notebook_batch(0, 8, (int[]){5, 3}, 2);
        Batch first = notebook_batch(0, 5, (int[]){5}, 1),
              second = notebook_batch(5, 3, (int[]){3}, 1);
        check_same_rows("notebook", &packed, 0, &first, 0, 5, 0);
        check_same_rows("notebook", &packed, 1, &second, 0, 3, 0);
        for (int t = 0; t < 3; t++)
            for (int x = 0; x < NOTEBOOK_DIM; x++) {
                double want = notebook_out_second[t][x],
                       got = to_bf16(packed.out[(5 + t) * NOTEBOOK_DIM + x]);
                double tolerance =
                    0.5e-4 + ldexp(1, ilogb(want) - 7);  // the print's, and one ulp of bf16
                CHECK_MSG(fabs(got - want) <= tolerance, "token %d, %d: got %g, printed %g", t, x,
                          got, want);
            }
        free_batch(packed), free_batch(first), free_batch(second);
    }
}

// -------------------------------------------------------------------------------------------------
// Rotary embedding

static real *rope_table(int positions, int D) {
    real *table = malloc((size_t)(positions * D) * sizeof(real));
    for (int p = 0; p < positions; p++)
        for (int i = 0; i < D / 2; i++) {
            double angle = p * pow(10000, -2.0 * i / D);
            table[p * D + 2 * i] = (real)cos(angle);
            table[p * D + 2 * i + 1] = (real)sin(angle);
        }
    return table;
}

TEST(rope_formula) {
    for (int n = 0; n < LAYOUTS / 6; n++) {
        HeadShape h = random_heads();
        if (n % 5 == 0)
            h = (HeadShape){2, 1, 2 + 2 * (int)test_rng_below(140)};  // chunks of 64 pairs
        const int T = (int)test_rng_below(20), D = h.head_dim, row = (int)qkv_row(h),
                  positions = 50;
        real *table = rope_table(positions, D), *x = new_values(T * row, row),
             *y = new_values(T * row, row);
        int32_t position_ids[20];
        for (int t = 0; t < T; t++) position_ids[t] = (int32_t)test_rng_below((uint32_t)positions);
        random_values(x, T * row, 1);
        memcpy(y, x, (size_t)(T * row) * sizeof(real));
        omp_set_num_threads(1 + n % 3);
        rope_forward(y, position_ids, table, T, h);
        for (int64_t i = 0; i < T * row; i++) {
            int64_t head = i % row / D, at = i % D, pair = at % (D / 2);
            const real *angle = table + position_ids[i / row] * D + 2 * pair;
            double low = x[i - at + pair], high = x[i - at + pair + D / 2];
            double want =
                at < D / 2 ? low * angle[0] - high * angle[1] : high * angle[0] + low * angle[1];
            if (head >= h.num_heads + h.num_kv_heads)
                CHECK(y[i] == x[i]);
            else
                CHECK(fabs(y[i] - want) <= 8 * ROUNDING);
        }
        check_canary("qkv", y, T * row, row);
        free(table), free(x), free(y);
    }
}

// The gradients of queries and keys are rotated back, for any positions; those of values are not.
TEST(backward_rotates_back) {
    for (int n = 0; n < LAYOUTS / 20; n++) {
        int lengths[3] = {(int)test_rng_below(40), 0, (int)test_rng_below(40)};
        const HeadShape h = random_heads();
        const int D = h.head_dim, positions = 50;
        const int64_t row = qkv_row(h);
        Batch b = random_batch(h, lengths, 3, 0.7), turned = random_batch(h, lengths, 3, 0.7);
        for (int doc = 0; doc < 3; doc++) copy_doc(&turned, doc, &b, doc);
        free(turned.rope_table);
        const real *table = turned.rope_table = rope_table(positions, D);
        for (int t = 0; t < b.T; t++)
            turned.position_ids[t] = (int32_t)test_rng_below((uint32_t)positions);
        run(&b), run(&turned);
        for (int64_t i = 0; i < b.T * row; i++) {
            const int64_t head = i % row / D, at = i % D, pair = at % (D / 2);
            const real *angle = table + turned.position_ids[i / row] * D + 2 * pair;
            const double low = b.dqkv[i - at + pair], high = b.dqkv[i - at + pair + D / 2];
            const double want =
                at < D / 2 ? low * angle[0] + high * angle[1] : high * angle[0] - low * angle[1];
            const double size = fabs(low) + fabs(high);
            if (head >= h.num_heads + h.num_kv_heads)
                CHECK(turned.dqkv[i] == b.dqkv[i]);
            else
                CHECK(fabs(turned.dqkv[i] - want) <= 4 * ROUNDING * size);
        }
        free_batch(b), free_batch(turned);
    }
}

// -------------------------------------------------------------------------------------------------
// Central differences through rope and attention, loss = sum(dout * out)

#ifdef GRADCHECK
typedef struct {
    Batch batch;
    floatX *x;
} Model;

static Model new_model(HeadShape heads, const int *lengths, int num_docs) {
    Model m = {random_batch(heads, lengths, num_docs, 0.7), NULL};
    const int64_t n = m.batch.T * qkv_row(heads);
    m.x = malloc((size_t)(n + 1) * sizeof(floatX));
    memcpy(m.x, m.batch.qkv, (size_t)n * sizeof(floatX));
    free(m.batch.rope_table);
    m.batch.rope_table = rope_table(400, heads.head_dim);
    for (int doc = 0, t = 0; doc < num_docs; doc++)
        for (int i = 0; i < lengths[doc]; i++) m.batch.position_ids[t++] = i;
    return m;
}

static void free_model(Model m) {
    free_batch(m.batch);
    free(m.x);
}

static void model_gradient(Model *m) {
    Batch *b = &m->batch;
    memcpy(b->qkv, m->x, (size_t)(b->T * qkv_row(b->heads)) * sizeof(floatX));
    rope_forward(b->qkv, b->position_ids, b->rope_table, b->T, b->heads);
    run(b);
}

static double loss(const Model *m) {
    const Batch *b = &m->batch;
    double sum = 0;
    memcpy(b->qkv, m->x, (size_t)(b->T * qkv_row(b->heads)) * sizeof(floatX));
    rope_forward(b->qkv, b->position_ids, b->rope_table, b->T, b->heads);
    VarlenInfo docs = {b->cu_seqlens, b->work, b->T, b->num_docs, b->T};
    attention_forward(b->out, b->lse, b->qkv, &docs, b->heads);
    for (int64_t i = 0; i < b->T * out_row(b->heads); i++) sum += b->out[i] * b->dout[i];
    return sum;
}

// Derivative along `direction` (NULL: along element i), 4th-order stencil with h = 1e-4
static double difference(Model *m, const double *direction, int64_t i) {
    static const double at[] = {-2, -1, 1, 2}, weight[] = {1, -8, 8, -1};
    const double h = 1e-4;
    const int64_t n = m->batch.T * qkv_row(m->batch.heads);
    double sum = 0;
    for (int s = 0; s < 4; s++) {
        double before = m->x[i];
        if (direction)
            for (int64_t j = 0; j < n; j++) m->x[j] += at[s] * h * direction[j];
        else
            m->x[i] += at[s] * h;
        sum += weight[s] * loss(m);
        if (direction)
            for (int64_t j = 0; j < n; j++) m->x[j] -= at[s] * h * direction[j];
        else
            m->x[i] = before;
    }
    return sum / (12 * h);
}

TEST(gradient_of_every_element) {
    static const HeadShape heads[] = {{3, 1, 4}, {1, 1, 8}, {6, 2, 2}, {2, 2, 6}};
    for (int n = 0; n < 40; n++) {
        int lengths[4], num_docs = 1 + (int)test_rng_below(4);
        for (int i = 0; i < num_docs; i++) lengths[i] = (int)test_rng_below(6);
        random_threads();
        Model m = new_model(heads[n % 4], lengths, num_docs);
        model_gradient(&m);
        double error = 0, size = 0;
        for (int64_t i = 0; i < m.batch.T * qkv_row(heads[n % 4]); i++) {
            double d = difference(&m, NULL, i), g = m.batch.dqkv[i];
            error += (d - g) * (d - g);
            size += g * g;
        }
        CHECK_MSG(sqrt(error) <= 1e-8 * sqrt(size), "relative error %.2e", sqrt(error / size));
        free_model(m);
    }
}

// Documents of several tiles: along random directions. Relative to the gradient's size times the
// direction's.
TEST(gradient_along_directions) {
    static const HeadShape heads[] = {{3, 1, 16}, {9, 3, 8}, {2, 1, 64}, {4, 4, 2}};
    for (int n = 0; n < 24; n++) {
        int lengths[] = {(int)test_rng_below(30), 60 + (int)test_rng_below(80), 0,
                         1 + (int)test_rng_below(70)};
        random_threads();
        Model m = new_model(heads[n % 4], lengths, 4);
        const int64_t count = m.batch.T * qkv_row(heads[n % 4]);
        double *direction = zeros(count);
        model_gradient(&m);
        for (int k = 0; k < 4; k++) {
            double slope = 0, size = 0, length = 0;
            for (int64_t i = 0; i < count; i++) {
                double g = m.batch.dqkv[i];
                direction[i] = (test_rng_uniform() - 0.5) + (g > 0 ? 0.2 : -0.2);
                slope += direction[i] * g;
                size += g * g;
                length += direction[i] * direction[i];
            }
            double error = fabs(difference(&m, direction, 0) - slope) / sqrt(size * length);
            CHECK_MSG(error <= 1e-8, "relative error %.2e", error);
        }
        free(direction);
        free_model(m);
    }
}
#endif

// Thousands of small parallel regions on a machine that may be busy: waiting threads must sleep,
// not spin, and OpenMP reads its policy from the environment before main.
int main(int argc, char **argv) {
    if (!getenv("OMP_WAIT_POLICY") && setenv("OMP_WAIT_POLICY", "passive", 1) == 0)
        execv("/proc/self/exe", argv);
    return test_main(argc, argv);
}
