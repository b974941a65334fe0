// Decoding of tokenizer.json, encoding of prompts, the byte tokenizer, and what is refused.
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/base/error.h"
#include "../data/base/file.h"
#include "../data/base/json.h"
#include "../data/base/path.h"
#include "../data/models/tokenizer.h"
#include "scratch.h"
#include "test.h"

static void save(const char *name, const char *text, size_t n) {
    FILE *f = fopen(scratch(name), "wb");
    CHECK(f && fwrite(text, 1, n, f) == n && fclose(f) == 0);
}

static bool open_text(Tokenizer *t, const char *text, Error *err) {
    memset(err, 0, sizeof *err);
    save("tokenizer.json", text, strlen(text));
    return tokenizer_open(t, scratch("."), err);
}

static bool decodes(const Tokenizer *t, int32_t id, const char *expected) {
    size_t n = 0;
    const unsigned char *bytes = tokenizer_bytes(t, id, &n);
    return n == strlen(expected) && memcmp(bytes, expected, n) == 0;
}

// Out of order, with a hole at 6, an id in both lists, a token outside the alphabet.
static const char GPT2[] =
    "{\"added_tokens\": [{\"id\": 7, \"content\": \"<|endoftext|>\", \"special\": true},"
    " {\"id\": 2, \"content\": \"\xc4\xa0\", \"special\": false}],"
    " \"decoder\": {\"type\": \"Sequence\", \"decoders\": [{\"type\": \"ByteLevel\"}]},"
    " \"model\": {\"type\": \"BPE\", \"vocab\": {\"hello\": 1, \"!\": 0, \"\xc4\xa0world\": 3,"
    " \"\xc3\xa2\xc4\xa4\xc2\xac\": 4, \"\xe2\x82\xac\": 5, \"\xc4\xa0\": 2, \"\xc4\x8a\xc5\x83\": "
    "8},"
    " \"merges\": [\"h e\"]}}";

TEST(byte_level_tokens_decode) {
    Tokenizer t;
    Error err;
    CHECK_MSG(open_text(&t, GPT2, &err), "%s", err.what);
    CHECK(t.vocab_size == 9 && !t.byte_ids);
    CHECK(decodes(&t, 0, "!") && decodes(&t, 1, "hello") && decodes(&t, 3, " world"));
    CHECK(
        decodes(&t, 4, "\xe2\x82\xac"));  // three characters of the alphabet: the bytes of one euro
    CHECK(decodes(&t, 5, "\xe2\x82\xac"));  // not in the alphabet: as written
    CHECK(decodes(&t, 8, "\n\xad"));
    CHECK(decodes(&t, 2, "\xc4\xa0"));  // added tokens stand for themselves
    CHECK(decodes(&t, 6, "") && decodes(&t, 9, "") && decodes(&t, -1, ""));
    CHECK(decodes(&t, 7, "<|endoftext|>") && t.special[7] && !t.special[2]);
    CHECK(t.bos == 7 && t.eos == 7);
    tokenizer_free(&t);
}

TEST(bos_and_eos_come_from_the_config) {
    Tokenizer t;
    Error err;
    const char *config = "{\"bos_token\": null, \"eos_token\": {\"content\": \"hello\"}}";
    save("tokenizer_config.json", config, strlen(config));
    CHECK_MSG(open_text(&t, GPT2, &err), "%s", err.what);
    CHECK(t.eos == 1 && t.bos == -1);
    tokenizer_free(&t);
    save("tokenizer_config.json", "{", 1);
    CHECK(!open_text(&t, GPT2, &err) && err.code == EXIT_BAD_INPUT);
    CHECK(unlink(scratch("tokenizer_config.json")) == 0);
}

