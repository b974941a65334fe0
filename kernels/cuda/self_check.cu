// Every operation against plain code on this very GPU: one thread per result, written from the
// contracts of kernels.h, sums in double. On a few small models with odd and empty documents.
//
// Inputs are exact in bf16, and each operation gets the results of the one before it as they are.
// A result stored as bf16 is then off by at most BF16 of its value (half of that is rounding; the
// fp32 value before it may lie across a border), and by FP32 of the sum of its terms' magnitudes.
// In attention the probabilities and dS are rounded to bf16 too: the errors of terms are
// independent and add up to 4 BF16 of the root of their sum of squares at most.

#include <stdarg.h>

#include "../comm/comm.h"
#include "attention.cuh"

extern "C" {
#include "../../data/base/error.h"
#include "../../data/base/hash.h"
}

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
// Operands

enum { MAX_BLOCKS = 64, BEHIND_BYTES = 256, MAX_LEN_DOCS = 8 };

struct Block {
    void *p;
    size_t bytes;
};

static Block blocks[MAX_BLOCKS];
static int num_blocks;
static uint64_t random_state;
static char wrong[400];       // the first wrong result; empty: none
static char sizes_text[160];  // of the model that is checked now
static const char *operation = "";

__attribute__((format(printf, 1, 2))) static void set_wrong(const char *format, ...) {
    va_list args;
    if (wrong[0]) return;
    va_start(args, format);
    vsnprintf(wrong, sizeof wrong, format, args);
    va_end(args);
}

// All but the first `keep`
static void free_blocks(int keep) {
    while (num_blocks > keep) device_free(blocks[--num_blocks].p);
}

// Everything is NaN, and so are the bytes behind it, which nothing may write.
static void *take(size_t bytes) {
    assert(num_blocks < MAX_BLOCKS);
    void *p = device_malloc(bytes + BEHIND_BYTES);
    if (!p)
        device_fail("is another process using the GPU?",
                    "self-check: expected %zu bytes of free device memory", bytes);
    CUDA_CHECK(cudaMemsetAsync(p, 0xff, bytes + BEHIND_BYTES, cuda_stream()));
    blocks[num_blocks++] = {p, bytes};
    return p;
}
template <class T>
static T *take_n(int64_t n) {
    return (T *)take((size_t)n * sizeof(T));
}

