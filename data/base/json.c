#include "json.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "file.h"
#include "memory.h"

// ------------------------------------------------------------------------------------------------
// Checks on the text

size_t utf8_length(const unsigned char *p, size_t n) {
    size_t len = p[0] < 0x80   ? 1
                 : p[0] < 0xc2 ? 0
                 : p[0] < 0xe0 ? 2
                 : p[0] < 0xf0 ? 3
                 : p[0] < 0xf5 ? 4
                               : 0;
    if (len > n) return 0;
    for (size_t i = 1; i < len; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    if (p[0] == 0xe0 && p[1] < 0xa0) return 0;
    if (p[0] == 0xed && p[1] > 0x9f) return 0;
    if (p[0] == 0xf0 && p[1] < 0x90) return 0;
    if (p[0] == 0xf4 && p[1] > 0x8f) return 0;
    return len;
}

// Bytes of the string at p (its opening quote), both quotes included; 0: invalid. cJSON would
// accept raw control characters and bad UTF-8, and cut off a key at \u0000.
static size_t json_scan_string(const unsigned char *p, size_t n) {
    for (size_t i = 1; i < n;) {
        if (p[i] == '"') return i + 1;
        if (p[i] < 0x20) return 0;
        if (p[i] == '\\') {
            if (n - i > 5 && memcmp(p + i, "\\u0000", 6) == 0) return 0;
            i += 2;
            continue;
        }
        size_t len = utf8_length(p + i, n - i);
        if (len == 0) return 0;
        i += len;
    }
    return 0;
}

static size_t json_scan_digits(const unsigned char *p, size_t n) {
    size_t i = 0;
    while (i < n && p[i] >= '0' && p[i] <= '9') i++;
    return i;
}

// Bytes of the number at p; 0: invalid. cJSON would also accept 01 and 1.
static size_t json_scan_number(const unsigned char *p, size_t n) {
    size_t i = p[0] == '-';
    size_t digits = json_scan_digits(p + i, n - i);
    if (digits == 0 || (digits > 1 && p[i] == '0')) return 0;
    i += digits;
    if (i < n && p[i] == '.') {
        digits = json_scan_digits(p + i + 1, n - i - 1);
        if (digits == 0) return 0;
        i += 1 + digits;
    }
    if (i < n && (p[i] | 0x20) == 'e') {
        i++;
        if (i < n && (p[i] == '+' || p[i] == '-')) i++;
        digits = json_scan_digits(p + i, n - i);
        if (digits == 0) return 0;
        i += digits;
    }
    return i;
}

// Bytes of the token at p; 0: not JSON. cJSON checks the grammar between tokens.
static size_t json_scan_token(const unsigned char *p, size_t n) {
    static const char *const words[] = {"true", "false", "null"};
    if (strchr("{}[]:, \t\r\n", p[0])) return p[0] != 0;
    if (p[0] == '"') return json_scan_string(p, n);
    if (p[0] == '-' || (p[0] >= '0' && p[0] <= '9')) return json_scan_number(p, n);
    for (int i = 0; i < 3; i++)
        if (n >= strlen(words[i]) && memcmp(p, words[i], strlen(words[i])) == 0)
            return strlen(words[i]);
    return 0;
}

static bool json_scan(const char *text, size_t n, Error *err) {
    const unsigned char *p = (const unsigned char *)text;
    int depth = 0, values = 0;
    for (size_t i = 0, len; i < n; i += len) {
        len = json_scan_token(p + i, n - i);
        if (len == 0)
            return error_set(err, EXIT_BAD_INPUT, "",
                             "expected JSON, found byte 0x%02x at offset %zu", p[i], i);
        if (p[i] == '{' || p[i] == '[') depth++;
        if (p[i] == '}' || p[i] == ']') depth--;
        if (p[i] == ',' || p[i] == '{' || p[i] == '[') values++;
        if (depth > JSON_MAX_DEPTH)
            return error_set(err, EXIT_BAD_INPUT, "",
                             "expected JSON nested at most %d deep, found more", JSON_MAX_DEPTH);
        if (values > JSON_MAX_VALUES)
            return error_set(err, EXIT_BAD_INPUT, "",
                             "expected JSON of at most %d values, found more", JSON_MAX_VALUES);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// Parsing

// cJSON reports a failed allocation as a syntax error; this flag tells them apart.
static __thread bool json_out_of_memory;

static void *json_malloc(size_t n) {
    void *p = malloc(n);
    if (!p) json_out_of_memory = true;
    return p;
}

static int json_compare_keys(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// Sorts the keys of one object into `keys`, so that a hostile file cannot cost quadratic time.
static bool json_unique_in(const cJSON *object, const char **keys, Error *err) {
    size_t n = 0;
    for (const cJSON *item = object->child; item; item = item->next) keys[n++] = item->string;
    qsort(keys, n, sizeof *keys, json_compare_keys);
    for (size_t i = 1; i < n; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0)
            return error_set(err, EXIT_BAD_INPUT, "",
                             "expected every key once, found \"%.100s\" twice", keys[i]);
    return true;
}

// json_scan bounds the depth, and so this recursion.
static bool json_unique_keys(const cJSON *value, Error *err) {
    size_t n = 0;
    for (const cJSON *item = value->child; item; item = item->next, n++)
        if (item->child && !json_unique_keys(item, err)) return false;
    if (!cJSON_IsObject(value) || n < 2) return true;
    const char **keys = malloc(n * sizeof *keys);
    if (!keys) return error_memory(err, "JSON", n * sizeof *keys);
    bool ok = json_unique_in(value, keys, err);
    free(keys);
    return ok;
}

cJSON *json_parse(const char *text, size_t n, const char *path, Error *err) {
    cJSON_Hooks hooks = {.malloc_fn = json_malloc, .free_fn = free};
    if (!json_scan(text, n, err)) {
        error_prefix(err, path);
        return NULL;
    }
    cJSON_InitHooks(&hooks);
    json_out_of_memory = false;
    const char *end = text;
    cJSON *root = cJSON_ParseWithLengthOpts(text, n + 1, &end, true);
    if (!root && json_out_of_memory) {
        error_memory(err, path, n);
        return NULL;
    }
    if (!root) {
        error_set(err, EXIT_BAD_INPUT, "", "%s: expected JSON, found an error near offset %ld",
                  path, (long)(end - text));
        return NULL;
    }
    if (json_unique_keys(root, err)) return root;
    error_prefix(err, path);
    cJSON_Delete(root);
    return NULL;
}

cJSON *json_read(const char *path, uint64_t max_bytes, const char *hint, Error *err) {
    uint64_t n = 0;
    char *text = file_read_all(path, max_bytes, &n, hint, err);
    if (!text) return NULL;
    cJSON *root = json_parse(text, (size_t)n, path, err);
    free(text);
    return root;
}

// ------------------------------------------------------------------------------------------------
// Getters

bool json_type_error(const cJSON *item, const char *key, const char *expected, Error *err) {
    const char *found = cJSON_IsNull(item)     ? "null"
                        : cJSON_IsBool(item)   ? "a boolean"
                        : cJSON_IsNumber(item) ? "a number"
                        : cJSON_IsString(item) ? "a string"
                        : cJSON_IsArray(item)  ? "an array"
                                               : "an object";
    return error_set(err, EXIT_BAD_INPUT, "", "%s: expected %s, found %s", key, expected, found);
}

const cJSON *json_member(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return item && !cJSON_IsNull(item) ? item : NULL;
}

static bool json_missing(const char *key, bool required, Error *err) {
    return !required || error_set(err, EXIT_BAD_INPUT, "", "%s: required, not found", key);
}

bool json_int64_value(const cJSON *item, const char *key, int64_t min, int64_t max, int64_t *out,
                      Error *err) {
    if (!cJSON_IsNumber(item)) return json_type_error(item, key, "an integer", err);
    double v = item->valuedouble;
    if (!(v >= (double)min && v <= (double)max && v == floor(v)))
        return error_set(err, EXIT_BAD_INPUT, "",
                         "%s: expected an integer from %lld to %lld, found %.17g", key,
                         (long long)min, (long long)max, v);
    *out = (int64_t)v;
    return true;
}

bool json_get_int64(const cJSON *object, const char *key, int64_t min, int64_t max, int64_t *out,
                    bool required, Error *err) {
    const cJSON *item = json_member(object, key);
    return item ? json_int64_value(item, key, min, max, out, err)
                : json_missing(key, required, err);
}

bool json_get_int(const cJSON *object, const char *key, int min, int max, int *out, bool required,
                  Error *err) {
    int64_t value = *out;
    if (!json_get_int64(object, key, min, max, &value, required, err)) return false;
    *out = (int)value;
    return true;
}

bool json_get_double(const cJSON *object, const char *key, double min, double max, double *out,
                     bool required, Error *err) {
    const cJSON *item = json_member(object, key);
    if (!item) return json_missing(key, required, err);
    if (!cJSON_IsNumber(item)) return json_type_error(item, key, "a number", err);
    double v = item->valuedouble;
    if (!(v >= min && v <= max))  // also refuses the infinity of 1e400
        return error_set(err, EXIT_BAD_INPUT, "", "%s: expected a number from %g to %g, found %g",
                         key, min, max, v);
    *out = v;
    return true;
}

bool json_get_bool(const cJSON *object, const char *key, bool *out, bool required, Error *err) {
    const cJSON *item = json_member(object, key);
    if (!item) return json_missing(key, required, err);
    if (!cJSON_IsBool(item)) return json_type_error(item, key, "true or false", err);
    *out = cJSON_IsTrue(item);
    return true;
}

bool json_get_string(const cJSON *object, const char *key, const char **out, bool required,
                     Error *err) {
    const cJSON *item = json_member(object, key);
    if (!item) return json_missing(key, required, err);
    if (!cJSON_IsString(item)) return json_type_error(item, key, "a string", err);
    *out = item->valuestring;
    return true;
}

// ------------------------------------------------------------------------------------------------
// Writing

void json_writer_init(JsonWriter *w, char *text, size_t capacity, int indent) {
    *w = (JsonWriter){.text = text, .capacity = capacity, .indent = indent};
    text[0] = 0;
}

static void json_put(JsonWriter *w, const char *s, size_t n) {
    if (w->overflow || n >= w->capacity - w->n) {
        w->overflow = true;
        return;
    }
    memcpy(w->text + w->n, s, n);
    w->n += n;
    w->text[w->n] = 0;
}

void json_put_text(JsonWriter *w, const char *s) { json_put(w, s, strlen(s)); }

static void json_newline(JsonWriter *w) {
    if (w->indent == 0) return;
    json_put_text(w, "\n");
    for (int i = 0; i < w->depth * w->indent; i++) json_put_text(w, " ");
}

// Bytes that are not UTF-8 become U+FFFD, so that no file name can break the log.
static void json_put_quoted(JsonWriter *w, const char *s) {
    char escaped[8];
    size_t n = strlen(s);
    json_put_text(w, "\"");
    for (size_t i = 0, len; i < n; i += len) {
        unsigned char c = (unsigned char)s[i];
        len = utf8_length((const unsigned char *)s + i, n - i);
        if (len == 0) {
            len = 1;
            json_put_text(w, "\xef\xbf\xbd");
        } else if (c == '"' || c == '\\') {
            snprintf(escaped, sizeof escaped, "\\%c", c);
            json_put_text(w, escaped);
        } else if (c < 0x20 || c == 0x7f) {
            snprintf(escaped, sizeof escaped, "\\u%04x", c);
            json_put_text(w, escaped);
        } else {
            json_put(w, s + i, len);
        }
    }
    json_put_text(w, "\"");
}

static void json_key(JsonWriter *w, const char *key) {
    if (w->comma) json_put_text(w, w->indent ? "," : ", ");
    if (w->depth > 0) json_newline(w);
    w->comma = true;
    if (!key) return;
    json_put_quoted(w, key);
    json_put_text(w, ": ");
}

void json_begin(JsonWriter *w, const char *key, char open) {
    json_key(w, key);
    json_put(w, &open, 1);
    w->depth++;
    w->comma = false;
}

void json_end(JsonWriter *w, char close) {
    w->depth--;
    if (w->comma) json_newline(w);
    json_put(w, &close, 1);
    w->comma = true;
}

void json_string(JsonWriter *w, const char *key, const char *value) {
    json_key(w, key);
    if (value)
        json_put_quoted(w, value);
    else
        json_put_text(w, "null");
}

void json_int(JsonWriter *w, const char *key, int64_t value) {
    char digits[32];
    json_key(w, key);
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    json_put_text(w, digits);
}

void json_bool(JsonWriter *w, const char *key, bool value) {
    json_key(w, key);
    json_put_text(w, value ? "true" : "false");
}

void json_null(JsonWriter *w, const char *key) { json_string(w, key, NULL); }

// The fewest of `from` to `to` digits that read back as the same value.
static void json_real(JsonWriter *w, const char *key, double value, int from, int to, bool single) {
    char digits[40];
    json_key(w, key);
    for (int precision = from; precision <= to; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, value);
        if (single ? strtof(digits, NULL) == (float)value : strtod(digits, NULL) == value) break;
    }
    if (!isfinite(value))
        snprintf(digits, sizeof digits, "null");
    else if (!strpbrk(digits, ".e"))
        strcat(digits, ".0");  // or Python would read an int
    json_put_text(w, digits);
}

void json_double(JsonWriter *w, const char *key, double value) {
    json_real(w, key, value, 15, 17, false);
}

void json_float(JsonWriter *w, const char *key, float value) {
    json_real(w, key, (double)value, 6, 9, true);
}
