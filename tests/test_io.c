// data/base: bounds, exactness, locks, strict JSON, checksums and hashes.
#include <math.h>
#include <sys/stat.h>
#include <unistr.h>

#include "../data/base/file.h"
#include "../data/base/hash.h"
#include "../data/base/json.h"
#include "../data/base/machine.h"
#include "../data/base/memory.h"
#include "../data/base/path.h"
#include "scratch.h"

TEST(first_error_wins_and_stays_one_line) {
    Error err = {0};
    CHECK(!error_set(&err, EXIT_DISK, "a\nb", "one\ntwo\x1b[31m \xc3\xa9"));
    CHECK(!error_set(&err, EXIT_USAGE, "", "later"));
    CHECK(err.code == EXIT_DISK);
    CHECK_MSG(strcmp(err.what, "one\\x0atwo\\x1b[31m \xc3\xa9") == 0, "%s", err.what);
    CHECK(strcmp(err.hint, "a\\x0ab") == 0);
    static char longer[5000];
    err = (Error){0};
    memset(longer, '\n', sizeof longer - 1);
    error_set(&err, EXIT_DISK, longer, "%s", longer);
    error_prefix(&err, longer);
    CHECK(strlen(err.what) < sizeof err.what && strlen(err.hint) < sizeof err.hint);
    CHECK(!strchr(err.what, '\n') && !strchr(err.hint, '\n'));
}

