// The job, for both backends: ranks started by MPI, how they end, a watchdog, and exchanges of host
// memory. Built with -DWITH_MPI if mpi.h is found; without it a job has one rank, and being started
// as one of several is an error.
#include <assert.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/memory.h"
#include "comm.h"
#include "job.h"

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
    int claimed;  // not 0 once one of them reports an error
    Life lives[];
} Machine;

static struct {
    int rank, num, local_rank, num_local;
    int machine;      // number of this rank's machine
    bool joined;      // MPI has started and can end the job
    Machine *shared;  // NULL: not yet, or no longer
    pthread_t main_thread;
    double sign_ms;  // when a sign of life was last sent or looked for
} job = {.num = 1, .num_local = 1};

int comm_rank(void) { return job.rank; }
int comm_num_ranks(void) { return job.num; }
int comm_local_rank(void) { return job.local_rank; }
int comm_local_ranks(void) { return job.num_local; }

// ---- Was this process started as a rank? Judged by launchers' variables; MPI knows the rest -----

// The first that is set; NULL: none
static const char *env_of(const char *const *names) {
    const char *value = NULL;
    for (; *names && !value; names++) value = getenv(*names);
    return value;
}

// An srun step may run mpirun, so its size counts last; a batch script has none.
static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS",
                                    NULL};
static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
                                    "SLURM_PROCID",         "RANK",      NULL};

// How many ranks; 1: a single process, 0: MPI knows
static int started_ranks(void) {
    const char *size = env_of(sizes);
    if (size) return atoi(size);
    return getenv("PMIX_RANK") ? 0 : 1;
}

// Each of torchrun's processes would train alone.
static void refuse_torchrun(void) {
    const char *size = getenv("WORLD_SIZE");
    char hint[128];
    if (!size || strcmp(size, "1") == 0) return;
    snprintf(hint, sizeof hint, "mpirun -n %.9s ./train_llama ...; under Slurm srun --mpi=pmix",
             size);
    exit_with(EXIT_USAGE, hint, "ranks: expected a start by MPI, found torchrun's WORLD_SIZE %.9s",
              size);
}

static void end_job(const Error *err);

// True for a rank, whose errors then end the job
static bool is_rank(int started) {
    const char *rank = env_of(ranks);
    if (rank) job.rank = atoi(rank);
    error_hook = end_job;
    if (started != 1) return true;
    refuse_torchrun();
    error_hook = NULL;
    job.rank = 0;
    return false;
}

// ---- Ending by an error: one rank prints it, and the launcher ends the others with its code -----

enum { TURN_MS = 2000, CAUSE_MS = 2000, END_MS = 20000 };

static void give_up(int sig) {
    (void)sig;
    _exit(EXIT_PEER_LOST);
}

// A launcher that sees this process exit may drop what it has not yet read from a pipe.
static void print_error(const Error *err) {
    int left = 0;
    error_print(err);
    for (int i = 0; i < 50 && ioctl(2, FIONREAD, &left) == 0 && left > 0; i++) sleep_ms(10);
}

// error_hook. The first rank on a machine to get here prints. Machines take turns, and so do ranks
// that have not joined, so rank 0 reports an error that all of them find. If our turn comes, no
// other rank has reported this error.
static void end_job(const Error *err) {
    const int turn = job.joined ? job.machine : job.rank;
    Error own = *err;
    signal(SIGALRM, give_up);
    alarm(2 * END_MS / 1000);
    // a network error such as a lost rank causes: the launcher says which rank it was
    if (job.joined && err->code == EXIT_DEVICE_ERROR) sleep_ms(CAUSE_MS);
    if (job.shared && __atomic_exchange_n(&job.shared->claimed, 1, __ATOMIC_SEQ_CST)) {
        sleep_ms(END_MS);
        _exit(err->code);
    }
    sleep_ms(TURN_MS * (turn < 10 ? turn : 10));
    if (job.rank > 0 && strncmp(own.what, "ranks: ", 7) != 0) {
        char host[64] = "?";
        gethostname(host, sizeof host - 1);
        snprintf(own.what, sizeof own.what, "%.900s (rank %d on %s)", err->what, job.rank, host);
    }
    print_error(&own);
#ifdef WITH_MPI
    if (job.joined) MPI_Abort(MPI_COMM_WORLD, err->code);
#endif
    _exit(err->code);
}

