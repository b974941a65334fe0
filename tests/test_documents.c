// Data sets: every format is read, and every damaged file is refused before its contents are used.
#include <sys/resource.h>
#include <sys/stat.h>

#include "../data/base/hash.h"
#include "../data/base/signals.h"
#include "../data/shards/dataset.h"
#include "../data/shards/shard.h"
#include "../data/shards/shard_writer.h"
#include "../data/texts/documents.h"
#include "scratch.h"

// ---- Making files -------------------------------------------------------------------------------

enum { BIN, IDX, MASK };
typedef struct {
    unsigned char bytes[3][4096];
    size_t size[3];  // of MASK 0: none
    int width;
} Files;

static const int32_t LENGTHS[] = {5, 1, 0, 7, 30, 0, 2};
enum { NUM_ENDS = 7, NUM_DOCS = 5, NUM_TOKENS = 45, VOCAB = 100 };
enum { BLOCK = 16, NUM_BLOCKS = 3 };  // of checksums: 16, 16 and 13 tokens
enum { ENDS_AT = 40, SUMS_AT = ENDS_AT + 8 * NUM_ENDS };

static void put(void *where, uint64_t value, size_t bytes) { memcpy(where, &value, bytes); }
static void put_word(Files *f, int word, int32_t value) {
    memcpy(f->bytes[BIN] + 4 * word, &value, 4);
}

// Recomputes the checksums of tokens, header, index and mask.
static void seal(Files *f) {
    for (int b = 0; b < NUM_BLOCKS && f->size[IDX] == SUMS_AT + 4 * NUM_BLOCKS + 4; b++) {
        const int n = b + 1 < NUM_BLOCKS ? BLOCK : NUM_TOKENS - b * BLOCK;
        put(f->bytes[IDX] + SUMS_AT + 4 * b,
            crc32c(0, f->bytes[BIN] + 1024 + b * BLOCK * f->width, (size_t)(n * f->width)), 4);
    }
    put(f->bytes[BIN] + 1020, crc32c(0, f->bytes[BIN], 1020), 4);
    put(f->bytes[IDX] + 12, crc32c(0, f->bytes[BIN], 1020), 4);
    put(f->bytes[IDX] + f->size[IDX] - 4, crc32c(0, f->bytes[IDX], f->size[IDX] - 4), 4);
    if (f->size[MASK] == 0) return;
    put(f->bytes[MASK] + 12, crc32c(0, f->bytes[BIN], 1020), 4);
    put(f->bytes[MASK] + f->size[MASK] - 4, crc32c(0, f->bytes[MASK], f->size[MASK] - 4), 4);
}

// Some tokens that are not the first of a document, and the last token of all
enum { NUM_TARGETS = 14, BITS_AT = 32 };
static bool is_target(int64_t i) { return i == 3 || i == 44 || (i >= 9 && i % 3 == 0); }

