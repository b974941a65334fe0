// llmq: BIN.TOK files, int32 tokens without document ends, and for fine-tuning a bit for each
// token: is it of the answer? The writer means a token by its bit; llmq's own loader applies the
// bit to the token after it.
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"
#include "dataset.h"
#include "formats.h"
#include "shard.h"

// Zeros of the document [from, to) before its first token: what the sample before it was padded
// with. 0 when all of it is.
static bool llmq_padding(const Shard *s, int64_t from, int64_t to, int64_t *padding, Error *err) {
    int32_t tokens[256];
    const int64_t room = sizeof tokens / sizeof *tokens;
    for (int64_t at = from; at < to; at += room) {
        const int64_t n = to - at < room ? to - at : room;
        if (!file_read_at(&s->file, tokens, (uint64_t)n * 4, s->data_offset + (uint64_t)at * 4,
                          err))
            return false;
        for (int64_t i = 0; i < n; i++) {
            *padding = at + i - from;
            if (tokens[i] != 0 || mask_bit(s->mask, at + i)) return true;
        }
    }
    *padding = 0;
    return true;
}

// Padding becomes documents of its own: they have no targets, and are left out of the plan.
static bool llmq_split_padding(Shard *s, Error *err) {
    const int64_t count = s->num_docs;
    uint64_t *ends = host_calloc((size_t)count * 2, 8, "document ends"), n = 0;
    int64_t from = 0, padding;
    for (int64_t doc = 0; doc < count; from = (int64_t)s->doc_ends[doc++]) {
        if (!llmq_padding(s, from, (int64_t)s->doc_ends[doc], &padding, err)) {
            free(ends);
            return false;
        }
        if (padding > 0) ends[n++] = (uint64_t)(from + padding);
        ends[n++] = s->doc_ends[doc];
    }
    free(s->doc_ends);
    s->num_docs = 0;
    return shard_set_ends(s, ends, n, s->path, err);
}

// The bits follow the tokens.
static bool llmq_read_mask(Shard *s, Error *err) {
    const uint64_t at = s->data_offset + (uint64_t)s->num_tokens * 4,
                   bytes = ((uint64_t)s->num_tokens + 7) / 8;
    s->mask = host_calloc(bytes + 8, 1, "a loss mask");
    if (!file_read_at(&s->file, s->mask, bytes, at, err) || !llmq_split_padding(s, err))
        return false;
    shard_set_mask(s, s->mask);
    return true;
}

static bool llmq_check_size(const Shard *s, bool has_mask, Error *err) {
    const uint64_t n = (uint64_t)s->num_tokens, size = s->data_offset + n * 4 + (n + 7) / 8;
    return has_mask ? size == s->file.size_bytes ||
                          shard_size_error(&s->file, size, "tokens and a bit for each", err)
                    : shard_check_size(s, err);
}

bool shard_open_llmq(Shard *s, const unsigned char *head, const DatasetOptions *options,
                     bool *recognised, Error *err) {
    struct {
        char magic[8];
        int32_t version, token_bytes, num_tokens, vocab_size, has_mask;
    } h;
    memcpy(&h, head, sizeof h);
    *recognised = s->file.size_bytes >= SHARD_HEADER_BYTES && memcmp(h.magic, "BIN.TOK\n", 8) == 0;
    if (!*recognised) return false;
    if ((h.version != 1 && h.version != 2) || h.token_bytes != 4 || h.num_tokens < 0 ||
        (h.version == 2 && h.vocab_size < 1))
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: BIN.TOK version %d, %d bytes per token, %d tokens, vocabulary %d",
                         s->path, h.version, h.token_bytes, h.num_tokens, h.vocab_size);
    if (options->boundary_token < 0)
        return error_set(err, EXIT_USAGE, "give the end-of-text id with --boundary-token",
                         "%s: BIN.TOK files do not say where documents end", s->path);
    s->format = "llmq";
    s->data_offset = SHARD_HEADER_BYTES;
    s->token_bytes = 4;
    s->num_tokens = h.num_tokens;
    s->vocab_size = h.version == 2 ? h.vocab_size : -1;
    s->checksum = crc32c(0, head, SHARD_HEADER_BYTES);
    const bool has_mask = h.version == 2 && h.has_mask;
    return llmq_check_size(s, has_mask, err) &&
           shard_scan(s, options->boundary_token, options->boundary_ends, err) &&
           (!has_mask || llmq_read_mask(s, err));
}
