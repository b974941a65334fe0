// The control plane: processes that find each other over TCP, exchange small things, and find out
// who is missing.
// their statics too
#include "../kernels/comm/ranks.c"
#include "../kernels/comm/rendezvous.c"
#include "../kernels/comm/watchdog.c"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "test.h"

enum { MOST = 8, MANY = 70 };
enum { HANG_SECONDS = 300 };  // no test hangs; a busy machine may take long

// How ranks learn the address of rank 0
typedef enum { MASTER, LAUNCHED_HERE, HANDED_OVER } Way;

typedef struct {
    int codes[MANY];  // exit codes; 128 + signal when one ended a process
    char said[8192];  // standard error of all of them
    double seconds;
} Outcome;

static void set_env(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static void clear_env(void) {
    for (int i = 0; i < NUM_LAUNCHERS; i++) {
        const Launcher *l = &launchers[i];
        const char *names[] = {l->size, l->rank, l->local_rank, l->local_size, l->job};
        for (size_t k = 0; k < sizeof names / sizeof *names; k++)
            if (names[k]) unsetenv(names[k]);
    }
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    setenv("RANKS_JOIN_SECONDS", "30", 1);
}

// A port that no other program gets while this one runs: a socket stays bound to it without
// listening, so that SO_REUSEADDR lets rank 0 bind and listen.
static int free_port(void) {
    struct sockaddr_in at;
    socklen_t length = sizeof at;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&at, &length) == 0);
    return ntohs(at.sin_port);
}

static void be_rank(Way way, int rank, int num, int port) {
    clear_env();
    if (way == MASTER) {
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        set_env("MASTER_PORT", port);
        set_env("WORLD_SIZE", num);
        set_env("RANK", rank);
    } else {
        set_env("OMPI_COMM_WORLD_SIZE", num);
        set_env("OMPI_COMM_WORLD_RANK", rank);
        set_env("PMIX_NAMESPACE", port);
        if (way == HANDED_OVER) return;  // as on several machines: all networks, places counted
        set_env("OMPI_COMM_WORLD_LOCAL_RANK", rank);
        set_env("OMPI_COMM_WORLD_LOCAL_SIZE", num);
    }
}

static pid_t start_rank(int (*job)(void), Way way, int rank, int num, int port, int errors) {
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0) return pid;
    alarm(HANG_SECONDS);
    be_rank(way, rank, num, port);
    if (dup2(errors, 2) < 0) _exit(99);
    _exit(job());
}

enum { STOPPED = -1 };

