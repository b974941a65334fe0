// Writes a checkpoint in a thread, from a snapshot of the parameters in host memory, while training
// continues.
#pragma once

#include <pthread.h>

#include "../models/weights.h"
#include "checkpoint_files.h"
#include "log.h"
#include "run_data.h"
#include "run_options.h"

// The sources of a checkpoint, except the parameters
typedef struct {
    const Options *o;
    const Data *data;
    const LlamaConfig *config;
    const DirLock *lock;  // of --out
    const char *version;
    bool writes;  // rank 0 writes all files; the others only take part in gathering the parameters
    RunLog log, ledger;  // are synced first
    TrainingState state;
} SaveJob;

// Writes step-NNNNNNNN with all state, or, with the name "final", the model alone.
bool save_checkpoint(const SaveJob *job, const char *name, Parameters p, Error *err);

typedef struct {
    size_t bytes, stride;  // bytes of the snapshot; 0: there is none, saves are waited for
    float *snapshot;       // (ARENA_V + 1, stride); NULL before the first save, or if refused
    SaveJob job;           // of the save that is running, or ran last
    Parameters parameters;
    pthread_t thread;
    bool running, ok;
    _Atomic bool done;
    Error err;
    double ms;  // that the save took
} Saver;

// Plans a snapshot of parameter arenas of `stride` elements, if the host has room for it and for
// `taken` bytes that are allocated later. The first save allocates it: with ulimit -v, only what
// the model leaves. A program that exits waits for the thread.
void saver_open(Saver *s, size_t stride, size_t taken);

// Writes a step's checkpoint and then removes the oldest beyond --keep, in the thread once the
// parameters are in the snapshot; without one, or with wait, before it returns. No other save may
// start until this one has ended.
void saver_start(Saver *s, bool wait, SaveJob job, Parameters p);

// True once after each save: it has ended, with s->ok, s->err and s->ms. wait: until it has, and
// io_progress is called as the thread makes progress.
bool saver_ended(Saver *s, bool wait);
