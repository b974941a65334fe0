#include "texts.h"

#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../base/clock.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/machine.h"
#include "../base/memory.h"
#include "../base/signals.h"
#include "../runs/checkpoint.h"
#include "../shards/shard_writer.h"
#include "../shards/sources.h"
#include "documents.h"

enum {
    UNITS_PER_THREAD = 16,
    FORMAT = 6,
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
    char dir[IO_PATH_MAX];
    char key[20];  // hash of the inputs and of everything that determines the shards
    ShardWriter train, val;
    FILE *origins;          // a line for each file, and for each of its documents
    const InputFile *file;  // the last one there
    // documents placed below it are for validation, about that share
    double val_frac, least_place;  // least_place: of all documents
    Unit *units;                   // (num_units) of a round
    int num_units;
    atomic_int next_unit;
    Findings found;
    bool again;  // they have been read before, and their faults reported
    double start_ms, shown_ms;
} Conversion;

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

// Failures are EXIT_DISK.
static bool byte_tokenizer_write(Checkpoint *ck, Error *err) {
    json_t *config =
        json_pack("{s:s, s:s, s:s, s:b, s:s}", "tokenizer_class", "PreTrainedTokenizerFast",
                  "bos_token", "<|bos|>", "eos_token", "<|eos|>", "clean_up_tokenization_spaces",
                  false, "chat_template", chatml_template);
    return checkpoint_write_text(ck, "tokenizer_config.json", json_write(config, JSON_INDENT(1)),
                                 err) &&
           checkpoint_write_text(ck, "tokenizer.json", byte_tokenizer_json(), err);
}

// ---- Set-up: before anything is written ---------------------------------------------------------

static void open_byte_tokenizer(Conversion *c, unsigned char digest[32]) {
    AUTO_FREE char *json = byte_tokenizer_json();
    sha256(json, strlen(json), digest);
    c->tokenizer =
        (Tokenizer){.vocab_size = 258, .bos = 256, .eos = 257, .adds_bos = true, .byte_ids = true};
}

static bool open_model_tokenizer(Conversion *c, unsigned char digest[32], Error *err) {
    const char *model = c->settings->model;
    const char *path = PATH_IN(model, "tokenizer.json");
    if (!path_is_dir(model) || !path_exists(path))
        return error_set(
            err, EXIT_BAD_INPUT,
            "give --model DIR with a tokenizer.json; with --from-scratch, a config.json beside "
            "it is enough",
            "%s: is text, expected a tokenizer for it in --model, found none in %s", c->spec,
            model);
    if (!tokenizer_open(&c->tokenizer, model, err) || !file_sha256(path, digest, err)) return false;
    return c->tokenizer.eos >= 0 ||
           error_set(err, EXIT_BAD_INPUT, "name it in tokenizer_config.json",
                     "%s: no eos_token found", path);
}

static bool open_tokenizer(Conversion *c, Error *err) {
    Tokenizer *t = &c->tokenizer;
    ShardVocabulary *v = &c->options.vocabulary;
    const bool bytes = strcmp(c->settings->model, "demo") == 0;
    unsigned char digest[32];
    if (bytes)
        open_byte_tokenizer(c, digest);
    else if (!open_model_tokenizer(c, digest, err))
        return false;
    if (t->vocab_size > c->settings->vocab_size)
        return error_set(err, EXIT_CHECKPOINT_MISFIT, "use the tokenizer of the model",
                         "%s: made for a vocabulary of %d, the model has %d", t->file,
                         t->vocab_size, c->settings->vocab_size);
    *v = (ShardVocabulary){.vocab_size = t->vocab_size, .eos = t->eos};
    v->bos = t->adds_bos ? t->bos : -1;  // as in prompts, and before random weights too
    memcpy(&v->tokenizer_hash, digest, sizeof v->tokenizer_hash);
    c->options.tokenizer = t;
    v->pairs = c->settings->o->preference != 0;
    c->options.trains_on_all = c->settings->o->train_on != 0;
    c->options.keeps_invalid = c->settings->o->invalid_utf8 != 0;
    chat_template_open(&c->options.chat, bytes ? NULL : c->settings->model, t, &c->options.no_chat);
    if (t->why_not.code) *err = t->why_not;
    return err->code == 0;
}

