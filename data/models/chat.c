#include "chat.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../base/file.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"

void parts_free(Parts *p) {
    free(p->bytes);
    free(p->parts);
    *p = (Parts){0};
}

void parts_add(Parts *p, const char *text, size_t n, float weight) {
    array_grow(p->bytes, &p->capacity, p->n + n + 1, "a chat");
    memcpy(p->bytes + p->n, text, n);
    p->bytes[p->n += n] = 0;
    if (n == 0) return;
    if (p->num_parts == 0 || p->parts[p->num_parts - 1].weight != weight) p->num_parts++;
    array_grow(p->parts, &p->part_capacity, p->num_parts, "parts");
    p->parts[p->num_parts - 1] = (Part){p->n, weight};
}

// ---- Which template is it? ----------------------------------------------------------------------

static const struct {
    uint64_t fingerprint;
    ChatStyle style;
    const char *name, *heading;
} known_templates[] = {
    {0x153280e3ff55d19d, CHAT_CHATML, "ChatML", ""},
    {0xbf0c34b1af07f37d, CHAT_CHATML, "SmolLM2 and Qwen2", ""},
    {0x0b13fb322ccd9216, CHAT_CHATML, "Qwen2.5", ""},
    {0xaa39eed4cbfdd57a, CHAT_CHATML, "Qwen3-Instruct-2507", ""},
    {0x2df317a15cbc983d, CHAT_QWEN3, "Qwen3", ""},
    {0xedcd73b0e30a780c, CHAT_QWEN3, "Qwen3", ""},
    {0x3c8c057e28a9be07, CHAT_SMOLLM3, "SmolLM3",
     "## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: %d %B %Y\nReasoning Mode: /"},
    {0xba03a121d097859c, CHAT_LLAMA, "Llama 3", ""},
    {0x99799a835a31e1d3, CHAT_LLAMA, "Llama 3.1",
     "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"},
    {0x0cac23ffd2b33ff7, CHAT_LLAMA, "Llama 3.2",
     "Cutting Knowledge Date: December 2023\nToday Date: %d %b %Y\n\n"},
    {0x1127255163dd25a2, CHAT_MISTRAL, "Mistral Nemo", ""},
};

// The first 8 bytes of the SHA-256 of a template, without a final newline, which Jinja removes.
static uint64_t fingerprint(const char *text) {
    unsigned char digest[32];
    uint64_t first;
    const size_t n = strlen(text);
    sha256(text, n > 0 && text[n - 1] == '\n' ? n - 1 : n, digest);
    memcpy(&first, digest, sizeof first);
    return __builtin_bswap64(first);
}

// Puts `by`, which is shorter, in place of every occurrence of a word.
static bool substitute(char *text, const char *word, const char *by) {
    const size_t n = strlen(word);
    char *out = text;
    bool found = false;
    for (const char *p = text; *p;) {
        const bool here = strncmp(p, word, n) == 0;
        found |= here;
        if (here)
            out = stpcpy(out, by);
        else
            *out++ = *p;
        p += here ? n : 1;
    }
    *out = 0;
    return found;
}

const char chatml_template[] =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}";

// Cuts the default system message out of the template, because models differ in it.
static void cut_system(char *text, char *system, size_t capacity) {
    static const char start[] = "<|im_start|>system\n", end[] = "<|im_end|>";
    for (char *p = text; (p = strstr(p, start));) {
        p += strlen(start);
        const size_t n = strcspn(p, "'\\<");
        if (n == 0 || n >= capacity || strncmp(p + n, end, strlen(end)) != 0) continue;
        snprintf(system, n + 1, "%s", p);
        substitute(text, system, "");
        return;
    }
}

static bool read_template(ChatTemplate *t, char *text) {
    const char *epoch = getenv("SOURCE_DATE_EPOCH");
    const time_t now = epoch ? (time_t)strtoll(epoch, NULL, 10) : time(NULL);
    substitute(text, "\\n", "\n");  // templates write newlines in two equivalent ways
    cut_system(text, t->system, sizeof t->system);
    const uint64_t found = fingerprint(text);
    struct tm day;
    for (size_t i = 0; i < sizeof known_templates / sizeof *known_templates; i++) {
        if (known_templates[i].fingerprint != found) continue;
        t->style = known_templates[i].style;
        t->name = known_templates[i].name;
        if (localtime_r(&now, &day))
            strftime(t->heading, sizeof t->heading, known_templates[i].heading, &day);
        return true;
    }
    return false;
}

