#include "records.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/memory.h"

// ---- Keys ---------------------------------------------------------------------------------------

// data/prepare.py has the same table, and data/README.md explains it.
const RecordLevel record_levels[NUM_LEVELS] = {
    [RECORD_TEXT] = {"text", " text:s"},
    [RECORD_PARTS] = {"parts", " parts:l"},
    [RECORD_MESSAGES] = {"messages", " messages:l"},
    [RECORD_CONVERSATIONS] = {"conversations", " conversations:l"},
    [RECORD_PROMPT] = {"prompt", " prompt:sl completion:sl response:sl"},
    [RECORD_COMPLETIONS] = {"completions", " prompt:sl completions:l"},
    [RECORD_PREFERENCE] = {"preference", " prompt:sl chosen:sl rejected:sl"},
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

void unknown_add(UnknownKeys *unknown, const char *key, int64_t times) {
    enum { MOST = sizeof unknown->items / sizeof *unknown->items };
    char name[sizeof unknown->items->name];
    size_t i = 0;
    text_copy(name, sizeof name, key);
    text_sanitize(name, sizeof name);
    while (i < unknown->n && strcmp(unknown->items[i].name, name) != 0) i++;
    if (i == MOST) return;
    if (i == unknown->n) text_copy(unknown->items[unknown->n++].name, sizeof name, name);
    unknown->items[i].times += times;
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

static bool refuse_kind(const json_t *record, Error *bad) {
    const json_t *text = json_member(record, "text"), *item;
    const char *key;
    char keys[160] = "";
    if (!json_is_object(record)) return bad_input(bad, "expected an object, found another value");
    if (text) return json_type_error(text, "text", "a string", bad);
    json_object_foreach((json_t *)record, key, item) if (!json_is_null(item))
        text_list(keys, sizeof keys, "%s", key);
    return error_set(
        bad, EXIT_BAD_INPUT,
        json_object_get(record, "chosen")
            ? "--preference dpo trains on both; to train the chosen answers, name them completion"
        : json_object_get(record, "question")
            ? "name them prompt and completion for a chat of one turn"
            : "data/prepare.py FILE --text-key NAME --out FILE.jsonl reads another field",
        "expected text, messages, conversations, prompt and completion, instruction "
        "and output, or parts; found %s",
        keys[0] ? keys : "an empty object");
}

// ---- Chats --------------------------------------------------------------------------------------

typedef struct {
    Messages *messages;
    UnknownKeys *unknown;
    Error *bad;
} Reader;

// False: it is not a string, or contains a NUL.
static bool append(Parts *text, const json_t *string) {
    const char *value = json_string_value(string);
    if (!value || strlen(value) != json_string_length(string)) return false;
    parts_add(text, value, json_string_length(string), 0);
    return true;
}

// NULL: not a role that every template has.
static const char *role_of(const json_t *name) {
    static const char *const roles[][2] = {
        {"system", "system"},  {"user", "user"},      {"assistant", "assistant"},
        {"human", "user"},     {"gpt", "assistant"},  {"chatgpt", "assistant"},
        {"bing", "assistant"}, {"bard", "assistant"}, {"model", "assistant"},
    };
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (json_string_is(name, roles[i][0])) return roles[i][1];
    return NULL;
}

// The content is a text, or a list of objects that hold texts.
static bool add_content(const Reader *r, Parts *text, const json_t *content) {
    json_t *part;
    size_t i;
    if (!content) return bad_input(r->bad, "content: expected a text, found none");
    json_array_foreach(content, i, part) {
        const json_t *type = json_member(part, "type");
        if (!members_check(part, LEVEL_CONTENT, r->unknown, r->bad))
            return error_prefix(r->bad, "content");
        if ((type && !json_string_is(type, "text")) || !json_member(part, "text"))
            return error_set(r->bad, EXIT_BAD_INPUT, "only texts are trained",
                             "content: expected a text, found a list with %s",
                             type ? json_string_value(type) : "no text");
        if (!append(text, json_member(part, "text"))) break;
    }
    return (json_is_array(content) ? i == json_array_size(content) : append(text, content)) ||
           bad_input(r->bad, "expected a text without NULs as content");
}

// input: the subject of an instruction, after an empty line; NULL: none
static bool add_message(const Reader *r, const char *role, const json_t *content,
                        const json_t *input) {
    Messages *m = r->messages;
    Parts text = {0};
    parts_add(&text, "", 0, 0);
    bool ok = add_content(r, &text, content);
    if (json_string_length(input) > 0) {
        parts_add(&text, "\n\n", 2, 0);
        ok = ok && add_content(r, &text, input);
    }
    free(text.parts);
    array_grow(m->items, &m->capacity, m->n + 1, "messages");
    m->items[m->n++] = (Message){role, (char *)text.bytes, NULL, role[0] == 'a'};
    return ok;
}

static bool add_turn(const Reader *r, json_t *item) {
    const json_t *name = either(item, "role", "from"), *trains = either(item, "train", "loss");
    const char *role = role_of(name);
    if (!members_check(item, LEVEL_MESSAGE, r->unknown, r->bad)) return false;
    if (!role)
        return error_set(r->bad, EXIT_BAD_INPUT,
                         "data/prepare.py --chat FILE --model DIR --out FILE.jsonl renders the "
                         "roles developer and tool, if the template does; others must be renamed",
                         "role \"%s\": expected system, user or assistant",
                         name ? json_string_value(name) : "");
    if (!add_message(r, role, either(item, "content", "value"), NULL)) return false;
    Message *last = &r->messages->items[r->messages->n - 1];
    last->reasoning = json_string_value(json_member(item, "reasoning_content"));
    if (trains) last->weight = json_is_true(trains);
    return read_weight(json_member(item, "weight"), &last->weight, r->bad);
}

// Turns: a list of messages in OpenAI's or ShareGPT's format, or the text of one with this role.
static bool add_turns(const Reader *r, const json_t *turns, const char *role) {
    json_t *item;
    size_t i;
    char where[40];
    if (json_is_string(turns) && role) return add_message(r, role, turns, NULL);
    json_array_foreach(turns, i, item) {
        snprintf(where, sizeof where, "message %zu", r->messages->n + 1);
        if (!json_is_object(item)) return json_type_error(item, where, "an object", r->bad);
        if (!add_turn(r, item)) return error_prefix(r->bad, where);
    }
    return json_array_size(turns) > 0 || bad_input(r->bad, "expected a list of messages");
}

// A question and its answer become a prompt, which is not trained on, and one answer.
static bool read_messages(const Reader *r, const json_t *record, RecordKind kind) {
    Messages *m = r->messages;
    const json_t *system = json_member(record, "system"), *answer;
    bool ok = json_string_length(system) == 0 || add_message(r, "system", system, NULL);
    if (kind == RECORD_INSTRUCTION) {
        ok = ok && add_message(r, "user", json_member(record, "instruction"),
                               json_member(record, "input"));
        answer = json_member(record, "output");
    } else if (kind == RECORD_PROMPT) {
        ok = ok && add_turns(r, json_member(record, "prompt"), "user");
        answer = either(record, "completion", "response");
    } else {
        return ok && add_turns(r, either(record, "messages", "conversations"), NULL);
    }
    for (size_t i = 0; i < m->n; i++) m->items[i].weight = 0;
    return ok && add_turns(r, answer, "assistant");
}

// ---- Records ------------------------------------------------------------------------------------

static bool is_conversation(const json_t *turns) {
    const json_t *first = json_array_get(turns, 0);
    const char *role = role_of(either(first, "role", "from"));
    return first && (!role || role[0] != 'a');
}

// Items [from, to) of a list
static json_t *slice(const json_t *list, size_t from, size_t to) {
    json_t *part = json_array();
    while (from < to) json_array_append(part, json_array_get(list, from++));
    return part;
}

json_t *record_of_preference(json_t *record, UnknownKeys *unknown, Error *bad) {
    json_t *chosen = json_object_get(record, "chosen"), *prompt = json_object_get(record, "prompt"),
           *rejected = json_object_get(record, "rejected");
    const bool whole = is_conversation(chosen);
    const char *why = NULL;
    size_t same = 0, n = json_array_size(chosen), m = json_array_size(rejected);
    if (json_object_size(record) > 0 && !members_check(record, RECORD_PREFERENCE, unknown, bad))
        return NULL;
    while (whole && same < n && same < m &&
           json_equal(json_array_get(chosen, same), json_array_get(rejected, same)))
        same++;
    if (!json_member(record, "chosen") || !json_member(record, "rejected"))
        why = "expected chosen and rejected, for --preference";
    else if (json_equal(chosen, rejected))
        why = "chosen and rejected: expected two answers, found the same twice";
    else if (whole ? same == 0 : !json_is_set(prompt) || is_conversation(rejected))
        why = "expected a prompt and answers, or conversations that begin alike";
    if (why) bad_input(bad, "%s", why);
    if (why) return NULL;
    return json_pack("{s:o, s:O*, s:O*, s:[o, o]}", "prompt",
                     whole ? slice(chosen, 0, same) : json_incref(prompt), "system",
                     json_member(record, "system"), "weight", json_member(record, "weight"),
                     "completions", whole ? slice(chosen, same, n) : json_incref(chosen),
                     whole ? slice(rejected, same, m) : json_incref(rejected));
}

// [["...", true], ...]
static bool read_parts(const json_t *array, bool all, Parts *parts, Error *bad) {
    size_t i;
    const json_t *item;
    parts_add(parts, "", 0, false);
    json_array_foreach(array, i, item) {
        const json_t *part = json_array_get(item, 0), *trained = json_array_get(item, 1);
        float weight = all || !json_is_false(trained);
        if (json_array_size(item) != 2 || !json_is_string(part) ||
            !(json_is_boolean(trained) || json_is_number(trained)))
            return bad_input(bad, "part %zu: expected [\"text\", true or false] or a weight there",
                             i + 1);
        if (!all && json_is_number(trained) && !read_weight(trained, &weight, bad)) return false;
        parts_add(parts, json_string_value(part), json_string_length(part), weight);
    }
    return true;
}

bool record_render(json_t *record, const ChatTemplate *t, bool train_all, Parts *out, float *weight,
                   UnknownKeys *unknown, Error *bad) {
    const RecordKind kind = record_kind(record);
    if (kind == RECORD_OTHER) return refuse_kind(record, bad);
    if (!members_check(record, kind, unknown, bad) ||
        !read_weight(json_member(record, "weight"), weight, bad))
        return false;
    if (kind == RECORD_TEXT) return true;
    if (kind == RECORD_PARTS)
        return read_parts(json_object_get(record, "parts"), train_all, out, bad);
    Messages m = {0};
    const bool ok = read_messages(&(Reader){&m, unknown, bad}, record, kind) &&
                    chat_write(t, &m, train_all, out, bad);
    for (size_t i = 0; i < m.n; i++) free(m.items[i].text);
    free(m.items);
    return ok;
}
