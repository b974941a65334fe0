// Token ids to bytes, from a Hugging Face tokenizer.json (text to ids: bpe.h).
//
// Decodes byte-level BPE (GPT-2's alphabet: SmolLM2, Llama 3, the byte tokenizer of
// data/prepare.py) and BPE with byte fallback (Llama 2). A token may be part of a UTF-8 character:
// join the bytes before you show them.
#ifndef UNPAD_TOKENIZER_H
#define UNPAD_TOKENIZER_H

#include <jansson.h>
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
    unsigned char *bytes;  // of all tokens, one after another; of special tokens: their names
    bool *special;         // (vocab_size)
    char file[IO_PATH_MAX];
} Tokenizer;

enum {
    TOKENIZER_MAX_BYTES = 1 << 28,  // of tokenizer.json
    TOKENIZER_MAX_IDS = 1 << 24,
};

// path: a tokenizer.json, or the directory that holds it. On failure *t needs no freeing.
bool tokenizer_open(Tokenizer *t, const char *path, Error *err);
void tokenizer_free(Tokenizer *t);

// The bytes of one id (n), not 0-terminated; none for an id outside the vocabulary.
const unsigned char *tokenizer_bytes(const Tokenizer *t, int32_t id, size_t *n);

// ------------------------------------------------------------------------------------------------
// For bpe.c

// GPT-2's alphabet writes every byte as one printable character, so that BPE never sees a raw byte:
// the code point of every byte, itself when printable, else the next one from 256 on.
void gpt2_alphabet(int16_t code_points[256]);

// Text in the alphabet to bytes; returns their number, or -1 when a character is not in the
// alphabet.
int64_t gpt2_decode(const char *text, unsigned char *out);

// Whether `value` or anything in it has "type": name; a decoder may be a sequence of several.
bool json_mentions_type(json_t *value, const char *name);

#endif
