// Writes our shards: SPLIT_00000.bin and .idx, SPLIT_00001.bin, ... of a directory; the same bytes
// as data/prepare.py. Byte layout: data/README.md.
#ifndef UNPAD_SHARD_WRITER_H
#define UNPAD_SHARD_WRITER_H

#include "../base/error.h"
#include "../base/file.h"

enum {                       // for unpad.c too
    OWN_MAGIC = 0x44415055,  // "UPAD"
    OWN_VERSION = 1,
    FLAG_BOS_FIRST = 1,
    FLAG_EOS_LAST = 2,
    INDEX_VERSION = 2,
    INDEX_HEADER_BYTES = 40,
};

// What the header says about the tokens
typedef struct {
    int32_t vocab_size, bos, eos;  // -1: documents do not begin or end with one
    uint64_t tokenizer_hash;       // first 8 bytes of the SHA-256 of tokenizer.json
} ShardVocabulary;

// uint16 or uint32
int shard_token_bytes(const ShardVocabulary *v);

typedef struct {
    const char *dir, *split;
    ShardVocabulary vocabulary;
    int64_t num_docs, num_tokens;  // in all shards
    int num_shards;
    FileWriter bin;  // of the current shard; fd -1: none
    uint64_t *ends;  // (num_ends) cumulative tokens of its documents
    size_t num_ends, end_capacity;
    uint32_t *crcs;  // (num_crcs) of its whole blocks
    size_t num_crcs, crc_capacity;
    uint32_t block_crc;
    uint64_t block_bytes;  // of the block that is not whole yet
} ShardWriter;

// dir and split must outlive it.
void shard_writer_init(ShardWriter *w, const char *dir, const char *split,
                       const ShardVocabulary *v);

// A document: n tokens of shard_token_bytes each, n >= 1. Failures are EXIT_DISK, as below, and
// EXIT_BAD_INPUT for a document that no shard can hold.
bool shard_writer_add(ShardWriter *w, const void *tokens, uint64_t n, Error *err);

// The last shard is on disk.
bool shard_writer_close(ShardWriter *w, Error *err);

// Frees it, and removes a shard that is not closed.
void shard_writer_free(ShardWriter *w);

#endif
