// The ranks of a job: processes that train together, found over TCP. Linux. For the transports
// (mpi.c, nccl.cu), which implement the rest of comm.h on top of it:
//
//   ranks.c         who am I, by the launcher's environment; exchanges of host memory
//   rendezvous.c    how the ranks find each other
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

#define RANKS_RESUME \
    "the newest checkpoint is whole: start again with --resume (scripts/train_until_done.sh does)"

// Each rank has two connections to rank 0, so that the watchdog does not wait behind data.
enum { RANKS_DATA, RANKS_WATCH, RANKS_CHANNELS };

typedef struct {
    char host[64];
    int sockets[RANKS_CHANNELS];  // -1: none
} RanksPeer;

// This rank's view of the job. A single process is rank 0 of 1, and not joined.
typedef struct {
    int rank, num, local_rank;  // rank and local_rank -1: the launcher does not say
    int num_local;              // 1: it does not
    bool here, joined;          // here: all ranks are on this machine
    uint64_t job;               // the same on all ranks of a job
    char host[64];
    RanksPeer *peers;  // on rank 0 (num), its own unused; on the others [0] is rank 0
} Ranks;
extern Ranks ranks;

// Ranks that the launcher started, by the environment; 1 for a single process. Fills in `ranks` but
// for the peers. Ends the process with exit code 2 where the environment makes no sense.
int ranks_launched(void);

// Joins the others, after ranks_launched. broadcast: one over all ranks that exists already (rank
// 0's data to all), or NULL. Returns NULL, or one line that says what is missing for this process
// to be a rank. Ranks that do not connect within ranks_join_seconds are named, and the job ends
// with exit code 8. From then on error_exit on any rank ends all of them with one error.
typedef void (*RanksBroadcast)(void *data, size_t bytes);
const char *ranks_join(RanksBroadcast broadcast);
int ranks_join_seconds(void);

// Until this rank reports an error that all of them find before they have joined
int ranks_turn_seconds(void);

// error_exit with "ranks: what"
__attribute__((noreturn, format(printf, 3, 4))) void ranks_die(int code, const char *hint,
                                                               const char *what, ...);

// For on_exit: an exit code other than 0 without an error ends all ranks too.
void ranks_at_exit(int code, void *unused);

// Around every call that blocks on other ranks, so that this rank is not the one that is blamed.
// polls: the caller waits in a loop that calls comm_progress; a rank that stops doing so is hung.
// Else it waits in a library or on a device, and a hang inside shows only as all ranks waiting.
void ranks_enter_collective(bool polls);
void ranks_leave_collective(bool polls);

// The phase and progress of comm_phase.
void ranks_phase(const char *phase, int64_t step);

// The last call: after it a rank may exit with any code.
void ranks_leave(void);

// ------------------------------------------------------------------------------------------------
// Between ranks.c, rendezvous.c and watchdog.c

// A whole number of the environment from `least` to `most`; `otherwise` when `name` is NULL or
// unset. Anything else ends the process with exit code 2.
int ranks_env_number(const char *name, int least, int most, int otherwise);

// Connects all ranks: fills in the peers. NULL, or one line that says what is missing. A job that
// does not come together ends the process.
const char *ranks_meet(RanksBroadcast broadcast);

// All bytes, or false: the connection ended, or they did not come in time.
bool ranks_receive(int fd, void *data, size_t bytes);

// Is this process the first of its machine to find rank 0 gone? Holds rank 0's port until it ends.
bool ranks_first_to_report(void);

void watchdog_start(void);
void watchdog_leave(void);  // connections that end from now on are not lost ranks
void watchdog_stop(void);

#ifdef __cplusplus
}
#endif
#endif
