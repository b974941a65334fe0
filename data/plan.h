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

#include "batch.h"
#include "io.h"

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

static inline PlanSettings plan_settings(void) {
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

static inline int64_t plan_work(const PlanSettings *s, int64_t length) {
    const int64_t tiles = (length + s->work_side - 1) / s->work_side;
    return length * s->work_token + tiles * (tiles + 1) / 2 * s->work_tile;
}

// The work of a step, which is largest when all chunks are, must be an int64.
static inline bool plan_work_check(const PlanSettings *s, Error *err) {
    const double n = (double)s->max_seqlen / s->work_side + 1,
                 chunks = (double)s->capacity / s->max_seqlen * s->num_micro;
    const double work = chunks * ((double)s->max_seqlen * s->work_token + n * n * s->work_tile);
    return work < 0x1p62 ||
           error_set(err, EXIT_USAGE, "give smaller numbers in the same ratio, or larger tiles",
                     "work: %d:%d:%d adds up to more than 2^62 in a step", s->work_token,
                     s->work_tile, s->work_side);
}

static inline bool plan_settings_check(const PlanSettings *s, Error *err) {
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

static inline uint64_t plan_hash(uint64_t x) {  // splitmix64's finalizer
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// "TOKEN:TILE" or "TOKEN:TILE:SIDE" into the settings; false when the text is something else.
static inline bool plan_work_cost_parse(const char *text, PlanSettings *s) {
    int two = 0, three = 0;
    const int n =
        sscanf(text, "%7d:%7d%n:%7d%n", &s->work_token, &s->work_tile, &two, &s->work_side, &three);
    return n >= 2 && text[n == 3 ? three : two] == 0;
}

// The most tokens a step takes: floor(f * M * C).
static inline int64_t plan_goal(const PlanSettings *s) {
    if (s->set_tokens > 0) return s->set_tokens;
    const int64_t tokens = (int64_t)s->num_micro * s->capacity;  // < 2^50
    return tokens / 1000000 * s->fill_ppm + tokens % 1000000 * s->fill_ppm / 1000000;
}

// Documents longer than max_seqlen, and their tokens beyond it.
static inline void plan_count_long(const DocIndex *index, int32_t max_seqlen, int64_t *docs,
                                   int64_t *tokens_beyond) {
    *docs = *tokens_beyond = 0;
    for (int64_t i = 0; i < index->num_docs; i++) {
        const int64_t length = index->length(index->context, i);
        if (length <= max_seqlen) continue;
        ++*docs;
        *tokens_beyond += length - max_seqlen;
    }
}

// -------------------------------------------------------------------------------------------------
// The order of documents in an epoch

// Stream position -> document: a permutation of 0 .. n-1. A Feistel network permutes the next power
// of four; walking its cycle until the value is below n keeps it a permutation of n (at most 4
// rounds of it on average).
static inline int64_t plan_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t pos) {
    const uint64_t key = plan_hash(plan_hash(seed) ^ (uint64_t)epoch);
    int half = 1;
    while (half < 31 && ((uint64_t)1 << (2 * half)) < (uint64_t)n) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)pos;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 6; round++) {
            const uint64_t mixed = left ^ (plan_hash(key + (round << 32) + right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

static inline bool plan_state_check(const DocIndex *index, const PlanSettings *s,
                                    const PlanState *at, Error *err) {
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

// What happened to long documents on the way to a chunk; counted once the chunk is taken.
typedef struct {
    int64_t docs_split, docs_truncated, docs_dropped, tokens_left_out;
} LongCounts;

static inline bool plan_nothing_left(const DocIndex *index, const PlanSettings *s, Error *err) {
    return error_set(err, EXIT_BAD_INPUT, "raise --max-seqlen, or use --long-docs split",
                     "data: all %lld documents are longer than max_seqlen %d, and all are dropped",
                     (long long)index->num_docs, s->max_seqlen);
}

static inline bool plan_too_long(const PlanSettings *s, int64_t doc, int64_t length, Error *err) {
    return error_set(err, EXIT_BAD_INPUT,
                     "raise --max-seqlen, or use --long-docs split, truncate or drop",
                     "data: document %lld has %lld tokens, expected at most %d", (long long)doc,
                     (long long)length, s->max_seqlen);
}

// The chunk at *at; moves *at behind it. Fails when the policy says so or when no document is left.
static inline bool plan_next_chunk(const DocIndex *index, const PlanSettings *s, PlanState *at,
                                   Chunk *chunk, LongCounts *counts, Error *err) {
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

// What becomes of the long documents of a whole data set: for the summary at the start. Fails where
// training would fail at the first of them.
static inline bool plan_count_left_out(const DocIndex *index, const PlanSettings *s,
                                       LongCounts *out, Error *err) {
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

static inline void plan_reserve_stream(StepPlan *p, size_t n) {
    size_t capacity = p->stream_capacity;
    p->stream = (Chunk *)host_grow(p->stream, &capacity, n, sizeof(Chunk), "the step plan");
    capacity = p->stream_capacity;
    p->order = (uint64_t *)host_grow(p->order, &capacity, n, sizeof(uint64_t), "the step plan");
    capacity = p->stream_capacity;
    p->bin = (int32_t *)host_grow(p->bin, &capacity, n, sizeof(int32_t), "the step plan");
    capacity = p->stream_capacity;
    p->next = (int32_t *)host_grow(p->next, &capacity, n, sizeof(int32_t), "the step plan");
    capacity = p->stream_capacity;
    p->members =
        (PlanMember *)host_grow(p->members, &capacity, n, sizeof(PlanMember), "the step plan");
    p->stream_capacity = capacity;
}

static inline void plan_reserve_chunks(StepPlan *p, size_t n) {
    p->chunks =
        (Chunk *)host_grow(p->chunks, &p->chunk_capacity, n, sizeof(Chunk), "the step plan");
}

static inline void plan_reserve_micros(StepPlan *p, size_t n) {
    static const char what[] = "the step plan";
    size_t c0 = p->micro_capacity, c1 = c0, c2 = c0, c3 = c0, c4 = c0, c5 = c0;
    p->micro_start = (int64_t *)host_grow(p->micro_start, &c0, n + 1, sizeof(int64_t), what);
    p->micro_work = (int64_t *)host_grow(p->micro_work, &c1, n + 1, sizeof(int64_t), what);
    p->micro_free = (int64_t *)host_grow(p->micro_free, &c2, n + 1, sizeof(int64_t), what);
    p->fitting.items = (HeapItem *)host_grow(p->fitting.items, &c3, n + 1, sizeof(HeapItem), what);
    p->full.items = (HeapItem *)host_grow(p->full.items, &c4, n + 1, sizeof(HeapItem), what);
    p->first = (int32_t *)host_grow(p->first, &c5, n + 1, sizeof(int32_t), what);
    p->micro_capacity = c0;
}

// Fills p->stream with the longest prefix of at most `goal` tokens and `max_chunks` chunks, and
// with the first chunk in any case.
static inline bool plan_take_prefix(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                                    const PlanState *state, int64_t goal, int64_t max_chunks,
                                    Error *err) {
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
// A binary heap, smallest (key, id) first

static inline bool heap_before(HeapItem a, HeapItem b) {
    return a.key < b.key || (a.key == b.key && a.id < b.id);
}

static inline void heap_push(Heap *h, int64_t key, int32_t id) {
    HeapItem item;
    item.key = key;
    item.id = id;
    int32_t at = h->n++;
    for (; at > 0 && heap_before(item, h->items[(at - 1) / 2]); at = (at - 1) / 2)
        h->items[at] = h->items[(at - 1) / 2];
    h->items[at] = item;
}

static inline HeapItem heap_pop(Heap *h) {
    assert(h->n > 0);
    const HeapItem top = h->items[0], item = h->items[--h->n];
    int32_t at = 0;
    for (int32_t child; (child = 2 * at + 1) < h->n; at = child) {
        if (child + 1 < h->n && heap_before(h->items[child + 1], h->items[child])) child++;
        if (!heap_before(h->items[child], item)) break;
        h->items[at] = h->items[child];
    }
    h->items[at] = item;
    return top;
}

// -------------------------------------------------------------------------------------------------
// Packing: p->bin for the chunks in sorted order

static inline int plan_compare_keys(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static inline Chunk *plan_sorted_chunk(const StepPlan *p, int64_t i) {
    return &p->stream[(uint32_t)p->order[i]];
}

// Longest first; without costs as they come.
static inline void plan_sort(StepPlan *p, const PlanSettings *s) {
    assert(p->num_stream <= INT32_MAX);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const uint64_t key = s->work_token > 0 ? (uint64_t)(INT32_MAX - p->stream[i].length) : 0;
        p->order[i] = key << 32 | (uint64_t)i;
    }
    qsort(p->order, (size_t)p->num_stream, sizeof p->order[0], plan_compare_keys);
}

static inline void plan_empty_bins(StepPlan *p, const PlanSettings *s) {
    for (int32_t b = 0; b < s->num_micro; b++) {
        p->micro_free[b] = s->capacity;
        p->micro_work[b] = 0;
    }
}

static inline void plan_place(StepPlan *p, const PlanSettings *s, int64_t i, int32_t bin) {
    const int32_t length = plan_sorted_chunk(p, i)->length;
    p->bin[i] = bin;
    p->micro_free[bin] -= length;
    p->micro_work[bin] += plan_work(s, length);
}

// Each chunk to the bin with the least work of those it fits in, in O(n log M): `fitting` holds the
// bins with room for the current length by work, `full` the others by room. Lengths only go down,
// so a bin that fits keeps fitting until something is put in it. False when a chunk fits nowhere.
static inline bool plan_pack_lpt(StepPlan *p, const PlanSettings *s) {
    plan_empty_bins(p, s);
    p->fitting.n = p->full.n = 0;
    for (int32_t b = 0; b < s->num_micro; b++) heap_push(&p->fitting, 0, b);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const int32_t length = plan_sorted_chunk(p, i)->length;
        while (p->full.n > 0 && -p->full.items[0].key >= length) {
            const int32_t b = heap_pop(&p->full).id;
            heap_push(&p->fitting, p->micro_work[b], b);
        }
        if (p->fitting.n == 0) return false;
        const int32_t b = heap_pop(&p->fitting).id;
        plan_place(p, s, i, b);
        const int32_t next = i + 1 < p->num_stream ? plan_sorted_chunk(p, i + 1)->length : 0;
        if (p->micro_free[b] >= next)
            heap_push(&p->fitting, p->micro_work[b], b);
        else
            heap_push(&p->full, -p->micro_free[b], b);
    }
    return true;
}

// Each chunk to the bin with the most room: what a packer does that counts tokens and takes
// documents as they come. Only for comparison.
static inline bool plan_pack_arrival(StepPlan *p, const PlanSettings *s) {
    plan_empty_bins(p, s);
    p->fitting.n = 0;
    for (int32_t b = 0; b < s->num_micro; b++) heap_push(&p->fitting, -p->micro_free[b], b);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const int32_t b = heap_pop(&p->fitting).id;
        if (p->micro_free[b] < plan_sorted_chunk(p, i)->length) return false;
        plan_place(p, s, i, b);
        heap_push(&p->fitting, -p->micro_free[b], b);
    }
    return true;
}

// Best-fit-decreasing: each chunk to the fullest bin it fits in. Only for steps that LPT cannot
// place.
static inline bool plan_pack_best_fit(StepPlan *p, const PlanSettings *s) {
    plan_empty_bins(p, s);
    for (int64_t i = 0; i < p->num_stream; i++) {
        int32_t best = -1;
        for (int32_t b = 0; b < s->num_micro; b++)
            if (p->micro_free[b] >= plan_sorted_chunk(p, i)->length &&
                (best < 0 || p->micro_free[b] < p->micro_free[best]))
                best = b;
        if (best < 0) return false;
        plan_place(p, s, i, best);
    }
    return true;
}

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

static inline void plan_make_lists(StepPlan *p, const PlanSettings *s) {
    for (int32_t b = 0; b < s->num_micro; b++) p->first[b] = -1;
    for (int32_t i = (int32_t)p->num_stream - 1; i >= 0; i--) {
        p->next[i] = p->first[p->bin[i]];
        p->first[p->bin[i]] = i;
    }
}

static inline int32_t plan_list_members(const StepPlan *p, const PlanSettings *s, int32_t bin,
                                        PlanMember *out) {
    int32_t n = 0;
    for (int32_t i = p->first[bin]; i >= 0; i = p->next[i]) {
        out[n].chunk = i;
        out[n].length = plan_sorted_chunk(p, i)->length;
        out[n].work = plan_work(s, out[n].length);
        n++;
    }
    return n;
}

static inline void plan_move(StepPlan *p, const PlanSettings *s, int32_t i, int32_t to) {
    const int32_t from = p->bin[i];
    int32_t *at = &p->first[from];
    while (*at != i) at = &p->next[*at];
    *at = p->next[i];
    p->micro_free[from] += plan_sorted_chunk(p, i)->length;
    p->micro_work[from] -= plan_work(s, plan_sorted_chunk(p, i)->length);
    plan_place(p, s, i, to);
    at = &p->first[to];
    while (*at >= 0 && *at < i) at = &p->next[*at];
    p->next[i] = *at;
    *at = i;
}

// The first of members first .. n - 1, which are in falling order, with less work than this.
static inline int32_t plan_first_below(const PlanMember *members, int32_t first, int32_t n,
                                       int64_t work) {
    while (first < n) {
        const int32_t middle = first + (n - first) / 2;
        if (members[middle].work < work)
            n = middle;
        else
            first = middle + 1;
    }
    return first;
}

// Two micro-batches: room and work of the heavy and of the light one
typedef struct {
    int64_t heavy_free, light_free, heavy_work, light_work;
} PlanPair;

// Keeps the exchange in *best if both have room for it and the heavier one of them is then lighter.
static inline void plan_consider(const PlanPair *pair, const PlanMember *x, const PlanMember *y,
                                 const PlanMember *z, PlanExchange *best) {
    const int64_t tokens = (int64_t)x->length - y->length - (z ? z->length : 0);
    const int64_t moved = x->work - y->work - (z ? z->work : 0);
    if (tokens > pair->light_free || -tokens > pair->heavy_free) return;
    const int64_t a = pair->heavy_work - moved, b = pair->light_work + moved;
    if ((a > b ? a : b) >= best->heaviest) return;
    best->x = x->chunk;
    best->y = y->chunk;
    best->z = z ? z->chunk : -1;
    best->heaviest = a > b ? a : b;
}

// The first of the best exchanges; x = -1 when none helps. One helps only when it moves more than
// no work and less than the difference: of the members, which are in falling order, those between.
static inline PlanExchange plan_best_exchange(StepPlan *p, const PlanSettings *s, int32_t heavy,
                                              int32_t light, int64_t *looks) {
    PlanExchange best = {-1, -1, -1, p->micro_work[heavy]};
    const PlanPair pair = {p->micro_free[heavy], p->micro_free[light], p->micro_work[heavy],
                           p->micro_work[light]};
    const int64_t difference = pair.heavy_work - pair.light_work;
    const int32_t num_own = plan_list_members(p, s, heavy, p->members);
    const PlanMember *own = p->members, *other = p->members + num_own;
    const int32_t n = plan_list_members(p, s, light, p->members + num_own);
    for (const PlanMember *x = own; x < own + num_own; x++)
        for (int32_t c = plan_first_below(other, 0, n, x->work); c < n; c++) {
            const int64_t rest = x->work - other[c].work;
            plan_consider(&pair, x, &other[c], NULL, &best);
            int32_t d = plan_first_below(other, c + 1, n, rest);
            for (; d < n && rest - other[d].work < difference; d++, ++*looks)
                plan_consider(&pair, x, &other[c], &other[d], &best);
            ++*looks;
        }
    return best;
}

// Makes an exchange of the heaviest micro-batch with one that is lighter than the mean.
static inline bool plan_exchange(StepPlan *p, const PlanSettings *s, int32_t heavy, int64_t mean,
                                 int64_t *looks) {
    for (int32_t light = 0; light < s->num_micro && *looks < PLAN_MAX_LOOKS; light++) {
        if (p->micro_work[light] >= mean) continue;
        const PlanExchange e = plan_best_exchange(p, s, heavy, light, looks);
        if (e.x < 0) continue;
        plan_move(p, s, e.x, light);
        plan_move(p, s, e.y, heavy);
        if (e.z >= 0) plan_move(p, s, e.z, heavy);
        return true;
    }
    return false;
}

static inline void plan_even_out(StepPlan *p, const PlanSettings *s) {
    int64_t sum = 0, looks = 0;
    for (int32_t b = 0; b < s->num_micro; b++) sum += p->micro_work[b];
    const int64_t mean = sum / s->num_micro;
    plan_make_lists(p, s);
    for (;;) {
        int32_t heavy = 0;
        for (int32_t b = 1; b < s->num_micro; b++)
            if (p->micro_work[b] > p->micro_work[heavy]) heavy = b;
        if (p->micro_work[heavy] - mean <= mean / PLAN_EVEN) return;
        if (!plan_exchange(p, s, heavy, mean, &looks)) return;
    }
}

// -------------------------------------------------------------------------------------------------
// The order of chunks, and steps that do not fit at once

// Chunks grouped by p->bin; inside a micro-batch they stay longest first.
static inline void plan_group_bins(StepPlan *p, const PlanSettings *s) {
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

// Takes at most max_chunks chunks and packs them into *fits; false is an error.
static inline bool plan_try(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                            const PlanState *state, int64_t max_chunks, bool *fits, Error *err) {
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
static inline bool plan_packed(StepPlan *p, const DocIndex *index, const PlanSettings *s,
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
// The same chunks in the other layouts

// One chunk a row of S tokens, floor(C / S) rows a micro-batch.
static inline void plan_layout_padded(StepPlan *p, const PlanSettings *s) {
    const int64_t rows = s->capacity / s->max_seqlen;
    const int64_t num_micro = (p->num_stream + rows - 1) / rows;
    plan_reserve_chunks(p, (size_t)p->num_stream);
    plan_reserve_micros(p, (size_t)num_micro);
    memcpy(p->chunks, p->stream, (size_t)p->num_stream * sizeof(Chunk));
    p->num_chunks = p->num_stream;
    p->num_micro = (int32_t)num_micro;
    for (int64_t m = 0; m <= num_micro; m++)
        p->micro_start[m] = m < num_micro ? m * rows : p->num_stream;
    for (int64_t m = 0; m < num_micro; m++) {
        p->micro_work[m] = 0;
        for (int64_t i = p->micro_start[m]; i < p->micro_start[m + 1]; i++) {
            const int64_t length = p->chunks[i].length, padding = s->max_seqlen - length;
            p->micro_work[m] += p->layout == LAYOUT_PADDED
                                    ? plan_work(s, s->max_seqlen)
                                    : plan_work(s, length) + padding * s->work_token;
        }
    }
}

// The stream in rows of S tokens; a chunk that crosses the end of a micro-batch is cut there.
static inline void plan_layout_rows(StepPlan *p, const PlanSettings *s) {
    const int64_t room = (int64_t)(s->capacity / s->max_seqlen) * s->max_seqlen;
    const int64_t num_micro = (p->real_tokens + room - 1) / room;
    plan_reserve_chunks(p, (size_t)(p->num_stream + num_micro));
    plan_reserve_micros(p, (size_t)num_micro);
    p->num_chunks = p->num_micro = 0;
    int64_t left = 0;  // room in the micro-batch being filled
    for (int64_t i = 0; i < p->num_stream; i++) {
        const Chunk chunk = p->stream[i];
        for (int32_t done = 0; done < chunk.length;) {
            if (left == 0) {
                p->micro_start[p->num_micro++] = p->num_chunks;
                left = room;
            }
            Chunk *piece = &p->chunks[p->num_chunks++];
            const int32_t rest = chunk.length - done;
            piece->doc = chunk.doc;
            piece->tok_off = chunk.tok_off + done;
            piece->length = rest < left ? rest : (int32_t)left;
            piece->has_next = piece->length < rest || chunk.has_next;
            done += piece->length;
            left -= piece->length;
        }
    }
    p->micro_start[p->num_micro] = p->num_chunks;
    for (int32_t m = 0; m < p->num_micro; m++) {
        const int64_t tokens = m + 1 < p->num_micro ? room : room - left;
        const int64_t rows = (tokens + s->max_seqlen - 1) / s->max_seqlen;
        p->micro_work[m] = rows * plan_work(s, s->max_seqlen);
    }
}

// -------------------------------------------------------------------------------------------------
// The whole

// Plans the step at *state. `plan` is {0} at first and may be used again; plan_free at the end.
static inline bool plan_step(StepPlan *plan, const DocIndex *index, const PlanSettings *s,
                             Layout layout, const PlanState *state, Error *err) {
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

static inline void plan_free(StepPlan *p) {
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
static inline bool plan_first_documents(const DocIndex *index, const PlanSettings *s,
                                        int64_t most_tokens, int64_t *tokens, Error *err) {
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

// A fixed set of documents instead of steps: the first of the first epoch, at most most_tokens
// (plan_first_documents). Fills in s->set_tokens and s->num_micro, with which plan_step from {0}
// gives all of the set and nothing else, packed into about as few micro-batches as hold it.
static inline bool plan_fix_set(PlanSettings *s, const DocIndex *index, int64_t most_tokens,
                                Error *err) {
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

// A rank for every micro-batch: order (num_micro) lists them heaviest first, owner (num_micro) the
// rank of each in that list. In rounds of num_ranks: what runs at the same time is alike, and each
// round's heaviest goes to the rank with the least work so far.
static inline void plan_assign_ranks(const StepPlan *p, int32_t num_ranks, int32_t *order,
                                     int32_t *owner) {
    assert(num_ranks > 0);
    const size_t ranks = (size_t)num_ranks, micros = (size_t)p->num_micro;
    static const char what[] = "the step plan";
    HeapItem *items = (HeapItem *)host_calloc(2 * ranks + micros, sizeof(HeapItem), what);
    Heap round = {items, 0}, next = {items + ranks, 0}, heaviest = {items + 2 * ranks, 0};
    for (int32_t r = 0; r < num_ranks; r++) heap_push(&round, 0, r);
    for (int32_t m = 0; m < p->num_micro; m++) heap_push(&heaviest, -p->micro_work[m], m);
    for (int32_t i = 0; i < p->num_micro; i++) {
        const HeapItem micro = heap_pop(&heaviest), rank = heap_pop(&round);
        order[i] = micro.id;
        owner[i] = rank.id;
        heap_push(&next, rank.key - micro.key, rank.id);
        if (round.n > 0) continue;
        const Heap empty = round;
        round = next;
        next = empty;
    }
    free(items);
}

// Micro-batches of one rank into out (num_micro), heaviest first; returns how many. Every
// micro-batch has exactly one rank.
static inline int32_t plan_rank_micros(const StepPlan *p, int32_t rank, int32_t num_ranks,
                                       int32_t *out) {
    assert(rank >= 0 && rank < num_ranks);
    int32_t *owner = (int32_t *)host_calloc((size_t)p->num_micro, sizeof(int32_t), "the step plan");
    plan_assign_ranks(p, num_ranks, out, owner);
    int32_t n = 0;
    for (int32_t i = 0; i < p->num_micro; i++)
        if (owner[i] == rank) out[n++] = out[i];
    free(owner);
    return n;
}

// -------------------------------------------------------------------------------------------------
// Sums that do not depend on the number of ranks. Floating-point addition is not associative, so
// the order of a step's sum is fixed: a binary tree over M leaves, leaf i holding the micro-batches
// that plan_leaf gives it. Two neighbours of 2^k leaves join where the left one begins at a
// multiple of 2^(k+1); what is left over joins from the right. A rank that owns a block of leaves
// can join inside it, and the ranks together, in any grouping, make the same tree.

typedef struct {
    int32_t first, size;  // leaves first .. first + size - 1, size a power of two
} PlanNode;

enum { PLAN_MAX_NODES = 64 };  // a block of up to 2^20 leaves joins to 40 nodes at most

// In packed layout a leaf is one micro-batch; others need more or fewer than M.
static inline int32_t plan_leaf(int32_t micro, int32_t num_micro, int32_t num_leaves) {
    return (int32_t)((int64_t)micro * num_leaves / num_micro);
}

// Of n things in order, those of one rank: *first to *last - 1.
static inline void plan_block(int32_t n, int32_t rank, int32_t num_ranks, int32_t *first,
                              int32_t *last) {
    *first = (int32_t)((int64_t)n * rank / num_ranks);
    *last = (int32_t)((int64_t)n * (rank + 1) / num_ranks);
}

static inline bool plan_nodes_join(PlanNode left, PlanNode right) {
    return left.size == right.size && left.first % (2 * left.size) == 0;
}

// The next leaf at the right end of nodes (num_nodes); returns how many there are then.
static inline int plan_add_leaf(PlanNode *nodes, int num_nodes, int32_t leaf) {
    PlanNode node = {leaf, 1};
    while (num_nodes > 0 && plan_nodes_join(nodes[num_nodes - 1], node)) {
        node = nodes[--num_nodes];
        node.size *= 2;
    }
    nodes[num_nodes] = node;
    return num_nodes + 1;
}

// What the leaves first .. last - 1 join to, into nodes (PLAN_MAX_NODES); returns how many. *most:
// the largest number of them before the last leaf came.
static inline int plan_block_nodes(int32_t first, int32_t last, PlanNode *nodes, int *most) {
    int n = 0;
    *most = 0;
    for (int32_t leaf = first; leaf < last; leaf++) {
        if (n > *most) *most = n;
        n = plan_add_leaf(nodes, n, leaf);
    }
    return n;
}

// Micro-batches of one rank into out (num_micro), in order, for sums over num_leaves leaves.
static inline int32_t plan_rank_block(const StepPlan *p, int32_t num_leaves, int32_t rank,
                                      int32_t num_ranks, int32_t *out) {
    int32_t first, last, n = 0;
    plan_block(num_leaves, rank, num_ranks, &first, &last);
    for (int32_t m = 0; m < p->num_micro; m++) {
        const int32_t leaf = plan_leaf(m, p->num_micro, num_leaves);
        if (leaf >= first && leaf < last) out[n++] = m;
    }
    return n;
}

// -------------------------------------------------------------------------------------------------
// Balance

// Predicted work of every rank into work (num_ranks), shared out as by plan_rank_micros.
static inline void plan_rank_work(const StepPlan *p, int32_t num_ranks, int64_t *work) {
    const size_t micros = (size_t)p->num_micro;
    int32_t *order = (int32_t *)host_calloc(2 * micros, sizeof(int32_t), "the step plan");
    int32_t *owner = order + micros;
    plan_assign_ranks(p, num_ranks, order, owner);
    memset(work, 0, (size_t)num_ranks * sizeof *work);
    for (int32_t i = 0; i < p->num_micro; i++) work[owner[i]] += p->micro_work[order[i]];
    free(order);
}

// The same, shared out as by plan_rank_block.
static inline void plan_block_work(const StepPlan *p, int32_t num_leaves, int32_t num_ranks,
                                   int64_t *work) {
    int32_t rank = 0, first, last;
    plan_block(num_leaves, rank, num_ranks, &first, &last);
    memset(work, 0, (size_t)num_ranks * sizeof *work);
    for (int32_t m = 0; m < p->num_micro; m++) {
        while (plan_leaf(m, p->num_micro, num_leaves) >= last)
            plan_block(num_leaves, ++rank, num_ranks, &first, &last);
        work[rank] += p->micro_work[m];
    }
}

// The largest over the mean: 1 is even, num_ranks is one rank doing everything; 0 when nothing is
// known.
static inline double plan_imbalance(const int64_t *work, int32_t num_ranks) {
    int64_t sum = 0, most = 0;
    for (int32_t r = 0; r < num_ranks; r++) {
        sum += work[r];
        if (work[r] > most) most = work[r];
    }
    return sum > 0 ? (double)most * num_ranks / (double)sum : 0;
}

#endif
