// How equal the ranks' work of a step was: by the plan, and by the clock.
#ifndef UNPAD_BALANCE_H
#define UNPAD_BALANCE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "../data/base/json.h"
#include "../data/base/memory.h"
#include "../data/batches/loader.h"
#include "../kernels/comm/comm.h"
#include "../kernels/kernels.h"  // defines: device_timer_ms

// The busiest rank over the mean of all: 1 is even. Alone, all of it is 0.
typedef struct {
    double planned;   // 0: the plan was made without costs
    double measured;  // of the time that each rank's device spent in its own micro-batches
    int32_t slowest_rank;
} StepBalance;

// All ranks, after the wait that ends the step: nothing here waits for the device.
static inline StepBalance step_balance(const StepData *data) {
    StepBalance b = {0, 0, 0};
    const int32_t ranks = comm_num_ranks();
    if (ranks == 1) return b;
    const float own_ms = device_timer_ms();
    float *ms = (float *)host_calloc((size_t)ranks, sizeof(float), "times of the ranks");
    double sum = 0;
    comm_all_gather_host(ms, &own_ms, sizeof own_ms);
    for (int32_t r = 0; r < ranks; r++) {
        sum += (double)ms[r];
        if (ms[r] > ms[b.slowest_rank]) b.slowest_rank = r;
    }
    b.planned = data->imbalance;
    b.measured = sum > 0 ? (double)ms[b.slowest_rank] * ranks / sum : 0;
    free(ms);
    return b;
}

static inline void balance_print(const StepBalance *b) {
    if (b->measured == 0) return;
    if (b->planned > 0)
        printf(" | imbalance %.3f (%.3f)", b->planned, b->measured);
    else
        printf(" | imbalance (%.3f)", b->measured);
}

static inline void balance_write(const StepBalance *b, JsonWriter *w) {
    if (b->measured == 0) return;
    if (b->planned > 0) json_float(w, "imbalance_planned", (float)b->planned);
    json_float(w, "imbalance_measured", (float)b->measured);
    json_int(w, "slowest_rank", b->slowest_rank);
}

#endif
