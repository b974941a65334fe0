// data/runs/checkpoint.h: damage is found; a save, or a conversion of texts, in which a call fails
// leaves nothing half.
// Allocations that fail, kills and power cuts: test_faults.c and test_power.c.
#include <sys/statvfs.h>

#include "../data/base/hash.h"
#include "../data/models/safetensors.h"
#include "../data/runs/checkpoint.h"
#include "../data/runs/out_dir.h"
#include "../data/shards/dataset.h"
#include "../data/texts/texts.h"
#include "fault.c"
#include "scratch.h"

// A checkpoint with the same kinds of files as a real one: a stream and small files. The step
// determines the contents.
static bool save_model(Checkpoint *ck, int64_t step, Error *err) {
    static FileWriter w;
    static float data[20000];
    char state[64];
    const TensorInfo t = {"model.weight", "F32", 2, {100, 200}, 0, 0, 0};
    for (int i = 0; i < 20000; i++) data[i] = (float)(step * 1000 + i);
    if (!safetensors_create(&w, printed("%s/model.safetensors", ck->dir), &t, 1, err) ||
        !writer_write(&w, data, 30000, err) ||
        !writer_write(&w, (char *)data + 30000, sizeof data - 30000, err) || !writer_close(&w, err))
        return false;
    checkpoint_register(ck, "model.safetensors", w.size_bytes, w.crc);
    int n = snprintf(state, sizeof state, "{\"step\": %ld}\n", step);
    return checkpoint_write_file(ck, "state.json", state, (size_t)n, err) &&
           checkpoint_write_file(ck, "tokenizer.json", "{\"version\": \"1.0\"}", 18, err);
}

static bool save(int64_t step, const char *name, Error *err) {
    static Checkpoint ck;
    bool ok = checkpoint_begin(&ck, scratch("out"), step, name, err) &&
              save_model(&ck, step, err) && checkpoint_publish(&ck, err);
    checkpoint_abort(&ck);
    return ok;
}

static void must_save(int64_t step, const char *name) { MUST(save(step, name, &err)); }

// A run with checkpoints 1 .. n.
static void fresh_run(int n) {
    MUST(dir_remove_tree(scratch("out"), &err) && dir_create_all(scratch("out"), &err));
    for (int step = 1; step <= n; step++) must_save(step, NULL);
}

static int damaged_seen;

// The step of the newest good checkpoint; -1: there is none, -2: none is good.
static int64_t newest(void) {
    char path[IO_PATH_MAX];
    STEPS steps = {0};
    int64_t step = -7, found = -1;
    Error err = {0}, why;
    warnings_off = true;
    damaged_seen = 0;
    MUST(checkpoint_list(&steps, scratch("out"), &err));
    for (int i = 0; i < steps.n; i++) {
        why = (Error){0};
        checkpoint_step_path(path, scratch("out"), steps.list[i]);
        damaged_seen += !checkpoint_verify(path, &found, &why) || found != steps.list[i];
        CHECK(!why.code || why.what[0]);
    }
    return checkpoint_find_newest(scratch("out"), path, &step, &err) ? step : -2;
}

static int count_names(const char *part) {
    int n = 0;
    DIR *dir = opendir(scratch("out"));
    for (struct dirent *e; dir && (e = readdir(dir));) n += strstr(e->d_name, part) != NULL;
    if (dir) closedir(dir);
    return n;
}

static int out_of_order, parts_moved, syncs;

// A checkpoint gets its name when its manifest, and then the directory, have been synced. Before it
// is removed it gets a temporary name for good.
static void watch_order(const char *call, int fd, const char *path, const char *to,
                        const void *data, size_t n, off_t at) {
    char manifest[IO_PATH_MAX + 16];
    const bool is_manifest = path_ends_with(path, "/manifest.json"),
               is_temp = strstr(path, ".tmp-"), renames = strcmp(call, "rename") == 0;
    (void)fd, (void)data, (void)n, (void)at;
    if (renames && is_temp) out_of_order += syncs < 2;
    if (strcmp(call, "sync") == 0) syncs++;
    if (renames ? strstr(to, ".tmp-") != NULL : is_manifest && strcmp(call, "create") == 0)
        syncs = 0;
    if (strcmp(call, "unlink") != 0) return;
    out_of_order += is_temp && syncs == 0;
    CHECK(path_parent(manifest, path, &(Error){0}));
    strcat(manifest, "/manifest.json");
    if (!is_manifest && !is_temp && !strstr(path, ".old-")) out_of_order += path_exists(manifest);
}

