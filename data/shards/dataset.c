#include "dataset.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

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
    free(ds->block);
    sources_free(&ds->sources);
    pthread_mutex_destroy(&ds->lock);
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

// Opens the shard's file unless it is open. Of every DATASET_MAX_OPEN-th shard, one is open. Later,
// the file must still have the size that was checked.
static bool dataset_open_file(Dataset *ds, Shard *s, Error *err) {
    const uint64_t size = s->file.size_bytes;  // 0: it is opened for the first time
    if (s->file.fd >= 0) return true;
    for (size_t i = (size_t)(s - ds->shards) % DATASET_MAX_OPEN; i < ds->num_shards;
         i += DATASET_MAX_OPEN)
        file_close(&ds->shards[i].file);
    if (!file_open(&s->file, s->path, size ? "do not move files while training" : "", err))
        return false;
    return size == 0 || size == s->file.size_bytes ||
           error_set(err, EXIT_BAD_INPUT, "do not change files while training",
                     "%s: expected %lu bytes as before, found %lu", s->path, size,
                     s->file.size_bytes);
}

static bool dataset_add(Dataset *ds, const char *path, const DatasetOptions *options, Error *err) {
    array_grow(ds->shards, &ds->shard_capacity, ds->num_shards + 1, "the list of shards");
    Shard *s = &ds->shards[ds->num_shards++];
    *s = (Shard){.file.fd = -1, .path = host_copy(path, "paths"), .first_doc = ds->num_docs};
    s->vocab_size = s->bos = s->eos = -1;
    if (!dataset_open_file(ds, s, err) || !shard_open(s, options->boundary_token, err) ||
        !dataset_agrees(ds, s, options, err))
        return false;
    if (s->scanned && s->num_tokens > 0) ds->scanned_token = s->bos;
    ds->num_docs += s->num_docs;
    ds->num_tokens += s->num_tokens;
    ds->num_empty += s->num_empty;
    ds->masked |= s->mask != NULL;
    ds->weighted |= s->weights != NULL;
    ds->num_targets += s->mask ? s->num_targets : s->num_tokens - s->num_docs;
    const uint64_t facts[] = {s->file.size_bytes, s->checksum, (uint64_t)s->num_docs};
    const char *name = basename(s->path);
    ds->fingerprint = fnv1a(fnv1a(ds->fingerprint, name, strlen(name) + 1), facts, sizeof facts);
    ds->token_fingerprint = fnv1a(ds->token_fingerprint, &s->token_sum, sizeof s->token_sum);
    return true;
}

static bool dataset_add_all(Dataset *ds, const char *spec, const DatasetOptions *options,
                            Error *err) {
    const char *split = options->split ? options->split : "train";
    char expected[64];
    snprintf(expected, sizeof expected, "token shards (%s_*.bin)", split);
    const Search search = {path_list_add_shards, split, expected,
                           "name a directory of text files or JSON Lines, or one with such shards; "
                           "data/convert.py makes them of other trainers' files"};
    PathList paths = {0};
    const int64_t num_docs = ds->num_docs;
    bool ok = path_list_expand(&paths, spec, &search, err);
    for (size_t i = 0; ok && i < paths.n; i++)
        ok = dataset_add(ds, paths.items[i].path, options, err);
    if (ok && ds->num_docs == num_docs)
        ok = bad_input(err, "%s: expected documents, found none in %zu shards",
                       ds->shards[ds->num_shards - paths.n].path, paths.n);
    path_list_free(&paths);
    return ok;
}

static bool dataset_add_sources(Dataset *ds, const DatasetOptions *options, Error *err) {
    for (int32_t i = 0; i < ds->sources.n; i++) {
        Source *s = &ds->sources.list[i];
        s->first_doc = ds->num_docs;
        const int64_t num_tokens = ds->num_tokens;
        if (!dataset_add_all(ds, s->spec, options, err)) return false;
        s->num_docs = ds->num_docs - s->first_doc;
        s->num_tokens = ds->num_tokens - num_tokens;
        // the same shards divided among sources differently are other data
        if (i > 0) ds->fingerprint = fnv1a(ds->fingerprint, &s->first_doc, sizeof s->first_doc);
    }
    return true;
}

