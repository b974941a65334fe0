#include "texts.h"

#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "../base/signals.h"
#include "../runs/checkpoint.h"
#include "../shards/shard_writer.h"
#include "../shards/sources.h"
#include "documents.h"

enum {
    UNITS_PER_THREAD = 16,
    FORMAT = 5,
    VAL_MIN_DOCS = 10,          // fewer are all trained
    MAX_ROUND_BYTES = 1 << 28,  // except for the last file: their tokens are in memory
};

typedef struct {
    const Texts *settings;
    const char *spec;
    OutDir *out;    // contains `dir`
    Checkpoint ck;  // of the shards and all with them
    Inputs in;
    Tokenizer tokenizer;
    UnitOptions options;
    Bpe *bpe;
    char dir[IO_PATH_MAX];
    char key[20];  // hash of the inputs and of everything that determines the shards
    ShardWriter train, val;
    Unit *units;  // (num_units) of a round
    int num_units;
    atomic_int next_unit;
    Findings found;
    bool again;  // they have been read before, and their faults reported
    double start_ms, shown_ms;
} Job;

// ---- The built-in tokenizer as Hugging Face's files: ids are bytes, BOS 256, EOS 257 ------------

// clang-format off
#define JSON(...) #__VA_ARGS__
static const char tokenizer_json[] = JSON(
    {"version": "1.0", "truncation": null, "padding": null, "added_tokens": [
        {"id": 256, "content": "<|bos|>", "single_word": false, "lstrip": false, "rstrip": false,
         "normalized": false, "special": true},
        {"id": 257, "content": "<|eos|>", "single_word": false, "lstrip": false, "rstrip": false,
         "normalized": false, "special": true}],
     "normalizer": null,
     "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": false},
     "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
                 {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [256], "tokens": ["<|bos|>"]}}},
     "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                 "use_regex": false},
     "model": {"type": "BPE", "dropout": null, "unk_token": null,
               "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
               "byte_fallback": false, "ignore_merges": false, "vocab": {}, "merges": []}});
static const char config_json[] = JSON(
    {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>",
     "clean_up_tokenization_spaces": false});
// clang-format on

// The text of tokenizer.json, in memory the caller frees.
static char *byte_tokenizer_json(void) {
    json_t *root = json_loads(tokenizer_json, 0, NULL);
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    for (int i = 0; i < 256; i++) {
        const unsigned char byte = (unsigned char)i;
        char token[4];
        gpt2_encode(&byte, 1, token);
        json_object_set_new(vocab, token, json_integer(i));
    }
    return json_write(root, JSON_INDENT(1));
}

// Frees the text.
static bool write_text(const char *dir, const char *name, char *text, Error *err) {
    char path[IO_PATH_MAX];
    const bool ok = path_join(path, dir, name, err) && file_create(path, text, strlen(text), err);
    free(text);
    return ok;
}

// Failures are EXIT_DISK.
static bool byte_tokenizer_write(const char *dir, Error *err) {
    json_t *config = json_loads(config_json, 0, NULL);
    json_object_set_new(config, "chat_template", json_string(chatml_template));
    return write_text(dir, "tokenizer_config.json", json_write(config, JSON_INDENT(1)), err) &&
           write_text(dir, "tokenizer.json", byte_tokenizer_json(), err);
}

// ---- Set-up: before anything is written ---------------------------------------------------------

static void open_byte_tokenizer(Job *j, unsigned char digest[32]) {
    char *json = byte_tokenizer_json();
    sha256(json, strlen(json), digest);
    free(json);
    j->tokenizer =
        (Tokenizer){.vocab_size = 258, .bos = 256, .eos = 257, .adds_bos = true, .byte_ids = true};
}

