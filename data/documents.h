// Document shards: proves the sizes of a list of token files, then reads tokens of document i.
//
// Read: our shards with their .idx, llm.c v1 and v7 (modded-nanogpt's are v1), datatrove .ds with
// .ds.index, Megatron .bin with .idx, llmq BIN.TOK. Byte layouts: data/README.md.
//
// Documents are numbered from 0 over all shards in order; empty ones are left out and counted.
// Every shard's size is proven to be what its header says before anything is used, and every count
// is bounded by a file size before memory is asked for. Tokens are checked when they are read: each
// block of them against its checksum where the index has checksums (ours has), and each id.
#ifndef UNPAD_DOCUMENTS_H
#define UNPAD_DOCUMENTS_H

#include <assert.h>
#include <dirent.h>
#include <fnmatch.h>
#include <glob.h>
#include <pthread.h>

#include "io.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "shards are little-endian, and read without swapping"
#endif

typedef struct {
    const char *split;       // which files of a directory: "train" (also when NULL) or "val"
    int32_t vocab_size;      // the model's: data made for more ids is refused; 0: take the data's
    int32_t boundary_token;  // only files without an index; -1: by format (v1 50256, v7 128000)
    bool boundary_ends;      // that token ends documents (EOS) instead of starting them (BOS)
} DatasetOptions;

typedef enum { SHARD_UNPAD, SHARD_LLMC, SHARD_DATATROVE, SHARD_MEGATRON, SHARD_LLMQ } ShardFormat;

typedef struct {
    File file;  // fd -1 while closed; file.path is path
    char *path;
    ShardFormat format;
    uint64_t data_offset;
    int token_bytes;  // 2 or 4
    int64_t num_tokens;
    int32_t vocab_size, bos, eos;  // -1: the file does not say
    uint64_t tokenizer_hash;       // 0: the file does not say
    int64_t first_doc, num_docs;   // documents that are not empty
    uint64_t *doc_ends;            // (num_docs) cumulative, strictly increasing
    int64_t num_empty;
    uint32_t checksum;  // of the header and the index
    int64_t block_tokens;  // that have a checksum together; 0: tokens have none
    uint32_t *block_crcs;  // (shard_num_blocks) CRC32C of the bytes of each block; NULL: none
    uint32_t token_sum;    // of those checksums, else of the tokens that were read at the start
    int64_t last_use;
} Shard;

typedef struct {
    Shard *shards;
    size_t num_shards, shard_capacity;
    int64_t num_docs, num_tokens, num_empty;
    int32_t vocab_size, bos, eos;
    uint64_t tokenizer_hash, fingerprint, token_fingerprint;
    int32_t scanned_token;  // the boundary that an index was built with; -1: none was
    int64_t clock;
    int num_open;
    unsigned char *block;  // one block while it is checked
    size_t block_capacity;
    pthread_mutex_t lock;
} Dataset;

enum {
    SHARD_HEADER_BYTES = 1024,
    SHARD_HEADER_WORDS = 256,
    SHARD_MAGIC_U16 = 20240520,
    SHARD_MAGIC_U32 = 20240801,
    SHARD_MAGIC_EVAL = 20240522,
    SHARD_OWN_MAGIC = 0x44415055,  // "UPAD"
    SHARD_OWN_VERSION = 1,
    SHARD_FLAG_BOS_FIRST = 1,
    SHARD_FLAG_EOS_LAST = 2,
    INDEX_VERSION = 2,
    INDEX_HEADER_BYTES = 40,
    INDEX_V1_HEADER_BYTES = 32,  // without checksums of tokens
    INDEX_MAX_BLOCK = 1 << 20,   // tokens
    SAMPLE_PIECES = 8,           // read of shards whose tokens have no checksums
    SAMPLE_BYTES = 4096,
    DATASET_MAX_OPEN = 256,  // descriptors; shards beyond are closed and opened again
};

static const char DATASET_HINT_REMAKE[] =
    "the file is damaged or cut short: copy it again, or make it again with data/prepare.py";

static inline DatasetOptions dataset_options(void) {
    DatasetOptions options;
    memset(&options, 0, sizeof options);
    options.boundary_token = -1;
    return options;
}

// -------------------------------------------------------------------------------------------------
// Which files

typedef struct {
    char **items;
    size_t n, capacity;
} PathList;

static inline void path_list_add(PathList *list, const char *path) {
    const size_t size = strlen(path) + 1;
    char *copy = (char *)host_calloc(size, 1, "a path");
    memcpy(copy, path, size);
    list->items =
        (char **)host_grow(list->items, &list->capacity, list->n + 1, sizeof(char *), "paths");
    list->items[list->n++] = copy;
}

static inline void path_list_free(PathList *list) {
    for (size_t i = 0; i < list->n; i++) free(list->items[i]);
    free(list->items);
    memset(list, 0, sizeof *list);
}

static inline int path_compare(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// Sorted by bytes, so that the order of documents does not depend on the locale.
static inline void path_list_sort(PathList *list, size_t from) {
    if (list->n > from) qsort(list->items + from, list->n - from, sizeof(char *), path_compare);
}

static inline bool path_list_add_dir(PathList *list, const char *dir, const char *pattern,
                                     Error *err) {
    const size_t before = list->n;
    char path[4096];
    DIR *d = opendir(dir);
    if (!d) return error_set(err, EXIT_BAD_INPUT, "", "%s: cannot list: %s", dir, strerror(errno));
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(d));) {
        if (fnmatch(pattern, entry->d_name, FNM_PERIOD) != 0) continue;
        const int n = snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        ok = n > 0 && (size_t)n < sizeof path;
        if (ok) path_list_add(list, path);
        else error_set(err, EXIT_BAD_INPUT, "", "%s/%s: path too long", dir, entry->d_name);
    }
    closedir(d);
    path_list_sort(list, before);
    return ok;
}

