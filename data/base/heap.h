// A binary heap of (key, id): the smallest key first, the smallest id among equal keys.
#ifndef UNPAD_HEAP_H
#define UNPAD_HEAP_H

#include <stdint.h>

typedef struct {
    int64_t key;
    int32_t id;
} HeapItem;

typedef struct {
    HeapItem *items;  // not owned; room for all that is pushed
    int64_t n;
} Heap;

void heap_push(Heap *h, int64_t key, int32_t id);

// Removes the first item; n > 0.
HeapItem heap_pop(Heap *h);

// Orders n items that are in any order.
void heap_make(Heap *h);

#endif
