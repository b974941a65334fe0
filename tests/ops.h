// THE table of operations: each operation of kernels.h once, with its operands, shapes, plain fp64
// code, error bounds and useful FLOPs. tests/test_ops.c runs it: against the plain code on the
// backend built (CPU, emulated CUDA, a GPU), changed in ways that must not change bits, and timed.
//
// Error bounds. Inputs are what the device holds, so that both sides start from the same values. A
// result is off by at most
//   STORE of its value          rounding to floatX; where that is bf16, the fp32 value before it
//                               may lie across the border between two
//   sum_error(n) of its size    n products added in any order; size: the sum of magnitudes. CPU:
//                               n u in the worst case, 8 sqrt(n) u almost always (Higham and Mary,
//                               2019). CUDA: also what tensor cores cut off while aligning terms.
//   4 ROUNDED of the root of    attention on CUDA: P and dS are rounded to bf16, independently
//   the terms' squares
// so that a lost or doubled term, a wrong mask, position or scale is far outside.
#pragma once

#include <math.h>

#include "../data/models/safetensors.h"
#include "../kernels/nf4.h"
#include "test.h"

#if defined(BACKEND_CUDA)
static const double STORE = 0x1p-8, ROUNDED = 0x1p-8, UNIT = 0x1p-24;
#elif defined(GRADCHECK)  // the plain code then rounds as much
static const double STORE = 0x1p-52, ROUNDED = 0, UNIT = 0x1p-52;
#else
static const double STORE = 0x1p-24, ROUNDED = 0, UNIT = 0x1p-24;
#endif
static const float EPS = 1e-5f;
static const double UNDERFLOW = 1e-34;  // of a probability, times values of ordinary size
enum { MAX_OPERANDS = 13, MAX_POSITION = 512 };

static inline double sum_error(double n) {
#if defined(BACKEND_CUDA)
    return (n / 4 + 128) * UNIT;
#else
    return (fmin(n, 8 * sqrt(n)) + 8) * UNIT;
#endif
}

typedef struct {
    int64_t T, C, V;  // rows; columns (K, F); vocabulary (N)
    HeadShape heads;
    const int *lengths;  // of documents, ends with -1; T is their sum. NULL: one document of T
    const int *shared;   // tokens that each shares with the last one that shares none. NULL: none
    double scale;        // of inputs; 0: 1
    int spike;           // attention: the key that is far larger than all others, + 1; 0: none
} Shape;

// MASTER: a weight and its low bits; HALF: bf16 on every backend
typedef enum { FLOATX, REAL, INT, DOUBLE, FLOAT, MASTER, STEP, HALF } Type;
typedef enum { OUT, INOUT, IN } Role;
// clang-format off
typedef enum {
    NUMBERS, POSITIVE, TOKENS, ORDER, POSITIONS, ANGLES, DOC_ENDS, WORK, TARGETS, ROWS, FIRST_ROWS,
    LOSS_SCALE, SCALARS, SHARED_FIRST, SHARED_LEN, RUNS
} Content;
// clang-format on

typedef struct {
    const char *name;
    Type type;
    Role role;
    const char *size;  // letters of dim(): "TC" is T rows of C
    Content content;
} Operand;

typedef struct Operation Operation;

// An operation with operands of one shape
typedef struct {
    const Operation *op;
    Shape s;
    int num_segments;
    int32_t *cu_seqlens, *shared_first, *shared_len;  // the last two NULL: nothing is shared
    int64_t n[MAX_OPERANDS];                          // elements
    double *x[MAX_OPERANDS];                          // values before
    double *want[MAX_OPERANDS], *tol[MAX_OPERANDS];   // after; outputs only
    void *p[MAX_OPERANDS], *got[MAX_OPERANDS];        // on the device; results on the host
    VarlenInfo docs;
} Run;

enum {
    BY_ROWS = 1,  // a row of the results depends on its own row of the inputs alone, bit for bit
    BY_DOCS = 2,  // on its own document and no later row
    PRODUCT = 4,
    ATTENTION = 8,  // there are several kernels to select from
    CPU_ROWS = 16,  // BY_ROWS on the CPU
    CPU_PRODUCT = CPU_ROWS | PRODUCT
};

struct Operation {
    const char *name;
    int flags;
    const Shape *shapes;  // ends with T = -1; the first runs every kernel
    const Shape *bench;   // shapes to time; ends with T = -1
    void (*call)(const Run *r, void *const *p, int64_t T, int64_t C, int64_t V);
    void (*reference)(Run *r, double *const *x, int64_t T, int64_t C, int64_t V);
    void (*prepare)(Run *r, double *const *x);  // inputs that are made of others; NULL: none
    double (*flops)(const Run *r);              // NULL: it is the memory that counts
    Operand operands[MAX_OPERANDS];
};

static inline int64_t dim(const Run *r, char letter) {
    const HeadShape h = r->s.heads;
    const int64_t T = r->s.T;
    return letter == 'T'   ? T
           : letter == 'C' ? r->s.C
           : letter == 'V' ? r->s.V
           : letter == 'P' ? padded_vocab(r->s.V)
           : letter == 'H' ? h.num_heads
           : letter == 'D' ? h.head_dim
           : letter == 'Q' ? (h.num_heads + 2 * h.num_kv_heads) * h.head_dim
           : letter == 'O' ? h.num_heads * h.head_dim
           : letter == 'K' ? 2 * h.num_kv_heads * h.head_dim
           : letter == 'N' ? T / 2                      // rows picked
           : letter == 'M' ? (T < r->s.C ? T : r->s.C)  // the shorter side
           : letter == 'R' ? T + 2                      // rows of the cache
           : letter == 'A' ? MAX_POSITION
           : letter == 'S' ? r->num_segments + 1
           : letter == 'B' ? (r->shared_len ? (int64_t)attention_sums_size(T, h.head_dim) : 0)
           : letter == 'W' ? (int64_t)attention_work_list_size(T, r->num_segments)
                           : letter - '0';
}

// Sets what element i of output k must be: a sum of `terms` terms whose magnitudes add up to size.
static void want(Run *r, int k, int64_t i, double value, double size, double terms) {
    const Type type = r->op->operands[k].type;
    const double unit = type == FLOATX ? STORE : type == DOUBLE ? 0x1p-52 : 2 * UNIT;
    r->want[k][i] = value;
    r->tol[k][i] = unit * fabs(value) + sum_error(terms) * size;
}
static void want_exactly(Run *r, int k, int64_t i, double value) {
    r->want[k][i] = value, r->tol[k][i] = 0;
}

#define CALL(operation_, ...) CALL_AS(operation_, operation_, __VA_ARGS__)
#define CALL_AS(name_, operation_, ...)                                                            \
    static void call_##name_(__attribute__((unused)) const Run *r, void *const *p,                 \
                             __attribute__((unused)) int64_t T, __attribute__((unused)) int64_t C, \
                             __attribute__((unused)) int64_t V) {                                  \
        operation_(__VA_ARGS__);                                                                   \
    }
#define REFERENCE(operation_)                                                                  \
    static void want_##operation_(Run *r, double *const *x, __attribute__((unused)) int64_t T, \
                                  __attribute__((unused)) int64_t C,                           \
                                  __attribute__((unused)) int64_t V)
