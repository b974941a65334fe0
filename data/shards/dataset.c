#include "dataset.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "../base/hash.h"
#include "../base/memory.h"
#include "find_files.h"
#include "shard.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "shards are little-endian, and read without swapping"
#endif

void dataset_close(Dataset *ds) {
    for (size_t i = 0; i < ds->num_shards; i++) {
        file_close(&ds->shards[i].file);
        free(ds->shards[i].doc_ends);
        free(ds->shards[i].block_crcs);
        free(ds->shards[i].mask);
        free(ds->shards[i].weights);
        free(ds->shards[i].path);
    }
    free(ds->shards);
    sources_free(&ds->sources);
    memset(ds, 0, sizeof *ds);
}

// As far as their files tell, all shards must come from one tokenizer.
static bool dataset_agrees(Dataset *ds, const Shard *s, const DatasetOptions *options, Error *err) {
    if (options->vocab_size > 0 && s->vocab_size > options->vocab_size)
        return error_set(err, EXIT_CHECKPOINT_MISFIT, "make the shards with the model's tokenizer",
                         "%s: made for a vocabulary of %d, the model has %d", s->path,
                         s->vocab_size, options->vocab_size);
    const bool other_vocab =
        s->vocab_size > 0 && ds->vocab_size > 0 && s->vocab_size != ds->vocab_size;
    const bool other_hash = s->tokenizer_hash != 0 && ds->tokenizer_hash != 0 &&
                            s->tokenizer_hash != ds->tokenizer_hash;
    if (other_vocab || other_hash)
        return error_set(err, EXIT_CHECKPOINT_MISFIT, "use shards made with one tokenizer",
                         "%s: made with another tokenizer than %s", s->path, ds->shards[0].path);
    if (s->vocab_size > 0) ds->vocab_size = s->vocab_size;
    if (s->tokenizer_hash != 0) ds->tokenizer_hash = s->tokenizer_hash;
    if (s->bos >= 0) ds->bos = s->bos;
    if (s->eos >= 0) ds->eos = s->eos;
    return true;
}

static bool dataset_add(Dataset *ds, const char *path, const DatasetOptions *options, Error *err) {
    array_grow(ds->shards, &ds->shard_capacity, ds->num_shards + 1, "the list of shards");
    Shard *s = &ds->shards[ds->num_shards++];
    *s = (Shard){.file.fd = -1, .path = host_copy(path, "paths"), .first_doc = ds->num_docs};
    s->vocab_size = s->bos = s->eos = -1;
    if (!file_open(&s->file, s->path, "", err) || !shard_open(s, options->boundary_token, err) ||
        !dataset_agrees(ds, s, options, err))
        return false;
    if (!s->block_crcs && s->num_tokens > 0) ds->scanned_token = s->bos;
    ds->num_docs += s->num_docs;
    ds->num_tokens += s->num_tokens;
    ds->num_empty += s->num_empty;
    ds->num_unchecked += s->block_crcs == NULL;
    ds->masked |= s->mask != NULL;
    ds->weighted |= s->weights != NULL;
    ds->pairs |= s->pairs;
    ds->num_targets += s->mask ? s->num_targets : s->num_tokens - s->num_docs;
    const uint64_t facts[] = {s->file.size_bytes, s->checksum, (uint64_t)s->num_docs};
    const char *name = basename(s->path);
    ds->fingerprint = fnv1a(fnv1a(ds->fingerprint, name, strlen(name) + 1), facts, sizeof facts);
    ds->token_fingerprint = fnv1a(ds->token_fingerprint, &s->token_sum, sizeof s->token_sum);
    return true;
}

static bool dataset_add_source(Dataset *ds, Source *source, const DatasetOptions *options,
                               Error *err) {
    const char *split = options->split ? options->split : "train";
    const int64_t num_tokens = ds->num_tokens;
    char expected[64];
    snprintf(expected, sizeof expected, "token shards (%s_*.bin)", split);
    const Search search = {path_list_add_shards, split, expected,
                           "name a directory of text files or JSON Lines, or one with such shards; "
                           "data/convert.py makes them of other trainers' files"};
    PATH_LIST paths = {0};
    source->first_doc = ds->num_docs;
    if (!path_list_expand(&paths, source->spec, &search, err)) return false;
    for (size_t i = 0; i < paths.n; i++)
        if (!dataset_add(ds, paths.items[i].path, options, err)) return false;
    source->num_docs = ds->num_docs - source->first_doc;
    source->num_tokens = ds->num_tokens - num_tokens;
    // the same shards divided among sources differently are other data
    if (source > ds->sources.list)
        ds->fingerprint = fnv1a(ds->fingerprint, &source->first_doc, sizeof source->first_doc);
    return source->num_docs > 0 ||
           bad_input(err, "%s: expected documents, found none in %zu shards",
                     ds->shards[ds->num_shards - paths.n].path, paths.n);
}

bool dataset_open(Dataset *ds, const char *spec, const DatasetOptions *options, Error *err) {
    *ds = (Dataset){.vocab_size = -1, .bos = -1, .eos = -1, .scanned_token = -1};
    ds->fingerprint = ds->token_fingerprint = FNV1A_START;
    struct rlimit files;  // open at a time: each shard stays open
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    bool ok = sources_parse(&ds->sources, spec, err);
    for (int32_t i = 0; ok && i < ds->sources.n; i++)
        ok = dataset_add_source(ds, &ds->sources.list[i], options, err);
    if (ok && ds->vocab_size <= 0)
        ds->vocab_size = options->vocab_size > 0 ? options->vocab_size : INT32_MAX;
    if (!ok) dataset_close(ds);
    return ok;
}

