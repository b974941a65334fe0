#include "checkpoint.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../base/dir.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"

// ---- Names --------------------------------------------------------------------------------------

const char *checkpoint_step_path(char path[IO_PATH_MAX], const char *out_dir, int64_t step) {
    char name[32];
    snprintf(name, sizeof name, "step-%08ld", step);
    return path_in(path, out_dir, name);
}

bool checkpoint_parse_step(const char *name, int64_t *step) {
    char canonical[64];
    if (strncmp(name, "step-", 5) != 0 || strlen(name) > 5 + 18) return false;
    *step = strtoll(name + 5, NULL, 10);
    snprintf(canonical, sizeof canonical, "step-%08ld", *step);
    return *step >= 0 && strcmp(canonical, name) == 0;
}

// Marks of directories of this program, in no one else's names: one that is being written or
// removed, and one that is being replaced
#define TEMPORARY ".unpad.tmp-"
#define REPLACED ".unpad.old-"

// Is the name one with this mark and a number, as in step-00000100.unpad.tmp-4711? *base: before it
static bool is_leftover(const char *name, const char *mark, char base[256]) {
    const char *at = strstr(name, mark);
    if (at) snprintf(base, 256, "%.*s", (int)(at - name), name);
    return at && fnmatch("+([0-9])", at + strlen(mark), FNM_EXTMATCH) == 0;
}

// ---- manifest.json ------------------------------------------------------------------------------

// Of shards it has another name: they are no model.
static const char manifest_name[] = "manifest.json", shards_manifest_name[] = "texts.json",
                  format_name[] = "unpad checkpoint 1";

// The last line, with the checksum of the text before it
enum { TAIL_BYTES = sizeof ",\n  \"manifest_crc32c\": \"01234567\"\n}\n" - 1 };
static void write_tail(char text[TAIL_BYTES + 1], uint32_t crc) {
    snprintf(text, TAIL_BYTES + 1, ",\n  \"manifest_crc32c\": \"%08x\"\n}\n", crc);
}

static bool manifest_write(const Checkpoint *ck, Error *err) {
    char tail[TAIL_BYTES + 1];
    AUTO_FREE char *text = json_write(
        json_pack("{s:s, s:I, s:O}", "format", format_name, "step", ck->step, "files", ck->files),
        JSON_INDENT(2));
    const size_t n = strlen(text) - strlen("\n}\n");  // the tail closes the object
    FileWriter w;
    write_tail(tail, crc32c(0, text, n));
    const char *name = ck->step < 0 ? shards_manifest_name : manifest_name;
    return writer_open(&w, PATH_IN(ck->dir, name), err) && writer_write(&w, text, n, err) &&
           writer_write(&w, tail, TAIL_BYTES, err) && writer_close(&w, err);
}

static bool verify_contents(const File *f, uint64_t size_bytes, const char *crc_text, Error *err) {
    unsigned char chunk[1 << 16];
    char found[16];
    uint32_t crc = 0;
    if (f->size_bytes != size_bytes)
        return bad_input(err, "%s: expected %lu bytes, found %lu", f->path, size_bytes,
                         f->size_bytes);
    for (uint64_t done = 0, n; done < size_bytes; done += n) {
        n = size_bytes - done < sizeof chunk ? size_bytes - done : sizeof chunk;
        if (!file_read_at(f, chunk, n, done, err)) return false;
        crc = crc32c(crc, chunk, (size_t)n);
    }
    snprintf(found, sizeof found, "%08x", crc);
    return strcmp(found, crc_text) == 0 ||
           bad_input(err, "%s: CRC32C: expected %.8s, found %s", f->path, crc_text, found);
}

static bool verify_file(const char *dir, const json_t *entry, Error *err) {
    OPEN_FILE f = {.fd = -1};
    const char *name = NULL, *crc = NULL;
    int64_t size_bytes = 0;
    if (!json_get_string(entry, "name", &name, true, err) ||
        !json_get_int64(entry, "size_bytes", 0, (int64_t)1 << 52, &size_bytes, true, err) ||
        !json_get_string(entry, "crc32c", &crc, true, err) || !path_is_plain_name(name))
        return bad_input(err, "files: expected name, size_bytes and crc32c");
    return file_open(&f, PATH_IN(dir, name), "the checkpoint is incomplete", err) &&
           verify_contents(&f, (uint64_t)size_bytes, crc, err);
}

