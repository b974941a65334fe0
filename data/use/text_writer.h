// Writes texts with a model, for samples of a run and for --generate. The texts of a group grow
// together: their prompts are one packed batch; then each pass takes the last token of every text
// and finds the others' keys and values in the cache. Texts that do not fit into it together are
// written in several groups.
#pragma once

#include "../base/heap.h"
#include "../models/bpe.h"
#include "../runs/run_options.h"
#include "model_face.h"

typedef struct {
    int32_t *tokens;  // (max_seqlen), to be freed
    int32_t prompt_length, length;
    int number;  // its random numbers do not depend on the other texts
    bool ended;  // its last token is one of the model's ends or the end of a turn
    // num_cached of its tokens are in the cache, from first_row on. Another call may continue a
    // single text: its first tokens are still there.
    int32_t num_cached, first_row;
} Text;

// Prints tokens as text: without special tokens and control characters, ids where there is no
// tokenizer. A character that is spread over several tokens is printed when it is complete, and
// bytes that form no character as U+FFFD.
typedef struct {
    FILE *to;
    const Tokenizer *tokenizer;  // NULL: there is none
    unsigned char bytes[4];      // (n) the beginning of a character
    size_t n;
} TextPrinter;

// is_end: nothing completes the last character.
void text_print(TextPrinter *p, const int32_t *ids, int64_t n, bool is_end);

// The next token from its logits (V): temperature, 0: the likeliest; then one draw from the
// smallest set of likeliest tokens whose sum is >= top_p. uniform in [0,1): the draw; scratch (V).
// A token with -INFINITY is never drawn.
int32_t sample_token(const float *logits, int32_t V, float temperature, float top_p, float uniform,
                     HeapItem *scratch);

enum { MAX_TURN_END = 64 };

typedef struct {
    const Options *o;     // max_seqlen, micro_batch_tokens, sample_tokens, temperature, top_p, seed
    TextPrinter printer;  // prints texts as they grow; to NULL: nothing is printed
    Text *texts;          // (num_texts)
    int num_texts;
    size_t text_capacity;
    int32_t turn_end[MAX_TURN_END];  // (turn_end_length) tokens that end a turn of a chat
    int64_t turn_end_length;
    // the first pass of a group takes the prompts, every other one token of each text
    int64_t later_tokens;
    double prompt_ms, later_ms;
    Batch batch;  // made when it is first needed
    // while texts_write runs
    ModelFace model;
    int64_t step;
    float *logits;         // (num_texts, vocab_size)
    HeapItem *candidates;  // (vocab_size)
    Text *group;           // (group_size) of the texts
    int group_size;
    int current;      // the text of the group that is printed, and
    int32_t printed;  // how far; -1: not even its heading
} TextWriter;

// Adds a text whose prompt, prompt_length <= max_seqlen tokens, the caller fills in.
Text *text_add(TextWriter *w, int32_t prompt_length);

// Appends the tokens of a prompt, and leaves space for one more token.
bool text_append(const TextWriter *w, Text *text, const char *prompt, Error *err);

// Keeps the first `length` tokens of a text.
void text_begin_again(Text *text, int32_t length);

// Tokens that the cache needs for as many texts at one time as fit into micro_batch_tokens.
int32_t texts_cache_tokens(const TextWriter *w);

// Continues the texts, which hold their prompts, to their ends. Each is at most cache_tokens long.
void texts_write(TextWriter *w, ModelFace model, int64_t step);
void texts_free(TextWriter *w);
