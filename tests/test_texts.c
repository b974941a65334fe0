// Texts into shards while the file system fails, or the process dies, at every call in turn: all of
// the shards are there, or none. What is in them: tests/test_texts.sh.
#include "../data/models/chat.h"
#include "../data/shards/dataset.h"
#include "../data/texts/texts.h"
#include "fault.c"
#include "scratch.h"
#include "sweep.h"

static volatile sig_atomic_t no_signal;

static void put(const char *name, const char *text) { put_file(scratch(name), text, strlen(text)); }

// Three documents of 3, 4 and 9 + `more` bytes, the last one with a loss mask
static void make_texts(int more) {
    Error err = {0};
    char line[96];
    CHECK(dir_remove_tree(scratch("in"), &err) && dir_create_all(scratch("in"), &err));
    put("in/a.txt", "one");
    put("in/b.txt", "two!");
    snprintf(line, sizeof line, "{\"parts\": [[\"and \", false], [\"three%.*s\", true]]}\n\n", more,
             "!!!!!!!!!!");
    put("in/c.jsonl", line);
}

static bool convert(Error *err) {
    static char in[256], dir[256];
    static OutDir out;
    const char *spec = in;
    snprintf(in, sizeof in, "%s", scratch("in"));
    snprintf(dir, sizeof dir, "%s", scratch("out"));
    out = (OutDir){.path = dir};
    const Options o = {.threads = 1};
    const Texts t = {&o, "demo", 264, true, false, &out, &no_signal};
    const bool ok = texts_to_shards(&spec, "tokens", 0.01, &t, err);
    if (out.locked) dir_unlock(&out.lock);
    const bool made = ok && strcmp(spec, in) != 0;  // else it is refused as shards, later
    free((char *)spec);
    return made || (ok && bad_input(err, "no shards"));
}

// Tokens of the shards in the directory; -1: there is none. It is never there in part.
static int64_t tokens_there(void) {
    Dataset ds;
    Error err = {0};
    const DatasetOptions options = dataset_options();
    if (!path_exists(scratch("out/tokens"))) return -1;
    CHECK(path_exists(scratch("out/tokens/texts.key")));
    CHECK(path_exists(scratch("out/tokens/tokenizer.json")));
    CHECK_MSG(dataset_open(&ds, scratch("out/tokens"), &options, &err), "%s", err.what);
    const int64_t tokens = ds.num_tokens;
    CHECK(ds.num_docs == 3 && ds.masked);
    dataset_close(&ds);
    return tokens;
}

enum { OLD_TOKENS = 3 + 4 + 9 + 3 * 2, MORE = 5 };

// Shards of the old texts, and then new texts
static void start_again(void) {
    Error err = {0};
    CHECK(dir_remove_tree(scratch("out"), &err));
    make_texts(0);
    CHECK_MSG(convert(&err) && tokens_there() == OLD_TOKENS, "%s", err.what);
    make_texts(MORE);
}

static void check_after(const SweepCase *c) {
    Error err = {0};
    const int64_t tokens = tokens_there();
    CHECK_MSG(c->ok || !c->err->code || c->err->code == EXIT_DISK || c->err->code == EXIT_USAGE ||
                  c->err->code == EXIT_BAD_INPUT,
              "%s: code %d", c->where, c->err->code);
    CHECK_MSG(tokens == OLD_TOKENS + MORE || (!c->ok && (tokens == -1 || tokens == OLD_TOKENS)),
              "%s: %ld", c->where, tokens);
    CHECK_MSG(convert(&err), "%s: %s", c->where, err.what);
    CHECK_MSG(tokens_there() == OLD_TOKENS + MORE, "%s", c->where);
    CHECK(!path_exists(scratch("out/tokens.tmp")) && !path_exists(scratch("out/tokens.old")));
}

// Where a template has none, and where it decides what else is written
TEST(a_system_message_is_in_the_first_question) {
    static const struct {
        ChatStyle style;
        const char *system, *end;  // of what is written
    } cases[] = {{CHAT_MISTRAL, NULL, "<s>[INST]q[/INST]"},
                 {CHAT_MISTRAL, "S", "<s>[INST]S\n\nq[/INST]"},
                 {CHAT_SMOLLM3, "/no_think",
                  "trained by Hugging Face.\n\n<|im_start|>user\nq<|im_end|>\n"
                  "<|im_start|>assistant\n<think>\n\n</think>\n"}};
    for (int i = 0; i < 3; i++) {
        const ChatTemplate t = {.style = cases[i].style, .bos = "<s>", .end = "<|im_end|>"};
        Parts p = {0};
        chat_ask(&t, cases[i].system, "q", true, false, &p);
        CHECK_MSG(path_ends_with((char *)p.bytes, cases[i].end), "%s", (char *)p.bytes);
        parts_free(&p);
    }
}

TEST(what_cannot_be_looked_at_exists) {
    const int errors[] = {EACCES, EIO, ELOOP};
    for (int i = 0; i < 3; i++) {
        fault_arm(FAULT_IO, 1, errors[i], false);
        const bool exists = path_exists(scratch("nothing"));
        fault_disarm();
        CHECK(exists && !path_exists(scratch("nothing")));
    }
}

// One call fails; the disk is full from a call on; calls fall short; the process dies.
TEST(every_call_of_a_conversion_fails_in_turn) {
    static const int errors[] = {EIO, ENOSPC, FAULT_SHORT, FAULT_KILL};
    const Sweep s = {start_again, convert, check_after};
    for (int i = 0; i < 4; i++) CHECK(sweep(&s, FAULT_IO, errors[i], errors[i] == ENOSPC) > 60);
}

TEST_MAIN()
