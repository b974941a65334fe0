// AdamW with decoupled weight decay, one pass over memory.

#include "common.h"

typedef struct {
    real lr, beta1, beta2, eps, decay, correct1, correct2, grad_scale;
} Coefficients;

static CLONES void update_span(floatX *RESTRICT w, real *RESTRICT m, real *RESTRICT v,
                               const real *RESTRICT grads, Coefficients k, size_t n) {
    for (size_t i = 0; i < n; i++) {
        real g = grads[i] * k.grad_scale;
        m[i] = k.beta1 * m[i] + (1 - k.beta1) * g;
        v[i] = k.beta2 * v[i] + (1 - k.beta2) * g * g;
#ifdef GRADCHECK
        real root = sqrt(v[i] * k.correct2);
#else
        real root = sqrtf(v[i] * k.correct2);
#endif
        w[i] = w[i] * k.decay - k.lr * (m[i] * k.correct1) / (root + k.eps);
    }
}

void adamw_update(floatX *weights, uint16_t *master_lo, real *m, real *v, const real *grads,
                  const StepScalars *step, AdamW hyper, size_t n) {
    (void)master_lo;               // the weight is its own fp32 master here
    if (step->scale == 0) return;  // skipped: not finite
    Coefficients k = {
        hyper.lr,
        hyper.beta1,
        hyper.beta2,
        hyper.eps,
        1 - (real)hyper.lr * hyper.weight_decay,
        (real)(1 / (1 - pow((double)hyper.beta1, (double)hyper.t))),
        (real)(1 / (1 - pow((double)hyper.beta2, (double)hyper.t))),
        step->scale,
    };
    const size_t span = 1 << 14;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += span)
        update_span(weights + i, m + i, v + i, grads + i, k, n - i < span ? n - i : span);
}
