#include "permute.h"

#include <math.h>
#include <stdint.h>

uint64_t plan_hash(uint64_t x) {  // splitmix64's finalizer
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// -------------------------------------------------------------------------------------------------
// The order of documents in an epoch

int64_t plan_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t pos) {
    const uint64_t key = plan_hash(plan_hash(seed) ^ (uint64_t)epoch);
    int half = 1;
    while (half < 31 && ((uint64_t)1 << (2 * half)) < (uint64_t)n) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)pos;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 6; round++) {
            const uint64_t mixed = left ^ (plan_hash(key + (round << 32) + right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}
