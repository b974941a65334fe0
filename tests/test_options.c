// data/base/options.h: strict parsing, useful errors, help text within the line length.
#include <math.h>

#include "../data/base/file.h"
#include "../data/base/json.h"
#include "../data/base/options.h"
#include "scratch.h"

typedef struct {
    OptionSet set;
    const char *train_data, *resume, *out, *options;
    int layout, steps, any_int;
    int64_t seed, any_int64;
    float lr, any_float;
    bool deterministic, overlap, no_bias;
} Values;

#define OPTION_VALUES Values
static const Option table[] = {
    OPTION_GROUP("data"),
    OPTION("train-data", OPTION_DIRECTORY, train_data, NULL, NULL, 0, 0, "shards to train on"),
    OPTION("layout", OPTION_CHOICE, layout, "packed", "packed|padded|rows|repad", 0, 0,
           "how a batch is filled"),
    OPTION_GROUP("run"),
    OPTION("steps", OPTION_INT, steps, "1000", NULL, 1, 1e9, "optimizer steps"),
    OPTION("seed", OPTION_INT64, seed, "-1", NULL, -1, 9e15, "of shuffling and initial weights"),
    OPTION("lr", OPTION_FLOAT, lr, "3e-4", NULL, 0, 1, "learning rate at the peak"),
    OPTION("resume", OPTION_STRING, resume, NULL, "newest", 0, 0,
           "continue from a checkpoint; without a directory from the newest one in the output "
           "directory that is found to be intact, and from the start if there is none"),
    OPTION("out", OPTION_STRING, out, "out", NULL, 0, 0, "output directory"),
    OPTION("deterministic", OPTION_FLAG, deterministic, NULL, NULL, 0, 0,
           "the same bits every time"),
    OPTION("overlap", OPTION_FLAG, overlap, "true", NULL, 0, 0, "communication during backward"),
    HINT("output-dir|-o", "it is --out"),
    HINT("sav*", "nothing is saved"),
    OPTION("options", OPTION_STRING, options, NULL, NULL, 0, 0, "a file of options"),
    OPTION("no-bias", OPTION_FLAG, no_bias, NULL, NULL, 0, 0, "a flag whose name begins with no-"),
    OPTION("any-int", OPTION_INT, any_int, NULL, NULL, 0, 0, "any int"),
    OPTION("any-int64", OPTION_INT64, any_int64, NULL, NULL, 0, 0, "any int64"),
    OPTION("any-float", OPTION_FLOAT, any_float, NULL, NULL, 0, 0, "any float"),
    OPTION_END,
};

enum { MAX_ARGS = 32 };

// Splits a command line at spaces ("_" stands for an empty argument); returns argc.
static int split(const char *line, char *argv[MAX_ARGS + 1]) {
    static char words[2][512];
    static int next;
    char *rest = words[next = 1 - next];
    int argc = 0;
    snprintf(rest, sizeof words[0], "program %s", line);
    for (char *word; argc < MAX_ARGS && (word = strsep(&rest, " "));)
        if (word[0]) argv[argc++] = strcmp(word, "_") == 0 ? word + 1 : word;
    argv[argc] = NULL;
    return argc;
}

static Values o;

// *v is open, or has never been.
static bool parse_into(Values *v, const char *line, Error *err) {
    char *argv[MAX_ARGS + 1];
    const char *help = NULL;
    memset(err, 0, sizeof *err);
    options_free(&v->set);
    memset(v, 0x55, sizeof *v);
    options_open(&v->set, table);
    bool ok = options_parse(&v->set, split(line, argv), argv, &help, err);
    CHECK(ok == (err->code == 0) && (ok || err->code == EXIT_USAGE));
    CHECK(!help == !strstr(line, "help"));
    return ok;
}

static bool parse(const char *line, Error *err) { return parse_into(&o, line, err); }

#define must_parse(line_) MUST(parse(line_, &err))

