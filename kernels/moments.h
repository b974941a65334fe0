// The optimizer's moments: fp32, or bf16 in half the memory. A bf16 is rounded at random, up as
// often as the value is near its upper neighbour, so that it is right in the mean (arXiv
// 2010.06192). To nearest, v would stand still where a step changes it by less than 2^-9 of it.
#pragma once

#include <string.h>

#include "../data/base/hash.h"

// m and v (n); an operation without v ignores it. Element i is rounded by mix64(counter + i): the
// counter is of the seed, the step and the place in the whole array, of no rank or backend. Updates
// of weights read new moments before they are rounded, which spares them this step's error.
typedef struct {
    void *m, *v;  // real, or uint16_t: the upper halves of floats
    bool bf16;
    uint64_t counter;
} Moments;

enum { RANDOM_M = 0, RANDOM_V = 16, TO_NEAREST = 0x8000 };  // bits of the hash from here on

HOST_DEVICE static inline float moment_widen(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// random: 16 uniform bits, of which higher ones are ignored. What is a bf16 stays as it is. x is
// finite, and below the largest bf16.
HOST_DEVICE static inline uint16_t moment_narrow(float x, uint64_t random) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + (uint32_t)(random & 0xffff)) >> 16);
}
