// Our shards, and llm.c's, which they extend.
#ifndef UNPAD_UNPAD_H
#define UNPAD_UNPAD_H

#include <stdbool.h>

#include "../base/error.h"
#include "dataset.h"
#include "shard.h"

// -------------------------------------------------------------------------------------------------
// Our shards, and llm.c's that they extend

bool shard_open_llmc(Shard *s, const unsigned char *head, const DatasetOptions *options,
                     Error *err);

#endif
