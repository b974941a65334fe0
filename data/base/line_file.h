// A log file: lines that are appended whole or not at all. Failures are EXIT_DISK.
#ifndef UNPAD_LINE_FILE_H
#define UNPAD_LINE_FILE_H

#include "error.h"
#include "path.h"

typedef struct {
    int fd;              // -1: not open
    int64_t size_bytes;  // of whole lines: the offset of the next one
    int64_t lost;        // lines that could not be written; reset by the caller
    char path[IO_PATH_MAX];
} LineFile;

// Opens or creates the file; empty: deletes its contents.
bool lines_open(LineFile *f, const char *path, bool empty, Error *err);
void lines_close(LineFile *f);

// Truncates the file to the lines that end within its first keep_bytes. *removed: how many lines
// followed them, an incomplete last one included.
bool lines_cut(LineFile *f, int64_t keep_bytes, int64_t *removed, Error *err);

// Appends the n bytes of a line, newline included. On failure the file keeps its previous length
// and f->lost is incremented.
bool lines_append(LineFile *f, const char *line, size_t n, Error *err);

// Waits until everything appended is on disk. A file that is not open is not an error.
bool lines_sync(const LineFile *f, Error *err);

#endif
