// The order of documents in an epoch: a permutation keyed by (seed, epoch) that needs no memory.
#ifndef UNPAD_PERMUTE_H
#define UNPAD_PERMUTE_H

#include <stdint.h>

// The document at position pos of the stream: for a fixed seed and epoch, a permutation of
// 0 .. n - 1, n >= 1. The same on any machine.
int64_t plan_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t pos);

#endif
