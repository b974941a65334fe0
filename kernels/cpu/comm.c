// Ranks over MPI. Built with -DWITH_MPI where mpi.h is found; without it one process is all there
// is, and being started as one of several is an error.

#include <limits.h>
#include <stdio_ext.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

#ifndef WITH_MPI

const char *comm_init(void) {
    return comm_launched_ranks() > 1 ? "started as one of several ranks, but built without MPI"
                                     : NULL;
}
int comm_rank(void) { return 0; }
int comm_num_ranks(void) { return 1; }
int comm_local_rank(void) { return 0; }
void comm_reduce_scatter(real *x, const size_t *first) { (void)x, (void)first; }
void comm_all_gather(real *x, const size_t *first) { (void)x, (void)first; }
void comm_all_gather_weights(floatX *weights, uint16_t *master_lo, const size_t *first) {
    (void)weights, (void)master_lo, (void)first;
}
void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t chunk) {
    memcpy(out, x + at, (first[1] - at < chunk ? first[1] - at : chunk) * sizeof(real));
}
static void sum_over_ranks(double *parts, size_t n) { (void)parts, (void)n; }
int comm_max(int value) { return value; }
void comm_broadcast(void *data_host, size_t bytes) { (void)data_host, (void)bytes; }
void comm_all_gather_host(void *out_host, const void *data_host, size_t bytes) {
    memcpy(out_host, data_host, bytes);
}
void comm_merge(void *data_host, size_t bytes) { (void)data_host, (void)bytes; }
void comm_barrier(void) {}
void comm_finalize(void) {}

#else

#include <mpi.h>

#ifdef GRADCHECK
#define REAL MPI_DOUBLE
#else
#define REAL MPI_FLOAT
#endif

static int rank, num_ranks = 1, local_rank;
static int joined;                                              // between MPI_Init and MPI_Finalize
static int *counts, *starts, *collect_counts, *collect_starts;  // (num_ranks) for MPI's calls

// ------------------------------------------------------------------------------------------------
// Start and end

// A failure that all ranks have is rank 0's to report: it ends the others while they wait here,
// before what they said was shown (a slow launcher may let them say it again). A failure of this
// rank alone is shown when the time is over.
static void end_all(int code) {
    const struct timespec a_moment = {rank > 0 ? 5 : 0, 100000000L * (rank % 8)};
    if (rank > 0 && nanosleep(&a_moment, NULL) != 0) _exit(code);
    joined = 0;
    fflush(NULL);
    MPI_Abort(MPI_COMM_WORLD, code);
}

static void at_exit(int code, void *unused) {
    (void)unused;
    if (!joined) return;
    if (code != 0) end_all(code);
    comm_finalize();
}

static void find_local_rank(void) {
    MPI_Comm machine;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &local_rank);
    MPI_Comm_free(&machine);
}

const char *comm_init(void) {
    int provided;
    if (comm_launched_ranks() == 1) return NULL;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        return "MPI does not start";
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
    if (num_ranks != comm_launched_ranks()) {
        MPI_Finalize();
        return "started as one of several ranks, but MPI finds no others: start them with mpirun";
    }
    counts = (int *)calloc(4 * (size_t)num_ranks, sizeof(int));
    if (!counts) return "no memory for the list of ranks";
    starts = counts + num_ranks;
    collect_counts = starts + num_ranks;
    collect_starts = collect_counts + num_ranks;
    joined = 1;
    find_local_rank();
    on_exit(at_exit, NULL);
    // whole lines, because the launcher mixes what ranks write
    setvbuf(stderr, NULL, rank == 0 ? _IOLBF : _IOFBF, 1 << 16);
    if (rank == 0) return NULL;
    return freopen("/dev/null", "w", stdout) ? NULL : "cannot open /dev/null";
}

void comm_finalize(void) {
    if (!joined) return;
    joined = 0;
    if (rank > 0) __fpurge(stderr);  // all went well: what was held back is rank 0's to say
    MPI_Finalize();
}

int comm_rank(void) { return rank; }
int comm_num_ranks(void) { return num_ranks; }
int comm_local_rank(void) { return local_rank; }