static void count_part(void) { parts_moved++; }

TEST(a_large_file_is_synced_in_parts_and_counts_as_progress) {
    enum { CHUNK = 1 << 20 };
    static unsigned char data[CHUNK];
    static FileWriter w;
    Error err = {0};
    MUST(writer_open(&w, scratch("large"), &err));
    syncs = 0;
    fault_arm(FAULT_IO, 0, 0, false);
    io_progress = count_part;
    fault_watch = watch_order;
    for (uint64_t done = 0; done <= IO_PART; done += CHUNK)
        MUST(writer_write(&w, data, CHUNK, &err));
    const bool ok = writer_close(&w, &err);
    io_progress = NULL;
    fault_watch = NULL;
    const long calls = fault_disarm() - 1;  // without the close
    CHECK_MSG(ok && syncs == 2, "%d: %s", syncs, err.what);
    CHECK_MSG(parts_moved == calls, "%d of %ld", parts_moved, calls);
    unlink(scratch("large"));
}

// Saves in any order, also over what a process of the same number left, damage, removals and
// replacements that were cut short, pruning, and the end of it all, against what should be there
TEST(any_operations_leave_what_is_expected) {
    enum { MOST = 6 };
    for (int round = 0; round < 40; round++) {
        enum { NONE, GOOD, DAMAGED, WITHOUT_MANIFEST } of[MOST + 1] = {NONE};
        int64_t final = -1, step;
        int kept_aside = 0;
        Error err = {0};
        fresh_run(0);
        put_file(scratch("out/log.jsonl"), "x", 1);
        fault_watch = watch_order;
        for (int op = 0; op < 30; op++) {
            const int k = 1 + (int)test_rng_below(MOST), keep = (int)test_rng_below(4);
            const uint32_t what = test_rng_below(op % 15 ? 8 : 9);
            const char *path = printed("%s/step-%08d", scratch("out"), k);
            const char *state = printed("%s/state.json", path);
            if (what == 0) {
                MUST(dir_create_all(printed("%s.unpad.tmp-%d", path, getpid()), &err));
                put_file(printed("%s.unpad.tmp-%d/old.json", path, getpid()), "x", 1);
            }
            kept_aside += what < 3 && of[k] == WITHOUT_MANIFEST;
            if (what < 3) must_save(k, NULL), of[k] = GOOD;
            if (what == 0) {  // the manifest is not what the directory happens to have first
                CHECK(!path_exists(printed("%s/old.json", path)));
                MUST(checkpoint_recover(scratch("out"), &err));
                CHECK(rename(state, scratch("x")) == 0 && rename(scratch("x"), state) == 0);
            }
            if (what == 3) must_save(k, "final"), final = k;
            if (what == 4 && of[k] == GOOD) {
                put_file(state, printed("{\"stop\": %d}\n", k), 12);
                of[k] = DAMAGED;
            }
            if (what == 5 && (of[k] == GOOD || of[k] == DAMAGED)) {
                CHECK(unlink(printed("%s/manifest.json", path)) == 0);
                of[k] = WITHOUT_MANIFEST;
            }
            if (what == 6) {  // it gets its name back, or its successor stays
                const char *other = printed("%s.unpad.old-4711", path);
                CHECK(of[k] && keep > 1
                          ? rename(path, other) == 0
                          : dir_create_all(other, &err) && (of[k] || rmdir(other) == 0));
                MUST(dir_create_all(printed("%s.unpad.tmp-4711", path), &err));
                MUST(checkpoint_recover(scratch("out"), &err));
            }
            if (what == 7) MUST(checkpoint_prune(scratch("out"), k, keep, &err));
            for (int i = k, kept = 0; what == 7 && keep > 0 && i > 0; i--)
                if (of[i] && of[i] != WITHOUT_MANIFEST && kept++ >= keep) of[i] = NONE;
            if (what == 8) {
                MUST(dir_create_all(printed("%s.unpad.tmp-4711", path), &err));
                MUST(checkpoint_remove_all(scratch("out"), &err));
                for (int i = 1; i <= MOST; i++) kept_aside += of[i] == WITHOUT_MANIFEST;
                memset(of, NONE, sizeof of);
                final = -1;
            }
            int last = -1, there = 0, bad = 0;
            for (int i = 1; i <= MOST; i++) {
                last = of[i] == GOOD ? i : last;
                there += of[i] != NONE;
                bad += of[i] > GOOD;
            }
            CHECK_MSG(out_of_order == 0, "round %d, operation %d (%u of %d)", round, op, what, k);
            CHECK_MSG(newest() == (last > 0 || !there ? last : -2) && damaged_seen == bad,
                      "round %d, operation %d (%u of %d)", round, op, what, k);
            CHECK(count_names(".kept-") == kept_aside);
            // with ., .. and log.jsonl
            CHECK(count_names("") == 3 + there + (final > 0) + kept_aside);
            CHECK(final < 0 ||
                  (checkpoint_verify(scratch("out/final"), &step, &err) && step == final));
        }
        fault_watch = NULL;
    }
}

