// JSON records: their kinds, the keys that records, messages and completions may have, and the text
// of each.
#pragma once

#include <jansson.h>

#include "../models/chat.h"

// The kind of a record, by its keys
typedef enum {
    RECORD_TEXT,           // text
    RECORD_PARTS,          // parts
    RECORD_MESSAGES,       // messages: role, content
    RECORD_CONVERSATIONS,  // conversations: from, value
    RECORD_PROMPT,         // prompt, completion or response: strings, or lists of messages
    RECORD_COMPLETIONS,    // prompt, completions: a list, a document each
    RECORD_PREFERENCE,     // chosen, rejected, and a prompt where they do not repeat it
    RECORD_INSTRUCTION,    // instruction, output; optionally input
    RECORD_OTHER,
    NUM_RECORD_KINDS = RECORD_OTHER,
    // levels of the table of keys that are no kind
    LEVEL_RECORD = NUM_RECORD_KINDS,  // every record
    LEVEL_CHAT,                       // every one but texts and parts
    LEVEL_MESSAGE,
    LEVEL_CONTENT,  // an object in a message's list of contents
    LEVEL_COMPLETION,
    NUM_LEVELS
} RecordKind;

// The keys that are read, each after a space and before a colon and its types: s string, n number,
// t true, f false, l list. x: no built-in template writes it. A list is no number; null is absent.
typedef struct {
    const char *name, *keys;
} RecordLevel;

extern const RecordLevel record_levels[NUM_LEVELS];

// The first kind whose keys exist: messages, conversations, instruction, completions, prompt, ...
// Never a preference.
RecordKind record_kind(const json_t *record);

// The member, or else another one; NULL when both are missing or null
const json_t *either(const json_t *object, const char *key, const char *other);

// Keys that are read nowhere
typedef struct {
    struct {
        char name[48];
        int64_t times;
    } items[20];
    size_t n;
} UnknownKeys;

void unknown_add(UnknownKeys *unknown, const char *key, int64_t times);

// A preference as a record of two completions, which the caller frees. Its answers are texts, lists
// of messages after a prompt, or whole conversations that begin alike. NULL: *bad says why not.
json_t *record_of_preference(json_t *record, UnknownKeys *unknown, Error *bad);

// Checks the members of an object against the keys of its level, and counts unknown ones. A number
// becomes its text where a text is also right. *bad names a key of another type, or one that must
// not be set.
bool members_check(json_t *object, int level, UnknownKeys *unknown, Error *bad);

// *weight *= the number; NULL: 1
bool read_weight(const json_t *number, float *weight, Error *bad);

// Appends the text of a record in parts, except for a text record, whose text is its member. Parts
// that the record marks, or the answers of its chat outside its prompt, are trained on, with their
// weights; with train_all, everything is. *weight *= the record's. *bad says why a record cannot be
// rendered.
bool record_render(json_t *record, const ChatTemplate *t, bool train_all, Parts *out, float *weight,
                   UnknownKeys *unknown, Error *bad);