// The key covers all that changes the shards: this program's format; every byte of the files that
// make the tokenizer and the chat template, or their absence; the day that a template writes, where
// SOURCE_DATE_EPOCH fixes it (a run would else end at midnight); the share for validation;
// --train-on, --invalid-utf8 and --preference; the path, which tells the split, the kind, size and
// time of each file that is read.
static bool make_key(Conversion *c, Error *err) {
    static const char *const names[] = {"tokenizer_config.json", "chat_template.jinja"};
    const UnitOptions *o = &c->options;
    const int64_t facts[] = {FORMAT, (int64_t)o->vocabulary.tokenizer_hash};
    uint64_t h = fnv1a(FNV1A_START, facts, sizeof facts);
    for (int i = 0; i < 2 && c->tokenizer.file[0]; i++) {
        unsigned char digest[32] = {0};
        const char *path = PATH_IN(c->settings->model, names[i]);
        if (path_exists(path) && !file_sha256(path, digest, err)) return false;
        h = fnv1a(h, digest, sizeof digest);
    }
    if (getenv("SOURCE_DATE_EPOCH")) h = fnv1a(h, o->chat.heading, strlen(o->chat.heading));
    h = fnv1a(h, &c->val_frac, sizeof c->val_frac);
    h = fnv1a(h, &o->trains_on_all, sizeof o->trains_on_all);
    h = fnv1a(h, &o->keeps_invalid, sizeof o->keeps_invalid);
    if (o->vocabulary.pairs) h = fnv1a(h, "pairs", 5);
    for (size_t i = 0; i < c->in.n; i++) {
        const InputFile *f = &c->in.items[i];
        if (f->kind == INPUT_LEFT_OUT) continue;
        h = fnv1a(h, f->path, strlen(f->path) + 1);
        h = fnv1a(h, &f->kind, sizeof f->kind);
        h = fnv1a(h, &f->size_bytes, sizeof f->size_bytes);
        h = fnv1a(h, &f->mtime_ns, sizeof f->mtime_ns);
    }
    snprintf(c->key, sizeof c->key, "%016lx\n", h);
    return true;
}

// Was the directory made from the same texts with the same tokenizer?
static bool is_up_to_date(const Conversion *c) {
    AUTO_FREE char *found =
        file_read_all(PATH_IN(c->dir, "texts.key"), sizeof c->key, NULL, "", &(Error){0});
    return found && strcmp(found, c->key) == 0;
}

// ---- Rounds: units are read in order, encoded by all threads, and written in order --------------

typedef struct {
    pthread_t id;
    BpeEncoder *encoder;
    Conversion *conversion;
} Thread;

static void *thread_run(void *context) {
    const Thread *t = context;
    for (int i; (i = atomic_fetch_add(&t->conversion->next_unit, 1)) < t->conversion->num_units;)
        unit_encode(&t->conversion->units[i], t->encoder, &t->conversion->options);
    return NULL;
}

static void show_progress(Conversion *c, uint64_t bytes) {
    const bool terminal = terminal_width(stderr) > 0;
    const double now = now_ms();
    if (io_progress) io_progress();
    if (now - c->shown_ms < (terminal ? 200 : 15000)) return;
    c->shown_ms = now;
    line_erase(stderr);
    fprintf(stderr, "tokenizing %s: %.1f %%, %.1f MB/s%s", c->spec,
            100 * (double)bytes / (double)c->in.size_bytes,
            (double)bytes * 1e-3 / (now - c->start_ms), terminal ? "" : "\n");
}

static bool was_stopped(const Conversion *c, Error *err) {
    return stop_signal &&
           !error_set(err, EXIT_RESUMABLE, "start again: it is tokenized from the beginning",
                      "%s: stopped by signal %d while tokenizing", c->spec, (int)stop_signal);
}

// The calling thread shows progress, and encodes only if no thread can be started.
static void round_run(Conversion *c, Thread *threads, int num_threads, uint64_t before,
                      uint64_t after) {
    int started = 0;
    Error err = {0};
    while (started < num_threads &&
           pthread_create(&threads[started].id, NULL, thread_run, &threads[started]) == 0)
        started++;
    if (started == 0) thread_run(&threads[0]);
    for (int i = 0; i < started;) {
        const int n = c->num_units, taken = atomic_load(&c->next_unit);
        show_progress(
            c, taken < n ? before + (after - before) * (uint64_t)taken / (uint64_t)n : after);
        if (was_stopped(c, &err)) {  // a long record would take minutes, and has written nothing
            checkpoint_abort(&c->ck);
            error_exit(&err);
        }
        if (pthread_tryjoin_np(threads[i].id, NULL) == 0)
            i++;
        else
            sleep_ms(1);
    }
}

