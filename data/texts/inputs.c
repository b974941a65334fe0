#include "inputs.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../base/file.h"
#include "../base/memory.h"
#include "../base/path.h"
#include "../models/chat.h"
#include "../shards/find_files.h"

// What file names tell. A file with another suffix is a text if it looks like one. A format is not
// read: as INPUT_TEXT it is refused in a directory too, where it may be all that counts.
typedef struct {
    const char *endings;
    InputKind kind;
    const char *format, *hint;  // hint: what converts the file whose name follows
    bool is_shard;
} Ending;

#define PREPARE "python3 data/prepare.py --out FILE.jsonl "

static const Ending *find_ending(const char *path) {
    static const Ending list[] = {
        {".txt .md", INPUT_TEXT, NULL, NULL, false},
        {".jsonl .ndjson", INPUT_LINES, NULL, NULL, false},
        {".json", INPUT_LEFT_OUT, NULL, NULL, false},
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
               *dot = path_is_dir(path) ? "/" : strrchr(slash ? slash : path, '.');
    for (size_t i = 0; dot && i < sizeof list / sizeof *list; i++) {
        const char *at = strcasestr(list[i].endings, dot), *end = at ? at + strlen(dot) : "-";
        if (*end == ' ' || *end == 0) return &list[i];
    }
    return NULL;
}

// ---- Directories --------------------------------------------------------------------------------

static bool add_tree(PathList *list, const char *dir, const void *out_dir, Error *err);

// Is it the --out of a run? Then its log begins with a start or resume event.
static bool is_run(const char *dir) {
    char path[IO_PATH_MAX], head[40] = "";
    uint64_t n;
    Error none = {0};
    return path_join(path, dir, "log.jsonl", &none) && path_exists(path) &&
           read_head(path, head, sizeof head - 1, &n, &none) &&
           strncmp(head, "{\"event\": \"", 11) == 0 && strstr(head, "\", \"version\": \"");
}

static bool add_entry(PathList *list, const char *path, const struct stat *out_dir, Error *err) {
    struct stat st;
    if (lstat(path, &st) != 0) return bad_input(err, "%s: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode)) {
        const bool is_out = st.st_ino == out_dir->st_ino && st.st_dev == out_dir->st_dev;
        return is_out || path_ends_with(path, "/__pycache__") || is_run(path) ||
               add_tree(list, path, out_dir, err);
    }
    if (stat(path, &st) != 0)  // a dangling link is left out
        return errno == ENOENT || bad_input(err, "%s: %s", path, strerror(errno));
    if (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) path_list_add(list, path);
    return true;
}

// out_dir: the struct stat of a directory that is left out; st_ino 0: there is none
static bool add_tree(PathList *list, const char *dir, const void *out_dir, Error *err) {
    PathList entries = {0};
    bool ok = path_list_add_dir(&entries, dir, "*", err);
    for (size_t i = 0; ok && i < entries.n; i++)
        ok = add_entry(list, entries.items[i].path, out_dir, err);
    path_list_free(&entries);
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
    File f;
    if (!file_open(&f, path, "check it, or copy it again", err)) return false;
    *n = f.size_bytes < most ? f.size_bytes : most;
    const bool ok = file_read_at(&f, out, *n, 0, err);
    file_close(&f);
    return ok;
}

// The first record of a JSON file, a complete object; NULL: none. *array: it is in an array, whose
// bracket is the byte before *first.
static json_t *first_record(const InputFile *f, bool *array, uint64_t *first) {
    uint64_t n = f->kind == INPUT_LINES ? 1 << 12 : 1 << 24;
    char *text = host_calloc(n + 1, 1, "the beginning of a file");
    json_t *record = NULL;
    if (read_head(f->path, text, n, &n, &(Error){0})) {
        const uint64_t mark = mark_bytes(text);
        *first = mark + strspn(text + mark, " \t\r\n");
        *array = text[*first] == '[';
        *first += *array;
        const uint64_t size = record_end((unsigned char *)text + *first, n - *first, *array, true);
        record = json_loadb(text + *first, size - (*array && size > 0), JSON_ALLOW_NUL, NULL);
        if (!*array) *first = mark;
    }
    free(text);
    return record;
}

// Any objects are records in a .json file that was named; in a directory, only known kinds are.
static void find_records(InputFile *f) {
    bool array = false;
    json_t *record = first_record(f, &array, &f->first_byte);
    if (f->kind == INPUT_LEFT_OUT && record && (f->named || record_kind(record) != RECORD_OTHER))
        f->kind = INPUT_LINES;
    if (f->kind == INPUT_LINES && array) f->kind = INPUT_ARRAY;
    json_decref(record);
}

// For a file that is left out or refused: says what it is, and what converts it to text.
static bool find_kind(Inputs *in, InputFile *f, Error *err) {
    const Ending *e = find_ending(f->path);
    const bool other = e && e->format;
    unsigned char mark[2] = {0};
    uint64_t n;
    const bool utf16 = !other && read_head(f->path, mark, 2, &n, &(Error){0}) && mark[0] >= 0xfe;
    const char *format = other   ? e->format
                         : utf16 ? "UTF-16"
                                 : "JSON without records",
               *how = other   ? e->hint
                      : utf16 ? "iconv -f UTF-16 -t UTF-8 "
                              : "one object {\"text\": ...} a line, as written by jq -c . ";
    char hint[512];
    f->kind = e ? e->kind : INPUT_TEXT;
    if (!other && f->kind != INPUT_TEXT) find_records(f);
    snprintf(hint, sizeof hint, "%s%.300s", how, path_ends_with(how, " ") ? f->path : "");
    if ((other && (f->named || f->kind == INPUT_TEXT)) || (f->kind == INPUT_LEFT_OUT && f->named))
        return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected text or JSONL, found %s", f->path,
                         format);
    if (f->kind == INPUT_LEFT_OUT && in->num_left_out++ < MAX_NAMED)
        warning("left out: %s: %s (%s)", f->path, format, hint);
    return true;
}