bool dataset_open(Dataset *ds, const char *spec, const DatasetOptions *options, Error *err) {
    *ds = (Dataset){.vocab_size = -1, .bos = -1, .eos = -1, .scanned_token = -1};
    ds->fingerprint = ds->token_fingerprint = FNV1A_START;
    pthread_mutex_init(&ds->lock, NULL);
    const bool ok = sources_parse(&ds->sources, spec, err) && dataset_add_sources(ds, options, err);
    if (ok && ds->vocab_size <= 0)
        ds->vocab_size = options->vocab_size > 0 ? options->vocab_size : INT32_MAX;
    if (!ok) dataset_close(ds);
    return ok;
}

size_t dataset_num_unchecked(const Dataset *ds) {
    size_t n = 0;
    for (size_t i = 0; i < ds->num_shards; i++) n += ds->shards[i].block_tokens == 0;
    return n;
}

void dataset_describe(const Dataset *ds, char *out, size_t capacity) {
    const size_t unchecked = dataset_num_unchecked(ds);
    snprintf(out, capacity, "%zu %s shard%s, %ld document%s, %ld token%s", ds->num_shards,
             ds->shards[0].format, text_plural((int64_t)ds->num_shards), ds->num_docs,
             text_plural(ds->num_docs), ds->num_tokens, text_plural(ds->num_tokens));
    if (ds->masked)
        text_list(out, capacity, "%ld of them targets%s", ds->num_targets,
                  ds->weighted ? " with weights" : "");
    if (ds->num_empty > 0)
        text_list(out, capacity, "%ld empty one%s left out", ds->num_empty,
                  text_plural(ds->num_empty));
    if (ds->scanned_token >= 0)
        text_list(out, capacity, "index built by scanning for token %d", ds->scanned_token);
    if (unchecked == ds->num_shards)
        text_list(out, capacity, "tokens unchecked: no checksums");
    else if (unchecked > 0)
        text_list(out, capacity, "tokens unchecked in %zu of them: no checksums", unchecked);
}

// ---- Documents ----------------------------------------------------------------------------------

// The shard of a document, where it is tokens [*start, *end).
static Shard *dataset_find(const Dataset *ds, int64_t doc, int64_t *start, int64_t *end) {
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
    const int64_t local = doc - s->first_doc;
    *start = local > 0 ? (int64_t)s->doc_ends[local - 1] : 0;
    *end = (int64_t)s->doc_ends[local];
    return s;
}

int64_t dataset_doc_length(const Dataset *ds, int64_t doc) {
    int64_t start, end;
    dataset_find(ds, doc, &start, &end);
    return end - start;
}

// Reads block b of the shard into ds->block and checks it.
static bool dataset_read_block(Dataset *ds, const Shard *s, int64_t b, int64_t n, Error *err) {
    const uint64_t width = (uint64_t)s->token_bytes, bytes = (uint64_t)n * width,
                   at = SHARD_HEADER_BYTES + (uint64_t)(b * s->block_tokens) * width;
    array_grow(ds->block, &ds->block_capacity, (size_t)bytes, "a block of tokens");
    if (!file_read_at(&s->file, ds->block, bytes, at, err)) return false;
    const uint32_t crc = crc32c(0, ds->block, (size_t)bytes);
    return crc == s->block_crcs[b] ||
           bad_input(err, "%s: bytes %lu to %lu: expected checksum %08x, found %08x", s->path, at,
                     (at + bytes - 1), s->block_crcs[b], crc);
}

