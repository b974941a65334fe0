// Text to token ids as Hugging Face's tokenizers compute them for byte-level BPE (SmolLM2, Llama
// 3): added tokens are cut out first, then the patterns of pre_tokenizer cut the rest into words,
// and in each word the pair with the lowest merge rank is merged until none is left.
//
// For prompts: each call reads tokenizer.json again. Corpora are prepared by data/prepare.py. The
// patterns need Unicode classes: PCRE2, loaded at run time, matches them. Tokenizers with other
// features are refused.
#ifndef UNPAD_BPE_H
#define UNPAD_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "tokenizer.h"

// Encodes text (n) into out (capacity), as data/prepare.py begins a document: after a BOS, unless
// the tokenizer has none or ends documents with the same token. Returns the number of ids, or -1
// with *err (exit 2).
int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                         int64_t capacity, Error *err);

#endif
