#include "ask.h"

#include <locale.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

#include "memory.h"
#include "signals.h"

// Does input arrive within `ms` milliseconds? A signal ends the wait.
static bool input_within(int ms) {
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    return poll(&input, 1, ms) > 0;
}

// A line, including its newline; NULL at the end of the input, or when interrupted.
static const char *plain_line(Ask *a, const char *prompt) {
    fputs(prompt, stderr);
    while (!stop_signal && !input_within(100)) continue;  // a signal may come before the wait
    return !stop_signal && getline(&a->line, &a->capacity, stdin) >= 0 ? a->line : NULL;
}

#ifdef WITH_EDIT
#include <histedit.h>

static char *prompt_of(EditLine *editor) {
    void *prompt = NULL;
    el_get(editor, EL_CLIENTDATA, &prompt);
    return prompt;
}

// While an answer is written, Ctrl-D is a key that waits for the next prompt. As the end of the
// input it would stay in the terminal's queue, and the editor would read something else there.
static void end_of_input_key(int key) {
    struct termios terminal;
    if (tcgetattr(STDIN_FILENO, &terminal) != 0) return;
    terminal.c_cc[VEOF] = (cc_t)key;
    tcsetattr(STDIN_FILENO, TCSANOW, &terminal);
}

static void open_editor(Ask *a) {
    HistEvent event;
    if (!isatty(STDOUT_FILENO)) return;
    setlocale(LC_CTYPE, "C.UTF-8");
    a->editor = el_init("unpad", stdin, stdout, stderr);
    a->history = history_init();
    if (!a->editor || !a->history) return ask_close(a);
    history(a->history, &event, H_SETSIZE, 1000);
    el_set(a->editor, EL_HIST, history, a->history);
    el_set(a->editor, EL_PROMPT, prompt_of);
    el_set(a->editor, EL_EDITOR, "emacs");
    // Ctrl-C is entered as a line of its own: after a signal libedit would keep reading
    el_set(a->editor, EL_SETTY, "-d", "-isig", NULL);
    el_set(a->editor, EL_BIND, "-s", "^C", "^U^V^C^J", NULL);
    el_set(a->editor, EL_BIND, "^I", "ed-insert", NULL);  // in pasted text
}

static const char *next_line(Ask *a, const char *prompt) {
    HistEvent event;
    int n = 0;
    if (!a->editor) return plain_line(a, prompt);
    el_set(a->editor, EL_CLIENTDATA, (void *)prompt);
    end_of_input_key('D' - '@');
    el_set(a->editor, EL_PREP_TERM, 1);  // before the prompt is there, so that no key is lost
    const char *line = el_gets(a->editor, &n);
    end_of_input_key(n > 0 ? _POSIX_VDISABLE : 'D' - '@');
    if (n > 0 && line[0] == 'C' - '@') stop_signal = SIGINT;
    if (n > 1 && !stop_signal) history(a->history, &event, H_ENTER, line);
    return n > 0 ? line : NULL;
}

void ask_close(Ask *a) {
    if (a->editor) el_set(a->editor, EL_BIND, "-r", "^C", NULL);  // el_end would leak it
    if (a->editor) el_end(a->editor), end_of_input_key('D' - '@');
    if (a->history) history_end(a->history);
    free(a->line);
    *a = (Ask){0};
}
#else
static void open_editor(Ask *a) { (void)a; }
static const char *next_line(Ask *a, const char *prompt) { return plain_line(a, prompt); }
void ask_close(Ask *a) { free(a->line); }
#endif

void ask_open(Ask *a) {
    *a = (Ask){0};
    open_editor(a);
    signals_catch_interrupts();
}

char *ask(Ask *a, const char *prompt) {
    char *message = NULL;
    size_t n = 0, capacity = 0;
    do {
        const char *line = next_line(a, message ? "" : prompt);
        if (!line) break;
        const size_t length = strlen(line);
        array_grow(message, &capacity, n + length + 1, "message");
        memcpy(message + n, line, length + 1);
        n += length;
    } while (!stop_signal && message[0] != '/' && input_within(30));  // faster than anyone types
    if (stop_signal) n = 0;
    while (n > 0 && message[n - 1] == '\n') n--;
    if (message) message[n] = 0;
    return message;
}
