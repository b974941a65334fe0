#include "tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

#include "../base/json.h"
#include "../base/memory.h"

#define TOKENIZER_CONFIG "tokenizer_config.json"
#define SPACE "\xe2\x96\x81"  // U+2581, which stands for a space in tokens of characters

void tokenizer_free(Tokenizer *t) {
    for (int i = 0; i < t->num_steps; i++) pcre2_code_free(t->steps[i].pattern);
    for (int i = 0; i < t->num_steps; i++) free((char *)t->steps[i].text);
    json_decref(t->vocab);
    free(t->offset);
    free(t->bytes);
    free(t->special);
    free(t->added);
    free(t->cut);
    free(t->merges);
    free(t->joins);
    memset(t, 0, sizeof *t);
}

// ---- Alphabets ----------------------------------------------------------------------------------

// The code point of a byte in GPT-2's alphabet: itself if printable, else the next from 256 on
static int gpt2_code_point(int byte) {
    return byte < 33                   ? 256 + byte
           : byte >= 127 && byte < 161 ? 162 + byte
           : byte == 173               ? 323
                                       : byte;
}

// -1: no byte is written as this character.
static int gpt2_byte(ucs4_t code) {
    const int byte = (int)(code < 256   ? code
                           : code < 289 ? code - 256
                           : code < 323 ? code - 162
                                        : 173);
    return gpt2_code_point(byte) == (int)code ? byte : -1;
}

void gpt2_encode(const unsigned char *bytes, size_t n, char *out) {
    for (size_t i = 0; i < n; i++)
        out += u8_uctomb((uint8_t *)out, (ucs4_t)gpt2_code_point(bytes[i]), 2);
    *out = 0;
}

// Decodes text in the alphabet; returns the number of bytes, or -1 if a character is not in it.
static int64_t gpt2_decode(const char *text, unsigned char *out) {
    int64_t n = 0;
    ucs4_t code;
    for (const uint8_t *p = (const uint8_t *)text; (p = u8_next(&code, p));) {
        const int byte = gpt2_byte(code);
        if (byte < 0) return -1;
        out[n++] = (unsigned char)byte;
    }
    return n;
}

// Whether a name stands for a byte, as "<0x0A>" does
static bool fallback_byte(const char *name, unsigned char *byte) {
    int used = 0;
    return strlen(name) == 6 && sscanf(name, "<0x%2hhX>%n", byte, &used) == 1 && used == 6;
}

// Decodes a token of characters: a byte, or text in which U+2581 is a space.
static int64_t fallback_decode(const char *text, unsigned char *out) {
    int64_t n = 0;
    if (fallback_byte(text, out)) return 1;
    for (const char *p = text; *p;) {
        const bool space = strncmp(p, SPACE, 3) == 0;
        out[n++] = space ? ' ' : (unsigned char)*p;
        p += space ? 3 : 1;
    }
    return n;
}

// ---- Vocabulary ---------------------------------------------------------------------------------

// An added token may have the id of the same token in the vocabulary, but of no other.
static bool add_token(Tokenizer *t, const char **names, const json_t *id, const char *name,
                      bool added, bool special, Error *err) {
    int64_t at = 0;
    if (!json_value(id, "token id", JSON_INT64, 0, t->vocab_size - 1, &at, err)) return false;
    if (names[at] && strcmp(names[at], name) != 0)
        return bad_input(err, "token id %ld is both '%s' and '%s'", at, names[at], name);
    t->added[at] = !added ? 0 : names[at] && t->added[at] != 1 ? 2 : 1;
    names[at] = name;
    t->special[at] = special;
    return true;
}

