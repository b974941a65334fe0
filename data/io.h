// Checked input and output: the only way the trainer touches files and sizes it was told about.
//
//   Error            one failure: exit code, a line of what, a line of hint
//   checked_*        arithmetic that refuses to wrap
//   host_*           memory or exit 5
//   File             a file being read: bounded, EINTR-safe, exact
//   FileWriter       a file being written: CRC32C of what was meant, fsync before close
//   LineFile         a log: lines appended whole or not at all
//   path_*, dir_*    paths in bounded buffers; directories made, synced, removed, probed, locked
//
// A parser never exits and never prints: it returns false with the Error filled, so that a test, a
// fuzzer or a retry can go on. Only main and error_exit turn an Error into an exit code.
#ifndef UNPAD_IO_H
#define UNPAD_IO_H

#ifdef __FAST_MATH__
#error "-ffast-math turns isfinite(NaN) into true; build without it"
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // flock, O_CLOEXEC under -std=c11; include this header first
#endif

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum {
    IO_PATH_MAX = 4096,     // Linux's own limit, with the terminating 0
    IO_BUFFER = 1 << 16,
    IO_PART = 1 << 26,      // most bytes of one read or write, and between two fsyncs
    IO_MAX_EINTR = 1000,    // interruptions in a row before a call counts as failed
};

// ------------------------------------------------------------------------------------------------
// Exit codes: a contract with scripts; each error line belongs to exactly one

enum {
    EXIT_DONE = 0,
    EXIT_USAGE = 2,              // flags
    EXIT_BAD_INPUT = 3,          // a file that is not what it says
    EXIT_DISK = 4,               // the file system refused
    EXIT_HOST_MEMORY = 5,
    EXIT_DEVICE_MEMORY = 6,
    EXIT_DIVERGED = 7,           // non-finite or diverged
    EXIT_PEER_LOST = 8,
    EXIT_CHECKPOINT_MISFIT = 9,  // a checkpoint of another model, data set or plan
    EXIT_DIR_IN_USE = 10,
    EXIT_DEVICE_ERROR = 11,
    EXIT_RESUMABLE = 75,         // stopped by a signal, checkpoint written
};

// ------------------------------------------------------------------------------------------------
// Errors

typedef struct {
    int code;         // one of the exit codes above; 0 = none
    char what[1024];  // "path: what, expected, found"
    char hint[512];   // what to do about it; may be empty
} Error;

// strcpy into a bounded buffer; what does not fit is cut off.
static inline void text_copy(char *out, size_t capacity, const char *text) {
    size_t n = strlen(text);
    if (n >= capacity) n = capacity - 1;
    memcpy(out, text, n);
    out[n] = 0;
}

// "1 document", "2 documents"
static inline const char *text_plural(int64_t n) { return n == 1 ? "" : "s"; }

// Control characters become \xNN in place, so that no file name can forge a second log line.
static inline void text_sanitize(char *text, size_t capacity) {
    static const char hex[] = "0123456789abcdef";
    char clean[2048];
    size_t n = 0;
    for (const unsigned char *p = (const unsigned char *)text; *p && n + 5 < sizeof clean; p++) {
        if (*p >= 0x20 && *p != 0x7f) {
            clean[n++] = (char)*p;  // UTF-8 passes
        } else {
            clean[n++] = '\\';
            clean[n++] = 'x';
            clean[n++] = hex[*p >> 4];
            clean[n++] = hex[*p & 15];
        }
    }
    clean[n] = 0;
    text_copy(text, capacity, clean);
}

// Fills *err and returns false, so that a parser can `return error_set(...)`. The first error wins.
__attribute__((format(printf, 4, 5)))
static inline bool error_set(Error *err, int code, const char *hint, const char *format, ...) {
    if (err->code) return false;
    va_list args;
    va_start(args, format);
    vsnprintf(err->what, sizeof err->what, format, args);
    va_end(args);
    text_sanitize(err->what, sizeof err->what);
    text_copy(err->hint, sizeof err->hint, hint ? hint : "");
    text_sanitize(err->hint, sizeof err->hint);
    err->code = code;
    return false;
}

