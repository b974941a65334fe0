// Decoding of tokenizer.json, encoding of prompts and chats, the byte tokenizer, what is refused.
#include "../data/base/file.h"
#include "../data/base/json.h"
#include "../data/base/path.h"
#include "../data/models/bpe.h"
#include "../data/models/chat.h"
#include "../data/models/tokenizer.h"
#include "scratch.h"

static void save(const char *name, const char *text) {
    put_file(scratch(name), json_of(text), strlen(text));
}

static bool open_text(Tokenizer *t, const char *text, Error *err) {
    memset(err, 0, sizeof *err);
    save("tokenizer.json", text);
    return tokenizer_open(t, scratch("."), err);
}

static Tokenizer must_open(const char *text) {
    Tokenizer t;
    MUST(open_text(&t, text, &err));
    return t;
}
// Until the end of the block
#define TOKENIZER __attribute__((cleanup(tokenizer_free))) Tokenizer

// Out of order, with a hole at 6, an id in both lists, a token outside the alphabet.
static const char GPT2[] =
    "{'added_tokens': [{'id': 7, 'content': '<|endoftext|>', 'special': true},"
    " {'id': 2, 'content': '\xc4\xa0', 'special': false}],"
    " 'decoder': {'type': 'Sequence', 'decoders': [{'type': 'ByteLevel'}]},"
    " 'model': {'type': 'BPE', 'vocab': {'hello': 1, '!': 0, '\xc4\xa0world': 3,"
    " '\xc3\xa2\xc4\xa4\xc2\xac': 4, '\xe2\x82\xac': 5, '\xc4\xa0': 2, '\xc4\x8a\xc5\x83': 8},"
    " 'merges': ['h e']}}";

TEST(bos_and_eos_come_from_the_config) {
    save("tokenizer_config.json", "{'bos_token': null, 'eos_token': {'content': 'hello'}}");
    TOKENIZER t = must_open(GPT2);
    CHECK(t.eos == 1 && t.bos == -1);
    save("tokenizer_config.json", "{");
    REFUSED(EXIT_BAD_INPUT, "", open_text(&(Tokenizer){0}, GPT2, &err));
    CHECK(unlink(scratch("tokenizer_config.json")) == 0);
}

// As transformers 5.24: add_bos_token changes nothing, the post_processor decides.
TEST(the_post_processor_adds_bos) {
    const char *add[] = {"null", "false", "true"};
    for (int i = 0; i < 6; i++) {
        const bool adds = i % 2;
        save("tokenizer_config.json",
             printed("{'bos_token': 'hello', 'eos_token': 'hello', 'add_bos_token': %s}",
                     add[i / 2]));
        TOKENIZER t =
            must_open(printed("{'post_processor': {'type': 'Sequence', 'processors': [{'single': ["
                              "{'SpecialToken': {'id': '%s'}}]}]}, %s",
                              adds ? "hello" : "!", GPT2 + 1));
        CHECK(t.adds_bos == adds && t.bos_is_disputed == (i >= 2 && adds != (i >= 4)));
    }
    CHECK(unlink(scratch("tokenizer_config.json")) == 0);
}

static const char *const GPT2_TOKENS[] = {"!",      "hello",         "\xc4\xa0",
                                          " world", "\xe2\x82\xac",  "\xe2\x82\xac",
                                          "",       "<|endoftext|>", "\n\xad"};
static const char FALLBACK[] =
    "{'model': {'type': 'BPE', 'byte_fallback': true, 'vocab': {'<unk>': 0, '<s>': 1, '</s>': 2,"
    " '<0x0A>': 3, '<0xFF>': 4, '\xe2\x96\x81the': 5, '<0x0A>x': 6, '\xc3\xa9': 7}}}";

static const char *const FALLBACK_TOKENS[] = {"<unk>", "<s>",  "</s>",    "\n",
                                              "\xff",  " the", "<0x0A>x", "\xc3\xa9"};