static bool open_model_tokenizer(Job *j, unsigned char digest[32], Error *err) {
    const char *model = j->settings->model;
    char path[IO_PATH_MAX];
    if (path_is_dir(model) && !path_join(path, model, "tokenizer.json", err)) return false;
    if (!path_is_dir(model) || !path_exists(path))
        return error_set(
            err, EXIT_BAD_INPUT,
            "give --model DIR with a tokenizer.json; with --from-scratch, a config.json beside "
            "it is enough",
            "%s: is text, expected a tokenizer for it in --model, found none in %s", j->spec,
            model);
    if (!tokenizer_open(&j->tokenizer, model, err) || !file_sha256(path, digest, err)) return false;
    return j->tokenizer.eos >= 0 ||
           error_set(err, EXIT_BAD_INPUT, "name it in tokenizer_config.json",
                     "%s: no eos_token found", path);
}

static bool open_tokenizer(Job *j, Error *err) {
    Tokenizer *t = &j->tokenizer;
    ShardVocabulary *v = &j->options.vocabulary;
    const bool bytes = strcmp(j->settings->model, "demo") == 0;
    unsigned char digest[32];
    if (bytes)
        open_byte_tokenizer(j, digest);
    else if (!open_model_tokenizer(j, digest, err))
        return false;
    if (t->vocab_size > j->settings->vocab_size)
        return error_set(err, EXIT_CHECKPOINT_MISFIT, "use the tokenizer of the model",
                         "%s: made for a vocabulary of %d, the model has %d", t->file,
                         t->vocab_size, j->settings->vocab_size);
    *v = (ShardVocabulary){.vocab_size = t->vocab_size, .eos = t->eos};
    v->bos = t->adds_bos ? t->bos : -1;  // as in prompts, and before random weights too
    memcpy(&v->tokenizer_hash, digest, sizeof v->tokenizer_hash);
    j->options.tokenizer = t;
    for (int32_t id = 0; id < t->vocab_size && !t->byte_ids; id++) {
        size_t n;
        const unsigned char *byte = tokenizer_bytes(t, id, &n);
        if (n == 1) j->options.has_byte[*byte] = true;
    }
    j->options.trains_on_all = j->settings->o->train_on != 0;
    j->options.keeps_invalid = j->settings->o->invalid_utf8 != 0;
    Error *no_chat = &j->options.no_chat;
    chat_template_open(&j->options.chat, bytes ? NULL : j->settings->model, t, no_chat);
    no_chat->hint[0] = 0;  // without a template prepare.py uses ChatML
    if (j->options.chat.found)
        snprintf(no_chat->hint, sizeof no_chat->hint, " --model %.300s", j->settings->model);
    j->bpe = bpe_open(t, err);
    if (!j->bpe && err->code == EXIT_USAGE)
        text_copy(
            err->hint, sizeof err->hint,
            "only byte-level BPE is supported: save the ids of its own library with numpy.save; "
            "data/convert.py makes shards of them");
    return j->bpe != NULL;
}

// The key covers all that changes the shards: this program's format; every byte of the files that
// make the tokenizer and the chat template, or their absence; the day that a template writes, where
// SOURCE_DATE_EPOCH fixes it (a run would else end at midnight); the share for validation;
// --train-on and --invalid-utf8; the path, which tells the split, the kind, size and time of each
// file that is read.
static bool make_key(Job *j, Error *err) {
    static const char *const names[] = {"tokenizer_config.json", "chat_template.jinja"};
    const UnitOptions *o = &j->options;
    const int64_t facts[] = {FORMAT, (int64_t)o->vocabulary.tokenizer_hash};
    char path[IO_PATH_MAX];
    uint64_t h = fnv1a(FNV1A_START, facts, sizeof facts);
    for (int i = 0; i < 2 && j->tokenizer.file[0]; i++) {
        unsigned char digest[32] = {0};
        if (!path_join(path, j->settings->model, names[i], err) ||
            (path_exists(path) && !file_sha256(path, digest, err)))
            return false;
        h = fnv1a(h, digest, sizeof digest);
    }
    if (getenv("SOURCE_DATE_EPOCH")) h = fnv1a(h, o->chat.heading, strlen(o->chat.heading));
    h = fnv1a(h, &o->val_frac, sizeof o->val_frac);
    h = fnv1a(h, &o->trains_on_all, sizeof o->trains_on_all);
    h = fnv1a(h, &o->keeps_invalid, sizeof o->keeps_invalid);
    for (size_t i = 0; i < j->in.n; i++) {
        const InputFile *f = &j->in.items[i];
        if (f->kind == INPUT_LEFT_OUT) continue;
        h = fnv1a(h, f->path, strlen(f->path) + 1);
        h = fnv1a(h, &f->kind, sizeof f->kind);
        h = fnv1a(h, &f->size_bytes, sizeof f->size_bytes);
        h = fnv1a(h, &f->mtime_ns, sizeof f->mtime_ns);
    }
    snprintf(j->key, sizeof j->key, "%016lx\n", h);
    return true;
}