TEST(byte_fallback_tokens_decode) {
    Tokenizer t;
    Error err;
    CHECK_MSG(
        open_text(
            &t,
            "{\"model\": {\"type\": \"BPE\", \"byte_fallback\": true, \"vocab\": {\"<unk>\": 0,"
            " \"<s>\": 1, \"</s>\": 2, \"<0x0A>\": 3, \"<0xFF>\": 4, \"\xe2\x96\x81the\": 5,"
            " \"<0x0A>x\": 6, \"\xc3\xa9\": 7}}}",
            &err),
        "%s", err.what);
    CHECK(decodes(&t, 3, "\n") && decodes(&t, 4, "\xff") && decodes(&t, 5, " the"));
    CHECK(decodes(&t, 6, "<0x0A>x") && decodes(&t, 7, "\xc3\xa9"));
    CHECK(t.bos == 1 && t.eos == 2);
    tokenizer_free(&t);
}

TEST(alphabet_is_a_bijection) {
    int16_t code_points[256];
    bool seen[512] = {false};
    gpt2_alphabet(code_points);
    for (int byte = 0; byte < 256; byte++) {
        CHECK(code_points[byte] >= 33 && code_points[byte] < 324 && !seen[code_points[byte]]);
        seen[code_points[byte]] = true;
    }
    CHECK(code_points['a'] == 'a' && code_points[' '] == 0x120 && code_points['\n'] == 0x10a);
    CHECK(code_points[0] == 0x100 && code_points[0xad] == 0x143 && code_points[0xff] == 0xff);
}

// tokenizer.json of data/prepare.py's byte tokenizer: id = byte, BOS 256, EOS 257
static void byte_tokenizer(char *text, size_t capacity) {
    int16_t code_points[256];
    size_t n = (size_t)snprintf(text, capacity,
                                "{\"added_tokens\": [{\"id\": 256, \"content\": \"<|bos|>\", "
                                "\"special\": true}, {\"id\": 257, \"content\": \"<|eos|>\", "
                                "\"special\": true}], \"decoder\": {\"type\": \"ByteLevel\"}, "
                                "\"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {");
    gpt2_alphabet(code_points);
    for (int byte = 0; byte < 256; byte++)
        n += (size_t)snprintf(text + n, capacity - n, "%s\"\\u%04x\": %d", byte ? ", " : "",
                              (unsigned)code_points[byte], byte);
    n += (size_t)snprintf(text + n, capacity - n, "}}}");
    CHECK(n < capacity);
}

TEST(byte_tokenizer_goes_both_ways) {
    Tokenizer t;
    Error err = {0};
    int32_t ids[300];
    char text[256], json[8192];
    byte_tokenizer(json, sizeof json);
    CHECK_MSG(open_text(&t, json, &err), "%s", err.what);
    CHECK(t.vocab_size == 258 && t.bos == 256 && t.eos == 257 && t.byte_ids);
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    CHECK(tokenizer_encode(&t, text, 256, ids, 257, &err) == 257 && ids[0] == 256);
    for (int i = 0; i < 256; i++) {
        size_t n = 0;
        CHECK(ids[i + 1] == i && tokenizer_bytes(&t, i, &n)[0] == i && n == 1);
    }
    CHECK(decodes(&t, 256, "<|bos|>") && decodes(&t, 257, "<|eos|>"));
    CHECK(t.special[256] && t.special[257] && !t.special[255]);
    CHECK(tokenizer_encode(&t, text, 0, ids, 1, &err) == 1);
    CHECK(tokenizer_encode(&t, text, 256, ids, 256, &err) == -1 && err.code == EXIT_USAGE);
    memset(&err, 0, sizeof err);
    CHECK(tokenizer_encode(&t, text, 0, ids, 0, &err) == -1);
    tokenizer_free(&t);
}

// ------------------------------------------------------------------------------------------------
// BPE: as Hugging Face encodes the same texts (dev/reference/make_tokenizer_golden.py)

enum { ROOM = 4096 };

