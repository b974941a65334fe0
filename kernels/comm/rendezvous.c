#include "rendezvous.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/hash.h"
#include "comm.h"
#include "ranks.h"

enum {
    RANKS_MAX = 1 << 16,
    RANKS_DEFAULT_PORT = 29500,
    RANKS_JOIN_SECONDS = 300,
    RANKS_MOST_SECONDS = 1000000,  // upper bound of RANKS_JOIN_SECONDS
    RANKS_HELLO_MS = 5000,         // for a connection to identify itself, and for rank 0 to answer
    RANKS_MAX_UNIDENTIFIED = 64,   // connections that have not identified themselves
};

Ranks ranks = {.num = 1};

// The file in which ranks of one machine find rank 0's port; empty: another way is used
static char meeting_path[4096];

int comm_rank(void) { return ranks.rank; }
int comm_num_ranks(void) { return ranks.num; }
int comm_local_rank(void) { return ranks.joined ? ranks.places[ranks.rank].local_rank : 0; }

// ------------------------------------------------------------------------------------------------
// Who am I: the environment variables of launchers

typedef struct {
    const char *size, *rank, *local_rank, *local_size, *job;
} RanksLauncher;

// The first whose size and rank are both set counts. A batch script has most of srun's variables
// as well, but not the size of a step.
static const RanksLauncher ranks_launchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},  // mpirun of Open MPI
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
     "SLURM_JOB_ID"},  // mpirun of MPICH and Intel MPI, srun --mpi=pmi2
    {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},  // torchrun
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", NULL, "SLURM_JOB_ID"},  // srun
};
enum { RANKS_LAUNCHERS = sizeof ranks_launchers / sizeof *ranks_launchers };

static const char *ranks_env(const char *name) { return name ? getenv(name) : NULL; }

// A whole number from `least` to `most`; `otherwise` when the variable is unset. Anything else ends
// the process with exit code 2: a wrong guess could mean training as a single process.
static int ranks_env_number(const char *name, int least, int most, int otherwise) {
    const char *text = ranks_env(name);
    char shown[32];
    if (!text) return otherwise;
    const size_t digits = strspn(text, "0123456789");
    if (digits > 0 && digits < 10 && !text[digits] && atoi(text) >= least && atoi(text) <= most)
        return atoi(text);
    snprintf(shown, sizeof shown, "%s", text);
    for (char *p = shown; *p; p++)
        if (*p < ' ' || *p > '~') *p = '?';
    ranks_die(EXIT_USAGE, "set it as the launcher would, or unset it",
              "%s: expected a whole number from %d to %d, found \"%s\"", name, least, most, shown);
}

// The launcher of this process; NULL for a single process. One that sets the number of ranks but
// not this one's number counts too: such a process must not train alone.
static const RanksLauncher *ranks_launcher(void) {
    for (int i = 0; i < RANKS_LAUNCHERS; i++)
        if (ranks_env(ranks_launchers[i].size) && ranks_env(ranks_launchers[i].rank))
            return &ranks_launchers[i];
    for (int i = 0; i < RANKS_LAUNCHERS; i++)
        if (ranks_env(ranks_launchers[i].size)) return &ranks_launchers[i];
    return NULL;
}

int ranks_launched(void) {
    const RanksLauncher *by = ranks_launcher();
    const int n = by ? ranks_env_number(by->size, 1, RANKS_MAX, 1) : 1;
    if (by) ranks_env_number(by->rank, 0, n - 1, 0);
    return n;
}

// The terminating NUL is hashed too, so that "ab", "c" differs from "a", "bc".
static uint64_t hash_text(uint64_t hash, const char *text) {
    if (!text) text = "";
    return fnv1a(hash, text, strlen(text) + 1);
}

