// Batch: every token at its place in every layout, and batch_is_valid against corrupted
// batches.
#include "../data/batches/batch.h"
#include <math.h>

#include "../data/use/evaluate.h"
#include "test.h"

// Freed at the end of its block
#define BATCH __attribute__((cleanup(batch_free))) Batch

enum { SMALL_VOCAB = 50, MAX_DOCS = 12, MAX_LENGTH = 40, CAPACITY = 800 };

typedef struct {
    int32_t text[MAX_DOCS][MAX_LENGTH], targets[MAX_DOCS][MAX_LENGTH];
    DocView docs[MAX_DOCS];
    int n;
    int32_t vocab, row_len, longest, real_tokens, num_targets;
    bool masked;
} Case;

// Documents of any length, 0 included, some of them segments that continue, in rows of many
// lengths; every other case has a loss mask for some of its documents. Ids of one, two and three
// radix digits.
static void make_case(Case *c) {
    c->n = (int)test_rng_below(MAX_DOCS + 1);
    c->vocab = 1 + (int32_t)test_rng_below(2u << test_rng_below(30));
    const uint32_t ids = (uint32_t)c->vocab;
    c->longest = c->real_tokens = c->num_targets = 0;
    c->masked = false;
    const uint32_t most = 1 + test_rng_below(MAX_LENGTH), masked = test_rng_below(2);
    for (int i = 0; i < c->n; i++) {
        const int32_t n = (int32_t)test_rng_below(most + 1);
        const bool goes_on = n > 0 && test_rng_below(3) == 0;
        for (int32_t k = 0; k < n; k++) c->text[i][k] = (int32_t)test_rng_below(ids);
        DocView doc = {c->text[i], n, goes_on ? (int32_t)test_rng_below(ids) : -1, NULL, NULL, 0};
        const bool has_mask = masked && test_rng_below(4) > 0;
        for (int32_t k = 0; k < n; k++) {
            const int32_t next = k + 1 < n ? c->text[i][k + 1] : doc.next_token;
            c->targets[i][k] = has_mask && test_rng_below(3) > 0 ? -1 : next;
            c->num_targets += c->targets[i][k] >= 0;
        }
        if (has_mask) doc.targets = c->targets[i];
        c->masked |= has_mask && n > 0;
        c->docs[i] = doc;
        c->real_tokens += n;
        if (n > c->longest) c->longest = n;
    }
    c->row_len = (c->longest ? c->longest : 1) + (int32_t)test_rng_below(8);
}

// The head computes rows with a target and padding, else the first, and their losses go to them.
static void check_head_rows(const Batch *b, const bool *real) {
    float losses[CAPACITY];
    int32_t n = 0;
    for (int32_t i = 0; i < b->num_head_rows; i++) losses[i] = (float)b->head_rows[i] + 1;
    batch_spread_losses(b, losses);
    for (int32_t t = 0; t < b->total_tokens; t++) {
        const bool computed = b->targets[t] >= 0 || !real[t];
        n += computed;
        CHECK(losses[t] == (computed ? (float)t + 1 : 0) || (t == 0 && b->num_targets == 0));
    }
    CHECK(b->num_head_rows == (n == 0 && b->total_tokens > 0 ? 1 : n));
}

// The next target of a document is at this row, in its place of the document's runs.
static void check_run(const Batch *b, int32_t *run, int32_t *inside, int32_t row) {
    CHECK(*run < b->num_runs && b->run_weights[*run] == 1);
    CHECK(b->head_rows[b->runs[2 * *run] + *inside] == row);
    if (++*inside == b->runs[2 * *run + 1]) ++*run, *inside = 0;
}

// Every real token is at its position in the layout; nothing else has a target.
static void check_places(const Batch *b, const Case *c) {
    int32_t at = 0, seen = 0, run = 0, inside = 0;
    bool real[CAPACITY] = {false};
    for (int i = 0; i < c->n; i++) {
        if (b->layout == LAYOUT_PADDED || b->layout == LAYOUT_REPAD) at = i * c->row_len;
        for (int32_t k = 0; k < c->docs[i].length; k++, at++, seen++) {
            real[at] = true;
            CHECK(b->tokens[at] == c->docs[i].tokens[k]);
            CHECK(b->targets[at] == c->targets[i][k]);
            if (b->layout != LAYOUT_ROWS) CHECK(b->position_ids[at] == k);
            if (b->layout == LAYOUT_REPAD) CHECK(b->real_rows[seen] == at);
            if (c->targets[i][k] >= 0) check_run(b, &run, &inside, at);
        }
        CHECK(b->doc_runs[i + 1] == run && inside == 0);
    }
    CHECK(b->num_docs == c->n && b->num_runs == run);
    CHECK(seen == c->real_tokens && b->real_tokens == seen);
    check_head_rows(b, real);
}

