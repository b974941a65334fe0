#include "clock.h"

#include <poll.h>
#include <stdlib.h>
#include <time.h>

double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median_ms(double *ms, int n) {
    qsort(ms, (size_t)n, sizeof *ms, compare_doubles);
    return ms[n / 2];
}

void sleep_ms(int ms) {
    for (double now = now_ms(), end = now + ms; now < end; now = now_ms())
        poll(NULL, 0, (int)(end - now) + 1);
}
