// Fault injection: counts the calls a program makes into libc and lets one of them, or all from one
// on, fail, fall short, or be the last thing the process does.
//
// Link with one -Wl,--wrap=NAME for each of these (and -U_FORTIFY_SOURCE, which would rename some):
//   io     open close write pread fsync rename unlink rmdir mkdir opendir lstat fstat stat
//   alloc  malloc calloc realloc
// Only calls from our own objects are seen; libc, Jansson and the sanitizers call each other
// unharmed. A test includes fault.c, so that it stays one object; without the --wrap flags nothing
// is counted.
#ifndef UNPAD_FAULT_H
#define UNPAD_FAULT_H

#include <stdbool.h>

enum { FAULT_IO = 1, FAULT_ALLOC = 2 };

// In place of an errno
enum {
    FAULT_SHORT = -1,      // write and pread do half of what was asked; other calls succeed
    FAULT_KILL = -2,       // the process is gone before the call
    FAULT_KILL_HALF = -3,  // the same, but half of a write has happened
};

// From now on, call number nth (from 1) of that kind fails with `error`; with persistent, all later
// ones too. nth 0 only counts.
void fault_arm(int kind, long nth, int error, bool persistent);

// Stops it. The number of calls seen since fault_arm.
long fault_disarm(void);

// The name of the first call that was made to fail; "" if none was.
const char *fault_victim(void);

// What the calls since fault_arm did, in order, a line each: "open PATH", "write PATH", "fsync
// PATH", "rename FROM TO", "unlink PATH", ... File descriptors are shown as the path they were
// opened with.
const char *fault_trace(void);

int fault_open_fds(void);

#endif
