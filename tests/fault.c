// Fault injection: counts a program's calls into libc and makes one of them, or all from one on,
// fail or fall short.
//
// Link with one -Wl,--wrap=NAME for each of these (and -U_FORTIFY_SOURCE, which would rename some):
//   io     open openat fopen fdopen close write pwrite pread ftruncate fsync rename unlink unlinkat
//          mkdir opendir fdopendir lstat fstat fstatat stat
//   alloc  malloc calloc realloc aligned_alloc strdup
//   device calls of CUDA, cuBLASLt and NCCL, and launches: in the emulator, without --wrap
// Only calls from our own objects are wrapped, not those of libc, Jansson and the sanitizers. A
// test includes fault.c, so that it stays one object; without the --wrap flags nothing is counted.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "../data/base/hash.h"

enum { FAULT_MAX_FD = 256 };
enum { FAULT_IO = 1, FAULT_ALLOC = 2, FAULT_DEVICE = 3 };
// Instead of an errno: write and pread transfer half of the bytes; other calls succeed.
enum { FAULT_SHORT = -1 };

// A call, by the functions that led to it: the same in every run and fork of a program that is
// built with frame pointers
typedef struct {
    uint64_t place;
    const char *name;
} FaultCall;

static struct {
    int kind, error;
    long nth, calls;
    bool persistent;
    const char *victim;  // name of the first call that was made to fail; "": none
    uint64_t place;      // not 0: the first call from here is number nth
    const void *top;     // the frames above it are the test's
    FaultCall *seen;     // (most_seen) the first calls are written down, fewer than that
    size_t most_seen;
} fault;

// From now on, call number nth (from 1) of that kind fails with `error`: an errno, FAULT_SHORT, or
// an error of CUDA; if persistent, all later ones too. nth 0 only counts.
__attribute__((noinline, unused)) static void fault_arm(int kind, long nth, int error,
                                                        bool persistent) {
    fault.kind = kind;
    fault.nth = nth;
    fault.error = error;
    fault.persistent = persistent;
    fault.calls = 0;
    fault.top = __builtin_frame_address(0);
    fault.victim = "";
}

// Stops fault injection. Returns the number of calls since fault_arm.
__attribute__((unused)) static long fault_disarm(void) {
    fault.kind = 0;
    return fault.calls;
}

__attribute__((unused)) static int fault_open_fds(void) {
    int n = 0;
    for (int fd = 0; fd < FAULT_MAX_FD; fd++) n += fcntl(fd, F_GETFD) != -1;
    return n;
}

// Where it is set, it is called before each call that changes names or files: "create", "mkdir",
// "rename" (to path2), "unlink", "rmdir", "fsync" with a path, and by descriptor "data" at a place,
// "cut" to a size, "sync". "fd" tells what a new descriptor leads to; at: O_TRUNC, or 0.
static void (*fault_watch)(const char *call, int fd, const char *path, const char *path2,
                           const void *data, size_t n, off_t at);

