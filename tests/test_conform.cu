// The wrappers in kernels/cuda/ptx.cuh, which holds all inline PTX and which an emulated build
// replaces, on the emulator and on a GPU: copies and their barriers against formulas, and the maps
// of ldmatrix, mma.sync and wgmma, also of what attention_sm90.cuh builds on them, against
// layout.txt of dev/results/witnesses, which NVIDIA's CuTe headers have printed. The kernels of
// attention in test_ops.c test the other wrappers, test_tensor_cores.cu the sums of tensor cores.
#include <cuda.h>
#include <math.h>
#include <algorithm>
#include <string>

#include "cuda_test.h"
#include "../kernels/cuda/attention_sm90.cuh"

// Returns the n elements that a block has written to its first argument; they are 0 before.
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

// ---- sm_90: mbarrier, TMA -----------------------------------------------------------------------

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
        tma_prefetch(from);
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
    begin_wgmma();
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

static std::vector<std::string> words_of(const char *kind, const char *name) {
    std::vector<std::string> words;
    char line[1024];
    const char *path = "dev/results/witnesses/layout.txt";
    FILE *f = fopen(path, "r");
    CHECK_MSG(f != NULL, "%s: run this program from the repository root", path);
    const std::string wanted = std::string(kind) + " " + name + " ";
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, wanted.c_str(), wanted.size()) != 0) continue;
        for (char *w = strtok(line + wanted.size(), " \n"); w; w = strtok(NULL, " \n"))
            words.push_back(w);
    }
    fclose(f);
    CHECK_MSG(!words.empty(), "dev/results/witnesses/layout.txt has no %s", wanted.c_str());
    return words;
}

struct Map {  // linear over bits: the image of each bit
    std::vector<int> images;
    explicit Map(const char *name) {
        for (const std::string &w : words_of("map", name)) images.push_back(atoi(w.c_str()));
    }
    int operator()(int i) const {
        int sum = 0;
        for (size_t bit = 0; bit < images.size(); bit++)
            if (i >> bit & 1) sum ^= images[bit];
        return sum;
    }
};

// ---- Matrices of small integers, column-major: element (i, j) at i + rows * j -------------------

struct Matrix {
    int rows, columns;
    std::vector<int> x;
    Matrix(int rows_, int columns_) : rows(rows_), columns(columns_), x((size_t)rows * columns) {
        for (int &v : x) v = (int)test_rng_below(17) - 8;
    }
    int at(int i, int j) const { return x[(size_t)(i + rows * j)]; }
};
// a times the transpose of b
static int product(const Matrix &a, const Matrix &b, int i, int j) {
    int sum = 0;
    for (int k = 0; k < a.columns; k++) sum += a.at(i, k) * b.at(j, k);
    return sum;
}

// Registers of all threads, thread by thread: value v is the element map(thread + threads * v).
static std::vector<bf16> fragments(const Map &map, const Matrix &m, int threads, int values) {
    std::vector<bf16> r((size_t)threads * values);
    for (int i = 0; i < threads * values; i++)
        r[(size_t)(i % threads * values + i / threads)] =
            __float2bfloat16((float)m.x[(size_t)map(i)]);
    return r;
}
// Accumulators of all threads hold a product.
static void check_product(const std::vector<float> &d, const Map &map, int threads, const Matrix &a,
                          const Matrix &b) {
    const int values = (int)d.size() / threads;
    for (int i = 0; i < (int)d.size(); i++) {
        const int element = map(i), row = element % a.rows, column = element / a.rows;
        const float found = d[(size_t)(i % threads * values + i / threads)];
        CHECK_MSG(found == product(a, b, row, column),
                  "thread %d, value %d: (%d, %d) is %g, not %d", i % threads, i / threads, row,
                  column, found, product(a, b, row, column));
    }
}

__global__ void mma_kernel(float *d, const uint32_t *a, const uint32_t *b) {
    const int t = threadIdx.x;
    float x[4] = {0, 0, 0, 0};
    const uint32_t left[4] = {a[t * 4], a[t * 4 + 1], a[t * 4 + 2], a[t * 4 + 3]};
    mma_16816(x, left, b[t * 2], b[t * 2 + 1]);
    for (int i = 0; i < 4; i++) d[t * 4 + i] = x[i];
}

TEST(mma_m16n8k16) {
    begin(8, 99);
    const Matrix a(16, 16), b(8, 16);
    const uint32_t *left = (uint32_t *)to_device(fragments(Map("mma_a"), a, 32, 8)),
                   *right = (uint32_t *)to_device(fragments(Map("mma_b"), b, 32, 4));
    check_product(run(128, mma_kernel, 32, 0, left, right), Map("mma_c"), 32, a, b);
}

