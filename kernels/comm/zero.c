#include "zero.h"

#include <assert.h>
#include <stdlib.h>

#include "../../data/base/hash.h"
#include "../../data/base/memory.h"
#include "comm.h"
#include "world.h"

// ---- Parts and shards ---------------------------------------------------------------------------

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
        z->parts[z->num_parts++] = (ZeroPart){x->first, muon_cost(x->rows, x->cols)};
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

// The number of matrices like x that are updated at once. On a GPU they fill 128 MB of scratch
// memory, and so the device; on the CPU they fit its cache.
static int batch_size(const ZeroShape *s, const ZeroMatrix *x) {
    const int64_t most = sizeof(floatX) == 2 ? 32 << 20 : 64 << 10;
    const int64_t fit = most / (x->rows * x->cols), all = s->num_matrices / s->num_kinds;
    return fit < 1 ? 1 : (int)(fit < all ? fit : all);
}

// On a GPU a round of all ranks fills 32 MiB, in rows on 16-byte borders: it costs launches on
// every rank, however short it is. On the CPU a block fits the cache. Of a small model it is a
// quarter of a shard, to save memory.
static size_t block_size(size_t num_elements, int32_t num_ranks) {
    const size_t ranks = (size_t)num_ranks, quarter = (num_elements / (16 * ranks) + 1) * 4;
    const size_t most = sizeof(floatX) == 2 ? ((size_t)2 << 20) / ranks * 4 : (size_t)32 << 10;
    return most < quarter ? most : quarter;
}

static void plan_sum(Zero *z) {
    const ZeroSettings *s = &z->settings;
    z->block = block_size(z->shape.num_elements, s->num_ranks);
    for (int32_t r = 0; r < s->num_ranks; r++) {
        SumNode nodes[SUM_MAX_NODES];
        int most;
        const int count = sum_block_nodes(s->num_leaves, r, s->num_ranks, nodes, &most);
        if (count > z->num_collected) z->num_collected = count;
        if (r == s->rank) z->num_partial = most;
    }
}

// Bytes of what the host reads, with the losses of n documents
static size_t bytes_of_step(const Zero *z, int64_t n) {
    return sizeof *z->step + (size_t)z->settings.num_ranks * sizeof(RankNote) +
           (size_t)n * sizeof *z->documents;
}

void zero_plan(Zero *z, ZeroSettings settings, ZeroShape shape) {
    *z = (Zero){.settings = settings, .shape = shape};
    if (settings.num_ranks == 0) z->settings.num_ranks = 1;
    if (z->settings.num_ranks == 1) z->shape.num_buckets = 0;  // nothing is sent
    z->step_host = host_calloc(1, bytes_of_step(z, settings.most_documents), "step");
    plan_parts(z);
    plan_shards(z);
    if (settings.deterministic) plan_sum(z);
}

// The part of elements from .. to - 1 that lies in this rank's shard
static ShardPart own_part(const Zero *z, size_t from, size_t to) {
    return part_of_shard(z->shards, z->settings.rank, from, to);
}

// The low bits from weight i of the shard on; NULL where there are none
static uint16_t *low_bits(const Zero *z, size_t i) {
    return z->master_lo ? z->master_lo + (i - z->shard_first) : NULL;
}

// The index of weight i in v: the number of weights before it in the shard that are no matrix's.
static size_t v_index(const Zero *z, size_t i) {
    const size_t last = i < z->matrices_last ? i : z->matrices_last;
    return i - z->shard_first - own_part(z, z->matrices_first, last).count;
}

static size_t moment_bytes(const Zero *z) {
    return z->settings.bf16_moments ? sizeof(uint16_t) : sizeof(real);
}

// The moments from weight i of the shard on, as update number t rounds them
static Moments moments_at(const Zero *z, size_t i, int64_t t) {
    const size_t bytes = moment_bytes(z);
    return (Moments){.m = (char *)z->m + bytes * (i - z->shard_first),
                     .v = (char *)z->v + bytes * v_index(z, i),
                     .bf16 = z->settings.bf16_moments,
                     .counter = splitmix64(splitmix64(z->settings.seed) + (uint64_t)t) + i};
}

