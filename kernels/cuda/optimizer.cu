// Operations on all gradients: sum of squares, clip factor, accumulation, and AdamW. Each block
// sums the squares it meets in a grid-stride loop, and one more block adds the blocks' sums: the
// order depends only on n. That block also sums the losses of a micro-batch, and of each document.

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

__global__ void squares_kernel(double *partial, const real *__restrict__ x, size_t n,
                               size_t stride) {
    const size_t thread = (size_t)blockIdx.x * BLOCK + threadIdx.x,
                 step = (size_t)gridDim.x * BLOCK;
    x += blockIdx.y * stride;
    const float4 *vectors = reinterpret_cast<const float4 *>(x);
    double s = 0;
#pragma unroll 4
    for (size_t i = thread; i < n / 4; i += step) {
        const float4 v = vectors[i];
        s += (square(v.x) + square(v.y)) + (square(v.z) + square(v.w));
    }
    if (thread < n % 4) s += square(x[n / 4 * 4 + thread]);
    s = block_sum(s);
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = s;
}

// A block for each sum: a few hundred kilobytes at most. weights (n), NULL: all 1
template <class R>
__global__ void add_all_kernel(double *sum, const R *__restrict__ x, const float *weights,
                               int64_t n) {
    double s = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < n; i += BLOCK)
        s += (double)x[blockIdx.x * n + i] * (weights ? (double)weights[i] : 1);
    s = block_sum(s);
    if (threadIdx.x == 0) sum[blockIdx.x] += s;
}

void losses_sum(double *sum, const real *losses, const float *weights, int64_t T) {
    if (T == 0) return;
    add_all_kernel<real><<<1, BLOCK, 0, cuda_stream()>>>(sum, losses, weights, T);
    LAUNCH_CHECK("add_all_kernel");
}

// A block for each document
__global__ void losses_by_document_kernel(double *sums, const real *__restrict__ losses,
                                          const int32_t *runs, const float *weights,
                                          const int32_t *starts) {
    double s = 0;
    for (int32_t k = starts[blockIdx.x]; k < starts[blockIdx.x + 1]; k++) {
        const real *x = losses + runs[2 * k];
        for (int32_t i = threadIdx.x; i < runs[2 * k + 1]; i += BLOCK)
            s += (double)x[i] * (double)weights[k];
    }
    s = block_sum(s);
    if (threadIdx.x == 0) sums[blockIdx.x] = s;
}

void losses_by_document(double *sums, const real *losses, const int32_t *runs, const float *weights,
                        const int32_t *starts, int64_t n) {
    if (n == 0) return;
    losses_by_document_kernel<<<(unsigned)n, BLOCK, 0, cuda_stream()>>>(sums, losses, runs, weights,
                                                                        starts);
    LAUNCH_CHECK("losses_by_document_kernel");
}

// A block for each pair
__global__ void pairs_weigh_kernel(float *weights, real *losses, const double *sums,
                                   const PairTerms *pairs, const int32_t *runs,
                                   const float *run_weights, const int32_t *starts) {
    double factors[2];
    const int64_t pair = blockIdx.x;
    const double loss = pair_loss(&pairs[pair], sums + 2 * pair, factors);
    if (threadIdx.x == 0) losses[pair] = (real)loss;
    for (int doc = 0; doc < 2; doc++) {
        for (int32_t k = starts[2 * pair + doc]; k < starts[2 * pair + doc + 1]; k++)
            for (int32_t i = threadIdx.x; i < runs[2 * k + 1]; i += BLOCK)
                weights[runs[2 * k] + i] +=
                    (float)((doc ? factors[1] : factors[0]) * (double)run_weights[k]);
        __syncthreads();  // the second document adds to rows that both have
    }
}

void pairs_weigh(float *weights, real *losses, const double *sums, const PairTerms *pairs,
                 const int32_t *runs, const float *run_weights, const int32_t *starts, int64_t T,
                 int64_t n) {
    device_zero(weights, (size_t)T * sizeof *weights);
    if (n == 0) return;
    pairs_weigh_kernel<<<(unsigned)n, BLOCK, 0, cuda_stream()>>>(weights, losses, sums, pairs, runs,
                                                                 run_weights, starts);
    LAUNCH_CHECK("pairs_weigh_kernel");
}

void add_squares(double *sums, const real *x, size_t n, int64_t num, size_t stride) {
    const size_t wanted = ceil_div<size_t>(n, 4 * 4 * BLOCK);
    const unsigned blocks = wanted < MAX_BLOCKS ? (unsigned)wanted : (unsigned)MAX_BLOCKS;
    double *partial = (double *)cuda_scratch() + num;
    squares_kernel<<<dim3(blocks, (unsigned)num), BLOCK, 0, cuda_stream()>>>(partial, x, n, stride);
    LAUNCH_CHECK("squares_kernel");
    add_all_kernel<double>
        <<<(unsigned)num, BLOCK, 0, cuda_stream()>>>(sums, partial, nullptr, blocks);
    LAUNCH_CHECK("add_all_kernel");
}

