// Sums of the columns of a matrix (rows, 64) of bf16, by 128 threads: tiles of 16 rows come by
// cp.async into two buffers, one ahead. out (2, 64): of the first and the last 8 rows of all tiles.
#pragma once
#include "../../../kernels/cuda/ptx.cuh"
#include "bugs.h"

__global__ void __launch_bounds__(128)
    column_sums(float *out, const __nv_bfloat16 *in, int rows, Bug bug) {
    __shared__ __align__(16) __nv_bfloat16 tile[2][16][64];
    const int tiles = (rows + 15) / 16, column = threadIdx.x % 64, half = threadIdx.x / 64;
    auto copy = [&](int i) {
        const int row = threadIdx.x / 8, chunk = threadIdx.x % 8, from = i * 16 + row;
        const bool inside = from < rows || bug == COPIES_NO_ROW_GUARD;
        if (i < tiles)
            cp_async16(smem_u32(&tile[i % 2][row][chunk * 8]),
                       in + (inside ? from : 0) * 64 + chunk * 8, inside);
        cp_async_commit();
    };
    float sum = 0;
    copy(0);
    for (int i = 0; i < tiles; i++) {
        copy(i + 1);
        if (bug == COPIES_WAIT_TOO_LITTLE)
            cp_async_wait<2>();
        else
            cp_async_wait<1>();
        if (bug != COPIES_NO_BARRIER) __syncthreads();
        for (int r = 0; r < 8; r++) sum += __bfloat162float(tile[i % 2][half * 8 + r][column]);
        if (bug != COPIES_EARLY_REFILL) __syncthreads();
    }
    cp_async_wait<0>();
    out[threadIdx.x] = sum;
}
