// Sums over the micro-batches of all ranks, with the same bits on any number of ranks: additions
// follow the tree of data/base/sum_tree.h.
//
// Each rank adds its leaves one after another. Neighbours are joined as soon as possible; the rest
// wait as partial sums. After the last leaf each rank collects all partial sums of its own shard
// and joins them in the order in which a single rank would.
#ifndef UNPAD_ORDERED_SUM_H
#define UNPAD_ORDERED_SUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../data/base/sum_tree.h"
#include "../kernels.h"

typedef struct {
    size_t num_elements;
    size_t block;  // elements of a shard that are collected at a time
    int32_t rank, num_ranks, num_leaves;
    // device memory, the caller's: see ordered_sum_plan
    real *partial;    // (num_partial, num_elements)
    real *collected;  // (num_collected, num_ranks, block)
    int num_partial, num_collected;
    // the partial sums so far, left to right: the last in x, those before it in partial
    SumNode nodes[SUM_MAX_NODES];
    int num_nodes;
} OrderedSum;

// Sizes of a sum over num_leaves leaves. The caller then sets partial and collected, the latter
// only where num_ranks > 1.
void ordered_sum_plan(OrderedSum *s, size_t num_elements, int32_t rank, int32_t num_ranks,
                      int32_t num_leaves);

// x (num_elements) holds leaf `leaf`; this rank's leaves come in order. Then x may be used for the
// next one; after the last it holds the last partial sum.
void ordered_sum_add(OrderedSum *s, real *x, int32_t leaf, bool last);

// After the last leaf, on all ranks: this rank's shard of x (elements first[rank] to
// first[rank+1] - 1; with a single rank all of x) =  the sum over all leaves. Other elements are
// left undefined. Then the next sum may begin.
void ordered_sum_finish(OrderedSum *s, real *x, const size_t *first);

#endif