// Exit code, or 128 + signal; whoever is not done in time is ended: 128 + SIGKILL.
static int finish_rank(pid_t pid, double until_ms, int flags) {
    int status = 0;
    while (waitpid(pid, &status, WNOHANG | flags) == 0) {
        if (now_ms() > until_ms) kill(pid, SIGKILL);
        sleep_ms(10);
    }
    if (WIFSTOPPED(status)) return STOPPED;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// One that was stopped is continued when the others are gone.
static void finish_ranks(Outcome *o, const pid_t *pids, int n, int errors) {
    const double until_ms = now_ms() + HANG_SECONDS * 1000;
    for (int r = 0; r < n; r++)
        o->codes[r] = pids[r] ? finish_rank(pids[r], until_ms, WUNTRACED) : 0;
    for (int r = 0; r < n; r++) {
        if (o->codes[r] != STOPPED) continue;
        kill(pids[r], SIGCONT);
        o->codes[r] = finish_rank(pids[r], until_ms, 0);
    }
    ssize_t size = pread(errors, o->said, sizeof o->said - 1, 0);
    o->said[size > 0 ? size : 0] = 0;
}

static int errors_file(void) {
    FILE *f = tmpfile();
    CHECK(f != NULL);
    int fd = fcntl(fileno(f), F_DUPFD_CLOEXEC, 10);
    fclose(f);
    fcntl(fd, F_SETFL, O_APPEND);
    return fd;
}

// A running job. Jobs run concurrently, since they mostly wait.
typedef struct {
    pid_t pids[MANY];
    int n, errors;
    double start_ms;
} Running;

// Ranks 0 to n - 1 except those in the bit mask `absent`.
static Running begin_ranks(int (*job)(void), Way way, int n, uint64_t absent) {
    Running run = {{0}, n, errors_file(), now_ms()};
    int port = free_port();
    for (int r = n - 1; r >= 0; r--)
        if (r >= 64 || !(absent >> r & 1))
            run.pids[r] = start_rank(job, way, r, n, port, run.errors);
    return run;
}

static Outcome end_ranks(const Running *run) {
    Outcome o;
    memset(&o, 0, sizeof o);
    finish_ranks(&o, run->pids, run->n, run->errors);
    close(run->errors);
    o.seconds = (now_ms() - run->start_ms) * 1e-3;
    return o;
}

static Outcome run_ranks(int (*job)(void), Way way, int n, uint64_t absent) {
    Running run = begin_ranks(job, way, n, absent);
    return end_ranks(&run);
}

static int lines_with(const char *text, const char *what) {
    int n = 0;
    for (const char *p = strstr(text, what); p; p = strstr(p + 1, what)) n++;
    return n;
}

static void check_errors(const Outcome *o, const char *error, int n) {
    CHECK_MSG(lines_with(o->said, error) == n, "expected %d of %s\n%s", n, error, o->said);
    CHECK_MSG(lines_with(o->said, "error: ") == n && lines_with(o->said, "hint: ") == n, "%s",
              o->said);
}

static void check_one_error(const Outcome *o, const char *error) { check_errors(o, error, 1); }

#define CHECK_CODES(o_, n_, code_)    \
    for (int r_ = 0; r_ < (n_); r_++) \
    CHECK_MSG((o_).codes[r_] == (code_), "rank %d: %d\n%s", r_, (o_).codes[r_], (o_).said)

static const char *join(RanksBroadcast broadcast) {
    ranks_launched();
    return ranks_join(broadcast);
}

// ------------------------------------------------------------------------------------------------
// Identity from the environment

TEST(a_single_process_is_rank_0_of_1_and_opens_nothing) {
    clear_env();
    int before = dup(0);
    CHECK(join(NULL) == NULL);
    int value = 7, out = 0, after = dup(0);
    CHECK(after == before + 1);  // no descriptor was opened in between
    close(before);
    close(after);
    CHECK(comm_rank() == 0 && comm_num_ranks() == 1 && comm_local_rank() == 0);
    comm_broadcast(&value, sizeof value);
    comm_merge(&value, sizeof value, 0, sizeof value);
    comm_all_gather_host(&out, &value, sizeof value);
    CHECK(out == 7 && comm_max(-3) == -3);
    comm_barrier();
    ranks_leave();
}

TEST(launchers_are_distinguished) {
    clear_env();
    CHECK(ranks_launched() == 1);
    setenv("SLURM_NTASKS", "4", 1);  // set in a batch script, which is a single process
    setenv("SLURM_PROCID", "0", 1);
    CHECK(ranks_launched() == 1);
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    setenv("SLURM_PROCID", "3", 1);
    setenv("SLURM_LOCALID", "1", 1);
    CHECK(ranks_launched() == 4 && ranks.rank == 3 && ranks.local_rank == 1 && !ranks.here);
    setenv("SLURM_STEP_NUM_NODES", "1", 1);
    CHECK(ranks_launched() == 4 && ranks.here);
    unsetenv("SLURM_STEP_NUM_NODES");
    setenv("WORLD_SIZE", "8", 1);  // exported for all, without RANK: srun's variables count
    CHECK(ranks_launched() == 4);
    setenv("RANK", "5", 1);  // torchrun inside srun
    CHECK(ranks_launched() == 8 && ranks.rank == 5);
    setenv("PMI_SIZE", "2", 1);
    setenv("PMI_RANK", "1", 1);
    CHECK(ranks_launched() == 2 && ranks.rank == 1);
    setenv("OMPI_COMM_WORLD_SIZE", "3", 1);
    setenv("OMPI_COMM_WORLD_RANK", "2", 1);
    CHECK(ranks_launched() == 3 && ranks.rank == 2);
    clear_env();
    setenv("WORLD_SIZE", "8", 1);  // must not train alone
    CHECK(ranks_launched() == 8);
    CHECK(strstr(join(NULL), "started as one of several ranks") != NULL);
    setenv("RANK", "0", 1);
    setenv("LOCAL_RANK", "0", 1);
    setenv("LOCAL_WORLD_SIZE", "4", 1);
    CHECK(ranks_launched() == 8 && comm_local_rank() == 0 && !ranks.here);
    setenv("LOCAL_WORLD_SIZE", "8", 1);
    CHECK(ranks_launched() == 8 && ranks.here);
    clear_env();
    CHECK(ranks_launched() == 1);
}

// Invalid numbers in the environment: an error that names the variable, and no training.
typedef struct {
    const char *name, *value, *expected;
} EnvCase;

static const EnvCase env_cases[] = {
    {"WORLD_SIZE", "-3", "from 1 to 65536"},
    {"WORLD_SIZE", "0", "from 1 to 65536"},
    {"WORLD_SIZE", "2 ", "from 1 to 65536"},
    {"WORLD_SIZE", "", "from 1 to 65536"},
    {"WORLD_SIZE", "99999999999999999999", "from 1 to 65536"},
    {"WORLD_SIZE", "1", NULL},  // then RANK is none of them
    {"RANK", "2", "from 0 to 1"},
    {"RANK", "-1", "from 0 to 1"},
    {"RANK", "1x", "from 0 to 1"},
    {"LOCAL_RANK", "0x1", "from 0 to "},
    {"LOCAL_WORLD_SIZE", "0", "from 1 to "},
    {"MASTER_PORT", "99999999", "from 1 to 65535"},
    {"MASTER_PORT", "29500;", "from 1 to 65535"},
    {"RANKS_JOIN_SECONDS", "-5", "from 1 to "},
    {"RANKS_JOIN_SECONDS", "5m", "from 1 to "},
    {"SLURM_PROCID", "two", "from 0 to "},
    {"OMPI_COMM_WORLD_RANK", "9\nwarning", "from 0 to 0"},
    {"PMI_SIZE", "4.0", "from 1 to 65536"},
};
static const EnvCase *env_case;

static int join_with_env(void) {
    const int number = (int)(env_case - env_cases);
    set_env("TORCHELASTIC_RUN_ID", number);  // ranks of one job would print one error
    set_env("PMIX_NAMESPACE", number);
    set_env("SLURM_JOB_ID", number);
    setenv("RANK", "1", 1);
    if (strcmp(env_case->name, "SLURM_PROCID") == 0) {
        unsetenv("WORLD_SIZE");
        setenv("SLURM_STEP_NUM_TASKS", "2", 1);
    }
    if (strncmp(env_case->name, "OMPI", 4) == 0) setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    if (strncmp(env_case->name, "PMI", 3) == 0) setenv("PMI_RANK", "0", 1);
    setenv(env_case->name, env_case->value, 1);
    setenv("RANKS_JOIN_SECONDS", strncmp(env_case->name, "RANKS", 5) ? "1" : env_case->value, 1);
    return join(NULL) ? 1 : 0;
}

TEST(numbers_in_the_environment_are_whole_and_in_range) {
    enum { CASES = sizeof env_cases / sizeof *env_cases };
    Running run[CASES];
    for (int i = 0; i < CASES; i++) {
        env_case = &env_cases[i];
        run[i] = begin_ranks(join_with_env, MASTER, 2, 1);
    }
    for (int i = 0; i < CASES; i++) {
        const EnvCase *c = &env_cases[i];
        char error[128];
        Outcome o = end_ranks(&run[i]);
        CHECK_MSG(o.codes[1] == 2, "%s=%s: %d\n%s", c->name, c->value, o.codes[1], o.said);
        snprintf(error, sizeof error, "error: ranks: %s: expected a whole number %s",
                 c->expected ? c->name : "RANK", c->expected ? c->expected : "from 0 to 0");
        check_one_error(&o, error);
    }
}

static bool is_bound_alone(const char *address) {
    struct sockaddr_in6 at;  // large enough for either
    socklen_t length = sizeof at;
    strcpy(meeting.address, address);
    const int fd = listen_at(0);
    CHECK(fd >= 0 && getsockname(fd, (struct sockaddr *)&at, &length) == 0);
    close(fd);
    if (at.sin6_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&at.sin6_addr);
    return ntohl(((struct sockaddr_in *)&at)->sin_addr.s_addr) >> 24 == 127;
}

TEST(an_address_of_this_machine_alone_is_bound_alone) {
    CHECK(is_bound_alone("127.0.0.1") && is_bound_alone("localhost"));
    CHECK(!is_bound_alone("10.0.0.1") && !is_bound_alone("no.such.host.invalid"));
    meeting.address[0] = 0;
}

// ------------------------------------------------------------------------------------------------
// Exchanges

static RanksBroadcast meet;

static int exchange(void) {
    const char *missing = join(meet);
    if (missing) return fprintf(stderr, "%s\n", missing), 1;
    const int n = comm_num_ranks(), me = comm_rank();
    enum { BIG = 300000 };  // more than a socket buffers
    static int all[MOST * BIG], one[BIG];
    static unsigned char bits[BIG];
    if (ranks.local_rank >= 0 && comm_local_rank() != me) return 10;
    for (int round = 0; round < 20; round++) {
        int value = me == 0 ? 1000 + round : -1;
        comm_broadcast(&value, sizeof value);
        if (value != 1000 + round) return 11;
        comm_all_gather_host(all, &me, sizeof me);
        for (int r = 0; r < n; r++)
            if (all[r] != r) return 12;
        if (comm_max(me == round % n ? round : -5) != round) return 13;
        comm_barrier();
        comm_broadcast(NULL, 0);
    }
    for (int i = 0; i < BIG; i++) one[i] = me * BIG + i;
    comm_all_gather_host(all, one, sizeof one);
    for (int i = 0; i < n * BIG; i++)
        if (all[i] != i) return 14;
    // a block of each, and of the last rank nothing
    const int from = me * (BIG / n), to = me < n - 1 ? from + BIG / n : from;
    for (int i = 0; i < BIG; i++) bits[i] = i >= from && i < to ? (unsigned char)i : 1;
    comm_merge(bits, sizeof bits, (size_t)from, (size_t)(to - from));
    for (int i = 0; me == 0 && i < BIG; i++)
        if (bits[i] != (i / (BIG / n) < n - 1 ? (unsigned char)i : 1)) return 15;
    ranks_leave();
    return comm_num_ranks() == 1 ? 0 : 16;
}

static int hurried_exchange(void) {
    setenv("RANKS_JOIN_SECONDS", "4", 1);
    return exchange();
}

// Stands in for MPI's broadcast: memory shared by all ranks of the test
static struct {
    int given;
    char bytes[4096];
} * shared;

static void hand_over(void *data, size_t bytes) {
    if (comm_rank() == 0) {
        memcpy(shared->bytes, data, bytes);
        __atomic_store_n(&shared->given, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&shared->given, __ATOMIC_ACQUIRE)) sleep_ms(1);
    memcpy(data, shared->bytes, bytes);
}

static int handed_exchange(void) {
    meet = hand_over;
    return exchange();
}

TEST(an_address_is_handed_over) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    Outcome o = run_ranks(handed_exchange, HANDED_OVER, 4, 0);
    munmap(shared, sizeof *shared);
    CHECK_CODES(o, 4, 0);
}

