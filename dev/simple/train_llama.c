// unpad.c in one sitting: trains a small Llama on documents of any length, without padding.
// Plain C11 and libm, straight loops, nothing done for speed. Read it from top to bottom.
//
//     make simple && build/simple       or: cc -O2 dev/simple/train_llama.c -lm && ./a.out
//
// The usual batch is a rectangle: one row per document, short rows filled with padding that every
// layer computes on. Here the documents are packed once, end to end, into a single row of tokens:
//
//     padded             packed                                       token  attends to
//
//     the cat sat        tokens      the cat sat  go home  hi         the    *
//     go  home .         positions    0   1   2    0   1    0         cat    * *
//     hi  .    .         targets     cat sat  -  home  -    -         sat    * * *
//                        cu_seqlens   0            3        5  6      go           *
//                                                                     home         * *
//                                                                     hi               *
//
// cu_seqlens (cumulative sequence lengths) is all that tells the documents apart, and only two
// operations read it: rope, because positions restart in each document, and attention, because a
// token attends to its own document only. The others treat each token by itself. So every document
// has the loss and the gradients that it would have alone: main shows that, then trains.
//
// Letters: T total_tokens, C hidden_size, F intermediate_size, V vocab_size, H num_heads,
// Hkv num_kv_heads, D head_dim, QKV (H + 2 Hkv) D. Arrays are row-major. The prefix d means
// gradient of the loss; every backward adds to its gradients (+=).
#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef double real;  // or float

// Every array has room for this much; a smaller model uses the front.
enum { MAX_LAYERS = 2, MAX_HIDDEN = 48, MAX_MLP = 128, MAX_VOCAB = 256, MAX_HEADS = 6 };
enum { MAX_TOKENS = 256, MAX_DOCS = 16, MAX_QKV = 384 };

typedef struct {
    long vocab_size, hidden_size, intermediate_size, num_layers;
    long num_heads, num_kv_heads, head_dim;  // num_heads % num_kv_heads == 0, head_dim even
    double rms_norm_eps, rope_theta;
    bool tie_word_embeddings;  // lm_head is embed_tokens
} Config;

typedef struct {
    long total_tokens, num_docs, num_targets;  // the loss is a sum, divided by num_targets
    int tokens[MAX_TOKENS];
    int targets[MAX_TOKENS];       // the next token of the same document, or -1
    int cu_seqlens[MAX_DOCS + 1];  // document d is tokens cu_seqlens[d] to cu_seqlens[d + 1] - 1
} Batch;

// ---- Three helpers, then the operations, each forward followed by its backward ------------------

static real dot(const real *a, const real *b, long n) {
    real sum = 0;
    for (long i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// y += scale * x
static void add_scaled(real *y, real scale, const real *x, long n) {
    for (long i = 0; i < n; i++) y[i] += scale * x[i];
}

// x = exp(x) / sum(exp(x)); the largest x is subtracted first, so that exp cannot overflow
static void softmax(real *x, long n) {
    real max = x[0], sum = 0;
    for (long i = 1; i < n; i++) max = x[i] > max ? x[i] : max;
    for (long i = 0; i < n; i++) x[i] = exp(x[i] - max);
    for (long i = 0; i < n; i++) sum += x[i];
    for (long i = 0; i < n; i++) x[i] /= sum;
}

// out (T, C) = the rows of weight (V, C) that the tokens select
static void embedding_forward(real *out, const int *tokens, const real *weight, long T, long C) {
    for (long t = 0; t < T; t++) memcpy(out + t * C, weight + tokens[t] * C, C * sizeof(real));
}

static void embedding_backward(real *dweight, const real *dout, const int *tokens, long T, long C) {
    for (long t = 0; t < T; t++) add_scaled(dweight + tokens[t] * C, 1, dout + t * C, C);
}

// out (T, N) = inp (T, K) weight (N, K)^T
static void matmul_forward(real *out, const real *inp, const real *weight, long T, long K, long N) {
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) out[t * N + n] = dot(inp + t * K, weight + n * K, K);
}

static void matmul_backward(real *dinp, real *dweight, const real *dout, const real *inp,
                            const real *weight, long T, long K, long N) {
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            add_scaled(dinp + t * K, dout[t * N + n], weight + n * K, K);
            add_scaled(dweight + n * K, dout[t * N + n], inp + t * K, K);
        }
}