// In each layout, in one batch that is filled again and again
TEST(layouts_hold_every_token_at_its_place) {
    Case c;
    BATCH b, packed;
    batch_init(&b, CAPACITY, CAPACITY);
    batch_init(&packed, CAPACITY, CAPACITY);
    for (int round = 0; round < 2000; round++) {
        make_case(&c);
        batch_pack(&packed, c.docs, c.n);
        for (int layout = 0; layout < 4; layout++) {
            const bool repad = layout == LAYOUT_REPAD, padded = repad || layout == LAYOUT_PADDED;
            int32_t row_len = c.row_len;  // of rows it may be shorter than a document
            if (layout == LAYOUT_ROWS) row_len = 1 + (int32_t)test_rng_below(MAX_LENGTH);
            batch_fill(&b, (Layout)layout, c.docs, c.n, row_len);
            CHECK_MSG(batch_is_valid(&b, c.vocab), "%s", layout_name((Layout)layout));
            check_places(&b, &c);
            CHECK(b.masked == c.masked && b.num_targets == c.num_targets);
            if (layout == LAYOUT_PACKED) CHECK(b.total_tokens == c.real_tokens);
            if (padded) CHECK(b.total_tokens == c.n * row_len && b.num_segments == c.n);
            if (layout == LAYOUT_ROWS) {
                CHECK(b.total_tokens >= c.real_tokens && b.total_tokens - c.real_tokens < row_len);
                for (int32_t i = 0; i < b.total_tokens; i++)
                    CHECK(b.position_ids[i] == i % row_len);
            }
            if (!repad) continue;  // attention sees the segments of packed
            CHECK(packed.num_segments == b.num_real_segments &&
                  packed.max_seqlen == b.real_max_seqlen);
            for (int32_t s = 0; s <= packed.num_segments; s++)
                CHECK(packed.cu_seqlens[s] == b.real_cu_seqlens[s]);
        }
    }
}

// Texts of which each has some tokens in the cache, and free rows after its last one
TEST(cached_texts_begin_after_the_tokens_of_the_cache) {
    Case c;
    BATCH b;
    batch_init(&b, CAPACITY, CAPACITY);
    for (int round = 0; round < 1000; round++) {
        int32_t first_rows[MAX_DOCS], end = 0, row = 0;
        bool any = false;
        make_case(&c);
        for (int i = 0; i < c.n; i++) {
            c.docs[i].shared_len = (int32_t)test_rng_below((uint32_t)c.docs[i].length + 1);
            first_rows[i] = end + (int32_t)test_rng_below(8);
            end = first_rows[i] + c.docs[i].length;
            any |= c.docs[i].shared_len > 0;
        }
        batch_pack_cached(&b, c.docs, first_rows, c.n);
        CHECK(batch_is_valid(&b, c.vocab) && any == (b.num_shared > 0));
        for (int i = 0; i < c.n; i++)
            for (int32_t k = c.docs[i].shared_len; k < c.docs[i].length; k++, row++)
                CHECK(b.tokens[row] == c.text[i][k] && b.position_ids[row] == k &&
                      b.cache_rows[row] == first_rows[i]);
        CHECK(b.total_tokens == row && b.max_seqlen == c.longest);
        // a text over the end of the one before it
        for (int i = 1; i < c.n; i++)
            if (c.docs[i - 1].length > 0) {
                const int32_t was = first_rows[i];
                first_rows[i] = first_rows[i - 1] + c.docs[i - 1].length - 1;
                batch_pack_cached(&b, c.docs, first_rows, c.n);
                CHECK(!batch_is_valid(&b, c.vocab));
                first_rows[i] = was;
            }
    }
}

