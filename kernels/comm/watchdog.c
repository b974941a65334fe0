#include "watchdog.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "comm.h"
#include "ranks.h"
#include "rendezvous.h"

enum {
    RANKS_LIMIT_SECONDS = 60,
    RANKS_PATIENCE = 10,   // times the limit, in set-up
    RANKS_GRACE_MS = 300,  // for rank 0 to find the same error itself, or more ranks to be lost
    RANKS_TEXT = 4096,     // most bytes of an error message
    RANKS_LOOK_MS = 50,    // how often the thread checks whether the phase has changed
    RANKS_FEW =
        64,  // up to this many ranks, rank 0 sends every change of its phase, not only ticks
};

typedef enum { RANKS_BEAT = 1, RANKS_REPORT, RANKS_END, RANKS_BYE } RanksKind;

typedef struct {
    int32_t kind, code;         // RanksKind; exit code of a report and of the end
    int64_t step;               // 0: before the first
    uint32_t entered, waiting;  // collectives entered so far; inside one now
    uint32_t polling;           // inside, and the main thread calls comm_progress in a loop
    uint32_t waited_ms;         // inside for this long; 0: not inside
    uint32_t idle_ms, bytes;    // since the last progress; of the text that follows
    char phase[16];
    uint64_t machine;  // of RANKS_END: a stopped process, to be killed on its machine
    int64_t pid;
} RanksMessage;

typedef struct {
    RanksMessage last;  // received
    int64_t received_ms;
    int lost, reported;
} RanksKnown;

typedef struct {
    const char *phase;  // atomic, as all up to polling: of the main thread
    int64_t step, progress_ms, entered_ms;
    uint32_t entered, waiting, polling;
    int64_t limit_ms;        // 0: none
    int running, bye;        // bye: rank 0 leaves because all is done
    int64_t overslept_ms;    // when this process last resumed after more than the limit; or 0
    const char *sent_phase;  // of the last beat
    int64_t sent_step;
    pthread_t thread;
    pthread_mutex_t sending,
        reporting;         // reporting: its holder ends this process and never releases it
    RanksKnown *known;     // (num) on rank 0, [0] on the others
    struct pollfd *ready;  // one more than known
    FILE *plain_stderr;
    char said[1 << 16];  // the buffer that holds standard error back
    size_t said_before;  // at the last tick
    // rank 0: the failure that ends the job when the grace period is over
    int failure_rank, failure_code, num_lost;
    int64_t failure_ms;
    char failure_text[RANKS_TEXT];
    pid_t parent;  // the launcher; 0: any
    int wake;      // an eventfd that ends the thread's poll
} RanksWatch;

static RanksWatch watch;

#define RANKS_GET(x_) __atomic_load_n(&(x_), __ATOMIC_RELAXED)
#define RANKS_SET(x_, value_) __atomic_store_n(&(x_), value_, __ATOMIC_RELAXED)

// ------------------------------------------------------------------------------------------------
// Messages

static RanksMessage ranks_message(RanksKind kind) {
    RanksMessage m;
    memset(&m, 0, sizeof m);
    m.kind = kind;
    m.step = RANKS_GET(watch.step);
    m.entered = RANKS_GET(watch.entered);
    m.waiting = RANKS_GET(watch.waiting);
    m.polling = RANKS_GET(watch.polling);
    m.waited_ms = m.waiting ? (uint32_t)(now_ms() - RANKS_GET(watch.entered_ms)) : 0;
    m.idle_ms = (uint32_t)(now_ms() - RANKS_GET(watch.progress_ms));
    snprintf(m.phase, sizeof m.phase, "%s", RANKS_GET(watch.phase));
    return m;
}

// To rank r. Never blocks: a rank that has stopped reading misses it.
static void ranks_notify(int r, const RanksMessage *m) {
    int fd = ranks.sockets[RANKS_WATCH][r];
    if (fd < 0) return;
    pthread_mutex_lock(&watch.sending);
    ssize_t n = send(fd, m, sizeof *m, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0 && n < (ssize_t)sizeof *m)
        shutdown(fd, SHUT_RDWR);  // half a message: the stream is unusable
    pthread_mutex_unlock(&watch.sending);
}

