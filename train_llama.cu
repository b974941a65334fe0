// unpad.c: trains a Llama on packed documents. C in both backends; the kernels alone are CUDA.
//
//   scripts/quickstart.sh                        everything, from nothing, in a few minutes
//   ./train_llama                                trains `demo` on what quickstart prepared
//   ./train_llama --model DIR --train 'shards/train_*.bin' --out run --steps 1000
//   ./train_llama --resume --out run             continues from the newest checkpoint, bit for bit
//   ./train_llama --compare                      every layout on the same documents
//   ./train_llama --check-packing                packed against each document alone
//   ./train_llama --model DIR --generate --prompt TEXT      continues the text
//   ./train_llama --model DIR --eval --val shards           loss and perplexity
//   mpirun -n 4 ./train_llama ...                several ranks share each step
//   ./train_llama --help                         every option with its default
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "data/base/clock.h"
#include "data/base/file.h"
#include "data/base/signals.h"
#include "data/use/benchmark.h"
#include "data/runs/checkpoint_files.h"
#include "data/use/conversation.h"
#include "data/use/evaluate.h"
#include "data/runs/ledger.h"
#include "data/runs/log.h"
#include "data/runs/out_dir.h"
#include "data/use/packing_check.h"
#include "data/use/reference.h"
#include "data/runs/run_data.h"
#include "data/runs/run_options.h"
#include "data/use/samples.h"
#include "data/runs/saver.h"
#include "data/shards/dataset.h"
#include "data/texts/texts.h"
#include "kernels/comm/agree.h"
#include "kernels/kernels.h"  // defines: the device
#include "llama.h"            // defines: LlamaModel, forward, backward, update

enum { MAX_SKIPS = 5 };
enum { SAVE_NOW = -1 };  // in RankNote.signal
static const AdamW adamw = {.beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .t = 1};  // lr 0

// ---- A run: types that its parts below share ----------------------------------------------------

// Device memory outside the model's arenas
typedef struct {
    size_t backend_bytes;  // memory that the device layer uses itself
    size_t usable_bytes;   // 15/16 of what is free at first: libraries need the rest; 0: unknown
    size_t recompute_bytes[LLAMA_NUM_RECOMPUTES];  // memory of the model with each --recompute
} DeviceRoom;

typedef struct {
    const Options *o;
    char **argv;
    Data *data;
    LlamaModel *model;
    const ResumePoint *resume;
    OutDir *out;
    RunLog log;
    Ledger ledger;
    TrainingState state, last_good;  // now, and before the steps that were skipped last
    Benchmark bench;
    TextWriter samples;
    Saver saver;
    int64_t last_saved;  // step, known to rank 0; -1: none
    double save_due_ms;  // of rank 0's clock, without --save-every
    bool save_is_due;
    int failed_saves, stopped_by;
} Run;

// Rank 0 prints, logs and writes; every rank reads.
static bool is_rank_0(void) { return comm_rank() == 0; }

// dir: of the weights, or of adapters of --model where these are trained; NULL: random ones
static void load_or_init(LlamaModel *m, const char *dir, const Options *o) {
    const bool lora = o->adapters.rank > 0;
    if (!dir) weights_init(llama_parameters(m), (uint64_t)o->seed);
    if (is_rank_0() && (dir || lora))
        line_show(stderr, "loading the weights of %s ...", lora ? o->model : dir);
    if (lora) must(parameters_load(llama_frozen_parameters(m), false, o->model, &err));
    if (dir) must(parameters_load(llama_parameters(m), false, dir, &err));
    line_erase(stderr);
}

// ---- Resuming and options -----------------------------------------------------------------------

// A bare --resume that finds no checkpoint is a fresh start: dir stays empty. *before is scratch.
static ResumePoint find_resume(const Options *o, Options *before, OutDir *out) {
    ResumePoint at = {0};
    out->path = o->out;
    if (o->resume && run_trains(o) && is_rank_0() && path_is_dir(o->out))
        must(out_dir_lock(out, &err));
    comm_barrier();  // rank 0 has undone what a killed run left
    if (!o->resume && run_trains(o) && is_rank_0())
        must(out_dir_is_free(o->out, o->overwrite, &err));
    if (!o->resume) return at;
    must(out_dir_find_resume(o->out, o->resume, run_trains(o), &at, &err));
    if (at.dir[0] || !is_rank_0()) return at;
    if (!run_options_read(before, o->out, &(Error){0})) before->save_every = o->save_every;
    must(out_dir_start_from_scratch(o->out, option_given(&o->set, "train"), before->save_every,
                                    &err));
    return at;
}

// ---- Set-up: the device, the configuration, the data --------------------------------------------

// A device error is found after the call that made it: at the latest at the end of the step.
static void describe_work(void *model, char *text, size_t capacity) {
    const VarlenInfo *docs = &((const LlamaModel *)model)->in.docs;
    if (docs->num_segments > 0)
        snprintf(text, capacity, "last batch: %d documents of up to %d tokens, %d in all",
                 docs->num_segments, docs->max_seqlen, docs->total_tokens);
}