// Lane l points at elements 8 l to 8 l + 7.
__global__ void ldmatrix_kernel(uint32_t *out) {
    __shared__ __align__(16) uint16_t rows[256];
    const int t = threadIdx.x;
    for (int i = t; i < 256; i += 32) rows[i] = (uint16_t)i;
    __syncthreads();
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(rows) + t * 16);
    for (int i = 0; i < 4; i++) out[t * 4 + i] = r[i];
    ldmatrix_x4_trans(r, smem_u32(rows) + t * 16);
    for (int i = 0; i < 4; i++) out[128 + t * 4 + i] = r[i];
}

TEST(ldmatrix) {
    begin(8, 99);
    const std::vector<uint32_t> words = run(256, ldmatrix_kernel, 32, 0);
    const uint16_t *r = (const uint16_t *)words.data();
    const Map straight("ldmatrix"), transposed("ldmatrix_trans");
    for (int i = 0; i < 256; i++) {
        const size_t at = (size_t)(i % 32 * 8 + i / 32);
        CHECK(r[at] == straight(i));
        CHECK(r[256 + at] == transposed(i));
    }
}

// ---- Tensor cores of sm_90a ---------------------------------------------------------------------

static Map accumulators(int n) { return Map(n == 64 ? "wgmma_c64" : "wgmma_c128"); }

// A tile on the device, as CuTe lays it into shared memory
static const uint32_t *shared_image(const char *name, const Matrix &m) {
    std::vector<bf16> image(m.x.size());
    const Map byte_of(name);
    for (size_t i = 0; i < m.x.size(); i++)
        image[(size_t)byte_of((int)i) / 2] = __float2bfloat16((float)m.x[i]);
    return (uint32_t *)to_device(image);
}

#if SM90A
__device__ __forceinline__ void to_shared(int at, const uint32_t *image, int bytes) {
    for (int i = threadIdx.x; i < bytes / 4; i += WARPGROUP)
        reinterpret_cast<uint32_t *>(smem + at)[i] = image[i];
    fence_proxy_async();
    __syncthreads();
}
template <int N>
__device__ __forceinline__ void finish(float *out, float (&d)[N]) {
    wgmma_wait<0>();
    wgmma_pin(d);
    for (int i = 0; i < N; i++) out[threadIdx.x * N + i] = d[i];
}
#endif

// With CuTe's descriptors
template <int TA, int TB, int N, int DEPTH>
__global__ void descriptor_kernel(float *out, const uint32_t *a, const uint32_t *b,
                                  const uint64_t *words) {
#if SM90A
    constexpr int A_BYTES = 64 * DEPTH * 2, STEPS = DEPTH / 16;
    to_shared(0, a, A_BYTES);
    to_shared(A_BYTES, b, N * DEPTH * 2);
    const uint64_t at = shared_begin() >> 4;
    uint64_t left[STEPS], right[STEPS];
    for (int i = 0; i < STEPS; i++)
        left[i] = words[i] + at, right[i] = words[STEPS + i] + at + (A_BYTES >> 4);
    float d[N / 2];
    clear(d);
    wgmma_pin(d);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; i++) wgmma_ss<TA, TB>(d, left[i], right[i], 1);
    wgmma_commit();
    finish(out, d);
#endif
}

template <int TA, int TB, int N, int DEPTH>
static void descriptor_case(const char *a_name, const char *b_name) {
    begin_wgmma();
    const Matrix a(64, DEPTH), b(N, DEPTH);
    std::vector<uint64_t> words;
    for (const char *name : {a_name, b_name})
        for (const std::string &w : words_of("descriptors", name))
            words.push_back(strtoull(w.c_str(), NULL, 16));
    CHECK(words.size() == DEPTH / 8);
    check_product(run(64 * N, descriptor_kernel<TA, TB, N, DEPTH>, WARPGROUP, (64 + N) * DEPTH * 2,
                      shared_image(a_name, a), shared_image(b_name, b), to_device(words)),
                  accumulators(N), WARPGROUP, a, b);
}
TEST(descriptors) {
    descriptor_case<0, 0, 64, 64>("a_64x64", "b_64x64");
    descriptor_case<0, 0, 64, 128>("a_64x128", "b_64x128");
    descriptor_case<0, 0, 128, 64>("a_64x64", "b_128x64");
    descriptor_case<0, 0, 128, 128>("a_64x128", "b_128x128");
    descriptor_case<1, 1, 64, 64>("a_mn_64x64", "b_mn_64x64");
    descriptor_case<0, 1, 64, 64>("a_64x64", "b_mn_64x64");  // two immediates
    descriptor_case<0, 1, 128, 64>("a_64x64", "b_mn_128x64");
    descriptor_case<1, 1, 128, 64>("a_mn_64x64", "b_mn_128x64");
}