// ---- Specs --------------------------------------------------------------------------------------

// val.NAME or val_NAME in the directory itself
static bool is_validation_file(const FoundPath *f) {
    const char *name = f->path + f->dir_bytes;
    while (*name == '/') name++;
    return strncmp(name, "val.", 4) == 0 || (strncmp(name, "val_", 4) == 0 && !strchr(name, '/'));
}

static bool add_file(Inputs *in, const FoundPath *found, Error *err) {
    struct stat st;
    array_grow(in->items, &in->capacity, in->n + 1, "paths");
    InputFile *f = &in->items[in->n++];
    *f = (InputFile){.path = host_copy(found->path, "paths"), .named = found->dir_bytes == 0};
    if (stat(f->path, &st) != 0)
        return bad_input(err, "%s: cannot read: %s", f->path, strerror(errno));
    f->size_bytes = (uint64_t)st.st_size;
    f->mtime_ns = (uint64_t)st.st_mtim.tv_sec * 1000000000 + (uint64_t)st.st_mtim.tv_nsec;
    if (!find_kind(in, f, err)) return false;
    const bool records = f->kind == INPUT_LINES || f->kind == INPUT_ARRAY;
    f->is_val = !f->named && records && is_validation_file(found);
    in->num_val += f->is_val;
    in->num_records += records;
    in->size_bytes += f->size_bytes;
    return true;
}

bool inputs_collect(Inputs *in, const char *spec, const char *out_dir, Error *err) {
    struct stat out = {0};
    const Search search = {add_dir, &out, "a file or a directory with files", ""};
    PathList found = {0};
    *in = (Inputs){0};
    if (stat(out_dir, &out) != 0) out.st_ino = 0;
    bool ok = path_list_expand(&found, spec, &search, err);
    for (size_t i = 0; ok && i < found.n; i++) ok = add_file(in, &found.items[i], err);
    path_list_free(&found);
    return ok;
}

void inputs_free(Inputs *in) {
    for (size_t i = 0; i < in->n; i++) free(in->items[i].path);
    free(in->items);
    *in = (Inputs){0};
}

// Text or lines, or a format whose error message mentions text.
static bool is_text(const char *path) {
    unsigned char head[1 << 13];
    uint64_t n;
    const Ending *e = find_ending(path);
    if (e) return !e->is_shard;
    return read_head(path, head, sizeof head, &n, &(Error){0}) && n > 0 &&
           memchr(head, 0, n) == NULL;
}

bool inputs_are_texts(const char *spec) {
    const struct stat none = {0};
    const Search search = {add_tree, &none, "", ""};
    char first[IO_PATH_MAX];
    PathList found = {0}, shards = {0};
    Error ignored = {0};
    text_copy(first, sizeof first, spec);
    if (!path_exists(first)) first[strcspn(first, ",")] = 0;
    bool text = path_list_expand(&found, first, &search, &ignored);
    if (text && found.items[0].dir_bytes > 0)
        text = path_list_add_shards(&shards, first, "train", &ignored) &&
               path_list_add_shards(&shards, first, "val", &ignored) && shards.n == 0;
    size_t i = 0;  // any file of a directory, else the first
    while (text && i + 1 < found.n && found.items[i].dir_bytes > 0 && !is_text(found.items[i].path))
        i++;
    text = text && is_text(found.items[i].path);
    path_list_free(&found);
    path_list_free(&shards);
    return text;
}
