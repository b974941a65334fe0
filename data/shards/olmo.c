// OLMo: NAME.npy has tokens only, in spite of its name without numpy's header; NAME.csv.gz, where
// dolma wrote one, has a line "start,end,..." for each document. A .npy with numpy's header is read
// too.
#include <ctype.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"
#include "../base/path.h"
#include "dataset.h"
#include "formats.h"
#include "shard.h"

// ------------------------------------------------------------------------------------------------
// numpy's header: magic, version, length, and a Python dictionary

static const struct {
    const char *descr;
    int token_bytes;
} dtypes[] = {{"'<u2'", 2}, {"'<u4'", 4}, {"'<i4'", 4}};

static bool numpy_header(Shard *s, const unsigned char *head, Error *err) {
    char text[SHARD_HEADER_BYTES];
    long long count = -1;
    int used = 0;
    const size_t length_bytes = head[6] == 1 ? 2 : 4, at = 8 + length_bytes,
                 length = (size_t)shard_word(head + 8, length_bytes);
    if (head[6] < 1 || head[6] > 3 || length >= sizeof text - at ||
        at + length > s->file.size_bytes)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE, "%s: a numpy header of %zu bytes",
                         s->path, length);
    memcpy(text, head + at, length);
    text[length] = 0;
    const char *descr = strstr(text, "'descr': "), *shape = strstr(text, "'shape': ");
    for (size_t i = 0; descr && i < sizeof dtypes / sizeof *dtypes; i++)
        if (strncmp(descr + 9, dtypes[i].descr, 5) == 0) s->token_bytes = dtypes[i].token_bytes;
    const bool flat =
        shape && sscanf(shape, "'shape': (%lld,)%n", &count, &used) == 1 && used > 0 && count >= 0;
    if (!s->token_bytes || !flat)
        return error_set(err, EXIT_BAD_INPUT, "numpy.save(NAME, ids.astype('<u4').ravel())",
                         "%s: expected a numpy array of one dimension of uint16, uint32 or int32, "
                         "found %.*s",
                         s->path, (int)strcspn(text, "\n"), text);
    s->data_offset = at + length;
    s->num_tokens = count;
    return shard_check_size(s, err);
}

// ------------------------------------------------------------------------------------------------
// NAME.csv.gz, read by zlib, which is loaded at run time

typedef struct {
    void *handle, *file;
    void *(*open)(const char *, const char *);
    int (*read)(void *, void *, unsigned int);
    int (*close)(void *);
} Zlib;

static bool zlib_open(Zlib *z, const char *path, Error *err) {
    const struct {
        const char *name;
        void *at;
    } calls[] = {{"gzopen", &z->open}, {"gzread", &z->read}, {"gzclose", &z->close}};
    *z = (Zlib){.handle = dlopen("libz.so.1", RTLD_NOW | RTLD_LOCAL)};
    bool found = z->handle != NULL;
    for (size_t i = 0; found && i < sizeof calls / sizeof *calls; i++) {
        void *call = dlsym(z->handle, calls[i].name);
        memcpy(calls[i].at, &call, sizeof call);
        found = call != NULL;
    }
    if (!found)
        return error_set(err, EXIT_USAGE, "apt-get install zlib1g, or give --boundary-token",
                         "%s: needs the library libz", path);
    z->file = z->open(path, "rb");
    return z->file || error_set(err, EXIT_BAD_INPUT, "", "%s: cannot read", path);
}

// False where the file was cut off.
static bool zlib_close(Zlib *z) {
    const bool whole = !z->file || z->close(z->file) == 0;
    if (z->handle) dlclose(z->handle);
    return whole;
}

// Where in a row the reader is
typedef struct {
    int field;  // 0: start, 1: end
    bool quoted;
    uint64_t value[2];
    uint64_t *ends, count, line;
    size_t capacity;
    uint32_t crc;
} CsvReader;

static bool csv_end_row(CsvReader *r, const char *path, Error *err) {
    const uint64_t before = r->count ? r->ends[r->count - 1] : 0;
    r->line++;
    if (r->field < 1 || r->value[0] != before || r->value[1] < before)
        return error_set(err, EXIT_BAD_INPUT, "documents must be contiguous in the file",
                         "%s:%lu: expected a document from %lu on, found %lu to %lu", path, r->line,
                         before, r->value[0], r->value[1]);
    r->ends = host_grow(r->ends, &r->capacity, r->count + 1, 8, "document ends");
    r->ends[r->count++] = r->value[1];
    r->value[0] = r->value[1] = 0;
    r->field = 0;
    return true;
}

