#include "checkpoint.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../base/dir.h"
#include "../base/error.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "../base/path.h"

// ------------------------------------------------------------------------------------------------
// Names

bool checkpoint_parse_step(const char *name, int64_t *step) {
    char canonical[64];
    if (strncmp(name, "step-", 5) != 0 || strlen(name) > 5 + 18) return false;
    *step = strtoll(name + 5, NULL, 10);
    snprintf(canonical, sizeof canonical, "step-%08lld", (long long)*step);
    return *step >= 0 && strcmp(canonical, name) == 0;
}

// Is it <ours><mark><pid>, as in step-00000100.tmp-4711? *length: that of <ours>.
static bool checkpoint_is_leftover(const char *name, const char *mark, size_t *length) {
    char base[64];
    int64_t step;
    const char *at = strstr(name, mark);
    if (!at || (size_t)(at - name) >= sizeof base) return false;
    const char *pid = at + strlen(mark);
    *length = (size_t)(at - name);
    snprintf(base, sizeof base, "%.*s", (int)*length, name);
    if (!*pid || pid[strspn(pid, "0123456789")]) return false;
    return strcmp(base, "final") == 0 || checkpoint_parse_step(base, &step);
}

// ------------------------------------------------------------------------------------------------
// Writing

void checkpoint_abort(Checkpoint *ck) {
    Error ignored = {0, "", ""};
    if (ck->active) dir_remove_tree(ck->dir, &ignored);
    ck->active = false;
}

bool checkpoint_begin(Checkpoint *ck, const char *out_dir, int64_t step, const char *name,
                      Error *err) {
    char numbered[64];
    ck->step = step;
    ck->num_files = 0;
    ck->active = false;
    if (step < 0 || (name && strcmp(name, "final") != 0))
        return error_set(err, EXIT_USAGE, "", "%s: checkpoint of step %lld, name %s: not possible",
                         out_dir, (long long)step, name ? name : "(none)");
    snprintf(numbered, sizeof numbered, "step-%08lld", (long long)step);
    if (!name) name = numbered;
    if (!path_printf(ck->out_dir, sizeof ck->out_dir, err, "%s", out_dir) ||
        !path_join(ck->publish, sizeof ck->publish, out_dir, name, err) ||
        !path_printf(ck->dir, sizeof ck->dir, err, "%s.tmp-%ld", ck->publish, (long)getpid()))
        return false;
    if (!dir_remove_tree(ck->dir, err)) return false;  // of a dead process that had our number
    if (mkdir(ck->dir, 0777) != 0) return disk_error(err, ck->dir, "cannot create the directory");
    ck->active = true;
    return true;
}

bool checkpoint_path(const Checkpoint *ck, const char *file, char *path, size_t capacity,
                     Error *err) {
    return path_join(path, capacity, ck->dir, file, err);
}

bool checkpoint_register(Checkpoint *ck, const char *file, uint64_t size_bytes, uint32_t crc,
                         Error *err) {
    bool good = path_is_plain_name(file) && strlen(file) < CHECKPOINT_NAME_MAX &&
                strcmp(file, "manifest.json") != 0 && ck->num_files < CHECKPOINT_MAX_FILES;
    for (int i = 0; i < ck->num_files; i++)
        if (strcmp(ck->files[i].name, file) == 0) good = false;
    if (!good)
        return error_set(err, EXIT_USAGE, "",
                         "%s: cannot register \"%.100s\": bad name, twice, or too many", ck->dir,
                         file);
    CheckpointFile *f = &ck->files[ck->num_files++];
    text_copy(f->name, sizeof f->name, file);
    f->size_bytes = size_bytes;
    f->crc = crc;
    return true;
}

bool checkpoint_write_file(Checkpoint *ck, const char *file, const void *data, size_t n,
                           Error *err) {
    FileWriter w;
    char path[IO_PATH_MAX];
    return checkpoint_path(ck, file, path, sizeof path, err) && writer_open(&w, path, err) &&
           writer_write(&w, data, n, err) && writer_close(&w, err) &&
           checkpoint_register(ck, file, w.size_bytes, w.crc, err);
}

// ------------------------------------------------------------------------------------------------
// Manifest: JSON whose last line is the CRC32C of all bytes before it, so that no flipped bit goes
// unseen

#define CHECKPOINT_FORMAT "unpad checkpoint 1"

void checkpoint_tail(char *text, size_t capacity, uint32_t crc) {
    snprintf(text, capacity, ",\n  \"manifest_crc32c\": \"%08x\"\n}\n", crc);
}

