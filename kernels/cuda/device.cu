// The GPU as a device: one stream, counted memory, copies through a ring of pinned buffers.

#include <algorithm>
#include <unordered_map>

#include "../comm/comm.h"
#include "common.cuh"

extern "C" {
#include "../../data/base/error.h"
#include "../../data/base/machine.h"
#include "../../data/base/memory.h"
}

// Uploads go through a few pinned buffers in turn. An upload returns when its bytes are in a
// buffer: it waits for the GPU only when all buffers are in flight.
enum { NUM_BUFFERS = 4 };
static const size_t BUFFER_BYTES = (size_t)4 << 20;
struct PinnedBuffer {
    char *bytes;
    cudaEvent_t copied;  // the last copy out of it is complete
};

static cudaStream_t stream;
static PinnedBuffer buffers[NUM_BUFFERS];
static int next_buffer;
static std::unordered_map<void *, size_t> allocations;  // bytes of each
static DeviceMemory memory;
static void *scratch;
static cudaDeviceProp properties;
static void (*describe_work)(void *context, char *text, size_t capacity);
static void *describe_context;

cudaStream_t cuda_stream() { return stream; }
int cuda_num_sms() { return properties.multiProcessorCount; }
int cuda_arch() { return properties.major * 10 + properties.minor; }
int cuda_shared_kb() { return (int)(properties.sharedMemPerMultiprocessor >> 10); }
void *cuda_scratch() { return scratch; }

// ---- Errors -------------------------------------------------------------------------------------

static const char *hint_for(cudaError_t status) {
    static char build_again[80];
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion) {
        snprintf(build_again, sizeof build_again,
                 "built for other GPUs; build again with make CUDA_ARCHS=%d%s", cuda_arch(),
                 cuda_arch() == 90 ? "a" : "");  // without it, not Hopper's attention
        return build_again;
    }
    if (status == cudaErrorMemoryAllocation)
        return "choose a smaller --micro-batch-tokens or model; is another process using the GPU?";
    return "see nvidia-smi; a kernel may have failed earlier: CUDA_LAUNCH_BLOCKING=1 shows which";
}

void device_on_error(void (*describe)(void *context, char *text, size_t capacity), void *context) {
    describe_work = describe;
    describe_context = context;
}

void device_fail(const char *hint, const char *format, ...) {
    Error err = {};
    va_list args;
    va_start(args, format);
    error_fill(&err, EXIT_DEVICE_ERROR, hint, format, args);
    va_end(args);
    const size_t used = strlen(err.what);
    char work[480] = "";
    if (describe_work) describe_work(describe_context, work, sizeof work);
    if (work[0]) snprintf(err.what + used, sizeof err.what - used, "; %s", work);
    error_exit(&err);
}

void cuda_fail(const char *file, int line, const char *what, cudaError_t status) {
    device_fail(hint_for(status), "cuda: %s:%d: %s: %s", file, line, what,
                cudaGetErrorString(status));
}

void cuda_unsupported(const char *op, const char *expected, int64_t found) {
    device_fail("this model or batch has a shape that the backend does not support",
                "cuda: %s: expected %s, found %lld", op, expected, (long long)found);
}

// A problem that is returned, not printed; valid until the next one
__attribute__((format(printf, 1, 2))) static const char *problem(const char *format, ...) {
    static char text[192];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

// ---- Start --------------------------------------------------------------------------------------

void device_prepare_process(char **argv) {
    (void)argv;
    probe_if_asked();
}

// Each rank of a machine uses its own GPU; a launcher may have made only that one visible. NULL, or
// the problem.
static const char *choose_device(int *device) {
    int count = 0, driver = 0, runtime = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver) {
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        if (driver == 0) return "no NVIDIA driver is installed; see nvidia-smi";
        return problem(
            "the NVIDIA driver is too old: it supports CUDA %d.%d, this program needs %d.%d",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0))
        return "no NVIDIA GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES";
    if (status != cudaSuccess)
        return problem("CUDA does not start: %s", cudaGetErrorString(status));
    *device = probed_device() >= 0 ? probed_device() : count > 1 ? comm_local_rank() : 0;
    if (*device < count) return NULL;
    return problem("rank %d is number %d of this machine, but only GPUs 0 to %d are visible",
                   comm_rank(), *device, count - 1);
}

