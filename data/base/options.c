#include "options.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "json.h"
#include "memory.h"

// ------------------------------------------------------------------------------------------------
// Nearest word

static int options_min(int a, int b) { return a < b ? a : b; }

// Edit distance: insertions, deletions and substitutions that turn one word into the other.
static int options_distance(const char *a, const char *b) {
    enum { LONGEST = 63 };
    int row[LONGEST + 1], n = (int)strlen(b);
    if (strlen(a) > LONGEST || n > LONGEST) return LONGEST;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int above = row[j];
            row[j] =
                options_min(diagonal + (a[i - 1] != b[j - 1]), options_min(row[j - 1], above) + 1);
            diagonal = above;
        }
    }
    return row[n];
}

// Edit distance if `word` may be a misspelt or shortened `candidate`, else 1000.
static int options_cost(const char *word, const char *candidate) {
    int length = (int)strlen(word), cost = options_distance(word, candidate);
    if (length >= 3 && strncmp(word, candidate, (size_t)length) == 0) cost = 1;
    return cost <= 2 + length / 6 && cost < length ? cost : 1000;
}

bool options_nearest(const char *word, const char *list, char *out, size_t capacity) {
    int best = 1000;
    char candidate[64];
    for (const char *p = list; *p;) {
        size_t length = strcspn(p, "|, ");
        size_t kept = length < sizeof candidate ? length : sizeof candidate - 1;
        memcpy(candidate, p, kept);
        candidate[kept] = 0;
        if (kept > 0 && options_cost(word, candidate) < best) {
            best = options_cost(word, candidate);
            text_copy(out, capacity, candidate);
        }
        p += length;
        p += strspn(p, "|, ");
    }
    return best < 1000;
}

// ------------------------------------------------------------------------------------------------
// Values

static bool options_bad(const Option *o, const char *text, const char *expected, Error *err) {
    return error_set(err, EXIT_USAGE, "see --help", "--%s: expected %s, found \"%.100s\"", o->name,
                     expected, text);
}

static bool options_out_of_range(const Option *o, const char *text, double min, double max,
                                 Error *err) {
    char expected[96];
    snprintf(expected, sizeof expected, "a number from %.15g to %.15g", min, max);
    return options_bad(o, text, expected, err);
}

// "1.5e3" as "1500": digits without a sign, a point only if an exponent follows. False when the
// text is not a whole number. Works on the digits, so nothing is rounded.
static bool options_whole_digits(const char *text, char *out, size_t capacity) {
    const size_t whole = strspn(text, "0123456789");
    const bool point = text[whole] == '.';
    const char *fraction = text + whole + point;
    const size_t places = point ? strspn(fraction, "0123456789") : 0;
    const char *exponent = fraction + places;
    size_t n = whole + places, zeros = 0;
    if (n == 0 || n >= capacity / 2) return false;
    memcpy(out, text, whole);
    memcpy(out + whole, fraction, places);
    if (*exponent) {
        if ((*exponent | 0x20) != 'e') return false;
        exponent += exponent[1] == '+' ? 2 : 1;
        const size_t digits = strspn(exponent, "0123456789");
        if (digits == 0 || digits > 3 || exponent[digits]) return false;
        zeros = strtoul(exponent, NULL, 10);
    } else if (point) {
        return false;
    }
    for (; n > whole + zeros; n--)
        if (out[n - 1] != '0') return false;
    for (; n < whole + zeros && n + 1 < capacity; n++) out[n] = '0';
    out[n] = 0;
    return true;
}

static bool options_set_int(const Option *o, const char *text, Error *err) {
    char digits[128] = "-";
    const bool negative = text[0] == '-', narrow = o->kind == OPTION_INT;
    if (!options_whole_digits(text + negative, digits + 1, sizeof digits - 1))
        return options_bad(o, text, "a whole number", err);
    errno = 0;
    long long value = strtoll(digits + !negative, NULL, 10);
    double min = o->min, max = o->max;
    if (min == 0 && max == 0) {
        min = narrow ? (double)INT32_MIN : (double)INT64_MIN;
        max = narrow ? (double)INT32_MAX : (double)INT64_MAX;
    }
    if (errno || (double)value < min || (double)value > max)
        return options_out_of_range(o, text, min, max, err);
    if (narrow)
        *(int *)o->address = (int)value;
    else
        *(int64_t *)o->address = value;
    return true;
}

static bool options_set_real(const Option *o, const char *text, Error *err) {
    char *end = NULL;
    double value = strtod(text, &end);
    bool limited = o->min != 0 || o->max != 0;
    double max = limited ? o->max : o->kind == OPTION_FLOAT ? 3.4028234e38 : 1.7976931348623157e308;
    double min = limited ? o->min : -max;
    // the set excludes nan, inf and hexadecimal
    if (!*text || *end || text[strspn(text, "0123456789+-.eE")])
        return options_bad(o, text, "a number", err);
    if (!(value >= min && value <= max)) return options_out_of_range(o, text, min, max, err);
    if (o->kind == OPTION_FLOAT)
        *(float *)o->address = (float)value;
    else
        *(double *)o->address = value;
    return true;
}

