#include "bpe.h"

#include <assert.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <uninorm.h>
#include <unistr.h>

#include "../base/hash.h"
#include "../base/heap.h"
#include "../base/json.h"
#include "../base/memory.h"

// ---- Vocabulary and merges ----------------------------------------------------------------------

enum { BPE_MAX_PATTERNS = 8 };

typedef struct {
    uint64_t pair;  // left id << 32 | right id; NO_PAIR: the entry is free
    int32_t rank, id;
} Merge;

#define NO_PAIR UINT64_MAX

struct Bpe {
    const Tokenizer *tokenizer;
    json_t *root;           // tokenizer.json
    const json_t *vocab;    // token in GPT-2's alphabet -> id, in the root
    int32_t byte_ids[256];  // -1: no token for this byte, which is dropped
    Merge *merges;          // (merges_mask + 1) a hash table, open addressing
    uint64_t merges_mask;
    int32_t *added;  // ids of added tokens, which are cut out first:
    // [ends[0], ends[1]), then [ends[1], ends[2]), which are "normalized"
    int32_t added_ends[3];
    bool added_begin[2][256];  // whether one of them begins with this byte
    bool ignore_merges;        // a word that is a token is not merged from bytes
    bool nfc;                  // texts are normalized
    pcre2_code *patterns[BPE_MAX_PATTERNS];
    int num_patterns;
};

// The id of a token that is not an added one; -1: there is none.
static int32_t bpe_id(const Bpe *b, const char *token) {
    const json_t *item = json_object_get(b->vocab, token);
    const double id = json_is_number(item) ? json_number_value(item) : -1;
    const bool known = id >= 0 && id < b->tokenizer->vocab_size;
    return known && !b->tokenizer->added[(int32_t)id] ? (int32_t)id : -1;
}

static void bpe_fill_bytes(Bpe *b) {
    for (int i = 0; i < 256; i++) {
        const unsigned char byte = (unsigned char)i;
        char token[4];
        gpt2_encode(&byte, 1, token);
        b->byte_ids[i] = bpe_id(b, token);
    }
}

static void bpe_fill_added(Bpe *b) {
    const json_t *list = json_member(b->root, "added_tokens"), *item;
    size_t i, n;
    int32_t end = 0;
    b->added = host_calloc(json_array_size(list), sizeof(int32_t), "added tokens");
    for (int normalized = 0; normalized < 2; normalized++) {
        json_array_foreach(list, i, item) {
            if (json_is_true(json_member(item, "normalized")) != normalized) continue;
            const int32_t id = (int32_t)json_number_value(json_member(item, "id"));
            const unsigned char *bytes = tokenizer_bytes(b->tokenizer, id, &n);
            b->added[end++] = id;
            if (n > 0) b->added_begin[normalized][bytes[0]] = true;
        }
        b->added_ends[normalized + 1] = end;
    }
}

// The entry of a pair, or the free one where it belongs
static Merge *bpe_merge(const Bpe *b, int32_t left, int32_t right) {
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint64_t at = mix64(pair) & b->merges_mask;
    while (b->merges[at].pair != pair && b->merges[at].pair != NO_PAIR)
        at = (at + 1) & b->merges_mask;
    return &b->merges[at];
}

// ---- tokenizer.json -----------------------------------------------------------------------------

static bool bpe_unknown(const char *what, Error *err) {
    return error_set(err, EXIT_USAGE,
                     "byte-level BPE is supported, as in SmolLM2, Llama 3, Qwen and GPT-2: choose "
                     "such a model",
                     "cannot encode with a tokenizer that has %s", what);
}

// The first normalizer that is neither null, NFC nor a sequence of these; NULL: there is none.
static const json_t *bpe_normalizer(const json_t *item, bool *nfc) {
    const json_t *list = json_member(item, "normalizers"), *type = json_member(item, "type");
    size_t i;
    if (!item || json_is_null(item)) return NULL;
    if (json_string_is(type, "NFC")) *nfc = true;
    if (json_string_is(type, "NFC")) return NULL;
    if (!json_string_is(type, "Sequence") || !json_is_array(list)) return item;
    json_array_foreach(list, i, item) {
        const json_t *found = bpe_normalizer(item, nfc);
        if (found) return found;
    }
    return NULL;
}

