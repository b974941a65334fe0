// A monotonic clock, and sleep.
#pragma once

// Milliseconds since some fixed moment; never goes back.
double now_ms(void);

// Sleeps for at least `ms` milliseconds; signals do not cut it short.
void sleep_ms(int ms);