static void ranks_notify_all(const RanksMessage *m) {
    if (ranks.rank > 0) ranks_notify(0, m);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) ranks_notify(r, m);
}

// ------------------------------------------------------------------------------------------------
// Marks of progress, from any thread

void comm_progress(void) {
    if (ranks.joined) RANKS_SET(watch.progress_ms, (int64_t)now_ms());
}

// The thread sends it to rank 0 within RANKS_LOOK_MS: the main thread makes no system call.
void ranks_phase(const char *phase, int64_t step) {
    if (!ranks.joined) return;
    RANKS_SET(watch.phase, phase);
    if (step >= 0) RANKS_SET(watch.step, step);
    comm_progress();
}

void ranks_enter_collective(bool polls) {
    if (!ranks.joined) return;
    comm_progress();
    RANKS_SET(watch.entered_ms, (int64_t)now_ms());
    __atomic_add_fetch(&watch.entered, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&watch.waiting, 1, __ATOMIC_RELAXED);
    if (polls) RANKS_SET(watch.polling, 1);
}

void ranks_leave_collective(bool polls) {
    if (!ranks.joined) return;
    if (polls) RANKS_SET(watch.polling, 0);
    __atomic_sub_fetch(&watch.waiting, 1, __ATOMIC_RELAXED);
    comm_progress();
}

// ------------------------------------------------------------------------------------------------
// Reporting an error, and leaving

// From here on the process must exit, even if standard error blocks.
static void ranks_lock_report(void) {
    pthread_mutex_lock(&watch.reporting);
    signal(SIGALRM, SIG_DFL);
    alarm(RANKS_END_MS / 1000);
}

// Waits until pipes have been read, so that the launcher has the whole message before it sees this
// process exit.
static void ranks_drain(void) {
    for (int fd = 1; fd <= 2; fd++) {
        struct stat status;
        int left = 0;
        if (fstat(fd, &status) != 0 || !S_ISFIFO(status.st_mode)) continue;
        for (int i = 0; i < 50 && ioctl(fd, FIONREAD, &left) == 0 && left > 0; i++) sleep_ms(10);
    }
    sleep_ms(20);
}

static void ranks_kill(uint64_t machine, int64_t pid) {
    if (pid > 0 && machine == ranks.places[ranks.rank].machine && pid != getpid())
        kill((pid_t)pid, SIGKILL);
}

// Rank 0, after ranks_lock_report and the message. failed: a rank that is stopped and cannot exit
// by itself, or -1.
__attribute__((noreturn)) static void ranks_end_all(int code, int failed) {
    RanksMessage end = ranks_message(RANKS_END);
    end.code = code;
    if (failed > 0) {
        end.machine = ranks.places[failed].machine;
        end.pid = ranks.places[failed].pid;
    }
    ranks_drain();
    ranks_notify_all(&end);
    sleep_ms(100);                     // the others exit first and do not find rank 0 lost
    ranks_kill(end.machine, end.pid);  // last: a launcher takes the exit code of the first
    _exit(code);
}

// The text held back on standard error; call with the stream locked.
static const char *ranks_pending(size_t *bytes) {
    *bytes = __fpending(stderr);
    if (*bytes > sizeof watch.said - 1) *bytes = sizeof watch.said - 1;
    watch.said[*bytes] = 0;
    return watch.said;
}

__attribute__((format(printf, 2, 3))) static void ranks_print(int r, const char *format, ...) {
    char text[RANKS_TEXT + 512];
    size_t pending;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    flockfile(stderr);
    if (strstr(ranks_pending(&pending), "error: ")) __fpurge(stderr);
    char *first_end = strchr(text, '\n');
    if (r > 0 && first_end)
        fprintf(stderr, "%.*s (rank %d on %s)%s", (int)(first_end - text), text, r,
                ranks.places[r].host, first_end);
    else
        fputs(text, stderr);
    fflush(stderr);
    funlockfile(stderr);
}

static void ranks_when(char *out, size_t capacity, const RanksMessage *m) {
    if (m->step > 0)
        snprintf(out, capacity, "%.16s of step %lld", m->phase, (long long)m->step);
    else
        snprintf(out, capacity, "%.16s", m->phase);
}