static bool csv_add(CsvReader *r, char c, const char *path, Error *err) {
    if (c == '"') r->quoted = !r->quoted;
    if (r->quoted || c == '"' || c == '\r') return true;
    if (c == '\n') return csv_end_row(r, path, err);
    if (c == ',') r->field++;
    if (c == ',' || r->field > 1) return true;
    uint64_t *value = &r->value[r->field];
    return (isdigit((unsigned char)c) && checked_mul(*value, 10, value) &&
            checked_add(*value, (uint64_t)(c - '0'), value)) ||
           error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                     "%s:%lu: expected numbers of a first and a last token", path, r->line + 1);
}

static bool csv_read(CsvReader *r, const char *path, Error *err) {
    char text[1 << 14];
    Zlib z;
    int n = 0;
    bool ok = zlib_open(&z, path, err);
    while (ok && (n = z.read(z.file, text, sizeof text)) > 0) {
        r->crc = crc32c(r->crc, text, (size_t)n);
        for (int i = 0; ok && i < n; i++) ok = csv_add(r, text[i], path, err);
    }
    const bool whole = zlib_close(&z);
    if (ok && (!whole || n < 0 || r->quoted || r->field > 0))
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE, "%s: is cut off", path);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// Without numpy's header

// 4 where the upper halves of the first tokens are those of small numbers, else 2
static bool olmo_guess_width(Shard *s, Error *err) {
    uint16_t halves[1 << 14];
    const uint64_t size = s->file.size_bytes, n = size < sizeof halves ? size : sizeof halves;
    bool wide = size % 4 == 0;
    if (!file_read_at(&s->file, halves, n, 0, err)) return false;
    for (uint64_t i = 1; i < n / 2; i += 2) wide = wide && halves[i] < 16;
    s->token_bytes = wide ? 4 : 2;
    s->num_tokens = (int64_t)(size / (uint64_t)s->token_bytes);
    return shard_check_size(s, err);
}

// By NAME.csv.gz: the width of a token follows from the sizes.
static bool olmo_indexed(Shard *s, const char *path, Error *err) {
    CsvReader r = {0};
    if (!csv_read(&r, path, err)) {
        free(r.ends);
        return false;
    }
    const uint64_t size = s->file.size_bytes, tokens = r.count ? r.ends[r.count - 1] : 0,
                   width = tokens ? size / tokens : 0;
    if ((width != 2 && width != 4) || width * tokens != size) {
        free(r.ends);
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected %lu tokens (its .csv.gz) of 2 or 4 bytes, found %lu bytes",
                         s->path, tokens, size);
    }
    s->token_bytes = (int)width;
    s->num_tokens = (int64_t)tokens;
    s->checksum = r.crc;
    return shard_set_ends(s, r.ends, r.count, path, err);
}

bool shard_open_olmo(Shard *s, const unsigned char *head, const DatasetOptions *options,
                     bool *recognised, Error *err) {
    char index[IO_PATH_MAX];
    const bool named = path_ends_with(s->path, ".npy"),
               numpy = s->file.size_bytes >= 10 && memcmp(head, "\x93NUMPY", 6) == 0;
    *recognised = named || numpy;
    if (!*recognised || !shard_sidecar(index, s->path, named ? 4 : 0, ".csv.gz", err)) return false;
    s->format = numpy ? "numpy" : "OLMo";
    if (!numpy && options->boundary_token < 0 && path_exists(index))
        return olmo_indexed(s, index, err);
    if (options->boundary_token < 0)
        return error_set(err, EXIT_USAGE,
                         "copy its .csv.gz too, or give the end-of-text id: --boundary-token ID "
                         "--boundary-ends",
                         "%s: .npy files do not say where documents end", s->path);
    s->checksum = crc32c(0, head, SHARD_HEADER_BYTES);
    return (numpy ? numpy_header(s, head, err) : olmo_guess_width(s, err)) &&
           shard_scan(s, options->boundary_token, options->boundary_ends, err);
}
