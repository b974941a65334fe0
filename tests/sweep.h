// Every call of an operation fails in turn: the first one, then the second, and so on, until the
// operation ends without having reached that many. Needs fault.c.
#ifndef UNPAD_SWEEP_H
#define UNPAD_SWEEP_H

#include <sys/wait.h>
#include <unistd.h>

#include "../data/base/error.h"
#include "fault.h"
#include "test.h"

typedef struct {
    int kind, error;     // as in fault.h
    bool persistent;     // all later calls fail, too
    bool ok;             // what `run` has returned; false after a kill
    const char *victim;  // the call that failed; "": none was reached
    const char *where;   // all of this
    const Error *err;
} SweepCase;

typedef struct {
    void (*prepare)(void);
    bool (*run)(Error *err);
    void (*check)(const SweepCase *c);  // what `run` has left behind
} Sweep;

enum { SWEEP_RETURNED = 77 };

// The exit code of a child process in which call number nth fails. SWEEP_RETURNED: it has, and
// `run` has come back; 0: `run` has succeeded without that call.
static inline int sweep_child(const Sweep *s, const SweepCase *c, long nth) {
    int status = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        Error err = {0};
        close(2);
        fault_arm(c->kind, nth, c->error, c->persistent);
        const bool ok = s->run(&err);
        _exit(fault_disarm() >= nth ? SWEEP_RETURNED : !ok);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

// A refused allocation may end the process, with exit code 5. Returns the number of calls.
static inline long sweep(const Sweep *s, int kind, int error, bool persistent) {
    const bool kills = error <= FAULT_KILL;
    for (long nth = 1;; nth++) {
        char where[160];
        Error err = {0};
        SweepCase c = {kind, error, persistent, false, "kill", where, &err};
        snprintf(where, sizeof where, "call %ld, error %d", nth, error);
        s->prepare();
        if (kills || kind == FAULT_ALLOC) {
            const int code = sweep_child(s, &c, nth);
            c.ok = code == 0 || code == SWEEP_RETURNED;
            CHECK_MSG(c.ok || code == (kills ? 137 : EXIT_HOST_MEMORY), "%s: exit code %d", where,
                      code);
            if (kills || !c.ok) s->check(&c);
            if (kills && code == 0) return nth - 1;
            if (kills || !c.ok) continue;
        }
        const int fds = fault_open_fds();
        fault_arm(kind, nth, error, persistent);
        c.ok = s->run(&err);
        const long calls = fault_disarm();
        c.victim = fault_victim();
        snprintf(where, sizeof where, "%s, call %ld of %ld, error %d%s", c.victim, nth, calls,
                 error, persistent ? " from then on" : "");
        CHECK_MSG(fault_open_fds() == fds, "%s: file descriptor leak", where);
        CHECK_MSG(c.ok == (err.code == 0) && (c.ok || c.victim[0]), "%s: %s", where, err.what);
        s->check(&c);
        if (calls < nth) return calls;
    }
}

#endif