// Others' files and directories under names like those of leftovers stay; what killed runs leave
// goes, or gets its name back.
TEST(leftovers_are_known_by_their_marks) {
    char own[2][64],
        others[] =
            "step-7 step-0000000x step-00000100.bak step-00000100.tmp- step-00000100.tmp-1x "
            "x.tmp-1 final.tmp step-000000001 step-99999999999999999999 notes.old-1";
    const char *dirs[] = {"final.old-1", "step-00000003.old-2", "step-00000002.tmp-3", own[0],
                          own[1]};
    snprintf(own[0], sizeof *own, "step-00000002.tmp-%d", getpid());
    snprintf(own[1], sizeof *own, "step-00000001.old-%d", getpid());
    const char *probes[] = {".probe", ".probe-1", ".probe" FILE_REPLACED,
                            ".probe" FILE_REPLACED FILE_REPLACED};  // the last two are ours
    int n = 0;
    fresh_run(1);
    for (char *rest = others, *name; (name = strsep(&rest, " ")); n++)
        MUST(dir_create_all(printed("%s/%s", scratch("out"), name), &err));
    for (int i = 0; i < 5; i++) {
        MUST(dir_create_all(printed("%s/%s", scratch("out"), dirs[i]), &err));
        put_file(printed("%s/%s/notes", scratch("out"), dirs[i]), "x", 1);
    }
    put_file(scratch("out/final.old-1/manifest.json"), "{}", 2);
    for (int i = 0; i < 4; i++) put_file(scratch(printed("out/%s", probes[i])), "pro", 3);
    must_save(4, NULL);
    CHECK(rename(scratch("out/step-00000004"), scratch("out/step-00000004.unpad.old-5")) == 0);
    MUST(dir_create_all(scratch("out/step-00000002.unpad.tmp-6"), &err));
    MUST(checkpoint_recover(scratch("out"), &err) && dir_probe(scratch("out"), &err));
    CHECK(newest() == 4 && damaged_seen == 0);
    must_save(1, NULL);
    must_save(2, NULL);
    MUST(checkpoint_prune(scratch("out"), 4, 1, &err));
    CHECK(newest() == 4 && count_names("step-00000001") == 1);
    for (int i = 0; i < 5; i++)
        CHECK_MSG(path_exists(printed("%s/%s/notes", scratch("out"), dirs[i])), "%s", dirs[i]);
    CHECK_MSG(count_names("") == 2 + 1 + 5 + 2 + n, "%d names", count_names(""));
}

