// Runs the table of operations (ops.h) on the backend it is linked with. Each case is a process of
// its own with a time limit, so that a kernel that hangs or faults is named with its shape and
// the others still run:
//   OPERATION KERNELS            every shape against plain fp64 code
//   OPERATION KERNELS keeps bits results are the same bits again, with other bytes around the
//                                operands, other threads, documents alone, permuted, poisoned ...
//   others                       what the table cannot show: errors, copies, single numbers
//
// usage: test_ops [--filter SUBSTRING] [--seed N] [--quick] [--limit SECONDS]
//        test_ops --bench [--filter SUBSTRING]
// --quick: the first shapes of each operation, which run every kernel, and no more.
#include <errno.h>
#include <sys/mman.h>
#ifdef BACKEND_CUDA
enum { ON_CPU = 0 };
#define matmul_describe() ""
#define omp_set_num_threads(n_) (void)(n_)
#else
#include <omp.h>

#include "../kernels/cpu/common.h"
enum { ON_CPU = 1 };
#endif
#include "../data/base/clock.h"
#include "../kernels/lora.h"
#include "ops.h"

static bool quick;
static char *progress;  // shared with the parent: what is being run
enum { PROGRESS_BYTES = 400, MAX_DOCS = 64 };

static void *take(size_t n, size_t size) {
    void *p = calloc(n + 1, size);
    if (!p) abort();
    return p;
}

static void open_device(void) {
    const DeviceOptions options = {0};
    const char *missing = device_init(&options);
    if (missing) SKIP("%s", missing);
}

static bool real_gpu(void) {
    return strncmp(device_describe(), "cpu", 3) && !strstr(device_describe(), "emulated");
}

// ---- Values of a type, as the device stores them; a MASTER is a float on the host ---------------

static size_t bytes_of(Type type) {
    return type == FLOATX   ? sizeof(floatX)
           : type == REAL   ? sizeof(real)
           : type == DOUBLE ? sizeof(double)
           : type == STEP   ? sizeof(StepScalars) / 4
                            : 4 - 2 * (type == HALF);
}

static void put(Type type, void *to, int64_t i, double value) {
    StepScalars *step = to;
    if (type == INT) ((int32_t *)to)[i] = (int32_t)value;
    if (type == REAL) ((real *)to)[i] = (real)value;
    if (type == DOUBLE) ((double *)to)[i] = value;
    if (type == MASTER || type == FLOAT) ((float *)to)[i] = (float)value;
    if (type == STEP && i < 2) *(i == 0 ? &step->loss_sum : &step->norm_squared) = value;
    if (type == STEP && i >= 2) *(i == 2 ? &step->grad_norm : &step->scale) = (float)value;
#ifndef BACKEND_CUDA
    if (type == FLOATX) ((floatX *)to)[i] = (floatX)value;
    if (type == FLOATX) return;
#endif
    if (type != FLOATX && type != HALF) return;
    union {  // bf16, to nearest even: not the kernels' own code
        float f;
        uint32_t bits;
    } x = {.f = (float)value};
    const uint32_t rounded = isnan(value) ? 0x7fc00000u : x.bits + 0x7fff + (x.bits >> 16 & 1);
    ((uint16_t *)to)[i] = (uint16_t)(rounded >> 16);
}

static double value_at(Type type, const void *from, int64_t i) {
    const StepScalars *step = from;
    if (type == INT) return ((const int32_t *)from)[i];
    if (type == REAL) return (double)((const real *)from)[i];
    if (type == DOUBLE) return ((const double *)from)[i];
    if (type == MASTER || type == FLOAT) return (double)((const float *)from)[i];
    if (type == STEP && i < 2) return i == 0 ? step->loss_sum : step->norm_squared;
    if (type == STEP) return (double)(i == 2 ? step->grad_norm : step->scale);
#ifndef BACKEND_CUDA
    if (type == FLOATX) return (double)((const floatX *)from)[i];
#endif
    union {
        uint32_t bits;
        float f;
    } x = {.bits = (uint32_t)((const uint16_t *)from)[i] << 16};
    return (double)x.f;
}

static const Operation *operation_named(const char *name) {
    const Operation *op = operations;
    while (strcmp(op->name, name)) op++;
    return op;
}

// ---- Operands on the host -----------------------------------------------------------------------

static int find_content(const Run *r, Content content) {
    for (int k = 0; k < MAX_OPERANDS && r->op->operands[k].name; k++)
        if (r->op->operands[k].content == content) return k;
    return -1;
}

// A row's document and place in it
static int64_t place_in_doc(const Run *r, int64_t t, int *doc) {
    *doc = 0;
    while (r->cu_seqlens[*doc + 1] <= t) ++*doc;
    return t - r->cu_seqlens[*doc] + num_shared(r, *doc);
}

static double value_of_row(Run *r, Content content, int64_t t) {
    const int64_t V = r->s.V;
    int doc;
    const int64_t place = place_in_doc(r, t, &doc);
    if (content == TOKENS) return test_rng_below(2) ? V / 2 : test_rng_below((uint32_t)V);
    if (content == POSITIONS) return (double)(place % MAX_POSITION);
    // of documents in reverse order, after a row that belongs to no document
    if (content == FIRST_ROWS) return (double)(r->s.T - r->cu_seqlens[doc + 1] + 1);
    return t % 4 == 1 ? -1 : t % 4 == 2 ? (double)(V - 1) : test_rng_below((uint32_t)V);  // TARGETS
}

static void fill_order(const Run *r, double *x) {
    const double *tokens = r->x[find_content(r, TOKENS)];
    int64_t n = 0;
    EACH(v, r->s.V) EACH(t, r->s.T) if ((int64_t)tokens[t] == v) x[n++] = (double)t;
}
static void fill_work(const Run *r, double *x, int64_t n) {
    int32_t *work = take((size_t)n, sizeof *work);
    const size_t used = attention_work_list(work, r->cu_seqlens, r->shared_first, r->shared_len,
                                            r->num_segments, r->s.heads);
    CHECK_MSG(used <= (size_t)n, "a work list of %zu words, announced were %ld", used, (long)n);
    EACH(i, n) x[i] = i < (int64_t)used ? work[i] : -1;
    free(work);
}

static double value_of(Run *r, Content content, int64_t i) {
    const double half = r->s.heads.head_dim / 2.0, pair = floor((double)i / 2);
    if (content == NUMBERS) return (r->s.scale == 0 ? 1 : r->s.scale) * test_rng_normal();
    if (content == POSITIVE) return 0.3 + fabs(test_rng_normal());
    if (content == DOC_ENDS) return r->cu_seqlens[i];
    if (content == SHARED_FIRST || content == SHARED_LEN)
        return r->shared_len ? (content == SHARED_LEN ? r->shared_len : r->shared_first)[i] : 0;
    if (content == RUNS) {
        const int64_t T = r->s.T, first = i / 2 * 7 % T;
        return (double)(i % 2 ? i / 2 * 5 % (T - first + 1) : first);
    }
    if (content == ROWS) return (double)(2 * i + test_rng_below(2));
    if (content == LOSS_SCALE) return 1.0 / 32;
    if (content == SCALARS)
        return (double[]){clip_losses[r->s.T % 9], clip_norms[r->s.T % 9], 0, 0.37}[i];
    if (content != ANGLES) return value_of_row(r, content, i);
    const double angle = floor(pair / half) * pow(10000, -fmod(pair, half) / half);
    return i % 2 ? sin(angle) : cos(angle);
}

static void fill(Run *r, int k) {
    const Content content = r->op->operands[k].content;
    if (content == ORDER) return fill_order(r, r->x[k]);
    if (content == WORK) return fill_work(r, r->x[k], r->n[k]);
    EACH(i, r->n[k]) r->x[k][i] = value_of(r, content, i);
}

