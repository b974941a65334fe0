// --eval: loss and perplexity of a model on every document of a data set, by document length.
#ifndef UNPAD_EVALUATE_H
#define UNPAD_EVALUATE_H

#include "../base/error.h"
#include "../batches/batch.h"
#include "../shards/dataset.h"
#include "run_options.h"

typedef struct {
    const Options *o;  // max_seqlen, micro_batch_tokens, long_docs, seed: the order of documents
    int32_t rank, num_ranks;
    void *context;
    // losses_host (T) of a packed batch; 0 where there is no target
    void (*losses)(void *context, const Batch *batch, float *losses_host);
    void (*gather)(void *out, const void *data, size_t bytes);  // comm_all_gather_host
} Evaluation;

// values (n) =  their sums over all ranks
void evaluation_sum(const Evaluation *e, double *values, size_t n);

// Prints the table. Every num_ranks-th micro-batch is a rank's. A segment of a split document is
// alone, its row that of the document.
bool evaluate(Dataset *data, const Evaluation *e, Error *err);

#endif
