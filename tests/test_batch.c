// Batch: the four layouts against slow references, and batch_check against corrupted batches.
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../data/base/error.h"
#include "../data/batches/batch.h"
#include "test.h"

enum { VOCAB = 50, MAX_DOCS = 12, MAX_LENGTH = 40, CAPACITY = 800 };

typedef struct {
    int32_t text[MAX_DOCS][MAX_LENGTH], targets[MAX_DOCS][MAX_LENGTH];
    DocView docs[MAX_DOCS];
    int n;
    int32_t row_len, longest, real_tokens, num_targets;
} Case;

// Documents of any length, 0 included, some of them segments that continue, in rows of many
// lengths; every other case has a loss mask for some of its documents.
static void make_case(Case *c) {
    c->n = (int)test_rng_below(MAX_DOCS + 1);
    c->longest = c->real_tokens = c->num_targets = 0;
    const uint32_t most = 1 + test_rng_below(MAX_LENGTH), masked = test_rng_below(2);
    for (int i = 0; i < c->n; i++) {
        const int32_t n = (int32_t)test_rng_below(most + 1);
        const bool goes_on = n > 0 && test_rng_below(3) == 0;
        for (int32_t k = 0; k < n; k++) c->text[i][k] = (int32_t)test_rng_below(VOCAB);
        DocView doc = {c->text[i], n, goes_on ? (int32_t)test_rng_below(VOCAB) : -1, NULL};
        const bool has_mask = masked && test_rng_below(4) > 0;
        for (int32_t k = 0; k < n; k++) {
            const int32_t next = k + 1 < n ? c->text[i][k + 1] : doc.next_token;
            c->targets[i][k] = has_mask && test_rng_below(3) > 0 ? -1 : next;
            c->num_targets += c->targets[i][k] >= 0;
        }
        if (has_mask) doc.targets = c->targets[i];
        c->docs[i] = doc;
        c->real_tokens += n;
        if (n > c->longest) c->longest = n;
    }
    c->row_len = (c->longest ? c->longest : 1) + (int32_t)test_rng_below(8);
}

// In the rows layout a row may be shorter than a document.
static int32_t row_len_of(const Case *c, Layout layout) {
    return layout == LAYOUT_ROWS ? 1 + (int32_t)test_rng_below(MAX_LENGTH) : c->row_len;
}

// Every real token is at its position in the layout; nothing else has a target.
static void check_places(const Batch *b, const Case *c) {
    int32_t at = 0, seen = 0;
    for (int i = 0; i < c->n; i++) {
        if (b->layout == LAYOUT_PADDED || b->layout == LAYOUT_REPAD) at = i * c->row_len;
        for (int32_t k = 0; k < c->docs[i].length; k++, at++, seen++) {
            CHECK(b->tokens[at] == c->docs[i].tokens[k]);
            CHECK(b->targets[at] == c->targets[i][k]);
            if (b->layout != LAYOUT_ROWS) CHECK(b->position_ids[at] == k);
            if (b->layout == LAYOUT_REPAD) CHECK(b->real_rows[seen] == at);
        }
    }
    CHECK(seen == c->real_tokens && b->real_tokens == seen);
}

static int64_t slow_pairs(const int32_t *cu, int32_t n) {
    int64_t pairs = 0;
    for (int32_t s = 0; s < n; s++)
        for (int32_t i = cu[s]; i < cu[s + 1]; i++) pairs += i - cu[s] + 1;
    return pairs;
}

TEST(layouts_hold_every_token_at_its_place) {
    Case c;
    Batch b;
    batch_init(&b, CAPACITY, CAPACITY);
    for (int round = 0; round < 3000; round++) {
        make_case(&c);
        for (int layout = 0; layout < 4; layout++) {
            Error err = {0};
            const int32_t row_len = row_len_of(&c, (Layout)layout);
            batch_fill(&b, (Layout)layout, c.docs, c.n, row_len);
            CHECK_MSG(batch_check(&b, VOCAB, &err), "%s: %s", layout_name((Layout)layout),
                      err.what);
            check_places(&b, &c);
            CHECK(b.num_real_docs == c.n);
            CHECK_MSG(b.num_targets == c.num_targets, "%s", layout_name((Layout)layout));
            if (layout == LAYOUT_PACKED) CHECK(b.total_tokens == c.real_tokens);
            if (layout == LAYOUT_ROWS) {
                CHECK(b.total_tokens >= c.real_tokens && b.total_tokens - c.real_tokens < row_len);
                for (int32_t i = 0; i < b.total_tokens; i++)
                    CHECK(b.position_ids[i] == i % row_len);
            }
            if (layout == LAYOUT_PADDED || layout == LAYOUT_REPAD)
                CHECK(b.total_tokens == c.n * row_len && b.num_docs == c.n);
            const bool real = layout == LAYOUT_REPAD;
            CHECK(b.attention_pairs == slow_pairs(real ? b.real_cu_seqlens : b.cu_seqlens,
                                                  real ? b.num_real_segments : b.num_docs));
        }
    }
    batch_free(&b);
}

