// The host API of the CUDA runtime. Work runs when it is issued, or on its stream's thread
// (streams.cpp).
#include "engine.h"

#include <fcntl.h>
#include <sys/file.h>

#include <chrono>

using emu::Mark;
using emu::Worker;
struct CUstream_st {
    int number = 0;  // 1: the first
    Worker *worker = nullptr;
};
struct CUevent_st {
    Mark mark;
    std::chrono::steady_clock::time_point when;
    bool recorded = false, timing = true;
};

namespace emu {
char *device_allocate(size_t bytes, const char *file, int line);
void device_release(void *p);

static std::map<const void *, int> max_dynamic_smem;  // by kernel
static std::map<void *, size_t> host_blocks;
static cudaError_t last_error = cudaSuccess;

static cudaError_t answer(cudaError_t e) {
    if (e != cudaSuccess) last_error = e;
    return e;
}
// A function that cudaLaunchHostFunc runs may not use CUDA: the runtime of a GPU may fail or hang.
static void entered(const char *call) {
    if (cur.in_host_function)
        fail("%s in a host function of a stream, which may not use CUDA", call);
}
#define API_CALL_OF(name_) \
    entered(name_);        \
    EMU_CALL(cudaError_t, name_)
#define API_CALL API_CALL_OF(__func__)

void enqueue(cudaStream_t stream, std::function<void()> work, const char *name) {
    entered(name);
    if (opt.trace) fprintf(stderr, "EMU TRACE stream %d %s\n", stream ? stream->number : 0, name);
    if (stream && stream->worker)
        put_work(stream->worker, std::move(work));
    else
        work();
}

// The largest block's shared memory, static and dynamic, by architecture
static size_t smem_optin() {
    switch (opt.arch) {
        case 80:
        case 87:
            return 163 << 10;
        case 86:
        case 89:
        case 120:
        case 121:
            return 99 << 10;
    }
    return SMEM_MAX;
}
// The shared memory that a launch leaves for static variables: without cudaFuncSetAttribute, all of
// shared memory is 48 KB; with it, the dynamic part counts as large as was allowed.
size_t static_smem_limit(size_t smem_bytes, const void *kernel) {
    auto it = max_dynamic_smem.find(kernel);
    return it == max_dynamic_smem.end() ? (48 << 10) - smem_bytes
                                        : smem_optin() - (size_t)it->second;
}

bool check_launch(dim3 grid, dim3 block, size_t smem_bytes, const void *kernel, const char *name) {
    entered(name);
    if (emu_fault && emu_fault(name)) return answer(cudaErrorUnknown), false;
    auto it = max_dynamic_smem.find(kernel);
    size_t limit = it == max_dynamic_smem.end() ? 48 << 10 : (size_t)it->second;
    size_t threads = (size_t)block.x * block.y * block.z;
    bool shape = grid.x && grid.y && grid.z && grid.x < 1u << 31 && grid.y < 1 << 16 &&
                 grid.z < 1 << 16 && block.z <= 64 && threads >= 1 && threads <= 1024;
    if (shape && smem_bytes <= limit) return true;
    fprintf(stderr,
            "EMU: launch of %s rejected: grid (%u,%u,%u) block (%u,%u,%u) dynamic shared %zu "
            "(limit %zu)\n",
            name, grid.x, grid.y, grid.z, block.x, block.y, block.z, smem_bytes, limit);
    answer(shape ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration);
    return false;
}
}  // namespace emu
using namespace emu;