// Was the directory made from the same texts with the same tokenizer?
static bool is_up_to_date(const Job *j) {
    char path[IO_PATH_MAX];
    Error ignored = {0};
    char *found = path_join(path, j->dir, "texts.key", &ignored) && path_exists(path)
                      ? file_read_all(path, sizeof j->key, NULL, "", &ignored)
                      : NULL;
    const bool same = found && strcmp(found, j->key) == 0;
    free(found);
    return same;
}

// ---- Rounds: units are read in order, encoded by all threads, and written in order --------------

typedef struct {
    pthread_t id;
    BpeEncoder *encoder;
    Job *job;
} Thread;

static void *thread_run(void *context) {
    const Thread *t = context;
    for (int i; (i = atomic_fetch_add(&t->job->next_unit, 1)) < t->job->num_units;)
        unit_encode(&t->job->units[i], t->encoder, &t->job->options);
    return NULL;
}

static void show_progress(Job *j, uint64_t bytes) {
    const bool terminal = terminal_width(stderr) > 0;
    const double now = now_ms();
    if (io_progress) io_progress();
    if (now - j->shown_ms < (terminal ? 200 : 15000)) return;
    j->shown_ms = now;
    line_erase(stderr);
    fprintf(stderr, "tokenizing %s: %.1f %%, %.1f MB/s%s", j->spec,
            100 * (double)bytes / (double)j->in.size_bytes,
            (double)bytes * 1e-3 / (now - j->start_ms), terminal ? "" : "\n");
}

static bool was_stopped(const Job *j, Error *err) {
    return stop_signal &&
           !error_set(err, EXIT_RESUMABLE, "start again: it is tokenized from the beginning",
                      "%s: stopped by signal %d while tokenizing", j->spec, (int)stop_signal);
}

