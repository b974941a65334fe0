// ZeRO-1 (arXiv 1910.02054): one optimizer step that several ranks share. Each rank adds up the
// gradients of its own micro-batches. These are summed over the ranks, each rank updates one shard
// of the weights, whose optimizer state it alone has, and then all ranks gather the weights.
//
// It knows no layer: weights and gradients are flat arrays. Gradients leave while backward still
// runs in the last micro-batch, and weights arrive while the next forward pass has begun. With
// deterministic sums they leave after it, and are added along the tree of data/base/sum_tree.h, so
// that the bits do not depend on the number of ranks. A single rank makes the same calls.
#pragma once

#include "../../data/base/sum_tree.h"
#include "../arena.h"
#include "../kernels.h"
#include "../muon.h"

typedef struct {
    int32_t rank, num_ranks;  // num_ranks 0: alone
    bool deterministic;
    int32_t num_leaves;      // of the tree
    int32_t num_losses;      // most partial sums that the losses of a step or a validation have
    int64_t most_documents;  // whose losses they tell apart: as many as tokens; 0: none
    bool bf16_moments;       // half the memory; `seed` rounds them
    uint64_t seed;
} ZeroSettings;

// A matrix that Muon updates: no shard cuts it. Matrix i + num_kinds has the shape of matrix i, and
// all such pairs lie equally far apart.
typedef struct {
    size_t first;  // element
    int64_t rows, cols;
} ZeroMatrix;

// Elements first .. last - 1, which are sent together
typedef struct {
    size_t first, last;
    uint64_t weights;  // handle of comm_gather_begin
} ZeroBucket;

typedef struct {
    bool train;  // false: neither gradients nor moments
    size_t num_elements;
    size_t num_decayed;  // weight decay applies to the first ones
    // Every micro-batch adds to the gradients of the first num_added elements and of the elements
    // that do not decay. The first micro-batch of a sum overwrites all other gradients.
    size_t num_added;
    // zero_free frees both arrays. AdamW updates what lies before the first matrix and after the
    // last; buckets are in the order in which forward needs their weights.
    ZeroMatrix *matrices;
    ZeroBucket *buckets;
    int num_matrices, num_kinds, num_buckets;
} ZeroShape;

// A note that travels with the losses, so that a step needs no extra exchange: the time of the
// rank's micro-batches in the previous step, and the signal that asks it to stop, 0: none.
typedef struct {
    double passes_ms, signal;
} RankNote;

// The smallest part that ranks divide: a block of AdamW's elements, or a matrix. One rank updates
// it and sums its squares, so that the bits do not depend on the number of ranks.
typedef struct {
    size_t first;  // element
    double cost;   // of its update, in FLOPs
} ZeroPart;

typedef struct {
    ZeroSettings settings;
    ZeroShape shape;
    ZeroPart *parts;  // (num_parts + 1), the last is empty
    int num_parts;
    size_t *shards;                   // (num_ranks + 1) rank r's are shards[r] to shards[r+1] - 1
    size_t shard_first, shard_count;  // this rank's
    size_t matrices_first, matrices_last;  // elements first .. last - 1
    // device: the caller's arrays, and what this rank alone has of its shard; v leaves out the
    // elements from matrices_first to matrices_last
    floatX *weights;
    real *grads;
    uint16_t *master_lo;
    void *m, *v;  // see Moments
    // deterministic sums: this rank's current leaf and its last + 1; its partial sums so far, from
    // left to right, the last in grads, those before it in partial
    int32_t leaf, end_leaf;
    SumNode nodes[SUM_MAX_NODES];
    int num_nodes, num_partial, num_collected;
    real *partial;    // (num_partial, num_elements)
    real *collected;  // (num_collected, num_ranks, block) all partial sums of a block of the shard
    size_t block;
    bool has_grads;         // of earlier micro-batches of this sum: the next one adds to them
    bool last_micro_batch;  // of this rank: gradients leave as soon as a bucket is complete
    int num_unsent;         // buckets whose gradients have not left
    uint64_t reduced;       // last handle of comm_reduce_begin
    // device, and as the host has read them: loss sum, gradient norm, clip factor; after them the
    // notes of all ranks, the losses of documents and, on the device, loss_partials
    StepScalars *step, *step_host;
    int64_t num_documents;  // of the next sum of losses, or of this one
    double *documents;      // (num_documents) each is written by one rank
    double *loss_sum;       // device: where the losses of a micro-batch are added
    double *loss_partials;  // (num_losses)
    double *norm_partials;  // (num_parts) squares of the gradients of each part
    RankNote note;          // of this rank, for the next sum of losses
    MuonScratch muon;
} Zero;

// Everything but the memory
void zero_plan(Zero *z, ZeroSettings settings, ZeroShape shape);
// Takes this rank's buffers from four arenas, or measures them.
void zero_carve(Zero *z, floatX *weights, real *grads, Arena *of_weights, Arena *of_grads,
                Arena *of_optimizer, Arena *workspace);
void zero_free(Zero *z);

// Starts a step, of num_documents, which is set before: neither gradients nor losses.
void zero_begin_step(Zero *z);
// Starts number `micro` of the num_micro micro-batches of the whole step; this rank's are in
// ascending order. last: it is this rank's last one.
void zero_begin_micro_batch(Zero *z, int32_t micro, int32_t num_micro, bool last);
// The micro-batch has added all of its gradients in this bucket. Backward completes the buckets
// from the last one to bucket 0.
void zero_grads_done(Zero *z, int bucket);
// After the last micro-batch: this rank's shard of the gradients becomes the sum over all ranks, or
// zeros if none of them had a micro-batch.
void zero_reduce(Zero *z);
// Gradient norm, clip factor, AdamW and Muon, on the device: a non-finite loss or norm changes no
// weight. Overwrites gradients, and sends the weights.
void zero_update(Zero *z, AdamW hyper, float grad_clip);
// Later work waits until the weights of this bucket and of those before it have arrived.
void zero_await_weights(Zero *z, int bucket);

// Losses are added to *loss_sum, and go to documents[i] one by one. A validation calls begin,
// select before each addition (the partial sum must be one that no other rank adds to) and sum; a
// step does so by itself.
void zero_begin_losses(Zero *z, int64_t num_documents);
void zero_select_losses(Zero *z, int32_t partial);
void zero_sum_losses(Zero *z);
// Waits until step_host has the loss sum, gradient norm, clip factor, notes and documents.
StepScalars zero_read_step(Zero *z);
static inline RankNote *zero_notes(StepScalars *step) { return (RankNote *)(step + 1); }
// The losses of documents, on all ranks; NULL: they are not told apart
static inline const double *zero_documents(const Zero *z) {
    const RankNote *notes_end = zero_notes(z->step_host) + z->settings.num_ranks;
    return z->settings.most_documents > 0 ? &notes_end->passes_ms : NULL;
}

// Elements offset .. offset + n - 1 from and to fp32 on the host. Weights after num_elements are
// frozen: every rank has them.
typedef enum { ZERO_WEIGHTS, ZERO_M, ZERO_V } ZeroArray;
void zero_put(Zero *z, ZeroArray array, size_t offset, const float *values, size_t n);
// All ranks call: rank 0 gets the values, except frozen weights, from the ranks that hold them.
void zero_get(Zero *z, ZeroArray array, size_t offset, float *values, size_t n);
