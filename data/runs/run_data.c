#include "run_data.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "../base/error.h"
#include "../base/path.h"
#include "vocabulary.h"

static DatasetOptions data_options(const Options *o, const char *split, int32_t vocab_size) {
    DatasetOptions options = dataset_options();
    options.split = split;
    options.vocab_size = vocab_size;
    options.boundary_token = o->boundary_token;
    return options;
}

static void open_datasets(Data *d, const Options *o, int32_t vocab_size) {
    Error err = {0};
    DatasetOptions options = data_options(o, NULL, vocab_size);
    if (strcmp(o->train, "data/demo") == 0 && !path_exists(o->train))
        exit_with(EXIT_BAD_INPUT, "scripts/quickstart.sh prepares it and trains; or give --train",
                  "%s: no training data yet", o->train);
    must(dataset_open(&d->train, o->train, &options, &err), &err);
    options.split = "val";
    if (!o->val && !path_is_dir(o->train)) return;
    d->has_val = dataset_open(&d->val, o->val ? o->val : o->train, &options, &err);
    must(d->has_val || !o->val, &err);
}

static void check_vocabulary(const Data *d, const Options *o, const LlamaConfig *config) {
    Error err = {0};
    const NamedData train = {o->train, &d->train},
                    val = {o->val ? o->val : o->train, d->has_val ? &d->val : NULL};
    must(vocabulary_check(o->model, &train, &val, o->allow_other_tokenizer, &err), &err);
    must(vocabulary_warn(o->model, config, model_is_builtin(o), &train, &err), &err);
}

// The tokenizer's files all from one directory: those of two would not fit each other.
static void read_model_files(Data *d, const Options *o, const ResumePoint *at, bool is_rank_0) {
    Error err = {0};
    const char *dirs[] = {at->dir, o->model, o->train}, *from = NULL;
    char path[IO_PATH_MAX];
    for (int i = 0; i < 3 && !from; i++) {
        if (!path_is_dir(dirs[i])) continue;
        must(path_join(path, sizeof path, dirs[i], "tokenizer.json", &err), &err);
        if (path_exists(path)) from = dirs[i];
    }
    d->has_tokenizer = from != NULL;
    if (from) must(tokenizer_open(&d->tokenizer, path, &err), &err);
    if (!is_rank_0) return;
    must(model_files_read_tokenizer(&d->files, from ? &from : dirs, from ? 1 : 3, &err), &err);
    must(model_files_read_generation(&d->files, dirs, 2, &err), &err);
}

static LoaderSettings make_loader_settings(const Options *o, int32_t rank, int32_t num_ranks) {
    Error err = {0};
    const int32_t num_micro = (int32_t)(o->batch_tokens / o->micro_batch_tokens);
    // one micro-batch needs no slack
    const float fill = o->fill > 0 ? o->fill : num_micro == 1 ? 1 : 0.97f;
    const LoaderSettings s = {.plan = {.seed = (uint64_t)o->seed,
                                       .max_seqlen = o->max_seqlen,
                                       .micro_batch_tokens = o->micro_batch_tokens,
                                       .num_micro = num_micro,
                                       .fill_ppm = (int32_t)lrintf(1e6f * fill),
                                       .long_docs = (LongDocs)o->long_docs},
                              .layout = (Layout)o->layout,
                              .rank = rank,
                              .num_ranks = num_ranks,
                              .deterministic_reduction = reduces_deterministically(o)};
    must(plan_settings_check(&s.plan, &err), &err);
    return s;
}

// Validation: the first documents of a fixed order, the same for every run and seed.
static void load_validation(Data *d, const Options *o) {
    Error err = {0};
    LoaderSettings s = d->loader_settings;
    if (!d->has_val) return;
    const DocIndex index = dataset_doc_index(&d->val);
    s.layout = LAYOUT_PACKED;
    s.deterministic_reduction = s.num_ranks > 1 || reduces_deterministically(o);
    s.plan.seed = 0;
    must(plan_fix_set(&s.plan, &index, o->val_tokens, &err), &err);
    must(loader_load_step(&d->val_step, &d->val, &s, (PlanState){0}, &err), &err);
    const StepPlan *p = &d->val_step.plan;
    assert(p->real_tokens == s.plan.set_tokens);
    d->val_set = (ValidationSet){0, p->real_tokens, p->num_targets};
    const Segment *c = p->stream;
    for (int64_t i = 0; i < p->num_stream; i++)
        d->val_set.docs += i == 0 || c[i].doc != c[i - 1].doc;
}

void open_data(Data *d, const Options *o, const ResumePoint *at, const LlamaConfig *config,
               int32_t rank, int32_t num_ranks) {
    Error err = {0};
    open_datasets(d, o, config->vocab_size);
    check_vocabulary(d, o, config);
    read_model_files(d, o, at, rank == 0);
    d->loader_settings = make_loader_settings(o, rank, num_ranks);
    const PlanSettings *plan = &d->loader_settings.plan;
    must(data_summary(&d->train_summary, &d->train, plan, &err), &err);
    if (d->has_val) must(data_summary(&d->val_summary, &d->val, plan, &err), &err);
    load_validation(d, o);
}

void open_eval_data(Dataset *val, const char *path, const Options *o, int32_t vocab_size) {
    Error err = {0};
    DatasetOptions options = data_options(o, "val", vocab_size);
    if (!path_is_dir(path) || !dataset_open(val, path, &options, &(Error){0})) {
        options.split = "train";
        must(dataset_open(val, path, &options, &err), &err);
    }
    const NamedData data = {path, val}, none = {path, NULL};
    must(vocabulary_check(o->model, &data, &none, o->allow_other_tokenizer, &err), &err);
}