// DIR/train_*.bin, else DIR/*_train_*.bin (modded-nanogpt), else DIR/*.ds (datatrove).
static inline bool path_list_expand_dir(PathList *list, const char *dir, const char *split,
                                        Error *err) {
    const size_t before = list->n;
    char pattern[64];
    snprintf(pattern, sizeof pattern, "%s_*.bin", split);
    if (!path_list_add_dir(list, dir, pattern, err)) return false;
    snprintf(pattern, sizeof pattern, "*_%s_*.bin", split);
    if (list->n == before && !path_list_add_dir(list, dir, pattern, err)) return false;
    if (list->n == before && strcmp(split, "train") == 0)
        return path_list_add_dir(list, dir, "*.ds", err);
    return true;
}

static inline bool path_list_expand_glob(PathList *list, const char *pattern) {
    const size_t before = list->n;
    glob_t found;
    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) path_list_add(list, found.gl_pathv[i]);
        globfree(&found);
    }
    path_list_sort(list, before);
    return list->n > before;
}

// A file, a directory, or a glob pattern, in this order: a name that exists is never a pattern.
static inline bool path_list_expand_one(PathList *list, const char *item, const char *split,
                                        Error *err) {
    struct stat st;
    const size_t before = list->n;
    const bool exists = stat(item, &st) == 0;
    if (exists && S_ISDIR(st.st_mode)) {
        if (!path_list_expand_dir(list, item, split, err)) return false;
    } else if (exists) {
        path_list_add(list, item);
    } else {
        path_list_expand_glob(list, item);
    }
    if (list->n > before) return true;
    return error_set(err, EXIT_BAD_INPUT, "make shards with data/prepare.py INPUT --out DIR",
                     "%s: expected token shards (%s_*.bin), found none", item, split);
}

// The whole of spec when it exists, else its parts between commas.
static inline bool path_list_expand(PathList *list, const char *spec, const char *split,
                                    Error *err) {
    struct stat st;
    if (stat(spec, &st) == 0 || !strchr(spec, ','))
        return path_list_expand_one(list, spec, split, err);
    const size_t size = strlen(spec) + 1;
    char *copy = (char *)host_calloc(size, 1, "a path");
    memcpy(copy, spec, size);
    bool ok = true;
    char *rest = copy, *item;
    while (ok && (item = strsep(&rest, ",")) != NULL)
        ok = item[0] == 0 || path_list_expand_one(list, item, split, err);
    free(copy);
    if (ok && list->n == 0)
        return error_set(err, EXIT_BAD_INPUT, "", "data: expected a path, found '%s'", spec);
    return ok;
}

// -------------------------------------------------------------------------------------------------
// Pieces that all formats share

static inline uint64_t shard_word(const unsigned char *p, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, p, bytes);
    return value;
}

static inline bool shard_size_error(const File *f, uint64_t expected, const char *of, Error *err) {
    return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                     "%s: expected exactly %llu bytes (%s), found %llu", f->path,
                     (unsigned long long)expected, of, (unsigned long long)f->size_bytes);
}

// The file must be exactly header + num_tokens * token_bytes + tail long.
static inline bool shard_prove_size(const Shard *s, uint64_t tail, Error *err) {
    uint64_t size = 0;
    const bool fits = s->num_tokens >= 0 &&
                      checked_mul((uint64_t)s->num_tokens, (uint64_t)s->token_bytes, &size) &&
                      checked_add(size, s->data_offset + tail, &size);
    if (!fits)
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE, "%s: a header of %lld tokens",
                         s->path, (long long)s->num_tokens);
    char of[64];
    snprintf(of, sizeof of, "%lld tokens of %d bytes", (long long)s->num_tokens, s->token_bytes);
    return size == s->file.size_bytes || shard_size_error(&s->file, size, of, err);
}

// doc_ends from `count` cumulative ends: never decreasing, the last one num_tokens; empty ones
// dropped.
static inline bool shard_set_ends(Shard *s, uint64_t *ends, uint64_t count, const char *path,
                                  Error *err) {
    uint64_t before = 0;
    s->doc_ends = ends;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t end = ends[i];
        if (end < before || end > (uint64_t)s->num_tokens)
            return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                             "%s: document %llu ends at token %llu, expected %llu to %lld", path,
                             (unsigned long long)i, (unsigned long long)end,
                             (unsigned long long)before, (long long)s->num_tokens);
        if (end == before) s->num_empty++;
        else ends[s->num_docs++] = end;
        before = end;
    }
    if (before == (uint64_t)s->num_tokens) return true;
    return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                     "%s: documents end at token %llu, expected %lld", path,
                     (unsigned long long)before, (long long)s->num_tokens);
}

// path with its last `cut` characters replaced by `ending`.
static inline bool shard_sidecar(char *out, size_t capacity, const char *path, size_t cut,
                                 const char *ending, Error *err) {
    const int keep = (int)(strlen(path) - cut);
    const int n = snprintf(out, capacity, "%.*s%s", keep, path, ending);
    if (n > 0 && (size_t)n < capacity) return true;
    return error_set(err, EXIT_BAD_INPUT, "", "%s: path too long", path);
}

static inline bool path_ends_with(const char *path, const char *ending) {
    const size_t n = strlen(path), k = strlen(ending);
    return n >= k && strcmp(path + n - k, ending) == 0;
}

static inline uint64_t shard_num_blocks(const Shard *s) {
    const uint64_t block = (uint64_t)s->block_tokens;
    return block ? ((uint64_t)s->num_tokens + block - 1) / block : 0;
}

// CRC32C of a few pieces spread evenly over the tokens, the first and the last bytes among them: it
// finds another file of the same size, but not every changed byte.
static inline bool shard_sample_tokens(Shard *s, Error *err) {
    unsigned char piece[SAMPLE_BYTES];
    const uint64_t bytes = (uint64_t)s->num_tokens * (uint64_t)s->token_bytes,
                   n = bytes < sizeof piece ? bytes : sizeof piece;
    for (uint64_t i = 0; i < SAMPLE_PIECES; i++) {
        const uint64_t at = (bytes - n) / (SAMPLE_PIECES - 1) * i +
                            (bytes - n) % (SAMPLE_PIECES - 1) * i / (SAMPLE_PIECES - 1);
        if (!file_read_at(&s->file, piece, n, s->data_offset + at, err)) return false;
        s->token_sum = crc32c(s->token_sum, piece, (size_t)n);
    }
    return true;
}

