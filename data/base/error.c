#include "error.h"

#include <errno.h>
#include <libgen.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

int terminal_width(FILE *to) {
    struct winsize size;
    const char *kind = getenv("TERM");
    if (kind && strcmp(kind, "dumb") == 0) return 0;
    return ioctl(fileno(to), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

void line_erase(FILE *to) {
    if (terminal_width(to) > 0) fputs("\r\033[K", to);
}

void line_show(FILE *to, const char *format, ...) {
    va_list args;
    if (terminal_width(to) == 0) return;
    va_start(args, format);
    line_erase(to);
    vfprintf(to, format, args);
    fflush(to);
    va_end(args);
}

void text_copy(char *out, size_t capacity, const char *text) {
    snprintf(out, capacity, "%s", text);
}

const char *text_plural(int64_t n) { return n == 1 ? "" : "s"; }

void text_list(char *list, size_t capacity, const char *format, ...) {
    size_t used = strlen(list);
    va_list args;
    if (used > 0) used += (size_t)snprintf(list + used, capacity - used, ", ");
    va_start(args, format);
    if (used < capacity) vsnprintf(list + used, capacity - used, format, args);
    va_end(args);
}

void text_sanitize(char *text, size_t capacity) {
    char clean[2048];
    size_t n = 0;
    for (const unsigned char *p = (const unsigned char *)text; *p && n + 5 < sizeof clean; p++) {
        if (*p >= 0x20 && *p != 0x7f)
            clean[n++] = (char)*p;  // UTF-8 included
        else
            n += (size_t)snprintf(clean + n, sizeof clean - n, "\\x%02x", *p);
    }
    clean[n] = 0;
    text_copy(text, capacity, clean);
}

void error_fill(Error *err, int code, const char *hint, const char *format, va_list args) {
    vsnprintf(err->what, sizeof err->what, format, args);
    text_sanitize(err->what, sizeof err->what);
    text_copy(err->hint, sizeof err->hint, hint ? hint : "");
    text_sanitize(err->hint, sizeof err->hint);
    err->code = code;
}

bool error_set(Error *err, int code, const char *hint, const char *format, ...) {
    if (err->code) return false;
    va_list args;
    va_start(args, format);
    error_fill(err, code, hint, format, args);
    va_end(args);
    return false;
}

bool error_prefix(Error *err, const char *prefix) {
    const Error was = *err;
    err->code = 0;
    return error_set(err, was.code, was.hint, "%s: %s", prefix, was.what);
}

bool disk_error(Error *err, const char *path, const char *what) {
    const char *hint = "check the disk and its permissions";
    if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)
        hint = "free some space, or write to another disk";
    return error_set(err, EXIT_DISK, hint, "%s: %s: %s", path, what, strerror(errno));
}

// Every error has a hint: without one from the parser, the exit code decides.
static const char *error_hint(const Error *err) {
    if (err->hint[0]) return err->hint;
    if (err->code == EXIT_USAGE) return "see --help";
    if (err->code == EXIT_BAD_INPUT) return "make or copy that file again, or give another one";
    if (err->code == EXIT_DISK) return "check the disk, its space and the permissions";
    return "please report this with the command that led to it";
}

// Copies text with the paths of the tools that it names: in this directory, in the program's, or
// where make install puts them.
static void name_tools(char *out, size_t capacity, const char *text) {
    static const char *const places[] = {"/", "/../share/unpad/"};
    char program[1024] = "", word[4096], found[5200];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    const char *dir = dirname(length > 0 ? program : NULL);
    size_t used = 0;
    for (size_t n; *text && used < capacity; text += n) {
        n = *text == ' ' ? 1 : strcspn(text, " ");
        snprintf(word, sizeof word, "%.*s", (int)n, text);
        const bool is_tool = strncmp(word, "scripts/", 8) == 0 || strncmp(word, "data/", 5) == 0;
        const char *tool = word;
        for (int i = 0; i < 2 && is_tool && access(tool, F_OK) != 0; i++) {
            snprintf(found, sizeof found, "%s%s%s", dir, places[i], word);
            if (access(found, F_OK) == 0) tool = found;
        }
        used += (size_t)snprintf(out + used, capacity - used, "%s", tool);
    }
}

void error_print(const Error *err) {
    char hint[4096] = "";
    fflush(stdout);
    line_erase(stderr);
    fprintf(stderr, "error: %s\n", err->what);
    name_tools(hint, sizeof hint, error_hint(err));
    fprintf(stderr, "hint: %s\n", hint);
}

void (*error_hook)(const Error *err);
static _Atomic bool waits;
bool error_waits(void) { return waits; }

void error_exit(const Error *err) {
    static atomic_flag taken = ATOMIC_FLAG_INIT;
    static _Thread_local bool ends;
    while (!ends && atomic_flag_test_and_set(&taken)) {  // another thread ends the process
        waits = true;
        pause();
    }
    ends = true;
    if (error_hook) error_hook(err);
    error_print(err);
    exit(err->code);
}

void exit_with(int code, const char *hint, const char *format, ...) {
    Error err = {0};
    va_list args;
    va_start(args, format);
    error_fill(&err, code, hint, format, args);
    error_exit(&err);
}

int exit_code_of_output(void) {
    if (fflush(stdout) != 0 || ferror(stdout))
        exit_with(EXIT_DISK, "free some space, or write elsewhere",
                  "standard output: not all could be written");
    return EXIT_DONE;
}

bool warnings_off;

void warning(const char *format, ...) {
    char text[2048], line[4096] = "";
    va_list args;
    if (warnings_off) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    name_tools(line, sizeof line, text);
    line_erase(stderr);
    fprintf(stderr, "warning: %s\n", line);  // one write: mpirun mixes what ranks write in pieces
}
