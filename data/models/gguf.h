// GGUF, the model file of llama.cpp, from a Hugging Face directory.
//
//   "GGUF" | uint32 3 | uint64 tensors | uint64 values | values {key, type, value} |
//   tensors {name, shape, type, offset} | data, each tensor at a multiple of 32 bytes
#ifndef UNPAD_GGUF_H
#define UNPAD_GGUF_H

#include "../base/error.h"

// Of matrices; vectors are stored as fp32. q8_0: 8 bits an element and an fp16 scale for each 32;
// f16 where 32 does not divide the columns.
#define GGUF_TYPES "bf16|f16|q8_0"
typedef enum { GGUF_BF16, GGUF_F16, GGUF_Q8_0, GGUF_F32 } GgufType;

// Writes weights, tokenizer and chat template of `dir` into a new file, which has its name when it
// is complete, and prints what it wrote. Exit 3: dir is no plain Llama, has a tokenizer other than
// the byte-level BPE of GPT-2, SmolLM2, Llama 3 or data/prepare.py, or a weight that is out of the
// type's range; exit 7: NaN or Inf.
bool gguf_export(const char *dir, GgufType type, const char *path, Error *err);

#endif
