// The model: configuration -> arenas -> forward, backward, update. It reads as the architecture:
// every device operation is a call into kernels/kernels.h, and no line here knows the backend.
//
//   Parameter     one parameter of the checkpoint: the table that drives allocation, load, save,
//                 weight decay and names
//   LlamaLayer    a layer's weights and their gradients, views into the arenas
//   LlamaActs     a layer's activations that backward needs
//   LlamaInputs   the micro-batch on the device: tokens, targets, positions, documents
//
// A step is llama_train_step: every micro-batch forward, head and backward, then the update. Shape
// comments use the letters of kernels.h.
#pragma once

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>

#include "data/base/error.h"
#include "data/base/hash.h"
#include "data/base/memory.h"
#include "data/batches/batch.h"
#include "data/batches/loader.h"
#include "data/models/config.h"
#include "data/models/lora.h"
#include "data/models/weights.h"
#include "data/use/model_face.h"  // defines: LlamaModel
#include "kernels/comm/comm.h"
#include "kernels/comm/zero.h"
#include "kernels/arena.h"
#include "kernels/kernels.h"  // defines: every operation on the device
#include "kernels/lora.h"

// ---- Types --------------------------------------------------------------------------------------

// Weights of one layer. q, k and v lie one after another in the arena, so q's pointer is the fused
// qkv_proj; the same holds for gate and up.
typedef struct {
    floatX *input_layernorm;           // (C)
    Linear qkv_proj;                   // (QKV, C)  with a bias where the config has it
    floatX *qk_norm;                   // (2, D)    q_norm, then k_norm; where the config has them
    Linear o_proj;                     // (C, H*D)
    floatX *post_attention_layernorm;  // (C)
    Linear gate_up_proj;               // (2F, C)
    Linear down_proj;                  // (C, F)
    // gradients of the vectors; a Linear has its own
    real *dinput_layernorm, *dqk_norm, *dpost_attention_layernorm;
} LlamaLayer;

// Activations of one layer. All layers share the buffers that backward does not need or recomputes:
// see LlamaRecompute.
typedef struct {
    floatX *resid_attn;  // (T, C)    residual stream entering attention
    real *rstd_attn;     // (T)
    floatX *norm_attn;   // (T, C)
    floatX *proj;        // (T, QKV)  before qk_norm; the same buffer as qkv where there is none
    floatX *qkv;         // (T, QKV)  rope applied
    floatX *attn;        // (T, H*D)
    real *lse;           // (H, T)
    floatX *resid_mlp;   // (T, C)    residual stream entering the MLP
    real *rstd_mlp;      // (T)
    floatX *norm_mlp;    // (T, C)
    floatX *gate_up;     // (T, 2F)
    floatX *swiglu;      // (T, F)
    floatX *kv_cache;    // (cache_tokens, 2*Hkv*D)    for generation
} LlamaActs;

// Buffers that all layers share
typedef struct {
    real *losses;                  // (T)
    real *pair_losses;             // (T/2)   preference pairs only
    float *row_weights;            // (T)     likewise, of the rows that have logits
    floatX *dresid;                // (T, C)
    floatX *dnorm;                 // (T, C)
    floatX *dqkv;                  // (T, QKV)
    floatX *dattn;                 // (T, H*D)
    floatX *dgate_up;              // (T, 2F)
    floatX *dswiglu;               // (T, F)
    real *attn_delta, *attn_sums;  // (H, T); shared layout on CUDA only
    floatX *logits;                // (head_chunk, Vp), becomes dlogits in place
    floatX *head_rows;             // (head_chunk, C)   the rows that have logits
    floatX *real_qkv, *real_attn, *real_dattn, *real_dqkv;  // repad layout only: gathered rows
    floatX *lora_h, *lora_dh;                               // (T, LORA_MOST*r)
} LlamaScratch;

typedef struct {
    int32_t *tokens, *position_ids, *token_order;  // (T)
    int32_t *cache_rows;                           // (T) generation only, else NULL
    bool decode;                                   // attention over the cache
    VarlenInfo docs;
    int32_t num_head_rows;         // rows that the head computes: see Batch
    int32_t *head_rows, *targets;  // (num_head_rows) indices of these rows, and their targets
    const float *weights;          // (num_head_rows) weights of the targets; NULL: all 1
    int64_t first_doc, num_docs;   // whose losses are told apart, by runs: see Batch; 0: none
    const int32_t *doc_runs, *runs;
    const float *run_weights;
    int32_t num_pairs;  // 0, or each two documents have one loss, which gives the weights
    const PairTerms *pairs;
    int32_t num_real_rows;  // repad layout only, else 0
    int32_t *real_rows, *real_position_ids;
    VarlenInfo real_docs;
} LlamaInputs;

// How much of a layer backward recomputes; the bits do not change. OFF: nothing. ON: the norms and
// SwiGLU, which saves 30 % of the memory for little work. FULL: everything, from the residual
// stream that enters the layer.
typedef enum { LLAMA_RECOMPUTE_OFF, LLAMA_RECOMPUTE_ON, LLAMA_RECOMPUTE_FULL } LlamaRecompute;
enum { LLAMA_NUM_RECOMPUTES = 3 };
static const char *const llama_recompute_names[] = {"off", "on", "full"};

// Device memory: five arenas, each measured and then carved by llama_carve
enum { LLAMA_WEIGHTS, LLAMA_GRADS, LLAMA_OPTIMIZER, LLAMA_ACTIVATIONS, LLAMA_WORKSPACE };
enum { LLAMA_NUM_ARENAS = 5 };
static const char *const llama_arena_names[] = {"weights", "gradients", "optimizer", "activations",
                                                "workspace"};

// The uses that a model is planned for; 0 is off, or the default that a comment names.
typedef struct {
    int32_t micro_batch_tokens;  // tokens of the largest micro-batch
    int32_t max_seqlen;          // longest segment: positions in the rope table
    uint32_t layouts;            // that need room of their own: 1 << LAYOUT_REPAD, LAYOUT_SHARED
    bool train;                  // gradients and optimizer state
    bool pairs;                  // of documents: ranks.most_documents is not 0
    bool muon;                   // updates the matrices of layers by Muon, else all by AdamW
    LoraConfig lora;             // rank > 0: adapters are trained, the model is frozen
    LlamaRecompute recompute;
    int32_t cache_tokens;  // generation: tokens whose keys and values are kept
    int32_t head_chunk;    // tokens whose logits exist at one time; 0: see llama_head_chunk
    size_t io_chunk;       // elements that pass the host at a time; 0: 2^20
    ZeroSettings ranks;    // the ranks that share each step
} LlamaSettings;

// Weights are gathered and gradients reduced in buckets, in the order in which forward uses them:
// LLAMA_LAYERS + l is layer l, and the head follows the last layer. Backward completes the buckets
// in reverse order.
enum { LLAMA_EMBEDDING, LLAMA_NORMS, LLAMA_LAYERS };

