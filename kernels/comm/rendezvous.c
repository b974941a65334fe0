// How the ranks of a job find each other: every rank connects to rank 0, which is
//   1. at MASTER_ADDR and MASTER_PORT (29500 when unset) of the environment; else
//   2. on this machine, when the launcher says that all ranks are; else
//   3. on the machine whose name rank 0 broadcasts, where a broadcast exists already (MPI's),
// in 2 and 3 at one of a few ports that follow from the launcher's job id. A rank that does not
// connect within RANKS_JOIN_SECONDS (300 when unset) is named and ends the job. A connection that
// does not give the job's key is dropped: that guards against accidents, not against attackers.
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/memory.h"
#include "ranks.h"

enum {
    DEFAULT_PORT = 29500,
    NUM_PORTS = 8,  // in ways 2 and 3
    CONNECT_MS = 2000,
    ANSWER_MS = 2000,
    HELLO_MS = 200,     // for what a connection sends first, which arrives with it
    RECEIVE_MS = 2000,  // for the rest of a message to the watchdog
};

static struct {
    char address[256];
    int port, num_ports;  // rank 0 is at one of port .. port + num_ports - 1
} meeting;

// The first message of a connection, and rank 0's answers to it
typedef struct {
    uint64_t job;
    enum { HELLO = 1, WELCOME, TAKEN, OTHER_SIZE, ALL_HERE, FAILED } kind;
    int channel, rank, num;
    char host[64];  // of the sender
} Hello;

static bool send_hello(int fd, int kind, int channel) {
    Hello h = {ranks.job, kind, channel, ranks.rank, ranks.num, ""};
    memcpy(h.host, ranks.host, sizeof h.host);
    return send(fd, &h, sizeof h, MSG_NOSIGNAL) == sizeof h;
}

bool ranks_receive(int fd, void *data, size_t bytes) {
    ssize_t n;
    do n = recv(fd, data, bytes, MSG_WAITALL);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)bytes;
}

static void set_timeout(int fd, int ms) {
    const struct timeval t = {ms / 1000, ms % 1000 * 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
}

// A socket that listens at address:port, or is connected to it; -1 with errno.
static int open_socket(const char *address, int port, bool listens) {
    const struct addrinfo want = {.ai_socktype = SOCK_STREAM,
                                  .ai_flags = AI_NUMERICSERV | (listens ? AI_PASSIVE : 0)};
    const struct timeval limit = {CONNECT_MS / 1000, 0};
    const int one = 1, wait_s = 1;
    struct addrinfo *found;
    char text[8];
    int fd = -1, why = EADDRNOTAVAIL;
    snprintf(text, sizeof text, "%d", port);
    if (getaddrinfo(address, text, &want, &found) != 0) return errno = why, -1;
    for (struct addrinfo *a = found; a && fd < 0; a = a->ai_next) {
        if ((fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0) continue;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // of connect too
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (listens) setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &wait_s, sizeof wait_s);
        if (listens ? bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 4096) == 0
                    : connect(fd, a->ai_addr, a->ai_addrlen) == 0)
            break;
        why = errno;
        close(fd);
        fd = -1;
    }
    freeaddrinfo(found);
    errno = why;
    return fd;
}

// On all networks, unless only this machine needs to reach it
static int listen_at(int port) {
    const bool alone = ranks.here || strncmp(meeting.address, "127.", 4) == 0 ||
                       strcmp(meeting.address, "localhost") == 0 ||
                       strcmp(meeting.address, "::1") == 0;
    int fd = alone ? open_socket(meeting.address, port, true) : -1;
    if (!alone || (fd < 0 && errno == EADDRNOTAVAIL)) fd = open_socket("::", port, true);
    return fd < 0 && errno != EADDRINUSE ? open_socket("0.0.0.0", port, true) : fd;
}

bool ranks_first_to_report(void) { return listen_at(meeting.port) >= 0; }

int ranks_join_seconds(void) { return ranks_env_number("RANKS_JOIN_SECONDS", 1, 1000000, 300); }

