#include "shard.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/hash.h"
#include "../base/memory.h"

#define HINT_COPY "copy each .bin together with its .idx and .mask"

uint64_t shard_word(const unsigned char *p, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, p, bytes);
    return value;
}

static bool check_size(const char *path, uint64_t found, uint64_t expected, const char *of,
                       Error *err) {
    return found == expected || bad_input(err, "%s: expected exactly %lu bytes (%s), found %lu",
                                          path, expected, of, found);
}

static bool check_token_bytes(const Shard *s, Error *err) {
    char of[64];
    snprintf(of, sizeof of, "%ld tokens of %d bytes", s->num_tokens, s->token_bytes);
    const uint64_t bytes = (uint64_t)s->num_tokens * (uint64_t)s->token_bytes;  // num_tokens < 2^31
    return check_size(s->path, s->file.size_bytes, SHARD_HEADER_BYTES + bytes, of, err);
}

// Are doc_ends (count) cumulative, never decreasing, the last one num_tokens? Errors name `path`.
// Empty documents are dropped and counted.
static bool check_ends(Shard *s, uint64_t count, const char *path, Error *err) {
    uint64_t before = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t end = s->doc_ends[i];
        if (end < before || end > (uint64_t)s->num_tokens)
            return bad_input(err, "%s: document %lu ends at token %lu, expected %lu to %ld", path,
                             i, end, before, s->num_tokens);
        if (end == before)
            s->num_empty++;
        else
            s->doc_ends[s->num_docs++] = end;
        before = end;
    }
    return before == (uint64_t)s->num_tokens ||
           bad_input(err, "%s: documents end at token %lu, expected %ld", path, before,
                     s->num_tokens);
}

// ---- NAME.idx and NAME.mask ---------------------------------------------------------------------

static bool path_beside(const Shard *s, char path[IO_PATH_MAX], const Beside *b, Error *err) {
    const int keep = (int)strlen(s->path) - (path_ends_with(s->path, ".bin") ? 4 : 0);
    return path_printf(path, err, "%.*s.%s", keep, s->path, b->ending);
}

// Reads a whole file that belongs to the shard with this header and begins with these counts (n),
// into memory the caller frees; NULL on error.
static unsigned char *read_beside(const Shard *s, const Beside *b, const ShardHeader *h,
                                  const uint64_t *counts, size_t n, char path[IO_PATH_MAX],
                                  uint64_t *size, Error *err) {
    if (!path_beside(s, path, b, err)) return NULL;
    unsigned char *text = (unsigned char *)file_read_all(path, UINT64_MAX, size, HINT_COPY, err);
    if (!text) return NULL;
    const uint64_t end = *size - 4;  // of the bytes that the checksum covers
    uint32_t found, expected;
    if (*size < b->head_bytes + 4 || memcmp(text, b->magic, 8) != 0 ||
        shard_word(text + 8, 4) < b->version || shard_word(text + 8, 4) > b->newest)
        bad_input(err, "%s: expected %s version %u", path, b->name, b->version);
    else if ((found = crc32c(0, text, end)) != (expected = (uint32_t)shard_word(text + end, 4)))
        bad_input(err, "%s: expected checksum %08x, found %08x", path, expected, found);
    else if (shard_word(text + 12, 4) != h->crc ||
             memcmp(text + 16, counts, n * sizeof *counts) != 0)
        error_set(err, EXIT_BAD_INPUT, HINT_COPY, "%s: is the %s of another shard", path, b->name);
    else
        return text;
    free(text);
    return NULL;
}

static bool read_index(Shard *s, const ShardHeader *h, Error *err) {
    const uint64_t counts[] = {h->num_docs, (uint64_t)s->num_tokens};
    char path[IO_PATH_MAX];
    uint64_t size;
    unsigned char *text = read_beside(s, &index_file, h, counts, 2, path, &size, err);
    if (!text) return false;
    s->doc_ends = (uint64_t *)text;
    const uint64_t block = shard_word(text + 32, 8);
    if (block < 1 || block > INDEX_MAX_BLOCK)
        return bad_input(err, "%s: expected blocks of 1 to %d tokens, found %lu", path,
                         INDEX_MAX_BLOCK, block);
    s->block_tokens = (int64_t)block;
    const uint64_t sum_bytes = (counts[1] + block - 1) / block * 4,
                   ends_bytes = (counts[0] < size ? counts[0] : size) * 8;  // without overflow
    if (!check_size(path, size, index_file.head_bytes + ends_bytes + sum_bytes + 4,
                    "from the shard's header", err))
        return false;
    s->block_crcs = host_calloc(sum_bytes, 1, "checksums of tokens");
    memcpy(s->block_crcs, text + index_file.head_bytes + ends_bytes, sum_bytes);
    s->token_sum = crc32c(0, s->block_crcs, sum_bytes);
    // without the CRC at the end: the CRC of data followed by its own CRC is a constant
    s->checksum = crc32c(s->checksum, text, size - 4);
    memmove(text, text + index_file.head_bytes, ends_bytes);
    return check_ends(s, counts[0], path, err);
}

