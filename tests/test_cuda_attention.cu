// kernels/cuda/attention*.cu against the CPU backend in fp32 on the same bf16 inputs, and against
// themselves: packed = alone = permuted, one document changes no other, causality, NaN in the
// slack.
//
// Tolerances follow from where the kernels round to bf16 (unit roundoff U = 2^-8), term by term:
// P before P V and P^T dO, dS before dS K and dS^T Q, and every result once more. delta carries the
// rounding of out. A sum of n rounded terms is off by at most U times the sum of magnitudes and,
// roundings being independent, almost never by more than 4 U times the root of the sum of squares:
// the smaller of both. dQ and dK are then rotated back, and their tolerances with them, before the
// result is rounded. Everything else is fp32. So a lost or doubled key, a wrong mask, position or
// scale is far outside.
//
// Every case that runs kernels runs for each path, sm80 and sm90, that the GPU has.
//
// Cases named real_* need a GPU and run with UNPAD_FULL=1: every shape of the grid below, whole
// batches, thousands of calls, buffers of more than 2^32 elements. UNPAD_FULL=small runs them
// shrunken, so that the emulator can show that the cases themselves work.
#include <atomic>
#include <math.h>
#include <mutex>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>
#include "../kernels/cuda/common.cuh"
#include "test.h"
#include "reference.h"

static const double U = 0x1p-8;
enum { MAX_DOCS = 256 };

static int at_most(int a, int b) { return a < b ? a : b; }
static int at_least(int a, int b) { return a > b ? a : b; }

// Opened by the first case that computes, so that cases before it can fork.
static const CpuReference &reference() {
    static CpuReference t = reference_open();
    return t;
}
// At most 16: a container may show more cores than it may use.
static int num_cores() {
    const int n = (int)std::thread::hardware_concurrency();
    return n < 1 ? 1 : at_most(n, 16);
}
// f(0) to f(n - 1) on all cores, in any order. They must not CHECK: that leaves by longjmp.
template <class F>
static void in_parallel(int64_t n, F f) {
    static const int64_t cores = num_cores();
    std::atomic<int64_t> next(0);
    auto work = [&] {
        for (int64_t i; (i = next++) < n;) f(i);
    };
    std::vector<std::thread> others;
    for (int64_t k = 1; k < cores && k < n; k++) others.emplace_back(work);
    work();
    for (std::thread &t : others) t.join();
}
static void open_device() {
    static bool open = false;
    DeviceOptions options = {0, 0};
    const char *missing = open ? NULL : device_init(&options);
    if (missing) fprintf(stderr, "%s\n", missing), exit(2);
    open = true;
}

// A case for each of attention_select's kernels, named after them
static void use_path(const char *path) {
    open_device();
    if (attention_select(path) != 0) SKIP("no %s kernels for this GPU", path);
}
#define EACH_PATH(name_)  \
    static void name_();  \
    TEST(name_##_sm80) {  \
        use_path("sm80"); \
        name_();          \
    }                     \
    TEST(name_##_sm90) {  \
        use_path("sm90"); \
        name_();          \
    }                     \
    static void name_()

// -------------------------------------------------------------------------------------------------
// A batch on the host: documents, inputs, results; `slack` rows of NaN follow each tensor

struct Batch {
    HeadShape heads;
    int num_docs, T, slack;
    int32_t *cu_seqlens;
    floatX *qkv, *dout, *out, *dqkv;
    float *lse, *delta;
};

static int64_t qkv_row(HeadShape h) {
    return (int64_t)(h.num_heads + 2 * h.num_kv_heads) * h.head_dim;
}
static int64_t out_row(HeadShape h) { return (int64_t)h.num_heads * h.head_dim; }
static int doc_len(const Batch &b, int doc) { return b.cu_seqlens[doc + 1] - b.cu_seqlens[doc]; }

// All bits set: a NaN in bf16 and in fp32, and a canary
template <class T>
static T *new_values(int64_t n) {
    T *p = (T *)malloc((size_t)(n + 1) * sizeof(T));
    CHECK(p != NULL);
    memset((void *)p, 0xff, (size_t)(n + 1) * sizeof(T));
    return p;
}

static Batch new_batch(HeadShape heads, const int *lengths, int num_docs, int slack) {
    Batch b = {};
    b.heads = heads, b.num_docs = num_docs, b.slack = slack;
    b.cu_seqlens = new_values<int32_t>(num_docs + 1);
    b.cu_seqlens[0] = 0;
    for (int i = 0; i < num_docs; i++) b.cu_seqlens[i + 1] = b.cu_seqlens[i] + lengths[i];
    b.T = b.cu_seqlens[num_docs];
    b.qkv = new_values<floatX>((b.T + slack) * qkv_row(heads));
    b.dqkv = new_values<floatX>((b.T + slack) * qkv_row(heads));
    b.dout = new_values<floatX>((b.T + slack) * out_row(heads));
    b.out = new_values<floatX>((b.T + slack) * out_row(heads));
    b.lse = new_values<float>((int64_t)(b.T + slack) * heads.num_heads);
    b.delta = new_values<float>((int64_t)(b.T + slack) * heads.num_heads);
    return b;
}

static void free_batch(Batch b) {
    free(b.cu_seqlens), free(b.qkv), free(b.dqkv), free(b.dout), free(b.out);
    free(b.lse), free(b.delta);
}

// Mean 0, variance 1: a sum of four uniforms. Value i depends on the seed and i alone, so that all
// cores can fill a large tensor.
static float normal_value(uint64_t seed, int64_t i) {
    uint64_t z = seed + (uint64_t)i * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const uint64_t sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
    return ((float)sum - 131070) * (1.7320508f / 65536);
}
static void random_values(floatX *x, int64_t n, double scale) {
    const int64_t chunk = 1 << 18;
    const uint64_t seed = test_rng_u64();
    in_parallel((n + chunk - 1) / chunk, [&](int64_t c) {
        for (int64_t i = c * chunk; i < n && i < (c + 1) * chunk; i++)
            x[i] = (floatX)((float)scale * normal_value(seed, i));
    });
}

static Batch random_batch(HeadShape heads, const int *lengths, int num_docs, double scale) {
    Batch b = new_batch(heads, lengths, num_docs, 3);
    random_values(b.qkv, b.T * qkv_row(heads), scale);
    random_values(b.dout, b.T * out_row(heads), 1);
    return b;
}

template <class T>
static T *to_device(const T *x, int64_t n) {
    T *p = (T *)device_malloc((size_t)n * sizeof(T) + !n);
    CHECK(p != NULL);
    device_upload(p, x, (size_t)n * sizeof(T));
    return p;
}
// Also checks that nothing was written past the first `used` values.
template <class T>
static void from_device(const char *what, T *x, T *device, int64_t used, int64_t n) {
    device_download(x, device, (size_t)n * sizeof(T));
    device_free(device);
    const unsigned char *bytes = (const unsigned char *)(x + used);
    for (size_t i = 0; i < (size_t)(n - used) * sizeof(T); i++)
        CHECK_MSG(bytes[i] == 0xff, "%s was written past its end, at byte %zu", what, i);
}

// Positions run along a document and begin again after POSITIONS tokens: the table of angles then
// stays small. One for each head_dim, on the host and on the device.
enum { POSITIONS = 512 };
static int32_t position_of(int in_document) { return in_document % POSITIONS; }
static const float *angles(int D) {
    static float *tables[129];
    if (tables[D]) return tables[D];
    tables[D] = new_values<float>((int64_t)POSITIONS * D);
    for (int p = 0; p < POSITIONS; p++)
        for (int i = 0; i < D / 2; i++) {
            const double angle = p * pow(10000, -2.0 * i / D);
            tables[D][p * D + 2 * i] = (float)cos(angle);
            tables[D][p * D + 2 * i + 1] = (float)sin(angle);
        }
    return tables[D];
}
static const float *angles_on_device(int D) {
    static float *tables[129];
    if (!tables[D]) tables[D] = to_device(angles(D), (int64_t)POSITIONS * D);
    return tables[D];
}
static int32_t *new_positions(const int32_t *cu_seqlens, int num_docs) {
    int32_t *positions = new_values<int32_t>(cu_seqlens[num_docs]);
    for (int doc = 0; doc < num_docs; doc++)
        for (int t = cu_seqlens[doc]; t < cu_seqlens[doc + 1]; t++)
            positions[t] = position_of(t - cu_seqlens[doc]);
    return positions;
}

// The same batch in device memory
struct OnDevice {
    int32_t *cu_seqlens, *work, *position_ids;
    floatX *qkv, *dout, *out, *dqkv;
    float *lse, *delta;
    VarlenInfo docs;
};