// ---- Errors -------------------------------------------------------------------------------------

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define TEXT(name_, value_, text_) \
    case name_:                    \
        return text_;
        EMU_CUDA_ERRORS(TEXT)
    }
    return "unrecognized error code";
}
cudaError_t cudaGetLastError() {
    API_CALL;
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

// ---- Devices ------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int *count) {
    API_CALL;
    *count = opt.devices;
    return answer(opt.devices ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
    API_CALL;
    static int held = -1;
    const char *lock = getenv("EMU_EXCLUSIVE");
    if (lock && held < 0) held = open(lock, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (lock && flock(held, LOCK_EX | LOCK_NB)) return answer(cudaErrorDevicesUnavailable);
    return answer(device >= 0 && device < opt.devices ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaGetDevice(int *device) {
    API_CALL;
    *device = 0;
    return answer(opt.devices ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    API_CALL;
    if (device < 0 || device >= opt.devices) return answer(cudaErrorInvalidDevice);
    *p = {};
    snprintf(p->name, sizeof p->name, "emulated sm_%d", opt.arch);
    p->totalGlobalMem = opt.memory;
    p->integrated = opt.page_cache > 0;
    p->major = opt.arch / 10;
    p->minor = opt.arch % 10;
    p->multiProcessorCount = 4;
    p->sharedMemPerBlockOptin = smem_optin();
    p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin + 1024;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device) {
    API_CALL;
    cudaDeviceProp p{};
    cudaError_t status = cudaGetDeviceProperties(&p, device);
    if (status != cudaSuccess) return status;
    *value = attr == cudaDevAttrComputeCapabilityMajor ? p.major : (int)p.sharedMemPerBlockOptin;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    API_CALL;
    *version = opt.driver ? opt.driver : CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    API_CALL;
    *version = opt.runtime;
    return cudaSuccess;
}

// ---- Memory -------------------------------------------------------------------------------------

cudaError_t emu_malloc(void **p, size_t bytes, const char *file, int line) {
    API_CALL_OF("cudaMalloc");
    *p = nullptr;
    if (!opt.devices) return answer(cudaErrorNoDevice);
    if (!bytes) return cudaSuccess;
    *p = device_allocate(bytes, file, line);
    return answer(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *p) {
    API_CALL;
    drain_all();
    if (p) device_release(p);
    return cudaSuccess;
}
cudaError_t emu_malloc_host(void **p, size_t bytes) {
    API_CALL_OF("cudaMallocHost");
    *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*p) return answer(cudaErrorMemoryAllocation);
    if (opt.poison) memset(*p, 0xff, bytes);
    host_blocks[*p] = bytes;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p) {
    API_CALL;
    if (p && !host_blocks.erase(p)) return answer(cudaErrorInvalidValue);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    API_CALL;
    *total = opt.memory;
    *free_bytes = opt.memory - device_memory_in_use() - opt.page_cache;
    if (opt.trace) fprintf(stderr, "EMU TRACE stream 0 %s\n", __func__);
    return cudaSuccess;
}

// A GPU may accept a wrong kind, because it can tell where a pointer points; here it is an error.
static void check_copy(const void *dst, const void *src, cudaMemcpyKind kind) {
    bool to_device = is_device_ptr(dst), from_device = is_device_ptr(src);
    bool right =
        to_device == (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
        from_device == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
    if (!right)
        fail("cudaMemcpy: kind %d does not match the pointers (dst %s, src %s)", kind,
             to_device ? "device" : "host", from_device ? "device" : "host");
}
// Memory that stays as it is while a copy waits for its turn: on the device, or pinned. From other
// memory a copy is staged when it is issued, into other memory it is waited for.
static bool is_steady(const void *p, size_t bytes) {
    if (is_device_ptr(p)) return true;
    auto block = host_blocks.upper_bound((void *)p);
    if (block == host_blocks.begin()) return false;
    --block;
    return (const char *)p + bytes <= (const char *)block->first + block->second;
}
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    API_CALL;
    if (!bytes) return cudaSuccess;
    check_copy(dst, src, kind);
    if (!stream || !stream->worker || (is_steady(src, bytes) && is_steady(dst, bytes))) {
        enqueue(
            stream, [=] { memmove(dst, src, bytes); }, "memcpy");
    } else if (is_steady(dst, bytes)) {
        std::vector<char> staged((const char *)src, (const char *)src + bytes);
        enqueue(
            stream, [=] { memmove(dst, staged.data(), bytes); }, "memcpy");
    } else {
        enqueue(
            stream, [=] { memmove(dst, src, bytes); }, "memcpy");
        drain(stream->worker);
    }
    return last_error;
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
    API_CALL;
    return cudaMemcpyAsync(dst, src, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream) {
    API_CALL;
    if (!bytes) return cudaSuccess;
    if (!is_device_ptr(dst)) fail("cudaMemset of a host pointer");
    enqueue(
        stream, [=] { memset(dst, value, bytes); }, "memset");
    return last_error;
}
cudaError_t cudaMemset(void *dst, int value, size_t bytes) {
    API_CALL;
    return cudaMemsetAsync(dst, value, bytes, nullptr);
}

// ---- Streams and events -------------------------------------------------------------------------

static cudaError_t new_stream(cudaStream_t *stream, const char *call) {
    API_CALL_OF(call);
    static int streams;
    *stream = new CUstream_st;
    (*stream)->number = ++streams;
    (*stream)->worker = start_worker();
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_stream(stream, __func__); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    return new_stream(stream, __func__);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    return new_stream(stream, __func__);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    API_CALL;
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    API_CALL;
    if (stream && stream->worker) drain(stream->worker);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    API_CALL;
    return stream && stream->worker && !worker_idle(stream->worker) ? cudaErrorNotReady
                                                                    : cudaSuccess;
}
// Waits for what was recorded last before this call; later records are others' to wait for.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    API_CALL;
    const uint64_t count = mark_now(&event->mark);
    enqueue(
        stream, [=] { mark_wait(&event->mark, count); }, "wait");
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *data) {
    API_CALL;
    enqueue(
        stream,
        [=] {
            cur.in_host_function = true;
            fn(data);
            cur.in_host_function = false;
        },
        "host function");
    return cudaSuccess;
}

static cudaError_t new_event(cudaEvent_t *event, bool timing, const char *call) {
    API_CALL_OF(call);
    *event = new CUevent_st;
    (*event)->timing = timing;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return new_event(event, !(flags & cudaEventDisableTiming), __func__);
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return new_event(event, true, __func__); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    API_CALL;
    const uint64_t count = mark_set(&event->mark);
    auto record = [=] {
        event->when = std::chrono::steady_clock::now();
        event->recorded = true;
        mark_reach(&event->mark, count);
    };
    enqueue(stream, record, "record");
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    API_CALL;
    mark_wait(&event->mark, mark_now(&event->mark));
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    API_CALL;
    if (!start->timing || !end->timing || !start->recorded || !end->recorded)
        return answer(cudaErrorInvalidResourceHandle);
    *ms = std::chrono::duration<float, std::milli>(end->when - start->when).count();
    return cudaSuccess;
}

// ---- Kernels and tensor maps --------------------------------------------------------------------

cudaError_t emu_func_attribute(const void *kernel, cudaFuncAttribute, int value) {
    API_CALL_OF("cudaFuncSetAttribute");
    if (value < 0 || (size_t)value > smem_optin()) return answer(cudaErrorInvalidValue);
    max_dynamic_smem[kernel] = value;
    return cudaSuccess;
}

// The driver's own checks, then the emulator's layout of a map.
extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType, cuuint32_t rank,
                                           void *base, const cuuint64_t *dims,
                                           const cuuint64_t *strides, const cuuint32_t *box,
                                           const cuuint32_t *element_strides, CUtensorMapInterleave,
                                           CUtensorMapSwizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill) {
    enum { BYTES = 2, SWIZZLE_SPAN = 128 };  // of bf16, under the one swizzle that there is
    EMU_CALL(CUresult, __func__);
    memset((void *)m, 0, sizeof *m);
    if (rank < 1 || rank > 3 || (uintptr_t)m % 64 || (uintptr_t)base % 16)
        return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t i = 0; i < rank; i++) {
        bool dim = dims[i] && dims[i] <= 1ull << 32;
        if (!dim || !box[i] || box[i] > 256 || element_strides[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        m->dim[i] = (uint32_t)dims[i];
        m->box[i] = (uint16_t)box[i];
    }
    for (cuuint32_t i = 0; i + 1 < rank; i++) {
        if (strides[i] % 16 || strides[i] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
        m->stride[i] = strides[i];
    }
    const uint32_t inner = box[0] * BYTES;
    if (inner % 16 || inner > SWIZZLE_SPAN) return CUDA_ERROR_INVALID_VALUE;
    if (inner != SWIZZLE_SPAN)
        fail("tensor map: an inner box of %u bytes under a 128-byte swizzle is not emulated",
             inner);
    m->base = (uint64_t)base;
    m->rank = (uint8_t)rank;
    m->elt = BYTES;
    m->swz = 1;
    m->magic = 0x7e45;
    return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    API_CALL;
    bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *entry = known ? (void *)&cuTensorMapEncodeTiled : nullptr;
    if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
