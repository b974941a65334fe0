// Signals that ask the program to end: the first is noted and obeyed at a point where nothing is
// left half done, the second ends the process at once.
#pragma once

#include <signal.h>

// The signal received; 0: none
extern volatile sig_atomic_t stop_signal;

// Call it at the start of main. SIGINT, SIGTERM, SIGUSR1, SIGXCPU and, unless nohup ignores it,
// SIGHUP set stop_signal; a second one exits with 128 plus its number. A broken pipe and a file
// size limit become errors of the calls that hit them.
void signals_catch(void);

// Restores the defaults: each signal ends the process; one already received does so now.
void signals_release(void);

// After signals_release: SIGINT sets stop_signal, however often it arrives, and ends nothing.
void signals_catch_interrupts(void);

// Sets the texts that the first and the second signal print on standard error. They must stay
// valid; they may be set while a signal arrives.
void signals_say(const char *first, const char *second);
