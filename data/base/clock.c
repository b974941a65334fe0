#include "clock.h"

#include <poll.h>
#include <time.h>

double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

void sleep_ms(int ms) {
    for (double now = now_ms(), end = now + ms; now < end; now = now_ms())
        poll(NULL, 0, (int)(end - now) + 1);
}
