// Beside model.safetensors, the Hugging Face model in a checkpoint: config.json,
// generation_config.json and the tokenizer's files, as from_pretrained loads them.
#ifndef UNPAD_MODEL_FILES_H
#define UNPAD_MODEL_FILES_H

#include "../base/error.h"
#include "../models/config.h"
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

// Writes config.json and the files above into the checkpoint. Where there is no
// generation_config.json, one is made from the config's token ids.
bool model_files_write(const ModelFiles *f, const LlamaConfig *config, Checkpoint *ck, Error *err);

#endif
