// Whole runs of the program in which a call into libc fails, once or from then on: each ends with
// the results of an undisturbed one, or with an error, its exit code and nothing lost. In the
// emulator the calls of CUDA, cuBLASLt and NCCL, and the launches of kernels.
//
// Every place that calls, by the functions that lead to it, takes its turn: under `make test` one
// of PARTS parts, another one each day or part PART; under `make test-faults` all of them.
#include <sys/mman.h>

#include "whole_runs.h"

// Of CUDA
enum { OUT_OF_MEMORY = 2, UNKNOWN_ERROR = 999 };

enum { MAX_CALLS = 1 << 16 };

#ifdef BACKEND_CUDA
enum { PARTS = 50, FIRST_KIND = FAULT_DEVICE, LAST_KIND = FAULT_DEVICE };
#define PLACES(host_, device_) device_
#define HOPPER "--attention sm90 "
#define OTHERS "--attention sm80 --optimizer muon --layout repad "
// NCCL is called for one rank too.
const char *comm_connect_alone(void);  // kernels/comm/nccl.cu
const char *__real_comm_connect(void *stream);
const char *__wrap_comm_connect(void *stream) {
    const char *missing = __real_comm_connect(stream);
    return missing ? missing : comm_connect_alone();
}
#else
enum { PARTS = 40, FIRST_KIND = FAULT_IO, LAST_KIND = FAULT_ALLOC };
#define PLACES(host_, device_) host_
#define HOPPER
#define OTHERS
#endif

// After a failure the command with `again` must lead to the results. before: what makes `out`.
static const struct {
    const char *name, *before, *command, *again;
    // At least, with calls of both kinds: a seventh less than gcc 12 has, as compilers inline
    // differently
    int places;
} runs[] = {
    {"train", NULL, NEW HOPPER "--steps 2", "--resume", PLACES(300, 300)},
    {"texts", TRAIN "--from-scratch --train more.jsonl --steps 0",
     TRAIN "--from-scratch --train text --val more.jsonl --val-every 1 --steps 1", "--resume",
     PLACES(480, 0)},
    {"resume", NEW OTHERS "--steps 1", OTHERS "--out out --resume --steps 2", "", PLACES(300, 340)},
    {"overwrite", NEW "--steps 2 --seed 7", NEW "--steps 1 --overwrite", "", PLACES(255, 0)},
    {"lora", NULL, TRAIN HOPPER "--model base --train shards --lora 8 --lora-merge --steps 1",
     "--resume", PLACES(270, 430)},
    {"generate", NULL, HOPPER "--model base --generate --prompt line --sample-tokens 3 --threads 1",
     "", PLACES(70, 100)},
    {"eval", NULL,
     HOPPER "--model base --eval --val text --max-seqlen 32 --micro-batch-tokens 64 --threads 1",
     "", PLACES(195, 96)},
};

static int bad;
static FaultCall *seen;  // by a run, in memory that it shares
static struct {
    int kind, error;
    uint64_t place;
    bool persistent;
} planned;

static void see(void) {
    fault_arm(planned.kind, 0, 0, false);
    fault.seen = seen, fault.most_seen = MAX_CALLS;
}
static void arm(void) {
    fault_arm(planned.kind, 0, planned.error, planned.persistent);
    fault.place = planned.place;
}

// `seen` becomes one call from each place. Returns their number.
static int find_places(void) {
    int n = 0;
    for (const FaultCall *c = seen; c->place; c++) {
        int k = 0;
        while (k < n && seen[k].place != c->place) k++;
        if (k == n) seen[n++] = *c;
    }
    return n;
}

// The last line of standard output, and all in `out`
static uint64_t outcome(bool strict) {
    const char *last = strrchr(said, '\n');
    return fnv1a(results(strict), last ? last : said, strlen(last ? last : said));
}

// Does the error name the call, or what it was for? A kernel's name has no parameters there.
static bool named(const char *call) {
    static const char *const others[][2] = {{"cudaGetLastError", "_kernel: "},
                                            {"cublasLtMatmul", ": matmul_"},
                                            {"cublasLtCreate", "cuBLASLt does not start"},
                                            {"cudaGetDeviceCount", "CUDA does not start"},
                                            {"cudaMalloc", " refused"}};
    char name[64];
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(call, others[i][0]) == 0 && strstr(said, others[i][1])) return true;
    text_copy(name, sizeof name, call);
    name[strcspn(name, "<")] = 0;
    return strstr(said, name);
}

