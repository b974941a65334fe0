// A region of device memory that is allocated once and carved into buffers: the same calls first
// measure it and then, once it exists, set the pointers.
#pragma once

#include <stddef.h>

typedef struct {
    char *base;  // NULL while measuring
    size_t bytes;
} Arena;

// `count` elements of `size` bytes, 256-byte aligned; NULL while measuring
static inline void *arena_take(Arena *a, size_t count, size_t size) {
    const size_t first = (a->bytes + 255) / 256 * 256;
    a->bytes = first + count * size;
    return a->base ? a->base + first : NULL;
}

// A buffer of count_ elements, if the condition holds; else the pointer stays as it is
#define ARENA_BUFFER(arena_, pointer_, count_, exists_)                               \
    do {                                                                              \
        if (exists_) (pointer_) = arena_take((arena_), (count_), sizeof *(pointer_)); \
    } while (0)
