// NAME.mask of our shards: which tokens are targets. Byte layout: data/README.md.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"
#include "../base/path.h"
#include "shard.h"

enum { MASK_VERSION = 1, MASK_HEADER_BYTES = 32, FLAG_MASK = 4 };

#define HINT_COPY "copy each .bin together with its .idx and .mask"

bool mask_bit(const unsigned char *mask, int64_t i) { return (mask[i / 8] >> i % 8 & 1) != 0; }

int64_t mask_count(const unsigned char *mask, int64_t from, int64_t to) {
    int64_t ones = 0, i = from;
    for (; i < to && i % 64 != 0; i++) ones += mask_bit(mask, i);
    for (; i + 64 <= to; i += 64) ones += __builtin_popcountll(shard_word(mask + i / 8, 8));
    for (; i < to; i++) ones += mask_bit(mask, i);
    return ones;
}

static void mask_clear(unsigned char *mask, int64_t i) {
    mask[i / 8] &= (unsigned char)~(1u << i % 8);
}

void shard_set_mask(Shard *s, unsigned char *mask) {
    const int64_t n = s->num_tokens, bits = (n + 7) / 8 * 8;
    for (int64_t doc = 0, first = 0; doc < s->num_docs; first = (int64_t)s->doc_ends[doc++])
        mask_clear(mask, first);
    for (int64_t i = n; i < bits; i++) mask_clear(mask, i);
    s->mask = mask;
    s->num_targets = mask_count(mask, 0, n);
    s->token_sum = crc32c(s->token_sum, mask, (size_t)bits / 8);
}

// What the header says about the bits, and the bits about the documents.
static bool mask_check(const Shard *s, const File *f, const unsigned char *text,
                       const unsigned char *bin_head, uint64_t size, Error *err) {
    const unsigned char *bits = text + MASK_HEADER_BYTES;
    const uint32_t crc = crc32c(0, text, (size_t)size - 4),
                   expected = (uint32_t)shard_word(text + size - 4, 4);
    const uint64_t ones = shard_word(text + 24, 8);
    const int64_t n = s->num_tokens, found = mask_count(bits, 0, n);
    if (memcmp(text, "UNPADMSK", 8) != 0 || shard_word(text + 8, 4) != MASK_VERSION)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected a mask of version %d", f->path, MASK_VERSION);
    if (expected != crc)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected checksum %08x, found %08x", f->path, expected, crc);
    if (memcmp(text + 12, bin_head + SHARD_HEADER_BYTES - 4, 4) != 0 ||
        shard_word(text + 16, 8) != (uint64_t)n)
        return error_set(err, EXIT_BAD_INPUT, HINT_COPY, "%s: is the mask of another shard",
                         f->path);
    if (ones != (uint64_t)found)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected %llu ones, found %lld", f->path, (unsigned long long)ones,
                         (long long)found);
    if (mask_count(bits, n, (n + 7) / 8 * 8) != 0)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected zeros after bit %lld", f->path, (long long)n);
    for (int64_t doc = 0, first = 0; doc < s->num_docs; first = (int64_t)s->doc_ends[doc++])
        if (mask_bit(bits, first))
            return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                             "%s: bit %lld: expected 0 for the first token of a document", f->path,
                             (long long)first);
    return true;
}

static bool mask_read_file(Shard *s, const File *f, const unsigned char *bin_head, Error *err) {
    const uint64_t bytes = ((uint64_t)s->num_tokens + 7) / 8, size = MASK_HEADER_BYTES + bytes + 4;
    if (size != f->size_bytes) return shard_size_error(f, size, "from the shard's header", err);
    s->mask = host_calloc((size_t)size, 1, "a mask");
    if (!file_read_at(f, s->mask, size, 0, err) || !mask_check(s, f, s->mask, bin_head, size, err))
        return false;
    s->num_targets = (int64_t)shard_word(s->mask + 24, 8);
    s->token_sum = crc32c(s->token_sum, s->mask, (size_t)size - 4);
    memmove(s->mask, s->mask + MASK_HEADER_BYTES, (size_t)bytes);
    return true;
}

bool shard_read_mask(Shard *s, const unsigned char *head, Error *err) {
    char path[IO_PATH_MAX];
    File f;
    if (!shard_sidecar(path, s->path, path_ends_with(s->path, ".bin") ? 4 : 0, ".mask", err))
        return false;
    if ((shard_word(head + 44, 4) & FLAG_MASK) == 0)
        return !path_exists(path) ||
               error_set(err, EXIT_BAD_INPUT, "remove it if it belongs to other shards",
                         "%s: expected no mask beside a shard without flag %d", path, FLAG_MASK);
    if (!file_open(&f, path, HINT_COPY, err)) return false;
    const bool ok = mask_read_file(s, &f, head, err);
    file_close(&f);
    return ok;
}
