// unpad.c: trains a Llama on packed documents. C in both backends; the kernels alone are CUDA.
//
//   scripts/quickstart.sh                        everything, from nothing, in a few minutes
//   ./train_llama                                trains `demo` on what quickstart prepared
//   ./train_llama --model DIR --train 'shards/train_*.bin' --out run --steps 1000
//   ./train_llama --resume --out run             continues from the newest checkpoint, bit for bit
//   ./train_llama --compare                      packed, padded, rows, repad on the same documents
//   ./train_llama --check-packing                packed against each document alone
//   ./train_llama --model DIR --generate --prompt TEXT      continues the text
//   ./train_llama --model DIR --eval --val shards           loss and perplexity
//   mpirun -n 4 ./train_llama ...                several ranks share each step
//   ./train_llama --help                         every option with its default
#include <assert.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>

#include "data/base/clock.h"
#include "data/base/dir.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/hash.h"
#include "data/base/json.h"
#include "data/base/memory.h"
#include "data/base/options.h"
#include "data/base/path.h"
#include "data/batches/batch.h"
#include "data/batches/loader.h"
#include "data/batches/plan.h"
#include "data/batches/summary.h"
#include "data/models/config.h"
#include "data/models/tokenizer.h"
#include "data/models/weights.h"
#include "data/runs/checkpoint.h"
#include "data/runs/evaluate.h"
#include "data/runs/generate.h"
#include "data/runs/log.h"
#include "data/runs/model_files.h"
#include "data/runs/other_trainers.h"
#include "data/runs/out_dir.h"
#include "data/runs/schedule.h"
#include "data/runs/state.h"
#include "data/runs/vocabulary.h"
#include "data/shards/dataset.h"
#include "data/texts/texts.h"
#include "kernels/comm/agree.h"
#include "kernels/comm/comm.h"
#include "kernels/kernels.h"  // defines: the device
#include "llama.h"            // defines: LlamaModel, forward, backward, update

#define UNPAD_VERSION "0.1.0"

// ------------------------------------------------------------------------------------------------
// Options: one table parses, documents and logs them

typedef struct {
    const char *model, *train, *val, *out, *resume, *init_from, *prompt, *prompt_file, *attention;
    bool from_scratch, overwrite, deterministic, bf16_matmul, compare, check_packing, generate,
        chat, eval, dry_run, version, allow_other_tokenizer, strict;
    int layout, schedule, long_docs, zero, recompute, final_dtype;
    int max_seqlen, micro_batch_tokens, boundary_token, threads, keep, max_skips;
    int64_t batch_tokens, steps, warmup_steps, val_every, val_tokens, sample_every, save_every,
        seed;
    int sample_tokens, num_samples, max_new_tokens, top_k, compare_steps;
    float fill, lr, decay_frac, min_lr_frac, weight_decay, beta1, beta2, eps, grad_clip,
        temperature, top_p, heartbeat_seconds;
} Options;

static Options o;

static const Option option_table[] = {
    OPTION_GROUP("model"),
    TEXT("model", o.model, "demo",
         "Hugging Face directory, or a built-in name: demo, smollm2-135m, smollm2-360m, "
         "smollm2-1.7b, llama-3.2-1b, llama-3.2-3b, llama-3.1-8b"),
    FLAG("from-scratch", o.from_scratch, "random weights (always so for a built-in name)"),
    OPTION_GROUP("data"),
    TEXT("train", o.train, "data/demo",
         "training data: a directory, file or glob; shards, or texts (.txt, .jsonl, a directory of "
         "them), which are tokenized once into --out"),
    TEXT("val", o.val, NULL, "validation shards or texts; default: the val shards of --train"),
    CHOICE("layout", o.layout, "packed", "packed|padded|rows|repad", "how documents fill a batch"),
    NUMBER("max-seqlen", o.max_seqlen, "1024", 1, 1 << 24,
           "longest segment; the row of other layouts"),
    NUMBER("micro-batch-tokens", o.micro_batch_tokens, "4096", 1, 1 << 29,
           "capacity of the 1D token buffer"),
    NUMBER(
        "batch-tokens", o.batch_tokens, "0", 0, 1e12,
        "capacity of one optimizer step, a multiple of --micro-batch-tokens; 0: one micro-batch"),
    NUMBER("fill", o.fill, "0", 0, 1,
           "target fill: fraction of a step's capacity to use; 0: 1 for one micro-batch a step, "
           "else 0.97"),
    CHOICE("long-docs", o.long_docs, "split", "split|truncate|drop|error",
           "documents longer than --max-seqlen"),
    NUMBER(
        "boundary-token", o.boundary_token, "-1", -1, 1 << 30,
        "llm.c's shards: the token that begins each document; -1: 50256, or 128000 of 32-bit ids"),
    FLAG("allow-other-tokenizer", o.allow_other_tokenizer,
         "train on shards that were not made with the model's tokenizer.json"),
    FLAG("strict", o.strict, "texts: stop at a line of a .jsonl that has none, not leave it out"),
    OPTION_GROUP("run"),
    TEXT("out", o.out, "out/demo", "directory of log.jsonl, checkpoints and final/"),
    {"resume", OPTION_STRING, &o.resume, NULL, "newest", 0, 0,
     "continue from a checkpoint, with the options of its run but for those given here; without "
     "DIR from the newest valid one in --out"},
    TEXT(
        "init-from", o.init_from, NULL,
        "a checkpoint whose model, weights and AdamW moments start a new run, with data, sizes and "
        "schedule of its own; --model takes the weights alone"),
    FLAG("overwrite", o.overwrite,
         "replace the run in --out: its checkpoints, final/ and log are removed"),
    NUMBER("steps", o.steps, "300", 0, 1e12,
           "optimizer steps; 0: validate, print samples, and write no checkpoint or log"),
    NUMBER("seed", o.seed, "1", 0, 1e15, "of initial weights, document order and samples"),
    NUMBER("save-every", o.save_every, "0", 0, 1e12,
           "steps between checkpoints; 0: only at the end"),
    NUMBER("keep", o.keep, "2", 0, 1e6, "newest checkpoints kept; 0: all"),
    CHOICE("final-dtype", o.final_dtype, "fp32", MODEL_DTYPES,
           "of the weights in final/; checkpoints are fp32"),
    NUMBER("val-every", o.val_every, "50", 0, 1e12,
           "steps between validations, the first before training, the last after it; 0: never"),
    NUMBER("val-tokens", o.val_tokens, "65536", 1, 1e12,
           "most tokens of the validation set: whole documents, the first of a fixed order"),
    NUMBER("max-skips", o.max_skips, "5", 0, 1e6,
           "consecutive steps with a non-finite loss or gradient that end the run with exit code "
           "7; 0: they never do"),
    OPTION_GROUP("optimizer"),
    NUMBER("lr", o.lr, "2e-3", 0, 1e30, "peak learning rate"),
    CHOICE("schedule", o.schedule, "wsd", SCHEDULE_NAMES,
           "wsd: stable, then decay over the last --decay-frac, linear or 1-sqrt"),
    NUMBER("warmup-steps", o.warmup_steps, "20", 0, 1e12, "linear from 0"),
    NUMBER("decay-frac", o.decay_frac, "0.2", 0, 1, "share of the steps that wsd decays over"),
    NUMBER("min-lr-frac", o.min_lr_frac, "0", 0, 1, "last learning rate / --lr"),
    NUMBER("weight-decay", o.weight_decay, "0.1", 0, 1e6, "on matrices, not on norm weights"),
    NUMBER("beta1", o.beta1, "0.9", 0, 0.999999, "AdamW"),
    NUMBER("beta2", o.beta2, "0.95", 0, 0.999999, "AdamW"),
    NUMBER("eps", o.eps, "1e-8", 0, 1, "AdamW"),
    NUMBER("grad-clip", o.grad_clip, "1", 0, 1e30, "largest gradient norm; 0: no clipping"),
    OPTION_GROUP("samples"),
    NUMBER("sample-every", o.sample_every, "0", 0, 1e12,
           "steps between samples; 0: only at the end"),
    NUMBER("num-samples", o.num_samples, "3", 0, MAX_SAMPLES,
           "texts a round, packed into one batch where they fit; 0: none"),
    NUMBER("sample-tokens", o.sample_tokens, "128", 1, 1 << 20, "tokens written per text"),
    TEXT("prompt", o.prompt, NULL, "how each text begins; default: as validation documents do"),
    NUMBER("temperature", o.temperature, "0.8", 0, 100, "0: always the likeliest token"),
    NUMBER("top-k", o.top_k, "0", 0, 1 << 24, "sample from the k likeliest; 0: from all"),
    NUMBER("top-p", o.top_p, "0.95", 0, 1, "sample from the likeliest that sum to p"),
    OPTION_GROUP("machine"),
    NUMBER("threads", o.threads, "0", 0, 4096, "CPU threads; 0: all cores"),
    FLAG("bf16-matmul", o.bf16_matmul, "CPU: matmul inputs in bf16, sums in fp32"),
    TEXT("attention", o.attention, "auto",
         "attention kernels: auto; CUDA: sm80, sm90; CPU: avx512, avx2, portable"),
    FLAG("deterministic", o.deterministic,
         "same bits in every run (the CPU always does) and on any number of ranks; takes memory "
         "for sums over micro-batches in a fixed order"),
    CHOICE("recompute", o.recompute, "auto", "off|on|full|auto",
           "activations that backward computes again instead of keeping, for the same bits: none, "
           "norms and SwiGLU, or whole layers; auto: as little as fits into memory"),
    CHOICE("zero", o.zero, "1", "0|1",
           "several ranks: 1 = each holds and updates its shard of the optimizer state, 0 = all of "
           "it"),
    NUMBER("heartbeat-seconds", o.heartbeat_seconds, "60", 0, 1e6,
           "several ranks: seconds without progress before a rank is reported and the run ends "
           "with exit code 8; 0: never"),
    OPTION_GROUP("instead of training"),
    FLAG("generate", o.generate,
         "continue --prompt, or prompts from standard input: a terminal is asked line by line"),
    TEXT("prompt-file", o.prompt_file, NULL, "prompts of --generate, one a line, in one batch"),
    FLAG("chat", o.chat,
         "--generate answers instead: prompts are messages, in the model's chat template (ChatML)"),
    NUMBER("max-new-tokens", o.max_new_tokens, "256", 1, 1 << 24,
           "of a text of --generate, which ends at --max-seqlen at the latest"),
    FLAG("eval", o.eval,
         "loss and perplexity on every document of --val, or of --train, by document length"),
    FLAG("compare", o.compare, "time all layouts on the same documents"),
    NUMBER("compare-steps", o.compare_steps, "3", 1, 1000, "timed steps of each layout"),
    FLAG("check-packing", o.check_packing, "packed against each document alone"),
    FLAG("dry-run", o.dry_run, "print the plan and the memory, and stop"),
    FLAG("version", o.version, "print the version"),
    OPTIONS_OF_OTHER_TRAINERS,
    OPTION_END,
};

