// The whole model: PyTorch goldens, layouts, isolation, saving; with -DGRADCHECK its gradient
// against central differences in fp64.
#include "../llama.h"
#include "../data/runs/checkpoint_files.h"
#include "../data/use/packing_check.h"

#include "golden.h"
#include "scratch.h"

static LlamaConfig tiny_config(int heads, int kv_heads, int head_dim, bool tied) {
    LlamaConfig c;
    CHECK(llama_config_builtin(&c, "demo"));
    c.vocab_size = 23, c.hidden_size = 12, c.intermediate_size = 20, c.num_layers = 2;
    c.num_heads = heads, c.num_kv_heads = kv_heads, c.head_dim = head_dim;
    c.max_position_embeddings = 256, c.tie_word_embeddings = tied, c.initializer_range = 0.2f;
    c.bos = (TokenIds){1, 1, {1}}, c.eos = (TokenIds){1, 1, {2}};
    return c;
}

// Everything in which other types differ from Llama
static LlamaConfig variant_config(void) {
    LlamaConfig c = tiny_config(3, 1, 4, true);
    c.qkv_bias = c.qk_norm = true;
    c.no_rope_interval = 2;
    return c;
}

// Biases that are not zero, and norms of heads that are not one
static void vary_vectors(LlamaModel *m) {
    for (const Parameter *t = m->tensors; t < m->tensors + m->num_tensors; t++) {
        if (!strstr(t->name, "self_attn") || t->cols) continue;
        for (size_t k = 0; k < t->count; k++)
            m->weights[t->offset + k] += (floatX)(0.5 * sin((double)(k + test_hash(t->name) % 97)));
    }
}

// Freed at the end of the block
#define MODEL __attribute__((cleanup(llama_free))) LlamaModel
#define BATCH __attribute__((cleanup(batch_free))) Batch

static LoraConfig adapters;  // of the models of a test, where rank > 0

// Adapters are so large that they matter.
static void start_model(LlamaModel *m, const LlamaConfig *c, LlamaSettings settings) {
    const uint64_t before = device_memory().bytes_now;
    settings.lora = adapters;
    llama_plan(m, c, settings);
    MUST(llama_allocate(m, &err));
    CHECK(device_memory().bytes_now - before == llama_memory_total(m));
    weights_init(llama_parameters(m), 7);
    if (adapters.rank > 0) weights_init(llama_frozen_parameters(m), 7);
    for (size_t i = 0; i < m->num_elements && adapters.rank > 0; i++)
        m->weights[i] += (floatX)(0.2 * sin(3.7 * (double)i));
    vary_vectors(m);
}

static LlamaSettings settings_of(int capacity, int max_seqlen) {
    return (LlamaSettings){.micro_batch_tokens = capacity,
                           .max_seqlen = max_seqlen,
                           .layouts = 1u << LAYOUT_SHARED,
                           .train = true};
}

enum { MAX_DOCS = 64, MAX_TOKENS = 2048, ALIKE = 5 };
static int32_t pool[MAX_TOKENS], pool_targets[MAX_TOKENS];
static float pool_weights[MAX_TOKENS];
static DocView docs[MAX_DOCS];

// Documents of the given lengths; some are segments whose last token has a target. masked: most of
// them have a loss mask, which excludes two tokens of three and all of some documents.
static void make_docs(const int *lengths, int n, int vocab, bool masked) {
    for (int i = 0, used = 0; i < n; used += lengths[i++]) {
        int32_t *tokens = pool + used, *targets = pool_targets + used;
        const bool goes_on = i % 3 == 2 && lengths[i];
        for (int k = 0; k < lengths[i] + goes_on; k++)
            tokens[k] = (int32_t)test_rng_below((uint32_t)vocab);
        for (int k = 0; k < lengths[i]; k++) {
            const bool is_last = k + 1 == lengths[i] && !goes_on;
            targets[k] = is_last || i % 4 == 2 || test_rng_below(3) > 0 ? -1 : tokens[k + 1];
        }
        docs[i] = (DocView){
            tokens, lengths[i], goes_on ? tokens[lengths[i]] : -1, masked && i % 4 ? targets : NULL,
            NULL,   0};
    }
}

// The loss of a batch of this sum of weights, and its gradients
static double forward_backward_of(LlamaModel *m, const Batch *b, double weight_sum) {
    CHECK(batch_is_valid(b, m->config.vocab_size));
    m->zero.num_documents = b->num_docs;
    llama_begin_step(m, weight_sum);
    llama_pass(m, b, true, NULL, NULL);
    llama_add_losses(m);
    return zero_read_step(&m->zero).loss_sum;
}
static double forward_backward(LlamaModel *m, const Batch *b) {
    return forward_backward_of(m, b, b->num_targets > 0 ? b->num_targets : 1) / b->num_targets;
}

static double relative_l2(const real *a, const real *b, size_t n) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        const double e = (double)a[i] - (double)b[i];
        error += e * e, norm += (double)b[i] * (double)b[i];
    }
    CHECK(norm > 0);
    return sqrt(error / norm);
}

// ---- Shared prefixes and weights, in fp32 and in fp64 -------------------------------------------

// Puts some documents that begin alike into `docs`: one begins as the last one that shares nothing
// does, up to any token. Returns their number.
static int make_alike(int vocab, bool masked, bool weighted) {
    enum { LONGEST = MAX_TOKENS / ALIKE };
    const int num = 1 + (int)test_rng_below(ALIKE);
    int32_t most = 0;  // that the next one may share
    const DocView *leader = docs;
    for (int n = 0; n < num; n++) {
        DocView *d = &docs[n];
        int32_t *tokens = pool + n * LONGEST, *targets = pool_targets + n * LONGEST;
        float *weights = pool_weights + n * LONGEST;
        const int32_t length = 1 + (int32_t)test_rng_below(LONGEST - 1);
        int32_t same = test_rng_below(4) ? (int32_t)test_rng_below(LONGEST) : 0;
        if (same > length) same = length;
        if (n == 0 || same > leader->length) same = n ? leader->length : 0;
        *d = (DocView){tokens, length, test_rng_below(3) ? -1 : 5, NULL, NULL, 0};
        for (int32_t k = 0; k < length; k++)
            tokens[k] = k < same ? leader->tokens[k] : (int32_t)test_rng_below((uint32_t)vocab);
        for (int32_t k = 0; k < length; k++) {
            targets[k] = test_rng_below(3) ? -1 : k + 1 < length ? tokens[k + 1] : d->next_token;
            weights[k] = (float)(int)test_rng_below(9) / 4 - 1;
        }
        if (masked && test_rng_below(3)) d->targets = targets;
        if (weighted && test_rng_below(2)) d->weights = weights;
        d->shared_len = same > 0 ? (same - 1) / 128 * 128 : 0;
        if (d->shared_len > most) d->shared_len = most;
        if (d->shared_len == 0) leader = d;
        most = d->shared_len ? d->shared_len : LONGEST;
    }
    return num;
}

