// The order of documents in an epoch: a permutation keyed by (seed, epoch), without memory.
#ifndef UNPAD_PERMUTE_H
#define UNPAD_PERMUTE_H

#include <stdint.h>

uint64_t plan_hash(uint64_t x);

// -------------------------------------------------------------------------------------------------
// The order of documents in an epoch

// Stream position -> document: a permutation of 0 .. n-1. A Feistel network permutes the next power
// of four; walking its cycle until the value is below n keeps it a permutation of n (at most 4
// rounds of it on average).
int64_t plan_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t pos);

#endif
