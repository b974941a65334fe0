#include "sampling.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

// Likeliest first; equal ones by id, so that the order is the same on every machine.
static int candidate_compare(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->p != y->p ? (x->p < y->p ? 1 : -1) : (x->id > y->id) - (x->id < y->id);
}

int32_t sample_token(const float *logits, int32_t V, const Sampling *s, float uniform,
                     Candidate *scratch) {
    const float inverse_temperature = s->temperature > 0 ? 1 / s->temperature : 1;
    float max = -INFINITY, sum = 0, kept = 0;
    for (int32_t v = 0; v < V; v++) max = fmaxf(max, logits[v]);
    for (int32_t v = 0; v < V; v++) {
        scratch[v].p = expf((logits[v] - max) * inverse_temperature);
        scratch[v].id = v;
    }
    qsort(scratch, (size_t)V, sizeof *scratch, candidate_compare);
    if (s->temperature == 0) return scratch[0].id;
    const int32_t k = s->top_k > 0 && s->top_k < V ? s->top_k : V;
    int32_t n = 0;
    for (int32_t v = 0; v < k; v++) sum += scratch[v].p;
    while (n < k && (n == 0 || kept < s->top_p * sum)) kept += scratch[n++].p;
    float target = uniform * kept;
    for (int32_t i = 0; i < n - 1; i++)
        if ((target -= scratch[i].p) < 0) return scratch[i].id;
    return scratch[n - 1].id;
}
