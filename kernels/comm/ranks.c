#include "ranks.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "comm.h"
#include "rendezvous.h"
#include "watchdog.h"

const char *ranks_join(RanksBroadcast broadcast) {
    const char *missing = ranks_meet(broadcast);
    return missing || !ranks.joined ? missing : watchdog_start();
}

// ------------------------------------------------------------------------------------------------
// Exchanges of host memory: a star around rank 0

enum { RANKS_IS_BROADCAST = 1, RANKS_IS_GATHER, RANKS_IS_MERGE };
enum { RANKS_POLL_MS = 100 };  // a wait for bytes counts as progress this often

typedef struct {
    uint32_t kind, number;
    uint64_t bytes, first;
} RanksHeader;

static uint32_t num_exchanges;  // the same on all ranks

// The watchdog has found the same, and ends this process.
__attribute__((noreturn)) static void ranks_connection_lost(int r) {
    sleep_ms(RANKS_END_MS);
    fprintf(stderr, "error: ranks: rank %d on %s lost\nhint: %s\n", r, ranks.places[r].host,
            RANKS_RESUME);
    exit(EXIT_PEER_LOST);
}

// All bytes to (events POLLOUT) or from (POLLIN) rank r
static void ranks_move(int r, short events, void *data, size_t bytes) {
    char *p = data;
    struct pollfd ready = {ranks.sockets[RANKS_DATA][r], events, 0};
    while (bytes > 0) {
        comm_progress();
        if (poll(&ready, 1, RANKS_POLL_MS) <= 0) continue;
        ssize_t n = events == POLLOUT ? send(ready.fd, p, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                      : recv(ready.fd, p, bytes, MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) ranks_connection_lost(r);
        p += n;
        bytes -= (size_t)n;
    }
}

static void ranks_put(int r, RanksHeader h, const void *data) {
    ranks_move(r, POLLOUT, &h, sizeof h);
    ranks_move(r, POLLOUT, (void *)data, h.bytes);
}

__attribute__((noreturn)) static void ranks_mismatch(int r, RanksHeader h, RanksHeader own) {
    fprintf(stderr,
            "error: ranks: exchange %u of rank %d is %u of %llu bytes, that of rank %d is number "
            "%u, %u of %llu bytes\nhint: please report this with the command that led to it\n",
            h.number, r, h.kind, (unsigned long long)h.bytes, ranks.rank, own.number, own.kind,
            (unsigned long long)own.bytes);
    exit(EXIT_PEER_LOST);
}

static RanksHeader ranks_expect(int r, RanksHeader wanted) {
    RanksHeader h;
    ranks_move(r, POLLIN, &h, sizeof h);
    if (h.kind != wanted.kind || h.number != wanted.number || h.first + h.bytes > wanted.bytes ||
        (h.kind != RANKS_IS_MERGE && h.bytes != wanted.bytes))
        ranks_mismatch(r, h, wanted);
    return h;
}

static void ranks_get(int r, RanksHeader wanted, void *data) {
    RanksHeader h = ranks_expect(r, wanted);
    ranks_move(r, POLLIN, data, h.bytes);
}

void comm_broadcast(void *data, size_t bytes) {
    if (!ranks.joined) return;
    RanksHeader h = {RANKS_IS_BROADCAST, ++num_exchanges, bytes, 0};
    ranks_enter_collective(true);
    if (ranks.rank > 0) ranks_get(0, h, data);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) ranks_put(r, h, data);
    ranks_leave_collective(true);
}

// out (num, bytes) on rank 0 =  every rank's data; not written on the others
static void ranks_gather(void *out, const void *data, size_t bytes) {
    RanksHeader h = {RANKS_IS_GATHER, ++num_exchanges, bytes, 0};
    ranks_enter_collective(true);
    if (ranks.rank > 0) ranks_put(0, h, data);
    if (ranks.rank == 0) memmove(out, data, bytes);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++)
        ranks_get(r, h, (char *)out + (size_t)r * bytes);
    ranks_leave_collective(true);
}

void comm_all_gather_host(void *out, const void *data, size_t bytes) {
    if (!ranks.joined) {
        memmove(out, data, bytes);
        return;
    }
    ranks_gather(out, data, bytes);
    comm_broadcast(out, (size_t)ranks.num * bytes);
}

int comm_max(int value) {
    if (!ranks.joined) return value;
    RanksHeader h = {RANKS_IS_GATHER, ++num_exchanges, sizeof value, 0};
    ranks_enter_collective(true);
    if (ranks.rank > 0) ranks_put(0, h, &value);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) {
        int other;
        ranks_get(r, h, &other);
        if (other > value) value = other;
    }
    ranks_leave_collective(true);
    comm_broadcast(&value, sizeof value);
    return value;
}

// Zeros at both ends are not sent: where each byte is of one rank, a rank sends its own part.
void comm_merge(void *data, size_t bytes) {
    unsigned char *mine = data;
    unsigned char chunk[1 << 14];
    if (!ranks.joined) return;
    RanksHeader h = {RANKS_IS_MERGE, ++num_exchanges, bytes, 0};
    ranks_enter_collective(true);
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
    ranks_leave_collective(true);
}

void comm_barrier(void) { (void)comm_max(0); }

void ranks_library_log(const char *variable) {
    struct stat status;
    if (fstat(2, &status) == 0 && !S_ISREG(status.st_mode)) setenv(variable, "/dev/stderr", 0);
}

void ranks_leave(void) {
    if (!ranks.joined) return;
    comm_barrier();  // all have done what they had to
    if (ranks.rank == 0) watchdog_bye();
    comm_barrier();
    ranks.joined = 0;
    watchdog_stop();
    ranks_part();
}
