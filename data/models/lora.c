#include "lora.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/path.h"

const char *const lora_target_names[] = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                         "gate_proj", "up_proj", "down_proj"};

// The target named by n characters, as "q" or "q_proj"
static bool add_target(LoraConfig *c, const char *name, size_t n) {
    for (int t = 0; t < LORA_TARGETS && n > 0; t++) {
        const char *known = lora_target_names[t];
        if (strncmp(known, name, n) != 0 || (known[n] != 0 && known[n] != '_')) continue;
        c->target[t] = true;
        return true;
    }
    return false;
}

static bool check_rank(int rank, int code, const char *where, Error *err) {
    return (rank > 0 && rank % 8 == 0) ||
           error_set(err, code, "kernels take 8 numbers at a time: 8, 16, 32 ...",
                     "%s: expected a multiple of 8, found %d", where, rank);
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
        if (targets[n] == 0) return check_rank(rank, EXIT_USAGE, "--lora", err);
    }
}

// ------------------------------------------------------------------------------------------------
// adapter_config.json

// Whether a key that is neither null, false nor empty leaves what an adapter computes as it is here
static bool is_computed(const char *key, const json_t *item) {
    static const char any_value[] =
        " auto_mapping base_model_name_or_path corda_config eva_config inference_mode loftq_config "
        "lora_alpha lora_dropout lora_ga_config megatron_core peft_version qalora_group_size r "
        "revision runtime_config target_modules task_type ";
    char word[64];
    if (strcmp(key, "peft_type") == 0) return json_string_is(item, "LORA");
    if (strcmp(key, "bias") == 0) return json_string_is(item, "none");
    if (strcmp(key, "init_lora_weights") == 0)  // by others the base model was changed
        return json_is_true(item) || json_string_is(item, "gaussian");
    snprintf(word, sizeof word, " %s ", key);
    return strstr(any_value, word) != NULL;
}

static bool read_root(LoraConfig *c, char *base_model, size_t capacity, json_t *root, Error *err) {
    const char *base = "", *key;
    const json_t *item, *targets = json_member(root, "target_modules");
    double alpha = 8;  // PEFT's defaults
    *c = (LoraConfig){.rank = 8};
    json_object_foreach(root, key, item) {
        if (json_is_null(item) && (strcmp(key, "r") == 0 || strcmp(key, "lora_alpha") == 0))
            return bad_input(err, "%s: expected a number, found null", key);
        if (json_is_set(item) && !is_computed(key, item))
            return bad_input(err, "%s: expected LoRA of linear layers alone, found more", key);
    }
    for (size_t i = 0; i < json_array_size(targets) || i == 0; i++) {
        const char *name = json_string_value(json_array_get(targets, i));
        if (!name || !strchr(name, '_') || !add_target(c, name, strlen(name)))  // no "q" of --lora
            return bad_input(err,
                             "target_modules: expected q_proj, ... down_proj in a list, found %s",
                             name ? name : "none");
    }
    if (!json_get_string(root, "base_model_name_or_path", &base, false, err) ||
        !json_get_int(root, "r", 1, 1024, &c->rank, false, err) ||
        !json_get_double(root, "lora_alpha", 1e-6, 1e6, &alpha, false, err))
        return false;
    if (!json_string_is(json_member(root, "peft_type"), "LORA"))
        return bad_input(err, "peft_type: expected LORA, not found");
    c->alpha = (float)alpha;
    text_copy(base_model, capacity, base);
    return check_rank(c->rank, EXIT_BAD_INPUT, "r", err);
}

bool lora_config_read(LoraConfig *c, char *base_model, size_t capacity, const char *dir,
                      Error *err) {
    char path[IO_PATH_MAX];
    if (!path_join(path, sizeof path, dir, "adapter_config.json", err)) return false;
    json_auto_t *root = json_read(path, JSON_MAX_CONFIG,
                                  "an adapter is a directory that --lora or PEFT has written", err);
    return root && (read_root(c, base_model, capacity, root, err) || error_prefix(err, path));
}

char *lora_config_text(const LoraConfig *c, const char *base_model) {
    json_t *targets = json_array();
    for (int t = 0; t < LORA_TARGETS; t++)
        if (c->target[t]) json_array_append_new(targets, json_string(lora_target_names[t]));
    return json_write(json_pack("{s:s, s:s, s:o, s:i, s:f, s:f, s:s, s:o}", "peft_type", "LORA",
                                "task_type", "CAUSAL_LM", "base_model_name_or_path",
                                json_text(base_model), "r", c->rank, "lora_alpha", (double)c->alpha,
                                "lora_dropout", 0.0, "bias", "none", "target_modules", targets),
                      JSON_INDENT(2));
}
