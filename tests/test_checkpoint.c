// data/runs/checkpoint.h: damage is found; every I/O call and allocation fails in turn; the process
// is killed at every call; writes, fsyncs and renames are in an order that survives a power cut.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/base/dir.h"
#include "../data/base/error.h"
#include "../data/base/file.h"
#include "../data/base/hash.h"
#include "../data/base/json.h"
#include "../data/base/memory.h"
#include "../data/base/path.h"
#include "../data/models/config.h"
#include "../data/models/safetensors.h"
#include "../data/runs/checkpoint.h"
#include "../data/runs/out_dir.h"

#include <sys/wait.h>

#include "fault.c"
#include "fuzz.h"
#include "scratch.h"
#include "test.h"

// A fork copies the page tables of all the freed memory that the sanitizer keeps.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "quarantine_size_mb=8"; }

static const char *out_dir(void) {
    static char path[256];
    snprintf(path, sizeof path, "%s", scratch("out"));
    return path;
}

// A checkpoint with the same kinds of files as a real one: a stream and small files. The step
// determines the contents.
static bool save_model(Checkpoint *ck, int64_t step, Error *err) {
    static FileWriter w;
    static float data[20000];
    char path[IO_PATH_MAX], state[64];
    const TensorInfo t = {"model.weight", "F32", 2, {100, 200}, 0, 0, 0};
    for (int i = 0; i < 20000; i++) data[i] = (float)(step * 1000 + i);
    if (!checkpoint_path(ck, "model.safetensors", path, sizeof path, err) ||
        !safetensors_create(&w, path, &t, 1, err) || !writer_write(&w, data, 30000, err) ||
        !writer_write(&w, (char *)data + 30000, sizeof data - 30000, err) || !writer_close(&w, err))
        return false;
    checkpoint_register(ck, "model.safetensors", w.size_bytes, w.crc);
    int n = snprintf(state, sizeof state, "{\"step\": %ld}\n", step);
    return checkpoint_write_file(ck, "state.json", state, (size_t)n, err) &&
           checkpoint_write_file(ck, "tokenizer.json", "{\"version\": \"1.0\"}", 18, err);
}

static bool save(int64_t step, const char *name, Error *err) {
    static Checkpoint ck;
    bool ok = checkpoint_begin(&ck, out_dir(), step, name, err) && save_model(&ck, step, err) &&
              checkpoint_publish(&ck, err);
    checkpoint_abort(&ck);
    return ok;
}

static void must_save(int64_t step, const char *name) {
    Error err = {0};
    CHECK_MSG(save(step, name, &err), "%s", err.what);
}

// A run with checkpoints 1 .. n.
static void fresh_run(int n) {
    Error err = {0};
    CHECK_MSG(dir_remove_tree(out_dir(), &err) && dir_create_all(out_dir(), &err), "%s", err.what);
    for (int step = 1; step <= n; step++) must_save(step, NULL);
}

static int parts_moved;
static void count_part(void) { parts_moved++; }

TEST(a_large_file_is_synced_in_parts_and_counts_as_progress) {
    enum { CHUNK = 1 << 20 };
    static unsigned char data[CHUNK];
    static FileWriter w;
    Error err = {0};
    int syncs = 0;
    unlink(scratch("large"));
    CHECK_MSG(writer_open(&w, scratch("large"), &err), "%s", err.what);
    fault_arm(FAULT_IO, 0, 0, false);
    parts_moved = 0;
    io_progress = count_part;
    for (uint64_t done = 0; done <= IO_PART; done += CHUNK)
        CHECK_MSG(writer_write(&w, data, CHUNK, &err), "%s", err.what);
    const bool ok = writer_close(&w, &err);
    io_progress = NULL;
    CHECK_MSG(ok, "%s", err.what);
    for (const char *p = fault_trace(); (p = strstr(p, "fsync ")); p++) syncs++;
    CHECK_MSG(syncs == 2, "%d", syncs);
    const long calls = fault_disarm() - 1;  // without the close
    CHECK_MSG(parts_moved == calls, "%d of %ld", parts_moved, calls);
    unlink(scratch("large"));
}

static int damaged_seen;

