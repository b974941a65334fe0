#include "world.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "comm.h"

World world = {.num = 1, .num_local = 1, .host = "?"};

int comm_rank(void) { return world.rank; }
int comm_num_ranks(void) { return world.num; }
int comm_local_rank(void) { return world.local_rank; }
int comm_local_ranks(void) { return world.num_local; }

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

const char *comm_unbind_hint(void) {
    if (getenv("OMPI_COMM_WORLD_SIZE")) return "mpirun --bind-to none, or --map-by slot:PE=CORES";
    return getenv("SLURM_STEP_NUM_TASKS") ? "srun --cpus-per-task=CORES" : NULL;
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
    const int turn = world.abort ? world.machine : world.rank;
    Error own = *err;
    signal(SIGALRM, give_up);
    alarm(2 * END_MS / 1000);
    // a network error such as a lost rank causes: the launcher says which rank it was
    if (world.abort && err->code == EXIT_DEVICE_ERROR) sleep_ms(CAUSE_MS);
    if (world.claimed && __atomic_exchange_n(world.claimed, 1, __ATOMIC_SEQ_CST)) {
        sleep_ms(END_MS);
        _exit(err->code);
    }
    sleep_ms(TURN_MS * (turn < 10 ? turn : 10));
    if (world.rank > 0 && strncmp(own.what, "ranks: ", 7) != 0) {
        snprintf(own.what, sizeof own.what, "%.900s (rank %d on %s)", err->what, world.rank,
                 world.host);
    }
    print_error(&own);
    if (world.abort) world.abort(err->code);
    _exit(err->code);
}

int world_start(void) {
    const char *rank = env_of(ranks), *size = env_of(sizes);
    const int started = size ? atoi(size) : getenv("PMIX_RANK") ? 0 : 1;
    gethostname(world.host, sizeof world.host - 1);
    if (rank) world.rank = atoi(rank);
    error_hook = end_job;
    if (started != 1) return started;
    refuse_torchrun();
    error_hook = NULL;
    world.rank = 0;
    return started;
}
