// CUDA C++ for a host compiler: keywords, built-in variables, launches, warp primitives, atomics,
// device arithmetic. Every CUDA thread runs as a fiber of its own. The runtime behind this header
// is dev/emu/*.cpp; the host API is in cuda_runtime.h, bf16 in cuda_bf16.h, tensor maps in cuda.h.
#pragma once
extern "C++" {  // a C header may include this inside its own extern "C"
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <utility>

#define CUDA_EMU 1
#define CUDART_VERSION 13000
#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
// At block scope "thread_local T x[n];" is implicitly static, and "extern thread_local T smem[];"
// is legal: one keyword covers both spellings of shared memory. An OS thread runs one block at a
// time, so its thread-local storage is that block's shared memory.
#define __shared__ thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))

// Where a device function was called: reports name the line of the kernel, not of this header.
#define EMU_LOC const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_AT emu_file, emu_line

// ---- Vector types, with CUDA's alignments -------------------------------------------------------

#define EMU_VECTORS(name_, type_, align2_, align4_)                                  \
    struct alignas(align2_) name_##2 {                                               \
        type_ x, y;                                                                  \
    };                                                                               \
    struct name_##3 {                                                                \
        type_ x, y, z;                                                               \
    };                                                                               \
    struct alignas(align4_) name_##4 {                                               \
        type_ x, y, z, w;                                                            \
    };                                                                               \
    inline name_##2 make_##name_##2(type_ x, type_ y) { return {x, y}; }             \
    inline name_##3 make_##name_##3(type_ x, type_ y, type_ z) { return {x, y, z}; } \
    inline name_##4 make_##name_##4(type_ x, type_ y, type_ z, type_ w) { return {x, y, z, w}; }
EMU_VECTORS(uint, unsigned, 8, 16)
EMU_VECTORS(float, float, 8, 16)
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

// threadIdx changes at every switch of fibers
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

// ---- What the runtime offers --------------------------------------------------------------------

struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace emu {
struct Fiber;
struct Block;
struct Cursor {
    Fiber *self;
    Block *blk;
    bool in_host_function;
};
extern __thread Cursor cur;  // the CUDA thread and block that this OS thread is running

// Runs once for a warp, when the last lane of the mask has arrived; slot[lane] is its argument.
typedef void (*CollFn)(void **slot, uint32_t mask);
void warp_coll(uint32_t mask, CollFn fn, const char *name, void *arg, const char *file, int line,
               bool aligned);
void fn_sync(void **, uint32_t);
void fn_shfl(void **, uint32_t);
void fn_vote(void **, uint32_t);
void bar(int id, int count, bool wait, const char *file, int line);
void yield_point();  // another thread may run here
void fail(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
float expf_of_a_gpu(float x);
uint32_t smem_addr(const void *p);  // generic address -> 32-bit address in shared memory
void *smem_ptr(uint32_t a, size_t bytes, const char *what);
void static_smem(const void *p, size_t bytes);  // a __shared__ variable of this block
int lane_id();

bool is_device_ptr(const void *p);
bool check_launch(dim3 grid, dim3 block, size_t smem, const void *fn, const char *name);
size_t static_smem_limit(size_t smem, const void *fn);
void run_grid(dim3 grid, dim3 block, size_t smem, size_t static_limit, const char *name,
              void (*call)(void *), void *context);
// Now, on the stream's thread, or into a capture
void enqueue(cudaStream_t stream, std::function<void()> work, const char *name = "call");

// A kernel as nvcc compiled it (ptx.h), called with the addresses of its arguments, of these sizes.
// nullptr: this program contains the host compiler's kernels only.
typedef void (*Compiled)(void *const *arguments);
Compiled compiled_kernel(const void *kernel, std::initializer_list<size_t> sizes);

template <class T>
void check_arg(const char *kernel, int i, const T &v) {
    if constexpr (std::is_pointer_v<T>)
        if (v && !is_device_ptr((const void *)v))
            fail("launch of %s: argument %d is not a device pointer (%p)", kernel, i,
                 (const void *)v);
}

// The object that replaces "kernel<<<grid, block, smem, stream>>>"; calling it launches.
template <class... P>
struct Launch {
    const char *name;
    void (*kernel)(P...);
    dim3 grid, block;
    size_t smem;
    cudaStream_t stream;

    struct Context {
        void (*kernel)(P...);
        std::tuple<std::decay_t<P>...> args;
        Compiled compiled;
        static void call(void *p) {
            Context &c = *(Context *)p;
            if (!c.compiled) return std::apply(c.kernel, c.args);
            auto addresses = [](auto &...a) { return std::array{(void *)&a..., (void *)nullptr}; };
            c.compiled(std::apply(addresses, c.args).data());
        }
    };
    template <class... A>
    void operator()(A &&...a) const {
        static_assert(sizeof...(A) == sizeof...(P), "kernel argument count");
        if (!check_launch(grid, block, smem, (const void *)kernel, name)) return;
        const Compiled compiled = compiled_kernel((const void *)kernel, {sizeof(P)...});
        Context context{kernel, {static_cast<P>(a)...}, compiled};
        int i = 0;
        std::apply([&](auto &...v) { (check_arg(name, i++, v), ...); }, context.args);
        const size_t limit = static_smem_limit(smem, (const void *)kernel);
        enqueue(stream, [launch = *this, limit, context]() mutable {
            run_grid(launch.grid, launch.block, launch.smem, limit, launch.name, Context::call,
                     &context);
        }, name);
    }
};
template <class... P>
Launch<P...> launcher(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                      size_t smem = 0, cudaStream_t stream = nullptr) {
    return {name, kernel, grid, block, smem, stream};
}
}  // namespace emu
// launch.pl turns k<T><<<g, b, s, st>>>(args) into EMU_LAUNCH("k<T>", (k<T>), g, b, s, st)(args)
#define EMU_UNPAREN(...) __VA_ARGS__
#define EMU_LAUNCH(name, k, ...) emu::launcher(name, EMU_UNPAREN k, __VA_ARGS__)

// ---- Synchronisation and warp primitives --------------------------------------------------------

inline void __syncthreads(EMU_LOC) { emu::bar(0, -1, true, EMU_AT); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_LOC) {
    emu::warp_coll(mask, emu::fn_sync, "__syncwarp", nullptr, EMU_AT, false);
}

namespace emu {
struct ShflArg {
    uint64_t v, out;
    int src;
    uint32_t pred, ball;
};
template <class T>
T shfl(uint32_t mask, T v, int src, const char *name, EMU_LOC) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    ShflArg a{};
    memcpy(&a.v, &v, sizeof(T));
    a.src = src;
    warp_coll(mask, fn_shfl, name, &a, EMU_AT, false);
    T r;
    memcpy((void *)&r, &a.out, sizeof(T));
    return r;
}
inline uint32_t vote(uint32_t mask, bool predicate, const char *name, EMU_LOC) {
    ShflArg a{};
    a.pred = predicate;
    warp_coll(mask, fn_vote, name, &a, EMU_AT, false);
    return a.ball;
}
}  // namespace emu
template <class T>
T __shfl_sync(unsigned mask, T v, int src, int width = 32, EMU_LOC) {
    int lane = emu::lane_id();
    return emu::shfl(mask, v, (lane & ~(width - 1)) | (src & (width - 1)), "__shfl_sync", EMU_AT);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, EMU_LOC) {
    int lane = emu::lane_id(), src = lane ^ bits;
    if (src >= (lane / width + 1) * width) src = lane;
    return emu::shfl(mask, v, src, "__shfl_xor_sync", EMU_AT);
}
inline int __any_sync(unsigned mask, int predicate, EMU_LOC) {
    return emu::vote(mask, predicate, "__any_sync", EMU_AT) != 0;
}

// ---- Atomics: blocks may run on several OS threads ----------------------------------------------

template <class T, class F>
T emu_rmw(T *p, F change) {
    emu::yield_point();
    T before, after;
    __atomic_load(p, &before, __ATOMIC_RELAXED);
    do after = change(before);
    while (
        !__atomic_compare_exchange(p, &before, &after, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return before;
}
inline void __threadfence() {
    emu::yield_point();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
template <class T>
T __ldcg(const T *p) {
    return *p;
}
// Counts up to `last`, then begins again at 0
inline unsigned atomicInc(unsigned *p, unsigned last) {
    return emu_rmw(p, [&](unsigned o) { return o >= last ? 0 : o + 1; });
}

// ---- Bits, arithmetic ---------------------------------------------------------------------------

namespace emu {
template <class To, class From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy((void *)&to, &from, sizeof to);
    return to;
}
}  // namespace emu
inline unsigned __float_as_uint(float f) { return emu::bits<unsigned>(f); }

// The hardware's approximations are within a few ulp of these; no test may ask for equal bits.
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
}
// The C library declares functions of these names; these definitions take their linkage.
inline float __expf(float x) { return emu::expf_of_a_gpu(x); }
extern "C++" {
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline size_t __cvta_generic_to_shared(const void *p) { return emu::smem_addr(p); }
inline void __trap() { emu::fail("__trap()"); }
}