#ifndef WITH_MPI

void comm_init(void) {
    if (!is_rank(started_ranks())) return;
    exit_with(EXIT_USAGE,
              "apt-get install openmpi-bin libopenmpi-dev and make again; or start one process",
              "ranks: started as one of several, but built without MPI");
}
void job_at_exit(int code, void *unused) { (void)code, (void)unused; }
void job_waits(bool waits) { (void)waits; }
void job_progress(void) {}
void job_phase(const char *phase, int64_t step) { (void)phase, (void)step; }
void comm_heartbeat(double seconds) { (void)seconds; }
void comm_finalize(void) {}
void comm_progress(void) {}
int comm_max(int value) { return value; }
void comm_barrier(void) {}
void comm_broadcast(void *data, size_t bytes) { (void)data, (void)bytes; }
void comm_merge(void *data, size_t bytes, size_t at, size_t n) {
    (void)data, (void)bytes, (void)at, (void)n;
}
void comm_all_gather_host(void *out, const void *data, size_t bytes) { memmove(out, data, bytes); }

#else

// ---- The watchdog ends a job that hangs ---------------------------------------------------------
// Each rank watches itself, in a thread: only it knows whether its main thread works or waits for
// others. A rank that has stopped working says where, and ends the job. For one whose process was
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

void job_progress(void) { watch.progress_ms = now_ms(); }

void comm_heartbeat(double seconds) { watch.limit_ms = seconds * 1e3; }

void job_waits(bool waits) {
    watch.waiting += waits ? 1 : -1;
    job_progress();
}

static const char *where(void) {
    static _Thread_local char text[64];
    const char *phase = watch.phase;
    const int64_t step = watch.step;
    snprintf(text, sizeof text, step > 0 ? "%.15s of step %ld" : "%.15s", phase, step);
    return text;
}

static void show_life(void) {
    if (!job.shared) return;
    Life *own = &job.shared->lives[job.local_rank];
    text_copy(own->where, sizeof own->where, where());
    own->rank = job.rank;
    own->alive_ms = now_ms();
}

void job_phase(const char *phase, int64_t step) {
    watch.phase = phase;
    if (step >= 0) watch.step = step;
    show_life();
    comm_progress();
}

// awake_ms: since when this rank has run; it cannot tell what others did before.
static void look_at_others(double awake_ms) {
    Life lost = {.alive_ms = INFINITY};
    char host[64] = "?";
    for (int i = 0; job.shared && i < job.num_local; i++)
        if (job.shared->lives[i].alive_ms < lost.alive_ms) lost = job.shared->lives[i];
    const double ms = now_ms() - (lost.alive_ms > awake_ms ? lost.alive_ms : awake_ms);
    if (watch.limit_ms == 0 || ms <= watch.limit_ms) return;
    gethostname(host, sizeof host - 1);
    exit_with(EXIT_PEER_LOST, JOB_RESUME "; --heartbeat-seconds sets the limit",
              "ranks: rank %d on %s was stopped for %.0f s in %s", lost.rank, host, ms * 1e-3,
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
              job.rank, host, idle_ms * 1e-3, where());
}

static void *watch_this_rank(void *unused) {
    for (double before_ms = now_ms(), awake_ms = before_ms; watch.running;) {
        sleep_ms(LOOK_MS);
        const double now = now_ms();
        show_life();
        const char *failed = buffers_error();
        if (failed) exit_with(EXIT_DEVICE_ERROR, "NCCL_DEBUG=WARN says more", "%s", failed);
        if (now - before_ms > STOPPED_MS) job_progress(), awake_ms = now;
        look(now_ms() - watch.progress_ms);
        look_at_others(awake_ms);
        before_ms = now;
    }
    return unused;
}

