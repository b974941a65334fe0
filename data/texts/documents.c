#include "documents.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "../base/signals.h"

enum {
    UNIT_BYTES = 1 << 18,
    BINARY_BYTES = 1 << 13,  // a NUL among the first ones: not text
    INVALID_SHARE = 1000,    // one byte of so many may be no UTF-8
};

void unit_free(Unit *u) {
    free(u->records);
    free(u->tokens);
    free(u->weights);
    free(u->documents);
}

// ---- Reading ------------------------------------------------------------------------------------

// Reads complete records, at least one; of a longer one than r->most_bytes only so much. After an
// array, lines follow: white space, else bad records.
static bool read_records(UnitReader *r, Unit *u, Error *err) {
    const uint64_t left = r->file.size_bytes - r->offset,
                   most = left < r->most_bytes ? left : r->most_bytes;
    uint64_t whole = 0, n;
    u->array = r->array;
    u->record = r->record - 1;
    for (uint64_t size = UNIT_BYTES; whole == 0; size *= 2) {
        u->num_bytes = size < most ? size : most;
        array_grow(u->records, &u->records_capacity, u->num_bytes + 1, "records");
        if (!file_read_at(&r->file, u->records, u->num_bytes, r->offset, err)) return false;
        while (u->array == r->array && (n = record_end(u->records + whole, u->num_bytes - whole,
                                                       u->array, u->num_bytes == left)) > 0) {
            whole += n;
            r->array = u->array && u->records[whole - 1] != ']';
            r->record += u->array == r->array;  // the rest of an array's last line is none
        }
        if (whole == 0 && u->num_bytes == left)
            return bad_input(err, "%s: record %ld is cut off: expected a ] at the end",
                             r->file.path, r->record);
        if (whole == 0 && u->num_bytes == most)
            return bad_input(err, "%s: record %ld: expected at most %lu bytes", r->file.path,
                             r->record, most);
        if (whole == 0 && stop_signal) return false;
    }
    u->num_bytes = whole;
    r->offset += whole;
    r->bytes_done += whole;
    if (r->offset == r->file.size_bytes) {
        file_close(&r->file);
        r->next++;
    }
    return true;
}

bool unit_read(UnitReader *r, Unit *u, Error *err) {
    const InputFile *f = r->in->items + r->next, *end = r->in->items + r->in->n;
    while (f < end && (f->kind == INPUT_LEFT_OUT ||
                       (f->kind == INPUT_LINES && f->size_bytes == f->first_byte)))
        f++;
    r->next = (size_t)(f - r->in->items);
    if (f == end) return false;
    u->file = f;
    u->num_documents = u->num_bytes = 0;
    u->record = 0;
    u->found = no_findings;
    u->err.code = 0;
    if (f->kind == INPUT_TEXT) {
        r->bytes_done += f->size_bytes;
        r->next++;
        return true;
    }
    if (r->file.fd < 0) {
        r->offset = f->first_byte;
        r->bytes_done += f->first_byte;
        r->record = 1;
        r->array = f->kind == INPUT_ARRAY;
        if (!file_open(&r->file, f->path, "", err)) return false;
    }
    return read_records(r, u, err);
}

// ---- Documents ----------------------------------------------------------------------------------

typedef struct {
    const unsigned char *bytes;
    uint64_t n;
    const Part *parts;  // none is empty, the last one ends at n; NULL: all of it is trained
    float weight;       // of a record, on top of the parts'
    bool is_val;        // its file is, whatever its content says
    bool is_cut;        // its end is another document, which is for validation
    bool follows;       // the document before it is of the same record
} RawText;

// By SHA-256
static double place_of(const RawText *text) {
    unsigned char digest[32];
    uint64_t first;
    if (text->is_val || text->is_cut) return text->is_val ? -INFINITY : 1;
    sha256(text->bytes, text->n, digest);
    memcpy(&first, digest, sizeof first);
    return (double)__builtin_bswap64(first) * 0x1p-64;
}

