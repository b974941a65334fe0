// AdamW with decoupled weight decay, one pass over memory: 28 bytes read and written for each of
// 4 weights a thread. The fp32 master is put together from its two halves (common.cuh) and taken
// apart again, so that the stored bf16 is always the master rounded.

#include "common.cuh"

enum { BLOCK = 256 };

struct Coefficients {
    float lr, beta1, beta2, eps, decay, correct1, correct2;
};

__device__ __forceinline__ float update(float w, float *m, float *v, float g,
                                        const Coefficients &k) {
    *m = k.beta1 * *m + (1 - k.beta1) * g;
    *v = k.beta2 * *v + (1 - k.beta2) * g * g;
    return w * k.decay - k.lr * (*m * k.correct1) / (sqrtf(*v * k.correct2) + k.eps);
}

struct alignas(8) Halves {  // of four weights
    uint16_t x[4];
};

__device__ __forceinline__ void update4(floatX *weights, uint16_t *master_lo, real *m, real *v,
                                        const real *grads, float scale, const Coefficients &k) {
    Halves hi = *reinterpret_cast<Halves *>(weights), lo = *reinterpret_cast<Halves *>(master_lo);
    float4 m4 = *reinterpret_cast<float4 *>(m), v4 = *reinterpret_cast<float4 *>(v);
    const float4 g4 = *reinterpret_cast<const float4 *>(grads);
    float ms[4] = {m4.x, m4.y, m4.z, m4.w}, vs[4] = {v4.x, v4.y, v4.z, v4.w};
    const float gs[4] = {g4.x, g4.y, g4.z, g4.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float w = update(master_join(hi.x[i], lo.x[i]), &ms[i], &vs[i], gs[i] * scale, k);
        master_split(w, &hi.x[i], &lo.x[i]);
    }
    *reinterpret_cast<Halves *>(weights) = hi;
    *reinterpret_cast<Halves *>(master_lo) = lo;
    *reinterpret_cast<float4 *>(m) = make_float4(ms[0], ms[1], ms[2], ms[3]);
    *reinterpret_cast<float4 *>(v) = make_float4(vs[0], vs[1], vs[2], vs[3]);
}

__global__ void __launch_bounds__(BLOCK)
    adamw_kernel(floatX *weights, uint16_t *master_lo, real *m, real *v, const real *grads,
                 const StepScalars *step, Coefficients k, size_t n) {
    const float scale = step->scale;
    if (scale == 0) return;  // a non-finite step changes nothing
    const size_t i = 4 * ((size_t)blockIdx.x * BLOCK + threadIdx.x);
    if (i + 4 <= n) {
        update4(weights + i, master_lo + i, m + i, v + i, grads + i, scale, k);
        return;
    }
    uint16_t *halves = reinterpret_cast<uint16_t *>(weights);
    for (size_t j = i; j < n; j++) {
        const float w = master_join(halves[j], master_lo[j]);
        master_split(update(w, &m[j], &v[j], grads[j] * scale, k), &halves[j], &master_lo[j]);
    }
}

void adamw_update(floatX *weights, uint16_t *master_lo, real *m, real *v, const real *grads,
                  const StepScalars *step, AdamW hyper, size_t n) {
    if (n == 0) return;
    const uintptr_t wide = (uintptr_t)m | (uintptr_t)v | (uintptr_t)grads;
    const uintptr_t narrow = (uintptr_t)weights | (uintptr_t)master_lo;
    if (wide % 16 != 0 || narrow % 8 != 0)
        cuda_unsupported("adamw_update: expected 16-byte alignment", (int64_t)(wide | narrow));
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
    adamw_kernel<<<blocks, BLOCK, 0, cuda_stream()>>>(weights, master_lo, m, v, grads, step, k, n);
    LAUNCH_CHECK("adamw_kernel");
}
