#include "benchmark.h"

#include <math.h>
#include <string.h>
#include <unistr.h>

#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "evaluate.h"

// ---- Questions ----------------------------------------------------------------------------------

// Appends the ids of text (n) after `begin`, which is not repeated where the text has it; -1: none.
// Returns how many they are, the last of all.
static int64_t append_ids(Benchmark *b, int32_t begin, const char *text, size_t n, Error *err) {
    size_t first, end;
    bpe_ids(b->encoder, &first);
    if (begin >= 0) bpe_add_id(b->encoder, begin);
    bpe_encode(b->encoder, (const unsigned char *)text, n, err);
    const int32_t *ids = bpe_ids(b->encoder, &end);
    return (int64_t)(end - first) - (begin >= 0 && end - first > 1 && ids[first + 1] == begin);
}

// Its document: the ids of the context alone, even where a token straddles the border, and those
// of the whole text that are more. Given tokens have no targets.
static bool add_choice(Benchmark *b, BenchmarkChoice c, const char *context, const char *delimiter,
                       const char *choice, Error *err) {
    const Tokenizer *t = &b->tokenizer;
    size_t start, middle, end;
    const size_t n = utf8_strip(context, &start), before = b->num_tokens;
    const int32_t alone = t->bos >= 0 ? t->bos : t->eos, begin = t->adds_bos || n == 0 ? alone : -1;
    const int64_t most = b->o->max_seqlen;
    const size_t size = strlen(context) + strlen(delimiter) + strlen(choice) + 1;
    AUTO_FREE char *text = host_calloc(size, 1, "a choice");
    snprintf(text, size, "%s%s%s", context, delimiter, choice);
    bpe_clear(b->encoder);
    int64_t given = append_ids(b, begin, context, n, err);
    bpe_ids(b->encoder, &middle);
    const int64_t scored = append_ids(b, begin, text, strlen(text), err) - given;
    const int32_t *ids = bpe_ids(b->encoder, &end);
    if (err->code) return false;
    if (given == 0 || scored < 1 || scored > most || !*choice)
        return error_set(err, EXIT_BAD_INPUT, "check the text; --max-seqlen admits longer choices",
                         "expected a context, and a choice of 1 to %ld tokens; found %ld and %ld",
                         most, given, *choice ? scored : 0);
    b->num_cut += given + scored - 1 > most;
    if (given + scored - 1 > most) given = most + 1 - scored;
    const size_t room = before + (size_t)(given + scored);
    array_grow(b->tokens, &b->token_capacity, room, "choices");
    array_grow(b->targets, &b->target_capacity, room, "choices");
    memcpy(b->tokens + before, ids + middle - given, (size_t)given * sizeof *ids);
    memcpy(b->tokens + before + given, ids + end - scored, (size_t)scored * sizeof *ids);
    for (int64_t i = 0; i < given + scored - 1; i++, b->num_tokens++)
        b->targets[b->num_tokens] = i < given - 1 ? -1 : b->tokens[b->num_tokens + 1];
    c.rows = (int32_t)(given + scored - 1);
    c.bytes = (int32_t)strlen(choice);
    c.characters = (int32_t)u8_mbsnlen((const uint8_t *)choice, strlen(choice));
    array_grow(b->choices, &b->capacity, b->num_choices + 1, "choices");
    b->choices[b->num_choices++] = c;
    return true;
}

static bool add_question(Benchmark *b, BenchmarkChoice c, const json_t *record, Error *err) {
    const json_t *contexts = json_object_get(record, "context"), *context = contexts, *choice,
                 *choices = json_object_get(record, "choices");
    const int n = (int)json_array_size(choices);
    const char *delimiter = " ";
    size_t i;
    if (n < 2)
        return bad_input(err, "choices: expected an array of two or more, found %d items", n);
    if (!json_get_int(record, "answer", 0, n - 1, &c.answer, true, err) ||
        !json_get_string(record, "delimiter", &delimiter, false, err))
        return false;
    json_array_foreach(choices, i, choice) {
        if (json_is_array(contexts)) context = json_array_get(contexts, i);
        if (!json_is_string(choice) || !json_is_string(context))
            return bad_input(err, "choice %zu: expected strings as context and choice", i);
        if (!add_choice(b, c, json_string_value(context), delimiter, json_string_value(choice),
                        err))
            return false;
    }
    return true;
}

static bool read_file(Benchmark *b, size_t file, Error *err) {
    const char *path = b->files.items[file].path;
    const size_t before = b->num_choices;
    char where[IO_PATH_MAX + 24];
    AUTO_FREE char *text = file_read_all(path, 1 << 30, NULL, "give several files", err);
    char *rest = text ? text + mark_bytes(text) : NULL;
    for (int64_t line = 1; rest && err->code == 0; line++) {
        const char *start = strsep(&rest, "\n");
        if (start[strspn(start, " \t\r")] == 0) continue;
        snprintf(where, sizeof where, "%s:%ld", path, line);
        json_auto_t *record = json_parse(start, strlen(start), where, err);
        const BenchmarkChoice c = {.file = file, .line = line};
        if (record && !add_question(b, c, record, err)) error_prefix(err, where);
    }
    return err->code == 0 &&
           (b->num_choices > before || bad_input(err, "%s: expected questions, found none", path));
}

