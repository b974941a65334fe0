#include "samples.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"

// ------------------------------------------------------------------------------------------------
// The beginning of a text

enum { MAX_BEGINNING = 16 };  // tokens of a document that begin a text

bool samples_encode_prompt(Samples *s, Error *err) {
    if (!s->prompt || s->num_samples == 0) return true;
    if (!s->tokenizer)
        return error_set(err, EXIT_USAGE,
                         "leave it out, or put tokenizer.json into the directory of --model or "
                         "--train",
                         "--prompt needs a tokenizer, and there is none");
    s->prompt_ids = host_calloc((size_t)s->max_seqlen, sizeof(int32_t), "prompt");
    s->prompt_length = (int32_t)tokenizer_encode(s->tokenizer, s->prompt, strlen(s->prompt),
                                                 s->prompt_ids, s->max_seqlen - 1, err);
    if (s->prompt_length != 0) return s->prompt_length > 0;
    return error_set(err, EXIT_USAGE, "leave it out to begin as validation documents do",
                     "--prompt: expected at least one token, found none");
}

Text text_of_prompt(const Samples *s, int number, int32_t prompt_length) {
    Text text = {.prompt_length = prompt_length,
                 .length = prompt_length,
                 .max_length = s->max_seqlen,
                 .number = number};
    assert(prompt_length <= s->max_seqlen);
    if (s->sample_tokens < text.max_length - prompt_length)
        text.max_length = prompt_length + s->sample_tokens;
    text.tokens = host_calloc((size_t)text.max_length, sizeof(int32_t), "samples");
    return text;
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
        const size_t whole = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
        size_t n = utf8_length(p->bytes, p->n), continued = 1;
        while (continued < p->n && (p->bytes[continued] & 0xc0) == 0x80) continued++;
        if (n == 0 && continued == p->n && p->n < whole && !end) return;
        if (n == 0)
            fputs("\xef\xbf\xbd", p->to);
        else if (n > 1 || first == '\n' || first == '\t' || (first >= 0x20 && first != 0x7f))
            fwrite(p->bytes, 1, n, p->to);
        if (n == 0) n = continued < whole ? continued : 1;
        p->n -= n;
        memmove(p->bytes, p->bytes + n, p->n);
    }
}

void text_printer_token(TextPrinter *p, const Tokenizer *tokenizer, int32_t id) {
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

void text_printer_end(TextPrinter *p) { text_printer_flush(p, true); }

static void text_report(const Text *text, const Samples *s, int64_t step, RunLog *log) {
    char *chars = NULL;
    size_t n = 0;
    TextPrinter printer = {.to = open_memstream(&chars, &n)};
    if (!printer.to) return;
    for (int32_t i = 0; i < text->length; i++)
        text_printer_token(&printer, s->tokenizer, text->tokens[i]);
    text_printer_end(&printer);
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
