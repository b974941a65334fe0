// JSON with Jansson: strict reading, getters with errors, and writing.
//
// Reading is strict: UTF-8, no duplicate keys, no \u0000, no number beyond a double, nothing after
// the value, at most 2048 levels. Errors are EXIT_BAD_INPUT. Getters report "key: expected ...,
// found ..."; the caller adds the file with error_prefix(err, path).
#pragma once

#include <jansson.h>

#include "error.h"

enum { JSON_MAX_CONFIG = 1 << 20 };  // bytes of a config file

// Bytes of the UTF-8 character at p (n > 0). -k: no character begins here, and one U+FFFD replaces
// k bytes, as with Python's "replace": a truncated character, or one byte.
int utf8_length(const unsigned char *p, size_t n);

// Copies p (n) to out (up to 3 n bytes) with U+FFFD in place of invalid UTF-8. Returns the number
// of bytes written.
size_t utf8_replace(const unsigned char *p, size_t n, unsigned char *out);

// The end of a text without what Python's rstrip removes; *start: of one that lstrip leaves
size_t utf8_strip(const char *text, size_t *start);

// ---- Parsing ------------------------------------------------------------------------------------

// path only names the text in errors. Free the tree with json_decref. NULL on error; refused memory
// ends the program with exit code 5. All numbers are doubles (json_number_value), because integers
// may exceed 64 bits: transformers writes a model_max_length of 1e30 that way.
json_t *json_parse(const char *text, size_t n, const char *path, Error *err);

// The same for a file of at most max_bytes.
json_t *json_read(const char *path, uint64_t max_bytes, const char *hint, Error *err);

// ------------------------------------------------------------------------------------------------
// Getters: a missing or null member leaves *out unchanged, and is an error only when required

// "key: expected ..., found a string", or whatever type the item has. Returns false.
bool json_type_error(const json_t *item, const char *key, const char *expected, Error *err);

// The member; NULL when it is missing or null.
json_t *json_member(const json_t *object, const char *key);

// Whether the item, which may be NULL, is this string.
bool json_string_is(const json_t *item, const char *text);

bool json_is_set(const json_t *item);  // neither missing, null, false, "" nor [] nor {}

typedef enum { JSON_INT, JSON_INT64, JSON_DOUBLE, JSON_BOOL, JSON_TEXT } JsonKind;

// An item of this kind. Numbers are in [min, max]; whole ones within +-2^53, where doubles are
// exact. A text points into the tree.
bool json_value(const json_t *item, const char *key, JsonKind kind, double min, double max,
                void *out, Error *err);
// The same for a member.
bool json_get(const json_t *object, const char *key, JsonKind kind, double min, double max,
              void *out, bool required, Error *err);
#define json_get_int(object_, key_, min_, max_, out_, required_, err_) \
    json_get(object_, key_, JSON_INT, min_, max_, (int *){out_}, required_, err_)
#define json_get_int64(object_, key_, min_, max_, out_, required_, err_)                   \
    json_get(object_, key_, JSON_INT64, (double)(min_), (double)(max_), (int64_t *){out_}, \
             required_, err_)
#define json_get_double(object_, key_, min_, max_, out_, required_, err_) \
    json_get(object_, key_, JSON_DOUBLE, min_, max_, (double *){out_}, required_, err_)
#define json_get_bool(object_, key_, out_, required_, err_) \
    json_get(object_, key_, JSON_BOOL, 0, 0, (bool *){out_}, required_, err_)
#define json_get_string(object_, key_, out_, required_, err_) \
    json_get(object_, key_, JSON_TEXT, 0, 0, (const char **){out_}, required_, err_)

// ---- Writing: trees made by json_pack and the like ----------------------------------------------

// The fewest digits that read back as the same float; null if that is not finite.
json_t *json_float(double value);

// Bytes that are not UTF-8 become U+FFFD, so that no file name can break the log. NULL: null.
json_t *json_text(const char *s);

// Frees the tree and returns its text and a newline, in memory the caller frees. Numbers read back
// exactly. flags: Jansson's, such as JSON_INDENT(2), one value per line as Hugging Face writes it.
char *json_write(json_t *root, size_t flags);
