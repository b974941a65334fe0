#include "loader.h"

#include <assert.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"

// ---- One step -----------------------------------------------------------------------------------

// The functions of the index of a data set
static int64_t length_of(const void *ds, int64_t doc) { return dataset_doc_length(ds, doc); }
static bool follows(const void *ds, int64_t doc) { return dataset_doc_follows(ds, doc); }

static int64_t targets_of(const void *ds, int64_t doc, int64_t from, int64_t n) {
    return dataset_count_targets(ds, doc, from, n);
}

static double weights_of(const void *ds, const Segment *c) {
    double sum = 0;
    for (int64_t i = 1; i < c->length + c->has_next; i++)
        sum += fabs((double)dataset_weight(ds, c->doc, c->tok_off + i));
    return sum;
}

static bool read_tokens(const void *ds, const Segment *c, int64_t n, int32_t *tokens, Error *err) {
    return dataset_read((Dataset *)ds, c->doc, c->tok_off, n, tokens, err);
}

DocIndex dataset_doc_index(const Dataset *ds) {
    return (DocIndex){.num_docs = ds->num_docs,
                      .length = length_of,
                      .context = ds,
                      .targets = ds->masked ? targets_of : NULL,
                      .follows = ds->masked ? follows : NULL,
                      .weights = ds->weighted ? weights_of : NULL,
                      .sources = &ds->sources,
                      .read = read_tokens};
}

void step_data_free(StepData *d) {
    for (int32_t i = 0; i < d->num_allocated; i++) batch_free(&d->micro[i]);
    free(d->micro);
    plan_free(&d->plan);
    free(d->tokens);
    free(d->own_micros);
    free(d->views);
    *d = (StepData){0};
}

bool segment_read(DocView *view, Dataset *ds, const Segment *c, double weight_scale,
                  int32_t *tokens, Error *err) {
    const int32_t n = c->length - 1 + c->has_next;
    int32_t *targets = ds->masked ? tokens + n + 1 : NULL;
    float *weights = ds->weighted ? (float *)(tokens + n + 1 + c->length) : NULL;
    if (!dataset_read(ds, c->doc, c->tok_off, n + 1, tokens, err)) return false;
    *view = (DocView){.tokens = tokens,
                      .length = c->length,
                      .next_token = c->has_next ? tokens[n] : -1,
                      .targets = targets,
                      .weights = weights,
                      .shared_len = c->shared_len};
    if (!targets) return true;
    targets[c->length - 1] = -1;
    if (weights) weights[c->length - 1] = 0;
    for (int32_t i = 0; i < n; i++) {
        const float weight = dataset_weight(ds, c->doc, c->tok_off + 1 + i);
        targets[i] = weight != 0 ? tokens[i + 1] : -1;
        if (weights) weights[i] = (float)(weight_scale * (double)weight);
    }
    return true;
}

// Reads the segments of a micro-batch of d's plan and fills *b.
static bool step_data_read(StepData *d, Batch *b, Dataset *ds, const LoaderSettings *s,
                           int32_t micro, Error *err) {
    const StepPlan *plan = &d->plan;
    const int64_t from = plan->micro_start[micro], to = plan->micro_start[micro + 1];
    const size_t n = (size_t)(to - from);
    size_t tokens = n;
    for (int64_t i = from; i < to; i++) tokens += 3 * (size_t)plan->segments[i].length;
    array_grow(d->views, &d->view_capacity, n, "documents");
    array_grow(d->tokens, &d->token_capacity, tokens, "tokens");
    int32_t *at = d->tokens;
    for (int64_t i = from; i < to; at += 3 * plan->segments[i++].length + 1)
        if (!segment_read(&d->views[i - from], ds, &plan->segments[i], plan->weight_scale, at, err))
            return false;
    batch_fill(b, s->layout, d->views, (int)n, plan_row_len(plan, &s->plan, micro));
    b->first_doc = from;
    const DocIndex index = dataset_doc_index(ds);
    if (s->plan.pairs) pairs_fill(b, &s->pairs, &index, &plan->segments[from]);
    assert(batch_is_valid(b, ds->vocab_size));
    return true;
}