// A machine's identity. The host name alone does not distinguish machines, the boot id does not
// distinguish containers, and both together do not distinguish containers with the host's name:
// hence the process id namespace.
static uint64_t ranks_machine(const char *host) {
    char boot[64] = "", pids[64] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, boot, sizeof boot - 1) : 0;
    if (n > 0) boot[n] = 0;
    if (fd >= 0) close(fd);
    n = readlink("/proc/self/ns/pid", pids, sizeof pids - 1);
    if (n > 0) pids[n] = 0;
    return hash_text(hash_text(hash_text(FNV1A_START, boot), host), pids);
}

RanksPlace ranks_place(void) {
    const RanksLauncher *by = ranks_launcher();
    RanksPlace p;
    memset(&p, 0, sizeof p);
    if (gethostname(p.host, sizeof p.host - 1) != 0) strcpy(p.host, "unknown");
    p.machine = ranks_machine(p.host);
    p.pid = (int32_t)getpid();
    p.rank = by ? ranks_env_number(by->rank, 0, RANKS_MAX - 1, -1) : 0;
    p.local_rank = by ? ranks_env_number(by->local_rank, 0, RANKS_MAX - 1, -1) : 0;
    p.local_size = by ? ranks_env_number(by->local_size, 1, RANKS_MAX, -1) : 1;
    return p;
}

bool ranks_all_here(void) {
    return ranks_place().local_size == ranks_launched() ||
           ranks_env_number("SLURM_STEP_NUM_NODES", 1, RANKS_MAX, 0) == 1;
}

// The same on all ranks of a job: from the launcher's job id, else from the parent's process id.
static uint64_t ranks_job_key(void) {
    const RanksLauncher *by = ranks_launcher();
    const char *job = by ? ranks_env(by->job) : NULL;
    uint64_t key = hash_text(hash_text(FNV1A_START, job), getenv("SLURM_STEP_ID"));
    char parent[32];
    snprintf(parent, sizeof parent, "%ld", (long)getppid());
    return job ? key : hash_text(key, parent);
}

// ------------------------------------------------------------------------------------------------
// Ending a rank that cannot find the others

// The lock is the name of an abstract socket, which the kernel releases with the process.
int ranks_first_to_report(void) {
    struct sockaddr_un name;
    memset(&name, 0, sizeof name);
    name.sun_family = AF_UNIX;
    int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "unpad-ranks-%016llx%016llx",
                     (unsigned long long)ranks.token[0], (unsigned long long)ranks.token[1]);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return fd < 0 || bind(fd, (struct sockaddr *)&name,
                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) == 0;
}

static void ranks_unlink_meeting(void) {
    if (meeting_path[0]) unlink(meeting_path);
}

// One error for the job: before the ranks have met, only the first process of a machine reports it.
void ranks_die(int code, const char *hint, const char *what, ...) {
    char text[1024];
    va_list args;
    va_start(args, what);
    vsnprintf(text, sizeof text, what, args);
    va_end(args);
    if (ranks.rank == 0 && !ranks.joined) ranks_unlink_meeting();
    if (!ranks.token[0]) ranks.token[0] = ranks_job_key();
    if (ranks.joined || ranks_first_to_report()) {
        fprintf(stderr, "error: ranks: %s\nhint: %s\n", text, hint);
        if (ranks.joined) exit(code);  // see ranks_at_exit
        fflush(stderr);
        for (int r = 1; ranks.rank == 0 && ranks.sockets[RANKS_DATA] && r < ranks.num; r++)
            shutdown(ranks.sockets[RANKS_DATA][r], SHUT_RDWR);
        sleep_ms(1000);  // the others find the same error meanwhile
    }
    _exit(code);
}

// ------------------------------------------------------------------------------------------------
// Bytes over a socket

