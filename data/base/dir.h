// Directories: create, sync, remove, probe, and lock for one writer. Failures are EXIT_DISK unless
// noted.
#pragma once

#include "path.h"

// mkdir -p, durable where the parent may be read (fsync needs that); EXIT_USAGE: a file is there
bool dir_create_all(const char *path, Error *err);

// Makes renames and new names in the directory durable.
bool dir_sync(const char *path, Error *err);

// rename(2); durable only after dir_sync.
bool io_rename(const char *from, const char *to, Error *err);

// Puts a file of these n bytes in the place of another, which is not written to: it may have other
// names. Durable after dir_sync.
#define FILE_REPLACED ".unpad.tmp"  // follows the name of a file that a kill has left
bool file_replace(const char *path, const void *data, uint64_t n, Error *err);

// rm -r; symbolic links are removed, not followed, the path itself included. A path that does not
// exist is not an error.
bool dir_remove_tree(const char *path, Error *err);

// Tries everything a checkpoint needs on a small file: create, write, fsync, rename, remove. A run
// fails before step 0 instead of at its first checkpoint hours later. A kill leaves a name that
// ends in FILE_REPLACED.
bool dir_probe(const char *dir, Error *err);

// <path><mark><number>, which does not exist: the number of this process, or one after it.
bool dir_free_name(char name[IO_PATH_MAX], const char *path, const char *mark, Error *err);

// ---- One writer per directory -------------------------------------------------------------------

typedef struct {
    int fd;      // -1: not locked
    int dir_fd;  // the directory itself, even after a rename
} DirLock;

// Locks <dir>/.lock until the process ends. EXIT_DIR_IN_USE when another process still holds it
// after five seconds; only a warning where the file system has no locks. The kernel frees the lock
// of a dead owner, so a stale file needs no cleaning; its text only serves the error message.
bool dir_lock(DirLock *lock, const char *dir, Error *err);

// Fails unless the path still leads to the directory that was locked: a directory put in its place
// may belong to another run.
bool dir_lock_check(const DirLock *lock, const char *dir, Error *err);
