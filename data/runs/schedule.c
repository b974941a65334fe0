#include "schedule.h"

#include <math.h>
#include <stdbool.h>

// 1 at the peak, 0 when the decay is complete; done in [0,1]: fraction of the decay completed.
static double schedule_left(ScheduleKind kind, double done) {
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

float schedule_lr(const Schedule *s, int64_t step) {
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
