#include "json.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unictype.h>
#include <unistr.h>

#include "file.h"
#include "memory.h"

// ---- UTF-8 --------------------------------------------------------------------------------------

int utf8_length(const unsigned char *p, size_t n) {
    enum { INCOMPLETE = -2 };
    ucs4_t c;
    int length = u8_mbtoucr(&c, p, n);
    if (length > 0) return length;
    for (length = 1; (size_t)length < n && u8_mbtoucr(&c, p, (size_t)length + 1) == INCOMPLETE;)
        length++;
    return -length;
}

size_t utf8_replace(const unsigned char *p, size_t n, unsigned char *out) {
    size_t size = 0;
    for (size_t i = 0; i < n;) {
        const int length = utf8_length(p + i, n - i);
        const size_t used = (size_t)abs(length), written = length > 0 ? used : 3;
        memcpy(out + size, length > 0 ? p + i : (const unsigned char *)"\xef\xbf\xbd", written);
        size += written;
        i += used;
    }
    return size;
}

size_t utf8_strip(const char *text, size_t *start) {
    const uint8_t *all = (const uint8_t *)text;
    size_t end = 0;
    ucs4_t c;
    *start = 0;
    for (const uint8_t *p = all, *next; (next = u8_next(&c, p)); p = next) {
        if (uc_is_property_white_space(c) || (c >= 0x1c && c <= 0x1f)) continue;
        if (end == 0) *start = (size_t)(p - all);
        end = (size_t)(next - all);
    }
    return end;
}

// ---- Parsing ------------------------------------------------------------------------------------

// Jansson 2.14 drops a character when the heap refuses it a longer buffer, and reports success.
static void *json_malloc(size_t n) { return host_calloc(n, 1, "JSON"); }
__attribute__((constructor)) static void json_set_up(void) {
    json_set_alloc_funcs(json_malloc, free);
}

json_t *json_parse(const char *text, size_t n, const char *path, Error *err) {
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL;
    json_error_t why = {.text = "a NUL byte", .line = 1};  // jansson skips it between tokens
    json_t *root = memchr(text, 0, n) ? NULL : json_loadb(text, n, flags, &why);
    if (!root)
        bad_input(err, "%s: expected JSON, found an error at line %d, column %d: %s", path,
                  why.line, why.column, why.text);
    return root;
}

json_t *json_read(const char *path, uint64_t max_bytes, const char *hint, Error *err) {
    uint64_t n = 0;
    AUTO_FREE char *text = file_read_all(path, max_bytes, &n, hint, err);
    return text ? json_parse(text, (size_t)n, path, err) : NULL;
}

// ---- Getters ------------------------------------------------------------------------------------

bool json_type_error(const json_t *item, const char *key, const char *expected, Error *err) {
    static const char *const names[] = {
        [JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array", [JSON_STRING] = "a string",
        [JSON_INTEGER] = "a number", [JSON_REAL] = "a number",  [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",      [JSON_NULL] = "null",
    };
    return bad_input(err, "%s: expected %s, found %s", key, expected, names[json_typeof(item)]);
}

json_t *json_member(const json_t *object, const char *key) {
    json_t *item = json_object_get(object, key);
    return json_is_null(item) ? NULL : item;
}

bool json_string_is(const json_t *item, const char *text) {
    return json_is_string(item) && strcmp(json_string_value(item), text) == 0;
}

bool json_is_set(const json_t *item) {
    if (!item || json_is_null(item) || json_is_false(item)) return false;
    if (json_is_array(item) || json_is_object(item))
        return json_array_size(item) + json_object_size(item) > 0;
    return !json_is_string(item) || json_string_length(item) > 0;
}

bool json_value(const json_t *item, const char *key, JsonKind kind, double min, double max,
                void *out, Error *err) {
    static const char *const expected[] = {"an integer", "an integer", "a number", "true or false",
                                           "a string"};
    const bool whole = kind <= JSON_INT64, number = kind <= JSON_DOUBLE;
    const double v = json_number_value(item);
    if (number              ? !json_is_number(item)
        : kind == JSON_BOOL ? !json_is_boolean(item)
                            : !json_is_string(item))
        return json_type_error(item, key, expected[kind], err);
    if (number && !(v >= min && v <= max && (!whole || v == floor(v))))
        return bad_input(err,
                         whole ? "%s: expected %s from %.0f to %.0f, found %.17g"
                               : "%s: expected %s from %g to %g, found %g",
                         key, expected[kind], min, max, v);
    if (kind == JSON_INT) *(int *)out = (int)v;
    if (kind == JSON_INT64) *(int64_t *)out = (int64_t)v;
    if (kind == JSON_DOUBLE) *(double *)out = v;
    if (kind == JSON_BOOL) *(bool *)out = json_is_true(item);
    if (kind == JSON_TEXT) *(const char **)out = json_string_value(item);
    return true;
}

bool json_get(const json_t *object, const char *key, JsonKind kind, double min, double max,
              void *out, bool required, Error *err) {
    const json_t *item = json_member(object, key);
    if (item) return json_value(item, key, kind, min, max, out, err);
    return !required || bad_input(err, "%s: required, not found", key);
}

// ---- Writing ------------------------------------------------------------------------------------

json_t *json_float(double value) {
    const float f = (float)value;
    char digits[32];
    if (!isfinite(f)) return json_null();
    for (int n = 1; n <= 9; n++) {
        snprintf(digits, sizeof digits, "%.*g", n, (double)f);
        if (strtof(digits, NULL) == f) break;
    }
    return json_real(strtod(digits, NULL));
}

json_t *json_text(const char *s) {
    if (!s) return json_null();
    const size_t n = strlen(s);
    AUTO_FREE unsigned char *valid = host_calloc(n, 3, "JSON");
    const size_t size = utf8_replace((const unsigned char *)s, n, valid);
    return json_stringn((const char *)valid, size);
}

char *json_write(json_t *root, size_t flags) {
    enum { SHORT = 15, EXACT = 17 };  // digits; 15 avoid 0.10000000000000001
    assert(root);                     // NULL: json_pack got a wrong format or bad UTF-8
    AUTO_FREE char *text = json_dumps(root, flags | JSON_ENCODE_ANY | JSON_REAL_PRECISION(SHORT));
    json_auto_t *back = json_loads(text, JSON_DECODE_ANY, NULL);
    if (!json_equal(root, back)) {
        free(text);
        text = json_dumps(root, flags | JSON_ENCODE_ANY | JSON_REAL_PRECISION(EXACT));
    }
    json_decref(root);
    const size_t n = strlen(text);
    char *line = memcpy(host_calloc(n + 2, 1, "JSON"), text, n);
    line[n] = '\n';
    return line;
}
