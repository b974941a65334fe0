// Muon on all matrices of one shape at once: blockIdx.y is the matrix, and a thread takes
// eight of its elements in accesses of 16 bytes. muon.h composes it. The products add k[1] g and
// k[0] x in their epilogues, in fp32, as torch.optim.Muon does.

#include "common.cuh"

enum { BLOCK = 256, WIDTH = 8 };

static size_t elements(const MuonShape &s) { return (size_t)(s.rows * s.cols); }

static dim3 grid_of(const MuonShape &s) {
    for (const int64_t size : {s.rows, s.cols, (int64_t)s.stride})
        if (size % WIDTH != 0) cuda_unsupported("muon", "multiples of 8", size);
    return dim3((unsigned)ceil_div<size_t>(elements(s), BLOCK * WIDTH), (unsigned)s.num);
}

// This thread's first element of a matrix
__device__ __forceinline__ size_t element() {
    return WIDTH * ((size_t)blockIdx.x * BLOCK + threadIdx.x);
}

template <class M>
__global__ void muon_momentum_kernel(real *grads, M *momentum, const StepScalars *step, float beta,
                                     uint64_t counter, size_t n, size_t stride) {
    const size_t i = element() + blockIdx.y * stride;
    const float scale = step->scale;
    if (element() >= n || scale == 0) return;  // a non-finite step changes nothing
    Neighbours<float, WIDTH> g = neighbours<WIDTH>(grads + i);
    Neighbours<M, WIDTH> m = neighbours<WIDTH>(momentum + i);
    unrolled_for (int k = 0; k < WIDTH; k++) {
        const float x = (1 - beta) * (g.x[k] * scale), sum = beta * widen(m.x[k]) + x;
        g.x[k] = beta * sum + x;
        narrow(&m.x[k], sum, mix64(counter + i + k) >> RANDOM_M);
    }
    neighbours<WIDTH>(momentum + i) = m;
    neighbours<WIDTH>(grads + i) = g;
}

void muon_momentum(real *grads, Moments momentum, const StepScalars *step, float beta,
                   MuonShape s) {
    if (momentum.bf16)
        muon_momentum_kernel<uint16_t><<<grid_of(s), BLOCK, 0, cuda_stream()>>>(
            grads, (uint16_t *)momentum.m, step, beta, momentum.counter, elements(s), s.stride);
    else
        muon_momentum_kernel<real><<<grid_of(s), BLOCK, 0, cuda_stream()>>>(
            grads, (real *)momentum.m, step, beta, momentum.counter, elements(s), s.stride);
    LAUNCH_CHECK("muon_momentum_kernel");
}

__global__ void muon_normalise_kernel(floatX *__restrict__ x, const real *__restrict__ grads,
                                      const double *squares, float eps, size_t n, size_t stride) {
    const size_t i = element();
    if (i >= n) return;
    const float scale = 1 / fmaxf(sqrtf((float)squares[blockIdx.y]), eps);
    const Neighbours<const real, WIDTH> g = neighbours<WIDTH>(grads + blockIdx.y * stride + i);
    float scaled[WIDTH];
    unrolled_for (int k = 0; k < WIDTH; k++) scaled[k] = g.x[k] * scale;
    store8(x + blockIdx.y * n + i, scaled);
}

void muon_normalise(floatX *x, const real *grads, double eps, MuonShape s) {
    double *squares = (double *)cuda_scratch();
    device_zero(squares, (size_t)s.num * sizeof *squares);
    add_squares(squares, grads, elements(s), s.num, s.stride);
    muon_normalise_kernel<<<grid_of(s), BLOCK, 0, cuda_stream()>>>(x, grads, squares, (float)eps,
                                                                   elements(s), s.stride);
    LAUNCH_CHECK("muon_normalise_kernel");
}

void muon_iterate(floatX *next, floatX *squares, const floatX *x, const float k[3], MuonShape s) {
    const bool wide = s.rows <= s.cols;
    const int64_t side = wide ? s.rows : s.cols;
    floatX *gram = squares, *poly = squares + s.num * side * side;  // poly: without k[0] I
    matmul_many(wide ? FORWARD : BACKWARD_WEIGHT, {gram, NULL, x, x}, s.rows, s.cols, side, s.num);
    matmul_many(FORWARD, {poly, gram, gram, gram, k[2], k[1]}, side, side, side, s.num);
    matmul_many(wide ? BACKWARD_INPUT : FORWARD,
                {next, x, wide ? x : poly, wide ? poly : x, 1, k[0]}, s.rows, s.cols, side, s.num);
}

__global__ void muon_apply_kernel(uint16_t *weights, uint16_t *master_lo,
                                  const floatX *__restrict__ x, const StepScalars *step, float lr,
                                  float keep, size_t n, size_t stride) {
    const size_t i = element() + blockIdx.y * stride;
    if (element() >= n || step->scale == 0) return;
    Neighbours<uint16_t, WIDTH> hi = neighbours<WIDTH>(weights + i),
                                lo = neighbours<WIDTH>(master_lo + i);
    float update[WIDTH];
    load8(update, x + blockIdx.y * n + element());
    unrolled_for (int k = 0; k < WIDTH; k++)
        master_split(master_join(hi.x[k], lo.x[k]) * keep - lr * update[k], &hi.x[k], &lo.x[k]);
    neighbours<WIDTH>(weights + i) = hi;
    neighbours<WIDTH>(master_lo + i) = lo;
}

void muon_apply(floatX *weights, uint16_t *master_lo, const floatX *x, const StepScalars *step,
                float lr, float keep, MuonShape s) {
    muon_apply_kernel<<<grid_of(s), BLOCK, 0, cuda_stream()>>>(
        (uint16_t *)weights, master_lo, x, step, lr, keep, elements(s), s.stride);
    LAUNCH_CHECK("muon_apply_kernel");
}
