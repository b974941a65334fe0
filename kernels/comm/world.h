// Private to comm: this rank among the others, how it may end them, and what a backend's buffers
// (cpu.c, nccl.cu) and the exchange between ranks (mpi.c) tell each other.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int rank, num, local_rank, num_local;
    int machine;              // number of this rank's machine
    char host[64];            // its name
    void (*abort)(int code);  // ends all ranks; NULL: MPI has not started or has ended
    int *claimed;  // shared by the ranks of a machine, not 0 once one reports an error; or NULL
} World;
extern World world;

// How many ranks the launcher has started; 1: a single process, 0: MPI knows. From then on an error
// of one of several ends all.
int world_start(void);

// Call around every wait for other ranks, on the host or on the device: meanwhile this rank is not
// the one that hangs. Counts as progress.
void rank_waits(bool waits);
void rank_progress(void);

// The network of a backend's buffers, from comm_connect on; one without sets none.
typedef struct {
    const char *(*error)(void);  // one line when it has failed, NULL while it works; in any thread
    void (*disconnect)(void);    // waits for the device and undoes comm_connect
    void (*phase)(void);         // at the end of comm_phase
} Network;
void rank_set_network(const Network *network);

// For on_exit: ends all ranks as described in comm.h. A backend registers it again after a library
// with its own handlers, which might wait for other ranks.
void rank_at_exit(int code, void *unused);

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
enum { SIGN_TAG = 1, DATA_TAG };  // of messages between two ranks
// Waits for a collective. sleeps: one that is short but may begin long before other ranks reach it.
void rank_wait(MPI_Request *request, bool sleeps);
#endif

#ifdef __cplusplus
}
#endif