// Rounds the values to what the device holds.
static void store(Run *r, int k) {
    const Operand *o = &r->op->operands[k];
    void *image = take((size_t)r->n[k] * bytes_of(o->type) + 16, 1);
    EACH(i, r->n[k]) put(o->type, image, i, r->x[k][i]);
    EACH(i, r->n[k]) r->x[k][i] = o->role == OUT ? NAN : value_at(o->type, image, i);
    free(image);
}

static void add_docs(Run *r, const int *lengths, const int *shared) {
    r->cu_seqlens = take(MAX_DOCS + 1, sizeof(int32_t));
    const int one[] = {(int)r->s.T, -1};
    const int *len = lengths ? lengths : one;
    for (; len[r->num_segments] >= 0; r->num_segments++)
        r->cu_seqlens[r->num_segments + 1] = r->cu_seqlens[r->num_segments] + len[r->num_segments];
    if (lengths) r->s.T = r->cu_seqlens[r->num_segments];
    if (!shared) return;
    r->shared_first = take(MAX_DOCS + 1, sizeof(int32_t));
    r->shared_len = take(MAX_DOCS + 1, sizeof(int32_t));
    for (int doc = 0, leader = 0; doc < r->num_segments; doc++) {
        if (shared[doc] == 0) leader = doc;
        r->shared_first[doc] = r->cu_seqlens[leader], r->shared_len[doc] = shared[doc];
    }
}

static bool has_rows(const Run *r, int k) {
    const char *size = r->op->operands[k].size;
    return size[0] == 'T' || strcmp(size, "HT") == 0;
}

static Run new_run(const Operation *op, Shape s) {
    Run r = {.op = op, .s = s};
    add_docs(&r, s.lengths, s.shared);
    for (int k = 0; k < MAX_OPERANDS && op->operands[k].name; k++) {
        r.n[k] = 1;
        for (const char *c = op->operands[k].size; *c; c++) r.n[k] *= dim(&r, *c);
        r.x[k] = take((size_t)r.n[k], sizeof(double));
        if (op->operands[k].role == IN) continue;
        r.want[k] = take((size_t)r.n[k], sizeof(double));
        r.tol[k] = take((size_t)r.n[k], sizeof(double));
    }
    for (int k = 0; k < MAX_OPERANDS && op->operands[k].name; k++) fill(&r, k), store(&r, k);
    if (op->prepare) op->prepare(&r, r.x);
    for (int k = 0; k < MAX_OPERANDS && op->operands[k].name; k++) store(&r, k);
    return r;
}

static void free_run(Run *r) {
    for (int k = 0; k < MAX_OPERANDS; k++)
        free(r->x[k]), free(r->want[k]), free(r->tol[k]), free(r->got[k]);
    free(r->cu_seqlens), free(r->shared_first), free(r->shared_len);
}

static const char *shape_text(const Run *r) {
    const Shape s = r->s;
    const char *text = printed("T %ld", (long)s.T);
    if (s.C) text = printed("%s, C %ld", text, (long)s.C);
    if (s.V) text = printed("%s, V %ld", text, (long)s.V);
    if (s.heads.head_dim)
        text = printed("%s, heads %d/%d x %d", text, s.heads.num_heads, s.heads.num_kv_heads,
                       s.heads.head_dim);
    if (s.scale != 0) text = printed("%s, scale %g", text, s.scale);
    if (s.spike) text = printed("%s, spike %d", text, s.spike);
    for (int doc = 0; doc < r->num_segments && r->num_segments > 1; doc++)
        text =
            printed(num_shared(r, doc) ? "%s%s%d+%d" : "%s%s%d", text, doc ? " " : ", documents ",
                    r->cu_seqlens[doc + 1] - r->cu_seqlens[doc], (int)num_shared(r, doc));
    return text;
}

// ---- On the device ------------------------------------------------------------------------------

// Bytes after each operand, which nothing may write or read to any effect; and the bytes that
// results begin with. 0xff: NaN in every type. frozen: weights have no gradients.
typedef struct {
    size_t behind;
    int byte_behind, byte_of_results;
    bool frozen;
} Memory;
static const Memory usual = {8192, 0xff, 0xff, false};

// The gradient of a weight, which may be NULL
static bool may_be_frozen(const Operand *o) {
    return o->role == INOUT && (strcmp(o->name, "dweight") == 0 || strcmp(o->name, "dbias") == 0);
}

static size_t device_bytes(Type type, int64_t n) {
    return type == MASTER ? low_bits_at(n) + 2 * (size_t)n : (size_t)n * bytes_of(type);
}

static void upload(Run *r, int k, Memory m) {
    const Operand *o = &r->op->operands[k];
    const size_t bytes = device_bytes(o->type, r->n[k]), all = bytes + m.behind;
    unsigned char *image = take(all + 16, 1);
    memset(image, m.byte_behind, all);
    memset(image, m.byte_of_results, bytes);
    r->p[k] = device_malloc(all + !all);
    CHECK(r->p[k] != NULL);
    if (o->role != OUT) EACH(i, r->n[k]) put(o->type, image, i, r->x[k][i]);
    if (o->type == MASTER) {
        float *values = take((size_t)r->n[k], sizeof *values);
        EACH(i, r->n[k]) values[i] = (float)r->x[k][i];
        memset(image, m.byte_behind, all);
        device_upload(r->p[k], image, all);
        weights_from_host(r->p[k], low_bits_of(r->p[k], r->n[k]), values, (size_t)r->n[k]);
        free(values);
    } else {
        device_upload(r->p[k], image, all);
    }
    free(image);
}

// Reads the results, and checks that nothing was written after them.
static void download(Run *r, int k, Memory m) {
    const Operand *o = &r->op->operands[k];
    const size_t bytes = device_bytes(o->type, r->n[k]), all = bytes + m.behind;
    unsigned char *image = take(all + 16, 1);
    device_download(image, r->p[k], all);
    for (size_t i = bytes; i < all; i++)
        CHECK_MSG(image[i] == m.byte_behind, "%s: %s: it wrote behind the end of %s", r->op->name,
                  shape_text(r), o->name);
    free(r->got[k]);
    r->got[k] = image;
    if (o->type != MASTER) return;
    r->got[k] = take((size_t)r->n[k], sizeof(float));
    weights_to_host(r->got[k], r->p[k], low_bits_of(r->p[k], r->n[k]), (size_t)r->n[k]);
    free(image);
}

static void put_on_device(Run *r, Memory m) {
    snprintf(progress, PROGRESS_BYTES, "%s: %s", r->op->name, shape_text(r));
    for (int k = 0; k < MAX_OPERANDS && r->op->operands[k].name; k++) upload(r, k, m);
    const int ends = find_content(r, DOC_ENDS), work = find_content(r, WORK);
    int32_t longest = 0;
    for (int doc = 0; doc < r->num_segments; doc++) {
        const int32_t n = (int32_t)doc_len(r, doc);
        longest = n > longest ? n : longest;
    }
    if (work < 0) return;
    r->docs = (VarlenInfo){.cu_seqlens = r->p[ends],
                           .work = r->p[work],
                           .total_tokens = (int32_t)r->s.T,
                           .num_segments = r->num_segments,
                           .max_seqlen = longest};
    if (!r->shared_len) return;
    r->docs.shared_first = r->p[find_content(r, SHARED_FIRST)];
    r->docs.shared_len = r->p[find_content(r, SHARED_LEN)];
}
static void take_off_device(Run *r) {
    for (int k = 0; k < MAX_OPERANDS; k++) device_free(r->p[k]), r->p[k] = NULL;
}