// A command line sets the options that it names, as they are stored; others keep their defaults.
TEST(values_are_read_in_every_spelling) {
    static const char *const cases[][2] = {
        {"", ""},
        {"--steps 5 --layout=rows --lr=1e-3 --train-data a=b --out=--x --deterministic",
         "'steps': 5, 'layout': 'rows', 'lr': 1e-3, 'train-data': 'a=b', 'out': '--x',"
         "'deterministic': true"},
        {"--steps 5 --steps 6 --no-overlap --overlap --no-bias --out _",
         "'steps': 6, 'overlap': true, 'no-bias': true, 'out': ''"},
        {"--no-no-bias --no-deterministic --no-overlap", "'overlap': false"},
        {"--layout Packed", ""},
        {"--resume", "'resume': 'newest'"},
        {"--resume dir --steps 3", "'resume': 'dir', 'steps': 3"},
        {"--any-int -2147483648 --any-float -3.4e38",
         "'any-int': -2147483648, 'any-float': -3.4e38"},
        {"--any-int 2147483647 --any-float -5.", "'any-int': 2147483647, 'any-float': -5"},
        {"--any-int 007 --any-int64 -0 --any-float +1E-3", "'any-int': 7, 'any-float': 1e-3"},
        {"--any-int 1e3 --any-int64 -2.50E+6 --steps 1.2340e3",
         "'any-int': 1000, 'any-int64': -2500000, 'steps': 1234"},
        {"--any-int .5e1 --steps 5.e0 --any-int64 0e999", "'any-int': 5, 'steps': 5"},
        {"--any-int 4k --any-int64 1.5M --steps 1K --any-float .5k",
         "'any-int': 4000, 'any-int64': 1500000, 'steps': 1000, 'any-float': 500"},
        {"--any-int 4Ki --any-int64 -2Gi --steps 1e1k --any-float .5",
         "'any-int': 4096, 'any-int64': -2147483648, 'steps': 10000, 'any-float': 0.5"}};
    static const char defaults[] =
        "{'train-data': null, 'layout': 'packed', 'steps': 1000, 'seed': -1, 'lr': 3e-4,"
        "'resume': null, 'out': 'out', 'deterministic': false, 'overlap': true, 'no-bias': false,"
        "'any-int': 0, 'any-int64': 0, 'any-float': 0}";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *name, *given = printed("{%s}", cases[i][1]);
        json_t *value;
        Error err = {0};
        json_auto_t *expected = json_parse(json_of(defaults), strlen(defaults), "", &err);
        json_auto_t *other = json_parse(json_of(given), strlen(given), "", &err);
        CHECK_MSG(expected && other, "%s", err.what);
        json_object_update(expected, other);
        must_parse(cases[i][0]);
        json_auto_t *found = options_json(&o.set);
        json_object_foreach(expected, name, value) {
            const json_t *item = json_object_get(found, name);
            CHECK_MSG(
                json_equal(value, item) || (json_is_number(value) && json_is_number(item) &&
                                            json_number_value(value) == json_number_value(item)),
                "%s: %s", cases[i][0], name);
        }
    }
    must_parse("--any-int64 9.223372036854775807e18");  // exactly
    CHECK(o.any_int64 == INT64_MAX);
    must_parse("--any-int64 -9223372036854775808");
    CHECK(o.any_int64 == INT64_MIN);
}

TEST(errors_have_a_cause_and_a_hint) {
    static const char *const bad[][3] = {
        {"--stps 3", "--stps: unknown option", "did you mean --steps?"},
        {"--any_int=3", "--any_int=3: unknown option", "did you mean --any-int?"},
        {"-o x", "-o: unknown option", "it is --out"},
        {"--out a b", "b: unexpected argument", "quote a pattern"},
        {"--no-steps", "unknown option", "--help all"},
        {"--save_total 3", "--save_total: unknown option", "nothing is saved"},
        {"--sead 3", "--sead: unknown option", "did you mean --seed?"},
        {"--sa 3", "--sa: unknown option", "--help all"},
        {"--over_lap-now", "--over_lap-now: unknown option", "did you mean --overlap?"},
        {"--any-int6x 3", "--any-int6x: unknown option", "did you mean --any-int64?"},
        {"--resume-from-checkpoint 3", "unknown option", "did you mean --resume?"},
        {"--train-data-set 3", "unknown option", "did you mean --train-data?"},
        {"--any-flo 3", "unknown option", "did you mean --any-float?"},
        {"--any-thing 3", "unknown option", "--help all"},
        {"--data x", "unknown option", ""},  // a group's title is not an option
        {"_", "unexpected argument", "--name value"},
        {"--steps", "--steps: expected a value", ""},
        {"--steps --lr 1", "--steps: expected a value", "--name=value"},
        {"--steps 1e10", "expected a number from 1 to 1000000000, found \"1e10\"", ""},
        {"--any-int64 9.223372036854775808e18", "expected a number from", ""},
        {"--output-dir x", "--output-dir: unknown option", "it is --out"},
        {"--steps 0", "expected a number from 1 to 1000000000, found \"0\"", ""},
        {"--seed -2", "expected a number from -1 to", ""},
        {"--any-int 2147483648", "expected a number from -2147483648 to 2147483647", ""},
        {"--lr nan", "--lr: expected a number, found \"nan\"", ""},
        {"--lr 1.5", "expected a number from 0 to 1, found \"1.5\"", ""},
        {"--any-float 1e39", "expected a number from", ""},
        {"--layout pading", "expected one of packed|padded|rows|repad, found \"pading\"",
         "--help layout"},
        {"--train-data _", "--train-data: expected a path, found \"\"", "--help train-data"},
        {"--deterministic=1", "expected no value, found =1", "--no-"},
    };
    static const char *const wrong_steps[] = {"1e-3", "1.2345e3", "1.5", "1.2345k", "",
                                              "4m",   "4kB",      "k",   "0x10",    "1e"};
    for (int i = 0; i < 10; i++) {
        Error err;
        CHECK_MSG(!parse(printed("--steps=%s", wrong_steps[i]), &err) &&
                      strstr(err.what, "expected a whole number"),
                  "%s: %s", wrong_steps[i], err.what);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Error err;
        CHECK_MSG(!parse(bad[i][0], &err), "%s was accepted", bad[i][0]);
        CHECK_MSG(strstr(err.what, bad[i][1]), "%s: %s", bad[i][0], err.what);
        CHECK_MSG(strstr(err.hint, bad[i][2]) && err.hint[0], "%s: hint: %s", bad[i][0], err.hint);
    }
}

