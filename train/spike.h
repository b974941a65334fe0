// Loss spikes: a running mean of the losses and of their distance from it says when one is far
// above. Not saved with checkpoints: a resumed run learns it again in its first steps.
#ifndef UNPAD_SPIKE_H
#define UNPAD_SPIKE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    double mean, deviation;  // about the last 20 losses; mean absolute distance, so robust
    int64_t num_losses;
} LossTrend;

// Counts the loss in. True when it is not finite, or above the mean by more than 1 and by more than
// three deviations. A spike counts as much as the least that is one, so that a loss that stays
// where it has jumped to is soon no spike.
static inline bool loss_is_spike(LossTrend *t, double loss) {
    enum { FIRST_LOSSES = 5, MEMORY = 20 };
    const double most = t->mean + fmax(1, 3 * t->deviation);
    if (!isfinite(loss)) return true;
    const bool spike = t->num_losses >= FIRST_LOSSES && loss > most;
    if (spike) loss = most;
    if (t->num_losses == 0) t->mean = loss;
    if (t->num_losses < MEMORY) t->num_losses++;
    t->deviation += (fabs(loss - t->mean) - t->deviation) / (double)t->num_losses;
    t->mean += (loss - t->mean) / (double)t->num_losses;
    return spike;
}

#endif