// The calling thread shows progress in bytes, and encodes only if no thread can be started.
static void round_run(Job *j, Thread *threads, int num_threads, uint64_t before, uint64_t after) {
    int started = 0;
    uint64_t start = 0;
    Error err = {0};
    for (int i = 0; i < num_threads; i++) start += bpe_bytes(threads[i].encoder);
    while (started < num_threads &&
           pthread_create(&threads[started].id, NULL, thread_run, &threads[started]) == 0)
        started++;
    if (started == 0) thread_run(&threads[0]);
    for (int i = 0; i < started;) {
        struct timespec until;
        uint64_t done = before - start;
        for (int k = 0; k < num_threads; k++) done += bpe_bytes(threads[k].encoder);
        show_progress(j, done < after ? done : after);
        if (was_stopped(j, &err)) {  // a long record would take minutes, and has written nothing
            checkpoint_abort(&j->ck);
            error_exit(&err);
        }
        clock_gettime(CLOCK_REALTIME, &until);
        if ((until.tv_nsec += 200000000) >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        i += pthread_timedjoin_np(threads[i].id, NULL, &until) == 0;
    }
}

// Names the first binary files and bad records; a hint that is the last one's once.
static void name_left_out(Job *j, const Findings *more) {
    const int64_t *all = j->found.counts, before = all[NUM_BAD] + all[NUM_BINARY],
                  n = more->counts[NUM_BAD] + more->counts[NUM_BINARY];
    for (int64_t i = 0; i < n && before + i < MAX_NAMED; i++) {
        const Error *named = &more->named[i];
        const bool again = i > 0 && strcmp(named->hint, named[-1].hint) == 0;
        j->found.named[before + i] = *named;
        if (j->again) continue;
        if (again || !named->hint[0])
            warning("left out: %s", named->what);
        else
            warning("left out: %s (%s)", named->what, named->hint);
    }
}

static void add_findings(Job *j, const Findings *more) {
    name_left_out(j, more);
    for (int i = 0; i < NUM_COUNTS; i++) j->found.counts[i] += more->counts[i];
    for (size_t i = 0; i < more->unknown.n; i++)
        unknown_add(&j->found.unknown, more->unknown.items[i].name, more->unknown.items[i].records);
    j->found.least_place = fmin(j->found.least_place, more->least_place);
    if (more->turn_end >= 0) j->found.turn_end = more->turn_end;
}

static bool write_unit(Job *j, const Unit *u, Error *err) {
    const uint64_t width = (uint64_t)shard_token_bytes(&j->options.vocabulary);
    if (u->err.code) {
        *err = u->err;
        return false;
    }
    for (size_t i = 0; i < u->num_documents; i++) {
        const UnitDocument *d = &u->documents[i];
        if (!shard_writer_add(d->is_val ? &j->val : &j->train, u->tokens + d->first * width,
                              d->end - d->first, d->masked ? u->weights + d->first : NULL, err))
            return false;
    }
    if (u->found.num_invalid > 0 && !j->again)
        warning("%s: bytes not in UTF-8, which became U+FFFD: %ld (iconv -f WINDOWS-1252 -t UTF-8)",
                u->file->path, u->found.num_invalid);
    j->in.items[u->file - j->in.items].num_docs += (int64_t)u->num_documents;
    add_findings(j, &u->found);
    return true;
}

static bool encode_all(Job *j, Thread *threads, int num_threads, Error *err) {
    UnitReader reader = {.in = &j->in, .most_bytes = MAX_DOCUMENT_BYTES, .file.fd = -1};
    bool ok = true;
    do {
        const uint64_t before = reader.bytes_done;
        j->num_units = 0;
        atomic_store(&j->next_unit, 0);
        while (j->num_units < num_threads * UNITS_PER_THREAD &&
               reader.bytes_done - before < MAX_ROUND_BYTES &&
               unit_read(&reader, &j->units[j->num_units], err))
            j->num_units++;
        ok = err->code == 0;
        if (ok) round_run(j, threads, num_threads, before, reader.bytes_done);
        for (int i = 0; ok && i < j->num_units; i++) ok = write_unit(j, &j->units[i], err);
        show_progress(j, reader.bytes_done);
    } while (ok && j->num_units > 0 && !was_stopped(j, err));
    file_close(&reader.file);
    return ok && err->code == 0;
}

static bool encode_with_threads(Job *j, Error *err) {
    cpu_set_t may_use;
    const int cores = sched_getaffinity(0, sizeof may_use, &may_use) == 0
                          ? CPU_COUNT(&may_use)
                          : (int)sysconf(_SC_NPROCESSORS_ONLN),
              num_threads = j->settings->o->threads > 0 ? j->settings->o->threads : cores;
    const int max_units = num_threads * UNITS_PER_THREAD;
    Thread *threads = host_calloc((size_t)num_threads, sizeof *threads, "threads");
    j->units = host_calloc((size_t)max_units, sizeof(Unit), "texts");
    for (int i = 0; i < num_threads; i++)
        threads[i] = (Thread){.job = j, .encoder = bpe_encoder_open(j->bpe)};
    const bool ok = encode_all(j, threads, num_threads, err);
    for (int i = 0; i < num_threads; i++) bpe_encoder_close(threads[i].encoder);
    for (int i = 0; i < max_units; i++) unit_free(&j->units[i]);
    free(threads);
    free(j->units);
    return ok;
}

// ---- The directory: everything under a temporary name, then renamed -----------------------------

static bool write_tokenizer(const Job *j, Error *err) {
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json",
                                        "special_tokens_map.json", "chat_template.jinja"};
    char from[IO_PATH_MAX];
    bool ok = true;
    if (!j->tokenizer.file[0]) return byte_tokenizer_write(j->ck.dir, err);
    for (size_t i = 0; ok && i < sizeof names / sizeof *names; i++) {
        ok = path_join(from, j->settings->model, names[i], err);
        if (!ok || !path_exists(from)) continue;
        char *text = file_read_all(from, TOKENIZER_MAX_BYTES, NULL, "", err);
        ok = text && write_text(j->ck.dir, names[i], text, err);
    }
    return ok &&
           (j->found.turn_end < 0 ||  // for the model that is trained on them
            write_text(j->ck.dir, "generation_config.json",
                       json_write(json_pack("{s:i}", "eos_token_id", j->found.turn_end), 0), err));
}

