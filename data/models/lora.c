#include "lora.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/memory.h"

const char *const lora_target_names[] = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                         "gate_proj", "up_proj", "down_proj"};

// Adds the target named by n characters, "q" or "q_proj".
static bool add_target(LoraConfig *c, const char *name, size_t n) {
    for (int t = 0; t < LORA_TARGETS && n > 0; t++) {
        const char *known = lora_target_names[t];
        if (strncmp(known, name, n) != 0 || (known[n] != 0 && known[n] != '_')) continue;
        c->target[t] = true;
        return true;
    }
    return false;
}

bool lora_config_make(LoraConfig *c, int rank, float alpha, const char *targets, Error *err) {
    *c = (LoraConfig){.rank = rank, .alpha = alpha > 0 ? alpha : 2 * (float)rank};
    if (strcmp(targets, "all") == 0) targets = "q,k,v,o,gate,up,down";
    for (size_t n;; targets += n + 1) {
        n = strcspn(targets, ",");
        if (!add_target(c, targets, n))
            return error_set(err, EXIT_USAGE, "for example --lora-targets q,v",
                             "--lora-targets: expected all or q,k,v,o,gate,up,down, found \"%.*s\"",
                             (int)n, targets);
        if (targets[n] == 0) return true;
    }
}

// q_proj and o_proj are multiples of k_proj.
bool lora_config_fits(const LoraConfig *c, const LlamaConfig *model, Error *err) {
    const int64_t k = (int64_t)model->num_kv_heads * model->head_dim * model->hidden_size,
                  up = (int64_t)model->intermediate_size * model->hidden_size;
    if (model->model_type == MODEL_GRANITE4 && c->target[GATE_PROJ] != c->target[UP_PROJ])
        return error_set(err, EXIT_USAGE, "they are one matrix of this model",
                         "--lora-targets: expected gate and up together, found one of them");
    return !c->nf4 || (k % 64 == 0 && up % 64 == 0) ||
           error_set(err, EXIT_BAD_INPUT, "leave --base nf4 out",
                     "--base nf4: expected matrices of whole blocks of 64 numbers, found k_proj of "
                     "%ld and up_proj of %ld",
                     k, up);
}

// ---- adapter_config.json ------------------------------------------------------------------------
// The base of adapters trained on NF4 is described as in config.json of transformers, for its
// BitsAndBytesConfig. PEFT has no such key: it warns and ignores it.
#define QUANTIZATION "quantization_config"

// Whether a key that is not null, false or empty leaves the adapter's maths as implemented here
static bool is_computed(const char *key, const json_t *item) {
    static const char any_value[] =
        " auto_mapping base_model_name_or_path corda_config eva_config inference_mode loftq_config "
        "lora_alpha lora_dropout lora_ga_config megatron_core peft_version qalora_group_size r "
        "revision runtime_config target_modules task_type ";
    char word[64];
    if (strcmp(key, "peft_type") == 0) return json_string_is(item, "LORA");
    if (strcmp(key, "bias") == 0) return json_string_is(item, "none");
    if (strcmp(key, QUANTIZATION) == 0)
        return json_is_true(json_object_get(item, "load_in_4bit")) &&
               json_string_is(json_object_get(item, "bnb_4bit_quant_type"), "nf4") &&
               !json_is_true(json_object_get(item, "bnb_4bit_use_double_quant"));
    if (strcmp(key, "init_lora_weights") == 0)  // others have changed the base model
        return json_is_true(item) || json_string_is(item, "gaussian");
    snprintf(word, sizeof word, " %s ", key);
    return strstr(any_value, word) != NULL;
}

static bool read_root(LoraConfig *c, char base_model[IO_PATH_MAX], json_t *root, Error *err) {
    const char *base = "", *key;
    const json_t *item, *targets = json_member(root, "target_modules");
    double alpha = 8;  // PEFT's defaults
    *c = (LoraConfig){.rank = 8};
    json_object_foreach(root, key, item) {
        if (json_is_null(item) && (strcmp(key, "r") == 0 || strcmp(key, "lora_alpha") == 0))
            return bad_input(err, "%s: expected a number, found null", key);
        if (json_is_set(item) && !is_computed(key, item))
            return bad_input(err, "%s: expected LoRA of linear layers only, found more", key);
    }
    for (size_t i = 0; i < json_array_size(targets) || i == 0; i++) {
        const char *name = json_string_value(json_array_get(targets, i));
        if (name && strcmp(name, "input_linear") == 0)  // Granite 4's names
            c->target[GATE_PROJ] = c->target[UP_PROJ] = true;
        else if (name && strcmp(name, "output_linear") == 0)
            c->target[DOWN_PROJ] = true;
        else if (!name || !strchr(name, '_') ||
                 !add_target(c, name, strlen(name)))  // no "q" of --lora
            return error_set(
                err, EXIT_BAD_INPUT, "write the names of the linear layers as a list",
                "target_modules: expected q_proj, ... down_proj in a list, found %s%.300s",
                json_is_string(targets) ? "the regular expression " : "",
                json_is_string(targets) ? json_string_value(targets)
                : name                  ? name
                                        : "none");
    }
    if (!json_get_string(root, "base_model_name_or_path", &base, false, err) ||
        !json_get_int(root, "r", 1, 1024, &c->rank, false, err) ||
        !json_get_double(root, "lora_alpha", 1e-6, 1e6, &alpha, false, err))
        return false;
    if (!json_string_is(json_member(root, "peft_type"), "LORA"))
        return bad_input(err, "peft_type: expected LORA, not found");
    c->alpha = (float)alpha;
    c->nf4 = json_is_set(json_member(root, QUANTIZATION));
    text_copy(base_model, IO_PATH_MAX, base);
    return true;
}

