// cuda_emu.h - compile ordinary CUDA C++ with a host compiler and run every GPU thread as a fiber.
// Prototype, written from scratch. One translation-unit runtime: cuda_emu.cpp.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define CUDA_EMU 1
#define CUDART_VERSION 13000
#define __host__
#define __device__
#define __global__
#define __constant__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
// block scope: "thread_local T x[n];" is implicitly static, "extern thread_local T smem[];" is legal,
// so one keyword covers both spellings of shared memory. One block at a time runs on one OS thread.
#define __shared__ thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define EMU_LOC const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_AT emu_file, emu_line

// ---------------------------------------------------------------- vector types
#define EMU_V2(N, T, A)      \
    struct alignas(A) N##2 { \
        T x, y;              \
    };                       \
    inline N##2 make_##N##2(T x, T y) { return {x, y}; }
#define EMU_V3(N, T) \
    struct N##3 {    \
        T x, y, z;   \
    };               \
    inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }
#define EMU_V4(N, T, A)      \
    struct alignas(A) N##4 { \
        T x, y, z, w;        \
    };                       \
    inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_V2(int, int, 8)
EMU_V3(int, int) EMU_V4(int, int, 16) EMU_V2(uint, unsigned, 8) EMU_V3(uint, unsigned)
    EMU_V4(uint, unsigned, 16) EMU_V2(float, float, 8) EMU_V3(float, float) EMU_V4(float, float, 16)
        EMU_V2(double, double, 16) EMU_V2(short, short, 4)
            EMU_V2(ushort, unsigned short, 4) struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
constexpr int warpSize = 32;

