#include "ranks.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/hash.h"
#include "comm.h"

enum { MAX_RANKS = 1 << 16 };

Ranks ranks = {.num = 1, .num_local = 1};

int comm_rank(void) { return ranks.rank; }
int comm_num_ranks(void) { return ranks.num; }
int comm_local_rank(void) { return ranks.local_rank; }
int comm_local_ranks(void) { return ranks.num_local; }

// ------------------------------------------------------------------------------------------------
// Who am I: the environment variables of launchers

typedef struct {
    const char *size, *rank, *local_rank, *local_size, *job;
} Launcher;

// The first whose size and rank are both set counts. A batch script has most of srun's variables
// as well, but not the size of a step.
static const Launcher launchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},  // mpirun of Open MPI
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
     "SLURM_JOB_ID"},  // mpirun of MPICH and Intel MPI, srun --mpi=pmi2
    {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},  // torchrun
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", NULL, "SLURM_JOB_ID"},  // srun
};
enum { NUM_LAUNCHERS = sizeof launchers / sizeof *launchers };

// A wrong guess could mean training as a single process.
int ranks_env_number(const char *name, int least, int most, int otherwise) {
    const char *text = name ? getenv(name) : NULL;
    if (!text) return otherwise;
    const size_t digits = strspn(text, "0123456789");
    if (digits > 0 && digits < 10 && !text[digits] && atoi(text) >= least && atoi(text) <= most)
        return atoi(text);
    ranks_die(EXIT_USAGE, "set it as the launcher would, or unset it",
              "%s: expected a whole number from %d to %d, found \"%.30s\"", name, least, most,
              text);
}

// NULL for a single process. A launcher that sets the number of ranks but not this one's number
// counts too: such a process must not train alone.
static const Launcher *find_launcher(void) {
    const Launcher *found = NULL;
    for (int i = NUM_LAUNCHERS - 1; i >= 0; i--) {
        const bool better = !found || getenv(launchers[i].rank) || !getenv(found->rank);
        if (getenv(launchers[i].size) && better) found = &launchers[i];
    }
    return found;
}

int ranks_launched(void) {
    const Launcher *by = find_launcher();
    ranks = (Ranks){.num = 1, .num_local = 1};
    if (!by) return 1;
    ranks.num = ranks_env_number(by->size, 1, MAX_RANKS, 1);
    ranks.rank = ranks_env_number(by->rank, 0, ranks.num - 1, -1);
    ranks.local_rank = ranks_env_number(by->local_rank, 0, MAX_RANKS - 1, -1);
    ranks.num_local = ranks_env_number(by->local_size, 1, MAX_RANKS, 0);
    if (ranks.num_local == 0 && ranks_env_number("SLURM_STEP_NUM_NODES", 1, MAX_RANKS, 0) == 1)
        ranks.num_local = ranks.num;
    ranks.here = ranks.num_local == ranks.num;
    if (ranks.num_local == 0) ranks.num_local = 1;
    // by the parent process where neither the launcher nor MASTER_ADDR tells jobs apart
    const char *job = getenv(by->job), *step = getenv("SLURM_STEP_ID");
    char text[256];
    snprintf(text, sizeof text, "%s %s %d", job ? job : "", step ? step : "",
             job || getenv("MASTER_ADDR") ? 0 : (int)getppid());
    ranks.job = fnv1a(FNV1A_START, text, strlen(text));
    if (gethostname(ranks.host, sizeof ranks.host - 1) != 0) strcpy(ranks.host, "?");
    return ranks.num;
}

const char *ranks_join(RanksBroadcast broadcast) {
    if (ranks.num == 1) return NULL;
    if (ranks.rank < 0)
        return "started as one of several ranks, but the number of this one is not set";
    const char *missing = ranks_meet(broadcast);
    if (!missing) watchdog_start();
    return missing;
}

int ranks_turn_seconds(void) { return ranks.rank < 10 ? ranks.rank : 10; }

// Before the ranks have joined they report an error that all of them find one after another: the
// first exits, and the launcher ends the others.
void ranks_die(int code, const char *hint, const char *what, ...) {
    Error err = {0};
    va_list args;
    va_start(args, what);
    error_fill(&err, code, hint, what, args);
    va_end(args);
    error_prefix(&err, "ranks");
    if (ranks.joined) error_exit(&err);
    sleep_ms(1000 * ranks_turn_seconds());
    error_print(&err);
    _exit(code);
}

