// Conformance of the wrappers in kernels/cuda/ptx.cuh, which holds all inline PTX and which an
// emulated build replaces: each case checks every value against its own formula, on the emulator
// and on a GPU. Those of tensor cores and ldmatrix: test_layout.cu, test_tensor_cores.cu.
#include <cuda.h>
#include <math.h>

#include "cuda_test.h"
#include "../kernels/cuda/attention_sm90.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define HAS_TMA 1
#endif

constexpr unsigned ALL = 0xffffffffu;

// Compile-time constants of the code that this GPU runs
__global__ void has_kernel(int *tma_and_wgmma) {
#if HAS_TMA
    tma_and_wgmma[0] = 1;
#endif
#if SM90A
    tma_and_wgmma[1] = 1;
#endif
    tma_and_wgmma[2] = 1;
}
static void need_code(int which, const char *archs) {
    int *has = device_buffer<int>(3);
    has_kernel<<<1, 1>>>(has);
    const std::vector<int> host = to_host(has, 3);
    CHECK(host[2] == 1);
    if (!host[(size_t)which]) SKIP("built for other GPUs: make CUDA_ARCHS=%s", archs);
}
static void begin_tma() {
    begin(9, 99);
    need_code(0, "90a or later");
}
static void begin_wgmma() {
    begin(9, 9);
    need_code(1, "90a");
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
    int *out = device_buffer<int>(128);
    shuffle_kernel<<<1, 32>>>(out);
    std::vector<int> r = to_host(out, 128);
    for (int t = 0; t < 32; t++) {
        CHECK(r[t] == (t ^ 5));
        CHECK(r[32 + t] == ((t ^ 24) / 16 <= t / 16 ? (t ^ 24) : t));
        CHECK(r[64 + t] == t / 16 * 16 + 9);
        CHECK(r[96 + t] == 1);
    }
}

// A pair has its first argument in the low half; ex2 flushes what would be subnormal.
__global__ void arithmetic_kernel(__nv_bfloat162 *packed, float *power, const float *x) {
    int t = threadIdx.x;
    packed[t] = __floats2bfloat162_rn((float)t, (float)(t + 64));
    power[t] = ex2(x[t]);
}

TEST(pack_bf16_and_ex2) {
    begin(8, 99);
    std::vector<float> x(256);
    for (int i = 0; i < 256; i++) x[i] = (float)(i - 128);
    x[255] = -INFINITY;
    __nv_bfloat162 *packed = device_buffer<__nv_bfloat162>(256);
    float *power = device_buffer<float>(256);
    arithmetic_kernel<<<1, 256>>>(packed, power, to_device(x));
    std::vector<bf16> halves = to_host((bf16 *)packed, 512);
    std::vector<float> p = to_host(power, 256);
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
__global__ void cp_async_kernel(float4 *out, const float4 *in) {
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
    float *out = device_buffer<float>(512);
    cp_async_kernel<<<1, 64, 2048>>>((float4 *)out, (float4 *)to_device(in));
    std::vector<float> r = to_host(out, 512);
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
    int *out = device_buffer<int>(256);
    named_barrier_kernel<<<1, 128>>>(out);
    std::vector<int> r = to_host(out, 256);
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
#if HAS_TMA
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
    begin_tma();
    int *out = device_buffer<int>(64);
    mbarrier_kernel<<<1, 64>>>(out);
    std::vector<int> r = to_host(out, 64);
    for (int t = 0; t < 32; t++) {
        int sum = 0;
        for (int i = 0; i < 6; i++) sum = sum * 3 + (i + 1) * (32 - t);
        CHECK(r[t] == 0);
        CHECK(r[32 + t] == sum);
    }
}

// Loads one box, shows the bytes as they lie in shared memory, stores the box back elsewhere.
__global__ void tma_kernel(uint32_t *out, const __grid_constant__ CUtensorMap from,
                           const __grid_constant__ CUtensorMap to, int c0, int c1, int c2,
                           int bytes) {
#if HAS_TMA
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
    for (int i = threadIdx.x; i < bytes / 4; i += 32) out[i] = ((uint32_t *)smem)[i];
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
    uint32_t *out = device_buffer<uint32_t>(BOX * 32);
    tma_kernel<<<1, 32, BOX * 128>>>(out, ragged_map(from, COLUMNS, ROWS, BOX),
                                     ragged_map(to, COLUMNS, ROWS, BOX), 64, ROWS - len + first,
                                     start + len, BOX * 128);
    std::vector<bf16> tile = to_host((bf16 *)out, BOX * 64), copy = to_host(to, COLUMNS * ROWS);
    std::vector<bf16> want = blank;
    for (int i = 0; i < BOX * 64; i++) {
        int row = first + i / 64, index = (start + row) * COLUMNS + 64 + i % 64;
        uint32_t byte = (uint32_t)i * 2, swizzled = byte ^ (byte >> 7 & 7) << 4;
        CHECK_MSG(at(tile, swizzled / 2) == (row < len ? at(in, index) : 0.0f), "row %d", row);
        if (row < len) want[index] = in[index];
    }
    for (int i = 0; i < COLUMNS * ROWS; i++)
        CHECK_MSG(at(copy, i) == at(want, i), "stored element %d", i);
}
TEST(tma_ragged_inside) { ragged_case(3, 40, 2); }
TEST(tma_ragged_tail) { ragged_case(5, 40, 30); }
TEST(tma_ragged_to_the_last_row) { ragged_case(20, 30, 10); }

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
    int *out = device_buffer<int>(384);
    setmaxnreg_kernel<<<1, 384>>>(out);
    std::vector<int> r = to_host(out, 384);
    for (int t = 0; t < 384; t++) CHECK(r[t] == t * 3);
}

TEST_MAIN()