// ---------------------------------------------------------------- bf16
struct __nv_bfloat16 {
    uint16_t x;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) {
        uint32_t u;
        memcpy(&u, &f, 4);
        if ((u & 0x7fffffffu) > 0x7f800000u)
            x = 0x7fff;  // NVIDIA's canonical NaN
        else
            x = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);  // round to nearest even
    }
    operator float() const {
        uint32_t u = (uint32_t)x << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline float __bfloat162float(__nv_bfloat16 b) { return b; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }

// ---------------------------------------------------------------- runtime core
namespace emu {
enum State : uint8_t { READY, RUNNING, W_WARP, W_BAR, W_MBAR, DONE };
struct Fiber;
struct Block;
struct Cursor {
    Fiber *self;
    Block *blk;
};
extern __thread Cursor cur;
typedef void (*CollFn)(void **slot, uint32_t mask);
void warp_coll(uint32_t mask, CollFn fn, const char *name, void *arg, const char *file, int line,
               bool aligned);
void bar(int id, int count, bool wait, const char *file, int line);
void yield_point();  // random scheduling point
void fail(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
uint32_t smem_addr(const void *p);  // generic -> 32-bit shared window
void *smem_ptr(uint32_t a, size_t bytes, const char *what);
void run_grid(dim3 g, dim3 b, size_t smem, const void *fn, const char *name, void (*call)(void *),
              void *ctx);
bool is_device_ptr(const void *p);
int lane_id();
bool lane_masked(uint32_t m);

template <class T>
inline void check_arg(const char *k, int i, const T &v) {
    if constexpr (std::is_pointer_v<T>)
        if (v && !is_device_ptr((const void *)v))
            fail("launch of %s: argument %d is not a device pointer (%p)", k, i, (const void *)v);
}
template <class... P>
struct Launch {
    const char *name;
    void (*k)(P...);
    dim3 g, b;
    size_t smem;
    template <class... A>
    void operator()(A &&...a) const {
        static_assert(sizeof...(A) == sizeof...(P), "kernel argument count");
        struct Ctx {
            void (*k)(P...);
            std::tuple<std::decay_t<P>...> t;
        } c{k, {static_cast<P>(a)...}};
        int i = 0;
        std::apply([&](auto &...v) { (check_arg(name, i++, v), ...); }, c.t);
        run_grid(
            g, b, smem, (const void *)k, name,
            [](void *p) {
                Ctx &x = *(Ctx *)p;
                std::apply(x.k, x.t);
            },
            &c);
    }
};
template <class... P>
Launch<P...> launcher(const char *n, void (*k)(P...), dim3 g, dim3 b, size_t s = 0,
                      void * = nullptr) {
    return {n, k, g, b, s};
}
}  // namespace emu
// "k<T><<<g, b, s, st>>>(args)" is rewritten to "EMU_LAUNCH((k<T>), g, b, s, st)(args)" by one regular expression
#define EMU_UNPAREN(...) __VA_ARGS__
#define EMU_LAUNCH(k, ...) emu::launcher(#k, EMU_UNPAREN k, __VA_ARGS__)

extern __thread uint3 threadIdx, blockIdx, blockDim,
    gridDim;  // threadIdx is reloaded at every fiber switch

// ---------------------------------------------------------------- synchronisation, warp primitives
inline void __syncthreads(EMU_LOC) { emu::bar(0, -1, true, EMU_AT); }
inline void __threadfence() { emu::yield_point(); }
inline void __threadfence_block() { emu::yield_point(); }
inline void __nanosleep(unsigned) { emu::yield_point(); }
namespace emu {
void fn_sync(void **, uint32_t);
struct ShflArg {
    uint64_t v, out;
    int src;
    uint32_t pred, ball;
};
void fn_shfl(void **, uint32_t);
void fn_vote(void **, uint32_t);
template <class T>
T shfl(uint32_t m, T v, int src, const char *nm, EMU_LOC) {
    static_assert(sizeof(T) <= 8, "shfl type");
    ShflArg a{};
    memcpy(&a.v, &v, sizeof(T));
    a.src = src;
    warp_coll(m, fn_shfl, nm, &a, EMU_AT, false);
    T r;
    memcpy(&r, &a.out, sizeof(T));
    return r;
}
inline uint32_t vote(uint32_t m, bool p, const char *nm, EMU_LOC) {
    ShflArg a{};
    a.pred = p;
    warp_coll(m, fn_vote, nm, &a, EMU_AT, false);
    return a.ball;
}
}  // namespace emu
inline void __syncwarp(unsigned m = 0xffffffffu, EMU_LOC) {
    emu::warp_coll(m, emu::fn_sync, "__syncwarp", nullptr, EMU_AT, false);
}
template <class T>
T __shfl_sync(unsigned m, T v, int s, int w = 32, EMU_LOC) {
    int l = emu::lane_id();
    return emu::shfl(m, v, (l & ~(w - 1)) | (s & (w - 1)), "__shfl_sync", EMU_AT);
}
template <class T>
T __shfl_xor_sync(unsigned m, T v, int x, int w = 32, EMU_LOC) {
    int l = emu::lane_id(), s = l ^ x;
    if (s >= ((l / w) + 1) * w) s = l;
    return emu::shfl(m, v, s, "__shfl_xor_sync", EMU_AT);
}
template <class T>
T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32, EMU_LOC) {
    int l = emu::lane_id(), s = l + (int)d;
    if (s >= ((l / w) + 1) * w) s = l;
    return emu::shfl(m, v, s, "__shfl_down_sync", EMU_AT);
}
template <class T>
T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32, EMU_LOC) {
    int l = emu::lane_id(), s = l - (int)d;
    if (s < (l / w) * w) s = l;
    return emu::shfl(m, v, s, "__shfl_up_sync", EMU_AT);
}
inline unsigned __ballot_sync(unsigned m, int p, EMU_LOC) {
    return emu::vote(m, p, "__ballot_sync", EMU_AT);
}
inline int __any_sync(unsigned m, int p, EMU_LOC) {
    return emu::vote(m, p, "__any_sync", EMU_AT) != 0;
}
inline int __all_sync(unsigned m, int p, EMU_LOC) {
    return emu::vote(m, !p, "__all_sync", EMU_AT) == 0;
}

