// The shape of a Llama model: built-in names, and Hugging Face config.json in and out.
//
// Reading refuses every key that would change the maths we do (attention_bias true, another rope
// type, ...) and every value out of range, so that a LlamaConfig in hand is safe to multiply and to
// allocate from.
#ifndef UNPAD_CONFIG_H
#define UNPAD_CONFIG_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"

typedef struct {
    int vocab_size, hidden_size, intermediate_size, num_layers;
    int num_heads, num_kv_heads, head_dim, max_position_embeddings;
    float rms_norm_eps;
    double rope_theta;
    struct {
        bool llama3;  // false = plain RoPE, the rest is 0
        double factor, low_freq_factor, high_freq_factor;
        int original_max_position_embeddings;
    } rope_scaling;
    bool tie_word_embeddings;
    float initializer_range;
    int bos_token_id, eos_token_id;  // -1 = none
} LlamaConfig;

// ------------------------------------------------------------------------------------------------
// Built-in models: published values of each model's config.json (base models' bos and eos)

// "demo, smollm2-135m, ...": for help texts and for "unknown model" messages.
const char *llama_config_builtin_names(void);

// False when the name is not one of the above.
bool llama_config_builtin(LlamaConfig *c, const char *name);

// ------------------------------------------------------------------------------------------------
// Sizes

uint64_t llama_config_num_params(const LlamaConfig *c);

// Divisibility and products; a config that was read has passed it. `where` begins the message.
bool llama_config_check(const LlamaConfig *c, const char *where, Error *err);

// ------------------------------------------------------------------------------------------------
// Reading

// From text already in memory; path only names it in errors.
bool llama_config_parse(LlamaConfig *c, const cJSON *root, const char *path, Error *err);

// A Hugging Face config.json; path may also be the directory that holds it.
bool llama_config_read(LlamaConfig *c, const char *path, Error *err);

// ------------------------------------------------------------------------------------------------
// Writing

// The same text into a buffer, for checkpoint_write_file(). The length; 0 = capacity too small.
size_t llama_config_text(const LlamaConfig *c, const char *torch_dtype, char *text,
                         size_t capacity);

// config.json as transformers' LlamaForCausalLM loads it, old versions (rope_theta, rope_scaling)
// and new. torch_dtype: "float32", "bfloat16". Replaces path atomically (file_write_all).
bool llama_config_write(const LlamaConfig *c, const char *torch_dtype, const char *path,
                        Error *err);

#endif
