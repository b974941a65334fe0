// Every CUDA operation but attention against the CPU backend's, over many shapes. Inputs are exact
// in bf16, so that both sides start from the same values. A result that the device stores as bf16
// is then off by at most
//
//   2^-8 of the value: rounding to nearest is off by 2^-9; the fp32 value before it may lie a few
//        fp32 roundings away from the reference's and so just across the border between two bf16
//
// plus the difference of fp32 sums in another order where terms cancel: 1e-5 of the tensor's scale,
// which is also the tolerance of fp32 outputs. Every tensor has rows of NaN after the last: they
// must not affect results and must not change. Every operation runs twice and must give equal bits.

#include <math.h>
#include <string>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../kernels/comm/comm.h"
#include "../kernels/cuda/common.cuh"
#include "test.h"
#include "reference.h"

static const double BF16 = 1.0 / 256, FP32 = 1e-5;
enum { ROWS_BEHIND = 3 };

// ------------------------------------------------------------------------------------------------
// Operands on both sides

struct Tensor {
    const char *name;
    bool bf16;
    int64_t rows, cols;
    float *host;  // (rows, cols): the reference's operand
    void *device;
    unsigned char *start, *result;  // the device's bytes before and after, with the rows of NaN
};

static CpuReference reference;
static bool started;
static void *host_blocks[256], *device_blocks[256];
static int num_host_blocks, num_device_blocks;

static void *host_block(size_t bytes) {
    void *p = calloc(1, bytes + 1);
    host_blocks[num_host_blocks++] = p;
    return p;
}

static void *device_block(size_t bytes) {
    void *p = device_malloc(bytes + (bytes == 0));
    device_blocks[num_device_blocks++] = p;
    return p;
}

// Frees the operands of the previous shape.
static void next_shape() {
    while (num_host_blocks) free(host_blocks[--num_host_blocks]);
    while (num_device_blocks) device_free(device_blocks[--num_device_blocks]);
}

static const char *init() {
    const DeviceOptions options = {0, 0};
    return device_init(&options);
}

static void start() {
    if (!started) {
        const char *missing = init();
        if (missing) SKIP("%s", missing);
        reference = reference_open();
        started = true;
    }
    next_shape();
}

