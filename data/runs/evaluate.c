#include "evaluate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"
#include "../batches/loader.h"

// Documents of 2^b to 2^(b+1) - 1 tokens are row b.
enum { EVALUATION_ROWS = 48 };
typedef struct {
    double docs, targets, loss_sum;
} EvaluationRow;

void evaluation_sum(const Evaluation *e, double *values, size_t n) {
    double *all = host_calloc((size_t)e->num_ranks * n, sizeof *all, "evaluation");
    e->gather(all, values, n * sizeof *values);
    memset(values, 0, n * sizeof *values);
    for (size_t i = 0; i < (size_t)e->num_ranks * n; i++) values[i % n] += all[i];
    free(all);
}

// The row of a document
static EvaluationRow *row_of(EvaluationRow *rows, const Dataset *data, int64_t doc) {
    return &rows[(int)log2((double)dataset_doc_length(data, doc))];
}

// Adds the micro-batch of d's plan to the rows.
static bool add_batch(EvaluationRow *rows, StepData *d, Batch *b, Dataset *data,
                      const LoaderSettings *s, const Evaluation *e, Error *err) {
    if (!step_data_read(d, b, data, s, 0, err)) return false;
    float *losses = host_calloc((size_t)b->total_tokens, sizeof(float), "evaluation");
    e->losses(e->context, b, losses);
    for (int32_t i = 0; i < b->num_segments; i++) {
        EvaluationRow *row = row_of(rows, data, d->plan.segments[i].doc);
        for (int32_t t = b->cu_seqlens[i]; t < b->cu_seqlens[i + 1]; t++) {
            row->targets += b->targets[t] >= 0;
            row->loss_sum += (double)losses[t];
        }
    }
    free(losses);
    return true;
}

static void row_print(const char *name, const EvaluationRow *row) {
    const double loss = row->loss_sum / row->targets;
    printf("%-17s %10.0f %12.0f", name, row->docs, row->targets);
    if (row->targets > 0) printf(" %10.4f %12.2f", loss, exp(loss));
    printf("\n");
}

static void table_print(const EvaluationRow *rows) {
    EvaluationRow total = {0};
    char name[48];
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

bool evaluate(Dataset *data, const Evaluation *e, Error *err) {
    const DocIndex index = dataset_doc_index(data);
    const int32_t most = e->o->micro_batch_tokens;
    const LoaderSettings s = {.plan = {.seed = (uint64_t)e->o->seed,
                                       .max_seqlen = e->o->max_seqlen,
                                       .micro_batch_tokens = most,
                                       .long_docs = (LongDocs)e->o->long_docs}};
    EvaluationRow rows[EVALUATION_ROWS] = {0};
    StepData d = {0};
    Batch b;
    SourceCursor at = {0};
    LongCounts left_out = {0};
    Segment next;
    int64_t last_doc = -1, num_batches = 0;
    d.plan.segments = host_calloc((size_t)most, sizeof(Segment), "evaluation");
    d.plan.micro_start = host_calloc(2, sizeof(int64_t), "evaluation");
    batch_init(&b, most, most);
    bool ok = stream_next_segment(&index, &s.plan, &at, &next, &left_out, err);
    while (ok && at.epoch == 0) {
        int64_t n = 0;
        for (int64_t tokens = 0; ok && at.epoch == 0 && tokens + next.length <= most;) {
            if (e->rank == 0 && next.doc != last_doc) row_of(rows, data, next.doc)->docs++;
            last_doc = next.doc;
            tokens += next.length;
            d.plan.segments[n++] = next;
            ok = stream_next_segment(&index, &s.plan, &at, &next, &left_out, err);
        }
        d.plan.micro_start[1] = n;
        if (ok && num_batches++ % e->num_ranks == e->rank)
            ok = add_batch(rows, &d, &b, data, &s, e, err);
    }
    if (ok) evaluation_sum(e, &rows->docs, EVALUATION_ROWS * sizeof *rows / sizeof(double));
    if (ok && e->rank == 0) table_print(rows);
    batch_free(&b);
    step_data_free(&d);
    return ok;
}
