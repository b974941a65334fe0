#include "config.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/path.h"

// ------------------------------------------------------------------------------------------------
// Built-in models: published values of each model's config.json (base models' bos and eos)

#define LLAMA3_ROPE(factor_) \
    { ROPE_LLAMA3, factor_, 1, 4, 8192, 0 }
#define LLAMA \
    { MODEL_LLAMA, false, false, 0 }
static const struct {
    const char *name;
    LlamaConfig config;
} builtins[] = {
    // name, vocab, hidden, ffn, layers, heads, kv heads, head_dim, positions, eps, theta, rope
    // scaling, tied, init, bos, eos, type
    {"demo", {264, 192, 512, 6, 3, 1, 64, 8192, 1e-5f, 1e4, {0}, true, 0.02f, 256, 257, LLAMA}},
    {"smollm2-135m",
     {49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5f, 1e5, {0}, true, 1.0f / 24, 0, 0, LLAMA}},
    {"smollm2-360m",
     {49152, 960, 2560, 32, 15, 5, 64, 8192, 1e-5f, 1e5, {0}, true, 0.02f, 0, 0, LLAMA}},
    {"smollm2-1.7b",
     {49152, 2048, 8192, 24, 32, 32, 64, 8192, 1e-5f, 1.3e5, {0}, true, 0.02f, 0, 0, LLAMA}},
    {"llama-3.2-1b",
     {128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5f, 5e5, LLAMA3_ROPE(32), true, 0.02f, 128000,
      128001, LLAMA}},
    {"llama-3.2-3b",
     {128256, 3072, 8192, 28, 24, 8, 128, 131072, 1e-5f, 5e5, LLAMA3_ROPE(32), true, 0.02f, 128000,
      128001, LLAMA}},
    {"llama-3.1-8b",
     {128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5f, 5e5, LLAMA3_ROPE(8), false, 0.02f, 128000,
      128001, LLAMA}},
};
enum { NUM_BUILTINS = sizeof builtins / sizeof *builtins };

bool llama_config_builtin(LlamaConfig *c, const char *name) {
    for (int i = 0; i < NUM_BUILTINS; i++) {
        if (strcmp(builtins[i].name, name) != 0) continue;
        *c = builtins[i].config;
        return true;
    }
    return false;
}

// ------------------------------------------------------------------------------------------------
// Types of models, and of RoPE

// What makes each of them, and its defaults for missing keys, those of transformers' class
static const struct {
    const char *name, *architecture;
    bool qkv_bias, qk_norm;
    int no_rope_interval;
    int num_kv_heads;  // 0: num_heads
    int head_dim;      // 0: hidden_size / num_heads
    int max_position_embeddings;
    double rope_theta;
    bool tie_word_embeddings;
    int bos_token_id, eos_token_id;
    const char *own_keys;  // of `neutral` below: read elsewhere, or without a meaning here
} types[] = {
    [MODEL_LLAMA] = {"llama", "LlamaForCausalLM", false, false, 0, 0, 0, 2048, 1e4, false, 1, 2,
                     ""},
    [MODEL_MISTRAL] = {"mistral", "MistralForCausalLM", false, false, 0, 8, 0, 131072, 1e4, false,
                       1, 2, "pretraining_tp"},
    [MODEL_QWEN2] = {"qwen2", "Qwen2ForCausalLM", true, false, 0, 32, 0, 32768, 1e4, false, -1, -1,
                     "pretraining_tp sliding_window"},
    [MODEL_QWEN3] = {"qwen3", "Qwen3ForCausalLM", false, true, 0, 32, 128, 32768, 1e4, false, -1,
                     -1, "pretraining_tp sliding_window"},
    [MODEL_SMOLLM3] = {"smollm3", "SmolLM3ForCausalLM", false, false, 4, 4, 0, 32768, 2e6, true,
                       128000, 128001, "pretraining_tp sliding_window no_rope_layers"},
};
enum { NUM_TYPES = sizeof types / sizeof *types };

