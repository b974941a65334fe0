// Conformance of the wrappers in kernels/cuda/ptx.cuh, which holds all inline PTX and which an
// emulated build replaces. Inputs are small integers, so every result is exact: each case checks it
// against its own formula, then against dev/emu/conform.txt, a listing of the emulator's raw bits.
// On a GPU the same program therefore compares GPU and emulator bit for bit. CONFORM_HASHES=1
// prints the listing ("conform NAME HASH") instead of comparing with it.
#include <cuda.h>
#include <math.h>
#include <string>

#include "cuda_test.h"
#include "../kernels/cuda/ptx.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define HAS_TMA 1
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#endif

constexpr unsigned ALL = 0xffffffffu;

// ------------------------------------------------------------------------------------------------
// The listing

// Compile-time constants of the code that this GPU runs
__global__ void has_kernel(int *tma_and_wgmma) {
#if HAS_TMA
    tma_and_wgmma[0] = 1;
#endif
#if HAS_WGMMA
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

static std::vector<bf16> small_integers(size_t n) {
    std::vector<bf16> v(n);
    for (bf16 &x : v) x = __float2bfloat16((float)((int)test_rng_below(17) - 8));
    return v;
}
static float at(const std::vector<bf16> &v, size_t i) { return __bfloat162float(v[i]); }

// The hash of a name in the listing, or "" if there is none.
static std::string listed(const char *name) {
    char line[256], key[128], value[64];
    std::string found;
    FILE *f = fopen("dev/emu/conform.txt", "r");
    CHECK_MSG(f != NULL, "dev/emu/conform.txt: run this program from the repository root");
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "conform %127s %63s", key, value) == 2 && strcmp(key, name) == 0)
            found = value;
    fclose(f);
    return found;
}

template <class T>
static void conform(const char *name, const std::vector<T> &result) {
    u64 h = 1469598103934665603ull;
    const unsigned char *p = (const unsigned char *)result.data();
    for (size_t i = 0; i < result.size() * sizeof(T); i++) h = (h ^ p[i]) * 1099511628211ull;
    char hash[32];
    snprintf(hash, sizeof hash, "%016llx", h);
    if (getenv("CONFORM_HASHES")) {
        printf("conform %s %s\n", name, hash);
        return;
    }
    if (test_seed != 1) return;  // the listing is of the inputs of seed 1
    std::string want = listed(name);
    CHECK_MSG(want == hash, "%s: listed %s, found %s", name, want.c_str(), hash);
}

// ------------------------------------------------------------------------------------------------
// Warp primitives and arithmetic

__global__ void shuffle_kernel(int *out) {
    int t = threadIdx.x;
    out[t] = __shfl_xor_sync(ALL, t, 5);
    out[32 + t] = __shfl_down_sync(ALL, t, 3);
    out[64 + t] = __shfl_up_sync(ALL, t, 2, 8);
    out[96 + t] = __shfl_sync(ALL, t, 9, 16);
    out[128 + t] = (int)__ballot_sync(ALL, t % 3 == 0);
    out[160 + t] = __shfl_xor_sync(ALL, t, 24, 16);
    out[192 + t] = __any_sync(ALL, t == 7) + 2 * __all_sync(ALL, t < 31);
}

TEST(shuffles_and_votes) {
    begin(8, 99);
    int *out = device_buffer<int>(224);
    shuffle_kernel<<<1, 32>>>(out);
    std::vector<int> r = to_host(out, 224);
    for (int t = 0; t < 32; t++) {
        int segment_end = (t / 16 + 1) * 16;
        CHECK(r[t] == (t ^ 5));
        CHECK(r[32 + t] == (t < 29 ? t + 3 : t));
        CHECK(r[64 + t] == (t % 8 >= 2 ? t - 2 : t));
        CHECK(r[96 + t] == t / 16 * 16 + 9);
        CHECK(r[128 + t] == (int)0x49249249u);
        CHECK(r[160 + t] == ((t ^ 24) < segment_end ? (t ^ 24) : t));
        CHECK(r[192 + t] == 1);
    }
    conform("shuffles_and_votes", r);
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
    conform("pack_bf16", halves);
    conform("ex2", p);
}