static bool options_set_choice(const Option *o, const char *text, Error *err) {
    char near_word[64], hint[128] = "see --help";
    int index = 0;
    for (const char *p = o->choices; *p; index++) {
        size_t length = strcspn(p, "|");
        if (length == strlen(text) && strncmp(p, text, length) == 0) {
            *(int *)o->address = index;
            return true;
        }
        p += length + (p[length] == '|');
    }
    if (options_nearest(text, o->choices, near_word, sizeof near_word))
        snprintf(hint, sizeof hint, "did you mean --%s %s?", o->name, near_word);
    return error_set(err, EXIT_USAGE, hint, "--%s: expected one of %s, found \"%.100s\"", o->name,
                     o->choices, text);
}

static bool options_set(const Option *o, const char *text, Error *err) {
    switch (o->kind) {
        case OPTION_KIND_GROUP:
        case OPTION_KIND_HINT:
            return true;
        case OPTION_FLAG:
            *(bool *)o->address = strcmp(text, "true") == 0;
            return true;
        case OPTION_INT:
        case OPTION_INT64:
            return options_set_int(o, text, err);
        case OPTION_FLOAT:
        case OPTION_DOUBLE:
            return options_set_real(o, text, err);
        case OPTION_STRING:
            *(const char **)o->address = text;
            return true;
        case OPTION_CHOICE:
            return options_set_choice(o, text, err);
    }
    return false;
}

static bool options_set_default(const Option *o, Error *err) {
    if (o->fallback) return options_set(o, o->fallback, err);
    if (o->kind == OPTION_STRING)
        *(const char **)o->address = NULL;
    else if (o->kind == OPTION_FLAG)
        *(bool *)o->address = false;
    else if (o->kind == OPTION_INT64)
        *(int64_t *)o->address = 0;
    else if (o->kind == OPTION_FLOAT)
        *(float *)o->address = 0;
    else if (o->kind == OPTION_DOUBLE)
        *(double *)o->address = 0;
    else if (o->address)
        *(int *)o->address = 0;
    return true;
}

// ------------------------------------------------------------------------------------------------
// Parsing

static const Option *options_find(const Option *table, const char *name) {
    for (const Option *o = table; o->name; o++)
        if (o->address && strcmp(o->name, name) == 0) return o;
    return NULL;
}

static bool options_in_list(const char *name, const char *list) {
    const size_t length = strlen(name);
    for (const char *p = list; *p;) {
        const size_t n = strcspn(p, "|");
        if (n == length && strncmp(p, name, n) == 0) return true;
        p += n + (p[n] == '|');
    }
    return false;
}

// Our replacement for an option of other programs, spelt with - or _; NULL: not known.
static const char *options_elsewhere(const Option *table, const char *name) {
    char spelt[64];
    text_copy(spelt, sizeof spelt, name);
    for (char *c = spelt; *c; c++)
        if (*c == '_') *c = '-';
    for (const Option *o = table; o->name; o++)
        if (o->kind == OPTION_KIND_HINT && options_in_list(spelt, o->name)) return o->help;
    return NULL;
}

static bool options_unknown(const Option *table, const char *argument, const char *name,
                            Error *err) {
    char hint[128] = "see --help";
    int best = 1000;
    const char *elsewhere = options_elsewhere(table, name);
    if (elsewhere) return error_set(err, EXIT_USAGE, elsewhere, "%.100s: unknown option", argument);
    for (const Option *o = table; o->name; o++) {
        if (!o->address || options_cost(name, o->name) >= best) continue;
        best = options_cost(name, o->name);
        snprintf(hint, sizeof hint, "did you mean --%s?", o->name);
    }
    return error_set(err, EXIT_USAGE, hint, "%.100s: unknown option", argument);
}

// The value of argv[*i], after '=' or in the next argument; NULL with *err set when it is missing.
static const char *options_value(const Option *o, const char *equals, int argc, char **argv, int *i,
                                 Error *err) {
    if (equals) return equals + 1;
    if (*i + 1 < argc && strncmp(argv[*i + 1], "--", 2) != 0) return argv[++*i];
    if (o->kind == OPTION_STRING && o->choices) return o->choices;
    error_set(err, EXIT_USAGE, "a value that begins with -- needs --name=value",
              "--%s: expected a value", o->name);
    return NULL;
}

static bool options_parse_flag(const Option *o, const char *equals, bool value, Error *err) {
    if (equals)
        return error_set(err, EXIT_USAGE, "switch it off with --no-NAME",
                         "--%s: expected no value, found %.100s", o->name, equals);
    *(bool *)o->address = value;
    return true;
}

