#include "ordered_sum.h"

#include <assert.h>

#include "comm.h"

// On a GPU a round of all ranks fills 32 MiB: even a short one costs launches on every rank.
// On the CPU a block fits the cache. For a small model it is a quarter of a shard, to save memory.
static size_t block_size(size_t num_elements, int32_t num_ranks) {
    const size_t ranks = (size_t)num_ranks, quarter = (num_elements / (16 * ranks) + 1) * 4;
#ifdef BACKEND_CUDA
    const size_t most = ((size_t)2 << 20) / ranks * 4;  // rows on 16-byte borders
#else
    const size_t most = (size_t)32 << 10;
#endif
    return most < quarter ? most : quarter;
}

void ordered_sum_plan(OrderedSum *s, size_t num_elements, int32_t rank, int32_t num_ranks,
                      int32_t num_leaves) {
    *s = (OrderedSum){.num_elements = num_elements,
                      .block = block_size(num_elements, num_ranks),
                      .rank = rank,
                      .num_ranks = num_ranks,
                      .num_leaves = num_leaves};
    for (int32_t r = 0; r < num_ranks; r++) {
        SumNode nodes[SUM_MAX_NODES];
        int32_t first, last;
        int most;
        rank_block(num_leaves, r, num_ranks, &first, &last);
        const int count = sum_block_nodes(first, last, nodes, &most);
        if (count > s->num_collected) s->num_collected = count;
        if (r == rank) s->num_partial = most;
    }
}

static real *partial_sum(const OrderedSum *s, int i) {
    assert(i >= 0 && i < s->num_partial);
    return s->partial + (size_t)i * s->num_elements;
}

void ordered_sum_add(OrderedSum *s, real *x, int32_t leaf, bool last) {
    const int before = s->num_nodes;
    s->num_nodes = sum_add_node(s->nodes, before, (SumNode){leaf, 1});
    for (int i = before - 1; i >= s->num_nodes - 1; i--)
        grads_add(x, partial_sum(s, i), s->num_elements);
    if (last) return;
    device_copy(partial_sum(s, s->num_nodes - 1), x, s->num_elements * sizeof(real));
}

// Partial sum i of `rank`, as collected
static real *collected_sum(const OrderedSum *s, int i, int32_t rank) {
    const size_t row = (size_t)i * (size_t)s->num_ranks + (size_t)rank;
    return s->collected + row * s->block;
}

// Adds each (n) from x[last] down to x[end] to the one before it.
static void add_to_left(real **x, int last, int end, size_t n) {
    for (int i = last; i >= end; i--) grads_add(x[i - 1], x[i], n);
}

// out (n) =  the sum of the collected partial sums of all ranks
static void join_collected(const OrderedSum *s, real *out, size_t n) {
    SumNode nodes[2 * SUM_MAX_NODES];
    real *x[2 * SUM_MAX_NODES];
    int num_nodes = 0, most;
    for (int32_t r = 0; r < s->num_ranks; r++) {
        SumNode own[SUM_MAX_NODES];
        int32_t first, last;
        rank_block(s->num_leaves, r, s->num_ranks, &first, &last);
        const int count = sum_block_nodes(first, last, own, &most);
        for (int i = 0; i < count; i++) {
            const int before = num_nodes;
            x[before] = collected_sum(s, i, r);
            num_nodes = sum_add_node(nodes, before, own[i]);
            add_to_left(x, before, num_nodes, n);
        }
    }
    add_to_left(x, num_nodes - 1, 1, n);
    device_copy(out, x[0], n * sizeof(real));
}

// Goes through the shards block by block, as many times as the longest shard needs.
static void collect_and_join(const OrderedSum *s, real *x, const size_t *first) {
    const size_t own = first[s->rank + 1] - first[s->rank];
    size_t longest = 0;
    for (int32_t r = 0; r < s->num_ranks; r++)
        if (first[r + 1] - first[r] > longest) longest = first[r + 1] - first[r];
    for (size_t at = 0; at < longest; at += s->block) {
        // a rank with fewer partial sums resends its last one; the receiver ignores it
        for (int i = 0; i < s->num_collected; i++)
            comm_collect(collected_sum(s, i, 0), i < s->num_nodes - 1 ? partial_sum(s, i) : x,
                         first, at, s->block);
        if (at < own)
            join_collected(s, x + first[s->rank] + at, own - at < s->block ? own - at : s->block);
    }
}

void ordered_sum_finish(OrderedSum *s, real *x, const size_t *first) {
    if (s->num_ranks > 1)
        collect_and_join(s, x, first);
    else
        for (int i = s->num_nodes - 2; i >= 0; i--)
            grads_add(x, partial_sum(s, i), s->num_elements);
    s->num_nodes = 0;
}
