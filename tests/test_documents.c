// Data sets: every format is read, and every damaged file is refused before its contents are used.
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/base/error.h"
#include "../data/base/file.h"
#include "../data/base/hash.h"
#include "../data/shards/dataset.h"
#include "../data/shards/shard.h"
#include "scratch.h"
#include "test.h"

// -------------------------------------------------------------------------------------------------
// Making files

static void write_bytes(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL);
    CHECK(n == 0 || fwrite(data, 1, n, f) == n);
    CHECK(fclose(f) == 0);
}

typedef struct {
    unsigned char bin[4096], idx[1024], mask[64];
    size_t bin_size, idx_size, mask_size;  // mask_size 0: none
    int width;
} Files;

static const int32_t LENGTHS[] = {5, 1, 0, 7, 30, 0, 2};
enum { NUM_ENDS = 7, NUM_DOCS = 5, NUM_TOKENS = 45, VOCAB = 100 };
enum { BLOCK = 16, NUM_BLOCKS = 3 };  // of checksums: 16, 16 and 13 tokens
enum { ENDS_AT = 40, SUMS_AT = ENDS_AT + 8 * NUM_ENDS };

static void put(void *where, uint64_t value, size_t bytes) { memcpy(where, &value, bytes); }
static void put_word(Files *f, int word, int32_t value) { memcpy(f->bin + 4 * word, &value, 4); }

// Recomputes the checksums of tokens, header and index after a change.
static void seal(Files *f) {
    for (int b = 0; b < NUM_BLOCKS && f->idx_size == SUMS_AT + 4 * NUM_BLOCKS + 4; b++) {
        const int n = b + 1 < NUM_BLOCKS ? BLOCK : NUM_TOKENS - b * BLOCK;
        put(f->idx + SUMS_AT + 4 * b,
            crc32c(0, f->bin + 1024 + b * BLOCK * f->width, (size_t)(n * f->width)), 4);
    }
    put(f->bin + 1020, crc32c(0, f->bin, 1020), 4);
    put(f->idx + 12, crc32c(0, f->bin, 1020), 4);
    put(f->idx + f->idx_size - 4, crc32c(0, f->idx, f->idx_size - 4), 4);
    if (f->mask_size == 0) return;
    put(f->mask + 12, crc32c(0, f->bin, 1020), 4);
    put(f->mask + f->mask_size - 4, crc32c(0, f->mask, f->mask_size - 4), 4);
}

// Token i of the shard is i % VOCAB.
static void make_files(Files *f, int width) {
    memset(f, 0, sizeof *f);
    f->width = width;
    put_word(f, 0, width == 2 ? 20240520 : 20240801);
    put_word(f, 1, width == 2 ? 1 : 7);
    put_word(f, 2, NUM_TOKENS);
    put_word(f, 8, 0x44415055);
    put_word(f, 9, 1);
    put_word(f, 10, VOCAB);
    put_word(f, 11, 3);
    put_word(f, 12, 98);
    put_word(f, 13, 99);
    put_word(f, 14, NUM_ENDS);
    put_word(f, 16, 0x1234);
    for (int i = 0; i < NUM_TOKENS; i++)
        put(f->bin + 1024 + i * width, (uint64_t)(i % VOCAB), (size_t)width);
    f->bin_size = (size_t)(1024 + NUM_TOKENS * width);
    memcpy(f->idx, "UNPADIDX", 8);
    put(f->idx + 8, 2, 4);
    put(f->idx + 16, NUM_ENDS, 8);
    put(f->idx + 24, NUM_TOKENS, 8);
    put(f->idx + 32, BLOCK, 8);
    uint64_t end = 0;
    for (int i = 0; i < NUM_ENDS; i++)
        put(f->idx + ENDS_AT + 8 * i, end += (uint64_t)LENGTHS[i], 8);
    f->idx_size = SUMS_AT + 4 * NUM_BLOCKS + 4;
    seal(f);
}

// Some tokens that are not the first of a document, and the last token of all.
static const int TARGETS[] = {3, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 44};
enum { NUM_TARGETS = 14, BITS_AT = 32 };

static void make_masked_files(Files *f, int width) {
    make_files(f, width);
    put_word(f, 11, 7);
    memcpy(f->mask, "UNPADMSK", 8);
    put(f->mask + 8, 1, 4);
    put(f->mask + 16, NUM_TOKENS, 8);
    put(f->mask + 24, NUM_TARGETS, 8);
    for (int i = 0; i < NUM_TARGETS; i++)
        f->mask[BITS_AT + TARGETS[i] / 8] |= (unsigned char)(1 << TARGETS[i] % 8);
    f->mask_size = BITS_AT + (NUM_TOKENS + 7) / 8 + 4;
    seal(f);
}

// A version 1 index, without checksums of tokens.
static void make_files_v1(Files *f, int width) {
    make_files(f, width);
    put(f->idx + 8, 1, 4);
    memmove(f->idx + 32, f->idx + ENDS_AT, 8 * NUM_ENDS);
    f->idx_size = 32 + 8 * NUM_ENDS + 4;
    seal(f);
}

static void save(const Files *f, const char *stem) {
    char name[128];
    snprintf(name, sizeof name, "%s.bin", stem);
    write_bytes(scratch(name), f->bin, f->bin_size);
    snprintf(name, sizeof name, "%s.idx", stem);
    write_bytes(scratch(name), f->idx, f->idx_size);
    snprintf(name, sizeof name, "%s.mask", stem);
    if (f->mask_size)
        write_bytes(scratch(name), f->mask, f->mask_size);
    else
        remove(scratch(name));
}

// -------------------------------------------------------------------------------------------------
// Opening them

static bool opens(const char *path, Error *err) {
    Dataset ds;
    const DatasetOptions options = dataset_options();
    memset(err, 0, sizeof *err);
    if (!dataset_open(&ds, path, &options, err)) return false;
    dataset_close(&ds);
    return true;
}

static void check_opens(const char *path) {
    Error err;
    const bool ok = opens(path, &err);
    CHECK_MSG(ok, "%s", err.what);
}

static void check_refused(const char *path, const char *because) {
    Error err;
    const bool ok = opens(path, &err);
    CHECK_MSG(!ok, "%s: opened, expected '%s'", path, because);
    CHECK_MSG(err.code == EXIT_BAD_INPUT && strstr(err.what, because), "%s", err.what);
}

static bool refused_by_size_or_sum(const char *path) {
    Error err;
    return !opens(path, &err) && err.code == EXIT_BAD_INPUT && strlen(err.what) > 10;
}

// Reads the five documents of make_files, whole and every part of them.
static void check_documents(Dataset *ds, int64_t first_doc) {
    int32_t out[64];
    Error err = {0};
    int64_t start = 0, doc = first_doc;
    for (int i = 0; i < NUM_ENDS; i++) {
        if (LENGTHS[i] == 0) continue;
        CHECK(dataset_doc_length(ds, doc) == LENGTHS[i]);
        for (int64_t from = 0; from <= LENGTHS[i]; from++)
            for (int64_t n = 0; from + n <= LENGTHS[i]; n++) {
                CHECK_MSG(dataset_read(ds, doc, from, n, out, &err), "%s", err.what);
                for (int64_t k = 0; k < n; k++) CHECK(out[k] == start + from + k);
            }
        start += LENGTHS[i];
        doc++;
    }
}

