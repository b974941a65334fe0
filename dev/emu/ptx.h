// Kernels that nvcc has compiled, translated from PTX by ptx.py: in a program that contains them
// they run in place of those of the same name that the host compiler made.
#pragma once
#include <cfenv>

#include "include/cuda_runtime.h"
#include "include/emu_ptx.h"

extern thread_local unsigned char smem[];

namespace ptx {
// ---- What kernels consist of --------------------------------------------------------------------

// Static shared variables: a block runs one kernel, so that all can have the same memory.
inline __thread unsigned char statics[8 << 10] __attribute__((aligned(128)));

inline void enter(unsigned most_threads, size_t static_bytes) {
    if (blockDim.x * blockDim.y * blockDim.z > most_threads)
        emu::fail("a block of more threads than .maxntid %u", most_threads);
    if (static_bytes > sizeof statics)
        emu::fail("statics is too small for %zu bytes", static_bytes);
    if (static_bytes) emu::static_smem(statics, static_bytes);
}

// The bits of a register as another type of its size, or the low ones as a smaller integer
template <class To, class From>
To as(From from) {
    if constexpr (sizeof(To) == sizeof(From)) {
        return emu::bits<To>(from);
    } else {
        static_assert(std::is_integral_v<From> && std::is_integral_v<To>);
        static_assert(sizeof(To) < sizeof(From), "an operand is wider than its register");
        return (To)from;
    }
}
// A result into a register of its size, or extended into a wider one
template <class T, class R>
void put(R &to, T value) {
    static_assert(sizeof(T) == sizeof(R) || (std::is_integral_v<T> && sizeof(T) < sizeof(R)));
    if constexpr (sizeof(T) == sizeof(R))
        memcpy((void *)&to, &value, sizeof to);
    else
        to = (R)value;
}

// Memory: every access is aligned to its size, vectors as a whole
inline void *at(void *p, size_t bytes, const char *file, int line) {
    if ((uintptr_t)p % bytes)
        emu::fail("%s:%d address %p is not aligned to %zu bytes", file, line, p, bytes);
    return p;
}
inline void *at(uint32_t a, size_t bytes, const char *file, int line) {
    if (a % bytes)
        emu::fail("%s:%d shared address 0x%x is not aligned to %zu bytes", file, line, a, bytes);
    return emu::smem_ptr(a, bytes, "ld, st");
}
template <class T, size_t N, class Address>
void load(T (&d)[N], Address a, const char *file, int line) {
    memcpy(d, at(a, sizeof d, file, line), sizeof d);
}
template <class T, size_t N, class Address>
void store(Address a, const T (&x)[N], const char *file, int line) {
    memcpy(at(a, sizeof x, file, line), x, sizeof x);
}
inline void copy(uint32_t to, const void *from, int valid, const char *file, int line) {
    if (valid < 0 || valid > 16) emu::fail("%s:%d cp.async: %d of 16 bytes", file, line, valid);
    emu::cp_async(to, from, 16, valid, file, line);
}

// Comparisons are false of NaN
#define PTX_COMPARISON(name_, true_)   \
    template <class T>                 \
    bool name_(const T a, const T b) { \
        return true_;                  \
    }
PTX_COMPARISON(eq, a == b)
PTX_COMPARISON(ne, a<b || a> b)
PTX_COMPARISON(lt, a < b)
PTX_COMPARISON(le, a <= b)
PTX_COMPARISON(gt, a > b)
PTX_COMPARISON(ge, a >= b)

inline uint16_t to_bf16(float f) {
    const uint32_t u = emu::bits<uint32_t>(f);
    if (f != f) return 0x7fff;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float fma_rm(volatile float a, float b, float c) {  // rounded down
    fesetround(FE_DOWNWARD);
    volatile float d = std::fma(a, b, c);
    fesetround(FE_TONEAREST);
    return d;
}
inline double rcp_upper(double x) {  // the lower half is zeros
    return emu::bits<double>(emu::bits<uint64_t>(1 / x) & 0xffffffff00000000u);
}
inline uint32_t bfi(uint32_t a, uint32_t b, uint32_t at, uint32_t n) {
    at &= 255, n &= 255;
    const uint64_t mask = at < 32 ? ((1ull << std::min(n, 32u)) - 1) << at : 0;
    return (uint32_t)((b & ~mask) | ((uint64_t)a << (at & 31) & mask));
}
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selectors) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t s = selectors >> 4 * i & 15, byte = bytes >> 8 * (s & 7) & 255;
        result |= (s & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return result;
}

// The lane that is read must be up to the last one of the caller's segment; else it reads itself.
inline void shfl(int from, uint32_t *d, bool *p, uint32_t value, int last, uint32_t mask,
                 const char *file, int line) {
    *p = from <= last;
    *d = emu::shfl(mask, value, *p ? from : emu::lane_id(), "shfl.sync", file, line);
}
inline int last_lane(int segment, uint32_t c) {
    return (emu::lane_id() & segment) | ((int)(c & 31) & ~segment);
}
inline void shfl_bfly(uint32_t *d, bool *p, uint32_t value, uint32_t bits, uint32_t c,
                      uint32_t mask, const char *file, int line) {
    const int segment = c >> 8 & 31;
    shfl(emu::lane_id() ^ (int)(bits & 31), d, p, value, last_lane(segment, c), mask, file, line);
}
inline void shfl_idx(uint32_t *d, bool *p, uint32_t value, uint32_t lane, uint32_t c, uint32_t mask,
                     const char *file, int line) {
    const int segment = c >> 8 & 31;
    shfl((emu::lane_id() & segment) | ((int)(lane & 31) & ~segment), d, p, value,
         last_lane(segment, c), mask, file, line);
}
inline void mma(float *d, const uint32_t *a, const uint32_t *b, const float *c, const char *file,
                int line) {
    memcpy(d, c, 4 * sizeof *d);
    emu::mma16816(d, a, b, file, line);
}

// ---- Where the emulator finds them --------------------------------------------------------------

struct Kernel {
    const char *arch, *symbol;
    emu::Compiled function;
    size_t sizes[16];  // of the parameters
};
struct Registered {
    explicit Registered(const Kernel *kernels);  // up to one without a name
};
}  // namespace ptx
