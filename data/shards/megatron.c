#include "megatron.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"
#include "shard.h"

// -------------------------------------------------------------------------------------------------
// Megatron: raw tokens, and sequences with lengths and byte offsets in NAME.idx

// Sequences must follow one another in the file, and documents be runs of whole sequences.
static bool shard_megatron_ends(Shard *s, const File *f, const unsigned char *text, uint64_t nseq,
                                uint64_t ndoc, uint64_t *ends, Error *err) {
    const unsigned char *lengths = text + 34, *offsets = lengths + nseq * 4,
                        *docs = offsets + nseq * 8;
    uint64_t tokens = 0, seq = 0;
    for (uint64_t d = 0; d + 1 < ndoc; d++) {
        const uint64_t stop = shard_word(docs + (d + 1) * 8, 8);
        if (shard_word(docs, 8) != 0 || stop < seq || stop > nseq)
            return error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                             "%s: document %llu ends at sequence %llu of %llu", f->path,
                             (unsigned long long)d, (unsigned long long)stop,
                             (unsigned long long)nseq);
        for (; seq < stop; seq++) {
            if (shard_word(offsets + seq * 8, 8) != tokens * (uint64_t)s->token_bytes)
                return error_set(err, EXIT_BAD_INPUT, "only sequences one after another are read",
                                 "%s: sequence %llu: expected byte offset %llu, found %llu",
                                 f->path, (unsigned long long)seq,
                                 (unsigned long long)(tokens * (uint64_t)s->token_bytes),
                                 (unsigned long long)shard_word(offsets + seq * 8, 8));
            tokens += shard_word(lengths + seq * 4, 4);  // < 2^32 each, nseq < 2^60
        }
        ends[d] = tokens;
    }
    return seq == nseq || error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                                    "%s: documents cover %llu sequences, expected %llu", f->path,
                                    (unsigned long long)seq, (unsigned long long)nseq);
}

static bool shard_megatron_header(Shard *s, const File *f, const unsigned char *text,
                                  uint64_t *nseq, uint64_t *ndoc, Error *err) {
    *nseq = shard_word(text + 18, 8);
    *ndoc = shard_word(text + 26, 8);
    s->token_bytes = text[17] == 8 ? 2 : 4;
    if (shard_word(text + 9, 8) != 1 || (text[17] != 4 && text[17] != 8))
        return error_set(err, EXIT_BAD_INPUT, "tokens of type int32 (4) and uint16 (8) are read",
                         "%s: version %llu, type %d", f->path,
                         (unsigned long long)shard_word(text + 9, 8), text[17]);
    const uint64_t most = f->size_bytes / 8, size = 34 + *nseq * 12 + *ndoc * 8;
    const bool bounded = *nseq <= most && *ndoc <= most && *ndoc > 0;  // so size cannot wrap
    return (bounded && (size == f->size_bytes || size + *nseq == f->size_bytes)) ||
           error_set(err, EXIT_BAD_INPUT, DATASET_HINT_REMAKE,
                     "%s: %llu sequences and %llu documents do not make %llu bytes", f->path,
                     (unsigned long long)*nseq, (unsigned long long)*ndoc,
                     (unsigned long long)f->size_bytes);
}

bool shard_open_megatron(Shard *s, const File *f, Error *err) {
    uint64_t nseq = 0, ndoc = 0;
    s->format = SHARD_MEGATRON;
    unsigned char *text = host_calloc((size_t)f->size_bytes, 1, "a Megatron index");
    uint64_t *ends = NULL;
    bool ok = file_read_at(f, text, f->size_bytes, 0, err) &&
              shard_megatron_header(s, f, text, &nseq, &ndoc, err);
    if (ok) {
        ends = host_calloc((size_t)ndoc, 8, "document ends");
        ok = shard_megatron_ends(s, f, text, nseq, ndoc, ends, err);
        s->num_tokens = (int64_t)(ndoc > 1 ? ends[ndoc - 2] : 0);
        s->checksum = crc32c(0, text, (size_t)f->size_bytes);
    }
    free(text);
    if (!ok || !shard_prove_size(s, 0, err)) {
        free(ends);
        return false;
    }
    return shard_set_ends(s, ends, ndoc - 1, f->path, err);
}

bool shard_find_megatron(const Shard *s, char *path, size_t capacity, File *f) {
    char magic[9] = {0};
    Error ignored;
    memset(&ignored, 0, sizeof ignored);
    if (!path_ends_with(s->path, ".bin") ||
        !shard_sidecar(path, capacity, s->path, 4, ".idx", &ignored) ||
        !file_open(f, path, "", &ignored))
        return false;
    if (f->size_bytes >= 34 && file_read_at(f, magic, 9, 0, &ignored) &&
        memcmp(magic, "MMIDIDX\0\0", 9) == 0)
        return true;
    file_close(f);
    return false;
}