// *was_read: a NULL is the manifest's fault.
static json_t *read_manifest(const char *path, bool *was_read, Error *err) {
    char tail[TAIL_BYTES + 1];
    uint64_t n = 0;
    const char *hint = "the checkpoint is incomplete";
    AUTO_FREE char *text = file_read_all(path, JSON_MAX_CONFIG, &n, hint, err);
    *was_read = text != NULL;
    if (!text) return NULL;
    const size_t length = strlen(text), body = length > TAIL_BYTES ? length - TAIL_BYTES : 0;
    write_tail(tail, crc32c(0, text, body));
    if (length == n && strcmp(text + body, tail) == 0) return json_parse(text, n, path, err);
    bad_input(err, "%s: CRC32C: expected its last line to match the rest", path);
    return NULL;
}

bool checkpoint_verify(const char *dir, int64_t *step, Error *err) {
    json_auto_t *root = read_manifest(PATH_IN(dir, manifest_name), &(bool){0}, err);
    const json_t *files = json_member(root, "files"), *entry;
    const char *format = NULL;
    int64_t found = -1;
    size_t i;
    if (!root || !json_get_string(root, "format", &format, true, err) ||
        !json_get_int64(root, "step", 0, (int64_t)1 << 52, &found, true, err))
        return false;
    if (strcmp(format, format_name) != 0)
        return bad_input(err, "format: expected \"%s\", found \"%.40s\"", format_name, format);
    if (!json_is_array(files)) return bad_input(err, "files: expected an array");
    json_array_foreach(files, i, entry) {
        if (!verify_file(dir, entry, err)) return false;
    }
    if (step) *step = found;
    return true;
}

// Returns an array of the files of a directory, as in a manifest, without checksums; -1 bytes: no
// regular file. NULL on error.
static json_t *list_files(const char *path, Error *err) {
    struct stat st;
    DIR *dir = opendir(path);
    json_t *files = json_array();
    for (struct dirent *e; dir && (errno = 0, e = readdir(dir));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) break;
        json_array_append_new(files,
                              json_pack("{s:o, s:I}", "name", json_text(e->d_name), "size_bytes",
                                        S_ISREG(st.st_mode) ? st.st_size : (int64_t)-1));
    }
    if (errno == ENOTDIR) json_array_append_new(files, json_pack("{s:s}", "name", ""));
    const bool ok = !errno || errno == ENOTDIR || disk_error(err, path, "cannot list");
    if (dir) closedir(dir);
    if (!ok) json_decref(files);
    return ok ? files : NULL;
}

// With the same name and size
static bool has_file(const json_t *files, const json_t *wanted) {
    const json_t *size = json_object_get(wanted, "size_bytes"), *entry;
    size_t i;
    json_array_foreach(files, i, entry) {
        if (json_equal(json_object_get(entry, "name"), json_object_get(wanted, "name")) &&
            json_number_value(json_object_get(entry, "size_bytes")) == json_number_value(size))
            return true;
    }
    return false;
}

bool checkpoint_verify_model(const char *dir, Error *err) {
    size_t i;
    const json_t *entry;
    json_auto_t *root = read_manifest(PATH_IN(dir, manifest_name), &(bool){0}, &(Error){0}),
                *found = root ? list_files(dir, err) : NULL;
    json_array_foreach(json_object_get(root, "files"), i, entry) {
        if (has_file(found, entry) && !verify_file(dir, entry, err)) return false;
    }
    return !err->code;
}

bool checkpoint_is_ours(const char *dir, Error *err) {
    const char *path = PATH_IN(dir, manifest_name), *shards = PATH_IN(dir, shards_manifest_name);
    bool exists, was_read = false;
    size_t i;
    Error why = {0};
    const json_t *found;
    if (readlink(dir, (char[1]){0}, 1) >= 0) return true;  // a link
    if (!path_find(path, &exists, err)) return false;
    if (!exists && !path_find(path = shards, &exists, err)) return false;
    json_auto_t *root = exists ? read_manifest(path, &was_read, &why) : NULL;
    if (exists && !was_read) *err = why;
    json_auto_t *files = err->code ? NULL : list_files(dir, err);
    json_array_foreach(files, i, found) {
        const char *name = json_string_value(json_object_get(found, "name"));
        if (!has_file(json_object_get(root, "files"), found) &&
            (!root || strcmp(name, strrchr(path, '/') + 1) != 0))
            error_set(err, EXIT_USAGE, "move it elsewhere, or give another --out",
                      "%s/%s: expected what this program wrote, as its manifest names it, found "
                      "another file",
                      dir, name);
    }
    return !err->code;
}

