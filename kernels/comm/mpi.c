// The transport of the CPU backend: flat buffers over MPI. Built with -DWITH_MPI where mpi.h is
// found; without it a job has one rank, and being started as one of several is an error.
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/memory.h"
#include "comm.h"
#include "ranks.h"

const char *comm_connect(void *stream) {
    (void)stream;  // MPI starts in comm_init
    return NULL;
}

void comm_phase(const char *phase, int64_t step) { ranks_phase(phase, step); }

#ifndef WITH_MPI

const char *comm_init(void) {
    return ranks_launched() > 1 ? "started as one of several ranks, but built without MPI" : NULL;
}
uint64_t comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to) {
    return (void)x, (void)first, (void)from, (void)to, 0;
}
uint64_t comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    return (void)weights, (void)first, (void)from, (void)to, 0;
}
void comm_all_gather(real *x, const size_t *first) { (void)x, (void)first; }
void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t block) {
    memcpy(out, x + at, (first[1] - at < block ? first[1] - at : block) * sizeof(real));
}
static void sum_over_ranks(double *partial, size_t n) { (void)partial, (void)n; }
void comm_finalize(void) {}

#else

#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#ifdef GRADCHECK
#define REAL MPI_DOUBLE
#else
#define REAL MPI_FLOAT
#endif

static int *counts, *starts, *collect_counts, *collect_starts;  // (num_ranks) for MPI's calls

// ------------------------------------------------------------------------------------------------
// Start and end

static void broadcast_by_mpi(void *data, size_t bytes) {
    MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
}

// Before the handlers that MPI has registered
static void at_exit(int code, void *unused) {
    if (code == 0)
        comm_finalize();
    else
        ranks_at_exit(code, unused);
}

// MPI_Init returns when all ranks have called it, however long that takes.
static char late_start[512];
static void end_late_start(int sig) {
    (void)sig;
    if (write(2, late_start, strlen(late_start)) >= 0) _exit(EXIT_PEER_LOST);
    _exit(EXIT_PEER_LOST);
}

static const char *start_mpi(void) {
    int provided;
    snprintf(late_start, sizeof late_start,
             "error: ranks: expected %d ranks in MPI_Init within %d s, found rank %d on %s waiting "
             "for others\nhint: start all ranks, where they can reach each other; "
             "RANKS_JOIN_SECONDS sets the time\n",
             ranks.num, ranks_join_seconds(), ranks.rank, ranks.host);
    signal(SIGALRM, end_late_start);
    alarm((unsigned)(ranks_join_seconds() + ranks_turn_seconds()));
    const int status = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    alarm(0);
    signal(SIGALRM, SIG_DFL);
    return status == MPI_SUCCESS ? NULL : "MPI does not start";
}

static const char *check_mpi(int num_ranks) {
    int num_found;
    MPI_Comm_size(MPI_COMM_WORLD, &num_found);
    if (num_found == num_ranks) return NULL;
    MPI_Finalize();
    return "started as one of several ranks, but MPI finds no others: start them with mpirun";
}

static void make_counts(int num_ranks) {
    counts = host_calloc(4 * (size_t)num_ranks, sizeof(int), "ranks");
    starts = counts + num_ranks;
    collect_counts = starts + num_ranks;
    collect_starts = collect_counts + num_ranks;
}

// Where they can the ranks meet before MPI starts, because MPI does not say which of them it waits
// for; else MPI is how they find each other.
const char *comm_init(void) {
    const int num_ranks = ranks_launched();
    if (num_ranks == 1) return NULL;
    const bool first = ranks.here || getenv("MASTER_ADDR");
    const char *missing = first ? ranks_join(NULL) : NULL;
    if (!missing) missing = start_mpi();
    if (!missing) missing = check_mpi(num_ranks);
    if (!missing && !first) missing = ranks_join(broadcast_by_mpi);
    if (missing) return missing;
    make_counts(num_ranks);
    on_exit(at_exit, NULL);
    if (comm_rank() == 0) return NULL;
    return freopen("/dev/null", "w", stdout) ? NULL : "cannot open /dev/null";
}

void comm_finalize(void) {
    if (comm_num_ranks() == 1) return;
    ranks_phase("leave", 0);
    ranks_enter_collective(false);
    MPI_Finalize();
    ranks_leave_collective(false);
    ranks_leave();
}