static bool bpe_read_normalizer(Bpe *b, Error *err) {
    char what[100] = "a normalizer";
    const json_t *found = bpe_normalizer(json_member(b->root, "normalizer"), &b->nfc);
    const char *type = json_string_value(json_member(found, "type"));
    if (type) snprintf(what, sizeof what, "a normalizer (%.60s)", type);
    return !found || bpe_unknown(what, err);
}

// Neither key has an effect when every byte has its own token.
static bool bpe_check_missing_bytes(const Bpe *b, const json_t *model, Error *err) {
    const char *key = json_is_set(json_member(model, "unk_token")) ? "unk_token" : "byte_fallback";
    char what[100];
    for (int byte = 0; json_is_set(json_member(model, key)) && byte < 256; byte++) {
        if (b->byte_ids[byte] >= 0) continue;
        snprintf(what, sizeof what, "%s and no token for byte %d", key, byte);
        return bpe_unknown(what, err);
    }
    return true;
}

// "left right" or ["left", "right"]
static bool bpe_add_merge(Bpe *b, const json_t *merge, size_t rank, Error *err) {
    char pair[2048];
    const char *left = json_string_value(json_array_get(merge, 0)),
               *right = json_string_value(json_array_get(merge, 1)),
               *text = json_string_value(merge);
    const bool halves = json_array_size(merge) == 2 && left && right;
    const int n = halves ? snprintf(pair, sizeof pair, "%s %s", left, right)
                         : snprintf(pair, sizeof pair, "%s", text ? text : "");
    char *space = strchr(pair, ' ');
    int32_t ids[3] = {-1, -1, -1};
    if (n < (int)sizeof pair && space) {
        *space = 0;
        ids[0] = bpe_id(b, pair);
        ids[1] = bpe_id(b, space + 1);
        memmove(space, space + 1, strlen(space + 1) + 1);
        ids[2] = bpe_id(b, pair);
    }
    if (ids[0] < 0 || ids[1] < 0 || ids[2] < 0)
        return bad_input(err,
                         "model.merges: merge %zu is not a pair of tokens whose concatenation is a "
                         "token",
                         rank);
    Merge *m = bpe_merge(b, ids[0], ids[1]);
    *m = (Merge){(uint64_t)ids[0] << 32 | (uint64_t)ids[1], (int32_t)rank, ids[2]};
    return true;
}

static bool bpe_fill_merges(Bpe *b, const json_t *model, Error *err) {
    const json_t *merges = json_member(model, "merges"), *item;
    size_t rank;
    if (!json_is_array(merges)) return bad_input(err, "model.merges: required, not found");
    while (b->merges_mask < 2 * json_array_size(merges)) b->merges_mask = 2 * b->merges_mask + 1;
    b->merges = host_calloc(b->merges_mask + 1, sizeof(Merge), "the merges of a tokenizer");
    for (uint64_t i = 0; i <= b->merges_mask; i++) b->merges[i].pair = NO_PAIR;
    json_array_foreach(merges, rank, item) {
        if (!bpe_add_merge(b, item, rank, err)) return false;
    }
    return true;
}

// Writes \s and \S as Unicode's White_Space, as tokenizers define them; PCRE2's also includes the
// Mongolian vowel separator. The caller frees the result.
static char *bpe_white_space(const char *pattern) {
    static const char spaces[] =
        "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"
        "\\x{3000}";
    char *text = host_calloc(strlen(pattern) + 1, sizeof spaces + 3, "a pattern"), *out = text;
    bool in_class = false;
    for (const char *p = pattern; *p; p++) {
        const bool negated = p[0] == '\\' && p[1] == 'S' && !in_class;
        if (negated || (p[0] == '\\' && p[1] == 's')) {
            out += sprintf(out, in_class ? "%s%s" : "[%s%s]", negated ? "^" : "", spaces);
            p++;
            continue;
        }
        in_class = *p == '[' || (in_class && *p != ']');
        *out++ = *p;
        if (p[0] == '\\' && p[1]) *out++ = *++p;
    }
    return text;
}