__global__ void ldmatrix_kernel(uint32_t *out, const bf16 *in) {
    extern __shared__ __align__(1024) unsigned char smem[];
    int t = threadIdx.x;
    for (int i = t; i < 512; i += 32) ((bf16 *)smem)[i] = in[i];
    __syncthreads();
    uint32_t r[4], row = smem_u32(smem) + (t & 15) * 32 + (t >> 4) * 16;
    ldmatrix_x4(r, row);
    for (int i = 0; i < 4; i++) out[t * 4 + i] = r[i];
    ldmatrix_x4_trans(r, row);
    for (int i = 0; i < 4; i++) out[128 + t * 4 + i] = r[i];
}

TEST(ldmatrix) {
    begin(8, 99);
    std::vector<bf16> in(512);
    for (int i = 0; i < 512; i++) in[i] = __float2bfloat16((float)(i % 256));
    uint32_t *out = device_buffer<uint32_t>(256);
    ldmatrix_kernel<<<1, 32, 1024>>>(out, to_device(in));
    std::vector<bf16> r = to_host((bf16 *)out, 512);
    for (int i = 0; i < 256; i++) {  // element e of matrix m in thread t
        int t = i / 8, m = i / 2 % 4, e = i % 2;
        int R = (m & 1) * 8, C = (m >> 1) * 8, row = t / 4, col = t % 4 * 2 + e;
        CHECK(at(r, i) == at(in, (R + row) * 16 + C + col));
        CHECK(at(r, 256 + i) == at(in, (R + col) * 16 + C + row));
    }
    conform("ldmatrix", r);
}

__global__ void mma_kernel(float *out, const uint32_t *ab) {
    int t = threadIdx.x;
    uint32_t a[4];
    float d[4] = {1.0f * t, 2, 3, 4};
    for (int i = 0; i < 4; i++) a[i] = ab[t * 4 + i];
    mma_16816(d, a, ab[128 + t], ab[160 + t]);
    for (int i = 0; i < 4; i++) out[t * 4 + i] = d[i];
}

TEST(mma_m16n8k16) {
    begin(8, 99);
    std::vector<bf16> ab = small_integers(384);
    float *out = device_buffer<float>(128);
    mma_kernel<<<1, 32>>>(out, (uint32_t *)to_device(ab));
    std::vector<float> r = to_host(out, 128);
    float A[16][16], B[16][8];
    for (int t = 0; t < 32; t++)
        for (int e = 0; e < 2; e++) {
            for (int i = 0; i < 4; i++)
                A[t / 4 + (i & 1) * 8][t % 4 * 2 + e + (i >> 1) * 8] = at(ab, (t * 4 + i) * 2 + e);
            for (int i = 0; i < 2; i++)
                B[t % 4 * 2 + e + i * 8][t / 4] = at(ab, (128 + 32 * i + t) * 2 + e);
        }
    for (int i = 0; i < 128; i++) {
        int t = i / 4, q = i % 4, row = t / 4 + (q >> 1) * 8, col = t % 4 * 2 + (q & 1);
        float want = q == 0 ? t : q + 1;
        for (int k = 0; k < 16; k++) want += A[row][k] * B[k][col];
        CHECK_MSG(r[i] == want, "thread %d, register %d: %g, not %g", t, q, r[i], want);
    }
    conform("mma_m16n8k16", r);
}

// ------------------------------------------------------------------------------------------------
// cp.async and named barriers

