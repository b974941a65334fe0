// CUDA graphs: one recording replayed for micro-batches of different documents gives the same bits
// as separate launches, independent of previous memory contents, and padding changes nothing.
#include <sys/wait.h>
#include <unistd.h>

#include "trainer.h"

#include "test.h"

enum { CAPACITY = 160, SEGMENTS = 12, LONGEST = 96, VOCAB = 64, MOST_DOCS = 8 };

static LlamaConfig tiny_config(void) {
    LlamaConfig c;
    memset(&c, 0, sizeof c);
    c.vocab_size = VOCAB, c.hidden_size = 64, c.intermediate_size = 64, c.num_layers = 2;
    c.num_heads = 3, c.num_kv_heads = 1, c.head_dim = 64;
    c.max_position_embeddings = 256, c.rms_norm_eps = 1e-5f, c.rope_theta = 10000;
    c.tie_word_embeddings = true, c.initializer_range = 0.1f, c.bos_token_id = 1;
    c.eos_token_id = 2;
    return c;
}

// With all that other types of model have: biases and norms of heads, layers without RoPE, a head
// that is not the embedding
static LlamaConfig variant_config(void) {
    LlamaConfig c = tiny_config();
    c.qkv_bias = c.qk_norm = true, c.no_rope_interval = 2, c.tie_word_embeddings = false;
    return c;
}

static void make_model(LlamaModel *m, LlamaConfig config, int num_leaves,
                       LlamaRecompute recompute) {
    Error err = {0};
    const DeviceOptions options = {0, 0};
    const char *missing = device_init(&options);
    if (missing) SKIP("%s", missing);
    LlamaSizes sizes = {CAPACITY, LONGEST, false, true, CAPACITY / 2, 0};
    llama_plan(m, &config, sizes);
    LlamaRanks deterministic_reduction = {0, 1, false, true, num_leaves, num_leaves};
    if (num_leaves) llama_plan_ranks(m, deterministic_reduction);
    llama_plan_recompute(m, recompute);
    CHECK_MSG(llama_allocate(m, &err), "%s", err.what);
    llama_init(m, 7);
}

// Random documents that fill most of a micro-batch; segments > 0: padded to that many
static void random_batch(Batch *b, int segments) {
    static int32_t tokens[CAPACITY];
    DocView docs[MOST_DOCS];
    int n = 0, used = 0;
    for (int i = 0; i < CAPACITY; i++) tokens[i] = (int32_t)test_rng_below(VOCAB);
    while (n < MOST_DOCS) {
        const int length = 1 + (int)test_rng_below(LONGEST);
        if (used + length > CAPACITY) break;
        DocView doc = {tokens + used, length, n % 2 ? 3 : -1, NULL};
        docs[n++] = doc;
        used += length;
    }
    batch_pack(b, docs, n);
    if (segments) CHECK(batch_complete(b, CAPACITY, segments, LONGEST));
}

// Two micro-batches, as from the loader
typedef struct {
    Batch micro[2];
    int32_t own_micros[2];
    StepData data;
} Step;

static void make_step(Step *s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < 2; i++) batch_init(&s->micro[i], CAPACITY, CAPACITY);
    for (int i = 0; i < 2; i++) s->own_micros[i] = i;
    s->data.micro = s->micro;
    s->data.own_micros = s->own_micros;
    s->data.num_micro = s->data.plan.num_micro = 2;
}

static void next_step(Step *s, int segments) {
    s->data.num_targets = 0;
    for (int i = 0; i < 2; i++) {
        random_batch(&s->micro[i], segments);
        s->data.num_targets += s->micro[i].num_targets;
    }
}

static void free_step(Step *s) {
    for (int i = 0; i < 2; i++) batch_free(&s->micro[i]);
}

static PassGraph graph_of(int32_t total_tokens, int32_t num_docs) {
    return (PassGraph){.total_tokens = total_tokens, .num_docs = num_docs};
}

