#include "formats.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/path.h"
#include "dataset.h"
#include "shard.h"

// In this order: a file may look like several of them
static ShardOpen *const formats[] = {
    shard_open_datatrove, shard_open_olmo, shard_open_unpad, shard_open_llmq, shard_open_megatron,
};

static bool shard_unknown(const Shard *s, const unsigned char *head, uint64_t n, Error *err) {
    static const uint32_t EVAL_MAGIC = 20240522;
    const uint32_t magic = n >= 4 ? (uint32_t)shard_word(head, 4) : 0;
    const uint32_t swapped = __builtin_bswap32(magic);
    const char *looks = "unknown", *hint = "make shards with data/prepare.py INPUT --out DIR";
    uint64_t printable = 0;
    while (printable < n &&
           (head[printable] >= 0x20 || (head[printable] >= 9 && head[printable] <= 13)))
        printable++;
    if (n < SHARD_HEADER_BYTES && (magic == SHARD_MAGIC_U16 || magic == SHARD_MAGIC_U32))
        looks = "a shard cut off in its header", hint = SHARD_HINT_REMAKE;
    else if (swapped == SHARD_MAGIC_U16 || swapped == SHARD_MAGIC_U32)
        looks = "a big-endian shard";
    else if (magic == EVAL_MAGIC)
        looks = "llm.c's multiple-choice evaluation file";
    else if (n >= 2 && head[0] == 0x1f && head[1] == 0x8b)
        looks = "a gzip file", hint = "unpack it: gzip -dk FILE";
    else if (n >= 4 && memcmp(head, "PAR1", 4) == 0)
        looks = "a Parquet file";
    else if (n >= 4 && memcmp(head, "PK\3\4", 4) == 0)
        looks = "a zip file (.npz, .zip, PyTorch's .pt)", hint = "unpack it first";
    else if (n >= 4 && memcmp(head, "GGUF", 4) == 0)
        looks = "a GGUF model", hint = "it is --model that takes a model, after gguf_to_hf.py";
    else if (n >= 10 && head[8] == '{' && head[9] == '"')
        looks = "a safetensors model", hint = "it is --model that takes its directory";
    else if (path_ends_with(s->path, ".idx") || path_ends_with(s->path, ".index"))
        looks = "an index", hint = "name the token file, not its index";
    else if (n > 0 && printable == n)
        looks = "text",
        hint = "data/prepare.py makes shards of it; --train takes a .txt or .jsonl as it is";
    else if (path_ends_with(s->path, ".bin"))
        hint =
            "Megatron's .bin needs its .idx beside it; raw ids, as nanoGPT writes them, become a "
            "data set named .npy with --boundary-token";
    return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected a token shard, found %s", s->path,
                     looks);
}

bool shard_open(Shard *s, const DatasetOptions *options, Error *err) {
    unsigned char head[SHARD_HEADER_BYTES] = {0};
    const uint64_t n = s->file.size_bytes < sizeof head ? s->file.size_bytes : sizeof head;
    if (!file_read_at(&s->file, head, n, 0, err)) return false;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        bool recognised = false;
        const bool ok = formats[i](s, head, options, &recognised, err);
        if (recognised)
            return ok && (s->scanned || s->block_tokens > 0 || shard_sample_tokens(s, err));
    }
    return shard_unknown(s, head, n, err);
}
