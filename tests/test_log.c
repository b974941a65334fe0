// data/runs/log.h: records that are whole on a full disk and after damage; lines of steps; which
// losses are spikes.
#include <math.h>
#include <signal.h>
#include <sys/resource.h>

#include "../data/base/file.h"
#include "../data/runs/log.h"
#include "../data/runs/out_dir.h"
#include "scratch.h"

// log.jsonl in a directory of its own
static char *read_log(void) {
    Error err = {0};
    uint64_t n = 0;
    char *text = file_read_all(scratch("log/log.jsonl"), 1 << 16, &n, "", &err);
    CHECK_MSG(text, "%s", err.what);
    return text;
}

static RunLog open_log(const char *text, int64_t keep_bytes) {
    RunLog log;
    MUST(dir_create_all(scratch("log"), &err));
    put_file(scratch("log/log.jsonl"), text, strlen(text));
    warnings_off = true;
    MUST(log_open(&log, scratch("log"), keep_bytes, 1, &err));
    return log;
}
static void close_log(RunLog *log) { close(log->fd); }
#define OPEN_LOG(log_, ...) __attribute__((cleanup(close_log))) RunLog log_ = open_log(__VA_ARGS__)

static void put_record(RunLog *log) {
    const ValidationSet set = {1, 2, 3, 0};
    report_validation(log, 1, 7.5, &set, NULL, &(PairSums){0});
}

TEST(a_log_keeps_the_lines_before_a_checkpoint) {
    static const struct {
        int64_t keep;
        const char *text, *left;
    } cuts[] = {{14, "one\ntwo\nthree\n", "one\ntwo\nthree\n"},
                {13, "one\ntwo\nthree\n", "one\ntwo\n"},
                {8, "one\ntwo\nthree\n", "one\ntwo\n"},
                {7, "one\ntwo\nthree\n", "one\n"},
                {0, "one\ntwo\nthree\n", ""},
                {-1,
                 "more than what is written after it: one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
                 "eight\nnine\nten\neleven\ntwelve\n",
                 ""},
                {11, "one\ntwo\nthr", "one\ntwo\n"}};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        OPEN_LOG(log, cuts[i].text, cuts[i].keep);
        const size_t left = strlen(cuts[i].left);
        CHECK_MSG(log.size_bytes == (int64_t)left, "%zu: %ld bytes", i, log.size_bytes);
        put_record(&log);
        MUST(log_sync(&log, &err));
        AUTO_FREE char *text = read_log();
        CHECK_MSG(strncmp(text, cuts[i].left, left) == 0 && text[left] == '{' &&
                      strlen(text) == (size_t)log.size_bytes && text[log.size_bytes - 1] == '\n',
                  "%zu: %s", i, text);
    }
}

// The file's size is limited to one record and a half: the next ones are lost as a whole.
TEST(records_are_whole_on_a_full_disk) {
    struct rlimit before, full;
    OPEN_LOG(log, "", -1);
    put_record(&log);
    const int64_t size = log.size_bytes;
    CHECK(size > 10 && getrlimit(RLIMIT_FSIZE, &before) == 0);
    full = (struct rlimit){(rlim_t)(size + size / 2), before.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &full) == 0);
    put_record(&log);
    put_record(&log);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    signal(SIGXFSZ, SIG_DFL);
    AUTO_FREE char *lost = read_log();
    CHECK(log.lost == 2 && log.size_bytes == size && strlen(lost) == (size_t)size);
    put_record(&log);
    AUTO_FREE char *both = read_log();
    CHECK(log.lost == 0 && strlen(both) == 2 * (size_t)size);
    CHECK(memcmp(both, lost, (size_t)size) == 0 && strcmp(both + size, lost) == 0);
}