// The step of the newest good checkpoint; -1: there is none, -2: none is good.
static int64_t newest(void) {
    char path[IO_PATH_MAX];
    int64_t step = -7, found = -1, *steps;
    int count = 0;
    Error err = {0}, why;
    warnings_off = true;
    damaged_seen = 0;
    CHECK_MSG(checkpoint_list(out_dir(), &steps, &count, &err), "%s", err.what);
    for (int i = 0; i < count; i++) {
        why = (Error){0};
        CHECK(checkpoint_step_path(path, sizeof path, out_dir(), steps[i], &err));
        damaged_seen += !checkpoint_verify(path, &found, &why) || found != steps[i];
        CHECK(!why.code || why.what[0]);
    }
    free(steps);
    return checkpoint_find_newest(out_dir(), path, sizeof path, &step, &err) ? step : -2;
}

static int count_names(const char *part) {
    int n = 0;
    DIR *dir = opendir(out_dir());
    for (struct dirent *e; dir && (e = readdir(dir));) n += strstr(e->d_name, part) != NULL;
    if (dir) closedir(dir);
    return n;
}

// ------------------------------------------------------------------------------------------------
// Save, find, prune

// More than the list has room for at first.
TEST(save_verify_list_find) {
    enum { MANY = 40 };
    int64_t step = -1, *steps;
    int n = 0;
    Error err = {0};
    fresh_run(0);
    CHECK(newest() == -1);
    for (int i = 0; i < MANY; i++) must_save(1 + i * 7 % MANY, NULL);  // in no order
    CHECK(newest() == MANY && damaged_seen == 0);
    CHECK(checkpoint_verify(scratch("out/step-00000020"), &step, &err) && step == 20);
    CHECK(count_names("tmp") == 0 && count_names("step-") == MANY);
    CHECK(checkpoint_list(out_dir(), &steps, &n, &err) && n == MANY);
    for (int i = 0; i < n; i++) CHECK_MSG(steps[i] == MANY - i, "%d: %ld", i, steps[i]);
    free(steps);
    json_t *root = json_read(scratch("out/step-00000007/manifest.json"), 4096, "", &err);
    CHECK_MSG(root && json_array_size(json_member(root, "files")) == 3, "%s", err.what);
    json_decref(root);
}

TEST(names_that_are_not_ours_are_left_alone) {
    static const char *const others[] = {"step-7",
                                         "step-0000000x",
                                         "step-00000100.bak",
                                         "step-00000100.tmp-",
                                         "step-00000100.tmp-1x",
                                         "x.tmp-1",
                                         "final.tmp",
                                         "step-000000001",
                                         "step-99999999999999999999",
                                         "notes.old-1"};
    Error err = {0};
    fresh_run(1);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char path[IO_PATH_MAX];
        CHECK(path_join(path, sizeof path, out_dir(), others[i], &err));
        CHECK(dir_create_all(path, &err));
    }
    CHECK_MSG(checkpoint_recover(out_dir(), &err) && checkpoint_prune(out_dir(), 1, 1, &err), "%s",
              err.what);
    CHECK(newest() == 1 && damaged_seen == 0);
    CHECK(count_names("") == 2 + 1 + (int)(sizeof others / sizeof *others));
}

TEST(prune_keeps_the_newest) {
    Error err = {0};
    fresh_run(6);
    CHECK(checkpoint_prune(out_dir(), 6, 0, &err) && count_names("step-") == 6);
    CHECK(checkpoint_prune(out_dir(), 6, 3, &err) && count_names("step-") == 3 && newest() == 6);
    CHECK(unlink(scratch("out/step-00000005/manifest.json")) == 0);  // a removal that was cut short
    CHECK(dir_create_all(scratch("out/step-00000055.tmp-1"), &err));
    CHECK(checkpoint_prune(out_dir(), 6, 2, &err) && newest() == 6 && damaged_seen == 0);
    CHECK(count_names("step-") == 2 && path_exists(scratch("out/step-00000004")));
    CHECK(checkpoint_prune(out_dir(), 4, 1, &err) && newest() == 6);
    CHECK(path_exists(scratch("out/step-00000004")));  // later ones do not count
}

