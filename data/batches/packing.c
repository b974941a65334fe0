#include "packing.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "plan.h"

// -------------------------------------------------------------------------------------------------
// A binary heap, smallest (key, id) first

static bool heap_before(HeapItem a, HeapItem b) {
    return a.key < b.key || (a.key == b.key && a.id < b.id);
}

void heap_push(Heap *h, int64_t key, int32_t id) {
    HeapItem item;
    item.key = key;
    item.id = id;
    int32_t at = h->n++;
    for (; at > 0 && heap_before(item, h->items[(at - 1) / 2]); at = (at - 1) / 2)
        h->items[at] = h->items[(at - 1) / 2];
    h->items[at] = item;
}

HeapItem heap_pop(Heap *h) {
    assert(h->n > 0);
    const HeapItem top = h->items[0], item = h->items[--h->n];
    int32_t at = 0;
    for (int32_t child; (child = 2 * at + 1) < h->n; at = child) {
        if (child + 1 < h->n && heap_before(h->items[child + 1], h->items[child])) child++;
        if (!heap_before(h->items[child], item)) break;
        h->items[at] = h->items[child];
    }
    h->items[at] = item;
    return top;
}

// -------------------------------------------------------------------------------------------------
// Packing: p->bin for the chunks in sorted order

static int plan_compare_keys(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

Chunk *plan_sorted_chunk(const StepPlan *p, int64_t i) { return &p->stream[(uint32_t)p->order[i]]; }

void plan_sort(StepPlan *p, const PlanSettings *s) {
    assert(p->num_stream <= INT32_MAX);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const uint64_t key = s->work_token > 0 ? (uint64_t)(INT32_MAX - p->stream[i].length) : 0;
        p->order[i] = key << 32 | (uint64_t)i;
    }
    qsort(p->order, (size_t)p->num_stream, sizeof p->order[0], plan_compare_keys);
}

static void plan_empty_bins(StepPlan *p, const PlanSettings *s) {
    for (int32_t b = 0; b < s->num_micro; b++) {
        p->micro_free[b] = s->capacity;
        p->micro_work[b] = 0;
    }
}

static void plan_place(StepPlan *p, const PlanSettings *s, int64_t i, int32_t bin) {
    const int32_t length = plan_sorted_chunk(p, i)->length;
    p->bin[i] = bin;
    p->micro_free[bin] -= length;
    p->micro_work[bin] += plan_work(s, length);
}

bool plan_pack_lpt(StepPlan *p, const PlanSettings *s) {
    plan_empty_bins(p, s);
    p->fitting.n = p->full.n = 0;
    for (int32_t b = 0; b < s->num_micro; b++) heap_push(&p->fitting, 0, b);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const int32_t length = plan_sorted_chunk(p, i)->length;
        while (p->full.n > 0 && -p->full.items[0].key >= length) {
            const int32_t b = heap_pop(&p->full).id;
            heap_push(&p->fitting, p->micro_work[b], b);
        }
        if (p->fitting.n == 0) return false;
        const int32_t b = heap_pop(&p->fitting).id;
        plan_place(p, s, i, b);
        const int32_t next = i + 1 < p->num_stream ? plan_sorted_chunk(p, i + 1)->length : 0;
        if (p->micro_free[b] >= next)
            heap_push(&p->fitting, p->micro_work[b], b);
        else
            heap_push(&p->full, -p->micro_free[b], b);
    }
    return true;
}

bool plan_pack_arrival(StepPlan *p, const PlanSettings *s) {
    plan_empty_bins(p, s);
    p->fitting.n = 0;
    for (int32_t b = 0; b < s->num_micro; b++) heap_push(&p->fitting, -p->micro_free[b], b);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const int32_t b = heap_pop(&p->fitting).id;
        if (p->micro_free[b] < plan_sorted_chunk(p, i)->length) return false;
        plan_place(p, s, i, b);
        heap_push(&p->fitting, -p->micro_free[b], b);
    }
    return true;
}

bool plan_pack_best_fit(StepPlan *p, const PlanSettings *s) {
    plan_empty_bins(p, s);
    for (int64_t i = 0; i < p->num_stream; i++) {
        int32_t best = -1;
        for (int32_t b = 0; b < s->num_micro; b++)
            if (p->micro_free[b] >= plan_sorted_chunk(p, i)->length &&
                (best < 0 || p->micro_free[b] < p->micro_free[best]))
                best = b;
        if (best < 0) return false;
        plan_place(p, s, i, best);
    }
    return true;
}

// -------------------------------------------------------------------------------------------------
// Exchanges. Where room runs out LPT stays uneven: micro-batches of short chunks are full and
// light, those with long ones heavy with room to spare. One chunk of the heaviest against one or
// two of a lighter micro-batch, of about as many tokens together, moves attention and hardly any
// tokens.

void plan_make_lists(StepPlan *p, const PlanSettings *s) {
    for (int32_t b = 0; b < s->num_micro; b++) p->first[b] = -1;
    for (int32_t i = (int32_t)p->num_stream - 1; i >= 0; i--) {
        p->next[i] = p->first[p->bin[i]];
        p->first[p->bin[i]] = i;
    }
}

