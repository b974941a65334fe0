#include "chat.h"

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

#define CUTOFF "Knowledge Cutoff Date: April 2024."
#define TODAY "Today's Date: %B %d, %Y."
#define GRANITE "You are Granite, developed by IBM. You are a helpful AI assistant."
static const struct {
    uint64_t fingerprint;
    ChatStyle style;
    const char *name, *heading;  // Granite: its own system message
} known_templates[] = {
    {0x153280e3ff55d19d, CHAT_CHATML, "ChatML", ""},
    {0xbf0c34b1af07f37d, CHAT_CHATML, "SmolLM2 and Qwen2", ""},
    {0x0b13fb322ccd9216, CHAT_CHATML, "Qwen2.5", ""},
    {0xaa39eed4cbfdd57a, CHAT_CHATML, "Qwen3-Instruct-2507", ""},
    {0x2df317a15cbc983d, CHAT_QWEN3, "Qwen3", ""},
    {0xedcd73b0e30a780c, CHAT_QWEN3, "Qwen3", ""},
    {0x3c8c057e28a9be07, CHAT_SMOLLM3, "SmolLM3",
     "## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: %d %B %Y\nReasoning Mode: /"},
    {0x09d68eeb5c0eaa55, CHAT_GRANITE, "Granite 3.0", ""},
    {0x08962c2f15d56767, CHAT_GRANITE, "Granite 3.1", CUTOFF "\n" TODAY "\n" GRANITE},
    {0x2216d3c3e5056029, CHAT_GRANITE, "Granite 3.2", CUTOFF "\n" TODAY "\n" GRANITE},
    {0x8a58e18acd9ca00a, CHAT_GRANITE, "Granite 3.3", " " CUTOFF "\n " TODAY " " GRANITE},
    {0xd0657ba05651bd21, CHAT_GRANITE, "Granite 3.3", CUTOFF " " TODAY " " GRANITE},
    {0x865dbc2233855fbe, CHAT_GRANITE_4, "Granite 4.0",
     "You are a helpful assistant. Please ensure responses are professional, accurate, and safe."},
    {0x35bc858f81d6bc0b, CHAT_GRANITE_4, "Granite 4.1", ""},
    {0x66291cf0045c2425, CHAT_ZEPHYR, "TinyLlama", ""},
    {0xba03a121d097859c, CHAT_LLAMA, "Llama 3", ""},
    {0x99799a835a31e1d3, CHAT_LLAMA, "Llama 3.1",
     "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"},
    {0x0cac23ffd2b33ff7, CHAT_LLAMA, "Llama 3.2",
     "Cutting Knowledge Date: December 2023\nToday Date: %d %b %Y\n\n"},
    {0x1127255163dd25a2, CHAT_MISTRAL, "Mistral Nemo", ""},
    {0x9074ed36d7503f0f, CHAT_MISTRAL_0_3, "Mistral 7B 0.3", ""},
    {0x1c6594f8393552ef, CHAT_MISTRAL_0_1, "Mistral 7B 0.1 and 0.2", ""},
    {0x7e995b379ec01747, CHAT_MISTRAL_FIRST, "Mistral 7B 0.1", ""},
    {0x26a59556925c9873, CHAT_MISTRAL_SECOND, "Mistral 7B 0.2", ""},
    {0x9780fae5bfea3cfd, CHAT_LLAMA_2, "Llama 2", ""},
};

