// Decoding of tokenizer.json, the byte tokenizer, and what is refused.
#include "../data/tokenizer.h"
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

TEST(ends_come_from_the_config) {
    Tokenizer t;
    Error err;
    const char *config = "{\"bos_token\": null, \"eos_token\": {\"content\": \"hello\"}}";
    save("tokenizer_config.json", config, strlen(config));
    CHECK_MSG(open_text(&t, GPT2, &err), "%s", err.what);
    CHECK(t.eos == 1);
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

TEST(byte_tokenizer_goes_both_ways) {
    Tokenizer t;
    Error err = {0};
    int32_t ids[300];
    char text[256];
    tokenizer_byte(&t);
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

TEST(bpe_with_merges_does_not_encode) {
    Tokenizer t;
    Error err;
    int32_t ids[8];
    CHECK(open_text(&t, GPT2, &err));
    CHECK(tokenizer_encode(&t, "a", 1, ids, 8, &err) == -1 && err.code == EXIT_USAGE);
    tokenizer_free(&t);
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
