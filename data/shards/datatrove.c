// datatrove: NAME.ds has tokens only; NAME.ds.index has cumulative document ends, uint64. The width
// of a token follows from the sizes of both.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"
#include "../base/path.h"
#include "dataset.h"
#include "formats.h"
#include "shard.h"

// The ends in memory the caller frees; NULL on error.
static uint64_t *datatrove_read_ends(const char *path, uint64_t *count, Error *err) {
    File f;
    if (!file_open(&f, path, "copy each .ds together with its .ds.index", err)) return NULL;
    *count = f.size_bytes / 8;
    uint64_t *ends = NULL;
    if (f.size_bytes % 8 != 0) {
        shard_size_error(&f, *count * 8, "whole entries", err);
    } else {
        ends = host_calloc((size_t)*count, 8, "document ends");
        if (!file_read_at(&f, ends, *count * 8, 0, err)) {
            free(ends);
            ends = NULL;
        }
    }
    file_close(&f);
    return ends;
}

// NAME.ds.loss, where there is one: a byte for each token, 0: it is not trained.
static bool datatrove_read_loss(Shard *s, Error *err) {
    char path[IO_PATH_MAX];
    File f;
    if (!shard_sidecar(path, s->path, 0, ".loss", err)) return false;
    if (!path_exists(path)) return true;
    if (!file_open(&f, path, "", err)) return false;
    const uint64_t n = (uint64_t)s->num_tokens;
    unsigned char *bytes = f.size_bytes == n ? host_calloc(n + 8, 1, "a loss mask") : NULL;
    const bool ok = bytes ? file_read_at(&f, bytes, n, 0, err)
                          : shard_size_error(&f, n, "one for each token", err);
    file_close(&f);
    for (uint64_t i = 0; ok && i < n; i++) {  // bits overwrite only bytes already read
        const bool target = bytes[i] != 0;
        if (i % 8 == 0) bytes[i / 8] = 0;
        bytes[i / 8] |= (unsigned char)(target << i % 8);
    }
    if (ok)
        shard_set_mask(s, bytes);
    else
        free(bytes);
    return ok;
}

bool shard_open_datatrove(Shard *s, const unsigned char *head, const DatasetOptions *options,
                          bool *recognised, Error *err) {
    (void)head, (void)options;
    char path[IO_PATH_MAX];
    uint64_t count = 0;
    *recognised = path_ends_with(s->path, ".ds");
    if (!*recognised || !shard_sidecar(path, s->path, 0, ".index", err)) return false;
    uint64_t *ends = datatrove_read_ends(path, &count, err);
    if (!ends) return false;
    const uint64_t size = s->file.size_bytes, tokens = count > 0 ? ends[count - 1] : 0;
    const bool narrow = tokens <= size / 2 && tokens * 2 == size,
               wide = tokens <= size / 4 && tokens * 4 == size;
    if (!narrow && !wide) {
        free(ends);
        return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                         "%s: expected %llu tokens (its index) of 2 or 4 bytes, found %llu bytes",
                         s->path, (unsigned long long)tokens, (unsigned long long)size);
    }
    s->format = "datatrove";
    s->num_tokens = (int64_t)tokens;
    s->token_bytes = narrow ? 2 : 4;
    s->checksum = crc32c(0, ends, (size_t)count * 8);
    return shard_set_ends(s, ends, count, path, err) && datatrove_read_loss(s, err);
}