TEST(several_machines_need_an_address) {
    Outcome o = run_ranks(exchange, HANDED_OVER, 2, 0);  // without a broadcast
    CHECK_CODES(o, 2, 1);
    CHECK_MSG(strstr(o.said, "set MASTER_ADDR"), "%s", o.said);
}

TEST(exchanges_of_2_to_8_ranks) {
    for (int n = 2; n <= MOST; n += 3) {
        Outcome o = run_ranks(exchange, MASTER, n, 0);
        CHECK_CODES(o, n, 0);
        CHECK_MSG(!o.said[0], "%s", o.said);
    }
}

// Rank 0 takes the next port, and the others are not misled.
TEST(ranks_of_one_machine_find_each_other_next_to_another_program) {
    const int job = free_port(), errors = errors_file();
    pid_t pids[3];
    Outcome o = {0};
    be_rank(LAUNCHED_HERE, 0, 3, job);
    ranks_launched();
    CHECK(find_meeting(NULL));
    const int in_the_way = listen_at(meeting.port);
    clear_env();
    for (int r = 0; r < 3; r++) pids[r] = start_rank(exchange, LAUNCHED_HERE, r, 3, job, errors);
    finish_ranks(&o, pids, 3, errors);
    CHECK(in_the_way >= 0 && close(in_the_way) == 0);
    close(errors);
    CHECK_CODES(o, 3, 0);
    CHECK_MSG(!o.said[0], "%s", o.said);
}

