#include "stream.h"

#include <assert.h>
#include <math.h>

#include "../base/hash.h"
#include "../base/json.h"

// The document at position pos of an epoch: a permutation of 0 .. n - 1 that needs no memory. A
// Feistel network permutes the next power of four; repeating it until the value is below n makes
// it a permutation of n, after at most 4 passes on average. Sources of equal size get different
// orders; otherwise parallel texts would appear in pairs.
static int64_t stream_document(const DocIndex *index, uint64_t seed, int64_t epoch, int64_t pos) {
    const int64_t n = index->num_docs, first = index->first_doc;
    assert(n >= 1 && pos >= 0 && pos < n);
    const uint64_t key = splitmix64(splitmix64(seed + (uint64_t)first) ^ (uint64_t)epoch);
    int half = 1;
    while (half < 31 && ((uint64_t)1 << (2 * half)) < (uint64_t)n) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)pos;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 6; round++) {
            const uint64_t mixed = left ^ (splitmix64(key + (round << 32) + right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return first + (int64_t)x;
}

static bool follows(const DocIndex *index, int64_t doc) {
    return index->follows && index->follows(index->context, doc);
}

// From the first document of a record to the one that *tok_off of its tokens lead to, and to the
// rest of them. False: the record has fewer.
static bool find_in_record(const DocIndex *index, int64_t *doc, int64_t *tok_off) {
    for (int64_t n; *tok_off >= (n = index->length(index->context, *doc)); *tok_off -= n)
        if (!follows(index, ++*doc)) return false;
    return true;
}

static bool cursor_check(const DocIndex *index, const PlanSettings *s, const SourceCursor *at,
                         Error *err) {
    const bool inside = at->tok_off > 0;  // a record, which is not the end of the documents
    bool good = at->epoch >= 0 && at->doc_pos >= 0 && at->tok_off >= 0 &&
                at->doc_pos <= index->num_docs - inside;
    if (good && inside) {
        int64_t doc = stream_document(index, s->seed, at->epoch, at->doc_pos), rest = at->tok_off;
        good = find_in_record(index, &doc, &rest) && (rest == 0 || s->long_docs == LONG_SPLIT);
    }
    if (good) return true;
    return error_set(err, EXIT_CHECKPOINT_MISFIT, "resume with the data and flags it was made with",
                     "data position: epoch %ld, document %ld, token %ld is not one of %ld "
                     "documents",
                     at->epoch, at->doc_pos, at->tok_off, index->num_docs);
}

static bool nothing_left(const DocIndex *index, const PlanSettings *s, const LongCounts *counts,
                         Error *err) {
    if (counts->docs_without_target > 0)
        return error_set(err, EXIT_BAD_INPUT,
                         "check what is trained with data/prepare.py --show, or raise --max-seqlen",
                         "data: expected targets, found none in the masks of %ld documents",
                         index->num_docs);
    return error_set(err, EXIT_BAD_INPUT, "raise --max-seqlen, or use --long-docs split",
                     "data: expected documents of at most %d tokens, found none among %ld",
                     s->max_seqlen, index->num_docs);
}

static bool check_length(const PlanSettings *s, int64_t doc, int64_t length, Error *err) {
    return length <= s->max_seqlen || s->long_docs != LONG_ERROR ||
           error_set(err, EXIT_BAD_INPUT,
                     "raise --max-seqlen, or use --long-docs split, truncate or drop",
                     "data: document %ld has %ld tokens, expected at most %d", doc, length,
                     s->max_seqlen);
}

int64_t stream_targets(const DocIndex *index, const Segment *c) {
    const int64_t n = c->length - 1 + c->has_next;
    return index->targets ? index->targets(index->context, c->doc, c->tok_off + 1, n) : n;
}

// Is a document left out as a whole? Counts what happens to it in either case.
static bool leaves_out(const DocIndex *index, const PlanSettings *s, int64_t doc, int64_t length,
                       LongCounts *counts) {
    const int64_t other = !s->pairs ? doc : follows(index, doc) ? doc - 1 : doc + 1;
    const bool is_long =
        length > s->max_seqlen || index->length(index->context, other) > s->max_seqlen;
    const int64_t kept = is_long && s->long_docs == LONG_TRUNCATE ? s->max_seqlen : length;
    const bool dropped = is_long && s->long_docs == LONG_DROP;
    const bool without_target =
        !dropped && index->targets && index->targets(index->context, doc, 1, kept - 1) == 0;
    const bool left_out = dropped || without_target;
    counts->docs_dropped += dropped;
    counts->docs_without_target += without_target;
    counts->docs_truncated += !left_out && kept < length;
    counts->docs_split += !left_out && is_long && s->long_docs == LONG_SPLIT;
    counts->tokens_left_out += left_out ? length : length - kept;
    return left_out;
}

// Does a document of its record that is not left out follow this one?
static bool record_goes_on(const DocIndex *index, const PlanSettings *s, int64_t doc) {
    LongCounts counts = {0};
    while (follows(index, ++doc))
        if (!leaves_out(index, s, doc, index->length(index->context, doc), &counts)) return true;
    return false;
}

static Segment segment_at(const PlanSettings *s, int64_t doc, int64_t length, int64_t tok_off) {
    const int64_t rest = length - tok_off;
    const int32_t n = rest < s->max_seqlen ? (int32_t)rest : s->max_seqlen;
    return (Segment){doc, tok_off, n, s->long_docs == LONG_SPLIT && n < rest, 0, false, 0};
}

bool stream_next_segment(const DocIndex *index, const PlanSettings *s, SourceCursor *at,
                         Segment *segment, LongCounts *counts, Error *err) {
    const int64_t last_epoch = at->epoch + 1;  // the rest of this one, and all of the next
    if (!cursor_check(index, s, at, err)) return false;
    while (true) {
        if (at->doc_pos >= index->num_docs) {
            at->epoch++;
            at->doc_pos = at->tok_off = 0;
        }
        if (at->epoch > last_epoch) return nothing_left(index, s, counts, err);
        int64_t doc = stream_document(index, s->seed, at->epoch, at->doc_pos), from = at->tok_off;
        if (from == 0 && follows(index, doc)) {  // it comes with its record
            at->doc_pos++;
            continue;
        }
        find_in_record(index, &doc, &from);
        const int64_t length = index->length(index->context, doc);
        if (!check_length(s, doc, length, err)) return false;
        const bool left_out = from == 0 && leaves_out(index, s, doc, length, counts);
        *segment = segment_at(s, doc, length, from);
        segment->epoch = at->epoch;
        const bool ends = left_out || !segment->has_next;
        at->tok_off += ends ? length - from : segment->length;
        if (ends && !follows(index, doc + 1)) at->tok_off = 0, at->doc_pos++;
        if (left_out) continue;
        segment->more = ends && record_goes_on(index, s, doc);
        if (!index->targets || stream_targets(index, segment) > 0) {
            at->tokens += segment->length;
            at->counted += segment->length;
            return true;
        }
        counts->tokens_left_out += segment->length;
    }
}

bool stream_count_left_out(const DocIndex *index, const PlanSettings *s, LongCounts *out,
                           Error *err) {
    *out = (LongCounts){0};
    for (int64_t doc = index->first_doc; doc < index->first_doc + index->num_docs; doc++) {
        const int64_t length = index->length(index->context, doc);
        if (!check_length(s, doc, length, err)) return false;
        if (leaves_out(index, s, doc, length, out) || !index->targets) continue;
        Segment c = {.has_next = true};
        while (c.has_next) {
            c = segment_at(s, doc, length, c.tok_off + c.length);
            if (stream_targets(index, &c) == 0) out->tokens_left_out += c.length;
        }
    }
    return out->docs_dropped + out->docs_without_target < index->num_docs ||
           nothing_left(index, s, out, err);
}

// ---- A mixture of sources -----------------------------------------------------------------------

DocIndex mixture_source(const DocIndex *index, int32_t i) {
    DocIndex one = *index;
    one.first_doc = index->sources->list[i].first_doc;
    one.num_docs = index->sources->list[i].num_docs;
    one.sources = NULL;
    return one;
}

bool mixture_draw(const DocIndex *index, const PlanSettings *s, PlanState *at, Segment *segment,
                  LongCounts *counts, Error *err) {
    if (!index->sources || index->sources->n == 1)
        return stream_next_segment(index, s, at->sources, segment, counts, err);
    const Source *list = index->sources->list;
    __int128 all = 0;  // its products with weights need more than 64 bits
    SourceCursor after = {0};
    int32_t first = -1;  // due when `all` is after.counted / weight
    for (int32_t i = 0; i < index->sources->n; i++) {
        if (s->pairs && at->sources[i].tok_off > 0) {  // the other document of a pair
            const DocIndex source = mixture_source(index, i);
            return stream_next_segment(&source, s, &at->sources[i], segment, counts, err);
        }
        all += at->sources[i].counted;
    }
    for (int32_t i = 0; i < index->sources->n; i++) {
        const DocIndex source = mixture_source(index, i);
        SourceCursor next = at->sources[i];
        Segment found;
        if (list[i].weight == 0 || (__int128)next.counted * ALL_WEIGHTS > all * list[i].weight)
            continue;
        if (!stream_next_segment(&source, s, &next, &found, counts, err))
            return error_prefix(err, list[i].spec);
        if (first >= 0 &&
            (__int128)next.counted * list[first].weight >= (__int128)after.counted * list[i].weight)
            continue;
        first = i;
        after = next;
        *segment = found;
    }
    assert(first >= 0);  // not all can be ahead
    at->sources[first] = after;
    return true;
}

bool mixture_epochs(const DocIndex *index, const PlanSettings *s, const PlanState *at,
                    double *epochs, int32_t *source, Error *err) {
    const int32_t n = index->sources ? index->sources->n : 1;
    *epochs = INFINITY;
    for (int32_t i = 0; i < n; i++) {
        const DocIndex one = n > 1 ? mixture_source(index, i) : *index;
        SourceCursor next = at->sources[i];
        LongCounts counts = {0};
        Segment found;
        if (n > 1 && index->sources->list[i].weight == 0) continue;
        if (!stream_next_segment(&one, s, &next, &found, &counts, err))
            return n > 1 ? error_prefix(err, index->sources->list[i].spec) : false;
        const int64_t passed = next.doc_pos - (next.tok_off == 0);
        const double so_far = (double)next.epoch + (double)passed / (double)one.num_docs;
        if (so_far < *epochs) *epochs = so_far, *source = i;
    }
    return true;
}

static double epochs(const Source *s, const SourceCursor *c) {
    const double docs = (double)c->doc_pos / (double)s->num_docs;
    return (double)c->epoch + fmin(1, docs + (double)c->tok_off / (double)s->num_tokens);
}

void mixture_print(const Sources *s, const PlanState *at, double tokens_per_step) {
    for (int32_t i = 0; s->n > 1 && tokens_per_step > 0 && i < s->n; i++) {
        const Source *one = &s->list[i];
        const double share = (double)one->weight / ALL_WEIGHTS;
        printf("source  %s: %.4g %%, %ld tokens, ~%.3g steps an epoch; %ld drawn, %.2f epochs\n",
               one->spec, 100 * share, one->num_tokens,
               (double)one->num_tokens / (share * tokens_per_step), at->sources[i].tokens,
               epochs(one, &at->sources[i]));
    }
}

json_t *mixture_json(const Sources *s, const PlanState *at) {
    json_t *all = s && s->n > 1 ? json_array() : NULL;
    for (int32_t i = 0; all && i < s->n; i++)
        json_array_append_new(
            all, json_pack("{s:o, s:I, s:o}", "path", json_text(s->list[i].spec), "tokens",
                           at->sources[i].tokens, "epochs",
                           json_float((float)epochs(&s->list[i], &at->sources[i]))));
    return all;
}