TEST(remove_all_leaves_what_is_not_ours) {
    Error err = {0};
    fresh_run(0);
    CHECK(checkpoint_remove_all(out_dir(), &err));
    fresh_run(6);
    must_save(6, "final");
    CHECK(file_write_all(scratch("out/log.jsonl"), "x\n", 2, &err));
    CHECK(dir_create_all(scratch("out/step-00000004.tmp-4711"), &err));
    CHECK(rename(scratch("out/step-00000005"), scratch("out/step-00000005.old-4711")) == 0);
    CHECK_MSG(checkpoint_remove_all(out_dir(), &err), "%s", err.what);
    CHECK(newest() == -1 && damaged_seen == 0 && count_names("") == 3);  // log.jsonl, . and ..
}

TEST(a_checkpoint_saved_again_is_replaced) {
    int64_t step = 0;
    Error err = {0};
    fresh_run(0);
    must_save(5, NULL);
    FILE *f = fopen(scratch("out/step-00000005/state.json"), "w");
    CHECK(f && fclose(f) == 0 && newest() == -2 && damaged_seen == 1);
    must_save(5, NULL);
    CHECK(newest() == 5 && damaged_seen == 0 && count_names(".old-") == 0);
    must_save(5, "final");
    must_save(9, "final");
    CHECK(checkpoint_verify(scratch("out/final"), &step, &err) && step == 9);
    CHECK(newest() == 5 && count_names("final") == 1);
}

TEST(recover_restores_a_checkpoint_being_replaced) {
    Error err = {0};
    int64_t step = 0;
    fresh_run(0);
    must_save(5, "final");
    CHECK(rename(scratch("out/final"), scratch("out/final.old-123")) == 0);
    CHECK(dir_create_all(scratch("out/final.tmp-123"), &err));
    CHECK(checkpoint_recover(out_dir(), &err) && count_names("final") == 1);
    CHECK(checkpoint_verify(scratch("out/final"), &step, &err) && step == 5);
    CHECK(dir_create_all(scratch("out/final.old-123"), &err));
    CHECK(checkpoint_recover(out_dir(), &err) && count_names("final") == 1);
    CHECK(checkpoint_verify(scratch("out/final"), &step, &err) && step == 5);
}

// ------------------------------------------------------------------------------------------------
// Damage

static const char *const parts[] = {"manifest.json", "model.safetensors", "state.json",
                                    "tokenizer.json"};

static void part_path(char *path, const char *part) {
    Error err = {0};
    CHECK(path_printf(path, IO_PATH_MAX, &err, "%s/step-00000002/%s", out_dir(), part));
}

TEST(every_flipped_byte_is_found) {
    char path[IO_PATH_MAX];
    fresh_run(2);
    for (int p = 1; p < 4; p++) {  // the manifest: below
        uint64_t n = 0;
        Error err = {0};
        part_path(path, parts[p]);
        char *text = file_read_all(path, 1 << 20, &n, "", &err);
        int fd = open(path, O_RDWR);
        CHECK(text && fd >= 0);
        size_t stride = n > 2000 ? 97 : 1;  // CRC32C does not depend on where
        for (size_t i = 0; i < n; i += stride) {
            char bad = text[i] ^ (char)(1 << test_rng_below(8));
            CHECK(pwrite(fd, &bad, 1, (off_t)i) == 1);
            CHECK_MSG(newest() == 1 && damaged_seen == 1, "%s byte %zu", parts[p], i);
            CHECK(pwrite(fd, &text[i], 1, (off_t)i) == 1);
        }
        free(text);
        close(fd);
    }
    CHECK(newest() == 2 && damaged_seen == 0);
}

static void replace_file(const char *path, const char *text, size_t n) {
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(text, 1, n, file) == n && fclose(file) == 0);
}

TEST(every_bit_of_the_manifest_counts) {
    char path[IO_PATH_MAX], dir[IO_PATH_MAX];
    uint64_t n = 0;
    Error err = {0};
    fresh_run(0);
    must_save(2, NULL);
    part_path(path, "manifest.json");
    part_path(dir, "");
    char *text = file_read_all(path, 1 << 20, &n, "", &err);
    CHECK(text);
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++) {
            Error why = {0};
            text[i] ^= (char)(1 << bit);
            replace_file(path, text, n);
            text[i] ^= (char)(1 << bit);
            CHECK_MSG(!checkpoint_verify(dir, NULL, &why) && why.code == EXIT_BAD_INPUT &&
                          strstr(why.what, "CRC32C: expected its last line"),
                      "byte %zu bit %d: %s", i, bit, why.what);
        }
    free(text);
}

