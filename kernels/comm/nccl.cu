// The transport of the CUDA backend: device memory over NCCL, each rank with a GPU of its own.
// Built with -DWITH_NCCL where nccl.h is found; without it a job has one rank, and being started as
// one of several is an error.

#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "../kernels.h"
#include "comm.h"
#include "ranks.h"

extern "C" {
#include "../../data/base/error.h"
}

static cudaStream_t stream;  // the device's own, of comm_connect

static void cuda_check(int line, const char *call, cudaError_t status) {
    if (status != cudaSuccess)
        device_fail(
            "see nvidia-smi; a kernel may have failed earlier: CUDA_LAUNCH_BLOCKING=1 "
            "shows which",
            "cuda: %s:%d: %s: %s", __FILE__, line, call, cudaGetErrorString(status));
}
#define CUDA_CHECK(call_) cuda_check(__LINE__, #call_, call_)

// How many of a shard's elements lie from `at` on, at most `block`.
static size_t part_of_shard(size_t shard, size_t at, size_t block) {
    const size_t n = shard > at ? shard - at : 0;
    return n < block ? n : block;
}

#ifndef WITH_NCCL

const char *comm_init(void) {
    return ranks_launched() > 1
               ? "started as one of several ranks, but the CUDA backend was built without NCCL"
               : nullptr;
}
extern "C" const char *comm_connect_alone(void) { return "built without NCCL"; }
const char *comm_connect(void *device_stream) {
    stream = (cudaStream_t)device_stream;
    return nullptr;
}
void comm_finalize(void) {}
uint64_t comm_reduce_begin(real *, const size_t *, size_t, size_t) { return 0; }
uint64_t comm_gather_begin(floatX *, const size_t *, size_t, size_t) { return 0; }
void comm_wait(uint64_t) {}
void comm_all_gather(real *, const size_t *) {}
void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t block) {
    device_copy(out, x + at, part_of_shard(first[1], at, block) * sizeof(real));
}
static void sum_over_ranks(double *, size_t) {}
void comm_phase(const char *phase, int64_t step) { ranks_phase(phase, step); }

#else

#include <nccl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

static ncclComm_t nccl;  // NULL: a single rank
static int rank, num_ranks = 1;

// Overlapped communication has its own stream. A handle counts what was enqueued there; its event
// may be that of a later one, NUM_EVENTS on, which is then waited for as well.
enum { NUM_EVENTS = 256 };  // more than a model has layers
static cudaStream_t overlapped;
static cudaEvent_t computed, communicated[NUM_EVENTS];
static uint64_t begun, waited;

#define NCCL_HINT                                                                                 \
    "NCCL_DEBUG=WARN says more (NCCL_DEBUG_FILE=nccl.%h.%p: in files); each rank needs a GPU of " \
    "its own"

static void nccl_check(int line, const char *call, ncclResult_t status) {
    if (status == ncclSuccess) return;
    const char *last = ncclGetLastError(nccl);
    device_fail(NCCL_HINT, "nccl: %s:%d: %s: %s%s%s", __FILE__, line, call,
                ncclGetErrorString(status), last && *last ? ": " : "", last ? last : "");
}
#define NCCL_CHECK(call_) nccl_check(__LINE__, #call_, call_)

// ------------------------------------------------------------------------------------------------
// Start and end

// A network that fails while the GPUs work is known to NCCL alone: the host would wait for a stream
// that never ends. Lost ranks are for the watchdog to notice.
static pthread_mutex_t watching = PTHREAD_MUTEX_INITIALIZER;

static void *watch_nccl(void *) {
    ncclResult_t status = ncclSuccess;
    for (;; sleep(1)) {
        pthread_mutex_lock(&watching);
        if (nccl && ncclCommGetAsyncError(nccl, &status) != ncclSuccess) status = ncclSystemError;
        if (!nccl) return pthread_mutex_unlock(&watching), nullptr;
        if (status != ncclSuccess && status != ncclInProgress) {
            Error err = {};
            error_set(&err, EXIT_DEVICE_ERROR, NCCL_HINT, "nccl: ncclCommGetAsyncError: %s",
                      ncclGetErrorString(status));
            error_exit(&err);
        }
        pthread_mutex_unlock(&watching);
    }
}