static void start_watching(double seconds) {
    sigset_t all, before;
    comm_heartbeat(seconds);
    job_progress();
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
static MPI_Win shared_memory;  // of job.shared

void job_at_exit(int code, void *unused) {
    (void)unused;
    if (job.num == 1) return;
    if (code == 0) return comm_finalize();
    exit_with(code, JOB_RESUME, "ranks: rank %d ended with exit code %d in %s", job.rank, code,
              where());
}

// MPI_Init returns when all ranks have called it, however long that takes.
static void start_mpi(int expected) {
    const char *text = getenv("RANKS_JOIN_SECONDS");
    const int seconds = text && atoi(text) > 0 ? atoi(text) : JOIN_SECONDS;
    int provided;
    start_watching(0.5 * seconds);  // a wait may take twice as long
    job_waits(true);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    job_waits(false);
    MPI_Comm_rank(MPI_COMM_WORLD, &job.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &job.num);
    if (expected == 0 || expected == job.num) return;
    exit_with(EXIT_USAGE,
              "start with the mpirun of the MPI that make found (ldd ./train_llama), or with srun "
              "--mpi=pmix",
              "ranks: started as one of %d, but MPI finds %d", expected, job.num);
}

// Local rank numbers, the machine's number, and memory shared by its ranks
static void find_machine(void) {
    MPI_Comm machine;
    MPI_Aint bytes;
    Machine *shared;
    void *own;
    int unit, first = job.rank, *firsts = host_calloc((size_t)job.num, sizeof(int), "ranks");
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &job.local_rank);
    MPI_Comm_size(machine, &job.num_local);
    MPI_Bcast(&first, 1, MPI_INT, 0, machine);
    comm_all_gather_host(firsts, &first, sizeof first);
    for (int r = 0; r < first; r++) job.machine += firsts[r] == r;
    free(firsts);
    bytes = (MPI_Aint)(sizeof *shared + (size_t)job.num_local * sizeof(Life));
    MPI_Win_allocate_shared(job.local_rank == 0 ? bytes : 0, 1, MPI_INFO_NULL, machine, &own,
                            &shared_memory);
    MPI_Win_shared_query(shared_memory, 0, &bytes, &unit, &shared);
    if (job.local_rank == 0) shared->claimed = 0;
    shared->lives[job.local_rank].alive_ms = now_ms();
    MPI_Comm_free(&machine);
    comm_barrier();
    job.shared = shared;
}

static void mpi_failed(MPI_Comm *comm, int *code, ...) {
    char text[MPI_MAX_ERROR_STRING];
    int n;
    (void)comm;
    MPI_Error_string(*code, text, &n);
    exit_with(EXIT_PEER_LOST, JOB_RESUME, "ranks: rank %d in %s: %s", job.rank, where(), text);
}

void comm_init(void) {
    MPI_Errhandler failed;
    const int started = started_ranks();
    if (!is_rank(started)) return;
    job.main_thread = pthread_self();
    start_mpi(started);
    if (job.num == 1) {
        stop_watching();
        error_hook = NULL;
        MPI_Finalize();
        return;
    }
    MPI_Comm_create_errhandler(mpi_failed, &failed);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, failed);
    job.joined = true;
    find_machine();
    warnings_off = job.rank > 0;
    on_exit(job_at_exit, NULL);
    comm_heartbeat(LIMIT_SECONDS);
    job_phase("set-up", 0);
    if (job.rank > 0 && !freopen("/dev/null", "w", stdout))
        exit_with(EXIT_DISK, "", "/dev/null: cannot be opened");
}

void comm_finalize(void) {
    if (job.num == 1) return;
    comm_phase("leave", 0);
    buffers_disconnect();
    comm_max(1 + job.rank);  // see comm_barrier
    stop_watching();
    job.shared = NULL;
    start_watching(watch.limit_ms * 1e-3);
    job_waits(true);
    MPI_Win_free(&shared_memory);
    job.joined = false;  // from here on MPI cannot end the others
    MPI_Finalize();
    job_waits(false);
    stop_watching();
    error_hook = NULL;
    job.num = job.num_local = 1;
    job.rank = job.local_rank = 0;
}