// Rank r > 0: rank 0 prints the error, and then ends this process.
static void ranks_report(int code, const char *text) {
    RanksMessage m = ranks_message(RANKS_REPORT);
    m.code = code;
    m.bytes = (uint32_t)strlen(text);
    int fd = ranks.sockets[RANKS_WATCH][0];
    pthread_mutex_lock(&watch.sending);
    ranks_send(fd, &m, sizeof m, MSG_MORE);
    ranks_send(fd, text, m.bytes, 0);
    pthread_mutex_unlock(&watch.sending);
}

// A lost rank causes errors of the network and of devices on the others.
static int ranks_symptom(int code) { return code == EXIT_PEER_LOST || code == EXIT_DEVICE_ERROR; }

// exit() with a code other than 0, on any thread: this rank's error ends all ranks.
void ranks_at_exit(int code, void *unused) {
    char text[RANKS_TEXT];
    size_t pending;
    (void)unused;
    if (!ranks.joined || code == 0) return;
    fflush(stdout);
    if (ranks.rank == 0) {
        if (ranks_symptom(code)) sleep_ms(2 * RANKS_GRACE_MS);  // until its cause is found
        ranks_lock_report();
        fflush(stderr);
        ranks_end_all(code, -1);
    }
    flockfile(stderr);
    const char *said = ranks_pending(&pending), *error = strstr(said, "error: ");
    for (const char *next = error; next; next = strstr(next + 1, "\nerror: ")) error = next;
    if (error) said = error + (*error == '\n');
    size_t length = strnlen(said, sizeof text - 1);
    memcpy(text, said, length);
    text[length] = 0;
    __fpurge(stderr);
    funlockfile(stderr);
    ranks_report(code, text);
    sleep_ms(RANKS_END_MS);  // over only when rank 0 does not receive
    if (write(2, text, strlen(text)) < 0) _exit(code);
    _exit(code);
}

// ------------------------------------------------------------------------------------------------
// Rank 0: receiving, and finding failed ranks

static void ranks_note_failure(int r, int code, const char *text) {
    if (watch.failure_rank >= 0) return;
    watch.failure_rank = r;
    watch.failure_code = code;
    watch.failure_ms = now_ms() + RANKS_GRACE_MS;
    snprintf(watch.failure_text, sizeof watch.failure_text, "%s", text);
}

static void ranks_lost(int r) {
    RanksKnown *k = &watch.known[r];
    if (k->lost) return;
    k->lost = 1;
    // the others have reported that rank 0 is silent
    if (watch.overslept_ms && now_ms() - watch.overslept_ms < 5000) _exit(EXIT_PEER_LOST);
    if (k->reported) return;
    watch.num_lost++;
    if (watch.failure_rank >= 0 && ranks_symptom(watch.failure_code) &&
        !watch.known[watch.failure_rank].lost)
        watch.failure_rank = -1;
    ranks_note_failure(r, EXIT_PEER_LOST, "");
}

static void ranks_report_failure(void) {
    const int r = watch.failure_rank;
    char when[64], more[32] = "";
    ranks_lock_report();
    if (watch.failure_text[0]) {
        ranks_print(r, "%s", watch.failure_text);
    } else if (watch.known[r].reported) {
        ranks_when(when, sizeof when, &watch.known[r].last);
        ranks_print(0, "error: ranks: rank %d on %s ended with exit code %d in %s\nhint: %s\n", r,
                    ranks.places[r].host, watch.failure_code, when, RANKS_RESUME);
    } else {
        ranks_when(when, sizeof when, &watch.known[r].last);
        if (watch.num_lost > 1) snprintf(more, sizeof more, " and %d more", watch.num_lost - 1);
        ranks_print(0, "error: ranks: rank %d on %s%s lost in %s\nhint: %s\n", r,
                    ranks.places[r].host, more, when, RANKS_RESUME);
    }
    ranks_end_all(watch.failure_code, -1);
}

__attribute__((noreturn)) static void ranks_failed(int r, int silent, int64_t ms) {
    char when[64];
    ranks_lock_report();
    ranks_when(when, sizeof when, &watch.known[r].last);
    ranks_print(0, "error: ranks: rank %d on %s %s for %lld s in %s%s\nhint: %s\n", r,
                ranks.places[r].host, silent ? "silent" : "stuck", (long long)(ms + 500) / 1000,
                when, silent ? "" : ", while others wait for it",
                RANKS_RESUME "; --heartbeat-seconds sets the limit");
    ranks_end_all(EXIT_PEER_LOST, silent ? r : -1);
}

