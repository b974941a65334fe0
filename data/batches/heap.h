// A binary heap of (key, id), smallest first.
#ifndef UNPAD_HEAP_H
#define UNPAD_HEAP_H

#include <stdint.h>

typedef struct {
    int64_t key;
    int32_t id;
} HeapItem;

typedef struct {
    HeapItem *items;  // not owned; room for all that is pushed
    int32_t n;
} Heap;

void heap_push(Heap *h, int64_t key, int32_t id);

// Removes the item with the smallest key, among equal ones that with the smallest id; n > 0.
HeapItem heap_pop(Heap *h);

#endif
