// Loads batches one step ahead: a thread plans the next step and reads its tokens while the current
// one trains.
//
// The contents of a step depend on the settings and the state only, so a loader gives the same
// steps as loader_load_step does for the same states. Failures of the thread are returned by
// loader_next.
#pragma once

#include <pthread.h>
#include <semaphore.h>

#include "../shards/dataset.h"
#include "pairs.h"

typedef struct {
    PlanSettings plan;
    Layout layout;
    int32_t rank, num_ranks;  // only this rank's micro-batches are read; 0, 1: a single process
    int32_t source;           // > 0: documents of this source alone, counted from 1
    bool deterministic_reduction;  // a rank's micro-batches are contiguous, not chosen by work
    PairSettings pairs;            // if plan.pairs
} LoaderSettings;

typedef struct {
    Batch *micro;  // (num_micro) this rank's micro-batches; all valid
    int32_t num_micro;
    int32_t *own_micros;   // (num_micro) their numbers in the plan
    int64_t local_tokens;  // rows that the layers of this rank work on, padding included
    double imbalance;      // predicted, of all ranks: see plan_rank_micros
    StepPlan plan;         // of the whole step, all ranks
    // kept from step to step
    int32_t num_allocated;
    int32_t *tokens;
    DocView *views;
    size_t token_capacity, own_capacity, view_capacity;
} StepData;

typedef struct {
    Dataset *dataset;
    LoaderSettings settings;
    PlanState next;  // of the step that the thread loads next
    StepData slots[2];
    sem_t empty, full;  // slots that the thread may fill, and slots that wait for the trainer
    int current;        // the slot that the trainer uses; -1 before the first step
    bool failed[2];     // by slot
    Error error;        // why the thread ended
    bool running;
    _Atomic bool stop;
    pthread_t thread;
} Loader;

// The lengths of a data set, for plan_step; *ds must outlive it.
DocIndex dataset_doc_index(const Dataset *ds);

// Loads the step at `state` into *out, which is {0} at first, may be used again, and is freed by
// step_data_free. A running loader may use the same data set.
bool loader_load_step(StepData *out, Dataset *ds, const LoaderSettings *s, PlanState state,
                      Error *err);
void step_data_free(StepData *d);

// The documents of the first of d's micro-batches, read again and packed, in its order. *docs is
// initialised here, and freed by batch_free.
bool step_data_documents(Batch *docs, StepData *d, Dataset *ds, const LoaderSettings *s,
                         Error *err);

// Reads a segment into tokens (3 * length + 1), to which *view then points: the segment, the token
// after it if there is one, and if there are loss masks, the targets and the weights, times
// weight_scale.
bool segment_read(DocView *view, Dataset *ds, const Segment *c, double weight_scale,
                  int32_t *tokens, Error *err);

// Starts loading at `state` ({0}: the beginning) in a thread, which fills two slots in turn, each
// after the trainer has released it; the data set must outlive the loader. Fails on bad settings
// (EXIT_USAGE) or when no thread can be started (EXIT_HOST_MEMORY).
bool loader_start(Loader *l, Dataset *ds, const LoaderSettings *s, PlanState state, Error *err);

// The next step, valid until the next call; waits until it is loaded. NULL with *err filled when
// planning or reading it failed, after the steps that were loaded before the failure.
const StepData *loader_next(Loader *l, Error *err);

// Waits for the step being loaded and frees everything; safe after a failed start and a second
// time.
void loader_stop(Loader *l);
