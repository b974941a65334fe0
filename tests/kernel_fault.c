// Wrong kernels, for tests: wraps the operations of kernels.h (--wrap), so that the program itself
// has no code for it.
//
//   WRONG=swiglu_backward          the last element of a result is twice what it should be (0: 1)
//   WRONG=attention_forward:sm90   only while these attention kernels are selected
//   WRONG_RANK=1                   only on this rank
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/comm/comm.h"

static int is_wrong(const char *operation) {
    const char *wrong = getenv("WRONG"), *rank = getenv("WRONG_RANK");
    const size_t n = strlen(operation);
    if (!wrong || strncmp(wrong, operation, n) != 0 || (rank && atoi(rank) != comm_rank()))
        return 0;
    return !wrong[n] || (wrong[n] == ':' && strcmp(wrong + n + 1, attention_describe()) == 0);
}

// The last of n elements: floatX of CUDA, float or double
static void spoil(const char *operation, void *x, size_t n, size_t element_bytes) {
    char *last = (char *)x + (n - 1) * element_bytes;
    union {
        double d;
        float f;
        uint32_t bits;
    } value = {0};
    if (!is_wrong(operation)) return;
    device_download(element_bytes == 2 ? (char *)&value + 2 : (char *)&value, last, element_bytes);
    if (element_bytes == sizeof(double))
        value.d = value.d ? 2 * value.d : 1;
    else
        value.f = value.f ? 2 * value.f : 1;
    device_upload(last, element_bytes == 2 ? (char *)&value + 2 : (char *)&value, element_bytes);
}

#define WRAP(operation, parameters, arguments, result, n) \
    void __real_##operation parameters;                   \
    void __wrap_##operation parameters;                   \
    void __wrap_##operation parameters {                  \
        __real_##operation arguments;                     \
        spoil(#operation, result, n, sizeof *(result));   \
    }

WRAP(embedding_forward,
     (floatX * out, const int32_t *tokens, const floatX *weight, int64_t T, int C),
     (out, tokens, weight, T, C), out, (size_t)(T *C))
WRAP(embedding_backward,
     (real * dweight, const floatX *dout, const int32_t *tokens, const int32_t *order, int64_t T,
      int C),
     (dweight, dout, tokens, order, T, C), dweight, (size_t)C)
WRAP(rmsnorm_forward,
     (floatX * normed, real *rstd, const floatX *resid, const floatX *weight, float eps, int64_t T,
      int C),
     (normed, rstd, resid, weight, eps, T, C), rstd, (size_t)T)
WRAP(rmsnorm_backward,
     (floatX * dresid, real *dweight, const floatX *dnormed, const floatX *resid,
      const floatX *weight, const real *rstd, int64_t T, int C),
     (dresid, dweight, dnormed, resid, weight, rstd, T, C), dresid, (size_t)(T *C))
