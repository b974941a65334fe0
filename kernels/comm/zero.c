#include "zero.h"

#include <assert.h>
#include <stdlib.h>

#include "../../data/base/memory.h"
#include "comm.h"
#include "job.h"

// ------------------------------------------------------------------------------------------------
// Parts and shards

// Blocks into which AdamW's elements are cut, and FLOPs that take as long as its 28 bytes an
// element on a GPU
enum { NUM_BLOCKS = 256, ADAMW_FLOPS = 2800 };

static void add_blocks(Zero *z, size_t first, size_t last) {
    const size_t unit = NUM_BLOCKS * 64, block = (z->shape.num_elements + unit - 1) / unit * 64;
    for (size_t n; first < last; first += n) {
        n = last - first < block ? last - first : block;
        z->parts[z->num_parts++] = (ZeroPart){first, (double)n * ADAMW_FLOPS};
    }
}

static void plan_parts(Zero *z) {
    const ZeroShape *s = &z->shape;
    size_t end = 0;  // of the parts so far
    z->parts =
        host_calloc((size_t)(NUM_BLOCKS + 2 * s->num_matrices + 2), sizeof *z->parts, "parts");
    if (s->num_matrices > 0) z->matrices_first = s->matrices[0].first;
    for (const ZeroMatrix *x = s->matrices; x < s->matrices + s->num_matrices; x++) {
        add_blocks(z, end, x->first);
        z->parts[z->num_parts++] = (ZeroPart){x->first, muon_flops(x->rows, x->cols)};
        z->matrices_last = end = x->first + (size_t)(x->rows * x->cols);
    }
    add_blocks(z, end, s->num_elements);
    z->parts[z->num_parts].first = s->num_elements;
}

// Each rank gets whole parts in their order: its shard ends nearest to its share of the cost.
static void plan_shards(Zero *z) {
    const int32_t ranks = z->settings.num_ranks;
    double all = 0, before = 0;
    for (int i = 0; i < z->num_parts; i++) all += z->parts[i].cost;
    z->shards = host_calloc((size_t)ranks + 1, sizeof *z->shards, "shards");
    for (int r = 0, i = 0; r <= ranks; r++) {
        while (i < z->num_parts && before + 0.5 * z->parts[i].cost < all * r / ranks)
            before += z->parts[i++].cost;
        z->shards[r] = z->parts[i].first;
    }
    z->shard_first = z->shards[z->settings.rank];
    z->shard_count = z->shards[z->settings.rank + 1] - z->shard_first;
}

void zero_plan(Zero *z, ZeroSettings settings, ZeroShape shape) {
    *z = (Zero){.settings = settings, .shape = shape};
    if (settings.num_ranks == 0) z->settings.num_ranks = 1;
    if (z->settings.num_ranks == 1) z->shape.num_buckets = 0;  // nothing is sent
    z->step_bytes = sizeof(StepScalars) + (size_t)z->settings.num_ranks * sizeof(RankNote);
    z->step_host = host_calloc(1, z->step_bytes, "step");
    plan_parts(z);
    plan_shards(z);
    if (settings.deterministic)
        ordered_sum_plan(&z->sum, shape.num_elements, settings.rank, z->settings.num_ranks,
                         settings.num_leaves);
}

// The part of elements from .. to - 1 that is of this rank's shard
static ShardPart own_part(const Zero *z, size_t from, size_t to) {
    return part_of_shard(z->shards, z->settings.rank, from, to);
}

// The low bits from weight i of the shard on; NULL where there are none
static uint16_t *low_bits(const Zero *z, size_t i) {
    return z->master_lo ? z->master_lo + (i - z->shard_first) : NULL;
}

// The element of v of weight i: those of the shard before it, without the matrices'
static size_t v_index(const Zero *z, size_t i) {
    const size_t last = i < z->matrices_last ? i : z->matrices_last;
    return i - z->shard_first - own_part(z, z->matrices_first, last).count;
}

// A sum has partial sums, added in their order, wherever other ranks may add to it.
static bool has_partial_sums(const Zero *z) {
    return z->settings.num_ranks > 1 || z->settings.deterministic;
}

static void carve_muon(Zero *z, Arena *workspace) {
    const ZeroShape *s = &z->shape;
    size_t largest = 0, square = 0;
    for (const ZeroMatrix *x = s->matrices; x < s->matrices + s->num_matrices; x++) {
        const size_t n = (size_t)(x->rows * x->cols), side = (size_t)muon_side(x->rows, x->cols);
        if (n > largest) largest = n;
        if (side * side > square) square = side * side;
    }
    ARENA_BUFFER(workspace, z->muon.norm_squared, 1, true);
    ARENA_BUFFER(workspace, z->muon.x, largest, true);
    ARENA_BUFFER(workspace, z->muon.next, largest, true);
    ARENA_BUFFER(workspace, z->muon.gram, square, true);
    ARENA_BUFFER(workspace, z->muon.poly, square, true);
}

