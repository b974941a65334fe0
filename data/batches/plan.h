// What goes into which step and micro-batch, from document lengths alone.
//
//   stream    documents in an order keyed by (seed, epoch): a Feistel permutation, which needs no
//             memory; long documents become chunks of at most S = max_seqlen tokens
//   step      the longest prefix of the stream with at most floor(f * M * C) tokens
//   packing   capacity-LPT: longest chunk first, each to the micro-batch with the least work among
//             those with room for it (M micro-batches of C tokens); then exchanges between them
//
// A step does not depend on the number of ranks or on the layout. The state is one cursor; a plan
// made again from the same state is the same plan, on any machine (integer work, no floating
// point).
#ifndef UNPAD_PLAN_H
#define UNPAD_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "batch.h"

typedef struct {
    int64_t num_docs;
    int64_t (*length)(const void *context, int64_t doc);  // tokens of a document, >= 1
    const void *context;
} DocIndex;

typedef enum { LONG_SPLIT, LONG_TRUNCATE, LONG_DROP, LONG_ERROR } LongDocs;

typedef struct {
    uint64_t seed;
    int32_t max_seqlen;  // S: the longest chunk, and the row of padded, rows and repad
    int32_t capacity;    // C: tokens of one micro-batch's buffer, >= S
    int32_t num_micro;   // M: micro-batches of a step, all ranks together
    int32_t fill_ppm;    // f in millionths
    int64_t set_tokens;  // > 0: the most tokens of a step, instead of what f allows (plan_fix_set)
    LongDocs long_docs;  // what becomes of documents longer than S
    // work of l tokens = l * work_token + n * (n + 1) / 2 * work_tile, n = ceil(l / work_side).
    // Token and tile 0: documents in the order they come, see plan_pack_arrival.
    int32_t work_token, work_tile, work_side;
} PlanSettings;

// All that a run must remember about its data; {0} is the beginning.
typedef struct {
    int64_t epoch, doc_pos, tok_off, step;
} PlanState;

typedef struct {
    int64_t doc, tok_off;
    int32_t length;
    bool has_next;  // the document goes on: its token tok_off + length is this chunk's last target
} Chunk;

typedef struct {
    int64_t key;
    int32_t id;
} HeapItem;

typedef struct {
    HeapItem *items;
    int32_t n;
} Heap;

typedef struct {
    int64_t work;
    int32_t chunk, length;  // chunk: in sorted order
} PlanMember;

typedef struct {
    Layout layout;
    int32_t num_micro;  // packed: M; other layouts: as many as the chunks need
    int64_t num_chunks;
    Chunk *chunks;         // grouped by micro-batch
    int64_t *micro_start;  // (num_micro + 1) into chunks
    int64_t *micro_work;   // (num_micro) work, see PlanSettings
    // of the whole step, the same in every layout
    int64_t num_stream;  // chunks before any layout cut them, in stream order
    Chunk *stream;
    int64_t num_targets, real_tokens;
    int32_t longest_chunk;
    PlanState cursor_after;
    // documents longer than S in this step, by what was done, and the tokens that were left out
    int64_t docs_split, docs_truncated, docs_dropped, tokens_left_out;
    bool used_fallback;
    // scratch, grown when needed
    size_t stream_capacity, chunk_capacity, micro_capacity;
    uint64_t *order;      // (num_stream) sort keys: length descending, then stream index
    int32_t *bin;         // (num_stream) micro-batch of each, in sorted order
    int64_t *micro_free;  // (num_micro)
    Heap fitting, full;
    int32_t *first, *next;  // (num_micro), (num_stream) lists of a micro-batch's, in sorted order
    PlanMember *members;    // (num_stream) of two micro-batches
} StepPlan;

enum { PLAN_MAX_SEQLEN = 1 << 24, PLAN_MAX_WORK = 1000000, PLAN_MAX_SIDE = 1 << 12 };

// -------------------------------------------------------------------------------------------------
// Settings

PlanSettings plan_settings(void);
int64_t plan_work(const PlanSettings *s, int64_t length);
bool plan_settings_check(const PlanSettings *s, Error *err);

// "TOKEN:TILE" or "TOKEN:TILE:SIDE" into the settings; false when the text is something else.
bool plan_work_cost_parse(const char *text, PlanSettings *s);

// The most tokens a step takes: floor(f * M * C).
int64_t plan_goal(const PlanSettings *s);

// Documents longer than max_seqlen, and their tokens beyond it.
void plan_count_long(const DocIndex *index, int32_t max_seqlen, int64_t *docs,
                     int64_t *tokens_beyond);

// -------------------------------------------------------------------------------------------------
// The prefix of the stream that is a step

// What happened to long documents on the way to a chunk; counted once the chunk is taken.
typedef struct {
    int64_t docs_split, docs_truncated, docs_dropped, tokens_left_out;
} LongCounts;

// The chunk at *at; moves *at behind it. Fails when the policy says so or when no document is left.
bool plan_next_chunk(const DocIndex *index, const PlanSettings *s, PlanState *at, Chunk *chunk,
                     LongCounts *counts, Error *err);

// What becomes of the long documents of a whole data set: for the summary at the start. Fails where
// training would fail at the first of them.
bool plan_count_left_out(const DocIndex *index, const PlanSettings *s, LongCounts *out, Error *err);
void plan_reserve_chunks(StepPlan *p, size_t n);
void plan_reserve_micros(StepPlan *p, size_t n);

// -------------------------------------------------------------------------------------------------
// The order of chunks, and steps that do not fit at once

// Chunks grouped by p->bin; inside a micro-batch they stay longest first.
void plan_group_bins(StepPlan *p, const PlanSettings *s);

// Takes at most max_chunks chunks and packs them into *fits; false is an error.
bool plan_try(StepPlan *p, const DocIndex *index, const PlanSettings *s, const PlanState *state,
              int64_t max_chunks, bool *fits, Error *err);

// -------------------------------------------------------------------------------------------------
// The whole

// Plans the step at *state. `plan` is {0} at first and may be used again; plan_free at the end.
bool plan_step(StepPlan *plan, const DocIndex *index, const PlanSettings *s, Layout layout,
               const PlanState *state, Error *err);
void plan_free(StepPlan *p);

// A fixed set of documents instead of steps: the first of the first epoch, at most most_tokens
// (plan_first_documents). Fills in s->set_tokens and s->num_micro, with which plan_step from {0}
// gives all of the set and nothing else, packed into about as few micro-batches as hold it.
bool plan_fix_set(PlanSettings *s, const DocIndex *index, int64_t most_tokens, Error *err);

#endif
