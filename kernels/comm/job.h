// Private to comm: between the job (mpi.c) and the buffers of a backend (cpu.c, nccl.cu).
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Call around every wait for other ranks, on the host or on the device: meanwhile this rank is not
// the one that hangs. Counts as progress.
void job_waits(bool waits);
void job_progress(void);
void job_phase(const char *phase, int64_t step);  // comm_phase

// The backend's. error: one line when its network has failed, NULL while it works; called by the
// watchdog. disconnect: waits for the device and undoes comm_connect.
const char *buffers_error(void);
void buffers_disconnect(void);

// For on_exit: ends the job as described in comm.h. A backend registers it again after a library
// with its own handlers, which might wait for other ranks.
void job_at_exit(int code, void *unused);

// The elements from .. to - 1 that belong to rank r's shard: the first, and their number
typedef struct {
    size_t at, count;
} ShardPart;
static inline ShardPart part_of_shard(const size_t *first, int r, size_t from, size_t to) {
    const size_t at = first[r] > from ? first[r] : from,
                 end = first[r + 1] < to ? first[r + 1] : to;
    const ShardPart part = {at, at < end ? end - at : 0};
    return part;
}

#ifdef WITH_MPI
#include <mpi.h>
// Waits for a collective. sleeps: one that is short but may begin long before other ranks reach it.
void job_wait(MPI_Request *request, bool sleeps);
#endif

#ifdef __cplusplus
}
#endif
