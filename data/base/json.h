// JSON: cJSON behind a strict front for reading, and a small writer into a caller's buffer.
//
// Reading checks the text before cJSON sees it (UTF-8, control characters, number syntax, depth,
// size) and afterwards refuses duplicate keys, so that nothing is accepted here that a strict
// parser would refuse. Getters say "key: expected ..., found ..."; put the file in front with
// error_prefix(err, path).
#ifndef UNPAD_JSON_H
#define UNPAD_JSON_H

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

enum {
    JSON_MAX_DEPTH = 64,
    JSON_MAX_CONFIG = 1 << 20,         // bytes of a config file
    JSON_MAX_VALUES = 4 * 1000 * 1000  // 64 bytes and an allocation each in cJSON
};

// "prefix: " in front of what went wrong. Returns false.
bool error_prefix(Error *err, const char *prefix);

// ------------------------------------------------------------------------------------------------
// Checks on the text

// Bytes of the UTF-8 character at p; 0 = bad (overlong, surrogate, above U+10FFFF, cut off).
size_t utf8_length(const unsigned char *p, size_t n);

// ------------------------------------------------------------------------------------------------
// Parsing

// text[n] must be 0. path only names the text in errors. Free with cJSON_Delete.
cJSON *json_parse(const char *text, size_t n, const char *path, Error *err);
cJSON *json_read(const char *path, uint64_t max_bytes, const char *hint, Error *err);

// ------------------------------------------------------------------------------------------------
// Getters: a missing or null key leaves *out as it was, and is an error only when required

bool json_type_error(const cJSON *item, const char *key, const char *expected, Error *err);

// The member, or NULL for missing and null.
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
// Writing: values one after another into a buffer; commas and colons come by themselves
//
//   json_writer_init(&w, line, sizeof line, 0);
//   json_begin(&w, NULL, '{');
//   json_int(&w, "step", 1);
//   json_double(&w, "loss", 2.5);
//   json_end(&w, '}');
//   if (!w.overflow) fputs(line, log);
//
// key is NULL inside arrays and for the root. indent 0 = one line, 2 = as Hugging Face does.

typedef struct {
    char *text;  // always 0-terminated
    size_t n, capacity;
    int indent, depth;
    bool comma, overflow;
} JsonWriter;

void json_writer_init(JsonWriter *w, char *text, size_t capacity, int indent);
void json_put_text(JsonWriter *w, const char *s);

// open is '{' or '['; json_end takes the matching '}' or ']'.
void json_begin(JsonWriter *w, const char *key, char open);
void json_end(JsonWriter *w, char close_);
void json_string(JsonWriter *w, const char *key, const char *value);
void json_int(JsonWriter *w, const char *key, int64_t value);
void json_bool(JsonWriter *w, const char *key, bool value);
void json_null(JsonWriter *w, const char *key);
void json_double(JsonWriter *w, const char *key, double value);
void json_float(JsonWriter *w, const char *key, float value);

#endif
