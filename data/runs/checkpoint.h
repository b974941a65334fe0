// Checkpoints that survive kill -9, power loss, a full disk and a flipped bit. Knows no model.
//
//   begin     makes <out>/step-00000100.unpad.tmp-<pid>/
//   ...       files are written into it by FileWriter, fsynced, registered with size and CRC32C
//   publish   writes manifest.json last; fsyncs all; renames to step-00000100; fsyncs <out>
//   prune     removes older ones only then, after it has renamed them
//
// manifest.json has the size and CRC32C of every file; its own last line is the CRC32C of all bytes
// before it, so that no flipped bit is missed.
// A directory under its final name is therefore complete, or was damaged later, which its manifest
// shows. It is removed or replaced only if it holds nothing but what its manifest names, with its
// size. Nothing is rewritten in place, there is no "latest" file, and no time stamp decides
// anything. One writer at a time: hold dir_lock(out_dir) around all of this (readers need no lock).
#pragma once

#include <jansson.h>

#include "../base/path.h"

typedef struct {
    char out_dir[IO_PATH_MAX];
    char dir[IO_PATH_MAX];      // being written
    char publish[IO_PATH_MAX];  // its final name
    int64_t step;
    json_t *files;  // of the manifest; NULL: nothing is being written
} Checkpoint;

// <out_dir>/step-00000100; exits as path_in does
const char *checkpoint_step_path(char path[IO_PATH_MAX], const char *out_dir, int64_t step);

// "step-00000100" -> 100; false for anything that would not be printed that way.
bool checkpoint_parse_step(const char *name, int64_t *step);

// ---- Writing ------------------------------------------------------------------------------------

// Makes the temporary directory. name: "final" for the published model, NULL for step-%08ld. The
// directory of shards has step -1.
bool checkpoint_begin(Checkpoint *ck, const char *out_dir, int64_t step, const char *name,
                      Error *err);

// Adds a file of ck->dir, closed and fsynced, to the manifest.
void checkpoint_register(Checkpoint *ck, const char *file, uint64_t size_bytes, uint32_t crc);

// Registers every file of ck->dir, without a checksum, and no other.
bool checkpoint_register_all(Checkpoint *ck, Error *err);

// A whole small file: written, fsynced, registered.
bool checkpoint_write_file(Checkpoint *ck, const char *file, const void *data, size_t n,
                           Error *err);

// The same for a text, which it frees.
bool checkpoint_write_text(Checkpoint *ck, const char *file, char *text, Error *err);

// All or nothing. An older checkpoint of that name is renamed away first and removed afterwards, or
// kept as final.kept-<pid>, with a warning, where it holds more. On failure the temporary directory
// is removed, and the older one is still there.
bool checkpoint_publish(Checkpoint *ck, Error *err);

// Removes the temporary directory; does nothing after publish. Safe to call twice.
void checkpoint_abort(Checkpoint *ck);

// ---- The checkpoints of a directory -------------------------------------------------------------

// The numbers of all step-*, newest first; freed at the end of its block. No directory: none.
typedef struct {
    int64_t *list;  // (n)
    int n;
} Steps;
void steps_free(Steps *steps);
#define STEPS __attribute__((cleanup(steps_free))) Steps
bool checkpoint_list(Steps *steps, const char *out_dir, Error *err);

// At program start, under the lock: removes temporary directories that a killed run left, and
// undoes replacements that it did not complete.
bool checkpoint_recover(const char *out_dir, Error *err);

// Removes checkpoints older than the `keep` newest of those <= step, and stale temporary
// directories. keep 0: all are kept. So is one with other files in it, with a warning when its turn
// comes, and a directory without a manifest. Its failure does no harm: warn and train on.
bool checkpoint_prune(const char *out_dir, int64_t step, int keep, Error *err);

// May a directory be removed or replaced? EXIT_USAGE where it holds anything but the files that its
// manifest names, with their sizes. A link may: its target stays.
bool checkpoint_is_ours(const char *dir, Error *err);

// The same of every checkpoint and final/
bool checkpoint_may_remove_all(const char *out_dir, Error *err);

// Removes every checkpoint and final/, for a run that starts over. After a kill in between, either
// the newest one is still there or none is.
bool checkpoint_remove_all(const char *out_dir, Error *err);

// Reads every file that manifest.json names and compares sizes and checksums; exit 3 where they
// differ. step may be NULL.
bool checkpoint_verify(const char *dir, int64_t *step, Error *err);

// The same for a model that may have a manifest. Files of another size than the manifest's have
// been edited, and are not checked.
bool checkpoint_verify_model(const char *dir, Error *err);

// The newest (by number) step-* that checkpoint_verify accepts: its path and *step. Warns of each
// damaged one that is skipped. True with *step = -1 when there is none at all; false when all are
// damaged.
bool checkpoint_find_newest(const char *out_dir, char path[IO_PATH_MAX], int64_t *step, Error *err);
