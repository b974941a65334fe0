// dev/simple/train_llama.c, a second implementation of the model that shares no code with the
// first: the same weights and documents give both the same loss, gradients and updates. With
// -DGRADCHECK both compute in fp64, in which test_llama.c holds gradients to central differences.
#include "../llama.h"

#include "scratch.h"
#include "test.h"

// ------------------------------------------------------------------------------------------------
// llama.h's side

enum { CAPACITY = 256 };
static const int lengths[] = {5, 1, 2, 70, 1, 0, 17, 2, 33};
enum { NUM_DOCS = sizeof lengths / sizeof *lengths };

static LlamaConfig llama_config(int heads, int kv_heads, int head_dim, bool tied) {
    LlamaConfig c;
    memset(&c, 0, sizeof c);
    c.vocab_size = 61, c.hidden_size = 44, c.intermediate_size = 52, c.num_layers = 2;
    c.num_heads = heads, c.num_kv_heads = kv_heads, c.head_dim = head_dim;
    c.max_position_embeddings = CAPACITY, c.rms_norm_eps = 1e-5f, c.rope_theta = 10000;
    c.tie_word_embeddings = tied, c.initializer_range = 0.2f;
    return c;
}

// Random weights, those of the norms too
static void llama_make(LlamaModel *m, const LlamaConfig *c) {
    const LlamaSettings settings = {
        .micro_batch_tokens = CAPACITY, .max_seqlen = CAPACITY, .train = true};
    llama_plan(m, c, settings);
    MUST(llama_allocate(m, &err));
    llama_init(m, 7);
    for (size_t i = m->num_decayed; i < m->num_elements; i++)
        m->weights[i] += (floatX)(0.3 * test_rng_normal());
}

// Every second document is a segment whose last token has a target.
static void llama_make_batch(Batch *b, const LlamaConfig *c) {
    static int32_t tokens[CAPACITY];
    DocView docs[NUM_DOCS];
    for (int i = 0; i < CAPACITY; i++) tokens[i] = (int32_t)test_rng_below((uint32_t)c->vocab_size);
    for (int d = 0, used = 0; d < NUM_DOCS; used += lengths[d++]) {
        const DocView doc = {tokens + used, lengths[d], d % 2 && lengths[d] ? d : -1, NULL};
        docs[d] = doc;
    }
    batch_init(b, CAPACITY, NUM_DOCS);
    batch_pack(b, docs, NUM_DOCS);
}

static double llama_forward_backward(LlamaModel *m, const Batch *b) {
    llama_begin_step(m, b->num_targets);
    llama_train_micro_batch(m, b);
    return llama_read_step(m).loss_sum / b->num_targets;
}

// eps is so large that an update is a smooth function of the gradient: with a small one the sign of
// a gradient near zero would decide.
static const AdamW llama_hyper = {1e-2f, 0.9f, 0.95f, 1e-3f, 0.1f, 0};

static void llama_adamw(LlamaModel *m, int64_t t) {
    AdamW hyper = llama_hyper;
    hyper.t = t;
    llama_update(m, hyper, 0);
}

typedef Batch LlamaBatch;
typedef real llama_real;

// ------------------------------------------------------------------------------------------------
// The other side. From here on these names are dev/simple's.

#define main simple_main
#define real simple_real
#define Batch SimpleBatch
#define AdamW SimpleAdamW
#define embedding_forward simple_embedding_forward
#define embedding_backward simple_embedding_backward
#define matmul_forward simple_matmul_forward
#define rmsnorm_forward simple_rmsnorm_forward
#define rmsnorm_backward simple_rmsnorm_backward
#define attention_forward simple_attention_forward
#define attention_backward simple_attention_backward
#define swiglu_forward simple_swiglu_forward
#define swiglu_backward simple_swiglu_backward
#define cross_entropy_forward simple_cross_entropy_forward
#define adamw_update simple_adamw_update
#include "../dev/simple/train_llama.c"
#undef main