typedef struct {
    const char *type, *low, *high;  // the keys of low_freq_factor and high_freq_factor
} RopeKeys;
static const RopeKeys rope_keys[] = {
    [ROPE_PLAIN] = {"default", NULL, NULL},
    [ROPE_LINEAR] = {"linear", NULL, NULL},
    [ROPE_LLAMA3] = {"llama3", "low_freq_factor", "high_freq_factor"},
    [ROPE_YARN] = {"yarn", "beta_slow", "beta_fast"},
};
enum { NUM_ROPE_TYPES = sizeof rope_keys / sizeof *rope_keys };

// ------------------------------------------------------------------------------------------------
// Sizes

uint64_t llama_config_num_params(const LlamaConfig *c) {
    uint64_t hidden = (uint64_t)c->hidden_size, q = (uint64_t)c->num_heads * (uint64_t)c->head_dim;
    uint64_t kv = (uint64_t)c->num_kv_heads * (uint64_t)c->head_dim;
    uint64_t attention = hidden * (q + 2 * kv) + q * hidden;
    uint64_t mlp = 3 * hidden * (uint64_t)c->intermediate_size;
    uint64_t embedding = (uint64_t)c->vocab_size * hidden;
    uint64_t vectors =
        2 * hidden + (c->qkv_bias ? q + 2 * kv : 0) + (c->qk_norm ? 2 * (uint64_t)c->head_dim : 0);
    uint64_t layers = (uint64_t)c->num_layers * (attention + mlp + vectors);
    return embedding * (c->tie_word_embeddings ? 1 : 2) + layers + hidden;
}

double llama_config_flops(const LlamaConfig *c, int64_t tokens, int64_t pairs) {
    const double C = c->hidden_size, D = c->head_dim, L = c->num_layers;
    const double layer =
        C * (3.0 * c->intermediate_size + 2 * D * (c->num_heads + c->num_kv_heads));
    return 6 * (L * layer + C * c->vocab_size) * (double)tokens +
           12 * L * D * c->num_heads * (double)pairs;
}

// The largest value of each field: their products fit in 64 bits with room to spare.
enum {
    LLAMA_MAX_VOCAB = 1 << 24,
    LLAMA_MAX_WIDTH = 1 << 18,
    LLAMA_MAX_LAYERS = 1024,
    LLAMA_MAX_HEADS = 1024,
    LLAMA_MAX_HEAD_DIM = 1024,
    LLAMA_MAX_POSITIONS = 1 << 26,
};

static bool check_heads(const LlamaConfig *c, const char *where, Error *err) {
    if (c->num_heads % c->num_kv_heads != 0)
        return error_set(
            err, EXIT_BAD_INPUT, "query heads share key/value heads in equal groups",
            "%s: num_attention_heads %d: expected a multiple of num_key_value_heads %d", where,
            c->num_heads, c->num_kv_heads);
    if (c->head_dim % 2 != 0)
        return error_set(err, EXIT_BAD_INPUT, "RoPE rotates pairs",
                         "%s: head_dim %d: expected an even number", where, c->head_dim);
    if (c->num_heads * c->head_dim > LLAMA_MAX_WIDTH)
        return bad_input(err, "%s: num_attention_heads %d x head_dim %d: expected at most %d",
                         where, c->num_heads, c->head_dim, LLAMA_MAX_WIDTH);
    return true;
}

bool llama_config_check(const LlamaConfig *c, const char *where, Error *err) {
    if (!check_heads(c, where, err)) return false;
    if (c->bos_token_id >= c->vocab_size || c->eos_token_id >= c->vocab_size)
        return error_set(err, EXIT_BAD_INPUT, "token ids count from 0",
                         "%s: bos_token_id %d, eos_token_id %d: expected less than vocab_size %d",
                         where, c->bos_token_id, c->eos_token_id, c->vocab_size);
    const RopeScaling *r = &c->rope_scaling;
    const RopeKeys *keys = &rope_keys[r->type];
    if (keys->low && !(r->high_freq_factor > r->low_freq_factor))
        return bad_input(err, "%s: %s %g: expected more than %s %g", where, keys->high,
                         r->high_freq_factor, keys->low, r->low_freq_factor);
    uint64_t params = llama_config_num_params(c);
    if (params > (uint64_t)1 << 40)
        return bad_input(err, "%s: expected at most 2^40 parameters, found %lu", where, params);
    return true;
}

