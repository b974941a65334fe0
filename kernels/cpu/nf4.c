// NF4: a number is one of the 16 products of its block's scale with the levels.

#include "../nf4.h"
#include "common.h"

static CLONES void dequantize_block(floatX *restrict out, const uint8_t *restrict codes,
                                    float absmax) {
    static const float levels[] = {NF4_LEVELS};
    floatX values[16];
    for (int i = 0; i < 16; i++) values[i] = levels[i] * absmax;
    for (int i = 0; i < NF4_BLOCK / 2; i++) {
        out[2 * i] = values[codes[i] >> 4];
        out[2 * i + 1] = values[codes[i] & 15];
    }
}

void nf4_dequantize(floatX *out, const uint8_t *codes, const float *absmax, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n / NF4_BLOCK; i++)
        dequantize_block(out + i * NF4_BLOCK, codes + i * NF4_BLOCK / 2, absmax[i]);
}
