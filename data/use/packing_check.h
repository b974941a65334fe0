// Does packing change a result? The documents of one batch, together and each alone. Does a machine
// compute it twice with the same bits?
#pragma once

#include "../batches/loader.h"
#include "../models/weights.h"
#include "model_face.h"

// Largest differences; Inf where a value is NaN. grad_error: relative, in the L2 norm. grad_norm:
// of the documents alone.
typedef struct {
    double loss, logit, grad, grad_error, grad_norm;
} PackingDelta;

// batch: packed or shared; docs: the same documents in the same order, packed
// losses_alone (T of docs) =  the losses of each document alone, in packed order
PackingDelta packing_check(ModelFace m, const Batch *batch, const Batch *docs, float *losses_alone);

// Losses and logits must agree to rounding of one row's sums, gradients to rounding of a sum over
// T rows. In bf16 a matmul of another T may add in another order, and every layer rounds to 2^-9.
bool packing_is_rounding(const PackingDelta *d, bool bf16);

// Computes the gradients of this rank's part of a step twice. Exit 11 names the first parameter
// whose bits differ.
bool packing_replay(ModelFace model, Parameters p, const StepData *data, int64_t step, Error *err);

// Checks the batch and prints how it differs; exit 11 where that is more than rounding. kit: a new
// file for dev/referee.py, "": none.
bool packing_report(ModelFace model, const Batch *batch, const Batch *docs, bool bf16,
                    const char *kit, Error *err);
