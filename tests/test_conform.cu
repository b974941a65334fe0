// Conformance of the wrappers in kernels/cuda/ptx.cuh, which holds all inline PTX and which an
// emulated build replaces: each case checks every value against its own formula, on the emulator
// and on a GPU. Those of tensor cores and ldmatrix: test_layout.cu, test_tensor_cores.cu.
#include <cuda.h>
#include <math.h>

#include "cuda_test.h"
#include "../kernels/cuda/attention_sm90.cuh"

constexpr unsigned ALL = 0xffffffffu;

// What a block writes to the first argument, of n elements that are 0 before
template <class T, class... P, class... A>
static std::vector<T> run(size_t n, void (*kernel)(T *, P...), int threads, int shared_bytes,
                          A... arguments) {
    T *out = device_buffer<T>(n);
    CUDA_OK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    kernel<<<1, threads, shared_bytes>>>(out, arguments...);
    return to_host(out, n);
}

static float at(const std::vector<bf16> &v, size_t i) { return __bfloat162float(v[i]); }

// ------------------------------------------------------------------------------------------------
// Warp primitives and arithmetic

__global__ void shuffle_kernel(int *out) {
    int t = threadIdx.x;
    out[t] = __shfl_xor_sync(ALL, t, 5);
    out[32 + t] = __shfl_xor_sync(ALL, t, 24, 16);
    out[64 + t] = __shfl_sync(ALL, t, 9, 16);
    out[96 + t] = __any_sync(ALL, t == 7) + 2 * __any_sync(ALL, t > 31);
}

TEST(shuffles_and_votes) {
    begin(8, 99);
    const std::vector<int> r = run(128, shuffle_kernel, 32, 0);
    for (int t = 0; t < 32; t++) {
        CHECK(r[t] == (t ^ 5));
        CHECK(r[32 + t] == ((t ^ 24) / 16 <= t / 16 ? (t ^ 24) : t));
        CHECK(r[64 + t] == t / 16 * 16 + 9);
        CHECK(r[96 + t] == 1);
    }
}

// A pair has its first argument in the low half; ex2 flushes what would be subnormal.
__global__ void pack_kernel(bf16 *packed) {
    int t = threadIdx.x;
    ((__nv_bfloat162 *)packed)[t] = __floats2bfloat162_rn((float)t, (float)(t + 64));
}
__global__ void ex2_kernel(float *power, const float *x) {
    power[threadIdx.x] = ex2(x[threadIdx.x]);
}

TEST(pack_bf16_and_ex2) {
    begin(8, 99);
    std::vector<float> x(256);
    for (int i = 0; i < 256; i++) x[i] = (float)(i - 128);
    x[255] = -INFINITY;
    const std::vector<bf16> halves = run(512, pack_kernel, 256, 0);
    const std::vector<float> p = run(256, ex2_kernel, 256, 0, to_device(x));
    for (int i = 0; i < 256; i++) {
        CHECK(at(halves, 2 * i) == (float)i);
        if (i <= 192) CHECK(at(halves, 2 * i + 1) == (float)(i + 64));
        CHECK_MSG(p[i] == (x[i] < -126 ? 0.0f : ldexpf(1.0f, i - 128)), "2^%g = %g", x[i], p[i]);
    }
}

// ------------------------------------------------------------------------------------------------
// cp.async and named barriers

// Two groups in flight, every third chunk invalid: it must arrive as zeros. Each thread reads data
// that another thread copied (reverse order).
__global__ void cp_async_kernel(float *to, const float *from) {
    float4 *out = (float4 *)to;
    const float4 *in = (const float4 *)from;
    int t = threadIdx.x;
    uint32_t mirror = smem_u32(smem) + (63 - t) * 16;
    cp_async16(mirror, in + t, t % 3 != 0);
    cp_async_commit();
    cp_async16(mirror + 1024, in + 64 + t, true);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    out[t] = ((float4 *)smem)[t];
    cp_async_wait<0>();
    __syncthreads();
    out[64 + t] = ((float4 *)smem)[64 + t];
}

TEST(cp_async) {
    begin(8, 99);
    std::vector<float> in(512);
    for (int i = 0; i < 512; i++) in[i] = (float)(i + 1);
    const std::vector<float> r = run(512, cp_async_kernel, 64, 2048, to_device(in));
    for (int i = 0; i < 512; i++) {
        int half = i / 256, from = 63 - i / 4 % 64;
        bool zero = half == 0 && from % 3 == 0;
        CHECK(r[i] == (zero ? 0.0f : in[half * 256 + from * 4 + i % 4]));
    }
}

// Warps 0 and 1 produce and only arrive, warps 2 and 3 consume and wait; then pairs of warps swap
// values at separate barriers.
__global__ void named_barrier_kernel(int *out) {
    __shared__ int box[128];
    int t = threadIdx.x, pair = t / 64;
    if (t < 64) {
        box[t] = 100 + t;
        named_bar_arrive(1, 128);
    } else {
        named_bar_sync(1, 128);
        out[t] = box[t - 64];
    }
    __syncthreads();
    box[t] = 200 + t;
    named_bar_sync(2 + pair, 64);
    out[128 + t] = box[t ^ 32];
}

TEST(named_barriers) {
    begin(8, 99);
    const std::vector<int> r = run(256, named_barrier_kernel, 128, 0);
    for (int t = 0; t < 128; t++) {
        CHECK(r[t] == (t < 64 ? 0 : 100 + t - 64));
        CHECK(r[128 + t] == 200 + (t ^ 32));
    }
}

