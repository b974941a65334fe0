// A log: lines that are appended whole or not at all, and cut at a line.
#ifndef UNPAD_LINE_FILE_H
#define UNPAD_LINE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"
#include "path.h"

// ------------------------------------------------------------------------------------------------
// Logs

typedef struct {
    int fd;              // -1: not open
    int64_t size_bytes;  // of whole lines: where the next one begins
    int64_t lost;        // lines that could not be written since the last one that could
    char path[IO_PATH_MAX];
} LineFile;

// Opens or makes the file, emptied if `empty`; else size_bytes is that of the file.
bool lines_open(LineFile *f, const char *path, bool empty, Error *err);
void lines_close(LineFile *f);

// Cuts the file to the lines that end within the first keep_bytes. *removed: those after them, the
// last of which may be a piece of one.
bool lines_cut(LineFile *f, int64_t keep_bytes, int64_t *removed, Error *err);

// Appends the n bytes of a line with its newline. On failure nothing of it is left in the file, and
// f->lost counts it.
bool lines_append(LineFile *f, const char *line, size_t n, Error *err);

// What has been appended is on disk when it returns true.
bool lines_sync(const LineFile *f, Error *err);

#endif
