// The data of a run: data sets, tokenizer and validation set, opened and checked before anything is
// written.
#pragma once

#include "../batches/loader.h"
#include "../batches/summary.h"
#include "../models/config.h"
#include "../models/tokenizer.h"
#include "../shards/dataset.h"
#include "checkpoint_files.h"
#include "log.h"
#include "out_dir.h"
#include "run_options.h"

typedef struct {
    Dataset train, val;
    bool has_val;
    DataSummary train_summary, val_summary;
    LoaderSettings loader_settings;
    StepData val_steps[MAX_SOURCES];  // the fixed validation set, by source
    ValidationSet val_sets[MAX_SOURCES], val_set;
    PairSettings val_pairs;  // as in loader_settings, with validation's part of the reference
    double *reference;       // of --preference dpo: see reference.h; NULL: none
    size_t reference_bytes;
    int32_t most_micros;     // of a step, or of the validation of a source
    int64_t most_documents;  // likewise, where their losses are told apart; else 0
    Tokenizer tokenizer;
    bool has_tokenizer;
    ModelFiles files;  // of the model and its tokenizer; rank 0 only
} Data;

// For --eval: the validation documents of `path`, or else all of them
void open_eval_data(Dataset *val, const char *path, const Options *o, int32_t vocab_size);

// Opens and checks everything, and adds tokens that end trained turns to the config's eos; exits
// where something is wrong. *d is zeros at first.
void open_data(Data *d, const Options *o, const ResumePoint *at, LlamaConfig *config, int32_t rank,
               int32_t num_ranks);

// Counts the steps of --epochs, or the epochs of --steps. at: where the run begins.
RunLength count_steps(const Data *d, const Options *o, PlanState at);

// The model's configuration: of the checkpoint, which --model must match where it is given. Exits
// also where --max-seqlen is longer than its sliding window: only full attention is implemented.
LlamaConfig load_config(const Options *o, const ResumePoint *at);

// The lines of the start about them
void data_print(const Data *d, const Options *o);

// Says with which token trained turns end, if texts do not end with it anyway.
void data_print_turn_end(const Data *d);

// A flipped bit in a model or adapters that a run wrote ends this one, as --resume does.
void verify_models(const Options *o);