// Makes pairs of a batch's documents.
static void set_pairs(Batch *b) {
    b->num_pairs = b->num_docs / 2;
    array_grow(b->pairs, &b->pair_capacity, (size_t)b->num_pairs, "pairs");
    for (int i = 0; i < b->num_pairs; i++)
        b->pairs[i] = (PairTerms){{0.07, 0.04 + i}, {20 * i, 3}, 0.3, 0.1, 0.02};
}

// The documents' losses add up to the batch's; they are copied to `losses`.
static void check_documents(const LlamaModel *m, const Batch *b, double loss_sum, double *losses) {
    double sum = 0, size = 0;
    CHECK(m->zero.num_documents == b->num_docs && b->num_docs > 0);
    for (int32_t d = 0; d < b->num_docs; d++) {
        losses[d] = zero_documents(&m->zero)[d];
        sum += losses[d], size += fabs(losses[d]);
    }
    CHECK_MSG(fabs(sum - loss_sum) <= 1e-12 * size, "%.17g, its documents %.17g", loss_sum, sum);
}

#ifndef GRADCHECK
// Documents that are packed: each one's losses are those of its rows, times their weights.
static void check_documents_by_row(LlamaModel *m, const Batch *packed, const double *losses) {
    static float rows[MAX_TOKENS];
    llama_pass(m, packed, false, rows, NULL);
    for (int32_t d = 0, row = 0; d < packed->num_docs; d++) {
        double sum = 0;
        for (int32_t k = 0; k < docs[d].length; k++, row++)
            sum += (double)rows[row] * (double)packed->weights[row];
        CHECK_MSG(losses[d] == sum, "document %d: %.17g, its rows %.17g", d, losses[d], sum);
    }
}

// Losses of all rows that a document has alone, bit for bit
static void check_losses(LlamaModel *m, const Batch *b, const Batch *packed) {
    static float losses[MAX_TOKENS], expected[MAX_TOKENS];
    llama_begin_step(m, 1);
    llama_pass(m, b, false, losses, NULL);
    llama_pass(m, packed, false, expected, NULL);
    for (int32_t d = 0; d < packed->num_segments; d++)
        for (int32_t k = 0, row = packed->cu_seqlens[d]; row < packed->cu_seqlens[d + 1];
             k++, row++) {
            const int32_t own = k - b->shared_len[d],
                          at = own < 0 ? b->shared_first[d] + k : b->cu_seqlens[d] + own;
            if (packed->targets[row] >= 0)
                CHECK_MSG(losses[at] == expected[row], "document %d, token %d: %.9g, %.9g", d, k,
                          losses[at], expected[row]);
        }
}
#endif

static void check_shared(LlamaConfig c, bool masked, bool weighted) {
    static LlamaModel m[2];  // the second computes activations again
    const double most = sizeof(real) == 8 ? 1e-8 : 3e-6;
    BATCH b, packed;
    c.max_position_embeddings = 512;
    int n;
    batch_init(&b, MAX_TOKENS, MAX_DOCS);
    batch_init(&packed, MAX_TOKENS, MAX_DOCS);
    do {
        n = make_alike(c.vocab_size, masked, weighted);
        batch_fill(&b, LAYOUT_SHARED, docs, n, 0);
    } while (b.num_shared < 2);
    batch_pack(&packed, docs, n);
    for (int i = 0; i < 2; i++) {
        LlamaSettings settings = settings_of(MAX_TOKENS, 512);
        settings.head_chunk = 150;
        settings.ranks.most_documents = ALIKE * MAX_TOKENS;
        if (i == 1) settings.recompute = LLAMA_RECOMPUTE_FULL;
        start_model(&m[i], &c, settings);
    }
    const size_t bytes = m[0].num_elements * sizeof(real);
    AUTO_FREE real *grads = (real *)host_calloc(1, bytes, "gradients");
    const double expected = forward_backward_of(&m[0], &packed, packed.num_targets);
    memcpy(grads, m[0].grads, bytes);
    double of_packed[MAX_DOCS], of_shared[MAX_DOCS];
    check_documents(&m[0], &packed, expected, of_packed);
    const double loss = forward_backward_of(&m[0], &b, packed.num_targets);
    check_documents(&m[0], &b, loss, of_shared);
    for (int d = 0; d < n; d++)
        CHECK_MSG(sizeof(real) == 4 ? of_shared[d] == of_packed[d]
                                    : fabs(of_shared[d] - of_packed[d]) <= 1e-12 * MAX_TOKENS,
                  "document %d: %.17g, packed %.17g", d, of_shared[d], of_packed[d]);
    const double error = relative_l2(m[0].grads, grads, m[0].num_elements);
    CHECK_MSG(fabs(loss - expected) <= 1e-12 * fabs(expected) + 1e-12, "loss %.17g, packed %.17g",
              loss, expected);
    CHECK_MSG(error <= most, "gradients differ by %.3g", error);
    CHECK(forward_backward_of(&m[1], &b, packed.num_targets) == loss);
    CHECK(memcmp(m[1].grads, m[0].grads, bytes) == 0);
#ifndef GRADCHECK
    check_losses(&m[0], &b, &packed);
    check_documents_by_row(&m[0], &packed, of_packed);
    AUTO_FREE float *alone = (float *)host_calloc(MAX_TOKENS, sizeof *alone, "losses");
    PackingDelta d = packing_check(llama_face(&m[0]), &b, &packed, alone);
    CHECK_MSG(d.loss == 0 && d.logit == 0 && packing_is_rounding(&d, false), "%g, %g, %g", d.loss,
              d.logit, d.grad_error);
    int32_t row = 3;
    while (b.targets[row] < 0 || b.weights[row] == 0) row++;
    b.weights[row] += 1, b.weighted = true;
    d = packing_check(llama_face(&m[0]), &b, &packed, alone);
    CHECK_MSG(d.loss == 0 && !packing_is_rounding(&d, false), "%g", d.grad_error);
#endif
    for (int i = 0; i < 2; i++) llama_free(&m[i]);
}

