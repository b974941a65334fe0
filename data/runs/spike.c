#include "spike.h"

#include <math.h>

bool loss_is_spike(LossTrend *t, double loss) {
    enum { FIRST_LOSSES = 5, MEMORY = 20 };
    const double most = t->mean + fmax(1, 3 * t->deviation);
    if (!isfinite(loss)) return true;
    const bool spike = t->num_losses >= FIRST_LOSSES && loss > most;
    if (spike) loss = most;  // so that a loss that stays at its new level soon stops being one
    if (t->num_losses == 0) t->mean = loss;
    if (t->num_losses < MEMORY) t->num_losses++;
    t->deviation += (fabs(loss - t->mean) - t->deviation) / (double)t->num_losses;
    t->mean += (loss - t->mean) / (double)t->num_losses;
    return spike;
}
