// Our shards, and llm.c's, which they extend: NAME.bin with a header of 256 int32 and, if it is
// ours, NAME.idx and NAME.mask.
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
#include "dataset.h"
#include "formats.h"
#include "shard.h"
#include "shard_writer.h"

enum {
    HEADER_WORDS = SHARD_HEADER_BYTES / 4,
    INDEX_V1_HEADER_BYTES = 32,  // version 1 has no checksums of tokens
    INDEX_MAX_BLOCK = 1 << 20,   // tokens
};

// NAME.idx: 8 bytes magic, uint32 version, uint32 checksum of the shard's header, uint64 documents,
// uint64 tokens, uint64 tokens per block, the ends, uint32 checksums of the blocks, CRC32C of
// everything before it. Version 1 has no blocks. `body`: bytes before that CRC32C.
static bool shard_check_index(const Shard *s, const File *f, const unsigned char *text,
                              uint64_t count, uint64_t body, Error *err) {
    const uint32_t crc = crc32c(0, text, (size_t)body),
                   expected = (uint32_t)shard_word(text + body, 4);
    if (expected != crc)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected checksum %08x, found %08x", f->path, expected, crc);
    const bool belongs = shard_word(text + 12, 4) == s->checksum &&
                         shard_word(text + 16, 8) == count &&
                         shard_word(text + 24, 8) == (uint64_t)s->num_tokens;
    return belongs || error_set(err, EXIT_BAD_INPUT, "copy each .bin together with its .idx",
                                "%s: is the index of another shard", f->path);
}

// The length of the index header and the tokens per block.
static bool shard_index_header(Shard *s, const File *f, uint64_t *header_bytes, Error *err) {
    unsigned char head[INDEX_HEADER_BYTES] = {0};
    const uint64_t n = f->size_bytes < sizeof head ? f->size_bytes : sizeof head;
    if (!file_read_at(f, head, n, 0, err)) return false;
    const uint64_t version = shard_word(head + 8, 4), block = shard_word(head + 32, 8);
    if (memcmp(head, "UNPADIDX", 8) != 0 || version < 1 || version > INDEX_VERSION)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected an index of version 1 or %d", f->path, INDEX_VERSION);
    *header_bytes = version == 1 ? INDEX_V1_HEADER_BYTES : INDEX_HEADER_BYTES;
    if (version == 1) return true;
    if (block < 1 || block > INDEX_MAX_BLOCK)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected blocks of 1 to %d tokens, found %llu", f->path,
                         INDEX_MAX_BLOCK, (unsigned long long)block);
    s->block_tokens = (int64_t)block;
    return true;
}

// `count` comes from the shard's header; the file must have exactly the size that follows.
static bool shard_read_index_file(Shard *s, const File *f, uint64_t count, Error *err) {
    uint64_t at = 0, size = 0;
    if (!shard_index_header(s, f, &at, err)) return false;
    const uint64_t num_blocks = shard_num_blocks(s), tail = at + num_blocks * 4 + 4;
    if (!checked_mul(count, 8, &size) || !checked_add(size, tail, &size) || size != f->size_bytes)
        return shard_size_error(f, size, "from the shard's header", err);
    unsigned char *text = host_calloc((size_t)size, 1, "a shard index");
    bool ok =
        file_read_at(f, text, size, 0, err) && shard_check_index(s, f, text, count, size - 4, err);
    if (ok) {
        uint64_t *ends = host_calloc((size_t)count, 8, "document ends");
        memcpy(ends, text + at, (size_t)count * 8);
        if (s->block_tokens)
            s->block_crcs = host_calloc((size_t)num_blocks, 4, "checksums of tokens");
        if (num_blocks) memcpy(s->block_crcs, text + at + count * 8, (size_t)num_blocks * 4);
        s->token_sum = crc32c(0, text + at + count * 8, (size_t)num_blocks * 4);
        // without the CRC at the end: over the data and its own CRC, a CRC is a constant
        s->checksum = crc32c(s->checksum, text, (size_t)size - 4);
        ok = shard_set_ends(s, ends, count, f->path, err);
    }
    free(text);
    return ok;
}

static bool shard_read_index(Shard *s, uint64_t count, Error *err) {
    char path[IO_PATH_MAX];
    File f;
    if (!shard_sidecar(path, s->path, path_ends_with(s->path, ".bin") ? 4 : 0, ".idx", err) ||
        !file_open(&f, path, "copy each .bin together with its .idx", err))
        return false;
    const bool ok = shard_read_index_file(s, &f, count, err);
    file_close(&f);
    return ok;
}

// The words that we add to llm.c's header; the CRC in the last one covers the others.
static bool shard_open_own(Shard *s, const unsigned char *head, Error *err) {
    int32_t w[HEADER_WORDS];
    memcpy(w, head, sizeof w);
    s->format = "unpad.c";
    const uint32_t crc = crc32c(0, w, sizeof w - 4);
    if ((uint32_t)w[255] != crc)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: header checksum: expected %08x, found %08x", s->path,
                         (uint32_t)w[255], crc);
    if (w[9] != OWN_VERSION)
        return error_set(err, EXIT_BAD_INPUT, "use a newer unpad.c",
                         "%s: expected shard version %d, found %d", s->path, OWN_VERSION, w[9]);
    s->checksum = crc;
    s->vocab_size = w[10];
    s->bos = (w[11] & FLAG_BOS_FIRST) != 0 ? w[12] : -1;
    s->eos = (w[11] & FLAG_EOS_LAST) != 0 ? w[13] : -1;
    s->tokenizer_hash = shard_word(head + 16 * 4, 8);
    const uint64_t count = shard_word(head + 14 * 4, 8);
    if (s->vocab_size < 1 || s->bos >= s->vocab_size || s->eos >= s->vocab_size || s->bos < -1 ||
        s->eos < -1)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: vocabulary %d, BOS %d, EOS %d", s->path, s->vocab_size, s->bos,
                         s->eos);
    return shard_check_size(s, err) && shard_read_index(s, count, err) &&
           shard_read_mask(s, head, err);
}

bool shard_open_unpad(Shard *s, const unsigned char *head, const DatasetOptions *options,
                      bool *recognised, Error *err) {
    int32_t w[HEADER_WORDS];
    memcpy(w, head, sizeof w);
    const bool wide = w[0] == SHARD_MAGIC_U32;
    *recognised = s->file.size_bytes >= sizeof w && (wide || w[0] == SHARD_MAGIC_U16);
    if (!*recognised) return false;
    s->format = "llm.c";
    s->data_offset = SHARD_HEADER_BYTES;
    s->token_bytes = wide ? 4 : 2;
    s->num_tokens = w[2];
    s->checksum = crc32c(0, head, SHARD_HEADER_BYTES);
    if (w[1] != (wide ? 7 : 1))
        return error_set(err, EXIT_BAD_INPUT, "", "%s: expected version %d of magic %d, found %d",
                         s->path, wide ? 7 : 1, w[0], w[1]);
    if (w[2] < 0)
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE, "%s: a header of %d tokens",
                         s->path, w[2]);
    if (w[8] == OWN_MAGIC) return shard_open_own(s, head, err);
    for (int i = 3; i < HEADER_WORDS; i++)
        if (w[i] != 0)
            return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                             "%s: header word %d: expected 0 in an llm.c shard, found %d", s->path,
                             i, w[i]);
    const int32_t usual = wide ? 128000 : 50256;
    const int32_t token = options->boundary_token >= 0 ? options->boundary_token : usual;
    return shard_check_size(s, err) && shard_scan(s, token, options->boundary_ends, err);
}