static void check_case(const Tokenizer *t, const json_t *item) {
    static int32_t ids[ROOM];
    Error err = {0};
    const char *text = json_string_value(json_member(item, "text"));
    int64_t n = tokenizer_encode(t, text, strlen(text), ids, ROOM, &err);
    const json_t *expected = json_member(item, "ids");
    CHECK_MSG(n >= 0, "%s", err.what);
    CHECK_MSG(json_array_size(expected) == (size_t)n, "'%s': %lld ids", text, (long long)n);
    for (int64_t i = 0; i < n; i++)
        CHECK_MSG(ids[i] == json_number_value(json_array_get(expected, (size_t)i)),
                  "'%s': id %lld is %d", text, (long long)i, ids[i]);
}

static void check_golden(const char *dir) {
    Tokenizer t;
    Error err = {0};
    char path[IO_PATH_MAX];
    const json_t *item;
    size_t i;
    CHECK_MSG(tokenizer_open(&t, dir, &err), "%s", err.what);
    CHECK(path_join(path, sizeof path, dir, "cases.json", &err));
    json_t *cases = json_read(path, TOKENIZER_MAX_BYTES, "", &err);
    CHECK_MSG(cases != NULL, "%s", err.what);
    json_array_foreach(cases, i, item) check_case(&t, item);
    CHECK(i > 20);
    json_decref(cases);
    tokenizer_free(&t);
}

TEST(bpe_cut_as_smollm2_encodes_as_hugging_face) {
    check_golden("tests/golden/tokenizers/smollm2");
}
TEST(bpe_cut_as_llama3_encodes_as_hugging_face) { check_golden("tests/golden/tokenizers/llama3"); }
TEST(bpe_normalized_as_qwen_encodes_as_hugging_face) {
    check_golden("tests/golden/tokenizers/qwen");
}

static void text_replace(char *text, size_t capacity, const char *from, const char *to) {
    char *at = strstr(text, from);
    const size_t tail = at ? strlen(at + strlen(from)) + 1 : 0;
    CHECK_MSG(at && strlen(text) + strlen(to) < capacity, "'%s' not found", from);
    memmove(at + strlen(to), at + strlen(from), tail);
    memcpy(at, to, strlen(to));
}

// As transformers writes it from a GGUF file: a normalizer without effect and a byte fallback that
// is never used, since every byte has a token.
TEST(keys_without_effect_do_not_change_the_ids) {
    static const char *const empty[] = {
        "\"normalizer\": {\"type\": \"Sequence\", \"normalizers\": []}",
        "\"normalizer\": {\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"Sequence\","
        " \"normalizers\": []}]}"};
    const char *dir = "tests/golden/tokenizers/smollm2";
    static char text[1 << 20];
    char path[IO_PATH_MAX];
    Error err = {0};
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++) {
        Tokenizer t;
        const json_t *item;
        size_t k;
        uint64_t n = 0;
        CHECK(path_join(path, sizeof path, dir, "tokenizer.json", &err));
        char *golden = file_read_all(path, sizeof text / 2, &n, "", &err);
        CHECK_MSG(golden != NULL, "%s", err.what);
        memcpy(text, golden, n + 1);
        free(golden);
        text_replace(text, sizeof text, "\"normalizer\":null", empty[i]);
        text_replace(text, sizeof text, "\"byte_fallback\":false", "\"byte_fallback\":true");
        CHECK_MSG(open_text(&t, text, &err), "%s", err.what);
        CHECK(path_join(path, sizeof path, dir, "cases.json", &err));
        json_t *cases = json_read(path, TOKENIZER_MAX_BYTES, "", &err);
        CHECK_MSG(cases != NULL, "%s", err.what);
        json_array_foreach(cases, k, item) check_case(&t, item);
        json_decref(cases);
        tokenizer_free(&t);
    }
}