int ranks_send(int fd, const void *data, size_t bytes, int flags) {
    const char *p = data;
    while (bytes > 0) {
        ssize_t n = send(fd, p, bytes, flags | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        p += n;
        bytes -= (size_t)n;
    }
    return 0;
}

int ranks_receive(int fd, void *data, size_t bytes) {
    char *p = data;
    while (bytes > 0) {
        ssize_t n = recv(fd, p, bytes, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1;
        p += n;
        bytes -= (size_t)n;
    }
    return 0;
}

void ranks_set_timeout(int fd, int ms) {  // of each receive; 0: none
    struct timeval t = {ms / 1000, ms % 1000 * 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
}

// ------------------------------------------------------------------------------------------------
// Where rank 0 is

typedef struct {
    char addresses[512];  // separated by spaces: numbers, or one name
    char port[8];
    uint64_t token[2];
    char problem[128];  // of rank 0, which all must know of; else empty
} RanksMeeting;

static int ranks_is_loopback(const struct sockaddr *a) {
    if (a->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
    return a->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static int ranks_listen_at(int family, const char *address, const char *port) {
    struct addrinfo want, *found;
    int one = 1, none = 0;
    memset(&want, 0, sizeof want);
    want.ai_family = family;
    want.ai_socktype = SOCK_STREAM;
    want.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    errno = EADDRNOTAVAIL;
    if (getaddrinfo(address, port, &want, &found) != 0) return -1;
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd >= 0 && family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &none, sizeof none);
    if (fd >= 0 && (bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 4096) != 0)) {
        int why = errno;
        close(fd);
        errno = why;
        fd = -1;
    }
    freeaddrinfo(found);
    return fd;
}

// Is `address` a loopback address? Then no other machine needs to reach the port. Names do not
// tell: a machine's own name may resolve to 127.0.1.1.
static int ranks_leads_home(const char *address) {
    struct addrinfo want, *found;
    memset(&want, 0, sizeof want);
    want.ai_flags = AI_NUMERICHOST;
    if (strcmp(address, "localhost") == 0) return 1;
    if (getaddrinfo(address, NULL, &want, &found) != 0) return 0;
    int home = ranks_is_loopback(found->ai_addr);
    freeaddrinfo(found);
    return home;
}

// Fills in the port that was bound. -1: m->problem says why.
static int ranks_listen(RanksMeeting *m) {
    struct sockaddr_storage bound;
    socklen_t length = sizeof bound;
    int fd = ranks_leads_home(m->addresses) ? ranks_listen_at(AF_UNSPEC, m->addresses, m->port)
                                            : ranks_listen_at(AF_INET6, NULL, m->port);
    if (fd < 0 && errno != EADDRINUSE) fd = ranks_listen_at(AF_INET, NULL, m->port);
    if (fd < 0 || getsockname(fd, (struct sockaddr *)&bound, &length) != 0) {
        snprintf(m->problem, sizeof m->problem, "cannot listen on port %s: %s", m->port,
                 strerror(errno));
        return -1;
    }
    uint16_t port = bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                : ((struct sockaddr_in *)&bound)->sin_port;
    snprintf(m->port, sizeof m->port, "%d", ntohs(port));
    return fd;
}

// This machine's addresses as ranks of other machines can reach them; without a network, loopback.
static void ranks_own_addresses(char *out, size_t capacity) {
    struct ifaddrs *all, *i;
    snprintf(out, capacity, "127.0.0.1");
    if (getifaddrs(&all) != 0) return;
    out[0] = 0;
    for (i = all; i; i = i->ifa_next) {
        const struct sockaddr *a = i->ifa_addr;
        char text[64];
        size_t used = strlen(out), length;
        if (!a || !(i->ifa_flags & IFF_UP) || ranks_is_loopback(a)) continue;
        if (a->sa_family != AF_INET && a->sa_family != AF_INET6) continue;
        if (a->sa_family == AF_INET6 &&
            IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)a)->sin6_addr))
            continue;
        length = a->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        if (getnameinfo(a, (socklen_t)length, text, sizeof text, NULL, 0, NI_NUMERICHOST) == 0 &&
            used + strlen(text) + 2 < capacity)
            snprintf(out + used, capacity - used, "%s%s", used ? " " : "", text);
    }
    freeifaddrs(all);
    if (!out[0]) snprintf(out, capacity, "127.0.0.1");
}