static void execute(Run *r, Memory m) {
    void *p[MAX_OPERANDS];
    put_on_device(r, m);
    for (int k = 0; k < MAX_OPERANDS; k++)
        p[k] = m.frozen && r->p[k] && may_be_frozen(&r->op->operands[k]) ? NULL : r->p[k];
    const uint64_t allocations = device_memory().count;
    r->op->call(r, p, r->s.T, r->s.C, r->s.V);
    CHECK_MSG(device_memory().count == allocations, "%s allocates memory", r->op->name);
    for (int k = 0; k < MAX_OPERANDS && r->op->operands[k].name; k++)
        if (r->op->operands[k].role != IN) download(r, k, m);
    take_off_device(r);
}

// ---- Against the plain code ---------------------------------------------------------------------

static double to_bf16(double x) {
    int exponent;
    const double fraction = frexp(x, &exponent);  // 8 significant bits, to nearest even
    return ldexp(nearbyint(ldexp(fraction, 8)), exponent - 8);
}

// Rounds the factors of a product, as bf16 products of the CPU do; the addend stays.
static void round_factors(Run *r) {
    for (int k = 0; k < MAX_OPERANDS && strstr(matmul_describe(), "bf16"); k++) {
        const Operand *o = &r->op->operands[k];
        const bool rounds = r->op->flags & PRODUCT && o->role == IN && strcmp(o->name, "resid");
        EACH(i, rounds ? r->n[k] : 0) r->x[k][i] = to_bf16(r->x[k][i]);
    }
}

static double check_against_plain_code(const Operation *op, Shape s) {
    Run r = new_run(op, s);
    double worst = 0;
    execute(&r, usual);
    round_factors(&r);
    op->reference(&r, r.x, r.s.T, r.s.C, r.s.V);
    for (int k = 0; k < MAX_OPERANDS; k++) EACH(i, r.want[k] ? r.n[k] : 0) {
            const double got = value_at(op->operands[k].type, r.got[k], i), want = r.want[k][i];
            const double error = fabs(got - want);
            const bool same = got == want || (isnan(got) && isnan(want)) ||
                              isinf(r.tol[k][i]);  // scratch
            CHECK_MSG(same || error <= r.tol[k][i],
                      "%s: %s: %s[%ld]: expected %.9g within %.2g, found %.9g", op->name,
                      shape_text(&r), op->operands[k].name, (long)i, want, r.tol[k][i], got);
            if (!same && error > 0) worst = fmax(worst, error / r.tol[k][i]);
        }
    free_run(&r);
    return worst;
}

// ---- Changes that must not change bits ----------------------------------------------------------

// clang-format off
typedef enum {  // of every operation; of rows or documents; of attention
    AGAIN, NUMBERS_BEHIND, NOTHING_BEHIND, OLD_RESULTS, THREADS, FROZEN,
    ALONE, PERMUTED, POISONED,
    EMPTY_DOCS, LATER_TOKEN, LATER_GRADIENT, NUM_CHANGES
} Change;
static const char *const change_names[] = {
    "again", "numbers behind the operands", "nothing behind the operands", "old results",
    "other threads", "without gradients of weights",
    "alone", "permuted", "another document poisoned",
    "empty documents", "a later token", "a later gradient"};
// clang-format on

// The rows `rows` (T) of a, as documents of `lengths` that share `shared` tokens, or NULL
static Run with_rows(const Run *a, const int *rows, const int *lengths, const int *shared) {
    Run b = {.op = a->op, .s = a->s};
    add_docs(&b, lengths, shared);
    for (int k = 0; k < MAX_OPERANDS && a->op->operands[k].name; k++) {
        const int64_t width = has_rows(a, k) && a->s.T ? a->n[k] / a->s.T : 0;
        b.n[k] = has_rows(a, k) ? b.s.T * width : a->n[k];
        const Content content = a->op->operands[k].content;
        const bool of_docs = content == DOC_ENDS || content == WORK || content == SHARED_FIRST ||
                             content == SHARED_LEN;
        if (of_docs) b.n[k] = dim(&b, content == WORK ? 'W' : 'S');
        b.x[k] = take((size_t)b.n[k], sizeof(double));
        const bool by_head = a->op->operands[k].size[0] == 'H';
        EACH(i, b.n[k]) {
            const int64_t row = by_head ? i % b.s.T : width ? i / width : 0;
            const int64_t from = by_head ? i / b.s.T * a->s.T + rows[row]
                                 : width ? rows[row] * width + i % width
                                         : i;
            b.x[k][i] = from < a->n[k] ? a->x[k][from] : 0;
        }
        if (of_docs || (b.n[k] != a->n[k] && !has_rows(a, k))) fill(&b, k);
    }
    return b;
}

static bool same_row(const Run *a, int64_t row_a, const Run *b, int64_t row_b, int k, int64_t first,
                     int64_t end) {
    const size_t bytes = bytes_of(a->op->operands[k].type);
    const char *x = a->got[k], *y = b->got[k];
    if (a->op->operands[k].size[0] == 'H') {
        EACH(h, a->s.heads.num_heads)
        if (memcmp(x + (size_t)(h * a->s.T + row_a) * bytes,
                   y + (size_t)(h * b->s.T + row_b) * bytes, bytes) != 0)
            return false;
        return true;
    }
    const int64_t width = a->n[k] / a->s.T;
    return memcmp(x + (size_t)(row_a * width + first) * bytes,
                  y + (size_t)(row_b * width + first) * bytes,
                  (size_t)((end < 0 ? width : end) - first) * bytes) == 0;
}

// Replaces rows first to end - 1 of all inputs, or of operand `only`; returns the number of these
// inputs.
static int spoil_rows(Run *r, int64_t first, int64_t end, int only, double noise) {
    int spoiled = 0;
    for (int k = 0; k < MAX_OPERANDS && r->op->operands[k].name; k++) {
        const Operand *o = &r->op->operands[k];
        if (!has_rows(r, k) || o->role == OUT || (o->type != FLOATX && o->type != REAL)) continue;
        if (only >= 0 && k != only) continue;
        EACH(i, r->n[k]) {
            const int64_t row = o->size[0] == 'H' ? i % r->s.T : i / (r->n[k] / r->s.T);
            if (row >= first && row < end)
                r->x[k][i] = noise * (isfinite(noise) ? test_rng_normal() : 1);
        }
        store(r, k), spoiled++;
    }
    return spoiled;
}

static void shuffle(int *x, int n) {
    for (int i = n - 1; i > 0; i--) {
        const int j = (int)test_rng_below((uint32_t)i + 1), held = x[i];
        x[i] = x[j], x[j] = held;
    }
}

// The rows and documents that b has of a; `doc`: which document is alone. Documents that share
// tokens stay together; one that is alone has all of its tokens itself.
static void choose_rows(const Run *a, Change change, int doc, int *rows, int *lengths,
                        int *shared) {
    int order[2 * MAX_DOCS], leaders[MAX_DOCS], num_leaders = 0, n = 0, t = 0;
    for (int i = 0; i < a->num_segments; i++)
        if (!num_shared(a, i)) leaders[num_leaders++] = i;
    if (change == PERMUTED) shuffle(leaders, num_leaders);
    for (int l = 0; l < num_leaders && change != ALONE; l++) {
        int i = leaders[l];
        if (change == EMPTY_DOCS && l % 2 == 0) order[n++] = -1;
        do order[n++] = i++;
        while (i < a->num_segments && num_shared(a, i));
    }
    if (change == EMPTY_DOCS) order[n++] = -1;
    if (change == ALONE) order[n++] = doc;
    for (int i = 0; i < n; i++) {
        shared[i] = order[i] < 0 || change == ALONE ? 0 : (int)num_shared(a, order[i]);
        lengths[i] = order[i] < 0 ? 0 : (int)doc_len(a, order[i]) - shared[i];
        EACH(k, lengths[i]) rows[t++] = (int)row_of(a, order[i], shared[i] + k);
    }
    lengths[n] = -1;
}

