// NF4 (arXiv 2305.14314): a frozen matrix as 4-bit codes of 16 levels, with one scale for each 64
// numbers in row-major order, the bits of bitsandbytes (blocksize 64, no double quantisation). A
// linear layer turns its matrix back into floatX before each product.
#pragma once

#include <math.h>

#include "kernels.h"

enum { NF4_BLOCK = 64 };

// Quantiles of a normal distribution, and zero, as bitsandbytes rounds them
#define NF4_LEVELS                                                                              \
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,                   \
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,              \
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, \
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

// Of n numbers, a multiple of NF4_BLOCK
typedef struct {
    uint8_t *codes;  // (n/2)  the first of two numbers in the high bits
    float *absmax;   // (n/64) the scales
    floatX *values;  // scratch of the largest matrix
} Nf4;

#ifdef __cplusplus
extern "C" {
#endif

// out (n) =  level of each code * scale of its block, rounded to floatX
void nf4_dequantize(floatX *out, const uint8_t *codes, const float *absmax, size_t n);

#ifdef __cplusplus
}
#endif

// Host: codes (32) and the scale, which it returns, of 64 values: the levels nearest to each
// value times the reciprocal of the largest magnitude; halfway between two the lower one
static inline float nf4_quantize_block(uint8_t *codes, const float *values) {
    static const float levels[] = {NF4_LEVELS};
    float most = 0, scaled[NF4_BLOCK];
    int32_t code[NF4_BLOCK] = {0};
    for (int i = 0; i < NF4_BLOCK; i++) most = fmaxf(most, fabsf(values[i]));
    const float inverse = 1.0f / (most > 1e-38f ? most : 1e-38f);
    for (int i = 0; i < NF4_BLOCK; i++) scaled[i] = values[i] * inverse;
    for (int k = 0; k < 15; k++) {
        const float border = (levels[k] + levels[k + 1]) / 2;
        for (int i = 0; i < NF4_BLOCK; i++) code[i] += scaled[i] > border;
    }
    for (int i = 0; i < NF4_BLOCK; i += 2) codes[i / 2] = (uint8_t)(code[i] << 4 | code[i + 1]);
    return most;
}

// values_host (n) into numbers first .. first + n - 1: whole blocks
static inline void nf4_put(Nf4 q, size_t first, const float *values_host, size_t n) {
    enum { BLOCKS = 1024 };  // at a time
    uint8_t codes[BLOCKS * NF4_BLOCK / 2];
    float absmax[BLOCKS];
    for (size_t at = first / NF4_BLOCK, end = (first + n) / NF4_BLOCK, count; at < end;
         at += count) {
        for (count = 0; count < BLOCKS && at + count < end; count++, values_host += NF4_BLOCK)
            absmax[count] = nf4_quantize_block(codes + count * NF4_BLOCK / 2, values_host);
        device_upload(q.codes + at * NF4_BLOCK / 2, codes, count * NF4_BLOCK / 2);
        device_upload(q.absmax + at, absmax, count * sizeof *absmax);
    }
}

// The numbers from `first` on
static inline Nf4 nf4_at(Nf4 q, size_t first) {
    q.codes += first / 2;
    q.absmax += first / NF4_BLOCK;
    return q;
}
