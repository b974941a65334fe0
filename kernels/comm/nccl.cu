// Flat buffers of the CUDA backend, over NCCL: each rank has its own GPU. Built with -DWITH_NCCL if
// nccl.h is found; without it a job has one rank.
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "../kernels.h"
#include "comm.h"
#include "world.h"

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

#ifndef WITH_NCCL

static const char *connect() { return "several GPUs need NCCL; this program was built without it"; }
uint64_t comm_reduce_begin(real *, const size_t *, size_t, size_t) { return 0; }
uint64_t comm_gather_begin(floatX *, const size_t *, size_t, size_t) { return 0; }
void comm_wait(uint64_t) {}
void comm_collect(real *, const real *, const size_t *, size_t, size_t) {}
static void sum_over_ranks(double *, size_t) {}

#else

#include <nccl.h>
#include <pthread.h>
#include <sys/stat.h>

static ncclComm_t nccl;                                         // NULL: a single rank
static pthread_mutex_t connection = PTHREAD_MUTEX_INITIALIZER;  // guards its end

// Overlapped communication has its own stream. A handle counts operations enqueued there; its event
// may by then belong to a later one, NUM_EVENTS on, which is then waited for as well.
enum { NUM_EVENTS = 256 };  // more than a model has layers
static cudaStream_t overlapped;
static cudaEvent_t computed, communicated[NUM_EVENTS];
static uint64_t begun, waited;

#define NCCL_HINT                                                                                \
    "NCCL_DEBUG=WARN says more (NCCL_DEBUG_FILE=nccl.%h.%p: in files); each rank needs its own " \
    "GPU"

static void nccl_check(int line, const char *call, ncclResult_t status) {
    if (status == ncclSuccess) return;
    const char *last = ncclGetLastError(nccl);
    device_fail(NCCL_HINT, "nccl: %s:%d: %s: %s%s%s", __FILE__, line, call,
                ncclGetErrorString(status), last && *last ? ": " : "", last ? last : "");
}
#define NCCL_CHECK(call_) nccl_check(__LINE__, #call_, call_)

// ------------------------------------------------------------------------------------------------
// Tells the watchdog about the GPU, which works while the host is elsewhere: it begins or ends a
// collective, or has finished a phase.

static void CUDART_CB device_enters(void *) { rank_waits(true); }
static void CUDART_CB device_leaves(void *) { rank_waits(false); }
static void CUDART_CB device_is_alive(void *) { rank_progress(); }

static void mark(cudaStream_t on, cudaHostFn_t what) {
    if (comm_num_ranks() > 1) CUDA_CHECK(cudaLaunchHostFunc(on, what, nullptr));
}

static void group_start(cudaStream_t on) {
    mark(on, device_enters);
    NCCL_CHECK(ncclGroupStart());
}

static void group_end(cudaStream_t on) {
    NCCL_CHECK(ncclGroupEnd());
    mark(on, device_leaves);
}

static void overlapped_waits() {
    CUDA_CHECK(cudaEventRecord(computed, stream));
    CUDA_CHECK(cudaStreamWaitEvent(overlapped, computed, 0));
}

static void phase() {
    overlapped_waits();
    mark(overlapped, device_is_alive);  // compute does not wait for a host function
}

// ---- Start and end ------------------------------------------------------------------------------

