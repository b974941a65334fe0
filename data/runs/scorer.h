// Sums the losses of documents: the one way in which --eval and --bench score. Documents are packed
// one after another into micro-batches, which the ranks take in turn.
#ifndef UNPAD_SCORER_H
#define UNPAD_SCORER_H

#include "model_face.h"
#include "run_options.h"

typedef struct {
    const Options *o;
    ModelFace model;
    Batch batch;
    float *losses;  // (micro_batch_tokens)
    DocView *docs;  // (num_docs) of this rank's micro-batch, and
    double **sums;  // where the losses of each are added
    int num_docs;
    int32_t tokens;  // in the micro-batch so far, which is packed by
    int32_t turn;    // this rank
} Scorer;

void scorer_open(Scorer *s, const Options *o, ModelFace model);

// Gives the next document, of at most micro_batch_tokens, its place. NULL: another rank scores it;
// else the caller fills in the result, whose losses are added to *sum by a later call.
DocView *scorer_next(Scorer *s, int32_t length, double *sum);

// Scores the rest; values (n) =  their sums over all ranks. NULL: after a failure, only frees.
void scorer_close(Scorer *s, double *values, size_t n);

#endif
