#include "mixture.h"

#include <assert.h>
#include <math.h>

#include "../base/json.h"

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
    for (int32_t i = 0; i < index->sources->n; i++) all += at->sources[i].counted;
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