bool step_data_documents(Batch *docs, StepData *d, Dataset *ds, const LoaderSettings *s,
                         Error *err) {
    const int64_t *start = &d->plan.micro_start[d->own_micros[0]];
    LoaderSettings packed = *s;
    int32_t tokens = 0;
    packed.layout = LAYOUT_PACKED;
    for (int64_t i = start[0]; i < start[1]; i++) tokens += d->plan.segments[i].length;
    batch_init(docs, tokens, (int32_t)(start[1] - start[0]));
    return step_data_read(d, docs, ds, &packed, d->own_micros[0], err);
}

bool loader_load_step(StepData *out, Dataset *ds, const LoaderSettings *s, PlanState state,
                      Error *err) {
    DocIndex index = dataset_doc_index(ds);
    if (s->source > 0) index = mixture_source(&index, s->source - 1);
    if (!plan_step(&out->plan, &index, &s->plan, s->layout, &state, err)) return false;
    array_grow(out->own_micros, &out->own_capacity, (size_t)out->plan.num_micro, "the step plan");
    const int32_t num_leaves = s->deterministic_reduction ? s->plan.num_micro : 0;
    out->num_micro = plan_rank_micros(&out->plan, num_leaves, s->rank, s->num_ranks,
                                      out->own_micros, &out->imbalance);
    const int32_t rows = s->plan.micro_batch_tokens;
    size_t slots = (size_t)out->num_allocated;
    array_grow(out->micro, &slots, (size_t)out->num_micro, "batches");
    while (out->num_allocated < out->num_micro)
        batch_init(&out->micro[out->num_allocated++], rows, rows);
    out->local_tokens = 0;
    for (int32_t i = 0; i < out->num_micro; i++) {
        if (!step_data_read(out, &out->micro[i], ds, s, out->own_micros[i], err)) return false;
        out->local_tokens += out->micro[i].total_tokens;
    }
    return true;
}

// ---- The thread ---------------------------------------------------------------------------------

static void *loader_run(void *argument) {
    Loader *l = argument;
    for (int slot = 0; !l->error.code; slot = 1 - slot) {
        while (sem_wait(&l->empty) != 0) continue;
        if (l->stop) break;
        StepData *data = &l->slots[slot];
        l->failed[slot] = !loader_load_step(data, l->dataset, &l->settings, l->next, &l->error);
        l->next = data->plan.cursor_after;
        sem_post(&l->full);
    }
    return NULL;
}

bool loader_start(Loader *l, Dataset *ds, const LoaderSettings *s, PlanState state, Error *err) {
    *l = (Loader){.dataset = ds, .settings = *s, .next = state, .current = -1};
    if (!plan_settings_check(&s->plan, err)) return false;
    sem_init(&l->empty, 0, 2);
    sem_init(&l->full, 0, 0);
    sigset_t all, before;  // only the main thread handles signals
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&l->thread, NULL, loader_run, l);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    l->running = failed == 0;
    return l->running || error_set(err, EXIT_HOST_MEMORY, "raise the thread limit (ulimit -u)",
                                   "data loader: cannot start a thread: %s", strerror(failed));
}

const StepData *loader_next(Loader *l, Error *err) {
    if (l->current >= 0) sem_post(&l->empty);
    l->current = l->current < 0 ? 0 : 1 - l->current;
    while (sem_wait(&l->full) != 0) continue;  // interrupted by a signal
    if (!l->failed[l->current]) return &l->slots[l->current];
    *err = l->error;
    l->failed[1 - l->current] = true;
    sem_post(&l->full);  // another call fails, too
    return NULL;
}

void loader_stop(Loader *l) {
    if (!l->running) return;
    l->stop = true;
    sem_post(&l->empty);
    pthread_join(l->thread, NULL);
    sem_destroy(&l->empty);
    sem_destroy(&l->full);
    step_data_free(&l->slots[0]);
    step_data_free(&l->slots[1]);
    *l = (Loader){0};
}