static bool checkpoint_write_entries(const Checkpoint *ck, FileWriter *w, Error *err) {
    char text[1024], crc[16];
    JsonWriter json;
    for (int i = 0; i < ck->num_files; i++) {
        const CheckpointFile *f = &ck->files[i];
        snprintf(crc, sizeof crc, "%08x", f->crc);
        json_writer_init(&json, text, sizeof text, 0);
        json_put_text(&json, i ? ",\n    " : "\n    ");
        json_begin(&json, NULL, '{');
        json_string(&json, "name", f->name);
        json_int(&json, "size_bytes", (int64_t)f->size_bytes);
        json_string(&json, "crc32c", crc);
        json_end(&json, '}');
        if (!writer_write(w, text, json.n, err)) return false;
    }
    return true;
}

static bool checkpoint_write_manifest(const Checkpoint *ck, Error *err) {
    FileWriter w;
    char path[IO_PATH_MAX], text[256];
    if (!checkpoint_path(ck, "manifest.json", path, sizeof path, err) ||
        !writer_open(&w, path, err))
        return false;
    snprintf(text, sizeof text, "{\n  \"format\": \"%s\",\n  \"step\": %lld,\n  \"files\": [",
             CHECKPOINT_FORMAT, (long long)ck->step);
    if (!writer_write(&w, text, strlen(text), err) || !checkpoint_write_entries(ck, &w, err) ||
        !writer_write(&w, "\n  ]", 4, err))
        return false;
    checkpoint_tail(text, sizeof text, w.crc);
    return writer_write(&w, text, strlen(text), err) && writer_close(&w, err);
}

// ------------------------------------------------------------------------------------------------
// Publishing

// old is put out of the way, or back when the new one cannot take its place.
static bool checkpoint_swap_in(Checkpoint *ck, const char *old, Error *err) {
    Error ignored = {0, "", ""};
    bool replaces = path_exists(ck->publish);
    if (replaces && !(dir_remove_tree(old, err) && io_rename(ck->publish, old, err))) return false;
    if (io_rename(ck->dir, ck->publish, err)) return true;
    if (replaces) io_rename(old, ck->publish, &ignored);
    return false;
}

bool checkpoint_publish(Checkpoint *ck, Error *err) {
    char old[IO_PATH_MAX];
    Error ignored = {0, "", ""};
    bool ok = path_printf(old, sizeof old, err, "%s.old-%ld", ck->publish, (long)getpid()) &&
              checkpoint_write_manifest(ck, err) && dir_sync(ck->dir, err) &&
              checkpoint_swap_in(ck, old, err);
    if (!ok) {
        checkpoint_abort(ck);
        return false;
    }
    ck->active = false;
    if (!dir_sync(ck->out_dir, err))
        return false;                // there, complete, but perhaps not for long: keep old
    dir_remove_tree(old, &ignored);  // failing costs space, not safety
    return true;
}

// ------------------------------------------------------------------------------------------------
// Housekeeping

static int checkpoint_newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}

bool checkpoint_list(const char *out_dir, int64_t **steps, int *count, Error *err) {
    int capacity = 0;
    int64_t step;
    *steps = NULL;
    *count = 0;
    DIR *dir = opendir(out_dir);
    if (!dir) return errno == ENOENT || disk_error(err, out_dir, "cannot open the directory");
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(dir));) {
        if (!checkpoint_parse_step(e->d_name, &step)) continue;
        if (*count == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            int64_t *grown = realloc(*steps, (size_t)capacity * sizeof *grown);
            ok = grown || error_memory(err, out_dir, (uint64_t)capacity * sizeof *grown);
            if (grown) *steps = grown;
        }
        if (ok) (*steps)[(*count)++] = step;
    }
    closedir(dir);
    if (*count > 1) qsort(*steps, (size_t)*count, sizeof **steps, checkpoint_newest_first);
    return ok;
}

// Leftovers of killed runs: unfinished ones go; one that was being replaced goes, or comes back if
// its successor never arrived.
static bool checkpoint_recover_entry(const char *out_dir, const char *name, Error *err) {
    char path[IO_PATH_MAX], base[IO_PATH_MAX];
    size_t length = 0;
    bool is_old = checkpoint_is_leftover(name, ".old-", &length);
    bool is_temp = !is_old && checkpoint_is_leftover(name, ".tmp-", &length);
    bool is_probe = strncmp(name, ".probe", 6) == 0;
    if (!is_old && !is_temp && !is_probe) return true;
    if (!path_join(path, sizeof path, out_dir, name, err)) return false;
    if (is_probe) return unlink(path) == 0 || disk_error(err, path, "cannot remove");
    if (!path_printf(base, sizeof base, err, "%s/%.*s", out_dir, (int)length, name)) return false;
    if (is_old && !path_exists(base)) return io_rename(path, base, err);
    return dir_remove_tree(path, err);
}

