#include "shard_writer.h"

#include <stdlib.h>
#include <string.h>

#include "../base/hash.h"
#include "../base/memory.h"
#include "shard.h"

enum { SHARD_TOKENS = 100000000, BLOCK_TOKENS = 4096 };

int shard_token_bytes(const ShardVocabulary *v) { return v->vocab_size <= 65536 ? 2 : 4; }

void shard_writer_init(ShardWriter *w, const char *dir, const char *split,
                       const ShardVocabulary *v) {
    memset(w, 0, sizeof *w);
    w->dir = dir;
    w->split = split;
    w->vocabulary = *v;
    w->bin.fd = -1;
}

static bool shard_writer_open(ShardWriter *w, Error *err) {
    static const unsigned char head[SHARD_HEADER_BYTES] = {0};
    char path[IO_PATH_MAX];
    w->num_ends = w->num_crcs = 0;
    w->block_crc = 0;
    w->block_bytes = 0;
    return path_printf(path, sizeof path, err, "%s/%s_%05d.bin", w->dir, w->split,
                       w->num_shards++) &&
           writer_open(&w->bin, path, err) && writer_write(&w->bin, head, sizeof head, err);
}

static void end_block(ShardWriter *w) {
    w->crcs = host_grow(w->crcs, &w->crc_capacity, w->num_crcs + 1, 4, "checksums of tokens");
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

bool shard_writer_add(ShardWriter *w, const void *tokens, uint64_t n, Error *err) {
    if (n > INT32_MAX)
        return bad_input(err, "a document of %lu tokens does not fit into a shard", n);
    if (w->bin.fd >= 0 && w->ends[w->num_ends - 1] + n > SHARD_TOKENS &&
        !shard_writer_close(w, err))
        return false;
    if ((w->bin.fd < 0 && !shard_writer_open(w, err)) ||
        !write_tokens(w, tokens, n * (uint64_t)shard_token_bytes(&w->vocabulary), err))
        return false;
    const uint64_t before = w->num_ends > 0 ? w->ends[w->num_ends - 1] : 0;
    w->ends = host_grow(w->ends, &w->end_capacity, w->num_ends + 1, 8, "document ends");
    w->ends[w->num_ends++] = before + n;
    w->num_docs++;
    w->num_tokens += (int64_t)n;
    return true;
}

static void fill_header(const ShardWriter *w, int32_t words[SHARD_HEADER_BYTES / 4]) {
    const ShardVocabulary *v = &w->vocabulary;
    const bool wide = shard_token_bytes(v) == 4;
    const int32_t flags = (v->bos >= 0 ? FLAG_BOS_FIRST : 0) | (v->eos >= 0 ? FLAG_EOS_LAST : 0);
    const int32_t llmc[] = {wide ? SHARD_MAGIC_U32 : SHARD_MAGIC_U16, wide ? 7 : 1,
                            (int32_t)w->ends[w->num_ends - 1]},
                  own[] = {OWN_MAGIC, OWN_VERSION, v->vocab_size, flags, v->bos, v->eos};
    const uint64_t long_ones[] = {w->num_ends, v->tokenizer_hash};
    memset(words, 0, SHARD_HEADER_BYTES);
    memcpy(words, llmc, sizeof llmc);
    memcpy(words + 8, own, sizeof own);
    memcpy(words + 14, long_ones, sizeof long_ones);
    const uint32_t crc = crc32c(0, words, SHARD_HEADER_BYTES - 4);
    memcpy(words + 255, &crc, 4);
}

static bool write_index(ShardWriter *w, const int32_t words[SHARD_HEADER_BYTES / 4], Error *err) {
    unsigned char head[INDEX_HEADER_BYTES] = "UNPADIDX";
    const int32_t version_and_crc[] = {INDEX_VERSION, words[255]};
    const uint64_t counts[] = {w->num_ends, (uint64_t)words[2], BLOCK_TOKENS};
    char path[IO_PATH_MAX];
    FileWriter f;
    memcpy(head + 8, version_and_crc, sizeof version_and_crc);
    memcpy(head + 16, counts, sizeof counts);
    if (!path_printf(path, sizeof path, err, "%s/%s_%05d.idx", w->dir, w->split,
                     w->num_shards - 1) ||
        !writer_open(&f, path, err) || !writer_write(&f, head, sizeof head, err) ||
        !writer_write(&f, w->ends, w->num_ends * 8, err) ||
        !writer_write(&f, w->crcs, w->num_crcs * 4, err))
        return false;
    const uint32_t crc = f.crc;
    return writer_write(&f, &crc, 4, err) && writer_close(&f, err);
}

bool shard_writer_close(ShardWriter *w, Error *err) {
    int32_t words[SHARD_HEADER_BYTES / 4];
    if (w->bin.fd < 0) return true;
    if (w->block_bytes > 0) end_block(w);
    fill_header(w, words);
    return writer_replace_start(&w->bin, words, sizeof words, err) && writer_close(&w->bin, err) &&
           write_index(w, words, err);
}

void shard_writer_free(ShardWriter *w) {
    writer_abort(&w->bin);
    free(w->ends);
    free(w->crcs);
}
