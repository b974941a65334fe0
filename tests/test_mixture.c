// Mixtures by their properties: shares at every prefix, each source its own stream, the same from
// any cursor; what --train names, and what a checkpoint keeps of it.
#include <math.h>

#include "../data/base/file.h"
#include "../data/base/hash.h"
#include "../data/base/memory.h"
#include "../data/batches/mixture.h"
#include "../data/runs/checkpoint_files.h"
#include "../data/shards/sources.h"
#include "scratch.h"
#include "test.h"

// -------------------------------------------------------------------------------------------------
// Sources of lengths only

typedef struct {
    Sources sources;
    int32_t *lengths;  // of the documents of all
    int64_t num_docs;
    bool masked;  // of a seventh of the documents no token is a target, of others two thirds are
} World;

static int64_t length_of(const void *world, int64_t doc) {
    return ((const World *)world)->lengths[doc];
}

static int64_t targets_of(const void *world, int64_t doc, int64_t from, int64_t n) {
    int64_t targets = 0;
    CHECK(from >= 1 && from + n <= length_of(world, doc));
    for (int64_t i = from; i < from + n; i++) targets += doc % 7 > 0 && (doc + i / 8) % 3 > 0;
    return targets;
}

static DocIndex index_of(const World *w) {
    return (DocIndex){w->num_docs, length_of, w, w->masked ? targets_of : NULL, 0, &w->sources};
}

// Some sources have a single document, some weights are tiny or 0.
static World make_world(int32_t n, uint32_t longest) {
    World w = {.masked = test_rng_below(3) == 0};
    char spec[512] = "first:1";
    Error err = {0};
    for (int32_t i = 1; i < n; i++) {
        const double random = test_rng_uniform(), kinds[] = {random, random, 1, 1e-6, 0};
        const size_t used = strlen(spec);
        snprintf(spec + used, sizeof spec - used, ",s%d:%g", i, kinds[test_rng_below(5)]);
    }
    CHECK_MSG(sources_parse(&w.sources, spec, &err) && w.sources.n == n, "%s", err.what);
    for (int32_t i = 0; i < n; i++) {
        Source *s = &w.sources.list[i];
        s->first_doc = w.num_docs;
        s->num_docs = test_rng_below(4) ? 1 + (int64_t)test_rng_below(200) : 1;
        if (w.masked) s->num_docs += 7;  // one of them has targets
        w.num_docs += s->num_docs;
    }
    w.lengths = host_calloc((size_t)w.num_docs, sizeof(int32_t), "test");
    for (int64_t d = 0; d < w.num_docs; d++)
        w.lengths[d] = 26 + (int32_t)test_rng_below(longest >> test_rng_below(5));
    return w;
}

static void free_world(World *w) {
    sources_free(&w->sources);
    free(w->lengths);
}

static PlanSettings random_settings(void) {
    static const LongDocs policies[] = {LONG_SPLIT, LONG_SPLIT, LONG_TRUNCATE};
    PlanSettings s = {.seed = test_rng_u64(), .num_micro = 1 + (int32_t)test_rng_below(4)};
    s.max_seqlen = 32 + (int32_t)test_rng_below(200);
    s.micro_batch_tokens = s.max_seqlen + (int32_t)test_rng_below(600);
    s.fill_ppm = 700000 + (int32_t)test_rng_below(300001);
    s.long_docs = policies[test_rng_below(3)];
    return s;
}

static int32_t source_of(const World *w, int64_t doc) {
    int32_t i = 0;
    while (i + 1 < w->sources.n && doc >= w->sources.list[i + 1].first_doc) i++;
    return i;
}

static void draw(const World *w, const PlanSettings *s, PlanState *at, Segment *c) {
    const DocIndex index = index_of(w);
    LongCounts counts = {0};
    Error err = {0};
    CHECK_MSG(mixture_draw(&index, s, at, c, &counts, &err), "%s", err.what);
}

// -------------------------------------------------------------------------------------------------
// Shares

