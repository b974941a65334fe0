#include "samples.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/hash.h"
#include "../base/memory.h"

// ------------------------------------------------------------------------------------------------
// The beginning of a text

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
    Text text = {.number = number, .length = prompt_length, .max_length = s->max_seqlen};
    assert(prompt_length <= s->max_seqlen);
    if (s->sample_tokens < text.max_length - prompt_length)
        text.max_length = prompt_length + s->sample_tokens;
    text.tokens = host_calloc((size_t)text.max_length, sizeof(int32_t), "samples");
    return text;
}

// The prompt, or the first tokens of a document: at most 16, and at most half of max_seqlen.
static bool text_begin(Text *text, const Samples *s, int number, Error *err) {
    int64_t most = 16;
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

// Likeliest first; equal ones by id, so that the order is the same on every machine.
static int candidate_compare(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->p != y->p ? (x->p < y->p ? 1 : -1) : (x->id > y->id) - (x->id < y->id);
}

int32_t sample_token(const float *logits, int32_t V, const Sampling *s, float uniform,
                     Candidate *scratch) {
    const float inverse_temperature = s->temperature > 0 ? 1 / s->temperature : 1;
    float max = -INFINITY, sum = 0, kept = 0;
    for (int32_t v = 0; v < V; v++) max = fmaxf(max, logits[v]);
    for (int32_t v = 0; v < V; v++) {
        scratch[v].p = expf((logits[v] - max) * inverse_temperature);
        scratch[v].id = v;
    }
    qsort(scratch, (size_t)V, sizeof *scratch, candidate_compare);
    if (s->temperature == 0) return scratch[0].id;
    const int32_t k = s->top_k > 0 && s->top_k < V ? s->top_k : V;
    int32_t n = 0;
    for (int32_t v = 0; v < k; v++) sum += scratch[v].p;
    while (n < k && (n == 0 || kept < s->top_p * sum)) kept += scratch[n++].p;
    float target = uniform * kept;
    for (int32_t i = 0; i < n - 1; i++)
        if ((target -= scratch[i].p) < 0) return scratch[i].id;
    return scratch[n - 1].id;
}

static float sample_uniform(uint64_t seed, int64_t step, int text, int position) {
    uint64_t key = mix64(seed * 0x9e3779b97f4a7c15ull + (uint64_t)step);
    return (float)(mix64(key ^ ((uint64_t)text << 32 | (uint64_t)position)) >> 40) * 0x1p-24f;
}

// Adds one token to each text that has room for one; false when none has. logits (num_texts, V),
// scratch (V).
static bool texts_grow(Text *texts, int num_texts, Samples *s, const SampleModel *model,
                       int64_t step, float *logits, Candidate *scratch) {
    Text *growing[MAX_SAMPLES];
    DocView docs[MAX_SAMPLES];
    int32_t rows[MAX_SAMPLES], end = 0, n = 0;
    for (int i = 0; i < num_texts; i++) {
        if (texts[i].ended || texts[i].length == texts[i].max_length) continue;
        end += texts[i].length;
        rows[n] = end - 1;
        docs[n] = (DocView){texts[i].tokens, texts[i].length, -1, NULL};
        growing[n++] = &texts[i];
    }
    if (n == 0) return false;
    batch_pack(&s->batch, docs, n);
    model->next_logits(model->context, &s->batch, rows, n, logits);
    for (int i = 0; i < n; i++) {
        Text *text = growing[i];
        const float uniform = sample_uniform(s->seed, step, text->number, text->length);
        const float *own = logits + (size_t)i * (size_t)model->vocab_size;
        const int32_t id = sample_token(own, model->vocab_size, &s->how, uniform, scratch);
        text->tokens[text->length++] = id;
        text->ended = id == model->end_of_text;
    }
    return true;
}

// How many of the texts, from the first on, fit into one batch at their full length.
static int texts_that_fit(const Text *texts, int num_texts, const SampleModel *model) {
    int64_t tokens = 0;
    int n = 0;
    while (n < num_texts && n < model->max_rows &&
           tokens + texts[n].max_length <= model->micro_batch_tokens)
        tokens += texts[n++].max_length;
    assert(n > 0);
    return n;
}

void texts_write(Text *texts, int num_texts, Samples *s, const SampleModel *model, int64_t step) {
    const size_t V = (size_t)model->vocab_size;
    assert(num_texts <= MAX_SAMPLES);
    float *logits = host_calloc((size_t)num_texts * V, sizeof(float), "samples");
    Candidate *scratch = host_calloc(V, sizeof(Candidate), "samples");
    if (!s->batch.tokens)
        batch_init(&s->batch, model->micro_batch_tokens, model->micro_batch_tokens);
    for (int first = 0, n; first < num_texts; first += n) {
        n = texts_that_fit(texts + first, num_texts - first, model);
        while (texts_grow(texts + first, n, s, model, step, logits, scratch)) continue;
    }
    free(logits);
    free(scratch);
}

// ------------------------------------------------------------------------------------------------
// Printing

// Without special tokens and control characters; ids where there is no tokenizer.
static void token_print(const Tokenizer *tokenizer, int32_t id, FILE *to) {
    size_t n = 0;
    bool known = tokenizer && id < tokenizer->vocab_size;
    const unsigned char *bytes = known ? tokenizer_bytes(tokenizer, id, &n) : NULL;
    if (!bytes) {
        fprintf(to, "<%d>", id);
        return;
    }
    for (size_t k = 0; k < n && !tokenizer->special[id]; k++)
        if (bytes[k] == '\n' || bytes[k] == '\t' || (bytes[k] >= 0x20 && bytes[k] != 0x7f))
            fputc(bytes[k], to);
}

static void text_report(const Text *text, const Samples *s, int64_t step, RunLog *log) {
    char *chars = NULL;
    size_t n = 0;
    FILE *to = open_memstream(&chars, &n);
    if (!to) return;
    for (int32_t i = 0; i < text->length; i++) token_print(s->tokenizer, text->tokens[i], to);
    fclose(to);
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