static int disagree(void) {
    int x = 0, all[MOST];
    if (join(NULL)) return 1;
    if (comm_rank() == 1)
        comm_all_gather_host(all, &x, sizeof x);
    else
        comm_broadcast(&x, sizeof x);
    comm_barrier();
    return 0;
}

TEST(ranks_in_different_exchanges_end) {
    Outcome o = run_ranks(disagree, MASTER, 2, 0);
    CHECK_CODES(o, 2, 8);
    CHECK_MSG(strstr(o.said, "error: ranks: expected exchange "), "%s", o.said);
}

// ------------------------------------------------------------------------------------------------
// Missing ranks and foreign connections

// Absent ranks, a bit each, the message about them, and how many ranks print it: without rank 0
// each prints its own
typedef struct {
    Way way;
    int n;
    unsigned absent;
    const char *said;
    int times;
} AbsentCase;

static const AbsentCase absent_cases[] = {
    {MASTER, 6, 1u << 2 | 1u << 4 | 1u << 5, "none of rank 2, 4-5\n", 1},
    {MASTER, 4, 1, "expected rank 0 at 127.0.0.1 port ", 3},
    {LAUNCHED_HERE, 4, 1, "expected rank 0 at ", 3},
    {LAUNCHED_HERE, 3, 1u << 1, "none of rank 1\n", 1},
};

