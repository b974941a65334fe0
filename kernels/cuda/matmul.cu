// Matmul by cuBLASLt. A row-major (rows, cols) tensor is a column-major (cols, rows) matrix whose
// leading dimension is cols, so that no product needs a transpose in memory:
//
//   forward          out^T (N,T)     =  weight (N,K) inp^T (K,T)     weight is found as (K,N)
//   forward_add      out^T (N,T)     =  the same + resid^T (N,T)
//   backward_input   dinp^T (K,T)    =  weight^T (K,N) dout^T (N,T)
//   backward_weight  dweight^T (K,N) =  inp^T (K,T) dout (T,N)       dout is found as (N,T); or +=
//
// Leading dimensions are K and N, multiples of 8: every row starts on a 16-byte border whatever T
// is. Sums are fp32; where cuBLASLt cuts the depth, only schemes that add the parts in fp32 and in
// a fixed order are allowed.
//
// Packed batches differ in T. An algorithm serves a bucket of lengths, so that a new T rarely needs
// cuBLASLt's heuristic; the heuristic is always asked about the longest length of the bucket, so
// that the algorithm does not depend on which T came first. A bucket takes its first answer, or,
// after matmul_choose, the fastest of its answers. Choices can be saved and loaded: a resumed run
// repeats them, even where this cuBLASLt would now choose others.

#include "common.cuh"

#include <cublasLt.h>

enum Kind { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, NUM_KINDS };
static const char *const KIND_NAMES[NUM_KINDS] = {"matmul_forward", "matmul_backward_input",
                                                  "matmul_backward_weight"};

struct Shape {
    Kind kind;
    int64_t T, K, N;
};
// D (m,n) = A (m,depth) B (depth,n), column-major
struct Layouts {
    cublasLtMatrixLayoutOpaque_t a, b, d;
};
struct Choice {
    Shape shape;  // T is the longest of its bucket
    bool made;
    cublasLtMatmulAlgo_t algo;
};

enum { ALGO_WORDS = 8 };
static_assert(sizeof(cublasLtMatmulAlgo_t) == ALGO_WORDS * sizeof(uint64_t), "as documented");

// A hash table with linear probing, at most half full: a model has 15 shapes, T at most 232 buckets
// up to 2^29, and lengths that the algorithm of their bucket refused have their own
static Choice *choices;
static size_t num_slots, num_choices;
static cublasLtHandle_t handle;
static cublasLtMatmulDesc_t descriptions[NUM_KINDS];
static cublasLtMatmulPreference_t preference;
static void *workspace, *branch_workspace;
static size_t workspace_bytes;
static char description[96] = "none";

[[noreturn]] static void lt_fail(int line, const char *what, cublasStatus_t status) {
    device_fail("is the cuBLASLt that is found at run time the one of this toolkit?",
                "cuda: %s:%d: %s: %s", __FILE__, line, what, cublasLtGetStatusString(status));
}

#define LT_CHECK(call_)                                                           \
    do {                                                                          \
        cublasStatus_t status_ = (call_);                                         \
        if (status_ != CUBLAS_STATUS_SUCCESS) lt_fail(__LINE__, #call_, status_); \
    } while (0)

// ------------------------------------------------------------------------------------------------
// Setting up

static void create_description(Kind kind, cublasOperation_t a, cublasOperation_t b) {
    cublasLtMatmulDesc_t *desc = &descriptions[kind];
    LT_CHECK(cublasLtMatmulDescCreate(desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_CHECK(cublasLtMatmulDescSetAttribute(*desc, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a));
    LT_CHECK(cublasLtMatmulDescSetAttribute(*desc, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b));
}

static void prefer(cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size) {
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size));
}

static void create_preference() {
    // Not INPLACE and not OUTPUT_TYPE: those add parts of a cut depth in bf16.
    const uint32_t reductions =
        CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t alignment = 16;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment, sizeof alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment, sizeof alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment, sizeof alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment, sizeof alignment);
}