// out (T, C) = r x w, where r = 1 / sqrt(mean(x^2) + eps) of each row of x (T, C)
static void rmsnorm_forward(real *out, const real *x, const real *w, real eps, long T, long C) {
    for (long t = 0; t < T; t++, out += C, x += C) {
        const real r = 1 / sqrt(dot(x, x, C) / C + eps);
        for (long c = 0; c < C; c++) out[c] = r * x[c] * w[c];
    }
}

// The second term of dx comes through r: dr times the derivative of r, which is -r^3 x / C.
static void rmsnorm_backward(real *dx, real *dw, const real *dout, const real *x, const real *w,
                             real eps, long T, long C) {
    for (long t = 0; t < T; t++, dx += C, dout += C, x += C) {
        const real r = 1 / sqrt(dot(x, x, C) / C + eps);
        real dr = 0;
        for (long c = 0; c < C; c++) dr += dout[c] * x[c] * w[c];
        for (long c = 0; c < C; c++) {
            dx[c] += r * dout[c] * w[c] - dr * r * r * r * x[c] / C;
            dw[c] += r * dout[c] * x[c];
        }
    }
}

// Rotary position embedding, in place on the query and key heads of qkv (T, H + 2 Hkv, D): at
// position p, the pair (x_i, x_{i + D/2}) of a head turns by the angle p / theta^(2i / D). With
// direction -1 it turns back: that is the backward, in place on dqkv.
static void rope(real *qkv, int direction, const Batch *b, const Config *c) {
    const long H = c->num_heads, Hkv = c->num_kv_heads, D = c->head_dim;
    for (long d = 0; d < b->num_docs; d++)
        for (long t = b->cu_seqlens[d]; t < b->cu_seqlens[d + 1]; t++)
            for (long i = 0; i < D / 2; i++) {
                const float frequency = (float)(1 / pow(c->rope_theta, 2.0 * i / D));
                const float angle = (t - b->cu_seqlens[d]) * frequency;  // fp32 as in transformers
                const real cosine = cos(angle), sine = direction * sin(angle);
                for (long h = 0; h < H + Hkv; h++) {
                    real *x = qkv + (t * (H + 2 * Hkv) + h) * D + i;
                    const real low = x[0], high = x[D / 2];
                    x[0] = low * cosine - high * sine;
                    x[D / 2] = high * cosine + low * sine;
                }
            }
}

// For each token i and each head, over the tokens j <= i of the same document:
//   probs_ij = softmax of q_i . k_j / sqrt(D)        out_i = sum of probs_ij v_j
// H / Hkv query heads share a key head and a value head. out (T, H, D), qkv (T, H + 2 Hkv, D),
// probs (T, H, T): the picture above, for each head; only its stars are computed.
static void attention_forward(real *out, real *probs, const real *qkv, const Batch *b,
                              const Config *c) {
    const long T = b->total_tokens, H = c->num_heads, Hkv = c->num_kv_heads, D = c->head_dim;
    const long QKV = (H + 2 * Hkv) * D;
    memset(out, 0, T * H * D * sizeof(real));
    for (long d = 0; d < b->num_docs; d++)
        for (long first = b->cu_seqlens[d], i = first; i < b->cu_seqlens[d + 1]; i++)
            for (long h = 0; h < H; h++, out += D, probs += T) {
                const real *q = qkv + i * QKV + h * D;
                const real *k = qkv + (H + h / (H / Hkv)) * D, *v = k + Hkv * D;
                for (long j = first; j <= i; j++) probs[j] = dot(q, k + j * QKV, D) / sqrt(D);
                softmax(probs + first, i + 1 - first);
                for (long j = first; j <= i; j++) add_scaled(out, probs[j], v + j * QKV, D);
            }
}