TEST(missing_ranks_and_different_world_sizes_are_named) {
    enum { CASES = sizeof absent_cases / sizeof *absent_cases };
    Running run[CASES], dies_early, unlike = {{0}, 2, errors_file(), now_ms()};
    const int port = free_port();
    for (int r = 0; r < 2; r++)
        unlike.pids[r] = start_rank(hurried_exchange, MASTER, r, 2 + 2 * r, port, unlike.errors);
    for (int i = 0; i < CASES; i++) {
        const AbsentCase *c = &absent_cases[i];
        run[i] = begin_ranks(hurried_exchange, c->way, c->n, c->absent);
    }
    dies_early = begin_ranks(hurried_exchange, MASTER, 3, 1u << 2);  // rank 1 was there
    sleep_ms(1000);
    kill(dies_early.pids[1], SIGKILL);
    Outcome early = end_ranks(&dies_early), o = end_ranks(&unlike);
    check_one_error(&early, "none of rank 1-2\n");
    CHECK_CODES(o, 2, 8);
    CHECK_MSG(strstr(o.said, "another number"), "%s", o.said);
    for (int i = 0; i < CASES; i++) {
        const AbsentCase *c = &absent_cases[i];
        o = end_ranks(&run[i]);
        for (int r = 0; r < c->n; r++)
            CHECK_MSG(c->absent >> r & 1 || o.codes[r] == 8, "case %d: %s", i, o.said);
        check_errors(&o, c->said, c->times);
        CHECK_MSG(o.seconds < 30, "%g s", o.seconds);  // clear_env's
    }
}

// A foreign process connects repeatedly and sends nothing, garbage, or the hello of another job.
static void bother(int port, int tell) {
    const Hello other_job = {.kind = HELLO, .num = 3, .rank = 1};
    for (int i = 0;; i++) {
        int fd = open_socket("127.0.0.1", port, false);
        if (fd < 0) {
            sleep_ms(1);
            continue;
        }
        if (i % 4 == 1) send(fd, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL);
        if (i % 4 == 2) send(fd, &other_job, sizeof other_job, MSG_NOSIGNAL);
        if (i % 4 == 3) send(fd, &other_job, 20, MSG_NOSIGNAL);
        if (i % 8 < 4) close(fd);
        if (i == 8 && write(tell, "8", 1) != 1) _exit(1);
        sleep_ms(50);
    }
}

TEST(foreign_connections_are_dropped) {
    Outcome o;
    pid_t pids[3];
    int port = free_port(), errors = errors_file(), bothered[2];
    char text[1];
    CHECK(pipe(bothered) == 0);
    fflush(NULL);
    pid_t foreign = fork();
    if (foreign == 0) {
        alarm(HANG_SECONDS);
        bother(port, bothered[1]);
    }
    memset(&o, 0, sizeof o);
    pids[0] = start_rank(exchange, MASTER, 0, 3, port, errors);
    CHECK(read(bothered[0], text, 1) == 1);  // the foreign process connects first
    for (int r = 1; r < 3; r++) pids[r] = start_rank(exchange, MASTER, r, 3, port, errors);
    finish_ranks(&o, pids, 3, errors);
    kill(foreign, SIGKILL);
    waitpid(foreign, NULL, 0);
    close(bothered[0]);
    close(bothered[1]);
    close(errors);
    CHECK_CODES(o, 3, 0);
}

// The one that connects second
TEST(a_duplicate_rank_gets_an_error) {
    Outcome o;
    pid_t pids[3], twins[2], told = 0;
    int port = free_port(), errors = errors_file();
    memset(&o, 0, sizeof o);
    pids[0] = start_rank(exchange, MASTER, 0, 3, port, errors);
    for (int i = 0; i < 2; i++) twins[i] = start_rank(exchange, MASTER, 1, 3, port, errors);
    for (int i = 0; told == 0; i = 1 - i, sleep_ms(10)) {
        told = waitpid(twins[i], NULL, WNOHANG);
        pids[1] = twins[1 - i];
    }
    pids[2] = start_rank(exchange, MASTER, 2, 3, port, errors);
    finish_ranks(&o, pids, 3, errors);
    close(errors);
    CHECK_CODES(o, 3, 0);
    CHECK_MSG(strstr(o.said, "rank 1 already connected"), "%s", o.said);
}

