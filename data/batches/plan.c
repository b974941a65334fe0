#include "plan.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/heap.h"
#include "../base/memory.h"
#include "../base/sum_tree.h"

static const char owner[] = "the step plan";

// ---- Settings -----------------------------------------------------------------------------------

int64_t plan_work(int64_t length) {
    enum { TOKEN = 100, TILE = 745, SIDE = 128 };
    const int64_t tiles = (length + SIDE - 1) / SIDE;
    return length * TOKEN + tiles * (tiles + 1) / 2 * TILE;
}

bool plan_settings_check(const PlanSettings *s, Error *err) {
    const struct {
        const char *what;
        int32_t value, least, most;
        const char *hint;
    } limits[] = {
        {"max_seqlen", s->max_seqlen, 1, PLAN_MAX_SEQLEN, ""},
        {"tokens per micro-batch", s->micro_batch_tokens, (1 + s->pairs) * s->max_seqlen,
         BATCH_MAX_ROWS, "a micro-batch must hold the longest segment or pair, by max_seqlen"},
        {"micro-batches per step", s->num_micro, 1, 1 << 20, ""},
        {"fill, in millionths", s->fill_ppm, 1, 1000000, ""},
        {"long_docs", (int32_t)s->long_docs, 0, LONG_ERROR, ""},
    };
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
        if (limits[i].value < limits[i].least || limits[i].value > limits[i].most)
            return error_set(err, EXIT_USAGE, limits[i].hint, "%s: expected %d to %d, found %d",
                             limits[i].what, limits[i].least, limits[i].most, limits[i].value);
    return true;
}

int64_t plan_goal(const PlanSettings *s) {
    if (s->set_tokens > 0) return s->set_tokens;
    const int64_t tokens = (int64_t)s->num_micro * s->micro_batch_tokens;  // < 2^50
    return tokens / 1000000 * s->fill_ppm + tokens % 1000000 * s->fill_ppm / 1000000;
}

// ---- Segments into micro-batches ----------------------------------------------------------------

// Forgets the micro-batches of the step before.
static void plan_reserve(StepPlan *p, int64_t num_segments, int64_t num_micro) {
    const size_t n = (size_t)num_micro + 1;
    array_grow(p->segments, &p->segment_capacity, (size_t)num_segments, owner);
    array_grow(p->micro_start, &p->micro_capacity, 3 * n, owner);
    p->micro_work = p->micro_start + n;
    p->room = p->micro_work + n;
    p->num_segments = num_segments;
    p->num_micro = (int32_t)num_micro;
}