// NaN in all memory that a pass must write before it reads it
static void poison(LlamaModel *m) {
    const LlamaScratch *s = &m->scratch;
    const size_t T = CAPACITY, C = 64, F = 64, QKV = 5 * 64, HD = 3 * 64, bf16 = sizeof(floatX);
    const struct {
        void *at;
        size_t bytes;
    } buckets[] = {{m->arenas[LLAMA_ACTIVATIONS].base, m->arenas[LLAMA_ACTIVATIONS].bytes},
                   {s->logits, (size_t)m->head_chunk * VOCAB * bf16},
                   {s->dresid, T * C * bf16},
                   {s->dnorm, T * C * bf16},
                   {s->dqkv, T * QKV * bf16},
                   {s->dattn, T * HD * bf16},
                   {s->dgate_up, T * 2 * F * bf16},
                   {s->dswiglu, T * F * bf16},
                   {s->attn_delta, 3 * T * sizeof(real)}};
    static char nan[1 << 20];
    memset(nan, 0xff, sizeof nan);
    for (size_t i = 0; i < sizeof buckets / sizeof *buckets; i++) {
        CHECK(buckets[i].bytes <= sizeof nan);
        device_upload(buckets[i].at, nan, buckets[i].bytes);
    }
}

static void check_same_weights(const LlamaModel *a, const LlamaModel *b, int step) {
    const size_t n = a->num_elements;
    float *x = (float *)malloc(n * sizeof *x), *y = (float *)malloc(n * sizeof *y);
    weights_to_host(x, a->weights, a->master_lo, n);
    weights_to_host(y, b->weights, b->master_lo, n);
    const bool same = memcmp(x, y, n * sizeof *x) == 0;
    free(x), free(y);
    CHECK_MSG(same, "step %d: weights differ", step);
}

// Steps of two micro-batches with graphs, one for each that begins a sum and one for those that add
// to it, and the same with separate launches
static void train_both(LlamaConfig config, int steps, int num_leaves, bool with_nan,
                       LlamaRecompute recompute) {
    static LlamaModel recorded, launched;
    static Step step;
    PassGraph graph = graph_of(CAPACITY, SEGMENTS), none = graph_of(0, 0);
    make_model(&recorded, config, num_leaves, recompute);
    make_model(&launched, config, num_leaves, LLAMA_RECOMPUTE_OFF);
    make_step(&step);
    const uint64_t graphs = device_memory().graphs;
    for (int i = 0; i < steps; i++) {
        const AdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, i + 1};
        next_step(&step, SEGMENTS);
        if (with_nan) poison(&recorded);
        const DeviceMemory before = device_memory();
        const StepScalars a = train_step(&recorded, &step.data, hyper, 1, &graph);
        CHECK(device_memory().waits == before.waits + 1);
        CHECK(device_memory().count == before.count);
        const StepScalars b = train_step(&launched, &step.data, hyper, 1, &none);
        CHECK_MSG(a.loss_sum == b.loss_sum && a.norm_squared == b.norm_squared && a.scale > 0,
                  "step %d: loss %.9g, norm %.9g; without a graph %.9g, %.9g", i, a.loss_sum,
                  a.norm_squared, b.loss_sum, b.norm_squared);
        check_same_weights(&recorded, &launched, i);
    }
    const int num_graphs = num_leaves ? 1 : 2;  // each leaf is a sum of its own
    CHECK(device_memory().graphs == graphs + num_graphs);
    CHECK(graph.num_passes == 2 * steps && graph.num_launches == 2 * steps - num_graphs);
    CHECK(none.num_passes == 2 * steps && none.num_launches == 0);
    pass_graph_free(&graph);
    free_step(&step);
    llama_free(&recorded);
    llama_free(&launched);
}

// Must be first: a process that has started CUDA must not fork.
TEST(a_copy_from_the_host_cannot_be_recorded) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        static LlamaModel m;
        int32_t x = 1;
        if (!freopen("/dev/null", "w", stderr)) _exit(1);
        make_model(&m, tiny_config(), 0, LLAMA_RECOMPUTE_OFF);
        device_graph_begin();
        device_upload(m.staging, &x, sizeof x);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_MSG(WEXITSTATUS(status) == 11, "exit code %d", WEXITSTATUS(status));
}

TEST(steps_through_one_graph_have_the_bits_of_launches) {
    train_both(tiny_config(), 10, 0, false, LLAMA_RECOMPUTE_OFF);
}
TEST(deterministic_steps_as_well) { train_both(tiny_config(), 4, 2, false, LLAMA_RECOMPUTE_ON); }
TEST(a_graph_reads_nothing_that_it_has_not_written) {
    train_both(tiny_config(), 4, 0, true, LLAMA_RECOMPUTE_FULL);
}

