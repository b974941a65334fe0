// Checkpoints that survive kill -9, power loss, a full disk and a flipped bit. Knows no model.
//
//   begin     <out>/step-00000100.tmp-<pid>/ is made
//   ...       files are written into it by FileWriter, fsynced, registered with size and CRC32C
//   publish   manifest.json last; fsync all; rename to step-00000100; fsync <out>
//   prune     only then older ones go, their manifest first
//
// A directory under its final name is therefore complete, or damaged later and found out by its
// manifest. Nothing is rewritten in place, there is no "latest" file, and no time stamp decides
// anything. One writer at a time: hold dir_lock(out_dir) around all of this (readers need no lock).
#ifndef UNPAD_CHECKPOINT_H
#define UNPAD_CHECKPOINT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "../base/path.h"

enum { CHECKPOINT_MAX_FILES = 512, CHECKPOINT_NAME_MAX = 128 };

typedef struct {
    char name[CHECKPOINT_NAME_MAX];
    uint64_t size_bytes;
    uint32_t crc;
} CheckpointFile;

typedef struct {
    char out_dir[IO_PATH_MAX];
    char dir[IO_PATH_MAX];      // being written; pass checkpoint_path() names in it to writers
    char publish[IO_PATH_MAX];  // what it will be renamed to
    int64_t step;
    int num_files;
    bool active;  // dir exists and is ours
    CheckpointFile files[CHECKPOINT_MAX_FILES];
} Checkpoint;

// Called once for each damaged checkpoint passed over, newest first.
typedef void (*CheckpointReport)(void *context, const char *dir, const Error *why);

// ------------------------------------------------------------------------------------------------
// Names

// "step-00000100" -> 100; false for anything that would not be printed that way.
bool checkpoint_parse_step(const char *name, int64_t *step);

// ------------------------------------------------------------------------------------------------
// Writing

// Removes the temporary directory; does nothing after publish. Safe to call twice.
void checkpoint_abort(Checkpoint *ck);

// Makes the temporary directory. name: NULL = "step-%08lld", or "final" for the published model.
// About 90 KB of struct: make it static or part of a long-lived one rather than a local of a
// thread.
bool checkpoint_begin(Checkpoint *ck, const char *out_dir, int64_t step, const char *name,
                      Error *err);

// <temporary dir>/<file>, for safetensors_create() or writer_open().
bool checkpoint_path(const Checkpoint *ck, const char *file, char *path, size_t capacity,
                     Error *err);

// A file in that directory is finished (closed and fsynced): enter it into the manifest.
bool checkpoint_register(Checkpoint *ck, const char *file, uint64_t size_bytes, uint32_t crc,
                         Error *err);

// A whole small file: written, fsynced, registered.
bool checkpoint_write_file(Checkpoint *ck, const char *file, const void *data, size_t n,
                           Error *err);

// ------------------------------------------------------------------------------------------------
// Manifest: JSON whose last line is the CRC32C of all bytes before it, so that no flipped bit goes
// unseen

enum { CHECKPOINT_TAIL = 36 };  // bytes of the line below

void checkpoint_tail(char *text, size_t capacity, uint32_t crc);

// ------------------------------------------------------------------------------------------------
// Publishing

// All or nothing. An older checkpoint of that name is renamed away first and removed afterwards. On
// failure the temporary directory is removed and whatever was there before is still there.
bool checkpoint_publish(Checkpoint *ck, Error *err);

// ------------------------------------------------------------------------------------------------
// Housekeeping

// All step-* numbers in the directory, newest first; the caller frees *steps. No directory: none.
bool checkpoint_list(const char *out_dir, int64_t **steps, int *count, Error *err);

// At program start, under the lock: finishes or undoes what a killed run left (tmp removed, old put
// back).
bool checkpoint_recover(const char *out_dir, Error *err);
bool checkpoint_has_manifest(const char *out_dir, int64_t step);

// Removes checkpoints older than the `keep` newest of those <= step, and stale temporary
// directories. keep 0 = keep all. Its failure does not harm the checkpoint: warn and train on.
bool checkpoint_prune(const char *out_dir, int64_t step, int keep, Error *err);

// Removes every checkpoint and final/, for a run that starts over. Killed in between, either the
// newest one is still there or none is.
bool checkpoint_remove_all(const char *out_dir, Error *err);

// ------------------------------------------------------------------------------------------------
// Verifying

bool checkpoint_verify_manifest(const char *dir, const cJSON *root, int64_t *step, Error *err);
cJSON *checkpoint_parse_manifest(const char *text, uint64_t n, const char *path, Error *err);

// The manifest and every file's size and CRC32C. step may be NULL.
bool checkpoint_verify(const char *dir, int64_t *step, Error *err);

// The newest (by number) step-* that verifies: its path and *step. True with *step = -1 when there
// is none at all; false when there are some and none is good, or on lack of memory. report may be
// NULL.
bool checkpoint_find_newest(const char *out_dir, char *path, size_t capacity, int64_t *step,
                            CheckpointReport report, void *context, Error *err);

#endif