// ------------------------------------------------------------------------------------------------
// Rank 0: accepts all ranks

static bool is_open(int fd) {
    char byte;
    if (fd < 0) return false;
    const ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n > 0 || (n < 0 && errno == EAGAIN);
}

// A rank that came and died meanwhile is missing.
static bool is_missing(int r) {
    return !is_open(ranks.peers[r].sockets[RANKS_DATA]) ||
           !is_open(ranks.peers[r].sockets[RANKS_WATCH]);
}

// "2, 5-7"; empty: none
static void list_missing(char *list, size_t capacity) {
    char item[32];
    list[0] = 0;
    for (int r = 1, last; r < ranks.num; r = last + 1) {
        last = r;
        if (!is_missing(r)) continue;
        while (last + 1 < ranks.num && is_missing(last + 1)) last++;
        snprintf(item, sizeof item, last > r ? "%d-%d" : "%d", r, last);
        text_list(list, capacity, item);
    }
}

// False: the connection is of no use.
static bool admit(int fd, const Hello *h) {
    const bool fits = h->num == ranks.num && h->rank > 0 && h->rank < ranks.num &&
                      h->channel >= 0 && h->channel < RANKS_CHANNELS;
    RanksPeer *peer = &ranks.peers[fits ? h->rank : 0];
    int *slot = &peer->sockets[fits ? h->channel : 0];
    if (!fits || is_open(*slot)) {
        send_hello(fd, fits ? TAKEN : OTHER_SIZE, 0);
        return false;
    }
    if (*slot >= 0) close(*slot);
    *slot = fd;
    snprintf(peer->host, sizeof peer->host, "%.63s", h->host);
    send_hello(fd, WELCOME, 0);
    return true;
}

static void accept_one(int listener) {
    Hello h;
    const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return;
    set_timeout(fd, HELLO_MS);
    if (!ranks_receive(fd, &h, sizeof h) || h.job != ranks.job || !admit(fd, &h)) close(fd);
}

static void accept_all(void) {
    const double until_ms = now_ms() + 1e3 * ranks_join_seconds();
    struct pollfd door = {-1, POLLIN, 0};
    char missing[256] = "?";
    for (int i = 0; i < meeting.num_ports && door.fd < 0; i++)
        door.fd = listen_at(meeting.port += i > 0);
    if (door.fd < 0)
        ranks_die(EXIT_PEER_LOST,
                  "set MASTER_ADDR and MASTER_PORT to a free port that all ranks reach",
                  "rank 0: cannot listen on port %d: %s", meeting.port, strerror(errno));
    while (missing[0] && now_ms() < until_ms) {
        if (poll(&door, 1, 100) > 0) accept_one(door.fd);
        list_missing(missing, sizeof missing);
    }
    close(door.fd);
    for (int r = 1; r < ranks.num; r++)
        send_hello(ranks.peers[r].sockets[RANKS_DATA], missing[0] ? FAILED : ALL_HERE, 0);
    if (missing[0])
        ranks_die(EXIT_PEER_LOST,
                  "start all ranks, where they can reach rank 0; RANKS_JOIN_SECONDS sets the time",
                  "expected %d ranks at port %d of %s within %d s, found none of rank %s",
                  ranks.num, meeting.port, ranks.host, ranks_join_seconds(), missing);
}

// ------------------------------------------------------------------------------------------------
// The other ranks

#define NO_RANK_0 "start all ranks; set MASTER_ADDR and MASTER_PORT to where rank 0 can be reached"

