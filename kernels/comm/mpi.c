// The ranks of a job, started by MPI, for both backends: a watchdog, and exchanges of host memory.
// Built with -DWITH_MPI if mpi.h is found; without it there is one rank, and a start as one of
// several is an error.
#include <assert.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "comm.h"
#include "world.h"

#ifndef WITH_MPI

void comm_init(void) {
    if (world_start() == 1) return;
    exit_with(EXIT_USAGE,
              "apt-get install openmpi-bin libopenmpi-dev and make again; or start one process",
              "ranks: started as one of several, but built without MPI");
}
void rank_at_exit(int code, void *unused) { (void)code, (void)unused; }
void rank_waits(bool waits) { (void)waits; }
void rank_progress(void) {}
void rank_set_network(const Network *network) { (void)network; }
void comm_phase(const char *phase, int64_t step) { (void)phase, (void)step; }
void comm_heartbeat(double seconds) { (void)seconds; }
void comm_finalize(void) {}
void comm_progress(void) {}
int comm_max(int value) { return value; }
void comm_barrier(void) {}
void comm_broadcast(void *data, size_t bytes) { (void)data, (void)bytes; }
void comm_merge(float *values, const size_t *first, size_t from, size_t to) {
    (void)values, (void)first, (void)from, (void)to;
}
void comm_all_gather_host(void *out, const void *data, size_t bytes) { memmove(out, data, bytes); }

#else

#define JOB_RESUME \
    "the newest checkpoint is complete: restart with --resume (scripts/train_until_done.sh does)"

// A rank's sign of life, which the other ranks of its machine can read while the rank is stopped.
typedef struct {
    int rank;
    _Atomic double alive_ms;  // when its watchdog ran last
    char where[64];
} Life;

// Shared by the ranks of a machine
typedef struct {
    int claimed;  // see World
    Life lives[];
} Machine;

static Machine *machine;  // NULL: not yet, or no longer
static const Network *_Atomic network;
static pthread_t main_thread;
static double sign_ms;  // when a sign of life was last sent or looked for

// ---- The watchdog ends a job that hangs ---------------------------------------------------------
// Each rank watches itself, in a thread: only it knows whether its main thread works or waits for
// others. A rank that has stopped working says where, and ends the world. For one whose process was
// stopped, the others of its machine say so. Waiting ranks give them time to do so: they give up
// after twice as long, and say where they waited. Then another machine is gone, and we cannot name
// the rank.

enum {
    LOOK_MS = 100,
    STOPPED_MS = 1000,   // if the thread did not run for this long, the process was stopped
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

void rank_set_network(const Network *of_backend) { network = of_backend; }

void rank_progress(void) { watch.progress_ms = now_ms(); }

void comm_heartbeat(double seconds) { watch.limit_ms = seconds * 1e3; }

void rank_waits(bool waits) {
    watch.waiting += waits ? 1 : -1;
    rank_progress();
}

static const char *where(void) {
    static _Thread_local char text[64];
    const char *phase = watch.phase;
    const int64_t step = watch.step;
    snprintf(text, sizeof text, step > 0 ? "%.15s of step %ld" : "%.15s", phase, step);
    return text;
}

static void show_life(void) {
    if (!machine) return;
    Life *own = &machine->lives[world.local_rank];
    text_copy(own->where, sizeof own->where, where());
    own->rank = world.rank;
    own->alive_ms = now_ms();
}

void comm_phase(const char *phase, int64_t step) {
    const Network *own = network;
    watch.phase = phase;
    if (step >= 0) watch.step = step;
    show_life();
    comm_progress();
    if (own) own->phase();
}

// awake_ms: since when this rank has run; it cannot tell what others did before.
static void look_at_others(double awake_ms) {
    Life lost = {.alive_ms = INFINITY};
    for (int i = 0; machine && i < world.num_local; i++)
        if (machine->lives[i].alive_ms < lost.alive_ms) lost = machine->lives[i];
    const double ms = now_ms() - (lost.alive_ms > awake_ms ? lost.alive_ms : awake_ms);
    if (watch.limit_ms == 0 || ms <= watch.limit_ms) return;
    exit_with(EXIT_PEER_LOST, JOB_RESUME "; --heartbeat-seconds sets the limit",
              "ranks: rank %d on %s was stopped for %.0f s in %s", lost.rank, world.host, ms * 1e-3,
              lost.where);
}

// During set-up, libraries are loaded and drivers compile without a sign of progress, and ranks may
// read at different speeds; during an evaluation ranks meet only at its end.
static double limit_ms(bool waits) {
    const bool apart = strcmp(watch.phase, "set-up") == 0 || strcmp(watch.phase, "evaluate") == 0;
    return watch.limit_ms * (apart ? SET_UP_FACTOR : 1) * (waits ? 2 : 1);
}

static void look(double idle_ms) {
    const bool waits = watch.waiting > 0;
    if (watch.limit_ms == 0 || idle_ms <= limit_ms(waits)) return;
    exit_with(EXIT_PEER_LOST,
              strcmp(watch.phase, "start") == 0
                  ? "start all ranks, where they can reach each other; RANKS_JOIN_SECONDS sets how "
                    "long they wait"
                  : JOB_RESUME "; --heartbeat-seconds sets the limit",
              waits
                  ? "ranks: rank %d on %s has waited for others for %.0f s in %s: one of them was "
                    "stopped or is gone"
                  : "ranks: rank %d on %s stuck for %.0f s in %s",
              world.rank, world.host, idle_ms * 1e-3, where());
}

static void *watch_this_rank(void *unused) {
    for (double before_ms = now_ms(), awake_ms = before_ms; watch.running;) {
        sleep_ms(LOOK_MS);
        const double now = now_ms();
        show_life();
        const Network *own = network;
        const char *failed = own ? own->error() : NULL;
        if (failed) exit_with(EXIT_DEVICE_ERROR, "NCCL_DEBUG=WARN says more", "%s", failed);
        if (now - before_ms > STOPPED_MS) rank_progress(), awake_ms = now;
        look(now_ms() - watch.progress_ms);
        look_at_others(awake_ms);
        before_ms = now;
    }
    return unused;
}

static void start_watching(double seconds) {
    sigset_t all, before;
    comm_heartbeat(seconds);
    rank_progress();
    watch.running = true;
    sigfillset(&all);  // the main thread handles signals
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&watch.thread, NULL, watch_this_rank, NULL) != 0)
        exit_with(EXIT_HOST_MEMORY, "close other programs",
                  "cannot start the thread that watches this rank");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void stop_watching(void) {
    watch.running = false;
    pthread_join(watch.thread, NULL);
}

