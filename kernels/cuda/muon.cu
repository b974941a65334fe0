// Muon's element-wise operations, one element per thread; muon.h combines them with matmuls.

#include "common.cuh"

enum { BLOCK = 256 };

static unsigned blocks_of(size_t n) { return (unsigned)ceil_div<size_t>(n, BLOCK); }

__device__ __forceinline__ size_t element() { return (size_t)blockIdx.x * BLOCK + threadIdx.x; }

__global__ void muon_momentum_kernel(real *grads, real *momentum, const StepScalars *step,
                                     float beta, size_t n) {
    const size_t i = element();
    if (i >= n || step->scale == 0) return;  // a non-finite step changes nothing
    const float g = (1 - beta) * (grads[i] * step->scale), m = beta * momentum[i] + g;
    momentum[i] = m;
    grads[i] = beta * m + g;
}

void muon_momentum(real *grads, real *momentum, const StepScalars *step, float beta, size_t n) {
    if (n == 0) return;
    muon_momentum_kernel<<<blocks_of(n), BLOCK, 0, cuda_stream()>>>(grads, momentum, step, beta, n);
    LAUNCH_CHECK("muon_momentum_kernel");
}

__global__ void muon_normalise_kernel(floatX *__restrict__ out, const real *__restrict__ x,
                                      const double *norm_squared, size_t n) {
    const size_t i = element();
    if (i >= n) return;
    const float scale =
        norm_squared ? 1 / fmaxf(sqrtf((float)*norm_squared), (float)MUON_EPS) : 1.0f;
    out[i] = __float2bfloat16_rn(x[i] * scale);
}

void muon_normalise(floatX *out, const real *x, const double *norm_squared, size_t n) {
    if (n == 0) return;
    muon_normalise_kernel<<<blocks_of(n), BLOCK, 0, cuda_stream()>>>(out, x, norm_squared, n);
    LAUNCH_CHECK("muon_normalise_kernel");
}

__global__ void muon_polynomial_kernel(floatX *__restrict__ out, const floatX *__restrict__ gram,
                                       const real *__restrict__ square, size_t n) {
    const size_t i = element();
    if (i >= n * n) return;
    const float x = MUON_B * __bfloat162float(gram[i]) + MUON_C * square[i];
    out[i] = __float2bfloat16_rn(i % (n + 1) == 0 ? MUON_A + x : x);
}

void muon_polynomial(floatX *out, const floatX *gram, const real *square, int64_t n) {
    const size_t side = (size_t)n;
    if (n == 0) return;
    const unsigned blocks = blocks_of(side * side);
    muon_polynomial_kernel<<<blocks, BLOCK, 0, cuda_stream()>>>(out, gram, square, side);
    LAUNCH_CHECK("muon_polynomial_kernel");
}

__global__ void muon_apply_kernel(uint16_t *weights, uint16_t *master_lo,
                                  const floatX *__restrict__ x, const StepScalars *step, float lr,
                                  float keep, size_t n) {
    const size_t i = element();
    if (i >= n || step->scale == 0) return;
    const float w = master_join(weights[i], master_lo[i]);
    master_split(w * keep - lr * __bfloat162float(x[i]), &weights[i], &master_lo[i]);
}

void muon_apply(floatX *weights, uint16_t *master_lo, const floatX *x, const StepScalars *step,
                float lr, float keep, size_t n) {
    if (n == 0) return;
    muon_apply_kernel<<<blocks_of(n), BLOCK, 0, cuda_stream()>>>((uint16_t *)weights, master_lo, x,
                                                                 step, lr, keep, n);
    LAUNCH_CHECK("muon_apply_kernel");
}