// Without --bf16-matmul, which needs a recent CPU, what is missing is a GPU, or kernels for the
// model's sizes.
static DeviceRoom open_device(const Options *o, const LlamaConfig *c, LlamaModel *m) {
    const DeviceOptions options = {o->threads, o->bf16_matmul, reduces_deterministically(o)};
    const char *missing = device_init(&options);
    if (missing && o->bf16_matmul) exit_with(EXIT_USAGE, "leave --bf16-matmul out", "%s", missing);
    if (!missing) missing = device_refuses(c->hidden_size, c->intermediate_size, c->head_dim);
    if (missing)
        exit_with(EXIT_DEVICE_ERROR, "make BACKEND=cpu builds a trainer that needs no GPU", "%s",
                  missing);
    const bool trains = !o->generate && !o->eval && !o->dry_run;  // else not worth a probe
    const bool probes = trains || strcmp(o->attention, "auto") != 0;
    if (attention_select(probes ? o->attention : "unprobed") != 0)
        exit_with(EXIT_USAGE,
                  "auto runs everywhere; sm90 needs a Hopper GPU and a build for sm_90a",
                  "--attention %s: expected kernels that this device can run", o->attention);
    device_on_error(describe_work, m);
    const size_t free_bytes = o->memory_gib > 0 ? (size_t)((double)o->memory_gib * 0x1p30)
                                                : device_memory_free(comm_local_ranks());
    const DeviceRoom room = {device_memory().bytes_now, free_bytes - free_bytes / 16, {0}};
    comm_barrier();  // every rank has read it before one allocates its model
    return room;
}

// Turns texts into shards in --out; --train and --val then name their directories. Rank 0 writes.
static void tokenize_texts(Options *o, OutDir *out, const ResumePoint *at, int32_t vocab_size) {
    const char *model = at->dir[0] ? at->dir : o->model;
    const bool writes = is_rank_0() || o->dry_run;
    const Texts t = {o, model, vocab_size, writes, run_trains(o) && o->overwrite, out};
    must(texts_to_shards(&o->train, "tokens", o->val ? NO_VALIDATION : 0.01, &t, &err));
    if (o->val) must(texts_to_shards(&o->val, "val_tokens", 1, &t, &err));
    comm_barrier();
}

// ---- Ranks: what must be the same on all of them ------------------------------------------------

// Ranks that were started differently would wait for each other, or silently train a mixture.
static void check_ranks_are_started_alike(const Options *o) {
    RankFields own = {0};
    if (comm_num_ranks() == 1) return;
    comm_barrier();  // a rank that was asked for help ends here
    rank_field_text(&own, "version", UNPAD_VERSION);
    rank_field_file(&own, "the program file", "/proc/self/exe");
    rank_field_options(&own, &o->set);
    rank_fields_agree(&own, "the same", "start every rank with the same program and flags");
}

static void check_ranks_agree(const Run *run, const LlamaConfig *config) {
    const Data *d = run->data;
    const ResumePoint *at = run->resume;
    RankFields own = {0};
    const uint64_t train[2] = {d->train.fingerprint, d->train.token_fingerprint},
                   val[2] = {d->val.fingerprint, d->val.token_fingerprint};
    if (comm_num_ranks() == 1) return;
    AUTO_FREE char *model = llama_config_text(config, "float32");
    rank_field_text(&own, "model", model);
    rank_field(&own, "training data", train, sizeof train);
    rank_field(&own, "validation data", val, sizeof val);
    rank_field(&own, "benchmarks", &run->bench.fingerprint, sizeof run->bench.fingerprint);
    rank_field_text(&own, "checkpoint", at->dir);
    if (at->dir[0])  // its manifest has the checksums of all its files, which are verified
        rank_field_file(&own, "files of the checkpoint", PATH_IN(at->dir, "manifest.json"));
    rank_fields_agree(&own, "the same", "give every rank the same files");
}

// Replicas must be identical: with ZeRO-1 one rank's differing weights would spread to all ranks at
// the first update, and a checkpoint of replicas that have diverged is not worth saving.
static void check_replicas(const Run *run, const char *what, const char *hint) {
    const LlamaModel *m = run->model;
    const TrainingState *s = &run->state;
    RankFields own = {0};
    if (comm_num_ranks() == 1) return;
    zero_await_weights(&run->model->zero, llama_head_bucket(&m->config));  // the last
    rank_field(&own, "data position", &s->cursor, sizeof s->cursor);
    rank_field(&own, "skipped steps", &s->skips_in_a_row, sizeof s->skips_in_a_row);
    rank_field_device(&own, "weights", m->weights, m->num_weights * sizeof(floatX));
    rank_field_device(&own, "codes of NF4", m->nf4.codes, m->num_nf4 / 2);
    rank_field_device(&own, "scales of NF4", m->nf4.absmax, m->num_nf4 / NF4_BLOCK * sizeof(float));
    rank_fields_agree(&own, what, hint);
}

// ---- The model's memory: planned, printed and checked before anything is allocated --------------

// data: of a run that trains, and shares its steps among ranks; NULL: of inference
static LlamaSettings settings_of(const Options *o, int32_t micro_batch_tokens, int32_t cache_tokens,
                                 const Data *data) {
    const int32_t ranks = comm_num_ranks();
    LlamaSettings s = {.micro_batch_tokens = micro_batch_tokens,
                       .max_seqlen = o->max_seqlen,
                       .layouts = 1u << o->layout,
                       .train = data != NULL,
                       .pairs = o->preference != 0,
                       .muon = o->optimizer == OPTIMIZER_MUON,
                       .lora = o->adapters,
                       .cache_tokens = cache_tokens};
    if (data)
        s.ranks =
            (ZeroSettings){.rank = comm_rank(),
                           .num_ranks = ranks,
                           .deterministic = reduces_deterministically(o),
                           .num_leaves = data->loader_settings.plan.num_micro,
                           .num_losses = data->most_micros > ranks ? data->most_micros : ranks,
                           .most_documents = data->most_documents,
                           .bf16_moments = o->moments == MODEL_BF16,
                           .seed = (uint64_t)o->seed};
    return s;
}

