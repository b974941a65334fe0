// Where weights come from and go to: random numbers at the start, Hugging Face directories, and the
// optimizer state beside them. They pass through the host as fp32, sizes.io_chunk at a time.
#ifndef UNPAD_WEIGHTS_H
#define UNPAD_WEIGHTS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/base/error.h"
#include "../data/base/hash.h"
#include "../data/base/memory.h"
#include "../data/models/safetensors.h"
#include "../llama.h"             // defines: LlamaModel and its table of tensors

// ------------------------------------------------------------------------------------------------
// Initial weights: normal numbers from a counter, so that a weight depends on (seed, tensor,
// element) and on nothing else: not on the order of the table, the number of ranks or the library.

static inline float llama_normal(uint64_t key, uint64_t element) {  // Box-Muller
    uint64_t bits = mix64(key + 0x9e3779b97f4a7c15ull * (element + 1));
    double u = ((double)(bits >> 32) + 0.5) * 0x1p-32, v = (double)(bits & 0xffffffffu) * 0x1p-32;
    return (float)(sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * v));
}

// Elements of the chunk of t that begins at its element `first`.
static inline size_t llama_chunk(const LlamaModel *m, const LlamaTensor *t, size_t first) {
    const size_t most = m->sizes.io_chunk, left = t->count - first;
    return left < most ? left : most;
}

static inline void llama_init_tensor(LlamaModel *m, const LlamaTensor *t, uint64_t seed,
                                     float *chunk) {
    uint64_t key = mix64(seed ^ crc32c(0, t->name, strlen(t->name)));
    for (size_t first = 0; first < t->count; first += m->sizes.io_chunk) {
        size_t n = llama_chunk(m, t, first), at = t->offset + first;
        for (size_t i = 0; i < n; i++)
            chunk[i] = t->init_std > 0 ? t->init_std * llama_normal(key, first + i) : 1;
        comm_progress();
        weights_from_host(m->weights + at, m->master_lo ? m->master_lo + at : NULL, chunk, n);
    }
}

static inline void llama_init(LlamaModel *m, uint64_t seed) {
    float *chunk = (float *)host_calloc(m->sizes.io_chunk, sizeof(float), "initial weights");
    for (int i = 0; i < m->num_tensors; i++) llama_init_tensor(m, &m->tensors[i], seed, chunk);
    free(chunk);
}

// ------------------------------------------------------------------------------------------------
// Weights from and to Hugging Face directories

static inline bool llama_same_shape(const LlamaTensor *t, const TensorInfo *info) {
    if (info->ndim != (t->cols ? 2 : 1) || info->shape[0] != (uint64_t)t->rows) return false;
    return t->cols == 0 || info->shape[1] == (uint64_t)t->cols;
}

// Appends ", name" while there is room.
static inline void llama_list(char *list, size_t capacity, const char *name) {
    size_t used = strlen(list);
    snprintf(list + used, capacity - used, "%s%s", used ? ", " : "", name);
}

// The same tensor under another prefix, as base models and wrappers save it; NULL: there is none.
static inline const char *llama_other_prefix(const SafetensorsSet *s, const char *name) {
    const char *base = strncmp(name, "model.", 6) == 0 ? name + 6 : name;
    for (int i = 0; i < s->num_tensors; i++) {
        const char *found = s->tensors[i].name;
        const size_t n = strlen(found), tail = strlen(base);
        if (n >= tail && strcmp(found + n - tail, base) == 0 && strcmp(found, name) != 0)
            return found;
    }
    return NULL;
}

static inline bool llama_bad_prefix(const char *expected, const char *found, const char *dir,
                                    Error *err) {
    return error_set(err, EXIT_BAD_INPUT,
                     "save it from LlamaForCausalLM itself, not from its base model or a wrapper",
                     "%s: tensors have another prefix: expected %s, found %s", dir, expected,
                     found);
}

// Every tensor of the table, with its shape, and no other (a tied head may be stored twice): all
// faults at once.
static inline bool llama_check_tensors(const LlamaModel *m, const SafetensorsSet *s,
                                       const char *dir, Error *err) {
    char missing[300] = "", misfit[300] = "", extra[300] = "";
    for (int i = 0; i < m->num_tensors; i++) {
        const TensorInfo *info = safetensors_find(s, m->tensors[i].name);
        if (!info)
            llama_list(missing, sizeof missing, m->tensors[i].name);
        else if (!llama_same_shape(&m->tensors[i], info))
            llama_list(misfit, sizeof misfit, m->tensors[i].name);
    }
    for (int i = 0; i < s->num_tensors; i++) {
        const char *name = s->tensors[i].name;
        bool tied_head = m->config.tie_word_embeddings && strcmp(name, "lm_head.weight") == 0;
        bool buffer =
            strstr(name, "rotary_emb.inv_freq") != NULL;  // stored by old versions, derived here
        if (!tied_head && !buffer && !llama_tensor(m, name)) llama_list(extra, sizeof extra, name);
    }
    if (!missing[0] && !misfit[0] && !extra[0]) return true;
    const char *first = m->tensors[0].name, *other = llama_other_prefix(s, first);
    if (!safetensors_find(s, first) && other) return llama_bad_prefix(first, other, dir, err);
    return error_set(err, EXIT_BAD_INPUT, "config.json and the weights must be of the same model",
                     "%s: weights do not fit config.json;%s%s%s%s%s%s", dir,
                     missing[0] ? " missing: " : "", missing, misfit[0] ? " wrong shape: " : "",
                     misfit, extra[0] ? " unknown: " : "", extra);
}