// Every error has a hint: where a parser knows no better one, the exit code does.
static inline const char *error_hint(const Error *err) {
    if (err->hint[0]) return err->hint;
    if (err->code == EXIT_USAGE) return "see --help";
    if (err->code == EXIT_BAD_INPUT) return "make or copy that file again, or give another one";
    if (err->code == EXIT_DISK) return "check the disk, its space and the permissions";
    return "please report this with the command that led to it";
}

static inline void error_print(const Error *err) {
    fflush(stdout);
    fprintf(stderr, "error: %s\n", err->what);
    fprintf(stderr, "hint: %s\n", error_hint(err));
}

__attribute__((noreturn))
static inline void error_exit(const Error *err) {
    error_print(err);
    exit(err->code);
}

static inline void must(bool ok, const Error *err) {
    if (!ok) error_exit(err);
}

// ------------------------------------------------------------------------------------------------
// Sizes and memory

static inline bool checked_mul(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool checked_add(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_add_overflow(a, b, out);
}

// count * size bytes, zeroed; never NULL: exits 5 with what it was for.
static inline void *host_calloc(size_t count, size_t size, const char *what_for) {
    void *p = calloc(count ? count : 1, size ? size : 1);
    if (p) return p;
    Error err = {0, "", ""};
    error_set(&err, EXIT_HOST_MEMORY, "close other programs or choose smaller sizes",
              "host memory: %zu x %zu bytes for %s refused", count, size, what_for);
    error_exit(&err);
}

static inline bool error_memory(Error *err, const char *path, uint64_t size_bytes) {
    return error_set(err, EXIT_HOST_MEMORY, "close other programs",
                     "%s: host memory: %llu bytes refused", path, (unsigned long long)size_bytes);
}

// Grows an array to hold at least `needed` elements; contents kept, new part not zeroed. Exits 5.
static inline void *host_grow(void *old, size_t *capacity, size_t needed, size_t size,
                              const char *what_for) {
    if (needed <= *capacity) return old;
    size_t grown = *capacity + *capacity / 2;
    if (grown < needed) grown = needed;
    uint64_t bytes = 0;
    void *p = checked_mul(grown, size, &bytes) ? realloc(old, (size_t)bytes) : NULL;
    if (p) {
        *capacity = grown;
        return p;
    }
    Error err = {0, "", ""};
    error_set(&err, EXIT_HOST_MEMORY, "close other programs or choose smaller sizes",
              "host memory: %zu x %zu bytes for %s refused", grown, size, what_for);
    error_exit(&err);
}

// ------------------------------------------------------------------------------------------------
// CRC32C (Castagnoli), the checksum of shard indexes and checkpoint files

// table[k][b]: byte b followed by k zero bytes; eight look-ups then take eight bytes at a time.
static inline void crc32c_make_table(uint32_t table[8][256]) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (0x82f63b78u & (0u - (c & 1u)));
        table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
}

static inline uint32_t crc32c_portable(uint32_t crc, const unsigned char *p, size_t n) {
    static uint32_t table[8][256];
    static int ready;  // threads that meet here write the same values
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        crc32c_make_table(table);
        __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
    }
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[7 - k][(word >> (8 * k)) & 255];
    }
    for (; n; n--) crc = (crc >> 8) ^ table[0][(crc ^ *p++) & 255];
    return crc;
}

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
__attribute__((target("sse4.2")))
static inline uint32_t crc32c_sse42(uint32_t crc, const unsigned char *p, size_t n) {
    uint64_t c = crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    for (; n; n--) c = __builtin_ia32_crc32qi((uint32_t)c, *p++);
    return (uint32_t)c;
}
#endif

// Continues a checksum: start with 0, feed pieces in order.
// crc32c(0, "123456789", 9) == 0xe3069283.
static inline uint32_t crc32c(uint32_t crc, const void *data, size_t n) {
    const unsigned char *p = (const unsigned char *)data;
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
    if (__builtin_cpu_supports("sse4.2")) return ~crc32c_sse42(~crc, p, n);
#endif
    return ~crc32c_portable(~crc, p, n);
}

