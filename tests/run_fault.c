// Faults of runs, for tests: wraps comm_phase, the gather of the weights, fsync, attention_forward
// and more (--wrap), so that the program itself has no code for it. At a given phase:
//
//   FAULT=kill:2:reduce:5      rank 2, on entering the reduce of step 5
//   FAULT='slow:0:save:4 stop:2:forward:6'     several
// Faults: kill, stop; spin; fail (exit code 3); exit (code 7, without a word); signal (USR1, as a
// user sends it); quiet (no progress for SLOW_MS); slow (each later fsync takes SLOW_MS); drift
// (changes one weight in this step and all later ones); hold (fsyncs wait until two more steps have
// begun); flip (one bit of the next attention); nan (each later attention gives NaN).
//
// FAST_CLOCK=1000: now_ms runs a thousand times as fast.
//
// Wrong attention while sm90 is selected: WRONG_ATTENTION=result|gradient|hang|crash|signal
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/base/clock.h"
#include "../data/base/error.h"
#include "../kernels/comm/comm.h"
#include "../kernels/kernels.h"

__typeof__(comm_phase) __real_comm_phase;
__typeof__(comm_finalize) __real_comm_finalize;
__typeof__(comm_gather_begin) __real_comm_gather_begin;
__typeof__(fsync) __real_fsync;
__typeof__(now_ms) __real_now_ms;
size_t __real_host_memory_free(void);
__typeof__(attention_forward) __real_attention_forward;

static _Atomic int64_t step_now, held_until;
static int drifting, fsync_ms, signalled, flips, flip_attention, nan_attention;

static void do_fault(const char *what) {
    const int slow_ms = getenv("SLOW_MS") ? atoi(getenv("SLOW_MS")) : 0;
    if (strcmp(what, "kill") == 0) raise(SIGKILL);
    if (strcmp(what, "stop") == 0) raise(SIGSTOP);
    if (strcmp(what, "signal") == 0 && !signalled++) raise(SIGUSR1);  // a second one ends at once
    if (strcmp(what, "exit") == 0) exit(7);
    if (strcmp(what, "quiet") == 0) sleep_ms(slow_ms);
    if (strcmp(what, "slow") == 0) fsync_ms = slow_ms;
    if (strcmp(what, "hold") == 0) held_until = step_now + 2;
    if (strcmp(what, "drift") == 0) drifting = 1;
    if (strcmp(what, "flip") == 0 && !flips++) flip_attention = 1;
    if (strcmp(what, "nan") == 0) nan_attention = 1;
    if (strcmp(what, "spin") == 0)
        for (volatile unsigned i = 0;; i++) continue;
    if (strcmp(what, "fail") == 0)
        exit_with(EXIT_BAD_INPUT, "write some", "a file: expected words, found none");
}

void __wrap_comm_phase(const char *phase, int64_t step) {
    if (step >= 0) step_now = step;
    __real_comm_phase(phase, step);
    for (const char *fault = getenv("FAULT"); fault; fault = strchr(fault, ' ')) {
        char what[16], where[16];
        int rank;
        long when;
        fault += *fault == ' ';
        if (sscanf(fault, "%15[^:]:%d:%15[^:]:%ld", what, &rank, where, &when) != 4) abort();
        if (rank == comm_rank() && when == step_now && strcmp(where, phase) == 0) do_fault(what);
    }
}

// It enters its phase in its own file, where calls cannot be wrapped.
void __wrap_comm_finalize(void) {
    __wrap_comm_phase("leave", 0);
    __real_comm_finalize();
}

int __wrap_fsync(int fd) {
    if (fsync_ms) sleep_ms(fsync_ms);
    while (step_now < held_until) sleep_ms(1);
    return __real_fsync(fd);
}

double __wrap_now_ms(void) {
    const char *speed = getenv("FAST_CLOCK");
    return __real_now_ms() * (speed ? atof(speed) : 1);
}

// With NO_ROOM nothing is known to be free.
size_t __wrap_host_memory_free(void) { return getenv("NO_ROOM") ? 0 : __real_host_memory_free(); }

// The weights have arrived when the real call returns: on the CPU, and in the emulator without
// streams.
uint64_t __wrap_comm_gather_begin(floatX *weights, const size_t *first, size_t from, size_t to) {
    const uint64_t handle = __real_comm_gather_begin(weights, first, from, to);
    if (drifting && from == 0) *(unsigned char *)weights ^= 0x40;  // a bit of the mantissa
    return handle;
}

void __wrap_attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                              HeadShape heads) {
    const char *wrong = getenv("WRONG_ATTENTION");
    if (!wrong || strcmp(attention_describe(), "sm90") != 0) wrong = "";
    if (strcmp(wrong, "crash") == 0) abort();
    if (strcmp(wrong, "signal") == 0 && getenv("UNPAD_PROBE_DEVICE")) raise(SIGTERM);
    while (strcmp(wrong, "hang") == 0) pause();
    __real_attention_forward(out, lse, qkv, docs, heads);
    // device memory is the host's, in the CPU backend and in the emulator
    if (nan_attention) memset((void *)out, 0xff, sizeof *out);
    if (flip_attention) ((unsigned char *)out)[1] ^= 1;  // not the last bit: rounding may hide that
    flip_attention = 0;
    if (strcmp(wrong, "gradient") == 0) device_zero(lse, 64 * sizeof *lse);
    if (strcmp(wrong, "result") == 0)  // one row is that of its neighbour
        device_copy(out, out + heads.num_heads * heads.head_dim,
                    (size_t)(heads.num_heads * heads.head_dim) * sizeof *out);
}
