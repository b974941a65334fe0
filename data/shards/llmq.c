// llmq: BIN.TOK files, int32 tokens without document ends.
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../base/error.h"
#include "../base/hash.h"
#include "dataset.h"
#include "formats.h"
#include "shard.h"

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
    if (h.version == 2 && h.has_mask)
        return error_set(err, EXIT_BAD_INPUT, "write the file without a mask",
                         "%s: has a loss mask, which is not supported", s->path);
    if (options->boundary_token < 0)
        return error_set(err, EXIT_USAGE, "give the end-of-text id with --boundary-token",
                         "%s: BIN.TOK files do not say where documents end", s->path);
    s->format = "llmq";
    s->data_offset = SHARD_HEADER_BYTES;
    s->token_bytes = 4;
    s->num_tokens = h.num_tokens;
    s->vocab_size = h.version == 2 ? h.vocab_size : -1;
    s->checksum = crc32c(0, head, SHARD_HEADER_BYTES);
    return shard_check_size(s, err) &&
           shard_scan(s, options->boundary_token, options->boundary_ends, err);
}