const char *matmul_init() {
    if (handle) return NULL;
    if (cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS)
        return "cuBLASLt does not start; is it of another version than the driver supports?";
    workspace_bytes = (size_t)(cuda_arch() >= 90 ? 32 : 4) << 20;  // what NVIDIA recommends
    workspace = device_malloc(workspace_bytes);
    branch_workspace = device_malloc(workspace_bytes);
    if (!workspace || !branch_workspace)
        return "not enough free GPU memory for the matmul workspace; is another process using the "
               "GPU?";
    create_description(FORWARD, CUBLAS_OP_T, CUBLAS_OP_N);
    create_description(BACKWARD_INPUT, CUBLAS_OP_N, CUBLAS_OP_N);
    create_description(BACKWARD_WEIGHT, CUBLAS_OP_N, CUBLAS_OP_T);
    create_preference();
    const int version = (int)cublasLtGetVersion();
    snprintf(description, sizeof description, "cublaslt %d.%d.%d, workspace %d MiB",
             version / 10000, version / 100 % 100, version % 100, (int)(workspace_bytes >> 20));
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// Choosing

// Each T up to 16 is a bucket; above, each doubling has eight.
static int64_t longest_of_bucket(int64_t T) {
    int64_t step = 1;
    while (T > 16 * step) step *= 2;
    return ceil_div(T, step) * step;
}

// A row-major (rows, cols) tensor
static void init_layout(cublasLtMatrixLayoutOpaque_t *layout, bool is_fp32, int64_t rows,
                        int64_t cols) {
    LT_CHECK(cublasLtMatrixLayoutInit(layout, is_fp32 ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)cols,
                                      (uint64_t)rows, cols));
}

static Layouts layouts_of(const Shape &s) {
    const bool weight_gradient = s.kind == BACKWARD_WEIGHT, forward = s.kind == FORWARD;
    Layouts l;
    init_layout(&l.a, false, weight_gradient ? s.T : s.N, s.K);  // weight, or inp
    init_layout(&l.b, false, s.T, forward ? s.K : s.N);          // inp, or dout
    init_layout(&l.d, weight_gradient, weight_gradient ? s.N : s.T, forward ? s.N : s.K);
    return l;
}

// The choice of this shape, or a free slot for it: there `made` is false.
static Choice *slot_of(Choice *table, size_t slots, const Shape &s) {
    const int64_t sizes[3] = {s.T, s.K, s.N};
    uint64_t h = (uint64_t)s.kind;
    for (int i = 0; i < 3; i++) h = (h ^ (uint64_t)sizes[i]) * 0x9e3779b97f4a7c15ull;
    for (h >>= 32;; h++) {
        Choice *c = &table[h % slots];
        const Shape &x = c->shape;
        if (!c->made || (x.kind == s.kind && x.T == s.T && x.K == s.K && x.N == s.N)) return c;
    }
}

static void grow() {
    const size_t slots = num_slots ? 2 * num_slots : 1024;
    Choice *table = (Choice *)calloc(slots, sizeof *table);
    if (!table) cuda_unsupported("matmul: expected host memory for choices", (int64_t)slots);
    for (size_t i = 0; i < num_slots; i++)
        if (choices[i].made) *slot_of(table, slots, choices[i].shape) = choices[i];
    free(choices);
    choices = table;
    num_slots = slots;
}

static void keep(const Choice &choice) {
    assert(choice.made);
    if (2 * num_choices >= num_slots) grow();
    Choice *c = slot_of(choices, num_slots, choice.shape);
    num_choices += !c->made;
    *c = choice;
    assert(2 * num_choices <= num_slots);  // slot_of ends at a free one
}

static void forget_all() {
    for (size_t i = 0; i < num_slots; i++) choices[i].made = false;
    num_choices = 0;
}

// NULL: none is made yet.
static const Choice *find(const Shape &s) {
    const Choice *c = num_slots ? slot_of(choices, num_slots, s) : NULL;
    return c && c->made ? c : NULL;
}

// Up to `most` algorithms for this shape, at least one, by the speed that cuBLASLt expects.
static int suggest(const Shape &s, cublasLtMatmulHeuristicResult_t *found, int most) {
    Layouts l = layouts_of(s);
    int n = 0, usable = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, descriptions[s.kind], &l.a, &l.b, &l.d, &l.d, preference, most, found, &n);
    for (int i = 0; i < n; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS) found[usable++] = found[i];
    if (status != CUBLAS_STATUS_SUCCESS || usable < 1) {
        char what[160];
        snprintf(what, sizeof what, "%s: cuBLASLt has no algorithm for T %lld, K %lld, N %lld",
                 KIND_NAMES[s.kind], (long long)s.T, (long long)s.K, (long long)s.N);
        cuda_unsupported(what, (int64_t)status);
    }
    return usable;
}

static const Choice *choose(const Shape &s) {
    if (find(s)) return find(s);
    cublasLtMatmulHeuristicResult_t first;
    suggest(s, &first, 1);
    keep({s, true, first.algo});
    return find(s);
}

// ------------------------------------------------------------------------------------------------
// Choices as text: a line with the library and the GPU, then one line per choice

static void who_chooses(char *line, size_t size) {
    snprintf(line, size, "%s on %s", description, cuda_gpu());
}

