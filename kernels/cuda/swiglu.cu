// SwiGLU: out = silu(gate) * up, silu(x) = x / (1 + exp(-x)). Memory-bound: each value is read and
// written once, in vectors of 8; the arithmetic is fp32.

#include "common.cuh"

// 1 / (1 + exp(-x)); exp overflows to infinity for very negative x, which gives the right 0.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__global__ void swiglu_forward_kernel(floatX *__restrict__ out, const floatX *__restrict__ gate_up,
                                      int64_t T, int F) {
    const int64_t t = row_of_thread();
    if (t >= T) return;
    const floatX *gates = gate_up + 2 * t * F, *ups = gates + F;
#pragma unroll 4
    for (int f = 8 * (int)threadIdx.x; f < F; f += 8 * (int)blockDim.x) {
        float gate[8], up[8];
        load8(gate, gates + f);
        load8(up, ups + f);
        unrolled_for (int i = 0; i < 8; i++) up[i] *= gate[i] * sigmoid(gate[i]);
        store8(out + t * F + f, up);
    }
}

void swiglu_forward(floatX *out, const floatX *gate_up, int64_t T, int64_t F) {
    if (T == 0) return;
    const RowGrid grid = row_grid("swiglu_forward", T, F);
    swiglu_forward_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(out, gate_up, T, (int)F);
    LAUNCH_CHECK("swiglu_forward_kernel");
}

// silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x)
__global__ void swiglu_backward_kernel(floatX *__restrict__ dgate_up,
                                       const floatX *__restrict__ dout,
                                       const floatX *__restrict__ gate_up, int64_t T, int F) {
    const int64_t t = row_of_thread();
    if (t >= T) return;
    const int64_t gates = 2 * t * F, ups = gates + F;
#pragma unroll 2
    for (int f = 8 * (int)threadIdx.x; f < F; f += 8 * (int)blockDim.x) {
        float gate[8], up[8], d[8];
        load8(gate, gate_up + gates + f);
        load8(up, gate_up + ups + f);
        load8(d, dout + t * F + f);
        unrolled_for (int i = 0; i < 8; i++) {
            const float x = gate[i], s = sigmoid(x);
            gate[i] = d[i] * up[i] * s * (1.0f + x * (1.0f - s));
            up[i] = d[i] * x * s;
        }
        store8(dgate_up + gates + f, gate);
        store8(dgate_up + ups + f, up);
    }
}

void swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t T,
                     int64_t F) {
    if (T == 0) return;
    const RowGrid grid = row_grid("swiglu_backward", T, F);
    swiglu_backward_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(dgate_up, dout, gate_up,
                                                                          T, (int)F);
    LAUNCH_CHECK("swiglu_backward_kernel");
}
