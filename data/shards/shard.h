// One shard: what every format fills in, and what the formats share.
#ifndef UNPAD_SHARD_H
#define UNPAD_SHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "../base/file.h"

typedef enum { SHARD_UNPAD, SHARD_LLMC, SHARD_DATATROVE, SHARD_MEGATRON, SHARD_LLMQ } ShardFormat;

typedef struct {
    File file;  // fd -1 while closed; file.path is path
    char *path;
    ShardFormat format;
    uint64_t data_offset;
    int token_bytes;  // 2 or 4
    int64_t num_tokens;
    int32_t vocab_size, bos, eos;  // -1: the file does not say
    uint64_t tokenizer_hash;       // 0: the file does not say
    int64_t first_doc, num_docs;   // documents that are not empty
    uint64_t *doc_ends;            // (num_docs) cumulative, strictly increasing
    int64_t num_empty;
    uint32_t checksum;     // of the header and the index
    int64_t block_tokens;  // that have a checksum together; 0: tokens have none
    uint32_t *block_crcs;  // (shard_num_blocks) CRC32C of the bytes of each block; NULL: none
    uint32_t token_sum;    // of those checksums, else of the tokens that were read at the start
    int64_t last_use;
} Shard;

enum {
    SHARD_HEADER_BYTES = 1024,
    SHARD_HEADER_WORDS = 256,
    SHARD_MAGIC_U16 = 20240520,
    SHARD_MAGIC_U32 = 20240801,
    SHARD_MAGIC_EVAL = 20240522,
    SHARD_OWN_MAGIC = 0x44415055,  // "UPAD"
    SHARD_OWN_VERSION = 1,
    SHARD_FLAG_BOS_FIRST = 1,
    SHARD_FLAG_EOS_LAST = 2,
    INDEX_VERSION = 2,
    INDEX_HEADER_BYTES = 40,
    INDEX_V1_HEADER_BYTES = 32,  // without checksums of tokens
    INDEX_MAX_BLOCK = 1 << 20,   // tokens
    SAMPLE_PIECES = 8,           // read of shards whose tokens have no checksums
    SAMPLE_BYTES = 4096,
    DATASET_MAX_OPEN = 256,  // descriptors; shards beyond are closed and opened again
};

static const char DATASET_HINT_REMAKE[] =
    "the file is damaged or cut short: copy it again, or make it again with data/prepare.py";

// -------------------------------------------------------------------------------------------------
// Pieces that all formats share

uint64_t shard_word(const unsigned char *p, size_t bytes);
bool shard_size_error(const File *f, uint64_t expected, const char *of, Error *err);

// The file must be exactly header + num_tokens * token_bytes + tail long.
bool shard_prove_size(const Shard *s, uint64_t tail, Error *err);

// doc_ends from `count` cumulative ends: never decreasing, the last one num_tokens; empty ones
// dropped.
bool shard_set_ends(Shard *s, uint64_t *ends, uint64_t count, const char *path, Error *err);

// path with its last `cut` characters replaced by `ending`.
bool shard_sidecar(char *out, size_t capacity, const char *path, size_t cut, const char *ending,
                   Error *err);
bool path_ends_with(const char *path, const char *ending);
uint64_t shard_num_blocks(const Shard *s);

// CRC32C of a few pieces spread evenly over the tokens, the first and the last bytes among them: it
// finds another file of the same size, but not every changed byte.
bool shard_sample_tokens(Shard *s, Error *err);

// -------------------------------------------------------------------------------------------------
// Indexes built by scanning: formats that mark documents by a token only

bool shard_scan(Shard *s, int32_t token, bool token_ends, Error *err);

#endif
