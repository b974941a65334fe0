// --generate: a person, a pipe or a file gives prompts, and the model's texts are printed as they
// grow. The prompts of a file become one packed batch; a terminal is asked for one prompt after
// another, and Ctrl-C ends a text. With --chat they are one conversation, which keeps its keys and
// values.
#pragma once

#include "../models/chat.h"
#include "text_writer.h"

typedef struct {
    TextWriter writer;    // of all prompts; a terminal continues one text
    Tokenizer tokenizer;  // without BOS for a chat
    ChatTemplate chat;
    char *system;  // of a conversation; NULL: as the template has it
    bool asks_terminal;
    int64_t prompt_tokens;
} Conversation;

// Reads and encodes the prompts; *c must stay where it is. Errors are EXIT_USAGE and
// EXIT_BAD_INPUT.
bool conversation_open(Conversation *c, const Options *o, Error *err);

// Writes the texts to standard output, and a line on the speed to standard error; frees all.
void conversation_run(Conversation *c, ModelFace model);