// Losses and norms are sums of partial sums, in a fixed order, wherever ranks share them.
static bool has_partial_sums(const Zero *z) {
    return z->settings.num_ranks > 1 || z->settings.deterministic;
}

static void carve_muon(Zero *z, Arena *workspace) {
    const ZeroShape *s = &z->shape;
    size_t largest = 0, squares = 0;
    for (const ZeroMatrix *x = s->matrices; x < s->matrices + s->num_matrices; x++) {
        const int64_t num = batch_size(s, x), side = x->rows < x->cols ? x->rows : x->cols;
        const size_t n = (size_t)(num * x->rows * x->cols), two = (size_t)(2 * num * side * side);
        if (n > largest) largest = n;
        if (two > squares) squares = two;
    }
    ARENA_BUFFER(workspace, z->muon.x[0], largest, true);
    ARENA_BUFFER(workspace, z->muon.x[1], largest, true);
    ARENA_BUFFER(workspace, z->muon.squares, squares, true);
}

void zero_carve(Zero *z, floatX *weights, real *grads, Arena *of_weights, Arena *of_grads,
                Arena *of_optimizer, Arena *workspace) {
    const size_t n = z->shape.num_elements, own = z->shard_count;
    const size_t partial = (size_t)z->num_partial * n,
                 collected = (size_t)z->num_collected * (size_t)z->settings.num_ranks * z->block;
    const size_t losses = (size_t)z->settings.num_losses;
    const bool train = z->shape.train;
    z->weights = weights;
    z->grads = grads;
    ARENA_BUFFER(of_weights, z->master_lo, own, master_lo_bytes() > 0);
    ARENA_BUFFER(of_grads, z->partial, partial, train && partial);
    if (train) z->m = arena_take(of_optimizer, own, moment_bytes(z));
    if (train) z->v = arena_take(of_optimizer, v_index(z, z->shard_first + own), moment_bytes(z));
    z->step = arena_take(workspace,
                         bytes_of_step(z, z->settings.most_documents) + losses * sizeof(double), 1);
    if (z->step) {
        z->loss_sum = &z->step->loss_sum;
        device_zero(z->step, sizeof *z->step);
    }
    ARENA_BUFFER(workspace, z->norm_partials, (size_t)z->num_parts, has_partial_sums(z));
    ARENA_BUFFER(workspace, z->collected, collected, z->settings.num_ranks > 1 && collected);
    if (train && z->shape.num_matrices > 0) carve_muon(z, workspace);
}

void zero_free(Zero *z) {
    free(z->shape.matrices);
    free(z->shape.buckets);
    free(z->parts);
    free(z->shards);
    free(z->step_host);
}

// ---- Losses -------------------------------------------------------------------------------------

void zero_begin_losses(Zero *z, int64_t num_documents) {
    z->num_documents = z->settings.most_documents > 0 ? num_documents : 0;
    assert(z->num_documents <= z->settings.most_documents);
    z->documents = (double *)(zero_notes(z->step) + z->settings.num_ranks);
    z->loss_partials = z->documents + z->num_documents;
    device_zero(z->step, bytes_of_step(z, z->num_documents) +
                             (size_t)z->settings.num_losses * sizeof(double));
    zero_select_losses(z, z->settings.rank);
}

void zero_select_losses(Zero *z, int32_t partial) {
    if (has_partial_sums(z)) z->loss_sum = z->loss_partials + partial;
}

void zero_sum_losses(Zero *z) {
    if (!has_partial_sums(z)) return;
    RankNote *notes = zero_notes(z->step);
    device_upload(notes + z->settings.rank, &z->note, sizeof z->note);
    comm_sum_in_order(&z->step->loss_sum, &notes->passes_ms,
                      2 * (size_t)z->settings.num_ranks + (size_t)z->num_documents,
                      (size_t)z->settings.num_losses);
}

