#include "safetensors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/memory.h"

// ---- Tensors ------------------------------------------------------------------------------------

static float from_f32(const void *p) {
    float value;
    memcpy(&value, p, sizeof value);
    return value;
}

static float from_f64(const void *p) {
    double value;
    memcpy(&value, p, sizeof value);
    return (float)value;
}

static float from_bf16(const void *p) {  // the upper half of an F32
    uint16_t bits[2] = {0};
    memcpy(&bits[1], p, sizeof bits[1]);
    return from_f32(bits);
}

uint16_t bf16_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_f16(const void *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    const bool finite = (bits & 0x7c00) != 0x7c00;
    const uint32_t word = (uint32_t)(bits & 0x7fff) << 13 | (finite ? 0 : 0x7f800000);
    const float size = from_f32(&word) * (finite ? 0x1p112f : 1);  // exponents count from -15
    return bits & 0x8000 ? -size : size;
}

static const struct Dtype {
    const char *name;
    uint64_t size_bytes;
    float (*to_float)(const void *);  // NULL: not a type of weights
} dtypes[] = {{"F32", 4, from_f32}, {"BF16", 2, from_bf16}, {"F16", 2, from_f16},
              {"F64", 8, from_f64}, {"I64", 8, NULL},       {"I32", 4, NULL},
              {"I16", 2, NULL},     {"I8", 1, NULL},        {"U8", 1, NULL},
              {"U16", 2, NULL},     {"U32", 4, NULL},       {"U64", 8, NULL},
              {"BOOL", 1, NULL},    {"F8_E4M3", 1, NULL},   {"F8_E5M2", 1, NULL}};

static const struct Dtype *find_dtype(const char *name) {
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(name, dtypes[i].name) == 0) return &dtypes[i];
    return NULL;
}

uint64_t tensor_dtype_size(const char *dtype) {
    const struct Dtype *known = find_dtype(dtype);
    return known ? known->size_bytes : 0;
}

// UINT64_MAX: more than that
static uint64_t tensor_size_bytes(const TensorInfo *t) {
    uint64_t n = tensor_dtype_size(t->dtype);
    for (int i = 0; i < t->ndim; i++)
        if (!checked_mul(n, t->shape[i], &n)) return UINT64_MAX;
    return n;
}

uint64_t tensor_num_elements(const TensorInfo *t) {
    return tensor_size_bytes(t) / tensor_dtype_size(t->dtype);
}

// ---- Header -------------------------------------------------------------------------------------

static bool parse_integer(const json_t *item, const char *key, uint64_t min, uint64_t *out,
                          Error *err) {
    const int64_t max = ((int64_t)1 << 53) - 1;  // beyond, JSON numbers are not exact
    return json_value(item, key, JSON_INT64, (double)min, (double)max, out, err);
}

static bool parse_shape(TensorInfo *t, const json_t *shape, Error *err) {
    const json_t *dim;
    size_t i;
    if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_MAX_DIMS)
        return bad_input(err, "shape: expected an array of at most %d dimensions",
                         SAFETENSORS_MAX_DIMS);
    json_array_foreach(shape, i, dim) {
        if (!parse_integer(dim, "shape", 0, &t->shape[t->ndim++], err)) return false;
    }
    return true;
}

static bool parse_entry(TensorInfo *t, const json_t *entry, Error *err) {
    const char *dtype = NULL, *key = "data_offsets";
    const json_t *offsets = json_member(entry, key);
    if (json_object_size(entry) != 3)
        return bad_input(err, "expected {dtype, shape, data_offsets}");
    if (!json_get_string(entry, "dtype", &dtype, true, err)) return false;
    if (!find_dtype(dtype))
        return bad_input(err, "dtype: expected F32, BF16, ..., found \"%.20s\"", dtype);
    text_copy(t->dtype, sizeof t->dtype, dtype);
    if (json_array_size(offsets) != 2) return bad_input(err, "%s: expected [begin, end]", key);
    if (!parse_shape(t, json_member(entry, "shape"), err) ||
        !parse_integer(json_array_get(offsets, 0), key, 0, &t->begin, err) ||
        !parse_integer(json_array_get(offsets, 1), key, t->begin, &t->end, err))
        return false;
    return t->end - t->begin == tensor_size_bytes(t) ||
           bad_input(err, "%s: expected %lu bytes for its shape and dtype, found %lu", key,
                     tensor_size_bytes(t), t->end - t->begin);
}

static bool check_metadata(json_t *metadata, Error *err) {
    const char *key;
    const json_t *item;
    bool ok = json_is_object(metadata) || json_is_null(metadata);
    json_object_foreach(metadata, key, item) ok = ok && json_is_string(item);
    return ok || bad_input(err, "__metadata__: expected an object of strings");
}

