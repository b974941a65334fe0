// What options mean together; learning rates, against values computed by hand.
#include <math.h>

#include "../data/runs/run_options.h"
#include "test.h"

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
            const Options o = {.schedule = kind,
                               .steps = cases[i].steps,
                               .warmup_steps = cases[i].warmup,
                               .lr = 0.5f,
                               .min_lr_frac = 0.1f,
                               .decay_frac = cases[i].decay_frac};
            const double found = learning_rate(&o, cases[i].at), expected = cases[i].expected;
            if (cases[i].kind == ALL || cases[i].kind == kind)
                CHECK_MSG(fabs(found - expected) <= 1e-7 * expected, "case %zu, kind %d: %g", i,
                          kind, found);
        }
}

TEST(options_that_decide_together) {
    static const struct {
        const char *model, *resume, *adapter, *at;
        int lora;
        bool from_scratch, overwrite;
        const char *weights;  // NULL: random ones
        bool replaces;
    } cases[] = {
        {"demo", NULL, NULL, "", 0, false, false, NULL, false},
        {"dir", NULL, NULL, "", 0, false, true, "dir", true},
        {"dir", NULL, NULL, "", 0, true, false, NULL, false},
        {"dir", "newest", NULL, "run/step-00000002", 0, true, false, "run/step-00000002", false},
        {"dir", NULL, NULL, "", 8, false, false, NULL, false},
        {"dir", NULL, "adapter", "", 0, false, false, "adapter", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Options o = {.steps = 1,
                           .model = cases[i].model,
                           .resume = cases[i].resume,
                           .adapter = cases[i].adapter,
                           .lora = cases[i].lora,
                           .from_scratch = cases[i].from_scratch,
                           .overwrite = cases[i].overwrite};
        ResumePoint at = {0};
        snprintf(at.dir, sizeof at.dir, "%s", cases[i].at);
        const char *weights = weights_dir(&o, &at);
        CHECK_MSG(!weights == !cases[i].weights && (!weights || !strcmp(weights, cases[i].weights)),
                  "case %zu: %s", i, weights ? weights : "random");
        CHECK(replaces_run(&o) == cases[i].replaces);
    }
    for (int bits = 0; bits < 16; bits++) {
        const Options o = {.steps = bits & 1,
                           .dry_run = bits & 2,
                           .compare = bits & 4,
                           .check_packing = bits & 8 ? "" : NULL,
                           .deterministic = true};
        CHECK(run_trains(&o) == (bits == 1) && reduces_deterministically(&o) == (bits < 4));
    }
    for (int steps = 100; steps <= 500; steps += 400)  // not on a terminal
        for (int every = -1; every < 2; every++)
            CHECK(run_lines_every(&(Options){.steps = steps, .log_every = every}) == abs(every));
}

TEST_MAIN()