// ---------------------------------------------------------------- atomics (blocks may run on several OS threads)
template <class T, class F>
T emu_rmw(T *p, F f) {
    emu::yield_point();
    T o, n;
    __atomic_load(p, &o, __ATOMIC_RELAXED);
    do n = f(o);
    while (!__atomic_compare_exchange(p, &o, &n, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return o;
}
template <class T>
T atomicAdd(T *p, std::common_type_t<T> v) {
    return emu_rmw(p, [&](T o) { return T(o + v); });
}
template <class T>
T atomicMax(T *p, std::common_type_t<T> v) {
    return emu_rmw(p, [&](T o) { return o > v ? o : v; });
}
template <class T>
T atomicMin(T *p, std::common_type_t<T> v) {
    return emu_rmw(p, [&](T o) { return o < v ? o : v; });
}
template <class T>
T atomicExch(T *p, std::common_type_t<T> v) {
    return emu_rmw(p, [&](T) { return v; });
}
template <class T>
T atomicCAS(T *p, std::common_type_t<T> c, std::common_type_t<T> v) {
    return emu_rmw(p, [&](T o) { return o == c ? v : o; });
}

// ---------------------------------------------------------------- device math and caching loads
template <class T>
T __ldg(const T *p) {
    return *p;
}
template <class T>
T __ldcs(const T *p) {
    return *p;
}
template <class T>
T __ldcg(const T *p) {
    return *p;
}
template <class T>
void __stcs(T *p, T v) {
    *p = v;
}
template <class T>
void __stcg(T *p, T v) {
    *p = v;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __int_as_float(int i) {
    float f;
    memcpy(&f, &i, 4);
    return f;
}
inline int __float_as_int(float f) {
    int i;
    memcpy(&i, &f, 4);
    return i;
}
inline unsigned __float_as_uint(float f) {
    unsigned i;
    memcpy(&i, &f, 4);
    return i;
}
inline float __uint_as_float(unsigned i) {
    float f;
    memcpy(&f, &i, 4);
    return f;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline size_t __cvta_generic_to_shared(const void *p) { return emu::smem_addr(p); }
inline void __trap() { emu::fail("__trap()"); }

// ---------------------------------------------------------------- host runtime API (streams are synchronous)
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
typedef void *cudaStream_t;
struct emu_event {
    std::chrono::steady_clock::time_point t;
};
typedef emu_event *cudaEvent_t;
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
    int multiProcessorCount, major, minor, warpSize, maxThreadsPerBlock, l2CacheSize;
};
struct cudaLaunchAttribute {
    int id;
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
cudaError_t emu_malloc(void **p, size_t n, const char *file, int line);
template <class T>
cudaError_t cudaMalloc(T **p, size_t n, EMU_LOC) {
    return emu_malloc((void **)p, n, EMU_AT);
}
cudaError_t cudaFree(void *p);
template <class T>
cudaError_t cudaMallocHost(T **p, size_t n) {
    *p = (T *)aligned_alloc(256, (n + 255) & ~(size_t)255);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void *p) {
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind k);
cudaError_t cudaMemset(void *d, int v, size_t n);
inline cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind k,
                                   cudaStream_t = nullptr) {
    return cudaMemcpy(d, s, n, k);
}
inline cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t = nullptr) {
    return cudaMemset(d, v, n);
}
inline cudaError_t cudaStreamCreate(cudaStream_t *s) {
    *s = (void *)1;
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) {
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *e) {
    *e = new emu_event();
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t e) {
    delete e;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t = nullptr) {
    e->t = std::chrono::steady_clock::now();
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = std::chrono::duration<float, std::milli>(b->t - a->t).count();
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError();
inline const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess ? "no error" : "emulated CUDA error";
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int *d) {
    *d = 0;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int *n) {
    *n = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int);
cudaError_t emu_func_attr(const void *f, int a, int v);
template <class F>
cudaError_t cudaFuncSetAttribute(F *f, cudaFuncAttribute a, int v) {
    return emu_func_attr((const void *)f, a, v);
}
template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*k)(P...), A &&...a) {
    emu::launcher("kernel", k, c->gridDim, c->blockDim, c->dynamicSmemBytes,
                  c->stream)(std::forward<A>(a)...);
    return cudaGetLastError();
}

// ---------------------------------------------------------------- driver API: tensor maps only
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
typedef uint64_t cuuint64_t;
typedef uint32_t cuuint32_t;
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion {
    CU_TENSOR_MAP_L2_PROMOTION_NONE = 0,
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
struct alignas(64) CUtensorMap {
    uint64_t base, stride[4];
    uint32_t dim[5];
    uint16_t box[5];
    uint8_t rank, elt, swz, pad;
    uint32_t magic;
};
static_assert(sizeof(CUtensorMap) == 128, "tensor map size");
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t rank, void *base,
                                const cuuint64_t *dims, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *estr,
                                CUtensorMapInterleave il, CUtensorMapSwizzle sw,
                                CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill oob);
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **f, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult *q = nullptr) {
    *f = (void *)&cuTensorMapEncodeTiled;
    if (q) *q = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
#define cudaEnableDefault 0
