// Which rank computes which micro-batch, and how equal their work is.
#ifndef UNPAD_DISTRIBUTE_H
#define UNPAD_DISTRIBUTE_H

#include <stdint.h>

#include "plan.h"

// A rank for every micro-batch: order (num_micro) lists them heaviest first, owner (num_micro) the
// rank of each in that list. In rounds of num_ranks: what runs at the same time is alike, and each
// round's heaviest goes to the rank with the least work so far.
void plan_assign_ranks(const StepPlan *p, int32_t num_ranks, int32_t *order, int32_t *owner);

// Micro-batches of one rank into out (num_micro), heaviest first; returns how many. Every
// micro-batch has exactly one rank.
int32_t plan_rank_micros(const StepPlan *p, int32_t rank, int32_t num_ranks, int32_t *out);

// Micro-batches of one rank into out (num_micro), in order, for sums over num_leaves leaves.
int32_t plan_rank_block(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                        int32_t *out);

// -------------------------------------------------------------------------------------------------
// Balance

// Predicted work of every rank into work (num_ranks), shared out as by plan_rank_micros.
void plan_rank_work(const StepPlan *p, int32_t num_ranks, int64_t *work);

// The same, shared out as by plan_rank_block.
void plan_block_work(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, int64_t *work);

// The largest over the mean: 1 is even, num_ranks is one rank doing everything; 0 when nothing is
// known.
double plan_imbalance(const int64_t *work, int32_t num_ranks);

#endif