// The names and shapes of a Hugging Face directory: what llama_load refuses, without reading it.
static inline bool llama_check_dir(const LlamaModel *m, const char *dir, Error *err) {
    SafetensorsSet s;
    if (!safetensors_open(&s, dir, err)) return false;
    const bool ok = llama_check_tensors(m, &s, dir, err);
    safetensors_close(&s);
    return ok;
}

static inline bool llama_load_tensor(LlamaModel *m, const LlamaTensor *t, SafetensorsSet *s,
                                     float *chunk, Error *err) {
    const TensorInfo *info = safetensors_find(s, t->name);
    for (size_t first = 0; first < t->count; first += m->sizes.io_chunk) {
        size_t n = llama_chunk(m, t, first), at = t->offset + first;
        if (!safetensors_read_f32(s, info, chunk, first, n, err)) return false;
        weights_from_host(m->weights + at, m->master_lo ? m->master_lo + at : NULL, chunk, n);
    }
    return true;
}

static inline bool llama_check_loaded(const SafetensorsSet *s, const char *path, const char *what,
                                      Error *err) {
    return s->num_nonfinite == 0 ||
           error_set(err, EXIT_DIVERGED,
                     "this checkpoint was saved after training diverged: take an earlier one",
                     "%s: expected finite %s, found %llu values that are NaN or Inf", path, what,
                     (unsigned long long)s->num_nonfinite);
}

// All weights of a Hugging Face directory; F32, BF16, F16 or F64.
static inline bool llama_load(LlamaModel *m, const char *dir, Error *err) {
    SafetensorsSet s;
    if (!safetensors_open(&s, dir, err)) return false;
    float *chunk = (float *)host_calloc(m->sizes.io_chunk, sizeof(float), "weights");
    bool ok = llama_check_tensors(m, &s, dir, err);
    for (int i = 0; ok && i < m->num_tensors; i++)
        ok = llama_load_tensor(m, &m->tensors[i], &s, chunk, err);
    ok = ok && llama_check_loaded(&s, dir, "weights", err);
    free(chunk);
    safetensors_close(&s);
    return ok;
}

// The table as safetensors wants it, each name behind `prefix`.
static inline TensorInfo *llama_tensor_infos(const LlamaModel *m, const char *prefix,
                                             TensorInfo *out) {
    for (int i = 0; i < m->num_tensors; i++) {
        const LlamaTensor *t = &m->tensors[i];
        char name[128];
        snprintf(name, sizeof name, "%s%s", prefix, t->name);
        *out++ = tensor_info(name, "F32", t->cols ? 2 : 1, (uint64_t)t->rows, (uint64_t)t->cols);
    }
    return out;
}

// NaN and Inf must not reach a checkpoint. bad: how many of them `what` of tensor t has.
static inline bool llama_check_finite(size_t bad, const char *path, const char *what,
                                      const LlamaTensor *t, Error *err) {
    return bad == 0 ||
           error_set(err, EXIT_DIVERGED, "lower --lr, or resume from an earlier checkpoint",
                     "%s: not saved, training diverged: expected finite values, found NaN or Inf "
                     "in %s of %s",
                     path, what, t->name);
}

// Weights as fp32, the exact master, into `path`; *w then holds size and checksum.
static inline bool llama_save_weights(const LlamaModel *m, const char *path, SafetensorsWriter *w,
                                      Error *err) {
    TensorInfo *infos =
        (TensorInfo *)host_calloc((size_t)m->num_tensors, sizeof(TensorInfo), "tensor list");
    float *chunk = (float *)host_calloc(m->sizes.io_chunk, sizeof(float), "weights");
    llama_tensor_infos(m, "", infos);
    bool ok = safetensors_create(w, path, infos, m->num_tensors, err);
    for (int i = 0; ok && i < m->num_tensors; i++) {
        const LlamaTensor *t = &m->tensors[i];
        for (size_t first = 0; ok && first < t->count; first += m->sizes.io_chunk) {
            size_t n = llama_chunk(m, t, first), at = t->offset + first;
            weights_to_host(chunk, m->weights + at, m->master_lo ? m->master_lo + at : NULL, n);
            size_t bad = 0;
            for (size_t k = 0; k < n; k++) bad += !isfinite(chunk[k]);
            ok = llama_check_finite(bad, path, "weights", t, err) &&
                 safetensors_write(w, chunk, n * sizeof(float), err);
        }
    }
    free(chunk);
    free(infos);
    if (ok) return safetensors_finish(w, err);
    safetensors_abort(w);
    return false;
}