// Does the query in row t see a row of [first, end)?
static bool sees(const Run *r, int64_t t, int64_t first, int64_t end) {
    int doc;
    const int64_t place = place_in_doc(r, t, &doc), shared = num_shared(r, doc);
    const int64_t from = shared ? r->shared_first[doc] : 0;
    return first < end &&
           ((first <= t && end > t - place + shared) || (first < from + shared && end > from));
}

// Does a query outside of doc see row t?
static bool others_see(const Run *r, int doc, int64_t t) {
    for (int d = 0; d < r->num_segments; d++)
        if (d != doc && r->cu_seqlens[d] < r->cu_seqlens[d + 1] &&
            sees(r, r->cu_seqlens[d + 1] - 1, t, t + 1))
            return true;
    return false;
}

// May row t of output k differ, if rows [first, end) of doc are spoiled? If not, or only in part,
// columns [*same_from, *same_to) may not.
static bool may_differ(const Run *a, Change change, int k, int64_t t, int doc, int64_t first,
                       int64_t end, int64_t *same_from, int64_t *same_to) {
    const bool backward = strcmp(a->op->name, "attention_backward") == 0, alone = change == ALONE;
    *same_from = 0, *same_to = -1;
    if (change != POISONED && change != LATER_TOKEN && change != LATER_GRADIENT && !alone)
        return false;
    const bool as_query =
        change == LATER_GRADIENT ? first < end && t == first : !alone && sees(a, t, first, end);
    const bool as_key = alone ? others_see(a, doc, t) : first < end && sees(a, end - 1, t, t + 1);
    if (!backward || k > 0) return as_query;
    if (as_query && !as_key) *same_from = dim(a, 'O');
    if (as_key && !as_query) *same_to = dim(a, 'O');
    return as_query && as_key;
}

static void check_change(const Run *a, Change change, int doc, int round) {
    int *rows = take((size_t)a->s.T, sizeof *rows), lengths[3 * MAX_DOCS], shared[3 * MAX_DOCS];
    const int64_t start = a->cu_seqlens[doc], end = a->cu_seqlens[doc + 1];
    const int64_t spoiled = start + (end > start ? test_rng_below((uint32_t)(end - start)) : 0);
    const double noise = change != POISONED ? 3 : (double[]){NAN, INFINITY, 3}[round % 3];
    const Memory m = {.behind = change == NOTHING_BEHIND || change == EMPTY_DOCS ? 0 : 8192,
                      .byte_behind = change == NUMBERS_BEHIND || change == PERMUTED ? 0x3f : 0xff,
                      .byte_of_results = change == OLD_RESULTS || change == POISONED ? 0x3f : 0xff,
                      .frozen = change == FROZEN};
    omp_set_num_threads(change == THREADS ? 2 + round % 3 : 1 + round % 2);
    choose_rows(a, change, doc, rows, lengths, shared);
    Run b = with_rows(a, rows, lengths, a->shared_len && change != ALONE ? shared : NULL);
    const bool one = change == LATER_TOKEN || change == LATER_GRADIENT;
    const int64_t first = one ? spoiled : start, last = one && end > start ? spoiled + 1 : end;
    int expected = 0, changed = 0;
    if (change == POISONED || one)
        expected = spoil_rows(&b, first, last, one ? 2 : -1, noise) * (last > first);
    execute(&b, m);
    for (int k = 0; k < MAX_OPERANDS && a->op->operands[k].name; k++) {
        const Operand *o = &a->op->operands[k];
        if (o->role == IN || (m.frozen && may_be_frozen(o))) continue;
        if (change < ALONE && !has_rows(a, k)) {
            CHECK_MSG(memcmp(a->got[k], b.got[k], (size_t)a->n[k] * bytes_of(o->type)) == 0,
                      "%s: %s: %s: %s differs", a->op->name, shape_text(a), change_names[change],
                      o->name);
        }
        EACH(t, has_rows(a, k) ? b.s.T : 0) {
            int64_t from, to;
            if (may_differ(a, change, k, rows[t], doc, first, last, &from, &to))
                changed += !same_row(a, rows[t], &b, t, k, 0, -1);
            else
                CHECK_MSG(same_row(a, rows[t], &b, t, k, from, to),
                          "%s: %s: %s: row %d of %s differs", a->op->name, shape_text(a),
                          change_names[change], rows[t], o->name);
        }
    }
    CHECK_MSG(!expected || end - start < 5 || changed, "%s: %s: %s has no effect", a->op->name,
              shape_text(a), change_names[change]);
    free_run(&b);
    free(rows);
}

// After the first round bytes around operands change only together with the documents.
static bool applies(Change change, const Run *a, int round) {
    const int flags = a->op->flags, by_rows = BY_ROWS | BY_DOCS | CPU_ROWS;
    const bool forward = strcmp(a->op->name, "attention_forward") == 0;
    if (change == THREADS && !ON_CPU) return false;
    if (change == FROZEN && !may_be_frozen(&a->op->operands[0]) &&
        !may_be_frozen(&a->op->operands[1]))
        return false;
    if (change < ALONE) return round == 0 || !(flags & BY_DOCS);
    if (change == (forward ? LATER_GRADIENT : LATER_TOKEN)) return false;
    if (change >= EMPTY_DOCS) return flags & BY_DOCS;
    return flags & (change == POISONED || ON_CPU ? by_rows : BY_ROWS | BY_DOCS);
}

static void check_changes(const Run *a, int round) {
    for (Change change = 0; change < NUM_CHANGES; change++) {
        const int doc = (int)test_rng_below((uint32_t)a->num_segments);
        for (int i = 0; i < (change == ALONE ? a->num_segments : 1); i++)
            if (applies(change, a, round))
                check_change(a, change, change == ALONE ? i : doc, round);
    }
}

// Half of them: the first of them share prefixes
static Shape random_docs(int *lengths, int *shared) {
    static const int edges[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 193};
    const int group = test_rng_below(2) ? 2 + (int)test_rng_below(2) : 0;
    const int n = group + 1 + (int)test_rng_below(3);
    for (int i = 0, tiles = 1 + (int)test_rng_below(2); i < n; i++) {
        lengths[i] = test_rng_below(3) ? edges[test_rng_below(i < group ? 12 : 16)]
                                       : (int)test_rng_below(66);
        shared[i] = i > 0 && i < group ? SHARED_TILE * tiles : 0;
        if (i < group) lengths[i] += i == 0 ? SHARED_TILE * tiles : lengths[i] == 0;
        if (i < group) tiles = 1 + (int)test_rng_below((uint32_t)tiles);
    }
    lengths[n] = -1;
    return (Shape){
        .heads = random_heads[test_rng_below(sizeof random_heads / sizeof *random_heads)],
        .lengths = lengths,
        .shared = group ? shared : NULL};
}

// ---- Kernels to select from ---------------------------------------------------------------------

static const char *const kernels_of_attention[] = {
#ifdef BACKEND_CUDA
    "sm80", "sm90",
#elif defined(GRADCHECK)
    "portable",
#else
    "portable", ODD("avx2", "avx512")
#endif
    NULL};
static const char *const kernels_of_products[] = {
#ifdef AMX_MODEL
    "amx_model_bf16",
#endif
#ifndef GRADCHECK
    ODD("avx2", "avx512", "avx512_bf16", "amx_bf16")
#endif
        ODD("portable") NULL};
static const char *const one_kind[] = {"", NULL};
static const char *const *kernels_of(const Operation *op) {
    return op->flags & ATTENTION                           ? kernels_of_attention
           : op->flags & PRODUCT && kernels_of_products[0] ? kernels_of_products
                                                           : one_kind;
}

