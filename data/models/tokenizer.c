#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <unistr.h>

#include "../base/file.h"
#include "../base/json.h"
#include "../base/memory.h"

void tokenizer_free(Tokenizer *t) {
    free(t->offset);
    free(t->bytes);
    free(t->special);
    free(t->added);
    memset(t, 0, sizeof *t);
}

// ---- Alphabets ----------------------------------------------------------------------------------

// The code point of a byte in GPT-2's alphabet: itself if printable, else the next from 256 on
static int gpt2_code_point(int byte) {
    return byte < 33                   ? 256 + byte
           : byte >= 127 && byte < 161 ? 162 + byte
           : byte == 173               ? 323
                                       : byte;
}

// -1: no byte is written as this character.
static int gpt2_byte(ucs4_t code) {
    const int byte = (int)(code < 256   ? code
                           : code < 289 ? code - 256
                           : code < 323 ? code - 162
                                        : 173);
    return gpt2_code_point(byte) == (int)code ? byte : -1;
}

void gpt2_encode(const unsigned char *bytes, size_t n, char *out) {
    for (size_t i = 0; i < n; i++)
        out += u8_uctomb((uint8_t *)out, (ucs4_t)gpt2_code_point(bytes[i]), 2);
    *out = 0;
}

// Decodes text in the alphabet; returns the number of bytes, or -1 if a character is not in it.
static int64_t gpt2_decode(const char *text, unsigned char *out) {
    int64_t n = 0;
    ucs4_t code;
    for (const uint8_t *p = (const uint8_t *)text; (p = u8_next(&code, p));) {
        const int byte = gpt2_byte(code);
        if (byte < 0) return -1;
        out[n++] = (unsigned char)byte;
    }
    return n;
}

// BPE with byte fallback: "<0x0A>" is that byte, U+2581 a space.
static int64_t fallback_decode(const char *text, unsigned char *out) {
    unsigned int byte = 0;
    int used = 0;
    int64_t n = 0;
    if (strlen(text) == 6 && sscanf(text, "<0x%2X>%n", &byte, &used) == 1 && used == 6) {
        out[0] = (unsigned char)byte;
        return 1;
    }
    for (const char *p = text; *p;) {
        const bool space = strncmp(p, "\xe2\x96\x81", 3) == 0;
        out[n++] = space ? ' ' : (unsigned char)*p;
        p += space ? 3 : 1;
    }
    return n;
}

// ---- tokenizer.json -----------------------------------------------------------------------------

// What a tokenizer is made of. Ids are below `most`: one without a token costs memory, but no byte
// in the file.
typedef struct {
    const char **names;  // (most) into the JSON tree; NULL: no such id
    int64_t most;
    Tokenizer *t;
} Vocabulary;

// An added token may have the id of the same token in the vocabulary, but of no other.
static bool add_token(Vocabulary *v, const json_t *id, const char *name, bool added, bool special,
                      Error *err) {
    int64_t at = 0;
    if (!json_value(id, "token id", JSON_INT64, 0, v->most - 1, &at, err)) return false;
    if (v->names[at] && strcmp(v->names[at], name) != 0)
        return bad_input(err, "token id %ld is both '%s' and '%s'", at, v->names[at], name);
    v->names[at] = name;
    v->t->added[at] = added;
    v->t->special[at] = special;
    if (at >= v->t->vocab_size) v->t->vocab_size = (int32_t)at + 1;
    return true;
}

