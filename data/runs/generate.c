#include "generate.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/ask.h"
#include "../base/clock.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "../base/path.h"
#include "../base/signals.h"

// ------------------------------------------------------------------------------------------------
// The beginning of a text

// texts that grow together, and tokens of a document that begin a text
enum { MAX_GROUP = 64, MAX_BEGINNING = 16 };

static void text_limit(Text *text, const Options *o) {
    text->max_length = o->max_seqlen;
    if (o->sample_tokens < text->max_length - text->length)
        text->max_length = text->length + o->sample_tokens;
}

Text text_of_prompt(const Options *o, int number, int32_t prompt_length) {
    Text text = {.prompt_length = prompt_length, .length = prompt_length, .number = number};
    assert(prompt_length <= o->max_seqlen);
    text.tokens = host_calloc((size_t)o->max_seqlen, sizeof(int32_t), "texts");
    text_limit(&text, o);
    return text;
}

static Text *add_text(Generator *g, int32_t prompt_length) {
    g->texts =
        host_grow(g->texts, &g->text_capacity, (size_t)g->num_texts + 1, sizeof(Text), "texts");
    g->texts[g->num_texts] = text_of_prompt(g->o, g->num_texts, prompt_length);
    return &g->texts[g->num_texts++];
}

// Appends the tokens of a prompt; room for one more is left.
static bool text_append(Generator *g, Text *text, const char *prompt, Error *err) {
    const int64_t n =
        tokenizer_encode(g->tokenizer, prompt, strlen(prompt), text->tokens + text->length,
                         g->o->max_seqlen - 1 - text->length, err);
    if (n == 0)
        error_set(err, EXIT_USAGE, "leave it out, or give some text",
                  "prompt: expected at least one token, found none");
    if (n <= 0) return false;
    text->prompt_length = text->length += (int32_t)n;
    text->ended = false;
    text_limit(text, g->o);
    g->prompt_tokens += n;
    return true;
}

// The first tokens of a document: at most half of max_seqlen.
static bool add_document(Generator *g, Dataset *documents, int64_t doc, Error *err) {
    const int32_t half = g->o->max_seqlen > 1 ? g->o->max_seqlen / 2 : 1;
    int64_t most = half < MAX_BEGINNING ? half : MAX_BEGINNING;
    if (most > dataset_doc_length(documents, doc)) most = dataset_doc_length(documents, doc);
    const Text *text = add_text(g, (int32_t)most);
    return dataset_read(documents, doc, 0, most, text->tokens, err);
}

static bool add_samples_of_prompt(Generator *g, Error *err) {
    if (!g->tokenizer)
        return error_set(err, EXIT_USAGE,
                         "leave it out, or put tokenizer.json into the directory of --model or "
                         "--train",
                         "--prompt needs a tokenizer, and there is none");
    if (!text_append(g, add_text(g, 0), g->o->prompt, err)) return false;
    while (g->num_texts < g->o->num_samples) {
        const int32_t n = g->texts[0].length;
        const Text *text = add_text(g, n);
        memcpy(text->tokens, g->texts[0].tokens, (size_t)n * sizeof(int32_t));
    }
    return true;
}