// Describes the error of a run that has ended with this code; NULL: there is none.
static const char *wrong(int code, const char *call, uint64_t expected) {
    const bool io = planned.kind == FAULT_IO;
    const int errors = count("error: ");
    const int right = planned.kind == FAULT_ALLOC      ? EXIT_HOST_MEMORY
                      : planned.error == OUT_OF_MEMORY ? EXIT_DEVICE_MEMORY
                                                       : EXIT_DEVICE_ERROR;
    if (count("Sanitizer") || count("runtime error")) return "the sanitizer reports";
    if (io ? code != EXIT_DONE && code != EXIT_BAD_INPUT && code != EXIT_DISK : code != right)
        return "another exit code is right";
    if (planned.kind == FAULT_DEVICE && !named(call)) return "the error does not name the call";
    if (errors != count("hint: ") || errors < (code != 0) ||
        errors > (io && planned.persistent ? MAX_FAILED_SAVES : 1))
        return "expected one error with a hint";
    return code != 0 || outcome(false) == expected ? NULL : "other results, and no error";
}

enum { ONCE, FROM_THEN_ON, SHORT, NUM_HOWS };
static const char *const hows[] = {"fails", "fails from then on", "falls short"};

// Calls that can do less than they are asked for, without an error of their own
static bool can_fall_short(const char *call) { return strstr("write pread cudaMalloc", call); }

static void fail_at(int r, const FaultCall *call, int how, uint64_t expected) {
    char first[2000];
    planned.place = call->place;
    planned.persistent = how == FROM_THEN_ON;
    planned.error = planned.kind == FAULT_DEVICE  ? how == SHORT ? OUT_OF_MEMORY : UNKNOWN_ERROR
                    : planned.kind == FAULT_ALLOC ? ENOMEM
                    : how == SHORT                ? FAULT_SHORT
                    : how == ONCE                 ? EIO
                                                  : ENOSPC;
    start_over(runs[r].before);
    const int code = run(runs[r].command, "", arm);
    text_copy(first, sizeof first, said);
    const char *why = how == SHORT && planned.kind == FAULT_IO && code != 0
                          ? "not a failure"
                          : wrong(code, call->name, expected);
    if (!why && (code != 0 || outcome(true) != expected)) {
        const int then = run(runs[r].command, runs[r].again, NULL);
        if (then != 0 || outcome(true) != expected) {
            why = "the next start does not lead to the results";
            printf("    then exit code %d: %s\n", then, said);
        }
    }
    if (why)
        printf("    BAD: %s: %s %s: %s; exit code %d: %s\n", runs[r].name, call->name, hows[how],
               why, code, first);
    bad += why != NULL;
}

TEST(every_call_fails_in_turn) {
    int turn = part_of(PARTS), tried = 0;
    seen = mmap(NULL, MAX_CALLS * sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                -1, 0);
    make_inputs();
    if (!all_parts()) printf("    PART=%d of %d\n", turn, PARTS);
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        int places = 0;
        if (runs[r].places == 0) continue;
        if (runs[r].before) {
            start_over(NULL);
            must_run(runs[r].before);
            shell("rm -rf before && mv out before");
        }
        for (planned.kind = FIRST_KIND; planned.kind <= LAST_KIND; planned.kind++) {
            memset(seen, 0, MAX_CALLS * sizeof *seen);
            start_over(runs[r].before);
            const int code = run(runs[r].command, "", see), n = find_places();
            CHECK_MSG(code == 0, "%s: exit code %d: %s", runs[r].name, code, said);
            const uint64_t expected = outcome(true);
            for (int i = 0; i < NUM_HOWS * n; i++) {
                const FaultCall *call = &seen[i / NUM_HOWS];
                if ((i % NUM_HOWS == SHORT && !can_fall_short(call->name)) ||
                    (!all_parts() && turn++ % PARTS != 0))
                    continue;
                fail_at((int)r, call, i % NUM_HOWS, expected);
                tried++;
            }
            places += n;
        }
        printf("    %s: %d places\n", runs[r].name, places);
        CHECK_MSG(places >= runs[r].places, "%s: %d places, not %d", runs[r].name, places,
                  runs[r].places);
    }
    printf("    %d failures injected, %d bad\n", tried, bad);
    CHECK(bad == 0);
}

// NaN in the emulator's memory would take most of the time.
int main(int argc, char **argv) {
    if (!getenv("EMU_POISON") && setenv("EMU_POISON", "0", 1) == 0) execv("/proc/self/exe", argv);
    return test_main(argc, argv);
}
