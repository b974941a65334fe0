// Command-line options: one table, as in run_options.c, parses, documents and logs them.
//
// Strict: `--name value` or `--name=value`, whole numbers (1000, 1e3, 1k) for integer options, no
// abbreviations, no positional arguments. A flag is `--name`, or `--no-name` to switch off one that
// is on by default. Not getopt_long: it accepts abbreviations, reorders arguments and has global
// state.
#pragma once

#include <jansson.h>

#include "error.h"

typedef enum {
    OPTION_KIND_GROUP,  // a title in --help
    OPTION_KIND_HINT,   // not an option: names "a|b|c*" of other programs, with our replacement
    OPTION_FLAG,        // bool *
    OPTION_INT,         // int *
    OPTION_INT64,       // int64_t *
    OPTION_FLOAT,       // float *
    OPTION_STRING,      // const char **, into argv, the table or stored values
    OPTION_DIRECTORY,   // the same, shown as DIR in --help
    OPTION_CHOICE,      // int *: index into choices
} OptionKind;

typedef enum { NOT_GIVEN, GIVEN_BY_FILE, GIVEN_BY_COMMAND_LINE } OptionGiver;

typedef struct {
    const char *name;  // without the dashes
    OptionKind kind;
    void *address;
    const char *fallback;  // default as text, parsed like an argument; NULL: NULL, 0 or false
    const char *choices;   // CHOICE: "a|b|c". Others: value of a bare `--name`; NULL: required
    double min, max;       // numbers, inclusive; both 0: the type's own range
    const char *help;
    OptionGiver given;  // set by options_parse, also for --no-name
    const char *text;   // as it was given; NULL: it was not
} Option;

// Rows of a table. The kind of a number follows from the type of its variable.
#define OPTION(name_, kind_, address_, fallback_, choices_, min_, max_, help_) \
    { name_, kind_, address_, fallback_, choices_, min_, max_, help_, NOT_GIVEN, NULL }
#define FLAG(name_, value_, help_) OPTION(name_, OPTION_FLAG, &(value_), NULL, NULL, 0, 0, help_)
#define TEXT(name_, value_, default_, help_) \
    OPTION(name_, OPTION_STRING, &(value_), default_, NULL, 0, 0, help_)
#define DIRECTORY(name_, value_, default_, help_) \
    OPTION(name_, OPTION_DIRECTORY, &(value_), default_, NULL, 0, 0, help_)
#define CHOICE(name_, value_, default_, choices_, help_) \
    OPTION(name_, OPTION_CHOICE, &(value_), default_, choices_, 0, 0, help_)
#define NUMBER(name_, value_, default_, min_, max_, help_) \
    OPTION(name_, OPTION_NUMBER(value_), &(value_), default_, NULL, min_, max_, help_)
#define OPTION_NUMBER(value_) \
    _Generic(value_, int : OPTION_INT, int64_t : OPTION_INT64, float : OPTION_FLOAT)
#define HINT(name_, hint_) OPTION(name_, OPTION_KIND_HINT, NULL, NULL, NULL, 0, 0, hint_)
#define OPTION_GROUP(title_) OPTION(title_, OPTION_KIND_GROUP, NULL, NULL, NULL, 0, 0, NULL)
#define OPTION_END OPTION(NULL, OPTION_KIND_GROUP, NULL, NULL, NULL, 0, 0, NULL)

// ---- Parsing ------------------------------------------------------------------------------------

// Sets every option to its default, then to its argument. *help: the topic of --help, "" without
// one, "all" for --help-all; NULL: no help requested. Prints nothing. Errors are EXIT_USAGE.
//
// --options FILE, if the table has it, reads a file of options, whatever its place: the command
// line wins. A line is "name value", "--name value", "name=value" or "name: value"; of a name given
// twice the last counts; # begins a comment; a value in quotes is a JSON string. Errors in it are
// EXIT_BAD_INPUT.
bool options_parse(Option *table, int argc, char **argv, const char **help, Error *err);

// The same for main(): prints help, or the version, and exits 0; an error prints and exits 2.
void options_parse_or_exit(Option *table, int argc, char **argv, const char *usage,
                           const char *first, const char *version);

// Who gave --name or --no-name, if anyone did? The table has an option of that name.
OptionGiver option_given(const Option *table, const char *name);

// The first option given that is not in the list "a|b|c"; NULL: none.
const char *options_given_besides(const Option *table, const char *list);

// Prints them aligned, within 100 columns, with defaults and choices. topic "": the options in
// `first` ("a|b|c"); "all": all by group; else one option, with or without dashes, or one group.
bool options_print_help(const Option *table, const char *usage, const char *first,
                        const char *topic, FILE *out, Error *err);

// ---- Values: the resolved ones, and those of an earlier run -------------------------------------

// One option's value, or an object of all options.
json_t *option_json(const Option *o);
json_t *options_json(const Option *table);

// After options_parse: takes from `stored`, made by options_json, every option that was
// not given, except those named in `except` ("out|resume"). An option missing
// from `stored` keeps its default. Errors are EXIT_BAD_INPUT. Strings point into `stored`.
bool options_take(const Option *table, const json_t *stored, const char *except, Error *err);

// Writes a file for --options, without those named in `except`: the options that were given, or if
// resolved all whose values are not the default. Failures are EXIT_DISK.
bool options_write(const Option *table, const char *except, bool resolved, const char *path,
                   Error *err);

// Prints "resume: --steps 300 -> 400" for each given option whose value differs from the stored
// one, and names stored options that no longer exist.
void options_print_changes(const Option *table, const json_t *stored, const char *except,
                           FILE *out);