TEST(packed_and_repad_attend_to_the_same_segments) {
    Case c;
    Batch packed, repad;
    batch_init(&packed, CAPACITY, CAPACITY);
    batch_init(&repad, CAPACITY, CAPACITY);
    for (int round = 0; round < 1000; round++) {
        make_case(&c);
        batch_pack(&packed, c.docs, c.n);
        batch_fill(&repad, LAYOUT_REPAD, c.docs, c.n, c.row_len);
        CHECK(packed.attention_pairs == repad.attention_pairs);
        CHECK(packed.max_seqlen == repad.real_max_seqlen);
        CHECK(packed.num_docs == repad.num_real_segments);
        for (int32_t s = 0; s <= packed.num_docs; s++)
            CHECK(packed.cu_seqlens[s] == repad.real_cu_seqlens[s]);
        for (int32_t i = 0; i < packed.total_tokens; i++) {
            CHECK(packed.tokens[i] == repad.tokens[repad.real_rows[i]]);
            CHECK(packed.targets[i] == repad.targets[repad.real_rows[i]]);
        }
    }
    batch_free(&packed);
    batch_free(&repad);
}

// Ids of one, two and three radix digits.
TEST(token_order_is_sorted_by_token_then_position) {
    enum { N = 700 };
    static const uint32_t sizes[] = {1, 2, 2048, 2049, 49152, 128256, 1u << 22, (1u << 31) - 1};
    int32_t text[N];
    Batch b;
    batch_init(&b, N, 4);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int i = 0; i < N; i++) {
            text[i] = (int32_t)test_rng_below(sizes[s]);
            if (i > 0 && test_rng_below(4) == 0) text[i] = text[test_rng_below((uint32_t)i)];
        }
        const DocView doc = {text, N, -1, NULL};
        batch_pack(&b, &doc, 1);
        for (int i = 1; i < N; i++) {
            const int32_t p = b.token_order[i - 1], q = b.token_order[i];
            CHECK(text[p] < text[q] || (text[p] == text[q] && p < q));
        }
    }
    batch_free(&b);
}

TEST(empty_batches_and_empty_documents) {
    const DocView empty[] = {{NULL, 0, -1, NULL}, {NULL, 0, -1, NULL}};
    Batch b;
    batch_init(&b, 16, 16);
    for (int n = 0; n <= 2; n++)
        for (int layout = 0; layout < 4; layout++) {
            Error err = {0};
            batch_fill(&b, (Layout)layout, empty, n, 4);
            CHECK_MSG(batch_check(&b, 1, &err), "%s, %d: %s", layout_name((Layout)layout), n,
                      err.what);
            CHECK(b.num_targets == 0 && b.real_tokens == 0);
            CHECK(b.total_tokens ==
                  (layout == LAYOUT_PADDED || layout == LAYOUT_REPAD ? 4 * n : 0));
        }
    batch_free(&b);
}

// A large batch, then a small one: nothing of the first may remain.
TEST(a_batch_can_be_filled_again) {
    Case c;
    Batch used, fresh;
    batch_init(&used, CAPACITY, CAPACITY);
    for (int round = 0; round < 500; round++) {
        make_case(&c);
        const Layout layout = (Layout)test_rng_below(4);
        batch_fill(&used, layout, c.docs, c.n, c.row_len);
        batch_init(&fresh, CAPACITY, CAPACITY);
        batch_fill(&fresh, layout, c.docs, c.n, c.row_len);
        const size_t rows = (size_t)fresh.total_tokens * sizeof(int32_t);
        CHECK(fresh.total_tokens == used.total_tokens && fresh.max_seqlen == used.max_seqlen);
        CHECK(fresh.attention_pairs == used.attention_pairs && fresh.num_docs == used.num_docs);
        CHECK(memcmp(fresh.tokens, used.tokens, rows) == 0);
        CHECK(memcmp(fresh.targets, used.targets, rows) == 0);
        CHECK(memcmp(fresh.position_ids, used.position_ids, rows) == 0);
        CHECK(memcmp(fresh.token_order, used.token_order, rows) == 0);
        batch_free(&fresh);
    }
    batch_free(&used);
}