// Added tokens, 2 and 7, stand for themselves; 4 is three characters of the alphabet, the bytes of
// one euro, and 5 is not in the alphabet: as written.
TEST(tokens_decode) {
    static const struct {
        const char *json;
        int vocab_size, bos, eos;
        const char *const *tokens;
    } cases[] = {{GPT2, 9, 7, 7, GPT2_TOKENS}, {FALLBACK, 8, 1, 2, FALLBACK_TOKENS}};
    for (int i = 0; i < 2; i++) {
        TOKENIZER t = must_open(cases[i].json);
        CHECK(t.vocab_size == cases[i].vocab_size && !t.byte_ids);
        CHECK(t.bos == cases[i].bos && t.eos == cases[i].eos);
        for (int32_t id = -1; id <= t.vocab_size; id++) {
            size_t n = 0;
            const char *expected = id < 0 || id == t.vocab_size ? "" : cases[i].tokens[id];
            const unsigned char *bytes = tokenizer_bytes(&t, id, &n);
            CHECK_MSG(n == strlen(expected) && !memcmp(bytes, expected, n), "%d: token %d", i, id);
        }
        CHECK(i == 1 || (t.special[7] && !t.special[2]));
    }
}

// ---- BPE: as Hugging Face encodes the same texts (dev/reference/make_tokenizer_golden.py) -------

enum { ROOM = 4096 };

// The bytes of ids, without the space that is not part of the text
static void check_decoded(const Tokenizer *t, const int32_t *ids, int64_t n, const char *expected) {
    static char text[16 * ROOM];
    size_t length, at = 0;
    for (int64_t i = 0; i < n; i++, at += length) {
        const unsigned char *bytes = tokenizer_bytes(t, ids[i], &length);
        memcpy(text + at, bytes, length);
    }
    text[at] = 0;
    const char *from = text + (text[0] == ' ');
    CHECK_MSG(strcmp(from, expected) == 0, "'%s': '%s'", expected, from);
}

static void check_golden(const char *dir) {
    static int32_t ids[ROOM];
    TOKENIZER t;
    Error err = {0};
    const json_t *item, *id;
    size_t i, k;
    MUST(tokenizer_open(&t, dir, &err));
    json_auto_t *cases = json_read(printed("%s/cases.json", dir), TOKENIZER_MAX_BYTES, "", &err);
    CHECK_MSG(cases != NULL, "%s", err.what);
    json_array_foreach(cases, i, item) {
        const char *text = json_string_value(json_member(item, "text"));
        const json_t *expected = json_member(item, "ids");
        const int64_t n = tokenizer_encode(&t, text, strlen(text), ids, ROOM, &err);
        CHECK_MSG(n == (int64_t)json_array_size(expected), "'%s': %ld ids: %s", text, n, err.what);
        json_array_foreach(expected, k, id)
            CHECK_MSG(ids[k] == json_number_value(id), "'%s': id %zu is %d", text, k, ids[k]);
        const char *decoded = json_string_value(json_member(item, "decoded"));
        if (decoded) check_decoded(&t, ids, n, decoded);
    }
    CHECK(i > 20);
}

TEST(bpe_encodes_as_hugging_face) {
    check_golden("tests/golden/tokenizers/smollm2");
    check_golden("tests/golden/tokenizers/llama3");
    check_golden("tests/golden/tokenizers/qwen");
    check_golden("tests/golden/tokenizers/llama2");
    check_golden("tests/golden/tokenizers/mistral");
    check_golden("tests/golden/tokenizers/options");
}

// ---- BPE of characters: a text without spaces is one word --------------------------------------

static const int32_t *must_encode(BpeEncoder *e, const char *text, size_t bytes, size_t *n) {
    bpe_clear(e);
    MUST(bpe_encode(e, (const unsigned char *)text, bytes, &err));
    return bpe_ids(e, n);
}

// Words are cut where no merge of the vocabulary joins two characters: merged as a whole, they are
// the same ids.
TEST(words_are_cut_where_nothing_is_merged) {
    static const char *const pieces[] = {"the",          "ory",      "pack", "ing", " ",
                                         "\xe2\x96\x81", "\xc3\xa9", "\n",   "e",   "x"};
    Tokenizer t[2];
    BpeEncoder *e[2];
    for (int i = 0; i < 2; i++) {
        MUST(tokenizer_open(&t[i], "tests/golden/tokenizers/llama2", &err));
        CHECK(t[i].joins != NULL);
        if (i == 1) free(t[i].joins), t[i].joins = NULL;
        e[i] = bpe_encoder_open(&t[i]);
    }
    for (int round = 0; round < 300; round++) {
        char text[200] = "";
        const int32_t *ids[2];
        size_t n[2];
        for (uint32_t k = 0, most = test_rng_below(40); k < most; k++)
            strcat(text, pieces[test_rng_below(10)]);
        for (int i = 0; i < 2; i++) ids[i] = must_encode(e[i], text, strlen(text), &n[i]);
        CHECK_MSG(n[0] == n[1] && (n[0] == 0 || !memcmp(ids[0], ids[1], n[0] * 4)), "%s", text);
    }
    for (int i = 0; i < 2; i++) bpe_encoder_close(e[i]), tokenizer_free(&t[i]);
}

