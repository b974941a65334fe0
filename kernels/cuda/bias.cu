// Bias of a linear layer, in vectors of 8 columns. Its gradient is a sum over all rows: each row of
// threads sums its own rows of the tensor in registers, and a second kernel adds these sums in
// their order. No atomics; the number of blocks depends on T and N alone.

#include "common.cuh"

__global__ void bias_forward_kernel(floatX *__restrict__ out, const floatX *__restrict__ bias,
                                    int64_t T, int N) {
    const int64_t t = row_of_thread();
    if (t >= T) return;
#pragma unroll 4
    for (int c = 8 * (int)threadIdx.x; c < N; c += 8 * (int)blockDim.x) {
        float x[8], b[8];
        load8(x, out + t * N + c);
        load8(b, bias + c);
        for (int j = 0; j < 8; j++) x[j] += b[j];
        store8(out + t * N + c, x);
    }
}

void bias_forward(floatX *out, const floatX *bias, int64_t T, int64_t N) {
    if (T == 0) return;
    const RowGrid grid = row_grid("bias_forward", T, N);
    bias_forward_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(out, bias, T, (int)N);
    LAUNCH_CHECK("bias_forward_kernel");
}

// partial (gridDim.x * blockDim.y, N)
__global__ void __launch_bounds__(ROW_MAX_THREADS)
    bias_backward_kernel(float *__restrict__ partial, const floatX *__restrict__ dout, int64_t T,
                         int N) {
    float sums[ROW_VECTORS][8] = {};
    const int64_t stride = (int64_t)gridDim.x * blockDim.y;
    for (int64_t t = row_of_thread(); t < T; t += stride) {
        unrolled_for (int i = 0; i < ROW_VECTORS; i++) {
            const int c = vector_column(i);
            float x[8];
            if (c >= N) continue;
            load8(x, dout + t * N + c);
            for (int j = 0; j < 8; j++) sums[i][j] += x[j];
        }
    }
    unrolled_for (int i = 0; i < ROW_VECTORS; i++) {
        const int c = vector_column(i);
        if (c >= N) continue;
        for (int j = 0; j < 8; j++) partial[row_of_thread() * N + c + j] = sums[i][j];
    }
}

void bias_backward(real *dbias, const floatX *dout, int64_t T, int64_t N) {
    if (T == 0 || !dbias) return;
    const RowGrid grid = row_grid("bias_backward", T, N);
    if (N > ROW_MAX_COLUMNS) cuda_unsupported("bias", "at most 16384 columns", N);
    const unsigned blocks = grid.blocks < BACKWARD_BLOCKS ? grid.blocks : (unsigned)BACKWARD_BLOCKS;
    float *partial = (float *)cuda_scratch();
    bias_backward_kernel<<<blocks, grid.block, 0, cuda_stream()>>>(partial, dout, T, (int)N);
    LAUNCH_CHECK("bias_backward_kernel");
    add_partial_rows(dbias, partial, (int)(blocks * grid.block.y), (int)N);
}
