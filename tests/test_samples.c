// data/use/text_writer.h and samples.h: generated texts, one at a time and together.
#include "../data/base/json.h"
#include "../data/use/samples.h"
#include "../llama.h"

#include "golden.h"
#include "scratch.h"

enum { MAX_TEXTS = 8, NEW_TOKENS = 12 };
static const TokenIds none;

static Options greedy(int32_t max_seqlen) {
    return (Options){.sample_tokens = NEW_TOKENS, .max_seqlen = max_seqlen, .top_p = 1};
}

static int most_docs;  // of one batch

static void count_docs(LlamaModel *m, const Batch *b, const int32_t *rows, int32_t n,
                       float *logits) {
    if (b->num_segments > most_docs) most_docs = b->num_segments;
    llama_next_logits(m, b, rows, n, logits);
}

// Freed at the end of the block
#define MODEL __attribute__((cleanup(llama_free))) LlamaModel
#define WRITER __attribute__((cleanup(texts_free))) TextWriter

// Its texts end at these tokens, or (NULL) at its own.
static ModelFace open_model(LlamaModel *m, const char *name, int32_t capacity, int32_t max_seqlen,
                            const TokenIds *ends) {
    const char *dir = printed("tests/golden/%s", name);
    LlamaConfig config;
    const LlamaSettings settings = {
        .micro_batch_tokens = capacity, .max_seqlen = max_seqlen, .cache_tokens = capacity};
    MUST(llama_config_read(&config, dir, &err));
    llama_plan(m, &config, settings);
    MUST(llama_allocate(m, &err) && parameters_load(llama_parameters(m), false, dir, &err));
    ModelFace face = llama_face(m);
    face.next_logits = count_docs;
    if (ends) face.text_ends = ends;
    return face;
}

// Writes one text, with this number.
static const Text *write_text(TextWriter *w, ModelFace face, int number, int64_t step) {
    text_add(w, 1)->number = number;
    texts_write(w, face, step);
    return w->texts;
}

// ---- Greedy decoding, against transformers' generate() on each document alone -------------------

// With ends, as transformers: nothing after the first of them. tight: the longest prompt is a full
// text, which leaves room for no other in the cache.
static void check_greedy(const char *name, const TokenIds *ends, bool tight) {
    SafetensorsSet set;
    MODEL m;
    int32_t tokens[256], cu[MAX_TEXTS + 1], expected[MAX_TEXTS * NEW_TOKENS];
    MUST(safetensors_open(&set, printed("tests/golden/%s/expected.safetensors", name), &err));
    read_ints(&set, "tokens", tokens, 256);
    read_ints(&set, "cu_seqlens", cu, MAX_TEXTS + 1);
    const int n = read_ints(&set, "greedy", expected, MAX_TEXTS * NEW_TOKENS) / NEW_TOKENS;
    int32_t longest = 0;
    for (int i = 0; i < n; i++) longest = cu[i + 1] - cu[i] > longest ? cu[i + 1] - cu[i] : longest;
    const Options o = greedy(tight ? longest : 96);
    WRITER w = {.o = &o};
    const ModelFace model = open_model(&m, name, tight ? longest : 256, o.max_seqlen, ends);
    for (int i = 0; i < n; i++) {
        const Text *text = text_add(&w, cu[i + 1] - cu[i]);
        memcpy(text->tokens, tokens + cu[i], (size_t)text->length * sizeof(int32_t));
    }
    most_docs = 0;
    texts_write(&w, model, 1);
    int num_ended = 0;
    CHECK_MSG(n == 7 && (tight ? most_docs < n : most_docs == n), "%d texts, %d in one batch", n,
              most_docs);
    for (int i = 0; i < n; i++) {
        const Text *text = &w.texts[i];
        const int32_t prompt = cu[i + 1] - cu[i];
        bool ended = false;
        for (int k = 0; k < NEW_TOKENS && prompt + k < o.max_seqlen && !ended; k++) {
            const int32_t found = prompt + k < text->length ? text->tokens[prompt + k] : -1;
            CHECK_MSG(found == expected[i * NEW_TOKENS + k], "%s: text %d, token %d: %d, not %d",
                      name, i, k, found, expected[i * NEW_TOKENS + k]);
            ended = token_ids_have(model.text_ends, found);
            CHECK(!ended || (text->ended && text->length == prompt + k + 1));
            num_ended += ended;
        }
    }
    CHECK(!ends || num_ended >= ends->n);
    safetensors_close(&set);
}

TEST(greedy_texts_of_unequal_prompts_are_those_of_transformers) {
    static const char *const names[] = {
        "gqa3_tied", "mha_untied",          "llama3_rope",       "odd_sizes", "qwen2",
        "qwen3",     "mistral_linear_rope", "smollm3_yarn_rope", "granite",   "granite4"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) check_greedy(names[i], NULL, i % 2);
}

