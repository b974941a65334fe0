// A region of device memory that is allocated once and carved into buffers: the same calls first
// measure it and then, when it exists, set the pointers.
#ifndef UNPAD_ARENA_H
#define UNPAD_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    char *base;  // NULL while only measured
    size_t bytes;
} Arena;

// `count` elements of `size` bytes, 256-byte aligned; NULL while only measuring
static inline void *arena_take(Arena *a, size_t count, size_t size) {
    const size_t first = (a->bytes + 255) / 256 * 256;
    a->bytes = first + count * size;
    return a->base ? a->base + first : NULL;
}

// A buffer of count_ elements, where the condition holds
#define ARENA_BUFFER(arena_, pointer_, count_, exists_) \
    if (exists_) pointer_ = arena_take(arena_, count_, sizeof *(pointer_))

#endif