// -------------------------------------------------------------------------------------------------
// Indexes built by scanning: formats that mark documents by a token only

typedef struct {
    uint64_t *items;
    size_t n, capacity;
} EndList;

static inline void end_list_add(EndList *list, uint64_t end) {
    list->items = (uint64_t *)host_grow(list->items, &list->capacity, list->n + 1, sizeof(uint64_t),
                                        "document ends");
    list->items[list->n++] = end;
}

static inline bool shard_scan_block(const Shard *s, EndList *ends, const unsigned char *block,
                                    int64_t from, int64_t n, uint32_t token, bool token_ends) {
    bool found = false;
    for (int64_t i = 0; i < n; i++) {
        const unsigned char *p = block + i * s->token_bytes;
        if ((uint32_t)shard_word(p, (size_t)s->token_bytes) != token) continue;
        found = true;
        if (token_ends) end_list_add(ends, (uint64_t)(from + i + 1));
        else if (from + i > 0) end_list_add(ends, (uint64_t)(from + i));
    }
    return found;
}

static inline bool shard_scan(Shard *s, int32_t token, bool token_ends, Error *err) {
    static const int64_t BLOCK_TOKENS = 1 << 18;
    EndList ends;
    memset(&ends, 0, sizeof ends);
    unsigned char *block = (unsigned char *)host_calloc(BLOCK_TOKENS, 4, "scanning a shard");
    bool ok = true, found = false;
    for (int64_t at = 0; ok && at < s->num_tokens; at += BLOCK_TOKENS) {
        const int64_t left = s->num_tokens - at, n = left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
        const uint64_t offset = s->data_offset + (uint64_t)at * (uint64_t)s->token_bytes;
        const uint64_t bytes = (uint64_t)n * (uint64_t)s->token_bytes;
        ok = file_read_at(&s->file, block, bytes, offset, err);
        if (ok) s->token_sum = crc32c(s->token_sum, block, (size_t)bytes);
        if (ok && shard_scan_block(s, &ends, block, at, n, (uint32_t)token, token_ends))
            found = true;
    }
    free(block);
    if (ok && !found && s->num_tokens > 0)
        ok =
            error_set(err, EXIT_BAD_INPUT, "name the token between documents with --boundary-token",
                      "%s: no index, and token %d is nowhere in it", s->path, token);
    if (!ok) {
        free(ends.items);
        return false;
    }
    if (ends.n == 0 || ends.items[ends.n - 1] != (uint64_t)s->num_tokens)
        end_list_add(&ends, (uint64_t)s->num_tokens);
    s->checksum = crc32c(s->checksum, ends.items, ends.n * sizeof(uint64_t));
    return shard_set_ends(s, ends.items, ends.n, s->path, err);
}

// -------------------------------------------------------------------------------------------------
// Our shards, and llm.c's that they extend

// The sidecar: 8 bytes magic, uint32 version, uint32 checksum of the shard's header, uint64
// documents, uint64 tokens, uint64 tokens of a block, the ends, uint32 checksums of the blocks,
// CRC32C of all before. Version 1 has no blocks.
static inline bool shard_check_index(const Shard *s, const File *f, const unsigned char *text,
                                     uint64_t count, uint64_t body, Error *err) {
    const uint32_t crc = crc32c(0, text, (size_t)body),
                   expected = (uint32_t)shard_word(text + body, 4);
    if (expected != crc)
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                         "%s: expected checksum %08x, found %08x", f->path, expected, crc);
    const bool belongs = shard_word(text + 12, 4) == s->checksum &&
                         shard_word(text + 16, 8) == count &&
                         shard_word(text + 24, 8) == (uint64_t)s->num_tokens;
    return belongs || error_set(err, EXIT_BAD_INPUT, "copy each .bin together with its .idx",
                                "%s: is the index of another shard", f->path);
}

// How long the header of the index is and how many tokens share a checksum.
static inline bool shard_index_header(Shard *s, const File *f, uint64_t *header_bytes, Error *err) {
    unsigned char head[INDEX_HEADER_BYTES] = {0};
    const uint64_t n = f->size_bytes < sizeof head ? f->size_bytes : sizeof head;
    if (!file_read_at(f, head, n, 0, err)) return false;
    const uint64_t version = shard_word(head + 8, 4), block = shard_word(head + 32, 8);
    if (memcmp(head, "UNPADIDX", 8) != 0 || version < 1 || version > INDEX_VERSION)
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                         "%s: expected an index of version 1 or %d", f->path, INDEX_VERSION);
    *header_bytes = version == 1 ? INDEX_V1_HEADER_BYTES : INDEX_HEADER_BYTES;
    if (version == 1) return true;
    if (block < 1 || block > INDEX_MAX_BLOCK)
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                         "%s: checksums of blocks of %llu tokens, expected 1 to %d", f->path,
                         (unsigned long long)block, INDEX_MAX_BLOCK);
    s->block_tokens = (int64_t)block;
    return true;
}