// ------------------------------------------------------------------------------------------------
// Exchanges of host memory: a star around rank 0

enum { POLL_MS = 100 };  // a wait for bytes counts as progress this often

// In front of the bytes at .. at + bytes - 1 of what is exchanged
typedef struct {
    uint64_t number, at, bytes;
} Header;

static uint64_t num_exchanges;  // the same on all ranks

// All bytes to (events POLLOUT) or from (POLLIN) rank r
static void move(int r, short events, void *data, size_t bytes) {
    char *p = data;
    struct pollfd ready = {ranks.peers[r].sockets[RANKS_DATA], events, 0};
    while (bytes > 0) {
        comm_progress();
        if (poll(&ready, 1, POLL_MS) <= 0) continue;
        ssize_t n = events == POLLOUT ? send(ready.fd, p, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                      : recv(ready.fd, p, bytes, MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0)
            ranks_die(EXIT_PEER_LOST, RANKS_RESUME, "rank %d on %s lost", r, ranks.peers[r].host);
        p += n;
        bytes -= (size_t)n;
    }
}

static void put(int r, const void *data, uint64_t at, uint64_t bytes) {
    Header h = {num_exchanges, bytes ? at : 0, bytes};
    move(r, POLLOUT, &h, sizeof h);
    move(r, POLLOUT, (char *)data + h.at, bytes);
}

// Rank r's part of data (bytes), or all of it
static void get(int r, void *data, uint64_t bytes, bool all) {
    Header h;
    move(r, POLLIN, &h, sizeof h);
    if (h.number != num_exchanges || h.at + h.bytes > bytes || (all && h.bytes != bytes))
        ranks_die(EXIT_PEER_LOST, "please report this with the command that led to it",
                  "expected exchange %llu of %llu bytes, found number %llu of %llu from rank %d",
                  (unsigned long long)num_exchanges, (unsigned long long)bytes,
                  (unsigned long long)h.number, (unsigned long long)h.bytes, r);
    move(r, POLLIN, (char *)data + h.at, h.bytes);
}

static bool begin_exchange(void) {
    if (!ranks.joined) return false;
    num_exchanges++;
    ranks_enter_collective(true);
    return true;
}

void comm_broadcast(void *data, size_t bytes) {
    if (!begin_exchange()) return;
    if (ranks.rank > 0) get(0, data, bytes, true);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) put(r, data, 0, bytes);
    ranks_leave_collective(true);
}

void comm_merge(void *data, size_t bytes, size_t at, size_t n) {
    if (!begin_exchange()) return;
    if (ranks.rank > 0) put(0, data, at, n);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) get(r, data, bytes, false);
    ranks_leave_collective(true);
}

void comm_all_gather_host(void *out, const void *data, size_t bytes) {
    const size_t at = (size_t)ranks.rank * bytes, all = (size_t)ranks.num * bytes;
    memmove((char *)out + at, data, bytes);
    comm_merge(out, all, at, bytes);
    comm_broadcast(out, all);
}

int comm_max(int value) {
    if (!begin_exchange()) return value;
    if (ranks.rank > 0) put(0, &value, 0, sizeof value);
    for (int r = 1; ranks.rank == 0 && r < ranks.num; r++) {
        int other;
        get(r, &other, sizeof other, true);
        if (other > value) value = other;
    }
    ranks_leave_collective(true);
    comm_broadcast(&value, sizeof value);
    return value;
}

void comm_barrier(void) { (void)comm_max(0); }

void ranks_leave(void) {
    if (!ranks.joined) return;
    comm_barrier();  // all have done what they had to
    watchdog_leave();
    comm_barrier();
    watchdog_stop();
    for (int r = 0; r < (ranks.rank == 0 ? ranks.num : 1); r++)
        for (int c = 0; c < RANKS_CHANNELS; c++)
            if (ranks.peers[r].sockets[c] >= 0) close(ranks.peers[r].sockets[c]);
    free(ranks.peers);
    ranks = (Ranks){.num = 1, .num_local = 1};
}