// Five tokens and two merges; `pre` and `more` go into pre_tokenizer and model.
static void small_bpe(char *text, size_t capacity, const char *pre, const char *more) {
    snprintf(
        text, capacity,
        "{\"added_tokens\": [{\"id\": 5, \"content\": \"<s>\", \"special\": true,"
        " \"normalized\": true}],"
        " \"pre_tokenizer\": %s, \"decoder\": {\"type\": \"ByteLevel\"},"
        " \"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2, \"aba\": 3,"
        " \"\xc4\xa0\": 4}, \"merges\": [\"a b\", [\"ab\", \"a\"]]%s}}",
        pre, more);
}

static bool open_small_bpe(Tokenizer *t, const char *pre, const char *more, Error *err) {
    char text[1024];
    small_bpe(text, sizeof text, pre, more);
    return open_text(t, text, err);
}

static const char BYTE_LEVEL[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}";

TEST(bpe_merges_by_rank_and_starts_with_bos) {
    Tokenizer t;
    Error err;
    int32_t ids[8];
    const int32_t expected[] = {3, 2, 4, 1, 5, 0};
    CHECK_MSG(open_small_bpe(&t, BYTE_LEVEL, "", &err), "%s", err.what);
    t.bos = -1;
    CHECK(tokenizer_encode(&t, "abaab b<s>a", 11, ids, 8, &err) == 6);
    CHECK(memcmp(ids, expected, sizeof expected) == 0);
    // a byte without a token leaves nothing, and its neighbours merge: SmolLM2 has none for 4
    CHECK(tokenizer_encode(&t, "acb cc", 6, ids, 8, &err) == 2 && ids[0] == 2 && ids[1] == 4);
    t.bos = 5;
    CHECK(tokenizer_encode(&t, "ab", 2, ids, 8, &err) == 2 && ids[0] == 5 && ids[1] == 2);
    t.eos = 5;  // it ends documents, and they do not begin with it
    CHECK(tokenizer_encode(&t, "ab", 2, ids, 8, &err) == 1 && ids[0] == 2);
    CHECK(tokenizer_encode(&t, "abab", 4, ids, 1, &err) == -1 && err.code == EXIT_USAGE);
    tokenizer_free(&t);
}

static void check_refused(const char *pre, const char *more, const char *text, const char *why) {
    Tokenizer t;
    Error err;
    int32_t ids[8];
    CHECK_MSG(open_small_bpe(&t, pre, more, &err), "%s", err.what);
    CHECK(tokenizer_encode(&t, text, strlen(text), ids, 8, &err) == -1);
    CHECK_MSG((err.code == EXIT_USAGE || err.code == EXIT_BAD_INPUT) && strstr(err.what, why), "%s",
              err.what);
    tokenizer_free(&t);
}

static void check_normalizer_refused(const char *normalizer, const char *why) {
    Tokenizer t;
    Error err;
    int32_t ids[8];
    char text[1024], with[2048];
    small_bpe(text, sizeof text, BYTE_LEVEL, "");
    snprintf(with, sizeof with, "{\"normalizer\": %s, %s", normalizer, text + 1);
    CHECK_MSG(open_text(&t, with, &err), "%s", err.what);
    CHECK(tokenizer_encode(&t, "a", 1, ids, 8, &err) == -1 && err.code == EXIT_USAGE);
    CHECK_MSG(strstr(err.what, why), "%s", err.what);
    tokenizer_free(&t);
}

TEST(keys_that_change_the_ids_are_named) {
    check_normalizer_refused("{\"type\": \"NFKC\"}", "a normalizer (NFKC)");
    check_normalizer_refused(
        "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}, {\"type\": \"Strip\"}]}",
        "a normalizer (Strip)");
    check_normalizer_refused("{\"type\": \"NFC\"}", "NFC and normalized added tokens");
    check_normalizer_refused(
        "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"Sequence\","
        " \"normalizers\": []}, {\"type\": \"Lowercase\"}]}",
        "a normalizer (Lowercase)");
    check_normalizer_refused("{\"type\": \"Sequence\"}", "a normalizer (Sequence)");
    check_normalizer_refused("[1]", "a normalizer");
    check_refused(BYTE_LEVEL, ", \"byte_fallback\": true", "a",
                  "byte_fallback and no token for byte 0");
    check_refused(BYTE_LEVEL, ", \"unk_token\": \"a\"", "a", "unk_token and no token for byte 0");
}

