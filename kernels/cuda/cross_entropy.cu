// Cross-entropy over a chunk of tokens, one block per row. A first pass keeps a running maximum and
// the sum of exp(x - maximum) (arXiv 1805.02867); a second turns the logits into their gradient in
// place, reading them from L2. A row is walked in vectors, its last few logits one by one.

#include "common.cuh"

#include <float.h>

enum { MAX_WARPS = 32 };

struct SoftmaxSum {
    float max, sum;  // sum of exp(x - max)
};

// exp(-FLT_MAX - x) is 0, with no infinity minus infinity on the way; a NaN logit makes sum NaN.
__device__ __forceinline__ SoftmaxSum merge(SoftmaxSum a, float max, float sum) {
    const float both = fmaxf(a.max, max);
    return {both, a.sum * __expf(a.max - both) + sum * __expf(max - both)};
}

template <int N>
__device__ __forceinline__ void add_logits(SoftmaxSum *s, const float (&x)[N]) {
    float max = x[0];
    unrolled_for (int i = 1; i < N; i++) max = fmaxf(max, x[i]);
    if (max > s->max) {
        s->sum *= __expf(s->max - max);
        s->max = max;
    }
    unrolled_for (int i = 0; i < N; i++) s->sum += __expf(x[i] - s->max);
}

__device__ __forceinline__ SoftmaxSum thread_sum(const floatX *x, int64_t V) {
    SoftmaxSum s = {-FLT_MAX, 0};
    const int64_t tail = V / 8 * 8;
#pragma unroll 4
    for (int64_t v = 8 * threadIdx.x; v < tail; v += 8 * blockDim.x) {
        float a[8];
        load8(a, x + v);
        add_logits(&s, a);
    }
    if (tail + threadIdx.x < V) add_logits(&s, {(float)x[tail + threadIdx.x]});
    return s;
}

// Lane 0 gets the sum of the warp; the others' may differ in a bit, as merge is contracted to FMA.
__device__ __forceinline__ SoftmaxSum warp_merge(SoftmaxSum s) {
    unrolled_for (int lane = WARP / 2; lane > 0; lane /= 2) {
        const float max = __shfl_xor_sync(0xffffffffu, s.max, lane);
        const float sum = __shfl_xor_sync(0xffffffffu, s.sum, lane);
        s = merge(s, max, sum);
    }
    return s;
}

// Maximum and sum of the whole row, the same bits in every thread. One warp merges all warps'
// values: if every thread did, each would compute two exponentials per warp.
__device__ __forceinline__ SoftmaxSum block_sum(SoftmaxSum s, SoftmaxSum *warps) {
    s = warp_merge(s);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = s;
    __syncthreads();  // all warps have written before the first one merges
    if (threadIdx.x < WARP) {
        s = {-FLT_MAX, 0};
        if (threadIdx.x < blockDim.x / WARP) s = warps[threadIdx.x];
        s = warp_merge(s);
        if (threadIdx.x == 0) warps[0] = s;
    }
    __syncthreads();  // the first warp has written before any thread reads
    return warps[0];
}

// x[v] = value(v, x[v]) along the row, and 0 from V to Vp
template <class F>
__device__ __forceinline__ void map_row(floatX *x, int V, int Vp, F value) {
    const int64_t tail = V / 8 * 8;
#pragma unroll 4
    for (int64_t v = 8 * threadIdx.x; v < tail; v += 8 * blockDim.x) {
        float a[8];
        load8(a, x + v);
        unrolled_for (int i = 0; i < 8; i++) a[i] = value(v + i, a[i]);
        store8(x + v, a);
    }
    const int64_t v = tail + threadIdx.x;
    if (v < Vp) x[v] = (floatX)(v < V ? value(v, (float)x[v]) : 0.0f);
}

template <bool GRADIENT>
__global__ void __launch_bounds__(MAX_WARPS *WARP)
    cross_entropy_kernel(real *losses, floatX *logits, const int32_t *targets, const float *weights,
                         const float *loss_scale, int64_t V, int64_t Vp) {
    __shared__ SoftmaxSum warps[MAX_WARPS];
    const int64_t t = blockIdx.x;
    const int32_t target = targets[t];
    floatX *x = logits + t * Vp;  // (Vp)
    if (target < 0) {
        if (threadIdx.x == 0) losses[t] = 0;
        if (GRADIENT) map_row(x, V, Vp, [](int64_t, float) { return 0.0f; });
        return;
    }
    const float target_logit = (float)x[target];
    // The barrier inside also keeps a thread from writing a gradient over target_logit or another
    // thread's logits before they are read.
    const SoftmaxSum s = block_sum(thread_sum(x, V), warps);
    if (threadIdx.x == 0) losses[t] = logf(s.sum) + (s.max - target_logit);
    if (!GRADIENT) return;
    const float one = weights ? *loss_scale * weights[t] : *loss_scale, scale = one / s.sum;
    map_row(x, V, Vp, [=](int64_t v, float a) {
        return __expf(a - s.max) * scale - (v == target ? one : 0.0f);
    });
}

// About 8 vectors per thread; depends only on V, so that a row's bits do too.
static unsigned threads_for(int64_t V) {
    unsigned threads = 2 * WARP;
    while (threads < MAX_WARPS * WARP && 64 * (int64_t)threads < V) threads *= 2;
    return threads;
}

// The logits are only read here: one kernel text serves both calls.
void cross_entropy_forward(real *losses, const floatX *logits, const int32_t *targets, int64_t T,
                           int64_t V) {
    if (T == 0) return;
    cross_entropy_kernel<false><<<(unsigned)T, threads_for(V), 0, cuda_stream()>>>(
        losses, const_cast<floatX *>(logits), targets, (const float *)nullptr,
        (const float *)nullptr, V, padded_vocab(V));
    LAUNCH_CHECK("cross_entropy_kernel");
}

void cross_entropy_forward_backward(real *losses, floatX *logits, const int32_t *targets,
                                    const float *weights, const real *loss_scale, int64_t T,
                                    int64_t V) {
    if (T == 0) return;
    cross_entropy_kernel<true><<<(unsigned)T, threads_for(V), 0, cuda_stream()>>>(
        losses, logits, targets, weights, loss_scale, V, padded_vocab(V));
    LAUNCH_CHECK("cross_entropy_kernel");
}
