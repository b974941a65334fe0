#include "packing.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"
#include "../base/sum_tree.h"
#include "batch.h"
#include "plan.h"

static const char owner[] = "the step plan";

void plan_reserve_stream(StepPlan *p, size_t n) {
    size_t c = p->stream_capacity, c1 = c, c2 = c;
    p->stream = host_grow(p->stream, &c, n, sizeof *p->stream, owner);
    p->order = host_grow(p->order, &c1, n, sizeof *p->order, owner);
    p->bin = host_grow(p->bin, &c2, n, sizeof *p->bin, owner);
    p->stream_capacity = c;
}

static void plan_reserve_segments(StepPlan *p, size_t n) {
    p->segments = host_grow(p->segments, &p->segment_capacity, n, sizeof *p->segments, owner);
}

void plan_reserve_micros(StepPlan *p, size_t n) {
    size_t c = p->micro_capacity, c1 = c, c2 = c;
    p->micro_start = host_grow(p->micro_start, &c, n + 1, sizeof *p->micro_start, owner);
    p->micro_work = host_grow(p->micro_work, &c1, n + 1, sizeof *p->micro_work, owner);
    p->room = host_grow(p->room, &c2, n + 1, sizeof *p->room, owner);
    p->micro_capacity = c;
}

// ------------------------------------------------------------------------------------------------
// packed

