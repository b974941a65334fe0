// Errors: an exit code, one line that says what was expected and found, one hint line.
//
// A parser never exits and never prints: it returns false with the Error filled, so that a test, a
// fuzzer or a retry can continue. Only main, must, error_exit, exit_with and refused memory
// (memory.h) end the program.
#pragma once

#include <stdarg.h>
#include <stdbool.h>  // these four are for files that include this one
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

// Exit codes: a contract with scripts; each error line belongs to exactly one
enum {
    EXIT_DONE = 0,
    EXIT_USAGE = 2,      // options
    EXIT_BAD_INPUT = 3,  // a file whose contents violate its format
    EXIT_DISK = 4,       // the file system refused
    EXIT_HOST_MEMORY = 5,
    EXIT_DEVICE_MEMORY = 6,
    EXIT_DIVERGED = 7,  // non-finite or diverged
    EXIT_PEER_LOST = 8,
    EXIT_CHECKPOINT_MISFIT = 9,  // a checkpoint of another model, data set or plan
    EXIT_DIR_IN_USE = 10,
    EXIT_DEVICE_ERROR = 11,
    EXIT_RESUMABLE = 75,  // stopped by a signal, checkpoint written
};

typedef struct {
    int code;         // one of the exit codes above; 0: no error
    char what[1024];  // "path: what, expected, found"
    char hint[512];   // how to fix it; empty: error_print chooses a hint by the exit code
} Error;

// Fills *err and returns false, so that a parser can `return error_set(...)`. The first error wins:
// an Error that is already set does not change. Text that does not fit is cut off, and control
// characters are escaped. On 64-bit Linux, int64_t is %ld and uint64_t %lu.
__attribute__((format(printf, 4, 5))) bool error_set(Error *err, int code, const char *hint,
                                                     const char *format, ...);

// The same from a va_list, whatever *err was.
__attribute__((format(printf, 4, 0))) void error_fill(Error *err, int code, const char *hint,
                                                      const char *format, va_list args);

// error_set for a file whose contents violate its format, with the default hint.
#define bad_input(err, ...) error_set(err, EXIT_BAD_INPUT, "", __VA_ARGS__)

// Puts "prefix: " in front of the message. Returns false.
bool error_prefix(Error *err, const char *prefix);

// "path: what: strerror(errno)" with EXIT_DISK. Returns false.
bool disk_error(Error *err, const char *path, const char *what);

// Writes the error line and the hint line to stderr, after flushing stdout.
void error_print(const Error *err);

// error_print, then exit with the code. If error_hook is set it is called first: one of several
// ranks reports its error there and does not return.
extern void (*error_hook)(const Error *err);
__attribute__((noreturn)) void error_exit(const Error *err);
bool error_waits(void);  // another thread is waiting in error_exit for that exit

// An Error as error_set fills it, and error_exit.
__attribute__((noreturn, format(printf, 3, 4))) void exit_with(int code, const char *hint,
                                                               const char *format, ...);

// For a program that only prints: EXIT_DONE, or exits with EXIT_DISK if output was lost.
int exit_code_of_output(void);

// Exits with the error of a call that fails: must(dir_sync(path, &err)). It declares that err.
#define must(call_)                     \
    do {                                \
        Error err = {0};                \
        if (!(call_)) error_exit(&err); \
    } while (0)

// One "warning: " line on stderr, unless warnings are off: rank 0 alone warns.
extern bool warnings_off;
__attribute__((format(printf, 1, 2))) void warning(const char *format, ...);

// ---- The last line of a terminal, which can be rewritten ----------------------------------------
// Errors and warnings erase it first.

// Width in columns; 0: not a terminal, or one of unknown width, such as mpirun's.
int terminal_width(FILE *to);

// Shows the work in progress, until line_erase. Both do nothing without a terminal.
__attribute__((format(printf, 2, 3))) void line_show(FILE *to, const char *format, ...);
void line_erase(FILE *to);

// ---- Text in messages ---------------------------------------------------------------------------

// Copies text into a buffer of `capacity` bytes, NUL included, and cuts off the rest.
void text_copy(char *out, size_t capacity, const char *text);

// The plural ending: "" for 1, else "s".
const char *text_plural(int64_t n);

// Appends ", " and an item, or just the first one, cut off if the list is full.
__attribute__((format(printf, 3, 4))) void text_list(char *list, size_t capacity,
                                                     const char *format, ...);

// Replaces control characters by \xNN in place, so that no file name can forge a second log line.
void text_sanitize(char *text, size_t capacity);
