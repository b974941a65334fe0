#include "shard.h"

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

uint64_t shard_word(const unsigned char *p, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, p, bytes);
    return value;
}

bool shard_size_error(const File *f, uint64_t expected, const char *of, Error *err) {
    return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                     "%s: expected exactly %llu bytes (%s), found %llu", f->path,
                     (unsigned long long)expected, of, (unsigned long long)f->size_bytes);
}

bool shard_check_size(const Shard *s, Error *err) {
    uint64_t size = 0;
    const bool fits = s->num_tokens >= 0 &&
                      checked_mul((uint64_t)s->num_tokens, (uint64_t)s->token_bytes, &size) &&
                      checked_add(size, s->data_offset, &size);
    if (!fits)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE, "%s: a header of %lld tokens",
                         s->path, (long long)s->num_tokens);
    char of[64];
    snprintf(of, sizeof of, "%lld tokens of %d bytes", (long long)s->num_tokens, s->token_bytes);
    return size == s->file.size_bytes || shard_size_error(&s->file, size, of, err);
}

bool shard_set_ends(Shard *s, uint64_t *ends, uint64_t count, const char *path, Error *err) {
    uint64_t before = 0;
    s->doc_ends = ends;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t end = ends[i];
        if (end < before || end > (uint64_t)s->num_tokens)
            return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                             "%s: document %llu ends at token %llu, expected %llu to %lld", path,
                             (unsigned long long)i, (unsigned long long)end,
                             (unsigned long long)before, (long long)s->num_tokens);
        if (end == before)
            s->num_empty++;
        else
            ends[s->num_docs++] = end;
        before = end;
    }
    if (before == (uint64_t)s->num_tokens) return true;
    return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                     "%s: documents end at token %llu, expected %lld", path,
                     (unsigned long long)before, (long long)s->num_tokens);
}

bool shard_sidecar(char *out, const char *path, size_t cut, const char *ending, Error *err) {
    const int keep = (int)(strlen(path) - cut);
    const int n = snprintf(out, IO_PATH_MAX, "%.*s%s", keep, path, ending);
    if (n > 0 && n < IO_PATH_MAX) return true;
    return error_set(err, EXIT_BAD_INPUT, "", "%s: path too long", path);
}

uint64_t shard_num_blocks(const Shard *s) {
    const uint64_t block = (uint64_t)s->block_tokens;
    return block ? ((uint64_t)s->num_tokens + block - 1) / block : 0;
}

bool shard_sample_tokens(Shard *s, Error *err) {
    enum { SAMPLES = 8, SAMPLE_BYTES = 4096 };
    unsigned char sample[SAMPLE_BYTES];
    const uint64_t bytes = (uint64_t)s->num_tokens * (uint64_t)s->token_bytes,
                   n = bytes < sizeof sample ? bytes : sizeof sample;
    for (uint64_t i = 0; i < SAMPLES; i++) {
        const uint64_t at =
            (bytes - n) / (SAMPLES - 1) * i + (bytes - n) % (SAMPLES - 1) * i / (SAMPLES - 1);
        if (!file_read_at(&s->file, sample, n, s->data_offset + at, err)) return false;
        s->token_sum = crc32c(s->token_sum, sample, (size_t)n);
    }
    return true;
}

// -------------------------------------------------------------------------------------------------
// Building an index by scanning

typedef struct {
    uint64_t *items;
    size_t n, capacity;
} EndList;

static void end_list_add(EndList *list, uint64_t end) {
    list->items =
        host_grow(list->items, &list->capacity, list->n + 1, sizeof(uint64_t), "document ends");
    list->items[list->n++] = end;
}

// Was the token found?
static bool shard_scan_block(const Shard *s, EndList *ends, const unsigned char *block,
                             int64_t from, int64_t n, uint32_t token, bool token_ends) {
    bool found = false;
    for (int64_t i = 0; i < n; i++) {
        const unsigned char *p = block + i * s->token_bytes;
        if ((uint32_t)shard_word(p, (size_t)s->token_bytes) != token) continue;
        found = true;
        if (token_ends)
            end_list_add(ends, (uint64_t)(from + i + 1));
        else if (from + i > 0)
            end_list_add(ends, (uint64_t)(from + i));
    }
    return found;
}

bool shard_scan(Shard *s, int32_t token, bool token_ends, Error *err) {
    static const int64_t BLOCK_TOKENS = 1 << 18;
    EndList ends = {0};
    unsigned char *block = host_calloc(BLOCK_TOKENS, 4, "scanning a shard");
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
    if (token_ends)
        s->eos = token;
    else
        s->bos = token;
    s->scanned = true;
    s->checksum = crc32c(s->checksum, ends.items, ends.n * sizeof(uint64_t));
    return shard_set_ends(s, ends.items, ends.n, s->path, err);
}
