// Between mpi.c, which starts and ends the job, the watchdog, and the buffers of a backend (cpu.c,
// nccl.cu): the private part of comm.h.
#ifndef UNPAD_JOB_H
#define UNPAD_JOB_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JOB_RESUME \
    "the newest checkpoint is whole: start again with --resume (scripts/train_until_done.sh does)"

// Around every wait for other ranks, on the host or on the device: this rank is then not the one
// that hangs. Counts as progress.
void job_waits(bool waits);

// An error ends this rank, and with it the job, if no rank makes progress for too long: see
// comm_heartbeat. From watchdog_start to watchdog_stop; the phase is then "start".
void watchdog_start(double seconds);
void watchdog_stop(void);
void watchdog_progress(void);
void watchdog_phase(const char *phase, int64_t step);  // comm_phase
// "backward of step 4"; a buffer of the calling thread
const char *watchdog_where(void);

// Of the backend. error: one line when its network has failed, NULL while it works; called by the
// watchdog. disconnect: waits for the device and takes comm_connect back.
const char *buffers_error(void);
void buffers_disconnect(void);

// For on_exit: ends the job as comm.h says. A backend registers it again after a library that has
// handlers of its own, which might wait for other ranks.
void job_at_exit(int code, void *unused);

#ifdef WITH_MPI
#include <mpi.h>
// Waits for a collective. sleeps: a short one that may begin long before other ranks reach it.
void job_wait(MPI_Request *request, bool sleeps);
#endif

#ifdef __cplusplus
}
#endif
#endif