// ---- Start and end ------------------------------------------------------------------------------

enum { JOIN_SECONDS = 300, LIMIT_SECONDS = 60 };
static MPI_Win shared_memory;  // of machine

void rank_at_exit(int code, void *unused) {
    (void)unused;
    if (world.num == 1) return;
    if (code == 0) return comm_finalize();
    exit_with(code, JOB_RESUME, "ranks: rank %d ended with exit code %d in %s", world.rank, code,
              where());
}

// MPI_Init returns when all ranks have called it, however long that takes.
static void start_mpi(int expected) {
    const char *text = getenv("RANKS_JOIN_SECONDS");
    const int seconds = text && atoi(text) > 0 ? atoi(text) : JOIN_SECONDS;
    int provided;
    start_watching(0.5 * seconds);  // a wait may take twice as long
    rank_waits(true);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    rank_waits(false);
    MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world.num);
    if (expected == 0 || expected == world.num) return;
    exit_with(EXIT_USAGE,
              "start with the mpirun of the MPI that make found (ldd ./train_llama), or with srun "
              "--mpi=pmix",
              "ranks: started as one of %d, but MPI finds %d", expected, world.num);
}

// Local rank numbers, the machine's number, and memory shared by its ranks
static void find_machine(void) {
    MPI_Comm comm;
    MPI_Aint bytes;
    Machine *shared;
    void *own;
    int unit, is_first;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &comm);
    MPI_Comm_rank(comm, &world.local_rank);
    MPI_Comm_size(comm, &world.num_local);
    is_first = world.local_rank == 0;
    MPI_Exscan(&is_first, &world.machine, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);  // rank 0's stays 0
    MPI_Bcast(&world.machine, 1, MPI_INT, 0, comm);
    bytes = (MPI_Aint)(sizeof *shared + (size_t)world.num_local * sizeof(Life));
    MPI_Win_allocate_shared(world.local_rank == 0 ? bytes : 0, 1, MPI_INFO_NULL, comm, &own,
                            &shared_memory);
    MPI_Win_shared_query(shared_memory, 0, &bytes, &unit, &shared);
    if (world.local_rank == 0) shared->claimed = 0;
    shared->lives[world.local_rank].alive_ms = now_ms();
    MPI_Comm_free(&comm);
    comm_barrier();
    machine = shared;
    world.claimed = &shared->claimed;
}

static void mpi_failed(MPI_Comm *comm, int *code, ...) {
    char text[MPI_MAX_ERROR_STRING];
    int n;
    (void)comm;
    MPI_Error_string(*code, text, &n);
    exit_with(EXIT_PEER_LOST, JOB_RESUME, "ranks: rank %d in %s: %s", world.rank, where(), text);
}

static void abort_all(int code) { MPI_Abort(MPI_COMM_WORLD, code); }