// NCCL allocates buffers at the first call of each kind: now, so that they do not count as free.
static void take_buffers_of_ranks(bool collects) {
    const size_t ranks = (size_t)comm_num_ranks();
    if (ranks == 1) return;
    size_t *first = (size_t *)host_calloc(ranks + 1, sizeof *first, "ranks");
    double *x = (double *)cuda_allocate("ranks", (ranks + 2) * sizeof *x);
    real *shards = (real *)x;
    for (size_t r = 0; r <= ranks; r++) first[r] = r;
    comm_wait(comm_reduce_begin(shards, first, 0, ranks));
    comm_wait(comm_gather_begin((floatX *)x, first, 0, ranks));
    comm_sum_in_order(x, x + 1, 0, 1);
    if (collects) comm_collect(shards + ranks, shards, first, 0, 1);
    device_free(x);
    free(first);
}

const char *device_init(const DeviceOptions *options) {
    int device = 0;
    if (stream) return NULL;
    const char *missing = choose_device(&device);
    if (missing) return missing;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    if (properties.major < 8)
        return problem("%.80s is sm_%d; expected sm_80 (Ampere) or later", properties.name,
                       cuda_arch());
    int runtime = 0;
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    if (properties.major >= 10 && runtime < 12080)
        return problem("%.80s: sm_%d needs CUDA 12.8; this program has CUDA %d.%d", properties.name,
                       cuda_arch(), runtime / 1000, runtime % 1000 / 10);
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (PinnedBuffer &b : buffers) {
        CUDA_CHECK(cudaMallocHost(&b.bytes, BUFFER_BYTES));
        CUDA_CHECK(cudaEventCreateWithFlags(&b.copied, cudaEventDisableTiming));
    }
    scratch = cuda_allocate("scratch", CUDA_SCRATCH_BYTES);
    missing = matmul_init();
    if (!missing) missing = comm_connect(stream);
    if (!missing) take_buffers_of_ranks(options->collects);
    return missing;
}

const char *device_refuses(int C, int F, int D) {
    const char *const format = "config.json: %s: expected %s on a GPU, found %d";
    if (C % 8) return problem(format, "hidden_size", "a multiple of 8", C);
    if (C > ROW_MAX_COLUMNS) return problem(format, "hidden_size", "at most 16384", C);
    if (F % 8) return problem(format, "intermediate_size", "a multiple of 8", F);
    return D == 64 || D == 128 ? NULL : problem(format, "head_dim", "64 or 128", D);
}

const char *device_describe(void) {
    static char text[288];
    int driver = 0, runtime = 0;
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    snprintf(
        text, sizeof text,
        "%.80s, sm_%d, %d SMs, %.1f GiB, driver %d.%d, runtime %d.%d, attention %s%s",
        properties.name, cuda_arch(), cuda_num_sms(), (double)properties.totalGlobalMem / 0x1p30,
        driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10,
        attention_describe(),
        cuda_arch() / 10 == 10 ? " (made for older GPUs; this one could do 3 times as much)" : "");
    return text;
}

// ---- Memory -------------------------------------------------------------------------------------

void *device_malloc(size_t bytes) {
    assert(stream);  // device_init has run
    void *p = NULL;
    const cudaError_t status = cudaMalloc(&p, bytes ? bytes : 1);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // refused, not broken: the next launch check must not find it
        return NULL;
    }
    cuda_check(__FILE__, __LINE__, "cudaMalloc", status);
#ifdef POISON
    CUDA_CHECK(cudaMemsetAsync(p, 0xff, bytes, stream));
#endif
    allocations[p] = bytes;
    memory.count++;
    memory.bytes_now += bytes;
    memory.bytes_peak = std::max(memory.bytes_peak, memory.bytes_now);
    return p;
}

void *cuda_allocate(const char *what, size_t bytes) {
    void *p = device_malloc(bytes);
    if (!p)
        exit_with(EXIT_DEVICE_MEMORY, "is another process using the GPU?",
                  "memory: %zu MiB for %s refused", bytes >> 20, what);
    return p;
}

void device_free(void *p) {
    if (!p) return;
    const auto found = allocations.find(p);
    if (found == allocations.end()) cuda_unsupported("device_free", "what device_malloc gave", 0);
    memory.bytes_now -= found->second;
    allocations.erase(found);
    CUDA_CHECK(cudaStreamSynchronize(stream));  // work in flight may still use it
    CUDA_CHECK(cudaFree(p));
}

