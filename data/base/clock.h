// A monotonic clock, the median of times, and sleep.
#pragma once

// Milliseconds since some fixed moment; never goes back.
double now_ms(void);

// The median of n times, at least one, which it sorts; the upper one of two
double median_ms(double *ms, int n);

// Sleeps for at least `ms` milliseconds; signals do not cut it short.
void sleep_ms(int ms);