// ------------------------------------------------------------------------------------------------
// Reading

// Keys that change the maths, by the only value for which ours is right ("null": absent). Keys that
// are neither here nor read below (use_cache, ...) do not change it.
static const struct {
    const char *value, *keys[20];
} neutral[] = {
    {"false",
     {"alibi", "attention_bias", "attention_out_bias", "bias", "is_encoder_decoder", "mlp_bias",
      "parallel_residual", "qk_layernorm", "qk_norm", "qkv_bias", "use_bias", "use_mrope",
      "use_parallel_residual", "use_qk_norm", "use_sliding_window",
      "rope_interleaved"}},  // Hugging Face weights are half-rotated, whatever they were
    {"null",
     {"attention_multiplier", "attn_logit_softcapping", "clip_qkv", "final_logit_softcapping",
      "hidden_activation", "mup_scale", "no_rope_layers", "num_experts", "num_local_experts",
      "quantization_config", "sliding_window", "auto_map"}},  // code of the model's own
    {"0", {"attention_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"}},
    {"1",
     {"embedding_multiplier", "logit_scale", "logits_scaling", "partial_rotary_factor",
      "residual_multiplier", "rotary_pct", "scale_depth", "scale_emb",
      "pretraining_tp"}},  // another order of summation, and a layout of its own
    {"silu", {"hidden_act"}},
};

static bool value_is(const json_t *item, const char *text) {
    if (json_is_null(item)) return strcmp(text, "silu") != 0;
    if (json_is_boolean(item)) return strcmp(text, json_is_true(item) ? "true" : "false") == 0;
    if (json_is_number(item)) return text[0] <= '9' && json_number_value(item) == atof(text);
    return json_string_is(item, text);
}

static bool refuse(const char *key, const char *expected, const json_t *item, Error *err) {
    char found[64] = "something else";
    if (json_is_string(item))
        snprintf(found, sizeof found, "\"%.40s\"", json_string_value(item));
    else if (json_is_number(item))
        snprintf(found, sizeof found, "%g", json_number_value(item));
    else if (json_is_boolean(item))
        text_copy(found, sizeof found, json_is_true(item) ? "true" : "false");
    return error_set(err, EXIT_BAD_INPUT, "the model needs more than this trainer computes",
                     "%s: expected %s, found %s", key, expected, found);
}

static bool read_type(LlamaConfig *c, const json_t *root, Error *err) {
    const char *name = NULL, *expected = "llama, mistral, qwen2, qwen3 or smollm3";
    if (!json_get_string(root, "model_type", &name, true, err)) return false;
    for (int i = 0; i < NUM_TYPES; i++) {
        if (strcmp(name, types[i].name) != 0) continue;
        c->model_type = (ModelType)i;
        c->qkv_bias = types[i].qkv_bias;
        c->qk_norm = types[i].qk_norm;
        return true;
    }
    return refuse("model_type", expected, json_object_get(root, "model_type"), err);
}

static bool read_neutral(const LlamaConfig *c, const json_t *root, Error *err) {
    for (size_t i = 0; i < sizeof neutral / sizeof *neutral; i++)
        for (const char *const *key = neutral[i].keys; *key; key++) {
            const json_t *item = json_object_get(root, *key);
            if (item && !value_is(item, neutral[i].value) &&
                !strstr(types[c->model_type].own_keys, *key))
                return refuse(*key, neutral[i].value, item, err);
        }
    if (c->model_type == MODEL_MISTRAL && !json_object_get(root, "sliding_window"))
        return error_set(err, EXIT_BAD_INPUT, "without this key transformers has a window of 4096",
                         "sliding_window: expected null, not found");
    return true;
}

