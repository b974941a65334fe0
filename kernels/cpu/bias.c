// Bias of a linear layer. The gradient is a sum over columns: one thread owns each element, so sums
// do not depend on the number of threads.

#include "common.h"

void bias_forward(floatX *out, const floatX *bias, int64_t T, int64_t N) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) add_row(out + t * N, bias, N);
}

// dbias (width) += the sum over t of `width` columns of dout (T,N)
static CLONES void sum_columns(real *restrict dbias, const floatX *restrict dout, int64_t T,
                               int64_t N, int64_t width) {
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < width; c++) dbias[c] += dout[t * N + c];
}

void bias_backward(real *dbias, const floatX *dout, int64_t T, int64_t N) {
    enum { STRIPE = 64 };  // columns that one thread owns
    if (!dbias) return;
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < N; c += STRIPE)
        sum_columns(dbias + c, dout + c, T, N, at_most(N - c, STRIPE));
}
