// Distributes the micro-batches of a step across ranks by predicted work.
#ifndef UNPAD_DISTRIBUTE_H
#define UNPAD_DISTRIBUTE_H

#include <stdint.h>

#include "plan.h"

// num_leaves 0: by work. Micro-batches are distributed heaviest first, in rounds of num_ranks, so
// that those computed at the same time are alike; in each round the heaviest goes to the rank with
// the least work so far. num_leaves > 0, for deterministic reduction: each rank has a contiguous
// block of the leaves of its sums (sum_tree.h), and their micro-batches in order.

// A rank for every micro-batch: order (num_micro) lists them, owner (num_micro) has the rank of
// each in that list.
void plan_assign_ranks(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, int32_t *order,
                       int32_t *owner);

// The micro-batches of one rank into out (num_micro), in the order of that list; returns how many.
int32_t plan_rank_micros(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                         int32_t *out);

// The predicted work of every rank into work (num_ranks).
void plan_rank_work(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, int64_t *work);

// The largest over the mean: 1 is even, num_ranks means that one rank has everything; 0 when there
// is no work.
double plan_imbalance(const int64_t *work, int32_t num_ranks);

#endif