// A file of options with this text, followed by a command line
static bool parse_file(const char *text, const char *line, Error *err) {
    const char *path = scratch("options");
    put_file(path, text, strlen(text));
    return parse(printed("--options %s %s", path, line), err);
}

TEST(a_file_of_options) {
    Error err;
    const char *text =
        "\xef\xbb\xbf# a comment\n\nsteps 5  # of them\n  --lr=1e-3\r\nlayout: rows\n"
        "out = a b#c  \nseed 1\nseed 2\ndeterministic\nno-overlap\ntrain-data \" x\\n# y\"\n"
        "any-int\t7";
    CHECK_MSG(parse_file(text, "--seed 3 --overlap", &err), "%s", err.what);
    CHECK(o.steps == 5 && o.lr == 1e-3f && o.layout == 2 && strcmp(o.out, "a b#c") == 0);
    CHECK(o.seed == 3 && o.deterministic && o.overlap && o.any_int == 7);
    CHECK(strcmp(o.train_data, " x\n# y") == 0 && !o.resume);
    CHECK(option_given(&o.set, "steps") == GIVEN_BY_FILE && !option_given(&o.set, "resume"));
    CHECK(option_given(&o.set, "seed") == GIVEN_BY_COMMAND_LINE);
    CHECK(parse(printed("--seed 4 --options %s", scratch("options")), &err) && o.seed == 4);
    CHECK(parse_file(text, "--seed 3 --overlap", &err));
    // what it writes reads back as the same, with and without defaults
    json_auto_t *before = options_json(&o.set);
    for (int resolved = 0; resolved < 2; resolved++) {
        AUTO_FREE char *written = NULL;
        uint64_t n;
        must_parse("");
        CHECK(parse_file(text, "--seed 3 --overlap", &err));
        AUTO_FREE char *made = options_file(&o.set, "options|any-float", resolved);
        MUST(made && options_write(made, scratch("again"), &err));
        written = file_read_all(scratch("again"), 1 << 16, &n, "", &err);
        CHECK(written && !strstr(written, "resume") && !strstr(written, "options "));
        CHECK(!strstr(written, "any-int64") == !resolved);
        unlink(scratch("again"));
        CHECK(parse_file(written, "", &err));
        json_auto_t *after = options_json(&o.set);
        CHECK_MSG(json_equal(before, after), "%s", written);
    }
}

static bool parse_file_at(const char *path, Error *err) {
    options_free(&o.set);
    options_open(&o.set, table);
    return options_read(&o.set, path, GIVEN_BY_FILE, "", err);
}

// Each file's texts stay: longer files than a freed block that the next one would get, of one size
TEST(several_files_of_options) {
    char text[2][500];
    Error err;
    for (int i = 0; i < 2; i++) {
        snprintf(text[i], sizeof text[i], "%s%*s", i ? "resume two" : "out = one#\n", 400, "#");
        put_file(scratch(i ? "b" : "a"), text[i], strlen(text[i]));
    }
    CHECK(parse(printed("--options %s --options %s", scratch("a"), scratch("b")), &err));
    CHECK(strcmp(o.out, "one#") == 0 && strcmp(o.resume, "two") == 0);
    put_file(scratch("a"), "steps 5\n\0\0seed 7", 17);
    REFUSED(EXIT_BAD_INPUT, "NUL byte at 8", parse_file_at(scratch("a"), &err));
}