static void leave(int code, void *unused) {
    if (code == 0)
        ranks_leave();
    else
        ranks_at_exit(code, unused);
}

const char *comm_init(void) {
    if (ranks_launched() == 1) return nullptr;
    if (ranks.rank >= 0 && ranks.local_rank < 0)
        ranks_die(EXIT_USAGE, "set it as torchrun would: each rank needs a GPU of its own",
                  "LOCAL_RANK: expected the number of this rank on its machine, found none");
    const char *missing = ranks_join(nullptr);
    if (missing) return missing;
    on_exit(leave, nullptr);
    if (comm_rank() == 0) return nullptr;
    return freopen("/dev/null", "w", stdout) ? nullptr : "cannot open /dev/null";
}

// High-priority stream: other ranks are waiting for it.
static void create_stream() {
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&overlapped, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&computed, cudaEventDisableTiming));
    for (int i = 0; i < NUM_EVENTS; i++)
        CUDA_CHECK(cudaEventCreateWithFlags(&communicated[i], cudaEventDisableTiming));
}

// Ranks but 0 have no standard output, where NCCL logs to. A regular file would be truncated.
static void log_to_stderr() {
    struct stat status;
    if (fstat(2, &status) == 0 && !S_ISREG(status.st_mode))
        setenv("NCCL_DEBUG_FILE", "/dev/stderr", 0);
}

static const char *connect() {
    ncclUniqueId id;
    pthread_t thread;
    rank = comm_rank();
    num_ranks = comm_num_ranks();
    if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    comm_broadcast(&id, sizeof id);
    if (rank > 0) log_to_stderr();
    ranks_enter_collective(false);
    NCCL_CHECK(ncclCommInitRank(&nccl, num_ranks, id, rank));
    ranks_leave_collective(false);
    create_stream();
    // before CUDA's own handlers, which may wait for kernels that wait for other ranks
    on_exit(leave, nullptr);
    if (pthread_create(&thread, nullptr, watch_nccl, nullptr) != 0)
        return "no thread to watch NCCL";
    pthread_detach(thread);
    return nullptr;
}

const char *comm_connect(void *device_stream) {
    stream = (cudaStream_t)device_stream;
    return comm_num_ranks() > 1 ? connect() : nullptr;
}

// After comm_connect, for tests: a communicator of one rank, so that NCCL runs on a single GPU.
extern "C" const char *comm_connect_alone(void) { return connect(); }

void comm_finalize(void) {
    if (nccl) {
        ranks_phase("leave", 0);
        ranks_enter_collective(false);
        CUDA_CHECK(cudaStreamSynchronize(overlapped));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        pthread_mutex_lock(&watching);
        NCCL_CHECK(ncclCommDestroy(nccl));
        nccl = nullptr;
        pthread_mutex_unlock(&watching);
        ranks_leave_collective(false);
    }
    ranks_leave();
}

// ------------------------------------------------------------------------------------------------
// What the watchdog learns of the GPU, which works while the host is elsewhere: that it enters and
// leaves a collective, and that it has finished a phase.

static void CUDART_CB device_enters(void *) { ranks_enter_collective(false); }
static void CUDART_CB device_leaves(void *) { ranks_leave_collective(false); }
static void CUDART_CB device_is_alive(void *) { comm_progress(); }

static void mark(cudaStream_t on, cudaHostFn_t what) {
    if (num_ranks > 1) CUDA_CHECK(cudaLaunchHostFunc(on, what, nullptr));
}

static void group_start(cudaStream_t on) {
    mark(on, device_enters);
    NCCL_CHECK(ncclGroupStart());
}

static void group_end(cudaStream_t on) {
    NCCL_CHECK(ncclGroupEnd());
    mark(on, device_leaves);
}

// ------------------------------------------------------------------------------------------------
// Flat buffers. Shards differ in length, and a range holds only a part of some of them, which
// ncclReduceScatter and ncclAllGather do not allow: a group with one ncclReduce or ncclBroadcast
// per shard is one launch, moves the same bytes around the ring and needs no padded copy. NCCL
// wants the calls of one communicator in one order: a collective on the main stream first waits for
// everything on the stream of overlapped communication.

