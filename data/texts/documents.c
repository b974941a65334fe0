#include "documents.h"

#include <ctype.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"

enum {
    UNIT_BYTES = 1 << 18,
    UNIT_FILES = 256,
    MAX_DOCUMENT_BYTES = 1 << 30,  // of a file that is one, or of a line
    BINARY_BYTES = 1 << 13,        // a NUL among the first of them: not text
};

void unit_free(Unit *u) {
    free(u->lines);
    free(u->tokens);
    free(u->documents);
}

// ------------------------------------------------------------------------------------------------
// Reading

// Whole lines, at least one.
static bool read_lines(UnitReader *r, Unit *u, Error *err) {
    const uint64_t left = r->file.size_bytes - r->offset;
    const unsigned char *last = NULL;
    for (uint64_t size = UNIT_BYTES; !last; size *= 2) {
        u->num_bytes = size < left ? size : left;
        u->lines = host_grow(u->lines, &u->lines_capacity, u->num_bytes, 1, "lines");
        if (!file_read_at(&r->file, u->lines, u->num_bytes, r->offset, err)) return false;
        last = u->num_bytes == left ? u->lines + left - 1 : memrchr(u->lines, '\n', u->num_bytes);
        if (!last && size > MAX_DOCUMENT_BYTES)
            return bad_input(err, "%s:%ld: expected lines of at most %d bytes", r->file.path,
                             r->line, MAX_DOCUMENT_BYTES);
    }
    u->num_bytes = (uint64_t)(last + 1 - u->lines);
    u->first_line = r->line;
    for (uint64_t i = 0; i < u->num_bytes; i++) r->line += u->lines[i] == '\n';
    r->offset += u->num_bytes;
    r->bytes_done += u->num_bytes;
    if (r->offset == r->file.size_bytes) {
        file_close(&r->file);
        r->next++;
    }
    return true;
}

static bool open_lines(UnitReader *r, const InputFile *f, Error *err) {
    r->offset = 0;
    r->line = 1;
    return file_open(&r->file, f->path, "check it, or copy it again", err);
}

// Inputs without a document between two that have some: tables, and empty files of lines
static bool is_skipped(const InputFile *f) {
    return f->kind == INPUT_TABLE || (f->kind == INPUT_LINES && f->size_bytes == 0);
}

bool unit_read(UnitReader *r, Unit *u, Error *err) {
    const Inputs *in = r->in;
    while (r->next < in->n && is_skipped(&in->items[r->next])) r->next++;
    u->files = &in->items[r->next];
    u->num_files = u->num_documents = u->num_bytes = 0;
    u->num_empty = u->num_binary = u->num_bad = 0;
    u->bad.code = u->err.code = 0;
    if (r->next == in->n) return false;
    if (u->files->kind == INPUT_LINES) {
        u->num_files = 1;
        return (r->file.fd >= 0 || open_lines(r, u->files, err)) && read_lines(r, u, err);
    }
    uint64_t size = 0;
    while (r->next < in->n && in->items[r->next].kind == INPUT_TEXT && u->num_files < UNIT_FILES &&
           (u->num_files == 0 || size + in->items[r->next].size_bytes <= UNIT_BYTES)) {
        size += in->items[r->next++].size_bytes;
        u->num_files++;
    }
    r->bytes_done += size;
    return true;
}

// ------------------------------------------------------------------------------------------------
// Documents

// By content: a document is validation wherever it stands, and so are its copies.
static bool is_validation(const unsigned char *text, uint64_t n, double val_frac) {
    unsigned char digest[32];
    uint64_t first;
    sha256(text, n, digest);
    memcpy(&first, digest, sizeof first);
    return (double)__builtin_bswap64(first) * 0x1p-64 < val_frac;
}

static void add_document(Unit *u, BpeEncoder *e, const UnitOptions *options,
                         const unsigned char *text, uint64_t n) {
    unsigned char *valid = NULL;
    size_t count;
    if (n == 0) {
        u->num_empty++;
        return;
    }
    const bool is_val = is_validation(text, n, options->val_frac);
    if (!options->any_bytes && !utf8_is_valid(text, n)) {
        valid = host_calloc(n, 3, "a text");
        n = utf8_replace(text, n, valid);
    }
    if (options->bos >= 0) bpe_add_id(e, options->bos);
    const bool ok = bpe_encode(e, valid ? valid : text, n, &u->err);
    if (options->eos >= 0) bpe_add_id(e, options->eos);
    free(valid);
    bpe_ids(e, &count);
    const uint64_t before = u->num_documents ? u->documents[u->num_documents - 1].end : 0;
    if (!ok || count == before) return;  // a text none of whose bytes has a token
    u->documents = host_grow(u->documents, &u->document_capacity, u->num_documents + 1,
                             sizeof *u->documents, "documents");
    u->documents[u->num_documents++] = (UnitDocument){count, is_val};
}

// ------------------------------------------------------------------------------------------------
// Lines