struct LlamaModel {
    LlamaConfig config;
    HeadShape heads;
    LlamaSettings settings;
    // trained parameters first; with adapters, the frozen model follows
    Parameter *tensors;
    int num_tensors, num_trained;
    int layer_matrices;   // a layer's trained matrices, or its A and B
    size_t num_elements;  // trained, gaps between parameters included
    size_t num_weights;   // trained and frozen
    size_t num_nf4;       // frozen in NF4, not among num_weights
    size_t num_decayed;   // the trained matrices, which come first
    uint32_t frozen_crc;  // of the frozen model as it was read, in fp32
    floatX *weights;      // (num_weights)
    Nf4 nf4;              // (num_nf4)
    real *grads;          // (num_elements) at the same offsets
    Zero zero;            // sums gradients over micro-batches and ranks, and updates the weights
    // views into the arenas
    floatX *embed_tokens, *norm;  // (V,C), (C)
    real *dembed_tokens, *dnorm;
    Linear lm_head;  // (Vp,C)
    LlamaLayer *layers;
    // (num_layers + 1); the last has resid_attn, rstd_attn and norm_attn of the final norm
    LlamaActs *acts;
    LlamaScratch scratch;
    real *rope_table;    // (max_seqlen + 1, D/2, 2): the last row rotates nothing
    int32_t *unrotated;  // (T) position_ids of that row, for the backward of layers without RoPE
    real *loss_scale;    // device: 1 / targets of the step
    // the current micro-batch
    LlamaInputs in;
    int32_t *staging_host, *staging;
    size_t staging_ints, staged;  // capacity, at its end the rows to sample; used by a micro-batch
    Arena arenas[LLAMA_NUM_ARENAS];
};

// Elements of the rope table up to its last row
static inline size_t llama_rope_size(const LlamaModel *m) {
    return (size_t)m->settings.max_seqlen * (size_t)m->config.head_dim;
}

static inline int llama_head_bucket(const LlamaConfig *c) { return LLAMA_LAYERS + c->num_layers; }

// ---- The calls of a run, in this order ----------------------------------------------------------
// Every rank makes the same calls.

// Everything but the allocation: the table of parameters, the shard of this rank, the bytes of each
// arena.
static inline void llama_plan(LlamaModel *m, const LlamaConfig *config, LlamaSettings settings);
static inline size_t llama_memory_total(const LlamaModel *m);  // bytes of all arenas
// Allocates them. Parameter arenas are zeroed, the rest is uninitialised.
static inline bool llama_allocate(LlamaModel *m, Error *err);

// The parameters that weights.h initialises, loads and saves, with their moments: the weights, or
// the adapters where these are trained. Every rank loads; to save, all ranks send their shards to
// rank 0.
static inline Parameters llama_parameters(LlamaModel *m);

// A whole optimizer step on this rank's micro-batches; waits for it, once, at the end.
// device_timer_ms is the time of the micro-batches.
static inline StepScalars llama_train_step(LlamaModel *m, const StepData *data, AdamW hyper,
                                           float grad_clip);
// Begins a step. weight_sum: sum of |weight| of all targets on all ranks.
static inline void llama_begin_step(LlamaModel *m, double weight_sum);
// Each micro-batch takes zero_begin_micro_batch and these five calls. The batch must satisfy
// batch_is_valid, and may be reused as soon as llama_set_batch returns.
static inline void llama_set_batch(LlamaModel *m, const Batch *b);
static inline void llama_forward(LlamaModel *m);     // up to the final norm
static inline void llama_head_train(LlamaModel *m);  // losses, and the head's backward
static inline void llama_backward(LlamaModel *m);    // llama_forward's list from bottom to top
static inline void llama_add_losses(LlamaModel *m);  // to the step's losses
// Then zero_reduce, zero_update and zero_read_step end the step.

// Sum of the losses. Validation micro-batches are distributed across ranks too.
static inline double llama_validation_loss(LlamaModel *m, const StepData *data);
// The model as data/use calls it: losses, generation, gradients of single batches
static inline ModelFace llama_face(LlamaModel *m);
static inline void llama_free(LlamaModel *m);

// ---- Attention ----------------------------------------------------------------------------------
// This is the one place where a layout shows: `repad` gathers the real rows of a padded buffer
// around attention in every layer and scatters them back, as a Hugging Face model given an
// attention mask does. It exists to be compared with. Every other layout has num_real_rows = 0.
// Generation keeps keys and values: prompts attend to themselves, later tokens to the cache.

static inline void llama_attention_forward(LlamaModel *m, LlamaActs *a) {
    const LlamaInputs *in = &m->in;
    LlamaScratch *s = &m->scratch;
    const int64_t T = in->docs.total_tokens, n = in->num_real_rows;
    const int64_t q_dim = llama_q_dim(&m->config), qkv_dim = llama_qkv_dim(&m->config);
    if (in->cache_rows)
        kv_store(a->kv_cache, a->qkv, in->cache_rows, in->position_ids, T, m->heads);
    if (in->decode)
        return attention_decode(a->attn, a->qkv, a->kv_cache, in->cache_rows, in->position_ids, T,
                                m->heads);
    if (n == 0) return attention_forward(a->attn, a->lse, a->qkv, &in->docs, m->heads);
    gather_rows(s->real_qkv, a->qkv, in->real_rows, n, qkv_dim);
    attention_forward(s->real_attn, a->lse, s->real_qkv, &in->real_docs, m->heads);
    scatter_rows(a->attn, s->real_attn, in->real_rows, n, T, q_dim);
}

static inline void llama_attention_backward(LlamaModel *m, LlamaActs *a) {
    const LlamaInputs *in = &m->in;
    LlamaScratch *s = &m->scratch;
    const int64_t T = in->docs.total_tokens, n = in->num_real_rows;
    const int64_t q_dim = llama_q_dim(&m->config), qkv_dim = llama_qkv_dim(&m->config);
    const bool rope = llama_has_rope(&m->config, (int)(a - m->acts));
    const real *table = rope ? m->rope_table : m->rope_table + llama_rope_size(m);
    if (n == 0)
        return attention_backward(s->dqkv, s->attn_delta, s->attn_sums, s->dattn, a->qkv, a->attn,
                                  a->lse, rope ? in->position_ids : m->unrotated, table, &in->docs,
                                  m->heads);
    gather_rows(s->real_qkv, a->qkv, in->real_rows, n, qkv_dim);
    gather_rows(s->real_attn, a->attn, in->real_rows, n, q_dim);
    gather_rows(s->real_dattn, s->dattn, in->real_rows, n, q_dim);
    attention_backward(s->real_dqkv, s->attn_delta, NULL, s->real_dattn, s->real_qkv, s->real_attn,
                       a->lse, rope ? in->real_position_ids : m->unrotated, table, &in->real_docs,
                       m->heads);
    scatter_rows(s->dqkv, s->real_dqkv, in->real_rows, n, T, qkv_dim);
}

// ---- Forward and backward -----------------------------------------------------------------------

