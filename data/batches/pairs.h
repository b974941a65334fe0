// Preference pairs in a step: documents 2k and 2k+1 of each micro-batch are the chosen and the
// rejected answer of a record.
#pragma once

#include "plan.h"

typedef enum { PREFERENCE_OFF, PREFERENCE_DPO, PREFERENCE_SIMPO } Preference;

typedef struct {
    Preference kind;
    double beta, gamma, smoothing, sft_weight;
    const double *reference;  // DPO: sums of losses of all documents; NULL: 0, not known yet
} PairSettings;

// Sets the terms of a batch whose documents are these segments.
void pairs_fill(Batch *b, const PairSettings *s, const DocIndex *index, const Segment *segments);

// Over pairs. One is right if the chosen answer has the larger reward, and half right if both have
// the same, as at the start of DPO. chosen, rejected: rewards
typedef struct {
    double pairs, right, chosen, rejected;
} PairSums;

// Adds the pairs of a plan, if any. losses (num_segments): of its documents
void pairs_add(PairSums *sum, const PairSettings *s, const DocIndex *index, const StepPlan *plan,
               const double *losses);
