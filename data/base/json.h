// JSON by Jansson: strict reading, getters with errors, and texts of trees.
//
// Reading is strict: UTF-8, no key twice, no \u0000, no number beyond a double, nothing after the
// value, at most 2048 levels. Errors are EXIT_BAD_INPUT. Getters say "key: expected ..., found
// ..."; the caller adds the file with error_prefix(err, path).
#ifndef UNPAD_JSON_H
#define UNPAD_JSON_H

#include <jansson.h>

#include "error.h"

enum { JSON_MAX_CONFIG = 1 << 20 };  // bytes of a config file

// Bytes of the UTF-8 character at p (n > 0). Negative: no character begins here, and one U+FFFD
// stands for so many bytes, as with Python's "replace": the beginning of a character, or one byte.
int utf8_length(const unsigned char *p, size_t n);

// Copies p (n) to out (up to 3 n bytes) with U+FFFD in place of bytes that are not UTF-8. Returns
// the bytes of out.
size_t utf8_replace(const unsigned char *p, size_t n, unsigned char *out);

// ------------------------------------------------------------------------------------------------
// Parsing

// path only names the text in errors. Free the tree with json_decref. NULL on error; refused memory
// ends the program with exit code 5. All numbers are doubles (json_number_value), as an integer may
// be longer than 64 bits: transformers writes a model_max_length of 1e30 so.
json_t *json_parse(const char *text, size_t n, const char *path, Error *err);

// The same for a file of at most max_bytes.
json_t *json_read(const char *path, uint64_t max_bytes, const char *hint, Error *err);

// ------------------------------------------------------------------------------------------------
// Getters: a missing or null member leaves *out unchanged, and is an error only when required

// "key: expected ..., found a string" or whatever the item is. Returns false.
bool json_type_error(const json_t *item, const char *key, const char *expected, Error *err);

// The member; NULL when it is missing or null.
json_t *json_member(const json_t *object, const char *key);

// Whether the item, which may be NULL, is this string.
bool json_string_is(const json_t *item, const char *text);

bool json_is_set(const json_t *item);  // neither missing, null, false, "" nor [] nor {}

// A whole number in [min, max]; both within +-2^53, where doubles are exact.
bool json_int64_value(const json_t *item, const char *key, int64_t min, int64_t max, int64_t *out,
                      Error *err);
bool json_get_int64(const json_t *object, const char *key, int64_t min, int64_t max, int64_t *out,
                    bool required, Error *err);
bool json_get_int(const json_t *object, const char *key, int min, int max, int *out, bool required,
                  Error *err);
bool json_get_double(const json_t *object, const char *key, double min, double max, double *out,
                     bool required, Error *err);
bool json_get_bool(const json_t *object, const char *key, bool *out, bool required, Error *err);

// *out points into the tree.
bool json_get_string(const json_t *object, const char *key, const char **out, bool required,
                     Error *err);

// ------------------------------------------------------------------------------------------------
// Writing: trees that json_pack and the like make
//
//   char *line = json_write(json_pack("{s:I, s:o}", "step", step, "loss", json_float(loss)), 0);

// The fewest digits that read back as the same float; not finite: null.
json_t *json_float(float value);

// Bytes that are not UTF-8 become U+FFFD, so that no file name can break the log. NULL: null.
json_t *json_text(const char *s);

// The text of a tree, which it frees, and a newline, in memory the caller frees. Numbers read back
// as they are. flags: Jansson's, such as JSON_INDENT(2), one value per line as Hugging Face has it.
char *json_write(json_t *root, size_t flags);

#endif