// Finds a token in the text from *end on: bytes [*first, *end). These may include bytes that the
// tokenizer has no token for, and white space that an added token takes; the space of a token may
// be U+2581 there, or come from the tokenizer. False: the tokenizer has changed the text.
static bool find_token(const Tokenizer *t, const RawText *text, int32_t id, uint64_t *first,
                       uint64_t *end) {
    const unsigned char *byte = text->bytes + *end, *p;
    size_t n = 1;
    if (!t->byte_ids) byte = tokenizer_bytes(t, id, &n);
    *first = text->n;
    while (n > 0) {
        if (*end == text->n) return false;
        p = text->bytes + *end;
        const bool same = *p == *byte, space = !same && !t->byte_level && *byte == ' ';
        if (same || space) {
            if (*first == text->n) *first = *end;
            byte++, n--;
        } else if (t->byte_level ? t->id_of_byte[*p] >= 0 : !t->strips || !isspace(*p)) {
            return false;
        }
        const bool mark = text->n - *end >= 3 && memcmp(p, "\xe2\x96\x81", 3) == 0;
        *end += !space ? 1 : mark ? 3 : 0;
    }
    return true;
}

// Sets the weights of ids (n), 0: no target. Returns the number of targets; -1: it cannot be told.
static int64_t mark_targets(const Tokenizer *t, const RawText *text, const int32_t *ids, size_t n,
                            float *weights) {
    int64_t count = 0;
    size_t part = 0, last;
    for (uint64_t i = 0, first, end = 0; i < n; i++) {
        if (!find_token(t, text, ids[i], &first, &end)) return -1;
        while (text->parts[part].end <= first) part++;
        weights[i] = text->parts[part].weight;
        for (last = part; text->parts[last].end < end;)
            if (text->parts[++last].weight == 0) weights[i] = 0;
        count += weights[i] != 0;
    }
    return count;
}

// For the byte tokenizer's EOS: the weight of the text that it ends
static float weight_of_end(const RawText *text) {
    uint64_t n = text->n;
    size_t part = 0;
    while (n > 0 && isspace(text->bytes[n - 1])) n--;
    while (text->parts[part].end < n) part++;
    return text->parts[part].weight;
}

// The special token that the last trained part of ids (n) ends with; a newline may follow.
static void find_turn_end(Unit *u, const int32_t *ids, const float *weights, size_t n) {
    const bool *special = u->options->tokenizer->special;
    while (n > 0 && weights[n - 1] == 0) n--;
    if (n > 1 && !special[ids[n - 1]]) n--;
    if (n > 0 && special[ids[n - 1]]) u->found.turn_end = ids[n - 1];
}

// Weighs the ids from `first` on: a text in parts, or with a weight. begins, ends: the first id, or
// the last, is BOS or EOS, which are not in the text.
static bool mark_document(Unit *u, const RawText *text, size_t first, bool begins, bool ends,
                          Error *bad) {
    const Tokenizer *t = u->options->tokenizer;
    size_t n;
    const int32_t *ids = bpe_ids(u->encoder, &n) + first + begins;
    array_grow(u->weights, &u->weight_capacity, n, "a loss mask");
    float *weights = u->weights + first;
    n -= first;
    int64_t count = 1;
    for (size_t i = 0; i < n; i++) weights[i] = 1;
    if (text->parts) count = mark_targets(t, text, ids, n - begins - ends, weights + begins);
    if (count < 0)
        return error_set(bad, EXIT_BAD_INPUT,
                         "write its characters in normal form C, and those that have tokens",
                         "expected text that the tokenizer does not change");
    if (text->parts && !t->byte_ids) find_turn_end(u, ids, weights, n);
    if (text->parts && ends) count += (weights[n - 1] = weight_of_end(text)) != 0;
    if (text->parts && !begins) count -= weights[0] != 0;
    for (size_t i = 0; i < n; i++)
        if (!isfinite(weights[i] *= text->weight))
            return bad_input(bad, "expected weights whose product is a float, found a larger one");
    weights[0] = text->follows;  // it is no target: nothing comes before it
    return count > 0 || bad_input(bad, "expected a part that is trained, found none");
}