static void plan_on_device(OnDevice *d, const int32_t *cu_seqlens, int num_docs, HeadShape heads) {
    const int T = cu_seqlens[num_docs];
    int longest = 0;
    for (int i = 0; i < num_docs; i++)
        longest = at_least(longest, cu_seqlens[i + 1] - cu_seqlens[i]);
    size_t size = attention_plan_size(T, num_docs);
    int32_t *work_host = new_values<int32_t>((int64_t)size);
    size_t used = attention_plan(work_host, cu_seqlens, num_docs, heads);
    CHECK(used <= size);
    d->work = to_device(work_host, (int64_t)used);
    d->cu_seqlens = to_device(cu_seqlens, num_docs + 1);
    int32_t *positions = new_positions(cu_seqlens, num_docs);
    d->position_ids = to_device(positions, T);
    free(positions);
    d->docs = {d->cu_seqlens, d->work, T, num_docs, longest};
    free(work_host);
}

static OnDevice on_device(const Batch &b) {
    const int64_t rows = b.T + b.slack, row = qkv_row(b.heads), orow = out_row(b.heads);
    OnDevice d;
    open_device();
    plan_on_device(&d, b.cu_seqlens, b.num_docs, b.heads);
    d.qkv = to_device(b.qkv, rows * row), d.dqkv = to_device(b.dqkv, rows * row);
    d.dout = to_device(b.dout, rows * orow), d.out = to_device(b.out, rows * orow);
    d.lse = to_device(b.lse, rows * b.heads.num_heads);
    d.delta = to_device(b.delta, rows * b.heads.num_heads);
    return d;
}

static void launch(const OnDevice &d, HeadShape heads) {
    attention_forward(d.out, d.lse, d.qkv, &d.docs, heads);
    attention_backward(d.dqkv, d.delta, d.dout, d.qkv, d.out, d.lse, d.position_ids,
                       angles_on_device(heads.head_dim), &d.docs, heads);
}

static void free_inputs(const OnDevice &d) {
    device_free(d.qkv), device_free(d.dout), device_free(d.work), device_free(d.cu_seqlens);
    device_free(d.position_ids);
}

static void run(Batch *b) {
    const HeadShape h = b->heads;
    const int64_t rows = b->T + b->slack, row = qkv_row(h), orow = out_row(h);
    const OnDevice d = on_device(*b);
    launch(d, h);
    from_device("out", b->out, d.out, b->T * orow, rows * orow);
    from_device("dqkv", b->dqkv, d.dqkv, b->T * row, rows * row);
    from_device("lse", b->lse, d.lse, (int64_t)b->T * h.num_heads, rows * h.num_heads);
    from_device("delta", b->delta, d.delta, (int64_t)b->T * h.num_heads, rows * h.num_heads);
    free_inputs(d);
}

// Copies the inputs of document j of b into document i of a
static void copy_doc(Batch *a, int i, const Batch &b, int j) {
    int64_t to = a->cu_seqlens[i], from = b.cu_seqlens[j], n = doc_len(b, j);
    int64_t row = qkv_row(b.heads), orow = out_row(b.heads);
    memcpy((void *)(a->qkv + to * row), b.qkv + from * row, (size_t)(n * row) * sizeof(floatX));
    memcpy((void *)(a->dout + to * orow), b.dout + from * orow,
           (size_t)(n * orow) * sizeof(floatX));
}
static Batch copy_batch(const Batch &b, const int *lengths) {
    Batch c = new_batch(b.heads, lengths, b.num_docs, b.slack);
    for (int i = 0; i < b.num_docs; i++) copy_doc(&c, i, b, i);
    return c;
}

template <class T>
static bool same_bits(const T *a, const T *b, int64_t n) {
    return memcmp((const void *)a, (const void *)b, (size_t)n * sizeof(T)) == 0;
}

// Rows [0, n) of document i of a and j of b: out and lse; and dqkv if asked
static void check_same_rows(const char *what, const Batch &a, int i, const Batch &b, int j, int n,
                            bool gradients) {
    int64_t at = a.cu_seqlens[i], bt = b.cu_seqlens[j], row = qkv_row(a.heads),
            orow = out_row(a.heads);
    CHECK_MSG(same_bits(a.out + at * orow, b.out + bt * orow, n * orow),
              "%s: out of document %d differs", what, i);
    for (int h = 0; h < a.heads.num_heads; h++)
        CHECK_MSG(same_bits(a.lse + (int64_t)h * a.T + at, b.lse + (int64_t)h * b.T + bt, n),
                  "%s: lse of document %d, head %d differs", what, i, h);
    if (gradients)
        CHECK_MSG(same_bits(a.dqkv + at * row, b.dqkv + bt * row, n * row),
                  "%s: dqkv of document %d differs", what, i);
}
static void check_same_doc(const char *what, const Batch &a, int i, const Batch &b, int j) {
    check_same_rows(what, a, i, b, j, doc_len(a, i), true);
}

// -------------------------------------------------------------------------------------------------
// Choices of the random cases

static const HeadShape all_heads[] = {{1, 1, 64},  {3, 1, 64}, {4, 1, 64}, {2, 2, 64},
                                      {6, 2, 64},  {5, 1, 64}, {2, 1, 64}, {1, 1, 128},
                                      {3, 1, 128}, {4, 2, 128}};
enum { NUM_HEADS = sizeof(all_heads) / sizeof(all_heads[0]) };

static int random_length() {
    static const int edges[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 193};
    if (test_rng_below(3) == 0) return (int)test_rng_below(90);
    return edges[test_rng_below(sizeof(edges) / sizeof(edges[0]))];
}

// Lengths of a few documents, sometimes with an empty one at an end; returns heads
static HeadShape random_layout(int *lengths, int *num_docs) {
    int n = *num_docs = 1 + (int)test_rng_below(4);
    for (int i = 0; i < n; i++) lengths[i] = random_length();
    if (test_rng_below(6) == 0) lengths[0] = 0;
    if (test_rng_below(6) == 0) lengths[n - 1] = 0;
    return all_heads[test_rng_below(NUM_HEADS)];
}

// -------------------------------------------------------------------------------------------------
// Against the CPU backend

struct Reference {
    float *qkv, *dout, *out, *lse, *dqkv, *delta;
};

static float *widen(const floatX *x, int64_t n) {
    const int64_t chunk = 1 << 20;
    float *y = new_values<float>(n);
    in_parallel((n + chunk - 1) / chunk, [&](int64_t c) {
        for (int64_t i = c * chunk; i < n && i < (c + 1) * chunk; i++) y[i] = (float)x[i];
    });
    return y;
}

static Reference reference_of(const Batch &b) {
    const HeadShape h = b.heads;
    Reference r = {};
    r.qkv = widen(b.qkv, b.T * qkv_row(h));
    r.dout = widen(b.dout, b.T * out_row(h));
    r.out = new_values<float>(b.T * out_row(h));
    r.dqkv = new_values<float>(b.T * qkv_row(h));
    r.lse = new_values<float>((int64_t)b.T * h.num_heads);
    r.delta = new_values<float>((int64_t)b.T * h.num_heads);
    int32_t *work = new_values<int32_t>((int64_t)reference().attention_plan_size(b.T, b.num_docs));
    reference().attention_plan(work, b.cu_seqlens, b.num_docs, h);
    VarlenInfo docs = {b.cu_seqlens, work, b.T, b.num_docs, b.T};
    reference().attention_forward(r.out, r.lse, r.qkv, &docs, h);
    int32_t *positions = new_positions(b.cu_seqlens, b.num_docs);
    reference().attention_backward(r.dqkv, r.delta, r.dout, r.qkv, r.out, r.lse, positions,
                                   angles(h.head_dim), &docs, h);
    free(work), free(positions);
    return r;
}
static void free_reference(Reference r) {
    free(r.qkv), free(r.dout), free(r.out), free(r.lse), free(r.dqkv), free(r.delta);
}

static double worst;  // error / tolerance, of all values compared

// Result of one thread
struct Verdict {
    bool failed;
    char text[200];
    double worst;

    void value(const char *what, int doc, int row, int col, double got, double want,
               double tolerance) {
        const double error = fabs(got - want);
        worst = fmax(worst, error / tolerance);
        if (error <= tolerance || failed) return;
        failed = true;
        snprintf(text, sizeof text,
                 "%s of document %d, row %d, column %d: %.7g, expected %.7g within %.2g", what, doc,
                 row, col, got, want, tolerance);
    }
};

// Sizes are sums in fp32: probabilities under e^-41 are left out, before their squares underflow.
static const double TINY = 1e-16;

// Error bound of a sum of rounded terms, in U: the smaller of the two bounds at the top of this
// file
static double rounding(float sum, float squares) { return fmin(sum, 4 * sqrt(squares)); }

template <int D>
static float dot(const float *a, const float *b) {
    float s[8] = {};
    for (int x = 0; x < D; x += 8)
        for (int k = 0; k < 8; k++) s[k] += a[x + k] * b[x + k];
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}
template <int D>
static float norm(const float *a) {
    return sqrtf(dot<D>(a, a));
}