void zero_carve(Zero *z, floatX *weights, real *grads, Arena *of_weights, Arena *of_grads,
                Arena *of_optimizer, Arena *workspace) {
    const size_t n = z->shape.num_elements, own = z->shard_count;
    const size_t partial = (size_t)z->sum.num_partial,
                 collected = (size_t)z->sum.num_collected * (size_t)z->settings.num_ranks;
    const size_t losses = (size_t)z->settings.num_losses;
    const bool train = z->shape.train;
    z->weights = weights;
    z->grads = grads;
    ARENA_BUFFER(of_weights, z->master_lo, own, master_lo_bytes() > 0);
    ARENA_BUFFER(of_grads, z->sum.partial, partial * n, train && partial);
    ARENA_BUFFER(of_optimizer, z->m, own, train);
    ARENA_BUFFER(of_optimizer, z->v, v_index(z, z->shard_first + own), train);
    z->step = arena_take(workspace, z->step_bytes + losses * sizeof(double), 1);
    if (z->step) {
        z->loss_partials = (double *)(zero_notes(z->step) + z->settings.num_ranks);
        z->loss_sum = &z->step->loss_sum;
        device_zero(z->step, sizeof *z->step);
    }
    ARENA_BUFFER(workspace, z->norm_partials, (size_t)z->num_parts, has_partial_sums(z));
    ARENA_BUFFER(workspace, z->sum.collected, collected * z->sum.block,
                 z->settings.num_ranks > 1 && collected);
    if (train && z->shape.num_matrices > 0) carve_muon(z, workspace);
}

void zero_free(Zero *z) {
    free(z->shape.matrices);
    free(z->shape.buckets);
    free(z->parts);
    free(z->shards);
    free(z->step_host);
}

// ------------------------------------------------------------------------------------------------
// Losses

void zero_begin_losses(Zero *z) {
    device_zero(z->step, z->step_bytes + (size_t)z->settings.num_losses * sizeof(double));
    zero_select_losses(z, z->settings.rank);
}

void zero_select_losses(Zero *z, int32_t partial) {
    if (has_partial_sums(z)) z->loss_sum = z->loss_partials + partial;
}

void zero_sum_losses(Zero *z) {
    if (!has_partial_sums(z)) return;
    RankNote *notes = zero_notes(z->step);
    device_upload(notes + z->settings.rank, &z->note, sizeof z->note);
    comm_sum_in_order(&z->step->loss_sum, &notes->passes_ms, 2 * (size_t)z->settings.num_ranks,
                      (size_t)z->settings.num_losses);
}

StepScalars zero_read_step(Zero *z) {
    device_download(z->step_host, z->step, z->step_bytes);
    return *z->step_host;
}

// ------------------------------------------------------------------------------------------------
// Gradients

// A sum over micro-batches begins.
static void clear_grads(Zero *z) {
    const ZeroShape *s = &z->shape;
    z->has_grads = false;
    device_zero(z->grads, s->num_added * sizeof(real));
    device_zero(z->grads + s->num_decayed, (s->num_elements - s->num_decayed) * sizeof(real));
}

// It ends: without a micro-batch, all of it is zero.
static void complete_grads(Zero *z) {
    if (!z->has_grads) device_zero(z->grads, z->shape.num_elements * sizeof(real));
    z->has_grads = true;
}

// The gradients since the last leaf of the tree are a leaf.
static void end_leaf(Zero *z) {
    const bool last = z->leaf + 1 == z->end_leaf;
    complete_grads(z);
    ordered_sum_add(&z->sum, z->grads, z->leaf++, last);
    if (!last) clear_grads(z);
}

void zero_begin_step(Zero *z) {
    const ZeroSettings *s = &z->settings;
    clear_grads(z);
    zero_begin_losses(z);
    z->last_micro_batch = false;
    z->num_unsent = z->shape.num_buckets;
    rank_block(s->num_leaves, s->rank, s->num_ranks, &z->leaf, &z->end_leaf);
}

void zero_begin_micro_batch(Zero *z, int32_t micro, int32_t num_micro, bool last) {
    if (z->settings.deterministic) {
        const int32_t leaf = sum_leaf(micro, num_micro, z->settings.num_leaves);
        assert(leaf >= z->leaf && leaf < z->end_leaf);
        while (z->leaf < leaf) end_leaf(z);
        zero_select_losses(z, leaf);
    }
    z->last_micro_batch = last && !z->settings.deterministic;
}

static void send_grads(Zero *z, int bucket) {
    const ZeroBucket *b = &z->shape.buckets[bucket];
    assert(bucket == z->num_unsent - 1);
    z->reduced = comm_reduce_begin(z->grads, z->shards, b->first, b->last);
    z->num_unsent = bucket;
}

