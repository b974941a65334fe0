// kernels/cuda/attention*.cu against the CPU backend in fp32 on the same bf16 inputs, and against
// themselves: packed = alone = permuted, one document changes no other, causality, NaN in the
// slack.
//
// Tolerances follow from where the kernels round to bf16 (unit roundoff U = 2^-8), term by term:
// P before P V and P^T dO, dS before dS K and dS^T Q, and every result once more. delta carries the
// rounding of out. A sum of n rounded terms is off by at most U times the sum of magnitudes and,
// roundings being independent, hardly ever by more than 4 U times the root of the sum of squares:
// the smaller of both. Everything else is fp32. So a lost or doubled key, a wrong mask or a wrong
// scale is far outside.
#include <cuda_bf16.h>
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../kernels/kernels.h"
#include "test.h"
#include "twin.h"

static const double U = 0x1p-8;
enum { MAX_DOCS = 64 };

static int at_most(int a, int b) { return a < b ? a : b; }

// Opened by the first case that computes, so that an earlier one can fork.
static const Twin &twin() {
    static Twin t = twin_open();
    return t;
}
static void open_device() {
    static bool open = false;
    DeviceOptions options = {0, "auto", 0, 1};
    const char *missing = open ? NULL : device_init(&options);
    if (missing) fprintf(stderr, "%s\n", missing), exit(2);
    open = true;
}

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