// Token i of the shard is i % VOCAB.
static Files make_files(int width, bool masked) {
    Files files = {.width = width}, *f = &files;
    put_word(f, 0, width == 2 ? 20240520 : 20240801);
    put_word(f, 1, width == 2 ? 1 : 7);
    static const int32_t words[][2] = {{2, NUM_TOKENS}, {8, 0x44415055}, {9, 1},
                                       {10, VOCAB},     {11, 3},         {12, 98},
                                       {13, 99},        {14, NUM_ENDS},  {16, 0x1234}};
    for (int i = 0; i < 9; i++) put_word(f, words[i][0], words[i][1]);
    for (int i = 0; i < NUM_TOKENS; i++)
        put(f->bytes[BIN] + 1024 + i * width, (uint64_t)(i % VOCAB), (size_t)width);
    f->size[BIN] = (size_t)(1024 + NUM_TOKENS * width);
    memcpy(f->bytes[IDX], "UNPADIDX", 8);
    put(f->bytes[IDX] + 8, 2, 4);
    put(f->bytes[IDX] + 16, NUM_ENDS, 8);
    put(f->bytes[IDX] + 24, NUM_TOKENS, 8);
    put(f->bytes[IDX] + 32, BLOCK, 8);
    uint64_t end = 0;
    for (int i = 0; i < NUM_ENDS; i++)
        put(f->bytes[IDX] + ENDS_AT + 8 * i, end += (uint64_t)LENGTHS[i], 8);
    f->size[IDX] = SUMS_AT + 4 * NUM_BLOCKS + 4;
    if (!masked) return files;
    put_word(f, 11, 7);
    memcpy(f->bytes[MASK], "UNPADMSK", 8);
    put(f->bytes[MASK] + 8, 1, 4);
    put(f->bytes[MASK] + 16, NUM_TOKENS, 8);
    put(f->bytes[MASK] + 24, NUM_TARGETS, 8);
    for (int i = 0; i < NUM_TOKENS; i++)
        f->bytes[MASK][BITS_AT + i / 8] |= (unsigned char)(is_target(i) << i % 8);
    f->size[MASK] = BITS_AT + (NUM_TOKENS + 7) / 8 + 4;
    return files;
}

static const char *const endings[] = {".bin", ".idx", ".mask"};

// With checksums that fit
static void save(Files *f, const char *stem) {
    seal(f);
    for (int which = 0; which < 3; which++) {
        const char *path = scratch(printed("%s%s", stem, endings[which]));
        if (f->size[which] > 0)
            put_file(path, f->bytes[which], f->size[which]);
        else
            remove(path);
    }
}

// Their paths, as --train takes them
static const char *list_of(const char *first, const char *second) {
    return printed("%s,%s", scratch(first), scratch(second));
}

static bool opens(const char *path, Error *err) {
    Dataset ds;
    const DatasetOptions options = {.boundary_token = -1};
    memset(err, 0, sizeof *err);
    if (!dataset_open(&ds, path, &options, err)) return false;
    dataset_close(&ds);
    return true;
}

// Opens it with the default options, or those given, until the end of the block.
#define OPEN_WITH(ds_, path_, ...)                             \
    __attribute__((cleanup(dataset_close))) Dataset ds_ = {0}; \
    MUST(dataset_open(&ds_, path_, __VA_ARGS__, &err))
#define OPEN(ds_, path_) OPEN_WITH(ds_, path_, (DatasetOptions[]){{.boundary_token = -1}})

#define check_opens(path_) MUST(opens(path_, &err))
#define check_refused(path_, because_) REFUSED(EXIT_BAD_INPUT, because_, opens(path_, &err))

// Reads the five documents of make_files, whole and every part of them.
static void check_documents(Dataset *ds, int64_t first_doc) {
    int32_t out[64];
    int64_t start = 0, doc = first_doc;
    for (int i = 0; i < NUM_ENDS; i++) {
        if (LENGTHS[i] == 0) continue;
        CHECK(dataset_doc_length(ds, doc) == LENGTHS[i]);
        for (int64_t from = 0; from <= LENGTHS[i]; from++)
            for (int64_t n = 0; from + n <= LENGTHS[i]; n++) {
                MUST(dataset_read(ds, doc, from, n, out, &err));
                for (int64_t k = 0; k < n; k++) CHECK(out[k] == start + from + k);
            }
        start += LENGTHS[i];
        doc++;
    }
}

// Every part of every document, bit by bit.
static void check_mask(const Dataset *ds) {
    int64_t start = 0;
    for (int64_t doc = 0; doc < NUM_DOCS; start += dataset_doc_length(ds, doc++))
        for (int64_t from = 1; from <= dataset_doc_length(ds, doc); from++)
            for (int64_t n = 0; from + n <= dataset_doc_length(ds, doc); n++) {
                int64_t targets = 0;
                for (int64_t i = from; i < from + n; i++) {
                    CHECK((dataset_weight(ds, doc, i) != 0) == is_target(start + i));
                    targets += is_target(start + i);
                }
                CHECK(dataset_count_targets(ds, doc, from, n) == targets);
            }
}

