#include "sum_tree.h"

int32_t sum_leaf(int32_t micro, int32_t num_micro, int32_t num_leaves) {
    return (int32_t)((int64_t)micro * num_leaves / num_micro);
}

void rank_block(int32_t n, int32_t rank, int32_t num_ranks, int32_t *first, int32_t *last) {
    *first = (int32_t)((int64_t)n * rank / num_ranks);
    *last = (int32_t)((int64_t)n * (rank + 1) / num_ranks);
}

bool sum_nodes_join(SumNode left, SumNode right) {
    return left.size == right.size && left.first % (2 * left.size) == 0;
}

int sum_add_leaf(SumNode *nodes, int num_nodes, int32_t leaf) {
    SumNode node = {leaf, 1};
    while (num_nodes > 0 && sum_nodes_join(nodes[num_nodes - 1], node)) {
        node = nodes[--num_nodes];
        node.size *= 2;
    }
    nodes[num_nodes] = node;
    return num_nodes + 1;
}

int sum_block_nodes(int32_t first, int32_t last, SumNode *nodes, int *most) {
    int n = 0;
    *most = 0;
    for (int32_t leaf = first; leaf < last; leaf++) {
        if (n > *most) *most = n;
        n = sum_add_leaf(nodes, n, leaf);
    }
    return n;
}
