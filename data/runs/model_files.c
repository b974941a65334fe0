#include "model_files.h"

#include <stdio.h>
#include <stdlib.h>

#include "../base/file.h"
#include "../base/json.h"
#include "../base/path.h"

enum { GENERATION_CONFIG, FIRST_TOKENIZER_FILE };
static const char *const names[NUM_MODEL_FILES] = {
    "generation_config.json",  // the others are the tokenizer's
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
};

static bool read_files(ModelFiles *f, const char **dirs, int num_dirs, int first, int last,
                       Error *err) {
    const uint64_t max_bytes = 1 << 28;
    char path[IO_PATH_MAX];
    bool found = false;
    for (int d = 0; d < num_dirs && !found; d++) {
        for (int i = first; i <= last && path_is_dir(dirs[d]); i++) {
            if (!path_join(path, sizeof path, dirs[d], names[i], err)) return false;
            if (!path_exists(path)) continue;
            f->text[i] = file_read_all(path, max_bytes, &f->size_bytes[i], "", err);
            if (!f->text[i]) return false;
            found = true;
        }
    }
    return true;
}

bool model_files_read_generation(ModelFiles *f, const char **dirs, int num_dirs, Error *err) {
    return read_files(f, dirs, num_dirs, GENERATION_CONFIG, GENERATION_CONFIG, err);
}

bool model_files_read_tokenizer(ModelFiles *f, const char **dirs, int num_dirs, Error *err) {
    return read_files(f, dirs, num_dirs, FIRST_TOKENIZER_FILE, NUM_MODEL_FILES - 1, err);
}

static bool write_carried(const ModelFiles *f, Checkpoint *ck, Error *err) {
    for (int i = 0; i < NUM_MODEL_FILES; i++)
        if (f->text[i] &&
            !checkpoint_write_file(ck, names[i], f->text[i], (size_t)f->size_bytes[i], err))
            return false;
    return true;
}

static bool write_generation_config(const LlamaConfig *c, Checkpoint *ck, Error *err) {
    json_t *ids = json_object();
    if (c->bos_token_id >= 0)
        json_object_set_new(ids, "bos_token_id", json_integer(c->bos_token_id));
    if (c->eos_token_id >= 0)
        json_object_set_new(ids, "eos_token_id", json_integer(c->eos_token_id));
    return checkpoint_write_text(ck, names[GENERATION_CONFIG], json_write(ids, JSON_INDENT(2)),
                                 err);
}

static const struct {
    const char *safetensors, *torch;
} dtypes[] = {[MODEL_FP32] = {"F32", "float32"}, [MODEL_BF16] = {"BF16", "bfloat16"}};

bool model_files_write(const ModelFiles *f, const LlamaConfig *config, ModelDtype dtype,
                       Checkpoint *ck, Error *err) {
    return checkpoint_write_text(ck, "config.json", llama_config_text(config, dtypes[dtype].torch),
                                 err) &&
           (f->text[GENERATION_CONFIG] || write_generation_config(config, ck, err)) &&
           write_carried(f, ck, err);
}

// ------------------------------------------------------------------------------------------------
// Tensors

static bool write_tensors(Parameters p, const char *dtype, bool moments, const char *name,
                          Checkpoint *ck, Error *err) {
    char path[IO_PATH_MAX];
    FileWriter w;
    const bool room = checkpoint_path(ck, name, path, sizeof path, err);
    return parameters_save(p, moments, dtype, room ? path : NULL, &w, err) &&
           checkpoint_register(ck, name, w.size_bytes, w.crc, err);
}

bool model_files_write_moments(Parameters p, Checkpoint *ck, Error *err) {
    return write_tensors(p, "F32", true, "optimizer.safetensors", ck, err);
}

// The parameters of a file: from the first of p on, as many as max_bytes hold, but at least one.
static Parameters file_of(Parameters p, uint64_t element_bytes, uint64_t max_bytes) {
    uint64_t bytes = p.list[0].count * element_bytes;
    int num = 1;
    while (num < p.num && (bytes += p.list[num].count * element_bytes) <= max_bytes) num++;
    p.num = num;
    return p;
}

static Parameters rest_after(Parameters p, int num) {
    p.list += num;
    p.num -= num;
    return p;
}

static int num_files(Parameters p, uint64_t element_bytes, uint64_t max_bytes) {
    int num = 0;
    for (; p.num > 0; num++) p = rest_after(p, file_of(p, element_bytes, max_bytes).num);
    return num;
}

bool model_files_write_weights(Parameters p, ModelDtype dtype, uint64_t max_file_bytes,
                               Checkpoint *ck, Error *err) {
    const char *index_name = "model.safetensors.index.json";
    const uint64_t element_bytes = tensor_dtype_size(dtypes[dtype].safetensors);
    const int files = num_files(p, element_bytes, max_file_bytes);
    json_t *map = json_object();
    char name[64] = "model.safetensors";
    uint64_t elements = 0;
    bool ok = true;
    for (int i = 1; i <= files; i++) {
        const Parameters file = file_of(p, element_bytes, max_file_bytes);
        if (files > 1) snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", i, files);
        for (int k = 0; k < file.num; elements += file.list[k++].count)
            json_object_set_new(map, file.list[k].name, json_string(name));
        if (ok)
            ok = write_tensors(file, dtypes[dtype].safetensors, false, name, ck, err);
        else
            parameters_save(file, false, "F32", NULL, NULL, err);
        p = rest_after(p, file.num);
    }
    char *index = json_write(json_pack("{s:{s:I}, s:o}", "metadata", "total_size",
                                       (int64_t)(elements * element_bytes), "weight_map", map),
                             JSON_INDENT(2));
    if (ok && files > 1) return checkpoint_write_text(ck, index_name, index, err);
    free(index);
    return ok;
}
