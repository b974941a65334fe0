#include "evaluate.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"
#include "../base/signals.h"
#include "../batches/loader.h"
#include "../runs/ledger.h"

void scorer_open(Scorer *s, const Options *o, ModelFace model) {
    const int32_t most = o->micro_batch_tokens;
    *s = (Scorer){.o = o, .model = model};
    batch_init(&s->batch, most, most);
    s->losses = host_calloc((size_t)most, sizeof *s->losses, "losses");
    s->docs = host_calloc((size_t)most, sizeof *s->docs, "documents");
    s->sums = host_calloc((size_t)most, sizeof *s->sums, "documents");
}

// The choices of a question, and questions after one header, share what they begin with. A shared
// prefix also begins all documents back to the leader, so that comparing neighbours is enough.
static void share_prefixes(DocView *docs, int n) {
    for (DocView *d = docs + 1; d < docs + n; d++) {
        const int32_t most = d[-1].shared_len > 0 ? d[-1].shared_len + 1 : d[-1].length;
        int32_t same = 0;
        while (same < d->length && same < most && d->tokens[same] == d[-1].tokens[same]) same++;
        d->shared_len = (same - 1) / SHARED_TILE_TOKENS * SHARED_TILE_TOKENS;
    }
}

static double sum_of(const Scorer *s, int i) {
    const Batch *b = &s->batch;
    double sum = *s->sums[i];
    for (int32_t k = b->doc_runs[i]; k < b->doc_runs[i + 1]; k++)
        for (int32_t at = b->runs[2 * k], end = at + b->runs[2 * k + 1]; at < end; at++)
            sum += (double)s->losses[b->head_rows[at]];
    return sum;
}

// A signal stops --eval at once, and its shards of texts are removed; a run first finishes this.
static void score_micro_batch(Scorer *s) {
    const Batch *b = &s->batch;
    if (s->num_docs == 0) return;
    if (stop_signal && s->o->eval) exit(128 + (int)stop_signal);
    share_prefixes(s->docs, s->num_docs);
    batch_fill(&s->batch, LAYOUT_SHARED, s->docs, s->num_docs, 0);
    assert(batch_is_valid(b, s->model.vocab_size));
    s->model.pass(s->model.model, b, false, s->losses, NULL);
    for (int i = 0; i < s->num_docs; i++) *s->sums[i] = sum_of(s, i);
    s->num_docs = 0;
}

DocView *scorer_next(Scorer *s, int32_t length, double *sum) {
    if (s->tokens + length > s->o->micro_batch_tokens) {
        score_micro_batch(s);
        s->turn = (s->turn + 1) % s->model.num_ranks;
        s->tokens = 0;
    }
    s->tokens += length;
    if (s->turn != s->model.rank) return NULL;
    s->sums[s->num_docs] = sum;
    return &s->docs[s->num_docs++];
}

void scorer_close(Scorer *s, double *values, size_t n) {
    const size_t all = (size_t)s->model.num_ranks * n;
    if (values) {
        AUTO_FREE double *parts = host_calloc(all, sizeof *parts, "scores");
        score_micro_batch(s);
        s->model.gather(parts, values, n * sizeof *values);
        memset(values, 0, n * sizeof *values);
        for (size_t i = 0; i < all; i++) values[i % n] += parts[i];  // in the order of the ranks
    }
    batch_free(&s->batch);
    free(s->losses);
    free(s->docs);
    free(s->sums);
}

// Documents of 2^b to 2^(b+1) - 1 tokens are row b.
enum { EVALUATION_ROWS = 48 };
typedef struct {
    double docs, targets, loss_sum;
} EvaluationRow;

static void row_print(const char *name, const EvaluationRow *row) {
    const double loss = row->loss_sum / row->targets;
    printf("%-17s %10.0f %12.0f", name, row->docs, row->targets);
    if (row->targets > 0) printf(" %10.4f %12.2f", loss, exp(loss));
    printf("\n");
}

static void table_print(const Dataset *data, const StepPlan *all, const double *sums) {
    const DocIndex index = dataset_doc_index(data);
    const Segment *c = all->segments;
    EvaluationRow rows[EVALUATION_ROWS] = {0}, total = {0};
    char name[48];
    for (int64_t i = 0; i < all->num_segments; i++) {
        EvaluationRow *row = &rows[(int)log2((double)dataset_doc_length(data, c[i].doc))];
        row->docs += i == 0 || c[i].doc != c[i - 1].doc;
        row->targets += (double)stream_targets(&index, &c[i]);
        row->loss_sum += sums[i];
    }
    printf("document tokens    documents      targets       loss   perplexity\n");
    for (int b = 0; b < EVALUATION_ROWS; b++) {
        total.docs += rows[b].docs;
        total.targets += rows[b].targets;
        total.loss_sum += rows[b].loss_sum;
        snprintf(name, sizeof name, "%ld to %ld", (int64_t)1 << b, ((int64_t)2 << b) - 1);
        if (rows[b].docs > 0) row_print(name, &rows[b]);
    }
    row_print("all", &total);
}

bool evaluate(Dataset *data, const Options *o, ModelFace model, Error *err) {
    const DocIndex index = dataset_doc_index(data);
    const PlanSettings plan = {.seed = (uint64_t)o->seed,
                               .max_seqlen = o->max_seqlen,
                               .micro_batch_tokens = o->micro_batch_tokens,
                               .long_docs = (LongDocs)o->long_docs};
    SourceCursor at = {0};
    LongCounts left_out = {0};
    Scorer s;
    // with the one after the last
    const size_t most = (size_t)(data->num_docs + data->num_tokens / o->max_seqlen) + 1;
    AUTO_FREE Segment *segments = host_calloc(most, sizeof *segments, "evaluation");
    AUTO_FREE double *sums = host_calloc(most, sizeof *sums, "evaluation");
    AUTO_FREE int32_t *tokens =
        host_calloc(3 * (size_t)o->micro_batch_tokens, sizeof *tokens, "evaluation");
    StepPlan all = {.segments = segments, .weight_scale = 1};
    scorer_open(&s, o, model);
    bool ok = stream_next_segment(&index, &plan, &at, segments, &left_out, err);
    while (ok && at.epoch == 0) {
        Segment *c = &segments[all.num_segments];
        DocView *doc = scorer_next(&s, c->length, &sums[all.num_segments++]);
        ok = (!doc || segment_read(doc, data, c, 1, tokens + 3 * (s.tokens - c->length), err)) &&
             stream_next_segment(&index, &plan, &at, c + 1, &left_out, err);
    }
    scorer_close(&s, ok ? sums : NULL, (size_t)all.num_segments);
    if (!ok || model.rank > 0) return ok;
    table_print(data, &all, sums);
    return !o->ledger || ledger_write(o->ledger, data, &all, sums, err);
}
