// Chats as texts, by the chat templates of the models that are trained here: for training and for
// --generate --chat. A template is a program in Jinja. It is not run but recognised as a whole, and
// what it writes for messages without tools is written here; tests/test_chat.sh holds each against
// transformers. One that is not known is refused: data/prepare.py --chat runs it.
#ifndef UNPAD_CHAT_H
#define UNPAD_CHAT_H

#include <jansson.h>

#include "tokenizer.h"

// A text in parts, some of which are trained
typedef struct {
    uint64_t end;  // in the text of all parts
    bool trained;
} Part;

typedef struct {
    unsigned char *bytes;  // (n) and a 0; owned, as are the parts
    uint64_t n;
    Part *parts;  // (num_parts) none is empty, the last one ends at n
    size_t num_parts, capacity, part_capacity;
} Parts;

void parts_add(Parts *p, const char *text, size_t n, bool trained);
void parts_free(Parts *p);

typedef enum {
    CHAT_CHATML,  // SmolLM2, Qwen2, Qwen2.5
    CHAT_QWEN3,
    CHAT_SMOLLM3,  // up to here lines end turns; from here on a token begins the text
    CHAT_LLAMA,    // 3 to 3.3
    CHAT_MISTRAL,  // Nemo
} ChatStyle;

typedef struct {
    ChatStyle style;
    const char *name;       // of a model that has it
    bool found;             // in the directory
    char system[512];       // of ChatML: for chats without a system message; empty: none
    char heading[128];      // with a date, before the system message
    char bos[64], end[64];  // texts of tokens: at the beginning, and after an answer
} ChatTemplate;

extern const char chatml_template[];

// The template of a directory with a tokenizer; NULL: ChatML. EXIT_BAD_INPUT without one that is
// known. Dates are those of SOURCE_DATE_EPOCH (seconds), or of today.
bool chat_template_open(ChatTemplate *t, const char *dir, const Tokenizer *tokenizer, Error *err);

// What a JSON record is, by its keys
typedef enum {
    RECORD_TEXT,           // text
    RECORD_PARTS,          // parts
    RECORD_MESSAGES,       // messages: role, content
    RECORD_CONVERSATIONS,  // conversations: from, value
    RECORD_PROMPT,         // prompt, completion or response: strings, or lists of messages
    RECORD_INSTRUCTION,    // instruction, output; input or not
    RECORD_OTHER,
    NUM_RECORD_KINDS = RECORD_OTHER
} RecordKind;

extern const char *const record_kind_names[NUM_RECORD_KINDS];

// The first kind whose keys are there: messages, conversations, instruction, prompt, parts, text.
RecordKind record_kind(const json_t *record);

// Writes a record of one of the four kinds of chats. Trained are the answers with the token that
// ends them, but not messages with "weight": 0, nor those of a prompt; or everything. *bad says
// why a record cannot be written.
bool chat_render(const ChatTemplate *t, const json_t *record, bool train_all, Parts *out,
                 Error *bad);

// Appends what is written before an answer to the message of a user: of a chat that begins, with a
// system message (NULL: the template's own), or after an answer, which has `ended` or was cut off.
// Thoughts of earlier answers, which Qwen3's template removes later, stay where they are.
void chat_ask(const ChatTemplate *t, const char *system, const char *message, bool begins,
              bool ended, Parts *out);

#endif