static void random_values(floatX *x, int64_t n, double scale) {
    for (int64_t i = 0; i < n; i++) x[i] = (floatX)(float)(scale * test_rng_normal());
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

static void run(Batch *b) {
    const HeadShape h = b->heads;
    const int64_t rows = b->T + b->slack, row = qkv_row(h), orow = out_row(h);
    open_device();
    int longest = 0;
    for (int i = 0; i < b->num_docs; i++)
        longest = doc_len(*b, i) > longest ? doc_len(*b, i) : longest;
    size_t size = attention_plan_size(b->T, b->num_docs);
    int32_t *work_host = new_values<int32_t>((int64_t)size);
    size_t used = attention_plan(work_host, b->cu_seqlens, b->num_docs, h);
    CHECK(used <= size);
    int32_t *work = to_device(work_host, (int64_t)used);
    int32_t *cu_seqlens = to_device(b->cu_seqlens, b->num_docs + 1);
    floatX *qkv = to_device(b->qkv, rows * row), *dqkv = to_device(b->dqkv, rows * row);
    floatX *dout = to_device(b->dout, rows * orow), *out = to_device(b->out, rows * orow);
    float *lse = to_device(b->lse, rows * h.num_heads),
          *delta = to_device(b->delta, rows * h.num_heads);
    Documents docs = {cu_seqlens, work, b->T, b->num_docs, longest};
    attention_forward(out, lse, qkv, &docs, h);
    attention_backward(dqkv, delta, dout, qkv, out, lse, &docs, h);
    from_device("out", b->out, out, b->T * orow, rows * orow);
    from_device("dqkv", b->dqkv, dqkv, b->T * row, rows * row);
    from_device("lse", b->lse, lse, (int64_t)b->T * h.num_heads, rows * h.num_heads);
    from_device("delta", b->delta, delta, (int64_t)b->T * h.num_heads, rows * h.num_heads);
    device_free(qkv), device_free(dout), device_free(work), device_free(cu_seqlens);
    free(work_host);
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
// What the random cases draw from

static const HeadShape all_heads[] = {{1, 1, 64}, {3, 1, 64},  {4, 1, 64},  {2, 2, 64},
                                      {6, 2, 64}, {1, 1, 128}, {3, 1, 128}, {4, 2, 128}};
enum { NUM_HEADS = sizeof(all_heads) / sizeof(all_heads[0]) };

static int random_length() {
    static const int edges[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 193};
    if (test_rng_below(3) == 0) return (int)test_rng_below(90);
    return edges[test_rng_below(sizeof(edges) / sizeof(edges[0]))];
}

// Lengths of a few documents, a zero at an end now and then; returns heads
static HeadShape random_layout(int *lengths, int *num_docs) {
    int n = *num_docs = 1 + (int)test_rng_below(4);
    for (int i = 0; i < n; i++) lengths[i] = random_length();
    if (test_rng_below(6) == 0) lengths[0] = 0;
    if (test_rng_below(6) == 0) lengths[n - 1] = 0;
    return all_heads[test_rng_below(NUM_HEADS)];
}

// -------------------------------------------------------------------------------------------------
// Against the CPU backend

// Sums of magnitudes and of squares, from which rounding errors follow
struct Size {
    double sum, squares;
    void add(double x) { sum += fabs(x), squares += x * x; }
    double error() const { return fmin(sum, 4 * sqrt(squares)); }
};

struct Reference {
    float *qkv, *dout, *out, *lse, *dqkv, *delta;
};

static float *widen(const floatX *x, int64_t n) {
    float *y = new_values<float>(n);
    for (int64_t i = 0; i < n; i++) y[i] = (float)x[i];
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
    int32_t *work = new_values<int32_t>((int64_t)twin().attention_plan_size(b.T, b.num_docs));
    twin().attention_plan(work, b.cu_seqlens, b.num_docs, h);
    Documents docs = {b.cu_seqlens, work, b.T, b.num_docs, b.T};
    twin().attention_forward(r.out, r.lse, r.qkv, &docs, h);
    twin().attention_backward(r.dqkv, r.delta, r.dout, r.qkv, r.out, r.lse, &docs, h);
    free(work);
    return r;
}
static void free_reference(Reference r) {
    free(r.qkv), free(r.dout), free(r.out), free(r.lse), free(r.dqkv), free(r.delta);
}

static double worst;  // error / tolerance, of all values compared

static void check_value(const char *what, int doc, int row, int col, double got, double want,
                        double tolerance) {
    double error = fabs(got - want);
    CHECK_MSG(error <= tolerance,
              "%s of document %d, row %d, column %d: %.7g, expected %.7g within %.2g", what, doc,
              row, col, got, want, tolerance);
    worst = fmax(worst, error / tolerance);
}

static double dot(const float *a, const float *b, int n) {
    double s = 0;
    for (int i = 0; i < n; i++) s += (double)a[i] * b[i];
    return s;
}
static double dot_size(const float *a, const float *b, int n) {
    double s = 0;
    for (int i = 0; i < n; i++) s += fabs((double)a[i] * b[i]);
    return s;
}

// Error sizes of a row of keys, summed over the queries that see it
struct KeySizes {
    Size dv, dk, delta;  // p dO; dS q; what delta's error does
    double fp32_dv, fp32_dk;
};

// All results of one document's query heads of one kv head
static void check_group(const Batch &b, const Reference &r, int doc, int kv) {
    const HeadShape hs = b.heads;
    const int group = hs.num_heads / hs.num_kv_heads, D = hs.head_dim, len = doc_len(b, doc);
    const int64_t row = qkv_row(hs), orow = out_row(hs), start = b.cu_seqlens[doc];
    const int64_t k_at = (int64_t)(hs.num_heads + kv) * D, v_at = k_at + hs.num_kv_heads * D;
    const double scale = 1 / sqrt((double)D);
    KeySizes *sizes = (KeySizes *)calloc((size_t)len * D + 1, sizeof(KeySizes));
    double *p = new_values<double>(len), *ds = new_values<double>(len),
           *ds_size = new_values<double>(len);
    for (int g = 0; g < group; g++) {
        const int head = kv * group + g;
        for (int i = 0; i < len; i++) {
            const int64_t t = start + i, lse_at = (int64_t)head * b.T + t;
            const float *q = r.qkv + t * row + head * D, *dout = r.dout + t * orow + head * D;
            const float *out = r.out + t * orow + head * D;
            const double delta = dot(dout, out, D);
            double score = 0, delta_error = 0, tol_out[128];
            for (int j = 0; j <= i; j++) {
                const float *k = r.qkv + (start + j) * row + k_at, *v = k + v_at - k_at;
                score = fmax(score, scale * dot_size(q, k, D));
                p[j] = exp(scale * dot(q, k, D) - r.lse[lse_at]);
                ds[j] = p[j] * (dot(dout, v, D) - delta);
                ds_size[j] = p[j] * (dot_size(dout, v, D) + dot_size(dout, out, D));
            }
            const double fp32 = (score + 16) * 0x1p-21;  // relative, of a probability
            check_value("lse", doc, i, head, b.lse[lse_at], r.lse[lse_at],
                        1e-5 * fmax(1, fabs(r.lse[lse_at])));
            for (int x = 0; x < D; x++) {
                Size s = {};
                for (int j = 0; j <= i; j++) s.add(p[j] * r.qkv[(start + j) * row + v_at + x]);
                tol_out[x] = U * (s.error() + fabs(out[x])) + fp32 * s.sum + 1e-30;
                delta_error += dout[x] * tol_out[x] * dout[x] * tol_out[x];
                check_value("out", doc, i, head * D + x, (float)b.out[t * orow + head * D + x],
                            out[x], tol_out[x]);
            }
            delta_error = 4 * sqrt(delta_error);
            check_value("delta", doc, i, head, b.delta[lse_at], delta, delta_error + 1e-30);
            for (int x = 0; x < D; x++) {
                Size s = {};
                double pk = 0, size = 0;
                for (int j = 0; j <= i; j++) {
                    const double k = r.qkv[(start + j) * row + k_at + x];
                    KeySizes *z = &sizes[j * D + x];
                    s.add(scale * ds[j] * k);
                    pk += p[j] * k;
                    size += scale * fabs(ds_size[j] * k);
                    z->dv.add(p[j] * dout[x]);
                    z->dk.add(scale * ds[j] * q[x]);
                    z->delta.add(scale * p[j] * delta_error * q[x]);
                    z->fp32_dv += fp32 * fabs(p[j] * dout[x]);
                    z->fp32_dk += fp32 * scale * fabs(ds_size[j] * q[x]);
                }
                const double want = r.dqkv[t * row + head * D + x];
                check_value("dq", doc, i, head * D + x, (float)b.dqkv[t * row + head * D + x], want,
                            U * (s.error() + fabs(want)) + delta_error * scale * fabs(pk) +
                                fp32 * size + 1e-30);
            }
        }
    }
    for (int j = 0; j < len; j++)
        for (int x = 0; x < D; x++) {
            const KeySizes &z = sizes[j * D + x];
            const int64_t at = (start + j) * row + x;
            const double dk = r.dqkv[at + k_at], dv = r.dqkv[at + v_at];
            check_value("dk", doc, j, kv * D + x, (float)b.dqkv[at + k_at], dk,
                        U * (z.dk.error() + fabs(dk)) + z.delta.error() + z.fp32_dk + 1e-30);
            check_value("dv", doc, j, kv * D + x, (float)b.dqkv[at + v_at], dv,
                        U * (z.dv.error() + fabs(dv)) + z.fp32_dv + 1e-30);
        }
    free(sizes), free(p), free(ds), free(ds_size);
}

static void check_against_twin(Batch *b) {
    run(b);
    Reference r = reference_of(*b);
    for (int doc = 0; doc < b->num_docs; doc++)
        for (int kv = 0; kv < b->heads.num_kv_heads; kv++) check_group(*b, r, doc, kv);
    free_reference(r);
}

static void against_twin(HeadShape heads, const int *lengths, int num_docs, double scale) {
    Batch b = random_batch(heads, lengths, num_docs, scale);
    check_against_twin(&b);
    free_batch(b);
}

// First: a program that has opened the device should not fork.
TEST(unsupported_shapes_end_the_program) {
    static const HeadShape wrong[] = {{4, 3, 64}, {4, 0, 64}, {0, 1, 64}, {4, 2, 32}, {4, 2, 96}};
    for (const HeadShape &heads : wrong) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            Documents docs = {NULL, NULL, 0, 0, 0};
            if (!freopen("/dev/null", "w", stderr)) _exit(1);
            attention_forward(NULL, NULL, NULL, &docs, heads);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        CHECK_MSG(WEXITSTATUS(status) == 11, "exit code %d", WEXITSTATUS(status));
    }
}

TEST(no_tokens_need_no_plan) {
    const Documents docs = {NULL, NULL, 0, 0, 0};
    open_device();
    attention_forward(NULL, NULL, NULL, &docs, {9, 3, 64});
    attention_backward(NULL, NULL, NULL, NULL, NULL, NULL, &docs, {9, 3, 64});
}

static const int edge_lengths[] = {1, 2, 63, 64, 65, 127, 128, 129, 193};

TEST(edge_lengths_one_head) {
    against_twin({1, 1, 64}, edge_lengths, 9, 1);
    against_twin({1, 1, 128}, edge_lengths, 9, 1);
}
TEST(edge_lengths_grouped_heads) {
    against_twin({3, 1, 64}, edge_lengths, 9, 1);
    against_twin({3, 1, 128}, edge_lengths + 4, 5, 1);
    against_twin({4, 1, 64}, edge_lengths + 1, 6, 1);
    against_twin({6, 2, 64}, edge_lengths + 2, 4, 1);
    against_twin({4, 1, 128}, edge_lengths, 5, 1);
}
TEST(large_inputs) {
    static const int lengths[] = {65, 3, 129};
    for (double scale : {3.0, 5.0}) {
        against_twin({3, 1, 64}, lengths, 3, scale);
        against_twin({2, 1, 128}, lengths, 3, scale);
    }
}
TEST(zero_length_documents) {
    static const int lengths[] = {0, 0, 63, 0, 64, 0, 0, 65, 2, 0};
    static const int first[] = {0, 130}, last[] = {130, 0}, none[] = {0, 0, 0};
    against_twin({3, 1, 64}, lengths, 10, 1);
    against_twin({1, 1, 128}, lengths, 10, 1);
    against_twin({2, 2, 64}, first, 2, 1);
    against_twin({2, 2, 64}, last, 2, 1);
    against_twin({2, 2, 64}, none, 3, 1);
}
TEST(documents_of_one_token) {
    int ones[40];
    for (int &n : ones) n = 1;
    against_twin({4, 1, 64}, ones, 40, 1);
    against_twin({2, 1, 128}, ones, 40, 1);
}
TEST(seed_batch) {
    static const int lengths[] = {220, 217, 295, 183, 130, 350};
    against_twin({3, 1, 64}, lengths, 6, 1);
}

// One key is far larger than the others: from there on a row is all but one-hot, at the first, a
// middle or the last key of a tile
TEST(softmax_spikes) {
    static const int at[] = {0, 63, 64, 100, 128};
    for (int D = 64; D <= 128; D += 64)
        for (int spike : at) {
            const int len = 150;
            const HeadShape h = {2, 1, D};
            Batch b = random_batch(h, &len, 1, 1);
            for (int x = 0; x < D; x++)
                b.qkv[spike * qkv_row(h) + 2 * D + x] = (floatX)(20.0f * (x % 2 ? 1 : -1));
            check_against_twin(&b);
            free_batch(b);
        }
}

// All keys equal: probabilities are uniform, lse = score + log(count)
TEST(uniform_softmax) {
    static const int lengths[] = {5, 150, 1};
    const HeadShape h = {3, 1, 64};
    Batch b = random_batch(h, lengths, 3, 1);
    for (int t = 1; t < b.T; t++)
        memcpy((void *)(b.qkv + t * qkv_row(h) + 3 * 64), b.qkv + 3 * 64, 64 * sizeof(floatX));
    check_against_twin(&b);
    free_batch(b);
}

TEST(random_layouts) {
    for (int n = 0; n < 12; n++) {
        int lengths[4], num_docs;
        HeadShape heads = random_layout(lengths, &num_docs);
        against_twin(heads, lengths, num_docs, 1);
    }
}

// The largest error comes close to its tolerance: the tolerances are no larger than they must be.
TEST(tolerances_are_tight) {
    if (worst == 0) SKIP("nothing was compared");
    CHECK_MSG(worst > 0.5, "the largest error is %.2f of its tolerance", worst);
}

// -------------------------------------------------------------------------------------------------
// Properties, bit for bit

static void check_alone(const Batch &packed) {
    for (int i = 0; i < packed.num_docs; i++) {
        int len = doc_len(packed, i);
        if (len == 0) continue;
        Batch alone =
            new_batch(packed.heads, &len, 1, 0);  // no slack: memory ends with the document
        copy_doc(&alone, 0, packed, i);
        run(&alone);
        check_same_doc("alone", packed, i, alone, 0);
        free_batch(alone);
    }
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
    check_alone(b);
    check_permuted(b);
    free_batch(b);
}

TEST(packed_is_alone_is_permuted) {
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

// One document is replaced by noise, NaN or infinity; nothing else may change.
TEST(isolation) {
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

// Token t is replaced: rows before it keep their bits.
TEST(causality_forward) {
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
TEST(causality_backward) {
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
TEST(slack_and_old_results_do_not_matter) {
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

// -------------------------------------------------------------------------------------------------
// The work list. Its layout (kernels/cuda/attention.cuh): {query items, key items}, then the items
// {first row, length, tile}; tiles of 128 queries, of 64 keys.

struct Item {
    int32_t start, len, tile;
};

static int tiles_of(int len, int tile) { return (len + tile - 1) / tile; }

// What an item costs, in rows of 64: keys up to its last query, or queries from its first key on
static int query_cost(const Item &it) { return tiles_of(at_most((it.tile + 1) * 128, it.len), 64); }
static int key_cost(const Item &it) { return tiles_of(it.len - it.tile * 64, 64); }

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
        size_t used = attention_plan(work, cu_seqlens, num_docs, {9, 3, 64});
        CHECK_MSG(used <= size && work[used] == -1, "%zu of %zu", used, size);
        CHECK(used == 2 + 3 * (size_t)(work[0] + work[1]));
        const Item *items = (const Item *)(work + 2);
        check_items(items, work[0], 128, query_cost, cu_seqlens, num_docs);
        check_items(items + work[0], work[1], 64, key_cost, cu_seqlens, num_docs);
    }
}

// Grids are made from the same bound as the size: it must hold for the worst layouts, and empty
// documents must not need room.
TEST(plan_size_bounds_every_layout) {
    static int32_t cu_seqlens[5001], work[1 << 16];
    for (int tokens = 0; tokens <= 5000; tokens += tokens < 300 ? 1 : 100) {
        for (int docs = 1; docs <= 5000; docs *= 5) {
            for (int i = 0; i <= docs; i++)  // short ones first, the rest in the last
                cu_seqlens[i] = i < docs ? at_most(i, tokens) : tokens;
            size_t size = attention_plan_size(tokens, docs);
            CHECK(size < sizeof(work) / sizeof(work[0]));
            CHECK(attention_plan(work, cu_seqlens, docs, {1, 1, 64}) <= size);
            CHECK(size <= 2 + 3 * 2 * (size_t)tokens);
        }
    }
}

TEST_MAIN()
