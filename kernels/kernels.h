// THE contract: every device operation of unpad.c, declared once. kernels/cpu implements it in C
// with OpenMP (the readable reference), kernels/cuda in CUDA. train_llama.cu and llama.h see
// nothing of either.
//
// No operation knows rows. A micro-batch is one 1D buffer of tokens with cu_seqlens: padding would
// have to be in it as tokens, where the padded layouts put it.
//
// Letters in shape comments:
//   T  total_tokens, the packed length of this micro-batch
//   C  hidden_size    F  intermediate_size    V  vocab_size
//   H  num_heads      Hkv  num_kv_heads       D  head_dim     QKV  (H + 2*Hkv) * D
// All tensors are dense, row-major and aligned to 16 bytes. Argument order: outputs, inputs,
// scalars, sizes. A `d` prefix means gradient, nothing else. Every pointer is device memory unless
// its name ends in _host. "=" overwrites, "+=" accumulates. Outputs and inputs must not overlap
// unless stated. Operations are asynchronous and run in order on the backend's one stream; T = 0 is
// legal and does nothing. The gradient of a weight or bias may be NULL: it is frozen, and only the
// other outputs are computed.
//
// Requirements. The CPU takes any sizes with even D. CUDA needs C, F, K and N to be multiples of 8,
// C <= 16384 in RMSNorm, N <= 16384 in bias_backward, D a multiple of 16 in RoPE, D <= 256 in
// qk_norm, and D = 64 or 128 in attention. An unsupported shape, like any device error, is named
// and ends with exit code 11. Token ids, positions, targets and row indices must be in range.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(BACKEND_CUDA) && defined(__cplusplus)
#include <cuda_bf16.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif
#include "../data/base/pair.h"
#include "moments.h"  // defines: Moments; in here, since its headers are C

// floatX: weights and activations; bf16 on CUDA, fp32 on the CPU. real: anything accumulated or
// kept exact (losses, lse, rstd, weight gradients, optimizer state); fp32. Both are double in the
// gradient-check build.
#if defined(BACKEND_CUDA) && defined(__cplusplus)
typedef __nv_bfloat16 floatX;
typedef float real;
#elif defined(BACKEND_CUDA)
typedef struct {
    uint16_t bits;
} floatX;  // bf16: host code copies it and never computes with it
typedef float real;
#elif defined(GRADCHECK)
typedef double floatX;
typedef double real;
#else
typedef float floatX;
typedef float real;
#endif

// ---- The segments of one micro-batch ------------------------------------------------------------

typedef struct {
    const int32_t *cu_seqlens;  // (num_segments + 1): [0] = 0, non-decreasing, [num_segments] = T
    const int32_t *work;        // attention_work_list's list, used by every layer and both passes
    int32_t total_tokens;       // T
    int32_t num_segments;       // empty ones included
    int32_t max_seqlen;         // length of the longest segment, with what it shares
    // (num_segments), NULL: none. Document i may borrow a prefix: its first shared_len[i] tokens, a
    // multiple of SHARED_TILE, are the rows from shared_first[i] on, the beginning of a *leader*,
    // which borrows nothing. The rest, at least one token, are its own rows. Borrowers follow their
    // leader directly, longest prefix first.
    const int32_t *shared_first, *shared_len;
} VarlenInfo;
#define SHARED_TILE 128  // every tile of every kernel divides it

typedef struct {
    int num_heads, num_kv_heads, head_dim;  // num_heads % num_kv_heads == 0; head_dim even
} HeadShape;

// Upper bound, in int32, of the work list of any batch of max_tokens tokens in max_segments.
size_t attention_work_list_size(int64_t max_tokens, int64_t max_segments);
// Writes the work list of one batch to work_host, costliest items first, and returns the number of
// int32 written. Each (document, tile, head group) occurs exactly once; the layout is private to
// the backend. Runs on the host, in any thread after device_init. The arrays: as in VarlenInfo.
size_t attention_work_list(int32_t *work_host, const int32_t *cu_seqlens_host,
                           const int32_t *shared_first_host, const int32_t *shared_len_host,
                           int num_segments, HeadShape heads);

// ---- Embedding ----------------------------------------------------------------------------------

