// For tests of CUDA itself: checked calls, device memory that a case need not free, the GPU's kind.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <vector>

#include "../kernels/cuda/attention.cuh"
#include "test.h"

#define CUDA_OK(call_)                                                        \
    do {                                                                      \
        cudaError_t status_ = (call_);                                        \
        CHECK_MSG(status_ == cudaSuccess, "%s", cudaGetErrorString(status_)); \
    } while (0)

typedef __nv_bfloat16 bf16;
typedef unsigned long long u64;

// Begins a case: frees what earlier ones allocated, and skips it on a GPU of another kind.
static std::vector<void *> held;
static inline void begin(int min_major, int max_major) {
    int major = 0;
    for (void *p : held) cudaFree(p);
    held.clear();
    CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major < min_major || major > max_major)
        SKIP("this GPU is of compute capability %d.x", major);
}

// And on one whose code it does not have
static inline void begin_wgmma() {
    const DeviceOptions options = {};
    begin(9, 9);
    if (device_init(&options) || !attention_has_sm90())
        SKIP("built for other GPUs: make CUDA_ARCHS=%s", "90a");
}

template <class T>
static T *to_device(const std::vector<T> &host) {
    T *p = nullptr;
    CUDA_OK(cudaMalloc(&p, host.size() * sizeof(T)));
    CUDA_OK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    held.push_back(p);
    return p;
}
template <class T>
static T *device_buffer(size_t n) {  // zeros
    return to_device(std::vector<T>(n));
}
template <class T>
static std::vector<T> to_host(const T *p, size_t n) {  // of kernels that have run without an error
    std::vector<T> host(n);
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaMemcpy(host.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}
