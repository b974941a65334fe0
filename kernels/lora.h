// LoRA (arXiv 2106.09685): adapters for frozen linear layers that share an input; each layer
// computes y = x W^T + scale (x A^T) B^T. Composed of operations of kernels.h, so that it is the
// same on every backend. x A^T is small, and backward recomputes it.
#ifndef UNPAD_LORA_H
#define UNPAD_LORA_H

#include "kernels.h"

enum { LORA_MOST = 3 };  // layers that share an input: q_proj, k_proj, v_proj

typedef struct {
    int num, rank;  // adapters, 0: none; r
    float scale;
    int64_t column[LORA_MOST], rows[LORA_MOST];  // of the fused output of the layers: each one's
    floatX *A, *B;                               // (num*r, K), (rows, r): one after another
    real *dA, *dB;
    floatX *h, *dh;  // (T, LORA_MOST*r)  scratch
} Lora;

// out (T,N) +=  scale * (inp (T,K) A^T) B^T
static inline void lora_forward(const Lora *a, floatX *out, const floatX *inp, int64_t T, int64_t K,
                                int64_t N) {
    const int64_t r = a->rank, all = a->num * r;
    const floatX *B = a->B;
    if (a->num == 0) return;
    matmul_forward(a->h, inp, a->A, T, K, all);  // (T, num*r)
    for (int i = 0; i < a->num; B += a->rows[i++] * r)
        matmul_forward_columns(out + a->column[i], a->h + i * r, B, a->scale, T, r, a->rows[i], all,
                               N);
}

// With h = inp A^T and dh = scale * dout B, of dout (T,N) and inp (T,K):
// dinp (T,K) +=  dh A
// dA, dB      =  dh^T inp, scale * dout^T h; accumulate: +=
static inline void lora_backward(const Lora *a, floatX *dinp, const floatX *dout, const floatX *inp,
                                 bool accumulate, int64_t T, int64_t K, int64_t N) {
    const int64_t r = a->rank, all = a->num * r;
    int64_t at = 0;  // in B and dB
    if (a->num == 0) return;
    matmul_forward(a->h, inp, a->A, T, K, all);  // (T, num*r)
    for (int i = 0; i < a->num; at += a->rows[i++] * r)
        matmul_backward_columns(a->dh + i * r, a->dB + at, dout + a->column[i], a->h + i * r,
                                a->B + at, a->scale, accumulate, T, r, a->rows[i], all, N);
    matmul_backward_weight(a->dA, a->dh, inp, accumulate, T, K, all);
    matmul_backward_input(dinp, a->dh, a->A, true, T, K, all);
}

#endif
