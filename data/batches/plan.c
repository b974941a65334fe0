#include "plan.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/memory.h"
#include "batch.h"
#include "layouts.h"
#include "packing.h"
#include "permute.h"

// -------------------------------------------------------------------------------------------------
// Settings

PlanSettings plan_settings(void) {
    PlanSettings s;
    memset(&s, 0, sizeof s);
    s.seed = 1;
    s.max_seqlen = 2048;
    s.capacity = 16384;
    s.num_micro = 1;
    s.fill_ppm = 970000;
    s.long_docs = LONG_SPLIT;
    s.work_token = 100;  // one token's linear layers against one 128 x 128 attention tile:
    s.work_tile = 745;   // equal cost per token at length 4400, SmolLM2-135M
    s.work_side = 128;
    return s;
}

int64_t plan_work(const PlanSettings *s, int64_t length) {
    const int64_t tiles = (length + s->work_side - 1) / s->work_side;
    return length * s->work_token + tiles * (tiles + 1) / 2 * s->work_tile;
}

// The work of a step, which is largest when all chunks are, must be an int64.
static bool plan_work_check(const PlanSettings *s, Error *err) {
    const double n = (double)s->max_seqlen / s->work_side + 1,
                 chunks = (double)s->capacity / s->max_seqlen * s->num_micro;
    const double work = chunks * ((double)s->max_seqlen * s->work_token + n * n * s->work_tile);
    return work < 0x1p62 ||
           error_set(err, EXIT_USAGE, "give smaller numbers in the same ratio, or larger tiles",
                     "work: %d:%d:%d adds up to more than 2^62 in a step", s->work_token,
                     s->work_tile, s->work_side);
}

bool plan_settings_check(const PlanSettings *s, Error *err) {
    if (s->max_seqlen < 1 || s->max_seqlen > PLAN_MAX_SEQLEN)
        return error_set(err, EXIT_USAGE, "", "max_seqlen: expected 1 to %d, found %d",
                         PLAN_MAX_SEQLEN, s->max_seqlen);
    if (s->capacity < s->max_seqlen || s->capacity > BATCH_MAX_ROWS)
        return error_set(err, EXIT_USAGE, "a micro-batch must hold the longest chunk",
                         "tokens per micro-batch: expected %d (max_seqlen) to %d, found %d",
                         s->max_seqlen, BATCH_MAX_ROWS, s->capacity);
    if (s->num_micro < 1 || s->num_micro > 1 << 20)
        return error_set(err, EXIT_USAGE, "", "micro-batches per step: expected 1 to %d, found %d",
                         1 << 20, s->num_micro);
    if (s->fill_ppm < 1 || s->fill_ppm > 1000000)
        return error_set(err, EXIT_USAGE, "", "fill: expected more than 0 and at most 1, found %g",
                         s->fill_ppm / 1e6);
    if ((unsigned)s->long_docs > LONG_ERROR)
        return error_set(err, EXIT_USAGE, "", "long_docs: unknown policy %d", (int)s->long_docs);
    const bool no_cost = s->work_token == 0 && s->work_tile == 0;
    if ((s->work_token < 1 && !no_cost) || s->work_token > PLAN_MAX_WORK || s->work_tile < 0 ||
        s->work_tile > PLAN_MAX_WORK)
        return error_set(err, EXIT_USAGE, "make calibrate measures it for a model and a machine",
                         "work: expected 1 to %d and 0 to %d, found %d and %d", PLAN_MAX_WORK,
                         PLAN_MAX_WORK, s->work_token, s->work_tile);
    if (s->work_side < 1 || s->work_side > PLAN_MAX_SIDE)
        return error_set(err, EXIT_USAGE, "", "side of a tile: expected 1 to %d tokens, found %d",
                         PLAN_MAX_SIDE, s->work_side);
    return plan_work_check(s, err);
}

bool plan_work_cost_parse(const char *text, PlanSettings *s) {
    int two = 0, three = 0;
    const int n =
        sscanf(text, "%7d:%7d%n:%7d%n", &s->work_token, &s->work_tile, &two, &s->work_side, &three);
    return n >= 2 && text[n == 3 ? three : two] == 0;
}

int64_t plan_goal(const PlanSettings *s) {
    if (s->set_tokens > 0) return s->set_tokens;
    const int64_t tokens = (int64_t)s->num_micro * s->capacity;  // < 2^50
    return tokens / 1000000 * s->fill_ppm + tokens % 1000000 * s->fill_ppm / 1000000;
}