// With scores s_ij = q_i . k_j / sqrt(D) and dprobs_ij = dout_i . v_j:
//   ds_ij = probs_ij (dprobs_ij - sum of probs_ij dprobs_ij), and that sum is dout_i . out_i
static void attention_backward(real *dqkv, const real *dout, const real *out, const real *probs,
                               const real *qkv, const Batch *b, const Config *c) {
    const long T = b->total_tokens, H = c->num_heads, Hkv = c->num_kv_heads, D = c->head_dim;
    const long QKV = (H + 2 * Hkv) * D;
    for (long d = 0; d < b->num_docs; d++)
        for (long first = b->cu_seqlens[d], i = first; i < b->cu_seqlens[d + 1]; i++)
            for (long h = 0; h < H; h++, dout += D, out += D, probs += T) {
                const real sum = dot(dout, out, D);
                for (long j = first; j <= i; j++) {
                    const long q = i * QKV + h * D;
                    const long k = j * QKV + (H + h / (H / Hkv)) * D, v = k + Hkv * D;
                    const real ds = probs[j] * (dot(dout, qkv + v, D) - sum) / sqrt(D);
                    add_scaled(dqkv + q, ds, qkv + k, D);
                    add_scaled(dqkv + k, ds, qkv + q, D);
                    add_scaled(dqkv + v, probs[j], dout, D);
                }
            }
}

// out (T, F) = silu(gate) up, where silu(x) = x sigmoid(x); a row of gate_up (T, 2F): gate, then up
static void swiglu_forward(real *out, const real *gate_up, long T, long F) {
    for (long t = 0; t < T; t++, out += F, gate_up += 2 * F)
        for (long f = 0; f < F; f++) out[f] = gate_up[f] / (1 + exp(-gate_up[f])) * gate_up[F + f];
}

// silu'(x) = s (1 + x (1 - s)), where s = sigmoid(x)
static void swiglu_backward(real *dgate_up, const real *dout, const real *gate_up, long T, long F) {
    for (long t = 0; t < T; t++, dgate_up += 2 * F, dout += F, gate_up += 2 * F)
        for (long f = 0; f < F; f++) {
            const real x = gate_up[f], up = gate_up[F + f], s = 1 / (1 + exp(-x));
            dgate_up[f] += dout[f] * up * s * (1 + x * (1 - s));
            dgate_up[F + f] += dout[f] * x * s;
        }
}

// logits (T, V) become probs in place. Returns the loss: sum of -log probs[target] / num_targets
static double cross_entropy_forward(real *logits, const Batch *b, long V) {
    double loss = 0;
    for (long t = 0; t < b->total_tokens; t++, logits += V) {
        softmax(logits, V);
        if (b->targets[t] >= 0) loss -= log(logits[b->targets[t]]) / b->num_targets;
    }
    return loss;
}

// dlogits += (probs - onehot(target)) / num_targets
static void cross_entropy_backward(real *dlogits, const real *probs, const Batch *b, long V) {
    for (long t = 0; t < b->total_tokens; t++, dlogits += V, probs += V) {
        if (b->targets[t] < 0) continue;
        add_scaled(dlogits, 1.0 / b->num_targets, probs, V);
        dlogits[b->targets[t]] -= 1.0 / b->num_targets;
    }
}

// ---- The model ----------------------------------------------------------------------------------
// Weights and Acts are nothing but reals; their gradients have the same types.

