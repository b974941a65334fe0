// Speed of kernels/cuda/attention*.cu on the GPU: useful TFLOP/s, forward and backward.
//   make BACKEND=cuda build/cuda/bench_attention_cuda
//   build/cuda/bench_attention_cuda [runs [auto|sm80|sm90]]
// Useful FLOPs count each unmasked (query, key) pair once: 4 * D * H * pairs forward, 10 * D * H *
// pairs backward, pairs = sum of len * (len + 1) / 2; recomputed scores do not count. Times are of
// whole calls: median and fastest. Inputs are normal random numbers, because data affects power and
// clocks. Three alternating sets of buffers keep the L2 cache cold.
#include <cuda_bf16.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/cuda/common.cuh"

enum { SETS = 3, MAX_RUNS = 201, WARM_UP = 5, POSITIONS = 8192 };

struct Batch {
    int32_t *cu_seqlens, *cu_seqlens_host, *work, *position_ids;
    float *rope_table;
    int num_docs, longest;
    double pairs;
};
struct Buffers {
    floatX *qkv, *dout, *out, *dqkv;
    float *lse, *delta;
};
struct Times {
    float median_ms, best_ms;
};

template <class T>
static T *allocate(int64_t n) {
    T *p = (T *)device_malloc((size_t)n * sizeof(T) + !n);
    if (!p) fprintf(stderr, "error: %lld bytes of device memory\n", (long long)n), exit(5);
    return p;
}

// A million different values, repeated: more would take longer to make than to measure with.
static floatX *normal_values(int64_t n) {
    constexpr int64_t DIFFERENT = (1 << 20) + 17;
    static floatX x[DIFFERENT];
    static bool made;
    uint64_t state = 1;
    for (int64_t i = 0; !made && i < DIFFERENT; i++) {
        float sum = -2;  // of 4 uniforms, scaled to variance 1
        for (int k = 0; k < 4; k++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            sum += (float)(state >> 40) * 0x1p-24f;
        }
        x[i] = (floatX)(sum * 1.7320508f);
    }
    made = true;
    floatX *device = allocate<floatX>(n);
    for (int64_t at = 0; at < n; at += DIFFERENT)
        device_upload(device + at, x,
                      (size_t)(n - at < DIFFERENT ? n - at : DIFFERENT) * sizeof(floatX));
    return device;
}

static Batch make_batch(const int *lengths, int n, HeadShape heads) {
    Batch b = {};
    b.num_docs = n;
    b.cu_seqlens_host = (int32_t *)calloc((size_t)n + 1, sizeof(int32_t));
    for (int i = 0; i < n; i++) {
        b.cu_seqlens_host[i + 1] = b.cu_seqlens_host[i] + lengths[i];
        b.longest = lengths[i] > b.longest ? lengths[i] : b.longest;
        b.pairs += lengths[i] * (lengths[i] + 1.0) / 2;
    }
    size_t size = attention_plan_size(b.cu_seqlens_host[n], n);
    int32_t *work_host = (int32_t *)malloc(size * sizeof(int32_t));
    size_t used = attention_plan(work_host, b.cu_seqlens_host, n, heads);
    b.work = allocate<int32_t>((int64_t)used);
    b.cu_seqlens = allocate<int32_t>(n + 1);
    const int T = b.cu_seqlens_host[n], angles = POSITIONS * heads.head_dim;
    int32_t *positions = (int32_t *)malloc((size_t)T * sizeof(int32_t) + 1);
    for (int i = 0; i < n; i++)
        for (int t = b.cu_seqlens_host[i]; t < b.cu_seqlens_host[i + 1]; t++)
            positions[t] = (t - b.cu_seqlens_host[i]) % POSITIONS;
    float *table = (float *)malloc((size_t)angles * sizeof(float));
    for (int i = 0; i < angles; i++) table[i] = i % 2 ? sinf((float)(i / 2)) : cosf((float)(i / 2));
    b.position_ids = allocate<int32_t>(T);
    b.rope_table = allocate<float>(angles);
    device_upload(b.position_ids, positions, (size_t)T * sizeof(int32_t));
    device_upload(b.rope_table, table, (size_t)angles * sizeof(float));
    free(positions), free(table);
    device_upload(b.work, work_host, used * sizeof(int32_t));
    device_upload(b.cu_seqlens, b.cu_seqlens_host, ((size_t)n + 1) * sizeof(int32_t));
    device_synchronize();
    free(work_host);
    return b;
}