#define EACH(i_, n_) for (int64_t i_ = 0; i_ < (n_); i_++)
#define OPERATION(name_, ...) \
    { #name_, .call = call_##name_, .reference = want_##name_, __VA_ARGS__ }

// ---- Rows, embedding ----------------------------------------------------------------------------

CALL(gather_rows, p[0], p[1], p[2], T / 2, C)
REFERENCE(gather_rows) {
    EACH(i, T / 2 * C) want_exactly(r, 0, i, x[1][(int64_t)x[2][i / C] * C + i % C]);
}
CALL(scatter_rows, p[0], p[1], p[2], T / 2, T, C)
REFERENCE(scatter_rows) {
    EACH(i, T * C) want_exactly(r, 0, i, 0);
    EACH(i, T / 2 * C) want_exactly(r, 0, (int64_t)x[2][i / C] * C + i % C, x[1][i]);
}
CALL(embedding_forward, p[0], p[1], p[2], T, (int)C)
REFERENCE(embedding_forward) {
    EACH(i, T * C) want_exactly(r, 0, i, x[2][(int64_t)x[1][i / C] * C + i % C]);
}
CALL(embedding_backward, p[0], p[1], p[2], p[3], T, (int)C)
REFERENCE(embedding_backward) {
    double *sum = calloc((size_t)(2 * V * C + 1), sizeof *sum), *size = sum + V * C;
    EACH(i, T * C) {
        const int64_t to = (int64_t)x[2][i / C] * C + i % C;
        sum[to] += x[1][i], size[to] += fabs(x[1][i]);
    }
    EACH(i, V * C) want(r, 0, i, x[0][i] + sum[i], fabs(x[0][i]) + size[i], (double)T);
    free(sum);
}

// ---- RMSNorm, bias, RoPE ------------------------------------------------------------------------

// y = x rstd w of n columns; gradient of x: rstd (g - y0 mean(g y0)) with g = dy w, y0 = x rstd
static double rstd_of(const double *x, int64_t n) {
    double squares = 0;
    EACH(c, n) squares += x[c] * x[c];
    return 1 / sqrt(squares / (double)n + (double)EPS);
}
// Columns [at, at + n) of output 0, which begins as `before`, or NULL
static void want_norm_gradient(Run *r, int64_t at, const double *before, const double *x,
                               const double *w, const double *dy, double rstd, int64_t n) {
    double sum = 0, size = 0;
    EACH(i, n) {
        const double term = dy[i] * w[i] * x[i] * rstd / (double)n;
        sum += term, size += fabs(term);
    }
    EACH(i, n) {
        const double g = dy[i] * w[i], y = x[i] * rstd, start = before ? before[i] : 0;
        want(r, 0, at + i, start + rstd * (g - y * sum),
             fabs(start) + rstd * (fabs(g) + fabs(y) * size), (double)n / 16);
    }
}

CALL(rmsnorm_forward, p[0], p[1], p[2], p[3], EPS, T, (int)C)
REFERENCE(rmsnorm_forward) {
    EACH(t, T) {
        const double rstd = rstd_of(x[2] + t * C, C);
        want(r, 1, t, rstd, rstd, (double)C / 16);
        EACH(c, C) {
            const double y = x[2][t * C + c] * rstd * x[3][c];
            want(r, 0, t * C + c, y, fabs(y), (double)C / 16);
        }
    }
}
CALL(rmsnorm_backward, p[0], p[1], p[2], p[3], p[4], p[5], T, (int)C)
REFERENCE(rmsnorm_backward) {
    EACH(t, T)
    want_norm_gradient(r, t * C, x[0] + t * C, x[3] + t * C, x[4], x[2] + t * C, x[5][t], C);
    EACH(c, C) {
        double sum = x[1][c], size = fabs(sum);
        EACH(t, T) {
            const double term = x[2][t * C + c] * x[3][t * C + c] * x[5][t];
            sum += term, size += fabs(term);
        }
        want(r, 1, c, sum, size, (double)T);
    }
}
// Of element i of (T,H+2*Hkv,D): 0 in a query, 1 in a key, 2 in a value head
static int head_kind(const Run *r, int64_t i) {
    const HeadShape h = r->s.heads;
    const int64_t head = i / h.head_dim % (h.num_heads + 2 * h.num_kv_heads);
    return (head >= h.num_heads) + (head >= h.num_heads + h.num_kv_heads);
}
CALL(qk_norm_forward, p[0], p[1], p[2], EPS, T, r->s.heads)
REFERENCE(qk_norm_forward) {
    const int64_t D = r->s.heads.head_dim;
    for (int64_t row = 0; row < r->n[0]; row += D) {
        const int kind = head_kind(r, row);
        const double rstd = rstd_of(x[1] + row, D);
        EACH(c, D) {
            const double v = x[1][row + c], y = kind == 2 ? v : v * rstd * x[2][kind * D + c];
            want(r, 0, row + c, y, kind == 2 ? 0 : fabs(y), (double)D / 16);
        }
    }
}
CALL(qk_norm_backward, p[0], p[1], p[2], p[3], EPS, T, r->s.heads)
REFERENCE(qk_norm_backward) {
    const int64_t D = r->s.heads.head_dim;
    double *size = calloc((size_t)(2 * D), sizeof *size);
    EACH(c, 2 * D) r->want[1][c] = x[1][c], size[c] = fabs(x[1][c]);
    for (int64_t row = 0; row < r->n[0]; row += D) {
        const int kind = head_kind(r, row);
        const double rstd = rstd_of(x[2] + row, D);
        EACH(c, D) want_exactly(r, 0, row + c, x[0][row + c]);
        if (kind == 2) continue;
        want_norm_gradient(r, row, NULL, x[2] + row, x[3] + kind * D, x[0] + row, rstd, D);
        EACH(c, D) {
            const double term = x[0][row + c] * x[2][row + c] * rstd;
            r->want[1][kind * D + c] += term, size[kind * D + c] += fabs(term);
        }
    }
    EACH(c, 2 * D) want(r, 1, c, r->want[1][c], size[c], (double)(T * r->s.heads.num_heads));
    free(size);
}
CALL(bias_forward, p[0], p[1], T, C)
REFERENCE(bias_forward) {
    EACH(i, T * C) {
        const double b = x[1][i % C];
        want(r, 0, i, x[0][i] + b, fabs(x[0][i]) + fabs(b), 0);
    }
}
CALL(bias_backward, p[0], p[1], T, C)
REFERENCE(bias_backward) {
    EACH(c, C) {
        double sum = x[0][c], size = fabs(sum);
        EACH(t, T) sum += x[1][t * C + c], size += fabs(x[1][t * C + c]);
        want(r, 0, c, sum, size, (double)T);
    }
}
CALL(rope_forward, p[0], p[1], p[2], T, r->s.heads)
REFERENCE(rope_forward) {
    const int64_t D = r->s.heads.head_dim, half = D / 2;
    EACH(i, r->n[0]) {
        const int64_t t = i / dim(r, 'Q'), low = i - i % D + i % half;
        const double *angle = x[2] + (int64_t)x[1][t] * D + 2 * (i % half);
        const double a = x[0][low], b = x[0][low + half];
        const bool is_low = i % D < half;
        if (head_kind(r, i) == 2)
            want_exactly(r, 0, i, x[0][i]);
        else
            want(r, 0, i, is_low ? a * angle[0] - b * angle[1] : b * angle[0] + a * angle[1],
                 fabs(a) + fabs(b), 0);
    }
}

// ---- Attention ----------------------------------------------------------------------------------

// *size: the sum of the terms' magnitudes
static double dot(const double *a, const double *b, int64_t n, double *size) {
    double sum = 0, magnitudes = 0;
#pragma omp simd reduction(+ : sum, magnitudes)
    EACH(i, n) sum += a[i] * b[i], magnitudes += fabs(a[i] * b[i]);
    *size = magnitudes;
    return sum;
}

// One query over n keys and values, rows of `stride` apart; p (n) becomes the probabilities.
// tol_out and tol_lse: errors but that of storing. Returns lse.
static double attend_row(double *p, double *out, double *tol_out, double *tol_lse, const double *q,
                         const double *k, const double *v, int64_t stride, int64_t n, int64_t D,
                         double rounded) {
    double top = -INFINITY, sum = 0, error = 0, size[D], squares[D];
    EACH(c, D) out[c] = size[c] = squares[c] = 0;
    EACH(j, n) {
        double terms;
        p[j] = dot(q, k + j * stride, D, &terms) / sqrt((double)D);
        top = fmax(top, p[j]);
        error = fmax(error, sum_error((double)D) * terms / sqrt((double)D));
    }
    EACH(j, n) sum += p[j] = exp(p[j] - top);
    EACH(j, n) {
        p[j] /= sum;
#pragma omp simd
        EACH(c, D) {
            const double term = p[j] * v[j * stride + c];
            out[c] += term, size[c] += fabs(term), squares[c] += term * term;
        }
    }
    EACH(c, D)
    tol_out[c] = 4 * rounded * sqrt(squares[c]) + (2 * error + sum_error((double)n)) * size[c];
    *tol_lse = error + sum_error((double)n) + 4 * UNIT * fabs(top + log(sum));
    return top + log(sum);
}

static int64_t num_shared(const Run *r, int64_t doc) {
    return r->shared_len ? r->shared_len[doc] : 0;
}
// Of token i of a document
static int64_t row_of(const Run *r, int64_t doc, int64_t i) {
    const int64_t shared = num_shared(r, doc);
    return i < shared ? r->shared_first[doc] + i : r->cu_seqlens[doc] + i - shared;
}
static int64_t doc_len(const Run *r, int64_t doc) {
    return num_shared(r, doc) + r->cu_seqlens[doc + 1] - r->cu_seqlens[doc];
}

// out, lse and their tolerances from qkv (T,H+2*Hkv,D)
static void attend(const Run *r, const double *qkv, double *out, double *lse, double *tol_out,
                   double *tol_lse) {
    const HeadShape h = r->s.heads;
    const int64_t D = h.head_dim, row = dim(r, 'Q'), group = h.num_heads / h.num_kv_heads;
    double *p = malloc((size_t)(r->s.T + 1) * (size_t)(2 * D + 1) * sizeof *p), *kv = p + r->s.T;
    EACH(doc, r->num_segments)
    EACH(head, h.num_heads) {
        EACH(i, doc_len(r, doc) * 2 * D)
        kv[i] = qkv[row_of(r, doc, i / (2 * D)) * row +
                    (h.num_heads + i / D % 2 * h.num_kv_heads + head / group) * D + i % D];
        for (int64_t i = num_shared(r, doc); i < doc_len(r, doc); i++) {
            const int64_t t = row_of(r, doc, i), at = (t * h.num_heads + head) * D;
            lse[head * r->s.T + t] =
                attend_row(p, out + at, tol_out + at, tol_lse + head * r->s.T + t,
                           qkv + t * row + head * D, kv, kv + D, 2 * D, i + 1, D, ROUNDED);
        }
    }
    free(p);
}
static void add_store_error(Run *r, int k) {
    EACH(i, r->n[k]) r->tol[k][i] += STORE * fabs(r->want[k][i]);
}

CALL(attention_forward, p[0], p[1], p[2], &r->docs, r->s.heads)
REFERENCE(attention_forward) {
    attend(r, x[2], r->want[0], r->want[1], r->tol[0], r->tol[1]);
    add_store_error(r, 0);
}

static void prepare_spike(Run *r, double *qkv) {
    const int64_t D = r->s.heads.head_dim, row = dim(r, 'Q');
    EACH(c, r->s.spike ? D * r->s.heads.num_kv_heads : 0)
    qkv[(r->s.spike - 1) * row + dim(r, 'O') + c] = c % 2 ? 20 : -20;
}
static void prepare_attention_forward(Run *r, double *const *x) { prepare_spike(r, x[2]); }

// out and lse as the forward pass leaves them
static void prepare_attention_backward(Run *r, double *const *x) {
    const int64_t n = r->n[4] + r->n[5];
    double *tol = malloc((size_t)(n + 1) * sizeof *tol);
    prepare_spike(r, x[3]);
    attend(r, x[3], x[4], x[5], tol, tol + r->n[4]);
    free(tol);
}

typedef struct {
    double *sum, *size, *squares, *error;  // error: of the terms, but for their rounding
} Gradient;
// g[at + i] += a b[i] for n elements; error: of a
static void add_terms(Gradient g, int64_t at, double a, const double *b, double error, int64_t n) {
    double *sum = g.sum + at, *size = g.size + at, *squares = g.squares + at, *e = g.error + at;
#pragma omp simd
    EACH(i, n) {
        const double term = a * b[i];
        sum[i] += term, size[i] += fabs(term);
        if (ROUNDED > 0) squares[i] += term * term;
        e[i] += error * fabs(b[i]);
    }
}

// Adds what queries of a document, from `first` on, get from and give to its tokens: eight at a
// time, or gradients of keys and values would be read from memory for each.
enum { QUERIES_AT_A_TIME = 8 };
static void add_query_gradients(Run *r, double *const *x, Gradient g, int64_t head, int64_t doc,
                                int64_t first) {
    const int64_t len = doc_len(r, doc), end = first + QUERIES_AT_A_TIME;
    const HeadShape h = r->s.heads;
    const int64_t D = h.head_dim, row = dim(r, 'Q');
    const int64_t kv = (h.num_heads + head / (h.num_heads / h.num_kv_heads)) * D;
    const double scale = 1 / sqrt((double)D);
    EACH(i, end < len ? end : len)
    for (int64_t query = i < first ? first : i; query < end && query < len; query++) {
        const int64_t j = row_of(r, doc, i), t = row_of(r, doc, query);
        const double *dout = x[2] + (t * h.num_heads + head) * D, *q = x[3] + t * row + head * D;
        const double *k = x[3] + j * row + kv, *v = k + h.num_kv_heads * D;
        const double lse = x[5][head * r->s.T + t], delta = r->want[1][head * r->s.T + t];
        double s_size, dp_size;
        const double p = exp(scale * dot(q, k, D, &s_size) - lse);
        const double p_error =
            p * (sum_error((double)D) * scale * s_size + sum_error(0) + 4 * UNIT * fabs(lse)) +
            UNDERFLOW;
        const double dp = dot(dout, v, D, &dp_size) - delta, ds = scale * p * dp;
        const double ds_error = scale * (p_error * fabs(dp) + p * (sum_error((double)D) * dp_size +
                                                                   r->tol[1][head * r->s.T + t]));
        add_terms(g, t * row + head * D, ds, k, ds_error, D);
        add_terms(g, j * row + kv, ds, q, ds_error, D);
        add_terms(g, j * row + kv + h.num_kv_heads * D, p, dout, p_error, D);
    }
}

CALL(attention_backward, p[0], p[1], r->shared_len ? p[12] : NULL, p[2], p[3], p[4], p[5], p[6],
     p[7], &r->docs, r->s.heads)
REFERENCE(attention_backward) {
    const int64_t D = r->s.heads.head_dim, half = D / 2, n = r->n[0];
    double *sums = calloc((size_t)(4 * n + 1), sizeof *sums);
    const Gradient g = {sums, sums + n, sums + 2 * n, sums + 3 * n};
    EACH(i, r->n[1]) {
        const int64_t at = (i % T * r->s.heads.num_heads + i / T) * D;
        double size;
        const double delta = dot(x[2] + at, x[4] + at, D, &size);
        want(r, 1, i, delta, size, (double)D);
    }
    EACH(i, r->n[12]) r->tol[12][i] = INFINITY;  // scratch
    EACH(doc, r->num_segments)
    EACH(head, r->s.heads.num_heads)
    for (int64_t i = num_shared(r, doc); i < doc_len(r, doc); i += QUERIES_AT_A_TIME)
        add_query_gradients(r, x, g, head, doc, i);
    const double terms = (double)(T * r->s.heads.num_heads / r->s.heads.num_kv_heads);
    EACH(i, n)
    g.error[i] += 4 * ROUNDED * sqrt(g.squares[i]) + sum_error(terms) * g.size[i] + UNDERFLOW;
    EACH(i, n) {  // queries and keys are rotated back
        const int64_t low = i - i % D + i % half, other = i == low ? low + half : low;
        const double *angle = x[7] + (int64_t)x[6][i / dim(r, 'Q')] * D + 2 * (i % half);
        const bool turned = head_kind(r, i) != 2;
        const double c = turned ? angle[0] : 1, s = turned ? angle[1] : 0;
        const double part = g.sum[i] * c, rest = (i == low ? 1 : -1) * g.sum[other] * s;
        want(r, 0, i, part + rest, fabs(part) + fabs(rest), 0);
        r->tol[0][i] += g.error[i] * fabs(c) + g.error[other] * fabs(s);
    }
    free(sums);
}

CALL(kv_store, p[0], p[1], p[2], p[3], T, r->s.heads)
REFERENCE(kv_store) {
    const int64_t width = dim(r, 'K');
    EACH(i, r->n[0]) want_exactly(r, 0, i, x[0][i]);
    EACH(i, T * width) {
        const int64_t t = i / width, row = (int64_t)(x[2][t] + x[3][t]);
        want_exactly(r, 0, row * width + i % width,
                     x[1][t * dim(r, 'Q') + dim(r, 'O') + i % width]);
    }
}
CALL(attention_decode, p[0], p[1], p[2], p[3], p[4], T, r->s.heads)
REFERENCE(attention_decode) {
    const HeadShape h = r->s.heads;
    const int64_t D = h.head_dim, width = dim(r, 'K'), group = h.num_heads / h.num_kv_heads;
    double *p = malloc((size_t)(T + 1) * sizeof *p), tol_lse;
    EACH(t, T)
    EACH(head, h.num_heads) {
        const int64_t at = (t * h.num_heads + head) * D;
        const double *k = x[2] + (int64_t)x[3][t] * width + head / group * D;
        attend_row(p, r->want[0] + at, r->tol[0] + at, &tol_lse, x[1] + t * dim(r, 'Q') + head * D,
                   k, k + h.num_kv_heads * D, width, (int64_t)x[4][t] + 1, D, 0);
    }
    add_store_error(r, 0);
    free(p);
}
static double attention_pairs(const Run *r) {
    double pairs = 0;
    EACH(doc, r->num_segments) {
        const double n = (double)doc_len(r, doc), shared = (double)num_shared(r, doc);
        pairs += (n * (n + 1) - shared * (shared + 1)) / 2;
    }
    return pairs;
}
static double forward_flops(const Run *r) { return 4 * (double)dim(r, 'O') * attention_pairs(r); }
static double backward_flops(const Run *r) { return 10 * (double)dim(r, 'O') * attention_pairs(r); }

// ---- Matmul, SwiGLU -----------------------------------------------------------------------------

// Output o (rows, cols), from element `first` on in rows of `stride`, = start + scale times the sum
// over k < depth of a[row a_row + k a_step] times b[col b_row + k b_step]
static void want_part(Run *r, int o, int64_t first, int64_t stride, const double *start,
                      double scale, const double *a, const double *b, int64_t rows, int64_t cols,
                      int64_t depth, int64_t a_row, int64_t a_step, int64_t b_row, int64_t b_step) {
    EACH(i, rows)
    EACH(j, cols) {
        const int64_t at = first + i * stride + j;
        double sum = start ? start[at] : 0, size = fabs(sum);
        EACH(k, depth) {
            const double term = scale * a[i * a_row + k * a_step] * b[j * b_row + k * b_step];
            sum += term, size += fabs(term);
        }
        want(r, o, at, sum, size, (double)depth);
    }
}
static void want_product(Run *r, const double *start, const double *a, const double *b,
                         int64_t rows, int64_t cols, int64_t depth, int64_t a_row, int64_t a_step,
                         int64_t b_row, int64_t b_step) {
    want_part(r, 0, 0, cols, start, 1, a, b, rows, cols, depth, a_row, a_step, b_row, b_step);
}
CALL(matmul_forward, p[0], NULL, p[1], p[2], T, C, V)
REFERENCE(matmul_forward) { want_product(r, NULL, x[1], x[2], T, V, C, C, 1, C, 1); }
CALL_AS(matmul_add, matmul_forward, p[0], p[1], p[2], p[3], T, C, V)
REFERENCE(matmul_add) { want_product(r, x[1], x[2], x[3], T, V, C, C, 1, C, 1); }
CALL_AS(matmul_add_in_place, matmul_forward, p[0], p[0], p[1], p[2], T, C, V)
REFERENCE(matmul_add_in_place) { want_product(r, x[0], x[1], x[2], T, V, C, C, 1, C, 1); }
CALL(matmul_backward_input, p[0], p[1], p[2], false, T, C, V)
REFERENCE(matmul_backward_input) { want_product(r, NULL, x[1], x[2], T, C, V, V, 1, 1, C); }
CALL_AS(matmul_add_to_input, matmul_backward_input, p[0], p[1], p[2], true, T, C, V)
REFERENCE(matmul_add_to_input) { want_product(r, x[0], x[1], x[2], T, C, V, V, 1, 1, C); }
CALL(matmul_backward_weight, p[0], p[1], p[2], true, T, C, V)
REFERENCE(matmul_backward_weight) { want_product(r, x[0], x[1], x[2], V, C, T, 1, V, 1, C); }
CALL_AS(matmul_new_weight, matmul_backward_weight, p[0], p[1], p[2], false, T, C, V)
REFERENCE(matmul_new_weight) {
    want_product(r, NULL, x[1], x[2], V, C, T, 1, V, 1, C);
    EACH(i, T == 0 ? V * C : 0) want_exactly(r, 0, i, NAN);  // no token: nothing is done
}

// Columns: the second half of out and dout, the first of inp and dinp
#define COLUMNS_SCALE 0.5f  // exact, also before factors are rounded to bf16
CALL(matmul_forward_columns, (floatX *)p[0] + V, (floatX *)p[1] + V, p[2], p[3], COLUMNS_SCALE, T,
     C, V, 2 * C, 2 * V)
REFERENCE(matmul_forward_columns) {
    EACH(i, T * 2 * V) want_exactly(r, 0, i, x[0][i]);
    want_part(r, 0, V, 2 * V, x[1], COLUMNS_SCALE, x[2], x[3], T, V, C, 2 * C, 1, C, 1);
}
CALL_AS(matmul_new_columns, matmul_forward_columns, (floatX *)p[0] + V, NULL, p[1], p[2],
        COLUMNS_SCALE, T, C, V, 2 * C, 2 * V)
REFERENCE(matmul_new_columns) {
    EACH(i, T * 2 * V) want_exactly(r, 0, i, x[0][i]);
    want_part(r, 0, V, 2 * V, NULL, COLUMNS_SCALE, x[1], x[2], T, V, C, 2 * C, 1, C, 1);
}
CALL(matmul_backward_columns, p[0], p[1], (floatX *)p[2] + V, p[3], p[4], COLUMNS_SCALE, true, T, C,
     V, 2 * C, 2 * V)
REFERENCE(matmul_backward_columns) {
    EACH(i, T * 2 * C) want_exactly(r, 0, i, x[0][i]);
    want_part(r, 0, 0, 2 * C, NULL, COLUMNS_SCALE, x[2] + V, x[4], T, C, V, 2 * V, 1, 1, C);
    want_part(r, 1, 0, C, x[1], COLUMNS_SCALE, x[2] + V, x[3], V, C, T, 1, 2 * V, 1, 2 * C);
}
static double product_flops(const Run *r) {
    return 2 * (double)r->s.T * (double)r->s.C * (double)r->s.V;
}

// Size 2 + |gate|: the error of exp(-gate) grows with its argument
CALL(swiglu_forward, p[0], p[1], T, C)
REFERENCE(swiglu_forward) {
    EACH(i, T * C) {
        const double gate = x[1][i / C * 2 * C + i % C], up = x[1][i / C * 2 * C + C + i % C];
        const double y = gate / (1 + exp(-gate)) * up;
        want(r, 0, i, y, fabs(y) * (2 + fabs(gate)), 0);
        r->tol[0][i] += UNDERFLOW * fabs(gate * up);
    }
}
CALL(swiglu_backward, p[0], p[1], p[2], T, C)
REFERENCE(swiglu_backward) {
    EACH(i, T * C) {
        const int64_t at = i / C * 2 * C + i % C;
        const double gate = x[2][at], up = x[2][at + C], d = x[1][i];
        const double s = 1 / (1 + exp(-gate)), error = 2 + fabs(gate);
        const double dgate = d * up * s * (1 + gate * (1 - s)), dup = d * gate * s;
        want(r, 0, at, dgate, fabs(d * up * s) * (1 + fabs(gate) * (1 - s)) * error, 0);
        want(r, 0, at + C, dup, fabs(dup) * error, 0);
        r->tol[0][at] += UNDERFLOW * fabs(d * up) * error;
        r->tol[0][at + C] += UNDERFLOW * fabs(d * gate);
    }
}

// ---- NF4: T blocks of 64 numbers ----------------------------------------------------------------

static float rounded(float x) {
#ifdef BACKEND_CUDA
    const uint32_t bits = (uint32_t)bf16_bits(x) << 16;
    memcpy(&x, &bits, sizeof x);
#endif
    return x;
}
CALL(nf4_dequantize, p[0], p[1], p[2], (size_t)(64 * T))
REFERENCE(nf4_dequantize) {
    static const float levels[] = {NF4_LEVELS};
    EACH(i, 64 * T) {
        const uint32_t word = (uint32_t)(int32_t)x[1][i / 8];
        const float level = levels[word >> (i % 8 / 2 * 8 + (i % 2 ? 0 : 4)) & 15];
        want_exactly(r, 0, i, (double)rounded(level * (float)x[2][i / 64]));
    }
}
static void prepare_codes(Run *r, double *const *x) {
    EACH(i, r->n[1])
    x[1][i] = (int32_t)(test_rng_below(1 << 16) << 16 | test_rng_below(1 << 16));
}

// ---- Cross-entropy ------------------------------------------------------------------------------

static double lse_of(const double *x, int64_t n) {
    double top = -INFINITY, sum = 0;
    EACH(i, n) top = fmax(top, x[i]);
    EACH(i, n) sum += exp(x[i] - top);
    return top + log(sum);
}
static void want_losses(Run *r, const double *logits, const double *targets) {
    const int64_t V = r->s.V;
    EACH(t, r->s.T) {
        const double *x = logits + t * padded_vocab(V);
        if (targets[t] < 0) {
            want_exactly(r, 0, t, 0);
            continue;
        }
        const double lse = lse_of(x, V), target = x[(int64_t)targets[t]];
        want(r, 0, t, lse - target, 1 + fabs(lse) + fabs(target), (double)V / 16);
    }
}
CALL(cross_entropy_forward, p[0], p[1], p[2], T, V)
REFERENCE(cross_entropy_forward) { want_losses(r, x[1], x[2]); }
static void want_dlogits(Run *r, double *const *x, const double *weights, double loss_scale) {
    const int64_t T = r->s.T, V = r->s.V;
    want_losses(r, x[1], x[2]);
    EACH(t, T) {
        const int64_t row = t * padded_vocab(V);
        const double lse = x[2][t] < 0 ? 0 : lse_of(x[1] + row, V),
                     scale = loss_scale * (weights ? weights[t] : 1), size = fabs(scale);
        for (int64_t v = V; v < padded_vocab(V); v++) want_exactly(r, 1, row + v, 0);
        EACH(v, V) {
            const int64_t i = row + v;
            const bool is_target = v == (int64_t)x[2][t];
            const double p = exp(x[1][i] - lse);
            if (x[2][t] < 0)
                want_exactly(r, 1, i, 0);
            else
                want(r, 1, i, (p - is_target) * scale,
                     size * (p * (1 + fabs(x[1][i]) + fabs(lse)) + is_target * UNIT),
                     (double)V / 16);
            if (x[2][t] >= 0) r->tol[1][i] += size * (UNDERFLOW + 4 * UNIT * is_target);
        }
    }
}
CALL(cross_entropy_forward_backward, p[0], p[1], p[2], NULL, p[3], T, V)
REFERENCE(cross_entropy_forward_backward) { want_dlogits(r, x, NULL, x[3][0]); }
CALL_AS(cross_entropy_weighted, cross_entropy_forward_backward, p[0], p[1], p[2], p[3], p[4], T, V)
REFERENCE(cross_entropy_weighted) { want_dlogits(r, x, x[3], x[4][0]); }
// The row without a target may hold anything.
static void prepare_logits(Run *r, double *const *x) {
    const int64_t Vp = padded_vocab(r->s.V);
    EACH(i, r->n[1]) if ((x[2][i / Vp] < 0 && i % 7 == 0) || i % Vp >= r->s.V) x[1][i] = NAN;
}
static void want_sum(Run *r, double *const *x, const double *weights) {
    double size = 0;
    r->want[0][0] = x[0][0];
    EACH(t, r->s.T) {
        const double term = x[1][t] * (weights ? weights[t] : 1);
        r->want[0][0] += term, size += fabs(term);
    }
    r->tol[0][0] = 2 * (double)(r->s.T + 1) * 0x1p-53 * (size + fabs(x[0][0]));
}
CALL(losses_sum, p[0], p[1], NULL, T)
REFERENCE(losses_sum) { want_sum(r, x, NULL); }
CALL_AS(losses_sum_weighted, losses_sum, p[0], p[1], p[2], T)
REFERENCE(losses_sum_weighted) { want_sum(r, x, x[2]); }
// As many runs as rows: documents have as many as they have rows, of rows of others too.
CALL(losses_by_document, p[0], p[1], p[2], p[3], p[4], r->num_segments)
REFERENCE(losses_by_document) {
    want_exactly(r, 0, r->num_segments, x[0][r->num_segments]);
    EACH(i, r->num_segments) {
        double sum = 0, size = 0, terms = 2;
        for (int64_t k = (int64_t)x[4][i]; k < (int64_t)x[4][i + 1]; k++)
            EACH(t, (int64_t)x[2][2 * k + 1]) {
                const double term = x[1][(int64_t)x[2][2 * k] + t] * x[3][k];
                sum += term, size += fabs(term), terms++;
            }
        r->want[0][i] = sum, r->tol[0][i] = 2 * terms * 0x1p-53 * size;
    }
}

// A run of half of a document's rows, then runs of one. The second document of a pair begins at the
// second row of the first. The first pair is far from even.
CALL(pairs_weigh, p[0], p[1], p[2], p[3], p[4], p[5], p[6], T, r->num_segments / 2)
static void prepare_pairs(Run *r, double *const *x) {
    if (r->n[2] > 0) x[2][0] *= 3000;
    EACH(d, r->num_segments) {
        const int64_t from = (int64_t)x[6][d], n = (int64_t)x[6][d + 1] - from, half = (n + 1) / 2,
                      first = d % 2 ? (int64_t)x[6][d - 1] + (x[6][d - 1] < x[6][d]) : from;
        EACH(j, n) {
            x[4][2 * (from + j)] = (double)(first + (j > 0 ? half + j - 1 : 0));
            x[4][2 * (from + j) + 1] = j == 0 ? (double)half : j <= n - half;
        }
    }
}
REFERENCE(pairs_weigh) {
    EACH(t, T) r->want[0][t] = 0, r->tol[0][t] = 0;
    EACH(i, r->num_segments + 1) want_exactly(r, 1, i, x[1][i]);
    EACH(i, r->num_segments / 2) {
        const double *a = x[3] + 7 * i, *sums = x[2] + 2 * i, smooth = a[5];
        const long double z = a[0] * (a[2] - sums[0]) - a[1] * (a[3] - sums[1]) - a[4],
                          right = log1pl(expl(-z)), wrong = log1pl(expl(z)),
                          slope = (1 - smooth) / (1 + expl(z)) - smooth / (1 + expl(-z));
        want(r, 1, i, (double)((1 - smooth) * right + smooth * wrong + a[6] * sums[0]),
             fabs(a[6] * sums[0]) + (double)fabsl(z), 8);
        for (int64_t d = 2 * i; d < 2 * i + 2; d++)
            for (int64_t k = (int64_t)x[6][d]; k < (int64_t)x[6][d + 1]; k++)
                EACH(t, (int64_t)x[4][2 * k + 1]) {
                    const int64_t row = (int64_t)x[4][2 * k] + t;
                    const double factor = (double)(d % 2 ? -slope * a[1] : slope * a[0] + a[6]);
                    r->want[0][row] += factor * x[5][k];
                    r->tol[0][row] += 0x1p-22 * fabs(factor * x[5][k]);
                }
    }
}

// ---- Optimizer ----------------------------------------------------------------------------------

CALL(grads_add, p[0], p[1], (size_t)T)
REFERENCE(grads_add) { EACH(i, T) want(r, 0, i, x[0][i] + x[1][i], 0, 0); }
CALL(global_norm_squared, p[0], p[1], (size_t)T)
REFERENCE(global_norm_squared) {
    r->want[0][0] = x[0][0];
    EACH(i, T) r->want[0][0] += x[1][i] * x[1][i];
    r->tol[0][0] = 2 * (double)(T + 1) * 0x1p-53 * r->want[0][0];
}

// T: which of the norms and losses; scale: the limit
static const double clip_norms[] = {9.3, 0, 0.25, 0.9e38, 1.1e38, INFINITY, NAN, 4, 4};
static const double clip_losses[] = {3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, INFINITY, NAN};
CALL(clip_scale, p[0], (float)r->s.scale)
REFERENCE(clip_scale) {
    const double norm = sqrt(x[0][1]), limit = r->s.scale;
    double scale = limit > 0 && norm > limit ? limit / norm : 1;
    if (!isfinite(x[0][0]) || !isfinite(norm) || scale * norm > MAX_UPDATE_NORM) scale = 0;
    want_exactly(r, 0, 0, x[0][0]), want_exactly(r, 0, 1, x[0][1]);
    r->want[0][2] = norm, r->tol[0][2] = norm * 0x1p-23;
    r->want[0][3] = scale, r->tol[0][3] = scale * 0x1p-22;
}

static const AdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 7};
static size_t low_bits_at(int64_t n) { return ((size_t)n * sizeof(floatX) + 255) / 256 * 256; }
static uint16_t *low_bits_of(void *master, int64_t n) {
    return master_lo_bytes() ? (uint16_t *)((char *)master + low_bits_at(n)) : NULL;
}
CALL(adamw_update, p[0], low_bits_of(p[0], T), (Moments){p[1], p[2], false, 0}, p[3], p[4], hyper,
     (size_t)T)
