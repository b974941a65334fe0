// Rows by index: gather and scatter, the cost of unpadding and re-padding around attention.

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