// Way 1. torchrun itself listens on MASTER_PORT, so the ranks use the next port.
static void ranks_meet_at_master(RanksMeeting *m, const char *address) {
    const char *store = getenv("TORCHELASTIC_USE_AGENT_STORE"),
               *job = ranks_env(ranks_launcher()->job);
    const int next = store && strcmp(store, "True") == 0;
    const int port = ranks_env_number("MASTER_PORT", 1, 65535 - next, RANKS_DEFAULT_PORT);
    snprintf(m->addresses, sizeof m->addresses, "%s", address);
    snprintf(m->port, sizeof m->port, "%d", (port + next) & 0xffff);
    m->token[0] = hash_text(FNV1A_START, job);
    m->token[1] = hash_text(hash_text(m->token[0], address), m->port);
}

// Ways 2 and 3, rank 0: a port of its own and a secret.
static int ranks_open_meeting(RanksMeeting *m) {
    strcpy(m->addresses, "127.0.0.1");
    if (!ranks_all_here()) ranks_own_addresses(m->addresses, sizeof m->addresses);
    strcpy(m->port, "0");
    if (getrandom(m->token, sizeof m->token, 0) != sizeof m->token) {
        strcpy(m->problem, "getrandom failed");
        return -1;
    }
    return ranks_listen(m);
}

// Way 3: the file's name
static void ranks_meeting_path(char *path, size_t capacity) {
    const char *dir = getenv("TMPDIR");
    snprintf(path, capacity, "%s/unpad-ranks-%ld-%016llx", dir && *dir ? dir : "/tmp",
             (long)getuid(), (unsigned long long)ranks_job_key());
}

// The file gets its name when it is complete. 0, or -1 with errno.
static int ranks_write_meeting(const RanksMeeting *m, const char *path) {
    char unready[4200];
    snprintf(unready, sizeof unready, "%s.%ld", path, (long)getpid());
    unlink(unready);
    int fd = open(unready, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return -1;
    int ok = write(fd, m, sizeof *m) == (ssize_t)sizeof *m;
    ok = close(fd) == 0 && ok && rename(unready, path) == 0;
    if (!ok) unlink(unready);
    return ok ? 0 : -1;
}

// A file that another user could have written is refused.
static int ranks_read_meeting(RanksMeeting *m, const char *path) {
    struct stat status;
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    int ok = fd >= 0 && fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
             status.st_uid == getuid() && (status.st_mode & 077) == 0 &&
             read(fd, m, sizeof *m) == (ssize_t)sizeof *m;
    if (fd >= 0) close(fd);
    if (!ok) return -1;
    m->addresses[sizeof m->addresses - 1] = m->port[sizeof m->port - 1] = 0;
    return 0;
}

// ------------------------------------------------------------------------------------------------
// Identification: the first message of a connection, and rank 0's answer

#define RANKS_MAGIC 0x314b4e5241504e55ull  // "UNPARNK1"

typedef struct {
    uint64_t magic, token[2];
    int32_t channel, num;
    RanksPlace place;
} RanksHello;

enum { RANKS_WELCOME = 1, RANKS_TAKEN, RANKS_OTHER_SIZE };

typedef struct {
    uint64_t magic, token[2];
    int64_t result;
} RanksAnswer;

static void ranks_no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

// A connection to address:port within ms, or -1.
static int ranks_connect_to(const char *address, const char *port, int ms) {
    struct addrinfo want, *found, *a;
    int fd = -1;
    memset(&want, 0, sizeof want);
    want.ai_socktype = SOCK_STREAM;
    want.ai_flags = AI_NUMERICSERV;
    if (getaddrinfo(address, port, &want, &found) != 0) return -1;
    for (a = found; a && fd < 0; a = a->ai_next) {
        int error = 0;
        socklen_t length = sizeof error;
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) continue;
        struct pollfd ready = {fd, POLLOUT, 0};
        int ok = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ||
                 (errno == EINPROGRESS && poll(&ready, 1, ms) == 1 &&
                  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0);
        if (ok) continue;
        close(fd);
        fd = -1;
    }
    freeaddrinfo(found);
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    return fd;
}

