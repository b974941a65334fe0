// Matmul by cuBLASLt. A row-major (rows, cols) tensor is a column-major (cols, rows) matrix whose
// leading dimension is cols, so that no product needs a transpose in memory:
//
//   forward          out^T (N,T)     =  weight (N,K) inp^T (K,T) + resid^T (N,T)
//                                                                weight is found as (K,N)
//   backward_input   dinp^T (K,T)    =  weight^T (K,N) dout^T (N,T)
//   backward_weight  dweight^T (K,N) =  inp^T (K,T) dout (T,N)       dout is found as (N,T); or +=
//
// Leading dimensions are K and N, or the strides of wider rows, multiples of 8: every row starts on
// a 16-byte border for any T. Sums are fp32; where cuBLASLt splits the depth, only schemes that
// add the parts in fp32 and in a fixed order are allowed.
//
// Packed batches differ in T. cuBLASLt's heuristic is queried with the longest length of a bucket,
// so that its own cache rarely misses, and its first answer is used: two runs give the same bits.

#include "common.cuh"

#include <cublasLt.h>

static const char *const KIND_NAMES[NUM_KINDS] = {"matmul_forward", "matmul_backward_input",
                                                  "matmul_backward_weight"};

struct Shape {
    MatmulKind kind;
    int64_t T, K, N;
    int64_t inp_stride, out_stride;  // of rows of inp or dinp, and of out or dout
    int64_t num = 0;                 // of matmul_many; 0: one product
};
// D (m,n) = A (m,depth) B (depth,n), column-major
struct Layouts {
    cublasLtMatrixLayoutOpaque_t a, b, d;
};

static cublasLtHandle_t handle;
static cublasLtMatmulDesc_t descriptions[NUM_KINDS];
static cublasLtMatmulPreference_t preference;
static void *workspace;
static size_t workspace_bytes;

[[noreturn]] static void lt_fail(int line, const char *what, cublasStatus_t status) {
    device_fail("does the cuBLASLt found at run time belong to this toolkit?",
                "cuda: %s:%d: %s: %s", __FILE__, line, what, cublasLtGetStatusString(status));
}

#define LT_CHECK(call_)                                                           \
    do {                                                                          \
        cublasStatus_t status_ = (call_);                                         \
        if (status_ != CUBLAS_STATUS_SUCCESS) lt_fail(__LINE__, #call_, status_); \
    } while (0)

// ---- Setting up ---------------------------------------------------------------------------------

static void create_description(MatmulKind kind, cublasOperation_t a, cublasOperation_t b) {
    cublasLtMatmulDesc_t *desc = &descriptions[kind];
    LT_CHECK(cublasLtMatmulDescCreate(desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_CHECK(cublasLtMatmulDescSetAttribute(*desc, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a));
    LT_CHECK(cublasLtMatmulDescSetAttribute(*desc, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b));
}

static void prefer(cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size) {
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size));
}

static void create_preference() {
    // Not INPLACE and not OUTPUT_TYPE: those add the parts of a split depth in bf16.
    const uint32_t reductions =
        CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t alignment = 16;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions);
    for (const auto operand :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        prefer(operand, &alignment, sizeof alignment);
}

const char *matmul_init() {
    if (handle) return NULL;
    if (cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS)
        return "cuBLASLt does not start; does the driver support its version?";
    workspace_bytes = (size_t)(cuda_arch() >= 90 ? 32 : 4) << 20;  // what NVIDIA recommends
    workspace = cuda_allocate("the matmul workspace", workspace_bytes);
    create_description(FORWARD, CUBLAS_OP_T, CUBLAS_OP_N);
    create_description(BACKWARD_INPUT, CUBLAS_OP_N, CUBLAS_OP_N);
    create_description(BACKWARD_WEIGHT, CUBLAS_OP_N, CUBLAS_OP_T);
    create_preference();
    return NULL;
}

// ---- Algorithms ---------------------------------------------------------------------------------

// Each T up to 16 is a bucket; above, each doubling has eight.
static int64_t longest_of_bucket(int64_t T) {
    int64_t step = 1;
    while (T > 16 * step) step *= 2;
    return ceil_div(T, step) * step;
}

// A row-major (rows, cols) tensor whose rows lie stride elements apart, or num tensors
static void init_layout(cublasLtMatrixLayoutOpaque_t *layout, bool is_fp32, int64_t rows,
                        int64_t cols, int64_t stride, int64_t num) {
    const int32_t count = (int32_t)num;
    const int64_t offset = rows * stride;
    LT_CHECK(cublasLtMatrixLayoutInit(layout, is_fp32 ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)cols,
                                      (uint64_t)rows, stride));
    if (num == 0) return;
    LT_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                              sizeof count));
    LT_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                              &offset, sizeof offset));
}

