// Cross-entropy over a chunk of tokens. The gradient overwrites the logits, so no second (T,V)
// buffer exists. Rows without a target are not computed: their loss and gradient are 0.

#include "common.h"

static CLONES floatX row_max(const floatX *x, int64_t V) {
    floatX lanes[SUM_LANES];
    for (int j = 0; j < SUM_LANES; j++) lanes[j] = x[0];
    int64_t v = 0;
    for (; v + SUM_LANES <= V; v += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lanes[j] = x[v + j] > lanes[j] ? x[v + j] : lanes[j];
    for (; v < V; v++) lanes[0] = x[v] > lanes[0] ? x[v] : lanes[0];
    for (int j = 1; j < SUM_LANES; j++) lanes[0] = lanes[j] > lanes[0] ? lanes[j] : lanes[0];
    return lanes[0];
}

// Sum of exp(x - max)
static CLONES real sum_exp(const floatX *x, floatX max, int64_t V) {
    real lanes[SUM_LANES] = {0};
    int64_t v = 0;
    for (; v + SUM_LANES <= V; v += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lanes[j] += exp_fast(x[v + j] - max);
    for (; v < V; v++) lanes[0] += exp_fast(x[v] - max);
    return lanes_sum(lanes);
}

static CLONES void softmax_scaled(floatX *x, floatX max, real scale_over_sum, int64_t V) {
    for (int64_t v = 0; v < V; v++) x[v] = exp_fast(x[v] - max) * scale_over_sum;
}

// The loss of one row; also returns its max and sum of exp(x - max), for the gradient.
static real row_loss(const floatX *x, int32_t target, int64_t V, floatX *max, real *sum) {
    *max = row_max(x, V);
    *sum = sum_exp(x, *max, V);
    return (real)log((double)*sum) + (*max - x[target]);
}

void cross_entropy_forward(real *losses, const floatX *logits, const int32_t *targets, int64_t T,
                           int64_t V) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        floatX max;
        real sum;
        const floatX *x = logits + t * padded_vocab(V);
        losses[t] = targets[t] < 0 ? 0 : row_loss(x, targets[t], V, &max, &sum);
    }
}

void cross_entropy_forward_backward(real *losses, floatX *logits, const int32_t *targets,
                                    const float *weights, const real *loss_scale, int64_t T,
                                    int64_t V) {
    const int64_t Vp = padded_vocab(V);
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        floatX *x = logits + t * Vp, max;  // x (Vp)
        real sum;
        if (targets[t] < 0) {
            losses[t] = 0;
            memset(x, 0, (size_t)Vp * sizeof(floatX));
            continue;
        }
        const real scale = weights ? *loss_scale * (real)weights[t] : *loss_scale;
        losses[t] = row_loss(x, targets[t], V, &max, &sum);
        softmax_scaled(x, max, scale / sum, V);
        x[targets[t]] -= scale;
        memset(x + V, 0, (size_t)(Vp - V) * sizeof(floatX));
    }
}

void losses_sum(double *sum, const real *losses, const float *weights, int64_t T) {
    double s = 0;
    for (int64_t t = 0; t < T; t++) s += (double)losses[t] * (weights ? (double)weights[t] : 1);
    *sum += s;
}

void losses_by_document(double *sums, const real *losses, const int32_t *runs, const float *weights,
                        const int32_t *starts, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        double s = 0;
        for (int32_t k = starts[i]; k < starts[i + 1]; k++)
            for (int32_t t = runs[2 * k], end = t + runs[2 * k + 1]; t < end; t++)
                s += (double)losses[t] * (double)weights[k];
        sums[i] = s;
    }
}

void pairs_weigh(float *weights, real *losses, const double *sums, const PairTerms *pairs,
                 const int32_t *runs, const float *run_weights, const int32_t *starts, int64_t T,
                 int64_t n) {
    memset(weights, 0, (size_t)T * sizeof *weights);
    for (int64_t i = 0; i < n; i++) {
        double factors[2];
        losses[i] = (real)pair_loss(&pairs[i], sums + 2 * i, factors);
        for (int64_t doc = 2 * i; doc < 2 * i + 2; doc++)
            for (int32_t k = starts[doc]; k < starts[doc + 1]; k++)
                for (int32_t t = runs[2 * k], end = t + runs[2 * k + 1]; t < end; t++)
                    weights[t] += (float)(factors[doc % 2] * (double)run_weights[k]);
    }
}