static size_t memory_needed(const LlamaConfig *config, LlamaSettings settings) {
    LlamaModel m;
    llama_plan(&m, config, settings);
    const size_t bytes = llama_memory_total(&m);
    llama_free(&m);
    return bytes;
}

// The largest --micro-batch-tokens that divides the step, holds --max-seqlen and fits; 0: none
static int32_t largest_micro_batch(const LlamaModel *m, const Options *o, size_t usable_bytes) {
    LlamaSettings s = m->settings;
    for (int64_t n = 1, N = o->batch_tokens; n <= N / o->max_seqlen; n++) {
        s.micro_batch_tokens = (int32_t)(N / n);
        if (N % n == 0 && N / n <= o->micro_batch_tokens &&
            memory_needed(&m->config, s) <= usable_bytes)
            return s.micro_batch_tokens;
    }
    return 0;
}

// Plans this rank's model. Without --recompute all ranks recompute the least that fits on each.
static void plan_model(LlamaModel *m, const LlamaConfig *config, const Options *o, const Data *d,
                       const TextWriter *samples, DeviceRoom *room) {
    LlamaSettings s = settings_of(o, o->micro_batch_tokens, texts_cache_tokens(samples), d);
    int chosen = LLAMA_RECOMPUTE_FULL;
    for (int i = LLAMA_RECOMPUTE_FULL; i >= LLAMA_RECOMPUTE_OFF; i--) {
        s.recompute = (LlamaRecompute)i;
        room->recompute_bytes[i] = memory_needed(config, s);
        if (!room->usable_bytes || room->recompute_bytes[i] <= room->usable_bytes) chosen = i;
    }
    if (o->recompute < LLAMA_NUM_RECOMPUTES) chosen = o->recompute;  // not auto
    s.recompute = (LlamaRecompute)comm_max(chosen);
    llama_plan(m, config, s);
}

static double mib(size_t bytes) { return (double)bytes / 1048576; }

static void print_bytes(const char *name, size_t bytes) {
    printf("  %-14s %10.1f MiB\n", name, mib(bytes));
}

static void print_model(const LlamaModel *m, const Options *o, const char *weights) {
    printf("unpad.c %s on %s\n", UNPAD_VERSION, device_describe());
    llama_config_print(&m->config, o->model);
    if (o->adapters.rank > 0)
        printf("lora    rank %d, scale %g, beside %d linear layers of the frozen model%s: %.2f M\n",
               o->adapters.rank, (double)lora_scale(&o->adapters), m->num_trained / 2,
               o->adapters.nf4 ? " in NF4" : "", (double)m->num_elements * 1e-6);
    printf("start   %s\n", !weights ? o->adapters.rank > 0 ? "new adapters" : "random weights"
                           : weights == o->model ? "weights of --model"
                                                 : weights);
}

static void print_memory(const LlamaModel *m, const DeviceRoom *room) {
    printf("memory%s\n", m->zero.settings.num_ranks > 1 ? " of rank 0" : "");
    for (int i = 0; i < LLAMA_NUM_ARENAS; i++)
        print_bytes(llama_arena_names[i], m->arenas[i].bytes);
    if (room->backend_bytes) print_bytes("kernels", room->backend_bytes);
    print_bytes("total", room->backend_bytes + llama_memory_total(m));
}

static void print_ranks(const LlamaModel *m) {
    const int32_t ranks = m->zero.settings.num_ranks;
    if (ranks == 1) return;
    printf("ranks   %d, micro-batches %s, optimizer state sharded: rank 0 updates %.1f %%\n", ranks,
           m->zero.settings.deterministic
               ? "in fixed order, for the same bits on any number of ranks"
               : "distributed by cost",
           100.0 * (double)m->zero.shard_count / (double)m->num_elements);
    rank_places_print();
}

static void print_plan(const Run *run, const DeviceRoom *room, const char *weights) {
    const Options *o = run->o;
    const Data *d = run->data;
    const LlamaModel *m = run->model;
    const PlanSettings *plan = &d->loader_settings.plan;
    print_model(m, o, weights);
    data_print(d, o);
    must(plan_print(plan, (Layout)o->layout, &d->train_summary, run->state.cursor, &err));
    if (o->steps > 0 && !o->compare && !o->check_packing) run_options_print(o);
    print_ranks(m);
    for (int i = 0; i < LLAMA_NUM_RECOMPUTES; i++)
        printf("%s%s %.1f MiB%s", i == 0 ? "recompute " : ", ", llama_recompute_names[i],
               mib(room->backend_bytes + room->recompute_bytes[i]),
               i == (int)m->settings.recompute ? " (chosen)" : "");
    printf("\n");
    print_memory(m, room);
    if (run->saver.bytes) print_bytes("host snapshot", run->saver.bytes);
}

static void check_memory(const LlamaModel *m, const DeviceRoom *room, const Options *o) {
    const size_t usable = room->usable_bytes, total = llama_memory_total(m);
    if (usable == 0 || total <= usable) return;
    char hint[160];
    const int32_t fits = largest_micro_batch(m, o, usable);
    if (fits > 0)
        snprintf(hint, sizeof hint, "--micro-batch-tokens %d fits", fits);
    else
        snprintf(hint, sizeof hint,
                 "even --micro-batch-tokens %d does not fit: take a smaller model or --max-seqlen",
                 o->max_seqlen);
    if (!o->dry_run)
        exit_with(device_memory_code(), hint,
                  "memory: expected %.1f MiB within 15/16 of what is free, found %.1f MiB",
                  mib(total), mib(usable));
    warning("%.1f MiB do not fit into %.1f MiB: %s", mib(total), mib(usable), hint);
}

