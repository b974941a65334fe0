#include "generate.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "../base/path.h"

// ------------------------------------------------------------------------------------------------
// The beginning of a text

enum { MAX_BEGINNING = 16 };  // tokens of a document that begin a text

static void text_limit(Text *text, const Samples *s) {
    text->max_length = s->max_seqlen;
    if (s->sample_tokens < text->max_length - text->length)
        text->max_length = text->length + s->sample_tokens;
}

Text text_of_prompt(const Samples *s, int number, int32_t prompt_length) {
    Text text = {.prompt_length = prompt_length, .length = prompt_length, .number = number};
    assert(prompt_length <= s->max_seqlen);
    text.tokens = host_calloc((size_t)s->max_seqlen, sizeof(int32_t), "samples");
    text_limit(&text, s);
    return text;
}

// Appends the tokens of a prompt; room for one more is left.
static bool text_append(Text *text, const Samples *s, const char *prompt, Error *err) {
    const int64_t n =
        tokenizer_encode(s->tokenizer, prompt, strlen(prompt), text->tokens + text->length,
                         s->max_seqlen - 1 - text->length, err);
    if (n == 0)
        error_set(err, EXIT_USAGE, "leave it out, or give some text",
                  "prompt: expected at least one token, found none");
    if (n <= 0) return false;
    text->prompt_length = text->length += (int32_t)n;
    text->ended = false;
    text_limit(text, s);
    return true;
}

bool samples_encode_prompt(Samples *s, Error *err) {
    if (!s->prompt || s->num_samples == 0) return true;
    if (!s->tokenizer)
        return error_set(err, EXIT_USAGE,
                         "leave it out, or put tokenizer.json into the directory of --model or "
                         "--train",
                         "--prompt needs a tokenizer, and there is none");
    Text text = text_of_prompt(s, 0, 0);
    const bool ok = text_append(&text, s, s->prompt, err);
    s->prompt_ids = text.tokens;
    s->prompt_length = text.length;
    return ok;
}

int32_t samples_cache_tokens(const Samples *s, int32_t most) {
    const int64_t prompt = s->prompt ? s->prompt_length : MAX_BEGINNING;
    int64_t text = prompt + s->sample_tokens;
    if (text > s->max_seqlen) text = s->max_seqlen;
    return (int32_t)(text * s->num_samples < most ? text * s->num_samples : most);
}

