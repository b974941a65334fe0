// Sums that do not depend on the number of ranks: the tree that fixes their order.
#ifndef UNPAD_SUM_TREE_H
#define UNPAD_SUM_TREE_H

#include <stdbool.h>
#include <stdint.h>

// -------------------------------------------------------------------------------------------------
// Sums that do not depend on the number of ranks. Floating-point addition is not associative, so
// the order of a step's sum is fixed: a binary tree over M leaves, leaf i holding the micro-batches
// that plan_leaf gives it. Two neighbours of 2^k leaves join where the left one begins at a
// multiple of 2^(k+1); what is left over joins from the right. A rank that owns a block of leaves
// can join inside it, and the ranks together, in any grouping, make the same tree.

typedef struct {
    int32_t first, size;  // leaves first .. first + size - 1, size a power of two
} PlanNode;

enum { PLAN_MAX_NODES = 64 };  // a block of up to 2^20 leaves joins to 40 nodes at most

// In packed layout a leaf is one micro-batch; others need more or fewer than M.
int32_t plan_leaf(int32_t micro, int32_t num_micro, int32_t num_leaves);

// Of n things in order, those of one rank: *first to *last - 1.
void plan_block(int32_t n, int32_t rank, int32_t num_ranks, int32_t *first, int32_t *last);
bool plan_nodes_join(PlanNode left, PlanNode right);

// The next leaf at the right end of nodes (num_nodes); returns how many there are then.
int plan_add_leaf(PlanNode *nodes, int num_nodes, int32_t leaf);

// What the leaves first .. last - 1 join to, into nodes (PLAN_MAX_NODES); returns how many. *most:
// the largest number of them before the last leaf came.
int plan_block_nodes(int32_t first, int32_t last, PlanNode *nodes, int *most);

#endif
