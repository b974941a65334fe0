// Flat buffers of the CPU backend, over MPI.
#include <limits.h>
#include <string.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/memory.h"
#include "comm.h"
#include "world.h"

const char *comm_connect(void *stream) {
    (void)stream;  // MPI has started in comm_init
    return NULL;
}

#ifdef WITH_MPI

_Static_assert(sizeof(real) == sizeof(float), "the fp64 build has one rank");

// The part of from .. to - 1 in each rank's shard: (num_ranks) numbers of elements, then where they
// begin. MPI counts in int.
static int *counts_of(const size_t *first, size_t from, size_t to) {
    const int ranks = comm_num_ranks();
    int *counts = host_calloc(2 * (size_t)ranks, sizeof(int), "ranks");
    if (to > INT_MAX)
        exit_with(EXIT_DEVICE_ERROR, "train this model with one rank, or with the CUDA backend",
                  "ranks: expected at most %d parameters, found %zu", INT_MAX, to);
    for (int r = 0; r < ranks; r++) {
        const ShardPart part = part_of_shard(first, r, from, to);
        counts[r] = (int)part.count;
        counts[ranks + r] = part.count ? (int)part.at : (int)from;
    }
    return counts;
}

// MPI writes the sum to the beginning of the range, whichever shard that is.
static void reduce(real *x, const size_t *first, size_t from, size_t to) {
    AUTO_FREE int *counts = counts_of(first, from, to);
    const ShardPart own = part_of_shard(first, comm_rank(), from, to);
    MPI_Request request;
    MPI_Ireduce_scatter(MPI_IN_PLACE, x + from, counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                        &request);
    rank_wait(&request, false);
    if (own.count) memmove(x + own.at, x + from, own.count * sizeof(real));
}

static void gather(real *x, const size_t *first, size_t from, size_t to) {
    AUTO_FREE int *counts = counts_of(first, from, to);
    MPI_Request request;
    MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_FLOAT, x, counts, counts + comm_num_ranks(), MPI_FLOAT,
                    MPI_COMM_WORLD, &request);
    rank_wait(&request, false);
}

void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t block) {
    const int ranks = comm_num_ranks();
    const size_t own = first[comm_rank()] + at;
    const ShardPart part = part_of_shard(first, comm_rank(), own, own + block);
    AUTO_FREE MPI_Request *requests = host_calloc(2 * (size_t)ranks, sizeof *requests, "ranks");
    for (int r = 0; r < ranks; r++) {
        const ShardPart theirs = part_of_shard(first, r, first[r] + at, first[r] + at + block);
        MPI_Irecv(out + (size_t)r * block, (int)part.count, MPI_FLOAT, r, DATA_TAG, MPI_COMM_WORLD,
                  &requests[2 * r]);
        MPI_Isend(x + (theirs.count ? theirs.at : 0), (int)theirs.count, MPI_FLOAT, r, DATA_TAG,
                  MPI_COMM_WORLD, &requests[2 * r + 1]);
    }
    for (int i = 0; i < 2 * ranks; i++) rank_wait(&requests[i], false);
}

static void sum_over_ranks(double *x, size_t n) {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, x, (int)n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &request);
    rank_wait(&request, false);
}

#else

static void reduce(real *x, const size_t *first, size_t from, size_t to) {
    (void)x, (void)first, (void)from, (void)to;
}
#define gather reduce
void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t block) {
    (void)out, (void)x, (void)first, (void)at, (void)block;
}
static void sum_over_ranks(double *x, size_t n) { (void)x, (void)n; }

#endif

// Synchronous: the cores that would do the reduction are busy computing.
uint64_t comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to) {
    if (comm_num_ranks() == 1 || from >= to) return 0;
    const double start_ms = now_ms();
    reduce(x, first, from, to);
    device_timer_leave_out(now_ms() - start_ms);  // waiting for others is not this rank's work
    return 0;
}

uint64_t comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    if (comm_num_ranks() > 1 && from < to) gather(weights, first, from, to);  // floatX is real
    return 0;
}

// Nothing is in flight: both collectives complete within the call.
void comm_wait(uint64_t handle) {
    (void)handle;
    comm_progress();
}

void comm_sum_in_order(double *sum, double *partial, size_t skip, size_t n) {
    double s = 0;
    if (comm_num_ranks() > 1) sum_over_ranks(partial, skip + n);
    for (size_t i = skip; i < skip + n; i++) s += partial[i];
    *sum += s;
}