// Draws and checks the shares: no source ahead by more than a segment of its own, or behind by more
// than the longest of all, whatever is drawn next.
static void draw_and_check(const World *w, const PlanSettings *s, PlanState *at, int times) {
    int32_t own[MAX_SOURCES] = {0}, most = 0;
    for (int64_t d = 0; d < w->num_docs; d++)
        most = w->lengths[d] > most ? w->lengths[d] : most;
    most = most < s->max_seqlen ? most : s->max_seqlen;
    for (int k = 0; k < times; k++) {
        Segment c;
        __int128 all = 0;
        draw(w, s, at, &c);
        int32_t *longest = &own[source_of(w, c.doc)];
        *longest = c.length > *longest ? c.length : *longest;
        for (int32_t i = 0; i < w->sources.n; i++) all += at->sources[i].counted;
        for (int32_t i = 0; i < w->sources.n; i++) {
            const int64_t weight = w->sources.list[i].weight;
            const __int128 ahead = (__int128)at->sources[i].counted * ALL_WEIGHTS - all * weight;
            CHECK_MSG(ahead <= (__int128)own[i] * (ALL_WEIGHTS - weight), "%d is ahead by %g", i,
                      (double)ahead / ALL_WEIGHTS);
            CHECK_MSG(-ahead <= (__int128)most * ALL_WEIGHTS, "%d is behind by %g of %d", i,
                      (double)-ahead / ALL_WEIGHTS, most);
        }
    }
}

TEST(every_prefix_has_the_shares_to_within_a_segment) {
    for (int round = 0; round < 400; round++) {
        World w = make_world(1 + round % 8, 1u << (4 + test_rng_below(7)));
        const PlanSettings s = random_settings();
        PlanState at = {0};
        draw_and_check(&w, &s, &at, 400);
        free_world(&w);
    }
}

TEST(shares_count_anew_when_the_weights_change) {
    Error err = {0};
    for (int round = 0; round < 40; round++) {
        World w = make_world(4, 300);
        const PlanSettings s = random_settings();
        PlanState at = {0};
        int64_t before[4];
        Sources other;
        draw_and_check(&w, &s, &at, 100 + round);
        CHECK(sources_parse(&other, round % 2 ? "a:0,b:8,c:1,d:1" : "a:1,b:1,c:6,d:2", &err));
        for (int i = 0; i < 4; i++) {
            w.sources.list[i].weight = other.list[i].weight;
            before[i] = at.sources[i].tokens;
            at.sources[i].counted = 0;
        }
        draw_and_check(&w, &s, &at, 200);
        for (int i = 0; i < 4; i++)
            CHECK(at.sources[i].tokens == before[i] + at.sources[i].counted);
        CHECK(round % 2 == 0 || at.sources[0].counted == 0);
        sources_free(&other);
        free_world(&w);
    }
}

// -------------------------------------------------------------------------------------------------
// Streams

// What is drawn from a source is its own stream, whatever the others do; in it every document comes
// once an epoch (test_plan.c has the same of one source, segments left out included).
TEST(each_source_has_its_own_epochs) {
    int epochs = 0;
    for (int round = 0; round < 60; round++) {
        World w = make_world(1 + round % 8, 120);
        const PlanSettings s = random_settings();
        const DocIndex index = index_of(&w);
        PlanState at = {0};
        SourceCursor alone[MAX_SOURCES] = {{0}};
        int64_t *visits = host_calloc((size_t)w.num_docs, sizeof *visits, "test");
        for (int i = 0; i < 1500; i++) {
            Segment c, expected;
            LongCounts counts = {0};
            Error err = {0};
            draw(&w, &s, &at, &c);
            const int32_t from = source_of(&w, c.doc);
            const DocIndex source = mixture_source(&index, from);
            CHECK(w.sources.list[from].weight > 0);
            CHECK(plan_next_segment(&source, &s, &alone[from], &expected, &counts, &err));
            CHECK(c.doc == expected.doc && c.tok_off == expected.tok_off &&
                  c.length == expected.length && c.has_next == expected.has_next);
            CHECK(memcmp(&alone[from], &at.sources[from], sizeof *alone) == 0);
            if (c.tok_off == 0 && !w.masked) CHECK(visits[c.doc]++ == alone[from].epoch);
        }
        for (int32_t i = 0; i < w.sources.n; i++) epochs += alone[i].epoch > 2;
        free(visits);
        free_world(&w);
    }
    CHECK_MSG(epochs > 50, "%d", epochs);
}

TEST(sources_of_one_size_have_different_orders) {
    int32_t lengths[200];
    for (int i = 0; i < 200; i++) lengths[i] = 40;
    World w = {.sources = {.list = {{NULL, ALL_WEIGHTS / 2, 0, 100, 0},
                                    {NULL, ALL_WEIGHTS / 2, 100, 100, 0}}, .n = 2},
               .lengths = lengths, .num_docs = 200};
    const PlanSettings s = {.max_seqlen = 64};
    PlanState at = {0};
    int64_t place[200] = {0};
    int same = 0;
    for (int i = 0; i < 200; i++) {
        Segment c;
        draw(&w, &s, &at, &c);
        place[c.doc] = i / 2;
    }
    for (int d = 0; d < 100; d++) same += place[d] == place[d + 100];
    CHECK_MSG(same < 10, "%d", same);
}