TEST(own_shards_with_and_without_flags) {
    for (int round = 0; round < 4; round++) {
        const bool masked = round < 2;
        Files f = make_files(round % 2 ? 2 : 4, masked);
        put_word(&f, 11, round | masked << 2);  // documents begin with BOS, and end with EOS
        save(&f, "own");
        OPEN(ds, scratch("own.bin"));
        CHECK(ds.num_docs == NUM_DOCS && ds.num_empty == 2 && ds.num_tokens == NUM_TOKENS);
        CHECK(ds.vocab_size == VOCAB && ds.masked == masked);
        CHECK(ds.bos == (round & 1 ? 98 : -1) && ds.eos == (round & 2 ? 99 : -1));
        CHECK(ds.num_targets == (masked ? NUM_TARGETS : NUM_TOKENS - NUM_DOCS));
        check_documents(&ds, 0);
        if (masked) check_mask(&ds);
    }
    Files f = make_files(2, true);
    save(&f, "masked");
    // a shard with a mask, and one without: all but the first tokens of its documents
    OPEN(ds, list_of("masked.bin", "own.bin"));
    CHECK(ds.masked && ds.num_targets == NUM_TARGETS + NUM_TOKENS - NUM_DOCS);
    CHECK(dataset_count_targets(&ds, NUM_DOCS + 3, 1, 20) == 20);
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

// Another shard's, every prefix, every tail of zeros, no file at all, and every flipped bit but for
// those of tokens
TEST(every_damage_of_the_three_files_is_refused) {
    for (int round = 0; round < 6; round++) {
        const int which = round / 2;
        Files f = make_files(round % 2 ? 2 : 4, true);
        unsigned char *bytes = f.bytes[which];
        const size_t size = f.size[which], sealed = which ? size : 1024;
        const char *victim = printed("%s%s", scratch("cut"), endings[which]);
        put_word(&f, 16, 0x9999);  // of another tokenizer, of the same sizes
        save(&f, "yours");
        put_word(&f, 16, 0x1234);
        save(&f, "cut");
        check_opens(scratch("cut.bin"));
        CHECK(rename(printed("%s%s", scratch("yours"), endings[which]), victim) == 0);
        check_refused(scratch("cut.bin"), "of another shard");
        for (size_t bit = 0; round % 2 && bit < 8 * sealed; bit++) {
            bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
            put_file(victim, bytes, size);
            bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
            check_refused(scratch("cut.bin"), "");
        }
        for (size_t n = size + 64; n-- > 0;) {
            put_file(victim, bytes, n < size ? n : size);
            CHECK(truncate(victim, (off_t)n) == 0);
            if (n != size) check_refused(scratch("cut.bin"), "");
        }
        CHECK(unlink(victim) == 0);
        check_refused(scratch("cut.bin"), "");
    }
}

// Wrong values with correct checksums, as from a broken or hostile writer: `bytes` bytes at `at` of
// a file.
#define WORD(word_, value_) BIN, 4 * (word_), 4, (uint32_t)(value_)
#define END(doc_, value_) IDX, ENDS_AT + 8 * (doc_), 8, (value_)

static const struct {
    int file;
    size_t at, bytes;
    uint64_t value;
    const char *because;
} damages[] = {
    {WORD(2, NUM_TOKENS - 1), "expected exactly"},
    {WORD(2, -1), "a header of -1 tokens"},
    {WORD(1, 7), "version 1"},
    {WORD(0, 20240801), "version 7"},
    {WORD(9, 0), "shard version"},
    {WORD(10, 0), "vocabulary 0"},
    {WORD(10, 99), "EOS 99"},
    {WORD(12, VOCAB), "BOS 100"},
    {WORD(13, -2), "EOS -2"},
    {WORD(11, 3), "expected no mask beside a shard without flag 4"},
    {BIN, 56, 8, 1ull << 61, "index of another shard"},
    {IDX, 16, 8, NUM_ENDS + 1, "another shard"},
    {IDX, 24, 8, NUM_TOKENS + 1, "another shard"},
    {IDX, 8, 4, 3, "expected index version 2"},
    {IDX, 32, 8, 0, "found 0"},
    {IDX, 32, 8, UINT64_MAX, "found 18446744073709551615"},
    {IDX, 32, 8, BLOCK - 8, "expected exactly"},
    {END(0, UINT64_MAX), "document 0 ends"},
    {END(3, 5), "document 3 ends"},
    {END(6, NUM_TOKENS - 1), "documents end at token 44"},
    {MASK, 7, 1, 'k', "expected mask version 1"},
    {MASK, 8, 4, 3, "expected mask version 1"},
    {MASK, 8, 4, 2, "expected exactly"},  // with weights
    {MASK, 16, 8, NUM_TOKENS + 1, "the mask of another shard"},
    {MASK, 24, 8, NUM_TARGETS + 1, "expected 15 ones, found 14"},
    {MASK, BITS_AT + 5, 1, 0xff, "expected zeros after bit 45"},
};

TEST(every_field_is_validated) {
    for (const typeof(*damages) *d = damages; d < damages + sizeof damages / sizeof *d; d++) {
        Files f = make_files(2, true);
        put(f.bytes[d->file] + d->at, d->value, d->bytes);
        if (d->file == MASK && d->at >= BITS_AT)  // as many ones as it says
            put(f.bytes[MASK] + 24, (uint64_t)mask_count(f.bytes[MASK] + BITS_AT, 0, NUM_TOKENS),
                8);
        save(&f, "field");
        check_refused(scratch("field.bin"), d->because);
    }
}

// Of two documents, which begin with BOS, end with EOS or have a mask: what the writer says of both
TEST(flags_of_the_writer_are_those_of_all_documents) {
    const ShardVocabulary v = {100, 1, 2, 0, false};
    const char *dir = scratch("flags of two");
    for (int both = 0; both < 64; both++) {
        const int of[] = {both % 8, both / 8};
        ShardWriter w;
        MUST(dir_remove_tree(dir, &err) && dir_create_all(dir, &err));
        shard_writer_init(&w, dir, "train", &v);
        for (int i = 0; i < 2; i++) {
            const uint16_t tokens[] = {of[i] & 1 ? 1 : 5, 5, of[i] & 2 ? 2 : 5};
            MUST(shard_writer_add(&w, (const unsigned char *)tokens, 3,
                                  of[i] & 4 ? (const float[]){0, 0, 1} : NULL, &err));
        }
        MUST(shard_writer_close(&w, &err));
        shard_writer_free(&w);
        OPEN(ds, dir);
        CHECK(ds.bos == (of[0] & of[1] & 1 ? 1 : -1) && ds.eos == (of[0] & of[1] & 2 ? 2 : -1));
        CHECK(ds.masked == ((of[0] | of[1]) >> 2) && ds.num_targets == 4 - of[0] / 4 - of[1] / 4);
    }
}

// Two bytes a token as long as all ids fit; a shard ends before a document that would be too much.
TEST(shards_of_the_writer_have_their_sizes) {
    static const uint64_t lengths[] = {2, 1, 1};
    const ShardVocabulary v[] = {{65536, -1, -1, 0, false}, {65537, -1, -1, 0, false}};
    ShardWriter w;
    CHECK(shard_token_bytes(&v[0]) == 2 && shard_token_bytes(&v[1]) == 4);
    CHECK(mkdir(scratch("writer"), 0777) == 0);
    shard_writer_init(&w, scratch("writer"), "train", &v[0]);
    for (int i = 0; i < 3; i++) {  // 100 million tokens with the second one
        MUST(shard_writer_add(&w, (unsigned char *)"tokens", lengths[i], NULL, &err));
        CHECK_MSG(w.num_shards == (i < 2 ? 1 : 2), "%d", w.num_shards);
        if (i == 0) w.ends[0] = 100000000 - 1;
    }
    shard_writer_free(&w);
}

// Documents that have tokens from `first` to before `end` cannot be read, and the others can.
static void check_reads(Dataset *ds, int64_t first, int64_t end, const char *expected) {
    int32_t out[64];
    for (int64_t doc = 0, start = 0, n; doc < NUM_DOCS; doc++, start += n) {
        Error err = {0};
        n = dataset_doc_length(ds, doc);
        const bool ok = dataset_read(ds, doc, 0, n, out, &err);
        CHECK_MSG(ok == (start >= end || start + n <= first), "document %ld: %s", doc, expected);
        CHECK_MSG(ok || (err.code == EXIT_BAD_INPUT && strstr(err.what, expected)),
                  "expected '%s', found '%s'", expected, err.what);
    }
}

// An id that is not in the vocabulary, and every flipped bit
TEST(a_bad_token_is_found_at_any_position) {
    for (int round = 0; round < 2 * NUM_TOKENS; round++) {
        const int width = round % 2 ? 2 : 4, bad = round / 2, b = bad / BLOCK;
        const int end = b + 1 < NUM_BLOCKS ? (b + 1) * BLOCK : NUM_TOKENS;
        const uint64_t id = bad % 2 ? VOCAB : width == 2 ? 65535 : 0xffffffff;
        const size_t at = (size_t)(1024 + bad * width);
        Files f = make_files(width, false);
        int64_t doc = 0, token = bad;
        put(f.bytes[BIN] + at, id, (size_t)width);
        save(&f, "bad");
        OPEN(ds, scratch("bad.bin"));
        while (token >= dataset_doc_length(&ds, doc)) token -= dataset_doc_length(&ds, doc++);
        check_reads(&ds, bad, bad + 1,
                    printed("bad.bin: document %ld, token %ld: expected an id below 100, found %lu",
                            doc, token, id));
        f = make_files(width, false);
        save(&f, "bad");
        OPEN(good, scratch("bad.bin"));
        const char *expected =
            printed("bad.bin: bytes %d to %d: ", 1024 + b * BLOCK * width, 1024 + end * width - 1);
        for (int bit = 0; bit < 8 * width; bit++) {
            f.bytes[BIN][at + (size_t)bit / 8] ^= (unsigned char)(1 << bit % 8);
            put_file(scratch("bad.bin"), f.bytes[BIN], f.size[BIN]);
            f.bytes[BIN][at + (size_t)bit / 8] ^= (unsigned char)(1 << bit % 8);
            check_reads(&good, b * BLOCK, end, expected);
        }
    }
}

// Made by llm.c's and modded-nanogpt's own writers (dev/reference/make_shard_golden.py): token j of
// document i is 100 i + j + 1, but for the first one, which is put here.
static const struct {
    const char *name;
    int width;
    int32_t begin;
} samples[] = {{"llmc_v1", 2, 50256}, {"llmc_v7", 4, 128000}, {"fineweb_train_000001", 2, 50256}};
static const int sample_lengths[] = {4, 1, 9, 2, 6};

static Files read_sample(int which, int32_t begin) {
    Files f = {0};
    FILE *file = fopen(printed("tests/golden/shards/%s.bin", samples[which].name), "rb");
    CHECK(file);
    f.size[BIN] = fread(f.bytes[BIN], 1, sizeof f.bytes[BIN], file);
    fclose(file);
    for (int d = 0, at = 0, n = samples[which].width; d < 5; at += sample_lengths[d++])
        put(f.bytes[BIN] + 1024 + at * n, (uint64_t)begin, (size_t)n);
    return f;
}

// Documents begin with the usual token, or with the one that is given.
TEST(shards_of_other_trainers_are_read) {
    const char *path = scratch("v.bin");
    for (int i = 0; i < 3 * 2; i++) {
        int32_t tokens[16];
        const int32_t begin = i % 2 ? 0 : samples[i / 2].begin;
        const DatasetOptions options = {.boundary_token = i % 2 ? 0 : -1};
        const Files f = read_sample(i / 2, begin);
        put_file(path, f.bytes[BIN], f.size[BIN]);
        OPEN_WITH(ds, path, &options);
        CHECK(ds.num_docs == 5 && ds.num_tokens == 22 && ds.num_empty == 0 && ds.bos == begin);
        for (int d = 0; d < 5; d++) {
            CHECK(dataset_doc_length(&ds, d) == sample_lengths[d]);
            MUST(dataset_read(&ds, d, 0, sample_lengths[d], tokens, &err));
            for (int j = 0; j < sample_lengths[d]; j++)
                CHECK(tokens[j] == (j == 0 ? begin : 100 * d + j + 1));
        }
        if (i % 2) check_refused(path, "is nowhere in it");
        for (size_t n = f.size[BIN] + 8; n-- > 0;) {
            CHECK(truncate(path, (off_t)n) == 0);
            if (n != f.size[BIN]) check_refused(path, "");
        }
    }
    for (int word = 3; word < 256; word++) {
        Files f = read_sample(0, 50256);
        put_word(&f, word, 1);
        put_file(path, f.bytes[BIN], f.size[BIN]);
        check_refused(path, "expected 0 in an llm.c shard");
    }
    check_opens("tests/golden/shards");  // by modded-nanogpt's names of files
}

// The scan reads blocks: a border at every position around the end of the first one.
TEST(scanning_crosses_blocks) {
    enum { BLOCK = 1 << 18, TOKENS = BLOCK + 100 };
    static unsigned char big[1024 + 2 * TOKENS];
    const DatasetOptions options = {.boundary_token = 9};
    put(big, 20240520, 4);
    put(big + 4, 1, 4);
    put(big + 8, TOKENS, 4);
    for (int64_t border = BLOCK - 2; border <= BLOCK + 2; border++) {
        put(big + 1024 + 2 * border, 9, 2);
        put_file(scratch("big.bin"), big, sizeof big);
        put(big + 1024 + 2 * border, 0, 2);
        OPEN_WITH(ds, scratch("big.bin"), &options);
        CHECK(ds.num_docs == 2 && dataset_doc_length(&ds, 0) == border);
    }
}

TEST(other_files_are_refused) {
    static const char *const others[][2] = {{"llmq.bin", "llmq's"},
                                            {"olmo.npy", "OLMo's"},
                                            {"numpy.npy", "a numpy array"},
                                            {"datatrove.ds", "datatrove's"},
                                            {"megatron.bin", "unknown"}};
    for (int i = 0; i < 5; i++)
        check_refused(printed("tests/golden/shards/%s", others[i][0]), others[i][1]);
    CHECK(mkdir(scratch("bare"), 0777) == 0);
    check_refused(scratch("bare"), "found none");
    put_file(scratch("bare.npy"), "\1\0\2\0", 4);
    check_refused(scratch("bare.npy"), "bare.npy: expected a token shard, found OLMo's tokens");
    put_file(scratch("other.bin"), "text of some length", 19);
    check_refused(scratch("other.bin"), "found unknown");
    check_refused(scratch("absent*.bin"), "found nothing");
}

// Shards by the names of split, in order; a list keeps its own.
TEST(directories_globs_and_lists) {
    char names[] =
        "set, [a] of/train_00001;set, [a] of/train_00000;set, [a] of/val_00000;set, [a] of/other;"
        "part1;part2";
    Files f = make_files(2, false);
    CHECK(mkdir(scratch("set, [a] of"), 0777) == 0);
    for (char *name = strtok(names, ";"); name; name = strtok(NULL, ";")) save(&f, name);
    const char *list = list_of("part2.bin", "part1.bin");
    const struct {
        const char *spec, *split;
        size_t num_shards;
        const char *first;
    } cases[] = {{scratch("set, [a] of"), NULL, 2, "train_00000.bin"},
                 {scratch("set, [a] of"), "val", 1, "val_00000.bin"},
                 {scratch("part?.bin"), NULL, 2, "part1.bin"},
                 {list, NULL, 2, "part2.bin"}};
    for (int i = 0; i < 4; i++) {
        DatasetOptions options = {.boundary_token = -1};
        if (cases[i].split) options.split = cases[i].split;
        OPEN_WITH(ds, cases[i].spec, &options);
        CHECK(ds.num_shards == cases[i].num_shards && strstr(ds.shards[0].path, cases[i].first));
        for (size_t s = 0; s < ds.num_shards; s++) check_documents(&ds, (int64_t)s * NUM_DOCS);
    }
    // one bad shard is enough
    CHECK(truncate(scratch("part2.bin"), (off_t)f.size[BIN] - 2) == 0);
    check_refused(list_of("part1.bin", "part2.bin"), "part2.bin: expected exactly 1114 bytes");
    check_refused(list_of("part1.bin", "part3.bin"), "part3.bin");
    check_refused(",", "expected paths");
}

TEST(more_shards_than_descriptors) {
    enum { SHARDS = 300 };
    struct rlimit few;
    Files f = make_files(2, false);
    int32_t out[8];
    CHECK(mkdir(scratch("many"), 0777) == 0);
    for (int i = 0; i < SHARDS; i++) save(&f, printed("many/train_%05d", i));
    CHECK(getrlimit(RLIMIT_NOFILE, &few) == 0);
    few.rlim_cur = 100;
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    OPEN(ds, scratch("many"));
    CHECK(ds.num_shards == SHARDS);
    for (int i = 0; i < 3000; i++) {
        const int64_t doc = test_rng_below(SHARDS) * NUM_DOCS + 2;
        MUST(dataset_read(&ds, doc, 0, 7, out, &err));
        CHECK(out[0] == 6 && out[6] == 12);
    }
}

// Closed: its numbers
static Dataset seen(const char *path) {
    OPEN(ds, path);
    return ds;
}

// Each change to a data set, and the fingerprints that differ after it
TEST(fingerprints_cover_everything) {
    enum { NAME, OTHER_END, VOCABULARY, TOKEN, TARGETS_OF_IT, TWICE, NUM_CHANGES };
    Files f = make_files(2, true);
    CHECK(mkdir(scratch("moved"), 0777) == 0);
    save(&f, "print");
    save(&f, "moved/print");
    const Dataset one = seen(scratch("print.bin")), moved = seen(scratch("moved/print.bin"));
    CHECK(moved.fingerprint == one.fingerprint && moved.token_fingerprint == one.token_fingerprint);
    for (int change = 0; change < NUM_CHANGES; change++) {
        f = make_files(2, true);
        if (change == OTHER_END)
            put(f.bytes[IDX] + ENDS_AT, 4, 8);  // the first document a token shorter
        if (change == VOCABULARY) put_word(&f, 10, VOCAB + 1);
        if (change == TOKEN) f.bytes[BIN][1024 + 2 * 20] ^= 1;         // with a correct checksum
        if (change == TARGETS_OF_IT) f.bytes[MASK][BITS_AT] = 1 << 2;  // token 2 instead of token 3
        save(&f, change == NAME ? "other" : "print");
        const Dataset now = seen(change == TWICE  ? list_of("print.bin", "moved/print.bin")
                                 : change == NAME ? scratch("other.bin")
                                                  : scratch("print.bin"));
        CHECK_MSG((now.fingerprint != one.fingerprint) == (change != TARGETS_OF_IT), "change %d",
                  change);
        CHECK_MSG(change < TOKEN || now.token_fingerprint != one.token_fingerprint, "change %d",
                  change);
    }
    f = read_sample(0, 50256);  // without checksums, what is read
    put_file(scratch("scan.bin"), f.bytes[BIN], f.size[BIN]);
    const Dataset before = seen(scratch("scan.bin"));
    f.bytes[BIN][f.size[BIN] - 2] ^= 1;
    put_file(scratch("scan.bin"), f.bytes[BIN], f.size[BIN]);
    CHECK(seen(scratch("scan.bin")).token_fingerprint != before.token_fingerprint);
}

TEST(tokenizers_and_vocabularies_must_agree) {
    static const struct {
        int word, value;
        bool agree;
    } others[] = {{16, 0x5678, false}, {16, 0, true}, {10, VOCAB + 1, false}};  // 0: unknown
    Files f = make_files(2, false);
    DatasetOptions options = {.boundary_token = -1, .vocab_size = VOCAB};
    save(&f, "tok_a");
    for (int i = 0; i < 3; i++) {
        f = make_files(2, false);
        put_word(&f, others[i].word, others[i].value);
        save(&f, "tok_b");
        const char *both = list_of("tok_a.bin", "tok_b.bin");
        if (others[i].agree)
            check_opens(both);
        else
            REFUSED(EXIT_CHECKPOINT_MISFIT, "", opens(both, &err));
    }
    OPEN_WITH(ds, scratch("tok_a.bin"), &options);
    Dataset other;
    options.vocab_size--;  // the model has fewer
    REFUSED(EXIT_CHECKPOINT_MISFIT, "", dataset_open(&other, ds.shards->path, &options, &err));
}

TEST(empty_shards) {
    Files f = make_files(2, false);
    save(&f, "full");
    put_word(&f, 2, 0);
    f.size[BIN] = 1024;
    put(f.bytes[IDX] + 24, 0, 8);
    memset(f.bytes[IDX] + ENDS_AT, 0, 8 * NUM_ENDS);
    f.size[IDX] = SUMS_AT + 4;
    save(&f, "empty");
    check_refused(scratch("empty.bin"), "expected documents, found none");
    check_opens(list_of("empty.bin", "full.bin"));
}

// Records of that many bytes with their end, as lines and in an array; the last line has no end
TEST(records_that_are_too_long_are_refused) {
    enum { MOST = 300000 };
    static char text[2 * MOST];
    for (int i = 0; i < 12; i++) {
        const bool array = i % 2, last = i / 2 % 2;
        const int size = MOST - 1 + i / 4;
        const char *path = scratch(array ? "long.json" : "long.jsonl");
        const int n = snprintf(text, sizeof text, "%s{\"text\": \"%0*d\"}%s", array ? "[" : "",
                               size - 12 - (array || !last), 0,
                               array  ? last ? "]" : ",{\"text\": \"b\"}]"
                               : last ? ""
                                      : "\n{\"text\": \"b\"}");
        Inputs inputs;
        Unit u = {0};
        UnitReader r = {.in = &inputs, .most_bytes = MOST, .file.fd = -1};
        Error err = {0};
        put_file(path, text, (size_t)n);
        MUST(inputs_collect(&inputs, path, "/nowhere", &err));
        while (unit_read(&r, &u, &err)) CHECK(u.num_bytes <= MOST);
        CHECK_MSG(err.code == (size > MOST ? EXIT_BAD_INPUT : 0), "%d: %s", i, err.what);
        CHECK(!err.code || strstr(err.what, "record 1: expected at most 300000 bytes"));
        r.next = 0, r.offset = 0, file_close(&r.file);
        stop_signal = SIGTERM;
        CHECK(!unit_read(&r, &u, &err) && err.code == (size > MOST ? EXIT_BAD_INPUT : 0));
        stop_signal = 0;
        file_close(&r.file);
        inputs_free(&inputs);
        unit_free(&u);
    }
}

TEST_MAIN()
