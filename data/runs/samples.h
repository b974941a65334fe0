// Texts that a model writes. Those of one round grow together: their prompts are one packed batch,
// then each pass takes the last token of every text and finds the others' keys and values in the
// cache. What does not fit at one time waits for the next round.
#ifndef UNPAD_SAMPLES_H
#define UNPAD_SAMPLES_H

#include <stdio.h>

#include "../base/error.h"
#include "../base/heap.h"
#include "../batches/batch.h"
#include "../models/tokenizer.h"
#include "../shards/dataset.h"
#include "log.h"

// The next token from its logits: temperature, then top-k, then top-p, then one draw.
typedef struct {
    float temperature;  // 0: always the likeliest token
    int top_k;          // draw from the k likeliest; 0: from all
    float top_p;        // draw from the smallest set of likeliest tokens whose sum is >= p; 1: all
} Sampling;

// logits (V), uniform in [0,1): the draw; scratch (V).
int32_t sample_token(const float *logits, int32_t V, const Sampling *s, float uniform,
                     HeapItem *scratch);

enum { MAX_SAMPLES = 64 };

// The model that writes the texts. next_logits: logits (n, vocab_size) of rows (n, ascending) of a
// packed batch; keeps the keys and values of its tokens.
typedef struct {
    int32_t vocab_size;
    int32_t end_of_text, end_of_turn;  // either ends a text; -1: none
    int32_t cache_tokens;              // of the texts of one round; a batch holds as many
    int32_t max_rows;                  // of one call
    void *context;
    void (*next_logits)(void *context, const Batch *batch, const int32_t *rows, int32_t n,
                        float *logits);
} SampleModel;

typedef struct {
    int num_samples, sample_tokens;  // texts per round, tokens written per text
    const char *prompt;              // how each begins; NULL: as the first documents do
    Dataset *documents;
    const Tokenizer *tokenizer;  // NULL: ids are printed
    Sampling how;
    uint64_t seed;
    int32_t max_seqlen;  // of a text, its prompt included; at most cache_tokens
    // called after each pass; NULL: not
    void (*grown)(void *context);
    void *grown_context;
    // made when they are first needed
    int32_t *prompt_ids, prompt_length;
    Batch batch;
} Samples;

typedef struct {
    int32_t *tokens;  // (max_length), to be freed
    int32_t prompt_length, length, max_length;
    int number;  // in the round: its random numbers do not depend on the other texts
    bool ended;  // its last token is the model's end of text or of a turn
    // Of its tokens, so many are in the cache, from this row on. A single text may be continued by
    // another call: its first tokens are still there.
    int32_t num_cached, first_row;
} Text;

// Tokens of the cache that a round of samples takes, at most `most`.
int32_t samples_cache_tokens(const Samples *s, int32_t most);

// Call it before training: a prompt that cannot be encoded is an error (exit 2).
bool samples_encode_prompt(Samples *s, Error *err);

// A text whose prompt, prompt_length <= max_seqlen tokens, the caller fills in.
Text text_of_prompt(const Samples *s, int number, int32_t prompt_length);

// Continues the texts (num_texts <= MAX_SAMPLES), which hold their prompts, to their ends. Each is
// at most cache_tokens long.
void texts_write(Text *texts, int num_texts, Samples *s, const SampleModel *model, int64_t step);

// Prints tokens as text: without special tokens and control characters, ids where there is no
// tokenizer. A character that is spread over several tokens is printed when it is complete, bytes
// that are none as U+FFFD.
typedef struct {
    FILE *to;
    unsigned char bytes[4];  // (n) the beginning of a character
    size_t n;
} TextPrinter;

void text_printer_token(TextPrinter *p, const Tokenizer *tokenizer, int32_t id);
void text_printer_end(TextPrinter *p);  // of a text: nothing completes what is left

// Writes, prints and logs one round.
void samples_report(Samples *s, const SampleModel *model, int64_t step, RunLog *log);

#endif
