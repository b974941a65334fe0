// The built-in tokenizer as Hugging Face's files: ids are bytes, BOS 256, EOS 257; the same bytes
// that data/prepare.py writes.
#ifndef UNPAD_BYTE_TOKENIZER_H
#define UNPAD_BYTE_TOKENIZER_H

#include "../base/error.h"

enum { BYTE_TOKENIZER_ROOM = 8192 };  // bytes of tokenizer.json, more than enough

// tokenizer.json, NUL-terminated; returns its length.
size_t byte_tokenizer_json(char out[BYTE_TOKENIZER_ROOM]);

// All of its files into a directory. Failures are EXIT_DISK.
bool byte_tokenizer_write(const char *dir, Error *err);

#endif