TEST(errors_in_a_file_of_options) {
    static const char *const bad[][2] = {
        {"steps 5\nstps 3", "options:2: --stps=3: unknown option"},
        {"# \n\nsteps x", "options:3: --steps: expected a whole number, found \"x\""},
        {"steps", "options:1: --steps: expected a value"},
        {"out \"x", "options:1: \"x: expected a string"},
        {"options options", "options:1: expected no --options"},
        {"overlap yes", "options:1: --overlap: expected no value"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_file(scratch("options"), bad[i][0], strlen(bad[i][0]));
        REFUSED(EXIT_BAD_INPUT, bad[i][1], parse_file_at(scratch("options"), &err));
    }
}

// The text that --help prints about a topic; empty: the topic is not known.
static const char *help_on(const char *topic) {
    Error err = {0};
    capture_begin();
    const bool known =
        options_print_help(table, "program [options]", "steps|layout", topic, stdout, &err);
    const char *text = capture_end();
    CHECK(known == (err.code == 0) && known == (text[0] != 0));
    return text;
}

TEST(help_fits_and_names_everything) {
    CHECK(strstr(help_on(""), "--steps N") && !strstr(help_on(""), "--lr"));
    const char *text = help_on("all");
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
        size_t length = strcspn(line, "\n");
        CHECK_MSG(length <= 100, "%.*s", (int)length, line);
        CHECK_MSG(length == 0 || line[length - 1] != ' ', "%.*s", (int)length, line);
    }
    for (const Option *p = table; p->name; p++)
        CHECK_MSG(!strstr(text, p->name) == (p->kind == OPTION_KIND_HINT), "%s", p->name);
    CHECK(strncmp(help_on("lr"), "  --lr X ", 9) == 0 && !strstr(help_on("--lr"), "--steps"));
    CHECK(strstr(help_on("data"), "--layout") && !strstr(help_on("data"), "--steps"));
    CHECK(!help_on("output-dir")[0] && !help_on("nothing")[0]);
}

// The options of one run, as its file has them, side by side with a command line that gives four of
// them, two with the values that they had
TEST(options_of_an_earlier_run_are_taken_unless_given) {
    static const char first[] =
        "--train-data a\"b --layout repad --steps 7 --seed 8999999999999999 --lr 1.7e-3 --out x "
        "--resume y --deterministic --no-overlap --any-float 1e-30 --any-int -5",
                      second[] = "--steps 9 --overlap --lr=17e-4 --layout repad";
    static Values was, empty;
    const char *expected =
        "resume: --steps 7 -> 9\nresume: --overlap false -> true\n"
        "resume: --train-data (none) -> a\"b\n";  // of a file without any option
    MUST(parse_into(&was, first, &err));
    AUTO_FREE char *text = options_file(&was.set, "out|resume|any-int64", true);
    put_file(scratch("run"), printed("%sleft 1\n", text), strlen(text) + 7);
    options_free(&was.set);
    options_open(&was.set, table);
    warnings_off = true;
    MUST(options_read(&was.set, scratch("run"), GIVEN_BY_RUN, "", &err));
    must_parse(second);
    options_take(&o.set, &was.set, "out|resume");
    CHECK(was.steps == 7 && !was.overlap && option_given(&was.set, "overlap") == GIVEN_BY_RUN);
    capture_begin();
    options_print_changes(&o.set, &was.set, "out|resume", stdout);
    options_open(&empty.set, table);
    options_print_changes(&o.set, &empty.set, "out|resume", stdout);
    const char *changes = capture_end();
    CHECK_MSG(strcmp(changes, expected) == 0, "%s", changes);
    CHECK(strcmp(o.train_data, "a\"b") == 0 && o.layout == 3 && o.seed == 8999999999999999);
    CHECK(o.lr == 1.7e-3f && o.deterministic && o.any_float == 1e-30f);
    CHECK(o.any_int == -5 && o.steps == 9 && o.overlap && o.any_int64 == 0);
    CHECK(strcmp(o.out, "out") == 0 && !o.resume);  // excepted
    options_free(&empty.set);
    CHECK(!option_given(&o.set, "seed") && option_given(&o.set, "steps"));
    options_free(&was.set);
}

TEST(an_option_of_several_mebibytes_is_read_back) {
    AUTO_FREE char *value = calloc((1 << 22) + 1, 1);
    must_parse("");
    o.out = memset(value, '"', 1 << 22);
    AUTO_FREE char *text = options_file(&o.set, "options|any-float", true);
    MUST(options_write(text, scratch("long"), &err));
    MUST(options_read(&o.set, scratch("long"), GIVEN_BY_RUN, "", &err));
    CHECK(o.out != value && strcmp(o.out, value) == 0);
}

TEST_MAIN()