static void print_choice(FILE *out, const Choice *c) {
    uint64_t words[ALGO_WORDS];
    memcpy(words, &c->algo, sizeof words);
    fprintf(out, "%s T %lld K %lld N %lld algorithm", KIND_NAMES[c->shape.kind],
            (long long)c->shape.T, (long long)c->shape.K, (long long)c->shape.N);
    for (int w = 0; w < ALGO_WORDS; w++) fprintf(out, " %llx", (unsigned long long)words[w]);
    fprintf(out, "\n");
}

char *matmul_choices(void) {
    char who[256], *text = NULL;
    size_t n = 0;
    int made = 0;
    FILE *out = open_memstream(&text, &n);
    if (!out) device_fail("free some memory of the host", "matmul choices: out of memory");
    who_chooses(who, sizeof who);
    for (size_t i = 0; i < num_slots; i++) {
        if (!choices[i].made) continue;
        if (made++ == 0) fprintf(out, "%s\n", who);
        print_choice(out, &choices[i]);
    }
    fclose(out);
    if (made) return text;
    free(text);
    return NULL;
}

// A line of matmul_choices; false: not one, or of an algorithm that this cuBLASLt refuses.
static bool read_choice(const char *line, Choice *c) {
    char name[32];
    long long T, K, N;
    unsigned long long x[ALGO_WORDS];
    if (sscanf(line, "%31s T %lld K %lld N %lld algorithm %llx %llx %llx %llx %llx %llx %llx %llx",
               name, &T, &K, &N, &x[0], &x[1], &x[2], &x[3], &x[4], &x[5], &x[6], &x[7]) != 12)
        return false;
    int kind = 0;
    while (kind < NUM_KINDS && strcmp(name, KIND_NAMES[kind]) != 0) kind++;
    if (kind == NUM_KINDS || T <= 0 || K <= 0 || N <= 0) return false;
    c->shape = {(Kind)kind, T, K, N};
    c->made = true;
    memcpy(&c->algo, x, sizeof c->algo);
    Layouts l = layouts_of(c->shape);
    cublasLtMatmulHeuristicResult_t found;
    return cublasLtMatmulAlgoCheck(handle, descriptions[kind], &l.a, &l.b, &l.d, &l.d, &c->algo,
                                   &found) == CUBLAS_STATUS_SUCCESS &&
           found.workspaceSize <= workspace_bytes;
}

