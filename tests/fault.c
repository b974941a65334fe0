// See fault.h. Each wrapper asks fault_now() whether its call is to fail.
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

#include "fault.h"

#include "../data/base/hash.h"

enum { FAULT_MAX_FD = 256, FAULT_PATH = 512, FAULT_TRACE = 1 << 16 };

static struct {
    int kind, error;
    long nth, calls;
    bool persistent;
    const char *victim;
    uint64_t place;
    const void *top;  // the frames above it are the test's
    FaultCall *seen;
    size_t most_seen;
    size_t trace_length;
    char trace[FAULT_TRACE];
    char fd_path[FAULT_MAX_FD][FAULT_PATH];
} fault;

void fault_arm(int kind, long nth, int error, bool persistent) {
    fault.kind = kind;
    fault.nth = nth;
    fault.error = error;
    fault.persistent = persistent;
    fault.calls = 0;
    fault.top = __builtin_frame_address(0);
    fault.victim = "";
    fault.trace_length = 0;
    fault.trace[0] = 0;
}

void fault_arm_place(int kind, uint64_t place, int error, bool persistent) {
    fault_arm(kind, 0, error, persistent);
    fault.place = place;
}

void fault_see(int kind, FaultCall *calls, size_t capacity) {
    fault_arm(kind, 0, 0, false);
    fault.seen = calls;
    fault.most_seen = capacity;
}

long fault_disarm(void) {
    fault.kind = 0;
    return fault.calls;
}

const char *fault_victim(void) { return fault.victim; }
const char *fault_trace(void) { return fault.trace; }

int fault_open_fds(void) {
    int n = 0;
    for (int fd = 0; fd < FAULT_MAX_FD; fd++) n += fcntl(fd, F_GETFD) != -1;
    return n;
}

void (*fault_watch)(const char *call, int fd, const char *path, const char *path2, const void *data,
                    size_t n, off_t at);

static void fault_log(const char *name, const char *path, const char *path2) {
    size_t left = sizeof fault.trace - fault.trace_length;
    if (fault_watch) fault_watch(name, -1, path, path2, NULL, 0, 0);
    if (fault.kind != FAULT_IO || left < 2 * FAULT_PATH) return;
    int n = snprintf(fault.trace + fault.trace_length, left, "%s %.500s%s%.500s\n", name, path,
                     path2 ? " " : "", path2 ? path2 : "");
    fault.trace_length += (size_t)n;
}

static const char *fault_fd_path(int fd) {
    return fd >= 0 && fd < FAULT_MAX_FD ? fault.fd_path[fd] : "?";
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
    if (fault.error == FAULT_KILL) _exit(137);
    errno = fault.error > 0 ? fault.error : 0;
    return fault.error;
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? (mode_t)va_arg(args, int) : 0;
    va_end(args);
    if (fault_now(FAULT_IO, "open") > 0) return -1;
    int fd = __real_open(path, flags, mode);
    if (fd >= 0 && fd < FAULT_MAX_FD) snprintf(fault.fd_path[fd], FAULT_PATH, "%s", path);
    if (fd >= 0) fault_log(flags & O_CREAT ? "create" : "open", path, NULL);
    if (fd >= 0 && fault_watch) fault_watch("fd", fd, path, NULL, NULL, 0, flags & O_TRUNC);
    return fd;
}

// Linux frees the descriptor even if close fails.
int __real_close(int fd);
int __wrap_close(int fd);
int __wrap_close(int fd) {
    int failed = fault_now(FAULT_IO, "close"), why = errno, rc = __real_close(fd);
    if (failed <= 0) return rc;
    errno = why;
    return -1;
}

ssize_t __real_write(int fd, const void *data, size_t n);
ssize_t __wrap_write(int fd, const void *data, size_t n);
ssize_t __wrap_write(int fd, const void *data, size_t n) {
    int failed = fault_now(FAULT_IO, "write");
    if (failed > 0) return -1;
    fault_log("write", fault_fd_path(fd), NULL);
    if (failed == FAULT_SHORT || failed == FAULT_KILL_HALF) n = (n + 1) / 2;
    if (fault_watch) fault_watch("data", fd, "", NULL, data, n, lseek(fd, 0, SEEK_CUR));
    ssize_t put = __real_write(fd, data, n);
    if (failed == FAULT_KILL_HALF) _exit(137);
    return put;
}

