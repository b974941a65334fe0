#include "file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hash.h"
#include "memory.h"

#ifdef __FAST_MATH__
#error "-ffast-math turns isfinite(NaN) into true; build without it"
#endif

// ---- Reading ------------------------------------------------------------------------------------

void (*io_progress)(void);
_Atomic uint64_t io_parts;

static void io_moved(void) {
    io_parts++;
    if (io_progress) io_progress();
}

int io_open(const char *path, int flags, mode_t mode) {
    int fd, tries = 0;
    do fd = open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR && ++tries < IO_MAX_EINTR);
    return fd;
}

int io_open_own(const char *path, int flags, Error *err) {
    struct stat st;
    const int fd = io_open(path, flags | O_NOFOLLOW | O_NONBLOCK, 0666);
    const bool seen = fd >= 0 && fstat(fd, &st) == 0;
    if (seen && S_ISREG(st.st_mode)) return fd;
    if (!seen && (fd >= 0 || errno != ELOOP))
        disk_error(err, path, "cannot open");
    else
        error_set(err, EXIT_DISK, "remove it, or give another --out",
                  "%s: expected a regular file, found %s", path,
                  fd < 0 ? "a symbolic link" : "another kind of file");
    if (fd >= 0) close(fd);
    return -1;
}

FILE *io_read_own(const char *path, Error *err) {
    const int fd = io_open_own(path, O_RDONLY, err);
    FILE *file = fd >= 0 ? fdopen(fd, "r") : NULL;
    if (fd >= 0 && !file) disk_error(err, path, "cannot open"), close(fd);
    return file;
}

void io_open_standard_streams(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
}

bool file_open(File *f, const char *path, const char *hint, Error *err) {
    struct stat st;
    f->path = path;
    f->size_bytes = 0;
    f->fd = io_open(path, O_RDONLY | O_NONBLOCK, 0);  // O_NONBLOCK: a FIFO must not hang us
    const bool seen = f->fd >= 0 && fstat(f->fd, &st) == 0;
    if (seen && S_ISREG(st.st_mode)) return f->size_bytes = (uint64_t)st.st_size, true;
    if (seen)
        error_set(err, EXIT_BAD_INPUT, "save it as a file: no pipe or directory is read",
                  "%s: expected a regular file", path);
    else
        error_set(err, EXIT_BAD_INPUT,
                  hint[0] || errno != ENOENT ? hint : "check the path, relative to this directory",
                  "%s: cannot open: %s", path, strerror(errno));
    file_close(f);
    return false;
}