typedef struct {
    real embed_tokens[MAX_VOCAB * MAX_HIDDEN];                // (V, C)
    real lm_head[MAX_VOCAB * MAX_HIDDEN];                     // (V, C), not used if tied
    real qkv_proj[MAX_LAYERS][MAX_QKV * MAX_HIDDEN];          // (QKV, C)
    real o_proj[MAX_LAYERS][MAX_HIDDEN * MAX_QKV];            // (C, H D)
    real gate_up_proj[MAX_LAYERS][2 * MAX_MLP * MAX_HIDDEN];  // (2F, C)
    real down_proj[MAX_LAYERS][MAX_HIDDEN * MAX_MLP];         // (C, F)
    real input_layernorm[MAX_LAYERS][MAX_HIDDEN];             // (C)
    real post_attention_layernorm[MAX_LAYERS][MAX_HIDDEN];    // (C)
    real norm[MAX_HIDDEN];                                    // (C)
} Weights;

enum { NUM_WEIGHTS = sizeof(Weights) / sizeof(real) };
enum { NUM_MATRIX_WEIGHTS = offsetof(Weights, input_layernorm) / sizeof(real) };  // they come first

typedef struct {
    real resid[MAX_LAYERS + 1][MAX_TOKENS * MAX_HIDDEN];               // (T, C), entering layer l
    real attn_norm[MAX_LAYERS][MAX_TOKENS * MAX_HIDDEN];               // (T, C)
    real qkv[MAX_LAYERS][MAX_TOKENS * MAX_QKV];                        // (T, QKV)
    real attn_probs[MAX_LAYERS][MAX_TOKENS * MAX_HEADS * MAX_TOKENS];  // (T, H, T)
    real attn[MAX_LAYERS][MAX_TOKENS * MAX_QKV];                       // (T, H, D)
    real resid_mlp[MAX_LAYERS][MAX_TOKENS * MAX_HIDDEN];               // (T, C), entering its MLP
    real mlp_norm[MAX_LAYERS][MAX_TOKENS * MAX_HIDDEN];                // (T, C)
    real gate_up[MAX_LAYERS][MAX_TOKENS * 2 * MAX_MLP];                // (T, 2F)
    real swiglu[MAX_LAYERS][MAX_TOKENS * MAX_MLP];                     // (T, F)
    real norm[MAX_TOKENS * MAX_HIDDEN];                                // (T, C)
    real logits[MAX_TOKENS * MAX_VOCAB];                               // (T, V), in the end probs
} Acts;

// Returns the loss.
static double forward(Acts *a, const Weights *w, const Batch *b, const Config *c) {
    const long T = b->total_tokens, C = c->hidden_size, F = c->intermediate_size, V = c->vocab_size;
    const long q_dim = c->num_heads * c->head_dim, QKV = q_dim + 2 * c->num_kv_heads * c->head_dim;
    const real eps = c->rms_norm_eps;
    embedding_forward(a->resid[0], b->tokens, w->embed_tokens, T, C);
    for (long l = 0; l < c->num_layers; l++) {
        rmsnorm_forward(a->attn_norm[l], a->resid[l], w->input_layernorm[l], eps, T, C);
        matmul_forward(a->qkv[l], a->attn_norm[l], w->qkv_proj[l], T, C, QKV);
        rope(a->qkv[l], 1, b, c);
        attention_forward(a->attn[l], a->attn_probs[l], a->qkv[l], b, c);
        matmul_forward(a->resid_mlp[l], a->attn[l], w->o_proj[l], T, q_dim, C);
        add_scaled(a->resid_mlp[l], 1, a->resid[l], T * C);
        rmsnorm_forward(a->mlp_norm[l], a->resid_mlp[l], w->post_attention_layernorm[l], eps, T, C);
        matmul_forward(a->gate_up[l], a->mlp_norm[l], w->gate_up_proj[l], T, C, 2 * F);
        swiglu_forward(a->swiglu[l], a->gate_up[l], T, F);
        matmul_forward(a->resid[l + 1], a->swiglu[l], w->down_proj[l], T, F, C);
        add_scaled(a->resid[l + 1], 1, a->resid_mlp[l], T * C);
    }
    rmsnorm_forward(a->norm, a->resid[c->num_layers], w->norm, eps, T, C);
    const real *lm_head = c->tie_word_embeddings ? w->embed_tokens : w->lm_head;
    matmul_forward(a->logits, a->norm, lm_head, T, C, V);
    return cross_entropy_forward(a->logits, b, V);
}