// Queries and keys of layer l as attention takes them, from their projections
static inline void llama_rotate(LlamaModel *m, int l) {
    const LlamaConfig *c = &m->config;
    LlamaActs *a = &m->acts[l];
    const int64_t T = m->in.docs.total_tokens;
    if (c->qk_norm)
        qk_norm_forward(a->qkv, a->proj, m->layers[l].qk_norm, c->rms_norm_eps, T, m->heads);
    if (llama_has_rope(c, l)) rope_forward(a->qkv, m->in.position_ids, m->rope_table, T, m->heads);
}

// The cheap operations of a layer, shared by forward and llama_restore_layer
static inline void llama_norm_attn(LlamaModel *m, int l) {
    LlamaActs *a = &m->acts[l];
    rmsnorm_forward(a->norm_attn, a->rstd_attn, a->resid_attn, m->layers[l].input_layernorm,
                    llama_norm_eps(&m->config), m->in.docs.total_tokens, m->config.hidden_size);
}

static inline void llama_norm_mlp(LlamaModel *m, int l) {
    LlamaActs *a = &m->acts[l];
    rmsnorm_forward(a->norm_mlp, a->rstd_mlp, a->resid_mlp, m->layers[l].post_attention_layernorm,
                    llama_norm_eps(&m->config), m->in.docs.total_tokens, m->config.hidden_size);
}

static inline void llama_activate(LlamaModel *m, int l) {
    LlamaActs *a = &m->acts[l];
    swiglu_forward(a->swiglu, a->gate_up, m->in.docs.total_tokens, m->config.intermediate_size);
}

// Computes layer l from its resid_attn up to its last matmul, which llama_forward adds.
static inline void llama_forward_layer(LlamaModel *m, int l) {
    const LlamaLayer *w = &m->layers[l];
    LlamaActs *a = &m->acts[l];
    const int64_t T = m->in.docs.total_tokens;

    llama_norm_attn(m, l);                                                // (T, C)
    linear_forward(a->proj, NULL, a->norm_attn, &w->qkv_proj, T);         // (T, QKV)
    llama_rotate(m, l);                                                   // (T, QKV)
    llama_attention_forward(m, a);                                        // (T, H*D)
    linear_forward(a->resid_mlp, a->resid_attn, a->attn, &w->o_proj, T);  // (T, C)
    llama_norm_mlp(m, l);                                                 // (T, C)
    linear_forward(a->gate_up, NULL, a->norm_mlp, &w->gate_up_proj, T);   // (T, 2F)
    llama_activate(m, l);                                                 // (T, F)
}

// Computes the activations of layer l that forward has not kept, bit for bit.
static inline void llama_restore_layer(LlamaModel *m, int l) {
    if (m->settings.recompute == LLAMA_RECOMPUTE_FULL) llama_forward_layer(m, l);
    if (m->settings.recompute != LLAMA_RECOMPUTE_ON) return;
    if (m->config.qk_norm) llama_rotate(m, l);
    llama_norm_attn(m, l);
    llama_norm_mlp(m, l);
    llama_activate(m, l);
}

// Leaves the final norm's output in norm_attn of the last LlamaActs.
static inline void llama_forward(LlamaModel *m) {
    const LlamaConfig *c = &m->config;
    const LlamaLayer *w = m->layers;
    LlamaActs *a = m->acts;
    const int64_t T = m->in.docs.total_tokens;
    const int C = c->hidden_size;

    zero_await_weights(&m->zero, LLAMA_EMBEDDING);
    embedding_forward(a->resid_attn, m->in.tokens, m->embed_tokens, T, C);  // (T, C)
    zero_await_weights(&m->zero, LLAMA_NORMS);
    for (int l = 0; l < c->num_layers; l++, w++, a++) {
        zero_await_weights(&m->zero, LLAMA_LAYERS + l);
        llama_forward_layer(m, l);
        linear_forward(a[1].resid_attn, a->resid_mlp, a->swiglu, &w->down_proj, T);  // (T, C)
    }
    rmsnorm_forward(a->norm_attn, a->rstd_attn, a->resid_attn, m->norm, llama_norm_eps(c), T, C);
    zero_await_weights(&m->zero, llama_head_bucket(c));
}

// The number of rows, of num, whose logits are computed together from row i on: the logits of a
// whole micro-batch (T,V) never exist.
static inline int64_t llama_chunk(const LlamaModel *m, int64_t i, int64_t num) {
    return num - i < m->settings.head_chunk ? num - i : m->settings.head_chunk;
}

// scratch.logits (n,Vp) =  logits of these rows, whose activations scratch.head_rows (n,C) keeps
static inline void llama_logits(LlamaModel *m, const int32_t *rows, int64_t n) {
    LlamaScratch *s = &m->scratch;
    comm_progress();
    gather_rows(s->head_rows, m->acts[m->config.num_layers].norm_attn, rows, n, m->lm_head.K);
    linear_forward(s->logits, NULL, s->head_rows, &m->lm_head, n);
}

// Computes the losses of in.head_rows, for llama_add_losses.
static inline void llama_head_eval(LlamaModel *m) {
    for (int64_t i = 0, n; i < m->in.num_head_rows; i += n) {
        n = llama_chunk(m, i, m->in.num_head_rows);
        llama_logits(m, m->in.head_rows + i, n);
        cross_entropy_forward(m->scratch.losses + i, m->scratch.logits, m->in.targets + i, n,
                              m->config.vocab_size);
    }
}

// Computes the losses and runs the head's backward while a chunk's logits exist: scratch.dnorm.
static inline void llama_head_train(LlamaModel *m) {
    LlamaScratch *s = &m->scratch;
    const LlamaInputs *in = &m->in;
    const int64_t num = in->num_head_rows, C = m->config.hidden_size, V = m->config.vocab_size;
    for (int64_t i = 0, n; i < num; i += n) {
        const float *weights = in->weights ? in->weights + i : NULL;
        const bool sum = m->zero.has_grads || i > 0;
        n = llama_chunk(m, i, num);
        llama_logits(m, in->head_rows + i, n);
        cross_entropy_forward_backward(s->losses + i, s->logits, in->targets + i, weights,
                                       m->loss_scale, n, V);
        linear_backward(s->dresid + i * C, s->logits, s->head_rows, &m->lm_head, sum, n);
    }
    scatter_rows(s->dnorm, s->dresid, in->head_rows, num, in->docs.total_tokens, C);
}

static inline void llama_add_losses(LlamaModel *m) {
    const LlamaInputs *in = &m->in;
    const LlamaScratch *s = &m->scratch;
    if (in->num_pairs) return losses_sum(m->zero.loss_sum, s->pair_losses, NULL, in->num_pairs);
    losses_sum(m->zero.loss_sum, s->losses, in->weights, in->num_head_rows);
}

// Tells the losses of documents apart, from which pairs have their losses and weights.
static inline void llama_divide_losses(LlamaModel *m) {
    const LlamaInputs *in = &m->in;
    LlamaScratch *s = &m->scratch;
    double *sums = m->zero.documents + in->first_doc;
    losses_by_document(sums, s->losses, in->runs, in->run_weights, in->doc_runs, in->num_docs);
    if (in->num_pairs)
        pairs_weigh(s->row_weights, s->pair_losses, sums, in->pairs, in->runs, in->run_weights,
                    in->doc_runs, in->num_head_rows, in->num_pairs);
}