const char *matmul_repeat_choices(const char *text_host) {
    static char why[640];
    char who[256];
    who_chooses(who, sizeof who);
    forget_all();
    const int first_line = (int)strcspn(text_host, "\n");
    if (strlen(who) != (size_t)first_line || strncmp(who, text_host, (size_t)first_line) != 0) {
        snprintf(why, sizeof why, "chosen by %.*s, this is %s", first_line < 256 ? first_line : 256,
                 text_host, who);
        return why;
    }
    for (const char *line = strchr(text_host, '\n'); line && line[1]; line = strchr(line, '\n')) {
        Choice c;
        line++;
        if (read_choice(line, &c)) {
            keep(c);
            continue;
        }
        forget_all();
        snprintf(why, sizeof why, "not a choice of this cuBLASLt: %.*s",
                 (int)strcspn(line, "\n") < 256 ? (int)strcspn(line, "\n") : 256, line);
        return why;
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------
// The product

// addend is laid out like d and may be d; NULL: zeros
struct Operands {
    void *d;
    const void *addend, *a, *b;
    bool on_branch = false;
};

static cublasStatus_t multiply(const Shape &s, const cublasLtMatmulAlgo_t *algo,
                               const Operands &x) {
    const float alpha = 1, beta = x.addend ? 1 : 0;
    Layouts l = layouts_of(s);
    return cublasLtMatmul(handle, descriptions[s.kind], &alpha, x.a, &l.a, x.b, &l.b, &beta,
                          x.addend ? x.addend : x.d, &l.d, x.d, &l.d, algo,
                          x.on_branch ? branch_workspace : workspace, workspace_bytes,
                          x.on_branch ? cuda_branch() : cuda_stream());
}

// An algorithm for the bucket's longest length may refuse this one: nothing was launched then.
static bool refused(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
}

static Shape shape_of(Kind kind, int64_t T, int64_t K, int64_t N) {
    assert(handle && T > 0);
    if (K <= 0 || N <= 0 || K % 8 != 0 || N % 8 != 0) {
        char what[96];
        snprintf(what, sizeof what, "%s: expected sizes that are multiples of 8", KIND_NAMES[kind]);
        cuda_unsupported(what, K <= 0 || K % 8 != 0 ? K : N);
    }
    return {kind, T, K, N};
}

static Shape bucket_of(const Shape &s) { return {s.kind, longest_of_bucket(s.T), s.K, s.N}; }

static void run(Kind kind, const Operands &x, int64_t T, int64_t K, int64_t N) {
    if (T == 0) return;
    const Shape s = shape_of(kind, T, K, N);
    const Choice *own = find(s);
    cublasStatus_t status = multiply(s, &(own ? own : choose(bucket_of(s)))->algo, x);
    if (!own && refused(status))  // from now on this length has its own
        status = multiply(s, &choose(s)->algo, x);
    if (status != CUBLAS_STATUS_SUCCESS) lt_fail(__LINE__, KIND_NAMES[kind], status);
}

// ------------------------------------------------------------------------------------------------
// Choosing by timing

// A product is timed until it has taken about BUDGET_MS. Later suggestions must be faster by more
// than noise.
enum { MOST_SUGGESTIONS = 8, BUDGET_MS = 150 };
static const float NOISE = 0.02f;

static float time_products(const Shape &s, const cublasLtMatmulAlgo_t *algo, const Operands &x,
                           int n) {
    device_timer_start();
    for (int i = 0; i < n; i++) LT_CHECK(multiply(s, algo, x));
    device_timer_stop();
    device_synchronize();
    return device_timer_ms();
}

// Milliseconds of a product, and in all; INFINITY: the algorithm refuses this length.
static float time_one(const Shape &s, const cublasLtMatmulAlgo_t *algo, const Operands &x,
                      float *spent_ms) {
    enum { FEW = 2, MANY = 16 };
    if (refused(multiply(s, algo, x))) return INFINITY;  // the first one may load code
    float ms = time_products(s, algo, x, FEW);
    *spent_ms += ms * (FEW + 1) / FEW;
    if (ms >= 1) return ms / FEW;
    ms = time_products(s, algo, x, MANY);  // the host's launches would be a large part of few
    *spent_ms += ms;
    return ms / MANY;
}

// The fastest for s of the algorithms suggested for `asked`; false: all refuse s.
static bool choose_fastest(const Shape &asked, const Shape &s, const Operands &x) {
    cublasLtMatmulHeuristicResult_t found[MOST_SUGGESTIONS];
    const int n = suggest(asked, found, MOST_SUGGESTIONS);
    float best_ms = INFINITY, spent_ms = 0;
    Choice best = {asked, false, {}};
    for (int i = 0; i < n && spent_ms < BUDGET_MS; i++) {
        const float ms = time_one(s, &found[i].algo, x, &spent_ms);
        if (ms < best_ms * (1 - NOISE)) best_ms = ms, best = {asked, true, found[i].algo};
    }
    if (best.made) keep(best);
    return best.made;
}

static void choose_by_timing(Kind kind, const Operands &x, int64_t T, int64_t K, int64_t N) {
    const Shape s = shape_of(kind, T, K, N), bucket = bucket_of(s);
    if (!find(s) && !find(bucket) && !choose_fastest(bucket, s, x)) choose_fastest(s, s, x);
}

void matmul_choose(floatX *out, real *dweight, floatX *inp, const floatX *weight, int64_t T,
                   int64_t K, int64_t N) {
    choose_by_timing(FORWARD, {out, NULL, weight, inp}, T, K, N);
    choose_by_timing(BACKWARD_INPUT, {inp, NULL, weight, out}, T, K, N);
    choose_by_timing(BACKWARD_WEIGHT, {dweight, dweight, inp, out}, T, K, N);
}

// ------------------------------------------------------------------------------------------------
// The four products

void matmul_forward(floatX *out, const floatX *inp, const floatX *weight, int64_t T, int64_t K,
                    int64_t N) {
    run(FORWARD, {out, NULL, weight, inp}, T, K, N);
}

void matmul_forward_add(floatX *out, const floatX *resid, const floatX *inp, const floatX *weight,
                        int64_t T, int64_t K, int64_t N) {
    run(FORWARD, {out, resid, weight, inp}, T, K, N);
}

void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, int64_t T,
                           int64_t K, int64_t N) {
    run(BACKWARD_INPUT, {dinp, NULL, weight, dout}, T, K, N);
}

void matmul_backward_weight(real *dweight, const floatX *dout, const floatX *inp, bool accumulate,
                            int64_t T, int64_t K, int64_t N) {
    run(BACKWARD_WEIGHT, {dweight, accumulate ? dweight : NULL, inp, dout, true}, T, K, N);
}
