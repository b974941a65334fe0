// The output directory of a run: the lock for one writer, the checkpoint that --resume takes, the
// model that --overwrite must keep, and the space for the checkpoints to come.
#pragma once

#include "../base/dir.h"

typedef struct {
    const char *path;  // not owned
    DirLock lock;
    bool locked;
} OutDir;

// Rank 0: makes this run the only writer; EXIT_DIR_IN_USE when there is another one. Removes the
// leftovers of a killed run. Warns where the file system has no locks. EXIT_DISK when its log or
// its lock is a link, or no file. A second call does nothing.
bool out_dir_lock(OutDir *out, Error *err);

typedef struct {
    char dir[IO_PATH_MAX];  // the checkpoint; empty: none, training starts from scratch
    bool in_place;          // it is the newest of the output directory, whose log continues
} ResumePoint;

// resume: a checkpoint, or the directory of a run, or "newest": `out`. Of a run the newest valid
// one is taken, after a warning for each damaged one. trains: the run will write to `out`, which
// must then hold no newer checkpoint than a named one.
bool out_dir_find_resume(const char *out, const char *resume, bool trains, ResumePoint *point,
                         Error *err);

enum { MAX_FAILED_SAVES = 3 };  // in a row: then the run ends

// A bare --resume that found no checkpoint: with --train on the command line a fresh start; fails
// without, and where checkpoints must have been. save_every: of the run that is there; 0 or less:
// not known, or by time.
bool out_dir_start_from_scratch(const char *out, bool train_given, int64_t save_every, Error *err);

// The last step in the log of the run; -1: there is no log. EXIT_USAGE where it is another file.
bool out_dir_last_step(const char *out, int64_t *last, Error *err);

// Fails where a later save of another run would remove `out`: in a checkpoint or in final/.
bool out_dir_is_outside_models(const char *out, Error *err);

// Fails when --overwrite would remove the directory of --model or --adapter, `option`: final/ or a
// checkpoint of `out`.
bool out_dir_keeps_model(const char *out, const char *option, const char *model, Error *err);

// Fails if a run or a model is there; overwrite: only if anything in them is not of this program.
bool out_dir_is_free(const char *out, bool overwrite, Error *err);

// Creates and locks the directory and tries to write in it. A run that is there is an error unless
// this one continues it. overwrite: its checkpoints are removed.
bool out_dir_open(OutDir *out, bool continues, bool overwrite, Error *err);

// Warns when less is free than the checkpoints of `steps` more steps and final/ will take; an error
// (exit 4) when not even the last of them and final/ fit. save_every 0: only at the end, below 0:
// by time; keep 0: all.
bool out_dir_check_space(const char *out, uint64_t checkpoint_bytes, uint64_t final_bytes,
                         int64_t steps, int64_t save_every, int keep, Error *err);