// The chat template of a directory, as transformers chooses it. path (IO_PATH_MAX): the last place
// searched. NULL: there is none, or *err is set.
static char *find_template(const char *dir, char *path, Error *err) {
    if (!path_join(path, dir, "chat_template.jinja", err)) return NULL;
    if (path_exists(path)) return file_read_all(path, JSON_MAX_CONFIG, NULL, "", err);
    if (!path_join(path, dir, "tokenizer_config.json", err)) return NULL;
    json_auto_t *root = path_exists(path) ? json_read(path, JSON_MAX_CONFIG, "", err) : NULL;
    const json_t *text = json_member(root, "chat_template"), *item;
    size_t i;
    json_array_foreach(json_member(root, "chat_template"), i, item) {
        if (json_string_is(json_member(item, "name"), "default"))
            text = json_member(item, "template");
    }
    return json_is_string(text) ? host_copy(json_string_value(text), "chat template") : NULL;
}

bool chat_template_open(ChatTemplate *t, const char *dir, const Tokenizer *tokenizer, Error *err) {
    char path[IO_PATH_MAX];
    *t = (ChatTemplate){.name = "ChatML", .end = "<|im_end|>"};
    if (!dir) return true;
    char *text = find_template(dir, path, err);
    t->found = text;
    const bool known = text && read_template(t, text);
    free(text);
    tokenizer_name(t->bos, sizeof t->bos, tokenizer, tokenizer->bos);
    if (t->style == CHAT_LLAMA) text_copy(t->end, sizeof t->end, "<|eot_id|>");
    if (t->style == CHAT_MISTRAL) tokenizer_name(t->end, sizeof t->end, tokenizer, tokenizer->eos);
    return known || error_set(err, EXIT_BAD_INPUT,
                              "data/prepare.py --chat renders others for training; --prompt takes "
                              "a text written out",
                              "%s: expected the chat template of SmolLM2 (ChatML), SmolLM3, Llama "
                              "3, Qwen2 to 3 or Mistral Nemo, found %s",
                              path, t->found ? "another one" : "none");
}

// ---- Messages -----------------------------------------------------------------------------------

typedef struct {
    const char *role;       // "system", "user" or "assistant"
    char *text;             // owned
    const char *reasoning;  // in the record; NULL: none
    float weight;           // 0: it is not trained on
} Message;

typedef struct {
    Message *items;
    size_t n, capacity;
    UnknownKeys *unknown;
} Messages;

static char *join(const char *a, const char *b, const char *c) {
    char *text = host_calloc(strlen(a) + strlen(b) + strlen(c) + 1, 1, "a chat");
    return strcat(strcat(strcpy(text, a), b), c);
}

static void replace(char **text, char *by) {
    free(*text);
    *text = by;
}

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
static bool add_content(Parts *text, const json_t *content, UnknownKeys *unknown, Error *bad) {
    json_t *part;
    size_t i;
    if (!content) return bad_input(bad, "content: expected a text, found none");
    json_array_foreach(content, i, part) {
        const json_t *type = json_member(part, "type");
        if (!members_check(part, LEVEL_CONTENT, unknown, bad)) return error_prefix(bad, "content");
        if ((type && !json_string_is(type, "text")) || !json_member(part, "text"))
            return error_set(bad, EXIT_BAD_INPUT, "only texts are trained",
                             "content: expected a text, found a list with %s",
                             type ? json_string_value(type) : "no text");
        if (!append(text, json_member(part, "text"))) break;
    }
    return (json_is_array(content) ? i == json_array_size(content) : append(text, content)) ||
           bad_input(bad, "expected a text without NULs as content");
}

static bool add_message(Messages *m, const char *role, const json_t *content, Error *bad) {
    Parts text = {0};
    parts_add(&text, "", 0, false);
    const bool ok = add_content(&text, content, m->unknown, bad);
    free(text.parts);
    array_grow(m->items, &m->capacity, m->n + 1, "messages");
    m->items[m->n++] = (Message){role, (char *)text.bytes, NULL, role[0] == 'a'};
    return ok;
}

