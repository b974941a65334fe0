#include "run_data.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "../base/memory.h"
#include "../shards/find_files.h"

// ------------------------------------------------------------------------------------------------
// Do the model and the shards mean the same by a token id? Both may name their tokenizer, by the
// first 8 bytes of SHA-256 of its tokenizer.json, and the ids that begin and end documents.

// Has the directory a tokenizer.json? Writes its path.
static bool has_tokenizer(const char *dir, char path[IO_PATH_MAX]) {
    return path_is_dir(dir) && path_exists(path_in(path, dir, "tokenizer.json"));
}

// 0: the directory has none.
static uint64_t tokenizer_hash(const char *dir, char path[IO_PATH_MAX]) {
    unsigned char digest[32];
    uint64_t hash;
    if (!has_tokenizer(dir, path)) return 0;
    must(file_sha256(path, digest, &err));
    memcpy(&hash, digest, sizeof hash);
    return hash;
}

// Exits, or only warns with --allow-other-tokenizer, when both hashes are known and differ. whose,
// path: of the hashes, as the user named them.
static void same_tokenizer(const Options *o, const char *whose, uint64_t hash, const char *path,
                           uint64_t found) {
    char hint[512];
    Error err = {0};
    if (hash == 0 || found == 0 || hash == found) return;
    snprintf(hint, sizeof hint,
             "make shards of the texts with --model %.200s; or, if both give the same ids, "
             "--allow-other-tokenizer",
             o->model);
    error_set(&err, EXIT_CHECKPOINT_MISFIT, hint,
              "%s: expected the tokenizer of %s (SHA-256 %016lx...), found %016lx...", path, whose,
              __builtin_bswap64(hash), __builtin_bswap64(found));
    if (!o->allow_other_tokenizer) error_exit(&err);
    warning("%s", err.what);
}

// val: 0 where there is none.
static void check_tokenizers(const Options *o, const char *train_path, uint64_t train,
                             uint64_t val) {
    char path[IO_PATH_MAX];
    const char *val_path = o->val ? o->val : o->train;
    const uint64_t hash = tokenizer_hash(o->model, path);
    same_tokenizer(o, path, hash, train_path, train);
    if (val != train)
        same_tokenizer(o, hash ? path : train_path, hash ? hash : train, val_path, val);
}

// Warns where documents begin or end with another id than the model's.
static void warn_of_id(const Options *o, const char *what, int32_t id, const char *key,
                       const TokenIds *ids) {
    char text[512] = "";
    if (id < 0 || ids->n == 0 || token_ids_have(ids, id)) return;
    for (int i = 0; i < ids->n; i++) text_list(text, sizeof text, "%d", ids->ids[i]);
    warning("%s: documents %s with token %d, but %s of %s is %s", o->train, what, id, key, o->model,
            text);
}

// Warns where the shards use few of the model's ids, or other ids to begin and end documents.
static void warn_of_vocabulary(const Options *o, const LlamaConfig *config, const Dataset *ds) {
    const TokenIds *bos = &config->bos, *eos = &config->eos;
    if (ds->vocab_size < config->vocab_size / 2)
        warning("%s: made for a vocabulary of %d, %s has %d: the other embeddings stay untrained",
                o->train, ds->vocab_size, o->model, config->vocab_size);
    warn_of_id(o, "end", ds->eos, "eos_token_id", eos);
    // an end of text before each document separates them as well as one after it
    if (!token_ids_have(eos, ds->bos)) warn_of_id(o, "begin", ds->bos, "bos_token_id", bos);
}

// ---- Opening ------------------------------------------------------------------------------------

static bool has_validation(const char *spec) {
    PathList found = {0};
    if (path_is_dir(spec)) must(path_list_add_shards(&found, spec, "val", &err));
    const bool has = found.n > 0;
    path_list_free(&found);
    return has;
}

