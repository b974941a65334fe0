// NF4. Memory-bound: a thread reads 8 codes as one word and writes 8 numbers as one vector. The
// levels are in shared memory, in 16 banks: lanes that read different ones do not wait.

#include "../nf4.h"
#include "common.cuh"

enum { BLOCK = 256, NUM_LEVELS = 16 };

__global__ void nf4_dequantize_kernel(floatX *__restrict__ out, const uint32_t *__restrict__ codes,
                                      const float *__restrict__ absmax, size_t n) {
    const float levels[NUM_LEVELS] = {NF4_LEVELS};
    __shared__ float level[NUM_LEVELS];
    unrolled_for (int k = 0; k < NUM_LEVELS; k++)
        if (threadIdx.x == 0) level[k] = levels[k];
    __syncthreads();  // all levels are there before any is read
    const size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x;
    if (8 * i >= n) return;
    const uint32_t word = codes[i];
    const float scale = absmax[8 * i / NF4_BLOCK];
    float x[8];
    unrolled_for (int k = 0; k < 8; k++)  // of each byte the high bits first
        x[k] = level[word >> (8 * (k / 2) + 4 - 4 * (k % 2)) & 15] * scale;
    store8(out + 8 * i, x);
}

void nf4_dequantize(floatX *out, const uint8_t *codes, const float *absmax, size_t n) {
    if (n == 0) return;
    if (n % NF4_BLOCK != 0) cuda_unsupported("nf4_dequantize", "whole blocks", (int64_t)n);
    nf4_dequantize_kernel<<<(unsigned)ceil_div<size_t>(n, 8 * BLOCK), BLOCK, 0, cuda_stream()>>>(
        out, (const uint32_t *)codes, absmax, n);
    LAUNCH_CHECK("nf4_dequantize_kernel");
}