// What most runs need, for --help
static const char options_of_help[] =
    "model|train|val|out|resume|overwrite|layout|max-seqlen|micro-batch-tokens|batch-tokens|steps|"
    "lr|save-every|prompt|generate|dry-run";

// What --resume does not take from the run it continues: options of this start and this machine.
static const char options_of_a_start[] =
    "out|resume|init-from|overwrite|threads|zero|heartbeat-seconds|compare|compare-steps|"
    "check-packing|generate|prompt-file|chat|max-new-tokens|eval|dry-run|"
    "version";

// ------------------------------------------------------------------------------------------------
// The run: what the parts below share

typedef struct {
    LlamaConfig config;
    LlamaModel model;
    Dataset train, val;
    DataSummary train_summary, val_summary;
    bool has_val, has_tokenizer;
    Tokenizer tokenizer;
    ModelFiles files;  // of the model and its tokenizer; rank 0 only
    LoaderSettings loader_settings;
    Loader loader;
    PlanState cursor;   // of the next step to train
    StepData val_step;  // the fixed validation set
    ValidationSet val_set;
    LossTrend trend;
    OutDir out;
    ResumePoint resume;      // or what --init-from names
    int64_t updates_before;  // of the moments, by the run that --init-from took them from
    bool model_given;
    json_t *stored;  // options of the run that --resume continues
    RunLog log;
    size_t backend_bytes;  // what the device layer itself holds: workspaces of its kernels
    size_t free_bytes;     // of the device, before any rank has allocated its model; 0: unknown
    size_t recompute_bytes[LLAMA_NUM_RECOMPUTES];  // what the model takes with each --recompute
    int failed_saves, skips_in_a_row, stopped_by;
    Checkpoint checkpoint;
    Samples samples;
} Run;

static Run run;
static volatile sig_atomic_t stop_signal;

// A device error is found after the call that made it: at the latest at the end of the step.
static void describe_work(char *text, size_t capacity) {
    char batch[400] = "";
    llama_describe_batch(&run.model, batch, sizeof batch);
    if (batch[0])
        snprintf(text, capacity, "step %lld, last batch: %s", (long long)run.cursor.step + 1,
                 batch);
}

// The first signal ends the run after the current step, with a checkpoint; the second ends it at
// once (nothing is ever half-written under its final name).
static void on_signal(int sig) {
    if (stop_signal) _exit(EXIT_RESUMABLE);
    stop_signal = sig;
}

static void catch_signals(void) {
    const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGXCPU};
    const struct sigaction action = {.sa_handler = on_signal};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);  // EFBIG instead: a full disk
}

// Rank 0 prints, logs and writes; every rank reads.
static bool is_rank_0(void) { return comm_rank() == 0; }

static bool reduces_deterministically(void) {
    return o.deterministic && !o.compare && !o.check_packing;
}

static AdamW adamw_of_step(int64_t step) {
    const Schedule schedule = {
        (ScheduleKind)o.schedule, o.steps, o.warmup_steps, o.lr, o.min_lr_frac, o.decay_frac};
    return (AdamW){.lr = schedule_lr(&schedule, step),
                   .beta1 = o.beta1,
                   .beta2 = o.beta2,
                   .eps = o.eps,
                   .weight_decay = o.weight_decay,
                   .t = run.updates_before + step + 1};
}

static bool model_is_builtin(void) {
    LlamaConfig c;
    return llama_config_builtin(&c, o.model);
}

// Continues a run, and does not merely start from its weights and moments.
static bool resumes(void) { return run.resume.dir[0] && !o.init_from; }

// Where the weights come from; NULL: random ones.
static const char *weights_dir(void) {
    if (run.resume.dir[0]) return run.resume.dir;
    return o.from_scratch || model_is_builtin() ? NULL : o.model;
}

static void load_optimizer(LlamaModel *m) {
    Error err = {0};
    char path[IO_PATH_MAX];
    if (!run.resume.dir[0]) return;
    must(path_join(path, sizeof path, run.resume.dir, "optimizer.safetensors", &err), &err);
    must(moments_load(llama_parameters(m), path, &err), &err);
}

static void init_weights(LlamaModel *m) {
    Error err = {0};
    if (weights_dir())
        must(llama_load(m, weights_dir(), &err), &err);
    else
        llama_init(m, (uint64_t)o.seed);
}

// ------------------------------------------------------------------------------------------------
// The step: micro-batches through the model, and the update

static void train_micro_batch(LlamaModel *m, const Batch *b) {
    comm_phase("forward", -1);
    llama_set_batch(m, b);
    llama_forward(m);
    llama_head_train(m);
    comm_phase("backward", -1);
    llama_backward(m);
    llama_add_losses(m);
}

// Gradients of this rank's micro-batches, leaf by leaf of the tree that fixes the order of the sum.
static void train_leaves(LlamaModel *m, const StepData *data) {
    const LlamaRanks *ranks = &m->ranks;
    int32_t first, last, i = 0;
    rank_block(ranks->num_leaves, ranks->rank, ranks->num_ranks, &first, &last);
    for (int32_t leaf = first; leaf < last; leaf++) {
        llama_select_loss_partial(m, leaf);
        while (i < data->num_micro &&
               sum_leaf(data->own_micros[i], data->plan.num_micro, ranks->num_leaves) == leaf)
            train_micro_batch(m, &data->micro[i++]);
        llama_end_leaf(m, leaf, leaf + 1 == last);
    }
    assert(i == data->num_micro);
}

// The whole step; waits for it, once, at the end. device_timer_ms is the time of its micro-batches.
static StepScalars train_step(LlamaModel *m, const StepData *data, AdamW hyper, float grad_clip) {
    comm_phase("forward", hyper.t);
    llama_zero_grads(m, data->num_targets);
    device_timer_start();
    if (m->ranks.deterministic_reduction)
        train_leaves(m, data);
    else
        for (int i = 0; i < data->num_micro; i++) {
            if (i + 1 == data->num_micro) llama_last_micro_batch(m);
            train_micro_batch(m, &data->micro[i]);
        }
    device_timer_stop();
    comm_phase("reduce", -1);
    llama_reduce_grads(m);
    comm_phase("update", -1);
    llama_update(m, hyper, grad_clip);
    return llama_read_step(m);
}