// A record of pairs has two documents, which --preference alone trains.
static void check_pairs(const Dataset *ds, const Options *o, const char *path) {
    int64_t doc = 0;
    if (ds->pairs && !o->preference)
        exit_with(EXIT_BAD_INPUT, "add --preference dpo or simpo, as when they were tokenized",
                  "%s: expected documents to train on one by one, found preference pairs", path);
    if (!o->preference) return;
    while (doc < ds->num_docs && dataset_doc_follows(ds, doc) == doc % 2) doc++;
    if (!ds->pairs || doc < ds->num_docs || doc % 2 != 0 || ds->weighted)
        exit_with(EXIT_BAD_INPUT, "give JSON Lines with prompt, chosen and rejected",
                  "%s: expected preference pairs%s", path,
                  ds->weighted ? " without weights" : ", found other documents");
}

static void open_datasets(Data *d, const Options *o, int32_t vocab_size) {
    DatasetOptions options = {"train", vocab_size, o->boundary_token};
    if (strcmp(o->train, "data/demo") == 0 && !path_exists(o->train))
        exit_with(EXIT_BAD_INPUT, "scripts/quickstart.sh prepares it and trains; or give --train",
                  "%s: no training data yet", o->train);
    must(dataset_open(&d->train, o->train, &options, &err));
    check_pairs(&d->train, o, o->train);
    options.split = "val";
    for (int32_t i = 0; !o->val && i < d->train.sources.n; i++)
        if (!has_validation(d->train.sources.list[i].spec)) return;
    must(dataset_open(&d->val, o->val ? o->val : o->train, &options, &err));
    d->val.weighted = false;  // validation counts every target once
    check_pairs(&d->val, o, o->val ? o->val : o->train);
    d->has_val = true;
}

// The shards of texts have a generation_config.json with the token that ends trained turns.
static void add_turn_ends(Data *d, LlamaConfig *config, const char *spec) {
    LlamaConfig found = {0};
    char path[IO_PATH_MAX];
    must(path_inside(path, spec, "config.json", &err) && llama_config_add_ids(&found, path, &err));
    for (int i = 0; i < found.eos.n; i++) {
        const int id = found.eos.ids[i];
        TokenIds *all[] = {&config->eos, &d->files.turn_ends};
        bool known = id >= config->vocab_size;
        for (int k = 0; k < config->eos.of_config; k++) known |= config->eos.ids[k] == id;
        for (int k = 0; k < 2 && !known; k++)
            if (!token_ids_have(all[k], id) && all[k]->n < MAX_TOKEN_IDS)
                all[k]->ids[all[k]->n++] = id;
    }
}

// Takes all files of the tokenizer from one directory; files from two would not fit each other.
static void read_model_files(Data *d, const Options *o, const ResumePoint *at, LlamaConfig *config,
                             bool is_rank_0) {
    const char *dirs[] = {at->dir, o->model, d->train.sources.list[0].spec}, *from = NULL;
    char path[IO_PATH_MAX];
    for (int i = 0; i < 3 && !from; i++)
        if (has_tokenizer(dirs[i], path)) from = dirs[i];
    for (int i = 0; i < d->train.sources.n; i++)
        add_turn_ends(d, config, d->train.sources.list[i].spec);
    d->has_tokenizer = from != NULL;
    if (from == dirs[2])
        same_tokenizer(o, from, d->train.tokenizer_hash, path, tokenizer_hash(from, path));
    if (from) must(tokenizer_open(&d->tokenizer, path, &err));
    if (!is_rank_0) return;
    must(model_files_read(&d->files, true, from ? &from : dirs, from ? 1 : 3, &err));
    must(model_files_read(&d->files, false, dirs, 2, &err));
}

