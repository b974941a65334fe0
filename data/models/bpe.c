// Text to token ids as Hugging Face's tokenizers compute them for byte-level BPE (SmolLM2, Llama
// 3): added tokens are cut out first, then the patterns of pre_tokenizer cut the rest into words,
// and in each word the pair with the lowest merge rank is merged until none is left. The patterns
// need Unicode classes: PCRE2, loaded at run time, matches them. Tokenizers with other features are
// refused.
#include "tokenizer.h"

#include <assert.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/memory.h"

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
// Vocabulary and merges, in GPT-2's alphabet

enum { BPE_MAX_PATTERNS = 8 };

typedef struct {
    const Tokenizer *tokenizer;
    json_t *root;         // tokenizer.json
    const json_t *vocab;  // token -> id, in the root
    json_t *ranks;        // "left right" -> rank of the merge
    bool ignore_merges;   // a word that is a token is not merged from bytes
    Pcre2 pcre;
    void *patterns[BPE_MAX_PATTERNS], *match_data;
    int num_patterns;
    // the ids of the current text
    int32_t *ids;
    size_t num_ids, ids_capacity;
} Bpe;

// The id of a token that is not an added one; -1: there is none.
static int32_t bpe_id(const Bpe *b, const char *token) {
    const json_t *item = json_object_get(b->vocab, token);
    const double id = json_is_number(item) ? json_number_value(item) : -1;
    const bool known = id >= 0 && id < b->tokenizer->vocab_size;
    return known && !b->tokenizer->added[(int32_t)id] ? (int32_t)id : -1;
}

static int32_t bpe_byte_id(const Bpe *b, unsigned char byte) {
    char token[4];
    gpt2_encode(&byte, 1, "", token);
    return bpe_id(b, token);
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
        if (bpe_byte_id(b, (unsigned char)byte) >= 0) continue;
        snprintf(what, sizeof what, "byte_fallback and no token for byte %d", byte);
        return bpe_unknown(what, err);
    }
    return true;
}

// "left right" or ["left", "right"]
static bool bpe_add_merge(Bpe *b, const json_t *merge, size_t rank, Error *err) {
    char pair[2048], third[2048];
    const char *left = json_string_value(json_array_get(merge, 0)),
               *right = json_string_value(json_array_get(merge, 1)),
               *whole = json_string_value(merge);
    const bool halves = json_array_size(merge) == 2 && left && right;
    const int n = halves ? snprintf(pair, sizeof pair, "%s %s", left, right)
                         : snprintf(pair, sizeof pair, "%s", whole ? whole : "");
    char *space = strchr(pair, ' ');
    bool ok = n < (int)sizeof pair && space;
    if (ok) {
        *space = 0;
        snprintf(third, sizeof third, "%s%s", pair, space + 1);
        ok = bpe_id(b, pair) >= 0 && bpe_id(b, space + 1) >= 0 && bpe_id(b, third) >= 0;
        *space = ' ';
    }
    return (ok && json_object_set_new(b->ranks, pair, json_integer((json_int_t)rank)) == 0) ||
           bad_input(err,
                     "model.merges: expected two tokens that make a third, found another thing "
                     "at %zu",
                     rank);
}