TEST(a_port_that_is_taken_is_an_error) {
    pid_t pid;
    Outcome o = {0};
    int errors = errors_file(), port = free_port();
    const int fd = open_socket("127.0.0.1", port, true);
    pid = start_rank(exchange, MASTER, 0, 2, port, errors);
    finish_ranks(&o, &pid, 1, errors);
    close(fd);
    close(errors);
    CHECK_CODES(o, 1, 8);
    CHECK_MSG(strstr(o.said, "cannot listen on port"), "%s", o.said);
}

// ------------------------------------------------------------------------------------------------
// Lost, hung, failing. A job is four ranks that work in steps; rank `faulty` does `fault` in the
// third.

enum { WORKERS = 4 };
static const double limit_seconds = 3;  // long enough for a busy machine
static int faulty;
static void (*fault)(void);

// Waits until the thread has reported this rank's phase: later messages on the same connections
// arrive after it.
static void await_sent(void) {
    while (watch.sent.step != watch.step || strcmp(watch.sent.phase, watch.phase) != 0) sleep_ms(1);
    sleep_ms(20);  // it is noted before it is sent
}

static int work(void) {
    if (join(NULL)) return 1;
    on_exit(ranks_at_exit, NULL);  // as the transports do
    comm_heartbeat(limit_seconds);
    for (int step = 1; step <= 6; step++) {
        ranks_phase("forward", step);
        if (step == 3 && comm_rank() == faulty) {
            await_sent();
            fault();
        }
        ranks_phase("reduce", step);
        comm_barrier();
    }
    ranks_leave();
    exit(0);
}

static void die(void) { raise(SIGKILL); }
static void stop(void) { raise(SIGSTOP); }
static void crash(void) { abort(); }
static void spin(void) {
    for (volatile unsigned i = 0;; i++) continue;
}
static void be_slow(void) { sleep_ms((int)(limit_seconds * 500)); }
static void be_slow_alive(void) {
    for (int i = 0; i < 10; i++, comm_progress()) sleep_ms((int)(limit_seconds * 200));
}
static void save_long(void) {  // its writes count as progress
    ranks_phase("save", 3);
    be_slow_alive();
}
static void hang_in_save(void) {
    ranks_phase("save", 3);
    await_sent();
    spin();
}
static void fail(void) {
    Error err = {0};
    warning("before");
    error_set(&err, 3, "make it", "a file: not there");
    error_exit(&err);
}
static void fail_silently(void) { exit(7); }

static Running begin_fault(void (*what)(void), int rank) {
    fault = what;
    faulty = rank;
    return begin_ranks(work, MASTER, WORKERS, 0);
}

static Outcome run_fault(void (*what)(void), int rank) {
    Running run = begin_fault(what, rank);
    return end_ranks(&run);
}

TEST(a_job_without_faults_prints_nothing) {
    Outcome o = run_fault(comm_progress, 0);
    CHECK_CODES(o, WORKERS, 0);
    CHECK_MSG(!o.said[0], "%s", o.said);
    CHECK_MSG(o.seconds < END_MS * 1e-3, "%g s", o.seconds);
}

// Exit codes of the faulty rank and of the others, and the message; NULL: none. A stopped rank ends
// without a message when it is continued, and a slow one does not count as hung.
typedef struct {
    void (*what)(void);
    int rank, own_code, code;
    const char *said;
} FaultCase;

static const FaultCase fault_cases[] = {
    {die, 0, 128 + SIGKILL, 8, " lost in forward of step 3\n"},
    {die, 2, 128 + SIGKILL, 8, " lost in forward of step 3\n"},
    {crash, 3, 128 + SIGABRT, 8, " lost in forward of step 3\n"},
    {stop, 0, 8, 8, " silent for "},
    {stop, 2, 8, 8, " silent for "},
    {spin, 0, 8, 8, " in forward of step 3, while others wait for it"},
    {spin, 1, 8, 8, " in forward of step 3, while others wait for it"},
    {be_slow, 0, 0, 0, NULL},
    {be_slow_alive, 1, 0, 0, NULL},
    {save_long, 2, 0, 0, NULL},
    {hang_in_save, 0, 8, 8, " in save of step 3, while others wait for it"},
    {be_slow, 1, 0, 0, NULL},
};