// ---- Checkpoints --------------------------------------------------------------------------------

static SaveJob save_job(const Run *run) {
    return (SaveJob){run->o,      run->data, &run->model->config, &run->out->lock, UNPAD_VERSION,
                     is_rank_0(), run->log,  run->ledger.file,    run->state};
}

// Saves while training waits. All ranks call it; the result is meaningful on rank 0 only.
static bool save_and_wait(Run *run, const char *name, Error *err) {
    LlamaModel *m = run->model;
    Parameters p = llama_parameters(m);
    LoraMerge merge = {llama_frozen_parameters(m), p, &run->o->adapters, {0}};
    const SaveJob job = save_job(run);
    comm_phase("save", run->state.cursor.step);
    if (name && run->o->lora_merge) must(lora_merge_open(&merge, run->o->model, &p, &err));
    const bool ok = save_checkpoint(&job, name, p, err);
    safetensors_close(&merge.files);
    comm_barrier();  // here the other ranks wait and see that rank 0 is alive
    return ok || !is_rank_0();
}

// Reports a save that has finished; wait: blocks until it has. A failed one leaves the older
// checkpoints. Training continues and tries again; it gives up after MAX_FAILED_SAVES in a row, or
// at once when the weights are not worth saving.
static void end_save(Run *run, bool wait, bool last) {
    Saver *s = &run->saver;
    if (wait && s->running) comm_phase("await save", run->state.cursor.step);
    if (!saver_ended(s, wait) || !is_rank_0()) return;
    run->failed_saves = s->ok ? 0 : run->failed_saves + 1;
    if (run->failed_saves >= MAX_FAILED_SAVES || s->err.code == EXIT_DIVERGED) last = true;
    if (!s->ok && last) error_exit(&s->err);
    if (!s->ok) return error_print(&s->err);
    run->last_saved = s->job.state.cursor.step;
    line_erase(stdout);
    printf("saved %s/step-%08ld in %.1f s\n", run->o->out, run->last_saved, s->ms * 1e-3);
}

// Training continues when the snapshot holds the parameters; last: when all is written. All ranks
// call it.
static void start_save(Run *run, bool last) {
    end_save(run, true, false);
    comm_phase("compare", -1);
    check_replicas(run, "identical replicas after the same steps",
                   "--resume continues from the last checkpoint, when they were still identical; "
                   "check that machine's memory");
    run->state.log_bytes = run->log.size_bytes;
    comm_phase("save", run->state.cursor.step);
    run->save_due_ms = now_ms() + SAVE_MINUTES * 60e3;
    saver_start(&run->saver, last, save_job(run), llama_parameters(run->model));
    end_save(run, last, last);
    comm_barrier();  // here the other ranks wait and see that rank 0 is alive
}

// ---- The loop -----------------------------------------------------------------------------------

// Reads the notes that came with the losses: how long each rank's micro-batches took, whether one
// rank has received a signal, which stops all ranks after the same step, and whether rank 0 saves.
static StepBalance read_notes(Run *run, const StepData *data) {
    StepBalance b = {.planned = data->imbalance};
    LlamaModel *m = run->model;
    const RankNote *notes = zero_notes(m->zero.step_host);
    const int32_t ranks = m->zero.settings.num_ranks;
    double sum = 0;
    if (ranks == 1) return (StepBalance){0};
    for (int32_t r = 0; r < ranks; r++) {
        sum += notes[r].passes_ms;
        if (notes[r].passes_ms > notes[b.slowest_rank].passes_ms) b.slowest_rank = r;
        if (notes[r].signal > 0) run->stopped_by = (int)notes[r].signal;
        if (notes[r].signal == SAVE_NOW) run->save_is_due = true;
    }
    b.measured = sum > 0 ? notes[b.slowest_rank].passes_ms * ranks / sum : 0;
    m->zero.note.passes_ms = (double)device_timer_ms();
    return b;
}

static bool every(int64_t step, int64_t interval) { return interval > 0 && step % interval == 0; }

static bool saves_after(const Run *run, int64_t step) {
    return step < run->o->steps && (run->save_is_due || every(step, run->o->save_every));
}

static bool pauses_after(const Run *run, int64_t step) {
    const Options *o = run->o;
    return step == o->steps || every(step, o->val_every) || every(step, o->sample_every) ||
           saves_after(run, step);
}

// Writes this rank's note for the next step: the signal that it has received, or that a checkpoint
// is due. The other ranks read it after that step.
static bool stop_requested(Run *run) {
    const bool asks_save =
        run->o->save_every < 0 && is_rank_0() && now_ms() >= run->save_due_ms && !stop_signal;
    run->model->zero.note.signal = asks_save ? SAVE_NOW : stop_signal;
    run->save_is_due = asks_save && comm_num_ranks() == 1;
    if (comm_num_ranks() == 1) run->stopped_by = (int)stop_signal;
    return run->stopped_by != 0;
}

// The weights are still those before the first of these steps, and are saved for that step.
static void leave_if_diverged(Run *run, const StepScalars *s) {
    Error err = {0};
    run->state.skips_in_a_row = s->scale == 0 ? run->state.skips_in_a_row + 1 : 0;
    if (run->state.skips_in_a_row < MAX_SKIPS) return;
    end_save(run, true, false);
    run->state = run->last_good;
    if (save_and_wait(run, NULL, &err) && is_rank_0())
        printf("saved %s/step-%08ld: --resume=DIR with another --out computes these steps again\n",
               run->o->out, run->state.cursor.step);
    exit_with(EXIT_DIVERGED, "lower --lr, or resume from an earlier checkpoint",
              "training diverged: %d steps in a row had a non-finite loss or gradient norm, and "
              "touched no weight",
              MAX_SKIPS);
}