static bool add_tensor(SafetensorsSet *s, const char *name, json_t *entry, int file, Error *err) {
    if (strcmp(name, "__metadata__") == 0) return check_metadata(entry, err);
    array_grow(s->tensors, &s->tensors_capacity, (size_t)s->num_tensors + 1, "list of tensors");
    TensorInfo *t = &s->tensors[s->num_tensors];
    *t = (TensorInfo){.file = file};
    size_t length = strlen(name);
    if (length == 0 || length >= sizeof t->name)
        return bad_input(err, "tensor name: expected 1 to %zu bytes, found %zu", sizeof t->name - 1,
                         length);
    memcpy(t->name, name, length + 1);
    if (!parse_entry(t, entry, err)) return error_prefix(err, t->name);
    s->num_tensors++;
    return true;
}

static int by_offset(const void *a, const void *b) {
    const TensorInfo *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

// Compares names, or tensors by their first member, the name.
static int by_name(const void *a, const void *b) { return strcmp(a, b); }

// Tensors [first, num_tensors) of a file: one after another, 0 to data_bytes. Makes them absolute.
static bool check_layout(SafetensorsSet *s, int first, uint64_t data_begin, uint64_t data_bytes,
                         Error *err) {
    uint64_t expected = 0;
    qsort(s->tensors + first, (size_t)(s->num_tensors - first), sizeof *s->tensors, by_offset);
    for (int i = first; i < s->num_tensors; i++) {
        TensorInfo *t = &s->tensors[i];
        if (t->begin != expected)
            return bad_input(
                err, "%s: data_offsets: expected to begin at %lu, found %lu (hole or overlap)",
                t->name, expected, t->begin);
        expected = t->end;
        t->begin += data_begin;
        t->end += data_begin;
    }
    return expected == data_bytes ||
           bad_input(err, "expected %lu bytes of tensors, found %lu", expected, data_bytes);
}

static bool read_header(SafetensorsSet *s, int file, Error *err) {
    const File *f = &s->files[file];
    const int first = s->num_tensors;
    const char *name;
    json_t *entry;
    uint64_t n = 0;
    if (!file_read_at(f, &n, 8, 0, err)) return false;
    const uint64_t rest = f->size_bytes - 8,
                   most = rest < SAFETENSORS_MAX_HEADER ? rest : SAFETENSORS_MAX_HEADER;
    if (memcmp(&n, "version ", 8) == 0)
        return error_set(err, EXIT_BAD_INPUT, "`git lfs pull` in that directory gets the file",
                         "%s: expected weights, found a pointer of Git LFS", f->path);
    if (n < 2 || n > most)
        return bad_input(err, "%s: header: expected 2 to %lu bytes, found %lu", f->path, most, n);
    AUTO_FREE char *text = host_calloc(n, 1, f->path);
    if (!file_read_at(f, text, n, 8, err)) return false;
    if (text[0] != '{') return bad_input(err, "%s: header: expected {", f->path);
    json_auto_t *root = json_parse(text, (size_t)n, f->path, err);
    if (!root) return false;
    json_object_foreach(root, name, entry) {
        if (!add_tensor(s, name, entry, file, err)) return error_prefix(err, f->path);
    }
    return check_layout(s, first, 8 + n, f->size_bytes - 8 - n, err) || error_prefix(err, f->path);
}

// ---- Opening ------------------------------------------------------------------------------------

static bool open_file(SafetensorsSet *s, const char *path, Error *err) {
    const int file = s->num_files++;
    return file_open(&s->files[file], host_copy(path, "paths"),
                     "expected a .safetensors file or the directory of a model", err) &&
           read_header(s, file, err);
}

const TensorInfo *safetensors_find(const SafetensorsSet *s, const char *name) {
    return bsearch(name, s->tensors, (size_t)s->num_tensors, sizeof *s->tensors, by_name);
}

static bool add_shard(SafetensorsSet *s, const char *dir, const char *name, Error *err) {
    char path[IO_PATH_MAX];
    if (!path_is_plain_name(name))
        return bad_input(err, "weight_map: expected a plain file name, found \"%.100s\"", name);
    if (!path_join(path, dir, name, err)) return false;
    for (int i = s->num_files; i-- > 0;)
        if (strcmp(s->files[i].path, path) == 0) return true;
    if (s->num_files == SAFETENSORS_MAX_FILES)
        return bad_input(err, "weight_map: expected at most %d files, found more",
                         SAFETENSORS_MAX_FILES);
    return open_file(s, path, err);
}

// In both directions: every tensor of the index is in its file, and no file holds a tensor that the
// index does not place there.
static bool check_index(const SafetensorsSet *s, json_t *map, Error *err) {
    const char *name;
    const json_t *item;
    const int promised = (int)json_object_size(map);
    json_object_foreach(map, name, item) {
        const TensorInfo *t = safetensors_find(s, name);
        if (!t || strcmp(basename(s->files[t->file].path), json_string_value(item)) != 0)
            return bad_input(err, "weight_map: %.160s: expected in %.160s, not found there", name,
                             json_string_value(item));
    }
    return promised == s->num_tensors ||
           bad_input(err, "weight_map: expected all %d tensors of its files, found %d",
                     s->num_tensors, promised);
}

static bool open_index(SafetensorsSet *s, const char *path, Error *err) {
    const char *name;
    const json_t *item;
    char dir[IO_PATH_MAX];
    if (!path_parent(dir, path, err)) return false;
    json_auto_t *root = json_read(
        path, 16 << 20, "expected model.safetensors or model.safetensors.index.json", err);
    json_t *map = json_member(root, "weight_map");
    if (!root) return false;
    bool ok = json_object_size(map) > 0 ||
              bad_input(err, "weight_map: expected an object of names and files");
    json_object_foreach(map, name, item) {
        ok = ok &&
             (json_is_string(item) || json_type_error(item, "weight_map", "file names", err)) &&
             add_shard(s, dir, json_string_value(item), err);
    }
    qsort(s->tensors, (size_t)s->num_tensors, sizeof *s->tensors, by_name);
    return (ok && check_index(s, map, err)) || error_prefix(err, path);
}

static bool open_path(SafetensorsSet *s, const char *path, Error *err) {
    char file[IO_PATH_MAX];
    if (!path_inside(file, path, "model.safetensors", err)) return false;
    if (path_is_dir(path) && !path_exists(file) &&
        !path_exists(path_in(file, path, "model.safetensors.index.json")))
        return error_set(
            err, EXIT_BAD_INPUT,
            "transformers' save_pretrained converts a pytorch_model.bin; adapters are for "
            "--adapter, or resume their run with --lora-merge; --from-scratch needs no weights",
            "%s: expected model.safetensors or model.safetensors.index.json, found neither", path);
    s->files = host_calloc(SAFETENSORS_MAX_FILES, sizeof *s->files, "list of files");
    array_grow(s->tensors, &s->tensors_capacity, 1, "list of tensors");  // for qsort: never NULL
    if (path_ends_with(file, ".json")) return open_index(s, file, err);
    if (!open_file(s, file, err)) return false;
    qsort(s->tensors, (size_t)s->num_tensors, sizeof *s->tensors, by_name);
    return true;
}

void safetensors_close(SafetensorsSet *s) {
    for (int i = 0; i < s->num_files; i++) {
        file_close(&s->files[i]);
        free((char *)s->files[i].path);
    }
    free(s->files);
    free(s->tensors);
    *s = (SafetensorsSet){0};
}

bool safetensors_open(SafetensorsSet *s, const char *dir_or_file, Error *err) {
    *s = (SafetensorsSet){0};
    if (open_path(s, dir_or_file, err)) return true;
    safetensors_close(s);
    return false;
}

// ---- Reading tensors ----------------------------------------------------------------------------

bool safetensors_read_f32(SafetensorsSet *s, const TensorInfo *t, float *out, uint64_t first,
                          uint64_t count, Error *err) {
    unsigned char raw[1 << 14];
    const File *f = &s->files[t->file];
    const struct Dtype *dtype = find_dtype(t->dtype);
    const uint64_t size = dtype->size_bytes, total = tensor_num_elements(t);
    if (!dtype->to_float)
        return bad_input(err, "%s: %s: expected F32, BF16, F16 or F64, found %s", f->path, t->name,
                         t->dtype);
    if (first > total || count > total - first)
        return bad_input(err, "%s: %s: expected at least %lu elements, found %lu", f->path, t->name,
                         first + count, total);
    for (uint64_t done = 0, n; done < count; done += n) {
        n = count - done < sizeof raw / size ? count - done : sizeof raw / size;
        if (!file_read_at(f, raw, n * size, t->begin + (first + done) * size, err)) return false;
        for (uint64_t i = 0; i < n; i++) {
            out[done + i] = dtype->to_float(raw + i * size);
            if (!isfinite(out[done + i])) s->num_nonfinite++;
        }
    }
    return true;
}

// ---- Writing ------------------------------------------------------------------------------------

// Adds a tensor to the header; its data follow the *data_bytes of those before it.
static void put_tensor(json_t *header, const TensorInfo *t, uint64_t *data_bytes) {
    const uint64_t begin = *data_bytes;
    *data_bytes += tensor_size_bytes(t);
    json_t *shape = json_array();
    for (int i = 0; i < t->ndim; i++)
        json_array_append_new(shape, json_integer((int64_t)t->shape[i]));
    json_object_set_new(header, t->name,
                        json_pack("{s:s, s:o, s:[I, I]}", "dtype", t->dtype, "shape", shape,
                                  "data_offsets", (int64_t)begin, (int64_t)*data_bytes));
}

bool safetensors_create(FileWriter *w, const char *path, const TensorInfo *tensors, int num_tensors,
                        Error *err) {
    static const char spaces[8] = "        ";
    // transformers refuses a file without __metadata__
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    uint64_t data_bytes = 0;
    for (int i = 0; i < num_tensors; i++) put_tensor(header, &tensors[i], &data_bytes);
    AUTO_FREE char *text = json_write(header, 0);
    const uint64_t used = strlen(text) - 1, n = (used + 7) / 8 * 8;  // without the newline
    return writer_open(w, path, err) && writer_write(w, &n, sizeof n, err) &&
           writer_write(w, text, used, err) && writer_write(w, spaces, n - used, err);
}
