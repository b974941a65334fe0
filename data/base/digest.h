// SHA-256 (FIPS 180-4) of a file: a shard names the tokenizer.json it was made with by its hash.
#ifndef UNPAD_DIGEST_H
#define UNPAD_DIGEST_H

#include <stdbool.h>

#include "error.h"

// Fails as file_open and file_read_at do.
bool sha256_file(const char *path, unsigned char digest[32], Error *err);

#endif
