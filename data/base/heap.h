// A heap of (key, id): the smallest key first, the smallest id among equal keys. An item has four
// children, next to each other: a large heap misses the cache half as often as one of pairs.
#pragma once

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int64_t key;
    int32_t id;
} HeapItem;

typedef struct {
    HeapItem *items;  // not owned; room for all that is pushed
    int64_t n;
} Heap;

static inline bool heap_before(HeapItem a, HeapItem b) {
    return a.key < b.key || (a.key == b.key && a.id < b.id);
}

static inline void heap_push(Heap *h, int64_t key, int32_t id) {
    const HeapItem item = {key, id};
    int64_t at = h->n++;
    for (; at > 0 && heap_before(item, h->items[(at - 1) / 4]); at = (at - 1) / 4)
        h->items[at] = h->items[(at - 1) / 4];
    h->items[at] = item;
}

// Places the item at `at`, or lower, so that its children come after it.
static inline void heap_sink(Heap *h, HeapItem item, int64_t at) {
    for (int64_t child; (child = 4 * at + 1) < h->n; at = child) {
        const int64_t end = child + 4 < h->n ? child + 4 : h->n;
        for (int64_t i = child + 1; i < end; i++)
            if (heap_before(h->items[i], h->items[child])) child = i;
        if (!heap_before(h->items[child], item)) break;
        h->items[at] = h->items[child];
    }
    h->items[at] = item;
}

// Removes the first item; n > 0.
static inline HeapItem heap_pop(Heap *h) {
    assert(h->n > 0);
    const HeapItem top = h->items[0];
    h->n--;
    if (h->n > 0) heap_sink(h, h->items[h->n], 0);
    return top;
}

// Makes a heap of n items in any order.
static inline void heap_make(Heap *h) {
    for (int64_t i = (h->n + 2) / 4; i-- > 0;) heap_sink(h, h->items[i], i);
}
