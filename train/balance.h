// How equal the ranks' work of a step was: by the plan, and by the clock.
#ifndef UNPAD_BALANCE_H
#define UNPAD_BALANCE_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "../data/base/memory.h"
#include "../data/batches/loader.h"
#include "../data/runs/log.h"
#include "../kernels/comm/comm.h"
#include "../kernels/kernels.h"  // defines: device_timer_ms

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

#endif