// Validation micro-batches are distributed across ranks too: each is one part of the sum.
static double validation_loss(LlamaModel *m, const StepData *data) {
    llama_zero_sums(m);
    for (int i = 0; i < data->num_micro; i++) {
        comm_phase("validate", -1);
        llama_select_loss_partial(m, data->own_micros[i]);
        llama_set_batch(m, &data->micro[i]);
        llama_forward(m);
        llama_head_eval(m);
        llama_add_losses(m);
    }
    llama_sum_losses(m);
    return llama_read_step(m).loss_sum / (double)data->num_targets;
}

// ------------------------------------------------------------------------------------------------
// Checkpoints

// The weights, or the moments. All ranks, unless rank 0's `ok` is false: what each holds of them
// comes to rank 0, which writes the files.
static bool save_parameters(Checkpoint *ck, LlamaModel *m, bool moments, ModelDtype dtype, bool ok,
                            Error *err) {
    const Parameters p = llama_parameters(m);
    comm_broadcast(&ok, sizeof ok);
    if (ok && is_rank_0())
        return moments ? model_files_write_moments(p, ck, err)
                       : model_files_write_weights(p, dtype, MODEL_FILE_BYTES, ck, err);
    if (ok && m->ranks.shard_optimizer) parameters_visit(p, moments);
    return ok;
}

// Everything beside parameters that --resume needs
static bool save_state(Checkpoint *ck, Error *err) {
    const TrainingState state = {run.cursor, log_bytes(&run.log), run.skips_in_a_row,
                                 run.updates_before};
    return state_write(ck, &state, &run.loader_settings.plan, &run.train, UNPAD_VERSION,
                       option_table, err);
}

// name NULL: step-NNNNNNNN with the training state; "final": the model alone. All ranks; the result
// counts on rank 0.
static bool save_checkpoint(LlamaModel *m, const char *name, Error *err) {
    Checkpoint *ck = &run.checkpoint;
    const ModelDtype dtype = name ? (ModelDtype)o.final_dtype : MODEL_FP32;
    comm_phase("save", run.cursor.step);
    bool ok =
        !is_rank_0() || (dir_lock_check(&run.out.lock, o.out, err) && log_sync(&run.log, err) &&
                         checkpoint_begin(ck, o.out, run.cursor.step, name, err) &&
                         model_files_write(&run.files, &m->config, dtype, ck, err));
    ok = save_parameters(ck, m, false, dtype, ok, err);
    if (name == NULL) ok = save_parameters(ck, m, true, dtype, ok, err);
    if (is_rank_0()) {
        ok = ok && (name || save_state(ck, err)) && dir_lock_check(&run.out.lock, o.out, err) &&
             checkpoint_publish(ck, err);
        checkpoint_abort(ck);
    }
    comm_barrier();  // where the others hear that rank 0 writes
    return ok || !is_rank_0();
}

// All weights as this rank computes with them, and their low bits where it has all of these.
static void rank_field_weights(RankFields *f, const LlamaModel *m) {
    const bool exact = m->master_lo && m->held_count == m->num_elements;
    float *chunk = host_calloc(m->sizes.io_chunk, sizeof(float), "weights");
    uint32_t crc = 0;
    for (size_t at = 0, n; at < m->num_elements; at += n) {
        n = m->num_elements - at < m->sizes.io_chunk ? m->num_elements - at : m->sizes.io_chunk;
        comm_progress();
        weights_to_host(chunk, m->weights + at, exact ? m->master_lo + at : NULL, n);
        crc = crc32c(crc, chunk, n * sizeof(float));
    }
    free(chunk);
    rank_field(f, "weights", &crc, sizeof crc);
}

// Replicas must be identical: a checkpoint of replicas that have diverged is not worth saving.
static void check_ranks_still_agree(LlamaModel *m) {
    static RankFields own;
    if (comm_num_ranks() == 1) return;
    comm_phase("compare", -1);
    llama_await_all_weights(m);
    memset(&own, 0, sizeof own);
    rank_field(&own, "data position", &run.cursor, sizeof run.cursor);
    rank_field(&own, "skipped steps", &run.skips_in_a_row, sizeof run.skips_in_a_row);
    rank_field_weights(&own, m);
    rank_fields_agree(
        &own, "identical replicas after the same steps",
        "--resume continues from the last checkpoint, when they were still identical; "
        "check that machine's memory");
}

// A failed save leaves the older checkpoints. Training continues and tries again; it gives up after
// three failures in a row, or at once when the weights are not worth saving.
static void save_or_warn(LlamaModel *m, bool last) {
    Error err = {0};
    double start = now_ms();
    check_ranks_still_agree(m);
    if (save_checkpoint(m, NULL, &err)) {
        run.failed_saves = 0;
        if (!is_rank_0()) return;
        printf("saved %s/step-%08lld in %.1f s\n", o.out, (long long)run.cursor.step,
               (now_ms() - start) * 1e-3);
        if (!checkpoint_prune(o.out, run.cursor.step, o.keep, &err)) error_print(&err);
        return;
    }
    if (++run.failed_saves >= 3 || last || err.code == EXIT_DIVERGED) error_exit(&err);
    error_print(&err);
}

// ------------------------------------------------------------------------------------------------
// The loop

// What the ranks told each other with their losses: who needs how long for its micro-batches, and
// whether one has received a signal, which stops all of them after the same step.
static StepBalance read_notes(LlamaModel *m, const StepData *data) {
    StepBalance b = {.planned = data->imbalance};
    const RankNote *notes = llama_notes(m->step_host);
    const int32_t ranks = m->ranks.num_ranks;
    double sum = 0;
    if (ranks == 1) return (StepBalance){0};
    for (int32_t r = 0; r < ranks; r++) {
        sum += notes[r].passes_ms;
        if (notes[r].passes_ms > notes[b.slowest_rank].passes_ms) b.slowest_rank = r;
        if (notes[r].signal > 0) run.stopped_by = (int)notes[r].signal;
    }
    b.measured = sum > 0 ? notes[b.slowest_rank].passes_ms * ranks / sum : 0;
    m->note.passes_ms = (double)device_timer_ms();
    return b;
}

static bool every(int64_t step, int64_t interval) { return interval > 0 && step % interval == 0; }

static bool stop_requested(LlamaModel *m) {
    m->note.signal = stop_signal;  // the others learn it with the next step
    if (comm_num_ranks() == 1) run.stopped_by = (int)stop_signal;
    return run.stopped_by != 0;
}

static void leave_if_diverged(const StepScalars *s) {
    run.skips_in_a_row = s->scale == 0 ? run.skips_in_a_row + 1 : 0;
    if (o.max_skips == 0 || run.skips_in_a_row < o.max_skips) return;
    exit_with(EXIT_DIVERGED, "lower --lr, or resume from an earlier checkpoint",
              "training diverged: %d step%s had a non-finite loss or gradient norm, and touched no "
              "weight",
              run.skips_in_a_row, run.skips_in_a_row == 1 ? "" : "s in a row");
}

// In other layouts some of the attention pairs are of no use.
static double useful_flops(const StepData *d) {
    if (o.layout != LAYOUT_PACKED) return 0;
    return llama_useful_flops(&run.config, d->real_tokens, d->attention_pairs);
}

static void validate(LlamaModel *m, int64_t step) {
    if (!run.has_val || o.val_every == 0) return;
    report_validation(&run.log, step, validation_loss(m, &run.val_step), &run.val_set);
}

static SampleModel sample_model(LlamaModel *m) {
    return (SampleModel){.vocab_size = m->config.vocab_size,
                         .end_of_text = m->config.eos_token_id,
                         .end_of_turn = -1,
                         .cache_tokens = m->cache_tokens,
                         .max_rows = m->head_chunk,
                         .context = m,
                         .next_logits = llama_next_logits};
}

static void print_samples(LlamaModel *m) {
    const SampleModel model = sample_model(m);
    comm_phase("sample", -1);
    if (is_rank_0()) samples_report(&run.samples, &model, run.cursor.step, &run.log);
    comm_barrier();  // where the others hear that rank 0 works
}

// Validation, samples and a checkpoint after `step` steps, where they are due; true when it saved.
static bool pause_training(LlamaModel *m, int64_t step) {
    const bool last = step == o.steps;
    if (every(step, o.val_every) || last) validate(m, step);
    if (every(step, o.sample_every) || last) print_samples(m);
    if (last) return false;
    // last, so that the log it refers to holds all of this step
    if (every(step, o.save_every)) save_or_warn(m, false);
    return every(step, o.save_every);
}