// The contents of step records are tested by test_ranks.sh and test_data_cli.sh
TEST(lines_of_steps) {
    static const struct {
        int64_t step, every;
        bool pauses, skipped, spike;
        const char *part;  // of the line; NULL: it has none
    } cases[] = {
        {2, 1, false, false, false, "step     2/4 | loss 2.5000 | eta 2:04 | 180 tok/s"},
        {2, 1, false, false, false, "s (90 targets/s) | lr 0.00e+00 | norm 0.500 | 500 ms"},
        {2, 1, false, false, false,
         "ms | fill 90.0 % | 2 docs | pairs 25.0 % | imbalance 1.125 (1.250)\n"},
        {3, 2, false, false, false, NULL},
        {3, 2, true, false, false, "step     3/4"},
        {2, 0, true, false, false, NULL},
        {3, 0, false, true, false, "| loss 2.5000 | SKIPPED: not finite | eta 1:02"},
        {3, 0, false, false, true, "| loss 2.5000 | SPIKE | eta 1:02"},
    };
    Sources one;
    MUST(sources_parse(&one, "a", &err));
    OPEN_LOG(log, "", -1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        RunTotals t = {.pauses_ms = 61600};
        const Options o = {.steps = 4, .log_every = cases[i].every};
        StepReport r = {.o = &o, .ms = 500, .loss = 2.5, .grad_norm = 0.5};
        StepPlan p = {.num_stream = 2, .num_targets = 45, .masked = true, .sources = &one};
        p.real_tokens = p.computed_tokens = 90, p.buffer_tokens = 100;
        p.attention_pairs = 1, p.padded_pairs = 4;
        r.step = cases[i].step, r.balance = (StepBalance){1.125, 1.25, 1};
        r.pauses = cases[i].pauses, r.skipped = cases[i].skipped, r.spike = cases[i].spike;
        capture_begin();
        report_step(&log, &t, &r, &p);
        const char *line = capture_end();
        CHECK_MSG(cases[i].part ? strstr(line, cases[i].part) != NULL : !line[0], "case %zu: %s", i,
                  line);
    }
    AUTO_FREE char *text = read_log();
    CHECK_MSG(!strstr(text, "sources"), "of one source: %s", text);
    sources_free(&one);
}

TEST(the_last_step_is_that_of_the_whole_log) {
    static const struct {
        const char *text;
        int64_t last_step;
    } logs[] = {
        {"", 0},
        {"{\"event\": \"start\", \"options\": {}}\n{\"step\": 1, \"loss\": 1}\n"
         "{\"step\": 2, \"loss\": 1}\n{\"event\": \"val\", \"step\": 9}\n",
         2},
        {"{\"event\": \"start\"}\n{\"step\": 9}\n{\"event\": \"start\"}\n", 0},
        {"{\"step\": 7, \"loss\": 1}\n{\"event\": \"resume\"}\n{\"step\": 5, \"loss\": 1}\n", 7},
    };
    int64_t last;
    for (size_t i = 0; i < sizeof logs / sizeof *logs; i++) {
        put_file(scratch("log/log.jsonl"), logs[i].text, strlen(logs[i].text));
        MUST(out_dir_last_step(scratch("log"), &last, &err));
        CHECK_MSG(last == logs[i].last_step, "log %zu: %ld", i, last);
    }
    unlink(scratch("log/log.jsonl"));
    MUST(out_dir_last_step(scratch("log"), &last, &err));
    CHECK(last == -1);
}

TEST(a_falling_noisy_loss_has_no_spike) {
    LossTrend t = {0, 0, 0};
    for (int i = 0; i < 2000; i++)
        CHECK_MSG(!loss_is_spike(&t, 2 + 8 * exp(-i / 30.0) + 0.2 * test_rng_normal()), "at %d", i);
}

TEST(a_jump_is_a_spike_until_it_is_the_new_level) {
    LossTrend t = {0, 0, 0};
    for (int i = 0; i < 100; i++) CHECK(!loss_is_spike(&t, i % 2 ? 2.1 : 1.9));
    LossTrend one = t;
    CHECK(!loss_is_spike(&one, 2.9));
    CHECK(loss_is_spike(&one, 3.5) && !loss_is_spike(&one, 2));  // one does not move the mean
    CHECK(loss_is_spike(&one, NAN) && loss_is_spike(&one, INFINITY) && !loss_is_spike(&one, 2));
    int spikes = 0;  // each moves the mean by the margin only; it would be 6 by the whole jump
    while (loss_is_spike(&t, 6) && spikes < 1000) spikes++;
    CHECK_MSG(spikes == 17, "%d", spikes);
    CHECK(!loss_is_spike(&t, 6) && !loss_is_spike(&t, 2));
}

TEST_MAIN()
