// Ends a job that no longer moves. Each rank watches itself, in a thread: only it knows whether its
// main thread works or waits for others. A rank that has stopped working says where, and ends the
// job. Ranks that wait give it time to say so first: they give up after twice as long, and say
// where they waited. Then a rank was stopped, or its machine is gone, and it has no name here.
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "comm.h"
#include "job.h"

enum {
    LOOK_MS = 100,
    STOPPED_MS = 1000,   // the thread did not run for so long: this process was stopped
    SET_UP_FACTOR = 10,  // see limit_ms
};

static struct {
    const char *_Atomic phase;
    _Atomic int64_t step;
    _Atomic double progress_ms, limit_ms;
    _Atomic int waiting;  // for other ranks, in the main thread or on the device
    _Atomic bool running;
    pthread_t thread;
} watch = {.phase = "start"};

void watchdog_progress(void) { watch.progress_ms = now_ms(); }

void comm_heartbeat(double seconds) { watch.limit_ms = seconds * 1e3; }

void watchdog_phase(const char *phase, int64_t step) {
    watch.phase = phase;
    if (step >= 0) watch.step = step;
    comm_progress();
}

void job_waits(bool waits) {
    watch.waiting += waits ? 1 : -1;
    watchdog_progress();
}

const char *watchdog_where(void) {
    static _Thread_local char text[64];
    const char *phase = watch.phase;
    const int64_t step = watch.step;
    snprintf(text, sizeof text, step > 0 ? "%.15s of step %ld" : "%.15s", phase, step);
    return text;
}

// In set-up libraries are loaded and drivers compile without a sign of progress, and ranks may read
// at different speeds; an evaluation's ranks meet only at its end.
static double limit_ms(bool waits) {
    const bool apart = strcmp(watch.phase, "set-up") == 0 || strcmp(watch.phase, "evaluate") == 0;
    return watch.limit_ms * (apart ? SET_UP_FACTOR : 1) * (waits ? 2 : 1);
}

static void look(double idle_ms) {
    const bool waits = watch.waiting > 0;
    char host[64] = "?";
    if (watch.limit_ms == 0 || idle_ms <= limit_ms(waits)) return;
    gethostname(host, sizeof host - 1);
    exit_with(EXIT_PEER_LOST,
              strcmp(watch.phase, "start") == 0
                  ? "start all ranks, where they can reach each other; RANKS_JOIN_SECONDS sets how "
                    "long they wait"
                  : JOB_RESUME "; --heartbeat-seconds sets the limit",
              waits
                  ? "ranks: rank %d on %s has waited for others for %.0f s in %s: one of them was "
                    "stopped or is gone"
                  : "ranks: rank %d on %s stuck for %.0f s in %s",
              comm_rank(), host, idle_ms * 1e-3, watchdog_where());
}

static void *watch_this_rank(void *unused) {
    for (double before_ms = now_ms(); watch.running;) {
        sleep_ms(LOOK_MS);
        const double now = now_ms();
        const char *failed = buffers_error();
        if (failed) exit_with(EXIT_DEVICE_ERROR, "NCCL_DEBUG=WARN says more", "%s", failed);
        if (now - before_ms > STOPPED_MS) watchdog_progress();
        look(now_ms() - watch.progress_ms);
        before_ms = now;
    }
    return unused;
}

void watchdog_start(double seconds) {
    sigset_t all, before;
    comm_heartbeat(seconds);
    watchdog_progress();
    watch.running = true;
    sigfillset(&all);  // signals are the main thread's
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&watch.thread, NULL, watch_this_rank, NULL) != 0)
        exit_with(EXIT_HOST_MEMORY, "close other programs", "cannot start the watchdog thread");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void watchdog_stop(void) {
    watch.running = false;
    pthread_join(watch.thread, NULL);
}
