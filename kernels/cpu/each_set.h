// Includes CODE, a header without a guard, once per instruction set of which a CPU has the best
// selected at run time, with these defined, which it undefines:
//   NAME(x)                 x with the set's suffix
//   TARGET                  function attribute that allows the instructions, or nothing
//   LANES                   reals in a vector
//   FMA(a, b, c)            a * b + c on vectors; one rounding if the CPU has FMA
//   MERGE_LOW, MERGE_HIGH   indices that interleave the lower, upper halves of two vectors
#ifdef X86
#include <immintrin.h>
#define LOW_16 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_16 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

#define NAME(x) x##_avx512
#define TARGET __attribute__((target(AVX512)))
#define LANES 16
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define MERGE_LOW LOW_16
#define MERGE_HIGH HIGH_16
#include CODE

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define MERGE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define MERGE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#include CODE
#elif defined(NEON)
#include <arm_neon.h>
#endif

// Vectors of 16 bytes, which are NEON and SSE2
#define NAME(x) x##_portable
#define TARGET
#ifdef GRADCHECK
#define LANES 2
#define MERGE_LOW 0, 2
#define MERGE_HIGH 1, 3
#else
#define LANES 4
#define MERGE_LOW 0, 4, 1, 5
#define MERGE_HIGH 2, 6, 3, 7
#endif
#ifdef NEON
#define FMA(a, b, c) \
    ((__typeof__(c))vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
#include CODE