static bool bpe_add_pattern(Bpe *b, const char *pattern, Error *err) {
    int code = 0;
    size_t at = 0;
    if (b->num_patterns == BPE_MAX_PATTERNS)
        return bpe_unknown("more than 8 patterns of pre_tokenizers", err);
    char *text = bpe_white_space(pattern);
    // no \C: it would cut characters apart, and matches do not check that text is UTF-8
    const uint32_t options = PCRE2_UCP | PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C;
    pcre2_code *compiled = pcre2_compile((PCRE2_SPTR)text, strlen(text), options, &code, &at, NULL);
    free(text);
    if (!compiled)
        return bad_input(err, "pre_tokenizer: pattern '%s' is wrong at %zu", pattern, at);
    pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);  // if it fails, PCRE2 interprets
    b->patterns[b->num_patterns++] = compiled;
    return true;
}

// Split, where every match becomes a separate word ("Isolated")
static bool bpe_add_split(Bpe *b, const json_t *item, Error *err) {
    const char *behavior = "", *pattern = NULL;
    bool invert = false;
    if (!json_get_string(item, "behavior", &behavior, true, err) ||
        !json_get_bool(item, "invert", &invert, false, err))
        return false;
    if (strcmp(behavior, "Isolated") != 0 || invert)
        return bpe_unknown("a Split other than Isolated", err);
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
    static const char *const strips[] = {"lstrip", "rstrip", "single_word"};
    const json_t *model = json_member(b->root, "model"), *item;
    json_t *pre = json_member(b->root, "pre_tokenizer");
    size_t part;
    b->vocab = json_member(model, "vocab");
    bpe_fill_bytes(b);
    bpe_fill_added(b);
    if (!bpe_read_normalizer(b, err)) return false;
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        if (json_is_set(json_member(model, unknown[i]))) return bpe_unknown(unknown[i], err);
    json_array_foreach(json_member(b->root, "added_tokens"), part, item) {
        for (size_t i = 0; i < sizeof strips / sizeof *strips; i++)
            if (json_is_set(json_member(item, strips[i]))) return bpe_unknown(strips[i], err);
        if (b->nfc && json_is_set(json_member(item, "normalized")))
            return bpe_unknown("NFC and normalized added tokens", err);
    }
    if (!json_mentions_type(pre, "ByteLevel"))
        return bpe_unknown("no ByteLevel pre_tokenizer", err);
    if (!json_get_bool(model, "ignore_merges", &b->ignore_merges, false, err)) return false;
    const json_t *list = json_member(pre, "pretokenizers"), *type = json_member(pre, "type");
    if (list && type && !json_string_is(type, "Sequence"))
        return bpe_unknown("pretokenizers that are not a Sequence", err);
    if (!json_is_array(list) && !bpe_add_pre_tokenizer(b, pre, err)) return false;
    json_array_foreach(list, part, item) {
        if (!bpe_add_pre_tokenizer(b, item, err)) return false;
    }
    return bpe_check_missing_bytes(b, model, err) && bpe_fill_merges(b, model, err);
}

Bpe *bpe_open(const Tokenizer *t, Error *err) {
    Bpe *b = host_calloc(1, sizeof *b, "a tokenizer");
    b->tokenizer = t;
    if (t->byte_ids) return b;
    b->root = tokenizer_tree(t->file, err);
    if (b->root && bpe_read(b, err)) return b;
    if (b->root && err->code != EXIT_USAGE) error_prefix(err, t->file);
    bpe_close(b);
    return NULL;
}

void bpe_close(Bpe *b) {
    if (!b) return;
    for (int i = 0; i < b->num_patterns; i++) pcre2_code_free(b->patterns[i]);
    json_decref(b->root);
    free(b->merges);
    free(b->added);
    free(b);
}

// ---- An encoder: one thread's memory ------------------------------------------------------------

enum { MATCH_KIB = 1 << 14 };  // of memory for a match
enum { WORD_KEYS = 3, WORD_MAX_BYTES = 8 * WORD_KEYS - 1, WORD_MAX_IDS = 9, NUM_WORDS = 1 << 15 };