// Does the text begin, or but for white space end, with what this token stands for?
static bool has_token(const Tokenizer *t, int32_t id, const RawText *text, bool at_end) {
    uint64_t n = text->n;
    size_t size;
    if (id < 0 || t->byte_ids) return false;
    const unsigned char *token = tokenizer_bytes(t, id, &size);
    while (at_end && n > 0 && isspace(text->bytes[n - 1])) n--;
    return size > 0 && n >= size && memcmp(text->bytes + (at_end ? n - size : 0), token, size) == 0;
}

// False: *bad says why a text in parts is left out.
static bool add_document(Unit *u, const RawText *text, Error *bad) {
    BpeEncoder *e = u->encoder;
    const bool byte_ids = u->options->tokenizer->byte_ids, wrapped = !text->parts || byte_ids;
    const ShardVocabulary *v = &u->options->vocabulary;
    const bool begins = wrapped && has_token(u->options->tokenizer, v->bos, text, false),
               ends = wrapped && has_token(u->options->tokenizer, v->eos, text, true);
    const int32_t bos = wrapped && !begins ? v->bos : -1, eos = wrapped && !ends ? v->eos : -1;
    const unsigned char *bytes = text->bytes;
    AUTO_FREE unsigned char *valid = NULL;
    uint64_t n = text->n;
    size_t first, end;
    if (!byte_ids && u8_check(bytes, n)) {
        bytes = valid = host_calloc(n, 3, "a text");
        n = utf8_replace(text->bytes, n, valid);
    }
    bpe_ids(e, &first);
    if (bos >= 0) bpe_add_id(e, bos);
    const bool ok = bpe_encode(e, bytes, n, &u->err) || error_prefix(&u->err, u->file->path);
    if (eos >= 0) bpe_add_id(e, eos);
    bpe_ids(e, &end);
    if (!ok) return true;
    if (end - first == (size_t)((bos >= 0) + (eos >= 0))) {
        u->found.counts[NUM_EMPTY]++;  // no byte, or none with a token
        return true;
    }
    u->found.counts[NUM_OWN_ENDS] += begins || ends;
    const bool masked = text->parts || text->weight != 1;
    if (masked && !mark_document(u, text, first, bos >= 0, eos >= 0, bad)) return false;
    const double place = text->follows ? u->documents[u->num_documents - 1].place : place_of(text);
    array_grow(u->documents, &u->document_capacity, u->num_documents + 1, "documents");
    u->documents[u->num_documents++] = (UnitDocument){first, end, masked, place, u->record};
    return true;
}

// ---- Records ------------------------------------------------------------------------------------

// The hint is what makes JSON Lines of a file with such bytes, if that is known.
static bool refuse_bytes(const Unit *u, const unsigned char *p, size_t n, const json_error_t *why,
                         Error *bad) {
    const char *repair = NULL;
    if (strchr("{}[]\"", p[0]) || json_error_code(why) == json_error_premature_end_of_input)
        repair = "a record must be one line: jq -c .";
    if (n > 1 && p[0] == '{' && p[1] == '\'')
        repair =
            "JSON has double quotes: python3 -c 'import ast, json, sys; [print(json.dumps("
            "ast.literal_eval(line))) for line in sys.stdin]' <";
    if (u8_check(p, n)) repair = "iconv -f WINDOWS-1252 -t UTF-8";
    if (n > 1 && (p[0] == 0 || p[1] == 0 || p[0] >= 0xfe)) repair = "iconv -f UTF-16 -t UTF-8";
    bad_input(bad, "expected JSON: %s", why->text);
    if (repair)
        snprintf(bad->hint, sizeof bad->hint, "%s %.300s > NEW.jsonl", repair, u->file->path);
    return false;
}

// An unknown template ends the run: it would leave out every chat.
static bool add_one(Unit *u, json_t *record, RawText text, Error *bad) {
    const UnitOptions *options = u->options;
    const json_t *value = json_object_get(record, "text");
    const RecordKind kind = record_kind(record);
    Parts parts = {0};
    if (kind > RECORD_PARTS && kind < RECORD_OTHER && options->no_chat.code) {
        u->err = options->no_chat;
        return true;
    }
    bool ok = record_render(record, &options->chat, options->trains_on_all, &parts, &text.weight,
                            &u->found.unknown, bad);
    text.bytes = kind == RECORD_TEXT ? (unsigned char *)json_string_value(value) : parts.bytes;
    text.n = kind == RECORD_TEXT ? json_string_length(value) : parts.n;
    text.parts = parts.parts;
    ok = ok && add_document(u, &text, bad);
    parts_free(&parts);
    return ok;
}

