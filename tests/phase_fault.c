// A trainer that fails where a test wants it to: linked in front of comm_phase and of the gather of
// the weights (--wrap), so that the program itself knows nothing of it.
//
//   FAULT=kill:2:reduce:5      rank 2, when it comes to the reduce of step 5
// What it does: kill, stop, spin; fail (exit code 3); quiet (for QUIET_MS, then it goes on); drift
// (one of its weights, in this step and all that follow).
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif
void __real_comm_phase(const char *phase, int64_t step);
void __wrap_comm_phase(const char *phase, int64_t step);
uint64_t __real_comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to);
uint64_t __wrap_comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to);
#ifdef __cplusplus
}
#endif

static int drifting;

static void sleep_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&t, &t) != 0) continue;
}

static void do_fault(const char *what) {
    const char *quiet = getenv("QUIET_MS");
    sleep_ms(1000);  // the thread that tells the others where this rank is has had its turn
    if (strcmp(what, "kill") == 0) raise(SIGKILL);
    if (strcmp(what, "stop") == 0) raise(SIGSTOP);
    if (strcmp(what, "quiet") == 0) sleep_ms(atol(quiet ? quiet : "0"));
    if (strcmp(what, "drift") == 0) drifting = 1;
    if (strcmp(what, "spin") == 0)
        for (volatile unsigned i = 0;; i++) continue;
    if (strcmp(what, "fail") == 0) {
        fprintf(stderr, "error: a file: expected words, found none\nhint: write some\n");
        exit(3);
    }
}

void __wrap_comm_phase(const char *phase, int64_t step) {
    static int64_t at;
    static int done;
    char what[16], where[16];
    int rank;
    long long when;
    const char *fault = getenv("FAULT");
    if (step >= 0) at = step;
    __real_comm_phase(phase, step);
    if (!fault || done) return;
    if (sscanf(fault, "%15[^:]:%d:%15[^:]:%lld", what, &rank, where, &when) != 4) abort();
    if (rank != comm_rank() || when != at || strcmp(where, phase) != 0) return;
    done = 1;
    do_fault(what);
}

// The weights are there when it returns: on the CPU, and where emulated work is done at the call.
uint64_t __wrap_comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    const uint64_t ticket = __real_comm_gather_begin(weights, first, from, to);
    if (drifting && from == 0) weights[0] = (floatX)((float)weights[0] + 1e-2f);
    return ticket;
}
