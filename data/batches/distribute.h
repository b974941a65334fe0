// Distributes the micro-batches of a step across ranks by predicted work.
#ifndef UNPAD_DISTRIBUTE_H
#define UNPAD_DISTRIBUTE_H

#include <stdint.h>

#include "plan.h"

// A rank for every micro-batch: order (num_micro) lists them heaviest first, owner (num_micro) the
// rank of each in that list. In rounds of num_ranks, so that micro-batches computed at the same
// time are alike; in each round the heaviest goes to the rank with the least work so far.
void plan_assign_ranks(const StepPlan *p, int32_t num_ranks, int32_t *order, int32_t *owner);

// The micro-batches of one rank into out (num_micro), heaviest first; returns how many. Every
// micro-batch belongs to exactly one rank.
int32_t plan_rank_micros(const StepPlan *p, int32_t rank, int32_t num_ranks, int32_t *out);

// The same for deterministic reduction: each rank has a contiguous block, in order, for sums over
// num_leaves leaves (sum_tree.h).
int32_t plan_rank_block(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                        int32_t *out);

// ------------------------------------------------------------------------------------------------
// Balance

// The predicted work of every rank into work (num_ranks), distributed as by plan_rank_micros, or as
// by plan_rank_block.
void plan_rank_work(const StepPlan *p, int32_t num_ranks, int64_t *work);
void plan_block_work(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, int64_t *work);

// The largest over the mean: 1 is even, num_ranks means that one rank has everything; 0 when there
// is no work.
double plan_imbalance(const int64_t *work, int32_t num_ranks);

#endif
