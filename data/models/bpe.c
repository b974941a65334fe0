#include "bpe.h"

#include <assert.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <unictype.h>
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

typedef struct {
    unsigned char *p;  // (n) owned
    size_t n, capacity;
} Bytes;

struct BpeEncoder {
    const Tokenizer *tokenizer;
    pcre2_match_data *match_data;
    pcre2_match_context *match_limits;
    Word *words;  // (NUM_WORDS) a direct-mapped cache
    Piece *pieces;
    Heap heap;  // (rank, at): merges of the piece at `at` with the one after it, or outdated ones
    size_t piece_capacity, heap_capacity;
    // of t->cut, normalized where it is so; and whether one of these begins with a byte
    Bytes *cut;
    bool cut_begins[2][256];
    Error cut_error;
    Bytes *changed;  // instead of being encoded, a normalized text is added here; NULL: encoded
    int32_t *ids;
    size_t num_ids, id_capacity;
};

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
    if (m->rank == 0) return;
    array_grow(e->heap.items, &e->heap_capacity, (size_t)e->heap.n + 1, "merges");
    heap_push(&e->heap, m->rank, at);
}

static void bpe_merge_pieces(BpeEncoder *e) {
    while (e->heap.n > 0) {
        const HeapItem c = heap_pop(&e->heap);
        Piece *left = &e->pieces[c.id];
        if (left->id < 0 || left->after < 0) continue;  // merged since then
        Piece *right = &e->pieces[left->after];
        const Merge *m = tokenizer_merge(e->tokenizer, left->id, right->id);
        if (m->rank != c.key) continue;
        left->id = m->id;
        right->id = -1;
        left->after = right->after;
        if (right->after >= 0) e->pieces[right->after].before = c.id;
        add_candidate(e, left->before);
        add_candidate(e, c.id);
    }
}

// The token of characters; -1: there is none.
static int32_t bpe_token(const Tokenizer *t, const unsigned char *p, size_t n) {
    char small[16] = "";
    AUTO_FREE char *large = n < sizeof small / 2 ? NULL : host_calloc(2 * n + 1, 1, "a word");
    char *name = large ? large : small;
    if (t->byte_level)
        gpt2_encode(p, n, name);
    else
        memcpy(name, p, n);
    return !t->byte_level && memchr(p, 0, n) ? -1 : tokenizer_id(t, name);  // no token has a NUL
}

static int32_t bpe_add_piece(BpeEncoder *e, int32_t count, int32_t id) {
    e->pieces[count] = (Piece){id, count - 1, count + 1};
    return count + 1;
}

// Bytes, or characters: those that are no tokens as their bytes, else as one unk, which follows
// these bytes. Returns their number.
static int32_t bpe_pieces(BpeEncoder *e, const unsigned char *p, size_t n) {
    const Tokenizer *t = e->tokenizer;
    ucs4_t c;
    int32_t count = 0, id;
    bool unknown = false;
    for (size_t i = 0, m, k; i < n; i += m) {
        m = t->byte_level ? 1 : (size_t)u8_mbtouc(&c, p + i, n - i);  // 1 for a NUL
        id = t->byte_level ? t->id_of_byte[p[i]] : bpe_token(t, p + i, m);
        for (k = 0; k < m && id < 0 && t->byte_fallback && t->id_of_byte[p[i + k]] >= 0;) k++;
        if (k == m) {
            for (k = 0; k < m; k++) count = bpe_add_piece(e, count, t->id_of_byte[p[i + k]]);
            continue;
        }
        if (unknown && (id >= 0 || !t->fuse_unk)) count = bpe_add_piece(e, count, t->unk);
        unknown = id < 0 && t->unk >= 0;
        if (id >= 0) count = bpe_add_piece(e, count, id);
    }
    return unknown ? bpe_add_piece(e, count, t->unk) : count;
}