static void print_trained(int64_t steps, int64_t tokens, int64_t targets, double ms,
                          double pauses_ms) {
    if (steps == 0) return;
    printf("trained %lld step%s, %lld tokens", (long long)steps, steps == 1 ? "" : "s",
           (long long)tokens);
    if (run.train.masked) printf(", %lld of them targets,", (long long)targets);
    printf(" in ");
    print_duration(ms * 1e-3);
    printf("; validation, samples and checkpoints ");
    print_duration(pauses_ms * 1e-3);
    printf("\n");
}

static void train(LlamaModel *m) {
    Error err = {0};
    double mean_ms = 0, all_ms = 0, pauses_ms = 0;
    int64_t last_saved = run.resume.in_place ? run.cursor.step : -1, tokens = 0, targets = 0;
    DeviceMemory before;
    must(loader_start(&run.loader, &run.train, &run.loader_settings, run.cursor, &err), &err);
    const int64_t first = run.cursor.step;
    if (!resumes()) validate(m, 0);
    for (int64_t step = first; step < o.steps && !stop_requested(m); step++) {
        double start_ms = now_ms();
        comm_phase("read", step + 1);
        const StepData *data = loader_next(&run.loader, &err);
        must(data != NULL, &err);
        const double read_ms = now_ms() - start_ms;
        AdamW hyper = adamw_of_step(step);
        before = device_memory();
        StepScalars scalars = train_step(m, data, hyper, o.grad_clip);
        // nothing is allocated inside a step, and the host waits for the device once: for the loss
        assert(device_memory().count == before.count);
        assert(device_memory().waits == before.waits + 1);
        double ms = now_ms() - start_ms;
        mean_ms = step == first ? ms : mean_ms + 0.1 * (ms - mean_ms);
        const double pause_ms = step == first ? 0 : pauses_ms / (double)(step - first);
        const double loss = scalars.loss_sum / (double)data->num_targets;
        const StepReport report = {.step = step + 1,
                                   .steps = o.steps,
                                   .ms = ms,
                                   .mean_ms = mean_ms + pause_ms,
                                   .read_ms = read_ms,
                                   .passes_ms = (double)device_timer_ms(),
                                   .loss = loss,
                                   .grad_norm = scalars.grad_norm,
                                   .lr = hyper.lr,
                                   .useful_flops = useful_flops(data),
                                   .skipped = scalars.scale == 0,
                                   .spike = loss_is_spike(&run.trend, loss),
                                   .balance = read_notes(m, data)};
        report_step(&run.log, &report, data);
        tokens += data->real_tokens;
        targets += data->num_targets;
        all_ms += ms;
        run.cursor = data->cursor_after;
        leave_if_diverged(&scalars);
        start_ms = now_ms();
        if (pause_training(m, step + 1)) last_saved = step + 1;
        pauses_ms += now_ms() - start_ms;
    }
    loader_stop(&run.loader);
    print_trained(run.cursor.step - first, tokens, targets, all_ms, pauses_ms);
    if (last_saved != run.cursor.step) save_or_warn(m, true);
}

// --steps 0: what the weights are good for. No checkpoint and no log: --out may hold another run.
static void validate_and_sample(LlamaModel *m) {
    validate(m, run.cursor.step);
    print_samples(m);
    printf("done: nothing was trained, no checkpoint and no log written\n");
}

static void finish(LlamaModel *m) {
    Error err = {0};
    if (run.stopped_by) {
        data_summary_print_left_out(&run.train_summary);
        printf("stopped by signal %d; --resume continues from step %lld\n", run.stopped_by,
               (long long)run.cursor.step);
        comm_finalize();
        exit(EXIT_RESUMABLE);
    }
    must(save_checkpoint(m, "final", &err), &err);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);  // ru_maxrss is in KiB
    printf("peak memory: device %.1f MiB (planned %.1f MiB), process %.1f MiB\n",
           (double)device_memory().bytes_peak / 1048576.0,
           (double)(run.backend_bytes + llama_memory_total(m)) / 1048576.0,
           (double)usage.ru_maxrss / 1024.0);
    data_summary_print_left_out(&run.train_summary);
    printf("done: %s/final is a Hugging Face model\n", o.out);
}

// ------------------------------------------------------------------------------------------------
// --compare: every layout on the same documents, weights and kernels, in one table

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct {
    double median_ms;
    StepScalars scalars;
} TimedSteps;

// o.compare_steps steps after one that is not timed; lr 0: full steps that move nothing
static TimedSteps time_steps(LlamaModel *m, const StepData *data) {
    const AdamW frozen = {.beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .t = 1};
    const int n = o.compare_steps;
    TimedSteps t;
    double *ms = host_calloc((size_t)n, sizeof(double), "timings");
    t.scalars = train_step(m, data, frozen, o.grad_clip);  // warm-up
    for (int i = 0; i < n; i++) {
        const double start_ms = now_ms();
        t.scalars = train_step(m, data, frozen, o.grad_clip);
        ms[i] = now_ms() - start_ms;
    }
    qsort(ms, (size_t)n, sizeof(double), compare_doubles);
    t.median_ms = ms[n / 2];
    free(ms);
    return t;
}

static void compare_print_row(Layout layout, const LlamaModel *m, const StepData *data,
                              TimedSteps t, int64_t packed_pairs) {
    const double real_tokens = (double)data->real_tokens;
    const double flops = llama_useful_flops(&m->config, data->real_tokens, packed_pairs);
    printf("%-7s %10.1f %12.0f %9.3f %10.1f %15lld %12.1f %11.6f\n", layout_name(layout),
           t.median_ms, real_tokens / t.median_ms * 1e3, flops / t.median_ms * 1e-9,
           100.0 * (1.0 - real_tokens / (double)data->local_tokens),
           (long long)data->attention_pairs, (double)llama_memory_total(m) / 1048576.0,
           t.scalars.loss_sum / (double)data->num_targets);
    fflush(stdout);
}

// One row of the table: its own model, sized for this layout's largest micro-batch, so that the
// memory is its own. Returns the attention pairs of the packed layout, which come first.
static int64_t compare_layout(Layout layout, int64_t packed_pairs) {
    Error err = {0};
    LoaderSettings settings = run.loader_settings;
    StepData data = {0};
    settings.layout = layout;
    must(loader_load_step(&data, &run.train, &settings, (PlanState){0}, &err), &err);
    LlamaSizes sizes = {.max_seqlen = o.max_seqlen, .repad = layout == LAYOUT_REPAD, .train = true};
    for (int i = 0; i < data.num_micro; i++)
        if (data.micro[i].total_tokens > sizes.micro_batch_tokens)
            sizes.micro_batch_tokens = data.micro[i].total_tokens;
    static LlamaModel m;
    llama_plan(&m, &run.config, sizes);
    llama_plan_recompute(&m, run.model.recompute);
    must(llama_allocate(&m, &err), &err);
    init_weights(&m);
    const TimedSteps t = time_steps(&m, &data);
    if (layout == LAYOUT_PACKED) packed_pairs = data.attention_pairs;
    compare_print_row(layout, &m, &data, t, packed_pairs);
    llama_free(&m);
    step_data_free(&data);
    return packed_pairs;
}

static void compare_layouts(void) {
    printf(
        "\nlayout     step ms   real tok/s   TFLOP/s  padding %%  attention pairs   memory MiB"
        "        loss\n");
    int64_t packed_pairs = 0;
    for (int layout = LAYOUT_PACKED; layout <= LAYOUT_REPAD; layout++)
        packed_pairs = compare_layout((Layout)layout, packed_pairs);
    printf(
        "The same documents, weights and kernels in every row; the median of %d steps. TFLOP/s "
        "counts useful work:\n"
        "real tokens, and pairs inside documents. rows differs in loss because there attention "
        "crosses documents.\n",
        o.compare_steps);
}

// ------------------------------------------------------------------------------------------------
// --check-packing: the documents of one micro-batch, packed and each alone

typedef struct {
    double max_loss, max_logit, max_grad;
    double grad_error;  // relative, L2
} PackingDelta;

// One pass: losses (T) and logits (T, V) into host buffers, gradients added to those of the model.
static void pass_to_host(LlamaModel *m, const Batch *b, float *losses, float *logits) {
    const int32_t T = b->total_tokens, V = m->config.vocab_size;
    int32_t *rows = host_calloc((size_t)T, sizeof(int32_t), "rows");
    for (int32_t t = 0; t < T; t++) rows[t] = t;
    llama_set_batch(m, b);
    llama_forward(m);
    for (int32_t t = 0; t < T; t += m->head_chunk)
        llama_logits(m, logits + (int64_t)t * V, rows + t,
                     T - t < m->head_chunk ? T - t : m->head_chunk);
    free(rows);
    llama_head_train(m);
    device_download(losses, m->scratch.losses, (size_t)T * sizeof(real));
    llama_backward(m);
}

