// Packing: which chunk of a step goes into which micro-batch.
#ifndef UNPAD_PACKING_H
#define UNPAD_PACKING_H

#include <stdbool.h>
#include <stdint.h>

#include "plan.h"

// -------------------------------------------------------------------------------------------------
// A binary heap, smallest (key, id) first

void heap_push(Heap *h, int64_t key, int32_t id);
HeapItem heap_pop(Heap *h);

// -------------------------------------------------------------------------------------------------
// Packing: p->bin for the chunks in sorted order

Chunk *plan_sorted_chunk(const StepPlan *p, int64_t i);

// Longest first; without costs as they come.
void plan_sort(StepPlan *p, const PlanSettings *s);

// Each chunk to the bin with the least work of those it fits in, in O(n log M): `fitting` holds the
// bins with room for the current length by work, `full` the others by room. Lengths only go down,
// so a bin that fits keeps fitting until something is put in it. False when a chunk fits nowhere.
bool plan_pack_lpt(StepPlan *p, const PlanSettings *s);

// Each chunk to the bin with the most room: what a packer does that counts tokens and takes
// documents as they come. Only for comparison.
bool plan_pack_arrival(StepPlan *p, const PlanSettings *s);

// Best-fit-decreasing: each chunk to the fullest bin it fits in. Only for steps that LPT cannot
// place.
bool plan_pack_best_fit(StepPlan *p, const PlanSettings *s);

// -------------------------------------------------------------------------------------------------
// Exchanges. Where room runs out LPT stays uneven: micro-batches of short chunks are full and
// light, those with long ones heavy with room to spare. One chunk of the heaviest against one or
// two of a lighter micro-batch, of about as many tokens together, moves attention and hardly any
// tokens.

enum {
    PLAN_EVEN = 512,          // even enough: the heaviest within 1/512 of the mean
    PLAN_MAX_LOOKS = 1 << 22  // of one step: some hundredths of a second
};

typedef struct {
    int32_t x, y, z;  // sorted chunks: x of the heavy one, y and z (-1: none) of the light one
    int64_t heaviest;
} PlanExchange;

void plan_make_lists(StepPlan *p, const PlanSettings *s);

// The first of the best exchanges; x = -1 when none helps. One helps only when it moves more than
// no work and less than the difference: of the members, which are in falling order, those between.
PlanExchange plan_best_exchange(StepPlan *p, const PlanSettings *s, int32_t heavy, int32_t light,
                                int64_t *looks);
void plan_even_out(StepPlan *p, const PlanSettings *s);

#endif
