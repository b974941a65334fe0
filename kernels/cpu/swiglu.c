// SwiGLU: out = silu(gate) * up, silu(x) = x / (1 + exp(-x)).

#include "common.h"

static CLONES void forward_row(floatX *restrict out, const floatX *restrict gate,
                               const floatX *restrict up, int64_t F) {
    for (int64_t f = 0; f < F; f++) out[f] = gate[f] / (1 + exp_fast(-gate[f])) * up[f];
}

void swiglu_forward(floatX *out, const floatX *gate_up, int64_t T, int64_t F) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++)
        forward_row(out + t * F, gate_up + 2 * t * F, gate_up + (2 * t + 1) * F, F);
}

// silu'(x) = s (1 + x (1 - s)) with s = 1 / (1 + exp(-x))
static CLONES void backward_row(floatX *restrict dgate, floatX *restrict dup,
                                const floatX *restrict dout, const floatX *restrict gate,
                                const floatX *restrict up, int64_t F) {
    for (int64_t f = 0; f < F; f++) {
        floatX s = 1 / (1 + exp_fast(-gate[f]));
        dgate[f] = dout[f] * up[f] * s * (1 + gate[f] * (1 - s));
        dup[f] = dout[f] * gate[f] * s;
    }
}

void swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t T,
                     int64_t F) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        int64_t gate = 2 * t * F, up = gate + F;
        backward_row(dgate_up + gate, dgate_up + up, dout + t * F, gate_up + gate, gate_up + up, F);
    }
}
