#include "options.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dir.h"
#include "file.h"
#include "json.h"
#include "memory.h"

// ---- Lists of words -----------------------------------------------------------------------------

enum { WORD_MAX = 64 };

// Copies the next word of "a|b|c" or "a, b, c", cut off if it is too long, and moves *list past it;
// false at the end.
static bool next_word(const char **list, char word[WORD_MAX]) {
    *list += strspn(*list, "|, ");
    const size_t length = strcspn(*list, "|, ");
    snprintf(word, WORD_MAX, "%.*s", (int)length, *list);
    *list += length;
    return length > 0;
}

// The index of the word in the list, in any case; "wand*" is any word that begins so. -1: none
static int index_of_word(const char *list, const char *wanted) {
    char word[WORD_MAX];
    for (int i = 0; next_word(&list, word); i++) {
        const size_t n = strcspn(word, "*");
        if (strncasecmp(word, wanted, n) == 0 && (word[n] || !wanted[n])) return i;
    }
    return -1;
}

// ---- Values -------------------------------------------------------------------------------------

static const struct {
    size_t size_bytes;
    const char *placeholder;  // in --help
    long double min, max;     // of numbers; a long double holds every int64_t
} kinds[] = {
    [OPTION_FLAG] = {sizeof(bool), "", 0, 0},
    [OPTION_INT] = {sizeof(int), "N", INT32_MIN, INT32_MAX},
    [OPTION_INT64] = {sizeof(int64_t), "N", INT64_MIN, INT64_MAX},
    [OPTION_FLOAT] = {sizeof(float), "X", -3.4028234e38L, 3.4028234e38L},
    [OPTION_STRING] = {sizeof(const char *), "TEXT", 0, 0},
    [OPTION_DIRECTORY] = {sizeof(const char *), "DIR", 0, 0},
    [OPTION_CHOICE] = {sizeof(int), "", 0, 0},
};

static bool is_text(const Option *o) {
    return o->kind == OPTION_STRING || o->kind == OPTION_DIRECTORY;
}

static bool bad_value(const Option *o, const char *text, const char *expected, Error *err) {
    char hint[WORD_MAX + 30];
    snprintf(hint, sizeof hint, "--help %s explains it", o->name);
    return error_set(err, EXIT_USAGE, hint, "--%s: expected %s, found \"%.100s\"", o->name,
                     expected, text);
}

// The factor of a suffix: k, M, G are powers of 1000; Ki, Mi, Gi of 1024; 0: none of these
static long double factor_of(const char *suffix) {
    static const char units[] = "kMG";
    const bool binary = suffix[0] && suffix[1] == 'i';
    const char *unit = strchr(units, suffix[0] == 'K' ? 'k' : suffix[0]);
    if (!suffix[0]) return 1;
    return unit && !suffix[1 + binary] ? powl(binary ? 1024 : 1000, (long double)(unit - units + 1))
                                       : 0;
}

// Whole numbers are 1000, 1e3, 1.5e3, 1.5k: a point only before an exponent or a unit.
static bool set_number(const Option *o, const char *text, Error *err) {
    char *end = NULL, expected[96];
    const bool whole = o->kind != OPTION_FLOAT, own_limits = o->min != 0 || o->max != 0;
    const long double number = strtold(text, &end), value = number * factor_of(end),
                      min = own_limits ? o->min : kinds[o->kind].min,
                      max = own_limits ? o->max : kinds[o->kind].max;
    // the set excludes nan, inf and hexadecimal
    if (end == text || factor_of(end) == 0 || end != text + strspn(text, "0123456789+-.eE") ||
        (whole && (value != floorl(value) || (strchr(text, '.') && !strpbrk(text, "eEkKMG")))))
        return bad_value(o, text, whole ? "a whole number" : "a number", err);
    snprintf(expected, sizeof expected, "a number from %.15Lg to %.15Lg", min, max);
    if (!(value >= min && value <= max)) return bad_value(o, text, expected, err);
    if (o->kind == OPTION_INT) *(int *)o->address = (int)value;
    if (o->kind == OPTION_INT64) *(int64_t *)o->address = (int64_t)value;
    if (o->kind == OPTION_FLOAT) *(float *)o->address = (float)(double)value;
    return true;
}