// out (T,C) =  weight[tokens]        tokens (T) int32 in [0,V)      weight (V,C)
void embedding_forward(floatX *out, const int32_t *tokens, const floatX *weight, int64_t T, int C);
// dweight (V,C) +=  for each token id the sum of its rows of dout (T,C), in order of position:
// deterministic, no atomics. order (T) int32: positions sorted by (token, position).
void embedding_backward(real *dweight, const floatX *dout, const int32_t *tokens,
                        const int32_t *order, int64_t T, int C);

// ---- RMSNorm (arXiv 1910.07467) -----------------------------------------------------------------

// normed (T,C) =  resid * rstd * weight          rstd (T) real =  1/sqrt(mean(resid^2) + eps)
// resid (T,C)                                    weight (C)
void rmsnorm_forward(floatX *normed, real *rstd, const floatX *resid, const floatX *weight,
                     float eps, int64_t T, int C);
// dresid (T,C) +=  gradient through the norm     dnormed, resid (T,C)
// dweight (C)  +=
void rmsnorm_backward(floatX *dresid, real *dweight, const floatX *dnormed, const floatX *resid,
                      const floatX *weight, const real *rstd, int64_t T, int C);

// The same norm of every query and key head (Qwen3)
// out (T,H+2*Hkv,D) =  inp, its query heads normalised with weight[0], its key heads with weight[1]
// inp (T,H+2*Hkv,D)    weight (2,D)
void qk_norm_forward(floatX *out, const floatX *inp, const floatX *weight, float eps, int64_t T,
                     HeadShape heads);
// dqkv (T,H+2*Hkv,D), in place: gradient of out -> gradient of inp      dweight (2,D) +=
void qk_norm_backward(floatX *dqkv, real *dweight, const floatX *inp, const floatX *weight,
                      float eps, int64_t T, HeadShape heads);

// ---- Bias of a linear layer ---------------------------------------------------------------------

// out (T,N) +=  bias (N)
void bias_forward(floatX *out, const floatX *bias, int64_t T, int64_t N);
// dbias (N) +=  sum of the rows of dout (T,N), in a fixed order
void bias_backward(real *dbias, const floatX *dout, int64_t T, int64_t N);

// ---- Rotary position embedding, half rotation as in Hugging Face Llama (pairs i, i + D/2) -------

// qkv (T,H+2*Hkv,D) rotated in place: the H query and Hkv key heads; the value heads are unchanged.
// The inverse rotation is part of attention_backward.
// rope_table (max_position, D/2, 2) real: cos, sin
// position_ids (T) int32 in [0,max_position), restarting in each document, at what it shares
void rope_forward(floatX *qkv, const int32_t *position_ids, const real *rope_table, int64_t T,
                  HeadShape heads);

// ------------------------------------------------------------------------------------------------
// Causal attention over packed documents; token i attends to j <= i of its own document only.
// softmax_scale = 1/sqrt(D). Accumulates in fp32. Never reads or writes rows past total_tokens. A
// document's results do not depend on its neighbours, its place in the buffer or that of its shared
// tokens, bit for bit; dK and dV of a shared row are sums over all documents that share it, on CUDA
// to rounding. Deterministic. Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.

//   out (T,H,D)         =
//   lse (H,T) real      =  natural log of the sum of exp of the scaled scores; kept for backward
//   qkv (T,H+2*Hkv,D)      after rope_forward
void attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                       HeadShape heads);
//   dqkv (T,H+2*Hkv,D)  =  gradient of rope_forward's input: queries and keys rotated back
//   delta (H,T) real    =  rowsum(dout * out); scratch
//   sums (attention_sums_size) real    scratch of shared prefixes; NULL: nothing is shared
//   dout (T,H,D)           gradient of out
//   qkv, out, lse          inputs and results of attention_forward
//   position_ids (T), rope_table: as in rope_forward
void attention_backward(floatX *dqkv, real *delta, real *sums, const floatX *dout,
                        const floatX *qkv, const floatX *out, const real *lse,
                        const int32_t *position_ids, const real *rope_table, const VarlenInfo *docs,
                        HeadShape heads);