// A NaN counts as infinite, fmax would drop it.
static double larger_difference(double so_far, double difference) {
    return isnan(difference) ? INFINITY : fmax(so_far, fabs(difference));
}

static double max_difference(const float *a, const float *b, int64_t n, double so_far) {
    for (int64_t i = 0; i < n; i++) so_far = larger_difference(so_far, (double)a[i] - (double)b[i]);
    return so_far;
}

// Document d of the packed batch as a batch of its own.
static void batch_alone(Batch *alone, const Batch *packed, int d) {
    int32_t first = packed->cu_seqlens[d], n = packed->cu_seqlens[d + 1] - first;
    DocView doc = {packed->tokens + first, n, n ? packed->targets[first + n - 1] : -1, NULL};
    batch_pack(alone, &doc, 1);
    for (int32_t t = 0; packed->masked && t < n; t++)
        if (packed->targets[first + t] < 0) alone->targets[t] = -1;
}

static PackingDelta packing_delta(LlamaModel *m, const Batch *packed) {
    const size_t T = (size_t)packed->total_tokens, V = (size_t)m->config.vocab_size,
                 n = m->num_elements;
    float *logits = host_calloc(2 * T * V, sizeof(float), "logits"), *logits_alone = logits + T * V;
    float *losses = host_calloc(2 * T, sizeof(float), "losses"), *losses_alone = losses + T;
    real *grads = host_calloc(2 * n, sizeof(real), "gradients"), *grads_alone = grads + n;
    double error2 = 0, norm2 = 0;
    Batch alone;
    PackingDelta delta = {0};
    batch_init(&alone, packed->total_tokens, 1);
    llama_zero_grads(m, packed->num_targets);
    pass_to_host(m, packed, losses, logits);
    device_download(grads, m->grads, n * sizeof(real));
    llama_zero_grads(m, packed->num_targets);
    for (int d = 0; d < packed->num_docs; d++) {
        const int64_t first = packed->cu_seqlens[d], rows = packed->cu_seqlens[d + 1] - first;
        if (rows == 0) continue;
        batch_alone(&alone, packed, d);
        pass_to_host(m, &alone, losses_alone, logits_alone);
        delta.max_loss = max_difference(losses + first, losses_alone, rows, delta.max_loss);
        delta.max_logit = max_difference(logits + first * (int64_t)V, logits_alone,
                                         rows * (int64_t)V, delta.max_logit);
    }
    device_download(grads_alone, m->grads, n * sizeof(real));
    for (size_t i = 0; i < n; i++) {
        const double difference = (double)grads[i] - (double)grads_alone[i];
        delta.max_grad = larger_difference(delta.max_grad, difference);
        error2 += difference * difference;
        norm2 += (double)grads_alone[i] * (double)grads_alone[i];
    }
    delta.grad_error = sqrt(error2 / (norm2 > 0 ? norm2 : 1));
    batch_free(&alone);
    free(logits);
    free(losses);
    free(grads);
    return delta;
}

// Losses and logits must agree to rounding of one row's sums, gradients to that of a sum over T
// rows. In bf16 a matmul of another T may add in another order, and every layer rounds to 2^-9.
static bool packing_is_rounding(const PackingDelta *d) {
    const bool bf16 = sizeof(floatX) == 2;
    const double row_bound = bf16 ? 0x1p-4 : 1e-4, grad_bound = bf16 ? 0x1p-5 : 1e-5;
    return d->max_loss <= row_bound && d->max_logit <= row_bound && d->grad_error <= grad_bound;
}

static void check_packing(LlamaModel *m) {
    Error err = {0};
    StepData data = {0};
    LoaderSettings settings = run.loader_settings;
    settings.layout = LAYOUT_PACKED;
    must(loader_load_step(&data, &run.train, &settings, (PlanState){0}, &err), &err);
    const Batch *b = &data.micro[0];
    const PackingDelta d = packing_delta(m, b);
    printf("\n%d documents, %d tokens, packed against each alone:\n", b->num_docs, b->total_tokens);
    printf("  max |delta| of a token's loss  %.3g%s\n", d.max_loss,
           d.max_loss == 0 ? "  (bit for bit)" : "");
    printf("  max |delta| of a logit         %.3g%s\n", d.max_logit,
           d.max_logit == 0 ? "  (bit for bit)" : "");
    printf("  max |delta| of a gradient      %.3g, relative L2 %.3g\n", d.max_grad, d.grad_error);
    step_data_free(&data);
    const bool good = packing_is_rounding(&d);
    printf("%s\n", good ? "packing does not change the result" : "PACKING CHANGES THE RESULT");
    if (!good)
        exit_with(EXIT_DEVICE_ERROR,
                  "if the model's own losses are finite, a kernel is wrong: please report it",
                  "packing: expected the result of each document alone, found another one");
}

// ------------------------------------------------------------------------------------------------
// The output directory, and what --resume finds in it

// Not --compare, --steps 0 and the like, which leave --out alone.
static bool trains(void) { return o.steps > 0 && !o.dry_run && !o.compare && !o.check_packing; }

// Fills run.resume; its dir stays empty when a bare --resume finds no checkpoint: a fresh start.
static void find_resume_point(void) {
    Error err = {0};
    if (o.resume && (o.overwrite || o.init_from))
        exit_with(
            EXIT_USAGE,
            "--resume continues the run in --out, --overwrite replaces it, --init-from starts "
            "another one: give one",
            "--resume and --%s: expected at most one of them",
            o.overwrite ? "overwrite" : "init-from");
    run.out.path = o.out;
    if (o.resume && trains() && is_rank_0() && path_is_dir(o.out))
        must(out_dir_lock(&run.out, &err), &err);
    comm_barrier();  // rank 0 has undone what a killed run left
    if (o.init_from) {
        must(out_dir_find_resume(o.out, o.init_from, false, &run.resume, &err), &err);
        must(state_updates(&run.updates_before, o.init_from, &err), &err);
        run.resume.in_place = false;
    }
    if (!o.resume) return;
    must(out_dir_find_resume(o.out, o.resume, trains(), &run.resume, &err), &err);
    if (!run.resume.dir[0] && is_rank_0()) must(out_dir_start_from_scratch(o.out, &err), &err);
}

// Options that are not on the command line are those of the resumed run.
static void take_options(int argc, char **argv) {
    Error err = {0};
    run.model_given = options_given(argc, argv, "model");
    if (!resumes()) return;
    json_auto_t *state = state_open(run.resume.dir, &err);
    must(state != NULL, &err);
    run.stored = json_incref(json_object_get(state, "options"));
    must(options_take(option_table, argc, argv, run.stored, options_of_a_start, &err) ||
             error_prefix(&err, run.resume.dir),
         &err);
}

// Sets the cursor; returns how long the log was, -1 where it is not continued.
static int64_t read_state(void) {
    Error err = {0};
    TrainingState state = {0};
    if (!resumes() || o.compare || o.check_packing) return -1;
    must(state_read(&state, run.resume.dir, &run.loader_settings.plan, &run.train, &err), &err);
    run.cursor = state.cursor;
    run.skips_in_a_row = state.skips_in_a_row;
    run.updates_before = state.updates_before;
    return run.resume.in_place ? state.log_bytes : -1;
}

static bool replaces_run(void) { return o.overwrite || (o.resume && !resumes()); }

static void open_out_dir(const LlamaModel *m) {
    Error err = {0};
    const uint64_t model_bytes = 4 * (uint64_t)llama_config_num_params(&m->config);
    comm_barrier();  // every rank's inputs are good, and it has found what it reads there
    if (!is_rank_0()) return;
    must(out_dir_open(&run.out, run.resume.in_place, replaces_run(), o.overwrite, &err), &err);
    out_dir_warn_if_small(o.out, model_bytes, o.steps - run.cursor.step, o.save_every, o.keep);
}

// ------------------------------------------------------------------------------------------------
// Ranks: what must be the same on all of them

// Ranks that were started differently would train something else than any of them was asked for.
static void check_ranks_agree(void) {
    static RankFields own;
    Error err = {0};
    char manifest[IO_PATH_MAX];
    const uint64_t train[2] = {run.train.fingerprint, run.train.token_fingerprint},
                   val[2] = {run.val.fingerprint, run.val.token_fingerprint};
    if (comm_num_ranks() == 1) return;
    char *model = llama_config_text(&run.config, "float32");
    rank_field_text(&own, "version", UNPAD_VERSION);
    rank_field_program(&own);
    rank_field_options(&own, option_table);
    rank_field_text(&own, "model", model);
    free(model);
    rank_field(&own, "training data", train, sizeof train);
    rank_field(&own, "validation data", val, sizeof val);
    rank_field_text(&own, "checkpoint", run.resume.dir);
    if (run.resume.dir[0]) {  // its manifest has the checksums of all its files, which are verified
        must(path_join(manifest, sizeof manifest, run.resume.dir, "manifest.json", &err), &err);
        rank_field_file(&own, "files of the checkpoint", manifest);
    }
    rank_fields_agree(&own, "the same", "start every rank with the same program, flags and files");
}