// 2^20 letters that are merged again and again: steps in proportion to the square would take hours.
TEST(a_long_word_is_merged_in_seconds) {
    enum { BYTES = 1 << 20 };
    static char text[BYTES];
    size_t n;
    TOKENIZER t = must_open(
        "{'model': {'vocab': {'a': 0, 'aa': 1, 'aaaa': 2, 'aaaaaaaa': 3},"
        " 'merges': ['a a', 'aa aa', 'aaaa aaaa']}}");
    BpeEncoder *e = bpe_encoder_open(&t);
    const int32_t *ids = must_encode(e, memset(text, 'a', BYTES), BYTES - 1, &n);
    CHECK(n == BYTES / 8 + 2 && ids[0] == 3 && ids[n - 3] == 2 && ids[n - 2] == 1 && !ids[n - 1]);
    text[1] = 0;  // no token of a vocabulary in JSON has a NUL
    must_encode(e, text, 3, &n);
    CHECK(n == 1);  // it is dropped before the merges
    bpe_encoder_close(e);
}

// ---- BPE: as a naive encoder encodes any text by any vocabulary ---------------------------------

enum { TOY_MERGES = 24, TOY_EXTRA = 6, TOY_LENGTH = 10, TOY_TEXT = 64 };
enum { TOY_TOKENS = 4 + TOY_MERGES + TOY_EXTRA };

// How words are cut and added tokens found is seen by the goldens.
typedef struct {
    int bytes;  // a, b, ...: the first tokens; few of them where merges compete
    char tokens[TOY_TOKENS][TOY_LENGTH + 1];
    int num_tokens, merges[TOY_MERGES][3], num_merges;  // left, right, result
    bool ignore_merges;
} Toy;

static int toy_find(const Toy *toy, const char *p, size_t n) {
    for (int id = 0; id < toy->num_tokens; id++)
        if (strlen(toy->tokens[id]) == n && memcmp(toy->tokens[id], p, n) == 0) return id;
    return -1;
}

static int toy_token(Toy *toy, const char *text) {
    const int id = toy_find(toy, text, strlen(text));
    if (id >= 0) return id;
    strcpy(toy->tokens[toy->num_tokens], text);
    return toy->num_tokens++;
}

static int toy_rank(const Toy *toy, int left, int right) {
    for (int rank = 0; rank < toy->num_merges; rank++)
        if (toy->merges[rank][0] == left && toy->merges[rank][1] == right) return rank;
    return -1;
}

static void toy_make(Toy *toy) {
    *toy = (Toy){.bytes = test_rng_below(2) ? 2 : 4, .ignore_merges = test_rng_below(2)};
    for (int i = 0; i < toy->bytes; i++) toy_token(toy, printed("%c", 'a' + i));
    for (int tries = 0; tries < 20 * TOY_MERGES && toy->num_merges < TOY_MERGES; tries++) {
        const int left = (int)test_rng_below((uint32_t)toy->num_tokens),
                  right = (int)test_rng_below((uint32_t)toy->num_tokens);
        const char *whole = printed("%s%s", toy->tokens[left], toy->tokens[right]);
        if (strlen(whole) > TOY_LENGTH || toy_rank(toy, left, right) >= 0) continue;
        int *merge = toy->merges[toy->num_merges++];
        merge[0] = left, merge[1] = right, merge[2] = toy_token(toy, whole);
    }
    for (int i = 0; i < TOY_EXTRA; i++) {  // tokens that no merge makes
        char text[4] = "";
        for (uint32_t k = 0, n = 2 + test_rng_below(2); k < n; k++)
            text[k] = (char)('a' + test_rng_below((uint32_t)toy->bytes));
        toy_token(toy, text);
    }
}

