#include "text_writer.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/clock.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "../base/signals.h"

// ------------------------------------------------------------------------------------------------
// Texts

// A text may grow to this length.
static int32_t text_most(const Text *text, const Options *o) {
    const int32_t most = text->prompt_length + o->sample_tokens;
    return most < o->max_seqlen ? most : o->max_seqlen;
}

Text *texts_add(TextList *texts, const Options *o, int32_t prompt_length) {
    const size_t n = (size_t)texts->n;
    texts->list = host_grow(texts->list, &texts->capacity, n + 1, sizeof(Text), "texts");
    assert(prompt_length <= o->max_seqlen);
    texts->list[n] = (Text){.prompt_length = prompt_length,
                            .length = prompt_length,
                            .number = texts->n++,
                            .tokens = host_calloc((size_t)o->max_seqlen, sizeof(int32_t), "texts")};
    return &texts->list[n];
}

void texts_free(TextList *texts) {
    for (int i = 0; i < texts->n; i++) free(texts->list[i].tokens);
    free(texts->list);
}

bool text_append(Text *text, const Options *o, const Tokenizer *tokenizer, const char *prompt,
                 Error *err) {
    const int64_t n =
        tokenizer_encode(tokenizer, prompt, strlen(prompt), text->tokens + text->length,
                         o->max_seqlen - 1 - text->length, err);
    if (n == 0)
        error_set(err, EXIT_USAGE, "leave it out, or give some text",
                  "prompt: expected at least one token, found none");
    if (n <= 0) return false;
    text->prompt_length = text->length += (int32_t)n;
    text->ended = false;
    return true;
}

void text_begin_again(Text *text, int32_t length) {
    text->length = length;
    text->num_cached = 0;
    text->ended = false;
}