// With --zero 1 a rank's other weights would get into those of all at the first update.
static void check_ranks_start_alike(const LlamaModel *m) {
    static RankFields own;
    if (comm_num_ranks() == 1) return;
    comm_phase("compare", -1);
    rank_field_weights(&own, m);
    rank_fields_agree(&own, "the same weights", "give every rank the same files and C library");
    comm_phase("set-up", -1);
}

static void print_ranks(const LlamaModel *m) {
    const int32_t ranks = m->ranks.num_ranks;
    if (ranks == 1) return;
    printf(
        "ranks   %d, micro-batches %s, %s", ranks,
        m->ranks.deterministic_reduction
            ? "in fixed order, for the same bits on any number of ranks"
            : "distributed by cost",
        m->ranks.shard_optimizer ? "optimizer state sharded: saves" : "optimizer state replicated");
    if (m->ranks.shard_optimizer)
        printf(" %.1f MiB per rank", (double)(m->num_elements - m->held_count) *
                                         (double)(2 * sizeof(real) + master_lo_bytes()) /
                                         1048576.0);
    printf("\n");
    rank_places_print();
}

// llama_plan for this rank's part of the training.
static void plan_model(LlamaModel *m, LlamaSizes sizes) {
    const int32_t ranks = comm_num_ranks(), leaves = run.loader_settings.plan.num_micro;
    int32_t losses = leaves > ranks ? leaves : ranks;
    if (run.val_step.plan.num_micro > losses) losses = run.val_step.plan.num_micro;
    llama_plan(m, &run.config, sizes);
    const LlamaRanks share = {.rank = comm_rank(),
                              .num_ranks = ranks,
                              .shard_optimizer = ranks > 1 && o.zero == 1,
                              .deterministic_reduction = reduces_deterministically(),
                              .num_leaves = leaves,
                              .num_losses = losses};
    if (ranks > 1 || share.deterministic_reduction) llama_plan_ranks(m, share);
    llama_plan_cache(m, samples_cache_tokens(&run.samples, sizes.micro_batch_tokens));
}

// ------------------------------------------------------------------------------------------------
// Set-up

static void check_options(void) {
    Error err = {0};
    if (o.overwrite && !model_is_builtin()) must(out_dir_keeps_model(o.out, o.model, &err), &err);
    if (o.overwrite && o.init_from) must(out_dir_keeps_model(o.out, o.init_from, &err), &err);
    if (o.micro_batch_tokens < o.max_seqlen)
        exit_with(EXIT_USAGE, "raise --micro-batch-tokens or lower --max-seqlen",
                  "--micro-batch-tokens must be at least --max-seqlen: a document must fit");
    if (o.batch_tokens == 0) o.batch_tokens = o.micro_batch_tokens;
    if (o.batch_tokens % o.micro_batch_tokens != 0)
        exit_with(EXIT_USAGE, "choose --batch-tokens as a multiple of --micro-batch-tokens",
                  "--batch-tokens must be a multiple of --micro-batch-tokens");
}

// Without --bf16-matmul, which needs a recent CPU, only a GPU can be missing.
static void open_device(void) {
    const DeviceOptions options = {.threads = o.threads, .bf16_matmul = o.bf16_matmul};
    const char *missing = device_init(&options);
    if (missing && o.bf16_matmul) exit_with(EXIT_USAGE, "leave --bf16-matmul out", "%s", missing);
    if (missing)
        exit_with(EXIT_DEVICE_ERROR, "make BACKEND=cpu builds a trainer that needs no GPU", "%s",
                  missing);
    if (attention_select(o.attention) != 0)
        exit_with(EXIT_USAGE,
                  "auto runs everywhere; sm90 needs a Hopper GPU and a build for sm_90a",
                  "--attention: expected kernels that this device can run");
    device_on_error(describe_work);
    run.backend_bytes = device_memory().bytes_now;
    run.free_bytes = device_memory_free();
    comm_barrier();  // every rank has read it before one allocates its model
}

// Of the checkpoint, which --model must match where it is given
static void load_config(void) {
    Error err = {0};
    LlamaConfig saved;
    if (!run.resume.dir[0] || run.model_given)
        must(llama_config_find(&run.config, o.model, &err), &err);
    if (!run.resume.dir[0]) return;
    must(llama_config_read(&saved, run.resume.dir, &err), &err);
    if (!run.model_given) run.config = saved;
    char *a = llama_config_text(&saved, "float32"), *b = llama_config_text(&run.config, "float32");
    const bool same = strcmp(a, b) == 0;
    free(a);
    free(b);
    if (!same)
        exit_with(EXIT_CHECKPOINT_MISFIT, "give --model as in the interrupted run",
                  "%s: expected the model %s, found another config.json", run.resume.dir, o.model);
}

static DatasetOptions data_options(const char *split) {
    DatasetOptions options = dataset_options();
    options.split = split;
    options.vocab_size = run.config.vocab_size;
    options.boundary_token = o.boundary_token;
    return options;
}

static void tokenize_texts(void) {
    Error err = {0};
    const char *model = run.resume.dir[0] ? run.resume.dir : o.model;
    const Texts t = {model,       run.config.vocab_size, o.threads, o.strict,
                     is_rank_0(), replaces_run(),        &run.out,  &stop_signal};
    must(texts_to_shards(&o.train, "tokens", 0.01, &t, &err), &err);
    if (o.val) must(texts_to_shards(&o.val, "val_tokens", 1, &t, &err), &err);
    comm_barrier();  // rank 0 writes them
}

static void open_data(void) {
    Error err = {0};
    DatasetOptions options = data_options(NULL);
    if (strcmp(o.train, "data/demo") == 0 && !path_exists(o.train))
        exit_with(EXIT_BAD_INPUT, "scripts/quickstart.sh prepares it and trains; or give --train",
                  "%s: no training data yet", o.train);
    must(dataset_open(&run.train, o.train, &options, &err), &err);
    options.split = "val";
    if (!o.val && !path_is_dir(o.train)) return;
    run.has_val = dataset_open(&run.val, o.val ? o.val : o.train, &options, &err);
    must(run.has_val || !o.val, &err);
}

// The tokenizer's files all from one directory: those of two would not fit each other.
static void read_model_files(void) {
    Error err = {0};
    const char *dirs[] = {run.resume.dir, o.model, o.train}, *from = NULL;
    char path[IO_PATH_MAX];
    for (int i = 0; i < 3 && !from; i++) {
        if (!path_is_dir(dirs[i])) continue;
        must(path_join(path, sizeof path, dirs[i], "tokenizer.json", &err), &err);
        if (path_exists(path)) from = dirs[i];
    }
    run.has_tokenizer = from != NULL;
    if (from) must(tokenizer_open(&run.tokenizer, path, &err), &err);
    if (!is_rank_0()) return;
    must(model_files_read_tokenizer(&run.files, from ? &from : dirs, from ? 1 : 3, &err), &err);
    must(model_files_read_generation(&run.files, dirs, 2, &err), &err);
}

static void check_vocabulary(void) {
    Error err = {0};
    const NamedData train = {o.train, &run.train},
                    val = {o.val ? o.val : o.train, run.has_val ? &run.val : NULL};
    must(vocabulary_check(o.model, &train, &val, o.allow_other_tokenizer, &err), &err);
    must(vocabulary_warn(o.model, &run.config, model_is_builtin(), &train, &err), &err);
}

static void make_samples(void) {
    Error err = {0};
    Samples *s = &run.samples;
    *s = (Samples){.num_samples = o.num_samples,
                   .sample_tokens = o.sample_tokens,
                   .prompt = o.prompt,
                   .documents = run.has_val ? &run.val : &run.train,
                   .tokenizer = run.has_tokenizer ? &run.tokenizer : NULL,
                   .how = {o.temperature, o.top_k, o.top_p},
                   .seed = (uint64_t)o.seed,
                   .max_seqlen = o.max_seqlen};
    must(samples_encode_prompt(s, &err), &err);
}

static void summarize_data(void) {
    Error err = {0};
    const PlanSettings *s = &run.loader_settings.plan;
    must(data_summary(&run.train_summary, &run.train, s, &err), &err);
    if (run.has_val) must(data_summary(&run.val_summary, &run.val, s, &err), &err);
}