// Steps cut the drawn segments; planned anew from the state before it, a step is the same.
TEST(steps_are_the_same_from_any_state) {
    for (int round = 0; round < 60; round++) {
        World w = make_world(2 + round % 7, 400);
        const PlanSettings s = random_settings();
        const DocIndex index = index_of(&w);
        PlanState state = {0}, at = {0};
        StepPlan p = {0};
        Error err = {0};
        for (int step = 0; step < 12; step++) {
            StepPlan fresh = {0};
            Segment c;
            CHECK_MSG(plan_step(&p, &index, &s, LAYOUT_PACKED, &state, &err), "%s", err.what);
            CHECK(plan_step(&fresh, &index, &s, LAYOUT_ROWS, &state, &err));
            CHECK(memcmp(&fresh.cursor_after, &p.cursor_after, sizeof state) == 0);
            plan_free(&fresh);
            for (int64_t i = 0; i < p.num_stream; i++) {
                draw(&w, &s, &at, &c);
                CHECK(c.doc == p.stream[i].doc && c.tok_off == p.stream[i].tok_off);
            }
            at.step = step + 1;
            CHECK(memcmp(&at, &p.cursor_after, sizeof at) == 0);
            state = p.cursor_after;
        }
        plan_free(&p);
        free_world(&w);
    }
}

TEST(a_source_without_anything_to_train_has_a_name) {
    int32_t lengths[] = {40, 80, 80};
    const World w = {.sources = {.list = {{(char *)"web", 1, 0, 1, 0},
                                          {(char *)"code", ALL_WEIGHTS - 1, 1, 2, 0}}, .n = 2},
                     .lengths = lengths, .num_docs = 3};
    const DocIndex index = index_of(&w);
    const PlanSettings s = {.max_seqlen = 64, .long_docs = LONG_DROP};
    PlanState at = {0};
    Segment c;
    LongCounts counts = {0};
    Error err = {0};
    CHECK(!mixture_draw(&index, &s, &at, &c, &counts, &err) && err.code == EXIT_BAD_INPUT);
    CHECK_MSG(strncmp(err.what, "code: data: all 2 documents", 27) == 0, "%s", err.what);
}

// -------------------------------------------------------------------------------------------------
// What --train names

static bool parses(const char *spec, const char *expected) {
    Sources s;
    Error err = {0};
    char text[1024] = "";
    if (sources_parse(&s, spec, &err))
        for (int32_t i = 0; i < s.n; i++)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s=%ld;", s.list[i].spec,
                     s.list[i].weight);
    else
        snprintf(text, sizeof text, "%d", err.code);
    sources_free(&s);
    if (strcmp(text, expected) != 0) printf("    %s: %s\n", spec, text);
    return strcmp(text, expected) == 0;
}

TEST(weights_are_read_and_normalised) {
    Error err = {0};
    CHECK(parses("a", "a=1000000000;") && parses("a,b/*.bin", "a,b/*.bin=1000000000;"));
    CHECK(parses("a:3,b:1", "a=750000000;b=250000000;") && parses("a:7", "a=1000000000;"));
    CHECK(parses("a:1,b:1,c:1", "a=333333333;b=333333334;c=333333333;"));
    CHECK(parses("a:.333333333,b:0.333333334,c:.333333333",
                 "a=333333333;b=333333334;c=333333333;"));
    CHECK(parses("a:1e-6,b:1,", "a=1000;b=999999000;") && parses("a:0,b:2", "a=0;b=1000000000;"));
    CHECK(parses("a:1,b", "2") && parses("a:1,b:x", "2") && parses("a:1,b:", "2"));
    CHECK(parses("a:0,b:0", "2") && parses("a:1,b:-1", "2") && parses("a:1,b:nan", "2"));
    CHECK(parses("a:1,b:inf", "2") && parses("C:\\x", "C:\\x=1000000000;"));
    char many[400] = "", plain[400] = "";
    for (int i = 0; i < 33; i++) strcat(many, "a:1,"), strcat(plain, "a,");
    CHECK(parses(many, "2"));
    Sources s;
    CHECK(sources_parse(&s, plain, &err) && s.n == 1 && strcmp(s.list[0].spec, plain) == 0);
    sources_free(&s);
    // a file that is there by its whole name has no weight
    char file[300], spec[700], expected[700];
    snprintf(file, sizeof file, "%s", scratch("a:1"));
    CHECK(file_write_all(file, "", 0, &err));
    snprintf(expected, sizeof expected, "%s=1000000000;", file);
    CHECK(parses(file, expected));
    snprintf(spec, sizeof spec, "%s:3,b:1", file);
    snprintf(expected, sizeof expected, "%s=750000000;b=250000000;", file);
    CHECK(parses(spec, expected));
    snprintf(spec, sizeof spec, "%s,b:1", file);
    CHECK(parses(spec, "2"));
}