size_t attention_sums_size(int64_t max_tokens, int head_dim);
// Selects the kernels, on every rank: "auto" (the fastest that all can run; on Hopper a second
// process tests them first), "unprobed" (without that), CUDA "sm80" or "sm90", CPU an instruction
// set. 0, or -1 if not available here. A work list is only for the kernels that it found.
int attention_select(const char *name);
const char *attention_describe(void);  // name of the kernels in use

// ---- Key-value cache, for autoregressive decoding -----------------------------------------------
// A row of cache (rows,2*Hkv,D) has the keys and values of one token. The rows of a text are
// consecutive: token t of a micro-batch has row first_rows[t] + position_ids[t], where first_rows
// (T) int32 is the row of its text's first token.

// cache[row of t] =  the key and value heads of token t   qkv (T,H+2*Hkv,D) after rope_forward
void kv_store(floatX *cache, const floatX *qkv, const int32_t *first_rows,
              const int32_t *position_ids, int64_t T, HeadShape heads);
// out (T,H,D) =  attention of token t over its text in the cache, up to its own row
// Accumulates in fp32; softmax_scale as above. The bits of a token do not depend on the others.
void attention_decode(floatX *out, const floatX *qkv, const floatX *cache,
                      const int32_t *first_rows, const int32_t *position_ids, int64_t T,
                      HeadShape heads);

// ---- Matmul, in the layout of nn.Linear: weight (N,K), y = x W^T. fp32 accumulation -------------
// On the CPU the bits of an output row do not depend on T or on the row's position.

// out (T,N) =  resid (T,N) + inp (T,K) weight (N,K)^T, rounded once; out may be resid
// resid NULL: zeros
void matmul_forward(floatX *out, const floatX *resid, const floatX *inp, const floatX *weight,
                    int64_t T, int64_t K, int64_t N);
// dinp (T,K) =  dout (T,N) weight (N,K); accumulate: +=
void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, bool accumulate,
                           int64_t T, int64_t K, int64_t N);
// dweight (N,K) =  dout (T,N)^T inp (T,K); accumulate: +=
void matmul_backward_weight(real *dweight, const floatX *dout, const floatX *inp, bool accumulate,
                            int64_t T, int64_t K, int64_t N);
// The same where out, resid and dout are N columns of rows of out_stride elements, and inp and dinp
// K columns of rows of inp_stride, multiples of 8 on CUDA
// out (T,N) =  resid (T,N) + scale * inp (T,K) weight (N,K)^T      resid NULL: zeros
void matmul_forward_columns(floatX *out, const floatX *resid, const floatX *inp,
                            const floatX *weight, float scale, int64_t T, int64_t K, int64_t N,
                            int64_t inp_stride, int64_t out_stride);
// dinp (T,K)    =  scale * dout (T,N) weight (N,K)
// dweight (N,K) =  scale * dout (T,N)^T inp (T,K); accumulate: +=
void matmul_backward_columns(floatX *dinp, real *dweight, const floatX *dout, const floatX *inp,
                             const floatX *weight, float scale, bool accumulate, int64_t T,
                             int64_t K, int64_t N, int64_t inp_stride, int64_t out_stride);

// ---- SwiGLU (arXiv 2002.05202) ------------------------------------------------------------------

// out (T,F) =  silu(gate) * up       gate_up (T,2F): gate in the first F columns, then up
void swiglu_forward(floatX *out, const floatX *gate_up, int64_t T, int64_t F);
// dgate_up (T,2F) =      dout (T,F)     gate_up (T,2F) of the forward pass
void swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t T,
                     int64_t F);

// ------------------------------------------------------------------------------------------------
// Cross-entropy on a chunk of T tokens; targets (T) int32 in [0,V), or -1: no target (loss 0,
// gradient 0, even where the logits are NaN). Rows have padded_vocab(V) logits, Vp, a multiple of 8
// for tensor cores; those from V on are ignored, and their gradient is 0.
static inline int64_t padded_vocab(int64_t V) { return (V + 7) / 8 * 8; }

// losses (T) real =  -log softmax(logits)[target]        logits (T,Vp)
void cross_entropy_forward(real *losses, const floatX *logits, const int32_t *targets, int64_t T,
                           int64_t V);