// Two pairs: answers that begin alike after a prompt of 100 tokens, and short ones without a mask
TEST(pairs_have_the_same_loss_and_gradients_in_every_layout) {
    enum { N = 4, LONGEST = 160 };
    static const int of_pairs[N] = {150, 141, 9, 12};
    LlamaConfig c = tiny_config(3, 1, 4, true);
    LlamaSettings settings = settings_of(N * LONGEST, LONGEST);
    const Layout layouts[] = {LAYOUT_PACKED, LAYOUT_PADDED, LAYOUT_REPAD, LAYOUT_SHARED};
    MODEL m;
    BATCH b;
    c.max_position_embeddings = LONGEST;
    settings.pairs = true;
    settings.ranks.most_documents = N * LONGEST;
    settings.layouts |= 1u << LAYOUT_REPAD;
    start_model(&m, &c, settings);
    make_docs(of_pairs, N, c.vocab_size, false);
    memcpy(pool + of_pairs[0], pool, 135 * sizeof *pool);
    for (int d = 0, k = 0; d < 2; docs[d].targets = pool_targets + k, k += of_pairs[d++])
        for (int i = 0; i < of_pairs[d]; i++)
            pool_targets[k + i] = i < 99 || i + 1 == of_pairs[d] ? -1 : pool[k + i + 1];
    docs[1].shared_len = 128;
    batch_init(&b, N * LONGEST, N);
    AUTO_FREE real *grads = (real *)host_calloc(m.num_elements, sizeof *grads, "gradients");
    double expected = 0;
    for (int i = 0; i < 4; i++) {
        batch_fill(&b, layouts[i], docs, N, LONGEST);
        set_pairs(&b);
        const double loss = forward_backward_of(&m, &b, 2), *sums = zero_documents(&m.zero);
        if (i == 0) memcpy(grads, m.grads, m.num_elements * sizeof *grads);
        for (int k = 0; k < 2 && i == 0; k++) {
            const PairTerms *t = &b.pairs[k];
            const double z = t->scale[0] * (t->reference[0] - sums[2 * k]) -
                             t->scale[1] * (t->reference[1] - sums[2 * k + 1]) - t->margin;
            expected += 0.9 * log(1 + exp(-z)) + 0.1 * log(1 + exp(z)) + 0.02 * sums[2 * k];
        }
        const double error = relative_l2(m.grads, grads, m.num_elements);
        CHECK_MSG(fabs(loss - expected) <= 2e-7 * expected, "%s: %.12g, expected %.12g",
                  layout_name(layouts[i]), loss, expected);
        CHECK_MSG(error <= 1e-6, "%s: gradients differ by %.3g", layout_name(layouts[i]), error);
    }
}

TEST(shared_prefixes_have_the_losses_and_gradients_of_packed) {
    for (int round = 0; round < 5; round++) {
        check_shared(tiny_config(3, 1, 4, true), false, false);
        check_shared(tiny_config(4, 2, 6, false), true, false);
        check_shared(variant_config(), true, true);
        adapters = (LoraConfig){3, 5, {1, 1, 1, 1, 1, 1, 1}, false};
        check_shared(variant_config(), true, false);
        adapters = (LoraConfig){0};
    }
}

#ifndef GRADCHECK

// ---- Goldens made by dev/reference/make_golden.py with transformers.LlamaForCausalLM ------------

static struct {
    SafetensorsSet set;
    LlamaModel model;
    Batch batch;
    char dir[512];
} g;

// n numbers; valid until the third call after this one
static const float *golden_floats(const char *name, size_t n) {
    static float *arrays[3];
    static int next;
    float **x = &arrays[next = (next + 1) % 3];
    const TensorInfo *info = safetensors_find(&g.set, name);
    CHECK_MSG(info && tensor_num_elements(info) == n, "%s of %zu", name, n);
    free(*x);
    *x = (float *)host_calloc(n, sizeof **x, name);
    MUST(safetensors_read_f32(&g.set, info, *x, 0, n, &err));
    return *x;
}

// NAME.safetensors of its directory, instead of another file
static void open_expected(const char *name) {
    safetensors_close(&g.set);
    MUST(safetensors_open(&g.set, printed("%s/%s.safetensors", g.dir, name), &err));
}

// chunk: rows of the head and elements of a tensor at a time; 0: as always, here all at once
static void golden_open(const char *name, int chunk, bool muon) {
    LlamaConfig config;
    int32_t cu[MAX_DOCS + 1];
    memset(&g, 0, sizeof g);
    snprintf(g.dir, sizeof g.dir, "tests/golden/%s", name);
    open_expected("expected");
    MUST(llama_config_read(&config, g.dir, &err));
    const int num_tokens = read_ints(&g.set, "tokens", pool, MAX_TOKENS);
    const int num_cu = read_ints(&g.set, "cu_seqlens", cu, MAX_DOCS + 1);
    for (int d = 0; d + 1 < num_cu; d++)
        docs[d] = (DocView){pool + cu[d], cu[d + 1] - cu[d], -1, NULL, NULL, 0};
    batch_init(&g.batch, num_tokens, num_cu);
    batch_pack(&g.batch, docs, num_cu - 1);
    // slack rows are NaN in a poison build
    LlamaSettings settings = settings_of(num_tokens + 5, g.batch.max_seqlen);
    settings.muon = muon, settings.lora = adapters;
    settings.head_chunk = chunk, settings.io_chunk = (size_t)chunk;
    settings.pairs = true, settings.ranks.most_documents = num_cu;
    llama_plan(&g.model, &config, settings);
    MUST(llama_allocate(&g.model, &err));
    if (adapters.rank > 0) {
        MUST(parameters_load(llama_frozen_parameters(&g.model), false, g.dir, &err));
        snprintf(g.dir, sizeof g.dir, "tests/golden/%s/lora", name);
        open_expected(adapters.nf4 ? "nf4" : "expected");
    }
    MUST(parameters_load(llama_parameters(&g.model), false, g.dir, &err));
}

static void golden_close(void) {
    safetensors_close(&g.set);
    batch_free(&g.batch);
    llama_free(&g.model);
}

static void golden_loss(double weight_sum) {
    const double expected = (double)*golden_floats("loss", 1);
    const double loss = forward_backward_of(&g.model, &g.batch, weight_sum) / weight_sum;
    CHECK_MSG(fabs(loss - expected) <= 1e-6 * expected, "%s: loss %.9g, expected %.9g", g.dir, loss,
              expected);
    for (const Parameter *t = g.model.tensors; t < g.model.tensors + g.model.num_trained; t++) {
        const float *grads = golden_floats(printed("grad.%s", t->name), t->count);
        double e = relative_l2(g.model.grads + t->offset, grads, t->count);
        CHECK_MSG(e <= 1e-5, "%s/%s: relative L2 %.3g", g.dir, t->name, e);
    }
}

static void golden_logits(void) {
    const size_t n = (size_t)g.batch.total_tokens * (size_t)g.model.config.vocab_size;
    AUTO_FREE float *logits = (float *)host_calloc(n, sizeof *logits, "logits");
    llama_pass(&g.model, &g.batch, true, NULL, logits);
    double e = relative_l2(logits, golden_floats("logits", n), n);
    CHECK_MSG(e <= 2e-6, "%s: logits relative L2 %.3g", g.dir, e);
}