static void validate(Run *run, int64_t step) {
    Data *d = run->data;
    comm_phase("evaluate", -1);
    if (run->o->bench) benchmark_score(&run->bench, llama_face(run->model), step, &run->log);
    if (!d->has_val || run->o->val_every == 0) return;
    line_show(stderr, "validating: %ld tokens ...", d->val_set.tokens);
    const DocIndex index = dataset_doc_index(&d->val);
    PairSums all = {0};
    double sum = 0;
    for (int32_t i = 0; i < d->val.sources.n; i++) {
        PairSums pairs = {0};
        const double part = llama_validation_loss(run->model, &d->val_steps[i]);
        line_erase(stderr);
        sum += part;
        ledger_add(&run->ledger, LEDGER_VALIDATION, step, &d->val, &d->val_steps[i].plan,
                   zero_documents(&run->model->zero));
        for (int k = 0; k < 2; k++)
            pairs_add(k ? &all : &pairs, &d->val_pairs, &index, &d->val_steps[i].plan,
                      zero_documents(&run->model->zero));
        if (d->val.sources.n > 1)
            report_validation(&run->log, step, part, &d->val_sets[i], d->val.sources.list[i].spec,
                              &pairs);
    }
    report_validation(&run->log, step, sum, &d->val_set, NULL, &all);
}

static void print_samples(Run *run) {
    const int64_t step = run->state.cursor.step;
    comm_phase("sample", -1);
    if (is_rank_0()) samples_report(&run->samples, llama_face(run->model), step, &run->log);
    comm_barrier();  // here the other ranks wait and see that rank 0 is alive
}

// Validates, samples and saves after `step` steps, where that is due.
static void pause_training(Run *run, int64_t step) {
    const Options *o = run->o;
    const bool last = step == o->steps;
    if (every(step, o->val_every) || last) validate(run, step);
    if (every(step, o->sample_every) || last) print_samples(run);
    // last, so that the log it refers to holds all of this step
    if (saves_after(run, step)) start_save(run, false);
}

static void train_one_step(Run *run, Loader *loader, RunTotals *t) {
    Error err = {0};
    const Options *o = run->o;
    const int64_t step = run->state.cursor.step;
    const double start_ms = now_ms();
    run->state.log_bytes = run->log.size_bytes;
    if (run->state.skips_in_a_row == 0) run->last_good = run->state;
    comm_phase("read", step + 1);
    const StepData *data = loader_next(loader, &err);
    if (!data) error_exit(&err);
    const StepPlan *plan = &data->plan;
    const double read_ms = now_ms() - start_ms;
    AdamW hyper = adamw;
    hyper.lr = learning_rate(o, step);
    hyper.weight_decay = o->weight_decay;
    hyper.t = step + 1;
    if (every(step + 1, o->replay_every))
        must(packing_replay(llama_face(run->model), llama_parameters(run->model), data, step + 1,
                            &err));
    const DeviceMemory before = device_memory();
    const StepScalars scalars = llama_train_step(run->model, data, hyper, o->grad_clip);
    // nothing is allocated inside a step, and the host waits for the device once: for the loss
    assert(device_memory().count == before.count);
    assert(device_memory().waits == before.waits + 1);
    const double ms = now_ms() - start_ms, loss = scalars.loss_sum / plan->weight_sum;
    const StepBalance balance = read_notes(run, data);
    const double *losses = ledger_add(&run->ledger, LEDGER_STEP, step + 1, &run->data->train, plan,
                                      zero_documents(&run->model->zero));
    const DocIndex index = dataset_doc_index(&run->data->train);
    PairSums pairs = {0};
    pairs_add(&pairs, &run->data->loader_settings.pairs, &index, plan,
              zero_documents(&run->model->zero));
    const StepReport report = {.o = o,
                               .step = step + 1,
                               .ms = ms,
                               .read_ms = read_ms,
                               .passes_ms = (double)device_timer_ms(),
                               .loss = loss,
                               .grad_norm = scalars.grad_norm,
                               .source_losses = losses,
                               .pairs = pairs,
                               .config = &run->model->config,
                               .skipped = scalars.scale == 0,
                               .spike = loss_is_spike(&run->state.trend, loss),
                               .balance = balance,
                               .pauses = pauses_after(run, step + 1) || stop_signal};
    report_step(&run->log, t, &report, plan);
    run->state.cursor = plan->cursor_after;
    leave_if_diverged(run, &scalars);
}

static void train(Run *run) {
    static Loader loader;
    RunTotals totals = {0};
    Data *d = run->data;
    const int64_t first = run->state.cursor.step;
    run->last_saved = run->resume->in_place ? first : -1;
    run->save_due_ms = now_ms() + SAVE_MINUTES * 60e3;
    if (first >= run->o->steps)
        printf("step %ld of --steps %ld is reached: nothing to train\n", first, run->o->steps);
    must(loader_start(&loader, &d->train, &d->loader_settings, run->state.cursor, &err));
    if (!run->resume->dir[0]) validate(run, 0);
    if (is_rank_0())
        signals_say("\nstopping after this step, then saving; press again to quit without saving\n",
                    "quit: the steps after the last checkpoint are lost\n");
    while (run->state.cursor.step < run->o->steps && !stop_requested(run)) {
        train_one_step(run, &loader, &totals);
        const double start_ms = now_ms();
        end_save(run, false, false);
        pause_training(run, run->state.cursor.step);
        totals.pauses_ms += now_ms() - start_ms;
    }
    loader_stop(&loader);
    print_trained(&totals, d->train.masked);
    mixture_print(&d->train.sources, &run->state.cursor,
                  (double)totals.tokens / (double)totals.steps);
    end_save(run, true, false);
    bool saved = run->last_saved == run->state.cursor.step;
    comm_broadcast(&saved, sizeof saved);
    if (!saved) start_save(run, true);
}

