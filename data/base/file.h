// Files: read whole or in exact ranges, written with a checksum and synced before they are closed.
#pragma once

#include <sys/types.h>

#include "path.h"

enum {
    IO_BUFFER = 1 << 16,  // bytes
    IO_PART = 1 << 26,    // most bytes of one read or write, and between two fsyncs
    IO_MAX_EINTR = 1000,  // interruptions in a row before a call counts as failed
};

// ---- Reading ------------------------------------------------------------------------------------

typedef struct {
    int fd;
    uint64_t size_bytes;  // when it was opened
    const char *path;     // not owned
} File;

// open(2) with O_CLOEXEC, repeated after EINTR; -1 with errno set on failure.
int io_open(const char *path, int flags, mode_t mode);

// Call at the start of main. Opens /dev/null in place of a closed descriptor 0, 1 or 2; otherwise
// the next file opened would get that number and receive what the program prints.
void io_open_standard_streams(void);

// Opens a file of a run, which it changes in place: a regular one, created with O_CREAT, and no
// symbolic link, which could lead out of the run. A FIFO is refused at once. -1: EXIT_DISK.
int io_open_own(const char *path, int flags, Error *err);
FILE *io_read_own(const char *path, Error *err);  // to read; NULL on error

// Opens a regular file for reading; path must outlive *f. Failures are EXIT_BAD_INPUT with `hint`.
bool file_open(File *f, const char *path, const char *hint, Error *err);

// Safe on a closed file. OPEN_FILE f: closed at the end of its block, once file_open was called
void file_close(File *f);
#define OPEN_FILE __attribute__((cleanup(file_close))) File

// Reads exactly n bytes at `offset`. A range beyond the end is EXIT_BAD_INPUT, a failed read
// EXIT_DISK.
bool file_read_at(const File *f, void *buffer, uint64_t n, uint64_t offset, Error *err);

// A whole file of at most `most` bytes, NUL-terminated, in memory the caller frees; *n is its size.
// n NULL: a text, in which a NUL byte is EXIT_BAD_INPUT. NULL on error.
char *file_read_all(const char *path, uint64_t most, uint64_t *n, const char *hint, Error *err);

// SHA-256 of a file of at most 1 GiB. Fails as file_read_all does.
bool file_sha256(const char *path, unsigned char digest[32], Error *err);

// ---- Writing. Failures are EXIT_DISK. -----------------------------------------------------------

typedef struct {
    int fd;               // -1: closed, aborted or failed
    uint64_t size_bytes;  // passed to writer_write so far
    uint32_t crc;         // CRC32C of the same, computed from memory, not read back
    uint64_t unsynced;    // bytes written since the last fsync
    size_t buffered;
    char path[IO_PATH_MAX];
    unsigned char buffer[IO_BUFFER];
} FileWriter;

// Creates a file; one of that name must not exist.
bool writer_open(FileWriter *w, const char *path, Error *err);

// Closes and removes an unfinished file; does nothing to a finished one.
void writer_abort(FileWriter *w);

// Any failure closes and removes the file; later calls fail too.
bool writer_write(FileWriter *w, const void *data, uint64_t n, Error *err);

// Replaces n bytes at the start of the file, all of them written before; w->crc keeps to those
// written first.
bool writer_replace_start(FileWriter *w, const void *data, uint64_t n, Error *err);

// The file is on disk when this returns true, and removed when it returns false.
bool writer_close(FileWriter *w, Error *err);

// A new file of these n bytes: writer_open, write and close.
bool file_create(const char *path, const void *data, uint64_t n, Error *err);

// write(2) of all n bytes; false with errno set on failure.
bool io_write_all(int fd, const void *data, uint64_t n);

// fsync(2), repeated after EINTR only: after an I/O error the kernel has dropped the dirty pages,
// and a second fsync would report success for lost data. False with errno set on failure.
bool io_fsync(int fd);

// Called after each part of a long read or write, for a watchdog; NULL: not called.
extern void (*io_progress)(void);
extern _Atomic uint64_t io_parts;  // read or written so far, of all files

// Bytes of a byte order mark at the start of text, which ends with a NUL if it is shorter: 0 or 3.
uint64_t mark_bytes(const char *text);
