// Host memory that is there or ends the program with exit code 5, and sizes that do not wrap.
#ifndef UNPAD_MEMORY_H
#define UNPAD_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

// ------------------------------------------------------------------------------------------------
// Sizes and memory

bool checked_mul(uint64_t a, uint64_t b, uint64_t *out);
bool checked_add(uint64_t a, uint64_t b, uint64_t *out);

// count * size bytes, zeroed; never NULL: exits 5 with what it was for.
void *host_calloc(size_t count, size_t size, const char *what_for);
bool error_memory(Error *err, const char *path, uint64_t size_bytes);

// Grows an array to hold at least `needed` elements; contents kept, new part not zeroed. Exits 5.
void *host_grow(void *old, size_t *capacity, size_t needed, size_t size, const char *what_for);

#endif