ssize_t __real_pwrite(int fd, const void *data, size_t n, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *data, size_t n, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *data, size_t n, off_t offset) {
    if (fault_now(FAULT_IO, "pwrite") > 0) return -1;
    if (fault_watch) fault_watch("data", fd, "", NULL, data, n, offset);
    return __real_pwrite(fd, data, n, offset);
}

int __real_ftruncate(int fd, off_t size);
int __wrap_ftruncate(int fd, off_t size);
int __wrap_ftruncate(int fd, off_t size) {
    if (fault_now(FAULT_IO, "ftruncate") > 0) return -1;
    if (fault_watch) fault_watch("cut", fd, "", NULL, NULL, 0, size);
    return __real_ftruncate(fd, size);
}

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode) {
    return fault_now(FAULT_IO, "fopen") > 0 ? NULL : __real_fopen(path, mode);
}

ssize_t __real_pread(int fd, void *data, size_t n, off_t offset);
ssize_t __wrap_pread(int fd, void *data, size_t n, off_t offset);
ssize_t __wrap_pread(int fd, void *data, size_t n, off_t offset) {
    int failed = fault_now(FAULT_IO, "pread");
    if (failed > 0) return -1;
    return __real_pread(fd, data, failed == FAULT_SHORT ? (n + 1) / 2 : n, offset);
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd) {
    if (fault_now(FAULT_IO, "fsync") > 0) return -1;
    fault_log("fsync", fault_fd_path(fd), NULL);
    if (fault_watch) fault_watch("sync", fd, "", NULL, NULL, 0, 0);
    return 0;  // no real fsync: no test here cuts the power, and the disk is slow
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) {
    if (fault_now(FAULT_IO, "rename") > 0) return -1;
    fault_log("rename", from, to);
    return __real_rename(from, to);
}

int __real_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode) {
    if (fault_now(FAULT_IO, "mkdir") > 0) return -1;
    fault_log("mkdir", path, NULL);
    return __real_mkdir(path, mode);
}

#define FAULT_WRAP_PATH(name_)                          \
    int __real_##name_(const char *path);               \
    int __wrap_##name_(const char *path);               \
    int __wrap_##name_(const char *path) {              \
        if (fault_now(FAULT_IO, #name_) > 0) return -1; \
        fault_log(#name_, path, NULL);                  \
        return __real_##name_(path);                    \
    }
FAULT_WRAP_PATH(unlink)
FAULT_WRAP_PATH(rmdir)

#define FAULT_WRAP_STAT(name_, type_)                                           \
    int __real_##name_(type_ what, struct stat *st);                            \
    int __wrap_##name_(type_ what, struct stat *st);                            \
    int __wrap_##name_(type_ what, struct stat *st) {                           \
        return fault_now(FAULT_IO, #name_) > 0 ? -1 : __real_##name_(what, st); \
    }
FAULT_WRAP_STAT(stat, const char *)
FAULT_WRAP_STAT(lstat, const char *)
FAULT_WRAP_STAT(fstat, int)

DIR *__real_opendir(const char *path);
DIR *__wrap_opendir(const char *path);
DIR *__wrap_opendir(const char *path) {
    return fault_now(FAULT_IO, "opendir") > 0 ? NULL : __real_opendir(path);
}

void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_malloc(size_t n) {
    return fault_now(FAULT_ALLOC, "malloc") > 0 ? NULL : __real_malloc(n);
}

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size) {
    return fault_now(FAULT_ALLOC, "calloc") > 0 ? NULL : __real_calloc(count, size);
}

void *__real_realloc(void *old, size_t n);
void *__wrap_realloc(void *old, size_t n);
void *__wrap_realloc(void *old, size_t n) {
    return fault_now(FAULT_ALLOC, "realloc") > 0 ? NULL : __real_realloc(old, n);
}

void *__real_aligned_alloc(size_t alignment, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n) {
    return fault_now(FAULT_ALLOC, "aligned_alloc") > 0 ? NULL : __real_aligned_alloc(alignment, n);
}

char *__real_strdup(const char *text);
char *__wrap_strdup(const char *text);
char *__wrap_strdup(const char *text) {
    return fault_now(FAULT_ALLOC, "strdup") > 0 ? NULL : __real_strdup(text);
}
