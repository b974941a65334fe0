// Asks a person at a terminal for one message after another, with line editing and history if
// libedit was found at build time.
#pragma once

#include <stddef.h>

typedef struct {
    void *editor, *history;  // NULL: plain lines
    char *line;
    size_t capacity;
} Ask;

// From now on Ctrl-C sets stop_signal instead of ending the process.
void ask_open(Ask *a);
void ask_close(Ask *a);

// The next message, without its final newline, in memory the caller frees. Lines pasted together
// are one message, unless the first begins with '/'. NULL at the end of the input; NULL or empty
// when interrupted.
char *ask(Ask *a, const char *prompt);