// The texts around turns, and the gap after any answer
static const struct {
    const char *gap;
    const char *open[2];   // around the role; in [INST] before a question, and before an answer
    const char *close[2];  // after a question in [INST], before an answer's last token
    bool strips[2];
    const char *system[2];  // around the system message in the first question
    bool keeps_system;      // else the template loses it in chats that end with an answer
    const char *end;        // the token after an answer; NULL: the tokenizer's
} turns[NUM_CHAT_STYLES] = {
    [CHAT_CHATML... CHAT_SMOLLM3] = {"\n", {"<|im_start|>", "\n"}, .end = "<|im_end|>"},
    [CHAT_GRANITE_4... CHAT_GRANITE] = {.gap = "\n",
                                        .open = {"<|start_of_role|>", "<|end_of_role|>"},
                                        .end = "<|end_of_text|>"},
    [CHAT_ZEPHYR] = {"\n", .open = {"<|", "|>\n"}},
    [CHAT_LLAMA] =
        {"", {"<|start_header_id|>", "<|end_header_id|>\n\n"}, {0}, {1, 1}, .end = "<|eot_id|>"},
    [CHAT_MISTRAL] = {"", {"[INST]", ""}, {"[/INST]", ""}, {0}, {"", "\n\n"}, 0, NULL},
    [CHAT_MISTRAL_0_3] = {"", {"[INST] ", " "}, {"[/INST]", ""}, {0, 1}, {"", "\n\n"}, 0, NULL},
    [CHAT_MISTRAL_0_1] = {"", {" [INST] ", " "}, {" [/INST]", ""}, {0}, {"", "\n\n"}, 1, NULL},
    [CHAT_MISTRAL_FIRST] = {" ", {"[INST] ", ""}, {" [/INST]", ""}, {0}, {"", "\n\n"}, 0, NULL},
    [CHAT_MISTRAL_SECOND] = {"", {"[INST] ", ""}, {" [/INST]", ""}, {0}, {"", "\n\n"}, 0, NULL},
    [CHAT_LLAMA_2] =
        {"", {"[INST] ", " "}, {" [/INST]", " "}, {1, 1}, {"<<SYS>>\n", "\n<</SYS>>\n\n"}, 1, NULL},
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
    char *out = text, *p = text;
    while (*p) {
        if (strncmp(p, word, n) != 0) {
            *out++ = *p++;
        } else {
            out = stpcpy(out, by);
            p += n;
        }
    }
    *out = 0;
    return p > out;
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
        const bool granite = t->style == CHAT_GRANITE_4 || t->style == CHAT_GRANITE;
        if (localtime_r(&now, &day))
            strftime(granite ? t->system : t->heading, sizeof t->heading,
                     known_templates[i].heading, &day);
        return true;
    }
    return false;
}

// The chat template of a directory, as transformers chooses it. path (IO_PATH_MAX): the last place
// searched. NULL: there is none, or *err is set.
static char *find_template(const char *dir, char *path, Error *err) {
    if (path_exists(path_in(path, dir, "chat_template.jinja")))
        return file_read_all(path, JSON_MAX_CONFIG, NULL, "", err);
    const bool has_config = path_exists(path_in(path, dir, "tokenizer_config.json"));
    json_auto_t *root = has_config ? json_read(path, JSON_MAX_CONFIG, "", err) : NULL;
    const json_t *text = json_member(root, "chat_template"), *item;
    size_t i;
    json_array_foreach(json_member(root, "chat_template"), i, item) {
        if (json_string_is(json_member(item, "name"), "default"))
            text = json_member(item, "template");
    }
    return json_is_string(text) ? host_copy(json_string_value(text), "chat template") : NULL;
}

bool chat_template_open(ChatTemplate *t, const char *dir, const Tokenizer *tokenizer, Error *err) {
    char path[IO_PATH_MAX], hint[512];
    *t = (ChatTemplate){.name = "ChatML", .end = "<|im_end|>"};
    if (!dir) return true;
    AUTO_FREE char *text = find_template(dir, path, err);
    const bool found = text, known = found && read_template(t, text);
    tokenizer_name(t->bos, sizeof t->bos, tokenizer, tokenizer->bos);
    tokenizer_name(t->end, sizeof t->end, tokenizer, tokenizer->eos);
    if (turns[t->style].end) text_copy(t->end, sizeof t->end, turns[t->style].end);
    snprintf(hint, sizeof hint,
             "python3 data/prepare.py --chat FILE%s%.300s --out parts.jsonl renders it; then "
             "--train parts.jsonl; --prompt takes a text written out",
             found ? " --model " : "", found ? dir : "");
    return known || error_set(err, EXIT_BAD_INPUT, hint,
                              "%s: expected the chat template of SmolLM2 (ChatML), SmolLM3, Llama "
                              "2 or 3, TinyLlama, Qwen2 to 3, Mistral or Granite, found %s",
                              path, found ? "another one" : "none");
}

