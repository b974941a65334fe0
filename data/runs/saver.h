// Writes a checkpoint in a thread, from a snapshot of the parameters in host memory, while training
// continues.
#ifndef UNPAD_SAVER_H
#define UNPAD_SAVER_H

#include <pthread.h>

#include "../base/error.h"
#include "../models/weights.h"

typedef bool (*SaveFunction)(const void *context, Parameters p, Error *err);

typedef struct {
    size_t bytes, stride;  // bytes of the snapshot; 0: there is none, saves are waited for
    float *snapshot;       // (ARENA_V + 1, stride); NULL before the first save, or if refused
    SaveFunction write;
    const void *context;
    Parameters parameters;
    pthread_t thread;
    bool running, ok;
    _Atomic bool done;
    Error err;
    double ms;  // that the save took
} Saver;

// Plans a snapshot of parameter arenas of `stride` elements, if the host has room for it beside
// `taken` bytes that are allocated later. The first save allocates it: with ulimit -v, only what
// the model leaves. A program that exits waits for the thread.
void saver_open(Saver *s, size_t stride, size_t taken);

// Calls `write`, in the thread when the parameters are in the snapshot; without one, or with wait,
// before it returns. Until the save has ended context must not change, and no other one start.
void saver_start(Saver *s, bool wait, SaveFunction write, const void *context, Parameters p);

// True once after each save: it has ended, with s->ok, s->err and s->ms. wait: until it has, and
// io_progress is called as the thread makes progress.
bool saver_ended(Saver *s, bool wait);

#endif
