// Ranks: each has a GPU of its own. What they say to each other in host memory goes over TCP
// (kernels/ranks.h), what is in device memory over NCCL. Built with -DWITH_NCCL where nccl.h is
// found; without it one rank is all there is, and being started as one of several is an error.

#include "../ranks.h"

#include "common.cuh"

// How many of a share's elements lie from `at` on, at most chunk.
static size_t part_of_share(size_t share, size_t at, size_t chunk) {
    const size_t n = share > at ? share - at : 0;
    return n < chunk ? n : chunk;
}

#ifndef WITH_NCCL

const char *comm_init(void) {
    return ranks_launched() > 1
               ? "started as one of several ranks, but the CUDA backend was built without NCCL"
               : nullptr;
}
extern "C" const char *comm_connect(bool even_alone) {
    return even_alone ? "built without NCCL" : nullptr;
}
void comm_finalize(void) {}
uint64_t comm_reduce_begin(real *, const size_t *, size_t, size_t) { return 0; }
uint64_t comm_gather_begin(floatX *, const size_t *, size_t, size_t) { return 0; }
void comm_wait(uint64_t) {}
void comm_all_gather(real *, const size_t *) {}
void comm_all_gather_master(uint16_t *, const size_t *) {}
void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t chunk) {
    device_copy(out, x + at, part_of_share(first[1], at, chunk) * sizeof(real));
}
static void sum_over_ranks(double *, size_t) {}
void comm_phase(const char *, int64_t) {}
void comm_progress(void) {}

#else

#include <nccl.h>
#include <pthread.h>
#include <unistd.h>

static ncclComm_t nccl;  // NULL: this process is alone
static int rank, num_ranks = 1;

// What goes on beside the computing has a stream of its own. A ticket counts what was begun on it;
// its event may be that of a later one, NUM_EVENTS on, which is then waited for as well.
enum { NUM_EVENTS = 256 };  // more than a model has layers
static cudaStream_t beside;
static cudaEvent_t computed, moved[NUM_EVENTS];
static uint64_t begun, waited;

// ------------------------------------------------------------------------------------------------
// Errors: one line and exit code 11, which ends the other ranks

static void report(const char *file, int line, const char *what, ncclResult_t status) {
    const char *last = ncclGetLastError(nccl);
    fflush(stdout);
    fprintf(stderr, "error: nccl: %s:%d: %s: %s%s%s\n", file, line, what,
            ncclGetErrorString(status), last && *last ? ": " : "", last ? last : "");
    fprintf(stderr, "hint: NCCL_DEBUG=WARN says more (NCCL_DEBUG_FILE=nccl.%%h.%%p: in files); "
                    "each rank needs a GPU of its own\n");
}

#define NCCL_CHECK(call_)                                \
    do {                                                 \
        ncclResult_t status_ = (call_);                  \
        if (status_ != ncclSuccess) {                    \
            report(__FILE__, __LINE__, #call_, status_); \
            exit(11);                                    \
        }                                                \
    } while (0)

// A network that fails while the GPUs work is known to NCCL alone: the host would wait for a stream
// that never ends. A rank that is gone is the heartbeat's to notice (ranks.h).
static pthread_mutex_t watching = PTHREAD_MUTEX_INITIALIZER;

static void *watch_nccl(void *) {
    ncclResult_t status = ncclSuccess;
    for (;; sleep(1)) {
        pthread_mutex_lock(&watching);
        if (nccl && ncclCommGetAsyncError(nccl, &status) != ncclSuccess) status = ncclSystemError;
        if (!nccl) return pthread_mutex_unlock(&watching), nullptr;
        if (status != ncclSuccess && status != ncclInProgress) {
            report(__FILE__, __LINE__, "ncclCommGetAsyncError", status);
            ranks_at_exit(11, nullptr);
            _exit(11);
        }
        pthread_mutex_unlock(&watching);
    }
}

// ------------------------------------------------------------------------------------------------
// Start and end

static void leave(int code, void *) {
    if (code == 0) ranks_leave();  // another code ends all ranks: see ranks_watch.h
}

const char *comm_init(void) {
    if (ranks_launched() == 1) return nullptr;
    const char *missing = ranks_join(nullptr);
    if (missing) return missing;
    on_exit(leave, nullptr);
    if (ranks_rank() == 0) return nullptr;
    return freopen("/dev/null", "w", stdout) ? nullptr : "cannot open /dev/null";
}

// Ahead of the computing where both want an SM: the other ranks wait for it.
static void create_stream() {
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&beside, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&computed, cudaEventDisableTiming));
    for (int i = 0; i < NUM_EVENTS; i++)
        CUDA_CHECK(cudaEventCreateWithFlags(&moved[i], cudaEventDisableTiming));
}

