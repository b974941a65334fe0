#include "distribute.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"
#include "../base/sum_tree.h"
#include "../base/heap.h"
#include "plan.h"

static const char what_for[] = "the step plan";

static void assign_blocks(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, int32_t *order,
                          int32_t *owner) {
    int32_t rank = 0, first, last;
    rank_block(num_leaves, rank, num_ranks, &first, &last);
    for (int32_t m = 0; m < p->num_micro; m++) {
        while (sum_leaf(m, p->num_micro, num_leaves) >= last)
            rank_block(num_leaves, ++rank, num_ranks, &first, &last);
        order[m] = m;
        owner[m] = rank;
    }
}

static void assign_by_work(const StepPlan *p, int32_t num_ranks, int32_t *order, int32_t *owner) {
    const size_t ranks = (size_t)num_ranks, micros = (size_t)p->num_micro;
    HeapItem *items = host_calloc(2 * ranks + micros, sizeof(HeapItem), what_for);
    Heap round = {items, 0}, next = {items + ranks, 0}, heaviest = {items + 2 * ranks, 0};
    for (int32_t r = 0; r < num_ranks; r++) heap_push(&round, 0, r);
    for (int32_t m = 0; m < p->num_micro; m++) heap_push(&heaviest, -p->micro_work[m], m);
    for (int32_t i = 0; i < p->num_micro; i++) {
        const HeapItem micro = heap_pop(&heaviest), rank = heap_pop(&round);
        order[i] = micro.id;
        owner[i] = rank.id;
        heap_push(&next, rank.key - micro.key, rank.id);
        if (round.n > 0) continue;
        const Heap empty = round;
        round = next;
        next = empty;
    }
    free(items);
}

void plan_assign_ranks(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, int32_t *order,
                       int32_t *owner) {
    assert(num_ranks > 0 && num_leaves >= 0);
    if (num_leaves > 0)
        assign_blocks(p, num_leaves, num_ranks, order, owner);
    else
        assign_by_work(p, num_ranks, order, owner);
}

int32_t plan_rank_micros(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                         int32_t *out) {
    assert(rank >= 0 && rank < num_ranks);
    int32_t *owner = host_calloc((size_t)p->num_micro, sizeof(int32_t), what_for), n = 0;
    plan_assign_ranks(p, num_leaves, num_ranks, out, owner);
    for (int32_t i = 0; i < p->num_micro; i++)
        if (owner[i] == rank) out[n++] = out[i];
    free(owner);
    return n;
}

void plan_rank_work(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, int64_t *work) {
    const size_t micros = (size_t)p->num_micro;
    int32_t *order = host_calloc(2 * micros, sizeof(int32_t), what_for), *owner = order + micros;
    plan_assign_ranks(p, num_leaves, num_ranks, order, owner);
    memset(work, 0, (size_t)num_ranks * sizeof *work);
    for (int32_t i = 0; i < p->num_micro; i++) work[owner[i]] += p->micro_work[order[i]];
    free(order);
}

double plan_imbalance(const int64_t *work, int32_t num_ranks) {
    int64_t sum = 0, most = 0;
    for (int32_t r = 0; r < num_ranks; r++) {
        sum += work[r];
        if (work[r] > most) most = work[r];
    }
    return sum > 0 ? (double)most * num_ranks / (double)sum : 0;
}