TEST(bpe_refuses_unknown_features) {
    check_refused(BYTE_LEVEL, "", "a\xff", "expected UTF-8, found byte 0xff at 1");
    check_refused(BYTE_LEVEL, ", \"dropout\": 0.1", "a", "dropout");
    check_refused(BYTE_LEVEL, ", \"end_of_word_suffix\": \"</w>\"", "a", "end_of_word_suffix");
    check_refused("{\"type\": \"ByteLevel\", \"add_prefix_space\": true}", "", "a", "prefix_space");
    check_refused("null", "", "a", "no ByteLevel");
#define SEQUENCE(first_) \
    "{\"type\": \"Sequence\", \"pretokenizers\": [" first_ ", {\"type\": \"ByteLevel\"}]}"
    check_refused(SEQUENCE("{\"type\": \"Metaspace\"}"), "", "a", "unknown pre_tokenizer");
#define SPLIT(pattern_, behavior_)                                                         \
    SEQUENCE("{\"type\": \"Split\", \"pattern\": " pattern_ ", \"behavior\": \"" behavior_ \
             "\", \"invert\": false}")
    check_refused(SPLIT("{\"Regex\": \"a\"}", "Removed"), "", "a", "Split other than Isolated");
    check_refused(SPLIT("{\"String\": \"a\"}", "Isolated"), "", "a", "without a Regex");
    check_refused(SPLIT("{\"Regex\": \"(\"}", "Isolated"), "", "a", "is wrong at 1");
    check_refused(SPLIT("{\"Regex\": \"x*\"}", "Isolated"), "", "a", "matches nothing");
}

// As Python decodes with errors="replace"
TEST(bad_utf8_is_replaced_as_python_does) {
#define R "\xef\xbf\xbd"
    static const char *const cases[][2] = {
        {"plain", "plain"},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82"},
        {"a\xff z\x80", "a" R " z" R},
        {"\xc3", R},
        {"\xc3(", R "("},
        {"\xe2\x82", R},
        {"\xe2\x82\xe2\x82\xac", R "\xe2\x82\xac"},
        {"\xf0\x9f\x99x", R "x"},
        {"\xf0\x9f\xff", R R},
        {"\xed\xa0\x80", R R R},  // half a surrogate pair
        {"\xe0\x80\x80", R R R},  // overlong
        {"\xf4\x90\x80\x80", R R R R},
        {"\xc0\xaf", R R},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned char out[64];
        const unsigned char *in = (const unsigned char *)cases[i][0];
        const size_t n = strlen(cases[i][0]), size = utf8_replace(in, n, out);
        CHECK_MSG(size == strlen(cases[i][1]) && memcmp(out, cases[i][1], size) == 0, "case %zu",
                  i);
        CHECK(utf8_is_valid(in, n) == (strcmp(cases[i][0], cases[i][1]) == 0));
        CHECK(utf8_is_valid(out, size));
    }
}

// The Mongolian vowel separator, U+180E, is no white space, as in tokenizers and unlike in PCRE2.
TEST(white_space_is_unicodes) {
    Tokenizer t;
    Error err = {0};
    int32_t ids[8];
    const int32_t expected[] = {0, 1, 4};  // one word, e1 a0 8e 21, of which the last two merge
    CHECK_MSG(
        open_text(&t,
                  "{\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false},"
                  " \"model\": {\"type\": \"BPE\", \"vocab\": {\"\xc3\xa1\": 0,"
                  " \"\xc5\x82\": 1, \"\xc4\xb0\": 2, \"!\": 3, \"\xc4\xb0!\": 4},"
                  " \"merges\": [\"\xc4\xb0 !\"]}}",
                  &err),
        "%s", err.what);
    CHECK(tokenizer_encode(&t, "\xe1\xa0\x8e!", 4, ids, 8, &err) == 3);
    CHECK(memcmp(ids, expected, sizeof expected) == 0);
    tokenizer_free(&t);
}

