// Documents of text files and JSON Lines, tokenized in units that threads can work on.
#ifndef UNPAD_DOCUMENTS_H
#define UNPAD_DOCUMENTS_H

#include "../base/error.h"
#include "../base/file.h"
#include "../models/bpe.h"
#include "inputs.h"

typedef struct {
    uint64_t end;  // cumulative tokens of the unit
    bool is_val;
} UnitDocument;

typedef struct {
    // what to do: files of one document each, or whole lines of a file
    const InputFile *files;
    size_t num_files;      // with lines: 1
    unsigned char *lines;  // (num_bytes) changed by unit_encode; owned; NULL: no lines
    uint64_t num_bytes;
    size_t lines_capacity;
    int64_t first_line;
    // what became of it
    unsigned char *tokens;  // as shards store them; owned
    size_t token_capacity;
    UnitDocument *documents;  // (num_documents) owned
    size_t num_documents, document_capacity;
    int64_t num_empty, num_binary, num_bad;
    Error bad;  // why the first line that is left out is
    Error err;  // code 0: no error
} Unit;

void unit_free(Unit *u);

typedef struct {
    const Inputs *in;
    size_t next;                  // input
    File file;                    // of lines; fd -1: none
    uint64_t offset, bytes_done;  // in this file; of all
    int64_t line;
} UnitReader;

// The next unit, in order; false at the end or with *err. Unit memory is used again.
bool unit_read(UnitReader *r, Unit *u, Error *err);

typedef struct {
    int32_t bos, eos;  // -1: none
    int token_bytes;
    bool any_bytes;   // the tokenizer takes what is not UTF-8
    double val_frac;  // share of the documents for validation, by SHA-256 of the text
} UnitOptions;

// Errors are u->err: EXIT_BAD_INPUT for a file that cannot be read or is binary, and was named.
void unit_encode(Unit *u, BpeEncoder *e, const UnitOptions *options);

#endif