// More files, other sizes, directories, links, no manifest: what no save wrote stays, and its
// directory with it.
TEST(a_directory_with_more_than_a_save_wrote_is_kept) {
    const char *dirs[] = {"step-00000001", "final"},
               *names[] = {"README.md", "state.json", "notes", "link.json", "model.safetensors"};
    for (int how = 0; how < 5; how++) {
        fresh_run(3);
        must_save(3, "final");
        for (int i = 0; i < 2; i++) {
            Error why = {0};
            const char *dir = scratch(printed("out/%s", dirs[i])),
                       *path = printed("%s/%s", dir, names[how]);
            if (how < 2) put_file(path, "mine", 4);
            CHECK(how != 2 || mkdir(path, 0777) == 0);
            CHECK(how != 3 || symlink("state.json", path) == 0);
            CHECK(how != 4 || unlink(printed("%s/manifest.json", dir)) == 0);
            CHECK(!checkpoint_may_remove_all(scratch("out"), &why) && why.code == EXIT_USAGE);
            CHECK_MSG(how == 4 || strstr(why.what, path), "%s", why.what);
        }
        MUST(checkpoint_prune(scratch("out"), 3, 1, &err));
        must_save(4, "final");
        MUST(checkpoint_recover(scratch("out"), &err));
        CHECK(count_names("step-") == 2 && count_names("final") == 2);
        CHECK(path_exists(scratch(printed("out/step-00000001/%s", names[how]))));
        CHECK(path_exists(printed("%s.kept-%d/%s", scratch("out/final"), getpid(), names[how])));
    }
}

// If a checkpoint is a link, the link is removed, and nothing that it points to.
TEST(nothing_behind_links_is_removed) {
    const char *names[] = {"final", "step-00000001", "step-00000002", "step-00000009.unpad.tmp-1",
                           "final.unpad.old-1"};
    const int left[] = {3, 3, 2, 0};
    for (int what = 0; what < 4; what++) {
        fresh_run(1);
        MUST(dir_remove_tree(scratch("behind"), &err));
        CHECK(rename(scratch("out/step-00000001"), scratch("behind")) == 0);
        for (int i = 0; i < 5; i++)
            CHECK(symlink(scratch("behind"), scratch(printed("out/%s", names[i]))) == 0);
        if (what == 0) MUST(checkpoint_recover(scratch("out"), &err));
        if (what == 1) must_save(2, NULL), must_save(3, "final");
        if (what == 2) MUST(checkpoint_prune(scratch("out"), 2, 1, &err));
        if (what == 3) MUST(checkpoint_remove_all(scratch("out"), &err));
        MUST(checkpoint_verify(scratch("behind"), NULL, &err));
        CHECK(count_names("") == 2 + left[what]);
    }
}

static const char *const parts[] = {"manifest.json", "model.safetensors", "state.json",
                                    "tokenizer.json"};

// Missing, shorter, longer, no file, or with a flipped bit; of a directory another name
TEST(every_damaged_file_is_found) {
    for (int round = 0; round < 4 * 40; round++) {
        uint64_t n;
        const int p = round % 4, how = round / 4;
        fresh_run(2);
        const char *path = scratch(printed("out/step-00000002/%s", parts[p]));
        AUTO_FREE char *bytes = file_read_all(path, 1 << 20, &n, "", &(Error){0});
        CHECK(bytes);
        if (how == 0) CHECK(unlink(path) == 0);
        if (how == 1 || how == 2) CHECK(truncate(path, (off_t)n + (how == 1 ? -1 : 1)) == 0);
        if (how == 3) MUST(unlink(path) == 0 && dir_create_all(path, &err));
        bytes[test_rng_below((uint32_t)n)] ^= (char)(1 << test_rng_below(8));
        if (how > 3) put_file(path, bytes, n);
        CHECK_MSG(newest() == 1 && damaged_seen == 1, "%s %d", parts[p], how);
    }
    CHECK(unlink(scratch("out/step-00000001/state.json")) == 0);
    CHECK(newest() == -2 && damaged_seen == 2);
    fresh_run(2);
    CHECK(rename(scratch("out/step-00000002"), scratch("out/step-00000003")) == 0);
    CHECK(newest() == 1 && damaged_seen == 1);
}