REFERENCE(adamw_update) {
    const double b1 = hyper.beta1, b2 = hyper.beta2, lr = hyper.lr, t = (double)hyper.t;
    EACH(i, T) {
        const double w = x[0][i], g = x[3][i] * x[4][3];
        const double m = b1 * x[1][i] + (1 - b1) * g, v = b2 * x[2][i] + (1 - b2) * g * g;
        const double size = b1 * fabs(x[1][i]) + (1 - b1) * fabs(g);
        const double hat = 1 / (1 - pow(b1, t)) / (sqrt(v / (1 - pow(b2, t))) + (double)hyper.eps);
        const double decay = (double)hyper.weight_decay * w;
        want(r, 1, i, m, size, 0);
        want(r, 2, i, v, v, 0);
        want(r, 0, i, w - lr * (decay + m * hat), lr * (fabs(decay) + size * hat), 0);
        r->tol[0][i] += 0x1p-23 * (fabs(w) + fabs(r->want[0][i]));
        for (int k = 0; k < 3 && x[4][3] == 0; k++) want_exactly(r, k, i, x[k][i]);
    }
}

// Moments in bf16: the same, rounded by a hash; near a border of it, either way
static const uint64_t counter = 0x123456789abcdefull;
static void want_rounded(Run *r, int k, int64_t i, int shift) {
    const double value = r->want[k][i], error = r->tol[k][i] + 0x1p-24 * fabs(value);
    const uint64_t random = mix64(counter + (uint64_t)i) >> shift;
    const double low = (double)moment_widen(moment_narrow((float)(value - error), random)),
                 high = (double)moment_widen(moment_narrow((float)(value + error), random));
    r->want[k][i] = (low + high) / 2, r->tol[k][i] = fabs(high - low) / 2;
}
CALL_AS(adamw_bf16, adamw_update, p[0], low_bits_of(p[0], T), (Moments){p[1], p[2], true, counter},
        p[3], p[4], hyper, (size_t)T)
