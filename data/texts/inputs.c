#include "inputs.h"

#include <errno.h>
#include <fts.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../base/file.h"
#include "../base/memory.h"
#include "../shards/find_files.h"
#include "records.h"

// The kinds of files by the ends of their names. A file with another suffix is a text if it looks
// like one. A format is not read: as INPUT_TEXT it is refused in a directory too, where it may be
// all that counts.
typedef struct {
    const char *endings;
    InputKind kind;
    const char *format, *hint;  // hint: what converts the file whose name follows
    bool is_shard;
} Ending;

#define PREPARE "python3 data/prepare.py --out FILE.jsonl "

static const Ending *find_ending(const char *path, bool is_dir) {
    static const Ending list[] = {
        {".txt .md .text .tokens .raw", INPUT_TEXT, NULL, NULL, false},
        {".jsonl .ndjson", INPUT_LINES, NULL, NULL, false},
        {".json", INPUT_LEFT_OUT, "JSON without records",
         "one object {\"text\": ...} a line, as written by jq -c . ", false},
        {".csv .tsv", INPUT_LEFT_OUT, "CSV", PREPARE, false},
        {".ipynb", INPUT_LEFT_OUT, "a notebook", "jupyter nbconvert --to markdown ", false},
        {".pdf", INPUT_LEFT_OUT, "PDF", "pdftotext ", false},
        {".docx", INPUT_LEFT_OUT, "Word", "pandoc -t plain -o FILE.txt ", false},
        {".parquet", INPUT_TEXT, "Parquet", PREPARE, false},
        {".arrow", INPUT_TEXT, "Arrow", "write it as Parquet or JSON Lines", false},
        {".gz", INPUT_TEXT, "gzip", "gunzip -k ", false},
        {".zst", INPUT_TEXT, "Zstandard", "unzstd ", false},
        {"/", INPUT_LEFT_OUT, "a directory", "links are not followed: name it in --train, too",
         true},
        {".bin .idx .mask .ds .index .npy", INPUT_TEXT, NULL, NULL, true},
    };
    const char *slash = strrchr(path, '/'),
               *dot = is_dir ? "/" : strrchr(slash ? slash : path, '.');
    for (size_t i = 0; dot && i < sizeof list / sizeof *list; i++) {
        const char *at = strcasestr(list[i].endings, dot), *end = at ? at + strlen(dot) : "-";
        if (*end == ' ' || *end == 0) return &list[i];
    }
    return NULL;
}

// ---- Directories --------------------------------------------------------------------------------

// Is it the --out of a run? Then its log begins with a start or resume event.
static bool is_run(const char *dir) {
    char path[IO_PATH_MAX], head[40] = "";
    uint64_t n;
    Error none = {0};
    return path_join(path, dir, "log.jsonl", &none) && path_exists(path) &&
           read_head(path, head, sizeof head - 1, &n, &none) &&
           strncmp(head, "{\"event\": \"", 11) == 0 && strstr(head, "\", \"version\": \"");
}

// A hidden directory, or a link to one, is an entry that is left out later. out_dir: the struct
// stat of a directory that is no input; st_ino 0: there is none
static bool add_tree(PathList *list, const char *dir, const void *out_dir, Error *err) {
    const struct stat *out = out_dir;
    FTS *tree =
        fts_open((char *[]){(char *)dir, NULL}, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, NULL);
    bool ok = tree || bad_input(err, "%s: cannot list: %s", dir, strerror(errno));
    for (FTSENT *e; ok && (e = fts_read(tree));) {
        const bool is_dir = e->fts_info == FTS_D, follows = is_dir && e->fts_name[0] != '.';
        struct stat st = *e->fts_statp;
        if (e->fts_errno != 0) {
            ok = bad_input(err, "%s: cannot list: %s", e->fts_path, strerror(e->fts_errno));
        } else if (e->fts_level > 0 && e->fts_info != FTS_DP) {
            const bool is_out = st.st_ino == out->st_ino && st.st_dev == out->st_dev;
            if (is_dir && (!follows || is_out || strcmp(e->fts_name, "__pycache__") == 0 ||
                           is_run(e->fts_path)))
                fts_set(tree, e, FTS_SKIP);
            if (follows) continue;
            if (stat(e->fts_path, &st) != 0)  // a dangling link is left out
                ok = errno == ENOENT || bad_input(err, "%s: %s", e->fts_path, strerror(errno));
            else if (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode))
                path_list_add(list, e->fts_path);
        }
    }
    if (tree) fts_close(tree);
    return ok;
}

// A directory that was named
static bool add_dir(PathList *list, const char *dir, const void *out_dir, Error *err) {
    char hint[512];
    snprintf(hint, sizeof hint, "its tokens are in %.400s/tokens", dir);
    return is_run(dir) ? error_set(err, EXIT_BAD_INPUT, hint,
                                   "%s: expected texts or shards, found a run", dir)
                       : add_tree(list, dir, out_dir, err);
}

