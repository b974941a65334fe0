// C (M, N) = A (M, K) B^T with B (N, K): TMA loads, a ring of three stages, one producer and two
// consumer warpgroups, wgmma, TMA store. bf16 in and out, fp32 accumulation, sm_90a.
#pragma once
#include "../../../kernels/cuda/ptx.cuh"
#include "bugs.h"

constexpr int GM = 128, GN = 128, GK = 64, STAGES = 3;
constexpr int A_BYTES = GM * GK * 2, STAGE_BYTES = A_BYTES + GN * GK * 2;
constexpr int PANEL = 64 * 128;  // 64 rows of 128 bytes: one swizzled tile of 64 x 64
constexpr int GEMM_SMEM = STAGES * STAGE_BYTES + GM * GN * 2;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void produce(uint32_t s0, uint64_t *full, uint64_t *empty,
                                        const CUtensorMap *map_a, const CUtensorMap *map_b, int m0,
                                        int n0, int tiles, Bug bug) {
    for (int i = 0; i < tiles; i++) {
        int stage = i % STAGES, phase = i / STAGES & 1;
        if (bug != GEMM_IGNORES_EMPTY) mbar_wait(smem_u32(&empty[stage]), phase ^ 1);
        uint32_t bar = smem_u32(&full[stage]), a = s0 + stage * STAGE_BYTES;
        mbar_arrive_expect_tx(bar, STAGE_BYTES + (bug == GEMM_WRONG_BYTE_COUNT ? 16 : 0));
        tma_load_3d(a, map_a, bar, i * GK, m0, 0);
        tma_load_3d(a + A_BYTES, map_b, bar, i * GK, n0, 0);
    }
}

// One warpgroup, 64 rows. Every warp releases the stage: wgmma may complete warp by warp.
__device__ __forceinline__ void consume(float (&d)[64], uint32_t s0, uint64_t *full,
                                        uint64_t *empty, int warpgroup, int tiles, Bug bug) {
    int thread = threadIdx.x & 127;
    for (int i = 0; i < tiles; i++) {
        int stage = i % STAGES, phase = i / STAGES & 1;
        mbar_wait(smem_u32(&full[stage]), phase);
        uint32_t a = s0 + stage * STAGE_BYTES + warpgroup * PANEL;
        uint32_t b = s0 + stage * STAGE_BYTES + A_BYTES;
        wgmma_pin(d);
        if (bug != GEMM_NO_WGMMA_FENCE) wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_ss<0, 0>(d, wgmma_desc_sw128(a + k * 32, 16, 1024),
                           wgmma_desc_sw128(b + k * 32, 16, 1024), i | k);
        wgmma_commit();
        if (bug != GEMM_EARLY_RELEASE) wgmma_wait<0>();
        wgmma_pin(d);
        bool releases = bug == GEMM_ONE_ARRIVAL_PER_GROUP ? thread == 0 : (thread & 31) == 0;
        if (releases) mbar_arrive(smem_u32(&empty[stage]));
    }
    if (bug == GEMM_EARLY_RELEASE) wgmma_wait<0>();
}

// Two 64 x 64 panels of bf16 in shared memory, swizzled as the TMA store expects them
__device__ __forceinline__ void store_panels(const float (&d)[64], unsigned char *panels,
                                             const CUtensorMap *map_c, int warpgroup, int m0,
                                             int n0, Bug bug) {
    int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = warp * 16 + (lane >> 2) + i * 8, chunk = (j & 7) ^ (row & 7);
            uint32_t at = (j >> 3) * PANEL + row * 128 + (chunk << 4) + (lane & 3) * 4;
            *(__nv_bfloat162 *)(panels + at) =
                __floats2bfloat162_rn(d[j * 4 + i * 2], d[j * 4 + i * 2 + 1]);
        }
    if (bug == GEMM_ONE_PROXY_FENCE) __syncwarp();
    if (bug != GEMM_NO_PROXY_FENCE && (bug != GEMM_ONE_PROXY_FENCE || lane == 0))
        fence_proxy_async();
    named_bar_sync(1 + warpgroup, 128);
    if (thread == 0) {
        tma_store_3d(map_c, smem_u32(panels), n0, m0 + warpgroup * 64, 0);
        tma_store_3d(map_c, smem_u32(panels) + PANEL, n0 + 64, m0 + warpgroup * 64, 0);
        bulk_commit();
        if (bug != GEMM_EXITS_EARLY) bulk_wait_read<0>();
    }
}
#endif

__global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
         const __grid_constant__ CUtensorMap map_c, int K, Bug bug) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
    uint32_t s0 = smem_u32(smem);
    int warpgroup = threadIdx.x >> 7, m0 = blockIdx.y * GM, n0 = blockIdx.x * GN;
    int tiles = (K + GK - 1) / GK;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(smem_u32(&full[i]), 1);
            mbar_init(smem_u32(&empty[i]), bug == GEMM_ONE_ARRIVAL_PER_GROUP ? 2 : 8);
        }
        if (bug != GEMM_NO_INIT_FENCE) fence_mbar_init();
    }
    __syncthreads();
    if (warpgroup == 2) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 256) produce(s0, full, empty, &map_a, &map_b, m0, n0, tiles, bug);
    } else {
        if (bug == GEMM_TOO_MANY_REGISTERS)
            setmaxnreg_inc<240>();
        else
            setmaxnreg_inc<232>();
        float d[64];
        consume(d, s0, full, empty, warpgroup, tiles, bug);
        store_panels(d, smem + STAGES * STAGE_BYTES + warpgroup * 2 * PANEL, &map_c, warpgroup, m0,
                     n0, bug);
    }
#endif
}