// Batches padded to one size: the documents are unchanged, the rest is padding that batch_check
// accepts.
TEST(batches_can_be_completed_to_one_size) {
    Case c;
    Batch b, before;
    Error err = {0};
    int completed = 0;
    batch_init(&b, CAPACITY, CAPACITY);
    batch_init(&before, CAPACITY, CAPACITY);
    for (int round = 0; round < 500; round++) {
        make_case(&c);
        batch_pack(&before, c.docs, c.n);
        batch_pack(&b, c.docs, c.n);
        const int32_t total = (int32_t)test_rng_below(CAPACITY + 40);
        const int32_t segments = (int32_t)test_rng_below(2 * MAX_DOCS);
        const int32_t added = total - b.total_tokens;
        const int32_t max_seqlen = round % 2 ? 1 << 20 : 1 + (int32_t)test_rng_below(200);
        const int32_t most = max_seqlen < BATCH_PAD_SEGMENT ? max_seqlen : BATCH_PAD_SEGMENT;
        const bool room =
            total <= CAPACITY && added >= 0 && (added + most - 1) / most <= segments - c.n;
        CHECK(batch_complete(&b, total, segments, max_seqlen) == room);
        CHECK_MSG(batch_check(&b, VOCAB, &err), "%s", err.what);
        CHECK(b.total_tokens == (room ? total : before.total_tokens));
        CHECK(b.num_docs == (room ? segments : before.num_docs));
        CHECK(b.num_targets == before.num_targets && b.real_tokens == before.real_tokens);
        check_places(&b, &c);
        for (int32_t i = b.real_tokens; i < b.total_tokens; i++) CHECK(b.targets[i] == -1);
        for (int32_t s = c.n; s < b.num_docs; s++)
            CHECK(b.cu_seqlens[s + 1] - b.cu_seqlens[s] <= most);
        completed += room;
    }
    CHECK(completed > 50);
    batch_fill(&b, LAYOUT_PADDED, c.docs, 0, 5);
    CHECK(!batch_complete(&b, CAPACITY, CAPACITY, CAPACITY));  // packed batches only
    batch_free(&b), batch_free(&before);
}

// -------------------------------------------------------------------------------------------------
// batch_check

// Two documents of 5 and 3 tokens, the first one continued; no room for a third.
static void make_small(Batch *b, Layout layout) {
    static const int32_t first[] = {10, 11, 12, 13, 14}, second[] = {30, 21, 22};
    const DocView docs[] = {{first, 5, 15, NULL}, {second, 3, -1, NULL}};
    batch_init(b, 32, 2);
    batch_fill(b, layout, docs, 2, 6);
}

