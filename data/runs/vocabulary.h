// Do the model and the shards mean the same by a token id? Both may name their tokenizer, and the
// ids that begin and end documents.
#ifndef UNPAD_VOCABULARY_H
#define UNPAD_VOCABULARY_H

#include "../base/error.h"
#include "../models/config.h"
#include "../shards/dataset.h"

typedef struct {
    const char *path;        // as the user named it
    const Dataset *dataset;  // NULL: there is none (validation data only)
} NamedData;

// Fails with exit 9, or only warns where `allowed`, when the tokenizers of the model and the shards
// are known and differ. model: a Hugging Face directory, or a built-in name, which has none.
bool vocabulary_check(const char *model, const NamedData *train, const NamedData *val, bool allowed,
                      Error *err);

// Warns on stderr where the shards use few of the model's ids, or other ids to begin and end
// documents. builtin: config is that of a built-in model.
bool vocabulary_warn(const char *model, const LlamaConfig *config, bool builtin, const NamedData *d,
                     Error *err);

#endif