// Ten updates of torch.optim.AdamW, or Muon, with clip_grad_norm_(1.0)
static void golden_training(const char *losses_name, const char *norms_name) {
    const float *losses = golden_floats(losses_name, 10), *norms = golden_floats(norms_name, 10);
    for (int step = 0; step < 10; step++) {
        AdamW h = {3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1};  // make_golden.py's
        double loss = forward_backward(&g.model, &g.batch);
        zero_update(&g.model.zero, h, 1.0f);
        double norm = (double)zero_read_step(&g.model.zero).grad_norm;
        CHECK_MSG(fabs(loss - (double)losses[step]) <= 2e-5 * (double)losses[step],
                  "%s step %d: loss %.8g, expected %.8g", g.dir, step, loss, (double)losses[step]);
        // the norm averages the errors of its gradients, 1e-5 each before the first update, and the
        // weights have drifted by as much after ten
        CHECK_MSG(fabs(norm - (double)norms[step]) <= 5e-5 * (double)norms[step],
                  "%s step %d: norm %.8g, expected %.8g", g.dir, step, norm, (double)norms[step]);
    }
}

// Of make_weighted_golden.py
TEST(a_weighted_loss_is_pytorchs) {
    double weight_sum = 0;
    golden_open("gqa3_tied", 0, false);
    open_expected("weighted");
    const float *weights = golden_floats("weights", (size_t)g.batch.total_tokens);
    const int num_docs = g.batch.num_segments;
    for (int d = 0; d < num_docs; d++) docs[d].weights = weights + (docs[d].tokens - pool);
    batch_pack(&g.batch, docs, num_docs);
    for (int i = 0; i < g.batch.total_tokens; i++) weight_sum += fabs((double)g.batch.weights[i]);
    golden_loss(weight_sum);
    golden_close();
}

// Of make_pair_golden.py: the last six documents
TEST(the_losses_of_pairs_are_pytorchs) {
    const PairSettings kinds[] = {{PREFERENCE_DPO, 0.125, 9, 0.0625, 0, NULL},
                                  {PREFERENCE_SIMPO, 2, 0.5, 0, 0.25, NULL}};
    const DocIndex index = {0};
    double reference[6];
    Segment pairs[6] = {0};
    for (int k = 0; k < 2; k++) {
        PairSettings s = kinds[k];
        golden_open("gqa3_tied", 0, false);
        open_expected(k == 0 ? "dpo" : "simpo");
        const float *sums = golden_floats("reference", 6);
        for (int d = 0; d < 6; d++) {
            docs[d] = docs[d + 1];
            pairs[d] = (Segment){.doc = d, .length = docs[d].length};
            reference[d] = (double)sums[d];
        }
        if (k == 0) s.reference = reference;
        batch_pack(&g.batch, docs, 6);
        pairs_fill(&g.batch, &s, &index, pairs);
        golden_loss(3);
        golden_close();
    }
}

// SHARDED: the same weights, all of them exact in bf16, in two files, as large models come. The
// last three are of make_muon_golden.py, make_lora_golden.py and make_nf4_golden.py.
enum { AT_ONCE, IN_CHUNKS, SHARDED, MUON, ADAPTERS, BESIDE_NF4 };

static void check_golden(const char *name, int how) {
    const int chunk = how == IN_CHUNKS ? 64 : 0;
    char base[IO_PATH_MAX];
    if (how >= ADAPTERS) {
        MUST(lora_config_read(&adapters, base, printed("tests/golden/%s/lora", name), &err));
        CHECK(strcmp(base, "..") == 0);
        adapters.nf4 = how == BESIDE_NF4;
    }
    golden_open(name, chunk, how == MUON);
    adapters = (LoraConfig){0};
    CHECK(chunk == 0 || (g.model.settings.head_chunk == chunk && g.batch.total_tokens > 2 * chunk));
    if (how == SHARDED) {
        weights_init(llama_parameters(&g.model), 1);
        MUST(parameters_load(llama_parameters(&g.model), false,
                             printed("tests/golden/%s_bf16_sharded", name), &err));
    }
    if (how == MUON) {
        open_expected("muon");
        golden_training("losses", "norms");
    } else {
        golden_loss(g.batch.num_targets);
        if (chunk == 0) golden_logits();
        if (chunk == 0) golden_training("train_losses", "grad_norms");
    }
    golden_close();
}

// Every golden that has this file
static void check_goldens(const char *file, int how) {
    static const char *const names[] = {
        "gqa3_tied", "llama3_rope", "mha_untied", "mistral_linear_rope", "odd_sizes",
        "qwen2", "qwen3", "smollm3_yarn_rope", "granite", "granite4"};
    int checked = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (path_exists(printed("tests/golden/%s/%s", names[i], file)))
            check_golden(names[i], how), checked++;
    CHECK_MSG(checked >= 2, "%d goldens found: run from the repository's root", checked);
}

TEST(goldens_of_transformers) { check_goldens("expected.safetensors", AT_ONCE); }
TEST(goldens_with_the_head_and_the_weights_in_chunks) {
    check_goldens("expected.safetensors", IN_CHUNKS);
}
TEST(goldens_of_muon) { check_goldens("muon.safetensors", MUON); }
TEST(goldens_of_peft) { check_goldens("lora/expected.safetensors", ADAPTERS); }
TEST(golden_of_peft_beside_nf4) { check_golden("gqa3_tied", BESIDE_NF4); }
TEST(golden_of_sharded_bf16_weights) { check_golden("mha_untied", SHARDED); }

// ---- Layouts and isolation ----------------------------------------------------------------------

static const int lengths[] = {17, 1, 0, 64, 5, 33, 2, 48, 1, 1, 30};
enum { NUM_DOCS = sizeof lengths / sizeof *lengths, ROW = 64 };
static const LlamaSettings usual;

// A model, and a packed batch of documents of these lengths
static void open_packed(LlamaModel *m, Batch *b, const LlamaConfig *c, LlamaSettings settings,
                        bool masked) {
    settings.micro_batch_tokens = 256, settings.max_seqlen = ROW, settings.train = true;
    start_model(m, c, settings);
    make_docs(lengths, NUM_DOCS, c->vocab_size, masked);
    batch_init(b, 256, NUM_DOCS);
    batch_pack(b, docs, NUM_DOCS);
}

// A loss and all gradients of the same documents as those of the packed ones
static void check_like_packed(const LlamaModel *m, const char *what, double loss, double expected,
                              const float *grads) {
    const double e = relative_l2(m->grads, grads, m->num_elements);
    CHECK_MSG(fabs(loss - expected) <= 1e-7 * expected, "%s: loss %.9g, packed %.9g", what, loss,
              expected);
    CHECK_MSG(e <= 1e-6, "%s: gradients differ by %.3g", what, e);
}

