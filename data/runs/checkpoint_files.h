// The files of a checkpoint: the Hugging Face model as from_pretrained loads it (config.json,
// weights, generation_config.json and the tokenizer's files), the optimizer's moments, the options
// of the run (saver.c), and trainer_state.json.
#pragma once

#include "../batches/plan.h"
#include "../models/config.h"
#include "../models/weights.h"
#include "../shards/dataset.h"
#include "checkpoint.h"
#include "log.h"

// Small files that checkpoints carry, unchanged but for turn_ends in generation_config.json. They
// are read once, at the start, so that later changes of the directory that they come from do no
// harm.
enum { NUM_MODEL_FILES = 9 };
typedef struct {
    char *text[NUM_MODEL_FILES];  // NULL: there is none
    uint64_t size_bytes[NUM_MODEL_FILES];
    TokenIds turn_ends;  // that trained turns end with, beyond config.json's: they end texts, too
} ModelFiles;

// Reads the tokenizer's files, or generation_config.json, from the first of dirs (num_dirs) that is
// a directory and has any.
bool model_files_read(ModelFiles *f, bool tokenizer, const char **dirs, int num_dirs, Error *err);

// Writes config.json and the files above into the checkpoint. Where there is no
// generation_config.json, one is made from the config's token ids.
bool model_files_write(const ModelFiles *f, const LlamaConfig *config, ModelDtype dtype,
                       Checkpoint *ck, Error *err);

// Writes the weights: the file that p names, or model.safetensors, or in order files of at most
// max_file_bytes of tensors, or a single larger one, with model.safetensors.index.json. All blocks
// are read even after a failure; ck NULL: they are only read, and the result is false.
#define MODEL_FILE_BYTES 5000000000ull  // as transformers
bool model_files_write_weights(Parameters p, ModelDtype dtype, uint64_t max_file_bytes,
                               Checkpoint *ck, Error *err);

// Writes the optimizer's moments, likewise: optimizer.safetensors.
bool model_files_write_moments(Parameters p, ModelDtype dtype, Checkpoint *ck, Error *err);

// ------------------------------------------------------------------------------------------------
// trainer_state.json: where a run is in its data, and the plan it was started with

typedef struct {
    PlanState cursor;   // of the next step to train
    int64_t log_bytes;  // of log.jsonl so far
    int skips_in_a_row;
    LossTrend trend;
    int64_t frozen_crc;  // CRC32C of the frozen model's values in fp32; 0: none
} TrainingState;

// Writes the file into the checkpoint.
bool state_write(Checkpoint *ck, const TrainingState *s, const PlanSettings *plan,
                 const Dataset *train, const char *version, Error *err);

// Reads the state from `dir`. Exit 9 when plan or data differ from those it was written with: the
// resumed run would see other documents in its steps.
bool state_read(TrainingState *s, const char *dir, const PlanSettings *plan, const Dataset *train,
                Error *err);
