// Texts that show what the model has learned. The texts of one round grow together, one token per
// forward pass, packed into one batch (several where one cannot hold them).
#ifndef UNPAD_SAMPLES_H
#define UNPAD_SAMPLES_H

#include "../base/error.h"
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

typedef struct {
    float p;
    int32_t id;
} Candidate;

// logits (V), uniform in [0,1): the draw; scratch (V).
int32_t sample_token(const float *logits, int32_t V, const Sampling *s, float uniform,
                     Candidate *scratch);

enum { MAX_SAMPLES = 64 };

// The model that writes the texts. next_logits: logits (n, vocab_size) of rows (n, ascending) of a
// packed batch.
typedef struct {
    int32_t vocab_size, end_of_text;  // -1: none
    int32_t micro_batch_tokens;       // of the largest batch
    int32_t max_rows;                 // of one call
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
    int32_t max_seqlen;  // of a text, its prompt included; at most micro_batch_tokens
    // made when they are first needed
    int32_t *prompt_ids, prompt_length;
    Batch batch;
} Samples;

typedef struct {
    int32_t *tokens;  // (max_length), to be freed
    int32_t length, max_length;
    int number;  // in the round: its random numbers do not depend on the other texts
    bool ended;  // its last token is the model's end of text
} Text;

// Call it before training: a prompt that cannot be encoded is an error (exit 2).
bool samples_encode_prompt(Samples *s, Error *err);

// A text whose prompt, prompt_length <= max_seqlen tokens, the caller fills in.
Text text_of_prompt(const Samples *s, int number, int32_t prompt_length);

// Continues the texts (num_texts <= MAX_SAMPLES), which hold their prompts, to their ends.
void texts_write(Text *texts, int num_texts, Samples *s, const SampleModel *model, int64_t step);

// Writes, prints and logs one round.
void samples_report(Samples *s, const SampleModel *model, int64_t step, RunLog *log);

#endif