// The prompt, or the first tokens of a document: at most half of max_seqlen.
static bool text_begin(Text *text, const Samples *s, int number, Error *err) {
    int64_t most = MAX_BEGINNING;
    if (s->prompt) {
        *text = text_of_prompt(s, number, s->prompt_length);
        memcpy(text->tokens, s->prompt_ids, (size_t)s->prompt_length * sizeof(int32_t));
        return true;
    }
    const int64_t doc = number % s->documents->num_docs;
    if (most > s->max_seqlen / 2) most = s->max_seqlen > 1 ? s->max_seqlen / 2 : 1;
    if (most > dataset_doc_length(s->documents, doc)) most = dataset_doc_length(s->documents, doc);
    *text = text_of_prompt(s, number, (int32_t)most);
    return dataset_read(s->documents, doc, 0, most, text->tokens, err);
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

int32_t sample_token(const float *logits, int32_t V, const Sampling *s, float uniform,
                     HeapItem *scratch) {
    const float inverse_temperature = s->temperature > 0 ? 1 / s->temperature : 1;
    const int32_t k = s->top_k > 0 && s->top_k < V ? s->top_k : V;
    Heap heap = {scratch, V};
    int32_t best = 0, n = 0;
    float sum = 0, kept = 0;
    for (int32_t v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (s->temperature == 0) return best;
    for (int32_t v = 0; v < V; v++) {
        const float p = expf((logits[v] - logits[best]) * inverse_temperature);
        scratch[v] = (HeapItem){key_of(p), v};
        sum += p;
    }
    heap_make(&heap);
    if (k < V) sum = 0;
    for (int32_t i = 0; i < k && k < V; i++) sum += probability(nth_likeliest(&heap, V, i));
    if (s->top_p >= 1) {
        kept = sum;
        n = k;
    }
    while (n < k && (n == 0 || kept < s->top_p * sum))
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

// Adds one token to each text that has room for one; false when none has. logits (num_texts, V),
// scratch (V).
static bool texts_grow(Text *texts, int num_texts, Samples *s, const SampleModel *model,
                       int64_t step, float *logits, HeapItem *scratch) {
    Text *growing[MAX_SAMPLES];
    DocView docs[MAX_SAMPLES];
    Batch *b = &s->batch;
    int32_t rows[MAX_SAMPLES], n = 0;
    b->decode = false;
    for (int i = 0; i < num_texts; i++) {
        Text *text = &texts[i];
        if (text->ended || text->length == text->max_length) continue;
        const int32_t done = text->num_cached;
        docs[n] = (DocView){text->tokens + done, text->length - done, -1, NULL};
        b->decode |= done > 0;
        growing[n++] = text;
    }
    if (n == 0) return false;
    batch_pack(b, docs, n);
    for (int i = 0; i < n; i++) {
        Text *text = growing[i];
        rows[i] = b->cu_seqlens[i + 1] - 1;
        for (int32_t t = b->cu_seqlens[i]; t <= rows[i]; t++) {
            b->position_ids[t] += text->num_cached;
            b->cache_rows[t] = text->first_row;
        }
        text->num_cached = text->length;
    }
    model->next_logits(model->context, &s->batch, rows, n, logits);
    for (int i = 0; i < n; i++) {
        Text *text = growing[i];
        const float uniform = sample_uniform(s->seed, step, text->number, text->length);
        const float *own = logits + (size_t)i * (size_t)model->vocab_size;
        const int32_t id = sample_token(own, model->vocab_size, &s->how, uniform, scratch);
        text->tokens[text->length++] = id;
        text->ended = id == model->end_of_text || id == model->end_of_turn;
    }
    if (s->grown) s->grown(s->grown_context);
    return true;
}

// How many of the texts, from the first on, fit into the cache at their full length; gives each its
// rows.
static int texts_that_fit(Text *texts, int num_texts, const SampleModel *model) {
    int32_t tokens = 0;
    int n = 0;
    while (n < num_texts && n < model->max_rows &&
           texts[n].max_length <= model->cache_tokens - tokens) {
        texts[n].first_row = tokens;
        tokens += texts[n++].max_length;
    }
    assert(n > 0);
    return n;
}

void texts_write(Text *texts, int num_texts, Samples *s, const SampleModel *model, int64_t step) {
    const size_t V = (size_t)model->vocab_size;
    assert(num_texts <= MAX_SAMPLES);
    float *logits = host_calloc((size_t)num_texts * V, sizeof(float), "samples");
    HeapItem *scratch = host_calloc(V, sizeof(HeapItem), "samples");
    if (!s->batch.tokens) {
        batch_init(&s->batch, model->cache_tokens, model->cache_tokens);
        s->batch.cache_rows = host_calloc((size_t)model->cache_tokens, sizeof(int32_t), "samples");
    }
    for (int first = 0, n; first < num_texts; first += n) {
        n = texts_that_fit(texts + first, num_texts - first, model);
        while (texts_grow(texts + first, n, s, model, step, logits, scratch)) continue;
    }
    free(logits);
    free(scratch);
}

// ------------------------------------------------------------------------------------------------
// Printing

// Prints what is complete of p->bytes; with `end` all of it.
static void text_printer_flush(TextPrinter *p, bool end) {
    while (p->n > 0) {
        const unsigned char first = p->bytes[0];
        const int length = utf8_length(p->bytes, p->n);
        const size_t n = (size_t)abs(length);
        if (length < 0 && n == p->n && first >= 0xc2 && first < 0xf5 && !end) return;  // goes on
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

static void text_report(const Text *text, const Samples *s, int64_t step, RunLog *log) {
    char *chars = NULL;
    size_t n = 0;
    TextPrinter printer = {.to = open_memstream(&chars, &n)};
    if (!printer.to) return;
    for (int32_t i = 0; i < text->length; i++)
        text_printer_token(&printer, s->tokenizer, text->tokens[i]);
    text_printer_flush(&printer, true);
    fclose(printer.to);
    if (chars) report_sample(log, step, text->number + 1, text->ended, chars);
    free(chars);
}

void samples_report(Samples *s, const SampleModel *model, int64_t step, RunLog *log) {
    Error err = {0};
    Text texts[MAX_SAMPLES];
    int n = 0;
    bool ok = true;
    while (ok && n < s->num_samples) {
        ok = text_begin(&texts[n], s, n, &err);
        n++;
    }
    if (ok && n > 0) texts_write(texts, n, s, model, step);
    for (int i = 0; ok && i < n; i++) text_report(&texts[i], s, step, log);
    if (!ok) warning("no samples: %s", err.what);
    for (int i = 0; i < n; i++) free(texts[i].tokens);
}

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
// Prompts of --generate

static bool append_prompt(Generator *g, Text *text, const char *prompt, Error *err) {
    char *turn = g->chat ? chat_turn(g, text, prompt) : NULL;
    const int32_t before = text->length;
    const bool ok = text_append(text, &g->samples, turn ? turn : prompt, err);
    free(turn);
    g->prompt_tokens += text->length - before;
    return ok;
}

static bool add_prompt(Generator *g, const char *prompt, Error *err) {
    g->texts =
        host_grow(g->texts, &g->text_capacity, (size_t)g->num_texts + 1, sizeof(Text), "prompts");
    Text *text = &g->texts[g->num_texts];
    *text = text_of_prompt(&g->samples, g->num_texts++, 0);
    return append_prompt(g, text, prompt, err);
}

static bool add_lines(Generator *g, const char *path, Error *err) {
    uint64_t n;
    char *lines = file_read_all(path, 1 << 26, &n, "", err), *rest = lines;
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
// The texts in order, each from the end of its prompt, as far as they have grown

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
        text_printer_flush(&g->printer, true);
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
    Text text = text_of_prompt(&g->samples, 0, 0);
    bool ok = true;
    for (int64_t turn = 0; ok; turn++) {
        printf("> ");
        fflush(stdout);
        const ssize_t n = getline(&line, &capacity, stdin);
        if (n < 0) break;
        if (line[n - 1] == '\n') line[n - 1] = 0;
        if (!line[0]) continue;
        if (!g->chat) text.length = text.num_cached = 0;
        ok = append_prompt(g, &text, line, err);
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
