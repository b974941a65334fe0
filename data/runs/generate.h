// Texts that a model writes: samples of a run, and --generate. Those of one round grow together:
// their prompts are one packed batch, then each pass takes the last token of every text and finds
// the others' keys and values in the cache. What does not fit at one time waits for the next round.
#ifndef UNPAD_GENERATE_H
#define UNPAD_GENERATE_H

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
    int32_t *tokens;  // (max_seqlen), to be freed
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

// Writes, prints and logs one round.
void samples_report(Samples *s, const SampleModel *model, int64_t step, RunLog *log);

// ------------------------------------------------------------------------------------------------
// --generate: texts from prompts, printed as they grow. The prompts of a file become one packed
// batch; a terminal is asked for one prompt after another, and with `chat` they are one
// conversation, which keeps its keys and values.

// Prints tokens as text: without special tokens and control characters, ids where there is no
// tokenizer. A character that is spread over several tokens is printed when it is complete, bytes
// that are none as U+FFFD.
typedef struct {
    FILE *to;
    unsigned char bytes[4];  // (n) the beginning of a character
    size_t n;
} TextPrinter;

typedef struct {
    // Where prompts come from, at most one: a text, or the lines of a file. Neither, or the prompt
    // "-": standard input, which is one prompt, or a terminal with one a line.
    const char *prompt, *prompt_file;
    const char *model_dir;  // of tokenizer.json and the chat template
    bool chat;              // prompts are messages of a user, texts the answers
} Prompts;

typedef struct {
    Samples samples;
    Tokenizer tokenizer;  // also samples.tokenizer; without BOS for a chat
    char system[512];     // first message of a chat; empty: none
    int32_t end_of_turn;  // -1 without chat
    bool chat, terminal;
    Text *texts;  // (num_texts) the prompts; a terminal has none yet
    int num_texts;
    size_t text_capacity;
    // the texts being written, and what of them has been printed; -1: not even begun
    const Text *round;
    int round_texts, current;
    int32_t printed;
    TextPrinter printer;
    // of all texts: the first pass of a round takes the prompts, every other one token of each text
    bool first_pass;
    int64_t num_written, prompt_tokens, new_tokens;
    double started_ms, prompt_ms, new_ms;
} Generator;

// Reads and encodes the prompts. Of samples it takes how, seed, max_seqlen and sample_tokens, the
// most that a text grows. *g must stay where it is. Errors are EXIT_USAGE and EXIT_BAD_INPUT.
bool generator_open(Generator *g, const Samples *samples, const Prompts *prompts, Error *err);

// Tokens that the cache needs for as many texts at one time as fit into `most`.
int32_t generator_cache_tokens(const Generator *g, int32_t most);

// Writes the texts to standard output, and a line on the speed to standard error. A line of a
// terminal that cannot be encoded is an error.
bool generator_run(Generator *g, SampleModel *model, Error *err);

#endif