static uint16_t bf16_bits(float x) {  // to nearest, ties to even: independent of the kernels' code
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float bf16_value(uint16_t bits) {
    uint32_t u = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static float bf16_round(double x) { return bf16_value(bf16_bits((float)x)); }

static size_t element_bytes(const Tensor *t) { return t->bf16 ? 2 : 4; }
static size_t count(const Tensor *t) { return (size_t)(t->rows * t->cols); }
static size_t used_bytes(const Tensor *t) { return count(t) * element_bytes(t); }
static size_t all_bytes(const Tensor *t) {
    return (size_t)((t->rows + ROWS_BEHIND) * t->cols) * element_bytes(t);
}

static void put(Tensor *t, size_t i, float x) {
    if (t->bf16) {
        const uint16_t bits = bf16_bits(x);
        memcpy(t->start + 2 * i, &bits, 2);
    } else {
        memcpy(t->start + 4 * i, &x, 4);
    }
}

static float result_at(const Tensor *t, size_t i) {
    float x;
    uint16_t bits;
    if (!t->bf16) return memcpy(&x, t->result + 4 * i, 4), x;
    memcpy(&bits, t->result + 2 * i, 2);
    return bf16_value(bits);
}

// The device's initial bytes from `host`, followed by NaN
static void fill(Tensor *t) {
    for (size_t i = 0; i < count(t); i++) put(t, i, t->host[i]);
    for (size_t i = count(t); i < all_bytes(t) / element_bytes(t); i++) put(t, i, NAN);
    device_upload(t->device, t->start, all_bytes(t));
}

// Normal numbers times `scale`; 0: NaN, for outputs that are only written.
static Tensor tensor(const char *name, bool bf16, int64_t rows, int64_t cols, double scale) {
    Tensor t = {name, bf16, rows, cols, NULL, NULL, NULL, NULL};
    t.host = (float *)host_block(count(&t) * sizeof(float));
    t.start = (unsigned char *)host_block(all_bytes(&t));
    t.result = (unsigned char *)host_block(all_bytes(&t));
    t.device = device_block(all_bytes(&t));
    for (size_t i = 0; i < count(&t); i++)
        t.host[i] = scale == 0 ? NAN : bf16_round(scale * test_rng_normal());
    fill(&t);
    return t;
}

static floatX *bf(const Tensor &t) { return (floatX *)t.device; }
static real *fp(const Tensor &t) { return (real *)t.device; }

static int32_t *ints(const int32_t *host, int64_t n) {
    int32_t *p = (int32_t *)device_block((size_t)n * sizeof(int32_t));
    device_upload(p, host, (size_t)n * sizeof(int32_t));
    return p;
}

static int32_t *host_ints(int64_t n) { return (int32_t *)host_block((size_t)n * sizeof(int32_t)); }

// Runs `op` twice from the same start; outputs of the second run are in `result`.
template <class Op>
static void run(Tensor *const *outputs, int n, Op op) {
    op();
    for (int i = 0; i < n; i++) {
        Tensor *t = outputs[i];
        device_download(t->result, t->device, all_bytes(t));
        device_upload(t->device, t->start, all_bytes(t));
    }
    op();
    for (int i = 0; i < n; i++) {
        Tensor *t = outputs[i];
        unsigned char *first = (unsigned char *)host_block(all_bytes(t));
        memcpy(first, t->result, all_bytes(t));
        device_download(t->result, t->device, all_bytes(t));
        CHECK_MSG(memcmp(first, t->result, all_bytes(t)) == 0, "%s: two runs differ", t->name);
    }
}

static double scale_of(const Tensor *t) {
    double scale = 0;
    for (size_t i = 0; i < count(t); i++) scale = fmax(scale, fabs((double)t->host[i]));
    return scale;
}

// |result - reference| <= relative |reference| + absolute, and nothing written after the last row
static void check_within(const Tensor &t, double relative, double absolute) {
    for (size_t i = 0; i < count(&t); i++) {
        const double got = result_at(&t, i), want = t.host[i];
        CHECK_MSG(fabs(got - want) <= relative * fabs(want) + absolute,
                  "%s (%lld,%lld): element %zu: got %.9g, reference %.9g", t.name,
                  (long long)t.rows, (long long)t.cols, i, got, want);
    }
    const size_t used = used_bytes(&t);
    CHECK_MSG(memcmp(t.start + used, t.result + used, all_bytes(&t) - used) == 0,
              "%s (%lld,%lld): written behind the last row", t.name, (long long)t.rows,
              (long long)t.cols);
}

static void check_close(const Tensor &t) {
    check_within(t, t.bf16 ? BF16 : FP32, FP32 * scale_of(&t));
}
static void check_exact(const Tensor &t) { check_within(t, 0, 0); }

// ------------------------------------------------------------------------------------------------
// Errors, each in its own process. Must be first in the file: a process that has started CUDA must
// not fork.

// Runs op() in a process: its exit code and standard error.
template <class Op>
static int exit_code_of(char *text, size_t size, Op op) {
    if (started) SKIP("CUDA has been started in this process");
    int ends[2], status = 0;
    CHECK(pipe(ends) == 0);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        op();
        exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t n; (n = read(ends[0], text + used, size - 1 - used)) > 0;) used += (size_t)n;
    text[used] = 0;
    close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

TEST(unsupported_shapes_end_with_exit_code_11) {
    char text[1000];
    for (int i = 0; i < 10; i++) {
        const int code = exit_code_of(text, sizeof text, [&] {
            if (init()) exit(77);
            void *p = cuda_scratch();
            floatX *x = (floatX *)p;
            const HeadShape heads = {2, 1, 24};
            if (i == 0) gather_rows(x, x, (int32_t *)p, 1, 12);
            if (i == 1) matmul_forward(x, x, x, 1, 64, 9);
            if (i == 2) rope_forward(x, (int32_t *)p, (real *)p, 1, heads);
            if (i == 3) rmsnorm_forward(x, (real *)p, x, x, 1e-5f, 1, 16392);
            if (i == 4) global_norm_squared((double *)p, (real *)p + 1, 4);
            if (i == 5) cuda_fail("file", 7, "what", cudaErrorInvalidValue);
            if (i == 6) matmul_forward(x, x, x, 1, 64, 0);
            if (i == 7) matmul_forward(x, x, x, 1, 0, 64);
            if (i == 8) qk_norm_forward(x, x, x, 1e-5f, 1, {2, 1, 20});
            if (i == 9) bias_backward((real *)p, x, 1, 16392);
        });
        if (code == 77) SKIP("no GPU");
        CHECK_MSG(code == 11, "case %d: exit code %d: %s", i, code, text);
        CHECK_MSG(strncmp(text, "error: cuda: ", 13) == 0 && strstr(text, "\nhint: "),
                  "case %d: %s", i, text);
        if (i == 1 || i == 6 || i == 7)
            CHECK_MSG(strstr(text, "multiples of 8"), "case %d: %s", i, text);
    }
}

TEST(a_device_error_names_the_call_and_the_work) {
    char text[1000];
    const int code = exit_code_of(text, sizeof text, [] {
        if (init()) exit(77);
        device_on_error([](char *work, size_t size) { snprintf(work, size, "lengths 5 7"); });
        cuda_fail("file", 7, "a_kernel", cudaErrorInvalidValue);
    });
    if (code == 77) SKIP("no GPU");
    CHECK(code == 11);
    CHECK_MSG(strstr(text, "file:7: a_kernel: ") && strstr(text, "; lengths 5 7\nhint: "), "%s",
              text);
}

#ifdef CUDA_EMU
TEST(missing_cublaslt_algorithm_is_an_error) {
    char text[1000];
    const int code = exit_code_of(text, sizeof text, [] {
        setenv("EMU_LT_ALGO", "none", 1);
        if (init()) exit(77);
        floatX *x = (floatX *)cuda_scratch();
        matmul_forward(x, x, x, 3, 64, 8);
    });
    CHECK_MSG(code == 11 && strstr(text, "cuBLASLt has no algorithm for T 3, K 64, N 8"),
              "exit code %d: %s", code, text);
}
#endif

TEST(code_for_other_gpus_hints_how_to_build_for_this_one) {
    char text[1000], expected[64];
    for (cudaError_t status : {cudaErrorNoKernelImageForDevice, cudaErrorUnsupportedPtxVersion}) {
        const int code = exit_code_of(text, sizeof text, [&] {
            if (init()) exit(77);
            fprintf(stderr, "CUDA_ARCHS=%d%s\n", cuda_arch(), cuda_arch() == 90 ? "a" : "");
            cuda_fail("file", 7, "a_kernel", status);
        });
        if (code == 77) SKIP("no GPU");
        CHECK(code == 11 && sscanf(text, "%63s", expected) == 1);
        CHECK_MSG(strstr(strchr(text, '\n'), expected), "expected %s in %s", expected, text);
    }
}

// (A missing GPU: tests/test_cuda_ranks.sh)

// ------------------------------------------------------------------------------------------------
// Device

TEST(device_describes_itself) {
    start();
    CHECK(strstr(device_describe(), "sm_"));
    CHECK(master_lo_bytes() == 2);
}

TEST(device_memory_is_counted) {
    start();
    const DeviceMemory before = device_memory();
    void *a = device_malloc(1000), *b = device_malloc(24);
    DeviceMemory now = device_memory();
    CHECK(now.count == before.count + 2 && now.bytes_now == before.bytes_now + 1024);
    device_free(a);
    device_free(b);
    device_free(NULL);
    now = device_memory();
    CHECK(now.bytes_now == before.bytes_now && now.bytes_peak >= before.bytes_now + 1024);
    CHECK(device_malloc((size_t)1 << 60) == NULL);
    CHECK(cudaGetLastError() == cudaSuccess);
}

// The source may change as soon as device_upload returns; copies larger than all pinned buffers.
TEST(uploads_and_downloads) {
    start();
    const size_t sizes[] = {0, 1, 4097, 21000001};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const size_t n = sizes[k];
        unsigned char *src = (unsigned char *)host_block(n), *dst = (unsigned char *)host_block(n);
        void *device = device_block(n);
        for (size_t i = 0; i < n; i++) src[i] = (unsigned char)(i * 31 + i / 8191);
        device_upload(device, src, n);
        memset(src, 0, n);
        device_download(dst, device, n);
        for (size_t i = 0; i < n; i++) CHECK(dst[i] == (unsigned char)(i * 31 + i / 8191));
        device_zero(device, n);
        device_download(dst, device, n);
        CHECK(memcmp(src, dst, n) == 0);
    }
}

// Range limits, both kinds of ties, denormals, the largest finite number, and random bits
static uint32_t weight_bits(size_t i) {
    static const uint32_t chosen[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff,
                                      0x00800000, 0x3f800000, 0x3f808000, 0x3f818000, 0xbf808000,
                                      0x3f807fff, 0x3f808001, 0x7f7fffff, 0xff7fffff, 0x7f7f8000,
                                      0x7f7f7fff, 0x0000ffff, 0x00008000, 0x00018000, 0x7f800000};
    const size_t n = sizeof chosen / sizeof *chosen;
    if (i < n) return chosen[i];
    const uint32_t bits = test_rng_u32();
    return (bits & 0x7f800000) == 0x7f800000 ? bits & 0xbfffffff : bits;
}

TEST(weights_are_exact_on_host_and_device) {
    start();
    const size_t n = 1200001;  // more than one pinned buffer holds
    float *src = (float *)host_block(n * 4), *dst = (float *)host_block(n * 4);
    float *high = (float *)host_block(n * 4);
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = weight_bits(i);
        memcpy(src + i, &bits, 4);
    }
    floatX *weights = (floatX *)device_block(n * 2);
    uint16_t *lo = (uint16_t *)device_block(n * 2);
    weights_from_host(weights, lo, src, n);
    weights_to_host(dst, weights, lo, n);
    CHECK(memcmp(src, dst, n * 4) == 0);
    activations_to_host(high, weights, n);
    for (size_t i = 0; i < n; i++) {  // the bf16 is a nearest one
        const double nearest = bf16_round(src[i]), x = src[i];
        CHECK_MSG(fabs(high[i] - x) == fabs(nearest - x) || high[i] == nearest,
                  "%.9g is kept as %.9g", x, high[i]);
    }
}

