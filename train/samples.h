// Texts that show what the model has learnt. Those of a round grow together, packed into one batch
// (several where their rooms exceed its capacity), one token a forward pass.
#ifndef UNPAD_SAMPLES_H
#define UNPAD_SAMPLES_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>

#include "../data/base/error.h"
#include "../data/base/hash.h"
#include "../data/base/memory.h"
#include "../data/batches/batch.h"
#include "../data/models/bpe.h"
#include "../data/models/tokenizer.h"
#include "../data/runs/sampling.h"
#include "../data/shards/dataset.h"
#include "../llama.h"           // defines: LlamaModel

enum { MAX_SAMPLES = 64 };

typedef struct {
    int num_samples, sample_tokens;  // texts a round, tokens written per text
    const char *prompt;              // how each begins; NULL: as documents of `borrowed` do
    Dataset *borrowed;
    const Tokenizer *tokenizer;  // NULL: ids are printed
    Sampling how;
    uint64_t seed;
    int32_t max_seqlen;  // of a text, its prompt included
    // made when they are first needed
    int32_t *prompt_ids, prompt_length;
    Batch batch;
} Samples;

typedef struct {
    int32_t *tokens;  // (room)
    int32_t length, room;
    int number;  // in the round: its draws do not depend on the texts beside it
    bool ended;  // its last token is the model's end of text
} Text;

// ------------------------------------------------------------------------------------------------
// How a text begins

// A prompt that cannot be used is found out before the training, not after it.
static inline bool samples_encode_prompt(Samples *s, Error *err) {
    if (!s->prompt || s->num_samples == 0) return true;
    if (!s->tokenizer)
        return error_set(err, EXIT_USAGE,
                         "leave it out, or put tokenizer.json into the directory of --model or "
                         "--train",
                         "--prompt needs a tokenizer, and there is none");
    s->prompt_ids = (int32_t *)host_calloc((size_t)s->max_seqlen, sizeof(int32_t), "prompt");
    s->prompt_length = (int32_t)tokenizer_encode(s->tokenizer, s->prompt, strlen(s->prompt),
                                                 s->prompt_ids, s->max_seqlen - 1, err);
    if (s->prompt_length != 0) return s->prompt_length > 0;
    return error_set(err, EXIT_USAGE, "leave it out to begin as validation documents do",
                     "--prompt: expected at least one token, found none");
}

// A text with room for a prompt of this many tokens, which is at most max_seqlen, and what follows.
static inline Text text_of_prompt(const Samples *s, int number, int32_t prompt_length) {
    Text text = {NULL, prompt_length, s->max_seqlen, number, false};
    if (s->sample_tokens < text.room - prompt_length) text.room = prompt_length + s->sample_tokens;
    text.tokens = (int32_t *)host_calloc((size_t)text.room, sizeof(int32_t), "samples");
    return text;
}

// The prompt, or the first tokens of a document: at most half of what a text may have.
static inline bool text_begin(Text *text, const Samples *s, int number, Error *err) {
    int64_t most = 16;
    if (s->prompt) {
        *text = text_of_prompt(s, number, s->prompt_length);
        memcpy(text->tokens, s->prompt_ids, (size_t)s->prompt_length * sizeof(int32_t));
        return true;
    }
    const int64_t doc = number % s->borrowed->num_docs;
    if (most > s->max_seqlen / 2) most = s->max_seqlen > 1 ? s->max_seqlen / 2 : 1;
    if (most > dataset_doc_length(s->borrowed, doc)) most = dataset_doc_length(s->borrowed, doc);
    *text = text_of_prompt(s, number, (int32_t)most);
    return dataset_read(s->borrowed, doc, 0, most, text->tokens, err);
}

// ------------------------------------------------------------------------------------------------
// How it goes on

static inline float sample_uniform(uint64_t seed, int64_t step, int text, int position) {
    uint64_t key = mix64(seed * 0x9e3779b97f4a7c15ull + (uint64_t)step);
    return (float)(mix64(key ^ ((uint64_t)text << 32 | (uint64_t)position)) >> 40) * 0x1p-24f;
}

