// data/runs/log.h: which losses count as spikes.
#include <math.h>

#include "../data/runs/log.h"

#include "test.h"

TEST(a_falling_noisy_loss_has_no_spike) {
    LossTrend t = {0, 0, 0};
    for (int i = 0; i < 2000; i++)
        CHECK_MSG(!loss_is_spike(&t, 2 + 8 * exp(-i / 30.0) + 0.2 * test_rng_normal()), "at %d", i);
}

TEST(a_jump_is_a_spike_until_it_is_the_new_level) {
    LossTrend t = {0, 0, 0};
    for (int i = 0; i < 100; i++) CHECK(!loss_is_spike(&t, i % 2 ? 2.1 : 1.9));
    LossTrend one = t;
    CHECK(!loss_is_spike(&one, 2.9));
    CHECK(loss_is_spike(&one, 3.5) && !loss_is_spike(&one, 2));  // one does not move the mean
    CHECK(loss_is_spike(&one, NAN) && loss_is_spike(&one, INFINITY) && !loss_is_spike(&one, 2));
    int spikes = 0;  // each moves the mean by the margin only; it would be 6 by the whole jump
    while (loss_is_spike(&t, 6) && spikes < 1000) spikes++;
    CHECK_MSG(spikes == 17, "%d", spikes);
    CHECK(!loss_is_spike(&t, 6) && !loss_is_spike(&t, 2));
}

// Noise widens the margin: three mean distances, here more than 1.
TEST(noise_widens_the_margin) {
    LossTrend t = {0, 0, 0};
    for (int i = 0; i < 100; i++) CHECK(!loss_is_spike(&t, i % 2 ? 4 : 2));
    CHECK(!loss_is_spike(&t, 5.5) && loss_is_spike(&t, 7));
}

TEST(the_first_losses_are_never_spikes) {
    LossTrend t = {0, 0, 0};
    CHECK(!loss_is_spike(&t, 1) && !loss_is_spike(&t, 9) && !loss_is_spike(&t, 90));
}

TEST_MAIN()
