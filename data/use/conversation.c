#include "conversation.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/ask.h"
#include "../base/memory.h"
#include "../base/signals.h"

// ---- Prompts ------------------------------------------------------------------------------------

static bool append_prompt(Conversation *c, Text *text, const char *prompt, Error *err) {
    const int32_t before = text->length;
    Parts turn = {0};
    if (c->writer.o->chat)
        chat_ask(&c->chat, c->system, prompt, text->length == 0, text->ended, &turn);
    const bool ok = text_append(&c->writer, text, turn.bytes ? (char *)turn.bytes : prompt, err);
    c->prompt_tokens += text->length - before;
    parts_free(&turn);
    return ok;
}

static bool add_prompt(Conversation *c, const char *prompt, Error *err) {
    return append_prompt(c, text_add(&c->writer, 0), prompt, err);
}

static char *cut_end(char *text, char end) {
    const size_t n = strlen(text);
    if (n > 0 && text[n - 1] == end) text[n - 1] = 0;
    return text;
}

static bool add_lines(Conversation *c, const char *path, Error *err) {
    AUTO_FREE char *lines = file_read_all(path, 1 << 26, NULL, "", err);
    bool ok = lines != NULL;
    char *rest = ok ? lines + mark_bytes(lines) : NULL;
    for (char *line; ok && (line = strsep(&rest, "\n"));)
        if (cut_end(line, '\r')[0]) ok = add_prompt(c, line, err);
    return ok && (c->writer.num_texts > 0 || bad_input(err, "%s: expected a prompt a line", path));
}

// All of standard input but the end of its last line.
static bool add_standard_input(Conversation *c, Error *err) {
    AUTO_FREE char *text = NULL;
    size_t capacity = 0;
    const char *prompt = "";
    const ssize_t n = getdelim(&text, &capacity, 0, stdin);
    const bool ends = n > 0 && !text[n - 1];
    if (n > 0) prompt = cut_end(cut_end(text, '\n'), '\r') + mark_bytes(text);
    if (ferror(stdin)) return disk_error(err, "standard input", "cannot read it");
    if (ends) return bad_input(err, "standard input: expected text, found a NUL byte");
    return add_prompt(c, prompt, err);
}

static const char *commands(const Conversation *c) {
    return c->writer.o->chat
               ? "Ctrl-C: end the answer; /reset, /system TEXT: start over; Ctrl-D, /exit: leave"
               : "Ctrl-C: end the text; Ctrl-D, /exit: leave";
}

static bool open_tokenizer(Conversation *c, Error *err) {
    const Options *o = c->writer.o;
    Tokenizer *t = &c->tokenizer;
    TextWriter *w = &c->writer;
    const char *path = PATH_IN(o->model, "tokenizer.json");
    if (!path_exists(path))
        return error_set(err, EXIT_USAGE, "put tokenizer.json into the directory of --model",
                         "%s: --generate needs a tokenizer, and there is none", path);
    if (!tokenizer_open(t, path, err)) return false;
    if (o->chat && !chat_template_open(&c->chat, o->model, t, err)) return false;
    if (o->chat) t->adds_bos = false;  // a template writes its own
    if (o->chat)
        w->turn_end_length =
            tokenizer_encode(t, c->chat.end, strlen(c->chat.end), w->turn_end, MAX_TURN_END, err);
    return err->code == 0;
}

bool conversation_open(Conversation *c, const Options *o, Error *err) {
    const char *prompt = o->prompt;
    *c = (Conversation){.writer = {.o = o, .printer = {.to = stdout, .tokenizer = &c->tokenizer}}};
    if (!open_tokenizer(c, err)) return false;
    if (prompt && prompt[0] == '@') return add_lines(c, prompt + 1, err);
    if (prompt && strcmp(prompt, "-") != 0) return add_prompt(c, prompt, err);
    c->asks_terminal = !prompt && isatty(STDIN_FILENO);
    if (!c->asks_terminal) return add_standard_input(c, err);
    text_add(&c->writer, o->max_seqlen);
    fprintf(stderr, "%s %s; temperature %g, up to %d tokens\n%s\n", o->model,
            o->chat ? "answers" : "continues each text", o->temperature, o->sample_tokens,
            commands(c));
    return true;
}

// ---- A person at the terminal -------------------------------------------------------------------

static bool is_command(const char *message, const char *name) {
    const size_t n = strlen(name);
    return strncmp(message, name, n) == 0 && (message[n] == 0 || message[n] == ' ');
}

static void answer(Conversation *c, const char *message, ModelFace model, int64_t turn) {
    Error err = {0};
    Text *text = c->writer.texts;
    if (!c->writer.o->chat) text_begin_again(text, 0);
    if (!append_prompt(c, text, message, &err)) return error_print(&err);
    texts_write(&c->writer, model, turn);
    if (stop_signal) {
        text_print(&c->writer.printer, NULL, 0, true);
        printf("\n");
    } else if (c->writer.o->chat && !text->ended)
        fprintf(stderr, "[cut off: %s]\n",
                text->length == c->writer.o->max_seqlen ? "--max-seqlen is full; /reset starts over"
                                                        : "--sample-tokens allows no more");
}

// Obeys a message that begins with a slash; false: the message is for the model.
static bool obey(Conversation *c, const char *message) {
    const bool resets = is_command(message, "/reset"), system = is_command(message, "/system");
    const size_t n = strspn(message + 1, "abcdefghijklmnopqrstuvwxyz");
    // no text begins with /word, but some with /a/path
    if (message[0] != '/' || n == 0 || !strchr(" ?", message[1 + n])) return false;
    if (!c->writer.o->chat || !(resets || system)) {
        const bool asks = is_command(message, "/help");
        fprintf(stderr, "%.*s%s%s\n", asks ? 0 : (int)strcspn(message, " "), message,
                asks ? "" : ": no such command. ", commands(c));
        return true;
    }
    text_begin_again(c->writer.texts, 0);
    if (system) free(c->system);
    if (system) c->system = message[7] ? host_copy(message + 8, "a message") : NULL;
    fprintf(stderr, "[a new conversation%s%s]\n", c->system ? "; system: " : "",
            c->system ? c->system : "");
    return true;
}

static void run_terminal(Conversation *c, ModelFace model) {
    Ask person;
    text_begin_again(c->writer.texts, 0);
    ask_open(&person);
    for (int64_t turn = 0;; turn++) {
        stop_signal = 0;
        AUTO_FREE char *message = ask(&person, "> ");
        if (!stop_signal &&
            (!message || is_command(message, "/exit") || is_command(message, "/quit")))
            break;
        if (stop_signal)
            printf("%s%s\n", message ? "" : "\n", commands(c));
        else if (message[0] && !obey(c, message))
            answer(c, message, model, turn);
    }
    printf("\n");
    ask_close(&person);
    free(c->system);
}

void conversation_run(Conversation *c, ModelFace model) {
    TextWriter *w = &c->writer;
    if (c->asks_terminal)
        run_terminal(c, model);
    else
        texts_write(w, model, 0);
    if (c->prompt_tokens > 0)
        fprintf(stderr, "%ld prompt token%s in %.2f s, then %ld token%s in %.2f s: %.1f tokens/s\n",
                c->prompt_tokens, text_plural(c->prompt_tokens), w->prompt_ms * 1e-3,
                w->later_tokens, text_plural(w->later_tokens), w->later_ms * 1e-3,
                w->later_ms > 0 ? (double)w->later_tokens / w->later_ms * 1e3 : 0);
    texts_free(w);
    tokenizer_free(&c->tokenizer);
}