static LoaderSettings make_loader_settings(const Options *o, int32_t rank, int32_t num_ranks) {
    const int32_t num_micro = (int32_t)(o->batch_tokens / o->micro_batch_tokens);
    // one micro-batch needs no slack
    const float fill = o->fill > 0 ? o->fill : num_micro == 1 ? 1 : 0.97f;
    const LoaderSettings s = {.plan = {.seed = (uint64_t)o->seed,
                                       .max_seqlen = o->max_seqlen,
                                       .micro_batch_tokens = o->micro_batch_tokens,
                                       .num_micro = num_micro,
                                       .fill_ppm = (int32_t)lrintf(1e6f * fill),
                                       .long_docs = (LongDocs)o->long_docs,
                                       .pad_to = (PadTo)o->pad_to,
                                       .pairs = o->preference != 0},
                              .layout = (Layout)o->layout,
                              .rank = rank,
                              .num_ranks = num_ranks,
                              .deterministic_reduction = reduces_deterministically(o),
                              .pairs = {.kind = (Preference)o->preference,
                                        .beta = (double)o->beta,
                                        .gamma = (double)o->gamma,
                                        .smoothing = (double)o->label_smoothing,
                                        .sft_weight = (double)o->sft_weight}};
    must(plan_settings_check(&s.plan, &err));
    return s;
}

// The bytes of the texts of all targets, for rank 0, which reports them; a special token has none.
static int64_t count_bytes(Data *d, LoaderSettings s) {
    const Tokenizer *t = &d->tokenizer;
    StepData all = {0};
    int64_t bytes = 0;
    if (!d->has_tokenizer || s.rank > 0) return 0;
    s.num_ranks = 1;
    must(loader_load_step(&all, &d->val, &s, (PlanState){0}, &err));
    for (const Batch *b = all.micro; b < all.micro + all.num_micro; b++)
        for (int32_t i = 0; i < b->total_tokens; i++) {
            size_t n = 0;
            const int32_t target = b->targets[i];
            if (target >= 0 && target < t->vocab_size && !t->special[target])
                tokenizer_bytes(t, target, &n);
            bytes += (int64_t)n;
        }
    step_data_free(&all);
    return bytes;
}

// Validation: the first documents of a source in a fixed order, the same for every run and seed.
// False where --long-docs or the masks leave none.
static bool load_validation(Data *d, const Options *o, int32_t source, Error *why) {
    LoaderSettings s = d->loader_settings;
    ValidationSet *set = &d->val_sets[source], *sum = &d->val_set;
    const DocIndex all = dataset_doc_index(&d->val), index = mixture_source(&all, source);
    s.source = source + 1;
    s.layout = LAYOUT_PACKED;
    s.plan.seed = 0;
    if (!plan_fix_set(&s.plan, &index, (o->val_tokens - 1) / d->val.sources.n + 1, why))
        return error_prefix(why, d->val.sources.list[source].spec);
    must(loader_load_step(&d->val_steps[source], &d->val, &s, (PlanState){0}, &err));
    const StepPlan *p = &d->val_steps[source].plan;
    assert(p->real_tokens == s.plan.set_tokens);
    *set = (ValidationSet){0, p->real_tokens, p->num_targets, count_bytes(d, s)};
    if (o->preference) set->targets = p->num_stream / 2, set->bytes = 0;
    const Segment *c = p->stream;
    for (int64_t i = 0; i < p->num_stream; i++) set->docs += i == 0 || c[i].doc != c[i - 1].doc;
    *sum = (ValidationSet){sum->docs + set->docs, sum->tokens + set->tokens,
                           sum->targets + set->targets, sum->bytes + set->bytes};
    if (p->num_micro > d->most_micros) d->most_micros = p->num_micro;
    if (d->most_documents > 0 && p->num_segments > d->most_documents)
        d->most_documents = p->num_segments;
    return true;
}

void open_data(Data *d, const Options *o, const ResumePoint *at, LlamaConfig *config, int32_t rank,
               int32_t num_ranks) {
    open_datasets(d, o, config->vocab_size);
    check_tokenizers(o, o->train, d->train.tokenizer_hash, d->has_val ? d->val.tokenizer_hash : 0);
    warn_of_vocabulary(o, config, &d->train);
    read_model_files(d, o, at, config, rank == 0);
    d->loader_settings = make_loader_settings(o, rank, num_ranks);
    const PlanSettings *plan = &d->loader_settings.plan;
    d->most_micros = plan->num_micro;
    if (o->preference || (run_trains(o) && (o->ledger || d->train.sources.n > 1)))
        d->most_documents = o->batch_tokens;
    must(data_summary(&d->train_summary, &d->train, plan, &err));
    for (int32_t i = 0; d->has_val && i < d->val.sources.n; i++) {
        Error why = {0};
        if (load_validation(d, o, i, &why)) continue;
        if (o->val || plan->long_docs == LONG_ERROR) error_exit(&why);
        warning("no validation: %s", why.what);
        d->has_val = false;
    }
    if (d->has_val) must(data_summary(&d->val_summary, &d->val, plan, &err));
}