// Must this CPU have them?
static bool expect_kernels(const char *kernels) {
#if defined(__x86_64__) && !defined(GRADCHECK) && !defined(BACKEND_CUDA)
    if (strcmp(kernels, "amx_bf16") == 0) return system("grep -qw amx_bf16 /proc/cpuinfo") == 0;
    if (strcmp(kernels, "avx512_bf16") == 0) return __builtin_cpu_supports("avx512bf16");
    if (strcmp(kernels, "avx512") == 0) return __builtin_cpu_supports("avx512f");
    if (strcmp(kernels, "avx2") == 0) return __builtin_cpu_supports("avx2");
#endif
    return strcmp(kernels, "portable") == 0 || strcmp(kernels, "amx_model_bf16") == 0;
}

static void select_or_skip(const Operation *op, const char *kernels) {
    bool selected = true;
    (void)expect_kernels;
    open_device();
    if (op->flags & ATTENTION) selected = attention_select(kernels) == 0;
#ifndef BACKEND_CUDA
    if (op->flags & PRODUCT) selected = matmul_select(kernels, strstr(kernels, "bf16") != NULL);
    if (op->flags & (ATTENTION | PRODUCT))
        CHECK_MSG(selected == expect_kernels(kernels), "%s: %s", kernels,
                  selected ? "selected" : "refused");
#endif
    if (!selected) SKIP("no %s kernels on this machine", kernels);
}

// Sizes around the edges of the register tile
static void check_tile_edges(const Operation *op) {
    int mr, nr;
    CHECK(sscanf(matmul_describe(), "%*s %dx%d", &mr, &nr) == 2);
    const int edges[] = {1, 2, 3, mr - 1, mr, mr + 1, 2 * mr + 1, nr - 1, nr, nr + 1, 2 * nr + 1};
    for (int round = 0; round < 50; round++) {
        const int64_t any = 1 + test_rng_below(130);
        const Shape s = {.T = round % 3 == 0 ? any : edges[test_rng_below(11)],
                         .C = round % 3 == 1 ? any : edges[test_rng_below(11)],
                         .V = round % 3 == 2 ? any : edges[test_rng_below(11)]};
        check_against_plain_code(op, s);
    }
}

static void check_operation(const Operation *op, const char *kernels) {
    double worst = 0;
    select_or_skip(op, kernels);
    for (const Shape *s = op->shapes; s->T >= 0; s++) {
        worst = fmax(worst, check_against_plain_code(op, *s));
        if (quick && s == op->shapes + (op->flags & ATTENTION ? 3 : 0)) break;
    }
    for (int n = 0; n < (op->flags & ATTENTION && !quick ? 3 : 0); n++) {
        int lengths[MAX_DOCS], shared[MAX_DOCS];
        worst = fmax(worst, check_against_plain_code(op, random_docs(lengths, shared)));
    }
    for (int n = 0; op->flags & ATTENTION && real_gpu() && n < (quick ? 1 : 2); n++)
        worst = fmax(worst, check_against_plain_code(op, many_items[n]));
    if (ON_CPU && op->flags & PRODUCT && !quick) check_tile_edges(op);
    printf("    largest error: %.2f of its bound\n", worst);
}

// Rows in documents, for operations that have none
static const int row_docs[] = {5, 1, 0, 9, 19, -1};

static void check_bits(const Operation *op, const char *kernels) {
    const bool attention = op->flags & ATTENTION;
    select_or_skip(op, kernels);
    // with each kind of poison at least once
    const int rounds = attention && ON_CPU ? 4 : attention && real_gpu() ? 6 : 3;
    int lengths[MAX_DOCS], shared[MAX_DOCS];
    for (int round = 0; round < rounds; round++) {
        const Shape *shape = op->shapes;
        while (ON_CPU && round == 2 && shape[1].T >= 0) shape++;  // sizes that are no multiples
        Shape s = *shape;
        if (attention && round > 0) s = round == 1 ? shape[3] : random_docs(lengths, shared);
        if (!s.lengths && s.T == 34) s.lengths = row_docs;
        if (ON_CPU && op->flags & PRODUCT)
            s = (Shape){.C = 21 + 640 * (round % 2), .V = 67, .lengths = row_docs};
        Run a = new_run(op, s);
        omp_set_num_threads(1);
        execute(&a, usual);
        check_changes(&a, round);
        free_run(&a);
    }
}

// ---- What the table cannot show -----------------------------------------------------------------

static void describe_work(void *context, char *text, size_t size) {
    snprintf(text, size, "%s", (const char *)context);
}

enum { NO_ALGORITHM = 16 };
static const HeadShape wrong_heads[2][5] = {
    {H(4, 3, 64), H(4, 0, 64), H(0, 1, 64), H(4, 2, 32), H(4, 2, 96)},
    {H(4, 3, 64), H(4, 0, 64), H(4, 2, 7), H(4, 2, 0), H(4, -1, 2)}};
static void call_unsupported(int i) {
    const DeviceOptions options = {0};
    if (i == NO_ALGORITHM) setenv("EMU_LT_ALGO", "none", 1);
    if (device_init(&options)) _exit(77);
    static char lengths[] = "lengths 5 7";
    device_on_error(describe_work, lengths);
    int32_t cu_seqlens[] = {0}, work[64] = {0};
    const VarlenInfo docs = {.cu_seqlens = cu_seqlens, .work = work};
    if (i < 5) attention_forward(NULL, NULL, NULL, &docs, wrong_heads[ON_CPU][i]);
#ifdef BACKEND_CUDA
    void *p = device_malloc(1 << 20);
    if (i == 5) gather_rows(p, p, p, 1, 12);
    if (i == 6) matmul_forward(p, NULL, p, p, 1, 64, 9);
    if (i == 7) rope_forward(p, p, p, 1, (HeadShape)H(2, 1, 24));
    if (i == 8) rmsnorm_forward(p, p, p, p, EPS, 1, 16392);
    if (i == 9) global_norm_squared(p, (real *)p + 1, 4);
    if (i == 10) matmul_forward(p, NULL, p, p, 1, 64, 0);
    if (i == 11) matmul_forward(p, NULL, p, p, 1, 0, 64);
    if (i == 12) qk_norm_forward(p, p, p, EPS, 1, (HeadShape)H(2, 1, 20));
    if (i == 13) bias_backward(p, p, 1, 16392);
    if (i == NO_ALGORITHM && real_gpu()) _exit(0);
    if (i == NO_ALGORITHM) matmul_forward(p, NULL, p, p, 3, 64, 8);
    const Moments odd[] = {{(real *)p + 1, p, false, 0}, {p, (uint16_t *)p + 2, true, 0}};
    if (i == 14 || i == 15) adamw_update(p, p, odd[i - 14], p, p, (AdamW){.t = 1}, 4);
#endif
}
TEST(unsupported_shapes_end_the_program) {
    for (int i = 0; i < (ON_CPU ? 5 : NO_ALGORITHM + 1); i++) {
        const char *text;
        const int code = exit_code_of(call_unsupported, i, &text);
        if (code == 77) SKIP("no GPU");
        if (code == 0 && i == NO_ALGORITHM) break;  // a real GPU has one
        CHECK_MSG(code == 11 && strncmp(text, "error: ", 7) == 0 && strstr(text, "\nhint: "),
                  "call %d: exit code %d: %s", i, code, text);
        CHECK_MSG(ON_CPU || strstr(text, "; lengths 5 7\n"), "call %d: no word on the work: %s", i,
                  text);
        CHECK_MSG(i != NO_ALGORITHM || strstr(text, "no algorithm for T 3, K 64, N 8"), "%s", text);
    }
}

