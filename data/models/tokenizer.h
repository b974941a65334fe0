// Token ids to bytes and text to token ids, by a Hugging Face tokenizer.json, which is read once.
//
// Decodes byte-level BPE (GPT-2's alphabet: SmolLM2, Llama 3, the byte tokenizer) and BPE with
// byte fallback (Llama 2). A token may be part of a UTF-8 character: join the bytes before you show
// them. Encodes (bpe.h) byte-level BPE; a tokenizer with other features only decodes.
#pragma once

#include <jansson.h>

#include "../base/path.h"

enum {
    TOKENIZER_MAX_BYTES = 1 << 26,  // of tokenizer.json: Jansson needs up to 75 times as much
    TOKENIZER_MAX_IDS = 1 << 24,
    TOKENIZER_MAX_PATTERNS = 8,
};

// A pair of tokens that becomes another one
typedef struct {
    uint64_t pair;  // left id << 32 | right id; NO_PAIR: the entry is free
    int32_t rank, id;
} Merge;
#define NO_PAIR UINT64_MAX

typedef struct {
    int32_t vocab_size;    // largest id + 1
    int32_t bos, eos;      // -1: not known
    bool adds_bos;         // the tokenizer's post_processor begins texts with BOS
    bool bos_is_disputed;  // add_bos_token, which is not obeyed, says otherwise
    bool byte_ids;         // id = byte below 256, and no merges: nothing after `file` is needed
    uint32_t *offset;      // (vocab_size + 1) into bytes
    unsigned char *bytes;  // of all tokens, one after another; of special tokens: their names
    bool *special;         // (vocab_size)
    bool *added;           // (vocab_size) cut out of a text before anything else
    char file[IO_PATH_MAX];
    // for encoding
    Error why_not;            // code != 0: why this tokenizer only decodes; the rest is incomplete
    json_t *vocab;            // token, in GPT-2's alphabet unless it is an added one -> id
    int32_t id_of_byte[256];  // -1: no token for this byte, which is dropped
    Merge *merges;            // (merges_mask + 1) a hash table, open addressing
    uint64_t merges_mask;
    // ids of added tokens: [cut_ends[0], cut_ends[1]) are cut out first, then those up to
    // cut_ends[2], which are "normalized"
    int32_t *cut, cut_ends[3];
    bool cut_begins[2][256];  // whether one of them begins with this byte
    bool ignore_merges;       // a word that is a token is not merged from bytes
    bool nfc;                 // texts are normalized
    struct pcre2_real_code_8 *patterns[TOKENIZER_MAX_PATTERNS];  // (num_patterns)
    int num_patterns;
} Tokenizer;

// path: a tokenizer.json, or the directory that holds it. On failure *t needs no freeing.
bool tokenizer_open(Tokenizer *t, const char *path, Error *err);
void tokenizer_free(Tokenizer *t);

// The bytes of one id (n), not 0-terminated; none for an id outside the vocabulary.
const unsigned char *tokenizer_bytes(const Tokenizer *t, int32_t id, size_t *n);

// The bytes as text in out (capacity), cut off.
void tokenizer_name(char *out, size_t capacity, const Tokenizer *t, int32_t id);

// Bytes (n) to text in GPT-2's alphabet, at most 2 n bytes and a 0. Every byte becomes a printable
// character, so that BPE never sees a raw byte.
void gpt2_encode(const unsigned char *bytes, size_t n, char *out);

// ---- For bpe.c ----------------------------------------------------------------------------------

// The id of a token that is not an added one; -1: there is none.
int32_t tokenizer_id(const Tokenizer *t, const char *token);

// The entry of a pair, or the free one where it belongs
Merge *tokenizer_merge(const Tokenizer *t, int32_t left, int32_t right);

// EXIT_USAGE; `what` completes "a tokenizer that has". Returns false.
bool cannot_encode(const char *what, Error *err);
