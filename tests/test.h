// The test harness: named cases, a filter, a seed. A skip is not a pass. The last line counts
// passed, failed and skipped cases.
//
//   #include "test.h"
//   TEST(attention_of_one_token) { CHECK(x == 1); CHECK_MSG(err < tol, "err %g", err); }
//   TEST(needs_avx512) { if (!have) SKIP("no AVX-512 on this CPU"); ... }
//   TEST_MAIN()
//
// usage: a_test [--filter SUBSTRING] [--seed N]. Exit status 0 only if nothing failed and
// the filter matched. A failed CHECK prints file:line and ends the case; the others still run. Each
// case has its own random stream, seeded by (seed, name), so a filter does not change its random
// numbers.
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct TestCase {
    const char *name;
    void (*run)(void);
    struct TestCase *next;
} TestCase;

__attribute__((unused)) static TestCase *test_first, **test_last = &test_first;
static const TestCase *test_current;
static jmp_buf test_leave;
static uint64_t test_seed = 1, test_rng_state;
enum { TEST_FAILED = 1, TEST_SKIPPED = 2 };

#define TEST(name_)                                                        \
    static void test_##name_(void);                                        \
    static TestCase test_case_##name_ = {#name_, test_##name_, NULL};      \
    __attribute__((constructor)) static void test_register_##name_(void) { \
        *test_last = &test_case_##name_;                                   \
        test_last = &test_case_##name_.next;                               \
    }                                                                      \
    static void test_##name_(void)

#define CHECK(cond_) CHECK_MSG(cond_, "expected to hold")
#define CHECK_MSG(cond_, ...)                                                         \
    do {                                                                              \
        if (!(cond_)) test_end(TEST_FAILED, __FILE__, __LINE__, #cond_, __VA_ARGS__); \
    } while (0)
// The call, which is given &err, succeeds.
#define MUST(call_)                       \
    do {                                  \
        Error err = {0};                  \
        CHECK_MSG(call_, "%s", err.what); \
    } while (0)
// Not so: with this exit code, and this part of what it says.
#define REFUSED(code_, part_, call_)                                                           \
    do {                                                                                       \
        Error err = {0};                                                                       \
        CHECK_MSG(!(call_) && err.code == (code_) && strstr(err.what, part_), "%s", err.what); \
    } while (0)
#define SKIP(...) test_end(TEST_SKIPPED, __FILE__, __LINE__, NULL, __VA_ARGS__)

__attribute__((noreturn, format(printf, 5, 6))) static inline void test_end(
    int how, const char *file, int line, const char *cond, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (how == TEST_FAILED)
        printf("    %s:%d: %s: ", file, line, cond);
    else
        printf("    skipped: ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    fflush(stdout);
    if (!test_current) abort();  // no case runs: libFuzzer keeps the input
    longjmp(test_leave, how);
}

// As printf; valid until the 16th call after this one.
__attribute__((format(printf, 1, 2))) static inline const char *printed(const char *format, ...) {
    static char texts[16][4096];
    static int next;
    char *text = texts[next = (next + 1) % 16];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof texts[0], format, args);
    va_end(args);
    return text;
}

// Makes a call in a process that it may end: its exit code, and its standard error, which is valid
// until the next call.
static inline int exit_code_of(void (*call)(int), int argument, const char **said) {
    static char text[4096];
    int status = 0;
    FILE *file = tmpfile();
    CHECK(file);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(fileno(file), 2);
        call(argument);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    *said = text;
    return WEXITSTATUS(status);
}

// The path of this program
static inline const char *test_self(void) {
    static char self[4096];
    CHECK(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    return self;
}

// splitmix64 on the case's own stream
static inline uint64_t test_rng_u64(void) {
    uint64_t z = (test_rng_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
static inline uint32_t test_rng_u32(void) { return (uint32_t)(test_rng_u64() >> 32); }
static inline uint32_t test_rng_below(uint32_t n) { return (uint32_t)(test_rng_u64() % n); }
static inline double test_rng_uniform(void) { return (double)(test_rng_u64() >> 11) * 0x1p-53; }
// Mean 0, variance 1 (sum of 12 uniforms): good enough for inputs, without libm
static inline double test_rng_normal(void) {
    double s = -6.0;
    for (int i = 0; i < 12; i++) s += test_rng_uniform();
    return s;
}

static uint64_t test_hash(const char *s) {
    uint64_t h = 1469598103934665603ull;
    for (; *s; s++) h = (h ^ (unsigned char)*s) * 1099511628211ull;
    return h;
}

static int test_run_one(const TestCase *t) {
    test_current = t;
    test_rng_state = test_seed ^ test_hash(t->name);
    int how = setjmp(test_leave);
    if (how == 0) t->run();
    return how;
}

// How a case ends. test_ops.c runs each in a process.
static int (*test_runner)(const TestCase *t) = test_run_one;

static inline int test_main(int argc, char **argv) {
    const char *filter = "";
    int count[3] = {0};  // passed, failed, skipped
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--filter") == 0 && i + 1 < argc)
            filter = argv[++i];
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            test_seed = strtoull(argv[++i], NULL, 10);
        else
            return fprintf(stderr, "usage: %s [--filter SUBSTRING] [--seed N]\n", argv[0]), 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (const TestCase *t = test_first; t; t = t->next) {
        if (!strstr(t->name, filter)) continue;
        static const char *const words[] = {"ok     ", "FAILED ", "skipped"};
        const int how = test_runner(t);
        printf("%s %s\n", words[how], t->name);
        count[how]++;
    }
    printf("%d passed, %d failed, %d skipped\n", count[0], count[1], count[2]);
    const bool none = *filter && count[0] + count[1] + count[2] == 0;
    if (none) fprintf(stderr, "error: --filter %s: expected a part of a case's name\n", filter);
    return count[1] != 0 || none;
}

#define TEST_MAIN() \
    int main(int argc, char **argv) { return test_main(argc, argv); }