// ---- Shared prefixes: test_llama.c has the losses and gradients of their rows -------------------

// The documents of --eval and --bench: their first `common` tokens are the same as a prefix.
// A document shares nothing where no row of its own would be left, or where the token after the
// shared tiles differs from the document before it.
static const struct {
    int32_t length, common, shared, beginning;
} scored[] = {{699, 699, 0, 0},   {300, 300, 256, 0}, {600, 257, 256, 0}, {600, 256, 128, 0},
              {600, 600, 128, 0}, {600, 600, 128, 0}, {129, 129, 128, 0}, {128, 128, 0, 0},
              {600, 600, 0, 0},   {514, 513, 512, 0}, {513, 512, 384, 0}, {90, 90, 0, 0},
              {90, 1, 0, 1},      {300, 200, 0, 1},   {300, 300, 128, 1}, {300, 0, 0, 1}};
enum { NUM_SCORED = sizeof scored / sizeof *scored, LONGEST = 700 };

static int32_t fake_loss(int32_t token, int32_t k) { return token * (k % 100 + 1); }

static void fake_pass(LlamaModel *model, const Batch *b, bool train, float *losses, float *logits) {
    CHECK(!model && !train && !logits && b->num_segments == NUM_SCORED);
    for (int d = 0; d < NUM_SCORED; d++)
        CHECK_MSG(b->shared_len[d] == scored[d].shared, "document %d: %d", d, b->shared_len[d]);
    for (int32_t i = 0; i < b->total_tokens; i++)
        losses[i] = b->targets[i] < 0 ? 0 : (float)fake_loss(b->tokens[i], b->position_ids[i]);
}

static void fake_gather(void *out, const void *data, size_t bytes) { memcpy(out, data, bytes); }

TEST(scored_documents_share_whole_tiles_and_keep_their_sums) {
    const Options o = {.micro_batch_tokens = NUM_SCORED * LONGEST};
    const ModelFace face = {
        .num_ranks = 1, .vocab_size = 64, .pass = fake_pass, .gather = fake_gather};
    static int32_t targets[NUM_SCORED][LONGEST];
    int32_t *text[NUM_SCORED];
    double sums[NUM_SCORED] = {0}, expected[NUM_SCORED] = {0};
    Scorer s;
    scorer_open(&s, &o, face);
    for (int d = 0; d < NUM_SCORED; d++) {
        const int32_t n = scored[d].length;
        int32_t *tokens = text[d] = malloc((size_t)n * sizeof(int32_t));
        for (int32_t k = 0; k < n; k++)  // a sanitizer knows where the tokens end
            tokens[k] =
                k < scored[d].common ? (k * k + scored[d].beginning) % 37 : 40 + (d + k) % 20;
        for (int32_t k = 0; k < n; k++) {
            targets[d][k] = k + 1 < n && (d % 2 || k % 3) ? tokens[k + 1] : -1;
            if (targets[d][k] >= 0) expected[d] += fake_loss(tokens[k], k);
        }
        *scorer_next(&s, n, &sums[d]) =
            (DocView){tokens, n, -1, d % 2 ? NULL : targets[d], NULL, 0};
    }
    scorer_close(&s, sums, NUM_SCORED);
    for (int d = 0; d < NUM_SCORED; d++) CHECK(sums[d] == expected[d] && sums[d] > 0);
    for (int d = 0; d < NUM_SCORED; d++) free(text[d]);
}

// ---- batch_is_valid -----------------------------------------------------------------------------

// Two documents of 5 and 3 tokens, the first one continued; no room for a third. shared: of 300
// tokens, of which the second has 256 in common. cached: 2 and 0 of them are in the cache.
static void make_small(Batch *b, Layout layout) {
    static int32_t text[300] = {1};
    static const int32_t first[] = {10, 11, 12, 13, 14}, second[] = {30, 21, 22};
    const DocView docs[] = {{first, 5, 15, NULL, NULL, 0}, {second, 3, -1, NULL, NULL, 0}};
    const DocView begin_alike[] = {{text, 300, -1, NULL, NULL, 0},
                                   {text, 260, -1, NULL, NULL, 256}};
    const DocView half_cached[] = {{first, 5, -1, NULL, NULL, 2}, {second, 3, -1, NULL, NULL, 0}};
    batch_init(b, layout == LAYOUT_SHARED ? 400 : layout == LAYOUT_CACHED ? 8 : 32, 2);
    if (layout == LAYOUT_CACHED) return batch_pack_cached(b, half_cached, (int32_t[]){0, 5}, 2);
    batch_fill(b, layout, layout == LAYOUT_SHARED ? begin_alike : docs, 2, 6);
}