// Each completion, which may be an object with a weight, is a document.
static bool add_completions(Unit *u, json_t *record, RawText text, Error *bad) {
    json_t *list = json_object_get(record, "completions"), *item;
    const size_t before = u->num_documents;
    char where[40];
    size_t i;
    json_array_foreach(list, i, item) {
        json_auto_t *one = json_copy(record);
        json_object_del(one, "completions");
        const json_t *answer = json_is_object(item) ? either(item, "completion", "response") : item;
        json_object_set(one, "completion", (json_t *)answer);
        text.weight = 1;
        if (u->options->vocabulary.pairs)
            snprintf(where, sizeof where, i == 0 ? "chosen" : "rejected");
        else
            snprintf(where, sizeof where, "completion %zu", i + 1);
        if (!members_check(item, LEVEL_COMPLETION, &u->found.unknown, bad) ||
            !read_weight(json_member(item, "weight"), &text.weight, bad) ||
            !add_one(u, one, text, bad)) {
            u->num_documents = before;
            return error_prefix(bad, where);
        }
        text.follows = u->num_documents > before;
    }
    return json_array_size(list) > 0 || bad_input(bad, "completions: expected a list");
}

// With --preference, only pairs are read. Both answers become documents, or none.
static bool add_record(Unit *u, json_t *record, Error *bad) {
    const RawText text = {.is_val = u->file->split == SPLIT_VAL, .weight = 1};
    const bool pairs = u->options->vocabulary.pairs;
    const RecordKind kind = pairs ? RECORD_PREFERENCE : record_kind(record);
    const size_t before = u->num_documents;
    json_auto_t *pair = pairs ? record_of_preference(record, &u->found.unknown, bad) : NULL;
    const bool ok = pairs                        ? pair && add_completions(u, pair, text, bad)
                    : kind == RECORD_COMPLETIONS ? add_completions(u, record, text, bad)
                                                 : add_one(u, record, text, bad);
    if (u->num_documents > before) u->found.counts[kind]++;
    if (!ok && !bad->hint[0])
        text_copy(bad->hint, sizeof bad->hint,
                  "data/README.md lists the records, and the keys that they may hold");
    return ok;
}

static void encode_record(Unit *u, unsigned char *p, size_t n) {
    const bool array = u->file->kind == INPUT_ARRAY;
    json_error_t why = {0};
    Error bad = {0};
    char where[IO_PATH_MAX + 40];
    if (u->array && n > 0) n--;  // the comma or bracket after it
    while (n > 0 && isspace(p[n - 1])) n--;
    while (n > 0 && isspace(p[0])) p++, n--;
    if (n >= 3 && memcmp(p, "\xef\xbb\xbf", 3) == 0) p += 3, n -= 3;  // of a file joined to another
    if (n == 0) {
        u->found.counts[NUM_EMPTY] += !array;
        return;
    }
    json_auto_t *record =
        json_loadb((char *)p, n, JSON_ALLOW_NUL | JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL, &why);
    const bool ok = record ? add_record(u, record, &bad) : refuse_bytes(u, p, n, &why, &bad);
    if (ok) return;
    snprintf(where, sizeof where, array ? "%s: record %ld" : "%s:%ld", u->file->path, u->record);
    error_prefix(&bad, where);
    const int64_t before = u->found.counts[NUM_BAD]++;
    if (before < MAX_NAMED) u->found.named[before] = bad;
}

// ---- Units --------------------------------------------------------------------------------------