// Every rank is blocked in the same collective: the network, or a device that other ranks wait for.
__attribute__((noreturn)) static void ranks_network_failed(void) {
    char when[64];
    int r = 0;
    for (int other = 1; other < ranks.num; other++)
        if (watch.known[other].last.entered < watch.known[r].last.entered) r = other;
    ranks_lock_report();
    ranks_when(when, sizeof when, &watch.known[r].last);
    ranks_print(
        0,
        "error: ranks: all %d wait for each other for %lld s, rank %d on %s furthest behind "
        "in %s\nhint: look at the network between them; " RANKS_RESUME "\n",
        ranks.num, (long long)watch.known[r].last.waited_ms / 1000, r, ranks.places[r].host, when);
    ranks_end_all(EXIT_PEER_LOST, -1);
}

// Much of the set-up cannot report progress: libraries are loaded, drivers compile.
static int64_t ranks_limit_of(const RanksMessage *m) {
    return watch.limit_ms * (strcmp(m->phase, "set-up") == 0 ? RANKS_PATIENCE : 1);
}

// The rank that the others wait for, or -1: of those that make no progress and are not blocked
// inside a collective, the one furthest behind, of these the one idle longest.
static int ranks_stuck(int64_t waited_ms) {
    int failed = -1;
    for (int r = 0; r < ranks.num; r++) {
        const RanksMessage *m = &watch.known[r].last,
                           *worst = &watch.known[failed < 0 ? 0 : failed].last;
        if (m->waiting && !m->polling) continue;
        if (m->idle_ms <= ranks_limit_of(m) || waited_ms <= ranks_limit_of(m)) continue;
        if (failed < 0 || m->entered < worst->entered ||
            (m->entered == worst->entered && m->idle_ms > worst->idle_ms))
            failed = r;
    }
    return failed;
}

static void ranks_check(int64_t now) {
    int64_t waited_ms = 0;
    int all_wait = 1;
    if (!watch.limit_ms) return;
    for (int r = 1; r < ranks.num; r++)
        if (now - watch.known[r].received_ms > watch.limit_ms)
            ranks_failed(r, 1, now - watch.known[r].received_ms);
    for (int r = 0; r < ranks.num; r++) {
        const RanksMessage *m = &watch.known[r].last;
        if (m->waited_ms > waited_ms) waited_ms = m->waited_ms;
        // one that polls no more will count as stuck at the limit, after another beat
        const int64_t limit_ms = ranks_limit_of(m);
        all_wait = all_wait && m->waited_ms > limit_ms &&
                   (m->polling ? m->idle_ms < limit_ms / 2 : m->idle_ms > limit_ms);
    }
    int failed = ranks_stuck(waited_ms);
    if (failed >= 0) ranks_failed(failed, 0, watch.known[failed].last.idle_ms);
    if (all_wait) ranks_network_failed();
}

// ------------------------------------------------------------------------------------------------
// The other ranks: rank 0 may be lost

__attribute__((noreturn)) static void ranks_rank_0_failed(const char *how, int stopped) {
    char when[64];
    ranks_lock_report();
    ranks_when(when, sizeof when, &watch.known[0].last);
    if (ranks_first_to_report()) {
        ranks_print(0, "error: ranks: rank 0 on %s %s in %s\nhint: %s\n", ranks.places[0].host, how,
                    when, RANKS_RESUME);
        ranks_drain();
        sleep_ms(1000);  // the others find the same meanwhile, and exit
        if (stopped) ranks_kill(ranks.places[0].machine, ranks.places[0].pid);
    }
    _exit(EXIT_PEER_LOST);
}

static void ranks_check_rank_0(int64_t now) {
    const int64_t quiet_ms = now - watch.known[0].received_ms;
    char how[64];
    if (!watch.limit_ms || quiet_ms <= watch.limit_ms + watch.limit_ms / 4) return;
    snprintf(how, sizeof how, "silent for %lld s", (long long)(quiet_ms + 500) / 1000);
    ranks_rank_0_failed(how, 1);
}

// ------------------------------------------------------------------------------------------------
// The thread