static bool add_turn_of(Messages *m, json_t *item, Error *bad) {
    const json_t *name = either(item, "role", "from"), *trains = either(item, "train", "loss");
    const char *role = role_of(name);
    if (!members_check(item, LEVEL_MESSAGE, m->unknown, bad)) return false;
    if (!role)
        return error_set(bad, EXIT_BAD_INPUT,
                         "data/prepare.py --chat FILE --model DIR --out FILE.jsonl renders the "
                         "roles developer and tool, if the template does; others must be renamed",
                         "role \"%s\": expected system, user or assistant",
                         name ? json_string_value(name) : "");
    if (!add_message(m, role, either(item, "content", "value"), bad)) return false;
    Message *last = &m->items[m->n - 1];
    last->reasoning = json_string_value(json_member(item, "reasoning_content"));
    if (trains) last->weight = json_is_true(trains);
    return read_weight(json_member(item, "weight"), &last->weight, bad);
}

// Turns: a list of messages in OpenAI's or ShareGPT's format, or the text of one with this role.
static bool add_turns(Messages *m, const json_t *turns, const char *role, Error *bad) {
    json_t *item;
    size_t i;
    char where[40];
    if (json_is_string(turns) && role) return add_message(m, role, turns, bad);
    json_array_foreach(turns, i, item) {
        snprintf(where, sizeof where, "message %zu", m->n + 1);
        if (!json_is_object(item)) return json_type_error(item, where, "an object", bad);
        if (!add_turn_of(m, item, bad)) return error_prefix(bad, where);
    }
    return json_array_size(turns) > 0 || bad_input(bad, "expected a list of messages");
}

// A question and its answer become a prompt, which is not trained on, and one answer.
static bool read_record(Messages *m, const json_t *record, Error *bad) {
    const RecordKind kind = record_kind(record);
    const bool task = kind == RECORD_INSTRUCTION;
    const json_t *system = json_member(record, "system"), *input = json_member(record, "input"),
                 *answer = task ? json_member(record, "output")
                                : either(record, "completion", "response");
    if (json_string_length(system) > 0 && !add_message(m, "system", system, bad)) return false;
    if (kind != RECORD_PROMPT && !task)
        return add_turns(m, either(record, "messages", "conversations"), NULL, bad);
    if (!add_turns(m, json_member(record, task ? "instruction" : "prompt"), "user", bad))
        return false;
    for (size_t i = 0; i < m->n; i++) m->items[i].weight = 0;
    char **text = &m->items[m->n - 1].text;
    if (task && json_string_length(input) > 0)
        replace(text, join(*text, "\n\n", json_string_value(input)));
    return add_turns(m, answer, "assistant", bad);
}

// Python's rstrip, and with `both` lstrip too
static char *strip(char *text, bool both) {
    size_t start, end = utf8_strip(text, &start);
    if (!both) start = 0;
    text[end] = 0;
    return memmove(text, text + start, end - start + 1);
}

// ---- What the templates write -------------------------------------------------------------------

static void add(Parts *out, const char *text, float weight) {
    parts_add(out, text, strlen(text), weight);
}

static void open_turn(Parts *out, const ChatTemplate *t, const char *role, float weight) {
    const bool llama = t->style == CHAT_LLAMA;
    if (t->style == CHAT_MISTRAL) return add(out, role[0] == 'u' ? "[INST]" : "", weight);
    add(out, llama ? "<|start_header_id|>" : "<|im_start|>", weight);
    add(out, role, weight);
    add(out, llama ? "<|end_header_id|>\n\n" : "\n", weight);
}

// The gap after a turn. Like a turn's beginning, only SmolLM3's own marks train it.
static void add_gap(Parts *out, const ChatTemplate *t, float weight) {
    add(out, t->style <= CHAT_SMOLLM3 ? "\n" : "", t->style == CHAT_SMOLLM3 ? weight : 0);
}

static void add_turn(Parts *out, const ChatTemplate *t, const Message *m) {
    const bool question = t->style == CHAT_MISTRAL && m->role[0] == 'u';
    open_turn(out, t, m->role, t->style == CHAT_SMOLLM3 ? m->weight : 0);
    add(out, m->text, m->weight);
    add(out, question ? "[/INST]" : t->end, m->weight);
    add_gap(out, t, m->weight);
}

