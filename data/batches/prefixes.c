#include "prefixes.h"

#include <stdlib.h>

#include "../base/hash.h"
#include "../base/memory.h"
#include "batch.h"

static const char owner[] = "shared prefixes";

bool prefixes_read(Prefixes *p, const DocIndex *index, const Segment *list, int64_t n, Error *err) {
    array_grow(p->first, &p->first_capacity, (size_t)n + 1, owner);
    p->first[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        const size_t tiles = ((size_t)list[i].length - 1) / SHARED_TILE_TOKENS, at = p->first[i],
                     length = tiles * SHARED_TILE_TOKENS + 1;
        p->first[i + 1] = at + tiles;
        if (tiles == 0) continue;
        array_grow(p->hashes, &p->hash_capacity, at + tiles, owner);
        array_grow(p->tokens, &p->token_capacity, length, owner);
        if (!index->read(index->context, &list[i], (int64_t)length, p->tokens, err)) return false;
        uint64_t h = 0;
        for (size_t t = 0; t < length; t++) {
            h = splitmix64(h ^ (uint64_t)p->tokens[t]);
            if (t > 0 && t % SHARED_TILE_TOKENS == 0)
                p->hashes[at + t / SHARED_TILE_TOKENS - 1] = h;
        }
    }
    return true;
}

void prefixes_free(Prefixes *p) {
    free(p->hashes);
    free(p->first);
    free(p->tokens);
}

// Tiles in common
static int64_t common(const Prefixes *p, int32_t a, int32_t b) {
    const uint64_t *x = p->hashes + p->first[a], *y = p->hashes + p->first[b];
    const size_t n = p->first[a + 1] - p->first[a], m = p->first[b + 1] - p->first[b];
    size_t k = 0;
    while (k < n && k < m && x[k] == y[k]) k++;
    return (int64_t)k;
}

// A segment comes after the longer ones that begin with it, so that the longest is the leader.
static int compare(const void *first, const void *second, void *prefixes) {
    const Prefixes *p = prefixes;
    const int32_t a = *(const int32_t *)first, b = *(const int32_t *)second;
    const size_t k = (size_t)common(p, a, b), at_a = p->first[a] + k, at_b = p->first[b] + k;
    const bool a_ends = at_a == p->first[a + 1], b_ends = at_b == p->first[b + 1];
    if (a_ends && b_ends) return (a > b) - (a < b);
    if (a_ends || b_ends) return a_ends ? 1 : -1;
    return p->hashes[at_a] < p->hashes[at_b] ? -1 : 1;
}

// Does ids[i] save more as a new leader, for those after it that have more in common with it, than
// the tiles that it would borrow?
static bool leads(const Prefixes *p, const int32_t *ids, int64_t i, int64_t n, int64_t tiles) {
    int64_t gain = -tiles, more;
    for (int64_t k = i + 1; k < n && (more = common(p, ids[i], ids[k]) - tiles) > 0; k++)
        if ((gain += more) > 0) return true;
    return false;
}

int64_t prefixes_share(const Prefixes *p, int32_t *ids, int32_t *shared, int64_t n, bool pairs) {
    int64_t sum = 0, leader = 0;
    if (!pairs) qsort_r(ids, (size_t)n, sizeof *ids, compare, (void *)p);
    for (int64_t i = 0; i < n; i++) {
        int64_t tiles = i > 0 ? common(p, ids[leader], ids[i]) : 0;
        if (pairs ? i % 2 == 0 : tiles == 0 || leads(p, ids, i, n, tiles)) tiles = 0, leader = i;
        shared[i] = (int32_t)tiles * SHARED_TILE_TOKENS;
        sum += shared[i];
    }
    return sum;
}