static bool nothing_to_train(const Job *j, Error *err) {
    const Error *first = &j->found.named[0];
    if (first->code) return error_set(err, EXIT_BAD_INPUT, first->hint, "%s", first->what);
    return error_set(err, EXIT_BAD_INPUT, "give text files or JSON Lines",
                     "%s: expected documents, found none", j->spec);
}

// Splits the documents. Starts over without validation if none would be left for training, and with
// the document of the least place for it if there was none.
static bool make_shards(Job *j, Error *err) {
    j->found = no_findings;
    for (size_t i = 0; i < j->in.n; i++) j->in.items[i].num_docs = 0;
    checkpoint_abort(&j->ck);
    shard_writer_init(&j->train, j->ck.dir, "train", &j->options.vocabulary);
    shard_writer_init(&j->val, j->ck.dir, "val", &j->options.vocabulary);
    const bool ok = checkpoint_begin(&j->ck, j->out->path, -1, basename(j->dir), err) &&
                    encode_with_threads(j, err) && shard_writer_close(&j->train, err) &&
                    shard_writer_close(&j->val, err);
    shard_writer_free(&j->train);
    shard_writer_free(&j->val);
    if (ok && j->train.num_docs + j->val.num_docs == 0) return nothing_to_train(j, err);
    const bool splits = j->options.val_frac > 0 && j->options.val_frac < 1,
               lacks = j->val.num_docs == 0 && j->train.num_docs >= VAL_MIN_DOCS &&
                       (splits || j->options.cuts_files);
    if (!ok || (!lacks && (!splits || j->train.num_docs > 0))) return ok;
    j->options.val_frac = lacks ? nextafter(j->found.least_place, 1) : 0;
    j->options.cuts_files = false;
    j->again = true;
    return make_shards(j, err);
}

static bool publish(Job *j, Error *err) {
    return write_tokenizer(j, err) &&
           write_text(j->ck.dir, "texts.key", host_copy(j->key, "a key"), err) &&
           checkpoint_register_all(&j->ck, err) && checkpoint_publish(&j->ck, err);
}

static void print_records(const Job *j) {
    char list[300] = "";
    int64_t all = 0;
    for (int i = 0; i < NUM_RECORD_KINDS; all += j->found.counts[i++])
        if (j->found.counts[i] > 0)
            text_list(list, sizeof list, "%ld of %s", j->found.counts[i], record_levels[i].name);
    const int64_t chats = all - j->found.counts[RECORD_TEXT] - j->found.counts[RECORD_PARTS];
    if (all > 0) printf("records %s", list);
    if (chats > 0)
        printf("; chats by the template of %s, trained on %s", j->options.chat.name,
               j->options.trains_on_all ? "every turn" : "the answers");
    if (all > 0) printf("\n");
    list[0] = 0;
    for (size_t i = 0; i < j->found.unknown.n; i++)
        text_list(list, sizeof list, "%s (%ld records)", j->found.unknown.items[i].name,
                  j->found.unknown.items[i].records);
    if (list[0]) printf("unknown keys: %s\n", list);
    if (chats > 0 && !option_given(&j->settings->o->set, "model"))
        warning("these chats train random weights: --model DIR names a model that can write");
}