TEST(every_missing_short_or_longer_file_is_found) {
    char path[IO_PATH_MAX];
    Error err = {0};
    for (int p = 0; p < 4; p++)
        for (int how = 0; how < 4; how++) {
            fresh_run(2);
            part_path(path, parts[p]);
            struct stat st;
            CHECK(stat(path, &st) == 0);
            if (how == 0) CHECK(unlink(path) == 0);
            if (how == 1) CHECK(truncate(path, st.st_size - 1) == 0);
            if (how == 2) CHECK(truncate(path, st.st_size + 1) == 0);
            if (how == 3) CHECK(unlink(path) == 0 && dir_create_all(path, &err));
            CHECK_MSG(newest() == 1 && damaged_seen == 1, "%s %d", parts[p], how);
        }
    CHECK(unlink(scratch("out/step-00000001/state.json")) == 0);
    CHECK(newest() == -2 && damaged_seen == 2);
}

TEST(a_renamed_checkpoint_is_refused) {
    fresh_run(2);
    CHECK(rename(scratch("out/step-00000002"), scratch("out/step-00000003")) == 0);
    CHECK(newest() == 1 && damaged_seen == 1);
}

// The checksum of a manifest fits; what it says is wrong.
TEST(manifests_of_other_formats_are_refused) {
    static const struct {
        const char *format, *name, *why;
    } cases[] = {{"unpad checkpoint 1", "state.json", NULL},
                 {"unpad checkpoint 2", "state.json", "format: expected"},
                 {"unpad checkpoint 1", "../out/step-00000002/state.json", "files: expected name"}};
    char text[512], path[IO_PATH_MAX], dir[IO_PATH_MAX];
    fresh_run(0);
    must_save(2, NULL);
    part_path(path, "manifest.json");
    part_path(dir, "");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err = {0};
        size_t n =
            (size_t)snprintf(text, sizeof text,
                             "{\n  \"format\": \"%s\",\n  \"step\": 2,\n  \"files\": "
                             "[{\"name\": \"%s\", \"size_bytes\": 12, \"crc32c\": "
                             "\"%08x\"}]",
                             cases[i].format, cases[i].name, crc32c(0, "{\"step\": 2}\n", 12));
        n += (size_t)snprintf(text + n, sizeof text - n, ",\n  \"manifest_crc32c\": \"%08x\"\n}\n",
                              crc32c(0, text, n));
        replace_file(path, text, n);
        CHECK(checkpoint_verify(dir, NULL, &err) == !cases[i].why);
        CHECK_MSG(!cases[i].why || strstr(err.what, cases[i].why), "%s", err.what);
        replace_file(path, text, n + 1);  // with the zero after it
        CHECK(!checkpoint_verify(dir, NULL, &(Error){0}));
    }
}

TEST(what_a_process_of_the_same_number_left_is_replaced) {
    char path[IO_PATH_MAX];
    Error err = {0};
    fresh_run(0);
    snprintf(path, sizeof path, "%s/step-00000003.tmp-%d/old", out_dir(), (int)getpid());
    CHECK_MSG(dir_create_all(path, &err), "%s", err.what);
    must_save(3, NULL);
    CHECK(newest() == 3 && !path_exists(scratch("out/step-00000003/old")));
}

// Random manifests with a correct checksum: refused, never a crash.
TEST(fuzz_manifest) {
    static const char seed[] =
        "{\n  \"format\": \"unpad checkpoint 1\",\n  \"step\": 2,\n  \"files\": [\n    {\"name\": "
        "\"state.json\", "
        "\"size_bytes\": 12, \"crc32c\": \"00000000\"}\n  ]";
    char text[1024], path[IO_PATH_MAX], dir[IO_PATH_MAX];
    fresh_run(0);
    must_save(2, NULL);
    part_path(path, "manifest.json");
    part_path(dir, "");
    for (int i = 0; i < 20000; i++) {
        size_t n = strlen(seed);
        memcpy(text, seed, n);
        for (uint32_t k = 1 + test_rng_below(3); k > 0; k--) n = fuzz_mutate(text, n, 900);
        for (size_t k = 0; k < n; k++) text[k] += text[k] == 0;
        snprintf(text + n, sizeof text - n, ",\n  \"manifest_crc32c\": \"%08x\"\n}\n",
                 crc32c(0, text, n));
        replace_file(path, text, strlen(text));
        Error err = {0};
        const bool ok = checkpoint_verify(dir, NULL, &err);
        CHECK(ok == (err.code == 0) && (ok || err.what[0]));
        CHECK_MSG(!strstr(err.what, "last line"), "%s", err.what);  // the checksum fits
    }
}

