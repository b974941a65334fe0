// Host memory (a refused allocation ends the program), and arithmetic that does not wrap.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

// False when the result does not fit into 64 bits.
static inline bool checked_mul(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}

// count * size bytes, zeroed; the caller frees them. Never NULL: a refusal exits with code 5 and
// names what the memory was for.
void *host_calloc(size_t count, size_t size, const char *what_for);

// AUTO_FREE char *text = ..., AUTO_CLOSE FILE *stream = ...: freed, or closed, at the end of its
// block
static inline void free_at(void *pointer) { free(*(void **)pointer); }
#define AUTO_FREE __attribute__((cleanup(free_at)))
static inline void close_at(FILE **stream) {
    if (*stream) fclose(*stream);
}
#define AUTO_CLOSE __attribute__((cleanup(close_at)))

// A copy of the text; a stream into a text (*text, freed by the caller after fclose). Exit 5 too.
char *host_copy(const char *text, const char *what_for);
FILE *host_stream(char **text, size_t *size, const char *what_for);

// Grows an array of *capacity elements of `size` bytes to at least `needed`, by a factor of 1.5 at
// a time; returns its new address. Contents are kept, the new part is not zeroed. Exits 5.
void *host_grow(void *old, size_t *capacity, size_t needed, size_t size, const char *what_for);
#define array_grow(array_, capacity_, needed_, what_for_) \
    ((array_) = host_grow(array_, capacity_, needed_, sizeof *(array_), what_for_))