// `count` comes from the shard's header; the file must have exactly the size that follows.
static inline bool shard_read_index_file(Shard *s, const File *f, uint64_t count, Error *err) {
    uint64_t at = 0, size = 0;
    if (!shard_index_header(s, f, &at, err)) return false;
    const uint64_t num_blocks = shard_num_blocks(s), tail = at + num_blocks * 4 + 4;
    if (!checked_mul(count, 8, &size) || !checked_add(size, tail, &size) || size != f->size_bytes)
        return shard_size_error(f, size, "from the shard's header", err);
    unsigned char *text = (unsigned char *)host_calloc((size_t)size, 1, "a shard index");
    bool ok = file_read_at(f, text, size, 0, err) &&
              shard_check_index(s, f, text, count, size - 4, err);
    if (ok) {
        uint64_t *ends = (uint64_t *)host_calloc((size_t)count, 8, "document ends");
        memcpy(ends, text + at, (size_t)count * 8);
        if (s->block_tokens)
            s->block_crcs = (uint32_t *)host_calloc((size_t)num_blocks, 4, "checksums of tokens");
        if (num_blocks) memcpy(s->block_crcs, text + at + count * 8, (size_t)num_blocks * 4);
        s->token_sum = crc32c(0, text + at + count * 8, (size_t)num_blocks * 4);
        // without the file's own checksum at the end: over both together it would be a constant
        s->checksum = crc32c(s->checksum, text, (size_t)size - 4);
        ok = shard_set_ends(s, ends, count, f->path, err);
    }
    free(text);
    return ok;
}

static inline bool shard_read_index(Shard *s, uint64_t count, Error *err) {
    char path[4096];
    File f;
    if (!shard_sidecar(path, sizeof path, s->path, path_ends_with(s->path, ".bin") ? 4 : 0, ".idx",
                       err) ||
        !file_open(&f, path, "copy each .bin together with its .idx", err))
        return false;
    const bool ok = shard_read_index_file(s, &f, count, err);
    file_close(&f);
    return ok;
}

// The words that we add to llm.c's header; the CRC in the last one covers all others.
static inline bool shard_open_own(Shard *s, const unsigned char *head, Error *err) {
    int32_t w[SHARD_HEADER_WORDS];
    memcpy(w, head, sizeof w);
    s->format = SHARD_UNPAD;
    const uint32_t crc = crc32c(0, w, sizeof w - 4);
    if ((uint32_t)w[255] != crc)
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                         "%s: header checksum: expected %08x, found %08x", s->path,
                         (uint32_t)w[255], crc);
    if (w[9] != SHARD_OWN_VERSION)
        return error_set(err, EXIT_BAD_INPUT, "use a newer unpad.c",
                         "%s: expected shard version %d, found %d", s->path, SHARD_OWN_VERSION,
                         w[9]);
    s->checksum = crc;
    s->vocab_size = w[10];
    s->bos = (w[11] & SHARD_FLAG_BOS_FIRST) != 0 ? w[12] : -1;
    s->eos = (w[11] & SHARD_FLAG_EOS_LAST) != 0 ? w[13] : -1;
    s->tokenizer_hash = shard_word(head + 16 * 4, 8);
    const uint64_t count = shard_word(head + 14 * 4, 8);
    if (s->vocab_size < 1 || s->bos >= s->vocab_size || s->eos >= s->vocab_size || s->bos < -1 ||
        s->eos < -1)
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                         "%s: vocabulary %d, BOS %d, EOS %d", s->path, s->vocab_size, s->bos,
                         s->eos);
    return shard_prove_size(s, 0, err) && shard_read_index(s, count, err);
}

static inline bool shard_open_llmc(Shard *s, const unsigned char *head,
                                   const DatasetOptions *options, Error *err) {
    int32_t w[SHARD_HEADER_WORDS];
    memcpy(w, head, sizeof w);
    s->format = SHARD_LLMC;
    s->data_offset = SHARD_HEADER_BYTES;
    const bool wide = w[0] == SHARD_MAGIC_U32;
    s->token_bytes = wide ? 4 : 2;
    s->num_tokens = w[2];
    s->checksum = crc32c(0, head, SHARD_HEADER_BYTES);
    if (w[1] != (wide ? 7 : 1))
        return error_set(err, EXIT_BAD_INPUT, "", "%s: expected version %d of magic %d, found %d",
                         s->path, wide ? 7 : 1, w[0], w[1]);
    if (w[2] < 0)
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE, "%s: a header of %d tokens",
                         s->path, w[2]);
    if (w[8] == SHARD_OWN_MAGIC) return shard_open_own(s, head, err);
    for (int i = 3; i < SHARD_HEADER_WORDS; i++)
        if (w[i] != 0)
            return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                             "%s: header word %d: expected 0 in an llm.c shard, found %d", s->path,
                             i, w[i]);
    const int32_t usual = wide ? 128000 : 50256;
    const int32_t token = options->boundary_token >= 0 ? options->boundary_token : usual;
    if (options->boundary_ends) s->eos = token;
    else s->bos = token;
    return shard_prove_size(s, 0, err) && shard_scan(s, token, options->boundary_ends, err);
}

// -------------------------------------------------------------------------------------------------
// datatrove: raw tokens, and cumulative ends in NAME.ds.index; the width follows from both sizes

static inline bool shard_open_datatrove(Shard *s, Error *err) {
    char path[4096];
    File f;
    if (!shard_sidecar(path, sizeof path, s->path, 0, ".index", err) ||
        !file_open(&f, path, "copy each .ds together with its .ds.index", err))
        return false;
    s->format = SHARD_DATATROVE;
    const uint64_t count = f.size_bytes / 8;
    bool ok = f.size_bytes % 8 == 0 || shard_size_error(&f, count * 8, "whole entries", err);
    uint64_t *ends = ok ? (uint64_t *)host_calloc((size_t)count, 8, "document ends") : NULL;
    ok = ok && file_read_at(&f, ends, count * 8, 0, err);
    file_close(&f);
    const uint64_t size = s->file.size_bytes, tokens = ok && count > 0 ? ends[count - 1] : 0;
    if (ok && tokens <= size / 2) {
        s->num_tokens = (int64_t)tokens;
        s->token_bytes = tokens * 2 == size ? 2 : 4;
    }
    if (ok && (tokens > size / 2 || tokens * (uint64_t)s->token_bytes != size))
        ok = error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                       "%s: expected %llu tokens (its index) of 2 or 4 bytes, found %llu bytes",
                       s->path, (unsigned long long)tokens, (unsigned long long)size);
    if (!ok) {
        free(ends);
        return false;
    }
    s->checksum = crc32c(0, ends, (size_t)count * 8);
    return shard_set_ends(s, ends, count, path, err);
}

