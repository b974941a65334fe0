#include "weights.h"

#include <math.h>
#include <string.h>

#include "../base/hash.h"
#include "../base/memory.h"

static const struct {
    const char *prefix, *name;
} arenas[] = {[ARENA_WEIGHTS] = {"", "weights"}, [ARENA_M] = {"m.", "m"}, [ARENA_V] = {"v.", "v"}};

// Elements in files that lie before element i in arenas
static size_t in_file(const Parameter *t, size_t i) {
    const size_t rows = (size_t)t->rows, cols = t->cols ? (size_t)t->cols : 1,
                 wide = cols + (size_t)t->pad_cols, row = i / wide, column = i % wide;
    return row >= rows ? rows * cols : row * cols + (column < cols ? column : cols);
}

// values (n) of elements first .. first + n - 1 of an arena, from the file's at its beginning
static void add_padding(const Parameter *t, float *values, size_t first, size_t n) {
    for (size_t i = t->pad_rows + t->pad_cols ? n : 0; i-- > 0;) {
        const size_t at = in_file(t, first + i);
        values[i] = in_file(t, first + i + 1) > at ? values[at - in_file(t, first)] : 0;
    }
}

// The inverse. Returns how many are left.
static size_t remove_padding(const Parameter *t, float *values, size_t first, size_t n) {
    size_t kept = t->pad_rows + t->pad_cols ? 0 : n;
    for (size_t i = kept; i < n; i++)
        if (in_file(t, first + i + 1) > in_file(t, first + i)) values[kept++] = values[i];
    return kept;
}

static size_t block_size(const Parameters *p, const Parameter *t, size_t first) {
    const size_t left = t->count - first;
    return left < p->block ? left : p->block;
}

// ---- Initial weights ----------------------------------------------------------------------------

static float normal_number(uint64_t key, uint64_t element) {  // Box-Muller
    const uint64_t bits = mix64(key + 0x9e3779b97f4a7c15ull * (element + 1));
    const double u = ((double)(bits >> 32) + 0.5) * 0x1p-32,
                 v = (double)(bits & 0xffffffffu) * 0x1p-32;
    return (float)(sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * v));
}

static void init_parameter(const Parameters *p, const Parameter *t, uint64_t seed, float *values) {
    const uint64_t key = mix64(seed ^ crc32c(0, t->name, strlen(t->name)));
    for (size_t first = 0, n; first < t->count; first += n) {
        const size_t from = in_file(t, first);
        n = block_size(p, t, first);
        for (size_t i = 0; i < n; i++)
            values[i] = t->init_bound > 0
                            ? t->init_bound * ((float)(mix64(key + from + i) >> 40) * 0x1p-23f - 1)
                        : t->init_std > 0 ? t->init_std * normal_number(key, from + i)
                                          : t->init_std == 0;
        add_padding(t, values, first, n);
        p->put(p->context, ARENA_WEIGHTS, t->offset + first, values, n);
    }
}

void weights_init(Parameters p, uint64_t seed) {
    AUTO_FREE float *values = host_calloc(p.block, sizeof *values, "weights");
    for (int i = 0; i < p.num; i++) init_parameter(&p, &p.list[i], seed, values);
}

// ---- Names and shapes of a file against the table -----------------------------------------------

// The tensors of a file, in its order: weights, or all m and then all v
typedef struct {
    ParameterArena arena;
    const Parameter *t;
    TensorInfo info;
} Stored;

static Stored *list_stored(const Parameters *p, bool moments, const char *dtype, int *num) {
    const ParameterArena first = moments ? ARENA_M : ARENA_WEIGHTS,
                         last = moments ? ARENA_V : ARENA_WEIGHTS;
    Stored *list = host_calloc(2 * (size_t)p->num, sizeof *list, "tensor list");
    *num = 0;
    for (ParameterArena arena = first; arena <= last; arena++)
        for (const Parameter *t = p->list; t < p->list + p->num; t++) {
            if (arena == ARENA_V && t->moments < 2) continue;
            Stored *x = &list[(*num)++];
            *x = (Stored){arena, t, {.ndim = t->cols ? 2 : 1, .shape = {t->rows, t->cols}}};
            snprintf(x->info.name, sizeof x->info.name, "%s%s", arenas[arena].prefix, t->name);
            text_copy(x->info.dtype, sizeof x->info.dtype, dtype);
        }
    return list;
}