static bool read_tokens(Vocabulary *v, const json_t *root, const json_t *model, Error *err) {
    const char *name;
    const json_t *added = json_member(root, "added_tokens"), *item;
    size_t i;
    json_t *vocab = json_member(model, "vocab");
    double next = (double)json_object_size(vocab);  // the id that an added token gets
    if (!json_is_object(vocab))
        return bad_input(err, "model.vocab: expected an object of token ids");
    v->most = (1 << 17) + 8 * (int64_t)(json_object_size(vocab) + json_array_size(added));
    if (v->most > TOKENIZER_MAX_IDS) v->most = TOKENIZER_MAX_IDS;
    v->names = host_calloc((size_t)v->most, sizeof *v->names, "the vocabulary");
    v->t->special = host_calloc((size_t)v->most, sizeof(bool), "the vocabulary");
    v->t->added = host_calloc((size_t)v->most, sizeof(bool), "the vocabulary");
    if (added && !json_is_array(added))
        return json_type_error(added, "added_tokens", "a list", err);
    json_object_foreach(vocab, name, item) {
        if (!add_token(v, item, name, false, false, err)) return false;
    }
    json_array_foreach(added, i, item) {
        const char *content = NULL;
        bool special = false;
        const json_t *id = json_member(item, "id");
        if (!json_get_string(item, "content", &content, true, err) ||
            !json_get_bool(item, "special", &special, false, err))
            return false;
        const json_t *own = json_object_get(vocab, content);
        const double found = json_number_value(id), expected = own ? json_number_value(own) : next;
        if (!id) return bad_input(err, "added token '%s' has no id", content);
        if (!add_token(v, id, content, true, special, err)) return false;
        if (found != expected)  // Hugging Face's tokenizers does not read id
            return bad_input(err, "added token '%s': expected id %.0f, found %.0f", content,
                             expected, found);
        if (found >= next) next = found + 1;
    }
    return v->t->vocab_size > 0 || bad_input(err, "model.vocab: expected tokens, found none");
}

bool json_mentions_type(json_t *value, const char *name) {
    const char *key;
    json_t *item;
    size_t i;
    if (json_string_is(json_object_get(value, "type"), name)) return true;
    json_object_foreach(value, key, item) {
        if (json_mentions_type(item, name)) return true;
    }
    json_array_foreach(value, i, item) {
        if (json_mentions_type(item, name)) return true;
    }
    return false;
}

static void fill_bytes(Tokenizer *t, const char *const *names, bool byte_level) {
    size_t most = 0;
    for (int32_t i = 0; i < t->vocab_size; i++) most += names[i] ? strlen(names[i]) : 0;
    t->offset = host_calloc((size_t)t->vocab_size + 1, sizeof(uint32_t), "the vocabulary");
    t->bytes = host_calloc(most + 1, 1, "the vocabulary");
    for (int32_t i = 0; i < t->vocab_size; i++) {
        unsigned char *out = t->bytes + t->offset[i];
        const char *name = names[i] ? names[i] : "";
        int64_t n = -1;
        if (!t->added[i]) n = byte_level ? gpt2_decode(name, out) : fallback_decode(name, out);
        if (n < 0) {  // an added token, or one outside the alphabet: as it is written
            n = (int64_t)strlen(name);
            memcpy(out, name, (size_t)n);
        }
        t->offset[i + 1] = t->offset[i] + (uint32_t)n;
    }
}

static int32_t find_token(const Vocabulary *v, const char *name) {
    for (int32_t i = v->t->vocab_size; i-- > 0;)  // special tokens are usually at the end
        if (v->names[i] && strcmp(v->names[i], name) == 0) return i;
    return -1;
}

// Does a post-processor, which may be a sequence of several, begin every text with this token?
static bool begins_texts(const json_t *processor, const char *token) {
    const json_t *list = json_member(processor, "processors"), *item;
    size_t i;
    json_array_foreach(list, i, item) {
        if (begins_texts(item, token)) return true;
    }
    item = json_member(json_array_get(json_member(processor, "single"), 0), "SpecialToken");
    return json_string_is(json_member(item, "id"), token);
}

// bos_token and eos_token of tokenizer_config.json, if it is there, else the usual names. A
// bos_token of null means that there is none.
static void find_ends(const Vocabulary *v, const json_t *tokenizer) {
    const json_t *config = json_member(tokenizer, TOKENIZER_CONFIG);
    Tokenizer *t = v->t;
    const struct {
        const char *key;
        int32_t *id;
        const char *usual[4];
    } ends[] = {{"bos_token", &t->bos, {"<|bos|>", "<|begin_of_text|>", "<s>", "<|endoftext|>"}},
                {"eos_token", &t->eos, {"<|eos|>", "<|end_of_text|>", "</s>", "<|endoftext|>"}}};
    for (int i = 0; i < 2; i++) {
        const json_t *item = json_member(config, ends[i].key);
        if (json_is_object(item)) item = json_member(item, "content");
        *ends[i].id = json_is_string(item) ? find_token(v, json_string_value(item)) : -1;
        const bool named =
            json_is_string(item) || (i == 0 && json_is_null(json_object_get(config, ends[i].key)));
        for (int k = 0; k < 4 && !named && *ends[i].id < 0; k++)
            *ends[i].id = find_token(v, ends[i].usual[k]);
    }
    // transformers 5 does not read add_bos_token where there is a tokenizer.json; 4 does for Llama
    const json_t *add = json_member(config, "add_bos_token");
    t->adds_bos =
        t->bos >= 0 && begins_texts(json_member(tokenizer, "post_processor"), v->names[t->bos]);
    t->bos_is_disputed = json_is_boolean(add) && json_is_true(add) != t->adds_bos;
}