// Parses argv[*i]; advances *i when the value is the next argument.
static bool options_parse_one(const Option *table, int argc, char **argv, int *i, Error *err) {
    char name[64];
    const char *argument = argv[*i], *equals = strchr(argument, '=');
    if (strncmp(argument, "--", 2) != 0)
        return error_set(err, EXIT_USAGE, "options are --name value", "%.100s: unexpected argument",
                         argument);
    size_t length = equals ? (size_t)(equals - argument) : strlen(argument);
    snprintf(name, sizeof name, "%.*s", (int)(length - 2), argument + 2);
    const Option *o = options_find(table, name);
    if (!o && strncmp(name, "no-", 3) == 0) {
        o = options_find(table, name + 3);
        if (o && o->kind == OPTION_FLAG) return options_parse_flag(o, equals, false, err);
        o = NULL;
    }
    if (!o) return options_unknown(table, argument, name, err);
    if (o->kind == OPTION_FLAG) return options_parse_flag(o, equals, true, err);
    const char *value = options_value(o, equals, argc, argv, i, err);
    return value && options_set(o, value, err);
}

bool options_parse(const Option *table, int argc, char **argv, bool *help, Error *err) {
    *help = false;
    for (const Option *o = table; o->name; o++)
        if (!options_set_default(o, err)) return false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            *help = true;
        else if (!options_parse_one(table, argc, argv, &i, err))
            return false;
    }
    return true;
}

bool options_given(int argc, char **argv, const char *name) {
    size_t length = strlen(name);
    for (int i = 1; i < argc; i++) {
        const char *p = argv[i];
        if (strncmp(p, "--", 2) != 0) continue;
        p += strncmp(p, "--no-", 5) == 0 && strncmp(name, "no-", 3) != 0 ? 5 : 2;
        if (strncmp(p, name, length) == 0 && (p[length] == 0 || p[length] == '=')) return true;
    }
    return false;
}

// ------------------------------------------------------------------------------------------------
// Help

enum { OPTIONS_HELP_COLUMN = 30, OPTIONS_HELP_WIDTH = 100 };

// Prints words from the help column on, wrapped; *at is the current column.
static void options_print_words(const char *words, int *at, FILE *out) {
    for (const char *p = words; *p;) {
        int length = (int)strcspn(p, " ");
        if (*at + 1 + length > OPTIONS_HELP_WIDTH) {
            fprintf(out, "\n%*s", OPTIONS_HELP_COLUMN - 1, "");
            *at = OPTIONS_HELP_COLUMN - 1;
        }
        fprintf(out, " %.*s", length, p);
        *at += 1 + length;
        p += length;
        p += strspn(p, " ");
    }
}

static void options_print_one(const Option *o, FILE *out) {
    static const char *const values[] = {"", "", "", " N", " N", " X", " X", " TEXT", ""};
    char left[256], tail[256] = "";
    bool optional = o->kind == OPTION_STRING && o->choices,
         on = o->fallback && strcmp(o->fallback, "true") == 0;
    const char *value = optional ? " [TEXT]" : values[o->kind];
    bool choice = o->kind == OPTION_CHOICE;
    snprintf(left, sizeof left, "  --%s%s%s%s", on && o->kind == OPTION_FLAG ? "[no-]" : "",
             o->name, choice ? " " : value, choice ? o->choices : "");
    if (o->kind == OPTION_FLAG)
        snprintf(tail, sizeof tail, on ? "(default: on)" : "");
    else if (o->fallback && o->fallback[0])
        snprintf(tail, sizeof tail, "(default: %s)", o->fallback);
    fprintf(out, "%-*s", OPTIONS_HELP_COLUMN - 1, left);
    int at = (int)strlen(left);
    if (at >= OPTIONS_HELP_COLUMN - 1) fprintf(out, "\n%*s", OPTIONS_HELP_COLUMN - 1, "");
    at = OPTIONS_HELP_COLUMN - 1;
    options_print_words(o->help, &at, out);
    options_print_words(tail, &at, out);
    fprintf(out, "\n");
}

void options_print_help(const Option *table, const char *usage, FILE *out) {
    fprintf(out, "usage: %s\n", usage);
    for (const Option *o = table; o->name; o++) {
        if (o->kind == OPTION_KIND_GROUP)
            fprintf(out, "\n%s:\n", o->name);
        else if (o->address)
            options_print_one(o, out);
    }
}

void options_parse_or_exit(const Option *table, int argc, char **argv, const char *usage) {
    Error err = {0};
    bool help = false;
    if (!options_parse(table, argc, argv, &help, &err)) error_exit(&err);
    if (!help) return;
    options_print_help(table, usage, stdout);
    exit(fflush(stdout) == 0 ? EXIT_DONE : EXIT_DISK);
}

