// Runs one of three small kernels, right or with one planted bug, and compares the result with
// double precision. tests/test_emu.sh checks which bug is found under which schedule.
//
// usage: bugs rmsnorm|copies|gemm|BUG      (BUG as in bugs.h, in lower case)
// exit status: 0 right, 1 wrong result, 2 usage, 97 and 98 from the emulator
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "bugs.h"
#include "copies.cuh"
#include "gemm.cuh"
#include "rmsnorm.cuh"

typedef __nv_bfloat16 bf16;

static void check(cudaError_t status, int line) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "bugs.cu:%d: %s\n", line, cudaGetErrorString(status));
    exit(1);
}
#define CHECK(call_) check(call_, __LINE__)

static std::vector<bf16> random_values(size_t n, float scale) {
    static uint32_t state = 12345;
    std::vector<bf16> v(n);
    for (bf16 &x : v) {
        state = state * 1664525u + 1013904223u;
        x = __float2bfloat16(scale * ((float)(state >> 8 & 0xffff) / 32768.0f - 1.0f));
    }
    return v;
}
static double at(const std::vector<bf16> &v, size_t i) { return __bfloat162float(v[i]); }

template <class T>
static T *device(size_t n) {
    T *p;
    CHECK(cudaMalloc(&p, n * sizeof(T)));
    return p;
}
template <class T>
static T *upload(const std::vector<T> &v) {
    T *p = device<T>(v.size());
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <class T>
static std::vector<T> download(const T *p, size_t n) {
    CHECK(cudaGetLastError());
    std::vector<T> v(n);
    CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}

// The largest error so far; NaN counts as infinite.
static void note(double *worst, double found, double want) {
    double e = fabs(found - want);
    *worst = e <= *worst ? *worst : e == e ? e : INFINITY;
}
static int report(const char *what, double worst, double tolerance) {
    bool right = worst <= tolerance;
    printf("%s: largest error %.2e, allowed %.0e: %s\n", what, worst, tolerance,
           right ? "right" : "WRONG");
    return !right;
}

static int run_rmsnorm(Bug bug) {
    const int T = 7, C = 576;
    std::vector<bf16> x = random_values(T * C, 1.0f), w = random_values(C, 1.0f);
    bf16 *out = device<bf16>(T * C);
    rmsnorm<<<T, 256>>>(out, upload(x), upload(w), C, bug);
    std::vector<bf16> y = download(out, T * C);
    double worst = 0;
    for (int t = 0; t < T; t++) {
        double s = 0;
        for (int c = 0; c < C; c++) s += at(x, t * C + c) * at(x, t * C + c);
        for (int c = 0; c < C; c++)
            note(&worst, at(y, t * C + c), at(x, t * C + c) * at(w, c) / sqrt(s / C + 1e-5));
    }
    return report("rmsnorm", worst, 2e-2);
}

static int run_copies(Bug bug) {
    const int rows = 75;  // five tiles, the last one not full
    std::vector<bf16> x = random_values(rows * 64, 1.0f);
    float *out = device<float>(128);
    column_sums<<<1, 128>>>(out, upload(x), rows, bug);
    std::vector<float> sums = download(out, 128);
    double worst = 0;
    for (int i = 0; i < 128; i++) {
        double want = 0;
        for (int r = 0; r < rows; r++)
            if (r % 16 / 8 == i / 64) want += at(x, r * 64 + i % 64);
        note(&worst, sums[i], want);
    }
    return report("copies", worst, 1e-4);
}

static CUtensorMap tensor_map(bf16 *p, uint64_t inner, uint64_t outer, uint32_t rows) {
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                               const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                               const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &found));
    CUtensorMap map;
    cuuint64_t dims[3] = {inner, outer, 1}, strides[2] = {inner * 2, inner * outer * 2};
    cuuint32_t box[3] = {64, rows, 1}, ones[3] = {1, 1, 1};
    CUresult status =
        ((Encode)entry)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, p, dims, strides, box, ones,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) check(cudaErrorInvalidValue, __LINE__);
    return map;
}

static int run_gemm(Bug bug) {
    const int M = 136, N = 72, K = 456;  // ragged, nearly three times around the ring
    std::vector<bf16> a = random_values(M * K, 1.0f), b = random_values(N * K, 1.0f);
    bf16 *c = device<bf16>(M * N);
    CHECK(cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, GEMM_SMEM));
    gemm<<<dim3((N + GN - 1) / GN, (M + GM - 1) / GM), 384, GEMM_SMEM>>>(
        tensor_map(upload(a), K, M, GM), tensor_map(upload(b), K, N, GN), tensor_map(c, N, M, 64),
        K, bug);
    std::vector<bf16> r = download(c, M * N);
    double worst = 0;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double s = 0;
            for (int k = 0; k < K; k++) s += at(a, i * K + k) * at(b, j * K + k);
            note(&worst, at(r, i * N + j) / fmax(1, fabs(s)), s / fmax(1, fabs(s)));
        }
    return report("gemm", worst, 1e-2);
}

#define BUG(name_, run_) \
    { #name_, name_, run_ }
static const struct {
    const char *name;
    Bug bug;
    int (*run)(Bug);
} cases[] = {
    {"RMSNORM", NO_BUG, run_rmsnorm},
    BUG(RMSNORM_NO_BARRIER, run_rmsnorm),
    BUG(RMSNORM_DIVERGENT_BARRIER, run_rmsnorm),
    BUG(RMSNORM_READS_PAST_ROW, run_rmsnorm),
    {"COPIES", NO_BUG, run_copies},
    BUG(COPIES_EARLY_REFILL, run_copies),
    BUG(COPIES_WAIT_TOO_LITTLE, run_copies),
    BUG(COPIES_NO_ROW_GUARD, run_copies),
    BUG(COPIES_NO_BARRIER, run_copies),
    {"GEMM", NO_BUG, run_gemm},
    BUG(GEMM_IGNORES_EMPTY, run_gemm),
    BUG(GEMM_WRONG_BYTE_COUNT, run_gemm),
    BUG(GEMM_EARLY_RELEASE, run_gemm),
    BUG(GEMM_NO_WGMMA_FENCE, run_gemm),
    BUG(GEMM_NO_PROXY_FENCE, run_gemm),
    BUG(GEMM_ONE_PROXY_FENCE, run_gemm),
    BUG(GEMM_TOO_MANY_REGISTERS, run_gemm),
    BUG(GEMM_EXITS_EARLY, run_gemm),
    BUG(GEMM_NO_INIT_FENCE, run_gemm),
    BUG(GEMM_ONE_ARRIVAL_PER_GROUP, run_gemm),
};

int main(int argc, char **argv) {
    for (auto &c : cases)
        if (argc == 2 && strcasecmp(argv[1], c.name) == 0) return c.run(c.bug);
    fprintf(stderr, "usage: bugs CASE, one of:");
    for (auto &c : cases) {
        fputc(' ', stderr);
        for (const char *p = c.name; *p; p++) fputc(tolower(*p), stderr);
    }
    fputc('\n', stderr);
    return 2;
}