// Whether ids below 256 are the bytes themselves, and no tokens are merged.
static bool has_byte_ids(const Tokenizer *t, const json_t *model) {
    if (json_array_size(json_member(model, "merges")) > 0 || t->vocab_size < 256) return false;
    for (uint32_t i = 0; i < 256; i++)
        if (t->offset[i + 1] - t->offset[i] != 1 || t->bytes[t->offset[i]] != i) return false;
    return true;
}

static bool tokenizer_read(Tokenizer *t, const json_t *root, Error *err) {
    Vocabulary v = {.t = t};
    const json_t *model = json_member(root, "model");
    const char *type = "BPE";
    bool fallback = false;
    if (!json_is_object(model)) return bad_input(err, "model: required, not found");
    if (!json_get_string(model, "type", &type, false, err) ||
        !json_get_bool(model, "byte_fallback", &fallback, false, err))
        return false;
    const bool byte_level = json_mentions_type(json_member(root, "decoder"), "ByteLevel") ||
                            json_mentions_type(json_member(root, "pre_tokenizer"), "ByteLevel");
    if (strcmp(type, "BPE") != 0 || (!byte_level && !fallback))
        return bad_input(err, "expected BPE, byte-level or with byte fallback");
    const bool ok = read_tokens(&v, root, model, err);
    if (ok) fill_bytes(t, v.names, byte_level);
    if (ok) find_ends(&v, root);
    free(v.names);
    t->byte_ids = ok && has_byte_ids(t, model);
    return ok;
}

// Adds the tokens that stand in tokenizer_config.json alone to added_tokens. Hugging Face's library
// gives them the next ids, so that others are refused later.
static void merge_added(json_t *root, const json_t *config) {
    json_t *list, *item;
    const char *id;
    json_auto_t *known = json_object();
    size_t i;
    if (!json_member(root, "added_tokens")) json_object_set_new(root, "added_tokens", json_array());
    list = json_object_get(root, "added_tokens");
    json_array_foreach(list, i, item) {
        json_object_set(known, json_string_value(json_member(item, "content")), item);
    }
    json_object_foreach(json_member(config, "added_tokens_decoder"), id, item) {
        const char *content = json_string_value(json_member(item, "content"));
        if (!content || json_object_get(known, content)) continue;
        json_object_set_new(item, "id", json_real(atof(id)));
        json_array_append(list, item);
    }
}

json_t *tokenizer_tree(const char *path, Error *err) {
    char dir[IO_PATH_MAX], file[IO_PATH_MAX];
    json_t *config = NULL;
    if (!path_parent(dir, path, err) || !path_join(file, dir, TOKENIZER_CONFIG, err)) return NULL;
    if (path_exists(file) && !(config = json_read(file, JSON_MAX_CONFIG, "", err))) return NULL;
    json_t *root =
        json_read(path, TOKENIZER_MAX_BYTES, "expected Hugging Face's tokenizer.json", err);
    if (root) merge_added(root, config);
    json_object_set_new(root, TOKENIZER_CONFIG, config);
    return root;
}

bool tokenizer_open(Tokenizer *t, const char *path, Error *err) {
    *t = (Tokenizer){0};
    if (!path_inside(t->file, path, "tokenizer.json", err)) return false;
    json_auto_t *root = tokenizer_tree(t->file, err);
    if (!root) return false;
    if (tokenizer_read(t, root, err)) return true;
    error_prefix(err, t->file);
    tokenizer_free(t);
    return false;
}

const unsigned char *tokenizer_bytes(const Tokenizer *t, int32_t id, size_t *n) {
    const bool known = id >= 0 && id < t->vocab_size;
    *n = known ? t->offset[id + 1] - t->offset[id] : 0;
    return known ? t->bytes + t->offset[id] : t->bytes;
}

void tokenizer_name(char *out, size_t capacity, const Tokenizer *t, int32_t id) {
    size_t n;
    const unsigned char *bytes = tokenizer_bytes(t, id, &n);
    snprintf(out, capacity, "%.*s", (int)n, (const char *)bytes);
}
