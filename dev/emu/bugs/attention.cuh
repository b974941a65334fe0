// Causal attention forward over packed documents: mma.sync, ldmatrix, cp.async in two stages,
// head_dim 64, tiles of 64 x 64, 128 threads. q (T, H, 64), k and v (T, Hkv, 64), out (T, H, 64),
// lse (H, T); document i is rows cu[i] .. cu[i + 1].
#pragma once
#include <math.h>

#include "../../../kernels/cuda/ptx.cuh"
#include "bugs.h"

constexpr int HEAD = 64, TILE = 64, TILE_BYTES = TILE * HEAD * 2;
constexpr int ATTENTION_SMEM = 5 * TILE_BYTES;  // Q, two stages of K, two of V

// 16-byte chunk of a row, swizzled so that ldmatrix has no bank conflicts
__device__ __forceinline__ uint32_t tile_at(int row, int chunk) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void load_tile(uint32_t dst, const __nv_bfloat16 *src, int stride,
                                          int rows, Bug bug) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int id = threadIdx.x + i * 128, row = id >> 3, chunk = id & 7;
        bool inside = bug == ATTENTION_NO_ROW_GUARD || row < rows;
        cp_async16(dst + tile_at(row, chunk), src + (size_t)(inside ? row : 0) * stride + chunk * 8,
                   inside);
    }
}

// s (16, 64) += q k^T for one warp: two 8-wide blocks of keys per ldmatrix
__device__ __forceinline__ void scores(float (&s)[8][4], const uint32_t (&q)[4][4], uint32_t k) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 0; d < 4; d++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, k + tile_at(n * 16 + (lane & 7) + ((lane >> 4) << 3),
                                       d * 2 + ((lane >> 3) & 1)));
            mma_16816(s[n * 2], q[d], b[0], b[1]);
            mma_16816(s[n * 2 + 1], q[d], b[2], b[3]);
        }
}

// acc (16, 64) += p v for one warp
__device__ __forceinline__ void weighted_values(float (&acc)[8][4], const float (&p)[8][4],
                                                uint32_t v) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t a[4] = {pack_bf16(p[k * 2][0], p[k * 2][1]), pack_bf16(p[k * 2][2], p[k * 2][3]),
                         pack_bf16(p[k * 2 + 1][0], p[k * 2 + 1][1]),
                         pack_bf16(p[k * 2 + 1][2], p[k * 2 + 1][3])};
#pragma unroll
        for (int d = 0; d < 4; d++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, v + tile_at(k * 16 + (lane & 15), d * 2 + (lane >> 4)));
            mma_16816(acc[d * 2], a, b[0], b[1]);
            mma_16816(acc[d * 2 + 1], a, b[2], b[3]);
        }
    }
}

// Online softmax of one tile; a thread holds two rows, i = 0 and 1
__device__ __forceinline__ void softmax_tile(float (&s)[8][4], float (&acc)[8][4], float (&max)[2],
                                             float (&sum)[2], float scale) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float m = max[i];
#pragma unroll
        for (int n = 0; n < 8; n++) m = fmaxf(m, fmaxf(s[n][i * 2], s[n][i * 2 + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        float shift = m == -INFINITY ? 0.0f : m * scale, fade = ex2(max[i] * scale - shift);
        float tile_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = i * 2; e < i * 2 + 2; e++) {
                s[n][e] = ex2(s[n][e] * scale - shift);
                tile_sum += s[n][e];
                acc[n][e] *= fade;
            }
        sum[i] = sum[i] * fade + tile_sum;
        max[i] = m;
    }
}

__global__ void __launch_bounds__(128)
    attention(__nv_bfloat16 *out, float *lse, const __nv_bfloat16 *q, const __nv_bfloat16 *k,
              const __nv_bfloat16 *v, const int *cu, int T, int H, int Hkv, Bug bug) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const float softmax_scale = 0.125f, scale = softmax_scale * 1.44269504f;
    int doc = blockIdx.z, head = blockIdx.y, kv_head = head / (H / Hkv);
    int begin = cu[doc], len = cu[doc + 1] - begin, first = blockIdx.x * TILE;
    if (first >= len) return;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, col0 = (lane & 3) * 2;
    uint32_t sq = smem_u32(smem), sk = sq + TILE_BYTES, sv = sk + 2 * TILE_BYTES;
    k += ((size_t)begin * Hkv + kv_head) * HEAD;
    v += ((size_t)begin * Hkv + kv_head) * HEAD;
    load_tile(sq, q + ((size_t)(begin + first) * H + head) * HEAD, H * HEAD, len - first, bug);
    load_tile(sk, k, Hkv * HEAD, len, bug);
    load_tile(sv, v, Hkv * HEAD, len, bug);
    cp_async_commit();

    float acc[8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    uint32_t q_fragment[4][4];
    int tiles = min((len + TILE - 1) / TILE, (int)blockIdx.x + 1);
    for (int j = 0; j < tiles; j++) {
        int stage = j & 1;
        if (bug != ATTENTION_EARLY_REFILL && j) __syncthreads();
        if (j + 1 < tiles) {
            size_t next = (size_t)(j + 1) * TILE * Hkv * HEAD;
            int rows = len - (j + 1) * TILE;
            load_tile(sk + (stage ^ 1) * TILE_BYTES, k + next, Hkv * HEAD, rows, bug);
            load_tile(sv + (stage ^ 1) * TILE_BYTES, v + next, Hkv * HEAD, rows, bug);
        }
        cp_async_commit();
        if (bug == ATTENTION_WAITS_TOO_LITTLE)
            cp_async_wait<2>();
        else
            cp_async_wait<1>();
        if (bug != ATTENTION_NO_BARRIER) __syncthreads();
        if (j == 0)
#pragma unroll
            for (int d = 0; d < 4; d++)
                ldmatrix_x4(q_fragment[d],
                            sq + tile_at(warp * 16 + (lane & 15), d * 2 + (lane >> 4)));
        float s[8][4] = {};
        scores(s, q_fragment, sk + stage * TILE_BYTES);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int col = j * TILE + n * 8 + col0 + (e & 1);
                int row = first + warp * 16 + group + (e >> 1) * 8;
                if (col > row || col >= len) s[n][e] = -INFINITY;
            }
        softmax_tile(s, acc, max, sum, scale);
        weighted_values(acc, s, sv + stage * TILE_BYTES);
    }
    cp_async_wait<0>();

#pragma unroll
    for (int i = 0; i < 2; i++) {
        float total = sum[i];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        int row = first + warp * 16 + group + i * 8;
        if (row >= len) continue;
        uint32_t *to = (uint32_t *)(out + ((size_t)(begin + row) * H + head) * HEAD + col0);
#pragma unroll
        for (int n = 0; n < 8; n++)
            to[n * 4] = pack_bf16(acc[n][i * 2] / total, acc[n][i * 2 + 1] / total);
        if ((lane & 3) == 0)
            lse[(size_t)head * T + begin + row] = max[i] * softmax_scale + logf(total);
    }
}
