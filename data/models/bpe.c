#include "bpe.h"

#include <assert.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <uninorm.h>
#include <unistr.h>

#include "../base/hash.h"
#include "../base/heap.h"
#include "../base/memory.h"

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
    const Tokenizer *tokenizer;
    pcre2_match_data *match_data;
    pcre2_match_context *match_limits;
    Word *words;  // (NUM_WORDS) a direct-mapped cache
    Piece *pieces;
    Heap heap;  // (rank, at): merges of the piece at `at` with the one after it, or outdated ones
    size_t piece_capacity, heap_capacity;
    int32_t *ids;
    size_t num_ids, id_capacity;
};

BpeEncoder *bpe_encoder_open(const Tokenizer *t) {
    BpeEncoder *e = host_calloc(1, sizeof *e, "an encoder");
    e->tokenizer = t;
    if (t->byte_ids) return e;
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

void bpe_add_id(BpeEncoder *e, int32_t id) {
    assert(id >= 0 && id < e->tokenizer->vocab_size);
    array_grow(e->ids, &e->id_capacity, e->num_ids + 1, "tokens");
    e->ids[e->num_ids++] = id;
}

// ---- Words --------------------------------------------------------------------------------------

// Adds the merge of the piece at `at` with the one after it, if there is one.
static void add_candidate(BpeEncoder *e, int32_t at) {
    const int32_t after = at < 0 ? -1 : e->pieces[at].after;
    if (after < 0) return;
    const Merge *m = tokenizer_merge(e->tokenizer, e->pieces[at].id, e->pieces[after].id);
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
        const Merge *m = tokenizer_merge(e->tokenizer, left->id, right->id);
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
static int32_t bpe_whole_word(const Tokenizer *t, const unsigned char *p, size_t n) {
    AUTO_FREE char *token = host_calloc(2 * n + 1, 1, "a word");
    gpt2_encode(p, n, token);
    return tokenizer_id(t, token);
}

static void bpe_merge_word(BpeEncoder *e, const unsigned char *p, size_t n) {
    const int32_t whole = e->tokenizer->ignore_merges ? bpe_whole_word(e->tokenizer, p, n) : -1;
    int32_t count = 0;
    if (whole >= 0) return bpe_add_id(e, whole);
    array_grow(e->pieces, &e->piece_capacity, n, "a word");
    for (size_t i = 0; i < n; i++) {
        const int32_t id = e->tokenizer->id_of_byte[p[i]];
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
    const pcre2_code *code = e->tokenizer->patterns[pattern];
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
    return (*from >= done && *to > *from) || cannot_encode("a pattern that matches nothing", err);
}

// Cuts at matches of the pattern; matches and the text between them go to the next pattern.
static bool bpe_cut(BpeEncoder *e, int pattern, const unsigned char *p, size_t n, Error *err) {
    if (n == 0) return true;
    if (pattern == e->tokenizer->num_patterns) {
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
    if (!e->tokenizer->nfc || nfc_keeps(p, n)) return bpe_cut(e, 0, p, n, err);
    AUTO_FREE unsigned char *text = u8_normalize(UNINORM_NFC, p, n, NULL, &n);
    return text ? bpe_cut(e, 0, text, n, err)
                : error_set(err, EXIT_HOST_MEMORY, "", "libunistring: out of memory");
}

// The longest added token, normalized or not, that the text begins with; -1: none.
static int32_t bpe_added_at(const Tokenizer *t, int normalized, const unsigned char *p, size_t n,
                            size_t *length) {
    int32_t best = -1;
    *length = 0;
    for (int32_t i = t->cut_ends[normalized]; i < t->cut_ends[normalized + 1]; i++) {
        size_t m;
        const unsigned char *bytes = tokenizer_bytes(t, t->cut[i], &m);
        if (m <= *length || m > n || memcmp(bytes, p, m) != 0) continue;
        best = t->cut[i];
        *length = m;
    }
    return best;
}

// Cuts the added tokens out: first the tokens that are not normalized, then the others from the
// text between them.
static bool bpe_cut_added(BpeEncoder *e, int normalized, const unsigned char *p, size_t n,
                          Error *err) {
    const Tokenizer *t = e->tokenizer;
    const bool any = normalized < 2 && t->cut_ends[normalized] < t->cut_ends[normalized + 1];
    size_t done = 0, length;
    if (normalized == 2) return bpe_part(e, p, n, err);
    for (size_t i = any ? 0 : n; i < n;) {
        const int32_t id = t->cut_begins[normalized][p[i]]
                               ? bpe_added_at(t, normalized, p + i, n - i, &length)
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
    if (!e->tokenizer->byte_ids) return bpe_cut_added(e, 0, p, n, err);
    for (size_t i = 0; i < n; i++) bpe_add_id(e, p[i]);
    return true;
}

// ---- Prompts ------------------------------------------------------------------------------------

int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out,
                         int64_t capacity, Error *err) {
    const unsigned char *p = (const unsigned char *)text,
                        *wrong = t->byte_ids ? NULL : u8_check(p, n);
    int64_t count = -1;
    if (t->why_not.code)
        *err = t->why_not;
    else if (wrong)
        error_set(err, EXIT_USAGE, "", "expected UTF-8, found byte 0x%02x at %zu", *wrong,
                  (size_t)(wrong - p));
    BpeEncoder *e = err->code ? NULL : bpe_encoder_open(t);
    if (e && t->adds_bos) bpe_add_id(e, t->bos);
    if (e && bpe_encode(e, p, n, err)) count = (int64_t)e->num_ids;
    if (count > capacity)
        error_set(err, EXIT_USAGE, "shorten it, or raise --max-seqlen",
                  "%ld tokens, expected at most %ld", count, capacity);
    else if (count > 0)
        memcpy(out, e->ids, (size_t)count * sizeof(int32_t));
    bpe_encoder_close(e);
    if (err->code == EXIT_USAGE) error_prefix(err, "prompt");
    return err->code ? -1 : count;
}