// names (t->vocab_size, which becomes the largest id + 1): into the JSON tree; NULL: no such id
static bool read_tokens(Tokenizer *t, const char **names, const json_t *added, Error *err) {
    json_t *vocab = t->vocab;
    const char *name;
    const json_t *item;
    size_t i;
    double next = (double)json_object_size(vocab);  // the id that an added token gets
    if (!json_is_object(vocab))
        return bad_input(err, "model.vocab: expected an object of token ids");
    t->special = host_calloc((size_t)t->vocab_size, sizeof(bool), "the vocabulary");
    t->added = host_calloc((size_t)t->vocab_size, 1, "the vocabulary");
    if (added && !json_is_array(added))
        return json_type_error(added, "added_tokens", "a list", err);
    json_object_foreach(vocab, name, item) {
        if (!add_token(t, names, item, name, false, false, err)) return false;
    }
    json_array_foreach(added, i, item) {
        const char *content = NULL;
        bool special = false;
        const json_t *id = json_member(item, "id");
        if (!json_get_string(item, "content", &content, true, err) ||
            !json_get_bool(item, "special", &special, false, err))
            return false;
        const json_t *own = json_object_get(vocab, content);
        const double found = json_number_value(id), expected = own ? json_number_value(own) : next;
        if (!id) return bad_input(err, "added_tokens: expected the id of '%s'", content);
        if (!add_token(t, names, id, content, true, special, err)) return false;
        if (found != expected)  // Hugging Face's tokenizers does not read id
            return bad_input(err, "added token '%s': expected id %.0f, found %.0f", content,
                             expected, found);
        if (found >= next) next = found + 1;
        json_object_set(vocab, content, (json_t *)id);
    }
    while (t->vocab_size > 0 && !names[t->vocab_size - 1]) t->vocab_size--;
    return t->vocab_size > 0 || bad_input(err, "model.vocab: expected tokens, found none");
}

static void fill_bytes(Tokenizer *t, const char *const *names) {
    size_t most = 0;
    for (int32_t i = 0; i < t->vocab_size; i++) most += names[i] ? strlen(names[i]) : 0;
    t->offset = host_calloc((size_t)t->vocab_size + 1, sizeof(uint32_t), "the vocabulary");
    t->bytes = host_calloc(most + 1, 1, "the vocabulary");
    for (int32_t i = 0; i < t->vocab_size; i++) {
        unsigned char *out = t->bytes + t->offset[i];
        const char *name = names[i] ? names[i] : "";
        int64_t n = -1;
        if (!t->added[i]) n = t->byte_level ? gpt2_decode(name, out) : fallback_decode(name, out);
        if (n < 0) {  // an added token, or one outside the alphabet: as it is written
            n = (int64_t)strlen(name);
            memcpy(out, name, (size_t)n);
        }
        t->offset[i + 1] = t->offset[i] + (uint32_t)n;
    }
}

static int32_t find_token(const Tokenizer *t, const char *name) {
    const json_t *id = json_object_get(t->vocab, name);
    return id ? (int32_t)json_number_value(id) : -1;
}

// The parts of a component of tokenizer.json, of which those under `key` may be sequences too, in
// order
static json_t *list_parts(const json_t *component, const char *key) {
    const json_t *list = json_member(component, key), *type = json_member(component, "type");
    const bool sequence = json_is_array(list) && (!type || json_string_is(type, "Sequence"));
    json_t *all = json_array();
    if (component && !json_is_null(component) && !sequence)
        json_array_append(all, (json_t *)component);
    for (size_t i = 0; sequence && i < json_array_size(list); i++) {
        json_auto_t *parts = list_parts(json_array_get(list, i), key);
        json_array_extend(all, parts);
    }
    return all;
}

// Does the post-processor begin every text with this token?
static bool begins_texts(const json_t *root, const char *token) {
    json_auto_t *parts = list_parts(json_member(root, "post_processor"), "processors");
    bool begins = false;
    const json_t *item;
    size_t i;
    json_array_foreach(parts, i, item) {
        item = json_member(json_array_get(json_member(item, "single"), 0), "SpecialToken");
        begins |= json_string_is(json_member(item, "id"), token);
    }
    return begins;
}

