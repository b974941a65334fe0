// The shape of a model, a Llama or a type that differs from it by a bias, a norm or a key: built-in
// names, and reading and writing Hugging Face's config.json.
//
// Reading refuses every key that would change the maths (attention_bias true, another rope type,
// ...) and every value out of range, so that the sizes of a LlamaConfig can be multiplied without
// overflow.
#pragma once

#include <jansson.h>

#include "../base/error.h"

typedef enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN } RopeType;
typedef struct {
    RopeType type;  // ROPE_PLAIN: the rest is 0
    int original_max_position_embeddings;
    double factor;
    double low_freq_factor, high_freq_factor;  // YaRN: beta_slow and beta_fast
    double attention_factor;                   // YaRN only
} RopeScaling;

typedef enum {
    MODEL_LLAMA,
    MODEL_MISTRAL,
    MODEL_QWEN2,
    MODEL_QWEN3,
    MODEL_SMOLLM3,
    MODEL_GRANITE,
    MODEL_GRANITE4,  // without Mamba and experts: Granite with gate_proj and up_proj in one
    MODEL_MINICPM    // in a file; read as Granite
} ModelType;

// Ids that begin or end texts: of config.json, then ids that only generation_config.json has.
enum { MAX_TOKEN_IDS = 16 };
typedef struct {
    int n, of_config;
    int ids[MAX_TOKEN_IDS];  // (n) the first of_config are config.json's
} TokenIds;

typedef struct {
    int vocab_size, hidden_size, intermediate_size, num_layers;
    int num_heads, num_kv_heads, head_dim, max_position_embeddings;
    float rms_norm_eps, initializer_range;
    double rope_theta;
    RopeScaling rope_scaling;
    TokenIds bos, eos, pad;  // pad has no effect here; it is kept for other programs
    bool tie_word_embeddings;
    ModelType model_type;  // this and what follows are 0 for Llama
    bool qkv_bias;         // of q_proj, k_proj and v_proj
    bool qk_norm;          // RMSNorm of each query and key head, before RoPE
    int sliding_window;    // Mistral: a longer context is refused; 0: none
    int no_rope_interval;  // every such layer, counted from 1, has no RoPE; 0: all have RoPE
    // Granite: of embeddings, of what layers add to them, of attention's scores, under the logits
    float embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling;
} LlamaConfig;

static inline int64_t llama_q_dim(const LlamaConfig *c) {
    return (int64_t)c->num_heads * c->head_dim;
}

static inline int64_t llama_qkv_dim(const LlamaConfig *c) {
    return (c->num_heads + 2 * (int64_t)c->num_kv_heads) * c->head_dim;
}

// Granite's multipliers are folded into what every model has. Its residual stream is kept divided
// by the embedding's: the norms undo that with another eps, and what a layer adds is scaled for it.
// attention_multiplier is in rope_turns.
static inline float llama_norm_eps(const LlamaConfig *c) {
    const float embedding = c->embedding_multiplier > 0 ? c->embedding_multiplier : 1;
    return c->rms_norm_eps / (embedding * embedding);
}

// Scales of o_proj and down_proj, and of the head; 0: none
static inline float llama_residual_scale(const LlamaConfig *c) {
    const bool none = c->residual_multiplier == c->embedding_multiplier;
    return none ? 0 : c->residual_multiplier / c->embedding_multiplier;
}

static inline float llama_logit_scale(const LlamaConfig *c) {
    return c->logits_scaling > 0 && c->logits_scaling != 1 ? 1 / c->logits_scaling : 0;
}

// The matrices of a layer in the order of the arena, and the Linear of a LlamaLayer that each is a
// part of: matrices that share an input are one Linear.
enum { LINEAR_QKV, LINEAR_O, LINEAR_GATE_UP, LINEAR_DOWN, NUM_LINEARS };
enum { GATE_PROJ = 4, UP_PROJ, DOWN_PROJ, LAYER_MATRICES };
typedef struct {
    const char *name;  // after "model.layers.N."; NULL: the one before has its rows too
    int linear;
    int64_t rows, cols;
} LayerMatrix;
void llama_layer_matrices(LayerMatrix list[LAYER_MATRICES], const LlamaConfig *c);

static inline bool llama_has_rope(const LlamaConfig *c, int l) {
    return c->no_rope_interval == 0 || (l + 1) % c->no_rope_interval != 0;
}

// False when the name is not built in ("demo", "smollm2-135m" ...)
bool llama_config_builtin(LlamaConfig *c, const char *name);

// Fails for the directory of a run, which has models in it and is none: it has a log and no `file`.
bool model_is_no_run(const char *option, const char *model, const char *file, Error *err);

// A built-in name, or a directory as for llama_config_read; exit 3 when it is neither.
bool llama_config_find(LlamaConfig *c, const char *model, Error *err);

// Reads a Hugging Face config.json, and its generation_config.json, which may have more end tokens;
// path may also be the directory that holds them. Exit 3 when the model is not one of ModelType or
// needs something that is not implemented.
bool llama_config_read(LlamaConfig *c, const char *path, Error *err);

// The same from parsed JSON of config.json alone; path is for messages.
bool llama_config_parse(LlamaConfig *c, const json_t *root, const char *path, Error *err);

// More ids, from generation_config.json in the directory of this file, if it exists.
bool llama_config_add_ids(LlamaConfig *c, const char *config, Error *err);

bool token_ids_have(const TokenIds *t, int64_t id);

// The ids of config.json in its own form: null, a number or a list.
json_t *token_ids_json(const TokenIds *t);

uint64_t llama_config_num_params(const LlamaConfig *c);
void llama_config_print(const LlamaConfig *c, const char *name);  // a line of the start

// Multiply-adds that training on these tokens needs, times two: forward and backward of every
// matrix, the head's for targets only, and of attention over the (query, key) pairs that its mask
// leaves. A frozen model has no products for its weights' gradients. Recomputation and padding do
// not count.
double llama_config_flops(const LlamaConfig *c, bool frozen, int64_t tokens, int64_t targets,
                          int64_t pairs);

// config.json as old versions of transformers (rope_theta, rope_scaling) and new ones load it, in
// memory the caller frees. torch_dtype: "float32", "bfloat16".
char *llama_config_text(const LlamaConfig *c, const char *torch_dtype);

// RoPE as transformers computes it, plain and scaled: a pair of dimensions turns by position *
// frequency; cosines and sines are multiplied by the attention factor. Radians per position of pair
// i < head_dim / 2, in fp32:
float rope_frequency(const LlamaConfig *c, int i);

double rope_attention_factor(const LlamaConfig *c);  // 1 except with YaRN

// (num_positions + 1, head_dim/2, 2) cosine and sine of angles in fp32, in memory the caller frees;
// the last row rotates nothing
double *rope_turns(const LlamaConfig *c, int32_t num_positions);