// Equally long ones stay in their order.
static int longest_first(const void *a, const void *b) {
    const PlanUnit *x = a, *y = b;
    if (x->length != y->length) return x->length > y->length ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

// The micro-batch for a unit: the one with the least work, or the least room, of those where it
// fits; -1: none
static int32_t choose_micro(const StepPlan *p, int64_t length, bool fullest) {
    int32_t best = -1;
    const int64_t *by = fullest ? p->room : p->micro_work;
    for (int32_t m = 0; m < p->num_micro; m++)
        if (p->room[m] >= length && (best < 0 || by[m] < by[best])) best = m;
    return best;
}

static bool place_all(StepPlan *p, const PlanSettings *s, bool fullest) {
    for (int32_t m = 0; m < p->num_micro; m++) {
        p->room[m] = s->micro_batch_tokens;
        p->micro_work[m] = 0;
    }
    for (PlanUnit *u = p->units; u < p->units + p->num_units; u++) {
        u->micro = choose_micro(p, u->length, fullest);
        if (u->micro < 0) return false;
        p->room[u->micro] -= u->length;
        p->micro_work[u->micro] += u->work;
    }
    return true;
}

static void group_by_micro(StepPlan *p) {
    const int32_t M = p->num_micro;
    const PlanUnit *u, *end = p->units + p->num_units;
    memset(p->micro_start, 0, ((size_t)M + 1) * sizeof *p->micro_start);
    for (u = p->units; u < end; u++) p->micro_start[u->micro + 1] += u->end - u->first;
    for (int32_t m = 0; m < M; m++) p->micro_start[m + 1] += p->micro_start[m];
    int64_t *at = p->room;  // all are placed: room is no longer needed
    memcpy(at, p->micro_start, (size_t)M * sizeof *at);
    for (u = p->units; u < end; u++)
        for (int64_t k = u->first; k < u->end; k++) {
            p->ids_order[at[u->micro]] = p->ids[k];
            p->segments[at[u->micro]++] = p->stream[p->ids[k]];
        }
}

// Groups p->segments by micro-batch, longest unit first. If a unit finds no room, each goes into
// the fullest micro-batch with room instead. False: one fits nowhere.
static bool place_units(StepPlan *p, const PlanSettings *s, int32_t num_micro) {
    plan_reserve(p, p->num_stream, num_micro);
    qsort(p->units, (size_t)p->num_units, sizeof *p->units, longest_first);
    if (!place_all(p, s, false) && !place_all(p, s, true)) return false;
    group_by_micro(p);
    return true;
}

// The work of a segment after the prefix that it borrows
static int64_t own_work(int32_t length, int32_t shared_len) {
    return plan_work(length) - plan_work(shared_len);
}

// Have ids[i - 1] and ids[i] the same leader and the same record?
static bool goes_on(const StepPlan *p, int64_t i) {
    if (i == 0 || i == p->num_stream || p->shared[i] == 0) return false;
    const int32_t a = p->ids[i - 1], b = p->ids[i], last = a > b ? a : b;
    int32_t k = a < b ? a : b;
    while (k < last && p->stream[k].more) k++;
    return k == last;
}

// Units of a leader and its borrowers, of at most `most` rows where they can be divided, or of
// `room` in one record. A segment then borrows at least what `shared` says from the first of its
// unit. Pairs are units.
static void make_units(StepPlan *p, const PlanSettings *s, int64_t most) {
    const int64_t room = s->micro_batch_tokens;
    PlanUnit *u = p->units;
    for (int64_t i = 0; i < p->num_stream; i++) {
        const int32_t length = p->stream[p->ids[i]].length, shared_len = p->shared[i];
        const bool inside = goes_on(p, i);
        int64_t rows = length - shared_len;  // of a whole record
        for (int64_t k = i + 1; !inside && goes_on(p, k); k++)
            rows += p->stream[p->ids[k]].length - p->shared[k];
        const bool divides =
            i == 0 || shared_len == 0 || u[-1].length + rows > (inside ? room : most);
        if (s->pairs ? i % 2 == 0 : divides)
            *u++ = (PlanUnit){i, i + 1, length, plan_work(length), 0};
        else
            u[-1] = (PlanUnit){u[-1].first, i + 1, u[-1].length + length - shared_len,
                               u[-1].work + own_work(length, shared_len), 0};
    }
    p->num_units = u - p->units;
}

// Packs the step before anything is shared: each segment is a unit.
static bool plan_pack(StepPlan *p, const PlanSettings *s) {
    const size_t n = (size_t)p->num_stream;
    array_grow(p->units, &p->unit_capacity, n, owner);
    array_grow(p->ids, &p->id_capacity, 3 * n, owner);
    p->ids_order = p->ids + n;
    p->shared = p->ids_order + n;
    for (int32_t i = 0; i < p->num_stream; i++) {
        p->ids[i] = i;
        p->shared[i] = 0;
    }
    make_units(p, s, 0);
    return place_units(p, s, s->num_micro);
}

// ---- Shared prefixes ----------------------------------------------------------------------------

// Lets segments borrow inside each micro-batch. False: one has too many rows.
static bool share_in_micros(StepPlan *p, const PlanSettings *s) {
    p->computed_tokens = 0;
    for (int32_t m = 0; m < p->num_micro; m++) {
        const int64_t from = p->micro_start[m], n = p->micro_start[m + 1] - from;
        int64_t rows =
            -prefixes_share(&p->prefixes, p->ids_order + from, p->shared + from, n, s->pairs);
        p->micro_work[m] = 0;
        for (int64_t i = from; i < from + n; i++) {
            Segment *c = &p->segments[i];
            *c = p->stream[p->ids_order[i]];
            c->shared_len = p->shared[i];
            rows += c->length;
            p->micro_work[m] += own_work(c->length, c->shared_len);
        }
        p->computed_tokens += rows;
        if (rows > s->micro_batch_tokens) return false;
    }
    return true;
}

// Lays out the packed step again, in the fewest micro-batches that hold the computed tokens.
// Segments that begin alike stay together, in about even parts if a micro-batch cannot hold all of
// them. Where nothing is shared, or nothing else fits, the micro-batches are as in packed.
static bool plan_layout_shared(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                               Error *err) {
    if (!prefixes_read(&p->prefixes, index, p->stream, p->num_stream, err)) return false;
    const int64_t saved = prefixes_share(&p->prefixes, p->ids, p->shared, p->num_stream, s->pairs),
                  rows = p->real_tokens - saved, room = s->micro_batch_tokens;
    if (saved == 0) return true;
    for (int64_t n = (rows * s->num_micro + p->real_tokens - 1) / p->real_tokens; n <= s->num_micro;
         n += 1 + n / 32) {
        const int64_t even = rows / n + p->longest_segment / 2;  // each has a copy
        if (n > 1) prefixes_share(&p->prefixes, p->ids, p->shared, p->num_stream, s->pairs);
        make_units(p, s, even < room ? even : room);
        if (place_units(p, s, (int32_t)n) && share_in_micros(p, s)) return true;
    }
    const bool fits = plan_pack(p, s) && share_in_micros(p, s);
    assert(fits);
    return fits;
}

// ---- Rows ---------------------------------------------------------------------------------------

static int32_t row_for(const PlanSettings *s, int32_t length) {
    const int32_t rounded = (length + 7) / 8 * 8;
    return s->pad_to == PAD_TO_MAX || rounded > s->max_seqlen ? s->max_seqlen : rounded;
}

// The number of segments, of n, that one micro-batch holds, each in a row of *row_len
static int64_t padded_rows(const PlanSettings *s, const Segment *list, int64_t n,
                           int64_t *row_len) {
    int64_t rows = 0;
    for (*row_len = 0; rows < n; rows++) {
        const int64_t row = row_for(s, list[rows].length), most = row > *row_len ? row : *row_len;
        if ((rows + 1) * most > s->micro_batch_tokens) break;
        *row_len = most;
    }
    if (s->pairs) rows -= rows % 2;
    assert(rows > 0 || n == 0);  // plan_settings_check
    return rows;
}

int32_t plan_row_len(const StepPlan *p, const PlanSettings *s, int32_t m) {
    const int64_t first = p->micro_start[m], n = p->micro_start[m + 1] - first;
    int64_t row_len = s->max_seqlen;
    if (p->layout != LAYOUT_ROWS) padded_rows(s, p->segments + first, n, &row_len);
    return (int32_t)row_len;
}

static int longest_segment_first(const void *a, const void *b) {
    const Segment *x = a, *y = b;
    return (x->length < y->length) - (x->length > y->length);
}

// padded and repad: a row for each segment, in the order of the stream, as a loader that shuffles
// and pads would do it
static void plan_layout_padded(StepPlan *p, const PlanSettings *s) {
    const size_t each = s->pairs ? 2 : 1;
    int64_t row_len;
    plan_reserve(p, p->num_stream, p->num_stream);
    memcpy(p->segments, p->stream, (size_t)p->num_stream * sizeof *p->segments);
    if (s->pad_to == PAD_GROUPED)
        qsort(p->segments, (size_t)p->num_stream / each, each * sizeof *p->segments,
              longest_segment_first);
    p->num_micro = 0;
    for (int64_t i = 0, rows; i < p->num_stream; i += rows) {
        rows = padded_rows(s, p->segments + i, p->num_stream - i, &row_len);
        p->micro_work[p->num_micro] = rows * plan_work(row_len);
        p->micro_start[p->num_micro++] = i;
    }
    p->micro_start[p->num_micro] = p->num_stream;
}

// The stream in rows of max_seqlen tokens, as many in a micro-batch as it holds; a segment that
// crosses the end of a micro-batch is cut there.
static void plan_layout_rows(StepPlan *p, const PlanSettings *s) {
    const int64_t room = (int64_t)(s->micro_batch_tokens / s->max_seqlen) * s->max_seqlen,
                  num_micro = (p->real_tokens + room - 1) / room;
    assert(room > 0);  // plan_settings_check
    plan_reserve(p, p->num_stream + num_micro, num_micro);
    p->num_segments = p->num_micro = 0;
    int64_t left = 0;  // room in the micro-batch being filled
    for (int64_t i = 0; i < p->num_stream; i++) {
        const Segment whole = p->stream[i];
        for (int32_t done = 0; done < whole.length;) {
            if (left == 0) {
                p->micro_start[p->num_micro++] = p->num_segments;
                left = room;
            }
            const int32_t rest = whole.length - done, n = rest < left ? rest : (int32_t)left;
            p->segments[p->num_segments++] =
                (Segment){whole.doc, whole.tok_off + done, n, n < rest || whole.has_next, 0,
                          false,     whole.epoch};
            done += n;
            left -= n;
        }
    }
    p->micro_start[p->num_micro] = p->num_segments;
    for (int32_t m = 0; m < p->num_micro; m++) {
        const int64_t used = m + 1 < p->num_micro ? room : room - left;
        const int64_t rows = (used + s->max_seqlen - 1) / s->max_seqlen;
        p->micro_work[m] = rows * plan_work(s->max_seqlen);
    }
}

// ---- A step -------------------------------------------------------------------------------------

// Fills p->stream with the longest prefix of at most max_segments segments and plan_goal tokens, or
// as many segments as fit whatever their lengths are; a record that ends later is left to the next
// step, but not the first. One-token segments, which have no target, are left out if they would be
// the whole step. is_set: it ends with the first epoch, and with a document or in the first one.
static bool plan_take_prefix(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                             const PlanState *state, int64_t max_segments, bool is_set,
                             Error *err) {
    const int64_t goal = plan_goal(s), rows = s->micro_batch_tokens / s->max_seqlen,
                  sure = s->set_tokens > 0 ? 1 : s->num_micro * rows;
    int64_t whole = 0;  // segments of whole records
    LongCounts counts = {0};
    PlanState at = *state;
    p->num_stream = p->num_targets = p->real_tokens = p->longest_segment = 0;
    while (p->num_stream < max_segments) {
        Segment segment;
        if (!mixture_draw(index, s, &at, &segment, &counts, err)) return false;
        const int64_t n = p->num_stream, doc = n > 0 ? p->stream[n - 1].doc : -1;
        const bool ended = is_set && at.sources[0].epoch > 0,
                   inside = s->pairs && n > 0 && p->stream[n - 1].more;  // a pair
        if (ended ||
            (is_set && n > 0 && !inside && (segment.doc != doc || doc == p->stream[0].doc)))
            whole = n;
        if (ended) break;
        if (p->num_stream >= sure && p->real_tokens + segment.length > goal &&
            !(inside && whole == 0)) {
            if (p->num_targets > 0 || s->set_tokens > 0 || stream_targets(index, &segment) == 0)
                break;
            p->num_stream = p->real_tokens = 0;
        }
        array_grow(p->stream, &p->stream_capacity, (size_t)p->num_stream + 1, owner);
        p->stream[p->num_stream++] = segment;
        p->real_tokens += segment.length;
        p->num_targets += stream_targets(index, &segment);
        if (p->num_targets > 0 && !is_set && (!segment.more || (s->set_tokens > 0 && !s->pairs)))
            whole = p->num_stream;
        if (whole == 0 || whole == p->num_stream) p->cursor_after = at;
    }
    for (; whole > 0 && p->num_stream > whole; p->num_stream--) {
        const Segment *last = &p->stream[p->num_stream - 1];
        p->real_tokens -= last->length;
        p->num_targets -= stream_targets(index, last);
    }
    p->weight_sum = index->weights ? 0 : (double)p->num_targets;
    for (int64_t i = 0; i < p->num_stream; i++) {
        const Segment *c = &p->stream[i];
        if (c->length > p->longest_segment) p->longest_segment = c->length;
        if (index->weights) p->weight_sum += index->weights(index->context, c);
    }
    const double mean = p->weight_sum > 0 ? p->weight_sum / (double)p->num_targets : 1;
    p->weight_scale = ldexp(1, -ilogb(mean));  // 1 without weights
    p->weight_sum *= p->weight_scale;
    if (s->pairs) p->weight_sum = (double)(p->num_stream / 2);
    p->cursor_after.step = state->step + 1;
    return true;
}

// Packs the step. While its prefix does not fit, the last segment is left to the next step; one
// segment always fits.
static bool plan_packed(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                        const PlanState *state, Error *err) {
    int64_t most = INT32_MAX;
    do {
        if (!plan_take_prefix(p, index, s, state, most, false, err)) return false;
        most = p->num_stream - 1;
    } while (!plan_pack(p, s));
    return true;
}

static void plan_count(StepPlan *p, const PlanSettings *s, bool padded) {
    const int64_t S = s->max_seqlen;
    int64_t row_len;
    p->buffer_tokens = (int64_t)p->num_micro * s->micro_batch_tokens;
    p->padded_tokens = p->padded_pairs = p->attention_pairs = 0;
    for (int64_t i = 0, rows; i < p->num_stream; i += rows) {
        rows = padded_rows(s, (padded ? p->segments : p->stream) + i, p->num_stream - i, &row_len);
        p->padded_tokens += rows * row_len;
        p->padded_pairs += rows * (row_len * (row_len + 1) / 2);
    }
    for (int64_t i = 0; i < p->num_stream; i++)
        p->attention_pairs += (int64_t)p->stream[i].length * (p->stream[i].length + 1) / 2;
    for (int64_t i = 0; p->layout == LAYOUT_SHARED && i < p->num_segments; i++) {
        const int64_t n = p->segments[i].shared_len;
        p->attention_pairs -= n * (n + 1) / 2;
    }
    if (p->layout == LAYOUT_PADDED) p->attention_pairs = p->padded_pairs;
    if (p->layout == LAYOUT_ROWS)
        p->attention_pairs = (p->real_tokens + S - 1) / S * (S * (S + 1) / 2);
}

bool plan_step(StepPlan *plan, const DocIndex *index, const PlanSettings *s, Layout layout,
               const PlanState *state, Error *err) {
    if (!plan_settings_check(s, err)) return false;
    if (index->num_docs < 1)
        return error_set(err, EXIT_BAD_INPUT, "", "data: expected documents, found none");
    plan->layout = layout;
    plan->masked = index->targets != NULL;
    plan->sources = index->sources;
    if (!plan_packed(plan, index, s, state, err)) return false;
    if (plan->num_targets == 0)
        return error_set(err, EXIT_BAD_INPUT, "documents of one token have no next token to learn",
                         "data: a step of %ld documents has no token to predict", plan->num_stream);
    plan->computed_tokens = plan->real_tokens;
    if (layout == LAYOUT_SHARED && !plan_layout_shared(plan, index, s, err)) return false;
    const bool padded = layout == LAYOUT_PADDED || layout == LAYOUT_REPAD;
    if (padded) plan_layout_padded(plan, s);
    if (layout == LAYOUT_ROWS) plan_layout_rows(plan, s);
    plan_count(plan, s, padded);
    return true;
}

void plan_free(StepPlan *p) {
    free(p->stream);
    free(p->segments);
    free(p->micro_start);
    free(p->units);
    free(p->ids);
    prefixes_free(&p->prefixes);
    *p = (StepPlan){0};
}

bool plan_count_epochs(const DocIndex *index, const PlanSettings *s, PlanState at, double wanted,
                       int64_t *steps, double *epochs, int32_t *source, Error *err) {
    enum { MANY = 1 << 18 };  // segments: they take about a tenth of a second
    DocIndex lengths = *index;
    STEP_PLAN plan = {0};
    int64_t planned = 0;
    lengths.weights = NULL;  // which take longer to read than a step to plan
    if (!mixture_epochs(&lengths, s, &at, epochs, source, err)) return false;
    while (wanted > 0 ? *epochs < wanted || at.step == 0 : at.step < *steps && planned < MANY) {
        if (!plan_step(&plan, &lengths, s, LAYOUT_PACKED, &at, err) ||
            !mixture_epochs(&lengths, s, &plan.cursor_after, epochs, source, err))
            return false;
        at = plan.cursor_after;
        planned += plan.num_stream;
    }
    if (wanted > 0)
        *steps = at.step;
    else if (at.step > 0)
        *epochs *= (double)*steps / (double)at.step;
    return true;
}

// ---- A fixed set of documents -------------------------------------------------------------------

bool plan_fix_set(PlanSettings *s, const DocIndex *index, int64_t most_tokens, Error *err) {
    STEP_PLAN plan = {0};
    const PlanState start = {0};
    s->num_micro = 1;
    s->set_tokens = most_tokens;
    if (!plan_settings_check(s, err) ||
        !plan_take_prefix(&plan, index, s, &start, INT64_MAX, true, err))
        return false;
    s->set_tokens = plan.real_tokens;
    // when a segment finds no room, any two micro-batches together hold more than fits into one, so
    // this ends before twice the least number
    const int64_t least = (s->set_tokens + s->micro_batch_tokens - 1) / s->micro_batch_tokens;
    plan.real_tokens = 0;
    for (int64_t n = least; plan.real_tokens < s->set_tokens; n += 1 + n / 32) {
        s->num_micro = n < INT32_MAX ? (int32_t)n : INT32_MAX;
        if (!plan_step(&plan, index, s, LAYOUT_PACKED, &start, err)) return false;
    }
    return true;
}

// ---- Ranks --------------------------------------------------------------------------------------

// In order[i], for every i, the next micro-batch, and in rank_of its rank.
static void assign_by_work(const StepPlan *p, int32_t num_ranks, int64_t *load, int32_t *order,
                           int32_t *rank_of) {
    AUTO_FREE HeapItem *items =
        host_calloc((size_t)(p->num_micro + num_ranks), sizeof *items, owner);
    Heap heaviest = {items, 0}, idlest = {items + p->num_micro, 0};
    for (int32_t m = 0; m < p->num_micro; m++) heap_push(&heaviest, -p->micro_work[m], m);
    for (int32_t i = 0; i < p->num_micro; i++) {
        for (int32_t r = 0; i % num_ranks == 0 && r < num_ranks; r++)
            heap_push(&idlest, load[r], r);
        const int32_t m = heap_pop(&heaviest).id, to = heap_pop(&idlest).id;
        order[i] = m;
        rank_of[m] = to;
        load[to] += p->micro_work[m];
    }
}

static void assign_blocks(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, int64_t *load,
                          int32_t *order, int32_t *rank_of) {
    int32_t rank = 0, first, last;
    rank_block(num_leaves, rank, num_ranks, &first, &last);
    for (int32_t m = 0; m < p->num_micro; m++) {
        while (sum_leaf(m, p->num_micro, num_leaves) >= last)
            rank_block(num_leaves, ++rank, num_ranks, &first, &last);
        order[m] = m;
        rank_of[m] = rank;
        load[rank] += p->micro_work[m];
    }
}

int32_t plan_rank_micros(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                         int32_t *out, double *imbalance) {
    assert(rank >= 0 && rank < num_ranks && num_leaves >= 0);
    AUTO_FREE int64_t *load = host_calloc((size_t)num_ranks, sizeof *load, owner);
    AUTO_FREE int32_t *rank_of = host_calloc((size_t)p->num_micro, sizeof *rank_of, owner);
    int64_t sum = 0, most = 0;
    int32_t n = 0;
    if (num_leaves > 0)
        assign_blocks(p, num_leaves, num_ranks, load, out, rank_of);
    else
        assign_by_work(p, num_ranks, load, out, rank_of);
    for (int32_t i = 0; i < p->num_micro; i++)
        if (rank_of[out[i]] == rank) out[n++] = out[i];
    for (int32_t r = 0; r < num_ranks; r++) {
        sum += load[r];
        if (load[r] > most) most = load[r];
    }
    *imbalance = sum > 0 ? (double)most * num_ranks / (double)sum : 0;
    return n;
}