// ------------------------------------------------------------------------------------------------
// The order of calls that survives a power cut at any moment

// Is `line` in the trace after position `from`? Its position, or NULL.
static const char *trace_find(const char *from, const char *verb, const char *path) {
    char line[1200];
    snprintf(line, sizeof line, "%s %s\n", verb, path);
    return strstr(from, line);
}

// Every file was fsynced after its last write, the directory after that, then the rename, then the
// parent.
static const char *order_error(const char *trace, const char *temp, const char *final_dir) {
    char path[IO_PATH_MAX], renamed[2200];
    snprintf(renamed, sizeof renamed, "%s %s", temp, final_dir);
    const char *rename_at = trace_find(trace, "rename", renamed),
               *dir_synced = trace_find(trace, "fsync", temp);
    if (!rename_at || !dir_synced || dir_synced > rename_at)
        return "directory not fsynced before the rename";
    if (!trace_find(rename_at, "fsync", out_dir())) return "parent not fsynced after the rename";
    for (int p = 0; p < 4; p++) {
        snprintf(path, sizeof path, "%s/%s", temp, parts[p]);
        const char *at = trace_find(trace, "create", path),
                   *synced = at ? trace_find(at, "fsync", path) : NULL;
        if (!synced || synced > dir_synced) return "file not fsynced before its directory";
        if (trace_find(synced, "write", path)) return "file written after its fsync";
    }
    const char *manifest = trace_find(trace, "create", path);
    snprintf(path, sizeof path, "%s/manifest.json", temp);
    if (trace_find(trace, "create", path) < manifest) return "manifest not last";
    const char *removed = strstr(rename_at, "unlink ");
    if (removed && removed < trace_find(rename_at, "fsync", out_dir()))
        return "removed before the parent's fsync";
    return NULL;
}

// The trace with its nth fsync line cut out.
static bool without_fsync(char *out, const char *trace, int nth) {
    const char *at = trace;
    for (int i = 0; at && i <= nth; i++) at = strstr(i ? at + 1 : at, "fsync ");
    if (!at) return false;
    memcpy(out, trace, (size_t)(at - trace));
    strcpy(out + (at - trace), strchr(at, '\n') + 1);
    return true;
}

TEST(writes_fsyncs_and_renames_are_in_order) {
    static char temp[IO_PATH_MAX], final_dir[IO_PATH_MAX], cut[FAULT_TRACE];
    Error err = {0};
    fresh_run(1);
    CHECK(path_join(final_dir, sizeof final_dir, out_dir(), "step-00000001", &err));
    CHECK(path_printf(temp, sizeof temp, &err, "%s.tmp-%d", final_dir, (int)getpid()));
    fault_arm(FAULT_IO, 0, 0, false);
    bool ok = save(1, NULL, &err);
    if (fault_disarm() == 0) SKIP("built without -Wl,--wrap");
    CHECK_MSG(ok && !order_error(fault_trace(), temp, final_dir), "%s",
              order_error(fault_trace(), temp, final_dir));
    int n = 0;
    for (; without_fsync(cut, fault_trace(), n); n++)
        CHECK_MSG(order_error(cut, temp, final_dir), "fsync %d is not needed?", n);
    CHECK_MSG(n == 6, "4 files, 2 directories, but %d fsyncs", n);
}

// ------------------------------------------------------------------------------------------------
// Every I/O call fails

static const int errors[] = {EIO, ENOSPC, EINTR, EACCES, FAULT_SHORT};

// After a save of step 2, failed or not, over a good step 1.
static void check_state(bool saved, const Error *err, const char *where) {
    Error again = {0};
    CHECK_MSG(saved == (err->code == 0), "%s: %s", where, err->what);
    CHECK_MSG(saved || ((err->code == EXIT_DISK || err->code == EXIT_BAD_INPUT) && err->what[0]),
              "%s: code %d", where, err->code);
    CHECK_MSG(checkpoint_recover(out_dir(), &again), "%s: %s", where, again.what);
    int64_t step = newest();
    CHECK_MSG(damaged_seen == 0, "%s: half a checkpoint under its final name", where);
    CHECK_MSG(saved ? step == 2 : step == 1 || step == 2, "%s: newest %ld", where, step);
    CHECK_MSG(checkpoint_verify(scratch("out/step-00000001"), NULL, &again), "%s: %s", where,
              again.what);
    CHECK_MSG(count_names(".tmp-") == 0 && count_names(".old-") == 0, "%s", where);
}

