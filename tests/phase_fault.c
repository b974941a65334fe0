// Faults at a given phase, for tests: wraps comm_phase, the gather of the weights and fsync
// (--wrap), so that the program itself has no code for it.
//
//   FAULT=kill:2:reduce:5      rank 2, on entering the reduce of step 5
//   FAULT='late:1:reduce:4 hang:2:reduce:4'    several
// Faults: kill, stop, spin; fail (exit code 3); quiet (no progress for QUIET_MS); drift (changes
// one weight in this step and all later ones); hang (blocks the main thread a moment later,
// wherever it is then, and creates the file $HUNG); late (waits for that file); slow (each later
// fsync takes SLOW_MS).
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../data/base/error.h"
#include "../kernels/comm/comm.h"

void __real_comm_phase(const char *phase, int64_t step);
void __wrap_comm_phase(const char *phase, int64_t step);
uint64_t __real_comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to);
uint64_t __wrap_comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to);
int __real_fsync(int fd);
int __wrap_fsync(int fd);

static int drifting;
static long fsync_ms;
static pthread_t main_thread;

static void sleep_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&t, &t) != 0) continue;
}

static const char *setting(const char *name, const char *otherwise) {
    return getenv(name) ? getenv(name) : otherwise;
}

static void hang(int sig) {
    (void)sig;
    int fd = open(setting("HUNG", "hung"), O_WRONLY | O_CREAT, 0600);
    if (fd >= 0) close(fd);
    for (;;) pause();
}

static void *hang_soon(void *unused) {
    sleep_ms(300);  // it is inside the collective
    pthread_kill(main_thread, SIGUSR2);
    return unused;
}

static void do_fault(const char *what) {
    pthread_t thread;
    sleep_ms(1000);  // until the heartbeat has reported this rank's phase
    if (strcmp(what, "kill") == 0) raise(SIGKILL);
    if (strcmp(what, "stop") == 0) raise(SIGSTOP);
    if (strcmp(what, "quiet") == 0) sleep_ms(atol(setting("QUIET_MS", "0")));
    if (strcmp(what, "drift") == 0) drifting = 1;
    if (strcmp(what, "slow") == 0) fsync_ms = atol(setting("SLOW_MS", "0"));
    while (strcmp(what, "late") == 0 && access(setting("HUNG", "hung"), F_OK) != 0) sleep_ms(10);
    if (strcmp(what, "hang") == 0) {
        main_thread = pthread_self();
        signal(SIGUSR2, hang);
        if (pthread_create(&thread, NULL, hang_soon, NULL) != 0) abort();
    }
    if (strcmp(what, "spin") == 0)
        for (volatile unsigned i = 0;; i++) continue;
    if (strcmp(what, "fail") == 0) {
        Error err = {0};
        error_set(&err, EXIT_BAD_INPUT, "write some", "a file: expected words, found none");
        error_exit(&err);
    }
}

// Is `fault` due on this rank, in this phase and step?
static int is_due(const char *fault, const char *phase, int64_t step, char *what) {
    char where[16];
    int rank;
    long long when;
    if (sscanf(fault, "%15[^:]:%d:%15[^:]:%lld", what, &rank, where, &when) != 4) abort();
    return rank == comm_rank() && when == step && strcmp(where, phase) == 0;
}

void __wrap_comm_phase(const char *phase, int64_t step) {
    static int64_t at;
    static int done;
    char what[16];
    if (step >= 0) at = step;
    __real_comm_phase(phase, step);
    for (const char *fault = getenv("FAULT"); fault && !done; fault = strchr(fault, ' ')) {
        fault += *fault == ' ';
        if (!is_due(fault, phase, at, what)) continue;
        done = 1;
        do_fault(what);
    }
}

int __wrap_fsync(int fd) {
    sleep_ms(fsync_ms);
    return __real_fsync(fd);
}

// The weights have arrived when the real call returns: on the CPU, and in the emulator without
// streams.
uint64_t __wrap_comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    const uint64_t handle = __real_comm_gather_begin(weights, first, from, to);
    if (drifting && from == 0) *(unsigned char *)weights ^= 0x40;  // a bit of the mantissa
    return handle;
}