// Each inside a collective that never ends, rank 2 in the first: `blocked` in a call, or turning
static int blocked;
static int wait_in_vain(void) {
    if (join(NULL)) return 1;
    comm_heartbeat(limit_seconds);
    ranks_phase("reduce", 7);
    for (int i = 0; i < (comm_rank() == 2 ? 1 : 2); i++)
        blocked ? ranks_enter_collective(false) : ranks_enter_collective(true);
    for (;; sleep_ms(100))
        if (!blocked) comm_progress();
}

// It enters first and hangs once all the others have entered: they have waited longer than it.
static int hang_in_a_collective(void) {
    if (join(NULL)) return 1;
    comm_heartbeat(limit_seconds);
    ranks_phase("reduce", 7);
    if (comm_rank() == faulty) ranks_enter_collective(true);
    for (int i = 0; i < (comm_rank() == faulty ? 15 : 10); i++, comm_progress()) sleep_ms(100);
    if (comm_rank() == faulty) spin();
    for (;;) comm_barrier();
}

TEST(a_rank_hung_inside_a_collective_is_named) {
    Running run[WORKERS];
    for (faulty = 0; faulty < WORKERS; faulty++)
        run[faulty] = begin_ranks(hang_in_a_collective, MASTER, WORKERS, 0);
    for (int r = 0; r < WORKERS; r++) {
        char error[64];
        Outcome o = end_ranks(&run[r]);
        CHECK_CODES(o, WORKERS, 8);
        snprintf(error, sizeof error, "error: ranks: rank %d on ", r);
        check_one_error(&o, error);
        check_one_error(&o, " in reduce of step 7, while others wait for it");
        CHECK_MSG(o.seconds < limit_seconds * SET_UP_FACTOR, "%g s", o.seconds);
    }
}

static void signal_all(const Running *run, int signal_number) {
    for (int r = 0; r < run->n; r++) kill(run->pids[r], signal_number);
}

// The last job is stopped and continued as a whole, as a launcher does that is suspended.
TEST(killed_stopped_and_spinning_ranks_are_named_and_slow_ones_not) {
    enum { CASES = sizeof fault_cases / sizeof *fault_cases };
    Running run[CASES], in_vain[2];
    for (blocked = 0; blocked < 2; blocked++)
        in_vain[blocked] = begin_ranks(wait_in_vain, MASTER, WORKERS, 0);
    for (int i = 0; i < CASES; i++) run[i] = begin_fault(fault_cases[i].what, fault_cases[i].rank);
    sleep_ms(1000);
    signal_all(&run[CASES - 1], SIGSTOP);
    sleep_ms((int)(limit_seconds * 1500));
    signal_all(&run[CASES - 1], SIGCONT);
    Outcome o;
    for (blocked = 0; blocked < 2; blocked++) {
        o = end_ranks(&in_vain[blocked]);
        CHECK_CODES(o, WORKERS, 8);
        check_one_error(&o, " rank 2 on ");
        CHECK_MSG(strstr(o.said, "furthest behind in reduce of step 7\n"), "%s", o.said);
    }
    for (int i = 0; i < CASES; i++) {
        const FaultCase *c = &fault_cases[i];
        char error[64];
        o = end_ranks(&run[i]);
        for (int r = 0; r < WORKERS; r++)
            CHECK_MSG(o.codes[r] == (r == c->rank ? c->own_code : c->code),
                      "case %d, rank %d: %d\n%s", i, r, o.codes[r], o.said);
        CHECK_MSG(c->said || !o.said[0], "%s", o.said);
        CHECK_MSG(o.seconds < limit_seconds * SET_UP_FACTOR, "%g s", o.seconds);
        if (!c->said) continue;
        snprintf(error, sizeof error, "error: ranks: rank %d on ", c->rank);
        check_one_error(&o, error);
        check_one_error(&o, c->said);
    }
}

TEST(an_error_of_one_rank_is_the_error_of_all) {
    for (int r = 0; r < WORKERS; r += 3) {
        Outcome o = run_fault(fail, r);
        CHECK_CODES(o, WORKERS, 3);
        check_one_error(
            &o, r == 0 ? "error: a file: not there\n" : "error: a file: not there (rank 3 on ");
        CHECK(lines_with(o.said, "warning: ") == (r == 0));
    }
    Outcome o = run_fault(fail_silently, 1);
    CHECK_CODES(o, WORKERS, 7);
    check_one_error(&o, "ended with exit code 7 in forward of step 3");
}