WRAP(qk_norm_forward,
     (floatX * out, const floatX *inp, const floatX *weight, float eps, int64_t T, HeadShape heads),
     (out, inp, weight, eps, T, heads), out,
     (size_t)(T *(heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim))
WRAP(qk_norm_backward,
     (floatX * dqkv, real *dweight, const floatX *inp, const floatX *weight, float eps, int64_t T,
      HeadShape heads),
     (dqkv, dweight, inp, weight, eps, T, heads), dweight, (size_t)(2 * heads.head_dim))
WRAP(bias_forward, (floatX * out, const floatX *bias, int64_t T, int64_t N), (out, bias, T, N), out,
     (size_t)(T *N))
WRAP(bias_backward, (real * dbias, const floatX *dout, int64_t T, int64_t N), (dbias, dout, T, N),
     dbias, (size_t)N)
WRAP(rope_forward,
     (floatX * qkv, const int32_t *position_ids, const real *rope_table, int64_t T,
      HeadShape heads),
     (qkv, position_ids, rope_table, T, heads), qkv,
     (size_t)(T *(heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim))
WRAP(attention_forward,
     (floatX * out, real *lse, const floatX *qkv, const VarlenInfo *docs, HeadShape heads),
     (out, lse, qkv, docs, heads), out,
     (size_t)docs->total_tokens *(size_t)(heads.num_heads *heads.head_dim))
WRAP(attention_backward,
     (floatX * dqkv, real *delta, const floatX *dout, const floatX *qkv, const floatX *out,
      const real *lse, const int32_t *position_ids, const real *rope_table, const VarlenInfo *docs,
      HeadShape heads),
     (dqkv, delta, dout, qkv, out, lse, position_ids, rope_table, docs, heads), dqkv,
     (size_t)docs->total_tokens *(size_t)((heads.num_heads + heads.num_kv_heads * 2) *
                                          heads.head_dim))
WRAP(kv_store,
     (floatX * cache, const floatX *qkv, const int32_t *first_rows, const int32_t *position_ids,
      int64_t T, HeadShape heads),
     (cache, qkv, first_rows, position_ids, T, heads), cache,
     (size_t)((T + 1) * 2 * heads.num_kv_heads * heads.head_dim))
WRAP(attention_decode,
     (floatX * out, const floatX *qkv, const floatX *cache, const int32_t *first_rows,
      const int32_t *position_ids, int64_t T, HeadShape heads),
     (out, qkv, cache, first_rows, position_ids, T, heads), out,
     (size_t)(T *heads.num_heads *heads.head_dim))
WRAP(matmul_forward,
     (floatX * out, const floatX *inp, const floatX *weight, int64_t T, int64_t K, int64_t N),
     (out, inp, weight, T, K, N), out, (size_t)(T *N))
WRAP(matmul_forward_add,
     (floatX * out, const floatX *resid, const floatX *inp, const floatX *weight, int64_t T,
      int64_t K, int64_t N),
     (out, resid, inp, weight, T, K, N), out, (size_t)(T *N))
WRAP(matmul_backward_input,
     (floatX * dinp, const floatX *dout, const floatX *weight, int64_t T, int64_t K, int64_t N),
     (dinp, dout, weight, T, K, N), dinp, (size_t)(T *K))
WRAP(matmul_backward_weight,
     (real * dweight, const floatX *dout, const floatX *inp, bool accumulate, int64_t T, int64_t K,
      int64_t N),
     (dweight, dout, inp, accumulate, T, K, N), dweight, (size_t)(K *N))
WRAP(swiglu_forward, (floatX * out, const floatX *gate_up, int64_t T, int64_t F),
     (out, gate_up, T, F), out, (size_t)(T *F))
WRAP(swiglu_backward,
     (floatX * dgate_up, const floatX *dout, const floatX *gate_up, int64_t T, int64_t F),
     (dgate_up, dout, gate_up, T, F), dgate_up, (size_t)(2 * T * F))
WRAP(cross_entropy_forward,
     (real * losses, const floatX *logits, const int32_t *targets, int64_t T, int64_t V),
     (losses, logits, targets, T, V), losses, (size_t)T)
WRAP(cross_entropy_forward_backward,
     (real * losses, floatX *logits, const int32_t *targets, const real *loss_scale, int64_t T,
      int64_t V),
     (losses, logits, targets, loss_scale, T, V), logits, (size_t)(T *V))
WRAP(losses_sum, (double *sum, const real *losses, int64_t T), (sum, losses, T), sum, 1)
WRAP(gather_rows, (floatX * out, const floatX *inp, const int32_t *rows, int64_t n, int64_t C),
     (out, inp, rows, n, C), out, (size_t)(n *C))
WRAP(scatter_rows,
     (floatX * out, const floatX *inp, const int32_t *rows, int64_t n, int64_t T, int64_t C),
     (out, inp, rows, n, T, C), out, (size_t)(T *C))
WRAP(grads_add, (real * sum, const real *x, size_t n), (sum, x, n), sum, n)
WRAP(global_norm_squared, (double *sum, const real *x, size_t n), (sum, x, n), sum, 1)
WRAP(clip_scale, (StepScalars * step, float max_norm), (step, max_norm), &step->scale, 1)
WRAP(adamw_update,
     (floatX * weights, uint16_t *master_lo, real *m, real *v, const real *grads,
      const StepScalars *step, AdamW hyper, size_t n),
     (weights, master_lo, m, v, grads, step, hyper, n), weights, n)
WRAP(comm_all_gather, (real * x, const size_t *first), (x, first), x, first[comm_num_ranks()])
WRAP(comm_collect, (real * out, const real *x, const size_t *first, size_t at, size_t block),
     (out, x, first, at, block), out, block)
WRAP(comm_sum_in_order, (double *sum, double *partial, size_t n), (sum, partial, n), sum, 1)

// Asynchronous: this rank's contribution is wrong.
uint64_t __real_comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to);
uint64_t __wrap_comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to);
uint64_t __wrap_comm_reduce_begin(real *x, const size_t *first, size_t from, size_t to) {
    spoil("comm_reduce_begin", x, to, sizeof *x);
    return __real_comm_reduce_begin(x, first, from, to);
}