void global_norm_squared(double *sum, const real *x, size_t n) {
    if (n == 0) return;
    if ((uintptr_t)x % 16 != 0)
        cuda_unsupported("global_norm_squared", "16-byte alignment", (int64_t)(uintptr_t)x);
    add_squares(sum, x, n, 1, 0);
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
    const size_t thread = (size_t)blockIdx.x * BLOCK + threadIdx.x,
                 step = (size_t)gridDim.x * BLOCK;
    float4 *sums = reinterpret_cast<float4 *>(sum);
    const float4 *vectors = reinterpret_cast<const float4 *>(x);
    for (size_t i = thread; i < n / 4; i += step) {
        const float4 s = sums[i], v = vectors[i];
        sums[i] = make_float4(s.x + v.x, s.y + v.y, s.z + v.z, s.w + v.w);
    }
    if (thread < n % 4) sum[n / 4 * 4 + thread] += x[n / 4 * 4 + thread];
}

void grads_add(real *sum, const real *x, size_t n) {
    if (n == 0) return;
    const size_t wanted = ceil_div<size_t>(n, 4 * BLOCK), most = 8 * (size_t)cuda_num_sms();
    const unsigned blocks = (unsigned)(wanted < most ? wanted : most);
    grads_add_kernel<<<blocks, BLOCK, 0, cuda_stream()>>>(sum, x, n);
    LAUNCH_CHECK("grads_add_kernel");
}

// ------------------------------------------------------------------------------------------------
// AdamW with decoupled weight decay, one pass over memory: 28 bytes read and written for each of
// 4 weights per thread, 20 with moments in bf16. The fp32 master is joined from its two halves
// (common.cuh) and split again, so that the stored bf16 is always the rounded master.

struct Coefficients {
    float lr, beta1, beta2, eps, decay, correct1, correct2;
};

__device__ __forceinline__ float update(float w, float *m, float *v, float g,
                                        const Coefficients &k) {
    *m = k.beta1 * *m + (1 - k.beta1) * g;
    *v = k.beta2 * *v + (1 - k.beta2) * g * g;
    return w * k.decay - k.lr * (*m * k.correct1) / (sqrtf(*v * k.correct2) + k.eps);
}

// N weights from the first on
template <int N, class M>
__device__ __forceinline__ void update_neighbours(uint16_t *weights, uint16_t *master_lo, M *m,
                                                  M *v, const real *grads, float scale,
                                                  const Coefficients &k, uint64_t counter) {
    Neighbours<uint16_t, N> hi = neighbours<N>(weights), lo = neighbours<N>(master_lo);
    Neighbours<M, N> ms = neighbours<N>(m), vs = neighbours<N>(v);
    const Neighbours<const real, N> gs = neighbours<N>(grads);
    unrolled_for (int i = 0; i < N; i++) {
        float new_m = widen(ms.x[i]), new_v = widen(vs.x[i]);
        float w = update(master_join(hi.x[i], lo.x[i]), &new_m, &new_v, gs.x[i] * scale, k);
        master_split(w, &hi.x[i], &lo.x[i]);
        const uint64_t random = mix64(counter + i);
        narrow(&ms.x[i], new_m, random >> RANDOM_M);
        narrow(&vs.x[i], new_v, random >> RANDOM_V);
    }
    neighbours<N>(weights) = hi;
    neighbours<N>(master_lo) = lo;
    neighbours<N>(m) = ms;
    neighbours<N>(v) = vs;
}

template <class M>
__global__ void __launch_bounds__(BLOCK)
    adamw_kernel(uint16_t *weights, uint16_t *master_lo, M *m, M *v, const real *grads,
                 const StepScalars *step, Coefficients k, uint64_t counter, size_t n) {
    const float scale = step->scale;
    if (scale == 0) return;  // a non-finite step changes nothing
    const size_t i = 4 * ((size_t)blockIdx.x * BLOCK + threadIdx.x);
    if (i + 4 <= n)
        update_neighbours<4>(weights + i, master_lo + i, m + i, v + i, grads + i, scale, k,
                             counter + i);
    else
        for (size_t j = i; j < n; j++)
            update_neighbours<1>(weights + j, master_lo + j, m + j, v + j, grads + j, scale, k,
                                 counter + j);
}

void adamw_update(floatX *weights, uint16_t *master_lo, Moments moments, const real *grads,
                  const StepScalars *step, AdamW hyper, size_t n) {
    if (n == 0) return;
    const uintptr_t kept = (uintptr_t)moments.m | (uintptr_t)moments.v,
                    wide = (uintptr_t)grads | (moments.bf16 ? 2 * kept : kept),
                    narrow = (uintptr_t)weights | (uintptr_t)master_lo;
    if (wide % 16 != 0 || narrow % 8 != 0)
        cuda_unsupported("adamw_update", "16-byte alignment", (int64_t)(wide | narrow));
    Coefficients k = {
        hyper.lr,
        hyper.beta1,
        hyper.beta2,
        hyper.eps,
        1 - hyper.lr * hyper.weight_decay,
        (float)(1 / (1 - pow((double)hyper.beta1, (double)hyper.t))),
        (float)(1 / (1 - pow((double)hyper.beta2, (double)hyper.t))),
    };
    const unsigned blocks = (unsigned)ceil_div<size_t>(n, 4 * BLOCK);
    uint16_t *halves = (uint16_t *)weights;
    if (moments.bf16)
        adamw_kernel<uint16_t><<<blocks, BLOCK, 0, cuda_stream()>>>(
            halves, master_lo, (uint16_t *)moments.m, (uint16_t *)moments.v, grads, step, k,
            moments.counter, n);
    else
        adamw_kernel<real><<<blocks, BLOCK, 0, cuda_stream()>>>(
            halves, master_lo, (real *)moments.m, (real *)moments.v, grads, step, k,
            moments.counter, n);
    LAUNCH_CHECK("adamw_kernel");
}