// Names the first binary files and bad records; a hint that is the last one's once.
static void add_findings(Conversion *c, const Findings *more) {
    int64_t *all = c->found.counts, named = all[NUM_BAD] + all[NUM_BINARY];
    const int64_t end = named + more->counts[NUM_BAD] + more->counts[NUM_BINARY];
    const char *said = "";
    for (const Error *e = more->named; named < end && named < MAX_NAMED; e++) {
        const bool says = e->hint[0] && strcmp(e->hint, said) != 0;
        c->found.named[named++] = *e;
        said = e->hint;
        if (!c->again) warning(says ? "left out: %s (%s)" : "left out: %s", e->what, e->hint);
    }
    for (int i = 0; i < NUM_COUNTS; i++) all[i] += more->counts[i];
    for (size_t i = 0; i < more->unknown.n; i++)
        unknown_add(&c->found.unknown, more->unknown.items[i].name, more->unknown.items[i].times);
    if (more->turn_end >= 0) c->found.turn_end = more->turn_end;
}

static void write_unit(Conversion *c, const Unit *u, Error *err) {
    const uint64_t width = (uint64_t)shard_token_bytes(&c->options.vocabulary);
    if (u->err.code) *err = u->err;
    if (err->code) return;
    json_auto_t *path =
        u->file == c->file ? NULL : json_pack("{s:o}", "file", json_text(u->file->path));
    if (path) json_dumpf(path, c->origins, 0), fputs("\n", c->origins);
    c->file = u->file;
    for (size_t i = 0; i < u->num_documents; i++) {
        const UnitDocument *d = &u->documents[i];
        const bool is_val = d->place < c->val_frac;
        c->least_place = fmin(c->least_place, d->place);
        fprintf(c->origins, "%s %ld\n", is_val ? "val" : "train", d->record);
        if (!shard_writer_add(is_val ? &c->val : &c->train, u->tokens + d->first * width,
                              d->end - d->first, d->masked ? u->weights + d->first : NULL, err))
            return;
    }
    if (u->found.num_invalid > 0 && !c->again)
        warning("%s: bytes not in UTF-8, which became U+FFFD: %ld (iconv -f WINDOWS-1252 -t UTF-8)",
                u->file->path, u->found.num_invalid);
    add_findings(c, &u->found);
    c->in.items[u->file - c->in.items].num_docs += (int64_t)u->num_documents;
}

static bool encode_all(Conversion *c, Error *err) {
    const char *limit;
    const int num_threads = machine_threads(c->settings->o->threads, cores_allowed(), 1, &limit),
              max_units = num_threads * UNITS_PER_THREAD;
    AUTO_FREE Thread *threads = host_calloc((size_t)num_threads, sizeof *threads, "threads");
    UnitReader reader = {.in = &c->in, .most_bytes = MAX_DOCUMENT_BYTES, .file.fd = -1};
    c->units = host_calloc((size_t)max_units, sizeof(Unit), "texts");
    for (int i = 0; i < num_threads; i++)
        threads[i] = (Thread){.conversion = c, .encoder = bpe_encoder_open(&c->tokenizer)};
    do {
        const uint64_t before = reader.bytes_done;
        c->num_units = 0;
        atomic_store(&c->next_unit, 0);
        while (c->num_units < max_units && reader.bytes_done - before < MAX_ROUND_BYTES &&
               unit_read(&reader, &c->units[c->num_units], err))
            c->num_units++;
        if (!err->code) round_run(c, threads, num_threads, before, reader.bytes_done);
        for (int i = 0; !err->code && i < c->num_units; i++) write_unit(c, &c->units[i], err);
        show_progress(c, reader.bytes_done);
    } while (!was_stopped(c, err) && !err->code && c->num_units > 0);
    file_close(&reader.file);
    for (int i = 0; i < num_threads; i++) bpe_encoder_close(threads[i].encoder);
    for (int i = 0; i < max_units; i++) unit_free(&c->units[i]);
    free(c->units);
    return err->code == 0;
}

// ---- The directory: everything under a temporary name, then renamed -----------------------------

static bool write_tokenizer(Conversion *c, Error *err) {
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json",
                                        "special_tokens_map.json", "chat_template.jinja"};
    if (!c->tokenizer.file[0]) return byte_tokenizer_write(&c->ck, err);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *from = PATH_IN(c->settings->model, names[i]);
        if (!path_exists(from)) continue;
        char *text = file_read_all(from, TOKENIZER_MAX_BYTES, NULL, "", err);
        if (!text || !checkpoint_write_text(&c->ck, names[i], text, err)) return false;
    }
    return c->found.turn_end < 0 ||  // for the model that is trained on them
           checkpoint_write_text(
               &c->ck, "generation_config.json",
               json_write(json_pack("{s:i}", "eos_token_id", c->found.turn_end), 0), err);
}

