// Files: read whole or in exact ranges, written with a checksum and synced before they are closed.
#ifndef UNPAD_FILE_H
#define UNPAD_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "error.h"
#include "path.h"

#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // flock, O_CLOEXEC under -std=c11; include this header first
#endif

// ------------------------------------------------------------------------------------------------
// Reading

typedef struct {
    int fd;
    uint64_t size_bytes;  // as it was at open
    const char *path;     // not owned
} File;

// open(2), patient with signals.
int io_open(const char *path, int flags, mode_t mode);

// For the start of main: where descriptor 0, 1 or 2 is closed it becomes /dev/null, else the next
// file to be opened would take the number, and what is printed would go into it.
void io_open_standard_streams(void);
bool file_open(File *f, const char *path, const char *hint, Error *err);
void file_close(File *f);

// Exactly n bytes at offset, or an error that names the range and the size.
bool file_read_at(const File *f, void *buffer, uint64_t n, uint64_t offset, Error *err);

// A whole small file, 0-terminated, in memory the caller frees; NULL on error or above max_bytes.
char *file_read_all(const char *path, uint64_t max_bytes, uint64_t *n, const char *hint,
                    Error *err);

// ------------------------------------------------------------------------------------------------
// Writing

typedef struct {
    int fd;
    uint64_t size_bytes;  // of what was meant to be written
    uint32_t crc;  // CRC32C of the same, computed from memory: the disk is not asked what it got
    uint64_t unsynced;  // bytes written since the last fsync
    size_t buffered;
    char path[IO_PATH_MAX];
    unsigned char buffer[IO_BUFFER];
} FileWriter;

// Makes a new file; one of that name must not exist.
bool writer_open(FileWriter *w, const char *path, Error *err);

// Closes and removes an unfinished file; does nothing to a finished one.
void writer_abort(FileWriter *w);

// fsync may be interrupted, but an I/O error is final: the kernel has dropped the dirty pages, and
// a second fsync would report success for data that is gone.
bool io_fsync(int fd);

// Any failure closes and removes the file; later calls fail too.
bool writer_write(FileWriter *w, const void *data, uint64_t n, Error *err);

// On disk when it returns true. After false the file is gone.
bool writer_close(FileWriter *w, Error *err);

// Called after each part of a long read or write; NULL: nobody wants to know.
extern void (*io_progress)(void);

#endif