// bos_token and eos_token of tokenizer_config.json, if it is there, else the usual names. A
// bos_token of null means that there is none.
static void find_ends(Tokenizer *t, const char *const *names, const json_t *tokenizer) {
    const json_t *config = json_member(tokenizer, TOKENIZER_CONFIG);
    const struct {
        const char *key;
        int32_t *id;
        const char *usual[4];
    } ends[] = {{"bos_token", &t->bos, {"<|bos|>", "<|begin_of_text|>", "<s>", "<|endoftext|>"}},
                {"eos_token", &t->eos, {"<|eos|>", "<|end_of_text|>", "</s>", "<|endoftext|>"}}};
    for (int i = 0; i < 2; i++) {
        const json_t *item = json_member(config, ends[i].key);
        if (json_is_object(item)) item = json_member(item, "content");
        *ends[i].id = json_is_string(item) ? find_token(t, json_string_value(item)) : -1;
        const bool named =
            json_is_string(item) || (i == 0 && json_is_null(json_object_get(config, ends[i].key)));
        for (int k = 0; k < 4 && !named && *ends[i].id < 0; k++)
            *ends[i].id = find_token(t, ends[i].usual[k]);
    }
    // transformers 5 does not read add_bos_token where there is a tokenizer.json; 4 does for Llama
    const json_t *add = json_member(config, "add_bos_token");
    t->adds_bos = t->bos >= 0 && begins_texts(tokenizer, names[t->bos]);
    t->bos_is_disputed = json_is_boolean(add) && json_is_true(add) != t->adds_bos;
}

// Whether ids below 256 are the bytes themselves, and no tokens are merged.
static bool has_byte_ids(const Tokenizer *t, const json_t *model) {
    if (json_array_size(json_member(model, "merges")) > 0 || t->vocab_size < 256) return false;
    for (uint32_t i = 0; i < 256; i++)
        if (t->offset[i + 1] - t->offset[i] != 1 || t->bytes[t->offset[i]] != i) return false;
    return true;
}

// ---- For encoding -------------------------------------------------------------------------------

int32_t tokenizer_id(const Tokenizer *t, const char *token) {
    const int32_t id = find_token(t, token);
    return id >= 0 && t->added[id] != 1 ? id : -1;
}

Merge *tokenizer_merge(const Tokenizer *t, int32_t left, int32_t right) {
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint64_t at = mix64(pair) & t->merges_mask;
    while (t->merges[at].rank > 0 && t->merges[at].pair != pair) at = (at + 1) & t->merges_mask;
    return &t->merges[at];
}

static bool list_added(Tokenizer *t, const json_t *list, Error *err) {
    const json_t *item;
    size_t i;
    t->cut = host_calloc(json_array_size(list), sizeof *t->cut, "added tokens");
    json_array_foreach(list, i, item) {
        AddedToken *a = &t->cut[t->num_cut++];
        a->id = (int32_t)json_number_value(json_member(item, "id"));
        a->normalized = json_is_set(json_member(item, "normalized"));
        if (!json_get_bool(item, "lstrip", &a->lstrip, false, err) ||
            !json_get_bool(item, "rstrip", &a->rstrip, false, err) ||
            !json_get_bool(item, "single_word", &a->single_word, false, err))
            return false;
        t->strips |= a->lstrip || a->rstrip;
        t->cuts_normalized |= a->normalized;
    }
    return true;
}

// Notes the characters left and right of the 0 in pair, which a merge joins. Where it joins a byte,
// that may be a part of any character.
static void add_join(Tokenizer *t, const char *pair, const char *middle) {
    ucs4_t left = 0, right = 0;
    unsigned char byte;
    if (fallback_byte(pair, &byte) || fallback_byte(middle + 1, &byte))
        free(t->joins), t->joins = NULL;
    if (!t->joins) return;
    u8_prev(&left, (const uint8_t *)middle, (const uint8_t *)pair);
    u8_strmbtouc(&right, (const uint8_t *)middle + 1);
    const uint32_t bit = tokenizer_join(left, right);
    t->joins[bit / 64] |= 1ull << bit % 64;
}

