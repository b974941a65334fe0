// Command-line options: one table, as in run_options.c, parses, documents and logs them.
//
// Strict: `--name value` or `--name=value`, whole numbers (1000, 1e3, 1k) for integer options, no
// abbreviations, no positional arguments. A flag is `--name`, or `--no-name` to switch off one that
// is on by default. Not getopt_long: it accepts abbreviations, reorders arguments and has global
// state. The values are members of a struct, so that two of them can stand side by side.
#pragma once

#include <jansson.h>

#include "error.h"

typedef enum {
    OPTION_KIND_GROUP,  // a title in --help
    OPTION_KIND_HINT,   // not an option: names "a|b|c*" of other programs, with our replacement
    OPTION_FLAG,        // bool
    OPTION_INT,         // int
    OPTION_INT64,       // int64_t
    OPTION_FLOAT,       // float
    OPTION_STRING,      // const char *, into argv, the table or the memory of the set
    OPTION_DIRECTORY,   // the same, not empty, shown as DIR in --help
    OPTION_CHOICE,      // int: index into choices
} OptionKind;

typedef struct {
    const char *name;  // without the dashes
    OptionKind kind;
    size_t offset;         // of the value in its struct
    const char *fallback;  // default as text, parsed like an argument; NULL: NULL, 0 or false
    const char *choices;   // CHOICE: "a|b|c". Others: value of a bare `--name`; NULL: required
    double min, max;       // numbers, inclusive; both 0: the type's own range
    const char *help;
} Option;

// Rows of a table. OPTION_VALUES, which the table's file defines, is the struct of the values. The
// kind of a number follows from the type of its member.
#define OPTION(name_, kind_, member_, fallback_, choices_, min_, max_, help_) \
    { name_, kind_, offsetof(OPTION_VALUES, member_), fallback_, choices_, min_, max_, help_ }
#define FLAG(name_, member_, help_) OPTION(name_, OPTION_FLAG, member_, NULL, NULL, 0, 0, help_)
#define TEXT(name_, member_, default_, help_) \
    OPTION(name_, OPTION_STRING, member_, default_, NULL, 0, 0, help_)
#define DIRECTORY(name_, member_, default_, help_) \
    OPTION(name_, OPTION_DIRECTORY, member_, default_, NULL, 0, 0, help_)
#define CHOICE(name_, member_, default_, choices_, help_) \
    OPTION(name_, OPTION_CHOICE, member_, default_, choices_, 0, 0, help_)
#define NUMBER(name_, member_, default_, min_, max_, help_) \
    OPTION(name_, OPTION_NUMBER(member_), member_, default_, NULL, min_, max_, help_)
#define OPTION_NUMBER(member_)                     \
    _Generic(((OPTION_VALUES *)NULL)->member_, int \
             : OPTION_INT, int64_t                 \
             : OPTION_INT64, float                 \
             : OPTION_FLOAT)
#define HINT(name_, hint_) \
    { .name = name_, .kind = OPTION_KIND_HINT, .help = hint_ }
#define OPTION_GROUP(title_) \
    { .name = title_, .kind = OPTION_KIND_GROUP }
#define OPTION_END OPTION_GROUP(NULL)

typedef enum { NOT_GIVEN, GIVEN_BY_RUN, GIVEN_BY_FILE, GIVEN_BY_COMMAND_LINE } OptionGiver;

// The first member of the struct of the values
typedef struct {
    const Option *table;
    struct OptionGiven *given;  // by row of the table
    void **memory;              // blocks, each of which begins with the one before
} OptionSet;

static inline bool is_option(const Option *o) { return o->kind >= OPTION_FLAG; }

// Sets every option to its default. *set is freed by options_free, with the texts of its files.
void options_open(OptionSet *set, const Option *table);
void options_free(OptionSet *set);

// Zeros (bytes) that live as long as the set
void *options_memory(OptionSet *set, size_t bytes);

// ---- Parsing ------------------------------------------------------------------------------------

// Sets the options that the command line gives. *help: the topic of --help, "" without one, "all"
// for --help-all, "version" for --version; NULL: no help requested. Prints nothing. --options FILE,
// if the table has it, is read whatever its place: the command line wins. Errors are EXIT_USAGE.
bool options_parse(OptionSet *set, int argc, char **argv, const char **help, Error *err);

// The same for main(): prints help, or the version, and exits 0; an error prints and exits 2.
void options_parse_or_exit(OptionSet *set, int argc, char **argv, const char *usage,
                           const char *first, const char *version);

// Reads a file of options. A line is "name value", "--name value", "name=value" or "name: value";
// of a name given twice the last counts; # begins a comment; a value in quotes is a JSON string.
// Values of a later OptionGiver stay. GIVEN_BY_RUN: the file may be of an earlier version, so
// names that no longer exist are warnings. Errors are EXIT_BAD_INPUT; the hint is for a file that
// cannot be read.
bool options_read(OptionSet *set, const char *path, OptionGiver giver, const char *hint,
                  Error *err);

// Who gave --name or --no-name, if anyone did? The table has an option of that name.
OptionGiver option_given(const OptionSet *set, const char *name);

// The first option given that is not in the list "a|b|c"; NULL: none.
const char *options_given_besides(const OptionSet *set, const char *list);

// Prints them aligned, within 100 columns, with defaults and choices. topic "": the options in
// `first` ("a|b|c"); "all": all by group; else one option, with or without dashes, or one group.
bool options_print_help(const Option *table, const char *usage, const char *first,
                        const char *topic, FILE *out, Error *err);

// ---- Values: the resolved ones, and those of an earlier run -------------------------------------

// One option's value as it would be typed, perhaps in `buffer`; NULL: none.
enum { OPTION_TEXT_MAX = 64 };
const char *option_text(const OptionSet *set, const Option *o, char buffer[OPTION_TEXT_MAX]);

json_t *options_json(const OptionSet *set);  // an object of all

// Takes every option that was not given from `from`, a set of the same table that must outlive
// `to`, except those named in `except` ("out|resume").
void options_take(OptionSet *to, const OptionSet *from, const char *except);

// Prints "resume: --steps 300 -> 400" for each option that has another value than in `was`, if that
// was given there.
void options_print_changes(const OptionSet *now, const OptionSet *was, const char *except,
                           FILE *out);

// A file for options_read, without the options named in `except`: those that were given, as they
// were, or if resolved the values of all. The caller frees it.
char *options_file(const OptionSet *set, const char *except, bool resolved);

// Writes such a text, unless a file is there that begins otherwise: that is kept, with a warning.
// Failures are EXIT_DISK.
bool options_write(const char *text, const char *path, Error *err);
