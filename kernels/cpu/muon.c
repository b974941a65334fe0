// Muon's element-wise operations; muon.h combines them with matmuls.

#include "common.h"

void muon_momentum(real *grads, real *momentum, const StepScalars *step, float beta, size_t n) {
    const real scale = step->scale;
    if (scale == 0) return;  // skipped: not finite
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        const real g = (1 - beta) * (grads[i] * scale);
        momentum[i] = beta * momentum[i] + g;
        grads[i] = beta * momentum[i] + g;
    }
}

void muon_normalise(floatX *out, const real *x, const double *norm_squared, size_t n) {
    const real scale = norm_squared ? (real)(1 / fmax(sqrt(*norm_squared), MUON_EPS)) : 1;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) out[i] = x[i] * scale;
}

void muon_polynomial(floatX *out, const floatX *gram, const real *square, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n * n; i++)
        out[i] = MUON_B * gram[i] + MUON_C * square[i] + (i % (n + 1) == 0 ? MUON_A : 0);
}

void muon_apply(floatX *weights, uint16_t *master_lo, const floatX *x, const StepScalars *step,
                float lr, float keep, size_t n) {
    (void)master_lo;  // the weight is its own fp32 master here
    if (step->scale == 0) return;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) weights[i] = weights[i] * keep - lr * x[i];
}
