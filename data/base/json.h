// JSON: cJSON behind a strict front for reading, and a small writer into a caller's buffer.
//
// Reading checks the text before cJSON sees it (UTF-8, control characters, number syntax, depth,
// size) and refuses duplicate keys afterwards, so that nothing is accepted here that a strict
// parser would refuse. Errors are EXIT_BAD_INPUT. Getters say "key: expected ..., found ..."; the
// caller adds the file with error_prefix(err, path).
#ifndef UNPAD_JSON_H
#define UNPAD_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

enum {
    JSON_MAX_DEPTH = 64,
    JSON_MAX_CONFIG = 1 << 20,         // bytes of a config file
    JSON_MAX_VALUES = 4 * 1000 * 1000  // cJSON allocates 64 bytes for each
};

// Bytes of the UTF-8 character at p, of which n are readable; 0: invalid (overlong, surrogate,
// above U+10FFFF, cut off).
size_t utf8_length(const unsigned char *p, size_t n);

// ------------------------------------------------------------------------------------------------
// Parsing

// text[n] must be 0; path only names the text in errors. Free the tree with cJSON_Delete. NULL on
// error; EXIT_HOST_MEMORY when memory is refused.
cJSON *json_parse(const char *text, size_t n, const char *path, Error *err);

// The same for a file of at most max_bytes.
cJSON *json_read(const char *path, uint64_t max_bytes, const char *hint, Error *err);

// ------------------------------------------------------------------------------------------------
// Getters: a missing or null member leaves *out unchanged, and is an error only when required

// "key: expected ..., found a string" or whatever the item is. Returns false.
bool json_type_error(const cJSON *item, const char *key, const char *expected, Error *err);

// The member; NULL when it is missing or null.
const cJSON *json_member(const cJSON *object, const char *key);

// A whole number in [min, max]; both within +-2^53, where doubles are exact.
bool json_int64_value(const cJSON *item, const char *key, int64_t min, int64_t max, int64_t *out,
                      Error *err);
bool json_get_int64(const cJSON *object, const char *key, int64_t min, int64_t max, int64_t *out,
                    bool required, Error *err);
bool json_get_int(const cJSON *object, const char *key, int min, int max, int *out, bool required,
                  Error *err);
bool json_get_double(const cJSON *object, const char *key, double min, double max, double *out,
                     bool required, Error *err);
bool json_get_bool(const cJSON *object, const char *key, bool *out, bool required, Error *err);

// *out points into the tree.
bool json_get_string(const cJSON *object, const char *key, const char **out, bool required,
                     Error *err);

// ------------------------------------------------------------------------------------------------
// Writing: values in order into a buffer; the writer adds commas and colons
//
//   json_writer_init(&w, line, sizeof line, 0);
//   json_begin(&w, NULL, '{');
//   json_int(&w, "step", 1);
//   json_double(&w, "loss", 2.5);
//   json_end(&w, '}');
//   if (!w.overflow) fputs(line, log);
//
// key is NULL inside arrays and for the root. indent 0: everything on one line; 2: one value per
// line, as Hugging Face writes it. Non-finite numbers become null; bytes that are not UTF-8,
// U+FFFD.

typedef struct {
    char *text;  // not owned; always NUL-terminated
    size_t n, capacity;
    int indent, depth;
    bool comma;     // a value precedes the next one
    bool overflow;  // the text did not fit and is cut off
} JsonWriter;

void json_writer_init(JsonWriter *w, char *text, size_t capacity, int indent);

// Appends text as it is, without quotes.
void json_put_text(JsonWriter *w, const char *s);

// open is '{' or '['; json_end takes the matching '}' or ']'.
void json_begin(JsonWriter *w, const char *key, char open);
void json_end(JsonWriter *w, char close);

// NULL is written as null.
void json_string(JsonWriter *w, const char *key, const char *value);
void json_int(JsonWriter *w, const char *key, int64_t value);
void json_bool(JsonWriter *w, const char *key, bool value);
void json_null(JsonWriter *w, const char *key);

// The fewest digits that read back as the same value.
void json_double(JsonWriter *w, const char *key, double value);
void json_float(JsonWriter *w, const char *key, float value);

#endif
