// Muon on matrices of one shape, here one after another; muon.h composes it.

#include "common.h"

static size_t elements(MuonShape s) { return (size_t)(s.rows * s.cols); }

static void momentum_span(real *restrict grads, real *restrict m, real scale, float beta,
                          size_t n) {
    for (size_t i = 0; i < n; i++) {
        const real g = (1 - beta) * (grads[i] * scale);
        m[i] = beta * m[i] + g;
        grads[i] = beta * m[i] + g;
    }
}

void muon_momentum(real *grads, Moments momentum, const StepScalars *step, float beta,
                   MuonShape s) {
    if (step->scale == 0) return;  // skipped: not finite
    for (size_t j = 0, last = elements(s); j < (size_t)s.num; j++, last += s.stride)
#pragma omp parallel for schedule(static)
        for (size_t i = j * s.stride; i < last; i += MOMENTS_SPAN) {
            const size_t span = last - i < MOMENTS_SPAN ? last - i : MOMENTS_SPAN;
            real copy[MOMENTS_SPAN], *m = moments_read(copy, momentum.m, &momentum, i, span);
            momentum_span(grads + i, m, step->scale, beta, span);
            moments_write(momentum.m, m, &momentum, RANDOM_M, i, span);
        }
}

void muon_normalise(floatX *x, const real *grads, double eps, MuonShape s) {
    for (int64_t j = 0; j < s.num; j++, x += elements(s), grads += s.stride) {
        double sum = 0;
        global_norm_squared(&sum, grads, elements(s));
        const real scale = (real)(1 / fmax(sqrt(sum), eps));
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < elements(s); i++) x[i] = grads[i] * scale;
    }
}

void muon_iterate(floatX *next, floatX *squares, const floatX *x, const float k[3], MuonShape s) {
    const int64_t rows = s.rows, cols = s.cols, side = rows < cols ? rows : cols;
    floatX *gram = squares, *poly = squares + s.num * side * side;
    for (int64_t j = 0; j < s.num; j++, gram += side * side, poly += side * side) {
        if (rows <= cols)
            matmul_forward(gram, NULL, x, x, rows, cols, rows);
        else
            matmul_backward_weight(gram, x, x, false, rows, cols, cols);
        matmul_backward_weight(poly, gram, gram, false, side, side, side);
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < side * side; i++)
            poly[i] = k[1] * gram[i] + k[2] * poly[i] + (i % (side + 1) == 0 ? k[0] : 0);
        if (rows <= cols)
            matmul_backward_input(next, poly, x, false, rows, cols, rows);
        else
            matmul_forward(next, NULL, x, poly, rows, cols, cols);
        next += elements(s), x += elements(s);
    }
}

void muon_apply(floatX *weights, uint16_t *master_lo, const floatX *x, const StepScalars *step,
                float lr, float keep, MuonShape s) {
    (void)master_lo;  // the weight is its own fp32 master here
    if (step->scale == 0) return;
    for (int64_t j = 0; j < s.num; j++, weights += s.stride, x += elements(s))
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < elements(s); i++) weights[i] = weights[i] * keep - lr * x[i];
}
