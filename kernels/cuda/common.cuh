// What every CUDA kernel file shares: the stream, checked launches, reductions, 16-byte vectors.
#ifndef UNPAD_CUDA_COMMON_CUH
#define UNPAD_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels.h"

// The one stream that all work is put on (device.cu).
cudaStream_t cuda_stream();

// Ends the program with exit code 11 (device error): one error line, one hint line.
[[noreturn]] void cuda_fail(const char *file, int line, const char *what, cudaError_t status);
[[noreturn]] void cuda_unsupported(const char *what, int64_t found);

#define CUDA_CHECK(call_)                                                           \
    do {                                                                            \
        cudaError_t status_ = (call_);                                              \
        if (status_ != cudaSuccess) cuda_fail(__FILE__, __LINE__, #call_, status_); \
    } while (0)

// After every launch: a bad configuration is reported here, with the kernel's name; a fault inside
// a kernel at the next call that waits.
#define LAUNCH_CHECK(kernel_)                                                        \
    do {                                                                             \
        cudaError_t status_ = cudaGetLastError();                                    \
        if (status_ != cudaSuccess) cuda_fail(__FILE__, __LINE__, kernel_, status_); \
    } while (0)

enum { WARP = 32 };

template <class I>
__host__ __device__ constexpr I ceil_div(I a, I b) {
    return (a + b - 1) / b;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = WARP / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = WARP / 2; lane > 0; lane /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// Eight bf16 values: one 16-byte load or store. The address must be 16-byte aligned.
struct alignas(16) Bf16x8 {
    __nv_bfloat162 pair[4];
};

__device__ __forceinline__ void load8(float (&x)[8], const __nv_bfloat16 *p) {
    const Bf16x8 v = *reinterpret_cast<const Bf16x8 *>(p);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 f = __bfloat1622float2(v.pair[i]);
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
    }
}

__device__ __forceinline__ void store8(__nv_bfloat16 *p, const float (&x)[8]) {
    Bf16x8 v;
#pragma unroll
    for (int i = 0; i < 4; i++) v.pair[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    *reinterpret_cast<Bf16x8 *>(p) = v;
}

#endif
