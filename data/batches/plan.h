// Plans the contents of each step and micro-batch, from document lengths and loss masks alone, and
// which rank works on which micro-batch.
//
//   step      the longest prefix of the stream with at most
//             floor(fill * num_micro * micro_batch_tokens) tokens, or with as many segments as fit
//             even if each has max_seqlen tokens; it cuts a record only if it begins with it
//   packing   longest segment first, each into the micro-batch with the least work among those with
//             room; shared: in as few micro-batches as hold it, a leader and its borrowers as one,
//             and what only a record has in common in one micro-batch if it fits
//
// A step is the same for any number of ranks; the layout only changes the grouping into
// micro-batches. The state is a cursor for each source; planning again from the same state gives
// the same plan on any machine (integer arithmetic only).
#pragma once

#include "batch.h"
#include "prefixes.h"

// Segments ids[first .. end) of the stream that are placed as one
typedef struct {
    int64_t first, end, length, work;
    int32_t micro;  // the micro-batch that it goes into
} PlanUnit;

typedef struct {
    Layout layout;
    int32_t num_micro;     // packed: of the settings; shared: at most; others: as many as needed
    int64_t num_segments;  // in the micro-batches; rows may cut segments of the stream
    Segment *segments;     // (num_segments) grouped by micro-batch
    int64_t *micro_start;  // (num_micro + 1) into segments
    int64_t *micro_work;   // (num_micro) see plan_work; shared: of computed tokens
    // of the whole step, the same in every layout
    int64_t num_stream;
    Segment *stream;  // (num_stream) in the order of the stream
    int64_t num_targets, real_tokens;
    // of the magnitudes of the targets' weights, each times weight_scale; with pairs, their number
    double weight_sum;
    double weight_scale;     // a power of two that makes them about 1, so that sums stay in a float
    bool masked;             // loss masks decide which tokens are targets
    const Sources *sources;  // the index's
    int32_t longest_segment;
    PlanState cursor_after;  // where the next step begins
    // of all micro-batches of this layout
    int64_t buffer_tokens;                // rows that they have room for
    int64_t computed_tokens;              // real_tokens, less the shared ones
    int64_t attention_pairs;              // that attention computes
    int64_t padded_tokens, padded_pairs;  // the same of the padded layout, padding included
    // kept from step to step, for packing
    int64_t num_units;
    PlanUnit *units;           // (num_units) at most num_stream; sorted when placed, longest first
    int64_t *room;             // (num_micro) tokens that still fit
    int32_t *ids, *ids_order;  // (num_stream) of segments of the stream: by unit, by micro-batch
    int32_t *shared;           // (num_stream) what each of ids shares
    Prefixes prefixes;
    size_t stream_capacity, segment_capacity, micro_capacity, unit_capacity, id_capacity;
} StepPlan;

// EXIT_USAGE when a value is out of range.
bool plan_settings_check(const PlanSettings *s, Error *err);

// Predicted work of a segment: linear layers of its tokens, and attention in tiles of 128 x 128.
// Their ratio is taken from SmolLM2-135M, where both are equal at 4,400 tokens.
int64_t plan_work(int64_t length);

// The row length of micro-batch m in the layouts that have rows
int32_t plan_row_len(const StepPlan *p, const PlanSettings *s, int32_t m);

// The most tokens of a step that has more segments than fit whatever their lengths are.
int64_t plan_goal(const PlanSettings *s);

// Plans the step at *state. *plan is {0} at first, may be used again, and is freed by plan_free.
// EXIT_CHECKPOINT_MISFIT when the state is not a position in this data, EXIT_BAD_INPUT when the
// data has nothing to train on.
bool plan_step(StepPlan *plan, const DocIndex *index, const PlanSettings *s, Layout layout,
               const PlanState *state, Error *err);
void plan_free(StepPlan *p);
#define STEP_PLAN __attribute__((cleanup(plan_free))) StepPlan  // freed at the end of its block

// wanted > 0: sets *steps to the number of the first step, at least 1, after which *epochs of the
// data, as mixture_epochs counts them, are at least `wanted`. It plans all steps from `at` on; a
// million documents take about half a second. wanted 0: sets *epochs to how many there are after
// *steps; after many documents it extrapolates.
bool plan_count_epochs(const DocIndex *index, const PlanSettings *s, PlanState at, double wanted,
                       int64_t *steps, double *epochs, int32_t *source, Error *err);

// Writes one rank's micro-batches to out (num_micro), in the order in which it processes them;
// returns their number. *imbalance: the largest predicted work of a rank over the mean, 1 is even.
// num_leaves 0: heaviest micro-batch first, in rounds of num_ranks, so that ranks compute similar
// ones at the same time; in each round the heaviest goes to the rank with the least work so far.
// num_leaves > 0, for deterministic reduction: each rank has a contiguous block of the leaves of
// its sums (sum_tree.h), and their micro-batches in order.
int32_t plan_rank_micros(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                         int32_t *out, double *imbalance);

// Settings for a fixed set of documents instead of steps: the first whole documents of the first
// epoch, at most most_tokens; if the first document is longer, its first segments, at least one.
// Sets s->set_tokens and s->num_micro so that plan_step from {0} gives exactly this set, packed
// into about as few micro-batches as can hold it.
bool plan_fix_set(PlanSettings *s, const DocIndex *index, int64_t most_tokens, Error *err);