// ------------------------------------------------------------------------------------------------
// sm_90: mbarrier, TMA

// A ring of two stages and six items: warp 0 writes, warp 1 adds up. Every stage is used three
// times, so a wrong parity or arrival count either hangs or adds an old value.
__global__ void mbarrier_kernel(int *out) {
#if SM90A
    __shared__ __align__(8) uint64_t full[2], empty[2];
    __shared__ int stage[2][32];
    int t = threadIdx.x & 31, sum = 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            mbar_init(smem_u32(&full[s]), 32);
            mbar_init(smem_u32(&empty[s]), 32);
        }
        fence_mbar_init();
    }
    __syncthreads();
    for (int i = 0; i < 6; i++) {
        uint32_t f = smem_u32(&full[i % 2]), e = smem_u32(&empty[i % 2]), phase = i / 2 & 1;
        if (threadIdx.x < 32) {
            mbar_wait(e, phase ^ 1);
            stage[i % 2][t] = (i + 1) * (t + 1);
            mbar_arrive(f);
        } else {
            while (!mbar_try_wait(f, phase)) {
            }
            sum = sum * 3 + stage[i % 2][31 - t];
            mbar_arrive(e);
        }
    }
    out[threadIdx.x] = sum;
#endif
}

TEST(mbarriers) {
    begin_wgmma();
    const std::vector<int> r = run(64, mbarrier_kernel, 64, 0);
    for (int t = 0; t < 32; t++) {
        int sum = 0;
        for (int i = 0; i < 6; i++) sum = sum * 3 + (i + 1) * (32 - t);
        CHECK(r[t] == 0);
        CHECK(r[32 + t] == sum);
    }
}

// Loads one box, shows the bytes as they lie in shared memory, stores the box back elsewhere.
__global__ void tma_kernel(bf16 *out, const __grid_constant__ CUtensorMap from,
                           const __grid_constant__ CUtensorMap to, int c0, int c1, int c2,
                           int bytes) {
#if SM90A
    __shared__ __align__(8) uint64_t bar;
    uint32_t b = smem_u32(&bar), s = opaque(smem_u32(smem));
    if (threadIdx.x == 0) {
        mbar_init(b, 1);
        fence_mbar_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbar_arrive_expect_tx(b, bytes);
        tma_load_3d(s, &from, b, c0, c1, c2);
    }
    mbar_wait(b, 0);
    for (int i = threadIdx.x; i < bytes / 2; i += 32) out[i] = ((bf16 *)smem)[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store_3d(&to, s, c0, c1, c2);
        bulk_commit();
        bulk_wait<0>();
    }
#endif
}

// Rows from `first` of the document of `len` rows at row `start`: zeros past its end, although the
// next document is NaN; the store does not touch that one.
static void ragged_case(int start, int len, int first) {
    enum { COLUMNS = 128, ROWS = 50, BOX = 32 };
    begin(9, 99);
    std::vector<bf16> in(COLUMNS * ROWS, __float2bfloat16(NAN));
    std::vector<bf16> blank(COLUMNS * ROWS, __float2bfloat16(-1.0f));
    for (int i = start * COLUMNS; i < (start + len) * COLUMNS; i++)
        in[i] = __float2bfloat16((float)(i % 251));
    bf16 *from = to_device(in), *to = to_device(blank);
    const std::vector<bf16> tile =
        run(BOX * 64, tma_kernel, 32, BOX * 128, ragged_map(from, COLUMNS, ROWS, BOX),
            ragged_map(to, COLUMNS, ROWS, BOX), 64, ROWS - len + first, start + len, BOX * 128);
    std::vector<bf16> copy = to_host(to, COLUMNS * ROWS), want = blank;
    for (int i = 0; i < BOX * 64; i++) {
        int row = first + i / 64, index = (start + row) * COLUMNS + 64 + i % 64;
        uint32_t byte = (uint32_t)i * 2, swizzled = byte ^ (byte >> 7 & 7) << 4;
        CHECK_MSG(at(tile, swizzled / 2) == (row < len ? at(in, index) : 0.0f), "row %d", row);
        if (row < len) want[index] = in[index];
    }
    for (int i = 0; i < COLUMNS * ROWS; i++)
        CHECK_MSG(at(copy, i) == at(want, i), "stored element %d", i);
}
TEST(tma_of_ragged_documents) {
    ragged_case(3, 40, 2);    // inside
    ragged_case(5, 40, 30);   // its tail
    ragged_case(20, 30, 10);  // to the last row
}

// ------------------------------------------------------------------------------------------------
// sm_90a

// One warpgroup releases registers, two acquire them; 384 threads start with 168 each.
__global__ void __launch_bounds__(384, 1) setmaxnreg_kernel(int *out) {
#if SM90A
    if (threadIdx.x < 128)
        setmaxnreg_dec<40>();
    else
        setmaxnreg_inc<232>();
    out[threadIdx.x] = threadIdx.x * 3;
#endif
}

TEST(setmaxnreg) {
    begin_wgmma();
    const std::vector<int> r = run(384, setmaxnreg_kernel, 384, 0);
    for (int t = 0; t < 384; t++) CHECK(r[t] == t * 3);
}

TEST_MAIN()