#define NO_THOUGHTS "<think>\n\n</think>\n"

// SmolLM3: do answers begin with empty thoughts?
static bool is_silent(const ChatTemplate *t, const char *system) {
    return t->style == CHAT_SMOLLM3 && strstr(system, "/no_think");
}

// SmolLM3's system message, which is left open unless it replaces the whole default.
static void begin_smollm3(Parts *out, const ChatTemplate *t, char *system) {
    static const char
        persona[] = "You are a helpful AI assistant named SmolLM, trained by Hugging Face.",
        thinks[] =
            " Your role as an assistant involves thoroughly exploring questions through a "
            "systematic thinking process before providing the final precise and accurate "
            "solutions. This requires engaging in a comprehensive cycle of analysis, summarizing, "
            "exploration, reassessment, reflection, backtracking, and iteration to develop "
            "well-considered thinking process. Please structure your response into two main "
            "sections: Thought and Solution using the specified format: <think> Thought section "
            "</think> Solution section. In the Thought section, detail your reasoning process in "
            "steps. Each step should include detailed considerations such as analysing questions, "
            "summarizing relevant findings, brainstorming new ideas, verifying the accuracy of the "
            "current steps, refining any errors, and revisiting previous steps. In the Solution "
            "section, based on various attempts, explorations, and reflections from the Thought "
            "section, systematically present the final solution that you deem correct. The "
            "Solution section should be logical, accurate, and concise and detail necessary steps "
            "needed to reach the conclusion.";
    const bool silent = substitute(system, "/no_think", "");
    substitute(system, "/think", "");
    const bool whole = substitute(strip(system, false), "/system_override", "");
    add(out, "<|im_start|>system\n", false);
    add(out, whole ? "" : t->heading, false);
    add(out, whole ? "" : silent ? "no_think" : "think", false);
    add(out, whole ? "" : "\n\n## Custom Instructions\n\n", false);
    add(out, system[0] || whole ? strip(system, false) : persona, false);
    add(out, system[0] || whole || silent ? "" : thinks, false);
    add(out, whole ? "<|im_end|>\n" : "\n\n", false);
}

// Writes everything up to the first turn. The system message (NULL: none) is modified.
static void begin_chat(Parts *out, const ChatTemplate *t, const char *system) {
    Message own = {"system", join(system ? system : t->system, "", ""), NULL, false};
    if (t->style >= CHAT_LLAMA) add(out, t->bos, false);
    if (t->style == CHAT_LLAMA) replace(&own.text, join(t->heading, strip(own.text, true), ""));
    if (t->style == CHAT_SMOLLM3)
        begin_smollm3(out, t, own.text);
    else if (t->style != CHAT_MISTRAL && (system || own.text[0]))
        add_turn(out, t, &own);
    free(own.text);
}

// An answer of Qwen3. Its thoughts, from the record or ending with </think>, are written only after
// the last question; in the last message even if they are empty.
static void write_thoughts(Message *m, bool after_question, bool last) {
    char *first = m->reasoning ? NULL : strstr(m->text, "</think>"), *rest = m->text, *p;
    char *thoughts = join(m->reasoning ? m->reasoning : first ? m->text : "", "", ""), *text;
    last |= m->reasoning && m->reasoning[0];
    if (first) thoughts[first - m->text] = 0;
    for (text = thoughts; first && (p = strstr(text, "<think>"));) text = p + strlen("<think>");
    while ((p = first ? strstr(rest, "</think>") : NULL)) rest = p + strlen("</think>");
    text += strspn(text, "\n");
    for (p = text + strlen(text); p > text && p[-1] == '\n';) *--p = 0;
    if (first) rest += strspn(rest, "\n");
    if (after_question && (last || text[0])) {
        char *block = join("<think>\n", text, "\n</think>\n\n");
        replace(&m->text, join(block, rest + strspn(rest, "\n"), ""));
        free(block);
    } else {
        replace(&m->text, join(rest, "", ""));
    }
    free(thoughts);
}

