// data/runs/checkpoint.h: damage is found; every I/O call and allocation fails in turn; the process
// is killed at every call; writes, fsyncs and renames are in an order that survives a power cut.
#include "../data/base/hash.h"
#include "../data/base/json.h"
#include "../data/models/config.h"
#include "../data/models/safetensors.h"
#include "../data/runs/checkpoint.h"
#include "../data/runs/out_dir.h"
#include "fault.c"
#include "scratch.h"
#include "sweep.h"

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

// Saves in any order, damage, removals and replacements that were cut short, and pruning, against
// what should be there
TEST(any_operations_leave_what_is_expected) {
    enum { MOST = 6 };
    for (int round = 0; round < 40; round++) {
        enum { NONE, GOOD, DAMAGED, WITHOUT_MANIFEST } of[MOST + 1] = {NONE};
        int64_t final = -1, step;
        Error err = {0};
        fresh_run(0);
        for (int op = 0; op < 30; op++) {
            const int k = 1 + (int)test_rng_below(MOST), keep = (int)test_rng_below(4);
            const uint32_t what = test_rng_below(8);
            char path[IO_PATH_MAX], other[IO_PATH_MAX];
            CHECK(checkpoint_step_path(path, sizeof path, out_dir(), k, &err));
            if (what < 3) must_save(k, NULL), of[k] = GOOD;
            if (what == 3) must_save(k, "final"), final = k;
            if (what == 4 && of[k] == GOOD) {
                CHECK(path_join(other, sizeof other, path, "state.json", &err));
                CHECK(truncate(other, 3) == 0);
                of[k] = DAMAGED;
            }
            if (what == 5 && (of[k] == GOOD || of[k] == DAMAGED)) {
                CHECK(path_join(other, sizeof other, path, "manifest.json", &err));
                CHECK(unlink(other) == 0);
                of[k] = WITHOUT_MANIFEST;
            }
            if (what == 6) {  // it gets its name back, or its successor stays
                CHECK(path_printf(other, sizeof other, &err, "%s.old-4711", path));
                CHECK(of[k] && keep > 1
                          ? rename(path, other) == 0
                          : dir_create_all(other, &err) && (of[k] || rmdir(other) == 0));
                CHECK(path_printf(other, sizeof other, &err, "%s.tmp-4711", path));
                CHECK(dir_create_all(other, &err) && checkpoint_recover(out_dir(), &err));
            }
            if (what == 7) CHECK(checkpoint_prune(out_dir(), k, keep, &err));
            for (int i = k, kept = 0; what == 7 && keep > 0 && i > 0; i--)
                if (of[i] == WITHOUT_MANIFEST || (of[i] && kept++ >= keep)) of[i] = NONE;
            int last = -1, there = 0, bad = 0;
            for (int i = 1; i <= MOST; i++) {
                last = of[i] == GOOD ? i : last;
                there += of[i] != NONE;
                bad += of[i] > GOOD;
            }
            CHECK_MSG(newest() == (last > 0 || !there ? last : -2) && damaged_seen == bad,
                      "round %d, operation %d (%u of %d)", round, op, what, k);
            CHECK(count_names("") == 2 + there + (final > 0));
            CHECK(final < 0 ||
                  (checkpoint_verify(scratch("out/final"), &step, &err) && step == final));
        }
    }
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

// Is `line` in the trace after position `from`? Its position, or NULL.
static const char *trace_find(const char *from, const char *verb, const char *path) {
    char line[1200];
    snprintf(line, sizeof line, "%s %s\n", verb, path);
    return strstr(from, line);
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
    fault_arm(FAULT_IO, 0, 0, false);
    const bool ok = checkpoint_remove_all(out_dir(), &err);
    fault_disarm();
    CHECK_MSG(ok, "%s", err.what);
    const char *synced = trace_find(fault_trace(), "fsync", out_dir());
    CHECK(synced && !strstr(synced, "rename ") && strstr(synced, "unlink "));
    CHECK(newest() == -1 && damaged_seen == 0 && count_names("") == 3);  // log.jsonl, . and ..
}

// ------------------------------------------------------------------------------------------------
// Damage

static const char *const parts[] = {"manifest.json", "model.safetensors", "state.json",
                                    "tokenizer.json"};

static void part_path(char *path, const char *part) {
    Error err = {0};
    CHECK(path_printf(path, IO_PATH_MAX, &err, "%s/step-00000002/%s", out_dir(), part));
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
            put_file(path, text, n);
            text[i] ^= (char)(1 << bit);
            CHECK_MSG(!checkpoint_verify(dir, NULL, &why) && why.code == EXIT_BAD_INPUT &&
                          strstr(why.what, "CRC32C: expected its last line"),
                      "byte %zu bit %d: %s", i, bit, why.what);
        }
    free(text);
}