// One comparison. Keeps the per-query values that the tolerances of keys need (H, T).
struct Comparison {
    const Batch &b;
    const Reference &r;
    int64_t row, orow;
    float scale;
    float *fp32;         // relative error of a probability, from fp32 alone
    float *delta;        // rowsum(dout * out)
    float *delta_error;  // its tolerance
    float *dout_norm;    // |dout|
    float *delta_size;   // |dout| |out|

    const float *dout(int64_t t, int head) const {
        return r.dout + t * orow + head * b.heads.head_dim;
    }
    const float *out(int64_t t, int head) const {
        return r.out + t * orow + head * b.heads.head_dim;
    }
    // Heads of qkv: the queries', the keys', the values'
    const float *qkv(int64_t t, int head) const {
        return r.qkv + t * row + head * b.heads.head_dim;
    }
    int key_head(int kv) const { return b.heads.num_heads + kv; }
    int value_head(int kv) const { return b.heads.num_heads + b.heads.num_kv_heads + kv; }
    double got(int64_t t, int head, int x) const {
        return (float)b.dqkv[t * row + head * b.heads.head_dim + x];
    }
    double want(int64_t t, int head, int x) const {
        return r.dqkv[t * row + head * b.heads.head_dim + x];
    }
};

// A rotation of independent errors: those of x and of its partner, x + D / 2 or x - D / 2, times
// the cosine and the sine. Row i of a document.
template <int D>
static double turned(const double (&errors)[D], int i, int x) {
    const float *angle = angles(D) + position_of(i) * D + 2 * (x % (D / 2));
    return fabs(angle[0]) * errors[x] + fabs(angle[1]) * errors[(x + D / 2) % D];
}

// A query and a key that it attends to
struct Pair {
    float p, ds, ds_size;
};
template <int D>
static Pair pair(const Comparison &c, const float *q, const float *dout, const float *k,
                 const float *v, float v_norm, int64_t at) {
    const float s = c.scale * dot<D>(q, k) - c.r.lse[at], p = s < -41 ? 0 : expf(s);
    return {p, p * (dot<D>(dout, v) - c.delta[at]),
            p * (c.dout_norm[at] * v_norm + c.delta_size[at])};
}

// n rows of D values, copied together: in the tensor their stride is a large round number, so they
// would evict each other from the caches.
template <int D>
static std::vector<float> gather(const float *x, int64_t stride, int n) {
    std::vector<float> rows((size_t)n * D);
    for (int i = 0; i < n; i++) memcpy(&rows[(size_t)i * D], x + i * stride, D * sizeof(float));
    return rows;
}

// out, lse, delta and dq of rows [first, end) of one head
template <int D>
static void check_queries(const Comparison &c, int doc, int head, int first, int end,
                          Verdict *verdict) {
    const HeadShape hs = c.b.heads;
    const int kv = head / (hs.num_heads / hs.num_kv_heads);
    const int64_t start = c.b.cu_seqlens[doc];
    const std::vector<float> keys = gather<D>(c.qkv(start, c.key_head(kv)), c.row, end);
    const std::vector<float> values = gather<D>(c.qkv(start, c.value_head(kv)), c.row, end);
    std::vector<float> k_norm((size_t)end), v_norm((size_t)end);
    std::vector<Pair> pairs((size_t)end);
    for (size_t j = 0; j < pairs.size(); j++)
        k_norm[j] = norm<D>(&keys[j * D]), v_norm[j] = norm<D>(&values[j * D]);
    for (int i = first; i < end; i++) {
        const int64_t t = start + i, at = (int64_t)head * c.b.T + t;
        const float *q = c.qkv(t, head), *dout = c.dout(t, head), *out = c.out(t, head);
        const float q_norm = norm<D>(q);
        float out_sum[D] = {}, out_squares[D] = {}, dq_sum[D] = {}, dq_squares[D] = {};
        float pk[D] = {}, dq_size[D] = {}, score = 0;
        double delta = 0, delta_error = 0;
        for (int x = 0; x < D; x++) delta += (double)dout[x] * out[x];
        c.delta[at] = (float)delta;
        c.dout_norm[at] = norm<D>(dout);
        c.delta_size[at] = c.dout_norm[at] * norm<D>(out);
        for (size_t j = 0; j <= (size_t)i; j++) {
            pairs[j] = pair<D>(c, q, dout, &keys[j * D], &values[j * D], v_norm[j], at);
            score = fmaxf(score, c.scale * q_norm * k_norm[j]);
        }
        const float fp32 = c.fp32[at] = (score + 16) * 0x1p-21f;
        for (size_t j = 0; j <= (size_t)i; j++) {
            const float *k = &keys[j * D], *v = &values[j * D];
            const float p = pairs[j].p, ds = c.scale * pairs[j].ds;
            const float size = c.scale * pairs[j].ds_size;
            if (p == 0) continue;
            for (int x = 0; x < D; x++) {
                const float a = p * v[x], e = ds * k[x];
                out_sum[x] += fabsf(a), out_squares[x] += a * a;
                dq_sum[x] += fabsf(e), dq_squares[x] += e * e;
                pk[x] += p * k[x], dq_size[x] += size * fabsf(k[x]);
            }
        }
        verdict->value("lse", doc, i, head, c.b.lse[at], c.r.lse[at],
                       1e-5 * fmax(1, fabs(c.r.lse[at])));
        for (int x = 0; x < D; x++) {
            const double tolerance =
                U * (rounding(out_sum[x], out_squares[x]) + fabs(out[x])) + fp32 * out_sum[x];
            verdict->value("out", doc, i, head * D + x, (float)c.b.out[t * c.orow + head * D + x],
                           out[x], tolerance + TINY);
            delta_error += dout[x] * tolerance * dout[x] * tolerance;
        }
        delta_error = 4 * sqrt(delta_error);
        c.delta_error[at] = (float)delta_error;
        verdict->value("delta", doc, i, head, c.b.delta[at], delta, delta_error + TINY);
        double errors[D];
        for (int x = 0; x < D; x++)
            errors[x] = U * rounding(dq_sum[x], dq_squares[x]) +
                        delta_error * c.scale * fabs(pk[x]) + fp32 * dq_size[x];
        for (int x = 0; x < D; x++) {
            const double want = c.want(t, head, x);
            verdict->value("dq", doc, i, head * D + x, c.got(t, head, x), want,
                           turned<D>(errors, i, x) + U * fabs(want) + TINY);
        }
    }
}

// dk and dv of rows [first, end) of one kv head: after check_queries of the document
template <int D>
static void check_keys(const Comparison &c, int doc, int kv, int first, int end, Verdict *verdict) {
    const HeadShape hs = c.b.heads;
    const int group = hs.num_heads / hs.num_kv_heads, len = doc_len(c.b, doc);
    const int64_t start = c.b.cu_seqlens[doc];
    std::vector<std::vector<float>> queries, douts;  // of each head, from row `first` on
    for (int head = kv * group; head < (kv + 1) * group; head++) {
        queries.push_back(gather<D>(c.qkv(start + first, head), c.row, len - first));
        douts.push_back(gather<D>(c.dout(start + first, head), c.orow, len - first));
    }
    for (int j = first; j < end; j++) {
        const float *k = c.qkv(start + j, c.key_head(kv));
        const float *v = c.qkv(start + j, c.value_head(kv));
        const float v_norm = norm<D>(v);
        float dv_sum[D] = {}, dv_squares[D] = {}, dv_fp32[D] = {};
        float dk_sum[D] = {}, dk_squares[D] = {}, dk_fp32[D] = {};
        float delta_sum[D] = {}, delta_squares[D] = {};
        for (int g = 0; g < group; g++)
            for (int i = j; i < len; i++) {
                const int64_t at = (int64_t)(kv * group + g) * c.b.T + start + i;
                const float *q = &queries[(size_t)g][(size_t)(i - first) * D];
                const float *dout = &douts[(size_t)g][(size_t)(i - first) * D];
                const Pair it = pair<D>(c, q, dout, k, v, v_norm, at);
                if (it.p == 0) continue;
                const float ds = c.scale * it.ds, error = c.scale * it.p * c.delta_error[at];
                const float p_fp32 = c.fp32[at] * it.p;
                const float ds_fp32 = c.fp32[at] * c.scale * it.ds_size;
                for (int x = 0; x < D; x++) {
                    const float a = it.p * dout[x], e = ds * q[x], f = error * q[x];
                    dv_sum[x] += fabsf(a), dv_squares[x] += a * a;
                    dk_sum[x] += fabsf(e), dk_squares[x] += e * e;
                    delta_sum[x] += fabsf(f), delta_squares[x] += f * f;
                    dv_fp32[x] += p_fp32 * fabsf(dout[x]), dk_fp32[x] += ds_fp32 * fabsf(q[x]);
                }
            }
        double errors[D];
        for (int x = 0; x < D; x++)
            errors[x] = U * rounding(dk_sum[x], dk_squares[x]) +
                        rounding(delta_sum[x], delta_squares[x]) + dk_fp32[x];
        for (int x = 0; x < D; x++) {
            const double dk = c.want(start + j, c.key_head(kv), x);
            const double dv = c.want(start + j, c.value_head(kv), x);
            verdict->value("dk", doc, j, kv * D + x, c.got(start + j, c.key_head(kv), x), dk,
                           turned<D>(errors, j, x) + U * fabs(dk) + TINY);
            verdict->value("dv", doc, j, kv * D + x, c.got(start + j, c.value_head(kv), x), dv,
                           U * (rounding(dv_sum[x], dv_squares[x]) + fabs(dv)) + dv_fp32[x] + TINY);
        }
    }
}