// Half a surrogate pair, which no text can have, becomes "?", as data/prepare.py reads it.
static void replace_surrogates(char *p, const char *end) {
    unsigned int code, low;
    for (; (p = memchr(p, '\\', (size_t)(end - p))) && end - p >= 6; p += 2) {
        if (sscanf(p, "\\u%4x", &code) != 1 || (code & 0xf800) != 0xd800) continue;
        const bool pair = code < 0xdc00 && end - p >= 12 && sscanf(p + 6, "\\u%4x", &low) == 1 &&
                          (low & 0xfc00) == 0xdc00;
        if (pair)
            p += 10;
        else
            memcpy(p, "\\u003f", 6);
    }
}

// Why a line has no text; `record` is what it holds, NULL: no JSON.
static void bad_line(Unit *u, int64_t number, const json_t *record, const char *parse_error) {
    static const char *const chats[] = {"messages", "conversations", "conversation", "chat",
                                        "completion"};
    const char *path = u->files->path, *key;
    const json_t *text = json_object_get(record, "text"), *item;
    char keys[160] = "";
    bool chat = false;
    Error *bad = &u->bad, kind = {0};
    u->num_bad++;
    if (bad->code) return;
    json_object_foreach((json_t *)record, key, item) text_list(keys, sizeof keys, key);
    for (size_t i = 0; i < sizeof chats / sizeof *chats; i++)
        chat = chat || json_is_array(json_object_get(record, chats[i]));
    if (!record)
        bad_input(bad, "%s:%ld: expected JSON: %s", path, number, parse_error);
    else if (!json_is_object(record))
        bad_input(bad, "%s:%ld: expected an object a line, found another value", path, number);
    else if (text) {
        json_type_error(text, "text", "a string", &kind);
        bad_input(bad, "%s:%ld: %s", path, number, kind.what);
    } else
        error_set(bad, EXIT_BAD_INPUT,
                  chat ? "data/prepare.py --chat --tokenizer DIR reads chats"
                       : "data/prepare.py --text-key reads another field",
                  "%s:%ld: expected a string \"text\", found %s", path, number,
                  keys[0] ? keys : "an empty object");
}

static void encode_line(Unit *u, BpeEncoder *e, const UnitOptions *options, int64_t number,
                        unsigned char *line, size_t n) {
    json_error_t why = {0};
    while (n > 0 && isspace(line[n - 1])) n--;
    while (n > 0 && isspace(line[0])) line++, n--;
    if (n == 0) {
        u->num_empty++;
        return;
    }
    replace_surrogates((char *)line, (char *)line + n);
    json_t *record = json_loadb((char *)line, n,
                                JSON_ALLOW_NUL | JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL, &why);
    const json_t *text = json_object_get(record, "text");
    if (json_is_string(text))
        add_document(u, e, options, (const unsigned char *)json_string_value(text),
                     json_string_length(text));
    else
        bad_line(u, number, record, why.text);
    json_decref(record);
}

// ------------------------------------------------------------------------------------------------
// Units

static void encode_file(Unit *u, BpeEncoder *e, const UnitOptions *options, const InputFile *f) {
    unsigned char head[BINARY_BYTES];
    uint64_t n = f->size_bytes < sizeof head ? f->size_bytes : sizeof head;
    File file;
    if (!file_open(&file, f->path, "check it, or copy it again", &u->err)) return;
    const bool read = file_read_at(&file, head, n, 0, &u->err), binary = memchr(head, 0, n);
    file_close(&file);
    if (!read) return;
    u->num_binary += binary;
    if (binary && f->named)
        error_set(&u->err, EXIT_BAD_INPUT, "give text or .jsonl",
                  "%s: expected text, found a binary file", f->path);
    if (binary) return;
    char *text = file_read_all(f->path, MAX_DOCUMENT_BYTES, &n,
                               "write it as .jsonl with one document a line", &u->err);
    if (text) add_document(u, e, options, (unsigned char *)text, n);
    free(text);
}

static void encode_lines(Unit *u, BpeEncoder *e, const UnitOptions *options) {
    unsigned char *line = u->lines, *end = u->lines + u->num_bytes;
    for (int64_t number = u->first_line; line < end && u->err.code == 0; number++) {
        unsigned char *newline = memchr(line, '\n', (size_t)(end - line)),
                      *stop = newline ? newline : end;
        encode_line(u, e, options, number, line, (size_t)(stop - line));
        line = stop + 1;
    }
}

static void store_tokens(Unit *u, const BpeEncoder *e, int token_bytes) {
    size_t n;
    const int32_t *ids = bpe_ids(e, &n);
    u->tokens = host_grow(u->tokens, &u->token_capacity, n * (size_t)token_bytes + 1, 1, "tokens");
    if (token_bytes == 4) memcpy(u->tokens, ids, n * 4);
    for (size_t i = 0; token_bytes == 2 && i < n; i++) {
        const uint16_t id = (uint16_t)ids[i];
        memcpy(u->tokens + 2 * i, &id, 2);
    }
}

void unit_encode(Unit *u, BpeEncoder *e, const UnitOptions *options) {
    bpe_clear(e);
    if (u->num_bytes > 0) encode_lines(u, e, options);
    for (size_t i = 0; u->num_bytes == 0 && i < u->num_files && u->err.code == 0; i++)
        encode_file(u, e, options, &u->files[i]);
    store_tokens(u, e, options->token_bytes);
}
