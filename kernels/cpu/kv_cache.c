// Key-value cache: attention of single tokens over the cached text before them. Memory-bound: every
// key and value is read once for each query head of its group, after the first time from L2.
#include "common.h"

enum { KEYS = 64 };  // scores at a time

void kv_store(floatX *cache, const floatX *qkv, const int32_t *first_rows,
              const int32_t *position_ids, int64_t T, HeadShape heads) {
    const int64_t D = heads.head_dim, width = 2 * heads.num_kv_heads * D;
    const int64_t q_width = heads.num_heads * D;
    for (int64_t t = 0; t < T; t++)
        memcpy(cache + ((int64_t)first_rows[t] + position_ids[t]) * width,
               qkv + t * (q_width + width) + q_width, (size_t)width * sizeof(floatX));
}

// scores (n) =  scale * keys q, rows of keys `row` elements apart; returns the maximum of top and
// all scores
static CLONES real score_keys(real *scores, const floatX *q, const floatX *keys, int64_t row, int n,
                              int D, real scale, real top) {
    for (int j = 0; j < n; j++) {
        scores[j] = dot_product(q, keys + j * row, D) * scale;
        top = scores[j] > top ? scores[j] : top;
    }
    return top;
}

// out (D) = alpha * out + the values weighted by exp(score - top); returns the sum of the weights
static CLONES real add_values(floatX *restrict out, real *restrict scores,
                              const floatX *restrict values, int64_t row, int n, int D, real alpha,
                              real top) {
    real sum = 0;
    for (int j = 0; j < n; j++) scores[j] = exp_fast(scores[j] - top);
    for (int d = 0; d < D; d++) out[d] *= alpha;
    for (int j = 0; j < n; j++) {
        const real p = scores[j];
        sum += p;
        for (int d = 0; d < D; d++) out[d] += p * values[j * row + d];
    }
    return sum;
}

// Attention of one query to `length` keys and values: the online softmax of attention.c.
static void decode_head(floatX *out, const floatX *q, const floatX *keys, const floatX *values,
                        int64_t row, int64_t length, int D) {
    const real scale = (real)(1 / sqrt(D));
    real top = -INFINITY, sum = 0, scores[KEYS];
    memset(out, 0, (size_t)D * sizeof(floatX));
    for (int64_t j = 0; j < length; j += KEYS) {
        const int n = (int)at_most(KEYS, length - j);
        const real before = top;
        top = score_keys(scores, q, keys + j * row, row, n, D, scale, top);
        const real alpha = exp_fast(before - top);
        sum = sum * alpha + add_values(out, scores, values + j * row, row, n, D, alpha, top);
    }
    for (int d = 0; d < D; d++) out[d] /= sum;
}

void attention_decode(floatX *out, const floatX *qkv, const floatX *cache,
                      const int32_t *first_rows, const int32_t *position_ids, int64_t T,
                      HeadShape heads) {
    const int64_t D = heads.head_dim, H = heads.num_heads, Hkv = heads.num_kv_heads;
    const int64_t row = 2 * Hkv * D;
#pragma omp parallel for schedule(dynamic)
    for (int64_t item = 0; item < T * H; item++) {
        const int64_t t = item / H, h = item % H;
        const floatX *keys = cache + first_rows[t] * row + h / (H / Hkv) * D;
        decode_head(out + item * D, qkv + (t * (H + 2 * Hkv) + h) * D, keys, keys + Hkv * D, row,
                    (int64_t)position_ids[t] + 1, (int)D);
    }
}
