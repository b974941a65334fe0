// The options of ./train_llama, in one table that parses, documents and logs them. main() completes
// them before it trains; everything else reads them.
#pragma once

#include "../base/options.h"
#include "../models/lora.h"

// Learning rate after warm-up: constant, linear, cosine, or WSD (warm-up, stable, decay; arXiv
// 2405.18392), whose decay is linear or 1 - sqrt
#define SCHEDULE_NAMES "constant|linear|cosine|wsd|wsd-sqrt"
enum { SCHEDULE_CONSTANT, SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_WSD_SQRT };

enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON };

// How long a run is: `epochs` of num_docs documents of the source that takes longest (NULL: there
// is one)
typedef struct {
    int64_t steps, num_docs;
    double epochs;
    const char *source;
} RunLength;

typedef struct {
    OptionSet set;  // also says which options were given
    const char *model, *train, *val, *out, *resume, *prompt, *attention, *adapter, *lora_targets,
        *bench, *check_packing, *options, *ledger;
    bool from_scratch, overwrite, deterministic, bf16_matmul, generate, chat, eval, dry_run,
        allow_other_tokenizer, lora_merge;
    int train_on, invalid_utf8, layout, pad_to, optimizer, moments, schedule, long_docs, recompute,
        final_dtype, compare, lora, base, preference;
    int max_seqlen, micro_batch_tokens, boundary_token, threads, keep, sample_tokens, num_samples;
    int64_t batch_tokens, steps, warmup_steps, val_every, val_tokens, sample_every, save_every,
        log_every, replay_every, seed;
    float lr, decay_frac, min_lr_frac, weight_decay, fill, grad_clip, temperature, top_p,
        heartbeat_seconds, lora_alpha, memory_gib, epochs, beta, gamma, label_smoothing, sft_weight;
    LoraConfig adapters;  // of --lora or --adapter, once the options are checked
    RunLength length;
} Options;

extern const Option run_option_table[];

// Parses the command line; exits where it is wrong, and after --help and --version, which prints
// `version`. *o is not copied from then on.
void run_options_parse(Options *o, int argc, char **argv, const char *version, int num_ranks);

// Completes the options of a training run: an option that the command line does not give is taken
// from the run whose checkpoint is resumed (directory "": none), whose options *was gets, or gets a
// default that depends on others. Exits where they do not fit each other, the checkpoint (code 9)
// or the number of ranks.
void run_options_complete(Options *o, Options *was, const char *checkpoint, int num_ranks);

// Prints the differences, once --train and --val name shards.
void run_options_print_changes(const Options *o, const Options *was);

// The same for --generate, --eval and merging
void run_options_complete_inference(Options *o, int num_ranks);

// --adapter and --lora-merge alone: the model with the adapters becomes --out/final.
bool run_merges(const Options *o);

// Once the data is open: sets --steps, --warmup-steps and o->length. Warns of more than 20 epochs.
void run_options_set_length(Options *o, RunLength length);

// A run stores its options as text. The file `options` of a checkpoint has all of them. The file in
// --out has the options that were given, or all of them for a resumed run. The caller frees the
// text.
char *run_options_file(const Options *o, bool all);
bool run_options_write(const Options *o, bool all, Error *err);  // into --out

// Reads the file of a checkpoint or a run into *was.
bool run_options_read(Options *was, const char *dir, Error *err);

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

bool reduces_deterministically(const Options *o);

// The directory of the weights, or of the adapters where there are any: that of a checkpoint ("":
// none), --adapter or --model; NULL: random ones.
const char *weights_dir(const Options *o, const char *checkpoint);