// Is it a tensor of the table, or one that may be ignored?
static bool is_known(const Parameters *p, const char *name) {
    for (int i = 0; i < p->num; i++)
        if (strcmp(p->list[i].name, name) == 0) return true;
    if (p->tied_head && strcmp(name, "lm_head.weight") == 0) return true;
    return strstr(name, "rotary_emb.inv_freq") != NULL;  // stored by old versions, computed here
}

// Reports all misfits at once.
static bool check_tensors(const Parameters *p, const Stored *list, int num, const SafetensorsSet *s,
                          const char *path, Error *err) {
    const bool moments = num > 0 && list->arena != ARENA_WEIGHTS;
    char missing[300] = "", misfit[300] = "", extra[300] = "";
    for (int i = 0; i < num; i++) {
        const TensorInfo *expected = &list[i].info, *found = safetensors_find(s, expected->name);
        if (!found)
            text_list(missing, sizeof missing, "%s", expected->name);
        else if (found->ndim != expected->ndim ||
                 memcmp(found->shape, expected->shape, sizeof found->shape) != 0)
            text_list(misfit, sizeof misfit, "%s", expected->name);
    }
    for (int i = 0; i < s->num_tensors && !moments; i++) {
        const char *name = s->tensors[i].name;
        if (!is_known(p, name)) text_list(extra, sizeof extra, "%s", name);
    }
    if (moments && s->num_tensors > num) text_list(extra, sizeof extra, "%d", s->num_tensors - num);
    if (!missing[0] && !misfit[0] && !extra[0]) return true;
    return error_set(
        err, moments ? EXIT_CHECKPOINT_MISFIT : EXIT_BAD_INPUT,
        moments   ? "resume with the model and the --optimizer of the run"
        : p->file ? "leave --model out, or give the model that adapter_config.json names"
                  : "config.json and the weights must be of the same model, saved from "
                    "AutoModelForCausalLM itself, not from its base model or a wrapper",
        "%s: %s;%s%s%s%s%s%s", path,
        moments ? "moments do not fit the optimizer" : "weights do not fit config.json",
        missing[0] ? " missing: " : "", missing, misfit[0] ? " wrong shape: " : "", misfit,
        extra[0] ? " unknown: " : "", extra);
}

// A second copy of the embedding is only that if it has the same values.
static bool check_tied(const Parameters *p, SafetensorsSet *s, const char *dir, Error *err) {
    const TensorInfo *head = safetensors_find(s, "lm_head.weight"),
                     *embed = safetensors_find(s, "model.embed_tokens.weight");
    float a[1024], b[1024];
    if (!p->tied_head || !head || !embed) return true;
    const uint64_t total = tensor_num_elements(embed);
    bool same = tensor_num_elements(head) == total;
    for (uint64_t at = 0, n; same && at < total; at += n) {
        n = total - at < 1024 ? total - at : 1024;
        if (!safetensors_read_f32(s, head, a, at, n, err) ||
            !safetensors_read_f32(s, embed, b, at, n, err))
            return false;
        same = memcmp(a, b, n * sizeof *a) == 0;
    }
    return same || error_set(err, EXIT_BAD_INPUT,
                             "if the head is its own, tie_word_embeddings in config.json is false; "
                             "else delete lm_head.weight",
                             "%s: tie_word_embeddings is true: expected lm_head.weight as "
                             "model.embed_tokens.weight, found other values",
                             dir);
}

// ---- Loading ------------------------------------------------------------------------------------

