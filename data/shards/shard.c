#include "shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/hash.h"
#include "../base/memory.h"
#include "../base/path.h"

#define HINT_COPY "copy each .bin together with its .idx and .mask"

uint64_t shard_word(const unsigned char *p, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, p, bytes);
    return value;
}

// Blocks of tokens with a checksum each; 0: tokens have none.
static uint64_t shard_num_blocks(const Shard *s) {
    const uint64_t block = (uint64_t)s->block_tokens;
    return block ? ((uint64_t)s->num_tokens + block - 1) / block : 0;
}

static bool damaged_file(Error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool damaged_file(Error *err, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (err->code == 0) error_fill(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE, format, args);
    va_end(args);
    return false;
}

static bool check_size(const File *f, uint64_t expected, const char *of, Error *err) {
    return f->size_bytes == expected ||
           damaged_file(err, "%s: expected exactly %lu bytes (%s), found %lu", f->path, expected,
                        of, f->size_bytes);
}

static bool check_token_bytes(const Shard *s, Error *err) {
    char of[64];
    snprintf(of, sizeof of, "%ld tokens of %d bytes", s->num_tokens, s->token_bytes);
    const uint64_t bytes = (uint64_t)s->num_tokens * (uint64_t)s->token_bytes;  // num_tokens < 2^31
    return check_size(&s->file, SHARD_HEADER_BYTES + bytes, of, err);
}

// Takes ownership of ends (count): cumulative, never decreasing, the last one num_tokens, else an
// error that names `path`. Empty documents are dropped and counted.
static bool set_ends(Shard *s, uint64_t *ends, uint64_t count, const char *path, Error *err) {
    uint64_t before = 0;
    s->doc_ends = ends;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t end = ends[i];
        if (end < before || end > (uint64_t)s->num_tokens)
            return damaged_file(err, "%s: document %lu ends at token %lu, expected %lu to %ld",
                                path, i, end, before, s->num_tokens);
        if (end == before)
            s->num_empty++;
        else
            ends[s->num_docs++] = end;
        before = end;
    }
    return before == (uint64_t)s->num_tokens ||
           damaged_file(err, "%s: documents end at token %lu, expected %ld", path, before,
                        s->num_tokens);
}

static bool open_beside(const Shard *s, File *f, char path[IO_PATH_MAX], const char *ending,
                        Error *err) {
    const int keep = (int)strlen(s->path) - (path_ends_with(s->path, ".bin") ? 4 : 0);
    return path_printf(path, IO_PATH_MAX, err, "%.*s%s", keep, s->path, ending) &&
           file_open(f, path, HINT_COPY, err);
}

// The CRC32C at the end of a file (size) is that of all before it.
static bool check_seal(const File *f, const unsigned char *text, uint64_t size, Error *err) {
    const uint32_t crc = crc32c(0, text, (size_t)size - 4),
                   expected = (uint32_t)shard_word(text + size - 4, 4);
    return expected == crc ||
           damaged_file(err, "%s: expected checksum %08x, found %08x", f->path, expected, crc);
}

// ------------------------------------------------------------------------------------------------
// NAME.idx: 8 bytes magic, uint32 version, uint32 checksum of the shard's header, uint64 documents,
// uint64 tokens, uint64 tokens per block, the ends, uint32 checksums of the blocks, CRC32C of
// everything before it.

static bool read_index_header(Shard *s, const File *f, Error *err) {
    unsigned char head[INDEX_HEADER_BYTES] = {0};
    const uint64_t n = f->size_bytes < sizeof head ? f->size_bytes : sizeof head;
    if (!file_read_at(f, head, n, 0, err)) return false;
    const uint64_t block = shard_word(head + 32, 8);
    if (memcmp(head, "UNPADIDX", 8) != 0 || shard_word(head + 8, 4) != INDEX_VERSION)
        return damaged_file(err, "%s: expected an index of version %d", f->path, INDEX_VERSION);
    if (block < 1 || block > INDEX_MAX_BLOCK)
        return damaged_file(err, "%s: expected blocks of 1 to %d tokens, found %lu", f->path,
                            INDEX_MAX_BLOCK, block);
    s->block_tokens = (int64_t)block;
    return true;
}