// forward's list from bottom to top; an addition passes its gradient on to both terms. Adds to dw,
// overwrites da.
static void backward(Weights *dw, Acts *da, const Acts *a, const Weights *w, const Batch *b,
                     const Config *c) {
    const long T = b->total_tokens, C = c->hidden_size, F = c->intermediate_size, V = c->vocab_size;
    const long q_dim = c->num_heads * c->head_dim, QKV = q_dim + 2 * c->num_kv_heads * c->head_dim;
    const long L = c->num_layers;
    const real eps = c->rms_norm_eps;
    memset(da, 0, sizeof *da);
    cross_entropy_backward(da->logits, a->logits, b, V);
    const real *lm_head = c->tie_word_embeddings ? w->embed_tokens : w->lm_head;
    real *dlm_head = c->tie_word_embeddings ? dw->embed_tokens : dw->lm_head;
    matmul_backward(da->norm, dlm_head, da->logits, a->norm, lm_head, T, C, V);
    rmsnorm_backward(da->resid[L], dw->norm, da->norm, a->resid[L], w->norm, eps, T, C);
    for (long l = L - 1; l >= 0; l--) {
        add_scaled(da->resid_mlp[l], 1, da->resid[l + 1], T * C);
        matmul_backward(da->swiglu[l], dw->down_proj[l], da->resid[l + 1], a->swiglu[l],
                        w->down_proj[l], T, F, C);
        swiglu_backward(da->gate_up[l], da->swiglu[l], a->gate_up[l], T, F);
        matmul_backward(da->mlp_norm[l], dw->gate_up_proj[l], da->gate_up[l], a->mlp_norm[l],
                        w->gate_up_proj[l], T, C, 2 * F);
        rmsnorm_backward(da->resid_mlp[l], dw->post_attention_layernorm[l], da->mlp_norm[l],
                         a->resid_mlp[l], w->post_attention_layernorm[l], eps, T, C);
        add_scaled(da->resid[l], 1, da->resid_mlp[l], T * C);
        matmul_backward(da->attn[l], dw->o_proj[l], da->resid_mlp[l], a->attn[l], w->o_proj[l], T,
                        q_dim, C);
        attention_backward(da->qkv[l], da->attn[l], a->attn[l], a->attn_probs[l], a->qkv[l], b, c);
        rope(da->qkv[l], -1, b, c);
        matmul_backward(da->attn_norm[l], dw->qkv_proj[l], da->qkv[l], a->attn_norm[l],
                        w->qkv_proj[l], T, C, QKV);
        rmsnorm_backward(da->resid[l], dw->input_layernorm[l], da->attn_norm[l], a->resid[l],
                         w->input_layernorm[l], eps, T, C);
    }
    embedding_backward(dw->embed_tokens, da->resid[0], b->tokens, T, C);
}

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
} AdamW;

// All four arrays are Weights. step counts from 1; m and v start at zero. Only matrices decay.
static void adamw_update(real *w, real *m, real *v, const real *dw, AdamW h, long step) {
    for (long i = 0; i < NUM_WEIGHTS; i++) {
        m[i] = h.beta1 * m[i] + (1 - h.beta1) * dw[i];
        v[i] = h.beta2 * v[i] + (1 - h.beta2) * dw[i] * dw[i];
        const real m_hat = m[i] / (1 - pow(h.beta1, step)), v_hat = v[i] / (1 - pow(h.beta2, step));
        const real decay = i < NUM_MATRIX_WEIGHTS ? h.weight_decay * w[i] : 0;
        w[i] -= h.lr * (m_hat / (sqrt(v_hat) + h.eps) + decay);
    }
}

