// The formats of shards: one function for each, in a file of its own. To remove a format, delete
// its file and its line here.
#ifndef UNPAD_FORMATS_H
#define UNPAD_FORMATS_H

#include <stdbool.h>

#include "../base/error.h"
#include "dataset.h"
#include "shard.h"

// Opens a shard whose file is open. head (SHARD_HEADER_BYTES): the beginning of the file, padded
// with zeros. *recognised: the file has this format; if not, *s is unchanged and the result means
// nothing.
typedef bool ShardOpen(Shard *s, const unsigned char *head, const DatasetOptions *options,
                       bool *recognised, Error *err);

ShardOpen shard_open_datatrove;  // NAME.ds with NAME.ds.index, NAME.ds.loss
ShardOpen shard_open_unpad;     // llm.c's NAME.bin; ours with our header words, NAME.idx, NAME.mask
ShardOpen shard_open_llmq;      // BIN.TOK
ShardOpen shard_open_olmo;      // NAME.npy: numpy's, or OLMo's without a header, with NAME.csv.gz
ShardOpen shard_open_megatron;  // NAME.bin with NAME.idx

// By the first format that recognises the file.
bool shard_open(Shard *s, const DatasetOptions *options, Error *err);

#endif