#ifdef BACKEND_CUDA
// 256 + (1 + 2^-8) is 258 in bf16. The product rounded before the addition would be 1, and the sum
// 257, which is halfway between 256 and 258, rounded to 256.
TEST(matmul_rounds_after_adding) {
    open_device();
    Run r = new_run(operation_named("matmul_add_in_place"), (Shape){.T = 1, .C = 8, .V = 8});
    EACH(i, 64) r.x[2][i] = 1;
    EACH(i, 8) r.x[0][i] = 256, r.x[1][i] = i == 0 ? 1 : i == 1 ? 0x1p-8 : 0;
    execute(&r, usual);
    EACH(i, 8) CHECK(value_at(FLOATX, r.got[0], i) == 258);
    free_run(&r);
}
#endif

#ifdef AMX_MODEL
// Intel's manual: the sums of even and odd members of pairs are separate chains, rounded to nearest
// even; denormals are zeros. Rounding to bf16 is to nearest even too.
TEST(tile_registers_compute_as_the_manual_says) {
    const char *const sets[] = {"amx_bf16", "amx_model_bf16"};
    const struct {
        float inp[34], weight[34], out;
    } cases[] = {{{4096, 1, 1, 1}, {4096, 1, 1, 1}, 16777218},  // in one chain 16777216
                 {{1, 4096, 1, 1}, {1, 4096, 1, 1}, 16777218},
                 {{4096, [32] = 1, 1}, {4096, [32] = 1, 1}, 16777218},  // of another tile
                 {{0x1.01p0f, 0x1.03p0f}, {1, 256}, 0x1.04p8f + 1},
                 {{0x1p-127f}, {0x1p100f}, 0},
                 {{0x1p-64f}, {0x1p-64f}, 0},
                 {{0x1p-60f}, {0x1p-60f}, 0x1p-120f}};
    for (int set = 0; set < 2; set++) {
        if (!matmul_select(sets[set], true)) continue;
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            float out;
            matmul_forward(&out, NULL, cases[i].inp, cases[i].weight, 1, 34, 1);
            CHECK_MSG(out == cases[i].out, "%s, case %zu: %a", sets[set], i, (double)out);
        }
    }
}
#endif

TEST(memory_is_counted) {
    open_device();
    const DeviceMemory before = device_memory();
    void *a = device_malloc(1000), *b = device_malloc(24), *none = device_malloc(0);
    DeviceMemory now = device_memory();
    CHECK(none && now.count == before.count + 3 && now.bytes_now == before.bytes_now + 1024);
#ifdef BACKEND_CUDA  // AddressSanitizer ends the CPU's
    CHECK(device_malloc((size_t)1 << 60) == NULL);
#endif
    grads_add(a, a, 1000 / sizeof(real));  // not refused, and not over yet
    device_free(a), device_free(b), device_free(none), device_free(NULL);
    now = device_memory();
    CHECK(now.bytes_now == before.bytes_now && now.bytes_peak >= before.bytes_now + 1024);
}

// The source may change as soon as device_upload returns; copies larger than all pinned buffers.
TEST(copies) {
    static const size_t sizes[] = {0, 1, 4097, 21000001};
    open_device();
    for (int k = 0; k < 4; k++) {
        const size_t n = sizes[k];
        unsigned char *src = take(n, 1), *dst = take(n, 1), *other = device_malloc(n + 1);
        unsigned char *device = device_malloc(n + 1);
        for (size_t i = 0; i < n; i++) src[i] = (unsigned char)(i * 31 + i / 8191);
        device_upload(device, src, n);
        memset(src, 0, n);
        device_copy(other, device, n);
        device_zero(device, n);
        device_download(dst, other, n);
        for (size_t i = 0; i < n; i++) CHECK(dst[i] == (unsigned char)(i * 31 + i / 8191));
        device_download(dst, device, n);
        CHECK(memcmp(src, dst, n) == 0);
        free(src), free(dst), device_free(device), device_free(other);
    }
}

// Range limits, both kinds of ties, denormals, the largest finite number, and random bits
static float weight_value(size_t i) {
    static const uint32_t chosen[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff,
                                      0x00800000, 0x3f800000, 0x3f808000, 0x3f818000, 0xbf808000,
                                      0x3f807fff, 0x3f808001, 0x7f7fffff, 0xff7fffff, 0x7f7f8000,
                                      0x7f7f7fff, 0x0000ffff, 0x00008000, 0x00018000, 0x7f800000};
    union {
        uint32_t bits;
        float f;
    } x = {.bits = i < 20 ? chosen[i] : test_rng_u32()};
    if (i >= 20 && (x.bits & 0x7f800000) == 0x7f800000) x.bits &= 0xbfffffff;
    return x.f;
}
TEST(weights_are_exact) {
    const size_t n = 1200001;  // more than one pinned buffer holds
    static const uint32_t nan_bits[] = {0x7fffffff, 0xffffffff, 0x7f800001};
    open_device();
    float *src = take(n, 4), *dst = take(n, 4), *high = take(n, 4);
    for (size_t i = 0; i < n; i++) src[i] = weight_value(i);
    floatX *weights = device_malloc(n * sizeof(floatX));
    uint16_t *lo = device_malloc(n * 2);
    floatX *others = device_malloc(n * sizeof(floatX));
    weights_from_host(weights, lo, src, n);
    for (int i = 0; i < 2; i++) weights_from_host(others, NULL, src + 1, n - 1);  // same buffers
    weights_to_host(dst, weights, lo, n);
    CHECK(memcmp(src, dst, n * 4) == 0);
    activations_to_host(high, weights, n);
    for (size_t i = 0; i < n; i++) {  // what matmuls read is a nearest floatX
        floatX nearest;
        put(FLOATX, &nearest, 0, (double)src[i]);
        const double best = fabs(value_at(FLOATX, &nearest, 0) - (double)src[i]);
        CHECK_MSG(fabs((double)high[i] - (double)src[i]) == best ||
                      (double)high[i] == value_at(FLOATX, &nearest, 0),
                  "%.9g is kept as %.9g", (double)src[i], (double)high[i]);
    }
    memcpy(src, nan_bits, sizeof nan_bits);
    weights_from_host(weights, lo, src, 3);
    activations_to_host(high, weights, 3);
    weights_to_host(dst, weights, lo, 3);
    for (int i = 0; i < 3; i++) CHECK(isnan(high[i]) && isnan(dst[i]));
    free(src), free(dst), free(high);
    device_free(weights), device_free(others), device_free(lo);
}

// The time between two marks; the marks do not wait.
TEST(timer_is_within_the_clock) {
    open_device();
    void *x = device_malloc(1 << 20);
    const uint64_t waits = device_memory().waits;
    const double began = now_ms();
    device_timer_start();
    grads_add(x, (real *)x + (1 << 16), 1 << 16);
    device_timer_stop();
    CHECK(device_memory().waits == waits);
    device_download(&(real){0}, x, sizeof(real));
    const double clock_ms = now_ms() - began, ms = (double)device_timer_ms();
    CHECK_MSG(ms > 0 && ms <= clock_ms + 1e-3, "%g ms of %g", ms, clock_ms);
    CHECK(device_memory().waits == waits + 1);
#ifndef BACKEND_CUDA
    device_timer_start(), device_timer_leave_out(1e6), device_timer_stop();
    CHECK(device_timer_ms() <= 0);
#endif
    device_free(x);
}

// bf16 does not have 257; less the adapter's 256, before it is rounded, it is 1.
TEST(adapters_are_added_before_the_layer_is_rounded) {
    enum { K = 8, N = 16, R = 8, X = 0, W = X + K, A = W + N * K, B = A + R * K, H = B + R * R };
    enum { OUT = H + R, ALL = OUT + N };
    float x[ALL] = {[X] = 1, [X + 1] = 1, [A] = 1, [OUT] = NAN}, got[N];
    open_device();
    for (int i = 0; i < N; i++) x[W + i * K] = 256, x[W + i * K + 1] = 1;
    for (int i = 0; i < R; i++) x[B + i * R] = -256;
    floatX *p = device_malloc(ALL * sizeof *p);
    weights_from_host(p, NULL, x, ALL);
    const Linear linear = {
        .K = K, .N = N, .weight = p + W, .lora = {1, R, 1, {R}, {R}, p + A, p + B, .h = p + H}};
    linear_forward(p + OUT, NULL, p + X, &linear, 1);
    activations_to_host(got, p + OUT, N);
    for (int i = 0; i < N; i++)
        CHECK_MSG(i < R ? fabsf(got[i] - 257) <= 1 : got[i] == 1, "%d: %g", i, (double)got[i]);
    device_free(p);
}