bool mask_bit(const unsigned char *mask, int64_t i) { return (mask[i / 8] >> i % 8 & 1) != 0; }

int64_t mask_count(const unsigned char *mask, int64_t from, int64_t to) {
    int64_t ones = 0, i = from;
    for (; i < to && i % 64 != 0; i++) ones += mask_bit(mask, i);
    for (; i + 64 <= to; i += 64) ones += __builtin_popcountll(shard_word(mask + i / 8, 8));
    for (; i < to; i++) ones += mask_bit(mask, i);
    return ones;
}

static bool read_mask(Shard *s, const ShardHeader *h, Error *err) {
    const int64_t n = s->num_tokens;
    const uint64_t counts[] = {(uint64_t)n}, bytes = (counts[0] + 7) / 8;
    char path[IO_PATH_MAX];
    uint64_t size;
    s->mask = read_beside(s, &mask_file, h, counts, 1, path, &size, err);
    if (!s->mask) return false;
    const bool weighted = shard_word(s->mask + 8, 4) == MASK_WITH_WEIGHTS;
    const uint64_t weight_bytes = weighted ? counts[0] * sizeof(float) : 0;
    if (!check_size(path, size, mask_file.head_bytes + bytes + weight_bytes + 4,
                    "from the shard's header", err))
        return false;
    const uint64_t ones = shard_word(s->mask + 24, 8);
    s->token_sum = crc32c(s->token_sum, s->mask, size - 4);
    if (weighted) s->weights = host_calloc((size_t)n, sizeof(float), "weights");
    if (weighted) memcpy(s->weights, s->mask + mask_file.head_bytes + bytes, weight_bytes);
    memmove(s->mask, s->mask + mask_file.head_bytes, bytes);
    for (int64_t i = 0; weighted && i < n; i++)
        if (!isfinite(s->weights[i]) || (s->weights[i] != 0) != mask_bit(s->mask, i))
            return bad_input(err, "%s: token %ld: expected a weight for a target only, found %g",
                             path, i, (double)s->weights[i]);
    s->num_targets = mask_count(s->mask, 0, n);
    if (ones != (uint64_t)s->num_targets)
        return bad_input(err, "%s: expected %lu ones, found %ld", path, ones, s->num_targets);
    if (mask_count(s->mask, n, (int64_t)bytes * 8) != 0)
        return bad_input(err, "%s: expected zeros after bit %ld", path, n);
    for (int64_t doc = 0, first = 0; doc < s->num_docs; first = (int64_t)s->doc_ends[doc++])
        s->num_targets -= mask_bit(s->mask, first);
    return true;
}

static bool has_no_mask(const Shard *s, Error *err) {
    char path[IO_PATH_MAX];
    return path_beside(s, path, &mask_file, err) &&
           (!path_exists(path) ||
            error_set(err, EXIT_BAD_INPUT, "remove it if it belongs to other shards",
                      "%s: expected no mask beside a shard without flag %d", path, FLAG_MASK));
}

// ---- NAME.bin -----------------------------------------------------------------------------------

static bool open_own(Shard *s, const ShardHeader *h, Error *err) {
    s->checksum = crc32c(0, h, SHARD_HEADER_BYTES - 4);
    if (h->crc != s->checksum)
        return bad_input(err, "%s: header checksum: expected %08x, found %08x", s->path, h->crc,
                         s->checksum);
    if (h->own_version != OWN_VERSION)
        return error_set(err, EXIT_BAD_INPUT, "use a newer unpad.c",
                         "%s: expected shard version %d, found %d", s->path, OWN_VERSION,
                         h->own_version);
    s->vocab_size = h->vocab_size;
    s->bos = (h->flags & FLAG_BOS_FIRST) != 0 ? h->bos : -1;
    s->eos = (h->flags & FLAG_EOS_LAST) != 0 ? h->eos : -1;
    s->tokenizer_hash = h->tokenizer_hash;
    s->pairs = (h->flags & FLAG_PAIRS) != 0;
    if (s->vocab_size < 1 || s->bos >= s->vocab_size || s->eos >= s->vocab_size || s->bos < -1 ||
        s->eos < -1)
        return bad_input(err, "%s: vocabulary %d, BOS %d, EOS %d", s->path, s->vocab_size, s->bos,
                         s->eos);
    return check_token_bytes(s, err) && read_index(s, h, err) &&
           ((h->flags & FLAG_MASK) != 0 ? read_mask(s, h, err) : has_no_mask(s, err));
}

