#include "summary.h"

#include <string.h>

#include "loader.h"

bool data_summary(DataSummary *d, const Dataset *ds, const PlanSettings *s, Error *err) {
    const DocIndex index = dataset_doc_index(ds);
    d->dataset = ds;
    d->max_seqlen = s->max_seqlen;
    return stream_count_left_out(&index, s, &d->counts, err);
}

static int64_t num_long_docs(const DataSummary *d) {
    return d->counts.docs_split + d->counts.docs_truncated + d->counts.docs_dropped;
}

// "2 documents longer than 40 tokens dropped, 1 document without a target: 154 of 166 tokens
// (92.8 %) never trained"; empty when there is no such document
static void summary_text(const DataSummary *d, char *out, size_t capacity) {
    const LongCounts *c = &d->counts;
    const int64_t docs = num_long_docs(d), tokens = d->dataset->num_tokens;
    const char *done = c->docs_dropped ? "dropped" : c->docs_truncated ? "truncated" : "split";
    out[0] = 0;
    if (docs > 0)
        text_list(out, capacity, "%ld document%s longer than %d tokens %s", docs, text_plural(docs),
                  d->max_seqlen, done);
    if (c->docs_without_target > 0)
        text_list(out, capacity, "%ld document%s without a target", c->docs_without_target,
                  text_plural(c->docs_without_target));
    const size_t used = strlen(out);
    if (c->tokens_left_out > 0)
        snprintf(out + used, capacity - used, ": %ld of %ld tokens (%.1f %%) never trained",
                 c->tokens_left_out, tokens, 100.0 * (double)c->tokens_left_out / (double)tokens);
}

void data_summary_print(const DataSummary *d, const char *label) {
    char text[512];
    if (!d->dataset) {
        printf("%snone; --val FILE or DIR gives some\n", label);
        return;
    }
    dataset_describe(d->dataset, text, sizeof text);
    printf("%s%s\n", label, text);
    summary_text(d, text, sizeof text);
    if (text[0]) printf("%*s%s\n", (int)strlen(label), "", text);
}

// Plans the first eight steps from `at` on, or fewer if they are large.
bool plan_print(const PlanSettings *s, Layout layout, const DataSummary *train, PlanState at,
                Error *err) {
    const DocIndex index = dataset_doc_index(train->dataset);
    const bool shares = layout == LAYOUT_SHARED, may_share = shares || layout == LAYOUT_PACKED;
    const PlanState start = at;
    STEP_PLAN p = {0};
    double tokens = 0, saved = 0;
    int steps = 0;
    for (; steps < 8 && tokens < 0x1p24; steps++) {
        const bool first = steps == 0 && may_share;
        if (!plan_step(&p, &index, s, first ? LAYOUT_SHARED : LAYOUT_PACKED, &at, err))
            return false;
        if (first) saved = 1 - (double)p.computed_tokens / (double)p.real_tokens;
        tokens += (double)p.real_tokens;
        at = p.cursor_after;
    }
    const double fill = tokens / ((double)s->num_micro * s->micro_batch_tokens * steps);
    printf(
        "plan    %s, %d micro-batch%s of %d tokens a step, filled to %.1f %%, documents up to %d "
        "tokens (%s)\n",
        layout_name(layout), s->num_micro, s->num_micro == 1 ? "" : "es", s->micro_batch_tokens,
        100 * fill, s->max_seqlen,
        s->long_docs == LONG_SPLIT ? "longer ones are split" : "see --long-docs");
    mixture_print(&train->dataset->sources, &start, tokens / steps);
    if (shares || saved > 0.05)
        printf("shared prefixes: %.0f %% of the tokens of the next step%s\n", 100 * saved,
               shares ? " are not computed again" : "; --layout shared computes them once");
    if (layout == LAYOUT_PACKED && fill < 0.8 * s->fill_ppm * 1e-6 &&
        s->micro_batch_tokens < 4 * s->max_seqlen)
        printf(
            "fill    %.0f %% in the next %d step%s, because few documents fit together; for more, "
            "set --micro-batch-tokens to several times --max-seqlen (%d)\n",
            100 * fill, steps, text_plural(steps), s->max_seqlen);
    return true;
}

json_t *data_summary_json(const DataSummary *d) {
    const Dataset *ds = d->dataset;
    if (!ds) return json_null();
    json_t *all =
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "shards", (int64_t)ds->num_shards,
                  "unchecked_shards", (int64_t)ds->num_unchecked, "documents", ds->num_docs,
                  "tokens", ds->num_tokens, "empty_documents", ds->num_empty, "long_documents",
                  num_long_docs(d), "tokens_left_out", d->counts.tokens_left_out);
    if (ds->masked)
        json_object_update_new(
            all, json_pack("{s:I, s:I}", "targets", ds->num_targets, "documents_without_target",
                           d->counts.docs_without_target));
    return all;
}