static void make_loader_settings(void) {
    Error err = {0};
    LoaderSettings *s = &run.loader_settings;
    s->plan.seed = (uint64_t)o.seed;
    s->plan.max_seqlen = o.max_seqlen;
    s->plan.micro_batch_tokens = o.micro_batch_tokens;
    s->plan.num_micro = (int32_t)(o.batch_tokens / o.micro_batch_tokens);
    float fill = o.fill > 0               ? o.fill
                 : s->plan.num_micro == 1 ? 1
                                          : 0.97f;  // one bin needs no slack
    s->plan.fill_ppm = (int32_t)lrintf(fill * 1e6f);
    s->plan.long_docs = (LongDocs)o.long_docs;
    s->layout = (Layout)o.layout;
    s->rank = comm_rank();
    s->num_ranks = comm_num_ranks();
    s->deterministic_reduction = reduces_deterministically();
    must(plan_settings_check(&s->plan, &err), &err);
}

// The loader thread makes the attention work lists; only the planned model knows its heads.
static void load_work_lists(LlamaModel *m) {
    LoaderSettings *s = &run.loader_settings;
    const int32_t most = s->plan.micro_batch_tokens;
    s->work_list = llama_work_list;
    s->work_context = &m->heads;
    s->max_work = attention_work_list_size(most, most);
}

// The rule: every rank has at least one micro-batch of each step.
static void check_ranks(void) {
    const int64_t ranks = comm_num_ranks(), micros = o.batch_tokens / o.micro_batch_tokens;
    char hint[160];
    if (ranks > 1 && (o.compare || o.check_packing))
        exit_with(EXIT_USAGE, "start one process without mpirun",
                  "--compare and --check-packing work with one rank only");
    if (micros >= ranks) return;
    snprintf(hint, sizeof hint, "start fewer ranks, or give --batch-tokens a multiple of %lld",
             (long long)ranks * o.micro_batch_tokens);
    exit_with(EXIT_USAGE, hint,
              "%lld ranks: expected at least one micro-batch of a step for each, best as many for "
              "one as for the other; found %lld (--batch-tokens / --micro-batch-tokens)",
              (long long)ranks, (long long)micros);
}

// Validation: the first documents of a fixed order, the same for every run and seed.
static void load_validation(void) {
    Error err = {0};
    LoaderSettings s = run.loader_settings;
    if (!run.has_val) return;
    const DocIndex index = dataset_doc_index(&run.val);
    s.layout = LAYOUT_PACKED;
    s.deterministic_reduction = s.num_ranks > 1 || reduces_deterministically();
    s.plan.seed = 0;
    must(plan_fix_set(&s.plan, &index, o.val_tokens, &err), &err);
    must(loader_load_step(&run.val_step, &run.val, &s, (PlanState){0}, &err), &err);
    assert(run.val_step.real_tokens == s.plan.set_tokens);
    run.val_set = (ValidationSet){0, run.val_step.real_tokens, run.val_step.num_targets};
    const Segment *c = run.val_step.plan.stream;
    for (int64_t i = 0; i < run.val_step.plan.num_stream; i++)
        run.val_set.docs += i == 0 || c[i].doc != c[i - 1].doc;
}

// ------------------------------------------------------------------------------------------------
// The plan, printed and checked before anything is allocated

static void print_bytes(const char *name, size_t bytes) {
    printf("  %-14s %10.1f MiB\n", name, (double)bytes / 1048576.0);
}

static void print_model(const LlamaModel *m) {
    const LlamaConfig *c = &m->config;
    printf("unpad.c %s on %s\n", UNPAD_VERSION, device_describe());
    printf(
        "model   %s: %.2f M parameters, %d layers, hidden %d, ffn %d, heads %d/%d x %d, vocab "
        "%d%s\n",
        o.model, (double)llama_config_num_params(c) * 1e-6, c->num_layers, c->hidden_size,
        c->intermediate_size, c->num_heads, c->num_kv_heads, c->head_dim, c->vocab_size,
        c->tie_word_embeddings ? ", tied head" : "");
    printf("start   %s\n", run.resume.dir[0] ? run.resume.dir
                           : weights_dir()   ? "weights of --model"
                                             : "random weights");
}

static void print_memory(const LlamaModel *m) {
    printf("memory%s\n", m->ranks.num_ranks > 1 ? " of a rank" : "");
    for (int i = 0; i < LLAMA_NUM_ARENAS; i++)
        print_bytes(llama_arena_names[i], m->arenas[i].bytes);
    if (run.backend_bytes) print_bytes("kernels", run.backend_bytes);
    print_bytes("total", run.backend_bytes + llama_memory_total(m));
}

static void print_plan(const LlamaModel *m) {
    Error err = {0};
    print_model(m);
    data_summary_print(&run.train_summary, "train   ");
    data_summary_print(&run.val_summary, "val     ");
    if (run.has_val) print_validation_set(o.val_every == 0 ? NULL : &run.val_set, &run.val);
    must(plan_print(&run.loader_settings.plan, (Layout)o.layout, &run.train_summary, run.cursor,
                    &err),
         &err);
    print_ranks(m);
    for (int i = 0; i < LLAMA_NUM_RECOMPUTES; i++)
        printf("%s%s %.1f MiB%s", i == 0 ? "recompute " : ", ", llama_recompute_names[i],
               (double)(run.backend_bytes + run.recompute_bytes[i]) / 1048576.0,
               i == (int)m->recompute ? " (chosen)" : "");
    printf("\n");
    print_memory(m);
}

// --recompute, or as little as fits with a 16th of the memory to spare for libraries; the same on
// all ranks.
static void choose_recompute(LlamaModel *m) {
    const size_t free_bytes = run.free_bytes, room = free_bytes - free_bytes / 16;
    int chosen = LLAMA_RECOMPUTE_FULL;
    for (int i = LLAMA_RECOMPUTE_FULL; i >= LLAMA_RECOMPUTE_OFF; i--) {
        llama_plan_recompute(m, (LlamaRecompute)i);
        run.recompute_bytes[i] = llama_memory_total(m);
        if (free_bytes == 0 || run.recompute_bytes[i] <= room) chosen = i;
    }
    if (o.recompute < LLAMA_NUM_RECOMPUTES) chosen = o.recompute;  // not auto
    llama_plan_recompute(m, (LlamaRecompute)comm_max(chosen));
}

// The largest --micro-batch-tokens with which the run fits into `free_bytes`, a multiple of 128 and
// best a fraction of --batch-tokens; 0 when none does.
static int32_t largest_micro_batch(size_t free_bytes, LlamaSizes sizes, LlamaRecompute recompute) {
    int32_t low = 0, high = sizes.micro_batch_tokens / 128;
    while (low < high) {
        static LlamaModel trial;
        int32_t middle = low + (high - low + 1) / 2;
        sizes.micro_batch_tokens = middle * 128;
        plan_model(&trial, sizes);
        llama_plan_recompute(&trial, recompute);
        if (llama_memory_total(&trial) <= free_bytes)
            low = middle;
        else
            high = middle - 1;
        llama_free(&trial);
    }
    for (int32_t n = low * 128; n >= o.max_seqlen && n > 0; n -= 128)
        if (o.batch_tokens % n == 0) return n;
    return low * 128;
}

// Which flags fit the run into GPUs of other sizes: as little recomputation as will do, else fewer
// tokens at a time in steps of the same size.
static void print_other_memory(const LlamaModel *m) {
    static const int gib[] = {8, 16, 24, 80};
    printf("flags for a GPU of\n");
    for (size_t i = 0; i < sizeof gib / sizeof *gib; i++) {
        const size_t bytes = (size_t)gib[i] << 30, spare = bytes / 16 + run.backend_bytes;
        int r = LLAMA_RECOMPUTE_OFF;
        while (r < LLAMA_RECOMPUTE_FULL && run.recompute_bytes[r] + spare > bytes) r++;
        printf("  %2d GiB  ", gib[i]);
        if (run.recompute_bytes[r] + spare <= bytes) {
            printf("--recompute %s\n", llama_recompute_names[r]);
            continue;
        }
        const int32_t fits = largest_micro_batch(bytes - spare, m->sizes, LLAMA_RECOMPUTE_FULL);
        if (fits >= o.max_seqlen)
            printf("--recompute full --micro-batch-tokens %d --batch-tokens %lld\n", fits,
                   (long long)o.batch_tokens);
        else
            printf("does not fit: take more ranks, a shorter --max-seqlen or a smaller model\n");
    }
}

