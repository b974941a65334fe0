// The learning rate of a step: warm-up, then constant, linear, cosine, or WSD (warm-up, stable,
// decay; arXiv 2405.18392), whose decay is linear or 1 - sqrt.
#ifndef UNPAD_SCHEDULE_H
#define UNPAD_SCHEDULE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#define SCHEDULE_NAMES "constant|linear|cosine|wsd|wsd-sqrt"
typedef enum {
    SCHEDULE_CONSTANT,
    SCHEDULE_LINEAR,
    SCHEDULE_COSINE,
    SCHEDULE_WSD,
    SCHEDULE_WSD_SQRT
} ScheduleKind;

typedef struct {
    ScheduleKind kind;
    int64_t steps, warmup_steps;
    double peak;            // learning rate after warm-up
    double min_frac;        // the last learning rate tends to peak * min_frac
    double wsd_decay_frac;  // share of `steps`, at their end, that WSD decays over
} Schedule;

// 1 at the peak, 0 when the decay is complete; done in [0,1] is the share of it behind us.
static inline double schedule_left(ScheduleKind kind, double done) {
    switch (kind) {
        case SCHEDULE_LINEAR:
        case SCHEDULE_WSD:
            return 1 - done;
        case SCHEDULE_COSINE:
            return 0.5 + 0.5 * cos(3.14159265358979323846 * done);
        case SCHEDULE_WSD_SQRT:
            return 1 - sqrt(done);
        case SCHEDULE_CONSTANT:
            break;
    }
    return 1;
}

// Learning rate of the 0-based `step`. The first warm-up step already moves: peak / warmup_steps.
static inline float schedule_lr(const Schedule *s, int64_t step) {
    if (step < s->warmup_steps)
        return (float)(s->peak * (double)(step + 1) / (double)s->warmup_steps);
    const bool wsd = s->kind == SCHEDULE_WSD || s->kind == SCHEDULE_WSD_SQRT;
    const double end = (double)s->steps;
    const double stable = wsd ? end * (1 - s->wsd_decay_frac) : 0;
    const double start = fmax((double)s->warmup_steps, stable);
    double done = ((double)step - start) / fmax(end - start, 1);
    done = fmin(fmax(done, 0), 1);
    return (float)(s->peak * (s->min_frac + (1 - s->min_frac) * schedule_left(s->kind, done)));
}

#endif
