#include "scorer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"
#include "../base/signals.h"

void scorer_open(Scorer *s, const Options *o, ModelFace model) {
    const int32_t most = o->micro_batch_tokens;
    *s = (Scorer){.o = o, .model = model};
    batch_init(&s->batch, most, most);
    s->losses = host_calloc((size_t)most, sizeof *s->losses, "losses");
    s->docs = host_calloc((size_t)most, sizeof *s->docs, "documents");
    s->sums = host_calloc((size_t)most, sizeof *s->sums, "documents");
}

// A signal stops --eval at once, and its shards of texts are removed; a run first finishes this.
static void score_micro_batch(Scorer *s) {
    const Batch *b = &s->batch;
    if (s->num_docs == 0) return;
    if (stop_signal && s->o->eval) exit(128 + (int)stop_signal);
    batch_pack(&s->batch, s->docs, s->num_docs);
    assert(batch_is_valid(b, s->model.vocab_size));
    s->model.get_losses(s->model.model, b, s->losses);
    for (int i = 0; i < s->num_docs; i++)
        for (int32_t t = b->cu_seqlens[i]; t < b->cu_seqlens[i + 1]; t++)
            *s->sums[i] += (double)s->losses[t];
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

// Every rank adds up the values in the order of the ranks.
static void sum_over_ranks(const ModelFace *model, double *values, size_t n) {
    double *all = host_calloc((size_t)model->num_ranks * n, sizeof *all, "scores");
    model->gather(all, values, n * sizeof *values);
    memset(values, 0, n * sizeof *values);
    for (size_t i = 0; i < (size_t)model->num_ranks * n; i++) values[i % n] += all[i];
    free(all);
}

void scorer_close(Scorer *s, double *values, size_t n) {
    if (values) score_micro_batch(s);
    if (values) sum_over_ranks(&s->model, values, n);
    batch_free(&s->batch);
    free(s->losses);
    free(s->docs);
    free(s->sums);
}
