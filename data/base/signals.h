// Signals that ask the program to end: the first is noted and obeyed where nothing is left half
// done, a second one ends the process at once.
#ifndef UNPAD_SIGNALS_H
#define UNPAD_SIGNALS_H

#include <signal.h>

// The signal that has come; 0: none
extern volatile sig_atomic_t stop_signal;

// Call it at the start of main. SIGINT, SIGTERM, SIGUSR1, SIGXCPU and, unless nohup ignores it,
// SIGHUP set stop_signal; a second one exits with 128 plus its number. A broken pipe and a limit of
// file sizes become errors of the calls that meet them.
void signals_catch(void);

// Each signal ends the process from now on, as by default; one that has come already does.
void signals_release(void);

// After signals_release: SIGINT sets stop_signal, however often it comes, and ends nothing.
void signals_catch_interrupts(void);

// What the first and the second signal print on standard error. The texts must stay; they may
// change while a signal comes.
void signals_say(const char *first, const char *second);

#endif