// A call of the save itself, not of the clean-up afterwards.
static bool is_vital(const char *name) {
    return name[0] && strstr("open write pread fsync rename mkdir", name);
}

// POSIX: these return EINTR.
static bool may_be_interrupted(const char *name) {
    return name[0] && strstr("open write pread fsync close", name);
}

// replace: step 2 already exists.
static void sweep_one(long nth, int error, bool persistent, bool replace, long *calls) {
    char where[128];
    Error err = {0};
    fresh_run(1);
    if (replace) must_save(2, NULL);
    int fds = fault_open_fds();
    fault_arm(FAULT_IO, nth, error, persistent);
    bool saved = save(2, NULL, &err);
    *calls = fault_disarm();
    snprintf(where, sizeof where, "%s, I/O call %ld of %ld, error %d%s", fault_victim(), nth,
             *calls, error, persistent ? " from then on" : "");
    CHECK_MSG(fault_open_fds() == fds, "%s: file descriptor leak", where);
    CHECK_MSG(saved || error != FAULT_SHORT, "%s: %s", where, err.what);  // short is not a failure
    CHECK_MSG(!saved || error != EIO || !is_vital(fault_victim()), "%s: not noticed", where);
    CHECK_MSG(saved || error != EINTR || persistent || !may_be_interrupted(fault_victim()),
              "%s: one interruption: %s", where, err.what);
    if (replace && !persistent)
        CHECK_MSG(path_exists(scratch("out/step-00000002")), "%s: the old one is gone", where);
    check_state(saved, &err, where);
}

TEST(every_io_call_of_a_save_fails_in_turn) {
    long calls = 0, failures = 0;
    sweep_one(0, 0, false, true, &calls);
    if (calls == 0) SKIP("built without -Wl,--wrap");
    CHECK_MSG(calls >= 30, "%ld calls", calls);
    for (size_t e = 0; e < sizeof errors / sizeof *errors; e++)
        for (int how = 0; how < 4; how++)
            for (long nth = 1, n = 1; nth <= n + 1; nth++, failures++)  // until two are not reached
                sweep_one(nth, errors[e], how & 1, how & 2, &n);
    printf("    %ld I/O calls in a save, %ld failures injected\n", calls, failures);
    CHECK(failures >= 15 * calls);
}

// Calls of prune, recover, final, reading: an error or the right answer, never a wrong one.
TEST(every_io_call_around_a_save_fails_in_turn) {
    char path[IO_PATH_MAX];
    long calls = 0, failures = 0;
    for (int what = 0; what < 4; what++)
        for (long nth = 1; nth == 1 || calls >= nth - 1; nth++, failures++) {
            Error err = {0};
            int64_t step = -7;
            fresh_run(4);
            must_save(3, "final");
            CHECK(dir_create_all(scratch("out/step-00000009.tmp-1"), &err));
            int fds = fault_open_fds();
            fault_arm(FAULT_IO, nth, EIO, nth % 2);
            bool ok = what == 0   ? checkpoint_prune(out_dir(), 4, 2, &err)
                      : what == 1 ? checkpoint_recover(out_dir(), &err)
                      : what == 2
                          ? save(4, "final", &err)
                          : checkpoint_find_newest(out_dir(), path, sizeof path, &step, &err);
            calls = fault_disarm();
            if (calls == 0) SKIP("built without -Wl,--wrap");
            CHECK_MSG(ok == (err.code == 0) && fault_open_fds() == fds, "%d %s %ld", what,
                      fault_victim(), nth);
            if (what == 3) CHECK_MSG(!ok || (step >= -1 && step <= 4), "%ld", step);
            Error again = {0};
            CHECK(checkpoint_recover(out_dir(), &again) && newest() == 4);
            CHECK(checkpoint_verify(scratch("out/final"), &step, &again) &&
                  (step == 3 || step == 4));
        }
    printf("    %ld failures injected\n", failures);
}

