// Paths in bounded buffers: too long is an error, never a shorter path.
#ifndef UNPAD_PATH_H
#define UNPAD_PATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "error.h"

enum {
    IO_PATH_MAX = 4096,  // Linux's own limit, with the terminating 0
    IO_BUFFER = 1 << 16,
    IO_PART = 1 << 26,    // most bytes of one read or write, and between two fsyncs
    IO_MAX_EINTR = 1000,  // interruptions in a row before a call counts as failed
};

// ------------------------------------------------------------------------------------------------
// Paths

// printf into a path buffer; too long is an error, never a shorter path.
__attribute__((format(printf, 4, 5))) bool path_printf(char *out, size_t capacity, Error *err,
                                                       const char *format, ...);
bool path_join(char *out, size_t capacity, const char *dir, const char *name, Error *err);

// The directory a path is in: "a/b" -> "a", "b" -> ".", "/b" -> "/".
bool path_parent(char *out, size_t capacity, const char *path, Error *err);
bool path_is_dir(const char *path);
bool path_exists(const char *path);

// A name that stays in its directory: no slash, no leading dot, not empty, printable.
bool path_is_plain_name(const char *name);
bool disk_error(Error *err, const char *path, const char *what);

#endif