static void *host_take(size_t bytes) {
    void *p = malloc(bytes + 1);
    if (!p) exit_with(EXIT_HOST_MEMORY, "", "self-check: expected %zu bytes", bytes);
    return p;
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

// Between -scale and scale, exact in bf16 where scale is a power of 2; freed by the caller
static float *random_host(int64_t n, float scale) {
    float *x = (float *)host_take((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = scale / 128 * (float)((int)(mix64(++random_state) >> 56) - 128);
    return x;
}
static real *random_real(int64_t n, float scale) {
    float *host = random_host(n, scale);
    real *x = on_device(host, n);
    free(host);
    return x;
}
static floatX *random_bf16(int64_t n, float scale) {
    float *host = random_host(n, scale);
    floatX *x = take_n<floatX>(n);
    weights_from_host(x, NULL, host, (size_t)n);
    free(host);
    return x;
}

template <class T, class F>
static void compute(T *out, int64_t n, const F &result) {
    if (n == 0) return;
    plain_kernel<T, F>
        <<<(unsigned)ceil_div<int64_t>(n, 128), 128, 0, cuda_stream()>>>(out, n, result);
    LAUNCH_CHECK("plain_kernel");
}

// ------------------------------------------------------------------------------------------------
// Comparing

static double value_at(const void *host, size_t i, size_t element_bytes) {
    float x;
    uint16_t bits;
    if (element_bytes == sizeof(double)) return ((const double *)host)[i];
    memcpy(&x, (const char *)host + i * sizeof x, element_bytes == sizeof x ? sizeof x : 0);
    if (element_bytes == sizeof x) return x;
    memcpy(&bits, (const char *)host + i * sizeof bits, sizeof bits);
    return master_join(bits, 0);
}

// The result of an operation against `wanted`. `behind`: a whole block, followed by NaN.
static void compare(const char *name, const void *got, int64_t n, size_t element_bytes,
                    double relative, const Want *wanted, bool behind) {
    const size_t bytes = (size_t)n * element_bytes, all = bytes + (behind ? BEHIND_BYTES : 0);
    Want *want = (Want *)host_take((size_t)n * sizeof *want);
    unsigned char *host = (unsigned char *)host_take(all);
    device_download(want, wanted, (size_t)n * sizeof *want);
    device_download(host, got, all);
    for (int64_t i = 0; i < n && !wrong[0]; i++) {
        const double x = value_at(host, (size_t)i, element_bytes), y = want[i].value;
        const double tolerance = relative * fabs(y) + want[i].tolerance;
        if (!(fabs(x - y) <= tolerance))
            set_wrong("%s: %s: %s[%lld]: expected %.7g within %.2g, found %.7g", operation,
                      sizes_text, name, (long long)i, y, tolerance, x);
    }
    for (size_t i = bytes; i < all; i++)
        if (host[i] != 0xff)
            set_wrong("%s: %s: it wrote behind the end of %s", operation, sizes_text, name);
    free(host);
    free(want);
}

// f(i) is what got[i] should be. T floatX: rounded to bf16, unless `exact`.
template <class T, class F>
static void expect(const char *name, const T *got, int64_t n, const F &f, bool exact = false) {
    Want *want = take_n<Want>(n);
    device_join();
    compute(want, n, f);
    bool behind = false;
    for (int b = 0; b < num_blocks; b++)
        behind |= blocks[b].p == got && blocks[b].bytes == (size_t)n * sizeof(T);
    compare(name, got, n, sizeof(T), sizeof(T) == 2 && !exact ? BF16 : 0, want, behind);
}

// Names the operation that is checked next.
static void checking(const char *name) { operation = name; }
static void describe_check(char *text, size_t capacity) {
    snprintf(text, capacity, "self-check of %s: %s", operation, sizes_text);
}

// ------------------------------------------------------------------------------------------------
// The models

struct Model {
    int lengths[MAX_LEN_DOCS];  // of documents; ends with -1
    int C, F, V;
    HeadShape heads;
};
static const Model models[] = {
    {{1, 0, 66, 131, 0, 3, -1}, 192, 104, 264, {3, 1, 64}},
    {{0, 130, 65, -1}, 1160, 72, 1000, {2, 1, 128}},
    // with --self-check
    {{257, 5, 0, 64, 128, 1, -1}, 576, 264, 2000, {8, 2, 64}},
    {{129, 127, 0, 0, 300, -1}, 2048, 104, 504, {2, 2, 64}},
    {{63, 1, 333, 2, -1}, 3072, 136, 1032, {3, 1, 128}},
    {{1, 1, 1, 257, -1}, 4096, 64, 4000, {4, 2, 128}},
};
enum { QUICK_MODELS = 2, NUM_MODELS = sizeof models / sizeof *models, SOME_ROWS = 37 };

// One micro-batch of a model
struct Packed {
    const Model *model;
    HeadShape heads;
    int T, num_docs, max_len;
    int C, F, V, rows;  // rows: of operations that work row by row, an odd number
    int32_t *position_ids, *tokens, *order, *first, *end;  // first, end: of a token's document
    real *rope_table;
    VarlenInfo docs;
};

// positions sorted by (token, position)
static int32_t *sorted(const int32_t *tokens, int T, int V) {
    int32_t *order = (int32_t *)host_take((size_t)T * sizeof *order);
    int n = 0;
    for (int v = 0; v < V; v++)
        for (int t = 0; t < T; t++)
            if (tokens[t] == v) order[n++] = t;
    return order;
}

static int32_t *work_list(const int32_t *cu_seqlens, const Packed &p) {
    const size_t most = attention_plan_size(p.T, p.num_docs);
    int32_t *host = (int32_t *)host_take(most * sizeof *host);
    const size_t n = attention_plan(host, cu_seqlens, p.num_docs, p.heads);
    int32_t *work = on_device(host, (int64_t)n);
    free(host);
    return work;
}

static Packed pack(const Model *m) {
    int32_t cu_seqlens[MAX_LEN_DOCS + 1] = {0}, *ints[4];
    Packed p = {};
    p.model = m, p.heads = m->heads, p.C = m->C, p.F = m->F, p.V = m->V, p.rows = SOME_ROWS;
    for (int len; (len = m->lengths[p.num_docs]) >= 0; p.num_docs++) {
        cu_seqlens[p.num_docs + 1] = p.T += len;
        if (len > p.max_len) p.max_len = len;
    }
    for (int32_t *&x : ints) x = (int32_t *)host_take((size_t)p.T * sizeof *x);
    for (int d = 0; d < p.num_docs; d++)
        for (int t = cu_seqlens[d]; t < cu_seqlens[d + 1]; t++) {
            ints[0][t] = t - cu_seqlens[d], ints[1][t] = cu_seqlens[d],
            ints[2][t] = cu_seqlens[d + 1];
            ints[3][t] = t % 3 == 0 ? p.V / 2 : (int32_t)(mix64((uint64_t)t) % (uint64_t)p.V);
        }
    int32_t *order = sorted(ints[3], p.T, p.V);
    snprintf(sizes_text, sizeof sizes_text,
             "%d tokens in %d documents, C %d, F %d, V %d, heads %d/%d x %d", p.T, p.num_docs, p.C,
             p.F, p.V, p.heads.num_heads, p.heads.num_kv_heads, p.heads.head_dim);
    p.position_ids = on_device(ints[0], p.T), p.first = on_device(ints[1], p.T);
    p.end = on_device(ints[2], p.T), p.tokens = on_device(ints[3], p.T);
    p.order = on_device(order, p.T);
    p.rope_table = random_real((int64_t)p.max_len * p.heads.head_dim, 1);
    p.docs = {on_device(cu_seqlens, p.num_docs + 1), work_list(cu_seqlens, p), p.T, p.num_docs,
              p.max_len};
    for (int32_t *x : ints) free(x);
    free(order);
    return p;
}

// ------------------------------------------------------------------------------------------------
// Rows, embedding

struct RowOf {
    const floatX *x;
    const int32_t *rows;
    int C;
    __device__ Want operator()(int64_t i) const {
        return {at(x, rows[i / C] * (int64_t)C + i % C), 0};
    }
};

// Row t = rows[k] of the result is row k, every other row is 0.
struct ScatteredRow {
    const floatX *x;
    const int32_t *rows;
    int n, C;
    __device__ Want operator()(int64_t i) const {
        for (int k = 0; k < n; k++)
            if (rows[k] == i / C) return {at(x, (int64_t)k * C + i % C), 0};
        return {0, 0};
    }
};

struct TokenGradient {
    const real *start;
    const floatX *dout;
    const int32_t *tokens;
    int T, C;
    __device__ Want operator()(int64_t i) const {
        double sum = start[i], size = fabs(sum);
        for (int t = 0; t < T; t++)
            if (tokens[t] == i / C) {
                const double x = at(dout, (int64_t)t * C + i % C);
                sum += x, size += fabs(x);
            }
        return {sum, FP32 * size};
    }
};

static void check_rows(const Packed &p) {
    const int n = p.rows / 2, C = p.C;
    int32_t every_second[SOME_ROWS];
    for (int k = 0; k < n; k++) every_second[k] = 2 * k + 1;
    const int32_t *rows = on_device(every_second, n);
    floatX *all = random_bf16((int64_t)p.rows * C, 1), *some = take_n<floatX>((int64_t)n * C);
    floatX *back = take_n<floatX>((int64_t)p.rows * C);
    checking("gather_rows");
    gather_rows(some, all, rows, n, C);
    expect("out", some, (int64_t)n * C, RowOf{all, rows, C}, true);
    checking("scatter_rows");
    scatter_rows(back, some, rows, n, p.rows, C);
    expect("out", back, (int64_t)p.rows * C, ScatteredRow{some, rows, n, C}, true);
}

static void check_embedding(const Packed &p) {
    const int C = p.C < 256 ? p.C : 256;  // all of a large embedding would take long
    const int64_t n = (int64_t)p.T * C, num_weights = (int64_t)p.V * C;
    floatX *weight = random_bf16(num_weights, 1), *out = take_n<floatX>(n);
    floatX *dout = random_bf16(n, 1);
    real *dweight = random_real(num_weights, 1), *start = copy_of(dweight, num_weights);
    checking("embedding_forward");
    embedding_forward(out, p.tokens, weight, p.T, C);
    expect("out", out, n, RowOf{weight, p.tokens, C}, true);
    checking("embedding_backward");
    embedding_backward(dweight, dout, p.tokens, p.order, p.T, C);
    expect("dweight", dweight, num_weights, TokenGradient{start, dout, p.tokens, p.T, C});
}

// ------------------------------------------------------------------------------------------------
// RMSNorm

struct Rstd {
    const floatX *resid;
    double eps;
    int C;
    __device__ Want operator()(int64_t t) const {
        double squares = 0;
        for (int c = 0; c < C; c++) squares += at(resid, t * C + c) * at(resid, t * C + c);
        const double rstd = 1 / sqrt(squares / C + eps);
        return {rstd, FP32 * rstd};
    }
};

struct Normed {
    const floatX *resid, *weight;
    const real *rstd;
    int C;
    __device__ Want operator()(int64_t i) const {
        const double x = at(resid, i) * rstd[i / C] * at(weight, i % C);
        return {x, FP32 * fabs(x)};
    }
};

// d normed / d resid, of y = x rstd(x) w: rstd (g - y0 mean(g y0)), g = dnormed w, y0 = x rstd
struct NormGradient {
    const floatX *start, *dnormed, *resid, *weight;
    const real *rstd;
    int C;
    __device__ Want operator()(int64_t i) const {
        const int64_t row = i / C * C;
        const double r = rstd[i / C], g = at(dnormed, i) * at(weight, i % C), y = at(resid, i) * r;
        double sum = 0, size = 0;
        for (int c = 0; c < C; c++) {
            const double term = at(dnormed, row + c) * at(weight, c) * at(resid, row + c) * r;
            sum += term, size += fabs(term);
        }
        return {at(start, i) + r * (g - y * sum / C),
                FP32 * (fabs(at(start, i)) + r * (fabs(g) + fabs(y) * size / C))};
    }
};

struct NormWeightGradient {
    const real *start;
    const floatX *dnormed, *resid;
    const real *rstd;
    int T, C;
    __device__ Want operator()(int64_t c) const {
        double sum = start[c], size = fabs(sum);
        for (int t = 0; t < T; t++) {
            const int64_t i = (int64_t)t * C + c;
            const double term = at(dnormed, i) * at(resid, i) * rstd[t];
            sum += term, size += fabs(term);
        }
        return {sum, FP32 * size};
    }
};

static void check_norms(const Packed &p) {
    const int T = p.rows, C = p.C;
    const int64_t n = (int64_t)T * C;
    const float eps = 1e-5f;
    floatX *resid = random_bf16(n, 1), *weight = random_bf16(C, 1), *normed = take_n<floatX>(n);
    floatX *dnormed = random_bf16(n, 1), *dresid = random_bf16(n, 1), *start = copy_of(dresid, n);
    real *rstd = take_n<real>(T), *dweight = random_real(C, 1),
         *dweight_start = copy_of(dweight, C);
    checking("rmsnorm_forward");
    rmsnorm_forward(normed, rstd, resid, weight, eps, T, C);
    expect("rstd", rstd, T, Rstd{resid, eps, C});
    expect("normed", normed, n, Normed{resid, weight, rstd, C});
    checking("rmsnorm_backward");
    rmsnorm_backward(dresid, dweight, dnormed, resid, weight, rstd, T, C);
    expect("dresid", dresid, n, NormGradient{start, dnormed, resid, weight, rstd, C});
    expect("dweight", dweight, C, NormWeightGradient{dweight_start, dnormed, resid, rstd, T, C});
}

// ------------------------------------------------------------------------------------------------
// Matmul, SwiGLU

// start or resid (rows, cols) + the sum over k < depth of
// a[row a_row + k a_step] b[col b_row + k b_step]
struct Product {
    const real *start;  // NULL: 0
    const floatX *resid, *a, *b;
    int64_t cols, depth, a_row, a_step, b_row, b_step;
    __device__ Want operator()(int64_t i) const {
        double sum = start ? start[i] : resid ? at(resid, i) : 0, size = fabs(sum);
        for (int64_t k = 0; k < depth; k++) {
            const double term =
                at(a, i / cols * a_row + k * a_step) * at(b, i % cols * b_row + k * b_step);
            sum += term, size += fabs(term);
        }
        return {sum, FP32 * size};
    }
};

static void check_matmul(const Packed &p) {
    const int64_t T = p.T, K = p.C, N = p.F;
    floatX *inp = random_bf16(T * K, 1), *weight = random_bf16(N * K, 1),
           *dout = random_bf16(T * N, 1);
    floatX *out = take_n<floatX>(T * N), *dinp = take_n<floatX>(T * K);
    floatX *resid = random_bf16(T * N, 1);
    real *dweight = random_real(N * K, 1), *start = copy_of(dweight, N * K);
    checking("matmul_forward");
    matmul_forward(out, inp, weight, T, K, N);
    expect("out", out, T * N, Product{NULL, NULL, inp, weight, N, K, K, 1, K, 1});
    checking("matmul_forward_add");
    matmul_forward_add(out, resid, inp, weight, T, K, N);
    expect("out", out, T * N, Product{NULL, resid, inp, weight, N, K, K, 1, K, 1});
    checking("matmul_backward_input");
    matmul_backward_input(dinp, dout, weight, T, K, N);
    expect("dinp", dinp, T * K, Product{NULL, NULL, dout, weight, K, N, N, 1, 1, K});
    checking("matmul_backward_weight");
    for (const real *before : {(const real *)start, (const real *)NULL}) {
        matmul_backward_weight(dweight, dout, inp, before != NULL, T, K, N);
        expect("dweight", dweight, N * K, Product{before, NULL, dout, inp, K, T, 1, N, 1, K});
    }
}

struct Swiglu {
    const floatX *gate_up;
    int64_t F;
    __device__ Want operator()(int64_t i) const {
        const double gate = at(gate_up, i / F * 2 * F + i % F),
                     up = at(gate_up, i / F * 2 * F + F + i % F);
        return {gate / (1 + exp(-gate)) * up, FP32 * fabs(gate * up)};
    }
};

struct SwigluGradient {
    const floatX *dout, *gate_up;
    int64_t F;
    __device__ Want operator()(int64_t i) const {
        const int64_t row = i / (2 * F), col = i % (2 * F), c = col % F;
        const double gate = at(gate_up, row * 2 * F + c), up = at(gate_up, row * 2 * F + F + c);
        const double d = at(dout, row * F + c), s = 1 / (1 + exp(-gate));
        if (col >= F) return {d * gate * s, FP32 * fabs(d * gate)};
        return {d * up * s * (1 + gate * (1 - s)), FP32 * fabs(d * up) * (1 + fabs(gate))};
    }
};

static void check_swiglu(const Packed &p) {
    const int64_t T = p.rows, F = p.F;
    floatX *gate_up = random_bf16(2 * T * F, 8), *out = take_n<floatX>(T * F);
    floatX *dout = random_bf16(T * F, 1), *dgate_up = take_n<floatX>(2 * T * F);
    checking("swiglu_forward");
    swiglu_forward(out, gate_up, T, F);
    expect("out", out, T * F, Swiglu{gate_up, F});
    checking("swiglu_backward");
    swiglu_backward(dgate_up, dout, gate_up, T, F);
    expect("dgate_up", dgate_up, 2 * T * F, SwigluGradient{dout, gate_up, F});
}

// ------------------------------------------------------------------------------------------------
// RoPE, attention

// A value and its partner turned by the angle whose cosine and sine are table[0], table[1]; back:
// by minus that. `high`: the result is the second of the pair.
__device__ Want turned(Want low, Want high, const real *table, bool back, bool is_high) {
    const double c = table[0], s = back ? -table[1] : table[1];
    const Want &own = is_high ? high : low, &other = is_high ? low : high;
    const double x = own.value * c, y = other.value * (is_high ? s : -s);
    return {x + y,
            own.tolerance * fabs(c) + other.tolerance * fabs(s) + FP32 * (fabs(x) + fabs(y))};
}

// Element i of (T,H+2*Hkv,D)
struct QkvPlace {
    int64_t t;
    int head, d, low, high;  // low, high: columns of the pair that RoPE turns
    const real *table;       // cosine and sine of that pair
    __device__ QkvPlace(int64_t i, HeadShape h, const int32_t *position_ids,
                        const real *rope_table) {
        const int heads = h.num_heads + 2 * h.num_kv_heads, half = h.head_dim / 2;
        t = i / h.head_dim / heads;
        head = (int)(i / h.head_dim % heads), d = (int)(i % h.head_dim);
        low = d % half, high = low + half;
        table = rope_table + ((int64_t)position_ids[t] * half + low) * 2;
    }
};

struct Roped {
    const floatX *start;
    const int32_t *position_ids;
    const real *rope_table;
    HeadShape heads;
    __device__ Want operator()(int64_t i) const {
        const QkvPlace p(i, heads, position_ids, rope_table);
        if (p.head >= heads.num_heads + heads.num_kv_heads) return {at(start, i), 0};
        return turned({at(start, i - p.d + p.low), 0}, {at(start, i - p.d + p.high), 0}, p.table,
                      false, p.d == p.high);
    }
};

// Attention's operands, and its intermediate results in full: (H, T, max_len), the last index being
// a key's position in the document
struct Attention {
    HeadShape heads;
    int T, max_len;
    const int32_t *first, *end, *position_ids;
    const real *rope_table, *lse;
    const floatX *qkv, *out, *dout;
    Want *scores, *dscores;

    __device__ int group() const { return heads.num_heads / heads.num_kv_heads; }
    __device__ double scale() const { return 1 / sqrt((double)heads.head_dim); }
    __device__ int64_t row(int64_t t, int head) const {  // of qkv
        return (t * (heads.num_heads + 2 * heads.num_kv_heads) + head) * heads.head_dim;
    }
    __device__ int64_t key(int64_t t, int h) const { return row(t, heads.num_heads + h / group()); }
    __device__ int64_t value(int64_t t, int h) const {
        return row(t, heads.num_heads + heads.num_kv_heads + h / group());
    }
    __device__ int64_t out_row(int64_t t, int h) const {
        return (t * heads.num_heads + h) * heads.head_dim;
    }
    __device__ int64_t pair(int h, int64_t t, int j) const {
        return (h * (int64_t)T + t) * max_len + j;
    }
    __device__ int last(int64_t t) const { return (int)(t - first[t]); }  // key that t attends to
    __device__ double p(int h, int64_t t, int j) const {
        return exp(scores[pair(h, t, j)].value - lse[(int64_t)h * T + t]);
    }
    __device__ Want dot(const floatX *x, int64_t i, const floatX *y, int64_t j) const {
        double sum = 0, size = 0;
        for (int d = 0; d < heads.head_dim; d++) {
            const double term = at(x, i + d) * at(y, j + d);
            sum += term, size += fabs(term);
        }
        return {sum, FP32 * size};
    }
};

struct Scores : Attention {
    __device__ Want operator()(int64_t i) const {
        const int j = (int)(i % max_len), h = (int)(i / max_len / T);
        const int64_t t = i / max_len % T;
        if (j > last(t)) return {-INFINITY, 0};
        const Want s = dot(qkv, row(t, h), qkv, key(first[t] + j, h));
        return {s.value * scale(), s.tolerance * scale()};
    }
};

struct Lse : Attention {
    __device__ Want operator()(int64_t i) const {
        const Want *s = scores + i * max_len;
        double top = -INFINITY, sum = 0, tolerance = 0;
        for (int j = 0; j <= last(i % T); j++) top = fmax(top, s[j].value);
        for (int j = 0; j <= last(i % T); j++) {
            sum += exp(s[j].value - top);
            tolerance = fmax(tolerance, s[j].tolerance);
        }
        return {top + log(sum), tolerance + FP32 * (1 + fabs(top))};
    }
};

// A sum whose terms have been rounded to bf16
struct RoundedSum {
    double sum = 0, squares = 0, tolerance = 0;
    __device__ void add(double term, double its_tolerance) {
        sum += term, squares += term * term, tolerance += its_tolerance + FP32 * fabs(term);
    }
    __device__ Want want() const { return {sum, 4 * BF16 * sqrt(squares) + tolerance}; }
};

struct AttentionOut : Attention {
    __device__ Want operator()(int64_t i) const {
        const int d = (int)(i % heads.head_dim), h = (int)(i / heads.head_dim % heads.num_heads);
        const int64_t t = i / heads.head_dim / heads.num_heads;
        RoundedSum sum;
        for (int j = 0; j <= last(t); j++) {
            const double term = p(h, t, j) * at(qkv, value(first[t] + j, h) + d);
            sum.add(term, fabs(term) * scores[pair(h, t, j)].tolerance);
        }
        return sum.want();
    }
};

// dS = P (dP - delta), delta = rowsum(dout * out)
struct ScoreGradients : Attention {
    __device__ Want operator()(int64_t i) const {
        const int j = (int)(i % max_len), h = (int)(i / max_len / T);
        const int64_t t = i / max_len % T;
        if (j > last(t)) return {0, 0};
        const Want dp = dot(dout, out_row(t, h), qkv, value(first[t] + j, h));
        const Want delta = dot(dout, out_row(t, h), out, out_row(t, h));
        const double ds = p(h, t, j) * (dp.value - delta.value);
        return {ds, fabs(ds) * scores[i].tolerance + p(h, t, j) * (dp.tolerance + delta.tolerance)};
    }
};

struct QkvGradient : Attention {
    __device__ Want query(int64_t t, int h, int d) const {
        RoundedSum sum;
        for (int j = 0; j <= last(t); j++) {
            const Want ds = dscores[pair(h, t, j)];
            const double k = at(qkv, key(first[t] + j, h) + d) * scale();
            sum.add(ds.value * k, ds.tolerance * fabs(k));
        }
        return sum.want();
    }
    // of key or value head `kv`: the sum over the queries of its group that attend to token t
    __device__ Want key_or_value(int64_t t, int kv, int d, bool is_value) const {
        const int j = last(t);
        RoundedSum sum;
        for (int h = kv * group(); h < (kv + 1) * group(); h++)
            for (int64_t other = t; other < end[t]; other++) {
                const Want ds = dscores[pair(h, other, j)];
                const double q = at(qkv, row(other, h) + d) * scale();
                const double term = p(h, other, j) * at(dout, out_row(other, h) + d);
                if (is_value)
                    sum.add(term, fabs(term) * scores[pair(h, other, j)].tolerance);
                else
                    sum.add(ds.value * q, ds.tolerance * fabs(q));
            }
        return sum.want();
    }
    __device__ Want operator()(int64_t i) const {
        const QkvPlace x(i, heads, position_ids, rope_table);
        const int kv = x.head - heads.num_heads, v = kv - heads.num_kv_heads;
        if (v >= 0) return key_or_value(x.t, v, x.d, true);
        const Want low = kv < 0 ? query(x.t, x.head, x.low) : key_or_value(x.t, kv, x.low, false);
        const Want high =
            kv < 0 ? query(x.t, x.head, x.high) : key_or_value(x.t, kv, x.high, false);
        return turned(low, high, x.table, true, x.d == x.high);
    }
};

template <class F>
static F with(const Attention &a) {
    F f;
    static_cast<Attention &>(f) = a;
    return f;
}

static void check_rope(const Packed &p) {
    const HeadShape h = p.heads;
    const int64_t n = (int64_t)p.T * (h.num_heads + 2 * h.num_kv_heads) * h.head_dim;
    floatX *qkv = random_bf16(n, 1), *start = copy_of(qkv, n);
    checking("rope_forward");
    rope_forward(qkv, p.position_ids, p.rope_table, p.T, h);
    expect("qkv", qkv, n, Roped{start, p.position_ids, p.rope_table, h});
}

static int64_t num_outputs(const Packed &p) {  // of attention
    return (int64_t)p.T * p.heads.num_heads * p.heads.head_dim;
}
static int64_t num_keys_and_values(const Packed &p) {
    return 2 * (int64_t)p.T * p.heads.num_kv_heads * p.heads.head_dim;
}

// Random operands, and the results of attention_forward with the scores they should be made of
static Attention attend(const Packed &p) {
    const int64_t n_out = num_outputs(p), n_lse = (int64_t)p.T * p.heads.num_heads;
    real *lse = take_n<real>(n_lse);
    floatX *qkv = random_bf16(n_out + num_keys_and_values(p), 2), *dout = random_bf16(n_out, 1),
           *out = take_n<floatX>(n_out);
    Want *scores = take_n<Want>(n_lse * p.max_len), *dscores = take_n<Want>(n_lse * p.max_len);
    const Attention a = {p.heads, p.T, p.max_len, p.first, p.end,  p.position_ids, p.rope_table,
                         lse,     qkv, out,       dout,    scores, dscores};
    attention_forward(out, lse, qkv, &p.docs, p.heads);
    compute(scores, n_lse * p.max_len, with<Scores>(a));
    return a;
}

static void check_attention(const Packed &p) {
    static char name[48];
    const int64_t n_out = num_outputs(p), n_qkv = n_out + num_keys_and_values(p);
    const int64_t n_lse = (int64_t)p.T * p.heads.num_heads;
    snprintf(name, sizeof name, "attention_forward (%s)", attention_describe());
    checking(name);
    const Attention a = attend(p);
    expect("lse", a.lse, n_lse, with<Lse>(a));
    expect("out", a.out, n_out, with<AttentionOut>(a));
    if (wrong[0]) return;
    floatX *dqkv = take_n<floatX>(n_qkv);
    real *delta = take_n<real>(n_lse);
    snprintf(name, sizeof name, "attention_backward (%s)", attention_describe());
    attention_backward(dqkv, delta, a.dout, a.qkv, a.out, a.lse, p.position_ids, p.rope_table,
                       &p.docs, p.heads);
    compute(a.dscores, n_lse * p.max_len, with<ScoreGradients>(a));
    expect("dqkv", dqkv, n_qkv, with<QkvGradient>(a));
}

// In the cache a document begins one row after its first token.
struct CacheStart {
    const int32_t *first;
    __device__ int32_t operator()(int64_t t) const { return first[t] + 1; }
};
struct CachedRows : Attention {
    __device__ Want operator()(int64_t i) const {
        const int width = 2 * heads.num_kv_heads * heads.head_dim;
        return {at(qkv, row(i / width, heads.num_heads) + i % width), 0};
    }
};

// After check_attention: decoding finds all tokens of a document in the cache, and attends alike.
static void check_cache(const Packed &p) {
    const int64_t n = num_keys_and_values(p), width = n / p.T;
    const Attention a = attend(p);
    int32_t *first_rows = take_n<int32_t>(p.T);
    floatX *cache = take_n<floatX>(width + n), *out = take_n<floatX>(num_outputs(p));
    compute(first_rows, p.T, CacheStart{p.first});
    checking("kv_store");
    kv_store(cache, a.qkv, first_rows, p.position_ids, p.T, p.heads);
    expect("cache", cache + width, n, with<CachedRows>(a), true);
    if (wrong[0]) return;
    checking("attention_decode");
    attention_decode(out, a.qkv, cache, first_rows, p.position_ids, p.T, p.heads);
    expect("out", out, num_outputs(p), with<AttentionOut>(a));
}

// ------------------------------------------------------------------------------------------------
// Cross-entropy

struct CrossEntropy {
    const floatX *logits;
    const int32_t *targets;
    int V;
    __device__ double lse(int64_t t) const {
        double top = -INFINITY, sum = 0;
        for (int v = 0; v < V; v++) top = fmax(top, at(logits, t * V + v));
        for (int v = 0; v < V; v++) sum += exp(at(logits, t * V + v) - top);
        return top + log(sum);
    }
};

struct Loss : CrossEntropy {
    __device__ Want operator()(int64_t t) const {
        if (targets[t] < 0) return {0, 0};
        const double target = at(logits, t * V + targets[t]);
        return {lse(t) - target, FP32 * (fabs(lse(t)) + fabs(target))};
    }
};

struct LogitGradient : CrossEntropy {
    const double *lses;  // of each row
    const real *loss_scale;
    __device__ Want operator()(int64_t i) const {
        const int64_t t = i / V;
        if (targets[t] < 0) return {0, 0};
        const double p = exp(at(logits, i) - lses[t]);
        return {(p - (targets[t] == i % V)) * *loss_scale,
                FP32 * (p + (targets[t] == i % V)) * *loss_scale};
    }
};

struct RowLse : CrossEntropy {
    __device__ double operator()(int64_t t) const { return lse(t); }
};

struct LossSum {
    const real *losses;
    int64_t T;
    double start;
    __device__ Want operator()(int64_t) const {
        double sum = start;
        for (int64_t t = 0; t < T; t++) sum += losses[t];
        return {sum, FP32 * sum};
    }
};

static void check_cross_entropy(const Packed &p) {
    const int64_t T = p.rows, V = p.V;
    int32_t host[SOME_ROWS];
    for (int t = 0; t < T; t++)
        host[t] = t % 5 == 3 ? -1 : (int32_t)(mix64((uint64_t)t) % (uint64_t)V);
    const float scale = 1.0f / 32;
    const double start = 3;
    const int32_t *targets = on_device(host, T);
    const real *loss_scale = on_device(&scale, 1);
    floatX *logits = random_bf16(T * V, 8), *dlogits = copy_of(logits, T * V);
    real *losses = take_n<real>(T), *again = take_n<real>(T);
    double *lses = take_n<double>(T), *sum = on_device(&start, 1);
    const CrossEntropy c = {logits, targets, (int)V};
    compute(lses, T, RowLse{c});
    checking("cross_entropy_forward");
    cross_entropy_forward(losses, logits, targets, T, V);
    expect("losses", losses, T, Loss{c});
    checking("losses_sum");
    losses_sum(sum, losses, T);
    expect("sum", sum, 1, LossSum{losses, T, start});
    checking("cross_entropy_forward_backward");
    cross_entropy_forward_backward(again, dlogits, targets, loss_scale, T, V);
    expect("losses", again, T, Loss{c});
    expect("dlogits", dlogits, T * V, LogitGradient{c, lses, loss_scale});
}

// ------------------------------------------------------------------------------------------------
// Optimizer

struct Added {
    const real *x, *y;
    __device__ Want operator()(int64_t i) const {
        return {(double)x[i] + y[i], FP32 * (fabs(x[i]) + fabs(y[i]))};
    }
};

struct SquaresSum {
    const real *x;
    int64_t n;
    double start;
    __device__ Want operator()(int64_t) const {
        double sum = start;
        for (int64_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
        return {sum, FP32 * sum};
    }
};

// grad_norm and scale, in this order
struct Clipped {
    double norm_squared, max_norm;
    __device__ Want operator()(int64_t i) const {
        const double norm = sqrt(norm_squared), x = i == 0 ? norm : fmin(1.0, max_norm / norm);
        return {x, FP32 * x};
    }
};

// m (part 0), v (1) or the weights (2) after an update
struct Updated {
    const real *m, *v, *w, *g;
    AdamW a;
    double scale;
    int part;
    __device__ Want operator()(int64_t i) const {
        const double grad = g[i] * scale, b1 = a.beta1, b2 = a.beta2;
        const double m1 = b1 * m[i] + (1 - b1) * grad, v1 = b2 * v[i] + (1 - b2) * grad * grad;
        const double m1_size = b1 * fabs(m[i]) + (1 - b1) * fabs(grad);
        if (part == 0) return {m1, FP32 * m1_size};
        if (part == 1) return {v1, FP32 * v1};
        const double root = sqrt(v1 / (1 - pow(b2, (double)a.t))) + a.eps;
        const double hat = 1 / (1 - pow(b1, (double)a.t)) / root, decay = a.weight_decay * w[i];
        return {w[i] - a.lr * (decay + m1 * hat),
                0x1p-22 * fabs(w[i]) + FP32 * a.lr * (fabs(decay) + m1_size * hat)};
    }
};

struct Joined {
    const uint16_t *hi, *lo;
    __device__ real operator()(int64_t i) const { return master_join(hi[i], lo[i]); }
};

struct Magnitude {
    const real *x;
    __device__ real operator()(int64_t i) const { return fabsf(x[i]); }
};

static void check_adamw(int64_t n, const StepScalars *step, double scale) {
    real *m = random_real(n, 1), *v = take_n<real>(n);
    real *g = random_real(n, 1), *w = take_n<real>(n), *joined = take_n<real>(n);
    compute(v, n, Magnitude{random_real(n, 1)});
    Updated u = {
        copy_of(m, n), copy_of(v, n), w, g, {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 7}, scale, 0};
    floatX *weights = take_n<floatX>(n);
    uint16_t *master_lo = take_n<uint16_t>(n);
    float *master = random_host(n, 1.001f);  // not exact in bf16
    weights_from_host(weights, master_lo, master, (size_t)n);
    device_upload(w, master, (size_t)n * sizeof *master);
    free(master);
    checking("adamw_update");
    adamw_update(weights, master_lo, m, v, g, step, u.a, (size_t)n);
    compute(joined, n, Joined{(const uint16_t *)weights, master_lo});
    expect("m", m, n, u);
    u.part = 1;
    expect("v", v, n, u);
    u.part = 2;
    expect("weights", joined, n, u);
}

static void check_optimizer(const Packed &p) {
    const int64_t n = (int64_t)p.rows * p.C + 3;  // not a multiple of a vector
    const StepScalars host = {3, 25, 0, 0};
    const double start = 3;
    StepScalars *step = on_device(&host, 1);
    double *sum = on_device(&start, 1);
    real *x = random_real(n, 1), *y = random_real(n, 1), *z = copy_of(y, n);
    checking("grads_add");
    grads_add(z, x, (size_t)n);
    expect("sum", z, n, Added{x, y});
    checking("global_norm_squared");
    global_norm_squared(sum, x, (size_t)n);
    expect("sum", sum, 1, SquaresSum{x, n, start});
    checking("clip_scale");
    clip_scale(step, 0.5f);
    expect("grad_norm and scale", &step->grad_norm, 2, Clipped{25, 0.5});
    check_adamw(n, step, 0.1);
}

// ------------------------------------------------------------------------------------------------
// Collectives, on small whole numbers that every rank knows of every other

__device__ __forceinline__ float of_rank(int rank, int64_t i) {
    return (float)((i * 7 + rank * 5) % 64);
}

template <class T>
struct OfRank {
    int rank;
    __device__ T operator()(int64_t i) const { return (T)of_rank(rank, i); }
};

// Of the rank whose shard holds element i
struct OfOwner {
    int64_t share;
    __device__ Want operator()(int64_t i) const { return {of_rank((int)(i / share), i), 0}; }
};

// Of rank i / block: element i % block from `from` on
struct Collected {
    int64_t block, from;
    __device__ Want operator()(int64_t i) const {
        return {of_rank((int)(i / block), i % block + from), 0};
    }
};

// The sum over ranks and `count` elements from i + `from` on
struct OverRanks {
    int num_ranks;
    int64_t from, count;
    __device__ Want operator()(int64_t i) const {
        double sum = 0;
        for (int r = 0; r < num_ranks; r++)
            for (int64_t k = 0; k < count; k++) sum += of_rank(r, i + from + k);
        return {sum, 0};
    }
};

// The same number on each rank, so that ranks wait for each other in the same calls
static void check_collectives() {
    enum { SHARE = 1003, SKIPPED = 3, MAX_RANKS = 4096 };
    static size_t first[MAX_RANKS + 1];
    const int ranks = comm_num_ranks(), rank = comm_rank();
    const int64_t n = (int64_t)SHARE * ranks, own = (int64_t)SHARE * rank, block = SHARE - SKIPPED;
    if (ranks == 1 || ranks > MAX_RANKS) return;
    for (int r = 0; r <= ranks; r++) first[r] = (size_t)r * SHARE;
    snprintf(sizes_text, sizeof sizes_text, "%d ranks", ranks);
    real *x = take_n<real>(n), *collected = take_n<real>(ranks * block);
    floatX *weights = take_n<floatX>(n);
    double *partial = take_n<double>(SHARE), *sum = take_n<double>(1);
    compute(x, n, OfRank<real>{rank});
    compute(weights, n, OfRank<floatX>{rank});
    compute(partial, SHARE, OfRank<double>{rank});
    device_zero(sum, sizeof *sum);
    checking("comm_collect");
    comm_collect(collected, x, first, SKIPPED, (size_t)block);
    expect("out", collected, ranks * block, Collected{block, own + SKIPPED});
    checking("comm_gather_begin");
    comm_wait(comm_gather_begin(weights, first, 0, (size_t)n));
    expect("weights", weights, n, OfOwner{SHARE}, true);
    checking("comm_sum_in_order");
    comm_sum_in_order(sum, partial, SHARE);
    expect("sum", sum, 1, OverRanks{ranks, 0, SHARE});
    real *gathered = copy_of(x, n);
    checking("comm_all_gather");
    comm_all_gather(gathered, first);
    expect("x", gathered, n, OfOwner{SHARE});
    checking("comm_reduce_begin");
    comm_wait(comm_reduce_begin(x, first, 0, (size_t)n));
    expect("x", x + own, SHARE, OverRanks{ranks, own, 1});
    free_blocks(0);
}

// ------------------------------------------------------------------------------------------------
// All of them

typedef void (*Check)(const Packed &p);

static void check_models(Check check, int num_models) {
    for (int m = 0; m < num_models && !wrong[0]; m++) {
        check(pack(&models[m]));
        free_blocks(0);
    }
}

// On every rank the same kernels: if they are wrong on one, all take others.
static void check_attention_or_fall_back(int num_models) {
    const char *before = attention_describe();
    check_models(check_attention, num_models);
    if (!comm_max(wrong[0] != 0) || !attention_fall_back()) return;
    warning("the %s attention kernels are wrong on this GPU, %s ones take their place: %s", before,
            attention_describe(), wrong[0] ? wrong : "found by another rank");
    wrong[0] = 0;
    check_models(check_attention, num_models);
}

int device_has_self_check(void) { return 1; }

const char *device_self_check(int thorough) {
    static const Check checks[] = {check_rows,          check_embedding, check_norms,
                                   check_matmul,        check_swiglu,    check_rope,
                                   check_cross_entropy, check_optimizer};
    const int num_models = thorough ? NUM_MODELS : QUICK_MODELS;
    wrong[0] = 0;
    random_state = 1;
    device_on_error(describe_check);
    for (Check check : checks) check_models(check, num_models);
    // a rank that has found something wrong waits for no other: its error ends them
    if (!wrong[0]) check_collectives();
    if (!wrong[0]) check_attention_or_fall_back(num_models);
    check_models(check_cache, num_models);
    matmul_repeat_choices("");  // checkpoints keep the algorithms of the run's own shapes
    device_on_error(NULL);
    return wrong[0] ? wrong : NULL;
}