REFERENCE(adamw_bf16) {
    want_adamw_update(r, x, T, C, V);
    EACH(i, x[4][3] == 0 ? 0 : T) want_rounded(r, 1, i, 0), want_rounded(r, 2, i, 16);
}

static void prepare_adamw(Run *r, double *const *x) {
    EACH(i, r->s.T == 3 ? 3 : 0) {  // the largest gradient that is not skipped, in every step
        const double b1 = hyper.beta1, b2 = hyper.beta2, before = (double)(hyper.t - 1);
        x[0][i] = 0, x[3][i] = 1e19, x[4][3] = 1;
        x[1][i] = (1 - pow(b1, before)) * 1e19, x[2][i] = (1 - pow(b2, before)) * 1e38;
    }
    if (r->s.T % 257 != 0) return;  // of these lengths the step is one to be skipped
    x[4][3] = 0;
    EACH(i, r->s.T) x[3][i] = i % 2 ? NAN : INFINITY;
}

// V matrices (T,C), as many elements apart as they have
#define MATRICES \
    { T, C, V, (size_t)(2 * T * C) }
#define EACH_OF_MATRICES(i_, at_)                 \
    for (int64_t i_ = 0, at_ = 0; i_ < T * C * V; \
         i_++, at_ = i_ / (T * C) * (2 * T * C) + i_ % (T * C))
