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

// ---- Texts --------------------------------------------------------------------------------------

// A text may grow to this length.
static int32_t text_most(const TextWriter *w, const Text *text) {
    const int32_t most = text->prompt_length + w->o->sample_tokens;
    return most < w->o->max_seqlen ? most : w->o->max_seqlen;
}

static bool text_can_grow(const TextWriter *w, const Text *text) {
    return !text->ended && text->length < text_most(w, text);
}

Text *text_add(TextWriter *w, int32_t prompt_length) {
    const size_t n = (size_t)w->num_texts;
    array_grow(w->texts, &w->text_capacity, n + 1, "texts");
    Text *text = &w->texts[n];
    assert(prompt_length <= w->o->max_seqlen);
    *text = (Text){.prompt_length = prompt_length, .length = prompt_length, .number = w->num_texts};
    text->tokens = host_calloc((size_t)w->o->max_seqlen, sizeof(int32_t), "texts");
    w->num_texts++;
    return text;
}

bool text_append(const TextWriter *w, Text *text, const char *prompt, Error *err) {
    const int64_t room = w->o->max_seqlen - 1 - text->length,
                  n = tokenizer_encode(w->printer.tokenizer, prompt, strlen(prompt),
                                       text->tokens + text->length, room > 0 ? room : 0, err);
    if (n < 0 && text->length > 0)
        text_copy(err->hint, sizeof err->hint,
                  "/reset starts over; a larger --max-seqlen holds longer conversations");
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

int32_t texts_cache_tokens(const TextWriter *w) {
    int64_t tokens = 0;
    for (int i = 0; i < w->num_texts; i++) tokens += text_most(w, &w->texts[i]);
    return (int32_t)(tokens < w->o->micro_batch_tokens ? tokens : w->o->micro_batch_tokens);
}

void texts_free(TextWriter *w) {
    for (int i = 0; i < w->num_texts; i++) free(w->texts[i].tokens);
    free(w->texts);
    batch_free(&w->batch);
}

// ---- Printing -----------------------------------------------------------------------------------

// Prints the complete characters in p->bytes; with `end` everything.
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

// ---- Drawing a token ----------------------------------------------------------------------------

// Candidates by -p, whose bits are in the order of the values; equal ones by id, so that the order
// is the same on every machine.
typedef union {
    float value;
    uint32_t bits;
} Float;
static int64_t key_of(float p) { return -(int64_t)(Float){.value = p}.bits; }
static float probability(HeapItem i) { return (Float){.bits = (uint32_t)-i.key}.value; }

// The i-th likeliest of V candidates, by a heapsort that goes only so far: most draws are among the
// first few. The candidates that it has popped lie after the heap, the likeliest last.
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

// ---- Texts that grow together -------------------------------------------------------------------

enum { MAX_GROUP = 64 };

// Packs the tokens of each text with room for one more that are not in the cache. rows: the last
// row of each such text. Returns their number.
static int32_t group_pack(TextWriter *w, Text **growing, int32_t *rows) {
    DocView docs[MAX_GROUP];
    int32_t first_rows[MAX_GROUP], n = 0;
    for (Text *text = w->group; text < w->group + w->group_size; text++) {
        if (!text_can_grow(w, text)) continue;
        docs[n] = (DocView){text->tokens, text->length, -1, NULL, NULL, text->num_cached};
        first_rows[n] = text->first_row;
        text->num_cached = text->length;
        growing[n++] = text;
    }
    if (n == 0) return 0;
    batch_pack_cached(&w->batch, docs, first_rows, n);
    assert(batch_is_valid(&w->batch, w->model.vocab_size));
    for (int i = 0; i < n; i++) rows[i] = w->batch.cu_seqlens[i + 1] - 1;
    return n;
}

// Does the text end with the end of a turn? Without a token of its own that is several tokens.
static bool ends_turn(const TextWriter *w, const Text *text) {
    const int64_t n = w->turn_end_length;
    return n > 0 && text->length - text->prompt_length >= n &&
           memcmp(text->tokens + text->length - n, w->turn_end, (size_t)n * sizeof(int32_t)) == 0;
}

// Forbids ids without a token, which a padded vocabulary has, and special tokens, except the ends
// of a text or a turn.
static void forbid_tokens(const TextWriter *w, float *logits) {
    const Tokenizer *t = w->printer.tokenizer;
    for (int32_t id = 0; t && id < w->model.vocab_size; id++) {
        size_t n;
        tokenizer_bytes(t, id, &n);
        const bool is_text = n > 0 && !t->special[id];
        if (!is_text && !(w->turn_end_length == 1 && id == w->turn_end[0]) &&
            !token_ids_have(w->model.text_ends, id))
            logits[id] = -INFINITY;
    }
}

// Adds one token to each text that has room for one; returns how many have.
static int32_t group_grow(TextWriter *w) {
    const Options *o = w->o;
    const int32_t V = w->model.vocab_size;
    Text *growing[MAX_GROUP];
    int32_t rows[MAX_GROUP];
    const int32_t n = group_pack(w, growing, rows);
    if (n > 0) w->model.next_logits(w->model.model, &w->batch, rows, n, w->logits);
    for (int i = 0; i < n; i++) {
        Text *text = growing[i];
        float *logits = w->logits + (size_t)i * (size_t)V;
        const float uniform =
            sample_uniform((uint64_t)o->seed, w->step, text->number, text->length);
        forbid_tokens(w, logits);
        const int32_t id =
            sample_token(logits, V, o->temperature, o->top_p, uniform, w->candidates);
        text->tokens[text->length++] = id;
        text->ended = token_ids_have(w->model.text_ends, id) || ends_turn(w, text);
    }
    return n;
}

// Prints the tokens that the last pass has added: the texts in order, each from the end of its
// prompt, as far as they have grown.
static void group_print(TextWriter *w) {
    for (; w->current < w->group_size; w->current++) {
        const Text *text = &w->group[w->current];
        if (w->printed < 0 && w->num_texts > 1) printf("--- %d\n", text->number + 1);
        if (w->printed < 0) w->printed = text->prompt_length;
        const bool grows = text_can_grow(w, text);
        // what may become the end of a turn is not shown yet; as one token it never is
        const bool holds_back = w->turn_end_length > 1 && (grows || ends_turn(w, text));
        const int32_t shown = text->length - (holds_back ? (int32_t)w->turn_end_length : 0);
        text_print(&w->printer, text->tokens + w->printed, shown - w->printed, !grows);
        if (shown > w->printed) w->printed = shown;
        if (grows) break;
        printf("\n");
        w->printed = -1;
    }
    fflush(stdout);
}

static void group_write(TextWriter *w) {
    w->current = 0;
    w->printed = -1;
    for (bool first_pass = true;; first_pass = false) {
        const double start_ms = now_ms();
        const int32_t n = group_grow(w);
        if (n == 0) return;
        *(first_pass ? &w->prompt_ms : &w->later_ms) += now_ms() - start_ms;
        if (!first_pass) w->later_tokens += n;
        if (w->printer.to) group_print(w);
        if (stop_signal) return;
    }
}

// The next group: as many texts as fit into the cache at their full length. Gives each its rows.
static void group_take(TextWriter *w, Text *texts, int num_texts) {
    int32_t tokens = 0;
    int n = 0;
    for (; n < num_texts && n < w->model.max_rows && n < MAX_GROUP; n++) {
        const int32_t most = text_most(w, &texts[n]);
        if (most > w->model.cache_tokens - tokens) break;
        texts[n].first_row = tokens;
        tokens += most;
    }
    assert(n > 0);
    w->group = texts;
    w->group_size = n;
}

void texts_write(TextWriter *w, ModelFace model, int64_t step) {
    const size_t V = (size_t)model.vocab_size;
    const size_t most = w->num_texts < MAX_GROUP ? (size_t)w->num_texts : MAX_GROUP;
    w->model = model;
    w->step = step;
    w->logits = host_calloc(most * V, sizeof(float), "texts");
    w->candidates = host_calloc(V, sizeof(HeapItem), "texts");
    if (!w->batch.tokens) batch_init(&w->batch, model.cache_tokens, model.cache_tokens);
    for (int first = 0; first < w->num_texts; first += w->group_size) {
        group_take(w, w->texts + first, w->num_texts - first);
        group_write(w);
    }
    free(w->logits);
    free(w->candidates);
}
