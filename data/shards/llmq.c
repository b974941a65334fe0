#include "llmq.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../base/error.h"
#include "../base/hash.h"
#include "dataset.h"
#include "shard.h"

// -------------------------------------------------------------------------------------------------
// llmq BIN.TOK: int32 tokens, no document ends

bool shard_open_llmq(Shard *s, const unsigned char *head, const DatasetOptions *options,
                     Error *err) {
    int32_t w[8];
    memcpy(w, head, sizeof w);
    s->format = SHARD_LLMQ;
    s->data_offset = SHARD_HEADER_BYTES;
    s->token_bytes = 4;
    s->num_tokens = w[4];
    s->checksum = crc32c(0, head, SHARD_HEADER_BYTES);
    if ((w[2] != 1 && w[2] != 2) || w[3] != 4 || w[4] < 0 || (w[2] == 2 && w[5] < 1))
        return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                         "%s: BIN.TOK version %d, %d bytes a token, %d tokens, vocabulary %d",
                         s->path, w[2], w[3], w[4], w[5]);
    if (w[2] == 2 && w[6] != 0)
        return error_set(err, EXIT_BAD_INPUT, "write the file without a mask",
                         "%s: has a loss mask, which is not read", s->path);
    s->vocab_size = w[2] == 2 ? w[5] : -1;
    if (options->boundary_token < 0)
        return error_set(err, EXIT_USAGE, "give the end-of-text id with --boundary-token",
                         "%s: BIN.TOK files do not say where documents end", s->path);
    if (options->boundary_ends)
        s->eos = options->boundary_token;
    else
        s->bos = options->boundary_token;
    return shard_prove_size(s, 0, err) &&
           shard_scan(s, options->boundary_token, options->boundary_ends, err);
}
