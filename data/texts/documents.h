// Documents of text files and of JSON records, tokenized in units that threads can work on.
//
// A record is {"text": "..."}, {"parts": [["...", trained], ...]}, a text whose loss is on the
// parts marked true, or a chat (models/chat.h), which becomes such parts. A token is a target if
// all of its text is; one that straddles the end of such a part is not. Parts are the whole
// document, with the BOS and EOS that their template wrote; only the byte tokenizer's, which no
// text can hold, are added.
#ifndef UNPAD_DOCUMENTS_H
#define UNPAD_DOCUMENTS_H

#include "../base/file.h"
#include "../models/bpe.h"
#include "../models/chat.h"
#include "inputs.h"

typedef struct {
    uint64_t first, end;  // tokens of the unit
    bool is_val, masked;
} UnitDocument;

// What became no document
typedef struct {
    int64_t empty, binary, bad;
    Error named[MAX_NAMED];  // why the first binary files and bad records are left out
} LeftOut;

typedef struct {
    // what to do: a file of one document, or whole records of a file
    const InputFile *file;
    unsigned char *records;  // (num_bytes) changed by unit_encode; owned
    uint64_t num_bytes;
    size_t records_capacity;
    int64_t first_record;  // its number in the file, from 1
    // what became of it
    unsigned char *tokens;   // as shards store them; owned
    unsigned char *targets;  // of tokens of masked documents: 1 is a target; owned
    size_t token_capacity, target_capacity;
    UnitDocument *documents;  // (num_documents) owned
    size_t num_documents, document_capacity;
    int64_t kinds[NUM_RECORD_KINDS];  // of records that became documents
    LeftOut left_out;
    Error err;  // code 0: no error
} Unit;

void unit_free(Unit *u);

typedef struct {
    const Inputs *in;
    size_t next;                  // input
    File file;                    // of records; fd -1: none
    uint64_t offset, bytes_done;  // in this file; of all
    int64_t record;
} UnitReader;

// The next unit, in order; false at the end or with *err. Unit memory is used again.
bool unit_read(UnitReader *r, Unit *u, Error *err);

enum { CUT_MIN_BYTES = 1 << 16, CUT_MAX_FILES = 20 };

typedef struct {
    const Tokenizer *tokenizer;
    bool has_byte[256];  // it has a token for
    int32_t bos, eos;    // of documents without parts; -1: none
    int token_bytes;
    ChatTemplate chat;
    Error no_chat;  // with a code: there is no template that is known; hint: option of prepare.py
    bool trains_on_all;  // of chats, not on answers only
    bool cuts_files;     // the last 1 % of each file of at least CUT_MIN_BYTES is for validation
    double val_frac;     // share of the documents for validation, by SHA-256 of the text;
                         // 0: they are chosen otherwise; NO_VALIDATION: none are
} UnitOptions;

// Errors are u->err: EXIT_BAD_INPUT for a file that cannot be read or is binary, and was named.
void unit_encode(Unit *u, BpeEncoder *e, const UnitOptions *options);

#endif
