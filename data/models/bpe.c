#include "bpe.h"

#include <dlfcn.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "tokenizer.h"

// ------------------------------------------------------------------------------------------------
// PCRE2, 8-bit: the calls of its stable interface that we need

typedef struct {
    void *handle;
    void *(*compile)(const unsigned char *, size_t, uint32_t, int *, size_t *, void *);
    void *(*match_data)(uint32_t, void *);
    int (*match)(const void *, const unsigned char *, size_t, size_t, uint32_t, void *, void *);
    size_t *(*ovector)(void *);
    void (*code_free)(void *);
    void (*match_data_free)(void *);
} Pcre2;

static bool pcre2_open(Pcre2 *p, Error *err) {
    const struct {
        const char *name;
        void *at;
    } calls[] = {
        {"pcre2_compile_8", &p->compile},     {"pcre2_match_data_create_8", &p->match_data},
        {"pcre2_match_8", &p->match},         {"pcre2_get_ovector_pointer_8", &p->ovector},
        {"pcre2_code_free_8", &p->code_free}, {"pcre2_match_data_free_8", &p->match_data_free},
    };
    memset(p, 0, sizeof *p);
    p->handle = dlopen("libpcre2-8.so.0", RTLD_NOW | RTLD_LOCAL);
    bool found = p->handle != NULL;
    for (size_t i = 0; found && i < sizeof calls / sizeof *calls; i++) {
        void *call = dlsym(p->handle, calls[i].name);
        memcpy(calls[i].at, &call, sizeof call);  // POSIX: a function's address fits
        found = call != NULL;
    }
    return found ||
           error_set(err, EXIT_USAGE, "apt-get install libpcre2-8-0, or leave --prompt out",
                     "prompt: this tokenizer's patterns need the library libpcre2-8");
}

// ------------------------------------------------------------------------------------------------
// Hash tables, byte strings to ids and pairs of ids to merges: open addressing, 0 is empty

typedef struct {
    uint64_t key;       // two ids, the left one in the high half
    int32_t rank, id1;  // of the merge; the merged token's id + 1
} BpeMerge;

enum { BPE_MAX_PATTERNS = 8 };

typedef struct {
    const Tokenizer *tokenizer;
    bool *added;       // (vocab_size) cut out of the text before any pattern
    int32_t *id1_of;   // (id_slots) ids + 1 by the bytes of their token, added ones left out
    BpeMerge *merges;  // (merge_slots)
    size_t id_slots, merge_slots;
    bool ignore_merges;  // a word that is a token is not merged from bytes
    Pcre2 pcre;
    void *patterns[BPE_MAX_PATTERNS], *match_data;
    int num_patterns;
    // the ids of the current text
    int32_t *ids;
    size_t num_ids, ids_capacity;
} Bpe;

static uint64_t bpe_hash_bytes(const unsigned char *p, size_t n) {
    const uint64_t h = fnv1a(FNV1A_START, p, n);
    return h ^ h >> 29;
}

static size_t bpe_slots(size_t entries) {  // a power of two, at most half full
    size_t slots = 16;
    while (slots < 2 * entries) slots *= 2;
    return slots;
}

// The slot of the token with these bytes, or the empty one for it
static size_t bpe_id_slot(const Bpe *b, const unsigned char *p, size_t n) {
    size_t at = (size_t)bpe_hash_bytes(p, n) & (b->id_slots - 1);
    for (; b->id1_of[at]; at = (at + 1) & (b->id_slots - 1)) {
        size_t length;
        const unsigned char *bytes = tokenizer_bytes(b->tokenizer, b->id1_of[at] - 1, &length);
        if (length == n && memcmp(bytes, p, n) == 0) break;
    }
    return at;
}

static int32_t bpe_id(const Bpe *b, const unsigned char *p, size_t n) {
    return b->id1_of[bpe_id_slot(b, p, n)] - 1;
}

static size_t bpe_merge_slot(const Bpe *b, uint64_t key) {
    size_t at = (size_t)(key * 0x9e3779b97f4a7c15ull >> 20) & (b->merge_slots - 1);
    while (b->merges[at].id1 && b->merges[at].key != key) at = (at + 1) & (b->merge_slots - 1);
    return at;
}