// ---- The program --------------------------------------------------------------------------------

// Matrices: uniform in +-0.15, made from the index (splitmix64). Norm weights: 1.
static void init_weights(real *w) {
    for (uint64_t i = 0; i < NUM_WEIGHTS; i++) {
        uint64_t x = (i + 1) * 0x9e3779b97f4a7c15;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
        w[i] = i < NUM_MATRIX_WEIGHTS ? ((x ^ (x >> 31)) >> 11) * 0x1p-53 * 0.3 - 0.15 : 1;
    }
}

// A token is a byte. The last token of a document has no target.
static Batch pack(const char *const *texts, long num_docs) {
    Batch b = {.num_docs = num_docs};
    for (long d = 0; d < num_docs; d++) {
        for (const char *text = texts[d]; *text; text++, b.total_tokens++) {
            assert(d < MAX_DOCS && b.total_tokens < MAX_TOKENS);
            b.tokens[b.total_tokens] = (unsigned char)text[0];
            b.targets[b.total_tokens] = text[1] ? (unsigned char)text[1] : -1;
            b.num_targets += text[1] != 0;
        }
        b.cu_seqlens[d + 1] = b.total_tokens;
    }
    return b;
}

int main(void) {
    const char *const texts[] = {
        "Documents differ in length.",
        "To make rows of one length, pad them: most of the work then goes into padding.",
        "Or pack them, one after another, and remember where each one begins.",
        "Hi",
        "!",
    };
    // clang-format off
    const Config config = {MAX_VOCAB, MAX_HIDDEN, MAX_MLP, MAX_LAYERS,
                           MAX_HEADS, 2, 8,     // num_kv_heads, head_dim
                           1e-5, 10000, true};  // rms_norm_eps, rope_theta, tie_word_embeddings
    // clang-format on
    const AdamW hyper = {.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    static Weights weights, dweights, dweights_alone, m, v;  // static: too large for the stack
    static Acts acts, dacts;
    const Batch packed = pack(texts, sizeof texts / sizeof *texts);
    init_weights((real *)&weights);

    // The packed batch, each document alone, and the batch with the boundaries forgotten
    double loss = forward(&acts, &weights, &packed, &config), loss_alone = 0, max_delta = 0;
    backward(&dweights, &dacts, &acts, &weights, &packed, &config);
    for (long d = 0; d < packed.num_docs; d++) {
        Batch alone = pack(&texts[d], 1);
        alone.num_targets = packed.num_targets;
        loss_alone += forward(&acts, &weights, &alone, &config);
        backward(&dweights_alone, &dacts, &acts, &weights, &alone, &config);
    }
    for (long i = 0; i < NUM_WEIGHTS; i++)
        max_delta = fmax(max_delta, fabs(((real *)&dweights)[i] - ((real *)&dweights_alone)[i]));
    Batch merged = packed;
    merged.num_docs = 1;
    merged.cu_seqlens[1] = packed.total_tokens;
    printf("loss: %.6f packed, %.6f each alone, %.6f merged into one document\n", loss, loss_alone,
           forward(&acts, &weights, &merged, &config));
    printf("max |packed - alone|: loss %.0e, gradients %.0e\n", fabs(loss - loss_alone), max_delta);

    for (long step = 1; step <= 100; step++) {
        memset(&dweights, 0, sizeof dweights);
        loss = forward(&acts, &weights, &packed, &config);
        backward(&dweights, &dacts, &acts, &weights, &packed, &config);
        adamw_update((real *)&weights, (real *)&m, (real *)&v, (real *)&dweights, hyper, step);
        if (step == 1 || step % 10 == 0) printf("step %3ld/100 | loss %.4f\n", step, loss);
    }
    return 0;
}