// -------------------------------------------------------------------------------------------------
// Megatron: raw tokens, and sequences with lengths and byte offsets in NAME.idx

// Sequences must follow one another in the file, and documents be runs of whole sequences.
static inline bool shard_megatron_ends(Shard *s, const File *f, const unsigned char *text,
                                       uint64_t nseq, uint64_t ndoc, uint64_t *ends, Error *err) {
    const unsigned char *lengths = text + 34, *offsets = lengths + nseq * 4,
                        *docs = offsets + nseq * 8;
    uint64_t tokens = 0, seq = 0;
    for (uint64_t d = 0; d + 1 < ndoc; d++) {
        const uint64_t stop = shard_word(docs + (d + 1) * 8, 8);
        if (shard_word(docs, 8) != 0 || stop < seq || stop > nseq)
            return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                             "%s: document %llu ends at sequence %llu of %llu", f->path,
                             (unsigned long long)d, (unsigned long long)stop,
                             (unsigned long long)nseq);
        for (; seq < stop; seq++) {
            if (shard_word(offsets + seq * 8, 8) != tokens * (uint64_t)s->token_bytes)
                return error_set(err, EXIT_BAD_INPUT, "only sequences one after another are read",
                                 "%s: sequence %llu: expected byte offset %llu, found %llu",
                                 f->path, (unsigned long long)seq,
                                 (unsigned long long)(tokens * (uint64_t)s->token_bytes),
                                 (unsigned long long)shard_word(offsets + seq * 8, 8));
            tokens += shard_word(lengths + seq * 4, 4);  // < 2^32 each, nseq < 2^60
        }
        ends[d] = tokens;
    }
    return seq == nseq || error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                                    "%s: documents cover %llu sequences, expected %llu", f->path,
                                    (unsigned long long)seq, (unsigned long long)nseq);
}

static inline bool shard_megatron_header(Shard *s, const File *f, const unsigned char *text,
                                         uint64_t *nseq, uint64_t *ndoc, Error *err) {
    *nseq = shard_word(text + 18, 8);
    *ndoc = shard_word(text + 26, 8);
    s->token_bytes = text[17] == 8 ? 2 : 4;
    if (shard_word(text + 9, 8) != 1 || (text[17] != 4 && text[17] != 8))
        return error_set(err, EXIT_BAD_INPUT, "tokens of type int32 (4) and uint16 (8) are read",
                         "%s: version %llu, type %d", f->path,
                         (unsigned long long)shard_word(text + 9, 8), text[17]);
    const uint64_t most = f->size_bytes / 8, size = 34 + *nseq * 12 + *ndoc * 8;
    const bool bounded = *nseq <= most && *ndoc <= most && *ndoc > 0;  // so size cannot wrap
    return (bounded && (size == f->size_bytes || size + *nseq == f->size_bytes)) ||
           error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                     "%s: %llu sequences and %llu documents do not make %llu bytes", f->path,
                     (unsigned long long)*nseq, (unsigned long long)*ndoc,
                     (unsigned long long)f->size_bytes);
}

static inline bool shard_open_megatron(Shard *s, const File *f, Error *err) {
    uint64_t nseq = 0, ndoc = 0;
    s->format = SHARD_MEGATRON;
    unsigned char *text =
        (unsigned char *)host_calloc((size_t)f->size_bytes, 1, "a Megatron index");
    uint64_t *ends = NULL;
    bool ok = file_read_at(f, text, f->size_bytes, 0, err) &&
              shard_megatron_header(s, f, text, &nseq, &ndoc, err);
    if (ok) {
        ends = (uint64_t *)host_calloc((size_t)ndoc, 8, "document ends");
        ok = shard_megatron_ends(s, f, text, nseq, ndoc, ends, err);
        s->num_tokens = (int64_t)(ndoc > 1 ? ends[ndoc - 2] : 0);
        s->checksum = crc32c(0, text, (size_t)f->size_bytes);
    }
    free(text);
    if (!ok || !shard_prove_size(s, 0, err)) {
        free(ends);
        return false;
    }
    return shard_set_ends(s, ends, ndoc - 1, f->path, err);
}

// True when NAME.idx beside NAME.bin is Megatron's; *f is then open.
static inline bool shard_find_megatron(const Shard *s, char *path, size_t capacity, File *f) {
    char magic[9] = {0};
    Error ignored;
    memset(&ignored, 0, sizeof ignored);
    if (!path_ends_with(s->path, ".bin") ||
        !shard_sidecar(path, capacity, s->path, 4, ".idx", &ignored) ||
        !file_open(f, path, "", &ignored))
        return false;
    if (f->size_bytes >= 34 && file_read_at(f, magic, 9, 0, &ignored) &&
        memcmp(magic, "MMIDIDX\0\0", 9) == 0)
        return true;
    file_close(f);
    return false;
}

// -------------------------------------------------------------------------------------------------
// llmq BIN.TOK: int32 tokens, no document ends

static inline bool shard_open_llmq(Shard *s, const unsigned char *head,
                                   const DatasetOptions *options, Error *err) {
    int32_t w[8];
    memcpy(w, head, sizeof w);
    s->format = SHARD_LLMQ;
    s->data_offset = SHARD_HEADER_BYTES;
    s->token_bytes = 4;
    s->num_tokens = w[4];
    s->checksum = crc32c(0, head, SHARD_HEADER_BYTES);
    if ((w[2] != 1 && w[2] != 2) || w[3] != 4 || w[4] < 0 || (w[2] == 2 && w[5] < 1))
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                         "%s: BIN.TOK version %d, %d bytes a token, %d tokens, vocabulary %d",
                         s->path, w[2], w[3], w[4], w[5]);
    if (w[2] == 2 && w[6] != 0)
        return error_set(err, EXIT_BAD_INPUT, "write the file without a mask",
                         "%s: has a loss mask, which is not read", s->path);
    s->vocab_size = w[2] == 2 ? w[5] : -1;
    if (options->boundary_token < 0)
        return error_set(err, EXIT_USAGE, "give the end-of-text id with --boundary-token",
                         "%s: BIN.TOK files do not say where documents end", s->path);
    if (options->boundary_ends) s->eos = options->boundary_token;
    else s->bos = options->boundary_token;
    return shard_prove_size(s, 0, err) &&
           shard_scan(s, options->boundary_token, options->boundary_ends, err);
}