// Starts from scratch.dnorm, which llama_head_train left.
static inline void llama_backward(LlamaModel *m) {
    const LlamaConfig *c = &m->config;
    const LlamaInputs *in = &m->in;
    LlamaScratch *s = &m->scratch;
    LlamaActs *a = &m->acts[c->num_layers];
    const int64_t T = in->docs.total_tokens, F = c->intermediate_size;
    const int C = c->hidden_size;
    const bool sum = m->zero.has_grads;  // an earlier micro-batch left gradients to add to
    if (T == 0) return;                  // no operation below would overwrite old gradients

    zero_grads_done(&m->zero, llama_head_bucket(c));
    device_zero(s->dresid, (size_t)T * (size_t)C * sizeof(floatX));
    rmsnorm_backward(s->dresid, m->dnorm, s->dnorm, a->resid_attn, m->norm, a->rstd_attn, T,
                     C);  // +=
    for (int l = c->num_layers - 1; l >= 0; l--) {
        const LlamaLayer *w = &m->layers[l];
        a = &m->acts[l];
        llama_restore_layer(m, l);
        linear_backward(s->dswiglu, s->dresid, a->swiglu, &w->down_proj, sum, T);       // = and +=
        swiglu_backward(s->dgate_up, s->dswiglu, a->gate_up, T, F);                     // =
        linear_backward(s->dnorm, s->dgate_up, a->norm_mlp, &w->gate_up_proj, sum, T);  // = and +=
        rmsnorm_backward(s->dresid, w->dpost_attention_layernorm, s->dnorm, a->resid_mlp,
                         w->post_attention_layernorm, a->rstd_mlp, T, C);   // +=
        linear_backward(s->dattn, s->dresid, a->attn, &w->o_proj, sum, T);  // = and +=
        llama_attention_backward(m, a);                                     // = and rope's
        if (c->qk_norm)
            qk_norm_backward(s->dqkv, w->dqk_norm, a->proj, w->qk_norm, c->rms_norm_eps, T,
                             m->heads);
        linear_backward(s->dnorm, s->dqkv, a->norm_attn, &w->qkv_proj, sum, T);  // = and +=
        rmsnorm_backward(s->dresid, w->dinput_layernorm, s->dnorm, a->resid_attn,
                         w->input_layernorm, a->rstd_attn, T, C);  // +=
        zero_grads_done(&m->zero, LLAMA_LAYERS + l);
    }
    zero_grads_done(&m->zero, LLAMA_NORMS);
    embedding_backward(m->dembed_tokens, s->dresid, in->tokens, in->token_order, T, C);  // +=
    zero_grads_done(&m->zero, LLAMA_EMBEDDING);
}

// ---- The micro-batch: one copy to the device carries all that kernels need to know about it -----

_Static_assert((int)SHARED_TILE_TOKENS == SHARED_TILE, "one tile for batches and kernels");

static inline int32_t *llama_stage(LlamaModel *m, const int32_t *src_host, int32_t n) {
    const size_t at = m->staged;
    if (src_host && n) memcpy(m->staging_host + at, src_host, (size_t)n * sizeof(int32_t));
    m->staged += (size_t)n;
    return m->staging + at;
}

// The values of n rows, of 4 bytes each
static inline void *llama_stage_rows(LlamaModel *m, const void *src_host, const int32_t *rows_host,
                                     int32_t n) {
    for (int32_t i = 0; i < n; i++)
        memcpy(m->staging_host + m->staged + i, (const int32_t *)src_host + rows_host[i], 4);
    return llama_stage(m, NULL, n);
}

static inline void llama_stage_documents(LlamaModel *m, VarlenInfo *docs, const int32_t *cu_seqlens,
                                         const int32_t *shared_first, const int32_t *shared_len,
                                         int32_t num_segments, int32_t max_seqlen) {
    docs->cu_seqlens = llama_stage(m, cu_seqlens, num_segments + 1);
    docs->shared_first = shared_len ? llama_stage(m, shared_first, num_segments) : NULL;
    docs->shared_len = shared_len ? llama_stage(m, shared_len, num_segments) : NULL;
    docs->work = m->staging + m->staged;
    docs->num_segments = num_segments;
    docs->max_seqlen = max_seqlen;
    docs->total_tokens = cu_seqlens[num_segments];
    m->staged += attention_work_list(m->staging_host + m->staged, cu_seqlens, shared_first,
                                     shared_len, num_segments, m->heads);
    assert(m->staged <= m->staging_ints);
}

static inline void llama_set_batch(LlamaModel *m, const Batch *b) {
    LlamaInputs *in = &m->in;
    m->staged = 0;
    assert(b->total_tokens <= m->settings.micro_batch_tokens);
    assert(b->max_seqlen <= m->settings.max_seqlen);  // positions of the rope table
    assert(b->num_real_rows == 0 || m->settings.layouts & 1u << LAYOUT_REPAD);
    const bool cached = b->layout == LAYOUT_CACHED, shared = !cached && b->num_shared > 0;
    assert(!shared || !m->settings.train || m->settings.layouts & 1u << LAYOUT_SHARED);
    assert(!cached || m->settings.cache_tokens >= b->micro_batch_tokens);
    in->tokens = llama_stage(m, b->tokens, b->total_tokens);
    in->position_ids = llama_stage(m, b->position_ids, b->total_tokens);
    in->token_order = llama_stage(m, b->token_order, b->total_tokens);
    in->cache_rows = cached ? llama_stage(m, b->cache_rows, b->total_tokens) : NULL;
    in->decode = cached && b->num_shared > 0;
    in->num_head_rows = b->num_head_rows;
    in->head_rows = llama_stage(m, b->head_rows, b->num_head_rows);
    in->targets = llama_stage_rows(m, b->targets, b->head_rows, b->num_head_rows);
    in->weights =
        b->weighted ? llama_stage_rows(m, b->weights, b->head_rows, b->num_head_rows) : NULL;
    const int32_t num_runs = m->settings.ranks.most_documents > 0 ? b->num_runs : 0;
    in->first_doc = b->first_doc;
    in->num_docs = num_runs > 0 ? b->num_docs : 0;
    in->doc_runs = llama_stage(m, b->doc_runs, in->num_docs + 1);
    in->runs = llama_stage(m, b->runs, 2 * num_runs);
    in->run_weights = (float *)llama_stage(m, (int32_t *)b->run_weights, num_runs);
    in->num_pairs = b->num_pairs;
    if (b->num_pairs) in->weights = m->scratch.row_weights, m->staged += m->staged % 2;  // 8 bytes
    in->pairs = (PairTerms *)llama_stage(m, (int32_t *)b->pairs,
                                         b->num_pairs * (int32_t)(sizeof(PairTerms) / 4));
    llama_stage_documents(m, &in->docs, b->cu_seqlens, shared ? b->shared_first : NULL,
                          shared ? b->shared_len : NULL, b->num_segments, b->max_seqlen);
    in->num_real_rows = b->num_real_rows;
    if (b->num_real_rows) {
        in->real_rows = llama_stage(m, b->real_rows, b->num_real_rows);
        in->real_position_ids =
            llama_stage_rows(m, b->position_ids, b->real_rows, b->num_real_rows);
        llama_stage_documents(m, &in->real_docs, b->real_cu_seqlens, NULL, NULL,
                              b->num_real_segments, b->real_max_seqlen);
    }
    device_upload(m->staging, m->staging_host, m->staged * sizeof(int32_t));
}

