// Finds lost, hung and failed ranks: a thread on each rank, and the agreement on one error for all.
//
// Each rank tells rank 0 four times a second that it lives, and within 50 ms when its main thread
// comes to another phase. Rank 0 ends the job when
//   - a connection breaks: the rank is lost; found within milliseconds, whatever the limit
//   - nothing is heard of a rank for as long as comm_heartbeat allows: silent (stopped, or its
//     machine is gone)
//   - ranks have waited in a collective for that long, and a rank that has not entered it has made
//     no progress for as long: stuck. So is one inside a collective that polls and whose main
//     thread no longer does. Progress is a phase, a collective, comm_progress. In set-up ten times
//     the limit.
//   - all wait in the same collective for that long
// and the others do when rank 0 is lost or silent. Ranks that are all equally slow are never stuck.
//
// A rank that fails reports its error to rank 0, which prints one for all; then all leave with that
// code.
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/memory.h"
#include "comm.h"
#include "ranks.h"

enum {
    LIMIT_SECONDS = 60,
    SET_UP_FACTOR = 10,  // times the limit, in set-up
    BEAT_MS = 250,
    LOOK_MS = 50,       // how often the thread checks whether the phase has changed
    GRACE_MS = 300,     // after a failure, for rank 0 to find the same, or more ranks to be lost
    CAUSE_MS = 600,     // after one that may follow from a lost rank, for that rank to be found
    STOPPED_MS = 1000,  // the thread did not run for so long: this process was stopped
    END_MS = 10000,     // for rank 0 to end this process before it does so itself
};

typedef struct {
    enum { BEAT = 1, REPORT, END } kind;
    int code;                       // of END
    int64_t step;                   // 0: before the first
    int entered, waiting, polling;  // collectives entered so far; inside now; inside one that polls
    double waited_ms, idle_ms;      // inside for this long; since the last progress
    char phase[16];
} Message;

typedef struct {
    Message message;
    Error err;  // only in a REPORT
} Report;

typedef struct {
    Message last;
    double received_ms;
    bool lost, reported;
} Known;

static struct {
    // by the main thread, its helpers and the device
    const char *_Atomic phase;
    _Atomic int64_t step;
    _Atomic double progress_ms, entered_ms, limit_ms;  // limit_ms 0: none
    _Atomic int entered, waiting, polling;
    _Atomic bool running, leaving;  // leaving: connections may end
    // by the thread
    pthread_t thread;
    Message sent;
    int num_known;         // rank 0 knows all ranks, the others rank 0
    Known *known;          // (num_known)
    struct pollfd *ready;  // (num_known)
    double resumed_ms;     // when this process was last stopped for more than the limit
    pid_t launcher;        // 0: any
    // rank 0: the failure that ends the job at failure_ms, of rank `failed`; -1: none
    int failed, num_lost;
    double failure_ms;
    Error failure;
    pthread_mutex_t sending, ending;  // ending: its holder ends this process and never releases it
} watch = {.sending = PTHREAD_MUTEX_INITIALIZER, .ending = PTHREAD_MUTEX_INITIALIZER};

// ------------------------------------------------------------------------------------------------
// Marks of progress, from any thread

void comm_progress(void) {
    if (ranks.joined) watch.progress_ms = now_ms();
}

void comm_heartbeat(double seconds) { watch.limit_ms = seconds * 1e3; }

void ranks_phase(const char *phase, int64_t step) {
    watch.phase = phase;
    if (step >= 0) watch.step = step;
    comm_progress();
}

void ranks_enter_collective(bool polls) {
    comm_progress();
    watch.entered_ms = now_ms();
    watch.entered++;
    watch.waiting++;
    if (polls) watch.polling = 1;
}

void ranks_leave_collective(bool polls) {
    if (polls) watch.polling = 0;
    watch.waiting--;
    comm_progress();
}

// ------------------------------------------------------------------------------------------------
// Messages

static Message message(int kind, int code) {
    const double now = now_ms();
    Message m = {kind, code, watch.step, watch.entered, watch.waiting, watch.polling, 0, 0, ""};
    m.waited_ms = m.waiting ? now - watch.entered_ms : 0;
    m.idle_ms = now - watch.progress_ms;
    text_copy(m.phase, sizeof m.phase, watch.phase);
    return m;
}

