// The control plane of a job of several ranks, the same for every backend: who this rank is, how
// the ranks find each other, small things exchanged in host memory, and who is lost, hung or
// failing. Host code only; Linux; TCP. Alone, a process opens no socket and starts no thread.
//
//   ranks_meet.h       who am I, and the way to all others
//   ranks_watch.h      heartbeat, and one error for all
//   ranks_join         meets the others and starts the watch
//   ranks_broadcast    and its kind: blocking, all ranks in the same order
//   ranks_phase        what the main thread is at: for the message if it never ends
//   ranks_wait, _go    around what waits for all ranks, so that it is not held guilty
//   ranks_alive        progress: again and again in what takes long, and while waiting
//   ranks_leave        the last call
//
// Included by one file of each backend. Include it first: it asks libc for GNU extensions.
#ifndef UNPAD_RANKS_H
#define UNPAD_RANKS_H

#include "ranks_meet.h"
#include "ranks_watch.h"

// Joins the other ranks that the launcher speaks of; alone, does nothing. hand_over: a broadcast
// that all ranks have already, or NULL. Returns NULL, or one line that says what is missing for
// this rank to be one of several. Ranks that do not come end the process with exit code 8.
static inline const char *ranks_join(RanksHandOver hand_over) {
    static char problem[160];
    RanksMeeting m;
    int listener = -1;
    ranks.num = ranks_launched();
    if (ranks.num == 1) return NULL;
    RanksPlace own = ranks_place();
    if (own.rank < 0 || own.rank >= ranks.num) {
        ranks.num = 1;
        snprintf(problem, sizeof problem, "started as one of several ranks (%s), but %s is not one",
                 ranks_launcher()->size, ranks_launcher()->rank);
        return problem;
    }
    ranks.rank = own.rank;
    const char *missing = ranks_make_tables();
    if (!missing) missing = ranks_find_meeting(&m, &own, hand_over, &listener);
    if (missing) return missing;
    if (ranks.rank == 0)
        ranks_host(listener, &m, &own);
    else
        ranks_visit(&m, &own);
    if (ranks.rank == 0) ranks_unlink_meeting();
    ranks.joined = 1;
    return ranks_watch_start();
}

// ------------------------------------------------------------------------------------------------
// Small things in host memory: all ranks make the same calls in the same order

enum { RANKS_IS_BROADCAST = 1, RANKS_IS_GATHER, RANKS_IS_MERGE };
enum { RANKS_TURN_MS = 100 };  // how often what waits for bytes shows that it does not hang

typedef struct {
    uint32_t kind, number;
    uint64_t bytes, first;
} RanksHeader;

// The watch has found the same, and ends this process.
__attribute__((noreturn)) static inline void ranks_gone(int r) {
    ranks_sleep_ms(RANKS_END_MS);
    fprintf(stderr, "error: ranks: rank %d on %s lost\nhint: %s\n", r, ranks.places[r].host,
            RANKS_RESUME);
    exit(RANKS_EXIT_LOST);
}

// All bytes to (events POLLOUT) or from (POLLIN) rank r
static inline void ranks_move(int r, short events, void *data, size_t bytes) {
    char *p = (char *)data;
    struct pollfd ready = {ranks.sockets[RANKS_DATA][r], events, 0};
    while (bytes > 0) {
        ranks_alive();
        if (poll(&ready, 1, RANKS_TURN_MS) <= 0) continue;
        ssize_t n = events == POLLOUT ? send(ready.fd, p, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                      : recv(ready.fd, p, bytes, MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) ranks_gone(r);
        p += n;
        bytes -= (size_t)n;
    }
}

static inline void ranks_put(int r, RanksHeader h, const void *data) {
    ranks_move(r, POLLOUT, &h, sizeof h);
    ranks_move(r, POLLOUT, (void *)data, h.bytes);
}

__attribute__((noreturn)) static inline void ranks_unlike(int r, RanksHeader h, RanksHeader own) {
    fprintf(stderr,
            "error: ranks: exchange %u of rank %d is %u of %llu bytes, that of rank %d is number "
            "%u, %u of %llu bytes\nhint: please report this with the command that led to it\n",
            h.number, r, h.kind, (unsigned long long)h.bytes, ranks.rank, own.number, own.kind,
            (unsigned long long)own.bytes);
    exit(RANKS_EXIT_LOST);
}

static inline RanksHeader ranks_expect(int r, RanksHeader wanted) {
    RanksHeader h;
    ranks_move(r, POLLIN, &h, sizeof h);
    if (h.kind != wanted.kind || h.number != wanted.number || h.first + h.bytes > wanted.bytes ||
        (h.kind != RANKS_IS_MERGE && h.bytes != wanted.bytes))
        ranks_unlike(r, h, wanted);
    return h;
}

static inline void ranks_get(int r, RanksHeader wanted, void *data) {
    RanksHeader h = ranks_expect(r, wanted);
    ranks_move(r, POLLIN, data, h.bytes);
}

// data (bytes) =  rank 0's
static inline void ranks_broadcast(void *data, size_t bytes) {
    if (!ranks.joined) return;
    RanksHeader h = {RANKS_IS_BROADCAST, ++ranks.number, bytes, 0};
    ranks_wait();
    if (ranks.rank > 0) ranks_get(0, h, data);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) ranks_put(r, h, data);
    ranks_go();
}