TEST(a_weight_that_is_nan_stays_nan) {
    start();
    const uint32_t bits[3] = {0x7fffffff, 0xffffffff, 0x7f800001};
    float src[3], high[3], all[3];
    memcpy(src, bits, sizeof src);
    floatX *weights = (floatX *)device_block(6);
    uint16_t *lo = (uint16_t *)device_block(6);
    weights_from_host(weights, lo, src, 3);
    activations_to_host(high, weights, 3);
    weights_to_host(all, weights, lo, 3);
    for (int i = 0; i < 3; i++) CHECK(isnan(high[i]) && isnan(all[i]));
}

// ------------------------------------------------------------------------------------------------
// Rows and embedding

static const int64_t SOME_T[] = {0, 1, 5, 34};
static const int SOME_C[] = {64, 192, 576, 2048, 4096};

#define FOR_EACH(type_, x_, list_)                                              \
    for (size_t x_##_at = 0; x_##_at < sizeof list_ / sizeof *list_; x_##_at++) \
        for (type_ x_ = list_[x_##_at], *once_##x_ = &x_; once_##x_; once_##x_ = NULL)

static void check_rows(int64_t n, int C) {
    next_shape();
    const int64_t T = 2 * n + 1;
    int32_t *rows = host_ints(n);
    for (int64_t i = 0; i < n; i++) rows[i] = (int32_t)(2 * i + test_rng_below(2));
    Tensor all = tensor("all", true, T, C, 1), some = tensor("some", true, n, C, 0);
    Tensor back = tensor("back", true, T, C, 0), *out[] = {&some}, *out_back[] = {&back};
    const int32_t *d_rows = ints(rows, n);
    run(out, 1, [&] { gather_rows(bf(some), bf(all), d_rows, n, C); });
    reference.gather_rows(some.host, all.host, rows, n, C);
    check_exact(some);
    run(out_back, 1, [&] { scatter_rows(bf(back), bf(some), d_rows, n, T, C); });
    reference.scatter_rows(back.host, some.host, rows, n, T, C);
    check_exact(back);
}

TEST(gather_and_scatter_rows) {
    start();
    FOR_EACH(const int64_t, n, SOME_T) FOR_EACH(const int, C, SOME_C) check_rows(n, C);
}

// Tokens of a small vocabulary, one of them at `frequent` of 16 positions, and the sorted positions
static void make_tokens(int32_t *tokens, int32_t *order, int64_t T, int V, uint32_t frequent) {
    int64_t n = 0;
    for (int64_t t = 0; t < T; t++)
        tokens[t] = test_rng_below(16) < frequent ? V / 2 : (int32_t)test_rng_below((uint32_t)V);
    for (int v = 0; v < V; v++)
        for (int64_t t = 0; t < T; t++)
            if (tokens[t] == v) order[n++] = (int32_t)t;
}

static void check_embedding(int64_t T, int C, int V, uint32_t frequent) {
    next_shape();
    int32_t *tokens = host_ints(T), *order = host_ints(T);
    make_tokens(tokens, order, T, V, frequent);
    const int32_t *d_tokens = ints(tokens, T), *d_order = ints(order, T);
    Tensor weight = tensor("weight", true, V, C, 1), out = tensor("out", true, T, C, 0);
    Tensor dout = tensor("dout", true, T, C, 1), dweight = tensor("dweight", false, V, C, 3);
    Tensor *outs[] = {&out}, *grads[] = {&dweight};
    run(outs, 1, [&] { embedding_forward(bf(out), d_tokens, bf(weight), T, C); });
    reference.embedding_forward(out.host, tokens, weight.host, T, C);
    check_exact(out);
    run(grads, 1, [&] { embedding_backward(fp(dweight), bf(dout), d_tokens, d_order, T, C); });
    reference.embedding_backward(dweight.host, dout.host, tokens, order, T, C);
    check_close(dweight);
}

TEST(embedding_of_few_tokens) {
    start();
    FOR_EACH(const int64_t, T, SOME_T) FOR_EACH(const int, C, SOME_C) check_embedding(T, C, 40, 3);
}

// Runs that end at, start at, fill and cross spans of the sorted order
TEST(embedding_of_long_runs) {
    start();
    const int64_t lengths[] = {31, 32, 33, 64, 65, 96, 97, 700};
    FOR_EACH(const int64_t, T, lengths)
    for (uint32_t frequent = 0; frequent <= 16; frequent += 4) check_embedding(T, 192, 3, frequent);
    check_embedding(3000, 8, 2, 15);
    check_embedding(2049, 64, 300, 8);
}

// A buffer whose sums in spans of the shortest length would not fit the scratch memory
TEST(embedding_with_longer_spans) {
    start();
    check_embedding(4200, 32768, 2, 8);
}

// ------------------------------------------------------------------------------------------------
// RMSNorm

static const float EPS = 1e-5f;

static void check_norm_forward(int64_t T, int C, double scale) {
    next_shape();
    Tensor resid = tensor("resid", true, T, C, scale), weight = tensor("weight", true, 1, C, 1);
    Tensor normed = tensor("normed", true, T, C, 0), rstd = tensor("rstd", false, T, 1, 0);
    Tensor *outs[] = {&normed, &rstd};
    run(outs, 2, [&] { rmsnorm_forward(bf(normed), fp(rstd), bf(resid), bf(weight), EPS, T, C); });
    reference.rmsnorm_forward(normed.host, rstd.host, resid.host, weight.host, EPS, T, C);
    check_close(normed);
    check_within(rstd, FP32 / 3, 0);
}

TEST(rmsnorm_forward) {
    start();
    FOR_EACH(const int64_t, T, SOME_T) FOR_EACH(const int, C, SOME_C) check_norm_forward(T, C, 2);
    check_norm_forward(3, 8, 2);
    check_norm_forward(3, 8192, 2);
    check_norm_forward(2, 16384, 2);
    check_norm_forward(9, 576, 1e-3);  // eps counts
}

static void check_norm_backward(int64_t T, int C) {
    next_shape();
    Tensor dnormed = tensor("dnormed", true, T, C, 1), resid = tensor("resid", true, T, C, 2);
    Tensor weight = tensor("weight", true, 1, C, 1), rstd = tensor("rstd", false, T, 1, 0.5);
    Tensor dresid = tensor("dresid", true, T, C, 1), dweight = tensor("dweight", false, 1, C, 3);
    for (int64_t t = 0; t < T; t++) rstd.host[t] = 0.3f + fabsf(rstd.host[t]);
    fill(&rstd);
    Tensor *outs[] = {&dresid, &dweight};
    run(outs, 2, [&] {
        rmsnorm_backward(bf(dresid), fp(dweight), bf(dnormed), bf(resid), bf(weight), fp(rstd), T,
                         C);
    });
    reference.rmsnorm_backward(dresid.host, dweight.host, dnormed.host, resid.host, weight.host,
                               rstd.host, T, C);
    check_close(dresid);
    check_close(dweight);
}

TEST(rmsnorm_backward) {
    start();
    FOR_EACH(const int64_t, T, SOME_T) FOR_EACH(const int, C, SOME_C) check_norm_backward(T, C);
    check_norm_backward(2100, 64);   // more rows than the blocks take in one turn
    check_norm_backward(520, 4104);  // three turns, each with a sum over five warps
    check_norm_backward(3, 8);
    check_norm_backward(7, 8192);
    check_norm_backward(3, 16384);
}

// ------------------------------------------------------------------------------------------------
// The norm of query and key heads, bias

static void check_qk_norm(int64_t T, HeadShape heads, double scale) {
    next_shape();
    const int D = heads.head_dim, width = (heads.num_heads + 2 * heads.num_kv_heads) * D;
    Tensor inp = tensor("inp", true, T, width, scale), weight = tensor("weight", true, 2, D, 1);
    Tensor out = tensor("out", true, T, width, 0), *outs[] = {&out};
    run(outs, 1, [&] { qk_norm_forward(bf(out), bf(inp), bf(weight), EPS, T, heads); });
    reference.qk_norm_forward(out.host, inp.host, weight.host, EPS, T, heads);
    check_close(out);
    Tensor dqkv = tensor("dqkv", true, T, width, 1), dweight = tensor("dweight", false, 2, D, 3);
    Tensor *grads[] = {&dqkv, &dweight};
    run(grads, 2,
        [&] { qk_norm_backward(bf(dqkv), fp(dweight), bf(inp), bf(weight), EPS, T, heads); });
    reference.qk_norm_backward(dqkv.host, dweight.host, inp.host, weight.host, EPS, T, heads);
    check_close(dqkv);
    check_close(dweight);
}

TEST(qk_norm) {
    start();
    const HeadShape shapes[] = {{16, 8, 128}, {3, 1, 64}, {2, 2, 256}, {1, 1, 8}, {5, 1, 80}};
    FOR_EACH(const HeadShape, heads, shapes)
    FOR_EACH(const int64_t, T, SOME_T) check_qk_norm(T, heads, 2);
    check_qk_norm(2100, {1, 1, 64}, 2);   // more heads than the blocks take in one turn
    check_qk_norm(9, {2, 1, 128}, 1e-3);  // eps counts
}

static void check_bias(int64_t T, int64_t N) {
    next_shape();
    Tensor bias = tensor("bias", true, 1, N, 1), out = tensor("out", true, T, N, 2);
    Tensor dout = tensor("dout", true, T, N, 1), dbias = tensor("dbias", false, 1, N, 3);
    Tensor *outs[] = {&out}, *grads[] = {&dbias};
    run(outs, 1, [&] { bias_forward(bf(out), bf(bias), T, N); });
    reference.bias_forward(out.host, bias.host, T, N);
    check_close(out);
    run(grads, 1, [&] { bias_backward(fp(dbias), bf(dout), T, N); });
    reference.bias_backward(dbias.host, dout.host, T, N);
    check_close(dbias);
}

TEST(bias) {
    start();
    FOR_EACH(const int64_t, T, SOME_T) FOR_EACH(const int, N, SOME_C) check_bias(T, N);
    check_bias(2100, 64);   // more rows than the blocks take in one turn
    check_bias(520, 4104);  // three turns
    check_bias(3, 8);
    check_bias(3, 16384);
}

// ------------------------------------------------------------------------------------------------
// Rope

static void check_rope(int64_t T, HeadShape heads) {
    next_shape();
    enum { MAX_POSITION = 50 };
    const int width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    Tensor table = tensor("table", false, MAX_POSITION, heads.head_dim, 1);
    for (size_t i = 0; i < count(&table); i += 2) {
        const double angle = table.host[i];
        table.host[i] = (float)cos(angle);
        table.host[i + 1] = (float)sin(angle);
    }
    fill(&table);
    int32_t *positions = host_ints(T);
    for (int64_t t = 0; t < T; t++) positions[t] = (int32_t)test_rng_below(MAX_POSITION);
    const int32_t *d_positions = ints(positions, T);
    Tensor qkv = tensor("qkv", true, T, width, 1), *outs[] = {&qkv};
    run(outs, 1, [&] { rope_forward(bf(qkv), d_positions, fp(table), T, heads); });
    reference.rope_forward(qkv.host, positions, table.host, T, heads);
    check_close(qkv);
    const int kept = heads.num_kv_heads * heads.head_dim;
    for (int64_t t = 1; t <= T; t++)
        CHECK_MSG(memcmp(qkv.start + 2 * (t * width - kept), qkv.result + 2 * (t * width - kept),
                         2 * (size_t)kept) == 0,
                  "value heads of token %lld changed", (long long)t - 1);
}

TEST(rope) {
    start();
    const HeadShape shapes[] = {{9, 3, 64},   {3, 1, 64},  {32, 8, 64},
                                {32, 8, 128}, {3, 1, 128}, {1, 1, 16}};
    FOR_EACH(const HeadShape, heads, shapes)
    FOR_EACH(const int64_t, T, SOME_T) check_rope(T, heads);
}

// ------------------------------------------------------------------------------------------------
// Key-value cache: texts of 1, 2, ... tokens, T of them, each with one new token

static void check_decode(int64_t T, HeadShape heads) {
    next_shape();
    const int D = heads.head_dim, row = 2 * heads.num_kv_heads * D;
    int32_t *first = host_ints(T), *positions = host_ints(T), rows = 2;
    for (int64_t t = 0; t < T; rows += positions[t++] + 1) {
        first[t] = rows;
        positions[t] = (int32_t)(3 * t);
    }
    const int32_t *d_first = ints(first, T), *d_positions = ints(positions, T);
    Tensor qkv = tensor("qkv", true, T, heads.num_heads * D + row, 1);
    Tensor cache = tensor("cache", true, rows, row, 1), *cached[] = {&cache};
    run(cached, 1, [&] { kv_store(bf(cache), bf(qkv), d_first, d_positions, T, heads); });
    reference.kv_store(cache.host, qkv.host, first, positions, T, heads);
    check_exact(cache);
    Tensor out = tensor("out", true, T, heads.num_heads * D, 0), *outs[] = {&out};
    run(outs, 1,
        [&] { attention_decode(bf(out), bf(qkv), bf(cache), d_first, d_positions, T, heads); });
    reference.attention_decode(out.host, qkv.host, cache.host, first, positions, T, heads);
    check_close(out);
}

TEST(attention_decode) {
    start();
    const HeadShape shapes[] = {{9, 3, 64}, {1, 1, 64}, {32, 8, 128}, {6, 6, 128}};
    FOR_EACH(const HeadShape, heads, shapes)
    FOR_EACH(const int64_t, T, SOME_T) check_decode(T, heads);
}

// ------------------------------------------------------------------------------------------------
// SwiGLU

static void check_swiglu(int64_t T, int64_t F, double scale) {
    next_shape();
    Tensor gate_up = tensor("gate_up", true, T, 2 * F, scale), out = tensor("out", true, T, F, 0);
    Tensor dout = tensor("dout", true, T, F, 1), d = tensor("dgate_up", true, T, 2 * F, 0);
    Tensor *outs[] = {&out}, *grads[] = {&d};
    run(outs, 1, [&] { swiglu_forward(bf(out), bf(gate_up), T, F); });
    reference.swiglu_forward(out.host, gate_up.host, T, F);
    check_within(out, BF16, 1e-6 * scale);
    run(grads, 1, [&] { swiglu_backward(bf(d), bf(dout), bf(gate_up), T, F); });
    reference.swiglu_backward(d.host, dout.host, gate_up.host, T, F);
    check_within(d, BF16, 1e-5 * scale);  // 1 + x (1 - s) cancels near x = -1.28
}

TEST(swiglu) {
    start();
    const int64_t widths[] = {8, 512, 1536};
    FOR_EACH(const int64_t, T, SOME_T) FOR_EACH(const int64_t, F, widths) check_swiglu(T, F, 2);
    check_swiglu(2, 14336, 1);
    check_swiglu(2, 8192, 60);  // exp overflows: the sigmoid is 0 or 1
}

// ------------------------------------------------------------------------------------------------
// Cross-entropy

static void check_cross_entropy(int64_t T, int64_t V, double scale) {
    next_shape();
    const float loss_scale = 1.0f / 700;
    float *d_loss_scale = (float *)device_block(sizeof loss_scale);
    device_upload(d_loss_scale, &loss_scale, sizeof loss_scale);
    int32_t *targets = host_ints(T);
    for (int64_t t = 0; t < T; t++)
        targets[t] = t % 4 == 1   ? -1
                     : t % 4 == 2 ? (int32_t)(V - 1)
                                  : (int32_t)test_rng_below((uint32_t)V);
    const int32_t *d_targets = ints(targets, T);
    Tensor logits = tensor("logits", true, T, V, scale), losses = tensor("losses", false, T, 1, 0);
    Tensor again = tensor("losses with gradient", false, T, 1, 0);
    Tensor *outs[] = {&losses, &logits}, *grads[] = {&again, &logits};
    run(outs, 2, [&] { cross_entropy_forward(fp(losses), bf(logits), d_targets, T, V); });
    reference.cross_entropy_forward(losses.host, logits.host, targets, T, V);
    check_within(losses, FP32, 1e-5);
    check_exact(logits);
    run(grads, 2, [&] {
        cross_entropy_forward_backward(fp(again), bf(logits), d_targets, d_loss_scale, T, V);
    });
    reference.cross_entropy_forward_backward(again.host, logits.host, targets, &loss_scale, T, V);
    check_within(again, FP32, 1e-5);
    check_within(logits, BF16, 1e-6 * loss_scale);
    CHECK_MSG(memcmp(again.result, losses.result, used_bytes(&again)) == 0,
              "V %lld: the two calls differ in the loss", (long long)V);
}

TEST(cross_entropy) {
    start();
    const int64_t vocabs[] = {1, 7, 258, 264, 4099};
    FOR_EACH(const int64_t, T, SOME_T)
    FOR_EACH(const int64_t, V, vocabs) check_cross_entropy(T, V, 3);
    check_cross_entropy(3, 49152, 3);
    check_cross_entropy(3, 128256, 2);
    check_cross_entropy(3, 258, 30);  // one logit far above the others
}

// A maximum in the first, a middle or the last column, so large that it absorbs all others
TEST(cross_entropy_of_a_sure_model) {
    start();
    const int64_t V = 49157, peaks[] = {0, 1, 30000, V - 1};
    FOR_EACH(const int64_t, peak, peaks) {
        next_shape();
        const int32_t target = (int32_t)peak;
        const int32_t *d_target = ints(&target, 1);
        Tensor logits = tensor("logits", true, 1, V, 1), loss = tensor("loss", false, 1, 1, 0);
        Tensor scale = tensor("scale", false, 1, 1, 1);
        logits.host[peak] = 200;
        scale.host[0] = 1;
        fill(&logits), fill(&scale);
        Tensor *outs[] = {&loss, &logits};
        run(outs, 2, [&] {
            cross_entropy_forward_backward(fp(loss), bf(logits), d_target, fp(scale), 1, V);
        });
        CHECK(result_at(&loss, 0) == 0);
        for (int64_t v = 0; v < V; v++) CHECK(result_at(&logits, (size_t)v) == 0);
    }
}

TEST(a_logit_that_is_nan_makes_the_loss_nan) {
    start();
    const int64_t V = 1000, places[] = {0, 500, 999};
    FOR_EACH(const int64_t, place, places) {
        next_shape();
        const int32_t target = 3;
        Tensor logits = tensor("logits", true, 1, V, 1), loss = tensor("loss", false, 1, 1, 1);
        logits.host[place] = NAN;
        fill(&logits);
        Tensor *outs[] = {&loss};
        const int32_t *d_target = ints(&target, 1);
        run(outs, 1, [&] { cross_entropy_forward(fp(loss), bf(logits), d_target, 1, V); });
        CHECK(isnan(result_at(&loss, 0)));
    }
}

// A double on the device that starts at `start_value`; op adds to it. Twice, equal bits.
template <class Op>
static double device_double(double start_value, Op op) {
    double *sum = (double *)device_block(sizeof *sum), got[2];
    for (int i = 0; i < 2; i++) {
        device_upload(sum, &start_value, sizeof start_value);
        op(sum);
        device_download(&got[i], sum, sizeof *sum);
    }
    CHECK_MSG(memcmp(&got[0], &got[1], sizeof *got) == 0, "two runs differ");
    return got[0];
}

static void check_sum_of_losses(int64_t T) {
    next_shape();
    Tensor losses = tensor("losses", false, T, 1, 5);
    double want = 7.5;
    reference.losses_sum(&want, losses.host, T);
    const double got = device_double(7.5, [&](double *s) { losses_sum(s, fp(losses), T); });
    CHECK_MSG(fabs(got - want) <= 1e-11 * (double)(T + 1), "T %lld: %.17g, reference %.17g",
              (long long)T, got, want);
}

TEST(sum_of_losses) {
    start();
    const int64_t lengths[] = {0, 1, 5, 255, 256, 257, 5000};
    FOR_EACH(const int64_t, T, lengths) check_sum_of_losses(T);
}

// ------------------------------------------------------------------------------------------------
// Matmul: a sum of K products of two normal numbers is off by about 1e-7 per product in fp32, more
// where a tensor core truncates while aligning its terms

static void check_matmul(int64_t T, int64_t K, int64_t N) {
    next_shape();
    Tensor inp = tensor("inp", true, T, K, 1), weight = tensor("weight", true, N, K, 1);
    Tensor dout = tensor("dout", true, T, N, 1), out = tensor("out", true, T, N, 0);
    Tensor dinp = tensor("dinp", true, T, K, 0), dweight = tensor("dweight", false, N, K, 3);
    Tensor *outs[] = {&out}, *dinps[] = {&dinp}, *dweights[] = {&dweight};
    run(outs, 1, [&] { matmul_forward(bf(out), bf(inp), bf(weight), T, K, N); });
    reference.matmul_forward(out.host, inp.host, weight.host, T, K, N);
    check_within(out, BF16, 1e-6 * (double)K);
    Tensor resid = tensor("resid", true, T, N, 1), sum = tensor("sum", true, T, N, 0),
           *sums[] = {&sum};
    run(sums, 1, [&] { matmul_forward_add(bf(sum), bf(resid), bf(inp), bf(weight), T, K, N); });
    reference.matmul_forward_add(sum.host, resid.host, inp.host, weight.host, T, K, N);
    check_within(sum, BF16, 1e-6 * (double)(K + 1));
    run(dinps, 1, [&] { matmul_backward_input(bf(dinp), bf(dout), bf(weight), T, K, N); });
    reference.matmul_backward_input(dinp.host, dout.host, weight.host, T, K, N);
    check_within(dinp, BF16, 1e-6 * (double)N);
    for (bool accumulate : {true, false}) {
        if (T == 0 && !accumulate) continue;
        run(dweights, 1,
            [&] { matmul_backward_weight(fp(dweight), bf(dout), bf(inp), accumulate, T, K, N); });
        reference.matmul_backward_weight(dweight.host, dout.host, inp.host, accumulate, T, K, N);
        check_within(dweight, 1e-6, 1e-6 * (double)(T + 1));
    }
}

TEST(matmul) {
    start();
    const int64_t sizes[][2] = {{64, 64}, {192, 320}, {576, 192}, {64, 264}, {8, 8}};
    FOR_EACH(const int64_t, T, SOME_T)
    for (int i = 0; i < 5; i++) check_matmul(T, sizes[i][0], sizes[i][1]);
    check_matmul(3, 2048, 24);
    check_matmul(300, 16, 8);
}

// 256 + (1 + 2^-8) is 258 in bf16. The product rounded before the addition would be 1, and the sum
// 257, which is halfway between 256 and 258, rounded to 256.
TEST(matmul_rounds_after_adding) {
    start();
    Tensor resid = tensor("resid", true, 1, 8, 1), inp = tensor("inp", true, 1, 8, 1);
    Tensor weight = tensor("weight", true, 8, 8, 1), *outs[] = {&resid};
    for (int i = 0; i < 64; i++) weight.host[i] = 1;
    for (int i = 0; i < 8; i++)
        resid.host[i] = 256, inp.host[i] = i == 0 ? 1 : i == 1 ? 0x1p-8f : 0;
    fill(&resid), fill(&inp), fill(&weight);
    run(outs, 1, [&] { matmul_forward_add(bf(resid), bf(resid), bf(inp), bf(weight), 1, 8, 8); });
    for (int i = 0; i < 8; i++) resid.host[i] = 258;
    check_exact(resid);
}

// 6000 lengths in about 90 buckets
TEST(matmul_of_many_lengths) {
    start();
    const int64_t most = 6000;
    Tensor inp = tensor("inp", true, most, 8, 1), weight = tensor("weight", true, 8, 8, 1);
    Tensor out = tensor("out", true, most, 8, 0);
    for (int64_t T = 1; T <= most; T++)
        matmul_forward(bf(out) + 8 * (T - 1), bf(inp) + 8 * (T - 1), bf(weight), most - T + 1, 8,
                       8);
    matmul_forward(bf(out), bf(inp), bf(weight), most, 8, 8);
    reference.matmul_forward(out.host, inp.host, weight.host, most, 8, 8);
    device_download(out.result, out.device, all_bytes(&out));
    check_within(out, BF16, 1e-5);
}

// Far more than a model has
TEST(matmul_of_many_shapes) {
    start();
    const int64_t most = 66 * 8;
    Tensor inp = tensor("inp", true, 1, most, 1), weight = tensor("weight", true, most, most, 1);
    Tensor out = tensor("out", true, 1, most, 0);
    for (int64_t K = 8; K <= most; K += 8)
        for (int64_t N = 8; N <= most; N += 8)
            matmul_forward(bf(out), bf(inp), bf(weight), 1, K, N);
    reference.matmul_forward(out.host, inp.host, weight.host, 1, most, most);
    device_download(out.result, out.device, all_bytes(&out));
    check_within(out, BF16, 1e-6 * (double)most);
}

#ifdef CUDA_EMU
// An algorithm that supports the longest length of a bucket may not support another one: the
// emulator's that refuses takes only the length that was asked for.
TEST(matmul_of_a_length_that_its_algorithm_refuses) {
    start();
    setenv("EMU_LT_ALGO", "refuse", 1);
    for (int64_t T = 129; T <= 144; T += 5) check_matmul(T, 72, 80);
    unsetenv("EMU_LT_ALGO");
}
#endif

// ------------------------------------------------------------------------------------------------
// Optimizer

static void check_norm_of_gradients(int64_t n) {
    next_shape();
    Tensor x = tensor("x", false, n, 1, 1e3);
    double want = 0.25;
    reference.global_norm_squared(&want, x.host, (size_t)n);
    const double got =
        device_double(0.25, [&](double *s) { global_norm_squared(s, fp(x), (size_t)n); });
    CHECK_MSG(fabs(got - want) <= 1e-12 * want, "n %lld: %.17g, reference %.17g", (long long)n, got,
              want);
}

TEST(norm_of_gradients) {
    start();
    const int64_t lengths[] = {0, 1, 3, 4, 5, 1023, 4096, 4097, 300001};
    FOR_EACH(const int64_t, n, lengths) check_norm_of_gradients(n);
}

TEST(sum_of_gradients) {
    start();
    const int64_t lengths[] = {0, 1, 255, 256, 4097, 300001};
    FOR_EACH(const int64_t, n, lengths) {
        next_shape();
        Tensor x = tensor("x", false, n, 1, 1), sum = tensor("sum", false, n, 1, 1);
        Tensor *sums[] = {&sum};
        run(sums, 1, [&] { grads_add(fp(sum), fp(x), (size_t)n); });
        reference.grads_add(sum.host, x.host, (size_t)n);
        check_exact(sum);
    }
}

TEST(parts_are_summed_in_order) {
    start();
    const double parts[] = {1e16, 1, -1e16, 3};  // 1e16 + 1 = 1e16
    double *device = (double *)device_block(sizeof parts);
    device_upload(device, parts, sizeof parts);
    const double got = device_double(0.5, [&](double *s) { comm_sum_in_order(s, device, 4); });
    CHECK(got == 3.5);
}

// Squares beyond the range of fp32
TEST(norm_of_huge_and_tiny_gradients) {
    start();
    const double scales[] = {1e30, 1e-30};
    FOR_EACH(const double, scale, scales) {
        next_shape();
        Tensor x = tensor("x", false, 777, 1, scale);
        double want = 0;
        reference.global_norm_squared(&want, x.host, 777);
        const double got = device_double(0, [&](double *s) { global_norm_squared(s, fp(x), 777); });
        CHECK(want > 0 && fabs(got - want) <= 1e-12 * want);
    }
}

static void check_clip(double norm, double loss, float limit) {
    StepScalars *device = (StepScalars *)device_block(sizeof *device);
    StepScalars want = {loss, norm, 0, 0}, got = want;
    device_upload(device, &got, sizeof got);
    clip_scale(device, limit);
    device_download(&got, device, sizeof got);
    reference.clip_scale(&want, limit);
    CHECK_MSG(got.scale == want.scale, "norm %g, limit %g: scale %.9g, reference %.9g", norm, limit,
              got.scale, want.scale);
    CHECK(got.grad_norm == want.grad_norm || isnan(want.grad_norm));
    CHECK(memcmp(&got, &want, 2 * sizeof(double)) == 0);
}

TEST(clip_factor) {
    start();
    const double norms[] = {0, 0.25, 1, 9.3, 0.9e38, 1.1e38, 1e300, INFINITY, NAN};
    const double losses[] = {3.5, INFINITY, NAN};
    const float limits[] = {1, 0, -1, 0.01f};
    FOR_EACH(const double, norm, norms)
    FOR_EACH(const double, loss, losses)
    FOR_EACH(const float, limit, limits) {
        next_shape();
        check_clip(norm, loss, limit);
    }
}

struct Parameters {
    Tensor weights, lo, m, v, grads;  // lo: two 16-bit halves an element; only the device's count
    StepScalars *step;
    size_t n;
};

static Parameters parameters(size_t n) {
    const int64_t rows = (int64_t)n;
    Parameters p = {tensor("weights", true, rows, 1, 1),
                    tensor("lo", true, rows, 1, 1),
                    tensor("m", false, rows, 1, 1e-3),
                    tensor("v", false, rows, 1, 1e-3),
                    tensor("grads", false, rows, 1, 1),
                    NULL,
                    n};
    for (size_t i = 0; i < n; i++) {
        p.weights.host[i] = (float)test_rng_normal();
        p.v.host[i] = fabsf(p.v.host[i]);
    }
    fill(&p.v);
    weights_from_host(bf(p.weights), (uint16_t *)p.lo.device, p.weights.host, n);
    device_download(p.weights.start, p.weights.device, all_bytes(&p.weights));
    device_download(p.lo.start, p.lo.device, all_bytes(&p.lo));
    p.step = (StepScalars *)device_block(sizeof *p.step);
    return p;
}

static void device_adamw(const Parameters &p, float scale, AdamW hyper) {
    const StepScalars step = {1, 1, 1, scale};
    device_upload(p.step, &step, sizeof step);
    adamw_update(bf(p.weights), (uint16_t *)p.lo.device, fp(p.m), fp(p.v), fp(p.grads), p.step,
                 hyper, p.n);
}

static void check_masters(const Parameters &p, float lr) {
    float *master = (float *)host_block(p.n * 4), *high = (float *)host_block(p.n * 4);
    weights_to_host(master, bf(p.weights), (uint16_t *)p.lo.device, p.n);
    activations_to_host(high, bf(p.weights), p.n);
    for (size_t i = 0; i < p.n; i++) {
        const double want = p.weights.host[i];
        CHECK_MSG(fabs(master[i] - want) <= 1e-6 * fabs(want) + 1e-5 * lr,
                  "n %zu, weight %zu: %.9g, reference %.9g", p.n, i, master[i], want);
        const double nearest = fabs((double)bf16_round(master[i]) - master[i]);
        CHECK_MSG(fabs((double)high[i] - master[i]) == nearest, "%.9g kept as %.9g", master[i],
                  high[i]);
    }
}

static void check_adamw(size_t n, float weight_decay) {
    next_shape();
    Parameters p = parameters(n);
    AdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, weight_decay, 1};
    const float scale = 0.37f;
    const StepScalars step = {1, 1, 1, scale};
    for (; hyper.t <= 10; hyper.t++) {
        for (size_t i = 0; i < n; i++) p.grads.host[i] = (float)test_rng_normal();
        fill(&p.grads);
        device_adamw(p, scale, hyper);
        reference.adamw_update(p.weights.host, NULL, p.m.host, p.v.host, p.grads.host, &step, hyper,
                               n);
    }
    Tensor *all[] = {&p.weights, &p.lo, &p.m, &p.v};
    for (int i = 0; i < 4; i++) device_download(all[i]->result, all[i]->device, all_bytes(all[i]));
    check_masters(p, hyper.lr);
    check_within(p.m, 1e-6, 1e-6);
    check_within(p.v, 2e-6, 0);
    for (int i = 0; i < 2; i++)
        CHECK(memcmp(all[i]->start + used_bytes(all[i]), all[i]->result + used_bytes(all[i]),
                     all_bytes(all[i]) - used_bytes(all[i])) == 0);
}

TEST(adamw_of_ten_steps) {
    start();
    const size_t lengths[] = {0, 1, 3, 4, 7, 1024, 5001};
    FOR_EACH(const size_t, n, lengths) {
        check_adamw(n, 0.1f);
        check_adamw(n, 0);
    }
}

TEST(adamw_twice_gives_equal_bits) {
    start();
    Parameters p = parameters(1003);
    Tensor *outs[] = {&p.weights, &p.lo, &p.m, &p.v};
    const AdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3};
    run(outs, 4, [&] { device_adamw(p, 0.5f, hyper); });
    CHECK(memcmp(p.m.start, p.m.result, used_bytes(&p.m)) != 0);
}

TEST(adamw_with_scale_zero_changes_nothing) {
    start();
    Parameters p = parameters(1003);
    for (size_t i = 0; i < p.n; i++) p.grads.host[i] = i % 2 ? NAN : INFINITY;
    fill(&p.grads);
    Tensor *outs[] = {&p.weights, &p.lo, &p.m, &p.v};
    const AdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3};
    run(outs, 4, [&] { device_adamw(p, 0, hyper); });
    for (int i = 0; i < 4; i++)
        CHECK_MSG(memcmp(outs[i]->start, outs[i]->result, all_bytes(outs[i])) == 0, "%s changed",
                  outs[i]->name);
}