// -------------------------------------------------------------------------------------------------
// Which format

static inline bool shard_unknown(const Shard *s, const unsigned char *head, uint64_t n,
                                 Error *err) {
    const uint32_t magic = n >= 4 ? (uint32_t)shard_word(head, 4) : 0;
    const uint32_t swapped = __builtin_bswap32(magic);
    const char *looks = "unknown", *hint = "make shards with data/prepare.py INPUT --out DIR";
    uint64_t printable = 0;
    while (printable < n &&
           (head[printable] >= 0x20 || (head[printable] >= 9 && head[printable] <= 13)))
        printable++;
    if (n < SHARD_HEADER_BYTES && (magic == SHARD_MAGIC_U16 || magic == SHARD_MAGIC_U32))
        looks = "a shard cut off in its header", hint = DATASET_HINT_REMAKE;
    else if (swapped == SHARD_MAGIC_U16 || swapped == SHARD_MAGIC_U32) looks = "a big-endian shard";
    else if (magic == SHARD_MAGIC_EVAL) looks = "llm.c's multiple-choice evaluation file";
    else if (n >= 6 && memcmp(head, "\x93NUMPY", 6) == 0) looks = "a numpy array";
    else if (n >= 2 && head[0] == 0x1f && head[1] == 0x8b) looks = "a gzip file";
    else if (path_ends_with(s->path, ".idx") || path_ends_with(s->path, ".index"))
        looks = "an index", hint = "name the token file, not its index";
    else if (n > 0 && printable == n) looks = "text";
    return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected a token shard, found %s", s->path,
                     looks);
}

static inline bool shard_open_format(Shard *s, const DatasetOptions *options, Error *err) {
    unsigned char head[SHARD_HEADER_BYTES] = {0};
    char path[4096];
    File index;
    if (path_ends_with(s->path, ".ds")) return shard_open_datatrove(s, err);
    const uint64_t size = s->file.size_bytes;
    const uint64_t n = size < sizeof head ? size : sizeof head;
    if (!file_read_at(&s->file, head, n, 0, err)) return false;
    const bool whole = n == sizeof head;
    const uint32_t magic = (uint32_t)shard_word(head, 4);
    if (whole && (magic == SHARD_MAGIC_U16 || magic == SHARD_MAGIC_U32))
        return shard_open_llmc(s, head, options, err);
    if (whole && memcmp(head, "BIN.TOK\n", 8) == 0) return shard_open_llmq(s, head, options, err);
    if (!shard_find_megatron(s, path, sizeof path, &index)) return shard_unknown(s, head, n, err);
    const bool ok = shard_open_megatron(s, &index, err);
    file_close(&index);
    return ok;
}

static inline bool shard_open(Shard *s, const DatasetOptions *options, Error *err) {
    if (!shard_open_format(s, options, err)) return false;
    const bool scanned = s->format == SHARD_LLMC || s->format == SHARD_LLMQ;
    return scanned || s->block_tokens || shard_sample_tokens(s, err);
}

// -------------------------------------------------------------------------------------------------
// The data set

static inline void dataset_close(Dataset *ds) {
    for (size_t i = 0; i < ds->num_shards; i++) {
        if (ds->shards[i].file.fd >= 0) file_close(&ds->shards[i].file);
        free(ds->shards[i].doc_ends);
        free(ds->shards[i].block_crcs);
        free(ds->shards[i].path);
    }
    free(ds->shards);
    free(ds->block);
    pthread_mutex_destroy(&ds->lock);
    memset(ds, 0, sizeof *ds);
}

static inline uint64_t dataset_mix(uint64_t h, const void *data, size_t n) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 1099511628211ull;  // FNV-1a
    return h;
}

