// Batches one step ahead: a thread plans the next step and reads its tokens while this one trains.
//
// What a step contains depends on the settings and the state only, so a loader gives what
// loader_load_step gives for the same state. Failures of the thread come out of loader_next.
#ifndef UNPAD_LOADER_H
#define UNPAD_LOADER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "batch.h"
#include "plan.h"
#include "../shards/dataset.h"

typedef struct {
    PlanSettings plan;
    Layout layout;
    int32_t rank, num_ranks;  // only this rank's micro-batches are read; 0, 1 alone
    bool in_order;  // a rank's micro-batches follow each other (plan_rank_block); else equal work
    // > 0: packed micro-batches get the plan's capacity of rows and this many segments, where their
    // documents leave room for that
    int32_t fixed_segments;
} LoaderSettings;

typedef struct {
    Batch *micro;  // (num_micro) this rank's micro-batches
    int32_t num_micro;
    int32_t *own_micros;   // (num_micro) their numbers in the plan
    int64_t local_tokens;  // rows that the layers of this rank work on, padding included
    // the rest is of the whole step, all ranks
    int64_t step;                      // 0-based
    int64_t num_targets, real_tokens;  // the same in every layout
    int64_t num_chunks;                // documents, or chunks of long ones
    int64_t total_tokens;              // rows that the layers work on, padding included
    int64_t capacity_tokens;           // micro-batches * C
    int64_t attention_pairs;           // what attention computes in this layout, but for segments
                                       // that only fill up to fixed_segments
    int64_t real_pairs;                // sum of l(l+1)/2 over chunks: packed
    int64_t padded_pairs;              // S(S+1)/2 for every chunk: padded
    int64_t padded_tokens;             // S for every chunk
    int32_t longest_doc;               // longest chunk
    double imbalance;                  // predicted: see plan_imbalance
    PlanState cursor_after;            // the state once this step is trained
    StepPlan plan;
    // kept from step to step
    int32_t num_allocated;
    int32_t *tokens;
    DocView *views;
    size_t token_capacity, own_capacity, view_capacity;
} StepData;

typedef struct {
    Dataset *dataset;
    LoaderSettings settings;
    PlanState next;  // of the step that the thread does next
    StepData slots[2];
    bool filled[2];  // by the thread; emptied by loader_next
    int current;     // the slot the trainer holds, -1 before the first
    bool stop, running;
    Error error;  // why the thread ended
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} Loader;

// -------------------------------------------------------------------------------------------------
// One step

DocIndex dataset_doc_index(const Dataset *ds);
void step_data_free(StepData *d);

// The step at `state` into *out, which is {0} at first and may be used again. Nothing is shared
// with a loader that runs, except the data set, which may be.
bool loader_load_step(StepData *out, Dataset *ds, const LoaderSettings *s, PlanState state,
                      Error *err);

// -------------------------------------------------------------------------------------------------
// The thread: fills the two slots in turn, each once the trainer has left it

// The data set must outlive the loader; state {0} is the beginning. The first step is loaded at
// once in the background; its failure comes out of the first loader_next.
bool loader_start(Loader *l, Dataset *ds, const LoaderSettings *s, PlanState state, Error *err);

// The next step, valid until the next call. NULL with *err filled when planning or reading it
// failed; steps that were loaded before the failure still come first.
const StepData *loader_next(Loader *l, Error *err);

// Waits for the step being loaded; safe after a failed start and when called twice.
void loader_stop(Loader *l);

#endif
