#include "config.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/memory.h"
#include "../base/path.h"

// ---- Built-in models: published values of each model's config.json (base models' bos and eos) ---

// clang-format off
#define LLAMA3_ROPE(factor_) {ROPE_LLAMA3, 8192, factor_, 1, 4, 0}
#define ID(id_) {1, 1, {id_}}
#define IDS(bos_, eos_) .bos = ID(bos_), .eos = ID(eos_)
#define SIZES(vocab_, hidden_, ffn_, layers_, heads_, kv_heads_, head_dim_, positions_) \
    .vocab_size = vocab_, .hidden_size = hidden_, .intermediate_size = ffn_,            \
    .num_layers = layers_, .num_heads = heads_, .num_kv_heads = kv_heads_,              \
    .head_dim = head_dim_, .max_position_embeddings = positions_
#define REALS(eps_, theta_, init_) \
    .rms_norm_eps = eps_, .rope_theta = theta_, .initializer_range = init_
// clang-format on
static const struct {
    const char *name;
    LlamaConfig config;
} builtins[] = {
    {"demo",
     {SIZES(264, 192, 512, 6, 3, 1, 64, 8192), REALS(1e-5f, 1e4, 0.02f), IDS(256, 257),
      .tie_word_embeddings = true}},
    {"smollm2-135m",
     {SIZES(49152, 576, 1536, 30, 9, 3, 64, 8192), REALS(1e-5f, 1e5, 1.0f / 24), IDS(0, 0),
      .tie_word_embeddings = true}},
    {"smollm2-360m",
     {SIZES(49152, 960, 2560, 32, 15, 5, 64, 8192), REALS(1e-5f, 1e5, 0.02f), IDS(0, 0),
      .tie_word_embeddings = true}},
    {"smollm2-1.7b",
     {SIZES(49152, 2048, 8192, 24, 32, 32, 64, 8192), REALS(1e-5f, 1.3e5, 0.02f), IDS(0, 0),
      .tie_word_embeddings = true}},
    {"llama-3.2-1b",
     {SIZES(128256, 2048, 8192, 16, 32, 8, 64, 131072), REALS(1e-5f, 5e5, 0.02f),
      IDS(128000, 128001), .rope_scaling = LLAMA3_ROPE(32), .tie_word_embeddings = true}},
    {"llama-3.2-3b",
     {SIZES(128256, 3072, 8192, 28, 24, 8, 128, 131072), REALS(1e-5f, 5e5, 0.02f),
      IDS(128000, 128001), .rope_scaling = LLAMA3_ROPE(32), .tie_word_embeddings = true}},
    {"llama-3.1-8b",
     {SIZES(128256, 4096, 14336, 32, 32, 8, 128, 131072), REALS(1e-5f, 5e5, 0.02f),
      IDS(128000, 128001), .rope_scaling = LLAMA3_ROPE(8)}},
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

// ---- Types of models, and keys of config.json ---------------------------------------------------

static const char *const model_types[] = {
    "llama",   "mistral",          "qwen2",   "qwen3", "smollm3",
    "granite", "granitemoehybrid", "minicpm", NULL};
static const char *const rope_types[] = {"default", "linear", "llama3", "yarn", NULL};

// The differences between types, and the defaults of transformers for missing keys.
// kv heads 0: as many as heads. head_dim 0: hidden / heads.
static const struct {
    const char *architecture;
    const char *own_keys;  // of `neutral` below: read elsewhere, or without effect for this type
    LlamaConfig config;
} types[] = {
    // clang-format off
    {"LlamaForCausalLM", "",
     {SIZES(0, 0, 0, 0, 0, 0, 0, 2048), REALS(1e-6f, 1e4, 0.02f), IDS(1, 2)}},
    {"MistralForCausalLM", "pretraining_tp sliding_window",
     {SIZES(0, 0, 0, 0, 0, 8, 0, 131072), REALS(1e-6f, 1e4, 0.02f), IDS(1, 2),
      .model_type = MODEL_MISTRAL, .sliding_window = 4096}},
    {"Qwen2ForCausalLM", "pretraining_tp sliding_window",
     {SIZES(0, 0, 0, 0, 0, 32, 0, 32768), REALS(1e-6f, 1e4, 0.02f),
      .model_type = MODEL_QWEN2, .qkv_bias = true}},
    {"Qwen3ForCausalLM", "pretraining_tp sliding_window",
     {SIZES(0, 0, 0, 0, 0, 32, 128, 32768), REALS(1e-6f, 1e4, 0.02f),
      .model_type = MODEL_QWEN3, .qk_norm = true}},
    {"SmolLM3ForCausalLM", "pretraining_tp sliding_window no_rope_layers",
     {SIZES(0, 0, 0, 0, 0, 4, 0, 32768), REALS(1e-6f, 2e6, 0.02f), IDS(128000, 128001),
      .pad = ID(128004), .tie_word_embeddings = true, .model_type = MODEL_SMOLLM3,
      .no_rope_interval = 4}},
#define GRANITE_KEYS "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
#define GRANITE(type_)                                                                            \
    {SIZES(0, 0, 0, 0, 0, 0, 0, 2048), REALS(1e-6f, 1e4, 0.02f), IDS(1, 2), .model_type = type_,  \
     .embedding_multiplier = 1, .residual_multiplier = 1, .attention_multiplier = 1,              \
     .logits_scaling = 1}
    {"GraniteForCausalLM", GRANITE_KEYS, GRANITE(MODEL_GRANITE)},
    {"GraniteMoeHybridForCausalLM", GRANITE_KEYS " layer_types num_local_experts",
     GRANITE(MODEL_GRANITE4)},
    {"MiniCPMForCausalLM", "auto_map scale_emb scale_depth",
     {SIZES(0, 0, 0, 0, 0, 0, 0, 2048), REALS(1e-6f, 1e4, 0.1f), IDS(1, 2),
      .tie_word_embeddings = true, .model_type = MODEL_MINICPM}},
    // clang-format on
};

// A key with a single value, and its range. Products of the largest sizes fit easily in 64 bits.
typedef struct {
    const char *key;
    enum { END, INT, FLOAT, DOUBLE, BOOL, NAME } kind;
    size_t offset;  // of the value in a LlamaConfig
    double min, max;
    int optional;              // 2: null stands for a missing key
    const char *const *names;  // NAME: an enum, by the names of its values
} Field;
#define FIELD(key_, kind_, member_, ...) \
    { key_, kind_, offsetof(LlamaConfig, member_), __VA_ARGS__, NULL }
#define NAMED(key_, member_, optional_, names_) \
    { key_, NAME, offsetof(LlamaConfig, member_), 0, 0, optional_, names_ }
enum { MAX_WIDTH = 1 << 18, MAX_HEAD_DIM = 1024, MAX_POSITIONS = 1 << 26 };

static const Field fields[] = {
    FIELD("vocab_size", INT, vocab_size, 1, 1 << 24, false),
    FIELD("hidden_size", INT, hidden_size, 1, MAX_WIDTH, false),
    FIELD("intermediate_size", INT, intermediate_size, 1, MAX_WIDTH, false),
    FIELD("num_hidden_layers", INT, num_layers, 1, 1024, false),
    FIELD("num_attention_heads", INT, num_heads, 1, 1024, false),
    FIELD("num_key_value_heads", INT, num_kv_heads, 1, 1024, true),
    FIELD("head_dim", INT, head_dim, 2, MAX_HEAD_DIM, true),
    FIELD("max_position_embeddings", INT, max_position_embeddings, 1, MAX_POSITIONS, true),
    FIELD("rms_norm_eps", FLOAT, rms_norm_eps, 1e-20, 0.1, true),
    FIELD("initializer_range", FLOAT, initializer_range, 0, 10, true),
    FIELD("tie_word_embeddings", BOOL, tie_word_embeddings, 0, 1, true),
    NAMED("model_type", model_type, false, model_types),
    {0},
};
// Of Mistral. In other types it has no effect without use_sliding_window, which is refused.
static const Field window[] = {FIELD("sliding_window", INT, sliding_window, 1, MAX_POSITIONS, true),
                               {0}};
#define MULTIPLIER(key_) FIELD(#key_, FLOAT, key_, 1e-6, 1e6, true)
static const Field multipliers[] = {MULTIPLIER(embedding_multiplier),
                                    MULTIPLIER(residual_multiplier),
                                    MULTIPLIER(attention_multiplier),
                                    MULTIPLIER(logits_scaling),
                                    {0}};
static const Field rope_theta[] = {FIELD("rope_theta", DOUBLE, rope_theta, 1, 1e12, true), {0}};

#define ROPE_FIELD(key_, member_, min_, optional_) \
    FIELD(key_, DOUBLE, rope_scaling.member_, min_, 1e6, optional_)
#define ROPE_CONTEXT(optional_)                                                                   \
    FIELD("original_max_position_embeddings", INT, rope_scaling.original_max_position_embeddings, \
          1, MAX_POSITIONS, optional_)
static const Field rope_fields[][6] = {
    [ROPE_PLAIN] = {{0}},
    [ROPE_LINEAR] = {ROPE_FIELD("factor", factor, 1, false)},
    [ROPE_LLAMA3] = {ROPE_FIELD("factor", factor, 1, false),
                     ROPE_FIELD("low_freq_factor", low_freq_factor, 1e-6, false),
                     ROPE_FIELD("high_freq_factor", high_freq_factor, 1e-6, false),
                     ROPE_CONTEXT(false)},
    [ROPE_YARN] = {ROPE_FIELD("factor", factor, 1, false),
                   ROPE_FIELD("beta_slow", low_freq_factor, 1e-6, 2),
                   ROPE_FIELD("beta_fast", high_freq_factor, 1e-6, 2),
                   ROPE_FIELD("attention_factor", attention_factor, 1e-6, 2), ROPE_CONTEXT(2)},
};

static bool refuse(const char *key, const char *expected, const json_t *item, Error *err) {
    AUTO_FREE char *found = json_dumps(item, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
    return error_set(err, EXIT_BAD_INPUT, "this trainer does not implement it",
                     "%s: expected %s, found %.60s", key, expected, found ? found : "none");
}

// *out: the enum value of this name
static bool read_name(const char *const *names, const char *key, const json_t *item, void *out,
                      Error *err) {
    char expected[128] = "";
    for (int i = 0; names[i]; i++) {
        if (json_string_is(item, names[i])) return memcpy(out, &i, sizeof i) != NULL;
        text_list(expected, sizeof expected, i == 0 ? "one of %s" : "%s", names[i]);
    }
    return refuse(key, expected, item, err);
}

// Python's readers treat null as a value, not as a missing key.
static bool read_fields(LlamaConfig *c, const Field *f, const json_t *object, Error *err) {
    static const size_t sizes[] = {[INT] = 4, [FLOAT] = 4, [DOUBLE] = 8, [BOOL] = 1, [NAME] = 4};
    for (bool ok = true; ok && f->kind != END; f++) {
        void *out = (char *)c + f->offset;
        const json_t *item = json_object_get(object, f->key);
        const bool required = !f->optional, has_default = memcmp(out, &(double){0}, sizes[f->kind]);
        double wide = f->kind == FLOAT ? (double)*(float *)out : 0;
        if (has_default && f->optional < 2 && json_is_null(item))
            ok = bad_input(err, "%s: expected a value, found null", f->key);
        else if (f->kind == INT)
            ok = json_get_int(object, f->key, (int)f->min, (int)f->max, out, required, err);
        else if (f->kind == BOOL)
            ok = json_get_bool(object, f->key, out, required, err);
        else if (f->kind == NAME)
            ok = !item || read_name(f->names, f->key, item, out, err);
        else
            ok = json_get_double(object, f->key, f->min, f->max, f->kind == FLOAT ? &wide : out,
                                 required, err);
        if (f->kind == FLOAT) *(float *)out = (float)wide;
    }
    return err->code == 0;
}

static void write_fields(const LlamaConfig *c, const Field *f, json_t *object) {
    for (; f->kind != END; f++) {
        const void *value = (const char *)c + f->offset;
        json_object_set_new(object, f->key,
                            f->kind == INT     ? json_integer(*(const int *)value)
                            : f->kind == FLOAT ? json_float(*(const float *)value)
                            : f->kind == BOOL  ? json_boolean(*(const bool *)value)
                            : f->kind == NAME  ? json_string(f->names[*(const int *)value])
                                               : json_real(*(const double *)value));
    }
}

// ---- Sizes --------------------------------------------------------------------------------------

void llama_layer_matrices(LayerMatrix list[LAYER_MATRICES], const LlamaConfig *c) {
    const int64_t C = c->hidden_size, F = c->intermediate_size, q_dim = llama_q_dim(c),
                  kv_dim = (int64_t)c->num_kv_heads * c->head_dim;
    const LayerMatrix all[LAYER_MATRICES] = {
        {"self_attn.q_proj", LINEAR_QKV, q_dim, C},  {"self_attn.k_proj", LINEAR_QKV, kv_dim, C},
        {"self_attn.v_proj", LINEAR_QKV, kv_dim, C}, {"self_attn.o_proj", LINEAR_O, C, q_dim},
        {"mlp.gate_proj", LINEAR_GATE_UP, F, C},     {"mlp.up_proj", LINEAR_GATE_UP, F, C},
        {"mlp.down_proj", LINEAR_DOWN, C, F}};
    memcpy(list, all, sizeof all);
    if (c->model_type != MODEL_GRANITE4) return;
    list[GATE_PROJ] = (LayerMatrix){"shared_mlp.input_linear", LINEAR_GATE_UP, 2 * F, C};
    list[UP_PROJ] = (LayerMatrix){.linear = LINEAR_GATE_UP};
    list[DOWN_PROJ].name = "shared_mlp.output_linear";
}

uint64_t llama_config_num_params(const LlamaConfig *c) {
    const int64_t C = c->hidden_size, qkv = llama_qkv_dim(c),
                  matrices = C * (qkv + llama_q_dim(c) + 3 * (int64_t)c->intermediate_size),
                  vectors = 2 * C + (c->qkv_bias ? qkv : 0) + (c->qk_norm ? 2 * c->head_dim : 0);
    return (uint64_t)((c->tie_word_embeddings ? 1 : 2) * C * c->vocab_size +
                      c->num_layers * (matrices + vectors) + C);
}

void llama_config_print(const LlamaConfig *c, const char *name) {
    printf(
        "model   %s: %.2f M parameters, %d layers, hidden %d, ffn %d, heads %d/%d x %d, vocab "
        "%d%s\n",
        name, (double)llama_config_num_params(c) * 1e-6, c->num_layers, c->hidden_size,
        c->intermediate_size, c->num_heads, c->num_kv_heads, c->head_dim, c->vocab_size,
        c->tie_word_embeddings ? ", tied head" : "");
}

double llama_config_flops(const LlamaConfig *c, bool frozen, int64_t tokens, int64_t targets,
                          int64_t pairs) {
    const double C = c->hidden_size, D = c->head_dim, L = c->num_layers;
    const double layer =
        C * (3.0 * c->intermediate_size + 2 * D * (c->num_heads + c->num_kv_heads));
    return (frozen ? 4 : 6) * (L * layer * (double)tokens + C * c->vocab_size * (double)targets) +
           12 * L * D * c->num_heads * (double)pairs;
}

static bool check_sizes(const LlamaConfig *c, Error *err) {
    if (c->num_heads % c->num_kv_heads != 0)
        return bad_input(err,
                         "num_attention_heads %d: expected a multiple of num_key_value_heads %d",
                         c->num_heads, c->num_kv_heads);
    if (c->head_dim % 2 != 0 || c->head_dim > MAX_HEAD_DIM)
        return bad_input(err, "head_dim %d: expected an even number of at most %d", c->head_dim,
                         MAX_HEAD_DIM);
    if (c->num_heads * c->head_dim > MAX_WIDTH)
        return bad_input(err, "num_attention_heads %d x head_dim %d: expected at most %d",
                         c->num_heads, c->head_dim, MAX_WIDTH);
    const RopeScaling *r = &c->rope_scaling;
    if (r->type >= ROPE_LLAMA3 && r->high_freq_factor <= r->low_freq_factor)
        return bad_input(err, "%s %g: expected more than %s %g", rope_fields[r->type][2].key,
                         r->high_freq_factor, rope_fields[r->type][1].key, r->low_freq_factor);
    const uint64_t params = llama_config_num_params(c);
    return params <= (uint64_t)1 << 40 ||
           bad_input(err, "expected at most 2^40 parameters, found %lu", params);
}

// ---- Reading ------------------------------------------------------------------------------------

// Keys that change the maths, grouped by the only value we support ("null": absent). Keys that are
// neither here nor read below (use_cache, ...) do not change the maths.
static const struct {
    const char *value, *keys[20];
} neutral[] = {
    {"false",
     {"alibi", "attention_bias", "attention_out_bias", "bias", "is_encoder_decoder", "mlp_bias",
      "parallel_residual", "qk_layernorm", "qk_norm", "qkv_bias", "use_bias", "use_mrope",
      "use_parallel_residual", "use_qk_norm", "use_sliding_window",
      "rope_interleaved"}},  // Hugging Face weights are half-rotated, whatever they were
    {"true", {"truncate"}},  // YaRN's, like mscale
    {"null",
     {"attention_multiplier", "attn_logit_softcapping", "clip_qkv", "final_logit_softcapping",
      "hidden_activation", "mscale", "mscale_all_dim", "mup_scale", "no_rope_layers", "num_experts",
      "num_local_experts", "quantization_config", "sliding_window",
      "auto_map"}},  // the model's own code
    {"0", {"attention_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"}},
    {"1",
     {"embedding_multiplier", "logit_scale", "logits_scaling", "partial_rotary_factor",
      "residual_multiplier", "rotary_pct", "scale_depth", "scale_emb",
      "pretraining_tp"}},  // another order of summation, and its own layout
    {"full_attention", {"layer_types"}},
    {"silu", {"hidden_act"}},
};

// null matches any of these values except true and silu. Each of layer_types must match.
static bool value_is(const json_t *item, const char *text) {
    const json_t *each;
    size_t i;
    json_array_foreach(item, i, each) {
        if (!value_is(each, text)) return false;
    }
    if (json_is_null(item)) return strcmp(text, "true") != 0 && strcmp(text, "silu") != 0;
    if (json_is_boolean(item)) return strcmp(text, json_is_true(item) ? "true" : "false") == 0;
    if (json_is_number(item)) return text[0] <= '9' && json_number_value(item) == atof(text);
    if (json_is_array(item)) return strcmp(text, "full_attention") == 0;
    return json_string_is(item, text);
}

static bool read_type(LlamaConfig *c, const json_t *root, Error *err) {
    const json_t *name = json_member(root, "model_type");
    int type;
    if (!name) return bad_input(err, "model_type: required, not found");
    if (!read_name(model_types, "model_type", name, &type, err)) return false;
    *c = types[type].config;
    return true;
}

static bool read_neutral(const LlamaConfig *c, const json_t *object, Error *err) {
    for (size_t i = 0; i < sizeof neutral / sizeof *neutral; i++)
        for (const char *const *key = neutral[i].keys; *key; key++) {
            const json_t *item = json_object_get(object, *key);
            if (item && !value_is(item, neutral[i].value) &&
                !strstr(types[c->model_type].own_keys, *key))
                return refuse(*key, neutral[i].value, item, err);
        }
    return true;
}

// no_rope_layers has a 1 for each layer, or a 0 where the layer has no RoPE: every interval-th. It
// overrides no_rope_layer_interval.
static bool read_no_rope(LlamaConfig *c, const json_t *root, Error *err) {
    const json_t *layers = json_member(root, "no_rope_layers"), *item;
    const int L = c->num_layers;
    int interval = c->no_rope_interval;
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

bool token_ids_have(const TokenIds *t, int64_t id) {
    for (int i = 0; i < t->n; i++)
        if (t->ids[i] == id) return true;
    return false;
}

// Adds a number, or each of a list; null or -1: none.
static bool read_token_ids(const json_t *root, const char *key, int most, TokenIds *t, Error *err) {
    const json_t *list = json_member(root, key);
    const size_t n = json_is_array(list) ? json_array_size(list) : list != NULL;
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_is_array(list) ? json_array_get(list, i) : list;
        int64_t id = -1;
        if (!json_is_null(item) && !json_value(item, key, JSON_INT64, -1, most, &id, err))
            return false;
        if (id < 0 || token_ids_have(t, id)) continue;
        if (t->n == MAX_TOKEN_IDS)
            return bad_input(err, "%s: expected at most %d ids", key, MAX_TOKEN_IDS);
        t->ids[t->n++] = (int)id;
    }
    return true;
}

// The ids of config.json, or the type's default if it has no such key.
static bool read_own_ids(const json_t *root, const char *key, int vocab_size, TokenIds *t,
                         Error *err) {
    if (json_object_get(root, key) || (t->n > 0 && t->ids[0] >= vocab_size)) *t = (TokenIds){0};
    if (!read_token_ids(root, key, vocab_size - 1, t, err)) return false;
    t->of_config = t->n;
    return true;
}

// MiniCPM is Granite under other names, and is written as Granite.
static bool read_minicpm(LlamaConfig *c, const json_t *root, Error *err) {
    double embedding = 1, depth = 1, base = 1;
    const bool ok = json_get_double(root, "scale_emb", 1e-6, 1e6, &embedding, false, err) &&
                    json_get_double(root, "scale_depth", 1e-6, 1e6, &depth, false, err) &&
                    json_get_double(root, "dim_model_base", 1e-6, 1e6, &base, false, err);
    c->model_type = MODEL_GRANITE;
    c->embedding_multiplier = (float)embedding;
    c->residual_multiplier = (float)(depth / sqrt(c->num_layers));
    c->attention_multiplier = (float)(1 / sqrt(c->head_dim));
    c->logits_scaling = (float)(c->hidden_size / base);
    return ok;
}

// Without these keys a Granite 4 has Mamba's layers, experts, and attention without RoPE.
static bool read_granite4(LlamaConfig *c, const json_t *root, Error *err) {
    const json_t *layers = json_member(root, "layer_types"), *item,
                 *rope = json_member(root, "position_embedding_type"),
                 *experts = json_member(root, "num_local_experts");
    size_t l;
    if (json_array_size(layers) != (size_t)c->num_layers)
        return refuse("layer_types", "attention for each layer", layers, err);
    json_array_foreach(layers, l, item) {
        if (!json_string_is(item, "attention") && !json_string_is(item, "full_attention"))
            return refuse("layer_types", "attention", item, err);
    }
    if (!json_string_is(rope, "rope")) return refuse("position_embedding_type", "rope", rope, err);
    if (!json_is_number(experts) || json_number_value(experts) != 0)
        return refuse("num_local_experts", "0", experts, err);
    return json_get_int(root, "shared_intermediate_size", 1, MAX_WIDTH, &c->intermediate_size, true,
                        err);
}

static bool read_sizes(LlamaConfig *c, const json_t *root, Error *err) {
    if (json_is_null(json_object_get(root, "num_key_value_heads"))) c->num_kv_heads = 0;
    if (json_is_null(json_object_get(root, window->key))) c->sliding_window = 0;
    if (!read_fields(c, fields, root, err) ||
        (c->sliding_window > 0 && !read_fields(c, window, root, err)) ||
        (c->logits_scaling > 0 && !read_fields(c, multipliers, root, err)) ||
        (c->model_type == MODEL_GRANITE4 && !read_granite4(c, root, err)) ||
        !read_own_ids(root, "bos_token_id", c->vocab_size, &c->bos, err) ||
        !read_own_ids(root, "eos_token_id", c->vocab_size, &c->eos, err) ||
        !read_own_ids(root, "pad_token_id", c->vocab_size, &c->pad, err))
        return false;
    if (c->num_kv_heads == 0) c->num_kv_heads = c->num_heads;
    if (c->head_dim == 0 && c->hidden_size % c->num_heads != 0)
        return error_set(err, EXIT_BAD_INPUT, "or give head_dim",
                         "hidden_size %d: expected a multiple of num_attention_heads %d",
                         c->hidden_size, c->num_heads);
    if (c->head_dim == 0) c->head_dim = c->hidden_size / c->num_heads;
    return c->model_type != MODEL_MINICPM || read_minicpm(c, root, err);
}

static bool read_scaling(LlamaConfig *c, RopeType type, const json_t *rope, Error *err) {
    RopeScaling *r = &c->rope_scaling;
    *r = (RopeScaling){.type = type};
    if (type == ROPE_YARN) *r = (RopeScaling){type, c->max_position_embeddings, 0, 1, 32, 0};
    if (!read_fields(c, rope_fields[type], rope, err)) return false;
    if (type == ROPE_YARN && r->attention_factor == 0)
        r->attention_factor = 0.1 * log(r->factor) + 1;
    return true;
}

// The object rope_scaling (old name) or rope_parameters (new name, with rope_theta inside).
static bool read_rope_object(LlamaConfig *c, json_t *rope, Error *err) {
    const char *key, *name = NULL;
    const json_t *item;
    RopeType type;
    if (!json_is_object(rope)) return bad_input(err, "expected an object");
    json_object_foreach(rope, key, item) {
        if (json_array_size(item) + json_object_size(item) > 0)
            return refuse(key, "one RoPE for all layers", item, err);
    }
    key = json_member(rope, "type") && !json_member(rope, "rope_type") ? "type" : "rope_type";
    if (!json_get_string(rope, key, &name, json_member(rope, "factor") != NULL, err) ||
        !read_neutral(c, rope, err))
        return false;
    return !name || (read_name(rope_types, key, json_member(rope, key), &type, err) &&
                     read_scaling(c, type, rope, err));
}

static bool read_rope(LlamaConfig *c, const json_t *root, Error *err) {
    json_t *old = json_member(root, "rope_scaling"), *rope = json_member(root, "rope_parameters");
    const char *name = old ? "rope_scaling" : "rope_parameters";
    if (old && rope)
        return error_set(err, EXIT_BAD_INPUT, "delete one of them",
                         "expected rope_scaling or rope_parameters, found both");
    if (!rope) rope = old;
    if (rope && !read_rope_object(c, rope, err)) return error_prefix(err, name);
    const json_t *outer = json_member(root, "rope_theta"), *inner = json_member(rope, "rope_theta");
    if (outer && inner && !json_equal(outer, inner))
        return error_set(err, EXIT_BAD_INPUT, "delete one of them",
                         "rope_theta: expected one value, found another in %s", name);
    return read_fields(c, rope_theta, inner ? rope : root, err);
}

bool llama_config_parse(LlamaConfig *c, const json_t *root, const char *path, Error *err) {
    if (!json_is_object(root)) return bad_input(err, "%s: expected an object", path);
    const bool ok = read_type(c, root, err) && read_neutral(c, root, err) &&
                    read_sizes(c, root, err) && read_no_rope(c, root, err) &&
                    read_rope(c, root, err) && check_sizes(c, err);
    return ok || error_prefix(err, path);
}

bool llama_config_add_ids(LlamaConfig *c, const char *config, Error *err) {
    char dir[IO_PATH_MAX], file[IO_PATH_MAX];
    if (!path_parent(dir, config, err) || !path_join(file, dir, "generation_config.json", err))
        return false;
    if (!path_exists(file)) return true;
    json_auto_t *root = json_read(file, JSON_MAX_CONFIG, "", err);
    if (!root) return false;
    return (read_token_ids(root, "bos_token_id", INT32_MAX, &c->bos, err) &&
            read_token_ids(root, "eos_token_id", INT32_MAX, &c->eos, err)) ||
           error_prefix(err, file);
}

bool llama_config_read(LlamaConfig *c, const char *path, Error *err) {
    char file[IO_PATH_MAX];
    if (!path_inside(file, path, "config.json", err)) return false;
    json_auto_t *root = json_read(file, JSON_MAX_CONFIG, "give a Hugging Face directory", err);
    return root && llama_config_parse(c, root, file, err) && llama_config_add_ids(c, file, err);
}

bool model_is_no_run(const char *option, const char *model, const char *file, Error *err) {
    char hint[512];
    if (!path_is_dir(model) || path_exists(PATH_IN(model, file)) ||
        !path_exists(PATH_IN(model, "log.jsonl")))
        return true;
    snprintf(hint, sizeof hint,
             path_exists(PATH_IN(model, "final")) ? "--%s %.400s/final"
                                                  : "--%s %.400s/step-..., a checkpoint",
             option, model);
    return error_set(err, EXIT_BAD_INPUT, hint, "%s: expected a model or adapters, found a run",
                     model);
}

bool llama_config_find(LlamaConfig *c, const char *model, Error *err) {
    char hint[512], names[256] = "";
    const bool gguf = path_ends_with(model, ".gguf");
    if (llama_config_builtin(c, model)) return true;
    if (gguf || path_ends_with(model, ".safetensors") || path_ends_with(model, ".bin"))
        return error_set(
            err, EXIT_BAD_INPUT,
            gguf ? "scripts/gguf_to_hf.py FILE DIR converts SmolLM2's; of other models, "
                   "scripts/get_model.sh ORG/NAME gets the original"
                 : "give the directory that contains it and config.json",
            "%s: expected a model directory, found a file of weights", model);
    if (path_exists(model))
        return model_is_no_run("model", model, "config.json", err) &&
               llama_config_read(c, model, err);
    for (int i = 0; i < NUM_BUILTINS; i++) text_list(names, sizeof names, "%s", builtins[i].name);
    snprintf(hint, sizeof hint, "give a Hugging Face directory or one of %s", names);
    return error_set(err, EXIT_BAD_INPUT,
                     strchr(model, '/') ? "there is no such directory; scripts/get_model.sh "
                                          "ORG/NAME gets models from the hub"
                                        : hint,
                     "%s: expected a model directory or a built-in name, found neither", model);
}

// ---- Writing ------------------------------------------------------------------------------------

static json_t *rope_json(const LlamaConfig *c) {
    const RopeType type = c->rope_scaling.type;
    if (type == ROPE_PLAIN) return json_null();
    json_t *rope = json_pack("{s:s}", "rope_type", rope_types[type]);
    write_fields(c, rope_fields[type], rope);
    return rope;
}

json_t *token_ids_json(const TokenIds *t) {
    json_t *list = json_array();
    for (int i = 0; i < t->of_config; i++) json_array_append_new(list, json_integer(t->ids[i]));
    if (t->of_config > 1) return list;
    json_decref(list);
    return t->of_config == 0 ? json_null() : json_integer(t->ids[0]);
}

// transformers checks mamba_n_heads even where no layer has Mamba.
static void write_granite4(const LlamaConfig *c, json_t *all) {
    json_t *layers = json_array();
    for (int l = 0; l < c->num_layers; l++) json_array_append_new(layers, json_string("attention"));
    json_object_update_new(
        all, json_pack("{s:o, s:s, s:i, s:i, s:i}", "layer_types", layers,
                       "position_embedding_type", "rope", "num_local_experts", 0, "mamba_n_heads",
                       1, "shared_intermediate_size", c->intermediate_size));
}

char *llama_config_text(const LlamaConfig *c, const char *torch_dtype) {
    json_t *all =
        json_pack("{s:[s], s:f, s:s, s:o, s:o, s:o, s:o, s:s, s:b}", "architectures",
                  types[c->model_type].architecture, "attention_dropout", 0.0, "hidden_act", "silu",
                  "bos_token_id", token_ids_json(&c->bos), "eos_token_id", token_ids_json(&c->eos),
                  "pad_token_id", token_ids_json(&c->pad), "rope_scaling", rope_json(c),
                  "torch_dtype", torch_dtype, "use_cache", true);
    write_fields(c, fields, all);
    write_fields(c, rope_theta, all);
    if (c->model_type != MODEL_LLAMA)  // without it Mistral has 4096
        json_object_set_new(all, "sliding_window",
                            c->sliding_window ? json_integer(c->sliding_window) : json_null());
    if (c->logits_scaling > 0) write_fields(c, multipliers, all);
    if (c->model_type == MODEL_GRANITE4) write_granite4(c, all);
    if (c->model_type == MODEL_SMOLLM3)
        json_object_set_new(
            all, "no_rope_layer_interval",
            json_integer(c->no_rope_interval ? c->no_rope_interval : c->num_layers + 1));
    return json_write(all, JSON_INDENT(2) | JSON_SORT_KEYS);
}

// ---- RoPE ---------------------------------------------------------------------------------------

static const double two_pi = 2 * 3.14159265358979323846;

// Goes from freq / factor to freq between the wavelengths that turn low_freq_factor and
// high_freq_factor times over the old context
static double llama3_frequency(const RopeScaling *r, double freq) {
    const double wavelength = two_pi / freq, context = r->original_max_position_embeddings;
    if (wavelength < context / r->high_freq_factor) return freq;
    if (wavelength > context / r->low_freq_factor) return freq / r->factor;
    const double smooth =
        (context / wavelength - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * freq / r->factor + smooth * freq;
}

// The pair, as a real number, that turns this many times over the old context
static double pair_of_turns(const LlamaConfig *c, double turns) {
    const double context = c->rope_scaling.original_max_position_embeddings;
    return c->head_dim * log(context / (turns * two_pi)) / (2 * log(c->rope_theta));
}

// YaRN (arXiv 2309.00071): goes from freq to freq / factor, linearly over the pairs in between
static double yarn_frequency(const LlamaConfig *c, int i, double freq) {
    const RopeScaling *r = &c->rope_scaling;
    const double first = fmax(floor(pair_of_turns(c, r->high_freq_factor)), 0);
    double last = fmin(ceil(pair_of_turns(c, r->low_freq_factor)), c->head_dim - 1);
    if (last == first) last += 0.001;
    const double ramp = fmin(fmax((i - first) / (last - first), 0), 1);
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

double *rope_turns(const LlamaConfig *c, int32_t num_positions) {
    const int pairs = c->head_dim / 2;
    double scale = rope_attention_factor(c);
    if (c->attention_multiplier > 0)  // of the scores, instead of 1 / sqrt(D)
        scale *= sqrt(c->attention_multiplier * sqrt(c->head_dim));
    double *turns =
        host_calloc(((size_t)num_positions + 1) * (size_t)pairs * 2, sizeof *turns, "RoPE");
    for (int i = 0; i < pairs; i++) {
        turns[((int64_t)num_positions * pairs + i) * 2] = 1;
        const float frequency = rope_frequency(c, i);
        for (int32_t pos = 0; pos < num_positions; pos++) {
            const double angle = (double)((float)pos * frequency);
            double *turn = turns + ((int64_t)pos * pairs + i) * 2;
            turn[0] = scale * cos(angle);
            turn[1] = scale * sin(angle);
        }
    }
    return turns;
}