// Tokens [from, from + n) of the shard as stored. Where blocks have checksums, whole blocks are
// read and checked, and the tokens are copied from them: the file is not read twice.
static bool dataset_read_stored(Dataset *ds, const Shard *s, int64_t from, int64_t n,
                                unsigned char *out, Error *err) {
    const int64_t width = s->token_bytes, size = s->block_tokens, to = from + n;
    if (size == 0)
        return file_read_at(&s->file, out, (uint64_t)(n * width),
                            SHARD_HEADER_BYTES + (uint64_t)(from * width), err);
    for (int64_t b = from / size; b * size < to; b++) {
        const int64_t first = b * size, left = s->num_tokens - first,
                      last = first + (left < size ? left : size);
        if (!dataset_read_block(ds, s, b, last - first, err)) return false;
        const int64_t low = from > first ? from : first, high = to < last ? to : last;
        memcpy(out + (low - from) * width, ds->block + (low - first) * width,
               (size_t)((high - low) * width));
    }
    return true;
}

bool dataset_read(Dataset *ds, int64_t doc, int64_t offset, int64_t n, int32_t *out, Error *err) {
    int64_t start, end;
    Shard *s = dataset_find(ds, doc, &start, &end);
    assert(offset >= 0 && n >= 0 && n <= end - start - offset);
    const uint64_t width = (uint64_t)s->token_bytes, bytes = (uint64_t)n * width;
    // 16-bit tokens are read into the second half of out and widened forwards: out[i] never
    // overwrites a token that is still needed
    unsigned char *raw = (unsigned char *)(out + n) - bytes;
    pthread_mutex_lock(&ds->lock);
    const bool ok =
        dataset_open_file(ds, s, err) && dataset_read_stored(ds, s, start + offset, n, raw, err);
    pthread_mutex_unlock(&ds->lock);
    if (!ok) return false;
    for (int64_t i = 0; width == 2 && i < n; i++) {
        uint16_t token;
        memcpy(&token, raw + 2 * i, sizeof token);
        out[i] = token;
    }
    for (int64_t i = 0; i < n; i++)
        if ((uint32_t)out[i] >= (uint32_t)ds->vocab_size)
            return error_set(err, EXIT_BAD_INPUT, "make the shards with the model's tokenizer",
                             "%s: document %ld, token %ld: expected an id below %d, found %u",
                             s->path, doc - s->first_doc, offset + i, ds->vocab_size,
                             (uint32_t)out[i]);
    return true;
}

// ---- Masks --------------------------------------------------------------------------------------

int64_t dataset_count_targets(const Dataset *ds, int64_t doc, int64_t offset, int64_t n) {
    int64_t start, end;
    const Shard *s = dataset_find(ds, doc, &start, &end);
    assert(offset >= 1 && n >= 0 && n <= end - start - offset);
    return s->mask ? mask_count(s->mask, start + offset, start + offset + n) : n;
}

bool dataset_doc_follows(const Dataset *ds, int64_t doc) {
    int64_t start, end;
    const Shard *s = doc < ds->num_docs ? dataset_find(ds, doc, &start, &end) : NULL;
    return s && s->mask && start > 0 && mask_bit(s->mask, start);
}

float dataset_weight(const Dataset *ds, int64_t doc, int64_t offset) {
    int64_t start, end;
    const Shard *s = dataset_find(ds, doc, &start, &end);
    assert(offset >= 1 && offset < end - start);
    if (s->weights) return s->weights[start + offset];
    return !s->mask || mask_bit(s->mask, start + offset);
}

void dataset_mask_tokens(const Dataset *ds, int64_t doc, int64_t offset, int64_t n, int32_t *ids) {
    int64_t start, end;
    const Shard *s = dataset_find(ds, doc, &start, &end);
    assert(offset >= 1 && n >= 0 && n <= end - start - offset);
    for (int64_t i = 0; s->mask && i < n; i++)
        if (!mask_bit(s->mask, start + offset + i)) ids[i] = -1;
}
