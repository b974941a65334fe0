// Rotary position embedding: rotates each pair (i, i + D/2) of a query or key head by position *
// frequency i. The cosines and sines of a token are copied into two arrays first, so that the loop
// over pairs vectorises; all H + Hkv heads of the token use them. Memory-bound.
#include "common.h"

#define CHUNK 64  // pairs at a time: one chunk for head_dim up to 128

// Rotates pairs [0, n) of every head; angles (n, 2): cos, sin; `half` is D/2
CLONES static void rotate_token(floatX *token, const real *angles, real sign, int num_heads,
                                int half, int n) {
    real cosine[CHUNK], sine[CHUNK];
    for (int i = 0; i < n; i++) {
        cosine[i] = angles[2 * i];
        sine[i] = sign * angles[2 * i + 1];
    }
    for (int h = 0; h < num_heads; h++) {
        floatX *restrict low = token + (size_t)h * 2 * half, *restrict high = low + half;
        for (int i = 0; i < n; i++) {
            real a = low[i], b = high[i];
            low[i] = a * cosine[i] - b * sine[i];
            high[i] = b * cosine[i] + a * sine[i];
        }
    }
}

static void rotate(floatX *qkv, const int32_t *position_ids, const real *rope_table, real sign,
                   int64_t T, HeadShape heads) {
    const int half = heads.head_dim / 2, num_rotated = heads.num_heads + heads.num_kv_heads;
    const int64_t row = (int64_t)(heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    if (heads.head_dim <= 0 || heads.head_dim % 2)
        kernel_fatal("rope: head_dim %d; expected an even one", heads.head_dim);
#pragma omp parallel for
    for (int64_t t = 0; t < T; t++) {
        const real *angles = rope_table + (int64_t)position_ids[t] * heads.head_dim;
        for (int i = 0; i < half; i += CHUNK)
            rotate_token(qkv + t * row + i, angles + 2 * i, sign, num_rotated, half,
                         half - i < CHUNK ? half - i : CHUNK);
    }
}

void rope_forward(floatX *qkv, const int32_t *position_ids, const real *rope_table, int64_t T,
                  HeadShape heads) {
    rotate(qkv, position_ids, rope_table, 1, T, heads);
}

void rope_inverse(floatX *dqkv, const int32_t *position_ids, const real *rope_table, int64_t T,
                  HeadShape heads) {
    rotate(dqkv, position_ids, rope_table, -1, T, heads);
}
