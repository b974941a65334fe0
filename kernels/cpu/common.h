// Shared by the CPU kernels: run-time dispatch of leaf loops, small integer helpers, lane sums, a
// vectorisable exp, the fatal error, and what the files of this folder call in each other.
#pragma once

#include <math.h>
#include <string.h>

#include "../kernels.h"

#if !defined(GRADCHECK) && defined(__x86_64__)
#define X86 1
#elif !defined(GRADCHECK) && defined(__aarch64__)
#define NEON 1
#endif

// A leaf loop compiled for AVX-512, AVX2 and the baseline; the loader picks one when the program
// starts. Leaves only: the body of an OpenMP region is outlined and would lose the target.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(NO_CLONES)
#define CLONES \
    __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES __attribute__((noinline))
#endif

// For loops of constant length, and vectors: the elements of x, then y, that the indices name
#ifdef __clang__
#define unrolled_for _Pragma("clang loop unroll(full)") for
#define SHUFFLE(indices, x, y, ...) \
    ((void)sizeof(indices), __builtin_shufflevector(x, y, __VA_ARGS__))
#else
#define unrolled_for _Pragma("GCC unroll 32") for
#define SHUFFLE(indices, x, y, ...) __builtin_shuffle(x, y, (indices){__VA_ARGS__})
#endif

// Functions of a real, and an unsigned integer as wide: masks and indices of vectors
#ifdef GRADCHECK
typedef uint64_t real_bits;
#define log_real log
#define sqrt_real sqrt
#else
typedef uint32_t real_bits;
#define log_real logf
#define sqrt_real sqrtf
#endif

static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

// Sums run in SUM_LANES independent partial sums: the compiler may vectorise them without
// reassociating.
enum { SUM_LANES = 16 };

static inline real lanes_sum(const real *lanes) {
    real s = 0;
    for (int j = 0; j < SUM_LANES; j++) s += lanes[j];
    return s;
}

static inline __attribute__((always_inline)) real dot_product(const floatX *x, const floatX *y,
                                                              int n) {
    real lanes[SUM_LANES] = {0};
    int i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lanes[j] += (real)x[i + j] * y[i + j];
    for (; i < n; i++) lanes[0] += (real)x[i] * y[i];
    return lanes_sum(lanes);
}

// Ends the program; printf-like arguments: the unsupported value, expected, found.
#define kernel_fatal(...)                                                            \
    device_fail("this model or batch has a shape that the backend does not support", \
                "cpu backend: " __VA_ARGS__)

// features.c: does this CPU have the instruction set "amx_bf16", "avx512_bf16", "avx512", "avx2" or
// "portable" (always)? "avx512" means F, DQ, VL and BW; "avx2" includes FMA. "amx_bf16" asks Linux
// for the tile registers, which it grants to threads that start later.
bool cpu_has(const char *set);
// A remark about --bf16-matmul on this CPU, from measurements in dev/SPEED.md; "": none
const char *cpu_bf16_note(bool bf16_matmul);
// Sets how many threads the kernels use: `asked`, 0: see machine_threads of data/base/machine.h.
// All ranks call it. text: "2 threads of 64 cores (CPU quota)"
void cpu_set_threads(int asked, char *text, size_t capacity);
// That number. omp_get_max_threads is right only in the thread that called cpu_set_threads.
int cpu_threads(void);

// matmul.c: selects the best instruction set of this CPU, or for tests and benchmarks the one named
// ("avx512", "avx2", ...); bf16: see DeviceOptions. Returns false, with the selection
// unchanged, if this CPU has no such set.
bool matmul_select(const char *set, bool bf16);
const char *matmul_describe(void);  // "avx512 8x48": instruction set and register tile

// optimizer.c: n moments, k->m or k->v, from element i on in fp32: themselves, or of bf16 a copy.
// Then such a copy rounded, back into them; random: RANDOM_M or RANDOM_V
enum { MOMENTS_SPAN = 1 << 12 };  // copies fit the cache
real *moments_read(real *copy, void *values, const Moments *k, size_t i, size_t n);
void moments_write(void *values, const real *x, const Moments *k, int random, size_t i, size_t n);

// rows.c: sum (n) += row
void add_row(real *restrict sum, const floatX *restrict row, int64_t n);

// rope.c: the inverse of rope_forward, in place on dqkv (T,H+2*Hkv,D)
void rope_inverse(floatX *dqkv, const int32_t *position_ids, const real *rope_table, int64_t T,
                  HeadShape heads);

// exp(x) to about 1 ulp without a function call, so that loops vectorise. Cody-Waite reduction to
// [-ln2/2, ln2/2], then a degree-6 polynomial (Cephes expf). NaN stays NaN; x < -87 gives 0, x > 88
// gives exp(88).
static inline floatX exp_fast(floatX x) {
#ifdef GRADCHECK
    return exp(x);
#else
    float c = x > 88.0f ? 88.0f : x;
    c = c < -87.0f ? -87.0f : c;
    float t = c * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    float n = t - 12582912.0f;
    float r = c - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        float f;
        uint32_t u;
    } bits, scale;
    bits.f = t;
    scale.u = (bits.u + 127u) << 23;  // the low bits of t hold n
    return x < -87.0f ? 0.0f : p * scale.f;
#endif
}
