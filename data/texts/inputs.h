// The files that --train names when it names texts, and the kind of each.
#pragma once

#include "../base/error.h"

enum { MAX_NAMED = 5 };  // files and records that are left out, in warnings

typedef enum {
    INPUT_TEXT,      // one document
    INPUT_LINES,     // JSON Lines: one record per line
    INPUT_ARRAY,     // a JSON array of records
    INPUT_LEFT_OUT,  // CSV, other JSON and the like, found in a directory
} InputKind;

typedef enum { SPLIT_NONE, SPLIT_TRAIN, SPLIT_VAL, SPLIT_TEST } Split;

typedef struct {
    char *path;  // owned
    uint64_t size_bytes;
    uint64_t mtime_ns;  // modulo 2^64: after the year 2554
    InputKind kind;
    uint64_t first_byte;  // of the first record
    bool named;           // by the user, not found in a directory
    Split split;          // that its name in a directory tells; test files are left out
    int64_t num_docs;     // counted by the reader of the file
} InputFile;

typedef struct {
    InputFile *items;  // (n) directories in order of path
    size_t n, capacity;
    uint64_t size_bytes;
    int64_t num_left_out, num_records, num_val;  // files; test files are left out
} Inputs;

// Bytes of the first record of text (n), including the newline, or the array's comma or bracket,
// that ends it; 0: it is incomplete. `last`: the file ends with the text.
uint64_t record_end(const unsigned char *text, uint64_t n, bool array, bool last);

// Reads the first bytes of a file, at most `most`; *n: how many there are.
bool read_head(const char *path, void *out, uint64_t most, uint64_t *n, Error *err);

// Is the spec (like dataset_open's) text rather than shards? Judged by its first file.
bool inputs_are_texts(const char *spec);

// out_dir: a directory that is not an input even if it is inside one; nor are other runs. A run
// that is named, and anything but text and JSON records, is EXIT_BAD_INPUT. Free it also after a
// failure.
bool inputs_collect(Inputs *in, const char *spec, const char *out_dir, Error *err);
void inputs_free(Inputs *in);