static void check_layouts(const LlamaConfig *c, bool masked) {
    MODEL m;
    const Layout layouts[] = {LAYOUT_PADDED, LAYOUT_REPAD};
    LlamaSettings settings = settings_of(NUM_DOCS * ROW, ROW);
    BATCH b;
    settings.layouts |= 1u << LAYOUT_REPAD;
    settings.ranks.most_documents = NUM_DOCS * ROW;
    start_model(&m, c, settings);
    make_docs(lengths, NUM_DOCS, c->vocab_size, masked);
    batch_init(&b, NUM_DOCS * ROW, NUM_DOCS * ROW);
    AUTO_FREE float *grads = (float *)host_calloc(m.num_elements, sizeof *grads, "gradients");
    batch_pack(&b, docs, NUM_DOCS);
    const int32_t targets = b.num_targets;
    const double loss = forward_backward(&m, &b);
    memcpy(grads, m.grads, m.num_elements * sizeof *grads);
    double of_packed[MAX_DOCS], of_layout[MAX_DOCS];
    check_documents(&m, &b, loss * targets, of_packed);
    for (int k = 0; k < 2; k++) {
        batch_fill(&b, layouts[k], docs, NUM_DOCS, ROW);
        CHECK(b.num_targets == targets);
        check_like_packed(&m, layout_name(layouts[k]), forward_backward(&m, &b), loss, grads);
        check_documents(&m, &b, loss * targets, of_layout);
        CHECK(memcmp(of_layout, of_packed, NUM_DOCS * sizeof *of_packed) == 0);
    }
    llama_begin_step(&m, targets);
    for (int d = 0; d < NUM_DOCS; d++) {  // those without a target add nothing, not even NaN
        batch_pack(&b, docs + d, 1);
        llama_pass(&m, &b, true, NULL, NULL);
        llama_add_losses(&m);
    }
    check_like_packed(&m, "micro-batches", zero_read_step(&m.zero).loss_sum / targets, loss, grads);
    batch_fill(&b, LAYOUT_ROWS, docs, NUM_DOCS, ROW);
    const double bleed = forward_backward(&m, &b);
    check_documents(&m, &b, bleed * targets, of_layout);
    CHECK_MSG(b.num_targets == targets && isfinite(bleed) && bleed != loss,
              "rows: loss %.9g, packed %.9g", bleed, loss);
}

TEST(packed_padded_repad_and_micro_batches_have_the_same_loss_and_gradients) {
    const LlamaConfig configs[] = {tiny_config(3, 1, 4, true), tiny_config(2, 2, 6, false),
                                   tiny_config(4, 2, 8, true), variant_config()};
    for (int i = 0; i < 8; i++) check_layouts(&configs[i / 2], i % 2);
}

static void row_losses(LlamaModel *m, const Batch *b, float *losses) {
    llama_pass(m, b, false, losses, NULL);
    llama_add_losses(m);
}

// Documents order[0] to order[n - 1] in a batch: the losses of `only`, or of each, have the bits
// that they have in `packed`.
static void check_same_losses(LlamaModel *m, Batch *b, const float *packed, const int *order, int n,
                              int only, const char *what) {
    DocView chosen[NUM_DOCS] = {0};
    float losses[256];
    for (int i = 0; i < n; i++) chosen[i] = docs[order[i]];
    batch_pack(b, chosen, n);
    row_losses(m, b, losses);
    for (int i = 0, at = 0; i < n; at += chosen[i++].length) {
        const float *expected = packed + (chosen[i].tokens - pool);
        if (only >= 0 && order[i] != only) continue;
        CHECK_MSG(memcmp(losses + at, expected, (size_t)chosen[i].length * sizeof *losses) == 0,
                  "document %d %s", order[i], what);
    }
}

static void check_isolation(const LlamaConfig *c) {
    float packed[256];
    int32_t before[256];
    int order[NUM_DOCS], reversed[NUM_DOCS];
    for (int d = 0; d < NUM_DOCS; d++) order[d] = d, reversed[NUM_DOCS - 1 - d] = d;
    for (int round = 0; round < 4; round++) {
        MODEL m;
        BATCH b;
        open_packed(&m, &b, c, usual, round % 2);
        row_losses(&m, &b, packed);
        memcpy(before, pool, sizeof before);
        check_same_losses(&m, &b, packed, reversed, NUM_DOCS, -1, "in reverse");
        for (int d = 0; d < NUM_DOCS; d++) {
            const int64_t first = docs[d].tokens - pool, end = first + lengths[d];
            check_same_losses(&m, &b, packed, &d, 1, d, "alone");
            for (int i = 0; i < 202; i++)
                if (i < first || i >= end) pool[i] = (int32_t)test_rng_below(23);
            check_same_losses(&m, &b, packed, order, NUM_DOCS, d, "beside others");
            memcpy(pool, before, sizeof before);
        }
    }
}

TEST(a_document_has_the_same_bits_alone_permuted_and_with_other_neighbours) {
    const LlamaConfig llama = tiny_config(3, 1, 4, true), variant = variant_config();
    check_isolation(&llama);
    check_isolation(&variant);
}

// The loss and all gradients of several layouts, bit for bit: of a model with room to spare, and of
// one with each recompute that padded rows fill to the last, so that no buffer is smaller than what
// is written to it. Buffers that layers share hold NaN at the start of a poison build.
static void check_recompute(LlamaConfig c) {
    enum { MODELS = 1 + LLAMA_NUM_RECOMPUTES };
    static LlamaModel m[MODELS];
    const Layout layouts[] = {LAYOUT_PACKED, LAYOUT_PADDED, LAYOUT_REPAD};
    BATCH b;
    c.num_layers = 3;
    batch_init(&b, NUM_DOCS * ROW, NUM_DOCS * ROW);
    for (int i = 0; i < MODELS; i++) {
        LlamaSettings settings = settings_of((i ? 1 : 4) * NUM_DOCS * ROW, ROW + !i);
        settings.layouts |= 1u << LAYOUT_REPAD, settings.head_chunk = 50;
        settings.recompute = (LlamaRecompute)(i ? i - 1 : 0);
        start_model(&m[i], &c, settings);
        CHECK(i == 0 || llama_memory_total(&m[i]) < llama_memory_total(&m[i - 1]));
    }
    for (int k = 0; k < 3; k++) {
        make_docs(lengths, NUM_DOCS, c.vocab_size, false);
        batch_fill(&b, layouts[k], docs, NUM_DOCS, ROW);
        CHECK(k == 0 || b.total_tokens == NUM_DOCS * ROW);
        const double loss = forward_backward(&m[0], &b);
        for (int i = 1; i < MODELS; i++) {
            CHECK(forward_backward(&m[i], &b) == loss && isfinite(loss));
            CHECK_MSG(memcmp(m[i].grads, m[0].grads, m[0].num_elements * sizeof(real)) == 0,
                      "%s, recompute %s: gradients differ", layout_name(layouts[k]),
                      llama_recompute_names[i - 1]);
        }
    }
    for (int i = 0; i < MODELS; i++) llama_free(&m[i]);
}

TEST(recomputed_activations_and_full_models_have_the_same_bits) {
    check_recompute(tiny_config(3, 1, 4, true));
    check_recompute(variant_config());
}

static PackingDelta packing_delta(LlamaModel *m, const Batch *b) {
    float losses[256];
    return packing_check(llama_face(m), b, b, losses);
}