// Missing, shorter, longer, no file, or with a flipped bit
TEST(every_damaged_file_is_found) {
    char path[IO_PATH_MAX];
    Error err = {0};
    for (int round = 0; round < 4 * 20; round++) {
        struct stat st;
        const int p = round % 4, how = round / 4;
        fresh_run(2);
        part_path(path, parts[p]);
        CHECK(stat(path, &st) == 0);
        if (how == 0) CHECK(unlink(path) == 0);
        if (how == 1) CHECK(truncate(path, st.st_size - 1) == 0);
        if (how == 2) CHECK(truncate(path, st.st_size + 1) == 0);
        if (how == 3) CHECK(unlink(path) == 0 && dir_create_all(path, &err));
        if (how > 3) {
            FILE *f = fopen(path, "r+");
            const long at = (long)test_rng_below((uint32_t)st.st_size);
            CHECK(f && fseek(f, at, SEEK_SET) == 0);
            const int byte = fgetc(f);
            CHECK(fseek(f, at, SEEK_SET) == 0 && fputc(byte ^ 1 << test_rng_below(8), f) >= 0);
            CHECK(fclose(f) == 0);
        }
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
        const char *format, *name;
        int size_bytes;
        const char *why;  // NULL: a good one
    } cases[] = {
        {"unpad checkpoint 1", "state.json", 12, NULL},
        {"unpad checkpoint 2", "state.json", 12, "format: expected"},
        {"unpad checkpoint 1", "state.json", 11, "expected 11 bytes, found 12"},
        {"unpad checkpoint 1", "../out/step-00000002/state.json", 12, "files: expected name"}};
    char text[512], path[IO_PATH_MAX], dir[IO_PATH_MAX];
    fresh_run(0);
    must_save(2, NULL);
    part_path(path, "manifest.json");
    part_path(dir, "");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err = {0};
        int n = snprintf(text, sizeof text,
                         "{\"format\": \"%s\", \"step\": 2, \"files\": [{\"name\": \"%s\", "
                         "\"size_bytes\": %d, \"crc32c\": \"%08x\"}]",
                         cases[i].format, cases[i].name, cases[i].size_bytes,
                         crc32c(0, "{\"step\": 2}\n", 12));
        n += snprintf(text + n, sizeof text - (size_t)n, ",\n  \"manifest_crc32c\": \"%08x\"\n}\n",
                      crc32c(0, text, (size_t)n));
        put_file(path, text, (size_t)n);
        CHECK(checkpoint_verify(dir, NULL, &err) == !cases[i].why);
        CHECK_MSG(!cases[i].why || strstr(err.what, cases[i].why), "%s", err.what);
        put_file(path, text, (size_t)n + 1);  // with the zero after it
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

// ------------------------------------------------------------------------------------------------
// The order of calls that survives a power cut at any moment

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
// Every call fails, or the process is killed there

static bool replaces;  // step 2 already exists

static void a_good_step_1(void) {
    fresh_run(1);
    if (replaces) must_save(2, NULL);
}

static bool save_2(Error *err) { return save(2, NULL, err); }

// Half a transfer is no failure, and neither is one interruption of a call that POSIX lets return
// EINTR. The calls of a save itself, not of the clean-up after it, fail it.
static void check_save(const SweepCase *c) {
    Error again = {0};
    const bool may_wait = c->victim[0] && strstr("open write pread fsync close", c->victim),
               is_vital = c->victim[0] && strstr("open write pread fsync rename mkdir", c->victim),
               harmless =
                   c->error == FAULT_SHORT || (c->error == EINTR && !c->persistent && may_wait);
    CHECK_MSG(c->ok || !harmless, "%s: %s", c->where, c->err->what);
    CHECK_MSG(!c->ok || c->error != EIO || !is_vital, "%s: not noticed", c->where);
    CHECK_MSG(c->ok || c->err->code == EXIT_DISK || c->err->code == EXIT_BAD_INPUT, "%s: code %d",
              c->where, c->err->code);
    if (replaces && !c->persistent)
        CHECK_MSG(path_exists(scratch("out/step-00000002")), "%s: the old one is gone", c->where);
    CHECK_MSG(checkpoint_recover(out_dir(), &again), "%s: %s", c->where, again.what);
    const int64_t step = newest();
    CHECK_MSG(damaged_seen == 0, "%s: half a checkpoint under its final name", c->where);
    CHECK_MSG(c->ok ? step == 2 : step == 1 || step == 2, "%s: newest %ld", c->where, step);
    CHECK_MSG(checkpoint_verify(scratch("out/step-00000001"), NULL, &again), "%s: %s", c->where,
              again.what);
    CHECK_MSG(count_names(".tmp-") == 0 && count_names(".old-") == 0, "%s", c->where);
}

TEST(every_io_call_of_a_save_fails_in_turn) {
    static const int errors[] = {EIO, ENOSPC, EINTR, EACCES, FAULT_SHORT};
    const Sweep s = {a_good_step_1, save_2, check_save};
    for (int i = 0; i < 20; i++) {
        replaces = i & 2;
        const long calls = sweep(&s, FAULT_IO, errors[i / 4], i & 1);
        CHECK_MSG(calls >= 28, "%ld calls", calls);
    }
}

// Around a save: an error or the right answer, never a wrong one.
static void four_steps(void) {
    Error err = {0};
    fresh_run(4);
    must_save(3, "final");
    CHECK(dir_create_all(scratch("out/step-00000009.tmp-1"), &err));
}

static bool prune_2(Error *err) { return checkpoint_prune(out_dir(), 4, 2, err); }
static bool recover(Error *err) { return checkpoint_recover(out_dir(), err); }
static bool save_final(Error *err) { return save(4, "final", err); }
static bool find_newest(Error *err) {
    char path[IO_PATH_MAX];
    int64_t step = -7;
    const bool ok = checkpoint_find_newest(out_dir(), path, sizeof path, &step, err);
    CHECK_MSG(!ok || (step >= -1 && step <= 4), "%ld", step);
    return ok;
}

static void check_four(const SweepCase *c) {
    int64_t step = 0;
    Error err = {0};
    CHECK_MSG(checkpoint_recover(out_dir(), &err) && newest() == 4, "%s", c->where);
    CHECK(checkpoint_verify(scratch("out/final"), &step, &err) && (step == 3 || step == 4));
    if (c->kind == FAULT_ALLOC && c->victim[0])
        CHECK_MSG(!c->ok && (!c->err->code || c->err->code == EXIT_HOST_MEMORY), "%s", c->where);
}

static bool read_config(Error *err) {
    LlamaConfig c;
    return llama_config_read(&c, scratch("config.json"), err);
}
static bool open_weights(Error *err) {
    SafetensorsSet s;
    const bool ok = safetensors_open(&s, scratch("out/step-00000004/model.safetensors"), err);
    if (ok) safetensors_close(&s);
    return ok;
}

TEST(every_call_around_a_save_fails_in_turn) {
    bool (*const runs[])(Error *) = {prune_2, recover, save_final, find_newest};
    for (size_t i = 0; i < 4; i++) {
        const Sweep s = {four_steps, runs[i], check_four};
        CHECK(sweep(&s, FAULT_IO, EIO, i % 2) > 2);
        CHECK(sweep(&s, FAULT_IO, EIO, i % 2 == 0) > 2);
    }
}

static void nothing(void) {}

TEST(every_allocation_fails_in_turn) {
    bool (*const runs[])(Error *) = {save_final, find_newest, prune_2, read_config, open_weights};
    LlamaConfig c;
    Error err = {0};
    long sites = 0;
    four_steps();
    llama_config_builtin(&c, "llama-3.2-1b");
    char *text = llama_config_text(&c, "float32");
    put_file(scratch("config.json"), text, strlen(text));
    free(text);
    for (size_t i = 0; i < 5; i++) {
        const Sweep s = {runs[i] == prune_2 ? four_steps : nothing, runs[i], check_four};
        sites += sweep(&s, FAULT_ALLOC, ENOMEM, i % 2);
    }
    CHECK_MSG(sites >= 50 && err.code == 0, "%ld allocations", sites);
}

static void two_steps(void) {
    fresh_run(2);
    must_save(1, "final");
    // the directory's order must not happen to put the manifest first
    CHECK(rename(scratch("out/step-00000001/state.json"), scratch("x")) == 0);
    CHECK(rename(scratch("x"), scratch("out/step-00000001/state.json")) == 0);
}

static bool save_prune_and_publish(Error *err) {
    return save(3, NULL, err) && checkpoint_prune(out_dir(), 3, 2, err) && save(3, "final", err);
}

static void check_after_kill(const SweepCase *c) {
    Error err = {0};
    int64_t step = 0;
    for (int i = 1; i <= 3; i++) {
        char dir[IO_PATH_MAX], manifest[IO_PATH_MAX];
        CHECK(path_printf(dir, sizeof dir, &err, "%s/step-%08d", out_dir(), i));
        CHECK(path_join(manifest, sizeof manifest, dir, "manifest.json", &err));
        CHECK_MSG(!path_exists(manifest) || checkpoint_verify(dir, NULL, &err),
                  "%s: with a manifest, but damaged: %s", c->where, err.what);
    }
    CHECK_MSG(checkpoint_recover(out_dir(), &err), "%s: %s", c->where, err.what);
    const int64_t found = newest();
    CHECK_MSG(found == 3 || (found == 2 && !c->ok), "%s: newest %ld", c->where, found);
    CHECK_MSG(checkpoint_verify(scratch("out/final"), &step, &err), "%s: %s", c->where, err.what);
    CHECK(step == 3 || (step == 1 && !c->ok));
    must_save(3, NULL);  // the run continues
    CHECK(checkpoint_prune(out_dir(), 3, 2, &err) && newest() == 3 && damaged_seen == 0);
    CHECK(count_names("step-") == 2 && count_names("final") == 1);
}

static void three_steps(void) {
    fresh_run(3);
    must_save(3, "final");
}

static bool remove_all(Error *err) { return checkpoint_remove_all(out_dir(), err); }

// A run that is overwritten is intact or gone.
static void check_all_or_none(const SweepCase *c) {
    Error err = {0};
    CHECK_MSG(checkpoint_recover(out_dir(), &err), "%s: %s", c->where, err.what);
    const int64_t found = newest();
    CHECK_MSG(damaged_seen == 0 && (found == 3 ? !c->ok : found == -1 && count_names("") == 2),
              "%s: newest %ld, %d names", c->where, found, count_names(""));
}

TEST(killed_at_every_io_call) {
    const Sweep saves = {two_steps, save_prune_and_publish, check_after_kill},
                removes = {three_steps, remove_all, check_all_or_none};
    CHECK(sweep(&saves, FAULT_IO, FAULT_KILL, false) > 60);
    CHECK(sweep(&saves, FAULT_IO, FAULT_KILL_HALF, false) > 60);
    CHECK(sweep(&removes, FAULT_IO, FAULT_KILL, false) > 40);
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