// For any file, encoding terminates with ids of the vocabulary or an error.
TEST(bpe_survives_random_damage) {
    int encoded = 0;
    for (int round = 0; round < 2000; round++) {
        Tokenizer t;
        Error err = {0};
        int32_t ids[64];
        char text[1024];
        small_bpe(text, sizeof text, BYTE_LEVEL, "");
        for (uint32_t n = test_rng_below(3); n > 0; n--)
            text[test_rng_below((uint32_t)strlen(text))] = "\"{}[]:,09e-x\xc3"[test_rng_below(13)];
        if (!open_text(&t, text, &err)) continue;
        int64_t n = tokenizer_encode(&t, "abaab b<s>a", 11, ids, 64, &err);
        for (int64_t i = 0; i < n; i++) CHECK(ids[i] >= 0 && ids[i] < t.vocab_size);
        CHECK((n < 0) == (err.code != 0));
        encoded += n >= 0;
        tokenizer_free(&t);
    }
    CHECK_MSG(encoded > 600, "%d", encoded);  // a third stays undamaged
}

TEST(wrong_files_are_refused) {
#define MODEL(vocab_) "{\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":" vocab_ "}}"
    static const char *const bad[] = {
        "",
        "[]",
        "{}",
        "{\"model\": 3}",
        "{\"model\": {\"type\": \"Unigram\"}}",
        "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}}}",  // neither kind
        MODEL("{}"),
        MODEL("[]"),
        MODEL("{\"a\": -1}"),
        MODEL("{\"a\": 0.5}"),
        MODEL("{\"a\": 1e400}"),
        MODEL("{\"a\": 16777216}"),
        MODEL("{\"a\": \"0\"}"),
        MODEL("{\"a\": 0, \"b\": 0}"),
        "{\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":{\"a\":0}},\"added_tokens\":[{"
        "\"id\":1}]}",
        "{\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":{\"a\":0}},\"added_tokens\":[{"
        "\"content\":"
        "\"b\"}]}",
        "{\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":{\"a\":0}},\"added_tokens\":[{"
        "\"id\":0,"
        "\"content\":\"b\"}]}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Tokenizer t;
        Error err;
        CHECK_MSG(!open_text(&t, bad[i], &err), "%s", bad[i]);
        CHECK_MSG(err.code == EXIT_BAD_INPUT && strstr(err.what, "tokenizer.json"), "%s", err.what);
        CHECK(t.bytes == NULL && t.offset == NULL);
    }
}

TEST(every_prefix_is_refused) {
    char text[sizeof GPT2];
    for (size_t n = 0; n < sizeof GPT2 - 1; n++) {
        Tokenizer t;
        Error err;
        memcpy(text, GPT2, n);
        text[n] = 0;
        CHECK_MSG(!open_text(&t, text, &err) && err.code == EXIT_BAD_INPUT, "%zu", n);
    }
}

TEST(random_damage_is_survived) {
    char text[sizeof GPT2];
    int opened = 0;
    for (int round = 0; round < 5000; round++) {
        Tokenizer t;
        Error err;
        memcpy(text, GPT2, sizeof text);
        for (uint32_t n = 1 + test_rng_below(3); n > 0; n--)
            text[test_rng_below(sizeof text - 1)] = "\"{}[]:,09e-x\xc3"[test_rng_below(13)];
        if (!open_text(&t, text, &err)) continue;
        opened++;
        size_t total = 0, n = 0;
        for (int32_t id = 0; id < t.vocab_size; id++) tokenizer_bytes(&t, id, &n), total += n;
        CHECK(total < sizeof text);
        tokenizer_free(&t);
    }
    CHECK_MSG(opened > 100, "%d", opened);
}

TEST_MAIN()