// A connection to rank 0 of our job, identified on both sides, or -1.
static int ranks_introduce(const RanksMeeting *m, const char *address, int channel,
                           const RanksPlace *own) {
    RanksHello hello;
    RanksAnswer answer;
    memset(&hello, 0, sizeof hello);
    hello.magic = RANKS_MAGIC;
    memcpy(hello.token, m->token, sizeof hello.token);
    hello.channel = channel;
    hello.num = ranks.num;
    hello.place = *own;
    int fd = ranks_connect_to(address, m->port, 2000);
    if (fd < 0) return -1;
    ranks_no_delay(fd);
    ranks_set_timeout(fd, RANKS_HELLO_MS);
    if (ranks_send(fd, &hello, sizeof hello, 0) != 0 ||
        ranks_receive(fd, &answer, sizeof answer) != 0 || answer.magic != RANKS_MAGIC ||
        memcmp(answer.token, m->token, sizeof answer.token) != 0)
        return close(fd), -1;
    if (answer.result == RANKS_TAKEN)
        ranks_die(EXIT_PEER_LOST,
                  "does another job use the same MASTER_ADDR and MASTER_PORT? Give one another",
                  "rank %d already connected to %s:%s", ranks.rank, address, m->port);
    if (answer.result == RANKS_OTHER_SIZE)
        ranks_die(EXIT_PEER_LOST, "start all ranks with the same number of ranks",
                  "expected %d ranks, but rank 0 at %s:%s found another number", ranks.num, address,
                  m->port);
    ranks_set_timeout(fd, 0);
    return fd;
}

// Tries each address once.
static int ranks_introduce_anywhere(const RanksMeeting *m, int channel, const RanksPlace *own) {
    char addresses[sizeof m->addresses], *rest, *address;
    memcpy(addresses, m->addresses, sizeof addresses);
    for (address = strtok_r(addresses, " ", &rest); address; address = strtok_r(NULL, " ", &rest)) {
        int fd = ranks_introduce(m, address, channel, own);
        if (fd >= 0) return fd;
    }
    return -1;
}

// "2, 5-7": the ranks without both connections
static void ranks_list_missing(char *out, size_t capacity) {
    size_t used = 0;
    out[0] = 0;
    for (int r = 1; r < ranks.num && used + 32 < capacity; r++) {
        int last = r;
        if (ranks.sockets[RANKS_DATA][r] >= 0 && ranks.sockets[RANKS_WATCH][r] >= 0) continue;
        while (last + 1 < ranks.num && (ranks.sockets[RANKS_DATA][last + 1] < 0 ||
                                        ranks.sockets[RANKS_WATCH][last + 1] < 0))
            last++;
        used += (size_t)snprintf(out + used, capacity - used, used ? ", %d" : "%d", r);
        if (last > r) used += (size_t)snprintf(out + used, capacity - used, "-%d", last);
        r = last;
    }
}

// ------------------------------------------------------------------------------------------------
// Rank 0: accepts all ranks

typedef struct {
    int fd;
    int64_t until_ms;
    size_t have;
    RanksHello hello;
} RanksPending;

// Fills in local ranks and sizes that the launcher did not set, by counting.
static void ranks_fill_local(void) {
    for (int r = 0; r < ranks.num; r++) {
        RanksPlace *p = &ranks.places[r];
        int before = 0, all = 0;
        for (int other = 0; other < ranks.num; other++) {
            if (ranks.places[other].machine != p->machine) continue;
            all++;
            before += other < r;
        }
        if (p->local_rank < 0) p->local_rank = before;
        if (p->local_size < 0) p->local_size = all;
    }
}

