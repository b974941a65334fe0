#include "packing.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "../base/memory.h"
#include "../base/heap.h"
#include "plan.h"

static const char what[] = "the step plan";

void plan_reserve_stream(StepPlan *p, size_t n) {
    struct PlanScratch *w = p->scratch;
    size_t c = w->stream_capacity, c1 = c, c2 = c, c3 = c, c4 = c;
    p->stream = host_grow(p->stream, &c, n, sizeof *p->stream, what);
    w->order = host_grow(w->order, &c1, n, sizeof *w->order, what);
    w->bin = host_grow(w->bin, &c2, n, sizeof *w->bin, what);
    w->next = host_grow(w->next, &c3, n, sizeof *w->next, what);
    w->members = host_grow(w->members, &c4, n, sizeof *w->members, what);
    w->stream_capacity = c;
}

void plan_reserve_segments(StepPlan *p, size_t n) {
    p->segments =
        host_grow(p->segments, &p->scratch->segment_capacity, n, sizeof *p->segments, what);
}

void plan_reserve_micros(StepPlan *p, size_t n) {
    struct PlanScratch *w = p->scratch;
    size_t c = w->micro_capacity, c1 = c, c2 = c, c3 = c, c4 = c, c5 = c;
    p->micro_start = host_grow(p->micro_start, &c, n + 1, sizeof *p->micro_start, what);
    p->micro_work = host_grow(p->micro_work, &c1, n + 1, sizeof *p->micro_work, what);
    w->bin_free = host_grow(w->bin_free, &c2, n + 1, sizeof *w->bin_free, what);
    w->fitting.items = host_grow(w->fitting.items, &c3, n + 1, sizeof(HeapItem), what);
    w->full.items = host_grow(w->full.items, &c4, n + 1, sizeof(HeapItem), what);
    w->first = host_grow(w->first, &c5, n + 1, sizeof *w->first, what);
    w->micro_capacity = c;
}

// ------------------------------------------------------------------------------------------------
// Packing

static int plan_compare_keys(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

Segment *plan_sorted_segment(const StepPlan *p, int64_t i) {
    return &p->stream[(uint32_t)p->scratch->order[i]];
}

void plan_sort(StepPlan *p, const PlanSettings *s) {
    assert(p->num_stream <= INT32_MAX);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const uint64_t key = s->work_token > 0 ? (uint64_t)(INT32_MAX - p->stream[i].length) : 0;
        p->scratch->order[i] = key << 32 | (uint64_t)i;
    }
    qsort(p->scratch->order, (size_t)p->num_stream, sizeof p->scratch->order[0], plan_compare_keys);
}

static void plan_empty_bins(StepPlan *p, const PlanSettings *s) {
    for (int32_t b = 0; b < s->num_micro; b++) {
        p->scratch->bin_free[b] = s->micro_batch_tokens;
        p->micro_work[b] = 0;
    }
}

static void plan_place(StepPlan *p, const PlanSettings *s, int64_t i, int32_t bin) {
    struct PlanScratch *w = p->scratch;
    const int32_t length = plan_sorted_segment(p, i)->length;
    w->bin[i] = bin;
    w->bin_free[bin] -= length;
    p->micro_work[bin] += plan_work(s, length);
}

bool plan_pack_lpt(StepPlan *p, const PlanSettings *s) {
    struct PlanScratch *w = p->scratch;
    plan_empty_bins(p, s);
    w->fitting.n = w->full.n = 0;
    for (int32_t b = 0; b < s->num_micro; b++) heap_push(&w->fitting, 0, b);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const int32_t length = plan_sorted_segment(p, i)->length;
        while (w->full.n > 0 && -w->full.items[0].key >= length) {
            const int32_t b = heap_pop(&w->full).id;
            heap_push(&w->fitting, p->micro_work[b], b);
        }
        if (w->fitting.n == 0) return false;
        const int32_t b = heap_pop(&w->fitting).id;
        plan_place(p, s, i, b);
        const int32_t next = i + 1 < p->num_stream ? plan_sorted_segment(p, i + 1)->length : 0;
        if (w->bin_free[b] >= next)
            heap_push(&w->fitting, p->micro_work[b], b);
        else
            heap_push(&w->full, -w->bin_free[b], b);
    }
    return true;
}

