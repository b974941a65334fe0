// Packing: which segment of a step goes into which micro-batch. Only for plan_step and its tests.
#ifndef UNPAD_PACKING_H
#define UNPAD_PACKING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/heap.h"
#include "plan.h"

typedef struct {
    int64_t work;
    int32_t segment, length;  // segment: index in sorted order
} PlanMember;

// Memory kept from step to step. A bin is a micro-batch being filled; "sorted" is the order of
// plan_sort.
struct PlanScratch {
    size_t stream_capacity, segment_capacity, micro_capacity;
    uint64_t *order;      // (num_stream) sort keys: length descending, then stream index
    int32_t *bin;         // (num_stream) the bin of each segment, sorted
    int64_t *bin_free;    // (num_micro) tokens that still fit
    Heap fitting, full;   // (num_micro) bins
    int32_t *first;       // (num_micro) lists of the sorted segments in each bin; -1: end
    int32_t *next;        // (num_stream)
    PlanMember *members;  // (num_stream) segments of two bins
};

// Room for n segments of the stream, or in micro-batches, or for n micro-batches.
void plan_reserve_stream(StepPlan *p, size_t n);
void plan_reserve_segments(StepPlan *p, size_t n);
void plan_reserve_micros(StepPlan *p, size_t n);

// Segment i in sorted order.
Segment *plan_sorted_segment(const StepPlan *p, int64_t i);

// Sorts by falling length; without a cost model, keeps the order of the stream.
void plan_sort(StepPlan *p, const PlanSettings *s);

// The packers assign a bin to every sorted segment, and set micro_work and bin_free. False when a
// segment fits nowhere.

// Each segment into the bin with the least work among those it fits in, in O(n log M): `fitting`
// holds, by work, the bins with room for the current length, `full` the others by room. Lengths
// only decrease, so a bin that fits keeps fitting until a segment is added to it.
bool plan_pack_lpt(StepPlan *p, const PlanSettings *s);

// Arrival-order greedy packing, each segment into the bin with the most room: what a packer without
// a cost model does; a baseline for comparison only.
bool plan_pack_arrival(StepPlan *p, const PlanSettings *s);

// Best-fit-decreasing, each segment into the fullest bin it fits in: the fallback for steps that
// LPT cannot place.
bool plan_pack_best_fit(StepPlan *p, const PlanSettings *s);

// ------------------------------------------------------------------------------------------------
// Exchanges. Where room runs out, LPT stays uneven: bins of short segments are full and light,
// those with long ones heavy with room to spare. Exchanging one segment of the heaviest bin for one
// or two of a lighter one, with about as many tokens, moves attention work and hardly any tokens.

enum {
    PLAN_EVEN = 512,           // even enough: the heaviest within 1/512 of the mean
    PLAN_MAX_TRIED = 1 << 22,  // exchanges tried per step: some hundredths of a second
};

typedef struct {
    int32_t x, y, z;   // sorted segments: x of the heavy bin, y and z (-1: none) of the light one
    int64_t heaviest;  // work of the heavier bin afterwards
} PlanExchange;

// Fills in first and next.
void plan_make_lists(StepPlan *p, const PlanSettings *s);

// The first of the best exchanges; x = -1 when none helps. One only helps when the work it moves is
// more than zero and less than the difference of the bins, which bounds the search in the sorted
// members. Adds the exchanges tried to *tried.
PlanExchange plan_best_exchange(StepPlan *p, const PlanSettings *s, int32_t heavy, int32_t light,
                                int64_t *tried);

// Exchanges until the bins are even or no exchange helps.
void plan_even_out(StepPlan *p, const PlanSettings *s);

// Copies the stream into p->segments, grouped by bin; inside a bin, in sorted order.
void plan_group_bins(StepPlan *p, const PlanSettings *s);

#endif