// A complete hello: 1 when it belongs to this job and its connection is kept.
static int ranks_accept_hello(RanksPending *g, const RanksMeeting *m) {
    const RanksHello *h = &g->hello;
    RanksAnswer answer = {RANKS_MAGIC, {m->token[0], m->token[1]}, RANKS_WELCOME};
    const int r = h->place.rank;
    if (h->magic != RANKS_MAGIC || memcmp(h->token, m->token, sizeof h->token) != 0) return 0;
    if (h->num != ranks.num || r < 1 || r >= ranks.num || h->channel < 0 ||
        h->channel >= RANKS_CHANNELS)
        answer.result = RANKS_OTHER_SIZE;
    else if (ranks.sockets[h->channel][r] >= 0)
        answer.result = RANKS_TAKEN;
    if (ranks_send(g->fd, &answer, sizeof answer, 0) != 0 || answer.result != RANKS_WELCOME)
        return 0;
    ranks.places[r] = h->place;
    ranks.places[r].host[sizeof h->place.host - 1] = 0;
    fcntl(g->fd, F_SETFL, fcntl(g->fd, F_GETFL) & ~O_NONBLOCK);
    ranks_no_delay(g->fd);
    ranks.sockets[h->channel][r] = g->fd;
    return 1;
}

// Reads what has arrived; 1 when this pending connection is settled.
static int ranks_read_hello(RanksPending *g, const RanksMeeting *m) {
    ssize_t n = recv(g->fd, (char *)&g->hello + g->have, sizeof g->hello - g->have, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n > 0) g->have += (size_t)n;
    if (n > 0 && g->have < sizeof g->hello && (g->have < 8 || g->hello.magic == RANKS_MAGIC))
        return 0;
    if (n <= 0 || g->have < sizeof g->hello || !ranks_accept_hello(g, m)) close(g->fd);
    return 1;
}

static int ranks_num_arrived(void) {
    int n = 0;
    for (int r = 1; r < ranks.num; r++)
        n += ranks.sockets[RANKS_DATA][r] >= 0 && ranks.sockets[RANKS_WATCH][r] >= 0;
    return n;
}

// A rank sends nothing before all have connected: what can be read is the end of its connection.
static void ranks_drop_dead(void) {
    for (int c = 0; c < RANKS_CHANNELS; c++)
        for (int r = 1; r < ranks.num; r++) {
            char byte;
            int fd = ranks.sockets[c][r];
            if (fd < 0 || recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0) continue;
            close(fd);
            ranks.sockets[c][r] = -1;
        }
}

static void ranks_accept_one(int listener, RanksPending *pending, int *n, int max) {
    int fd = accept(listener, NULL, NULL), oldest = 0;
    if (fd < 0) return;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    if (*n == max) {
        for (int i = 1; i < *n; i++)
            if (pending[i].until_ms < pending[oldest].until_ms) oldest = i;
        close(pending[oldest].fd);
        pending[oldest] = pending[--*n];
    }
    RanksPending *g = &pending[(*n)++];
    memset(g, 0, sizeof *g);
    g->fd = fd;
    g->until_ms = now_ms() + RANKS_HELLO_MS;
}

// Until all have connected or the time is over; a connection that does not identify itself within
// RANKS_HELLO_MS is dropped.
static void ranks_accept_all(int listener, const RanksMeeting *m, int64_t until_ms) {
    const int max = 2 * ranks.num + RANKS_MAX_UNIDENTIFIED;
    RanksPending *pending = calloc((size_t)max, sizeof *pending);
    struct pollfd *ready = calloc((size_t)max + 1, sizeof *ready);
    int n = 0;
    while (pending && ready && ranks_num_arrived() + 1 < ranks.num && now_ms() < until_ms) {
        struct pollfd door = {listener, POLLIN, 0};
        ready[n] = door;
        for (int i = 0; i < n; i++) {
            struct pollfd guest = {pending[i].fd, POLLIN, 0};
            ready[i] = guest;
        }
        poll(ready, (nfds_t)n + 1, 100);
        int opened = ready[n].revents != 0;
        for (int i = n - 1; i >= 0; i--) {
            int gone = ready[i].revents ? ranks_read_hello(&pending[i], m) : 0;
            if (!gone && now_ms() > pending[i].until_ms) {
                close(pending[i].fd);
                gone = 1;
            }
            if (gone) pending[i] = pending[--n];
        }
        if (opened) ranks_accept_one(listener, pending, &n, max);
        ranks_drop_dead();
    }
    for (int i = 0; i < n; i++) close(pending[i].fd);
    free(pending);
    free(ready);
}

