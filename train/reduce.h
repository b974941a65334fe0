// Gradients of all micro-batches of all ranks become their sum.
//
// In order: after each leaf what can be joined is joined, and the rest waits in the slots; then
// each rank collects the nodes that cover its share and joins them, as one rank alone would have
// done.
#ifndef UNPAD_REDUCE_H
#define UNPAD_REDUCE_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../data/base/sum_tree.h"
#include "../llama.h"      // defines: LlamaModel, LlamaSum

static inline real *llama_slot(LlamaModel *m, int slot) {
    return m->sum.slots + (size_t)slot * m->num_elements;
}

// The gradients since the last leaf, which began with zeros, are leaf `leaf`.
static inline void llama_end_leaf(LlamaModel *m, int32_t leaf, bool last) {
    LlamaSum *sum = &m->sum;
    const size_t n = m->num_elements;
    const int before = sum->num_nodes;
    sum->num_nodes = plan_add_leaf(sum->nodes, before, leaf);
    for (int i = before - 1; i >= sum->num_nodes - 1; i--) grads_add(m->grads, llama_slot(m, i), n);
    if (last) return;
    device_copy(llama_slot(m, sum->num_nodes - 1), m->grads, n * sizeof(real));
    device_zero(m->grads, n * sizeof(real));
}

// Where node `round` of `rank` is collected
static inline real *llama_collected(const LlamaModel *m, int round, int32_t rank) {
    const size_t row = (size_t)round * (size_t)m->ranks.num_ranks + (size_t)rank;
    return m->scratch.collected + row * LLAMA_COLLECT;
}

// Joins nodes (num_nodes) whose sums are in x (num_nodes, n each) as far as they join; with `all`
// from the right to one. Returns how many are left.
static inline int llama_join_nodes(PlanNode *nodes, real **x, int num_nodes, bool all, size_t n) {
    while (num_nodes > 1 && (all || plan_nodes_join(nodes[num_nodes - 2], nodes[num_nodes - 1]))) {
        num_nodes--;
        grads_add(x[num_nodes - 1], x[num_nodes], n);
        nodes[num_nodes - 1].size *= 2;
    }
    return num_nodes;
}

// Elements [at, at + n) of this rank's share from the collected nodes of all ranks.
static inline void llama_join_collected(LlamaModel *m, size_t at, size_t n) {
    const LlamaRanks *ranks = &m->ranks;
    PlanNode nodes[2 * PLAN_MAX_NODES];
    real *x[2 * PLAN_MAX_NODES];
    int joined = 0, unused;
    for (int32_t r = 0; r < ranks->num_ranks; r++) {
        PlanNode own[PLAN_MAX_NODES];
        int32_t first, last;
        plan_block(ranks->num_leaves, r, ranks->num_ranks, &first, &last);
        const int count = plan_block_nodes(first, last, own, &unused);
        for (int i = 0; i < count; i++) {
            nodes[joined] = own[i];
            x[joined] = llama_collected(m, i, r);
            joined = llama_join_nodes(nodes, x, joined + 1, false, n);
        }
    }
    llama_join_nodes(nodes, x, joined, true, n);
    device_copy(m->grads + m->share[ranks->rank] + at, x[0], n * sizeof(real));
}

static inline void llama_collect_in_order(LlamaModel *m) {
    const int32_t rank = m->ranks.rank;
    const size_t own = m->share[rank + 1] - m->share[rank];
    size_t longest = 0;
    for (int32_t r = 0; r < m->ranks.num_ranks; r++)
        if (m->share[r + 1] - m->share[r] > longest) longest = m->share[r + 1] - m->share[r];
    for (size_t at = 0; at < longest; at += LLAMA_COLLECT) {
        // a rank with fewer nodes than others sends its last one again, which nobody looks at
        for (int i = 0; i < m->sum.num_rounds; i++)
            comm_collect(llama_collected(m, i, 0),
                         i < m->sum.num_nodes - 1 ? llama_slot(m, i) : m->grads, m->share, at,
                         LLAMA_COLLECT);
        if (at < own)
            llama_join_collected(m, at, own - at < LLAMA_COLLECT ? own - at : LLAMA_COLLECT);
    }
}

// After the last micro-batch: this rank's share of the gradients, or all of them when it updates
// all, are the sum over all ranks.
static inline void llama_reduce_grads(LlamaModel *m) {
    const bool alone = m->ranks.num_ranks == 1;
    if (m->ranks.in_order && alone)
        for (int i = m->sum.num_nodes - 2; i >= 0; i--)
            grads_add(m->grads, llama_slot(m, i), m->num_elements);
    else if (m->ranks.in_order)
        llama_collect_in_order(m);
    else if (!alone)
        llama_await_grads(m);
    if (!alone && !m->ranks.shard_optimizer) comm_all_gather(m->grads, m->share);
    m->sum.num_nodes = 0;
}

#endif
