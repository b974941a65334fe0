// The host API of the CUDA runtime, as far as this program and its tests call it. Work is done at
// the call, in the caller's thread, or with EMU_STREAMS=1 by a thread of its stream. Memory and
// launches are checked more strictly than by a GPU: what a GPU may let pass ends the program with a
// report.
#pragma once
#include "cuda_emu.h"
#include "cuda.h"

extern "C++" {
#define EMU_CUDA_ERRORS(X)                                                                       \
    X(cudaSuccess, 0, "no error")                                                                \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                              \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                             \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                        \
    X(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient")                    \
    X(cudaErrorDevicesUnavailable, 46, "CUDA-capable device(s) is/are busy or unavailable")      \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                              \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                     \
    X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for the device")       \
    X(cudaErrorUnsupportedPtxVersion, 222, "the PTX was compiled with an unsupported toolchain") \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                            \
    X(cudaErrorNotReady, 600, "device not ready")                                                \
    X(cudaErrorUnknown, 999, "unknown error")
enum cudaError {
#define EMU_ENUM(name_, value_, text_) name_ = value_,
    EMU_CUDA_ERRORS(EMU_ENUM)
#undef EMU_ENUM
};
typedef enum cudaError cudaError_t;
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();  // and forget it

// ---- Devices ------------------------------------------------------------------------------------

enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int multiProcessorCount, major, minor, integrated;
};
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);

// ---- Memory: a block ends at a page that may not be touched and starts out as NaN ---------------

enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3
};
cudaError_t emu_malloc(void **p, size_t bytes, const char *file, int line);
cudaError_t emu_malloc_host(void **p, size_t bytes);
template <class T>
cudaError_t cudaMalloc(T **p, size_t bytes, EMU_LOC) {
    return emu_malloc((void **)p, bytes, EMU_AT);
}
template <class T>
cudaError_t cudaMallocHost(T **p, size_t bytes) {
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

// ---- Streams, events ----------------------------------------------------------------------------

typedef struct CUevent_st *cudaEvent_t;
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
typedef void (*cudaHostFn_t)(void *);
#define CUDART_CB
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *data);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);

// ---- Kernels ------------------------------------------------------------------------------------

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
cudaError_t emu_func_attribute(const void *kernel, cudaFuncAttribute attr, int value);
template <class F>
cudaError_t cudaFuncSetAttribute(F *kernel, cudaFuncAttribute attr, int value) {
    return emu_func_attribute((const void *)kernel, attr, value);
}

template <class T>
cudaError_t cudaMemcpyFromSymbol(void *dst, const T &symbol, size_t bytes) {
    memcpy(dst, &symbol, bytes);
    return cudaSuccess;
}

// ---- The one driver function that is looked up at run time: cuTensorMapEncodeTiled --------------

enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1
};
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **entry, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *result = nullptr);
}