void plan_count_long(const DocIndex *index, int32_t max_seqlen, int64_t *docs,
                     int64_t *tokens_beyond) {
    *docs = *tokens_beyond = 0;
    for (int64_t i = 0; i < index->num_docs; i++) {
        const int64_t length = index->length(index->context, i);
        if (length <= max_seqlen) continue;
        ++*docs;
        *tokens_beyond += length - max_seqlen;
    }
}

static bool plan_state_check(const DocIndex *index, const PlanSettings *s, const PlanState *at,
                             Error *err) {
    bool good = at->epoch >= 0 && at->step >= 0 && at->doc_pos >= 0 && at->tok_off >= 0 &&
                at->doc_pos <= index->num_docs;
    if (good && at->tok_off > 0) {
        good = at->doc_pos < index->num_docs && s->long_docs == LONG_SPLIT;
        const int64_t doc =
            good ? plan_permute(s->seed, at->epoch, index->num_docs, at->doc_pos) : 0;
        good = good && at->tok_off < index->length(index->context, doc);
    }
    if (good) return true;
    return error_set(err, EXIT_CHECKPOINT_MISFIT, "resume with the data and flags it was made with",
                     "data position: epoch %lld, document %lld, token %lld is not one of %lld "
                     "documents",
                     (long long)at->epoch, (long long)at->doc_pos, (long long)at->tok_off,
                     (long long)index->num_docs);
}

// -------------------------------------------------------------------------------------------------
// The prefix of the stream that is a step

static bool plan_nothing_left(const DocIndex *index, const PlanSettings *s, Error *err) {
    return error_set(err, EXIT_BAD_INPUT, "raise --max-seqlen, or use --long-docs split",
                     "data: all %lld documents are longer than max_seqlen %d, and all are dropped",
                     (long long)index->num_docs, s->max_seqlen);
}

static bool plan_too_long(const PlanSettings *s, int64_t doc, int64_t length, Error *err) {
    return error_set(err, EXIT_BAD_INPUT,
                     "raise --max-seqlen, or use --long-docs split, truncate or drop",
                     "data: document %lld has %lld tokens, expected at most %d", (long long)doc,
                     (long long)length, s->max_seqlen);
}

bool plan_next_chunk(const DocIndex *index, const PlanSettings *s, PlanState *at, Chunk *chunk,
                     LongCounts *counts, Error *err) {
    for (int64_t visited = 0; visited < 2 * index->num_docs; visited++) {
        if (at->doc_pos >= index->num_docs) {
            at->epoch++;
            at->doc_pos = at->tok_off = 0;
        }
        const int64_t doc = plan_permute(s->seed, at->epoch, index->num_docs, at->doc_pos);
        const int64_t length = index->length(index->context, doc);
        const int64_t rest = length - at->tok_off;
        const bool is_long = length > s->max_seqlen;
        assert(rest > 0);
        if (is_long && s->long_docs == LONG_ERROR) return plan_too_long(s, doc, length, err);
        if (is_long && s->long_docs == LONG_DROP) {
            counts->docs_dropped++;
            counts->tokens_left_out += length;
            at->doc_pos++;
            continue;
        }
        chunk->doc = doc;
        chunk->tok_off = at->tok_off;
        chunk->length = rest < s->max_seqlen ? (int32_t)rest : s->max_seqlen;
        chunk->has_next = s->long_docs == LONG_SPLIT && chunk->length < rest;
        if (is_long && s->long_docs == LONG_TRUNCATE) {
            counts->docs_truncated++;
            counts->tokens_left_out += length - s->max_seqlen;
        }
        if (chunk->has_next && at->tok_off == 0) counts->docs_split++;
        at->tok_off = chunk->has_next ? at->tok_off + chunk->length : 0;
        at->doc_pos += !chunk->has_next;
        return true;
    }
    return plan_nothing_left(index, s, err);
}

bool plan_count_left_out(const DocIndex *index, const PlanSettings *s, LongCounts *out,
                         Error *err) {
    memset(out, 0, sizeof *out);
    for (int64_t doc = 0; doc < index->num_docs; doc++) {
        const int64_t length = index->length(index->context, doc);
        if (length <= s->max_seqlen) continue;
        if (s->long_docs == LONG_ERROR) return plan_too_long(s, doc, length, err);
        out->docs_split += s->long_docs == LONG_SPLIT;
        out->docs_truncated += s->long_docs == LONG_TRUNCATE;
        out->docs_dropped += s->long_docs == LONG_DROP;
        if (s->long_docs == LONG_TRUNCATE) out->tokens_left_out += length - s->max_seqlen;
        if (s->long_docs == LONG_DROP) out->tokens_left_out += length;
    }
    return out->docs_dropped < index->num_docs || plan_nothing_left(index, s, err);
}

