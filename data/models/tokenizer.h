// Token ids to bytes and text to token ids, by a Hugging Face tokenizer.json, which is read once.
//
// BPE of two kinds: byte-level, in GPT-2's alphabet (SmolLM2, Llama 3, Qwen, the byte tokenizer),
// and of characters, as SentencePiece's (Llama 2, Mistral). A token may be part of a UTF-8
// character: join the bytes before you show them. A tokenizer with a feature that bpe.h does not
// have only decodes.
#pragma once

#include <jansson.h>

#include "../base/hash.h"
#include "../base/path.h"

enum {
    TOKENIZER_MAX_BYTES = 1 << 26,  // of tokenizer.json: Jansson needs up to 75 times as much
    TOKENIZER_MAX_IDS = 1 << 24,
    TOKENIZER_MAX_STEPS = 16,
};

// A step from a text to its words: what is not cut out as an added token is changed, or cut at the
// matches of a pattern, which are pieces too. The next step takes each piece.
typedef struct {
    enum { STEP_ADDED, STEP_NFC, STEP_REPLACE, STEP_PREPEND, STEP_CUT } kind;
    struct pcre2_real_code_8 *pattern;  // STEP_REPLACE, STEP_CUT
    const char *text;                   // STEP_REPLACE: stands for each match; STEP_PREPEND
    bool literal;                       // the pattern is a text, no expression
    bool once, first;                   // STEP_PREPEND: if not there yet; to the text's beginning
} Step;

typedef struct {
    int32_t id;
    bool normalized;      // cut out of the normalized text between the others
    bool lstrip, rstrip;  // takes the white space before it, after it
    bool single_word;     // is no part of a word
} AddedToken;

// A pair of tokens that becomes another one
typedef struct {
    uint64_t pair;  // left id << 32 | right id
    int32_t rank;   // from 1; 0: the entry is free
    int32_t id;
} Merge;

typedef struct {
    int32_t vocab_size;    // largest id + 1
    int32_t bos, eos;      // -1: not known
    bool adds_bos;         // the tokenizer's post_processor begins texts with BOS
    bool bos_is_disputed;  // add_bos_token, which is not obeyed, says otherwise
    bool byte_ids;         // id = byte below 256, and no merges: nothing after `file` is needed
    uint32_t *offset;      // (vocab_size + 1) into bytes
    unsigned char *bytes;  // of all tokens, one after another; of special tokens: their names
    bool *special;         // (vocab_size)
    char *added;           // (vocab_size) 1: cut out of a text, 2: a token of the model too
    bool byte_level;       // tokens are in GPT-2's alphabet
    bool strips;           // an added token takes white space
    char file[IO_PATH_MAX];
    // for encoding
    Error why_not;            // code != 0: why this tokenizer only decodes; the rest is incomplete
    json_t *vocab;            // token as the file writes it -> id
    int32_t id_of_byte[256];  // -1: no token for this byte, which is dropped if byte_level
    int32_t unk;              // for a character without tokens; -1: it is dropped
    bool byte_fallback;       // the bytes of a character that is no token are tokens
    bool fuse_unk;            // one for a row of such characters
    Merge *merges;            // (merges_mask + 1) a hash table, open addressing
    uint64_t merges_mask;
    uint64_t *joins;  // a Bloom filter of characters that merges join; NULL: any two
    AddedToken *cut;  // (num_cut)
    int32_t num_cut;
    bool cuts_normalized;  // some are normalized
    bool ignore_merges;    // a word that is a token is not merged from its parts
    Step steps[TOKENIZER_MAX_STEPS];
    int num_steps, num_normalizers;  // the latter come first, after a STEP_ADDED
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

// The bit of two neighbours in `joins`: word >> 6, bit & 63
enum { JOIN_BITS = 1 << 20 };
static inline uint32_t tokenizer_join(uint32_t left, uint32_t right) {
    return (uint32_t)mix64((uint64_t)left << 32 | right) % JOIN_BITS;
}

// The entry of a pair, or the free one where it belongs
Merge *tokenizer_merge(const Tokenizer *t, int32_t left, int32_t right);

// EXIT_USAGE; a format and its values complete "a tokenizer that has". Returns false.
#define cannot_encode(err, ...)                                                          \
    error_set(err, EXIT_USAGE,                                                           \
              "BPE is supported as in SmolLM2, Llama 2 and 3, Mistral, Qwen and GPT-2; " \
              "data/convert.py makes shards of others' ids, saved by numpy.save",        \
              "cannot encode with a tokenizer that has " __VA_ARGS__)