static bool set_choice(const Option *o, const char *text, Error *err) {
    char expected[200];
    *(int *)o->address = index_of_word(o->choices, text);
    snprintf(expected, sizeof expected, "one of %s", o->choices);
    return *(int *)o->address >= 0 || bad_value(o, text, expected, err);
}

static bool set_option(const Option *o, const char *text, Error *err) {
    if (o->kind == OPTION_CHOICE) return set_choice(o, text, err);
    if (o->kind != OPTION_FLAG && !is_text(o)) return set_number(o, text, err);
    if (o->kind == OPTION_FLAG)
        *(bool *)o->address = strcmp(text, "true") == 0;
    else
        *(const char **)o->address = text;
    return true;
}

// ---- Parsing ------------------------------------------------------------------------------------

// NULL: not found
static const Option *find_option(const Option *table, const char *name) {
    for (const Option *o = table; o->name; o++)
        if (o->address && strcmp(o->name, name) == 0) return o;
    return NULL;
}

// Letters outside the common beginning and end of two words; 1 for two that changed places
static size_t distance(const char *a, const char *b) {
    const size_t n = strlen(a), m = strlen(b), least = n < m ? n : m;
    size_t first = 0, last = 0;
    while (first < least && a[first] == b[first]) first++;
    while (last < least - first && a[n - 1 - last] == b[m - 1 - last]) last++;
    const bool swapped =
        n == m && first + last + 2 == n && a[first] == b[first + 1] && a[first + 1] == b[first];
    return swapped ? 1 : n + m - least - first - last;
}

// The hint names our option if this is another program's or misspelt. Returns false.
static bool unknown_option(const Option *table, const char *argument, Error *err) {
    char name[WORD_MAX], hint[WORD_MAX + 30] = "--help all lists all options";
    size_t least = 3;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(argument, "="), argument);
    const char *bare = strncmp(name, "--", 2) == 0 ? name + 2 : name, *known = NULL;
    for (char *p = name; (p = strchr(p, '_'));) *p = '-';
    for (const Option *o = table; o->name; o++) {
        if (!known && o->kind == OPTION_KIND_HINT && index_of_word(o->name, bare) >= 0)
            known = o->help;
        const size_t far = o->address ? distance(bare, o->name) : least;
        if (far >= least || far * 2 >= strlen(bare)) continue;
        least = far;
        snprintf(hint, sizeof hint, "did you mean --%s?", o->name);
    }
    return error_set(err, EXIT_USAGE, known ? known : hint, "%.100s: unknown option", argument);
}

// The value of argv[*i], after '=' or in the next argument; NULL with *err set when it is missing.
static const char *argument_value(const Option *o, const char *equals, int argc, char **argv,
                                  int *i, Error *err) {
    if (equals) return equals + 1;
    if (*i + 1 < argc && strncmp(argv[*i + 1], "--", 2) != 0) return argv[++*i];
    if (o->choices && o->kind != OPTION_CHOICE) return o->choices;
    error_set(err, EXIT_USAGE, "a value that begins with -- needs --name=value",
              "--%s: expected a value", o->name);
    return NULL;
}

static bool read_file(Option *table, const char *path, Error *err);

// Parses argv[*i]; advances *i when the value is the next argument.
static bool parse_one(Option *table, int argc, char **argv, int *i, OptionGiver giver, Error *err) {
    char name[WORD_MAX];
    const char *argument = argv[*i], *equals = strchr(argument, '=');
    if (argument[0] != '-' || !argument[1])
        return error_set(err, EXIT_USAGE,
                         "options are --name value, with one value each: quote a pattern, so that "
                         "the shell leaves it as it is",
                         "%.100s: unexpected argument", argument);
    if (argument[1] != '-') return unknown_option(table, argument, err);
    size_t length = equals ? (size_t)(equals - argument) : strlen(argument);
    snprintf(name, sizeof name, "%.*s", (int)(length - 2), argument + 2);
    const bool off = !find_option(table, name) && strncmp(name, "no-", 3) == 0;
    const Option *known = find_option(table, name + (off ? 3 : 0));
    if (!known || (off && known->kind != OPTION_FLAG)) return unknown_option(table, argument, err);
    Option *o = &table[known - table];
    const bool flag = o->kind == OPTION_FLAG;
    if (flag && equals)
        return error_set(err, EXIT_USAGE, "switch it off with --no-NAME",
                         "--%s: expected no value, found %.100s", o->name, equals);
    const char *value =
        flag ? (off ? "false" : "true") : argument_value(o, equals, argc, argv, i, err);
    if (!value || giver < o->given) return value != NULL;
    o->given = giver;
    o->text = value;
    return set_option(o, value, err) &&
           (strcmp(o->name, "options") != 0 || read_file(table, value, err));
}