// The same, and logits (T,Vp) become dlogits = (softmax - onehot) * weights * loss_scale in place.
// weights (T) float, of any sign; NULL: all 1. They do not change the losses. loss_scale (1) real:
// 1 / (sum of |weights| of the whole optimizer step); gradients are summed, not averaged.
void cross_entropy_forward_backward(real *losses, floatX *logits, const int32_t *targets,
                                    const float *weights, const real *loss_scale, int64_t T,
                                    int64_t V);
// sum (1) double +=  losses * weights (T), in a fixed order      weights NULL: all 1
void losses_sum(double *sum, const real *losses, const float *weights, int64_t T);
// sums (n) double =  losses * weight over the runs of each document, in a fixed order: the same
// bits wherever its rows are. Document i has runs starts[i] to starts[i+1] - 1; run k is runs[2k+1]
// rows from row runs[2k] on, which other runs may have too, with one weight; weights (num_runs).
void losses_by_document(double *sums, const real *losses, const int32_t *runs, const float *weights,
                        const int32_t *starts, int64_t n);
// Preference pairs (n): documents 2i and 2i+1, whose losses_by_document are sums (2n).
// losses (n) real   =  pair_loss
// weights (T) float =  for each row, its derivative by the loss there; 0 in rows of no document
// Runs, run_weights and starts are as above; two pairs have no row in common.
void pairs_weigh(float *weights, real *losses, const double *sums, const PairTerms *pairs,
                 const int32_t *runs, const float *run_weights, const int32_t *starts, int64_t T,
                 int64_t n);

// ---- Rows by index: for the repad layout and for sampling (gather_rows) -------------------------

// out (n,C) =  inp[rows]             rows (n) int32 in [0,T)       inp (T,C)
void gather_rows(floatX *out, const floatX *inp, const int32_t *rows, int64_t n, int64_t C);
// out (T,C) =  0, then out[rows] = inp (n,C)
void scatter_rows(floatX *out, const floatX *inp, const int32_t *rows, int64_t n, int64_t T,
                  int64_t C);

// ---- Optimizer ----------------------------------------------------------------------------------

// sum (n) +=  x (n): adds the gradients of several micro-batches
void grads_add(real *sum, const real *x, size_t n);
// sum (1) double +=  sum of squares of x (n), in a fixed order
void global_norm_squared(double *sum, const real *x, size_t n);
#define MAX_UPDATE_NORM 1e19  // its square, which v may become, still fits a float
typedef struct {
    double loss_sum, norm_squared;
    float grad_norm, scale;
} StepScalars;
// step (1), on the device so that an update needs no read-back. Reads loss_sum and norm_squared:
//   grad_norm =  sqrt(norm_squared)
//   scale     =  min(1, max_norm / grad_norm), or 1 if max_norm <= 0; 0 if loss_sum or norm_squared
//                is not finite or the clipped norm exceeds MAX_UPDATE_NORM
void clip_scale(StepScalars *step, float max_norm);

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    int64_t t;  // number of this update, from 1
} AdamW;
// AdamW (arXiv 1711.05101) as torch.optim.AdamW:  w -= lr * (wd * w + m_hat / (sqrt(v_hat) + eps))
// weights, master_lo, moments (n) updated in place; grads (n) are read times step->scale. With 0
// nothing changes. master_lo: as in weights_from_host, but never NULL on CUDA.
void adamw_update(floatX *weights, uint16_t *master_lo, Moments moments, const real *grads,
                  const StepScalars *step, AdamW hyper, size_t n);

// Muon (muon.h), of num matrices stride elements apart in weights, grads and momentum, dense in x,
// next (num,rows,cols) and squares (2,num,side,side), scratch. With step->scale 0 nothing changes.
typedef struct {
    int64_t rows, cols, num;
    size_t stride;
} MuonShape;
// momentum.m =  beta m + (1 - beta) g  and  grads =  the same once more; g: scale times grads
void muon_momentum(real *grads, Moments momentum, const StepScalars *step, float beta, MuonShape s);
// x =  grads / max(||grads||, eps), the Frobenius norm of each matrix
void muon_normalise(floatX *x, const real *grads, double eps, MuonShape s);
// next =  k[0] x + (k[1] g + k[2] g g) x  with g = x x^T, where x is tall x (..) with x^T x
void muon_iterate(floatX *next, floatX *squares, const floatX *x, const float k[3], MuonShape s);
// weights =  keep weights - lr x      master_lo: as AdamW's
void muon_apply(floatX *weights, uint16_t *master_lo, const floatX *x, const StepScalars *step,
                float lr, float keep, MuonShape s);

