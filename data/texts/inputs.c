#include "inputs.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "../base/file.h"
#include "../base/memory.h"
#include "../base/path.h"
#include "../shards/find_files.h"

static const char *path_ending(const char *path) {
    const char *slash = strrchr(path, '/'), *dot = strrchr(slash ? slash : path, '.');
    return dot ? dot : "";
}

static bool has_ending(const char *path, const char *const *endings, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (strcasecmp(path_ending(path), endings[i]) == 0) return true;
    return false;
}
#define ENDS_IN(path_, ...)                                 \
    has_ending((path_), (const char *const[]){__VA_ARGS__}, \
               sizeof((const char *const[]){__VA_ARGS__}) / sizeof(const char *))

// ------------------------------------------------------------------------------------------------
// Directories

typedef struct {
    PathList *list;
    struct stat out_dir;  // st_ino 0: there is none
} Walk;

static bool walk(const Walk *w, const char *dir, Error *err);

static bool walk_entry(const Walk *w, const char *dir, const char *name, Error *err) {
    char path[IO_PATH_MAX];
    struct stat st;
    if (name[0] == '.') return true;
    if (!path_join(path, sizeof path, dir, name, err)) return false;
    if (lstat(path, &st) != 0) return bad_input(err, "%s: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode)) {
        const bool is_out = st.st_ino == w->out_dir.st_ino && st.st_dev == w->out_dir.st_dev;
        return is_out || strcmp(name, "__pycache__") == 0 || walk(w, path, err);
    }
    if (stat(path, &st) != 0)  // a link that leads nowhere is left out
        return errno == ENOENT || bad_input(err, "%s: %s", path, strerror(errno));
    if (S_ISREG(st.st_mode)) path_list_add(w->list, path);
    return true;
}

static bool walk(const Walk *w, const char *dir, Error *err) {
    DIR *d = opendir(dir);
    if (!d) return bad_input(err, "%s: cannot list: %s", dir, strerror(errno));
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(d));)
        ok = walk_entry(w, dir, entry->d_name, err);
    closedir(d);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// Kinds

// Endings that are refused; in_tree: also in a directory, of which only the README would be found.
static const struct {
    const char *ending, *format;
    bool in_tree;
} refused[] = {
    {".parquet", "Parquet", true}, {".arrow", "Arrow", true}, {".gz", "gzip", true},
    {".zst", "Zstandard", true},   {".xz", "xz", false},      {".bz2", "bzip2", false},
    {".zip", "zip", false},        {".csv", "CSV", false},    {".tsv", "CSV", false},
};

static bool check_ending(const InputFile *f, Error *err) {
    char hint[512];
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (strcasecmp(path_ending(f->path), refused[i].ending) != 0) continue;
        if (!f->named && !refused[i].in_tree) return true;
        snprintf(hint, sizeof hint,
                 "data/prepare.py %.300s --out FILE.jsonl reads CSV, Parquet and packed JSON Lines",
                 f->path);
        return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected text or JSONL, found %s", f->path,
                         refused[i].format);
    }
    return true;
}

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

// The first record of a JSON file, a whole object; NULL: there is none. *array: of an array, whose
// bracket is the byte before *first.
static json_t *first_record(const InputFile *f, bool *array, uint64_t *first) {
    const uint64_t most = f->kind == INPUT_LINES ? 1 << 12 : 1 << 24;
    File file;
    Error ignored = {0};
    if (!file_open(&file, f->path, "", &ignored)) return NULL;
    const uint64_t n = file.size_bytes < most ? file.size_bytes : most;
    char *text = host_calloc(n + 1, 1, "the beginning of a file");
    json_t *record = NULL;
    if (file_read_at(&file, text, n, 0, &ignored)) {
        *first = strspn(text, " \t\r\n");
        *array = text[*first] == '[';
        *first += *array;
        const uint64_t size = record_end((unsigned char *)text + *first, n - *first, *array, true);
        record = json_loadb(text + *first, size - (*array && size > 0), JSON_ALLOW_NUL, NULL);
    }
    file_close(&file);
    free(text);
    return record;
}

// Records in a .json file are those of a named one, and of a directory those with a text.
static void find_records(InputFile *f) {
    bool array = false;
    json_t *record = first_record(f, &array, &f->first_byte);
    if (f->kind == INPUT_TABLE && record &&
        (f->named || json_object_get(record, "text") || json_object_get(record, "parts")))
        f->kind = INPUT_LINES;
    if (f->kind == INPUT_LINES && array) f->kind = INPUT_ARRAY;
    if (f->kind == INPUT_LINES) f->first_byte = 0;
    json_decref(record);
}