// -------------------------------------------------------------------------------------------------
// trainer_state.json

static Dataset two_sources(const char *spec) {
    Dataset d = {.fingerprint = 1ull << 40};
    Error err = {0};
    CHECK(sources_parse(&d.sources, spec, &err));
    return d;
}

static const PlanState saved = {4, {{1, 2, 3, 1000, 300}, {5, 6, 7, 2000, 700}}};

// Result of state_read for the state of `train` after `from` in its text has become `to`.
static int read_changed(TrainingState *s, const Dataset *train, const Dataset *now,
                        const char *from, const char *to) {
    static Checkpoint ck;
    static const Option none[] = {OPTION_END};
    const PlanSettings plan = {.num_micro = 1};
    const TrainingState state = {.cursor = saved};
    Error err = {0};
    char path[IO_PATH_MAX], text[4096];
    uint64_t n = 0;
    *s = (TrainingState){0};
    CHECK(dir_create_all(scratch("out"), &err));
    CHECK(checkpoint_begin(&ck, scratch("out"), 4, NULL, &err));
    CHECK(state_write(&ck, &state, &plan, train, "0", none, &err));
    CHECK(checkpoint_path(&ck, "trainer_state.json", path, sizeof path, &err));
    char *written = file_read_all(path, 1 << 20, &n, "", &err), *at = strstr(written, from);
    CHECK_MSG(at, "%s is not in %s", from, written);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - written), written, to, at + strlen(from));
    free(written);
    CHECK(file_write_all(path, text, strlen(text), &err));
    state_read(s, ck.dir, &plan, now, &err);
    checkpoint_abort(&ck);
    return err.code;
}

TEST(a_checkpoint_keeps_every_cursor) {
    Dataset d = two_sources("web:7,code:3"), changed = two_sources("web:1,code:1");
    TrainingState s;
    CHECK(read_changed(&s, &d, &d, "", "") == 0);
    CHECK(memcmp(&s.cursor, &saved, sizeof saved) == 0);
    CHECK(read_changed(&s, &d, &changed, "", "") == 0);
    CHECK(s.cursor.sources[0].counted == 0 && s.cursor.sources[1].counted == 0);
    CHECK(s.cursor.sources[0].tokens == 1000 && s.cursor.sources[1].tok_off == 7);
    static const char *const damage[][2] = {
        {"\"epoch\": 5", "\"epoch\": -5"},         {"\"doc_pos\": 6", "\"doc_pos\": 6.5"},
        {"\"tok_off\": 7", "\"tok_off\": \"7\""},  {"\"tokens\": 2000", "\"tokens\": 600"},
        {"\"counted\": 300", "\"counted\": 1001"}, {"\"counted\": 300", "\"counted\": -1"},
        {"\"counted\": 700", "\"other\": 700"},    {"\"weight\": 3", "\"weight\": 30"},
        {"\"tokens\": 1000", "\"tokens\": 1e300"}, {"\"sources\": [", "\"sources\": 1, \"x\": ["},
        {"\"sources\"", "\"source\""},             {"\"sources\": [", "\"sources\": [[],"},
    };
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++)
        CHECK_MSG(read_changed(&s, &d, &d, damage[i][0], damage[i][1]) == EXIT_BAD_INPUT, "%s",
                  damage[i][1]);
    sources_free(&d.sources);
    sources_free(&changed.sources);
}

// Their only cursor is in the file itself, with no counts.
TEST(checkpoints_of_older_versions_have_one_source) {
    Dataset one = two_sources("web"), two = two_sources("web:1,code:1");
    TrainingState s;
    const char *old = "\"epoch\": 8, \"doc_pos\": 9, \"tok_off\": 10, \"x\"";
    CHECK(read_changed(&s, &one, &one, "\"sources\"", old) == 0);
    const SourceCursor expected = {8, 9, 10, 0, 0};
    CHECK(memcmp(&s.cursor.sources[0], &expected, sizeof expected) == 0 && s.cursor.step == 4);
    CHECK(read_changed(&s, &one, &two, "\"sources\"", old) == EXIT_BAD_INPUT);
    sources_free(&one.sources);
    sources_free(&two.sources);
}

TEST_MAIN()
