#include "manifest.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/file.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/path.h"

static const char file_name[] = "manifest.json", format_name[] = "unpad checkpoint 1";

// The last line, with the checksum of the text before it
enum { TAIL_BYTES = sizeof ",\n  \"manifest_crc32c\": \"01234567\"\n}\n" - 1 };
static void write_tail(char text[TAIL_BYTES + 1], uint32_t crc) {
    snprintf(text, TAIL_BYTES + 1, ",\n  \"manifest_crc32c\": \"%08x\"\n}\n", crc);
}

bool manifest_add(Manifest *m, const char *name, uint64_t size_bytes, uint32_t crc) {
    if (!path_is_plain_name(name) || strlen(name) >= MANIFEST_NAME_MAX ||
        strcmp(name, file_name) == 0 || m->num_files == MANIFEST_MAX_FILES)
        return false;
    for (int i = 0; i < m->num_files; i++)
        if (strcmp(m->files[i].name, name) == 0) return false;
    ManifestFile *f = &m->files[m->num_files++];
    text_copy(f->name, sizeof f->name, name);
    f->size_bytes = size_bytes;
    f->crc = crc;
    return true;
}

// ------------------------------------------------------------------------------------------------
// Writing

static bool write_entries(const Manifest *m, FileWriter *w, Error *err) {
    char text[1024], crc[16];
    JsonWriter json;
    for (int i = 0; i < m->num_files; i++) {
        const ManifestFile *f = &m->files[i];
        snprintf(crc, sizeof crc, "%08x", f->crc);
        json_writer_init(&json, text, sizeof text, 0);
        json_put_text(&json, i ? ",\n    " : "\n    ");
        json_begin(&json, NULL, '{');
        json_put_string(&json, "name", f->name);
        json_put_int(&json, "size_bytes", (int64_t)f->size_bytes);
        json_put_string(&json, "crc32c", crc);
        json_end(&json, '}');
        if (!writer_write(w, text, json.n, err)) return false;
    }
    return true;
}

bool manifest_write(const Manifest *m, const char *dir, Error *err) {
    FileWriter w;
    char path[IO_PATH_MAX], head[256], tail[TAIL_BYTES + 1];
    snprintf(head, sizeof head, "{\n  \"format\": \"%s\",\n  \"step\": %ld,\n  \"files\": [",
             format_name, m->step);
    if (!path_join(path, sizeof path, dir, file_name, err) || !writer_open(&w, path, err) ||
        !writer_write(&w, head, strlen(head), err) || !write_entries(m, &w, err) ||
        !writer_write(&w, "\n  ]", 4, err))
        return false;
    write_tail(tail, w.crc);
    return writer_write(&w, tail, TAIL_BYTES, err) && writer_close(&w, err);
}

// ------------------------------------------------------------------------------------------------
// Verifying

static bool file_crc(const File *f, uint32_t *crc, Error *err) {
    unsigned char chunk[1 << 16];
    *crc = 0;
    for (uint64_t done = 0, n; done < f->size_bytes; done += n) {
        n = f->size_bytes - done < sizeof chunk ? f->size_bytes - done : sizeof chunk;
        if (!file_read_at(f, chunk, n, done, err)) return false;
        *crc = crc32c(*crc, chunk, (size_t)n);
    }
    return true;
}

static bool verify_contents(const File *f, uint64_t size_bytes, const char *crc_text, Error *err) {
    char found[16];
    uint32_t crc = 0;
    if (f->size_bytes != size_bytes)
        return bad_input(err, "%s: expected %lu bytes, found %lu", f->path, size_bytes,
                         f->size_bytes);
    if (!file_crc(f, &crc, err)) return false;
    snprintf(found, sizeof found, "%08x", crc);
    if (strcmp(found, crc_text) == 0) return true;
    return bad_input(err, "%s: CRC32C: expected %.8s, found %s", f->path, crc_text, found);
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
    if (!path_join(path, sizeof path, dir, name, err)) return false;
    if (!file_open(&f, path, "the checkpoint is incomplete", err)) return false;
    bool ok = verify_contents(&f, (uint64_t)size_bytes, crc, err);
    file_close(&f);
    return ok;
}

static bool verify_files(const char *dir, const json_t *root, int64_t *step, Error *err) {
    const char *format = NULL;
    const json_t *files = json_member(root, "files"), *entry;
    size_t i;
    if (!json_get_string(root, "format", &format, true, err) ||
        !json_get_int64(root, "step", 0, (int64_t)1 << 52, step, true, err))
        return false;
    if (strcmp(format, format_name) != 0)
        return bad_input(err, "format: expected \"%s\", found \"%.40s\"", format_name, format);
    if (!json_is_array(files)) return bad_input(err, "files: expected an array");
    json_array_foreach(files, i, entry) {
        if (!verify_file(dir, entry, err)) return false;
    }
    return true;
}

static json_t *parse(const char *text, uint64_t n, const char *path, Error *err) {
    char tail[TAIL_BYTES + 1];
    size_t length = strlen(text), body = length > TAIL_BYTES ? length - TAIL_BYTES : 0;
    write_tail(tail, crc32c(0, text, body));
    if (length != n || strcmp(text + body, tail) != 0) {
        bad_input(err, "%s: CRC32C: expected its last line to match the rest", path);
        return NULL;
    }
    return json_parse(text, (size_t)n, path, err);
}

bool manifest_verify(const char *dir, int64_t *step, Error *err) {
    char path[IO_PATH_MAX];
    uint64_t n = 0;
    int64_t found = -1;
    if (!path_join(path, sizeof path, dir, file_name, err)) return false;
    char *text = file_read_all(path, JSON_MAX_CONFIG, &n, "the checkpoint is incomplete", err);
    if (!text) return false;
    json_auto_t *root = parse(text, n, path, err);
    bool ok = root && verify_files(dir, root, &found, err);
    free(text);
    if (ok && step) *step = found;
    return ok;
}