static void plan_reserve_stream(StepPlan *p, size_t n) {
    size_t capacity = p->stream_capacity;
    p->stream = host_grow(p->stream, &capacity, n, sizeof(Chunk), "the step plan");
    capacity = p->stream_capacity;
    p->order = host_grow(p->order, &capacity, n, sizeof(uint64_t), "the step plan");
    capacity = p->stream_capacity;
    p->bin = host_grow(p->bin, &capacity, n, sizeof(int32_t), "the step plan");
    capacity = p->stream_capacity;
    p->next = host_grow(p->next, &capacity, n, sizeof(int32_t), "the step plan");
    capacity = p->stream_capacity;
    p->members = host_grow(p->members, &capacity, n, sizeof(PlanMember), "the step plan");
    p->stream_capacity = capacity;
}

void plan_reserve_chunks(StepPlan *p, size_t n) {
    p->chunks = host_grow(p->chunks, &p->chunk_capacity, n, sizeof(Chunk), "the step plan");
}

void plan_reserve_micros(StepPlan *p, size_t n) {
    static const char what[] = "the step plan";
    size_t c0 = p->micro_capacity, c1 = c0, c2 = c0, c3 = c0, c4 = c0, c5 = c0;
    p->micro_start = host_grow(p->micro_start, &c0, n + 1, sizeof(int64_t), what);
    p->micro_work = host_grow(p->micro_work, &c1, n + 1, sizeof(int64_t), what);
    p->micro_free = host_grow(p->micro_free, &c2, n + 1, sizeof(int64_t), what);
    p->fitting.items = host_grow(p->fitting.items, &c3, n + 1, sizeof(HeapItem), what);
    p->full.items = host_grow(p->full.items, &c4, n + 1, sizeof(HeapItem), what);
    p->first = host_grow(p->first, &c5, n + 1, sizeof(int32_t), what);
    p->micro_capacity = c0;
}

// Fills p->stream with the longest prefix of at most `goal` tokens and `max_chunks` chunks, and
// with the first chunk in any case.
static bool plan_take_prefix(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                             const PlanState *state, int64_t goal, int64_t max_chunks, Error *err) {
    LongCounts counts;
    memset(&counts, 0, sizeof counts);
    PlanState at = *state;
    p->num_stream = p->num_targets = p->real_tokens = p->longest_chunk = 0;
    p->docs_split = p->docs_truncated = p->docs_dropped = p->tokens_left_out = 0;
    p->cursor_after = at;
    while (p->num_stream < max_chunks) {
        Chunk chunk;
        if (!plan_next_chunk(index, s, &at, &chunk, &counts, err)) return false;
        if (p->num_stream > 0 && p->real_tokens + chunk.length > goal) break;
        plan_reserve_stream(p, (size_t)p->num_stream + 1);
        p->stream[p->num_stream++] = chunk;
        p->real_tokens += chunk.length;
        p->num_targets += chunk.length - 1 + chunk.has_next;
        if (chunk.length > p->longest_chunk) p->longest_chunk = chunk.length;
        p->docs_split = counts.docs_split;
        p->docs_truncated = counts.docs_truncated;
        p->docs_dropped = counts.docs_dropped;
        p->tokens_left_out = counts.tokens_left_out;
        p->cursor_after = at;
    }
    p->cursor_after.step = state->step + 1;
    return true;
}

// -------------------------------------------------------------------------------------------------
// The order of chunks, and steps that do not fit at once

void plan_group_bins(StepPlan *p, const PlanSettings *s) {
    plan_reserve_chunks(p, (size_t)p->num_stream);
    p->num_micro = s->num_micro;
    p->num_chunks = p->num_stream;
    for (int32_t b = 0; b <= s->num_micro; b++) p->micro_start[b] = 0;
    for (int64_t i = 0; i < p->num_stream; i++) p->micro_start[p->bin[i] + 1]++;
    for (int32_t b = 0; b < s->num_micro; b++) p->micro_start[b + 1] += p->micro_start[b];
    int64_t *cursor = p->micro_free;  // no longer needed as room
    for (int32_t b = 0; b < s->num_micro; b++) cursor[b] = p->micro_start[b];
    for (int64_t i = 0; i < p->num_stream; i++)
        p->chunks[cursor[p->bin[i]]++] = *plan_sorted_chunk(p, i);
}

bool plan_try(StepPlan *p, const DocIndex *index, const PlanSettings *s, const PlanState *state,
              int64_t max_chunks, bool *fits, Error *err) {
    if (!plan_take_prefix(p, index, s, state, plan_goal(s), max_chunks, err)) return false;
    plan_sort(p, s);
    *fits = s->work_token > 0 ? plan_pack_lpt(p, s) : plan_pack_arrival(p, s);
    if (!*fits) {
        p->used_fallback = true;
        *fits = plan_pack_best_fit(p, s);
    }
    if (*fits && s->work_token > 0) plan_even_out(p, s);
    return true;
}