// --check-packing accepts differences due to rounding and nothing else.
TEST(check_packing_tells_rounding_from_a_bug) {
    MODEL m;
    LlamaConfig c = tiny_config(3, 1, 4, false);
    BATCH b;
    open_packed(&m, &b, &c, usual, false);
    make_docs(lengths, NUM_DOCS, 22, true);
    pool[lengths[0]] = 22;
    batch_pack(&b, docs, NUM_DOCS);
    PackingDelta d = packing_delta(&m, &b);
    CHECK(d.loss == 0 && d.logit == 0 && d.grad < 1e-4 && packing_is_rounding(&d, false));
    int32_t row = 3;
    while (b.targets[row] < 0) row++;
    float before[256], after[256];
    row_losses(&m, &b, before);
    b.targets[row] = (b.targets[row] + 11) % 22;
    row_losses(&m, &b, after);
    const double expected = fabs((double)after[row] - (double)before[row]);
    d = packing_delta(&m, &b);
    // two losses below 8
    CHECK_MSG(expected > 0.01 && fabs(d.loss - expected) <= 8 * 0x1p-24,
              "max_loss %.9g, expected %.9g", d.loss, expected);
    CHECK(d.logit == 0 && !packing_is_rounding(&d, false));
    batch_pack(&b, docs, NUM_DOCS);
    for (int i = 17; i < 24; i++) b.position_ids[i]++;  // and other logits
    d = packing_delta(&m, &b);
    CHECK(d.logit > 1e-4 && !packing_is_rounding(&d, false));
    for (int i = 0; i < 9; i++) {
        PackingDelta x = {5e-5, 5e-5, 1, 5e-6, 1};
        double *const field[] = {&x.loss, &x.logit, &x.grad_error};
        CHECK(packing_is_rounding(&x, false));
        *field[i % 3] = i < 3 ? *field[i % 3] * 5 : i < 6 ? INFINITY : NAN;
        CHECK_MSG(!packing_is_rounding(&x, false), "%d", i);
    }
    // a document of one token: its row has no target, so that no loss and no gradient shows its NaN
    m.embed_tokens[22 * c.hidden_size] = NAN;
    batch_pack(&b, docs, NUM_DOCS);
    d = packing_delta(&m, &b);
    CHECK_MSG(!(d.logit <= 1) && !packing_is_rounding(&d, false), "%g", d.logit);
}

// Gradients that an earlier step left, here NaN, do not show in the next step, nor in a sum or a
// leaf whose micro-batch is missing or has no document.
static void check_left_over_gradients(bool tied) {
    MODEL m;
    const LlamaConfig c = tiny_config(3, 1, 4, tied);
    const LlamaSettings in_order = {
        .head_chunk = 64, .ranks = {.deterministic = true, .num_leaves = 2, .num_losses = 2}};
    BATCH b;
    open_packed(&m, &b, &c, in_order, false);
    const size_t bytes = m.num_elements * sizeof *m.grads;
    AUTO_FREE real *grads = host_calloc(1, bytes, "gradients");
    double loss = 0, squares = 0;
    for (int turn = 0; turn < 4; turn++) {
        for (int i = 0; turn && i < m.num_trained; i++)
            for (size_t k = 0; k < m.tensors[i].count; k++) m.grads[m.tensors[i].offset + k] = NAN;
        if (turn == 3) batch_pack(&b, docs, 0);
        if (turn == 2)
            llama_begin_step(&m, 1);
        else
            forward_backward(&m, &b);
        if (turn == 0) memcpy(grads, m.grads, bytes);
        zero_reduce(&m.zero);
        zero_update(&m.zero, (AdamW){.eps = 1, .t = 1}, 0);
        const StepScalars step = zero_read_step(&m.zero);
        if (turn == 0) loss = step.loss_sum, squares = step.norm_squared;
        CHECK(loss > 0 && step.loss_sum == (turn < 2 ? loss : 0));
        CHECK(squares > 0 && step.norm_squared == (turn < 2 ? squares : 0));
        for (size_t i = 0; i < m.num_elements; i++) CHECK(m.grads[i] == (turn < 2 ? grads[i] : 0));
    }
}

TEST(gradients_left_over_never_show) {
    check_left_over_gradients(true);
    check_left_over_gradients(false);
}

// ---- Initial weights, saving --------------------------------------------------------------------

// Norms are 1, biases and B of adapters 0; A of adapters is uniform, as PEFT's.
static void check_initial_weights(const LlamaModel *m) {
    for (const Parameter *t = m->tensors; t < m->tensors + m->num_trained; t++) {
        const bool is_a = strstr(t->name, "lora_A"), is_b = strstr(t->name, "lora_B"),
                   residual = strstr(t->name, "o_proj") || strstr(t->name, "down_proj");
        const double n = (double)t->count, bound = 1 / sqrt((double)t->cols),
                     expected = is_a       ? bound / sqrt(3)
                                : residual ? 0.2 / sqrt(2 * m->config.num_layers)
                                           : 0.2;
        double sum = 0, squares = 0, most = 0;
        for (size_t k = 0; k < t->count; k++) {
            const double w = (double)m->weights[t->offset + k];
            sum += w, squares += w * w, most = fmax(most, fabs(w));
        }
        const double mean = sum / n, std = sqrt(squares / n - mean * mean);
        if (is_b || !t->cols)
            CHECK(std == 0 && mean == (is_b || strstr(t->name, "bias") ? 0 : 1));
        else
            CHECK_MSG(fabs(std - expected) < 5 * expected / sqrt(2 * n) &&
                          fabs(mean) < 5 * expected / sqrt(n),
                      "%s: std %g, expected %g, mean %g", t->name, std, expected, mean);
        if (is_a) CHECK_MSG(most < bound * (1 + 1e-6) && most > 0.99 * bound, "%s", t->name);
    }
}

TEST(initial_weights_have_their_spread_and_depend_only_on_the_seed) {
    LlamaConfig c = tiny_config(3, 1, 64, false);
    c.hidden_size = 192, c.vocab_size = 300;
    c.qk_norm = c.qkv_bias = true;
    for (int lora = 0; lora < 2; lora++) {
        MODEL a, b;
        if (lora) adapters = (LoraConfig){16, 16, {true, false, false, true}, false};
        start_model(&a, &c, settings_of(16, 16));
        start_model(&b, &c, settings_of(32, 32));
        adapters.rank = 0;
        CHECK(a.num_trained == (lora ? 2 * 2 * c.num_layers : a.num_tensors));
        weights_init(llama_parameters(&a), 7);
        weights_init(llama_parameters(&b), 7);
        check_initial_weights(&a);
        CHECK(memcmp(a.weights, b.weights, a.num_elements * sizeof *a.weights) == 0);
        weights_init(llama_parameters(&b), 8);
        CHECK(a.weights[5] != b.weights[5]);
    }
}

// Weights into final/ in files of at most max_file_bytes
static bool save_final(Parameters p, ModelDtype dtype, uint64_t max_file_bytes, Error *err) {
    static Checkpoint ck;
    const bool ok = checkpoint_begin(&ck, scratch(""), 1, "final", err) &&
                    model_files_write_weights(p, dtype, max_file_bytes, &ck, err) &&
                    checkpoint_publish(&ck, err);
    checkpoint_abort(&ck);
    return ok;
}

