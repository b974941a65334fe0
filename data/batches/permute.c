#include "permute.h"

#include <assert.h>
#include <stdint.h>

#include "../base/hash.h"

// A Feistel network permutes the next power of four; repeating it until the value is below n makes
// it a permutation of n, after at most 4 passes on average.
int64_t plan_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t pos) {
    assert(n >= 1 && pos >= 0 && pos < n);
    const uint64_t key = splitmix64(splitmix64(seed) ^ (uint64_t)epoch);
    int half = 1;
    while (half < 31 && ((uint64_t)1 << (2 * half)) < (uint64_t)n) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)pos;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 6; round++) {
            const uint64_t mixed = left ^ (splitmix64(key + (round << 32) + right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}
