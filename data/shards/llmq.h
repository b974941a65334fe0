// llmq: BIN.TOK.
#ifndef UNPAD_LLMQ_H
#define UNPAD_LLMQ_H

#include <stdbool.h>

#include "../base/error.h"
#include "dataset.h"
#include "shard.h"

// -------------------------------------------------------------------------------------------------
// llmq BIN.TOK: int32 tokens, no document ends

bool shard_open_llmq(Shard *s, const unsigned char *head, const DatasetOptions *options,
                     Error *err);

#endif