// ---- The step around micro-batches --------------------------------------------------------------

// The loss of a step is the mean over its targets, wherever they were packed:
//
//   micro-batch 0   a long document        1,000 targets   sum of losses s0
//   micro-batch 1   a few short answers       50 targets   sum of losses s1
//   the step                               1,050 targets   loss = (s0 + s1) / 1,050
//
// With a mean for each micro-batch, averaged afterwards, a target of the answers would weigh 20
// times as much, and the result would depend on the packing. So gradients are sums, and the one
// division happens where they begin, at the loss, by the targets of all micro-batches and ranks.
static inline void llama_begin_step(LlamaModel *m, double weight_sum) {
    const real loss_scale = (real)1 / (real)weight_sum;
    assert(weight_sum > 0 && m->settings.train);
    device_upload(m->loss_scale, &loss_scale, sizeof loss_scale);
    zero_begin_step(&m->zero);
}

// out (n,V) on the host =  scratch.logits (n,Vp)
static inline void llama_logits_to_host(LlamaModel *m, float *out, int64_t n) {
    const int64_t V = m->config.vocab_size;
    for (int64_t i = 0; i < n; i++)
        activations_to_host(out + i * V, m->scratch.logits + i * padded_vocab(V), (size_t)V);
}

// losses (T) and logits (T,V) are overwritten, if not NULL. train: adds to the step's gradients.
static inline void llama_pass(LlamaModel *m, const Batch *b, bool train, float *losses,
                              float *logits) {
    const int64_t T = b->total_tokens, C = m->config.hidden_size, V = m->config.vocab_size;
    const floatX *norm = m->acts[m->config.num_layers].norm_attn;
    if (train) comm_phase("forward", -1);
    llama_set_batch(m, b);
    llama_forward(m);
    for (int64_t t = 0, n; t < T && logits; t += n) {
        n = llama_chunk(m, t, T);
        comm_progress();
        linear_forward(m->scratch.logits, NULL, norm + t * C, &m->lm_head, n);
        llama_logits_to_host(m, logits + t * V, n);
    }
    (train && !m->in.num_pairs ? llama_head_train : llama_head_eval)(m);
    llama_divide_losses(m);
    if (train && m->in.num_pairs) llama_head_train(m);
    if (losses) {
        device_download(losses, m->scratch.losses, (size_t)b->num_head_rows * sizeof(real));
        batch_spread_losses(b, losses);
    }
    if (train) comm_phase("backward", -1);
    if (train) llama_backward(m);
}

static inline StepScalars llama_train_step(LlamaModel *m, const StepData *data, AdamW hyper,
                                           float grad_clip) {
    comm_phase("forward", hyper.t);
    m->zero.num_documents = data->plan.num_segments;
    llama_begin_step(m, data->plan.weight_sum);
    device_timer_start();
    for (int32_t i = 0; i < data->num_micro; i++) {
        zero_begin_micro_batch(&m->zero, data->own_micros[i], data->plan.num_micro,
                               i + 1 == data->num_micro);
        llama_pass(m, &data->micro[i], true, NULL, NULL);
        llama_add_losses(m);
    }
    device_timer_stop();
    comm_phase("reduce", -1);
    zero_reduce(&m->zero);
    comm_phase("update", -1);
    zero_update(&m->zero, hyper, grad_clip);
    return zero_read_step(&m->zero);
}

// Each micro-batch has its own partial sum, so that the result is the same on any number of ranks.
static inline double llama_validation_loss(LlamaModel *m, const StepData *data) {
    zero_begin_losses(&m->zero, data->plan.num_segments);
    for (int32_t i = 0; i < data->num_micro; i++) {
        comm_phase("validate", -1);
        zero_select_losses(&m->zero, data->own_micros[i]);
        llama_pass(m, &data->micro[i], false, NULL, NULL);
        llama_add_losses(m);
    }
    zero_sum_losses(&m->zero);
    return zero_read_step(&m->zero).loss_sum;
}

static inline void llama_next_logits(LlamaModel *m, const Batch *b, const int32_t *rows_host,
                                     int32_t n, float *logits_host) {
    // after the batch in the staging buffer
    int32_t *rows = m->staging + m->staging_ints - m->settings.micro_batch_tokens;
    assert(n <= m->settings.head_chunk);
    llama_set_batch(m, b);
    llama_forward(m);
    device_upload(rows, rows_host, (size_t)n * sizeof(int32_t));
    llama_logits(m, rows, n);
    llama_logits_to_host(m, logits_host, n);
}

static inline const double *llama_document_losses(LlamaModel *m, const StepData *data) {
    llama_validation_loss(m, data);
    return zero_documents(&m->zero);
}

static inline void llama_get_grads(LlamaModel *m, float *grads, size_t first, size_t n) {
    comm_progress();
    device_download(grads, m->grads + first, n * sizeof(real));
}

static inline ModelFace llama_face(LlamaModel *m) {
    return (ModelFace){.model = m,
                       .rank = comm_rank(),
                       .num_ranks = comm_num_ranks(),
                       .vocab_size = m->config.vocab_size,
                       .text_ends = &m->config.eos,
                       .cache_tokens = m->settings.cache_tokens,
                       .max_rows = m->settings.head_chunk,
                       .num_grads = m->num_elements,
                       .next_logits = llama_next_logits,
                       .begin_step = llama_begin_step,
                       .pass = llama_pass,
                       .document_losses = llama_document_losses,
                       .get_grads = llama_get_grads,
                       .gather = comm_all_gather_host};
}

// ---- Parameters: one table ----------------------------------------------------------------------

enum { LLAMA_ALIGN = 64 };  // elements: 128 bytes in bf16, 256 in fp32

static inline void llama_align(LlamaModel *m) {
    m->num_weights = (m->num_weights + LLAMA_ALIGN - 1) / LLAMA_ALIGN * LLAMA_ALIGN;
}

enum { NO_LAYER = -1, INIT_ONES = 0, INIT_ZEROS = -1 };  // INIT_ZEROS: a bias

#define LLAMA_NF4 ((size_t)1 << 62)  // where offsets of parameters in NF4 begin; they have no view