static Tokenizer toy_open(const Toy *toy) {
    char vocab[1024] = "", merges[1024] = "";
    for (int id = 0; id < toy->num_tokens; id++)
        strcat(vocab, printed("%s'%s': %d", id ? ", " : "", toy->tokens[id], id));
    for (int i = 0; i < toy->num_merges; i++)
        strcat(merges, printed("%s'%s %s'", i ? ", " : "", toy->tokens[toy->merges[i][0]],
                               toy->tokens[toy->merges[i][1]]));
    return must_open(
        printed("{'decoder': {'type': 'ByteLevel'}, 'pre_tokenizer': {'type':"
                " 'ByteLevel', 'use_regex': false}, 'model': {'ignore_merges': %s,"
                " 'vocab': {%s}, 'merges': [%s]}}",
                toy->ignore_merges ? "true" : "false", vocab, merges));
}

// Merges the leftmost pair of the lowest rank until there is none. A byte without a token is left
// out.
static int toy_encode(const Toy *toy, const char *p, size_t n, int32_t *ids) {
    int count = 0;
    const int whole = toy->ignore_merges ? toy_find(toy, p, n) : -1;
    if (whole >= 0) ids[count++] = whole;
    for (size_t i = 0; whole < 0 && i < n; i++)
        if ((ids[count] = toy_find(toy, p + i, 1)) >= 0) count++;
    for (int best = 0; whole < 0 && best >= 0;) {
        int lowest = TOY_MERGES;
        best = -1;
        for (int i = 0; i + 1 < count; i++) {
            const int rank = toy_rank(toy, ids[i], ids[i + 1]);
            if (rank >= 0 && rank < lowest) lowest = rank, best = i;
        }
        if (best < 0) break;
        ids[best] = toy->merges[lowest][2];
        memmove(&ids[best + 1], &ids[best + 2], (size_t)(--count - best - 1) * sizeof *ids);
    }
    return count;
}

static void check_toy(const Toy *toy, BpeEncoder *e, const char *text, size_t n) {
    int32_t expected[TOY_TEXT];
    size_t count = 0;
    bpe_clear(e);
    MUST(bpe_encode(e, (const unsigned char *)text, n, &err));
    const size_t wanted = (size_t)toy_encode(toy, text, n, expected);
    const int32_t *ids = bpe_ids(e, &count);
    CHECK_MSG(count == wanted && (!wanted || !memcmp(ids, expected, count * sizeof *ids)),
              "'%s': %zu ids, %zu wanted", text, count, wanted);
}

TEST(bpe_encodes_as_the_naive_encoder) {
    for (int round = 0; round < 150; round++) {
        static Toy toy;
        toy_make(&toy);
        TOKENIZER t = toy_open(&toy);
        BpeEncoder *e = bpe_encoder_open(&t);
        for (int i = 0; i < 40; i++) {
            char text[TOY_TEXT + 1] = "";
            const size_t n = test_rng_below(i % 4 ? 6 : TOY_TEXT);
            for (size_t k = 0; k < n; k++)
                text[k] = "abcd\0"[test_rng_below(toy.bytes == 2 ? 2 : 5)];
            check_toy(&toy, e, text, n);
        }
        bpe_encoder_close(e);
    }
}

// Words that share their first bytes and a place in the cache, and some as long as it takes
TEST(cached_words_are_not_mistaken) {
    const Toy toy = {.tokens = {"a", "b", "c", "i", "aa", "aaaa", "aaaaaaaa"},
                     .num_tokens = 7,
                     .merges = {{0, 0, 4}, {4, 4, 5}, {5, 5, 6}},
                     .num_merges = 3};
    char text[17] = "aaaaaaaa";
    TOKENIZER t = toy_open(&toy);
    BpeEncoder *e = bpe_encoder_open(&t);
    for (int i = 0; i < 6561; i++) {
        for (int digit = 0, rest = i; digit < 8; digit++, rest /= 3)
            text[8 + digit] = "abc"[rest % 3];
        check_toy(&toy, e, text, 16);
    }
    for (int i = 38; i < 54; i++) {  // an a or i after 19 to 26 times a
        const char *word = printed("%.*s%c", i / 2, "aaaaaaaaaaaaaaaaaaaaaaaaaa", "ai"[i % 2]);
        check_toy(&toy, e, word, strlen(word));
    }
    bpe_encoder_close(e);
}

