// Shared by all CUDA kernel files: the stream, checked launches, reductions, 16-byte vectors, and
// the mapping of a tensor's rows to warps.
#pragma once

#include <assert.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels.h"

// device.cu, valid after device_init: the one stream for all work; number of multiprocessors;
// major * 10 + minor of the architecture; shared memory of an SM in KiB.
cudaStream_t cuda_stream();
int cuda_num_sms();
int cuda_arch();
int cuda_shared_kb();

// Device memory for the partial sums of one operation, allocated by device_init. Every operation
// may use all of it: operations run in order.
const size_t CUDA_SCRATCH_BYTES = (size_t)32 << 20;
void *cuda_scratch();

// rmsnorm.cu: dweight (C) += the rows of partial (num_partial, C), in a fixed order
void add_partial_rows(real *dweight, const float *partial, int num_partial, int C);

// optimizer.cu: sums (num) += squares of num arrays of n elements, stride elements apart. sums may
// be the first of the scratch memory
void add_squares(double *sums, const real *x, size_t n, int64_t num, size_t stride);

// probe.cu: does not return in a process that is to probe attention, on device probed_device() (-1:
// another process).
void probe_if_asked();
int probed_device();

// device.cu: what every run needs; ends the program with exit code 6 (GPU memory) if it is refused.
void *cuda_allocate(const char *what, size_t bytes);

// matmul.cu: takes cuBLASLt's handle and workspace; NULL, or one line that says what is missing.
const char *matmul_init();
// d = scale a b + beta addend, of num bf16 matrices stored one after another. d, a and b are by
// kind out, weight, inp; dinp, weight, dout; dweight, inp, dout. addend may be d; NULL: zeros
enum MatmulKind { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, NUM_KINDS };
struct MatmulOperands {
    void *d;
    const void *addend, *a, *b;
    float scale = 1, beta = 1;
};
void matmul_many(MatmulKind kind, const MatmulOperands &x, int64_t T, int64_t K, int64_t N,
                 int64_t num);

// Ends the program with exit code 11 (device error): one error line, one hint line.
[[noreturn]] void cuda_fail(const char *file, int line, const char *what, cudaError_t status);
[[noreturn]] void cuda_unsupported(const char *op, const char *expected, int64_t found);

inline void cuda_check(const char *file, int line, const char *what, cudaError_t status) {
    if (status != cudaSuccess) cuda_fail(file, line, what, status);
}
#define CUDA_CHECK(call_) cuda_check(__FILE__, __LINE__, #call_, call_)
// After every launch: a bad configuration is reported here, with the kernel's name; a fault inside
// a kernel at the next call that waits.
#define LAUNCH_CHECK(kernel_) cuda_check(__FILE__, __LINE__, kernel_, cudaGetLastError())

// The compiler unrolls the loop, so that arrays that it indexes stay in registers.
#define unrolled_for _Pragma("unroll") for

enum { WARP = 32 };

template <class I>
__host__ __device__ constexpr I ceil_div(I a, I b) {
    return (a + b - 1) / b;
}

// ---- Sums over a warp: butterflies, so that every lane ends with the same bits ------------------

