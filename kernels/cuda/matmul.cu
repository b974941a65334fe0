// Matmul by cuBLASLt. A row-major (rows, cols) tensor is a column-major (cols, rows) matrix whose
// leading dimension is cols, so that no product needs a transpose in memory:
//
//   forward          out^T (N,T)     =  weight (N,K) inp^T (K,T)     weight is found as (K,N)
//   backward_input   dinp^T (K,T)    =  weight^T (K,N) dout^T (N,T)
//   backward_weight  dweight^T (K,N) += inp^T (K,T) dout (T,N)       dout is found as (N,T)
//
// Leading dimensions are K and N, multiples of 8: every row starts on a 16-byte border whatever T
// is. Sums are fp32; where cuBLASLt cuts the depth, only schemes that add the parts in fp32 and in
// a fixed order are allowed. Packed batches differ in T, so an algorithm is asked for once for each
// shape and kept in a table of fixed size.

#include "common.cuh"

#include <cublasLt.h>

enum Kind { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, NUM_KINDS };
static const char *const KIND_NAMES[NUM_KINDS] = {"matmul_forward", "matmul_backward_input",
                                                  "matmul_backward_weight"};

// D (m,n) = A (m,depth) B (depth,n), column-major
struct Plan {
    Kind kind;
    int64_t T, K, N;
    bool used;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    size_t workspace_bytes;
};

enum { NUM_PLANS = 4096, PROBES = 8 };  // a model has about 15 shapes for each T

static Plan plans[NUM_PLANS];
static unsigned next_victim;
static cublasLtHandle_t handle;
static cublasLtMatmulDesc_t descriptions[NUM_KINDS];
static cublasLtMatmulPreference_t preference;
static void *workspace;
static size_t workspace_bytes;
static char description[96] = "none";

[[noreturn]] static void lt_fail(int line, const char *what, cublasStatus_t status) {
    fflush(stdout);
    fprintf(stderr, "error: cuda: %s:%d: %s: %s\n", __FILE__, line, what,
            cublasLtGetStatusString(status));
    fprintf(stderr, "hint: is the cuBLASLt that is found at run time the one of this toolkit?\n");
    exit(11);
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
    if (!workspace) return "no GPU memory left for the matmul workspace; is the GPU in use?";
    create_description(FORWARD, CUBLAS_OP_T, CUBLAS_OP_N);
    create_description(BACKWARD_INPUT, CUBLAS_OP_N, CUBLAS_OP_N);
    create_description(BACKWARD_WEIGHT, CUBLAS_OP_N, CUBLAS_OP_T);
    create_preference();
    const int version = (int)cublasLtGetVersion();
    snprintf(description, sizeof description, "cublaslt %d.%d.%d, workspace %d MiB",
             version / 10000, version / 100 % 100, version % 100, (int)(workspace_bytes >> 20));
    return NULL;
}

int matmul_select(const char *name, int bf16) {
    (void)bf16;  // always
    return strcmp(name, "auto") == 0 || strcmp(name, "cublaslt") == 0 ? 0 : -1;
}

const char *matmul_describe(void) { return description; }

// ------------------------------------------------------------------------------------------------
// Plans

static uint64_t hash(Kind kind, int64_t T, int64_t K, int64_t N) {
    uint64_t h = (uint64_t)kind;
    const int64_t sizes[3] = {T, K, N};
    for (int i = 0; i < 3; i++) h = (h ^ (uint64_t)sizes[i]) * 0x9e3779b97f4a7c15ull;
    return h >> 32;
}

static bool is_plan_of(const Plan *p, Kind kind, int64_t T, int64_t K, int64_t N) {
    return p->kind == kind && p->T == T && p->K == K && p->N == N;
}

static void free_plan(Plan *p) {
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->a));
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->b));
    LT_CHECK(cublasLtMatrixLayoutDestroy(p->d));
    p->used = false;
}

// A row-major (rows, cols) tensor
static void create_layout(cublasLtMatrixLayout_t *layout, bool is_fp32, int64_t rows,
                          int64_t cols) {
    LT_CHECK(cublasLtMatrixLayoutCreate(layout, is_fp32 ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)cols,
                                        (uint64_t)rows, cols));
}

static void make_plan(Plan *p, Kind kind, int64_t T, int64_t K, int64_t N) {
    p->kind = kind;
    p->T = T;
    p->K = K;
    p->N = N;
    p->used = true;
    const bool weight_gradient = kind == BACKWARD_WEIGHT;
    create_layout(&p->a, false, weight_gradient ? T : N, K);  // weight, or inp
    create_layout(&p->b, false, T, kind == FORWARD ? K : N);  // inp, or dout
    create_layout(&p->d, weight_gradient, weight_gradient ? N : T, kind == FORWARD ? N : K);
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, descriptions[kind], p->a, p->b, p->d, p->d, preference, 1, &best, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found < 1) {
        char what[160];
        snprintf(what, sizeof what, "%s: cuBLASLt has no algorithm for T %lld, K %lld, N %lld",
                 KIND_NAMES[kind], (long long)T, (long long)K, (long long)N);
        cuda_unsupported(what, (int64_t)status);
    }
    p->algo = best.algo;
    p->workspace_bytes = best.workspaceSize;
}

// The plan of a shape; made at its first sight, when a full neighbourhood of the table loses one.
static const Plan *plan_of(Kind kind, int64_t T, int64_t K, int64_t N) {
    const uint64_t home = hash(kind, T, K, N);
    Plan *free_slot = NULL;
    for (uint64_t i = 0; i < PROBES; i++) {
        Plan *p = &plans[(home + i) % NUM_PLANS];
        if (p->used && is_plan_of(p, kind, T, K, N)) return p;
        if (!p->used && !free_slot) free_slot = p;
    }
    if (!free_slot) {
        free_slot = &plans[(home + next_victim++ % PROBES) % NUM_PLANS];
        free_plan(free_slot);
    }
    make_plan(free_slot, kind, T, K, N);
    return free_slot;
}

static void run(Kind kind, void *d, const void *a, const void *b, float beta, int64_t T, int64_t K,
                int64_t N) {
    if (T == 0) return;
    if (K <= 0 || N <= 0 || K % 8 != 0 || N % 8 != 0) {
        char what[96];
        snprintf(what, sizeof what, "%s: expected sizes that are multiples of 8", KIND_NAMES[kind]);
        cuda_unsupported(what, K <= 0 || K % 8 != 0 ? K : N);
    }
    const float alpha = 1;
    const Plan *p = plan_of(kind, T, K, N);
    LT_CHECK(cublasLtMatmul(handle, descriptions[kind], &alpha, a, p->a, b, p->b, &beta, d, p->d, d,
                            p->d, &p->algo, workspace, p->workspace_bytes, cuda_stream()));
}

void matmul_forward(floatX *out, const floatX *inp, const floatX *weight, int64_t T, int64_t K,
                    int64_t N) {
    run(FORWARD, out, weight, inp, 0, T, K, N);
}

void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, int64_t T,
                           int64_t K, int64_t N) {
    run(BACKWARD_INPUT, dinp, weight, dout, 0, T, K, N);
}

void matmul_backward_weight(real *dweight, const floatX *dout, const floatX *inp, int64_t T,
                            int64_t K, int64_t N) {
    run(BACKWARD_WEIGHT, dweight, inp, dout, 1, T, K, N);
}