static inline const char *path_basename(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// All shards must come from one tokenizer, as far as they say.
static inline bool dataset_agrees(Dataset *ds, const Shard *s, const DatasetOptions *options,
                                  Error *err) {
    if (options->vocab_size > 0 && s->vocab_size > options->vocab_size)
        return error_set(err, EXIT_BAD_INPUT, "prepare the data with the model's tokenizer",
                         "%s: made for a vocabulary of %d, the model has %d", s->path,
                         s->vocab_size, options->vocab_size);
    const bool other_vocab =
        s->vocab_size > 0 && ds->vocab_size > 0 && s->vocab_size != ds->vocab_size;
    const bool other_hash = s->tokenizer_hash != 0 && ds->tokenizer_hash != 0 &&
                            s->tokenizer_hash != ds->tokenizer_hash;
    if (other_vocab || other_hash)
        return error_set(err, EXIT_BAD_INPUT, "use shards made with one tokenizer",
                         "%s: made with another tokenizer than %s", s->path, ds->shards[0].path);
    if (s->vocab_size > 0) ds->vocab_size = s->vocab_size;
    if (s->tokenizer_hash != 0) ds->tokenizer_hash = s->tokenizer_hash;
    if (s->bos >= 0) ds->bos = s->bos;
    if (s->eos >= 0) ds->eos = s->eos;
    return true;
}

static inline void dataset_close_oldest(Dataset *ds) {
    Shard *oldest = NULL;
    for (size_t i = 0; i < ds->num_shards; i++) {
        Shard *s = &ds->shards[i];
        if (s->file.fd >= 0 && (!oldest || s->last_use < oldest->last_use)) oldest = s;
    }
    if (oldest) file_close(&oldest->file);
    ds->num_open -= oldest != NULL;
}

// Opens a shard that is closed; it must still have the size that was proven.
static inline bool dataset_touch(Dataset *ds, Shard *s, Error *err) {
    s->last_use = ++ds->clock;
    if (s->file.fd >= 0) return true;
    const uint64_t size = s->file.size_bytes;
    if (ds->num_open >= DATASET_MAX_OPEN) dataset_close_oldest(ds);
    s->file.fd = -1;
    if (!file_open(&s->file, s->path, "do not move files while training", err)) return false;
    ds->num_open++;
    if (s->file.size_bytes == size) return true;
    const uint64_t found = s->file.size_bytes;
    s->file.size_bytes = size;
    return error_set(err, EXIT_BAD_INPUT, "do not change files while training",
                     "%s: expected %llu bytes as before, found %llu", s->path,
                     (unsigned long long)size, (unsigned long long)found);
}

static inline bool dataset_add(Dataset *ds, char *path, const DatasetOptions *options, Error *err) {
    ds->shards = (Shard *)host_grow(ds->shards, &ds->shard_capacity, ds->num_shards + 1,
                                    sizeof(Shard), "the list of shards");
    Shard *s = &ds->shards[ds->num_shards];
    memset(s, 0, sizeof *s);
    const size_t size = strlen(path) + 1;
    s->path = (char *)host_calloc(size, 1, "a path");
    memcpy(s->path, path, size);
    s->file.fd = s->vocab_size = s->bos = s->eos = -1;
    s->first_doc = ds->num_docs;
    s->last_use = ++ds->clock;
    if (ds->num_open >= DATASET_MAX_OPEN) dataset_close_oldest(ds);
    ds->num_shards++;
    if (!file_open(&s->file, s->path, "", err)) return false;
    ds->num_open++;
    if (!shard_open(s, options, err) || !dataset_agrees(ds, s, options, err)) return false;
    if ((s->format == SHARD_LLMC || s->format == SHARD_LLMQ) && s->num_tokens > 0)
        ds->scanned_token = s->bos >= 0 ? s->bos : s->eos;
    ds->num_docs += s->num_docs;
    ds->num_tokens += s->num_tokens;
    ds->num_empty += s->num_empty;
    const uint64_t facts[] = {s->file.size_bytes, s->checksum, (uint64_t)s->num_docs};
    const char *name = path_basename(s->path);
    ds->fingerprint =
        dataset_mix(dataset_mix(ds->fingerprint, name, strlen(name) + 1), facts, sizeof facts);
    ds->token_fingerprint =
        dataset_mix(ds->token_fingerprint, &s->token_sum, sizeof s->token_sum);
    return true;
}

static inline bool dataset_add_all(Dataset *ds, const PathList *paths,
                                   const DatasetOptions *options, Error *err) {
    for (size_t i = 0; i < paths->n; i++)
        if (!dataset_add(ds, paths->items[i], options, err)) return false;
    if (ds->num_docs == 0)
        return error_set(err, EXIT_BAD_INPUT, "",
                         "%s: expected documents, found none in %zu shards", paths->items[0],
                         paths->n);
    if (ds->vocab_size > 0) return true;
    ds->vocab_size = options->vocab_size > 0 ? options->vocab_size : INT32_MAX;
    return true;
}

// spec: a file, a directory, a glob pattern, or several of these with commas between. On failure
// *ds needs no closing. A narrower vocabulary than the model's is fine: ids are checked against the
// data's.
static inline bool dataset_open(Dataset *ds, const char *spec, const DatasetOptions *options,
                                Error *err) {
    PathList paths;
    memset(&paths, 0, sizeof paths);
    memset(ds, 0, sizeof *ds);
    ds->vocab_size = ds->bos = ds->eos = ds->scanned_token = -1;
    ds->fingerprint = ds->token_fingerprint = 14695981039346656037ull;
    pthread_mutex_init(&ds->lock, NULL);
    const bool ok =
        path_list_expand(&paths, spec, options->split ? options->split : "train", err) &&
        dataset_add_all(ds, &paths, options, err);
    path_list_free(&paths);
    if (!ok) dataset_close(ds);
    return ok;
}

static inline int64_t dataset_num_docs(const Dataset *ds) { return ds->num_docs; }
static inline int64_t dataset_num_tokens(const Dataset *ds) { return ds->num_tokens; }
static inline int64_t dataset_num_empty(const Dataset *ds) { return ds->num_empty; }
static inline int32_t dataset_vocab_size(const Dataset *ds) { return ds->vocab_size; }
static inline int32_t dataset_bos(const Dataset *ds) { return ds->bos; }  // -1: not known
static inline int32_t dataset_eos(const Dataset *ds) { return ds->eos; }

// Hash of names, sizes, headers and indexes, in order; kept in checkpoints.
static inline uint64_t dataset_fingerprint(const Dataset *ds) { return ds->fingerprint; }

// Hash of the tokens, in order; kept in checkpoints. Of shards with checksums it covers every byte,
// once all blocks have been read; of scanned ones every byte as it was then; of others a sample.
static inline uint64_t dataset_token_fingerprint(const Dataset *ds) {
    return ds->token_fingerprint;
}

static inline size_t dataset_num_unchecked(const Dataset *ds) {
    size_t n = 0;
    for (size_t i = 0; i < ds->num_shards; i++) n += ds->shards[i].block_tokens == 0;
    return n;
}

// Both: what must be the same for two data sets to be one.
static inline void dataset_fingerprints(const Dataset *ds, uint64_t out[2]) {
    out[0] = dataset_fingerprint(ds);
    out[1] = dataset_token_fingerprint(ds);
}

// One line for people, with whatever was assumed.
static inline void dataset_describe(const Dataset *ds, char *out, size_t capacity) {
    static const char *const names[] = {"unpad.c", "llm.c", "datatrove", "Megatron", "llmq"};
    const size_t unchecked = dataset_num_unchecked(ds);
    char empty[64] = "", scanned[96] = "", sums[96] = "";
    if (ds->num_empty > 0)
        snprintf(empty, sizeof empty, ", %lld empty one%s left out", (long long)ds->num_empty,
                 text_plural(ds->num_empty));
    if (unchecked == ds->num_shards)
        snprintf(sums, sizeof sums, ", tokens unchecked: no checksums");
    else if (unchecked > 0)
        snprintf(sums, sizeof sums, ", tokens unchecked in %zu of them: no checksums", unchecked);
    if (ds->scanned_token >= 0)
        snprintf(scanned, sizeof scanned, ", index built by scanning for token %d",
                 ds->scanned_token);
    snprintf(out, capacity, "%zu %s shard%s, %lld document%s, %lld token%s%s%s%s", ds->num_shards,
             names[ds->shards[0].format], text_plural((int64_t)ds->num_shards),
             (long long)ds->num_docs, text_plural(ds->num_docs), (long long)ds->num_tokens,
             text_plural(ds->num_tokens), empty, scanned, sums);
}

// -------------------------------------------------------------------------------------------------
// Documents

// The shard of a document, and its first and behind-last token there.
static inline Shard *dataset_find(const Dataset *ds, int64_t doc, int64_t *start, int64_t *end) {
    assert(doc >= 0 && doc < ds->num_docs);
    size_t low = 0, high = ds->num_shards;  // the last shard with first_doc <= doc
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (ds->shards[middle].first_doc <= doc) low = middle;
        else high = middle;
    }
    Shard *s = &ds->shards[low];
    const int64_t local = doc - s->first_doc;
    *start = local > 0 ? (int64_t)s->doc_ends[local - 1] : 0;
    *end = (int64_t)s->doc_ends[local];
    return s;
}