// ---- Signs of life ------------------------------------------------------------------------------
// Others wait while rank 0 works alone, e.g. during a save. From time to time rank 0 sends them a
// sign in comm_progress, which they receive while they wait.

enum { SIGN_MS = 250, SIGN_TAG = 1 };

// True: rank 0 has sent a sign
static bool exchange_signs(void) {
    int found = 0;
    bool heard = false;
    MPI_Request sent;
    if (!job.joined || !pthread_equal(pthread_self(), job.main_thread) ||
        now_ms() - job.sign_ms < SIGN_MS)
        return false;
    job.sign_ms = now_ms();
    for (int r = 1; job.rank == 0 && r < job.num; r++) {
        MPI_Isend(NULL, 0, MPI_BYTE, r, SIGN_TAG, MPI_COMM_WORLD, &sent);
        MPI_Request_free(&sent);  // not waited for: a rank may be stopped
    }
    while (job.rank > 0 &&
           (MPI_Iprobe(0, SIGN_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE), found)) {
        MPI_Recv(NULL, 0, MPI_BYTE, 0, SIGN_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        heard = true;
    }
    return heard;
}

void comm_progress(void) {
    job_progress();
    exchange_signs();
}

// A rank may wait for hours while rank 0 tokenizes texts.
void job_wait(MPI_Request *request, bool sleeps) {
    const double start_ms = now_ms();
    const struct timespec a_moment = {0, 50000};
    job_waits(true);
    for (int done = 0; MPI_Test(request, &done, MPI_STATUS_IGNORE), !done;) {
        if (job.rank > 0 && exchange_signs()) job_progress();
        if (sleeps && now_ms() - start_ms > 1) nanosleep(&a_moment, NULL);
    }
    job_waits(false);
}

// ---- Exchanges of host memory -------------------------------------------------------------------

static int count_of(size_t bytes) {
    assert(bytes <= INT_MAX);
    return (int)bytes;
}

int comm_max(int value) {
    MPI_Request request;
    if (job.num == 1) return value;
    MPI_Iallreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD, &request);
    job_wait(&request, true);
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
    if (job.num == 1) return;
    MPI_Ibcast(data, count_of(bytes), MPI_BYTE, 0, MPI_COMM_WORLD, &request);
    job_wait(&request, true);
}

void comm_all_gather_host(void *out, const void *data, size_t bytes) {
    MPI_Request request;
    const int n = count_of(bytes);
    if (job.num == 1) {
        memmove(out, data, bytes);
        return;
    }
    MPI_Iallgather(data, n, MPI_BYTE, out, n, MPI_BYTE, MPI_COMM_WORLD, &request);
    job_wait(&request, true);
}

void comm_merge(void *data, size_t bytes, size_t at, size_t n) {
    const size_t ranks_2 = 2 * (size_t)job.num;
    const int own[2] = {n ? count_of(at) : 0, count_of(n)};
    MPI_Request request;
    assert(n == 0 || (n <= bytes && at <= bytes - n));
    if (job.num == 1) return;
    int *all = host_calloc(2 * ranks_2, sizeof(int), "ranks"), *counts = all + ranks_2,
        *starts = counts + job.num;
    comm_all_gather_host(all, own, sizeof own);
    for (int r = 0; r < job.num; r++) {
        starts[r] = all[2 * r], counts[r] = all[2 * r + 1];
        if (starts[r] < 0 || counts[r] < 0 || (uint64_t)starts[r] + (uint64_t)counts[r] > bytes)
            exit_with(EXIT_CHECKPOINT_MISFIT, "start every rank with the same program and files",
                      "ranks: expected a part of %zu bytes of rank %d, found %d from %d on", bytes,
                      r, counts[r], starts[r]);
    }
    MPI_Igatherv(job.rank == 0 ? MPI_IN_PLACE : (char *)data + at, own[1], MPI_BYTE, data, counts,
                 starts, MPI_BYTE, 0, MPI_COMM_WORLD, &request);
    job_wait(&request, true);
    free(all);
}

#endif