// x becomes its upper neighbour as often as it is near it, of m and of v independently.
TEST(rounding_at_random_is_unbiased) {
    enum { KEYS = 200000 };
    const float ulp = 0x1p-7f, at[] = {0.02f, 0.3f, 0.5f, 0.97f};
    for (int i = 0; i < 8; i++) {
        const float p = at[i % 4], sign = i < 4 ? 1 : -1;
        int m = 0, v = 0, both = 0;
        for (uint64_t k = 0; k < KEYS; k++) {
            const uint64_t random = mix64(1000 + k);
            const float x = sign * (1 + p * ulp), up = sign * (1 + ulp);
            const bool a = moment_widen(moment_narrow(x, random >> RANDOM_M)) == up,
                       b = moment_widen(moment_narrow(x, random >> RANDOM_V)) == up;
            m += a, v += b, both += a && b;
        }
        const double mean = KEYS * (double)p, sigma = sqrt(mean * (1 - (double)p));
        CHECK_MSG(fabs(m - mean) < 4 * sigma && fabs(v - mean) < 4 * sigma, "%g: %d, %d", p, m, v);
        CHECK(fabs(both - mean * (double)p) < 4 * sqrt(mean * (double)p));
    }
    for (uint32_t half = 0; half < 0x7f80; half++)  // what is a bf16 stays
        for (uint64_t random = 0; random < 3; random++)
            CHECK(moment_narrow(moment_widen((uint16_t)half), random * 0x7fff) == half);
    CHECK(moment_narrow(1 + 0.003f, TO_NEAREST) == 0x3f80);
}

// Quantised in two parts. Of make_nf4_golden.py; test-arm64 links no reader of models.
TEST(nf4_has_the_bits_of_bitsandbytes) {
    enum { N = 24 * 64, FIRST = 5 * 64 };
    static struct {  // in the file's order
        float absmax[N / 64], codes[N / 2], fp32[N], values[N];
        uint16_t bf16[N];
    } want;
    static float out[N], scales[N / 64];
    static uint8_t bytes[N / 2];
    uint64_t header = 0;
    FILE *file = fopen("tests/golden/nf4.safetensors", "rb");
    CHECK(file && fread(&header, 8, 1, file) == 1 && !fseek(file, (long)header, SEEK_CUR));
    CHECK(fread(&want, sizeof want, 1, file) == 1 && fgetc(file) == EOF && fclose(file) == 0);
    open_device();
    const Nf4 q = {device_malloc(N / 2), device_malloc(sizeof want.absmax),
                   device_malloc(N * sizeof(floatX))};
    nf4_put(q, FIRST, want.values + FIRST, N - FIRST);
    nf4_put(q, 0, want.values, FIRST);
    nf4_dequantize(q.values, q.codes, q.absmax, N);
    device_download(bytes, q.codes, sizeof bytes);
    device_download(scales, q.absmax, sizeof scales);
    activations_to_host(out, q.values, N);
    EACH(i, N / 2) CHECK_MSG(bytes[i] == want.codes[i], "byte %ld: %d", (long)i, bytes[i]);
    CHECK(memcmp(scales, want.absmax, sizeof scales) == 0);
    EACH(i, N) {
        const float to = sizeof(floatX) == 2 ? moment_widen(want.bf16[i]) : want.fp32[i];
        CHECK_MSG(memcmp(out + i, &to, sizeof to) == 0, "%ld: %g", (long)i, (double)out[i]);
    }
    device_free(q.codes), device_free(q.absmax), device_free(q.values);
}

// While the running maximum does not change, rescaling must not change the previous sums by a bit:
// every tile would repeat the error. Scores, all equal, are scaled, exponentiated and scaled back:
// one rounding each, and one for the sum.
static void check_equal_scores(const char *kernels, int D, double q) {
    enum { USED = 7 };  // columns: the score is no power of two
    const Operation *op = operation_named("attention_forward");
    select_or_skip(op, kernels);
    Run r = new_run(op, (Shape){.T = 1536, .heads = H(1, 1, D)});
    EACH(i, r.n[2]) {
        const int64_t kind = i / D % 3;
        r.x[2][i] = kind == 2 ? 1 : i % D >= USED ? 0 : kind == 0 ? q : 1;
    }
    store(&r, 2);
    execute(&r, usual);
    EACH(t, r.s.T) {
        const double lse = USED * r.x[2][0] / sqrt(D) + log((double)t + 1);
        const double error = fabs(value_at(REAL, r.got[1], t) - lse);
        CHECK_MSG(error <= 4 * UNIT * lse, "head_dim %d, key %ld: lse is off by %.2g", D, (long)t,
                  error);
    }
    free_run(&r);
}
static void check_long_documents(const Operation *op, const char *kernels) {
    (void)op;
#if defined(BACKEND_CUDA) && defined(__x86_64__) && !defined(__FMA__)
    if (!__builtin_cpu_supports("fma")) SKIP("this CPU contracts nothing to FMA, as a GPU does");
#endif
    check_equal_scores(kernels, 64, 70.5);
    check_equal_scores(kernels, 128, 99.5);
}

// The bound of a work list holds for the worst layouts, and empty documents do not count.
TEST(work_lists_keep_their_bound) {
    static int32_t cu_seqlens[5001], work[1 << 17];
    open_device();
    for (int tokens = 0; tokens <= 5000; tokens += tokens < 300 ? 1 : 100)
        for (int docs = 1; docs <= 5000; docs *= 5) {
            for (int i = 0; i <= docs; i++)  // short ones first, the rest in the last
                cu_seqlens[i] = i < docs && i < tokens ? i : tokens;
            const size_t size = attention_work_list_size(tokens, docs);
            CHECK(size < sizeof work / sizeof *work && size <= 4 + 19 * (size_t)tokens);
            memset(work, 0xff, sizeof work);
            const size_t used =
                attention_work_list(work, cu_seqlens, NULL, NULL, docs, (HeadShape)H(3, 1, 64));
            CHECK_MSG(used <= size && work[used] == -1, "%zu of %zu", used, size);
        }
}

#ifndef BACKEND_CUDA
TEST(threads) {
    for (int n = 1; n <= 3; n++) {
        const DeviceOptions options = {.threads = n};
        CHECK(!device_init(&options) && omp_get_max_threads() == n);
    }
}