static int by_value(const void *a, const void *b) {
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

// backward: 0 or 1
static Times measure(Buffers *sets, const Batch *batch, const VarlenInfo *docs, HeadShape heads,
                     int backward, int runs) {
    cudaEvent_t start, end;
    float ms[MAX_RUNS];
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int r = -WARM_UP; r < runs; r++) {
        Buffers b = sets[(r + WARM_UP) % SETS];
        CUDA_CHECK(cudaEventRecord(start, cuda_stream()));
        if (backward)
            attention_backward(b.dqkv, b.delta, b.dout, b.qkv, b.out, b.lse, batch->position_ids,
                               batch->rope_table, docs, heads);
        else
            attention_forward(b.out, b.lse, b.qkv, docs, heads);
        CUDA_CHECK(cudaEventRecord(end, cuda_stream()));
        CUDA_CHECK(cudaEventSynchronize(end));
        if (r >= 0) CUDA_CHECK(cudaEventElapsedTime(&ms[r], start, end));
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    qsort(ms, (size_t)runs, sizeof(float), by_value);
    return {ms[runs / 2], ms[0]};
}

static void report(const char *name, const int *lengths, int n, HeadShape heads, int runs) {
    Batch batch = make_batch(lengths, n, heads);
    const int64_t T = batch.cu_seqlens_host[n];
    const int64_t row = (int64_t)(heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    const int64_t out_row = (int64_t)heads.num_heads * heads.head_dim;
    Buffers sets[SETS];
    for (Buffers &b : sets) {
        b.qkv = normal_values(T * row), b.dout = normal_values(T * out_row);
        b.out = allocate<floatX>(T * out_row), b.dqkv = allocate<floatX>(T * row);
        b.lse = allocate<float>(T * heads.num_heads),
        b.delta = allocate<float>(T * heads.num_heads);
    }
    VarlenInfo docs = {batch.cu_seqlens, batch.work, (int32_t)T, n, batch.longest};
    Times forward = measure(sets, &batch, &docs, heads, 0, runs);
    Times backward = measure(sets, &batch, &docs, heads, 1, runs);
    double tflop = 4e-12 * heads.head_dim * heads.num_heads * batch.pairs;
    printf(
        "%-30s %2d/%-2d x %-3d %7lld tokens  forward %8.3f ms (%8.3f) %6.1f TFLOP/s   "
        "backward %8.3f ms (%8.3f) %6.1f TFLOP/s\n",
        name, heads.num_heads, heads.num_kv_heads, heads.head_dim, (long long)T, forward.median_ms,
        forward.best_ms, tflop / forward.median_ms * 1e3, backward.median_ms, backward.best_ms,
        2.5 * tflop / backward.median_ms * 1e3);
    fflush(stdout);
    for (Buffers &b : sets) {
        device_free(b.qkv), device_free(b.dout), device_free(b.out), device_free(b.dqkv);
        device_free(b.lse), device_free(b.delta);
    }
    device_free(batch.work), device_free(batch.cu_seqlens);
    device_free(batch.position_ids), device_free(batch.rope_table);
    free(batch.cu_seqlens_host);
}

// The inverse of the normal cumulative distribution function, by bisection
static double normal_quantile(double p) {
    double low = -10, high = 10;
    for (int i = 0; i < 80; i++) {
        double middle = (low + high) / 2;
        *(0.5 * erfc(-middle / sqrt(2.0)) < p ? &low : &high) = middle;
    }
    return low;
}

// 95 documents, 65,536 tokens, log-normal lengths (mean 700, sigma 1.04) in a fixed random order,
// like packed web text
enum { WEB_DOCS = 95, WEB_TOKENS = 65536 };
static void web_lengths(int *lengths) {
    int total = 0;
    uint64_t state = 7;
    for (int i = 0; i < WEB_DOCS; i++) {
        double x = exp(log(700.0) - 1.04 * 1.04 / 2 + 1.04 * normal_quantile((i + 0.5) / WEB_DOCS));
        lengths[i] = (int)lround(x < 8192 ? x : 8192);
        if (i == WEB_DOCS - 1) lengths[i] = WEB_TOKENS - total;
        total += lengths[i];
    }
    for (int i = WEB_DOCS - 1; i > 0; i--) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        int j = (int)((state >> 33) % (uint64_t)(i + 1)), swapped = lengths[i];
        lengths[i] = lengths[j], lengths[j] = swapped;
    }
}

// `total` tokens in documents of `len`
static void report_equal(int len, int total, HeadShape heads, int runs) {
    char name[64];
    int n = total / len, *lengths = (int *)malloc((size_t)n * sizeof(int));
    for (int i = 0; i < n; i++) lengths[i] = len;
    snprintf(name, sizeof name, "%d x %d", n, len);
    report(name, lengths, n, heads, runs);
    free(lengths);
}

int main(int argc, char **argv) {
    static const HeadShape models[] = {
        {9, 3, 64}, {15, 5, 64}, {32, 32, 64}, {32, 8, 64}, {32, 8, 128}};
    static const int seed[] = {220, 217, 295, 183, 130, 350};
    static int web[WEB_DOCS + 128];  // then 128 empty documents
    int runs = argc > 1 ? atoi(argv[1]) : 31;
    const char *kernels = argc > 2 ? argv[2] : "auto";
    if (runs < 1 || runs > MAX_RUNS)
        return fprintf(stderr, "usage: %s [runs [auto|sm80|sm90]]; up to %d\n", argv[0], MAX_RUNS),
               2;
    DeviceOptions options = {0, 0};
    const char *missing = device_init(&options);
    if (missing) return fprintf(stderr, "error: %s\n", missing), 11;
    if (attention_select(kernels) != 0)
        return fprintf(stderr, "error: no %s kernels for this GPU\n", kernels), 2;
    printf("%s\n", device_describe());
    web_lengths(web);
    for (HeadShape heads : models) {
        report("seed batch", seed, 6, heads, runs);
        report("web text", web, WEB_DOCS, heads, runs);
        report("web text, 128 empty documents", web, WEB_DOCS + 128, heads, runs);
        for (int len = 128; len <= 8192; len *= 4) report_equal(len, 65536, heads, runs);
    }
    return 0;
}
