// What options mean together; learning rates, against values computed by hand.
#include <math.h>

#include "../data/runs/run_options.h"
#include "test.h"

static Options schedule(ScheduleKind kind) {
    return (Options){.schedule = (int)kind,
                     .steps = 80,
                     .warmup_steps = 10,
                     .lr = 0.5f,
                     .min_lr_frac = 0.1f,
                     .decay_frac = 0.25f};
}

static bool near(float a, double b) { return fabs((double)a - b) <= 1e-7 * fabs(b); }

TEST(warm_up_is_linear_and_starts_above_zero) {
    for (int kind = SCHEDULE_CONSTANT; kind <= SCHEDULE_WSD_SQRT; kind++) {
        Options s = schedule((ScheduleKind)kind);
        CHECK(near(learning_rate(&s, 0), 0.05) && near(learning_rate(&s, 8), 0.45));
        CHECK(near(learning_rate(&s, 9), 0.5) && near(learning_rate(&s, 10), 0.5));
    }
}

TEST(decays_end_at_the_minimum) {
    Options constant = schedule(SCHEDULE_CONSTANT), linear = schedule(SCHEDULE_LINEAR);
    Options cosine = schedule(SCHEDULE_COSINE);
    CHECK(near(learning_rate(&constant, 79), 0.5));
    CHECK(near(learning_rate(&linear, 45), 0.5 * (0.1 + 0.9 * 0.5)));
    CHECK(near(learning_rate(&linear, 80), 0.05));
    CHECK(near(learning_rate(&cosine, 45), 0.5 * (0.1 + 0.9 * 0.5)));
    CHECK(near(learning_rate(&cosine, 80), 0.05) && near(learning_rate(&cosine, 500), 0.05));
}

TEST(wsd_is_stable_then_decays) {
    Options linear = schedule(SCHEDULE_WSD), root = schedule(SCHEDULE_WSD_SQRT);
    CHECK(near(learning_rate(&linear, 60), 0.5) && near(learning_rate(&root, 60), 0.5));
    CHECK(near(learning_rate(&linear, 65), 0.5 * (0.1 + 0.9 * 0.75)));
    CHECK(near(learning_rate(&root, 65), 0.5 * (0.1 + 0.9 * 0.5)));
    CHECK(near(learning_rate(&linear, 80), 0.05) && near(learning_rate(&root, 80), 0.05));
}

TEST(schedules_of_few_steps) {  // only warm-up; no decay; one step
    Options s = schedule(SCHEDULE_WSD);
    s.warmup_steps = 80;
    CHECK(near(learning_rate(&s, 79), 0.5));
    s.warmup_steps = 0, s.decay_frac = 0;
    CHECK(near(learning_rate(&s, 79), 0.5));
    s.steps = 1, s.decay_frac = 1;
    CHECK(near(learning_rate(&s, 0), 0.5));
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
        {"dir", "newest", NULL, "", 0, false, false, "dir", true},  // there was none
        {"dir", "newest", NULL, "run/step-00000002", 0, true, false, "run/step-00000002", false},
        {"dir", NULL, NULL, "", 8, false, false, NULL, false},
        {"dir", NULL, "adapter", "", 0, false, false, "adapter", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Options o = {.model = cases[i].model,
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
        CHECK(replaces_run(&o, &at) == cases[i].replaces);
    }
    for (int bits = 0; bits < 16; bits++) {
        const Options o = {.steps = bits & 1,
                           .dry_run = bits & 2,
                           .compare = bits & 4,
                           .check_packing = bits & 8,
                           .deterministic = true};
        CHECK(run_trains(&o) == (bits == 1) && reduces_deterministically(&o) == (bits < 4));
    }
    for (int steps = 100; steps <= 500; steps += 400)  // not on a terminal
        for (int every = -1; every < 2; every++)
            CHECK(run_lines_every(&(Options){.steps = steps, .log_every = every}) == abs(every));
}

TEST_MAIN()