// Elements at .. at + n - 1 of m or v for rank 0, from the ranks that hold them.
static inline void llama_read_moment(const LlamaModel *m, const real *moment, size_t at, size_t n,
                                     real *chunk) {
    size_t first = m->held_first, last = first + m->held_count;
    if (first < at) first = at;
    if (last > at + n) last = at + n;
    if (m->ranks.shard_optimizer) memset(chunk, 0, n * sizeof(real));
    if (first < last)
        device_download(chunk + (first - at), moment + (first - m->held_first),
                        (last - first) * sizeof(real));
    if (m->ranks.shard_optimizer) comm_merge(chunk, n * sizeof(real));
}

// The part of the other ranks while rank 0 is in llama_save_optimizer.
static inline void llama_send_optimizer(const LlamaModel *m) {
    if (!m->ranks.shard_optimizer) return;
    real *chunk = (real *)host_calloc(m->sizes.io_chunk, sizeof(real), "optimizer");
    for (int i = 0; i < 2 * m->num_tensors; i++) {
        const LlamaTensor *t = &m->tensors[i % m->num_tensors];
        for (size_t first = 0; first < t->count; first += m->sizes.io_chunk)
            llama_read_moment(m, i < m->num_tensors ? m->m : m->v, t->offset + first,
                              llama_chunk(m, t, first), chunk);
    }
    free(chunk);
}

// The two moments of AdamW as "m.<name>" and "v.<name>"
// (an error on rank 0 must not leave the others waiting: all elements are read in any case).
static inline bool llama_save_optimizer(const LlamaModel *m, const char *path, SafetensorsWriter *w,
                                        Error *err) {
    TensorInfo *infos =
        (TensorInfo *)host_calloc(2 * (size_t)m->num_tensors, sizeof(TensorInfo), "tensor list");
    real *chunk = (real *)host_calloc(m->sizes.io_chunk, sizeof(real), "optimizer");
    llama_tensor_infos(m, "v.", llama_tensor_infos(m, "m.", infos));
    bool ok = safetensors_create(w, path, infos, 2 * m->num_tensors, err);
    const real *moments[2] = {m->m, m->v};
    for (int i = 0; i < 2 * m->num_tensors; i++) {
        const LlamaTensor *t = &m->tensors[i % m->num_tensors];
        for (size_t first = 0; first < t->count; first += m->sizes.io_chunk) {
            size_t n = llama_chunk(m, t, first);
            llama_read_moment(m, moments[i / m->num_tensors], t->offset + first, n, chunk);
            size_t bad = 0;
            for (size_t k = 0; k < n; k++) bad += !isfinite(chunk[k]);
            ok = ok &&
                 llama_check_finite(bad, path, i < m->num_tensors ? "m" : "v", t, err) &&
                 safetensors_write(w, chunk, n * sizeof(real), err);
        }
    }
    free(chunk);
    free(infos);
    if (ok) return safetensors_finish(w, err);
    safetensors_abort(w);
    return false;
}

// Of elements at .. at + n - 1 of m or v, those that this rank holds.
static inline void llama_write_moment(const LlamaModel *m, real *moment, size_t at, size_t n,
                                      const float *chunk) {
    size_t first = m->held_first, last = first + m->held_count;
    if (first < at) first = at;
    if (last > at + n) last = at + n;
    if (first < last)
        device_upload(moment + (first - m->held_first), chunk + (first - at),
                      (last - first) * sizeof(float));
}

static inline bool llama_load_optimizer(LlamaModel *m, const char *path, Error *err) {
    SafetensorsSet s;
    if (!safetensors_open(&s, path, err)) return false;
    float *chunk = (float *)host_calloc(m->sizes.io_chunk, sizeof(float), "optimizer");
    bool ok = true;
    for (int i = 0; ok && i < 2 * m->num_tensors; i++) {
        const LlamaTensor *t = &m->tensors[i % m->num_tensors];
        real *moment = i < m->num_tensors ? m->m : m->v;
        char name[128];
        snprintf(name, sizeof name, "%s%s", i < m->num_tensors ? "m." : "v.", t->name);
        const TensorInfo *info = safetensors_find(&s, name);
        if (!info || !llama_same_shape(t, info))
            ok = error_set(err, EXIT_CHECKPOINT_MISFIT,
                           "resume with the model that was being trained",
                           "%s: expected tensor %s of this model's shape, found %s", path, name,
                           info ? "another shape" : "none");
        for (size_t first = 0; ok && first < t->count; first += m->sizes.io_chunk) {
            size_t n = llama_chunk(m, t, first);
            ok = safetensors_read_f32(&s, info, chunk, first, n, err);
            if (ok) llama_write_moment(m, moment, t->offset + first, n, chunk);
        }
    }
    ok = ok && llama_check_loaded(&s, path, "optimizer state", err);
    free(chunk);
    safetensors_close(&s);
    return ok;
}

#endif