// The step, packed. When its prefix does not fit, its last chunks are left to the next step: 1,
// then 2, 4, ... more until the rest fits (one chunk always does); bisection then takes back what
// it can.
static bool plan_packed(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                        const PlanState *state, Error *err) {
    bool fits = false;
    p->used_fallback = false;
    if (!plan_try(p, index, s, state, INT32_MAX, &fits, err)) return false;
    if (fits) return true;
    int64_t too_many = p->num_stream, good = 0;
    for (int64_t fewer = 1; !fits; fewer *= 2) {
        good = p->num_stream > fewer ? p->num_stream - fewer : 1;
        if (!plan_try(p, index, s, state, good, &fits, err)) return false;
        if (!fits) too_many = good;
    }
    while (too_many - good > 1) {
        const int64_t middle = good + (too_many - good) / 2;
        if (!plan_try(p, index, s, state, middle, &fits, err)) return false;
        if (fits)
            good = middle;
        else
            too_many = middle;
    }
    return plan_try(p, index, s, state, good, &fits, err);
}

// -------------------------------------------------------------------------------------------------
// The whole

bool plan_step(StepPlan *plan, const DocIndex *index, const PlanSettings *s, Layout layout,
               const PlanState *state, Error *err) {
    if (!plan_settings_check(s, err)) return false;
    if (index->num_docs < 1)
        return error_set(err, EXIT_BAD_INPUT, "", "data: expected documents, found none");
    if (!plan_state_check(index, s, state, err)) return false;
    plan->layout = layout;
    plan_reserve_micros(plan, (size_t)s->num_micro);
    if (!plan_packed(plan, index, s, state, err)) return false;
    plan_group_bins(plan, s);
    if (plan->num_targets == 0)
        return error_set(err, EXIT_BAD_INPUT, "documents of one token teach nothing",
                         "data: a step of %lld documents has no token to predict",
                         (long long)plan->num_stream);
    if (layout == LAYOUT_PADDED || layout == LAYOUT_REPAD) plan_layout_padded(plan, s);
    if (layout == LAYOUT_ROWS) plan_layout_rows(plan, s);
    return true;
}

void plan_free(StepPlan *p) {
    free(p->chunks);
    free(p->stream);
    free(p->order);
    free(p->bin);
    free(p->next);
    free(p->members);
    free(p->first);
    free(p->micro_start);
    free(p->micro_work);
    free(p->micro_free);
    free(p->fitting.items);
    free(p->full.items);
    memset(p, 0, sizeof *p);
}

// Tokens of the whole documents at the beginning of the first epoch that fit into most_tokens; of a
// first document longer than that, tokens of its first chunks, one at least.
static bool plan_first_documents(const DocIndex *index, const PlanSettings *s, int64_t most_tokens,
                                 int64_t *tokens, Error *err) {
    PlanState at = {0, 0, 0, 0};
    LongCounts counts = {0, 0, 0, 0};
    Chunk chunk = {0, 0, 0, false};
    bool first_document = true;
    *tokens = 0;
    for (int64_t so_far = 0;;) {
        if (!plan_next_chunk(index, s, &at, &chunk, &counts, err)) return false;
        if (at.epoch > 0 || (so_far > 0 && so_far + chunk.length > most_tokens)) return true;
        so_far += chunk.length;
        if (first_document || !chunk.has_next) *tokens = so_far;
        first_document = first_document && chunk.has_next;
    }
}

bool plan_fix_set(PlanSettings *s, const DocIndex *index, int64_t most_tokens, Error *err) {
    StepPlan plan;
    PlanState start = {0, 0, 0, 0};
    memset(&plan, 0, sizeof plan);
    s->num_micro = 1;
    if (!plan_settings_check(s, err) ||
        !plan_first_documents(index, s, most_tokens, &s->set_tokens, err))
        return false;
    // where a chunk finds no room, any two micro-batches together hold more than one's capacity
    int64_t low = (s->set_tokens + s->capacity - 1) / s->capacity;
    int64_t high = 2 * s->set_tokens / s->capacity + 2;
    bool ok = true;
    while (ok && low < high) {
        const int64_t middle = low + (high - low) / 2;
        s->num_micro = middle < INT32_MAX ? (int32_t)middle : INT32_MAX;
        ok = plan_step(&plan, index, s, LAYOUT_PACKED, &start, err);
        if (plan.real_tokens == s->set_tokens)
            high = middle;
        else
            low = middle + 1;
    }
    s->num_micro = (int32_t)high;
    plan_free(&plan);
    return ok;
}