void zero_grads_done(Zero *z, int bucket) {
    comm_progress();  // long micro-batches too, while others wait for this rank
    if (z->last_micro_batch && z->num_unsent > 0) send_grads(z, bucket);
    if (bucket == 0) z->has_grads = true;
}

void zero_reduce(Zero *z) {
    if (z->settings.deterministic) {
        while (z->leaf < z->end_leaf) end_leaf(z);
        complete_grads(z);  // where this rank has no leaf
        ordered_sum_finish(&z->sum, z->grads, z->shards);
        return;
    }
    complete_grads(z);
    // without a last micro-batch all leave now, in the same ranges and order, for the same bits
    while (z->num_unsent > 0) send_grads(z, z->num_unsent - 1);
    comm_wait(z->reduced);
}

// The norm of the summed gradients: each rank sums the squares of its shard, part by part.
static void sum_squares(Zero *z) {
    double *sum = &z->step->norm_squared;
    if (!has_partial_sums(z)) {
        global_norm_squared(sum, z->grads, z->shape.num_elements);
        return;
    }
    device_zero(z->norm_partials, (size_t)z->num_parts * sizeof(double));
    for (int i = 0; i < z->num_parts; i++) {
        const size_t first = z->parts[i].first, n = z->parts[i + 1].first - first;
        if (own_part(z, first, first + n).count)
            global_norm_squared(z->norm_partials + i, z->grads + first, n);
    }
    comm_sum_in_order(sum, z->norm_partials, 0, (size_t)z->num_parts);
}

// ------------------------------------------------------------------------------------------------
// Weights

static void update_range(Zero *z, AdamW hyper, size_t from, size_t to) {
    const ShardPart own = own_part(z, from, to);
    if (own.count > 0)
        adamw_update(z->weights + own.at, low_bits(z, own.at), z->m + (own.at - z->shard_first),
                     z->v + v_index(z, own.at), z->grads + own.at, z->step, hyper, own.count);
}

static void update_matrices(Zero *z, AdamW hyper) {
    const ZeroShape *s = &z->shape;
    for (const ZeroMatrix *x = s->matrices; x < s->matrices + s->num_matrices; x++)
        if (own_part(z, x->first, x->first + 1).count)  // then all of it
            muon_update(z->weights + x->first, low_bits(z, x->first),
                        z->m + (x->first - z->shard_first), z->grads + x->first, z->step, hyper.lr,
                        hyper.weight_decay, x->rows, x->cols, z->muon);
}

void zero_update(Zero *z, AdamW hyper, float grad_clip) {
    const ZeroShape *s = &z->shape;
    assert(s->train && hyper.t >= 1);
    zero_sum_losses(z);
    sum_squares(z);
    clip_scale(z->step, grad_clip);
    update_range(z, hyper, 0, z->matrices_first);
    update_matrices(z, hyper);
    update_range(z, hyper, z->matrices_last, s->num_decayed);
    hyper.weight_decay = 0;
    update_range(z, hyper, s->num_decayed, s->num_elements);
    for (ZeroBucket *b = s->buckets; b < s->buckets + s->num_buckets; b++)
        b->weights = comm_gather_begin(z->weights, z->shards, b->first, b->last);
}

void zero_await_weights(Zero *z, int bucket) {
    if (z->shape.num_buckets > 0) comm_wait(z->shape.buckets[bucket].weights);
}

// ------------------------------------------------------------------------------------------------
// Values from and to the host

static real *moment(const Zero *z, ZeroArray array, size_t i) {
    assert(sizeof(real) == sizeof(float));  // the fp64 build keeps no moments in files
    return array == ZERO_M ? z->m + (i - z->shard_first) : z->v + v_index(z, i);
}

void zero_put(Zero *z, ZeroArray array, size_t offset, const float *values, size_t n) {
    const ShardPart own = own_part(z, offset, offset + n);
    if (array == ZERO_WEIGHTS && own.count < n)
        weights_from_host(z->weights + offset, NULL, values, n);  // without low bits
    if (own.count == 0) return;
    values += own.at - offset;
    if (array == ZERO_WEIGHTS)
        weights_from_host(z->weights + own.at, low_bits(z, own.at), values, own.count);
    else
        device_upload(moment(z, array, own.at), values, own.count * sizeof(float));
}

void zero_get(Zero *z, ZeroArray array, size_t offset, float *values, size_t n) {
    const ShardPart own = own_part(z, offset, offset + n);
    const size_t at = own.at - offset;
    if (offset >= z->shape.num_elements) {
        weights_to_host(values, z->weights + offset, NULL, n);
        return;
    }
    if (own.count && array == ZERO_WEIGHTS)
        weights_to_host(values + at, z->weights + own.at, low_bits(z, own.at), own.count);
    else if (own.count)
        device_download(values + at, moment(z, array, own.at), own.count * sizeof(float));
    if (z->settings.num_ranks > 1)
        comm_merge(values, n * sizeof(float), at * sizeof(float), own.count * sizeof(float));
}
