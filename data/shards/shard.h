// One shard: ours, NAME.bin with NAME.idx and perhaps NAME.mask, or llm.c's NAME.bin, which ours
// extends. Byte layout: data/README.md.
#pragma once

#include "../base/file.h"

enum {
    SHARD_HEADER_BYTES = 1024,
    SHARD_MAGIC_U16 = 20240520,  // llm.c's and ours, 16-bit ids
    SHARD_MAGIC_U32 = 20240801,  // 32-bit ids
    OWN_MAGIC = 0x44415055,      // "UPAD"
    OWN_VERSION = 1,
    FLAG_BOS_FIRST = 1,
    FLAG_EOS_LAST = 2,
    FLAG_MASK = 4,
    FLAG_PAIRS = 8,
    INDEX_MAX_BLOCK = 1 << 20,  // tokens
    MASK_WITH_WEIGHTS = 2,      // version of NAME.mask: n floats follow the bits
};

typedef struct {
    int32_t magic, version, num_tokens;
    int32_t zeros[5];
    // what we add to llm.c's header, where all of this is 0
    int32_t own_magic, own_version, vocab_size, flags, bos, eos;
    uint64_t num_docs, tokenizer_hash;
    int32_t more_zeros[237];
    uint32_t crc;  // CRC32C of everything before it
} ShardHeader;
_Static_assert(sizeof(ShardHeader) == SHARD_HEADER_BYTES, "as in data/README.md");

// NAME.idx and NAME.mask
typedef struct {
    const char *ending, *magic, *name;
    uint32_t version, newest;  // the versions that are read
    uint64_t head_bytes;       // before the contents
} Beside;
static const Beside index_file = {"idx", "UNPADIDX", "index", 2, 2, 40},
                    mask_file = {"mask", "UNPADMSK", "mask", 1, MASK_WITH_WEIGHTS, 32};

typedef struct Shard {
    File file;   // file.path is path
    char *path;  // owned
    // set by shard_open; vocab_size, bos and eos are -1 and everything else is 0 before
    int token_bytes;  // 2 or 4
    int64_t num_tokens;
    int32_t vocab_size, bos, eos;  // -1: unknown
    uint64_t tokenizer_hash;       // 0: unknown
    uint64_t *doc_ends;            // (num_docs) cumulative tokens, strictly increasing; owned
    int64_t num_docs, num_empty;   // documents with tokens, and without
    bool pairs;                    // a chosen and a rejected document in each record
    uint32_t checksum;             // CRC32C of the header and the index
    int64_t block_tokens;          // tokens that are read at once, and share a checksum
    uint32_t *block_crcs;          // CRC32C of each block; NULL: none, as in llm.c's; owned
    uint32_t token_sum;  // CRC of those checksums, or of the scanned tokens; and of the mask
    // (num_tokens) bits: is the token a target? Of a document's first token: does it belong to the
    // record of the document before it? NULL: no mask; owned
    unsigned char *mask;
    float *weights;       // (num_tokens) finite, 0 where the bit is; NULL: all 1; owned
    int64_t num_targets;  // in the mask
    int64_t first_doc;    // number of its first document, set by the data set
} Shard;

// Opens a shard whose file is open. boundary_token: as in DatasetOptions, for llm.c's. Any other
// file is EXIT_BAD_INPUT with a hint how to make one.
bool shard_open(Shard *s, int32_t boundary_token, Error *err);

// The little-endian number of `bytes` bytes at p.
uint64_t shard_word(const unsigned char *p, size_t bytes);

bool mask_bit(const unsigned char *mask, int64_t i);

// Ones among bits [from, to).
int64_t mask_count(const unsigned char *mask, int64_t from, int64_t to);
