// Plans the contents of each step and micro-batch, from document lengths and loss masks alone, and
// which rank works on which micro-batch.
//
//   stream    documents in an order keyed by (seed, epoch); a document longer than max_seqlen
//             becomes segments of at most max_seqlen tokens; with a loss mask, documents and
//             segments without a target are left out: nothing in them has a gradient
//   step      the longest prefix of the stream with at most
//             floor(fill * num_micro * micro_batch_tokens) tokens
//   packing   longest segment first, each into the micro-batch with the least work among those with
//             room
//
// A step is the same for any number of ranks; the layout only changes the grouping into
// micro-batches. The state is a cursor for each source; planning again from the same state gives
// the same plan on any machine (integer arithmetic only).
#ifndef UNPAD_PLAN_H
#define UNPAD_PLAN_H

#include "../base/error.h"
#include "../shards/sources.h"
#include "batch.h"

typedef struct {
    int64_t num_docs;
    int64_t (*length)(const void *context, int64_t doc);  // tokens of a document, >= 1
    const void *context;
    // Of tokens [from, from + n) of a document, from >= 1, how many are targets; NULL: all
    int64_t (*targets)(const void *context, int64_t doc, int64_t from, int64_t n);
    int64_t first_doc;       // documents are first_doc .. first_doc + num_docs - 1
    const Sources *sources;  // of these documents; NULL: one
} DocIndex;

// Policy for documents longer than max_seqlen
typedef enum { LONG_SPLIT, LONG_TRUNCATE, LONG_DROP, LONG_ERROR } LongDocs;

typedef struct {
    uint64_t seed;
    int32_t max_seqlen;          // the longest segment, and the row of padded, rows and repad
    int32_t micro_batch_tokens;  // the buffer of one micro-batch, >= max_seqlen
    int32_t num_micro;           // micro-batches of a step, all ranks together
    int32_t fill_ppm;            // fill in millionths: fraction of the buffers that a step may use
    int64_t set_tokens;  // > 0: the most tokens of a step, regardless of fill_ppm (plan_fix_set)
    LongDocs long_docs;
} PlanSettings;

// A position in the stream of one source; {0} is the beginning.
typedef struct {
    int64_t epoch;
    int64_t doc_pos;  // documents of this epoch that are used up
    int64_t tok_off;  // tokens of the next one that are used up
    int64_t tokens;   // of all segments so far
    int64_t counted;  // for its share: those since the weights were last changed
} SourceCursor;

// Everything a run must remember about its position in the data; {0} is the beginning.
typedef struct {
    int64_t step;
    SourceCursor sources[MAX_SOURCES];
} PlanState;

// Part of a document, or all of it
typedef struct {
    int64_t doc, tok_off;  // its tokens are tok_off .. tok_off + length - 1 of the document
    int32_t length;
    bool has_next;  // the token after it is the target of its last token
} Segment;

// Documents longer than max_seqlen, by what happened to them; documents whose mask leaves them no
// target; and the tokens that were left out
typedef struct {
    int64_t docs_split, docs_truncated, docs_dropped, docs_without_target, tokens_left_out;
} LongCounts;

typedef struct {
    Layout layout;
    int32_t num_micro;     // packed: settings' num_micro; other layouts: as many as needed
    int64_t num_segments;  // in the micro-batches; rows may cut those of the stream
    Segment *segments;     // (num_segments) grouped by micro-batch
    int64_t *micro_start;  // (num_micro + 1) into segments
    int64_t *micro_work;   // (num_micro) see plan_work
    // of the whole step, the same in every layout
    int64_t num_stream;
    Segment *stream;  // (num_stream) in the order of the stream
    int64_t num_targets, real_tokens;
    bool masked;             // loss masks decide which tokens are targets
    const Sources *sources;  // the index's
    int32_t longest_segment;
    PlanState cursor_after;  // where the next step begins
    // of all micro-batches of this layout
    int64_t buffer_tokens;    // rows that they have room for
    int64_t attention_pairs;  // that attention computes
    int64_t padded_pairs;     // that it would compute in padded
    // kept from step to step, for packing
    uint64_t *order;  // (num_stream) indices of the stream by falling length
    int32_t *bin;     // (num_stream) micro-batch of each, in that order
    int64_t *room;    // (num_micro) tokens that still fit
    size_t stream_capacity, order_capacity, bin_capacity, segment_capacity, micro_capacity;
} StepPlan;

enum { PLAN_MAX_SEQLEN = 1 << 24 };

// ------------------------------------------------------------------------------------------------
// Settings

// EXIT_USAGE when a value is out of range.
bool plan_settings_check(const PlanSettings *s, Error *err);

// Predicted work of a segment: linear layers of its tokens, and attention in tiles of 128 x 128.
// The ratio is that of SmolLM2-135M, where both are equal at 4,400 tokens.
int64_t plan_work(int64_t length);

// The most tokens that a step may use.
int64_t plan_goal(const PlanSettings *s);

// ------------------------------------------------------------------------------------------------
// The stream

// The segment at *at of the documents as one source; advances *at past it and adds to *counts.
// EXIT_BAD_INPUT when the policy forbids a document, or nothing is left of all of them;
// EXIT_CHECKPOINT_MISFIT when *at is not a position in them.
bool plan_next_segment(const DocIndex *index, const PlanSettings *s, SourceCursor *at,
                       Segment *segment, LongCounts *counts, Error *err);

// The counts of a whole data set, for the summary at the start. Fails where training would fail at
// the first of the long documents.
bool plan_count_left_out(const DocIndex *index, const PlanSettings *s, LongCounts *out, Error *err);

// ------------------------------------------------------------------------------------------------
// A step

// Plans the step at *state. *plan is {0} at first, may be used again, and is freed by plan_free.
// EXIT_CHECKPOINT_MISFIT when the state is not a position in this data, EXIT_BAD_INPUT when the
// data has nothing to train on.
bool plan_step(StepPlan *plan, const DocIndex *index, const PlanSettings *s, Layout layout,
               const PlanState *state, Error *err);
void plan_free(StepPlan *p);

// The micro-batches of one rank into out (num_micro), in the order in which it works on them;
// returns how many. *imbalance: the largest predicted work of a rank over the mean, 1 is even.
// num_leaves 0: heaviest micro-batch first, in rounds of num_ranks, so that those computed at the
// same time are alike; in each round the heaviest goes to the rank with the least work so far.
// num_leaves > 0, for deterministic reduction: each rank has a contiguous block of the leaves of
// its sums (sum_tree.h), and their micro-batches in order.
int32_t plan_rank_micros(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                         int32_t *out, double *imbalance);

// Settings for a fixed set of documents instead of steps: the first whole documents of the first
// epoch, at most most_tokens; of a first document longer than that, its first segments, at least
// one. Sets s->set_tokens and s->num_micro so that plan_step from {0} gives the whole set and
// nothing else, packed into about as few micro-batches as hold it.
bool plan_fix_set(PlanSettings *s, const DocIndex *index, int64_t most_tokens, Error *err);

#endif
