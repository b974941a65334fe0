// Over all gradients: their sum of squares, the clip factor, and adding them up. Each block sums
// what it meets in steps of the grid, one more block adds the blocks' sums: the order depends on n
// alone.

#include "common.cuh"

enum { BLOCK = 256, MAX_BLOCKS = 1024 };

// Sum over the block, valid in thread 0
__device__ __forceinline__ double block_sum(double s) {
    __shared__ double warps[BLOCK / WARP];
    s = warp_sum(s);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = s;
    __syncthreads();  // all warps have written before thread 0 adds
    if (threadIdx.x == 0)
        for (int w = 1; w < BLOCK / WARP; w++) s += warps[w];
    return s;
}

__device__ __forceinline__ double square(float x) { return (double)x * (double)x; }

__global__ void squares_kernel(double *partial, const real *__restrict__ x, size_t n) {
    const size_t thread = (size_t)blockIdx.x * BLOCK + threadIdx.x,
                 step = (size_t)gridDim.x * BLOCK;
    const float4 *vectors = reinterpret_cast<const float4 *>(x);
    double s = 0;
#pragma unroll 4
    for (size_t i = thread; i < n / 4; i += step) {
        const float4 v = vectors[i];
        s += (square(v.x) + square(v.y)) + (square(v.z) + square(v.w));
    }
    if (thread < n % 4) s += square(x[n / 4 * 4 + thread]);
    s = block_sum(s);
    if (threadIdx.x == 0) partial[blockIdx.x] = s;
}

__global__ void add_partial_kernel(double *sum, const double *__restrict__ partial,
                                   int num_partial) {
    double s = 0;
    for (int i = (int)threadIdx.x; i < num_partial; i += BLOCK) s += partial[i];
    s = block_sum(s);
    if (threadIdx.x == 0) *sum += s;
}

void global_norm_squared(double *sum, const real *x, size_t n) {
    if (n == 0) return;
    if ((uintptr_t)x % 16 != 0)
        cuda_unsupported("global_norm_squared: expected 16-byte alignment", (int64_t)(uintptr_t)x);
    const size_t wanted = ceil_div<size_t>(n, 4 * 4 * BLOCK);
    const unsigned blocks = wanted < MAX_BLOCKS ? (unsigned)wanted : (unsigned)MAX_BLOCKS;
    double *partial = (double *)cuda_scratch();
    squares_kernel<<<blocks, BLOCK, 0, cuda_stream()>>>(partial, x, n);
    LAUNCH_CHECK("squares_kernel");
    add_partial_kernel<<<1, BLOCK, 0, cuda_stream()>>>(sum, partial, (int)blocks);
    LAUNCH_CHECK("add_partial_kernel");
}

__global__ void clip_scale_kernel(StepScalars *step, float max_norm) {
    const double norm = sqrt(step->norm_squared), max = (double)max_norm;
    float scale = max > 0 && norm > max ? (float)(max / norm) : 1.0f;
    const int too_large = norm * (double)scale > MAX_UPDATE_NORM;
    if (!isfinite(norm) || !isfinite(step->loss_sum) || too_large) scale = 0;
    step->grad_norm = (float)norm;
    step->scale = scale;
}

void clip_scale(StepScalars *step, float max_norm) {
    clip_scale_kernel<<<1, 1, 0, cuda_stream()>>>(step, max_norm);
    LAUNCH_CHECK("clip_scale_kernel");
}

__global__ void grads_add_kernel(real *__restrict__ sum, const real *__restrict__ x, size_t n) {
    const size_t step = (size_t)gridDim.x * BLOCK;
    for (size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x; i < n; i += step) sum[i] += x[i];
}

void grads_add(real *sum, const real *x, size_t n) {
    if (n == 0) return;
    const size_t wanted = ceil_div<size_t>(n, 4 * BLOCK), most = 8 * (size_t)cuda_num_sms();
    const unsigned blocks = (unsigned)(wanted < most ? wanted : most);
    grads_add_kernel<<<blocks, BLOCK, 0, cuda_stream()>>>(sum, x, n);
    LAUNCH_CHECK("grads_add_kernel");
}