// architectures: a list with the model's. layer_types: every one full_attention.
static bool read_lists(const LlamaConfig *c, const json_t *root, Error *err) {
    const char *architecture = types[c->model_type].architecture;
    const json_t *names = json_member(root, "architectures"),
                 *layers = json_member(root, "layer_types"), *item;
    size_t i;
    bool found = !names;
    if (names && !json_is_array(names))
        return json_type_error(names, "architectures", "an array", err);
    if (layers && !json_is_array(layers))
        return json_type_error(layers, "layer_types", "an array", err);
    json_array_foreach(names, i, item) found |= json_string_is(item, architecture);
    if (!found) return refuse("architectures", architecture, json_array_get(names, 0), err);
    json_array_foreach(layers, i, item) {
        if (!json_string_is(item, "full_attention"))
            return refuse("layer_types", "full_attention", item, err);
    }
    return true;
}

// no_rope_layers: for each layer 1, or 0 where it has no RoPE: every interval-th. It says more than
// no_rope_layer_interval.
static bool read_no_rope(LlamaConfig *c, const json_t *root, Error *err) {
    const json_t *layers = json_member(root, "no_rope_layers"), *item;
    const int L = c->num_layers;
    int interval = types[c->model_type].no_rope_interval;
    size_t l;
    if (interval == 0) return true;
    if (!json_get_int(root, "no_rope_layer_interval", 1, INT_MAX, &interval, false, err))
        return false;
    if (layers && json_array_size(layers) != (size_t)L)
        return refuse("no_rope_layers", "an array with a number for each layer", layers, err);
    if (layers) interval = L + 1;
    json_array_foreach(layers, l, item) {
        const bool rope = json_number_value(item) != 0;
        if (!rope && interval > L) interval = (int)l + 1;
        if (!json_is_number(item) || rope != ((l + 1) % (size_t)interval != 0))
            return refuse("no_rope_layers", "1, and 0 at equal intervals", item, err);
    }
    c->no_rope_interval = interval > L ? 0 : interval;
    return true;
}

static bool read_sizes(LlamaConfig *c, const json_t *root, Error *err) {
    const int width = LLAMA_MAX_WIDTH, heads = LLAMA_MAX_HEADS, dim = LLAMA_MAX_HEAD_DIM;
    if (!json_get_int(root, "vocab_size", 1, LLAMA_MAX_VOCAB, &c->vocab_size, true, err) ||
        !json_get_int(root, "hidden_size", 1, width, &c->hidden_size, true, err) ||
        !json_get_int(root, "intermediate_size", 1, width, &c->intermediate_size, true, err) ||
        !json_get_int(root, "num_hidden_layers", 1, LLAMA_MAX_LAYERS, &c->num_layers, true, err) ||
        !json_get_int(root, "num_attention_heads", 1, heads, &c->num_heads, true, err))
        return false;
    const bool given = json_object_get(root, "num_key_value_heads") != NULL;
    c->num_kv_heads = types[c->model_type].num_kv_heads;
    if (given || !c->num_kv_heads) c->num_kv_heads = c->num_heads;
    c->head_dim = types[c->model_type].head_dim;
    if (!json_get_int(root, "num_key_value_heads", 1, heads, &c->num_kv_heads, false, err) ||
        !json_get_int(root, "head_dim", 2, dim, &c->head_dim, false, err))
        return false;
    if (c->head_dim == 0) {
        if (c->hidden_size % c->num_heads != 0)
            return error_set(err, EXIT_BAD_INPUT, "or give head_dim",
                             "hidden_size %d: expected a multiple of num_attention_heads %d",
                             c->hidden_size, c->num_heads);
        c->head_dim = c->hidden_size / c->num_heads;
    }
    c->max_position_embeddings = types[c->model_type].max_position_embeddings;
    return json_get_int(root, "max_position_embeddings", 1, LLAMA_MAX_POSITIONS,
                        &c->max_position_embeddings, false, err);
}

// A number, or null for none, or (eos) a list, whose first element counts.
static bool read_token(const json_t *root, const char *key, int fallback, int vocab_size, int *out,
                       Error *err) {
    const json_t *item = json_object_get(root, key);
    int64_t id = -1;
    if (!item) id = fallback < vocab_size ? fallback : -1;
    if (json_is_array(item) && strcmp(key, "eos_token_id") == 0) item = json_array_get(item, 0);
    if (item && !json_is_null(item) && !json_int64_value(item, key, 0, vocab_size - 1, &id, err))
        return false;
    *out = (int)id;
    return true;
}

