// The first tokens that segments of a step have in common, in whole tiles of attention.
//
// Two segments share 128 k tokens if they also have the token after these in common: each of them
// then has one target. 64-bit hashes, made when a step is planned, decide what is equal: of any
// shards, without another file, and for any number of ranks.
#pragma once

#include "stream.h"

typedef struct {
    uint64_t *hashes;  // of each segment's first 128 k + 1 tokens, for k = 1, 2, ...
    size_t *first;     // (n + 1) of each segment, into hashes
    int32_t *tokens;
    size_t hash_capacity, first_capacity, token_capacity;
} Prefixes;

// Reads the n segments.
bool prefixes_read(Prefixes *p, const DocIndex *index, const Segment *list, int64_t n, Error *err);
void prefixes_free(Prefixes *p);

// Sorts ids (n) so that borrowers follow their leader (VarlenInfo of kernels.h), and sets shared
// (n): how many tokens each borrows, 0 for a leader, ever fewer. Returns the sum of shared. pairs:
// ids keep their order, and the second of each two borrows from the first.
int64_t prefixes_share(const Prefixes *p, int32_t *ids, int32_t *shared, int64_t n, bool pairs);