// ------------------------------------------------------------------------------------------------
// Joining

int64_t ranks_join_ms(void) {
    return 1000 * (int64_t)ranks_env_number("RANKS_JOIN_SECONDS", 1, RANKS_MOST_SECONDS,
                                            RANKS_JOIN_SECONDS);
}

static void ranks_host(int listener, const RanksMeeting *m, const RanksPlace *own) {
    int64_t limit_ms = ranks_join_ms();
    char missing[256];
    RanksAnswer all_there = {RANKS_MAGIC, {m->token[0], m->token[1]}, RANKS_WELCOME};
    ranks.places[0] = *own;
    ranks_accept_all(listener, m, now_ms() + limit_ms);
    close(listener);
    ranks_list_missing(missing, sizeof missing);
    if (missing[0])
        ranks_die(EXIT_PEER_LOST,
                  "start all ranks, where they can reach rank 0; RANKS_JOIN_SECONDS sets the time",
                  "expected %d ranks at port %s of %s within %lld s, found none of rank %s",
                  ranks.num, m->port, own->host, (long long)limit_ms / 1000, missing);
    ranks_fill_local();
    for (int r = 1; r < ranks.num; r++) {
        int fd = ranks.sockets[RANKS_DATA][r];
        ranks_send(fd, &all_there, sizeof all_there, MSG_MORE);
        ranks_send(fd, ranks.places, (size_t)ranks.num * sizeof *ranks.places, 0);
    }
}

#define RANKS_NO_RANK_0 \
    "start all ranks; set MASTER_ADDR and MASTER_PORT to where rank 0 can be reached"

static void ranks_connect(RanksMeeting *m, const RanksPlace *own) {
    const int64_t limit_ms = ranks_join_ms(), until_ms = now_ms() + limit_ms;
    RanksAnswer all_there;
    int fd[RANKS_CHANNELS] = {-1, -1};
    while (fd[RANKS_WATCH] < 0 && now_ms() < until_ms) {
        int c = fd[RANKS_DATA] < 0 ? RANKS_DATA : RANKS_WATCH;
        if (!meeting_path[0] || ranks_read_meeting(m, meeting_path) == 0)
            fd[c] = ranks_introduce_anywhere(m, c, own);
        if (fd[c] < 0) sleep_ms(50);
    }
    memcpy(ranks.token, m->token, sizeof ranks.token);
    const char *where = m->addresses[0] ? m->addresses : meeting_path;
    if (fd[RANKS_WATCH] < 0)
        ranks_die(EXIT_PEER_LOST, RANKS_NO_RANK_0,
                  "expected rank 0 at %s port %s within %lld s, found no rank 0 of this job (rank "
                  "%d on %s)",
                  where, m->port, (long long)limit_ms / 1000, ranks.rank, own->host);
    ranks_set_timeout(fd[RANKS_DATA], (int)(limit_ms + 10000));  // rank 0 sends first
    if (ranks_receive(fd[RANKS_DATA], &all_there, sizeof all_there) != 0 ||
        ranks_receive(fd[RANKS_DATA], ranks.places, (size_t)ranks.num * sizeof *ranks.places) != 0)
        ranks_die(EXIT_PEER_LOST, RANKS_NO_RANK_0,
                  "rank 0 at %s port %s lost before all ranks had connected", m->addresses,
                  m->port);
    ranks_set_timeout(fd[RANKS_DATA], 0);
    for (int c = 0; c < RANKS_CHANNELS; c++) ranks.sockets[c][0] = fd[c];
}

