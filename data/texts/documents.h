// Documents from text files and JSON records, tokenized in units that threads can work on.
//
// A record is {"text": "..."}, {"parts": [["...", trained], ...]}, a text whose loss is on the
// parts marked true or with a weight, or a chat (records.h), which becomes such parts. A token
// is a target if all of its text is; one that straddles the end of such a part is not. Parts are
// the whole document, including the BOS and EOS that their template wrote; only the byte
// tokenizer's BOS and EOS, which no text can contain, are added. To a text they are added unless it
// has its own.
#pragma once

#include "../base/file.h"
#include "../models/bpe.h"
#include "../shards/shard_writer.h"
#include "inputs.h"
#include "records.h"

typedef struct {
    uint64_t first, end;  // tokens of the unit
    bool masked;
    // in [0, 1), from the content, so that copies of a document are on the same side of a border;
    // -INFINITY: it is for validation; 1: for training
    double place;
    int64_t record;  // its number in the file, from 1; 0: the document is a file, or the end of one
} UnitDocument;

// Counts of documents and records; the first are the records of each kind that became documents.
enum {
    NUM_BAD = NUM_RECORD_KINDS,  // records that are left out
    NUM_EMPTY,                   // documents without a token
    NUM_BINARY,                  // files that are no text, or not UTF-8
    NUM_OWN_ENDS,                // documents whose text has its own BOS or EOS
    NUM_CUT,                     // text files whose end is for validation
    NUM_COUNTS
};

// Findings of a unit, or of all units
typedef struct {
    int64_t counts[NUM_COUNTS];
    Error named[MAX_NAMED];  // why the first binary files and bad records were left out
    UnknownKeys unknown;     // of records
    int64_t num_invalid;     // bytes of the file that are not UTF-8 and became U+FFFD
    int32_t turn_end;        // the special token that the last trained turn ends with; -1: none
} Findings;

static const Findings no_findings = {.turn_end = -1};

enum { CUT_MIN_BYTES = 1 << 16, MAX_DOCUMENT_BYTES = 1 << 30 };

typedef struct {
    const Tokenizer *tokenizer;
    ShardVocabulary vocabulary;  // its BOS and EOS are for documents without parts
    ChatTemplate chat;
    Error no_chat;       // code != 0: why there is no known template
    bool trains_on_all;  // turns of chats, not only on answers
    bool keeps_invalid;  // texts that are not UTF-8, as U+FFFD, however much that is
    bool cuts_files;     // the last 1 % of each file of at least CUT_MIN_BYTES is for validation
} UnitOptions;

typedef struct {
    // input: a file that is one document, or complete records of a file
    const InputFile *file;
    unsigned char *records;  // (num_bytes) owned
    uint64_t num_bytes;
    size_t records_capacity;
    int64_t record;  // number in the file, from 1, of the one encoded last; 0: none
    bool array;      // a comma or bracket ends each record, not a newline
    // result
    unsigned char *tokens;  // as shards store them; owned
    float *weights;         // for tokens of masked documents: 0 is no target; owned
    size_t token_capacity, weight_capacity;
    UnitDocument *documents;  // (num_documents) owned
    size_t num_documents, document_capacity;
    Findings found;
    Error err;  // code 0: no error
    // during unit_encode
    BpeEncoder *encoder;
    const UnitOptions *options;
} Unit;

void unit_free(Unit *u);

typedef struct {
    const Inputs *in;
    uint64_t most_bytes;          // of a record, with its end: MAX_DOCUMENT_BYTES, as of a text
    size_t next;                  // input
    File file;                    // of records; fd -1: none
    uint64_t offset, bytes_done;  // in this file; of all
    int64_t record;
    bool array;  // the records that follow are in an array
} UnitReader;

// The next unit, in order; false at the end, with *err, or where a signal came while a long record
// was read. Reuses the unit's memory.
bool unit_read(UnitReader *r, Unit *u, Error *err);

// Errors go to u->err: EXIT_BAD_INPUT for a file named by the user that is unreadable or binary.
void unit_encode(Unit *u, BpeEncoder *e, const UnitOptions *options);
