// Which files --train names when it names texts, and what is in each: as data/prepare.py chooses.
#ifndef UNPAD_INPUTS_H
#define UNPAD_INPUTS_H

#include "../base/error.h"

typedef enum {
    INPUT_TEXT,   // one document
    INPUT_LINES,  // JSON Lines: a document a line
    INPUT_TABLE,  // CSV or other JSON found in a directory: left out
} InputKind;

typedef struct {
    char *path;  // owned
    uint64_t size_bytes;
    int64_t mtime_ns;
    InputKind kind;
    bool named;  // by the user, not found in a directory
} InputFile;

typedef struct {
    InputFile *items;  // (n) directories in order of path, without hidden files
    size_t n, capacity;
    uint64_t size_bytes;
    int64_t num_tables;
} Inputs;

// Is the spec (as dataset_open's) text rather than shards? By its first file.
bool inputs_are_texts(const char *spec);

// out_dir: a directory that is no input even if it is inside one. EXIT_BAD_INPUT for what is
// neither text nor JSON Lines. Free it also after a failure.
bool inputs_collect(Inputs *in, const char *spec, const char *out_dir, Error *err);
void inputs_free(Inputs *in);

#endif
