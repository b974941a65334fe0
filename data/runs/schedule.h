// The learning rate of a step: warm-up, then constant, linear, cosine, or WSD (warm-up, stable,
// decay; arXiv 2405.18392), whose decay is linear or 1 - sqrt.
#ifndef UNPAD_SCHEDULE_H
#define UNPAD_SCHEDULE_H

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
    double min_frac;        // the decay ends at peak * min_frac
    double wsd_decay_frac;  // fraction of `steps`, at their end, over which WSD decays
} Schedule;

// Learning rate of the 0-based `step`. The first warm-up step is not 0 but peak / warmup_steps.
float schedule_lr(const Schedule *s, int64_t step);

#endif
