// Which segment of a step goes into which micro-batch, and which micro-batch to which rank.
#ifndef UNPAD_PACKING_H
#define UNPAD_PACKING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "plan.h"

// Room for n segments of the stream, or for n micro-batches.
void plan_reserve_stream(StepPlan *p, size_t n);
void plan_reserve_micros(StepPlan *p, size_t n);

// Longest segment first, each into the micro-batch with the least work among those with room; where
// that leaves a segment without a place, each into the fullest one with room. Groups the stream
// into p->segments by micro-batch, longest first. False: a segment fits nowhere.
bool plan_pack(StepPlan *p, const PlanSettings *s);

// One segment in each row of max_seqlen tokens, as many rows in a micro-batch as it holds.
void plan_layout_padded(StepPlan *p, const PlanSettings *s);

// The stream in rows of max_seqlen tokens; a segment that crosses the end of a micro-batch is cut
// there.
void plan_layout_rows(StepPlan *p, const PlanSettings *s);

// The micro-batches of one rank into out (num_micro), in the order in which it works on them;
// returns how many. *imbalance: the largest predicted work of a rank over the mean, 1 is even.
// num_leaves 0: heaviest micro-batch first, in rounds of num_ranks, so that those computed at the
// same time are alike; in each round the heaviest goes to the rank with the least work so far.
// num_leaves > 0, for deterministic reduction: each rank has a contiguous block of the leaves of
// its sums (sum_tree.h), and their micro-batches in order.
int32_t plan_rank_micros(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                         int32_t *out, double *imbalance);

#endif
