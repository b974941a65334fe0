// Learning rates and the choice of the next token, against values computed by hand.
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "../data/runs/generate.h"
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

static const float LOGITS[] = {0.0f, 2.0f, 1.0f, 2.0f, -INFINITY};  // 1 and 3 tie
enum { V = sizeof LOGITS / sizeof *LOGITS, DRAWS = 10000 };

// Frequency of each id over evenly spaced draws.
static void shares(float temperature, float top_p, double share[V]) {
    HeapItem scratch[V];
    memset(share, 0, V * sizeof *share);
    for (int i = 0; i < DRAWS; i++)
        share[sample_token(LOGITS, V, temperature, top_p, ((float)i + 0.5f) / DRAWS, scratch)] +=
            1.0 / DRAWS;
}

TEST(temperature_zero_takes_the_most_likely) {
    double share[V];
    shares(0, 1, share);
    CHECK(share[1] > 1 - 1e-9);
}

TEST(frequencies_are_the_softmax_at_a_temperature) {
    const double temperatures[] = {0.5, 1, 3};
    for (int t = 0; t < 3; t++) {
        double share[V], sum = 0;
        shares((float)temperatures[t], 1, share);
        for (int v = 0; v < V; v++) sum += exp((double)LOGITS[v] / temperatures[t]);
        for (int v = 0; v < V; v++) {
            double p = exp((double)LOGITS[v] / temperatures[t]) / sum;
            CHECK_MSG(fabs(share[v] - p) < 3.0 / DRAWS, "id %d: %g, expected %g", v, share[v], p);
        }
    }
}

TEST(top_p_keeps_the_most_likely) {
    double share[V];
    shares(1, 0.5f, share);  // p = 0.39, 0.39, ...: one does not reach a half, two do
    CHECK(fabs(share[1] - 0.5) < 1e-3 && fabs(share[3] - 0.5) < 1e-3);
    shares(1, 0, share);
    CHECK(share[1] > 1 - 1e-9);
}

TEST_MAIN()
