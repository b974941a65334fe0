// One shard: the fields that every format fills in, and helpers shared by the formats.
#ifndef UNPAD_SHARD_H
#define UNPAD_SHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "../base/file.h"
#include "dataset.h"

struct Shard {
    File file;   // fd -1 while closed; file.path is path
    char *path;  // owned
    // set by the format; vocab_size, bos and eos are -1 and everything else is 0 before
    const char *format;    // its name, for people
    uint64_t data_offset;  // bytes before the first token
    int token_bytes;       // 2 or 4
    int64_t num_tokens;
    int32_t vocab_size, bos, eos;  // -1: unknown
    uint64_t tokenizer_hash;       // 0: unknown
    uint64_t *doc_ends;            // (num_docs) cumulative tokens, strictly increasing; owned
    int64_t num_docs, num_empty;   // documents with tokens, and without
    bool scanned;                  // the index was built by reading all tokens
    uint32_t checksum;             // CRC32C of the header and the index
    int64_t block_tokens;          // tokens that share a checksum; 0: tokens have none
    uint32_t *block_crcs;          // (shard_num_blocks) CRC32C of each block; NULL: none; owned
    uint32_t
        token_sum;  // of those checksums, else of the tokens read when opening; and of the mask
    unsigned char *mask;  // (num_tokens) bits: is the token a target? NULL: no mask; owned
    int64_t num_targets;  // ones in it
    // set by the data set
    int64_t first_doc;  // number of its first document
    int64_t last_use;
};

enum {
    SHARD_HEADER_BYTES = 1024,
    SHARD_MAGIC_U16 = 20240520,  // llm.c's and ours, 16-bit ids
    SHARD_MAGIC_U32 = 20240801,  // 32-bit ids
};

#define SHARD_HINT_REMAKE \
    "the file is damaged or cut short: copy it again, or make it again with data/prepare.py"

// The little-endian number of `bytes` bytes at p.
uint64_t shard_word(const unsigned char *p, size_t bytes);

// Blocks of tokens with a checksum each; 0: tokens have none.
uint64_t shard_num_blocks(const Shard *s);

// out (IO_PATH_MAX): path with its last `cut` characters replaced by `ending`.
bool shard_sidecar(char *out, const char *path, size_t cut, const char *ending, Error *err);

// "expected exactly N bytes (of), found ...". Returns false.
bool shard_size_error(const File *f, uint64_t expected, const char *of, Error *err);

// Fails unless the file is exactly data_offset + num_tokens * token_bytes long.
bool shard_check_size(const Shard *s, Error *err);

// Takes ownership of ends (count): cumulative, never decreasing, the last one num_tokens, else an
// error that names `path`. Empty documents are dropped and counted.
bool shard_set_ends(Shard *s, uint64_t *ends, uint64_t count, const char *path, Error *err);

// Builds the index by reading all tokens, for formats that only mark documents with a token:
// `token` starts documents, or ends them. Sets token_sum and adds the index to checksum.
bool shard_scan(Shard *s, int32_t token, bool token_ends, Error *err);

// token_sum of a few samples spread evenly over the tokens, the first and the last bytes included:
// it detects another file of the same size, but not every changed byte.
bool shard_sample_tokens(Shard *s, Error *err);

// Reads NAME.mask into mask, num_targets and token_sum if the header (SHARD_HEADER_BYTES) has the
// flag for it; a mask without the flag is an error. Needs num_tokens and doc_ends.
bool shard_read_mask(Shard *s, const unsigned char *head, Error *err);

// Takes ownership of mask ((num_tokens + 7) / 8 bytes) from another trainer's file, in which a bit
// says whether its token is a target: sets mask, num_targets and token_sum. Bits of the first
// tokens of documents and after the last token become 0.
void shard_set_mask(Shard *s, unsigned char *mask);

bool mask_bit(const unsigned char *mask, int64_t i);

// Ones among bits [from, to).
int64_t mask_count(const unsigned char *mask, int64_t from, int64_t to);

#endif
