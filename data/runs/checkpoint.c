#include "checkpoint.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
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

bool checkpoint_step_path(char path[IO_PATH_MAX], const char *out_dir, int64_t step, Error *err) {
    char name[32];
    snprintf(name, sizeof name, "step-%08ld", step);
    return path_join(path, out_dir, name, err);
}

bool checkpoint_parse_step(const char *name, int64_t *step) {
    char canonical[64];
    if (strncmp(name, "step-", 5) != 0 || strlen(name) > 5 + 18) return false;
    *step = strtoll(name + 5, NULL, 10);
    snprintf(canonical, sizeof canonical, "step-%08ld", *step);
    return *step >= 0 && strcmp(canonical, name) == 0;
}

// Do checkpoints have files of this name?
static bool is_file_name(const char *name) {
    return path_ends_with(name, ".json") || path_ends_with(name, ".safetensors") ||
           path_ends_with(name, ".jinja") || path_ends_with(name, "merges.txt") ||
           path_ends_with(name, "tokenizer.model");
}

// Is the name one of a checkpoint, and then the mark, as in step-00000100.tmp-4711?
static bool is_leftover(const char *name, const char *mark, char base[256]) {
    int64_t step;
    snprintf(base, 256, "%.*s", (int)strcspn(name, "."), name);
    return fnmatch(mark, name + strlen(base), FNM_EXTMATCH) == 0 &&
           (strcmp(base, "final") == 0 || checkpoint_parse_step(base, &step));
}

// ---- manifest.json ------------------------------------------------------------------------------

static const char manifest_name[] = "manifest.json", format_name[] = "unpad checkpoint 1";

// The last line, with the checksum of the text before it
enum { TAIL_BYTES = sizeof ",\n  \"manifest_crc32c\": \"01234567\"\n}\n" - 1 };
static void write_tail(char text[TAIL_BYTES + 1], uint32_t crc) {
    snprintf(text, TAIL_BYTES + 1, ",\n  \"manifest_crc32c\": \"%08x\"\n}\n", crc);
}

static bool manifest_write(const Checkpoint *ck, Error *err) {
    char path[IO_PATH_MAX], tail[TAIL_BYTES + 1];
    char *text = json_write(
        json_pack("{s:s, s:I, s:O}", "format", format_name, "step", ck->step, "files", ck->files),
        JSON_INDENT(2));
    const size_t n = strlen(text) - strlen("\n}\n");  // the tail closes the object
    FileWriter w;
    write_tail(tail, crc32c(0, text, n));
    const bool ok = path_join(path, ck->dir, manifest_name, err) && writer_open(&w, path, err) &&
                    writer_write(&w, text, n, err) && writer_write(&w, tail, TAIL_BYTES, err) &&
                    writer_close(&w, err);
    free(text);
    return ok;
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
    File f;
    char path[IO_PATH_MAX];
    const char *name = NULL, *crc = NULL;
    int64_t size_bytes = 0;
    if (!json_get_string(entry, "name", &name, true, err) ||
        !json_get_int64(entry, "size_bytes", 0, (int64_t)1 << 52, &size_bytes, true, err) ||
        !json_get_string(entry, "crc32c", &crc, true, err) || !path_is_plain_name(name))
        return bad_input(err, "files: expected name, size_bytes and crc32c");
    if (!path_join(path, dir, name, err)) return false;
    if (!file_open(&f, path, "the checkpoint is incomplete", err)) return false;
    bool ok = verify_contents(&f, (uint64_t)size_bytes, crc, err);
    file_close(&f);
    return ok;
}

static json_t *read_manifest(const char *dir, Error *err) {
    char path[IO_PATH_MAX], tail[TAIL_BYTES + 1];
    uint64_t n = 0;
    json_t *root = NULL;
    if (!path_join(path, dir, manifest_name, err)) return NULL;
    char *text = file_read_all(path, JSON_MAX_CONFIG, &n, "the checkpoint is incomplete", err);
    if (!text) return NULL;
    const size_t length = strlen(text), body = length > TAIL_BYTES ? length - TAIL_BYTES : 0;
    write_tail(tail, crc32c(0, text, body));
    if (length != n || strcmp(text + body, tail) != 0)
        bad_input(err, "%s: CRC32C: expected its last line to match the rest", path);
    else
        root = json_parse(text, (size_t)n, path, err);
    free(text);
    return root;
}

bool checkpoint_verify(const char *dir, int64_t *step, Error *err) {
    json_auto_t *root = read_manifest(dir, err);
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
    assert(step >= 0 && (!name || strcmp(name, "final") == 0));
    if (!path_printf(ck->out_dir, err, "%s", out_dir) ||
        !(name ? path_join(ck->publish, out_dir, name, err)
               : checkpoint_step_path(ck->publish, out_dir, step, err)) ||
        !dir_free_name(ck->dir, ck->publish, ".tmp-", err))
        return false;
    if (mkdir(ck->dir, 0777) != 0) return disk_error(err, ck->dir, "cannot create the directory");
    ck->files = json_array();
    return true;
}

void checkpoint_register(Checkpoint *ck, const char *file, uint64_t size_bytes, uint32_t crc) {
    assert(path_is_plain_name(file) && is_file_name(file) && strcmp(file, manifest_name) != 0);
    json_array_append_new(
        ck->files, json_pack("{s:s, s:I, s:o}", "name", file, "size_bytes", (int64_t)size_bytes,
                             "crc32c", json_sprintf("%08x", crc)));
}

bool checkpoint_write_file(Checkpoint *ck, const char *file, const void *data, size_t n,
                           Error *err) {
    char path[IO_PATH_MAX];
    if (!path_join(path, ck->dir, file, err) || !file_create(path, data, n, err)) return false;
    checkpoint_register(ck, file, n, crc32c(0, data, n));
    return true;
}