template <class R>
__device__ __forceinline__ R warp_sum(R x) {
    unrolled_for (int lane = WARP / 2; lane > 0; lane /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

// ---- Eight bf16 values: one 16-byte load or store -----------------------------------------------
// The address must be 16-byte aligned. Kept as words: a struct of bf16 pairs would be loaded and
// stored in four pieces.

struct Bf16x8 {
    uint4 words;
};

__device__ __forceinline__ float2 unpack2(uint32_t word) {
    __nv_bfloat162 pair;
    memcpy(&pair, &word, sizeof pair);
    return __bfloat1622float2(pair);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word;
}

__device__ __forceinline__ void unpack8(float (&x)[8], const Bf16x8 &v) {
    const uint32_t words[4] = {v.words.x, v.words.y, v.words.z, v.words.w};
    unrolled_for (int i = 0; i < 4; i++) {
        const float2 f = unpack2(words[i]);
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
    }
}

__device__ __forceinline__ Bf16x8 pack8(const float (&x)[8]) {
    return {make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                       pack_bf16(x[6], x[7]))};
}

__device__ __forceinline__ Bf16x8 load_vector(const __nv_bfloat16 *p) {
    return {*reinterpret_cast<const uint4 *>(p)};
}

__device__ __forceinline__ void store_vector(__nv_bfloat16 *p, const Bf16x8 &v) {
    *reinterpret_cast<uint4 *>(p) = v.words;
}

__device__ __forceinline__ void load8(float (&x)[8], const __nv_bfloat16 *p) {
    unpack8(x, load_vector(p));
}

__device__ __forceinline__ void store8(__nv_bfloat16 *p, const float (&x)[8]) {
    store_vector(p, pack8(x));
}

// ---- N neighbours: accesses of up to 16 bytes ---------------------------------------------------

template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Neighbours {
    T x[N];
};

template <int N, class T>
__device__ __forceinline__ Neighbours<T, N> &neighbours(T *p) {
    return *(Neighbours<T, N> *)p;
}

// ---- A moment of the optimizer in fp32, and as it is kept: see moments.h ------------------------

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(uint16_t half) { return moment_widen(half); }
__device__ __forceinline__ void narrow(float *kept, float x, uint64_t) { *kept = x; }
__device__ __forceinline__ void narrow(uint16_t *kept, float x, uint64_t random) {
    *kept = moment_narrow(x, random);
}

// ---- A weight is an fp32 master kept as the bf16 that matmuls read and 16 low bits --------------
// The bf16 is the master rounded to nearest, ties away from zero: hi = (bits + 0x8000) >> 16, lo =
// bits & 0xffff. The addition carried into hi exactly when lo >= 0x8000, so lo says what to
// subtract again, and every finite fp32, including denormals, comes back bit for bit. (With ties to
// even it would not: a tie rounds up or down depending on a bit that is then lost.) The largest
// finite numbers, above every bf16, have an infinite bf16 but keep their master. A NaN first
// becomes the plain quiet NaN: the carry out of its full mantissa would turn its bf16 into a zero.

__host__ __device__ __forceinline__ void master_split(float master, uint16_t *hi, uint16_t *lo) {
    uint32_t bits;
    memcpy(&bits, &master, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
    *hi = (uint16_t)((bits + 0x8000u) >> 16);
    *lo = (uint16_t)bits;
}

__host__ __device__ __forceinline__ float master_join(uint16_t hi, uint16_t lo) {
    const uint32_t bits = ((uint32_t)hi - (lo >> 15)) << 16 | lo;
    float master;
    memcpy(&master, &bits, sizeof master);
    return master;
}

// ---- Rows of a (rows, columns) tensor on a grid -------------------------------------------------
// Whole warps share a row, enough that a thread has about ROW_VECTORS vectors of 8 columns, all in
// flight at once; a block has as many rows as make 8 warps. threadIdx.x runs along a row,
// threadIdx.y over the rows of a block. The mapping depends only on the number of columns: a row's
// bits depend neither on its place nor on the GPU.

enum { ROW_VECTORS = 4, ROW_BLOCK_WARPS = 8, ROW_MAX_WARPS = 16 };
enum { ROW_MAX_THREADS = ROW_MAX_WARPS * WARP };
// Columns that ROW_VECTORS vectors per thread can hold: the limit of kernels that keep a row in
// registers. Others step along the row and have no limit.
enum { ROW_MAX_COLUMNS = ROW_MAX_THREADS * ROW_VECTORS * 8 };
// For kernels that sum over rows, each block its own: two for each of 132 multiprocessors
enum { BACKWARD_BLOCKS = 256 };
static_assert((size_t)BACKWARD_BLOCKS * ROW_MAX_COLUMNS * sizeof(float) <= CUDA_SCRATCH_BYTES,
              "the sums of blocks of one row, the widest, fit the scratch memory");

struct RowGrid {
    dim3 block;
    unsigned blocks;
};

inline RowGrid row_grid(const char *op, int64_t rows, int64_t columns) {
    if (columns <= 0 || columns % 8 != 0)
        cuda_unsupported(op, "a row length that is a multiple of 8", columns);
    int64_t warps = ceil_div<int64_t>(columns, 8 * WARP * ROW_VECTORS);
    if (warps > ROW_MAX_WARPS) warps = ROW_MAX_WARPS;
    const int64_t per_block = warps < ROW_BLOCK_WARPS ? ROW_BLOCK_WARPS / warps : 1;
    return {dim3((unsigned)(warps * WARP), (unsigned)per_block),
            (unsigned)ceil_div(rows, per_block)};
}

__device__ __forceinline__ int64_t row_of_thread() {
    return (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
}

// Column of a thread's i-th vector
__device__ __forceinline__ int vector_column(int i) {
    return 8 * ((int)threadIdx.x + i * (int)blockDim.x);
}

// Sum over the threads of one row, the same bits in each of them. warp_sums: one float for each
// warp of the block, in shared memory. Every thread of the block must come here; the caller's next
// use of warp_sums needs a barrier in between or other memory.
__device__ __forceinline__ float row_sum(float x, float *warp_sums) {
    const int warps = (int)blockDim.x / WARP;
    x = warp_sum(x);
    if (warps == 1) return x;
    float *row = warp_sums + (int)threadIdx.y * warps;
    if (threadIdx.x % WARP == 0) row[threadIdx.x / WARP] = x;
    __syncthreads();  // all warps of the row have written before any adds
    x = row[0];
    for (int w = 1; w < warps; w++) x += row[w];
    return x;
}
