// trainer_state.json: states of other data, of another plan, and damaged ones.
#include "../data/runs/checkpoint_files.h"
#include "scratch.h"

// Numbers that must be the same in a resumed run.
typedef struct {
    PlanSettings plan;
    Dataset train;
} Same;

static const struct {
    const char *name;
    size_t byte;  // in Same; fingerprints are compared without their 12 lowest bits
} fields[] = {{"data_fingerprint", offsetof(Same, train.fingerprint) + 3},
              {"token_fingerprint", offsetof(Same, train.token_fingerprint) + 3},
              {"seed", offsetof(Same, plan.seed)},
              {"max_seqlen", offsetof(Same, plan.max_seqlen)},
              {"micro_batch_tokens", offsetof(Same, plan.micro_batch_tokens)},
              {"num_micro_batches", offsetof(Same, plan.num_micro)},
              {"fill_ppm", offsetof(Same, plan.fill_ppm)},
              {"long_docs", offsetof(Same, plan.long_docs)}};

// Result of state_read for this text.
static int read_text(const char *text, const Same *same, TrainingState *s) {
    Error err = {0};
    const char *dir = scratch("state");
    *s = (TrainingState){0};
    MUST(dir_create_all(dir, &err));
    put_file(scratch("state/trainer_state.json"), text, strlen(text));
    state_read(s, dir, &same->plan, &same->train, &err);
    return err.code;
}

// The same for the text without the line of `field`. "": all lines.
static int read_without(const char *text, const Same *same, const char *field) {
    TrainingState s;
    char name[64], edited[4096];
    snprintf(name, sizeof name, "\"%s\"", field);
    snprintf(edited, sizeof edited, "%s", text);
    char *line = strstr(edited, name);
    CHECK(line || !field[0]);
    if (line) memmove(line, strchr(line, '\n') + 1, strlen(strchr(line, '\n') + 1) + 1);
    const int code = read_text(edited, same, &s);
    const bool ok = code == 0;
    const SourceCursor *c = &s.cursor.sources[0];
    CHECK(!ok || (c->epoch == 1 && c->doc_pos == 2 && c->tok_off == 3 && s.cursor.step == 4 &&
                  s.log_bytes == 5 && s.skips_in_a_row == 6));
    CHECK(!ok || (s.trend.mean == 0.1 && s.trend.deviation == 0.2 && s.trend.num_losses == 7));
    return code;
}

static const Same usual = {.plan = {.num_micro = 1},
                           .train = {.sources = {.n = 1},
                                     .fingerprint = 0x123456789abcdefull,
                                     .token_fingerprint = 0xfedcba987654321ull}};

// The contents of state_write's file; the caller frees them.
static char *written_state(const Same *same, Error *err) {
    static Checkpoint ck;
    uint64_t n = 0;
    char path[IO_PATH_MAX];
    const TrainingState s = {.cursor = {4, {{1, 2, 3, 1000, 300}, {5, 6, 7, 2000, 700}}},
                             .log_bytes = 5,
                             .skips_in_a_row = 6,
                             .trend = {0.1, 0.2, 7}};
    CHECK(dir_create_all(scratch("out"), err));
    CHECK(checkpoint_begin(&ck, scratch("out"), 4, NULL, err));
    char *text = state_write(&ck, &s, &same->plan, &same->train, "0", err) &&
                         path_join(path, ck.dir, "trainer_state.json", err)
                     ? file_read_all(path, 1 << 20, &n, "", err)
                     : NULL;
    checkpoint_abort(&ck);
    return text;
}

TEST(missing_fields_are_refused_and_other_values_do_not_fit) {
    Error err = {0};
    AUTO_FREE char *text = written_state(&usual, &err);
    CHECK_MSG(text, "%s", err.what);
    CHECK(read_without(text, &usual, "") == 0);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const int code = read_without(text, &usual, fields[i].name);
        CHECK_MSG(code == EXIT_BAD_INPUT, "%s: %d", fields[i].name, code);
        Same other = usual;
        ((unsigned char *)&other)[fields[i].byte] ^= 1;
        CHECK_MSG(read_without(text, &other, "") == EXIT_CHECKPOINT_MISFIT, "%s", fields[i].name);
    }
}

// Of web:7,code:3; then of a run of the sources `now`, after `from` in the file has become `to`.
static int read_mixture(const char *now, const char *from, const char *to, PlanState *found) {
    Same wrote = usual, reads = usual;
    TrainingState s;
    Error err = {0};
    char edited[4096];
    MUST(sources_parse(&wrote.train.sources, "web:7,code:3", &err));
    MUST(sources_parse(&reads.train.sources, now, &err));
    AUTO_FREE char *text = written_state(&wrote, &err);
    const char *at = strstr(text, from);
    CHECK_MSG(at, "%s is not in %s", from, text);
    snprintf(edited, sizeof edited, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    const int code = read_text(edited, &reads, &s);
    *found = s.cursor;
    sources_free(&wrote.train.sources);
    sources_free(&reads.train.sources);
    return code;
}

TEST(a_mixture_has_a_cursor_for_each_source) {
    static const SourceCursor web = {1, 2, 3, 1000, 0}, code = {5, 6, 7, 2000, 0};
    static const char *const damage[][2] = {{"\"epoch\": 5", "\"epoch\": -5"},
                                            {"\"doc_pos\": 6", "\"doc_pos\": 6.5"},
                                            {"\"tok_off\": 7", "\"tok_off\": \"7\""},
                                            {"\"tokens\": 2000", "\"tokens\": 600"},
                                            {"\"counted\": 300", "\"counted\": 1001"},
                                            {"\"counted\": 300", "\"counted\": -1"},
                                            {"\"counted\": 700", "\"other\": 700"},
                                            {"\"weight\": 3", "\"weight\": 30"},
                                            {"\"tokens\": 1000", "\"tokens\": 1e300"},
                                            {"\"sources\": [", "\"sources\": 1, \"x\": ["},
                                            {"\"sources\"", "\"source\""},
                                            {"\"sources\": [", "\"sources\": [[],"}};
    PlanState s;
    CHECK(read_mixture("web:7,code:3", "", "", &s) == 0);
    CHECK(s.sources[0].counted == 300 && s.sources[1].counted == 700 && s.step == 4);
    CHECK(read_mixture("web:1,code:1", "", "", &s) == 0);  // other weights count from here
    CHECK(memcmp(&s.sources[0], &web, sizeof web) == 0);
    CHECK(memcmp(&s.sources[1], &code, sizeof code) == 0);
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        const int result = read_mixture("web:7,code:3", damage[i][0], damage[i][1], &s);
        CHECK_MSG(result == EXIT_BAD_INPUT, "%s: %d", damage[i][1], result);
    }
}

TEST_MAIN()
