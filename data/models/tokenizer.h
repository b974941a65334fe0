// Token ids to bytes and text to token ids, by a Hugging Face tokenizer.json.
//
// Decodes byte-level BPE (GPT-2's alphabet: SmolLM2, Llama 3, the byte tokenizer) and BPE with
// byte fallback (Llama 2). A token may be part of a UTF-8 character: join the bytes before you show
// them.
#pragma once

#include <jansson.h>

#include "../base/path.h"

typedef struct {
    int32_t vocab_size;    // largest id + 1
    int32_t bos, eos;      // -1: not known
    bool adds_bos;         // the tokenizer's post_processor begins texts with BOS
    bool bos_is_disputed;  // add_bos_token, which is not obeyed, says otherwise
    bool byte_ids;         // id = byte below 256, and no merges
    uint32_t *offset;      // (vocab_size + 1) into bytes
    unsigned char *bytes;  // of all tokens, one after another; of special tokens: their names
    bool *special;         // (vocab_size)
    bool *added;           // (vocab_size) cut out of a text before anything else
    char file[IO_PATH_MAX];
} Tokenizer;

enum {
    TOKENIZER_MAX_BYTES = 1 << 26,  // of tokenizer.json: Jansson needs up to 75 times as much
    TOKENIZER_MAX_IDS = 1 << 24,
};

// path: a tokenizer.json, or the directory that holds it. On failure *t needs no freeing.
bool tokenizer_open(Tokenizer *t, const char *path, Error *err);
void tokenizer_free(Tokenizer *t);

// The bytes of one id (n), not 0-terminated; none for an id outside the vocabulary.
const unsigned char *tokenizer_bytes(const Tokenizer *t, int32_t id, size_t *n);

// The bytes as text in out (capacity), cut off.
void tokenizer_name(char *out, size_t capacity, const Tokenizer *t, int32_t id);

// Encodes text (n) into out (capacity) like the beginning of a document: after a BOS, if the
// tokenizer adds it. For prompts (bpe.c): each call reads tokenizer.json again. Returns the number
// of ids, or -1 with *err (exit 2).
int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                         int64_t capacity, Error *err);

// ---- For bpe.c ----------------------------------------------------------------------------------

// A tokenizer.json with the added tokens that only the tokenizer_config.json of its directory has;
// the latter, if it exists, is its last member. The caller frees it; NULL with *err.
#define TOKENIZER_CONFIG "tokenizer_config.json"
json_t *tokenizer_tree(const char *path, Error *err);

// Bytes (n) to text in GPT-2's alphabet, at most 2 n bytes and a 0. Every byte becomes a printable
// character, so that BPE never sees a raw byte.
void gpt2_encode(const unsigned char *bytes, size_t n, char *out);

// Whether `value` or anything inside it has "type": name; a decoder may be a sequence of several.
bool json_mentions_type(json_t *value, const char *name);