// A line of a file of options as an argument, "--name=value", into out; false: it has none.
static bool line_argument(const char *line, char *out, Error *err) {
    const char *name = line + strspn(line, " \t-");
    const size_t length = strcspn(name, " \t\r=:#");
    const char *value = name + length + strspn(name + length, " \t");
    if (*value == '=' || *value == ':') value += 1 + strspn(value + 1, " \t");
    out += sprintf(out, "--%.*s", (int)length, name);
    if (*value == '"') {
        json_auto_t *text = json_loads(value, JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK, NULL);
        if (!text)
            return error_set(err, EXIT_USAGE, "end it with a quote", "%s: expected a string",
                             value);
        sprintf(out, "=%s", json_string_value(text));
    } else if (*value && *value != '#' && *value != '\r') {
        size_t n = strlen(value);
        for (size_t i = 1; i < n; i++)
            if (value[i] == '#' && strchr(" \t", value[i - 1])) n = i;
        while (strchr(" \t\r", value[n - 1])) n--;
        sprintf(out, "=%.*s", (int)n, value);
    }
    return length > 0;
}

static void **files;  // blocks that begin with the one before: the options point into their texts

static bool read_file(Option *table, const char *path, Error *err) {
    char where[IO_PATH_MAX + 20];
    char *text =
             file_read_all(path, JSON_MAX_CONFIG, NULL, "give a file with one option a line", err),
         *rest = text;
    if (!text) return false;
    void **file = host_calloc(sizeof *file + 5 * (strlen(text) + 1), 1, path);
    *file = files;
    files = file;
    char *at = (char *)(file + 1);
    rest += mark_bytes(text);
    for (int number = 1, i = 0; rest && !err->code; number++, i = 0) {
        if (line_argument(strsep(&rest, "\n"), at, err)) {
            if (strncmp(at, "--options", 9) == 0)
                error_set(err, EXIT_USAGE, "name that file, too, on the command line",
                          "expected no --options in a file of options");
            parse_one(table, 1, &at, &i, GIVEN_BY_FILE, err);
        }
        at += strlen(at) + 1;
        snprintf(where, sizeof where, "%s:%d", path, number);
        if (err->code) error_prefix(err, where);
        if (err->code) err->code = EXIT_BAD_INPUT;
    }
    free(text);
    return !err->code;
}

// The topic that argv[*i] asks help about, "" without one; NULL: it asks for no help.
static const char *help_topic(int argc, char **argv, int *i) {
    const char *argument = argv[*i];
    if (strcmp(argument, "--help-all") == 0) return "all";
    if (strncmp(argument, "--help=", 7) == 0) return argument + 7;
    if (index_of_word("help|-h|--help", argument) < 0) return NULL;
    return *i + 1 < argc ? argv[++*i] : "";
}

bool options_parse(Option *table, int argc, char **argv, const char **help, Error *err) {
    *help = NULL;
    for (void **before; files; files = before) before = *files, free(files);
    for (Option *o = table; o->name; o++) {
        o->given = NOT_GIVEN;
        o->text = NULL;
        if (o->address) memset(o->address, 0, kinds[o->kind].size_bytes);
        if (o->fallback && !set_option(o, o->fallback, err)) return false;
    }
    for (int i = 1; i < argc; i++) {
        const char *topic = help_topic(argc, argv, &i);
        if (topic)
            *help = topic;
        else if (strcmp(argv[i], "--version") != 0 &&
                 !parse_one(table, argc, argv, &i, GIVEN_BY_COMMAND_LINE, err))
            return false;
    }
    return true;
}

OptionGiver option_given(const Option *table, const char *name) {
    const Option *o = find_option(table, name);
    assert(o);
    return o->given;
}

