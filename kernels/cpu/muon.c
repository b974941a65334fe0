// What Muon does element by element; muon.h composes it with the products.

#include "common.h"

enum { SPAN = 1 << 14 };  // elements of a thread's turn

static CLONES void momentum_span(real *RESTRICT grads, real *RESTRICT m, real scale, real beta,
                                 size_t n) {
    for (size_t i = 0; i < n; i++) {
        const real g = grads[i] * scale;
        m[i] = beta * m[i] + (1 - beta) * g;
        grads[i] = beta * m[i] + (1 - beta) * g;
    }
}

void muon_momentum(real *grads, real *momentum, const StepScalars *step, float beta, size_t n) {
    if (step->scale == 0) return;  // skipped: not finite
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += SPAN)
        momentum_span(grads + i, momentum + i, step->scale, beta, n - i < SPAN ? n - i : SPAN);
}

void muon_normalise(floatX *out, const real *x, const double *norm_squared, size_t n) {
    const real scale = norm_squared ? (real)(1 / fmax(sqrt(*norm_squared), MUON_EPS)) : 1;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) out[i] = x[i] * scale;
}

void muon_polynomial(floatX *out, const floatX *gram, const real *square, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = i * n; j < (i + 1) * n; j++)
            out[j] = MUON_B * gram[j] + MUON_C * square[j];
        out[i * n + i] += MUON_A;
    }
}

static CLONES void apply_span(floatX *RESTRICT w, const floatX *RESTRICT x, real lr, real keep,
                              size_t n) {
    for (size_t i = 0; i < n; i++) w[i] = w[i] * keep - lr * x[i];
}

void muon_apply(floatX *weights, uint16_t *master_lo, const floatX *x, const StepScalars *step,
                float lr, float keep, size_t n) {
    (void)master_lo;  // the weight is its own fp32 master here
    if (step->scale == 0) return;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += SPAN)
        apply_span(weights + i, x + i, lr, keep, n - i < SPAN ? n - i : SPAN);
}