// One change that batch_check must refuse in `layouts` (bit per layout).
#define PACKED (1 << LAYOUT_PACKED)
#define PADDED (1 << LAYOUT_PADDED)
#define ROWS (1 << LAYOUT_ROWS)
#define REPAD (1 << LAYOUT_REPAD)
#define ALL (PACKED | PADDED | ROWS | REPAD)
#define CORRUPTIONS(X)                                                                       \
    X(ALL, b->total_tokens++)                                                                \
    X(ALL, b->total_tokens--)                                                                \
    X(ALL, b->total_tokens = -1)                                                             \
    X(ALL, b->total_tokens = b->micro_batch_tokens + 1)                                      \
    X(ALL, b->num_docs++)                                                                    \
    X(ALL, b->num_docs--)                                                                    \
    X(ALL, b->num_docs = -1)                                                                 \
    X(ALL, b->num_docs = b->max_docs + 1)                                                    \
    X(ALL, b->max_seqlen++)                                                                  \
    X(ALL, b->max_seqlen--)                                                                  \
    X(ALL, b->num_targets++)                                                                 \
    X(ALL, b->num_targets--)                                                                 \
    X(ALL, b->real_tokens = b->total_tokens + 1)                                             \
    X(PACKED | ROWS | REPAD, b->real_tokens--)                                               \
    X(PADDED, b->real_tokens -= 2)                                                           \
    X(PADDED, b->real_tokens += 3)                                                           \
    X(PACKED | PADDED | REPAD, b->num_real_docs--)                                           \
    X(PACKED | PADDED | REPAD, b->num_real_docs++)                                           \
    X(ROWS, b->num_real_docs = 1)                                                            \
    X(ALL, b->num_real_docs = -1)                                                            \
    X(ALL, b->attention_pairs++)                                                             \
    X(ALL, b->attention_pairs = -b->attention_pairs)                                         \
    X(ALL, b->cu_seqlens[0] = 1)                                                             \
    X(ALL, b->cu_seqlens[1]++)                                                               \
    X(ALL, b->cu_seqlens[1] = -3)                                                            \
    X(ALL, b->cu_seqlens[1] = 1 << 30)                                                       \
    X(ALL, b->cu_seqlens[2]--)                                                               \
    X(ALL, b->tokens[1] = -1)                                                                \
    X(ALL, b->tokens[1] = VOCAB)                                                             \
    X(PACKED, b->tokens[5] = VOCAB)                                                          \
    X(PADDED | REPAD, b->tokens[6] = VOCAB)                                                  \
    X(PACKED | PADDED | REPAD, b->tokens[1] = 9)                                             \
    X(PADDED | REPAD, b->tokens[5] = 3)                                                      \
    X(PADDED | REPAD, b->tokens[5] = VOCAB)                                                  \
    X(ROWS, b->tokens[11] = 3)                                                               \
    X(ALL, b->targets[2] = -2)                                                               \
    X(ALL, b->targets[2] = VOCAB)                                                            \
    X(PACKED | PADDED | REPAD, b->targets[2] = 9)                                            \
    X(ALL, b->targets[2] = -1)                                                               \
    X(PADDED | REPAD, b->targets[5] = 3)                                                     \
    X(ALL, b->position_ids[0] = 1)                                                           \
    X(ALL, b->position_ids[b->cu_seqlens[1]] = b->cu_seqlens[1])                             \
    X(ALL, b->position_ids[4] = -1)                                                          \
    X(ALL, b->token_order[0] = b->token_order[1])                                            \
    X(ALL, b->token_order[0] = -1)                                                           \
    X(ALL, b->token_order[3] = b->total_tokens)                                              \
    X(ALL, swap(&b->token_order[b->total_tokens - 1], &b->token_order[b->total_tokens - 2])) \
    X(PADDED | REPAD, swap(&b->token_order[0], &b->token_order[1]))                          \
    X(ALL, b->num_real_rows++)                                                               \
    X(REPAD, b->num_real_rows--)                                                             \
    X(ALL, b->num_real_rows = -1)                                                            \
    X(ALL, b->num_real_segments++)                                                           \
    X(ALL, b->num_real_segments = b->max_docs + 1)                                           \
    X(REPAD, b->num_real_segments--)                                                         \
    X(ALL, b->real_max_seqlen++)                                                             \
    X(ALL, b->real_cu_seqlens[0] = 1)                                                        \
    X(REPAD, b->real_cu_seqlens[1]--)                                                        \
    X(REPAD, b->real_cu_seqlens[1] = 99)                                                     \
    X(REPAD, b->real_rows[0] = 1)                                                            \
    X(REPAD, b->real_rows[4] = 5)                                                            \
    X(REPAD, b->real_rows[7] = -1)                                                           \
    X(ALL, b->layout = (Layout)7)                                                            \
    X(PADDED, b->layout = LAYOUT_PACKED)                                                     \
    X(PADDED, b->layout = LAYOUT_REPAD)                                                      \
    X(REPAD, b->layout = LAYOUT_PADDED)                                                      \
    X(PACKED, b->layout = LAYOUT_PADDED)                                                     \
    X(ALL, b->micro_batch_tokens = b->total_tokens - 1)

