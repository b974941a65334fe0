#include "lora.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/path.h"

#define FILE_NAME "adapter_config.json"
enum { MAX_RANK = 1024 };

const char *const lora_target_names[] = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj",
};

// The target named by n characters: "q", "q_proj"; -1: none.
static int find_target(const char *name, size_t n) {
    for (int t = 0; t < LORA_TARGETS; t++) {
        const char *known = strchr(lora_target_names[t], '.') + 1;
        if (strncmp(known, name, n) == 0 && (known[n] == 0 || known[n] == '_')) return t;
    }
    return -1;
}

int lora_num_targets(const LoraConfig *c) {
    int n = 0;
    for (int t = 0; t < LORA_TARGETS; t++) n += c->target[t];
    return n;
}

static bool check_rank(int rank, int code, const char *where, Error *err) {
    if (rank >= 8 && rank <= MAX_RANK && rank % 8 == 0) return true;
    return error_set(err, code, "kernels take 8 numbers at a time: 8, 16, 32 ...",
                     "%s: expected a multiple of 8, up to %d, found %d", where, MAX_RANK, rank);
}

bool lora_config_make(LoraConfig *c, int rank, float alpha, const char *targets, Error *err) {
    *c = (LoraConfig){.rank = rank, .alpha = alpha > 0 ? alpha : 2 * (float)rank};
    const bool all = strcmp(targets, "all") == 0;
    for (int t = 0; t < LORA_TARGETS; t++) c->target[t] = all;
    for (size_t n; !all; targets += n + 1) {
        n = strcspn(targets, ",");
        const int t = n > 0 ? find_target(targets, n) : -1;
        if (t < 0)
            return error_set(err, EXIT_USAGE, "for example --lora-targets q,v",
                             "--lora-targets: expected all, or some of q,k,v,o,gate,up,down, "
                             "found \"%.*s\"",
                             (int)n, targets);
        c->target[t] = true;
        if (targets[n] == 0) break;
    }
    return check_rank(rank, EXIT_USAGE, "--lora", err);
}

void lora_merge(float *weights, size_t first, size_t n, size_t cols, const float *A, const float *B,
                const LoraConfig *c) {
    for (size_t done = 0, width; done < n; done += width, B += c->rank) {  // a row, or a part of it
        const size_t col = (first + done) % cols;
        width = n - done < cols - col ? n - done : cols - col;
        for (int k = 0; k < c->rank; k++) {
            const float b = lora_scale(c) * B[k], *a = A + (size_t)k * cols + col;
            for (size_t i = 0; i < width; i++) weights[done + i] += b * a[i];
        }
    }
}

// ------------------------------------------------------------------------------------------------
// adapter_config.json

// Keys that are read below, or do not change what an adapter computes. Any other may, unless it is
// null, false or empty.
static const char known_keys[] =
    " auto_mapping base_model_name_or_path bias corda_config eva_config inference_mode "
    "init_lora_weights loftq_config lora_alpha lora_dropout lora_ga_config megatron_core peft_type "
    "peft_version qalora_group_size r revision runtime_config target_modules task_type ";

static bool is_known(const char *key) {
    char word[64];
    snprintf(word, sizeof word, " %s ", key);
    return strstr(known_keys, word) != NULL;
}

static bool refuse(const char *key, const char *expected, const json_t *found, Error *err) {
    char *text = json_dumps(found, JSON_ENCODE_ANY);
    error_set(err, EXIT_BAD_INPUT,
              "the adapter needs more than this trainer computes; PEFT's merge_and_unload makes a "
              "model of it",
              "%s: expected %s, found %.60s", key, expected, text ? text : "nothing");
    free(text);
    return false;
}

static bool read_targets(LoraConfig *c, const json_t *root, Error *err) {
    const json_t *list = json_member(root, "target_modules"), *item;
    size_t i;
    if (!json_is_array(list) || json_array_size(list) == 0)
        return refuse("target_modules", "a list of linear layers", list, err);
    json_array_foreach(list, i, item) {
        const char *name = json_string_value(item);
        const int t = name && strlen(name) > 5 ? find_target(name, strlen(name)) : -1;
        if (t < 0) return refuse("target_modules", "q_proj ... down_proj", item, err);
        c->target[t] = true;
    }
    return true;
}

static bool read_root(LoraConfig *c, char *base_model, size_t capacity, const json_t *root,
                      Error *err) {
    const char *base = "", *type = "", *bias = "none";
    double alpha = 8;  // PEFT's defaults
    c->rank = 8;
    const char *key;
    const json_t *item;
    json_object_foreach((json_t *)root, key, item) {
        if (json_is_set(item) && !is_known(key)) return refuse(key, "null", item, err);
    }
    const json_t *init = json_object_get(root, "init_lora_weights");
    if (json_is_string(init) && !json_string_is(init, "gaussian"))
        return refuse("init_lora_weights", "true: others change the base model", init, err);
    if (!json_get_string(root, "peft_type", &type, true, err) ||
        !json_get_string(root, "bias", &bias, false, err) ||
        !json_get_string(root, "base_model_name_or_path", &base, false, err) ||
        !json_get_int(root, "r", 1, MAX_RANK, &c->rank, false, err) ||
        !json_get_double(root, "lora_alpha", 1e-6, 1e6, &alpha, false, err))
        return false;
    if (strcmp(type, "LORA") != 0)
        return refuse("peft_type", "LORA", json_object_get(root, "peft_type"), err);
    if (strcmp(bias, "none") != 0)
        return refuse("bias", "none", json_object_get(root, "bias"), err);
    c->alpha = (float)alpha;
    text_copy(base_model, capacity, base);
    return check_rank(c->rank, EXIT_BAD_INPUT, "r", err) && read_targets(c, root, err);
}

bool lora_config_read(LoraConfig *c, char *base_model, size_t capacity, const char *dir,
                      Error *err) {
    char path[IO_PATH_MAX];
    *c = (LoraConfig){0};
    if (!path_join(path, sizeof path, dir, FILE_NAME, err)) return false;
    json_auto_t *root = json_read(path, JSON_MAX_CONFIG,
                                  "an adapter is a directory that --lora or PEFT has written", err);
    return root && (read_root(c, base_model, capacity, root, err) || error_prefix(err, path));
}

char *lora_config_text(const LoraConfig *c, const char *base_model) {
    json_t *targets = json_array();
    for (int t = 0; t < LORA_TARGETS; t++)
        if (c->target[t])
            json_array_append_new(targets, json_string(strchr(lora_target_names[t], '.') + 1));
    return json_write(
        json_pack("{s:s, s:s, s:o, s:i, s:f, s:f, s:s, s:o, s:b, s:b}", "peft_type", "LORA",
                  "task_type", "CAUSAL_LM", "base_model_name_or_path", json_text(base_model), "r",
                  c->rank, "lora_alpha", (double)c->alpha, "lora_dropout", 0.0, "bias", "none",
                  "target_modules", targets, "fan_in_fan_out", false, "inference_mode", true),
        JSON_INDENT(2));
}