// Places the next parameter of the table, whose name and shape are set. *weight and *grad point to
// it where the arenas exist; weight NULL: it extends the view of the parameter before it, without a
// gap. Frozen weights have no gradient.
static inline void llama_place(LlamaModel *m, bool nf4, floatX **weight, real **grad) {
    Parameter *t = &m->tensors[m->num_tensors++];
    if (weight) llama_align(m);
    t->offset = nf4 ? LLAMA_NF4 + m->num_nf4 : m->num_weights;
    t->count = (size_t)((t->rows + t->pad_rows) * ((t->cols ? t->cols : 1) + t->pad_cols));
    t->decay = t->cols != 0;
    *(nf4 ? &m->num_nf4 : &m->num_weights) += t->count;
    if (weight && m->weights && !nf4) *weight = m->weights + t->offset;
    if (weight && m->grads) *grad = t->offset < m->num_elements ? m->grads + t->offset : NULL;
}

static inline void llama_tensor(LlamaModel *m, floatX **weight, real **grad, int layer,
                                const char *name, int64_t rows, int64_t cols, float init_std) {
    Parameter *t = &m->tensors[m->num_tensors];
    const char *kind = init_std == INIT_ZEROS ? "bias" : "weight";
    const bool matrix = layer != NO_LAYER && cols;
    if (layer == NO_LAYER)
        snprintf(t->name, sizeof t->name, "%s.%s", name, kind);
    else
        snprintf(t->name, sizeof t->name, "model.layers.%d.%s.%s", layer, name, kind);
    t->rows = rows;
    t->cols = cols;
    t->moments = m->settings.muon && matrix ? 1 : 2;
    t->init_std = init_std;
    llama_place(m, matrix && m->settings.lora.nf4, weight, grad);
}

// The Linear of layer l that LINEAR_QKV ... names
static inline Linear *llama_linear(LlamaModel *m, int l, int linear) {
    LlamaLayer *w = &m->layers[l];
    Linear *const all[NUM_LINEARS] = {&w->qkv_proj, &w->o_proj, &w->gate_up_proj, &w->down_proj};
    return all[linear];
}

// Adds rows to a Linear, which is empty at first: k_proj extends q_proj's.
static inline void llama_matrix(LlamaModel *m, int l, const LayerMatrix *x, float init_std) {
    Linear *linear = llama_linear(m, l, x->linear);
    const bool first = linear->N == 0;
    if (first && m->nf4.codes) linear->nf4 = nf4_at(m->nf4, m->num_nf4);
    llama_tensor(m, first ? &linear->weight : NULL, &linear->dweight, l, x->name, x->rows, x->cols,
                 init_std);
    linear->K = x->cols;
    linear->N += x->rows;
}

// Places the adapters of layer l: for each Linear all A, then all B.
static inline void llama_add_adapters(LlamaModel *m, int l) {
    const LoraConfig *c = &m->settings.lora;
    for (int i = 0; i < NUM_LINEARS; i++) {
        Linear *linear = llama_linear(m, l, i);
        Lora *a = &linear->lora;
        *a = (Lora){.rank = lora_padded_rank(c),
                    .scale = lora_scale(c) * (linear->scale ? linear->scale : 1),
                    .h = m->scratch.lora_h,
                    .dh = m->scratch.lora_dh};
        a->num = lora_linear_parameters(m->tensors + m->num_tensors, a->column, a->rows, c,
                                        &m->config, l, i);
        for (int i = 0; i < a->num; i++) llama_place(m, false, i == 0 ? &a->A : NULL, &a->dA);
        for (int i = 0; i < a->num; i++) llama_place(m, false, i == 0 ? &a->B : NULL, &a->dB);
    }
}

enum { LLAMA_LAYER_VECTORS = 7 };  // at most

// Fills the table in arena order: adapters, if any (then nothing else is trained); matrices layer
// by layer; then all vectors, so that weight decay is one range. Residual projections start
// smaller by 1/sqrt(2 L), so that the residual stream's variance does not grow with depth. Planning
// fills the table; after the allocation a second call sets the views.
static inline void llama_build_tensors(LlamaModel *m) {
    const LlamaConfig *c = &m->config;
    const int64_t C = c->hidden_size, D = c->head_dim, V = c->vocab_size;
    const float std = c->initializer_range, resid_std = std / sqrtf(2.0f * (float)c->num_layers);
    const bool lora = m->settings.lora.rank > 0;
    const size_t padding = (size_t)((padded_vocab(V) - V) * C);  // rows of the head: always zeros
    LayerMatrix matrices[LAYER_MATRICES];
    llama_layer_matrices(matrices, c);
    memset(m->layers, 0, (size_t)c->num_layers * sizeof(LlamaLayer));
    for (LlamaLayer *w = m->layers; w < m->layers + c->num_layers; w++)
        w->o_proj.scale = w->down_proj.scale = llama_residual_scale(c);
    m->num_tensors = 0, m->num_weights = m->num_nf4 = 0;
    for (int l = 0; l < c->num_layers && lora; l++) llama_add_adapters(m, l);
    llama_align(m);
    const int adapters = m->num_tensors;
    const size_t adapter_elements = m->num_weights;
    llama_tensor(m, &m->embed_tokens, &m->dembed_tokens, NO_LAYER, "model.embed_tokens", V, C, std);
    m->num_weights += padding;
    for (int l = 0; l < c->num_layers; l++)
        for (const LayerMatrix *x = matrices; x < matrices + LAYER_MATRICES; x++)
            if (x->name)
                llama_matrix(m, l, x,
                             x->linear == LINEAR_O || x->linear == LINEAR_DOWN ? resid_std : std);
    m->layer_matrices = (lora ? adapters : m->num_tensors - 1) / c->num_layers;
    m->lm_head = (Linear){.K = C, .N = padded_vocab(V), .scale = llama_logit_scale(c)};
    m->lm_head.weight = m->embed_tokens;  // tied: both gradients are summed into one
    m->lm_head.dweight = m->dembed_tokens;
    if (!c->tie_word_embeddings) {
        llama_tensor(m, &m->lm_head.weight, &m->lm_head.dweight, NO_LAYER, "lm_head", V, C, std);
        m->num_weights += padding;
    }
    llama_align(m);
    m->num_decayed = lora ? adapter_elements : m->num_weights;
    for (int l = 0; l < c->num_layers; l++) {
        LlamaLayer *w = &m->layers[l];
        llama_tensor(m, &w->input_layernorm, &w->dinput_layernorm, l, "input_layernorm", C, 0,
                     INIT_ONES);
        llama_tensor(m, &w->post_attention_layernorm, &w->dpost_attention_layernorm, l,
                     "post_attention_layernorm", C, 0, INIT_ONES);
        if (c->qk_norm) {
            llama_tensor(m, &w->qk_norm, &w->dqk_norm, l, "self_attn.q_norm", D, 0, INIT_ONES);
            llama_tensor(m, NULL, NULL, l, "self_attn.k_norm", D, 0, INIT_ONES);
        }
        for (const LayerMatrix *x = matrices; c->qkv_bias && x->linear == LINEAR_QKV; x++)
            llama_tensor(m, x == matrices ? &w->qkv_proj.bias : NULL, &w->qkv_proj.dbias, l,
                         x->name, x->rows, 0, INIT_ZEROS);
    }
    llama_tensor(m, &m->norm, &m->dnorm, NO_LAYER, "model.norm", C, 0, INIT_ONES);
    llama_align(m);
    m->num_trained = lora ? adapters : m->num_tensors;
    m->num_elements = lora ? adapter_elements : m->num_weights;
}

