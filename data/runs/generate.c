#include "generate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/file.h"
#include "../base/memory.h"
#include "../base/path.h"

enum { MAX_PROMPTS_BYTES = 1 << 26 };

// ------------------------------------------------------------------------------------------------
// Chat: ChatML, with or without a system message by default. Other templates would need Jinja.

static const char FOR_MESSAGES[] = "{% for message in messages %}",
                  SYSTEM_OPEN[] =
                      "{% if loop.first and messages[0]['role'] != 'system' %}"
                      "{{ '<|im_start|>system\n",
                  SYSTEM_CLOSE[] = "<|im_end|>\n' }}{% endif %}",
                  REST[] =
                      "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
                      "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
                      "{{ '<|im_start|>assistant\n' }}{% endif %}";

static bool skip_text(const char **p, const char *text) {
    const size_t n = strlen(text);
    if (strncmp(*p, text, n) != 0) return false;
    *p += n;
    return true;
}

// Is the template ChatML? Copies its system message, if it has one.
static bool template_is_chatml(const char *p, char *system, size_t capacity) {
    system[0] = 0;
    if (!skip_text(&p, FOR_MESSAGES)) return false;
    if (skip_text(&p, SYSTEM_OPEN)) {
        const char *end = strstr(p, SYSTEM_CLOSE);
        if (!end || (size_t)(end - p) >= capacity || memchr(p, '\\', (size_t)(end - p)))
            return false;
        memcpy(system, p, (size_t)(end - p));
        system[end - p] = 0;
        p = end + strlen(SYSTEM_CLOSE);
    }
    return strcmp(p, REST) == 0;
}

static bool chat_open(Generator *g, const char *dir, Error *err) {
    char path[IO_PATH_MAX];
    char *text = tokenizer_chat_template(dir, path, err);
    if (err->code) return false;
    const bool found = text, known = found && template_is_chatml(text, g->system, sizeof g->system);
    free(text);
    if (known && tokenizer_encode(&g->tokenizer, "<|im_end|>", 10, &g->end_of_turn, 1, err) == 1)
        return true;
    return error_set(err, EXIT_USAGE, "leave --chat out and write the whole text as --prompt",
                     "%s: --chat: expected the template of SmolLM2 or ChatML, found %s", path,
                     found ? "another one" : "none");
}

// The message as the template renders it after `text`, which may be empty, up to the answer.
static char *chat_turn(const Generator *g, const Text *text, const char *message) {
    const size_t capacity = strlen(g->system) + strlen(message) + 200;
    char *turn = host_calloc(capacity, 1, "prompt");
    size_t n = 0;
    if (text->length)
        n += (size_t)snprintf(turn, capacity, "%s\n", text->ended ? "" : "<|im_end|>");
    else if (g->system[0])
        n += (size_t)snprintf(turn, capacity, "<|im_start|>system\n%s<|im_end|>\n", g->system);
    snprintf(turn + n, capacity - n, "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n",
             message);
    return turn;
}

// ------------------------------------------------------------------------------------------------
// Prompts

// Appends a prompt to a text that has room for max_seqlen tokens; one is left for what follows it.
static bool text_append(Generator *g, Text *text, const char *prompt, Error *err) {
    const Samples *s = &g->samples;
    char *turn = g->chat ? chat_turn(g, text, prompt) : NULL;
    const int64_t n =
        tokenizer_encode(&g->tokenizer, turn ? turn : prompt, strlen(turn ? turn : prompt),
                         text->tokens + text->length, s->max_seqlen - 1 - text->length, err);
    free(turn);
    if (n < 0) return false;
    if (n == 0)
        return error_set(err, EXIT_USAGE, "", "prompt: expected at least one token, found none");
    text->prompt_length = text->length += (int32_t)n;
    text->ended = false;
    text->max_length = s->max_seqlen;
    if (s->sample_tokens < text->max_length - text->length)
        text->max_length = text->length + s->sample_tokens;
    g->prompt_tokens += n;
    return true;
}

static int32_t *text_room(const Generator *g) {
    return host_calloc((size_t)g->samples.max_seqlen, sizeof(int32_t), "prompt");
}

static bool add_prompt(Generator *g, const char *prompt, Error *err) {
    g->texts =
        host_grow(g->texts, &g->text_capacity, (size_t)g->num_texts + 1, sizeof(Text), "prompts");
    Text *text = &g->texts[g->num_texts];
    *text = (Text){.tokens = text_room(g), .number = g->num_texts};
    g->num_texts++;
    return text_append(g, text, prompt, err);
}

static bool add_lines(Generator *g, const char *path, Error *err) {
    uint64_t n;
    char *lines = file_read_all(path, MAX_PROMPTS_BYTES, &n, "", err), *rest = lines;
    bool ok = lines != NULL;
    for (char *line; ok && (line = strsep(&rest, "\n"));)
        if (line[0]) ok = add_prompt(g, line, err);
    free(lines);
    if (ok && g->num_texts == 0) ok = bad_input(err, "%s: expected a prompt a line", path);
    return ok;
}

