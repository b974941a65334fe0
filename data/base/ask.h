// A person at a terminal, who is asked for one message after another: with line editing and history
// where libedit was there at build time.
#ifndef UNPAD_ASK_H
#define UNPAD_ASK_H

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    void *editor, *history;  // NULL: plain lines
    char *line;
    size_t capacity;
} Ask;

// From now on Ctrl-C sets stop_signal, and no longer ends the process.
void ask_open(Ask *a);
void ask_close(Ask *a);

// The next message, without the end of its line, in memory the caller frees. Lines that are pasted
// at once are one message, unless the first begins with '/'. NULL: the end of the input. When it
// was interrupted, it is NULL or empty.
char *ask(Ask *a, const char *prompt);

#endif
