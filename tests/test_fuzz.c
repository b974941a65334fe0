// Replays what fuzzing has found: the inputs of tests/golden/fuzz, which dev/fuzz/fuzz.py writes.
#include "test.h"

static char where[80];
#undef CHECK
#define CHECK(cond_) CHECK_MSG(cond_, "%s", where)
#include "../dev/fuzz/fuzz.c"

void __asan_on_error(void) { fprintf(stderr, "%s\n", where); }

// Replaces each \xNN of a line by its byte; returns how many bytes there are.
static size_t unpack(char *line) {
    char *out = line, digits[3] = "";
    for (const char *p = line; *p && *p != '\n'; p++) {
        const bool escape = p[0] == '\\';
        if (escape) memcpy(digits, p + 2, 2);
        *out++ = escape ? (char)strtol(digits, NULL, 16) : *p;
        p += escape ? 3 : 0;
    }
    return (size_t)(out - line);
}

TEST(inputs_of_fuzzing_are_survived) {
    char *line = NULL;
    size_t capacity = 0;
    for (int i = 0; i < NUM_TARGETS; i++) {
        const char *path = printed("tests/golden/fuzz/%s.txt", targets[i].name);
        FILE *file = fopen(path, "r");
        CHECK(file);
        int number = 1;
        for (; getline(&line, &capacity, file) > 0; number++) {
            snprintf(where, sizeof where, "%s:%d", path, number);
            const size_t n = unpack(line);
            unsigned char *input = memcpy(host_calloc(n, 1, "an input"), line, n);
            try_input(&targets[i], input, n);  // exactly as long as it is: a read beyond it is seen
            free(input);
        }
        CHECK(number > 10);
        fclose(file);
    }
    free(line);
}

TEST_MAIN()