static uint64_t bpe_pair(int32_t left, int32_t right) {
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

// ------------------------------------------------------------------------------------------------
// tokenizer.json

static bool bpe_unknown(const char *what, Error *err) {
    return error_set(err, EXIT_USAGE,
                     "leave --prompt out: texts then begin as documents of the validation set do",
                     "prompt: cannot be encoded with a tokenizer that has %s", what);
}

static bool json_is_set(const json_t *item) {  // neither null, "" nor [] nor {}
    if (!item || json_is_null(item) || json_is_false(item)) return false;
    if (json_is_array(item) || json_is_object(item))
        return json_array_size(item) + json_object_size(item) > 0;
    return !json_is_string(item) || json_string_length(item) > 0;
}

// The first normalizer that is neither null nor a sequence of nulls; NULL: there is none.
static const json_t *bpe_normalizer(const json_t *item) {
    const json_t *list = json_member(item, "normalizers");
    size_t i;
    if (!item || json_is_null(item)) return NULL;
    if (!json_string_is(json_member(item, "type"), "Sequence") || !json_is_array(list)) return item;
    json_array_foreach(list, i, item) {
        const json_t *found = bpe_normalizer(item);
        if (found) return found;
    }
    return NULL;
}

static bool bpe_check_normalizer(const json_t *root, Error *err) {
    char what[100] = "a normalizer";
    const json_t *found = bpe_normalizer(json_member(root, "normalizer"));
    const char *type = json_string_value(json_member(found, "type"));
    if (type) snprintf(what, sizeof what, "a normalizer (%.60s)", type);
    return !found || bpe_unknown(what, err);
}

// byte_fallback has no effect when every byte has a token of its own.
static bool bpe_check_byte_fallback(const Bpe *b, const json_t *model, Error *err) {
    char what[100];
    bool fallback = false;
    if (!json_get_bool(model, "byte_fallback", &fallback, false, err)) return false;
    for (int byte = 0; fallback && byte < 256; byte++) {
        const unsigned char text = (unsigned char)byte;
        if (bpe_id(b, &text, 1) >= 0) continue;
        snprintf(what, sizeof what, "byte_fallback and no token for byte %d", byte);
        return bpe_unknown(what, err);
    }
    return true;
}

static bool bpe_fill_ids(Bpe *b, const json_t *root, Error *err) {
    const json_t *added = json_member(root, "added_tokens"), *item;
    size_t i;
    const int32_t V = b->tokenizer->vocab_size;
    b->added = host_calloc((size_t)V, sizeof(bool), "the vocabulary");
    json_array_foreach(added, i, item) {
        int id = 0;
        if (!json_get_int(item, "id", 0, V - 1, &id, true, err)) return false;
        b->added[id] = true;
    }
    b->id_slots = bpe_slots((size_t)V);
    b->id1_of = host_calloc(b->id_slots, sizeof(int32_t), "the vocabulary");
    for (int32_t id = 0; id < V; id++) {
        size_t n;
        const unsigned char *bytes = tokenizer_bytes(b->tokenizer, id, &n);
        if (n && !b->added[id]) b->id1_of[bpe_id_slot(b, bytes, n)] = id + 1;
    }
    return true;
}

// The two halves of a merge in the alphabet: "left right" or ["left", "right"]
static bool bpe_merge_names(const json_t *merge, char *text, size_t capacity, const char **right) {
    const char *first = json_string_value(json_array_get(merge, 0)),
               *second = json_string_value(json_array_get(merge, 1));
    if (json_is_string(merge)) {
        text_copy(text, capacity, json_string_value(merge));
    } else {
        if (json_array_size(merge) != 2 || !first || !second) return false;
        const int n = snprintf(text, capacity, "%s %s", first, second);
        if (n < 0 || (size_t)n >= capacity) return false;
    }
    char *space = strchr(text, ' ');
    if (!space || strchr(space + 1, ' ')) return false;
    *space = 0;
    *right = space + 1;
    return true;
}

static bool bpe_add_merge(Bpe *b, const json_t *merge, int32_t rank, Error *err) {
    char text[2048];
    unsigned char bytes[2048];
    const char *right = NULL;
    int64_t left_bytes = -1, right_bytes = -1;
    if (bpe_merge_names(merge, text, sizeof text, &right)) {
        left_bytes = gpt2_decode(text, bytes);
        if (left_bytes > 0) right_bytes = gpt2_decode(right, bytes + left_bytes);
    }
    if (right_bytes > 0) {
        const int32_t l = bpe_id(b, bytes, (size_t)left_bytes),
                      r = bpe_id(b, bytes + left_bytes, (size_t)right_bytes),
                      id = bpe_id(b, bytes, (size_t)(left_bytes + right_bytes));
        if (l >= 0 && r >= 0 && id >= 0) {
            const BpeMerge entry = {bpe_pair(l, r), rank, id + 1};
            b->merges[bpe_merge_slot(b, entry.key)] = entry;
            return true;
        }
    }
    return error_set(err, EXIT_BAD_INPUT, "",
                     "model.merges: expected two tokens that make a third, found another thing "
                     "at %d",
                     rank);
}

static bool bpe_fill_merges(Bpe *b, const json_t *model, Error *err) {
    const json_t *merges = json_member(model, "merges"), *item;
    size_t rank;
    if (!json_is_array(merges))
        return error_set(err, EXIT_BAD_INPUT, "", "model.merges: required, not found");
    b->merge_slots = bpe_slots(json_array_size(merges));
    b->merges = host_calloc(b->merge_slots, sizeof(BpeMerge), "merges");
    json_array_foreach(merges, rank, item) {
        if (!bpe_add_merge(b, item, (int32_t)rank, err)) return false;
    }
    return true;
}

static bool bpe_add_pattern(Bpe *b, const char *pattern, Error *err) {
    enum { UCP = 0x00020000, UTF = 0x00080000 };  // classes and characters of Unicode
    int code = 0;
    size_t at = 0;
    if (b->num_patterns == BPE_MAX_PATTERNS) return bpe_unknown("so many pre_tokenizers", err);
    void *compiled = b->pcre.compile((const unsigned char *)pattern, strlen(pattern), UCP | UTF,
                                     &code, &at, NULL);
    if (!compiled)
        return error_set(err, EXIT_BAD_INPUT, "", "pre_tokenizer: pattern '%s' is wrong at %zu",
                         pattern, at);
    b->patterns[b->num_patterns++] = compiled;
    return true;
}

// Split, where every match becomes a word of its own ("Isolated")
static bool bpe_add_split(Bpe *b, const json_t *item, Error *err) {
    const char *behavior = "", *pattern = NULL;
    bool invert = false;
    if (!json_get_string(item, "behavior", &behavior, true, err) ||
        !json_get_bool(item, "invert", &invert, false, err))
        return false;
    if (strcmp(behavior, "Isolated") != 0 || invert) return bpe_unknown("another Split", err);
    if (!json_get_string(json_member(item, "pattern"), "Regex", &pattern, false, err) || !pattern)
        return bpe_unknown("a Split without a Regex", err);
    return bpe_add_pattern(b, pattern, err);
}

static bool bpe_add_pre_tokenizer(Bpe *b, const json_t *item, Error *err) {
    static const char gpt2[] =  // openai/gpt-2, encoder.py
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    const char *type = "";
    bool flag = false;
    if (!json_get_string(item, "type", &type, true, err)) return false;
    if (strcmp(type, "Split") == 0) return bpe_add_split(b, item, err);
    if (strcmp(type, "Digits") == 0)
        return json_get_bool(item, "individual_digits", &flag, false, err) &&
               bpe_add_pattern(b, flag ? "\\p{N}" : "\\p{N}+", err);
    if (strcmp(type, "ByteLevel") != 0) return bpe_unknown("an unknown pre_tokenizer", err);
    if (!json_get_bool(item, "add_prefix_space", &flag, false, err)) return false;
    if (flag) return bpe_unknown("add_prefix_space", err);
    flag = true;
    if (!json_get_bool(item, "use_regex", &flag, false, err)) return false;
    return !flag || bpe_add_pattern(b, gpt2, err);
}

static bool bpe_read(Bpe *b, const json_t *root, Error *err) {
    static const char *const unknown[] = {"dropout", "continuing_subword_prefix",
                                          "end_of_word_suffix"};
    const json_t *model = json_member(root, "model"), *item;
    json_t *pre = json_member(root, "pre_tokenizer");
    size_t part;
    if (!bpe_check_normalizer(root, err)) return false;
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        if (json_is_set(json_member(model, unknown[i]))) return bpe_unknown(unknown[i], err);
    if (!json_mentions_type(pre, "ByteLevel"))
        return bpe_unknown("no ByteLevel pre_tokenizer", err);
    if (!json_get_bool(model, "ignore_merges", &b->ignore_merges, false, err)) return false;
    const json_t *list = json_member(pre, "pretokenizers");
    if (!json_is_array(list) && !bpe_add_pre_tokenizer(b, pre, err)) return false;
    json_array_foreach(list, part, item) {
        if (!bpe_add_pre_tokenizer(b, item, err)) return false;
    }
    return bpe_fill_ids(b, root, err) && bpe_check_byte_fallback(b, model, err) &&
           bpe_fill_merges(b, model, err);
}

static void bpe_close(Bpe *b) {
    for (int i = 0; i < b->num_patterns; i++) b->pcre.code_free(b->patterns[i]);
    if (b->match_data) b->pcre.match_data_free(b->match_data);
    if (b->pcre.handle) dlclose(b->pcre.handle);
    free(b->added);
    free(b->id1_of);
    free(b->merges);
    free(b->ids);
    memset(b, 0, sizeof *b);
}

// t must outlive *b. On failure nothing is left open.
static bool bpe_open(Bpe *b, const Tokenizer *t, Error *err) {
    memset(b, 0, sizeof *b);
    b->tokenizer = t;
    json_auto_t *root = json_read(t->file, TOKENIZER_MAX_BYTES, "", err);
    if (!root) return false;
    const bool ok = pcre2_open(&b->pcre, err) && bpe_read(b, root, err);
    if (ok) b->match_data = b->pcre.match_data(1, NULL);
    if (ok) return true;
    bpe_close(b);
    return err->code == EXIT_USAGE ? false : error_prefix(err, t->file);
}

// ------------------------------------------------------------------------------------------------
// Text

static void bpe_emit(Bpe *b, int32_t id) {
    if (b->num_ids == b->ids_capacity)
        b->ids = host_grow(b->ids, &b->ids_capacity, b->num_ids + 1, sizeof(int32_t), "prompt");
    b->ids[b->num_ids++] = id;
}

// The pair of ids[0 .. n-1] with the lowest rank, the leftmost of equals; NULL: none.
static const BpeMerge *bpe_best_merge(const Bpe *b, const int32_t *ids, size_t n, size_t *at) {
    const BpeMerge *best = NULL;
    for (size_t i = 0; i + 1 < n; i++) {
        const BpeMerge *m = &b->merges[bpe_merge_slot(b, bpe_pair(ids[i], ids[i + 1]))];
        if (!m->id1 || (best && m->rank >= best->rank)) continue;
        best = m;
        *at = i;
    }
    return best;
}

static bool bpe_word(Bpe *b, const unsigned char *p, size_t n, Error *err) {
    const size_t first = b->num_ids;
    if (b->ignore_merges && bpe_id(b, p, n) >= 0) {
        bpe_emit(b, bpe_id(b, p, n));
        return true;
    }
    for (size_t i = 0; i < n; i++) {
        const int32_t id = bpe_id(b, p + i, 1);
        if (id < 0)
            return error_set(err, EXIT_USAGE, "", "prompt: the tokenizer has no token for byte %d",
                             p[i]);
        bpe_emit(b, id);
    }
    int32_t *ids = b->ids + first;
    size_t at = 0;
    for (const BpeMerge *m; (m = bpe_best_merge(b, ids, b->num_ids - first, &at));) {
        ids[at] = m->id1 - 1;
        memmove(ids + at + 1, ids + at + 2, (--b->num_ids - first - at - 1) * sizeof(int32_t));
    }
    return true;
}

// Cuts at matches of the pattern: they, and the text between them, go to the next pattern.
static bool bpe_cut(Bpe *b, int pattern, const unsigned char *p, size_t n, Error *err) {
    if (n == 0) return true;
    if (pattern == b->num_patterns) return bpe_word(b, p, n, err);
    size_t done = 0;
    while (done < n) {
        size_t from = n, to = n;
        const int found = b->pcre.match(b->patterns[pattern], p, n, done, 0, b->match_data, NULL);
        if (found >= 0) {
            from = b->pcre.ovector(b->match_data)[0];
            to = b->pcre.ovector(b->match_data)[1];
        } else if (found != -1) {  // anything but "no match"
            return error_set(err, EXIT_USAGE, "", "prompt: PCRE2 failed with error %d", found);
        }
        if (found >= 0 && to == from) return bpe_unknown("a pattern that matches nothing", err);
        if (!bpe_cut(b, pattern + 1, p + done, from - done, err) ||
            !bpe_cut(b, pattern + 1, p + from, to - from, err))
            return false;
        done = to;
    }
    return true;
}

// The longest added token that the text begins with; -1: none.
static int32_t bpe_added_at(const Bpe *b, const unsigned char *p, size_t n, size_t *length) {
    int32_t best = -1;
    *length = 0;
    for (int32_t id = 0; id < b->tokenizer->vocab_size; id++) {
        size_t m;
        if (!b->added[id]) continue;
        const unsigned char *bytes = tokenizer_bytes(b->tokenizer, id, &m);
        if (m <= *length || m > n || memcmp(bytes, p, m) != 0) continue;
        best = id;
        *length = m;
    }
    return best;
}

static bool bpe_text(Bpe *b, const unsigned char *p, size_t n, Error *err) {
    size_t done = 0, length;
    for (size_t i = 0; i < n;) {
        const int32_t id = bpe_added_at(b, p + i, n - i, &length);
        if (id < 0) {
            i++;
            continue;
        }
        if (!bpe_cut(b, 0, p + done, i - done, err)) return false;
        bpe_emit(b, id);
        done = i += length;
    }
    return bpe_cut(b, 0, p + done, n - done, err);
}

static bool bpe_check_utf8(const unsigned char *p, size_t n, Error *err) {
    for (size_t i = 0, length; i < n; i += length) {
        length = utf8_length(p + i, n - i);
        if (length == 0)
            return error_set(err, EXIT_USAGE, "",
                             "prompt: expected UTF-8, found byte 0x%02x at %zu", p[i], i);
    }
    return true;
}

static int64_t prompt_too_long(int64_t found, int64_t capacity, Error *err) {
    error_set(err, EXIT_USAGE, "shorten it, or raise --max-seqlen",
              "prompt: %lld tokens, expected at most %lld", (long long)found, (long long)capacity);
    return -1;
}

static int64_t encode_bytes(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                            int64_t capacity, Error *err) {
    int64_t count = 0;
    const int64_t needed = (int64_t)n + (t->bos >= 0);
    if (needed > capacity) return prompt_too_long(needed, capacity, err);
    if (t->bos >= 0) out[count++] = t->bos;
    for (size_t i = 0; i < n; i++) out[count++] = (unsigned char)text[i];
    return count;
}

int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                         int64_t capacity, Error *err) {
    Bpe b;
    const unsigned char *p = (const unsigned char *)text;
    if (t->byte_ids) return encode_bytes(t, text, n, out, capacity, err);
    if (!bpe_check_utf8(p, n, err) || !bpe_open(&b, t, err)) return -1;
    if (t->bos >= 0 && t->bos != t->eos) bpe_emit(&b, t->bos);
    int64_t count = bpe_text(&b, p, n, err) ? (int64_t)b.num_ids : -1;
    if (count > capacity) count = prompt_too_long(count, capacity, err);
    if (count > 0) memcpy(out, b.ids, (size_t)count * sizeof(int32_t));
    bpe_close(&b);
    return count;
}