// "left right" or ["left", "right"]
static bool add_merge(Tokenizer *t, const json_t *merge, size_t rank, Error *err) {
    char pair[2048];
    const char *left = json_string_value(json_array_get(merge, 0)),
               *right = json_string_value(json_array_get(merge, 1)),
               *text = json_string_value(merge);
    const bool halves = json_array_size(merge) == 2 && left && right;
    const int n = halves ? snprintf(pair, sizeof pair, "%s %s", left, right)
                         : snprintf(pair, sizeof pair, "%s", text ? text : "");
    char *space = n >= (int)sizeof pair ? NULL : halves ? pair + strlen(left) : strchr(pair, ' ');
    int32_t ids[3] = {-1, -1, -1};
    if (space) {
        *space = 0;
        ids[0] = tokenizer_id(t, pair);
        ids[1] = tokenizer_id(t, space + 1);
        add_join(t, pair, space);
        memmove(space, space + 1, strlen(space + 1) + 1);
        ids[2] = tokenizer_id(t, pair);
    }
    if (ids[0] < 0 || ids[1] < 0 || ids[2] < 0)
        return bad_input(err,
                         "model.merges: merge %zu is not a pair of tokens whose concatenation is a "
                         "token",
                         rank);
    Merge *m = tokenizer_merge(t, ids[0], ids[1]);
    *m = (Merge){(uint64_t)ids[0] << 32 | (uint64_t)ids[1], (int32_t)rank + 1, ids[2]};
    return true;
}

static bool read_merges(Tokenizer *t, const json_t *model, Error *err) {
    const json_t *merges = json_member(model, "merges"), *item;
    size_t rank;
    if (!json_is_array(merges)) return bad_input(err, "model.merges: required, not found");
    while (t->merges_mask < 2 * json_array_size(merges)) t->merges_mask = 2 * t->merges_mask + 1;
    t->merges = host_calloc(t->merges_mask + 1, sizeof(Merge), "the merges of a tokenizer");
    json_array_foreach(merges, rank, item) {
        if (!add_merge(t, item, rank, err)) return false;
    }
    return true;
}

// ---- Steps --------------------------------------------------------------------------------------

// Writes \s and \S as Unicode's White_Space, as tokenizers define them; PCRE2's also includes the
// Mongolian vowel separator. The caller frees the result.
static char *write_white_space(const char *pattern) {
    static const char spaces[] =
        "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"
        "\\x{3000}";
    char *text = host_calloc(strlen(pattern) + 1, sizeof spaces + 3, "a pattern"), *out = text;
    bool in_class = false;
    for (const char *p = pattern; *p; p++) {
        const bool negated = p[0] == '\\' && p[1] == 'S' && !in_class;
        if (negated || (p[0] == '\\' && p[1] == 's')) {
            out += sprintf(out, in_class ? "%s%s" : "[%s%s]", negated ? "^" : "", spaces);
            p++;
            continue;
        }
        in_class = *p == '[' || (in_class && *p != ']');
        *out++ = *p;
        if (p[0] == '\\' && p[1]) *out++ = *++p;
    }
    return text;
}

// Adds a step with a copy of its text. pattern: an expression, or a text to be found as it is if
// the step is `literal`; NULL: none
static bool add_step(Tokenizer *t, Step step, const char *pattern, Error *err) {
    int code = 0;
    size_t at = 0;
    if (t->num_steps == TOKENIZER_MAX_STEPS)
        return cannot_encode(err, "more than 16 normalizers and patterns of pre_tokenizers");
    Step *added = &t->steps[t->num_steps++];
    *added = step;
    added->text = host_copy(step.text ? step.text : "", "a step");
    if (!pattern) return true;
    AUTO_FREE char *text =
        step.literal ? host_copy(pattern, "a pattern") : write_white_space(pattern);
    // no \C: it would cut characters apart, and matches do not check that text is UTF-8
    const uint32_t options =
        step.literal ? PCRE2_UTF | PCRE2_LITERAL : PCRE2_UCP | PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C;
    added->pattern = pcre2_compile((PCRE2_SPTR)text, strlen(text), options, &code, &at, NULL);
    if (!added->pattern)
        return bad_input(err, "%s: pattern '%s' is wrong at %zu",
                         step.kind == STEP_CUT ? "pre_tokenizer" : "normalizer", pattern, at);
    pcre2_jit_compile(added->pattern, PCRE2_JIT_COMPLETE);  // if it fails, PCRE2 interprets
    return true;
}

static bool add_cut(Tokenizer *t, const char *pattern, Error *err) {
    return add_step(t, (Step){.kind = STEP_CUT}, pattern, err);
}