// ---- Writing ------------------------------------------------------------------------------------

void checkpoint_abort(Checkpoint *ck) {
    if (!ck->files) return;
    dir_remove_tree(ck->dir, &(Error){0});
    json_decref(ck->files);
    ck->files = NULL;
}

bool checkpoint_begin(Checkpoint *ck, const char *out_dir, int64_t step, const char *name,
                      Error *err) {
    ck->step = step;
    ck->files = NULL;
    if (!path_printf(ck->out_dir, err, "%s", out_dir)) return false;
    if (name)
        path_in(ck->publish, out_dir, name);
    else
        checkpoint_step_path(ck->publish, out_dir, step);
    if (!dir_free_name(ck->dir, ck->publish, TEMPORARY, err)) return false;
    if (mkdir(ck->dir, 0777) != 0) return disk_error(err, ck->dir, "cannot create the directory");
    ck->files = json_array();
    return true;
}

void checkpoint_register(Checkpoint *ck, const char *file, uint64_t size_bytes, uint32_t crc) {
    assert(path_is_plain_name(file) && strcmp(file, manifest_name) != 0);
    json_array_append_new(
        ck->files, json_pack("{s:s, s:I, s:o}", "name", file, "size_bytes", (int64_t)size_bytes,
                             "crc32c", json_sprintf("%08x", crc)));
}

bool checkpoint_write_file(Checkpoint *ck, const char *file, const void *data, size_t n,
                           Error *err) {
    if (!file_create(PATH_IN(ck->dir, file), data, n, err)) return false;
    checkpoint_register(ck, file, n, crc32c(0, data, n));
    return true;
}

bool checkpoint_register_all(Checkpoint *ck, Error *err) {
    json_decref(ck->files);
    ck->files = list_files(ck->dir, err);
    return ck->files != NULL;
}

bool checkpoint_write_text(Checkpoint *ck, const char *file, char *text, Error *err) {
    AUTO_FREE char *own = text;
    return checkpoint_write_file(ck, file, own, strlen(own), err);
}

// ---- Publishing ---------------------------------------------------------------------------------

// Renames the file or directory at `path`. By the mark checkpoint_recover finds ours again; a mark
// for files of others is never looked for.
static bool set_aside(const char *path, const char *mark, char aside[IO_PATH_MAX], Error *err) {
    Error why = {0};
    const bool ours = checkpoint_is_ours(path, &why), foreign = why.code == EXIT_USAGE;
    if (!ours && !foreign) *err = why;
    if (err->code || !dir_free_name(aside, path, ours ? mark : ".kept-", err) ||
        !io_rename(path, aside, err))
        return false;
    if (foreign) warning("%s: kept as %s", why.what, aside);
    return true;
}

// Renames an older checkpoint to `old` first, and back when the new one cannot take its place.
static bool swap_in(Checkpoint *ck, char old[IO_PATH_MAX], Error *err) {
    const bool replaces = path_exists(ck->publish);
    if (replaces && !set_aside(ck->publish, REPLACED, old, err)) return false;
    if (io_rename(ck->dir, ck->publish, err)) return true;
    if (replaces) io_rename(old, ck->publish, &(Error){0});
    return false;
}

bool checkpoint_publish(Checkpoint *ck, Error *err) {
    char old[IO_PATH_MAX] = "";
    if (!manifest_write(ck, err) || !dir_sync(ck->dir, err) || !swap_in(ck, old, err)) {
        checkpoint_abort(ck);
        return false;
    }
    json_decref(ck->files);
    ck->files = NULL;
    if (!dir_sync(ck->out_dir, err)) return false;             // perhaps not yet durable: keep old
    if (old[0]) checkpoint_recover(ck->out_dir, &(Error){0});  // failing costs space, not safety
    return true;
}

// ---- Housekeeping -------------------------------------------------------------------------------

static int newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}

void steps_free(Steps *steps) { free(steps->list); }

bool checkpoint_list(Steps *steps, const char *out_dir, Error *err) {
    size_t capacity = 0;
    int64_t step;
    DIR *dir = opendir(out_dir);
    if (!dir) return errno == ENOENT || disk_error(err, out_dir, "cannot open the directory");
    for (struct dirent *e; (e = readdir(dir));) {
        if (!checkpoint_parse_step(e->d_name, &step)) continue;
        array_grow(steps->list, &capacity, (size_t)steps->n + 1, "checkpoints");
        steps->list[steps->n++] = step;
    }
    closedir(dir);
    if (steps->n > 1) qsort(steps->list, (size_t)steps->n, sizeof step, newest_first);
    return true;
}

