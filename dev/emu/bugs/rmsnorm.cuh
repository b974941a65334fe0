// RMSNorm forward, one block of 256 threads per token: block reduction and 16-byte loads.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "bugs.h"

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lane);
    return v;
}

__device__ __forceinline__ float block_sum(float v, Bug bug) {
    __shared__ float part[32];
    __shared__ float total;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = (blockDim.x + 31) >> 5;
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    if (bug != RMSNORM_NO_BARRIER) __syncthreads();
    if (warp == 0) {
        float x = warp_sum(lane < num_warps ? part[lane] : 0.0f);
        if (lane == 0) total = x;
    }
    if (bug != RMSNORM_DIVERGENT_BARRIER || warp) __syncthreads();
    return total;
}

__global__ void __launch_bounds__(256) rmsnorm(__nv_bfloat16 *out, const __nv_bfloat16 *x,
                                               const __nv_bfloat16 *weight, int C, Bug bug) {
    const __nv_bfloat16 *row = x + (size_t)blockIdx.x * C;
    float s = 0.0f;
    int vectors = C / 8 + (bug == RMSNORM_READS_PAST_ROW);
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        uint4 v = *(const uint4 *)(row + i * 8);
        const __nv_bfloat162 *pair = (const __nv_bfloat162 *)&v;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 f = __bfloat1622float2(pair[k]);
            s += f.x * f.x + f.y * f.y;
        }
    }
    float rstd = rsqrtf(block_sum(s, bug) / C + 1e-5f);
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        out[(size_t)blockIdx.x * C + i] =
            __float2bfloat16(__bfloat162float(row[i]) * rstd * __bfloat162float(weight[i]));
}