// ------------------------------------------------------------------------------------------------
// Every allocation fails

static bool use_memory(int what, Error *err) {
    char path[IO_PATH_MAX];
    int64_t step;
    LlamaConfig c;
    SafetensorsSet s;
    if (what == 0) return save(5, NULL, err);
    if (what == 1) return checkpoint_verify(scratch("out/step-00000001"), NULL, err);
    if (what == 2) return checkpoint_find_newest(out_dir(), path, sizeof path, &step, err);
    if (what == 3) return checkpoint_prune(out_dir(), 2, 2, err);
    if (what == 4) return llama_config_read(&c, scratch("config.json"), err);
    if (!safetensors_open(&s, scratch("out/step-00000001/model.safetensors"), err)) return false;
    safetensors_close(&s);
    return true;
}

// Does the process exit with code 5 when allocation nth is refused, as for an allocation of JSON?
static bool refusal_exits_5(int what, long nth) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        Error err = {0};
        close(2);
        fault_arm(FAULT_ALLOC, nth, ENOMEM, nth % 2);
        use_memory(what, &err);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status) == EXIT_HOST_MEMORY;
}

TEST(every_allocation_fails_in_turn) {
    long sites = 0;
    LlamaConfig c;
    Error setup = {0};
    llama_config_builtin(&c, "llama-3.2-1b");
    char *text = llama_config_text(&c, "float32");
    CHECK(file_write_all(scratch("config.json"), text, strlen(text), &setup));
    free(text);
    for (int what = 0; what < 6; what++) {
        fresh_run(2);
        for (long nth = 1;; nth++, sites++) {
            Error err = {0};
            int fds = fault_open_fds();
            if (refusal_exits_5(what, nth)) {
                CHECK(newest() == 2 && damaged_seen == 0);
                continue;
            }
            fault_arm(FAULT_ALLOC, nth, ENOMEM, nth % 2);
            bool ok = use_memory(what, &err);
            if (fault_disarm() < nth) break;  // not reached: all are done
            CHECK_MSG(!ok && err.code == EXIT_HOST_MEMORY, "%d, allocation %ld: code %d", what, nth,
                      err.code);
            CHECK(fault_open_fds() == fds);
            CHECK(newest() == 2 && damaged_seen == 0);
        }
    }
    if (sites == 0) SKIP("built without -Wl,--wrap");
    printf("    %ld failures injected\n", sites);
    CHECK(sites >= 50);
}

// A file of 40 bytes that claims a header of nearly 100 MB.
TEST(nothing_is_allocated_by_an_unchecked_length) {
    SafetensorsSet s;
    Error err = {0};
    char bytes[40] = "\xff\xe0\xf5\x05\0\0\0\0{}";
    fresh_run(0);
    CHECK(file_write_all(scratch("claims"), bytes, sizeof bytes, &err));
    fault_arm(FAULT_ALLOC, 0, 0, false);
    bool ok = safetensors_open(&s, scratch("claims"), &err);
    long calls = fault_disarm();
    if (calls == 0) SKIP("built without -Wl,--wrap");
    CHECK_MSG(!ok && calls == 1, "%ld allocations", calls);  // the list of files
}

// ------------------------------------------------------------------------------------------------
// kill -9 at every call

// Steps 1 and 2 exist; the child saves 3, prunes to 2, publishes final, and is killed at call nth.
static void doomed(long nth, int how) {
    Error err = {0};
    fault_arm(FAULT_IO, nth, how, false);
    bool ok =
        save(3, NULL, &err) && checkpoint_prune(out_dir(), 3, 2, &err) && save(3, "final", &err);
    _exit(ok ? 0 : 1);
}

static void check_after_kill(long nth, int how) {
    Error err = {0};
    int64_t step = 0;
    for (int i = 1; i <= 3; i++) {
        char dir[IO_PATH_MAX], manifest[IO_PATH_MAX];
        CHECK(path_printf(dir, sizeof dir, &err, "%s/step-%08d", out_dir(), i));
        CHECK(path_join(manifest, sizeof manifest, dir, "manifest.json", &err));
        CHECK_MSG(!path_exists(manifest) || checkpoint_verify(dir, NULL, &err),
                  "killed at %ld: with a manifest, but damaged: %s", nth, err.what);
    }
    CHECK_MSG(checkpoint_recover(out_dir(), &err), "killed at %ld: %s", nth, err.what);
    int64_t found = newest();
    CHECK_MSG(found == 2 || found == 3, "killed at %ld (%d): newest %ld", nth, how, found);
    CHECK_MSG(checkpoint_verify(scratch("out/final"), &step, &err), "killed at %ld: %s", nth,
              err.what);
    CHECK(step == 1 || step == 3);
    must_save(3, NULL);  // the run continues
    CHECK(checkpoint_prune(out_dir(), 3, 2, &err) && newest() == 3 && damaged_seen == 0);
    CHECK(count_names("step-") == 2 && count_names("final") == 1);
}