// The index of the last question, which Qwen3 distinguishes from a tool's response.
static size_t last_question(const Messages *m) {
    static const char begin[] = "<tool_response>", end[] = "</tool_response>";
    for (size_t i = m->n; i-- > 0;) {
        const char *text = m->items[i].text;
        const bool tool = strncmp(text, begin, strlen(begin)) == 0 && path_ends_with(text, end);
        if (m->items[i].role[0] == 'u' && !tool) return i;
    }
    return m->n - 1;
}

// Refuses what the template would refuse, or drop from the text.
static bool check_order(const ChatTemplate *t, const Messages *m, Error *bad) {
    for (size_t i = 0; i < m->n; i++) {
        const char role = m->items[i].role[0], *thoughts = m->items[i].reasoning;
        if (thoughts && thoughts[0] && (role != 'a' || t->style != CHAT_QWEN3))
            return error_set(bad, EXIT_BAD_INPUT, "data/prepare.py --chat runs other templates",
                             "message %zu: the template of %s loses its reasoning_content", i + 1,
                             t->name);
        if (role == 's' && (t->style == CHAT_MISTRAL || (t->style == CHAT_SMOLLM3 && i > 0)))
            return bad_input(bad, "message %zu: the template of %s loses this system message",
                             i + 1, t->name);
        if (t->style == CHAT_MISTRAL && role != "ua"[i % 2])
            return bad_input(bad, "message %zu: expected user and assistant to alternate", i + 1);
    }
    return true;
}

// Nothing but white space
static bool is_blank(const char *text) {
    size_t start;
    return !text || utf8_strip(text, &start) == 0;
}

static bool write_chat(Parts *out, const ChatTemplate *t, const Messages *m, Error *bad) {
    const char *system = m->items[0].role[0] == 's' ? m->items[0].text : NULL;
    const size_t question = last_question(m);
    const bool silent = is_silent(t, system ? system : "");
    bool any = false;
    if (!check_order(t, m, bad)) return false;
    for (size_t i = 0; i < m->n; i++) {
        Message *message = &m->items[i];
        const bool answer = message->role[0] == 'a';
        any |= message->weight != 0;
        if (t->style == CHAT_LLAMA) strip(message->text, true);
        if (i == 0) begin_chat(out, t, system);
        if (i == 0 && system) continue;
        bool empty = is_blank(message->text) && is_blank(message->reasoning);
        if (answer && t->style == CHAT_QWEN3) write_thoughts(message, i > question, i + 1 == m->n);
        if (answer && t->style == CHAT_SMOLLM3)
            replace(&message->text, join(silent ? NO_THOUGHTS : "",
                                         message->text + strspn(message->text, "\n"), ""));
        empty |= is_blank(message->text);
        if (answer && empty && message->weight != 0)
            return bad_input(bad, "message %zu: expected an answer, found an empty text", i + 1);
        add_turn(out, t, message);
    }
    return any || error_set(bad, EXIT_BAD_INPUT, "--train-on all trains every turn",
                            "expected an answer that is trained, found none");
}

bool chat_render(const ChatTemplate *t, json_t *record, bool train_all, Parts *out,
                 UnknownKeys *unknown, Error *bad) {
    Messages m = {.unknown = unknown};
    bool ok = read_record(&m, record, bad);
    for (size_t i = 0; i < m.n && train_all; i++) m.items[i].weight = 1;
    ok = ok && write_chat(out, t, &m, bad);
    if (ok && train_all) {  // including the text between messages
        out->num_parts = 1;
        out->parts[0] = (Part){out->n, 1};
    }
    for (size_t i = 0; i < m.n; i++) free(m.items[i].text);
    free(m.items);
    return ok;
}

void chat_ask(const ChatTemplate *t, const char *system, const char *message, bool begins,
              bool ended, Parts *out) {
    Message question = {"user", join(message, "", ""), NULL, false};
    if (t->style == CHAT_LLAMA) strip(question.text, true);
    if (t->style == CHAT_MISTRAL && begins && system)
        replace(&question.text, join(system, "\n\n", message));
    if (begins) begin_chat(out, t, system);
    if (!begins && !ended) add(out, t->end, false);
    if (!begins) add_gap(out, t, false);
    add_turn(out, t, &question);
    open_turn(out, t, "assistant", false);
    add(out, is_silent(t, system ? system : "") ? NO_THOUGHTS : "", false);
    free(question.text);
}
