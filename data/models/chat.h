// Renders chats with the chat templates of the supported models, for training and for --generate
// --chat. A template is a program in Jinja. It is not run but recognised as a whole, and this file
// writes the same text for messages without tools; tests/test_chat.sh compares each template with
// transformers. An unknown template is refused: data/prepare.py --chat runs it.
#pragma once

#include "tokenizer.h"

// A text in parts, some of which are trained on
typedef struct {
    uint64_t end;  // in the text of all parts
    float weight;  // of its targets; 0: it is not trained on
} Part;

typedef struct {
    unsigned char *bytes;  // (n) and a 0; owned, like the parts
    uint64_t n;
    Part *parts;  // (num_parts) none is empty, the last one ends at n
    size_t num_parts, capacity, part_capacity;
} Parts;

void parts_add(Parts *p, const char *text, size_t n, float weight);
void parts_free(Parts *p);

typedef struct {
    const char *role;       // "system", "user" or "assistant"
    char *text;             // owned
    const char *reasoning;  // NULL: none
    float weight;           // 0: it is not trained on
} Message;

typedef struct {
    Message *items;
    size_t n, capacity;
} Messages;

typedef enum {
    CHAT_CHATML,  // SmolLM2, Qwen2, Qwen2.5
    CHAT_QWEN3,
    CHAT_SMOLLM3,
    CHAT_GRANITE_4,  // an empty system message is none
    CHAT_GRANITE,    // 3.0 to 3.3
    CHAT_ZEPHYR,     // TinyLlama; up to here lines end turns; from here on a token begins the text
    CHAT_LLAMA,      // 3 to 3.3; below, questions stand in [INST]
    CHAT_MISTRAL,    // Nemo
    CHAT_MISTRAL_0_3,
    CHAT_MISTRAL_0_1,    // and 0.2
    CHAT_MISTRAL_FIRST,  // 0.1 and, without the space after an answer, 0.2 at their release
    CHAT_MISTRAL_SECOND,
    CHAT_LLAMA_2,
    NUM_CHAT_STYLES
} ChatStyle;

typedef struct {
    ChatStyle style;
    const char *name;       // of a model that uses it
    char system[512];       // the template's own, for chats without a system message; empty: none
    char heading[192];      // with a date, before the system message
    char bos[64], end[64];  // texts of the tokens at the beginning and after an answer
} ChatTemplate;

extern const char chatml_template[];

// The template of a directory with a tokenizer; NULL: ChatML. EXIT_BAD_INPUT if there is no known
// one. Dates come from SOURCE_DATE_EPOCH (seconds), or are today's.
bool chat_template_open(ChatTemplate *t, const char *dir, const Tokenizer *tokenizer, Error *err);

// Writes a chat of at least one message, whose texts change. Messages are trained on with their
// weights, answers including the token that ends them; with train_all, everything is. *bad says why
// the template cannot write it, or that it would teach an empty answer or nothing.
bool chat_write(const ChatTemplate *t, const Messages *m, bool train_all, Parts *out, Error *bad);

// Appends a user's message and what precedes the answer: at the beginning of a chat, with a system
// message (NULL: the template's own), or after an answer, which has `ended` or was cut off.
// Earlier thoughts are kept, although Qwen3's template would drop them.
void chat_ask(const ChatTemplate *t, const char *system, const char *message, bool begins,
              bool ended, Parts *out);
