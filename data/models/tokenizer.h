// Token ids to bytes from a Hugging Face tokenizer.json (text to ids: bpe.h).
//
// Decoded are byte-level BPE (GPT-2's alphabet: SmolLM2, Llama 3, our byte tokenizer) and BPE with
// byte fallback (Llama 2). A token may be part of a UTF-8 character: bytes are joined before they
// are shown.
#ifndef UNPAD_TOKENIZER_H
#define UNPAD_TOKENIZER_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "../base/path.h"

typedef struct {
    int32_t vocab_size;    // largest id + 1
    int32_t bos, eos;      // -1: not known
    bool byte_ids;         // id = byte below 256, and no merges
    uint32_t *offset;      // (vocab_size + 1) into bytes
    unsigned char *bytes;  // what every token stands for; of special tokens: their name
    bool *special;         // (vocab_size)
    char file[IO_PATH_MAX];
} Tokenizer;

enum {
    TOKENIZER_MAX_BYTES = 1 << 28,  // of tokenizer.json
    TOKENIZER_MAX_IDS = 1 << 24,
    BYTE_BOS = 256,  // the built-in byte tokenizer
    BYTE_EOS = 257,
    BYTE_VOCAB_SIZE = 258,
};

void tokenizer_free(Tokenizer *t);

// -------------------------------------------------------------------------------------------------
// GPT-2's alphabet: every byte is one printable character, so that BPE never sees a raw byte

// The code point of every byte: itself when printable, else the next one from 256 on.
void gpt2_alphabet(int16_t code_points[256]);

// Text in the alphabet to bytes; returns their number, or -1 when a character is not in the
// alphabet.
int64_t gpt2_decode(const char *text, unsigned char *out);

// -------------------------------------------------------------------------------------------------
// tokenizer.json

// Whether `value` or anything in it has "type": name; the decoder may be a sequence of several.
bool json_mentions_type(const cJSON *value, const char *name);

// path: a tokenizer.json, or the directory that holds it. On failure *t needs no freeing.
bool tokenizer_open(Tokenizer *t, const char *path, Error *err);

// The built-in one: id = byte, BOS 256, EOS 257.
void tokenizer_byte(Tokenizer *t);

// -------------------------------------------------------------------------------------------------
// Use

// The bytes of one id, not 0-terminated; of an id outside the vocabulary: none.
const unsigned char *tokenizer_bytes(const Tokenizer *t, int32_t id, size_t *n);
int64_t prompt_too_long(int64_t found, int64_t capacity, Error *err);

// Text to ids that are its bytes, after the BOS; returns how many, or -1 with *err filled.
int64_t tokenizer_encode_bytes(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                               int64_t capacity, Error *err);

#endif
