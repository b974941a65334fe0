#include "shard_writer.h"

#include <stdlib.h>
#include <sys/uio.h>

#include "../base/hash.h"
#include "../base/memory.h"
#include "shard.h"

enum { SHARD_TOKENS = 100000000, BLOCK_TOKENS = 4096 };

int shard_token_bytes(const ShardVocabulary *v) { return v->vocab_size <= 65536 ? 2 : 4; }

void shard_writer_init(ShardWriter *w, const char *dir, const char *split,
                       const ShardVocabulary *v) {
    *w = (ShardWriter){.dir = dir, .split = split, .vocabulary = *v, .bin.fd = -1};
}

static bool shard_writer_open(ShardWriter *w, Error *err) {
    static const unsigned char head[SHARD_HEADER_BYTES] = {0};
    char path[IO_PATH_MAX];
    w->num_ends = w->num_crcs = 0;
    w->masked = w->weighted = false;
    w->all_bos = w->all_eos = true;
    return path_printf(path, err, "%s/%s_%05d.bin", w->dir, w->split, w->num_shards++) &&
           writer_open(&w->bin, path, err) && writer_write(&w->bin, head, sizeof head, err);
}

static void end_block(ShardWriter *w) {
    array_grow(w->crcs, &w->crc_capacity, w->num_crcs + 1, "checksums of tokens");
    w->crcs[w->num_crcs++] = w->block_crc;
    w->block_crc = 0;
    w->block_bytes = 0;
}

static bool write_tokens(ShardWriter *w, const unsigned char *p, uint64_t n, Error *err) {
    const uint64_t block = BLOCK_TOKENS * (uint64_t)shard_token_bytes(&w->vocabulary);
    if (!writer_write(&w->bin, p, n, err)) return false;
    for (uint64_t part; n > 0; p += part, n -= part) {
        part = n < block - w->block_bytes ? n : block - w->block_bytes;
        w->block_crc = crc32c(w->block_crc, p, part);
        w->block_bytes += part;
        if (w->block_bytes == block) end_block(w);
    }
    return true;
}

static void add_mask(ShardWriter *w, const float *weights, uint64_t first, uint64_t n) {
    const uint64_t end = first + n;
    uint64_t kept = w->weighted ? first : 0;  // weights so far; before that, the mask is enough
    array_grow(w->mask, &w->mask_capacity, (end + 7) / 8, "a loss mask");
    for (uint64_t i = first; i < end; i++) {
        const float weight = weights ? weights[i - first] : i > first;
        if (i % 8 == 0) w->mask[i / 8] = 0;
        w->mask[i / 8] |= (unsigned char)((weight != 0) << i % 8);
        w->weighted |= weight != 0 && weight != 1;
    }
    w->masked |= weights != NULL;
    if (!w->weighted) return;
    array_grow(w->weights, &w->weight_capacity, end, "weights");
    for (; kept < end; kept++)
        w->weights[kept] =
            kept >= first && weights ? weights[kept - first] : mask_bit(w->mask, (int64_t)kept);
}

bool shard_writer_add(ShardWriter *w, const unsigned char *tokens, uint64_t n, const float *weights,
                      Error *err) {
    const ShardVocabulary *v = &w->vocabulary;
    const size_t width = (size_t)shard_token_bytes(v);
    if (n > INT32_MAX)
        return bad_input(err, "a document of %lu tokens does not fit into a shard", n);
    if (w->bin.fd >= 0 && w->ends[w->num_ends - 1] + n > SHARD_TOKENS &&
        !shard_writer_close(w, err))
        return false;
    if ((w->bin.fd < 0 && !shard_writer_open(w, err)) || !write_tokens(w, tokens, n * width, err))
        return false;
    const uint64_t before = w->num_ends > 0 ? w->ends[w->num_ends - 1] : 0;
    array_grow(w->ends, &w->end_capacity, w->num_ends + 1, "document ends");
    w->ends[w->num_ends++] = before + n;
    add_mask(w, weights, before, n);
    w->all_bos &= (int32_t)shard_word(tokens, width) == v->bos;
    w->all_eos &= (int32_t)shard_word(tokens + (n - 1) * width, width) == v->eos;
    w->num_docs++;
    return true;
}

static ShardHeader make_header(const ShardWriter *w) {
    const ShardVocabulary *v = &w->vocabulary;
    const bool wide = shard_token_bytes(v) == 4;
    ShardHeader h = {.magic = wide ? SHARD_MAGIC_U32 : SHARD_MAGIC_U16,
                     .version = wide ? 7 : 1,
                     .num_tokens = (int32_t)w->ends[w->num_ends - 1],
                     .own_magic = OWN_MAGIC,
                     .own_version = OWN_VERSION,
                     .vocab_size = v->vocab_size,
                     .flags = (w->all_bos ? FLAG_BOS_FIRST : 0) | (w->all_eos ? FLAG_EOS_LAST : 0) |
                              (w->masked ? FLAG_MASK : 0) | (v->pairs ? FLAG_PAIRS : 0),
                     .bos = w->all_bos ? v->bos : -1,
                     .eos = w->all_eos ? v->eos : -1,
                     .num_docs = w->num_ends,
                     .tokenizer_hash = v->tokenizer_hash};
    h.crc = crc32c(0, &h, sizeof h - 4);
    return h;
}

// Writes a file next to the shard with this header: counts, two parts, and the checksum of both
static bool write_beside(const ShardWriter *w, const Beside *b, uint32_t version,
                         const ShardHeader *h, const uint64_t *counts, const struct iovec parts[2],
                         Error *err) {
    const uint32_t version_and_crc[] = {version, h->crc};
    char path[IO_PATH_MAX];
    FileWriter f;
    return path_printf(path, err, "%s/%s_%05d.%s", w->dir, w->split, w->num_shards - 1,
                       b->ending) &&
           writer_open(&f, path, err) && writer_write(&f, b->magic, 8, err) &&
           writer_write(&f, version_and_crc, 8, err) &&
           writer_write(&f, counts, b->head_bytes - 16, err) &&
           writer_write(&f, parts[0].iov_base, parts[0].iov_len, err) &&
           writer_write(&f, parts[1].iov_base, parts[1].iov_len, err) &&
           writer_write(&f, &(uint32_t){f.crc}, 4, err) && writer_close(&f, err);
}

bool shard_writer_close(ShardWriter *w, Error *err) {
    if (w->bin.fd < 0) return true;
    if (w->block_bytes > 0) end_block(w);
    const ShardHeader h = make_header(w);
    const uint64_t n = (uint64_t)h.num_tokens, of_index[] = {w->num_ends, n, BLOCK_TOKENS},
                   of_mask[] = {n, (uint64_t)mask_count(w->mask, 0, h.num_tokens)};
    const struct iovec index[] = {{w->ends, w->num_ends * 8}, {w->crcs, w->num_crcs * 4}},
                       mask[] = {{w->mask, (n + 7) / 8}, {w->weights, w->weighted ? n * 4 : 0}};
    return writer_replace_start(&w->bin, &h, sizeof h, err) && writer_close(&w->bin, err) &&
           write_beside(w, &index_file, index_file.version, &h, of_index, index, err) &&
           (!w->masked || write_beside(w, &mask_file, w->weighted ? MASK_WITH_WEIGHTS : 1, &h,
                                       of_mask, mask, err));
}

void shard_writer_free(ShardWriter *w) {
    writer_abort(&w->bin);
    free(w->ends);
    free(w->crcs);
    free(w->mask);
    free(w->weights);
}