void comm_init(void) {
    MPI_Errhandler failed;
    const int started = world_start();
    if (started == 1) return;
    main_thread = pthread_self();
    start_mpi(started);
    if (world.num == 1) {
        stop_watching();
        error_hook = NULL;
        MPI_Finalize();
        return;
    }
    MPI_Comm_create_errhandler(mpi_failed, &failed);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, failed);
    world.abort = abort_all;
    find_machine();
    warnings_off = world.rank > 0;
    on_exit(rank_at_exit, NULL);
    comm_heartbeat(LIMIT_SECONDS);
    comm_phase("set-up", 0);
    if (world.rank > 0 && !freopen("/dev/null", "w", stdout))
        exit_with(EXIT_DISK, "", "/dev/null: cannot be opened");
}

void comm_finalize(void) {
    if (world.num == 1) return;
    comm_phase("leave", 0);
    if (network) network->disconnect();
    network = NULL;
    comm_max(1 + world.rank);  // see comm_barrier
    stop_watching();
    machine = NULL;
    world.claimed = NULL;
    start_watching(watch.limit_ms * 1e-3);
    rank_waits(true);
    MPI_Win_free(&shared_memory);
    world.abort = NULL;  // from here on MPI cannot end the others
    MPI_Finalize();
    rank_waits(false);
    stop_watching();
    error_hook = NULL;
    world.num = world.num_local = 1;
    world.rank = world.local_rank = 0;
}

// ---- Signs of life ------------------------------------------------------------------------------
// Others wait while rank 0 works alone, e.g. during a save. From time to time rank 0 sends them a
// sign in comm_progress, which they receive while they wait.

enum { SIGN_MS = 250 };

// True: rank 0 has sent a sign
static bool exchange_signs(void) {
    int found = 0;
    bool heard = false;
    MPI_Request sent;
    if (!world.abort || !pthread_equal(pthread_self(), main_thread) || now_ms() - sign_ms < SIGN_MS)
        return false;
    sign_ms = now_ms();
    for (int r = 1; world.rank == 0 && r < world.num; r++) {
        MPI_Isend(NULL, 0, MPI_BYTE, r, SIGN_TAG, MPI_COMM_WORLD, &sent);
        MPI_Request_free(&sent);  // not waited for: a rank may be stopped
    }
    while (world.rank > 0 &&
           (MPI_Iprobe(0, SIGN_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE), found)) {
        MPI_Recv(NULL, 0, MPI_BYTE, 0, SIGN_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        heard = true;
    }
    return heard;
}

void comm_progress(void) {
    rank_progress();
    exchange_signs();
}

// A rank may wait for hours while rank 0 tokenizes texts.
void rank_wait(MPI_Request *request, bool sleeps) {
    const double start_ms = now_ms();
    const struct timespec a_moment = {0, 50000};
    rank_waits(true);
    for (int done = 0; MPI_Test(request, &done, MPI_STATUS_IGNORE), !done;) {
        if (world.rank > 0 && exchange_signs()) rank_progress();
        if (sleeps && now_ms() - start_ms > 1) nanosleep(&a_moment, NULL);
    }
    rank_waits(false);
}

// ---- Exchanges of host memory -------------------------------------------------------------------

static int count_of(size_t bytes) {
    assert(bytes <= INT_MAX);
    return (int)bytes;
}

int comm_max(int value) {
    MPI_Request request;
    if (world.num == 1) return value;
    MPI_Iallreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD, &request);
    rank_wait(&request, true);
    return value;
}

void comm_barrier(void) {
    const int ended = comm_max(0);
    if (ended)
        exit_with(EXIT_CHECKPOINT_MISFIT, "start every rank with the same command line",
                  "ranks: rank %d has ended, expected it to run as the others do", ended - 1);
}

void comm_broadcast(void *data, size_t bytes) {
    MPI_Request request;
    if (world.num == 1) return;
    MPI_Ibcast(data, count_of(bytes), MPI_BYTE, 0, MPI_COMM_WORLD, &request);
    rank_wait(&request, true);
}

void comm_all_gather_host(void *out, const void *data, size_t bytes) {
    MPI_Request request;
    const int n = count_of(bytes);
    if (world.num == 1) {
        memmove(out, data, bytes);
        return;
    }
    MPI_Iallgather(data, n, MPI_BYTE, out, n, MPI_BYTE, MPI_COMM_WORLD, &request);
    rank_wait(&request, true);
}

void comm_merge(float *values, const size_t *first, size_t from, size_t to) {
    MPI_Request request;
    for (int r = 1; r < world.num; r++) {
        const ShardPart part = part_of_shard(first, r, from, to);
        const int n = count_of(part.count * sizeof *values);
        if (n == 0 || (world.rank != 0 && world.rank != r)) continue;
        if (world.rank == 0)
            MPI_Irecv(values + (part.at - from), n, MPI_BYTE, r, DATA_TAG, MPI_COMM_WORLD,
                      &request);
        else
            MPI_Isend(values + (part.at - from), n, MPI_BYTE, 0, DATA_TAG, MPI_COMM_WORLD,
                      &request);
        rank_wait(&request, true);
    }
}

#endif
