// The memory and the cores that the machine and the control groups of this process leave to it.
#pragma once

#include <stddef.h>

// Bytes that the machine and this process's control groups, of version 1 or 2, still allow, the
// page cache counting as free. At least 1 MiB; 0: unknown
size_t host_memory_free(void);

int machine_cores(void);  // all of them
int cores_allowed(void);  // by this thread's CPU affinity

// How many threads to start: `asked`, or if that is 0 OMP_NUM_THREADS, up to 4096 (more overflow
// OpenMP's stack), or without it `share`, of the cores allowed, but no more than a CPU quota leaves
// each of `ranks`; at most OMP_THREAD_LIMIT in any case. *limit: what decided, a constant
int machine_threads(int asked, int share, int ranks, const char **limit);