TEST(steps_of_other_types_of_model_as_well) {
    train_both(variant_config(), 3, 0, true, LLAMA_RECOMPUTE_ON);
    train_both(variant_config(), 2, 2, true, LLAMA_RECOMPUTE_FULL);
}

// A micro-batch with more documents than the graph has room for runs as separate launches.
TEST(a_micro_batch_of_another_size_runs_without_the_graph) {
    static LlamaModel m;
    static Step step;
    const int sizes[6] = {SEGMENTS, 0, SEGMENTS, SEGMENTS + 1, SEGMENTS, SEGMENTS - 1};
    PassGraph graph = graph_of(CAPACITY, SEGMENTS);
    make_model(&m, tiny_config(), 0, LLAMA_RECOMPUTE_OFF);
    make_step(&step);
    for (int i = 0; i < 6; i++) {
        const AdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, i + 1};
        next_step(&step, sizes[i]);
        CHECK(train_step(&m, &step.data, hyper, 1, &graph).scale > 0);
        CHECK(graph.num_launches == 2 * (i / 2));
    }
    CHECK(graph.num_passes == 12);
    pass_graph_free(&graph);
    free_step(&step);
    llama_free(&m);
}

// Padding a batch does not change its documents' losses and gradients: in the emulator rows are
// equal bit for bit and gradients up to the rounding of longer sums. A GPU's matmul may add in
// another order at another length; bounds as for --check-packing.
TEST(padding_changes_nothing) {
    static LlamaModel m;
    static Batch batches[2];
    static float losses[2][CAPACITY], grads[2][1 << 17];
    make_model(&m, tiny_config(), 0, LLAMA_RECOMPUTE_OFF);
    CHECK(m.num_elements <= 1 << 17);
    const bool emulated = strstr(device_describe(), "emulated") != NULL;
    const double row_bound = emulated ? 0 : 0x1p-4, grad_bound = emulated ? 1e-5 : 0x1p-5;
    for (int turn = 0; turn < 5; turn++) {
        const uint64_t stream = test_rng_state;
        for (int i = 0; i < 2; i++) {
            Batch *b = &batches[i];
            test_rng_state = stream;  // the same documents
            if (!b->tokens) batch_init(b, CAPACITY, CAPACITY);
            random_batch(b, i == 1 ? SEGMENTS : 0);
            llama_zero_grads(&m, b->num_targets);
            llama_set_batch(&m, b);
            pass_without_graph(&m);
            device_download(losses[i], m.scratch.losses, (size_t)b->real_tokens * sizeof(real));
            device_download(grads[i], m.grads, m.num_elements * sizeof(real));
        }
        for (int i = 0; i < batches[0].real_tokens; i++)
            CHECK_MSG(fabs((double)losses[0][i] - (double)losses[1][i]) <= row_bound,
                      "row %d: %.9g, with padding %.9g", i, (double)losses[0][i],
                      (double)losses[1][i]);
        double error = 0, norm = 0;
        for (size_t i = 0; i < m.num_elements; i++) {
            const double x = grads[0][i], y = grads[1][i];
            error += (x - y) * (x - y), norm += x * x;
        }
        CHECK_MSG(norm > 0 && sqrt(error / norm) <= grad_bound, "relative L2 %g",
                  sqrt(error / norm));
    }
    for (int i = 0; i < 2; i++) batch_free(&batches[i]);
    llama_free(&m);
}

// 1056 MiB of bf16 logits in multiples of 11 tiles of 128 tokens, at least one
TEST(tokens_of_a_head_chunk) {
    static const int32_t vocab[] = {49152, 128256, 32000, 1 << 20};
    static const int32_t expected[] = {11264, 4224, 16896, 1408};
    const LlamaSizes large = {.micro_batch_tokens = 1 << 20}, small = {.micro_batch_tokens = 100};
    for (int i = 0; i < 4; i++) {
        const LlamaConfig c = {.vocab_size = vocab[i]};
        CHECK_MSG(llama_head_chunk(&c, &large) == expected[i], "%d tokens of vocabulary %d",
                  llama_head_chunk(&c, &large), vocab[i]);
        CHECK(llama_head_chunk(&c, &small) == 100);
    }
}

TEST_MAIN()