static void ranks_obey_end(const RanksMessage *m) {
    ranks_lock_report();
    if (m->machine != ranks.places[0].machine) ranks_kill(m->machine, m->pid);
    _exit(m->code);
}

static void ranks_read_message(int r) {
    RanksMessage m;
    RanksKnown *k = &watch.known[r];
    char text[RANKS_TEXT] = "";
    const int fd = ranks.sockets[RANKS_WATCH][r];
    if (ranks_receive(fd, &m, sizeof m) != 0 || m.bytes >= sizeof text ||
        ranks_receive(fd, text, m.bytes) != 0) {
        if (RANKS_GET(watch.bye)) return;  // all ranks are done
        if (ranks.rank > 0) ranks_rank_0_failed("lost", 0);
        ranks_lost(r);
        return;
    }
    m.phase[sizeof m.phase - 1] = 0;
    k->received_ms = now_ms();
    if (m.kind == RANKS_END) ranks_obey_end(&m);
    if (m.kind == RANKS_BYE) RANKS_SET(watch.bye, 1);
    k->last = m;
    if (m.kind != RANKS_REPORT) return;
    k->reported = 1;
    ranks_note_failure(r, m.code, text);
}

// Rank 0's warnings are shown once they have been held back for a whole tick: an error that ends
// this process is printed by ranks_at_exit.
static void ranks_show_warnings(void) {
    size_t pending = __fpending(stderr);
    if (ranks.rank == 0 && pending > 0 && pending == watch.said_before) fflush(stderr);
    watch.said_before = __fpending(stderr);
}

// A job whose launcher was killed must end. (torchrun's ranks may outlive the shell that started
// them.)
static void ranks_check_parent(void) {
    char text[160];
    if (watch.parent == 0 || getppid() == watch.parent) return;
    watch.parent = 0;
    snprintf(text, sizeof text, "error: ranks: the launcher is gone\nhint: %s\n", RANKS_RESUME);
    if (ranks.rank == 0)
        ranks_note_failure(0, EXIT_PEER_LOST, text);
    else
        ranks_report(EXIT_PEER_LOST, text);
}

static int ranks_tick_ms(void) {
    int64_t ms = watch.limit_ms ? watch.limit_ms / 8 : 1000;
    return ms < RANKS_LOOK_MS ? RANKS_LOOK_MS : ms > 1000 ? 1000 : (int)ms;
}

static void ranks_beat(const RanksMessage *beat, int64_t now) {
    watch.sent_phase = RANKS_GET(watch.phase);
    watch.sent_step = beat->step;
    ranks_notify_all(beat);
    if (ranks.rank > 0) return;
    watch.known[0].last = *beat;
    watch.known[0].received_ms = now;
}

static void ranks_tick(int64_t now) {
    ranks_check_parent();
    RanksMessage beat = ranks_message(RANKS_BEAT);
    ranks_beat(&beat, now);
    ranks_show_warnings();
    if (ranks.rank == 0)
        ranks_check(now);
    else
        ranks_check_rank_0(now);
}

static void ranks_look(int64_t now) {
    if (watch.sent_phase == RANKS_GET(watch.phase) && watch.sent_step == RANKS_GET(watch.step))
        return;
    if (ranks.rank == 0 && ranks.num > RANKS_FEW) return;
    RanksMessage beat = ranks_message(RANKS_BEAT);
    ranks_beat(&beat, now);
}

static void ranks_poll(struct pollfd *ready, int n) {
    for (int r = 0; r < n; r++) {
        const int deaf = watch.known[r].lost || RANKS_GET(watch.bye);
        struct pollfd one = {deaf ? -1 : ranks.sockets[RANKS_WATCH][r], POLLIN, 0};
        ready[r] = one;
    }
    struct pollfd wake = {watch.wake, POLLIN, 0};
    ready[n] = wake;
    poll(ready, (nfds_t)n + 1, RANKS_LOOK_MS);
}

