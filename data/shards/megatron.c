// Megatron: NAME.bin has tokens only; NAME.idx has sequences with lengths and byte offsets, and the
// first sequence of each document.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"
#include "../base/path.h"
#include "dataset.h"
#include "formats.h"
#include "shard.h"

enum { MEGATRON_HEADER_BYTES = 34, MEGATRON_INT32 = 4, MEGATRON_UINT16 = 8 };

// Cumulative ends of the ndoc - 1 documents into `ends`. Sequences must be contiguous in the file,
// and each document a run of whole sequences.
static bool megatron_ends(const Shard *s, const File *f, const unsigned char *text, uint64_t nseq,
                          uint64_t ndoc, uint64_t *ends, Error *err) {
    const unsigned char *lengths = text + MEGATRON_HEADER_BYTES, *offsets = lengths + nseq * 4,
                        *docs = offsets + nseq * 8;
    uint64_t tokens = 0, seq = 0;
    for (uint64_t d = 0; d + 1 < ndoc; d++) {
        const uint64_t stop = shard_word(docs + (d + 1) * 8, 8);
        if (shard_word(docs, 8) != 0 || stop < seq || stop > nseq)
            return error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                             "%s: document %llu ends at sequence %llu of %llu", f->path,
                             (unsigned long long)d, (unsigned long long)stop,
                             (unsigned long long)nseq);
        for (; seq < stop; seq++) {
            const uint64_t expected = tokens * (uint64_t)s->token_bytes,
                           found = shard_word(offsets + seq * 8, 8);
            if (found != expected)
                return error_set(err, EXIT_BAD_INPUT, "sequences must be contiguous in the file",
                                 "%s: sequence %llu: expected byte offset %llu, found %llu",
                                 f->path, (unsigned long long)seq, (unsigned long long)expected,
                                 (unsigned long long)found);
            tokens += shard_word(lengths + seq * 4, 4);  // < 2^32 each, nseq < 2^60
        }
        ends[d] = tokens;
    }
    return seq == nseq || error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                                    "%s: documents cover %llu sequences, expected %llu", f->path,
                                    (unsigned long long)seq, (unsigned long long)nseq);
}

static bool megatron_header(Shard *s, const File *f, const unsigned char *text, uint64_t *nseq,
                            uint64_t *ndoc, Error *err) {
    const uint64_t version = shard_word(text + 9, 8);
    const int type = text[17];
    *nseq = shard_word(text + 18, 8);
    *ndoc = shard_word(text + 26, 8);
    s->token_bytes = type == MEGATRON_UINT16 ? 2 : 4;
    if (version != 1 || (type != MEGATRON_INT32 && type != MEGATRON_UINT16))
        return error_set(err, EXIT_BAD_INPUT, "supported: version 1 with int32 (4) or uint16 (8)",
                         "%s: version %llu, type %d", f->path, (unsigned long long)version, type);
    const uint64_t most = f->size_bytes / 8, size = MEGATRON_HEADER_BYTES + *nseq * 12 + *ndoc * 8;
    const bool bounded = *nseq <= most && *ndoc <= most && *ndoc > 0;  // so size cannot wrap
    return (bounded && (size == f->size_bytes || size + *nseq == f->size_bytes)) ||
           error_set(err, EXIT_BAD_INPUT, SHARD_HINT_REMAKE,
                     "%s: %llu sequences and %llu documents do not make %llu bytes", f->path,
                     (unsigned long long)*nseq, (unsigned long long)*ndoc,
                     (unsigned long long)f->size_bytes);
}

static bool megatron_read_index(Shard *s, const File *f, Error *err) {
    uint64_t nseq = 0, ndoc = 0, *ends = NULL;
    unsigned char *text = host_calloc((size_t)f->size_bytes, 1, "a Megatron index");
    bool ok = file_read_at(f, text, f->size_bytes, 0, err) &&
              megatron_header(s, f, text, &nseq, &ndoc, err);
    if (ok) {
        ends = host_calloc((size_t)ndoc, 8, "document ends");
        ok = megatron_ends(s, f, text, nseq, ndoc, ends, err);
        s->num_tokens = (int64_t)(ndoc > 1 ? ends[ndoc - 2] : 0);
        s->checksum = crc32c(0, text, (size_t)f->size_bytes);
    }
    free(text);
    if (!ok || !shard_check_size(s, err)) {
        free(ends);
        return false;
    }
    return shard_set_ends(s, ends, ndoc - 1, f->path, err);
}

bool shard_open_megatron(Shard *s, const unsigned char *head, const DatasetOptions *options,
                         bool *recognised, Error *err) {
    (void)head, (void)options;
    char path[IO_PATH_MAX], magic[9] = {0};
    File f;
    Error ignored = {0};
    if (!path_ends_with(s->path, ".bin") || !shard_sidecar(path, s->path, 4, ".idx", &ignored) ||
        !file_open(&f, path, "", &ignored))
        return false;
    *recognised = f.size_bytes >= MEGATRON_HEADER_BYTES &&
                  file_read_at(&f, magic, sizeof magic, 0, &ignored) &&
                  memcmp(magic, "MMIDIDX\0\0", sizeof magic) == 0;
    if (*recognised) s->format = "Megatron";
    const bool ok = *recognised && megatron_read_index(s, &f, err);
    file_close(&f);
    return ok;
}