static int many(void) {
    static int all[MANY];
    if (join(NULL)) return 1;
    for (int step = 1; step <= 3; step++) {
        int me = comm_rank();
        ranks_phase("reduce", step);
        comm_all_gather_host(all, &me, sizeof me);
        for (int r = 0; r < MANY; r++)
            if (all[r] != r) return 2;
    }
    if (comm_rank() == faulty) {
        await_sent();
        die();
    }
    ranks_leave();
    exit(0);
}

TEST(seventy_ranks) {
    for (faulty = -1; faulty < MANY; faulty += MANY) {
        Outcome o = run_ranks(many, MASTER, MANY, 0);
        CHECK_CODES(o, MANY - 1, faulty < 0 ? 0 : 8);
        if (faulty > 0) check_one_error(&o, "rank 69 on ");
    }
}

static int all_fail(void) {
    if (join(NULL)) return 1;
    sleep_ms(comm_rank() * 37 % 50);
    fail();
    return 0;
}

TEST(the_same_error_of_all_ranks_is_printed_once) {
    for (int round = 0; round < 3; round++) {
        Outcome o = run_ranks(all_fail, MASTER, MOST, 0);
        CHECK_CODES(o, MOST, 3);
        check_one_error(&o, "error: a file: not there");
    }
}

// Rank 0 detects its own error at the moment when it would report that of rank 1.
static int fail_at_once_or_late(void) {
    if (join(NULL)) return 1;
    comm_barrier();
    if (comm_rank() == 0) sleep_ms(GRACE_MS - 30 + faulty * 10);
    fail();
    return 0;
}

TEST(two_errors_at_the_same_moment_are_one) {
    enum { ROUNDS = 12 };
    Running run[ROUNDS];
    for (faulty = 0; faulty < ROUNDS; faulty++)
        run[faulty] = begin_ranks(fail_at_once_or_late, MASTER, 2, 0);
    for (int i = 0; i < ROUNDS; i++) {
        Outcome o = end_ranks(&run[i]);
        CHECK_CODES(o, 2, 3);
        check_one_error(&o, "error: a file: not there");
    }
}

// Rank 3 dies, and the device of the rank that waits for it reports an error of its network first.
static int die_with_symptoms(void) {
    if (join(NULL)) return 1;
    const int victim = (faulty + 1) % 3 + 1;
    if (comm_rank() == faulty) {
        Error err = {0};
        error_set(&err, 11, "none", "nccl: remote error");
        error_exit(&err);
    }
    if (comm_rank() == victim) {
        sleep_ms(30);
        die();
    }
    comm_barrier();
    return 0;
}

TEST(a_lost_rank_is_named_and_not_its_consequences) {
    for (faulty = 0; faulty < 2; faulty++) {
        char error[64];
        Outcome o = run_ranks(die_with_symptoms, MASTER, WORKERS, 0);
        snprintf(error, sizeof error, "error: ranks: rank %d on ", (faulty + 1) % 3 + 1);
        check_one_error(&o, error);
        CHECK(o.codes[0] == 8 && o.codes[faulty] == 8);
    }
}

TEST(ranks_lost_together_are_reported_once) {
    for (int round = 0; round < 2; round++) {
        fault = die;
        Outcome o;
        pid_t pids[WORKERS];
        int port = free_port(), errors = errors_file();
        memset(&o, 0, sizeof o);
        for (int r = 0; r < WORKERS; r++) {
            faulty = r == 3 || (round == 1 && r == 0) ? r : -1;
            pids[r] = start_rank(work, MASTER, r, WORKERS, port, errors);
        }
        finish_ranks(&o, pids, WORKERS, errors);
        close(errors);
        CHECK(o.codes[1] == 8 && o.codes[2] == 8);
        check_one_error(&o, " lost in ");
    }
}

static int warn(void) {
    if (join(NULL)) return 1;
    comm_heartbeat(limit_seconds);
    warning("of rank %d", comm_rank());
    int shown = 0;
    for (int i = 0; !shown && i < HANG_SECONDS * 50; i++, sleep_ms(10)) {
        struct stat status;
        shown = fstat(2, &status) == 0 && status.st_size > 0;
    }
    comm_barrier();
    ranks_leave();
    exit(shown ? 0 : 1);
}

TEST(warnings_of_rank_0_are_shown_while_the_job_runs) {
    Outcome o = run_ranks(warn, MASTER, 2, 0);
    CHECK_CODES(o, 2, 0);
    CHECK_MSG(strcmp(o.said, "warning: of rank 0\n") == 0, "%s", o.said);
}

TEST_MAIN()