// Every result of every document, in pieces of 32 rows of a head. Costs about 2.5 ns for each
// (query, key, column) of a query head, on one core.
template <int D>
static void compare(const Comparison &c) {
    enum { ROWS = 32 };
    struct Piece {
        int doc, head, first, end;
    };
    std::vector<Piece> queries, keys;
    std::mutex mutex;
    Verdict all = {};
    for (int doc = 0; doc < c.b.num_docs; doc++)
        for (int first = 0, len = doc_len(c.b, doc); first < len; first += ROWS) {
            const int end = at_most(first + ROWS, len);
            for (int h = 0; h < c.b.heads.num_heads; h++) queries.push_back({doc, h, first, end});
            for (int h = 0; h < c.b.heads.num_kv_heads; h++) keys.push_back({doc, h, first, end});
        }
    auto add = [&](const Verdict &v) {
        std::lock_guard<std::mutex> lock(mutex);
        const double largest = fmax(all.worst, v.worst);
        if (!all.failed) all = v;
        all.worst = largest;
    };
    in_parallel((int64_t)queries.size(), [&](int64_t n) {
        const Piece &piece = queries[(size_t)n];
        Verdict v = {};
        check_queries<D>(c, piece.doc, piece.head, piece.first, piece.end, &v);
        add(v);
    });
    in_parallel((int64_t)keys.size(), [&](int64_t n) {
        const Piece &piece = keys[(size_t)n];
        Verdict v = {};
        check_keys<D>(c, piece.doc, piece.head, piece.first, piece.end, &v);
        add(v);
    });
    worst = fmax(worst, all.worst);
    CHECK_MSG(!all.failed, "%s", all.text);
}

static void check_against_reference(Batch *b) {
    run(b);
    Reference r = reference_of(*b);
    const int64_t n = (int64_t)b->T * b->heads.num_heads;
    float *kept = new_values<float>(5 * n);
    const Comparison c = {*b,
                          r,
                          qkv_row(b->heads),
                          out_row(b->heads),
                          (float)(1 / sqrt((double)b->heads.head_dim)),
                          kept,
                          kept + n,
                          kept + 2 * n,
                          kept + 3 * n,
                          kept + 4 * n};
    b->heads.head_dim == 64 ? compare<64>(c) : compare<128>(c);
    free(kept);
    free_reference(r);
}

static void against_reference(HeadShape heads, const int *lengths, int num_docs, double scale) {
    Batch b = random_batch(heads, lengths, num_docs, scale);
    check_against_reference(&b);
    free_batch(b);
}

// Must be first: a program that has opened the device should not fork.
TEST(unsupported_shapes_end_the_program) {
    static const HeadShape wrong[] = {{4, 3, 64}, {4, 0, 64}, {0, 1, 64}, {4, 2, 32}, {4, 2, 96}};
    for (const HeadShape &heads : wrong) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            VarlenInfo docs = {NULL, NULL, 0, 0, 0};
            if (!freopen("/dev/null", "w", stderr)) _exit(1);
            attention_forward(NULL, NULL, NULL, &docs, heads);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        CHECK_MSG(WEXITSTATUS(status) == 11, "exit code %d", WEXITSTATUS(status));
    }
}

EACH_PATH(no_tokens) {
    const VarlenInfo docs = {NULL, NULL, 0, 0, 0};
    open_device();
    attention_forward(NULL, NULL, NULL, &docs, {9, 3, 64});
    attention_backward(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, &docs, {9, 3, 64});
}

static const int edge_lengths[] = {1, 2, 63, 64, 65, 127, 128, 129, 193};

EACH_PATH(edge_lengths_one_head) {
    against_reference({1, 1, 64}, edge_lengths, 9, 1);
    against_reference({1, 1, 128}, edge_lengths, 9, 1);
}
EACH_PATH(edge_lengths_grouped_heads) {
    against_reference({3, 1, 64}, edge_lengths, 9, 1);
    against_reference({3, 1, 128}, edge_lengths + 4, 5, 1);
    against_reference({4, 1, 64}, edge_lengths + 1, 6, 1);
    against_reference({6, 2, 64}, edge_lengths + 2, 4, 1);
    against_reference({4, 1, 128}, edge_lengths, 5, 1);
}
EACH_PATH(large_inputs) {
    static const int lengths[] = {65, 3, 129};
    for (double scale : {3.0, 5.0}) {
        against_reference({3, 1, 64}, lengths, 3, scale);
        against_reference({2, 1, 128}, lengths, 3, scale);
    }
}
EACH_PATH(zero_length_documents) {
    static const int lengths[] = {0, 0, 63, 0, 64, 0, 0, 65, 2, 0};
    static const int first[] = {0, 130}, last[] = {130, 0}, none[] = {0, 0, 0};
    against_reference({3, 1, 64}, lengths, 10, 1);
    against_reference({1, 1, 128}, lengths, 10, 1);
    against_reference({2, 2, 64}, first, 2, 1);
    against_reference({2, 2, 64}, last, 2, 1);
    against_reference({2, 2, 64}, none, 3, 1);
}
EACH_PATH(documents_of_one_token) {
    int ones[40];
    for (int &n : ones) n = 1;
    against_reference({4, 1, 64}, ones, 40, 1);
    against_reference({2, 1, 128}, ones, 40, 1);
}
EACH_PATH(seed_batch) {
    static const int lengths[] = {220, 217, 295, 183, 130, 350};
    against_reference({3, 1, 64}, lengths, 6, 1);
}

// Long enough that every stage of a ring is filled several times within one item
EACH_PATH(long_documents) {
    static const int lengths[] = {640, 3, 400};
    against_reference({1, 1, 64}, lengths, 2, 1);
    against_reference({2, 1, 128}, lengths + 1, 2, 1);
}

// For compute-sanitizer, whose tools are up to a hundred times slower: every kernel once, whole and
// partial tiles, empty documents at the start, in the middle and at the end.
static const int sanitizer_lengths[] = {0, 1, 63, 0, 64, 65, 129, 0};

EACH_PATH(sanitizer_3_heads_of_64) { against_reference({3, 1, 64}, sanitizer_lengths, 8, 1); }
EACH_PATH(sanitizer_4_heads_of_64) { against_reference({4, 1, 64}, sanitizer_lengths, 8, 1); }
EACH_PATH(sanitizer_3_heads_of_128) { against_reference({3, 1, 128}, sanitizer_lengths, 8, 1); }
EACH_PATH(sanitizer_4_heads_of_128) { against_reference({4, 1, 128}, sanitizer_lengths, 8, 1); }

// One key is far larger than the others: from there on a row is all but one-hot, at the first, a
// middle or the last key of a tile
EACH_PATH(softmax_spikes) {
    static const int at[] = {0, 63, 64, 100, 128};
    for (int D = 64; D <= 128; D += 64)
        for (int spike : at) {
            const int len = 150;
            const HeadShape h = {2, 1, D};
            Batch b = random_batch(h, &len, 1, 1);
            for (int x = 0; x < D; x++)
                b.qkv[spike * qkv_row(h) + 2 * D + x] = (floatX)(20.0f * (x % 2 ? 1 : -1));
            check_against_reference(&b);
            free_batch(b);
        }
}

// All keys equal: probabilities are uniform, lse = score + log(count)
EACH_PATH(uniform_softmax) {
    static const int lengths[] = {5, 150, 1};
    const HeadShape h = {3, 1, 64};
    Batch b = random_batch(h, lengths, 3, 1);
    for (int t = 1; t < b.T; t++)
        memcpy((void *)(b.qkv + t * qkv_row(h) + 3 * 64), b.qkv + 3 * 64, 64 * sizeof(floatX));
    check_against_reference(&b);
    free_batch(b);
}