TEST(sha256_vectors) {  // FIPS 180-2, appendix B, and lengths around the padding
    static const struct {
        const char *text;
        size_t repeat;
        const char *expected;
    } cases[] = {
        {"abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
        {"a", 55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
        {"a", 56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
        {"a", 64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const size_t n = strlen(cases[c].text) * cases[c].repeat;
        AUTO_FREE char *all = calloc(n + 1, 1);
        char hex[65];
        unsigned char digest[32];
        for (size_t i = 0; i < n; i++) all[i] = cases[c].text[i % strlen(cases[c].text)];
        put_file(scratch("sha"), all, n);
        MUST(file_sha256(scratch("sha"), digest, &err));
        for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
        CHECK_MSG(strcmp(hex, cases[c].expected) == 0, "%zu bytes: %s", n, hex);
    }
}

TEST(hash_vectors) {
    CHECK(crc32c(0, "123456789", 9) == 0xe3069283u && crc32c(0, "", 0) == 0);
    CHECK(mix64(0) == 0 && splitmix64(0) == 0xe220a8397b1dcdafull);  // the published generator's
    CHECK(splitmix64(1) == 0x910a2dec89025cc1ull);                   // first output for seeds 0, 1
    CHECK(fnv1a(FNV1A_START, "", 0) == FNV1A_START);
    CHECK(fnv1a(FNV1A_START, "foobar", 6) == 0x85944171f73967e8ull);
    CHECK(fnv1a(fnv1a(FNV1A_START, "foo", 3), "bar", 3) == 0x85944171f73967e8ull);
}

TEST(crc32c_paths_and_parts_agree) {
    unsigned char data[300];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)test_rng_u32();
    for (size_t offset = 0; offset < 9; offset++)
        for (size_t n = 0; n + offset <= sizeof data; n++) {
            uint32_t whole = crc32c(0, data + offset, n);
            size_t cut = n ? test_rng_below((uint32_t)n) : 0;
            CHECK(whole == ~crc32c_portable(~0u, data + offset, n));
            CHECK(whole == crc32c(crc32c(0, data + offset, cut), data + offset + cut, n - cut));
        }
}

TEST(paths_join_or_refuse) {
    static const char *const joined[][3] = {
        {"a", "b", "a/b"}, {"a/", "b", "a/b"}, {"/", "b", "/b"}, {"", "b", "b"}};
    static const char *const parents[][2] = {{"a/b", "a"},     {"b", "."},   {"/b", "/"},
                                             {"a/b/c", "a/b"}, {"./b", "."}, {"a/", "a"}};
    char out[IO_PATH_MAX], name[IO_PATH_MAX - 4];
    Error err = {0};
    for (int i = 0; i < 4; i++) {
        MUST(path_join(out, joined[i][0], joined[i][1], &err));
        CHECK(strcmp(out, joined[i][2]) == 0);
    }
    for (int i = 0; i < 6; i++) {
        MUST(path_parent(out, parents[i][0], &err));
        CHECK_MSG(strcmp(out, parents[i][1]) == 0, "%s -> %s", parents[i][0], out);
    }
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = 0;
    MUST(path_join(out, "123", name, &err) && strlen(out) == IO_PATH_MAX - 1);
    CHECK(!path_join(out, "1234", name, &err) && err.code == EXIT_USAGE);
}

TEST(writer_writes_what_it_was_given) {
    static const size_t sizes[] = {0, 1, 2, 65535, 65536, 65537, 131072, 131073, 400000};
    static unsigned char data[400000];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)test_rng_u32();
    for (int i = 0; i < 3 * 9; i++) {
        FileWriter w;
        uint64_t n = 0;
        const size_t total = sizes[i % 9];
        const char *path = scratch(printed("written %d", i));
        MUST(writer_open(&w, path, &err));
        for (size_t done = 0, piece; done < total; done += piece) {
            piece = 1 + test_rng_below(test_rng_below(2) ? 100 : 100000);
            if (piece > total - done) piece = total - done;
            MUST(writer_write(&w, data + done, piece, &err));
        }
        MUST(writer_write(&w, NULL, 0, &err) && writer_close(&w, &err));
        CHECK(w.size_bytes == total && w.crc == crc32c(0, data, total));
        AUTO_FREE char *back = file_read_all(path, 1 << 24, &n, "", &(Error){0});
        CHECK_MSG(back && n == total && memcmp(back, data, total) == 0, "total %zu", total);
    }
}

TEST(writer_refuses_an_existing_file_and_removes_its_own) {
    FileWriter w;
    const char *path = scratch("exclusive");
    MUST(writer_open(&w, path, &err) && writer_close(&w, &err));
    REFUSED(EXIT_DISK, "", writer_write(&w, "x", 1, &err));
    REFUSED(EXIT_DISK, path, writer_open(&w, path, &err));
    writer_abort(&w);
    CHECK(path_exists(path));  // not our file
    MUST(unlink(path) == 0 && writer_open(&w, path, &err) && writer_write(&w, "x", 1, &err));
    writer_abort(&w);
    writer_abort(&w);
    CHECK(!path_exists(path));
}

TEST(reads_are_exact) {
    File f;
    char b[8];
    put_file(scratch("ten"), "0123456789", 10);
    MUST(file_open(&f, scratch("ten"), "", &err) && f.size_bytes == 10);
    MUST(file_read_at(&f, b, 4, 6, &err) && memcmp(b, "6789", 4) == 0);
    MUST(file_read_at(&f, b, 0, 10, &err));
    REFUSED(EXIT_BAD_INPUT, "", file_read_at(&f, b, 4, 7, &err));
    REFUSED(EXIT_BAD_INPUT, "", file_read_at(&f, b, 4, UINT64_MAX - 1, &err));
    CHECK(truncate(scratch("ten"), 3) == 0);
    REFUSED(EXIT_BAD_INPUT, "shrank", file_read_at(&f, b, 4, 2, &err));
    file_close(&f);
    file_close(&f);
}

TEST(only_regular_files_are_read) {
    File f;
    Error missing = {0};
    uint64_t n;
    CHECK(!file_open(&f, scratch("missing"), "make it", &missing) &&
          missing.code == EXIT_BAD_INPUT);
    CHECK(strcmp(missing.hint, "make it") == 0 && f.fd == -1);
    REFUSED(EXIT_BAD_INPUT, "", file_open(&f, "/tmp", "", &err));
    CHECK(mkfifo(scratch("fifo"), 0600) == 0);
    REFUSED(EXIT_BAD_INPUT, "", file_open(&f, scratch("fifo"), "", &err));  // at once
    put_file(scratch("big"), "0123456789", 10);
    REFUSED(EXIT_BAD_INPUT, "", file_read_all(scratch("big"), 9, &n, "", &err));
    put_file(scratch("zeros"), "a\0b", 3);
    AUTO_FREE char *bytes = file_read_all(scratch("zeros"), 3, &n, "", &(Error){0});
    CHECK(bytes && n == 3 && bytes[2] == 'b');
    REFUSED(EXIT_BAD_INPUT, "NUL byte at 1", file_read_all(scratch("zeros"), 3, NULL, "", &err));
}

TEST(dir_create_all_and_remove_tree) {
    MUST(dir_create_all(scratch("a/b/c"), &err) && path_is_dir(scratch("a/b/c")));
    MUST(dir_create_all(scratch("a/b/c/"), &err) && dir_create_all("/", &err));
    put_file(scratch("a/b/file"), "x", 1);
    REFUSED(EXIT_USAGE, "", dir_create_all(scratch("a/b/file/d"), &err));
    MUST(dir_create_all(scratch("outside"), &err));
    put_file(scratch("outside/keep"), "x", 1);
    CHECK(symlink(scratch("outside"), scratch("a/link")) == 0);
    MUST(dir_remove_tree(scratch("a"), &err) && !path_exists(scratch("a")));
    CHECK(path_exists(scratch("outside/keep")));  // links are not followed
    MUST(dir_remove_tree(scratch("a"), &err));
    CHECK(symlink(scratch("outside"), scratch("a")) == 0);  // not even the one that is named
    MUST(dir_remove_tree(scratch("a"), &err) && !path_exists(scratch("a")));
    CHECK(path_exists(scratch("outside/keep")));
    REFUSED(EXIT_DISK, "", dir_remove_tree(scratch("outside/keep"), &err));
    MUST(dir_create_all(scratch("a/1/2/3/4/5/6/7/8"), &err) && dir_remove_tree(scratch("a"), &err));
    MUST(dir_create_all(scratch("a/1/2/3/4/5/6/7/8/9/10"), &err));
    REFUSED(EXIT_DISK, "nested too deep", dir_remove_tree(scratch("a"), &err));
}

// The lock is of the open file: a second one of the same process is refused as another process is.
TEST(a_locked_directory_names_its_owner_and_is_missed) {
    DirLock lock, second;
    const char *aside = scratch("aside"), *place = scratch("place");
    MUST(dir_create_all(place, &err) && dir_lock(&lock, place, &err) && lock.fd >= 0);
    MUST(dir_lock_check(&lock, place, &err));
    REFUSED(EXIT_DIR_IN_USE, printed("process %d on", getpid()), dir_lock(&second, place, &err));
    CHECK(rename(place, aside) == 0);
    REFUSED(EXIT_DISK, place, dir_lock_check(&lock, place, &err));
    MUST(dir_create_all(place, &err));
    REFUSED(EXIT_DISK, "", dir_lock_check(&lock, place, &err));
    MUST(rmdir(place) == 0 && rename(aside, place) == 0 && dir_lock_check(&lock, place, &err));
    CHECK(close(lock.fd) == 0 && close(lock.dir_fd) == 0);
    CHECK(path_exists(scratch("place/.lock")));  // unlinked, two could hold locks of two files
    MUST(dir_lock(&lock, place, &err) && lock.fd >= 0);
    CHECK(close(lock.fd) == 0 && close(lock.dir_fd) == 0);
    uint64_t n;
    put_file(scratch("other"), "other", 5);
    CHECK(unlink(scratch("place/.lock")) == 0);
    CHECK(symlink(scratch("other"), scratch("place/.lock")) == 0);
    REFUSED(EXIT_DISK, "regular file, found a symbolic link", dir_lock(&lock, place, &err));
    AUTO_FREE char *text = file_read_all(scratch("other"), 100, &n, "", &(Error){0});
    CHECK(text && strcmp(text, "other") == 0);
    CHECK(unlink(scratch("place/.lock")) == 0 && mkfifo(scratch("place/.lock"), 0600) == 0);
    REFUSED(EXIT_DISK, "", dir_lock(&lock, place, &err));
}

static bool json_accepts(const char *text, size_t n) {
    char *copy = (char *)malloc(n);  // exact size: the sanitizer detects a read past the end
    Error err = {0};
    memcpy(copy, text, n);
    json_t *root = json_parse(copy, n, "t", &err);
    free(copy);
    CHECK((root != NULL) == (err.code == 0) && (root || err.code == EXIT_BAD_INPUT));
    CHECK(root || strncmp(err.what, "t: ", 3) == 0);
    json_decref(root);
    return root != NULL;
}

static void put(const char *name, const char *text) { put_file(scratch(name), text, strlen(text)); }

// The file that names the control groups of this process is one in the scratch directory.
FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode) {
    const char *to = strncmp(path, "/sys/fs/cgroup", 14) == 0 ? printed("cg%s", path + 14)
                     : strcmp(path, "/proc/self/cgroup") == 0 ? "self"
                                                              : NULL;
    return __real_fopen(to ? scratch(to) : path, mode);
}

// The least of what a group and those above it leave, of both versions; in a container the root's
TEST(limits_of_control_groups_are_read) {
    MUST(dir_create_all(scratch("cg/memory/job/step"), &err) &&
         dir_create_all(scratch("cg/slurm/x"), &err));
    put("self", "5:cpu:/x\n3:memory:/job/step\n");
    CHECK(host_memory_free() > 1 << 27);
    put("cg/memory/memory.limit_in_bytes", "90000000\n");
    CHECK(host_memory_free() == 90000000);
    put("cg/memory/job/memory.limit_in_bytes", "10000000\n");
    put("cg/memory/job/memory.usage_in_bytes", "3000000\n");
    CHECK(host_memory_free() == 7000000);
    put("cg/memory/job/memory.stat",
        "active_file 9\ntotal_inactive_file 40\ntotal_active_file 5\n");
    CHECK(host_memory_free() == 7000045);
    put("self", "0::/slurm/x\n");
    put("cg/slurm/x/memory.max", "max\n");
    CHECK(host_memory_free() > 1 << 27);
    put("cg/slurm/memory.max", "5000000\n");
    put("cg/slurm/memory.current", "60\n");
    CHECK(host_memory_free() == 4999940);
    put("cg/slurm/memory.stat", "anon 3\ninactive_file 11\nactive_file 22\n");
    CHECK(host_memory_free() == 4999973);
    put("cg/slurm/memory.max", "50\n");
    CHECK(host_memory_free() == 1 << 20);  // 0 is: unknown
}

static int threads_of_quota(int asked, int ranks) {
    const char *limit;
    const int n = machine_threads(asked, 99, ranks, &limit);
    CHECK((strcmp(limit, "CPU quota") == 0) == (n < 99 && n != asked));
    return n;
}

// The least of the quotas of a group and of those above it, rounded up and divided among ranks
TEST(cpu_quotas_limit_threads) {
    unsetenv("OMP_NUM_THREADS"), unsetenv("OMP_THREAD_LIMIT");
    MUST(dir_create_all(scratch("cg/cpu,cpuacct/job/step"), &err) &&
         dir_create_all(scratch("cg/pod/x"), &err));
    put("self", "4:cpuset:/job\n3:cpu,cpuacct:/job/step\n0::/\n");
    CHECK(threads_of_quota(0, 1) == 99);
    put("cg/cpu,cpuacct/job/step/cpu.cfs_quota_us", "-1\n");
    CHECK(threads_of_quota(0, 1) == 99);
    put("cg/cpu,cpuacct/job/cpu.cfs_quota_us", "250000\n");
    CHECK(threads_of_quota(0, 1) == 3);
    put("cg/cpu,cpuacct/job/cpu.cfs_period_us", "50000\n");
    CHECK(threads_of_quota(0, 1) == 5 && threads_of_quota(0, 2) == 3 &&
          threads_of_quota(0, 9) == 1);
    put("self", "0::/pod/x\n");
    put("cg/pod/x/cpu.max", "max 100000\n");
    CHECK(threads_of_quota(0, 1) == 99);
    put("cg/pod/cpu.max", "400000 100000\n");
    CHECK(threads_of_quota(0, 1) == 4 && threads_of_quota(6, 1) == 6);
    put("cg/cpu.max", "20000 50000\n");
    CHECK(threads_of_quota(0, 1) == 1);
}

// The promises of json.h beyond Jansson's defaults
TEST(json_is_strict) {
    static const char *const good[] = {"{}", "null", "[1000000000000000019884624838656]",
                                       "{\"a\":1,\"A\":2}", "\"\\\\u0000\""};
    static const char *const bad[] = {"",
                                      "{}x",
                                      "[1e400]",
                                      "\"\\u0000\"",
                                      "\"\xed\xa0\x80\"",
                                      "\"\xc3\"",
                                      "{\"a\":1,\"\\u0061\":2}",
                                      "[{\"b\":{\"a\":1,\"c\":0,\"a\":2}}]"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        CHECK_MSG(json_accepts(good[i], strlen(good[i])), "%s", good[i]);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_MSG(!json_accepts(bad[i], strlen(bad[i])), "case %zu: %s", i, bad[i]);
    CHECK(!json_accepts("{}\0", 3) && !json_accepts("\"a\0b\"", 5));
    REFUSED(
        EXIT_BAD_INPUT,
        "t: expected JSON, found an error at line 2, column 4: duplicate object key near '\"a\"'",
        json_parse("{\"a\": 1,\n \"a\": 2}", 17, "t", &err));
}

TEST(json_depth_and_size_are_bounded) {
    static char text[200001];
    Error err = {0};
    for (int depth = 2047; depth <= 2049; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        CHECK_MSG(json_accepts(text, 2 * (size_t)depth) == (depth <= 2048), "%d", depth);
    }
    memset(text, '[', 200000);
    CHECK(!json_accepts(text, 200000));
    put_file(scratch("j"), "{ }", 3);
    json_auto_t *root = json_read(scratch("j"), 3, "", &err);
    CHECK(root && !json_read(scratch("j"), 2, "", &err) && err.code == EXIT_BAD_INPUT);
}

TEST(json_texts_are_those_of_hugging_face) {
    for (int indent = 0; indent <= 2; indent += 2) {
        AUTO_FREE char *text = json_write(json_pack("{s:i, s:[b, n], s:{}, s:f, s:f}", "a", -1, "b",
                                                    true, "c", "d", 1e-5, "e", 5e5),
                                          JSON_INDENT((size_t)indent));
        const char *line =
            "{\"a\": -1, \"b\": [true, null], \"c\": {}, \"d\": 1e-5, \"e\": 500000.0}\n";
        const char *page =
            "{\n  \"a\": -1,\n  \"b\": [\n    true,\n    null\n  ],\n  \"c\": {},\n"
            "  \"d\": 1e-5,\n  \"e\": 500000.0\n}\n";
        CHECK_MSG(strcmp(text, indent ? page : line) == 0, "%s", text);
    }
}

// Writes the item and parses the text, which is in `text` (capacity).
static json_t *there_and_back(json_t *item, char *text, size_t capacity) {
    Error err = {0};
    AUTO_FREE char *written = json_write(item, 0);
    snprintf(text, capacity, "%s", written);
    json_t *root = json_parse(text, strlen(text), "t", &err);
    CHECK_MSG(root, "%s", err.what);
    return root;
}

TEST(json_numbers_survive_a_round_trip) {
    char text[64];
    for (int i = 0; i < 20000; i++) {
        const uint64_t bits = test_rng_u64();
        const float single = (float)test_rng_normal();
        double value;
        memcpy(&value, &bits, 8);
        json_auto_t *a =
            isfinite(value) ? there_and_back(json_real(value), text, sizeof text) : NULL;
        CHECK_MSG(!a || json_number_value(a) == value, "%s", text);
        json_auto_t *b = there_and_back(json_float(single), text, sizeof text);
        CHECK_MSG((float)json_number_value(b) == single && strlen(text) <= 16, "%s", text);
    }
    const float plain[] = {NAN, -INFINITY, 1e-5f};
    for (int i = 0; i < 3; i++) {
        json_decref(there_and_back(json_float(plain[i]), text, sizeof text));
        CHECK(strcmp(text, i < 2 ? "null\n" : "1e-5\n") == 0);
    }
}

TEST(json_strings_of_any_bytes_stay_json) {
    char value[300], text[2048];
    for (int i = 0; i < 5000; i++) {
        const size_t n = test_rng_below(40);
        for (size_t k = 0; k < n; k++) value[k] = (char)(1 + test_rng_below(255));
        value[n] = 0;
        json_auto_t *root = there_and_back(json_text(value), text, sizeof text);
        CHECK(u8_check((const unsigned char *)value, n) ||
              strcmp(json_string_value(root), value) == 0);
        CHECK(strchr(text, '\n') == text + strlen(text) - 1);
    }
    // test_samples.c has more of what is replaced
    json_auto_t *replaced = there_and_back(json_text("a\xff z\x80\xe2\x82x"), text, sizeof text);
    CHECK(strcmp(json_string_value(replaced), "a\xef\xbf\xbd z\xef\xbf\xbd\xef\xbf\xbdx") == 0);
    json_decref(there_and_back(json_text(NULL), text, sizeof text));
    CHECK(strcmp(text, "null\n") == 0);
}

TEST_MAIN()