StepScalars zero_read_step(Zero *z) {
    device_download(z->step_host, z->step, bytes_of_step(z, z->num_documents));
    return *z->step_host;
}

// ---- Gradients ----------------------------------------------------------------------------------

// Starts a sum over micro-batches.
static void clear_grads(Zero *z) {
    const ZeroShape *s = &z->shape;
    z->has_grads = false;
    device_zero(z->grads, s->num_added * sizeof(real));
    device_zero(z->grads + s->num_decayed, (s->num_elements - s->num_decayed) * sizeof(real));
}

// Ends the sum: all zeros if this rank had no micro-batch.
static void complete_grads(Zero *z) {
    if (!z->has_grads) device_zero(z->grads, z->shape.num_elements * sizeof(real));
    z->has_grads = true;
}

// ------------------------------------------------------------------------------------------------
// Deterministic sums: each rank adds its leaves one after another; what can be joined is joined at
// once, and the rest waits as partial sums. After the last leaf each rank collects all partial sums
// of its own shard and joins them in the order in which a single rank would have.

static real *partial_sum(const Zero *z, int i) {
    assert(i >= 0 && i < z->num_partial);
    return z->partial + (size_t)i * z->shape.num_elements;
}

// The gradients since the leaf before are a leaf. After this rank's last one, its last partial sum
// stays in grads.
static void end_leaf(Zero *z) {
    const int before = z->num_nodes;
    const size_t n = z->shape.num_elements;
    complete_grads(z);
    z->num_nodes = sum_add_node(z->nodes, before, (SumNode){z->leaf++, 1});
    for (int i = before - 1; i >= z->num_nodes - 1; i--) grads_add(z->grads, partial_sum(z, i), n);
    if (z->leaf == z->end_leaf) return;
    device_copy(partial_sum(z, z->num_nodes - 1), z->grads, n * sizeof(real));
    clear_grads(z);
}

// Partial sum i of `rank`, as collected
static real *collected_sum(const Zero *z, int i, int32_t rank) {
    const size_t row = (size_t)i * (size_t)z->settings.num_ranks + (size_t)rank;
    return z->collected + row * z->block;
}

// From x[last] down to x[end]: each (n) is added to the one before it.
static void add_to_left(real **x, int last, int end, size_t n) {
    for (int i = last; i >= end; i--) grads_add(x[i - 1], x[i], n);
}

// out (n) =  the sum of the collected partial sums of all ranks
static void join_collected(const Zero *z, real *out, size_t n) {
    const ZeroSettings *s = &z->settings;
    SumNode nodes[2 * SUM_MAX_NODES], own[SUM_MAX_NODES];
    real *x[2 * SUM_MAX_NODES];
    int num_nodes = 0, most;
    for (int32_t r = 0; r < s->num_ranks; r++) {
        const int count = sum_block_nodes(s->num_leaves, r, s->num_ranks, own, &most);
        for (int i = 0; i < count; i++) {
            const int before = num_nodes;
            x[before] = collected_sum(z, i, r);
            num_nodes = sum_add_node(nodes, before, own[i]);
            add_to_left(x, before, num_nodes, n);
        }
    }
    add_to_left(x, num_nodes - 1, 1, n);
    device_copy(out, x[0], n * sizeof(real));
}

// Block by block of the shards, as many times as the longest shard needs.
static void collect_and_join(Zero *z) {
    const size_t *first = z->shards, own = z->shard_count;
    size_t longest = 0;
    for (int32_t r = 0; r < z->settings.num_ranks; r++)
        if (first[r + 1] - first[r] > longest) longest = first[r + 1] - first[r];
    for (size_t at = 0; at < longest; at += z->block) {
        // a rank with fewer partial sums resends its last one; the receiver ignores it
        for (int i = 0; i < z->num_collected; i++)
            comm_collect(collected_sum(z, i, 0),
                         i < z->num_nodes - 1 ? partial_sum(z, i) : z->grads, first, at, z->block);
        if (at < own)
            join_collected(z, z->grads + z->shard_first + at,
                           own - at < z->block ? own - at : z->block);
    }
}