// ---- Kinds --------------------------------------------------------------------------------------

uint64_t record_end(const unsigned char *text, uint64_t n, bool array, bool last) {
    int64_t depth = 0;
    bool string = false;
    if (!array) {
        const unsigned char *newline = n > 0 ? memchr(text, '\n', n) : NULL;
        return newline ? (uint64_t)(newline + 1 - text) : last ? n : 0;
    }
    for (uint64_t i = 0; i < n; i++) {
        const unsigned char c = text[i];
        if (string && c == '\\')
            i++;
        else if (c == '"')
            string = !string;
        else if (!string && depth == 0 && (c == ',' || c == ']'))
            return i + 1;
        else if (!string)
            depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    }
    return 0;
}

bool read_head(const char *path, void *out, uint64_t most, uint64_t *n, Error *err) {
    OPEN_FILE f;
    if (!file_open(&f, path, "check it, or copy it again", err)) return false;
    *n = f.size_bytes < most ? f.size_bytes : most;
    return file_read_at(&f, out, *n, 0, err);
}

// By the first record of a JSON file, if it is complete. Any objects are records in a .json file
// that was named; in a directory, only known kinds are.
static void find_records(InputFile *f) {
    uint64_t n = f->kind == INPUT_LINES ? 1 << 12 : 1 << 24;
    AUTO_FREE char *text = host_calloc(n + 1, 1, "the beginning of a file");
    json_auto_t *record = NULL;
    bool array = false;
    if (read_head(f->path, text, n, &n, &(Error){0})) {
        const uint64_t mark = mark_bytes(text), first = mark + strspn(text + mark, " \t\r\n");
        array = text[first] == '[';
        const uint64_t at = first + array,
                       size = record_end((unsigned char *)text + at, n - at, array, true);
        record = json_loadb(text + at, size - (array && size > 0), JSON_ALLOW_NUL, NULL);
        f->first_byte = array ? at : mark;
    }
    if (f->kind == INPUT_LEFT_OUT && record && (f->named || record_kind(record) != RECORD_OTHER))
        f->kind = INPUT_LINES;
    if (f->kind == INPUT_LINES && array) f->kind = INPUT_ARRAY;
}

static bool is_hidden(const InputFile *f) { return !f->named && basename(f->path)[0] == '.'; }

static void leave_out(Inputs *in, InputFile *f, const char *found, const char *hint) {
    f->kind = INPUT_LEFT_OUT;
    if (in->num_left_out++ < MAX_NAMED) warning("left out: %s: %s (%s)", f->path, found, hint);
}

// Finds the kind of a file. For a file that is left out or refused, *err names its format and the
// command that converts it to text.
static bool find_kind(Inputs *in, InputFile *f, const Ending *e, Error *err) {
    const char *found = e ? e->format : NULL, *how = found ? e->hint : "";
    unsigned char mark = 0;
    uint64_t n;
    char hint[512];
    f->kind = is_hidden(f) ? INPUT_LEFT_OUT : e ? e->kind : INPUT_TEXT;
    if (is_hidden(f)) return true;
    if (e && path_ends_with(e->endings, "json")) find_records(f);
    if (!found || f->kind == INPUT_LINES || f->kind == INPUT_ARRAY) return true;
    if (read_head(f->path, &mark, 1, &n, &(Error){0}) && mark >= 0xfe)
        found = "UTF-16", how = "iconv -f UTF-16 -t UTF-8 ";
    snprintf(hint, sizeof hint, "%s%.300s", how, path_ends_with(how, " ") ? f->path : "");
    if (f->named || f->kind == INPUT_TEXT)
        return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected text or JSONL, found %s", f->path,
                         found);
    leave_out(in, f, found, hint);
    return true;
}

// ---- Splits of a directory, by the usual names of them ------------------------------------------

// By the last word in the path that names a split: train-00000-of-00002, a/test/part-0.
static Split split_of(const FoundPath *found) {
    static const char breaks[] = "/-_. ";
    static const char *const words[] = {[SPLIT_TRAIN] = " train training ",
                                        [SPLIT_VAL] = " val valid validation dev eval ",
                                        [SPLIT_TEST] = " test testing "};
    Split split = SPLIT_NONE;
    size_t n;
    for (const char *p = found->path + found->dir_bytes; *p; p += n + (p[n] != 0)) {
        char word[32];
        n = strcspn(p, breaks);
        snprintf(word, sizeof word, " %.*s ", (int)n, p);
        for (Split s = SPLIT_TRAIN; s <= SPLIT_TEST; s++)
            if (strcasestr(words[s], word)) split = s;
    }
    return split;
}