static bool read_scalars(LlamaConfig *c, const json_t *root, Error *err) {
    const int bos = types[c->model_type].bos_token_id, eos = types[c->model_type].eos_token_id;
    double eps = 1e-6, range = 0.02;
    c->tie_word_embeddings = types[c->model_type].tie_word_embeddings;
    if (!json_get_double(root, "rms_norm_eps", 1e-20, 0.1, &eps, false, err) ||
        !json_get_double(root, "initializer_range", 0, 10, &range, false, err) ||
        !json_get_bool(root, "tie_word_embeddings", &c->tie_word_embeddings, false, err) ||
        !read_token(root, "bos_token_id", bos, c->vocab_size, &c->bos_token_id, err) ||
        !read_token(root, "eos_token_id", eos, c->vocab_size, &c->eos_token_id, err))
        return false;
    c->rms_norm_eps = (float)eps;
    c->initializer_range = (float)range;
    return true;
}

// Of YaRN's keys: how cosines and sines are scaled
static bool read_attention_factor(RopeScaling *r, const json_t *rope, Error *err) {
    static const char *const only[][2] = {
        {"mscale", "null"}, {"mscale_all_dim", "null"}, {"truncate", "true"}};
    for (int i = 0; i < 3; i++) {
        const json_t *item = json_object_get(rope, only[i][0]);
        if (item && !value_is(item, only[i][1])) return refuse(only[i][0], only[i][1], item, err);
    }
    r->attention_factor = 0.1 * log(r->factor) + 1;
    return json_get_double(rope, "attention_factor", 1e-6, 1e6, &r->attention_factor, false, err);
}

static bool read_scaling(LlamaConfig *c, RopeType type, const json_t *rope, Error *err) {
    RopeScaling *r = &c->rope_scaling;
    const RopeKeys *keys = &rope_keys[type];
    const bool yarn = type == ROPE_YARN;
    r->type = type;
    if (!json_get_double(rope, "factor", 1, 1e6, &r->factor, true, err)) return false;
    if (!keys->low) return true;
    if (yarn) {
        r->low_freq_factor = 1, r->high_freq_factor = 32;
        r->original_max_position_embeddings = c->max_position_embeddings;
    }
    return json_get_double(rope, keys->low, 1e-6, 1e6, &r->low_freq_factor, !yarn, err) &&
           json_get_double(rope, keys->high, 1e-6, 1e6, &r->high_freq_factor, !yarn, err) &&
           json_get_int(rope, "original_max_position_embeddings", 1, LLAMA_MAX_POSITIONS,
                        &r->original_max_position_embeddings, !yarn, err) &&
           (!yarn || read_attention_factor(r, rope, err));
}

static bool read_rope_type(const json_t *rope, const char **type, Error *err) {
    const char *old_type = NULL;
    if (!json_get_string(rope, "type", &old_type, false, err) ||
        !json_get_string(rope, "rope_type", type, false, err))
        return false;
    if (*type && old_type && strcmp(*type, old_type) != 0)
        return error_set(err, EXIT_BAD_INPUT, "delete one of them",
                         "expected one rope_type, found \"%.60s\" and, as type, \"%.60s\"", *type,
                         old_type);
    if (!*type) *type = old_type;
    if (!*type && json_member(rope, "factor"))
        return bad_input(err, "rope_type: required beside factor, not found");
    return true;
}

// The object rope_scaling (old name) or rope_parameters (new name, with rope_theta inside).
static bool read_rope_object(LlamaConfig *c, json_t *rope, Error *err) {
    const char *key, *type = NULL;
    const json_t *item;
    if (!json_is_object(rope)) return bad_input(err, "expected an object");
    json_object_foreach(rope, key, item) {
        if (json_array_size(item) + json_object_size(item) > 0)
            return refuse(key, "one RoPE for all layers", item, err);
    }
    item = json_member(rope, "partial_rotary_factor");
    if (item && !value_is(item, "1")) return refuse("partial_rotary_factor", "1", item, err);
    if (!read_rope_type(rope, &type, err)) return false;
    if (!type || strcmp(type, "default") == 0) return true;
    for (int i = ROPE_LINEAR; i < NUM_ROPE_TYPES; i++)
        if (strcmp(type, rope_keys[i].type) == 0) return read_scaling(c, (RopeType)i, rope, err);
    return error_set(err, EXIT_BAD_INPUT, "the model needs more than this trainer computes",
                     "rope_type: expected default, linear, llama3 or yarn, found \"%.60s\"", type);
}