static bool load_parameter(const Parameters *p, const Stored *x, SafetensorsSet *s, float *values,
                           Error *err) {
    const Parameter *t = x->t;
    const TensorInfo *info = safetensors_find(s, x->info.name);
    for (size_t first = 0, n; first < t->count; first += n) {
        n = block_size(p, t, first);
        const size_t from = in_file(t, first);
        if (!safetensors_read_f32(s, info, values, from, in_file(t, first + n) - from, err))
            return false;
        add_padding(t, values, first, n);
        p->put(p->context, x->arena, t->offset + first, values, n);
    }
    return true;
}

// Checks names and shapes of a file or directory, then reads its values unless put is NULL.
bool parameters_load(Parameters p, bool moments, const char *path, Error *err) {
    SafetensorsSet s;
    int num;
    char file[IO_PATH_MAX];
    const char *name = moments ? MOMENTS_FILE : p.file;
    if (name && !path_inside(file, path, name, err)) return false;
    if (!safetensors_open(&s, name ? file : path, err)) return false;
    if (moments) path = file;
    AUTO_FREE float *values = host_calloc(p.block, sizeof *values, "weights");
    AUTO_FREE Stored *list = list_stored(&p, moments, "", &num);
    bool ok =
        check_tensors(&p, list, num, &s, path, err) && (moments || check_tied(&p, &s, path, err));
    for (int i = 0; p.put && ok && i < num; i++) ok = load_parameter(&p, &list[i], &s, values, err);
    if (ok && s.num_nonfinite > 0)
        ok = error_set(err, EXIT_DIVERGED,
                       moments ? "take an earlier checkpoint"
                               : "copy it again if it was downloaded; if training diverged before "
                                 "it was saved, take an earlier one",
                       "%s: expected finite %s, found %lu values that are NaN or Inf", path,
                       moments ? "optimizer state" : "weights", s.num_nonfinite);
    safetensors_close(&s);
    return ok;
}

bool weights_check(Parameters p, const char *dir, Error *err) {
    p.put = NULL;
    return parameters_load(p, false, dir, err);
}

// ---- Saving -------------------------------------------------------------------------------------

static bool save_block(const char *path, const Stored *x, float *values, size_t n, FileWriter *w,
                       Error *err) {
    for (size_t i = 0; i < n; i++)
        if (!isfinite(values[i]))
            return error_set(err, EXIT_DIVERGED, "lower --lr, or resume from an earlier checkpoint",
                             "%s: not saved, training diverged: expected finite values, found NaN "
                             "or Inf in %s of %s",
                             path, arenas[x->arena].name, x->t->name);
    const bool bf16 = strcmp(x->info.dtype, "BF16") == 0;
    for (size_t i = 0; bf16 && i < n; i++) {  // in place
        const uint16_t bits = bf16_bits(values[i]);
        memcpy((char *)values + i * sizeof bits, &bits, sizeof bits);
    }
    return writer_write(w, values, n * tensor_dtype_size(x->info.dtype), err);
}

bool parameters_save(Parameters p, bool moments, const char *dtype, const char *path, FileWriter *w,
                     Error *err) {
    int num;
    AUTO_FREE float *values = host_calloc(p.block, sizeof *values, "weights");
    AUTO_FREE Stored *list = list_stored(&p, moments, dtype, &num);
    AUTO_FREE TensorInfo *infos = host_calloc((size_t)num, sizeof *infos, "tensor list");
    for (int i = 0; i < num; i++) infos[i] = list[i].info;
    bool ok = path && safetensors_create(w, path, infos, num, err);
    for (int i = 0; i < num; i++) {
        const Parameter *t = list[i].t;
        for (size_t first = 0, n; first < t->count; first += n) {
            n = block_size(&p, t, first);
            p.get(p.context, list[i].arena, t->offset + first, values, n);
            const size_t kept = remove_padding(t, values, first, n);
            ok = ok && save_block(path, &list[i], values, kept, w, err);
        }
    }
    if (ok) return writer_close(w, err);
    if (path) writer_abort(w);
    return false;
}