// To rank 0, or from it to all. Never blocks: a rank that has stopped reading misses it. Half a
// message makes the stream unusable.
static void notify(const void *data, size_t bytes) {
    pthread_mutex_lock(&watch.sending);
    for (int r = ranks.rank == 0; r < watch.num_known; r++) {
        const int fd = ranks.peers[r].sockets[RANKS_WATCH];
        const ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0 && n < (ssize_t)bytes) shutdown(fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&watch.sending);
}

// ------------------------------------------------------------------------------------------------
// The end

// From here on this process ends, even if standard error blocks.
static void lock_end(void) {
    pthread_mutex_lock(&watch.ending);
    signal(SIGALRM, SIG_DFL);
    alarm(END_MS / 1000);
}

// A launcher that sees this process exit may drop what it has not yet read of a pipe.
static void print_error(const Error *err) {
    int left = 0;
    error_print(err);
    for (int i = 0; i < 50 && ioctl(2, FIONREAD, &left) == 0 && left > 0; i++) sleep_ms(10);
}

// Rank 0. Without a text the error has been printed.
__attribute__((noreturn)) static void end_all(const Error *err) {
    lock_end();
    if (err->what[0]) print_error(err);
    const Message end = message(END, err->code);
    notify(&end, sizeof end);
    sleep_ms(100);  // the others exit first, and do not find rank 0 lost
    _exit(err->code);
}

__attribute__((noreturn, format(printf, 3, 4))) static void end_job(int code, const char *hint,
                                                                    const char *format, ...) {
    Error err = {0};
    va_list args;
    va_start(args, format);
    error_fill(&err, code, hint, format, args);
    va_end(args);
    end_all(&err);
}

// A lost rank causes errors of the network and of devices on the others.
static bool is_symptom(int code) { return code == EXIT_PEER_LOST || code == EXIT_DEVICE_ERROR; }

// error_hook: this rank's error ends all ranks.
static void report_error(const Error *err) {
    if (ranks.rank == 0) {
        if (is_symptom(err->code)) sleep_ms(2 * CAUSE_MS);  // the thread finds the cause first
        end_all(err);
    }
    const Report report = {message(REPORT, 0), *err};
    notify(&report, sizeof report);
    sleep_ms(END_MS);
    error_print(err);
    _exit(err->code);
}

void ranks_at_exit(int code, void *unused) {
    const Error err = {.code = code};
    (void)unused;
    if (code != 0 && ranks.joined) report_error(&err);
}

static const char *when(const Message *m) {
    static char text[64];  // of the thread
    snprintf(text, sizeof text, m->step > 0 ? "%.15s of step %lld" : "%.15s", m->phase,
             (long long)m->step);
    return text;
}

// ------------------------------------------------------------------------------------------------
// Rank 0: finding failed ranks

static void note_failure(int r, const Error *err) {
    if (watch.failed >= 0) return;
    watch.failed = r;
    watch.failure = *err;
    watch.failure_ms = now_ms() + (is_symptom(err->code) ? CAUSE_MS : GRACE_MS);
}

static void note_lost(int r) {
    const Error none = {0};
    if (watch.known[r].reported) return;
    watch.known[r].lost = true;
    watch.num_lost++;
    if (is_symptom(watch.failure.code)) watch.failed = -1;
    note_failure(r, &none);
}

static void report_failure(void) {
    const int r = watch.failed, code = watch.failure.code;
    const Message *m = &watch.known[r].last;
    const char *host = ranks.peers[r].host;
    char more[32] = "";
    if (watch.num_lost > 1) snprintf(more, sizeof more, " and %d more", watch.num_lost - 1);
    if (watch.known[r].lost)
        end_job(EXIT_PEER_LOST, RANKS_RESUME, "ranks: rank %d on %s%s lost in %s", r, host, more,
                when(m));
    if (!watch.failure.what[0])
        end_job(code, RANKS_RESUME, "ranks: rank %d on %s ended with exit code %d in %s", r, host,
                code, when(m));
    end_job(code, watch.failure.hint, "%.900s (rank %d on %s)", watch.failure.what, r, host);
}