extern "C" const char *comm_connect(bool even_alone) {
    ncclUniqueId id;
    pthread_t thread;
    rank = ranks_rank();
    num_ranks = ranks_num();
    if (num_ranks == 1 && !even_alone) return nullptr;
    if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    ranks_broadcast(&id, sizeof id);
    if (rank > 0) ranks_library_log("NCCL_DEBUG_FILE");
    ranks_wait_blocked();
    NCCL_CHECK(ncclCommInitRank(&nccl, num_ranks, id, rank));
    ranks_go_blocked();
    create_stream();
    // before CUDA's own handlers, which may wait for kernels that wait for other ranks
    on_exit(ranks_at_exit, nullptr);
    if (pthread_create(&thread, nullptr, watch_nccl, nullptr) != 0)
        return "no thread to watch NCCL";
    pthread_detach(thread);
    return nullptr;
}

void comm_finalize(void) {
    if (nccl) {
        ranks_phase("leave", 0);
        ranks_wait_blocked();
        CUDA_CHECK(cudaStreamSynchronize(beside));
        CUDA_CHECK(cudaStreamSynchronize(cuda_stream()));
        pthread_mutex_lock(&watching);
        NCCL_CHECK(ncclCommDestroy(nccl));
        nccl = nullptr;
        pthread_mutex_unlock(&watching);
        ranks_go_blocked();
    }
    ranks_leave();
}

// ------------------------------------------------------------------------------------------------
// What the watch of ranks.h hears of the GPU, which works on while the host is elsewhere: that it
// comes to where it waits for the others and goes on, and that it has come through a phase.

static void CUDART_CB device_waits(void *) { ranks_wait_blocked(); }
static void CUDART_CB device_goes_on(void *) { ranks_go_blocked(); }
static void CUDART_CB device_is_alive(void *) { ranks_alive(); }

static void mark(cudaStream_t stream, cudaHostFn_t what) {
    if (num_ranks > 1) CUDA_CHECK(cudaLaunchHostFunc(stream, what, nullptr));
}

static void group_start(cudaStream_t stream) {
    mark(stream, device_waits);
    NCCL_CHECK(ncclGroupStart());
}

static void group_end(cudaStream_t stream) {
    NCCL_CHECK(ncclGroupEnd());
    mark(stream, device_goes_on);
}

// ------------------------------------------------------------------------------------------------
// Flat buffers. Shares differ in length, and a range has but a piece of some of them, which
// ncclReduceScatter and ncclAllGather do not allow: a group with one ncclReduce or ncclBroadcast
// for each share is one launch, moves the same bytes around the ring and needs no padded copy.
// NCCL wants the calls of one communicator in one order: what is on the main stream first waits
// for all that was begun beside it.

struct Range {
    size_t at, count;
};

static Range in_share(const size_t *first, int r, size_t from, size_t to) {
    const size_t at = first[r] > from ? first[r] : from,
                 end = first[r + 1] < to ? first[r + 1] : to;
    return {at, at < end ? end - at : 0};
}

// Elements of any type, as bytes; inside a group
static void broadcast_shares(void *x, size_t element_bytes, const size_t *first, size_t from,
                             size_t to, cudaStream_t stream) {
    for (int r = 0; r < num_ranks; r++) {
        const Range own = in_share(first, r, from, to);
        char *at = (char *)x + own.at * element_bytes;
        if (own.count)
            NCCL_CHECK(
                ncclBroadcast(at, at, own.count * element_bytes, ncclUint8, r, nccl, stream));
    }
}

static void begin() {
    CUDA_CHECK(cudaEventRecord(computed, cuda_stream()));
    CUDA_CHECK(cudaStreamWaitEvent(beside, computed, 0));
    group_start(beside);
}

