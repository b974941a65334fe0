// The loader: the same steps as without a thread, in every layout; errors arrive with their step.
#include "../data/base/hash.h"
#include "../data/batches/loader.h"
#include "../data/shards/shard_writer.h"
#include "scratch.h"
#include "test.h"

enum { NUM_DOCS = 300, VOCAB = 1000 };

static char dir[64];  // of the data set
static bool masked;   // it has a loss mask
static int32_t lengths[NUM_DOCS];
static int64_t bad_doc = -1;  // its token 1 is not in the vocabulary

// Tokens encode their position, so that any batch can be checked without the shard.
static int32_t token_of(int64_t doc, int64_t i) { return (int32_t)((doc * 31 + i * 7) % VOCAB); }

// A third of the tokens, in runs of 8; none of many documents and segments.
static bool is_target(int64_t doc, int64_t i) {
    return i > 0 && (!masked || splitmix64((uint64_t)(doc << 20 | i / 8)) % 3 == 0);
}

// Mostly short documents, a few far longer than max_seqlen.
static void write_shard(void) {
    const ShardVocabulary vocabulary = {VOCAB, -1, -1, 0};
    ShardWriter w;
    Error err = {0};
    if (dir[0])
        CHECK(dir_remove_tree(dir, &err));
    else
        snprintf(dir, sizeof dir, "%s", scratch("data"));
    CHECK(dir_create_all(dir, &err));
    shard_writer_init(&w, dir, "train", &vocabulary);
    for (int d = 0; d < NUM_DOCS; d++) {
        uint16_t tokens[512];
        unsigned char targets[512];
        lengths[d] = 2 + (int32_t)(splitmix64((uint64_t)d) % (d % 20 == 0 ? 500 : 90));
        for (int i = 0; i < lengths[d]; i++) {
            tokens[i] = (uint16_t)(d == bad_doc && i == 1 ? VOCAB : token_of(d, i));
            targets[i] = is_target(d, i);
        }
        const bool ok = shard_writer_add(&w, (const unsigned char *)tokens, (uint64_t)lengths[d],
                                         masked ? targets : NULL, &err);
        CHECK_MSG(ok, "%s", err.what);
    }
    CHECK_MSG(shard_writer_close(&w, &err), "%s", err.what);
    shard_writer_free(&w);
}

// A test of the data set without a mask, and again with one.
static void with_and_without_a_mask(void (*test)(void)) {
    for (int i = 0; i < 2; i++) {
        masked = i == 1;
        write_shard();
        test();
    }
    masked = false;
    write_shard();
}