// A cached word: its bytes, zeros and, in the last byte, its length; one cache line.
typedef struct {
    uint64_t key[WORD_KEYS];
    int32_t num_ids;  // 0: no word
    int32_t ids[WORD_MAX_IDS];
} Word;

// A token of the word that is merged: a doubly linked list by position; -1: none.
typedef struct {
    int32_t id, before, after;
} Piece;

struct BpeEncoder {
    const Bpe *bpe;
    pcre2_match_data *match_data;
    pcre2_match_context *match_limits;
    Word *words;  // (NUM_WORDS) a direct-mapped cache
    Piece *pieces;
    Heap heap;  // (rank, at): merges of the piece at `at` with the one after it, or outdated ones
    size_t piece_capacity, heap_capacity;
    int32_t *ids;
    size_t num_ids, id_capacity;
    _Atomic uint64_t bytes;
};

BpeEncoder *bpe_encoder_open(const Bpe *b) {
    BpeEncoder *e = host_calloc(1, sizeof *e, "an encoder");
    e->bpe = b;
    if (b->tokenizer->byte_ids) return e;
    e->match_data = pcre2_match_data_create(1, NULL);
    e->match_limits = pcre2_match_context_create(NULL);
    // the pattern decides how much memory a match needs for each byte of text
    if (e->match_limits) pcre2_set_heap_limit(e->match_limits, MATCH_KIB);
    e->words = host_calloc(NUM_WORDS, sizeof(Word), "words");
    return e;
}

void bpe_encoder_close(BpeEncoder *e) {
    if (!e) return;
    pcre2_match_data_free(e->match_data);
    pcre2_match_context_free(e->match_limits);
    free(e->words);
    free(e->pieces);
    free(e->heap.items);
    free(e->ids);
    free(e);
}

const int32_t *bpe_ids(const BpeEncoder *e, size_t *n) {
    *n = e->num_ids;
    return e->ids;
}

void bpe_clear(BpeEncoder *e) { e->num_ids = 0; }

uint64_t bpe_bytes(const BpeEncoder *e) {
    return atomic_load_explicit(&e->bytes, memory_order_relaxed);
}

void bpe_add_id(BpeEncoder *e, int32_t id) {
    assert(id >= 0 && id < e->bpe->tokenizer->vocab_size);
    array_grow(e->ids, &e->id_capacity, e->num_ids + 1, "tokens");
    e->ids[e->num_ids++] = id;
}

// ---- Words --------------------------------------------------------------------------------------

// Adds the merge of the piece at `at` with the one after it, if there is one.
static void add_candidate(BpeEncoder *e, int32_t at) {
    const int32_t after = at < 0 ? -1 : e->pieces[at].after;
    if (after < 0) return;
    const Merge *m = bpe_merge(e->bpe, e->pieces[at].id, e->pieces[after].id);
    if (m->pair == NO_PAIR) return;
    Heap *h = &e->heap;
    array_grow(h->items, &e->heap_capacity, (size_t)h->n + 1, "merges");
    heap_push(h, m->rank, at);
}

static void bpe_merge_pieces(BpeEncoder *e) {
    while (e->heap.n > 0) {
        const HeapItem c = heap_pop(&e->heap);
        Piece *left = &e->pieces[c.id];
        if (left->id < 0 || left->after < 0) continue;  // merged since then
        Piece *right = &e->pieces[left->after];
        const Merge *m = bpe_merge(e->bpe, left->id, right->id);
        if (m->pair == NO_PAIR || m->rank != c.key) continue;
        left->id = m->id;
        right->id = -1;
        left->after = right->after;
        if (right->after >= 0) e->pieces[right->after].before = c.id;
        add_candidate(e, left->before);
        add_candidate(e, c.id);
    }
}

// With ignore_merges: the id of a word that is a token; -1: it is not one.
static int32_t bpe_whole_word(const Bpe *b, const unsigned char *p, size_t n) {
    char *token = host_calloc(2 * n + 1, 1, "a word");
    gpt2_encode(p, n, token);
    const int32_t id = bpe_id(b, token);
    free(token);
    return id;
}