bool lora_config_read(LoraConfig *c, char base_model[IO_PATH_MAX], const char *dir, Error *err) {
    const char *file = "adapter_config.json", *path = PATH_IN(dir, file);
    if (!model_is_no_run("adapter", dir, file, err)) return false;
    json_auto_t *root = json_read(path, JSON_MAX_CONFIG,
                                  "an adapter is a directory that --lora or PEFT has written", err);
    return root && (read_root(c, base_model, root, err) || error_prefix(err, path));
}

char *lora_config_text(const LoraConfig *c, const LlamaConfig *model, const char *base_model) {
    LayerMatrix matrices[LAYER_MATRICES];
    AUTO_FREE char *absolute = path_exists(base_model) ? realpath(base_model, NULL) : NULL;
    json_t *targets = json_array();
    llama_layer_matrices(matrices, model);
    for (int t = 0; t < LORA_TARGETS; t++)
        if (c->target[t] && matrices[t].name)
            json_array_append_new(targets, json_string(strchr(matrices[t].name, '.') + 1));
    json_t *root =
        json_pack("{s:s, s:s, s:o, s:i, s:f, s:f, s:s, s:o, s:{s:s, s:b, s:s, s:b}}", "peft_type",
                  "LORA", "task_type", "CAUSAL_LM", "base_model_name_or_path",
                  json_text(absolute ? absolute : base_model), "r", c->rank, "lora_alpha",
                  (double)c->alpha, "lora_dropout", 0.0, "bias", "none", "target_modules", targets,
                  QUANTIZATION, "quant_method", "bitsandbytes", "load_in_4bit", 1,
                  "bnb_4bit_quant_type", "nf4", "bnb_4bit_use_double_quant", 0);
    if (!c->nf4) json_object_del(root, QUANTIZATION);
    return json_write(root, JSON_INDENT(2));
}

// ---- Parameters ---------------------------------------------------------------------------------

#define ADAPTER_OF "base_model.model."  // prefix of the model's tensor names

int lora_linear_parameters(Parameter *list, int64_t *column, int64_t *rows, const LoraConfig *c,
                           const LlamaConfig *model, int l, int linear) {
    LayerMatrix matrices[LAYER_MATRICES];
    const int padding = lora_padded_rank(c) - c->rank;
    int64_t end = 0;
    int n = 0, targets[LORA_TARGETS];
    llama_layer_matrices(matrices, model);
    for (int t = 0; t < LORA_TARGETS; t++) {
        if (matrices[t].linear != linear) continue;
        column[n] = end;
        rows[n] = matrices[t].rows;
        end += rows[n];
        if (c->target[t] && matrices[t].name) targets[n++] = t;
    }
    for (int i = 0; i < 2 * n; i++) {
        const LayerMatrix *t = &matrices[targets[i % n]];
        const bool is_a = i < n;
        list[i] = (Parameter){.rows = is_a ? c->rank : t->rows,
                              .cols = is_a ? t->cols : c->rank,
                              .pad_rows = is_a ? padding : 0,
                              .pad_cols = is_a ? 0 : padding,
                              .moments = 2,
                              .init_std = -1,
                              .init_bound = is_a ? 1 / sqrtf((float)t->cols) : 0};
        snprintf(list[i].name, sizeof list[i].name, ADAPTER_OF "model.layers.%d.%s.lora_%c.weight",
                 l, t->name, is_a ? 'A' : 'B');
    }
    return n;
}

// A or B of the adapter for one of the model's matrices; NULL if it has none
static const Parameter *adapter_of(const LoraMerge *merge, const Parameter *t, char which) {
    const int stem = (int)(strlen(t->name) - strlen(".weight"));
    char name[sizeof t->name + 40];
    snprintf(name, sizeof name, ADAPTER_OF "%.*s.lora_%c.weight", stem, t->name, which);
    for (int i = 0; i < merge->adapters.num && t->cols; i++)
        if (strcmp(merge->adapters.list[i].name, name) == 0) return &merge->adapters.list[i];
    return NULL;
}

static void get_merged(void *context, ParameterArena arena, size_t offset, float *values,
                       size_t n) {
    LoraMerge *merge = context;
    const Parameters *adapters = &merge->adapters;
    const Parameter *t = merge->frozen.list;
    while (offset - t->offset >= t->count) t++;  // offsets need not ascend
    const Parameter *a = adapter_of(merge, t, 'A'), *b = adapter_of(merge, t, 'B');
    must(safetensors_read_f32(&merge->files, safetensors_find(&merge->files, t->name), values,
                              offset - t->offset, n, &err));
    if (!a) return;
    const size_t cols = (size_t)t->cols, r = a->count / cols, first = offset - t->offset,
                 row = first / cols, rows = (first + n - 1) / cols - row + 1;
    AUTO_FREE float *A = host_calloc(a->count + rows * r, sizeof *A, "adapters");
    float *B = A + a->count;
    adapters->get(adapters->context, arena, a->offset, A, a->count);
    adapters->get(adapters->context, arena, b->offset + row * r, B, rows * r);
    for (size_t i = first; i < first + n; i++)
        for (size_t k = 0; k < r; k++)
            values[i - first] +=
                lora_scale(merge->config) * B[(i / cols - row) * r + k] * A[k * cols + i % cols];
}

bool lora_merge_open(LoraMerge *merge, const char *dir, Parameters *merged, Error *err) {
    *merged = merge->frozen;
    merged->context = merge;
    merged->get = get_merged;
    return weights_check(merge->frozen, dir, err) && safetensors_open(&merge->files, dir, err);
}