// One token for each of the texts that can take one; false when none can.
// logits (num_texts, V), scratch (V).
static inline bool texts_grow(Text *texts, int num_texts, Samples *s, LlamaModel *m, int64_t step,
                              float *logits, Candidate *scratch) {
    Text *growing[MAX_SAMPLES];
    DocView docs[MAX_SAMPLES];
    int32_t rows[MAX_SAMPLES], behind = 0, n = 0;
    for (int i = 0; i < num_texts; i++) {
        if (texts[i].ended || texts[i].length == texts[i].room) continue;
        DocView doc = {texts[i].tokens, texts[i].length, -1};
        behind += texts[i].length;
        rows[n] = behind - 1;
        docs[n] = doc;
        growing[n++] = &texts[i];
    }
    if (n == 0) return false;
    comm_phase("sample", -1);
    batch_pack(&s->batch, docs, n);
    llama_set_batch(m, &s->batch);
    llama_forward(m);
    llama_logits(m, logits, rows, n);
    const int V = m->config.vocab_size;
    for (int i = 0; i < n; i++) {
        Text *text = growing[i];
        const float uniform = sample_uniform(s->seed, step, text->number, text->length);
        int32_t id = sample_token(logits + (size_t)i * (size_t)V, V, &s->how, uniform, scratch);
        text->tokens[text->length++] = id;
        text->ended = id == m->config.eos_token_id;
    }
    return true;
}

// How many of the texts, from the first on, fit into one batch: at least one does.
static inline int texts_that_fit(const Text *texts, int num_texts, const LlamaModel *m) {
    int64_t tokens = 0;
    int n = 0;
    while (n < num_texts && n < m->head_chunk && tokens + texts[n].room <= m->sizes.capacity)
        tokens += texts[n++].room;
    assert(n > 0);
    return n;
}

// Writes texts (num_texts <= MAX_SAMPLES), which hold their prompts, to their ends.
static inline void texts_write(Text *texts, int num_texts, Samples *s, LlamaModel *m,
                               int64_t step) {
    const size_t V = (size_t)m->config.vocab_size;
    float *logits = (float *)host_calloc((size_t)num_texts * V, sizeof(float), "samples");
    Candidate *scratch = (Candidate *)host_calloc(V, sizeof(Candidate), "samples");
    if (!s->batch.tokens) batch_init(&s->batch, m->sizes.capacity, m->sizes.capacity);
    for (int first = 0, n; first < num_texts; first += n) {
        n = texts_that_fit(texts + first, num_texts - first, m);
        while (texts_grow(texts + first, n, s, m, step, logits, scratch)) continue;
    }
    free(logits);
    free(scratch);
}

// ------------------------------------------------------------------------------------------------
// What is shown of it

// Special tokens are left out, control characters too; without a tokenizer, the ids.
static inline void token_print(const Tokenizer *tokenizer, int32_t id) {
    size_t n = 0;
    bool known = tokenizer && id < tokenizer->vocab_size;
    const unsigned char *bytes = known ? tokenizer_bytes(tokenizer, id, &n) : NULL;
    if (!bytes) {
        printf("<%d>", id);
        return;
    }
    for (size_t k = 0; k < n && !tokenizer->special[id]; k++)
        if (bytes[k] == '\n' || bytes[k] == '\t' || (bytes[k] >= 0x20 && bytes[k] != 0x7f))
            putchar(bytes[k]);
}

static inline void text_print(const Text *text, const Samples *s, int64_t step) {
    printf("--- sample %d after step %lld%s\n", text->number + 1, (long long)step,
           text->ended ? " (ended)" : "");
    for (int32_t i = 0; i < text->length; i++) token_print(s->tokenizer, text->tokens[i]);
    printf("\n");
}

static inline void samples_print(Samples *s, LlamaModel *m, int64_t step) {
    Error err = {0, "", ""};
    Text texts[MAX_SAMPLES];
    int n = 0;
    bool ok = true;
    while (ok && n < s->num_samples) {
        ok = text_begin(&texts[n], s, n, &err);
        n++;
    }
    if (ok && n > 0) texts_write(texts, n, s, m, step);
    for (int i = 0; ok && i < n; i++) text_print(&texts[i], s, step);
    if (!ok) fprintf(stderr, "warning: no samples: %s\n", err.what);
    for (int i = 0; i < n; i++) free(texts[i].tokens);
}

#endif