bool samples_open(Generator *g, const Options *o, Data *data, Error *err) {
    Dataset *documents = data->has_val ? &data->val : &data->train;
    *g = (Generator){.o = o};
    g->tokenizer = data->has_tokenizer ? &data->tokenizer : NULL;
    if (o->prompt && o->num_samples > 0) return add_samples_of_prompt(g, err);
    bool ok = true;
    for (int i = 0; ok && i < o->num_samples; i++)
        ok = add_document(g, documents, i % documents->num_docs, err);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// Printing

// Prints what is complete of p->bytes; with `end` all of it.
static void text_printer_flush(TextPrinter *p, bool end) {
    while (p->n > 0) {
        const unsigned char first = p->bytes[0];
        const int length = utf8_length(p->bytes, p->n);
        const size_t n = (size_t)abs(length);
        if (length < 0 && n == p->n && first >= 0xc2 && first < 0xf5 && !end) return;  // incomplete
        if (length < 0)
            fputs("\xef\xbf\xbd", p->to);
        else if (n > 1 || first == '\n' || first == '\t' || (first >= 0x20 && first != 0x7f))
            fwrite(p->bytes, 1, n, p->to);
        p->n -= n;
        memmove(p->bytes, p->bytes + n, p->n);
    }
}

static void text_printer_token(TextPrinter *p, const Tokenizer *tokenizer, int32_t id) {
    size_t n = 0;
    const bool known = tokenizer && id < tokenizer->vocab_size;
    const unsigned char *bytes = known ? tokenizer_bytes(tokenizer, id, &n) : NULL;
    if (!bytes || tokenizer->special[id]) text_printer_flush(p, true);
    if (!bytes) fprintf(p->to, "<%d>", id);
    for (size_t k = 0; k < n && !tokenizer->special[id]; k++) {
        p->bytes[p->n++] = bytes[k];
        text_printer_flush(p, false);
    }
}

// Is the end of a turn the last that was written? Without a token of its own it is several.
static bool ends_turn(const Generator *g, const Text *text) {
    const int64_t n = g->turn_end_length;
    return n > 0 && text->length - text->prompt_length >= n &&
           memcmp(text->tokens + text->length - n, g->turn_end, (size_t)n * sizeof(int32_t)) == 0;
}

// What the last pass has added to a group: its texts in order, each from the end of its prompt, as
// far as they have grown.
static void print_growth(Generator *g, const Text *texts, int num_texts) {
    for (; g->current < num_texts; g->current++) {
        const Text *text = &texts[g->current];
        if (g->printed < 0) {
            if (g->num_texts > 1) printf("--- %d\n", text->number + 1);
            g->printed = text->prompt_length;
        }
        const bool grows = !text->ended && text->length < text->max_length;
        // what may become the end of a turn is not shown yet; as one token it never is
        const bool holds_back = g->turn_end_length > 1 && (grows || ends_turn(g, text));
        const int64_t shown = text->length - (holds_back ? g->turn_end_length : 0);
        for (; g->printed < shown; g->printed++)
            text_printer_token(&g->printer, g->tokenizer, text->tokens[g->printed]);
        if (grows) break;
        text_printer_flush(&g->printer, true);
        printf("\n");
        g->printed = -1;
    }
    fflush(stdout);
}

// ------------------------------------------------------------------------------------------------
// Generation

// Candidates by -p, whose bits are in the order of the values; equal ones by id, so that the order
// is the same on every machine.
static int64_t key_of(float p) {
    uint32_t bits;
    memcpy(&bits, &p, sizeof bits);
    return -(int64_t)bits;
}

static float probability(HeapItem item) {
    const uint32_t bits = (uint32_t)-item.key;
    float p;
    memcpy(&p, &bits, sizeof p);
    return p;
}

// The i-th likeliest of V candidates, by a heapsort that goes only so far: most draws are among the
// first few. Those that were popped lie behind the heap, the likeliest last.
static HeapItem nth_likeliest(Heap *heap, int32_t V, int32_t i) {
    while (V - heap->n <= i) {
        const HeapItem top = heap_pop(heap);
        heap->items[heap->n] = top;
    }
    return heap->items[V - 1 - i];
}

int32_t sample_token(const float *logits, int32_t V, float temperature, float top_p, float uniform,
                     HeapItem *scratch) {
    const float inverse_temperature = temperature > 0 ? 1 / temperature : 1;
    Heap heap = {scratch, 0};
    int32_t best = 0, n = 0;
    float sum = 0, kept = 0;
    for (int32_t v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (temperature == 0) return best;
    for (int32_t v = 0; v < V; v++) {
        if (logits[v] == -INFINITY) continue;
        const float p = expf((logits[v] - logits[best]) * inverse_temperature);
        scratch[heap.n++] = (HeapItem){key_of(p), v};
        sum += p;
    }
    if (heap.n == 0) return best;
    V = (int32_t)heap.n;
    heap_make(&heap);
    if (top_p >= 1) {
        kept = sum;
        n = V;
    }
    while (n < V && (n == 0 || kept < top_p * sum))
        kept += probability(nth_likeliest(&heap, V, n++));
    float target = uniform * kept;
    for (int32_t i = 0; i < n - 1; i++) {
        const HeapItem item = nth_likeliest(&heap, V, i);
        if ((target -= probability(item)) < 0) return item.id;
    }
    return nth_likeliest(&heap, V, n - 1).id;
}

static float sample_uniform(uint64_t seed, int64_t step, int text, int position) {
    uint64_t key = mix64(seed * 0x9e3779b97f4a7c15ull + (uint64_t)step);
    return (float)(mix64(key ^ ((uint64_t)text << 32 | (uint64_t)position)) >> 40) * 0x1p-24f;
}

// Packs what is not in the cache of each text that has room for one more token; rows: the last row
// of each. Returns how many these are.
static int32_t texts_pack(Batch *b, Text **growing, int32_t *rows, Text *texts, int num_texts) {
    DocView docs[MAX_GROUP];
    int32_t n = 0;
    b->decode = false;
    for (int i = 0; i < num_texts; i++) {
        Text *text = &texts[i];
        if (text->ended || text->length == text->max_length) continue;
        const int32_t done = text->num_cached;
        docs[n] = (DocView){text->tokens + done, text->length - done, -1, NULL};
        b->decode |= done > 0;
        growing[n++] = text;
    }
    if (n > 0) batch_pack(b, docs, n);
    for (int i = 0; i < n; i++) {
        rows[i] = b->cu_seqlens[i + 1] - 1;
        for (int32_t t = b->cu_seqlens[i]; t <= rows[i]; t++) {
            b->position_ids[t] += growing[i]->num_cached;
            b->cache_rows[t] = growing[i]->first_row;
        }
        growing[i]->num_cached = growing[i]->length;
    }
    return n;
}

// What no text should have: ids without a token, as a vocabulary that is padded has them, and
// special tokens but for those that end a text or a turn.
static void forbid_tokens(const Generator *g, const SampleModel *model, float *logits) {
    const Tokenizer *t = g->tokenizer;
    for (int32_t id = 0; t && id < model->vocab_size; id++) {
        size_t n;
        tokenizer_bytes(t, id, &n);
        const bool is_text = n > 0 && !t->special[id];
        if (!is_text && !(g->turn_end_length == 1 && id == g->turn_end[0]) &&
            !token_ids_have(model->ends, id))
            logits[id] = -INFINITY;
    }
}

// Adds one token to each text that has room for one; returns how many have. logits (num_texts, V),
// scratch (V).
static int32_t texts_grow(Generator *g, Text *texts, int num_texts, const SampleModel *model,
                          int64_t step, float *logits, HeapItem *scratch) {
    const Options *o = g->o;
    Text *growing[MAX_GROUP];
    int32_t rows[MAX_GROUP];
    const int32_t n = texts_pack(&g->batch, growing, rows, texts, num_texts);
    if (n > 0) model->next_logits(model->context, &g->batch, rows, n, logits);
    for (int i = 0; i < n; i++) {
        Text *text = growing[i];
        const float uniform = sample_uniform((uint64_t)o->seed, step, text->number, text->length);
        float *own = logits + (size_t)i * (size_t)model->vocab_size;
        forbid_tokens(g, model, own);
        const int32_t id =
            sample_token(own, model->vocab_size, o->temperature, o->top_p, uniform, scratch);
        text->tokens[text->length++] = id;
        text->ended = token_ids_have(model->ends, id) || ends_turn(g, text);
    }
    return n;
}

// How many of the texts, from the first on, fit into the cache at their full length; gives each its
// rows.
static int texts_that_fit(Text *texts, int num_texts, const SampleModel *model) {
    int32_t tokens = 0;
    int n = 0;
    while (n < num_texts && n < model->max_rows && n < MAX_GROUP &&
           texts[n].max_length <= model->cache_tokens - tokens) {
        texts[n].first_row = tokens;
        tokens += texts[n++].max_length;
    }
    assert(n > 0);
    return n;
}

static void write_group(Generator *g, Text *texts, int num_texts, const SampleModel *model,
                        int64_t step, float *logits, HeapItem *scratch) {
    g->current = 0;
    g->printed = -1;
    for (bool first_pass = true;; first_pass = false) {
        const double start_ms = now_ms();
        const int32_t n = texts_grow(g, texts, num_texts, model, step, logits, scratch);
        if (n == 0) return;
        *(first_pass ? &g->prompt_ms : &g->later_ms) += now_ms() - start_ms;
        if (!first_pass) g->later_tokens += n;
        if (g->printer.to) print_growth(g, texts, num_texts);
        if (stop_signal) return;
    }
}

void texts_write(Generator *g, Text *texts, int num_texts, const SampleModel *model, int64_t step) {
    const size_t V = (size_t)model->vocab_size;
    const size_t most = num_texts < MAX_GROUP ? (size_t)num_texts : MAX_GROUP;
    float *logits = host_calloc(most * V, sizeof(float), "texts");
    HeapItem *scratch = host_calloc(V, sizeof(HeapItem), "texts");
    if (!g->batch.tokens) {
        batch_init(&g->batch, model->cache_tokens, model->cache_tokens);
        g->batch.cache_rows = host_calloc((size_t)model->cache_tokens, sizeof(int32_t), "texts");
    }
    for (int first = 0, n; first < num_texts; first += n) {
        n = texts_that_fit(texts + first, num_texts - first, model);
        write_group(g, texts + first, n, model, step, logits, scratch);
    }
    free(logits);
    free(scratch);
}

int32_t generator_cache_tokens(const Generator *g, int32_t most) {
    int64_t tokens = g->terminal ? g->o->max_seqlen : 0;
    for (int i = 0; i < g->num_texts; i++) tokens += g->texts[i].max_length;
    return (int32_t)(tokens < most ? tokens : most);
}

static void begin_again(Text *text, int32_t length) {
    text->length = length;
    text->num_cached = 0;
    text->ended = false;
}

// ------------------------------------------------------------------------------------------------
// Samples of a run

static void text_report(const Text *text, const Tokenizer *tokenizer, int64_t step, RunLog *log) {
    char *chars = NULL;
    size_t n = 0;
    TextPrinter printer = {.to = host_stream(&chars, &n, "a sample")};
    for (int32_t i = 0; i < text->length; i++)
        text_printer_token(&printer, tokenizer, text->tokens[i]);
    text_printer_flush(&printer, true);
    fclose(printer.to);
    if (chars) report_sample(log, step, text->number + 1, text->ended, chars);
    free(chars);
}

void samples_report(Generator *g, const SampleModel *model, int64_t step, RunLog *log) {
    if (g->num_texts == 0) return;
    for (int i = 0; i < g->num_texts; i++) begin_again(&g->texts[i], g->texts[i].prompt_length);
    texts_write(g, g->texts, g->num_texts, model, step);
    for (int i = 0; i < g->num_texts; i++) text_report(&g->texts[i], g->tokenizer, step, log);
}

// ------------------------------------------------------------------------------------------------
// --generate: a list of prompts, or a line of the terminal after another

static bool append_prompt(Generator *g, Text *text, const char *prompt, Error *err) {
    Parts turn = {0};
    if (g->o->chat) chat_ask(&g->chat, g->system, prompt, text->length == 0, text->ended, &turn);
    const bool ok = text_append(g, text, turn.bytes ? (char *)turn.bytes : prompt, err);
    parts_free(&turn);
    return ok;
}

static char *cut_end(char *text, char end) {
    const size_t n = strlen(text);
    if (n > 0 && text[n - 1] == end) text[n - 1] = 0;
    return text;
}

static bool add_lines(Generator *g, const char *path, Error *err) {
    uint64_t n;
    char *lines = file_read_all(path, 1 << 26, &n, "", err), *rest = lines;
    bool ok = lines != NULL;
    if (ok) rest += mark_bytes(lines);
    for (char *line; ok && (line = strsep(&rest, "\n"));)
        if (cut_end(line, '\r')[0]) ok = append_prompt(g, add_text(g, 0), line, err);
    free(lines);
    if (ok && g->num_texts == 0) ok = bad_input(err, "%s: expected a prompt a line", path);
    return ok;
}

// All of standard input but the end of its last line.
static bool add_standard_input(Generator *g, Error *err) {
    char *text = NULL;
    size_t capacity = 0;
    const char *prompt = "";
    if (getdelim(&text, &capacity, 0, stdin) > 0)
        prompt = cut_end(cut_end(text, '\n'), '\r') + mark_bytes(text);
    const bool ok = ferror(stdin) ? disk_error(err, "standard input", "cannot read it")
                                  : append_prompt(g, add_text(g, 0), prompt, err);
    free(text);
    return ok;
}

static const char commands[] =
    "Ctrl-C: end the answer; /reset, /system TEXT: start over; Ctrl-D, /exit: leave";

bool generator_open(Generator *g, const Options *o, Error *err) {
    const char *prompt = o->prompt;
    char path[IO_PATH_MAX];
    *g = (Generator){.o = o, .printer.to = stdout};
    if (!path_join(path, sizeof path, o->model, "tokenizer.json", err)) return false;
    if (!path_exists(path))
        return error_set(err, EXIT_USAGE, "put tokenizer.json into the directory of --model",
                         "%s: --generate needs a tokenizer, and there is none", path);
    if (!tokenizer_open(&g->own_tokenizer, path, err)) return false;
    g->tokenizer = &g->own_tokenizer;
    if (o->chat && !chat_template_open(&g->chat, o->model, g->tokenizer, err)) return false;
    // a template writes its own
    if (o->chat || !g->tokenizer->adds_bos) g->own_tokenizer.bos = -1;
    if (o->chat)
        g->turn_end_length = tokenizer_encode(g->tokenizer, g->chat.end, strlen(g->chat.end),
                                              g->turn_end, MAX_TURN_END, err);
    if (err->code) return false;
    if (prompt && prompt[0] == '@') return add_lines(g, prompt + 1, err);
    if (prompt && strcmp(prompt, "-") != 0) return append_prompt(g, add_text(g, 0), prompt, err);
    g->terminal = !prompt && isatty(STDIN_FILENO);
    if (!g->terminal) return add_standard_input(g, err);
    fprintf(stderr, "%s %s; temperature %g, up to %d tokens\n%s\n", o->model,
            o->chat ? "answers" : "continues each text", o->temperature, o->sample_tokens,
            commands);
    return true;
}

// ------------------------------------------------------------------------------------------------
// A person at the terminal

static bool is_command(const char *message, const char *name) {
    const size_t n = strlen(name);
    return strncmp(message, name, n) == 0 && (message[n] == 0 || message[n] == ' ');
}

static void answer(Generator *g, Text *text, const char *message, const SampleModel *model,
                   int64_t turn) {
    Error err = {0};
    if (!g->o->chat) begin_again(text, 0);
    if (!append_prompt(g, text, message, &err)) return error_print(&err);
    texts_write(g, text, 1, model, turn);
    if (stop_signal) {
        text_printer_flush(&g->printer, true);
        printf("\n");
    } else if (g->o->chat && !text->ended)
        fprintf(stderr, "[cut off: %s]\n",
                text->length == g->o->max_seqlen ? "--max-seqlen is full; /reset starts over"
                                                 : "--sample-tokens allows no more");
}

static void run_terminal(Generator *g, const SampleModel *model) {
    Ask person;
    Text text = text_of_prompt(g->o, 0, 0);
    ask_open(&person);
    for (int64_t turn = 0;; turn++) {
        stop_signal = 0;
        char *message = ask(&person, "> ");
        if (!stop_signal && (!message || is_command(message, "/exit"))) {
            free(message);
            break;
        }
        if (stop_signal)
            printf("%s%s\n", message ? "" : "\n", commands);
        else if (is_command(message, "/reset"))
            begin_again(&text, 0);
        else if (is_command(message, "/system")) {
            begin_again(&text, 0);
            free(g->system);
            g->system = message[7] ? host_copy(message + 8, "a message") : NULL;
        } else if (message[0])
            answer(g, &text, message, model, turn);
        free(message);
    }
    printf("\n");
    ask_close(&person);
    free(g->system);
    free(text.tokens);
}

void generator_run(Generator *g, const SampleModel *model) {
    if (g->terminal)
        run_terminal(g, model);
    else
        texts_write(g, g->texts, g->num_texts, model, 0);
    for (int i = 0; i < g->num_texts; i++) free(g->texts[i].tokens);
    free(g->texts);
    tokenizer_free(&g->own_tokenizer);
    batch_free(&g->batch);
    fprintf(stderr, "%ld prompt token%s in %.2f s, then %ld token%s in %.2f s: %.1f tokens/s\n",
            g->prompt_tokens, text_plural(g->prompt_tokens), g->prompt_ms * 1e-3, g->later_tokens,
            text_plural(g->later_tokens), g->later_ms * 1e-3,
            g->later_ms > 0 ? (double)g->later_tokens / g->later_ms * 1e3 : 0);
}