// The first five files with documents of training, or of validation
static void print_files(const Job *j, const char *name, bool val) {
    int64_t n = 0;
    for (const InputFile *f = j->in.items; f < j->in.items + j->in.n; f++) {
        char path[300];
        if (f->num_docs == 0 || (f->split == SPLIT_VAL) != val) continue;
        text_copy(path, sizeof path, f->path);
        text_sanitize(path, sizeof path);
        if (n++ < MAX_NAMED) printf("%s%s (%ld)", n == 1 ? name : ", ", path, f->num_docs);
    }
    if (n > MAX_NAMED) printf(" and %ld more", n - MAX_NAMED);
    if (n > 0) printf("\n");
}

static void print_tokenizer(const Job *j) {
    const Tokenizer *t = &j->tokenizer;
    char bos[80] = "no BOS";
    if (!t->file[0]) return;
    if (t->adds_bos) tokenizer_name(bos, sizeof bos, t, t->bos);
    printf("texts begin with %s, by the post_processor of tokenizer.json%s\n", bos,
           t->bos_is_disputed ? "; as in transformers 5, add_bos_token has no effect" : "");
}

static void print_summary(const Job *j) {
    const int64_t docs = j->train.num_docs + j->val.num_docs, *counts = j->found.counts;
    const double ms = now_ms() - j->start_ms;
    static const char *const what[] = {[NUM_BAD] = "record",
                                       [NUM_EMPTY] = "empty document",
                                       [NUM_BINARY] = "binary or non-UTF-8 file"};
    char left[300] = "";
    line_erase(stderr);
    for (int i = NUM_BAD; i <= NUM_BINARY; i++)
        if (counts[i] > 0)
            text_list(left, sizeof left, "%ld %s%s", counts[i], what[i], text_plural(counts[i]));
    if (j->in.num_left_out > 0)
        text_list(left, sizeof left, "%ld other file%s", j->in.num_left_out,
                  text_plural(j->in.num_left_out));
    printf("texts   %s -> %s: %ld document%s, %ld for validation%s, %.1f MB in %.1f s%s%s\n",
           j->spec, j->dir, docs, text_plural(docs), j->val.num_docs,
           j->options.cuts_files && j->val.num_docs > 0 ? " (the last 1 % of a file)" : "",
           (double)j->in.size_bytes * 1e-6, ms * 1e-3, left[0] ? "; left out: " : "", left);
    if (counts[NUM_OWN_ENDS] > 0)
        printf("texts with a BOS or EOS of their own, which is not doubled: %ld\n",
               counts[NUM_OWN_ENDS]);
    if (j->in.n > 1) print_files(j, "files   to train on: ", false);
    print_files(j, "files   to validate on: ", true);
    print_records(j);
    print_tokenizer(j);
}

// The tokens of an existing run are needed to resume it, and --val may name them.
static bool may_replace(const Job *j, Error *err) {
    char log[IO_PATH_MAX];
    const char *val = j->settings->o->val;
    bool has_log, has_tokens, same = false;
    if (!path_join(log, j->out->path, "log.jsonl", err) || !path_find(log, &has_log, err) ||
        !path_find(j->dir, &has_tokens, err) || (val && !path_is_same(val, j->dir, &same, err)))
        return false;
    if (same)
        return error_set(err, EXIT_USAGE, "copy it elsewhere first, or give another --out",
                         "--val %s: expected shards that this run does not replace", val);
    if (!has_tokens) return true;
    return j->settings->replaces_run || !has_log
               ? checkpoint_is_ours(j->dir, err)
               : error_set(
                     err, EXIT_USAGE,
                     "--out DIR starts elsewhere, --overwrite replaces the run; --resume without "
                     "--train continues it on the same texts as before",
                     "%s: the run was trained on other texts than %s has now", j->out->path,
                     j->spec);
}

static bool write_all(Job *j, Error *err) {
    if (!dir_create_all(j->out->path, err) || !out_dir_lock(j->out, err)) return false;
    j->start_ms = j->shown_ms = now_ms();
    if (make_shards(j, err) && publish(j, err)) {
        print_summary(j);
        return true;
    }
    checkpoint_abort(&j->ck);
    return false;
}

static char temporary_path[IO_PATH_MAX];  // of this process

static void remove_temporary_path(void) { dir_remove_tree(temporary_path, &(Error){0}); }