struct Range {
    size_t at, count;
};

static Range in_shard(const size_t *first, int r, size_t from, size_t to) {
    const size_t at = first[r] > from ? first[r] : from,
                 end = first[r + 1] < to ? first[r + 1] : to;
    return {at, at < end ? end - at : 0};
}

// Elements of any type, as bytes; inside a group
static void broadcast_shards(void *x, size_t element_bytes, const size_t *first, size_t from,
                             size_t to, cudaStream_t on) {
    for (int r = 0; r < num_ranks; r++) {
        const Range own = in_shard(first, r, from, to);
        char *at = (char *)x + own.at * element_bytes;
        if (own.count)
            NCCL_CHECK(ncclBroadcast(at, at, own.count * element_bytes, ncclUint8, r, nccl, on));
    }
}

static void begin() {
    CUDA_CHECK(cudaEventRecord(computed, stream));
    CUDA_CHECK(cudaStreamWaitEvent(overlapped, computed, 0));
    group_start(overlapped);
}

static uint64_t end() {
    begun++;
    NCCL_CHECK(ncclGroupEnd());
    CUDA_CHECK(cudaEventRecord(communicated[begun % NUM_EVENTS], overlapped));
    mark(overlapped, device_leaves);  // last: compute need not wait for a host function
    return begun;
}

uint64_t comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to) {
    if (!nccl || from >= to) return begun;
    begin();
    for (int r = 0; r < num_ranks; r++) {
        const Range own = in_shard(first, r, from, to);
        if (own.count)
            NCCL_CHECK(ncclReduce(x + own.at, x + own.at, own.count, ncclFloat32, ncclSum, r, nccl,
                                  overlapped));
    }
    return end();
}

uint64_t comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    if (!nccl || from >= to) return begun;
    begin();
    broadcast_shards(weights, sizeof *weights, first, from, to, overlapped);
    return end();
}

void comm_wait(uint64_t handle) {
    comm_progress();
    if (handle <= waited) return;
    CUDA_CHECK(cudaStreamWaitEvent(stream, communicated[handle % NUM_EVENTS], 0));
    waited = handle;
}

void comm_all_gather(real *x, const size_t *first) {
    if (!nccl) return;
    comm_wait(begun);
    group_start(stream);
    broadcast_shards(x, sizeof *x, first, 0, first[num_ranks], stream);
    group_end(stream);
}

void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t block) {
    if (!nccl) {
        device_copy(out, x + at, part_of_shard(first[1], at, block) * sizeof(real));
        return;
    }
    comm_wait(begun);
    const size_t own = part_of_shard(first[rank + 1] - first[rank], at, block);
    group_start(stream);
    for (int r = 0; r < num_ranks; r++) {
        const size_t theirs = part_of_shard(first[r + 1] - first[r], at, block);
        if (theirs) NCCL_CHECK(ncclSend(x + first[r] + at, theirs, ncclFloat32, r, nccl, stream));
        if (own) NCCL_CHECK(ncclRecv(out + (size_t)r * block, own, ncclFloat32, r, nccl, stream));
    }
    group_end(stream);
}

static void sum_over_ranks(double *partial, size_t n) {
    if (!nccl) return;
    comm_wait(begun);
    group_start(stream);
    NCCL_CHECK(ncclAllReduce(partial, partial, n, ncclFloat64, ncclSum, nccl, stream));
    group_end(stream);
}

void comm_phase(const char *phase, int64_t step) {
    ranks_phase(phase, step);
    if (nccl) mark(stream, device_is_alive);
}

#endif

// One thread: a few hundred numbers, and their order is the point.
__global__ void sum_in_order_kernel(double *sum, const double *__restrict__ partial, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += partial[i];
    *sum += s;
}

void comm_sum_in_order(double *sum, double *partial, size_t n) {
    if (n == 0) return;
    sum_over_ranks(partial, n);
    sum_in_order_kernel<<<1, 1, 0, stream>>>(sum, partial, n);
    CUDA_CHECK(cudaGetLastError());
}
