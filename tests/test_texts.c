// Texts into shards while the file system fails, or the process dies, at every call in turn: all of
// the shards are there, or none. What is in them: tests/test_texts.sh.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../data/base/file.h"
#include "../data/shards/dataset.h"
#include "../data/texts/texts.h"
#include "fault.c"
#include "scratch.h"
#include "test.h"

static volatile sig_atomic_t no_signal;

static void put(const char *name, const char *text) {
    FILE *f = fopen(scratch(name), "wb");
    CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

// Three documents of 3, 4 and 9 + `more` bytes, the last one with a loss mask
static void make_texts(int more) {
    Error err = {0};
    char line[96];
    CHECK(dir_remove_tree(scratch("in"), &err) && dir_create_all(scratch("in"), &err));
    put("in/a.txt", "one");
    put("in/b.txt", "two!");
    snprintf(line, sizeof line, "{\"parts\": [[\"and \", false], [\"three%.*s\", true]]}\n\n", more,
             "!!!!!!!!!!");
    put("in/c.jsonl", line);
}

static bool convert(Error *err) {
    static char in[256], dir[256];
    static OutDir out;
    const char *spec = in;
    snprintf(in, sizeof in, "%s", scratch("in"));
    snprintf(dir, sizeof dir, "%s", scratch("out"));
    out = (OutDir){.path = dir};
    const Options o = {.threads = 1};
    const Texts t = {&o, "demo", 264, true, false, &out, &no_signal};
    const bool ok = texts_to_shards(&spec, "tokens", 0.01, &t, err);
    if (out.locked) dir_unlock(&out.lock);
    const bool made = spec != in;
    if (made) free((char *)spec);
    return ok && made;
}

// Tokens of the shards in the directory; -1: there is none. It is never there in part.
static int64_t tokens_there(void) {
    Dataset ds;
    Error err = {0};
    const DatasetOptions options = dataset_options();
    if (!path_exists(scratch("out/tokens"))) return -1;
    CHECK(path_exists(scratch("out/tokens/texts.key")));
    CHECK(path_exists(scratch("out/tokens/tokenizer.json")));
    CHECK_MSG(dataset_open(&ds, scratch("out/tokens"), &options, &err), "%s", err.what);
    const int64_t tokens = ds.num_tokens;
    CHECK(ds.num_docs == 3 && ds.masked);
    dataset_close(&ds);
    return tokens;
}

enum { OLD_TOKENS = 3 + 4 + 9 + 3 * 2, MORE = 5 };

// Shards of the old texts, and then new texts
static void start_again(void) {
    Error err = {0};
    CHECK(dir_remove_tree(scratch("out"), &err));
    make_texts(0);
    CHECK_MSG(convert(&err) && tokens_there() == OLD_TOKENS, "%s", err.what);
    make_texts(MORE);
}

static void check_after(long nth) {
    Error err = {0};
    const int64_t tokens = tokens_there();
    CHECK_MSG(tokens == -1 || tokens == OLD_TOKENS || tokens == OLD_TOKENS + MORE, "call %ld: %lld",
              nth, (long long)tokens);
    CHECK_MSG(convert(&err), "call %ld: %s", nth, err.what);
    CHECK_MSG(tokens_there() == OLD_TOKENS + MORE, "call %ld", nth);
    CHECK(!path_exists(scratch("out/tokens.tmp")) && !path_exists(scratch("out/tokens.old")));
}

static void sweep(int error, bool persistent) {
    bool ok = false;
    long nth = 0;
    while (!ok) {
        Error err = {0};
        start_again();
        const int open = fault_open_fds();
        fault_arm(FAULT_IO, ++nth, error, persistent);
        ok = convert(&err);
        const char *victim = fault_victim();
        const bool failed = victim[0] != 0;
        fault_disarm();
        CHECK_MSG(fault_open_fds() == open, "call %ld: a descriptor is left open", nth);
        CHECK_MSG(ok || failed, "%s", err.what);
        CHECK_MSG(ok || err.code == 0 || err.code == EXIT_DISK || err.code == EXIT_BAD_INPUT ||
                      err.code == EXIT_USAGE,
                  "call %ld: code %d", nth, err.code);
        check_after(nth);
        if (failed) ok = false;  // a call that may fail
        CHECK(nth < 2000);
    }
    CHECK_MSG(nth > 60, "%ld calls", nth);
}

TEST(what_cannot_be_looked_at_exists) {
    const int errors[] = {EACCES, EIO, ELOOP};
    for (int i = 0; i < 3; i++) {
        fault_arm(FAULT_IO, 1, errors[i], false);
        const bool exists = path_exists(scratch("nothing"));
        fault_disarm();
        CHECK(exists && !path_exists(scratch("nothing")));
    }
}

TEST(one_call_fails) { sweep(EIO, false); }
TEST(the_disk_is_full_from_a_call_on) { sweep(ENOSPC, true); }
TEST(calls_fall_short) { sweep(FAULT_SHORT, false); }

TEST(the_process_dies_at_a_call) {
    bool died = true;
    long nth = 0;
    while (died) {
        int status = 0;
        start_again();
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            Error err = {0};
            fault_arm(FAULT_IO, ++nth, FAULT_KILL, false);
            const bool ok = convert(&err);
            if (!ok) fprintf(stderr, "call %ld: %s\n", nth, err.what);
            _exit(!ok);
        }
        nth++;
        CHECK(waitpid(child, &status, 0) == child);
        died = WEXITSTATUS(status) == 137;  // tests/fault.c
        CHECK_MSG(died || WEXITSTATUS(status) == 0, "call %ld: status %x", nth, status);
        check_after(nth);
    }
    CHECK_MSG(nth > 60, "%ld calls", nth);
}

TEST_MAIN()