// Much of the set-up cannot report progress: libraries are loaded, drivers compile.
static double limit_of(const Message *m) {
    return watch.limit_ms * (strcmp(m->phase, "set-up") == 0 ? SET_UP_FACTOR : 1);
}

// Is r more to blame than the rank `than` (-1: none)? It is further behind, or idle for longer.
static bool is_worse(int r, int than) {
    const Message *a = &watch.known[r].last, *b = &watch.known[than < 0 ? r : than].last;
    return than < 0 || a->entered < b->entered ||
           (a->entered == b->entered && a->idle_ms > b->idle_ms);
}

#define LIMIT_HINT RANKS_RESUME "; --heartbeat-seconds sets the limit"

static void check_ranks(double now) {
    double waited_ms = 0;
    bool all_wait = true;
    int stuck = -1, last = -1;
    for (int r = 0; r < ranks.num; r++) {
        const Known *k = &watch.known[r];
        if (watch.ready[r].fd >= 0 && now - k->received_ms > watch.limit_ms)
            end_job(EXIT_PEER_LOST, LIMIT_HINT, "ranks: rank %d on %s silent for %.0f s in %s", r,
                    ranks.peers[r].host, (now - k->received_ms) * 1e-3, when(&k->last));
        if (k->last.waited_ms > waited_ms) waited_ms = k->last.waited_ms;
    }
    for (int r = 0; r < ranks.num; r++) {
        const Message *m = &watch.known[r].last;
        const bool blocked = m->waiting && !m->polling;
        const double limit_ms = limit_of(m);
        if (is_worse(r, last)) last = r;
        // one that polls no more will count as stuck at the limit, after another beat
        all_wait = all_wait && m->waited_ms > limit_ms &&
                   (blocked ? m->idle_ms > limit_ms : m->idle_ms < limit_ms / 2);
        if (blocked || m->idle_ms <= limit_ms || waited_ms <= limit_ms) continue;
        if (is_worse(r, stuck)) stuck = r;
    }
    if (stuck >= 0)
        end_job(EXIT_PEER_LOST, LIMIT_HINT,
                "ranks: rank %d on %s stuck for %.0f s in %s, while others wait for it", stuck,
                ranks.peers[stuck].host, watch.known[stuck].last.idle_ms * 1e-3,
                when(&watch.known[stuck].last));
    // the network, or a device that other ranks wait for
    if (all_wait)
        end_job(EXIT_PEER_LOST, "look at the network between them; " RANKS_RESUME,
                "ranks: all %d wait for each other for %.0f s, rank %d on %s furthest behind in %s",
                ranks.num, watch.known[last].last.waited_ms * 1e-3, last, ranks.peers[last].host,
                when(&watch.known[last].last));
}

// ------------------------------------------------------------------------------------------------
// The other ranks: rank 0 may be lost

__attribute__((noreturn)) static void end_without_rank_0(const char *how) {
    Error err = {0};
    lock_end();
    if (!ranks_first_to_report()) _exit(EXIT_PEER_LOST);
    error_set(&err, EXIT_PEER_LOST, RANKS_RESUME, "ranks: rank 0 on %s %s in %s",
              ranks.peers[0].host, how, when(&watch.known[0].last));
    print_error(&err);
    sleep_ms(2000);  // the others find the same meanwhile, and exit
    _exit(EXIT_PEER_LOST);
}

static void check_rank_0(double now) {
    const double quiet_ms = now - watch.known[0].received_ms;
    char how[64];
    if (watch.ready[0].fd < 0 || quiet_ms <= 1.25 * watch.limit_ms)
        return;  // rank 0 goes first, when another is to blame
    snprintf(how, sizeof how, "silent for %.0f s", quiet_ms * 1e-3);
    end_without_rank_0(how);
}

// ------------------------------------------------------------------------------------------------
// The thread

