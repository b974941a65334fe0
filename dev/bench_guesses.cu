// Measures what dev/gpu_model guesses: the rates of the tensor cores, cuBLASLt's first answer beside
// the best of eight, what gradients of weights on the branch save, what kernels that move bytes reach
// of the memory's speed, and the gaps between launches. Times of attention: bench_attention_cuda.
//   bench_guesses [small]      small: shapes that an emulated build can run; no figure means anything
// Every line ends with the constant of dev/gpu_model/step.py or simulate.py that it replaces, and its
// value there. Medians; inputs are random bits, because zeros cost a GPU less power.
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <chrono>
#include <vector>

#include "../kernels/cuda/common.cuh"
#include "../kernels/cuda/ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

extern __shared__ __align__(1024) unsigned char smem[];

namespace {

struct Sizes {
    int64_t T, C, F, qkv, q, V, params;
    int head_rows, runs, launches, loops;
};
constexpr Sizes LARGE = {65536, 576, 1536, 960, 576, 49152, 134515008, 2048, 15, 2000, 20000};
constexpr Sizes SMALL = {64, 64, 192, 320, 192, 264, 4096, 16, 1, 8, 2};

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Median seconds on the GPU of what `work` enqueues
template <class Work>
double measure(int runs, Work work) {
    std::vector<float> ms((size_t)runs);
    cudaEvent_t start, end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int r = -3; r < runs; r++) {
        CUDA_CHECK(cudaEventRecord(start, cuda_stream()));
        work();
        CUDA_CHECK(cudaEventRecord(end, cuda_stream()));
        CUDA_CHECK(cudaEventSynchronize(end));
        if (r >= 0) CUDA_CHECK(cudaEventElapsedTime(&ms[(size_t)r], start, end));
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    std::sort(ms.begin(), ms.end());
    return ms[(size_t)runs / 2] * 1e-3;
}

template <class T>
T *random_bits(int64_t n) {
    static uint64_t state = 1;
    const size_t bytes = (size_t)n * sizeof(T) + 64;
    std::vector<uint16_t> host(std::min<size_t>(bytes / 2, 1 << 20));
    for (uint16_t &x : host) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        x = (uint16_t)((state >> 48 & 0x807f) | 0x3f00);  // bf16, |x| from 0.5 to 1
    }
    char *p = (char *)device_malloc(bytes);
    if (!p) fprintf(stderr, "error: %zu bytes of device memory\n", bytes), exit(6);
    for (size_t at = 0; at < bytes; at += host.size() * 2)
        device_upload(p + at, host.data(), std::min(host.size() * 2, bytes - at));
    return (T *)p;
}

// -------------------------------------------------------------------------------------------------
// Tensor cores

constexpr int CHAINS = 8, PRODUCTS = 16;  // of a pass of a loop

__global__ void __launch_bounds__(256) mma_sync_kernel(float *sink, int loops) {
    float d[CHAINS][4] = {};
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = 0x3f003f00u ^ (threadIdx.x * 2654435761u & 0x007f007fu);
    for (int i = 0; i < 2; i++) b[i] = a[i] ^ 0x00550055u;
    for (int n = 0; n < loops; n++)
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++) mma_16816(d[i % CHAINS], a, b[0], b[1]);
    float sum = 0;
    for (int i = 0; i < CHAINS; i++) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    if (sum == 1) *sink = sum;
}