// A connection to rank 0 of our job, or -1.
static int introduce(int port, int channel) {
    Hello answer;
    const int fd = open_socket(meeting.address, port, false);
    if (fd < 0) return -1;
    set_timeout(fd, ANSWER_MS);
    if (!send_hello(fd, HELLO, channel) || !ranks_receive(fd, &answer, sizeof answer) ||
        answer.job != ranks.job || answer.kind == HELLO)  // HELLO: a port connected to itself
        return close(fd), -1;
    if (answer.kind == TAKEN)
        ranks_die(EXIT_PEER_LOST,
                  "does another job use the same MASTER_ADDR and MASTER_PORT? Give one another",
                  "rank %d already connected to %s port %d", ranks.rank, meeting.address, port);
    if (answer.kind == OTHER_SIZE)
        ranks_die(EXIT_PEER_LOST, "start all ranks with the same number of ranks",
                  "expected %d ranks, but rank 0 at %s port %d found another number", ranks.num,
                  meeting.address, port);
    memcpy(ranks.peers[0].host, answer.host, sizeof answer.host);
    return fd;
}

static int connect_channel(int channel, double until_ms) {
    for (int i = 0; now_ms() < until_ms; i = (i + 1) % meeting.num_ports) {
        const int fd = introduce(meeting.port + i, channel);
        if (fd >= 0) {
            meeting.port += i;
            meeting.num_ports = 1;
            return fd;
        }
        if (i == 0) sleep_ms(50);
    }
    ranks_die(EXIT_PEER_LOST, NO_RANK_0,
              "expected rank 0 at %s port %d within %d s, found no rank 0 of this job (rank %d on "
              "%s)",
              meeting.address, meeting.port, ranks_join_seconds(), ranks.rank, ranks.host);
}

static void connect_both(void) {
    const int limit_ms = 1000 * ranks_join_seconds();
    const double until_ms = now_ms() + limit_ms;
    int *sockets = ranks.peers[0].sockets;
    Hello answer;
    for (int c = 0; c < RANKS_CHANNELS; c++) sockets[c] = connect_channel(c, until_ms);
    set_timeout(sockets[RANKS_DATA], limit_ms + 10000);
    if (!ranks_receive(sockets[RANKS_DATA], &answer, sizeof answer))
        ranks_die(EXIT_PEER_LOST, NO_RANK_0,
                  "rank 0 at %s port %d lost before all ranks had connected", meeting.address,
                  meeting.port);
    if (answer.kind == FAILED) _exit(EXIT_PEER_LOST);  // rank 0 says why
}

// ------------------------------------------------------------------------------------------------

// Where rank 0 is. torchrun itself listens on MASTER_PORT: the ranks then use the next port.
static bool find_meeting(RanksBroadcast broadcast) {
    const char *master = getenv("MASTER_ADDR"), *store = getenv("TORCHELASTIC_USE_AGENT_STORE");
    const bool next = store && strcmp(store, "True") == 0;
    meeting.port = 10000 + (int)(ranks.job % 20000);
    meeting.num_ports = NUM_PORTS;
    if (master && *master) {
        snprintf(meeting.address, sizeof meeting.address, "%s", master);
        meeting.port = ranks_env_number("MASTER_PORT", 1, 65535 - next, DEFAULT_PORT) + next;
        meeting.num_ports = 1;
    } else if (ranks.here) {
        strcpy(meeting.address, "127.0.0.1");
    } else if (broadcast) {
        memcpy(meeting.address, ranks.host, sizeof ranks.host);
        broadcast(meeting.address, sizeof meeting.address);
    }
    return meeting.address[0];
}

const char *ranks_meet(RanksBroadcast broadcast) {
    struct rlimit files;
    if (!find_meeting(broadcast))
        return "several ranks on several machines: set MASTER_ADDR (and MASTER_PORT) to rank 0's";
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {  // the default is too low for many ranks
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    ranks.peers = host_calloc((size_t)ranks.num, sizeof *ranks.peers, "ranks");
    for (int r = 0; r < ranks.num; r++) ranks.peers[r] = (RanksPeer){"", {-1, -1}};
    (ranks.rank == 0 ? accept_all : connect_both)();
    for (int r = 0; r < ranks.num; r++)
        set_timeout(ranks.peers[r].sockets[RANKS_WATCH], RECEIVE_MS);
    ranks.joined = true;
    return NULL;
}