static bool add_replace(Tokenizer *t, const json_t *item, Error *err) {
    const json_t *pattern = json_member(item, "pattern");
    const char *literal = json_string_value(json_member(pattern, "String")),
               *regex = json_string_value(json_member(pattern, "Regex"));
    Step step = {.kind = STEP_REPLACE, .literal = literal != NULL, .text = ""};
    if (!json_get_string(item, "content", &step.text, true, err)) return false;
    // what follows a deleted beginning is no beginning for Metaspace
    if (!step.text[0] || (!literal && !regex))
        return cannot_encode(err, "a Replace without a pattern or a content");
    return add_step(t, step, literal ? literal : regex, err);
}

static bool add_normalizer(Tokenizer *t, const json_t *item, Error *err) {
    const char *type = "";
    Step step = {.kind = STEP_PREPEND};
    if (!json_get_string(item, "type", &type, true, err)) return false;
    if (strcmp(type, "NFC") == 0) return add_step(t, (Step){.kind = STEP_NFC}, NULL, err);
    if (strcmp(type, "Replace") == 0) return add_replace(t, item, err);
    if (strcmp(type, "Prepend") != 0) return cannot_encode(err, "a normalizer (%.60s)", type);
    return json_get_string(item, "prepend", &step.text, true, err) && add_step(t, step, NULL, err);
}

// Each of a component's parts is `add`ed.
static bool read_steps(Tokenizer *t, const json_t *component, const char *key,
                       bool (*add)(Tokenizer *, const json_t *, Error *), Error *err) {
    json_auto_t *parts = list_parts(component, key);
    const json_t *item;
    size_t i;
    json_array_foreach(parts, i, item) {
        if (!add(t, item, err)) return false;
    }
    return true;
}

// Split, where every match becomes a separate word ("Isolated")
static bool add_split(Tokenizer *t, const json_t *item, Error *err) {
    const char *behavior = "", *pattern = NULL;
    bool invert = false;
    if (!json_get_string(item, "behavior", &behavior, true, err) ||
        !json_get_bool(item, "invert", &invert, false, err))
        return false;
    if (strcmp(behavior, "Isolated") != 0 || invert)
        return cannot_encode(err, "a Split other than Isolated");
    if (!json_get_string(json_member(item, "pattern"), "Regex", &pattern, false, err) || !pattern)
        return cannot_encode(err, "a Split without a Regex");
    return add_cut(t, pattern, err);
}

// Spaces become U+2581, which begins a text, and each word with `split`.
static bool add_metaspace(Tokenizer *t, const json_t *item, Error *err) {
    const char *space = "", *scheme = "always";
    bool split = true;
    if (!json_get_string(item, "replacement", &space, true, err) ||
        !json_get_string(item, "prepend_scheme", &scheme, false, err) ||
        !json_get_bool(item, "split", &split, false, err))
        return false;
    const bool never = strcmp(scheme, "never") == 0, first = strcmp(scheme, "first") == 0;
    if (strcmp(space, SPACE) != 0 || (!first && !never && strcmp(scheme, "always") != 0))
        return cannot_encode(err, "a Metaspace (%.20s, prepend_scheme %.20s)", space, scheme);
    const Step replace = {.kind = STEP_REPLACE, .text = SPACE},
               prepend = {.kind = STEP_PREPEND, .text = SPACE, .once = true, .first = first};
    return add_step(t, replace, " ", err) && (never || add_step(t, prepend, NULL, err)) &&
           (!split || add_cut(t, SPACE "[^" SPACE "]*", err));
}

static bool add_pre_tokenizer(Tokenizer *t, const json_t *item, Error *err) {
    static const char gpt2[] =  // openai/gpt-2, encoder.py
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    const char *type = "";
    bool flag = false, regex = true;
    if (!json_get_string(item, "type", &type, true, err)) return false;
    if (strcmp(type, "Split") == 0) return add_split(t, item, err);
    if (strcmp(type, "Digits") == 0)
        return json_get_bool(item, "individual_digits", &flag, false, err) &&
               add_cut(t, flag ? "\\p{N}" : "\\p{N}+", err);
    if (strcmp(type, "Metaspace") == 0) return add_metaspace(t, item, err);
    if (strcmp(type, "ByteLevel") != 0) return cannot_encode(err, "a pre_tokenizer (%.60s)", type);
    if (!json_get_bool(item, "add_prefix_space", &flag, false, err)) return false;
    if (flag) return cannot_encode(err, "add_prefix_space");
    return json_get_bool(item, "use_regex", &regex, false, err) &&
           (!regex || add_cut(t, gpt2, err));
}

