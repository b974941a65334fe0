#include "pairs.h"

#include "../base/memory.h"

// pair (2): segments of a plan
static PairTerms pair_terms(const PairSettings *s, const DocIndex *index, const Segment *pair) {
    const bool simpo = s->kind == PREFERENCE_SIMPO;
    PairTerms t = {.margin = simpo ? s->gamma : 0,
                   .smoothing = s->smoothing,
                   .sft = s->sft_weight / (double)stream_targets(index, &pair[CHOSEN])};
    for (int i = CHOSEN; i <= REJECTED; i++) {
        t.scale[i] = simpo ? s->beta / (double)stream_targets(index, &pair[i]) : s->beta;
        if (s->reference) t.reference[i] = s->reference[pair[i].doc];
    }
    return t;
}

void pairs_fill(Batch *b, const PairSettings *s, const DocIndex *index, const Segment *segments) {
    b->num_pairs = b->num_docs / 2;
    array_grow(b->pairs, &b->pair_capacity, (size_t)b->num_pairs, "a batch");
    for (int32_t k = 0; k < b->num_pairs; k++) b->pairs[k] = pair_terms(s, index, &segments[2 * k]);
}

void pairs_add(PairSums *sum, const PairSettings *s, const DocIndex *index, const StepPlan *plan,
               const double *losses) {
    for (int64_t i = 0; s->kind && i < plan->num_segments; i += 2) {
        const PairTerms t = pair_terms(s, index, &plan->segments[i]);
        const double chosen = pair_reward(&t, CHOSEN, losses[i]),
                     rejected = pair_reward(&t, REJECTED, losses[i + 1]);
        sum->pairs++;
        sum->right += chosen > rejected ? 1 : chosen == rejected ? 0.5 : 0;
        sum->chosen += chosen;
        sum->rejected += rejected;
    }
}