// The checksum of a manifest fits; what it says is wrong.
TEST(manifests_of_other_formats_are_refused) {
#define FILE_OF(name_, size_) "\"name\": \"" name_ "\", \"size_bytes\": " #size_
    static const struct {
        const char *format, *file, *why;  // NULL: a good one
    } cases[] = {{"unpad checkpoint 1", FILE_OF("state.json", 12), NULL},
                 {"unpad checkpoint 2", FILE_OF("state.json", 12), "format: expected"},
                 {"unpad checkpoint 1", FILE_OF("state.json", 11), "11 bytes, found 12"},
                 {"unpad checkpoint 1", FILE_OF("../state.json", 12), "files: expected name"}};
    fresh_run(0);
    must_save(2, NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err = {0};
        const char *dir = scratch("out/step-00000002"),
                   *path = scratch("out/step-00000002/manifest.json"),
                   *body = printed(
                       "{\"format\": \"%s\", \"step\": 2, \"files\": [{%s, "
                       "\"crc32c\": \"%08x\"}]",
                       cases[i].format, cases[i].file, crc32c(0, "{\"step\": 2}\n", 12)),
                   *text = printed("%s,\n  \"manifest_crc32c\": \"%08x\"\n}\n", body,
                                   crc32c(0, body, strlen(body)));
        put_file(path, text, strlen(text));
        CHECK(checkpoint_verify(dir, NULL, &err) == !cases[i].why);
        CHECK_MSG(!cases[i].why || strstr(err.what, cases[i].why), "%s", err.what);
        put_file(path, text, strlen(text) + 1);  // with the zero after it
        CHECK(!checkpoint_verify(dir, NULL, &(Error){0}));
    }
}

TEST(every_io_call_of_a_save_fails_in_turn) {
    for (int how = 0; how < 8; how++) {
        const int error = how & 1 ? EIO : EINTR;
        const bool persistent = how & 2, replaces = how & 4;
        long nth = 0, calls;
        do {
            Error err = {0}, again = {0};
            fresh_run(1);
            if (replaces) must_save(2, NULL);
            const int fds = fault_open_fds();
            fault_arm(FAULT_IO, ++nth, error, persistent);
            const bool ok = save(2, NULL, &err);
            calls = fault_disarm();
            // once, EINTR is harmless to these, as POSIX allows it; EIO always counts
            const char *victim = fault.victim, *vital = "open write pread fsync rename mkdir";
            const bool waits = strstr("open write pread fsync close", victim),
                       harmless = error == EINTR && !persistent && waits;
            CHECK_MSG(ok || (victim[0] && !harmless), "%s", err.what);
            CHECK_MSG(!ok || error != EIO || !victim[0] || !strstr(vital, victim), "%s", victim);
            CHECK(ok || err.code == EXIT_DISK || err.code == EXIT_BAD_INPUT);
            CHECK_MSG(fault_open_fds() == fds, "%s: file descriptor leak", victim);
            CHECK(!replaces || persistent || path_exists(scratch("out/step-00000002")));
            CHECK_MSG(checkpoint_recover(scratch("out"), &again), "%s", again.what);
            const int64_t step = newest();
            CHECK_MSG(damaged_seen == 0 && (step == 2 || (step == 1 && !ok)), "newest %ld", step);
            CHECK(count_names(".tmp-") == 0 && count_names(".old-") == 0);
        } while (calls >= nth);
        CHECK_MSG(calls >= 27, "%ld calls", calls);
    }
}

