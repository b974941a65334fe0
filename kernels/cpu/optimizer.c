// Reductions over all gradients: sum of squares, clip factor, and accumulation; then AdamW. The
// block size depends only on n, so sums do not depend on the number of threads.

#include "common.h"

static CLONES double block_sum(const real *x, size_t n) {
    double lanes[SUM_LANES] = {0}, s = 0;
    size_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lanes[j] += (double)x[i + j] * (double)x[i + j];
    for (; i < n; i++) lanes[0] += (double)x[i] * (double)x[i];
    for (int j = 0; j < SUM_LANES; j++) s += lanes[j];
    return s;
}

void global_norm_squared(double *sum, const real *x, size_t n) {
    enum { BLOCKS = 256 };
    double partial[BLOCKS];
    size_t block = (n + BLOCKS - 1) / BLOCKS;
#pragma omp parallel for schedule(static) if (n > (1u << 16))
    for (int b = 0; b < BLOCKS; b++) {
        size_t first = b * block < n ? b * block : n;
        size_t last = first + block < n ? first + block : n;
        partial[b] = block_sum(x + first, last - first);
    }
    for (int b = 0; b < BLOCKS; b++) *sum += partial[b];
}

void clip_scale(StepScalars *step, float max_norm) {
    double norm = sqrt(step->norm_squared);
    step->grad_norm = (float)norm;
    step->scale = max_norm > 0 && norm > (double)max_norm ? (float)((double)max_norm / norm) : 1.0f;
    const int too_large = norm * (double)step->scale > MAX_UPDATE_NORM;
    if (!isfinite(norm) || !isfinite(step->loss_sum) || too_large) step->scale = 0;
}

void grads_add(real *sum, const real *x, size_t n) {
    enum { SPAN = 1 << 14 };
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += SPAN) add_row(sum + i, x + i, at_most(SPAN, (int64_t)(n - i)));
}

// ---- Moments ------------------------------------------------------------------------------------

CLONES real *moments_read(real *copy, void *values, const Moments *k, size_t i, size_t n) {
    const uint16_t *halves = (uint16_t *)values + i;
    if (!k->bf16) return (real *)values + i;
    for (size_t j = 0; j < n; j++) copy[j] = moment_widen(halves[j]);
    return copy;
}

CLONES void moments_write(void *values, const real *x, const Moments *k, int random, size_t i,
                          size_t n) {
    uint16_t *halves = (uint16_t *)values + i;
    for (size_t j = 0; j < n && k->bf16; j++)
        halves[j] = moment_narrow((float)x[j], mix64(k->counter + i + j) >> random);
}

// ---- AdamW with decoupled weight decay, one pass over memory ------------------------------------

typedef struct {
    real lr, beta1, beta2, eps, decay, correct1, correct2, grad_scale;
} Coefficients;

static CLONES void update_span(floatX *restrict w, real *restrict m, real *restrict v,
                               const real *restrict grads, Coefficients k, size_t n) {
    for (size_t i = 0; i < n; i++) {
        real g = grads[i] * k.grad_scale;
        m[i] = k.beta1 * m[i] + (1 - k.beta1) * g;
        v[i] = k.beta2 * v[i] + (1 - k.beta2) * g * g;
        const real root = sqrt_real(v[i] * k.correct2);
        w[i] = w[i] * k.decay - k.lr * (m[i] * k.correct1) / (root + k.eps);
    }
}

void adamw_update(floatX *weights, uint16_t *master_lo, Moments moments, const real *grads,
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
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += MOMENTS_SPAN) {
        const size_t span = n - i < MOMENTS_SPAN ? n - i : MOMENTS_SPAN;
        real m_copy[MOMENTS_SPAN], v_copy[MOMENTS_SPAN];
        real *m = moments_read(m_copy, moments.m, &moments, i, span),
             *v = moments_read(v_copy, moments.v, &moments, i, span);
        update_span(weights + i, m, v, grads + i, k, span);
        moments_write(moments.m, m, &moments, RANDOM_M, i, span);
        moments_write(moments.v, v, &moments, RANDOM_V, i, span);
    }
}