// ------------------------------------------------------------------------------------------------
// Flat buffers. MPI counts in int, which is enough for two thousand million parameters.

static void fill_shares(const size_t *first) {
    if (first[num_ranks] > INT_MAX)
        kernel_fatal("ranks: expected at most %d parameters, found %zu", INT_MAX, first[num_ranks]);
    for (int r = 0; r < num_ranks; r++) {
        counts[r] = (int)(first[r + 1] - first[r]);
        starts[r] = (int)first[r];
    }
}

// The sum over ranks is put where x begins, whichever share it is.
void comm_reduce_scatter(real *x, const size_t *first) {
    if (num_ranks == 1) return;
    fill_shares(first);
    MPI_Reduce_scatter(MPI_IN_PLACE, x, counts, REAL, MPI_SUM, MPI_COMM_WORLD);
    memmove(x + first[rank], x, (size_t)counts[rank] * sizeof(real));
}

void comm_all_gather(real *x, const size_t *first) {
    if (num_ranks == 1) return;
    fill_shares(first);
    MPI_Allgatherv(MPI_IN_PLACE, 0, REAL, x, counts, starts, REAL, MPI_COMM_WORLD);
}

void comm_all_gather_weights(floatX *weights, uint16_t *master_lo, const size_t *first) {
    (void)master_lo;                  // the weight is its own fp32 master here,
    comm_all_gather(weights, first);  // and floatX is real
}

// How many of a share's elements lie from `at` on, at most chunk.
static int part_of_share(int share, size_t at, size_t chunk) {
    size_t n = (size_t)share > at ? (size_t)share - at : 0;
    return (int)(n < chunk ? n : chunk);
}

void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t chunk) {
    if (num_ranks == 1) {
        memcpy(out, x + at, (first[1] - at < chunk ? first[1] - at : chunk) * sizeof(real));
        return;
    }
    fill_shares(first);
    int own = part_of_share(counts[rank], at, chunk);
    for (int r = 0; r < num_ranks; r++) {
        counts[r] = part_of_share(counts[r], at, chunk);
        starts[r] = counts[r] ? starts[r] + (int)at : 0;
        collect_counts[r] = own;
        collect_starts[r] = (int)((size_t)r * chunk);
    }
    MPI_Alltoallv(x, counts, starts, REAL, out, collect_counts, collect_starts, REAL,
                  MPI_COMM_WORLD);
}

static void sum_over_ranks(double *parts, size_t n) {
    if (num_ranks > 1)
        MPI_Allreduce(MPI_IN_PLACE, parts, (int)n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

// ------------------------------------------------------------------------------------------------
// Host memory

int comm_max(int value) {
    if (num_ranks > 1) MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return value;
}

void comm_broadcast(void *data_host, size_t bytes) {
    if (num_ranks > 1) MPI_Bcast(data_host, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
}

void comm_all_gather_host(void *out_host, const void *data_host, size_t bytes) {
    if (num_ranks > 1)
        MPI_Allgather(data_host, (int)bytes, MPI_BYTE, out_host, (int)bytes, MPI_BYTE,
                      MPI_COMM_WORLD);
    else
        memcpy(out_host, data_host, bytes);
}

void comm_merge(void *data_host, size_t bytes) {
    if (num_ranks == 1) return;
    if (rank == 0)
        MPI_Reduce(MPI_IN_PLACE, data_host, (int)bytes, MPI_BYTE, MPI_BOR, 0, MPI_COMM_WORLD);
    else
        MPI_Reduce(data_host, NULL, (int)bytes, MPI_BYTE, MPI_BOR, 0, MPI_COMM_WORLD);
}

void comm_barrier(void) {
    if (num_ranks > 1) MPI_Barrier(MPI_COMM_WORLD);
}

#endif

void comm_sum_parts(double *sum, double *parts, size_t n) {
    sum_over_ranks(parts, n);
    double s = 0;
    for (size_t i = 0; i < n; i++) s += parts[i];
    *sum += s;
}
