#include "safetensors.h"

#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "../base/path.h"

// ------------------------------------------------------------------------------------------------
// Tensors

uint64_t tensor_dtype_size(const char *dtype) {
    static const struct {
        const char *name;
        int size;
    } known[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2},  {"F64", 8},     {"I64", 8},
                 {"I32", 4}, {"I16", 2},  {"I8", 1},   {"U8", 1},      {"U16", 2},
                 {"U32", 4}, {"U64", 8},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(dtype, known[i].name) == 0) return (uint64_t)known[i].size;
    return 0;
}

uint64_t tensor_num_elements(const TensorInfo *t) {
    uint64_t n = 1;  // cannot wrap: tensor_size_bytes checked it
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

static bool tensor_size_bytes(const TensorInfo *t, uint64_t *out, Error *err) {
    uint64_t n = tensor_dtype_size(t->dtype);
    if (n == 0)
        return error_set(err, EXIT_BAD_INPUT, "", "%s: expected a known dtype, found \"%s\"",
                         t->name, t->dtype);
    for (int i = 0; i < t->ndim; i++)
        if (!checked_mul(n, t->shape[i], &n))
            return error_set(err, EXIT_BAD_INPUT, "", "%s: shape: more than 2^64 bytes", t->name);
    *out = n;
    return true;
}

TensorInfo tensor_info(const char *name, const char *dtype, int ndim, uint64_t shape0,
                       uint64_t shape1) {
    TensorInfo t;
    memset(&t, 0, sizeof t);
    text_copy(t.name, sizeof t.name, name);
    text_copy(t.dtype, sizeof t.dtype, dtype);
    t.ndim = ndim;
    t.shape[0] = shape0;
    t.shape[1] = shape1;
    return t;
}

// ------------------------------------------------------------------------------------------------
// Header

static const int64_t safetensors_max_int = (int64_t)1 << 53;  // beyond, JSON numbers are not exact

static bool safetensors_parse_shape(TensorInfo *t, const json_t *entry, Error *err) {
    const json_t *shape = json_member(entry, "shape"), *dim;
    size_t i;
    if (!json_is_array(shape))
        return error_set(err, EXIT_BAD_INPUT, "", "shape: expected an array");
    json_array_foreach(shape, i, dim) {
        int64_t value = 0;
        if (t->ndim == SAFETENSORS_MAX_DIMS)
            return error_set(err, EXIT_BAD_INPUT, "",
                             "shape: expected at most %d dimensions, found more",
                             SAFETENSORS_MAX_DIMS);
        if (!json_int64_value(dim, "shape", 0, safetensors_max_int - 1, &value, err)) return false;
        t->shape[t->ndim++] = (uint64_t)value;
    }
    return true;
}

static bool safetensors_parse_offsets(TensorInfo *t, const json_t *entry, Error *err) {
    const json_t *offsets = json_member(entry, "data_offsets");
    const int64_t max = safetensors_max_int - 1;
    int64_t begin = 0, end = 0;
    if (json_array_size(offsets) != 2)
        return error_set(err, EXIT_BAD_INPUT, "", "data_offsets: expected [begin, end]");
    if (!json_int64_value(json_array_get(offsets, 0), "data_offsets", 0, max, &begin, err) ||
        !json_int64_value(json_array_get(offsets, 1), "data_offsets", begin, max, &end, err))
        return false;
    t->begin = (uint64_t)begin;
    t->end = (uint64_t)end;
    return true;
}

static bool safetensors_parse_entry(TensorInfo *t, const json_t *entry, Error *err) {
    const char *dtype = NULL;
    uint64_t size_bytes = 0;
    if (json_object_size(entry) != 3)
        return error_set(err, EXIT_BAD_INPUT, "", "expected {dtype, shape, data_offsets}");
    if (!json_get_string(entry, "dtype", &dtype, true, err)) return false;
    if (tensor_dtype_size(dtype) == 0)
        return error_set(err, EXIT_BAD_INPUT, "", "dtype: expected F32, BF16, ..., found \"%.20s\"",
                         dtype);
    text_copy(t->dtype, sizeof t->dtype, dtype);
    if (!safetensors_parse_shape(t, entry, err) || !safetensors_parse_offsets(t, entry, err) ||
        !tensor_size_bytes(t, &size_bytes, err))
        return false;
    if (t->end - t->begin != size_bytes)
        return error_set(err, EXIT_BAD_INPUT, "",
                         "data_offsets: expected %llu bytes for its shape and dtype, found %llu",
                         (unsigned long long)size_bytes, (unsigned long long)(t->end - t->begin));
    return true;
}

static bool safetensors_check_metadata(json_t *metadata, Error *err) {
    const char *key;
    const json_t *item;
    if (!json_is_object(metadata))
        return error_set(err, EXIT_BAD_INPUT, "", "__metadata__: expected an object");
    json_object_foreach(metadata, key, item) {
        if (!json_is_string(item)) return json_type_error(item, "__metadata__", "strings", err);
    }
    return true;
}

static bool safetensors_add(SafetensorsSet *s, const char *name, json_t *entry, int file,
                            Error *err) {
    if (strcmp(name, "__metadata__") == 0) return safetensors_check_metadata(entry, err);
    if ((size_t)s->num_tensors == s->tensors_capacity) {
        size_t capacity = s->tensors_capacity ? s->tensors_capacity * 2 : 64;
        TensorInfo *grown = realloc(s->tensors, capacity * sizeof *grown);
        if (!grown) return error_memory(err, "list of tensors", capacity * sizeof *grown);
        s->tensors = grown;
        s->tensors_capacity = capacity;
    }
    TensorInfo *t = &s->tensors[s->num_tensors];
    memset(t, 0, sizeof *t);
    size_t length = strlen(name);
    if (length == 0 || length >= sizeof t->name)
        return error_set(err, EXIT_BAD_INPUT, "", "tensor name: expected 1 to %zu bytes, found %zu",
                         sizeof t->name - 1, length);
    memcpy(t->name, name, length + 1);
    t->file = file;
    if (!safetensors_parse_entry(t, entry, err)) return error_prefix(err, t->name);
    s->num_tensors++;
    return true;
}

static int safetensors_by_offset(const void *a, const void *b) {
    const TensorInfo *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

static int safetensors_by_name(const void *a, const void *b) {
    const TensorInfo *x = a, *y = b;
    return strcmp(x->name, y->name);
}

// Tensors [first, num_tensors) of a file: one after another, 0 to data_bytes. Makes them absolute.
static bool safetensors_check_layout(SafetensorsSet *s, int first, uint64_t data_begin,
                                     uint64_t data_bytes, Error *err) {
    uint64_t expected = 0;
    if (s->num_tensors > first)
        qsort(s->tensors + first, (size_t)(s->num_tensors - first), sizeof *s->tensors,
              safetensors_by_offset);
    for (int i = first; i < s->num_tensors; i++) {
        TensorInfo *t = &s->tensors[i];
        if (t->begin != expected)
            return error_set(
                err, EXIT_BAD_INPUT, "",
                "%s: data_offsets: expected to begin at %llu, found %llu (hole or overlap)",
                t->name, (unsigned long long)expected, (unsigned long long)t->begin);
        expected = t->end;
        t->begin += data_begin;
        t->end += data_begin;
    }
    if (expected == data_bytes) return true;
    return error_set(err, EXIT_BAD_INPUT, "the file is truncated or damaged: make or copy it again",
                     "expected %llu bytes of tensors, found %llu", (unsigned long long)expected,
                     (unsigned long long)data_bytes);
}

static bool safetensors_parse_header(SafetensorsSet *s, const char *text, uint64_t n, int file,
                                     Error *err) {
    const File *f = &s->files[file].file;
    int first = s->num_tensors;
    const char *name;
    json_t *entry;
    if (text[0] != '{')
        return error_set(err, EXIT_BAD_INPUT, "", "%s: header: expected {", f->path);
    json_auto_t *root = json_parse(text, (size_t)n, f->path, err);
    if (!root) return false;
    json_object_foreach(root, name, entry) {
        if (!safetensors_add(s, name, entry, file, err)) return error_prefix(err, f->path);
    }
    return safetensors_check_layout(s, first, 8 + n, f->size_bytes - 8 - n, err) ||
           error_prefix(err, f->path);
}

static bool safetensors_read_header(SafetensorsSet *s, int file, Error *err) {
    const File *f = &s->files[file].file;
    uint64_t n = 0;
    if (!file_read_at(f, &n, 8, 0, err)) return false;
    if (n < 2 || n > SAFETENSORS_MAX_HEADER || n > f->size_bytes - 8)
        return error_set(err, EXIT_BAD_INPUT, "is it a safetensors file, and complete?",
                         "%s: header: expected 2 to %llu bytes, found %llu", f->path,
                         (unsigned long long)(f->size_bytes - 8), (unsigned long long)n);
    char *text = malloc((size_t)n);
    if (!text) return error_memory(err, f->path, n);
    bool ok = file_read_at(f, text, n, 8, err) && safetensors_parse_header(s, text, n, file, err);
    free(text);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// Opening

static bool safetensors_open_file(SafetensorsSet *s, const char *path, Error *err) {
    SafetensorsFile *f = &s->files[s->num_files];
    if (!path_printf(f->path, sizeof f->path, err, "%s", path)) return false;
    if (!file_open(&f->file, f->path, "expected a .safetensors file or the directory of a model",
                   err))
        return false;
    s->num_files++;
    return safetensors_read_header(s, s->num_files - 1, err);
}

static bool safetensors_sort(SafetensorsSet *s, Error *err) {
    if (s->num_tensors == 0) return true;
    qsort(s->tensors, (size_t)s->num_tensors, sizeof *s->tensors, safetensors_by_name);
    for (int i = 1; i < s->num_tensors; i++)
        if (strcmp(s->tensors[i - 1].name, s->tensors[i].name) == 0)
            return error_set(err, EXIT_BAD_INPUT, "",
                             "%s: tensor %s: expected in one file, found in two",
                             s->files[s->tensors[i].file].path, s->tensors[i].name);
    return true;
}

const TensorInfo *safetensors_find(const SafetensorsSet *s, const char *name) {
    int low = 0, high = s->num_tensors;
    while (low < high) {
        int middle = low + (high - low) / 2, order = strcmp(name, s->tensors[middle].name);
        if (order == 0) return &s->tensors[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static bool safetensors_add_shard(SafetensorsSet *s, const char *dir, const char *name,
                                  Error *err) {
    char path[IO_PATH_MAX];
    if (!path_is_plain_name(name))
        return error_set(err, EXIT_BAD_INPUT, "",
                         "weight_map: expected a plain file name, found \"%.100s\"", name);
    if (!path_join(path, sizeof path, dir, name, err)) return false;
    for (int i = s->num_files; i-- > 0;)
        if (strcmp(s->files[i].path, path) == 0) return true;
    if (s->num_files == SAFETENSORS_MAX_FILES)
        return error_set(err, EXIT_BAD_INPUT, "",
                         "weight_map: expected at most %d files, found more",
                         SAFETENSORS_MAX_FILES);
    return safetensors_open_file(s, path, err);
}

// In both directions: every tensor of the index is in its file, and no file holds another.
static bool safetensors_check_index(const SafetensorsSet *s, json_t *map, Error *err) {
    const char *name;
    const json_t *item;
    const int promised = (int)json_object_size(map);
    json_object_foreach(map, name, item) {
        const TensorInfo *t = safetensors_find(s, name);
        const char *path = t ? s->files[t->file].path : "", *slash = strrchr(path, '/');
        if (!t || strcmp(slash ? slash + 1 : path, json_string_value(item)) != 0)
            return error_set(err, EXIT_BAD_INPUT, "",
                             "weight_map: %.160s: expected in %.160s, not found there", name,
                             json_string_value(item));
    }
    if (promised == s->num_tensors) return true;
    return error_set(err, EXIT_BAD_INPUT, "",
                     "weight_map: expected all %d tensors of its files, found %d", s->num_tensors,
                     promised);
}

static bool safetensors_open_shards(SafetensorsSet *s, const char *dir, const json_t *root,
                                    Error *err) {
    const char *name;
    const json_t *item;
    json_t *map = json_member(root, "weight_map");
    if (json_object_size(map) == 0)
        return error_set(err, EXIT_BAD_INPUT, "",
                         "weight_map: expected an object of names and files");
    json_object_foreach(map, name, item) {
        if (!json_is_string(item)) return json_type_error(item, "weight_map", "file names", err);
        if (!safetensors_add_shard(s, dir, json_string_value(item), err)) return false;
    }
    return safetensors_sort(s, err) && safetensors_check_index(s, map, err);
}

static bool safetensors_open_index(SafetensorsSet *s, const char *path, Error *err) {
    char dir[IO_PATH_MAX];
    if (!path_parent(dir, sizeof dir, path, err)) return false;
    json_auto_t *root = json_read(
        path, 16 << 20, "expected model.safetensors or model.safetensors.index.json", err);
    return root && (safetensors_open_shards(s, dir, root, err) || error_prefix(err, path));
}

static bool safetensors_open_path(SafetensorsSet *s, const char *path, Error *err) {
    char inside[IO_PATH_MAX];
    if (path_is_dir(path)) {
        if (!path_join(inside, sizeof inside, path, "model.safetensors", err)) return false;
        if (!path_exists(inside) &&
            !path_join(inside, sizeof inside, path, "model.safetensors.index.json", err))
            return false;
        path = inside;
    }
    size_t n = strlen(path);
    bool index = n > 5 && strcmp(path + n - 5, ".json") == 0;
    size_t max_files = index ? SAFETENSORS_MAX_FILES : 1;  // never moved: File.path points into it
    s->files = calloc(max_files, sizeof *s->files);
    if (!s->files) return error_memory(err, path, max_files * sizeof *s->files);
    if (index) return safetensors_open_index(s, path, err);
    return safetensors_open_file(s, path, err) && safetensors_sort(s, err);
}

void safetensors_close(SafetensorsSet *s) {
    for (int i = 0; i < s->num_files; i++) file_close(&s->files[i].file);
    free(s->files);
    free(s->tensors);
    memset(s, 0, sizeof *s);
}

bool safetensors_open(SafetensorsSet *s, const char *dir_or_file, Error *err) {
    memset(s, 0, sizeof *s);
    if (safetensors_open_path(s, dir_or_file, err)) return true;
    safetensors_close(s);
    return false;
}

// ------------------------------------------------------------------------------------------------
// Reading tensors

bool safetensors_read_raw(const SafetensorsSet *s, const TensorInfo *t, void *out,
                          uint64_t first_byte, uint64_t n, Error *err) {
    uint64_t end = 0;
    const File *f = &s->files[t->file].file;
    if (!checked_add(first_byte, n, &end) || end > t->end - t->begin)
        return error_set(err, EXIT_BAD_INPUT, "",
                         "%s: %s: expected at least %llu bytes, found %llu", f->path, t->name,
                         (unsigned long long)end, (unsigned long long)(t->end - t->begin));
    return file_read_at(f, out, n, t->begin + first_byte, err);
}

static float float_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static float float_from_bf16(uint16_t bits) { return float_from_bits((uint32_t)bits << 16); }

static float float_from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31,
             mantissa = bits & 0x3ff;
    if (exponent == 31) return float_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent > 0) return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float subnormal = (float)mantissa * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}

static float float_from_raw(const unsigned char *p, const char *dtype) {
    if (dtype[0] == 'B' || dtype[1] == '1') {
        uint16_t half;
        memcpy(&half, p, 2);
        return dtype[0] == 'B' ? float_from_bf16(half) : float_from_f16(half);
    }
    if (dtype[1] == '6') {
        double wide;
        memcpy(&wide, p, 8);
        return (float)wide;
    }
    float single;
    memcpy(&single, p, 4);
    return single;
}

bool safetensors_read_f32(SafetensorsSet *s, const TensorInfo *t, float *out, uint64_t first,
                          uint64_t count, Error *err) {
    unsigned char raw[1 << 14];
    uint64_t size = tensor_dtype_size(t->dtype), total = tensor_num_elements(t);
    bool is_float = strcmp(t->dtype, "F32") == 0 || strcmp(t->dtype, "BF16") == 0 ||
                    strcmp(t->dtype, "F16") == 0 || strcmp(t->dtype, "F64") == 0;
    if (!is_float)
        return error_set(err, EXIT_BAD_INPUT, "",
                         "%s: %s: expected F32, BF16, F16 or F64, found %s", s->files[t->file].path,
                         t->name, t->dtype);
    if (first > total || count > total - first)
        return error_set(err, EXIT_BAD_INPUT, "",
                         "%s: %s: expected at least %llu elements, found %llu",
                         s->files[t->file].path, t->name, (unsigned long long)first + count,
                         (unsigned long long)total);
    for (uint64_t done = 0, n; done < count; done += n) {
        n = count - done < sizeof raw / size ? count - done : sizeof raw / size;
        if (!safetensors_read_raw(s, t, raw, (first + done) * size, n * size, err)) return false;
        for (uint64_t i = 0; i < n; i++) {
            out[done + i] = float_from_raw(raw + i * size, t->dtype);
            if (!isfinite(out[done + i])) s->num_nonfinite++;
        }
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// Writing

// `,"name":{...}` of a tensor that begins at `begin` (relative); the bytes used.
static size_t safetensors_entry(char *text, size_t capacity, const TensorInfo *t, uint64_t begin,
                                uint64_t size_bytes) {
    JsonWriter w;
    json_writer_init(&w, text, capacity, 0);
    json_put_text(&w, ", ");
    json_begin(&w, t->name, '{');
    json_put_string(&w, "dtype", t->dtype);
    json_begin(&w, "shape", '[');
    for (int i = 0; i < t->ndim; i++) json_put_int(&w, NULL, (int64_t)t->shape[i]);
    json_end(&w, ']');
    json_begin(&w, "data_offsets", '[');
    json_put_int(&w, NULL, (int64_t)begin);
    json_put_int(&w, NULL, (int64_t)(begin + size_bytes));
    json_end(&w, ']');
    json_end(&w, '}');
    return w.overflow ? 0 : w.n;
}

// The entries of all tensors; w NULL: only counts. *n: their length; *data_bytes: of the data.
static bool safetensors_entries(FileWriter *w, const TensorInfo *tensors, int num_tensors,
                                uint64_t *n, uint64_t *data_bytes, Error *err) {
    char text[2048];
    *n = *data_bytes = 0;
    for (int i = 0; i < num_tensors; i++) {
        uint64_t size_bytes = 0;
        if (!tensor_size_bytes(&tensors[i], &size_bytes, err)) return false;
        size_t length = safetensors_entry(text, sizeof text, &tensors[i], *data_bytes, size_bytes);
        if (length == 0) return error_set(err, EXIT_BAD_INPUT, "", "tensor name too long");
        if (w && !writer_write(w, text, length, err)) return false;
        *n += length;
        if (!checked_add(*data_bytes, size_bytes, data_bytes))
            return error_set(err, EXIT_BAD_INPUT, "", "tensors: more than 2^64 bytes");
    }
    return true;
}

static bool safetensors_write_header(SafetensorsWriter *w, const TensorInfo *tensors,
                                     int num_tensors, Error *err) {
    // transformers refuses a file without this
    static const char head[] = "{\"__metadata__\": {\"format\": \"pt\"}";
    uint64_t entries = 0, header, padding;
    if (!safetensors_entries(NULL, tensors, num_tensors, &entries, &w->data_bytes, err))
        return false;
    header = strlen(head) + entries + 1;
    padding = (8 - header % 8) % 8;
    header += padding;
    return writer_write(&w->file, &header, 8, err) &&
           writer_write(&w->file, head, strlen(head), err) &&
           safetensors_entries(&w->file, tensors, num_tensors, &entries, &w->data_bytes, err) &&
           writer_write(&w->file, "}", 1, err) && writer_write(&w->file, "        ", padding, err);
}

bool safetensors_create(SafetensorsWriter *w, const char *path, const TensorInfo *tensors,
                        int num_tensors, Error *err) {
    w->data_bytes = w->written = 0;
    if (!writer_open(&w->file, path, err)) return false;
    if (safetensors_write_header(w, tensors, num_tensors, err)) return true;
    writer_abort(&w->file);
    return false;
}

bool safetensors_write(SafetensorsWriter *w, const void *data, uint64_t n, Error *err) {
    w->written += n;
    return writer_write(&w->file, data, n, err);
}

bool safetensors_finish(SafetensorsWriter *w, Error *err) {
    if (w->written == w->data_bytes) return writer_close(&w->file, err);
    error_set(err, EXIT_DISK, "", "%s: expected %llu bytes of tensors, given %llu", w->file.path,
              (unsigned long long)w->data_bytes, (unsigned long long)w->written);
    writer_abort(&w->file);
    return false;
}

void safetensors_abort(SafetensorsWriter *w) { writer_abort(&w->file); }
