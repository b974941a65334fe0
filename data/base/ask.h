// Asks a person at a terminal for messages, with line editing and history if built with libedit.
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

// The next message, without its final newline, in memory the caller frees; lines pasted together
// are one, unless the first begins with '/'. NULL at the end; NULL or empty when interrupted.
char *ask(Ask *a, const char *prompt);