// Two warpgroups a CTA; 64 x 128 x 16 products from one pair of tiles in shared memory
__global__ void __launch_bounds__(256) wgmma_kernel(float *sink, int loops) {
#if HAS_WGMMA
    float d[64] = {};
    for (int i = (int)threadIdx.x; i < (64 + 128) * 32; i += 256)
        reinterpret_cast<uint32_t *>(smem)[i] = 0x3f003f00u ^ (i * 2654435761u & 0x007f007fu);
    fence_proxy_async();
    __syncthreads();
    const uint32_t at = smem_u32(smem);
    const uint64_t a = wgmma_desc_sw128(at, 64 * 128, 8 * 128);
    const uint64_t b = wgmma_desc_sw128(at + 64 * 128, 128 * 128, 8 * 128);
    for (int n = 0; n < loops; n++) {
        wgmma_pin(d);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_ss<0, 0>(d, a + i * 2, b + i * 2, 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(d);
    }
    float sum = 0;
    for (int i = 0; i < 64; i++) sum += d[i];
    if (sum == 1) *sink = sum;
#endif
}

void tensor_cores(const Sizes &z) {
    float *sink = random_bits<float>(16);
    const int blocks = 2 * cuda_num_sms(), shared = (64 + 128) * 128;
    const double sync_s = measure(z.runs, [&] {
        mma_sync_kernel<<<blocks, 256, 0, cuda_stream()>>>(sink, z.loops);
        LAUNCH_CHECK("mma_sync_kernel");
    });
    const double sync = 2. * 16 * 8 * 16 * PRODUCTS * z.loops * 8 * blocks / sync_s;
    printf("mma.sync   %8.1f TFLOP/s\n", sync * 1e-12);
    if (cuda_arch() != 90) return;
    const double async_s = measure(z.runs, [&] {
        wgmma_kernel<<<blocks, 256, shared, cuda_stream()>>>(sink, z.loops);
        LAUNCH_CHECK("wgmma_kernel");
    });
    const double async = 2. * 64 * 128 * 16 * 4 * z.loops * 2 * blocks / async_s;
    printf(
        "wgmma      %8.1f TFLOP/s; clocks of an mma.sync, were this 4,096 FLOP a clock and SM: "
        "%.2f   (BUSY[HMMA] 6)\n",
        async * 1e-12, 4 * async / sync);
    device_free(sink);
}

// -------------------------------------------------------------------------------------------------
// cuBLASLt: the first of eight answers, and the fastest

enum Kind { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT };
const char *const KIND_NAMES[] = {"forward", "input gradient", "weight gradient"};

#define LT(call_)                                                                               \
    do {                                                                                        \
        if ((call_) != CUBLAS_STATUS_SUCCESS) fprintf(stderr, "error: %s\n", #call_), exit(11); \
    } while (0)

void layout(cublasLtMatrixLayoutOpaque_t *l, bool fp32, int64_t rows, int64_t cols) {
    LT(cublasLtMatrixLayoutInit(l, fp32 ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)cols, (uint64_t)rows,
                                cols));
}

struct Products {
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    void *a, *b, *d, *workspace;
    size_t workspace_bytes = 32 << 20;
    double first_s = 0, best_s = 0;

    explicit Products(const Sizes &z) {
        const int64_t most = z.T * 2 * z.F;
        LT(cublasLtCreate(&handle));
        LT(cublasLtMatmulPreferenceCreate(&preference));
        // as kernels/cuda/matmul.cu
        const uint32_t reductions =
            CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
        for (cublasLtMatmulPreferenceAttributes_t alignment :
             {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            prefer(alignment, (uint32_t)16);
        a = random_bits<floatX>(most), b = random_bits<floatX>(most);
        d = random_bits<float>(most), workspace = random_bits<char>((int64_t)workspace_bytes);
    }

    template <class T>
    void prefer(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
        LT(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    }

    void compare(Kind kind, int64_t T, int64_t K, int64_t N, int runs) {
        const cublasOperation_t op_a = kind == FORWARD ? CUBLAS_OP_T : CUBLAS_OP_N;
        const cublasOperation_t op_b = kind == BACKWARD_WEIGHT ? CUBLAS_OP_T : CUBLAS_OP_N;
        const bool weight = kind == BACKWARD_WEIGHT;
        cublasLtMatmulDesc_t desc;
        cublasLtMatrixLayoutOpaque_t la, lb, ld;
        cublasLtMatmulHeuristicResult_t found[8];
        int count = 0;
        LT(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        LT(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
        LT(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
        layout(&la, false, weight ? T : N, K);
        layout(&lb, false, T, kind == FORWARD ? K : N);
        layout(&ld, weight, weight ? N : T, kind == FORWARD ? N : K);
        LT(cublasLtMatmulAlgoGetHeuristic(handle, desc, &la, &lb, &ld, &ld, preference, 8, found,
                                          &count));
        double first = 0, best = 0;
        for (int i = 0; i < count; i++) {
            const float one = 1, beta = weight ? 1 : 0;
            const double s = measure(runs, [&] {
                LT(cublasLtMatmul(handle, desc, &one, a, &la, b, &lb, &beta, d, &ld, d, &ld,
                                  &found[i].algo, workspace, workspace_bytes, cuda_stream()));
            });
            if (i == 0) first = best = s;
            best = std::min(best, s);
        }
        const double tflop = 2e-12 * (double)T * (double)K * (double)N;
        printf("product    %-15s K %4lld N %4lld   first %7.1f TFLOP/s, best of %d %7.1f TFLOP/s\n",
               KIND_NAMES[kind], (long long)K, (long long)N, tflop / first, count, tflop / best);
        first_s += first, best_s += best;
    }
};

void products(const Sizes &z) {
    Products p(z);
    const int64_t layers[][2] = {{z.C, z.qkv}, {z.q, z.C}, {z.C, 2 * z.F}, {z.F, z.C}};
    for (const auto &kn : layers)
        for (Kind kind : {FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
            p.compare(kind, z.T, kn[0], kn[1], z.runs);
    printf("products   time of the best / of the first %.3f   (HEURISTIC .92)\n",
           p.best_s / p.first_s);
    for (void *x : {p.a, p.b, p.d, p.workspace}) device_free(x);
}

// -------------------------------------------------------------------------------------------------
// The branch: backward of a layer's MLP, as in llama.h, with the gradients of weights overlapped, and
// one after another

void branch(const Sizes &z) {
    floatX *dresid = random_bits<floatX>(z.T * z.C), *swiglu = random_bits<floatX>(z.T * z.F);
    floatX *dswiglu = random_bits<floatX>(z.T * z.F), *norm = random_bits<floatX>(z.T * z.C);
    floatX *gate_up = random_bits<floatX>(z.T * 2 * z.F);
    floatX *dgate_up = random_bits<floatX>(z.T * 2 * z.F), *dnorm = random_bits<floatX>(z.T * z.C);
    floatX *down = random_bits<floatX>(z.C * z.F), *up = random_bits<floatX>(2 * z.F * z.C);
    real *ddown = random_bits<real>(z.C * z.F), *dup = random_bits<real>(2 * z.F * z.C);
    double s[2];
    matmul_choose(dresid, ddown, swiglu, down, z.T, z.F, z.C);
    matmul_choose(dgate_up, dup, norm, up, z.T, z.C, 2 * z.F);
    for (int overlapped = 0; overlapped < 2; overlapped++)
        s[overlapped] = measure(z.runs, [&] {
            matmul_backward_weight(ddown, dresid, swiglu, false, z.T, z.F, z.C);
            if (!overlapped) device_join();
            matmul_backward_input(dswiglu, dresid, down, z.T, z.F, z.C);
            swiglu_backward(dgate_up, dswiglu, gate_up, z.T, z.F);
            matmul_backward_weight(dup, dgate_up, norm, false, z.T, z.C, 2 * z.F);
            if (!overlapped) device_join();
            matmul_backward_input(dnorm, dgate_up, up, z.T, z.C, 2 * z.F);
            device_join();
        });
    printf(
        "branch     backward of an MLP %.1f us, overlapped %.1f us: saves %.1f us   (OVERLAP .8, "
        "and `saved by the branch` of the report)\n",
        s[0] * 1e6, s[1] * 1e6, (s[0] - s[1]) * 1e6);
    for (floatX *p : {dresid, swiglu, dswiglu, norm, gate_up, dgate_up, dnorm, down, up})
        device_free(p);
    device_free(ddown), device_free(dup);
}

// -------------------------------------------------------------------------------------------------
// Kernels that move bytes

void bytes_per_second(const char *name, double bytes, double s, double copy, const char *constant) {
    printf("bytes      %-22s %8.1f GB/s, %.2f of a copy's   (%s)\n", name, bytes / s * 1e-9,
           bytes / s / copy, constant);
}

void movers(const Sizes &z) {
    const double rows = 2. * (double)z.T * (double)z.C, wide = 2. * (double)z.T * (double)z.F;
    const int C = (int)z.C;
    floatX *x = random_bits<floatX>(z.T * 2 * z.F), *y = random_bits<floatX>(z.T * 2 * z.F);
    floatX *w = random_bits<floatX>(z.T * 2 * z.F), *weight = random_bits<floatX>(z.C);
    real *rstd = random_bits<real>(z.T), *dweight = random_bits<real>(z.C);
    const double copy_s = measure(z.runs, [&] { device_copy(y, x, (size_t)(2 * wide)); });
    const double copy = 4 * wide / copy_s;
    printf("bytes      %-22s %8.1f GB/s   (HBM 4,200)\n", "copy", copy * 1e-9);
    bytes_per_second("rmsnorm_forward", 2 * rows,
                     measure(z.runs, [&] { rmsnorm_forward(y, rstd, x, weight, 1e-5f, z.T, C); }),
                     copy, "REACHES[norm] .88");
    bytes_per_second(
        "rmsnorm_backward", 4 * rows,
        measure(z.runs, [&] { rmsnorm_backward(x, dweight, y, w, weight, rstd, z.T, C); }), copy,
        "REACHES[norm_backward] .80");
    bytes_per_second("swiglu_forward", 3 * wide,
                     measure(z.runs, [&] { swiglu_forward(x, y, z.T, z.F); }), copy,
                     "REACHES[swiglu] .90");
    bytes_per_second("swiglu_backward", 5 * wide,
                     measure(z.runs, [&] { swiglu_backward(x, y, w, z.T, z.F); }), copy,
                     "REACHES[swiglu] .90");
    for (floatX *p : {x, y, w, weight}) device_free(p);
    device_free(rstd), device_free(dweight);
}

void head_and_update(const Sizes &z) {
    const int64_t logits_n = (int64_t)z.head_rows * z.V;
    floatX *logits = random_bits<floatX>(logits_n), *weights = random_bits<floatX>(z.params);
    real *losses = random_bits<real>(z.head_rows), *scale = random_bits<real>(1);
    int32_t *targets = (int32_t *)device_malloc((size_t)z.head_rows * 4);
    device_zero(targets, (size_t)z.head_rows * 4);
    const double s = measure(z.runs, [&] {
        cross_entropy_forward_backward(losses, logits, targets, scale, z.head_rows, z.V);
    });
    printf("bytes      %-22s %8.1f GB/s   (REACHES[norm] .88, EXP_EXPOSED .4)\n", "cross_entropy",
           4e-9 * (double)logits_n / s);
    uint16_t *lo = random_bits<uint16_t>(z.params);
    real *m = random_bits<real>(z.params), *v = random_bits<real>(z.params);
    real *grads = random_bits<real>(z.params);
    StepScalars *step = (StepScalars *)device_malloc(sizeof *step);
    device_zero(step, sizeof *step);
    const AdamW hyper = {1e-4f, .9f, .95f, 1e-8f, .1f, 1};
    const double update_s = measure(
        z.runs, [&] { adamw_update(weights, lo, m, v, grads, step, hyper, (size_t)z.params); });
    printf("bytes      %-22s %8.1f GB/s   (REACHES[adamw] .88)\n", "adamw_update",
           28e-9 * (double)z.params / update_s);
    for (void *p : {(void *)logits, (void *)weights, (void *)losses, (void *)scale, (void *)targets,
                    (void *)lo, (void *)m, (void *)v, (void *)grads, (void *)step})
        device_free(p);
}

// -------------------------------------------------------------------------------------------------
// Launches

__global__ void nothing_kernel() {}

void launches(const Sizes &z) {
    auto launch_all = [&] {
        for (int i = 0; i < z.launches; i++) nothing_kernel<<<1, 32, 0, cuda_stream()>>>();
        LAUNCH_CHECK("nothing_kernel");
    };
    const double stream_s = measure(z.runs, launch_all);
    const double before = seconds_now();
    launch_all();
    const double host_s = seconds_now() - before;
    device_synchronize();
    cudaGraph_t graph;
    cudaGraphExec_t recorded;
    CUDA_CHECK(cudaStreamBeginCapture(cuda_stream(), cudaStreamCaptureModeThreadLocal));
    launch_all();
    CUDA_CHECK(cudaStreamEndCapture(cuda_stream(), &graph));
    CUDA_CHECK(cudaGraphInstantiate(&recorded, graph, 0));
    const double graph_s =
        measure(z.runs, [&] { CUDA_CHECK(cudaGraphLaunch(recorded, cuda_stream())); });
    CUDA_CHECK(cudaGraphExecDestroy(recorded));
    CUDA_CHECK(cudaGraphDestroy(graph));
    const double us = 1e6 / z.launches;
    printf("launches   %.2f us in a stream, an empty kernel each (GAP 1.2 and its run)\n",
           stream_s * us);
    printf("launches   %.2f us in a graph (GAP_GRAPH 1.0 and its run)\n", graph_s * us);
    printf("launches   %.2f us of the host (HOST_KERNEL 2.2)\n", host_s * us);
}

}  // namespace

int main(int argc, char **argv) {
    const bool small = argc == 2 && strcmp(argv[1], "small") == 0;
    if (argc > 1 && !small) return fprintf(stderr, "usage: %s [small]\n", argv[0]), 2;
    const DeviceOptions options = {0, 0};
    const char *missing = device_init(&options);
    if (missing) return fprintf(stderr, "error: %s\n", missing), 11;
    const Sizes z = small ? SMALL : LARGE;
    printf("%s\n", device_describe());
    tensor_cores(z);
    products(z);
    branch(z);
    movers(z);
    head_and_update(z);
    launches(z);
    return 0;
}