static bool read_rope(LlamaConfig *c, const json_t *root, Error *err) {
    const double min = 1, max = 1e12;
    json_t *rope = json_member(root, "rope_scaling");
    json_t *parameters = json_member(root, "rope_parameters");
    const char *name = rope ? "rope_scaling" : "rope_parameters";
    double outer = 0, inner = 0;
    if (rope && parameters)
        return error_set(err, EXIT_BAD_INPUT, "delete one of them",
                         "expected rope_scaling or rope_parameters, found both");
    if (!rope) rope = parameters;
    if (!json_get_double(root, "rope_theta", min, max, &outer, false, err)) return false;
    if (rope && (!read_rope_object(c, rope, err) ||
                 !json_get_double(rope, "rope_theta", min, max, &inner, false, err)))
        return error_prefix(err, name);
    if (outer > 0 && inner > 0 && outer != inner)
        return error_set(err, EXIT_BAD_INPUT, "delete one of them",
                         "rope_theta: expected one value, found %g and, in %s, %g", outer, name,
                         inner);
    c->rope_theta = inner > 0 ? inner : outer > 0 ? outer : types[c->model_type].rope_theta;
    return true;
}

bool llama_config_parse(LlamaConfig *c, const json_t *root, const char *path, Error *err) {
    memset(c, 0, sizeof *c);
    bool ok = json_is_object(root) ? read_type(c, root, err) && read_neutral(c, root, err) &&
                                         read_lists(c, root, err) && read_sizes(c, root, err) &&
                                         read_no_rope(c, root, err) && read_scalars(c, root, err) &&
                                         read_rope(c, root, err)
                                   : bad_input(err, "expected an object, found another value");
    return ok ? llama_config_check(c, path, err) : error_prefix(err, path);
}

bool llama_config_read(LlamaConfig *c, const char *path, Error *err) {
    char file[IO_PATH_MAX];
    if (!path_inside(file, sizeof file, path, "config.json", err)) return false;
    json_auto_t *root =
        json_read(file, JSON_MAX_CONFIG,
                  "expected a Hugging Face config.json or the directory it is in", err);
    return root && llama_config_parse(c, root, file, err);
}

bool llama_config_find(LlamaConfig *c, const char *model, Error *err) {
    char hint[400], names[256] = "";
    if (llama_config_builtin(c, model)) return true;
    if (path_exists(model)) return llama_config_read(c, model, err);
    for (int i = 0; i < NUM_BUILTINS; i++) text_list(names, sizeof names, builtins[i].name);
    snprintf(hint, sizeof hint, "give a Hugging Face directory or one of %s", names);
    return error_set(err, EXIT_BAD_INPUT, hint,
                     "%s: expected a model directory or a built-in name, found neither", model);
}

// ------------------------------------------------------------------------------------------------
// Writing

static json_t *rope_json(const RopeScaling *r) {
    const RopeKeys *keys = &rope_keys[r->type];
    if (r->type == ROPE_PLAIN) return json_null();
    json_t *rope = json_pack("{s:s, s:f}", "rope_type", keys->type, "factor", r->factor);
    if (keys->low)
        json_object_update_new(
            rope, json_pack("{s:f, s:f, s:i}", keys->high, r->high_freq_factor, keys->low,
                            r->low_freq_factor, "original_max_position_embeddings",
                            r->original_max_position_embeddings));
    if (r->type == ROPE_YARN)
        json_object_set_new(rope, "attention_factor", json_real(r->attention_factor));
    return rope;
}

static json_t *token_json(int id) { return id < 0 ? json_null() : json_integer(id); }