TEST(killed_at_every_io_call) {
    long calls = 0;
    for (int how = FAULT_KILL; how >= FAULT_KILL_HALF; how--)
        for (long nth = 1;; nth++) {
            int status = 0;
            fresh_run(2);
            must_save(1, "final");
            // the directory's order must not happen to put the manifest first
            CHECK(rename(scratch("out/step-00000001/state.json"), scratch("x")) == 0);
            CHECK(rename(scratch("x"), scratch("out/step-00000001/state.json")) == 0);
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) doomed(nth, how);
            CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
            CHECK_MSG(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 137, "exit %d",
                      WEXITSTATUS(status));
            check_after_kill(nth, how);
            if (how == FAULT_KILL && status == 0)
                calls = nth - 1;  // not reached: it ran to the end
            if (calls > 0 && nth > calls) break;
            if (status == 0 && calls == 0 && how == FAULT_KILL) SKIP("built without -Wl,--wrap");
        }
    printf("    %ld calls\n", calls);
}

// A run with checkpoints 1 to 3 is overwritten and the process killed at each call: the run is
// intact or gone.
TEST(killed_while_all_is_removed) {
    long calls = 0;
    for (long nth = 1, status = 137; status; nth++) {
        Error err = {0};
        int wait_status = 0;
        fresh_run(3);
        must_save(3, "final");
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            fault_arm(FAULT_IO, nth, FAULT_KILL, false);
            _exit(checkpoint_remove_all(out_dir(), &err) ? 0 : 1);
        }
        CHECK(waitpid(child, &wait_status, 0) == child && WIFEXITED(wait_status));
        status = WEXITSTATUS(wait_status);
        CHECK_MSG(status == 0 || status == 137, "exit %ld", status);
        if (status == 0 && nth == 1) SKIP("built without -Wl,--wrap");
        CHECK_MSG(checkpoint_recover(out_dir(), &err), "killed at %ld: %s", nth, err.what);
        const int64_t found = newest();
        CHECK_MSG(damaged_seen == 0 && (found == 3 || (found == -1 && count_names("") == 2)),
                  "killed at %ld: newest %ld, %d names", nth, found, count_names(""));
        CHECK(status != 0 || found == -1);
        calls = nth - 1;
    }
    printf("    %ld calls\n", calls);
}

// ------------------------------------------------------------------------------------------------
// Space

// Of models in shares of the space that is free: an error where not even the last checkpoint, three
// times the model, and final/ fit. Other programs may write in the meantime: nothing is near.
TEST(a_last_checkpoint_without_space_is_an_error) {
    uint64_t free_bytes = 0;
    Error err = {0};
    fresh_run(0);
    CHECK(disk_free_bytes(out_dir(), &free_bytes, &err) && free_bytes > 0);
    const struct {
        double model;
        int final_share, steps, keep;
        bool fits;
    } cases[] = {{0.15, 1, 9, 1, true}, {0.35, 1, 9, 1, false}, {0.27, 1, 9, 1, false},
                 {0.27, 2, 9, 1, true}, {0.9, 1, 0, 1, true},   {1.5, 1, 0, 1, false},
                 {1.5, 2, 0, 1, true},  {0.2, 1, 9, 0, true}};
    warnings_off = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        err = (Error){0};
        const bool fits =
            out_dir_check_space(out_dir(), (uint64_t)(cases[i].model * (double)free_bytes),
                                cases[i].final_share, cases[i].steps, 1, cases[i].keep, &err);
        CHECK_MSG(fits == cases[i].fits && err.code == (fits ? 0 : EXIT_DISK), "case %zu: %s", i,
                  err.what);
    }
    warnings_off = false;
}

TEST_MAIN()
