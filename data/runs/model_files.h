// The Hugging Face model in a checkpoint, as from_pretrained loads it: config.json, weights,
// generation_config.json and the tokenizer's files.
#ifndef UNPAD_MODEL_FILES_H
#define UNPAD_MODEL_FILES_H

#include "../base/error.h"
#include "../models/config.h"
#include "../models/weights.h"
#include "checkpoint.h"

// Small files that checkpoints carry unchanged. They are read once, at the start, so that later
// changes of the directory that they come from do no harm.
enum { NUM_MODEL_FILES = 9 };
typedef struct {
    char *text[NUM_MODEL_FILES];  // NULL: there is none
    uint64_t size_bytes[NUM_MODEL_FILES];
} ModelFiles;

// Read those of the first of dirs (num_dirs) that is a directory and has any.
bool model_files_read_generation(ModelFiles *f, const char **dirs, int num_dirs, Error *err);
bool model_files_read_tokenizer(ModelFiles *f, const char **dirs, int num_dirs, Error *err);

#define MODEL_DTYPES "fp32|bf16"
typedef enum { MODEL_FP32, MODEL_BF16 } ModelDtype;  // of the weights

// Writes config.json and the files above into the checkpoint. Where there is no
// generation_config.json, one is made from the config's token ids.
bool model_files_write(const ModelFiles *f, const LlamaConfig *config, ModelDtype dtype,
                       Checkpoint *ck, Error *err);

// Writes the weights: model.safetensors, or in order files of at most max_file_bytes of tensors, or
// a single larger one, with model.safetensors.index.json. All blocks are read even after a failure.
#define MODEL_FILE_BYTES 5000000000ull  // as transformers
bool model_files_write_weights(Parameters p, ModelDtype dtype, uint64_t max_file_bytes,
                               Checkpoint *ck, Error *err);

// Writes the optimizer's moments: optimizer.safetensors.
bool model_files_write_moments(Parameters p, Checkpoint *ck, Error *err);

#endif