static size_t elements_read;
static void (*get_weights)(void *model, ParameterArena arena, size_t offset, float *values,
                           size_t n);
static void count_elements(void *model, ParameterArena arena, size_t offset, float *values,
                           size_t n) {
    elements_read += n;
    get_weights(model, arena, offset, values, n);
}

// In host memory all at once, then 64 elements at a time
TEST(weights_in_one_file_and_in_several_come_back) {
    MODEL a, b;
    int64_t step = 0;
    LlamaConfig c = variant_config();
    c.tie_word_embeddings = false;
    const uint64_t full = 2 * 12 * 20;  // elements of up_proj and down_proj: a full file
    const struct {
        ModelDtype dtype;
        uint64_t max_file_bytes;
        const char *last_file;
    } cases[] = {{MODEL_FP32, MODEL_FILE_BYTES, "model.safetensors"},
                 {MODEL_BF16, MODEL_FILE_BYTES, "model.safetensors"},
                 {MODEL_FP32, 4 * full, "model-00007-of-00007.safetensors"},
                 {MODEL_BF16, 2 * full, "model-00007-of-00007.safetensors"},
                 {MODEL_FP32, 1, "model-00031-of-00031.safetensors"}};
    start_model(&a, &c, settings_of(16, 16));
    start_model(&b, &c, settings_of(16, 16));
    const size_t whole = a.settings.io_chunk;
    for (size_t i = 0; i < 10; i++) {
        const ModelDtype dtype = cases[i / 2].dtype;
        const char *last_file = cases[i / 2].last_file;
        a.settings.io_chunk = b.settings.io_chunk = i % 2 ? 64 : whole;
        MUST(save_final(llama_parameters(&a), dtype, cases[i / 2].max_file_bytes, &err));
        MUST(checkpoint_verify(scratch("final"), &step, &err));
        CHECK_MSG(path_exists(scratch(printed("final/%s", last_file))), "%zu", i);
        CHECK(path_exists(scratch("final/model.safetensors.index.json")) == (i > 3));
        weights_init(llama_parameters(&b), 7);
        vary_vectors(&b);
        CHECK(memcmp(a.weights, b.weights, a.num_elements * sizeof *a.weights) == 0);
        weights_init(llama_parameters(&b), 99);
        MUST(parameters_load(llama_parameters(&b), false, scratch("final"), &err));
        for (size_t k = 0; k < a.num_elements; k++) {
            const float saved = (float)a.weights[k], found = (float)b.weights[k];
            const float tolerance = dtype == MODEL_BF16 ? 0x1p-8f : 0;
            CHECK_MSG(fabsf(found - saved) <= tolerance * fabsf(saved), "%zu: %zu", i, k);
        }
    }
    // every weight is read even when a file fails: other ranks wait for it
    Parameters p = llama_parameters(&a);
    size_t elements = 0;
    for (int i = 0; i < p.num; i++) elements += p.list[i].count;
    get_weights = p.get, p.get = count_elements;
    a.weights[a.tensors[3].offset] = (real)NAN;
    REFUSED(EXIT_DIVERGED, "", save_final(p, MODEL_BF16, 1000, &err));
    CHECK(elements_read == elements);
    FileWriter w;
    MUST(parameters_save(llama_parameters(&a), true, "F32", scratch("moments"), &w, &err));
    for (int i = 0; i < 2; i++) {
        MODEL other;
        c.num_layers = 1 + i, c.intermediate_size = 24;
        start_model(&other, &c, settings_of(16, 16));
        REFUSED(EXIT_BAD_INPUT, i ? "shape" : "unknown: model.layers.1.",
                parameters_load(llama_parameters(&other), false, scratch("final"), &err));
        REFUSED(EXIT_CHECKPOINT_MISFIT, "",
                parameters_load(llama_parameters(&other), true, scratch("moments"), &err));
    }
}

TEST(a_head_beside_a_tied_one_is_the_embedding) {
    MODEL a, b;
    LlamaConfig c = variant_config();
    c.tie_word_embeddings = true;
    start_model(&b, &c, settings_of(16, 16));
    c.tie_word_embeddings = false;
    start_model(&a, &c, settings_of(16, 16));
    const Parameters p = llama_parameters(&a), tied = llama_parameters(&b);
    const Parameter *head = p.list, *embed = p.list;
    while (strcmp(head->name, "lm_head.weight") != 0) head++;
    while (strcmp(embed->name, "model.embed_tokens.weight") != 0) embed++;
    weights_init(p, 7);
    MUST(save_final(p, MODEL_FP32, MODEL_FILE_BYTES, &err));
    REFUSED(EXIT_BAD_INPUT, "tie_word_embeddings",
            parameters_load(tied, false, scratch("final"), &err));
    memcpy(a.weights + head->offset, a.weights + embed->offset, embed->count * sizeof *a.weights);
    MUST(save_final(p, MODEL_FP32, MODEL_FILE_BYTES, &err));
    MUST(parameters_load(tied, false, scratch("final"), &err));
}

// ---- Memory: the regions of the arenas and the sizes stated in llama.h --------------------------

// Of any number of ranks: shards are all elements in order, none cuts a matrix of Muon's, each has
// its share of the work to within a matrix or block, and moments take what is left for them.
static void check_shard(const LlamaModel *m, bool muon, size_t first) {
    const Zero *z = &m->zero;
    const int32_t rank = z->settings.rank, ranks = z->settings.num_ranks;
    double work = 0, all = 0, largest = 2800.0 * (double)m->num_elements / 256 + 64 * 2800;
    size_t moments = 0;
    const size_t end = first + z->shard_count;
    CHECK(z->shard_first == first && (rank + 1 < ranks || end == m->num_elements));
    for (const Parameter *t = m->tensors; t < m->tensors + m->num_tensors; t++) {
        const bool matrix = muon && t->cols && strstr(t->name, "layers");
        const double a = (double)t->rows, b = (double)t->cols, side = a < b ? a : b;
        const double wide = 128 * ceil(side / 128), area = 128 * wide * ceil(a * b / side / 128);
        const double cost =  // three products, and bytes
            matrix ? 5 * 2 * wide * (area + wide * wide + area) + 7600 * a * b
                   : 2800 * (double)t->count;
        const size_t from = t->offset > first ? t->offset : first,
                     to = t->offset + t->count < end ? t->offset + t->count : end,
                     own = from < to ? to - from : 0;
        CHECK_MSG(!matrix || own == 0 || own == t->count, "%s is cut", t->name);
        if (matrix && cost > largest) largest = cost;
        all += cost, work += cost * (double)own / (double)t->count;
        moments += matrix ? own : 2 * own;
    }
    CHECK_MSG(fabs(work - all / ranks) <= largest, "rank %d of %d: %g of %g", rank, ranks, work,
              all);
    const double bytes = 4.0 * (double)moments, found = (double)m->arenas[LLAMA_OPTIMIZER].bytes;
    CHECK_MSG(fabs(found - bytes) < 64e3, "%g, expected %g and small gaps", found, bytes);
}