// ------------------------------------------------------------------------------------------------
// The resolved values

static void options_write_choice(const Option *o, JsonWriter *w) {
    char word[64];
    const char *p = o->choices;
    for (int i = *(const int *)o->address; i > 0; i--) p += strcspn(p, "|") + 1;
    snprintf(word, sizeof word, "%.*s", (int)strcspn(p, "|"), p);
    json_put_string(w, o->name, word);
}

void options_write_one(const Option *o, JsonWriter *w) {
    switch (o->kind) {
        case OPTION_KIND_GROUP:
        case OPTION_KIND_HINT:
            break;
        case OPTION_FLAG:
            json_put_bool(w, o->name, *(const bool *)o->address);
            break;
        case OPTION_INT:
            json_put_int(w, o->name, *(const int *)o->address);
            break;
        case OPTION_INT64:
            json_put_int(w, o->name, *(const int64_t *)o->address);
            break;
        case OPTION_FLOAT:
            json_put_float(w, o->name, *(const float *)o->address);
            break;
        case OPTION_DOUBLE:
            json_put_double(w, o->name, *(const double *)o->address);
            break;
        case OPTION_STRING:
            json_put_string(w, o->name, *(const char *const *)o->address);
            break;
        case OPTION_CHOICE:
            options_write_choice(o, w);
            break;
    }
}

void options_write_json(const Option *table, JsonWriter *w) {
    for (const Option *o = table; o->name; o++) options_write_one(o, w);
}

// ------------------------------------------------------------------------------------------------
// Values of an earlier run

static const json_t *options_stored(const Option *o, const json_t *stored) {
    if (o->kind == OPTION_KIND_GROUP) return NULL;
    return json_object_get(stored, o->name);
}

// The stored value of an option as it would be typed, numbers with up to `digits` digits; NULL when
// its type is not the option's. The text is in `buffer` or in the item.
static const char *options_stored_text(const Option *o, const json_t *item, int digits,
                                       char *buffer, size_t capacity) {
    const bool text = o->kind == OPTION_STRING || o->kind == OPTION_CHOICE;
    if (text) return json_string_value(item);
    if (o->kind == OPTION_FLAG && json_is_boolean(item))
        return json_is_true(item) ? "true" : "false";
    if (o->kind == OPTION_FLAG || !json_is_number(item)) return NULL;
    const double value = json_number_value(item);
    const bool whole = fabs(value) < 1e16 && rint(value) == value;
    snprintf(buffer, capacity, "%.*g", whole ? 17 : digits, value);
    return buffer;
}

static bool options_take_one(const Option *o, const json_t *item, Error *err) {
    char buffer[40];
    if (o->kind == OPTION_STRING && json_is_null(item)) {
        *(const char **)o->address = NULL;
        return true;
    }
    const char *text = options_stored_text(o, item, 17, buffer, sizeof buffer);
    if (!text)
        return error_set(err, EXIT_BAD_INPUT, "give it on the command line",
                         "options: --%s: expected a value of its type", o->name);
    if (o->kind == OPTION_STRING) {
        char *copy = strdup(text);
        if (!copy) return error_memory(err, o->name, strlen(text) + 1);
        text = copy;
    }
    if (options_set(o, text, err)) return true;
    err->code = EXIT_BAD_INPUT;
    return false;
}

bool options_take(const Option *table, int argc, char **argv, const json_t *stored,
                  const char *except, Error *err) {
    for (const Option *o = table; o->name; o++) {
        const json_t *item = options_stored(o, stored);
        if (!item || options_in_list(o->name, except) || options_given(argc, argv, o->name))
            continue;
        if (!options_take_one(o, item, err)) return false;
    }
    return true;
}

void options_print_changes(const Option *table, int argc, char **argv, const json_t *stored,
                           const char *except, FILE *out) {
    char json[16384], was_buffer[40], is_buffer[40];
    for (const Option *o = table; o->name; o++) {
        const json_t *was = options_stored(o, stored);
        if (!was || options_in_list(o->name, except) || !options_given(argc, argv, o->name))
            continue;
        JsonWriter w;
        Error err = {0};
        json_writer_init(&w, json, sizeof json, 0);
        json_begin(&w, NULL, '{');
        options_write_one(o, &w);
        json_end(&w, '}');
        json_auto_t *now = json_parse(json, w.n, o->name, &err);
        const json_t *is = options_stored(o, now);
        if (is && !json_equal(is, was)) {
            const char *from = options_stored_text(o, was, 9, was_buffer, sizeof was_buffer),
                       *to = options_stored_text(o, is, 9, is_buffer, sizeof is_buffer);
            fprintf(out, "resume: --%s %s -> %s\n", o->name, from ? from : "(none)",
                    to ? to : "(none)");
        }
    }
}