// Opens NAME.bin, whose documents are those of f, and describes it.
static void open_documents(Dataset *ds, const Files *f, const char *name, char text[256]) {
    Error err = {0};
    const DatasetOptions options = dataset_options();
    char bin[64];
    snprintf(bin, sizeof bin, "%s.bin", name);
    save(f, name);
    CHECK_MSG(dataset_open(ds, scratch(bin), &options, &err), "%s", err.what);
    CHECK(ds->num_docs == NUM_DOCS && ds->num_empty == 2);
    check_documents(ds, 0);
    dataset_describe(ds, text, 256);
}

TEST(own_shards_of_both_widths) {
    for (int width = 2; width <= 4; width += 2) {
        Files f;
        Dataset ds;
        char text[256];
        make_files(&f, width);
        open_documents(&ds, &f, "own", text);
        CHECK(ds.num_tokens == NUM_TOKENS && ds.vocab_size == VOCAB);
        CHECK(ds.bos == 98 && ds.eos == 99);
        CHECK_MSG(strstr(text, "5 documents, 45 tokens, 2 empty"), "%s", text);
        CHECK_MSG(!strstr(text, "unchecked"), "%s", text);
        dataset_close(&ds);
    }
}

TEST(indexes_of_version_1_are_read_and_reported_as_unchecked) {
    for (int width = 2; width <= 4; width += 2) {
        Files f;
        Dataset ds;
        char text[256];
        make_files_v1(&f, width);
        open_documents(&ds, &f, "old", text);
        CHECK_MSG(strstr(text, "tokens unchecked"), "%s", text);
        dataset_close(&ds);
        for (size_t n = f.idx_size; n-- > 0;) {
            CHECK(truncate(scratch("old.idx"), (off_t)n) == 0);
            CHECK_MSG(refused_by_size_or_sum(scratch("old.bin")), "%zu", n);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Damage

TEST(every_prefix_and_every_tail_is_refused) {
    for (int width = 2; width <= 4; width += 2)
        for (int which = 0; which < 2; which++) {
            Files f;
            make_files(&f, width);
            save(&f, "cut");
            const char *path = scratch("cut.bin"), *victim = scratch(which ? "cut.idx" : "cut.bin");
            const size_t size = which ? f.idx_size : f.bin_size;
            check_opens(path);
            for (size_t longer = 1; longer <= 64; longer++) {
                CHECK(truncate(victim, (off_t)(size + longer)) == 0);
                CHECK_MSG(refused_by_size_or_sum(path), "+%zu", longer);
            }
            for (size_t n = size; n-- > 0;) {
                CHECK(truncate(victim, (off_t)n) == 0);
                CHECK_MSG(refused_by_size_or_sum(path), "%zu of %zu", n, size);
            }
            CHECK(unlink(victim) == 0);
            CHECK(refused_by_size_or_sum(path));
        }
}

TEST(every_bit_of_header_and_index_counts) {
    for (int which = 0; which < 2; which++) {
        Files f;
        make_files(&f, 2);
        save(&f, "bits");
        const char *path = scratch("bits.bin"), *victim = scratch(which ? "bits.idx" : "bits.bin");
        const size_t size = which ? f.idx_size : 1024;
        const int fd = open(victim, O_RDWR);
        CHECK(fd >= 0);
        for (size_t bit = 0; bit < 8 * size; bit++) {
            const unsigned char good = which ? f.idx[bit / 8] : f.bin[bit / 8];
            const unsigned char bad = good ^ (unsigned char)(1 << bit % 8);
            CHECK(pwrite(fd, &bad, 1, (off_t)(bit / 8)) == 1);
            CHECK_MSG(refused_by_size_or_sum(path), "file %d, byte %zu, bit %zu", which, bit / 8,
                      bit % 8);
            CHECK(pwrite(fd, &good, 1, (off_t)(bit / 8)) == 1);
        }
        CHECK(close(fd) == 0);
        check_opens(path);
    }
}

// Wrong values with correct checksums, as from a broken or hostile writer.
#define FIELD(change_, because_)                       \
    do {                                               \
        Files f;                                       \
        make_files(&f, 2);                             \
        change_;                                       \
        seal(&f);                                      \
        save(&f, "field");                             \
        check_refused(scratch("field.bin"), because_); \
    } while (0)

TEST(header_fields_are_validated) {
    static const int32_t counts[] = {0, 1, NUM_TOKENS - 1, NUM_TOKENS + 1, 1 << 30, INT32_MAX};
    static const uint64_t docs[] = {0,          NUM_ENDS - 1, NUM_ENDS + 1, 1ull << 31, 1ull << 40,
                                    1ull << 60, 1ull << 61,   1ull << 63,   UINT64_MAX};
    for (size_t i = 0; i < 6; i++) FIELD(put_word(&f, 2, counts[i]), "expected exactly");
    for (size_t i = 0; i < 9; i++) FIELD(put(f.bin + 56, docs[i], 8), "expected exactly");
    FIELD(put_word(&f, 2, -1), "-1 tokens");
    FIELD(put_word(&f, 2, INT32_MIN), "tokens");
    FIELD(put_word(&f, 1, 2), "version 1");
    FIELD(put_word(&f, 1, 7), "version 1");
    FIELD(put_word(&f, 0, 20240801), "version 7");
    FIELD((put_word(&f, 0, 20240801), put_word(&f, 1, 7)), "expected exactly");
    FIELD(put_word(&f, 9, 2), "shard version");
    FIELD(put_word(&f, 10, 0), "vocabulary 0");
    FIELD(put_word(&f, 10, -5), "vocabulary -5");
    FIELD(put_word(&f, 10, 99), "EOS 99");
    FIELD(put_word(&f, 12, VOCAB), "BOS 100");
    FIELD(put_word(&f, 13, -2), "EOS -2");
}

TEST(index_fields_are_validated) {
    FIELD(put(f.idx + 16, NUM_ENDS + 1, 8), "another shard");
    FIELD(put(f.idx + 24, NUM_TOKENS + 1, 8), "another shard");
    FIELD(put(f.idx + 8, 3, 4), "version 1 or 2");
    FIELD(put(f.idx + 8, 0, 4), "version 1 or 2");
    FIELD(put(f.idx + 8, 1, 4), "expected exactly");
    FIELD(put(f.idx + 32, 0, 8), "found 0");
    FIELD(put(f.idx + 32, UINT64_MAX, 8), "found 18446744073709551615");
    FIELD(put(f.idx + 32, BLOCK - 8, 8), "expected exactly");
    FIELD(put(f.idx + ENDS_AT, NUM_TOKENS + 1, 8), "document 0 ends");
    FIELD(put(f.idx + ENDS_AT, UINT64_MAX, 8), "document 0 ends");
    FIELD(put(f.idx + ENDS_AT + 8 * 3, 5, 8), "document 3 ends");
    FIELD(put(f.idx + ENDS_AT + 8 * 6, NUM_TOKENS - 1, 8), "documents end at token 44");
    FIELD(put(f.idx + ENDS_AT + 8 * 6, NUM_TOKENS - 3, 8), "document 6 ends");
}

TEST(an_index_belongs_to_its_shard) {
    Files f, g;
    make_files(&f, 2);
    make_files(&g, 2);
    put_word(&g, 16, 0x9999);  // another tokenizer, the same sizes
    seal(&g);
    save(&f, "mine");
    save(&g, "yours");
    check_opens(scratch("mine.bin"));
    CHECK(rename(scratch("yours.idx"), scratch("mine.idx")) == 0);
    check_refused(scratch("mine.bin"), "another shard");
}

TEST(a_bad_token_is_reported_at_any_position) {
    for (int width = 2; width <= 4; width += 2)
        for (int bad = 0; bad < NUM_TOKENS; bad++) {
            Files f;
            Dataset ds;
            Error err = {0};
            const DatasetOptions options = dataset_options();
            int32_t out[64];
            char expected[128];
            make_files(&f, width);
            const uint64_t id = bad % 2 ? VOCAB : width == 2 ? 65535 : 0xffffffff;
            put(f.bin + 1024 + bad * width, id, (size_t)width);
            seal(&f);  // a writer's mistake, not a damaged file
            save(&f, "bad");
            CHECK_MSG(dataset_open(&ds, scratch("bad.bin"), &options, &err), "%s", err.what);
            int64_t start = 0, failed = 0;
            for (int64_t doc = 0; doc < NUM_DOCS; doc++) {
                const int64_t n = dataset_doc_length(&ds, doc);
                if (!dataset_read(&ds, doc, 0, n, out, &err)) {
                    failed++;
                    snprintf(expected, sizeof expected,
                             "bad.bin: document %d, token %d: expected an "
                             "id below 100, found %llu",
                             (int)doc, (int)(bad - start), (unsigned long long)id);
                    CHECK_MSG(strstr(err.what, expected), "%s", err.what);
                    CHECK(err.code == EXIT_BAD_INPUT && start <= bad && bad < start + n);
                }
                start += n;
            }
            CHECK(failed == 1);
            dataset_close(&ds);
        }
}

// Which documents have tokens in block b
static bool doc_in_block(const Dataset *ds, int64_t doc, int b) {
    int64_t start = 0;
    for (int64_t d = 0; d < doc; d++) start += dataset_doc_length(ds, d);
    const int64_t end = start + dataset_doc_length(ds, doc);
    return start < (b + 1) * BLOCK && end > b * BLOCK;
}

TEST(every_flipped_bit_of_the_tokens_is_found) {
    for (int width = 2; width <= 4; width += 2) {
        Files f;
        Dataset ds;
        Error err = {0};
        const DatasetOptions options = dataset_options();
        int32_t out[64];
        make_files(&f, width);
        save(&f, "flip");
        const char *path = scratch("flip.bin");
        const int fd = open(path, O_RDWR);
        CHECK(fd >= 0 && dataset_open(&ds, path, &options, &err));
        for (size_t bit = 0; bit < (size_t)(8 * NUM_TOKENS * width); bit++) {
            const size_t at = 1024 + bit / 8;
            const unsigned char bad = f.bin[at] ^ (unsigned char)(1 << bit % 8);
            const int b = (int)(bit / 8) / width / BLOCK;
            char range[64];
            CHECK(pwrite(fd, &bad, 1, (off_t)at) == 1);
            snprintf(range, sizeof range, "flip.bin: bytes %d to %d: ", 1024 + b * BLOCK * width,
                     1024 + (b + 1 < NUM_BLOCKS ? (b + 1) * BLOCK : NUM_TOKENS) * width - 1);
            for (int64_t doc = 0; doc < NUM_DOCS; doc++) {
                err = (Error){0};
                const bool ok = dataset_read(&ds, doc, 0, dataset_doc_length(&ds, doc), out, &err);
                CHECK_MSG(ok == !doc_in_block(&ds, doc, b), "bit %zu, document %d", bit, (int)doc);
                CHECK_MSG(ok || (err.code == EXIT_BAD_INPUT && strstr(err.what, range)),
                          "expected '%s', found '%s'", range, err.what);
            }
            CHECK(pwrite(fd, &f.bin[at], 1, (off_t)at) == 1);
        }
        err = (Error){0};
        CHECK(dataset_read(&ds, 0, 0, 5, out, &err) && close(fd) == 0);
        dataset_close(&ds);
    }
}

TEST(a_shard_that_shrinks_is_noticed) {
    Files f;
    Dataset ds;
    Error err = {0};
    const DatasetOptions options = dataset_options();
    int32_t out[64];
    make_files(&f, 2);
    save(&f, "shrink");
    CHECK(dataset_open(&ds, scratch("shrink.bin"), &options, &err));
    CHECK(truncate(scratch("shrink.bin"), 1024 + 2 * BLOCK) == 0);
    CHECK(dataset_read(&ds, 0, 0, 3, out, &err));
    CHECK(!dataset_read(&ds, 4, 0, 2, out, &err) && err.code == EXIT_BAD_INPUT);
    file_close(&ds.shards[0].file);  // the same when it is opened again
    err = (Error){0};
    CHECK(!dataset_read(&ds, 0, 0, 3, out, &err) && strstr(err.what, "as before"));
    dataset_close(&ds);
}

// -------------------------------------------------------------------------------------------------
// Other formats

// llm.c: none of our fields, no index, documents begin with token 3 (or end with it).
static void make_llmc(Files *f, int width, int32_t token, bool ends) {
    make_files(f, width);
    memset(f->bin + 12, 0, 1012);
    int i = 0;
    for (int d = 0; d < NUM_ENDS; d++)
        for (int k = 0; k < LENGTHS[d]; k++, i++) {
            const bool border = ends ? k + 1 == LENGTHS[d] : k == 0;
            put(f->bin + 1024 + i * width, border ? (uint64_t)token : 200 + (uint64_t)i,
                (size_t)width);
        }
}

static void check_scanned(const char *path, const DatasetOptions *options, int token) {
    Dataset ds;
    Error err = {0};
    char text[256], expected[64];
    int64_t doc = 0;
    CHECK_MSG(dataset_open(&ds, path, options, &err), "%s", err.what);
    CHECK(ds.num_docs == NUM_DOCS && ds.num_tokens == NUM_TOKENS);
    for (int i = 0; i < NUM_ENDS; i++)
        if (LENGTHS[i] > 0) CHECK(dataset_doc_length(&ds, doc++) == LENGTHS[i]);
    dataset_describe(&ds, text, sizeof text);
    snprintf(expected, sizeof expected, "scanning for token %d", token);
    CHECK_MSG(strstr(text, expected), "%s", text);
    CHECK((options->boundary_ends ? ds.eos : ds.bos) == token);
    dataset_close(&ds);
}

TEST(llmc_shards_are_scanned) {
    Files f;
    DatasetOptions options = dataset_options();
    make_llmc(&f, 2, 50256, false);
    write_bytes(scratch("v1.bin"), f.bin, f.bin_size);
    check_scanned(scratch("v1.bin"), &options, 50256);
    make_llmc(&f, 4, 128000, false);
    write_bytes(scratch("v7.bin"), f.bin, f.bin_size);
    check_scanned(scratch("v7.bin"), &options, 128000);
    for (int ends = 0; ends < 2; ends++) {
        make_llmc(&f, 2, 7, ends);
        write_bytes(scratch("own_token.bin"), f.bin, f.bin_size);
        options.boundary_token = 7;
        options.boundary_ends = ends;
        check_scanned(scratch("own_token.bin"), &options, 7);
    }
    check_refused(scratch("own_token.bin"), "token 50256 is nowhere");
}

// The scan reads blocks: a border at every position around the end of the first one.
TEST(scanning_crosses_blocks) {
    enum { BLOCK = 1 << 18, TOKENS = BLOCK + 100 };
    static unsigned char big[1024 + 2 * TOKENS];
    DatasetOptions options = dataset_options();
    options.boundary_token = 9;
    memset(big, 0, sizeof big);
    put(big, 20240520, 4);
    put(big + 4, 1, 4);
    put(big + 8, TOKENS, 4);
    for (int64_t border = BLOCK - 2; border <= BLOCK + 2; border++) {
        Dataset ds;
        Error err = {0};
        put(big + 1024 + 2 * border, 9, 2);
        write_bytes(scratch("big.bin"), big, sizeof big);
        put(big + 1024 + 2 * border, 0, 2);
        CHECK_MSG(dataset_open(&ds, scratch("big.bin"), &options, &err), "%s", err.what);
        CHECK(ds.num_docs == 2 && dataset_doc_length(&ds, 0) == border);
        dataset_close(&ds);
    }
}

TEST(llmc_shards_of_wrong_size_are_refused) {
    Files f;
    make_llmc(&f, 2, 50256, false);
    write_bytes(scratch("v1.bin"), f.bin, f.bin_size);
    for (size_t n = f.bin_size; n-- > 0;) {
        CHECK(truncate(scratch("v1.bin"), (off_t)n) == 0);
        CHECK_MSG(refused_by_size_or_sum(scratch("v1.bin")), "%zu", n);
    }
    make_llmc(&f, 2, 50256, false);
    put_word(&f, 77, 1);
    write_bytes(scratch("v1.bin"), f.bin, f.bin_size);
    check_refused(scratch("v1.bin"), "header word 77");
}

TEST(datatrove_sets) {
    for (int width = 2; width <= 4; width += 2) {
        Files f;
        Dataset ds;
        Error err = {0};
        const DatasetOptions options = dataset_options();
        make_files(&f, width);
        write_bytes(scratch("a.ds"), f.bin + 1024, f.bin_size - 1024);
        write_bytes(scratch("a.ds.index"), f.idx + ENDS_AT, 8 * NUM_ENDS);
        CHECK_MSG(dataset_open(&ds, scratch("a.ds"), &options, &err), "%s", err.what);
        CHECK(ds.num_docs == NUM_DOCS && ds.num_empty == 2);
        check_documents(&ds, 0);
        dataset_close(&ds);
        for (size_t n = 8 * NUM_ENDS; n-- > 0;) {
            write_bytes(scratch("a.ds.index"), f.idx + ENDS_AT, n);
            // one document fewer cannot be detected if that document is empty
            if (n != 8 * (NUM_ENDS - 1))
                CHECK_MSG(refused_by_size_or_sum(scratch("a.ds")), "%zu", n);
        }
        write_bytes(scratch("a.ds.index"), f.idx + ENDS_AT, 8 * NUM_ENDS);
        for (size_t n = f.bin_size - 1024; n-- > 0;) {
            CHECK(truncate(scratch("a.ds"), (off_t)n) == 0);
            if (n != 2 * NUM_TOKENS) CHECK_MSG(refused_by_size_or_sum(scratch("a.ds")), "%zu", n);
        }
    }
}

static size_t make_megatron(unsigned char *idx, int width) {
    memset(idx, 0, 1024);
    memcpy(idx, "MMIDIDX", 7);
    put(idx + 9, 1, 8);
    idx[17] = width == 2 ? 8 : 4;
    put(idx + 18, NUM_ENDS, 8);
    put(idx + 26, NUM_ENDS + 1, 8);
    uint64_t start = 0;
    for (int i = 0; i < NUM_ENDS; i++) {
        put(idx + 34 + 4 * i, (uint64_t)LENGTHS[i], 4);
        put(idx + 34 + 4 * NUM_ENDS + 8 * i, start * (uint64_t)width, 8);
        put(idx + 34 + 12 * NUM_ENDS + 8 * (i + 1), (uint64_t)i + 1, 8);
        start += (uint64_t)LENGTHS[i];
    }
    return 34 + 12 * NUM_ENDS + 8 * (NUM_ENDS + 1);
}

TEST(megatron_sets) {
    for (int width = 2; width <= 4; width += 2) {
        Files f;
        unsigned char idx[1024];
        Dataset ds;
        Error err = {0};
        const DatasetOptions options = dataset_options();
        make_files(&f, width);
        const size_t size = make_megatron(idx, width);
        write_bytes(scratch("m.bin"), f.bin + 1024, f.bin_size - 1024);
        write_bytes(scratch("m.idx"), idx, size);
        CHECK_MSG(dataset_open(&ds, scratch("m.bin"), &options, &err), "%s", err.what);
        CHECK(ds.num_docs == NUM_DOCS && ds.num_empty == 2);
        check_documents(&ds, 0);
        dataset_close(&ds);
        for (size_t n = size; n-- > 0;) {
            CHECK(truncate(scratch("m.idx"), (off_t)n) == 0);
            CHECK_MSG(refused_by_size_or_sum(scratch("m.bin")), "%zu", n);
        }
        // every byte of the index changed: never accepted with different documents
        for (size_t i = 0; i < size; i++) {
            idx[i] ^= 0x40;
            write_bytes(scratch("m.idx"), idx, size);
            idx[i] ^= 0x40;
            CHECK_MSG(refused_by_size_or_sum(scratch("m.bin")), "byte %zu", i);
        }
    }
}

TEST(llmq_files) {
    Files f;
    Dataset ds;
    Error err = {0};
    DatasetOptions options = dataset_options();
    make_files(&f, 4);
    memset(f.bin, 0, 1024);
    memcpy(f.bin, "BIN.TOK\n", 8);
    put_word(&f, 2, 2);
    put_word(&f, 3, 4);
    put_word(&f, 4, NUM_TOKENS);
    put_word(&f, 5, VOCAB);
    write_bytes(scratch("q.bin"), f.bin, f.bin_size);
    CHECK(!dataset_open(&ds, scratch("q.bin"), &options, &err) && err.code == EXIT_USAGE);
    err = (Error){0};
    options.boundary_token = 12;
    options.boundary_ends = true;
    CHECK_MSG(dataset_open(&ds, scratch("q.bin"), &options, &err), "%s", err.what);
    CHECK(ds.num_docs == 2 && dataset_doc_length(&ds, 0) == 13);
    CHECK(ds.vocab_size == VOCAB && ds.eos == 12);
    dataset_close(&ds);
    put_word(&f, 6, 1);
    write_bytes(scratch("q.bin"), f.bin, f.bin_size);
    CHECK(!dataset_open(&ds, scratch("q.bin"), &options, &err) &&
          strstr(err.what, "a bit for each"));
}

// Samples of other trainers, each made by its own writer (dev/reference/make_shard_golden.py):
// token j of document i is 100 i + j + 1, but for the first or the last one.
static const struct {
    const char *file, *format;
    int32_t begin, end;  // what the first and the last token of a document are; -1: as the others
    int boundary;        // --boundary-token, which ends documents; -1: not needed
} samples[] = {
    {"llmc_v1.bin", "llm.c", 50256, -1, -1},
    {"llmc_v7.bin", "llm.c", 128000, -1, -1},
    {"fineweb_train_000001.bin", "llm.c", 50256, -1, -1},
    {"datatrove.ds", "datatrove", -1, 50256, -1},
    {"datatrove_wide.ds", "datatrove", -1, 70000, -1},
    {"megatron.bin", "Megatron", -1, 50256, -1},
    {"megatron_wide.bin", "Megatron", -1, 128255, -1},
    {"llmq.bin", "llmq", -1, 50256, 50256},
    {"olmo.npy", "OLMo", -1, 50279, -1},
    {"olmo.npy", "OLMo", -1, 50279, 50279},
    {"olmo_wide.npy", "OLMo", -1, 100257, -1},
    {"olmo_wide.npy", "OLMo", -1, 100257, 100257},
    {"numpy.npy", "numpy", -1, 50256, 50256},
};
enum { NUM_SAMPLE_DOCS = 5, SAMPLE_TOKENS = 22 };
static const int SAMPLE_LENGTHS[NUM_SAMPLE_DOCS] = {4, 1, 9, 2, 6};

static bool open_sample(Dataset *ds, const char *file, int boundary, Error *err) {
    char path[128];
    DatasetOptions options = dataset_options();
    options.boundary_token = boundary;
    options.boundary_ends = boundary >= 0;
    *err = (Error){0};
    snprintf(path, sizeof path, "tests/golden/shards/%s", file);
    return dataset_open(ds, path, &options, err);
}

TEST(samples_of_other_trainers_are_read) {
    for (size_t s = 0; s < sizeof samples / sizeof *samples; s++) {
        Dataset ds;
        Error err;
        int32_t tokens[16];
        char text[256];
        CHECK_MSG(open_sample(&ds, samples[s].file, samples[s].boundary, &err), "%s", err.what);
        dataset_describe(&ds, text, sizeof text);
        CHECK_MSG(strstr(text, samples[s].format), "%s: %s", samples[s].file, text);
        CHECK(ds.num_docs == NUM_SAMPLE_DOCS && ds.num_tokens == SAMPLE_TOKENS);
        for (int i = 0; i < NUM_SAMPLE_DOCS; i++) {
            const int n = SAMPLE_LENGTHS[i];
            CHECK(dataset_doc_length(&ds, i) == n);
            CHECK_MSG(dataset_read(&ds, i, 0, n, tokens, &err), "%s", err.what);
            for (int j = 0; j < n; j++) {
                const int32_t begin = j == 0 ? samples[s].begin : -1,
                              end = j + 1 == n ? samples[s].end : -1,
                              expected = begin >= 0 ? begin
                                         : end >= 0 ? end
                                                    : 100 * i + j + 1;
                CHECK_MSG(tokens[j] == expected, "%s: document %d, token %d: %d", samples[s].file,
                          i, j, tokens[j]);
            }
        }
        dataset_close(&ds);
    }
}

// The second half of a document is trained, never its first token.
static void check_sample_mask(const Dataset *ds, int64_t doc, int sample_doc) {
    const int n = SAMPLE_LENGTHS[sample_doc];
    for (int j = 1; j < n; j++) CHECK(dataset_count_targets(ds, doc, j, 1) == (j >= n / 2));
}

TEST(masks_of_datatrove_are_read) {
    Dataset ds;
    Error err;
    CHECK_MSG(open_sample(&ds, "datatrove_wide.ds", -1, &err), "%s", err.what);
    CHECK(ds.masked && ds.num_targets == 2 + 0 + 5 + 1 + 3);
    for (int i = 0; i < NUM_SAMPLE_DOCS; i++) check_sample_mask(&ds, i, i);
    dataset_close(&ds);
}

// Samples shorter than 7 tokens are padded with zeros, which are documents without a target.
TEST(masks_of_llmq_are_read) {
    Dataset ds;
    Error err;
    const int documents[] = {0, -1, 1, -1, 2, 3, -1, 4, -1};  // -1: padding
    CHECK_MSG(open_sample(&ds, "llmq_mask.bin", 50256, &err), "%s", err.what);
    CHECK(ds.masked && ds.num_targets == 2 + 0 + 5 + 1 + 3 && ds.num_docs == 9);
    for (int i = 0; i < 9; i++) {
        const int64_t n = dataset_doc_length(&ds, i);
        if (documents[i] >= 0) {
            CHECK(n == SAMPLE_LENGTHS[documents[i]]);
            check_sample_mask(&ds, i, documents[i]);
        } else {
            CHECK(n + SAMPLE_LENGTHS[documents[i - 1]] == 7);
            CHECK(n == 1 || dataset_count_targets(&ds, i, 1, n - 1) == 0);
        }
    }
    dataset_close(&ds);
}

// Every shorter and every longer copy of a sample's file is refused; `boundary` as above.
static void check_sizes(const char *file, const char *sidecar, int boundary) {
    char path[128], copy[64];
    const char *const names[] = {file, sidecar};
    DatasetOptions options = dataset_options();
    options.boundary_token = boundary;
    options.boundary_ends = boundary >= 0;
    unsigned char bytes[2048];
    size_t sizes[2] = {0};
    for (int i = 0; i < 2 && names[i]; i++) {
        snprintf(path, sizeof path, "tests/golden/shards/%s", names[i]);
        FILE *f = fopen(path, "rb");
        CHECK(f && (sizes[i] = fread(bytes, 1, sizeof bytes - 64, f)) > 0 && fclose(f) == 0);
        write_bytes(scratch(names[i]), bytes, sizes[i]);
    }
    memset(bytes, 1, sizeof bytes);
    for (int i = 0; i < 2 && names[i]; i++) {
        snprintf(copy, sizeof copy, "%s", names[i]);
        FILE *f = fopen(scratch(copy), "rb");
        CHECK(f && fread(bytes, 1, sizes[i], f) == sizes[i] && fclose(f) == 0);
        const bool packed = strstr(copy, ".gz") != NULL;  // zlib ignores what follows
        for (size_t n = 0; n < sizes[i] + (packed ? 0 : 16); n++) {
            Dataset ds;
            Error err = {0};
            if (n == sizes[i]) continue;
            write_bytes(scratch(copy), bytes, n);
            CHECK_MSG(!dataset_open(&ds, scratch(file), &options, &err), "%s: %zu bytes", copy, n);
            CHECK_MSG(err.code == EXIT_BAD_INPUT, "%s", err.what);
        }
        write_bytes(scratch(copy), bytes, sizes[i]);
    }
}

TEST(cut_and_lengthened_samples_are_refused) {
    check_sizes("datatrove_wide.ds", "datatrove_wide.ds.loss", -1);
    check_sizes("llmq_mask.bin", NULL, 50256);
    check_sizes("numpy.npy", NULL, 50256);
    check_sizes("olmo.npy", "olmo.csv.gz", -1);
}

TEST(directories_of_npy_files) {
    Dataset ds;
    Error err = {0};
    uint64_t n = 0;
    const DatasetOptions options = dataset_options();
    const char *const names[][2] = {{"tests/golden/shards/olmo.npy", "npy/part-0.npy"},
                                    {"tests/golden/shards/olmo.csv.gz", "npy/part-0.csv.gz"}};
    CHECK(mkdir(scratch("npy"), 0777) == 0);
    for (int i = 0; i < 2; i++) {
        char *bytes = file_read_all(names[i][0], 4096, &n, "", &err);
        CHECK_MSG(bytes != NULL, "%s", err.what);
        write_bytes(scratch(names[i][1]), bytes, n);
        free(bytes);
    }
    CHECK_MSG(dataset_open(&ds, scratch("npy"), &options, &err), "%s", err.what);
    CHECK(ds.num_docs == NUM_SAMPLE_DOCS);
    dataset_close(&ds);
}

TEST(samples_that_need_a_word_say_so) {
    Dataset ds;
    Error err;
    CHECK(!open_sample(&ds, "numpy.npy", -1, &err) && err.code == EXIT_USAGE);
    CHECK_MSG(
        strstr(err.what, "do not say where documents end") && strstr(err.hint, "--boundary-token"),
        "%s; %s", err.what, err.hint);
    CHECK(!open_sample(&ds, "numpy_2d.npy", 50256, &err) && err.code == EXIT_BAD_INPUT);
    CHECK_MSG(strstr(err.what, "one dimension") && strstr(err.what, "(2, 3)"), "%s", err.what);
    CHECK(!open_sample(&ds, "llmc_eval.bin", -1, &err) && strstr(err.what, "evaluation"));
    CHECK(!open_sample(&ds, "numpy.npy", 7, &err) && strstr(err.what, "token 7 is nowhere"));
}

TEST(other_files_are_recognized) {
    Files f;
    make_files(&f, 2);
    char text[2000];
    memset(text, 'x', sizeof text);
    write_bytes(scratch("text.bin"), text, sizeof text);
    check_refused(scratch("text.bin"), "found text");
    write_bytes(scratch("parquet.bin"), "PAR1rest", 8);
    check_refused(scratch("parquet.bin"), "Parquet");
    write_bytes(scratch("zip.bin"), "PK\3\4rest", 8);
    check_refused(scratch("zip.bin"), "zip");
    write_bytes(scratch("gguf.bin"), "GGUF\3\0\0\0", 8);
    check_refused(scratch("gguf.bin"), "GGUF");
    write_bytes(scratch("safetensors.bin"), "\x40\0\0\0\0\0\0\0{\"a\": 1}", 16);
    check_refused(scratch("safetensors.bin"), "safetensors");
    write_bytes(scratch("gz.bin"), "\x1f\x8b\x08\0rest", 8);
    check_refused(scratch("gz.bin"), "gzip");
    put_word(&f, 0, 20240522);
    write_bytes(scratch("eval.bin"), f.bin, f.bin_size);
    check_refused(scratch("eval.bin"), "evaluation");
    put_word(&f, 0, (int32_t)__builtin_bswap32(20240520));
    write_bytes(scratch("big_endian.bin"), f.bin, f.bin_size);
    check_refused(scratch("big_endian.bin"), "big-endian");
    write_bytes(scratch("nothing.bin"), "", 0);
    check_refused(scratch("nothing.bin"), "unknown");
    make_files(&f, 2);
    save(&f, "its");
    check_refused(scratch("its.idx"), "an index");
    CHECK(mkdir(scratch("bare"), 0777) == 0);
    check_refused(scratch("bare"), "found none");
    check_refused(scratch("absent.bin"), "found none");
    check_refused(scratch("absent*.bin"), "found none");
}

// -------------------------------------------------------------------------------------------------
// Many files

TEST(directories_globs_and_lists) {
    Files f;
    Dataset ds;
    Error err = {0};
    DatasetOptions options = dataset_options();
    make_files(&f, 2);
    CHECK(mkdir(scratch("set, [a] of"), 0777) == 0);
    static const char *const names[] = {"train_00001", "train_00000", "val_00000", "other"};
    for (int i = 0; i < 4; i++) {
        char stem[64];
        snprintf(stem, sizeof stem, "set, [a] of/%s", names[i]);
        save(&f, stem);
    }
    CHECK_MSG(dataset_open(&ds, scratch("set, [a] of"), &options, &err), "%s", err.what);
    CHECK(ds.num_shards == 2 && ds.num_docs == 2 * NUM_DOCS);
    CHECK(strstr(ds.shards[0].path, "train_00000.bin") &&
          strstr(ds.shards[1].path, "train_00001.bin"));
    check_documents(&ds, 0);
    check_documents(&ds, NUM_DOCS);
    dataset_close(&ds);
    options.split = "val";
    CHECK_MSG(dataset_open(&ds, scratch("set, [a] of"), &options, &err), "%s", err.what);
    CHECK(ds.num_shards == 1 && strstr(ds.shards[0].path, "val_00000.bin"));
    dataset_close(&ds);
    save(&f, "part1");
    save(&f, "part2");
    CHECK_MSG(dataset_open(&ds, scratch("part?.bin"), &options, &err), "%s", err.what);
    CHECK(ds.num_shards == 2);
    dataset_close(&ds);
    char list[600];
    snprintf(list, sizeof list, "%s,%s", scratch("part2.bin"), scratch("part1.bin"));
    CHECK_MSG(dataset_open(&ds, list, &options, &err), "%s", err.what);
    CHECK(ds.num_shards == 2 && strstr(ds.shards[0].path, "part2.bin"));  // as listed
    dataset_close(&ds);
    snprintf(list, sizeof list, "%s,%s", scratch("part2.bin"), scratch("part3.bin"));
    check_refused(list, "part3.bin");
    check_refused(",", "expected a path");
}

TEST(modded_nanogpt_names) {
    Files f;
    CHECK(mkdir(scratch("fineweb"), 0777) == 0);
    make_llmc(&f, 2, 50256, false);
    write_bytes(scratch("fineweb/fineweb_train_000001.bin"), f.bin, f.bin_size);
    check_opens(scratch("fineweb"));
}

// One bad shard is enough to refuse the data set.
TEST(all_shards_are_validated_first) {
    Files f;
    make_files(&f, 2);
    CHECK(mkdir(scratch("last_bad"), 0777) == 0);
    save(&f, "last_bad/train_00000");
    save(&f, "last_bad/train_00001");
    CHECK(truncate(scratch("last_bad/train_00001.bin"), (off_t)f.bin_size - 2) == 0);
    check_refused(scratch("last_bad"), "train_00001.bin: expected exactly 1114 bytes");
}

TEST(more_shards_than_descriptors) {
    enum { SHARDS = DATASET_MAX_OPEN + 50 };
    Files f;
    Dataset ds;
    Error err = {0};
    const DatasetOptions options = dataset_options();
    int32_t out[8];
    make_files(&f, 2);
    CHECK(mkdir(scratch("many"), 0777) == 0);
    for (int i = 0; i < SHARDS; i++) {
        char stem[64];
        snprintf(stem, sizeof stem, "many/train_%05d", i);
        save(&f, stem);
    }
    CHECK_MSG(dataset_open(&ds, scratch("many"), &options, &err), "%s", err.what);
    CHECK(ds.num_shards == SHARDS && ds.num_open <= DATASET_MAX_OPEN);
    for (int i = 0; i < 3000; i++) {
        const int64_t doc = test_rng_below(SHARDS) * NUM_DOCS + 2;
        CHECK_MSG(dataset_read(&ds, doc, 0, 7, out, &err), "%s", err.what);
        CHECK(out[0] == 6 && out[6] == 12 && ds.num_open <= DATASET_MAX_OPEN);
    }
    int open_now = 0;
    for (size_t i = 0; i < ds.num_shards; i++) open_now += ds.shards[i].file.fd >= 0;
    CHECK(open_now == ds.num_open);
    dataset_close(&ds);
}

static uint64_t fingerprint_of(const char *path) {
    Dataset ds;
    Error err = {0};
    const DatasetOptions options = dataset_options();
    CHECK_MSG(dataset_open(&ds, path, &options, &err), "%s", err.what);
    const uint64_t fingerprint = ds.fingerprint;
    dataset_close(&ds);
    return fingerprint;
}

TEST(fingerprint_covers_names_sizes_headers_and_indexes) {
    Files f;
    make_files(&f, 2);
    CHECK(mkdir(scratch("moved"), 0777) == 0);
    save(&f, "print");
    save(&f, "moved/print");
    const uint64_t one = fingerprint_of(scratch("print.bin"));
    CHECK(fingerprint_of(scratch("moved/print.bin")) == one);
    save(&f, "other_name");
    CHECK(fingerprint_of(scratch("other_name.bin")) != one);
    put(f.idx + ENDS_AT, 4, 8);  // the first document one token shorter
    seal(&f);
    save(&f, "print");
    CHECK(fingerprint_of(scratch("print.bin")) != one);
    make_files(&f, 2);
    put_word(&f, 10, VOCAB + 1);
    seal(&f);
    save(&f, "print");
    CHECK(fingerprint_of(scratch("print.bin")) != one);
    char list[600];
    snprintf(list, sizeof list, "%s,%s", scratch("moved/print.bin"), scratch("moved/print.bin"));
    CHECK(fingerprint_of(list) != one);
    make_files(&f, 2);
    f.bin[1024 + 2 * 20] ^= 1;  // another token, with a correct checksum
    seal(&f);
    save(&f, "print");
    CHECK(fingerprint_of(scratch("print.bin")) != one);
}

static uint64_t token_fingerprint_of(const char *path) {
    Dataset ds;
    Error err = {0};
    const DatasetOptions options = dataset_options();
    CHECK_MSG(dataset_open(&ds, path, &options, &err), "%s", err.what);
    const uint64_t fingerprint = ds.token_fingerprint;
    dataset_close(&ds);
    return fingerprint;
}

// Without checksums in the files: all tokens if they are scanned, else a sample, here all of them.
TEST(fingerprint_of_tokens_without_checksums) {
    Files f, g;
    make_files(&f, 2);
    save(&f, "sum");
    const uint64_t checked = token_fingerprint_of(scratch("sum.bin"));
    f.bin[1024 + 2 * 20] ^= 1;
    seal(&f);
    save(&f, "sum");
    CHECK(token_fingerprint_of(scratch("sum.bin")) != checked);
    make_files_v1(&f, 2);
    make_llmc(&g, 2, 50256, false);
    save(&f, "sum");
    write_bytes(scratch("scan.bin"), g.bin, g.bin_size);
    const uint64_t sampled = token_fingerprint_of(scratch("sum.bin")),
                   scanned = token_fingerprint_of(scratch("scan.bin"));
    CHECK(token_fingerprint_of(scratch("sum.bin")) == sampled);
    for (int i = 0; i < NUM_TOKENS; i++) {
        f.bin[1024 + 2 * i] ^= 1;
        save(&f, "sum");
        f.bin[1024 + 2 * i] ^= 1;
        CHECK(token_fingerprint_of(scratch("sum.bin")) != sampled);
        const uint64_t id = shard_word(g.bin + 1024 + 2 * i, 2);
        if (id == 50256 || id == 50257) continue;
        g.bin[1024 + 2 * i] ^= 1;
        write_bytes(scratch("scan.bin"), g.bin, g.bin_size);
        g.bin[1024 + 2 * i] ^= 1;
        CHECK(token_fingerprint_of(scratch("scan.bin")) != scanned);
    }
}

// A shard larger than the sample, which has its first and last bytes and some between them.
TEST(the_sample_of_tokens_spreads_over_the_shard) {
    enum { TOKENS = 300000 };
    static unsigned char tokens[2 * TOKENS];
    const uint64_t end = TOKENS;
    int seen = 0;
    write_bytes(scratch("long.ds.index"), &end, 8);
    write_bytes(scratch("long.ds"), tokens, sizeof tokens);
    const uint64_t before = token_fingerprint_of(scratch("long.ds"));
    for (size_t part = 0; part < 100; part++) {  // one percent of the file changes
        memset(tokens + part * 6000, 1, 6000);
        write_bytes(scratch("long.ds"), tokens, sizeof tokens);
        memset(tokens + part * 6000, 0, 6000);
        const bool differs = token_fingerprint_of(scratch("long.ds")) != before;
        CHECK(differs || (part > 0 && part < 99));
        seen += differs;
    }
    CHECK_MSG(seen >= 8, "%d of 100 parts", seen);
}

TEST(tokenizers_must_agree) {
    Files f;
    Dataset ds;
    Error err = {0};
    DatasetOptions options = dataset_options();
    char list[600];
    make_files(&f, 2);
    save(&f, "tok_a");
    put_word(&f, 16, 0x5678);
    seal(&f);
    save(&f, "tok_b");
    snprintf(list, sizeof list, "%s,%s", scratch("tok_a.bin"), scratch("tok_b.bin"));
    check_refused(list, "another tokenizer");
    put_word(&f, 16, 0);  // unknown
    seal(&f);
    save(&f, "tok_b");
    check_opens(list);
    put_word(&f, 10, VOCAB + 1);
    seal(&f);
    save(&f, "tok_b");
    check_refused(list, "another tokenizer");
    options.vocab_size = VOCAB - 1;
    CHECK(!dataset_open(&ds, scratch("tok_a.bin"), &options, &err) && err.code == EXIT_BAD_INPUT);
    CHECK_MSG(strstr(err.what, "vocabulary of 100, the model has 99"), "%s", err.what);
    err = (Error){0};
    options.vocab_size = 1000;
    CHECK(dataset_open(&ds, scratch("tok_a.bin"), &options, &err) && ds.vocab_size == VOCAB);
    dataset_close(&ds);
}

TEST(empty_shards) {
    Files f;
    make_files(&f, 2);
    put_word(&f, 2, 0);
    f.bin_size = 1024;
    put(f.idx + 24, 0, 8);
    memset(f.idx + ENDS_AT, 0, 8 * NUM_ENDS);
    f.idx_size = SUMS_AT + 4;
    seal(&f);
    save(&f, "empty");
    check_refused(scratch("empty.bin"), "expected documents, found none");
    put_word(&f, 14, 0);
    put(f.idx + 16, 0, 8);
    f.idx_size = 44;
    seal(&f);
    save(&f, "empty");
    check_refused(scratch("empty.bin"), "expected documents, found none");
    make_files(&f, 2);
    save(&f, "full");
    char list[600];
    snprintf(list, sizeof list, "%s,%s,%s", scratch("empty.bin"), scratch("full.bin"),
             scratch("empty.bin"));
    check_opens(list);
}

// -------------------------------------------------------------------------------------------------
// Masks

static bool is_target(int64_t i) {
    for (int k = 0; k < NUM_TARGETS; k++)
        if (TARGETS[k] == i) return true;
    return false;
}

// Every part of every document, bit by bit.
static void check_mask(const Dataset *ds) {
    int64_t start = 0, doc = 0;
    for (int e = 0; e < NUM_ENDS; e++) {
        if (LENGTHS[e] == 0) continue;
        for (int64_t from = 1; from <= LENGTHS[e]; from++)
            for (int64_t n = 0; from + n <= LENGTHS[e]; n++) {
                int32_t tokens[64];
                int64_t targets = 0;
                for (int64_t i = 0; i < n; i++) tokens[i] = 7;
                dataset_mask_tokens(ds, doc, from, n, tokens);
                for (int64_t i = 0; i < n; i++) {
                    CHECK(tokens[i] == (is_target(start + from + i) ? 7 : -1));
                    targets += tokens[i] == 7;
                }
                CHECK(dataset_count_targets(ds, doc, from, n) == targets);
            }
        start += LENGTHS[e], doc++;
    }
}

TEST(masks_are_read) {
    for (int width = 2; width <= 4; width += 2) {
        Files f, plain;
        Dataset ds;
        Error err = {0};
        const DatasetOptions options = dataset_options();
        char text[256];
        make_masked_files(&f, width);
        save(&f, "masked");
        CHECK_MSG(dataset_open(&ds, scratch("masked.bin"), &options, &err), "%s", err.what);
        CHECK(ds.masked && ds.num_targets == NUM_TARGETS);
        check_documents(&ds, 0);
        check_mask(&ds);
        dataset_describe(&ds, text, sizeof text);
        CHECK_MSG(strstr(text, "45 tokens, 14 of them targets, 2 empty"), "%s", text);
        dataset_close(&ds);
        // with another shard, which has none: all of its tokens but the first of each document
        make_files(&plain, width);
        save(&plain, "plain");
        char both[512];
        snprintf(both, sizeof both, "%s", scratch("masked.bin"));
        snprintf(both + strlen(both), sizeof both - strlen(both), ",%s", scratch("plain.bin"));
        CHECK_MSG(dataset_open(&ds, both, &options, &err), "%s", err.what);
        CHECK(ds.masked && ds.num_targets == NUM_TARGETS + NUM_TOKENS - NUM_DOCS);
        CHECK(dataset_count_targets(&ds, NUM_DOCS + 3, 1, 20) == 20);
        dataset_close(&ds);
    }
}

// A whole word of bits and its edges.
TEST(bits_of_a_mask_are_counted) {
    unsigned char mask[40];
    for (int i = 0; i < 40; i++) mask[i] = (unsigned char)test_rng_u32();
    for (int64_t from = 0; from <= 320; from++) {
        int64_t ones = 0;
        for (int64_t to = from; to <= 320; to++) {
            CHECK(mask_count(mask, from, to) == ones);
            if (to < 320) ones += mask[to / 8] >> to % 8 & 1;
        }
    }
}

// Every bit of the file counts, and every length but its own is refused.
TEST(damaged_masks_are_refused) {
    Files f;
    make_masked_files(&f, 2);
    save(&f, "masked");
    const char *path = scratch("masked.bin"), *mask = scratch("masked.mask");
    const int fd = open(mask, O_RDWR);
    CHECK(fd >= 0);
    for (size_t bit = 0; bit < 8 * f.mask_size; bit++) {
        const unsigned char good = f.mask[bit / 8], bad = good ^ (unsigned char)(1 << bit % 8);
        CHECK(pwrite(fd, &bad, 1, (off_t)(bit / 8)) == 1);
        CHECK_MSG(refused_by_size_or_sum(path), "byte %zu, bit %zu", bit / 8, bit % 8);
        CHECK(pwrite(fd, &good, 1, (off_t)(bit / 8)) == 1);
    }
    CHECK(close(fd) == 0);
    check_opens(path);
    for (size_t n = f.mask_size + 9; n-- > 0;) {
        if (n == f.mask_size) continue;
        write_bytes(mask, f.mask, n < f.mask_size ? n : f.mask_size);
        CHECK(truncate(mask, (off_t)n) == 0);
        check_refused(path, "expected exactly 42 bytes");
    }
    CHECK(unlink(mask) == 0);
    check_refused(path, "masked.mask: ");
}

// Wrong values with a correct checksum.
#define MASK_FIELD(change_, because_)                  \
    do {                                               \
        Files f;                                       \
        make_masked_files(&f, 2);                      \
        change_;                                       \
        seal(&f);                                      \
        save(&f, "field");                             \
        check_refused(scratch("field.bin"), because_); \
    } while (0)

TEST(mask_fields_are_validated) {
    MASK_FIELD(f.mask[7] = 'k', "expected a mask of version 1");
    MASK_FIELD(put(f.mask + 8, 2, 4), "expected a mask of version 1");
    MASK_FIELD(put(f.mask + 16, NUM_TOKENS + 1, 8), "the mask of another shard");
    MASK_FIELD(put(f.mask + 24, NUM_TARGETS + 1, 8), "expected 15 ones, found 14");
    MASK_FIELD(put(f.mask + 24, UINT64_MAX, 8), "ones, found 14");
    MASK_FIELD(f.mask[BITS_AT + 5] |= 1 << 5, "expected zeros after bit 45");
    MASK_FIELD((f.mask[BITS_AT + 1] |= 1 << 5, put(f.mask + 24, NUM_TARGETS + 1, 8)),
               "bit 13: expected 0 for the first token of a document");
    MASK_FIELD(put_word(&f, 11, 3), "expected no mask beside a shard without flag 4");
    Files f, g;
    make_masked_files(&f, 2);
    make_masked_files(&g, 2);
    put_word(&g, 16, 0x9999);  // another tokenizer, the same sizes
    seal(&g);
    save(&f, "mine");
    save(&g, "yours");
    CHECK(rename(scratch("yours.mask"), scratch("mine.mask")) == 0);
    check_refused(scratch("mine.bin"), "the mask of another shard");
}

// Two masks of the same shard: other tokens are trained, so the data is not the same.
TEST(fingerprint_covers_the_mask) {
    for (int version = 1; version <= 2; version++) {
        uint64_t prints[2], tokens[2];
        for (int i = 0; i < 2; i++) {
            Files f;
            Dataset ds;
            Error err = {0};
            const DatasetOptions options = dataset_options();
            make_masked_files(&f, 2);
            if (version == 1) {
                put(f.idx + 8, 1, 4);
                memmove(f.idx + 32, f.idx + ENDS_AT, 8 * NUM_ENDS);
                f.idx_size = 32 + 8 * NUM_ENDS + 4;
            }
            if (i == 1) f.mask[BITS_AT] = 1 << 2;  // token 2 instead of token 3
            seal(&f);
            save(&f, "print");
            CHECK_MSG(dataset_open(&ds, scratch("print.bin"), &options, &err), "%s", err.what);
            prints[i] = ds.fingerprint, tokens[i] = ds.token_fingerprint;
            dataset_close(&ds);
        }
        CHECK(prints[0] == prints[1] && tokens[0] != tokens[1]);
    }
}

// Random damage with correct and wrong checksums: refused or read, never a crash or a bad id.
TEST(random_damage_is_survived) {
    int opened = 0;
    for (int round = 0; round < 3000; round++) {
        Files f;
        Dataset ds;
        Error err = {0};
        const DatasetOptions options = dataset_options();
        const bool masked = round % 4 < 2;
        (masked ? make_masked_files : make_files)(&f, round % 2 ? 2 : 4);
        for (uint32_t n = 1 + test_rng_below(3); n > 0; n--) {
            if (masked && test_rng_below(3) == 0)
                f.mask[test_rng_below((uint32_t)f.mask_size)] = (uint8_t)test_rng_u32();
            else if (test_rng_below(2))
                f.bin[test_rng_below((uint32_t)f.bin_size)] = (uint8_t)test_rng_u32();
            else
                f.idx[test_rng_below((uint32_t)f.idx_size)] = (uint8_t)test_rng_u32();
        }
        if (test_rng_below(4)) seal(&f);
        save(&f, "fuzz");
        if (!dataset_open(&ds, scratch("fuzz.bin"), &options, &err)) {
            CHECK_MSG(err.code == EXIT_BAD_INPUT, "%s", err.what);
            continue;
        }
        opened++;
        for (int64_t doc = 0; doc < ds.num_docs; doc++) {
            int32_t out[64];
            const int64_t n = dataset_doc_length(&ds, doc);
            CHECK(n >= 1 && n <= NUM_TOKENS);
            if (!dataset_read(&ds, doc, 0, n, out, &err)) break;
            for (int64_t i = 0; i < n; i++) CHECK(out[i] >= 0 && out[i] < ds.vocab_size);
            CHECK(dataset_count_targets(&ds, doc, 1, n - 1) <= n - 1);
        }
        dataset_close(&ds);
    }
    CHECK_MSG(opened > 100, "%d", opened);
}

TEST_MAIN()