// Ignores time during which this process was suspended: messages that arrived meanwhile are still
// unread, and it could make no progress.
static void ranks_forgive(int n, int64_t gap_ms) {
    const int64_t now = now_ms(), progress_ms = RANKS_GET(watch.progress_ms) + gap_ms,
                  entered_ms = RANKS_GET(watch.entered_ms) + gap_ms;
    for (int r = 0; r < n; r++) {
        watch.known[r].received_ms += gap_ms;
        watch.known[r].last.idle_ms = watch.known[r].last.waited_ms = 0;
    }
    RANKS_SET(watch.progress_ms, progress_ms < now ? progress_ms : now);
    RANKS_SET(watch.entered_ms, entered_ms < now ? entered_ms : now);
}

static void *ranks_watch_thread(void *polled) {
    const int n = ranks.rank == 0 ? ranks.num : 1;
    struct pollfd *ready = polled;
    int64_t next_ms = 0, before_ms = now_ms();
    while (RANKS_GET(watch.running)) {
        ranks_poll(ready, n);
        if (RANKS_GET(watch.bye)) continue;  // lost connections are expected
        const int64_t now = now_ms(), gap_ms = now - before_ms;
        if (gap_ms > 4 * RANKS_LOOK_MS) ranks_forgive(n, gap_ms);
        if (watch.limit_ms && gap_ms > watch.limit_ms) watch.overslept_ms = now;
        before_ms = now;
        for (int r = 0; r < n; r++)
            if (ready[r].revents) ranks_read_message(r);
        if (watch.failure_rank >= 0 && now >= watch.failure_ms) ranks_report_failure();
        ranks_look(now);
        if (now < next_ms) continue;
        next_ms = now + ranks_tick_ms();
        ranks_tick(now);
    }
    return NULL;
}

void comm_heartbeat(double seconds) { RANKS_SET(watch.limit_ms, (int64_t)(seconds * 1e3)); }

static void ranks_watch_defaults(int n) {
    watch.phase = "set-up";
    watch.failure_rank = -1;
    watch.parent = getenv("OMPI_COMM_WORLD_RANK") ? getppid() : 0;
    watch.progress_ms = now_ms();
    comm_heartbeat(RANKS_LIMIT_SECONDS);
    for (int r = 0; r < n; r++) {
        snprintf(watch.known[r].last.phase, sizeof watch.known[r].last.phase, "set-up");
        watch.known[r].received_ms = watch.progress_ms;
        if (ranks.sockets[RANKS_WATCH][r] >= 0)
            ranks_set_timeout(ranks.sockets[RANKS_WATCH][r], 2000);
    }
    pthread_mutex_init(&watch.sending, NULL);
    pthread_mutex_init(&watch.reporting, NULL);
}

// A stream of our own: after a library has written to the old one, setvbuf may not take effect.
static int ranks_hold_stderr(void) {
    FILE *held = fdopen(2, "w");
    if (!held || setvbuf(held, watch.said, _IOFBF, sizeof watch.said) != 0) return 0;
    watch.plain_stderr = stderr;
    stderr = held;  // glibc: a variable
    return 1;
}

const char *watchdog_start(void) {
    const int n = ranks.rank == 0 ? ranks.num : 1;
    sigset_t all, before;
    watch.known = calloc((size_t)n, sizeof *watch.known);
    watch.ready = calloc((size_t)n + 1, sizeof *watch.ready);
    watch.wake = eventfd(0, EFD_CLOEXEC);
    if (!watch.known || !watch.ready || watch.wake < 0) return "no memory for the list of ranks";
    ranks_watch_defaults(n);
    if (!ranks_hold_stderr()) return "no memory to hold standard error back";
    on_exit(ranks_at_exit, NULL);
    watch.running = 1;
    sigfillset(&all);  // signals are the main thread's
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&watch.thread, NULL, ranks_watch_thread, watch.ready);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed ? "no thread to watch the ranks with" : NULL;
}

void watchdog_bye(void) {
    RanksMessage bye = ranks_message(RANKS_BYE);
    RANKS_SET(watch.bye, 1);
    ranks_notify_all(&bye);
}

void watchdog_stop(void) {
    const uint64_t one = 1;
    RANKS_SET(watch.running, 0);
    if (write(watch.wake, &one, sizeof one) == sizeof one) pthread_join(watch.thread, NULL);
    close(watch.wake);
    free(watch.known);
    free(watch.ready);
    if (ranks.rank > 0) __fpurge(stderr);  // no error: warnings are printed by rank 0 only
    fflush(stderr);
    stderr = watch.plain_stderr;
}