static bool find_kind(InputFile *f, Error *err) {
    const bool lines = ENDS_IN(f->path, ".jsonl", ".ndjson"), json = ENDS_IN(f->path, ".json");
    if (!check_ending(f, err)) return false;
    f->kind = lines                                      ? INPUT_LINES
              : json || ENDS_IN(f->path, ".csv", ".tsv") ? INPUT_TABLE
                                                         : INPUT_TEXT;
    if (lines || json) find_records(f);
    return f->kind != INPUT_TABLE || !f->named ||
           error_set(err, EXIT_BAD_INPUT,
                     "write an object {\"text\": ...} a line, or an array of them",
                     "%s: expected records, found other JSON", f->path);
}

// ------------------------------------------------------------------------------------------------
// Specs

// val.NAME or val_NAME in the directory itself
static bool is_validation_file(const char *path, const char *dir) {
    const char *name = path + strlen(dir);
    while (*name == '/') name++;
    return strncmp(name, "val.", 4) == 0 || (strncmp(name, "val_", 4) == 0 && !strchr(name, '/'));
}

// dir: where it was found; NULL: it was named.
static bool add_file(Inputs *in, const char *path, const char *dir, Error *err) {
    struct stat st;
    const size_t size = strlen(path) + 1;
    if (stat(path, &st) != 0) return bad_input(err, "%s: cannot read: %s", path, strerror(errno));
    in->items = host_grow(in->items, &in->capacity, in->n + 1, sizeof *in->items, "paths");
    InputFile *f = &in->items[in->n++];
    *f = (InputFile){.path = host_calloc(size, 1, "a path"),
                     .size_bytes = (uint64_t)st.st_size,
                     .mtime_ns = st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec,
                     .named = !dir};
    memcpy(f->path, path, size);
    if (!find_kind(f, err)) return false;
    f->is_val = dir && f->kind != INPUT_TEXT && is_validation_file(path, dir);
    in->num_val += f->is_val;
    in->size_bytes += f->size_bytes;
    in->num_tables += f->kind == INPUT_TABLE;
    return true;
}

static bool add_item(Inputs *in, const char *item, const char *out_dir, Error *err) {
    PathList found = {0};
    Walk w = {.list = &found};
    const bool is_dir = path_is_dir(item);
    if (stat(out_dir, &w.out_dir) != 0) w.out_dir.st_ino = 0;
    bool ok = true;
    if (is_dir)
        ok = walk(&w, item, err);
    else if (path_exists(item))
        path_list_add(&found, item);
    else
        path_list_expand_glob(&found, item);
    path_list_sort(&found, 0);
    if (ok && found.n == 0)
        ok = bad_input(err, "%s: expected a file or a directory with files, found none", item);
    for (size_t i = 0; ok && i < found.n; i++)
        ok = add_file(in, found.items[i], is_dir ? item : NULL, err);
    path_list_free(&found);
    return ok;
}

bool inputs_collect(Inputs *in, const char *spec, const char *out_dir, Error *err) {
    *in = (Inputs){0};
    if (path_exists(spec)) return add_item(in, spec, out_dir, err);
    char *copy = strdup(spec), *rest = copy;
    bool ok = true;
    for (char *item; ok && (item = strsep(&rest, ","));)
        ok = item[0] == 0 || add_item(in, item, out_dir, err);
    free(copy);
    return ok;
}

void inputs_free(Inputs *in) {
    for (size_t i = 0; i < in->n; i++) free(in->items[i].path);
    free(in->items);
    *in = (Inputs){0};
}

// Text or lines, or what is refused with a word about text.
static bool is_text(const char *path) {
    unsigned char head[1 << 13];
    File f;
    Error ignored = {0};
    if (ENDS_IN(path, ".bin", ".idx", ".ds", ".index", ".mask", ".npy")) return false;
    if (ENDS_IN(path, ".txt", ".md", ".jsonl", ".ndjson", ".gz", ".zst", ".parquet")) return true;
    if (!file_open(&f, path, "", &ignored)) return false;
    const uint64_t n = f.size_bytes < sizeof head ? f.size_bytes : sizeof head;
    const bool text = n > 0 && file_read_at(&f, head, n, 0, &ignored) && memchr(head, 0, n) == NULL;
    file_close(&f);
    return text;
}

static bool dir_has_texts(const char *dir) {
    PathList shards = {0}, found = {0};
    Error ignored = {0};
    const Walk w = {.list = &found};
    bool text = !path_list_expand(&shards, dir, "train", &ignored) &&
                !path_list_expand(&shards, dir, "val", &ignored) && walk(&w, dir, &ignored);
    size_t i = 0;
    while (text && i < found.n && !is_text(found.items[i])) i++;
    text = text && i < found.n;
    path_list_free(&shards);
    path_list_free(&found);
    return text;
}

bool inputs_are_texts(const char *spec) {
    char first[IO_PATH_MAX];
    PathList found = {0};
    text_copy(first, sizeof first, spec);
    if (!path_exists(first)) first[strcspn(first, ",")] = 0;
    if (path_is_dir(first)) return dir_has_texts(first);
    if (path_exists(first)) return is_text(first);
    path_list_expand_glob(&found, first);
    const bool text = found.n > 0 && is_text(found.items[0]);
    path_list_free(&found);
    return text;
}
