// The loader: the same steps as without a thread, in every layout; errors arrive with their step.
#include "../data/base/hash.h"
#include "../data/batches/loader.h"
#include "../data/shards/shard_writer.h"
#include "scratch.h"

enum { NUM_DOCS = 300, VOCAB = 1000, CAPACITY = 300 };

static int masked;  // the data set has a loss mask
static int32_t lengths[NUM_DOCS];
static int64_t bad_doc = -1;  // its token 1 is not in the vocabulary

// Tokens encode their position, so that any batch can be checked without the shard.
static int32_t token_of(int64_t doc, int64_t i) { return (int32_t)((doc * 31 + i * 7) % VOCAB); }

// A third of the tokens, in runs of 8; none of many documents and segments.
static bool is_target(int64_t doc, int64_t i) {
    return i > 0 && (!masked || splitmix64((uint64_t)(doc << 20 | i / 8)) % 3 == 0);
}

// Mostly short documents, a few far longer than max_seqlen.
static Dataset make_data(void) {
    const ShardVocabulary vocabulary = {VOCAB, -1, -1, 0, false};
    const DatasetOptions options = {.boundary_token = -1};
    const char *dir = scratch("data");
    Dataset ds;
    ShardWriter w;
    MUST(dir_remove_tree(dir, &err) && dir_create_all(dir, &err));
    shard_writer_init(&w, dir, "train", &vocabulary);
    for (int d = 0; d < NUM_DOCS; d++) {
        uint16_t tokens[512];
        float targets[512];
        lengths[d] = 2 + (int32_t)(splitmix64((uint64_t)d) % (d % 20 == 0 ? 500 : 90));
        for (int i = 0; i < lengths[d]; i++) {
            tokens[i] = (uint16_t)(d == bad_doc && i == 1 ? VOCAB : token_of(d, i));
            targets[i] = is_target(d, i);
        }
        MUST(shard_writer_add(&w, (const unsigned char *)tokens, (uint64_t)lengths[d],
                              masked ? targets : NULL, &err));
    }
    MUST(shard_writer_close(&w, &err));
    shard_writer_free(&w);
    MUST(dataset_open(&ds, dir, &options, &err));
    return ds;
}
#define OPEN_DATA(ds_) __attribute__((cleanup(dataset_close))) Dataset ds_ = make_data()

static LoaderSettings settings_of(Layout layout) {
    const PlanSettings plan = {
        .max_seqlen = 64, .micro_batch_tokens = CAPACITY, .num_micro = 4, .fill_ppm = 970000};
    return (LoaderSettings){.plan = plan, .layout = layout, .num_ranks = 1};
}

static const PlanState START = {0};

static bool same_batch(const Batch *a, const Batch *b) {
    const size_t rows = (size_t)a->total_tokens * sizeof(int32_t);
    const size_t docs = ((size_t)a->num_segments + 1) * sizeof(int32_t);
    return a->total_tokens == b->total_tokens && a->num_segments == b->num_segments &&
           a->num_targets == b->num_targets && memcmp(a->tokens, b->tokens, rows) == 0 &&
           memcmp(a->targets, b->targets, rows) == 0 &&
           memcmp(a->cu_seqlens, b->cu_seqlens, docs) == 0 &&
           memcmp(a->token_order, b->token_order, rows) == 0;
}

// Pairs of tokens that attention computes
static int64_t pairs_of(const Batch *b) {
    const bool repad = b->layout == LAYOUT_REPAD;
    const int32_t *cu = repad ? b->real_cu_seqlens : b->cu_seqlens;
    int64_t pairs = 0;
    for (int32_t s = 0; s < (repad ? b->num_real_segments : b->num_segments); s++)
        for (int32_t i = cu[s]; i < cu[s + 1]; i++) pairs += i - cu[s] + 1;
    return pairs;
}

// Micro-batch m of the step, filled with the segments of its plan
static void fill(Batch *b, const StepData *d, int32_t m, const LoaderSettings *s) {
    static int32_t tokens[CAPACITY], targets[CAPACITY];
    DocView docs[CAPACITY];
    const int32_t micro = d->own_micros[m];
    const int64_t first = d->plan.micro_start[micro], end = d->plan.micro_start[micro + 1];
    int32_t at = 0;
    for (int64_t i = first; i < end; i++) {
        const Segment *c = &d->plan.segments[i];
        docs[i - first] = (DocView){tokens + at, c->length, -1, targets + at, NULL, 0};
        for (int64_t k = c->tok_off; k < c->tok_off + c->length; k++, at++) {
            const bool target = k + 1 < lengths[c->doc] && is_target(c->doc, k + 1);
            tokens[at] = token_of(c->doc, k);
            targets[at] = target ? token_of(c->doc, k + 1) : -1;
        }
    }
    batch_fill(b, s->layout, docs, (int)(end - first), plan_row_len(&d->plan, &s->plan, micro));
}