void file_close(File *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

bool file_read_at(const File *f, void *buffer, uint64_t n, uint64_t offset, Error *err) {
    if (offset > f->size_bytes || n > f->size_bytes - offset)
        return error_set(err, EXIT_BAD_INPUT, "the file is truncated: make or copy it again",
                         "%s: expected %lu bytes at offset %lu, found a file of %lu bytes", f->path,
                         n, offset, f->size_bytes);
    char *p = buffer;
    for (int interrupted = 0; n > 0;) {
        size_t want = n > IO_PART ? (size_t)IO_PART : (size_t)n;
        ssize_t got = pread(f->fd, p, want, (off_t)offset);
        if (got < 0 && errno == EINTR && ++interrupted < IO_MAX_EINTR) continue;
        if (got < 0)
            return error_set(err, EXIT_DISK, "check the disk", "%s: read failed at offset %lu: %s",
                             f->path, offset, strerror(errno));
        if (got == 0)
            return error_set(err, EXIT_BAD_INPUT, "do not change files while training",
                             "%s: file shrank to %lu bytes", f->path, offset);
        interrupted = 0;
        io_moved();
        p += got;
        offset += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return true;
}

char *file_read_all(const char *path, uint64_t most, uint64_t *n, const char *hint, Error *err) {
    OPEN_FILE f;
    if (!file_open(&f, path, hint, err)) return NULL;
    if (n) *n = f.size_bytes;
    if (f.size_bytes > most)
        error_set(err, EXIT_BAD_INPUT, hint, "%s: expected at most %lu bytes, found %lu", path,
                  most, f.size_bytes);
    char *text = err->code ? NULL : host_calloc(f.size_bytes + 1, 1, path);
    if (text && file_read_at(&f, text, f.size_bytes, 0, err) && !n && strlen(text) < f.size_bytes)
        bad_input(err, "%s: expected text, found a NUL byte at %zu", path, strlen(text));
    if (!err->code) return text;
    free(text);
    return NULL;
}

bool file_sha256(const char *path, unsigned char digest[32], Error *err) {
    uint64_t n;
    AUTO_FREE char *bytes = file_read_all(path, (uint64_t)1 << 30, &n, "", err);
    if (bytes) sha256(bytes, n, digest);
    return bytes != NULL;
}

// ---- Writing ------------------------------------------------------------------------------------

bool writer_open(FileWriter *w, const char *path, Error *err) {
    w->fd = -1;
    w->size_bytes = w->unsynced = 0;
    w->buffered = 0;
    w->crc = 0;
    if (!path_printf(w->path, err, "%s", path)) return false;
    w->fd = io_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    return w->fd >= 0 || disk_error(err, path, "cannot create");
}

void writer_abort(FileWriter *w) {
    if (w->fd < 0) return;
    close(w->fd);
    unlink(w->path);
    w->fd = -1;
}

static bool writer_failed(FileWriter *w, const char *what, Error *err) {
    disk_error(err, w->path, what);
    writer_abort(w);
    return false;
}

bool io_fsync(int fd) {
    int failed, tries = 0;
    do failed = fsync(fd);
    while (failed && errno == EINTR && ++tries < IO_MAX_EINTR);
    if (!failed) io_moved();
    return !failed;
}

// Called every IO_PART bytes, so that no single fsync takes long.
static bool writer_sync(FileWriter *w, Error *err) {
    w->unsynced = 0;
    return io_fsync(w->fd) || writer_failed(w, "fsync failed", err);
}

bool io_write_all(int fd, const void *data, uint64_t n) {
    const char *p = data;
    for (int interrupted = 0; n > 0;) {
        const ssize_t put = write(fd, p, n);
        if (put < 0 && errno == EINTR && ++interrupted < IO_MAX_EINTR) continue;
        if (put == 0) errno = ENOSPC;  // else a device that accepts nothing would loop for ever
        if (put <= 0) return false;
        interrupted = 0;
        io_moved();
        p += put;
        n -= (uint64_t)put;
    }
    return true;
}

static bool writer_raw(FileWriter *w, const unsigned char *p, uint64_t n, Error *err) {
    for (uint64_t part; n > 0; p += part, n -= part) {
        part = n < IO_PART ? n : IO_PART;
        if (!io_write_all(w->fd, p, part)) return writer_failed(w, "write failed", err);
        w->unsynced += part;
        if (w->unsynced >= IO_PART && !writer_sync(w, err)) return false;
    }
    return true;
}

static bool writer_flush(FileWriter *w, Error *err) {
    size_t n = w->buffered;
    w->buffered = 0;
    return writer_raw(w, w->buffer, n, err);
}

bool writer_write(FileWriter *w, const void *data, uint64_t n, Error *err) {
    if (w->fd < 0)
        return error_set(err, EXIT_DISK, "", "%s: written to after it failed or was closed",
                         w->path);
    w->crc = crc32c(w->crc, data, (size_t)n);
    w->size_bytes += n;
    assert(w->buffered <= sizeof w->buffer);
    if (n <= sizeof w->buffer - w->buffered) {
        if (n > 0) memcpy(w->buffer + w->buffered, data, (size_t)n);
        w->buffered += (size_t)n;
        return true;
    }
    return writer_flush(w, err) && writer_raw(w, data, n, err);
}

bool writer_replace_start(FileWriter *w, const void *data, uint64_t n, Error *err) {
    assert(n <= w->size_bytes || w->fd < 0);
    return w->fd >= 0 && writer_flush(w, err) &&
           ((lseek(w->fd, 0, SEEK_SET) == 0 && io_write_all(w->fd, data, n) &&
             lseek(w->fd, 0, SEEK_END) >= 0) ||
            writer_failed(w, "write failed", err));
}

bool writer_close(FileWriter *w, Error *err) {
    if (w->fd < 0)
        return error_set(err, EXIT_DISK, "", "%s: closed after it failed or was closed", w->path);
    if (!writer_flush(w, err) || !writer_sync(w, err)) return false;
    const int closed = close(w->fd);  // never twice: Linux frees the descriptor even on error
    w->fd = -1;
    if (closed == 0 || errno == EINTR) return true;
    disk_error(err, w->path, "close failed");
    unlink(w->path);
    return false;
}

bool file_create(const char *path, const void *data, uint64_t n, Error *err) {
    FileWriter w;
    return writer_open(&w, path, err) && writer_write(&w, data, n, err) && writer_close(&w, err);
}

uint64_t mark_bytes(const char *text) { return strncmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0; }