// ------------------------------------------------------------------------------------------------
// Reading

typedef struct {
    int fd;
    uint64_t size_bytes;  // as it was at open
    const char *path;     // not owned
} File;

// Called after each part of a long read or write; NULL: nobody wants to know.
static void (*io_progress)(void);

static inline void io_moved(void) {
    if (io_progress) io_progress();
}

// open(2), patient with signals.
static inline int io_open(const char *path, int flags, mode_t mode) {
    int fd = -1;
    for (int i = 0; i < IO_MAX_EINTR; i++) {
        fd = open(path, flags | O_CLOEXEC, mode);
        if (fd >= 0 || errno != EINTR) break;
    }
    return fd;
}

// For the start of main: where descriptor 0, 1 or 2 is closed it becomes /dev/null, else the next
// file to be opened would take the number, and what is printed would go into it.
static inline void io_open_standard_streams(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
}

static inline bool file_open(File *f, const char *path, const char *hint, Error *err) {
    struct stat st;
    f->path = path;
    f->size_bytes = 0;
    f->fd = io_open(path, O_RDONLY | O_NONBLOCK, 0);  // O_NONBLOCK: a FIFO must not hang us
    if (f->fd < 0)
        return error_set(err, EXIT_BAD_INPUT, hint, "%s: cannot open: %s", path, strerror(errno));
    if (fstat(f->fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(f->fd);
        f->fd = -1;
        return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected a regular file", path);
    }
    f->size_bytes = (uint64_t)st.st_size;
    return true;
}

static inline void file_close(File *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

static inline bool file_range_error(const File *f, uint64_t n, uint64_t offset, Error *err) {
    return error_set(err, EXIT_BAD_INPUT, "the file is truncated: make or copy it again",
                     "%s: expected %llu bytes at offset %llu, found a file of %llu bytes", f->path,
                     (unsigned long long)n, (unsigned long long)offset,
                     (unsigned long long)f->size_bytes);
}

// Exactly n bytes at offset, or an error that names the range and the size.
static inline bool file_read_at(const File *f, void *buffer, uint64_t n, uint64_t offset,
                                Error *err) {
    uint64_t end = 0;
    if (!checked_add(offset, n, &end) || end > f->size_bytes)
        return file_range_error(f, n, offset, err);
    char *p = (char *)buffer;
    for (int interrupted = 0; n > 0;) {
        size_t want = n > IO_PART ? (size_t)IO_PART : (size_t)n;
        ssize_t got = pread(f->fd, p, want, (off_t)offset);
        if (got < 0 && errno == EINTR && ++interrupted < IO_MAX_EINTR) continue;
        if (got < 0)
            return error_set(err, EXIT_DISK, "check the disk", "%s: read failed at offset %llu: %s",
                             f->path, (unsigned long long)offset, strerror(errno));
        if (got == 0)
            return error_set(err, EXIT_BAD_INPUT, "do not change files while training",
                             "%s: file shrank to %llu bytes", f->path, (unsigned long long)offset);
        interrupted = 0;
        io_moved();
        p += got;
        offset += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return true;
}

// A whole small file, 0-terminated, in memory the caller frees; NULL on error or above max_bytes.
static inline char *file_read_all(const char *path, uint64_t max_bytes, uint64_t *n,
                                  const char *hint, Error *err) {
    File f;
    if (!file_open(&f, path, hint, err)) return NULL;
    char *text = NULL;
    *n = f.size_bytes;
    if (f.size_bytes > max_bytes) {
        error_set(err, EXIT_BAD_INPUT, hint, "%s: expected at most %llu bytes, found %llu", path,
                  (unsigned long long)max_bytes, (unsigned long long)f.size_bytes);
    } else if (!(text = (char *)malloc((size_t)f.size_bytes + 1))) {
        error_memory(err, path, f.size_bytes + 1);
    } else if (!file_read_at(&f, text, f.size_bytes, 0, err)) {
        free(text);
        text = NULL;
    } else {
        text[f.size_bytes] = 0;
    }
    file_close(&f);
    return text;
}

// ------------------------------------------------------------------------------------------------
// Paths

// printf into a path buffer; too long is an error, never a shorter path.
__attribute__((format(printf, 4, 5)))
static inline bool path_printf(char *out, size_t capacity, Error *err, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(out, capacity, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < capacity) return true;
    return error_set(err, EXIT_USAGE, "use a shorter path", "%.200s...: path longer than %zu bytes",
                     out, capacity - 1);
}

static inline bool path_join(char *out, size_t capacity, const char *dir, const char *name,
                             Error *err) {
    size_t n = strlen(dir);
    bool slash = n > 0 && dir[n - 1] != '/';
    return path_printf(out, capacity, err, "%s%s%s", dir, slash ? "/" : "", name);
}

// The directory a path is in: "a/b" -> "a", "b" -> ".", "/b" -> "/".
static inline bool path_parent(char *out, size_t capacity, const char *path, Error *err) {
    const char *slash = strrchr(path, '/');
    if (!slash) return path_printf(out, capacity, err, ".");
    int n = slash == path ? 1 : (int)(slash - path);
    return path_printf(out, capacity, err, "%.*s", n, path);
}

static inline bool path_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static inline bool path_exists(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0;
}

// A name that stays in its directory: no slash, no leading dot, not empty, printable.
static inline bool path_is_plain_name(const char *name) {
    if (!name[0] || name[0] == '.' || strlen(name) > 255) return false;
    for (const unsigned char *p = (const unsigned char *)name; *p; p++)
        if (*p == '/' || *p < 0x20 || *p == 0x7f) return false;
    return true;
}

static inline bool disk_error(Error *err, const char *path, const char *what) {
    const char *hint = "check the disk and its permissions";
    if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)
        hint = "free some space, or write to another disk";
    return error_set(err, EXIT_DISK, hint, "%s: %s: %s", path, what, strerror(errno));
}

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
static inline bool writer_open(FileWriter *w, const char *path, Error *err) {
    w->fd = -1;
    w->size_bytes = 0;
    w->crc = 0;
    w->unsynced = 0;
    w->buffered = 0;
    if (!path_printf(w->path, sizeof w->path, err, "%s", path)) return false;
    w->fd = io_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    return w->fd >= 0 || disk_error(err, path, "cannot create");
}

// Closes and removes an unfinished file; does nothing to a finished one.
static inline void writer_abort(FileWriter *w) {
    if (w->fd < 0) return;
    close(w->fd);
    unlink(w->path);
    w->fd = -1;
}

static inline bool writer_failed(FileWriter *w, const char *what, Error *err) {
    disk_error(err, w->path, what);
    writer_abort(w);
    return false;
}

// fsync may be interrupted, but an I/O error is final: the kernel has dropped the dirty pages, and
// a second fsync would report success for data that is gone.
static inline bool io_fsync(int fd) {
    for (int i = 0; i < IO_MAX_EINTR; i++) {
        if (fsync(fd) == 0) return io_moved(), true;
        if (errno != EINTR) return false;
    }
    return false;
}

// A large file goes to the disk in parts, so that no single fsync takes long.
static inline bool writer_sync(FileWriter *w, Error *err) {
    w->unsynced = 0;
    return io_fsync(w->fd) || writer_failed(w, "fsync failed", err);
}

static inline bool writer_raw(FileWriter *w, const unsigned char *p, uint64_t n, Error *err) {
    for (int interrupted = 0; n > 0;) {
        size_t want = n > IO_PART ? (size_t)IO_PART : (size_t)n;
        ssize_t put = write(w->fd, p, want);
        if (put < 0 && errno == EINTR && ++interrupted < IO_MAX_EINTR) continue;
        if (put == 0) errno = ENOSPC;  // a device that takes nothing would loop for ever
        if (put <= 0) return writer_failed(w, "write failed", err);
        interrupted = 0;
        io_moved();
        p += put;
        n -= (uint64_t)put;
        w->unsynced += (uint64_t)put;
        if (w->unsynced >= IO_PART && !writer_sync(w, err)) return false;
    }
    return true;
}

static inline bool writer_flush(FileWriter *w, Error *err) {
    size_t n = w->buffered;
    w->buffered = 0;
    return writer_raw(w, w->buffer, n, err);
}

// Any failure closes and removes the file; later calls fail too.
static inline bool writer_write(FileWriter *w, const void *data, uint64_t n, Error *err) {
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
    return writer_flush(w, err) && writer_raw(w, (const unsigned char *)data, n, err);
}

// On disk when it returns true. After false the file is gone.
static inline bool writer_close(FileWriter *w, Error *err) {
    if (w->fd < 0)
        return error_set(err, EXIT_DISK, "", "%s: closed after it failed or was closed", w->path);
    if (!writer_flush(w, err)) return false;
    if (!writer_sync(w, err)) return false;
    int closed = close(w->fd);  // never twice: after any error Linux has freed the number
    w->fd = -1;
    if (closed == 0 || errno == EINTR) return true;
    disk_error(err, w->path, "close failed");
    unlink(w->path);
    return false;
}

// ------------------------------------------------------------------------------------------------
// Logs

typedef struct {
    int fd;              // -1: not open
    int64_t size_bytes;  // of whole lines: where the next one begins
    int64_t lost;        // lines that could not be written since the last one that could
    char path[IO_PATH_MAX];
} LineFile;

// Opens or makes the file, emptied if `empty`; else size_bytes is that of the file.
static inline bool lines_open(LineFile *f, const char *path, bool empty, Error *err) {
    struct stat st;
    f->fd = -1;
    f->size_bytes = f->lost = 0;
    if (!path_printf(f->path, sizeof f->path, err, "%s", path)) return false;
    f->fd = io_open(path, O_RDWR | O_CREAT | (empty ? O_TRUNC : 0), 0666);
    if (f->fd < 0) return disk_error(err, path, "cannot open");
    if (fstat(f->fd, &st) == 0) f->size_bytes = (int64_t)st.st_size;
    return true;
}

static inline void lines_close(LineFile *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

// *count: newlines among bytes from .. to - 1; *last: the end of the last such line, else `from`.
static inline bool lines_count(const LineFile *f, int64_t from, int64_t to, int64_t *count,
                               int64_t *last, Error *err) {
    char chunk[1 << 12];
    const File file = {f->fd, (uint64_t)f->size_bytes, f->path};
    *count = 0;
    *last = from;
    for (int64_t n; from < to; from += n) {
        n = to - from < (int64_t)sizeof chunk ? to - from : (int64_t)sizeof chunk;
        if (!file_read_at(&file, chunk, (uint64_t)n, (uint64_t)from, err)) return false;
        for (int64_t i = 0; i < n; i++) {
            if (chunk[i] != '\n') continue;
            ++*count;
            *last = from + i + 1;
        }
    }
    return true;
}

// Cuts the file to the lines that end within the first keep_bytes. *removed: those after them, the
// last of which may be a piece of one.
static inline bool lines_cut(LineFile *f, int64_t keep_bytes, int64_t *removed, Error *err) {
    const int64_t size = f->size_bytes;
    int64_t kept, end, last;
    if (keep_bytes > size) keep_bytes = size;
    if (!lines_count(f, 0, keep_bytes, &kept, &end, err) ||
        !lines_count(f, end, size, removed, &last, err))
        return false;
    *removed += last < size;
    if (end < size && ftruncate(f->fd, (off_t)end) != 0)
        return disk_error(err, f->path, "cannot shorten");
    f->size_bytes = end;
    return true;
}

// pwrite of all n bytes.
static inline bool io_pwrite_all(int fd, const char *p, size_t n, int64_t offset) {
    for (int interrupted = 0; n > 0;) {
        ssize_t put = pwrite(fd, p, n, (off_t)offset);
        if (put < 0 && errno == EINTR && ++interrupted < IO_MAX_EINTR) continue;
        if (put == 0) errno = ENOSPC;
        if (put <= 0) return false;
        p += put;
        n -= (size_t)put;
        offset += put;
    }
    return true;
}

// Appends the n bytes of a line with its newline. On failure nothing of it is left in the file, and
// f->lost counts it.
static inline bool lines_append(LineFile *f, const char *line, size_t n, Error *err) {
    if (io_pwrite_all(f->fd, line, n, f->size_bytes)) {
        f->size_bytes += (int64_t)n;
        return true;
    }
    disk_error(err, f->path, "a line could not be written");
    f->lost++;
    const int cut = ftruncate(f->fd, (off_t)f->size_bytes);
    (void)cut;  // where it fails, the next line overwrites the piece
    return false;
}

// What has been appended is on disk when it returns true.
static inline bool lines_sync(const LineFile *f, Error *err) {
    return f->fd < 0 || io_fsync(f->fd) || disk_error(err, f->path, "fsync failed");
}

// ------------------------------------------------------------------------------------------------
// Directories

static inline bool dir_create(const char *path, Error *err) {
    if (mkdir(path, 0777) == 0) return true;
    int why = errno;
    if (why == EEXIST && path_is_dir(path)) return true;
    errno = why;
    return disk_error(err, path, "cannot create the directory");
}

// mkdir -p
static inline bool dir_create_all(const char *path, Error *err) {
    char part[IO_PATH_MAX];
    if (!path_printf(part, sizeof part, err, "%s", path)) return false;
    for (char *p = part + 1; part[0] && *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        bool ok = path_is_dir(part) || dir_create(part, err);
        *p = '/';
        if (!ok) return false;
    }
    return dir_create(path, err);
}

// Makes renames and new names in the directory durable.
static inline bool dir_sync(const char *path, Error *err) {
    int fd = io_open(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return disk_error(err, path, "cannot open the directory");
    bool ok = io_fsync(fd) || errno == EINVAL;  // EINVAL: a file system without directory fsync
    if (!ok) disk_error(err, path, "fsync of the directory failed");
    close(fd);
    return ok;
}

static inline bool io_rename(const char *from, const char *to, Error *err) {
    return rename(from, to) == 0 || disk_error(err, to, "rename failed");
}

static inline bool dir_remove_level(const char *path, int depth, Error *err);

static inline bool dir_remove_entry(const char *dir, const char *name, int depth, Error *err) {
    char path[IO_PATH_MAX];
    struct stat st;
    if (!path_join(path, sizeof path, dir, name, err)) return false;
    if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode)) return dir_remove_level(path, depth + 1, err);
    return unlink(path) == 0 || errno == ENOENT || disk_error(err, path, "cannot remove");
}

static inline bool dir_remove_level(const char *path, int depth, Error *err) {
    if (depth > 8) return error_set(err, EXIT_DISK, "", "%s: directories nested too deep", path);
    DIR *dir = opendir(path);
    if (!dir) return errno == ENOENT || disk_error(err, path, "cannot open the directory");
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(dir));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            ok = dir_remove_entry(path, e->d_name, depth, err);
    closedir(dir);
    return ok && (rmdir(path) == 0 || errno == ENOENT || disk_error(err, path, "cannot remove"));
}

// rm -r; symbolic links are removed, not followed. A path that does not exist is fine.
static inline bool dir_remove_tree(const char *path, Error *err) {
    return dir_remove_level(path, 0, err);
}

// The whole file or the old one: temporary, fsync, rename, fsync of the directory.
static inline bool file_write_all(const char *path, const void *data, size_t n, Error *err) {
    FileWriter w;
    char temp[IO_PATH_MAX], parent[IO_PATH_MAX];
    if (!path_parent(parent, sizeof parent, path, err)) return false;
    if (!path_printf(temp, sizeof temp, err, "%s.tmp-%ld", path, (long)getpid())) return false;
    unlink(temp);  // of a dead process that had our number
    if (!writer_open(&w, temp, err)) return false;
    if (!writer_write(&w, data, n, err) || !writer_close(&w, err)) return false;
    if (!io_rename(temp, path, err)) {
        unlink(temp);
        return false;
    }
    return dir_sync(parent, err);
}

static inline bool disk_free_bytes(const char *path, uint64_t *out, Error *err) {
    struct statvfs st;
    if (statvfs(path, &st) != 0) return disk_error(err, path, "cannot ask for free space");
    if (!checked_mul(st.f_bavail, st.f_frsize, out)) *out = UINT64_MAX;
    return true;
}

// Can a checkpoint be written here? Everything one needs is tried on a small file: exit 4 before
// step 0, not at the first save hours later.
static inline bool dir_probe(const char *dir, Error *err) {
    FileWriter w;
    char from[IO_PATH_MAX], to[IO_PATH_MAX];
    long pid = (long)getpid();
    if (!path_printf(from, sizeof from, err, "%s/.probe-%ld", dir, pid)) return false;
    if (!path_printf(to, sizeof to, err, "%s/.probed-%ld", dir, pid)) return false;
    unlink(from);
    if (!writer_open(&w, from, err)) return false;
    if (!writer_write(&w, "probe\n", 6, err) || !writer_close(&w, err)) return false;
    bool ok = io_rename(from, to, err) && dir_sync(dir, err);
    const char *left = ok ? to : from;
    return (unlink(left) == 0 || disk_error(err, left, "cannot remove")) && ok;
}

// ------------------------------------------------------------------------------------------------
// One writer per directory

typedef struct {
    int fd;      // -1 = not locked
    bool works;  // false: this file system has no locks; nothing guards the directory, so warn
    int dir_fd;  // the directory, whatever its path leads to by now
} DirLock;

static inline bool dir_lock_refused(int fd, const char *path, Error *err) {
    char owner[256] = "an unknown process";
    ssize_t n = pread(fd, owner, sizeof owner - 1, 0);
    if (n > 0) owner[n] = 0;
    owner[strcspn(owner, "\n")] = 0;
    return error_set(err, EXIT_DIR_IN_USE, "wait for it, stop it, or choose another directory",
                     "%s: directory in use by %s", path, owner);
}

// Takes <dir>/.lock for as long as the process lives or until dir_unlock. The kernel frees the lock
// of a dead owner, so there is nothing to clean up; the text in it only serves the message.
static inline bool dir_lock(DirLock *lock, const char *dir, Error *err) {
    char path[IO_PATH_MAX], owner[256], host[128] = "?";
    lock->fd = lock->dir_fd = -1;
    lock->works = true;
    if (!path_join(path, sizeof path, dir, ".lock", err)) return false;
    int fd = io_open(path, O_RDWR | O_CREAT, 0666);
    if (fd < 0) return disk_error(err, path, "cannot create the lock");
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        bool taken = errno == EWOULDBLOCK;
        lock->works = false;
        if (taken) dir_lock_refused(fd, dir, err);
        close(fd);
        if (!taken) lock->dir_fd = io_open(dir, O_RDONLY | O_DIRECTORY, 0);
        return !taken;
    }
    lock->dir_fd = io_open(dir, O_RDONLY | O_DIRECTORY, 0);
    lock->fd = fd;
    gethostname(host, sizeof host - 1);
    int n = snprintf(owner, sizeof owner, "process %ld on %s\n", (long)getpid(), host);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, owner, (size_t)n, 0) != n)
        lock->works = flock(fd, LOCK_EX | LOCK_NB) == 0;  // a full disk: locked all the same
    return true;
}

// Does the path still lead to the directory that was locked? Another one in its place may be
// somebody else's.
static inline bool dir_lock_check(const DirLock *lock, const char *dir, Error *err) {
    struct stat ours, found;
    if (lock->dir_fd < 0 || fstat(lock->dir_fd, &ours) != 0) return true;
    if (stat(dir, &found) == 0 && found.st_dev == ours.st_dev && found.st_ino == ours.st_ino)
        return true;
    return error_set(err, EXIT_DISK, "put it back where it was",
                     "%s: expected the directory that this run locked, found it renamed, removed "
                     "or replaced",
                     dir);
}

static inline void dir_unlock(DirLock *lock) {
    if (lock->fd >= 0) close(lock->fd);
    if (lock->dir_fd >= 0) close(lock->dir_fd);
    lock->fd = lock->dir_fd = -1;
}

#endif