bool checkpoint_recover(const char *out_dir, Error *err) {
    DIR *dir = opendir(out_dir);
    if (!dir) return errno == ENOENT || disk_error(err, out_dir, "cannot open the directory");
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(dir));)
        ok = checkpoint_recover_entry(out_dir, e->d_name, err);
    closedir(dir);
    return ok;
}

// The manifest first: what is left after a kill in between can no longer be taken for a checkpoint.
static bool checkpoint_remove(const char *out_dir, int64_t step, bool has_manifest, Error *err) {
    char dir[IO_PATH_MAX], manifest[IO_PATH_MAX];
    if (!path_printf(dir, sizeof dir, err, "%s/step-%08lld", out_dir, (long long)step) ||
        !path_join(manifest, sizeof manifest, dir, "manifest.json", err))
        return false;
    if (has_manifest && unlink(manifest) != 0) return disk_error(err, manifest, "cannot remove");
    return dir_remove_tree(dir, err);
}

bool checkpoint_has_manifest(const char *out_dir, int64_t step) {
    char path[IO_PATH_MAX];
    Error ignored = {0, "", ""};
    return path_printf(path, sizeof path, &ignored, "%s/step-%08lld/manifest.json", out_dir,
                       (long long)step) &&
           path_exists(path);
}

bool checkpoint_prune(const char *out_dir, int64_t step, int keep, Error *err) {
    int64_t *steps;
    int count = 0, kept = 0;
    bool ok = checkpoint_recover(out_dir, err) && checkpoint_list(out_dir, &steps, &count, err);
    if (!ok) return false;
    for (int i = 0; ok && keep > 0 && i < count; i++) {
        bool has_manifest = checkpoint_has_manifest(out_dir, steps[i]);
        if (steps[i] > step || (has_manifest && kept++ < keep)) continue;
        ok = checkpoint_remove(out_dir, steps[i], has_manifest, err);
    }
    free(steps);
    return ok;
}

// Out of the readers' sight, for checkpoint_recover or this process to remove.
static bool checkpoint_set_aside(const char *out_dir, const char *name, Error *err) {
    char path[IO_PATH_MAX], aside[IO_PATH_MAX];
    return path_join(path, sizeof path, out_dir, name, err) &&
           path_printf(aside, sizeof aside, err, "%s.tmp-%ld", path, (long)getpid()) &&
           (!path_exists(path) || (dir_remove_tree(aside, err) && io_rename(path, aside, err)));
}

bool checkpoint_remove_all(const char *out_dir, Error *err) {
    int64_t *steps = NULL;
    int count = 0;
    char name[64];
    bool ok = checkpoint_recover(out_dir, err) && checkpoint_list(out_dir, &steps, &count, err) &&
              checkpoint_set_aside(out_dir, "final", err);
    while (ok && count-- > 0) {  // the oldest first
        snprintf(name, sizeof name, "step-%08lld", (long long)steps[count]);
        ok = checkpoint_set_aside(out_dir, name, err);
    }
    free(steps);
    return ok && dir_sync(out_dir, err) && checkpoint_recover(out_dir, err);
}

// ------------------------------------------------------------------------------------------------
// Verifying

static bool checkpoint_file_crc(const File *f, uint32_t *crc, Error *err) {
    unsigned char chunk[1 << 16];
    *crc = 0;
    for (uint64_t done = 0, n; done < f->size_bytes; done += n) {
        n = f->size_bytes - done < sizeof chunk ? f->size_bytes - done : sizeof chunk;
        if (!file_read_at(f, chunk, n, done, err)) return false;
        *crc = crc32c(*crc, chunk, (size_t)n);
    }
    return true;
}

static bool checkpoint_verify_contents(const File *f, uint64_t size_bytes, const char *crc_text,
                                       Error *err) {
    char found[16];
    uint32_t crc = 0;
    if (f->size_bytes != size_bytes)
        return error_set(err, EXIT_BAD_INPUT, "", "%s: expected %llu bytes, found %llu", f->path,
                         (unsigned long long)size_bytes, (unsigned long long)f->size_bytes);
    if (!checkpoint_file_crc(f, &crc, err)) return false;
    snprintf(found, sizeof found, "%08x", crc);
    if (strcmp(found, crc_text) == 0) return true;
    return error_set(err, EXIT_BAD_INPUT, "", "%s: CRC32C: expected %.8s, found %s", f->path,
                     crc_text, found);
}