static Layouts layouts_of(const Shape &s) {
    Layouts l;
    cublasLtMatrixLayoutOpaque_t *const inp[NUM_KINDS] = {&l.b, &l.d, &l.a},  // or dinp
        *const out[NUM_KINDS] = {&l.d, &l.b, &l.b}, *const weight[NUM_KINDS] = {&l.a, &l.a, &l.d};
    init_layout(inp[s.kind], false, s.T, s.K, s.inp_stride, s.num);
    init_layout(out[s.kind], false, s.T, s.N, s.out_stride, s.num);
    init_layout(weight[s.kind], s.kind == BACKWARD_WEIGHT && !s.num, s.N, s.K, s.K, s.num);
    return l;
}

// The first algorithm that cuBLASLt suggests for this shape
static cublasLtMatmulAlgo_t suggest(const Shape &s) {
    Layouts l = layouts_of(s);
    cublasLtMatmulHeuristicResult_t first;
    int n = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, descriptions[s.kind], &l.a, &l.b, &l.d, &l.d, preference, 1, &first, &n);
    if (status == CUBLAS_STATUS_SUCCESS && n == 1 && first.state == CUBLAS_STATUS_SUCCESS)
        return first.algo;
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED)
        lt_fail(__LINE__, "cublasLtMatmulAlgoGetHeuristic", status);
    device_fail("this model or batch has a shape that the backend does not support",
                "cuda: %s: cuBLASLt has no algorithm for T %lld, K %lld, N %lld (status %d)",
                KIND_NAMES[s.kind], (long long)s.T, (long long)s.K, (long long)s.N, (int)status);
}

// ---- The product --------------------------------------------------------------------------------

static cublasStatus_t multiply(const Shape &s, const cublasLtMatmulAlgo_t &algo,
                               const MatmulOperands &x) {
    const float alpha = x.scale, beta = x.addend ? x.beta : 0;
    Layouts l = layouts_of(s);
    return cublasLtMatmul(handle, descriptions[s.kind], &alpha, x.a, &l.a, x.b, &l.b, &beta,
                          x.addend ? x.addend : x.d, &l.d, x.d, &l.d, &algo, workspace,
                          workspace_bytes, cuda_stream());
}

// An algorithm for the bucket's longest length may refuse a shorter one; nothing was then launched.
static bool refused(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
}

static void check_sizes(const Shape &s) {
    assert(handle && s.T > 0);
    for (const int64_t size : {s.K, s.N, s.inp_stride, s.out_stride})
        if (size <= 0 || size % 8 != 0)
            cuda_unsupported(KIND_NAMES[s.kind], "sizes that are multiples of 8", size);
}

static void run(const Shape &s, const MatmulOperands &x) {
    if (s.T == 0) return;
    check_sizes(s);
    Shape longest = s;
    longest.T = longest_of_bucket(s.T);
    cublasStatus_t status = multiply(s, suggest(longest), x);
    if (refused(status)) status = multiply(s, suggest(s), x);
    if (status != CUBLAS_STATUS_SUCCESS) lt_fail(__LINE__, KIND_NAMES[s.kind], status);
}

// ---- The products -------------------------------------------------------------------------------

void matmul_many(MatmulKind kind, const MatmulOperands &x, int64_t T, int64_t K, int64_t N,
                 int64_t num) {
    run({kind, T, K, N, K, N, num}, x);
}

void matmul_forward(floatX *out, const floatX *resid, const floatX *inp, const floatX *weight,
                    int64_t T, int64_t K, int64_t N) {
    run({FORWARD, T, K, N, K, N}, {out, resid, weight, inp});
}

void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, bool accumulate,
                           int64_t T, int64_t K, int64_t N) {
    run({BACKWARD_INPUT, T, K, N, K, N}, {dinp, accumulate ? dinp : NULL, weight, dout});
}

void matmul_backward_weight(real *dweight, const floatX *dout, const floatX *inp, bool accumulate,
                            int64_t T, int64_t K, int64_t N) {
    if (!dweight) return;
    run({BACKWARD_WEIGHT, T, K, N, K, N}, {dweight, accumulate ? dweight : NULL, inp, dout});
}

void matmul_forward_columns(floatX *out, const floatX *resid, const floatX *inp,
                            const floatX *weight, float scale, int64_t T, int64_t K, int64_t N,
                            int64_t inp_stride, int64_t out_stride) {
    run({FORWARD, T, K, N, inp_stride, out_stride}, {out, resid, weight, inp, scale});
}

void matmul_backward_columns(floatX *dinp, real *dweight, const floatX *dout, const floatX *inp,
                             const floatX *weight, float scale, bool accumulate, int64_t T,
                             int64_t K, int64_t N, int64_t inp_stride, int64_t out_stride) {
    run({BACKWARD_INPUT, T, K, N, inp_stride, out_stride}, {dinp, NULL, weight, dout, scale});
    if (dweight)
        run({BACKWARD_WEIGHT, T, K, N, inp_stride, out_stride},
            {dweight, accumulate ? dweight : NULL, inp, dout, scale});
}
