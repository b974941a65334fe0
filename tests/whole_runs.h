// Whole runs of the program, each in a fork of the test: of a tiny model, in the directory `out`
// below scratch(), whose results can be compared.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/wait.h>

#include "fault.c"
#include "scratch.h"

#define main train_llama_main
#define UNPAD_VERSION "of a test"
#include "../train_llama.cu"
#undef main

#define SMALL "--max-seqlen 32 --micro-batch-tokens 64 --batch-tokens 64 --threads 1 "
#define TRAIN \
    SMALL "--val-every 0 --num-samples 1 --sample-tokens 3 --lr 1e-2 --model tiny --out out "
#define TEXTS TRAIN "--from-scratch --train text --steps 0 "
#define NEW TRAIN "--from-scratch --train shards --save-every 1 --keep 1 --ledger "

// A fork copies the page tables of all the freed memory that the sanitizer keeps.
const char *__asan_default_options(void) { return "quarantine_size_mb=8"; }

static char said[1 << 16];  // by the last run: standard error, then standard output

static void shell(const char *command) {
    CHECK_MSG(system(printed("cd '%s' && %s", scratch_root.dir, command)) == 0, "%s", command);
}

static void read_said(void) {
    size_t n = 0;
    for (int i = 0; i < 2; i++) {
        FILE *file = fopen(scratch(i ? "stdout" : "stderr"), "r");
        CHECK(file);
        n += fread(said + n, 1, sizeof said - 1 - n, file);
        fclose(file);
    }
    while (n > 0 && said[n - 1] == '\n') n--;
    said[n] = 0;
}

// The exit code, -N when signal N ended it. prepare: called in its process before it begins; may be
// NULL.
static int run(const char *command, const char *more, void (*prepare)(void)) {
    char words[1024], *argv[64] = {"train_llama"};
    int argc = 1, status = 0;
    snprintf(words, sizeof words, "%s %s", command, more);
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(300);
        if (chdir(scratch_root.dir) != 0 || !freopen("stdout", "w", stdout) ||
            !freopen("stderr", "w", stderr))
            _exit(99);
        if (prepare) prepare();
        exit(train_llama_main(argc, argv));
    }
    CHECK(waitpid(child, &status, 0) == child);
    read_said();
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void must_run(const char *command) {
    const int code = run(command, "", NULL);
    CHECK_MSG(code == 0, "%s: exit code %d: %s", command, code, said);
}

// Of a file the name and the contents, of a directory all below it. What has times or process
// numbers in it counts by its name alone, of checkpoints only the newest, no lock. Leftovers of an
// interrupted save, which the next start removes, count only where `strict`.
static uint64_t tree_hash(const char *path, const char *name, bool strict, uint64_t hash) {
    static const char *const vary[] = {"log.jsonl", "options", "trainer_state.json",
                                       "manifest.json", "texts.key"};
    struct dirent **list;
    const int n = scandir(path, &list, NULL, alphasort);
    Error err = {0};
    uint64_t size;
    hash = fnv1a(hash, name, strlen(name));
    for (int i = 0; i < n; i++) {
        char below[IO_PATH_MAX];
        const char *at = list[i]->d_name;
        const bool older = i + 1 < n && strlen(at) == 13 && strncmp(at, "step-", 5) == 0 &&
                           strncmp(list[i + 1]->d_name, "step-", 5) == 0;
        CHECK(path_join(below, path, at, &err));
        const bool left = strstr(at, ".tmp") || strstr(at, ".old") || strstr(at, ".probe");
        if (!older && (strict || !left) && strcmp(at, ".") != 0 && strcmp(at, "..") != 0 &&
            strcmp(at, ".lock") != 0)
            hash = tree_hash(below, at, strict, hash);
        free(list[i]);
    }
    if (n >= 0) free(list);
    for (size_t i = 0; i < sizeof vary / sizeof *vary; i++)
        if (n >= 0 || strcmp(name, vary[i]) == 0) return hash;
    char *text = file_read_all(path, 1 << 26, &size, "", &err);
    if (text) hash = fnv1a(hash, text, size);
    free(text);
    return hash;
}

static uint64_t results(bool strict) { return tree_hash(scratch("out"), "", strict, FNV1A_START); }

// tiny, base: models; shards; text, more.jsonl: texts
static void make_inputs(void) {
    const char *config = json_of(
        "{'model_type': 'llama', 'vocab_size': 264, 'hidden_size': 8, 'intermediate_size': 8,"
        " 'num_hidden_layers': 1, 'num_attention_heads': 1, 'head_dim': 64, 'bos_token_id': 256,"
        " 'eos_token_id': 257, 'tie_word_embeddings': true, 'initializer_range': 0.05}");
    if (path_exists(scratch("base"))) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);  // else it executes itself again, and so it does
    setenv("OMP_PROC_BIND", "false", 1);      // where its thread is bound
    setenv("TMPDIR", "tmp", 1);
    shell(
        "mkdir tmp tiny text && for i in 1 2 3 4 5 6 7 8 9; do seq $i 2 40 > text/$i.txt; done && "
        "echo '{\"parts\": [[\"a \", false], [\"line\", true]]}' > more.jsonl");
    put_file(scratch("tiny/config.json"), config, strlen(config));
    must_run("--train text --steps 0 --val-every 0 --num-samples 0 --out made");
    shell("mv made/tokens shards && cp shards/*.json tiny && rm -r made");
    must_run(NEW "--steps 1");
    shell("mv out/final base && rm -r out");
}

// Of suites that take their turns: is this part to run? FAULTS=all: all of them.
static inline bool all_parts(void) { return getenv("FAULTS") != NULL; }
static inline int part_of(int parts) {
    const char *part = getenv("PART");
    return (part ? atoi(part) : (int)(time(NULL) / 86400)) % parts;
}

static inline int count(const char *text) {
    int n = 0;
    for (const char *at = said; (at = strstr(at, text)); at++) n++;
    return n;
}

static inline void start_over(const char *before) {
    shell("rm -rf out tmp && mkdir tmp");
    if (before) shell("cp -r before out");
}