// The notebook "How does FA2 flash_attn_varlen_func handle masks?": causal attention of two packed
// sequences of 5 and 3 tokens, one head, head_dim 8, bf16, softmax_scale 1/sqrt(8). Of its second
// sequence the inputs are exact bf16 values, the outputs were printed with 4 decimals. The first
// one must not matter: it is random here.
TEST(notebook) {
    enum { FIRST = 5, SECOND = 3, DIM = 8 };
    static const double qkv[SECOND][3 * DIM] = {
        {-0.69921875, -1.8671875,     -0.8828125,    -1.6640625, -0.431640625, 0.94921875,
         0.66015625,  0.044677734375, 1.328125,      2.0,        1.0703125,    1.2890625,
         1.5,         1.140625,       1.578125,      1.828125,   0.314453125,  0.306640625,
         0.61328125,  0.2255859375,   0.10498046875, 0.23046875, 0.20703125,   0.051025390625},
        {0.5703125, 2.1875,     -0.2470703125, -1.3828125, 0.060302734375, -0.2431640625,
         1.3203125, 0.51953125, 1.421875,      1.1171875,  1.2734375,      1.546875,
         1.984375,  1.1796875,  1.5546875,     1.296875,   1.2109375,      1.7265625,
         1.96875,   1.1953125,  1.4375,        1.0703125,  1.46875,        1.90625},
        {-0.609375,  0.10009765625, -0.89453125, -0.9375,  -0.265625, 1.53125,
         0.55859375, -0.9453125,    1.3828125,   1.40625,  1.5625,    1.8203125,
         1.015625,   1.0625,        1.9609375,   1.171875, 2.25,      2.71875,
         2.921875,   2.65625,       2.296875,    2.421875, 2.125,     2.65625}};
    static const double printed[SECOND][DIM] = {
        {0.3145, 0.3066, 0.6133, 0.2256, 0.105, 0.2305, 0.207, 0.051},
        {0.5703, 0.7148, 1.0, 0.5039, 0.4863, 0.4707, 0.5703, 0.582},
        {1.2422, 1.5547, 1.8125, 1.3359, 1.2578, 1.2188, 1.2422, 1.5078}};
    static const int lengths[] = {FIRST, SECOND, -1};
    open_device();
    Run r = new_run(operation_named("attention_forward"),
                    (Shape){.heads = H(1, 1, DIM), .lengths = lengths});
    memcpy(r.x[2] + FIRST * 3 * DIM, qkv, sizeof qkv);
    store(&r, 2);
    execute(&r, usual);
    EACH(t, SECOND) EACH(c, DIM) {
        const double want = printed[t][c], ulp = ldexp(1, ilogb(want) - 7);  // of bf16
        const double got = to_bf16(value_at(FLOATX, r.got[0], (FIRST + t) * DIM + c));
        CHECK_MSG(fabs(got - want) <= 0.5e-4 + ulp, "token %ld, %ld: got %g, printed %g", (long)t,
                  (long)c, got, want);
    }
    free_run(&r);
}
#endif

// ---- Times --------------------------------------------------------------------------------------

// Of a call; on a GPU of 20 in a row, so that no launch is timed; its L2 may have the operands
static double run_ms(const Run *r) {
    const int calls = real_gpu() ? 20 : 1;
    device_timer_start();
    for (int i = 0; i < calls; i++) r->op->call(r, r->p, r->s.T, r->s.C, r->s.V);
    device_timer_stop();
    device_download(&(char){0}, r->p[0], 1);  // waits
    return (double)device_timer_ms() / calls;
}
static int by_value(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

// Median and fastest of 5 to 101 runs, for half a second
static void time_shape(const Operation *op, const char *kernels, Shape s) {
    double ms[101], sum = 0, bytes = 0;
    int n = 0;
    Run r = new_run(op, s);
    put_on_device(&r, usual);
    run_ms(&r);
    while (n < 5 || (n < 101 && sum < 500)) sum += ms[n++] = run_ms(&r);
    qsort(ms, (size_t)n, sizeof *ms, by_value);
    for (int k = 0; k < MAX_OPERANDS && op->operands[k].name; k++)
        bytes += (double)device_bytes(op->operands[k].type, r.n[k]) *
                 (op->operands[k].role == INOUT ? 2 : 1);
    const double rate = (op->flops ? op->flops(&r) : bytes) * 1e-6 / ms[n / 2];
    printf("%-31s %-8s %9.3f ms, fastest %9.3f %10.1f %s  %s\n", op->name, kernels, ms[n / 2],
           ms[0], rate, op->flops ? "GFLOP/s" : "GB/s   ", shape_text(&r));
    take_off_device(&r), free_run(&r);
}

static void time_operation(const Operation *op, const char *kernels) {
    select_or_skip(op, kernels);
    for (const Shape *s = op->bench; s && s->T >= 0; s++) time_shape(op, kernels, *s);
}

// ---- Cases, each in a process -------------------------------------------------------------------

typedef struct {
    TestCase test;
    char name[80];
    void (*check)(const Operation *op, const char *kernels);
    const Operation *op;
    const char *kernels;
} Case;
enum { MAX_CASES = 400 };

static void run_case_of_the_table(void) {
    const Case *c = (const Case *)test_current;
    c->check(c->op, c->kernels);
}

static void add_cases_of(const Operation *op, const char *suffix,
                         void (*check)(const Operation *, const char *)) {
    static Case cases[MAX_CASES], *c = cases;
    for (const char *const *kernels = kernels_of(op); *kernels; kernels++, c++) {
        *c = (Case){{c->name, run_case_of_the_table, NULL}, "", check, op, *kernels};
        snprintf(c->name, sizeof c->name, "%s%s%s%s", op->name, **kernels ? "_" : "", *kernels,
                 suffix);
        *test_last = &c->test;
        test_last = &c->test.next;
    }
}

static void add_cases(bool bench) {
    if (bench || quick) test_first = NULL, test_last = &test_first;  // without the others
    for (const Operation *op = operations; op < operations + NUM_OPERATIONS; op++) {
        if (bench && op->bench) add_cases_of(op, "", time_operation);
        if (bench) continue;
        add_cases_of(op, "", check_operation);
        if (quick) continue;
        if (strcmp(op->name, "clip_scale")) add_cases_of(op, "_keeps_bits", check_bits);
        if (strcmp(op->name, "attention_forward") == 0)
            add_cases_of(op, "_of_equal_scores", check_long_documents);
    }
}

static void run_to_the_end(const TestCase *t) {
    const int how = test_run_one(t);
    fflush(stdout);
    if (how == TEST_FAILED) _exit(how);  // what it leaves is no leak
    exit(how);
}

static int limit_s = 600;

static int run_in_process(const TestCase *t) {
    int status = 0;
    const double began = now_ms();
    progress[0] = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) run_to_the_end(t);
    while (waitpid(child, &status, WNOHANG) != child) {
        if (now_ms() - began > 1e3 * limit_s) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            printf("    no result within %d s\n", limit_s);
            break;
        }
        sleep_ms(2);
    }
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == 0 || code == TEST_SKIPPED) return code;
    if (code != TEST_FAILED)
        printf("    ended by %s %d in %s\n", code < 0 ? "signal" : "exit code",
               code < 0 ? WTERMSIG(status) : code, progress);
    if (strstr(t->name, "sm90")) printf("    until this is solved train with --attention sm80\n");
    return TEST_FAILED;
}

static void say_device(void) {
    open_device();
    printf("device: %s\n", device_describe());
}

int main(int argc, char **argv) {
    bool bench = false;
    int n = 1;
    // thousands of small parallel regions on a machine that may be busy: waiting threads must sleep
    if (!getenv("OMP_WAIT_POLICY") && setenv("OMP_WAIT_POLICY", "passive", 1) == 0)
        execv("/proc/self/exe", argv);
    for (int i = 1; i < argc; i++) {
        bool *const flag = strcmp(argv[i], "--quick") == 0   ? &quick
                           : strcmp(argv[i], "--bench") == 0 ? &bench
                                                             : NULL;
        if (flag)
            *flag = true;
        else if (strcmp(argv[i], "--limit") == 0 && i + 1 < argc)
            limit_s = atoi(argv[++i]);
        else
            argv[n++] = argv[i];
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    setenv("CUDA_VISIBLE_DEVICES", "0", 0);  // each case is a start of CUDA: for each GPU, slow
    progress =
        mmap(NULL, PROGRESS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (progress == MAP_FAILED) return perror("mmap"), 5;
    if (run_in_process(&(TestCase){"device", say_device, NULL}) != 0) return 11;
    add_cases(bench);
    test_runner = run_in_process;
    return test_main(n, argv);
}
