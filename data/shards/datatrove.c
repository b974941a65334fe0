#include "datatrove.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"
#include "shard.h"

// -------------------------------------------------------------------------------------------------
// datatrove: raw tokens, and cumulative ends in NAME.ds.index; the width follows from both sizes

bool shard_open_datatrove(Shard *s, Error *err) {
    char path[4096];
    File f;
    if (!shard_sidecar(path, sizeof path, s->path, 0, ".index", err) ||
        !file_open(&f, path, "copy each .ds together with its .ds.index", err))
        return false;
    s->format = SHARD_DATATROVE;
    const uint64_t count = f.size_bytes / 8;
    bool ok = f.size_bytes % 8 == 0 || shard_size_error(&f, count * 8, "whole entries", err);
    uint64_t *ends = ok ? host_calloc((size_t)count, 8, "document ends") : NULL;
    ok = ok && file_read_at(&f, ends, count * 8, 0, err);
    file_close(&f);
    const uint64_t size = s->file.size_bytes, tokens = ok && count > 0 ? ends[count - 1] : 0;
    if (ok && tokens <= size / 2) {
        s->num_tokens = (int64_t)tokens;
        s->token_bytes = tokens * 2 == size ? 2 : 4;
    }
    if (ok && (tokens > size / 2 || tokens * (uint64_t)s->token_bytes != size))
        ok = error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                       "%s: expected %llu tokens (its index) of 2 or 4 bytes, found %llu bytes",
                       s->path, (unsigned long long)tokens, (unsigned long long)size);
    if (!ok) {
        free(ends);
        return false;
    }
    s->checksum = crc32c(0, ends, (size_t)count * 8);
    return shard_set_ends(s, ends, count, path, err);
}
