// The ranks of a job: processes that train together, found over TCP. Linux. For the transports
// (mpi.c, nccl.cu), which implement the rest of comm.h on top of it:
//
//   ranks.c         joining and leaving, exchanges of host memory
//   rendezvous.c    who am I, and how the ranks find each other
//   watchdog.c      heartbeat: lost, hung and failed ranks; one error for all
//
// A single process opens no socket and starts no thread: every call below then does nothing.
#ifndef UNPAD_RANKS_H
#define UNPAD_RANKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Ranks that the launcher started, by the environment; 1 for a single process. Ends the process
// with exit code 2 where the environment makes no sense.
int ranks_launched(void);

// Does the launcher say that all of them are on this machine?
bool ranks_all_here(void);

// Joins the others. broadcast: one over all ranks that exists already (rank 0's data to all), or
// NULL. Returns NULL, or one line that says what is missing for this process to be a rank. Ranks
// that do not connect within ranks_join_ms are named, and the job ends with exit code 8.
typedef void (*RanksBroadcast)(void *data, size_t bytes);
const char *ranks_join(RanksBroadcast broadcast);
int64_t ranks_join_ms(void);

// Ends this process, or once it has joined the job, with one error and one hint line.
__attribute__((noreturn, format(printf, 3, 4))) void ranks_die(int code, const char *hint,
                                                               const char *what, ...);

// Around every call that blocks on other ranks, so that this rank is not the one that is blamed.
// polls: the caller waits in a loop that calls comm_progress; a rank that stops doing so is hung.
// Else it waits in a library or on a device, and a hang inside shows only as all ranks waiting.
void ranks_enter_collective(bool polls);
void ranks_leave_collective(bool polls);

// The phase and progress of comm_phase.
void ranks_phase(const char *phase, int64_t step);

// For on_exit: an exit code other than 0 ends all ranks. Registered by ranks_join; a transport
// whose library registers handlers of its own registers it again, so that it runs before them.
void ranks_at_exit(int code, void *unused);

// Names a file for the log of a library that writes to standard output, which ranks but 0 do not
// have: sets `variable` to standard error unless it is set or standard error is a regular file,
// which opening would truncate. Such a log is not held back: it precedes the error.
void ranks_library_log(const char *variable);

// The last call: after it a rank may exit with any code.
void ranks_leave(void);

#ifdef __cplusplus
}
#endif
#endif
