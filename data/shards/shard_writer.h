// Writes our shards into a directory: SPLIT_00000.bin, .idx and, where a document has a loss mask,
// .mask; SPLIT_00001.bin, ... Byte layout: data/README.md.
#pragma once

#include "../base/file.h"

// The header's description of the tokens
typedef struct {
    int32_t vocab_size, bos, eos;  // BOS and EOS that documents may have; -1: none
    uint64_t tokenizer_hash;       // first 8 bytes of the SHA-256 of tokenizer.json
    bool pairs;                    // each record is a chosen answer and a rejected one
} ShardVocabulary;

// uint16 or uint32
int shard_token_bytes(const ShardVocabulary *v);

typedef struct {
    const char *dir, *split;
    ShardVocabulary vocabulary;
    int64_t num_docs;  // in all shards
    int num_shards;
    FileWriter bin;  // of the current shard; fd -1: none
    uint64_t *ends;  // (num_ends) cumulative tokens of its documents
    size_t num_ends, end_capacity;
    uint32_t *crcs;  // (num_crcs) of its complete blocks
    size_t num_crcs, crc_capacity;
    unsigned char *mask;  // a bit for each of its tokens: is it a target?
    float *weights;       // of each of its tokens; 0: no target
    size_t mask_capacity, weight_capacity;
    bool masked, weighted;  // a document has a mask; a target has a weight that is not 1
    bool all_bos, all_eos;  // all begin with BOS, end with EOS
    uint32_t block_crc;
    uint64_t block_bytes;  // of the block that is not complete yet
} ShardWriter;

// dir and split must outlive it.
void shard_writer_init(ShardWriter *w, const char *dir, const char *split,
                       const ShardVocabulary *v);

// Adds a document: n tokens of shard_token_bytes each, n >= 1. weights (n): 0 for each token that
// the loss is not on; of the first token: whether it belongs to the record of the document before
// it. NULL: 1 for all but the first. Failures are EXIT_DISK, as
// below, and EXIT_BAD_INPUT for a document that no shard can hold.
bool shard_writer_add(ShardWriter *w, const unsigned char *tokens, uint64_t n, const float *weights,
                      Error *err);

// Completes the last shard; it is then on disk.
bool shard_writer_close(ShardWriter *w, Error *err);

// Frees the writer, and removes a shard that is not closed.
void shard_writer_free(ShardWriter *w);