TEST(greedy_texts_end_at_every_end_token) {
    check_greedy("mha_untied", &(TokenIds){3, 1, {0, 56, 40}}, false);
}

// ---- Tokens that no text should have ------------------------------------------------------------

enum { TEXT_A, SPECIAL, HOLE, TEXT_B, END, PADDING, ROW };  // ids; a row is more than the tokenizer

static void later_is_likelier(LlamaModel *m, const Batch *b, const int32_t *rows, int32_t n,
                              float *logits) {
    (void)m, (void)b, (void)rows;
    for (int32_t i = 0; i < n * ROW; i++) logits[i] = (float)(i % ROW);
}

static ModelFace fake_model(int32_t vocab_size, int32_t cache_tokens, const TokenIds *ends) {
    ModelFace face = {.vocab_size = vocab_size, .text_ends = ends, .max_rows = 8};
    face.cache_tokens = cache_tokens, face.next_logits = later_is_likelier;
    return face;
}

TEST(padding_and_special_tokens_are_never_sampled) {
    uint32_t offset[] = {0, 1, 2, 2, 3, 4};
    bool special[] = {false, true, false, false, true};
    const Tokenizer t = {.vocab_size = PADDING,
                         .offset = offset,
                         .bytes = (unsigned char *)"a$b.",
                         .special = special};
    const TokenIds end = {1, 1, {END}};
    Options o = greedy(96);
    for (int i = 0; i < 41; i++) {
        WRITER w = {.o = &o, .printer.tokenizer = &t};
        o.temperature = i % 40 ? 5 : 0;
        const Text *text = write_text(&w, fake_model(ROW, 96, i < 40 ? &none : &end), i, 1);
        for (int32_t k = 1; k < text->length && i < 40; k++)
            CHECK_MSG(text->tokens[k] == TEXT_B || (text->tokens[k] == TEXT_A && i > 0), "token %d",
                      text->tokens[k]);
        CHECK(i < 40 || (text->ended && text->length == 2 && text->tokens[1] == END));
    }
}

// Of one prompt at one step, each text has its own random numbers, and other ones at another step.
TEST(texts_of_a_prompt_differ) {
    enum { N = 4, LENGTH = 40 };
    const Options o = {.sample_tokens = LENGTH, .max_seqlen = LENGTH, .temperature = 9, .top_p = 1};
    int32_t first[N][LENGTH];
    for (int step = 0; step < 2; step++)
        for (int i = 0; i < N; i++) {
            WRITER w = {.o = &o};
            const Text *text = write_text(&w, fake_model(ROW, LENGTH, &none), i, step);
            CHECK(step == 0 || memcmp(text->tokens, first[i], sizeof first[i]) != 0);
            if (step == 0) memcpy(first[i], text->tokens, sizeof first[i]);
            for (int k = 0; k < i; k++) CHECK(memcmp(first[i], first[k], sizeof first[i]) != 0);
        }
}

enum { BYTES = 256, SPECIAL_TOKEN = BYTES, UNKNOWN };

// No special tokens (S), unknown ones (U) by number, no control characters but newlines and tabs,
// and each part between those tokens as UTF-8, with replacements as Python's errors="replace" has
// them
TEST(texts_are_shown_as_utf8_without_control_characters) {
#define R "\xef\xbf\xbd"
    static const char *const cases[][2] = {{"a\x1b\x7f\n\t\1b", "a\n\tb"},
                                           {"aSbUcUUS", "ab<257>c<257><257>"},
                                           {"\xc3\xa9\xe2\x82\xac", "\xc3\xa9\xe2\x82\xac"},
                                           {"\xf0\x9f\x99\x82 plain", "\xf0\x9f\x99\x82 plain"},
                                           {"a\xff z\x80", "a" R " z" R},
                                           {"\xc3(", R "("},
                                           {"\xe2\x82\xe2\x82\xac", R "\xe2\x82\xac"},
                                           {"\xf0\x9f\x99x", R "x"},
                                           {"\xed\xa0\x80", R R R},  // half a surrogate pair
                                           {"\xe0\x80\x80", R R R},  // overlong
                                           {"\xf4\x90\x80\x80", R R R R},
                                           {"\xc0\xaf", R R},
                                           {"\xf0\x9fS\x99\x82", R R R},
                                           {"\xe2\x82U\xac", R "<257>" R},
                                           {"\xff\xc3", R R}};
    static uint32_t offset[BYTES + 2];
    static bool special[BYTES + 1] = {[SPECIAL_TOKEN] = true};
    unsigned char bytes[BYTES + 1];
    for (int i = 0; i <= BYTES; i++) offset[i + 1] = (uint32_t)i + 1, bytes[i] = (unsigned char)i;
    const Tokenizer t = {
        .vocab_size = UNKNOWN, .offset = offset, .bytes = bytes, .special = special};
    RunLog log = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int32_t n = (int32_t)strlen(cases[i][0]);
        const Options o = {.max_seqlen = n, .sample_tokens = 1, .top_p = 1};
        WRITER w = {.o = &o, .printer.tokenizer = &t};
        const Text *text = text_add(&w, n);
        for (int32_t k = 0; k < n; k++) {
            const unsigned char byte = (unsigned char)cases[i][0][k];
            text->tokens[k] = byte == 'S' ? SPECIAL_TOKEN : byte == 'U' ? UNKNOWN : byte;
        }
        const char *expected = printed("--- sample 1 after step 1\n%s\n", cases[i][1]);
        capture_begin();
        samples_report(&w, fake_model(UNKNOWN + 1, n, &none), 1, &log);
        const char *shown = capture_end();
        CHECK_MSG(strcmp(shown, expected) == 0, "'%s', expected '%s'", shown, expected);
    }
}

