// RMSNorm. Forward and dresid run over rows, dweight over columns: one thread owns each element, so
// sums do not depend on the number of threads.

#include "common.h"

static CLONES real row_rstd(const floatX *x, float eps, int C) {
    return (real)1 / (real)sqrt((double)(dot_product(x, x, C) / C + (real)eps));
}

static CLONES void scale_row(floatX *restrict out, const floatX *restrict x,
                             const floatX *restrict weight, real rstd, int C) {
    for (int c = 0; c < C; c++) out[c] = x[c] * rstd * weight[c];
}

void rmsnorm_forward(floatX *normed, real *rstd, const floatX *resid, const floatX *weight,
                     float eps, int64_t T, int C) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        const floatX *x = resid + t * C;  // (C)
        rstd[t] = row_rstd(x, eps, C);
        scale_row(normed + t * C, x, weight, rstd[t], C);
    }
}

// y = x s w, s = (mean(x^2) + eps)^-1/2, so dx = s (w dy - x s^2 mean(x w dy))
static CLONES void backward_row(floatX *restrict dx, const floatX *restrict dy,
                                const floatX *restrict x, const floatX *restrict w, real s, int C) {
    real lanes[SUM_LANES] = {0};
    int c = 0;
    for (; c + SUM_LANES <= C; c += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lanes[j] += (real)x[c + j] * w[c + j] * dy[c + j];
    for (; c < C; c++) lanes[0] += (real)x[c] * w[c] * dy[c];
    real mean = lanes_sum(lanes) / C * s * s;
    for (c = 0; c < C; c++) dx[c] += s * (w[c] * dy[c] - x[c] * mean);
}

// dw (width) += sum over t of dy x rstd, for `width` columns of dy and x (T,C)
static CLONES void weight_columns(real *restrict dw, const floatX *restrict dy,
                                  const floatX *restrict x, const real *restrict rstd, int64_t T,
                                  int C, int width) {
    for (int64_t t = 0; t < T; t++)
        for (int c = 0; c < width; c++) dw[c] += dy[t * C + c] * x[t * C + c] * rstd[t];
}

void rmsnorm_backward(floatX *dresid, real *dweight, const floatX *dnormed, const floatX *resid,
                      const floatX *weight, const real *rstd, int64_t T, int C) {
    enum { STRIPE = 64 };  // columns of dweight that one thread owns
    const int columns = dweight ? C : 0;
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
        for (int c = 0; c < columns; c += STRIPE)
            weight_columns(dweight + c, dnormed + c, resid + c, rstd, T, C,
                           C - c < STRIPE ? C - c : STRIPE);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++)
            backward_row(dresid + t * C, dnormed + t * C, resid + t * C, weight, rstd[t], C);
    }
}

// ---- Query and key heads ------------------------------------------------------------------------
// The norm is not kept: backward recomputes it.

enum { MAX_HEAD_DIM = 1024 };

void qk_norm_forward(floatX *out, const floatX *inp, const floatX *weight, float eps, int64_t T,
                     HeadShape heads) {
    const int D = heads.head_dim, H = heads.num_heads, Hkv = heads.num_kv_heads;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        const int64_t token = t * (H + 2 * Hkv) * D;
        for (int h = 0; h < H + Hkv; h++) {
            const floatX *x = inp + token + h * D;
            scale_row(out + token + h * D, x, weight + (h < H ? 0 : D), row_rstd(x, eps, D), D);
        }
        const int64_t values = token + (H + Hkv) * D;
        memcpy(out + values, inp + values, (size_t)(Hkv * D) * sizeof(floatX));
    }
}

// One head of all tokens: dx (T,D), rows `stride` apart, in place; dw (D) +=
static void backward_head(floatX *dx, real *dw, const floatX *x, const floatX *weight, float eps,
                          int64_t T, int64_t stride, int D) {
    floatX dy[MAX_HEAD_DIM];
    for (int64_t t = 0; t < T; t++, dx += stride, x += stride) {
        const real rstd = row_rstd(x, eps, D);
        memcpy(dy, dx, (size_t)D * sizeof *dy);
        memset(dx, 0, (size_t)D * sizeof *dx);
        weight_columns(dw, dy, x, &rstd, 1, D, D);
        backward_row(dx, dy, x, weight, rstd, D);
    }
}

void qk_norm_backward(floatX *dqkv, real *dweight, const floatX *inp, const floatX *weight,
                      float eps, int64_t T, HeadShape heads) {
    const int D = heads.head_dim, H = heads.num_heads, Hkv = heads.num_kv_heads;
    if (D > MAX_HEAD_DIM)
        kernel_fatal("qk_norm: head_dim %d; expected at most %d", D, MAX_HEAD_DIM);
#pragma omp parallel for ordered schedule(static, 1)
    for (int h = 0; h < H + Hkv; h++) {
        const int part = h < H ? 0 : D;
        real dw[MAX_HEAD_DIM] = {0};
        backward_head(dqkv + h * D, dw, inp + h * D, weight + part, eps, T,
                      (int64_t)(H + 2 * Hkv) * D, D);
#pragma omp ordered
        for (int c = 0; c < D && dweight; c++) dweight[part + c] += dw[c];
    }
}
