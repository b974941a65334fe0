// RoPE as transformers computes it, plain and scaled. A pair of dimensions turns by position *
// frequency; cosines and sines are multiplied by the attention factor.
#ifndef UNPAD_ROPE_H
#define UNPAD_ROPE_H

#include "config.h"

// Radians per position of pair i < head_dim / 2, in fp32
float rope_frequency(const LlamaConfig *c, int i);

double rope_attention_factor(const LlamaConfig *c);  // 1 but for YaRN

#endif
