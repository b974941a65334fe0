// Whole runs of the program in which a call into libc fails, once or from then on: each ends with the
// results of an undisturbed one, or with an error, its exit code and nothing lost.
//
// Every place that calls, by the functions that lead to it, takes its turn: under `make test` one of
// PARTS parts, another one each day or part PART; under `make test-faults` all of them.
#include <sys/mman.h>

#include "whole_runs.h"

enum { PARTS = 20, MAX_CALLS = 1 << 16 };

// After a failure the command with `again` must lead to the results. before: what makes `out`.
static const struct {
    const char *name, *before, *command, *again;
    int places;  // at least, with calls of both kinds
} runs[] = {
    {"train", NULL, NEW "--steps 2", "--resume", 1},
    {"texts", NULL, TRAIN "--from-scratch --train text --val more.jsonl --steps 1", "--resume", 1},
    {"resume", NEW "--steps 1", "--out out --resume --steps 2", "", 1},
    {"overwrite", NEW "--steps 2 --seed 7", NEW "--steps 1 --overwrite", "", 1},
    {"lora", NULL, TRAIN "--model base --train shards --lora 8 --lora-merge --steps 1", "--resume", 1},
    {"generate", NULL, "--model base --generate --prompt line --sample-tokens 3 --threads 1", "", 1},
    {"eval", NULL, "--model base --eval --val text --max-seqlen 32 --micro-batch-tokens 64 --threads 1", "", 1},
};

static FaultCall *seen;  // by a run, in memory that it shares
static struct {
    int kind, error;
    uint64_t place;
    bool persistent;
} planned;

static void see(void) { fault_see(planned.kind, seen, MAX_CALLS); }
static void arm(void) {
    fault_arm_place(planned.kind, planned.place, planned.error, planned.persistent);
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

static int count(const char *part) {
    int n = 0;
    for (const char *at = said; (at = strstr(at, part)); at++) n++;
    return n;
}

// The last line of standard output, and all in `out`
static uint64_t outcome(void) {
    const char *last = strrchr(said, '\n');
    return fnv1a(results(), last ? last : said, strlen(last ? last : said));
}

static void start_over(const char *before) {
    shell("rm -rf out tmp && mkdir tmp");
    if (before) shell("cp -r before out");
}

// What is wrong with a run that has ended with this code; NULL: nothing
static const char *wrong(int code, uint64_t expected) {
    const bool io = planned.kind == FAULT_IO;
    const int errors = count("error: ");
    if (count("Sanitizer") || count("runtime error")) return "the sanitizer reports";
    if (io ? code != EXIT_DONE && code != EXIT_BAD_INPUT && code != EXIT_DISK
           : code != EXIT_HOST_MEMORY)
        return "another exit code is right";
    if (errors != count("hint: ") || errors < (code != 0) || errors > (planned.persistent ? 3 : 1))
        return "expected one error with a hint";
    return code != 0 || outcome() == expected ? NULL : "other results, and no error";
}

static void fail_at(int r, const FaultCall *call, bool persistent, uint64_t expected) {
    char first[2000];
    planned.place = call->place;
    planned.persistent = persistent;
    planned.error = planned.kind == FAULT_ALLOC ? ENOMEM : persistent ? ENOSPC : EIO;
    start_over(runs[r].before);
    const int code = run(runs[r].command, "", arm);
    text_copy(first, sizeof first, said);
    const char *why = wrong(code, expected);
    if (!why && code != 0) {
        const int then = run(runs[r].command, runs[r].again, NULL);
        if (then != 0 || outcome() != expected) {
            why = "the next start does not lead to the results";
            printf("    then exit code %d: %s\n", then, said);
        }
    }
    if (why)
        printf("BAD %s: %s fails%s: %s; exit code %d: %s\n", runs[r].name, call->name,
               persistent ? " from then on" : "", why, code, first);
}

TEST(every_call_fails_in_turn) {
    const bool all = getenv("FAULTS") != NULL;
    int turn = getenv("PART") ? atoi(getenv("PART")) : (int)(time(NULL) / 86400 % PARTS), tried = 0;
    seen = mmap(NULL, MAX_CALLS * sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                -1, 0);
    make_inputs();
    if (!all) printf("    PART=%d of %d\n", turn, PARTS);
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        int places = 0;
        if (runs[r].before) {
            start_over(NULL);
            must_run(runs[r].before);
            shell("rm -rf before && mv out before");
        }
        if (getenv("R") && !strchr(getenv("R"), '0' + (int)r)) continue;
        for (planned.kind = FAULT_IO; planned.kind <= FAULT_ALLOC; planned.kind++) {
            memset(seen, 0, MAX_CALLS * sizeof *seen);
            start_over(runs[r].before);
            const int code = run(runs[r].command, "", see), n = find_places();
            CHECK_MSG(code == 0, "%s: exit code %d: %s", runs[r].name, code, said);
            const uint64_t expected = outcome();
            for (int i = 0; i < 2 * n; i++)
                if (all || turn++ % PARTS == 0) {
                    fail_at((int)r, &seen[i / 2], i % 2, expected);
                    tried++;
                }
            places += n;
        }
        printf("    %s: %d places\n", runs[r].name, places);
        CHECK_MSG(places >= runs[r].places, "%s: %d places, not %d", runs[r].name, places,
                  runs[r].places);
    }
    printf("    %d failures injected\n", tried);
}

TEST_MAIN()