// Seven tokens and three merges; `more` goes into the model.
static const char *small_bpe(const char *normalizer, const char *pre, const char *more) {
    return printed(
        "{'normalizer': %s, 'added_tokens': [{'id': 7, 'content': '<s>', 'special': true,"
        " 'normalized': true}], 'pre_tokenizer': %s, 'decoder': {'type': 'ByteLevel'},"
        " 'model': {'type': 'BPE', 'vocab': {'a': 0, 'b': 1, 'ab': 2, 'aba': 3,"
        " '\xc4\xa0': 4, '1': 5, '11': 6}, 'merges': ['a b', ['ab', 'a'], '1 1']%s}}",
        normalizer, pre, more);
}

static const char BYTE_LEVEL[] = "{'type': 'ByteLevel', 'add_prefix_space': false}";

#define SEQUENCE(first_) \
    "{'type': 'Sequence', 'pretokenizers': [" first_ ", {'type': 'ByteLevel'}]}"
#define SPLIT(pattern_, behavior_)                                                \
    SEQUENCE("{'type': 'Split', 'pattern': " pattern_ ", 'behavior': '" behavior_ \
             "', 'invert': false}")
#define DIGITS(each_) SEQUENCE("{'type': 'Digits', 'individual_digits': " each_ "}")
#define NORMALIZERS(list_) "{'type': 'Sequence', 'normalizers': [" list_ "]}"

