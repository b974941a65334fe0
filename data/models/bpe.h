// Text to token ids, as computed by Hugging Face's tokenizers for BPE, byte-level (SmolLM2, Llama
// 3, Qwen) or of characters (Llama 2, Mistral): added tokens are cut out first, then the rest is
// normalized and cut into words by the steps of the tokenizer, and in each word the pair with the
// lowest merge rank is merged until none is left, in O(n log n) for n characters. PCRE2 matches the
// patterns, libunistring normalizes. Tokenizers with other features are refused.
#pragma once

#include "tokenizer.h"

typedef struct BpeEncoder BpeEncoder;  // one thread's memory, and the ids it has encoded

// The tokenizer must outlive it, and be one that encodes: why_not.code 0.
BpeEncoder *bpe_encoder_open(const Tokenizer *t);
void bpe_encoder_close(BpeEncoder *e);  // NULL is allowed

// Appends the ids of text (n), which is UTF-8 unless the tokenizer's ids are bytes. No BOS, no EOS.
// On failure (EXIT_USAGE) some ids may have been appended.
bool bpe_encode(BpeEncoder *e, const unsigned char *text, size_t n, Error *err);
void bpe_add_id(BpeEncoder *e, int32_t id);

// The ids so far (n); valid until the next one is appended.
const int32_t *bpe_ids(const BpeEncoder *e, size_t *n);
void bpe_clear(BpeEncoder *e);

// Encodes text (n) into out (capacity) like the beginning of a document: after a BOS, if the
// tokenizer adds it. For prompts. Returns the number of ids, or -1 with *err: EXIT_USAGE, or
// EXIT_BAD_INPUT where merges or patterns of the tokenizer are wrong.
int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                         int64_t capacity, Error *err);
