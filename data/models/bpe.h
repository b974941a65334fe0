// Text to token ids as Hugging Face's tokenizers do it for byte-level BPE (SmolLM2, Llama 3): added
// tokens first, then the patterns of pre_tokenizer cut the rest into pieces, then in each piece the
// pair that was merged first in training is merged, again and again.
//
// For prompts: it takes time per call (reads tokenizer.json anew), not per character. Corpora are
// prepared by data/prepare.py. The patterns need Unicode classes: they are given to PCRE2, found at
// run time; nothing else needs it. What this does not know is refused, not guessed.
#ifndef UNPAD_BPE_H
#define UNPAD_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "tokenizer.h"

// ------------------------------------------------------------------------------------------------
// Text

// Text to ids, as data/prepare.py begins a document: after a BOS, unless the tokenizer has none or
// ends documents with the same token. Returns how many, or -1 with *err filled.
int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                         int64_t capacity, Error *err);

#endif
