#include "vocabulary.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "../base/hash.h"
#include "../base/json.h"
#include "../base/path.h"

// ------------------------------------------------------------------------------------------------
// The tokenizer, by the first 8 bytes of SHA-256 of its tokenizer.json

// *hash 0: the directory has no tokenizer.json. path: of it.
static bool tokenizer_hash(const char *dir, char *path, size_t capacity, uint64_t *hash,
                           Error *err) {
    unsigned char digest[32];
    *hash = 0;
    if (!path_is_dir(dir)) return true;
    if (!path_join(path, capacity, dir, "tokenizer.json", err)) return false;
    if (!path_exists(path)) return true;
    if (!sha256_file(path, digest, err)) return false;
    memcpy(hash, digest, sizeof *hash);
    return true;
}

// Fails, or only warns where `allowed`, when both are known and differ. whose: a path.
static bool same_tokenizer(const char *whose, uint64_t hash, const NamedData *d, const char *hint,
                           bool allowed, Error *err) {
    const uint64_t found = d->dataset->tokenizer_hash;
    Error why = {0};
    if (hash == 0 || found == 0 || hash == found) return true;
    error_set(&why, EXIT_CHECKPOINT_MISFIT, hint,
              "%s: expected the tokenizer of %s (SHA-256 %016lx...), found %016lx...", d->path,
              whose, __builtin_bswap64(hash), __builtin_bswap64(found));
    if (!allowed) return error_set(err, why.code, hint, "%s", why.what);
    warning("%s", why.what);
    return true;
}

bool vocabulary_check(const char *model, const NamedData *train, const NamedData *val, bool allowed,
                      Error *err) {
    char path[IO_PATH_MAX], hint[512];
    uint64_t hash = 0;
    if (!tokenizer_hash(model, path, sizeof path, &hash, err)) return false;
    snprintf(hint, sizeof hint,
             "make shards of the texts with --model %.200s; or, if both give the same ids, "
             "--allow-other-tokenizer",
             model);
    if (!same_tokenizer(path, hash, train, hint, allowed, err)) return false;
    if (!val->dataset || val->dataset->tokenizer_hash == train->dataset->tokenizer_hash)
        return true;
    if (hash != 0) return same_tokenizer(path, hash, val, hint, allowed, err);
    return same_tokenizer(
        train->path, train->dataset->tokenizer_hash, val,
        "make both with one tokenizer; or, if both give the same ids, --allow-other-tokenizer",
        allowed, err);
}

// ------------------------------------------------------------------------------------------------
// The ids that begin and end documents

typedef struct {
    int64_t ids[32];
    int n;  // 0: not known
} TokenIds;

static bool token_ids_have(const TokenIds *t, int64_t id) {
    for (int i = 0; i < t->n; i++)
        if (t->ids[i] == id) return true;
    return false;
}

// A number, a list of numbers, or null; -1: none
static bool token_ids_add(TokenIds *t, const json_t *root, const char *key, Error *err) {
    const json_t *list = json_member(root, key);
    const size_t n = json_is_array(list) ? json_array_size(list) : list != NULL;
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_is_array(list) ? json_array_get(list, i) : list;
        int64_t id = -1;
        if (json_is_null(item)) continue;
        if (!json_int64_value(item, key, -1, INT32_MAX, &id, err)) return false;
        if (id >= 0 && t->n < (int)(sizeof t->ids / sizeof *t->ids) && !token_ids_have(t, id))
            t->ids[t->n++] = id;
    }
    return true;
}

// From config.json and generation_config.json of a model directory, or the built-in config.
static bool read_token_ids(const char *model, const LlamaConfig *builtin, TokenIds *bos,
                           TokenIds *eos, Error *err) {
    static const char *const files[] = {"config.json", "generation_config.json"};
    char path[IO_PATH_MAX];
    *bos = *eos = (TokenIds){0};
    if (builtin) {
        *bos = (TokenIds){{builtin->bos_token_id}, 1};
        *eos = (TokenIds){{builtin->eos_token_id}, 1};
        return true;
    }
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        if (!path_join(path, sizeof path, model, files[i], err)) return false;
        if (!path_exists(path)) continue;
        json_auto_t *root = json_read(path, JSON_MAX_CONFIG, "", err);
        if (!root) return false;
        if (!token_ids_add(bos, root, "bos_token_id", err) ||
            !token_ids_add(eos, root, "eos_token_id", err))
            return error_prefix(err, path);
    }
    return true;
}

static void warn_of_id(const NamedData *d, const char *what, int32_t id, const char *key,
                       const char *model, const TokenIds *ids) {
    char text[512] = "", number[24];
    for (int i = 0; i < ids->n; i++) {
        snprintf(number, sizeof number, "%ld", ids->ids[i]);
        text_list(text, sizeof text, number);
    }
    warning("%s: documents %s with token %d, but %s of %s is %s", d->path, what, id, key, model,
            text);
}

bool vocabulary_warn(const char *model, const LlamaConfig *config, bool builtin, const NamedData *d,
                     Error *err) {
    const Dataset *ds = d->dataset;
    TokenIds bos, eos;
    if (!read_token_ids(model, builtin ? config : NULL, &bos, &eos, err)) return false;
    if (ds->vocab_size < config->vocab_size / 2)
        warning(
            "%s: made for a vocabulary of %d, %s has %d: the other embeddings stay "
            "untrained",
            d->path, ds->vocab_size, model, config->vocab_size);
    if (ds->eos >= 0 && eos.n > 0 && !token_ids_have(&eos, ds->eos))
        warn_of_id(d, "end", ds->eos, "eos_token_id", model, &eos);
    // an end of text before each document separates them as well as one after it
    if (ds->bos >= 0 && bos.n > 0 && !token_ids_have(&bos, ds->bos) &&
        !token_ids_have(&eos, ds->bos))
        warn_of_id(d, "begin", ds->bos, "bos_token_id", model, &bos);
    return true;
}