// Two groups in flight, every third chunk invalid: it must arrive as zeros. Each thread reads data
// that another thread copied (reverse order).
__global__ void cp_async_kernel(float4 *out, const float4 *in) {
    extern __shared__ __align__(1024) unsigned char smem[];
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
    conform("cp_async", r);
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
    conform("named_barriers", r);
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
    conform("mbarriers", r);
}

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A packed bf16 tensor of three dimensions, the inner one first.
struct Tiles {
    int dim[3], box[3];
    CUtensorMapSwizzle swizzle;
};
static CUtensorMap tensor_map(void *p, const Tiles &t) {
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    CUDA_OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                             cudaEnableDefault, &found));
#else  // gone in 13.0
    CUDA_OK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found));
#endif
    CUtensorMap map;
    cuuint64_t dims[3], strides[2], bytes = sizeof(bf16);
    cuuint32_t box[3], element_strides[3] = {1, 1, 1};
    for (int i = 0; i < 3; i++) {
        dims[i] = t.dim[i];
        box[i] = t.box[i];
        bytes *= t.dim[i];
        if (i < 2) strides[i] = bytes;
    }
    CUresult status =
        ((EncodeTiled)entry)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, p, dims, strides, box,
                             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK_MSG(status == CUDA_SUCCESS, "tensor map refused: %d", (int)status);
    return map;
}

// Loads one box, shows the bytes as they lie in shared memory, stores the box back elsewhere.
__global__ void tma_kernel(uint32_t *out, const __grid_constant__ CUtensorMap from,
                           const __grid_constant__ CUtensorMap to, int c0, int c1, int c2,
                           int bytes) {
#if HAS_TMA
    extern __shared__ __align__(1024) unsigned char smem[];
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

// A dimension more than the tensor has, both of the last two a row apart, so that a box ends where
// a document ends: attention_sm90.cu's maps. The origin lies before the tensor.
static CUtensorMap ragged_map(bf16 *p, int columns, int rows, int box_rows) {
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    CUDA_OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                             cudaEnableDefault, &found));
    CUtensorMap map;
    const cuuint64_t row = (cuuint64_t)columns * sizeof(bf16), strides[2] = {row, row};
    const cuuint64_t dims[3] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)rows + 1};
    const cuuint32_t box[3] = {64, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    CUresult status = ((EncodeTiled)entry)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, p - (int64_t)rows * columns, dims, strides, box,
        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK_MSG(status == CUDA_SUCCESS, "tensor map refused: %d", (int)status);
    return map;
}

// Rows from `first` of the document of `len` rows at row `start`: zeros past its end, although the
// next document is NaN; the store does not touch that one.
static void ragged_case(const char *name, int start, int len, int first) {
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
    tile.insert(tile.end(), copy.begin(), copy.end());
    conform(name, tile);
}
TEST(tma_ragged_inside) { ragged_case("tma_ragged_inside", 3, 40, 2); }
TEST(tma_ragged_tail) { ragged_case("tma_ragged_tail", 5, 40, 30); }
TEST(tma_ragged_to_the_last_row) { ragged_case("tma_ragged_to_the_last_row", 20, 30, 10); }

// row_bits: how many of the address bits 7.. are folded onto bits 4.. by the swizzle
static void tma_case(const char *name, const Tiles &t, int c0, int c1, int c2, uint32_t row_bits) {
    begin_tma();
    int depth = t.dim[2], box = t.box[0] * t.box[1] * t.box[2];
    int n = t.dim[0] * t.dim[1] * depth;
    std::vector<bf16> in(n), blank(n, __float2bfloat16(-1.0f));
    for (int i = 0; i < n; i++) in[i] = __float2bfloat16((float)(i % 251));
    bf16 *from = to_device(in), *to = to_device(blank);
    uint32_t *out = device_buffer<uint32_t>(box / 2);
    tma_kernel<<<1, 32, box * 2>>>(out, tensor_map(from, t), tensor_map(to, t), c0, c1, c2,
                                   box * 2);
    std::vector<bf16> tile = to_host((bf16 *)out, box), copy = to_host(to, n), want = blank;
    for (int i = 0; i < box; i++) {
        int x = c0 + i % t.box[0], y = c1 + i / t.box[0] % t.box[1],
            z = c2 + i / (t.box[0] * t.box[1]);
        bool inside = x >= 0 && x < t.dim[0] && y >= 0 && y < t.dim[1] && z >= 0 && z < depth;
        int from_index = (z * t.dim[1] + y) * t.dim[0] + x;
        uint32_t byte = (uint32_t)i * 2, swizzled = byte ^ (byte >> 7 & row_bits) << 4;
        CHECK_MSG(at(tile, swizzled / 2) == (inside ? at(in, from_index) : 0.0f),
                  "box element %d (%d, %d, %d)", i, x, y, z);
        if (inside) want[from_index] = in[from_index];
    }
    for (int i = 0; i < n; i++) CHECK_MSG(at(copy, i) == at(want, i), "stored element %d", i);
    tile.insert(tile.end(), copy.begin(), copy.end());
    conform(name, tile);
}