int32_t texts_cache_tokens(const TextList *texts, const Options *o) {
    int64_t tokens = 0;
    for (int i = 0; i < texts->n; i++) tokens += text_most(&texts->list[i], o);
    return (int32_t)(tokens < o->micro_batch_tokens ? tokens : o->micro_batch_tokens);
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

static void text_print_token(TextPrinter *p, int32_t id) {
    const Tokenizer *tokenizer = p->tokenizer;
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

void text_print(TextPrinter *p, const int32_t *ids, int64_t n, bool is_end) {
    for (int64_t i = 0; i < n; i++) text_print_token(p, ids[i]);
    if (is_end) text_printer_flush(p, true);
}

// ------------------------------------------------------------------------------------------------
// Drawing a token

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

// ------------------------------------------------------------------------------------------------
// TextList that grow together

enum { MAX_GROUP = 64 };

typedef struct {
    TextWriter *writer;
    const ModelFace *model;
    int64_t step;
    Text *texts;  // (num_texts)
    int num_texts;
    float *logits;      // (num_texts, vocab_size)
    HeapItem *scratch;  // (vocab_size)
    bool has_headings;
    int current;      // the text that is printed, and
    int32_t printed;  // how far; -1: not even its heading
} TextGroup;

static bool can_grow(const TextGroup *g, const Text *text) {
    return !text->ended && text->length < text_most(text, g->writer->o);
}

// Packs what is not in the cache of each text that has room for one more token; rows: the last row
// of each. Returns how many these are.
static int32_t group_pack(const TextGroup *g, Text **growing, int32_t *rows) {
    Batch *b = &g->writer->batch;
    DocView docs[MAX_GROUP];
    int32_t n = 0;
    b->decode = false;
    for (int i = 0; i < g->num_texts; i++) {
        Text *text = &g->texts[i];
        if (!can_grow(g, text)) continue;
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

// Is the end of a turn the last that was written? Without a token of its own it is several.
static bool ends_turn(const TextWriter *w, const Text *text) {
    const int64_t n = w->turn_end_length;
    return n > 0 && text->length - text->prompt_length >= n &&
           memcmp(text->tokens + text->length - n, w->turn_end, (size_t)n * sizeof(int32_t)) == 0;
}

// What no text should have: ids without a token, as a vocabulary that is padded has them, and
// special tokens but for those that end a text or a turn.
static void forbid_tokens(const TextWriter *w, const ModelFace *model, float *logits) {
    const Tokenizer *t = w->printer.tokenizer;
    for (int32_t id = 0; t && id < model->vocab_size; id++) {
        size_t n;
        tokenizer_bytes(t, id, &n);
        const bool is_text = n > 0 && !t->special[id];
        if (!is_text && !(w->turn_end_length == 1 && id == w->turn_end[0]) &&
            !token_ids_have(model->text_ends, id))
            logits[id] = -INFINITY;
    }
}

// Adds one token to each text that has room for one; returns how many have.
static int32_t group_grow(const TextGroup *g) {
    const TextWriter *w = g->writer;
    const Options *o = w->o;
    const ModelFace *model = g->model;
    Text *growing[MAX_GROUP];
    int32_t rows[MAX_GROUP];
    const int32_t n = group_pack(g, growing, rows);
    if (n > 0) model->next_logits(model->model, &w->batch, rows, n, g->logits);
    for (int i = 0; i < n; i++) {
        Text *text = growing[i];
        const float uniform =
            sample_uniform((uint64_t)o->seed, g->step, text->number, text->length);
        float *own = g->logits + (size_t)i * (size_t)model->vocab_size;
        forbid_tokens(w, model, own);
        const int32_t id =
            sample_token(own, model->vocab_size, o->temperature, o->top_p, uniform, g->scratch);
        text->tokens[text->length++] = id;
        text->ended = token_ids_have(model->text_ends, id) || ends_turn(w, text);
    }
    return n;
}

// Prints what the last pass has added: the texts in order, each from the end of its prompt, as far
// as they have grown.
static void group_print(TextGroup *g) {
    TextWriter *w = g->writer;
    for (; g->current < g->num_texts; g->current++) {
        const Text *text = &g->texts[g->current];
        if (g->printed < 0 && g->has_headings) printf("--- %d\n", text->number + 1);
        if (g->printed < 0) g->printed = text->prompt_length;
        const bool grows = can_grow(g, text);
        // what may become the end of a turn is not shown yet; as one token it never is
        const bool holds_back = w->turn_end_length > 1 && (grows || ends_turn(w, text));
        const int64_t shown = text->length - (holds_back ? w->turn_end_length : 0);
        text_print(&w->printer, text->tokens + g->printed, shown - g->printed, !grows);
        if (shown > g->printed) g->printed = (int32_t)shown;
        if (grows) break;
        printf("\n");
        g->printed = -1;
    }
    fflush(stdout);
}

static void group_write(TextGroup *g) {
    TextWriter *w = g->writer;
    g->current = 0;
    g->printed = -1;
    for (bool first_pass = true;; first_pass = false) {
        const double start_ms = now_ms();
        const int32_t n = group_grow(g);
        if (n == 0) return;
        *(first_pass ? &w->prompt_ms : &w->later_ms) += now_ms() - start_ms;
        if (!first_pass) w->later_tokens += n;
        if (w->printer.to) group_print(g);
        if (stop_signal) return;
    }
}

// Takes as many of the texts (n) as fit into the cache at their full length; gives each its rows.
static void group_take(TextGroup *g, Text *texts, int n) {
    int32_t tokens = 0;
    g->texts = texts;
    g->num_texts = 0;
    while (g->num_texts < n && g->num_texts < g->model->max_rows && g->num_texts < MAX_GROUP) {
        const int32_t most = text_most(&texts[g->num_texts], g->writer->o);
        if (most > g->model->cache_tokens - tokens) break;
        texts[g->num_texts++].first_row = tokens;
        tokens += most;
    }
    assert(g->num_texts > 0);
}

void texts_write(TextWriter *w, const TextList *texts, ModelFace model, int64_t step) {
    const size_t V = (size_t)model.vocab_size;
    TextGroup g = {.writer = w, .model = &model, .step = step, .has_headings = texts->n > 1};
    g.logits = host_calloc((texts->n < MAX_GROUP ? (size_t)texts->n : MAX_GROUP) * V, sizeof(float),
                           "texts");
    g.scratch = host_calloc(V, sizeof(HeapItem), "texts");
    if (!w->batch.tokens) {
        batch_init(&w->batch, model.cache_tokens, model.cache_tokens);
        w->batch.cache_rows = host_calloc((size_t)model.cache_tokens, sizeof(int32_t), "texts");
    }
    for (int first = 0; first < texts->n; first += g.num_texts) {
        group_take(&g, texts->list + first, texts->n - first);
        group_write(&g);
    }
    free(g.logits);
    free(g.scratch);
}