bool checkpoint_write_text(Checkpoint *ck, const char *file, char *text, Error *err) {
    const bool ok = checkpoint_write_file(ck, file, text, strlen(text), err);
    free(text);
    return ok;
}

// ---- Publishing ---------------------------------------------------------------------------------

// Renames an older checkpoint to `old` first, and back when the new one cannot take its place.
static bool swap_in(Checkpoint *ck, char old[IO_PATH_MAX], Error *err) {
    const bool replaces = path_exists(ck->publish);
    if (replaces &&
        !(dir_free_name(old, ck->publish, ".old-", err) && io_rename(ck->publish, old, err)))
        return false;
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
    if (!dir_sync(ck->out_dir, err)) return false;  // perhaps not yet durable: keep old
    dir_remove_tree(old, &(Error){0});              // failing costs space, not safety
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

// Is a directory complete, or does it hold what a save or a removal leaves, and nothing else?
static bool is_ours(const char *path) {
    DIR *dir = opendir(path);
    bool ours = dir != NULL;
    for (struct dirent *e; ours && (e = readdir(dir));)
        ours = strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
               (e->d_type != DT_DIR && is_file_name(e->d_name));
    if (dir) closedir(dir);
    return ours || checkpoint_verify(path, NULL, &(Error){0});
}

// Leftovers of killed runs: unfinished directories are removed; so is one that was being replaced,
// unless its successor is missing: then it gets its name back.
static bool recover_entry(const char *out_dir, const char *name, bool warns, Error *err) {
    char path[IO_PATH_MAX], whole[IO_PATH_MAX], base[256];
    bool has_successor;
    const bool is_old = is_leftover(name, ".old-+([0-9])", base),
               is_temp = is_leftover(name, ".tmp-+([0-9])", base),
               is_probe = fnmatch(".probe?(d)-+([0-9])", name, FNM_EXTMATCH) == 0;
    if (!is_old && !is_temp && !is_probe) return true;
    if (!path_join(path, out_dir, name, err)) return false;
    if (!(is_probe ? dir_is_probe(path) : is_ours(path))) {
        if (warns) warning("%s: named like a leftover of a save, but no save made it: kept", path);
        return true;
    }
    if (is_probe) return unlink(path) == 0 || disk_error(err, path, "cannot remove");
    if (!path_join(whole, out_dir, base, err) || !path_find(whole, &has_successor, err))
        return false;
    if (is_old && !has_successor) return io_rename(path, whole, err);
    return dir_remove_tree(path, err);
}

bool checkpoint_recover(const char *out_dir, bool warns, Error *err) {
    DIR *dir = opendir(out_dir);
    if (!dir) return errno == ENOENT || disk_error(err, out_dir, "cannot open the directory");
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(dir));)
        ok = recover_entry(out_dir, e->d_name, warns, err);
    closedir(dir);
    return ok;
}

static bool is_link(const char *path) { return readlink(path, (char[1]){0}, 1) >= 0; }

bool checkpoint_prune(const char *out_dir, int64_t step, int keep, Error *err) {
    char dir[IO_PATH_MAX], manifest[IO_PATH_MAX];
    STEPS steps = {0};
    int kept = 0;
    bool ok = checkpoint_recover(out_dir, false, err) && checkpoint_list(&steps, out_dir, err);
    for (int i = 0; ok && keep > 0 && i < steps.n; i++) {
        ok = checkpoint_step_path(dir, out_dir, steps.list[i], err) &&
             path_join(manifest, dir, manifest_name, err);
        const bool complete = ok && path_exists(manifest);
        if (!ok || steps.list[i] > step || (complete && kept++ < keep)) continue;
        // the manifest first: the rest of the directory can never be taken for a checkpoint
        ok = (!complete || is_link(dir) || unlink(manifest) == 0 ||
              disk_error(err, manifest, "cannot remove")) &&
             dir_remove_tree(dir, err);
    }
    return ok;
}

// Renames a directory so that no reader takes it for a checkpoint; checkpoint_recover removes it.
static bool set_aside(const char *path, Error *err) {
    char aside[IO_PATH_MAX];
    if (is_link(path)) return dir_remove_tree(path, err);
    return !path_exists(path) ||
           (dir_free_name(aside, path, ".tmp-", err) && io_rename(path, aside, err));
}

bool checkpoint_remove_all(const char *out_dir, Error *err) {
    STEPS steps = {0};
    char path[IO_PATH_MAX];
    bool ok = checkpoint_recover(out_dir, false, err) && checkpoint_list(&steps, out_dir, err) &&
              path_join(path, out_dir, "final", err) && set_aside(path, err);
    while (ok && steps.n-- > 0)  // the oldest first
        ok = checkpoint_step_path(path, out_dir, steps.list[steps.n], err) && set_aside(path, err);
    return ok && dir_sync(out_dir, err) && checkpoint_recover(out_dir, false, err);
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
        if (!checkpoint_step_path(path, out, expected, err)) return false;
        if (checkpoint_verify(path, &found, &why) && found != expected)
            error_set(&why, EXIT_BAD_INPUT, "was the directory renamed?",
                      "%s: manifest.json: expected step %ld, found %ld", path, expected, found);
        if (!why.code)
            *step = expected;
        else
            warning("skipping %s: %s", path, why.what);
    }
    if (*step >= 0 || steps.n == 0) return true;
    return error_set(err, EXIT_BAD_INPUT, "--overwrite starts over here; or restore a backup",
                     "%s: expected a good checkpoint, found %d damaged", out, steps.n);
}
