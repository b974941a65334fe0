// How the ranks of a job find each other, and what they then know of each other.
//
// Every rank connects to rank 0, at an address found in one of three ways:
//   1. MASTER_ADDR and MASTER_PORT (29500 when unset) of the environment
//   2. a broadcast that exists already (MPI's)
//   3. all ranks on one machine: a file of mode 0600 in the temporary directory, named by the
//      launcher's job id
// A rank that does not connect within RANKS_JOIN_SECONDS (300 when unset) is named and ends the
// job. Connections that do not know the job (2 and 3: a secret; 1: the launcher's job id) are
// dropped.
#ifndef UNPAD_RENDEZVOUS_H
#define UNPAD_RENDEZVOUS_H

#include <stddef.h>
#include <stdint.h>

#include "ranks.h"

// One rank as the others know it
typedef struct {
    char host[64];
    uint64_t machine;  // equal on ranks of one machine
    int32_t rank, local_rank, local_size, pid;
} RanksPlace;

// Each rank has two connections to rank 0, so that the watchdog does not wait behind data.
enum { RANKS_DATA, RANKS_WATCH, RANKS_CHANNELS };

// This rank's view of the job. A single process: rank 0 of 1, joined 0, the rest unset.
typedef struct {
    int rank, num, joined;
    RanksPlace *places;  // (num)
    // file descriptors: on rank 0 (num), its own unused; on the others [0] leads to rank 0
    int *sockets[RANKS_CHANNELS];
    uint64_t token[2];  // what only ranks of this job know
} Ranks;
extern Ranks ranks;

// This process, by its launcher; what that does not say is -1.
RanksPlace ranks_place(void);

// Connects all ranks and fills in `ranks`. NULL, or one line that says what is missing. A job that
// does not come together ends the process.
const char *ranks_meet(RanksBroadcast broadcast);

// Closes the connections: `ranks` is then that of a single process.
void ranks_part(void);

// All bytes, or -1. flags: of send(2). A receive waits at most as long as ranks_set_timeout says
// (0: for ever).
int ranks_send(int fd, const void *data, size_t bytes, int flags);
int ranks_receive(int fd, void *data, size_t bytes);
void ranks_set_timeout(int fd, int ms);

// Is this process the first of its machine and job to find an error that all of them find?
int ranks_first_to_report(void);

#endif
