// The sources that --train and --val name: one source of documents, or a mixture of several with
// weights.
#pragma once

#include "../base/error.h"

enum { MAX_SOURCES = 32, ALL_WEIGHTS = 1000000000 };

typedef struct {
    char *spec;      // owned: a file, directory or pattern; for a single source, a list
    int64_t weight;  // share of the tokens, in ALL_WEIGHTS; 0: nothing is drawn
    int64_t first_doc, num_docs, num_tokens;  // filled in by dataset_open
} Source;

typedef struct {
    Source list[MAX_SOURCES];
    int32_t n;
} Sources;

// "web:7,code:3" is two sources; weights are normalised. A spec without weights is one source. A
// part that exists by its whole name has no weight: write a:1:0.7 for the file a:1. EXIT_USAGE when
// only some parts have weights, or all are 0. Free it also after a failure.
bool sources_parse(Sources *s, const char *spec, Error *err);
void sources_free(Sources *s);
