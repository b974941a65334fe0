#include "formats.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../base/error.h"
#include "../base/file.h"
#include "dataset.h"
#include "datatrove.h"
#include "llmq.h"
#include "megatron.h"
#include "shard.h"
#include "unpad.h"

// -------------------------------------------------------------------------------------------------
// Which format

static bool shard_unknown(const Shard *s, const unsigned char *head, uint64_t n, Error *err) {
    const uint32_t magic = n >= 4 ? (uint32_t)shard_word(head, 4) : 0;
    const uint32_t swapped = __builtin_bswap32(magic);
    const char *looks = "unknown", *hint = "make shards with data/prepare.py INPUT --out DIR";
    uint64_t printable = 0;
    while (printable < n &&
           (head[printable] >= 0x20 || (head[printable] >= 9 && head[printable] <= 13)))
        printable++;
    if (n < SHARD_HEADER_BYTES && (magic == SHARD_MAGIC_U16 || magic == SHARD_MAGIC_U32))
        looks = "a shard cut off in its header", hint = DATASET_HINT_REMAKE;
    else if (swapped == SHARD_MAGIC_U16 || swapped == SHARD_MAGIC_U32)
        looks = "a big-endian shard";
    else if (magic == SHARD_MAGIC_EVAL)
        looks = "llm.c's multiple-choice evaluation file";
    else if (n >= 6 && memcmp(head, "\x93NUMPY", 6) == 0)
        looks = "a numpy array";
    else if (n >= 2 && head[0] == 0x1f && head[1] == 0x8b)
        looks = "a gzip file";
    else if (path_ends_with(s->path, ".idx") || path_ends_with(s->path, ".index"))
        looks = "an index", hint = "name the token file, not its index";
    else if (n > 0 && printable == n)
        looks = "text";
    return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected a token shard, found %s", s->path,
                     looks);
}

static bool shard_open_format(Shard *s, const DatasetOptions *options, Error *err) {
    unsigned char head[SHARD_HEADER_BYTES] = {0};
    char path[4096];
    File index;
    if (path_ends_with(s->path, ".ds")) return shard_open_datatrove(s, err);
    const uint64_t size = s->file.size_bytes;
    const uint64_t n = size < sizeof head ? size : sizeof head;
    if (!file_read_at(&s->file, head, n, 0, err)) return false;
    const bool whole = n == sizeof head;
    const uint32_t magic = (uint32_t)shard_word(head, 4);
    if (whole && (magic == SHARD_MAGIC_U16 || magic == SHARD_MAGIC_U32))
        return shard_open_llmc(s, head, options, err);
    if (whole && memcmp(head, "BIN.TOK\n", 8) == 0) return shard_open_llmq(s, head, options, err);
    if (!shard_find_megatron(s, path, sizeof path, &index)) return shard_unknown(s, head, n, err);
    const bool ok = shard_open_megatron(s, &index, err);
    file_close(&index);
    return ok;
}

bool shard_open(Shard *s, const DatasetOptions *options, Error *err) {
    if (!shard_open_format(s, options, err)) return false;
    const bool scanned = s->format == SHARD_LLMC || s->format == SHARD_LLMQ;
    return scanned || s->block_tokens || shard_sample_tokens(s, err);
}