// ---- Memory: one table of buffers, which first measures each arena and then carves it -----------

// A row of the table: a buffer of count_ elements in an arena, where the condition holds
#define LLAMA_BUFFER(arena_, pointer_, count_, exists_) \
    ARENA_BUFFER(&m->arenas[arena_], pointer_, count_, exists_)

// Sets the bytes of every arena and, where it is allocated, the pointers into it.
static inline void llama_carve(LlamaModel *m) {
    const LlamaConfig *c = &m->config;
    const size_t T = (size_t)m->settings.micro_batch_tokens, C = (size_t)c->hidden_size,
                 F = (size_t)c->intermediate_size, H = (size_t)c->num_heads;
    const size_t q_dim = (size_t)llama_q_dim(c), qkv_dim = (size_t)llama_qkv_dim(c);
    const size_t Vp = (size_t)padded_vocab(c->vocab_size), chunk = (size_t)m->settings.head_chunk;
    const size_t rank = (size_t)lora_padded_rank(&m->settings.lora), logits = chunk * Vp,
                 matrix = m->num_nf4 ? (2 * F > qkv_dim ? 2 * F : qkv_dim) * C : 0;
    const bool train = m->settings.train, repad = m->settings.layouts & 1u << LAYOUT_REPAD;
    LlamaScratch *s = &m->scratch;
    for (int i = 0; i < LLAMA_NUM_ARENAS; i++) m->arenas[i].bytes = 0;

    LLAMA_BUFFER(LLAMA_WEIGHTS, m->weights, m->num_weights, true);
    LLAMA_BUFFER(LLAMA_WEIGHTS, m->nf4.codes, m->num_nf4 / 2, m->num_nf4 > 0);
    LLAMA_BUFFER(LLAMA_WEIGHTS, m->nf4.absmax, m->num_nf4 / NF4_BLOCK, m->num_nf4 > 0);
    LLAMA_BUFFER(LLAMA_GRADS, m->grads, m->num_elements, train);
    zero_carve(&m->zero, m->weights, m->grads, m->arenas + LLAMA_WEIGHTS, m->arenas + LLAMA_GRADS,
               m->arenas + LLAMA_OPTIMIZER, m->arenas + LLAMA_WORKSPACE);

    for (int l = 0; l <= c->num_layers; l++) {
        LlamaActs *a = &m->acts[l];
        const bool layer = l < c->num_layers, first = l == 0;
        const bool resid = first || train,
                   most = first || (train && m->settings.recompute < LLAMA_RECOMPUTE_FULL),
                   all = first || (train && m->settings.recompute == LLAMA_RECOMPUTE_OFF);
        if (l > 0) *a = m->acts[0];  // shares all buffers but the ones below
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->resid_attn, T * C, resid);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->rstd_attn, T, most);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->norm_attn, T * C, all);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->proj, T * qkv_dim, layer && most);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->qkv, T * qkv_dim, layer && all && c->qk_norm);
        if (!c->qk_norm) a->qkv = a->proj;
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->attn, T * q_dim, layer && most);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->lse, H * T, layer && most);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->resid_mlp, T * C, layer && most);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->rstd_mlp, T, layer && most);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->norm_mlp, T * C, layer && all);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->gate_up, T * 2 * F, layer && most);
        LLAMA_BUFFER(LLAMA_ACTIVATIONS, a->swiglu, T * F, layer && all);
        LLAMA_BUFFER(LLAMA_WORKSPACE, a->kv_cache,
                     (size_t)m->settings.cache_tokens * (qkv_dim - q_dim),
                     layer && m->settings.cache_tokens);
    }
    LLAMA_BUFFER(LLAMA_ACTIVATIONS, s->losses, T, true);
    LLAMA_BUFFER(LLAMA_ACTIVATIONS, s->pair_losses, T / 2, m->settings.pairs);
    LLAMA_BUFFER(LLAMA_ACTIVATIONS, s->row_weights, T, m->settings.pairs);

    LLAMA_BUFFER(LLAMA_WORKSPACE, m->loss_scale, 1, true);
    LLAMA_BUFFER(LLAMA_WORKSPACE, m->staging, m->staging_ints, true);
    LLAMA_BUFFER(LLAMA_WORKSPACE, m->rope_table, llama_rope_size(m) + (size_t)c->head_dim, true);
    LLAMA_BUFFER(LLAMA_WORKSPACE, m->unrotated, T, c->no_rope_interval > 0);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->logits, logits > matrix ? logits : matrix, true);
    m->nf4.values = s->logits;  // they are never needed at the same time
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->head_rows, chunk * C, true);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->dresid, T * C, train);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->dnorm, T * C, train);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->dqkv, T * qkv_dim, train);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->dattn, T * q_dim, train);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->dgate_up, T * 2 * F, train);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->dswiglu, T * F, train);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->attn_delta, H * T, train);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->attn_sums, attention_sums_size((int64_t)T, c->head_dim),
                 train && m->settings.layouts & 1u << LAYOUT_SHARED);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->real_qkv, T * qkv_dim, repad);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->real_attn, T * q_dim, repad);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->real_dattn, T * q_dim, repad);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->real_dqkv, T * qkv_dim, repad);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->lora_h, T * LORA_MOST * rank, rank > 0);
    LLAMA_BUFFER(LLAMA_WORKSPACE, s->lora_dh, T * LORA_MOST * rank, rank > 0 && train);
}

// The logits of one chunk take about 192 MiB: the head's weights and their gradient pass through
// memory once a chunk, which 1,024 tokens of a 49,152 vocabulary pay for (at 256 this costs 13 % of
// the head's time on two CPU cores). On a GPU (bf16) they take 1056 MiB, or 352 if layers are in
// NF4, in multiples of 11 row tiles of 128: with 12 column tiles, or 44 row tiles with 3, they fill
// 132 SMs.
static inline int32_t llama_head_chunk(const LlamaConfig *c, const LlamaSettings *s) {
    const bool gpu = sizeof(floatX) == 2;
    const int64_t tokens = gpu ? 11 * 128 : 128, mib = !gpu ? 192 : s->lora.nf4 ? 352 : 1056;
    int64_t chunk = (mib << 20) / ((int64_t)sizeof(floatX) * c->vocab_size) / tokens * tokens;
    if (chunk < tokens) chunk = tokens;
    if (s->head_chunk > 0) chunk = s->head_chunk;
    return chunk < s->micro_batch_tokens ? (int32_t)chunk : s->micro_batch_tokens;
}

// The offset of the first trained matrix of layer l. For l = num_layers: where the head begins
// (empty if tied or frozen).
static inline size_t llama_layer_offset(const LlamaModel *m, int l) {
    const int first = m->settings.lora.rank ? 0 : 1;  // after the embedding
    return m->tensors[first + m->layer_matrices * l].offset;
}