CALL(muon_momentum, p[0], (Moments){.m = p[1]}, p[2], 0.95f, (MuonShape)MATRICES)
REFERENCE(muon_momentum) {
    const double beta = (double)0.95f, scale = x[2][3];
    for (int k = 0; k < 2; k++) EACH(i, r->n[k]) want_exactly(r, k, i, x[k][i]);
    EACH_OF_MATRICES(i, at) {
        const double g = (1 - beta) * x[0][at] * scale, old = beta * x[1][at], m = old + g;
        if (scale == 0) break;
        want(r, 1, at, m, fabs(old) + fabs(g), 0);
        want(r, 0, at, beta * m + g, fabs(old) + 2 * fabs(g), 0);
    }
}
CALL_AS(muon_momentum_bf16, muon_momentum, p[0], (Moments){p[1], NULL, true, counter}, p[2], 0.95f,
        (MuonShape)MATRICES)
REFERENCE(muon_momentum_bf16) {
    want_muon_momentum(r, x, T, C, V);
    EACH_OF_MATRICES(i, at) if (x[2][3] != 0) want_rounded(r, 1, at, 0);
}
CALL(muon_normalise, p[0], p[1], 1e-7, (MuonShape)MATRICES)
REFERENCE(muon_normalise) {
    double norm = 0;
    EACH_OF_MATRICES(i, at) {
        if (i % (T * C) == 0) {
            norm = 0;
            EACH(k, T * C) norm += x[1][at + k] * x[1][at + k];
            norm = fmax(sqrt(norm), 1e-7);
        }
        want(r, 0, i, x[1][at] / norm, fabs(x[1][at] / norm), 0);
    }
}
// Norms near and below the least one
static void prepare_norm(Run *r, double *const *x) {
    EACH(i, r->n[1] / r->s.V) x[1][i] = r->s.V == 3 ? ldexp(x[1][i], -30) : 0;
}
static const float coefficients[] = {3, -4, 2};
CALL(muon_iterate, p[0], p[1], p[2], coefficients, (MuonShape)MATRICES)
// Of singular values near 1: each step's rounding to floatX counts a few times
REFERENCE(muon_iterate) {
    const int64_t side = T < C ? T : C, n = side * side, row = T <= C ? C : 1,
                  step = T <= C ? 1 : C;
    const double *k = (double[]){coefficients[0], coefficients[1], coefficients[2]};
    double *g = calloc((size_t)(2 * n), sizeof *g), *poly = g + n;
    EACH(m, V) {
        const double *y = x[2] + m * T * C;  // (side, T * C / side): x, or where that is tall x^T
        EACH(i, n) g[i] = 0;
        EACH(i, n)
        EACH(j, T * C / side) g[i] += y[i / side * row + j * step] * y[i % side * row + j * step];
        EACH(i, n) poly[i] = k[1] * g[i] + (i % (side + 1) == 0 ? k[0] : 0);
        EACH(i, n) EACH(j, side) poly[i] += k[2] * g[i / side * side + j] * g[j * side + i % side];
        EACH(i, side) EACH(j, T * C / side) {
            const int64_t at = m * T * C + i * row + j * step;
            double sum = 0;
            EACH(l, side) sum += poly[i * side + l] * y[l * row + j * step];
            want(r, 0, at, sum, 0, 0);
            r->tol[0][at] += 16 * STORE * (1 + fabs(sum));
        }
    }
    EACH(i, r->n[1]) r->tol[1][i] = INFINITY;  // scratch
    free(g);
}
CALL(muon_apply, p[0], low_bits_of(p[0], r->n[0]), p[1], p[2], 0.02f, 0.9f, (MuonShape)MATRICES)
REFERENCE(muon_apply) {
    EACH(i, r->n[0]) want_exactly(r, 0, i, x[0][i]);
    EACH_OF_MATRICES(i, at) {
        const double w = (double)0.9f * x[0][at], d = (double)0.02f * x[1][i];
        if (x[2][3] == 0) break;
        want(r, 0, at, w - d, fabs(w) + fabs(d), 0);
        r->tol[0][at] += 0x1p-23 * (fabs(w) + fabs(r->want[0][at]));
    }
}
static void prepare_muon(Run *r, double *const *x) {
    if (r->s.T % 16 != 0) x[2][3] = 0;
}

