// Without MPI there is one rank, and a start as one of several is an error.
#ifndef WITH_MPI

#include <string.h>

#include "../../data/base/error.h"
#include "comm.h"
#include "world.h"

void comm_init(void) {
    if (world_start() == 1) return;
    exit_with(EXIT_USAGE,
              "apt-get install openmpi-bin libopenmpi-dev and make again; or start one process",
              "ranks: started as one of several, but built without MPI");
}
void rank_at_exit(int code, void *unused) { (void)code, (void)unused; }
void rank_waits(bool waits) { (void)waits; }
void rank_progress(void) {}
void rank_set_network(const Network *network) { (void)network; }
void comm_phase(const char *phase, int64_t step) { (void)phase, (void)step; }
void comm_heartbeat(double seconds) { (void)seconds; }
void comm_finalize(void) {}
void comm_progress(void) {}
int comm_max(int value) { return value; }
void comm_barrier(void) {}
void comm_broadcast(void *data, size_t bytes) { (void)data, (void)bytes; }
void comm_merge(float *values, const size_t *first, size_t from, size_t to) {
    (void)values, (void)first, (void)from, (void)to;
}
void comm_all_gather_host(void *out, const void *data, size_t bytes) { memmove(out, data, bytes); }

#endif
