// cuBLASLt on the host: D = alpha op(A) op(B) + beta C, column-major, fp32 accumulation. Two
// algorithms, so that choosing among several and handing over a workspace are exercised too: 0 sums
// over k in one go, 1 in two halves that meet in the workspace and does not do an odd k. The
// heuristic prefers 0. EMU_LT_ALGO makes it another: 1 prefers 1, as another version might; none
// knows no algorithm; refuse gives one that does the very sizes it was asked about and no others.
#include "engine.h"
#include "include/cublasLt.h"
#include "include/cuda_bf16.h"

#include <memory>
#include <vector>

struct cublasLtContext {
    uint64_t magic;
};

namespace {
constexpr uint64_t CONTEXT_MAGIC = 0x6d61746d756c4c74ull;
constexpr int NUM_ALGOS = 2;

// The eight opaque words of an algorithm descriptor: a mark, the number, the alignment of A, B, C,
// D and the operations and types that it was chosen for; and the only m, n, k that it computes, or
// zeros.
enum AlgoWord { ALGO_MARK, ALGO_ID, ALGO_ALIGN, ALGO_FORM, ALGO_M, ALGO_N, ALGO_K };
constexpr uint64_t ALGO_MAGIC = 0x616c676f;

bool is_context(cublasLtHandle_t h) { return h && h->magic == CONTEXT_MAGIC; }

// Attributes are copied out of a buffer whose size must be the attribute's own.
template <class T>
cublasStatus_t set(T *field, const void *buf, size_t bytes) {
    if (!buf || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(field, buf, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

// ---- Is this a product that the library does at all? --------------------------------------------

bool is_type(uint32_t t) { return t == CUDA_R_32F || t == CUDA_R_16BF; }
size_t type_bytes(uint32_t t) { return t == CUDA_R_16BF ? 2 : 4; }

cublasStatus_t check_layout(const cublasLtMatrixLayoutOpaque_t *m) {
    if (!m || m->ld < (int64_t)m->rows) return CUBLAS_STATUS_INVALID_VALUE;
    return m->batch_count >= 1 && is_type(m->type) ? CUBLAS_STATUS_SUCCESS
                                                   : CUBLAS_STATUS_NOT_SUPPORTED;
}

// A and B of one type, C and D of one type; a wider input than output is not in the library's
// table of supported types.
bool supported_types(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return a == b && c == d && is_type(a) && is_type(c) && type_bytes(a) <= type_bytes(c);
}

cublasStatus_t check_product(const cublasLtMatmulDescOpaque_t *op,
                             const cublasLtMatrixLayoutOpaque_t *a,
                             const cublasLtMatrixLayoutOpaque_t *b,
                             const cublasLtMatrixLayoutOpaque_t *c,
                             const cublasLtMatrixLayoutOpaque_t *d) {
    if (!op) return CUBLAS_STATUS_INVALID_VALUE;
    for (const cublasLtMatrixLayoutOpaque_t *m : {a, b, c, d}) {
        cublasStatus_t status = check_layout(m);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        if (m->batch_count != d->batch_count) return CUBLAS_STATUS_INVALID_VALUE;
    }
    // matrices of D that share an element
    if (d->batch_count > 1 && d->batch_offset < (int64_t)((d->cols - 1) * d->ld + d->rows))
        return CUBLAS_STATUS_INVALID_VALUE;
    uint64_t m = op->trans_a == CUBLAS_OP_N ? a->rows : a->cols;
    uint64_t k = op->trans_a == CUBLAS_OP_N ? a->cols : a->rows;
    uint64_t kb = op->trans_b == CUBLAS_OP_N ? b->rows : b->cols;
    uint64_t n = op->trans_b == CUBLAS_OP_N ? b->cols : b->rows;
    if (k != kb || d->rows != m || d->cols != n || c->rows != m || c->cols != n || !m || !n || !k)
        return CUBLAS_STATUS_INVALID_VALUE;
    return supported_types(a->type, b->type, c->type, d->type) ? CUBLAS_STATUS_SUCCESS
                                                               : CUBLAS_STATUS_NOT_SUPPORTED;
}

uint64_t depth(const cublasLtMatmulDescOpaque_t *op, const cublasLtMatrixLayoutOpaque_t *a) {
    return op->trans_a == CUBLAS_OP_N ? a->cols : a->rows;
}
bool algo_does(int id, const cublasLtMatmulDescOpaque_t *op,
               const cublasLtMatrixLayoutOpaque_t *a) {
    return id == 0 || depth(op, a) % 2 == 0;
}

// Operations and types, one byte each, of a product of these; an algorithm does no others.
uint64_t form(const cublasLtMatmulDescOpaque_t *op, const cublasLtMatrixLayoutOpaque_t *a,
              const cublasLtMatrixLayoutOpaque_t *d) {
    return (uint64_t)op->trans_a << 24 | (uint64_t)op->trans_b << 16 | (uint64_t)a->type << 8 |
           d->type;
}

cublasStatus_t check_algo(const cublasLtMatmulAlgo_t *algo, const cublasLtMatmulDescOpaque_t *op,
                          const cublasLtMatrixLayoutOpaque_t *a,
                          const cublasLtMatrixLayoutOpaque_t *d) {
    const uint64_t *word = algo->data;
    if (word[ALGO_MARK] != ALGO_MAGIC || word[ALGO_FORM] != form(op, a, d))
        return CUBLAS_STATUS_INVALID_VALUE;
    const bool its_sizes =
        word[ALGO_M] == 0 ||
        (word[ALGO_M] == d->rows && word[ALGO_N] == d->cols && word[ALGO_K] == depth(op, a));
    return its_sizes && algo_does((int)word[ALGO_ID], op, a) ? CUBLAS_STATUS_SUCCESS
                                                             : CUBLAS_STATUS_NOT_SUPPORTED;
}

size_t algo_workspace(int id, const cublasLtMatrixLayoutOpaque_t *d) {
    return id == 1 ? 2 * d->rows * d->cols * sizeof(float) : 0;
}

// ---- The product itself: panels of A and B as fp32, a 16 x 4 tile of D in registers -------------

enum { TILE_M = 16, TILE_N = 4 };

#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define CLONES \
    __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES __attribute__((noinline))
#endif

CLONES void tile(float *sum, const float *a, const float *b, int64_t k) {
    float acc[TILE_N][TILE_M] = {};
    for (int64_t l = 0; l < k; l++)
        for (int j = 0; j < TILE_N; j++)
            for (int i = 0; i < TILE_M; i++) acc[j][i] += a[l * TILE_M + i] * b[l * TILE_N + j];
    memcpy(sum, acc, sizeof acc);
}

// Matrix number i of a batch
const void *matrix_at(const void *p, const cublasLtMatrixLayoutOpaque_t *m, int i) {
    return (const char *)p + (int64_t)i * m->batch_offset * (int64_t)type_bytes(m->type);
}

float element(const void *p, uint32_t type, size_t i) {
    if (type == CUDA_R_16BF) return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
    return ((const float *)p)[i];
}

// Rows first..first+width of op(M), k columns, as [k][width]; zeros beyond the last row.
void pack(float *panel, const void *p, const cublasLtMatrixLayoutOpaque_t *m, bool row_is_column,
          int64_t first, int64_t rows, int width, int64_t k0, int64_t k) {
    for (int64_t l = 0; l < k; l++)
        for (int i = 0; i < width; i++) {
            int64_t row = first + i, col = k0 + l;
            size_t at = row_is_column ? (size_t)(row * m->ld + col) : (size_t)(col * m->ld + row);
            panel[l * width + i] = row < rows ? element(p, m->type, at) : 0.0f;
        }
}

struct Product {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, c, d;
    const void *pa, *pb, *pc;
    void *pd;
    float alpha, beta;
    int64_t m, n, k;
};

// One sum over k0..k0+k for the whole of D, handed to store(row, column, sum).
template <class Store>
void sums(const Product &x, int64_t k0, int64_t k, Store store) {
    int64_t panels = (x.m + TILE_M - 1) / TILE_M;
    std::vector<float> a((size_t)(panels * TILE_M * k)), b((size_t)(TILE_N * k));
    for (int64_t p = 0; p < panels; p++)
        pack(&a[(size_t)(p * TILE_M * k)], x.pa, &x.a, x.op.trans_a != CUBLAS_OP_N, p * TILE_M, x.m,
             TILE_M, k0, k);
    for (int64_t j0 = 0; j0 < x.n; j0 += TILE_N) {
        pack(b.data(), x.pb, &x.b, x.op.trans_b == CUBLAS_OP_N, j0, x.n, TILE_N, k0, k);
        for (int64_t p = 0; p < panels; p++) {
            float s[TILE_N * TILE_M];
            tile(s, &a[(size_t)(p * TILE_M * k)], b.data(), k);
            for (int64_t j = 0; j < std::min<int64_t>(TILE_N, x.n - j0); j++)
                for (int64_t i = 0; i < std::min<int64_t>(TILE_M, x.m - p * TILE_M); i++)
                    store(p * TILE_M + i, j0 + j, s[j * TILE_M + i]);
        }
    }
}

// beta = 0 means that C is not read: it may hold NaN.
void finish(const Product &x, int64_t i, int64_t j, float sum) {
    float v = x.alpha * sum;
    if (x.beta != 0.0f) v += x.beta * element(x.pc, x.c.type, (size_t)(j * x.c.ld + i));
    size_t at = (size_t)(j * x.d.ld + i);
    if (x.d.type == CUDA_R_16BF)
        ((__nv_bfloat16 *)x.pd)[at] = __float2bfloat16(v);
    else
        ((float *)x.pd)[at] = v;
}

void multiply(const Product &x) {
    sums(x, 0, x.k, [&](int64_t i, int64_t j, float s) { finish(x, i, j, s); });
}

void multiply_in_two_halves(const Product &x, float *partial) {
    int64_t half = x.k / 2;
    for (int h = 0; h < 2; h++)
        sums(x, h * half, h ? x.k - half : half,
             [&](int64_t i, int64_t j, float s) { partial[(h * x.n + j) * x.m + i] = s; });
    for (int64_t j = 0; j < x.n; j++)
        for (int64_t i = 0; i < x.m; i++)
            finish(x, i, j, partial[j * x.m + i] + partial[(x.n + j) * x.m + i]);
}
}  // namespace

// ---- Handles, descriptors and their attributes --------------------------------------------------

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
    *handle = new cublasLtContext{CONTEXT_MAGIC};
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion(void) { return 130000; }

const char *cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS:
            return "success";
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return "the library was not initialized";
        case CUBLAS_STATUS_INVALID_VALUE:
            return "an unsupported value or parameter was passed to the function";
        case CUBLAS_STATUS_NOT_SUPPORTED:
            return "the functionality requested is not supported";
    }
    return "unknown status";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t,
                                        cudaDataType_t scale) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!desc || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
    *desc = new cublasLtMatmulDescOpaque_t{CUBLAS_OP_N, CUBLAS_OP_N};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attr, const void *buf,
                                              size_t bytes) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!desc) return CUBLAS_STATUS_INVALID_VALUE;
    int32_t *field = attr == CUBLASLT_MATMUL_DESC_TRANSA ? &desc->trans_a : &desc->trans_b;
    const cublasStatus_t status = set(field, buf, bytes);
    const bool is_operation = *field == CUBLAS_OP_N || *field == CUBLAS_OP_T;
    return is_operation ? status : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType type,
                                        uint64_t rows, uint64_t cols, int64_t ld) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
    *layout = {(uint32_t)type, 1, rows, cols, ld, 0};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attr,
                                                const void *buf, size_t bytes) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
    if (attr == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return set(&layout->batch_count, buf, bytes);
    if (attr == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)
        return set(&layout->batch_offset, buf, bytes);
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *pref) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!pref) return CUBLAS_STATUS_INVALID_VALUE;
    *pref = new cublasLtMatmulPreferenceOpaque_t{0, ~0u, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *buf, size_t bytes) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!pref) return CUBLAS_STATUS_INVALID_VALUE;
    if (attr == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        return set(&pref->max_workspace, buf, bytes);
    if (attr == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        return set(&pref->reduction_mask, buf, bytes);
    return set(&pref->alignment[attr - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], buf, bytes);
}

// ---- Choosing an algorithm ----------------------------------------------------------------------

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t pref, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *returned) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!is_context(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (requested <= 0 || !results || !returned || !pref) return CUBLAS_STATUS_INVALID_VALUE;
    *returned = 0;
    cublasStatus_t status = check_product(op, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const char *first = getenv("EMU_LT_ALGO");
    if (first && strcmp(first, "none") == 0) return CUBLAS_STATUS_SUCCESS;
    const bool only_these_sizes = first && strcmp(first, "refuse") == 0;
    for (int i = 0; i < NUM_ALGOS && *returned < requested; i++) {
        const int id = (i + (first ? atoi(first) : 0)) % NUM_ALGOS;
        size_t workspace = algo_workspace(id, d);
        bool may_split = pref->reduction_mask & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        if (workspace > pref->max_workspace || (id == 1 && !may_split) || !algo_does(id, op, a))
            continue;
        cublasLtMatmulHeuristicResult_t *r = &results[(*returned)++];
        *r = {};
        uint64_t *word = r->algo.data;
        word[ALGO_MARK] = ALGO_MAGIC, word[ALGO_ID] = (uint64_t)id;
        word[ALGO_FORM] = form(op, a, d);
        for (int operand = 0; operand < 4; operand++)
            word[ALGO_ALIGN] |= (uint64_t)pref->alignment[operand] << 16 * operand;
        if (only_these_sizes)
            word[ALGO_M] = d->rows, word[ALGO_N] = d->cols, word[ALGO_K] = depth(op, a);
        r->workspaceSize = workspace;
        r->state = CUBLAS_STATUS_SUCCESS;
        r->wavesCount = 1.0f;
    }
    return *returned ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

// ---- The product --------------------------------------------------------------------------------

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    EMU_CALL(cublasStatus_t, __func__);
    if (!is_context(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    cublasStatus_t status = check_product(op, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!alpha || !beta || !A || !B || !C || !D) return CUBLAS_STATUS_INVALID_VALUE;
    if (C == D && (c->ld != d->ld || c->type != d->type)) return CUBLAS_STATUS_INVALID_VALUE;
    const void *operand[4] = {A, B, C, D};
    const char *letter = "ABCD";
    for (int i = 0; i < 4; i++)
        if (!emu::is_device_ptr(operand[i]))
            emu::fail("cublasLtMatmul: %c is not a device pointer (%p)", letter[i], operand[i]);
    int id = 0;
    if (algo) {
        status = check_algo(algo, op, a, d);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        id = (int)algo->data[ALGO_ID];
        for (int i = 0; i < 4; i++) {
            const unsigned alignment = algo->data[ALGO_ALIGN] >> 16 * i & 0xffff;
            if ((uintptr_t)operand[i] % alignment)
                emu::fail(
                    "cublasLtMatmul: %c at %p is less aligned than the %u bytes that the "
                    "algorithm was chosen for",
                    letter[i], operand[i], alignment);
        }
    }
    size_t need = algo_workspace(id, d);
    if (workspace_bytes < need || (need && !workspace)) return CUBLAS_STATUS_INVALID_VALUE;
    if (need && (!emu::is_device_ptr(workspace) || (uintptr_t)workspace % 16))
        emu::fail("cublasLtMatmul: workspace %p is not 16-byte aligned device memory", workspace);
    Product x{*op, *a, *b, *c, *d, A, B, C, D, 0, 0, (int64_t)d->rows, (int64_t)d->cols, 0};
    x.k = (int64_t)(op->trans_a == CUBLAS_OP_N ? a->cols : a->rows);
    memcpy(&x.alpha, alpha, sizeof x.alpha);
    memcpy(&x.beta, beta, sizeof x.beta);
    emu::enqueue(stream, [=] {
        for (int i = 0; i < x.d.batch_count; i++) {
            Product one = x;
            one.pa = matrix_at(A, &x.a, i), one.pb = matrix_at(B, &x.b, i);
            one.pc = matrix_at(C, &x.c, i), one.pd = (void *)matrix_at(D, &x.d, i);
            if (id == 1)
                multiply_in_two_halves(one, (float *)workspace);
            else
                multiply(one);
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}