// Adds the batches of a rank to the sums of the step.
static void check_rank(const StepData *d, const LoaderSettings *s, StepPlan *sums) {
    static Batch expected;
    int64_t local = 0;
    if (!expected.tokens) batch_init(&expected, CAPACITY, CAPACITY);
    for (int32_t m = 0; m < d->num_micro; m++) {
        const Batch *b = &d->micro[m];
        if (s->deterministic_reduction) CHECK(d->own_micros[m] == sums->num_micro);  // in order
        fill(&expected, d, m, s);
        CHECK(batch_is_valid(b, VOCAB) && same_batch(b, &expected));
        sums->num_micro++;
        sums->num_targets += b->num_targets;
        sums->real_tokens += b->real_tokens;
        sums->attention_pairs += pairs_of(b);
        local += b->total_tokens;
    }
    CHECK(local == d->local_tokens);
    sums->buffer_tokens += local;
}

static void check_sums(const StepPlan *p, const StepPlan *sums, const LoaderSettings *s) {
    const int64_t S = s->plan.max_seqlen, total = sums->buffer_tokens;
    CHECK(sums->num_micro == p->num_micro && sums->num_targets == p->num_targets);
    CHECK(sums->real_tokens == p->real_tokens && sums->attention_pairs == p->attention_pairs);
    CHECK(total <= p->buffer_tokens && p->masked == masked && p->longest_segment <= S);
    CHECK(s->layout == LAYOUT_ROWS || p->attention_pairs <= p->padded_pairs);
    CHECK(s->layout == LAYOUT_PACKED ? total == p->real_tokens
                                     : s->layout == LAYOUT_ROWS || total == p->padded_tokens);
}

// In every layout, in memory that other steps have used, on any number of ranks
static void check_steps(Dataset *ds) {
    StepData d = {0};
    PlanState state = START;
    for (int round = 0; round < 80; round++) {
        LoaderSettings s = settings_of((Layout)(round % 4));
        StepPlan sums = {0};
        s.num_ranks = 1 + (int32_t)test_rng_below(4);
        s.plan.num_micro = s.num_ranks + (int32_t)test_rng_below(8);
        s.deterministic_reduction = test_rng_below(2);
        for (s.rank = 0; s.rank < s.num_ranks; s.rank++) {
            MUST(loader_load_step(&d, ds, &s, state, &err));
            check_rank(&d, &s, &sums);
        }
        check_sums(&d.plan, &sums, &s);
        state = d.plan.cursor_after;
    }
    CHECK(state.sources[0].epoch > 1);
    step_data_free(&d);
}

// Steps from a state on. Returns the one before the last ten.
static PlanState check_thread(Dataset *ds, const LoaderSettings *s, PlanState state) {
    enum { STEPS = 20 };
    Loader loader;
    Error err = {0};
    StepData plain = {0};
    PlanState middle = state;
    MUST(loader_start(&loader, ds, s, state, &err));
    for (int64_t step = state.step; step < STEPS; step++) {
        MUST(loader_load_step(&plain, ds, s, state, &err));
        const StepData *d = loader_next(&loader, &err);
        CHECK_MSG(d != NULL, "%s", err.what);
        CHECK(d->plan.cursor_after.step == step + 1 && d->num_micro == plain.num_micro);
        CHECK(d->local_tokens == plain.local_tokens);
        for (int32_t m = 0; m < d->num_micro; m++) CHECK(same_batch(&d->micro[m], &plain.micro[m]));
        state = d->plan.cursor_after;
        CHECK(memcmp(&state, &plain.plan.cursor_after, sizeof state) == 0);
        if (step + 1 == STEPS / 2) middle = state;
    }
    loader_stop(&loader);
    step_data_free(&plain);
    return middle;
}

TEST(steps_are_their_plans_with_a_thread_and_without) {
    for (masked = 0; masked < 2; masked++) {
        OPEN_DATA(ds);
        check_steps(&ds);
        for (int layout = 0; layout < 4; layout++) {
            const LoaderSettings s = settings_of((Layout)layout);
            check_thread(&ds, &s, check_thread(&ds, &s, START));
        }
    }
    masked = 0;
}

TEST(a_bad_token_fails_only_its_step) {
    const LoaderSettings s = settings_of(LAYOUT_PACKED);
    for (bad_doc = 0; bad_doc < NUM_DOCS; bad_doc += 37) {
        OPEN_DATA(ds);
        Loader loader;
        Error err = {0};
        StepData plain = {0};
        MUST(loader_start(&loader, &ds, &s, START, &err));
        while (loader_load_step(&plain, &ds, &s, plain.plan.cursor_after, &err))
            CHECK_MSG(loader_next(&loader, &err) != NULL, "%s", err.what);
        for (int again = 0; again < 3; again++) {
            err = (Error){0};
            CHECK(loader_next(&loader, &err) == NULL);
            CHECK_MSG(err.code == EXIT_BAD_INPUT && strstr(err.what, "found 1000"), "%s", err.what);
        }
        loader_stop(&loader);
        step_data_free(&plain);
    }
    bad_doc = -1;
}

TEST(stopping_at_any_moment) {
    OPEN_DATA(ds);
    const LoaderSettings s = settings_of(LAYOUT_PACKED);
    for (int round = 0; round < 60; round++) {
        Loader loader;
        MUST(loader_start(&loader, &ds, &s, START, &err));
        for (int step = 0; step < round % 5; step++) MUST(loader_next(&loader, &err) != NULL);
        if (round % 3 == 0) usleep(test_rng_below(2000));
        loader_stop(&loader);
        loader_stop(&loader);
    }
}

TEST_MAIN()
