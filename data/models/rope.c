#include "rope.h"

#include <math.h>

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
