#include "options.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dir.h"
#include "file.h"
#include "json.h"
#include "memory.h"
#include "signals.h"

// ---- Lists of words -----------------------------------------------------------------------------

enum { WORD_MAX = OPTION_TEXT_MAX, FILE_MAX_BYTES = 1 << 26 };  // more than a command line gives

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

struct OptionGiven {
    OptionGiver by;
    const char *text;  // as it was given
};

static bool is_text(const Option *o) {
    return o->kind == OPTION_STRING || o->kind == OPTION_DIRECTORY;
}

static void *value_of(const OptionSet *set, const Option *o) { return (char *)set + o->offset; }

static struct OptionGiven *given(const OptionSet *set, const Option *o) {
    return &set->given[o - set->table];
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
static bool set_number(const Option *o, const char *text, void *at, Error *err) {
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
    if (o->kind == OPTION_INT) *(int *)at = (int)value;
    if (o->kind == OPTION_INT64) *(int64_t *)at = (int64_t)value;
    if (o->kind == OPTION_FLOAT) *(float *)at = (float)(double)value;
    return true;
}

static bool set_option(const OptionSet *set, const Option *o, const char *text, Error *err) {
    void *at = value_of(set, o);
    char expected[200];
    if (o->kind == OPTION_DIRECTORY && !*text) return bad_value(o, text, "a path", err);
    if (is_text(o)) return *(const char **)at = text, true;
    if (o->kind == OPTION_FLAG) return *(bool *)at = strcmp(text, "true") == 0, true;
    if (o->kind != OPTION_CHOICE) return set_number(o, text, at, err);
    snprintf(expected, sizeof expected, "one of %s", o->choices);
    *(int *)at = index_of_word(o->choices, text);
    return *(int *)at >= 0 || bad_value(o, text, expected, err);
}

void *options_memory(OptionSet *set, size_t bytes) {
    void **block = host_calloc(sizeof *block + bytes, 1, "options");
    *block = set->memory;
    set->memory = block;
    return block + 1;
}

void options_free(OptionSet *set) {
    for (void **block = set->memory; block; block = set->memory) {
        set->memory = *block;
        free(block);
    }
}

void options_open(OptionSet *set, const Option *table) {
    size_t rows = 0;
    while (table[rows].name) rows++;
    *set = (OptionSet){.table = table};
    set->given = options_memory(set, rows * sizeof *set->given);
    for (const Option *o = table; o->name; o++) {
        if (is_option(o)) memset(value_of(set, o), 0, kinds[o->kind].size_bytes);
        if (o->fallback) must(set_option(set, o, o->fallback, &err));
    }
}

// ---- Parsing ------------------------------------------------------------------------------------

// NULL: not found
static const Option *find_option(const Option *table, const char *name) {
    for (const Option *o = table; o->name; o++)
        if (is_option(o) && strcmp(o->name, name) == 0) return o;
    return NULL;
}

// Letters outside the common beginning and end of two words. *beginning: letters of the beginning,
// without a dash at its end.
static size_t distance(const char *a, const char *b, size_t *beginning) {
    const size_t n = strlen(a), m = strlen(b), least = n < m ? n : m;
    size_t first = 0, last = 0;
    while (first < least && a[first] == b[first]) first++;
    while (last < least - first && a[n - 1 - last] == b[m - 1 - last]) last++;
    *beginning = first > 0 && a[first - 1] == '-' ? first - 1 : first;
    return n + m - least - first - last;
}

// The hint names our option if this is another program's, misspelt, or begins with the first word
// that was typed. Returns false.
static bool unknown_option(const Option *table, const char *argument, Error *err) {
    char name[WORD_MAX], hint[WORD_MAX + 30] = "--help all lists all options";
    snprintf(name, sizeof name, "%.*s", (int)strcspn(argument, "="), argument);
    for (char *p = name; (p = strchr(p, '_'));) *p = '-';
    const char *bare = strncmp(name, "--", 2) == 0 ? name + 2 : name, *known = NULL;
    const size_t first_word = strcspn(bare, "-");
    size_t least = 3, most = first_word < 4 ? SIZE_MAX : first_word - 1, common;
    const Option *near = NULL, *alike = NULL;
    for (const Option *o = table; o->name; o++) {
        if (!known && o->kind == OPTION_KIND_HINT && index_of_word(o->name, bare) >= 0)
            known = o->help;
        if (!is_option(o)) continue;
        const size_t far = distance(bare, o->name, &common);
        if (far < least && far * 2 < strlen(bare)) least = far, near = o;
        if (common > most) most = common, alike = o;
    }
    if (near || alike)
        snprintf(hint, sizeof hint, "did you mean --%s?", (near ? near : alike)->name);
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

// Parses argv[*i]; advances *i when the value is the next argument.
static bool parse_one(OptionSet *set, int argc, char **argv, int *i, OptionGiver giver,
                      Error *err) {
    char name[WORD_MAX];
    const char *argument = argv[*i], *equals = strchr(argument, '=');
    if (argument[0] != '-' || !argument[1])
        return error_set(err, EXIT_USAGE,
                         "options are --name value, with one value each: quote a pattern, so that "
                         "the shell leaves it as it is",
                         "%.100s: unexpected argument", argument);
    if (argument[1] != '-') return unknown_option(set->table, argument, err);
    snprintf(name, sizeof name, "%.*s", (int)strcspn(argument + 2, "="), argument + 2);
    const bool off = !find_option(set->table, name) && strncmp(name, "no-", 3) == 0;
    const Option *o = find_option(set->table, name + (off ? 3 : 0));
    if (!o && giver == GIVEN_BY_RUN) return warning("--%s no longer exists", name), true;
    if (!o || (off && o->kind != OPTION_FLAG)) return unknown_option(set->table, argument, err);
    const bool flag = o->kind == OPTION_FLAG;
    if (flag && equals)
        return error_set(err, EXIT_USAGE, "switch it off with --no-NAME",
                         "--%s: expected no value, found %.100s", o->name, equals);
    const char *value =
        flag ? (off ? "false" : "true") : argument_value(o, equals, argc, argv, i, err);
    if (!value || giver < given(set, o)->by) return value != NULL;
    *given(set, o) = (struct OptionGiven){giver, value};
    return set_option(set, o, value, err) &&
           (strcmp(o->name, "options") != 0 ||
            options_read(set, value, GIVEN_BY_FILE, "give a file with one option a line", err));
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

bool options_read(OptionSet *set, const char *path, OptionGiver giver, const char *hint,
                  Error *err) {
    char where[IO_PATH_MAX + 20];
    AUTO_FREE char *text = file_read_all(path, FILE_MAX_BYTES, NULL, hint, err);
    if (!text) return false;
    char *at = options_memory(set, 5 * (strlen(text) + 1));
    char *rest = text + mark_bytes(text);
    for (int number = 1, i = 0; rest && !err->code; number++, i = 0) {
        if (line_argument(strsep(&rest, "\n"), at, err)) {
            if (strncmp(at, "--options", 9) == 0)
                error_set(err, EXIT_USAGE, "name that file, too, on the command line",
                          "expected no --options in a file of options");
            parse_one(set, 1, &at, &i, giver, err);
        }
        at += strlen(at) + 1;
        snprintf(where, sizeof where, "%s:%d", path, number);
        if (err->code) error_prefix(err, where), err->code = EXIT_BAD_INPUT;
    }
    return !err->code;
}

// The topic that argv[*i] asks help about, "" without one; NULL: it asks for no help.
static const char *help_topic(int argc, char **argv, int *i) {
    const char *argument = argv[*i];
    if (strcmp(argument, "--help-all") == 0) return "all";
    if (strcmp(argument, "--version") == 0) return "version";
    if (strncmp(argument, "--help=", 7) == 0) return argument + 7;
    if (index_of_word("help|-h|--help", argument) < 0) return NULL;
    return *i + 1 < argc ? argv[++*i] : "";
}

bool options_parse(OptionSet *set, int argc, char **argv, const char **help, Error *err) {
    *help = NULL;
    for (int i = 1; i < argc; i++) {
        const char *topic = help_topic(argc, argv, &i);
        if (topic)
            *help = topic;
        else if (!parse_one(set, argc, argv, &i, GIVEN_BY_COMMAND_LINE, err))
            return false;
    }
    return true;
}

OptionGiver option_given(const OptionSet *set, const char *name) {
    const Option *o = find_option(set->table, name);
    assert(o);
    return given(set, o)->by;
}

const char *options_given_besides(const OptionSet *set, const char *list) {
    for (const Option *o = set->table; o->name; o++)
        if (given(set, o)->by && index_of_word(list, o->name) < 0) return o->name;
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
        } else if (is_option(o) && (all || in_group || strcmp(o->name, name) == 0 ||
                                    (few && index_of_word(first, o->name) >= 0))) {
            print_one(o, out);
            shown++;
        } else
            rest += is_option(o);
    }
    if (few)
        fprintf(out,
                "\n--help all lists the other %d options, --help NAME explains one. --no-NAME "
                "turns a switch off.\n"
                "Numbers may end in k, M, G (powers of 1000) or Ki, Mi, Gi (of 1024).\n",
                rest);
    return shown > 0 || unknown_option(table, name, err);
}

void options_parse_or_exit(OptionSet *set, int argc, char **argv, const char *usage,
                           const char *first, const char *version) {
    const char *topic = NULL;
    must(options_parse(set, argc, argv, &topic, &err));
    if (!topic) return;
    signals_release();  // head and less may end before we have
    if (strcmp(topic, "version") == 0)
        printf("%s\n", version);
    else
        must(options_print_help(set->table, usage, first, topic, stdout, &err));
    exit(exit_code_of_output());
}

// ---- Values: the resolved ones, and those of an earlier run -------------------------------------

const char *option_text(const OptionSet *set, const Option *o, char buffer[OPTION_TEXT_MAX]) {
    const void *at = value_of(set, o);
    const char *list = o->choices;
    if (is_text(o)) return *(const char *const *)at;
    if (o->kind == OPTION_FLAG) return *(const bool *)at ? "true" : "false";
    for (int i = 0; o->kind == OPTION_CHOICE && i <= *(const int *)at; i++)
        next_word(&list, buffer);
    json_auto_t *fewest_digits = json_float(o->kind == OPTION_FLOAT ? *(const float *)at : 0);
    if (o->kind == OPTION_INT) snprintf(buffer, OPTION_TEXT_MAX, "%d", *(const int *)at);
    if (o->kind == OPTION_INT64) snprintf(buffer, OPTION_TEXT_MAX, "%ld", *(const int64_t *)at);
    if (o->kind == OPTION_FLOAT)
        snprintf(buffer, OPTION_TEXT_MAX, "%.15g", json_number_value(fewest_digits));
    return buffer;
}

json_t *options_json(const OptionSet *set) {
    char buffer[OPTION_TEXT_MAX];
    json_t *all = json_object();
    for (const Option *o = set->table; o->name; o++) {
        if (!is_option(o)) continue;
        const char *text = option_text(set, o, buffer);
        json_object_set_new(all, o->name,
                            is_text(o) || o->kind == OPTION_CHOICE ? json_text(text)
                            : o->kind == OPTION_FLOAT ? json_float(*(float *)value_of(set, o))
                                                      : json_loads(text, JSON_DECODE_ANY, NULL));
    }
    return all;
}

void options_take(OptionSet *to, const OptionSet *from, const char *except) {
    for (const Option *o = to->table; o->name; o++)
        if (is_option(o) && !given(to, o)->by && index_of_word(except, o->name) < 0)
            memcpy(value_of(to, o), value_of(from, o), kinds[o->kind].size_bytes);
}

void options_print_changes(const OptionSet *now, const OptionSet *was, const char *except,
                           FILE *out) {
    char buffers[2][OPTION_TEXT_MAX];
    for (const Option *o = now->table; o->name; o++) {
        if (!is_option(o) || index_of_word(except, o->name) >= 0) continue;
        if (!given(was, o)->by && !is_text(o)) continue;  // it was added since
        const char *from = option_text(was, o, buffers[0]) ?: "(none)",
                   *to = option_text(now, o, buffers[1]) ?: "(none)";
        if (strcmp(from, to) != 0) fprintf(out, "resume: --%s %s -> %s\n", o->name, from, to);
    }
}

static const char mark[] = "# Written by train_llama at each start of this run\n";

char *options_file(const OptionSet *set, const char *except, bool resolved) {
    char buffer[OPTION_TEXT_MAX], *text;
    size_t size;
    FILE *out = host_stream(&text, &size, "options");
    fputs(mark, out);
    for (const Option *o = set->table; o->name; o++) {
        if (!is_option(o) || index_of_word(except, o->name) >= 0) continue;
        const char *value = resolved ? option_text(set, o, buffer) : given(set, o)->text;
        if (!value) continue;
        json_auto_t *json = json_text(value);
        AUTO_FREE char *quoted = is_text(o) ? json_dumps(json, JSON_ENCODE_ANY) : NULL;
        if (o->kind == OPTION_FLAG)
            fprintf(out, "%s%s\n", strcmp(value, "false") == 0 ? "no-" : "", o->name);
        else
            fprintf(out, "%s %s\n", o->name, quoted ?: value);
    }
    fclose(out);
    return text;
}

bool options_write(const char *text, const char *path, Error *err) {
    bool exists;
    AUTO_FREE char *found = file_read_all(path, FILE_MAX_BYTES, NULL, "", &(Error){0});
    if (!path_find(path, &exists, err)) return false;
    const bool ours = !exists || (found && strncmp(found, mark, strlen(mark)) == 0);
    if (!ours) warning("%s: expected a file that a run wrote, found another: kept", path);
    return !ours || file_replace(path, text, strlen(text), err);
}
