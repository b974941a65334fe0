// --eval: loss and perplexity of a model on every document of a data set, by document length.
#ifndef UNPAD_EVALUATE_H
#define UNPAD_EVALUATE_H

#include "../base/error.h"
#include "../batches/batch.h"
#include "../shards/dataset.h"
#include "run_options.h"

// Documents of 2^b to 2^(b+1) - 1 tokens are row b.
enum { EVALUATION_ROWS = 48 };
typedef struct {
    int64_t docs, targets;
    double loss_sum;
} EvaluationRow;

typedef struct {
    const Options *o;  // max_seqlen, micro_batch_tokens, long_docs, seed: the order of documents
    int32_t rank, num_ranks;
    void *context;
    // losses_host (T) of a packed batch; 0 where there is no target
    void (*losses)(void *context, const Batch *batch, float *losses_host);
} Evaluation;

// rows (EVALUATION_ROWS): of this rank's micro-batches; every num_ranks-th is its. A segment of a
// split document is alone, its row that of the document.
bool evaluate(EvaluationRow *rows, Dataset *data, const Evaluation *e, Error *err);

// The table: rows of num_ranks ranks, one after another, added in their order.
void evaluation_print(const EvaluationRow *rows, int32_t num_ranks);

#endif