// Of a name in an open directory; below the working directory it begins there.
__attribute__((unused)) static const char *fault_path(int at, const char *name) {
    static _Thread_local char path[8192];
    char link[40], here[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    const ssize_t n = at == AT_FDCWD ? -1 : readlink(link, path, 4096);
    if (n < 0) return name;
    snprintf(path + n, sizeof path - (size_t)n, "/%s", name);
    const size_t above = getcwd(here, sizeof here) ? strlen(here) : 0;
    return above && strncmp(path, here, above) == 0 && path[above] == '/' ? path + above + 1 : path;
}

// The return addresses, hashed, of the functions of this program that led here: as far as frame
// pointers go, so not beyond a library that calls back, or the start of a thread.
__attribute__((noinline, no_sanitize("address"))) static uint64_t fault_place(void) {
    extern const char __executable_start[], etext[];
    const uintptr_t first = (uintptr_t)__executable_start, *frame = __builtin_frame_address(0);
    uint64_t hash = FNV1A_START;
    for (int depth = 0; depth < 32; depth++) {
        const uintptr_t from = frame[1] - first, *next = (const uintptr_t *)frame[0];
        if (from >= (uintptr_t)etext - first) break;
        hash = fnv1a(hash, &from, sizeof from);
        if (next <= frame || next > frame + (1 << 16) || (const void *)next >= fault.top) break;
        frame = next;
    }
    return hash;
}

// The error for this call, with errno set; 0: none.
static int fault_now(int kind, const char *name) {
    if (fault.kind != kind) return 0;
    const long call = __atomic_add_fetch(&fault.calls, 1, __ATOMIC_RELAXED);
    const uint64_t place = fault.seen || (fault.place && fault.nth == 0) ? fault_place() : 0;
    if (fault.seen && (size_t)call < fault.most_seen)
        fault.seen[call - 1] = (FaultCall){place, name};
    if (place && place == fault.place) fault.nth = call;
    if (fault.nth == 0 || call < fault.nth || (call > fault.nth && !fault.persistent)) return 0;
    if (!fault.victim[0]) fault.victim = name;
    errno = fault.error > 0 ? fault.error : 0;
    return fault.error;
}

// A call that fails returns error_; else it is told by seen_, and made.
#define FAULT_WRAP_SEEN(type_, name_, kind_, error_, params_, args_, seen_) \
    type_ __real_##name_ params_;                                           \
    type_ __wrap_##name_ params_ {                                          \
        if (fault_now(kind_, #name_) > 0) return error_;                    \
        if (fault_watch) seen_;                                             \
        return __real_##name_ args_;                                        \
    }
#define FAULT_WRAP(type_, name_, kind_, error_, params_, args_) \
    FAULT_WRAP_SEEN(type_, name_, kind_, error_, params_, args_, (void)0)
#define FAULT_WRAP_PATH(name_, params_, args_, path2_)        \
    FAULT_WRAP_SEEN(int, name_, FAULT_IO, -1, params_, args_, \
                    fault_watch(#name_, -1, path, path2_, NULL, 0, 0))

int emu_fault(const char *call) { return fault_now(FAULT_DEVICE, call); }

FAULT_WRAP_PATH(rename, (const char *path, const char *to), (path, to), to)
FAULT_WRAP_PATH(mkdir, (const char *path, mode_t mode), (path, mode), NULL)
FAULT_WRAP_PATH(unlink, (const char *path), (path), NULL)
FAULT_WRAP_SEEN(int, unlinkat, FAULT_IO, -1, (int at, const char *name, int flags),
                (at, name, flags),
                fault_watch(flags &AT_REMOVEDIR ? "rmdir" : "unlink", -1, fault_path(at, name),
                            NULL, NULL, 0, 0))
FAULT_WRAP_SEEN(ssize_t, pwrite, FAULT_IO, -1, (int fd, const void *data, size_t n, off_t offset),
                (fd, data, n, offset), fault_watch("data", fd, "", NULL, data, n, offset))
FAULT_WRAP_SEEN(int, ftruncate, FAULT_IO, -1, (int fd, off_t size), (fd, size),
                fault_watch("cut", fd, "", NULL, NULL, 0, size))
FAULT_WRAP(int, stat, FAULT_IO, -1, (const char *path, struct stat *st), (path, st))
FAULT_WRAP(int, lstat, FAULT_IO, -1, (const char *path, struct stat *st), (path, st))
FAULT_WRAP(int, fstat, FAULT_IO, -1, (int fd, struct stat *st), (fd, st))
FAULT_WRAP(int, fstatat, FAULT_IO, -1, (int at, const char *name, struct stat *st, int flags),
           (at, name, st, flags))
FAULT_WRAP(int, openat, FAULT_IO, -1, (int at, const char *name, int flags, ...), (at, name, flags))
FAULT_WRAP(DIR *, opendir, FAULT_IO, NULL, (const char *path), (path))
FAULT_WRAP(DIR *, fdopendir, FAULT_IO, NULL, (int fd), (fd))
FAULT_WRAP(FILE *, fdopen, FAULT_IO, NULL, (int fd, const char *mode), (fd, mode))
FAULT_WRAP(FILE *, fopen, FAULT_IO, NULL, (const char *path, const char *mode), (path, mode))
FAULT_WRAP(void *, malloc, FAULT_ALLOC, NULL, (size_t n), (n))
FAULT_WRAP(void *, calloc, FAULT_ALLOC, NULL, (size_t count, size_t size), (count, size))
FAULT_WRAP(void *, realloc, FAULT_ALLOC, NULL, (void *old, size_t n), (old, n))
FAULT_WRAP(void *, aligned_alloc, FAULT_ALLOC, NULL, (size_t alignment, size_t n), (alignment, n))
FAULT_WRAP(char *, strdup, FAULT_ALLOC, NULL, (const char *text), (text))

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    const mode_t mode = flags & O_CREAT ? (mode_t)va_arg(args, int) : 0;
    va_end(args);
    if (fault_now(FAULT_IO, "open") > 0) return -1;
    const int fd = __real_open(path, flags, mode);
    if (fd < 0 || !fault_watch) return fd;
    fault_watch(flags & O_CREAT ? "create" : "open", -1, path, NULL, NULL, 0, 0);
    fault_watch("fd", fd, path, NULL, NULL, 0, flags & O_TRUNC);
    return fd;
}

// Linux frees the descriptor even if close fails.
int __real_close(int fd);
int __wrap_close(int fd) {
    const int failed = fault_now(FAULT_IO, "close"), why = errno, rc = __real_close(fd);
    if (failed <= 0) return rc;
    errno = why;
    return -1;
}

ssize_t __real_write(int fd, const void *data, size_t n);
ssize_t __wrap_write(int fd, const void *data, size_t n) {
    const int failed = fault_now(FAULT_IO, "write");
    if (failed > 0) return -1;
    if (failed == FAULT_SHORT) n = (n + 1) / 2;
    if (fault_watch) fault_watch("data", fd, "", NULL, data, n, lseek(fd, 0, SEEK_CUR));
    return __real_write(fd, data, n);
}

ssize_t __real_pread(int fd, void *data, size_t n, off_t offset);
ssize_t __wrap_pread(int fd, void *data, size_t n, off_t offset) {
    const int failed = fault_now(FAULT_IO, "pread");
    if (failed > 0) return -1;
    return __real_pread(fd, data, failed == FAULT_SHORT ? (n + 1) / 2 : n, offset);
}

int __wrap_fsync(int fd) {
    if (fault_now(FAULT_IO, "fsync") > 0) return -1;
    if (fault_watch) fault_watch("sync", fd, "", NULL, NULL, 0, 0);
    return 0;  // no real fsync: no test here cuts the power, and the disk is slow
}