void dataset_describe(const Dataset *ds, char *out, size_t capacity) {
    snprintf(out, capacity, "%zu %s shard%s, %ld document%s, %ld token%s", ds->num_shards,
             ds->shards[0].block_crcs ? "unpad.c" : "llm.c", text_plural((int64_t)ds->num_shards),
             ds->num_docs, text_plural(ds->num_docs), ds->num_tokens, text_plural(ds->num_tokens));
    if (ds->masked)
        text_list(out, capacity, "%ld of them targets%s", ds->num_targets,
                  ds->weighted ? " with weights" : "");
    if (ds->num_empty > 0)
        text_list(out, capacity, "%ld empty one%s left out", ds->num_empty,
                  text_plural(ds->num_empty));
    if (ds->scanned_token >= 0)
        text_list(out, capacity, "index built by scanning for token %d", ds->scanned_token);
    if (ds->num_unchecked == ds->num_shards)
        text_list(out, capacity, "tokens unchecked: no checksums");
    else if (ds->num_unchecked > 0)
        text_list(out, capacity, "tokens unchecked in %zu of them: no checksums",
                  ds->num_unchecked);
}

// ---- Documents ----------------------------------------------------------------------------------

typedef struct {
    Shard *s;
    int64_t start, end;  // its tokens in the shard
} Document;

static Document dataset_find(const Dataset *ds, int64_t doc) {
    assert(doc >= 0 && doc < ds->num_docs);
    size_t low = 0, high = ds->num_shards;  // the last shard with first_doc <= doc
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (ds->shards[middle].first_doc <= doc)
            low = middle;
        else
            high = middle;
    }
    Shard *s = &ds->shards[low];
    const int64_t i = doc - s->first_doc;
    return (Document){s, i > 0 ? (int64_t)s->doc_ends[i - 1] : 0, (int64_t)s->doc_ends[i]};
}

int64_t dataset_doc_length(const Dataset *ds, int64_t doc) {
    const Document d = dataset_find(ds, doc);
    return d.end - d.start;
}

// Reads block b, of n tokens, and checks it if it has a checksum.
static bool dataset_read_block(const Shard *s, int64_t b, int64_t n, void *out, Error *err) {
    const uint64_t width = (uint64_t)s->token_bytes, bytes = (uint64_t)n * width,
                   at = SHARD_HEADER_BYTES + (uint64_t)(b * s->block_tokens) * width;
    if (!file_read_at(&s->file, out, bytes, at, err)) return false;
    if (!s->block_crcs) return true;
    const uint32_t crc = crc32c(0, out, (size_t)bytes);
    return crc == s->block_crcs[b] ||
           bad_input(err, "%s: bytes %lu to %lu: expected checksum %08x, found %08x", s->path, at,
                     (at + bytes - 1), s->block_crcs[b], crc);
}

bool dataset_read(Dataset *ds, int64_t doc, int64_t offset, int64_t n, int32_t *out, Error *err) {
    const Document d = dataset_find(ds, doc);
    const Shard *s = d.s;
    const int64_t from = d.start + offset, to = from + n, size = s->block_tokens;
    assert(offset >= 0 && n >= 0 && to <= d.end);
    AUTO_FREE uint32_t *wide = host_calloc((size_t)size, sizeof *wide, "a block of tokens");
    const uint16_t *narrow = (uint16_t *)wide;
    for (int64_t first = from - from % size; first < to; first += size) {
        const int64_t left = s->num_tokens - first, length = left < size ? left : size;
        if (!dataset_read_block(s, first / size, length, wide, err)) return false;
        for (int64_t i = from > first ? from : first; i < to && i < first + length; i++) {
            const uint32_t id = s->token_bytes == 2 ? narrow[i - first] : wide[i - first];
            if (id >= (uint32_t)ds->vocab_size)
                return error_set(err, EXIT_BAD_INPUT, "make the shards with the model's tokenizer",
                                 "%s: document %ld, token %ld: expected an id below %d, found %u",
                                 s->path, doc - s->first_doc, i - d.start, ds->vocab_size, id);
            out[i - from] = (int32_t)id;
        }
    }
    return true;
}

// ---- Masks --------------------------------------------------------------------------------------

int64_t dataset_count_targets(const Dataset *ds, int64_t doc, int64_t offset, int64_t n) {
    const Document d = dataset_find(ds, doc);
    const int64_t from = d.start + offset;
    assert(offset >= 1 && n >= 0 && from + n <= d.end);
    return d.s->mask ? mask_count(d.s->mask, from, from + n) : n;
}

bool dataset_doc_follows(const Dataset *ds, int64_t doc) {
    if (doc >= ds->num_docs) return false;
    const Document d = dataset_find(ds, doc);
    return d.s->mask && d.start > 0 && mask_bit(d.s->mask, d.start);
}

float dataset_weight(const Dataset *ds, int64_t doc, int64_t offset) {
    const Document d = dataset_find(ds, doc);
    assert(offset >= 1 && offset < d.end - d.start);
    if (d.s->weights) return d.s->weights[d.start + offset];
    return !d.s->mask || mask_bit(d.s->mask, d.start + offset);
}