// Only NCCL notices a network that fails while the GPUs work: the host would wait forever for a
// stream.
static const char *network_error() {
    static char text[128];
    ncclResult_t status = ncclSuccess;
    pthread_mutex_lock(&connection);
    if (nccl && ncclCommGetAsyncError(nccl, &status) != ncclSuccess) status = ncclSystemError;
    pthread_mutex_unlock(&connection);
    if (status == ncclSuccess || status == ncclInProgress) return nullptr;
    snprintf(text, sizeof text, "nccl: ncclCommGetAsyncError: %s", ncclGetErrorString(status));
    return text;
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

// NCCL logs to standard output, which only rank 0 has. A regular file would be truncated.
static void log_to_stderr() {
    struct stat status;
    if (fstat(2, &status) == 0 && !S_ISREG(status.st_mode))
        setenv("NCCL_DEBUG_FILE", "/dev/stderr", 0);
}

static void disconnect() {
    rank_waits(true);
    CUDA_CHECK(cudaStreamSynchronize(overlapped));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    pthread_mutex_lock(&connection);
    ncclComm_t whole = nccl;
    nccl = nullptr;
    pthread_mutex_unlock(&connection);
    NCCL_CHECK(ncclCommDestroy(whole));  // waits for other ranks: the watchdog must not
    rank_waits(false);
}

static const char *connect() {
    static const Network network = {network_error, disconnect, phase};
    ncclUniqueId id;
    if (comm_rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    comm_broadcast(&id, sizeof id);
    if (comm_rank() > 0) log_to_stderr();
    rank_waits(true);
    NCCL_CHECK(ncclCommInitRank(&nccl, comm_num_ranks(), id, comm_rank()));
    rank_waits(false);
    create_stream();
    rank_set_network(&network);
    // before CUDA's own handlers, which may wait for kernels that wait for other ranks
    on_exit(rank_at_exit, nullptr);
    return nullptr;
}

// ---- Flat buffers -------------------------------------------------------------------------------
// Shards differ in length, and a range holds only a part of some of them, which ncclReduceScatter
// and ncclAllGather do not allow: a group with one ncclReduce or ncclBroadcast per shard is one
// launch, moves the same bytes around the ring and needs no padded copy. NCCL wants the calls of
// one communicator in one order: a collective on the main stream first waits for everything on the
// stream of overlapped communication.

// Calls `one` with each rank and its part of the range, in a group on the overlapped stream.
template <typename One>
static uint64_t begin_shards(const size_t *first, size_t from, size_t to, One one) {
    if (!nccl || from >= to) return begun;
    overlapped_waits();
    group_start(overlapped);
    for (int r = 0; r < comm_num_ranks(); r++) {
        const ShardPart part = part_of_shard(first, r, from, to);
        if (part.count) one(r, part);
    }
    begun++;
    NCCL_CHECK(ncclGroupEnd());
    CUDA_CHECK(cudaEventRecord(communicated[begun % NUM_EVENTS], overlapped));
    mark(overlapped, device_leaves);  // last: compute need not wait for a host function
    return begun;
}

uint64_t comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to) {
    return begin_shards(first, from, to, [=](int r, ShardPart part) {
        real *at = x + part.at;
        NCCL_CHECK(ncclReduce(at, at, part.count, ncclFloat32, ncclSum, r, nccl, overlapped));
    });
}

uint64_t comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    return begin_shards(first, from, to, [=](int r, ShardPart part) {
        floatX *at = weights + part.at;
        const size_t bytes = part.count * sizeof *at;
        NCCL_CHECK(ncclBroadcast(at, at, bytes, ncclUint8, r, nccl, overlapped));
    });
}

void comm_wait(uint64_t handle) {
    comm_progress();
    if (handle <= waited) return;
    CUDA_CHECK(cudaStreamWaitEvent(stream, communicated[handle % NUM_EVENTS], 0));
    waited = handle;
}

void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t block) {
    comm_wait(begun);
    const auto part = [=](int r) {
        return part_of_shard(first, r, first[r] + at, first[r] + at + block);
    };
    const size_t own = part(comm_rank()).count;
    group_start(stream);
    for (int r = 0; r < comm_num_ranks(); r++) {
        const ShardPart theirs = part(r);
        if (theirs.count)
            NCCL_CHECK(ncclSend(x + theirs.at, theirs.count, ncclFloat32, r, nccl, stream));
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

#endif

const char *comm_connect(void *device_stream) {
    stream = (cudaStream_t)device_stream;
    return comm_num_ranks() > 1 ? connect() : nullptr;
}

// After comm_connect, for tests: a communicator of one rank, so that NCCL runs on a single GPU.
extern "C" const char *comm_connect_alone(void) { return connect(); }

// One thread: a few hundred numbers, and their order is the point.
__global__ void sum_in_order_kernel(double *sum, const double *__restrict__ partial, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += partial[i];
    *sum += s;
}

void comm_sum_in_order(double *sum, double *partial, size_t skip, size_t n) {
    if (n == 0) return;
    sum_over_ranks(partial, skip + n);
    sum_in_order_kernel<<<1, 1, 0, stream>>>(sum, partial + skip, n);
    CUDA_CHECK(cudaGetLastError());
}