bool plan_pack_arrival(StepPlan *p, const PlanSettings *s) {
    struct PlanScratch *w = p->scratch;
    plan_empty_bins(p, s);
    w->fitting.n = 0;
    for (int32_t b = 0; b < s->num_micro; b++) heap_push(&w->fitting, -w->bin_free[b], b);
    for (int64_t i = 0; i < p->num_stream; i++) {
        const int32_t b = heap_pop(&w->fitting).id;
        if (w->bin_free[b] < plan_sorted_segment(p, i)->length) return false;
        plan_place(p, s, i, b);
        heap_push(&w->fitting, -w->bin_free[b], b);
    }
    return true;
}

bool plan_pack_best_fit(StepPlan *p, const PlanSettings *s) {
    struct PlanScratch *w = p->scratch;
    plan_empty_bins(p, s);
    for (int64_t i = 0; i < p->num_stream; i++) {
        int32_t best = -1;
        for (int32_t b = 0; b < s->num_micro; b++)
            if (w->bin_free[b] >= plan_sorted_segment(p, i)->length &&
                (best < 0 || w->bin_free[b] < w->bin_free[best]))
                best = b;
        if (best < 0) return false;
        plan_place(p, s, i, best);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// Exchanges

void plan_make_lists(StepPlan *p, const PlanSettings *s) {
    struct PlanScratch *w = p->scratch;
    for (int32_t b = 0; b < s->num_micro; b++) w->first[b] = -1;
    for (int32_t i = (int32_t)p->num_stream - 1; i >= 0; i--) {
        w->next[i] = w->first[w->bin[i]];
        w->first[w->bin[i]] = i;
    }
}

static int32_t plan_list_members(const StepPlan *p, const PlanSettings *s, int32_t bin,
                                 PlanMember *out) {
    int32_t n = 0;
    for (int32_t i = p->scratch->first[bin]; i >= 0; i = p->scratch->next[i]) {
        out[n].segment = i;
        out[n].length = plan_sorted_segment(p, i)->length;
        out[n].work = plan_work(s, out[n].length);
        n++;
    }
    return n;
}

static void plan_move(StepPlan *p, const PlanSettings *s, int32_t i, int32_t to) {
    struct PlanScratch *w = p->scratch;
    const int32_t from = w->bin[i];
    int32_t *at = &w->first[from];
    while (*at != i) at = &w->next[*at];
    *at = w->next[i];
    w->bin_free[from] += plan_sorted_segment(p, i)->length;
    p->micro_work[from] -= plan_work(s, plan_sorted_segment(p, i)->length);
    plan_place(p, s, i, to);
    at = &w->first[to];
    while (*at >= 0 && *at < i) at = &w->next[*at];
    w->next[i] = *at;
    *at = i;
}

// The first of members [first, n), which are in falling order, with less work than `work`.
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

// Room and work of a heavy and a light bin
typedef struct {
    int64_t heavy_free, light_free, heavy_work, light_work;
} PlanPair;

// Keeps the exchange x for y and z in *best if both bins have room for it and the heavier of them
// becomes lighter than in *best.
static void plan_consider(const PlanPair *pair, const PlanMember *x, const PlanMember *y,
                          const PlanMember *z, PlanExchange *best) {
    const int64_t tokens = (int64_t)x->length - y->length - (z ? z->length : 0);
    const int64_t moved = x->work - y->work - (z ? z->work : 0);
    if (tokens > pair->light_free || -tokens > pair->heavy_free) return;
    const int64_t a = pair->heavy_work - moved, b = pair->light_work + moved;
    if ((a > b ? a : b) >= best->heaviest) return;
    best->x = x->segment;
    best->y = y->segment;
    best->z = z ? z->segment : -1;
    best->heaviest = a > b ? a : b;
}

PlanExchange plan_best_exchange(StepPlan *p, const PlanSettings *s, int32_t heavy, int32_t light,
                                int64_t *tried) {
    struct PlanScratch *w = p->scratch;
    PlanExchange best = {-1, -1, -1, p->micro_work[heavy]};
    const PlanPair pair = {w->bin_free[heavy], w->bin_free[light], p->micro_work[heavy],
                           p->micro_work[light]};
    const int64_t difference = pair.heavy_work - pair.light_work;
    const int32_t num_own = plan_list_members(p, s, heavy, w->members);
    const PlanMember *own = w->members, *other = w->members + num_own;
    const int32_t n = plan_list_members(p, s, light, w->members + num_own);
    for (const PlanMember *x = own; x < own + num_own; x++)
        for (int32_t c = plan_first_below(other, 0, n, x->work); c < n; c++) {
            const int64_t rest = x->work - other[c].work;
            plan_consider(&pair, x, &other[c], NULL, &best);
            int32_t d = plan_first_below(other, c + 1, n, rest);
            for (; d < n && rest - other[d].work < difference; d++, ++*tried)
                plan_consider(&pair, x, &other[c], &other[d], &best);
            ++*tried;
        }
    return best;
}

// Makes one exchange between the heaviest bin and one that is lighter than the mean.
static bool plan_exchange(StepPlan *p, const PlanSettings *s, int32_t heavy, int64_t mean,
                          int64_t *tried) {
    for (int32_t light = 0; light < s->num_micro && *tried < PLAN_MAX_TRIED; light++) {
        if (p->micro_work[light] >= mean) continue;
        const PlanExchange e = plan_best_exchange(p, s, heavy, light, tried);
        if (e.x < 0) continue;
        plan_move(p, s, e.x, light);
        plan_move(p, s, e.y, heavy);
        if (e.z >= 0) plan_move(p, s, e.z, heavy);
        return true;
    }
    return false;
}

void plan_even_out(StepPlan *p, const PlanSettings *s) {
    int64_t sum = 0, tried = 0;
    for (int32_t b = 0; b < s->num_micro; b++) sum += p->micro_work[b];
    const int64_t mean = sum / s->num_micro;
    plan_make_lists(p, s);
    for (;;) {
        int32_t heavy = 0;
        for (int32_t b = 1; b < s->num_micro; b++)
            if (p->micro_work[b] > p->micro_work[heavy]) heavy = b;
        if (p->micro_work[heavy] - mean <= mean / PLAN_EVEN) return;
        if (!plan_exchange(p, s, heavy, mean, &tried)) return;
    }
}

// ------------------------------------------------------------------------------------------------
// The result

void plan_group_bins(StepPlan *p, const PlanSettings *s) {
    const struct PlanScratch *w = p->scratch;
    plan_reserve_segments(p, (size_t)p->num_stream);
    p->num_micro = s->num_micro;
    p->num_segments = p->num_stream;
    for (int32_t b = 0; b <= s->num_micro; b++) p->micro_start[b] = 0;
    for (int64_t i = 0; i < p->num_stream; i++) p->micro_start[w->bin[i] + 1]++;
    for (int32_t b = 0; b < s->num_micro; b++) p->micro_start[b + 1] += p->micro_start[b];
    int64_t *at = w->bin_free;  // the bins are final, so their room is no longer needed
    for (int32_t b = 0; b < s->num_micro; b++) at[b] = p->micro_start[b];
    for (int64_t i = 0; i < p->num_stream; i++)
        p->segments[at[w->bin[i]]++] = *plan_sorted_segment(p, i);
    for (int32_t b = 0; b < s->num_micro; b++) assert(at[b] == p->micro_start[b + 1]);
}