// ---- What the templates write -------------------------------------------------------------------

// Python's rstrip, and with `both` lstrip too
static char *strip(char *text, bool both) {
    size_t start, end = utf8_strip(text, &start);
    if (!both) start = 0;
    text[end] = 0;
    return memmove(text, text + start, end - start + 1);
}

// The text of a turn, in place, without the white space that the template strips
static char *strip_turn(const ChatTemplate *t, const char *role, char *text) {
    return turns[t->style].strips[role[0] != 'u'] ? strip(text, true) : text;
}

static void add(Parts *out, const char *text, float weight) {
    if (text) parts_add(out, text, strlen(text), weight);
}

static void open_turn(Parts *out, const ChatTemplate *t, const char *role, float weight) {
    const char *const *open = turns[t->style].open;
    const bool question = role[0] == 'u';
    if (t->style == CHAT_LLAMA_2 && question) add(out, t->bos, false);
    if (t->style > CHAT_LLAMA) return add(out, open[!question], question ? 0 : weight);
    add(out, open[0], weight);
    add(out, role, weight);
    add(out, open[1], weight);
}

// The rest of a turn that is open
static void end_turn(Parts *out, const ChatTemplate *t, const char *role, const char *text,
                     float weight) {
    const bool question = t->style > CHAT_LLAMA && role[0] == 'u';
    add(out, text, weight);
    add(out, turns[t->style].close[!question], weight);
    if (question) return;
    add(out, t->end, weight);
    add(out, turns[t->style].gap, t->style == CHAT_SMOLLM3 ? weight : 0);  // by its own marks
}

#define NO_THOUGHTS "<think>\n\n</think>\n"