// ---- Shapes. The backend takes widths of its own: CPU any, CUDA multiples of 8. -----------------

#ifdef BACKEND_CUDA
#define ODD(...)
#define WIDE(...) __VA_ARGS__,
#else
#define ODD(...) __VA_ARGS__,
#define WIDE(...)
#endif
#define DOCS(...) \
    .lengths = (const int[]) { __VA_ARGS__, -1 }
#define SHARED(...) \
    .shared = (const int[]) { __VA_ARGS__ }

// clang-format off
#define END {.T = -1}
#define TC(T_, C_) {.T = T_, .C = C_}
#define TCV(T_, C_, V_) {.T = T_, .C = C_, .V = V_}
#define H(H_, Hkv_, D_) {.num_heads = H_, .num_kv_heads = Hkv_, .head_dim = D_}
#define HEADS(T_, ...) {.T = T_, .heads = H(__VA_ARGS__)}

static const Shape row_shapes[] = {
    TCV(34, 192, 40), TCV(0, 64, 40), TCV(1, 64, 40), TCV(5, 576, 40), TCV(3, 8, 40),
    TCV(34, 64, 3), TCV(5, 2048, 9), TCV(3, 4096, 5), TCV(2, 16384, 4),
    {.T = 9, .C = 576, .V = 5, .scale = 1e-3},  // eps counts
    // more rows than blocks take in a turn; a sum over five warps; three turns
    TCV(2100, 64, 3), TCV(37, 4104, 3), WIDE(TCV(520, 4104, 3))
    ODD(TCV(3, 1, 4), TCV(17, 33, 5), TCV(64, 15, 1)) END};
static const Shape row_bench[] = {TCV(4096, 576, 49152), END};

// Runs of equal tokens that end at, start at, fill and cross spans of 32; see TOKENS
static const Shape embedding_shapes[] = {
    TCV(97, 192, 3), TCV(0, 64, 4), TCV(1, 8, 4), TCV(31, 64, 1), TCV(32, 64, 1), TCV(33, 64, 2),
    TCV(64, 192, 3), TCV(65, 192, 3), TCV(96, 192, 2), TCV(700, 192, 3), TCV(3000, 8, 2),
    TCV(2049, 64, 300), TCV(34, 4096, 40), ODD(TCV(200, 25, 13)) END};

static const Shape head_shapes[] = {
    HEADS(34, 3, 1, 64), HEADS(0, 3, 1, 64), HEADS(5, 9, 3, 64), HEADS(5, 32, 8, 128),
    HEADS(1, 16, 8, 128), HEADS(5, 1, 1, 16), HEADS(5, 5, 1, 80), HEADS(3, 2, 2, 256),
    {.T = 9, .heads = H(2, 1, 128), .scale = 1e-3}, HEADS(2100, 1, 1, 64),
    ODD(HEADS(7, 2, 1, 6), HEADS(9, 5, 5, 34), HEADS(6, 2, 1, 150)) END};
static const Shape head_bench[] = {HEADS(4096, 9, 3, 64), END};

// Random documents, in addition to these shapes
static const HeadShape random_heads[] = {
    H(1, 1, 64), H(3, 1, 64), H(4, 1, 64), H(2, 2, 64), H(2, 1, 64), H(1, 1, 128), H(2, 1, 128),
    ODD(H(1, 1, 8), H(2, 2, 16), H(4, 1, 8), H(9, 3, 8), H(5, 5, 6), H(15, 5, 8), H(3, 1, 24))};
static const Shape attention_shapes[] = {
    // every kernel once: whole and partial tiles, empty documents at the start, middle and end; a
    // shared prefix
    {.heads = H(3, 1, 64), DOCS(0, 1, 63, 0, 64, 65, 129, 0)},
    {.heads = H(4, 1, 128), DOCS(0, 1, 63, 0, 65, 129, 0)}, {.heads = H(3, 1, 128), DOCS(129, 1)},
    {.heads = H(3, 1, 64), DOCS(3, 256, 1, 66, 65), SHARED(0, 0, 256, 256, 128)},
    // shared prefixes: between others, of less than the document and all of it, of falling lengths
    {.heads = H(4, 1, 128), DOCS(129, 1, 65, 0, 128, 3), SHARED(0, 128, 128, 0, 0, 128)},
    {.heads = H(1, 1, 64), DOCS(385, 129, 66, 1), SHARED(0, 384, 256, 128)},
    // and so many that CUDA divides the documents that read one
    {.heads = H(2, 1, 64), DOCS(321, 500, 300, 90), SHARED(0, 256, 256, 128)},
    {.heads = H(1, 1, 128), DOCS(130, 400, 600), SHARED(0, 128, 128)},
    {.heads = H(2, 2, 64), DOCS(128, 1, 2, 257, 3, 64), SHARED(0, 128, 128, 0, 256, 128)},
    {.heads = H(1, 1, 128), .scale = 3, DOCS(129, 65), SHARED(0, 128)},
    {.heads = H(1, 1, 64), .spike = 65, DOCS(130, 70), SHARED(0, 128)},
    {.heads = H(1, 1, 64), DOCS(1, 2, 63, 64, 65, 127, 128, 129, 193)},
    {.heads = H(4, 1, 64), DOCS(2, 65, 127)}, {.heads = H(6, 2, 64), DOCS(63, 65)},
    {.heads = H(2, 2, 64), DOCS(0, 0, 0)}, {.heads = H(2, 2, 64), DOCS(130, 0)},
    {.heads = H(5, 1, 64), DOCS(17, 130)},
    {.heads = H(2, 1, 128), DOCS(1, 1, 1, 1, 1, 1, 1, 1, 1, 1)},
    // more blocks of keys and queries than are in flight
    {.heads = H(1, 1, 64), DOCS(515, 3)}, {.heads = H(1, 1, 128), DOCS(3, 257)},
    // large scores: most rows are one spike, exp underflows for the rest
    {.heads = H(3, 1, 64), .scale = 5, DOCS(65, 3, 129)},
    {.heads = H(2, 1, 128), .scale = 3, DOCS(65, 3, 129)},
    // from one key on a row is all but one-hot: at the first, a middle, the last key of a tile
    {.heads = H(2, 1, 64), .spike = 1, DOCS(150)}, {.heads = H(2, 1, 64), .spike = 64, DOCS(150)},
    {.heads = H(2, 1, 128), .spike = 65, DOCS(150)},
    {.heads = H(2, 1, 128), .spike = 129, DOCS(150)},
    ODD({.heads = H(1, 1, 2), .scale = 8, DOCS(2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2)},
        {.heads = H(1, 1, 8), DOCS(3, 530, 2)}, {.heads = H(9, 3, 8), DOCS(1, 0, 2, 7, 65, 33)},
        {.heads = H(5, 5, 6), DOCS(129, 16)}, {.heads = H(2, 2, 16), .scale = 25, DOCS(130, 17)},
        {.heads = H(3, 1, 24), DOCS(0, 66, 3)}, {.heads = H(32, 8, 8), DOCS(66, 3)}) END};