// Where the last 1 % begins, at a line, or without one at a character; n: the text is not cut.
static uint64_t cut_at(const char *text, uint64_t n) {
    uint64_t at = n - n / 100;
    const char *line = n < CUT_MIN_BYTES ? NULL : memchr(text + at, '\n', n / 100 - 1);
    if (n < CUT_MIN_BYTES) return n;
    while (!line && at < n && (text[at] & 0xc0) == 0x80) at++;
    return line ? (uint64_t)(line + 1 - text) : at;
}

// Bytes that are not UTF-8
static int64_t count_invalid(const unsigned char *p, uint64_t n) {
    const unsigned char *end = p + n;
    int64_t count = 0;
    for (int length; (p = u8_check(p, (size_t)(end - p))); p += abs(length)) {
        length = utf8_length(p, (size_t)(end - p));
        if (length < 0) count -= length;
    }
    return count;
}

// An error for a file that was named; one of a directory is left out. from: its encoding, or NULL
static void leave_file_out(Unit *u, const char *from, const char *found) {
    char hint[sizeof u->err.hint] = "give text or .jsonl";
    if (from)
        snprintf(hint, sizeof hint, "iconv -f %s -t UTF-8 %.300s > NEW%s", from, u->file->path,
                 from[0] == 'U' ? "" : "; or --invalid-utf8 replace");
    error_set(u->file->named ? &u->err : &u->found.named[0], EXIT_BAD_INPUT, hint,
              "%s: expected %s, found %s", u->file->path, from ? "UTF-8" : "text", found);
    u->found.counts[NUM_BINARY]++;
}

// A text of n bytes, of which the last ones may be for validation
static void encode_text(Unit *u, const unsigned char *bytes, uint64_t n) {
    const uint64_t start = mark_bytes((const char *)bytes),
                   end = u->options->cuts_files ? cut_at((const char *)bytes, n) : n;
    RawText text = {.bytes = bytes + start, .n = end - start, .weight = 1, .is_cut = end < n};
    text.is_val = u->file->split == SPLIT_VAL;
    add_document(u, &text, NULL);
    text = (RawText){.bytes = bytes + end, .n = n - end, .weight = 1, .is_val = true};
    if (end < n) add_document(u, &text, NULL);
    u->found.counts[NUM_CUT] += end < n;
}

static void encode_file(Unit *u) {
    const InputFile *f = u->file;
    unsigned char head[BINARY_BYTES] = {0};
    char found[40];
    uint64_t n;
    if (!read_head(f->path, head, sizeof head, &n, &u->err)) return;
    const bool utf16 = memcmp(head, "\xff\xfe", 2) == 0 || memcmp(head, "\xfe\xff", 2) == 0;
    if (memchr(head, 0, n))
        return leave_file_out(u, utf16 ? "UTF-16" : NULL, utf16 ? "UTF-16" : "a binary file");
    AUTO_FREE unsigned char *bytes = (unsigned char *)file_read_all(
        f->path, MAX_DOCUMENT_BYTES, &n, "write it as .jsonl with one document per line", &u->err);
    if (!bytes) return;
    const int64_t invalid = u->options->tokenizer->byte_ids ? 0 : count_invalid(bytes, n);
    if ((uint64_t)invalid > n / INVALID_SHARE && !u->options->keeps_invalid) {
        snprintf(found, sizeof found, "%ld other bytes", invalid);
        return leave_file_out(u, "WINDOWS-1252", found);
    }
    u->found.num_invalid = invalid;
    encode_text(u, bytes, n);
}

void unit_encode(Unit *u, BpeEncoder *e, const UnitOptions *options) {
    const size_t width = (size_t)shard_token_bytes(&options->vocabulary);
    size_t n;
    u->encoder = e;
    u->options = options;
    bpe_clear(e);
    if (u->file->kind == INPUT_TEXT) encode_file(u);
    for (uint64_t at = 0, size; at < u->num_bytes && u->err.code == 0; at += size) {
        size = record_end(u->records + at, u->num_bytes - at, u->array, true);
        u->record++;
        encode_record(u, u->records + at, size);
    }
    const int32_t *ids = bpe_ids(e, &n);
    array_grow(u->tokens, &u->token_capacity, n * width + 1, "tokens");
    for (size_t i = 0; i < n; i++) memcpy(u->tokens + i * width, &ids[i], width);
}
