// Rows by index: gather and scatter, what an unpad / re-pad around attention costs.

#include "common.cuh"

// out[out_rows ? out_rows[i] : i] = inp[inp_rows ? inp_rows[i] : i] for i < n
__global__ void copy_rows_kernel(floatX *__restrict__ out, const floatX *__restrict__ inp,
                                 const int32_t *out_rows, const int32_t *inp_rows, int64_t n,
                                 int C) {
    const int64_t i = row_of_thread();
    if (i >= n) return;
    floatX *to = out + (out_rows ? (int64_t)out_rows[i] : i) * C;
    const floatX *from = inp + (inp_rows ? (int64_t)inp_rows[i] : i) * C;
#pragma unroll 4
    for (int c = 8 * (int)threadIdx.x; c < C; c += 8 * (int)blockDim.x)
        store_vector(to + c, load_vector(from + c));
}

void gather_rows(floatX *out, const floatX *inp, const int32_t *rows, int64_t n, int64_t C) {
    if (n == 0) return;
    const RowGrid grid = row_grid("gather_rows", n, C);
    copy_rows_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(out, inp, nullptr, rows, n,
                                                                    (int)C);
    LAUNCH_CHECK("copy_rows_kernel");
}

// Zeros first, then the rows: rows that are filled are written twice, as in every re-padding by
// "zeros, then index put".
void scatter_rows(floatX *out, const floatX *inp, const int32_t *rows, int64_t n, int64_t T,
                  int64_t C) {
    if (T == 0) return;
    device_zero(out, (size_t)T * (size_t)C * sizeof(floatX));
    if (n == 0) return;
    const RowGrid grid = row_grid("scatter_rows", n, C);
    copy_rows_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(out, inp, rows, nullptr, n,
                                                                    (int)C);
    LAUNCH_CHECK("copy_rows_kernel");
}