typedef struct {
    Config config;
    Batch batch;
    Weights weights, grads, m, v;
    Acts acts, dacts;
} Simple;

static Batch make_batch(const LlamaBatch *from) {
    Batch b = {from->total_tokens, from->num_segments, from->num_targets, {0}, {0}, {0}};
    CHECK(from->total_tokens <= MAX_TOKENS && from->num_segments <= MAX_DOCS);
    memcpy(b.tokens, from->tokens, (size_t)from->total_tokens * sizeof(int));
    memcpy(b.targets, from->targets, (size_t)from->total_tokens * sizeof(int));
    memcpy(b.cu_seqlens, from->cu_seqlens, (size_t)(from->num_segments + 1) * sizeof(int));
    return b;
}

// Where a checkpoint's tensor lies: q, k and v, gate and up are rows of one matrix.
static real *find_tensor(Weights *w, const Config *c, const char *name) {
    const long C = c->hidden_size, q = c->num_heads * c->head_dim * C,
               kv = c->num_kv_heads * c->head_dim * C, up = c->intermediate_size * C;
    int l = 0, at = 0;
    sscanf(name, "model.layers.%d.%n", &l, &at);
    const struct {
        const char *name;
        real *tensor;
    } tensors[] = {
        {"model.embed_tokens.weight", w->embed_tokens},
        {"self_attn.q_proj.weight", w->qkv_proj[l]},
        {"self_attn.k_proj.weight", w->qkv_proj[l] + q},
        {"self_attn.v_proj.weight", w->qkv_proj[l] + q + kv},
        {"self_attn.o_proj.weight", w->o_proj[l]},
        {"mlp.gate_proj.weight", w->gate_up_proj[l]},
        {"mlp.up_proj.weight", w->gate_up_proj[l] + up},
        {"mlp.down_proj.weight", w->down_proj[l]},
        {"input_layernorm.weight", w->input_layernorm[l]},
        {"post_attention_layernorm.weight", w->post_attention_layernorm[l]},
        {"model.norm.weight", w->norm},
        {"lm_head.weight", w->lm_head},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        if (strcmp(tensors[i].name, name + at) == 0) return tensors[i].tensor;
    CHECK_MSG(false, "%s", name);
    return NULL;
}

static Simple *make_simple(const LlamaModel *llama, const LlamaBatch *batch) {
    static Simple s;
    memset(&s, 0, sizeof s);
    const LlamaConfig *c = &llama->config;
    s.config = (Config){
        c->vocab_size, c->hidden_size,        c->intermediate_size, c->num_layers,
        c->num_heads,  c->num_kv_heads,       c->head_dim,          (double)c->rms_norm_eps,
        c->rope_theta, c->tie_word_embeddings};
    s.batch = make_batch(batch);
    for (int i = 0; i < llama->num_tensors; i++) {
        const Parameter *t = &llama->tensors[i];
        real *w = find_tensor(&s.weights, &s.config, t->name);
        for (size_t k = 0; k < t->count; k++) w[k] = (real)llama->weights[t->offset + k];
    }
    return &s;
}

static double simple_forward_backward(Simple *s) {
    memset(&s->grads, 0, sizeof s->grads);
    double loss = forward(&s->acts, &s->weights, &s->batch, &s->config);
    backward(&s->grads, &s->dacts, &s->acts, &s->weights, &s->batch, &s->config);
    return loss;
}

// ------------------------------------------------------------------------------------------------
// Both

// In fp32 each update amplifies the rounding errors before it: the relative error of a gradient was
// 2e-6 in the first step and 2e-5 in the third. In fp64 the third step had 4e-14.
#ifdef GRADCHECK
static const double tolerance = 1e-12;
enum { NUM_STEPS = 3 };
#else
static const double tolerance = 1e-5;
enum { NUM_STEPS = 1 };
#endif

static void check_tensors(const LlamaModel *llama, const llama_real *arena, Simple *s,
                          Weights *tensors, const char *what, int64_t step) {
    for (const Parameter *t = llama->tensors; t < llama->tensors + llama->num_tensors; t++) {
        const real *expected = find_tensor(tensors, &s->config, t->name);
        double error = 0, norm = 0;
        for (size_t i = 0; i < t->count; i++) {
            const double e = (double)arena[t->offset + i] - expected[i];
            error += e * e, norm += expected[i] * expected[i];
        }
        CHECK_MSG(norm > 0 && sqrt(error / norm) <= tolerance,
                  "step %d: %s of %s: relative L2 %.3g", (int)step, what, t->name,
                  sqrt(error / norm));
    }
}

static void check_steps(int heads, int kv_heads, int head_dim, bool tied) {
    static LlamaModel llama;
    const LlamaConfig c = llama_config(heads, kv_heads, head_dim, tied);
    LlamaBatch batch;
    llama_make(&llama, &c);
    llama_make_batch(&batch, &c);
    Simple *s = make_simple(&llama, &batch);
    const AdamW hyper = {(double)llama_hyper.lr, (double)llama_hyper.beta1,
                         (double)llama_hyper.beta2, (double)llama_hyper.eps,
                         (double)llama_hyper.weight_decay};
    for (int64_t step = 1; step <= NUM_STEPS; step++) {
        const double loss = llama_forward_backward(&llama, &batch);
        const double expected = simple_forward_backward(s);
        CHECK_MSG(fabs(loss - expected) <= tolerance * expected, "step %d: loss %.17g, not %.17g",
                  (int)step, loss, expected);
        check_tensors(&llama, llama.grads, s, &s->grads, "gradient", step);
        llama_adamw(&llama, step);
        adamw_update((real *)&s->weights, (real *)&s->m, (real *)&s->v, (real *)&s->grads, hyper,
                     step);
        check_tensors(&llama, llama.weights, s, &s->weights, "update", step);
    }
    batch_free(&batch);
    llama_free(&llama);
}

TEST(llama_h_agrees) {
    check_steps(3, 1, 64, true);
    check_steps(6, 2, 10, false);
    check_steps(2, 2, 64, false);
    check_steps(3, 3, 14, true);
}

TEST(pack_sets_targets_inside_documents) {
    static const char *const texts[] = {"several", "documents", "of", "3", "lengths"};
    const Batch b = pack(texts, 5);
    int row = 0, targets = 0;
    for (int d = 0; d < 5; d++) {
        CHECK(b.cu_seqlens[d] == row);
        for (const char *c = texts[d]; *c; c++, row++) {
            CHECK(b.tokens[row] == *c && b.targets[row] == (c[1] ? c[1] : -1));
            targets += c[1] != 0;
        }
    }
    CHECK(b.cu_seqlens[5] == row && b.total_tokens == row && b.num_docs == 5);
    CHECK(b.num_targets == targets);
}

#ifdef GRADCHECK

// What the program prints: packed equals alone, merged does not, and training lowers the loss.
TEST(the_program_shows_that_packing_is_exact_and_trains) {
    double packed = 0, alone = 0, merged = 0, delta_loss = 1, delta_gradient = 1, last = 1;
    capture_begin();
    const int status = simple_main();
    for (const char *line = capture_end(); line; line = strchr(line, '\n'), line += line != NULL) {
        sscanf(line, "loss: %lf packed, %lf each alone, %lf merged", &packed, &alone, &merged);
        sscanf(line, "max |packed - alone|: loss %lf, gradients %lf", &delta_loss, &delta_gradient);
        sscanf(line, "step 100/100 | loss %lf", &last);
    }
    CHECK(status == 0);
    CHECK_MSG(packed > 0 && alone == packed && fabs(merged - packed) > 0.01, "%g %g %g", packed,
              alone, merged);
    CHECK_MSG(delta_loss <= 1e-13 && delta_gradient <= 1e-13, "%g %g", delta_loss, delta_gradient);
    CHECK_MSG(last < 0.1, "%g", last);
}

#endif

TEST_MAIN()
