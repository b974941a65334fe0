// Multiple choice: how often the likeliest choice is the right one. Tokens, scores and figures
// match lm-evaluation-harness 0.4 (output_type multiple_choice); test_benchmark.sh compares them.
//
// A line is a question: {"context": "...", "choices": ["...", ...], "answer": 0}. Context, a space
// ("delimiter": another text) and choice are tokenized as one text, after the BOS that the
// tokenizer adds. As many tokens as the context has alone, without white space at its end, are
// given, the rest is scored. An empty context is BOS, or EOS where there is none. "context" may be
// an array with one for each choice. A choice becomes a document, of which its tokens are targets.
#pragma once

#include "../models/bpe.h"
#include "../runs/log.h"
#include "../runs/run_options.h"
#include "../shards/find_files.h"
#include "model_face.h"

typedef struct {
    size_t file;
    int64_t line;               // the same file and line: the same question
    int32_t answer;             // the right one of the question's choices, from 0
    int32_t rows;               // tokens of its document that are inputs
    int32_t bytes, characters;  // of the choice
} BenchmarkChoice;

typedef struct {
    const Options *o;  // bench: files, globs, directories, commas between; max_seqlen, log_every
    Tokenizer tokenizer;
    BpeEncoder *encoder;
    PathList files;
    BenchmarkChoice *choices;   // (num_choices)
    double *log_likelihoods;    // (num_choices) of all tokens of a choice together, natural
    int32_t *tokens, *targets;  // (num_tokens) rows of all documents
    size_t num_choices, num_tokens, capacity, token_capacity, target_capacity, num_cut;
    uint64_t fingerprint;  // of the tokens
} Benchmark;

// Reads and tokenizes the questions of o->bench. tokenizer: tokenizer.json, or its directory. Where
// a choice does not fit into --max-seqlen its context is cut from the left, with a warning.
// EXIT_BAD_INPUT for a damaged question, and a choice that does not fit by itself.
bool benchmark_open(Benchmark *b, const Options *o, const char *tokenizer, int32_t vocab_size,
                    Error *err);

// All ranks; a line and a record of each file. acc, acc_norm: share of questions whose right choice
// has the highest log-likelihood, or the highest for each character; in a tie the first has it.
// Bits are of right choices. step -1: not of a run; --log-every 1 then prints all log-likelihoods.
void benchmark_score(Benchmark *b, ModelFace model, int64_t step, RunLog *log);