TEST(shards_are_equal_in_work_and_cut_no_matrix) {
    const char *const names[] = {"demo", "smollm2-135m", "llama-3.1-8b"};
    for (int i = 0; i < 3 * 2 * 5; i++) {
        LlamaConfig c;
        LlamaModel m;
        LlamaSettings s = settings_of(16, 16);
        CHECK(llama_config_builtin(&c, names[i / 10]));
        s.muon = i % 2, s.ranks.num_ranks = i / 2 % 5 * 2 + 1;
        for (size_t first = 0; s.ranks.rank < s.ranks.num_ranks; s.ranks.rank++) {
            llama_plan(&m, &c, s);
            check_shard(&m, s.muon, first);
            first += m.zero.shard_count;
            llama_free(&m);
        }
    }
}

// ---- Adapters of a frozen model -----------------------------------------------------------------

// Blocks that begin and end inside of rows
TEST(merged_weights_have_the_losses_of_adapters) {
    MODEL m, merged;
    const LlamaConfig c = variant_config();
    float adapted[256], losses[256];
    BATCH b;
    Parameters p;
    start_model(&merged, &c, settings_of(256, ROW));
    MUST(save_final(llama_parameters(&merged), MODEL_FP32, MODEL_FILE_BYTES, &err));
    adapters = (LoraConfig){4, 6, {true, false, true, true, true, false, true}, false};
    open_packed(&m, &b, &c, usual, false);
    adapters.rank = 0;
    row_losses(&m, &b, adapted);
    LoraMerge merge = {llama_frozen_parameters(&m), llama_parameters(&m), &m.settings.lora, {0}};
    MUST(lora_merge_open(&merge, scratch("final"), &p, &err));
    p.block = 37;
    MUST(save_final(p, MODEL_FP32, MODEL_FILE_BYTES, &err));
    MUST(parameters_load(llama_parameters(&merged), false, scratch("final"), &err));
    safetensors_close(&merge.files);
    row_losses(&merged, &b, losses);
    for (int t = 0; t < b.total_tokens; t++)
        CHECK_MSG(fabsf(losses[t] - adapted[t]) <= 1e-5f * (1 + adapted[t]), "%d: %g, expected %g",
                  t, (double)losses[t], (double)adapted[t]);
}

TEST(adapters_keep_the_promises_of_a_model) {
    LlamaConfig a = tiny_config(3, 1, 4, true), v = variant_config();
    adapters = (LoraConfig){4, 10, {true, false, true, true, false, true, true}, false};
    check_left_over_gradients(false);
    for (int nf4 = 0; nf4 < 2; nf4++, a.hidden_size = v.hidden_size = 16) {
        adapters.nf4 = nf4;
        check_layouts(&v, true);
        check_isolation(&a);
        check_recompute(v);
    }
    adapters = (LoraConfig){0};
}

#else  // GRADCHECK: the gradient of the whole model

// Without a change to the gradients
static double loss_of(LlamaModel *m, const Batch *b) {
    device_zero(m->zero.step, sizeof(StepScalars));
    llama_pass(m, b, false, NULL, NULL);
    llama_add_losses(m);
    return zero_read_step(&m->zero).loss_sum / b->num_targets;
}

static bool paired;  // documents, whose weights are floats

// Every element of every tensor: fourth-order central differences, relative L2 per tensor.
static void check_model_gradient(const LlamaConfig *c, Layout layout, bool masked) {
    MODEL m;
    const int lengths[] = {5, 1, 0, 9, 2, 7};
    const double h = 5e-4;  // truncation ~ h^4, rounding ~ 1e-16 / h: both far below 1e-8
    LlamaSettings settings = settings_of(64, 10);
    BATCH b;
    settings.layouts |= 1u << LAYOUT_REPAD;
    settings.pairs = paired;
    settings.ranks.most_documents = 6;
    start_model(&m, c, settings);
    make_docs(lengths, 6, c->vocab_size, masked);
    batch_init(&b, 64, 64);
    batch_fill(&b, layout, docs, 6, 10);
    if (paired) set_pairs(&b);
    forward_backward(&m, &b);
    for (int i = 0; i < m.num_trained; i++) {
        const Parameter *t = &m.tensors[i];
        double error = 0, norm = 0;
        for (size_t k = 0; k < t->count; k++) {
            double *w = &m.weights[t->offset + k], w0 = *w, f[4], steps[4] = {-2 * h, -h, h, 2 * h};
            for (int s = 0; s < 4; s++) *w = w0 + steps[s], f[s] = loss_of(&m, &b);
            *w = w0;
            double d = (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h),
                   e = d - m.grads[t->offset + k];
            error += e * e, norm += d * d;
        }
        CHECK_MSG(sqrt(error / norm) <= (paired ? 0x1p-24 : 1e-8), "%s: relative L2 %.3g", t->name,
                  sqrt(error / norm));
    }
}

static LlamaConfig smaller(LlamaConfig c, int layers, int intermediate_size) {
    c.num_layers = layers, c.intermediate_size = intermediate_size, c.vocab_size = 11;
    return c;
}

// One case: build/fp64/test_llama --filter gradients_of_a_variant
#define GRADIENTS(name_, config_, layout_, masked_, ...)          \
    TEST(gradients_of_##name_) {                                  \
        const LlamaConfig config = config_;                       \
        adapters = (LoraConfig){__VA_ARGS__};                     \
        check_model_gradient(&config, LAYOUT_##layout_, masked_); \
        adapters = (LoraConfig){0};                               \
    }

#define ONE_LAYER smaller(tiny_config(2, 1, 4, true), 1, 20)
#define VARIANT smaller(variant_config(), 2, 8)
GRADIENTS(three_heads_a_group, smaller(tiny_config(3, 1, 4, true), 2, 8), PACKED, false, 0)
GRADIENTS(an_untied_head, smaller(tiny_config(2, 2, 6, false), 2, 8), PACKED, true, 0)
GRADIENTS(a_variant, VARIANT, REPAD, true, 0)
GRADIENTS(padded, ONE_LAYER, PADDED, true, 0)
GRADIENTS(rows, ONE_LAYER, ROWS, false, 0)
GRADIENTS(repad, ONE_LAYER, REPAD, true, 0)
GRADIENTS(all_adapters, VARIANT, PACKED, true, 3, 5, {1, 1, 1, 1, 1, 1, 1}, false)
TEST(gradients_of_pairs) {
    const LlamaConfig config = ONE_LAYER;
    paired = true;
    check_model_gradient(&config, LAYOUT_PACKED, true);
    paired = false;
}
GRADIENTS(some_adapters, VARIANT, PACKED, false, 3, 5, {0, 1, 0, 0, 1, 0, 0}, false)

#endif

TEST_MAIN()
