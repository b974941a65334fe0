// Bias of a linear layer. The gradient is a sum over columns: one thread owns each element, so sums
// do not depend on the number of threads.

#include "common.h"

void bias_forward(floatX *out, const floatX *bias, int64_t T, int64_t N) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) add_row(out + t * N, bias, N);
}

void bias_backward(real *dbias, const floatX *dout, int64_t T, int64_t N) {
    enum { STRIPE = 64 };  // columns that one thread owns
    if (!dbias) return;
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < N; c += STRIPE)
        for (int64_t t = 0; t < T; t++)
            add_row(dbias + c, dout + t * N + c, at_most(N - c, STRIPE));
}
