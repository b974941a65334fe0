// Combinations of options; learning rates, against values computed by hand.
#include <math.h>

#include "../data/runs/run_options.h"
#include "scratch.h"

TEST(learning_rates_warm_up_and_decay) {  // from 0.5 to 0.05
    enum { ALL = -1 };
    static const struct {
        int kind, warmup, steps, at;
        float decay_frac;
        double expected;
    } cases[] = {{ALL, 10, 80, 0, 0.25f, 0.05},
                 {ALL, 10, 80, 8, 0.25f, 0.45},
                 {ALL, 10, 80, 9, 0.25f, 0.5},
                 {ALL, 10, 80, 10, 0.25f, 0.5},
                 {SCHEDULE_CONSTANT, 10, 80, 79, 0.25f, 0.5},
                 {SCHEDULE_LINEAR, 10, 80, 45, 0.25f, 0.5 * (0.1 + 0.9 * 0.5)},
                 {SCHEDULE_LINEAR, 10, 80, 80, 0.25f, 0.05},
                 {SCHEDULE_COSINE, 10, 80, 45, 0.25f, 0.5 * (0.1 + 0.9 * 0.5)},
                 {SCHEDULE_WSD, 10, 80, 60, 0.25f, 0.5},
                 {SCHEDULE_WSD, 10, 80, 65, 0.25f, 0.5 * (0.1 + 0.9 * 0.75)},
                 {SCHEDULE_WSD_SQRT, 10, 80, 60, 0.25f, 0.5},
                 {SCHEDULE_WSD_SQRT, 10, 80, 65, 0.25f, 0.5 * (0.1 + 0.9 * 0.5)},
                 {SCHEDULE_WSD_SQRT, 10, 80, 80, 0.25f, 0.05},
                 {SCHEDULE_WSD, 80, 80, 79, 0.25f, 0.5},  // only warm-up
                 {SCHEDULE_WSD, 0, 80, 79, 0, 0.5},       // no decay
                 {SCHEDULE_WSD, 0, 1, 0, 1, 0.5}};        // one step
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int kind = SCHEDULE_CONSTANT; kind <= SCHEDULE_WSD_SQRT; kind++) {
            Options o = {.schedule = kind, .lr = 0.5f, .min_lr_frac = 0.1f};
            o.steps = cases[i].steps, o.warmup_steps = cases[i].warmup;
            o.decay_frac = cases[i].decay_frac;
            const double found = learning_rate(&o, cases[i].at), expected = cases[i].expected;
            if (cases[i].kind == ALL || cases[i].kind == kind)
                CHECK_MSG(fabs(found - expected) <= 1e-7 * expected, "case %zu, kind %d: %g", i,
                          kind, found);
        }
}

TEST(options_that_decide_together) {
    static const struct {
        Options o;
        const char *checkpoint;
        const char *weights;  // "": random ones
    } cases[] = {
        {{.model = "demo"}, "", ""},
        {{.model = "dir"}, "", "dir"},
        {{.model = "dir", .from_scratch = true}, "", ""},
        {{.model = "dir", .from_scratch = true, .resume = "newest"}, "a/step", "a/step"},
        {{.model = "dir", .lora = 8}, "", ""},
        {{.model = "dir", .adapter = "adapter"}, "", "adapter"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Options o = cases[i].o;
        const char *found = weights_dir(&o, cases[i].checkpoint), *weights = found ? found : "";
        CHECK_MSG(strcmp(weights, cases[i].weights) == 0, "case %zu: %s", i, weights);
    }
    for (int bits = 0; bits < 16; bits++) {
        Options o = {.steps = bits & 1, .dry_run = bits & 2, .deterministic = true};
        o.compare = bits & 4, o.check_packing = bits & 8 ? "" : NULL;
        CHECK(run_trains(&o) == (bits == 1) && reduces_deterministically(&o) == (bits < 4));
    }
    for (int steps = 100; steps <= 500; steps += 400)  // not on a terminal
        for (int every = -1; every < 2; every++)
            CHECK(run_lines_every(&(Options){.steps = steps, .log_every = every}) == abs(every));
}

// argv of a run in a directory of its own
#define PARSE(o_, ranks_, ...)                                                             \
    do {                                                                                   \
        char *argv[] = {"train_llama", "--out", (char *)scratch("run"), __VA_ARGS__};      \
        run_options_parse(o_, (int)(sizeof argv / sizeof *argv), argv, "version", ranks_); \
    } while (0)

TEST(options_of_two_runs_side_by_side) {
    static Options a, b, found;
    Error err = {0};
    PARSE(&a, 1, "--lr", "1e-3", "--epochs", "2", "--train", "a \"b\"");
    PARSE(&b, 4, "--steps", "7", "--seed=5");
    CHECK(a.lr == 1e-3f && a.epochs == 2 && a.seed == 1 && a.batch_tokens == 4096);
    CHECK(b.lr == 0 && b.epochs == 0 && b.seed == 5 && b.batch_tokens == 4 * 4096 && b.steps == 7);
    CHECK(option_given(&a.set, "lr") && !option_given(&b.set, "lr"));
    MUST(dir_create_all(a.out, &err));
    MUST(run_options_write(&a, true, &err) && run_options_read(&found, a.out, &err));
    CHECK(found.lr == 1e-3f && found.epochs == 2 && strcmp(found.train, "a \"b\"") == 0);
    CHECK(option_given(&found.set, "seed") && !option_given(&found.set, "steps"));
    CHECK(strcmp(found.out, "out/demo") == 0);  // another start has another one
    options_free(&found.set);
    unlink(scratch("run/options"));  // as in the checkpoints of earlier versions
    CHECK(!run_options_read(&found, a.out, &err) && err.code == EXIT_BAD_INPUT);
    CHECK(strstr(err.what, "run/options: cannot open") && strstr(err.hint, "earlier versions"));
    options_free(&found.set);
    options_free(&a.set);
    options_free(&b.set);
}

TEST_MAIN()
