#include "signals.h"

#include <stdbool.h>
#include <string.h>
#include <unistd.h>

volatile sig_atomic_t stop_signal;
static const char *texts[] = {"\nstopping; press again to quit at once\n",
                              "quit: nothing was trained yet\n"};

static void on_signal(int sig) {
    // atomic: two signals may arrive at the same time, in two threads
    const bool second = __atomic_exchange_n(&stop_signal, sig, __ATOMIC_RELAXED) != 0;
    const ssize_t n = write(STDERR_FILENO, texts[second], strlen(texts[second]));
    (void)n;
    if (second) _exit(128 + sig);
}

static void on_interrupt(int sig) { stop_signal = sig; }

static void handle(void (*handler)(int)) {
    const int signals[] = {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXCPU};
    const struct sigaction action = {.sa_handler = handler};
    for (size_t i = signal(SIGHUP, SIG_IGN) == SIG_IGN; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &action, NULL);
    signal(SIGPIPE, handler == SIG_DFL ? SIG_DFL : SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);  // EFBIG instead: a full disk
}

void signals_catch(void) { handle(on_signal); }

void signals_release(void) {
    handle(SIG_DFL);
    if (stop_signal) raise((int)stop_signal);
}

void signals_catch_interrupts(void) {
    const struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
}

void signals_say(const char *first, const char *second) {
    texts[0] = first;
    texts[1] = second;
}