static bool nothing_to_train(const Conversion *c, Error *err) {
    const Error *first = &c->found.named[0];
    if (first->code) return error_set(err, EXIT_BAD_INPUT, first->hint, "%s", first->what);
    return error_set(err, EXIT_BAD_INPUT,
                     "give text files or JSON Lines; validation and test files are trained if they "
                     "are named themselves",
                     "%s: expected documents, found none", c->spec);
}

// Splits the documents. Starts over without validation if none would be left for training, and with
// the document of the least place for it if there was none.
static bool make_shards(Conversion *c, Error *err) {
    c->found = no_findings;
    c->least_place = 1;
    for (size_t i = 0; i < c->in.n; i++) c->in.items[i].num_docs = 0;
    checkpoint_abort(&c->ck);
    shard_writer_init(&c->train, c->ck.dir, "train", &c->options.vocabulary);
    shard_writer_init(&c->val, c->ck.dir, "val", &c->options.vocabulary);
    AUTO_FREE char *origins = NULL;
    size_t size;
    c->origins = host_stream(&origins, &size, "origins of documents");
    c->file = NULL;
    bool ok = checkpoint_begin(&c->ck, c->out->path, -1, basename(c->dir), err) &&
              encode_all(c, err) && shard_writer_close(&c->train, err) &&
              shard_writer_close(&c->val, err);
    fclose(c->origins);
    ok = ok && checkpoint_write_file(&c->ck, "origins", origins, size, err);
    shard_writer_free(&c->train);
    shard_writer_free(&c->val);
    if (ok && c->train.num_docs + (c->val_frac > 0 ? c->val.num_docs : 0) == 0)
        return nothing_to_train(c, err);
    const bool splits = c->val_frac > 0 && c->val_frac < 1,
               lacks = splits && c->val.num_docs == 0 && c->train.num_docs >= VAL_MIN_DOCS;
    if (!ok || (!lacks && (!splits || c->train.num_docs > 0))) return ok;
    c->val_frac = lacks ? nextafter(c->least_place, 1) : 0;
    c->again = true;
    return make_shards(c, err);
}

static void print_records(const Conversion *c) {
    char list[300] = "";
    int64_t all = 0;
    for (int i = 0; i < NUM_RECORD_KINDS; all += c->found.counts[i++])
        if (c->found.counts[i] > 0)
            text_list(list, sizeof list, "%ld of %s", c->found.counts[i], record_levels[i].name);
    const int64_t chats = all - c->found.counts[RECORD_TEXT] - c->found.counts[RECORD_PARTS];
    if (all > 0) printf("records %s", list);
    if (chats > 0)
        printf("; chats by the template of %s, trained on %s", c->options.chat.name,
               c->options.trains_on_all ? "every turn" : "the answers");
    if (all > 0) printf("\n");
    list[0] = 0;
    for (size_t i = 0; i < c->found.unknown.n; i++)
        text_list(list, sizeof list, "%s (%ld)", c->found.unknown.items[i].name,
                  c->found.unknown.items[i].times);
    if (list[0]) printf("unknown keys: %s\n", list);
    if (chats > 0 && !option_given(&c->settings->o->set, "model"))
        warning("these chats train random weights: --model DIR names a model that can write");
}

// The first five files with documents of training, or of validation
static void print_files(const Conversion *c, const char *name, bool val) {
    int64_t n = 0;
    for (const InputFile *f = c->in.items; f < c->in.items + c->in.n; f++) {
        char path[300];
        if (f->num_docs == 0 || (f->split == SPLIT_VAL) != val) continue;
        text_copy(path, sizeof path, f->path);
        text_sanitize(path, sizeof path);
        if (n++ < MAX_NAMED) printf("%s%s (%ld)", n == 1 ? name : ", ", path, f->num_docs);
    }
    if (n > MAX_NAMED) printf(" and %ld more", n - MAX_NAMED);
    if (n > 0) printf("\n");
}

static void print_tokenizer(const Conversion *c) {
    const Tokenizer *t = &c->tokenizer;
    char bos[80] = "no BOS";
    if (!t->file[0]) return;
    if (t->adds_bos) tokenizer_name(bos, sizeof bos, t, t->bos);
    printf("texts begin with %s, by the post_processor of tokenizer.json%s\n", bos,
           t->bos_is_disputed ? "; as in transformers 5, add_bos_token has no effect" : "");
}