// A directory below TMPDIR that is removed at exit
static OutDir *temporary_out(Error *err) {
    static OutDir out = {.path = temporary_path};
    const char *parent = getenv("TMPDIR");
    if (temporary_path[0]) return &out;
    if (!parent || !parent[0]) parent = "/tmp";
    if (!path_join(temporary_path, parent, "unpad-XXXXXX", err)) return NULL;
    if (!mkdtemp(temporary_path)) {
        error_set(err, EXIT_DISK, "set TMPDIR to a directory with room for the tokens",
                  "%s: cannot create a directory: %s", parent, strerror(errno));
        return NULL;
    }
    atexit(remove_temporary_path);
    return &out;
}

static bool place_in(Job *j, OutDir *out, const char *name, Error *err) {
    j->out = out;
    return out && path_join(j->dir, out->path, name, err);
}

// What trains nothing needs no --out; --steps 0 leaves its tokens there, but in no other run.
static bool choose_place(Job *j, const char *name, Error *err) {
    const Options *o = j->settings->o;
    const bool trains = run_trains(o), keeps = !o->dry_run && !o->compare && !o->check_packing;
    Error why = {0};
    if (keeps && may_replace(j, trains ? err : &why)) return true;
    return !trains && place_in(j, temporary_out(err), name, err);
}

static bool source_to_shards(char **spec, const char *name, double val_frac, const Texts *t,
                             Error *err) {
    static Job j;
    if (!inputs_are_texts(*spec)) return true;
    j = (Job){.settings = t, .spec = *spec, .options.val_frac = val_frac};
    bool ok = place_in(&j, t->out ? t->out : temporary_out(err), name, err);
    if (ok && t->writes) {
        ok = inputs_collect(&j.in, *spec, j.out->path, err) && open_tokenizer(&j, err);
        // with few texts a hash would most likely choose none for validation, or many
        j.options.cuts_files = val_frac > 0 && val_frac < 1 && j.in.num_val == 0 &&
                               j.in.num_records == 0 && j.in.n <= CUT_MAX_FILES;
        if (j.in.num_val > 0 || j.options.cuts_files) j.options.val_frac = 0;  // chosen already
        if (ok && val_frac < 1 && j.in.num_val + j.in.num_test > 0 &&
            j.in.num_val + j.in.num_left_out == (int64_t)j.in.n)
            ok = error_set(err, EXIT_BAD_INPUT, "name the files themselves to train on them",
                           "%s: expected documents to train on, found validation and test files "
                           "only",
                           *spec);
        ok = ok && make_key(&j, err);
        if (ok && !is_up_to_date(&j)) ok = choose_place(&j, name, err) && write_all(&j, err);
        bpe_close(j.bpe);
        tokenizer_free(&j.tokenizer);
        inputs_free(&j.in);
    }
    if (!ok) return false;
    free(*spec);
    *spec = host_copy(j.dir, "paths");
    return true;
}

bool texts_to_shards(const char **spec, const char *name, double val_frac, const Texts *t,
                     Error *err) {
    Sources sources;
    char numbered[300], *text;
    size_t size;
    bool ok = sources_parse(&sources, *spec, err);
    FILE *out = host_stream(&text, &size, "paths");
    for (int32_t i = 0; ok && i < sources.n; i++) {
        char **one = &sources.list[i].spec;
        if (sources.n > 1 && t->out && strchr(t->out->path, ',') && inputs_are_texts(*one))
            ok = error_set(err, EXIT_USAGE, "a mixture is a list with commas: give another --out",
                           "%s: expected a path without a comma for texts", t->out->path);
        if (sources.n > 1)
            snprintf(numbered, sizeof numbered, "%s-%d-%.200s", name, i + 1, basename(*one));
        ok = ok && source_to_shards(one, sources.n > 1 ? numbered : name, val_frac, t, err);
        fprintf(out, "%s%s", i ? "," : "", *one);
        if (sources.n > 1) fprintf(out, ":%.9g", 1e-9 * (double)sources.list[i].weight);
    }
    fclose(out);
    *spec = text;
    sources_free(&sources);
    return ok;
}
