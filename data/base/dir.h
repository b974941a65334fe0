// Directories: made, synced, removed, probed, and locked for one writer.
#ifndef UNPAD_DIR_H
#define UNPAD_DIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

// ------------------------------------------------------------------------------------------------
// Directories

bool dir_create(const char *path, Error *err);

// mkdir -p
bool dir_create_all(const char *path, Error *err);

// Makes renames and new names in the directory durable.
bool dir_sync(const char *path, Error *err);
bool io_rename(const char *from, const char *to, Error *err);

// rm -r; symbolic links are removed, not followed. A path that does not exist is fine.
bool dir_remove_tree(const char *path, Error *err);

// The whole file or the old one: temporary, fsync, rename, fsync of the directory.
bool file_write_all(const char *path, const void *data, size_t n, Error *err);
bool disk_free_bytes(const char *path, uint64_t *out, Error *err);

// Can a checkpoint be written here? Everything one needs is tried on a small file: exit 4 before
// step 0, not at the first save hours later.
bool dir_probe(const char *dir, Error *err);

// ------------------------------------------------------------------------------------------------
// One writer per directory

typedef struct {
    int fd;      // -1 = not locked
    bool works;  // false: this file system has no locks; nothing guards the directory, so warn
    int dir_fd;  // the directory, whatever its path leads to by now
} DirLock;

// Takes <dir>/.lock for as long as the process lives or until dir_unlock. The kernel frees the lock
// of a dead owner, so there is nothing to clean up; the text in it only serves the message.
bool dir_lock(DirLock *lock, const char *dir, Error *err);

// Does the path still lead to the directory that was locked? Another one in its place may be
// somebody else's.
bool dir_lock_check(const DirLock *lock, const char *dir, Error *err);
void dir_unlock(DirLock *lock);

#endif