DeviceMemory device_memory(void) { return memory; }

int device_memory_code(void) { return EXIT_DEVICE_MEMORY; }

size_t device_memory_free(int local_ranks) {
    size_t free_bytes = 0, total_bytes = 0;
    // there the page cache counts as used
    if (properties.integrated) return host_memory_free() / (size_t)local_ranks;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

void device_zero(void *p, size_t bytes) {
    if (bytes) CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream));
}

// ---- Copies -------------------------------------------------------------------------------------

static void copy_async(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
    CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, kind, stream));
}

// each(bytes, first, count): takes `count` of n elements of `size` bytes from `first` on through a
// pinned buffer whose last copy is complete.
template <class Each>
static void through_buffers(size_t n, size_t size, Each each) {
    const size_t most = BUFFER_BYTES / size;
    for (size_t first = 0; first < n; first += most) {
        PinnedBuffer *b = &buffers[next_buffer++ % NUM_BUFFERS];
        CUDA_CHECK(cudaEventSynchronize(b->copied));
        each(b->bytes, first, std::min(n - first, most));
        CUDA_CHECK(cudaEventRecord(b->copied, stream));
    }
}

void device_upload(void *dst, const void *src_host, size_t bytes) {
    through_buffers(bytes, 1, [=](char *pinned, size_t first, size_t n) {
        memcpy(pinned, (const char *)src_host + first, n);
        copy_async((char *)dst + first, pinned, n, cudaMemcpyHostToDevice);
    });
}

void device_download(void *dst_host, const void *src, size_t bytes) {
    through_buffers(bytes, 1, [=](char *pinned, size_t first, size_t n) {
        copy_async(pinned, (const char *)src + first, n, cudaMemcpyDeviceToHost);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        memcpy((char *)dst_host + first, pinned, n);
    });
    memory.waits++;
}

void device_copy(void *dst, const void *src, size_t bytes) {
    if (bytes) copy_async(dst, src, bytes, cudaMemcpyDeviceToDevice);
}

static cudaEvent_t timer[2];
static void timer_mark(int which) {
    if (!timer[which]) CUDA_CHECK(cudaEventCreate(&timer[which]));
    CUDA_CHECK(cudaEventRecord(timer[which], stream));
}
void device_timer_start(void) { timer_mark(0); }
void device_timer_stop(void) { timer_mark(1); }
void device_timer_leave_out(double) {}
float device_timer_ms(void) {
    float ms;
    assert(timer[0] && timer[1]);  // started and stopped
    CUDA_CHECK(cudaEventElapsedTime(&ms, timer[0], timer[1]));
    return ms;
}

// ------------------------------------------------------------------------------------------------
// Weights, split and joined on the host (see master_split); a buffer holds the high halves, then
// the low ones

size_t master_lo_bytes(void) { return sizeof(uint16_t); }

void weights_from_host(floatX *weights, uint16_t *master_lo, const float *src_host, size_t n) {
    through_buffers(n, 2 * sizeof(uint16_t), [=](char *pinned, size_t first, size_t count) {
        uint16_t *hi = (uint16_t *)pinned, *lo = hi + count;
        const size_t bytes = count * sizeof *hi;
        for (size_t i = 0; i < count; i++) master_split(src_host[first + i], &hi[i], &lo[i]);
        copy_async(weights + first, hi, bytes, cudaMemcpyHostToDevice);
        if (master_lo) copy_async(master_lo + first, lo, bytes, cudaMemcpyHostToDevice);
    });
}

// master_lo may be NULL: the bf16 are then the whole values.
void weights_to_host(float *dst_host, const floatX *weights, const uint16_t *master_lo, size_t n) {
    through_buffers(n, 2 * sizeof(uint16_t), [=](char *pinned, size_t first, size_t count) {
        uint16_t *hi = (uint16_t *)pinned, *lo = hi + count;
        const size_t bytes = count * sizeof *hi;
        copy_async(hi, weights + first, bytes, cudaMemcpyDeviceToHost);
        if (master_lo) copy_async(lo, master_lo + first, bytes, cudaMemcpyDeviceToHost);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        for (size_t i = 0; i < count; i++)
            dst_host[first + i] = master_join(hi[i], master_lo ? lo[i] : 0);
    });
    memory.waits++;
}