#define TEST_MASKS(name)                             \
    static void name##_(void);                       \
    TEST(name) { with_and_without_a_mask(name##_); } \
    static void name##_(void)

static void open_data(Dataset *ds) {
    Error err = {0};
    const DatasetOptions options = dataset_options();
    if (!dir[0]) write_shard();
    CHECK_MSG(dataset_open(ds, dir, &options, &err), "%s", err.what);
}

static LoaderSettings settings_of(Layout layout) {
    return (LoaderSettings){
        .plan = {.fill_ppm = 970000, .max_seqlen = 64, .micro_batch_tokens = 300, .num_micro = 4},
        .layout = layout,
        .num_ranks = 1};
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

// Checks the counts of a step's plan against its batches.
static void check_counts(const StepData *d, const LoaderSettings *s) {
    int64_t targets = 0, real = 0, total = 0, pairs = 0;
    const StepPlan *p = &d->plan;
    const int64_t S = s->plan.max_seqlen, padded = p->num_stream * S;
    for (int32_t m = 0; m < d->num_micro; m++) {
        CHECK(batch_is_valid(&d->micro[m], VOCAB));
        targets += d->micro[m].num_targets;
        real += d->micro[m].real_tokens;
        total += d->micro[m].total_tokens;
        pairs += pairs_of(&d->micro[m]);
    }
    CHECK(targets == p->num_targets && real == p->real_tokens && pairs == p->attention_pairs);
    CHECK(total == d->local_tokens && total <= p->buffer_tokens && p->masked == masked);
    CHECK(p->padded_pairs == padded * (S + 1) / 2 && pairs <= p->padded_pairs);
    CHECK(s->layout == LAYOUT_PACKED ? total == real : s->layout == LAYOUT_ROWS || total == padded);
    CHECK(p->longest_segment <= S);
}

// Checks a packed step, token by token, against the segments of the plan.
static void check_tokens(const StepData *d) {
    for (int32_t m = 0; m < d->num_micro; m++) {
        const Batch *b = &d->micro[m];
        const Segment *segment = d->plan.segments + d->plan.micro_start[d->own_micros[m]];
        for (int32_t s = 0; s < b->num_segments; s++, segment++) {
            CHECK(b->cu_seqlens[s + 1] - b->cu_seqlens[s] == segment->length);
            for (int32_t k = 0; k < segment->length; k++) {
                const int64_t i = segment->tok_off + k;
                const int32_t row = b->cu_seqlens[s] + k;
                const bool target = i + 1 < lengths[segment->doc] && is_target(segment->doc, i + 1);
                CHECK(b->tokens[row] == token_of(segment->doc, i));
                CHECK(b->targets[row] == (target ? token_of(segment->doc, i + 1) : -1));
            }
        }
    }
}

// From the beginning, and once more from the middle.
static void check_thread(Layout layout) {
    enum { STEPS = 40 };
    Dataset ds;
    Error err = {0};
    const LoaderSettings s = settings_of(layout);
    PlanState state = START, middle = START;
    StepData plain = {0};
    open_data(&ds);
    for (int from = 0; from < STEPS; from += STEPS / 2) {
        Loader loader;
        CHECK(loader_start(&loader, &ds, &s, state, &err));
        for (int step = from; step < STEPS; step++) {
            CHECK_MSG(loader_load_step(&plain, &ds, &s, state, &err), "%s", err.what);
            const StepData *d = loader_next(&loader, &err);
            CHECK_MSG(d != NULL, "%s", err.what);
            CHECK(d->plan.cursor_after.step == step + 1 && d->num_micro == plain.num_micro);
            for (int32_t m = 0; m < d->num_micro; m++)
                CHECK(same_batch(&d->micro[m], &plain.micro[m]));
            CHECK(memcmp(&d->plan.cursor_after, &plain.plan.cursor_after, sizeof(PlanState)) == 0);
            check_counts(d, &s);
            if (layout == LAYOUT_PACKED) check_tokens(d);
            state = d->plan.cursor_after;
            if (step + 1 == STEPS / 2) middle = state;
        }
        CHECK(state.sources[0].epoch > 1 && state.step == STEPS);
        loader_stop(&loader);
        state = middle;
    }
    step_data_free(&plain);
    dataset_close(&ds);
}

TEST_MASKS(the_thread_loads_the_same_as_a_plain_call) {
    for (int layout = 0; layout < 4; layout++) check_thread((Layout)layout);
}

// A work list that is a copy of cu_seqlens; counts its calls.
static size_t list_again(void *context, int32_t *out, const int32_t *cu_seqlens, int num_segments) {
    ++*(int *)context;
    memcpy(out, cu_seqlens, ((size_t)num_segments + 1) * sizeof *out);
    return (size_t)num_segments + 1;
}

static bool lists(const int32_t *work, size_t num_work, const int32_t *cu_seqlens, int32_t n) {
    return num_work == (size_t)n + 1 && memcmp(work, cu_seqlens, num_work * sizeof *work) == 0;
}

TEST_MASKS(work_lists_are_of_the_final_batch) {
    Dataset ds;
    StepData d = {0};
    Error err = {0};
    open_data(&ds);
    for (int i = 0; i < 4; i++) {
        LoaderSettings s = settings_of((Layout)i);
        int calls = 0;
        s.work_list = list_again;
        s.work_context = &calls;
        s.max_work = (size_t)s.plan.micro_batch_tokens + 1;
        CHECK_MSG(loader_load_step(&d, &ds, &s, START, &err), "%s", err.what);
        CHECK(calls == d.num_micro * (s.layout == LAYOUT_REPAD ? 2 : 1));
        for (Batch *b = d.micro; b < d.micro + d.num_micro; b++) {
            CHECK(lists(b->work, b->num_work, b->cu_seqlens, b->num_segments));
            CHECK(s.layout == LAYOUT_REPAD ? lists(b->real_work, b->num_real_work,
                                                   b->real_cu_seqlens, b->num_real_segments)
                                           : b->num_real_work == 0);
        }
        batch_pack(&d.micro[0], NULL, 0);  // refilled: the old list no longer applies
        CHECK(d.micro[0].num_work == 0 && d.micro[0].num_real_work == 0);
    }
    LoaderSettings none = settings_of(LAYOUT_REPAD);
    CHECK(loader_load_step(&d, &ds, &none, START, &err));
    CHECK(d.micro[0].num_work == 0 && d.micro[0].num_real_work == 0);
    step_data_free(&d);
    dataset_close(&ds);
}

TEST_MASKS(ranks_read_their_own_part) {
    Dataset ds;
    StepData all = {0}, own = {0};
    Error err = {0};
    open_data(&ds);
    for (int layout = 0; layout < 4; layout++) {
        LoaderSettings s = settings_of((Layout)layout);
        CHECK_MSG(loader_load_step(&all, &ds, &s, START, &err), "%s", err.what);
        for (s.num_ranks = 2; s.num_ranks <= 4; s.num_ranks += 2) {
            int64_t targets = 0, rows = 0;
            int32_t micros = 0;
            for (s.rank = 0; s.rank < s.num_ranks; s.rank++) {
                CHECK_MSG(loader_load_step(&own, &ds, &s, START, &err), "%s", err.what);
                CHECK(own.plan.num_targets == all.plan.num_targets);
                for (int32_t m = 0; m < own.num_micro; m++) targets += own.micro[m].num_targets;
                rows += own.local_tokens;
                micros += own.num_micro;
            }
            CHECK(targets == all.plan.num_targets && rows == all.local_tokens);
            CHECK(micros == all.num_micro);
        }
    }
    step_data_free(&all);
    step_data_free(&own);
    dataset_close(&ds);
}

// Other steps and layouts, of more or fewer micro-batches, in the same memory
TEST_MASKS(step_data_can_be_used_again) {
    Dataset ds;
    StepData used = {0};
    Error err = {0};
    open_data(&ds);
    for (int round = 0; round < 40; round++) {
        LoaderSettings s = settings_of((Layout)test_rng_below(4));
        StepData fresh = {0};
        s.plan.num_micro = 1 + (int32_t)test_rng_below(9);
        CHECK_MSG(loader_load_step(&used, &ds, &s, START, &err), "%s", err.what);
        CHECK_MSG(loader_load_step(&fresh, &ds, &s, START, &err), "%s", err.what);
        CHECK(used.num_micro == fresh.num_micro);
        for (int32_t m = 0; m < used.num_micro; m++)
            CHECK(same_batch(&used.micro[m], &fresh.micro[m]));
        step_data_free(&fresh);
    }
    step_data_free(&used);
    dataset_close(&ds);
}

// -------------------------------------------------------------------------------------------------
// Errors

// Does the step hold the beginning of a document?
static bool holds(const StepPlan *p, int64_t doc) {
    bool found = false;
    for (int64_t i = 0; i < p->num_stream; i++)
        found |= p->stream[i].doc == doc && p->stream[i].tok_off == 0;
    return found;
}

TEST(a_bad_token_fails_only_its_step) {
    const LoaderSettings s = settings_of(LAYOUT_PACKED);
    for (bad_doc = 0; bad_doc < NUM_DOCS; bad_doc += 37) {
        Dataset ds;
        Loader loader;
        Error err = {0};
        StepPlan plan = {0};
        PlanState state = START;
        write_shard();
        open_data(&ds);
        const DocIndex index = dataset_doc_index(&ds);
        CHECK(loader_start(&loader, &ds, &s, START, &err));
        while (plan_step(&plan, &index, &s.plan, s.layout, &state, &err) &&
               !holds(&plan, bad_doc)) {
            CHECK_MSG(loader_next(&loader, &err) != NULL, "step %ld: %s", state.step, err.what);
            state = plan.cursor_after;
        }
        for (int again = 0; again < 3; again++) {
            err = (Error){0};
            CHECK(loader_next(&loader, &err) == NULL);
            CHECK_MSG(err.code == EXIT_BAD_INPUT && strstr(err.what, "found 1000"), "%s", err.what);
        }
        loader_stop(&loader);
        plan_free(&plan);
        dataset_close(&ds);
    }
    bad_doc = -1;
    write_shard();
}

TEST(planning_errors_are_delivered) {
    Dataset ds;
    Loader loader;
    Error err = {0};
    LoaderSettings s = settings_of(LAYOUT_PADDED);
    open_data(&ds);
    const PlanState bad = {0, {{.doc_pos = NUM_DOCS + 1}}};
    CHECK(loader_start(&loader, &ds, &s, bad, &err));
    CHECK(loader_next(&loader, &err) == NULL && err.code == EXIT_CHECKPOINT_MISFIT);
    loader_stop(&loader);
    err = (Error){0};
    s.plan.long_docs = LONG_ERROR;
    CHECK(loader_start(&loader, &ds, &s, START, &err));
    while (loader_next(&loader, &err)) continue;
    CHECK(err.code == EXIT_BAD_INPUT && strstr(err.what, "expected at most 64"));
    loader_stop(&loader);
    err = (Error){0};
    s.plan.micro_batch_tokens = 63;
    CHECK(!loader_start(&loader, &ds, &s, START, &err) && err.code == EXIT_USAGE);
    loader_stop(&loader);
    dataset_close(&ds);
}

TEST(stopping_at_any_moment) {
    Dataset ds;
    const LoaderSettings s = settings_of(LAYOUT_PACKED);
    open_data(&ds);
    for (int round = 0; round < 60; round++) {
        Loader loader;
        Error err = {0};
        CHECK(loader_start(&loader, &ds, &s, START, &err));
        for (int step = 0; step < round % 5; step++) CHECK(loader_next(&loader, &err) != NULL);
        if (round % 3 == 0) usleep(test_rng_below(2000));
        loader_stop(&loader);
        loader_stop(&loader);
    }
    dataset_close(&ds);
}

TEST_MAIN()
