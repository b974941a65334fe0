// Linear layers, and LoRA (arXiv 2106.09685): adapters beside frozen layers of one input, each of
// which then is y = x W^T + scale (x A^T) B^T. Made of operations of kernels.h, so that it is the
// same on every backend. The adapters' product comes first, and W's adds to it in fp32 before it is
// rounded. x A^T is small, and backward computes it again.
#pragma once

#include "nf4.h"

enum { LORA_MOST = 3 };  // layers that share an input: q_proj, k_proj, v_proj

typedef struct {
    int num, rank;  // adapters, 0: none; r
    float scale;
    int64_t column[LORA_MOST], rows[LORA_MOST];  // of the fused output of the layers: each one's
    floatX *A, *B;                               // (num*r, K), (rows, r): one after another
    real *dA, *dB;
    floatX *h, *dh;  // (T, LORA_MOST*r)  scratch
    Nf4 base;        // the layer's weight, if it is kept in NF4
} Lora;

// The weight (n) that products read: dequantised where it is kept in NF4
static inline const floatX *linear_weight(const floatX *weight, const Lora *a, int64_t n) {
    if (!a->base.codes) return weight;
    nf4_dequantize(a->base.values, a->base.codes, a->base.absmax, (size_t)n);
    return a->base.values;
}

// out (T,N) =  resid (T,N) + inp (T,K) weight (N,K)^T + scale * (inp A^T) B^T
// resid NULL: zeros, and only then may adapters leave out some of the columns
static inline void linear_forward(floatX *out, const floatX *resid, const floatX *inp,
                                  const floatX *weight, const Lora *a, int64_t T, int64_t K,
                                  int64_t N) {
    const int64_t r = a->rank, all = a->num * r;
    const floatX *B = a->B;
    int64_t rest = N;  // columns without an adapter
    for (int i = 0; i < a->num; i++) rest -= a->rows[i];
    if (a->num > 0 && rest > 0) device_zero(out, (size_t)(T * N) * sizeof *out);
    if (a->num > 0) matmul_forward(a->h, NULL, inp, a->A, T, K, all);  // (T, num*r)
    for (int i = 0; i < a->num; B += a->rows[i++] * r)
        matmul_forward_columns(out + a->column[i], resid, a->h + i * r, B, a->scale, T, r,
                               a->rows[i], all, N);
    matmul_forward(out, a->num > 0 ? out : resid, inp, linear_weight(weight, a, N * K), T, K, N);
}

// With h = inp A^T and dh = scale * dout B, of dout (T,N) and inp (T,K):
// dinp (T,K)            =  dout weight + dh A
// dweight (N,K), dA, dB =  dout^T inp, dh^T inp, scale * dout^T h; accumulate: +=
static inline void linear_backward(floatX *dinp, real *dweight, const floatX *dout,
                                   const floatX *inp, const floatX *weight, const Lora *a,
                                   bool accumulate, int64_t T, int64_t K, int64_t N) {
    const int64_t r = a->rank, all = a->num * r;
    int64_t at = 0;  // in B and dB
    matmul_backward_weight(dweight, dout, inp, accumulate, T, K, N);
    if (a->num > 0) matmul_forward(a->h, NULL, inp, a->A, T, K, all);  // (T, num*r)
    for (int i = 0; i < a->num; at += a->rows[i++] * r)
        matmul_backward_columns(a->dh + i * r, a->dB + at, dout + a->column[i], a->h + i * r,
                                a->B + at, a->scale, accumulate, T, r, a->rows[i], all, N);
    if (a->num > 0) {
        matmul_backward_weight(a->dA, a->dh, inp, accumulate, T, K, all);
        matmul_backward_input(dinp, a->dh, a->A, false, T, K, all);
    }
    matmul_backward_input(dinp, dout, linear_weight(weight, a, N * K), a->num > 0, T, K, N);
}