// Leftovers of killed runs: unfinished directories are removed; so is one that was being replaced,
// unless its successor is missing: then it gets its name back.
static bool recover_entry(const char *out_dir, const char *name, Error *err) {
    const char *path = PATH_IN(out_dir, name);
    char base[256];
    bool has_successor;
    const bool is_old = is_leftover(name, REPLACED, base),
               is_temp = is_leftover(name, TEMPORARY, base),
               is_file = path_ends_with(name, FILE_REPLACED);
    if (!is_old && !is_temp && !is_file) return true;
    if (is_file) return unlink(path) == 0 || disk_error(err, path, "cannot remove");
    const char *whole = PATH_IN(out_dir, base);
    if (!path_find(whole, &has_successor, err)) return false;
    if (is_old && !has_successor) return io_rename(path, whole, err);
    return dir_remove_tree(path, err);
}

bool checkpoint_recover(const char *out_dir, Error *err) {
    DIR *dir = opendir(out_dir);
    if (!dir) return errno == ENOENT || disk_error(err, out_dir, "cannot open the directory");
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(dir));) ok = recover_entry(out_dir, e->d_name, err);
    closedir(dir);
    return ok;
}

// No reader takes it for a checkpoint then, and once that is durable checkpoint_recover removes it.
static bool remove_one(const char *path, Error *err) {
    char aside[IO_PATH_MAX];
    return set_aside(path, TEMPORARY, aside, err);
}

bool checkpoint_prune(const char *out_dir, int64_t step, int keep, Error *err) {
    char dir[IO_PATH_MAX];
    STEPS steps = {0};
    int kept = 0;
    bool ok = checkpoint_list(&steps, out_dir, err);
    for (int i = 0; ok && keep > 0 && i < steps.n; i++) {
        Error why = {0};
        checkpoint_step_path(dir, out_dir, steps.list[i]);
        if (steps.list[i] > step || !path_exists(PATH_IN(dir, manifest_name)) || kept++ < keep)
            continue;
        if (checkpoint_is_ours(dir, &why))
            ok = remove_one(dir, err);
        else if (why.code != EXIT_USAGE)
            ok = false, *err = why;
        else if (kept == keep + 1)  // not at each save
            warning("%s: the checkpoint is kept", why.what);
    }
    return ok && dir_sync(out_dir, err) && checkpoint_recover(out_dir, err);
}

// final/ and all checkpoints, the oldest first
static bool for_all(const char *out_dir, bool (*call)(const char *path, Error *err), Error *err) {
    STEPS steps = {0};
    char path[IO_PATH_MAX];
    bool ok = checkpoint_list(&steps, out_dir, err) &&
              (!path_exists(path_in(path, out_dir, "final")) || call(path, err));
    while (ok && steps.n-- > 0)
        ok = call(checkpoint_step_path(path, out_dir, steps.list[steps.n]), err);
    return ok;
}

bool checkpoint_may_remove_all(const char *out_dir, Error *err) {
    return for_all(out_dir, checkpoint_is_ours, err);
}

bool checkpoint_remove_all(const char *out_dir, Error *err) {
    return checkpoint_recover(out_dir, err) && for_all(out_dir, remove_one, err) &&
           dir_sync(out_dir, err) && checkpoint_recover(out_dir, err);
}

// ---- The newest good one ------------------------------------------------------------------------

bool checkpoint_find_newest(const char *out, char path[IO_PATH_MAX], int64_t *step, Error *err) {
    STEPS steps = {0};
    int64_t found = -1;
    *step = -1;
    if (!checkpoint_list(&steps, out, err)) return false;
    for (int i = 0; *step < 0 && i < steps.n; i++) {
        const int64_t expected = steps.list[i];
        Error why = {0};
        if (checkpoint_verify(checkpoint_step_path(path, out, expected), &found, &why) &&
            found != expected)
            error_set(&why, EXIT_BAD_INPUT, "was the directory renamed?",
                      "%s: manifest.json: expected step %ld, found %ld", path, expected, found);
        if (!why.code)
            *step = expected;
        else
            warning("skipping %s: %s", path, why.what);
    }
    if (*step >= 0 || steps.n == 0) return true;
    return error_set(err, EXIT_BAD_INPUT,
                     "restore a backup; --overwrite starts over, unless files were cut or added",
                     "%s: expected a good checkpoint, found %d damaged", out, steps.n);
}
