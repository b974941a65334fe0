// LoRA (arXiv 2106.09685): adapters beside frozen linear layers that share an input, one of which
// computes y = x W^T + scale (x A^T) B^T. Made of the operations of kernels.h alone, so that it is
// the same on every backend. x A^T is small, and backward computes it again.
#ifndef UNPAD_LORA_H
#define UNPAD_LORA_H

#include "kernels.h"

enum { LORA_MOST = 3 };  // layers that share an input: q_proj, k_proj, v_proj

// Adapters of the linear layers of one input
typedef struct {
    int num;                                     // 0: none
    int64_t column[LORA_MOST], rows[LORA_MOST];  // their columns of the fused output
    floatX *A;                                   // (num*r, K)   one after another
    floatX *B;                                   // (rows, r)    each, one after another
    real *dA, *dB;
} Lora;

typedef struct {
    int rank;  // r
    float scale;
    floatX *h, *dh;  // (T, LORA_MOST*r)
} LoraWork;

// out (T,N) +=  scale * (inp (T,K) A^T) B^T, in each adapter's columns
static inline void lora_forward(const Lora *a, const LoraWork *w, floatX *out, const floatX *inp,
                                int64_t T, int64_t K, int64_t N) {
    const int64_t r = w->rank, all = a->num * r;
    const floatX *B = a->B;
    if (a->num == 0) return;
    matmul_forward(w->h, inp, a->A, T, K, all);  // (T, num*r)
    for (int i = 0; i < a->num; B += a->rows[i++] * r)
        matmul_forward_columns(out + a->column[i], w->h + i * r, B, w->scale, T, r, a->rows[i], all,
                               N);
}

// dinp (T,K) +=  dh A                              dout (T,N), inp (T,K) as in forward
// dA, dB      =  dh^T inp, scale * dout^T h; accumulate: +=
// where h = inp A^T, dh = scale * dout B
static inline void lora_backward(const Lora *a, const LoraWork *w, floatX *dinp, const floatX *dout,
                                 const floatX *inp, bool accumulate, int64_t T, int64_t K,
                                 int64_t N) {
    const int64_t r = w->rank, all = a->num * r;
    int64_t at = 0;  // in B and dB
    if (a->num == 0) return;
    matmul_forward(w->h, inp, a->A, T, K, all);  // (T, num*r)
    for (int i = 0; i < a->num; at += a->rows[i++] * r)
        matmul_backward_columns(w->dh + i * r, a->dB + at, dout + a->column[i], w->h + i * r,
                                a->B + at, w->scale, accumulate, T, r, a->rows[i], all, N);
    matmul_backward_weight(a->dA, w->dh, inp, accumulate, T, K, all);
    matmul_backward_input(dinp, w->dh, a->A, true, T, K, all);
}

#endif