static void bpe_merge_word(BpeEncoder *e, const unsigned char *p, size_t n) {
    const int32_t whole = e->bpe->ignore_merges ? bpe_whole_word(e->bpe, p, n) : -1;
    int32_t count = 0;
    if (whole >= 0) return bpe_add_id(e, whole);
    array_grow(e->pieces, &e->piece_capacity, n, "a word");
    for (size_t i = 0; i < n; i++) {
        const int32_t id = e->bpe->byte_ids[p[i]];
        if (id < 0) continue;
        e->pieces[count] = (Piece){id, count - 1, count + 1};
        count++;
    }
    if (count == 0) return;
    e->pieces[count - 1].after = -1;
    for (int32_t i = 0; i < count; i++) add_candidate(e, i);
    bpe_merge_pieces(e);
    for (int32_t at = 0; at >= 0; at = e->pieces[at].after) bpe_add_id(e, e->pieces[at].id);
}

static void bpe_word(BpeEncoder *e, const unsigned char *p, size_t n) {
    Word key = {0};
    atomic_store_explicit(&e->bytes, bpe_bytes(e) + n, memory_order_relaxed);
    if (n > WORD_MAX_BYTES) return bpe_merge_word(e, p, n);
    memcpy(key.key, p, n);
    key.key[WORD_KEYS - 1] |= (uint64_t)n << 56;
    const uint64_t hash = mix64(key.key[0] + 3 * key.key[1] + 0x9e3779b97f4a7c15ull * key.key[2]);
    Word *word = &e->words[hash % NUM_WORDS];
    const size_t before = e->num_ids;
    if (word->num_ids > 0 && memcmp(word->key, key.key, sizeof key.key) == 0) {
        for (int32_t i = 0; i < word->num_ids; i++) bpe_add_id(e, word->ids[i]);
        return;
    }
    bpe_merge_word(e, p, n);
    const size_t count = e->num_ids - before;
    if (count == 0 || count > WORD_MAX_IDS) return;
    key.num_ids = (int32_t)count;
    memcpy(key.ids, e->ids + before, count * sizeof(int32_t));
    *word = key;
}

// ---- Text ---------------------------------------------------------------------------------------

// The next match of a pattern in p (n) from `done` on: *from == n when there is none.
static bool bpe_find(BpeEncoder *e, int pattern, const unsigned char *p, size_t n, size_t done,
                     size_t *from, size_t *to, Error *err) {
    const pcre2_code *code = e->bpe->patterns[pattern];
    const uint32_t options = PCRE2_NO_UTF_CHECK;  // otherwise each call would check the whole text
    int found = pcre2_match(code, p, n, done, options, e->match_data, e->match_limits);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT)
        found =
            pcre2_match(code, p, n, done, options | PCRE2_NO_JIT, e->match_data, e->match_limits);
    *from = *to = n;
    if (found == PCRE2_ERROR_NOMATCH) return true;
    if (found < 0) return error_set(err, EXIT_USAGE, "", "PCRE2 failed with error %d", found);
    *from = pcre2_get_ovector_pointer(e->match_data)[0];
    *to = pcre2_get_ovector_pointer(e->match_data)[1];
    // \K can move the beginning of a match: beyond its end, or to before `done`
    return (*from >= done && *to > *from) || bpe_unknown("a pattern that matches nothing", err);
}

// Cuts at matches of the pattern; matches and the text between them go to the next pattern.
static bool bpe_cut(BpeEncoder *e, int pattern, const unsigned char *p, size_t n, Error *err) {
    if (n == 0) return true;
    if (pattern == e->bpe->num_patterns) {
        if (n > INT32_MAX)  // pieces are counted in 32 bits
            return bad_input(err, "a word of %zu bytes: expected at most %d", n, INT32_MAX);
        bpe_word(e, p, n);
        return true;
    }
    for (size_t done = 0, from, to; done < n; done = to) {
        if (!bpe_find(e, pattern, p, n, done, &from, &to, err) ||
            !bpe_cut(e, pattern + 1, p + done, from - done, err) ||
            !bpe_cut(e, pattern + 1, p + from, to - from, err))
            return false;
    }
    return true;
}