// How ranks divide the elements: the matrices that Muon updates, and the buckets that are sent.
static inline ZeroShape llama_zero_shape(const LlamaModel *m) {
    const LlamaConfig *c = &m->config;
    const int L = c->num_layers;
    const bool separate = !c->tie_word_embeddings && m->num_trained == m->num_tensors;
    ZeroShape s = {.train = m->settings.train,
                   .num_elements = m->num_elements,
                   .num_decayed = m->num_decayed,
                   .num_added = separate ? m->tensors[0].count : 0,
                   .num_kinds = m->settings.muon ? m->layer_matrices : 0,
                   .num_buckets = LLAMA_LAYERS + L + 1};
    s.matrices = host_calloc((size_t)m->num_tensors, sizeof(ZeroMatrix), "matrices");
    s.buckets = host_calloc((size_t)s.num_buckets, sizeof(ZeroBucket), "buckets");
    for (const Parameter *t = m->tensors; t < m->tensors + m->num_tensors; t++)
        if (t->moments == 1)
            s.matrices[s.num_matrices++] = (ZeroMatrix){t->offset, t->rows, t->cols};
    s.buckets[LLAMA_EMBEDDING].last = llama_layer_offset(m, 0);
    s.buckets[LLAMA_NORMS] = (ZeroBucket){.first = m->num_decayed, .last = m->num_elements};
    for (int l = 0; l <= L; l++)
        s.buckets[LLAMA_LAYERS + l] =
            (ZeroBucket){.first = llama_layer_offset(m, l),
                         .last = l < L ? llama_layer_offset(m, l + 1) : m->num_decayed};
    return s;
}

static inline void llama_plan(LlamaModel *m, const LlamaConfig *config, LlamaSettings settings) {
    const size_t layers = (size_t)config->num_layers, T = (size_t)settings.micro_batch_tokens;
    const size_t work_ints = attention_work_list_size((int64_t)T, (int64_t)T);
    const size_t docs = (size_t)settings.ranks.most_documents;  // shared: as many runs, else T
    assert(T > 0 && settings.max_seqlen > 0);
    *m = (LlamaModel){.config = *config, .settings = settings};
    m->heads = (HeadShape){.num_heads = config->num_heads,
                           .num_kv_heads = config->num_kv_heads,
                           .head_dim = config->head_dim};
    m->settings.head_chunk = llama_head_chunk(config, &settings);
    if (settings.io_chunk == 0) m->settings.io_chunk = 1 << 20;
    m->staging_ints = (settings.cache_tokens ? 8 : 7) * T + 3 * (T + 1) + work_ints +
                      (settings.layouts & 1u << LAYOUT_REPAD ? 3 * T + 1 + work_ints : 0) +
                      (docs ? 3 * (settings.layouts & 1u << LAYOUT_SHARED ? docs : T) + T + 1 : 1) +
                      (settings.pairs ? T / 2 * sizeof(PairTerms) / 4 + 1 : 0);
    m->layers = host_calloc(layers, sizeof(LlamaLayer), "layers");
    m->acts = host_calloc(layers + 1, sizeof(LlamaActs), "layers");
    m->tensors = host_calloc((LAYER_MATRICES + LLAMA_LAYER_VECTORS + 2 * LORA_TARGETS) * layers + 3,
                             sizeof(Parameter), "tensors");
    llama_build_tensors(m);
    zero_plan(&m->zero, settings.ranks, llama_zero_shape(m));
    llama_carve(m);
}

static inline size_t llama_memory_total(const LlamaModel *m) {
    size_t bytes = 0;
    for (int i = 0; i < LLAMA_NUM_ARENAS; i++) bytes += m->arenas[i].bytes;
    return bytes;
}

static inline void llama_free(LlamaModel *m) {
    for (int i = 0; i < LLAMA_NUM_ARENAS; i++) device_free(m->arenas[i].base);
    free(m->tensors);
    free(m->layers);
    free(m->acts);
    free(m->staging_host);
    zero_free(&m->zero);
    *m = (LlamaModel){0};
}

static inline void llama_fill_rope_table(LlamaModel *m) {
    const size_t count = llama_rope_size(m) + (size_t)m->config.head_dim;
    real *table = host_calloc(count, sizeof(real), "rope table");
    double *turns = rope_turns(&m->config, m->settings.max_seqlen);
    for (size_t i = 0; i < count; i++) table[i] = (real)turns[i];
    device_upload(m->rope_table, table, count * sizeof(real));
    free(turns);
    free(table);
}

static inline bool llama_allocate(LlamaModel *m, Error *err) {
    const size_t planned = llama_memory_total(m);
    for (int i = 0; i < LLAMA_NUM_ARENAS; i++) {
        Arena *a = &m->arenas[i];
        if (a->bytes == 0) continue;  // without training
        a->base = device_malloc(a->bytes);
        if (!a->base)
            return error_set(
                err, device_memory_code(),
                "close other programs, lower --micro-batch-tokens, or choose a smaller model",
                "memory: %zu MiB for %s refused", a->bytes >> 20, llama_arena_names[i]);
        if (i <= LLAMA_OPTIMIZER) device_zero(a->base, a->bytes);
    }
    llama_carve(m);
    assert(llama_memory_total(m) == planned);
    llama_build_tensors(m);
    m->staging_host = host_calloc(m->staging_ints, sizeof(int32_t), "batch staging");
    llama_fill_rope_table(m);
    if (m->unrotated)
        device_zero(m->unrotated, (size_t)m->settings.micro_batch_tokens * sizeof(int32_t));
    return true;
}

// ---- Weights and moments from and to files, as fp32 ---------------------------------------------

static inline void llama_put(void *model, ParameterArena arena, size_t offset, const float *values,
                             size_t n) {
    LlamaModel *m = model;
    comm_progress();
    if (offset >= m->num_elements)
        m->frozen_crc = crc32c(m->frozen_crc, values, n * sizeof *values);
    if (offset >= LLAMA_NF4) return nf4_put(m->nf4, offset - LLAMA_NF4, values, n);
    zero_put(&m->zero, (ZeroArray)arena, offset, values, n);
}

static inline void llama_get(void *model, ParameterArena arena, size_t offset, float *values,
                             size_t n) {
    zero_get(&((LlamaModel *)model)->zero, (ZeroArray)arena, offset, values, n);
}

static inline Parameters llama_parameters(LlamaModel *m) {
    const char *file = m->settings.lora.rank > 0 ? "adapter_model.safetensors" : NULL;
    return (Parameters){
        m->tensors, m->num_trained, m->config.tie_word_embeddings, file, m->settings.io_chunk, m,
        llama_put,  llama_get};
}

static inline Parameters llama_frozen_parameters(LlamaModel *m) {
    Parameters p = llama_parameters(m);
    p.list += m->num_trained;
    p.num = m->num_tensors - m->num_trained;
    p.file = NULL;
    return p;
}

// True if `dir` holds these parameters, and `base` the frozen ones. dir NULL: they are random.
static inline bool llama_check(LlamaModel *m, const char *dir, const char *base, Error *err) {
    return (m->num_trained == m->num_tensors ||
            weights_check(llama_frozen_parameters(m), base, err)) &&
           (!dir || weights_check(llama_parameters(m), dir, err));
}
