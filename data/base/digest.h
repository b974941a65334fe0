// SHA-256 (FIPS 180-4) of a file: shards say with it which tokenizer.json they were made with.
#ifndef UNPAD_DIGEST_H
#define UNPAD_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

typedef struct {
    uint32_t state[8];
    uint64_t bytes;           // so far
    unsigned char block[64];  // the part that does not fill a block yet
} Sha256;

void sha256_begin(Sha256 *s);
void sha256_add(Sha256 *s, const void *data, size_t n);
void sha256_end(Sha256 *s, unsigned char digest[32]);
bool sha256_file(const char *path, unsigned char digest[32], Error *err);

#endif
