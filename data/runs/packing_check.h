// Does packing change a result? The documents of one batch, packed and each alone.
#ifndef UNPAD_PACKING_CHECK_H
#define UNPAD_PACKING_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../batches/batch.h"

// The model under test: T rows of a batch, V = vocab_size
typedef struct {
    void *context;
    int32_t vocab_size;
    size_t num_grads;
    // Zeroes the gradients; losses are divided by num_targets.
    void (*begin)(void *context, int64_t num_targets);
    // losses (T) =, logits (T, V) =, and the gradients of the batch are added to the model's.
    void (*pass)(void *context, const Batch *batch, float *losses, float *logits);
    void (*get_grads)(void *context, float *grads);  // (num_grads)
} PackingSubject;

// Largest differences; Inf where a value is NaN. grad_error: relative, in the L2 norm.
typedef struct {
    double loss, logit, grad, grad_error;
} PackingDelta;

PackingDelta packing_check(const PackingSubject *subject, const Batch *packed);

// Losses and logits must agree to rounding of one row's sums, gradients to that of a sum over T
// rows. In bf16 a matmul of another T may add in another order, and every layer rounds to 2^-9.
bool packing_is_rounding(const PackingDelta *d, bool bf16);

void packing_print(const PackingDelta *d, const Batch *packed);

#endif