// On a real GPU, which has more SMs than the shapes above have items: CTAs take several in turn
#define TEN(n) n, n, n, n, n, n, n, n, n, n
static const Shape many_items[] = {
    {.heads = H(24, 8, 64), DOCS(TEN(65), TEN(65), TEN(65), TEN(65))},
    {.heads = H(8, 8, 128), DOCS(TEN(65), TEN(65), TEN(65), TEN(65))}};
static const Shape attention_bench[] = {
    {.heads = H(9, 3, 64), DOCS(220, 217, 295, 183, 130, 350)}, {.heads = H(9, 3, 64), DOCS(2048)},
    {.heads = H(9, 3, 64), DOCS(512, 512, 512, 512)},
    {.heads = H(9, 3, 64), DOCS(640, 640, 640, 640)},
    {.heads = H(9, 3, 64), DOCS(640, 128, 128, 128), SHARED(0, 512, 512, 512)},
    {.heads = H(9, 3, 64), DOCS(64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64)},
#ifdef BACKEND_CUDA
    {.heads = H(9, 3, 64), DOCS(8192, 8192)},
#endif
    {.heads = H(32, 8, 128), DOCS(1000)}, END};

static const Shape decode_shapes[] = {
    {.heads = H(3, 1, 64), DOCS(5, 1, 33)}, {.heads = H(9, 3, 64), DOCS(2, 65)},
    {.heads = H(1, 1, 64), DOCS(0, 193, 7)}, {.heads = H(32, 8, 128), DOCS(17, 4)},
    {.heads = H(6, 6, 128), DOCS(34)}, {.heads = H(2, 2, 64), DOCS(0)},
    ODD({.heads = H(2, 2, 6), DOCS(200, 3)}, {.heads = H(5, 1, 34), DOCS(65, 1)}) END};
static const Shape decode_bench[] = {{.heads = H(9, 3, 64), DOCS(512, 512)}, END};

// On the CPU test_ops.c adds sizes around the edges of the register tile.
static const Shape product_shapes[] = {
    TCV(34, 64, 264), TCV(0, 64, 64), TCV(1, 192, 320), TCV(5, 8, 8), TCV(35, 576, 192),
    TCV(3, 2048, 24), TCV(300, 16, 8), TCV(36, 64, 64),
    ODD(TCV(511, 5, 17), TCV(2049, 5, 17), TCV(9, 512, 6), TCV(9, 1025, 6), TCV(9, 4101, 6),
        TCV(3, 10, 513), TCV(3, 10, 4101), TCV(129, 127, 67)) END};
static const Shape product_bench[] = {
    TCV(1395, 576, 960), TCV(1395, 576, 576), TCV(1395, 576, 3072), TCV(1395, 1536, 576),
    TCV(1395, 576, 49152), END};

static const Shape swiglu_shapes[] = {
    {.T = 34, .C = 512, .scale = 2}, TC(0, 8), {.T = 5, .C = 8, .scale = 4}, TC(1, 1536),
    TC(2, 14336), {.T = 2, .C = 8192, .scale = 60},  // exp overflows
    ODD({.T = 7, .C = 45, .scale = 4}) END};
static const Shape swiglu_bench[] = {TC(4096, 1536), END};

// Blocks of 32 and of fewer, on the CPU's threads too
static const Shape nf4_shapes[] = {
    TC(5, 1), TC(0, 1), TC(1, 1), TC(32, 1), TC(33, 1), {.T = 700, .C = 1, .scale = 1e-30}, END};
static const Shape nf4_bench[] = {TC(1 << 16, 1), END};

#define VOCAB(T_, V_, scale_) {.T = T_, .V = V_, .scale = scale_}
static const Shape vocab_shapes[] = {
    VOCAB(9, 264, 3), VOCAB(6, 4099, 3), VOCAB(0, 264, 0), VOCAB(5, 1, 0), VOCAB(5, 7, 400),
    VOCAB(34, 258, 0), VOCAB(6, 17, 36), VOCAB(3, 49157, 3),
    VOCAB(4, 258, 30), VOCAB(128, 258, 400),  // one logit far above the others, in any lane
    END};
static const Shape vocab_bench[] = {VOCAB(512, 49152, 3), END};

static const Shape flat_shapes[] = {
    {.T = 1003}, {.T = 0}, {.T = 1}, {.T = 3}, {.T = 4}, {.T = 256}, {.T = 257},
    {.T = 4097, .scale = 1e3}, {.T = 70001}, END};
static const Shape flat_bench[] = {{.T = 1 << 22}, END};
static const Shape documents_shapes[] = {
    {DOCS(0, 1, 63, 0, 400, 2, 0)}, {DOCS(0, 0)}, {DOCS(1)}, {DOCS(3000)}, END};
static const Shape documents_bench[] = {{DOCS(220, 217, 295, 183, 130, 350)}, END};
#define MATRIX(T_, C_, V_, scale_) {.T = T_, .C = C_, .V = V_, .scale = scale_}
static const Shape matrix_shapes[] = {
    MATRIX(16, 24, 3, 0.2), MATRIX(64, 24, 2, 0.12), MATRIX(8, 8, 1, 0.3), MATRIX(40, 40, 2, 0.15),
    MATRIX(80, 8, 5, 0.1), MATRIX(8, 520, 2, 0.04),
    ODD(MATRIX(7, 5, 3, 0.4), MATRIX(3, 11, 2, 0.3), MATRIX(1, 9, 1, 0.3)) END};
static const Shape matrix_bench[] = {
    MATRIX(576, 1536, 30, 0.03), MATRIX(192, 576, 30, 0.04), END};
#define CLIP(T_, scale_) {.T = T_, .scale = scale_}
static const Shape clip_shapes[] = {
    CLIP(0, 1), CLIP(0, 0.01), CLIP(0, -1), CLIP(1, 1), CLIP(2, 1), CLIP(3, 1), CLIP(3, -1),
    CLIP(4, 1), CLIP(4, -1), CLIP(5, 1), CLIP(6, 1), CLIP(7, 1), CLIP(8, 1), END};

// ---- The table ----------------------------------------------------------------------------------

