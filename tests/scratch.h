// A directory for a test program's files, removed when the program ends. It is below TMPDIR, which
// tests/run.sh removes even after a crash.
#pragma once

#include <unistd.h>

#include "../data/base/dir.h"
#include "../data/base/error.h"
#include "../data/base/memory.h"
#include "test.h"

static struct {
    char dir[160];
    pid_t owner;
} scratch_root;

static bool scratch_make(const char *parent) {
    snprintf(scratch_root.dir, sizeof scratch_root.dir, "%s/unpad_test_XXXXXX", parent);
    return mkdtemp(scratch_root.dir) != NULL;
}

static void scratch_remove(void) {
    Error err = {0};
    if (getpid() == scratch_root.owner) dir_remove_tree(scratch_root.dir, &err);  // not a fork's
}

// <directory>/<name>; the string is valid until the 16th call after this one.
static inline const char *scratch(const char *name) {
    static char paths[16][256];
    static int next;
    if (!scratch_root.dir[0]) {
        const char *dir = getenv("TMPDIR");
        // in memory if possible: a busy disk takes seconds for an fsync
        if (dir ? !scratch_make(dir) : !scratch_make("/dev/shm") && !scratch_make("/tmp")) abort();
        scratch_root.owner = getpid();
        atexit(scratch_remove);
    }
    next = (next + 1) % 16;
    snprintf(paths[next], sizeof paths[next], "%s/%s", scratch_root.dir, name);
    return paths[next];
}

// Replaces the file.
static inline void put_file(const char *path, const void *data, size_t n) {
    FILE *file = fopen(path, "wb");
    CHECK_MSG(file && fwrite(data, 1, n, file) == n, "%s", path);
    CHECK(fclose(file) == 0);
}

// JSON with ' for "; valid until the fourth call after this one.
static inline const char *json_of(const char *text) {
    static char texts[4][1 << 14];
    static int next;
    char *copy = texts[next = (next + 1) % 4];
    CHECK(snprintf(copy, sizeof texts[0], "%s", text) < (int)sizeof texts[0]);
    for (char *p = copy; (p = strchr(p, '\''));) *p = '"';
    return copy;
}

// The text printed between the two calls; valid until the next pair of calls.
static struct {
    FILE *out;  // as it was
    char *text;
    size_t n;
} scratch_captured;
static inline void capture_begin(void) {
    free(scratch_captured.text);
    scratch_captured.out = stdout;
    CHECK(stdout = open_memstream(&scratch_captured.text, &scratch_captured.n));
}
static inline const char *capture_end(void) {
    fclose(stdout);
    stdout = scratch_captured.out;
    return scratch_captured.text;
}