RunLength count_steps(const Data *d, const Options *o, PlanState at) {
    const DocIndex index = dataset_doc_index(&d->train);
    const Sources *all = &d->train.sources;
    RunLength length = {.steps = o->steps};
    int32_t i;
    if (o->epochs > 0) line_show(stderr, "counting the steps of the epochs ...");
    must(plan_count_epochs(&index, &d->loader_settings.plan, at, (double)o->epochs, &length.steps,
                           &length.epochs, &i, &err));
    line_erase(stderr);
    length.source = all->n > 1 ? all->list[i].spec : NULL;
    length.num_docs = all->list[i].num_docs;
    return length;
}

void open_eval_data(Dataset *val, const char *path, const Options *o, int32_t vocab_size) {
    const DatasetOptions options = {has_validation(path) ? "val" : "train", vocab_size,
                                    o->boundary_token};
    must(dataset_open(val, path, &options, &err));
    val->weighted = false;
    check_tokenizers(o, path, val->tokenizer_hash, 0);
}

LlamaConfig load_config(const Options *o, const ResumePoint *at) {
    const bool model_given = option_given(&o->set, "model");
    LlamaConfig config, saved;
    if (!at->dir[0] || model_given)
        must(llama_config_find(&config, o->model, &err) &&
             lora_config_fits(&o->adapters, &config, &err));
    if (at->dir[0]) must(llama_config_read(&saved, at->dir, &err));
    if (at->dir[0] && !model_given) config = saved;
    if (config.sliding_window && o->max_seqlen > config.sliding_window)
        exit_with(EXIT_BAD_INPUT, "lower --max-seqlen to it: attention is then full",
                  "%s: sliding_window: expected at least --max-seqlen %d, found %d", o->model,
                  o->max_seqlen, config.sliding_window);
    if (o->max_seqlen > config.max_position_embeddings && !o->generate) {
        warning("--max-seqlen %d is beyond max_position_embeddings %d of %s, which final/ raises",
                o->max_seqlen, config.max_position_embeddings, o->model);
        config.max_position_embeddings = o->max_seqlen;
    }
    if (!at->dir[0] || !model_given) return config;
    saved.bos = config.bos, saved.eos = config.eos, saved.pad = config.pad;  // no part of the maths
    saved.max_position_embeddings = config.max_position_embeddings;
    AUTO_FREE char *was = llama_config_text(&saved, "float32"),
                   *is = llama_config_text(&config, "float32");
    if (strcmp(was, is) != 0)
        exit_with(EXIT_CHECKPOINT_MISFIT, "give --model as in the interrupted run",
                  "%s: expected the model %s, found another config.json", at->dir, o->model);
    return config;
}

void data_print(const Data *d, const Options *o) {
    data_summary_print(&d->train_summary, "train   ");
    data_summary_print(&d->val_summary, "val     ");
    if (d->has_val && o->val_every == 0)
        printf("        no validation\n");
    else if (d->has_val)
        printf("        validation takes %ld of %ld documents, %ld of %ld tokens\n",
               d->val_set.docs, d->val.num_docs, d->val_set.tokens, d->val.num_tokens);
}

void data_print_turn_end(const Data *d) {
    char name[80];
    if (d->files.turn_ends.n == 0 || !d->has_tokenizer) return;
    tokenizer_name(name, sizeof name, &d->tokenizer, d->files.turn_ends.ids[0]);
    printf("turns end with %s, which ends texts, too, in final/generation_config.json\n", name);
}

void verify_models(const Options *o) {
    if (o->dry_run) return;
    if (!o->from_scratch && path_is_dir(o->model)) must(checkpoint_verify_model(o->model, &err));
    if (o->adapter) must(checkpoint_verify_model(o->adapter, &err));
}
