// The next token from its logits: temperature, then top-k, then top-p, then one draw.
#ifndef UNPAD_SAMPLING_H
#define UNPAD_SAMPLING_H

#include <stdint.h>

typedef struct {
    float temperature;  // 0: always the likeliest token
    int top_k;          // draw from the k likeliest; 0: from all
    float top_p;        // draw from the smallest set of likeliest tokens whose sum is >= p; 1: all
} Sampling;

typedef struct {
    float p;
    int32_t id;
} Candidate;

// logits (V), uniform in [0,1): the draw; scratch (V).
int32_t sample_token(const float *logits, int32_t V, const Sampling *s, float uniform,
                     Candidate *scratch);

#endif