// out (num, bytes) on rank 0 =  every rank's data; not written on the others
static inline void ranks_gather(void *out, const void *data, size_t bytes) {
    RanksHeader h = {RANKS_IS_GATHER, ++ranks.number, bytes, 0};
    ranks_wait();
    if (ranks.rank > 0) ranks_put(0, h, data);
    if (ranks.rank == 0) memmove(out, data, bytes);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++)
        ranks_get(r, h, (char *)out + (size_t)r * bytes);
    ranks_go();
}

// out (num, bytes) =  every rank's data
static inline void ranks_all_gather(void *out, const void *data, size_t bytes) {
    if (!ranks.joined) {
        memmove(out, data, bytes);
        return;
    }
    ranks_gather(out, data, bytes);
    ranks_broadcast(out, (size_t)ranks.num * bytes);
}

// The largest value of all ranks
static inline int ranks_max(int value) {
    if (!ranks.joined) return value;
    RanksHeader h = {RANKS_IS_GATHER, ++ranks.number, sizeof value, 0};
    ranks_wait();
    if (ranks.rank > 0) ranks_put(0, h, &value);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) {
        int other;
        ranks_get(r, h, &other);
        if (other > value) value = other;
    }
    ranks_go();
    ranks_broadcast(&value, sizeof value);
    return value;
}

// rank 0's data (bytes) |=  that of the others. Zeros at both ends are not sent: where each byte is
// of one rank, a rank sends its own part.
static inline void ranks_merge(void *data, size_t bytes) {
    unsigned char *mine = (unsigned char *)data;
    unsigned char chunk[1 << 14];
    if (!ranks.joined) return;
    RanksHeader h = {RANKS_IS_MERGE, ++ranks.number, bytes, 0};
    ranks_wait();
    if (ranks.rank > 0) {
        while (h.first < bytes && mine[h.first] == 0) h.first++;
        h.bytes = bytes - h.first;
        while (h.bytes > 0 && mine[h.first + h.bytes - 1] == 0) h.bytes--;
        ranks_put(0, h, mine + h.first);
    }
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) {
        RanksHeader part = ranks_expect(r, h);
        for (uint64_t i = 0, n; i < part.bytes; i += n) {
            n = part.bytes - i < sizeof chunk ? part.bytes - i : sizeof chunk;
            ranks_move(r, POLLIN, chunk, n);
            for (uint64_t k = 0; k < n; k++) mine[part.first + i + k] |= chunk[k];
        }
    }
    ranks_go();
}

// Returns when all ranks have called it.
static inline void ranks_barrier(void) { (void)ranks_max(0); }

// For a library that logs to standard output, which ranks but 0 do not have: sets `variable`, which
// names the file of its log, to standard error, unless it is set. What goes there is not held back:
// it precedes the error. Not where standard error is a regular file: opening it would empty it.
static inline void ranks_library_log(const char *variable) {
    struct stat status;
    if (fstat(2, &status) == 0 && !S_ISREG(status.st_mode)) setenv(variable, "/dev/stderr", 0);
}

// The last call: after it a rank may exit with any code.
static inline void ranks_leave(void) {
    if (!ranks.joined) return;
    (void)ranks_max(0);  // all have done what they had to
    if (ranks.rank == 0) ranks_watch_bye();
    ranks_barrier();
    ranks.joined = 0;
    ranks_watch_stop();
    for (int c = 0; c < RANKS_CHANNELS; c++) {
        for (int r = 0; r < ranks.num; r++)
            if (ranks.sockets[c][r] >= 0) close(ranks.sockets[c][r]);
        free(ranks.sockets[c]);
    }
    free(ranks.places);
    ranks.num = 1;
    ranks.rank = 0;
}

#endif
