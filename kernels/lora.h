// Linear layers, and LoRA (arXiv 2106.09685): adapters for frozen layers that share an input; each
// layer computes y = x W^T + scale (x A^T) B^T. Everything here is made of operations of kernels.h,
// and so is the same on every backend. The product of the adapters comes first, and W's is added to
// it in fp32 before the sum is rounded. x A^T is small: backward computes it again.
#pragma once

#include "nf4.h"

enum { LORA_MOST = 3 };  // layers that share an input: q_proj, k_proj, v_proj

typedef struct {
    int num, rank;  // number of adapters, 0: none; r
    float scale;
    int64_t column[LORA_MOST], rows[LORA_MOST];  // of each adapter's output in the fused one
    floatX *A, *B;                               // (num*r, K), (rows, r): one after another
    real *dA, *dB;
    floatX *h, *dh;  // (T, LORA_MOST*r)  scratch
} Lora;

// A projection, or several that share an input, fused
typedef struct {
    int64_t K, N;           // size of the input, of the output
    floatX *weight;         // (N,K)
    Nf4 nf4;                // holds the weight instead, if codes is not NULL
    floatX *bias;           // (N)    NULL: none
    float scale;            // of the product with the weight; 0: none
    real *dweight, *dbias;  // NULL: frozen
    Lora lora;
} Linear;

// Returns the weight that products read, dequantised if it is kept in NF4.
static inline const floatX *linear_weight(const Linear *w) {
    if (!w->nf4.codes) return w->weight;
    nf4_dequantize(w->nf4.values, w->nf4.codes, w->nf4.absmax, (size_t)(w->N * w->K));
    return w->nf4.values;
}

// out (T,N) =  resid (T,N) + scale * inp (T,K) weight^T + bias + lora.scale * (inp A^T) B^T
// resid NULL: zeros; only then may some columns have no adapter.
static inline void linear_forward(floatX *out, const floatX *resid, const floatX *inp,
                                  const Linear *w, int64_t T) {
    const Lora *a = &w->lora;
    const int64_t K = w->K, N = w->N, r = a->rank, all = a->num * r;
    const floatX *B = a->B;
    int64_t rest = N;  // columns without an adapter
    for (int i = 0; i < a->num; i++) rest -= a->rows[i];
    if (a->num > 0 && rest > 0) device_zero(out, (size_t)(T * N) * sizeof *out);
    if (a->num > 0) matmul_forward(a->h, NULL, inp, a->A, T, K, all);  // (T, num*r)
    for (int i = 0; i < a->num; B += a->rows[i++] * r)
        matmul_forward_columns(out + a->column[i], resid, a->h + i * r, B, a->scale, T, r,
                               a->rows[i], all, N);
    if (a->num > 0) resid = out;
    if (w->scale)
        matmul_forward_columns(out, resid, inp, linear_weight(w), w->scale, T, K, N, K, N);
    else
        matmul_forward(out, resid, inp, linear_weight(w), T, K, N);
    if (w->bias) bias_forward(out, w->bias, T, N);
}

// With h = inp A^T and dh = lora.scale * dout B, of dout (T,N) and inp (T,K):
// dinp (T,K)            =  scale * dout weight + dh A
// dweight (N,K), dA, dB =  scale * dout^T inp, dh^T inp, lora.scale * dout^T h; accumulate: +=
// dbias (N)             += column sums of dout
static inline void linear_backward(floatX *dinp, const floatX *dout, const floatX *inp,
                                   const Linear *w, bool accumulate, int64_t T) {
    const Lora *a = &w->lora;
    const int64_t K = w->K, N = w->N, r = a->rank, all = a->num * r;
    int64_t at = 0;                                    // offset in B and dB
    if (w->bias) bias_backward(w->dbias, dout, T, N);  // +=
    if (w->scale)
        matmul_backward_columns(dinp, w->dweight, dout, inp, linear_weight(w), w->scale, accumulate,
                                T, K, N, K, N);
    else
        matmul_backward_weight(w->dweight, dout, inp, accumulate, T, K, N);
    if (a->num > 0) matmul_forward(a->h, NULL, inp, a->A, T, K, all);  // (T, num*r)
    for (int i = 0; i < a->num; at += a->rows[i++] * r)
        matmul_backward_columns(a->dh + i * r, a->dB + at, dout + a->column[i], a->h + i * r,
                                a->B + at, a->scale, accumulate, T, r, a->rows[i], all, N);
    if (a->num > 0) {
        matmul_backward_weight(a->dA, a->dh, inp, accumulate, T, K, all);
        matmul_backward_input(dinp, a->dh, a->A, w->scale != 0, T, K, all);
    }
    if (!w->scale) matmul_backward_input(dinp, dout, linear_weight(w), a->num > 0, T, K, N);
}
