// dev/simple/train_llama.c, a second implementation of the model that shares no code with the
// first: the same weights and documents give both the same loss, gradients and updates. With
// -DGRADCHECK both compute in fp64, in which test_llama.c holds gradients to central differences.
#include "../llama.h"

#include "scratch.h"

typedef Batch LlamaBatch;
typedef AdamW LlamaAdamW;
typedef real llama_real;

// From here on these names are dev/simple's.
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

#define LONG_TEXT "A much longer one, of more than seventy characters: seventy-six, as it is."
static const char *const texts[] = {"Five.", "!", "Hi", "", "of sixteen chars", "!", LONG_TEXT};
enum { NUM_TEXTS = sizeof texts / sizeof *texts };

// Random weights, those of the norms too, and the same documents for both
static Simple *make_both(LlamaModel *llama, LlamaBatch *batch, Config c) {
    static Simple s;
    LlamaConfig config = {.max_position_embeddings = MAX_TOKENS, .initializer_range = 0.2f};
    config.vocab_size = (int)c.vocab_size, config.hidden_size = (int)c.hidden_size;
    config.intermediate_size = (int)c.intermediate_size, config.num_layers = (int)c.num_layers;
    config.num_heads = (int)c.num_heads, config.num_kv_heads = (int)c.num_kv_heads;
    config.head_dim = (int)c.head_dim, config.tie_word_embeddings = c.tie_word_embeddings;
    config.rms_norm_eps = (float)c.rms_norm_eps, config.rope_theta = c.rope_theta;
    const LlamaSettings settings = {
        .micro_batch_tokens = MAX_TOKENS, .max_seqlen = MAX_TOKENS, .train = true};
    DocView docs[NUM_TEXTS];
    memset(&s, 0, sizeof s);
    s.config = c;
    s.batch = pack(texts, NUM_TEXTS);
    for (int d = 0; d < NUM_TEXTS; d++)
        docs[d] = (DocView){
            s.batch.tokens + s.batch.cu_seqlens[d], (int)strlen(texts[d]), -1, NULL, NULL, 0};
    batch_init(batch, MAX_TOKENS, NUM_TEXTS);
    batch_pack(batch, docs, NUM_TEXTS);
    const size_t bytes = (size_t)batch->total_tokens * sizeof(int);
    CHECK(s.batch.total_tokens == batch->total_tokens && s.batch.num_targets == batch->num_targets);
    CHECK(memcmp(s.batch.targets, batch->targets, bytes) == 0);
    llama_plan(llama, &config, settings);
    MUST(llama_allocate(llama, &err));
    weights_init(llama_parameters(llama), 7);
    for (size_t i = llama->num_decayed; i < llama->num_elements; i++)
        llama->weights[i] += (floatX)(0.3 * test_rng_normal());
    for (int i = 0; i < llama->num_tensors; i++) {
        const Parameter *t = &llama->tensors[i];
        real *w = find_tensor(&s.weights, &s.config, t->name);
        for (size_t k = 0; k < t->count; k++) w[k] = (real)llama->weights[t->offset + k];
    }
    return &s;
}

static double llama_forward_backward(LlamaModel *m, const LlamaBatch *b) {
    llama_begin_step(m, b->num_targets);
    llama_pass(m, b, true, NULL, NULL);
    llama_add_losses(m);
    return zero_read_step(&m->zero).loss_sum / b->num_targets;
}

static double simple_forward_backward(Simple *s) {
    memset(&s->grads, 0, sizeof s->grads);
    double loss = forward(&s->acts, &s->weights, &s->batch, &s->config);
    backward(&s->grads, &s->dacts, &s->acts, &s->weights, &s->batch, &s->config);
    return loss;
}

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

// eps is so large that an update is a smooth function of the gradient: with a small one the sign of
// a gradient near zero would decide.
static void check_steps(long heads, long kv_heads, long head_dim, bool tied) {
    static LlamaModel llama;
    LlamaBatch batch;
    Simple *s = make_both(
        &llama, &batch, (Config){256, 44, 52, 2, heads, kv_heads, head_dim, 0x1p-17, 10000, tied});
    LlamaAdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-3f, 0.1f, 0};
    const AdamW simple_hyper = {(double)hyper.lr, (double)hyper.beta1, (double)hyper.beta2,
                                (double)hyper.eps, (double)hyper.weight_decay};
    for (hyper.t = 1; hyper.t <= NUM_STEPS; hyper.t++) {
        const double loss = llama_forward_backward(&llama, &batch);
        const double expected = simple_forward_backward(s);
        CHECK_MSG(fabs(loss - expected) <= tolerance * expected, "step %d: loss %.17g, not %.17g",
                  (int)hyper.t, loss, expected);
        check_tensors(&llama, llama.grads, s, &s->grads, "gradient", hyper.t);
        zero_update(&llama.zero, hyper, 0);
        adamw_update((real *)&s->weights, (real *)&s->m, (real *)&s->v, (real *)&s->grads,
                     simple_hyper, hyper.t);
        check_tensors(&llama, llama.weights, s, &s->weights, "update", hyper.t);
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

#ifdef GRADCHECK

// The program prints that packed equals alone, that merged does not, and a loss that falls.
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
