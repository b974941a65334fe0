// Muon: the update of a matrix is its momentum with all singular values near 1. A composition of
// operations of kernels.h, so the same in both backends, on all matrices of one shape at once: one
// by one they are thousands of launches, too short for a GPU. It is torch.optim.Muon (2.9) with
// adjust_lr_fn "match_rms_adamw"; its five iterations run in bf16 on CUDA and in fp32 on the CPU.
//   m  =  beta m + (1 - beta) g                momentum; g is the clipped gradient
//   x  =  beta m + (1 - beta) g                Nesterov
//   x  =  x / max(||x||, 1e-7)                 Frobenius norm: no singular value is above 1
//   x  =  a x + b (x x^T) x + c (x x^T)^2 x    Newton-Schulz, MUON_STEPS times
//   w  =  w - lr (weight_decay w + 0.2 sqrt(max(rows, cols)) x)
// With this scale updates have the RMS of AdamW's: its learning rate and weight decay carry over.
// Sources: https://kellerjordan.github.io/posts/muon (2024); scale and decay: arXiv 2502.16982.
#pragma once

#include <math.h>

#include "kernels.h"

enum { MUON_STEPS = 5 };
static const float MUON_MOMENTUM = 0.95f, MUON_POLYNOMIAL[] = {3.4445f, -4.7750f, 2.0315f};

// Device memory of an update: twice (num,rows,cols); (2,num,side,side)
typedef struct {
    floatX *x[2], *squares;
} MuonScratch;

// FLOPs that take a GPU as long as the update of a matrix among many: its products in tiles of 128
// x 128, and 76 bytes an element at 100 FLOPs a byte
static inline double muon_cost(int64_t rows, int64_t cols) {
    const double m = (double)((rows + 127) / 128 * 128), n = (double)((cols + 127) / 128 * 128);
    const double side = m < n ? m : n, elements = (double)rows * (double)cols;
    return MUON_STEPS * 2 * side * (2 * m * n + side * side) + 76 * 100 * elements;
}

// weights, master_lo and momentum in place; grads are read times step->scale and become scratch.
// With scale 0 weights and momentum do not change.
static inline void muon_update(floatX *weights, uint16_t *master_lo, Moments momentum, real *grads,
                               const StepScalars *step, float lr, float weight_decay,
                               MuonShape shape, MuonScratch s) {
    const float longer = sqrtf((float)(shape.rows > shape.cols ? shape.rows : shape.cols));
    muon_momentum(grads, momentum, step, MUON_MOMENTUM, shape);
    muon_normalise(s.x[0], grads, 1e-7, shape);
    for (int i = 0; i < MUON_STEPS; i++)
        muon_iterate(s.x[(i + 1) % 2], s.squares, s.x[i % 2], MUON_POLYNOMIAL, shape);
    muon_apply(weights, master_lo, s.x[MUON_STEPS % 2], step, lr * 0.2f * longer,
               1 - lr * weight_decay, shape);
}