// From I/O call number nth on, all fail; 0: none.
static bool convert(const char *text, long nth, Error *err) {
    const char *in = scratch("text.txt"), *spec = in;
    put_file(in, text, strlen(text));
    OutDir out = {.path = scratch("out")};
    const Options o = {.threads = 1};
    const Texts t = {&o, "demo", 264, true, false, &out};
    fault_arm(FAULT_IO, nth, EIO, true);
    const bool ok = texts_to_shards(&spec, "tokens", 0.01, &t, err);
    const bool made = ok && strcmp(spec, in) != 0;  // else it is refused as shards, later
    if (out.locked) close(out.lock.fd), close(out.lock.dir_fd);
    free((char *)spec);
    return made;
}

// Those of the texts before may stay until the new ones have their name.
TEST(shards_of_a_failed_conversion_are_whole_or_none) {
    long nth = 0, calls;
    do {
        Error err = {0};
        fresh_run(0);
        MUST(convert("one", 0, &err));
        const bool ok = convert("three", ++nth, &err);
        calls = fault_disarm();
        const bool is_there = path_exists(scratch("out/tokens"));
        CHECK(is_there || !ok);
        if (!is_there) continue;
        Dataset ds;
        Error why = {0};
        const DatasetOptions options = {.boundary_token = -1};
        CHECK_MSG(dataset_open(&ds, scratch("out/tokens"), &options, &why), "call %ld: %s", nth,
                  why.what);
        CHECK_MSG(ds.num_tokens == 5 + 2 || (!ok && ds.num_tokens == 3 + 2), "call %ld: %ld tokens",
                  nth, ds.num_tokens);
        CHECK(path_exists(scratch("out/tokens/texts.key")));
        dataset_close(&ds);
    } while (calls >= nth);
    CHECK_MSG(calls > 60, "%ld calls", calls);
}

// A file or directory that cannot be looked at exists, is none of another kind, nor was it renamed.
TEST(a_failed_look_is_told_as_such) {
    const char *dir = scratch("seen"), *why = strerror(EIO);
    const int errors[] = {EACCES, EIO, ELOOP};
    File f;
    DirLock lock;
    for (int i = 0; i < 3; i++) {
        fault_arm(FAULT_IO, 1, errors[i], false);
        const bool exists = path_exists(scratch("nothing"));
        fault_disarm();
        CHECK(exists && !path_exists(scratch("nothing")));
    }
    MUST(dir_create_all(dir, &err) && dir_lock(&lock, dir, &err));
    fault_arm(FAULT_IO, 2, EIO, false);
    REFUSED(EXIT_BAD_INPUT, why, file_open(&f, scratch("seen/.lock"), "", &err));
    fault_arm(FAULT_IO, 2, EIO, false);
    REFUSED(EXIT_DISK, why, io_open_own(scratch("seen/.lock"), O_RDONLY, &err) >= 0);
    fault_arm(FAULT_IO, 2, EIO, false);
    REFUSED(EXIT_DISK, why, dir_lock_check(&lock, dir, &err));
    fault_disarm();
    CHECK(close(lock.fd) == 0 && close(lock.dir_fd) == 0);
}

// Of models in shares of the space that is free: an error where not even the last checkpoint, three
// times the model, and final/ fit. Other programs may write in the meantime: nothing is near.
TEST(a_last_checkpoint_without_space_is_an_error) {
    struct statvfs disk;
    Error err = {0};
    fresh_run(0);
    CHECK(statvfs(scratch("out"), &disk) == 0 && disk.f_bavail > 0);
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
        const double model = cases[i].model * (double)disk.f_bavail * (double)disk.f_frsize;
        const bool fits = out_dir_check_space(scratch("out"), (uint64_t)(3 * model),
                                              (uint64_t)(model / cases[i].final_share),
                                              cases[i].steps, 1, cases[i].keep, &err);
        CHECK_MSG(fits == cases[i].fits && err.code == (fits ? 0 : EXIT_DISK), "case %zu: %s", i,
                  err.what);
    }
    warnings_off = false;
}

TEST_MAIN()