static void finish(Run *run, const DeviceRoom *room) {
    if (run->stopped_by) {
        printf("stopped by signal %d; %s --resume --out %s continues from step %ld\n",
               run->stopped_by, run->argv[0], run->o->out, run->state.cursor.step);
        comm_finalize();
        exit(EXIT_RESUMABLE);
    }
    must(save_and_wait(run, "final", &err));
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);  // ru_maxrss is in KiB
    printf("peak memory: device %.1f MiB (planned %.1f MiB), process %.1f MiB\n",
           mib(device_memory().bytes_peak),
           mib(room->backend_bytes + llama_memory_total(run->model)),
           mib((size_t)usage.ru_maxrss * 1024));
    data_print_turn_end(run->data);
    printf("done: %s/final is %s\n", run->o->out,
           run->o->lora > 0 && !run->o->lora_merge ? "an adapter" : "a Hugging Face model");
}

static void open_out_dir(Run *run) {
    const Options *o = run->o;
    const LlamaModel *m = run->model;
    const ResumePoint *at = run->resume;
    comm_barrier();  // every rank's inputs are good, and it has found what it reads there
    if (!is_rank_0()) return;
    must(out_dir_open(run->out, at->in_place || (o->resume && !at->dir[0]), o->overwrite, &err));
    must(out_dir_check_space(
        o->out,  // weights, two moments
        (o->moments == MODEL_BF16 ? 8u : 12u) * (uint64_t)m->num_elements,
        (o->final_dtype == MODEL_BF16 ? 2u : 4u) *
            (uint64_t)(o->lora_merge ? m->num_weights + m->num_nf4 : m->num_elements),
        o->steps - run->state.cursor.step, o->save_every, o->keep, &err));
}

static void train_and_save(Run *run, int64_t log_before, const DeviceRoom *room) {
    const Data *d = run->data;
    const int64_t step = run->state.cursor.step;
    const bool resumes = run->resume->dir[0],
               starts = step < run->o->steps || !run->resume->in_place;
    open_out_dir(run);
    if (resumes) must(parameters_load(llama_parameters(run->model), true, run->resume->dir, &err));
    if (is_rank_0() && run->o->ledger)
        must(ledger_open(&run->ledger, run->o->out, resumes && log_before >= 0 ? step : -1, &err));
    if (is_rank_0()) must(log_open(&run->log, run->o->out, log_before, step, &err));
    if (starts && is_rank_0()) must(run_options_write(run->o, resumes, &err));
    if (starts)
        log_start(&run->log, resumes ? "resume" : "start", UNPAD_VERSION, device_describe(),
                  room->backend_bytes + llama_memory_total(run->model), run->argv, step,
                  &run->model->config, &d->train_summary, &d->val_summary, run->o);
    comm_barrier();  // ranks that read slowly are waited for in set-up
    train(run);
    finish(run, room);
}

// ---- --compare: every layout on the same documents, weights and kernels, in one table -----------

typedef struct {
    Layout layout;
    bool grouped;
    const char *name;
    StepData data;
    StepScalars scalars;
    size_t bytes;  // device memory that a model for this layout alone takes
    double *ms;    // (--compare) of the timed steps
} Compared;

// Loads the step. *largest becomes the settings of a model that has room for it, too.
static void compare_load(Compared *c, LlamaSettings *largest, const LlamaConfig *config,
                         const Options *o, Data *d) {
    LoaderSettings loader = d->loader_settings;
    LlamaSettings alone = *largest;
    loader.layout = c->layout;
    c->name = c->grouped ? "grouped" : layout_name(c->layout);
    if (c->grouped) loader.plan.pad_to = PAD_GROUPED;
    must(loader_load_step(&c->data, &d->train, &loader, (PlanState){0}, &err));
    alone.layouts = 1u << c->layout;
    alone.micro_batch_tokens = 0;
    for (int i = 0; i < c->data.num_micro; i++)
        if (c->data.micro[i].total_tokens > alone.micro_batch_tokens)
            alone.micro_batch_tokens = c->data.micro[i].total_tokens;
    if (alone.micro_batch_tokens > largest->micro_batch_tokens)
        largest->micro_batch_tokens = alone.micro_batch_tokens;
    largest->layouts |= alone.layouts;
    c->bytes = memory_needed(config, alone);
    c->ms = host_calloc((size_t)o->compare, sizeof *c->ms, "timings");
}

static void compare_print(Compared *c, const LlamaModel *m, const Options *o,
                          int64_t packed_pairs) {
    const StepPlan *plan = &c->data.plan;
    const double ms = median_ms(c->ms, o->compare), real_tokens = (double)plan->real_tokens,
                 flops = llama_config_flops(&m->config, o->lora > 0, plan->real_tokens,
                                            plan->num_targets, packed_pairs);
    printf("%-7s %9.1f %9.1f %9.1f %11.0f %8.3f %10.1f %9ld %10ld %8.1f %11.6f\n", c->name, ms,
           c->ms[0], c->ms[o->compare - 1], real_tokens / ms * 1e3, flops / ms * 1e-9,
           100.0 * (1.0 - (double)plan->computed_tokens / (double)c->data.local_tokens),
           c->data.local_tokens, plan->attention_pairs, mib(c->bytes),
           c->scalars.loss_sum / plan->weight_sum);
}