static void print_summary(const Conversion *c) {
    const int64_t docs = c->train.num_docs + c->val.num_docs, *counts = c->found.counts;
    const double ms = now_ms() - c->start_ms;
    static const char *const what[] = {"record", "empty document", "binary or non-UTF-8 file",
                                       "other file"};
    const int64_t n[] = {counts[NUM_BAD], counts[NUM_EMPTY], counts[NUM_BINARY],
                         c->in.num_left_out};
    char left[300] = "";
    line_erase(stderr);
    for (int i = 0; i < 4; i++)
        if (n[i] > 0) text_list(left, sizeof left, "%ld %s%s", n[i], what[i], text_plural(n[i]));
    printf("texts   %s -> %s: %ld document%s, %ld for validation%s, %.1f MB in %.1f s%s%s\n",
           c->spec, c->dir, docs, text_plural(docs), c->val.num_docs,
           counts[NUM_CUT] > 0 ? " (the last 1 % of a file)" : "", (double)c->in.size_bytes * 1e-6,
           ms * 1e-3, left[0] ? "; left out: " : "", left);
    if (counts[NUM_OWN_ENDS] > 0)
        printf("texts with a BOS or EOS of their own, which is not doubled: %ld\n",
               counts[NUM_OWN_ENDS]);
    if (c->in.n > 1) print_files(c, "files   to train on: ", false);
    print_files(c, "files   to validate on: ", true);
    print_records(c);
    print_tokenizer(c);
}

// The tokens of an existing run are needed to resume it, and --val may name them.
static bool may_replace(const Conversion *c, Error *err) {
    const char *val = c->settings->o->val;
    bool has_log, has_tokens, same = false;
    if (!path_find(PATH_IN(c->out->path, "log.jsonl"), &has_log, err) ||
        !path_find(c->dir, &has_tokens, err) || (val && !path_is_same(val, c->dir, &same, err)))
        return false;
    if (same)
        return error_set(err, EXIT_USAGE, "copy it elsewhere first, or give another --out",
                         "--val %s: expected shards that this run does not replace", val);
    if (!has_tokens) return true;
    return c->settings->replaces_run || !has_log
               ? checkpoint_is_ours(c->dir, err)
               : error_set(
                     err, EXIT_USAGE,
                     "--out DIR starts elsewhere, --overwrite replaces the run; --resume without "
                     "--train continues it on the same texts as before",
                     "%s: the run was trained on other texts than %s has now", c->out->path,
                     c->spec);
}

static bool write_all(Conversion *c, Error *err) {
    if (!dir_create_all(c->out->path, err) || !out_dir_lock(c->out, err)) return false;
    c->start_ms = c->shown_ms = now_ms();
    const bool ok = make_shards(c, err) && write_tokenizer(c, err) &&
                    checkpoint_write_text(&c->ck, "texts.key", host_copy(c->key, "a key"), err) &&
                    checkpoint_register_all(&c->ck, err) && checkpoint_publish(&c->ck, err);
    checkpoint_abort(&c->ck);  // does nothing after publish
    if (ok) print_summary(c);
    return ok;
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

static bool place_in(Conversion *c, OutDir *out, const char *name, Error *err) {
    c->out = out;
    return out && path_join(c->dir, out->path, name, err);
}

// A start that trains nothing needs no --out; --steps 0 leaves its tokens there, but in no other
// run.
static bool choose_place(Conversion *c, const char *name, Error *err) {
    const Options *o = c->settings->o;
    const bool trains = run_trains(o), keeps = !o->dry_run && !o->compare && !o->check_packing;
    Error why = {0};
    if (keeps && may_replace(c, trains ? err : &why)) return true;
    return !trains && place_in(c, temporary_out(err), name, err);
}

static bool source_to_shards(char **spec, const char *name, double val_frac, const Texts *t,
                             Error *err) {
    static Conversion c;
    if (!inputs_are_texts(*spec)) return true;
    c = (Conversion){.settings = t, .spec = *spec, .val_frac = val_frac};
    bool ok = place_in(&c, t->out ? t->out : temporary_out(err), name, err);
    if (ok && t->writes) {
        ok = inputs_collect(&c.in, *spec, c.out->path, err) && open_tokenizer(&c, err);
        c.options.cuts_files = val_frac > 0 && val_frac < 1 && c.in.num_val == 0;
        if (c.in.num_val > 0) c.val_frac = 0;  // chosen already
        ok = ok && make_key(&c, err);
        if (ok && !is_up_to_date(&c)) ok = choose_place(&c, name, err) && write_all(&c, err);
        tokenizer_free(&c.tokenizer);
        inputs_free(&c.in);
    }
    if (!ok) return false;
    free(*spec);
    *spec = host_copy(c.dir, "paths");
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