char *llama_config_text(const LlamaConfig *c, const char *torch_dtype) {
    json_t *all = json_pack(
        "{s:[s], s:s, s:b, s:f, s:o, s:o, s:i, s:s, s:i, s:o, s:i, s:i, s:b, s:i, s:i, s:i, s:i, "
        "s:o, s:o, s:f, s:b, s:s, s:b, s:i}",
        "architectures", types[c->model_type].architecture, "model_type", types[c->model_type].name,
        "attention_bias", false, "attention_dropout", 0.0, "bos_token_id",
        token_json(c->bos_token_id), "eos_token_id", token_json(c->eos_token_id), "head_dim",
        c->head_dim, "hidden_act", "silu", "hidden_size", c->hidden_size, "initializer_range",
        json_float(c->initializer_range), "intermediate_size", c->intermediate_size,
        "max_position_embeddings", c->max_position_embeddings, "mlp_bias", false,
        "num_attention_heads", c->num_heads, "num_hidden_layers", c->num_layers,
        "num_key_value_heads", c->num_kv_heads, "pretraining_tp", 1, "rms_norm_eps",
        json_float(c->rms_norm_eps), "rope_scaling", rope_json(&c->rope_scaling), "rope_theta",
        c->rope_theta, "tie_word_embeddings", (int)c->tie_word_embeddings, "torch_dtype",
        torch_dtype, "use_cache", true, "vocab_size", c->vocab_size);
    if (c->model_type != MODEL_LLAMA)
        json_object_update_new(
            all, json_pack("{s:n, s:b}", "sliding_window", "use_sliding_window", false));
    if (c->model_type == MODEL_SMOLLM3)  // the default of pad_token_id is 128004
        json_object_update_new(
            all, json_pack("{s:n, s:i}", "pad_token_id", "no_rope_layer_interval",
                           c->no_rope_interval ? c->no_rope_interval : c->num_layers + 1));
    return json_write(all, JSON_INDENT(2) | JSON_SORT_KEYS);
}

// ------------------------------------------------------------------------------------------------
// RoPE

static const double two_pi = 2 * 3.14159265358979323846;

static double clamp(double x, double low, double high) { return fmin(fmax(x, low), high); }

// Between the wavelengths of low_freq_factor and high_freq_factor turns over the old context from
// freq / factor to freq
static double llama3_frequency(const RopeScaling *r, double freq) {
    const double wavelength = two_pi / freq, context = r->original_max_position_embeddings;
    if (wavelength < context / r->high_freq_factor) return freq;
    if (wavelength > context / r->low_freq_factor) return freq / r->factor;
    const double smooth =
        (context / wavelength - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * freq / r->factor + smooth * freq;
}

// The pair, as a real number, that turns so often over the old context
static double pair_of_turns(const LlamaConfig *c, double turns) {
    const double context = c->rope_scaling.original_max_position_embeddings;
    return c->head_dim * log(context / (turns * two_pi)) / (2 * log(c->rope_theta));
}

// YaRN (arXiv 2309.00071): from freq to freq / factor, linearly over the pairs in between
static double yarn_frequency(const LlamaConfig *c, int i, double freq) {
    const RopeScaling *r = &c->rope_scaling;
    const double first = fmax(floor(pair_of_turns(c, r->high_freq_factor)), 0);
    double last = fmin(ceil(pair_of_turns(c, r->low_freq_factor)), c->head_dim - 1);
    if (last == first) last += 0.001;
    const double ramp = clamp((i - first) / (last - first), 0, 1);
    return freq / r->factor * ramp + freq * (1 - ramp);
}

float rope_frequency(const LlamaConfig *c, int i) {
    const RopeScaling *r = &c->rope_scaling;
    const double freq = (double)(float)(1.0 / pow(c->rope_theta, 2.0 * i / c->head_dim));
    if (r->type == ROPE_LINEAR) return (float)(freq / r->factor);
    if (r->type == ROPE_LLAMA3) return (float)llama3_frequency(r, freq);
    if (r->type == ROPE_YARN) return (float)yarn_frequency(c, i, freq);
    return (float)freq;
}

double rope_attention_factor(const LlamaConfig *c) {
    return c->rope_scaling.type == ROPE_YARN ? c->rope_scaling.attention_factor : 1;
}