// Every number and every element of every array, in turn
static void check_numbers(Batch *b) {
    const int32_t T = b->total_tokens;
    const struct {
        const char *name;
        int32_t *values, n;
        bool is_id;  // else it has only one right value
    } parts[] = {{"tokens", b->tokens, T, true},
                 {"targets", b->targets, T, true},
                 {"position_ids", b->position_ids, T, false},
                 {"cache_rows", b->cache_rows, b->layout == LAYOUT_CACHED ? T : 0, false},
                 {"token_order", b->token_order, T, false},
                 {"head_rows", b->head_rows, b->num_head_rows, false},
                 {"num_head_rows", &b->num_head_rows, 1, false},
                 {"cu_seqlens", b->cu_seqlens, b->num_segments + 1, false},
                 {"real_rows", b->real_rows, b->num_real_rows, false},
                 {"real_cu_seqlens", b->real_cu_seqlens, b->num_real_segments + 1, false},
                 {"total_tokens", &b->total_tokens, 1, false},
                 {"num_segments", &b->num_segments, 1, false},
                 {"max_seqlen", &b->max_seqlen, 1, false},
                 {"num_targets", &b->num_targets, 1, false},
                 {"shared_first", b->shared_first, b->num_segments, false},
                 {"shared_len", b->shared_len, b->num_segments, false},
                 {"num_shared", &b->num_shared, 1, false},
                 {"num_real_rows", &b->num_real_rows, 1, false},
                 {"num_real_segments", &b->num_real_segments, 1, false},
                 {"real_max_seqlen", &b->real_max_seqlen, 1, false}};
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++)
        for (int32_t i = 0; i < parts[p].n; i++) {
            int32_t *value = &parts[p].values[i];
            const int32_t was = *value, bad_id = was < 0 ? 3 : -1;  // a target more, or less
            const int32_t wrong[] = {parts[p].is_id ? SMALL_VOCAB : was + 1,
                                     parts[p].is_id ? bad_id : was - 1, 1 << 30, -2};
            for (int k = 0; k < 4; k++) {
                *value = wrong[k];
                CHECK_MSG(!batch_is_valid(b, SMALL_VOCAB), "%s: %s[%d]", layout_name(b->layout),
                          parts[p].name, i);
            }
            *value = was;
        }
}

TEST(shared_documents_come_by_falling_length) {
    static int32_t text[300];
    BATCH b;
    batch_init(&b, 400, 3);
    for (int i = 0; i < 2; i++) {
        DocView alike[3] = {{text, 300, -1, NULL, NULL, 0}};
        alike[1 + i] = (DocView){text, 260, -1, NULL, NULL, 256};
        alike[2 - i] = (DocView){text, 140, -1, NULL, NULL, 128};
        batch_fill(&b, LAYOUT_SHARED, alike, 3, 0);
        CHECK(batch_is_valid(&b, SMALL_VOCAB) == (i == 0));
    }
}

TEST(every_planted_corruption_is_refused) {
    for (int layout = 0; layout <= LAYOUT_CACHED; layout++) {
        BATCH batch;
        Batch *b = &batch;
        make_small(b, (Layout)layout);
        CHECK(batch_is_valid(b, SMALL_VOCAB));
        check_numbers(b);
        for (int32_t i = 0; i < b->total_tokens; i++) {
            const float was = b->weights[i];
            b->weights[i] = b->weighted && b->targets[i] >= 0 ? NAN : was + 1;
            CHECK(!batch_is_valid(b, SMALL_VOCAB));
            b->weights[i] = was;
        }
        CHECK(batch_is_valid(b, SMALL_VOCAB));
        b->micro_batch_tokens = b->total_tokens - 1;
        CHECK(!batch_is_valid(b, SMALL_VOCAB));  // it has no room for them
    }
}

TEST_MAIN()
