#include "evaluate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"

// The segments of the next micro-batch
typedef struct {
    const Evaluation *e;
    EvaluationRow *rows;
    int32_t *tokens;   // (2 * micro_batch_tokens): of each segment, with the one after it
    int32_t *targets;  // (micro_batch_tokens)
    DocView *docs;     // (num_docs), and the row of each
    int *row_of;
    int32_t num_tokens, num_docs;
    int64_t num_batches;
    float *losses;  // (micro_batch_tokens)
    Batch batch;
} Evaluator;

static void evaluate_batch(Evaluator *v) {
    if (v->num_docs == 0) return;
    if (v->num_batches++ % v->e->num_ranks == v->e->rank) {
        batch_pack(&v->batch, v->docs, v->num_docs);
        v->e->losses(v->e->context, &v->batch, v->losses);
        for (int32_t d = 0; d < v->num_docs; d++) {
            EvaluationRow *row = &v->rows[v->row_of[d]];
            for (int32_t t = v->batch.cu_seqlens[d]; t < v->batch.cu_seqlens[d + 1]; t++) {
                row->targets += v->batch.targets[t] >= 0;
                row->loss_sum += (double)v->losses[t];
            }
        }
    }
    v->num_tokens = v->num_docs = 0;
}

// Tokens [first, first + n) of a document whose `length` tokens count; the next one is a target.
static bool add_segment(Evaluator *v, Dataset *data, int64_t doc, int64_t first, int32_t n,
                        int64_t length, int row, Error *err) {
    if (v->num_tokens + n > v->e->micro_batch_tokens) evaluate_batch(v);
    const int32_t count = n + (first + n < length);
    int32_t *tokens = v->tokens + v->num_tokens + v->num_docs,
            *targets = v->targets + v->num_tokens;
    if (!dataset_read(data, doc, first, count, tokens, err)) return false;
    memcpy(targets, tokens + 1, (size_t)(count - 1) * sizeof(int32_t));
    if (count == n) targets[n - 1] = -1;
    if (count > 1) dataset_mask_tokens(data, doc, first + 1, count - 1, targets);
    v->docs[v->num_docs] = (DocView){tokens, n, count > n ? tokens[n] : -1, targets};
    v->row_of[v->num_docs++] = row;
    v->num_tokens += n;
    return true;
}

static bool add_document(Evaluator *v, Dataset *data, int64_t doc, Error *err) {
    const int64_t all = dataset_doc_length(data, doc), most = v->e->max_seqlen;
    const LongDocs how = v->e->long_docs;
    const int row = (int)log2((double)all);
    int64_t length = all;
    if (all > most && how == LONG_DROP) return true;
    if (all > most && how == LONG_ERROR)
        return error_set(err, EXIT_BAD_INPUT, "raise --max-seqlen, or choose another --long-docs",
                         "document %ld has %ld tokens, expected at most %ld", doc, all, most);
    if (all > most && how == LONG_TRUNCATE) length = most;
    if (v->e->rank == 0) v->rows[row].docs++;
    for (int64_t at = 0; at < length; at += most) {
        const int32_t n = (int32_t)(length - at < most ? length - at : most);
        if (!add_segment(v, data, doc, at, n, length, row, err)) return false;
    }
    return true;
}

bool evaluate(EvaluationRow *rows, Dataset *data, const Evaluation *e, Error *err) {
    const size_t most = (size_t)e->micro_batch_tokens;
    Evaluator v = {.e = e,
                   .rows = rows,
                   .tokens = host_calloc(2 * most, sizeof(int32_t), "evaluation"),
                   .targets = host_calloc(most, sizeof(int32_t), "evaluation"),
                   .docs = host_calloc(most, sizeof(DocView), "evaluation"),
                   .row_of = host_calloc(most, sizeof(int), "evaluation"),
                   .losses = host_calloc(most, sizeof(float), "evaluation")};
    bool ok = true;
    batch_init(&v.batch, e->micro_batch_tokens, e->micro_batch_tokens);
    for (int64_t doc = 0; ok && doc < data->num_docs; doc++) ok = add_document(&v, data, doc, err);
    if (ok) evaluate_batch(&v);
    batch_free(&v.batch);
    free(v.tokens);
    free(v.targets);
    free(v.docs);
    free(v.row_of);
    free(v.losses);
    return ok;
}

static void row_print(const char *name, const EvaluationRow *row) {
    const double loss = row->targets ? row->loss_sum / (double)row->targets : NAN;
    printf("%-17s %10ld %12ld", name, row->docs, row->targets);
    if (row->targets) printf(" %10.4f %12.2f", loss, exp(loss));
    printf("\n");
}

void evaluation_print(const EvaluationRow *rows, int32_t num_ranks) {
    EvaluationRow total = {0};
    char name[48];
    printf("document tokens    documents      targets       loss   perplexity\n");
    for (int b = 0; b < EVALUATION_ROWS; b++) {
        EvaluationRow row = {0};
        for (int32_t r = 0; r < num_ranks; r++) {
            const EvaluationRow *own = &rows[r * EVALUATION_ROWS + b];
            row.docs += own->docs;
            row.targets += own->targets;
            row.loss_sum += own->loss_sum;
        }
        total.docs += row.docs;
        total.targets += row.targets;
        total.loss_sum += row.loss_sum;
        if (row.docs == 0) continue;
        snprintf(name, sizeof name, "%ld to %ld", (int64_t)1 << b, ((int64_t)2 << b) - 1);
        row_print(name, &row);
    }
    row_print("all", &total);
}