// ---- Device -------------------------------------------------------------------------------------

typedef struct {
    int threads;      // CPU threads; 0: see machine_threads of data/base/machine.h
    int bf16_matmul;  // CPU: 1: round matmul inputs to bf16, accumulate in fp32
    int collects;     // 1: several ranks will call comm_collect
} DeviceOptions;

// Call first in main. main must not exit with code 1: that code is reserved for failures of OpenMP.
// May re-exec the process with environment variables that the device's libraries read when loaded.
void device_prepare_process(char **argv);
// Selects the device and its fastest code paths; call before any function below. Returns NULL, or
// one line (static) that names the missing requirement.
const char *device_init(const DeviceOptions *options);
// NULL, or one line (static) that names the config.json key of a size that the device cannot run
const char *device_refuses(int C, int F, int D);
// One line for humans, valid until exit: "cpu, 2 threads of 2 cores, matmul avx512 8x48"
const char *device_describe(void);
// Callback that adds context to device error messages: `describe` writes one NUL-terminated line of
// at most `capacity` bytes, e.g. the documents of the last batch. The CPU backend ignores it.
void device_on_error(void (*describe)(void *context, char *text, size_t capacity), void *context);
// Prints one error line (with the callback's context) and one hint; exits with code 11.
__attribute__((noreturn, format(printf, 2, 3))) void device_fail(const char *hint,
                                                                 const char *format, ...);
// `bytes` of uninitialised device memory, aligned to 64 bytes (CUDA: 256). Returns NULL when out of
// memory. Builds with -DPOISON fill it with NaN.
void *device_malloc(size_t bytes);
void device_free(void *p);  // p from device_malloc, or NULL; waits for all work enqueued so far
void device_zero(void *p, size_t bytes);
// Asynchronous, in order with operations; src_host may be reused as soon as the call returns.
void device_upload(void *dst, const void *src_host, size_t bytes);
void device_download(void *dst_host, const void *src, size_t bytes);  // waits for all work
void device_copy(void *dst, const void *src, size_t bytes);           // on the device, asynchronous
// One timer: start and stop enqueue marks on the stream, ms is the time between the last two in
// milliseconds. device_timer_ms does not wait: call it after a wait that follows the stop.
void device_timer_start(void);
void device_timer_stop(void);
float device_timer_ms(void);
// Excludes `ms` of host time from the running timer, e.g. a wait for other ranks. A no-op on CUDA,
// where the device keeps the time, and while no timer runs.
void device_timer_leave_out(double ms);
typedef struct {
    uint64_t count;                  // allocations so far; steps after the first make none
    uint64_t bytes_now, bytes_peak;  // allocated now, and at the peak
    uint64_t waits;                  // how often the host has waited: once per step, for its loss
} DeviceMemory;
DeviceMemory device_memory(void);
// Bytes that can still be allocated, 0: unknown. The host's memory is shared by local_ranks.
size_t device_memory_free(int local_ranks);
int device_memory_code(void);  // exit code for refused memory: the host's or a GPU's

// Weights and activations (n elements) are fp32 on the host. On CUDA a weight is a bf16 plus 16 low
// bits, together the exact fp32 master; on the CPU it is the fp32 itself and master_lo is ignored.
// master_lo NULL: the low bits are neither written nor read, and a weight is its bf16. From host:
// src_host may be reused as soon as the call returns. To host: waits for all work enqueued so far.
size_t master_lo_bytes(void);  // bytes of low bits per weight: 0 or 2
void weights_from_host(floatX *weights, uint16_t *master_lo, const float *src_host, size_t n);
void weights_to_host(float *dst_host, const floatX *weights, const uint16_t *master_lo, size_t n);
static inline void activations_to_host(float *dst_host, const floatX *src, size_t n) {
    weights_to_host(dst_host, src, NULL, n);
}

#ifdef __cplusplus
}
#endif
