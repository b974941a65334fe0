// trainer_state.json: states of other data, of another plan and of older versions.
#include <stdio.h>
#include <string.h>

#include "../data/base/dir.h"
#include "../data/base/error.h"
#include "../data/base/file.h"
#include "../data/base/options.h"
#include "../data/batches/plan.h"
#include "../data/runs/checkpoint.h"
#include "../data/runs/checkpoint_files.h"
#include "../data/shards/dataset.h"
#include "scratch.h"
#include "test.h"

// Numbers that must be the same in a resumed run.
typedef struct {
    PlanSettings plan;
    Dataset train;
} Same;

static const struct {
    const char *name;
    size_t offset;  // in Same
    int size;
    bool is_new;
} fields[] = {
#define FIELD(name_, at_, ...) \
    { name_, offsetof(Same, at_), (int)sizeof((Same *)0)->at_, __VA_ARGS__ }
    FIELD("data_fingerprint", train.fingerprint, false),
    FIELD("token_fingerprint", train.token_fingerprint, true),
    FIELD("seed", plan.seed, false),
    FIELD("max_seqlen", plan.max_seqlen, false),
    FIELD("micro_batch_tokens", plan.micro_batch_tokens, false),
    FIELD("num_micro_batches", plan.num_micro, false),
    FIELD("fill_ppm", plan.fill_ppm, false),
    FIELD("long_docs", plan.long_docs, false),
};

// Result of state_read for the text without the line of `field`, as an older version wrote it. "":
// all lines.
static int read_without(const char *text, const Same *same, const char *field) {
    Error err = {0};
    TrainingState s = {0};
    char dir[256], path[300], name[64], edited[4096];
    snprintf(dir, sizeof dir, "%s", scratch("state"));
    snprintf(path, sizeof path, "%s/trainer_state.json", dir);
    snprintf(name, sizeof name, "\"%s\"", field);
    snprintf(edited, sizeof edited, "%s", text);
    char *line = strstr(edited, name);
    CHECK(dir_create_all(dir, &err) && (line || !field[0]));
    if (line) memmove(line, strchr(line, '\n') + 1, strlen(strchr(line, '\n') + 1) + 1);
    CHECK(file_write_all(path, edited, strlen(edited), &err));
    const bool ok = state_read(&s, dir, &same->plan, &same->train, &err);
    const SourceCursor *c = &s.cursor.sources[0];
    CHECK(!ok || (c->epoch == 1 && c->doc_pos == 2 && c->tok_off == 3 && s.cursor.step == 4 &&
                  s.log_bytes == 5 && s.skips_in_a_row == 6));
    CHECK(!ok || (s.trend.mean == (strcmp(field, "loss_mean") ? 0.1 : 0) &&
                  s.trend.deviation == 0.2 && s.trend.num_losses == 7));
    return err.code;
}

static Same usual(void) {
    Same same = {.plan = {.num_micro = 1}, .train.sources.n = 1};
    same.train.fingerprint = 0x123456789abcdefull;
    same.train.token_fingerprint = 0xfedcba987654321ull;
    return same;
}

// The contents of state_write's file; the caller frees them.
static char *written_state(const Same *same, const Option *options, Error *err) {
    static Checkpoint ck;
    uint64_t n = 0;
    char path[IO_PATH_MAX];
    const TrainingState s = {.cursor = {4, {{1, 2, 3, 0, 0}}},
                             .log_bytes = 5,
                             .skips_in_a_row = 6,
                             .trend = {0.1, 0.2, 7}};
    CHECK(dir_create_all(scratch("out"), err));
    CHECK(checkpoint_begin(&ck, scratch("out"), 4, NULL, err));
    char *text = state_write(&ck, &s, &same->plan, &same->train, "0", options, err) &&
                         checkpoint_path(&ck, "trainer_state.json", path, sizeof path, err)
                     ? file_read_all(path, 1 << 20, &n, "", err)
                     : NULL;
    checkpoint_abort(&ck);
    return text;
}

TEST(missing_fields_mean_the_behaviour_of_older_versions) {
    Error err = {0};
    const Option none[] = {OPTION_END};
    const Same same = usual();
    char *text = written_state(&same, none, &err);
    CHECK_MSG(text, "%s", err.what);
    CHECK(read_without(text, &same, "") == 0);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const int code = read_without(text, &same, fields[i].name);
        CHECK_MSG(code == (fields[i].is_new ? 0 : EXIT_BAD_INPUT), "%s: %d", fields[i].name, code);
        Same other = same;  // fingerprints are compared without their 12 lowest bits
        ((unsigned char *)&other)[fields[i].offset + (fields[i].size == 8 && i < 2 ? 3 : 0)] ^= 1;
        CHECK_MSG(read_without(text, &other, "") == EXIT_CHECKPOINT_MISFIT, "%s", fields[i].name);
    }
    CHECK(read_without(text, &same, "packer") == 0);
    CHECK(read_without(text, &same, "loss_mean") == 0);
    free(text);
}

// Another packer puts other documents into the micro-batches, unless there is only one.
TEST(plans_of_the_packer_before_are_refused) {
    Error err = {0};
    const Option none[] = {OPTION_END};
    Same same = usual();
    same.plan.num_micro = 2;
    char *text = written_state(&same, none, &err);
    CHECK_MSG(text, "%s", err.what);
    CHECK(read_without(text, &same, "") == 0);
    CHECK(read_without(text, &same, "packer") == EXIT_CHECKPOINT_MISFIT);
    free(text);
}

// Longer than any fixed buffer: a glob of many shards, say. More than state_open reads is refused.
TEST(long_options_are_saved_or_refused) {
    enum { MIB = 1 << 20 };
    Error err = {0};
    const Same same = usual();
    char *value = calloc(MIB + 1, 1);
    const char *train = value;
    const Option options[] = {{"train", OPTION_STRING, &train, "", NULL, 0, 0, ""}, OPTION_END};
    memset(value, 'x', MIB / 2);
    char *text = written_state(&same, options, &err);
    CHECK_MSG(text && strlen(text) > MIB / 2, "%s", err.what);
    free(text);
    memset(value, 'x', MIB);
    text = written_state(&same, options, &err);
    CHECK_MSG(!text && err.code == EXIT_USAGE, "%d", err.code);
    free(value);
}

TEST_MAIN()