// ------------------------------------------------------------------------------------------------
// Flat buffers. MPI counts in int, which is enough for two thousand million parameters. No call
// blocks: a rank that hangs inside a collective is told from those that wait for it there.

static void wait_for(MPI_Request *request) {
    for (int done = 0; !done; comm_progress()) MPI_Test(request, &done, MPI_STATUS_IGNORE);
}

// counts and starts: the part of from .. to - 1 in each rank's shard
static void fill_counts(const size_t *first, size_t from, size_t to) {
    if (to > INT_MAX)
        ranks_die(EXIT_DEVICE_ERROR, "train this model with one rank, or with the CUDA backend",
                  "expected at most %d parameters, found %zu", INT_MAX, to);
    for (int r = 0; r < comm_num_ranks(); r++) {
        const size_t at = first[r] > from ? first[r] : from,
                     end = first[r + 1] < to ? first[r + 1] : to;
        counts[r] = at < end ? (int)(end - at) : 0;
        starts[r] = at < end ? (int)at : (int)from;
    }
}

// Synchronous: the cores that would do the reduction are busy computing. MPI puts the sum where the
// range begins, whichever shard it is.
uint64_t comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to) {
    const int rank = comm_rank();
    MPI_Request request;
    if (comm_num_ranks() == 1 || from >= to) return 0;
    fill_counts(first, from, to);
    ranks_enter_collective(true);
    const double start_ms = now_ms();  // waiting for others is not this rank's work
    MPI_Ireduce_scatter(MPI_IN_PLACE, x + from, counts, REAL, MPI_SUM, MPI_COMM_WORLD, &request);
    wait_for(&request);
    device_timer_leave_out(now_ms() - start_ms);
    ranks_leave_collective(true);
    memmove(x + starts[rank], x + from, (size_t)counts[rank] * sizeof(real));
    return 0;
}

static void gather(real *x, const size_t *first, size_t from, size_t to) {
    MPI_Request request;
    if (comm_num_ranks() == 1 || from >= to) return;
    fill_counts(first, from, to);
    ranks_enter_collective(true);
    MPI_Iallgatherv(MPI_IN_PLACE, 0, REAL, x, counts, starts, REAL, MPI_COMM_WORLD, &request);
    wait_for(&request);
    ranks_leave_collective(true);
}

uint64_t comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    gather(weights, first, from, to);  // floatX is real
    return 0;
}

void comm_all_gather(real *x, const size_t *first) { gather(x, first, 0, first[comm_num_ranks()]); }

// How many of a shard's elements lie from `at` on, at most `block`.
static int part_of_shard(int shard, size_t at, size_t block) {
    const size_t n = (size_t)shard > at ? (size_t)shard - at : 0;
    return (int)(n < block ? n : block);
}

void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t block) {
    if (comm_num_ranks() == 1) {
        memcpy(out, x + at, (first[1] - at < block ? first[1] - at : block) * sizeof(real));
        return;
    }
    MPI_Request request;
    fill_counts(first, 0, first[comm_num_ranks()]);
    int own = part_of_shard(counts[comm_rank()], at, block);
    for (int r = 0; r < comm_num_ranks(); r++) {
        counts[r] = part_of_shard(counts[r], at, block);
        starts[r] = counts[r] ? starts[r] + (int)at : 0;
        collect_counts[r] = own;
        collect_starts[r] = (int)((size_t)r * block);
    }
    ranks_enter_collective(true);
    MPI_Ialltoallv(x, counts, starts, REAL, out, collect_counts, collect_starts, REAL,
                   MPI_COMM_WORLD, &request);
    wait_for(&request);
    ranks_leave_collective(true);
}

static void sum_over_ranks(double *partial, size_t n) {
    MPI_Request request;
    if (comm_num_ranks() == 1) return;
    ranks_enter_collective(true);
    MPI_Iallreduce(MPI_IN_PLACE, partial, (int)n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &request);
    wait_for(&request);
    ranks_leave_collective(true);
}

#endif

// Nothing is under way: both begin and end in the call.
void comm_wait(uint64_t handle) {
    (void)handle;
    comm_progress();
}

void comm_sum_in_order(double *sum, double *partial, size_t n) {
    sum_over_ranks(partial, n);
    double s = 0;
    for (size_t i = 0; i < n; i++) s += partial[i];
    *sum += s;
}
