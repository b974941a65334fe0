// Texts that a model writes: samples of a run, and --generate. Those of one group grow together:
// their prompts are one packed batch, then each pass takes the last token of every text and finds
// the others' keys and values in the cache. What does not fit at one time is the next group.
#ifndef UNPAD_GENERATE_H
#define UNPAD_GENERATE_H

#include <stdio.h>

#include "../base/error.h"
#include "../base/heap.h"
#include "../batches/batch.h"
#include "../models/chat.h"
#include "../models/config.h"
#include "log.h"
#include "run_data.h"
#include "run_options.h"

// The next token from its logits (V): temperature, 0: the likeliest; then one draw from the
// smallest set of likeliest tokens whose sum is >= top_p. uniform in [0,1): the draw; scratch (V).
// A token with -INFINITY is never drawn.
int32_t sample_token(const float *logits, int32_t V, float temperature, float top_p, float uniform,
                     HeapItem *scratch);

// The model that writes the texts. next_logits: logits (n, vocab_size) of rows (n, ascending) of a
// packed batch; keeps the keys and values of its tokens.
typedef struct {
    int32_t vocab_size;
    const TokenIds *ends;  // each ends a text
    int32_t cache_tokens;  // of the texts of one group; a batch holds as many
    int32_t max_rows;      // of one call
    void *context;
    void (*next_logits)(void *context, const Batch *batch, const int32_t *rows, int32_t n,
                        float *logits);
} SampleModel;

typedef struct {
    int32_t *tokens;  // (max_seqlen), to be freed
    int32_t prompt_length, length, max_length;
    int number;  // its random numbers do not depend on the other texts
    bool ended;  // its last token is one of the model's ends or the end of a turn
    // Of its tokens, so many are in the cache, from this row on. A single text may be continued by
    // another call: its first tokens are still there.
    int32_t num_cached, first_row;
} Text;

// Prints tokens as text: without special tokens and control characters, ids where there is no
// tokenizer. A character that is spread over several tokens is printed when it is complete, bytes
// that are none as U+FFFD.
typedef struct {
    FILE *to;
    unsigned char bytes[4];  // (n) the beginning of a character
    size_t n;
} TextPrinter;

enum { MAX_TURN_END = 64 };

typedef struct {
    const Options *o;            // max_seqlen, sample_tokens, temperature, top_p, seed and prompts
    const Tokenizer *tokenizer;  // NULL: ids are printed
    Text *texts;                 // (num_texts) with their prompts; a terminal has none yet
    int num_texts;
    size_t text_capacity;
    Batch batch;  // made when it is first needed
    // --generate only
    Tokenizer own_tokenizer;  // without BOS for a chat
    ChatTemplate chat;
    char *system;                    // of a conversation; NULL: as the template has it
    int32_t turn_end[MAX_TURN_END];  // (turn_end_length) tokens that end a turn of a chat
    int64_t turn_end_length;
    bool terminal;
    // of the group being written, the text that is printed and how far; -1: not even begun
    TextPrinter printer;  // to NULL: nothing is printed
    int current;
    int32_t printed;
    // the first pass of a group takes the prompts, every other one token of each text
    int64_t prompt_tokens, later_tokens;
    double prompt_ms, later_ms;
} Generator;

// A text whose prompt, prompt_length <= max_seqlen tokens, the caller fills in.
Text text_of_prompt(const Options *o, int number, int32_t prompt_length);

// Continues the texts, which hold their prompts, to their ends. Each is at most cache_tokens long.
void texts_write(Generator *g, Text *texts, int num_texts, const SampleModel *model, int64_t step);

// Tokens that the cache needs for as many texts at one time as fit into `most`.
int32_t generator_cache_tokens(const Generator *g, int32_t most);

// Samples of a run: --prompt, or the first tokens of documents. A prompt that cannot be encoded is
// an error (exit 2).
bool samples_open(Generator *g, const Options *o, Data *data, Error *err);

// Writes, prints and logs one round.
void samples_report(Generator *g, const SampleModel *model, int64_t step, RunLog *log);

// --generate: texts from prompts, printed as they grow. The prompts of a file become one packed
// batch; a terminal is asked for one prompt after another, and Ctrl-C ends a text. With --chat they
// are one conversation, which keeps its keys and values. Reads and encodes the prompts; *g must
// stay where it is. Errors are EXIT_USAGE and EXIT_BAD_INPUT.
bool generator_open(Generator *g, const Options *o, Error *err);

// Writes the texts to standard output, and a line on the speed to standard error.
void generator_run(Generator *g, const SampleModel *model);

#endif