// While the running maximum does not change, rescaling must not change the previous sums by a bit:
// every tile would repeat the error. Scores, all equal, are scaled, exponentiated and scaled back:
// one rounding each, and one for the sum.
static void check_equal_scores(int D, float q_value) {
    enum { T = 2048, USED = 7 };  // seven columns: the score is no power of two
    const int len = T;
    const HeadShape h = {1, 1, D};
    Batch b = new_batch(h, &len, 1, 0);
    for (int t = 0; t < T; t++)
        for (int x = 0; x < D; x++) {
            floatX *row = b.qkv + t * qkv_row(h);
            row[x] = (floatX)(x < USED ? q_value : 0.0f);
            row[D + x] = (floatX)(x < USED ? 1.0f : 0.0f);
            row[2 * D + x] = (floatX)1.0f;
        }
    const OnDevice d = on_device(b);
    attention_forward(d.out, d.lse, d.qkv, &d.docs, h);
    from_device("lse", b.lse, d.lse, T, T);
    device_free(d.out), device_free(d.dqkv), device_free(d.delta);
    free_inputs(d);
    const double score = USED * (double)(float)b.qkv[0] / sqrt((double)D);
    for (int t = 0; t < T; t++) {
        const double lse = score + log(t + 1.0), error = fabs(b.lse[t] - lse);
        CHECK_MSG(error <= 4 * 0x1p-24 * lse, "head_dim %d, score %g, key %d: lse is off by %.2g",
                  D, score, t, error);
    }
    free_batch(b);
}
EACH_PATH(equal_scores_of_a_long_document) {
#if defined(CUDA_EMU) && !defined(__FMA__) && !defined(__FP_FAST_FMAF)
    SKIP("this CPU contracts nothing to FMA, as a GPU does");
#endif
    check_equal_scores(64, 70.5f);
    check_equal_scores(128, 99.5f);
}

EACH_PATH(random_layouts) {
    for (int n = 0; n < 12; n++) {
        int lengths[4], num_docs;
        HeadShape heads = random_layout(lengths, &num_docs);
        against_reference(heads, lengths, num_docs, 1);
    }
}

// The largest error comes close to its tolerance: the tolerances are not too large.
TEST(tolerances_are_tight) {
    if (worst == 0) SKIP("nothing was compared");
    CHECK_MSG(worst > 0.5, "the largest error is %.2f of its tolerance", worst);
}

// -------------------------------------------------------------------------------------------------
// Properties, bit for bit

static void check_alone(const Batch &packed, int i) {
    const int len = doc_len(packed, i);
    if (len == 0) return;
    Batch alone = new_batch(packed.heads, &len, 1, 0);  // no slack: memory ends with the document
    copy_doc(&alone, 0, packed, i);
    run(&alone);
    check_same_doc("alone", packed, i, alone, 0);
    free_batch(alone);
}

