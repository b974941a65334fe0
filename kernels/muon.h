// Muon: the update of a matrix is its momentum with all singular values near 1. It is composed of
// operations of kernels.h, so it is the same in both backends. It is torch.optim.Muon (PyTorch 2.9)
// with adjust_lr_fn "match_rms_adamw"; its five iterations run in bf16 on CUDA, in fp32 on the CPU.
//   m  =  beta m + (1 - beta) g                momentum; g is the clipped gradient
//   x  =  beta m + (1 - beta) g                Nesterov
//   x  =  x / max(||x||, 1e-7)                 Frobenius norm: no singular value is above 1
//   x  =  a x + b (x x^T) x + c (x x^T)^2 x    Newton-Schulz, MUON_STEPS times
//   w  =  w - lr (weight_decay w + 0.2 sqrt(max(rows, cols)) x)
// With this scale updates have the RMS of AdamW's: its learning rate and weight decay carry over.
// Sources: https://kellerjordan.github.io/posts/muon (2024); scale and decay: arXiv 2502.16982.
#ifndef UNPAD_MUON_H
#define UNPAD_MUON_H

#include <math.h>

#include "kernels.h"

enum { MUON_STEPS = 5 };
static const float MUON_MOMENTUM = 0.95f;

// Device memory of an update, for the largest matrix and the largest square of a shorter side
typedef struct {
    floatX *x, *next;      // (rows,cols)
    floatX *gram, *poly;   // (side,side)
    double *norm_squared;  // (1)
} MuonScratch;

static inline int64_t muon_side(int64_t rows, int64_t cols) { return rows < cols ? rows : cols; }

static inline double muon_flops(int64_t rows, int64_t cols) {
    const double side = (double)muon_side(rows, cols);
    return MUON_STEPS * 2 * side * (2 * (double)rows * (double)cols + side * side);
}

// One Newton-Schulz step: s->x =  (a I + b G + c G^2) x with G = x x^T, or where x is tall
// x (a I + b G + c G^2) with G = x^T x, the same in exact arithmetic. square (side,side): scratch.
static inline void muon_iterate(MuonScratch *s, real *square, int64_t rows, int64_t cols) {
    const int64_t side = muon_side(rows, cols);
    floatX *x = s->x;
    if (rows <= cols) {
        matmul_forward(s->gram, x, x, rows, cols, rows);
    } else {
        matmul_backward_weight(square, x, x, false, rows, cols, cols);
        muon_normalise(s->gram, square, NULL, (size_t)(side * side));
    }
    matmul_backward_weight(square, s->gram, s->gram, false, side, side, side);
    muon_polynomial(s->poly, s->gram, square, side);
    if (rows <= cols)
        matmul_backward_input(s->next, s->poly, x, false, rows, cols, rows);
    else
        matmul_forward(s->next, x, s->poly, rows, cols, cols);
    s->x = s->next;
    s->next = x;
}

// weights (rows,cols), master_lo and momentum (rows,cols) in place; grads (rows,cols) are read
// times step->scale and become scratch. With scale 0 weights and momentum do not change.
static inline void muon_update(floatX *weights, uint16_t *master_lo, real *momentum, real *grads,
                               const StepScalars *step, float lr, float weight_decay, int64_t rows,
                               int64_t cols, MuonScratch s) {
    const size_t n = (size_t)rows * (size_t)cols;
    const float longer = sqrtf((float)(rows > cols ? rows : cols));
    muon_momentum(grads, momentum, step, MUON_MOMENTUM, n);
    device_zero(s.norm_squared, sizeof *s.norm_squared);
    global_norm_squared(s.norm_squared, grads, n);
    muon_normalise(s.x, grads, s.norm_squared, n);
    for (int i = 0; i < MUON_STEPS; i++) muon_iterate(&s, grads, rows, cols);
    muon_apply(weights, master_lo, s.x, step, lr * 0.2f * longer, 1 - lr * weight_decay, n);
}

#endif
