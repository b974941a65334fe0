// How well a model predicts documents: the sums of losses for --eval and --bench, and --eval's
// table by document length.
#pragma once

#include "../runs/run_options.h"
#include "../shards/dataset.h"
#include "model_face.h"

// Packs documents one after another into micro-batches, which the ranks take in turn.
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

// --eval: prints loss and perplexity of all documents. o: max_seqlen, micro_batch_tokens, long_docs
// and seed, which orders them. The segments of a split document are computed alone and count in the
// document's row.
bool evaluate(Dataset *data, const Options *o, ModelFace model, Error *err);