// SmolLM3: do answers begin with empty thoughts?
static bool is_silent(const ChatTemplate *t, const char *system) {
    return t->style == CHAT_SMOLLM3 && system && strstr(system, "/no_think");
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

// Writes everything up to the first turn; system NULL: there is no such message.
static void begin_chat(Parts *out, const ChatTemplate *t, const char *system) {
    if (system && !system[0] && t->style == CHAT_GRANITE_4) system = NULL;
    AUTO_FREE char *own = host_copy(system ? system : t->system, "a chat");
    if (t->style >= CHAT_LLAMA && t->style != CHAT_LLAMA_2) add(out, t->bos, false);
    if (t->style == CHAT_SMOLLM3) {
        begin_smollm3(out, t, own);
    } else if (t->style <= CHAT_LLAMA && (system || own[0] || t->heading[0])) {
        open_turn(out, t, "system", false);
        add(out, t->heading, false);
        end_turn(out, t, "system", strip_turn(t, "system", own), false);
    }
}

// Writes the thoughts of an answer of Qwen3, from the record or ending with </think>: only after
// the last question; in the last message even if they are empty. Returns the answer without them.
static const char *add_thoughts(Parts *out, const Message *m, bool after_question, bool last) {
    static const char begin[] = "<think>", end[] = "</think>";
    const char *first = m->reasoning ? NULL : strstr(m->text, end), *answer = m->text, *p,
               *text = m->reasoning ? m->reasoning
                       : first      ? m->text
                                    : "",
               *stop = first ? first : text + strlen(text);
    last |= m->reasoning && m->reasoning[0];
    while (first && (p = strstr(text, begin)) && p < first) text = p + strlen(begin);
    while (first && (p = strstr(answer, end))) answer = p + strlen(end);
    text += strspn(text, "\n");
    while (stop > text && stop[-1] == '\n') stop--;
    if (first) answer += strspn(answer, "\n");
    if (!after_question || (!last && text == stop)) return answer;
    add(out, "<think>\n", m->weight);
    parts_add(out, text, (size_t)(stop - text), m->weight);
    add(out, "\n</think>\n\n", m->weight);
    return answer + strspn(answer, "\n");
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

// Refuses messages that the template would refuse, or drop from the text.
static bool check_order(const ChatTemplate *t, const Messages *m, Error *bad) {
    const bool system = m->items[0].role[0] == 's';
    for (size_t i = 0; i < m->n; i++) {
        const char role = m->items[i].role[0], *thoughts = m->items[i].reasoning;
        if (thoughts && thoughts[0] && (role != 'a' || t->style != CHAT_QWEN3))
            return error_set(bad, EXIT_BAD_INPUT, "data/prepare.py --chat runs other templates",
                             "message %zu: the template of %s loses its reasoning_content", i + 1,
                             t->name);
        const bool lost = i > 0 ? t->style == CHAT_SMOLLM3 || t->style > CHAT_LLAMA
                                : t->style > CHAT_LLAMA && !turns[t->style].keeps_system;
        if (role == 's' && lost)
            return bad_input(bad, "message %zu: the template of %s loses this system message",
                             i + 1, t->name);
        if (t->style > CHAT_LLAMA && role != 's' && role != "ua"[(i + system) % 2])
            return bad_input(bad, "message %zu: expected user and assistant to alternate", i + 1);
    }
    return true;
}

// In [INST], the first question begins with the system message.
static void ask_first(const ChatTemplate *t, const char *system, char **text) {
    if (t->style <= CHAT_LLAMA) return;
    const char *const *around = turns[t->style].system;
    const char *const all[] = {around[0], system, around[1], *text};
    Parts joined = {0};
    for (int i = 0; i < 4; i++) add(&joined, all[i], 0);
    free(joined.parts);
    free(*text);
    *text = (char *)joined.bytes;
}

bool chat_write(const ChatTemplate *t, const Messages *m, bool train_all, Parts *out, Error *bad) {
    const char *system = m->items[0].role[0] == 's' ? m->items[0].text : NULL;
    const size_t question = last_question(m);
    const bool silent = is_silent(t, system);
    bool any = false;
    if (!check_order(t, m, bad)) return false;
    for (size_t i = 0; i < m->n; i++) {
        Message *message = &m->items[i];
        const bool answer = message->role[0] == 'a';
        if (train_all) message->weight = 1;
        any |= message->weight != 0;
        if (i == 0) begin_chat(out, t, system);
        if (i == 0 && system) continue;
        if (i == 1 && system) ask_first(t, system, &message->text);
        strip_turn(t, message->role, message->text);
        const char *text = message->text;
        open_turn(out, t, message->role,
                  t->style == CHAT_SMOLLM3 || t->style > CHAT_LLAMA ? message->weight : 0);
        if (answer && t->style == CHAT_QWEN3)
            text = add_thoughts(out, message, i > question, i + 1 == m->n);
        if (answer && t->style == CHAT_SMOLLM3) {
            add(out, silent ? NO_THOUGHTS : "", message->weight);
            text += strspn(text, "\n");
        }
        if (answer && message->weight != 0 && utf8_strip(text, &(size_t){0}) == 0)
            return bad_input(bad, "message %zu: expected an answer, found an empty text", i + 1);
        end_turn(out, t, message->role, text, message->weight);
    }
    if (train_all) {  // including the text between messages
        out->num_parts = 1;
        out->parts[0] = (Part){out->n, 1};
    }
    return any || error_set(bad, EXIT_BAD_INPUT, "--train-on all trains every turn",
                            "expected an answer that is trained, found none");
}

void chat_ask(const ChatTemplate *t, const char *system, const char *message, bool begins,
              bool ended, Parts *out) {
    AUTO_FREE char *text = host_copy(message, "a chat");
    if (begins && system) ask_first(t, system, &text);
    if (begins) begin_chat(out, t, system);
    if (!begins && !ended) add(out, t->end, false);
    if (!begins) add(out, turns[t->style].gap, false);
    open_turn(out, t, "user", false);
    end_turn(out, t, "user", strip_turn(t, "user", text), false);
    if (t->style <= CHAT_LLAMA) open_turn(out, t, "assistant", false);  // else the answer begins it
    add(out, is_silent(t, system) ? NO_THOUGHTS : "", false);
}