// The tokens of single bytes; true: every byte has one.
static bool read_bytes(Tokenizer *t) {
    bool all = true;
    for (int i = 0; i < 256; i++) {
        char token[8];
        if (t->byte_level)
            gpt2_encode(&(unsigned char){(unsigned char)i}, 1, token);
        else
            snprintf(token, sizeof token, "<0x%02X>", i);
        t->id_of_byte[i] = tokenizer_id(t, token);
        all &= t->id_of_byte[i] >= 0;
    }
    return all;
}

static bool read_model(Tokenizer *t, const json_t *model, Error *err) {
    const char *unk = NULL;
    const bool all = read_bytes(t);
    if (!json_get_bool(model, "ignore_merges", &t->ignore_merges, false, err) ||
        !json_get_bool(model, "fuse_unk", &t->fuse_unk, false, err) ||
        !json_get_bool(model, "byte_fallback", &t->byte_fallback, false, err) ||
        !json_get_string(model, "unk_token", &unk, false, err))
        return false;
    t->unk = unk ? find_token(t, unk) : -1;
    if (unk && t->unk < 0) return bad_input(err, "model.unk_token: '%s' is no token", unk);
    // otherwise a word is merged as a whole, or unknown characters of two parts may be one token
    if (!t->byte_level && t->byte_fallback && all && !t->ignore_merges)
        t->joins = host_calloc(JOIN_BITS / 64, sizeof *t->joins, "the merges of a tokenizer");
    if (t->byte_level && t->byte_fallback && !all)
        return cannot_encode(err, "byte_fallback and bytes without tokens");
    return read_merges(t, model, err);
}

static bool read_encoding(Tokenizer *t, const json_t *root, bool cuts_bytes, Error *err) {
    static const char *const unknown[3] = {"dropout", "continuing_subword_prefix",
                                           "end_of_word_suffix"};
    const json_t *model = json_member(root, "model");
    for (int i = 0; i < 3; i++)
        if (json_is_set(json_member(model, unknown[i])))
            return cannot_encode(err, "%s", unknown[i]);
    if (!list_added(t, json_member(root, "added_tokens"), err) ||
        !add_step(t, (Step){.kind = STEP_ADDED}, NULL, err) ||
        !read_steps(t, json_member(root, "normalizer"), "normalizers", add_normalizer, err))
        return false;
    t->num_normalizers = t->num_steps - 1;
    if (t->byte_level && !cuts_bytes) return cannot_encode(err, "no ByteLevel pre_tokenizer");
    return (!t->cuts_normalized || add_step(t, (Step){.kind = STEP_ADDED}, NULL, err)) &&
           read_steps(t, json_member(root, "pre_tokenizer"), "pretokenizers", add_pre_tokenizer,
                      err) &&
           read_model(t, model, err);
}

// ---- tokenizer.json -----------------------------------------------------------------------------

static bool has_byte_level(const json_t *component, const char *key) {
    json_auto_t *parts = list_parts(component, key);
    bool found = false;
    for (size_t i = 0; i < json_array_size(parts); i++)
        found |= json_string_is(json_member(json_array_get(parts, i), "type"), "ByteLevel");
    return found;
}