// The layouts take turns, step by step, so that other work on the machine slows all of them down.
// lr 0: full steps that leave the weights unchanged
static void compare_layouts(const Options *o, Data *d, const LlamaModel *planned,
                            const char *weights) {
    static Compared all[] = {{.layout = LAYOUT_PACKED}, {.layout = LAYOUT_SHARED},
                             {.layout = LAYOUT_PADDED}, {.layout = LAYOUT_PADDED, .grouped = true},
                             {.layout = LAYOUT_REPAD},  {.layout = LAYOUT_ROWS}};
    Compared *const end = all + sizeof all / sizeof *all - (o->preference > 0), *c;  // no rows
    static LlamaModel m;
    LlamaSettings largest = settings_of(o, 0, 0, d);
    largest.recompute = planned->settings.recompute;
    for (c = all; c < end; c++) compare_load(c, &largest, &planned->config, o, d);
    llama_plan(&m, &planned->config, largest);
    must(llama_allocate(&m, &err));
    load_or_init(&m, weights, o);
    printf(
        "\nlayout    step ms       min       max  real tok/s  TFLOP/s  padding %%  computed      "
        "pairs      MiB        loss\n");
    fflush(stdout);
    for (int i = -1; i < o->compare; i++)  // the first step is not timed
        for (c = all; c < end; c++) {
            line_show(stderr, "step %d of %d: %s ...", i + 2, o->compare + 1, c->name);
            const double start_ms = now_ms();
            c->scalars = llama_train_step(&m, &c->data, adamw, o->grad_clip);
            if (i >= 0) c->ms[i] = now_ms() - start_ms;
        }
    line_erase(stderr);
    for (c = all; c < end; c++) compare_print(c, &m, o, all->data.plan.attention_pairs);
    printf(
        "The same documents, weights and kernels in every row: the median of %d step%s, in turns."
        "\nTFLOP/s counts real tokens and pairs inside documents. padded, repad: --pad-to %s; "
        "grouped:\nto the longest, sorted by length first. In rows attention crosses documents: "
        "another loss.\n",
        o->compare, text_plural(o->compare), o->pad_to == PAD_TO_MAX ? "max" : "longest");
}

// ---- --check-packing: the documents of one micro-batch, packed and each alone -------------------

static void check_packing(LlamaModel *m, Data *d, const char *kit) {
    StepData data = {0};
    LoaderSettings settings = d->loader_settings;
    Batch docs;
    if (settings.layout != LAYOUT_SHARED) settings.layout = LAYOUT_PACKED;
    must(loader_load_step(&data, &d->train, &settings, (PlanState){0}, &err));
    must(step_data_documents(&docs, &data, &d->train, &settings, &err));
    must(packing_report(llama_face(m), &data.micro[0], &docs, sizeof(floatX) == 2, kit, &err));
    batch_free(&docs);
    step_data_free(&data);
}

// ---- --generate, --eval, merging: the model alone; nothing is trained ---------------------------

static void load_for_inference(LlamaModel *m, const LlamaConfig *config, const Options *o,
                               const DeviceRoom *room, int32_t micro_batch_tokens,
                               int32_t cache_tokens) {
    const char *weights = weights_dir(o, "");
    llama_plan(m, config, settings_of(o, micro_batch_tokens, cache_tokens, NULL));
    if (is_rank_0() && (o->eval || o->dry_run)) print_model(m, o, weights);
    if (is_rank_0() && o->dry_run) print_memory(m, room);
    must(llama_check(m, weights, o->model, &err));
    check_memory(m, room, o);
    if (o->dry_run) exit(EXIT_DONE);
    must(llama_allocate(m, &err));
    load_or_init(m, weights, o);
}

// Without --max-seqlen a conversation may be as long as the model's context, as far as half of the
// memory allows.
static void choose_length(Options *o, const LlamaConfig *config, const DeviceRoom *room) {
    const int window = config->sliding_window, most = config->max_position_embeddings;
    int n = window > 0 && window < most ? window : most;
    if (!o->chat || option_given(&o->set, "max-seqlen")) return;
    for (; n > o->max_seqlen; n /= 2) {
        LlamaSettings s = settings_of(o, n, n, NULL);
        s.max_seqlen = n;
        if (room->usable_bytes && memory_needed(config, s) <= room->usable_bytes / 2) break;
    }
    if (n > o->max_seqlen) o->max_seqlen = n;
    if (n > o->micro_batch_tokens) o->micro_batch_tokens = n;
}

static void generate(LlamaModel *m, const LlamaConfig *config, const Options *o,
                     const DeviceRoom *room) {
    static Conversation conversation;
    must(conversation_open(&conversation, o, &err));
    const int32_t tokens = texts_cache_tokens(&conversation.writer);
    load_for_inference(m, config, o, room, tokens, tokens);
    conversation_run(&conversation, llama_face(m));
}

static void evaluate_model(LlamaModel *m, const LlamaConfig *config, const Options *o,
                           const DeviceRoom *room) {
    static Dataset val;
    static Benchmark bench;
    static const char *path;  // NULL: only --bench
    const Texts t = {o, o->model, config->vocab_size, true, true, NULL};
    path = o->val || !option_given(&o->set, "train") ? o->val : o->train;
    if (path) must(texts_to_shards(&path, "tokens", 1, &t, &err));
    if (path) open_eval_data(&val, path, o, config->vocab_size);
    if (o->bench) must(benchmark_open(&bench, o, o->model, config->vocab_size, &err));
    load_for_inference(m, config, o, room, o->micro_batch_tokens, 0);
    comm_phase("evaluate", -1);
    if (path) must(evaluate(&val, o, llama_face(m), &err));
    if (o->bench) benchmark_score(&bench, llama_face(m), -1, &(RunLog){0});
}