// This rank's shard of grads becomes the sum over all leaves.
static void finish_sum(Zero *z) {
    if (z->settings.num_ranks > 1)
        collect_and_join(z);
    else
        for (int i = z->num_nodes - 2; i >= 0; i--)
            grads_add(z->grads, partial_sum(z, i), z->shape.num_elements);
    z->num_nodes = 0;
}

// ---- The step -----------------------------------------------------------------------------------

void zero_begin_step(Zero *z) {
    const ZeroSettings *s = &z->settings;
    clear_grads(z);
    zero_begin_losses(z, z->num_documents);
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
    while (z->settings.deterministic && z->leaf < z->end_leaf) end_leaf(z);
    complete_grads(z);  // where this rank has no leaf
    if (z->settings.deterministic) return finish_sum(z);
    // if this rank had no last micro-batch, all leave now: same ranges, same order, same bits
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

// ---- Weights ------------------------------------------------------------------------------------

static void update_range(Zero *z, AdamW hyper, size_t from, size_t to) {
    const ShardPart own = own_part(z, from, to);
    if (own.count > 0)
        adamw_update(z->weights + own.at, low_bits(z, own.at), moments_at(z, own.at, hyper.t),
                     z->grads + own.at, z->step, hyper, own.count);
}

static void update_matrices(Zero *z, AdamW hyper) {
    const ZeroShape *s = &z->shape;
    const int kinds = s->num_kinds;
    for (int kind = 0; kind < kinds; kind++)
        for (int i = kind, num; i < s->num_matrices; i += (num ? num : 1) * kinds) {
            const ZeroMatrix *x = s->matrices + i;
            for (num = 0; num < batch_size(s, x) && i + num * kinds < s->num_matrices; num++)
                if (!own_part(z, x[num * kinds].first, x[num * kinds].first + 1).count) break;
            const size_t at = x->first, stride = num > 1 ? x[kinds].first - at : 0;
            if (num == 0) continue;
            muon_update(z->weights + at, low_bits(z, at), moments_at(z, at, hyper.t), z->grads + at,
                        z->step, hyper.lr, hyper.weight_decay,
                        (MuonShape){x->rows, x->cols, num, stride}, z->muon);
        }
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

// ---- Values from and to the host ----------------------------------------------------------------

static void *moment(const Zero *z, ZeroArray array, size_t i) {
    const Moments at = moments_at(z, i, 0);
    assert(sizeof(real) == sizeof(float));  // the fp64 build keeps no moments in files
    return array == ZERO_M ? at.m : at.v;
}

// Rounds what is not bf16: it comes from a run with fp32.
static void put_moments(const Zero *z, void *to, const float *values, size_t n) {
    AUTO_FREE uint16_t *halves = host_calloc(n, sizeof *halves, "moments");
    for (size_t i = 0; i < n; i++) halves[i] = moment_narrow(values[i], TO_NEAREST);
    device_upload(to, z->settings.bf16_moments ? (const void *)halves : values,
                  n * moment_bytes(z));
}

static void get_moments(const Zero *z, float *values, const void *from, size_t n) {
    AUTO_FREE uint16_t *halves = host_calloc(n, sizeof *halves, "moments");
    const bool bf16 = z->settings.bf16_moments;
    device_download(bf16 ? (void *)halves : values, from, n * moment_bytes(z));
    for (size_t i = 0; i < n && bf16; i++) values[i] = moment_widen(halves[i]);
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
        put_moments(z, moment(z, array, own.at), values, own.count);
}

void zero_get(Zero *z, ZeroArray array, size_t offset, float *values, size_t n) {
    const ShardPart own = own_part(z, offset, offset + n);
    const size_t at = own.at - offset;
    if (own.count && array == ZERO_WEIGHTS)
        weights_to_host(values + at, z->weights + own.at, low_bits(z, own.at), own.count);
    else if (own.count)
        get_moments(z, values + at, moment(z, array, own.at), own.count);
    if (z->settings.num_ranks > 1) comm_merge(values, z->shards, offset, offset + n);
}