// ---- Continued texts, single draws --------------------------------------------------------------

// A text that a second prompt continues, as a chat does, has the cache of its first half. The next
// token is that of the whole beginning in one batch.
TEST(a_continued_text_is_that_of_its_whole_beginning) {
    const int32_t more[] = {5, 61, 17, 30, 8};
    MODEL m;
    const Options o = greedy(96);
    WRITER w = {.o = &o}, other = {.o = &o};
    const ModelFace model = open_model(&m, "gqa3_tied", 96, 96, &none);
    Text *text = text_add(&w, 7);
    for (int32_t k = 0; k < 7; k++) text->tokens[k] = 3 * k + 1;
    texts_write(&w, model, 1);
    CHECK(text->length == 7 + NEW_TOKENS && text->num_cached == text->length - 1);
    memcpy(text->tokens + text->length, more, sizeof more);
    text->prompt_length = text->length += 5;
    const Text *whole = text_add(&other, text->length);
    memcpy(whole->tokens, text->tokens, (size_t)text->length * sizeof(int32_t));
    texts_write(&w, model, 1);
    texts_write(&other, model, 1);
    CHECK(text->length == whole->length);
    CHECK(memcmp(text->tokens, whole->tokens, (size_t)text->length * sizeof(int32_t)) == 0);
}

// One draw, plainly: candidates by falling probability, equal ones by id, from the fewest that sum
// to top_p of all.
static int32_t plain_sample(const float *logits, int32_t V, float temperature, float top_p,
                            float uniform) {
    float p[16], sum = 0, kept = 0;
    int32_t best = 0, order[16], n = 0;
    for (int32_t v = 0; v < V; v++) best = logits[v] > logits[best] ? v : best;
    if (temperature == 0) return best;
    for (int32_t v = 0; v < V; v++)
        sum += p[v] = expf((logits[v] - logits[best]) * (1 / temperature));
    for (int32_t v = 0, k; v < V; order[k] = v++)
        for (k = v; k > 0 && p[order[k - 1]] < p[v]; k--) order[k] = order[k - 1];
    while (n < V && p[order[n]] > 0 && (n == 0 || kept < top_p * sum)) kept += p[order[n++]];
    float left = uniform * (top_p < 1 ? kept : sum);
    for (int32_t i = 0; i + 1 < n; i++)
        if ((left -= p[order[i]]) < 0) return order[i];
    return order[n - 1];
}

TEST(a_token_is_drawn_as_plainly_defined) {
    int drawn[16] = {0};
    for (int i = 0; i < 20000; i++) {
        float logits[16];
        HeapItem scratch[16];
        const int32_t V = 1 + (int32_t)test_rng_below(16);
        const float temperature = (float)test_rng_below(4) * 0.5f,
                    top_p = (float)test_rng_below(5) * 0.25f,
                    uniform = fminf((float)test_rng_below(17) / 16, 0x1.fffffep-1f);
        for (int32_t v = 0; v < V; v++)  // with ties, and tokens that are never drawn
            logits[v] = test_rng_below(4) ? (float)test_rng_below(5) * 0.7f : -INFINITY;
        logits[test_rng_below((uint32_t)V)] = 0;
        const int32_t id = sample_token(logits, V, temperature, top_p, uniform, scratch);
        CHECK(id == plain_sample(logits, V, temperature, top_p, uniform));
        CHECK(isfinite(logits[id]));
        drawn[id]++;
    }
    for (int v = 0; v < 16; v++) CHECK(drawn[v] > 0);
}

TEST_MAIN()
