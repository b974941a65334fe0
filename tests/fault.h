// Fault injection: counts a program's calls into libc and makes one of them, or all from one on,
// fail or fall short.
//
// Link with one -Wl,--wrap=NAME for each of these (and -U_FORTIFY_SOURCE, which would rename some):
//   io     open fopen close write pwrite pread ftruncate fsync rename unlink rmdir mkdir opendir
//          lstat fstat stat
//   alloc  malloc calloc realloc aligned_alloc strdup
//   device calls of CUDA, cuBLASLt and NCCL, and launches: in the emulator, without --wrap
// Only calls from our own objects are wrapped, not those of libc, Jansson and the sanitizers. A
// test includes fault.c, so that it stays one object; without the --wrap flags nothing is counted.
#ifndef UNPAD_FAULT_H
#define UNPAD_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { FAULT_IO = 1, FAULT_ALLOC = 2, FAULT_DEVICE = 3 };

// Instead of an errno: write and pread transfer half of the bytes; other calls succeed.
enum { FAULT_SHORT = -1 };

// From now on, call number nth (from 1) of that kind fails with `error`: an errno, FAULT_SHORT, or
// an error of CUDA; if persistent, all later ones too. nth 0 only counts.
void fault_arm(int kind, long nth, int error, bool persistent);

// A call, by the functions that led to it: the same in every run and fork of a program that is
// built with frame pointers
typedef struct {
    uint64_t place;
    const char *name;
} FaultCall;

// As fault_arm, for the first call from this place.
void fault_arm_place(int kind, uint64_t place, int error, bool persistent);

// Only counts, and writes down the first calls, fewer than capacity.
void fault_see(int kind, FaultCall *calls, size_t capacity);

// Stops fault injection. Returns the number of calls since fault_arm.
long fault_disarm(void);

// Name of the first call that was made to fail; "" if none was.
const char *fault_victim(void);

// Where it is set, it is called before each call that changes names or files: "create", "mkdir",
// "rename" (to path2), "unlink", "rmdir", "fsync" with a path, and by descriptor "data" at a place,
// "cut" to a size, "sync". "fd" tells what a new descriptor leads to; at: O_TRUNC, or 0.
extern void (*fault_watch)(const char *call, int fd, const char *path, const char *path2,
                           const void *data, size_t n, off_t at);

// Number of open file descriptors of this process
int fault_open_fds(void);

#endif
