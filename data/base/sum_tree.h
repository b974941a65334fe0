// Sums that do not depend on the number of ranks.
//
// Floating-point addition is not associative, so the order of a step's sum is fixed: a binary tree
// over M leaves, leaf i holding the micro-batches that sum_leaf assigns to it. Two neighbours of
// 2^k leaves join where the left one begins at a multiple of 2^(k+1); the rest joins from the
// right. A rank that owns a block of leaves can join inside it, and the ranks together, in any
// grouping, form the same tree.
#pragma once

#include <stdint.h>

typedef struct {
    int32_t first, size;  // leaves first .. first + size - 1, size a power of two
} SumNode;

enum { SUM_MAX_NODES = 64 };  // a block of up to 2^20 leaves joins to 40 nodes at most

// The leaf of a micro-batch. In packed layout each leaf has one micro-batch; other layouts need
// more or fewer micro-batches than there are leaves.
static inline int32_t sum_leaf(int32_t micro, int32_t num_micro, int32_t num_leaves) {
    return (int32_t)((int64_t)micro * num_leaves / num_micro);
}

// The block [*first, *last) of n items in order that one rank owns.
static inline void rank_block(int32_t n, int32_t rank, int32_t num_ranks, int32_t *first,
                              int32_t *last) {
    *first = (int32_t)((int64_t)n * rank / num_ranks);
    *last = (int32_t)((int64_t)n * (rank + 1) / num_ranks);
}

// Adds a node at the right end of nodes (num_nodes) and joins what can be joined. Returns the new
// num_nodes, n: from the right to n, each node has been joined to the one before it.
static inline int sum_add_node(SumNode *nodes, int num_nodes, SumNode node) {
    nodes[num_nodes] = node;
    for (SumNode *left; num_nodes > 0; num_nodes--) {
        left = &nodes[num_nodes - 1];
        if (left->size != left[1].size || left->first % (2 * left->size) != 0) break;
        left->size *= 2;
    }
    return num_nodes + 1;
}

// Joins the leaves of a rank's block into nodes (SUM_MAX_NODES); returns how many nodes remain.
// *most: the largest number of nodes that existed when a leaf was added, that leaf not counted.
static inline int sum_block_nodes(int32_t num_leaves, int32_t rank, int32_t num_ranks,
                                  SumNode *nodes, int *most) {
    int32_t leaf, last;
    int n = 0;
    *most = 0;
    for (rank_block(num_leaves, rank, num_ranks, &leaf, &last); leaf < last; leaf++) {
        if (n > *most) *most = n;
        n = sum_add_node(nodes, n, (SumNode){leaf, 1});
    }
    return n;
}