// llm.c's shards have no index: a token begins each document.
static bool scan(Shard *s, int32_t token, Error *err) {
    static const int64_t BLOCK_TOKENS = 1 << 18;
    const uint64_t width = (uint64_t)s->token_bytes;
    uint64_t count = 0;  // of doc_ends: positions of the token, and the end of the shard
    size_t capacity = 0;
    AUTO_FREE unsigned char *block = host_calloc(BLOCK_TOKENS, 4, "scanning a shard");
    s->bos = token;
    s->block_tokens = 4096;
    for (int64_t at = 0; at < s->num_tokens; at += BLOCK_TOKENS) {
        const int64_t left = s->num_tokens - at, n = left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
        const uint64_t bytes = (uint64_t)n * width;
        if (!file_read_at(&s->file, block, bytes, SHARD_HEADER_BYTES + (uint64_t)at * width, err))
            return false;
        s->token_sum = crc32c(s->token_sum, block, bytes);
        array_grow(s->doc_ends, &capacity, count + (uint64_t)n + 1, "document ends");
        for (int64_t i = 0; i < n; i++)
            if (shard_word(block + (uint64_t)i * width, width) == (uint32_t)token)
                s->doc_ends[count++] = (uint64_t)(at + i);
    }
    if (s->num_tokens == 0) return true;
    if (count == 0)
        return error_set(err, EXIT_BAD_INPUT,
                         "name the token that begins documents with --boundary-token",
                         "%s: no index, and token %d is nowhere in it", s->path, token);
    if (s->doc_ends[0] == 0)  // nothing ends before the first token
        memmove(s->doc_ends, s->doc_ends + 1, --count * 8);
    s->doc_ends[count++] = (uint64_t)s->num_tokens;
    s->checksum = crc32c(s->checksum, s->doc_ends, count * 8);
    return check_ends(s, count, s->path, err);
}

static bool open_bin(Shard *s, const ShardHeader *h, int32_t boundary_token, Error *err) {
    const bool wide = h->magic == SHARD_MAGIC_U32;
    int32_t word;
    s->token_bytes = wide ? 4 : 2;
    s->num_tokens = h->num_tokens;
    s->checksum = crc32c(0, h, SHARD_HEADER_BYTES);
    if (h->version != (wide ? 7 : 1))
        return error_set(err, EXIT_BAD_INPUT, "", "%s: expected version %d of magic %d, found %d",
                         s->path, wide ? 7 : 1, h->magic, h->version);
    if (h->num_tokens < 0)
        return bad_input(err, "%s: a header of %d tokens", s->path, h->num_tokens);
    if (h->own_magic == OWN_MAGIC) return open_own(s, h, err);
    for (int i = 3; i < SHARD_HEADER_BYTES / 4; i++)
        if ((word = (int32_t)shard_word((const unsigned char *)h + i * 4, 4)) != 0)
            return bad_input(err, "%s: header word %d: expected 0 in an llm.c shard, found %d",
                             s->path, i, word);
    const int32_t usual = wide ? 128000 : 50256;
    return check_token_bytes(s, err) && scan(s, boundary_token >= 0 ? boundary_token : usual, err);
}

// ---- Other files --------------------------------------------------------------------------------

// head: the header of any file
static bool refuse(const Shard *s, const unsigned char *head, Error *err) {
    static const char convert[] = "data/convert.py FILE --out DIR makes shards of it";
    static const struct {
        const char *begin, *ending, *found, *hint;
    } kinds[] = {
        {"BIN.TOK\n", "", "llmq's tokens", convert},
        {"\x93NUMPY", "", "a numpy array", convert},
        {"", ".npy", "OLMo's tokens", convert},
        {"", ".ds", "datatrove's tokens", convert},
        {"", ".idx", "an index", "name the token file, not its index"},
        {"", "", "unknown",
         "data/convert.py reads Megatron's tokens, and raw ids, as nanoGPT writes them, from a "
         "numpy array"},
    };
    size_t i = 0;
    while (memcmp(head, kinds[i].begin, strlen(kinds[i].begin)) != 0 ||
           !path_ends_with(s->path, kinds[i].ending))
        i++;
    return error_set(err, EXIT_BAD_INPUT, kinds[i].hint, "%s: expected a token shard, found %s",
                     s->path, kinds[i].found);
}

bool shard_open(Shard *s, int32_t boundary_token, Error *err) {
    ShardHeader h = {0};  // of a shorter file: zeros after its end
    const uint64_t n = s->file.size_bytes < sizeof h ? s->file.size_bytes : sizeof h;
    if (!file_read_at(&s->file, &h, n, 0, err)) return false;
    if (h.magic == SHARD_MAGIC_U16 || h.magic == SHARD_MAGIC_U32)
        return open_bin(s, &h, boundary_token, err);
    return refuse(s, (unsigned char *)&h, err);
}