static void bpe_merge_word(BpeEncoder *e, const unsigned char *p, size_t n) {
    const int32_t whole = e->tokenizer->ignore_merges ? bpe_token(e->tokenizer, p, n) : -1;
    if (whole >= 0) return bpe_add_id(e, whole);
    array_grow(e->pieces, &e->piece_capacity, n, "a word");
    const int32_t count = bpe_pieces(e, p, n);
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

// Cuts a word between characters that no merge joins: its parts are merged alone, and may be
// cached.
static void bpe_joined(BpeEncoder *e, const unsigned char *p, size_t n) {
    const uint64_t *joins = e->tokenizer->joins;
    ucs4_t before, here;
    size_t from = 0;
    if (!joins) return bpe_word(e, p, n);
    for (size_t i = (size_t)u8_mbtouc(&before, p, n), m; i < n; i += m, before = here) {
        m = (size_t)u8_mbtouc(&here, p + i, n - i);
        const uint32_t bit = tokenizer_join(before, here);
        if (joins[bit / 64] >> bit % 64 & 1) continue;
        bpe_word(e, p + from, i - from);
        from = i;
    }
    bpe_word(e, p + from, n - from);
}

// ---- Text ---------------------------------------------------------------------------------------

// The next match of a pattern in p (n) from `done` on: *from == n when there is none.
static bool bpe_find(BpeEncoder *e, const pcre2_code *code, const unsigned char *p, size_t n,
                     size_t done, size_t *from, size_t *to, Error *err) {
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
    return (*from >= done && *to > *from) || cannot_encode(err, "a pattern that matches nothing");
}

// NFC changes nothing below U+0300, whose first byte in UTF-8 is 0xcc.
static bool nfc_keeps(const unsigned char *p, size_t n) {
    size_t i = 0;
    while (i < n && p[i] < 0xcc) i++;
    return i == n;
}

static void bytes_add(Bytes *b, const void *p, size_t n) {
    array_grow(b->p, &b->capacity, b->n + n + 1, "a text");
    memcpy(b->p + b->n, p, n);
    b->n += n;
}

// Appends a text, changed as a step does, to *out, which is empty.
static bool bpe_change(BpeEncoder *e, const Step *s, bool first, const unsigned char *p, size_t n,
                       Bytes *out, Error *err) {
    const size_t length = strlen(s->text);
    if (s->kind == STEP_NFC && !nfc_keeps(p, n))
        return (out->p = u8_normalize(UNINORM_NFC, p, n, NULL, &out->n)) ||
               error_set(err, EXIT_HOST_MEMORY, "", "libunistring: out of memory");
    const bool there = s->once && n >= length && memcmp(p, s->text, length) == 0;
    if (s->kind == STEP_PREPEND && !there && (first || !s->first)) bytes_add(out, s->text, length);
    for (size_t done = 0, from, to; s->kind == STEP_REPLACE && done < n; done = to) {
        if (!bpe_find(e, s->pattern, p, n, done, &from, &to, err)) return false;
        bytes_add(out, p + done, from - done);
        if (from < n) bytes_add(out, s->text, length);
    }
    if (s->kind != STEP_REPLACE) bytes_add(out, p, n);
    return true;
}

// Encodes a text, or a piece of one, from a step on. first: it is the beginning of the text.
static bool bpe_step(BpeEncoder *e, int step, const unsigned char *p, size_t n, bool first,
                     Error *err);

// Changes the text of an added token as the texts in which it is found.
static void bpe_cut_text(BpeEncoder *e, int32_t i) {
    const Tokenizer *t = e->tokenizer;
    const bool normalized = t->cut[i].normalized;
    size_t n;
    const unsigned char *p = tokenizer_bytes(t, t->cut[i].id, &n);
    e->changed = &e->cut[i];
    bpe_step(e, normalized ? 1 : t->num_normalizers + 1, p, n, true, &e->cut_error);
    if (e->cut[i].n > 0) e->cut_begins[normalized][e->cut[i].p[0]] = true;
    e->changed = NULL;
}

BpeEncoder *bpe_encoder_open(const Tokenizer *t) {
    BpeEncoder *e = host_calloc(1, sizeof *e, "an encoder");
    e->tokenizer = t;
    if (t->byte_ids) return e;
    e->match_data = pcre2_match_data_create(1, NULL);
    e->match_limits = pcre2_match_context_create(NULL);
    // the pattern decides how much memory a match needs for each byte of text
    if (e->match_limits) pcre2_set_heap_limit(e->match_limits, MATCH_KIB);
    e->words = host_calloc(NUM_WORDS, sizeof(Word), "words");
    e->cut = host_calloc((size_t)t->num_cut, sizeof *e->cut, "added tokens");
    for (int32_t i = 0; i < t->num_cut; i++) bpe_cut_text(e, i);
    return e;
}

void bpe_encoder_close(BpeEncoder *e) {
    if (!e) return;
    pcre2_match_data_free(e->match_data);
    pcre2_match_context_free(e->match_limits);
    for (int32_t i = 0; i < e->tokenizer->num_cut; i++) free(e->cut[i].p);
    free(e->cut);
    free(e->words);
    free(e->pieces);
    free(e->heap.items);
    free(e->ids);
    free(e);
}

// Cuts at matches of the pattern; matches and the text between them go to the next step.
static bool bpe_cut(BpeEncoder *e, int step, const unsigned char *p, size_t n, bool first,
                    Error *err) {
    for (size_t done = 0, from, to; done < n; done = to) {
        if (!bpe_find(e, e->tokenizer->steps[step].pattern, p, n, done, &from, &to, err) ||
            !bpe_step(e, step + 1, p + done, from - done, first && done == 0, err) ||
            !bpe_step(e, step + 1, p + from, to - from, first && from == 0, err))
            return false;
    }
    return true;
}

// The longest added token, normalized or not, that the text begins with; -1: none.
static int32_t bpe_added_at(const BpeEncoder *e, bool normalized, const unsigned char *p, size_t n,
                            size_t *length) {
    const Tokenizer *t = e->tokenizer;
    int32_t best = -1;
    *length = 0;
    if (!e->cut_begins[normalized][p[0]]) return -1;
    for (int32_t i = 0; i < t->num_cut; i++) {
        const size_t m = e->cut[i].n;
        if (t->cut[i].normalized != normalized || m <= *length || m > n ||
            memcmp(e->cut[i].p, p, m) != 0)
            continue;
        best = i;
        *length = m;
    }
    return best;
}

// \w of Rust's regex
static bool is_word(ucs4_t c) {
    return uc_is_property_alphabetic(c) || uc_is_property_join_control(c) ||
           uc_is_general_category_withtable(
               c, UC_CATEGORY_MASK_M | UC_CATEGORY_MASK_Nd | UC_CATEGORY_MASK_Pc);
}

// Is [from, to) of a text (n) next to a part of a word?
static bool in_word(const unsigned char *p, size_t n, size_t from, size_t to) {
    ucs4_t c;
    if (u8_prev(&c, p + from, p) && is_word(c)) return true;
    return to < n && u8_mbtouc(&c, p + to, n - to) > 0 && is_word(c);
}

// Adds an added token's white space to [*from, *to), not that before `done`.
static void take_space(const AddedToken *a, const unsigned char *p, size_t n, size_t done,
                       size_t *from, size_t *to) {
    ucs4_t c;
    const uint8_t *before;
    while (a->lstrip && *from > done && (before = u8_prev(&c, p + *from, p)) &&
           uc_is_property_white_space(c))
        *from = (size_t)(before - p);
    if (a->rstrip && *to < done) *to = done;  // that of the token before it
    for (int m; a->rstrip && *to < n && (m = u8_mbtouc(&c, p + *to, n - *to)) > 0 &&
                uc_is_property_white_space(c);)
        *to += (size_t)m;
}

// Cuts the added tokens out: first the tokens that are not normalized, then the others from the
// normalized text between them. One may begin in the white space that another has taken.
static bool bpe_cut_added(BpeEncoder *e, int step, const unsigned char *p, size_t n, bool first,
                          Error *err) {
    const AddedToken *cut = e->tokenizer->cut;
    size_t done = 0;
    for (size_t i = 0, length; i < n; i += length) {
        const int32_t found = bpe_added_at(e, step > 0, p + i, n - i, &length);
        size_t from = i, to = i + length;
        if (found < 0) length = 1;
        if (found < 0 || (cut[found].single_word && in_word(p, n, from, to))) continue;
        take_space(&cut[found], p, n, done, &from, &to);
        if (from > done && !bpe_step(e, step + 1, p + done, from - done, first && done == 0, err))
            return false;
        bpe_add_id(e, cut[found].id);
        done = to;
    }
    return bpe_step(e, step + 1, p + done, n - done, first && done == 0, err);
}

static bool bpe_step(BpeEncoder *e, int step, const unsigned char *p, size_t n, bool first,
                     Error *err) {
    const Step *s = &e->tokenizer->steps[step];
    Bytes changed = {0};
    if (n == 0) return true;
    if (e->changed && step == e->tokenizer->num_normalizers + 1)
        return bytes_add(e->changed, p, n), true;
    if (step == e->tokenizer->num_steps) {
        if (n > INT32_MAX)  // pieces are counted in 32 bits
            return bad_input(err, "a word of %zu bytes: expected at most %d", n, INT32_MAX);
        bpe_joined(e, p, n);
        return true;
    }
    if (s->kind == STEP_ADDED) return bpe_cut_added(e, step, p, n, first, err);
    if (s->kind == STEP_CUT) return bpe_cut(e, step, p, n, first, err);
    const bool ok = bpe_change(e, s, first, p, n, &changed, err) &&
                    bpe_step(e, step + 1, changed.p, changed.n, first, err);
    free(changed.p);
    return ok;
}

bool bpe_encode(BpeEncoder *e, const unsigned char *p, size_t n, Error *err) {
    if (e->cut_error.code) *err = e->cut_error;
    if (!e->tokenizer->byte_ids) return !err->code && bpe_step(e, 0, p, n, true, err);
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