static void check_permuted(const Batch &packed) {
    int order[MAX_DOCS], lengths[MAX_DOCS] = {0}, n = packed.num_docs;
    for (int i = 0; i < n; i++) {
        int j = (int)test_rng_below((uint32_t)i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < n; i++) lengths[i] = doc_len(packed, order[i]);
    Batch b = new_batch(packed.heads, lengths, n, 1);
    for (int i = 0; i < n; i++) copy_doc(&b, i, packed, order[i]);
    run(&b);
    for (int i = 0; i < n; i++) check_same_doc("permuted", b, i, packed, order[i]);
    free_batch(b);
}

static void packed_alone_permuted(HeadShape heads, const int *lengths, int num_docs) {
    Batch b = random_batch(heads, lengths, num_docs, 1);
    run(&b);
    for (int i = 0; i < num_docs; i++) check_alone(b, i);
    check_permuted(b);
    free_batch(b);
}

EACH_PATH(packed_is_alone_is_permuted) {
    static const int zeros[] = {0, 0, 63, 0, 64, 0, 0, 65, 0, 0}, edges[] = {193, 1, 128, 127, 2};
    packed_alone_permuted({3, 1, 64}, zeros, 10);
    packed_alone_permuted({1, 1, 64}, edges, 5);
    packed_alone_permuted({2, 1, 128}, edges, 5);
    for (int n = 0; n < 12; n++) {
        int lengths[4], num_docs;
        HeadShape heads = random_layout(lengths, &num_docs);
        packed_alone_permuted(heads, lengths, num_docs);
    }
}

// Replacing one document by noise, NaN or infinity must not change the others.
EACH_PATH(isolation) {
    for (int n = 0; n < 18; n++) {
        int lengths[4], num_docs;
        HeadShape heads = random_layout(lengths, &num_docs);
        int victim = (int)test_rng_below((uint32_t)num_docs);
        Batch a = random_batch(heads, lengths, num_docs, 1), b = copy_batch(a, lengths);
        int64_t row = qkv_row(heads), orow = out_row(heads), start = a.cu_seqlens[victim];
        const double noise = n % 3 == 0 ? NAN : n % 3 == 1 ? INFINITY : 3;
        random_values(b.qkv + start * row, lengths[victim] * row, noise);
        random_values(b.dout + start * orow, lengths[victim] * orow, noise);
        run(&a);
        run(&b);
        for (int i = 0; i < num_docs; i++)
            if (i != victim) check_same_doc("isolation", a, i, b, i);
        if (lengths[victim] > 0)
            CHECK(!same_bits(a.out + start * orow, b.out + start * orow, orow));
        free_batch(a), free_batch(b);
    }
}

// Replacing token t must not change the rows before it.
EACH_PATH(causality_forward) {
    for (int n = 0; n < 16; n++) {
        int lengths[] = {(int)test_rng_below(40), 1 + random_length(), (int)test_rng_below(40)};
        int t = (int)test_rng_below((uint32_t)lengths[1]);
        HeadShape heads = all_heads[test_rng_below(NUM_HEADS)];
        Batch a = random_batch(heads, lengths, 3, 1), b = copy_batch(a, lengths);
        random_values(b.qkv + (lengths[0] + t) * qkv_row(heads), qkv_row(heads), 4);
        run(&a);
        run(&b);
        check_same_rows("causality", a, 1, b, 1, t, false);
        check_same_doc("causality", a, 0, b, 0);
        check_same_doc("causality", a, 2, b, 2);
        free_batch(a), free_batch(b);
    }
}

// Only row t has a gradient: dq of other rows, and dk and dv of later rows, are exactly zero.
EACH_PATH(causality_backward) {
    for (int n = 0; n < 16; n++) {
        int len = 1 + random_length(), t = (int)test_rng_below((uint32_t)len);
        Batch b = random_batch(all_heads[test_rng_below(NUM_HEADS)], &len, 1, 1);
        int64_t row = qkv_row(b.heads), orow = out_row(b.heads);
        for (int64_t x = 0; x < len * orow; x++)
            if (x / orow != t) b.dout[x] = (floatX)0.0f;
        run(&b);
        for (int64_t x = 0; x < len * row; x++) {
            bool is_query = x % row < orow, may_differ = is_query ? x / row == t : x / row <= t;
            CHECK_MSG(may_differ || (float)b.dqkv[x] == 0, "row %d has a gradient from row %d",
                      (int)(x / row), t);
        }
        free_batch(b);
    }
}

// NaN or numbers past total_tokens, NaN or numbers in the results before: same bits
EACH_PATH(slack_and_old_results_are_ignored) {
    for (int n = 0; n < 8; n++) {
        int lengths[4], num_docs;
        HeadShape heads = random_layout(lengths, &num_docs);
        Batch a = random_batch(heads, lengths, num_docs, 1), b = copy_batch(a, lengths);
        random_values(b.qkv + b.T * qkv_row(heads), b.slack * qkv_row(heads), 1);
        random_values(b.dout + b.T * out_row(heads), b.slack * out_row(heads), 1);
        random_values(b.dqkv, b.T * qkv_row(heads), 1);
        random_values(b.out, b.T * out_row(heads), 1);
        run(&a);
        run(&b);
        for (int i = 0; i < num_docs; i++) check_same_doc("slack", a, i, b, i);
        for (int64_t x = 0; x < a.T * qkv_row(heads); x++)
            CHECK((float)a.dqkv[x] == (float)a.dqkv[x]);
        free_batch(a), free_batch(b);
    }
}

// Two paths round differently: they may differ by twice the tolerance against fp32, in the worst
// case 2^-7 of the largest value (P and the result are rounded).
TEST(paths_agree) {
    for (int n = 0; n < 6; n++) {
        int lengths[4], num_docs;
        const HeadShape heads = random_layout(lengths, &num_docs);
        use_path("sm90");
        Batch a = random_batch(heads, lengths, num_docs, 1), b = copy_batch(a, lengths);
        run(&a);
        use_path("sm80");
        run(&b);
        float largest = 0;
        for (int64_t x = 0; x < b.T * qkv_row(heads); x++)
            largest = fmaxf(largest, fabsf((float)b.qkv[x]));
        for (int64_t x = 0; x < a.T * out_row(heads); x++)
            CHECK_MSG(fabsf((float)a.out[x] - (float)b.out[x]) <= 2 * U * largest,
                      "out %lld: %g and %g", (long long)x, (float)a.out[x], (float)b.out[x]);
        for (int64_t x = 0; x < (int64_t)a.T * heads.num_heads; x++)
            CHECK(fabsf(a.lse[x] - b.lse[x]) <= 1e-5f * fmaxf(1, fabsf(b.lse[x])));
        free_batch(a), free_batch(b);
    }
}

// The order of items, warps and copies changes from call to call; the bits do not.
EACH_PATH(repeats_give_the_same_bits) {
    static const int lengths[] = {200, 1, 0, 64, 129, 17};
    for (const HeadShape &heads :
         {HeadShape{3, 1, 64}, HeadShape{4, 1, 64}, HeadShape{2, 1, 128}}) {
        Batch first = random_batch(heads, lengths, 6, 1);
        run(&first);
        for (int n = 0; n < 3; n++) {
            Batch again = copy_batch(first, lengths);
            run(&again);
            for (int i = 0; i < 6; i++) check_same_doc("again", again, i, first, i);
            free_batch(again);
        }
        free_batch(first);
    }
}

// -------------------------------------------------------------------------------------------------
// The work list. Its layout (kernels/cuda/attention.cuh): {query items, key items, forward items,
// backward items}, then the items {first row, length, tile}; tiles of 128 queries, of 64 keys, of a
// few units, of 128 keys.

struct Item {
    int32_t start, len, tile;
};

static int tiles_of(int len, int tile) { return (len + tile - 1) / tile; }

// What an item costs, in rows of 64: keys up to its last query, or queries from its first key on
static int query_cost(const Item &it) { return tiles_of(at_most((it.tile + 1) * 128, it.len), 64); }
static int key_cost(const Item &it) { return tiles_of(it.len - it.tile * 64, 64); }
static int backward_cost(const Item &it) { return tiles_of(it.len - it.tile * 128, 64); }

// Units of a document, 64 queries of a head each, are counted over `shared` heads and taken
// `consumers` at a time.
struct Sharing {
    int consumers, shared;
};
static Sharing sharing_of(HeadShape heads) {
    const int consumers = heads.head_dim == 64 ? 3 : 2,
              group = heads.num_heads / heads.num_kv_heads;
    int shared = 1;
    for (int n = 1; n <= consumers; n++)
        if (group % n == 0) shared = n;
    return {consumers, shared};
}
static int units_of(const Item &it, Sharing s) { return tiles_of(it.len, 64) * s.shared; }
static int forward_cost(const Item &it, Sharing s) {
    return (at_most((it.tile + 1) * s.consumers, units_of(it, s)) - 1) / s.shared;
}

// Every unit of every document exactly once, costliest first; none for an empty document
static void check_forward_items(const Item *items, int n, const int32_t *cu_seqlens, int num_docs,
                                Sharing s) {
    static unsigned char seen[1 << 18];
    const int T = cu_seqlens[num_docs];
    int expected = 0, found = 0;
    memset(seen, 0, (size_t)T * 3);
    for (int doc = 0; doc < num_docs; doc++)
        expected += tiles_of(cu_seqlens[doc + 1] - cu_seqlens[doc], 64) * s.shared;
    for (int i = 0; i < n; i++) {
        const Item &it = items[i];
        const int first = it.tile * s.consumers;
        CHECK(it.start >= 0 && it.len > 0 && it.start + it.len <= T);
        CHECK_MSG(first < units_of(it, s), "an item without a unit");
        for (int u = first; u < at_most(first + s.consumers, units_of(it, s)); u++, found++) {
            unsigned char *mark = &seen[(it.start + u / s.shared * 64) * 3 + u % s.shared];
            CHECK_MSG(!*mark, "the document at row %d has unit %d twice", it.start, u);
            *mark = 1;
        }
        CHECK_MSG(i == 0 || forward_cost(items[i - 1], s) >= forward_cost(it, s),
                  "item %d costs more than the one before", i);
    }
    CHECK_MSG(found == expected, "%d units of %d", found, expected);
}

static void check_items(const Item *items, int n, int tile, int (*cost)(const Item &),
                        const int32_t *cu_seqlens, int num_docs) {
    static unsigned char seen[1 << 16];
    static int32_t length_at[1 << 16];
    const int T = cu_seqlens[num_docs];
    int expected = 0;
    memset(seen, 0, (size_t)T);
    memset(length_at, 0, (size_t)T * sizeof(int32_t));
    for (int doc = 0; doc < num_docs; doc++) {
        int len = cu_seqlens[doc + 1] - cu_seqlens[doc];
        if (len > 0) length_at[cu_seqlens[doc]] = len;
        expected += tiles_of(len, tile);
    }
    CHECK_MSG(n == expected, "%d items for %d tiles", n, expected);
    for (int i = 0; i < n; i++) {
        const Item &it = items[i];
        CHECK(it.start >= 0 && it.start < T && it.len > 0 && length_at[it.start] == it.len);
        CHECK(it.tile >= 0 && it.tile < tiles_of(it.len, tile));
        unsigned char *s = &seen[it.start + it.tile * tile];  // the tile's first row is its name
        CHECK_MSG(!*s, "the document at row %d has tile %d twice", it.start, it.tile);
        *s = 1;
        CHECK_MSG(i == 0 || cost(items[i - 1]) >= cost(it),
                  "item %d costs more than the one before", i);
    }
}

TEST(plan_has_each_tile_once_longest_first) {
    static int32_t cu_seqlens[601], work[1 << 15];
    for (int n = 0; n < 10000; n++) {
        int num_docs = 1 + (int)test_rng_below(n % 100 == 0 ? 600 : 8);
        for (int i = 0; i < num_docs; i++) {
            int len = random_length();
            if (num_docs < 8 && test_rng_below(10) == 0) len = (int)test_rng_below(3000);
            cu_seqlens[i + 1] = cu_seqlens[i] + (num_docs < 8 ? len : len % 100);
        }
        size_t size = attention_plan_size(cu_seqlens[num_docs], num_docs);
        CHECK(size < sizeof(work) / sizeof(work[0]));
        memset(work, 0xff, sizeof(work));
        static const int groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 32};
        const HeadShape heads = {groups[n % 9] * 2, 2, n / 9 % 2 ? 64 : 128};
        size_t used = attention_plan(work, cu_seqlens, num_docs, heads);
        CHECK_MSG(used <= size && work[used] == -1, "%zu of %zu", used, size);
        CHECK(used == 4 + 3 * (size_t)(work[0] + work[1] + work[2] + work[3]));
        const Item *items = (const Item *)(work + 4);
        check_items(items, work[0], 128, query_cost, cu_seqlens, num_docs);
        check_items(items + work[0], work[1], 64, key_cost, cu_seqlens, num_docs);
        check_forward_items(items + work[0] + work[1], work[2], cu_seqlens, num_docs,
                            sharing_of(heads));
        check_items(items + work[0] + work[1] + work[2], work[3], 128, backward_cost, cu_seqlens,
                    num_docs);
    }
}

