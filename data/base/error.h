// Errors: an exit code, one line that says what was expected and found, one line of hint.
//
// A parser never exits and never prints: it returns false with the Error filled, so that a test, a
// fuzzer or a retry can continue. Only main and error_exit turn an Error into an exit code.
#ifndef UNPAD_ERROR_H
#define UNPAD_ERROR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

// ------------------------------------------------------------------------------------------------
// Exit codes: a contract with scripts; each error line belongs to exactly one

enum {
    EXIT_DONE = 0,
    EXIT_USAGE = 2,      // flags
    EXIT_BAD_INPUT = 3,  // a file that is not what it says
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

// ------------------------------------------------------------------------------------------------
// Errors

typedef struct {
    int code;         // one of the exit codes above; 0 = none
    char what[1024];  // "path: what, expected, found"
    char hint[512];   // what to do about it; may be empty
} Error;

// strcpy into a bounded buffer; what does not fit is cut off.
void text_copy(char *out, size_t capacity, const char *text);

// "1 document", "2 documents"
const char *text_plural(int64_t n);

// Appends ", item", or the first item, while there is room.
void text_list(char *list, size_t capacity, const char *item);

// Control characters become \xNN in place, so that no file name can forge a second log line.
void text_sanitize(char *text, size_t capacity);

// Fills *err and returns false, so that a parser can `return error_set(...)`. The first error wins.
__attribute__((format(printf, 4, 5))) bool error_set(Error *err, int code, const char *hint,
                                                     const char *format, ...);
void error_print(const Error *err);
__attribute__((noreturn)) void error_exit(const Error *err);
void must(bool ok, const Error *err);

#endif