// The same for a completed packed batch: 8 rows and 2 documents, then a segment of padding and an
// empty one
#define COMPLETED_CORRUPTIONS(X)                  \
    X(b->targets[9] = 1)                          \
    X(b->tokens[9] = 1)                           \
    X(b->num_real_docs++)                         \
    X(b->num_real_docs--)                         \
    X(b->num_real_docs = b->num_docs + 1)         \
    X(b->real_tokens++)                           \
    X(b->real_tokens--)                           \
    X(b->attention_pairs--)                       \
    X(swap(&b->cu_seqlens[2], &b->cu_seqlens[3])) \
    X((b->num_docs--, b->total_tokens--))

static void swap(int32_t *a, int32_t *b) {
    const int32_t t = *a;
    *a = *b;
    *b = t;
}

#define CORRUPT(layouts_, change_)                                                  \
    for (int layout = 0; layout < 4; layout++) {                                    \
        if (!((layouts_) >> layout & 1)) continue;                                  \
        Batch batch, *b = &batch;                                                   \
        Error err = {0};                                                            \
        make_small(b, (Layout)layout);                                              \
        CHECK_MSG(batch_check(b, VOCAB, &err), "%s", err.what);                     \
        change_;                                                                    \
        CHECK_MSG(!batch_check(b, VOCAB, &err), "%s", layout_name((Layout)layout)); \
        CHECK(err.code == EXIT_BAD_INPUT && strncmp(err.what, "batch: ", 7) == 0);  \
        batch_free(b);                                                              \
    }

