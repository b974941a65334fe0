// Rows by index: gather and scatter, the cost of unpadding and re-padding around attention, and
// token embedding. Its backward visits positions in (token, position) order, so that one thread
// owns each row of dweight and the order of its sum is the same for any number of threads.

#include "common.h"

void gather_rows(floatX *out, const floatX *inp, const int32_t *rows, int64_t n, int64_t C) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++)
        memcpy(out + i * C, inp + rows[i] * C, (size_t)C * sizeof(floatX));
}

void scatter_rows(floatX *out, const floatX *inp, const int32_t *rows, int64_t n, int64_t T,
                  int64_t C) {
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) memset(out + t * C, 0, (size_t)C * sizeof(floatX));
#pragma omp for schedule(static)  // after the implied barrier: a row is zeroed before it is filled
        for (int64_t i = 0; i < n; i++)
            memcpy(out + rows[i] * C, inp + i * C, (size_t)C * sizeof(floatX));
    }
}

void embedding_forward(floatX *out, const int32_t *tokens, const floatX *weight, int64_t T, int C) {
    gather_rows(out, weight, tokens, T, C);
}

CLONES void add_row(real *restrict sum, const floatX *restrict row, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += row[i];
}

void embedding_backward(real *dweight, const floatX *dout, const int32_t *tokens,
                        const int32_t *order, int64_t T, int C) {
    if (!dweight) return;
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t i = 0; i < T; i++) {
        int32_t token = tokens[order[i]];
        if (i > 0 && tokens[order[i - 1]] == token) continue;  // done by the start of the run
        real *row = dweight + (int64_t)token * C;
        for (int64_t j = i; j < T && tokens[order[j]] == token; j++)
            add_row(row, dout + (int64_t)order[j] * C, C);
    }
}
