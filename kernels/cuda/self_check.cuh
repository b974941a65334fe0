// Every operation against plain code on this very GPU: one thread per result, written from the
// contracts of kernels.h, sums in double. On a few small models with odd and empty documents.
//
// Inputs are exact in bf16, and each operation gets the results of the one before it as they are.
// A result stored as bf16 is then off by at most BF16 of its value (half of that is rounding; the
// fp32 value before it may lie across a border), and by FP32 of the sum of its terms' magnitudes.
// In attention the probabilities and dS are rounded to bf16 too: the errors of terms are
// independent and add up to 4 BF16 of the root of their sum of squares at most.
#ifndef UNPAD_SELF_CHECK_CUH
#define UNPAD_SELF_CHECK_CUH

#include "../comm/comm.h"
#include "attention.cuh"

extern "C" {
#include "../../data/base/error.h"
#include "../../data/base/hash.h"
}

namespace self_check {

#define BF16 0x1p-8
#define FP32 1e-5

// What a result should be, and how far off it may be beside BF16 of its value
struct Want {
    double value, tolerance;
};

template <class T, class F>
__global__ void plain_kernel(T *out, int64_t n, F result) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = result(i);
}

__device__ __forceinline__ double at(const floatX *x, int64_t i) { return __bfloat162float(x[i]); }

// ------------------------------------------------------------------------------------------------
// Operands. They are freed after each check of a model.

// Everything is NaN, and so are the bytes behind it, which nothing may write.
void *take(size_t bytes);
void *host_take(size_t bytes);  // freed by the caller

// Between -scale and scale, exact in bf16 where scale is a power of 2
float *random_host(int64_t n, float scale);  // freed by the caller
real *random_real(int64_t n, float scale);
floatX *random_bf16(int64_t n, float scale);

template <class T>
static T *take_n(int64_t n) {
    return (T *)take((size_t)n * sizeof(T));
}
template <class T>
static T *on_device(const T *host, int64_t n) {
    T *p = take_n<T>(n);
    device_upload(p, host, (size_t)n * sizeof(T));
    return p;
}
template <class T>
static T *copy_of(const T *x, int64_t n) {
    T *p = take_n<T>(n);
    device_copy(p, x, (size_t)n * sizeof(T));
    return p;
}

template <class T, class F>
static void compute(T *out, int64_t n, const F &result) {
    if (n == 0) return;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = (unsigned)ceil_div<int64_t>(n, 128), launch.blockDim = 128;
    launch.stream = cuda_stream();
    CUDA_CHECK(cudaLaunchKernelEx(&launch, plain_kernel<T, F>, out, n, result));
}

// ------------------------------------------------------------------------------------------------
// Comparing

// Names the operation that is checked next.
void checking(const char *name);
// Has an operation been found wrong?
bool found_wrong();

// The result of an operation against `wanted`; a whole block is followed by NaN.
void compare(const char *name, const void *got, int64_t n, size_t element_bytes, double relative,
             const Want *wanted);

// f(i) is what got[i] should be. T floatX: rounded to bf16, unless `exact`.
template <class T, class F>
static void expect(const char *name, const T *got, int64_t n, const F &f, bool exact = false) {
    Want *want = take_n<Want>(n);
    compute(want, n, f);
    compare(name, got, n, sizeof(T), sizeof(T) == 2 && !exact ? BF16 : 0, want);
}

// ------------------------------------------------------------------------------------------------
// The checks

enum { SOME_ROWS = 37 };  // of operations that take any number of rows

// One micro-batch of a model
struct Packed {
    HeadShape heads;
    int T, num_docs, max_len;
    int C, F, V, rows;  // rows: of operations that work row by row, an odd number
    int32_t *position_ids, *tokens, *order, *first, *end;  // first, end: of a token's document
    real *rope_table;
    VarlenInfo docs;
};

typedef void Check(const Packed &p);
// self_check_layers.cu
Check check_rows, check_embedding, check_norms, check_qk_norm, check_bias, check_matmul,
    check_swiglu, check_cross_entropy;
// self_check_attention.cu; check_cache comes after check_attention
Check check_rope, check_attention, check_cache;

}  // namespace self_check
#endif