// All of standard input but the end of its last line.
static bool add_standard_input(Generator *g, Error *err) {
    char *text = NULL;
    size_t capacity = 0;
    ssize_t n = getdelim(&text, &capacity, 0, stdin);
    if (n > 0 && text[n - 1] == '\n') text[n - 1] = 0;
    const bool ok = add_prompt(g, n > 0 ? text : "", err);
    free(text);
    return ok;
}

bool generator_open(Generator *g, const Samples *samples, const Prompts *prompts, Error *err) {
    *g = (Generator){.samples = *samples, .chat = prompts->chat, .end_of_turn = -1};
    const char *prompt = prompts->prompt;
    char path[IO_PATH_MAX];
    if (!path_join(path, sizeof path, prompts->model_dir, "tokenizer.json", err)) return false;
    if (!path_exists(path))
        return error_set(err, EXIT_USAGE, "put tokenizer.json into the directory of --model",
                         "%s: --generate needs a tokenizer, and there is none", path);
    if (!tokenizer_open(&g->tokenizer, path, err)) return false;
    g->samples.tokenizer = &g->tokenizer;
    // a template writes its own
    if (g->chat || !g->tokenizer.adds_bos) g->tokenizer.bos = -1;
    if (g->chat && !chat_open(g, prompts->model_dir, err)) return false;
    if (prompts->prompt_file) return add_lines(g, prompts->prompt_file, err);
    if (prompt && strcmp(prompt, "-") != 0) return add_prompt(g, prompt, err);
    g->terminal = !prompt && isatty(STDIN_FILENO);
    return g->terminal || add_standard_input(g, err);
}

int32_t generator_cache_tokens(const Generator *g, int32_t most) {
    int64_t tokens = g->terminal ? g->samples.max_seqlen : 0;
    for (int i = 0; i < g->num_texts; i++) tokens += g->texts[i].max_length;
    return (int32_t)(tokens < most ? tokens : most);
}

// ------------------------------------------------------------------------------------------------
// Printing: the texts in order, each from the end of its prompt, as far as they have grown

// Samples.grown: what the last pass has added.
static void print_growth(void *generator) {
    Generator *g = generator;
    const double now = now_ms();
    for (; g->current < g->round_texts; g->current++) {
        const Text *text = &g->round[g->current];
        if (g->printed < 0) {
            if (g->num_texts > 1) printf("--- %d\n", text->number + 1);
            g->printed = text->prompt_length;
        }
        for (; g->printed < text->length; g->printed++)
            text_printer_token(&g->printer, g->samples.tokenizer, text->tokens[g->printed]);
        if (!text->ended && text->length < text->max_length) break;
        text_printer_end(&g->printer);
        printf("\n");
        g->printed = -1;
    }
    fflush(stdout);
    *(g->first_pass ? &g->prompt_ms : &g->new_ms) += now - g->started_ms;
    g->first_pass = false;
    g->started_ms = now_ms();
}

static void write_round(Generator *g, Text *texts, int n, const SampleModel *model, int64_t step) {
    g->round = texts;
    g->round_texts = n;
    g->current = 0;
    g->printed = -1;
    g->printer.to = stdout;
    g->first_pass = true;
    g->started_ms = now_ms();
    g->samples.grown = print_growth;
    g->samples.grown_context = g;
    texts_write(texts, n, &g->samples, model, step);
    for (int i = 0; i < n; i++) g->new_tokens += texts[i].length - texts[i].prompt_length;
    g->num_written += n;
}

// ------------------------------------------------------------------------------------------------
// A round, or a line of the terminal after another

static bool run_terminal(Generator *g, const SampleModel *model, Error *err) {
    char *line = NULL;
    size_t capacity = 0;
    Text text = {.tokens = text_room(g)};
    bool ok = true;
    for (int64_t turn = 0; ok; turn++) {
        printf("> ");
        fflush(stdout);
        const ssize_t n = getline(&line, &capacity, stdin);
        if (n < 0) break;
        if (line[n - 1] == '\n') line[n - 1] = 0;
        if (!line[0]) continue;
        if (!g->chat) text.length = text.num_cached = 0;
        ok = text_append(g, &text, line, err);
        if (ok) write_round(g, &text, 1, model, turn);
    }
    printf("\n");
    free(line);
    free(text.tokens);
    return ok;
}

bool generator_run(Generator *g, SampleModel *model, Error *err) {
    model->end_of_turn = g->end_of_turn;
    const bool ok = !g->terminal || run_terminal(g, model, err);
    for (int first = 0, n; first < g->num_texts; first += n) {
        n = g->num_texts - first < MAX_SAMPLES ? g->num_texts - first : MAX_SAMPLES;
        write_round(g, g->texts + first, n, model, 0);
        for (int i = first; i < first + n; i++) free(g->texts[i].tokens);
    }
    free(g->texts);
    tokenizer_free(&g->tokenizer);
    batch_free(&g->samples.batch);
    const int64_t later = g->new_tokens - g->num_written;  // the first come with the prompts
    fprintf(stderr, "%ld prompt token%s in %.2f s, then %ld token%s in %.2f s: %.1f tokens/s\n",
            g->prompt_tokens, text_plural(g->prompt_tokens), g->prompt_ms * 1e-3, later,
            text_plural(later), g->new_ms * 1e-3,
            g->new_ms > 0 ? (double)later / g->new_ms * 1e3 : 0);
    return ok;
}