static bool tokenizer_read(Tokenizer *t, const json_t *root, Error *err) {
    const json_t *model = json_member(root, "model"), *added = json_member(root, "added_tokens");
    const char *type = "BPE";
    if (!json_is_object(model)) return bad_input(err, "model: required, not found");
    if (!json_get_string(model, "type", &type, false, err)) return false;
    if (strcmp(type, "BPE") != 0)
        return bad_input(err, "model.type: expected BPE, found %.60s", type);
    const bool cuts_bytes = has_byte_level(json_member(root, "pre_tokenizer"), "pretokenizers");
    t->byte_level = cuts_bytes || has_byte_level(json_member(root, "decoder"), "decoders");
    t->vocab = json_incref(json_member(model, "vocab"));
    // an id without a token costs memory, but no byte in the file
    const size_t most = (1 << 17) + 8 * (json_object_size(t->vocab) + json_array_size(added));
    t->vocab_size = most < TOKENIZER_MAX_IDS ? (int32_t)most : TOKENIZER_MAX_IDS;
    AUTO_FREE const char **names =
        host_calloc((size_t)t->vocab_size, sizeof *names, "the vocabulary");
    if (!read_tokens(t, names, added, err)) return false;
    fill_bytes(t, names);
    find_ends(t, names, root);
    t->byte_ids = has_byte_ids(t, model);
    if (!t->byte_ids && !read_encoding(t, root, cuts_bytes, &t->why_not) &&
        t->why_not.code == EXIT_BAD_INPUT)
        error_prefix(&t->why_not, t->file);
    return true;
}

// Adds the tokens that stand in tokenizer_config.json alone to added_tokens. Hugging Face's library
// gives them the next ids, so that others are refused later, as are those without an id.
static void merge_added(json_t *root, const json_t *config) {
    json_t *list, *item;
    const char *id;
    json_auto_t *known = json_object();
    size_t i;
    if (!json_member(root, "added_tokens")) json_object_set_new(root, "added_tokens", json_array());
    list = json_object_get(root, "added_tokens");
    json_array_foreach(list, i, item) {
        json_object_set(known, json_string_value(json_member(item, "content")), item);
    }
    json_object_foreach(json_member(config, "added_tokens_decoder"), id, item) {
        const char *content = json_string_value(json_member(item, "content"));
        if (!content || json_object_get(known, content)) continue;
        json_object_set_new(item, "id", json_real(atof(id)));
        json_object_set(known, content, item);
        json_array_append(list, item);
    }
    json_array_foreach(json_member(config, "additional_special_tokens"), i, item) {
        json_t *content = json_is_object(item) ? json_object_get(item, "content") : item;
        if (!json_object_get(known, json_string_value(content)))
            json_array_append_new(list, json_pack("{sO}", "content", content));
    }
}

// tokenizer.json with the added tokens that only the tokenizer_config.json of its directory has;
// the latter, if it exists, is its last member.
static json_t *read_files(const char *path, Error *err) {
    char dir[IO_PATH_MAX], file[IO_PATH_MAX];
    json_t *config = NULL;
    if (!path_parent(dir, path, err) || !path_join(file, dir, TOKENIZER_CONFIG, err)) return NULL;
    if (path_exists(file) && !(config = json_read(file, JSON_MAX_CONFIG, "", err))) return NULL;
    json_t *root =
        json_read(path, TOKENIZER_MAX_BYTES, "expected Hugging Face's tokenizer.json", err);
    if (root) merge_added(root, config);
    json_object_set_new(root, TOKENIZER_CONFIG, config);
    return root;
}

bool tokenizer_open(Tokenizer *t, const char *path, Error *err) {
    *t = (Tokenizer){0};
    if (!path_inside(t->file, path, "tokenizer.json", err)) return false;
    json_auto_t *root = read_files(t->file, err);
    if (!root) return false;
    if (tokenizer_read(t, root, err)) return true;
    error_prefix(err, t->file);
    tokenizer_free(t);
    return false;
}

const unsigned char *tokenizer_bytes(const Tokenizer *t, int32_t id, size_t *n) {
    const bool known = id >= 0 && id < t->vocab_size;
    *n = known ? t->offset[id + 1] - t->offset[id] : 0;
    return known ? t->bytes + t->offset[id] : t->bytes;
}

void tokenizer_name(char *out, size_t capacity, const Tokenizer *t, int32_t id) {
    size_t n;
    const unsigned char *bytes = tokenizer_bytes(t, id, &n);
    snprintf(out, capacity, "%.*s", (int)n, (const char *)bytes);
}