static void read_message(int r, double now) {
    Report report = {0};
    Message *m = &report.message;
    const int fd = watch.ready[r].fd;
    if (!ranks_receive(fd, m, sizeof *m) ||
        (m->kind == REPORT && !ranks_receive(fd, m + 1, sizeof report - sizeof *m))) {
        watch.ready[r].fd = -1;
        if (watch.leaving) return;
        // the others have reported that this process was silent
        if (watch.resumed_ms > 0 && now - watch.resumed_ms < 5000) _exit(EXIT_PEER_LOST);
        if (ranks.rank > 0) end_without_rank_0("lost");
        note_lost(r);
        return;
    }
    watch.known[r].received_ms = now;
    watch.known[r].last = *m;
    if (m->kind == END) _exit(m->code);
    if (m->kind != REPORT) return;
    watch.known[r].reported = true;
    note_failure(r, &report.err);
}

static void beat(double now) {
    watch.sent = message(BEAT, 0);
    notify(&watch.sent, sizeof watch.sent);
    if (ranks.rank == 0) watch.known[0].last = watch.sent;
    if (watch.launcher && getppid() != watch.launcher) {  // it was killed
        if (ranks.rank > 0) _exit(EXIT_PEER_LOST);
        end_job(EXIT_PEER_LOST, RANKS_RESUME, "ranks: the launcher is gone");
    }
    if (watch.limit_ms > 0) (ranks.rank == 0 ? check_ranks : check_rank_0)(now);
}

// This process was stopped: messages that arrived meanwhile are still unread, and it could make no
// progress.
static void forgive(double now, double stopped_ms) {
    for (int r = 0; r < watch.num_known; r++) {
        watch.known[r].received_ms = now;
        watch.known[r].last.idle_ms = watch.known[r].last.waited_ms = 0;
    }
    watch.progress_ms = watch.entered_ms = now;
    if (watch.limit_ms > 0 && stopped_ms > watch.limit_ms / 2) watch.resumed_ms = now;
}

static void *watch_ranks(void *unused) {
    double before_ms = now_ms(), beat_ms = 0;
    while (watch.running) {
        const int num_ready = poll(watch.ready, (nfds_t)watch.num_known, LOOK_MS);
        const double now = now_ms();
        if (now - before_ms > STOPPED_MS) forgive(now, now - before_ms);
        before_ms = now;
        for (int r = 0; num_ready > 0 && r < watch.num_known; r++)
            if (watch.ready[r].revents) read_message(r, now);
        if (watch.failed >= 0 && now >= watch.failure_ms) report_failure();
        if (now < beat_ms && watch.sent.step == watch.step &&
            strcmp(watch.sent.phase, watch.phase) == 0)
            continue;
        beat_ms = now + BEAT_MS;
        beat(now);
    }
    return unused;
}

void watchdog_start(void) {
    sigset_t all, before;
    watch.num_known = ranks.rank == 0 ? ranks.num : 1;
    watch.known = host_calloc((size_t)watch.num_known, sizeof *watch.known, "ranks");
    watch.ready = host_calloc((size_t)watch.num_known, sizeof *watch.ready, "ranks");
    for (int r = 0; r < watch.num_known; r++) {
        watch.known[r] = (Known){.last.phase = "set-up", .received_ms = now_ms()};
        watch.ready[r] = (struct pollfd){ranks.peers[r].sockets[RANKS_WATCH], POLLIN, 0};
    }
    watch.failed = -1;
    // torchrun's ranks may outlive the shell that started them
    watch.launcher = getenv("OMPI_COMM_WORLD_RANK") ? getppid() : 0;
    comm_heartbeat(LIMIT_SECONDS);
    ranks_phase("set-up", 0);
    error_hook = report_error;
    warnings_off = ranks.rank > 0;
    watch.running = true;
    sigfillset(&all);  // signals are the main thread's
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&watch.thread, NULL, watch_ranks, NULL) != 0)
        ranks_die(EXIT_HOST_MEMORY, "close other programs", "cannot start the watchdog thread");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void watchdog_leave(void) { watch.leaving = true; }

void watchdog_stop(void) {
    watch.running = false;
    for (int r = 0; r < watch.num_known; r++)  // ends the thread's poll
        shutdown(ranks.peers[r].sockets[RANKS_WATCH], SHUT_RDWR);
    pthread_join(watch.thread, NULL);
    error_hook = NULL;
    free(watch.known);
    free(watch.ready);
}