static bool bpe_fill_merges(Bpe *b, const json_t *model, Error *err) {
    const json_t *merges = json_member(model, "merges"), *item;
    size_t rank;
    if (!json_is_array(merges)) return bad_input(err, "model.merges: required, not found");
    b->ranks = json_object();
    json_array_foreach(merges, rank, item) {
        if (!bpe_add_merge(b, item, rank, err)) return false;
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
        return bad_input(err, "pre_tokenizer: pattern '%s' is wrong at %zu", pattern, at);
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

static bool bpe_read(Bpe *b, Error *err) {
    static const char *const unknown[] = {"dropout", "continuing_subword_prefix",
                                          "end_of_word_suffix"};
    const json_t *model = json_member(b->root, "model"), *item;
    json_t *pre = json_member(b->root, "pre_tokenizer");
    size_t part;
    b->vocab = json_member(model, "vocab");
    if (!pcre2_open(&b->pcre, err) || !bpe_check_normalizer(b->root, err)) return false;
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
    return bpe_check_byte_fallback(b, model, err) && bpe_fill_merges(b, model, err);
}

static void bpe_close(Bpe *b) {
    for (int i = 0; i < b->num_patterns; i++) b->pcre.code_free(b->patterns[i]);
    if (b->match_data) b->pcre.match_data_free(b->match_data);
    if (b->pcre.handle) dlclose(b->pcre.handle);
    json_decref(b->root);
    json_decref(b->ranks);
    free(b->ids);
}

// ------------------------------------------------------------------------------------------------
// Text

static void bpe_emit(Bpe *b, int32_t id) {
    assert(id >= 0 && id < b->tokenizer->vocab_size);
    b->ids = host_grow(b->ids, &b->ids_capacity, b->num_ids + 1, sizeof(int32_t), "prompt");
    b->ids[b->num_ids++] = id;
}

// The space between the two tokens of the word "a b c" that are merged next: those of the lowest
// rank, the leftmost of equals; NULL: none.
static char *bpe_best_merge(const Bpe *b, char *word) {
    char *best = NULL;
    json_int_t lowest = 0;
    for (char *left = word, *space; (space = strchr(left, ' ')); left = space + 1) {
        char *end = space + 1 + strcspn(space + 1, " "), after = *end;
        *end = 0;
        const json_t *rank = json_object_get(b->ranks, left);
        *end = after;
        if (!rank || (best && json_integer_value(rank) >= lowest)) continue;
        best = space;
        lowest = json_integer_value(rank);
    }
    return best;
}

static bool bpe_word(Bpe *b, const unsigned char *p, size_t n, Error *err) {
    for (size_t i = 0; i < n; i++)
        if (bpe_byte_id(b, p[i]) < 0)
            return error_set(err, EXIT_USAGE, "", "prompt: the tokenizer has no token for byte %d",
                             p[i]);
    char *word = host_calloc(n + 1, 3, "prompt");
    gpt2_encode(p, n, "", word);
    if (!b->ignore_merges || bpe_id(b, word) < 0) {
        gpt2_encode(p, n, " ", word);
        for (char *space; (space = bpe_best_merge(b, word));)
            memmove(space, space + 1, strlen(space));
    }
    for (char *rest = word, *token; (token = strsep(&rest, " "));) bpe_emit(b, bpe_id(b, token));
    free(word);
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
        if (!b->tokenizer->added[id]) continue;
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

static bool encode_text(Bpe *b, const unsigned char *p, size_t n, Error *err) {
    const Tokenizer *t = b->tokenizer;
    if (!bpe_check_utf8(p, n, err)) return false;
    b->root = json_read(t->file, TOKENIZER_MAX_BYTES, "", err);
    if (!b->root) return false;
    if (!bpe_read(b, err)) return err->code == EXIT_USAGE ? false : error_prefix(err, t->file);
    b->match_data = b->pcre.match_data(1, NULL);
    if (t->bos >= 0 && t->bos != t->eos) bpe_emit(b, t->bos);
    return bpe_text(b, p, n, err);
}

static bool encode_bytes(Bpe *b, const unsigned char *p, size_t n) {
    if (b->tokenizer->bos >= 0) bpe_emit(b, b->tokenizer->bos);
    for (size_t i = 0; i < n; i++) bpe_emit(b, p[i]);
    return true;
}

int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                         int64_t capacity, Error *err) {
    Bpe b = {.tokenizer = t};
    const unsigned char *p = (const unsigned char *)text;
    bool ok = t->byte_ids ? encode_bytes(&b, p, n) : encode_text(&b, p, n, err);
    const int64_t count = (int64_t)b.num_ids;
    if (ok && count > capacity)
        ok = error_set(err, EXIT_USAGE, "shorten it, or raise --max-seqlen",
                       "prompt: %ld tokens, expected at most %ld", count, capacity);
    if (ok && count > 0) memcpy(out, b.ids, (size_t)count * sizeof(int32_t));
    bpe_close(&b);
    return ok ? count : -1;
}
