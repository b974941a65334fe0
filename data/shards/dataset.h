// Document shards: proves the sizes of a list of token files, then reads tokens of document i.
//
// Read: our shards with their .idx, llm.c v1 and v7 (modded-nanogpt's are v1), datatrove .ds with
// .ds.index, Megatron .bin with .idx, llmq BIN.TOK. Byte layouts: data/README.md.
//
// Documents are numbered from 0 over all shards in order; empty ones are left out and counted.
// Every shard's size is proven to be what its header says before anything is used, and every count
// is bounded by a file size before memory is asked for. Tokens are checked when they are read: each
// block of them against its checksum where the index has checksums (ours has), and each id.
#ifndef UNPAD_DATASET_H
#define UNPAD_DATASET_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "shard.h"

typedef struct {
    const char *split;       // which files of a directory: "train" (also when NULL) or "val"
    int32_t vocab_size;      // the model's: data made for more ids is refused; 0: take the data's
    int32_t boundary_token;  // only files without an index; -1: by format (v1 50256, v7 128000)
    bool boundary_ends;      // that token ends documents (EOS) instead of starting them (BOS)
} DatasetOptions;

typedef struct {
    Shard *shards;
    size_t num_shards, shard_capacity;
    int64_t num_docs, num_tokens, num_empty;
    int32_t vocab_size, bos, eos;
    uint64_t tokenizer_hash, fingerprint, token_fingerprint;
    int32_t scanned_token;  // the boundary that an index was built with; -1: none was
    int64_t clock;
    int num_open;
    unsigned char *block;  // one block while it is checked
    size_t block_capacity;
    pthread_mutex_t lock;
} Dataset;

DatasetOptions dataset_options(void);

// -------------------------------------------------------------------------------------------------
// The data set

void dataset_close(Dataset *ds);

// spec: a file, a directory, a glob pattern, or several of these with commas between. On failure
// *ds needs no closing. A narrower vocabulary than the model's is fine: ids are checked against the
// data's.
bool dataset_open(Dataset *ds, const char *spec, const DatasetOptions *options, Error *err);
int64_t dataset_num_docs(const Dataset *ds);
int64_t dataset_num_tokens(const Dataset *ds);
int64_t dataset_num_empty(const Dataset *ds);
int32_t dataset_vocab_size(const Dataset *ds);
int32_t dataset_bos(const Dataset *ds);  // -1: not known
int32_t dataset_eos(const Dataset *ds);

// Hash of names, sizes, headers and indexes, in order; kept in checkpoints.
uint64_t dataset_fingerprint(const Dataset *ds);

// Hash of the tokens, in order; kept in checkpoints. Of shards with checksums it covers every byte,
// once all blocks have been read; of scanned ones every byte as it was then; of others a sample.
uint64_t dataset_token_fingerprint(const Dataset *ds);
size_t dataset_num_unchecked(const Dataset *ds);

// Both: what must be the same for two data sets to be one.
void dataset_fingerprints(const Dataset *ds, uint64_t out[2]);

// One line for people, with whatever was assumed.
void dataset_describe(const Dataset *ds, char *out, size_t capacity);

// -------------------------------------------------------------------------------------------------
// Documents

int64_t dataset_doc_length(const Dataset *ds, int64_t doc);

// Tokens [offset, offset + n) of a document, each proven to be below vocab_size. Safe to call from
// several threads.
bool dataset_read(Dataset *ds, int64_t doc, int64_t offset, int64_t n, int32_t *out, Error *err);

#endif