// Grids use the same bound as the size: it must hold for the worst layouts, and empty documents
// must not count.
TEST(plan_size_bounds_every_layout) {
    static int32_t cu_seqlens[5001], work[1 << 16];
    for (int tokens = 0; tokens <= 5000; tokens += tokens < 300 ? 1 : 100) {
        for (int docs = 1; docs <= 5000; docs *= 5) {
            for (int i = 0; i <= docs; i++)  // short ones first, the rest in the last
                cu_seqlens[i] = i < docs ? at_most(i, tokens) : tokens;
            size_t size = attention_plan_size(tokens, docs);
            CHECK(size < sizeof(work) / sizeof(work[0]));
            CHECK(attention_plan(work, cu_seqlens, docs, {1, 1, 64}) <= size);
            CHECK(size <= 4 + 3 * 4 * (size_t)tokens);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Real sizes

// True: full sizes, for a GPU. False: small ones, for the emulator.
static bool real_sizes() {
    const char *full = getenv("UNPAD_FULL");
    if (!full || !*full) SKIP("real sizes: set UNPAD_FULL=1 on a GPU");
    static bool told;  // the reference starts with two threads
    const DeviceOptions all_cores = {num_cores(), 0};
    if (!told) open_device(), reference().device_init(&all_cores);
    told = true;
    return strcmp(full, "small") != 0;
}

static double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The inverse of the normal distribution function, by bisection
static double normal_quantile(double p) {
    double low = -10, high = 10;
    for (int i = 0; i < 80; i++) {
        const double middle = (low + high) / 2;
        *(0.5 * erfc(-middle / sqrt(2.0)) < p ? &low : &high) = middle;
    }
    return low;
}

// Web pages, as dev/bench.py makes them: quantiles of a log-normal law of sigma 1.04, in random
// order. 65,536 tokens in 95 documents are R65.
static std::vector<int> web_lengths(int tokens, int num_docs) {
    const double mean = 700 * (double)tokens / num_docs * 95 / 65536;
    std::vector<int> lengths((size_t)num_docs);
    int total = 0;
    for (int i = 0; i < num_docs; i++) {
        const double z = normal_quantile((i + 0.5) / num_docs);
        const double x = exp(log(mean) - 1.04 * 1.04 / 2 + 1.04 * z);
        int n = at_least(1, (int)lround(fmin(x, 8192)));
        if (i == num_docs - 1) n = tokens - total;  // the longest takes the rest
        CHECK(n > 0);
        total += n;
        const size_t j = test_rng_below((uint32_t)i + 1);
        lengths[(size_t)i] = lengths[j];
        lengths[j] = n;
    }
    return lengths;
}
static std::vector<int> r65_or_small(bool real) {
    return real ? web_lengths(65536, 95) : web_lengths(700, 14);
}

static Batch random_batch(HeadShape heads, const std::vector<int> &lengths, double scale) {
    return random_batch(heads, lengths.data(), (int)lengths.size(), scale);
}

// The grid. The CPU side (inputs, reference, comparison) may take 90 s on 16 cores. Estimate:
// 1.9e11 (query, key, column) of query heads at 2.5 ns take 30 s, inputs and copies about 20 s
// more. Each case prints its time.
static const HeadShape grid_heads[] = {{1, 1, 64},  {4, 1, 64},   {9, 3, 64},   {15, 5, 64},
                                       {32, 8, 64}, {32, 32, 64}, {1, 1, 128},  {4, 1, 128},
                                       {9, 3, 128}, {15, 5, 128}, {32, 8, 128}, {32, 32, 128}};
static const int grid_lengths[] = {1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257};
enum { GRID = sizeof(grid_lengths) / sizeof(grid_lengths[0]) };

struct Grid {
    bool real;
    int layouts;
    double start, tokens, work;
};
static Grid grid_start() { return {real_sizes(), 0, seconds(), 0, 0}; }
static void grid_run(Grid *g, HeadShape heads, const std::vector<int> &lengths, double scale) {
    g->layouts++;
    for (int n : lengths) {
        g->tokens += n;
        g->work += n * (n + 1.0) / 2 * heads.num_heads * heads.head_dim;
    }
    against_reference(heads, lengths.data(), (int)lengths.size(), scale);
}
static void grid_end(const Grid &g) {
    printf("    %d layouts, %.3g tokens, %.2g query-key-columns in %.1f s on %d cores\n", g.layouts,
           g.tokens, g.work, seconds() - g.start, num_cores());
}

// Heads that the small form skips
static bool left_out(const Grid &g, HeadShape heads) {
    return !g.real && (heads.num_heads > 4 || (heads.num_heads == 4 && heads.head_dim == 128));
}

// Each length alone, ordered pairs, sampled triples. With 32 heads a quarter of the pairs, another
// one for each shape of heads.
EACH_PATH(real_grid_edge_lengths) {
    Grid g = grid_start();
    int shape = 0;
    for (const HeadShape &heads : grid_heads) {
        int pair_step = heads.num_heads == 32 ? 4 : 1, triples = 40;
        if (!g.real) pair_step = 61, triples = 1;
        shape++;
        if (left_out(g, heads)) continue;
        for (int n = 0; n < GRID; n += g.real ? 1 : 5) grid_run(&g, heads, {grid_lengths[n]}, 1);
        for (int n = shape % pair_step; n < GRID * GRID; n += pair_step)
            grid_run(&g, heads, {grid_lengths[n / GRID], grid_lengths[n % GRID]}, 1);
        for (int n = 0; n < triples; n++) {
            std::vector<int> lengths;
            for (int i = 0; i < 3; i++) lengths.push_back(grid_lengths[test_rng_below(GRID)]);
            grid_run(&g, heads, lengths, 1 + n % 3 * 2);  // inputs of scale 1, 3, 5
        }
    }
    grid_end(g);
}

EACH_PATH(real_grid_many_documents) {
    Grid g = grid_start();
    const std::vector<int> layouts[] = {std::vector<int>(g.real ? 200 : 20, 1),
                                        std::vector<int>(g.real ? 500 : 10, 17),
                                        {0, 193, 65},
                                        {193, 0, 65},
                                        {193, 65, 0},
                                        {0, 0, 193, 0, 65},
                                        {193, 0, 0, 65},
                                        {193, 65, 0, 0},
                                        {220, 217, 295, 183, 130, 350}};
    for (const HeadShape &heads : grid_heads)
        for (const std::vector<int> &lengths : layouts)
            if (!left_out(g, heads) && (g.real || lengths.size() > 6 || heads.num_heads == 1))
                grid_run(&g, heads, lengths, 1);
    grid_end(g);
}

EACH_PATH(real_grid_long_documents) {
    Grid g = grid_start();
    const int longest = g.real ? 8192 : 300;
    grid_run(&g, {1, 1, 64}, {1, longest}, 1);
    grid_run(&g, {1, 1, 128}, {longest, 1}, 1);
    if (g.real) {
        grid_run(&g, {4, 1, 64}, {8192, 1}, 1);
        grid_run(&g, {4, 1, 128}, {1, 8192}, 1);
        grid_run(&g, {15, 5, 64}, {4096}, 1);
        grid_run(&g, {9, 3, 128}, {4096}, 3);
        grid_run(&g, {9, 3, 64}, web_lengths(16384, 24), 1);
        grid_run(&g, {3, 1, 128}, web_lengths(32768, 48), 1);
        grid_run(&g, {1, 1, 64}, web_lengths(131072, 190), 1);
    }
    grid_run(&g, {g.real ? 9 : 3, g.real ? 3 : 1, 64}, r65_or_small(g.real), 1);
    grid_end(g);
}

// The longest document, the median and the ten shortest; then all of them in another order
EACH_PATH(real_web_pages_packed_is_alone_is_permuted) {
    const bool real = real_sizes();
    static const HeadShape shapes[] = {{9, 3, 64}, {15, 5, 64}, {8, 2, 128}};
    for (const HeadShape &heads : shapes) {
        if (!real && heads.num_heads != 8) continue;
        const std::vector<int> lengths = r65_or_small(real);
        const int n = (int)lengths.size();
        Batch b = random_batch(heads, lengths, 1);
        run(&b);
        for (int i = 0; i < n; i++) {
            int shorter = 0;  // its index in sorted order
            for (int j = 0; j < n; j++)
                shorter += lengths[j] < lengths[i] || (lengths[j] == lengths[i] && j < i);
            if (shorter < 10 || shorter == n / 2 || shorter == n - 1) check_alone(b, i);
        }
        check_permuted(b);
        free_batch(b);
    }
}

static void check_all_same(const char *what, const Batch &a, const Batch &b) {
    const int64_t n = (int64_t)a.T * a.heads.num_heads;
    CHECK_MSG(same_bits(a.out, b.out, a.T * out_row(a.heads)), "%s: out differs", what);
    CHECK_MSG(same_bits(a.dqkv, b.dqkv, a.T * qkv_row(a.heads)), "%s: dqkv differs", what);
    CHECK_MSG(same_bits(a.lse, b.lse, n), "%s: lse differs", what);
    CHECK_MSG(same_bits(a.delta, b.delta, n), "%s: delta differs", what);
}

// NaN or numbers after the last row: same bits, and no NaN in the results. Then with 128 empty
// documents between the others, several at each end.
EACH_PATH(real_web_pages_slack_and_empty_documents) {
    enum { SLACK = 200, EMPTY = 128 };
    const HeadShape heads = {3, 1, 64};
    const std::vector<int> lengths = r65_or_small(real_sizes());
    const int64_t row = qkv_row(heads), orow = out_row(heads);
    const int n = (int)lengths.size();
    Batch a = new_batch(heads, lengths.data(), n, SLACK);
    random_values(a.qkv, a.T * row, 1);
    random_values(a.dout, a.T * orow, 1);
    Batch b = copy_batch(a, lengths.data());
    random_values(b.qkv + b.T * row, SLACK * row, 1);
    random_values(b.dout + b.T * orow, SLACK * orow, 1);
    run(&a);
    run(&b);
    check_all_same("slack", a, b);
    for (int64_t x = 0; x < a.T * row; x++) CHECK((float)a.dqkv[x] == (float)a.dqkv[x]);
    for (int64_t x = 0; x < a.T * orow; x++) CHECK((float)a.out[x] == (float)a.out[x]);
    free_batch(b);

    std::vector<int> spread;
    for (int i = 0, empty = 0; i <= n; i++) {
        for (; empty < EMPTY * (i + 1) / (n + 1); empty++) spread.push_back(0);
        if (i < n) spread.push_back(lengths[(size_t)i]);
    }
    CHECK((int)spread.size() == n + EMPTY && spread.back() == 0 && spread.front() == 0);
    b = new_batch(heads, spread.data(), n + EMPTY, SLACK);
    memcpy((void *)b.qkv, a.qkv, (size_t)((a.T + SLACK) * row) * sizeof(floatX));
    memcpy((void *)b.dout, a.dout, (size_t)((a.T + SLACK) * orow) * sizeof(floatX));
    run(&b);
    check_all_same("empty documents", a, b);
    free_batch(a), free_batch(b);
}

// Repeated calls give the same bits while another stream keeps memory and multiprocessors busy.

__global__ void count_differences(const uint32_t *a, const uint32_t *b, int64_t n,
                                  unsigned *count) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    unsigned found = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        found += a[i] != b[i];
    if (found) atomicAdd(count, found);
}

__global__ void traffic(uint4 *x, int64_t n) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        uint4 word = x[i];
        word.x++, word.w ^= word.x;
        x[i] = word;
    }
}

