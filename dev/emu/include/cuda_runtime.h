// The host API of the CUDA runtime, as far as this program and its tests call it. Work is done at
// the call, in the caller's thread, or with EMU_STREAMS=1 by a thread of its stream; a stream
// capture stores it for later. Memory and launches
// are checked more strictly than by a GPU: what a GPU may let pass ends the program with a report.
#pragma once
#include "cuda_emu.h"
#include "cuda.h"

extern "C++" {
#define EMU_CUDA_ERRORS(X)                                                                        \
    X(cudaSuccess, 0, "no error")                                                                 \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                               \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                              \
    X(cudaErrorInitializationError, 3, "initialization error")                                    \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                         \
    X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                   \
    X(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient")                     \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                               \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                      \
    X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for the device")        \
    X(cudaErrorUnsupportedPtxVersion, 222, "the PTX was compiled with an unsupported toolchain")  \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                             \
    X(cudaErrorNotReady, 600, "device not ready")                                                 \
    X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                   \
    X(cudaErrorNotSupported, 801, "operation not supported")                                      \
    X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing") \
    X(cudaErrorStreamCaptureInvalidated, 901,                                                     \
      "operation failed due to a previous error during capture")                                  \
    X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                  \
    X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")       \
    X(cudaErrorUnknown, 999, "unknown error")
enum cudaError {
#define EMU_ENUM(name_, value_, text_) name_ = value_,
    EMU_CUDA_ERRORS(EMU_ENUM)
#undef EMU_ENUM
};
typedef enum cudaError cudaError_t;
const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();  // and forget it
cudaError_t cudaPeekAtLastError();

// ------------------------------------------------------------------------------------------------
// Devices

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int multiProcessorCount, major, minor, warpSize, maxThreadsPerBlock,
        maxThreadsPerMultiProcessor, regsPerBlock, l2CacheSize, memoryBusWidth, integrated;
};
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceReset();

// ------------------------------------------------------------------------------------------------
// Memory: a block ends at a page that may not be touched and starts out as NaN

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
cudaError_t emu_malloc(void **p, size_t bytes, const char *file, int line);
cudaError_t emu_malloc_host(void **p, size_t bytes);
template <class T>
cudaError_t cudaMalloc(T **p, size_t bytes, EMU_LOC) {
    return emu_malloc((void **)p, bytes, EMU_AT);
}
template <class T>
cudaError_t cudaMallocHost(T **p, size_t bytes, unsigned = 0) {
    return emu_malloc_host((void **)p, bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T **p, size_t bytes, unsigned) {
    return emu_malloc_host((void **)p, bytes);
}
cudaError_t cudaFree(void *p);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *dst, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream = nullptr);

// ------------------------------------------------------------------------------------------------
// Streams, events, graphs

typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
typedef void (*cudaHostFn_t)(void *);
#define CUDART_CB
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *data);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

// ------------------------------------------------------------------------------------------------
// Kernels

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    union {
        int programmaticStreamSerializationAllowed;
        struct {
            unsigned x, y, z;
        } clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
cudaError_t emu_func_attribute(const void *kernel, cudaFuncAttribute attr, int value);
cudaError_t emu_occupancy(int *blocks, int threads, size_t smem);
template <class F>
cudaError_t cudaFuncSetAttribute(F *kernel, cudaFuncAttribute attr, int value) {
    return emu_func_attribute((const void *)kernel, attr, value);
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F *, int threads,
                                                          size_t smem) {
    return emu_occupancy(blocks, threads, smem);
}
template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*kernel)(P...), A &&...a) {
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
            emu::fail("thread block clusters are not emulated");
    emu::launcher("kernel", kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes,
                  c->stream)(std::forward<A>(a)...);
    return cudaPeekAtLastError();
}

template <class T>
cudaError_t cudaMemcpyFromSymbol(void *dst, const T &symbol, size_t bytes) {
    memcpy(dst, &symbol, bytes);
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------
// The one driver function that is looked up at run time: cuTensorMapEncodeTiled

enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1
};
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **entry, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *result = nullptr);
}