static int compare_keys(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// p->order: indices of the stream by falling length, equal ones in stream order
static void sort_by_length(StepPlan *p) {
    assert(p->num_stream <= INT32_MAX);
    for (int64_t i = 0; i < p->num_stream; i++)
        p->order[i] = (uint64_t)(INT32_MAX - p->stream[i].length) << 32 | (uint64_t)i;
    qsort(p->order, (size_t)p->num_stream, sizeof p->order[0], compare_keys);
    for (int64_t i = 0; i < p->num_stream; i++) p->order[i] &= UINT32_MAX;
}

// The micro-batch for a segment: with the least work, or the least room, of those it fits in; -1:
// none
static int32_t choose_micro(const StepPlan *p, int32_t length, bool fullest) {
    int32_t best = -1;
    const int64_t *by = fullest ? p->room : p->micro_work;
    for (int32_t m = 0; m < p->num_micro; m++)
        if (p->room[m] >= length && (best < 0 || by[m] < by[best])) best = m;
    return best;
}

static bool place_all(StepPlan *p, const PlanSettings *s, bool fullest) {
    p->num_micro = s->num_micro;
    for (int32_t m = 0; m < p->num_micro; m++) {
        p->room[m] = s->micro_batch_tokens;
        p->micro_work[m] = 0;
    }
    for (int64_t i = 0; i < p->num_stream; i++) {
        const int32_t length = p->stream[p->order[i]].length;
        const int32_t m = choose_micro(p, length, fullest);
        if (m < 0) return false;
        p->bin[i] = m;
        p->room[m] -= length;
        p->micro_work[m] += plan_work(length);
    }
    return true;
}

static void group_by_micro(StepPlan *p) {
    const int32_t M = p->num_micro;
    plan_reserve_segments(p, (size_t)p->num_stream);
    p->num_segments = p->num_stream;
    memset(p->micro_start, 0, ((size_t)M + 1) * sizeof *p->micro_start);
    for (int64_t i = 0; i < p->num_stream; i++) p->micro_start[p->bin[i] + 1]++;
    for (int32_t m = 0; m < M; m++) p->micro_start[m + 1] += p->micro_start[m];
    int64_t *at = p->room;  // all are placed: room is no longer needed
    memcpy(at, p->micro_start, (size_t)M * sizeof *at);
    for (int64_t i = 0; i < p->num_stream; i++)
        p->segments[at[p->bin[i]]++] = p->stream[p->order[i]];
}

bool plan_pack(StepPlan *p, const PlanSettings *s) {
    sort_by_length(p);
    if (!place_all(p, s, false) && !place_all(p, s, true)) return false;
    group_by_micro(p);
    return true;
}

// ------------------------------------------------------------------------------------------------
// The other layouts

void plan_layout_padded(StepPlan *p, const PlanSettings *s) {
    const int64_t rows = s->micro_batch_tokens / s->max_seqlen;
    assert(rows > 0);  // plan_settings_check
    const int64_t num_micro = (p->num_stream + rows - 1) / rows;
    plan_reserve_segments(p, (size_t)p->num_stream);
    plan_reserve_micros(p, (size_t)num_micro);
    memcpy(p->segments, p->stream, (size_t)p->num_stream * sizeof(Segment));
    p->num_segments = p->num_stream;
    p->num_micro = (int32_t)num_micro;
    for (int64_t m = 0; m <= num_micro; m++)
        p->micro_start[m] = m < num_micro ? m * rows : p->num_stream;
    for (int64_t m = 0; m < num_micro; m++)
        p->micro_work[m] = (p->micro_start[m + 1] - p->micro_start[m]) * plan_work(s->max_seqlen);
}

void plan_layout_rows(StepPlan *p, const PlanSettings *s) {
    const int64_t room = (int64_t)(s->micro_batch_tokens / s->max_seqlen) * s->max_seqlen;
    const int64_t num_micro = (p->real_tokens + room - 1) / room;
    plan_reserve_segments(p, (size_t)(p->num_stream + num_micro));
    plan_reserve_micros(p, (size_t)num_micro);
    p->num_segments = p->num_micro = 0;
    int64_t left = 0;  // room in the micro-batch being filled
    for (int64_t i = 0; i < p->num_stream; i++) {
        const Segment whole = p->stream[i];
        for (int32_t done = 0; done < whole.length;) {
            if (left == 0) {
                p->micro_start[p->num_micro++] = p->num_segments;
                left = room;
            }
            const int32_t rest = whole.length - done, n = rest < left ? rest : (int32_t)left;
            p->segments[p->num_segments++] =
                (Segment){whole.doc, whole.tok_off + done, n, n < rest || whole.has_next};
            done += n;
            left -= n;
        }
    }
    p->micro_start[p->num_micro] = p->num_segments;
    for (int32_t m = 0; m < p->num_micro; m++) {
        const int64_t tokens = m + 1 < p->num_micro ? room : room - left;
        const int64_t rows = (tokens + s->max_seqlen - 1) / s->max_seqlen;
        p->micro_work[m] = rows * plan_work(s->max_seqlen);
    }
}

// ------------------------------------------------------------------------------------------------
// Ranks

// The heaviest micro-batch that no rank has yet, or -1
static int32_t heaviest_left(const StepPlan *p, const int32_t *rank_of) {
    int32_t best = -1;
    for (int32_t m = 0; m < p->num_micro; m++)
        if (rank_of[m] < 0 && (best < 0 || p->micro_work[m] > p->micro_work[best])) best = m;
    return best;
}

// Work so far and micro-batches so far of a rank
typedef struct {
    int64_t work;
    int32_t count;
} RankLoad;

// In order[i], for every i, the next micro-batch, and in rank_of its rank.
static void assign_by_work(const StepPlan *p, int32_t num_ranks, RankLoad *load, int32_t *order,
                           int32_t *rank_of) {
    for (int32_t m = 0; m < p->num_micro; m++) rank_of[m] = -1;
    for (int32_t i = 0; i < p->num_micro; i++) {
        const int32_t m = heaviest_left(p, rank_of), round = i / num_ranks;
        int32_t to = -1;
        for (int32_t r = 0; r < num_ranks; r++)
            if (load[r].count == round && (to < 0 || load[r].work < load[to].work)) to = r;
        order[i] = m;
        rank_of[m] = to;
        load[to].work += p->micro_work[m];
        load[to].count++;
    }
}

static void assign_blocks(const StepPlan *p, int32_t num_leaves, int32_t num_ranks, RankLoad *load,
                          int32_t *order, int32_t *rank_of) {
    int32_t rank = 0, first, last;
    rank_block(num_leaves, rank, num_ranks, &first, &last);
    for (int32_t m = 0; m < p->num_micro; m++) {
        while (sum_leaf(m, p->num_micro, num_leaves) >= last)
            rank_block(num_leaves, ++rank, num_ranks, &first, &last);
        order[m] = m;
        rank_of[m] = rank;
        load[rank].work += p->micro_work[m];
    }
}

int32_t plan_rank_micros(const StepPlan *p, int32_t num_leaves, int32_t rank, int32_t num_ranks,
                         int32_t *out, double *imbalance) {
    assert(rank >= 0 && rank < num_ranks && num_leaves >= 0);
    RankLoad *load = host_calloc((size_t)num_ranks, sizeof *load, owner);
    int32_t *rank_of = host_calloc((size_t)p->num_micro, sizeof *rank_of, owner), n = 0;
    int64_t sum = 0, most = 0;
    if (num_leaves > 0)
        assign_blocks(p, num_leaves, num_ranks, load, out, rank_of);
    else
        assign_by_work(p, num_ranks, load, out, rank_of);
    for (int32_t i = 0; i < p->num_micro; i++)
        if (rank_of[out[i]] == rank) out[n++] = out[i];
    for (int32_t r = 0; r < num_ranks; r++) {
        sum += load[r].work;
        if (load[r].work > most) most = load[r].work;
    }
    *imbalance = sum > 0 ? (double)most * num_ranks / (double)sum : 0;
    free(rank_of);
    free(load);
    return n;
}