// More than a thousand ranks need more sockets than the default limit allows.
static const char *ranks_make_tables(void) {
    struct rlimit files;
    const rlim_t needed = 2 * (rlim_t)ranks.num + 256;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < needed) {
        files.rlim_cur = files.rlim_max < needed ? files.rlim_max : needed;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    ranks.places = calloc((size_t)ranks.num, sizeof *ranks.places);
    for (int c = 0; c < RANKS_CHANNELS; c++) {
        ranks.sockets[c] = malloc((size_t)ranks.num * sizeof(int));
        if (!ranks.sockets[c]) return "no memory for the list of ranks";
        for (int r = 0; r < ranks.num; r++) ranks.sockets[c][r] = -1;
    }
    return ranks.places ? NULL : "no memory for the list of ranks";
}

// Where rank 0 listens: *m, and on rank 0 *listener. NULL, or what is missing.
static const char *ranks_find_meeting(RanksMeeting *m, const RanksPlace *own,
                                      RanksBroadcast broadcast, int *listener) {
    const char *master = getenv("MASTER_ADDR");
    const int host = own->rank == 0;
    memset(m, 0, sizeof *m);
    if (master && *master) {
        ranks_meet_at_master(m, master);
        if (host) *listener = ranks_listen(m);
    } else if (broadcast) {
        if (host) *listener = ranks_open_meeting(m);
        broadcast(m, sizeof *m);
    } else if (ranks_all_here()) {
        ranks_meeting_path(meeting_path, sizeof meeting_path);
        m->token[0] = hash_text(0, meeting_path);  // identifies the job until there is a secret
        if (host) *listener = ranks_open_meeting(m);
        if (host && *listener >= 0 && ranks_write_meeting(m, meeting_path) != 0)
            snprintf(m->problem, sizeof m->problem, "cannot write into the temporary directory: %s",
                     strerror(errno));
    } else {
        return "several ranks on several machines: set MASTER_ADDR (and MASTER_PORT) to rank 0's";
    }
    memcpy(ranks.token, m->token, sizeof ranks.token);
    if (m->problem[0])
        ranks_die(EXIT_PEER_LOST,
                  "set MASTER_ADDR and MASTER_PORT to a free port that all ranks reach",
                  "rank 0: %s", m->problem);
    return NULL;
}

const char *ranks_meet(RanksBroadcast broadcast) {
    static char problem[160];
    RanksMeeting m;
    int listener = -1;
    ranks.num = ranks_launched();
    if (ranks.num == 1) return NULL;
    const RanksPlace own = ranks_place();
    if (own.rank < 0 || own.rank >= ranks.num) {
        ranks.num = 1;
        snprintf(problem, sizeof problem, "started as one of several ranks (%s), but %s is not one",
                 ranks_launcher()->size, ranks_launcher()->rank);
        return problem;
    }
    ranks.rank = own.rank;
    const char *missing = ranks_make_tables();
    if (!missing) missing = ranks_find_meeting(&m, &own, broadcast, &listener);
    if (missing) return missing;
    if (ranks.rank == 0)
        ranks_host(listener, &m, &own);
    else
        ranks_connect(&m, &own);
    if (ranks.rank == 0) ranks_unlink_meeting();
    ranks.joined = 1;
    return NULL;
}

void ranks_part(void) {
    for (int c = 0; c < RANKS_CHANNELS; c++) {
        for (int r = 0; r < ranks.num; r++)
            if (ranks.sockets[c][r] >= 0) close(ranks.sockets[c][r]);
        free(ranks.sockets[c]);
    }
    free(ranks.places);
    ranks = (Ranks){.num = 1};
}