static Tiles plane(int box0, int box1, CUtensorMapSwizzle swizzle) {
    return Tiles{{200, 100, 1}, {box0, box1, 1}, swizzle};
}
static const Tiles heads = {{64, 9, 40}, {64, 1, 32}, CU_TENSOR_MAP_SWIZZLE_128B};

#define TMA_CASE(name_, tiles_, c0_, c1_, c2_, row_bits_) \
    TEST(name_) { tma_case(#name_, tiles_, c0_, c1_, c2_, row_bits_); }
TMA_CASE(tma_128b, plane(64, 32, CU_TENSOR_MAP_SWIZZLE_128B), 64, 32, 0, 7)
TMA_CASE(tma_128b_over_right_bottom, plane(64, 32, CU_TENSOR_MAP_SWIZZLE_128B), 168, 80, 0, 7)
TMA_CASE(tma_128b_negative, plane(64, 32, CU_TENSOR_MAP_SWIZZLE_128B), -8, -3, 0, 7)
TMA_CASE(tma_64b, plane(32, 16, CU_TENSOR_MAP_SWIZZLE_64B), 32, 5, 0, 3)
TMA_CASE(tma_32b, plane(16, 16, CU_TENSOR_MAP_SWIZZLE_32B), 16, 5, 0, 1)
TMA_CASE(tma_no_swizzle, plane(72, 8, CU_TENSOR_MAP_SWIZZLE_NONE), 8, 5, 0, 0)
TMA_CASE(tma_3d_head_slice_tail, heads, 0, 4, 20, 7)

// ------------------------------------------------------------------------------------------------
// sm_90a: wgmma

// One warpgroup releases registers, two acquire them; 384 threads start with 168 each.
__global__ void __launch_bounds__(384, 1) setmaxnreg_kernel(int *out) {
#if HAS_WGMMA
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
    conform("setmaxnreg", r);
}

// D (64, N) = 1 + A B from 128-byte-swizzled tiles. TA, TB: the operand is MN-major, A (64 k, 64
// m) and B (64 k, N); otherwise K-major, A (64 m, 64 k) and B (N, 64 k). RS: A from registers.
template <int TA, int TB, int RS, int N>
__global__ void wgmma_kernel(float *out, const __grid_constant__ CUtensorMap map_a,
                             const __grid_constant__ CUtensorMap map_b) {
#if HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ __align__(8) uint64_t bar;
    uint32_t b = smem_u32(&bar), sa = smem_u32(smem), sb = sa + 8192;
    int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    if (t == 0) {
        mbar_init(b, 1);
        fence_mbar_init();
    }
    __syncthreads();
    if (t == 0) {
        mbar_arrive_expect_tx(b, 8192 + N * 128);
        tma_load_3d(sa, &map_a, b, 0, 0, 0);
        if (!TB) tma_load_3d(sb, &map_b, b, 0, 0, 0);
        for (int p = 0; TB && p < N / 64; p++) tma_load_3d(sb + p * 8192, &map_b, b, p * 64, 0, 0);
    }
    mbar_wait(b, 0);
    float d[N / 2];
    uint32_t fragment[4][4];
    for (int i = 0; i < N / 2; i++) d[i] = 1;
    for (int k = 0; RS && k < 4; k++) {
        int row = warp * 16 + (lane & 15), chunk = k * 2 + (lane >> 4);
        ldmatrix_x4(fragment[k], sa + row * 128 + ((chunk ^ (row & 7)) << 4));
    }
    wgmma_pin(d);
    wgmma_fence();
    for (int k = 0; k < 4; k++) {
        uint64_t db = TB ? wgmma_desc_sw128(sb + k * 2048, 8192, 1024)
                         : wgmma_desc_sw128(sb + k * 32, 16, 1024);
        uint64_t da = TA ? wgmma_desc_sw128(sa + k * 2048, 8192, 1024)
                         : wgmma_desc_sw128(sa + k * 32, 16, 1024);
        if constexpr (RS)
            wgmma_rs<TB>(d, fragment[k], db, 1);
        else
            wgmma_ss<TA, TB>(d, da, db, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(d);
    for (int i = 0; i < N / 2; i++) {
        int row = warp * 16 + (lane >> 2) + (i >> 1 & 1) * 8;
        out[row * N + i / 4 * 8 + (lane & 3) * 2 + (i & 1)] = d[i];
    }
#endif
}

template <int TA, int TB, int RS, int N>
static void wgmma_case(const char *name) {
    begin_wgmma();
    std::vector<bf16> a = small_integers(64 * 64), b = small_integers(N * 64);
    float *out = device_buffer<float>(64 * N);
    CUtensorMap map_a =
        tensor_map(to_device(a), Tiles{{64, 64, 1}, {64, 64, 1}, CU_TENSOR_MAP_SWIZZLE_128B});
    CUtensorMap map_b = tensor_map(
        to_device(b),
        Tiles{{TB ? N : 64, TB ? 64 : N, 1}, {64, TB ? 64 : N, 1}, CU_TENSOR_MAP_SWIZZLE_128B});
    wgmma_kernel<TA, TB, RS, N><<<1, 128, 8192 + N * 128>>>(out, map_a, map_b);
    std::vector<float> r = to_host(out, 64 * N);
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < N; j++) {
            float want = 1;
            for (int k = 0; k < 64; k++)
                want += at(a, TA ? k * 64 + i : i * 64 + k) * at(b, TB ? k * N + j : j * 64 + k);
            CHECK_MSG(r[i * N + j] == want, "(%d, %d): %g, not %g", i, j, r[i * N + j], want);
        }
    conform(name, r);
}

#define WGMMA_CASE(name_, ...) \
    TEST(name_) { wgmma_case<__VA_ARGS__>(#name_); }
WGMMA_CASE(wgmma_n64, 0, 0, 0, 64)
WGMMA_CASE(wgmma_n64_tb, 0, 1, 0, 64)
WGMMA_CASE(wgmma_n64_ta, 1, 0, 0, 64)
WGMMA_CASE(wgmma_n64_ta_tb, 1, 1, 0, 64)
WGMMA_CASE(wgmma_n64_registers, 0, 0, 1, 64)
WGMMA_CASE(wgmma_n64_registers_tb, 0, 1, 1, 64)
WGMMA_CASE(wgmma_n128, 0, 0, 0, 128)
WGMMA_CASE(wgmma_n128_tb, 0, 1, 0, 128)
WGMMA_CASE(wgmma_n128_ta, 1, 0, 0, 128)
WGMMA_CASE(wgmma_n128_ta_tb, 1, 1, 0, 128)
WGMMA_CASE(wgmma_n128_registers, 0, 0, 1, 128)
WGMMA_CASE(wgmma_n128_registers_tb, 0, 1, 1, 128)

TEST_MAIN()
