// --generate: texts from prompts, printed as they grow. The prompts of a file become one packed
// batch; a terminal is asked for one prompt after another, and with `chat` they are one
// conversation, which keeps its keys and values.
#ifndef UNPAD_GENERATE_H
#define UNPAD_GENERATE_H

#include "samples.h"

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
