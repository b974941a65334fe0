// Loss spikes: losses far above the running mean of the last ones. Not saved in checkpoints: a
// resumed run learns the mean again in its first steps.
#ifndef UNPAD_SPIKE_H
#define UNPAD_SPIKE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    double mean, deviation;  // of about the last 20 losses; mean absolute distance, so robust
    int64_t num_losses;
} LossTrend;  // starts as {0}

// Adds a loss to the trend. True when it is not finite, or above the mean by more than 1 and by
// more than three deviations.
bool loss_is_spike(LossTrend *t, double loss);

#endif
