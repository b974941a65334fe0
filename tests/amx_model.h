// For kernels/cpu/matmul.c: AMX's tile registers in C, after the operation of TDPBF16PS in Intel's
// manual, and the instruction set that uses them, so that tiles are tested on every processor.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

// Not sanitized: it takes most time.
#define MODEL_PLAIN __attribute__((no_sanitize("address", "undefined"))) static inline

static _Thread_local uint32_t model_tiles[8][16][16];  // [register][row][word]
static _Thread_local bool model_configured;

static void model_configure(bool on) { model_configured = on; }

static void model_zero(int t) {
    if (!model_configured) abort();
    memset(model_tiles[t], 0, sizeof model_tiles[t]);
}

static void model_load(int t, const void *from, int64_t stride) {
    for (int i = 0; i < 16; i++) memcpy(model_tiles[t][i], (const char *)from + i * stride, 64);
}

static void model_store(int t, void *to, int64_t stride) {
    for (int i = 0; i < 16; i++) memcpy((char *)to + i * stride, model_tiles[t][i], 64);
}

MODEL_PLAIN float model_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Denormals are zeros, as an input and as a result.
MODEL_PLAIN float model_flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

// sum += x y, rounded once. The product of two bf16 is exact unless it is out of a float's range.
MODEL_PLAIN void model_fma(float sum[16], float x, const float y[16]) {
    float product[16];
    int out_of_range = 0;
    for (int n = 0; n < 16; n++) {
        product[n] = x * y[n];
        out_of_range |= (x != 0) & (y[n] != 0) &
                        !((fabsf(product[n]) >= 0x1p-126f) & (fabsf(product[n]) <= FLT_MAX));
    }
    if (out_of_range)
        for (int n = 0; n < 16; n++) sum[n] = model_flush(fmaf(x, y[n], sum[n]));
    else
        for (int n = 0; n < 16; n++) sum[n] = model_flush(product[n] + sum[n]);
}

// c += a b: sums of the even and of the odd members of pairs, in order and from zero, then
// c + (even + odd); each step is rounded once, to nearest even.
MODEL_PLAIN void model_dot(int c, int a, int b) {
    float low[16][16], high[16][16];  // of b
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < 16; n++) {
            low[k][n] = model_flush(model_float(model_tiles[b][k][n] << 16));
            high[k][n] = model_flush(model_float(model_tiles[b][k][n] & 0xffff0000));
        }
    for (int m = 0; m < 16; m++) {
        float even[16] = {0}, odd[16] = {0};
        for (int k = 0; k < 16; k++) {
            const uint32_t pair = model_tiles[a][m][k];
            const float x = model_flush(model_float(pair << 16)),
                        next = model_flush(model_float(pair & 0xffff0000));
            model_fma(even, x, low[k]), model_fma(odd, next, high[k]);
        }
        for (int n = 0; n < 16; n++) {
            const float before = model_flush(model_float(model_tiles[c][m][n])),
                        after = model_flush(before + model_flush(even[n] + odd[n]));
            memcpy(&model_tiles[c][m][n], &after, sizeof after);
        }
    }
}

// As VCVTNE2PS2BF16 rounds
static inline uint32_t model_bf16(float x) {
    uint32_t bits;
    x = model_flush(x);
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline void model_pair(real *to, float even, float odd) {
    const uint32_t word = model_bf16(even) | model_bf16(odd) << 16;
    memcpy(to, &word, sizeof word);
}

static void model_round(real *to, const real *from) {
    for (int i = 0; i < 16; i++) model_pair(to + i, (float)from[2 * i], (float)from[2 * i + 1]);
}

static void round_pairs_model(real *panel, int64_t pairs, int width) {
    for (int64_t k = 0; k < pairs; k++)
        for (int i = 0; i < width; i++) {
            const real *even = panel + 2 * k * width + i;
            model_pair(panel + k * width + i, (float)even[0], (float)even[width]);
        }
}

#define NAME(x) x##_model
#define MERGE_LOW LOW_16
#define MERGE_HIGH HIGH_16
#define TARGET
#define LANES 16
#define TILE_ZERO(t) model_zero(t)
#define TILE_LOAD(t, p, stride) model_load(t, p, stride)
#define TILE_STORE(t, p, stride) model_store(t, p, stride)
#define TILE_DOT(c, a, b) model_dot(c, a, b)
#define TILE_ROUND(to, from) model_round(to, from)
enum { mr_model = 32, nv_model = 2 };
#include "../kernels/cpu/matmul_tile.h"
#define MODEL_SET                                                                                 \
    {                                                                                             \
        "amx_model_bf16", tile_model, mr_model, nr_model, pack_model, NULL, 0, round_pairs_model, \
            pack_tiles_model, model_configure                                                     \
    }
