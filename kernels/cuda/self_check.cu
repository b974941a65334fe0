// The self-check: its operands, models and order, and the checks of the step around the model.
#include "self_check.cuh"

#include <stdarg.h>

namespace self_check {

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

void *take(size_t bytes) {
    assert(num_blocks < MAX_BLOCKS);
    void *p = device_malloc(bytes + BEHIND_BYTES);
    if (!p)
        device_fail("is another process using the GPU?",
                    "self-check: expected %zu bytes of free device memory", bytes);
    CUDA_CHECK(cudaMemsetAsync(p, 0xff, bytes + BEHIND_BYTES, cuda_stream()));
    blocks[num_blocks++] = {p, bytes};
    return p;
}

void *host_take(size_t bytes) {
    void *p = malloc(bytes + 1);
    if (!p) exit_with(EXIT_HOST_MEMORY, "", "self-check: expected %zu bytes", bytes);
    return p;
}

float *random_host(int64_t n, float scale) {
    float *x = (float *)host_take((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = scale / 128 * (float)((int)(mix64(++random_state) >> 56) - 128);
    return x;
}
real *random_real(int64_t n, float scale) {
    float *host = random_host(n, scale);
    real *x = on_device(host, n);
    free(host);
    return x;
}
floatX *random_bf16(int64_t n, float scale) {
    float *host = random_host(n, scale);
    floatX *x = take_n<floatX>(n);
    weights_from_host(x, NULL, host, (size_t)n);
    free(host);
    return x;
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

static bool is_whole_block(const void *p, size_t bytes) {
    for (int b = 0; b < num_blocks; b++)
        if (blocks[b].p == p && blocks[b].bytes == bytes) return true;
    return false;
}

void compare(const char *name, const void *got, int64_t n, size_t element_bytes, double relative,
             const Want *wanted) {
    const size_t bytes = (size_t)n * element_bytes,
                 all = bytes + (is_whole_block(got, bytes) ? BEHIND_BYTES : 0);
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

void checking(const char *name) { operation = name; }
bool found_wrong() { return wrong[0] != 0; }
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
enum { QUICK_MODELS = 2, NUM_MODELS = sizeof models / sizeof *models };

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
    p.heads = m->heads, p.C = m->C, p.F = m->F, p.V = m->V, p.rows = SOME_ROWS;
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

static void check_models(Check *check, int num_models) {
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

}  // namespace self_check

using namespace self_check;

int device_has_self_check(void) { return 1; }

const char *device_self_check(int thorough) {
    static Check *const checks[] = {
        check_rows,   check_embedding, check_norms, check_qk_norm,       check_bias,
        check_matmul, check_swiglu,    check_rope,  check_cross_entropy, check_optimizer};
    const int num_models = thorough ? NUM_MODELS : QUICK_MODELS;
    wrong[0] = 0;
    random_state = 1;
    device_on_error(describe_check);
    for (Check *check : checks) check_models(check, num_models);
    // a rank that has found something wrong waits for no other: its error ends them
    if (!wrong[0]) check_collectives();
    if (!wrong[0]) check_attention_or_fall_back(num_models);
    check_models(check_cache, num_models);
    device_on_error(NULL);
    return wrong[0] ? wrong : NULL;
}
