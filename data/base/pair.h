// The loss of a preference pair: a chosen and a rejected answer to one prompt.
//
//   reward = scale * (log-likelihood of the answer - that under the reference)
//   loss   = -log sigmoid(reward of the chosen - reward of the rejected - margin)
//
// DPO (arXiv 2305.18290): scale is beta, and margin 0. SimPO (arXiv 2405.14734): scale is beta over
// the answer's tokens, and there is no reference. Log-likelihoods are sums of losses, negated.
#pragma once

#include <math.h>

#include "hash.h"

// Of the two documents of a pair, in this order
enum { CHOSEN, REJECTED };

typedef struct {
    double scale[2];
    double reference[2];  // sums of losses; 0: none
    double margin;
    double smoothing;  // the share of labels that are wrong (conservative DPO)
    double sft;        // weight of the chosen's sum of losses, which is added
} PairTerms;

HOST_DEVICE static inline double pair_reward(const PairTerms *t, int i, double losses) {
    return t->scale[i] * (t->reference[i] - losses);
}

// losses (2): sums of the documents. factors (2) =  the derivatives of the result by them
HOST_DEVICE static inline double pair_loss(const PairTerms *t, const double *losses,
                                           double *factors) {
    const double z = pair_reward(t, CHOSEN, losses[CHOSEN]) -
                     pair_reward(t, REJECTED, losses[REJECTED]) - t->margin,
                 tail = log(1 + exp(-fabs(z))), right = tail + fmax(-z, 0.0),
                 wrong = tail + fmax(z, 0.0), slope = 1 / (1 + exp(z)) - t->smoothing;
    factors[CHOSEN] = slope * t->scale[CHOSEN] + t->sft;
    factors[REJECTED] = -slope * t->scale[REJECTED];
    return (1 - t->smoothing) * right + t->smoothing * wrong + t->sft * losses[CHOSEN];
}