static int32_t plan_list_members(const StepPlan *p, const PlanSettings *s, int32_t bin,
                                 PlanMember *out) {
    int32_t n = 0;
    for (int32_t i = p->first[bin]; i >= 0; i = p->next[i]) {
        out[n].chunk = i;
        out[n].length = plan_sorted_chunk(p, i)->length;
        out[n].work = plan_work(s, out[n].length);
        n++;
    }
    return n;
}

static void plan_move(StepPlan *p, const PlanSettings *s, int32_t i, int32_t to) {
    const int32_t from = p->bin[i];
    int32_t *at = &p->first[from];
    while (*at != i) at = &p->next[*at];
    *at = p->next[i];
    p->micro_free[from] += plan_sorted_chunk(p, i)->length;
    p->micro_work[from] -= plan_work(s, plan_sorted_chunk(p, i)->length);
    plan_place(p, s, i, to);
    at = &p->first[to];
    while (*at >= 0 && *at < i) at = &p->next[*at];
    p->next[i] = *at;
    *at = i;
}

// The first of members first .. n - 1, which are in falling order, with less work than this.
static int32_t plan_first_below(const PlanMember *members, int32_t first, int32_t n, int64_t work) {
    while (first < n) {
        const int32_t middle = first + (n - first) / 2;
        if (members[middle].work < work)
            n = middle;
        else
            first = middle + 1;
    }
    return first;
}

// Two micro-batches: room and work of the heavy and of the light one
typedef struct {
    int64_t heavy_free, light_free, heavy_work, light_work;
} PlanPair;

// Keeps the exchange in *best if both have room for it and the heavier one of them is then lighter.
static void plan_consider(const PlanPair *pair, const PlanMember *x, const PlanMember *y,
                          const PlanMember *z, PlanExchange *best) {
    const int64_t tokens = (int64_t)x->length - y->length - (z ? z->length : 0);
    const int64_t moved = x->work - y->work - (z ? z->work : 0);
    if (tokens > pair->light_free || -tokens > pair->heavy_free) return;
    const int64_t a = pair->heavy_work - moved, b = pair->light_work + moved;
    if ((a > b ? a : b) >= best->heaviest) return;
    best->x = x->chunk;
    best->y = y->chunk;
    best->z = z ? z->chunk : -1;
    best->heaviest = a > b ? a : b;
}

PlanExchange plan_best_exchange(StepPlan *p, const PlanSettings *s, int32_t heavy, int32_t light,
                                int64_t *looks) {
    PlanExchange best = {-1, -1, -1, p->micro_work[heavy]};
    const PlanPair pair = {p->micro_free[heavy], p->micro_free[light], p->micro_work[heavy],
                           p->micro_work[light]};
    const int64_t difference = pair.heavy_work - pair.light_work;
    const int32_t num_own = plan_list_members(p, s, heavy, p->members);
    const PlanMember *own = p->members, *other = p->members + num_own;
    const int32_t n = plan_list_members(p, s, light, p->members + num_own);
    for (const PlanMember *x = own; x < own + num_own; x++)
        for (int32_t c = plan_first_below(other, 0, n, x->work); c < n; c++) {
            const int64_t rest = x->work - other[c].work;
            plan_consider(&pair, x, &other[c], NULL, &best);
            int32_t d = plan_first_below(other, c + 1, n, rest);
            for (; d < n && rest - other[d].work < difference; d++, ++*looks)
                plan_consider(&pair, x, &other[c], &other[d], &best);
            ++*looks;
        }
    return best;
}

// Makes an exchange of the heaviest micro-batch with one that is lighter than the mean.
static bool plan_exchange(StepPlan *p, const PlanSettings *s, int32_t heavy, int64_t mean,
                          int64_t *looks) {
    for (int32_t light = 0; light < s->num_micro && *looks < PLAN_MAX_LOOKS; light++) {
        if (p->micro_work[light] >= mean) continue;
        const PlanExchange e = plan_best_exchange(p, s, heavy, light, looks);
        if (e.x < 0) continue;
        plan_move(p, s, e.x, light);
        plan_move(p, s, e.y, heavy);
        if (e.z >= 0) plan_move(p, s, e.z, heavy);
        return true;
    }
    return false;
}

void plan_even_out(StepPlan *p, const PlanSettings *s) {
    int64_t sum = 0, looks = 0;
    for (int32_t b = 0; b < s->num_micro; b++) sum += p->micro_work[b];
    const int64_t mean = sum / s->num_micro;
    plan_make_lists(p, s);
    for (;;) {
        int32_t heavy = 0;
        for (int32_t b = 1; b < s->num_micro; b++)
            if (p->micro_work[b] > p->micro_work[heavy]) heavy = b;
        if (p->micro_work[heavy] - mean <= mean / PLAN_EVEN) return;
        if (!plan_exchange(p, s, heavy, mean, &looks)) return;
    }
}