static bool set_index(Shard *s, const File *f, const unsigned char *text, uint64_t size,
                      uint64_t count, Error *err) {
    const size_t sum_bytes = (size_t)shard_num_blocks(s) * 4;
    const unsigned char *ends_at = text + INDEX_HEADER_BYTES, *sums_at = ends_at + count * 8;
    if (!check_seal(f, text, size, err)) return false;
    if (shard_word(text + 12, 4) != s->checksum || shard_word(text + 16, 8) != count ||
        shard_word(text + 24, 8) != (uint64_t)s->num_tokens)
        return error_set(err, EXIT_BAD_INPUT, HINT_COPY, "%s: is the index of another shard",
                         f->path);
    uint64_t *ends = host_calloc((size_t)count, 8, "document ends");
    s->block_crcs = host_calloc(sum_bytes, 1, "checksums of tokens");
    memcpy(ends, ends_at, (size_t)count * 8);
    memcpy(s->block_crcs, sums_at, sum_bytes);
    s->token_sum = crc32c(0, sums_at, sum_bytes);
    // without the CRC at the end: over the data and its own CRC, a CRC is a constant
    s->checksum = crc32c(s->checksum, text, (size_t)size - 4);
    return set_ends(s, ends, count, f->path, err);
}

// `count` comes from the shard's header; the file must have exactly the size that follows.
static bool read_index(Shard *s, const File *f, uint64_t count, Error *err) {
    uint64_t size = 0;
    if (!read_index_header(s, f, err)) return false;
    const uint64_t tail = INDEX_HEADER_BYTES + shard_num_blocks(s) * 4 + 4;
    if (!checked_mul(count, 8, &size) || !checked_add(size, tail, &size)) size = UINT64_MAX;
    if (!check_size(f, size, "from the shard's header", err)) return false;
    unsigned char *text = host_calloc((size_t)size, 1, "a shard index");
    const bool ok = file_read_at(f, text, size, 0, err) && set_index(s, f, text, size, count, err);
    free(text);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// NAME.mask: which tokens are targets

bool mask_bit(const unsigned char *mask, int64_t i) { return (mask[i / 8] >> i % 8 & 1) != 0; }

int64_t mask_count(const unsigned char *mask, int64_t from, int64_t to) {
    int64_t ones = 0, i = from;
    for (; i < to && i % 64 != 0; i++) ones += mask_bit(mask, i);
    for (; i + 64 <= to; i += 64) ones += __builtin_popcountll(shard_word(mask + i / 8, 8));
    for (; i < to; i++) ones += mask_bit(mask, i);
    return ones;
}

// What the header says about the bits, and the bits about the documents.
static bool check_mask(const Shard *s, const File *f, const unsigned char *text,
                       const unsigned char *bin_head, uint64_t size, Error *err) {
    const unsigned char *bits = text + MASK_HEADER_BYTES;
    const uint64_t ones = shard_word(text + 24, 8);
    const int64_t n = s->num_tokens, found = mask_count(bits, 0, n);
    if (memcmp(text, "UNPADMSK", 8) != 0 || shard_word(text + 8, 4) != MASK_VERSION)
        return damaged_file(err, "%s: expected a mask of version %d", f->path, MASK_VERSION);
    if (!check_seal(f, text, size, err)) return false;
    if (memcmp(text + 12, bin_head + SHARD_HEADER_BYTES - 4, 4) != 0 ||
        shard_word(text + 16, 8) != (uint64_t)n)
        return error_set(err, EXIT_BAD_INPUT, HINT_COPY, "%s: is the mask of another shard",
                         f->path);
    if (ones != (uint64_t)found)
        return damaged_file(err, "%s: expected %lu ones, found %ld", f->path, ones, found);
    if (mask_count(bits, n, (n + 7) / 8 * 8) != 0)
        return damaged_file(err, "%s: expected zeros after bit %ld", f->path, n);
    for (int64_t doc = 0, first = 0; doc < s->num_docs; first = (int64_t)s->doc_ends[doc++])
        if (mask_bit(bits, first))
            return damaged_file(err, "%s: bit %ld: expected 0 for the first token of a document",
                                f->path, first);
    return true;
}

static bool read_mask(Shard *s, const File *f, const unsigned char *bin_head, Error *err) {
    const uint64_t bytes = ((uint64_t)s->num_tokens + 7) / 8, size = MASK_HEADER_BYTES + bytes + 4;
    if (!check_size(f, size, "from the shard's header", err)) return false;
    s->mask = host_calloc((size_t)size, 1, "a mask");
    if (!file_read_at(f, s->mask, size, 0, err) || !check_mask(s, f, s->mask, bin_head, size, err))
        return false;
    s->num_targets = (int64_t)shard_word(s->mask + 24, 8);
    s->token_sum = crc32c(s->token_sum, s->mask, (size_t)size - 4);
    memmove(s->mask, s->mask + MASK_HEADER_BYTES, (size_t)bytes);
    return true;
}

static bool open_mask(Shard *s, const unsigned char *head, bool expected, Error *err) {
    char path[IO_PATH_MAX];
    File f;
    Error none = {0};
    if (!open_beside(s, &f, path, ".mask", expected ? err : &none)) return !expected;
    const bool ok =
        expected
            ? read_mask(s, &f, head, err)
            : error_set(err, EXIT_BAD_INPUT, "remove it if it belongs to other shards",
                        "%s: expected no mask beside a shard without flag %d", path, FLAG_MASK);
    file_close(&f);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// NAME.bin

// The words that we add to llm.c's header; the CRC in the last one covers the others.
static bool open_own(Shard *s, const unsigned char *head, Error *err) {
    int32_t w[SHARD_HEADER_BYTES / 4];
    char path[IO_PATH_MAX];
    File index;
    memcpy(w, head, sizeof w);
    s->format = "unpad.c";
    s->checksum = crc32c(0, w, sizeof w - 4);
    if ((uint32_t)w[255] != s->checksum)
        return damaged_file(err, "%s: header checksum: expected %08x, found %08x", s->path,
                            (uint32_t)w[255], s->checksum);
    if (w[9] != OWN_VERSION)
        return error_set(err, EXIT_BAD_INPUT, "use a newer unpad.c",
                         "%s: expected shard version %d, found %d", s->path, OWN_VERSION, w[9]);
    s->vocab_size = w[10];
    s->bos = (w[11] & FLAG_BOS_FIRST) != 0 ? w[12] : -1;
    s->eos = (w[11] & FLAG_EOS_LAST) != 0 ? w[13] : -1;
    s->tokenizer_hash = shard_word(head + 16 * 4, 8);
    const uint64_t count = shard_word(head + 14 * 4, 8);
    if (s->vocab_size < 1 || s->bos >= s->vocab_size || s->eos >= s->vocab_size || s->bos < -1 ||
        s->eos < -1)
        return damaged_file(err, "%s: vocabulary %d, BOS %d, EOS %d", s->path, s->vocab_size,
                            s->bos, s->eos);
    if (!check_token_bytes(s, err) || !open_beside(s, &index, path, ".idx", err)) return false;
    const bool ok = read_index(s, &index, count, err);
    file_close(&index);
    return ok && open_mask(s, head, (w[11] & FLAG_MASK) != 0, err);
}

// Adds the token's places in a block of n tokens, the first of them number `from`, to the ends.
static void scan_block(const Shard *s, const unsigned char *block, int64_t from, int64_t n,
                       uint32_t token, uint64_t **ends, uint64_t *count, size_t *capacity) {
    const size_t width = (size_t)s->token_bytes;
    for (int64_t i = 0; i < n; i++) {
        if ((uint32_t)shard_word(block + (size_t)i * width, width) != token) continue;
        *ends = host_grow(*ends, capacity, *count + 2, 8, "document ends");
        (*ends)[(*count)++] = (uint64_t)(from + i);
    }
}

// llm.c's shards have no index: documents begin with a token.
static bool scan(Shard *s, int32_t token, Error *err) {
    static const int64_t BLOCK_TOKENS = 1 << 18;
    uint64_t *ends = NULL, count = 0;
    size_t capacity = 0;
    unsigned char *block = host_calloc(BLOCK_TOKENS, 4, "scanning a shard");
    bool ok = true;
    for (int64_t at = 0; ok && at < s->num_tokens; at += BLOCK_TOKENS) {
        const int64_t left = s->num_tokens - at, n = left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
        const uint64_t width = (uint64_t)s->token_bytes, bytes = (uint64_t)n * width;
        ok = file_read_at(&s->file, block, bytes, SHARD_HEADER_BYTES + (uint64_t)at * width, err);
        if (!ok) break;
        s->token_sum = crc32c(s->token_sum, block, (size_t)bytes);
        scan_block(s, block, at, n, (uint32_t)token, &ends, &count, &capacity);
    }
    free(block);
    if (ok && count == 0 && s->num_tokens > 0)
        ok = error_set(err, EXIT_BAD_INPUT,
                       "name the token that begins documents with --boundary-token",
                       "%s: no index, and token %d is nowhere in it", s->path, token);
    if (!ok) {
        free(ends);
        return false;
    }
    s->bos = token;
    s->scanned = true;
    if (count == 0) return true;
    if (ends[0] == 0) memmove(ends, ends + 1, --count * 8);  // nothing ends before the first token
    ends[count++] = (uint64_t)s->num_tokens;
    s->checksum = crc32c(s->checksum, ends, count * 8);
    return set_ends(s, ends, count, s->path, err);
}

static bool open_bin(Shard *s, const unsigned char *head, const DatasetOptions *options,
                     Error *err) {
    int32_t w[SHARD_HEADER_BYTES / 4];
    memcpy(w, head, sizeof w);
    const bool wide = w[0] == SHARD_MAGIC_U32;
    s->format = "llm.c";
    s->token_bytes = wide ? 4 : 2;
    s->num_tokens = w[2];
    s->checksum = crc32c(0, head, SHARD_HEADER_BYTES);
    if (w[1] != (wide ? 7 : 1))
        return error_set(err, EXIT_BAD_INPUT, "", "%s: expected version %d of magic %d, found %d",
                         s->path, wide ? 7 : 1, w[0], w[1]);
    if (w[2] < 0) return damaged_file(err, "%s: a header of %d tokens", s->path, w[2]);
    if (w[8] == OWN_MAGIC) return open_own(s, head, err);
    for (int i = 3; i < SHARD_HEADER_BYTES / 4; i++)
        if (w[i] != 0)
            return damaged_file(err, "%s: header word %d: expected 0 in an llm.c shard, found %d",
                                s->path, i, w[i]);
    const int32_t usual = wide ? 128000 : 50256;
    return check_token_bytes(s, err) &&
           scan(s, options->boundary_token >= 0 ? options->boundary_token : usual, err);
}

// ------------------------------------------------------------------------------------------------
// Other files

static bool has_megatron_index(const Shard *s) {
    char path[IO_PATH_MAX], magic[9] = {0};
    File f;
    Error ignored = {0};
    if (!path_ends_with(s->path, ".bin") || !open_beside(s, &f, path, ".idx", &ignored))
        return false;
    const bool found = f.size_bytes >= sizeof magic &&
                       file_read_at(&f, magic, sizeof magic, 0, &ignored) &&
                       memcmp(magic, "MMIDIDX\0\0", sizeof magic) == 0;
    file_close(&f);
    return found;
}

static bool is_printable(const unsigned char *p, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        if (p[i] < 0x20 && (p[i] < 9 || p[i] > 13)) return false;
    return n > 0;
}

// What the first n bytes look like, and what to do about it
static const char *looks_like(const Shard *s, const unsigned char *head, uint64_t n,
                              const char **hint) {
    static const uint32_t EVAL_MAGIC = 20240522;
    const uint32_t magic = (uint32_t)shard_word(head, 4), swapped = __builtin_bswap32(magic);
    *hint = "data/convert.py FILE --out DIR makes shards of it";
    if (memcmp(head, "BIN.TOK\n", 8) == 0) return "llmq's tokens";
    if (memcmp(head, "\x93NUMPY", 6) == 0) return "a numpy array";
    if (path_ends_with(s->path, ".npy")) return "OLMo's tokens";
    if (path_ends_with(s->path, ".ds")) return "datatrove's tokens";
    if (has_megatron_index(s)) return "Megatron's tokens";
    *hint = SHARD_HINT_REMAKE;
    if (magic == SHARD_MAGIC_U16 || magic == SHARD_MAGIC_U32)
        return "a shard cut off in its header";
    *hint = "unpack it first";
    if (head[0] == 0x1f && head[1] == 0x8b) return "a gzip file";
    if (memcmp(head, "PK\3\4", 4) == 0) return "a zip file (.npz, .zip, PyTorch's .pt)";
    *hint = "it is --model that takes a model, as a directory";
    if (memcmp(head, "GGUF", 4) == 0) return "a GGUF model";
    if (head[8] == '{' && head[9] == '"') return "a safetensors model";
    *hint = "name the token file, not its index";
    if (path_ends_with(s->path, ".idx") || path_ends_with(s->path, ".index")) return "an index";
    *hint = "give text files, JSON Lines, or the .bin files made of them";
    if (swapped == SHARD_MAGIC_U16 || swapped == SHARD_MAGIC_U32) return "a big-endian shard";
    if (magic == EVAL_MAGIC) return "llm.c's multiple-choice evaluation file";
    *hint = "data/prepare.py FILE --out FILE.jsonl writes JSON Lines of it";
    if (memcmp(head, "PAR1", 4) == 0) return "a Parquet file";
    *hint = "name it .txt or .jsonl";
    if (is_printable(head, n)) return "text";
    *hint = "raw ids, as nanoGPT writes them: data/convert.py reads them from a numpy array";
    return "unknown";
}

bool shard_open(Shard *s, const DatasetOptions *options, Error *err) {
    unsigned char head[SHARD_HEADER_BYTES] = {0};
    const uint64_t n = s->file.size_bytes < sizeof head ? s->file.size_bytes : sizeof head;
    const char *hint;
    if (!file_read_at(&s->file, head, n, 0, err)) return false;
    const uint64_t magic = shard_word(head, 4);
    if (n == sizeof head && (magic == SHARD_MAGIC_U16 || magic == SHARD_MAGIC_U32))
        return open_bin(s, head, options, err);
    const char *found = looks_like(s, head, n, &hint);
    return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected a token shard, found %s", s->path,
                     found);
}
