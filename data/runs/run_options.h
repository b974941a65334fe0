// The options of ./train_llama, in one table that parses, documents and logs them. They are
// constant once completed, except --train and --val, which name texts until these are shards.
#pragma once

#include <jansson.h>

#include "../base/options.h"
#include "../models/lora.h"
#include "out_dir.h"

// Learning rate after warm-up: constant, linear, cosine, or WSD (warm-up, stable, decay; arXiv
// 2405.18392), whose decay is linear or 1 - sqrt
#define SCHEDULE_NAMES "constant|linear|cosine|wsd|wsd-sqrt"
enum { SCHEDULE_CONSTANT, SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_WSD_SQRT };

enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON };

typedef struct {
    const char *model, *train, *val, *out, *resume, *prompt, *attention, *adapter, *lora_targets,
        *bench, *check_packing, *options;
    bool from_scratch, overwrite, deterministic, bf16_matmul, generate, chat, eval, dry_run,
        allow_other_tokenizer, lora_merge;
    int train_on, invalid_utf8, layout, optimizer, moments, schedule, long_docs, recompute,
        final_dtype, compare, lora, base;
    int max_seqlen, micro_batch_tokens, boundary_token, threads, keep, sample_tokens, num_samples;
    int64_t batch_tokens, steps, warmup_steps, val_every, val_tokens, sample_every, save_every,
        log_every, replay_every, seed;
    float lr, decay_frac, min_lr_frac, weight_decay, fill, grad_clip, temperature, top_p,
        heartbeat_seconds, lora_alpha, memory_gib, epochs;
    LoraConfig adapters;     // of --lora or --adapter, once the options are checked
    double epochs_of_steps;  // how often --steps train on all documents
    const char *epochs_of;   // of this source, which takes longest; NULL: there is one
} Options;

extern Option run_option_table[];  // also says which options were given

// What --resume does not take from the run it continues: options of this start and this machine
extern const char run_options_of_a_start[];

// Parses the command line; exits where it is wrong, and after --help and --version, which prints
// `version`. The table's values are what the result points to.
Options *run_options_parse(int argc, char **argv, const char *version, int num_ranks);

// Completes the options of a training run, which are constant from then on: those that are not on
// the command line become those of the run that is resumed, or get a default that depends on
// others. Exits where they do not fit each other, the checkpoint (code 9) or the number of ranks.
// Returns the options of the resumed run; NULL: none is.
json_t *run_options_complete(const ResumePoint *at, int num_ranks);

// The same for --generate, --eval and merging
void run_options_complete_inference(int num_ranks);

// --adapter and --lora-merge alone: the model with the adapters becomes --out/final.
bool run_merges(const Options *o);

// Once the data is open: sets --steps, which are `epochs` of num_docs documents of a source (NULL:
// there is one), and --warmup-steps. Warns of a run of more than 20 epochs.
void run_options_set_steps(int64_t steps, double epochs, const char *source, int64_t num_docs);

// Writes the file `options` beside the log, for --options: what was given, or for a resumed run, of
// which that is a part, all that is not the default. Exits with code 4 where that fails.
void run_options_write(const char *log, bool resumed);

enum { SAVE_MINUTES = 10 };  // between checkpoints, without --save-every

// Lines of the start: the learning rate and weight decay, and why they are what they are; how many
// epochs the steps are; when checkpoints come.
void run_options_print(const Options *o);

// Steps between the lines of training; 0: only skipped steps and spikes have one
int64_t run_lines_every(const Options *o);

// The learning rate of the 0-based `step`. The first warm-up step is not 0 but lr / warmup_steps.
float learning_rate(const Options *o, int64_t step);

// Not --compare, --steps 0 and the like, which leave --out alone
bool run_trains(const Options *o);

// What is in --out may be replaced.
bool replaces_run(const Options *o);

bool reduces_deterministically(const Options *o);

// The directory of the weights, or of the adapters where there are any; NULL: random ones.
const char *weights_dir(const Options *o, const ResumePoint *at);