static inline int64_t dataset_doc_length(const Dataset *ds, int64_t doc) {
    int64_t start, end;
    dataset_find(ds, doc, &start, &end);
    return end - start;
}

static inline bool dataset_bad_token(const Dataset *ds, const Shard *s, int64_t doc, int64_t offset,
                                     int32_t token, Error *err) {
    return error_set(err, EXIT_BAD_INPUT, "prepare the data with the model's tokenizer",
                     "%s: document %lld, token %lld: expected an id below %d, found %u", s->path,
                     (long long)(doc - s->first_doc), (long long)offset, ds->vocab_size,
                     (uint32_t)token);
}

// Block b of the shard into ds->block, equal to its checksum.
static inline bool dataset_read_block(Dataset *ds, const Shard *s, int64_t b, int64_t num_tokens,
                                      Error *err) {
    const uint64_t width = (uint64_t)s->token_bytes, bytes = (uint64_t)num_tokens * width,
                   at = s->data_offset + (uint64_t)(b * s->block_tokens) * width;
    ds->block = (unsigned char *)host_grow(ds->block, &ds->block_capacity, (size_t)bytes, 1,
                                           "a block of tokens");
    if (!file_read_at(&s->file, ds->block, bytes, at, err)) return false;
    const uint32_t crc = crc32c(0, ds->block, (size_t)bytes);
    return crc == s->block_crcs[b] ||
           error_set(err, EXIT_BAD_INPUT,
                     "the file is damaged or was changed: copy it again, or make it again with "
                     "data/prepare.py",
                     "%s: bytes %llu to %llu: expected checksum %08x, found %08x", s->path,
                     (unsigned long long)at, (unsigned long long)(at + bytes - 1),
                     s->block_crcs[b], crc);
}

// Tokens [from, from + n) of the shard as they are stored, out of whole blocks when those have
// checksums. What is returned is what was checked: the file is not read twice.
static inline bool dataset_read_stored(Dataset *ds, const Shard *s, int64_t from, int64_t n,
                                       unsigned char *out, Error *err) {
    const int64_t width = s->token_bytes, size = s->block_tokens, to = from + n;
    if (size == 0)
        return file_read_at(&s->file, out, (uint64_t)(n * width),
                            s->data_offset + (uint64_t)(from * width), err);
    for (int64_t b = from / size; b * size < to; b++) {
        const int64_t first = b * size, left = s->num_tokens - first,
                      last = first + (left < size ? left : size);
        if (!dataset_read_block(ds, s, b, last - first, err)) return false;
        const int64_t low = from > first ? from : first, high = to < last ? to : last;
        memcpy(out + (low - from) * width, ds->block + (low - first) * width,
               (size_t)((high - low) * width));
    }
    return true;
}

// Tokens [offset, offset + n) of a document, each proven to be below vocab_size. Safe to call from
// several threads.
static inline bool dataset_read(Dataset *ds, int64_t doc, int64_t offset, int64_t n, int32_t *out,
                                Error *err) {
    int64_t start, end;
    Shard *s = dataset_find(ds, doc, &start, &end);
    assert(offset >= 0 && n >= 0 && n <= end - start - offset);
    const uint64_t width = (uint64_t)s->token_bytes, bytes = (uint64_t)n * width;
    // 16-bit tokens are read into the second half of out and widened forwards: out[i] never covers
    // a token that is still to be read
    unsigned char *raw = (unsigned char *)(out + n) - bytes;
    pthread_mutex_lock(&ds->lock);
    const bool ok = dataset_touch(ds, s, err) &&
                    dataset_read_stored(ds, s, start + offset, n, raw, err);
    pthread_mutex_unlock(&ds->lock);
    if (!ok) return false;
    for (int64_t i = 0; width == 2 && i < n; i++) {
        uint16_t token;
        memcpy(&token, raw + 2 * i, sizeof token);
        out[i] = token;
    }
    const uint32_t vocab_size = (uint32_t)ds->vocab_size;
    bool bad = false;
    for (int64_t i = 0; i < n; i++) bad |= (uint32_t)out[i] >= vocab_size;
    for (int64_t i = 0; bad && i < n; i++)
        if ((uint32_t)out[i] >= vocab_size)
            return dataset_bad_token(ds, s, doc, offset + i, out[i], err);
    return true;
}

#endif