// As tokenizers 0.23 encodes them
TEST(texts_encode_as_in_hugging_face) {
    // tokens that are not "normalized" are cut out of the whole text first, also where one that is
    // normalized begins earlier or is longer
    static const char overlap[] =
        "{'added_tokens': [{'id': 6, 'content': '<a>', 'normalized': false, 'special': true},"
        " {'id': 7, 'content': 'b<a>b', 'normalized': true},"
        " {'id': 8, 'content': '<ab', 'normalized': true},"
        " {'id': 9, 'content': '<a>a', 'normalized': false}],"
        " 'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': false}, 'model': {"
        " 'vocab': {'a': 0, 'b': 1, 'ab': 2, 'aba': 3, '<': 4, '>': 5},"
        " 'merges': ['a b', 'ab a']}}";
    // \xc3\x83 and \xc2\xa9 are the bytes of e with an acute accent; a class that is negated
    static const char composed[] =
        "{'normalizer': {'type': 'NFC'}, 'pre_tokenizer': " SPLIT(
            "{'Regex': '[^\\\\S\\\\n]+'}",
            "Isolated") ", 'model': {'type': 'BPE',"
                        " 'vocab': {'\xc3\x83': 0, '\xc2\xa9': 1, '\xc3\x83\xc2\xa9': 2,"
                        " '\xc4\xa0': 3, '\xc4\x8a': 4, '\xc4\xa0\xc4\x8a': 5},"
                        " 'merges': ['\xc3\x83 \xc2\xa9', '\xc4\xa0 \xc4\x8a']}}";
    // the Mongolian vowel separator, U+180E, is no white space, unlike in PCRE2: one word, of which
    // the last two bytes merge
    static const char vowels[] =
        "{'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': false},"
        " 'model': {'type': 'BPE', 'vocab': {'\xc3\xa1': 0, '\xc5\x82': 1, '\xc4\xb0': 2, '!': 3,"
        " '\xc4\xb0!': 4}, 'merges': ['\xc4\xb0 !']}}";
    static const char spaces[] =  // of tokens with spaces, an unk
        "{'model': {'vocab': {'a': 0, ' ': 1, ' a': 2, '?': 3}, 'unk_token': '?', 'fuse_unk': true,"
        " 'merges': [[' ', 'a']]}}";
    const char *small = small_bpe("null", BYTE_LEVEL, "");
    const struct {
        const char *json, *text;
        int32_t bos, eos, n, ids[6];
    } cases[] = {
        {small, "abaab b<s>a", -1, -1, 6, {3, 2, 4, 1, 7, 0}},
        {small, "acb cc", -1, -1, 2, {2, 4}},  // a byte without a token leaves nothing
        {small_bpe("null", DIGITS("true"), ""), "a11", -1, -1, 3, {0, 5, 5}},
        {small_bpe("null", DIGITS("false"), ""), "a11", -1, -1, 2, {0, 6}},
        {small, "ab", 7, -1, 2, {7, 2}},
        {small, "ab", 7, 7, 2, {7, 2}},
        {overlap, "b<a>b", -1, -1, 3, {1, 6, 1}},
        {overlap, "<ab<a>ab", -1, -1, 3, {8, 9, 1}},
        {overlap, "b<a>ab<ab", -1, -1, 4, {1, 9, 1, 8}},
        {overlap, "aba<a>b<a>b", -1, -1, 5, {3, 6, 1, 6, 1}},
        {composed, "e\xcc\x81", -1, -1, 1, {2}},
        {composed, " \n", -1, -1, 2, {3, 4}},
        {vowels, "\xe1\xa0\x8e!", -1, -1, 3, {0, 1, 4}},
        {small_bpe("null", BYTE_LEVEL, ", 'unk_token': 'b'"), "acca", -1, -1, 3, {2, 1, 0}},
        {spaces, " axyaxa", -1, -1, 5, {2, 3, 0, 3, 0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err = {0};
        int32_t ids[8];
        TOKENIZER t = must_open(cases[i].json);
        CHECK(unlink(scratch("tokenizer.json")) == 0);  // it was read once
        t.bos = cases[i].bos;
        t.adds_bos = t.bos >= 0;
        t.eos = cases[i].eos;
        const int64_t n = tokenizer_encode(&t, cases[i].text, strlen(cases[i].text), ids, 8, &err);
        CHECK_MSG(n == cases[i].n && !memcmp(ids, cases[i].ids, (size_t)n * 4),
                  "case %zu: %ld ids, %s", i, n, err.what);
        REFUSED(EXIT_USAGE, "",
                tokenizer_encode(&t, cases[i].text, strlen(cases[i].text), ids, n - 1, &err) >= 0);
    }
}

// As transformers 4.57 and 5.24 encode it, which give it the next id whatever the file says.
TEST(a_token_of_the_config_alone_is_a_token) {
    Error err = {0};
    int32_t ids[8];
    for (int id = 8; id < 10; id++) {
        save("tokenizer_config.json",
             printed("{'added_tokens_decoder': {'7': {'content': '<s>'}, '%d': {'content': 'a b',"
                     " 'special': true, 'normalized': false}}}",
                     id));
        const char *json = small_bpe("null", BYTE_LEVEL, "");
        if (id == 9) REFUSED(EXIT_BAD_INPUT, "", open_text(&(Tokenizer){0}, json, &err));
        if (id == 9) break;
        TOKENIZER t = must_open(json);
        CHECK(tokenizer_encode(&t, "aa b<s>b", 8, ids, 8, &err) == 4);
        CHECK(!memcmp(ids, (int32_t[]){0, 8, 7, 1}, 16) && t.special[8] && t.vocab_size == 9);
    }
    CHECK(unlink(scratch("tokenizer_config.json")) == 0);
    for (int known = 0; known < 2; known++) {  // names without an id
        TOKENIZER t = {0};
        const char *json = small_bpe("null", BYTE_LEVEL, "");
        save("tokenizer_config.json",
             printed("{'additional_special_tokens': [{'content': '<s>'}%s]}",
                     known ? "" : ", 'a b'"));
        if (known) CHECK(open_text(&t, json, &err) && t.vocab_size == 8);
        if (!known) REFUSED(EXIT_BAD_INPUT, "the id of 'a b'", open_text(&t, json, &err));
        CHECK(unlink(scratch("tokenizer_config.json")) == 0);
    }
}

TEST(features_that_change_the_ids_are_refused_by_name) {
    static const struct {
        const char *normalizer, *pre, *more, *text, *why;  // why NULL: not refused
    } cases[] = {
        {NORMALIZERS(""), BYTE_LEVEL, "", "a", NULL},
        {"{'type': 'NFKC'}", BYTE_LEVEL, "", "a", "a normalizer (NFKC)"},
        {NORMALIZERS("{'type': 'NFC'}, {'type': 'Strip'}"), BYTE_LEVEL, "", "a",
         "a normalizer (Strip)"},
        {"{'type': 'Replace', 'pattern': {'String': 'a'}, 'content': ''}", BYTE_LEVEL, "", "a",
         "Replace without"},
        {"{'type': 'Replace', 'pattern': {'Regex': '('}, 'content': 'b'}", BYTE_LEVEL, "", "a",
         "normalizer: pattern '(' is wrong"},
        {"null", BYTE_LEVEL, ", 'byte_fallback': true", "a",
         "byte_fallback and bytes without tokens"},
        {"null", BYTE_LEVEL, ", 'unk_token': 'c'", "a", "model.unk_token: 'c' is no token"},
        {"null", BYTE_LEVEL, "", "a\xff", "expected UTF-8, found byte 0xff at 1"},
        {"null", BYTE_LEVEL, ", 'dropout': 0.1", "a", "dropout"},
        {"null", BYTE_LEVEL, ", 'end_of_word_suffix': '</w>'", "a", "end_of_word_suffix"},
        {"null", "{'type': 'ByteLevel', 'add_prefix_space': true}", "", "a", "prefix_space"},
        {"null", "null", "", "a", "no ByteLevel"},
        {"null", SEQUENCE("{'type': 'Punctuation'}"), "", "a", "a pre_tokenizer (Punctuation)"},
        {"null", SEQUENCE("{'type': 'Metaspace', 'replacement': '_'}"), "", "a",
         "a Metaspace (_, prepend_scheme always)"},
        {"null", SPLIT("{'Regex': 'a'}", "Removed"), "", "a", "Split other than Isolated"},
        {"null", SPLIT("{'Regex': '('}", "Isolated"), "", "a", "is wrong at 1"},
        {"null", SPLIT("{'Regex': 'x*'}", "Isolated"), "", "a", "matches nothing"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err = {0};
        int32_t ids[8];
        TOKENIZER t = must_open(small_bpe(cases[i].normalizer, cases[i].pre, cases[i].more));
        const int64_t n = tokenizer_encode(&t, cases[i].text, strlen(cases[i].text), ids, 8, &err);
        CHECK_MSG((n == -1) == (cases[i].why != NULL), "case %zu", i);
        CHECK_MSG(n > 0 || ((err.code == EXIT_USAGE || err.code == EXIT_BAD_INPUT) &&
                            strstr(err.what, cases[i].why)),
                  "case %zu: %s", i, err.what);
    }
}

TEST(wrong_files_are_refused) {
#define MODEL(vocab_) "{'decoder':{'type':'ByteLevel'},'model':{'vocab':" vocab_ "}}"
    static const char *const bad[] = {
        "{'model': {'type': 'Unigram'}}",
        MODEL("{'a': -1}"),
        MODEL("{'a': 0.5}"),
        MODEL("{'a': 16777216}"),
        MODEL("{'a': 0, 'b': 0}"),
        "{'model':{'byte_fallback':true,'vocab':{'a':0}},'added_tokens':[{'id':0,'content':'b'}]}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Tokenizer t;
        REFUSED(EXIT_BAD_INPUT, "tokenizer.json", open_text(&t, bad[i], &err));
        CHECK(t.bytes == NULL && t.offset == NULL);
    }
}

// Where a template has none, and where it decides what else is written
TEST(a_system_message_is_in_the_first_question) {
    static const struct {
        ChatStyle style;
        const char *system, *end;  // of what is written
    } cases[] = {{CHAT_MISTRAL, NULL, "<s>[INST]q[/INST]"},
                 {CHAT_LLAMA_2, NULL, "<s>[INST] q [/INST]"},
                 {CHAT_LLAMA_2, "S", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nq [/INST]"},
                 {CHAT_MISTRAL, "S", "<s>[INST]S\n\nq[/INST]"},
                 {CHAT_SMOLLM3, "/no_think",
                  "trained by Hugging Face.\n\n<|im_start|>user\nq<|im_end|>\n"
                  "<|im_start|>assistant\n<think>\n\n</think>\n"}};
    for (int i = 0; i < 5; i++) {
        const ChatTemplate t = {.style = cases[i].style, .bos = "<s>", .end = "<|im_end|>"};
        Parts p = {0};
        chat_ask(&t, cases[i].system, "q", true, false, &p);
        CHECK_MSG(path_ends_with((char *)p.bytes, cases[i].end), "%s", (char *)p.bytes);
        parts_free(&p);
    }
}

TEST_MAIN()