static void check_memory(const LlamaModel *m) {
    const size_t free_bytes = run.free_bytes, total = llama_memory_total(m);
    if (free_bytes == 0 || total <= free_bytes) return;
    char hint[160];
    int32_t fits = largest_micro_batch(free_bytes, m->sizes, m->recompute);
    if (fits >= o.max_seqlen)
        snprintf(hint, sizeof hint, "--micro-batch-tokens %d fits", fits);
    else
        snprintf(
            hint, sizeof hint,
            "even --micro-batch-tokens %d does not fit: choose a smaller model or --max-seqlen",
            o.max_seqlen);
    const double total_mib = (double)total / 1048576.0, free_mib = (double)free_bytes / 1048576.0;
    if (!o.dry_run)
        exit_with(EXIT_DEVICE_MEMORY, hint, "device memory: expected %.1f MiB free, found %.1f MiB",
                  total_mib, free_mib);
    warning("this machine has %.1f MiB free of %.1f MiB: %s", free_mib, total_mib, hint);
}

// ------------------------------------------------------------------------------------------------
// --generate and --eval: the model alone; nothing is trained

static const char options_of_generate[] =
    "generate|prompt|prompt-file|chat|max-new-tokens|temperature|top-k|top-p|seed|model|"
    "from-scratch|max-seqlen|micro-batch-tokens|threads|bf16-matmul|attention|dry-run";
static const char options_of_eval[] =
    "eval|train|val|long-docs|boundary-token|allow-other-tokenizer|strict|seed|model|"
    "from-scratch|max-seqlen|micro-batch-tokens|threads|bf16-matmul|attention|heartbeat-seconds|"
    "dry-run";

static void check_inference_options(int argc, char **argv) {
    const char *mode = "generate", *list = options_of_generate;
    if (o.eval) mode = "eval", list = options_of_eval;
    const char *other = options_given_besides(option_table, argc, argv, list);
    if (other || (o.prompt && o.prompt_file))
        exit_with(EXIT_USAGE, "leave one of them out", "--%s and --%s: expected at most one",
                  other ? mode : "prompt", other ? other : "prompt-file");
    if (model_is_builtin() && !o.from_scratch)
        exit_with(EXIT_USAGE, "give --model DIR, for example out/demo/final",
                  "--%s: expected a model with weights, found the name %s", mode, o.model);
    if (!o.eval && comm_num_ranks() > 1)
        exit_with(EXIT_USAGE, "start one process without mpirun", "--%s works with one rank only",
                  mode);
}

static void load_for_inference(LlamaModel *m, int32_t micro_batch_tokens, int32_t cache_tokens) {
    Error err = {0};
    const LlamaSizes sizes = {.micro_batch_tokens = micro_batch_tokens, .max_seqlen = o.max_seqlen};
    llama_plan(m, &run.config, sizes);
    llama_plan_cache(m, cache_tokens);
    if (is_rank_0() && (o.eval || o.dry_run)) print_model(m);
    if (is_rank_0() && o.dry_run) print_memory(m);
    if (weights_dir()) must(weights_check(llama_parameters(m), weights_dir(), &err), &err);
    check_memory(m);
    if (o.dry_run) exit(EXIT_DONE);
    must(llama_allocate(m, &err), &err);
    init_weights(m);
}

static void generate(LlamaModel *m) {
    static Generator g;
    Error err = {0};
    const Samples samples = {.sample_tokens = o.max_new_tokens,
                             .how = {o.temperature, o.top_k, o.top_p},
                             .seed = (uint64_t)o.seed,
                             .max_seqlen = o.max_seqlen};
    const Prompts prompts = {o.prompt, o.prompt_file, o.model, o.chat};
    must(generator_open(&g, &samples, &prompts, &err), &err);
    const int32_t tokens = generator_cache_tokens(&g, o.micro_batch_tokens);
    load_for_inference(m, tokens, tokens);
    SampleModel model = sample_model(m);
    must(generator_run(&g, &model, &err), &err);
}

// Evaluation.losses
static void batch_losses(void *model, const Batch *b, float *losses_host) {
    LlamaModel *m = model;
    comm_progress();
    llama_set_batch(m, b);
    llama_forward(m);
    llama_head_eval(m);
    device_download(losses_host, m->scratch.losses, (size_t)b->total_tokens * sizeof(real));
}

static void evaluate_model(LlamaModel *m) {
    Error err = {0};
    if (!o.val) o.val = o.train;
    const Texts t = {o.model, run.config.vocab_size, o.threads, o.strict, .stop = &stop_signal};
    must(texts_to_temporary_shards(&o.val, &t, &err), &err);
    DatasetOptions options = data_options("val");
    if (!path_is_dir(o.val) || !dataset_open(&run.val, o.val, &options, &(Error){0})) {
        options.split = "train";
        must(dataset_open(&run.val, o.val, &options, &err), &err);
    }
    const NamedData data = {o.val, &run.val}, none = {o.val, NULL};
    must(vocabulary_check(o.model, &data, &none, o.allow_other_tokenizer, &err), &err);
    load_for_inference(m, o.micro_batch_tokens, 0);
    const int32_t ranks = comm_num_ranks();
    const Evaluation e = {
        o.max_seqlen, o.micro_batch_tokens, (LongDocs)o.long_docs, comm_rank(), ranks, m,
        batch_losses};
    EvaluationRow own[EVALUATION_ROWS] = {0};
    EvaluationRow *rows = host_calloc((size_t)ranks, sizeof own, "evaluation");
    comm_phase("validate", 0);
    must(evaluate(own, &run.val, &e, &err), &err);
    comm_all_gather_host(rows, own, sizeof own);
    if (is_rank_0()) evaluation_print(rows, ranks);
    free(rows);
}

static void infer(LlamaModel *m, int argc, char **argv) {
    check_inference_options(argc, argv);
    if (o.micro_batch_tokens < o.max_seqlen) o.micro_batch_tokens = o.max_seqlen;
    open_device();
    load_config();
    if (o.eval)
        evaluate_model(m);
    else
        generate(m);
}

// ------------------------------------------------------------------------------------------------
// The program

static void start_process(int argc, char **argv) {
    io_open_standard_streams();
    device_prepare_process(argv);
    comm_init();
    options_parse_or_exit(option_table, argc, argv, "./train_llama [options]", options_of_help);
    setvbuf(stdout, NULL, _IOLBF, 0);
}

static void train_and_save(LlamaModel *m, int64_t log_before) {
    Error err = {0};
    open_out_dir(m);
    load_optimizer(m);
    if (is_rank_0()) must(log_open(&run.log, o.out, log_before, run.cursor.step, &err), &err);
    log_start(&run.log, resumes() ? "resume" : "start", UNPAD_VERSION, device_describe(),
              run.cursor.step, &run.config, &run.train_summary, &run.val_summary, option_table);
    train(m);
    finish(m);
}

int main(int argc, char **argv) {
    Error err = {0};
    start_process(argc, argv);
    if (o.version) {
        printf("unpad.c %s\n", UNPAD_VERSION);
        return EXIT_DONE;
    }
    io_progress = comm_progress;
    comm_heartbeat(o.heartbeat_seconds);
    comm_phase("set-up", 0);
    if (o.generate || o.eval) {
        infer(&run.model, argc, argv);
        comm_finalize();
        return EXIT_DONE;
    }
    options_belong_or_exit(argc, argv, "generate", "chat|prompt-file|max-new-tokens");
    options_belong_or_exit(argc, argv, "compare", "compare-steps");
    catch_signals();
    find_resume_point();
    take_options(argc, argv);
    check_options();
    check_ranks();
    open_device();

    // inputs are proven good before anything is written
    load_config();
    tokenize_texts();  // --train is then the directory of tokens, as in the stored options
    if (is_rank_0())
        options_print_changes(option_table, argc, argv, run.stored, options_of_a_start, stdout);
    open_data();
    check_vocabulary();
    read_model_files();
    make_samples();
    make_loader_settings();
    summarize_data();
    load_validation();
    const int64_t log_before = read_state();

    LlamaModel *m = &run.model;
    LlamaSizes sizes = {o.micro_batch_tokens, o.max_seqlen, o.layout == LAYOUT_REPAD, true, 0, 0};
    check_ranks_agree();
    plan_model(m, sizes);
    choose_recompute(m);
    load_work_lists(m);
    print_plan(m);
    if (o.dry_run) print_other_memory(m);
    if (weights_dir()) must(weights_check(llama_parameters(m), weights_dir(), &err), &err);
    check_memory(m);
    if (o.dry_run) return EXIT_DONE;
    if (o.compare) {
        compare_layouts();
        return EXIT_DONE;
    }
    must(llama_allocate(m, &err), &err);
    init_weights(m);
    check_ranks_start_alike(m);
    if (o.check_packing) {
        check_packing(m);
        return EXIT_DONE;
    }
    if (o.steps > 0)
        train_and_save(m, log_before);
    else
        validate_and_sample(m);
    comm_finalize();
    return EXIT_DONE;
}
