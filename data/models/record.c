#include "record.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"

// data/prepare.py has the same table, and data/README.md explains it.
const RecordLevel record_levels[NUM_LEVELS] = {
    [RECORD_TEXT] = {"text", " text:s"},
    [RECORD_PARTS] = {"parts", " parts:l"},
    [RECORD_MESSAGES] = {"messages", " messages:l"},
    [RECORD_CONVERSATIONS] = {"conversations", " conversations:l"},
    [RECORD_PROMPT] = {"prompt", " prompt:sl completion:sl response:sl"},
    [RECORD_COMPLETIONS] = {"completions", " prompt:sl completions:l"},
    [RECORD_INSTRUCTION] = {"instruction", " instruction:sn input:sn output:sn"},
    [LEVEL_RECORD] = {"record", " weight:n images:x"},
    [LEVEL_CHAT] = {"chat",
                    " system:sn label:t kto_tag:t tools:x functions:x history:x image:x "
                    "videos:x audios:x"},
    [LEVEL_MESSAGE] = {"message",
                       " role:s from:s content:sl value:sl weight:n train:tf loss:tf "
                       "reasoning_content:s reasoning:x thinking:x tool_calls:x function_call:x "
                       "name:x images:x audio:x refusal:x train_detail:x"},
    [LEVEL_CONTENT] = {"content", " type:s text:s"},
    [LEVEL_COMPLETION] = {"completion", " completion:sl response:sl weight:n"},
};

const json_t *either(const json_t *object, const char *key, const char *other) {
    const json_t *item = json_member(object, key);
    return item ? item : json_member(object, other);
}

RecordKind record_kind(const json_t *record) {
    if (json_member(record, "messages")) return RECORD_MESSAGES;
    if (json_member(record, "conversations")) return RECORD_CONVERSATIONS;
    if (json_member(record, "instruction") && json_member(record, "output"))
        return RECORD_INSTRUCTION;
    if (json_member(record, "prompt") && json_member(record, "completions"))
        return RECORD_COMPLETIONS;
    if (json_member(record, "prompt") && either(record, "completion", "response"))
        return RECORD_PROMPT;
    if (json_member(record, "parts")) return RECORD_PARTS;
    return json_is_string(json_object_get(record, "text")) ? RECORD_TEXT : RECORD_OTHER;
}

// The types of a known key, up to a space; NULL: it is not read here.
static const char *types_of(int level, const char *key) {
    char word[64];
    if (strpbrk(key, " :") || snprintf(word, sizeof word, " %s:", key) >= (int)sizeof word)
        return NULL;
    const char *at = strstr(record_levels[level].keys, word);
    if (at || level >= NUM_RECORD_KINDS) return at ? at + strlen(word) : NULL;
    at = types_of(LEVEL_RECORD, key);
    return at || level < RECORD_MESSAGES ? at : types_of(LEVEL_CHAT, key);
}

void unknown_add(UnknownKeys *unknown, const char *key, int64_t records) {
    enum { MOST = sizeof unknown->items / sizeof *unknown->items };
    char name[sizeof unknown->items->name];
    size_t i = 0;
    text_copy(name, sizeof name, key);
    text_sanitize(name, sizeof name);
    while (i < unknown->n && strcmp(unknown->items[i].name, name) != 0) i++;
    if (i == MOST) return;
    if (i == unknown->n) unknown->n++;
    if (unknown->record > 0 && unknown->items[i].last == unknown->record) return;
    text_copy(unknown->items[i].name, sizeof name, name);
    unknown->items[i].records += records;
    unknown->items[i].last = unknown->record;
}

// The text of a number, where there can be no doubt about it; NULL: there can.
static json_t *number_text(double number) {
    char text[40];
    snprintf(text, sizeof text, "%.15g", number);
    return strchr(text, 'e') || strtod(text, NULL) != number ? NULL : json_string(text);
}

static bool member_check(json_t *object, const char *key, json_t *item, const char *types,
                         Error *bad) {
    static const char letters[] = "sntfl", *const names[] = {"a string", "a number", "true",
                                                             "false", "a list"};
    const char letter = "olsnntf"[json_typeof(item)];  // in the order of json_type
    const size_t n = strcspn(types, " ");
    char expected[80] = "";
    if (types[0] == 'x')
        return !json_is_set(item) ||
               error_set(bad, EXIT_BAD_INPUT,
                         "data/prepare.py --chat FILE --model DIR --out FILE.jsonl renders what "
                         "only a whole template can, such as tools",
                         "expected none of \"%s\", which no built-in template writes", key);
    if (n == 2 && types[1] == 'n' && letter == 'n') {
        return json_object_set_new(object, key, number_text(json_number_value(item))) == 0 ||
               bad_input(bad, "%s: expected a number of at most 15 digits, or a string", key);
    }
    for (size_t i = 0; i < n; i++) {
        if (types[i] == letter) return true;
        if (i > 0) strcat(expected, " or ");
        strcat(expected, names[strchr(letters, types[i]) - letters]);
    }
    return json_type_error(item, key, expected, bad);
}

bool members_check(json_t *object, int level, UnknownKeys *unknown, Error *bad) {
    const char *key;
    json_t *item;
    json_object_foreach(object, key, item) {
        const char *types = types_of(level, key);
        if (json_is_null(item)) continue;
        if (!types)
            unknown_add(unknown, key, 1);
        else if (!member_check(object, key, item, types, bad))
            return false;
    }
    return true;
}

bool read_weight(const json_t *number, float *weight, Error *bad) {
    if (!number) return true;
    *weight *= (float)json_number_value(number);
    return isfinite(*weight) || bad_input(bad, "weight: expected a number within a float's range");
}