// Does the file tell about the others?
static bool is_about_others(const InputFile *f) {
    static const char *const names[] = {"README", "LICENSE", "LICENCE", "COPYING"};
    for (size_t i = 0; i < sizeof names / sizeof *names && !f->named && f->kind == INPUT_TEXT; i++)
        if (strncasecmp(basename(f->path), names[i], strlen(names[i])) == 0) return true;
    return false;
}

// Records show their kind; a text file is taken for a part of a split only where another is called
// train.
static void choose_splits(Inputs *in) {
    static const char trains[] = "name it in --train to train on it";
    char hidden[300] = "";
    bool has_train = false;
    for (size_t i = 0; i < in->n; i++) has_train |= in->items[i].split == SPLIT_TRAIN;
    for (InputFile *f = in->items; f && f < in->items + in->n; f++) {
        in->num_left_out += is_hidden(f);
        if (is_hidden(f)) text_list(hidden, sizeof hidden, "%s", basename(f->path));
        if (f->kind == INPUT_TEXT && !has_train) f->split = SPLIT_NONE;
        if (in->num_records > 0 && is_about_others(f))
            leave_out(in, f, "a text among records", trains);
        if (f->kind == INPUT_LEFT_OUT) continue;
        if (f->split == SPLIT_TEST) leave_out(in, f, "a test set", trains);
        in->num_val += f->split == SPLIT_VAL;
    }
    if (hidden[0]) warning("left out: hidden files: %s", hidden);
}

// ---- Specs --------------------------------------------------------------------------------------

static bool add_file(Inputs *in, const FoundPath *found, Error *err) {
    struct stat st;
    array_grow(in->items, &in->capacity, in->n + 1, "paths");
    InputFile *f = &in->items[in->n++];
    *f = (InputFile){.path = host_copy(found->path, "paths"), .named = found->dir_bytes == 0};
    if (stat(f->path, &st) != 0)
        return bad_input(err, "%s: cannot read: %s", f->path, strerror(errno));
    f->size_bytes = (uint64_t)st.st_size;
    f->mtime_ns = (uint64_t)st.st_mtim.tv_sec * 1000000000 + (uint64_t)st.st_mtim.tv_nsec;
    const Ending *e = find_ending(f->path, S_ISDIR(st.st_mode));
    if (!find_kind(in, f, e, err)) return false;
    const bool records = f->kind == INPUT_LINES || f->kind == INPUT_ARRAY;
    if (!f->named && (records || (f->kind == INPUT_TEXT && e))) f->split = split_of(found);
    in->num_records += records;
    in->size_bytes += f->size_bytes;
    return true;
}

bool inputs_collect(Inputs *in, const char *spec, const char *out_dir, Error *err) {
    struct stat out = {0};
    const Search search = {add_dir, &out, "a file or a directory with files", ""};
    PATH_LIST found = {0};
    *in = (Inputs){0};
    if (stat(out_dir, &out) != 0) out.st_ino = 0;
    bool ok = path_list_expand(&found, spec, &search, err);
    for (size_t i = 0; ok && i < found.n; i++) ok = add_file(in, &found.items[i], err);
    if (ok) choose_splits(in);
    return ok;
}

void inputs_free(Inputs *in) {
    for (size_t i = 0; i < in->n; i++) free(in->items[i].path);
    free(in->items);
    *in = (Inputs){0};
}

// Text or lines, or a format whose error message mentions text.
static bool is_text(const FoundPath *f) {
    unsigned char head[1 << 13];
    uint64_t n;
    const Ending *e = find_ending(f->path, path_is_dir(f->path));
    if (f->dir_bytes > 0 && basename(f->path)[0] == '.') return false;
    if (e) return !e->is_shard;
    return read_head(f->path, head, sizeof head, &n, &(Error){0}) && n > 0 &&
           memchr(head, 0, n) == NULL;
}

bool inputs_are_texts(const char *spec) {
    const struct stat none = {0};
    const Search search = {add_tree, &none, "", ""};
    char first[IO_PATH_MAX];
    PATH_LIST found = {0}, shards = {0};
    Error ignored = {0};
    text_copy(first, sizeof first, spec);
    if (!path_exists(first)) first[strcspn(first, ",")] = 0;
    if (!path_list_expand(&found, first, &search, &ignored)) return false;
    if (found.items[0].dir_bytes == 0) return is_text(&found.items[0]);
    if (!path_list_add_shards(&shards, first, "train", &ignored) ||
        !path_list_add_shards(&shards, first, "val", &ignored) || shards.n > 0)
        return false;
    for (size_t i = 0; i < found.n; i++)
        if (is_text(&found.items[i])) return true;
    return false;
}