#define CORRUPT_COMPLETED(change_)                                                 \
    {                                                                              \
        Batch batch, *b = &batch;                                                  \
        Error err = {0};                                                           \
        static const int32_t tokens[] = {10, 11, 12, 13, 14, 30, 21, 22};          \
        const DocView docs[] = {{tokens, 5, 15, NULL}, {tokens + 5, 3, -1, NULL}}; \
        batch_init(b, 32, 6);                                                      \
        batch_pack(b, docs, 2);                                                    \
        CHECK(batch_complete(b, 12, 4, 12) && batch_check(b, VOCAB, &err));        \
        change_;                                                                   \
        CHECK_MSG(!batch_check(b, VOCAB, &err), #change_);                         \
        CHECK(err.code == EXIT_BAD_INPUT && strncmp(err.what, "batch: ", 7) == 0); \
        batch_free(b);                                                             \
    }

TEST(check_refuses_every_planted_corruption) {
    CORRUPTIONS(CORRUPT)
    COMPLETED_CORRUPTIONS(CORRUPT_COMPLETED)
}

static void sort_tokens(Batch *b) {
    for (int32_t i = 0; i < b->total_tokens; i++) {
        int32_t k = i;
        for (; k > 0 && b->tokens[b->token_order[k - 1]] > b->tokens[i]; k--)
            b->token_order[k] = b->token_order[k - 1];
        b->token_order[k] = i;
    }
}

// Recomputes everything that depends on the change, so that only the layout's own check can find
// it.
static void put_right(Batch *b) {
    const bool repad = b->layout == LAYOUT_REPAD;
    const int32_t *cu = repad ? b->real_cu_seqlens : b->cu_seqlens;
    const int32_t n = repad ? b->num_real_segments : b->num_docs;
    sort_tokens(b);
    b->attention_pairs = b->max_seqlen = b->real_max_seqlen = 0;
    for (int32_t s = 0; s < n; s++) {
        const int64_t length = cu[s + 1] - cu[s];
        b->attention_pairs += length * (length + 1) / 2;
        if (repad && length > b->real_max_seqlen) b->real_max_seqlen = (int32_t)length;
    }
    for (int32_t s = 0; s < b->num_docs; s++) {
        const int32_t start = b->cu_seqlens[s], end = b->cu_seqlens[s + 1];
        if (end - start > b->max_seqlen) b->max_seqlen = end - start;
        for (int32_t i = start; i < end; i++) b->position_ids[i] = i - start;
    }
}

#define REFUSED_FOR(layout_, change_, why_)                                   \
    {                                                                         \
        Batch batch, *b = &batch;                                             \
        Error err = {0};                                                      \
        make_small(b, layout_);                                               \
        put_right(b);                                                         \
        CHECK_MSG(batch_check(b, VOCAB, &err), "%s", err.what);               \
        change_;                                                              \
        put_right(b);                                                         \
        CHECK(!batch_check(b, VOCAB, &err) && err.code == EXIT_BAD_INPUT);    \
        CHECK_MSG(strstr(err.what, why_), "%s, expected %s", err.what, why_); \
        batch_free(b);                                                        \
    }

TEST(check_refuses_violations_of_one_layout) {
    REFUSED_FOR(LAYOUT_PACKED, b->tokens[1] = 9, "row 0: target 11, next token 9")
    REFUSED_FOR(LAYOUT_PADDED, b->tokens[5] = 3, "row 5 is after its document")
    REFUSED_FOR(LAYOUT_PADDED, b->cu_seqlens[1] = 5, "2 documents, 2 rows of 7, 12 in all")
    REFUSED_FOR(LAYOUT_PADDED, b->tokens[6] = 0; b->targets[6] = -1;
                b->num_targets--, "row 7 is after its document")
    REFUSED_FOR(LAYOUT_ROWS, b->cu_seqlens[1] = 5, "8 tokens in 2 rows of 7, 12 in all")
    REFUSED_FOR(LAYOUT_ROWS, b->tokens[11] = 3, "row 11 is not padding")
    REFUSED_FOR(LAYOUT_ROWS, b->tokens[2] = 9, "3 documents end, expected at most 2")
    REFUSED_FOR(LAYOUT_REPAD, b->real_cu_seqlens[1] = 7, "7 real rows in row 0 of 6")
    REFUSED_FOR(LAYOUT_REPAD, b->real_rows[7] = 9, "real_rows[7] is 9, expected 8")
    REFUSED_FOR(LAYOUT_REPAD, b->real_cu_seqlens[1] = 4;
                for (int i = 0; i < 4; i++) b->real_rows[4 + i] = 6 + i,
                "row 4 is left out, not padding")
    REFUSED_FOR(LAYOUT_REPAD, b->num_real_rows--;
                b->real_cu_seqlens[2]--, "7 real rows of 8, 2 segments of 2")
}

// A masked row has no target; one with another target than the next token is still refused, and so
// is a row without a target where no document has a mask.
TEST(check_knows_masks) {
    static const int32_t tokens[] = {10, 11, 12, 13, 14}, targets[] = {-1, 12, -1, -1, 15};
    const DocView masked = {tokens, 5, -1, targets};
    Batch b;
    batch_init(&b, 32, 2);
    for (int layout = 0; layout < 4; layout++) {
        Error err = {0};
        batch_fill(&b, (Layout)layout, &masked, 1, 6);
        CHECK_MSG(b.masked && b.num_targets == 2 && batch_check(&b, VOCAB, &err), "%s", err.what);
        b.masked = false;
        CHECK(!batch_check(&b, VOCAB, &err));
        b.masked = true;
        b.targets[1] = 13;  // the token after the next
        // rows: one document may end at every row that is not inside, and this one has one end
        CHECK(!batch_check(&b, VOCAB, &err) && err.code == EXIT_BAD_INPUT);
    }
    batch_free(&b);
}

static uint32_t *field_at(Batch *b, uint32_t i) {
    uint32_t *const arrays[] = {(uint32_t *)b->tokens,       (uint32_t *)b->targets,
                                (uint32_t *)b->position_ids, (uint32_t *)b->token_order,
                                (uint32_t *)b->cu_seqlens,   (uint32_t *)b->real_cu_seqlens,
                                (uint32_t *)b->real_rows};
    return &arrays[i % 7][test_rng_below(3)];
}

// Random bits: batch_check neither crashes nor reads outside the arrays (under the sanitizers), and
// detects a bit that matters.
TEST(check_survives_random_bits) {
    int refused = 0;
    for (int round = 0; round < 20000; round++) {
        Batch b;
        Error err = {0};
        make_small(&b, (Layout)(round & 3));
        *field_at(&b, test_rng_u32()) ^= 1u << test_rng_below(32);
        if (test_rng_below(2)) b.num_docs = (int32_t)test_rng_u32() >> test_rng_below(31);
        if (test_rng_below(4) == 0) b.total_tokens = (int32_t)test_rng_u32() >> test_rng_below(31);
        refused += !batch_check(&b, VOCAB, &err);
        batch_free(&b);
    }
    CHECK_MSG(refused > 15000, "%d", refused);
}

TEST_MAIN()