static uint64_t end() {
    begun++;
    NCCL_CHECK(ncclGroupEnd());
    CUDA_CHECK(cudaEventRecord(moved[begun % NUM_EVENTS], beside));
    mark(beside, device_goes_on);  // last: the computing need not wait for a host function
    return begun;
}

uint64_t comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to) {
    if (!nccl || from >= to) return begun;
    begin();
    for (int r = 0; r < num_ranks; r++) {
        const Range own = in_share(first, r, from, to);
        if (own.count)
            NCCL_CHECK(ncclReduce(x + own.at, x + own.at, own.count, ncclFloat32, ncclSum, r, nccl,
                                  beside));
    }
    return end();
}

uint64_t comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    if (!nccl || from >= to) return begun;
    begin();
    broadcast_shares(weights, sizeof *weights, first, from, to, beside);
    return end();
}

void comm_wait(uint64_t ticket) {
    if (ticket <= waited) return;
    CUDA_CHECK(cudaStreamWaitEvent(cuda_stream(), moved[ticket % NUM_EVENTS], 0));
    waited = ticket;
}

static void all_gather(void *x, size_t element_bytes, const size_t *first) {
    if (!nccl) return;
    comm_wait(begun);
    group_start(cuda_stream());
    broadcast_shares(x, element_bytes, first, 0, first[num_ranks], cuda_stream());
    group_end(cuda_stream());
}

void comm_all_gather(real *x, const size_t *first) { all_gather(x, sizeof *x, first); }

void comm_all_gather_master(uint16_t *master_lo, const size_t *first) {
    all_gather(master_lo, sizeof *master_lo, first);
}

void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t chunk) {
    if (!nccl) {
        device_copy(out, x + at, part_of_share(first[1], at, chunk) * sizeof(real));
        return;
    }
    comm_wait(begun);
    const size_t own = part_of_share(first[rank + 1] - first[rank], at, chunk);
    group_start(cuda_stream());
    for (int r = 0; r < num_ranks; r++) {
        const size_t theirs = part_of_share(first[r + 1] - first[r], at, chunk);
        if (theirs)
            NCCL_CHECK(ncclSend(x + first[r] + at, theirs, ncclFloat32, r, nccl, cuda_stream()));
        if (own)
            NCCL_CHECK(ncclRecv(out + (size_t)r * chunk, own, ncclFloat32, r, nccl, cuda_stream()));
    }
    group_end(cuda_stream());
}

static void sum_over_ranks(double *parts, size_t n) {
    if (!nccl) return;
    comm_wait(begun);
    group_start(cuda_stream());
    NCCL_CHECK(ncclAllReduce(parts, parts, n, ncclFloat64, ncclSum, nccl, cuda_stream()));
    group_end(cuda_stream());
}

void comm_phase(const char *phase, int64_t step) {
    ranks_phase(phase, step);
    if (nccl) mark(cuda_stream(), device_is_alive);
}

void comm_progress(void) { ranks_alive(); }

#endif

// One thread: a few hundred numbers, and their order is the point.
__global__ void sum_parts_kernel(double *sum, const double *__restrict__ parts, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += parts[i];
    *sum += s;
}

void comm_sum_parts(double *sum, double *parts, size_t n) {
    if (n == 0) return;
    sum_over_ranks(parts, n);
    sum_parts_kernel<<<1, 1, 0, cuda_stream()>>>(sum, parts, n);
    LAUNCH_CHECK("sum_parts_kernel");
}

// ------------------------------------------------------------------------------------------------
// Host memory

int comm_rank(void) { return ranks_rank(); }
int comm_num_ranks(void) { return ranks_num(); }
int comm_local_rank(void) { return ranks_local(); }
int comm_max(int value) { return ranks_max(value); }
void comm_broadcast(void *data_host, size_t bytes) { ranks_broadcast(data_host, bytes); }
void comm_all_gather_host(void *out_host, const void *data_host, size_t bytes) {
    ranks_all_gather(out_host, data_host, bytes);
}
void comm_merge(void *data_host, size_t bytes) { ranks_merge(data_host, bytes); }
void comm_barrier(void) { ranks_barrier(); }
void comm_heartbeat(double seconds) { ranks_set_limit(seconds); }