// A product of the kernels, whose left operand is accumulators, as P and dS are
template <int D, int N>
__global__ void add_kernel(float *out, const float *accumulators, const uint32_t *b) {
#if SM90A
    to_shared(0, b, N * D * 2);
    float x[N / 2], c[D / 2];
    uint32_t a[N / 16][4];
    for (int i = 0; i < N / 2; i++) x[i] = accumulators[threadIdx.x * (N / 2) + i];
    to_operand(a, x);
    clear(c);
    wgmma_pin(c);
    wgmma_fence();
    multiply_add<N, N>(c, a, shared_begin());
    finish(out, c);
#endif
}
template <int D, int N>
static void add_case(const char *b_name) {
    begin_wgmma();
    const Matrix a(64, N), b(D, N);
    const Map map = accumulators(N);
    std::vector<float> x(64 * N);
    for (int i = 0; i < 64 * N; i++)
        x[(size_t)(i % WARPGROUP * N / 2 + i / WARPGROUP)] = (float)a.x[(size_t)map(i)];
    check_product(
        run(64 * D, add_kernel<D, N>, WARPGROUP, N * D * 2, to_device(x), shared_image(b_name, b)),
        accumulators(D), WARPGROUP, a, b);
}
TEST(multiply_add) {
    add_case<64, 64>("b_mn_64x64");
    add_case<128, 64>("b_mn_128x64");
    add_case<64, 128>("b_mn_64x128");
}

// ---- The list of backward's items, on the 132 SMs of an H100 ------------------------------------

// When the last SM ends that takes the next of `costs` as soon as it is free, in their mean's units
static double makespan(const std::vector<int> &costs) {
    std::vector<int64_t> sms(132);
    int64_t sum = 0;
    for (int cost : costs) *std::min_element(sms.begin(), sms.end()) += cost, sum += cost;
    return (double)*std::max_element(sms.begin(), sms.end()) * (double)sms.size() / (double)sum;
}

// docs that share a prefix, each with `own` more tokens. Prints, and checks, how long dK and dV
// take with tiles as they are and in pieces, where 1 keeps all SMs busy to the end.
static void check_balance(int prefix, int docs, int own, int kv_heads) {
    const HeadShape heads = {3 * kv_heads, kv_heads, 64};
    std::vector<int32_t> ends = {0}, first((size_t)docs), shared((size_t)docs, prefix);
    for (int doc = 0; doc < docs; doc++) ends.push_back(prefix + (doc + 1) * own);
    shared[0] = 0;
    std::vector<int32_t> work(attention_work_list_size(ends.back(), docs));
    const size_t used =
        attention_work_list(work.data(), ends.data(), first.data(), shared.data(), docs, heads);
    CHECK(used <= work.size());
    const auto *items = (const KeyItem *)((const WorkItem *)&work[NUM_WORK_LISTS] + work[0]);
    std::vector<int> tiles, pieces;
    int slots = 0;
    for (int i = 0; i < work[BACKWARD_ITEMS]; i++)
        for (int head = 0; head < kv_heads; head++) {
            const KeyItem &item = items[i];
            pieces.push_back(ceil_div(item.len - item.from, (int)UNIT_ROWS));
            slots = std::max(slots, (item.slot + item.pieces - 1) * kv_heads);
            if (item.piece > 0) continue;
            const int keys = item.tile * BACKWARD_KEYS,
                      end = item.pieces > 1 ? ends.back() : item.start + item.len;
            tiles.push_back(ceil_div(end - item.start - keys, (int)UNIT_ROWS));
        }
    std::sort(tiles.rbegin(), tiles.rend());
    CHECK(slots <= MAX_PIECES && std::is_sorted(pieces.rbegin(), pieces.rend()));
    const double before = makespan(tiles), after = makespan(pieces);
    printf("    prefix %4d, %2d documents of %4d, %d kv heads: %.2f in tiles, %.2f in pieces\n",
           prefix, docs, own, kv_heads, before, after);
    CHECK(after <= before);
    if (pieces.size() >= 4 * 132) CHECK(after < 1.25);
}
TEST(shared_prefixes_keep_sms_busy) {
    begin_wgmma();
    CHECK(attention_select("sm90") == 0);
    for (int kv_heads : {3, 8})
        for (int docs : {1, 4, 8, 27, 64}) check_balance(2048, docs, 300, kv_heads);
    check_balance(1024, 8, 512, 3);
}

TEST_MAIN()