const char *options_given_besides(const Option *table, const char *list) {
    for (const Option *o = table; o->name; o++)
        if (o->given && index_of_word(list, o->name) < 0) return o->name;
    return NULL;
}

// ---- Help ---------------------------------------------------------------------------------------

enum { OPTIONS_HELP_COLUMN = 30, OPTIONS_HELP_WIDTH = 100 };

// Prints words from the help column on, wrapped; *at is the current column.
static void print_words(const char *words, int *at, FILE *out) {
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

static void print_one(const Option *o, FILE *out) {
    char left[256], tail[256] = "";
    const bool flag = o->kind == OPTION_FLAG, choice = o->kind == OPTION_CHOICE,
               optional = o->choices && !choice,
               on = flag && o->fallback && strcmp(o->fallback, "true") == 0;
    snprintf(left, sizeof left, optional ? "  --%s%s [%s]%s" : "  --%s%s %s%s", on ? "[no-]" : "",
             o->name, kinds[o->kind].placeholder, choice ? o->choices : "");
    if (on || (!flag && o->fallback && o->fallback[0]))
        snprintf(tail, sizeof tail, "(default: %s)", on ? "on" : o->fallback);
    fprintf(out, "%-*s", OPTIONS_HELP_COLUMN - 1, left);
    if (strlen(left) >= OPTIONS_HELP_COLUMN - 1) fprintf(out, "\n%*s", OPTIONS_HELP_COLUMN - 1, "");
    int at = OPTIONS_HELP_COLUMN - 1;
    print_words(o->help, &at, out);
    print_words(tail, &at, out);
    fprintf(out, "\n");
}

bool options_print_help(const Option *table, const char *usage, const char *first,
                        const char *topic, FILE *out, Error *err) {
    const bool all = strcmp(topic, "all") == 0, few = !topic[0];
    bool in_group = false;
    int shown = 0, rest = 0;
    const char *name = topic + strspn(topic, "-");
    if (all || few) fprintf(out, "usage: %s\n%s", usage, few ? "\n" : "");
    for (const Option *o = table; o->name; o++) {
        if (o->kind == OPTION_KIND_GROUP) {
            in_group = strcmp(o->name, name) == 0;
            if (all || in_group) fprintf(out, "%s%s:\n", all ? "\n" : "", o->name);
        } else if (o->address && (all || in_group || strcmp(o->name, name) == 0 ||
                                  (few && index_of_word(first, o->name) >= 0))) {
            print_one(o, out);
            shown++;
        } else
            rest += o->address != NULL;
    }
    if (few)
        fprintf(out,
                "\n--help all lists the other %d options, --help NAME explains one. --no-NAME "
                "turns a switch off.\n"
                "Numbers may end in k, M, G (powers of 1000) or Ki, Mi, Gi (of 1024).\n",
                rest);
    return shown > 0 || unknown_option(table, name, err);
}

void options_parse_or_exit(Option *table, int argc, char **argv, const char *usage,
                           const char *first, const char *version) {
    const char *topic = NULL;
    bool asks_version = false;
    must(options_parse(table, argc, argv, &topic, &err));
    for (int i = 1; i < argc; i++) asks_version |= strcmp(argv[i], "--version") == 0;
    if (topic)
        must(options_print_help(table, usage, first, topic, stdout, &err));
    else if (asks_version)
        printf("%s\n", version);
    else
        return;
    exit(exit_code_of_output());
}

// ---- Values: the resolved ones, and those of an earlier run -------------------------------------

static json_t *choice_json(const Option *o) {
    char word[WORD_MAX];
    const char *list = o->choices;
    for (int i = *(const int *)o->address; i >= 0; i--) next_word(&list, word);
    return json_string(word);
}

json_t *option_json(const Option *o) {
    const void *at = o->address;
    if (o->kind == OPTION_FLAG) return json_boolean(*(const bool *)at);
    if (o->kind == OPTION_INT) return json_integer(*(const int *)at);
    if (o->kind == OPTION_INT64) return json_integer(*(const int64_t *)at);
    if (o->kind == OPTION_FLOAT) return json_float(*(const float *)at);
    if (is_text(o)) return json_text(*(const char *const *)at);
    return choice_json(o);
}

json_t *options_json(const Option *table) {
    json_t *all = json_object();
    for (const Option *o = table; o->name; o++)
        if (o->address) json_object_set_new(all, o->name, option_json(o));
    return all;
}

// The stored value of an option that was, or was not, given on this command line; NULL: none.
static const json_t *find_stored(const Option *o, const json_t *stored, const char *except,
                                 bool given) {
    if (!o->address || index_of_word(except, o->name) >= 0) return NULL;
    return (o->given != NOT_GIVEN) == given ? json_object_get(stored, o->name) : NULL;
}

// The stored value of an option as it would be typed; NULL when it is null or of another type. The
// text is in `buffer` or in the item.
static const char *stored_text(const Option *o, const json_t *item, char buffer[40]) {
    if (is_text(o) || o->kind == OPTION_CHOICE) return json_string_value(item);
    if (o->kind == OPTION_FLAG && json_is_boolean(item))
        return json_is_true(item) ? "true" : "false";
    if (o->kind == OPTION_FLAG || !json_is_number(item)) return NULL;
    const double value = json_number_value(item);
    snprintf(buffer, 40, "%.*g", fabs(value) < 1e16 && rint(value) == value ? 17 : 15, value);
    return buffer;
}

bool options_take(const Option *table, const json_t *stored, const char *except, Error *err) {
    char buffer[40];
    for (const Option *o = table; o->name && !err->code; o++) {
        const json_t *item = find_stored(o, stored, except, false);
        const char *text = item ? stored_text(o, item, buffer) : NULL;
        if (item && !text && !(is_text(o) && json_is_null(item)))
            error_set(err, EXIT_BAD_INPUT, "give it on the command line",
                      "options: --%s: expected a value of its type", o->name);
        else if (item && !set_option(o, text, err))
            err->code = EXIT_BAD_INPUT;
    }
    return !err->code;
}

// "name value", where texts are quoted
static void write_line(const Option *o, const char *value, FILE *out) {
    json_auto_t *text = json_text(value);
    char *quoted = is_text(o) ? json_dumps(text, JSON_ENCODE_ANY) : NULL;
    if (o->kind == OPTION_FLAG)
        fprintf(out, "%s%s\n", strcmp(value, "false") == 0 ? "no-" : "", o->name);
    else
        fprintf(out, "%s %s\n", o->name, quoted ? quoted : value);
    free(quoted);
}

static const char mark[] = "# Written by train_llama at each start of this run\n";

bool options_write(const Option *table, const char *except, bool resolved, const char *path,
                   Error *err) {
    char buffer[40], *text;
    size_t size;
    FILE *out = host_stream(&text, &size, "options");
    fputs(mark, out);
    for (const Option *o = table; o->name; o++) {
        if (!o->address || index_of_word(except, o->name) >= 0) continue;
        json_auto_t *is = option_json(o);
        const char *value = resolved ? stored_text(o, is, buffer) : o->text;
        const char *usual = o->kind == OPTION_FLAG && !o->fallback ? "false" : o->fallback;
        if (value && !(resolved && usual && strcmp(value, usual) == 0)) write_line(o, value, out);
    }
    fclose(out);
    char *found = file_read_all(path, JSON_MAX_CONFIG, NULL, "", &(Error){0});
    const bool ours = !path_exists(path) || (found && strncmp(found, mark, strlen(mark)) == 0);
    if (!ours) warning("%s: expected a file that a run wrote, found another: kept", path);
    const bool ok = !ours || file_replace(path, text, size, err);
    free(found);
    free(text);
    return ok;
}

void options_print_changes(const Option *table, const json_t *stored, const char *except,
                           FILE *out) {
    char was_buffer[40], is_buffer[40];
    const char *name;
    json_t *item;
    json_object_foreach((json_t *)stored, name, item) {
        if (!find_option(table, name) && index_of_word(except, name) < 0)
            fprintf(out, "resume: --%s no longer exists\n", name);
    }
    for (const Option *o = table; o->name; o++) {
        const json_t *was = find_stored(o, stored, except, true);
        if (!was) continue;
        json_auto_t *is = option_json(o);
        const char *from = stored_text(o, was, was_buffer), *to = stored_text(o, is, is_buffer);
        if (!from) from = "(none)";
        if (!to) to = "(none)";
        if (strcmp(from, to) != 0) fprintf(out, "resume: --%s %s -> %s\n", o->name, from, to);
    }
}