// NFC changes nothing below U+0300, whose first byte in UTF-8 is 0xcc.
static bool nfc_keeps(const unsigned char *p, size_t n) {
    size_t i = 0;
    while (i < n && p[i] < 0xcc) i++;
    return i == n;
}

// Encodes the text between added tokens.
static bool bpe_part(BpeEncoder *e, const unsigned char *p, size_t n, Error *err) {
    if (!e->bpe->nfc || nfc_keeps(p, n)) return bpe_cut(e, 0, p, n, err);
    unsigned char *text = u8_normalize(UNINORM_NFC, p, n, NULL, &n);
    const bool ok = text ? bpe_cut(e, 0, text, n, err)
                         : error_set(err, EXIT_HOST_MEMORY, "", "libunistring: out of memory");
    free(text);
    return ok;
}

// The longest added token, normalized or not, that the text begins with; -1: none.
static int32_t bpe_added_at(const Bpe *b, int normalized, const unsigned char *p, size_t n,
                            size_t *length) {
    int32_t best = -1;
    *length = 0;
    for (int32_t i = b->added_ends[normalized]; i < b->added_ends[normalized + 1]; i++) {
        size_t m;
        const unsigned char *bytes = tokenizer_bytes(b->tokenizer, b->added[i], &m);
        if (m <= *length || m > n || memcmp(bytes, p, m) != 0) continue;
        best = b->added[i];
        *length = m;
    }
    return best;
}

// Cuts the added tokens out: first those that are not normalized, then the others from the text
// between them.
static bool bpe_cut_added(BpeEncoder *e, int normalized, const unsigned char *p, size_t n,
                          Error *err) {
    const Bpe *b = e->bpe;
    const bool any = normalized < 2 && b->added_ends[normalized] < b->added_ends[normalized + 1];
    size_t done = 0, length;
    if (normalized == 2) return bpe_part(e, p, n, err);
    for (size_t i = any ? 0 : n; i < n;) {
        const int32_t id = b->added_begin[normalized][p[i]]
                               ? bpe_added_at(b, normalized, p + i, n - i, &length)
                               : -1;
        if (id < 0) {
            i++;
            continue;
        }
        if (!bpe_cut_added(e, normalized + 1, p + done, i - done, err)) return false;
        bpe_add_id(e, id);
        done = i += length;
    }
    return bpe_cut_added(e, normalized + 1, p + done, n - done, err);
}

bool bpe_encode(BpeEncoder *e, const unsigned char *p, size_t n, Error *err) {
    if (!e->bpe->tokenizer->byte_ids) return bpe_cut_added(e, 0, p, n, err);
    for (size_t i = 0; i < n; i++) bpe_add_id(e, p[i]);
    return true;
}

// ---- Prompts ------------------------------------------------------------------------------------

int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                         int64_t capacity, Error *err) {
    const unsigned char *p = (const unsigned char *)text,
                        *wrong = t->byte_ids ? NULL : u8_check(p, n);
    Bpe *b = bpe_open(t, err);
    BpeEncoder *e = b ? bpe_encoder_open(b) : NULL;
    if (wrong)
        error_set(err, EXIT_USAGE, "", "expected UTF-8, found byte 0x%02x at %zu", *wrong,
                  (size_t)(wrong - p));
    bool ok = e && !wrong;
    if (ok && t->adds_bos) bpe_add_id(e, t->bos);
    ok = ok && bpe_encode(e, p, n, err);
    const int64_t count = ok ? (int64_t)e->num_ids : 0;
    if (count > capacity)
        ok = error_set(err, EXIT_USAGE, "shorten it, or raise --max-seqlen",
                       "%ld tokens, expected at most %ld", count, capacity);
    if (ok && count > 0) memcpy(out, e->ids, (size_t)count * sizeof(int32_t));
    bpe_encoder_close(e);
    bpe_close(b);
    if (!ok && err->code == EXIT_USAGE) error_prefix(err, "prompt");
    return ok ? count : -1;
}
