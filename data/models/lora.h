// LoRA (arXiv 2106.09685) as in PEFT: which linear layers of a model have adapters, their names
// and shapes, adapter_config.json, and merging. kernels/lora.h computes them.
#pragma once

#include "config.h"
#include "weights.h"

enum { LORA_TARGETS = LAYER_MATRICES };
extern const char *const lora_target_names[];  // "q_proj" ...

typedef struct {
    int rank;     // 0: no adapters. Kernels take 8 numbers at a time: zeros fill A and B up
    float alpha;  // B (A x) is multiplied by alpha / rank
    bool target[LORA_TARGETS];
    bool nf4;  // the frozen matrices of layers are kept in NF4: kernels/nf4.h
} LoraConfig;

static inline int lora_padded_rank(const LoraConfig *c) { return (c->rank + 7) / 8 * 8; }
static inline float lora_scale(const LoraConfig *c) { return c->alpha / (float)c->rank; }

// targets: "all", or some of q,k,v,o,gate,up,down. alpha 0: twice the rank, so that one learning
// rate serves all ranks. Exit 2.
bool lora_config_make(LoraConfig *c, int rank, float alpha, const char *targets, Error *err);

// Can the model be kept, and have adapters, as c says? Exit 3, or 2 for --lora-targets.
bool lora_config_fits(const LoraConfig *c, const LlamaConfig *model, Error *err);

// Reads an adapter's directory; base_model: the model that it names, or "". Exit 3 if it uses
// a feature that is not supported.
bool lora_config_read(LoraConfig *c, char base_model[IO_PATH_MAX], const char *dir, Error *err);

// adapter_config.json as PEFT loads it, for a model of this shape, in memory the caller frees; it
// names the absolute path of a base_model that is one.
char *lora_config_text(const LoraConfig *c, const LlamaConfig *model, const char *base_model);

// The adapters of one Linear of layer l, named and initialised as PEFT does. list (2n): the A of
// its n targets (rank, K), uniform in +-1/sqrt(K), then their B (rows, rank), zero: training starts
// from the model. column (n): where a target's rows begin in the fused output. Returns n.
int lora_linear_parameters(Parameter *list, int64_t *column, int64_t *rows, const LoraConfig *c,
                           const LlamaConfig *model, int l, int linear);

// The whole model: the frozen parameters, read again from their files so that they are as exact as
// these, with the adapters added
typedef struct {
    Parameters frozen, adapters;
    const LoraConfig *config;
    SafetensorsSet files;  // open while merged: safetensors_close, also if it never was
} LoraMerge;
// *merged exists as long as *merge. Exit 3 if the directory does not hold the frozen parameters.
bool lora_merge_open(LoraMerge *merge, const char *dir, Parameters *merged, Error *err);
