// Document lengths drawn from a distribution, for simulations and tests without shards. The same
// arguments give the same lengths.
#ifndef UNPAD_LENGTHS_H
#define UNPAD_LENGTHS_H

#include <stddef.h>
#include <stdint.h>
#include <math.h>

#include "../data/base/hash.h"
#include "../data/base/memory.h"
#include "../data/batches/plan.h"

// r65: log-normal, mean 700, sigma 1.04, up to 8192 tokens: web pages; the distribution of the
// reference batch of dev/bench.py. web: mean 700, sigma 1.3, up to 62000: a heavier tail, as in
// whole crawls. seed: six documents of 130 to 350 tokens, repeated.
#define LENGTHS_LAWS "r65|web|seed"
typedef enum { LENGTHS_R65, LENGTHS_WEB, LENGTHS_SEED } LengthsLaw;

typedef struct {
    int32_t *lengths;
    int64_t n;
} DocLengths;

static inline int64_t lengths_at(const void *context, int64_t doc) {
    return ((const DocLengths *)context)->lengths[doc];
}

static inline DocIndex lengths_index(const DocLengths *lengths) {
    DocIndex index;
    index.num_docs = lengths->n;
    index.length = lengths_at;
    index.context = lengths;
    index.targets = NULL;
    return index;
}

// Box-Muller from two hashes of (seed, i)
static inline double lengths_normal(uint64_t seed, int64_t i) {
    const uint64_t key = splitmix64(seed * 0x9e3779b97f4a7c15ull + (uint64_t)i);
    const double u = ((double)(splitmix64(key) >> 11) + 0.5) * 0x1p-53;
    const double v = (double)(splitmix64(key + 1) >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * v);
}

// num_docs documents; the caller frees `lengths`.
static inline DocLengths lengths_draw(LengthsLaw law, int64_t num_docs, uint64_t seed) {
    static const int32_t six[] = {220, 217, 295, 183, 130, 350};
    const double sigma = law == LENGTHS_R65 ? 1.04 : 1.3,
                 longest = law == LENGTHS_R65 ? 8192 : 62000;
    DocLengths l = {host_calloc((size_t)num_docs, sizeof(int32_t), "lengths"), num_docs};
    for (int64_t i = 0; i < num_docs; i++) {
        const double mu = log(700) - sigma * sigma / 2;
        const double drawn = rint(exp(mu + sigma * lengths_normal(seed, i)));
        l.lengths[i] = law == LENGTHS_SEED ? six[i % 6] : (int32_t)fmin(fmax(drawn, 1), longest);
    }
    return l;
}

#endif