bool benchmark_open(Benchmark *b, const Options *o, const char *tokenizer, int32_t vocab_size,
                    Error *err) {
    const Search search = {path_list_add_dir, "*.jsonl", "files of questions", ""};
    *b = (Benchmark){.o = o};
    if (!tokenizer_open(&b->tokenizer, tokenizer, err)) return false;
    if (b->tokenizer.vocab_size > vocab_size)
        return error_set(err, EXIT_CHECKPOINT_MISFIT, "use the tokenizer of the model",
                         "%s: expected at most %d ids, found %d", b->tokenizer.file, vocab_size,
                         b->tokenizer.vocab_size);
    *err = b->tokenizer.why_not;
    if (err->code) return false;
    b->encoder = bpe_encoder_open(&b->tokenizer);
    bool ok = path_list_expand(&b->files, o->bench, &search, err);
    for (size_t i = 0; ok && i < b->files.n; i++) ok = read_file(b, i, err);
    if (!ok && err->code == EXIT_BAD_INPUT)
        text_copy(err->hint, sizeof err->hint,
                  "data/prepare.py --bench NAME --out FILE.jsonl makes a file of lines "
                  "{\"context\": \"...\", \"choices\": [\"...\", \"...\"], \"answer\": 0}");
    if (!ok) return false;
    b->log_likelihoods = host_calloc(b->num_choices, sizeof(double), "choices");
    b->fingerprint = fnv1a(fnv1a(FNV1A_START, b->tokens, b->num_tokens * sizeof(int32_t)),
                           b->targets, b->num_tokens * sizeof(int32_t));
    printf("bench   %s: %zu choices\n", o->bench, b->num_choices);
    if (b->num_cut > 0)
        warning("%s: the context of %zu of %zu choices is cut from the left: --max-seqlen is %d",
                o->bench, b->num_cut, b->num_choices, o->max_seqlen);
    return true;
}

// ---- Scores -------------------------------------------------------------------------------------

// Sets log_likelihoods, to the same bits on any number of ranks.
static void score(Benchmark *b, ModelFace model) {
    Scorer s;
    size_t first = 0;  // token of the choice
    memset(b->log_likelihoods, 0, b->num_choices * sizeof(double));
    scorer_open(&s, b->o, model);
    for (size_t i = 0; i < b->num_choices; first += (size_t)b->choices[i++].rows) {
        const int32_t rows = b->choices[i].rows;
        DocView *doc = scorer_next(&s, rows, &b->log_likelihoods[i]);
        if (doc) *doc = (DocView){b->tokens + first, rows, -1, b->targets + first, NULL, 0};
        if (doc == s.docs && model.rank == 0)
            line_show(stderr, "bench: %zu of %zu choices", i, b->num_choices);
    }
    scorer_close(&s, b->log_likelihoods, b->num_choices);
    line_erase(stderr);
    for (size_t i = 0; i < b->num_choices; i++) b->log_likelihoods[i] = 0 - b->log_likelihoods[i];
}

// The results of a file
typedef struct {
    double questions, right[2], nats, bytes;  // right: by acc, by acc_norm; of right choices
} Tally;

// Adds the question whose first choice is `from`; returns the first choice of the next one.
static size_t tally_question(const Benchmark *b, size_t from, Tally *t, bool prints) {
    const BenchmarkChoice *q = &b->choices[from];
    const double *sums = b->log_likelihoods;
    const size_t answer = from + (size_t)q->answer;
    size_t best[2] = {from, from}, i = from;
    if (prints) printf("%s:%ld | answer %d", b->files.items[q->file].path, q->line, q->answer);
    for (; i < b->num_choices && b->choices[i].line == q->line && b->choices[i].file == q->file;
         i++) {
        const BenchmarkChoice *c = &b->choices[i], *ahead = &b->choices[best[1]];
        if (sums[i] > sums[best[0]]) best[0] = i;
        if (sums[i] / c->characters > sums[best[1]] / ahead->characters) best[1] = i;
        if (prints) printf(" | %.6f, a byte %.6f", sums[i], sums[i] / c->bytes);
    }
    if (prints) printf("\n");
    t->questions++;
    t->right[0] += best[0] == answer;
    t->right[1] += best[1] == answer;
    t->nats -= sums[answer];
    t->bytes += b->choices[answer].bytes;
    return i;
}

static void report_file(const char *path, const Tally *t, int64_t step, RunLog *log) {
    const double n = t->questions, bits = t->nats / t->bytes * M_LOG2E;
    double acc[2], error[2];
    for (int norm = 0; norm < 2; norm++) {
        acc[norm] = t->right[norm] / n;
        error[norm] = n > 1 ? sqrt(acc[norm] * (1 - acc[norm]) / (n - 1)) : NAN;
    }
    printf("bench");
    if (step >= 0) printf(" after step %ld", step);
    printf(" | %s | acc %.4f +- %.4f | acc_norm %.4f +- %.4f | %.0f questions | %.4f bits/byte\n",
           path, acc[0], error[0], acc[1], error[1], n, bits);
    log_write(log, json_pack("{s:s, s:I, s:o, s:I, s:o, s:o, s:o, s:o, s:o}", "event", "bench",
                             "step", step, "file", json_text(path), "questions", (int64_t)n, "acc",
                             json_float(acc[0]), "acc_stderr", json_float(error[0]), "acc_norm",
                             json_float(acc[1]), "acc_norm_stderr", json_float(error[1]),
                             "bits_per_byte", json_float(bits)));
}

void benchmark_score(Benchmark *b, ModelFace model, int64_t step, RunLog *log) {
    const bool prints = step < 0 && b->o->log_every > 0;
    score(b, model);
    for (size_t i = 0, file = 0; file < b->files.n; file++) {
        Tally t = {0};
        while (i < b->num_choices && b->choices[i].file == file)
            i = tally_question(b, i, &t, prints);
        report_file(b->files.items[file].path, &t, step, log);
    }
}
