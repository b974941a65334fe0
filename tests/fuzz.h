// Damaged texts for parsers: cut anywhere, with any bit flipped, with words replaced at random.
#ifndef UNPAD_FUZZ_H
#define UNPAD_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "test.h"

// Replaces up to 12 of the n bytes by a word, by a random byte or by nothing; returns the new n, at
// most `capacity` and at least 1.
static inline size_t fuzz_mutate(char *text, size_t n, size_t capacity) {
    static const char *const words[] = {"null",       "true",
                                        "1e999",      "1e-400",
                                        "-1",         "0",
                                        "[",          "]",
                                        "{",          "}",
                                        ",",          ":",
                                        "\"",         "\xff",
                                        "BF16",       "\\u0000",
                                        "[0,0]",      "24",
                                        "../",        "9007199254740993",
                                        "4294967296", "18446744073709551615"};
    const char random = (char)test_rng_u32(), *word = &random;
    const size_t at = test_rng_below((uint32_t)n), kind = test_rng_below(4);
    size_t length = kind == 0, over = kind == 0 ? 1 : test_rng_below(kind == 1 ? 20 : 12);
    if (kind > 1) word = words[test_rng_below(sizeof words / sizeof *words)];
    if (kind > 1) length = strlen(word);
    if (kind == 3) over = 0;
    if (over > n - at) over = n - at;
    if (n + length - over > capacity) return n;
    memmove(text + at + length, text + at + over, n - at - over);
    memcpy(text + at, word, length);
    n = n + length - over;
    return n ? n : 1;
}

// Parses n bytes, checks what is promised of an accepted text, and returns whether it was accepted.
typedef bool (*FuzzTry)(const char *text, size_t n);

// The whole text is accepted and no prefix of it; every text with a flipped bit, and `rounds` with
// more damage, are tried. Returns how many of those were accepted.
static inline int fuzz_text(const char *whole, size_t n, FuzzTry accepts, int rounds) {
    static char text[1 << 14];
    int accepted = 0;
    CHECK(n < sizeof text / 2 && accepts(whole, n));
    for (size_t i = 0; i < n; i++)
        CHECK_MSG(!accepts(whole, i), "%zu bytes of %zu are accepted", i, n);
    memcpy(text, whole, n);
    for (size_t bit = 0; bit < 8 * n; bit++) {
        text[bit / 8] ^= (char)(1 << bit % 8);
        accepted += accepts(text, n);
        text[bit / 8] ^= (char)(1 << bit % 8);
    }
    for (int i = 0; i < rounds; i++) {
        size_t length = n;
        memcpy(text, whole, n);
        for (uint32_t k = 1 + test_rng_below(3); k > 0; k--)
            length = fuzz_mutate(text, length, sizeof text);
        accepted += accepts(text, length);
    }
    return accepted;
}

#endif