static void merge_adapters(LlamaModel *m, const LlamaConfig *config, const Options *o,
                           const DeviceRoom *room) {
    static Data data;  // the tokenizer's files alone
    Run run = {.o = o, .data = &data, .model = m, .out = &(OutDir){.path = o->out}};
    load_for_inference(m, config, o, room, 1, 0);
    for (int i = 0; i < 2; i++)
        must(model_files_read(&data.files, i, (const char *[]){o->model}, 1, &err));
    must(out_dir_open(run.out, false, o->overwrite, &err));
    must(save_and_wait(&run, "final", &err));
    printf("done: %s/final is a Hugging Face model\n", o->out);
}

static void infer(Options *o, LlamaModel *m) {
    run_options_complete_inference(o, comm_num_ranks());
    if (is_rank_0()) verify_models(o);
    const LlamaConfig config = load_config(o, &(ResumePoint){0});
    const DeviceRoom room = open_device(o, &config, m);
    if (o->generate) choose_length(o, &config, &room);
    (o->eval ? evaluate_model : o->generate ? generate : merge_adapters)(m, &config, o, &room);
}

// ---- The program --------------------------------------------------------------------------------

static Options *start_process(Options *o, int argc, char **argv) {
    io_open_standard_streams();
    device_prepare_process(argv);
    signals_catch();  // first: what follows may take seconds
    comm_init();
    if (!is_rank_0()) signals_say("", "");
    run_options_parse(o, argc, argv, "unpad.c " UNPAD_VERSION, comm_num_ranks());
    setvbuf(stdout, NULL, _IOLBF, 0);
    io_progress = comm_progress;
    comm_heartbeat(o->heartbeat_seconds);
    comm_phase("set-up", 0);
    check_ranks_are_started_alike(o);
    return o;
}

// Sets the cursor; returns how much of the log is kept, -1 where it is not continued.
static int64_t read_state(Run *run) {
    const ResumePoint *at = run->resume;
    if (run->o->compare || run->o->check_packing) return -1;
    if (!at->dir[0]) return run->o->resume ? 0 : -1;
    must(state_read(&run->state, at->dir, &run->data->loader_settings.plan, &run->data->train,
                    &err));
    run->last_good = run->state;
    return at->in_place ? run->state.log_bytes : -1;
}

int main(int argc, char **argv) {
    static LlamaModel model;
    static Data data;
    static OutDir out;
    static Run run;
    static Options options, before;
    Options *o = start_process(&options, argc, argv);
    if (o->generate || o->eval || run_merges(o)) {
        if (o->generate) signals_release();
        infer(o, &model);
        comm_finalize();
        return exit_code_of_output();
    }
    const ResumePoint at = find_resume(o, &before, &out);
    run_options_complete(o, &before, at.dir, comm_num_ranks());

    // inputs are proven good before anything is written
    if (!at.dir[0] && is_rank_0()) verify_models(o);
    LlamaConfig config = load_config(o, &at);
    DeviceRoom room = open_device(o, &config, &model);
    tokenize_texts(o, &out, &at, config.vocab_size);
    if (at.dir[0] && is_rank_0()) run_options_print_changes(o, &before);
    open_data(&data, o, &at, &config, comm_rank(), comm_num_ranks());
    run = (Run){o, argv, &data, &model, .resume = &at, .out = &out};
    if (o->bench)
        must(benchmark_open(&run.bench, o, data.has_tokenizer ? data.tokenizer.file : o->model,
                            config.vocab_size, &err));
    must(samples_open(&run.samples, o, &data, &err));
    const int64_t log_before = read_state(&run);
    run_options_set_length(o, count_steps(&data, o, run.state.cursor));
    if (!o->dry_run) check_ranks_agree(&run, &config);

    const char *weights = weights_dir(o, at.dir);
    plan_model(&model, &config, o, &data, &run.samples, &room);
    if (is_rank_0() && o->save_every != 0 && run_trains(o))  // beside the models, if on the host
        saver_open(&run.saver, model.num_elements,
                   (size_t)comm_local_ranks() * llama_memory_total(&model) *
                       (device_memory_code() == EXIT_HOST_MEMORY));
    print_plan(&run, &room, weights);
    must(llama_check(&model, weights, o->model, &err));
    check_memory(&model, &room, o);
    if (o->dry_run) return exit_code_of_output();
    if (!run_trains(o)) signals_release();
    if (o->compare) {
        compare_layouts(o, &data, &model, weights);
        return exit_code_of_output();
    }
    must(llama_allocate(&model, &err));
    load_or_init(&model, weights, o);
    if (run.state.frozen_crc && run.state.frozen_crc != model.frozen_crc)
        exit_with(EXIT_CHECKPOINT_MISFIT, "give --model as in the interrupted run",
                  "%s: expected the weights that the adapters were trained beside, found others",
                  o->model);
    run.state.frozen_crc = model.frozen_crc;
    check_replicas(&run, "the same weights", "give every rank the same files and C library");
    if (!o->compare && !o->check_packing)
        must(reference_open(&data, llama_face(&model), at.dir, &err));
    if (o->check_packing)
        check_packing(&model, &data, o->check_packing);
    else if (o->steps > 0)
        train_and_save(&run, log_before, &room);
    else {  // no checkpoint and no log: --out may hold another run
        validate(&run, run.state.cursor.step);
        print_samples(&run);
        printf("done: nothing was trained, no checkpoint and no log written\n");
    }
    comm_finalize();
    return run_trains(o) ? EXIT_DONE : exit_code_of_output();
}
