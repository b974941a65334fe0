// A data set: token shards whose sizes and indexes are validated when opened, read by document.
//
// Formats: ours with .idx and .mask, and llm.c's v1 and v7 (modded-nanogpt's are v1), whose index
// is built by reading all tokens. Byte layouts: data/README.md. data/convert.py converts other
// formats to ours.
//
// Documents are numbered from 0 over all shards in order; empty ones are skipped and counted. Every
// shard must have exactly the size that its header implies, and every count is bounded by a file
// size before memory is allocated for it. Tokens are checked as they are read: each id against the
// vocabulary and, where the index has checksums (as ours does), each block against its own.
#pragma once

#include "sources.h"

typedef struct Shard Shard;

typedef struct {
    const char *split;       // which files of a directory: "train" (also when NULL) or "val"
    int32_t vocab_size;      // the model's: shards with a larger one are refused; 0: unknown
    int32_t boundary_token;  // that begins documents in llm.c's; -1: v1 50256, v7 128000
} DatasetOptions;

typedef struct {
    Shard *shards;
    size_t num_shards, shard_capacity;
    size_t num_unchecked;  // shards whose tokens have no checksums
    Sources sources;
    int64_t num_docs;         // not empty
    int64_t num_tokens;       // of all documents
    int64_t num_empty;        // documents that were skipped
    bool masked;              // a shard has a loss mask
    bool weighted;            // targets have weights, unless this is set to false
    bool pairs;               // a shard has preference pairs
    int64_t num_targets;      // in the masks; without one, all but the first of a document
    int32_t vocab_size;       // every id is below it: the shards', else the model's, else INT32_MAX
    int32_t bos, eos;         // -1: unknown
    uint64_t tokenizer_hash;  // 0: unknown
    // Equal for equal data sets; kept in checkpoints. `fingerprint`: names, sizes, headers and
    // indexes, in order. `token_fingerprint`: the tokens, in order: their checksums, or every byte
    // of files that are scanned; and masks.
    uint64_t fingerprint, token_fingerprint;
    int32_t scanned_token;  // the boundary token an index was built with; -1: none was built
} Dataset;

// spec: a file, a directory, a glob pattern, or several of these separated by commas; or a mixture
// (sources.h). Errors are EXIT_BAD_INPUT; *ds then needs no closing. A vocabulary smaller than the
// model's is fine: ids are checked against the shards' own.
bool dataset_open(Dataset *ds, const char *spec, const DatasetOptions *options, Error *err);
void dataset_close(Dataset *ds);

// One line for people, including every assumption.
void dataset_describe(const Dataset *ds, char *out, size_t capacity);

// Tokens of a document, >= 1.
int64_t dataset_doc_length(const Dataset *ds, int64_t doc);

// Does a document belong to the record of the one before it? False for a number that is none.
bool dataset_doc_follows(const Dataset *ds, int64_t doc);

// Reads tokens [offset, offset + n) of a document into out (n). EXIT_BAD_INPUT unless every id is
// below ds->vocab_size and every block matches its checksum, if it has one. Thread-safe.
bool dataset_read(Dataset *ds, int64_t doc, int64_t offset, int64_t n, int32_t *out, Error *err);

// How many of the tokens [offset, offset + n) of a document are targets; offset >= 1. All of them,
// unless its shard has a mask.
int64_t dataset_count_targets(const Dataset *ds, int64_t doc, int64_t offset, int64_t n);

// The weight of a token of a document as a target; 0: it is none
float dataset_weight(const Dataset *ds, int64_t doc, int64_t offset);