#define SHAPES(kind_) .shapes = kind_##_shapes, .bench = kind_##_bench
#define TIMED(kind_) SHAPES(kind_), .flops = kind_##_flops
#define RESULT(name_, size_) {name_, FLOATX, OUT, size_, 0}
#define SUM(name_, size_) {name_, FLOATX, INOUT, size_, 0}
#define INPUT(name_, size_) {name_, FLOATX, IN, size_, 0}
#define GRADIENT(name_, size_) {name_, REAL, INOUT, size_, 0}
static const Operation operations[] = {
    OPERATION(gather_rows, SHAPES(row), .operands = {
        RESULT("out", "NC"), INPUT("inp", "TC"), {"rows", INT, IN, "N", ROWS}}),
    OPERATION(scatter_rows, SHAPES(row), .operands = {
        RESULT("out", "TC"), INPUT("inp", "NC"), {"rows", INT, IN, "N", ROWS}}),
    OPERATION(embedding_forward, .flags = BY_ROWS, SHAPES(row), .operands = {
        RESULT("out", "TC"), {"tokens", INT, IN, "T", TOKENS}, INPUT("weight", "VC")}),
    OPERATION(embedding_backward, .shapes = embedding_shapes, .bench = row_bench, .operands = {
        GRADIENT("dweight", "VC"), INPUT("dout", "TC"), {"tokens", INT, IN, "T", TOKENS},
        {"order", INT, IN, "T", ORDER}}),
    OPERATION(rmsnorm_forward, .flags = BY_ROWS, SHAPES(row), .operands = {
        RESULT("normed", "TC"), {"rstd", REAL, OUT, "T", 0}, INPUT("resid", "TC"),
        INPUT("weight", "C")}),
    OPERATION(rmsnorm_backward, .flags = BY_ROWS, SHAPES(row), .operands = {
        SUM("dresid", "TC"), GRADIENT("dweight", "C"), INPUT("dnormed", "TC"), INPUT("resid", "TC"),
        INPUT("weight", "C"), {"rstd", REAL, IN, "T", POSITIVE}}),
    OPERATION(qk_norm_forward, .flags = BY_ROWS, SHAPES(head), .operands = {
        RESULT("out", "TQ"), INPUT("inp", "TQ"), INPUT("weight", "2D")}),
    OPERATION(qk_norm_backward, .flags = BY_ROWS, SHAPES(head), .operands = {
        SUM("dqkv", "TQ"), GRADIENT("dweight", "2D"), INPUT("inp", "TQ"), INPUT("weight", "2D")}),
    OPERATION(bias_forward, .flags = BY_ROWS, SHAPES(row), .operands = {
        SUM("out", "TC"), INPUT("bias", "C")}),
    OPERATION(bias_backward, SHAPES(row), .operands = {
        GRADIENT("dbias", "C"), INPUT("dout", "TC")}),
    OPERATION(rope_forward, .flags = BY_ROWS, SHAPES(head), .operands = {
        SUM("qkv", "TQ"), {"position_ids", INT, IN, "T", POSITIONS},
        {"rope_table", REAL, IN, "AD", ANGLES}}),
    OPERATION(attention_forward, .flags = BY_DOCS | ATTENTION, SHAPES(attention),
              .prepare = prepare_attention_forward, .flops = forward_flops, .operands = {
        RESULT("out", "TO"), {"lse", REAL, OUT, "HT", 0}, INPUT("qkv", "TQ"),
        {"cu_seqlens", INT, IN, "S", DOC_ENDS}, {"work", INT, IN, "W", WORK},
        {"shared_first", INT, IN, "S", SHARED_FIRST}, {"shared_len", INT, IN, "S", SHARED_LEN}}),
    OPERATION(attention_backward, .flags = BY_DOCS | ATTENTION, SHAPES(attention),
              .prepare = prepare_attention_backward, .flops = backward_flops, .operands = {
        RESULT("dqkv", "TQ"), {"delta", REAL, OUT, "HT", 0}, INPUT("dout", "TO"),
        INPUT("qkv", "TQ"), INPUT("out", "TO"), {"lse", REAL, IN, "HT", 0},
        {"position_ids", INT, IN, "T", POSITIONS}, {"rope_table", REAL, IN, "AD", ANGLES},
        {"cu_seqlens", INT, IN, "S", DOC_ENDS}, {"work", INT, IN, "W", WORK},
        {"shared_first", INT, IN, "S", SHARED_FIRST}, {"shared_len", INT, IN, "S", SHARED_LEN},
        {"sums", REAL, OUT, "B", 0}}),
    OPERATION(kv_store, SHAPES(decode), .operands = {
        SUM("cache", "RK"), INPUT("qkv", "TQ"), {"first_rows", INT, IN, "T", FIRST_ROWS},
        {"position_ids", INT, IN, "T", POSITIONS}}),
    OPERATION(attention_decode, .flags = BY_ROWS, SHAPES(decode), .operands = {
        RESULT("out", "TO"), INPUT("qkv", "TQ"), INPUT("cache", "RK"),
        {"first_rows", INT, IN, "T", FIRST_ROWS}, {"position_ids", INT, IN, "T", POSITIONS}}),
    OPERATION(matmul_forward, .flags = CPU_PRODUCT, TIMED(product), .operands = {
        RESULT("out", "TV"), INPUT("inp", "TC"), INPUT("weight", "VC")}),
    OPERATION(matmul_add, .flags = CPU_PRODUCT, TIMED(product), .operands = {
        RESULT("out", "TV"), INPUT("resid", "TV"), INPUT("inp", "TC"), INPUT("weight", "VC")}),
    OPERATION(matmul_add_in_place, .flags = CPU_PRODUCT, .shapes = product_shapes, .operands = {
        SUM("out", "TV"), INPUT("inp", "TC"), INPUT("weight", "VC")}),
    OPERATION(matmul_backward_input, .flags = CPU_PRODUCT, TIMED(product), .operands = {
        RESULT("dinp", "TC"), INPUT("dout", "TV"), INPUT("weight", "VC")}),
    OPERATION(matmul_add_to_input, .flags = CPU_PRODUCT, .shapes = product_shapes, .operands = {
        SUM("dinp", "TC"), INPUT("dout", "TV"), INPUT("weight", "VC")}),
    OPERATION(matmul_backward_weight, .flags = PRODUCT, TIMED(product), .operands = {
        GRADIENT("dweight", "VC"), INPUT("dout", "TV"), INPUT("inp", "TC")}),
    OPERATION(matmul_new_weight, .flags = PRODUCT, .shapes = product_shapes, .operands = {
        {"dweight", REAL, OUT, "VC", 0}, INPUT("dout", "TV"), INPUT("inp", "TC")}),
    OPERATION(matmul_forward_columns, .flags = CPU_PRODUCT, .shapes = product_shapes, .operands = {
        SUM("out", "T2V"), INPUT("resid", "T2V"), INPUT("inp", "T2C"), INPUT("weight", "VC")}),
    OPERATION(matmul_new_columns, .flags = CPU_PRODUCT, .shapes = product_shapes, .operands = {
        SUM("out", "T2V"), INPUT("inp", "T2C"), INPUT("weight", "VC")}),
    OPERATION(matmul_backward_columns, .flags = PRODUCT, .shapes = product_shapes, .operands = {
        SUM("dinp", "T2C"), GRADIENT("dweight", "VC"), INPUT("dout", "T2V"), INPUT("inp", "T2C"),
        INPUT("weight", "VC")}),
    OPERATION(swiglu_forward, .flags = BY_ROWS, SHAPES(swiglu), .operands = {
        RESULT("out", "TC"), INPUT("gate_up", "T2C")}),
    OPERATION(swiglu_backward, .flags = BY_ROWS, SHAPES(swiglu), .operands = {
        RESULT("dgate_up", "T2C"), INPUT("dout", "TC"), INPUT("gate_up", "T2C")}),
    OPERATION(nf4_dequantize, .flags = BY_ROWS, SHAPES(nf4), .prepare = prepare_codes,
              .operands = {
        RESULT("out", "T88"), {"codes", INT, IN, "T8", 0}, {"absmax", FLOAT, IN, "T", 0}}),
    OPERATION(cross_entropy_forward, .flags = BY_ROWS, SHAPES(vocab), .prepare = prepare_logits,
              .operands = {
        {"losses", REAL, OUT, "T", 0}, INPUT("logits", "TP"), {"targets", INT, IN, "T", TARGETS}}),
    OPERATION(cross_entropy_forward_backward, .flags = BY_ROWS, SHAPES(vocab),
              .prepare = prepare_logits, .operands = {
        {"losses", REAL, OUT, "T", 0}, SUM("logits", "TP"), {"targets", INT, IN, "T", TARGETS},
        {"loss_scale", REAL, IN, "1", LOSS_SCALE}}),
    OPERATION(cross_entropy_weighted, .flags = BY_ROWS, SHAPES(vocab), .prepare = prepare_logits,
              .operands = {
        {"losses", REAL, OUT, "T", 0}, SUM("logits", "TP"), {"targets", INT, IN, "T", TARGETS},
        {"weights", FLOAT, IN, "T", 0}, {"loss_scale", REAL, IN, "1", LOSS_SCALE}}),
    OPERATION(losses_sum, SHAPES(flat), .operands = {
        {"sum", DOUBLE, INOUT, "1", 0}, {"losses", REAL, IN, "T", 0}}),
    OPERATION(losses_sum_weighted, SHAPES(flat), .operands = {
        {"sum", DOUBLE, INOUT, "1", 0}, {"losses", REAL, IN, "T", 0},
        {"weights", FLOAT, IN, "T", 0}}),
    OPERATION(losses_by_document, SHAPES(documents), .operands = {
        {"sums", DOUBLE, INOUT, "S", 0}, {"losses", REAL, IN, "T", 0},
        {"runs", INT, IN, "2T", RUNS}, {"weights", FLOAT, IN, "T", 0},
        {"starts", INT, IN, "S", DOC_ENDS}}),
    OPERATION(pairs_weigh, SHAPES(documents), .prepare = prepare_pairs, .operands = {
        {"weights", FLOAT, OUT, "T", 0}, {"losses", REAL, INOUT, "S", 0},
        {"sums", DOUBLE, IN, "S", 0}, {"pairs", DOUBLE, IN, "7S", 0},
        {"runs", INT, IN, "2T", RUNS}, {"run_weights", FLOAT, IN, "T", 0},
        {"starts", INT, IN, "S", DOC_ENDS}}),
    OPERATION(grads_add, SHAPES(flat), .operands = {
        GRADIENT("sum", "T"), {"x", REAL, IN, "T", 0}}),
    OPERATION(global_norm_squared, SHAPES(flat), .operands = {
        {"sum", DOUBLE, INOUT, "1", POSITIVE}, {"x", REAL, IN, "T", 0}}),
    OPERATION(clip_scale, .shapes = clip_shapes, .operands = {
        {"step", STEP, INOUT, "4", SCALARS}}),
    OPERATION(muon_momentum, SHAPES(matrix), .prepare = prepare_muon, .operands = {
        GRADIENT("grads", "2VTC"), GRADIENT("momentum", "2VTC"), {"step", STEP, IN, "4", SCALARS}}),
    OPERATION(muon_momentum_bf16, SHAPES(matrix), .prepare = prepare_muon, .operands = {
        GRADIENT("grads", "2VTC"), {"momentum", HALF, INOUT, "2VTC", 0},
        {"step", STEP, IN, "4", SCALARS}}),
    OPERATION(muon_normalise, SHAPES(matrix), .prepare = prepare_norm, .operands = {
        RESULT("x", "VTC"), {"grads", REAL, IN, "2VTC", 0}}),
    OPERATION(muon_iterate, SHAPES(matrix), .operands = {
        RESULT("next", "VTC"), RESULT("squares", "2VMM"), INPUT("x", "VTC")}),
    OPERATION(muon_apply, SHAPES(matrix), .prepare = prepare_muon, .operands = {
        {"weights", MASTER, INOUT, "2VTC", 0}, INPUT("x", "VTC"),
        {"step", STEP, IN, "4", SCALARS}}),
    OPERATION(adamw_update, SHAPES(flat), .prepare = prepare_adamw, .operands = {
        {"weights", MASTER, INOUT, "T", 0}, GRADIENT("m", "T"), {"v", REAL, INOUT, "T", POSITIVE},
        {"grads", REAL, IN, "T", 0}, {"step", STEP, IN, "4", SCALARS}}),
    OPERATION(adamw_bf16, SHAPES(flat), .prepare = prepare_adamw, .operands = {
        {"weights", MASTER, INOUT, "T", 0}, {"m", HALF, INOUT, "T", 0},
        {"v", HALF, INOUT, "T", POSITIVE}, {"grads", REAL, IN, "T", 0},
        {"step", STEP, IN, "4", SCALARS}}),
};
// clang-format on
enum { NUM_OPERATIONS = sizeof operations / sizeof *operations };
