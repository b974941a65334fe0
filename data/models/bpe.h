// Text to token ids, as computed by Hugging Face's tokenizers for byte-level BPE (SmolLM2, Llama
// 3, Qwen): added tokens are cut out first, then the rest is normalized (Qwen: NFC) and cut into
// words by the patterns of pre_tokenizer, and in each word the pair with the lowest merge rank is
// merged until none is left. PCRE2 matches the patterns, libunistring normalizes. Tokenizers with
// other features are refused.
#pragma once

#include "tokenizer.h"

typedef struct Bpe Bpe;                // shared by threads
typedef struct BpeEncoder BpeEncoder;  // one thread's memory, and the ids it has encoded

// The tokenizer must outlive it. NULL with *err: EXIT_USAGE where the tokenizer has features that
// are not supported, EXIT_BAD_INPUT where its file is wrong.
Bpe *bpe_open(const Tokenizer *t, Error *err);
void bpe_close(Bpe *b);  // NULL is allowed, as below

BpeEncoder *bpe_encoder_open(const Bpe *b);
void bpe_encoder_close(BpeEncoder *e);

// Appends the ids of text (n), which is UTF-8 unless the tokenizer's ids are bytes. No BOS, no EOS.
// On failure (EXIT_USAGE) some ids may have been appended.
bool bpe_encode(BpeEncoder *e, const unsigned char *text, size_t n, Error *err);
void bpe_add_id(BpeEncoder *e, int32_t id);

// The ids so far (n); valid until the next one is appended.
const int32_t *bpe_ids(const BpeEncoder *e, size_t *n);
void bpe_clear(BpeEncoder *e);

// Total bytes of text encoded so far; may be read while another thread is encoding.
uint64_t bpe_bytes(const BpeEncoder *e);