// A result on the device and its first value
struct Result {
    void *now, *first;
    int64_t bytes;
};

EACH_PATH(real_1000_repeats_under_traffic) {
    const bool real = real_sizes();
    const int repeats = real ? 1000 : 4, blocks = real ? 2 * cuda_num_sms() : 2;
    const HeadShape heads = real ? HeadShape{9, 3, 64} : HeadShape{3, 1, 64};
    std::vector<int> lengths = real ? web_lengths(8192, 12) : std::vector<int>{65, 0, 130};
    lengths.insert(lengths.end(), {1, 0, 63, 64, 65, 1});
    Batch b = random_batch(heads, lengths, 1);
    const OnDevice d = on_device(b);
    const int64_t n = (int64_t)b.T * heads.num_heads * (int64_t)sizeof(float);
    Result results[] = {{d.out, NULL, b.T * out_row(heads) * (int64_t)sizeof(floatX)},
                        {d.dqkv, NULL, b.T * qkv_row(heads) * (int64_t)sizeof(floatX)},
                        {d.lse, NULL, n},
                        {d.delta, NULL, n}};
    launch(d, heads);
    for (Result &r : results) {
        CHECK((r.first = device_malloc((size_t)r.bytes)) != NULL);
        CUDA_CHECK(cudaMemcpyAsync(r.first, r.now, (size_t)r.bytes, cudaMemcpyDeviceToDevice,
                                   cuda_stream()));
    }
    std::vector<unsigned> found((size_t)repeats * 4, 0);
    unsigned *counts = to_device(found.data(), (int64_t)found.size());

    const size_t traffic_bytes = real ? (size_t)1 << 30 : 1 << 14;
    char *moved = (char *)device_malloc(traffic_bytes);
    cudaStream_t other;
    int rounds = 0;
    CHECK(moved != NULL);
    device_zero(moved, traffic_bytes);
    device_synchronize();
    CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int i = 0; i < repeats; i++) {
        if (cudaStreamQuery(other) == cudaSuccess) {
            for (int k = 0; k < 4; k++) {
                traffic<<<blocks, 256, 0, other>>>((uint4 *)moved,
                                                   (int64_t)(traffic_bytes / sizeof(uint4)));
                LAUNCH_CHECK("traffic");
                CUDA_CHECK(cudaMemcpyAsync(moved, moved + traffic_bytes / 2, traffic_bytes / 2,
                                           cudaMemcpyDeviceToDevice, other));
                CUDA_CHECK(cudaMemsetAsync(moved + traffic_bytes / 2, k, traffic_bytes / 2, other));
            }
            rounds++;
        }
        cudaGetLastError();  // "not ready" is not an error
        for (const Result &r : results) device_zero(r.now, (size_t)r.bytes);
        launch(d, heads);
        for (int k = 0; k < 4; k++) {
            const Result &r = results[k];
            count_differences<<<blocks, 256, 0, cuda_stream()>>>((const uint32_t *)r.now,
                                                                 (const uint32_t *)r.first,
                                                                 r.bytes / 4, counts + 4 * i + k);
            LAUNCH_CHECK("count_differences");
        }
        if (i % 10 == 9) device_synchronize();
    }
    device_download(found.data(), counts, found.size() * sizeof(unsigned));
    CUDA_CHECK(cudaStreamSynchronize(other));
    CUDA_CHECK(cudaStreamDestroy(other));
    for (int i = 0; i < repeats; i++)
        for (int k = 0; k < 4; k++) {
            static const char *names[] = {"out", "dqkv", "lse", "delta"};
            CHECK_MSG(found[(size_t)(4 * i + k)] == 0, "repeat %d: %u words of %s differ", i,
                      found[(size_t)(4 * i + k)], names[k]);
        }
    printf("    %d repeats, traffic started %d times\n", repeats, rounds);
    for (const Result &r : results) device_free(r.now), device_free(r.first);
    device_free(moved), device_free(counts);
    free_inputs(d);
    free_batch(b);
}

template <class T>
static T *zeros_on_device(int64_t n) {
    T *p = (T *)device_malloc((size_t)n * sizeof(T));
    CHECK(p != NULL);
    device_zero(p, (size_t)n * sizeof(T));
    return p;
}

// Offsets beyond 2^31 and 2^32 elements. All documents are zero but the first, the last and those
// where an offset passes 2^31 or 2^32: these must give the bits that they give alone.
EACH_PATH(real_offsets_of_more_than_32_bits) {
    const bool real = real_sizes();
    const HeadShape heads = real ? HeadShape{32, 8, 64} : HeadShape{4, 1, 64};
    const int len = real ? 128 : 65, num_docs = real ? 11800 : 6;
    const int64_t T = (int64_t)num_docs * len, row = qkv_row(heads), orow = out_row(heads);
    const int64_t rows = T * heads.num_heads;  // of lse and delta
    const double bytes = 4.0 * (double)(T * (row + orow)) + 8.0 * (double)rows;
    if (real) CHECK(T * row > (int64_t)1 << 32 && T * orow > (int64_t)1 << 31);
    if ((double)device_memory_free() < bytes + 1e9)
        SKIP("needs %.0f GB of free GPU memory", bytes * 1e-9 + 1);

    OnDevice d;
    std::vector<int32_t> cu_seqlens((size_t)num_docs + 1);
    for (int i = 0; i <= num_docs; i++) cu_seqlens[(size_t)i] = i * len;
    plan_on_device(&d, cu_seqlens.data(), num_docs, heads);
    d.qkv = zeros_on_device<floatX>(T * row), d.dqkv = zeros_on_device<floatX>(T * row);
    d.dout = zeros_on_device<floatX>(T * orow), d.out = zeros_on_device<floatX>(T * orow);
    d.lse = zeros_on_device<float>(rows), d.delta = zeros_on_device<float>(rows);

    int docs[8] = {0}, n = 1;  // ascending
    for (int64_t at : {(int64_t)1 << 31, (int64_t)1 << 32, INT64_MAX})
        for (int64_t width : {row, orow}) {
            const int64_t doc = at / width / len;
            docs[n++] = doc < num_docs ? (int)doc : num_docs - 1;
        }
    std::vector<Batch> alone;
    for (int i = 0; i < n; i++) {
        const Batch b = random_batch(heads, &len, 1, 1);
        const int64_t start = (int64_t)docs[i] * len;
        device_upload(d.qkv + start * row, b.qkv, (size_t)(len * row) * sizeof(floatX));
        device_upload(d.dout + start * orow, b.dout, (size_t)(len * orow) * sizeof(floatX));
        alone.push_back(b);
    }
    launch(d, heads);
    int compared = 0;
    for (int i = 0; i < n; i++) {
        const int64_t start = (int64_t)docs[i] * len;
        bool again = false;  // overwritten by a later one
        for (int j = i + 1; j < n; j++) again = again || docs[j] == docs[i];
        if (again) continue;
        Batch far = new_batch(heads, &len, 1, 0);
        device_download(far.out, d.out + start * orow, (size_t)(len * orow) * sizeof(floatX));
        device_download(far.dqkv, d.dqkv + start * row, (size_t)(len * row) * sizeof(floatX));
        for (int h = 0; h < heads.num_heads; h++)
            device_download(far.lse + h * len, d.lse + h * T + start, (size_t)len * sizeof(float));
        run(&alone[(size_t)i]);
        check_same_doc("far away", far, 0, alone[(size_t)i], 0);
        free_batch(far);
        compared++;
    }
    printf("    %lld tokens, %.1f GB, %d documents compared\n", (long long)T, bytes * 1e-9,
           compared);
    for (Batch &b : alone) free_batch(b);
    device_free(d.dqkv), device_free(d.out), device_free(d.lse), device_free(d.delta);
    free_inputs(d);
}

TEST_MAIN()
