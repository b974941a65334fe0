// Texts that show what the model has learnt: all texts of a round grow together in one packed
// batch, so that a round costs as many forward passes as its texts have tokens.
#ifndef UNPAD_SAMPLES_H
#define UNPAD_SAMPLES_H

#include <stdio.h>

#include "../data/bpe.h"        // defines: tokenizer_encode
#include "../data/documents.h"  // defines: Dataset
#include "../data/sampling.h"   // defines: Sampling, sample_token
#include "../data/tokenizer.h"  // defines: Tokenizer
#include "../llama.h"           // defines: LlamaModel
#include "weights.h"            // defines: llama_hash

enum { MAX_SAMPLES = 64 };

typedef struct {
    int num_samples, sample_tokens;  // texts a round, tokens written per text
    const char *prompt;              // how each begins; NULL: as documents of `borrowed` do
    Dataset *borrowed;
    const Tokenizer *tokenizer;  // NULL: ids are printed
    Sampling how;
    uint64_t seed;
    int32_t max_seqlen, capacity;  // of a text, of the batch of all
    // made when they are first needed
    int32_t *prompt_ids, prompt_length;
    Batch batch;
} Samples;

typedef struct {
    int32_t *tokens;
    int32_t length, prompt_length;
    bool ended;
} Text;

// ------------------------------------------------------------------------------------------------
// How a text begins

// Tokens a text may have, so that all texts of a round fit into one batch.
static inline int32_t samples_room(const Samples *s) {
    int32_t share = s->num_samples ? s->capacity / s->num_samples : 0;
    return share < s->max_seqlen ? share : s->max_seqlen;
}

// A prompt that cannot be used is found out before the training, not after it.
static inline bool samples_encode_prompt(Samples *s, Error *err) {
    if (!s->prompt || s->num_samples == 0) return true;
    if (!s->tokenizer)
        return error_set(err, EXIT_USAGE,
                         "leave it out, or put tokenizer.json into the directory of --model or "
                         "--train",
                         "--prompt needs a tokenizer, and there is none");
    const int32_t room = samples_room(s);
    s->prompt_ids = (int32_t *)host_calloc((size_t)room, sizeof(int32_t), "prompt");
    s->prompt_length = (int32_t)tokenizer_encode(s->tokenizer, s->prompt, strlen(s->prompt),
                                                 s->prompt_ids, room / 2, err);
    return s->prompt_length >= 0;
}

// The prompt, or the first tokens of a document.
static inline bool text_begin(Text *text, const Samples *s, int number, Error *err) {
    enum { BORROWED_TOKENS = 16 };
    int64_t n = s->prompt_length;
    if (s->prompt) {
        memcpy(text->tokens, s->prompt_ids, (size_t)n * sizeof(int32_t));
    } else {
        const int64_t doc = number % dataset_num_docs(s->borrowed);
        n = dataset_doc_length(s->borrowed, doc);
        if (n > BORROWED_TOKENS) n = BORROWED_TOKENS;
        if (!dataset_read(s->borrowed, doc, 0, n, text->tokens, err)) return false;
    }
    text->length = text->prompt_length = (int32_t)n;
    return n > 0;
}

// ------------------------------------------------------------------------------------------------
// How it goes on

static inline float sample_uniform(uint64_t seed, int64_t step, int text, int position) {
    uint64_t key = llama_hash(seed * 0x9e3779b97f4a7c15ull + (uint64_t)step);
    return (float)(llama_hash(key ^ ((uint64_t)text << 32 | (uint64_t)position)) >> 40) * 0x1p-24f;
}

// One token for every text that has not ended: a forward pass over all of them, packed.
// logits (num_samples, V), scratch (V).
static inline void texts_grow(Text *texts, Samples *s, LlamaModel *m, int64_t step, float *logits,
                              Candidate *scratch) {
    DocView docs[MAX_SAMPLES];
    int32_t rows[MAX_SAMPLES], last = 0;
    for (int i = 0; i < s->num_samples; i++) {
        DocView doc = {texts[i].tokens, texts[i].length, -1};
        docs[i] = doc;
        last += texts[i].length;
        rows[i] = last - 1;
    }
    comm_phase("sample", -1);
    batch_pack(&s->batch, docs, s->num_samples);
    llama_set_batch(m, &s->batch);
    llama_forward(m);
    llama_logits(m, logits, rows, s->num_samples);
    const int V = m->config.vocab_size;
    for (int i = 0; i < s->num_samples; i++) {
        if (texts[i].ended) continue;
        int32_t id = sample_token(logits + (size_t)i * (size_t)V, V, &s->how,
                                  sample_uniform(s->seed, step, i, texts[i].length), scratch);
        texts[i].tokens[texts[i].length++] = id;
        texts[i].ended = id == m->config.eos_token_id;
    }
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

static inline void text_print(const Text *text, const Samples *s, int64_t step, int number) {
    printf("--- sample %d after step %lld%s\n", number + 1, (long long)step,
           text->ended ? " (ended)" : "");
    for (int32_t i = 0; i < text->length; i++) token_print(s->tokenizer, text->tokens[i]);
    printf("\n");
}

static inline void samples_print(Samples *s, LlamaModel *m, int64_t step) {
    Error err = {0, "", ""};
    const int32_t room = samples_room(s);
    const size_t n = (size_t)s->num_samples, V = (size_t)m->config.vocab_size;
    if (n == 0 || room < 2 || s->num_samples > m->head_chunk) return;
    Text *texts = (Text *)host_calloc(n, sizeof(Text), "samples");
    int32_t *tokens = (int32_t *)host_calloc(n * (size_t)room, sizeof(int32_t), "samples");
    float *logits = (float *)host_calloc(n * V, sizeof(float), "samples");
    Candidate *scratch = (Candidate *)host_calloc(V, sizeof(Candidate), "samples");
    if (!s->batch.tokens) batch_init(&s->batch, m->sizes.capacity, m->sizes.capacity);
    bool ok = true;
    for (int i = 0; ok && i < s->num_samples; i++) {
        texts[i].tokens = tokens + (size_t)i * (size_t)room;
        ok = text_begin(&texts[i], s, i, &err);
    }
    for (int32_t k = 0; ok && k < s->sample_tokens && texts[0].prompt_length + k < room; k++)
        texts_grow(texts, s, m, step, logits, scratch);
    for (int i = 0; ok && i < s->num_samples; i++) text_print(&texts[i], s, step, i);
    if (!ok) error_print(&err);
    free(texts);
    free(tokens);
    free(logits);
    free(scratch);
}

#endif