// For compute-sanitizer, whose tools are up to a hundred times slower: every operation once, in
// every form that has a kernel of its own. Matmul is apart, because its kernels are cuBLASLt's.
TEST(sanitizer_ops) {
    start();
    check_rows(5, 64);
    check_embedding(97, 192, 3, 8);
    check_norm_forward(5, 192, 2);
    check_norm_forward(2, 4104, 2);
    check_norm_backward(34, 192);
    check_norm_backward(3, 4104);
    check_qk_norm(5, {3, 1, 64}, 2);
    check_bias(34, 192);
    check_rope(5, {3, 1, 64});
    check_decode(3, {3, 1, 64});
    check_decode(2, {2, 2, 128});
    check_swiglu(5, 512, 2);
    check_cross_entropy(6, 264, 3);
    check_cross_entropy(3, 4099, 3);
    check_sum_of_losses(257);
    check_norm_of_gradients(4097);
    check_clip(9.3, 3.5, 1);
    check_adamw(1003, 0.1f);
}

TEST(sanitizer_matmul) {
    start();
    check_matmul(5, 64, 264);
}

// The time between two marks; the marks do not wait.
TEST(timer_is_within_the_clock) {
    start();
    const int64_t T = 40, C = 64;
    Tensor x = tensor("a", true, T, C, 1), w = tensor("w", true, C, C, 1);
    Tensor out = tensor("out", true, T, C, 1);
    const uint64_t waits = device_memory().waits;
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    device_timer_start();
    matmul_forward(bf(out), bf(x), bf(w), T, C, C);
    device_timer_stop();
    CHECK(device_memory().waits == waits);
    device_synchronize();
    clock_gettime(CLOCK_MONOTONIC, &b);
    const double clock_ms =
        (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) * 1e-6;
    const double ms = (double)device_timer_ms();
    CHECK_MSG(ms > 0 && ms <= clock_ms + 1e-3, "%g ms of %g", ms, clock_ms);
    CHECK(device_memory().waits == waits + 1);
}

// No operation allocates device memory.
TEST(operations_allocate_nothing) {
    start();
    const int64_t T = 40, C = 64;
    Tensor a = tensor("a", true, T, C, 1), b = tensor("b", true, T, C, 1);
    Tensor w = tensor("w", true, C, C, 1), dw = tensor("dw", false, C, C, 1);
    Tensor rstd = tensor("rstd", false, T, 1, 1);
    const uint64_t before = device_memory().count;
    matmul_forward(bf(a), bf(b), bf(w), T, C, C);
    matmul_backward_weight(fp(dw), bf(a), bf(b), true, T, C, C);
    rmsnorm_backward(bf(a), fp(dw), bf(b), bf(b), bf(w), fp(rstd), T, (int)C);
    device_synchronize();
    CHECK(device_memory().count == before);
}

TEST_MAIN()
