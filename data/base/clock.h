// A monotonic clock, and sleep.
#ifndef UNPAD_CLOCK_H
#define UNPAD_CLOCK_H

// Milliseconds since some fixed moment; never goes back.
double now_ms(void);

// Sleeps for at least `ms` milliseconds; signals do not cut it short.
void sleep_ms(int ms);

#endif
