// Communication between ranks: processes that train together, each with its own device. MPI starts
// them (mpirun, srun --mpi=pmix) and moves data in host memory; device buffers go over MPI on the
// CPU and over NCCL on GPUs. A single process is rank 0 of 1: it uses neither, and every call below
// is a no-op or a local sum.
//
// All ranks make the same calls in the same order, and block on each other in them. A flat buffer
// is sharded: rank r owns elements first[r] to first[r+1] - 1; first (num_ranks + 1) is in host
// memory. Pointers are device memory unless their names end in _host; letters and "=", "+=" have
// the meaning of kernels.h.
//
// An error (error_exit), or exit() with a code other than 0 before comm_finalize, ends all ranks:
// one of them prints it, and the launcher exits with its code. If a rank is killed, the launcher
// names it and ends the others; Open MPI's exit code is then 128 + the signal.
#pragma once

#include "../kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- The job ------------------------------------------------------------------------------------

// Joins the other ranks, if a launcher's variables are set; before any other call. Ends the process
// with exit code 2 if they say that it is one of several and MPI does not find the others. From
// then on only rank 0 has a standard output and prints warnings.
void comm_init(void);

// After comm_init and the choice of the device: connects the devices of all ranks. `stream` is the
// device's queue (cudaStream_t; the CPU backend has none). NULL, or one line that says what is
// missing.
const char *comm_connect(void *stream);

// The last call: after it a rank may exit with any code.
void comm_finalize(void);

int comm_rank(void);
int comm_num_ranks(void);
int comm_local_rank(void);   // among the ranks of this machine
int comm_local_ranks(void);  // ranks of this machine
// The option of this process's launcher that gives a rank more cores; NULL: it has none
const char *comm_unbind_hint(void);

// ---- Collectives on device buffers --------------------------------------------------------------

// Asynchronous, on elements from .. to - 1 of a flat buffer, overlapped with compute: they start
// after all work enqueued so far, run in order, and return a handle for comm_wait. Until then
// nothing else may write that range, or read any of it but this rank's own shard of weights.
// x: this rank's shard =  sum over ranks; the other shards are left undefined. The same bits in
// every run with the same number of ranks and the same ranges.
uint64_t comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to);
// weights: every shard =  its owner's
uint64_t comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to);
// Work enqueued later waits for this handle and all earlier ones; does not block the host. 0: none.
// Counts as progress.
void comm_wait(uint64_t handle);

// out (num_ranks, block) =  row r: of rank r's x, the elements of this rank's shard from `at` on,
// at most `block` of them. Not reduced: the caller sums in the order it needs. For several ranks.
void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t block);
// partial (skip + n) double =  sum over ranks, then sum (1) double +=  its last n elements in
// order. If each partial sum is one rank's, and 0 on the others, the bits do not depend on the
// number of ranks.
void comm_sum_in_order(double *sum, double *partial, size_t skip, size_t n);

// ---- Exchanges of host memory, over MPI: small things, outside of steps -------------------------

int comm_max(int value);  // the largest of all ranks
// data (bytes) =  rank 0's
void comm_broadcast(void *data_host, size_t bytes);
// out (num_ranks, bytes) =  every rank's data
void comm_all_gather_host(void *out_host, const void *data_host, size_t bytes);
// values (to - from) on rank 0: each other rank's part of elements from .. to - 1 =  its values
void comm_merge(float *values_host, const size_t *first, size_t from, size_t to);
// A rank that has ended, with exit code 0, ends all with 9 here.
void comm_barrier(void);

// ---- Heartbeat ----------------------------------------------------------------------------------

// Counts as progress, and sets the main thread's phase for the message when this rank hangs:
// "forward", "save", ... a constant of at most 15 characters. step: from 1; 0: none; -1: as before.
void comm_phase(const char *phase, int64_t step);
// Counts as progress, from any thread: long work calls it again and again. In rank 0's main thread
// it also tells the ranks that wait for it.
void comm_progress(void);
// A rank that makes no progress for this long, without waiting for others, says so and ends the job
// with exit code 8; a rank that waits does so after twice as long without a sign of life from rank
// 0. Both limits are ten times as long in the phases "set-up" and "evaluate". A process that is
// stopped for this long is named by the other ranks of its machine. Default 60; 0: never.
void comm_heartbeat(double seconds);

#ifdef __cplusplus
}
#endif