static bool checkpoint_verify_file(const char *dir, const cJSON *entry, Error *err) {
    File f;
    char path[IO_PATH_MAX];
    const char *name = NULL, *crc = NULL;
    int64_t size_bytes = 0;
    if (!cJSON_IsObject(entry) || !json_get_string(entry, "name", &name, true, err) ||
        !json_get_int64(entry, "size_bytes", 0, (int64_t)1 << 52, &size_bytes, true, err) ||
        !json_get_string(entry, "crc32c", &crc, true, err) || !path_is_plain_name(name))
        return error_set(err, EXIT_BAD_INPUT, "", "files: expected name, size_bytes and crc32c");
    if (!path_join(path, sizeof path, dir, name, err)) return false;
    if (!file_open(&f, path, "the checkpoint is incomplete", err)) return false;
    bool ok = checkpoint_verify_contents(&f, (uint64_t)size_bytes, crc, err);
    file_close(&f);
    return ok;
}

bool checkpoint_verify_manifest(const char *dir, const cJSON *root, int64_t *step, Error *err) {
    const char *format = NULL;
    const cJSON *files = json_member(root, "files"), *entry;
    if (!json_get_string(root, "format", &format, true, err) ||
        !json_get_int64(root, "step", 0, (int64_t)1 << 52, step, true, err))
        return false;
    if (strcmp(format, CHECKPOINT_FORMAT) != 0)
        return error_set(err, EXIT_BAD_INPUT, "", "format: expected \"%s\", found \"%.40s\"",
                         CHECKPOINT_FORMAT, format);
    if (!cJSON_IsArray(files))
        return error_set(err, EXIT_BAD_INPUT, "", "files: expected an array");
    cJSON_ArrayForEach(entry, files) {
        if (!checkpoint_verify_file(dir, entry, err)) return false;
    }
    return true;
}

cJSON *checkpoint_parse_manifest(const char *text, uint64_t n, const char *path, Error *err) {
    char tail[64];
    size_t length = strlen(text), body = length > CHECKPOINT_TAIL ? length - CHECKPOINT_TAIL : 0;
    checkpoint_tail(tail, sizeof tail, crc32c(0, text, body));
    if (length != n || strcmp(text + body, tail) != 0) {
        error_set(err, EXIT_BAD_INPUT, "", "%s: CRC32C: expected its last line to match the rest",
                  path);
        return NULL;
    }
    return json_parse(text, (size_t)n, path, err);
}

bool checkpoint_verify(const char *dir, int64_t *step, Error *err) {
    char path[IO_PATH_MAX];
    uint64_t n = 0;
    int64_t found = -1;
    if (!path_join(path, sizeof path, dir, "manifest.json", err)) return false;
    char *text = file_read_all(path, JSON_MAX_CONFIG, &n, "the checkpoint is incomplete", err);
    if (!text) return false;
    cJSON *root = checkpoint_parse_manifest(text, n, path, err);
    bool ok = root && checkpoint_verify_manifest(dir, root, &found, err);
    cJSON_Delete(root);
    free(text);
    if (ok && step) *step = found;
    return ok;
}

static bool checkpoint_verify_step(const char *dir, int64_t step, Error *err) {
    int64_t found = -1;
    if (!checkpoint_verify(dir, &found, err)) return false;
    return found == step || error_set(err, EXIT_BAD_INPUT, "was the directory renamed?",
                                      "%s: manifest.json: expected step %lld, found %lld", dir,
                                      (long long)step, (long long)found);
}

bool checkpoint_find_newest(const char *out_dir, char *path, size_t capacity, int64_t *step,
                            CheckpointReport report, void *context, Error *err) {
    int64_t *steps = NULL;
    int count = 0;
    bool found = false;
    *step = -1;
    if (!checkpoint_list(out_dir, &steps, &count, err)) count = 0;
    for (int i = 0; !found && !err->code && i < count; i++) {
        Error why = {0, "", ""};
        if (!path_printf(path, capacity, err, "%s/step-%08lld", out_dir, (long long)steps[i]))
            break;
        found = checkpoint_verify_step(path, steps[i], &why);
        if (found)
            *step = steps[i];
        else if (why.code == EXIT_HOST_MEMORY)
            *err = why;  // says nothing about the checkpoint
        else if (report)
            report(context, path, &why);
    }
    free(steps);
    if (found || err->code) return found;
    if (count == 0) return true;
    return error_set(err, EXIT_BAD_INPUT, "--overwrite starts over here; or restore a backup",
                     "%s: expected a good checkpoint, found %d damaged", out_dir, count);
}
